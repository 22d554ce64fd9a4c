"""Process groups as NCCL needs them, seen on a CPU, whose gloo needs neither.

NCCL runs the exchanges of a group in the order of the calls, so one thread alone may use a group.
It makes a group's communicator in the first exchange, in which all ranks have to take part.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from support.nets import BlockLM, TinyLM, tokens
from support.parity import train
from support.ranks import run_ranks
from torch import nn

from bigtrain.errors import ConfigError
from bigtrain.job.presets import preset_names
from bigtrain.ranks import connect
from bigtrain.ranks.context import RunContext
from bigtrain.versions.torch_versions import COUNTS_EXCHANGES

HOOK = 7_001
MAKERS = (
    "torch.distributed.new_group",
    "torch.distributed.distributed_c10d.new_group",
    "torch.distributed.device_mesh.new_group",
)
Exchanges = dict[str, list[tuple[str, str, int]]]
"""By group: the kind of each exchange, the thread that began it, and the size of the group."""

pytestmark = pytest.mark.skipif(not COUNTS_EXCHANGES, reason="this torch has no hooks on groups")


class Statistics(TinyLM):
    """A model with a buffer, which strategies broadcast from the main thread."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(1))


class GroupRecorder:
    """Records the exchanges of all groups that exist or are made within a `with` block."""

    def __init__(self) -> None:
        self.exchanges: Exchanges = defaultdict(list)
        self._groups: list[Any] = []
        self._host = threading.local()
        self._patches = ExitStack()

    def __enter__(self) -> Exchanges:
        for group in list(dist.distributed_c10d._world.pg_names):
            self._watch(group)
        make = self._watching(dist.new_group)
        for name in MAKERS:
            self._patches.enter_context(patch(name, make))
        for name in ("all_gather_rows", "gather_objects", "all_gather_objects"):
            by_host = self._unrecorded(getattr(RunContext, name))
            self._patches.enter_context(patch.object(RunContext, name, by_host))
        return self.exchanges

    def __exit__(self, *_: object) -> None:
        self._patches.close()
        for group in self._groups:
            group.unregister_pre_hook(HOOK)

    def _watch(self, group: Any) -> None:
        if not isinstance(group, dist.ProcessGroup) or any(g is group for g in self._groups):
            return
        self._groups.append(group)
        name, size = group.group_name, group.size()

        def begins(call: Any) -> None:
            if not getattr(self._host, "exchanges", False):
                thread = threading.current_thread().name
                self.exchanges[name].append((call.name.name, thread, size))

        group.register_pre_hook(HOOK, begins)

    def _watching(self, make: Callable[..., Any]) -> Callable[..., Any]:
        def made(*args: Any, **options: Any) -> Any:
            group = make(*args, **options)
            self._watch(group)
            return group

        return made

    def _unrecorded(self, gather: Callable[..., Any]) -> Callable[..., Any]:
        """Leave out what the host exchanges: beside NCCL, gloo does."""

        def gathered(*args: Any, **options: Any) -> Any:
            self._host.exchanges = True
            try:
                return gather(*args, **options)
            finally:
                self._host.exchanges = False

        return gathered


def record_runs(
    context: RunContext, strategies: dict[str, dict[str, Any]], model: type[nn.Module]
) -> dict[str, Exchanges | str]:
    """Train two steps under each strategy; return the exchanges, or why the strategy is refused."""
    results: dict[str, Exchanges | str] = {}
    for strategy, keys in strategies.items():
        with GroupRecorder() as found:
            if context.pp_size > 1:  # as on a GPU
                assert context.mesh is not None
                with patch.object(connect, "is_accelerator", lambda _: True):
                    connect._open_stages_group(context.mesh, context.device)
            try:
                train(context, model, tokens(22), strategy, keys, 2)
            except ConfigError as error:
                results[strategy] = str(error)
                continue
        results[strategy] = dict(found)
    return results


def faults(exchanges: Exchanges, *, lazy: bool) -> list[str]:
    """The groups that two threads use, and those whose first exchange some ranks do not join.

    Args:
        exchanges: those of one rank.
        lazy: whether a communicator is made in the first exchange, as in runs with stages.
    """
    wrong = []
    for name, calls in exchanges.items():
        threads = {thread for _, thread, _ in calls}
        if len(threads) > 1:
            wrong.append(f"group {name}: exchanges of {sorted(threads)}")
        kind, _, size = calls[0]
        if lazy and size > 2 and kind in ("SEND", "RECV"):
            wrong.append(f"group {name} of {size} ranks begins with {kind}")
    return wrong


def assert_right(ranks: list[dict[str, Exchanges | str]], *, least: int, lazy: bool) -> None:
    """Assert that no rank has a fault, and that at least so many strategies ran."""
    ran = set()
    for result in ranks:
        for strategy, exchanges in result.items():
            if isinstance(exchanges, str):
                continue
            ran.add(strategy)
            assert exchanges, strategy
            assert not faults(exchanges, lazy=lazy), (strategy, faults(exchanges, lazy=lazy))
    refused = {name: why for name, why in ranks[0].items() if isinstance(why, str)}
    assert len(ran) >= least, refused


NOT_HERE = ("data_parallel", "layer_split_devices", "gpipe_fairscale", "parameter_server_async")
"""One process drives several devices; or NCCL cannot order the messages, which is refused."""
BASE = {"train.global_batch_size": 8, "train.micro_batch_size": 2}


@pytest.mark.parametrize(
    ("axis", "model", "least"), [("dp", Statistics, 20), ("pp", BlockLM, 9), ("tp", BlockLM, 2)]
)
def test_a_group_is_used_by_one_thread(axis: str, model: type[nn.Module], least: int) -> None:
    """Under all presets that two ranks of this axis can run."""
    strategies = {n: BASE for n in preset_names("strategies") if n not in NOT_HERE}
    axes = {} if axis == "dp" else {axis: 2}
    results = run_ranks(
        record_runs, 2, strategies, model, flavour="deepspeed", timeout_s=300, **axes
    )
    assert_right(results, least=least, lazy=axis == "pp")


@pytest.mark.parametrize(
    "names", [["1f1b_ddp", "layer_split+ddp"], ["gpipe+ddp", "1f1b_zero1", "interleaved_1f1b+ddp"]]
)
def test_all_ranks_join_the_first_exchange_of_a_pipeline(names: list[str]) -> None:
    """Of three stages the tied parameter is on two; with replicas no group is that of all ranks."""
    strategies = {name: {**BASE, "mesh.pp": 3, "train.micro_batch_size": 1} for name in names}
    results = run_ranks(record_runs, 6, strategies, BlockLM, pp=3, dp=2, timeout_s=300)
    assert_right(results, least=len(names), lazy=True)


def test_faults_are_found() -> None:
    """Two threads in a group; messages before an exchange of all ranks."""
    two: Exchanges = {"1": [("ALLREDUCE", "MainThread", 4), ("SEND", "ring", 4)]}
    assert faults(two, lazy=False) == ["group 1: exchanges of ['MainThread', 'ring']"]
    first: Exchanges = {"2": [("RECV", "MainThread", 3), ("ALLREDUCE", "MainThread", 3)]}
    assert faults(first, lazy=True) == ["group 2 of 3 ranks begins with RECV"]
    assert not faults(first, lazy=False)
