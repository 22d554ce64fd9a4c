"""Check that plans which are said to fit a memory cap do fit: `train --strategy auto --cap SIZE`.

    python benchmarks/caps.py --output benchmarks/results/caps.json
    python benchmarks/caps.py --ranks 2 --caps 90MiB 120MiB

For 1, 2 and 4 ranks the default job is run under `NUM_CAPS` caps, in equal ratios from the smallest
cap for which a plan is said to fit to twice the peak of the fastest plan without a cap. Each run
uses the command, in new processes, as a user would, for `STEPS` steps, the last of which are not
tracked. A plan that runs out of memory was wrongly said to fit. The memory does not depend on how
busy the machine is.

`predicted_bytes` is the plan's forecast, `tracked_bytes` the highest tracked peak of its ranks,
`process_bytes` the highest resident memory above that of a process before the model was built.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from harness import keep

from bigtrain.compare.subprocess_runs import RunOutcome, run_bigtrain
from bigtrain.units import MIB, parse_bytes

NUM_CAPS, STEPS = 20, 6
LIMIT_S = 900.0
TOO_SMALL = "12MiB"
"""A cap under which nothing fits, so that the smallest that does is named."""


def run(ranks: int, words: Sequence[str]) -> tuple[RunOutcome, str, list[dict[str, Any]]]:
    """Run the command once; return how it ended, its output, and the memory of its ranks."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        line = ["train", "-n", str(ranks), "--strategy", "auto", f"train.steps={STEPS}"]
        line += ["train.eval_every=0", "checkpoint.at_end=false"]
        line += [f"log.dir={folder}", "log.name=run", *words]
        outcome = run_bigtrain(line, log, LIMIT_S)
        memory = Path(folder) / "run" / "memory.json"
        peaks = json.loads(memory.read_text())["ranks"] if memory.exists() else []
        return outcome, log.read_text(), peaks


def caps_for(ranks: int) -> list[int]:
    """Return the caps to try in bytes, the smallest first."""
    message = run(ranks, ["--cap", TOO_SMALL])[1]
    smallest = parse_bytes(message.partition("Use --cap ")[2].partition(",")[0])
    largest = 2 * _predicted(run(ranks, ["--dry-run"])[1])
    ratio = (largest / smallest) ** (1 / (NUM_CAPS - 1))
    return [round(smallest * ratio**k) for k in range(NUM_CAPS)]


def _predicted(output: str) -> int:
    match = re.search(r"predicted peak:? ([\d.]+) ([KMG]iB)", output)
    if match is None:
        raise RuntimeError(f"no plan was chosen: {output[-400:]}")
    return parse_bytes(match[1] + match[2])


def rows(ranks: int, caps: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Return a row for each cap."""
    for cap in caps:
        outcome, output, peaks = run(ranks, ["--cap", str(cap)])
        plan = re.search(r"auto: (.+?): predicted peak", output)
        row = {
            "ranks": ranks,
            "cap_bytes": cap,
            "plan": plan[1] if plan else None,
            "predicted_bytes": _predicted(output) if plan else None,
            "ran": outcome.status == 0,
            "out_of_memory": outcome.out_of_memory,
        }
        if outcome.reason is not None:
            row["reason"] = outcome.reason
        for key in ("peak_bytes", "process_peak_bytes"):
            if peaks:
                name = key.replace("process_peak", "process").replace("peak_bytes", "tracked_bytes")
                row[name] = max(rank[key] for rank in peaks)
        yield row


def main() -> None:
    """Measure, print and write the rows; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 2, 4])
    parser.add_argument("--caps", nargs="*", help="sizes instead of the twenty")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    figures: list[dict[str, Any]] = []
    for ranks in options.ranks:
        caps = [parse_bytes(size) for size in options.caps or ()]
        for row in rows(ranks, caps or caps_for(ranks)):
            figures.append(row)
            text = f"{ranks} ranks, {row['cap_bytes'] / MIB:.1f} MiB, {row['plan']}: "
            print(text + ("ran" if row["ran"] else str(row["reason"])), flush=True)
            wrong = sum(result["out_of_memory"] for result in figures)
            keep(options.output, {"steps": STEPS, "wrong": wrong, "rows": figures})


if __name__ == "__main__":
    main()
