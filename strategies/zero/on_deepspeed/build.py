"""Build a DeepSpeed engine without ever using more memory for the model than training does.

DeepSpeed takes a whole model, makes a flat copy of it, and fp32 copies of the flat copy for the
update. Here the parameters of stages 1 and 2 get their values in the flat buffer, and those of
stage 3 are cut as soon as they have values. Saved values are read directly into the flat buffer or,
under stage 3, into this rank's piece, so that no parameter is ever whole in addition. In fp32 the
copy for the update is dropped, and the parameters themselves are updated. In bf16 the copy for the
update gets the initial values in fp32, before they are rounded.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules.batchnorm import _NormBase

from bigtrain.core.state import first_names
from bigtrain.core.strategy import Assembly
from bigtrain.errors import BigtrainError, ConfigError
from bigtrain.job.deepspeed_json import json_section
from bigtrain.models.parameters import names_of
from bigtrain.models.saved_parts import SavedParts
from bigtrain.optim.whole import WholeOptimizer, drop_empty_groups
from bigtrain.strategies.deepspeed_adapter import (
    Partitioner,
    connect_deepspeed,
    parse_config,
    start_engine,
)
from bigtrain.strategies.zero.on_deepspeed.layout import (
    flat_share,
    flatten_in_place,
    overlap,
    pad_in_place,
    piece_size,
    rank_share,
)
from bigtrain.tensors.shards import Extent, whole_extents


@contextmanager
def blaming_file(path: str | None) -> Iterator[None]:
    """Turn an error that DeepSpeed raises about a user's file into one line with the path.

    Args:
        path: the path of the file; None if there is none, and then errors pass unchanged.

    Raises:
        ConfigError: DeepSpeed refuses the settings of the file.
    """
    try:
        yield
    except Exception as error:
        known = isinstance(error, AssertionError | TypeError | ValueError)
        if path is None or not (known or type(error).__name__ == "DeepSpeedConfigError"):
            raise
        message = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(f"{path}: DeepSpeed refuses it: {message[:300]}") from error


def check_file(path: str, config: dict[str, Any]) -> None:
    """Let DeepSpeed parse its configuration, before the ranks connect.

    Args:
        path: the path of the user's file.
        config: the configuration with all "auto" values filled in.

    Raises:
        ConfigError: DeepSpeed refuses the configuration.
    """
    # DeepSpeed sees one rank here, for which the batch of all ranks would be wrong.
    alone = {key: value for key, value in config.items() if key != "train_batch_size"}
    with blaming_file(path), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        parse_config(alone)


@dataclass
class BuiltEngine:
    """A DeepSpeed engine, and the objects that belong to it."""

    engine: Any
    fp32_values: dict[int, tuple[int, Tensor]] = field(default_factory=dict)
    """(offset in the parameter, fp32 values from there on), by the id of the parameter.

    The values include the elements that this rank updates.
    """
    closing: ExitStack = field(default_factory=ExitStack)
    """Undoes the changes outside of the engine, which DeepSpeed or this module made."""
    dtypes: dict[str, torch.dtype] = field(default_factory=dict)
    """The dtype of each parameter in the user's model, by name; frozen ones are saved in it."""
    optimizer: torch.optim.Optimizer | None = None
    """The user's optimizer."""
    begin_state: Callable[[], None] | None = None
    """Creates the optimizer's state on the pieces, if it has state before its first step."""
    tracking: Callable[[], bool] = lambda: False
    """Returns whether memory is being tracked."""


def build_engine(
    assembly: Assembly, config: dict[str, Any], stage: int, path: str | None
) -> BuiltEngine:
    """Give the model its values, shard it, and make DeepSpeed's engine of it. Collective.

    Args:
        assembly: an assembly whose model has no values yet.
        config: DeepSpeed's configuration.
        stage: the stage of ZeRO, 1 to 3.
        path: the path of the user's file, if the configuration is from a file.

    Raises:
        ConfigError: DeepSpeed does not support the model or its optimizer, or refuses the file.
    """
    context, meter = assembly.context, assembly.meter
    built = BuiltEngine(None, tracking=lambda: meter.tracking)
    built.dtypes = {name: p.dtype for name, p in assembly.model.named_parameters()}
    with ExitStack() as failing, warnings.catch_warnings():
        failing.enter_context(built.closing)
        _copy_without_hooks(assembly.model, context.device, built.closing)
        warnings.simplefilter("ignore")
        connect_deepspeed(context, built.closing)
        low = assembly.plan.bf16_parameters
        whole_optimizer = flat_optimizer(assembly)
        trained = {n for n, p in assembly.model.named_parameters() if p.requires_grad}
        groups = [[name for name in names if name in trained] for names in whole_optimizer.groups]
        if stage == 3:
            _fill_in_shards(assembly, config, built, to_bf16=low)
        else:
            _fill_flat(
                assembly,
                [g for g in groups if g],
                built,
                to_bf16=low,
                is_round_robin=_is_round_robin(config),
            )
            if low:
                _cast_frozen(assembly)
        assembly.materialize(names_of(assembly.model))
        optimizer = whole_optimizer.put_on({n: [assembly.model.get_parameter(n)] for n in trained})
        # DeepSpeed makes a flat buffer of each group, and cannot make one of an empty group.
        drop_empty_groups(optimizer)
        optimizer.state.clear()
        with blaming_file(path):
            built.engine = start_engine(
                assembly.model,
                optimizer,
                config,
                flatten=flatten_in_place,
                align=pad_in_place,
                in_place=stage < 3 and not _is_round_robin(config) and not _is_padded(config),
            )
        built.begin_state = (
            whole_optimizer.begin_state if whole_optimizer.begins_with_state else None
        )
        built.optimizer = optimizer
        failing.pop_all()
    return built


def _copy_without_hooks(model: nn.Module, device: torch.device, closing: ExitStack) -> None:
    """Let `copy.deepcopy` on fake tensors return the model as it was before DeepSpeed's changes.

    A later prediction copies the model. A copy with DeepSpeed's hooks would act on the model that
    is being trained.
    """
    twins: dict[int, object] = {}
    for parameter in model.parameters():
        meta = torch.empty_like(parameter, device="meta")
        twins[id(parameter)] = nn.Parameter(meta, requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        twins[id(buffer)] = torch.empty_like(buffer, device="meta")
    plain = copy.deepcopy(model, twins)

    def twin(tensor: Tensor) -> Tensor:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)

    def copied(_memo: dict[int, object]) -> nn.Module:
        if not isinstance(torch.empty(0), FakeTensor):
            raise BigtrainError(
                "a model under DeepSpeed cannot be copied (copy.deepcopy, AveragedModel): its "
                "parameters are in shards and in flat buffers. bigtrain.ema(engine, decay=0.999) "
                "keeps an average; for a copy save a checkpoint, and load it into another model."
            )
        memo: dict[int, object] = {id(b): twin(b) for b in plain.buffers()}
        for parameter in plain.parameters():
            fresh = nn.Parameter(twin(parameter), requires_grad=parameter.requires_grad)
            memo[id(parameter)] = fresh
        return copy.deepcopy(plain, memo)

    model.__deepcopy__ = copied  # type: ignore[assignment]
    closing.callback(delattr, model, "__deepcopy__")


def flat_optimizer(assembly: Assembly) -> WholeOptimizer:
    """Return the job's optimizer, which has no parameters yet.

    Raises:
        ConfigError: no parameter is trained, a trained parameter is not fp32, BatchNorm would be
            in bf16, or the optimizer needs whole tensors or leaves some parameters out.
    """
    named = {n: p for n, p in assembly.model.named_parameters() if p.requires_grad}
    kinds = sorted({str(p.dtype) for p in named.values()})
    if kinds != ["torch.float32"]:
        raise ConfigError(
            f"DeepSpeed needs trained parameters in float32, and the model has "
            f"{', '.join(kinds) or 'nothing to train'}. Use --strategy zero1_torch."
        )
    statistics = [m for m in assembly.model.modules() if isinstance(m, _NormBase) and m.affine]
    if assembly.plan.bf16_parameters and statistics:
        raise ConfigError(
            f"train.precision=bf16: DeepSpeed converts all parameters to bf16, and "
            f"{type(statistics[0]).__name__} takes no bf16 weights with fp32 statistics. "
            "Use --strategy zero1_torch or fsdp, or train.precision=fp32."
        )
    whole_optimizer = WholeOptimizer.of(assembly.make_optimizer, named)
    if not whole_optimizer.kind.elementwise:
        raise ConfigError(
            "DeepSpeed gives the optimizer flat slices of parameters, and "
            f"{whole_optimizer.kind_name} needs whole ones. Use --strategy zero1_torch."
        )
    left_out = whole_optimizer.left_out(named)
    if left_out:
        raise ConfigError(
            f"optimizer: it leaves out {first_names(left_out)}, and DeepSpeed updates all "
            "parameters with requires_grad. Call requires_grad_(False) on those that are not "
            "trained, or use --strategy zero1_torch."
        )
    return whole_optimizer


def _is_round_robin(config: dict[str, Any]) -> bool:
    """Return whether DeepSpeed deals parameters out to the ranks in rotation."""
    return bool(json_section(config, "zero_optimization").get("round_robin_gradients", False))


def _is_padded(config: dict[str, Any]) -> bool:
    """Return whether DeepSpeed pads every parameter."""
    return bool(json_section(config, "zero_optimization").get("parameter_alignment", False))


def _fill_flat(
    assembly: Assembly,
    groups: list[list[str]],
    built: BuiltEngine,
    *,
    to_bf16: bool,
    is_round_robin: bool,
) -> None:
    """Put each group's parameters one after the other into one buffer, for stages 1 and 2.

    With `is_round_robin` the fp32 values of whole parameters are stored in `built`, because the
    rank that updates a parameter is not known yet.
    """
    context = assembly.context
    ranks, rank = context.dp_size, context.dp_rank
    dtype = torch.bfloat16 if to_bf16 else torch.float32
    for names in groups:
        elements = sum(assembly.model.get_parameter(name).numel() for name in names)
        share = flat_share(elements, ranks)
        flat = torch.zeros(ranks * share, dtype=dtype, device=context.device)
        own_share = rank_share(share, rank)
        offset = 0
        for name in names:
            parameter = assembly.model.get_parameter(name)
            stop = offset + parameter.numel()
            part = overlap(offset, stop, own_share)
            if to_bf16 and is_round_robin:
                part = range(offset, stop)
            exact = range(part.start - offset, part.stop - offset) if to_bf16 else range(0)
            view = flat[offset:stop].view(parameter.shape)
            own_values = _give_values(assembly, name, view, exact)
            if exact:
                parameter = assembly.model.get_parameter(name)  # may be another object now
                built.fp32_values[id(parameter)] = (exact.start, own_values)
            offset = stop


def _give_values(assembly: Assembly, name: str, target: Tensor, exact: range) -> Tensor:
    """Let a parameter have its values in the memory of `target`, which may be bf16.

    Args:
        assembly: an assembly in which the parameter has no values yet.
        name: the name of the parameter.
        target: a tensor of the parameter's shape.
        exact: the elements of the flat parameter to return.

    Returns:
        These elements in fp32.
    """
    parts = _readable(assembly, name)
    if parts is not None:
        own_values = _read_exact(parts, name, exact, target.device)
        parts.copy(name, target, whole_extents(target.shape))
        parts.put(name, target)
        return own_values
    assembly.materialize([name])
    parameter = assembly.model.get_parameter(name)  # `materialize` may have replaced it
    own_values = parameter.detach().reshape(-1)[exact.start : exact.stop].clone()
    target.copy_(parameter.detach())
    parameter.data = target
    return own_values


def _readable(assembly: Assembly, name: str) -> SavedParts | None:
    """Return the reader of a parameter's saved values; None if they cannot be read in parts."""
    parts = assembly.saved_parts
    return parts if parts is not None and parts.cover([name]) else None


def _read_exact(parts: SavedParts, name: str, wanted: range, device: torch.device) -> Tensor:
    values = torch.empty(len(wanted), dtype=torch.float32, device=device)
    if wanted:
        parts.copy(name, values, (Extent(wanted.start, len(wanted)),))
    return values


def _cast_frozen(assembly: Assembly) -> None:
    """Give frozen parameters their values in bf16, one by one.

    DeepSpeed would need all of them in fp32 at once.
    """
    device, low = assembly.context.device, torch.bfloat16
    for name in [n for n, p in assembly.model.named_parameters() if not p.requires_grad]:
        parameter = assembly.model.get_parameter(name)
        if parameter.is_floating_point():
            target = torch.empty(parameter.shape, dtype=low, device=device)
            _give_values(assembly, name, target, range(0))
        else:
            assembly.materialize([name])


def _fill_in_shards(
    assembly: Assembly, config: dict[str, Any], built: BuiltEngine, *, to_bf16: bool
) -> None:
    """Cut one parameter after the other, for stage 3, so that at most one is whole on a rank."""
    partitioner = Partitioner(config, built.closing)
    names = set(names_of(assembly.model))
    for path, module in assembly.model.named_modules():
        for own_name in [*module._parameters, *module._buffers]:
            name = f"{path}.{own_name}".lstrip(".")
            if name not in names:
                continue
            parameter = module._parameters.get(own_name)
            if parameter is None:
                assembly.materialize([name])
            elif not partitioner.has_cut(parameter):
                _cut(assembly, name, partitioner, built, to_bf16=to_bf16)


def _cut(
    assembly: Assembly, name: str, partitioner: Partitioner, built: BuiltEngine, *, to_bf16: bool
) -> None:
    """Give a rank its piece of a parameter. All ranks do, so nothing is sent."""
    context, parts = assembly.context, _readable(assembly, name)
    parameter = assembly.model.get_parameter(name)
    low = to_bf16 and parameter.is_floating_point()
    size = piece_size(parameter.numel(), context.dp_size)
    start = context.dp_rank * size
    own = range(start, max(start, min(start + size, parameter.numel())))
    exact = own if low and parameter.requires_grad else range(0)
    if parts is None or not partitioner.cuts_without_values:
        assembly.materialize([name])
        parameter = assembly.model.get_parameter(name)  # `materialize` may have replaced it
        own_values = parameter.detach().reshape(-1)[exact.start : exact.stop].clone()
        if low:
            parameter.data = parameter.data.to(torch.bfloat16)
        partitioner.cut(parameter)
    else:
        own_values = _read_exact(parts, name, exact, context.device)
        dtype = torch.bfloat16 if low else parameter.dtype
        parts.put(name, partitioner.stand_in(parameter.shape, dtype, context.device))
        parameter = assembly.model.get_parameter(name)
        piece = partitioner.cut(parameter)[: len(own)]
        if own:
            parts.copy(name, piece, (Extent(own.start, len(own)),))
    if exact:
        built.fp32_values[id(parameter)] = (exact.start, own_values)
