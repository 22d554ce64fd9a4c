"""How far two recordings of the same steps lie apart, and how far they may."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from bigtrain.config import Precision

FLOOR = 1e-4
"""A gradient that is everywhere below this share of the model's largest is all rounding: what is
compared is then held against that share."""


@dataclass(frozen=True)
class Tolerance:
    """The largest relative differences that rounding explains."""

    loss: float
    tensors: float
    """Of gradient norms, gradients and weights."""

    @classmethod
    def of(cls, precision: Precision) -> Tolerance:
        """What sums in another order may change, over a few steps.

        Some multiples of the unit in the last place: 2.2e-16 in fp64, 1.2e-7 in fp32, and in bf16,
        where products are rounded and losses are means of many of them, 7.8e-3.
        """
        return {
            "fp64": cls(1e-12, 1e-9),
            "fp32": cls(1e-5, 1e-3),
            "bf16": cls(5e-3, 2e-1),
        }[precision]


@dataclass(frozen=True)
class Differences:
    """The largest relative differences over all steps."""

    loss: float
    norm: float
    gradient: float | None
    """None where the run has no gradients to compare."""
    weight: float
    worst: tuple[tuple[str, float], ...] = ()
    """The parameters whose gradients differ most."""
    missing: tuple[str, ...] = field(default=())
    """Names that one of the two has and the other has not."""

    def passed(self, tolerance: Tolerance, *, losses_only: bool = False) -> bool:
        """Whether all of them are within the tolerance.

        Args:
            tolerance: what rounding explains.
            losses_only: the optimizer magnifies rounding (AdamW divides by it where a gradient is
                all rounding), so after the first step only losses and norms are held to it.
        """
        if self.missing or self.loss > tolerance.loss * (10 if losses_only else 1):
            return False
        if losses_only:
            return self.norm <= tolerance.tensors
        return max(self.norm, self.gradient or 0.0, self.weight) <= tolerance.tensors


def compare(reference: Path, other: Path) -> Differences:
    """Compare two folders that `bigtrain.record` has written, a tensor at a time."""
    one, two = _record(reference), _record(other)
    worst: dict[str, float] = {}
    missing: set[str] = set()
    steps = sorted(reference.glob("gradients-*.safetensors"))
    for path in steps if two["no_gradients"] is None else ():
        for name, difference in _tensors(path, other / path.name):
            if difference is None:
                missing.add(name)
            else:
                worst[name] = max(worst.get(name, 0.0), difference)
    weights = dict(_tensors(reference / "weights.safetensors", other / "weights.safetensors"))
    missing |= {name for name, difference in weights.items() if difference is None}
    ordered = sorted(worst.items(), key=lambda item: -item[1])
    return Differences(
        loss=_largest(one["losses"], two["losses"]),
        norm=_largest(one["norms"], two["norms"]),
        gradient=ordered[0][1] if ordered else None,
        weight=max((d for d in weights.values() if d is not None), default=0.0),
        worst=tuple(ordered[:3]),
        missing=tuple(sorted(missing)),
    )


def _record(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "record.json").read_text("utf-8"))
    return found


def _largest(one: list[float], two: list[float]) -> float:
    if len(one) != len(two):
        return math.inf
    return max((_relative(a, b) for a, b in zip(one, two, strict=True)), default=0.0)


def _relative(expected: float, found: float) -> float:
    if not (math.isfinite(expected) and math.isfinite(found)):
        return math.inf
    return abs(expected - found) / max(abs(expected), 1e-12)


def _tensors(one: Path, two: Path) -> Iterator[tuple[str, float | None]]:
    """Each name with the largest difference relative to the tensor's largest value."""
    with safe_open(one, "pt") as expected, safe_open(two, "pt") as found:
        names = set(expected.keys())
        for name in names ^ set(found.keys()):
            yield name, None
        common = sorted(names & set(found.keys()))
        largest = max((_highest(expected.get_tensor(name)) for name in common), default=0.0)
        for name in common:
            yield name, _difference(expected.get_tensor(name), found.get_tensor(name), largest)


def _difference(expected: Tensor, found: Tensor, largest: float) -> float:
    if expected.shape != found.shape:
        return math.inf
    if not expected.numel() or not expected.is_floating_point():
        return 0.0 if torch.equal(expected, found) else math.inf
    apart = _highest(expected.double() - found.double())
    scale = max(_highest(expected), largest * FLOOR, 1e-30)
    return apart / scale if math.isfinite(apart) else math.inf


def _highest(tensor: Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0
