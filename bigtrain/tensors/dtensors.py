"""Tensors of which this rank holds a part: a DTensor's local piece."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor


def local_tensor(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor: a DTensor's own piece, any other tensor itself."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def as_dtensor_like(piece: Tensor, like: Tensor) -> Tensor:
    """The tensor with `piece` as its local part, laid out as `like` is: a DTensor for a DTensor."""
    if not isinstance(like, DTensor):
        return piece
    return DTensor.from_local(
        piece,
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )


def flat_view(tensor: Tensor) -> Tensor:
    """All elements in the order in which they lie in memory: a view where there are no gaps."""
    if tensor.is_contiguous():
        return tensor.view(-1)
    if is_dense(tensor):
        return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())
    return tensor.reshape(-1)


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements lie in memory without gaps, in whatever order (channels_last is)."""
    expected = 1
    for size, stride in sorted(
        zip(tensor.shape, tensor.stride(), strict=True), key=lambda pair: (pair[1], pair[0])
    ):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def is_distributed(tensor: Tensor) -> bool:
    """Whether it is one rank's view of a tensor that several hold."""
    return isinstance(tensor, DTensor)
