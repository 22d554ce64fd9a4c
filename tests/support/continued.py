"""A run that is cut in two by a checkpoint, each half under a strategy of its own."""

from __future__ import annotations

from pathlib import Path

from support.nets import TinyLM, tokens

from bigtrain.data import MicroBatch
from bigtrain.engine.engine import Engine
from bigtrain.job.load import job_from_keys
from bigtrain.losses.loss import CrossEntropy


def continued(
    context, strategy, folder, optimizer, load, precision="fp32", model=TinyLM, cut=False
):
    """Three steps, or a checkpoint of them; then three more: (path, their losses)."""
    keys = {"optim.clip_norm": 0.5, "train.precision": precision}
    job = job_from_keys(strategy, {"train.global_batch_size": 8, **keys})
    samples = tokens(48)

    def step(engine):
        sharing = engine.plan.batch.dp_size
        size = 8 // sharing
        replica = context.dp_rank if cut else context.rank % sharing  # a server's rows do not count
        start = 8 * engine.steps_done + replica * size
        part = slice(start, start + size)
        return engine.step((samples.inputs[part], samples.targets[part])).loss

    example, loss = None, CrossEntropy()
    if cut:  # a model is cut by an example
        rows = samples.inputs[:1]
        example = MicroBatch(rows, samples.targets[:1], loss.count(samples.targets[:1]), 1)
    with Engine(model, loss, optimizer, job, context, example=example) as engine:
        if load is not None:
            engine.load(Path(load))
        else:
            for _ in range(3):
                step(engine)
        path = engine.save(folder)
        return str(path), [step(engine) for _ in range(3)]
