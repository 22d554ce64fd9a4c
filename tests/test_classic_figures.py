"""The tables on the pages about classic systems agree with the result files."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def results(name: str) -> Any:
    return json.loads((ROOT / "benchmarks" / "results" / name).read_text("utf-8"))


def row_of(page: str, start: str) -> list[str]:
    """The cells of the one table row that starts with these words."""
    text = (ROOT / "docs" / page).read_text("utf-8")
    (line,) = [line for line in text.splitlines() if line.startswith(f"| {start}")]
    return [cell.strip() for cell in line.strip("|").split(" | ")]


def test_shares_of_the_digits():
    figures = results("asynchronous_230.json")
    shown = [f"{100 * share:.1f} %" for share in figures["mean_top1"].values()]
    assert row_of("internals/strategies_measured.md", "97") == shown
    rows = [row for runs in figures["runs"].values() for row in runs if "most_staleness" in row]
    page = (ROOT / "docs" / "internals" / "strategies_measured.md").read_text("utf-8")
    match = re.search(r"Pushes were (\S+) versions old on average and (\d) at most", page)
    assert match is not None
    average = sum(row["mean_staleness"] for row in rows) / len(rows)
    assert match.groups() == (f"{average:.1f}", str(max(row["most_staleness"] for row in rows)))


def test_what_is_sent():
    volumes: dict[str, dict[int, float]] = {}
    for row in results("traffic.json")["rows"]:
        share = round(row["mean"] / row["gradient_bytes"], 4)
        volumes.setdefault(row["strategy"], {})[row["world_size"]] = share
    starts = {
        "`ring`, `sync_sgd`": ("ring", "sync_sgd", "ddp", "fsdp_zero2"),
        "`parameter_server`": ("parameter server, 1",),
        "with two servers": ("parameter server, 2",),
        "`zero1`, `zero2`": ("zero1 (DeepSpeed)", "zero2 (DeepSpeed)"),
        "`zero1_torch`": ("zero1_torch",),
        "`zero3`": ("zero3 (DeepSpeed)",),
        "`fsdp`": ("fsdp",),
        "`gpipe`": ("gpipe", "1f1b"),
        "`interleaved_1f1b`": ("interleaved 1f1b",),
    }
    shown = {}
    text = (
        (ROOT / "docs" / "internals" / "strategies_measured.md")
        .read_text("utf-8")
        .partition("| the textbook's")[2]
    )
    for start, names in starts.items():
        (line,) = [line for line in text.splitlines() if line.startswith(f"| {start}")]
        counted = line.split(" | ")[3].split(",")[0].split(" (")[0].split("; ")
        for name in names:
            shown[name] = dict(zip((2, 4, 8), counted, strict=True))
    assert {
        name: {ranks: float(share) for ranks, share in row.items() if share != "-"}
        for name, row in shown.items()
    } == volumes


def test_seconds_over_slow_links():
    order = ("ddp", "ring", "zero1_torch", "fsdp", "1f1b", "sync_sgd")
    order += ("parameter_server", "local_sgd", "planner")
    for link in results("hosts.json")["links"]:
        rows = {row["strategy"]: row for row in link["rows"]}
        expected = [
            f"{rows[name]['step_seconds']:.2f} ({rows[name]['predicted_seconds']:.2f})"
            for name in order
        ]
        cells = row_of("internals/strategies_measured.md", link["link"])[1:]
        assert [cell.rpartition(": ")[2] for cell in cells] == expected
