"""What an optimizer needs at a time: single elements, whole parameters, or all parameters at once.

Found out by steps on a few numbers: what a parameter becomes must not depend on how it is cut, or
on what else there is. So a class of the user's own is known as well as torch's.
"""

from __future__ import annotations

import copy
import inspect
import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from bigtrain.errors import ConfigError

ELEMENTWISE_OPTIMIZERS = {
    *("SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam"),
    *("Adagrad", "Adadelta", "RMSprop", "Rprop", "ASGD", "LeanAdamW"),
}
"""Optimizers that treat each element by itself, so that any cut gives the same numbers."""

_KNOWN = ("torch.optim.", "bigtrain.optim.")
_SHAPES: dict[int, tuple[int, ...]] = {0: (), 1: (160,), 2: (256, 144), 3: (16, 24, 10)}
"""By dims; with sides above 128, from which on some factor a matrix."""
_STEPS = 3
_TOLERANCE = 1e-5


@dataclass(frozen=True)
class OptimizerKind:
    """What an optimizer's step is like."""

    elementwise: bool
    """Each element for itself: parameters may be cut anywhere."""
    separable: bool
    """Each parameter for itself: ranks may update some of them each."""
    counts: bool = False
    """It counts its steps for all parameters together: it must be called once a step."""
    reads_notes: bool = False
    """It reads what was noted at the parameters (a rate of their own)."""
    failure: str | None = None
    """Why it takes no step by itself."""


def kind_of(
    optimizer: torch.optim.Optimizer,
    dims: Sequence[Sequence[int]],
    notes: Sequence[Mapping[str, Any]] = (),
    *,
    begins_with_state: bool = False,
) -> OptimizerKind:
    """Find out what an optimizer's step is like; it is left as it is, whatever its groups hold.

    Args:
        optimizer: of any class.
        dims: of each group, how many dims its parameters have.
        notes: of each group, what was noted at one of its parameters.
        begins_with_state: whether it has state before its first step.
    """
    kind = type(optimizer)
    if kind.__name__ in ELEMENTWISE_OPTIMIZERS and kind.__module__.startswith(_KNOWN):
        return OptimizerKind(elementwise=True, separable=True)
    trial = _Trial(optimizer, dims, notes or [{} for _ in dims], begins_with_state)
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]), torch.device("cpu"):
        warnings.simplefilter("ignore")
        try:
            counts = trial.run_whole()
        except Exception as error:  # noqa: BLE001 - user code of any kind runs here
            said = f"{type(error).__name__}: {error}"
            return OptimizerKind(elementwise=False, separable=False, failure=said)
        return OptimizerKind(
            elementwise=trial.same(_halves),
            separable=trial.same(_first_alone),
            counts=counts,
            reads_notes=any(notes) and not trial.same(_as_it_is, noted=False),
        )


def same_on_shards(
    optimizer: torch.optim.Optimizer,
    dims: Sequence[Sequence[int]],
    mesh: DeviceMesh,
    *,
    begins_with_state: bool = False,
) -> bool:
    """Whether DTensors in shards come to what whole parameters come to. Collective.

    Args:
        optimizer: of any class; it is left as it is.
        dims: see `kind_of`.
        mesh: of the ranks that hold the shards, the shards along its last axis.
        begins_with_state: see `kind_of`.
    """
    trial = _Trial(optimizer, dims, [{} for _ in dims], begins_with_state)
    placements = [Replicate()] * (mesh.ndim - 1) + [Shard(0)]

    def shard(_place: int, values: Tensor) -> Sequence[Tensor]:
        return [distribute_tensor(values, mesh, placements) if values.dim() else values]

    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")
        try:
            trial.run_whole()
        except Exception:  # noqa: BLE001
            return False
        return trial.same(shard)


_Cut = Callable[[int, Tensor], Sequence[Tensor]]
"""From the place in its group and a tensor to what is updated of it."""


def _halves(_place: int, values: Tensor) -> Sequence[Tensor]:
    flat = values.reshape(-1)
    return [flat[: len(flat) // 2], flat[len(flat) // 2 :]] if len(flat) > 1 else [values]


def _as_it_is(_place: int, values: Tensor) -> Sequence[Tensor]:
    return [values]


def _first_alone(place: int, values: Tensor) -> Sequence[Tensor]:
    return [values] if place == 0 else []


class _Trial:
    """Steps of an optimizer on the same numbers, cut in one way or another."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        dims: Sequence[Sequence[int]],
        notes: Sequence[Mapping[str, Any]],
        begins_with_state: bool,  # noqa: FBT001 - handed on
    ) -> None:
        self._optimizer, self._begins_with_state = optimizer, begins_with_state
        self._notes = notes
        draw = torch.Generator().manual_seed(1)

        def values(shape: tuple[int, ...]) -> Tensor:
            made = torch.randn(shape, generator=draw)
            made.view(-1)[made.numel() // 2 :] *= 8.0  # the halves have other norms
            return made

        self._starts: list[list[Tensor]] = []
        self._gradients: list[list[list[Tensor]]] = []
        for own in dims:
            shapes = [_SHAPES.get(number, (4,) * number) for number in own]
            shapes += shapes[:1]  # something beside the first
            self._starts.append([values(shape) for shape in shapes])
            self._gradients.append([[values(s) * 0.1 for _ in range(_STEPS)] for s in shapes])
        self._whole: list[list[Tensor]] = []

    def run_whole(self) -> bool:
        """Let it update whole parameters; whether its settings are others then."""
        twin = self._run(_as_it_is)
        self._whole = [[p.detach() for p in group["params"]] for group in twin.param_groups]
        return _settings(twin) != _settings(self._optimizer)

    def same(self, cut: _Cut, *, noted: bool = True) -> bool:
        """Whether parameters that are cut so come to the same values, as far as they are there."""
        try:
            twin = self._run(cut, noted=noted)
        except Exception:  # noqa: BLE001
            return False
        for expected, group in zip(self._whole, twin.param_groups, strict=True):
            pieces = iter(group["params"])
            for place, value in enumerate(expected):
                for part in cut(place, value):
                    own, part = _whole(next(pieces).detach()), _whole(part)
                    if not torch.allclose(own, part, rtol=_TOLERANCE, atol=_TOLERANCE * 1e-2):
                        return False
        return True

    def _run(self, cut: _Cut, *, noted: bool = True) -> torch.optim.Optimizer:
        groups: list[list[nn.Parameter]] = []
        for starts, notes in zip(self._starts, self._notes, strict=True):
            parts = (part for place, s in enumerate(starts) for part in cut(place, s))
            groups.append([nn.Parameter(part.clone()) for part in parts])
            for parameter in groups[-1] if noted else ():
                vars(parameter).update(notes)
        twin = twin_of(self._optimizer, groups)
        if self._begins_with_state:
            twin.state.update(initial_state(twin))
        for step in range(_STEPS):
            for members, gradients in zip(groups, self._gradients, strict=True):
                parts = (p for n, g in enumerate(gradients) for p in cut(n, g[step]))
                for parameter, gradient in zip(members, parts, strict=True):
                    parameter.grad = gradient.clone()
            twin.step()
        return twin


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def twin_of(
    optimizer: torch.optim.Optimizer, groups: Sequence[list[nn.Parameter]]
) -> torch.optim.Optimizer:
    """An optimizer with the same settings and no state, on other parameters, group by group."""
    twin: Any = object.__new__(type(optimizer))
    memo: dict[int, Any] = {id(optimizer): twin, id(optimizer.state): defaultdict(dict)}
    settings = []
    for group, members in zip(optimizer.param_groups, groups, strict=True):
        memo[id(group["params"])] = members
        kept = {key: value for key, value in group.items() if key != "params"}
        settings.append({**copy.deepcopy(kept, memo), "params": members})
        memo[id(group)] = settings[-1]
    memo[id(optimizer.param_groups)] = settings
    # A scheduler puts a `step` of its own, bound to the optimizer, before the class's.
    others = {key: value for key, value in vars(optimizer).items() if key != "step"}
    twin.__dict__.update(copy.deepcopy(others, memo))
    found: torch.optim.Optimizer = twin
    return found


def _settings(optimizer: torch.optim.Optimizer) -> list[dict[str, str]]:
    return [
        {key: repr(value) for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]


def initial_state(optimizer: torch.optim.Optimizer) -> dict[Tensor, Any]:
    """The state with which an optimizer of this class begins (Adagrad's sums), for its groups."""
    groups = [
        {**group, "params": list(group["params"])}
        for group in optimizer.param_groups
        if group["params"]
    ]
    if not groups:
        return {}
    wanted = inspect.signature(type(optimizer)).parameters.values()
    settings = {
        one.name: optimizer.defaults[one.name] for one in wanted if one.name in optimizer.defaults
    }
    try:
        return dict(type(optimizer)(groups, **settings).state)
    except Exception as error:
        raise ConfigError(
            f"optimizer: {type(optimizer).__name__} makes state when it is made, and it cannot be "
            f"made anew of what this strategy updates ({type(error).__name__}: {error}). Let it "
            "make its state in its first step, or use --strategy ddp."
        ) from None
