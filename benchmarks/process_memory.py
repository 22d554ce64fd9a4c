"""Measure a process's memory in addition to its tensors, and the cost in time of another allocator.

    python benchmarks/process_memory.py --output benchmarks/results/process_memory.json
    python benchmarks/process_memory.py --jobs gpt55 --strategies fsdp --repeats 1

Strategies run a GPT of 55 million parameters (4 x 128 tokens a rank) and the default job, each
through the command in new processes: as users run it (`bigtrain`: with tcmalloc or tbbmalloc, if it
is installed), with the C library's allocator (`glibc`), and with each other allocator that is
installed (`tcmalloc`, `tbbmalloc`, and `tbbmalloc_keeps`, which never returns freed blocks of at
least 8 MiB). Runs alternate; a ratio is the median of the ratios of neighbouring runs.

`process_over_tracked` is the process's highest resident memory above that before the model was
built, divided by the tracked peak, on the rank with the highest. `cpu_seconds` and `page_faults`
are those of all processes of a run, imports included, and are useful on a busy machine, too;
`seconds` are those of a step (the median after the tracked ones) and need an idle machine.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from harness import keep

from bigtrain.compare.subprocess_runs import run_bigtrain
from bigtrain.memory.allocator import find_allocator

STEPS, TRACKED = 8, 3
LIMIT_S = 900.0
JOBS: dict[str, list[str]] = {
    "gpt55": [
        "model.name=gpt",
        'model.args={"num_layers": 7, "width": 768, "num_heads": 12, "sequence_length": 128}',
        "model.chunked_loss=false",
        "train.global_batch_size=8",
    ],
    "default": [],
}
STRATEGIES = (
    "ddp",
    "zero1_torch",
    "fsdp_zero2",
    "fsdp",
    "zero1",
    "zero2",
    "zero3",
    "1f1b",
    "gpipe",
)


def find_settings() -> dict[str, dict[str, str]]:
    """Return, by name of a setting, what the processes of a run find in their environment."""
    settings: dict[str, dict[str, str]] = {"bigtrain": {}, "glibc": {"LD_PRELOAD": ""}}
    chosen = find_allocator() or ""
    if "tcmalloc" in chosen:
        settings["tcmalloc"] = {"LD_PRELOAD": chosen}
    folder = Path(sys.prefix) / "lib"
    files = [folder / "libtbbmalloc.so.2", folder / "libtbbmalloc_proxy.so.2"]
    if all(file.is_file() for file in files):
        preload = {"LD_PRELOAD": ":".join(map(str, files))}
        settings["tbbmalloc"] = preload
        keeps = {"TBB_MALLOC_SET_HUGE_SIZE_THRESHOLD": str(8 << 20)}
        settings["tbbmalloc_keeps"] = preload | keeps
    return settings


SETTINGS = find_settings()


def run_once(words: list[str], environ: dict[str, str]) -> dict[str, Any]:
    """Run the command once; return its figures, or the reason of a failure."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with tempfile.TemporaryDirectory() as folder:
        line = [*words, f"log.dir={folder}", "log.name=run"]
        outcome = run_bigtrain(
            line, Path(folder) / "log", LIMIT_S, {"OMP_NUM_THREADS": "1", **environ}
        )
        if outcome.reason is not None:
            return {"failed": outcome.reason}
        run = Path(folder) / "run"
        ranks = json.loads((run / "memory.json").read_text())["ranks"]
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    worst = max(ranks, key=lambda rank: rank["process_peak_bytes"] / rank["peak_bytes"])
    steps = [line["step_seconds"] for line in lines if "step_seconds" in line]
    return {
        "tracked_bytes": worst["peak_bytes"],
        "process_bytes": worst["process_peak_bytes"],
        "seconds": statistics.median(steps[TRACKED:]),
        "cpu_seconds": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
        "page_faults": after.ru_minflt - before.ru_minflt,
    }


def rows(
    jobs: list[str], strategies: list[str], settings: list[str], repeats: int
) -> Iterator[dict[str, Any]]:
    """Return a row for each job and strategy."""
    for job in jobs:
        for strategy in strategies:
            words = ["train", "-n", "2", "--strategy", strategy, *JOBS[job]]
            words += [f"train.steps={STEPS}", f"memory.track_steps={TRACKED}"]
            words += ["train.eval_every=0", "checkpoint.at_end=false"]
            runs: dict[str, list[dict[str, Any]]] = {name: [] for name in settings}
            for _ in range(repeats):
                for name in settings:
                    runs[name].append(run_once(words, SETTINGS[name]))
            yield {"job": job, "strategy": strategy, **{n: summary(n, runs) for n in runs}}


def summary(name: str, runs: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Return the figures of one setting, and its time divided by that of the C library's."""
    failed = [run["failed"] for run in runs[name] if "failed" in run]
    if failed:
        return {"failed": failed[0]}
    median = {key: statistics.median(run[key] for run in runs[name]) for key in runs[name][0]}
    median["process_over_tracked"] = max(
        run["process_bytes"] / run["tracked_bytes"] for run in runs[name]
    )
    glibc = runs.get("glibc") or []
    pairs = [(a, b) for a, b in zip(runs[name], glibc, strict=False) if "failed" not in b]
    for key in ("seconds", "cpu_seconds"):
        if pairs:
            median[f"{key}_over_glibc"] = statistics.median(a[key] / b[key] for a, b in pairs)
    return median


def main() -> None:
    """Measure, print and write the rows; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--jobs", nargs="*", default=list(JOBS), choices=list(JOBS))
    parser.add_argument("--strategies", nargs="*", default=list(STRATEGIES))
    parser.add_argument("--settings", nargs="*", default=list(SETTINGS), choices=list(SETTINGS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    figures = []
    for row in rows(options.jobs, options.strategies, options.settings, options.repeats):
        figures.append(row)
        print(json.dumps(row), flush=True)
        keep(options.output, {"steps": STEPS, "allocator": find_allocator(), "rows": figures})


if __name__ == "__main__":
    main()
