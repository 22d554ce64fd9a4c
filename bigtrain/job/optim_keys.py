"""The section `optim` of a job: the keys of the optimizer and of its learning rate."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from bigtrain.errors import unquoted_word
from bigtrain.job.sections import ConfigSection

Beta = Annotated[float, Field(ge=0, lt=1)]


class OptimConfig(ConfigSection):
    """The optimizer and its learning rate."""

    name: Literal["adamw", "adam", "sgd", "adafactor", "adamw_8bit", "adamw_4bit"] = "adamw"
    """adam adds weight decay to the gradient, adamw subtracts it from the weight; adafactor stores
    a row and a column of its second moment; the last two store each moment in 8 or 4 bits, in
    torchao's formats."""
    lr: float = Field(1e-3, ge=0)
    """The highest learning rate. If `base_batch_size` is given, it is the rate for a global batch
    of that size."""
    base_batch_size: int | None = Field(None, ge=1)
    """Linear scaling: the rate is multiplied by global_batch_size / base_batch_size."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled from the gradient, except with adam and sgd, as in torch."""
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    """Decay rates of the first and second moments, for all variants of adam and adamw."""
    eps: float = Field(1e-8, ge=0)
    """Added to the root of the second moment, for all variants of adam and adamw."""
    momentum: float = Field(0.0, ge=0, lt=1)
    """For sgd: the momentum factor."""
    dampening: float = Field(0.0, ge=0, le=1)
    """For sgd: the share of a new gradient that is not added to the momentum."""
    nesterov: bool = False
    """For sgd: Nesterov momentum."""
    decay_norms_and_biases: bool = True
    """False: no weight decay for parameters with one dim, those of norms and biases (He et al.
    2018, arXiv 1812.01187, section 3.1)."""
    warmup_steps: int = Field(0, ge=0)
    """Steps over which the learning rate rises linearly to `lr`."""
    warmup_epochs: float = Field(0.0, ge=0)
    """The warm-up in epochs, so that it does not depend on the batch size. Give this or
    `warmup_steps`."""
    warmup_factor: float | None = Field(None, ge=0, le=1)
    """The share of `lr` in the first step; the rate reaches `lr` in the step after the warm-up.
    By default the first step has `lr` divided by the number of warm-up steps, and the last step of
    the warm-up has `lr`."""
    schedule: Literal["constant", "cosine", "linear", "poly", "step", "deepspeed"] = "constant"
    """The rate after warm-up: constant; decayed to `final_lr_share` by the end of the last step
    (cosine, linear, or poly: a power of the remaining share); or multiplied by `step_factor` at
    each of `milestones` (step). With deepspeed, the scheduler in the file of `strategy.deepspeed`
    gives the rate of every step, warm-up included; bigtrain computes it."""
    final_lr_share: float = Field(0.0, ge=0, le=1)
    """For schedule=cosine, linear and poly: the final rate, as a share of `lr`."""
    poly_power: float = Field(0.9, gt=0)
    """For schedule=poly: the power."""
    milestones: tuple[float, ...] = ()
    """For schedule=step: epochs, ascending."""
    step_factor: float = Field(0.1, gt=0, le=1)
    """For schedule=step: the factor of the rate at each milestone."""
    clip_norm: float | None = Field(None, gt=0)
    """Gradients are scaled down to this global norm if they exceed it."""
    implementation: Literal["auto", "fused", "foreach", "loop"] = "auto"
    """torch's kernels of the optimizer's step; auto is fused, which needs no temporary copies."""
    state: Literal["fp32", "bf16"] = "fp32"
    """The dtype of adamw's moments; bf16 halves their memory."""
    master_weights: bool = True
    """False: with train.precision=bf16 the parameters themselves are bf16, without fp32 copies."""
    stochastic_rounding: bool | None = None
    """Round values stored in bf16 stochastically; by default true if there are any."""
    release_gradients: bool = False
    """Update each parameter in the backward pass, as soon as its gradient is computed."""

    @model_validator(mode="after")
    def _fits(self) -> OptimConfig:
        fault = optimizer_fault(self) or schedule_fault(self)
        if fault is not None:
            raise ValueError(fault)
        return self

    @property
    def lean(self) -> bool:
        """Whether bigtrain's own update, which works in pieces, is used instead of torch's."""
        own_kernel = self.state == "bf16" or not self.master_weights
        return self.name in LOW_BIT or (self.name == "adamw" and own_kernel)


LOW_BIT = {"adamw_8bit": 8, "adamw_4bit": 4}


_ADAMS = ("adamw", "adam", "adamw_8bit", "adamw_4bit")
_OWN_KEYS: dict[str, tuple[str, ...]] = {
    "betas": _ADAMS,
    "eps": _ADAMS,
    "momentum": ("sgd",),
    "dampening": ("sgd",),
    "nesterov": ("sgd",),
}
"""Keys that not every optimizer has, with the optimizers that have them."""


def keys_without_use(name: object) -> list[str]:
    """Return the keys of `optim` that an optimizer of this name does not have."""
    return [key for key, names in _OWN_KEYS.items() if name not in names]


def foreign_key_fault(optim: OptimConfig) -> str | None:
    """Return the complaint about a key that the optimizer does not have; None without a fault."""
    for key in keys_without_use(optim.name):
        value = getattr(optim, key)
        if value != type(optim).model_fields[key].default:
            names = ", ".join(_OWN_KEYS[key])
            return (
                f"{unquoted_word(key, value)} is for {names}, and name is {optim.name}. "
                f"Leave optim.{key} out, or set optim.name={_OWN_KEYS[key][0]}"
            )
    if optim.nesterov and (not optim.momentum or optim.dampening):
        return (
            f"nesterov=true needs momentum without dampening, and "
            f"momentum={optim.momentum:g} dampening={optim.dampening:g}. Use optim.momentum=0.9 "
            "optim.dampening=0, or optim.nesterov=false"
        )
    return None


def optimizer_fault(optim: OptimConfig) -> str | None:
    """Return the complaint about keys that contradict each other, and the fix; None if none do."""
    name, rounded = optim.name, optim.state == "bf16" or not optim.master_weights
    foreign = foreign_key_fault(optim)
    if foreign is not None:
        return foreign
    if optim.state == "bf16" and name != "adamw":
        return f"state=bf16 is for name=adamw, and name is {name}. Leave optim.state out"
    if not optim.master_weights and name in ("sgd", "adam", "adafactor"):
        return (
            f"master_weights=false is for adamw, adamw_8bit and adamw_4bit, and name is {name}, "
            "whose bf16 weights would lose every change below 1/256 of a weight. Use "
            "optim.name=adamw, or optim.master_weights=true"
        )
    if optim.stochastic_rounding and not rounded:
        return (
            "stochastic_rounding=true rounds values stored in bf16, and there are none. Set "
            "optim.state=bf16 or optim.master_weights=false, or leave it out"
        )
    if optim.implementation == "fused" and name == "adafactor":
        return "implementation=fused: torch has no fused adafactor. Use optim.implementation=auto"
    if optim.lean and optim.implementation != "auto":
        return (
            f"implementation={optim.implementation} chooses among torch's kernels, and name={name} "
            "with these keys uses bigtrain's. Use optim.implementation=auto"
        )
    if optim.release_gradients and optim.clip_norm is not None:
        return (
            f"release_gradients=true updates each parameter before the norm of all gradients is "
            f"known, and clip_norm={optim.clip_norm} needs it. Use optim.clip_norm=null, or "
            "optim.release_gradients=false"
        )
    return None


def schedule_fault(optim: OptimConfig) -> str | None:
    """Return the complaint about keys of the learning rate that contradict each other, or None."""
    if optim.warmup_steps and optim.warmup_epochs:
        return (
            f"warmup_steps={optim.warmup_steps} and warmup_epochs={optim.warmup_epochs} both say "
            "how long the warm-up is. Give one of them, as with optim.warmup_steps=0"
        )
    if optim.warmup_factor is not None and not (optim.warmup_steps or optim.warmup_epochs):
        return (
            f"warmup_factor={optim.warmup_factor:g} is for a warm-up, and there is none. "
            "Give optim.warmup_steps or optim.warmup_epochs, or leave optim.warmup_factor out"
        )
    milestones = list(optim.milestones)
    if (optim.schedule == "step") != bool(milestones):
        return (
            f"schedule={optim.schedule} with milestones={milestones}: schedule=step needs the "
            "epochs at which the rate falls, and no other schedule takes them. Use "
            "optim.schedule=step optim.milestones=[30,60,80], or optim.milestones=[]"
        )
    if milestones != sorted(set(milestones)) or (milestones and milestones[0] <= 0):
        return f"milestones={milestones} must ascend from above 0. Write them like [30,60,80]"
    return None
