"""The ring alone: its averages, their precision, and the exact number of bytes it sends."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.ranks import run_ranks

from bigtrain.assembly.make_plan import make_plan
from bigtrain.errors import ConfigError
from bigtrain.job.load import job_from_keys
from bigtrain.strategies.ring import RingReduce, chunk_lengths
from bigtrain.versions.torch_versions import COUNTS_EXCHANGES

LENGTHS = (1, 2, 3, 7, 1000, 100_003)
WAYS = ("send", "receive")


def rank_tensor(rank: int, length: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(length, generator=torch.Generator().manual_seed(rank)).to(dtype)


def average_lengths(context, dtype):
    """For each length: the average, and the bytes that were sent and received for it."""
    averages: list[tuple[Any, ...]] = []
    reduce = RingReduce(context, context.new_group("dp"), max(LENGTHS), dtype)
    for length in LENGTHS:
        flat = rank_tensor(context.rank, length, dtype)
        context.recorder.traffic.begin()
        reduce(flat)
        counted: Any = context.recorder.traffic.end()
        byte_counts = [
            None if counted is None else counted[direction, context.world_size]
            for direction in WAYS
        ]
        averages.append((flat, *byte_counts))
    return averages


@pytest.mark.parametrize(
    ("ranks", "dtype"),
    [(2, torch.float32), (3, torch.float32), (4, torch.float64), (4, torch.bfloat16)],
)
def test_all_ranks_have_the_same_average_and_send_no_byte_more(ranks, dtype):
    rank_results = run_ranks(average_lengths, ranks, dtype)
    for number, length in enumerate(LENGTHS):
        mean = torch.stack(
            [rank_tensor(rank, length, dtype).double() for rank in range(ranks)]
        ).mean(0)
        results, sent, received = zip(*(rank[number] for rank in rank_results), strict=True)
        assert all(torch.equal(result, results[0]) for result in results)
        if dtype == torch.bfloat16:  # rounded only once, at the end
            near = mean.float().to(dtype)
            assert (results[0] != near).double().mean() < 0.01
            assert torch.allclose(results[0].double(), mean, rtol=2**-8, atol=1e-6)
        else:
            assert torch.allclose(results[0].double(), mean, rtol=1e-6, atol=1e-6)
        if not COUNTS_EXCHANGES:
            assert {*sent, *received} == {None}
            continue
        # 2 (n-1)/n of the bytes on each rank, with integer chunk lengths; n times that in total.
        size = 2 + 4 if dtype == torch.bfloat16 else 2 * dtype.itemsize
        assert sum(sent) == sum(received) == (ranks - 1) * length * size
        most = size * (length - min(chunk_lengths(length, ranks)))
        assert all(nbytes <= most for nbytes in (*sent, *received))


def test_chunks_differ_by_one_at_most():
    assert chunk_lengths(7, 2) == [4, 3]
    assert chunk_lengths(7, 4) == [2, 2, 2, 1]
    assert chunk_lengths(2, 3) == [1, 1, 0]


@pytest.mark.parametrize(
    ("ranks", "strategy", "message"),
    [
        (1, "ring", r"2 replicas or more, and mesh.dp=1. Use --strategy single, or start more"),
        (4, "1f1b+ring", r"a pipeline \(mesh.pp=2\) interleaves several. Use strategy.replicate="),
    ],
)
def test_what_a_ring_cannot_be(ranks, strategy, message):
    keys = {"train.global_batch_size": 8, **({"mesh.pp": 2} if ranks > 1 else {})}
    with pytest.raises(ConfigError, match=message):
        make_plan(job_from_keys(strategy, keys), ranks, "cpu")


def test_on_a_gpu_nothing_else_is_exchanged_while_the_ring_sends():
    keys = {"train.global_batch_size": 8}
    slices = job_from_keys("ring+tensor", {**keys, "mesh.tp": 2})
    with pytest.raises(ConfigError, match=r"slices \(mesh.tp=2\) exchange .* or device=cpu"):
        make_plan(slices, 4, "cuda")
    make_plan(slices, 4, "cpu")
    statistics = job_from_keys("ring", {**keys, "train.sync_batchnorm": True})
    with pytest.raises(ConfigError, match="exchanges statistics while .* train.sync_batchnorm=f"):
        make_plan(statistics, 2, "cuda")


def test_asynchronous_servers_need_another_backend_than_nccl():
    job = job_from_keys("parameter_server_async", {"train.global_batch_size": 8})
    with pytest.raises(ConfigError, match="mode=asynchronous: .* Use .*mode=synchronous, or dev"):
        make_plan(job, 3, "cuda")
    make_plan(job, 3, "cpu")


def test_mpi_is_refused_in_a_line_where_torch_has_it_not():
    if torch.distributed.is_mpi_available():
        pytest.skip("this torch has MPI")
    from bigtrain.ranks.connect import pick_backend

    with pytest.raises(ConfigError, match="mesh.backend=mpi is not in this build of torch"):
        pick_backend("mpi", torch.device("cpu"))
