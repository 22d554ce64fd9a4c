"""Nets with parameters, hooks and states out of the ordinary, trained beside a plain torch loop.

`train_odd` runs several of them under one strategy in one set of ranks, and says of each by how
much losses, weights and what was saved differ from a plain loop on the whole batch, or how it
was refused.
"""

from __future__ import annotations

import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bigtrain.assembly.make_plan import make_plan
from bigtrain.checkpoint.read import Checkpoint
from bigtrain.engine.engine import Engine
from bigtrain.engine.example import example_batch
from bigtrain.errors import ConfigError
from bigtrain.job.load import job_from_keys
from bigtrain.losses.loss import as_loss
from bigtrain.ranks.context import RunContext

WIDTH, ROWS, STEPS = 16, 8, 4
Make = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


class Base(nn.Module):
    """Three layers."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.h = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.h(torch.tanh(self.b(torch.tanh(self.a(x)))))


class Hook(Base):
    """A gradient hook that freezes a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.a.weight.register_hook(lambda g: g * 0)


class MaskHook(Base):
    """A mask of the weight's own shape."""

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
    """A hook after the gradient has been added up."""

    def __init__(self) -> None:
        super().__init__()

        def halve(p: Tensor) -> None:
            p.grad.mul_(0.5)

        self.b.bias.register_post_accumulate_grad_hook(halve)


class Teacher(Base):
    """An average of weights that forward updates in place."""

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
    """The same by copy_ of data."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            for t, p in zip(self.t.parameters(), self.a.parameters(), strict=True):
                t.data.copy_(torch.lerp(t.data, p.data, 0.25))
        y = torch.tanh(self.a(x)) - torch.tanh(self.t(x)).detach() * 0.5
        return self.h(torch.tanh(self.b(y)))


class Clamp(Base):
    """A trained parameter that forward clamps in place."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.b.weight.clamp_(-0.1, 0.1)
        return super().forward(x)


class Codes(Base):
    """Frozen numbers that fp32 does not hold."""

    def __init__(self) -> None:
        super().__init__()
        self.c = nn.Parameter(torch.arange(WIDTH) + 2**24 + 1, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * (self.c % 2 + 1))


class Bytes(Base):
    """Frozen uint8 codes, in a layer."""

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
    """State that is no tensor."""

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
    """The same in a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.c = Counter()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.c(x))


class TensorExtra(Base):
    """Extra state that is no JSON."""

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
    """A LoRA of rank 0."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Parameter(torch.empty(0, WIDTH))
        self.up = nn.Parameter(torch.empty(WIDTH, 0))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + x @ self.down.t() @ self.up.t())


class FrozenEmpty(Base):
    def __init__(self) -> None:
        super().__init__()
        self.e = nn.Parameter(torch.empty(0, 3), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.e.sum())


class Complex(Base):
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
    """A parameter of no dims."""

    def __init__(self) -> None:
        super().__init__()
        self.k = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.k


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(WIDTH, WIDTH)
        self.k = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.l(x)) * self.k


class ScalarBlocks(nn.Module):
    """One in each block."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Scaled() for _ in range(3))
        self.h = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.h(x)


class FrozenScalar(Base):
    def __init__(self) -> None:
        super().__init__()
        self.k = nn.Parameter(torch.tensor(2.0), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.k


class Mixed(Base):
    """fp32 and fp64 together."""

    def __init__(self) -> None:
        super().__init__()
        self.s = nn.Parameter(torch.ones(WIDTH, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward((x * self.s).float())


class MixedLayer(Base):
    def __init__(self) -> None:
        super().__init__()
        self.d = nn.Linear(WIDTH, WIDTH).double()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.d(x.double()).float())


class FrozenHalf(Base):
    """A frozen half-precision layer beside fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.d = nn.Linear(WIDTH, WIDTH).bfloat16().requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.d(x.bfloat16()).float())


class Strided(Base):
    """A weight that is stored transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.a.weight = nn.Parameter(torch.randn(WIDTH, WIDTH).t())


class StridedRect(Base):
    def __init__(self) -> None:
        super().__init__()
        self.a.weight = nn.Parameter(torch.randn(WIDTH, 2 * WIDTH).t())
        self.b.weight = nn.Parameter(torch.randn(2 * WIDTH, WIDTH).t())
        self.a.bias = nn.Parameter(torch.zeros(2 * WIDTH))


class Gaps(Base):
    """A parameter with gaps in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.a.weight = nn.Parameter(torch.randn(WIDTH, 2 * WIDTH)[:, ::2])


class Sparse(Base):
    """Sparse gradients of an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.e = nn.Embedding(10, WIDTH, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.e((x[:, 0] > 0).long()))


class SparseBag(Base):
    def __init__(self) -> None:
        super().__init__()
        self.e = nn.EmbeddingBag(10, WIDTH, sparse=True, mode="sum")

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.e((x[:, :3] > 0).long()))


class SparseF(Base):
    """By the function, where no module says so."""

    def __init__(self) -> None:
        super().__init__()
        self.e = nn.Parameter(torch.randn(10, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        index = (x[:, 0] > 0).long()
        return super().forward(x + nn.functional.embedding(index, self.e, sparse=True))


class Buffer(Base):
    """A buffer that is not persistent and assigned anew."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("tmp", torch.ones(1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.tmp = self.tmp * 1.0
        return super().forward(x * self.tmp)


class Cached(nn.Module):
    """A cache made in forward, in a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("table", torch.zeros(1, WIDTH), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.table = torch.linspace(0, 1, WIDTH).expand(1, WIDTH).clone()
        return self.l(x + self.table)


class InnerBuffer(Base):
    def __init__(self) -> None:
        super().__init__()
        self.c = Cached()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.c(x))


class Namespace(nn.Module):
    """A plain Module that only holds others and is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.enc = nn.Module()
        self.enc.a, self.enc.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.h = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.h(torch.tanh(self.enc.b(torch.tanh(self.enc.a(x)))))


class DeepNamespace(nn.Module):
    """Namespaces in namespaces, with a parameter of their own, and a sequence taken apart."""

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
    """A module whose methods are called, and never its forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.core = Base()

    def forward(self, x: Tensor) -> Tensor:
        core = self.core
        return core.h(torch.tanh(core.b(torch.tanh(core.a(x)))))


NETS: dict[str, type[nn.Module]] = {
    kind.__name__: kind
    for kind in list(globals().values())
    if isinstance(kind, type)
    and issubclass(kind, nn.Module)
    and kind not in (Counter, Cached, Scaled)
}


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(list(parameters), lr=0.1, momentum=0.9)


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(list(parameters), lr=1e-2, weight_decay=0.1)


def plain_loop(net: nn.Module, make: Make, steps: Iterable[int]) -> list[float]:
    """Losses of a plain torch loop on the whole batch."""
    optimizer = make([p for p in net.parameters() if p.requires_grad])
    losses = []
    for step in steps:
        optimizer.zero_grad()
        x, y = batch(step)
        loss = nn.functional.mse_loss(net(x), y)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def batch(step: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(step)
    return torch.randn(ROWS, WIDTH, generator=draw), torch.randn(ROWS, 4, generator=draw)


def make_net(name: str) -> nn.Module:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, that no elements need no values
        return NETS[name]()


def by_dim(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    given = list(parameters)
    groups = [
        {"params": [p for p in given if p.dim() >= 2], "weight_decay": 0.5},
        {"params": [p for p in given if p.dim() < 2]},
    ]
    return torch.optim.SGD(groups, lr=0.1)


def by_shape(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Three groups with other rates and betas; the middle one by the number of elements."""
    given = iter(parameters)
    square, small, others = [], [], []
    for p in given:
        kind = square if tuple(p.shape) == (WIDTH, WIDTH) else small if p.numel() <= 4 else others
        kind.append(p)
    groups = [
        {"params": square, "lr": 0.02, "betas": (0.8, 0.99)},
        {"params": small, "lr": 0.03, "weight_decay": 0.0},
        {"params": others, "weight_decay": 0.3},
    ]
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=1e-2, weight_decay=0.1)


def by_identity(net: nn.Module) -> Make:
    """The head has a rate of its own; the factory knows the net."""
    head = {id(p) for p in list(net.parameters())[-2:]}

    def make(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        given = list(parameters)
        groups = [
            {"params": [p for p in given if id(p) in head], "lr": 0.3},
            {"params": [p for p in given if id(p) not in head], "momentum": 0.9},
        ]
        return torch.optim.SGD(groups, lr=0.05)

    return make


def by_name(net: nn.Module) -> Make:
    """Names beside the parameters that come; biases do not decay."""
    names = [n for n, p in net.named_parameters() if p.requires_grad]

    def make(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        named = list(zip(names, parameters, strict=False))
        groups = [
            {"params": [p for n, p in named if n.endswith("weight")], "weight_decay": 0.3},
            {"params": [p for n, p in named if not n.endswith("weight")]},
        ]
        return torch.optim.SGD(groups, lr=0.1)

    return make


def some(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """One-dimensional parameters are left out."""
    return torch.optim.SGD([p for p in parameters if p.ndim > 1], lr=0.1, momentum=0.9)


def adagrad(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """State from the start."""
    return torch.optim.Adagrad(list(parameters), lr=0.05, initial_accumulator_value=0.1)


class SignDescent(torch.optim.Optimizer):
    """A class of one's own, each element for itself, with a rate at the parameter."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": 0.5})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["mean"] = torch.zeros_like(p)
                state["mean"].mul_(group["momentum"]).add_(p.grad)
                rate = group["lr"] * getattr(p, "rate", 1.0)
                p.add_(torch.tanh(10 * state["mean"]), alpha=-rate)


def noted(net: nn.Module) -> Make:
    for number, p in enumerate(net.parameters()):
        p.rate = 0.5 + number  # type: ignore[attr-defined]
    return lambda parameters: SignDescent(parameters, lr=0.01)


class Lars(torch.optim.Optimizer):
    """Each parameter by its own norm."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and p.dim() > 1:
                    ratio = p.norm() / (p.grad.norm() + 1e-6)
                    p.sub_(p.grad * (ratio * group["lr"]))


class Global(torch.optim.Optimizer):
    """All parameters by the norm of all."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        own = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = sum(float(p.grad.square().sum()) for p in own) ** 0.5
        for p in own:
            p.sub_(p.grad, alpha=self.defaults["lr"] / norm)


class Counting(torch.optim.Optimizer):
    """Its group counts the steps, as schedule-free optimizers do."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float) -> None:
        super().__init__(parameters, {"lr": lr, "k": 0})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["k"] += 1
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad, alpha=group["lr"] / group["k"])


OPTIMIZERS: dict[str, Callable[[nn.Module], Make]] = {
    "sgd": lambda _net: sgd,
    "adamw": lambda _net: adamw,
    "by_dim": lambda _net: by_dim,
    "by_shape": lambda _net: by_shape,
    "by_identity": by_identity,
    "by_name": by_name,
    "some": lambda _net: some,
    "adagrad": lambda _net: adagrad,
    "noted": noted,
    "lars": lambda _net: lambda parameters: Lars(parameters, lr=0.05),
    "global": lambda _net: lambda parameters: Global(parameters, lr=0.05),
    "counting": lambda _net: lambda parameters: Counting(parameters, lr=0.1),
    "muon": lambda _net: lambda ps: torch.optim.Muon([p for p in ps if p.dim() == 2], lr=0.05),
}
"""By name: what makes a factory for a net, which may know the net's own parameters."""


def train_odd(
    context: RunContext,
    strategy: str,
    cases: Sequence[tuple[str, str]],
    keys: dict[str, Any],
) -> list[dict[str, Any]]:
    """Train each case: the name of a net, and of an optimizer."""
    return [{"case": f"{n} {o}", **_train(context, strategy, n, o, keys)} for n, o in cases]


def _train(
    context: RunContext, strategy: str, net_name: str, make: str, keys: dict[str, Any]
) -> dict[str, Any]:
    plain, net = make_net(net_name), make_net(net_name)
    want = plain_loop(plain, OPTIMIZERS[make](plain), range(STEPS))
    micro = {"train.micro_batch_size": 4}
    unseen = {"memory.predict": False, "memory.track_steps": 0}
    keys = {"train.global_batch_size": ROWS, **unseen, **micro, **keys}
    try:
        job = job_from_keys(strategy, keys)
        plan = make_plan(job, context.world_size, "cpu")
        rows = plan.batch.micro_size
        inputs, targets = batch(0)
        loss = nn.functional.mse_loss
        example = example_batch((inputs[:rows], targets[:rows]), as_loss(loss), job, plan)
        made = Engine(net, loss, OPTIMIZERS[make](net), job, context, example=example)
        with made as engine, tempfile.TemporaryDirectory() as own_folder:
            folder = context.broadcast_object(own_folder)
            got, saved = _steps(engine), Checkpoint(engine.save(Path(folder)))
            prefix = "model."
            names = [n for n in saved.tensors if n.startswith(prefix)]
            weights = {n.removeprefix(prefix): saved.read(n) for n in names}
            engine.load(saved.path)
            context.barrier()
    except ConfigError as error:
        return {"refused": str(error)}
    except Exception as error:
        shown = f"{type(error).__name__}: {error}"
        return {"error": shown[:300], "trace": traceback.format_exc()[-1500:]}
    tensors = {n: t.detach() for n, t in plain.state_dict().items() if isinstance(t, Tensor)}
    both = [n for n in tensors if n in weights]
    return {
        "losses": max(abs(a - b) for a, b in zip(got, want, strict=True)),
        "names": sorted(tensors.keys() ^ weights.keys()),
        "dtypes": [n for n in both if weights[n].dtype != tensors[n].dtype],
        "weights": max(
            float((tensors[n].to(torch.cdouble) - weights[n].to(torch.cdouble)).abs().max())
            for n in both
            if tensors[n].numel()
        ),
        "meta": saved.meta,
    }


def _steps(engine: Engine) -> list[float]:
    """Train this rank's part of each global batch."""
    rows = ROWS // engine.plan.batch.dp_size
    first = (engine.plan.data_rank(engine.context.dp_rank) or 0) * rows
    own = slice(first, first + rows)
    got = []
    for step in range(STEPS):
        inputs, targets = batch(step)
        got.append(engine.step((inputs[own], targets[own])).loss)
    return got
