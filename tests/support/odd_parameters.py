"""Train nets with unusual parameters, hooks and states, and compare with a plain torch loop.

`train_odd` runs several of them under one strategy in one set of ranks. For each it reports the
largest differences of losses, weights and saved tensors from a plain loop on the whole batch, or
the refusal.
"""

from __future__ import annotations

import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from support.odd_nets import NETS, WIDTH
from torch import Tensor, nn

from bigtrain.assembly.make_plan import make_plan
from bigtrain.checkpoint.read import Checkpoint
from bigtrain.engine.engine import Engine
from bigtrain.engine.first_batch import example_batch
from bigtrain.errors import ConfigError
from bigtrain.job.load import job_from_keys
from bigtrain.losses.loss import as_loss
from bigtrain.ranks.context import RunContext

ROWS, STEPS = 8, 4
Make = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """SGD with momentum."""
    return torch.optim.SGD(list(parameters), lr=0.1, momentum=0.9)


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW with weight decay."""
    return torch.optim.AdamW(list(parameters), lr=1e-2, weight_decay=0.1)


def plain_loop(net: nn.Module, make: Make, steps: Iterable[int]) -> list[float]:
    """The losses of a plain torch loop on the whole batch."""
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
    """The global batch of a step: (inputs, targets)."""
    draw = torch.Generator().manual_seed(step)
    return torch.randn(ROWS, WIDTH, generator=draw), torch.randn(ROWS, 4, generator=draw)


def make_net(name: str) -> nn.Module:
    """A net by name, with the same weights each time."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that empty tensors need no initial values
        return NETS[name]()


def by_dim(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Two groups: only parameters of two or more dimensions decay."""
    listed = list(parameters)
    groups = [
        {"params": [p for p in listed if p.dim() >= 2], "weight_decay": 0.5},
        {"params": [p for p in listed if p.dim() < 2]},
    ]
    return torch.optim.SGD(groups, lr=0.1)


def by_shape(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Three groups by shape, with different rates, betas and decay."""
    ordered = iter(parameters)
    square, small, rest = [], [], []
    for p in ordered:
        is_square = tuple(p.shape) == (WIDTH, WIDTH)
        kind = square if is_square else small if p.numel() <= 4 else rest
        kind.append(p)
    groups = [
        {"params": square, "lr": 0.02, "betas": (0.8, 0.99)},
        {"params": small, "lr": 0.03, "weight_decay": 0.0},
        {"params": rest, "weight_decay": 0.3},
    ]
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=1e-2, weight_decay=0.1)


def by_identity(net: nn.Module) -> Make:
    """The head has a different rate; the factory recognizes its parameters by identity."""
    head = {id(p) for p in list(net.parameters())[-2:]}

    def make(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        listed = list(parameters)
        groups = [
            {"params": [p for p in listed if id(p) in head], "lr": 0.3},
            {"params": [p for p in listed if id(p) not in head], "momentum": 0.9},
        ]
        return torch.optim.SGD(groups, lr=0.05)

    return make


def by_name(net: nn.Module) -> Make:
    """The factory finds each parameter's name in the net; biases do not decay."""
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
    """The optimizer omits one-dimensional parameters."""
    return torch.optim.SGD([p for p in parameters if p.ndim > 1], lr=0.1, momentum=0.9)


def adagrad(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Adagrad: its state exists from the start."""
    return torch.optim.Adagrad(list(parameters), lr=0.05, initial_accumulator_value=0.1)


class SignDescent(torch.optim.Optimizer):
    """A custom elementwise optimizer, whose rate is an attribute of the parameter."""

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
    """SignDescent with a different `rate` on each parameter."""
    for number, p in enumerate(net.parameters()):
        p.rate = 0.5 + number  # type: ignore[attr-defined]
    return lambda parameters: SignDescent(parameters, lr=0.01)


class Lars(torch.optim.Optimizer):
    """Scales each matrix's update to its norm (layer-wise adaptive rates)."""

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
    """Divides all gradients by the norm of all."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        trained = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = sum(float(p.grad.square().sum()) for p in trained) ** 0.5
        for p in trained:
            p.sub_(p.grad, alpha=self.defaults["lr"] / norm)


class Counting(torch.optim.Optimizer):
    """Its group counts the steps, as in schedule-free optimizers."""

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
"""Functions by name: each receives a net and returns an optimizer factory, which may use the net.
"""


def train_odd(
    context: RunContext,
    strategy: str,
    cases: Sequence[tuple[str, str]],
    keys: dict[str, Any],
) -> list[dict[str, Any]]:
    """Train each case, a pair of the names of a net and of an optimizer; return one report for
    each.
    """
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
    common = [n for n in tensors if n in weights]
    return {
        "losses": max(abs(a - b) for a, b in zip(got, want, strict=True)),
        "names": sorted(tensors.keys() ^ weights.keys()),
        "dtypes": [n for n in common if weights[n].dtype != tensors[n].dtype],
        "weights": max(
            float((tensors[n].to(torch.cdouble) - weights[n].to(torch.cdouble)).abs().max())
            for n in common
            if tensors[n].numel()
        ),
        "meta": saved.meta,
    }


def _steps(engine: Engine) -> list[float]:
    """Train this rank's part of each global batch; return the losses."""
    rows = ROWS // engine.plan.batch.dp_size
    first = (engine.plan.data_rank(engine.context.dp_rank) or 0) * rows
    rank_rows = slice(first, first + rows)
    got = []
    for step in range(STEPS):
        inputs, targets = batch(step)
        got.append(engine.step((inputs[rank_rows], targets[rank_rows])).loss)
    return got
