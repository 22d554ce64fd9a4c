"""The norm of gradients, right to 3e-7: one for clipping and for what is reported.

On a CPU `torch.linalg.vector_norm` adds the squares of a whole tensor up in a few numbers of its
own precision: in fp32 it loses 1e-5 at a million elements and 2e-3 at forty million. Here it is
given slices, and their norms are added up in double: nothing is copied, and it takes as long.
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
"""Elements whose squares are added up in fp32. Equal ones, whose sums are all rounded to one side,
lose 3e-7 so and 7e-6 in 2**13; random ones 2e-11, and 2e-7 in 2**16."""
_CONVERTED = 2**20
"""Elements of bf16 and fp16 that are in fp32 at a time."""


class GradientNorm:
    """The norm of gradients that are given one by one or together, and need not stay.

    Args:
        device_type: whose kernels are meant where tensors are fake.
    """

    def __init__(self, device_type: str = "cpu") -> None:
        self._device_type = device_type
        self._norms: dict[_Layout, list[Tensor]] = {}

    @torch.no_grad()
    def add(self, gradients: Iterable[Tensor]) -> None:
        """Count gradients in: plain tensors, or DTensors that are sharded or whole on the ranks."""
        by_layout: dict[_Layout, list[Tensor]] = {}
        for gradient in gradients:
            by_layout.setdefault(_layout(gradient), []).append(local_tensor(gradient))
        for layout, tensors in by_layout.items():
            norm = local_norm(tensors, self._device_type)
            self._norms.setdefault(layout, []).append(norm)

    @torch.no_grad()
    def total(self) -> Tensor:
        """The norm of all that was counted: 0-dim. Collective where they are in shards."""
        norms = []
        for layout, parts in self._norms.items():
            norm = _together(parts)
            norms.append(norm if layout is None else _over_ranks(norm, *layout))
        return _together(norms)


def global_norm(gradients: Iterable[Tensor], device_type: str = "cpu") -> Tensor:
    """The norm of all gradients together: see `GradientNorm`."""
    norm = GradientNorm(device_type)
    norm.add(gradients)
    return norm.total()


@torch.no_grad()
def local_norm(tensors: Sequence[Tensor], device_type: str = "cpu") -> Tensor:
    """The norm of plain tensors together, of this rank alone.

    Args:
        tensors: on a CPU or elsewhere.
        device_type: whose kernels are meant where they are fake.

    Returns:
        0-dim, on the first one's device: in float64 from a CPU, from a GPU as torch has it, whose
        kernels there add up as a tree.
    """
    in_slices: list[Tensor] = []
    whole: list[Tensor] = []
    for one in tensors:
        tensor = torch.view_as_real(one) if one.is_complex() else one
        here = tensor.device.type == "cpu"
        meant_here = device_type == "cpu" or not isinstance(tensor, FakeTensor)
        (in_slices if here and meant_here else whole).append(tensor)
    norms = [_norm_in_slices(tensor) for tensor in in_slices]
    half = [tensor for tensor in whole if _is_half(tensor)]
    norms += [torch.linalg.vector_norm(tensor, dtype=torch.float32) for tensor in half]
    if len(half) < len(whole):
        full = [tensor for tensor in whole if not _is_half(tensor)]
        norms.append(torch.nn.utils.get_total_norm(full))
    return _together(norms)


def _together(norms: Sequence[Tensor]) -> Tensor:
    """The norm of what has these norms, which may be on several devices of a process."""
    if not norms:
        return torch.zeros((), dtype=torch.float64)
    if len(norms) == 1:
        return norms[0]
    return _norm_in_double(torch.stack([norm.to(norms[0]) for norm in norms]))


def _over_ranks(norm: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> Tensor:
    """The norm of what has this norm in a rank's shards. Collective."""
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
    """The norm of a tensor on a CPU: 0-dim, float64."""
    if tensor.layout is not torch.strided:  # of an embedding with sparse gradients
        tensor = tensor.coalesce().values()
    if tensor.numel() <= _SLICE:
        return _norm_in_double(tensor)
    most = _CONVERTED if _is_half(tensor) else None
    norms: list[Tensor] = []
    for piece in _pieces(tensor, most):
        # torch would convert the whole of it, too, and add up less exactly what it converts.
        norms += _slice_norms(piece.float() if _is_half(piece) else piece)
    return _norm_in_double(norms[0] if len(norms) == 1 else torch.cat(norms))


def _slice_norms(piece: Tensor) -> Iterator[Tensor]:
    """What has the norm of a piece: those of its slices, which are views, and the rest of it."""
    if piece.numel() <= _SLICE:
        yield _norm_in_double(piece).view(1)
        return
    flat = flat_view(piece)
    whole = flat.numel() // _SLICE * _SLICE
    yield torch.linalg.vector_norm(flat[:whole].view(-1, _SLICE), dim=1)
    if whole < flat.numel():
        yield flat[whole:]


def _pieces(tensor: Tensor, most: int | None) -> Iterator[Tensor]:
    """A tensor in parts, none of them copied: each is dense in memory, or no longer than a slice.

    Args:
        tensor: any.
        most: the most elements of a part; None: any number.
    """
    if is_dense(tensor):
        yield from (tensor,) if most is None else torch.split(flat_view(tensor), most)
    elif tensor.numel() <= _SLICE:
        yield tensor
    else:  # with gaps: a column, what was expanded
        dims = [dim for dim in range(tensor.dim()) if tensor.size(dim) > 1]
        outer = max(dims, key=lambda dim: (tensor.stride(dim), tensor.size(dim)))
        for part in torch.split(tensor, -(-tensor.size(outer) // 2), outer):
            yield from _pieces(part, most)
