"""Make optimizers from the `optim` section of a job, and compute the learning rate of a step."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from bigtrain.job.optim_keys import LOW_BIT, OptimConfig
from bigtrain.optim.lean_adamw import LeanAdamW
from bigtrain.optim.low_bit_adamw import LowBitAdamW, quantization_maps
from bigtrain.optim.whole import MakeOptimizer


def optimizer_factory(config: OptimConfig, seed: int = 0) -> MakeOptimizer:
    """Return the function that makes a job's optimizer of parameters.

    Args:
        config: the `optim` section of the job.
        seed: the seed of stochastic rounding.

    Raises:
        ConfigError: a package that the optimizer needs is not installed.
    """
    if config.name in LOW_BIT:
        quantization_maps(LOW_BIT[config.name])
    make = _lean_factory(config, seed) if config.lean else _torch_factory(config)
    if config.decay_norms_and_biases or not config.weight_decay:
        return make
    return lambda parameters: make(_without_decay(parameters))


def _without_decay(parameters: Iterable[nn.Parameter]) -> Iterable[Any]:
    """Return the parameters in two groups; parameters with at most one dim have no weight decay."""
    all_parameters = list(parameters)
    decayed = [parameter for parameter in all_parameters if parameter.dim() > 1]
    others = [parameter for parameter in all_parameters if parameter.dim() <= 1]
    groups: list[tuple[list[nn.Parameter], dict[str, float]]] = [
        (decayed, {}),
        (others, {"weight_decay": 0.0}),
    ]
    return [{"params": members, **keys} for members, keys in groups if members]


def _torch_factory(config: OptimConfig) -> MakeOptimizer:
    kernels = {
        "auto": {"fused": True},
        "fused": {"fused": True},
        "foreach": {"foreach": True},
        "loop": {"foreach": False},  # one parameter after the other
    }[config.implementation]

    def make(parameters: Iterable[Any]) -> torch.optim.Optimizer:
        if config.name == "adafactor":
            # One parameter at a time by default: foreach kernels need a copy of all parameters.
            foreach = config.implementation == "foreach"
            return torch.optim.Adafactor(
                parameters, lr=config.lr, weight_decay=config.weight_decay, foreach=foreach
            )
        if config.name == "sgd":
            return torch.optim.SGD(
                parameters,
                lr=config.lr,
                momentum=config.momentum,
                dampening=config.dampening,
                nesterov=config.nesterov,
                weight_decay=config.weight_decay,
                **kernels,
            )
        kind = torch.optim.Adam if config.name == "adam" else torch.optim.AdamW
        return kind(
            parameters,
            lr=config.lr,
            betas=config.betas,
            eps=config.eps,
            weight_decay=config.weight_decay,
            **kernels,
        )

    return make


def _lean_factory(config: OptimConfig, seed: int) -> MakeOptimizer:
    def make(parameters: Iterable[Any]) -> torch.optim.Optimizer:
        keys: dict[str, Any] = {
            "lr": config.lr,
            "betas": config.betas,
            "eps": config.eps,
            "weight_decay": config.weight_decay,
            "stochastic_rounding": config.stochastic_rounding is not False,
            "seed": seed,
        }
        if config.name in LOW_BIT:
            return LowBitAdamW(parameters, LOW_BIT[config.name], **keys)
        state = torch.bfloat16 if config.state == "bf16" else torch.float32
        return LeanAdamW(parameters, state=state, **keys)

    return make


def warmup_length(config: OptimConfig, steps_per_epoch: int) -> int:
    """Return the number of steps of the warm-up, which a job sets in steps or in epochs."""
    return config.warmup_steps or round(config.warmup_epochs * steps_per_epoch)


def learning_rate(
    config: OptimConfig,
    step: int,
    total_steps: int,
    global_batch_size: int,
    steps_per_epoch: int,
) -> float:
    """Return the learning rate of one optimizer step.

    A linear warm-up (from `warmup_factor` of the highest rate, if it is set) is followed by a
    constant rate, by drops at milestones, or by a decay to `final_lr_share` of the highest rate:
    half a cosine, a line or a power of a line. With `base_batch_size` the rate is proportional to
    the global batch (Goyal et al. 2017, arXiv 1706.02677, section 2.1).

    Args:
        config: the `optim` section of the job.
        step: the index of the step, from 0.
        total_steps: the number of steps of the run.
        global_batch_size: samples of a global batch.
        steps_per_epoch: the number of steps of an epoch.
    """
    highest = config.lr
    if config.base_batch_size is not None:
        highest *= global_batch_size / config.base_batch_size
    warmup = warmup_length(config, steps_per_epoch)
    if step < warmup and config.warmup_factor is not None:
        return highest * (config.warmup_factor + (1 - config.warmup_factor) * step / warmup)
    if step < warmup:
        return highest * (step + 1) / warmup
    if config.schedule == "constant":
        return highest
    if config.schedule == "step":
        passed = sum(step >= round(epoch * steps_per_epoch) for epoch in config.milestones)
        return highest * config.step_factor**passed
    progress = min(1.0, (step - warmup) / max(1, total_steps - warmup))
    if config.schedule == "cosine":
        remaining = (1 + math.cos(math.pi * progress)) / 2
    else:
        remaining = (1 - progress) ** (config.poly_power if config.schedule == "poly" else 1)
    return highest * (config.final_lr_share + (1 - config.final_lr_share) * remaining)
