"""An elastic Horovod script: restarted ranks continue from the last commit.

Arguments: a folder, and the step after which rank 1 kills itself in the first run (0: never).
"""

import json
import os
import signal
import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import bigtrain.hvd as hvd  # was: import horovod.torch as hvd

EPOCHS, BATCH, LR, EVERY = 2, 3, 0.1, 2  # EVERY: steps between commits


def samples() -> TensorDataset:
    drawn = torch.Generator().manual_seed(0)
    inputs = torch.randn(24, 6, generator=drawn, dtype=torch.float64)
    return TensorDataset(inputs, inputs[:, :3].argmax(1))


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def main(folder: str, killed_after: str) -> None:
    torch.set_default_dtype(torch.float64)
    hvd.init()
    life = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    torch.manual_seed(10 * life + hvd.rank())
    dataset = samples()
    sampler = hvd.elastic.ElasticSampler(dataset, seed=3)
    loader = DataLoader(dataset, batch_size=BATCH, sampler=sampler)
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    resets = []

    @hvd.elastic.run
    def train(state: hvd.elastic.TorchState) -> None:
        for state.epoch in range(state.epoch, EPOCHS):  # noqa: B020
            for data, target in loader:
                state.optimizer.zero_grad()
                loss = functional.cross_entropy(state.model(data), target)
                loss.backward()
                state.optimizer.step()
                state.sampler.record_batch(state.batch, BATCH)
                state.batch += 1
                state.losses.append(loss.item())
                if state.batch % EVERY == 0:
                    state.commit()
                if life == 0 and state.batch == int(killed_after) and hvd.rank() == 1:
                    os.kill(os.getpid(), signal.SIGKILL)
            state.sampler.set_epoch(state.epoch + 1)
        state.commit()

    state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0, batch=0, losses=[])
    state.register_reset_callbacks([lambda: resets.append(state.batch)])
    train(state)
    if hvd.rank() == 0:
        figures = {"losses": state.losses, "resets": resets, "life": life}
        figures["weights"] = [p.tolist() for p in model.parameters()]
        (Path(folder) / "figures.json").write_text(json.dumps(figures))


if __name__ == "__main__":
    main(*sys.argv[1:])
