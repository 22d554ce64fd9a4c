"""All that is used of DeepSpeed's AutoTP: its layers, its process groups, and in which versions.

Nothing of it is replaced. It is called as `deepspeed.initialize` calls it, before that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from bigtrain.machine.libraries import ForeignLibrary, foreign_names

_AUTO_TP = "deepspeed.module_inject.auto_tp"
_CONFIG = "deepspeed.module_inject.autotp_config"
_GROUPS = "deepspeed.utils.groups"
_LAYERS = "deepspeed.module_inject.layers"

AUTOTP = ForeignLibrary("deepspeed", "0.19.8", "0.19.9", (
    *foreign_names("read", "slice layers by a plan", f"{_AUTO_TP}.AutoTP",
        "mp_size mp_group update_linear_policies _replace_module"),
    *foreign_names("read", "say what is sliced", f"{_CONFIG}.AutoTPConfig", "from_dict"),
    *foreign_names("read", "have layers that are trained", _LAYERS,
        "set_autotp_mode is_autotp_training_mode LinearLayer SubParamLinearLayer"),
    *foreign_names("replace", "give it the groups of our mesh", _GROUPS,
        "_DATA_PARALLEL_GROUP _MODEL_PARALLEL_GROUP _TENSOR_MODEL_PARALLEL_GROUP mpu"),
))  # fmt: skip

Spec = Mapping[str, Any]
"""One of AutoTP's `layer_specs`."""


def replace_layers(
    model: nn.Module, specs: Sequence[Spec], ranks: int, group: dist.ProcessGroup | None
) -> None:
    """Put AutoTP's layers in place of linear ones, and change what it changes beside them.

    Without a group parameters stay whole, and all else is as the first rank has it.

    Args:
        model: values may be anything, shapes are those of the whole.
        specs: AutoTP's.
        ranks: of the tp axis.
        group: them.
    """
    config = import_module(_CONFIG).AutoTPConfig.from_dict(partition_config(specs))
    config.tp_size = ranks
    with training_layers():
        slicer = import_module(_AUTO_TP).AutoTP(
            module=model,
            all_reduce_linears=(),
            prefix="",
            state_dict=None,
            linear_layer_setting=(nn.Linear, nn.Embedding),
            orig_layer_impl=None,
            partition_config=config,
            model_config=getattr(model, "config", None),
            training_mode=True,
        )
        # Not by its own method, which takes no group for that of ranks it has been told of.
        slicer.mp_size, slicer.mp_group = ranks, group
        slicer.update_linear_policies()
        slicer._replace_module(model)


def partition_config(specs: Sequence[Spec]) -> dict[str, Any]:
    """The section of a DeepSpeed configuration that says what is sliced."""
    return {"use_default_specs": False, "layer_specs": [dict(spec) for spec in specs]}


@contextmanager
def training_layers() -> Iterator[None]:
    """Have AutoTP's layers made and run for training, for a while."""
    layers: Any = import_module(_LAYERS)
    before = layers.is_autotp_training_mode()
    layers.set_autotp_mode(training=True)
    try:
        yield
    finally:
        layers.set_autotp_mode(training=before)


def use_groups(
    tp_group: dist.ProcessGroup, dp_group: dist.ProcessGroup, closing: ExitStack
) -> None:
    """Let DeepSpeed's engine divide the ranks as the mesh does, until something closes."""
    groups = import_module(_GROUPS).__dict__
    groups["_TENSOR_MODEL_PARALLEL_GROUP"] = groups["_MODEL_PARALLEL_GROUP"] = tp_group
    groups["_DATA_PARALLEL_GROUP"] = dp_group
    names = ("_TENSOR_MODEL_PARALLEL_GROUP", "_MODEL_PARALLEL_GROUP", "_DATA_PARALLEL_GROUP", "mpu")
    for name in names:
        closing.callback(groups.__setitem__, name, None)
    closing.enter_context(training_layers())


def column_layers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """AutoTP's layers that are sliced by what comes out, by name."""
    layers: Any = import_module(_LAYERS)
    kinds = (layers.LinearLayer, layers.SubParamLinearLayer)
    return [(name, m) for name, m in model.named_modules() if isinstance(m, kinds)]


@torch.no_grad()
def keep_values(
    model: nn.Module,
    specs: Sequence[Spec],
    group: dist.ProcessGroup,
    shapes: Mapping[str, tuple[int, ...]],
) -> list[str]:
    """Replace layers of a model that holds this rank's slices; the values stay where they are.

    AutoTP slices whole weights: it is given ones of the right shape that take no memory.

    Args:
        model: its sliced parameters are this rank's.
        specs: AutoTP's.
        group: the ranks.
        shapes: of the whole parameters that are sliced, by name.

    Returns:
        The names of parameters that AutoTP would have given another shape.
    """
    own = {name: model.get_parameter(name).data for name in shapes}
    for name, shape in shapes.items():
        held = own[name]
        model.get_parameter(name).data = held.new_zeros(()).expand(shape)
    replace_layers(model, specs, dist.get_world_size(group), group)
    differ = []
    for name, held in own.items():
        parameter = model.get_parameter(name)
        if parameter.shape != held.shape:
            differ.append(name)
        parameter.data = held
    model.ds_autotp_parsed = True  # type: ignore[assignment]  # or it would slice once more
    return differ
