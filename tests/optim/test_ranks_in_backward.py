"""The optimizer's step inside the backward pass on ranks: the same numbers, fewer gradients."""

from __future__ import annotations

import pytest
import torch
from support.ranks import run_ranks
from support.released import RELEASE, Deep, run_broken, train, train_alone


@pytest.mark.parametrize("strategy", ["fsdp", "fsdp_zero2"])
def test_shards_are_updated_as_their_gradients_come(strategy):
    plain = run_ranks(train, 2, strategy, {})[0]
    released = run_ranks(train, 2, strategy, RELEASE)[0]
    single = train_alone({})
    for number, result in enumerate(released[0]):
        assert result.loss == plain[0][number].loss
        assert result.grad_norm == pytest.approx(single[0][number].grad_norm, rel=1e-4)
    for name, value in plain[1].items():
        assert torch.equal(value, released[1][name]), name


def test_what_shards_hold_is_foretold():
    _, _, measured, predicted = run_ranks(train, 2, "fsdp", RELEASE, Deep, 2)[0]
    assert predicted.bytes == pytest.approx(measured.bytes, rel=0.05)


@pytest.mark.parametrize(("strategy", "ranks"), [("single", 1), ("fsdp", 2)])
def test_a_loss_that_is_no_number_stops_it_before_any_update(strategy, ranks):
    for message, finite in run_ranks(run_broken, ranks, "loss", strategy):
        assert "step 1: the loss of rank 0 is nan; the optimizer was not stepped" in message
        assert finite
