"""Models and batches without their numbers: fake twins of the same shapes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

Result = TypeVar("Result")

_LOW = (torch.bfloat16, torch.float16)
_NORMS = (
    torch.ops.aten.native_layer_norm.default,
    torch.ops.aten.native_group_norm.default,
    torch.ops.aten.native_batch_norm.default,
)


class NormStatistics(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Statistics of norms in the precision of the kernels, entered inside a fake mode.

    torch's fakes have those of a low input in its precision; kernels keep them in float32 for the
    backward pass, those of the CPU where anything else that they are given is float32.

    Args:
        of_cuda: whether the kernels are CUDA's.
    """

    def __init__(self, *, of_cuda: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._of_cuda = of_cuda

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Stay entered while a compiled block runs; what torch does to compile it is not seen."""
        return True

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run the operation, and convert the statistics that it returns."""
        del types
        result = func(*args, **(kwargs or {}))
        if func not in _NORMS or result[0].device.type != "cpu" or args[0].dtype not in _LOW:
            return result
        others = [leaf for leaf in args[1:] if isinstance(leaf, Tensor)]
        if not self._of_cuda and all(other.dtype != torch.float32 for other in others):
            return result
        return (result[0], *(statistic.float() for statistic in result[1:]))


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
    with FakeTensorMode():
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
