"""Check that a job's optimizer can work with the tensors that the strategy gives it."""

from __future__ import annotations

from bigtrain.core.strategy import Plan
from bigtrain.core.traits import OptimizerInput, OptimizerSees
from bigtrain.errors import ConfigError
from bigtrain.job.optim_keys import LOW_BIT, OptimConfig
from bigtrain.optim.whole import WholeOptimizer

_TENSOR_WORDS: dict[OptimizerInput, str] = {
    "parameters": "the parameters",
    "owned": "a share",
    "pieces": "pieces",
    "shards": "shards",
    "copies": "flat copies",
}
"""Words of an error for the tensors that the optimizer updates under a technique."""


def check_optimizer(optim: OptimConfig, plan: Plan) -> None:
    """Check that the techniques of a plan support the settings of the optimizer.

    Args:
        optim: the `optim` section of the job.
        plan: the plan. The checks of its techniques come later.

    Raises:
        ConfigError: a setting is not supported. The message contains the key, the reason and a
            choice that works.
    """
    optimizer_input = plan.replicate.optimizer_gets
    if plan.shares_engine or (plan.cut is not None and plan.cut.optimizer_gets == "copies"):
        optimizer_input = "copies"
    strategy_words = f"strategy {plan.strategy.name}"
    if optim.name == "sgd" and optim.implementation == "fused" and optimizer_input == "shards":
        raise ConfigError(
            "optim.implementation=fused: torch's fused SGD does not support DTensors, and "
            f"{strategy_words} shards parameters as DTensors. Use optim.implementation=auto."
        )
    if not optim.master_weights:
        _check_masters(plan, optimizer_input, strategy_words)
    if optim.release_gradients:
        _check_release(plan, strategy_words)
    if optim.name == "adafactor" or optim.name in LOW_BIT:
        _check_whole(optim, plan, optimizer_input, strategy_words)
    elif optim.state == "bf16" and _cuts_parameters(plan, optimizer_input):
        _check_copies(optim, plan, strategy_words)
    elif optim.state == "bf16" and optimizer_input in ("copies", "owned"):
        raise ConfigError(
            f"optim.state=bf16: the engine of {strategy_words} keeps the optimizer's state in "
            "fp32. Use --strategy fsdp or --strategy zero1_torch, or optim.state=fp32."
        )


def _cuts_parameters(plan: Plan, optimizer_input: OptimizerInput) -> bool:
    """Return whether flat slices are updated whose bounds depend on the number of ranks."""
    moved = optimizer_input == "parameters" and plan.offload_tiers.optimizer != "device"
    return optimizer_input == "pieces" or moved


def _check_copies(optim: OptimConfig, plan: Plan, strategy_words: str) -> None:
    """Raise ConfigError for stochastic rounding if copies of a parameter are divided differently.

    Ranks that hold copies of the same parameter would round different pieces of it.
    """
    if optim.stochastic_rounding is False or max(plan.pp, plan.tp) == 1:
        return
    holders = "the stages that share a tied parameter"
    fix = "use --strategy 1f1b_fsdp"
    if plan.tp > 1:
        holders = "the ranks of mesh.tp that hold the same whole parameter"
        fix = "use --strategy fsdp+tensor"
    raise ConfigError(
        f"optim.state=bf16 with stochastic rounding: in {strategy_words} {holders} may divide it "
        "into different pieces and round them differently, so its copies would drift apart. Set "
        f"optim.stochastic_rounding=false, or {fix}."
    )


def _check_masters(plan: Plan, optimizer_input: OptimizerInput, strategy_words: str) -> None:
    if plan.precision != "bf16":
        raise ConfigError(
            "optim.master_weights=false keeps parameters in bf16, and train.precision is "
            f"{plan.precision}. Set train.precision=bf16, or optim.master_weights=true."
        )
    if optimizer_input != "parameters":
        raise ConfigError(
            "optim.master_weights=false keeps parameters in bf16, and the optimizer of "
            f"{strategy_words} updates {_TENSOR_WORDS[optimizer_input]} of fp32 parameters. Use "
            "--strategy single or --strategy ddp, or optim.master_weights=true."
        )
    if plan.offload_tiers.optimizer != "device":
        raise ConfigError(
            "optim.master_weights=false keeps parameters in bf16 without an fp32 copy, and "
            f"strategy.offload.optimizer={plan.offload_tiers.optimizer} offloads an fp32 copy. Use "
            "strategy.offload=null, or optim.master_weights=true."
        )


def _check_release(plan: Plan, strategy_words: str) -> None:
    if "cut" in plan.techniques:
        raise ConfigError(
            f"optim.release_gradients=true: {strategy_words} divides the model into stages, whose "
            "gradients are complete only after the last micro-batch. Use --strategy fsdp, or "
            "optim.release_gradients=false."
        )
    if not plan.replicate.final_gradients and plan.world_size > 1:
        raise ConfigError(
            f"optim.release_gradients=true: {strategy_words} keeps all gradients in buckets until "
            "they are averaged over the ranks. Use --strategy fsdp, or "
            "optim.release_gradients=false."
        )
    if not plan.replicate.final_gradients:
        raise ConfigError(
            f"optim.release_gradients=true: {strategy_words} keeps all gradients until its own "
            "optimizer step. Use --strategy single, or optim.release_gradients=false."
        )
    steps = plan.batch.accumulation_steps
    if steps > 1:
        raise ConfigError(
            "optim.release_gradients=true updates parameters after each micro-batch, so a step "
            f"must have one micro-batch, and this job has {steps}. Use "
            "train.accumulation_steps=1 (train.micro_batch_size="
            f"{plan.batch.global_size // plan.batch.dp_size}), or optim.release_gradients=false."
        )
    if plan.offload_tiers.optimizer != "device" or plan.offload_tiers.parameters != "device":
        raise ConfigError(
            "optim.release_gradients=true updates parameters during the backward pass, and "
            "strategy.offload copies state to the device, a chunk at a time, only after it. Use "
            "strategy.offload=null, or optim.release_gradients=false."
        )


def _check_whole(
    optim: OptimConfig, plan: Plan, optimizer_input: OptimizerInput, strategy_words: str
) -> None:
    """Raise ConfigError if the optimizer's state is of whole parameters, but a rank has parts."""
    if plan.tp > 1:
        parts = "rows and columns" if optim.name == "adafactor" else "blocks"
        raise ConfigError(
            f"optim.name={optim.name} keeps state for {parts} of whole parameters, and with "
            f"mesh.tp={plan.tp} in {strategy_words} each rank has only slices of them. Use "
            "optim.name=adamw optim.state=bf16, or mesh.tp=1 without strategy.slice."
        )
    state_of = "whole parameters" if optim.name == "adafactor" else "blocks of a whole parameter"
    fix = "--strategy ddp, or optim.name=adamw"
    if optim.name in LOW_BIT:
        fix = "--strategy ddp, or optim.name=adamw optim.state=bf16"
    if optimizer_input not in ("parameters", "owned"):
        raise ConfigError(
            f"optim.name={optim.name} keeps state for {state_of}, and the optimizer of "
            f"{strategy_words} updates {_TENSOR_WORDS[optimizer_input]} of parameters. Use {fix}."
        )
    if plan.offload_tiers.optimizer != "device":
        raise ConfigError(
            f"optim.name={optim.name} keeps state for {state_of}, and "
            f"strategy.offload.optimizer={plan.offload_tiers.optimizer} offloads it in pieces. Use "
            "strategy.offload=null (this optimizer's state is small), or optim.name=adamw."
        )


def check_kind(optimizer: WholeOptimizer, plan: Plan) -> None:
    """Check that each rank of a plan has the tensors that the optimizer's step reads.

    Raises:
        ConfigError: a rank lacks such a tensor, or the step needs a closure. The message contains
            the optimizer's class, the reason, and a strategy or optimizer that works.
    """
    kind, strategy_words = optimizer.kind, f"strategy {plan.strategy.name}"
    if kind.failure is not None and "closure" in kind.failure:
        raise ConfigError(
            f"optimizer: {optimizer.kind_name} wants a closure that runs the forward and backward "
            "passes again, and the engine runs them once before each step. Use an optimizer that "
            "needs only the gradients, such as torch.optim.AdamW."
        )
    if plan.world_size == 1 and plan.offload_tiers.optimizer == "device":
        return
    sees, reason = _readable_tensors(plan)
    if kind.counts and _steps_in_parts(plan):
        raise ConfigError(
            f"optimizer: {optimizer.kind_name} has one step count for all parameters, and in "
            f"{strategy_words} one step is several updates of different parameters, each of which "
            "would be counted. Use --strategy ddp."
        )
    if sees in ("parameters", "elements") and not kind.separable:
        raise ConfigError(
            f"optimizer: the step of {optimizer.kind_name} reads all parameters together"
            f"{_trial_failure(kind.failure)}, and in {strategy_words} {reason}. Use --strategy ddp."
        )
    if sees == "elements" and not kind.elementwise:
        fix = "--strategy ddp" if plan.tp > 1 or plan.pp > 1 else "--strategy zero1_torch"
        raise ConfigError(
            f"optimizer: the step of {optimizer.kind_name} needs whole parameters, and in "
            f"{strategy_words} {reason}. Use {fix}."
        )
    if sees == "shards" and optimizer.kind_name == "Rprop":
        raise ConfigError(
            "optimizer: torch's Rprop assigns to elements selected by a mask, and torch does not "
            f"support that on DTensors, the shards of {strategy_words}. Use --strategy "
            "zero1_torch, or another optimizer."
        )
    if sees == "elements" and kind.reads_notes and plan.tp == 1:
        raise ConfigError(
            f"optimizer: {optimizer.kind_name} reads attributes of single parameters, and in "
            f"{strategy_words} {reason}. Put parameters with such attributes into separate "
            "parameter groups, or use --strategy zero1_torch."
        )


def _trial_failure(failure: str | None) -> str:
    return "" if failure is None else f" (a trial step fails with {failure[:120]})"


def _readable_tensors(plan: Plan) -> tuple[OptimizerSees, str]:
    """Return the tensors that a step may read on one rank, and why the rank has no others."""
    sees = plan.replicate.optimizer_sees if plan.dp > 1 or plan.replicate.owns_step else "all"
    if plan.tp > 1:
        return "elements", f"each rank has slices of them (mesh.tp={plan.tp})"
    if plan.shares_engine or sees == "elements":
        return "elements", "each rank updates flat slices of them"
    if plan.offload_tiers.optimizer != "device" and not plan.replicate.own_offload:
        if sees == "shards":
            return "elements", "flat slices of a rank's shards are copied to the device in turn"
        return "parameters", "only some of them are on the device at a time"
    if plan.cut is not None and plan.pp > 1:
        return "parameters", "each rank has only those of its stages"
    return sees, "each rank updates only some of them"


def _steps_in_parts(plan: Plan) -> bool:
    """Return whether a step of the run consists of several calls of the optimizer's step."""
    moved = plan.offload_tiers.optimizer != "device" and not plan.replicate.own_offload
    pieces = plan.bf16_parameters and plan.replicate.optimizer_gets == "pieces"
    # DeepSpeed's stage 3 calls the optimizer's step for each flat slice.
    flat = plan.replicate.optimizer_sees == "elements" and plan.replicate.sharded_states == 3
    return moved or pieces or flat or plan.release_gradients
