"""Tables of job words of two ranks, compared through a store."""

from __future__ import annotations

import functools
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
from torch import nn
from torch.distributed import HashStore

from bigtrain.errors import ConfigError, LaunchError
from bigtrain.ranks.agreement import Agreement, flattened, in_words


def compare(zero, rank_1_table):
    """Compare as rank 1, while rank 0 waits in a thread."""
    store = HashStore()
    store.set_timeout(timedelta(seconds=1))
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(Agreement(store, 0, 2).require, zero)
        Agreement(store, 1, 2).require(rank_1_table)
        waiting.result()


def test_equal_tables_pass_whatever_the_order_of_their_keys():
    compare({"a": "1", "b": "2"}, {"b": "2", "a": "1"})


def test_a_difference_names_the_key_and_both_values():
    with pytest.raises(ConfigError) as refused:
        compare({"optim.lr": "0.1", "x": "1"}, {"optim.lr": "0.2", "x": "1"})
    assert str(refused.value) == (
        "the ranks were started differently: optim.lr is 0.2 on rank 1 and 0.1 on rank 0. Start "
        "all ranks with the same words, files and packages."
    )


def test_many_differences_are_counted_and_long_values_cut():
    zero = {f"key{n}": "z" * 200 for n in range(9)}
    with pytest.raises(ConfigError) as refused:
        compare(zero, {"other": "o"})
    assert "other is o on rank 1 and not there on rank 0; " in str(refused.value)
    assert "; and 6 more. " in str(refused.value)
    assert len(str(refused.value)) < 600


def test_tables_are_compared_in_turns():
    store = HashStore()
    zero, rank_1 = Agreement(store, 0, 2), Agreement(store, 1, 2)
    with ThreadPoolExecutor() as pool:
        for table_name in ("first", "second"):
            waiting = pool.submit(zero.require, {"turn": table_name})
            rank_1.require({"turn": table_name})
            waiting.result(5)
    rank_1.close()
    rank_1.require({"turn": "nobody looks"})


def test_a_rank_that_does_not_come_is_told_of():
    store = HashStore()
    store.set_timeout(timedelta(seconds=0.1))
    for rank, waited_for in ((0, "the others"), (1, "rank 0")):
        with pytest.raises(
            LaunchError, match=f"rank {rank} waited in vain for the job of {waited_for}"
        ):
            Agreement(store, rank, 2).require({"turn": str(rank)})
        store.delete_key("agreement/1")


def test_words_are_the_same_in_every_process():
    class Own:
        pass

    assert in_words(Own()).endswith("Own")
    assert in_words(Own) == in_words(Own())
    assert in_words(functools.partial(nn.Linear, bias=False)).endswith("Linear with {bias: False}")
    assert in_words({"b": {2, 1}, "a": [1, None, torch.float32]}) == (
        "{a: [1, null, torch.float32], b: {1, 2}}"
    )
    assert flattened({"a": {"b": {"c": 1}}, "d": {}}) == {"a.b.c": "1", "d": "{}"}
