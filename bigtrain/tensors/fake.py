"""Models and batches without their numbers: fake twins of the same shapes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from bigtrain.tensors.fake_mode import FakeMode

Result = TypeVar("Result")


def meta_copy(model: nn.Module) -> nn.Module:
    """A copy of a model without its numbers, on the meta device: to be profiled later.

    Once a technique has sharded a model, the model as it was is gone.
    """
    return fake_model(model, torch.device("meta"), double=False)


def run_without_numbers(run: Callable[[torch.device], Result]) -> Result:
    """Run something where no tensor has numbers: on the meta device, and if that fails on fakes.

    Meta kernels are several times as fast; but code that looks at values where it sees no tracing
    (masks in transformers) only takes fake tensors.

    Args:
        run: makes its tensors by `fake_model` on the device that it is given.

    Raises:
        Exception: of any kind, of the second try.
    """
    meta = torch.device("meta")
    with suppress(Exception), meta:
        return run(meta)
    with FakeMode():
        return run(torch.device("cpu"))


def fake_model(
    model: nn.Module, device: torch.device, *, double: bool, constants: Iterable[Tensor] = ()
) -> nn.Module:
    """A copy of the module tree with fake tensors of the same shapes in it.

    The copy's memo holds a fake twin for every tensor, so that nothing real is ever copied and
    tied parameters stay tied.

    Args:
        model: on any device; it is left as it is.
        device: of the twins.
        double: whether they are fp64 in place of lower precision.
        constants: tensors that are plain attributes, and are to be fakes, too; they stay where
            they are unless they are on the meta device.
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
    """A twin of a tensor on another device; anything else as it is."""
    if not isinstance(leaf, Tensor):
        return leaf
    dtype = torch.float64 if double and leaf.is_floating_point() else leaf.dtype
    return torch.empty_strided(leaf.shape, leaf.stride(), dtype=dtype, device=device)
