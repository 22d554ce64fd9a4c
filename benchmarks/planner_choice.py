"""Check the planner's choice: its plan under five caps against all other plans, measured.

    python benchmarks/planner_choice.py --output benchmarks/results/planner_choice.json
    python benchmarks/planner_choice.py --ranks 2 --shares 1.0

For 1, 2 and 4 ranks a small GPT is planned under five caps, from one that just fits the smallest
plan to one that fits the fastest. Under each cap the candidates of the space that fit by forecast
are measured, not only those that the search evaluated. Those whose predicted step takes more than
`NEAR` times that of the chosen plan are left out, and counted as `slower`. A plan's step is the
median of `STEPS` steps of a real run that enforces the cap (`memory.cap`: the lowest of the caps
under which it fits), its peak the highest tracked peak of all ranks. `chosen` is the step of the
planner's plan divided by that of the best measured plan (1 is the best); both are measured again,
in alternation, as single runs differ by some per cent. `rank correlation` is Spearman's, of the
predicted and measured seconds of all measured plans under a cap. `wrong` counts plans that were
said to fit but ran out of memory, or whose tracked peak exceeds the part of the cap for tensors.

`bigtrain doctor` measures the rates on this machine, and blocks are timed on it. A single rank has
two threads; with several ranks each has one. The figures are times: use an idle machine.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import forked
import torch
from harness import keep
from planner_accuracy import unchecked

from bigtrain.assembly.make_plan import make_plan
from bigtrain.engine.setup import open_setup
from bigtrain.errors import ConfigError
from bigtrain.job.load import load_job
from bigtrain.job.schema import Job
from bigtrain.machine.local_cluster import measure_local_cluster
from bigtrain.memory.cap import Limit
from bigtrain.planner.ask import PlannedAnswer, Question, ask, rank_limits
from bigtrain.planner.evaluate import EvaluatedPlan
from bigtrain.ranks.context import RunContext
from bigtrain.units import MIB

GPT = {"num_layers": 8, "width": 192, "num_heads": 4, "vocab_size": 1024, "sequence_length": 512}
BATCH = 4
TRACKED, WARM, STEPS, AGAIN = 2, 5, 5, 7
SHARES = (0.02, 0.25, 0.5, 0.75, 1.0)
"""Of the way from the smallest plan's peak to the fastest one's."""
NEAR = 1.35
"""A plan beyond it is the best only if its forecast is 35 % too high beside the chosen plan's."""
LIMIT_S = 240.0
WORDS = [
    "model.name=gpt",
    f"model.args={json.dumps(GPT)}",
    "data.name=synthetic",
    "data.args={kind: language, vocabulary: 1024}",
    f"train.global_batch_size={BATCH}",
    f"train.steps={WARM + STEPS}",
    f"memory.track_steps={TRACKED}",
]


def threads_of(ranks: int) -> int:
    """Return the number of threads of each rank."""
    return 2 if ranks == 1 else 1


def planned(ranks: int, cap: int | None) -> PlannedAnswer:
    """Return the planner's answer under a cap."""
    words = WORDS if cap is None else [*WORDS, f"memory.cap={cap}"]
    job, cluster = load_job(None, "single", words), measure_local_cluster(ranks)
    cap_words = None if cap is None else str(cap)
    memory, _ = rank_limits(cluster, memory="1TiB" if cap is None else None, cap=cap_words)
    question = Question(
        job=job,
        cluster=cluster,
        devices=ranks,
        memory=memory,
        global_batch_size=BATCH,
        at_hand=True,
        margins={"torch": 0.0},
    )
    return ask(question)


def prepare(
    ranks: int, shares: Sequence[float]
) -> list[tuple[int, int, list[dict[str, Any]], int]]:
    """Return, for each cap, its bytes for tensors and the plans that fit, the chosen one first.

    The last entry of each tuple is the number of plans that were left out because of `NEAR`.
    """
    os.environ["OMP_NUM_THREADS"] = str(threads_of(ranks))  # for the ranks that time blocks
    roomy = planned(ranks, None)
    smallest = roomy.search.smallest()
    low = smallest.peak.bytes if smallest is not None and smallest.peak is not None else 0
    high = max(low, roomy.result.best[0].peak.bytes)
    by_cap = []
    for share in shares:
        wanted = round(low + (high - low) * share) + MIB
        cap = Limit(0).memory_for(wanted) - 1
        answer = planned(ranks, cap)
        limit = answer.question.limit
        plans = [*answer.result.best[:1], *_fitting(answer, limit)]
        longest = NEAR * plans[0].seconds.total
        near = [_told(plan) for plan in plans if plan.seconds.total <= longest]
        by_cap.append((cap, limit, near, len(plans) - len(near)))
    return by_cap


def _fitting(planned: PlannedAnswer, limit: int) -> Iterator[EvaluatedPlan]:
    judge = planned.search.evaluator
    for candidate in planned.search.space.candidates():
        try:
            judged = judge.evaluate(candidate, judge.plan_of(candidate), limit)
        except ConfigError:  # a technique refuses it
            continue
        if isinstance(judged, EvaluatedPlan):
            yield judged


def _told(judged: EvaluatedPlan) -> dict[str, Any]:
    candidate = judged.candidate
    less = sorted(judged.recomputed.items())
    return {
        "plan": f"{candidate.label} pp {candidate.pp} x dp {candidate.dp}, {candidate.rows} x "
        f"{candidate.micro_batches}",
        "computed_again": len(less),
        "cuts": judged.cuts,
        "predicted_bytes": judged.peak.bytes,
        "predicted_seconds": judged.seconds.total,
        "key": repr((candidate, less, judged.cuts)),
        "job": judged.job,
    }


def given_back(_: RunContext, prepared: Any, *__: Any) -> Any:
    """Return the prepared value."""
    return prepared


def nothing(*_: Any) -> None:
    """Prepare nothing."""


def train(context: RunContext, _: None, job: Job) -> tuple[int, list[float]]:
    """Run one rank; return its tracked peak, and the seconds of the steps after warm-up."""
    torch.set_num_threads(threads_of(context.world_size))
    parts = open_setup(job, make_plan(job, context.world_size, "cpu"))
    seconds = []
    with unchecked(parts).engine(context) as engine:
        for batch in parts.training_steps(context, 0):
            began = time.perf_counter()
            step = engine.step(batch).step
            seconds.append(time.perf_counter() - began)
            if step == WARM + STEPS:
                break
        peak = engine.meter.measured().peak
    if peak is None:
        raise RuntimeError("nothing was tracked")
    return peak.bytes, seconds[WARM:]


def measured(ranks: int, plan: dict[str, Any]) -> dict[str, Any]:
    """Run a plan; return the highest tracked peak, and the median of the slowest ranks' steps."""
    mesh = plan["job"].mesh
    task = forked.Task(
        plan["plan"], nothing, train, (plan["job"],), ranks, mesh.pp or 1, LIMIT_S, tp=mesh.tp or 1
    )
    (outcome,) = forked.run_all([task], ranks)
    if not outcome.values:
        return {"failed": outcome.refused or outcome.failed}
    peaks, times = zip(*outcome.values, strict=True)
    steps = [max(each) for each in zip(*times, strict=True)]
    return {"tracked_bytes": max(peaks), "seconds": statistics.median(steps)}


def beside(ranks: int, chosen: dict[str, Any], best: dict[str, Any]) -> float | None:
    """Return the ratio of two plans' steps, run anew in alternation; None if none ran."""
    pairs = [(measured(ranks, chosen), measured(ranks, best)) for _ in range(AGAIN)]
    ratios = [a["seconds"] / b["seconds"] for a, b in pairs if "seconds" in a and "seconds" in b]
    return statistics.median(ratios) if ratios else None


def of_ranks(ranks: int, shares: Sequence[float]) -> Iterator[dict[str, Any]]:
    """Return a row for each limit."""
    task = forked.Task("plans", prepare, given_back, (ranks, shares), 1, 1, 10 * LIMIT_S)
    (outcome,) = forked.run_all([task], 1)
    if not outcome.values:
        raise RuntimeError(outcome.refused or outcome.failed)
    known: dict[str, dict[str, Any]] = {}
    for cap, limit, plans, slower in outcome.values[0]:
        for plan in plans:
            if plan["key"] not in known:
                known[plan["key"]] = measured(ranks, plan)
        ran = [ran_plan for ran_plan in plans if "seconds" in known[ran_plan["key"]]]
        chosen, best = plans[0], min(ran, key=lambda ran_plan: known[ran_plan["key"]]["seconds"])
        ratio = 1.0 if chosen["key"] == best["key"] else beside(ranks, chosen, best)
        fields = ("plan", "computed_again", "predicted_bytes", "predicted_seconds")
        rows = [{k: ran_plan[k] for k in fields} | known[ran_plan["key"]] for ran_plan in plans[1:]]
        yield {
            "ranks": ranks,
            "cap_bytes": cap,
            "limit_bytes": limit,
            "chosen": chosen["plan"],
            "best": best["plan"],
            "chosen_over_best": ratio,
            "rank_correlation": correlation([r for r in rows if "seconds" in r]),
            "wrong": [r["plan"] for r in rows if _is_wrong(r, limit)],
            "failed": sum("failed" in r for r in rows),
            "slower": slower,
            "plans": rows,
        }


def _is_wrong(row: dict[str, Any], limit: int) -> bool:
    return row.get("tracked_bytes", 0) > limit or "memory" in row.get("failed", "")


def correlation(rows: list[dict[str, Any]]) -> float | None:
    """Return Spearman's correlation of predicted and measured seconds; None below three plans."""
    if len(rows) < 3:
        return None
    seconds = [torch.tensor([r[k] for r in rows]) for k in ("predicted_seconds", "seconds")]
    places = torch.stack([each.argsort().argsort().double() for each in seconds])
    return float(torch.corrcoef(places)[0, 1])


def line(row: dict[str, Any]) -> str:
    """Return a row as a line of text."""
    ratio, rank = row["chosen_over_best"], row["rank_correlation"]
    return (
        f"{row['ranks']} ranks, {row['cap_bytes'] / MIB:.0f} MiB: {row['chosen']}; best "
        f"{row['best']}; chosen over best {'-' if ratio is None else f'{ratio:.3f}'}; "
        f"rank correlation {'-' if rank is None else f'{rank:.2f}'} of {len(row['plans'])} plans, "
        f"{len(row['wrong'])} wrong, {row['failed']} failed, {row['slower']} slower"
    )


def main() -> None:
    """Measure, print and write the figures."""
    forked.load_everything()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--shares", type=float, nargs="+", default=SHARES, help="see SHARES")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    rows = []
    for ranks in options.ranks:
        for row in of_ranks(ranks, options.shares):
            rows.append(row)
            print(line(row), flush=True)
            keep(options.output, {"rows": rows})


if __name__ == "__main__":
    main()
