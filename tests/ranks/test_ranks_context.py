"""`RunContext` on real ranks: exchanges, mesh axes, timeouts, and how `run_ranks` fails."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ranks import RankFailure, run_ranks

from bigtrain.errors import ConfigError, LaunchError
from bigtrain.own_loop.outputs import share_outputs
from bigtrain.ranks.connect import connect
from bigtrain.ranks.context import RunContext
from bigtrain.ranks.hang_watch import BACKEND_GRACE_S
from bigtrain.ranks.launcher_env import SINGLE_RANK
from bigtrain.versions.torch_versions import set_timeouts


def exchange(context: RunContext) -> dict[str, object]:
    context.barrier()
    mine = torch.tensor([context.rank + 1.0])
    return {
        "sum": context.all_reduce_sum(mine).item(),
        "mine": mine.item(),
        "objects": context.gather_objects({"rank": context.rank}),
        "word": context.broadcast_object(f"from {context.rank}"),
        "numbers": context.all_gather_numbers(context.rank / 3),
        "of replicas": context.all_gather_numbers(context.rank / 3, "dp"),
        "main": context.is_main,
        "dp": (context.dp_rank, context.dp_size),
        "threads": torch.get_num_threads(),
    }


@pytest.mark.parametrize("world_size", [2, 4])
def test_every_exchange(world_size: int) -> None:
    results = run_ranks(exchange, world_size)
    for rank, result in enumerate(results):
        assert result == {
            "sum": world_size * (world_size + 1) / 2,
            "mine": rank + 1.0,
            "objects": None if rank else [{"rank": n} for n in range(world_size)],
            "word": "from 0",
            "numbers": [n / 3 for n in range(world_size)],
            "of replicas": [n / 3 for n in range(world_size)],
            "main": rank == 0,
            "dp": (rank, world_size),
            "threads": 1,
        }


@pytest.mark.parametrize("force_group", [False, True])
def test_every_exchange_in_one_process(force_group: bool) -> None:
    with connect(SINGLE_RANK, device="cpu", force_group=force_group, seed=7) as context:
        assert dist.is_initialized() is force_group
        assert (context.mesh is not None) is force_group
        assert (context.seed, context.launcher) == (7, "python")
        result = exchange(context)
    assert not dist.is_initialized()
    assert result["objects"] == [{"rank": 0}]
    assert result["word"] == "from 0"
    assert result["numbers"] == [0.0]
    assert result["dp"] == (0, 1)


def exchange_without(context: RunContext) -> list[dict[str, object]]:
    context.tolerate_losses([1, 2], ["first", "second", "third", "fourth"])
    beside, results = context.for_background(), [exchange(context)]
    if context.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    results += [exchange(context), exchange(beside)]
    with context.long_timeout():
        results.append(exchange(context))
    results[-1]["lost"] = context.agreed_lost_ranks()
    return results


def test_every_exchange_goes_on_without_a_rank_that_is_lost() -> None:
    results = run_ranks(exchange_without, 4, killed=[2])
    assert results[2] is None
    for rank in (0, 1, 3):
        before, *after = results[rank]
        assert before["sum"] == 10
        assert before["numbers"] == [n / 3 for n in range(4)]
        for result in after:
            assert result["sum"] == 1 + 2 + 4
            assert result["word"] == "from 0"
            assert result["numbers"] == [0.0, 1 / 3, 0.0, 1.0]
            assert result["of replicas"] == [0.0, 1 / 3, 0.0, 1.0]
            everyone = [{"rank": 0}, {"rank": 1}, None, {"rank": 3}]
            assert result["objects"] == (None if rank else everyone)
        assert after[-1]["lost"] == (2,)


def axes(context: RunContext) -> dict[str, object]:
    ones = torch.ones(1) * 10**context.rank
    assert context.mesh is not None
    return {
        "names": context.mesh.mesh_dim_names,
        "sums": [int(context.all_reduce_sum(ones, axis).item()) for axis in ("pp", "dp", "tp")],
        "groups": len(dist.distributed_c10d._world.pg_map),
        "numbers": [context.all_gather_numbers(context.rank, axis) for axis in ("dp", "pp")],
        "places": (context.dp_rank, context.pp_rank, context.dp_size, context.pp_size),
        "pp ranks": dist.get_process_group_ranks(context.pp_group),
        "whole": context.dp_group is dist.group.WORLD,
    }


def test_the_ranks_of_one_pipeline_stand_side_by_side() -> None:
    results = run_ranks(axes, 4, pp=2, dp=2)
    assert results[0]["names"] == ("dp", "pp", "tp")
    assert [result["sums"] for result in results] == [
        [11, 101, 1],
        [11, 1010, 10],
        [1100, 101, 100],
        [1100, 1010, 1000],
    ]
    assert [result["places"] for result in results] == [
        (0, 0, 2, 2),
        (0, 1, 2, 2),
        (1, 0, 2, 2),
        (1, 1, 2, 2),
    ]
    assert [result["pp ranks"] for result in results] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [result["numbers"] for result in results] == [
        [[0, 2], [0, 1]],
        [[1, 3], [0, 1]],
        [[0, 2], [2, 3]],
        [[1, 3], [2, 3]],
    ]


def test_data_parallelism_over_all_ranks_uses_the_world_group() -> None:
    assert all(result["whole"] for result in run_ranks(axes, 2))


def group_timeouts(context: RunContext) -> set[float]:
    assert context.mesh is not None
    groups = [dist.group.WORLD, *context.mesh.get_all_groups()]
    device = torch.device("cpu")
    return {g._get_backend(device).options._timeout.total_seconds() for g in groups if g}


def test_collectives_have_the_shorter_timeout() -> None:
    assert run_ranks(group_timeouts, 2, timeout=17.0) == [{17.0 + BACKEND_GRACE_S}] * 2


def fail_on(context: RunContext, rank: int, behaviour: str) -> None:
    """Fail on one rank while the others sleep or wait in a collective."""
    if context.rank == rank:
        if behaviour == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ValueError(f"no luck on {rank}")
    if behaviour == "sleep":
        time.sleep(100)
    context.barrier()


@pytest.mark.parametrize("behaviour", ["sleep", "collective"])
@pytest.mark.parametrize("rank", [0, 1])
def test_the_first_failure_is_raised_with_its_rank_and_traceback(rank: int, behaviour: str) -> None:
    start = time.monotonic()
    with pytest.raises(RankFailure, match=f"rank {rank} failed:(?s:.*)in fail_on(?s:.*)no luck on"):
        run_ranks(fail_on, 2, rank, behaviour)
    assert time.monotonic() - start < 10


def test_a_killed_rank_is_named() -> None:
    with pytest.raises(RankFailure, match="rank 1 failed:\nit ended with exit status -9"):
        run_ranks(fail_on, 2, 1, "killed")


def hang(context: RunContext) -> None:
    time.sleep(100)


def test_a_hang_ends_with_the_stacks() -> None:
    with pytest.raises(TimeoutError, match="ranks \\[0, 1\\] of 2 (?s:.*) in hang"):
        run_ranks(hang, 2, timeout_s=3)


def have_little_patience(context: RunContext) -> None:
    assert context.mesh is not None
    set_timeouts([dist.group.WORLD, *context.mesh.get_all_groups()], 1.0)


def wait_for_late_rank(context: RunContext) -> None:
    """Rank 1 joins a collective after its timeout."""
    have_little_patience(context)
    if context.rank == 1:
        time.sleep(5)
    context.all_gather_numbers(1)


def test_a_collective_that_is_late_fails_where_it_waits() -> None:
    with pytest.raises(RankFailure, match="rank 0 failed:(?s:.*)in all_gather_numbers"):
        run_ranks(wait_for_late_rank, 2)


def one_prepares(context: RunContext) -> set[float]:
    have_little_patience(context)
    if context.is_main:
        time.sleep(2.5)
    context.barrier()
    return group_timeouts(context)


def test_a_barrier_waits_for_a_rank_that_downloads_or_writes() -> None:
    assert run_ranks(one_prepares, 2) == [{1.0}, {1.0}]


def refuse(context: RunContext) -> None:
    raise ConfigError("train.steps=0 is too few. Use train.steps=1")


def test_the_error_itself_comes_back() -> None:
    with pytest.raises(RankFailure) as caught:
        run_ranks(refuse, 2)
    assert isinstance(caught.value.cause, ConfigError)


def read_variable(context: RunContext) -> str | None:
    return os.environ.get("BIGTRAIN_TEST")


def test_ranks_see_the_environment_of_the_test(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_ranks(read_variable, 2) == [None, None]
    monkeypatch.setenv("BIGTRAIN_TEST", "yes")
    assert run_ranks(read_variable, 2) == ["yes", "yes"]


def test_a_second_group_is_refused() -> None:
    with (
        connect(SINGLE_RANK, device="cpu", force_group=True),
        pytest.raises(LaunchError, match="a process group exists already. Leave the first"),
        connect(SINGLE_RANK, device="cpu", force_group=True),
    ):
        pass


def limits_of_groups(context: RunContext) -> list[float]:
    """The timeouts in seconds of groups that a library and the run itself make."""
    options: Any = lambda group: group._get_backend(torch.device("cpu")).options  # noqa: E731
    before = dist.new_group([0, 1])
    with context.timeout_for_new_groups():
        theirs = dist.new_group([0, 1])
        ours = context.for_background().group()
    groups = (context.group(), before, theirs, ours)
    return [options(group)._timeout.total_seconds() for group in groups]


def test_a_group_that_a_library_makes_has_the_timeout_of_the_run() -> None:
    for run, before, theirs, ours in run_ranks(limits_of_groups, 2, timeout=30.0):
        assert run == theirs == 30.0 + BACKEND_GRACE_S
        assert before == 1800.0  # torch's own, of a group that the user has made
        assert ours == 6 * 3600.0


def test_objects_go_from_host_to_host(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[torch.device] = []

    def note(_box: list[Any], src: int, device: torch.device, group: Any) -> None:
        used.append(device)

    monkeypatch.setattr(dist, "broadcast_object_list", note)
    with connect(SINGLE_RANK, device="cpu", force_group=True) as context:
        replace(context, device=torch.device("cuda", 0)).broadcast_object("word")
        on_a_gpu: Any = SimpleNamespace(
            pp_size=2,
            pp_group=None,
            device=torch.device("cuda", 0),
            all_gather_numbers=lambda *_: [0.0, 1.0],
            ranks_of=lambda _: [0, 1],
        )
        share_outputs((), on_a_gpu)
    assert used == [torch.device("cpu")] * 2
