"""A decoder-only transformer, and presets of well-known sizes.

Pre-LayerNorm blocks, learned positions, GELU, causal attention through torch's fused kernel.
The presets gpt2 to gpt2-xl have the shapes of GPT-2 (Radford et al. 2019, Table 2). With the
vocabulary of GPT-2 and 1024 positions, they have exactly its number of parameters. The presets from
gpt-124m on have the shapes of GPT-3 (Brown et al. 2020, Table 2.1). Two values differ from that
table, because heads times head size has to be the width: 16 heads and not 24 at 1.3B (24 x 128 is
not 2048), and width 5120 and not 5140 at 13B (40 x 128).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bigtrain.errors import ConfigError, did_you_mean

BYTE_VOCABULARY = 256
"""Size of the vocabulary of a model whose tokens are bytes."""
GPT2_VOCABULARY = 50257
"""Size of the vocabulary of GPT-2 and GPT-3."""


_MOST = {
    "num_layers": 1 << 13,
    "width": 1 << 17,
    "num_heads": 1 << 17,
    "vocab_size": 1 << 30,
    "sequence_length": 1 << 32,
}
"""Limits of a shape, beyond any trained model. A larger number is a mistake, and is refused before
memory is allocated for it."""


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """The shape of a GPT model.

    Raises:
        ConfigError: a value is out of range, or `num_heads` does not divide `width`.
    """

    vocab_size: int = BYTE_VOCABULARY
    sequence_length: int = 128
    """The most tokens in a sample; the number of learned positions."""
    num_layers: int = 4
    width: int = 256
    """Length of the vector of a token between blocks."""
    num_heads: int = 4
    dropout: float = 0.0
    """Probability of dropout after the embedding, in attention, and after attention and MLP."""
    bias: bool = True
    """Whether LayerNorm and all projections except the head have biases."""
    tie_embeddings: bool = True
    """Whether the head and the token embedding share one weight."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            _check_type(field, getattr(self, field.name))
        for name, most in _MOST.items():
            if getattr(self, name) > most:
                raise ConfigError(
                    f"model.args.{name}={getattr(self, name)} is too large. Use "
                    f"model.args.{name}={most} or less."
                )
        if not 0 <= self.dropout < 1:
            raise ConfigError(
                f"model.args.dropout={self.dropout} is not in [0, 1). Use model.args.dropout=0.1."
            )
        if self.width % self.num_heads:
            most = min(self.num_heads, self.width + 1)
            divisor = max(n for n in range(1, most) if self.width % n == 0)
            raise ConfigError(
                f"model.args.num_heads={self.num_heads} does not divide width={self.width}. "
                f"Use model.args.num_heads={divisor}."
            )

    @property
    def num_parameters(self) -> int:
        """Elements of all parameters of the model; a tied weight counts once."""
        matrices = 12 * self.width**2  # 3 for query, key, value; 1 for attention output; 8 for MLP
        biases = 9 * self.width if self.bias else 0
        norm = 2 * self.width if self.bias else self.width
        embeddings = (self.vocab_size + self.sequence_length) * self.width
        output = 0 if self.tie_embeddings else self.vocab_size * self.width
        return embeddings + self.num_layers * (matrices + biases + 2 * norm) + norm + output

    @classmethod
    def from_preset(cls, name: str, args: Mapping[str, Any]) -> GPTConfig:
        """Return a preset with some fields replaced.

        Args:
            name: a key of `PRESETS`.
            args: the fields to replace, by name.

        Raises:
            ConfigError: a field is unknown, or a value has the wrong type or is out of range.
        """
        known = [field.name for field in dataclasses.fields(cls)]
        for key in args:
            if key not in known:
                raise ConfigError(
                    f"model.args.{key}: {name} has no argument {key!r}"
                    f"{did_you_mean(key, known) or '.'} Known: {', '.join(known)}."
                )
        return cls(**{**PRESETS[name], **args})


def _check_type(field: dataclasses.Field[Any], value: object) -> None:
    kind = str(field.type)
    if kind == "bool":
        fits, needed = isinstance(value, bool), "true or false"
    elif kind == "float":
        fits, needed = isinstance(value, (int, float)) and not isinstance(value, bool), "a number"
    else:
        is_whole = isinstance(value, int) and not isinstance(value, bool)
        fits, needed = (
            is_whole and isinstance(value, int) and value >= 1,
            "a whole number, at least 1",
        )
    if not fits:
        raise ConfigError(
            f"model.args.{field.name}={value!r} needs {needed}. "
            f"Use model.args.{field.name}={str(field.default).lower()}."
        )


def _shape(
    num_layers: int, width: int, num_heads: int, vocab_size: int, sequence_length: int
) -> Mapping[str, int]:
    return MappingProxyType(
        {
            "num_layers": num_layers,
            "width": width,
            "num_heads": num_heads,
            "vocab_size": vocab_size,
            "sequence_length": sequence_length,
        }
    )


PRESETS: Mapping[str, Mapping[str, int]] = MappingProxyType(
    {
        "gpt": _shape(4, 256, 4, BYTE_VOCABULARY, 128),
        "gpt-10m": _shape(6, 384, 6, BYTE_VOCABULARY, 256),
        "gpt-50m": _shape(8, 512, 8, GPT2_VOCABULARY, 512),
        "gpt2": _shape(12, 768, 12, GPT2_VOCABULARY, 1024),
        "gpt2-medium": _shape(24, 1024, 16, GPT2_VOCABULARY, 1024),
        "gpt2-large": _shape(36, 1280, 20, GPT2_VOCABULARY, 1024),
        "gpt2-xl": _shape(48, 1600, 25, GPT2_VOCABULARY, 1024),
        "gpt-124m": _shape(12, 768, 12, GPT2_VOCABULARY, 1024),
        "gpt-350m": _shape(24, 1024, 16, GPT2_VOCABULARY, 2048),
        "gpt-760m": _shape(24, 1536, 16, GPT2_VOCABULARY, 2048),
        "gpt-1.3b": _shape(24, 2048, 16, GPT2_VOCABULARY, 2048),
        "gpt-2.7b": _shape(32, 2560, 32, GPT2_VOCABULARY, 2048),
        "gpt-6.7b": _shape(32, 4096, 32, GPT2_VOCABULARY, 2048),
        "gpt-13b": _shape(40, 5120, 40, GPT2_VOCABULARY, 2048),
        "gpt-175b": _shape(96, 12288, 96, GPT2_VOCABULARY, 2048),
    }
)

# Shape suffixes below: B samples, T tokens, W width, H heads, D = W / H, F = 4 W, V vocabulary.


class Attention(nn.Module):
    """Causal self-attention from (batch, seq, width) to (batch, seq, width)."""

    is_causal = True
    """As in the attention layers of transformers: a causal layer needs no mask of padding."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.dropout = config.dropout
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=config.bias)
        self.output = nn.Linear(config.width, config.width, bias=config.bias)

    def forward(self, x_BTW: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Mix each token with the tokens before it, or as a mask allows; see `GPT.forward`."""
        heads = (self.num_heads, -1)
        q_BHTD, k_BHTD, v_BHTD = (
            part_BTW.unflatten(-1, heads).transpose(1, 2)
            for part_BTW in self.qkv(x_BTW).chunk(3, dim=-1)
        )
        dropout = self.dropout if self.training else 0.0
        mixed_BHTD = F.scaled_dot_product_attention(
            q_BHTD,
            k_BHTD,
            v_BHTD,
            attn_mask=attention_mask,
            dropout_p=dropout,
            is_causal=attention_mask is None,
        )
        mixed_BTW = mixed_BHTD.transpose(1, 2).flatten(-2)
        out_BTW: Tensor = self.output(mixed_BTW)
        return out_BTW


class MLP(nn.Module):
    """Two projections around a GELU, from (batch, seq, width) to (batch, seq, width)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.expand = nn.Linear(config.width, 4 * config.width, bias=config.bias)
        self.activation = nn.GELU()
        self.output = nn.Linear(4 * config.width, config.width, bias=config.bias)

    def forward(self, x_BTW: Tensor) -> Tensor:
        """Transform each token independently."""
        hidden_BTF = self.activation(self.expand(x_BTW))
        out_BTW: Tensor = self.output(hidden_BTF)
        return out_BTW


class Block(nn.Module):
    """Attention, then an MLP, each on a normalised input and with a residual connection."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width, bias=config.bias)
        self.attention = Attention(config)
        self.mlp_norm = nn.LayerNorm(config.width, bias=config.bias)
        self.mlp = MLP(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x_BTW: Tensor, *masks: Tensor) -> Tensor:
        """Transform (batch, seq, width), with at most one mask; see `GPT.forward`."""
        x_BTW = x_BTW + self.dropout(self.attention(self.attention_norm(x_BTW), *masks))
        out_BTW: Tensor = x_BTW + self.dropout(self.mlp(self.mlp_norm(x_BTW)))
        return out_BTW


class Embedding(nn.Module):
    """Token and position embeddings: (batch, seq) to (batch, seq, width)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.token = nn.Embedding(config.vocab_size, config.width)
        self.position = nn.Embedding(config.sequence_length, config.width)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, tokens_BT: Tensor, position_ids: Tensor | None = None) -> Tensor:
        """Return the sum of the embeddings of the tokens and of their positions.

        Args:
            tokens_BT: (batch, seq), int64.
            position_ids: (batch, seq), int64; None counts from 0 in each sample.

        Raises:
            ConfigError: a sample has more tokens than there are positions.
        """
        length, limit = tokens_BT.shape[1], self.position.num_embeddings
        if length > limit:
            raise ConfigError(
                f"model.args.sequence_length={limit}, but the input has {length} tokens. "
                f"Use model.args.sequence_length={length}, or shorter samples."
            )
        if position_ids is None:
            position_ids = torch.arange(length, device=tokens_BT.device)
        x_BTW: Tensor = self.dropout(self.token(tokens_BT) + self.position(position_ids))
        return x_BTW


class GPT(nn.Module):
    """A language model: tokens (batch, seq), int64, to logits (batch, seq, vocabulary).

    The embedding, the blocks, the norm and the head are applied one after the other, so the
    model can be cut between any two of these modules.

    Args:
        config: the shape of the model.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = Embedding(config)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.LayerNorm(config.width, bias=config.bias)
        self.head = nn.Linear(config.width, config.vocab_size, bias=False)
        if config.tie_embeddings:
            self.head.weight = self.embedding.token.weight
        self._initialize()

    def forward(
        self,
        tokens_BT: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
    ) -> Tensor:
        """Return the logits of the next token at each position.

        Args:
            tokens_BT: (batch, seq), int64.
            attention_mask: (batch, 1, seq, seq), bool: true where a token sees another token. With
                None, a token sees itself and the tokens before it.
            position_ids: (batch, seq), int64; None counts from 0 in each sample.

        Raises:
            ConfigError: the input is longer than the model's sequence length.
        """
        positions = () if position_ids is None else (position_ids,)
        masks = () if attention_mask is None else (attention_mask,)
        x_BTW = self.embedding(tokens_BT, *positions)
        for block in self.blocks:
            x_BTW = block(x_BTW, *masks)
        logits_BTV: Tensor = self.head(self.norm(x_BTW))
        return logits_BTV

    def _initialize(self) -> None:
        # Each block adds two branches to the residual stream. The scale of their last projections
        # keeps the variance of the stream independent of the number of blocks (GPT-2).
        branch = 0.02 / math.sqrt(2 * self.config.num_layers)
        for name, module in self.named_modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                std = branch if name.endswith(".output") else 0.02
                nn.init.normal_(module.weight, std=std)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
