"""How far two recordings of the same steps lie apart, and how far they may."""

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
"""A gradient that is everywhere below this share of the model's largest is all rounding: what is
compared is then held against that share."""

GROWTH = 10
"""A difference that is less than this many times what one process is from itself, when its weights
begin a unit in the last place away, is grown rounding."""


@dataclass(frozen=True)
class Tolerance:
    """The largest relative differences that rounding explains."""

    loss: float
    norm: float
    tensors: float
    """Of gradients and of what steps change in the weights."""

    @classmethod
    def of(cls, precision: Precision) -> Tolerance:
        """What sums in another order may change, over a few steps.

        Some multiples of what was measured (docs/internals/measured.md): of the unit in the last
        place in fp64 and fp32, and in bf16, where a gradient is rounded each time that it is added
        to, of 2^-8. Of a loss DeepSpeed's stage 3 takes 4e-4: it rounds before it adds the bias.
        """
        return {
            "fp64": cls(1e-12, 1e-9, 1e-9),
            "fp32": cls(1e-6, 1e-6, 1e-5),
            "bf16": cls(1e-3, 5e-3, 5e-2),
        }[precision]

    def grown(self, loss: float, norm: float, tensors: float) -> Tolerance:
        """No less than some times what one process is from itself with moved weights."""
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
    """None where the run has no gradients to compare."""
    update: float
    """Of what all steps together changed in the weights: the weights themselves hardly change."""
    worst_gradients: tuple[tuple[str, float], ...] = ()
    """The parameters whose gradients differ most."""
    worst_updates: tuple[tuple[str, float], ...] = ()
    missing: tuple[str, ...] = field(default=())
    """Names that one of the two has and the other has not."""
    steps: tuple[StepDifferences, ...] = ()
    """Step by step."""

    def passed(
        self, tolerance: Tolerance, moved: Differences | None = None, *, losses_only: bool = False
    ) -> bool:
        """Whether all of them are within the tolerance.

        Args:
            tolerance: what rounding explains.
            moved: how far one process is from itself with moved weights; see `tolerances`.
            losses_only: the optimizer magnifies rounding (AdamW divides by it where a gradient is
                all rounding), so only losses, at ten times the tolerance, and norms are held to it.
        """
        if self.missing or not math.isfinite(self.loss):  # one of the two may have fewer steps
            return False
        held_to = tolerances(tolerance, moved, len(self.steps))
        for step, held in zip(self.steps, held_to, strict=True):
            if step.loss > held.loss * (10 if losses_only else 1) or step.norm > held.norm:
                return False
            if not losses_only and (step.gradient or 0.0) > held.tensors:
                return False
        return losses_only or self.update <= update_tolerance(tolerance, moved)


def tolerances(tolerance: Tolerance, moved: Differences | None, steps: int) -> list[Tolerance]:
    """What each step is held to.

    Where ReLU and max pooling choose by a comparison, or BatchNorm divides by a small variance, a
    difference in the last place grows from step to step in one process, too.

    Args:
        tolerance: of the first step, whatever the model.
        moved: how far one process is from itself when its weights begin a unit in the last place
            away; None where it was not run.
        steps: how many are compared.
    """
    if moved is None:
        return [tolerance] * steps
    return [tolerance.grown(s.loss, s.norm, s.gradient or 0.0) for s in moved.steps[:steps]]


def update_tolerance(tolerance: Tolerance, moved: Differences | None) -> float:
    """What the change of the weights is held to."""
    return tolerance.tensors if moved is None else max(tolerance.tensors, GROWTH * moved.update)


def compare_recordings(reference: Path, other: Path) -> Differences:
    """Compare two folders that `bigtrain.verify.record` has written, a tensor at a time."""
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
    """By the number of a step how far the gradients of each parameter are apart in it."""
    found: dict[int, dict[str, float]] = {}
    if _record(other)["no_gradients"] is not None:
        return found
    for path in reference.glob("gradients-*.safetensors"):
        pair = _Pair(path, other / path.name)
        found[int(path.stem.rpartition("-")[2])] = dict(pair.differences())
    return dict(sorted(found.items()))


def _worst(differences: dict[str, float]) -> tuple[tuple[str, float], ...]:
    return tuple(sorted(differences.items(), key=lambda item: -item[1])[:3])


def _record(folder: Path) -> dict[str, Any]:
    return read_json_object(folder / "record.json")


def _each(one: list[float], two: list[float]) -> list[float]:
    if len(one) != len(two):
        return [math.inf]
    return [relative_difference(a, b) for a, b in zip(one, two, strict=True)]


def relative_difference(expected: float, found: float) -> float:
    """How far a number is from the expected one; infinite where one is not finite."""
    if not (math.isfinite(expected) and math.isfinite(found)):
        return math.inf
    return abs(expected - found) / max(abs(expected), 1e-12)


_Before = Callable[[str], tuple[Tensor, Tensor]]


class _Pair:
    """The same file of two recordings."""

    def __init__(self, one: Path, two: Path) -> None:
        self._one, self._two = tensors_of_file(one), tensors_of_file(two)
        names = set(self._one), set(self._two)
        self.common, self.missing = sorted(names[0] & names[1]), names[0] ^ names[1]

    def tensors(self, name: str) -> tuple[Tensor, Tensor]:
        """Both tensors of a name."""
        return read_whole(self._one[name]), read_whole(self._two[name])

    def differences(self, before: _Pair | None = None) -> Iterator[tuple[str, float]]:
        """Each name with its largest difference, relative to the tensor's largest value.

        Args:
            before: compare what has changed since then.
        """
        changes = before.tensors if before is not None else None
        largest = 0.0
        for name in self.common:
            expected = read_whole(self._one[name])
            largest = max(largest, _highest(_since(expected, changes, name, 0)))
        for name in self.common:
            expected, found = self.tensors(name)
            if expected.shape != found.shape:
                yield name, math.inf
                continue
            # A change in a weight's last places is rounding, however small the whole change is.
            rounding = torch.finfo(expected.dtype).eps * _highest(expected) * 4 if changes else 0.0
            expected, found = _since(expected, changes, name, 0), _since(found, changes, name, 1)
            yield name, _difference(expected, found, largest, rounding)


def _since(tensor: Tensor, changes: _Before | None, name: str, side: int) -> Tensor:
    double = tensor.double()
    return double if changes is None else double - changes(name)[side].double()


def _difference(expected: Tensor, found: Tensor, largest: float, place: float) -> float:
    """How far two tensors are apart, less what is `place`, against the first's largest value."""
    apart = _highest(expected - found)
    scale = max(_highest(expected), largest * GRADIENT_FLOOR, 1e-30)
    return max(0.0, apart - place) / scale if math.isfinite(apart) else math.inf


def _highest(tensor: Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0
