"""Putting a model under DeepSpeed without ever holding more of it than training will.

DeepSpeed takes a model that is whole, makes a flat copy of it and copies of that. Here the
parameters of stages 1 and 2 are filled straight into the flat buffer, and those of stage 3 are
cut as soon as their module has its values. In fp32 the copy that DeepSpeed would update beside
the parameters is dropped: the parameters themselves are updated. In bf16 that copy gets the
initial values as they were before they were rounded.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
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
from bigtrain.optim.whole import WholeOptimizer, drop_empty_groups
from bigtrain.strategies.deepspeed_adapter import (
    Partitioner,
    connect_deepspeed,
    parse_config,
    start_engine,
)


@contextmanager
def blaming_file(path: str | None) -> Iterator[None]:
    """Let what DeepSpeed dislikes of a user's file be the file's fault, in one line.

    Raises:
        ConfigError: for what DeepSpeed raises where a file is given.
    """
    try:
        yield
    except Exception as error:
        known = isinstance(error, AssertionError | TypeError | ValueError)
        if path is None or not (known or type(error).__name__ == "DeepSpeedConfigError"):
            raise
        said = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(f"{path}: DeepSpeed does not take it: {said[:300]}") from error


def check_file(path: str, config: dict[str, Any]) -> None:
    """Have DeepSpeed read what it will be given, before the ranks meet.

    Args:
        path: of the user's file.
        config: with its "auto" values filled in.

    Raises:
        ConfigError: DeepSpeed refuses it.
    """
    # One process reads it: the batch of all ranks would not be that of its micro-batches.
    alone = {key: value for key, value in config.items() if key != "train_batch_size"}
    with blaming_file(path), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        parse_config(alone)


@dataclass
class BuiltEngine:
    """A DeepSpeed engine, and what was put aside for it."""

    engine: Any
    fp32_values: dict[int, tuple[int, Tensor]] = field(default_factory=dict)
    """fp32 values by the id of a parameter, and where they begin in it: what this rank updates
    of it, or more."""
    closing: ExitStack = field(default_factory=ExitStack)
    """What DeepSpeed changes outside of its engine, put back at the end."""
    dtypes: dict[str, torch.dtype] = field(default_factory=dict)
    """The model's own, by the names of parameters: of what is frozen, which is saved in these."""
    optimizer: torch.optim.Optimizer | None = None
    """The user's."""
    begin_state: Callable[[], None] | None = None
    """Lets it begin its state on the pieces, where it has some before its first step."""
    tracking: Callable[[], bool] = lambda: False
    """Whether memory is being tracked now."""


def build_engine(
    assembly: Assembly, config: dict[str, Any], stage: int, path: str | None
) -> BuiltEngine:
    """Fill the model in, shard it, and put DeepSpeed's engine around it.

    Args:
        assembly: the model has no values yet.
        config: for DeepSpeed.
        stage: of it.
        path: of the user's file, where the config is from one.
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
        whole = flat_optimizer(assembly)
        trained = {n for n, p in assembly.model.named_parameters() if p.requires_grad}
        groups = [[name for name in names if name in trained] for names in whole.groups]
        if stage == 3:
            _fill_in_shards(assembly, config, built, to_bf16=low)
        else:
            _fill_flat(
                assembly,
                [g for g in groups if g],
                built,
                to_bf16=low,
                is_dealt_out=_is_dealt_out(config),
            )
        assembly.materialize(names_of(assembly.model))
        optimizer = whole.put_on({n: [assembly.model.get_parameter(n)] for n in trained})
        # DeepSpeed makes a flat piece of each group, and none of an empty one.
        drop_empty_groups(optimizer)
        optimizer.state.clear()
        with blaming_file(path):
            built.engine = start_engine(
                assembly.model,
                optimizer,
                config,
                flatten=_joined,
                align=_aligned,
                in_place=stage < 3 and not _is_dealt_out(config) and not _is_padded(config),
            )
        built.begin_state = whole.begin_state if whole.begins_with_state else None
        built.optimizer = optimizer
        failing.pop_all()
    return built


def _copy_without_hooks(model: nn.Module, device: torch.device, closing: ExitStack) -> None:
    """Let a prediction that is made later see the model as it was, whole and without hooks.

    A copy would call DeepSpeed's hooks, which act on the model that is being trained.
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
    """The optimizer, which is still without parameters.

    Raises:
        ConfigError: nothing is to be trained, parameters are not fp32, or the optimizer needs
            whole tensors or leaves some out.
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
            f"train.precision=bf16: DeepSpeed makes bf16 of all parameters, and the kernels of "
            f"{type(statistics[0]).__name__} take none beside fp32 statistics. "
            "Use --strategy zero1_torch or fsdp, or train.precision=fp32."
        )
    whole = WholeOptimizer.of(assembly.make_optimizer, named)
    if not whole.kind.elementwise:
        raise ConfigError(
            f"DeepSpeed gives the optimizer flat stretches of parameters, and {whole.kind_name} "
            "needs whole ones. Use --strategy zero1_torch."
        )
    left_out = whole.left_out(named)
    if left_out:
        raise ConfigError(
            f"optimizer: it leaves out {first_names(left_out)}, and DeepSpeed updates all that is "
            "trained. Call requires_grad_(False) on what is not to be, or use --strategy "
            "zero1_torch."
        )
    return whole


def _is_dealt_out(config: dict[str, Any]) -> bool:
    """Whether DeepSpeed puts the parameters into another order than they come in."""
    return bool(json_section(config, "zero_optimization").get("round_robin_gradients", False))


def _is_padded(config: dict[str, Any]) -> bool:
    """Whether DeepSpeed leaves room between the parameters."""
    return bool(json_section(config, "zero_optimization").get("parameter_alignment", False))


def _fill_flat(
    assembly: Assembly,
    groups: list[list[str]],
    built: BuiltEngine,
    *,
    to_bf16: bool,
    is_dealt_out: bool,
) -> None:
    """Stages 1 and 2: each group's parameters one after the other in one buffer.

    With `is_dealt_out`, whole parameters' fp32 values are put aside: any rank may update them.
    """
    context = assembly.context
    ranks, rank = context.dp_size, context.dp_rank
    dtype = torch.bfloat16 if to_bf16 else torch.float32
    for names in groups:
        parameters = [assembly.model.get_parameter(name) for name in names]
        unit = 2 * ranks  # DeepSpeed's alignment
        size = -(-sum(p.numel() for p in parameters) // unit) * unit
        flat = torch.zeros(size, dtype=dtype, device=context.device)
        own_range = range(rank * (size // ranks), (rank + 1) * (size // ranks))
        offset = 0
        for name in names:
            assembly.materialize([name])
            parameter = assembly.model.get_parameter(name)  # a new one where it got its values
            values = parameter.detach()
            stop = offset + values.numel()
            first, last = max(offset, own_range.start), min(stop, own_range.stop)
            if to_bf16 and is_dealt_out:
                built.fp32_values[id(parameter)] = (0, values.reshape(-1).clone())
            elif to_bf16 and first < last:
                kept = values.reshape(-1)[first - offset : last - offset].clone()
                built.fp32_values[id(parameter)] = (first - offset, kept)
            view = flat[offset:stop].view(values.shape)
            view.copy_(values)
            parameter.data = view
            offset = stop
            del values


def _fill_in_shards(
    assembly: Assembly, config: dict[str, Any], built: BuiltEngine, *, to_bf16: bool
) -> None:
    """Stage 3: module by module, so that no rank ever has more than one module whole."""
    partitioner = Partitioner(config, built.closing)
    ranks, rank = assembly.context.dp_size, assembly.context.dp_rank
    names = set(names_of(assembly.model))
    for path, module in assembly.model.named_modules():
        own_names = {
            f"{path}.{name}".lstrip(".") for name in (*module._parameters, *module._buffers)
        }
        assembly.materialize([name for name in own_names if name in names])
        for parameter in module._parameters.values():
            if parameter is None or partitioner.has_cut(parameter):
                continue
            if to_bf16 and parameter.is_floating_point():
                if parameter.requires_grad:
                    size = -(-parameter.numel() // ranks)
                    start = rank * size
                    own_values = parameter.detach().reshape(-1)[start : start + size].clone()
                    built.fp32_values[id(parameter)] = (start, own_values)
                parameter.data = parameter.data.to(torch.bfloat16)
            # Every rank has made the same values, so that nothing need be sent.
            partitioner.cut(parameter)


def _joined(tensors: Sequence[Tensor], otherwise: Callable[..., Tensor]) -> Tensor:
    """Tensors as one, without a copy where they lie end to end."""
    joined_view = end_to_end(tensors)
    return otherwise(tensors) if joined_view is None else joined_view


def _aligned(
    tensors: Sequence[Tensor], unit: int, otherwise: Callable[..., Sequence[Tensor]]
) -> Sequence[Tensor]:
    """Tensors with padding up to a unit, which lies behind them where they lie end to end."""
    joined_view = end_to_end(tensors)
    padding = 0 if joined_view is None else -joined_view.numel() % unit
    if joined_view is None or not padding:
        return otherwise(tensors, unit)
    stop = joined_view.storage_offset() + joined_view.numel()
    free_elements = joined_view.untyped_storage().nbytes() // joined_view.element_size() - stop
    if free_elements < padding:
        return otherwise(tensors, unit)
    return [*tensors, joined_view.as_strided((padding,), (1,), stop)]


def end_to_end(tensors: Sequence[Tensor]) -> Tensor | None:
    """One flat view of tensors that follow each other in memory; None where they do not."""
    first = tensors[0].detach()
    offset, storage = first.storage_offset(), first.untyped_storage()._cdata
    start = offset
    for tensor in tensors:
        if (
            tensor.dtype != first.dtype
            or not tensor.is_contiguous()
            or tensor.untyped_storage()._cdata != storage
            or tensor.storage_offset() != offset
        ):
            return None
        offset += tensor.numel()
    return first.as_strided((offset - start,), (1,), start)
