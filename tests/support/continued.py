"""A run that is split in two by a checkpoint, with a different strategy in each part."""

from __future__ import annotations

from pathlib import Path

from support.nets import TinyLM, tokens

from bigtrain.data import MicroBatch
from bigtrain.engine.engine import Engine
from bigtrain.job.load import job_from_keys
from bigtrain.losses.loss import CrossEntropy


def continue_run(
    context, strategy, folder, optimizer, load, precision="fp32", model=TinyLM, cut=False
):
    """Run three steps and save, or resume and run three more; return the checkpoint and
    the losses.
    """
    keys = {"optim.clip_norm": 0.5, "train.precision": precision}
    job = job_from_keys(strategy, {"train.global_batch_size": 8, **keys})
    samples = tokens(48)

    def step(engine):
        sharing = engine.plan.batch.dp_size
        size = 8 // sharing
        # A parameter server's rows do not count.
        replica = context.dp_rank if cut else context.rank % sharing
        start = 8 * engine.steps_done + replica * size
        part = slice(start, start + size)
        return engine.step((samples.inputs[part], samples.targets[part])).loss

    example, loss = None, CrossEntropy()
    if cut:  # a pipeline needs an example batch to cut the model
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
