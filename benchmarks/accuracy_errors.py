"""Summaries and tables of the rows of `planner_accuracy.py`: errors by engine, and late rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

BARS = {"torch": (0.03, 0.005), "deepspeed": (0.05, 0.05), "fairscale": (0.05, 0.05)}
"""By engine: the largest error that is wanted, and the largest under-estimate."""
AGAIN = 2
"""Times at most that a row is run again."""
PROCESS_BAR = 0.1
"""The largest error of a process that is wanted."""


def summary(rows: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the errors of all ranks, by engine and together, and the counts of rows."""
    result: dict[str, Any] = {}
    done = [row for row in rows.values() if row.get("ranks")]
    for engine in ("all", *BARS):
        chosen = [row for row in done if engine in ("all", row["engine"])]
        errors = [rank["error"] for row in chosen for rank in row["ranks"]]
        if errors:
            result[engine] = {
                "rows": len(chosen),
                "ranks": len(errors),
                "mean_absolute_error": round(sum(map(abs, errors)) / len(errors), 5),
                "largest_error": max(errors, key=abs),
                "largest_over_estimate": max(0.0, *errors),
                "largest_under_estimate": min(0.0, *errors),
                "largest_error_of_a_fullest_rank": max(map(_of_fullest, chosen), key=abs),
            }
    result["process"] = of_processes([rank for row in done for rank in row["ranks"]])
    result["outside_of_the_bars"] = [
        row["name"]
        for row in done
        if abs(row["error"]) > BARS[row["engine"]][0]
        or min(rank["error"] for rank in row["ranks"]) < -BARS[row["engine"]][1]
    ]
    result["refused"] = sum("refused" in row for row in rows.values())
    result["failed"] = sum("failed" in row for row in rows.values())
    return result


def of_processes(ranks: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the errors of predicted process memory: base plus forecast, against the highest."""
    known = [rank for rank in ranks if rank.get("process_base_bytes") and rank["process_bytes"]]
    errors = [
        (rank["process_base_bytes"] + rank["predicted_bytes"])
        / (rank["process_base_bytes"] + rank["process_bytes"])
        - 1
        for rank in known
    ]
    if not errors:
        return None
    return {
        "ranks": len(errors),
        "mean_absolute_error": round(sum(map(abs, errors)) / len(errors), 5),
        "largest_over_estimate": round(max(0.0, *errors), 5),
        "largest_under_estimate": round(min(0.0, *errors), 5),
        "above_bar": sum(abs(error) > PROCESS_BAR for error in errors),
    }


def _of_fullest(row: dict[str, Any]) -> float:
    """Return the error of the highest predicted peak against the highest tracked peak.

    Fairscale deals states out unevenly, and its forecasts are of the fullest rank.
    """
    highest = [
        max(rank[key] for rank in row["ranks"]) for key in ("predicted_bytes", "tracked_bytes")
    ]
    return float(round(highest[0] / highest[1] - 1, 5))


def table(rows: dict[str, dict[str, Any]]) -> str:
    """Return the rows as a Markdown table, the largest error first; sizes in MiB."""
    lines = ["| row | engine | predicted | tracked | process | phases | error |"]
    lines.append("| --- | --- | ---: | ---: | ---: | --- | ---: |")
    done = [row for row in rows.values() if row.get("ranks")]
    for row in sorted(done, key=lambda row: -abs(row["error"])):
        rank = max(row["ranks"], key=lambda rank: abs(rank["error"]))
        keys = ("predicted_bytes", "tracked_bytes", "process_bytes")
        cells = [row["name"], row["engine"], *(f"{(rank[k] or 0) / 2**20:.2f}" for k in keys)]
        cells.append(f"{rank['predicted_phase']}/{rank['tracked_phase']}")
        lines.append("| " + " | ".join([*cells, f"{100 * row['error']:+.2f} %"]) + " |")
    for row in rows.values():
        for why in ("refused", "failed"):
            if why in row:
                lines.append(f"| {row['name']} | {row['engine']} | {why}: {row[why]} |")
    return "\n".join(lines)


def is_late(row: dict[str, Any]) -> bool:
    """Whether a tracked peak exceeds its prediction by more than the limit for torch."""
    if not row.get("ranks") or row["engine"] != "torch" or row.get("runs", 1) > AGAIN:
        return False
    return bool(min(rank["error"] for rank in row["ranks"]) < -BARS["torch"][1])


def again(before: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """Merge a row with a second run of it: keep the lower peak of each rank."""
    if not now.get("ranks"):
        return before
    ranks = []
    for old, new in zip(before["ranks"], now["ranks"], strict=True):
        all_runs = [*old.get("tracked_in_all", [old["tracked_bytes"]]), new["tracked_bytes"]]
        lower = old if old["tracked_bytes"] <= new["tracked_bytes"] else new
        ranks.append({**lower, "tracked_in_all": all_runs})
    error = max((rank["error"] for rank in ranks), key=abs)
    return {**before, "ranks": ranks, "error": error, "runs": before.get("runs", 1) + 1}
