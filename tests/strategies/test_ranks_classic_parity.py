"""In fp32 each synchronous classic has the losses, and with SGD the weights, of one process.

torch's DataParallel needs several GPUs of one process, so it is not included.
"""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from support.nets import TinyLM, tokens
from support.parity import Record, adamw, sgd, train
from support.ranks import run_ranks

SERVERS = "strategy.replicate.servers"
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "sync_sgd": ("sync_sgd", {}),
    "ring": ("ring", {}),
    "ring, uneven chunks": ("ring", {"strategy.replicate.bucket_size": 56}),
    "one server": ("parameter_server", {SERVERS: 1}),
    "two servers": ("parameter_server", {SERVERS: 2}),
    "local_sgd, agreed on after each step": ("local_sgd_1", {}),
}
TWELVE = {"train.global_batch_size": 12}
"""A number of samples that 1, 2, 3 and 4 ranks, and the workers among them, can divide evenly."""
STEPS = 6
ROUNDING = 1e-6
"""Four units in the last place for losses between 2 and 4, eight for weights below 1."""


class Small(TinyLM):
    """Starts at a loss near log(13): for losses above 8 one rounding error would reach the
    tolerance.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.nn.init.normal_(self.embedding.weight, std=0.1)


def possible_cases(ranks: int) -> list[str]:
    """The cases that are possible with so many ranks: servers must leave a worker."""
    return [case for case, (_, keys) in CASES.items() if keys.get(SERVERS, 0) < ranks]


def train_cases(context, optimizer, cases) -> dict[str, Record]:
    """The records of all cases, in one set of ranks."""
    return {
        case: train(context, Small, tokens(22), strategy, {**TWELVE, **keys}, STEPS, optimizer)
        for case, (strategy, keys) in ((case, CASES[case]) for case in cases)
    }


@pytest.mark.parametrize("ranks", [3, 2, 4])
def test_losses_and_weights_of_sgd_are_those_of_one_process(ranks):
    single = run_ranks(train, 1, Small, tokens(22), "single", TWELVE, STEPS, sgd)[0]
    results = run_ranks(train_cases, ranks, sgd, possible_cases(ranks))
    for rank, case in product(results, possible_cases(ranks)):
        assert rank[case].losses == pytest.approx(single.losses, abs=ROUNDING), case
        assert rank[case].weights.keys() == single.weights.keys()
        for name, weight in rank[case].weights.items():
            assert torch.allclose(weight, single.weights[name], rtol=0, atol=ROUNDING), (case, name)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_losses_of_adamw_are_those_of_one_process(ranks):
    """Replicas that step AdamW independently are excluded: they compute something else."""
    single = run_ranks(train, 1, Small, tokens(22), "single", TWELVE, STEPS, adamw)[0]
    cases = [case for case in possible_cases(ranks) if not case.startswith("local_sgd")]
    for rank, case in product(run_ranks(train_cases, ranks, adamw, cases), cases):
        assert rank[case].losses == pytest.approx(single.losses, abs=ROUNDING), case


def test_a_wrong_rate_would_be_seen():
    """A learning rate 0.1% higher exceeds the tolerance of losses, and so would a lost row."""
    off = partial(torch.optim.SGD, lr=0.1001, momentum=0.9, weight_decay=1e-2)
    single, higher_rate = (
        run_ranks(train, 1, Small, tokens(22), "single", TWELVE, STEPS, optimizer)[0]
        for optimizer in (sgd, off)
    )
    assert higher_rate.losses != pytest.approx(single.losses, abs=10 * ROUNDING)
