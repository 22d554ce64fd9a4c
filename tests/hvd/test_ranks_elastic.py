"""Elastic state: what a commit contains, what is restored, and which ranks have it afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.ranks import run_ranks
from torch import nn

import bigtrain.hvd as hvd
from bigtrain.errors import CheckpointError, ConfigError
from bigtrain.hvd.elastic import sampler as sampler_module
from bigtrain.hvd.elastic.commits import CommitFile
from bigtrain.ranks.context import RunContext


@pytest.fixture
def single_session(monkeypatch) -> Iterator[None]:
    """A session of one process, which ends after the test."""
    hvd.shutdown()
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "BIGTRAIN_ELASTIC"):
        monkeypatch.delenv(name, raising=False)
    hvd.init()
    yield
    hvd.shutdown()


def make_training(seed: int) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    """A model, its optimizer and its scheduler, with values that depend on the seed."""
    torch.manual_seed(seed)
    model = nn.Linear(3, 2).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 + seed, momentum=0.9)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any) -> None:
    optimizer.zero_grad()
    model(torch.ones(4, 3, dtype=torch.float64)).sum().backward()
    optimizer.step()
    scheduler.step()


def training_state(model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any) -> list[Any]:
    """The numbers of which a resumed training consists."""
    state = optimizer.state_dict()
    moments = [slot_values["momentum_buffer"].tolist() for slot_values in state["state"].values()]
    options = [group["lr"] for group in state["param_groups"]]
    return [[p.tolist() for p in model.parameters()], moments, options, scheduler.last_epoch]


def run_with_interrupts(context: RunContext) -> dict[str, Any]:
    """A function that is called again after each of two interrupts."""
    hvd.init_with(context)
    me = hvd.rank()
    parts = make_training(me)
    sampler = hvd.elastic.ElasticSampler(range(10), seed=1)
    events: dict[str, Any] = {"calls": [], "resets": []}
    state = hvd.elastic.TorchState(
        *parts[:2], scheduler=parts[2], sampler=sampler, batch=me, seen=[]
    )
    state.register_reset_callbacks([lambda: events["resets"].append(state.batch)])

    @hvd.elastic.run
    def train(state: Any, word: str) -> str:
        events["calls"].append(
            (state.batch, list(state.seen), training_state(*parts)[2:], len(sampler))
        )
        if len(events["calls"]) == 1:
            step(*parts)
            sampler.record_batch(0, 2)
            state.batch, state.seen = 5, [*state.seen, "kept"]
            state.commit()
            events["committed"] = training_state(*parts)
            step(*parts)
            sampler.record_batch(1, 2)
            state.batch = 6
            state.seen.append("lost")
            raise hvd.HorovodInternalError("an exchange of the script's own failed")
        events.setdefault("restored", training_state(*parts))
        if len(events["calls"]) == 2:
            state.batch = 7
            raise hvd.HostsUpdatedInterrupt(skip_sync=True)
        return word

    events["returned"] = train(state, word="done")
    return events


def test_a_function_goes_on_from_its_commit_after_an_interrupt():
    first, second = run_ranks(run_with_interrupts, 2)
    assert first == second  # both have rank 0's state after the first call
    # The batch is rank 0's; steps after the commit are discarded; later all steps are kept.
    assert [call[0] for call in first["calls"]] == [0, 5, 7]
    assert [call[1] for call in first["calls"]] == [[], ["kept"], ["kept"]]
    assert [call[3] for call in first["calls"]] == [5, 3, 3]
    assert first["restored"] == first["committed"]
    assert first["resets"] == [5, 7]
    assert first["returned"] == "done"


def two_nodes(context: RunContext, folder: str) -> list[Any]:
    """Each rank has a separate file, as if on two nodes; that of rank 1 is newer."""
    hvd.init_with(context)
    me = hvd.rank()
    parts = make_training(me)
    state = hvd.elastic.TorchState(*parts[:2], scheduler=parts[2], batch=0)
    state.keep_in(CommitFile(Path(folder) / str(me), writes=True))
    none = state.resume()
    for batch in range(1 + me):
        step(*parts)
        state.batch = 10 * me + batch
        state.commit()
    committed = training_state(*parts)
    later = make_training(7)
    again = hvd.elastic.TorchState(*later[:2], scheduler=later[2], batch=0)
    again.keep_in(CommitFile(Path(folder) / str(me), writes=True))
    resumed = again.resume()
    return [none, resumed, again.batch, committed, training_state(*later)]


def test_the_newest_commit_of_any_node_is_that_of_all(tmp_path):
    first, second = run_ranks(two_nodes, 2, str(tmp_path))
    for state_of_rank in (first, second):
        assert state_of_rank[:3] == [False, True, 11]
        assert state_of_rank[4] == second[3]
    assert first[3] != second[3]


def test_samples_of_an_epoch_come_once_on_changing_ranks(single_session, monkeypatch):
    def on(rank: int, size: int, state: dict[str, Any] | None) -> hvd.elastic.ElasticSampler:
        monkeypatch.setattr(sampler_module, "rank", lambda: rank)
        monkeypatch.setattr(sampler_module, "size", lambda: size)
        made = hvd.elastic.ElasticSampler(range(24), seed=5)
        if state is not None:
            made.load_state_dict(state)
        return made

    seen: list[int] = []
    states = []
    for rank in range(3):
        sampler = on(rank, 3, None)
        assert len(sampler) == len(list(sampler)) == 8
        seen += list(sampler)[:4]  # two batches of two
        for batch in range(2):
            sampler.record_batch(batch, 2)
        states.append(sampler.state_dict())
    assert states == [{"epoch": 0, "processed_num": 12}] * 3
    for rank in range(2):
        sampler = on(rank, 2, states[0])
        assert len(sampler) == 6
        seen += list(sampler)
    assert sorted(seen) == list(range(24))
    # The last batch is filled up from the front, even if few samples are left.
    many = [list(on(rank, 5, {"epoch": 0, "processed_num": 23})) for rank in range(5)]
    assert len({tuple(one) for one in many}) == 1
    assert len(many[0]) == 1
    assert list(on(0, 2, {"epoch": 0, "processed_num": 24})) == []
    sampler = on(0, 1, states[0])
    sampler.set_epoch(1)
    assert sorted(sampler) == list(range(24))
    assert list(sampler) != list(on(0, 1, None))
    monkeypatch.setattr(sampler_module, "size", lambda: 1)
    assert list(hvd.elastic.ElasticSampler(range(4), shuffle=False)) == [0, 1, 2, 3]


class Odd:
    """An object that cannot be unpickled without running its code."""


def test_what_a_file_cannot_hold_is_refused(single_session, tmp_path, monkeypatch):
    monkeypatch.setenv("BIGTRAIN_ELASTIC", str(tmp_path))
    state = hvd.elastic.ObjectState(odd=Odd(), batch=1)

    @hvd.elastic.run
    def train(state: Any) -> None:
        state.commit()

    with pytest.raises(ConfigError, match=r"state.odd of type Odd cannot be stored in a file"):
        train(state)
    assert not list(tmp_path.iterdir())
    state.odd = {"a": [1, 2.5, None, "x", (True, torch.ones(2))]}
    train(state)
    later = hvd.elastic.ObjectState(odd=None, batch=0)
    train(later)
    assert later.batch == 1
    (path,) = tmp_path.iterdir()
    assert path.name.startswith("commit-2-"), "the previous commit must have been removed"
    assert later.odd["a"][4][1].tolist() == [1, 1]


def test_a_damaged_commit_is_refused_by_name(single_session, tmp_path, monkeypatch):
    monkeypatch.setenv("BIGTRAIN_ELASTIC", str(tmp_path))

    @hvd.elastic.run
    def train(state: Any) -> None:
        state.commit()

    train(hvd.elastic.TorchState(nn.Linear(2, 2), batch=1))
    (path,) = tmp_path.iterdir()
    good = path.read_bytes()
    with pytest.raises(CheckpointError, match=r"has 'model', which the state does not have. Give"):
        train(hvd.elastic.TorchState(batch=1))
    flipped = bytearray(good)
    flipped[len(good) // 2] ^= 1
    for damaged in (b"", good[:100], b"x" * 200, good[:-100], bytes(flipped)):
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError, match=r"commit-1-\w+.pt cannot be resumed from: it is"):
            train(hvd.elastic.TorchState(nn.Linear(2, 2), batch=1))
    path.unlink()
    path.mkdir()
    with pytest.raises(CheckpointError, match=r"it is a folder, and .* Remove it to begin anew"):
        train(hvd.elastic.TorchState(nn.Linear(2, 2), batch=1))


def test_a_commit_that_cannot_be_written_is_a_warning(single_session, tmp_path, monkeypatch):
    monkeypatch.setenv("BIGTRAIN_ELASTIC", str(tmp_path / "folder"))
    state = hvd.elastic.ObjectState(batch=1)

    @hvd.elastic.run
    def train(state: Any) -> int:
        (tmp_path / "folder").write_text("in the way")
        state.batch = 2
        state.commit()
        state.batch = 3
        state.restore()
        return state.batch

    with pytest.warns(UserWarning, match="commit 1 was not written to .*continues from the one"):
        assert train(state) == 2


def test_commits_stay_in_memory_where_nothing_starts_ranks_again(
    single_session, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    for restarts in (None, "0", "many"):
        if restarts is not None:
            monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", restarts)
        model = nn.Linear(2, 2)
        state = hvd.elastic.TorchState(model, odd=Odd())
        before = model.weight.detach().clone()

        @hvd.elastic.run
        def train(state: Any) -> None:
            state.commit()
            with torch.no_grad():
                state.model.weight.zero_()
            state.restore()

        train(state)
        assert torch.equal(model.weight, before)
    assert not list(tmp_path.iterdir())


def test_an_attribute_may_be_replaced(single_session):
    state = hvd.elastic.TorchState(nn.Linear(2, 2))
    replacement = nn.Linear(3, 3)
    before = replacement.weight.detach().clone()
    state.model = replacement
    with torch.no_grad():
        replacement.weight.zero_()
    state.restore()
    assert torch.equal(state.model.weight, before)
