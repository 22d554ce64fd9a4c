"""Functions given to `Assembly.after_update` are called once a step, after the update, on
every rank.
"""

from __future__ import annotations

import pytest
from support.nets import BlockLM, tokens
from support.odd_strategies import NotesUpdates
from support.parity import UNSEEN, sgd, shuffled_steps
from support.ranks import run_ranks

from bigtrain.data import MicroBatch
from bigtrain.engine.engine import Engine
from bigtrain.job.load import job_from_keys
from bigtrain.losses.loss import CrossEntropy

SEEN = NotesUpdates.seen


def recorded_calls(context, cases):
    """The recorded calls under each job."""
    rows = []
    for strategy, keys in cases:
        SEEN.clear()
        all_keys = {"strategy.replicate": "support.odd_strategies:NotesUpdates", **keys}
        job = job_from_keys(strategy, {"train.global_batch_size": 8, **UNSEEN, **all_keys})
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
    ("ddp+full", {"optim.clip_norm": 0.5}),
]
PIPELINE = [("1f1b", {"mesh.pp": 2, "train.micro_batch_size": 1})]


@pytest.mark.parametrize(("ranks", "pp", "cases"), [(2, 1, REPLICAS), (4, 2, PIPELINE)])
def test_it_is_called_once_a_step_on_every_rank(ranks, pp, cases):
    for rows in run_ranks(recorded_calls, ranks, cases, pp=pp):
        assert rows == [[(True, True)] * 3] * len(cases)
