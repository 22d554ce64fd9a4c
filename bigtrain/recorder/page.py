"""One page for a run that hangs or has died: who waits, for what, and who never came.

Made of the records of all ranks (`FlightRecorder.record`) by one of them, without torch. A rank
that gave no record is one that does not answer: it is stopped, gone, or in native code that does
not let go of Python.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bigtrain.files.parse import read_json_object
from bigtrain.recorder.ring import FlightRecorder
from bigtrain.recorder.waiting import Wait, blamed, known_waits
from bigtrain.units import format_bytes

FILE_NAME = "flight_recorder.json"
"""In the run's folder."""
_SHOWN_STACKS = 6
_TORCH = "/site-packages/torch/"
_FOREIGN = ("/site-packages/", "/lib/python", "<frozen")
_OURS = tuple(
    str(Path(__file__).resolve().parents[up] / name) for up, name in ((1, ""), (2, "strategies"))
)
_ACTIVITIES = (
    ("/bigtrain/checkpoint/save.py", "writes a checkpoint"),
    ("/bigtrain/checkpoint/", "reads a checkpoint"),
    ("/bigtrain/report/run_log.py", "writes the log"),
)
"""What a rank does outside of a step, by the sources on its stack."""

Record = dict[str, Any]


@dataclass(frozen=True)
class Cause:
    """Why the page is made."""

    kind: str
    """`waited` (too long, or in vain), `failed`, `lost`, `asked` (by a signal), or `found`: what
    all ranks have seen, whichever of them reported it."""
    rank: int
    """Who noticed, failed, or is lost."""
    text: str = ""
    """The error's summary."""


@dataclass(frozen=True)
class FlightPage:
    """The page in words, and what it was made of."""

    headline: str
    lines: tuple[str, ...]
    """One for each rank."""
    stacks: tuple[str, ...]
    """Python stacks, those that are alike once."""
    document: dict[str, Any]
    """For the file."""

    def text(self, *, stacks: bool = True) -> str:
        """The page for a terminal."""
        parts = [self.headline, *(f"  {line}" for line in self.lines)]
        return "\n".join([*parts, *self.stacks] if stacks else parts)

    def write(self, folder: Path | None) -> Path | None:
        """Write the file; return its path, or None where there is no folder or no room."""
        if folder is None:
            return None
        path = folder / FILE_NAME
        with contextlib.suppress(OSError):
            path.write_text(json.dumps(self.document, indent=1) + "\n", encoding="utf-8")
            return path
        return None


def show_page(recorder: FlightRecorder, records: Mapping[int, Record], cause: Cause) -> FlightPage:
    """Print the page, and leave it in the run's folder.

    An error is said by its own message, so that here only what the rank did is printed.

    Args:
        recorder: of this rank.
        records: of the ranks that have answered.
        cause: why it is made.
    """
    everyone = {rank: records.get(rank) for rank in range(recorder.world_size)} | dict(records)
    page = make_page(everyone, cause)
    text, record = page.text(), everyone.get(cause.rank)
    if cause.kind == "failed" and record is not None:
        text = f"rank {cause.rank} failed {failed_in(record)}"
    path = page.write(recorder.folder)
    where = f"the last events of each rank: {path}" if path else ""
    lines = [where] if cause.kind == "found" else [text, where]
    sys.stderr.write("".join(f"bigtrain: {line}\n" for line in lines if line))
    sys.stderr.flush()
    return page


def records_by_files(recorder: FlightRecorder, moment_s: float) -> dict[int, Record]:
    """The records of the ranks that are left where rank 0, which collects them, is silent.

    Each leaves its own in the run's folder, and reads those of the others as they come.

    Args:
        recorder: of this rank.
        moment_s: seconds to wait at most for the records of all ranks but rank 0.
    """
    own = recorder.record()
    if recorder.folder is None:
        return {recorder.rank: own}
    began = time.time()
    path = recorder.folder / f".flight_recorder-{recorder.rank}.json"
    found = {recorder.rank: own}
    with contextlib.suppress(OSError, ValueError, KeyError):
        path.with_suffix(".part").write_text(json.dumps(own), encoding="utf-8")
        path.with_suffix(".part").replace(path)
        until = time.monotonic() + moment_s
        while len(found) < recorder.world_size - 1 and time.monotonic() < until:
            time.sleep(0.05)
            for other in recorder.folder.glob(".flight_recorder-*.json"):
                if other.stat().st_mtime > began - 5:
                    record = read_json_object(other)
                    found[int(record["rank"])] = record
    return found


def make_page(records: Mapping[int, Record | None], cause: Cause) -> FlightPage:
    """Say where every rank was, and which one the others wait for.

    Args:
        records: of all ranks; None of one that has not answered.
        cause: why it is made.
    """
    waits = known_waits(records)
    headline = _headline(records, cause, waits)
    lines = tuple(
        f"rank {rank}: {_line(record, waits.get(rank)) if record else _silence(rank, cause)}"
        for rank, record in sorted(records.items())
    )
    document = {
        "headline": headline,
        "cause": {"kind": cause.kind, "rank": cause.rank, "text": cause.text},
        "lines": list(lines),
        "ranks": [records[rank] or {"rank": rank, "answered": False} for rank in sorted(records)],
    }
    return FlightPage(headline, lines, _stacks(records), document)


def _headline(records: Mapping[int, Record | None], cause: Cause, waits: Mapping[int, Wait]) -> str:
    if cause.kind == "failed":
        record = records.get(cause.rank)
        where = f" It {doing(record)}." if record else ""
        return f"rank {cause.rank} failed: {cause.text}.{where}"
    if cause.kind == "found":
        return cause.text
    waiting = _first_to_wait(cause, waits)
    if waiting is None:
        if cause.kind == "lost":
            return f"rank {cause.rank} ended without a message; no rank waited for it"
        return "no rank waits for another" if cause.kind == "asked" else cause.text
    said = f"rank {waiting.rank} waits for {waiting.words()}"
    if cause.kind == "lost":
        return f"{said}; rank {cause.rank} ended without a message"
    culprit = blamed(waiting, waits, records)
    if culprit is None:
        return f"{said}; {_together(waiting, waits)}"
    absent = records.get(culprit)
    if absent is None:
        return f"{said}; rank {culprit} has not answered: it is stopped, or stuck in native code"
    return f"{said}; rank {culprit} never came: it {doing(absent)}"


def _first_to_wait(cause: Cause, waits: Mapping[int, Wait]) -> Wait | None:
    if cause.rank in waits:
        return waits[cause.rank]
    return max(waits.values(), key=lambda wait: wait.seconds, default=None)


def _together(waiting: Wait, waits: Mapping[int, Wait]) -> str:
    """What is to be said where all ranks have come."""
    there = [w for w in waits.values() if w.group == waiting.group and w.number == waiting.number]
    kinds = sorted({f"{wait.kind} of {format_bytes(wait.size)}" for wait in there})
    if len(kinds) > 1 and not waiting.message:
        return (
            f"the ranks are not in the same exchange ({' and '.join(kinds)}): they do not run the "
            "same code on the same shapes"
        )
    if waiting.message:
        return "the ranks wait for each other"
    return "all its ranks came, and it does not end: look at the network between them"


def _line(record: Record, wait: Wait | None) -> str:
    said = doing(record)
    if wait is not None:
        said = f"waits for {wait.words()}; {said}"
    if record["peak_bytes"]:
        said += f"; peak {format_bytes(record['peak_bytes'])}"
    return said


def _silence(rank: int, cause: Cause) -> str:
    return "ended without a message" if (cause.kind, cause.rank) == ("lost", rank) else "no answer"


def doing(record: Record) -> str:
    """What a rank does, as the words after "it": "reads data (micro-batch 2 of step 41)"."""
    activity = _activity(record["stack"])
    phase, step = record["phase"], record["step"]
    place = f"step {step}"
    if record["micro_batch"]:
        place = f"{record['unit']} {record['micro_batch']} of {place}"
    if phase == "data":
        following = f"micro-batch {record['micro_batch']} of step {step + 1}"
        return f"reads data ({following}){_at(record['stack'])}"
    if phase in ("forward", "backward"):
        block = f" of {record['block']}" if record["block"] else ""
        return f"is in the {phase} pass{block} ({place})"
    if phase == "step":
        return f"is in the optimizer's step (step {step})"
    if phase == "begin":
        return f"begins step {step}"
    after = f"after step {step}" if step else "before the first step"
    if activity:
        return f"{activity} ({after})"
    if phase == "evaluate":
        return f"validates ({after})"
    if phase == "build" and not step:
        return f"builds the model{_at(record['stack'])}"
    return f"is between two steps ({after}){_at(record['stack'])}"


def failed_in(record: Record) -> str:
    """Where a rank failed: "in the forward pass of `blocks.2` (step 1, micro-batch 1)"."""
    phase, step = record["phase"], record["step"]
    if phase in ("forward", "backward"):
        block = f" of `{record['block']}`" if record["block"] else ""
        part = f", {record['unit']} {record['micro_batch']}" if record["micro_batch"] else ""
        return f"in the {phase} pass{block} (step {step}{part})"
    if phase == "step":
        return f"in the optimizer's step (step {step})"
    said = doing(record)
    for verb, words in _IN_THE_PAST.items():
        if said.startswith(verb):
            return f"{words}{said.removeprefix(verb)}"
    return f"as it {said}"


_IN_THE_PAST = {
    "reads ": "while it read ",
    "writes ": "while it wrote ",
    "builds ": "while it built ",
    "begins ": "at the beginning of ",
    "validates": "in validation",
    "is between": "between",
}
"""What `doing` says, as the words after "it failed"."""


def _activity(stack: list[str]) -> str:
    for line in stack:
        for source, words in _ACTIVITIES:
            if source in line.replace("\\", "/"):
                return words
    return ""


def _at(stack: list[str]) -> str:
    """The innermost frame of the user's own code."""
    for line in reversed(stack):
        file, _, name = line.rpartition(" ")
        if not file.startswith(_OURS) and not any(part in file for part in _FOREIGN):
            return f", in {name} of {'/'.join(Path(file).parts[-2:])}"
    return ""


def _stacks(records: Mapping[int, Record | None]) -> tuple[str, ...]:
    """For a person: of torch's own calls the last one only; the file has all."""
    alike: dict[tuple[str, ...], list[int]] = {}
    for rank, record in sorted(records.items()):
        if record is not None and record["stack"]:
            *outer, last = record["stack"]
            stack = (*(line for line in outer if _TORCH not in line.replace("\\", "/")), last)
            alike.setdefault(stack, []).append(rank)
    shown = []
    for stack, ranks in list(alike.items())[:_SHOWN_STACKS]:
        whose = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
        shown.append("\n".join([f"stack of {whose}:", *(f"    {line}" for line in stack)]))
    if len(alike) > _SHOWN_STACKS:
        shown.append(f"{len(alike) - _SHOWN_STACKS} other stacks are in {FILE_NAME}")
    return tuple(shown)
