"""Find whether an optimizer's step is elementwise, needs whole parameters, or all at once.

The properties are found by trial steps on small parameters, so this works for a user's class as for
torch's classes. If the result does not depend on how a parameter is cut, the step is elementwise.
If the result for a parameter does not depend on other parameters, the step is separable.
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
"""Optimizers that are known to be elementwise: any cut of the parameters gives the same numbers."""

_KNOWN = ("torch.optim.", "bigtrain.optim.")
_SHAPES: dict[int, tuple[int, ...]] = {0: (), 1: (160,), 2: (256, 144), 3: (16, 24, 10)}
"""The shape of a trial parameter, by its number of dims. Sides are above 128, because some
optimizers factor only larger matrices."""
_STEPS = 3
_TOLERANCE = 1e-5
_ROUNDED = 1e-3
"""The share of elements that may differ by more than `_TOLERANCE`.

Sums in another order are rounded differently, which is visible where a step almost cancels an
element. The results of another update rule differ in nearly all elements."""


@dataclass(frozen=True)
class OptimizerKind:
    """Properties of an optimizer's step."""

    elementwise: bool
    """Whether each element is updated independently. Parameters may then be cut anywhere."""
    separable: bool
    """Whether each parameter is updated independently. Each rank may then update only some of the
    parameters."""
    counts: bool = False
    """Whether the optimizer counts steps in the settings of a group. It then has to be called once
    a step."""
    reads_notes: bool = False
    """Whether the optimizer reads attributes that the user set on parameters, such as a
    learning-rate factor."""
    failure: str | None = None
    """The error of a trial step; None if it succeeded."""


def kind_of(
    optimizer: torch.optim.Optimizer,
    dims: Sequence[Sequence[int]],
    notes: Sequence[Mapping[str, Any]] = (),
    *,
    begins_with_state: bool = False,
) -> OptimizerKind:
    """Find the properties of an optimizer's step by trial steps of a copy on the CPU.

    If a trial step raises, the result is neither elementwise nor separable, and has the error.

    Args:
        optimizer: an optimizer of any class; it is not changed.
        dims: for each group, the different numbers of dims of its parameters.
        notes: for each group, the attributes that the user has set on one of its parameters.
        begins_with_state: whether the optimizer has state before its first step.
    """
    kind = type(optimizer)
    if kind.__name__ in ELEMENTWISE_OPTIMIZERS and kind.__module__.startswith(_KNOWN):
        return OptimizerKind(elementwise=True, separable=True)
    trial = _Trial(optimizer, dims, notes or [{} for _ in dims], begins_with_state)
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]), torch.device("cpu"):
        warnings.simplefilter("ignore")
        try:
            counts = trial.run_whole()
        except Exception as error:  # noqa: BLE001 - any user code runs here
            failure = f"{type(error).__name__}: {error}"
            return OptimizerKind(elementwise=False, separable=False, failure=failure)
        return OptimizerKind(
            elementwise=trial.same(_halves),
            separable=trial.same(_first_alone),
            counts=counts,
            reads_notes=any(notes) and not trial.same(_uncut, noted=False),
        )


def same_on_shards(
    optimizer: torch.optim.Optimizer,
    dims: Sequence[Sequence[int]],
    mesh: DeviceMesh,
    *,
    begins_with_state: bool = False,
) -> bool:
    """Whether sharded DTensors are updated to the same values as whole parameters. Collective.

    Args:
        optimizer: an optimizer of any class; it is not changed.
        dims: see `kind_of`.
        mesh: the device mesh; parameters are sharded over its last axis.
        begins_with_state: see `kind_of`.
    """
    trial = _Trial(optimizer, dims, [{} for _ in dims], begins_with_state)
    placements = [Replicate()] * (mesh.ndim - 1) + [Shard(0)]

    def shard(_index: int, values: Tensor) -> Sequence[Tensor]:
        return [distribute_tensor(values, mesh, placements) if values.dim() else values]

    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")
        try:
            trial.run_whole()
        except Exception:  # noqa: BLE001
            return False
        return trial.same(shard)


_Cut = Callable[[int, Tensor], Sequence[Tensor]]
"""Returns the tensors to update, given a parameter's index in its group and its values."""


def _halves(_index: int, values: Tensor) -> Sequence[Tensor]:
    flat = values.reshape(-1)
    return [flat[: len(flat) // 2], flat[len(flat) // 2 :]] if len(flat) > 1 else [values]


def _uncut(_index: int, values: Tensor) -> Sequence[Tensor]:
    return [values]


def _first_alone(index: int, values: Tensor) -> Sequence[Tensor]:
    return [values] if index == 0 else []


class _Trial:
    """Trial steps of an optimizer on the same values, with different cuts."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        dims: Sequence[Sequence[int]],
        notes: Sequence[Mapping[str, Any]],
        begins_with_state: bool,  # noqa: FBT001 - passed on
    ) -> None:
        self._optimizer, self._begins_with_state = optimizer, begins_with_state
        self._notes = notes
        draw = torch.Generator().manual_seed(1)

        def values(shape: tuple[int, ...]) -> Tensor:
            drawn = torch.randn(shape, generator=draw)
            drawn.view(-1)[drawn.numel() // 2 :] *= 8.0  # so that the halves have different norms
            return drawn

        self._starts: list[list[Tensor]] = []
        self._gradients: list[list[list[Tensor]]] = []
        for group_dims in dims:
            shapes = [_SHAPES.get(number, (4,) * number) for number in group_dims]
            shapes += shapes[:1]  # at least two parameters
            self._starts.append([values(shape) for shape in shapes])
            self._gradients.append([[values(s) * 0.1 for _ in range(_STEPS)] for s in shapes])
        self._whole: list[list[Tensor]] = []

    def run_whole(self) -> bool:
        """Update whole parameters; return whether the steps changed the settings of groups."""
        twin = self._run(_uncut)
        self._whole = [[p.detach() for p in group["params"]] for group in twin.param_groups]
        return _settings(twin) != _settings(self._optimizer)

    def same(self, cut: _Cut, *, noted: bool = True) -> bool:
        """Whether the tensors that `cut` makes are updated to the same values as whole parameters.

        Args:
            cut: divides the values of a parameter.
            noted: whether the tensors get the attributes that the user has set on the parameters.
        """
        try:
            twin = self._run(cut, noted=noted)
        except Exception:  # noqa: BLE001
            return False
        groups = zip(self._starts, self._whole, twin.param_groups, strict=True)
        for starts, expected, group in groups:
            pieces = iter(group["params"])
            for index, (start, value) in enumerate(zip(starts, expected, strict=True)):
                for before, part in zip(cut(index, start), cut(index, value), strict=True):
                    updated = _whole(next(pieces).detach())
                    if not _same_update(updated, _whole(part), _whole(before)):
                        return False
        return True

    def _run(self, cut: _Cut, *, noted: bool = True) -> torch.optim.Optimizer:
        groups: list[list[nn.Parameter]] = []
        for starts, notes in zip(self._starts, self._notes, strict=True):
            parts = (part for index, start in enumerate(starts) for part in cut(index, start))
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


def _same_update(updated: Tensor, expected: Tensor, before: Tensor) -> bool:
    """Whether two results of steps from the same values are equal up to rounding."""
    size = torch.maximum(expected.abs(), before.abs())
    is_near = (updated - expected).abs() <= _TOLERANCE * (size + 1e-2)  # not if either is nan
    return bool((~is_near).sum() <= _ROUNDED * is_near.numel())


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def twin_of(
    optimizer: torch.optim.Optimizer, groups: Sequence[list[nn.Parameter]]
) -> torch.optim.Optimizer:
    """Return an optimizer with the same settings and no state, on other parameters.

    Args:
        optimizer: an optimizer of any class; it is not changed.
        groups: the new parameters of each group.
    """
    twin: Any = object.__new__(type(optimizer))
    memo: dict[int, Any] = {id(optimizer): twin, id(optimizer.state): defaultdict(dict)}
    settings = []
    for group, members in zip(optimizer.param_groups, groups, strict=True):
        memo[id(group["params"])] = members
        options = {key: value for key, value in group.items() if key != "params"}
        settings.append({**copy.deepcopy(options, memo), "params": members})
        memo[id(group)] = settings[-1]
    memo[id(optimizer.param_groups)] = settings
    # A scheduler sets an instance attribute `step` that is bound to the original optimizer.
    attributes = {key: value for key, value in vars(optimizer).items() if key != "step"}
    twin.__dict__.update(copy.deepcopy(attributes, memo))
    result: torch.optim.Optimizer = twin
    return result


def _settings(optimizer: torch.optim.Optimizer) -> list[dict[str, str]]:
    return [
        {key: repr(value) for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]


def initial_state(optimizer: torch.optim.Optimizer) -> dict[Tensor, Any]:
    """Return the state that a new optimizer of this class and these groups has.

    Raises:
        ConfigError: the constructor of the class fails for these groups.
    """
    groups = [
        {**group, "params": list(group["params"])}
        for group in optimizer.param_groups
        if group["params"]
    ]
    if not groups:
        return {}
    names = inspect.signature(type(optimizer)).parameters
    settings = {name: optimizer.defaults[name] for name in names if name in optimizer.defaults}
    try:
        return dict(type(optimizer)(groups, **settings).state)
    except Exception as error:
        raise ConfigError(
            f"optimizer: {type(optimizer).__name__} creates state in its constructor, which fails "
            f"for the tensors that this strategy updates ({type(error).__name__}: {error}). Let it "
            "create its state in its first step, or use --strategy ddp."
        ) from None
