"""Small modules that are hard to cut: stopped gradients, gradient queries, hooks, state,
constants.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

WIDTH = 8


def linear(out: int = WIDTH) -> nn.Linear:
    """A linear layer from WIDTH to `out` features."""
    return nn.Linear(WIDTH, out)


class Detached(nn.Module):
    """Values cross without a gradient; some have a gradient on one path only."""

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
    """A frozen trunk, run without gradients, below a trained head."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(linear(), nn.Tanh(), linear()).requires_grad_(False)
        self.head = nn.Sequential(linear(), nn.Tanh(), linear(4))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = self.trunk(x)
        return self.head(x)


class Cube(torch.autograd.Function):
    """x^3 with a deliberately different gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * x * grad  # deliberately not the derivative, so that autograd's would differ


class Special(nn.Module):
    """An autograd function with a custom backward, einsum, and outermost code in between."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = linear(), linear(), linear(4)
        self.mix = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = Cube.apply(self.a(x))
        x = torch.einsum("bi,ij->bj", x, self.mix)
        return self.c(Cube.apply(self.b(x)).T.contiguous().T)


class Checkpointed(nn.Module):
    """Blocks that are recomputed in the backward pass; one recomputed part spans two blocks."""

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
    """An LSTM and a GRU, whose final states are used as well as their outputs."""

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
    """torch's transformer encoder and attention module."""

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
    """Hooks before and after calls, inside and outside; one stores a feature for later."""

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
    """A hook changes the gradient of a whole block, so no cut may go through the block."""

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
    """Weights with torch's parametrizations: weight, orthogonal and spectral norm."""

    def __init__(self) -> None:
        super().__init__()
        self.a = parametrizations.weight_norm(linear())
        self.b = parametrizations.orthogonal(linear())
        self.c = parametrizations.spectral_norm(linear())
        self.head = linear(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.c(self.b(self.a(x).tanh()).tanh()).tanh())


class Nested(nn.Module):
    """Modules and parameters in nested lists and dicts."""

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
    """One module stores a value that a later one reads, so no cut between them may be offered."""

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
    """Modules append to a list that they receive, and the outermost code reads it later."""

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
    """Modules store numbers from call to call, and other modules read them."""

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
    """The mean of all batches so far, stored by assigning to a buffer."""

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
    """Tensors that are neither parameters nor buffers, and random ones made in the forward pass."""

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
    """A gate whose path depends on a value."""

    class Gate(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x if x.sum() > 0 else -x

    def __init__(self) -> None:
        super().__init__()
        self.first, self.gate, self.last = linear(), ValueDependent.Gate(), linear(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.gate(self.first(x)))


class LooksAtValues(nn.Module):
    """A shortcut for a mask of all ones, skipped when compiled, as in transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = linear(), linear(), linear(4)

    def forward(self, x: Tensor) -> Tensor:
        mask: Tensor | None = (x.abs() >= 0).to(x.dtype)
        if not torch.compiler.is_compiling() and bool(mask.all()):
            mask = None
        x = self.b(self.a(x))
        return self.c(x if mask is None else x * mask)


class KeepsEval(nn.Module):
    """Its statistics stay frozen even after `train()`, as in detectors."""

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
    """A gradient computed in the forward pass, as a force is of an energy: no cut inside."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.first = linear(), linear()
        self.energy, self.last = linear(1), linear(4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            h = self.first(self.stem(x))
            trained_input = h if h.requires_grad else h.requires_grad_()
            energy = self.energy(trained_input.tanh()).sum()
            (force,) = torch.autograd.grad(energy, trained_input, create_graph=True)
        return self.last(h + force)


class Complex(nn.Module):
    """Spectra, conjugates and unusual strides cross the cuts."""

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
    """Activations in channels-last memory format cross the cuts."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(3, 3, 3, padding=1) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(memory_format=torch.channels_last)
        for layer in self.layers:
            x = layer(x).relu()
        return x.permute(0, 2, 3, 1).mean((1, 2))


class Convolutions(nn.Module):
    """Convolutions with pooling and normalization."""

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
    """The outermost code uses weights of children, and calls `forward` directly, without hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = linear(), linear(), linear(4)

    def forward(self, x: Tensor) -> Tensor:
        gate = torch.sigmoid(self.b.weight).mean(0)
        x = F.linear(self.a(x), self.b.weight.T) * gate
        x = self.b.forward(x) / math.sqrt(WIDTH)
        dtype = next(self.c.parameters()).dtype if list(self.c.parameters()) else x.dtype
        return self.c(self.a(x).to(dtype) * gate)
