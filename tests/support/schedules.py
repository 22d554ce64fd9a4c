"""torch's learning rate schedulers by name, and an optimizer with two groups to run them on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import lr_scheduler

STEPS = 6

SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "lambda": lambda o: lr_scheduler.LambdaLR(o, [lambda s: 0.9**s, lambda s: 1 / (1 + s)]),
    "multiplicative": lambda o: lr_scheduler.MultiplicativeLR(o, lambda _: 0.8),
    "step": lambda o: lr_scheduler.StepLR(o, 2),
    "milestones": lambda o: lr_scheduler.MultiStepLR(o, [2, 4]),
    "linear": lambda o: lr_scheduler.LinearLR(o, 0.1, total_iters=4),
    "exponential": lambda o: lr_scheduler.ExponentialLR(o, 0.7),
    "polynomial": lambda o: lr_scheduler.PolynomialLR(o, 8, power=2.0),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=STEPS),
    "restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=2),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, max_lr=[0.2, 0.3], total_steps=STEPS + 1),
    "in turn": lambda o: lr_scheduler.SequentialLR(
        o,
        [lr_scheduler.LinearLR(o, 0.1, total_iters=3), lr_scheduler.ExponentialLR(o, 0.9)],
        milestones=[3],
    ),
    "chained": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.5, total_iters=3), lr_scheduler.ExponentialLR(o, 0.9)], o
    ),
}


def in_two_groups(parameters: Any) -> torch.optim.Optimizer:
    """SGD; biases and norms are a group with a different rate and without decay."""
    listed = list(parameters)
    return torch.optim.SGD(
        [
            {"params": [p for p in listed if p.dim() > 1], "weight_decay": 1e-2},
            {"params": [p for p in listed if p.dim() <= 1], "lr": 0.05},
        ],
        lr=0.1,
        momentum=0.9,
    )
