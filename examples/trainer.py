"""A trainer: DataLoader, cosine schedule, clipping, bf16, accuracy, TensorBoard, two epochs a run.

python examples/trainer.py FOLDER single bf16
torchrun --nproc-per-node 2 examples/trainer.py FOLDER zero2 bf16    # continues from there
"""

import functools
import sys

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import bigtrain

ROWS, BATCH, EPOCHS, A_RUN = 144, 32, 4, 2


def net() -> nn.Module:
    """Four equal blocks; the strategy decides where it is called."""
    blocks = [nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4)]
    return nn.Sequential(nn.Linear(16, 64), *blocks, nn.Linear(64, 10))


def rows(seed: int) -> TensorDataset:
    """Random numbers, and the index of the largest of the first ten."""
    inputs = torch.randn(ROWS, 16, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(inputs, inputs[:, :10].argmax(dim=1))


def accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    """The share of rows with the right answer."""
    return (outputs.argmax(dim=-1) == targets).float().mean()


def main(folder: str, strategy: str, precision: str) -> None:
    """Train for two more epochs."""
    train, held_out = rows(0), rows(1)
    steps = EPOCHS * -(-ROWS // BATCH)
    with bigtrain.prepare(
        net,
        cross_entropy,
        functools.partial(torch.optim.AdamW, lr=1e-2),
        strategy=strategy,
        example=train[: BATCH // 2],  # pipelines need it, to cut the model
        learning_rate=lambda optimizer: CosineAnnealingLR(optimizer, T_max=steps),
        metrics={"accuracy": accuracy},
        train__global_batch_size=BATCH,
        train__precision=precision,
        optim__clip_norm=1.0,
    ) as engine:
        place = {"num_replicas": engine.context.dp_size, "rank": engine.context.dp_rank}
        sampler = DistributedSampler(train, **place)
        loader = DataLoader(train, BATCH // engine.context.dp_size, sampler=sampler)
        ordered = DistributedSampler(held_out, **place, shuffle=False)
        first = engine.load(folder)["epoch"] if engine.newest(folder) else 0
        writer = None
        if engine.context.is_main:
            from torch.utils.tensorboard import SummaryWriter

            writer = SummaryWriter(folder)
        for epoch in range(first, first + A_RUN):
            sampler.set_epoch(epoch)
            for batch in loader:
                result = engine.step(batch)
                if writer:
                    writer.add_scalar("loss", result.loss, result.step)
                    print(f"step {result.step}  loss {result.loss:.9f}  lr {result.lr:.9f}")
            figures = engine.evaluate(DataLoader(held_out, 24, sampler=ordered))
            if writer:
                writer.add_scalar("accuracy", figures["accuracy"], epoch)
                print(f"epoch {epoch}  {figures['loss']:.9f}  {figures['accuracy']:.4f}")
            engine.save(folder, extra={"epoch": epoch + 1})
        if writer:
            writer.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
