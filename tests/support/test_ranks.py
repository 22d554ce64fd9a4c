"""A rank's process answers several calls, but none after a call that has changed its state."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

import pytest
import torch
from support.nets import TinyLM, tokens
from support.parity import train
from support.ranks import RankFailure, end_waiting_ranks, run_ranks

SEEN: list[int] = []


@pytest.fixture(autouse=True)
def no_waiting_ranks():
    """A process of an earlier test ends after its last allowed call, though nothing has changed."""
    end_waiting_ranks()


def process(context, change=None):
    """Change the global state named by `change`; return the id of this process."""
    if change == "a global of bigtrain":
        import bigtrain.errors

        bigtrain.errors.ConfigError = RuntimeError
    elif change == "a table of bigtrain":
        from bigtrain.job.arguments import READERS

        READERS["mine"] = next(iter(READERS.values()))
    elif change == "an entry of a table":
        from bigtrain.job.arguments import READERS

        READERS["plan"] = READERS["compare"]
    elif change == "a method":
        torch.nn.Module.train = torch.nn.Module.eval
    elif change == "a list of the tests":
        SEEN.append(context.rank)
    elif change == "a switch":
        torch.set_default_dtype(torch.float64)
    elif change == "a thread":
        threading.Thread(target=threading.Event().wait, daemon=True).start()
    elif change == "a module of a folder":
        Path("written.py").write_text("")
        sys.path.insert(0, os.getcwd())
        __import__("written")
    elif change == "an error":
        raise ValueError("no")
    return os.getpid()


def surroundings(context):
    """Print the rank; return process id, folder, a variable and a random number."""
    os.write(1, f"said by rank {context.rank}\n".encode())  # in one piece, whatever others write
    draw = torch.rand(()).item()
    return os.getpid(), os.getcwd(), os.environ.get("BESIDE"), draw, context.seed, sys.path[0]


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_ranks_that_have_changed_nothing_answer_the_next_call():
    first = run_ranks(process, 2)
    assert run_ranks(process, 2) == first
    assert run_ranks(process, 1) == first[:1]
    assert run_ranks(process, 2) == first
    assert not set(run_ranks(process, 2, fresh=True)) & set(first)
    assert run_ranks(process, 3)[:2] == first


@pytest.mark.parametrize(
    "change",
    [
        "a global of bigtrain",
        "a table of bigtrain",
        "an entry of a table",
        "a method",
        "a list of the tests",
        "a switch",
        "a thread",
        "a module of a folder",
    ],
)
def test_a_process_in_which_something_is_changed_answers_no_other_call(change):
    first = run_ranks(process, 1)
    assert run_ranks(process, 1, change) == first
    assert run_ranks(process, 1) != first


def train_and_name_process(context, strategy):
    train(context, TinyLM, tokens(22), strategy, {}, 2)
    return os.getpid()


@pytest.mark.parametrize(
    ("strategy", "mesh"),
    [
        ("ddp", {}),
        ("zero1_torch", {}),
        ("fsdp+full", {}),
        ("tensor", {"tp": 2}),
        ("1f1b", {"pp": 2}),
        ("local_sgd", {}),
    ],
)
def test_a_training_changes_nothing_for_the_next_call(strategy, mesh):
    """Otherwise every test of ranks would start new processes, which doubles its time."""
    first = run_ranks(train_and_name_process, 2, strategy, **mesh)
    assert run_ranks(train_and_name_process, 2, strategy, **mesh) == first


def process_on_rank_0(context, change):
    return process(context, change if context.rank == 0 else None)


def test_a_process_stays_the_same_rank():
    """torch caches a rank's shards by the mesh alone, so another rank would get wrong ones."""
    first = run_ranks(process, 2)
    run_ranks(process_on_rank_0, 2, "a switch")
    again = run_ranks(process, 2)
    assert again[0] not in first
    assert again[1] == first[1]


def test_a_call_that_fails_ends_its_ranks():
    first = run_ranks(process, 2)
    with pytest.raises(RankFailure, match="ValueError: no"):
        run_ranks(process, 2, "an error")
    assert not set(run_ranks(process, 2)) & set(first)


def test_a_call_has_the_surroundings_of_its_caller(tmp_path, monkeypatch, capfd):
    first = run_ranks(surroundings, 2, seed=1)
    assert sorted(capfd.readouterr().out.splitlines()) == ["said by rank 0", "said by rank 1"]
    (tmp_path / "below").mkdir()
    monkeypatch.chdir(tmp_path / "below")
    monkeypatch.syspath_prepend(str(tmp_path))
    second = run_ranks(surroundings, 2, seed=2)
    assert sorted(capfd.readouterr().out.splitlines()) == ["said by rank 0", "said by rank 1"]
    assert [row[0] for row in first] == [row[0] for row in second]
    assert {row[1:3] for row in first} == {(str(tmp_path), None)}
    assert {row[1:3] for row in second} == {(str(tmp_path / "below"), None)}
    assert {row[4] for row in first} == {1}
    assert {(row[4], row[5]) for row in second} == {(2, str(tmp_path))}
    assert first[0][3] == first[1][3] != second[0][3] == second[1][3]


def test_other_variables_are_other_processes(monkeypatch):
    first = run_ranks(surroundings, 1)[0]
    monkeypatch.setenv("BESIDE", "there")
    second = run_ranks(surroundings, 1)[0]
    assert (first[2], second[2]) == (None, "there")
    assert first[0] != second[0]
