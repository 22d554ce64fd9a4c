"""A page for a run that hangs or has died: which rank waits for which exchange and for whom.

One rank makes the page from the records of all ranks (`FlightRecorder.record`), without torch. A
rank that has not sent its record is stopped, has ended, or is in native code that holds Python's
global lock (the GIL).
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
from bigtrain.recorder.waiting import Wait, absent_ranks, blamed, known_waits
from bigtrain.units import format_bytes

FILE_NAME = "flight_recorder.json"
"""The name of the page's file in the run's folder."""
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
"""The activity of a rank outside of a step, by the source files on its stack."""

Record = dict[str, Any]


@dataclass(frozen=True)
class Cause:
    """The reason for a page."""

    kind: str
    """'waited': a rank waited too long. 'failed': a rank raised an error. 'lost': a rank ended
    without a message. 'asked': a signal requested the page. 'found': all ranks raised the same
    error, and one rank reports it."""
    rank: int
    """The rank that waited, failed, was lost, received the signal or reports the error."""
    text: str = ""
    """A summary of the error; empty for 'lost' and 'asked'."""


@dataclass(frozen=True)
class FlightPage:
    """The page as lines of text, and as the content of its file."""

    headline: str
    lines: tuple[str, ...]
    """One line for each rank."""
    stacks: tuple[str, ...]
    """The main threads' Python stacks. Ranks with equal stacks share an entry, which names them."""
    document: dict[str, Any]
    """The content of the JSON file."""

    def text(self, *, stacks: bool = True) -> str:
        """Return the page as text for a terminal, with or without the stacks."""
        parts = [self.headline, *(f"  {line}" for line in self.lines)]
        return "\n".join([*parts, *self.stacks] if stacks else parts)

    def write(self, folder: Path | None) -> Path | None:
        """Write the file into a folder.

        Returns:
            The path of the file; None if there is no folder or the file cannot be written.
        """
        if folder is None:
            return None
        path = folder / FILE_NAME
        with contextlib.suppress(OSError):
            path.write_text(json.dumps(self.document, indent=1) + "\n", encoding="utf-8")
            return path
        return None


def show_page(recorder: FlightRecorder, records: Mapping[int, Record], cause: Cause) -> FlightPage:
    """Make a page, print it on standard error, and write it to the run's folder.

    The message of an error is printed elsewhere. For a cause of the kind 'failed' this function
    prints only the activity of the rank that failed, and for 'found' only the path of the file.

    Args:
        recorder: this rank's recorder.
        records: the records of the ranks that have answered, by rank.
        cause: the reason for the page.
    """
    everyone = {rank: records.get(rank) for rank in range(recorder.world_size)} | dict(records)
    page = make_page(everyone, cause)
    text, record = page.text(), everyone.get(cause.rank)
    if cause.kind == "failed" and record is not None:
        text = f"rank {cause.rank} failed {failed_in(record)}"
    path = page.write(recorder.folder)
    pointer = f"the last events of each rank: {path}" if path else ""
    lines = [pointer] if cause.kind == "found" else [text, pointer]
    sys.stderr.write("".join(f"bigtrain: {line}\n" for line in lines if line))
    sys.stderr.flush()
    return page


def records_by_files(recorder: FlightRecorder, moment_s: float) -> dict[int, Record]:
    """Exchange the ranks' records through files in the run's folder.

    This is for the case that rank 0, which normally collects the records, does not answer. Each
    rank writes its record to the folder and reads the records of the other ranks.

    Args:
        recorder: this rank's recorder.
        moment_s: the most seconds to wait for the records of all ranks except rank 0.

    Returns:
        The records that were found, by rank; only this rank's record if the run has no folder.
    """
    record = recorder.record()
    if recorder.folder is None:
        return {recorder.rank: record}
    began = time.time()
    path = recorder.folder / f".flight_recorder-{recorder.rank}.json"
    records = {recorder.rank: record}
    with contextlib.suppress(OSError, ValueError, KeyError):
        path.with_suffix(".part").write_text(json.dumps(record), encoding="utf-8")
        path.with_suffix(".part").replace(path)
        until = time.monotonic() + moment_s
        while len(records) < recorder.world_size - 1 and time.monotonic() < until:
            time.sleep(0.05)
            for record_path in recorder.folder.glob(".flight_recorder-*.json"):
                if record_path.stat().st_mtime > began - 5:  # older files are of earlier failures
                    their_record = read_json_object(record_path)
                    records[int(their_record["rank"])] = their_record
    return records


def make_page(records: Mapping[int, Record | None], cause: Cause) -> FlightPage:
    """Make the page: the activity of every rank, and the rank that the other ranks wait for.

    Args:
        records: the record of each rank, by rank; None for a rank that has not answered.
        cause: the reason for the page.
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
        activity = f" It {doing(record)}." if record else ""
        return f"rank {cause.rank} failed: {cause.text}.{activity}"
    if cause.kind == "found":
        return cause.text
    waiting = _first_to_wait(cause, waits)
    if waiting is None:
        if cause.kind == "lost":
            return f"rank {cause.rank} ended without a message; no rank waited for it"
        return "no rank waits for another" if cause.kind == "asked" else cause.text
    text = f"rank {waiting.rank} waits for {waiting.words()}"
    if cause.kind == "lost":
        return f"{text}; rank {cause.rank} ended without a message"
    culprit = blamed(waiting, waits, records)
    if culprit is None:
        return f"{text}; {_no_culprit(waiting, waits, records)}"
    record = records.get(culprit)
    if record is None:
        return f"{text}; rank {culprit} has not answered: it is stopped, or stuck in native code"
    return f"{text}; rank {culprit} never came: it {doing(record)}"


def _first_to_wait(cause: Cause, waits: Mapping[int, Wait]) -> Wait | None:
    if cause.rank in waits:
        return waits[cause.rank]
    return max(waits.values(), key=lambda wait: wait.seconds, default=None)


def _no_culprit(
    waiting: Wait, waits: Mapping[int, Wait], records: Mapping[int, Record | None]
) -> str:
    """Return why an exchange does not end if no single rank is to blame; see `blamed`.

    Either the ranks began different exchanges, or they wait for each other, or all ranks have begun
    the exchange.

    Args:
        waiting: the exchange that the page is about.
        waits: the exchange that each waiting rank waits for, by rank.
        records: the record of each rank, by rank; None for a rank that has not answered.
    """
    same = [w for w in waits.values() if w.group == waiting.group and w.number == waiting.number]
    sizes = {wait: f" of {format_bytes(wait.size)}" if wait.size else "" for wait in same}
    kinds = sorted({f"{wait.kind}{size}" for wait, size in sizes.items()})
    if len(kinds) > 1 and not waiting.message:
        return (
            f"the ranks are not in the same exchange ({' and '.join(kinds)}): they do not run the "
            "same code on the same shapes"
        )
    if absent_ranks(waiting, waits, records):
        return "the ranks wait for each other"
    return "all its ranks came and it does not end: check the network between them"


def _line(record: Record, wait: Wait | None) -> str:
    text = doing(record)
    if wait is not None:
        text = f"waits for {wait.words()}; {text}"
    if record["peak_bytes"]:
        text += f"; peak {format_bytes(record['peak_bytes'])}"
    return text


def _silence(rank: int, cause: Cause) -> str:
    return "ended without a message" if (cause.kind, cause.rank) == ("lost", rank) else "no answer"


def doing(record: Record) -> str:
    """Return the activity of a rank as a phrase that follows "it", such as "begins step 3"."""
    activity = _activity(record["stack"])
    phase, step = record["phase"], record["step"]
    position = f"step {step}"
    if record["micro_batch"]:
        position = f"{record['unit']} {record['micro_batch']} of {position}"
    if phase == "data":
        following = f"micro-batch {record['micro_batch']} of step {step + 1}"
        return f"reads data ({following}){_at(record['stack'])}"
    if phase in ("forward", "backward"):
        block = f" of {record['block']}" if record["block"] else ""
        return f"is in the {phase} pass{block} ({position})"
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
    """Return where a rank failed as a phrase that follows "failed": "in the optimizer's step"."""
    phase, step = record["phase"], record["step"]
    if phase in ("forward", "backward"):
        block = f" of `{record['block']}`" if record["block"] else ""
        part = f", {record['unit']} {record['micro_batch']}" if record["micro_batch"] else ""
        return f"in the {phase} pass{block} (step {step}{part})"
    if phase == "step":
        return f"in the optimizer's step (step {step})"
    activity = doing(record)
    for verb, words in _IN_THE_PAST.items():
        if activity.startswith(verb):
            return f"{words}{activity.removeprefix(verb)}"
    return f"as it {activity}"


_IN_THE_PAST = {
    "reads ": "while it read ",
    "writes ": "while it wrote ",
    "builds ": "while it built ",
    "begins ": "at the beginning of ",
    "validates": "in validation",
    "is between": "between",
}
"""The first words of a phrase of `doing`, and the words by which `failed_in` replaces them."""


def _activity(stack: list[str]) -> str:
    for line in stack:
        for source, words in _ACTIVITIES:
            if source in line.replace("\\", "/"):
                return words
    return ""


def _at(stack: list[str]) -> str:
    """Return words for the innermost frame of the user's code; empty if the stack has none."""
    for line in reversed(stack):
        file, _, name = line.rpartition(" ")
        if not file.startswith(_OURS) and not any(part in file for part in _FOREIGN):
            return f", in {name} of {'/'.join(Path(file).parts[-2:])}"
    return ""


def _stacks(records: Mapping[int, Record | None]) -> tuple[str, ...]:
    """Return the stacks for a terminal: without torch's frames, except the innermost frame.

    The page's file contains the whole stacks.
    """
    ranks_by_stack: dict[tuple[str, ...], list[int]] = {}
    for rank, record in sorted(records.items()):
        if record is not None and record["stack"]:
            *outer, last = record["stack"]
            stack = (*(line for line in outer if _TORCH not in line.replace("\\", "/")), last)
            ranks_by_stack.setdefault(stack, []).append(rank)
    shown = []
    for stack, ranks in list(ranks_by_stack.items())[:_SHOWN_STACKS]:
        owner = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
        shown.append("\n".join([f"stack of {owner}:", *(f"    {line}" for line in stack)]))
    if len(ranks_by_stack) > _SHOWN_STACKS:
        shown.append(f"{len(ranks_by_stack) - _SHOWN_STACKS} other stacks are in {FILE_NAME}")
    return tuple(shown)
