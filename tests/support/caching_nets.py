"""A small language model that returns a key-value cache, as the models of transformers do."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor, nn


class Settings:
    """A configuration object like that of transformers; one configuration may contain another."""

    def __init__(self, **settings: Any) -> None:
        self.use_cache, self.architectures = True, None
        vars(self).update(settings)

    def to_json_string(self) -> str:
        """The JSON text that is written next to a checkpoint."""
        return json.dumps({"use_cache": self.use_cache})


class Cache:
    """Collects the values of every layer, so that they bypass every cut."""

    def __init__(self) -> None:
        self.kept: list[Tensor] = []


class CachingBlock(nn.Module):
    """A residual layer that appends its input to a cache if there is one."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.key, self.out = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor, cache: Cache | None) -> Tensor:
        key = self.key(x)
        if cache is not None:
            cache.kept.append(key)
        return x + self.out(torch.tanh(key))


class CachingLM(nn.Module):
    """Returns logits, and with `config.use_cache` also the keys of all its blocks."""

    def __init__(self, blocks: int = 4, width: int = 16, words: int = 13) -> None:
        super().__init__()
        self.config = Settings()
        self.embed = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(CachingBlock(width) for _ in range(blocks))
        self.head = nn.Linear(width, words)

    def forward(self, tokens: Tensor) -> dict[str, Any]:
        cache = Cache() if self.config.use_cache else None
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, cache)
        return {"logits": self.head(x), "keys": cache.kept if cache is not None else None}


class Around(nn.Module):
    """A user's wrapper around `CachingLM`, whose configuration contains the inner configuration."""

    def __init__(self) -> None:
        super().__init__()
        self.net = CachingLM()
        self.net.config = Settings(text=Settings(), use_cache=False)

    def forward(self, tokens: Tensor) -> Any:
        return self.net(tokens)["logits"]
