"""A run that is split in two by a checkpoint, with the optimizer's state in different places."""

from __future__ import annotations

from typing import Any

from support.nets import TinyLM, tokens
from support.parity import adamw

import bigtrain.optim.partitioned
from bigtrain.engine.engine import Engine
from bigtrain.job.load import job_from_keys
from bigtrain.losses.loss import CrossEntropy

DISK = {"strategy.offload.optimizer": "disk"}


def begin_and_continue(context, folder, first, second, keys) -> list[float]:
    """Train and save three steps by `first`, continue by `second`; return the last three losses.

    Args:
        context: of this rank.
        folder: of the checkpoint.
        first: the strategy of the first part and its keys.
        second: the strategy of the second part and its keys.
        keys: of both parts.
    """
    bigtrain.optim.partitioned.chunk_elements = lambda *_: 64
    samples = tokens(8)
    mine = slice(context.rank, None, context.world_size)
    batch = samples.inputs[mine].clone(), samples.targets[mine].clone()

    def engine(strategy: str, extra: dict[str, Any]) -> Engine:
        job = job_from_keys(strategy, {"train.global_batch_size": 8, **keys, **extra})
        return Engine(TinyLM, CrossEntropy(), adamw, job, context)

    with engine(*first) as saver:
        for _ in range(3):
            saver.step(batch)
        path = context.broadcast_object(saver.save(folder))
    with engine(*second) as loader:
        loader.load(path)
        return [loader.step(batch).loss for _ in range(3)]
