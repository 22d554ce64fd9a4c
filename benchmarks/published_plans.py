"""Compare forecasts of the parallel plans of Narayanan et al. 2021 with the published figures.

    python benchmarks/published_plans.py --output benchmarks/results/published_plans.json

`rows` are the ten rows of table 1 (arXiv 2104.04473): GPT of 1.7 billion to a trillion parameters
on 32 to 3,072 A100. `predicted` is the printed plan (tensor, pipeline and data parallel sizes as
printed, blocks recomputed), `best` the planner's plan for the same devices and batch. The paper's
mixed precision (16 bits in the layers, 32 bits in the optimizer) is `zero1_torch` here, which also
shards the optimizer's state; `ddp` casts from 32 bits in each micro-batch. The paper does not print
micro-batches: 1, 2 and 4 are forecast. It does not print the number of stages a rank of its
interleaved schedules either: 2 to 4 are forecast if they divide the blocks. The fastest counts.

`crossovers` are figures 10 and 13 to 15: which plan is fastest, not its speed. Figure 10 has three
forecasts: ZeRO-3 with the exchanges of DeepSpeed in 2021 (`published_zero3.py`), tp 8 x pp 12, and
`fully_shard`. Attention is one fused kernel, as it is today; in the paper it was not. The paper
prints TFLOP/s a device, which counts 96 B L s h^2 (1 + s/(6h) + V/(16hL)) operations a step.
Nothing is measured here and nothing was fitted: the cluster is `configs/clusters/a100-node.yaml`,
whose `efficiency` can be replaced by `--efficiency`.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from harness import keep
from published_gpt import a100_nodes, flops, job_words
from published_zero3 import step_seconds

from bigtrain.core.variants import Variant, preset_options
from bigtrain.errors import ConfigError
from bigtrain.job.load import load_job
from bigtrain.planner.ask import Question, ask, open_evaluator, rank_limits
from bigtrain.planner.evaluate import PlanEvaluator
from bigtrain.planner.space import Candidate, mesh_words

USED = {"cluster": a100_nodes()}


class Model(NamedTuple):
    """A GPT."""

    layers: int
    width: int
    heads: int


class Row(NamedTuple):
    """One row of table 1."""

    billions: float
    model: Model
    tp: int
    pp: int
    devices: int
    batch: int
    tflops: float


ROWS = (
    Row(1.7, Model(24, 2304, 24), 1, 1, 32, 512, 137),
    Row(3.6, Model(30, 3072, 32), 2, 1, 64, 512, 138),
    Row(7.5, Model(36, 4096, 32), 4, 1, 128, 512, 142),
    Row(18.4, Model(40, 6144, 48), 8, 1, 256, 1024, 135),
    Row(39.1, Model(48, 8192, 64), 8, 2, 512, 1536, 138),
    Row(76.1, Model(60, 10240, 80), 8, 4, 1024, 1792, 140),
    Row(145.6, Model(80, 12288, 96), 8, 8, 1536, 2304, 148),
    Row(310.1, Model(96, 16384, 128), 8, 16, 1920, 2160, 155),
    Row(529.6, Model(105, 20480, 128), 8, 35, 2520, 2520, 163),
    Row(1008.0, Model(128, 25600, 160), 8, 64, 3072, 3072, 163),
)
MICRO_BATCHES = (1, 2, 4)
GPT_162B, GPT_6B, GPT_175B = Model(32, 20480, 128), Model(32, 3840, 32), Model(96, 12288, 96)
TABLE_2 = {384: (144, 153), 768: (88, 149), 1536: (44, 141)}
"""TFLOP/s of ZeRO stage 3, and of tp 8 x pp 12, by devices: 174.6 billion, batch 1536."""


def question(model: Model, devices: int, batch: int) -> Question:
    """Return the planner's question for a model on a number of devices."""
    words = job_words(*model, batch)
    memory = rank_limits(USED["cluster"], memory=None, cap=None)[0]
    given = (load_job(None, "single", words), USED["cluster"], devices, memory, batch)
    return Question(*given, margins={"torch": 0.0})


@cache
def evaluator(model: Model) -> PlanEvaluator:
    """Return the evaluator of a model's plans, on any number of devices."""
    return open_evaluator(question(model, 64, 64))[2]


def plan(
    mesh: tuple[int, int, int],
    batch: int,
    rows: int,
    interleaved: int,
    replicate: str = "zero1_torch",
) -> Candidate:
    """Return a plan of (tp, pp, dp), rows of a micro-batch and stages a rank."""
    tp, pp, dp = mesh
    # With fewer micro-batches than ranks 1f1b equals gpipe, and must be named so.
    plain = "1f1b" if batch // dp // rows >= pp else "gpipe"
    word = "interleaved_1f1b" if interleaved > 1 else plain
    more = {"stages_per_rank": interleaved} if interleaved > 1 else {}
    return Candidate(
        pp,
        dp,
        Variant(replicate, preset_options("replicate", replicate)),
        rows,
        batch // dp // rows,
        Variant(word, {**preset_options("cut", word), **more}) if pp > 1 else None,
        tp=tp,
        slices=Variant("tensor", preset_options("slice", "tensor")) if tp > 1 else None,
    )


def seconds(judge: PlanEvaluator, candidate: Candidate) -> dict[str, float]:
    """Return the seconds of a step by part, with all blocks recomputed."""
    parts = judge.seconds_with(candidate, judge.plan_of(candidate), "full")
    return {**vars(parts), "total": parts.total}


def printed(row: Row) -> Iterator[tuple[Candidate, int]]:
    """Return the plans that a row may mean, and their stages a rank."""
    dp = row.devices // row.tp // row.pp
    for rows in MICRO_BATCHES:
        if row.batch // dp % rows:
            continue
        counts = [n for n in (2, 3, 4) if row.model.layers % (n * row.pp) == 0]
        for count in counts if row.pp > 1 else [1]:
            yield plan((row.tp, row.pp, dp), row.batch, rows, count), count


def table_row(row: Row, *, searched: bool) -> dict[str, Any]:
    """Return a row of table 1: published, predicted, and the planner's plan."""
    judge, answer = evaluator(row.model), None
    forecasts: list[dict[str, Any]] = []
    if searched:
        answer = ask(question(row.model, row.devices, row.batch))
        judge = answer.search.evaluator
    for candidate, count in printed(row):
        try:
            parts = seconds(judge, candidate)
        except ConfigError as error:
            forecasts.append({"refused": str(error), "micro_batch": candidate.rows})
            continue
        forecasts.append({"micro_batch": candidate.rows, "stages_per_rank": count, **parts})
    fastest = min(
        (forecast for forecast in forecasts if "total" in forecast),
        key=lambda forecast: forecast["total"],
    )
    work = flops(row.model.layers, row.model.width, row.batch) / row.devices / 1e12
    result = {
        **row._asdict(),
        "model": row.model._asdict(),
        "published_seconds": work / row.tflops,
        "predicted_seconds": fastest["total"],
        "predicted_tflops": work / fastest["total"],
        "error": row.tflops * fastest["total"] / work - 1,
        "micro_batch": fastest["micro_batch"],
        "forecasts": forecasts,
    }
    if answer is not None:
        best = answer.result.best[0]
        result["best"] = {
            "label": best.label,
            "mesh": best.candidate.mesh,
            "micro_batch": best.candidate.rows,
            "recomputed": len(best.recomputed),
            "seconds": best.seconds.total,
            "peak_bytes": best.peak.bytes,
        }
    return result


def line(row: dict[str, Any]) -> str:
    """Return a row as a line of text."""
    mesh = mesh_words(row["pp"], row["devices"] // row["pp"] // row["tp"], row["tp"])
    best = row.get("best")
    planned = (
        f"; {best['label']} {best['mesh']}: {best['seconds']:.1f} s, and the printed "
        f"{row['predicted_seconds']:.1f} s"
        if best
        else ""
    )
    return (
        f"{row['billions']} B {mesh} on {row['devices']}: published {row['tflops']} TFLOP/s, "
        f"predicted {row['predicted_tflops']:.0f} ({row['error']:+.0%} seconds, micro-batch "
        f"{row['micro_batch']}){planned}"
    )


def throughputs(
    model: Model, meshes: list[tuple[int, int, int]], batch: int, replicate: str = "zero1_torch"
) -> dict[str, float]:
    """Return TFLOP/s a device of each mesh (tp, pp, dp), with one sequence a micro-batch."""
    judge, by_mesh = evaluator(model), {}
    for tp, pp, dp in meshes:
        candidate = plan((tp, pp, dp), batch, 1, 1, replicate)
        work = flops(model.layers, model.width, batch) / (tp * pp * dp) / 1e12
        by_mesh[mesh_words(pp, dp, tp)] = work / seconds(judge, candidate)["total"]
    return by_mesh


def crossovers() -> Iterator[dict[str, Any]]:
    """Return the fastest plans in figures 13, 14, 15 and 10, as forecast and as published."""
    pairs = [(2, 32), (4, 16), (8, 8), (16, 4), (32, 2)]
    for batch in (32, 128):
        by_mesh = throughputs(GPT_162B, [(tp, pp, 1) for tp, pp in pairs], batch)
        holds = max(by_mesh, key=by_mesh.__getitem__) == mesh_words(8, 1, 8)
        yield _case(f"figure 13, batch {batch}", "tp 8 x pp 8 is the fastest", by_mesh, holds=holds)
    for figure, meshes in (
        ("figure 14", [(1, pp, dp) for pp, dp in pairs]),
        ("figure 15", [(tp, 1, dp) for tp, dp in pairs]),
    ):
        for batch in (32, 128, 512):
            by_mesh = throughputs(GPT_6B, meshes, batch)
            first = next(iter(by_mesh))
            holds = max(by_mesh, key=by_mesh.__getitem__) == first
            published = f"{first} is the fastest, with the most replicas"
            yield _case(f"{figure}, batch {batch}", published, by_mesh, holds=holds)
    yield _figure_10()


def _figure_10() -> dict[str, Any]:
    """Forecast ZeRO-3 with the exchanges of DeepSpeed in 2021, tp 8 x pp 12, and `fully_shard`."""
    judge, batch, by_devices = evaluator(GPT_175B), 1536, {}
    for devices in TABLE_2:
        work = flops(GPT_175B.layers, GPT_175B.width, batch) / devices / 1e12
        sharded = plan((1, 1, devices), batch, batch // devices, 1, "fsdp")
        sliced = plan((8, 12, devices // 96), batch, 1, 2)
        today, planned = (seconds(judge, candidate) for candidate in (sharded, sliced))
        shape = (GPT_175B.layers, GPT_175B.width, devices)
        then = step_seconds(*shape, today["compute"], USED["cluster"])
        by_devices[str(devices)] = [work / step["total"] for step in (then, planned, today)]
    ratios = [zero3 / here for zero3, here, _ in by_devices.values()]
    holds = ratios == sorted(ratios, reverse=True) and ratios[1] < 1
    statement = "ZeRO-3 falls behind tp 8 x pp 12, and more so with twice the devices"
    published = {str(devices): pair for devices, pair in TABLE_2.items()}
    return {**_case("figure 10", statement, by_devices, holds=holds), "published": published}


def _case(figure: str, statement: str, figures: Any, *, holds: bool) -> dict[str, Any]:
    return {"figure": figure, "published_says": statement, "tflops": figures, "holds": holds}


def main() -> None:
    """Print and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--no-search", action="store_true", help="only the printed plans")
    parser.add_argument("--efficiency", type=float, help="instead of the cluster's own")
    options = parser.parse_args()
    USED["cluster"] = cluster = a100_nodes(options.efficiency)
    rows: list[dict[str, Any]] = []
    efficiency = cluster.device.efficiency
    document: dict[str, Any] = {"efficiency": efficiency, "rows": rows, "crossovers": []}
    for case in crossovers():
        document["crossovers"].append(case)
        print(case["figure"], case["holds"], case["tflops"], flush=True)
        keep(options.output, document)
    for row in ROWS:
        rows.append(table_row(row, searched=not options.no_search))
        print(line(rows[-1]), flush=True)
        document["median_error"] = statistics.median(abs(row["error"]) for row in rows)
        keep(options.output, document)
    print(f"median error {document['median_error']:.1%}")


if __name__ == "__main__":
    main()
