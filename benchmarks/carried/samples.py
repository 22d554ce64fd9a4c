"""Data sets that need no download, and small models: what every script here takes as given."""

from __future__ import annotations

import ast
import inspect
import json
import os
import pydoc
import random
import textwrap
from collections.abc import Sequence
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

TOPICS = ("argparse", "asyncio", "collections", "email", "logging", "sqlite3", "tarfile", "typing")


def report(**numbers: float) -> None:
    """One JSON line, for the comparison; of the first rank."""
    if os.environ.get("RANK", "0") == "0":
        print(json.dumps(numbers), flush=True)


def digits(size: int = 8, held_out: int = 297) -> tuple[TensorDataset, TensorDataset]:
    """Handwritten digits, (images of size x size, class): training and held-out samples."""
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32)[:, None] / 16
    images = nn.functional.interpolate(images, size=(size, size))
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    images, labels = images[order], torch.tensor(data.target)[order]
    cut = len(images) - held_out
    return TensorDataset(images[:cut], labels[:cut]), TensorDataset(images[cut:], labels[cut:])


class Lines(Dataset[tuple[dict[str, Any], int]]):
    """Lines of documentation as bytes, and the module that each is from."""

    def __init__(self, first: int, last: int) -> None:
        lines = [
            (line, label)
            for label, topic in enumerate(TOPICS)
            for line in _documentation(topic)
            if len(line) > 24
        ]
        random.Random(0).shuffle(lines)
        self.lines = lines[first:last]

    def __len__(self) -> int:
        return len(self.lines)

    def __getitem__(self, index: int) -> tuple[list[int], int]:
        line, label = self.lines[index]
        return list(line.encode("ascii", "replace"))[:64], label


def _documentation(topic: str) -> Sequence[str]:
    module = pydoc.locate(topic)
    texts = [
        inspect.getdoc(one) or "" for _, one in sorted(vars(module).items(), key=lambda p: p[0])
    ]
    return [line.strip() for text in texts for line in text.splitlines()]


def pad(rows: Sequence[tuple[list[int], int]]) -> tuple[dict[str, Tensor], Tensor]:
    """Lines of a batch, padded to the longest: a tokenizer's words for a model of transformers."""
    longest = max(len(row) for row, _ in rows)
    tokens = torch.tensor([row + [0] * (longest - len(row)) for row, _ in rows])
    labels = torch.tensor([label for _, label in rows])
    return {"input_ids": tokens, "attention_mask": (tokens > 0).long()}, labels


def text_windows(length: int = 64, count: int = 512) -> TensorDataset:
    """Windows of the Python library's own source as bytes: (tokens, next tokens)."""
    source = "".join(inspect.getsource(module) for module in SOURCES)
    tokens = torch.tensor(list(source.encode("ascii", "replace"))[: count * length + 1])
    return TensorDataset(tokens[:-1].view(-1, length), tokens[1:].view(-1, length))


SOURCES = (ast, random, textwrap)


def classifier(size: int = 8, width: int = 64) -> nn.Module:
    """A small convolutional network for `digits`, without BatchNorm."""
    return nn.Sequential(
        nn.Conv2d(1, width // 4, 3, padding=1),
        nn.GELU(),
        nn.Conv2d(width // 4, width // 2, 3, stride=2, padding=1),
        nn.GELU(),
        nn.Flatten(),
        nn.Linear(width // 2 * (size // 2) ** 2, width),
        nn.GELU(),
        nn.Linear(width, 10),
    )


def bert(num_labels: int = len(TOPICS)) -> nn.Module:
    """A small BERT of transformers, from initial weights, without dropout."""
    from transformers import BertConfig, BertForSequenceClassification

    return BertForSequenceClassification(
        BertConfig(
            vocab_size=128,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=64,
            max_position_embeddings=64,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            num_labels=num_labels,
        )
    )


def gpt2() -> nn.Module:
    """A small stock GPT-2 of transformers, from initial weights, without dropout."""
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=128,
            n_positions=64,
            n_embd=32,
            n_layer=2,
            n_head=2,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        )
    )
