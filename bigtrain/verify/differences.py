"""The differences between two recordings of the same steps, and their tolerance."""

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
"""A gradient that is everywhere below this share of the model's largest is only rounding: its
difference is then taken relative to that share."""

GROWTH = 10
"""A difference counts as grown rounding if it is less than this many times the difference of one
process from itself with weights that begin one unit in the last place away."""


@dataclass(frozen=True)
class Tolerance:
    """The largest relative differences that rounding explains."""

    loss: float
    norm: float
    tensors: float
    """For gradients, and for the change of the weights over all steps."""

    @classmethod
    def of(cls, precision: Precision) -> Tolerance:
        """Return the effect that sums in another order may have over a few steps.

        It is a small multiple of the measured differences (docs/internals/measured.md), which are
        of the order of the unit in the last place in fp64 and fp32, and of 2^-8 in bf16, where a
        gradient is rounded at each addition. A loss of DeepSpeed's stage 3 differs by up to 4e-4,
        because it rounds before it adds the bias.
        """
        return {
            "fp64": cls(1e-12, 1e-9, 1e-9),
            "fp32": cls(1e-6, 1e-6, 1e-5),
            "bf16": cls(1e-3, 5e-3, 5e-2),
        }[precision]

    def grown(self, loss: float, norm: float, tensors: float) -> Tolerance:
        """Return the tolerance, or `GROWTH` times the differences if that is more."""
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


@dataclass(frozen=True)
class Differences:
    """The largest relative differences over all steps."""

    loss: float
    norm: float
    gradient: float | None
    """The largest difference of a gradient; None if the run has no gradients to compare."""
    update: float
    """The difference of the change that all steps made to the weights. The weights themselves
    change too little to compare."""
    worst_gradients: tuple[tuple[str, float], ...] = ()
    """The parameters whose gradients differ most."""
    worst_updates: tuple[tuple[str, float], ...] = ()
    """The parameters whose change differs most."""
    missing: tuple[str, ...] = field(default=())
    """Names that only one of the two recordings has."""
    steps: tuple[StepDifferences, ...] = ()
    """The differences of each step."""

    def passed(
        self, tolerance: Tolerance, moved: Differences | None = None, *, losses_only: bool = False
    ) -> bool:
        """Whether all of them are within the tolerance.

        Args:
            tolerance: the differences that rounding explains.
            moved: the differences of one process from itself; see `tolerances`.
            losses_only: compare only norms, and losses with ten times the tolerance. It is for
                optimizers that magnify rounding: AdamW divides by a gradient that is only rounding.
        """
        if self.missing or not math.isfinite(self.loss):  # one of the two may have fewer steps
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

    A difference in the last place may grow from step to step even in one process: ReLU and max
    pooling choose by a comparison, and BatchNorm may divide by a small variance.

    Args:
        tolerance: the tolerance of the first step, for any model.
        moved: the differences of one process from itself with weights that begin one unit in the
            last place away; None if they were not measured.
        steps: the number of steps that are compared.
    """
    if moved is None:
        return [tolerance] * steps
    return [tolerance.grown(s.loss, s.norm, s.gradient or 0.0) for s in moved.steps[:steps]]


def update_tolerance(tolerance: Tolerance, moved: Differences | None) -> float:
    """Return the tolerance of the change of the weights; see `tolerances`."""
    return tolerance.tensors if moved is None else max(tolerance.tensors, GROWTH * moved.update)


def compare_recordings(reference: Path, other: Path) -> Differences:
    """Compare two recordings of `bigtrain.verify.record`, one tensor at a time.

    Args:
        reference: the folder of the reference.
        other: the folder of the run.
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
    """Return the differences of the gradients, by the number of the step and by parameter."""
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
    """Return the relative difference from the expected number; infinite if one is not finite."""
    if not (math.isfinite(expected) and math.isfinite(actual)):
        return math.inf
    return abs(expected - actual) / max(abs(expected), 1e-12)


_Before = Callable[[str], tuple[Tensor, Tensor]]


class _Pair:
    """The same file of two recordings."""

    def __init__(self, first: Path, second: Path) -> None:
        self._reference, self._compared = tensors_of_file(first), tensors_of_file(second)
        names = set(self._reference), set(self._compared)
        self.common, self.missing = sorted(names[0] & names[1]), names[0] ^ names[1]

    def tensors(self, name: str) -> tuple[Tensor, Tensor]:
        """Return both tensors of a name."""
        return read_whole(self._reference[name]), read_whole(self._compared[name])

    def differences(self, before: _Pair | None = None) -> Iterator[tuple[str, float]]:
        """Yield each name with its largest difference, relative to the tensor's largest value.

        Args:
            before: subtract these tensors first, to compare the changes since then.
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
            # A change in a weight's last places is rounding, however small the whole change is.
            rounding = torch.finfo(expected.dtype).eps * _highest(expected) * 4 if changes else 0.0
            expected, actual = _since(expected, changes, name, 0), _since(actual, changes, name, 1)
            yield name, _difference(expected, actual, largest, rounding)


def _since(tensor: Tensor, changes: _Before | None, name: str, side: int) -> Tensor:
    double = tensor.double()
    return double if changes is None else double - changes(name)[side].double()


def _difference(expected: Tensor, actual: Tensor, largest: float, rounding: float) -> float:
    """The largest difference less the rounding, relative to the largest expected value."""
    difference = _highest(expected - actual)
    scale = max(_highest(expected), largest * GRADIENT_FLOOR, 1e-30)
    return max(0.0, difference - rounding) / scale if math.isfinite(difference) else math.inf


def _highest(tensor: Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0
