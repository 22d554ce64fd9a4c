"""Horovod's collectives, each compared with the plain computation on the tensors of all ranks."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.ranks import RankFailure, run_ranks

import bigtrain.hvd as hvd
from bigtrain.errors import ConfigError
from bigtrain.ranks.context import RunContext

RANKS = 3
TYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32),
    *(torch.int16, torch.int8, torch.uint8, torch.bool, torch.complex64),
]
MOVES = [torch.float8_e4m3fn]


def rank_tensor(
    rank: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float64
) -> torch.Tensor:
    """Small integers that depend on the rank, so that every type adds them up exactly."""
    drawn = torch.Generator().manual_seed(rank)
    whole = torch.randint(-3 if dtype.is_signed else 0, 4, shape, generator=drawn)
    return whole.to(dtype) * (1 + 2j) if dtype.is_complex else whole.to(dtype)


def refusal_of(call: Callable[[], Any]) -> str:
    """The message of a refusal."""
    try:
        call()
    except (ConfigError, AttributeError) as error:
        return str(error)
    return "not refused"


def run_reductions(context: RunContext) -> dict[str, Any]:
    """The results of all reductions on this rank, by dtype and name."""
    hvd.init_with(context)
    me, out = hvd.rank(), {}
    ops = {"average": hvd.Average, "sum": hvd.Sum, "min": hvd.Min, "max": hvd.Max}
    ops["product"] = hvd.Product
    for dtype in TYPES:
        mine = rank_tensor(me, (2, 3), dtype)
        for name, op in ops.items():
            original = mine.clone()
            try:
                out[dtype, name] = hvd.allreduce(mine, op=op, name=f"{dtype} {name}")
            except ConfigError as error:
                out[dtype, name] = str(error)
            assert torch.equal(mine, original)
    mine = rank_tensor(me, (4, 2))
    out["scaled"] = hvd.allreduce(mine, prescale_factor=2.0, postscale_factor=0.25, op=hvd.Sum)
    out["fp16"] = hvd.allreduce(mine / 3, compression=hvd.Compression.fp16)
    turned = mine.clone().t()  # not contiguous
    assert hvd.allreduce_(turned, op=hvd.Sum) is turned
    out["in place"] = turned
    out["no dims"] = hvd.allreduce(torch.tensor(float(me)), name="no dims")
    out["empty"] = hvd.allreduce(torch.zeros(0, 3)).shape
    out["shares"] = hvd.reducescatter(mine, op=hvd.Sum)
    many = [mine, mine.float(), mine[0] + 1]
    out["grouped"] = hvd.grouped_allreduce(many, op=hvd.Sum)
    copies = [tensor.clone() for tensor in many]
    out["grouped in place"] = hvd.grouped_allreduce_(copies) and copies
    out["grouped shares"] = hvd.grouped_reducescatter(many[:2], op=hvd.Average)
    rows = torch.sparse_coo_tensor([[me, 4, 4]], rank_tensor(me, (3, 2)), (5, 2))
    out["sparse"] = hvd.sparse_allreduce_async(rows, name="rows", op=hvd.Average)().to_dense()
    none = torch.sparse_coo_tensor(torch.empty(1, 0).long(), torch.empty(0, 2), (5, 2))
    some = rows.float() if me == 1 else none
    out["sparse of one"] = hvd.synchronize(
        hvd.sparse_allreduce_async(some, name="few", op=hvd.Sum)
    ).to_dense()
    return out


def test_reductions_are_those_of_all_tensors():
    results = run_ranks(run_reductions, RANKS)
    mine = torch.stack([rank_tensor(n, (4, 2)) for n in range(RANKS)])
    plain = {"min": torch.amin, "max": torch.amax, "product": torch.prod, "sum": torch.sum}
    for me, out in enumerate(results):
        for dtype in TYPES:
            stack = torch.stack([rank_tensor(n, (2, 3), dtype) for n in range(RANKS)])
            for name in ("average", *plain):
                got, whole = out[dtype, name], not (dtype.is_floating_point or dtype.is_complex)
                if name == "average" and whole:
                    assert "would be truncated. Give op=hvd.Sum" in got
                elif (dtype.is_complex and name in ("min", "max", "product")) or (
                    dtype is torch.bool and name == "sum"
                ):
                    assert f"op={name} of {dtype} is not defined. Convert the tensor" in got
                else:
                    expected = stack.sum(0) / RANKS if name == "average" else plain[name](stack, 0)
                    assert got.dtype == dtype
                    assert torch.allclose(got, expected.to(dtype)), (dtype, name)
        assert torch.equal(out["scaled"], mine.sum(0) / 2)
        assert torch.allclose(out["fp16"], mine.mean(0) / 3, atol=1e-3)
        assert not torch.equal(out["fp16"], mine.mean(0) / 3)
        assert out["fp16"].dtype == torch.float64
        assert torch.equal(out["in place"], mine.sum(0).t())
        assert (out["no dims"], out["empty"]) == (1.0, (0, 3))
        share = torch.tensor_split(mine.sum(0), RANKS)[me]
        assert len(share) == (2 if me == 0 else 1)
        assert torch.equal(out["shares"], share)
        tops = [mine.sum(0), mine.sum(0).float(), mine[:, 0].sum(0) + RANKS]
        for got, expected in zip(out["grouped"], tops, strict=True):
            assert torch.equal(got, expected)
            assert got.dtype == expected.dtype
        for got, expected in zip(out["grouped in place"], tops, strict=True):
            assert torch.allclose(got, expected / RANKS)
        for got, dtype in zip(out["grouped shares"], (torch.float64, torch.float32), strict=True):
            assert torch.allclose(got, (share / RANKS).to(dtype))
        dense = torch.zeros(RANKS, 5, 2, dtype=torch.float64)
        for n in range(RANKS):
            values = rank_tensor(n, (3, 2))
            dense[n, n] += values[0]
            dense[n, 4] += values[1] + values[2]
        assert torch.allclose(out["sparse"], dense.mean(0))
        assert torch.equal(out["sparse of one"], dense[1].float())


def run_gathers(context: RunContext) -> dict[str, Any]:
    """The results of gathers, broadcasts and all-to-alls on this rank."""
    hvd.init_with(context)
    me, out = hvd.rank(), {}
    for dtype in TYPES + MOVES:
        gathered = hvd.allgather(rank_tensor(me, (me, 2), dtype))
        sent = hvd.broadcast(rank_tensor(me, (2,), dtype), root_rank=1)
        assert gathered.dtype == sent.dtype == dtype
        plain = torch.complex64 if dtype.is_complex else torch.float32
        out["gathered", dtype], out["from 1", dtype] = gathered.to(plain), sent.to(plain)
    even = rank_tensor(me, (RANKS, 2))
    out["swapped"] = hvd.alltoall(even)
    splits = torch.tensor([me, 0, 1])
    out["some swapped"] = hvd.alltoall(rank_tensor(me, (me + 1, 2)), splits, name="some")
    out["listed"] = hvd.alltoall(rank_tensor(me, (me + 1,), torch.int16), splits.tolist())
    turned = rank_tensor(me, (2, 3)).t()
    original = turned.clone()
    out["copy"] = hvd.broadcast(turned, 2)
    assert torch.equal(turned, original)
    assert hvd.broadcast_(turned, 2, name="turned") is turned
    out["in place"] = turned
    out["no dims"] = hvd.broadcast(torch.tensor(me), 2).item()
    out["objects"] = hvd.allgather_object({"rank": me, "more": "x" * me})
    out["none"] = hvd.broadcast_object([me, {"a": None}], root_rank=2)
    many = [rank_tensor(me, (2, 2)), rank_tensor(me, (me + 1,))]
    out["grouped"] = hvd.grouped_allgather(many)
    # Started together, and waited for in a different order.
    asked = {
        "sum": hvd.allreduce_async(rank_tensor(me, (2,)), op=hvd.Sum, name="sum"),
        "rows": hvd.allgather_async(rank_tensor(me, (1,)), name="rows"),
        "two": hvd.broadcast_async(rank_tensor(me, (2,)), 2, name="two"),
        "both": hvd.grouped_allreduce_async([rank_tensor(me, (2,))] * 2, op=hvd.Sum),
        "share": hvd.reducescatter_async(rank_tensor(me, (3,)), op=hvd.Sum),
    }
    single_row = rank_tensor(me, (2,))
    written = hvd.allreduce_async_(single_row, op=hvd.Sum)
    for name in reversed(asked):
        out["async", name] = hvd.synchronize(asked[name])
        assert hvd.poll(asked[name])
    hvd.synchronize(written)
    out["async", "written"] = single_row
    if me == 0:
        late = hvd.allreduce_async(torch.ones(1), name="late")
        out["early"] = hvd.poll(late)  # the other ranks start half a second later
        until = time.monotonic() + 10
        while not hvd.poll(late) and time.monotonic() < until:
            time.sleep(0.01)
        out["polled"] = float(hvd.synchronize(late))
    else:
        time.sleep(0.5)
        hvd.allreduce(torch.ones(1), name="late")
    began = time.monotonic()
    if me == 2:
        time.sleep(0.4)
    hvd.barrier()
    out["waited"] = time.monotonic() - began
    return out


def test_what_is_moved_arrives():
    results = run_ranks(run_gathers, RANKS)
    for me, out in enumerate(results):
        for dtype in TYPES + MOVES:
            plain = out["from 1", dtype].dtype
            stack = torch.cat([rank_tensor(n, (n, 2), dtype).to(plain) for n in range(RANKS)])
            assert torch.equal(out["gathered", dtype], stack)
            assert torch.equal(out["from 1", dtype], rank_tensor(1, (2,), dtype).to(plain))
        even = torch.stack([rank_tensor(n, (RANKS, 2))[me] for n in range(RANKS)])
        assert torch.equal(out["swapped"], even)
        sent = [[n, 0, 1] for n in range(RANKS)]
        counts = [row[me] for row in sent]
        rows, received = out["some swapped"]
        parts = [rank_tensor(n, (n + 1, 2)).split(sent[n])[me] for n in range(RANKS)]
        assert torch.equal(rows, torch.cat(parts))
        assert received.tolist() == counts
        assert received.dtype == torch.int64
        parts = [rank_tensor(n, (n + 1,), torch.int16).split(sent[n])[me] for n in range(RANKS)]
        assert torch.equal(out["listed"][0], torch.cat(parts))
        assert out["listed"][1].tolist() == counts
        assert torch.equal(out["copy"], rank_tensor(2, (2, 3)).t())
        assert torch.equal(out["in place"], rank_tensor(2, (2, 3)).t())
        assert out["no dims"] == 2
        assert out["objects"] == [{"rank": n, "more": "x" * n} for n in range(RANKS)]
        assert out["none"] == [2, {"a": None}]
        assert torch.equal(out["grouped"][0], torch.cat([rank_tensor(n, (2, 2)) for n in range(3)]))
        assert torch.equal(
            out["grouped"][1], torch.cat([rank_tensor(n, (n + 1,)) for n in range(3)])
        )
        summed = sum(rank_tensor(n, (2,)) for n in range(RANKS))
        assert torch.equal(out["async", "sum"], summed)
        assert torch.equal(out["async", "written"], summed)
        assert torch.equal(out["async", "both"][1], summed)
        assert torch.equal(out["async", "two"], rank_tensor(2, (2,)))
        assert torch.equal(
            out["async", "rows"], torch.cat([rank_tensor(n, (1,)) for n in range(3)])
        )
        whole = sum(rank_tensor(n, (3,)) for n in range(RANKS))
        assert torch.equal(out["async", "share"], whole[me : me + 1])
        assert out["waited"] > 0.2 or me == 2
    assert (results[0]["early"], results[0]["polled"]) == (False, 1.0)


def leaf(rank: int, shape: tuple[int, ...]) -> torch.Tensor:
    drawn = torch.Generator().manual_seed(10 + rank)
    return torch.randn(shape, generator=drawn, dtype=torch.float64).requires_grad_()


def rank_loss(rank: int, out: torch.Tensor) -> torch.Tensor:
    """A loss that differs between ranks."""
    return (out * leaf(20 + rank, tuple(out.shape)).detach()).sum()


def collective_gradients(context: RunContext) -> dict[str, torch.Tensor]:
    """The gradients of this rank's tensor through each collective."""
    hvd.init_with(context)
    me = hvd.rank()
    calls: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "average": hvd.allreduce,
        "sum": lambda x: hvd.allreduce(x, op=hvd.Sum, prescale_factor=0.5),
        "grouped": lambda x: hvd.grouped_allreduce([x, x * 2])[1],
        "broadcast": lambda x: hvd.broadcast(x, root_rank=1),
        "alltoall": lambda x: hvd.alltoall(x),
        "share": lambda x: hvd.reducescatter(x, op=hvd.Average),
        "share of sum": lambda x: hvd.reducescatter(x, op=hvd.Sum, postscale_factor=2.0),
    }
    gradients = {}
    for name, call in calls.items():
        my_leaf = leaf(me, (RANKS, 2))
        rank_loss(me, call(my_leaf)).backward()
        assert my_leaf.grad is not None
        gradients[name] = my_leaf.grad
    my_leaf = leaf(me, (me + 1, 2))
    rank_loss(me, hvd.allgather(my_leaf)).backward()
    assert my_leaf.grad is not None
    gradients["allgather"] = my_leaf.grad
    gradients["refused"] = refusal_of(
        lambda: hvd.allreduce(leaf(me, (2,)), op=hvd.Max).sum().backward()
    )
    return gradients


def test_gradients_are_those_of_horovod():
    results = run_ranks(collective_gradients, RANKS)
    ones = [leaf(20 + n, (RANKS, 2)).detach() for n in range(RANKS)]
    rows = [leaf(20 + n, (1, 2)).detach() for n in range(RANKS)]
    mean = torch.stack(ones).mean(0)
    gathered = torch.stack([leaf(20 + n, (6, 2)).detach() for n in range(RANKS)]).mean(0)
    for me, out in enumerate(results):
        expected = {
            "average": mean,
            "sum": torch.stack(ones).sum(0) / 2,
            "grouped": 2 * mean,
            "broadcast": mean if me == 1 else torch.zeros_like(mean),
            "alltoall": torch.stack([ones[n][me] for n in range(RANKS)]),
            "share": torch.cat(rows),
            "share of sum": torch.cat(rows) * RANKS * 2,
            "allgather": gathered[me * (me + 1) // 2 :][: me + 1],
        }
        for name, gradient in expected.items():
            assert torch.allclose(out[name], gradient, rtol=0, atol=1e-12), name
        assert "op=max has no gradient. Give tensor.detach(), or op=hvd.Average" in out["refused"]


def join_unevenly(context: RunContext) -> dict[str, Any]:
    """Rank 1 is the first to run out of data, rank 0 the last."""
    hvd.init_with(context)
    me = hvd.rank()
    out: dict[str, Any] = {"sums": []}
    for _ in range({0: 4, 1: 1, 2: 2}[me]):
        out["sums"].append(float(hvd.allreduce(torch.tensor(float(10**me)), op=hvd.Sum)))
        if len(out["sums"]) == 3:
            out["average"] = float(hvd.allreduce(torch.tensor(3.0)))
            out["half"] = hvd.allreduce(torch.full((2, 2), 3.0).half(), op=hvd.Sum).tolist()
            hvd.barrier()
            calls = {
                "gather": lambda: hvd.allgather(torch.ones(1)),
                "broadcast": lambda: hvd.broadcast(torch.ones(1), 0),
                "min": lambda: hvd.allreduce(torch.ones(1), op=hvd.Min),
            }
            out |= {name: refusal_of(call) for name, call in calls.items()}
    if me == 0:
        time.sleep(0.3)
    out["last"] = hvd.join()
    out["after"] = float(hvd.allreduce(torch.tensor(float(me))))
    out["again"] = hvd.join() in range(RANKS)
    return out


def test_ranks_without_data_take_part_with_zeros():
    results = run_ranks(join_unevenly, RANKS)
    assert [out["sums"] for out in results] == [[111.0, 101.0, 1.0, 1.0], [111.0], [111.0, 101.0]]
    assert results[0]["average"] == 1.0
    assert results[0]["half"] == [[3.0, 3.0]] * 2
    for name in ("gather", "broadcast", "min"):
        assert "has joined, and takes part only in sums and averages" in results[0][name]
    assert "sparse_as_dense=True" in results[0]["gather"]
    assert "allreduce with op=min" in results[0]["min"]
    assert [(out["last"], out["after"], out["again"]) for out in results] == [(0, 1.0, True)] * 3


def run_process_sets(context: RunContext) -> dict[str, Any]:
    """The results of collectives in process sets."""
    hvd.init_with(context)
    me, out = hvd.rank(), {}
    outer = hvd.add_process_set(hvd.ProcessSet([2, 0]))
    alone = hvd.add_process_set([1])
    out["who"] = (outer.ranks, outer.size(), outer.process_set_id, outer.included())
    out["all"] = hvd.get_process_set_ids_and_ranks()
    out["everyone"] = (hvd.global_process_set.size(), hvd.global_process_set.included())
    if outer.included():
        out["rank"] = outer.rank()
        mine = rank_tensor(me, (2, 2)).requires_grad_()
        total = hvd.allreduce(mine, process_set=outer)
        rank_loss(me, total).backward()
        out["average"], out["gradient"] = total.detach(), mine.grad
        out["rows"] = hvd.allgather(rank_tensor(me, (1,)), process_set=outer)
        out["from 2"] = hvd.broadcast(torch.tensor(me), 2, process_set=outer).item()
        out["share"] = hvd.reducescatter(rank_tensor(me, (2,)), op=hvd.Sum, process_set=outer)
        out["swapped"] = hvd.alltoall(rank_tensor(me, (2,)), process_set=outer)
        out["object"] = hvd.broadcast_object(me, 2, process_set=outer)
        hvd.barrier(process_set=outer)
        out["root"] = refusal_of(lambda: hvd.broadcast(torch.ones(1), 1, process_set=outer))
    else:
        out["outside"] = refusal_of(lambda: hvd.allreduce(torch.ones(1), process_set=outer))
        out["alone"] = hvd.allreduce(torch.ones(2), op=hvd.Sum, process_set=alone).tolist()
    out["twice"] = refusal_of(lambda: hvd.add_process_set([0, 2]))
    out["all again"] = refusal_of(lambda: hvd.add_process_set(range(RANKS)))
    out["too many"] = refusal_of(lambda: hvd.add_process_set([0, 7]))
    out["removed"] = (hvd.remove_process_set(outer), hvd.remove_process_set(outer))
    out["kept"] = hvd.remove_process_set(hvd.global_process_set)
    out["gone"] = refusal_of(lambda: hvd.allreduce(torch.ones(1), process_set=outer))
    out["number"] = refusal_of(lambda: hvd.allreduce(torch.ones(1), process_set=1))
    out["sum"] = float(hvd.allreduce(torch.tensor(1.0), op=hvd.Sum))
    return out


def test_process_sets_exchange_among_themselves():
    results = run_ranks(run_process_sets, RANKS)
    for me, out in enumerate(results):
        assert out["who"] == ([0, 2], 2, 1, me != 1)
        assert out["all"] == {0: [0, 1, 2], 1: [0, 2], 2: [1]}
        assert out["everyone"] == (3, True)
        assert "has the ranks [0, 2] already. Use that one" in out["twice"]
        assert "process set 0 has the ranks [0, 1, 2] already" in out["all again"]
        assert "ranks [0, 7], and there are 0 to 2. Name some" in out["too many"]
        assert (out["removed"], out["kept"], out["sum"]) == ((True, False), False, 3.0)
        assert "is not connected. Call hvd.add_process_set(process_set)" in out["gone"]
        assert "process_set=1 is no process set. Give what hvd.add_process_set" in out["number"]
    assert "rank 1 is not in process set 1 of ranks [0, 2]. Ask" in results[1]["outside"]
    assert results[1]["alone"] == [1.0, 1.0]
    weights = [leaf(20 + n, (2, 2)).detach() for n in (0, 2)]
    for set_rank, me in enumerate((0, 2)):
        out = results[me]
        assert (out["rank"], out["from 2"], out["object"]) == (set_rank, 2, 2)
        assert torch.equal(out["average"], (rank_tensor(0, (2, 2)) + rank_tensor(2, (2, 2))) / 2)
        assert torch.allclose(out["gradient"], sum(weights) / 2)
        assert torch.equal(out["rows"], torch.cat([rank_tensor(0, (1,)), rank_tensor(2, (1,))]))
        assert torch.equal(
            out["share"], (rank_tensor(0, (2,)) + rank_tensor(2, (2,)))[set_rank][None]
        )
        swapped = [rank_tensor(n, (2,))[set_rank] for n in (0, 2)]
        assert torch.equal(out["swapped"], torch.stack(swapped))
        assert "root_rank=1 is not among the ranks [0, 2]" in out["root"]


def mismatched_calls(context: RunContext) -> dict[str, str]:
    """The messages of calls that differ between the two ranks."""
    hvd.init_with(context)
    me = hvd.rank()
    calls: dict[str, Callable[[], Any]] = {
        "shape": lambda: hvd.allreduce(torch.ones(2 + me), name="x"),
        "type": lambda: hvd.allreduce(torch.ones(2).to(TYPES[me]), op=hvd.Sum),
        "name": lambda: hvd.allreduce(torch.ones(2), name=f"loss {me}"),
        "op": lambda: hvd.allreduce(torch.ones(2), op=[hvd.Sum, hvd.Average][me]),
        "factor": lambda: hvd.allreduce(torch.ones(2), prescale_factor=1.0 + me),
        "kind": lambda: [hvd.barrier, lambda: hvd.allreduce(torch.ones(2))][me](),
        "root": lambda: hvd.broadcast(torch.ones(2), me),
        "inner": lambda: hvd.allgather(torch.ones(2, 2 + me)),
    }
    messages = {name: refusal_of(call) for name, call in calls.items()}
    with pytest.raises(RuntimeError, match="asks for"):  # the exception that Horovod scripts catch
        hvd.allgather(torch.ones(2, 2 + me))
    # Ranks that were refused together continue together.
    messages["after"] = str(float(hvd.allreduce(torch.tensor(1.0), op=hvd.Sum)))
    return messages


def test_ranks_that_ask_for_different_things_are_refused_by_name():
    results = run_ranks(mismatched_calls, 2)
    assert results[0] == results[1]
    messages = results[0]
    assert (
        "rank 0 asks for allreduce 'x', of float32 [2], op=average, and rank 1 for allreduce 'x', "
        "of float32 [3], op=average. Call the same exchanges in the same order" in messages["shape"]
    )
    assert "float64 [2]" in messages["type"]
    assert "'loss 0'" in messages["name"]
    assert "op=sum, and rank 1 for allreduce, of float32 [2], op=average" in messages["op"]
    assert "factors 2 and 1" in messages["factor"]
    assert "rank 0 asks for barrier, and rank 1 for allreduce" in messages["kind"]
    assert "root_rank=0, and rank 1" in messages["root"]
    assert "of float32 [2], and rank 1 for allgather, of float32 [3]" in messages["inner"]
    assert messages["after"] == "2.0"


def write_timeline(context: RunContext, path: str) -> str:
    """Write a timeline; return the message of a second start."""
    hvd.init_with(context)
    hvd.start_timeline(path)
    message = refusal_of(lambda: hvd.start_timeline(path))
    hvd.allreduce(torch.ones(2), name="loss")
    hvd.broadcast(torch.ones(2), 0, name="weights")
    hvd.stop_timeline()
    hvd.stop_timeline()
    return message


def test_a_timeline_is_written(tmp_path):
    path = tmp_path / "new" / "timeline.json"
    assert (
        "timeline.json is being written. Call hvd.stop"
        in run_ranks(write_timeline, 2, str(path))[0]
    )
    events = json.loads(path.read_text())["traceEvents"]
    kinds = [(event["name"], event["tid"]) for event in events]
    assert ("ALLREDUCE", "loss") in kinds
    assert ("NEGOTIATE_BROADCAST", "weights") in kinds
    assert all(event["dur"] >= 0 for event in events)


def raise_on_rank_1(context: RunContext) -> None:
    """Rank 1 raises while rank 0 waits in an exchange."""
    hvd.init_with(context)
    if hvd.rank() == 1:
        raise OSError("the disk of rank 1")
    hvd.allreduce(torch.ones(3), name="gradient")


def test_a_rank_that_fails_ends_those_that_wait():
    with pytest.raises(RankFailure, match="the disk of rank 1") as failure:
        run_ranks(raise_on_rank_1, 2)
    assert failure.value.rank == 1


def end_rank_0_early(context: RunContext) -> None:
    """Rank 0 ends while rank 1 waits in an exchange."""
    hvd.init_with(context)
    for _ in range(1 + hvd.rank()):
        hvd.allreduce(torch.ones(3), name="loss")


def test_a_rank_that_ends_before_the_others_is_told_of_with_what_helps():
    message = (
        r"hvd: allreduce 'loss', of float32 \[3\], op=average: another rank has ended .* hvd.join"
    )
    with pytest.raises(RankFailure, match=message) as failure:
        run_ranks(end_rank_0_early, 2, fresh=True)
    assert failure.value.rank == 1


@pytest.fixture
def alone(monkeypatch):
    hvd.shutdown()
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    hvd.init()
    yield
    hvd.shutdown()


def test_one_process_has_all_of_it(alone):
    rows = torch.arange(4.0).reshape(2, 2).requires_grad_()
    for call in (
        hvd.allreduce,
        hvd.allgather,
        hvd.alltoall,
        hvd.reducescatter,
        lambda x: hvd.broadcast(x, 0),
        lambda x: hvd.grouped_allreduce([x])[0],
    ):
        out = call(rows)
        assert torch.equal(out, rows)
        (gradient,) = torch.autograd.grad((out * 3).sum(), rows)
        assert torch.equal(gradient, torch.full((2, 2), 3.0))
    assert hvd.allgather_object("x") == ["x"]
    assert hvd.join() == 0
    hvd.barrier()
    assert hvd.poll(hvd.allreduce_async(rows))
    sparse = torch.eye(2).to_sparse()
    assert torch.equal(hvd.sparse_allreduce_async(sparse, "x")().to_dense(), torch.eye(2))
    assert (hvd.cross_rank(), hvd.cross_size(), hvd.is_homogeneous()) == (0, 1, True)
    assert hvd.gloo_built() is hvd.gloo_enabled() is True
    asked = (hvd.mpi_built(), hvd.mpi_enabled(), hvd.mpi_threads_supported(), hvd.ddl_built())
    assert (*asked, hvd.ccl_built()) == (False,) * 5
    assert hvd.nccl_built() == 0 or hvd.nccl_built() > 20000
    assert hvd.cuda_built() == (torch.version.cuda is not None)
    assert hvd.rocm_built() == (torch.version.hip is not None)


def test_what_cannot_be_is_refused_with_a_fix(alone, tmp_path):
    ones = torch.ones(1)
    refused: dict[str, Callable[[], Any]] = {
        "average=True and op='sum' are given, and both select the reduction": (
            lambda: hvd.allreduce(ones, average=True, op=hvd.Sum)
        ),
        "op='mean' is not known. Use op=hvd.Average": lambda: hvd.allreduce(ones, op="mean"),
        "float is no tensor. Give torch.tensor(1.0)": lambda: hvd.allreduce(1.0),
        "is sparse. Use hvd.sparse_allreduce_async": lambda: hvd.allreduce(ones.to_sparse()),
        "a tensor of layout torch.strided": lambda: hvd.sparse_allreduce_async(ones, "x"),
        "compression=torch.float16 has no compress and decompress. Use": (
            lambda: hvd.allreduce(ones, compression=torch.float16)
        ),
        "without dims has no rows. Give tensor.reshape(1)": lambda: hvd.allgather(torch.tensor(1)),
        "without dims has no rows to divide": lambda: hvd.reducescatter(torch.tensor(1.0)),
        "splits=[2], and 1 numbers whose sum is the 1 rows": lambda: hvd.alltoall(ones, [2]),
        "str is no tensor. Give torch.tensor(...), or use hvd.broadcast_object": (
            lambda: hvd.broadcast("x", 0)
        ),
        "int is no handle. Give what": lambda: hvd.synchronize(3),
        "is not a list of ranks, and communicators of MPI": lambda: hvd.ProcessSet(object()),
        "a rank occurs twice": lambda: hvd.ProcessSet([0, 0]),
        "hvd.mpi_ops is one module with Horovod": lambda: hvd.mpi_ops,
        "hvd.run starts processes. Start the script with torchrun": lambda: hvd.run,
        "has no 'alreduce', did you mean 'allreduce'?": lambda: hvd.alreduce,
    }
    for message, call in refused.items():
        assert message in refusal_of(call)
    hvd.shutdown()
    assert "comm=[3], and all 1 ranks take part" in refusal_of(lambda: hvd.init(comm=[3]))
    assert "process_sets='all'" in refusal_of(lambda: hvd.init(process_sets="all"))
    hvd.init(comm=[0], process_sets="dynamic")


def test_nodes_are_told_apart_by_their_names():
    places = hvd.session._node_places([("a", 0), ("a", 1), ("b", 0), ("a", 2), ("b", 1)])
    assert [(context.node, context.local_rank) for context in places] == [
        (0, 0),
        (0, 1),
        (1, 0),
        (0, 2),
        (1, 1),
    ]
    # Two agents of torchrun on one host are two nodes.
    places = hvd.session._node_places([("a", 0), ("a", 1), ("a", 0), ("a", 1)])
    assert [context.node for context in places] == [0, 0, 1, 1]
