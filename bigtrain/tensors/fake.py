"""Fake and meta copies of models and batches: the same shapes without values."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from bigtrain.tensors.fake_masks import leave_out_unneeded_masks
from bigtrain.tensors.fake_mode import FakeMode

Result = TypeVar("Result")


def meta_copy(model: nn.Module) -> nn.Module:
    """Return a copy of a model on the meta device, to be profiled after the model was sharded."""
    return fake_model(model, torch.device("meta"), double=False)


def run_without_numbers(run: Callable[[torch.device], Result]) -> Result:
    """Run a function on the meta device or, if that fails, on fake tensors.

    Meta kernels are several times as fast. But code that reads values unless it is traced, such as
    that for masks in transformers, runs only on fake tensors.

    Args:
        run: called with a device, on which it makes its tensors by `fake_model`.

    Raises:
        Exception: any exception on fake tensors.
    """
    leave_out_unneeded_masks()
    meta = torch.device("meta")
    with suppress(Exception), meta:
        return run(meta)
    with FakeMode():
        return run(torch.device("cpu"))


def fake_model(
    model: nn.Module, device: torch.device, *, double: bool, constants: Iterable[Tensor] = ()
) -> nn.Module:
    """Return a copy of the module tree with fake tensors of the same shapes.

    deepcopy's memo maps every tensor to its fake twin, so that no values are copied and tied
    parameters stay tied.

    Args:
        model: a model on any device; it is not changed.
        device: the device of the fake tensors.
        double: whether floating-point tensors become fp64.
        constants: tensors in plain attributes that become fake as well. A meta tensor gets
            `device`; any other tensor keeps its device.
    """
    memo: dict[int, object] = {}
    for parameter in model.parameters():
        twin = nn.Parameter(
            fake_tensor(parameter, device, double=double), requires_grad=parameter.requires_grad
        )
        memo[id(parameter)] = twin
    for buffer in model.buffers():
        memo[id(buffer)] = fake_tensor(buffer, device, double=double)
    for tensor in constants:
        memo[id(tensor)] = fake_tensor(tensor, device if tensor.is_meta else tensor.device)
    return copy.deepcopy(model, memo)


def fake_tensor(leaf: Any, device: torch.device, *, double: bool = False) -> Any:
    """Return an empty tensor of the same shape and strides on a device; anything else itself."""
    if not isinstance(leaf, Tensor):
        return leaf
    dtype = torch.float64 if double and leaf.is_floating_point() else leaf.dtype
    return torch.empty_strided(leaf.shape, leaf.stride(), dtype=dtype, device=device)
