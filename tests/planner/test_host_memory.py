"""The optimizer state of all ranks on a node must fit into the host's memory."""

from __future__ import annotations

from support.plan_candidates import GPT

from bigtrain.job.load import load_job
from bigtrain.machine.cluster import load_cluster
from bigtrain.memory.cap import Limit
from bigtrain.planner.ask import Question, ask
from bigtrain.units import MIB, format_bytes

NODE = load_cluster("a100-node")


def test_state_on_the_host_has_to_fit_there() -> None:
    small = NODE.node.model_copy(update={"host_memory": MIB // 8})
    cluster = NODE.model_copy(update={"node": small})
    job = load_job(None, "single", GPT)
    margins = {"torch": 0.0, "deepspeed": 0.0}
    least = ask(Question(job, cluster, 1, Limit(2**40, 0), 8, margins=margins)).search.smallest()
    assert least is not None
    assert least.peak is not None
    limit = least.peak.bytes - 1
    planned = ask(Question(job, cluster, 1, Limit(limit, 0), 8, margins=margins))
    assert planned.result.best == []
    reasons = [one.reason for one in planned.result.rejected if one.candidate.offload is not None]
    assert any("optimizer state on the host of a node, which has 128.0 KiB" in r for r in reasons)


def test_state_on_the_host_is_fp32_also_of_bf16_parameters() -> None:
    """Moments, values and gradients: 16 bytes per number, for the replicas of a node."""
    small = NODE.node.model_copy(update={"host_memory": MIB // 8})
    cluster = NODE.model_copy(update={"node": small})
    job = load_job(None, "single", [*GPT, "train.precision=bf16"])
    question = Question(job, cluster, 2, Limit(MIB, 0), 8, margins={"torch": 0.0, "deepspeed": 0.0})
    planned = ask(question)
    assert planned.result.best == []
    said = {
        one.candidate.label: one.reason
        for one in planned.result.rejected
        if "optimizer state on the host of a node" in one.reason
    }
    whole = format_bytes(16 * planned.num_parameters)
    assert said["zero1_torch+offload_cpu"].startswith(whole)
