"""Find properties of a model that not every engine supports, before the ranks connect.

`Traits.cannot_hold` lists the properties that a technique does not support. If the model has such a
property, the technique's engine would train it wrongly or fail. The run then ends with an error
that names the parameter or module, and a strategy that supports the property.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from bigtrain.checkpoint.layout import DTYPE_CODES
from bigtrain.core.registry import make_technique
from bigtrain.core.state import NOT_JSON, as_json, extra_modules
from bigtrain.core.strategy import Plan
from bigtrain.core.traits import SECOND_BACKWARD, SPARSE, Oddity
from bigtrain.errors import ConfigError
from bigtrain.hub.lora import QUANTIZE
from bigtrain.hub.nf4 import is_packed
from bigtrain.job.schema import RoleConfig
from bigtrain.models.blocks import find_blocks, independent_blocks
from bigtrain.tracing.parameter_uses import ParameterUses

_INSTEAD = {
    "fsdp": RoleConfig.model_validate({"name": "zero", "engine": "torch", "stage": 3}),
    "zero1_torch": RoleConfig.model_validate({"name": "zero", "engine": "torch", "stage": 1}),
    "ddp": RoleConfig(name="ddp"),
}
"""Strategies that an error may recommend. The strategy that shards the most is first."""


@dataclass(frozen=True)
class Found:
    """An unusual property of a model."""

    oddity: Oddity
    name: str
    """The name of the parameter or module."""
    what: str
    """The words of the error after the name, such as "is shared"."""
    fix: str = ""
    """A change of the model that also helps, as a sentence; it precedes the strategy to use."""


def found_in_model(model: nn.Module, uses: ParameterUses | None) -> tuple[Found, ...]:
    """Return all unusual properties of a model and of its training pass.

    Args:
        model: the whole model as the user wrote it, on any device.
        uses: how the training pass uses the parameters; None if unknown.

    Raises:
        ConfigError: the model has a state that checkpoints cannot store.
    """
    _check_extra_state(model)
    _check_saved_types(model)
    found = tuple(found_in(model))
    sparse = {finding.name for finding in found if finding.oddity == "sparse"}
    return (*found, *found_in_pass(model, uses or ParameterUses(), sparse))


def refuse_found(plan: Plan, oddities: Sequence[Found]) -> None:
    """Check that the plan's techniques support all properties of a model.

    Needs no process group, and gives the same result on all ranks.

    Args:
        plan: the plan of the run.
        oddities: the unusual properties of the model.

    Raises:
        ConfigError: a property is not supported. The message contains the name of the parameter or
            module, the property, and a strategy that supports it.
    """
    refused = refused_by(plan)
    for found in oddities:
        if found.oddity in refused:
            instead = _instead(plan, {other.oddity for other in oddities})
            fix = f"{found.fix}, or use" if found.fix else "Use"
            raise ConfigError(
                f"{found.name} {found.what}, which strategy {plan.strategy.name} does not support. "
                f"{fix} --strategy {instead}."
            )


def refused_by(plan: Plan) -> frozenset[Oddity]:
    """Return the properties that the techniques and settings of a plan do not support."""
    refused: frozenset[Oddity] = frozenset()
    for role, technique in plan.techniques.items():
        if role == "replicate" and plan.dp == 1 and not technique.traits.needs_group:
            continue  # without replicas the technique changes nothing
        refused |= technique.traits.cannot_hold
    if plan.release_gradients and (plan.world_size > 1 or plan.replicate.materializes):
        refused |= {"gradient_hooks", "accumulate_hooks"}
        if plan.replicate.optimizer_gets == "shards":
            refused |= {"scalars"}
    if plan.tp > 1 and (plan.dp > 1 or plan.batch.accumulation_steps > 1):
        refused |= {
            "gradient_hooks"
        }  # autograd would call them with the gradient of a part of the batch
    if plan.bf16_parameters or (plan.precision == "bf16" and not plan.master_weights):
        refused |= {"writes_trained"}
    if plan.compiles_blocks:
        refused |= SECOND_BACKWARD
    if plan.dp > 1:
        refused |= {"writes_from_batch"}
        # The gradients of stages are averaged in flat buckets, which hold no sparse tensors.
        refused |= SPARSE if plan.pp > 1 else frozenset()
    return refused


def found_in(model: nn.Module) -> Iterator[Found]:
    """Yield the unusual properties of a model that are found without running it."""
    modules = list(model.modules())
    sparse = {
        id(module.weight)
        for module in modules
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse
    }
    owners = Counter(id(p) for module in modules for p in module._parameters.values())
    for name, p in model.named_parameters():
        trained = p.requires_grad
        if p._backward_hooks:
            yield Found("gradient_hooks", name, "has a gradient hook (register_hook)")
        if p._post_accumulate_grad_hooks:
            description = "has a hook on its gradient (register_post_accumulate_grad_hook)"
            yield Found("accumulate_hooks", name, description)
        if id(p) in sparse and trained:
            fix, description = "Set sparse=False", "has sparse gradients (sparse=True)"
            yield Found("sparse", name, description, fix)
            if owners[id(p)] > 1:
                yield Found("sparse_shared", name, f"is shared, and {description}", fix)
        if p.is_complex():
            description = f"is {_type(p)}"
            yield Found("complex" if trained else "frozen_complex", name, description)
        if p.dim() == 0:
            yield Found("scalars", name, "has no dims", "Give it shape [1]")
        if not p.is_contiguous():
            fix = "Call .contiguous() on it"
            yield Found("strided", name, "has its dims in another order in memory", fix)
        if p.numel() == 0:
            yield Found("empty", name, f"has no elements ({list(p.shape)})", "Leave it out")
        yield from _of_type(name, p)
    yield from _of_two_types("mixed", model, "the model")


def _of_type(name: str, parameter: nn.Parameter) -> Iterator[Found]:
    """Yield the unusual property of a parameter's dtype, if it has one."""
    exact = parameter.is_floating_point() or parameter.is_complex()
    if is_packed(name, parameter):
        fix, description = "Leave model.lora.quantize out", f"is in 4 bits ({QUANTIZE})"
        yield Found("packed", name, description, fix)
    elif not exact:
        yield Found("integers", name, f"is {_type(parameter)}", "Make it a buffer")
    elif parameter.requires_grad and parameter.dtype != torch.float32:
        yield Found("not_fp32", name, f"is trained in {_type(parameter)}")


def _of_two_types(oddity: Oddity, module: nn.Module, where: str) -> Iterator[Found]:
    """Yield a property for the first trained parameter with another dtype than those before it."""
    trained = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    for name, p in trained:
        if p.dtype != trained[0][1].dtype:
            others = _type(trained[0][1])
            description = f"is {_type(p)}, and other trained parameters of {where} are {others}"
            yield Found(oddity, name, description)
            return


def found_in_pass(
    model: nn.Module, uses: ParameterUses, sparse: Collection[str]
) -> Iterator[Found]:
    """Yield the unusual properties of a training pass, and blocks with parameters of two dtypes.

    Args:
        model: the whole model as the user wrote it, on any device.
        uses: how the forward pass and the loss use the parameters.
        sparse: the names of parameters whose layer has `sparse=True`.
    """
    for name in uses.sparse:
        if name not in sparse:
            fix = "Set sparse=False"
            yield Found("sparse_calls", name, "has sparse gradients (sparse=True)", fix)
    for name in uses.sparse_and_dense:
        description = "has sparse gradients (sparse=True) in one use, and dense ones in another"
        yield Found("sparse_and_dense", name, description, "Set sparse=False")
    if uses.graph_in_forward is not None:
        description = "asks for a gradient with create_graph=True in its forward pass"
        yield Found("graph_in_forward", uses.graph_in_forward or "the model", description)
    if uses.graph_in_loss:
        description = "asks autograd for a gradient and uses it in the model"
        yield Found("graph_in_loss", "the loss", description, "Ask for it in the model's forward")
    units = {name: unit for name, unit in independent_blocks(model) if name}
    unit_of = {
        f"{name}.{inner}": name
        for name, unit in units.items()
        for inner, _ in unit.named_parameters()
    }
    for write in uses.writes:
        parameter = model.get_parameter(write.name)
        description = "is written in place in the forward pass"
        fix = "Write it after the step"
        yield Found("writes", write.name, description, fix)
        if parameter.requires_grad:
            yield Found("writes_trained", write.name, f"is trained, and {description}", fix)
        if any(name in write.inside for name, _ in find_blocks(model)):
            yield Found("writes_in_block", write.name, description, fix)
        if not write.of_parameters:
            description += " with values computed from a rank's own part of the batch"
            fix = "Exchange them between the ranks, and write after the step"
            yield Found("writes_from_batch", write.name, description, fix)
        if not write.of_parameters or unit_of.get(write.name, "") in write.inside:
            description = (
                "is written in place in the forward pass of the module that it is sharded with"
            )
            yield Found("writes_gathered", write.name, description, "Write it after the step")
    for name, unit in units.items():
        yield from _of_two_types("mixed_block", unit, name)


def _instead(plan: Plan, oddities: set[Oddity]) -> str:
    """Return the strategy that supports all these properties and shards the most."""
    for name, config in _INSTEAD.items():
        traits = make_technique("replicate", config).traits
        if name != plan.strategy.name and not oddities & traits.cannot_hold:
            return name
    return "single, which runs on one rank"


def _check_extra_state(model: nn.Module) -> None:
    for name, module in extra_modules([model]):
        state = module.get_extra_state()
        if as_json(state) is NOT_JSON:
            raise ConfigError(
                f"{name}: get_extra_state returned a {type(state).__name__} that JSON cannot store "
                "unchanged, so a checkpoint would lose it. Let it return None, bools, numbers, "
                "strings, lists and dicts with strings as keys, and keep tensors in buffers."
            )


def _check_saved_types(model: nn.Module) -> None:
    for name, tensor in model.state_dict().items():
        if isinstance(tensor, torch.Tensor) and tensor.dtype not in DTYPE_CODES:
            raise ConfigError(
                f"{name} is {_type(tensor)}, which checkpoints cannot store. Use one of "
                f"{_listed(DTYPE_CODES)}, or a buffer with persistent=False."
            )


def _listed(types: Sequence[torch.dtype] | dict[torch.dtype, str]) -> str:
    return ", ".join(map(_name, types))


def _type(tensor: torch.Tensor) -> str:
    return _name(tensor.dtype)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
