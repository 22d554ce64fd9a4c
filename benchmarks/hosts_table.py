"""Compare strategies over slow links: measured, predicted, and the planner's choice.

    python benchmarks/hosts.py --table --output benchmarks/results/hosts.json

Two hosts of one core each (`benchmarks/hosts.py`), on the links of `LINKS`, train a small GPT under
each available strategy of `NAMES`, and under the plan that `bigtrain plan` finds fastest for a
cluster of such hosts. The cluster has the rates that `bigtrain doctor` measures on this machine
(with --cluster those of a file); each host has one core's share of them. The link between the hosts
has the switch's rate; its latency is twice the switch's delay (gloo sends after the receiver has
said that it is ready) plus the seconds of a message on this machine without a switch. Nothing of
the cluster is fitted to the measured steps.

`step_seconds` is the mean of the steps after `WARM`, as some techniques exchange in some steps
only. `chosen_over_best` is the step of the planner's plan divided by that of the fastest row that
computes what one process does; `local_sgd` does not, and the planner has no such plans. The figures
are times: use an idle machine.
"""

from __future__ import annotations

import json
import os
import shlex
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from harness import keep
from hosts import World
from planner_choice import BATCH, GPT

from bigtrain.assembly.make_plan import make_plan
from bigtrain.compare.subprocess_runs import reason_in
from bigtrain.engine.setup import open_setup
from bigtrain.engine.time_blocks import SCRIPT
from bigtrain.errors import BigtrainError
from bigtrain.job.load import load_job
from bigtrain.job.presets import preset_names
from bigtrain.machine.cluster import Cluster, Link, LinkSpec, NodeSpec, load_cluster
from bigtrain.machine.local_cluster import measure_local_cluster
from bigtrain.planner.ask import Question, ask, rank_limits
from bigtrain.planner.show import plan_text
from bigtrain.timing.run_seconds import RunClock
from bigtrain.timing.step_time import StepTimer

LINKS = {"100 Mbit/s": 1e8, "1 Gbit/s": 1e9}
DELAY_S = 1e-3
NAMES = (
    *("ddp", "zero1_torch", "fsdp", "1f1b"),
    *("sync_sgd", "ring", "parameter_server", "local_sgd"),
)
OTHER_NUMBERS = ("local_sgd",)
"""Strategies that do not compute what one process does."""
WARM = 3
LIMIT_S = 900.0
WORDS = [
    "model.name=gpt",
    f"model.args={json.dumps(GPT)}",
    "data.name=synthetic",
    "data.args={kind: language, vocabulary: 1024}",
    f"train.global_batch_size={BATCH}",
]


def hosts_cluster(base: Cluster, hosts: int, rate: float, delay: float) -> Cluster:
    """Return a cluster of hosts of one core each, from the rates of one machine.

    Args:
        base: one node whose ranks share the cores.
        hosts: how many.
        rate: bits a second of a link, each way.
        delay: seconds from host to host.
    """
    share = 1 / (base.node.cores or base.node.devices)
    rates = base.device.flops.model_dump().items()
    flops = {name: known and known * share for name, known in rates}
    bandwidth = base.device.memory_bandwidth * share
    device = {"flops": base.device.flops.model_copy(update=flops), "memory_bandwidth": bandwidth}
    memory = base.node.host_memory // hosts
    node = NodeSpec(devices=1, host_memory=memory, shared=True, cores=1)
    latency = 2 * delay + base.inside.latency
    # Seen on these hosts: gloo runs a reduce-scatter as an all-reduce of the same bytes.
    twice = LinkSpec(latency=2 * latency, bandwidth=rate / 16, ranks=hosts)
    link = Link(
        latency=latency, bandwidth=rate / 8, efficiency=1.0, kinds={"reduce_scatter": twice}
    )
    parts = {"device": base.device.model_copy(update=device), "node": node, "between": link}
    return base.model_copy(update={"name": f"{hosts} hosts", **parts})


def predicted(name: str, words: list[str], cluster: Cluster, hosts: int) -> dict[str, Any]:
    """Return the predicted seconds of a step, by part; or the reason why they are unknown."""
    try:
        job = load_job(None, name, words)
        parts = open_setup(job, make_plan(job, hosts, "cpu"))
        given = (job, parts.resolved, parts.workload, StepTimer(cluster))
        forecast = RunClock(*given, at_once=hosts, script=SCRIPT).forecast()
    except BigtrainError as error:
        return {"predicted_seconds": None, "why": str(error)}
    return {"predicted_seconds": forecast.seconds, "predicted_parts": forecast.parts}


def chosen_plan(cluster: Cluster, hosts: int) -> tuple[str, str, float]:
    """Return the planner's plan: its name, the text of its file, its seconds."""
    memory, _ = rank_limits(cluster, memory=None, cap=None)
    question = Question(
        job=load_job(None, "single", WORDS),
        cluster=cluster,
        devices=hosts,
        memory=memory,
        global_batch_size=BATCH,
        at_hand=True,
        margins={"torch": 0.0},
    )
    answer = ask(question)
    best = answer.result.best[0]
    candidate = best.candidate
    name = (
        f"{best.label} pp {candidate.pp} x dp {candidate.dp}, {candidate.rows} x "
        f"{candidate.micro_batches}"
    )
    return name, plan_text(answer, best, "benchmarks/hosts.py --table"), best.seconds.total


def measured(world: World, words: list[str], steps: int) -> dict[str, Any]:
    """Run on all hosts; return the seconds of a step, or the reason for a failure."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        quiet = ["train.eval_every=0", "checkpoint.at_end=false", "checkpoint.resume=null"]
        quiet += ["memory.track_steps=0", f"train.steps={WARM + steps}"]
        line = [sys.executable, "-m", "bigtrain", "train", *WORDS, *words, *quiet]
        line += [f"log.dir={folder}", "log.name=run"]
        log = folder / "log"
        with log.open("w") as output:
            status = world.run(line, limit_s=LIMIT_S, output=output.fileno())
        if status:
            late = f"not done after {LIMIT_S:.0f} s"
            return {"step_seconds": None, "why": late if status == 124 else reason_in(log, status)}
        lines = (folder / "run" / "metrics.jsonl").read_text("utf-8").splitlines()
    taken = [json.loads(line)["step_seconds"] for line in lines]
    return {"step_seconds": statistics.fmean(taken[WARM:])}


def of_link(base: Cluster, hosts: int, rate: float, steps: int) -> Iterator[dict[str, Any]]:
    """Return a row for each strategy and one for the planner's plan."""
    cluster = hosts_cluster(base, hosts, rate, DELAY_S)
    plan, text, seconds = chosen_plan(cluster, hosts)
    with World(hosts, rate, DELAY_S) as world, tempfile.TemporaryDirectory() as folder:
        for name in NAMES:
            if name in preset_names("strategies"):
                told = predicted(name, WORDS, cluster, hosts)
                yield {"strategy": name, **told, **measured(world, ["--strategy", name], steps)}
        path = Path(folder) / "plan.yaml"
        path.write_text(text)
        told = {"plan": plan, "predicted_seconds": seconds}
        yield {"strategy": "planner", **told, **measured(world, ["--plan", str(path)], steps)}


def line(row: dict[str, Any]) -> str:
    """Return a row as a line of text."""
    seconds, forecast = row["step_seconds"], row["predicted_seconds"]
    shown = f"{row['strategy']}: " + (f"{seconds:.3f} s" if seconds else f"none ({row['why']})")
    shown += f", predicted {forecast:.3f} s" if forecast else ", not predicted"
    return shown + (f" ({row['plan']})" if "plan" in row else "")


def make_table(hosts: int, steps: int, output: Path | None, figures: str | None) -> int:
    """Measure, print and write the figures; return the exit status.

    Args:
        hosts: how many.
        steps: that are timed; a multiple of what `local_sgd` steps alone for.
        output: the JSON file.
        figures: a cluster file of this machine; left out, it is measured.
    """
    os.environ["OMP_NUM_THREADS"] = "1"
    base = load_cluster(figures) if figures else measure_local_cluster(hosts)
    links: list[dict[str, Any]] = []
    for name, rate in LINKS.items():
        rows: list[dict[str, Any]] = []
        for row in of_link(base, hosts, rate, steps):
            rows.append(row)
            print(f"{name}: {line(row)}", flush=True)
        ran = [r for r in rows if r["step_seconds"] and r["strategy"] not in OTHER_NUMBERS]
        chosen = rows[-1]["step_seconds"]
        best = min(ran, key=lambda row: float(row["step_seconds"])) if ran else None
        ratio = chosen / best["step_seconds"] if chosen and best else None
        ratio_words = (
            "-" if ratio is None or best is None else f"{ratio:.3f}; best {best['strategy']}"
        )
        print(f"{name}: planner over best {ratio_words}", flush=True)
        link = {"link": name, "bits_per_second": rate, "delay_seconds": DELAY_S}
        links.append({**link, "chosen_over_best": ratio, "rows": rows})
        command = shlex.join(["python", "benchmarks/hosts.py", "--table"])
        keep(output, {"command": command, "hosts": hosts, "steps": steps, "links": links})
    return 0 if any(row["step_seconds"] for link in links for row in link["rows"]) else 1
