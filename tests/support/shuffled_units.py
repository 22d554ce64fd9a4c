"""Check that slices are sound: units that are sliced together may be permuted together.

Ranks that hold different units of an axis and only add over them cannot tell which units they hold.
So if the units of all tensors of a class are permuted equally, the model must compute the same
output (or permuted logits, if the axis is that of the classes).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from bigtrain.slicing.slices import Slices


def order_of(slices: Slices, seed: int = 0) -> Tensor:
    """A permutation of the places of a dim: whole units within sections; equal for equal counts."""
    orders, begin = [], 0
    for length, unit in slices.sections:
        count = length // unit
        units = torch.randperm(count, generator=torch.Generator().manual_seed(seed + count))
        places = (units[:, None] * unit + torch.arange(unit)).flatten()
        orders.append(places + begin)
        begin += length
    return torch.cat(orders)


def shuffle(model: nn.Module, slices: Mapping[str, Slices], seed: int = 0) -> None:
    """Permute the units of a model's tensors in place; tied tensors once."""
    state = {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }
    with torch.no_grad():
        for tensor, tensor_slices in {
            id(state[n]): (state[n], tensor_slices) for n, tensor_slices in slices.items()
        }.values():
            tensor.copy_(tensor.index_select(tensor_slices.dim, order_of(tensor_slices, seed)))


def randomize(model: nn.Module) -> None:
    """Change values that are all ones or zeros into different values, so that their order
    matters.
    """
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if tensor.is_floating_point() and tensor.dim() == 1:
                noise = torch.rand(tensor.shape, generator=generator, dtype=tensor.dtype)
                if "var" in name or "weight" in name:
                    tensor.copy_(0.5 + noise)
                else:
                    tensor.copy_(tensor + 0.2 * (noise - 0.5))


def difference(
    model: nn.Module, run: Callable[[], Tensor], slices: Mapping[str, Slices], class_dim: int = -1
) -> float:
    """The relative difference of outputs before and after `shuffle`; the model is then restored."""
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    original_values = {name: value.detach().clone() for name, value in state.items()}
    with torch.no_grad():
        before = run()
        shuffle(model, slices)
        after = run()
        distances = [_distance(before, after)]
        shape = before.shape[class_dim]
        for tensor_slices in {
            tensor_slices for tensor_slices in slices.values() if tensor_slices.total == shape
        }:
            distances.append(
                _distance(before.index_select(class_dim, order_of(tensor_slices)), after)
            )
        for name, value in original_values.items():
            state[name].copy_(value)
    return min(distances)


def _distance(before: Tensor, after: Tensor) -> float:
    return float((before - after).abs().max() / before.abs().max().clamp_min(1e-30))
