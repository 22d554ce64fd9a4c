"""Make fake tensors of the CPU describe a run on CUDA, on a machine without a GPU.

A run on CUDA makes other tensors than a run on a CPU, for four reasons: CUDA's autocast has its own
lists of operations; a norm by the root mean square is one operation on CUDA, and several on a CPU;
dropout saves a mask of bytes on CUDA, and one of the input's dtype on a CPU; attention with dropout
saves no probabilities on CUDA.

The lists are those of ATen's `autocast_mode.h`. The docstring of each names torch's policy.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch import library as operators
from torch._prims_common import suggest_memory_format
from torch.utils._pytree import tree_leaves, tree_map

FP32_OPERATIONS = (
    *("acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p"),
    *("reciprocal", "rsqrt", "sinh", "tan", "pow.Tensor_Scalar", "pow.Tensor_Tensor"),
    *("pow.Scalar", "softplus", "layer_norm", "native_layer_norm", "rms_norm", "group_norm"),
    *("frobenius_norm.dim", "nuclear_norm", "nuclear_norm.dim", "cosine_similarity"),
    *("poisson_nll_loss", "cosine_embedding_loss", "nll_loss", "nll_loss2d", "kl_div"),
    *("hinge_embedding_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "mse_loss"),
    *("margin_ranking_loss", "multilabel_margin_loss", "soft_margin_loss"),
    *("triplet_margin_loss", "multi_margin_loss", "binary_cross_entropy_with_logits"),
    *("dist", "pdist", "cdist", "renorm", "logsumexp", "upsample_nearest1d"),
    *("_upsample_nearest_exact1d", "upsample_nearest2d", "_upsample_nearest_exact2d"),
    *("upsample_nearest3d", "_upsample_nearest_exact3d", "upsample_linear1d"),
    *("upsample_bilinear2d", "_upsample_bilinear2d_aa", "upsample_trilinear3d"),
    *("upsample_bicubic2d", "_upsample_bicubic2d_aa"),
)
"""Operations whose inputs are converted to fp32 (`fp32`)."""
FP32_RESULTS = (
    *("prod", "prod.dim_int", "softmax.int", "log_softmax.int", "cumprod", "cumsum"),
    *("linalg_vector_norm", "linalg_matrix_norm", "linalg_matrix_norm.str_ord"),
    *("sum", "sum.dim_IntList"),
)
"""Operations whose result is in fp32 unless the call names a dtype (torch's list
fp32_set_opt_dtype). Sums and norms convert inside their kernels. `softmax` converts its input in a
separate operation. `cross_entropy` names the dtype of its input, so its logarithms are in bf16."""
LOW_OPERATIONS = (
    *("convolution", "_convolution", "addmv", "addr", "einsum", "mv", "linalg_vecdot"),
    *("chain_matmul", "linalg_multi_dot", "lstm_cell", "gru_cell", "rnn_tanh_cell"),
    *("rnn_relu_cell",),
)
"""Operations that CUDA's autocast runs in bf16 or fp16, and the CPU's leaves as they are
(torch's list lower_precision_fp)."""
WIDEST_OPERATIONS = (
    *("addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "vdot", "index_put"),
    *("tensordot", "scatter_add"),
)
"""Operations whose inputs are converted to the widest dtype among them (torch's list promote)."""
_LOW = (torch.bfloat16, torch.float16)
_Operation = Callable[..., Any]


def stands_for_cuda(device_type: str, device: torch.device) -> bool:
    """Whether CPU tensors on `device` describe a run on CUDA."""
    return device_type == "cuda" and device.type == "cpu"


@contextmanager
def cuda_program() -> Iterator[None]:
    """Make operations on CPU tensors, in all threads, make and save what CUDA's operations do."""
    kernels: Any = operators.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns that kernels of the CPU are overridden
            for name, rule in _autocast_rules().items():
                kernels.impl(name, rule(_overload(name)), "AutocastCPU")
            kernels.impl("dropout", _dropout, "AutogradCPU")
            kernels.impl("rms_norm", _rms_norm, "AutogradCPU")
            kernels.impl("scaled_dot_product_attention", _attention, "AutogradCPU")
        yield
    finally:
        kernels._destroy()


def _autocast_rules() -> dict[str, Callable[[_Operation], _Operation]]:
    """Return the rule of each operation that CUDA's autocast treats differently, by name."""
    on_cuda, on_cpu = _registered("AutocastCUDA"), _registered("AutocastCPU")
    rules: dict[str, Callable[[_Operation], _Operation]] = {
        name: _as_written for name in on_cpu - on_cuda if not name.startswith(("_", "mkldnn"))
    }
    for names, rule in (
        (FP32_OPERATIONS, _in_fp32),
        (FP32_RESULTS, _with_fp32_result),
        (LOW_OPERATIONS, _in_low),
        (WIDEST_OPERATIONS, _in_widest),
    ):
        rules.update((name, rule) for name in names if name in on_cuda)
    return rules


def _registered(key: str) -> set[str]:
    """Return the names of ATen's operations that have a kernel for a dispatch key."""
    registrations = torch._C._dispatch_get_registrations_for_dispatch_key(key)
    return {name.removeprefix("aten::") for name in registrations if name.startswith("aten::")}


def _overload(name: str) -> _Operation:
    packet, _, overload = name.partition(".")
    operation: _Operation = getattr(getattr(torch.ops.aten, packet), overload or "default")
    return operation


def _is_eligible(value: Any) -> bool:
    """Whether autocast may convert a value: a tensor of floating point, but not of fp64."""
    is_wide = isinstance(value, Tensor) and value.dtype == torch.float64
    return isinstance(value, Tensor) and value.is_floating_point() and not is_wide


def _without_autocast(operation: _Operation, args: Any, kwargs: Any, dtype: torch.dtype) -> Any:
    """Call an operation without autocast, with its eligible tensors converted to this dtype."""

    def convert(value: Any) -> Any:
        return value.to(dtype) if _is_eligible(value) else value

    with torch.autocast("cpu", enabled=False):
        return operation(*tree_map(convert, args), **tree_map(convert, kwargs))


def _in_fp32(operation: _Operation) -> _Operation:
    def run(*args: Any, **kwargs: Any) -> Any:
        return _without_autocast(operation, args, kwargs, torch.float32)

    return run


def _in_low(operation: _Operation) -> _Operation:
    def run(*args: Any, **kwargs: Any) -> Any:
        return _without_autocast(operation, args, kwargs, torch.get_autocast_dtype("cpu"))

    return run


def _in_widest(operation: _Operation) -> _Operation:
    def run(*args: Any, **kwargs: Any) -> Any:
        dtypes = [leaf.dtype for leaf in tree_leaves((args, kwargs)) if _is_eligible(leaf)]
        is_fp32 = torch.float32 in dtypes
        dtype = torch.float32 if is_fp32 else torch.get_autocast_dtype("cpu")
        return _without_autocast(operation, args, kwargs, dtype)

    return run


def _with_fp32_result(operation: Any) -> _Operation:
    names = [argument.name for argument in operation._schema.arguments]
    place = names.index("dtype")

    def run(*args: Any, **kwargs: Any) -> Any:
        named = args[place] if len(args) > place else kwargs.pop("dtype", None)
        dtype = torch.float32 if named is None and _is_eligible(args[0]) else named
        with torch.autocast("cpu", enabled=False):
            return operation(*args[:place], **kwargs, dtype=dtype)

    return run


def _as_written(operation: Any) -> _Operation:
    """Return a kernel without conversions, for an operation that only the CPU's autocast knows.

    If it is composed of other operations, autocast still sees these.
    """
    is_composed = torch._C._dispatch_has_kernel_for_dispatch_key(
        operation.name(), "CompositeImplicitAutograd"
    )
    if is_composed:
        composed: _Operation = operation.decompose
        return composed

    def run(*args: Any, **kwargs: Any) -> Any:
        keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
        with torch._C._ExcludeDispatchKeyGuard(keys):
            return operation(*args, **kwargs)

    return run


def _dropout(tensor: Tensor, p: float, train: bool) -> Tensor:  # noqa: FBT001
    if not train or p == 0:
        return tensor
    return torch.native_dropout(tensor, p, train)[0]


class _FusedRmsNorm(torch.autograd.Function):
    """`aten::_fused_rms_norm`, which is composed of other operations on a CPU."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, shape: Any, weight: Tensor | None, eps: float | None
    ) -> Tensor:
        with torch._C._AutoDispatchBelowAutograd():
            result, inverse = torch.ops.aten._fused_rms_norm.default(rows, shape, weight, eps)
        ctx.save_for_backward(rows, inverse, weight)
        ctx.shape = shape
        return result  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        rows, inverse, weight = ctx.saved_tensors
        wanted = [ctx.needs_input_grad[0], ctx.needs_input_grad[2]]
        with torch._C._AutoDispatchBelowAutograd():
            of_rows, of_weight = torch.ops.aten._fused_rms_norm_backward.default(
                gradients[0], rows, ctx.shape, inverse, weight, wanted
            )
        return of_rows, None, of_weight, None


def _rms_norm(
    rows: Tensor, shape: Any, weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    """Normalize as CUDA does: in one operation, unless dtypes or the memory format differ."""
    is_mixed = weight is not None and weight.dtype != rows.dtype
    if is_mixed or suggest_memory_format(rows) is not torch.contiguous_format:
        decomposed: Tensor = torch.ops.aten.rms_norm.default.decompose(rows, shape, weight, eps)
        return decomposed
    result: Tensor = _FusedRmsNorm.apply(rows, shape, weight, eps)
    return result


def _attention(*args: Any, dropout_p: float = 0.0, **kwargs: Any) -> Tensor:
    """Call attention without dropout: flash attention saves no mask but draws it again."""
    del dropout_p
    # query, key, value, mask, dropout_p, is_causal
    arguments = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
    result: Tensor = torch.ops.aten.scaled_dot_product_attention.default.decompose(
        *arguments, **kwargs
    )
    return result
