"""Nets with unusual parameters, hooks and states."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

WIDTH = 16


class Base(nn.Module):
    """Three layers; the nets below change or add something."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.h = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.h(torch.tanh(self.b(torch.tanh(self.a(x)))))


class Hook(Base):
    """A gradient hook that zeroes the gradient of a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.a.weight.register_hook(lambda g: g * 0)


class MaskHook(Base):
    """A gradient hook that multiplies by a mask of the weight's shape."""

    def __init__(self) -> None:
        super().__init__()
        mask = torch.arange(WIDTH * WIDTH).view(WIDTH, WIDTH).remainder(3).ne(0).float()
        self.b.weight.register_hook(lambda g: g * mask)


class NormHook(Base):
    """A hook that is not elementwise: it clips the gradient of one parameter by its norm."""

    def __init__(self) -> None:
        super().__init__()
        self.b.weight.register_hook(lambda g: g * (0.01 / (g.norm() + 1e-6)))


class PostHook(Base):
    """A hook after the gradient is accumulated."""

    def __init__(self) -> None:
        super().__init__()

        def halve(p: Tensor) -> None:
            p.grad.mul_(0.5)

        self.b.bias.register_post_accumulate_grad_hook(halve)


class PostNorm(Base):
    """A hook after accumulation that reads the whole gradient."""

    def __init__(self) -> None:
        super().__init__()

        def clip(p: Tensor) -> None:
            p.grad.mul_(0.01 / (p.grad.norm() + 1e-6))

        self.b.weight.register_post_accumulate_grad_hook(clip)


class PostDecay(Base):
    """Two hooks after accumulation, one of which reads the parameter's values."""

    def __init__(self) -> None:
        super().__init__()

        def decay(p: Tensor) -> None:
            p.grad = p.grad + 0.1 * p.detach()

        def halve(p: Tensor) -> None:
            p.grad.mul_(0.5)

        self.b.weight.register_hook(lambda g: g * 2)
        self.b.weight.register_post_accumulate_grad_hook(decay)
        self.b.weight.register_post_accumulate_grad_hook(halve)


class PostShrink(Base):
    """A hook after accumulation that changes the parameter's values."""

    def __init__(self) -> None:
        super().__init__()

        def shrink(p: Tensor) -> None:
            with torch.no_grad():
                p.mul_(0.9)

        self.h.bias.register_post_accumulate_grad_hook(shrink)


class PostDrop(Base):
    """A hook after accumulation that sets the gradient to None, so the optimizer skips
    the weight.
    """

    def __init__(self) -> None:
        super().__init__()

        def drop(p: Tensor) -> None:
            p.grad = None

        self.b.weight.register_post_accumulate_grad_hook(drop)


class Teacher(Base):
    """A moving average of weights that the forward pass updates in place."""

    def __init__(self) -> None:
        super().__init__()
        self.t = nn.Linear(WIDTH, WIDTH)
        self.t.requires_grad_(False)
        self.t.load_state_dict(self.a.state_dict())

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                for t, p in zip(self.t.parameters(), self.a.parameters(), strict=True):
                    t.mul_(0.5).add_(p, alpha=0.5)
        y = torch.tanh(self.a(x)) - torch.tanh(self.t(x)).detach() * 0.5
        return self.h(torch.tanh(self.b(y)))


class LerpTeacher(Teacher):
    """The same average, written by `copy_` into `data`."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            for t, p in zip(self.t.parameters(), self.a.parameters(), strict=True):
                t.data.copy_(torch.lerp(t.data, p.data, 0.25))
        y = torch.tanh(self.a(x)) - torch.tanh(self.t(x)).detach() * 0.5
        return self.h(torch.tanh(self.b(y)))


class Clamp(Base):
    """A trained parameter that the forward pass clamps in place."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.b.weight.clamp_(-0.1, 0.1)
        return super().forward(x)


class Codes(Base):
    """Frozen numbers that fp32 cannot represent."""

    def __init__(self) -> None:
        super().__init__()
        self.c = nn.Parameter(torch.arange(WIDTH) + 2**24 + 1, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * (self.c % 2 + 1))


class Bytes(Base):
    """Frozen uint8 codes in a layer."""

    def __init__(self) -> None:
        super().__init__()
        codes = torch.arange(WIDTH * WIDTH).remainder(251).view(WIDTH, WIDTH)
        self.q = nn.Module()
        self.q.codes = nn.Parameter(codes.to(torch.uint8), requires_grad=False)
        self.q.scale = nn.Parameter(torch.tensor(0.01), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + x @ (self.q.codes.float() * self.q.scale))


class Mask(Base):
    """A frozen bool parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.m = nn.Parameter(torch.arange(WIDTH).remainder(3).ne(0), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.m)


class Extra(Base):
    """Extra state that is not a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen += 1
        return super().forward(x)

    def get_extra_state(self) -> Any:
        return {"seen": self.seen, "of": ["a", 1.5, None]}

    def set_extra_state(self, state: Any) -> None:
        self.seen = state["seen"]


class Counter(nn.Module):
    """A layer whose extra state is a number."""

    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(WIDTH, WIDTH)
        self.calls = 7

    def forward(self, x: Tensor) -> Tensor:
        return self.l(x)

    def get_extra_state(self) -> Any:
        return self.calls

    def set_extra_state(self, state: Any) -> None:
        self.calls = state


class InnerExtra(Base):
    """Extra state in an inner layer."""

    def __init__(self) -> None:
        super().__init__()
        self.c = Counter()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.c(x))


class TensorExtra(Base):
    """Extra state that JSON cannot represent."""

    def get_extra_state(self) -> Any:
        return torch.ones(2)

    def set_extra_state(self, state: Any) -> None:
        pass


class Empty(Base):
    """A parameter with no elements."""

    def __init__(self) -> None:
        super().__init__()
        self.e = nn.Linear(WIDTH, 0)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.cat([x, self.e(x)], -1))


class EmptyRank(Base):
    """A LoRA of rank 0: empty parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Parameter(torch.empty(0, WIDTH))
        self.up = nn.Parameter(torch.empty(WIDTH, 0))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + x @ self.down.t() @ self.up.t())


class FrozenEmpty(Base):
    """A frozen parameter without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.e = nn.Parameter(torch.empty(0, 3), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.e.sum())


class Complex(Base):
    """A trained complex parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.f = nn.Parameter(torch.ones(WIDTH // 2 + 1, dtype=torch.cfloat))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.fft.irfft(torch.fft.rfft(x) * self.f, n=WIDTH))


class Rotation(Base):
    """Frozen complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        angles = torch.arange(WIDTH // 2) * 0.1
        self.r = nn.Parameter(torch.polar(torch.ones_like(angles), angles), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.view(-1, WIDTH // 2, 2).contiguous())
        return super().forward(torch.view_as_real(pairs * self.r).flatten(1))


class Scalar(Base):
    """A parameter without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.k = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.k


class Scaled(nn.Module):
    """A layer with a parameter without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(WIDTH, WIDTH)
        self.k = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.l(x)) * self.k


class ScalarBlocks(nn.Module):
    """A parameter without dimensions in each block."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Scaled() for _ in range(3))
        self.h = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.h(x)


class FrozenScalar(Base):
    """A frozen parameter without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.k = nn.Parameter(torch.tensor(2.0), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.k


class Mixed(Base):
    """fp32 and fp64 parameters together."""

    def __init__(self) -> None:
        super().__init__()
        self.s = nn.Parameter(torch.ones(WIDTH, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward((x * self.s).float())


class MixedLayer(Base):
    """An fp64 layer among fp32 layers."""

    def __init__(self) -> None:
        super().__init__()
        self.d = nn.Linear(WIDTH, WIDTH).double()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.d(x.double()).float())


class FrozenHalf(Base):
    """A frozen half-precision layer next to fp32 layers."""

    def __init__(self) -> None:
        super().__init__()
        self.d = nn.Linear(WIDTH, WIDTH).bfloat16().requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.d(x.bfloat16()).float())


class Strided(Base):
    """A weight whose memory is transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.a.weight = nn.Parameter(torch.randn(WIDTH, WIDTH).t())


class StridedRect(Base):
    """Rectangular weights whose memory is transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.a.weight = nn.Parameter(torch.randn(WIDTH, 2 * WIDTH).t())
        self.b.weight = nn.Parameter(torch.randn(2 * WIDTH, WIDTH).t())
        self.a.bias = nn.Parameter(torch.zeros(2 * WIDTH))


class Gaps(Base):
    """A parameter whose memory has gaps."""

    def __init__(self) -> None:
        super().__init__()
        self.a.weight = nn.Parameter(torch.randn(WIDTH, 2 * WIDTH)[:, ::2])


class Sparse(Base):
    """Sparse gradients of an embedding module."""

    def __init__(self) -> None:
        super().__init__()
        self.e = nn.Embedding(10, WIDTH, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.e((x[:, 0] > 0).long()))


class SparseBag(Base):
    """Sparse gradients of an embedding bag."""

    def __init__(self) -> None:
        super().__init__()
        self.e = nn.EmbeddingBag(10, WIDTH, sparse=True, mode="sum")

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.e((x[:, :3] > 0).long()))


class SparseF(Base):
    """Sparse gradients by the functional call, which no module's attribute shows."""

    def __init__(self) -> None:
        super().__init__()
        self.e = nn.Parameter(torch.randn(10, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        index = (x[:, 0] > 0).long()
        return super().forward(x + nn.functional.embedding(index, self.e, sparse=True))


class SparseShared(Base):
    """Two embeddings share one weight: a cut between them gives its gradient to two stages."""

    def __init__(self) -> None:
        super().__init__()
        self.e, self.f = (nn.Embedding(10, WIDTH, sparse=True) for _ in range(2))
        self.f.weight = self.e.weight

    def forward(self, x: Tensor) -> Tensor:
        index = (x[:, 0] > 0).long()
        return super().forward(x + self.e(index)) + self.f(index)[:, :4]


class SparseHead(Base):
    """The head uses the weight of an embedding whose gradient is sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.e = nn.Embedding(10, WIDTH, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x + self.e((x[:, 0] > 0).long()))
        return y + 0.1 * nn.functional.linear(y.repeat(1, 4), self.e.weight)[:, :4]


class Buffer(Base):
    """A buffer that is not persistent and that is assigned anew."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("tmp", torch.ones(1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.tmp = self.tmp * 1.0
        return super().forward(x * self.tmp)


class Cached(nn.Module):
    """A layer with a cache that the forward pass makes."""

    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("table", torch.zeros(1, WIDTH), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.table = torch.linspace(0, 1, WIDTH).expand(1, WIDTH).clone()
        return self.l(x + self.table)


class InnerBuffer(Base):
    """A cache made in the forward pass of an inner layer."""

    def __init__(self) -> None:
        super().__init__()
        self.c = Cached()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.c(x))


class Namespace(nn.Module):
    """A plain Module that only contains others and is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.enc = nn.Module()
        self.enc.a, self.enc.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.h = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.h(torch.tanh(self.enc.b(torch.tanh(self.enc.a(x)))))


class DeepNamespace(nn.Module):
    """Namespaces in namespaces, one with a parameter, and a sequence whose layers are called one by
    one.
    """

    def __init__(self) -> None:
        super().__init__()
        self.enc = nn.Module()
        self.enc.inner = nn.Module()
        self.enc.inner.a = nn.Linear(WIDTH, WIDTH)
        self.enc.gain = nn.Parameter(torch.ones(WIDTH))
        self.seq = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 4))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.enc.inner.a(x)) * self.enc.gain
        for layer in self.seq:
            x = layer(x)
        return x


class Methods(nn.Module):
    """A module of which only methods are called, never the forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.core = Base()

    def forward(self, x: Tensor) -> Tensor:
        core = self.core
        return core.h(torch.tanh(core.b(torch.tanh(core.a(x)))))


class InnerMethods(nn.Module):
    """Blocks of which only methods are called, one of them frozen, inside a module that
    is called.
    """

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def encode(self, x: Tensor) -> Tensor:
            return self.b(torch.tanh(self.a(x)))

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(InnerMethods.Block() for _ in range(3))
            self.blocks[1].requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = x + block.encode(x)
            return x

    def __init__(self) -> None:
        super().__init__()
        self.enc, self.h = InnerMethods.Encoder(), nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.h(self.enc(x))


class TakenWeights(Base):
    """The outer forward uses the weights of a layer that is never called."""

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(nn.functional.linear(self.a(x), self.b.weight, self.b.bias))
        return self.h(x)


NETS: dict[str, type[nn.Module]] = {
    kind.__name__: kind
    for kind in list(globals().values())
    if isinstance(kind, type)
    and issubclass(kind, nn.Module)
    and kind not in (Counter, Cached, Scaled)
}
