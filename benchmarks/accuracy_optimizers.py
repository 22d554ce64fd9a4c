"""Rows of `planner_accuracy` with each optimizer of torch, and a small net on which they matter.

The net has a few MiB of parameters of one size and almost no activations, so a copy of the
gradients, a temporary of an optimizer's step or a second set of buckets is visible in the peak.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor, nn

WIDTH = 224
MODEL = [
    "model.name=accuracy_optimizers:Blocks",
    *("data.name=synthetic", f"data.args.input_shape=[{WIDTH}]", "data.args.num_classes=10"),
]
_KINDS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=0.01),
    "momentum": partial(torch.optim.SGD, lr=0.01, momentum=0.9),
    "decayed_sgd": partial(torch.optim.SGD, lr=0.01, momentum=0.9, nesterov=True, weight_decay=0.1),
    "adamw": partial(torch.optim.AdamW, lr=1e-3),
    "amsgrad": partial(torch.optim.AdamW, lr=1e-3, amsgrad=True),
    "adam": partial(torch.optim.Adam, lr=1e-3),
    "rmsprop": partial(torch.optim.RMSprop, lr=1e-3),
    "centered_rmsprop": partial(torch.optim.RMSprop, lr=1e-3, momentum=0.9, centered=True),
    "adagrad": partial(torch.optim.Adagrad, lr=1e-3),
    "adadelta": partial(torch.optim.Adadelta, lr=1e-3),
    "adamax": partial(torch.optim.Adamax, lr=1e-3),
    "nadam": partial(torch.optim.NAdam, lr=1e-3),
    "radam": partial(torch.optim.RAdam, lr=1e-3),
    "asgd": partial(torch.optim.ASGD, lr=1e-3),
    "rprop": partial(torch.optim.Rprop, lr=1e-3),
    "adafactor": partial(torch.optim.Adafactor, lr=1e-3),
}
_FUSED = ("sgd", "momentum", "decayed_sgd", "adamw", "amsgrad", "adam", "adagrad")
"""Of which torch has fused kernels on a CPU."""
STRATEGIES = (
    *("ddp", "zero1_torch", "fsdp_zero2", "fsdp", "zero1", "zero2", "zero3", "1f1b", "tensor"),
)
_NOT_ON_DTENSORS = ("sgd.fused", "momentum.fused", "decayed_sgd.fused", "adagrad.fused")
"""Kernels that torch does not run on the shards of fully_shard."""
STEPS = 7
"""RAdam's first five need less than its later ones."""


def _variants() -> Iterator[tuple[str, Callable[..., torch.optim.Optimizer]]]:
    for name, make in _KINDS.items():
        yield name, make
        yield f"{name}.foreach", partial(make, foreach=True)
        if name in _FUSED:
            yield f"{name}.fused", partial(make, fused=True)


OPTIMIZERS = dict(_variants())


def combinations() -> Iterator[tuple[str, str, int]]:
    """Return (strategy, optimizer, micro-batches) of each row that torch or DeepSpeed can run."""
    for strategy in STRATEGIES:
        for name in OPTIMIZERS:
            is_sharded = strategy.startswith("fsdp")
            if is_sharded and (name in _NOT_ON_DTENSORS or name.startswith(("rprop", "adafactor"))):
                continue
            if strategy in ("zero1", "zero2", "zero3") and name.startswith("adafactor"):
                continue  # refused by name
            for micro_batches in (1, 2) if strategy != "1f1b" else (4,):
                yield strategy, name, micro_batches


class Blocks(nn.Module):
    """Residual blocks between an input of their width and a head."""

    def __init__(self, num_classes: int = 10, depth: int = 8) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Block() for _ in range(depth))
        self.head = nn.Linear(WIDTH, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """(rows, WIDTH) -> (rows, num_classes)."""
        for block in self.blocks:
            x = block(x)
        classes: Tensor = self.head(x)
        return classes


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(torch.tanh(self.up(x)))
        return y
