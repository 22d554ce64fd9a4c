"""Small modules that do what users' modules do, to be cut at every place."""

from __future__ import annotations

import math
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

WORDS = 11
WIDTH = 8
Pair = namedtuple("Pair", "main extra")


def images(rows: int = 3, size: int = 8) -> Tensor:
    return torch.randn(rows, 3, size, size, dtype=torch.float64)


def words(rows: int = 3, length: int = 6) -> Tensor:
    return torch.randint(0, WORDS, (rows, length))


def rows(number: int = 3) -> Tensor:
    return torch.randn(number, WIDTH, dtype=torch.float64)


def sequences(number: int = 3, length: int = 5) -> Tensor:
    return torch.randn(number, length, WIDTH, dtype=torch.float64)


def linear(out: int = WIDTH) -> nn.Linear:
    return nn.Linear(WIDTH, out)


class UNet(nn.Module):
    """Skips from the way down to the way up, kept in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(
            nn.Sequential(nn.Conv2d(3 if i == 0 else 4, 4, 3, padding=1), nn.BatchNorm2d(4))
            for i in range(3)
        )
        self.up = nn.ModuleList(nn.Conv2d(8, 4, 3, padding=1) for _ in range(2))
        self.head = nn.Conv2d(4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for block in self.down:
            x = F.relu(block(x))
            kept.append(x)
            x = F.max_pool2d(x, 2) if len(kept) < 3 else x
        kept.pop()
        for block in self.up:
            x = F.interpolate(x, scale_factor=2.0)
            x = F.relu(block(torch.cat([x, kept.pop()], 1)))
        return self.head(x)


class Dense(nn.Module):
    """Every layer gets the list of all before it."""

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
    hidden: Tensor
    gate: Tensor | None = None


@dataclass
class ModelOutput(OrderedDict):  # type: ignore[type-arg]
    """As transformers has it: a mapping, a dataclass and a tuple at once."""

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
    """Blocks that return more than a tensor, in structures of several kinds."""

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
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("speed", 1.0 / 10 ** torch.arange(4.0).double(), persistent=False)

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        angle = torch.outer(positions.double(), self.speed)
        return angle.cos(), angle.sin()


class Language(nn.Module):
    """Tied embedding and head, rotary positions, masks and position ids made in the forward."""

    def __init__(
        self, *, layers: int = 3, shared: bool = False, act: bool = False, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(WORDS, WIDTH), nn.Embedding(32, WIDTH)
        self.rotary = Rotary()
        one = nn.ReLU() if act else None
        made = [Block(one, dropout) for _ in range(1 if shared else layers)]
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
    """Parameters used by the outermost forward; transposed values cross."""

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
    """In-place activations and sums, and writing into a tensor piece by piece."""

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
    """A tensor that every stage could make itself, but that a module changes in place."""

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
    """The batch itself is changed: the tensor, and the dict around it."""

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
    """Loops over a list with control flow on shapes; other heads in training."""

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


class Detached(nn.Module):
    """Values that cross without a gradient, some by one way only."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = linear(), linear(), linear(), linear(4)
        for parameter in self.b.parameters():
            parameter.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        a = self.a(x)
        b = self.b(a.detach())
        c = self.c(b + a)
        with torch.no_grad():
            d = self.b(c)
        return self.d(a.detach() * d + b) + c[:, :4]


class Frozen(nn.Module):
    """A frozen trunk under a trained head, run without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(linear(), nn.Tanh(), linear()).requires_grad_(False)
        self.head = nn.Sequential(linear(), nn.Tanh(), linear(4))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = self.trunk(x)
        return self.head(x)


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * x * grad  # on purpose not the derivative


class Special(nn.Module):
    """A function with a backward of its own, einsum, and the outermost code in between."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = linear(), linear(), linear(4)
        self.mix = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = Cube.apply(self.a(x))
        x = torch.einsum("bi,ij->bj", x, self.mix)
        return self.c(Cube.apply(self.b(x)).T.contiguous().T)


class Checkpointed(nn.Module):
    """Blocks that are recomputed in the backward pass, a part of the model at a time."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.blocks = nn.ModuleList(
            nn.Sequential(linear(), nn.Dropout(0.2), linear()) for _ in range(3)
        )
        self.head = linear(4)

    def _two(self, x: Tensor) -> Tensor:
        return self.blocks[1](self.blocks[0](x)).tanh()

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_() if self.reentrant else x
        x = checkpoint(self._two, x, use_reentrant=self.reentrant)
        x = checkpoint(self.blocks[2], x, use_reentrant=self.reentrant)
        return self.head(x)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, 2, batch_first=True)
        self.gru = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.head = linear(4)

    def forward(self, x: Tensor) -> Tensor:
        y, (h, c) = self.lstm(x)
        y, g = self.gru(y + x)
        return self.head(y[:, -1] + h[0] + c[1] + g[0])


class Encoder(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.head = linear(4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.encoder(x)
        x, _ = self.attention(x, x, x)
        return self.head(x.mean(1))


class Hooked(nn.Module):
    """Hooks before and after calls, inside and around; one keeps a feature for later."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Sequential(linear(), nn.Tanh()) for _ in range(3)))
        self.head = linear(4)
        self.blocks.register_forward_hook(lambda _, args, out: out + args[0])
        self.blocks[1].register_forward_pre_hook(lambda _, args: (args[0] * 2.0,))
        self.blocks[2].register_forward_hook(lambda _, __, out: out.sin())
        self.blocks[2].register_full_backward_hook(lambda _, gin, __: (gin[0] * 0.5,))
        self.register_forward_hook(lambda _, __, out: out * 3.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x))


class BackwardHooked(nn.Module):
    """Changes the gradient of a block as a whole: no cut may go through the block."""

    def __init__(self) -> None:
        super().__init__()
        self.first = linear()
        self.block = nn.Sequential(linear(), nn.Tanh(), linear())
        self.block.register_full_backward_hook(lambda _, gin, __: (gin[0].clamp(-0.1, 0.1),))
        self.head = linear(4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.block(self.first(x))
        if x.requires_grad:
            x.register_hook(lambda gradient: gradient.clamp(-0.05, 0.05))
        return self.head(x) + x[:, :4]


class Parametrized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = parametrizations.weight_norm(linear())
        self.b = parametrizations.orthogonal(linear())
        self.c = parametrizations.spectral_norm(linear())
        self.head = linear(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.c(self.b(self.a(x).tanh()).tanh()).tanh())


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(
            [
                nn.Sequential(OrderedDict(one=linear(), two=nn.Sequential(nn.Tanh(), linear()))),
                nn.ModuleDict({"a": linear(), "b": nn.ModuleList([linear(), linear()])}),
            ]
        )
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(WIDTH)) for _ in range(3))
        self.named = nn.ParameterDict({"x": nn.Parameter(torch.randn(WIDTH))})
        self.head = linear(4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.parts[0](x) * self.weights[0]
        part = self.parts[1]
        x = part["a"](x) + self.weights[1]
        for layer, weight in zip(part["b"], list(self.weights)[1:], strict=True):
            x = layer(x).tanh() * weight
        return self.head(x * self.named["x"])


class Cached(nn.Module):
    """One module leaves a value behind, a later one reads it: cuts between must not be offered."""

    class Writer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = linear()
            self.kept: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            x = self.layer(x)
            self.kept = x
            return x

    class Reader(nn.Module):
        def __init__(self, writer: nn.Module) -> None:
            super().__init__()
            self.layer = linear()
            self.others = [writer]

        def forward(self, x: Tensor) -> Tensor:
            x = self.layer(x)
            kept = self.others[0].kept
            return x if kept is None else x * kept.sigmoid()

    def __init__(self) -> None:
        super().__init__()
        self.first = linear()
        self.writer = Cached.Writer()
        self.middle = nn.Sequential(linear(), nn.Tanh())
        self.reader = Cached.Reader(self.writer)
        self.head = nn.Sequential(linear(), nn.Tanh(), linear(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.reader(self.middle(self.writer(self.first(x)))))


class Appending(nn.Module):
    """Modules add to a list that they are given, and the outermost code reads it later."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = linear()

        def forward(self, x: Tensor, seen: list[Tensor]) -> Tensor:
            x = self.layer(x).tanh()
            seen.append(x)
            return x

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(linear(), nn.Tanh())
        self.layers = nn.ModuleList(Appending.Layer() for _ in range(3))
        self.head = linear(4)

    def forward(self, x: Tensor) -> Tensor:
        seen: list[Tensor] = []
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x, seen)
        return self.head(x + (sum(seen) if seen else 0.0))


class Counting(nn.Module):
    """Numbers kept by modules from call to call, and read elsewhere."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = linear()
            self.calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return self.layer(x) / self.calls

    def __init__(self) -> None:
        super().__init__()
        self.first = linear()
        self.scaled = Counting.Scaled()
        self.middle = linear()
        self.last = nn.Sequential(linear(), linear(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.middle(self.scaled(self.first(x)))
        return self.last(x * self.scaled.calls)


class Remembering(nn.Module):
    """The mean of all batches so far, kept by assigning to a buffer."""

    class Mean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = linear()
            self.register_buffer("mean", torch.zeros(WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            x = self.layer(x)
            if self.training:
                self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
            return x - self.mean

    def __init__(self) -> None:
        super().__init__()
        self.first, self.mean, self.last = linear(), Remembering.Mean(), linear(4)
        self.shared = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.shared(self.first(x))
        x = self.shared(self.mean(x))
        return self.last(x)


class Constants(nn.Module):
    """Tensors that are neither parameters nor buffers, and random ones made in the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.linspace(0, 1, WIDTH, dtype=torch.float64)
        self.a, self.b, self.c = linear(), linear(), linear(4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x * self.table)
        noise = torch.rand(len(x), WIDTH, dtype=x.dtype, device=x.device)
        x = F.dropout(self.b(x + noise), 0.3, self.training)
        return self.c(x * self.table + noise * torch.tensor(0.5, dtype=x.dtype))


class ValueDependent(nn.Module):
    class Gate(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x if x.sum() > 0 else -x

    def __init__(self) -> None:
        super().__init__()
        self.first, self.gate, self.last = linear(), ValueDependent.Gate(), linear(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.gate(self.first(x)))


class KeepsEval(nn.Module):
    """Its statistics stay frozen whatever it is told, as detectors do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(linear(), nn.BatchNorm1d(WIDTH), linear(4))

    def train(self, mode: bool = True) -> nn.Module:
        super().train(mode)
        self.layers[1].eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Gradients(nn.Module):
    """A gradient in the forward pass, as a force of an energy: no cut between."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.first = linear(), linear()
        self.energy, self.last = linear(1), linear(4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            h = self.first(self.stem(x))
            place = h if h.requires_grad else h.requires_grad_()
            energy = self.energy(place.tanh()).sum()
            (force,) = torch.autograd.grad(energy, place, create_graph=True)
        return self.last(h + force)


class Complex(nn.Module):
    """Spectra, conjugates and strange strides cross."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = linear(), linear(), linear(4)

    def forward(self, x: Tensor) -> Tensor:
        spectrum = torch.fft.fft(self.a(x)).conj()
        shape = spectrum.imag
        wide = x[:, :1].expand(-1, WIDTH)
        every = self.a(x)[:, ::2]
        y = self.b(x + shape)
        return self.c((spectrum * y).real + wide) + every


class ChannelsLast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(3, 3, 3, padding=1) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(memory_format=torch.channels_last)
        for layer in self.layers:
            x = layer(x).relu()
        return x.permute(0, 2, 3, 1).mean((1, 2))


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 4, 3),
            nn.BatchNorm2d(4),
            nn.ReLU(inplace=True),
            nn.Dropout(0.3),
            nn.Conv2d(4, 4, 3),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(64, 4),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


class DirectUse(nn.Module):
    """The outermost code uses weights of children, and calls `forward` past the hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = linear(), linear(), linear(4)

    def forward(self, x: Tensor) -> Tensor:
        gate = torch.sigmoid(self.b.weight).mean(0)
        x = F.linear(self.a(x), self.b.weight.T) * gate
        x = self.b.forward(x) / math.sqrt(WIDTH)
        dtype = next(self.c.parameters()).dtype if list(self.c.parameters()) else x.dtype
        return self.c(self.a(x).to(dtype) * gate)


@dataclass(frozen=True)
class Case:
    """A module, and inputs of one or more shapes."""

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
    "keeps eval": Case(KeepsEval, rows),
    "gradients": Case(Gradients, rows),
    "complex": Case(Complex, rows),
    "channels last": Case(ChannelsLast, images),
    "convolutions": Case(Convolutions, images),
    "direct use": Case(DirectUse, rows),
}
