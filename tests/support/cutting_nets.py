"""Small modules with the features of users' models, to be cut at every legal place."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.nn.functional as F
from support.cutting_configured import Configured, ConfiguredEarly, ConfiguredTaken
from support.cutting_odd_nets import (
    WIDTH,
    Appending,
    BackwardHooked,
    Cached,
    ChannelsLast,
    Checkpointed,
    Complex,
    Constants,
    Convolutions,
    Counting,
    Detached,
    DirectUse,
    Encoder,
    Frozen,
    Gradients,
    Hooked,
    KeepsEval,
    LooksAtValues,
    Nested,
    Parametrized,
    Recurrent,
    Remembering,
    Special,
    linear,
)
from torch import Tensor, nn

WORDS = 11
Pair = namedtuple("Pair", "main extra")


def images(rows: int = 3, size: int = 8) -> Tensor:
    """Random images (rows, 3, size, size)."""
    return torch.randn(rows, 3, size, size, dtype=torch.float64)


def words(rows: int = 3, length: int = 6) -> Tensor:
    """Random tokens (rows, length)."""
    return torch.randint(0, WORDS, (rows, length))


def rows(number: int = 3) -> Tensor:
    """Random vectors (number, WIDTH) in float64."""
    return torch.randn(number, WIDTH, dtype=torch.float64)


def sequences(number: int = 3, length: int = 5) -> Tensor:
    """Random sequences (number, length, WIDTH) in float64."""
    return torch.randn(number, length, WIDTH, dtype=torch.float64)


class UNet(nn.Module):
    """Skip connections from the downward path to the upward path, collected in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(
            nn.Sequential(nn.Conv2d(3 if i == 0 else 4, 4, 3, padding=1), nn.BatchNorm2d(4))
            for i in range(3)
        )
        self.up = nn.ModuleList(nn.Conv2d(8, 4, 3, padding=1) for _ in range(2))
        self.head = nn.Conv2d(4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for block in self.down:
            x = F.relu(block(x))
            skips.append(x)
            x = F.max_pool2d(x, 2) if len(skips) < 3 else x
        skips.pop()
        for block in self.up:
            x = F.interpolate(x, scale_factor=2.0)
            x = F.relu(block(torch.cat([x, skips.pop()], 1)))
        return self.head(x)


class Dense(nn.Module):
    """Every layer gets the list of the outputs of all layers before it."""

    class Layer(nn.Module):
        def __init__(self, before: int) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3 + 2 * before, 2, 3, padding=1)

        def forward(self, features: list[Tensor]) -> Tensor:
            return F.relu(self.conv(torch.cat(features, 1)))

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({f"layer{i}": Dense.Layer(i) for i in range(4)})

    def forward(self, x: Tensor) -> Tensor:
        features = [x]
        for layer in self.layers.values():
            features.append(layer(features))
        return torch.cat(features, 1).mean(dim=(2, 3))


@dataclass
class Both:
    """A dataclass of a tensor and an optional tensor."""

    hidden: Tensor
    gate: Tensor | None = None


@dataclass
class ModelOutput(OrderedDict):  # type: ignore[type-arg]
    """An output as in transformers: a mapping, a dataclass and a tuple at once."""

    logits: Tensor | None = None
    hidden: tuple[Tensor, ...] | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            if getattr(self, field.name) is not None:
                self[field.name] = getattr(self, field.name)

    def __getitem__(self, key: Any) -> Any:
        return dict(self.items())[key] if isinstance(key, str) else tuple(self.values())[key]

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)


class Returning(nn.Module):
    """Blocks that return several values, in structures of several kinds."""

    class Block(nn.Module):
        def __init__(self, kind: str) -> None:
            super().__init__()
            self.kind = kind
            self.a, self.b = linear(), linear()

        def forward(self, x: Tensor) -> Any:
            a, b = self.a(x), torch.tanh(self.b(x))
            return {
                "tuple": (a, None, b),
                "named": Pair(a, b),
                "dict": {"a": a, "none": None, "deep": [b, {"n": 3}]},
                "dataclass": Both(a, b),
                "twice": (a, a, b),
                "output": ModelOutput(a, (b,)),
            }[self.kind]

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.blocks = nn.Sequential(*(Returning.Block(kind) for _ in range(3)))
        self.head = linear(4)

    def forward(self, x: Tensor) -> Any:
        first = None
        for block in self.blocks:
            y = block(x)
            a, b = {
                "tuple": lambda y: (y[0], y[2]),
                "named": lambda y: (y.main, y.extra),
                "dict": lambda y: (y["a"], y["deep"][0]),
                "dataclass": lambda y: (y.hidden, y.gate),
                "twice": lambda y: (y[0] + y[1], y[2]),
                "output": lambda y: (y[0], y.hidden[0]),
            }[self.kind](y)
            x = x + a * b
            first = b if first is None else first
        logits = self.head(x)
        if self.kind == "output":
            return ModelOutput(logits, (first, x))
        return {"logits": logits, "none": None, "first": (first, 2)}


class Attention(nn.Module):
    """Attention with a mask and rotary positions."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = linear(3 * WIDTH), linear()

    def forward(
        self, x: Tensor, *, rotary: tuple[Tensor, Tensor] | None = None, mask: Tensor | None = None
    ) -> Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 2, 12).transpose(1, 2).chunk(3, -1)
        if rotary is not None:
            cos, sin = rotary
            q, k = (t * cos + t.flip(-1) * sin for t in (q, k))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.out(y.transpose(1, 2).reshape(x.shape))


class Block(nn.Module):
    """A transformer block, whose activation may be shared with other blocks."""

    def __init__(self, act: nn.Module | None = None, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.mlp = nn.Sequential(linear(16), act or nn.GELU(), nn.Linear(16, WIDTH))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, **options: Any) -> Tensor:
        x = x + self.dropout(self.attention(self.norm1(x), **options))
        return x + self.dropout(self.mlp(self.norm2(x)))


class Rotary(nn.Module):
    """The cosines and sines of positions."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("speed", 1.0 / 10 ** torch.arange(4.0), persistent=False)

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        angle = torch.outer(positions.to(self.speed), self.speed)
        return angle.cos(), angle.sin()


class Language(nn.Module):
    """Tied embedding and head; rotary positions, masks and position ids made in the
    forward pass.
    """

    def __init__(
        self, *, layers: int = 3, shared: bool = False, act: bool = False, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(WORDS, WIDTH), nn.Embedding(32, WIDTH)
        self.rotary = Rotary()
        activation = nn.ReLU() if act else None
        made = [Block(activation, dropout) for _ in range(1 if shared else layers)]
        self.blocks = nn.ModuleList(made)
        self.repeat = layers if shared else 1
        self.norm = nn.LayerNorm(WIDTH)
        self.head = linear(WORDS)
        self.head.weight = self.embed.weight

    def forward(self, inputs: Any) -> Tensor:
        ids = inputs["ids"] if isinstance(inputs, dict) else inputs
        positions = torch.arange(ids.shape[1], device=ids.device)
        mask = (positions[None] <= positions[:, None])[None, None] & (ids != 0)[:, None, None]
        mask = mask | torch.eye(ids.shape[1], dtype=torch.bool, device=ids.device)
        x = self.embed(ids) + self.place(positions)
        rotary = self.rotary(positions)
        for block in list(self.blocks) * self.repeat:
            x = block(x, rotary=rotary, mask=mask)
        if isinstance(inputs, dict):
            x = x * inputs["scale"][:, None, None]
        return self.head(self.norm(x))


class Vision(nn.Module):
    """The outermost forward uses parameters; transposed tensors cross the cuts."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, WIDTH, 4, 4)
        self.token = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.place = nn.Parameter(torch.randn(1, 5, WIDTH))
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.blocks = nn.Sequential(Block(), Block())
        self.head = linear(4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.place
        x = self.blocks(x * self.scale) * self.scale
        return self.head(x[:, 0])


class InPlace(nn.Module):
    """In-place activations and sums, and a tensor that is written piece by piece."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(linear(), nn.ReLU(inplace=True), linear()) for _ in range(3)
        )
        self.head = linear(4)

    def forward(self, x: Tensor) -> Tensor:
        x = x * 1.0
        gathered = torch.zeros(len(x), 3, dtype=x.dtype, device=x.device)
        for i, layer in enumerate(self.layers):
            x += layer(x.clone())
            gathered[:, i] = x.mean(1)
        y = torch.zeros(len(x), 4, dtype=x.dtype, device=x.device)
        y += self.head(x)
        return y + gathered.sum(1, keepdim=True)


class MaskFilledByAModule(nn.Module):
    """A tensor that every stage could make for itself, but that a module changes in place."""

    class Fill(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = linear()

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            mask[:, 0] = 3.0
            mask.mul_(2.0)
            return self.layer(x)

    def __init__(self) -> None:
        super().__init__()
        self.fill = MaskFilledByAModule.Fill()
        self.layers = nn.Sequential(linear(), linear(), linear(4))

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.ones(len(x), WIDTH, dtype=x.dtype, device=x.device)
        part = torch.zeros_like(mask)
        x = self.fill(x, mask)
        x = self.layers[0](x * mask)
        torch.add(mask, x.detach(), out=part)
        x = self.layers[1](x + part)
        return self.layers[2](x * mask + part)


class ChangesItsInputs(nn.Module):
    """The forward pass changes the batch: the tensor, and the dict that contains it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(linear(), linear(), linear(4))

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        x = inputs.pop("x")
        x -= 1.0
        x = self.layers[0](x) + inputs["y"]
        inputs["y"].mul_(2.0)
        return self.layers[2](self.layers[1](x) + inputs["y"])


class Branching(nn.Module):
    """Loops over a list, control flow that depends on shapes, and a different head in training."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(linear() for _ in range(4))
        self.aux, self.head, self.only_eval = linear(4), linear(4), linear(4)

    def forward(self, x: Tensor) -> Any:
        aux = None
        for i, layer in enumerate(self.layers):
            x = layer(x) if x.shape[0] > 1 or i % 2 else layer(x).tanh()
            if i == 1 and self.training:
                aux = self.aux(x)
        if self.training:
            return {"out": self.head(x), "aux": aux}
        return {"out": self.only_eval(x) + self.head(x)}


class Mapped(nn.Module):
    """A function mapped over the batch, around module calls and between them."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = linear(), linear(), linear(4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        x = x * torch.vmap(torch.dot)(x, x)[:, None]
        return self.c(torch.vmap(lambda row: self.b(row.sin()) * row)(x).tanh())


@dataclass(frozen=True)
class Case:
    """A module, and functions that make inputs of one or more shapes."""

    make: Callable[[], nn.Module]
    inputs: Callable[[], Any]
    others: tuple[Callable[[], Any], ...] = ()


CASES = {
    "unet": Case(UNet, images, (lambda: images(2, 16), lambda: images(1))),
    "dense": Case(Dense, images),
    **{
        f"returns {kind}": Case(lambda kind=kind: Returning(kind), rows, (lambda: rows(2),))
        for kind in ("tuple", "named", "dict", "dataclass", "twice", "output")
    },
    "language": Case(Language, words, (lambda: words(3, 4), lambda: words(1))),
    "language of dicts": Case(
        Language,
        lambda: {"ids": words(), "scale": torch.randn(3, dtype=torch.float64), "note": "x"},
    ),
    "shared layers": Case(lambda: Language(shared=True), words),
    "shared activation": Case(lambda: Language(act=True), words),
    "dropout": Case(lambda: Language(dropout=0.3, layers=2), words),
    "vision": Case(Vision, images),
    "in place": Case(InPlace, rows, (lambda: rows(2),)),
    "mask filled": Case(MaskFilledByAModule, rows),
    "changes inputs": Case(ChangesItsInputs, lambda: {"x": rows(), "y": rows()}),
    "branching": Case(Branching, rows, (lambda: rows(1),)),
    "detached": Case(Detached, rows),
    "frozen": Case(Frozen, rows),
    "mapped": Case(Mapped, rows),
    "special": Case(Special, rows),
    "checkpoint": Case(lambda: Checkpointed(reentrant=False), rows),
    "checkpoint reentrant": Case(lambda: Checkpointed(reentrant=True), rows),
    "recurrent": Case(Recurrent, sequences, (lambda: sequences(3, 3),)),
    "encoder": Case(Encoder, sequences),
    "encoder with dropout": Case(lambda: Encoder(0.2), sequences),
    "hooked": Case(Hooked, rows),
    "backward hook": Case(BackwardHooked, rows),
    "parametrized": Case(Parametrized, rows),
    "nested": Case(Nested, rows),
    "cached": Case(Cached, rows),
    "appending": Case(Appending, rows),
    "counting": Case(Counting, rows),
    "remembering": Case(Remembering, rows),
    "constants": Case(Constants, rows),
    "looks at values": Case(LooksAtValues, rows),
    "keeps eval": Case(KeepsEval, rows),
    "gradients": Case(Gradients, rows),
    "complex": Case(Complex, rows),
    "channels last": Case(ChannelsLast, images),
    "convolutions": Case(Convolutions, images),
    "direct use": Case(DirectUse, rows),
    "configured": Case(Configured, rows),
    "configured early": Case(ConfiguredEarly, rows),
    "configured through its dict": Case(ConfiguredTaken, rows),
}
