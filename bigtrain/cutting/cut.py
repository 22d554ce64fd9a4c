"""The cut of a model: the calls before which it is cut, the owners of tensors, and the stages."""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bigtrain.cutting.cut_points import OuterCalls
from bigtrain.cutting.placeholder import PlaceholderTensor, placeholder_like
from bigtrain.cutting.stage import Stage
from bigtrain.cutting.stage_program import stages_using
from bigtrain.cutting.traced_model import CallSite, TracedModel
from bigtrain.errors import ConfigError
from bigtrain.losses.chunked_cross_entropy import attach_head
from bigtrain.losses.loss import Loss
from bigtrain.models.blocks import find_blocks
from bigtrain.models.parameters import named_tensors
from bigtrain.tracing.call_hooks import intercept_calls
from bigtrain.tracing.records import ForwardTrace


@dataclass(frozen=True)
class Cut:
    """A cut of a model into stages; it is the same on all ranks."""

    call_sites: tuple[CallSite, ...]
    """The calls before which the model is cut."""
    owners: dict[str, tuple[int, ...]]
    """The indices of the stages that use each parameter and buffer, in order, by first name."""
    aliases: dict[str, str]
    """The first name of a tied tensor, by each of its other names."""
    cut_through: frozenset[str]
    """Names of the modules whose own code every stage runs, because a cut goes through them."""
    traced_model: TracedModel

    @property
    def stages(self) -> int:
        """The number of stages."""
        return len(self.call_sites) + 1

    def tensor_names_of(self, stages: Collection[int]) -> set[str]:
        """Return the first names of the parameters and buffers that these stages use."""
        return {name for name, owners in self.owners.items() if set(owners) & set(stages)}

    @property
    def ties(self) -> list[tuple[str, tuple[int, ...]]]:
        """The parameters that several stages use: the first name and the stages of each."""
        twin = dict(self.traced_model.fake_model.named_parameters())
        return [(n, owners) for n, owners in self.owners.items() if len(owners) > 1 and n in twin]

    def strip(self, model: nn.Module, stages: Collection[int], device: torch.device) -> None:
        """Replace the parameters and buffers of other stages by placeholders, in place.

        The placeholders have the dtypes of the trace, so that code that compares dtypes takes the
        same path.

        Args:
            model: the whole model, which is changed.
            stages: the indices of the stages whose tensors stay.
            device: the device that the placeholders report.
        """
        own_names = self.tensor_names_of(stages)
        traced = named_tensors(self.traced_model.fake_model)
        placeholders: dict[int, tuple[Tensor, PlaceholderTensor]] = {}
        for path, module in model.named_modules():
            for table in (module._parameters, module._buffers):
                for key, tensor in list(table.items()):
                    qualified = f"{path}.{key}" if path else key
                    if tensor is None or self.aliases.get(qualified, qualified) in own_names:
                        continue
                    del table[key]
                    dtype = traced[qualified].dtype if qualified in traced else tensor.dtype
                    like = tensor.to("meta", dtype)
                    _, placeholder = placeholders.setdefault(
                        id(tensor), (tensor, placeholder_like(like, device))
                    )
                    placeholder._is_param = isinstance(tensor, nn.Parameter)
                    module.__dict__[key] = placeholder
        for module in model.modules():  # recurrent layers have lists of parameters
            for key, value in module.__dict__.items():
                if isinstance(value, list) and any(id(item) in placeholders for item in value):
                    module.__dict__[key] = [
                        placeholders[id(item)][1] if id(item) in placeholders else item
                        for item in value
                    ]

    def stage(self, model: nn.Module, index: int, loss: Loss, device: torch.device) -> Stage:
        """Make one stage of a model.

        Args:
            model: the modules of the whole model, after `strip`; their calls are intercepted.
            index: the index of the stage.
            loss: the loss, which the last stage computes.
            device: the device on which the stage computes.
        """
        attach_head(loss, model)
        intercept_calls(model.named_modules())

        def program(micro_batch: Any, training: bool) -> Any:  # noqa: FBT001
            stage_program = self.traced_model.program(
                micro_batch, training=training, places=self.call_sites
            )
            for name, used in stage_program.used.items():
                if not set(used) <= set(self.owners[name]):
                    raise ConfigError(
                        f"strategy.cut: stage {used[-1]} uses {name!r} "
                        f"{'in training' if training else 'in evaluation'} with these shapes, and "
                        f"stage {self.owners[name][0]} owns it. Name other places in "
                        "strategy.cut.at."
                    )
            return stage_program

        split_modules, blocks = self.cut_through, find_blocks(self.traced_model.fake_model)
        own_blocks = tuple(name for name, _ in blocks if name not in split_modules)
        return Stage(model, index, self.stages, program, loss, device, split_modules, own_blocks)


def copy_modules(model: nn.Module) -> nn.Module:
    """Return a copy of the modules that shares the parameters and buffers."""
    tensors = (*model.parameters(), *model.buffers())
    return copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})


def cut_at(trace: ForwardTrace, calls: Sequence[int], traced_model: TracedModel) -> Cut:
    """Make the cut before these calls of a trace.

    Args:
        trace: the trace of the model.
        calls: the indices of the calls in the trace, in the order of execution.
        traced_model: the model.

    Raises:
        ConfigError: several stages would use a parameter with a gradient hook, or tensors that are
            different objects on the same memory.
    """
    model = traced_model.fake_model
    ticks = [trace.calls[call].begin for call in calls]
    named: dict[str, Tensor] = dict(model.named_parameters()) | dict(model.named_buffers())
    all_names: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False)) | dict(
        model.named_buffers(remove_duplicate=False)
    )
    first_names = {id(tensor): name for name, tensor in named.items()}
    places = tuple((trace.calls[call].name, trace.calls[call].number) for call in calls)
    owners = stages_using(trace, ticks)
    for name, used in traced_model.uses(places).items():
        owners[name] = tuple(sorted({*owners.get(name, ()), *used}))
    starts = _first_stages(trace, ticks)
    for name in named:  # a tensor that no pass uses belongs to the stage of its module
        if name not in owners:
            path = name.rpartition(".")[0]
            while path and path not in starts:
                path = path.rpartition(".")[0]
            owners[name] = (starts.get(path, 0),)
    aliases = {n: first_names[id(t)] for n, t in all_names.items() if first_names[id(t)] != n}
    for name in traced_model.hooked:
        if len(owners[name]) > 1:
            raise ConfigError(
                f"strategy.cut: {name!r} has a gradient hook, and stages {owners[name]} would each "
                "call it with a part of the gradient. Name places in strategy.cut.at that keep its "
                "uses together, or remove the hook."
            )
    for first_tensor, second_tensor in traced_model.shared:
        if owners[first_tensor] != owners[second_tensor] or len(owners[first_tensor]) > 1:
            raise ConfigError(
                f"strategy.cut: {first_tensor!r} and {second_tensor!r} are different tensors on "
                f"the same memory, and stages {owners[first_tensor]} and {owners[second_tensor]} "
                "use them. Make them one parameter, or name places in strategy.cut.at that keep "
                "them together."
            )
    split_modules = frozenset(OuterCalls(trace, calls).names)
    return Cut(places, {n: owners[n] for n in named}, aliases, split_modules, traced_model)


def _first_stages(trace: ForwardTrace, ticks: Sequence[int]) -> dict[str, int]:
    """Return the stage in which each module is called first, by module name."""
    starts: dict[str, int] = {}
    for call in trace.calls:
        starts.setdefault(call.name, sum(tick <= call.begin for tick in ticks))
    return starts
