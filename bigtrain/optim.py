"""Optimizers from a job's keys, and the learning rate as a function of the step alone."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import nn

from bigtrain.config import OptimConfig
from bigtrain.update import MakeOptimizer


def optimizer_factory(config: OptimConfig) -> MakeOptimizer:
    """Return what makes the job's optimizer from the parameters a rank updates."""
    kernels = {
        "auto": {"fused": True},
        "fused": {"fused": True},
        "foreach": {"foreach": True},
        "loop": {"foreach": False},
    }[config.implementation]

    def make(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        if config.name == "sgd":
            return torch.optim.SGD(
                parameters,
                lr=config.lr,
                momentum=config.momentum,
                weight_decay=config.weight_decay,
                **kernels,
            )
        return torch.optim.AdamW(
            parameters,
            lr=config.lr,
            betas=config.betas,
            weight_decay=config.weight_decay,
            **kernels,
        )

    return make


def learning_rate(
    config: OptimConfig, step: int, total_steps: int, global_batch_size: int
) -> float:
    """The rate of optimizer step `step`, counted from 0.

    Linear warm-up, then constant, half a cosine, or a line down to `final_lr_share` of the
    highest rate. With `base_batch_size` the rate grows in proportion to the global batch
    (Goyal et al. 2017, arXiv 1706.02677, section 2.1).
    """
    highest = config.lr
    if config.base_batch_size is not None:
        highest *= global_batch_size / config.base_batch_size
    if step < config.warmup_steps:
        return highest * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return highest
    span = max(1, total_steps - config.warmup_steps)
    passed = min(1.0, (step - config.warmup_steps) / span)
    left = (1 + math.cos(math.pi * passed)) / 2 if config.schedule == "cosine" else 1 - passed
    return highest * (config.final_lr_share + (1 - config.final_lr_share) * left)
