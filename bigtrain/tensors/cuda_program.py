"""Make fake tensors of the CPU describe a run on CUDA, on a machine without a GPU.

CUDA and CPU save different tensors for the backward pass, for three reasons: CUDA's autocast has
its own list of fp32 operations; dropout saves a mask of bytes on CUDA, and one of the input's dtype
on a CPU; attention with dropout saves no probabilities on CUDA.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch import library as operators
from torch.utils._pytree import tree_map

FP32_OPERATIONS = (
    *("acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p"),
    *("reciprocal", "rsqrt", "sinh", "tan", "pow.Tensor_Scalar", "pow.Tensor_Tensor"),
    *("pow.Scalar", "softplus", "layer_norm", "native_layer_norm", "rms_norm", "group_norm"),
    *("cosine_similarity", "poisson_nll_loss", "cosine_embedding_loss", "nll_loss", "nll_loss2d"),
    *("hinge_embedding_loss", "kl_div", "l1_loss", "smooth_l1_loss", "huber_loss", "mse_loss"),
    *("binary_cross_entropy_with_logits", "dist", "cdist", "renorm", "logsumexp"),
    *("prod", "prod.dim_int", "softmax.int", "log_softmax.int", "cumprod", "cumsum"),
    *("linalg_vector_norm", "sum", "sum.dim_IntList"),
)
"""Operations that run in fp32 under CUDA's autocast: those of ATen's `autocast_mode.h` that models
use."""
_LOW = (torch.bfloat16, torch.float16)


def stands_for_cuda(device_type: str, device: torch.device) -> bool:
    """Whether CPU tensors on `device` describe a run on CUDA."""
    return device_type == "cuda" and device.type == "cpu"


@contextmanager
def cuda_program() -> Iterator[None]:
    """Make operations on CPU tensors, in all threads, save what CUDA's operations save."""
    kernels: Any = operators.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns that kernels of the CPU are overridden
            for name in FP32_OPERATIONS:
                kernels.impl(name, _in_fp32(_overload(name)), "AutocastCPU")
            kernels.impl("dropout", _dropout, "AutogradCPU")
            kernels.impl("scaled_dot_product_attention", _attention, "AutogradCPU")
        yield
    finally:
        kernels._destroy()


def _overload(name: str) -> Callable[..., Any]:
    packet, _, overload = name.partition(".")
    operation: Callable[..., Any] = getattr(getattr(torch.ops.aten, packet), overload or "default")
    return operation


def _in_fp32(operation: Callable[..., Any]) -> Callable[..., Any]:
    def to_float32(value: Any) -> Any:
        return value.float() if isinstance(value, Tensor) and value.dtype in _LOW else value

    def run(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast("cpu", enabled=False):
            return operation(*tree_map(to_float32, args), **tree_map(to_float32, kwargs))

    return run


def _dropout(tensor: Tensor, p: float, train: bool) -> Tensor:  # noqa: FBT001
    if not train or p == 0:
        return tensor
    return torch.native_dropout(tensor, p, train)[0]


def _attention(*args: Any, dropout_p: float = 0.0, **kwargs: Any) -> Tensor:
    """Call attention without dropout: flash attention saves no mask but draws it again."""
    del dropout_p
    # query, key, value, mask, dropout_p, is_causal
    arguments = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
    result: Tensor = torch.ops.aten.scaled_dot_product_attention.default.decompose(
        *arguments, **kwargs
    )
    return result
