"""The norm of gradients with a relative error of 3e-7, for clipping and for reports.

On a CPU `torch.linalg.vector_norm` sums the squares of a whole tensor in a few accumulators of the
tensor's precision: in fp32 its error is 1e-5 at a million elements and 2e-3 at forty million. Here
the function gets slices, and their norms are combined in double precision. Gradients in fp32 and
fp64 are not copied. Those in bf16 and fp16 are converted to fp32, a million elements at a time. It
is as fast as one call for the whole tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from bigtrain.tensors.memory_format import flat_view, is_dense
from bigtrain.tensors.shards import local_tensor

_Layout = tuple[DeviceMesh, tuple[Placement, ...]] | None

_SLICE = 2**8
"""Elements whose squares are summed in fp32. The relative error is 3e-7 for equal elements, whose
partial sums all round to one side (7e-6 with slices of 2**13), and 2e-11 for random elements (2e-7
with slices of 2**16)."""
_CONVERTED = 2**20
"""Elements of bf16 and fp16 that are converted to fp32 at a time."""


class GradientNorm:
    """Accumulates the norm of gradients that arrive one by one and need not be stored.

    Args:
        device_type: the device type whose kernels fake tensors represent.
    """

    def __init__(self, device_type: str = "cpu") -> None:
        self._device_type = device_type
        self._norms: dict[_Layout, list[Tensor]] = {}

    @torch.no_grad()
    def add(self, gradients: Iterable[Tensor]) -> None:
        """Add gradients: plain tensors, or DTensors that are sharded or replicated."""
        by_layout: dict[_Layout, list[Tensor]] = {}
        for gradient in gradients:
            by_layout.setdefault(_layout(gradient), []).append(local_tensor(gradient))
        for layout, tensors in by_layout.items():
            norm = local_norm(tensors, self._device_type)
            self._norms.setdefault(layout, []).append(norm)

    @torch.no_grad()
    def total(self) -> Tensor:
        """Return the norm of all added gradients (0-dim). Collective if some are sharded."""
        norms = []
        for layout, parts in self._norms.items():
            norm = _together(parts)
            norms.append(norm if layout is None else _over_ranks(norm, *layout))
        return _together(norms)


def global_norm(gradients: Iterable[Tensor], device_type: str = "cpu") -> Tensor:
    """Return the norm of all gradients: see `GradientNorm`."""
    norm = GradientNorm(device_type)
    norm.add(gradients)
    return norm.total()


@torch.no_grad()
def local_norm(tensors: Sequence[Tensor], device_type: str = "cpu") -> Tensor:
    """Return the norm of plain tensors, of this rank alone.

    Args:
        tensors: tensors on any device.
        device_type: the device type whose kernels fake tensors represent.

    Returns:
        0-dim, on the first tensor's device. The dtype is float64 for tensors of a CPU. For tensors
        of a GPU it is torch's dtype, because kernels there sum as a tree and lose no precision.
    """
    in_slices: list[Tensor] = []
    whole_tensors: list[Tensor] = []
    for value in tensors:
        tensor = torch.view_as_real(value) if value.is_complex() else value
        here = tensor.device.type == "cpu"
        meant_here = device_type == "cpu" or not isinstance(tensor, FakeTensor)
        (in_slices if here and meant_here else whole_tensors).append(tensor)
    norms = [_norm_in_slices(tensor) for tensor in in_slices]
    half = [tensor for tensor in whole_tensors if _is_half(tensor)]
    norms += [torch.linalg.vector_norm(tensor, dtype=torch.float32) for tensor in half]
    if len(half) < len(whole_tensors):
        full = [tensor for tensor in whole_tensors if not _is_half(tensor)]
        norms.append(torch.nn.utils.get_total_norm(full))
    return _together(norms)


def _together(norms: Sequence[Tensor]) -> Tensor:
    """Return the norm of norms, which may be on several devices of a process."""
    if not norms:
        return torch.zeros((), dtype=torch.float64)
    if len(norms) == 1:
        return norms[0]
    return _norm_in_double(torch.stack([norm.to(norms[0]) for norm in norms]))


def _over_ranks(norm: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> Tensor:
    """Return the norm of all ranks' shards, 0-dim and float64. Collective."""
    square = norm.to(mesh.device_type, torch.float64).square()  # shards may be on the host
    for axis, placement in enumerate(placements):
        if not placement.is_replicate():
            dist.all_reduce(square, group=mesh.get_group(axis))
    return square.sqrt()


def _layout(gradient: Tensor) -> _Layout:
    if not isinstance(gradient, DTensor):
        return None
    return gradient.device_mesh, gradient.placements


def _is_half(tensor: Tensor) -> bool:
    return tensor.dtype in (torch.bfloat16, torch.float16)


def _norm_in_double(few: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(few, dtype=torch.float64)
    return norm


def _norm_in_slices(tensor: Tensor) -> Tensor:
    """Return the norm of a tensor on a CPU: 0-dim, float64."""
    if tensor.layout is not torch.strided:  # the gradient of an embedding with sparse=True
        tensor = tensor.coalesce().values()
    if tensor.numel() <= _SLICE:
        return _norm_in_double(tensor)
    most = _CONVERTED if _is_half(tensor) else None
    norms: list[Tensor] = []
    for piece in _pieces(tensor, most):
        # With `dtype=` torch would convert the whole tensor, and sum it less exactly.
        norms += _slice_norms(piece.float() if _is_half(piece) else piece)
    return _norm_in_double(norms[0] if len(norms) == 1 else torch.cat(norms))


def _slice_norms(piece: Tensor) -> Iterator[Tensor]:
    """Yield tensors whose norm is that of the piece: the norms of its slices, and the remainder."""
    if piece.numel() <= _SLICE:
        yield _norm_in_double(piece).view(1)
        return
    flat = flat_view(piece)
    even = flat.numel() // _SLICE * _SLICE
    yield torch.linalg.vector_norm(flat[:even].view(-1, _SLICE), dim=1)
    if even < flat.numel():
        yield flat[even:]


def _pieces(tensor: Tensor, most: int | None) -> Iterator[Tensor]:
    """Yield a tensor in parts without copies: each is dense in memory, or no longer than a slice.

    Args:
        tensor: any strided tensor.
        most: the most elements of a part; None for no limit.
    """
    if is_dense(tensor):
        yield from (tensor,) if most is None else torch.split(flat_view(tensor), most)
    elif tensor.numel() <= _SLICE:
        yield tensor
    else:  # with gaps: a column, or an expanded tensor
        dims = [dim for dim in range(tensor.dim()) if tensor.size(dim) > 1]
        outer = max(dims, key=lambda dim: (tensor.stride(dim), tensor.size(dim)))
        for part in torch.split(tensor, -(-tensor.size(outer) // 2), outer):
            yield from _pieces(part, most)
