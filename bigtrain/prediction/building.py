"""Predict the memory of a rank while its parameters get their values, before the first step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor, nn

from bigtrain.checkpoint.read import read_beside_bytes
from bigtrain.core.resolved import ResolvedPlan
from bigtrain.core.strategy import Plan
from bigtrain.core.workload import Workload
from bigtrain.costs.forecast import Loading, Profile
from bigtrain.devices import is_accelerator
from bigtrain.memory.timeline import Breakdown, Peak
from bigtrain.models.parameters import low_names
from bigtrain.slicing.slices import Slices
from bigtrain.slicing.state import ModelSlices
from bigtrain.tensors.shards import COPIED_BYTES, Extent, nested_extents


def loading_of(workload: Workload, plan: Plan) -> Loading:
    """Return the sizes of what exists for a moment while parameters get their values."""
    whole_frozen = 0
    ranks = plan.state_ranks if plan.replicate.sharded_states == 3 else 1
    pieces = [0]
    for name, parameter in workload.model.named_parameters():
        width = workload.read_widths.get(name)
        if width is None and not parameter.requires_grad:
            whole_frozen = max(whole_frozen, parameter.numel())
        elif width is not None:
            own = Extent(0, -(-parameter.numel() // ranks))
            pieces.append(_piece_bytes(plan, (own,), width))
    return Loading(whole_frozen, max(pieces))


def made_one_by_one(
    profiles: Sequence[Profile], resolved: ResolvedPlan, workload: Workload
) -> list[Peak]:
    """Return the peaks while the tensors of a rank get their values, one after the other.

    Values that are read from files go to their place in pieces, and one piece exists in addition.
    Other values are made whole and in fp32. While such a parameter is sliced or cast to bf16, both
    versions of it exist. Techniques that build the model themselves set `Forecast.building`. There
    are no peaks for values that fully_shard makes, because it needs more memory in a step, nor in
    fp64, nor if one process runs all stages of a cut model.
    """
    plan = resolved.plan
    in_one_process = plan.cut is not None and not plan.cut.is_distributed
    shards = plan.replicate.optimizer_gets == "shards"
    builds = plan.replicate.materializes and not shards
    if builds or in_one_process or plan.precision == "fp64":
        return []
    stages = {name for p in profiles for name, *_ in (*p.tensors, *p.frozen_tensors)}
    low = set(
        low_names(
            workload.model,
            bf16_parameters=plan.bf16_parameters,
            frozen_in_bf16=plan.frozen_in_bf16,
        )
    )
    made, peaks = Breakdown(), []
    for name, tensor in workload.model.named_parameters():
        if plan.pp > 1 and name not in stages:
            continue
        is_cast = name in low and (not plan.master_weights or not tensor.requires_grad)
        slices = None if resolved.slices is None else resolved.slices.by_name.get(name)
        one = _Parameter(tensor, is_cast, slices, plan, workload.read_widths.get(name))
        kind = "parameters" if tensor.requires_grad else "frozen"
        after = replace(made, **{kind: getattr(made, kind) + one.share_bytes})
        before, temporary = one.peak
        if temporary and not (shards and one.width is None):
            peaks.append(Peak("build", replace(made if before else after, temporary=temporary)))
        made = after
    return peaks


@dataclass(frozen=True)
class _Parameter:
    """A parameter that gets its values on a rank.

    Args:
        tensor: the whole parameter in fp32, on any device.
        is_cast: whether it is bf16 in the run.
        slices: its slices on the ranks of the tp axis; None if a rank has it whole.
        plan: mesh and rank.
        width: the bytes of an element in the file; None if the values are not read from a file.
    """

    tensor: Tensor
    is_cast: bool
    slices: Slices | None
    plan: Plan
    width: int | None

    @property
    def share_bytes(self) -> int:
        """The bytes that this rank has in the end."""
        return self._elements * self._cast_bytes // max(1, self.tensor.numel())

    @property
    def peak(self) -> tuple[bool, int]:
        """Whether the highest moment is before the parameter has its place; bytes in addition."""
        if self.width is not None:
            return False, _piece_bytes(self.plan, self._extents, self.width)
        whole = self.tensor.nbytes
        if self.is_cast and self.slices is not None:  # it is cast whole, and sliced after that
            return True, whole + self._cast_bytes
        return False, whole if self.is_cast or self.slices is not None else 0

    @property
    def _cast_bytes(self) -> int:
        return 2 * self.tensor.numel() if self.is_cast else self.tensor.nbytes

    @property
    def _elements(self) -> int:
        return sum(extent.size for extent in self._extents)

    @property
    def _extents(self) -> tuple[Extent, ...]:
        shape, plan = tuple(self.tensor.shape), self.plan
        if self.slices is not None:
            return self.slices.extents(shape, plan.tp_rank, plan.tp)
        if plan.replicate.optimizer_gets != "shards" or not shape:
            return (Extent(0, self.tensor.numel()),)
        rows = math.ceil(shape[0] / plan.state_ranks)
        return (Extent(0, rows * math.prod(shape[1:])),)


def _piece_bytes(plan: Plan, extents: Sequence[Extent], width: int) -> int:
    """Return the bytes on the device of the run while the first piece of a tensor is read.

    A GPU gets each piece from the host.
    """
    if is_accelerator(plan.device_type):
        return 0
    piece = list(nested_extents(extents, 0, COPIED_BYTES // width))
    block = read_beside_bytes(extent.scaled(width) for extent in piece)
    return block + width * sum(extent.size for extent in piece)


def first_slice_bytes(slices: ModelSlices, model: nn.Module) -> int:
    """Return the most bytes above the whole model while slices replace its tensors one by one."""
    allocated = most = 0
    for name, parameter in model.named_parameters():
        if name in slices.by_name:
            slice_bytes = parameter.nbytes // slices.size
            most = max(most, allocated + slice_bytes)
            allocated += slice_bytes - parameter.nbytes
    return most
