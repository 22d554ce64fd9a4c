"""Exchanges of real runs, played by the rules of NCCL, of which gloo on a CPU shows nothing.

NCCL runs the exchanges of a group in the order of the calls, so one thread alone may use a group.
It makes a group's communicator in the first exchange, in which all ranks have to take part. And a
message that begins waits for its partner, and lets no later one pass; see `support.nccl`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import pytest
import torch
from support.nccl import Begin, Communicator, Program, ProgramRecorder, Wait, play
from support.nets import BlockLM, TinyLM, tokens
from support.parity import train
from support.ranks import run_ranks
from torch import nn

from bigtrain.errors import ConfigError
from bigtrain.job.presets import preset_names
from bigtrain.ranks import connect
from bigtrain.ranks.context import RunContext
from bigtrain.versions.torch_versions import COUNTS_EXCHANGES

pytestmark = pytest.mark.skipif(not COUNTS_EXCHANGES, reason="this torch has no hooks on groups")

Programs = dict[str, Program]
"""The programs of a rank, by thread."""
NOT_HERE = ("data_parallel", "layer_split_devices", "gpipe_fairscale", "parameter_server_async")
"""One process drives several devices; or NCCL cannot order the messages, which is refused."""
BASE = {"train.global_batch_size": 8, "train.micro_batch_size": 2, "optim.clip_norm": 0.5}


class Statistics(TinyLM):
    """A model with a buffer, which strategies broadcast from the main thread."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(1))


def record_runs(
    context: RunContext, strategies: dict[str, dict[str, Any]], model: type[nn.Module]
) -> dict[str, Programs | str]:
    """Train under each strategy; return the programs, or why the strategy is refused.

    In three steps with 22 samples the last batch is smaller, so a pipeline has leftovers.
    """
    results: dict[str, Programs | str] = {}
    for strategy, keys in strategies.items():
        with ProgramRecorder(context.rank, pairs=context.pp_size > 1) as recorder:
            if context.pp_size > 1:  # as on a GPU
                assert context.mesh is not None
                with patch.object(connect, "is_accelerator", lambda _: True):
                    connect._open_stages_group(context.mesh, context.device)
            try:
                train(context, model, tokens(22), strategy, keys, 3)
            except ConfigError as error:
                results[strategy] = str(error)
                continue
        results[strategy] = dict(recorder.programs)
    return results


def shared_by_threads(programs: Programs) -> list[str]:
    """The communicators of a rank that several of its threads use."""
    threads: dict[Communicator, set[str]] = defaultdict(set)
    for thread, program in programs.items():
        for operation in program:
            if isinstance(operation, Begin):
                threads[operation.communicator].add(thread)
    return [f"{c.name} of {c.ranks}: {sorted(t)}" for c, t in threads.items() if len(t) > 1]


def faults(ranks: Sequence[Programs], *, lazy: bool) -> list[str]:
    """What NCCL would not do.

    Args:
        ranks: the programs of each rank.
        lazy: whether a communicator is made in the first exchange, as in runs with stages.
    """
    shared = [line for programs in ranks for line in shared_by_threads(programs)]
    threads = {(r, name): p for r, programs in enumerate(ranks) for name, p in programs.items()}
    return shared + play(threads, made=not lazy)


def assert_right(ranks: list[dict[str, Programs | str]], *, least: int, lazy: bool) -> None:
    """Assert that no strategy has a fault, and that at least so many ran."""
    refused: dict[str, str] = {}
    for strategy, first in ranks[0].items():
        if isinstance(first, str):
            refused[strategy] = first
            continue
        programs: list[Any] = [rank[strategy] for rank in ranks]
        assert any(isinstance(o, Begin) for p in first.values() for o in p), strategy
        found = faults(programs, lazy=lazy)
        assert not found, f"{strategy}: " + "\n".join(found)
    assert len(ranks[0]) - len(refused) >= least, refused


@pytest.mark.parametrize(
    ("axis", "model", "least"), [("dp", Statistics, 20), ("pp", BlockLM, 9), ("tp", BlockLM, 2)]
)
def test_two_ranks_end_under_every_preset(axis: str, model: type[nn.Module], least: int) -> None:
    strategies = {n: BASE for n in preset_names("strategies") if n not in NOT_HERE}
    axes = {} if axis == "dp" else {axis: 2}
    results = run_ranks(
        record_runs, 2, strategies, model, flavour="deepspeed", timeout_s=300, **axes
    )
    assert_right(results, least=least, lazy=axis == "pp")


MESHES: dict[str, tuple[dict[str, int], list[str]]] = {
    "three stages, two replicas": (
        {"pp": 3, "dp": 2},
        ["1f1b_ddp", "layer_split+ddp", "gpipe+ddp", "1f1b_zero1", "1f1b_fsdp"],
    ),
    "stages in slices": ({"pp": 2, "tp": 2}, ["1f1b+tensor", "gpipe+tensor_sequence"]),
    "slices of replicas": ({"dp": 2, "tp": 2}, ["tensor+ddp", "tensor+fsdp"]),
    "three servers and workers": ({"dp": 4}, ["parameter_server", "ring", "local_sgd"]),
    "schedules of several stages": (
        {"pp": 2, "dp": 2},
        ["interleaved_1f1b+ddp", "zero_bubble+ddp", "zbv+ddp", "dualpipev+ddp"],
    ),
}


@pytest.mark.parametrize("mesh", MESHES)
def test_meshes_of_more_ranks_end(mesh: str) -> None:
    """With tied parameters, on the first and the last stage, and smaller batches."""
    axes, names = MESHES[mesh]
    ranks = axes.get("pp", 1) * axes.get("dp", 1) * axes.get("tp", 1)
    keys = {**BASE, **{f"mesh.{axis}": n for axis, n in axes.items()}, "train.micro_batch_size": 1}
    more = {"strategy.replicate.servers": 2}
    strategies = {n: {**keys, **(more if "server" in n else {})} for n in names}
    results = run_ranks(record_runs, ranks, strategies, BlockLM, timeout_s=300, **axes)
    assert_right(results, least=len(names), lazy="pp" in axes)


def test_faults_are_found() -> None:
    """Two threads in a group; a first message without all ranks; orders that cross; kinds."""
    group = Communicator("1", (0, 1, 2))
    alone = Begin(group, kind="ALLREDUCE")
    two: list[Programs] = [{"main": [alone, Wait(0)], "ring": [alone, Wait(0)]}] * 3
    assert shared_by_threads(two[0]) == ["1 of (0, 1, 2): ['main', 'ring']"]

    to, by = Begin(group, (("send", 1),)), Begin(group, (("receive", 0),))
    tied: list[Programs] = [{"main": [to, Wait(0)]}, {"main": [by, Wait(0)]}, {"main": []}]
    assert "rank 0 stands still at 0" in faults(tied, lazy=True)[0]
    assert not faults(tied, lazy=False)

    back, other = Begin(group, (("send", 0),)), Begin(group, (("receive", 1),))
    crossed: list[Programs] = [{"main": [to, other]}, {"main": [back, by]}, {"main": []}]
    assert not faults(crossed, lazy=False)  # no one waits: the host has ended
    waiting = [*crossed[0]["main"], Wait(0), Wait(1)]
    crossed = [{"main": waiting}, {"main": [back, by, Wait(0), Wait(1)]}, {"main": []}]
    assert len(faults(crossed, lazy=False)) == 2
    together = Begin(group, (("send", 1), ("receive", 1)))
    answered = Begin(group, (("send", 0), ("receive", 0)))
    paired: list[Programs] = [
        {"main": [together, Wait(0)]},
        {"main": [answered, Wait(0)]},
        {"main": []},
    ]
    assert not faults(paired, lazy=False)

    kinds: list[Programs] = [
        {"main": [Begin(group, kind=kind), Wait(0)]} for kind in ("BROADCAST", "ALLREDUCE", "")
    ]
    assert len(faults(kinds, lazy=False)) == 3
