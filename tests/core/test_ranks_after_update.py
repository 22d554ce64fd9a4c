"""Functions of `Assembly.after_update` are called once a step, after the update, everywhere."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
from support.nets import BlockLM, tokens
from support.parity import UNSEEN, sgd, shuffled_steps
from support.ranks import run_ranks

from bigtrain.data import MicroBatch
from bigtrain.engine.engine import Engine
from bigtrain.job.load import job_from_keys
from bigtrain.losses.loss import CrossEntropy
from bigtrain.strategies.ddp import DDP
from bigtrain.strategy import Assembly

SEEN: list[tuple[bool, bool]] = []


class Watched(DDP):
    """Notes at the end of each step whether parameters have changed and gradients are cleared."""

    name: ClassVar[str] = "watched"
    summary: ClassVar[str] = "watched"

    def apply(self, assembly: Assembly) -> None:
        super().apply(assembly)
        parameters = list(assembly.trained().values())
        before = [p.detach().clone() for p in parameters]

        def note() -> None:
            moved = any(not torch.equal(p, old) for p, old in zip(parameters, before, strict=True))
            cleared = all(p.grad is None or not p.grad.any() for p in parameters)
            SEEN.append((moved, cleared))
            for parameter, old in zip(parameters, before, strict=True):
                old.copy_(parameter.detach())

        assembly.after_update.append(note)


def watched(context, cases):
    """What was noted under each of some jobs."""
    rows = []
    for strategy, keys in cases:
        SEEN.clear()
        own = {"strategy.replicate": "core.test_ranks_after_update:Watched", **keys}
        job = job_from_keys(strategy, {"train.global_batch_size": 8, **UNSEEN, **own})
        loss = CrossEntropy()
        samples = tokens(24, ignored=False)
        inputs, targets = samples.inputs[:1], samples.targets[:1]
        example = MicroBatch(inputs, targets, loss.count(targets), 1)
        with Engine(BlockLM, loss, sgd, job, context, example=example) as engine:
            for number, step in enumerate(shuffled_steps(engine, samples, loss, 3), start=1):
                engine.step(step)
                assert len(SEEN) == number
        rows.append(list(SEEN))
    return rows


REPLICAS = [
    ("ddp", {"train.micro_batch_size": 4}),
    ("ddp", {"train.micro_batch_size": 1}),
    ("ddp", {"optim.release_gradients": True, "optim.clip_norm": None}),
]
PIPELINE = [("1f1b", {"mesh.pp": 2, "train.micro_batch_size": 1})]


@pytest.mark.parametrize(("ranks", "cases"), [(2, REPLICAS), (4, PIPELINE)])
def test_it_is_called_once_a_step_on_every_rank(ranks, cases):
    for rows in run_ranks(watched, ranks, cases):
        assert rows == [[(True, True)] * 3] * len(cases)
