"""Find the first operation, in the order of execution, in which two traced runs differ."""

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

_Key = tuple[bool, str, str, int]
"""Identifies a value in a call: whether it is a gradient, module, operation, number of result."""


@dataclass(frozen=True)
class RankTrace:
    """The trace of one rank."""

    rank: int
    dp_rank: int
    num_micro_batches: int
    """The number of micro-batches of this rank in a step."""
    blocks: tuple[str, ...]
    """The names of the model's blocks."""
    entries: tuple[Entry, ...]
    tp_rank: int = 0


def read_traces(folder: Path) -> list[RankTrace]:
    """Return the traces that the ranks of a run have written to a folder, in the order of ranks."""
    traces = []
    for path in sorted(folder.glob("trace-*.json")):
        values = read_json_object(path, most=MOST_LINES)
        entries = tuple(
            Entry._make((*entry[:-1], tuple(entry[-1]))) for entry in values.pop("entries")
        )
        traces.append(RankTrace(**values | {"blocks": tuple(values["blocks"])}, entries=entries))
    return sorted(traces, key=lambda trace: trace.rank)


def first_difference(
    reference: Path,
    other: Path,
    differences: Differences,
    tolerance: Tolerance,
    moved: Differences | None = None,
) -> str:
    """Describe the first value, gradient, norm or update in which a run differs from the reference.

    Args:
        reference: the folder of the traced reference, which had the run's micro-batches.
        other: the folder of the traced run.
        differences: the differences of the two runs, from an earlier pair of recordings.
        tolerance: the differences that rounding explains.
        moved: the differences of the reference from itself with perturbed weights; see
            `differences.tolerances`.
    """
    (reference_trace,), ranks = read_traces(reference), read_traces(other)
    records = [read_json_object(f / "record.json") for f in (reference, other)]
    gradients = gradient_differences(reference, other)
    steps = len(records[0]["losses"])
    for index, limit in enumerate(tolerances(tolerance, moved, steps)):
        step = index + 1
        for is_gradient in (False, True):
            entry = _first_entry(
                reference_trace, ranks, step, limit.tensors, is_gradient=is_gradient
            )
            if entry is not None:
                return f"step {step}, {entry}"
            losses = relative_difference(*(record["losses"][index] for record in records))
            if not is_gradient and losses > limit.loss:
                return (
                    f"step {step}, the loss, which is {losses:.1e} off, while all values in the "
                    "model agree: check the sum of the losses and its divisor"
                )
        wrong = {n: d for n, d in gradients.get(step, {}).items() if d > limit.tensors}
        if wrong:
            return f"step {step}, {_first_parameter(reference_trace, wrong)}"
        norms = relative_difference(*(record["norms"][index] for record in records))
        if norms > limit.norm:
            return (
                f"step {step}, the norm of the gradients, which is {norms:.1e} off, while every "
                "gradient agrees"
            )
    if differences.update > update_tolerance(tolerance, moved):
        name, far = differences.worst_updates[0]
        return (
            f"the optimizer's step: all gradients agree, and the update of {name} is {far:.1e} off"
        )
    return "none in a second run: the difference did not occur again"


def _first_parameter(reference: RankTrace, wrong: dict[str, float]) -> str:
    """Describe the first of these parameters in the order of the backward pass.

    Args:
        reference: the trace of the reference.
        wrong: the difference of the gradient of each parameter that differs.
    """
    last_use: dict[str, int] = {}
    for position, entry in enumerate(reference.entries):
        if not entry.is_gradient:
            last_use[entry.module] = position
    name = max(wrong, key=lambda name: (last_use.get(name.rpartition(".")[0], -1), wrong[name]))
    return (
        f"the gradient of the parameter {name}{_in_block(reference, name)}, which is "
        f"{wrong[name]:.1e} off after averaging, while all values and their gradients agree"
    )


def _first_entry(
    reference: RankTrace,
    ranks: Sequence[RankTrace],
    step: int,
    tolerance: float,
    *,
    is_gradient: bool,
) -> str | None:
    """Describe the first value or gradient that differs, in the reference's order; None if none."""
    calls = {
        module: count // reference.num_micro_batches
        for module, count in _calls(reference, step).items()
    }
    traced: dict[tuple[_Key, int], dict[int, tuple[RankTrace, Entry]]] = {}
    for rank in ranks:
        for entry in _of_step(rank, step, is_gradient=is_gradient):
            per_micro_batch = calls.get(entry.module, 0)
            if per_micro_batch:
                number = rank.dp_rank * rank.num_micro_batches + entry.call // per_micro_batch
                call = number * per_micro_batch + entry.call % per_micro_batch
                by_tp_rank = traced.setdefault((_key(entry), call), {})
                by_tp_rank.setdefault(rank.tp_rank, (rank, entry))
    expected = list(_of_step(reference, step, is_gradient=is_gradient))
    largest = max((entry.digest[0] for entry in expected if entry.digest[0] < math.inf), default=0)
    for entry in expected:
        # Each rank of a tp group has recorded the whole tensor, so each is compared.
        for rank, entry_of_rank in traced.get((_key(entry), entry.call), {}).values():
            difference = _difference(entry.digest, entry_of_rank.digest, largest)
            if difference > tolerance:
                prefix = "the gradient of " if is_gradient else ""
                name = f"{prefix}{entry.operation} in {entry.module or 'the model'}"
                return (
                    f"{name}{_in_block(reference, entry.module)}, which is {difference:.1e} off "
                    f"on rank {rank.rank} (micro-batch {entry.call // calls[entry.module] + 1} of "
                    f"{reference.num_micro_batches})"
                )
    return None


def _difference(expected: Sequence[float], digest: Sequence[float], largest: float) -> float:
    """Return the difference of two tensors by their digests, relative to the expected norm."""
    if not all(map(math.isfinite, (*expected, *digest))):
        return 0.0 if list(map(repr, expected)) == list(map(repr, digest)) else math.inf
    squares = [(a - b) ** 2 for a, b in zip(expected[1:], digest[1:], strict=True)]
    difference = max(math.sqrt(sum(squares) / len(squares)), abs(expected[0] - digest[0]))
    return difference / max(expected[0], largest * GRADIENT_FLOOR, 1e-30)


def _calls(trace: RankTrace, step: int) -> Counter[str]:
    calls: Counter[str] = Counter()
    for entry in _of_step(trace, step, is_gradient=False):
        calls[entry.module] = max(calls[entry.module], entry.call + 1)
    return calls


def _of_step(trace: RankTrace, step: int, *, is_gradient: bool) -> Iterator[Entry]:
    return (e for e in trace.entries if e.step == step and e.is_gradient == is_gradient)


def _key(entry: Entry) -> _Key:
    return entry.is_gradient, entry.module, entry.operation, entry.number


def _in_block(trace: RankTrace, name: str) -> str:
    blocks = [block for block in trace.blocks if f"{name}.".startswith(f"{block}.")]
    return f" (block {max(blocks, key=len)})" if blocks else ""
