"""Compare a sliced model on real ranks with the whole model: differences, and the tensors with
them.
"""

from __future__ import annotations

import copy
import random
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from bigtrain.ranks.context import RunContext
from bigtrain.slicing.exchange import SliceGroup
from bigtrain.slicing.install import slice_modules, slice_tensors
from bigtrain.slicing.sliced_tensor import is_sliced, leaves_of, whole_of
from bigtrain.slicing.slices import Slices, SliceSection

Run = Callable[[nn.Module], tuple[Any, Tensor]]
"""Runs one forward pass; returns the model's output and a loss."""


@dataclass
class Compared:
    """The comparison on one rank."""

    worst: float = 0.0
    """The largest difference, relative to the largest number of the same tensor."""
    where: str = ""
    """The name of the tensor with that difference."""
    gathers: dict[str, int] = field(default_factory=dict)
    error: str = ""
    """A traceback, if the sliced model raised."""


def slice_group(context: RunContext, sequence_dim: int | None = None) -> SliceGroup:
    """The slice group of this rank on the tp axis."""
    tp_group = context.group("tp")
    return SliceGroup(context.tp_rank, context.tp_size, tp_group, sequence_dim=sequence_dim)


def sliced_copy(
    whole: nn.Module,
    slices: Mapping[str, Slices],
    group: SliceGroup,
    gathered: Collection[str] = (),
) -> nn.Module:
    """A copy of a model that holds only this rank's slices."""
    model = copy.deepcopy(whole)
    slice_tensors(model, slices, group)
    slice_modules(model, slices, group, gathered)
    return model


def compared(
    whole: nn.Module,
    run: Run,
    slices: Mapping[str, Slices],
    group: SliceGroup,
    steps: int = 1,
    gathered: Collection[str] = (),
) -> Compared:
    """Run a model whole and in slices; compare outputs, losses, gradients and final buffers.

    Finally both are evaluated once in inference mode.

    Args:
        whole: the model, in float64; its gradients and buffers change.
        run: runs a forward pass; may draw only random numbers that all ranks draw equally.
        slices: by the name of the parameter or buffer.
        group: the ranks of the slices.
        steps: number of passes whose gradients are accumulated.
        gathered: names of weights whose product is gathered immediately.
    """
    model, slices = sliced_copy(whole, slices, group, gathered), _under_all_names(whole, slices)
    result = Compared()
    try:
        for _ in range(steps):
            torch.manual_seed(1)
            output, loss = run(model)
            with torch.no_grad():
                output = [
                    leaf.detach() for leaf in leaves_of(whole_of(output)) if torch.is_tensor(leaf)
                ]
            loss = loss.whole() if is_sliced(loss) else loss
            loss.backward()
    except Exception:  # noqa: BLE001 - a report of what failed is wanted
        result.error = traceback.format_exc()
        result.worst, result.where = float("inf"), "error"
        return result
    result.gathers = dict(group.gathers)
    for _ in range(steps):
        torch.manual_seed(1)
        wanted, wanted_loss = run(whole)
        wanted_loss.backward()
    pairs = {"loss": (wanted_loss, loss)}
    leaves = [leaf for leaf in tree_leaves(wanted) if torch.is_tensor(leaf)]
    pairs |= {f"output {n}": pair for n, pair in enumerate(zip(leaves, output, strict=True))}
    sliced_buffers = dict(model.named_buffers())
    for name, buffer in whole.named_buffers():
        pairs[f"buffer {name}"] = (_local_part(name, buffer, slices, group), sliced_buffers[name])
    for name, (one, actual) in pairs.items():
        _note_difference(result, name, one, actual, 0.0)
    _compare_gradients(whole, model, slices, group, result)
    _compare_evaluation(whole, model, run, result)
    return result


def _compare_evaluation(whole: nn.Module, model: nn.Module, run: Run, result: Compared) -> None:
    """Run whole and sliced model in evaluation, and note the differences of outputs."""
    outputs = []
    try:
        for each in (whole, model):
            torch.manual_seed(1)
            with torch.inference_mode():
                outputs.append(whole_of(run(each.eval())[0]))
    except Exception:  # noqa: BLE001 - as above
        result.error = traceback.format_exc()
        result.worst, result.where = float("inf"), "error in evaluation"
        return
    pairs = zip(*(leaves_of(output) for output in outputs), strict=True)
    for number, (wanted, actual) in enumerate(pairs):
        if isinstance(wanted, Tensor):
            _note_difference(result, f"evaluated output {number}", wanted, actual, 0.0)


def _under_all_names(model: nn.Module, slices: Mapping[str, Slices]) -> dict[str, Slices]:
    """The slices of tied tensors under each of their names."""
    named = [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]
    by_tensor = {id(tensor): slices[name] for name, tensor in named if name in slices}
    return {name: by_tensor[id(tensor)] for name, tensor in named if id(tensor) in by_tensor}


def _compare_gradients(
    whole: nn.Module,
    model: nn.Module,
    slices: Mapping[str, Slices],
    group: SliceGroup,
    result: Compared,
) -> None:
    """Note the differences of all gradients."""
    parameters = dict(model.named_parameters())
    largest = max(
        (p.grad.abs().max().item() for p in whole.parameters() if p.grad is not None), default=0.0
    )
    for name, parameter in whole.named_parameters():
        wanted, actual = parameter.grad, parameters[name].grad
        if wanted is None or actual is None:
            if wanted is not None or actual is not None:
                result.worst, result.where = float("inf"), f"only one has a gradient: {name}"
            continue
        _note_difference(
            result, f"grad {name}", _local_part(name, wanted, slices, group), actual, 1e-4 * largest
        )
        if name not in slices and not is_equal_on_all(actual, group):
            result.worst, result.where = float("inf"), f"not the same bits on all ranks: {name}"


def _local_part(
    name: str, tensor: Tensor, slices: Mapping[str, Slices], group: SliceGroup
) -> Tensor:
    """This rank's slice of a tensor; a tensor without slices is whole."""
    if name not in slices:
        return tensor
    return slices[name].local(tensor, group.rank, group.size)


def _note_difference(
    result: Compared, name: str, wanted: Tensor, actual: Tensor, at_least: float
) -> None:
    """Note the relative difference of two tensors, if it is the largest so far."""
    if wanted.shape != actual.shape or wanted.dtype != actual.dtype:
        result.worst = float("inf")
        result.where = (
            f"{name}: {wanted.dtype}{list(wanted.shape)} {actual.dtype}{list(actual.shape)}"
        )
        return
    if not wanted.numel():
        return
    left, right = wanted.detach(), actual.detach()
    finite = torch.isfinite(left) if left.is_floating_point() else torch.ones_like(left, dtype=bool)
    if not torch.equal(left[~finite].nan_to_num(7.0), right[~finite].nan_to_num(7.0)):
        result.worst, result.where = float("inf"), f"{name}: infinities"
        return
    left, right = (t.where(finite, torch.zeros_like(t)) for t in (left, right))
    left, right = (t if t.is_complex() else t.double() for t in (left, right))
    scale = max(left.abs().max().item(), at_least, 1e-30)
    difference = (left - right).abs().max().item() / scale
    if not difference <= result.worst:
        result.worst, result.where = (
            (difference, name) if difference == difference else (float("inf"), name)
        )


def is_equal_on_all(tensor: Tensor, group: SliceGroup) -> bool:
    """Whether all ranks have the same bits."""
    bits = tensor.detach().contiguous().view(torch.uint8)
    every = [torch.empty_like(bits) for _ in range(group.size)]
    dist.all_gather(every, bits, group=group.group)
    return all(torch.equal(bits, rank_tensor) for rank_tensor in every)


def random_slices(model: nn.Module, size: int, seed: int, share: float = 0.5) -> dict[str, Slices]:
    """An assignment drawn by a seed: any dim, sections and units of parameters and buffers.

    Tied tensors have the same slices, under each of their names.
    """
    draw = random.Random(seed)
    named = [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]
    chosen: dict[int, Slices | None] = {}
    drawn = {}
    for name, tensor in named:
        if id(tensor) not in chosen:
            dims = [dim for dim, length in enumerate(tensor.shape) if length >= size]
            takes = bool(dims) and draw.random() < share
            chosen[id(tensor)] = (
                drawn_slices(draw, dim := draw.choice(dims), tensor.shape[dim], size)
                if takes
                else None
            )
        slices = chosen[id(tensor)]
        if slices is not None:
            drawn[name] = slices
    return drawn


def drawn_slices(
    draw: random.Random,
    dim: int,
    length: int,
    size: int,
    units: Sequence[int] = (1, 2, 3, 4, 8, 16),
) -> Slices:
    """Sections and units of a dim so that each rank has a part of each section."""
    unit = draw.choice([n for n in units if length % n == 0 and length // n >= size])
    count = length // unit
    sections = draw.choice([n for n in (1, 1, 1, 2, 3) if count >= n * size])
    lengths = [size] * sections
    left = count - sum(lengths)
    if draw.random() < 0.5:  # all that is over goes to one, or is spread
        lengths[draw.randrange(sections)] += left
    else:
        for at in range(sections):
            more = left // (sections - at)
            lengths[at] += more
            left -= more
    return Slices(dim, tuple(SliceSection(n * unit, unit) for n in lengths))
