"""Compute the differences between two recordings of the same steps, and their tolerances."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bigtrain.checkpoint.read import tensors_of_file
from bigtrain.files.parse import read_json_object
from bigtrain.job.schema import Precision
from bigtrain.tensors.shards import read_whole

GRADIENT_FLOOR = 1e-4
"""If no element of a gradient exceeds this share of the model's largest gradient, the gradient is
only rounding. Its difference is then relative to this share, not to its own largest element."""

GROWTH = 10
"""A difference is explained by rounding that has grown if it is at most this many times the
difference of one process from itself with perturbed weights. A perturbed weight begins one unit in
the last place away."""


@dataclass(frozen=True)
class Tolerance:
    """The largest relative differences that rounding explains."""

    loss: float
    norm: float
    """The tolerance of the norm of the gradients."""
    tensors: float
    """The tolerance of gradients, and of the change of the weights over all steps."""

    @classmethod
    def of(cls, precision: Precision) -> Tolerance:
        """Return the largest effect that sums in another order may have over a few steps.

        The tolerance is a small multiple of the measured differences (docs/internals/measured.md).
        These are of the order of the unit in the last place in fp64 and fp32. In bf16 they are of
        the order of 2^-8, because a gradient is rounded at each addition. A loss of DeepSpeed's
        stage 3 differs by up to 4e-4, because this stage rounds before it adds the bias.
        """
        return {
            "fp64": cls(1e-12, 1e-9, 1e-9),
            "fp32": cls(1e-6, 1e-6, 1e-5),
            "bf16": cls(1e-3, 5e-3, 5e-2),
        }[precision]

    def grown(self, loss: float, norm: float, tensors: float) -> Tolerance:
        """Return a tolerance of at least `GROWTH` times these differences."""
        return Tolerance(
            max(self.loss, GROWTH * loss),
            max(self.norm, GROWTH * norm),
            max(self.tensors, GROWTH * tensors),
        )


@dataclass(frozen=True)
class StepDifferences:
    """The relative differences in one step."""

    loss: float
    norm: float
    gradient: float | None
    """The largest difference of a gradient; None if there are no gradients to compare."""


@dataclass(frozen=True)
class Differences:
    """The largest relative differences over all steps."""

    loss: float
    norm: float
    gradient: float | None
    """The largest difference of a gradient; None if the run has no gradients to compare."""
    update: float
    """The largest difference of the change that all steps made to a weight. The weights themselves
    are not compared, because they change too little."""
    worst_gradients: tuple[tuple[str, float], ...] = ()
    """The parameters whose gradients differ most, and their differences."""
    worst_updates: tuple[tuple[str, float], ...] = ()
    """The parameters whose changes differ most, and their differences."""
    missing: tuple[str, ...] = field(default=())
    """The names of tensors that only one of the two recordings has."""
    steps: tuple[StepDifferences, ...] = ()
    """The differences of each step."""

    def passed(
        self, tolerance: Tolerance, moved: Differences | None = None, *, losses_only: bool = False
    ) -> bool:
        """Return whether all differences are within the tolerance.

        Args:
            tolerance: the differences that rounding explains.
            moved: the differences of one process from itself; see `tolerances`.
            losses_only: whether to compare only the norms and the losses. The tolerance of
                the losses is then ten times as large. This is for optimizers that magnify rounding:
                AdamW may divide by a gradient that is only rounding.
        """
        # The loss is infinite if the runs have different numbers of steps.
        if self.missing or not math.isfinite(self.loss):
            return False
        by_step = tolerances(tolerance, moved, len(self.steps))
        for step, limit in zip(self.steps, by_step, strict=True):
            if step.loss > limit.loss * (10 if losses_only else 1) or step.norm > limit.norm:
                return False
            if not losses_only and (step.gradient or 0.0) > limit.tensors:
                return False
        return losses_only or self.update <= update_tolerance(tolerance, moved)


def tolerances(tolerance: Tolerance, moved: Differences | None, steps: int) -> list[Tolerance]:
    """Return the tolerance of each step.

    A difference in the last place may grow from step to step even in one process. For example, ReLU
    and max pooling choose by a comparison, and BatchNorm may divide by a small variance.

    Args:
        tolerance: the least tolerance of each step.
        moved: the differences of one process from itself with weights that begin one unit in the
            last place away; None if they were not measured.
        steps: the number of steps that are compared.
    """
    if moved is None:
        return [tolerance] * steps
    return [tolerance.grown(s.loss, s.norm, s.gradient or 0.0) for s in moved.steps[:steps]]


def update_tolerance(tolerance: Tolerance, moved: Differences | None) -> float:
    """Return the tolerance of the change of the weights over all steps; see `tolerances`."""
    return tolerance.tensors if moved is None else max(tolerance.tensors, GROWTH * moved.update)


def compare_recordings(reference: Path, other: Path) -> Differences:
    """Compare two recordings of `bigtrain.verify.record`, one tensor at a time.

    Args:
        reference: the folder of the reference's recording.
        other: the folder of the other run's recording.
    """
    reference_record, other_record = _record(reference), _record(other)
    gradients: dict[str, float] = {}
    missing: set[str] = set()
    for path in reference.glob("gradients-*.safetensors"):
        if other_record["no_gradients"] is None:
            missing |= _Pair(path, other / path.name).missing
    by_step = gradient_differences(reference, other)
    for step in by_step.values():
        for name, difference in step.items():
            gradients[name] = max(gradients.get(name, 0.0), difference)
    names = ("weights-before.safetensors", "weights-after.safetensors")
    before, after = (_Pair(reference / name, other / name) for name in names)
    missing |= before.missing | after.missing
    updates = dict(after.differences(before))
    losses, norms = (_each(reference_record[key], other_record[key]) for key in ("losses", "norms"))
    return Differences(
        loss=max(losses, default=0.0),
        norm=max(norms, default=0.0),
        gradient=max(gradients.values()) if gradients else None,
        update=max(updates.values(), default=0.0),
        worst_gradients=_worst(gradients),
        worst_updates=_worst(updates),
        missing=tuple(sorted(missing)),
        steps=tuple(
            StepDifferences(loss, norm, max(by_step[n].values()) if by_step.get(n) else None)
            for n, (loss, norm) in enumerate(zip(losses, norms, strict=True), start=1)
        ),
    )


def gradient_differences(reference: Path, other: Path) -> dict[int, dict[str, float]]:
    """Return the differences of the gradients, by the number of the step and by parameter.

    The result is empty if the other run could not record gradients.
    """
    by_step: dict[int, dict[str, float]] = {}
    if _record(other)["no_gradients"] is not None:
        return by_step
    for path in reference.glob("gradients-*.safetensors"):
        pair = _Pair(path, other / path.name)
        by_step[int(path.stem.rpartition("-")[2])] = dict(pair.differences())
    return dict(sorted(by_step.items()))


def _worst(differences: dict[str, float]) -> tuple[tuple[str, float], ...]:
    return tuple(sorted(differences.items(), key=lambda item: -item[1])[:3])


def _record(folder: Path) -> dict[str, Any]:
    return read_json_object(folder / "record.json")


def _each(first: list[float], second: list[float]) -> list[float]:
    if len(first) != len(second):
        return [math.inf]
    return [relative_difference(a, b) for a, b in zip(first, second, strict=True)]


def relative_difference(expected: float, actual: float) -> float:
    """Return the relative difference from the expected number.

    The result is infinite if one of the numbers is not finite.
    """
    if not (math.isfinite(expected) and math.isfinite(actual)):
        return math.inf
    return abs(expected - actual) / max(abs(expected), 1e-12)


_Before = Callable[[str], tuple[Tensor, Tensor]]


class _Pair:
    """The tensors of the same file in two recordings."""

    def __init__(self, first: Path, second: Path) -> None:
        self._reference, self._compared = tensors_of_file(first), tensors_of_file(second)
        names = set(self._reference), set(self._compared)
        self.common, self.missing = sorted(names[0] & names[1]), names[0] ^ names[1]

    def tensors(self, name: str) -> tuple[Tensor, Tensor]:
        """Return the tensors with a name in both files."""
        return read_whole(self._reference[name]), read_whole(self._compared[name])

    def differences(self, before: _Pair | None = None) -> Iterator[tuple[str, float]]:
        """Yield each name with its largest difference, relative to the tensor's largest value.

        Args:
            before: earlier tensors, which are subtracted to compare the changes; None compares the
                tensors themselves.
        """
        changes = before.tensors if before is not None else None
        largest = 0.0
        for name in self.common:
            expected = read_whole(self._reference[name])
            largest = max(largest, _highest(_since(expected, changes, name, 0)))
        for name in self.common:
            expected, actual = self.tensors(name)
            if expected.shape != actual.shape:
                yield name, math.inf
                continue
            # Differences in a weight's last places are rounding, even if the weight's change is as
            # small.
            rounding = torch.finfo(expected.dtype).eps * _highest(expected) * 4 if changes else 0.0
            expected, actual = _since(expected, changes, name, 0), _since(actual, changes, name, 1)
            yield name, _difference(expected, actual, largest, rounding)


def _since(tensor: Tensor, changes: _Before | None, name: str, side: int) -> Tensor:
    double = tensor.double()
    return double if changes is None else double - changes(name)[side].double()


def _difference(expected: Tensor, actual: Tensor, largest: float, rounding: float) -> float:
    """Return the largest difference minus the rounding, relative to the largest expected value."""
    difference = _highest(expected - actual)
    scale = max(_highest(expected), largest * GRADIENT_FLOOR, 1e-30)
    return max(0.0, difference - rounding) / scale if math.isfinite(difference) else math.inf


def _highest(tensor: Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0
