"""Find the largest GPT that trains under 2 GiB of tensors a rank: bigtrain beside rivals.

    python benchmarks/largest_model.py --output benchmarks/results/largest_model.json
    python benchmarks/largest_model.py --limit 1GiB --rivals torch_ddp,torch_fsdp2_full

Only the number of layers grows; the width is 768 with 12 heads, the vocabulary 256, the batch 8
samples of 128 tokens, on two ranks of one thread each. For each contestant the number is doubled
from 8 and then bisected, as in `bigtrain compare --largest`: a result of 64 layers or more may be
too low by at most a 32nd. `rivals.py` says how the rivals train. bigtrain trains with the plan of
`bigtrain plan --at`, the fastest one whose predicted peak is at most 99 % of the limit.

A model counts if two conditions hold:

* the measured peak of tensors is at most the limit, on the rank with the highest;
* the useful rate is at least a third of that of torch's DDP at its own largest model. The useful
  rate is tokens per second times parameters: a token costs 6 FLOPs a parameter, so two models of
  different sizes are trained equally well if their rates are equal. The tokens per second alone
  would fall with the size for everybody, and DDP has none at sizes that it cannot train.

After the search each contestant trains its largest model again, in alternating rounds; tokens per
second and shares of DDP's rate are from these runs. `ratio` divides the parameters of bigtrain's
model by those of the best rival's. The rates are times: use an idle machine. Plans with offload to
disk write 8 bytes a parameter into the folder of temporary files.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from frontier import plans_of, run_plan, text_of
from harness import keep
from rivals import names_of, run_rival, timed, without_paths

from bigtrain.compare.largest import find_largest
from bigtrain.errors import ConfigError
from bigtrain.models.gpt import GPTConfig
from bigtrain.units import format_bytes, parse_bytes

SHAPE = {"width": 768, "num_heads": 12, "sequence_length": 128}
OURS, REFERENCE = "bigtrain", "torch_ddp"
SHARE = 1 / 3
"""The least share of the reference's useful rate."""
BAR = 1.5
"""The ratio of parameters that is wanted."""
PLANNED = 0.99
"""The share of the limit that a predicted peak may take."""
TRACKED, STEPS, LAST_STEPS = 2, 5, 8
"""Tracked steps, steps of a run of the search, and steps of a run after it."""
LIMIT_S = 1800.0
"""Seconds of a run, after which it is ended."""
Row = dict[str, Any]


def parameters_of(layers: int) -> int:
    """Return the number of parameters of a model."""
    return GPTConfig.from_preset("gpt", {"num_layers": layers, **SHAPE}).num_parameters


def words_of(layers: int) -> list[str]:
    """Return the words of a job."""
    args = json.dumps({"num_layers": layers, **SHAPE})
    return [
        *("model.name=gpt", f"model.args={args}"),
        *("data.name=synthetic", "data.args={kind: language}"),
    ]


class Search:
    """The search for the largest model of one contestant.

    Args:
        name: `OURS` or a key of `rivals.RIVALS`.
        samples: the samples of a step on both ranks.
        limit: the most bytes of tensors of a rank.
        least_rate: the least useful rate, in parameters times tokens per second.
    """

    def __init__(self, name: str, samples: int, limit: int, least_rate: float) -> None:
        self.name, self.samples, self.limit, self.least_rate = name, samples, limit, least_rate
        self.tried: dict[int, Row] = {}
        """The figures of each tried model, by its layers."""
        self.plans: dict[int, tuple[str, Row]] = {}
        """The text of the plan for each model, and its description."""

    def largest(self, first: int) -> Row:
        """Search from a number of layers; return the row of the largest model."""
        layers, why = find_largest(self.fault, first)
        row: Row = {"contestant": self.name, "layers": layers, "why_not_more": why}
        if layers is not None:
            row |= {"parameters": parameters_of(layers), **self.tried[layers]}
        return row | {"tried": {str(n): self.tried[n] for n in sorted(self.tried)}}

    def fault(self, layers: int) -> str | None:
        """Train a model; return why it does not count, or None if it does."""
        row = self.tried[layers] = self.run(layers, STEPS)
        reason = fault_of(row, self.limit, self.least_rate)
        print(f"{self.name}, {layers} layers: {reason or shown(row)}", flush=True)
        return reason

    def run(self, layers: int, steps: int) -> Row:
        """Train a model for some steps; return its figures or its error."""
        words = words_of(layers)
        about: Row = {}
        if self.name == OURS:
            try:
                plan, about = self._plan(layers, words)
            except ConfigError as error:
                return {"error": without_paths(str(error))}
            run = run_plan(plan, words, steps, TRACKED, LIMIT_S)
        else:
            run = run_rival(self.name, words, self.samples, steps, TRACKED, LIMIT_S)
        if "error" in run:
            return {"error": run["error"], **about}
        seconds = timed([run["seconds"]], TRACKED)
        tokens = self.samples * SHAPE["sequence_length"] / seconds
        return {
            **about,
            "peak_bytes": run["peak_bytes"],
            "step_seconds": seconds,
            "tokens_per_second": tokens,
            "useful_rate": tokens * parameters_of(layers),
        }

    def _plan(self, layers: int, words: Sequence[str]) -> tuple[str, Row]:
        """Return the text of the fastest plan for a model, and its description.

        Raises:
            ConfigError: no plan fits.
        """
        if layers not in self.plans:
            planned = plans_of(self.samples, words, int(PLANNED * self.limit))
            if not planned.result.best:
                raise ConfigError("no plan has a predicted peak below the limit")
            best = planned.result.best[0]
            about = {
                "plan": best.label,
                "mesh": best.candidate.axes,
                "micro_batch": [best.candidate.rows, best.candidate.micro_batches],
                "predicted_peak_bytes": best.peak.bytes,
                "predicted_step_seconds": best.seconds.total,
            }
            self.plans[layers] = text_of(planned, best), about
        return self.plans[layers]


def fault_of(row: Mapping[str, Any], limit: int, least_rate: float) -> str | None:
    """Return why a model with these figures does not count; None if it does."""
    if "error" in row:
        return str(row["error"])
    if row["peak_bytes"] > limit:
        return f"its peak is {format_bytes(row['peak_bytes'])}"
    if row["useful_rate"] < least_rate:
        return f"its useful rate is {row['useful_rate'] / least_rate * SHARE:.2f} of DDP's"
    return None


def shown(row: Mapping[str, Any]) -> str:
    """Return figures as text."""
    plan = f" with {row['plan']}" if "plan" in row else ""
    return (
        f"{row['peak_bytes'] / 2**20:.0f} MiB, {row['tokens_per_second']:.0f} tokens/s, "
        f"useful rate {row['useful_rate']:.3g}{plan}"
    )


def again(searches: Sequence[Search], rows: Sequence[Row], rounds: int) -> None:
    """Train the largest models again, in alternating rounds; add the figures to their rows."""
    pairs = [(s, row) for s, row in zip(searches, rows, strict=True) if row["layers"] is not None]
    runs: dict[str, list[Row]] = {search.name: [] for search, _ in pairs}
    for turn in range(rounds):
        for search, row in pairs if turn % 2 == 0 else reversed(pairs):
            runs[search.name].append(search.run(row["layers"], LAST_STEPS))
    for search, row in pairs:
        done = [run for run in runs[search.name] if "error" not in run]
        row["runs_again"] = [
            {key: run.get(key) for key in ("peak_bytes", "step_seconds", "error")}
            for run in runs[search.name]
        ]
        if done:
            for key in ("tokens_per_second", "useful_rate"):
                row[key] = sum(run[key] for run in done) / len(done)
    reference = next((row.get("useful_rate") for row in rows if row["contestant"] == REFERENCE), 0)
    for _, row in pairs:
        if reference:
            row["share_of_ddp"] = row["useful_rate"] / reference


def summary_of(rows: Sequence[Row]) -> Row:
    """Compare bigtrain's largest model with that of the best rival."""
    sizes = {row["contestant"]: row.get("parameters", 0) for row in rows}
    ours = sizes.pop(OURS)
    best = max(sizes, key=lambda name: int(sizes[name]))
    if not sizes[best]:
        return {"error": "no rival has trained"}
    shares = {row["contestant"]: row.get("share_of_ddp", 0.0) for row in rows}
    ratio = ours / sizes[best]
    return {
        "parameters": ours,
        "best_rival": best,
        "best_rival_parameters": sizes[best],
        "ratio": ratio,
        "share_of_ddp": shares[OURS],
        "bar": BAR,
        "bar_met": ratio >= BAR and shares[OURS] >= SHARE,
        "failed": [row["contestant"] for row in rows if row["layers"] is None],
    }


def main() -> None:
    """Search the largest model of each contestant."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rivals", type=names_of, default="all", help="all, or names")
    parser.add_argument("--limit", type=parse_bytes, default="2GiB", help="of a rank's tensors")
    parser.add_argument("--samples", type=int, default=8, help="of a step, on both ranks")
    parser.add_argument("--first", type=int, default=8, help="layers of the first model")
    parser.add_argument("--rounds", type=int, default=2, help="of runs of the largest models")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    names = [REFERENCE, OURS, *(name for name in options.rivals if name != REFERENCE)]
    figures: Row = {"limit_bytes": options.limit, "samples": options.samples, "shape": SHAPE}
    figures |= {"least_share_of_ddp": SHARE, "rows": []}
    searches, rows, least_rate = [], figures["rows"], 0.0
    for name in names:
        searches.append(Search(name, options.samples, options.limit, least_rate))
        rows.append(searches[-1].largest(options.first))
        if name == REFERENCE and rows[-1]["layers"] is None:
            raise SystemExit(f"{name}: {rows[-1]['why_not_more']}")
        least_rate = SHARE * rows[0]["useful_rate"]
        keep(options.output, figures)
    again(searches, rows, options.rounds)
    figures["summary"] = summary_of(rows)
    keep(options.output, figures)
    print(json.dumps(figures["summary"]), flush=True)


if __name__ == "__main__":
    main()
