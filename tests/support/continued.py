"""A run that is cut in two by a checkpoint, each half under a strategy of its own."""

from __future__ import annotations

from pathlib import Path

from support.nets import TinyLM, tokens

from bigtrain.engine.engine import Engine
from bigtrain.job.load import job_from_keys
from bigtrain.losses.loss import CrossEntropy


def continued(context, strategy, folder, optimizer, load, precision="fp32", model=TinyLM):
    """Three steps, or a checkpoint of them; then three more: (path, their losses)."""
    keys = {"optim.clip_norm": 0.5, "train.precision": precision}
    job = job_from_keys(strategy, {"train.global_batch_size": 8, **keys})
    samples = tokens(48)

    def step(engine):
        sharing = engine.plan.batch.dp_size
        size = 8 // sharing
        start = 8 * engine.steps_done + context.rank % sharing * size  # a server's count nothing
        part = slice(start, start + size)
        return engine.step((samples.inputs[part], samples.targets[part])).loss

    with Engine(model, CrossEntropy(), optimizer, job, context) as engine:
        if load is not None:
            engine.load(Path(load))
        else:
            for _ in range(3):
                step(engine)
        path = engine.save(folder)
        return str(path), [step(engine) for _ in range(3)]
