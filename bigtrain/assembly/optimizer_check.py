"""Checks that a job's optimizer can work with the tensors that its strategy gives it."""

from __future__ import annotations

from bigtrain.core.strategy import Plan
from bigtrain.core.traits import OptimizerInput, OptimizerSees
from bigtrain.errors import ConfigError
from bigtrain.job.schema import LOW_BIT, OptimConfig
from bigtrain.optim.whole import WholeOptimizer

_SHAPES: dict[OptimizerInput, str] = {
    "parameters": "the parameters themselves",
    "pieces": "pieces",
    "shards": "shards",
    "copies": "flat copies",
}


def check_optimizer(optim: OptimConfig, plan: Plan) -> None:
    """Refuse an optimizer that a technique of the plan cannot work with.

    Args:
        optim: the `optim` section of the job.
        plan: complete; the techniques' own checks come later.

    Raises:
        ConfigError: with the key, the reason and the nearest choice that works.
    """
    optimizer_input = plan.replicate.optimizer_gets
    if plan.shares_engine or (plan.cut is not None and plan.cut.optimizer_gets == "copies"):
        optimizer_input = "copies"
    strategy_words = f"strategy {plan.strategy.name}"
    if optim.name == "sgd" and optim.implementation == "fused" and optimizer_input == "shards":
        raise ConfigError(
            "optim.implementation=fused: torch's fused SGD does not know the shards of "
            f"{strategy_words}. Use "
            "optim.implementation=auto."
        )
    if not optim.master_weights:
        _check_masters(plan, optimizer_input, strategy_words)
    if optim.release_gradients:
        _check_release(plan, strategy_words)
    if optim.name == "adafactor" or optim.name in LOW_BIT:
        _check_whole(optim, plan, optimizer_input, strategy_words)
    elif optim.state == "bf16" and _cuts_parameters(plan, optimizer_input):
        _check_copies(optim, plan, strategy_words)
    elif optim.state == "bf16" and optimizer_input == "copies":
        raise ConfigError(
            f"optim.state=bf16: {strategy_words} lets its engine keep the optimizer's state, in "
            "fp32. Use "
            "--strategy fsdp or --strategy zero1_torch, or optim.state=fp32."
        )


def _cuts_parameters(plan: Plan, optimizer_input: OptimizerInput) -> bool:
    """Whether updates are of flat slices whose bounds depend on the number of ranks."""
    moved = optimizer_input == "parameters" and plan.offload_tiers.optimizer != "device"
    return optimizer_input == "pieces" or moved


def _check_copies(optim: OptimConfig, plan: Plan, who: str) -> None:
    """Ranks that share a tied parameter slice it differently, so they round differently."""
    if optim.stochastic_rounding is False or max(plan.pp, plan.tp) == 1:
        return
    sharing = "the stages that share a tied parameter cut it"
    fix = "use --strategy 1f1b_fsdp"
    if plan.tp > 1:
        sharing = "the ranks of mesh.tp that hold a parameter whole may cut it"
        fix = "use --strategy fsdp+tensor"
    raise ConfigError(
        f"optim.state=bf16 with stochastic rounding: in {who} {sharing} into different pieces, and "
        f"its copies would drift apart. Set optim.stochastic_rounding=false, or {fix}."
    )


def _check_masters(plan: Plan, optimizer_input: OptimizerInput, strategy_words: str) -> None:
    if plan.precision != "bf16":
        raise ConfigError(
            f"optim.master_weights=false keeps parameters in bf16, and train.precision is "
            f"{plan.precision}. Set train.precision=bf16, or optim.master_weights=true."
        )
    if optimizer_input != "parameters":
        raise ConfigError(
            f"optim.master_weights=false: {strategy_words} makes {_SHAPES[optimizer_input]} of "
            "fp32 parameters, and "
            "takes no others. Use --strategy single or --strategy ddp, or "
            "optim.master_weights=true."
        )
    if plan.offload_tiers.optimizer != "device":
        raise ConfigError(
            f"optim.master_weights=false keeps no values but the parameters, and "
            f"strategy.offload.optimizer={plan.offload_tiers.optimizer} keeps fp32 copies "
            "elsewhere. Use strategy.offload=null, or optim.master_weights=true."
        )


def _check_release(plan: Plan, strategy_words: str) -> None:
    if "cut" in plan.techniques:
        raise ConfigError(
            f"optim.release_gradients=true: {strategy_words} runs the micro-batches through "
            "stages, whose "
            "gradients are whole after the last one only. Use --strategy fsdp, or "
            "optim.release_gradients=false."
        )
    if not plan.replicate.final_gradients and plan.world_size > 1:
        raise ConfigError(
            f"optim.release_gradients=true: {strategy_words} keeps all gradients in buckets until "
            "they are "
            "averaged over the ranks. Use --strategy fsdp, or optim.release_gradients=false."
        )
    if not plan.replicate.final_gradients:
        raise ConfigError(
            f"optim.release_gradients=true: {strategy_words} keeps the gradients for a step of its "
            "own. Use "
            "--strategy single, or optim.release_gradients=false."
        )
    steps = plan.batch.accumulation_steps
    if steps > 1:
        raise ConfigError(
            f"optim.release_gradients=true updates at every micro-batch, and a step has {steps}. "
            f"Use train.accumulation_steps=1 (train.micro_batch_size="
            f"{plan.batch.global_size // plan.batch.dp_size}), or optim.release_gradients=false."
        )
    if plan.offload_tiers.optimizer != "device" or plan.offload_tiers.parameters != "device":
        raise ConfigError(
            "optim.release_gradients=true updates in the backward pass, and strategy.offload "
            "brings state back a chunk at a time after it. Use strategy.offload=null, or "
            "optim.release_gradients=false."
        )


def _check_whole(
    optim: OptimConfig, plan: Plan, optimizer_input: OptimizerInput, strategy_words: str
) -> None:
    """The state is of whole parameters: of rows and columns, or of blocks of numbers."""
    if plan.tp > 1:
        what = "rows and columns" if optim.name == "adafactor" else "blocks"
        raise ConfigError(
            f"optim.name={optim.name} keeps state for {what} of whole parameters, and "
            f"{strategy_words} gives each of {plan.tp} ranks slices of them (mesh.tp={plan.tp}). "
            "Use optim.name=adamw optim.state=bf16, or leave strategy.slice out with mesh.tp=1."
        )
    needs = "whole parameters" if optim.name == "adafactor" else "blocks of a whole parameter"
    fix = "--strategy ddp, or optim.name=adamw"
    if optim.name in LOW_BIT:
        fix = "--strategy ddp, or optim.name=adamw optim.state=bf16"
    if optimizer_input != "parameters":
        raise ConfigError(
            f"optim.name={optim.name} keeps state for {needs}, and {strategy_words} gives the "
            "optimizer "
            f"{_SHAPES[optimizer_input]} of them. Use {fix}."
        )
    if plan.offload_tiers.optimizer != "device":
        raise ConfigError(
            f"optim.name={optim.name} keeps state for {needs}, and "
            f"strategy.offload.optimizer={plan.offload_tiers.optimizer} moves it in pieces. It is "
            "small already: use strategy.offload=null, or optim.name=adamw."
        )


def check_kind(whole: WholeOptimizer, plan: Plan) -> None:
    """Refuse an optimizer whose step reads tensors that a rank of this plan does not have.

    Raises:
        ConfigError: with its class, the tensors that it reads, and a strategy that has them.
    """
    kind, who = whole.kind, f"strategy {plan.strategy.name}"
    if kind.failure is not None and "closure" in kind.failure:
        raise ConfigError(
            f"optimizer: {whole.kind_name} wants a closure in each step, and the engine's step has "
            "run the forward and backward passes by then. Use an optimizer that steps by the "
            "gradients, such as torch.optim.AdamW."
        )
    if plan.world_size == 1 and plan.offload_tiers.optimizer == "device":
        return
    sees, because = _sees(plan)
    if kind.counts and _steps_in_parts(plan):
        raise ConfigError(
            f"optimizer: {whole.kind_name} counts its steps for all parameters together, and {who} "
            "lets it update a part of them at a time. Use --strategy ddp."
        )
    if sees in ("parameters", "elements") and not kind.separable:
        raise ConfigError(
            f"optimizer: the step of {whole.kind_name} looks at all parameters together"
            f"{_tried(kind.failure)}, and in {who} {because}. Use --strategy ddp."
        )
    if sees == "elements" and not kind.elementwise:
        fix = "--strategy ddp" if plan.tp > 1 or plan.pp > 1 else "--strategy zero1_torch"
        raise ConfigError(
            f"optimizer: the step of {whole.kind_name} needs whole parameters, and in {who} "
            f"{because}. Use {fix}."
        )
    if sees == "shards" and whole.kind_name == "Rprop":
        raise ConfigError(
            f"optimizer: torch's Rprop writes where signs differ, which torch does not do on the "
            f"shards (DTensors) of {who}. Use --strategy zero1_torch, or another optimizer."
        )
    if sees == "elements" and kind.reads_notes and plan.tp == 1:
        raise ConfigError(
            f"optimizer: {whole.kind_name} reads what is noted at single parameters, and in {who} "
            f"{because}. Give them groups of their own, or use --strategy zero1_torch."
        )


def _tried(failure: str | None) -> str:
    return "" if failure is None else f" (alone it ends in {failure[:120]})"


def _sees(plan: Plan) -> tuple[OptimizerSees, str]:
    """The tensors that a step may read on one rank of a plan, and why no others."""
    sees = plan.replicate.optimizer_sees if plan.dp > 1 or plan.replicate.owns_step else "all"
    if plan.tp > 1:
        return "elements", f"each of {plan.tp} ranks has slices of them (mesh.tp={plan.tp})"
    if plan.shares_engine or sees == "elements":
        return "elements", "each rank has stretches of them in flat pieces"
    if plan.offload_tiers.optimizer != "device" and not plan.replicate.own_offload:
        if sees == "shards":
            return "elements", "what is brought back at a time are stretches of a rank's shards"
        return "parameters", "some of them are brought back at a time"
    if plan.cut is not None and plan.pp > 1:
        return "parameters", "each rank has those of its stages"
    return sees, "each rank updates some of them"


def _steps_in_parts(plan: Plan) -> bool:
    """Whether one step of the run is several calls of the optimizer."""
    moved = plan.offload_tiers.optimizer != "device" and not plan.replicate.own_offload
    pieces = plan.bf16_parameters and plan.replicate.optimizer_gets == "pieces"
    # DeepSpeed's stage 3 steps once for each flat slice.
    flat = plan.replicate.optimizer_sees == "elements" and plan.replicate.sharded_states == 3
    return moved or pieces or flat or plan.release_gradients
