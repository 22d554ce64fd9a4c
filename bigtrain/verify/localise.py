"""The first place, in order of execution, in which two traced runs differ."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from bigtrain.files.parse import read_json_object
from bigtrain.files.regular import MOST_LINES
from bigtrain.verify.differences import (
    GRADIENT_FLOOR,
    Differences,
    Tolerance,
    gradient_differences,
    relative_difference,
    tolerances,
    update_tolerance,
)
from bigtrain.verify.execution_trace import Entry

_Place = tuple[bool, str, str, int]
"""Whether a gradient, the module, the operation, and the how manieth of its results."""


@dataclass(frozen=True)
class RankTrace:
    """What one rank noted."""

    rank: int
    dp_rank: int
    num_micro_batches: int
    """Of this rank, in a step."""
    blocks: tuple[str, ...]
    entries: tuple[Entry, ...]
    tp_rank: int = 0


def read_traces(folder: Path) -> list[RankTrace]:
    """The traces that the ranks of a run have written."""
    traces = []
    for path in sorted(folder.glob("trace-*.json")):
        found = read_json_object(path, most=MOST_LINES)
        entries = tuple(
            Entry._make((*entry[:-1], tuple(entry[-1]))) for entry in found.pop("entries")
        )
        traces.append(RankTrace(**found | {"blocks": tuple(found["blocks"])}, entries=entries))
    return sorted(traces, key=lambda trace: trace.rank)


def first_difference(
    reference: Path,
    other: Path,
    differences: Differences,
    tolerance: Tolerance,
    moved: Differences | None = None,
) -> str:
    """Say where a run first leaves one process: a value, a gradient, the norm or the update.

    Args:
        reference: the folder of one process, which had the same micro-batches one by one.
        other: the folder of the run.
        differences: of the two.
        tolerance: what rounding explains.
        moved: how far one process is from itself with moved weights.
    """
    (one,), ranks = read_traces(reference), read_traces(other)
    records = [read_json_object(f / "record.json") for f in (reference, other)]
    gradients = gradient_differences(reference, other)
    steps = len(records[0]["losses"])
    for index, held in enumerate(tolerances(tolerance, moved, steps)):
        step = index + 1
        for is_gradient in (False, True):
            found = _first_entry(one, ranks, step, held.tensors, is_gradient=is_gradient)
            if found is not None:
                return f"step {step}, {found}"
            losses = relative_difference(*(record["losses"][index] for record in records))
            if not is_gradient and losses > held.loss:
                return (
                    f"step {step}, the loss, which is {losses:.1e} off, while all values in the "
                    "model agree: what is summed, or what it is divided by"
                )
        wrong = {n: d for n, d in gradients.get(step, {}).items() if d > held.tensors}
        if wrong:
            return f"step {step}, {_first_parameter(one, wrong)}"
        norms = relative_difference(*(record["norms"][index] for record in records))
        if norms > held.norm:
            return (
                f"step {step}, the norm of the gradients, which is {norms:.1e} off, while every "
                "gradient agrees"
            )
    if differences.update > update_tolerance(tolerance, moved):
        name, far = differences.worst_updates[0]
        return (
            f"the optimizer's step: all gradients agree, and the update of {name} is {far:.1e} off"
        )
    return "nothing in a second run: the difference does not come again"


def _first_parameter(one: RankTrace, wrong: dict[str, float]) -> str:
    """The first of these parameters in the order of the backward pass."""
    last_use: dict[str, int] = {}
    for position, entry in enumerate(one.entries):
        if not entry.is_gradient:
            last_use[entry.module] = position
    name = max(wrong, key=lambda name: (last_use.get(name.rpartition(".")[0], -1), wrong[name]))
    return (
        f"the gradient of the parameter {name}{_in_block(one, name)}, which is {wrong[name]:.1e} "
        "off after averaging, while all values and their gradients agree"
    )


def _first_entry(
    one: RankTrace, ranks: Sequence[RankTrace], step: int, tolerance: float, *, is_gradient: bool
) -> str | None:
    """The first value or gradient of a value that differs, in the order of one process."""
    calls = {module: count // one.num_micro_batches for module, count in _calls(one, step).items()}
    found: dict[tuple[_Place, int], dict[int, tuple[RankTrace, Entry]]] = {}
    for rank in ranks:
        for entry in _of_step(rank, step, is_gradient=is_gradient):
            each = calls.get(entry.module, 0)
            if each:
                number = rank.dp_rank * rank.num_micro_batches + entry.call // each
                call = number * each + entry.call % each
                found.setdefault((_place(entry), call), {}).setdefault(rank.tp_rank, (rank, entry))
    expected = list(_of_step(one, step, is_gradient=is_gradient))
    largest = max((entry.digest[0] for entry in expected if entry.digest[0] < math.inf), default=0)
    for entry in expected:
        # Ranks of one tp group have all of them the whole.
        for rank, other in found.get((_place(entry), entry.call), {}).values():
            apart = _apart(entry.digest, other.digest, largest)
            if apart > tolerance:
                what = "the gradient of " if is_gradient else ""
                named = f"{what}{entry.operation} in {entry.module or 'the model'}"
                return (
                    f"{named}{_in_block(one, entry.module)}, which is {apart:.1e} off on rank "
                    f"{rank.rank} (micro-batch {entry.call // calls[entry.module] + 1} of "
                    f"{one.num_micro_batches})"
                )
    return None


def _apart(expected: Sequence[float], other: Sequence[float], largest: float) -> float:
    """How far two tensors are apart by their digests, relative to the norm of the first."""
    if not all(map(math.isfinite, (*expected, *other))):
        return 0.0 if list(map(repr, expected)) == list(map(repr, other)) else math.inf
    squares = [(a - b) ** 2 for a, b in zip(expected[1:], other[1:], strict=True)]
    apart = max(math.sqrt(sum(squares) / len(squares)), abs(expected[0] - other[0]))
    return apart / max(expected[0], largest * GRADIENT_FLOOR, 1e-30)


def _calls(one: RankTrace, step: int) -> Counter[str]:
    calls: Counter[str] = Counter()
    for entry in _of_step(one, step, is_gradient=False):
        calls[entry.module] = max(calls[entry.module], entry.call + 1)
    return calls


def _of_step(trace: RankTrace, step: int, *, is_gradient: bool) -> Iterator[Entry]:
    return (e for e in trace.entries if e.step == step and e.is_gradient == is_gradient)


def _place(entry: Entry) -> _Place:
    return entry.is_gradient, entry.module, entry.operation, entry.number


def _in_block(one: RankTrace, name: str) -> str:
    blocks = [block for block in one.blocks if f"{name}.".startswith(f"{block}.")]
    return f" (block {max(blocks, key=len)})" if blocks else ""
