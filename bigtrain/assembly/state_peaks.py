"""Predict the peak memory of one rank in a save and in a resume, before anything is built.

In addition to the step's forecast, the prediction needs the elements of each tensor that each rank
holds. Replicas hold all elements, `fully_shard` holds rows. With pieces, and with DeepSpeed's
stages 1 and 2, a rank holds flat slices of all parameters concatenated; with DeepSpeed's stage 3,
flat slices of each parameter. If layers are sliced over tp, the same is true within the slices of a
tp rank.

`forecast_save` predicts each round of a save from these elements. A resume holds the state that has
been read, the part of one tensor that is being read, and a block of the file if this part consists
of many short runs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from bigtrain.checkpoint.forecast_save import Making, files_of, forecast_save
from bigtrain.checkpoint.layout import Held
from bigtrain.checkpoint.read import read_beside_bytes
from bigtrain.core.resolved import ResolvedPlan
from bigtrain.core.strategy import Plan
from bigtrain.core.workload import Workload
from bigtrain.devices import is_accelerator
from bigtrain.job.schema import CheckpointConfig
from bigtrain.memory.added_bytes import StatePeak, StatePeaks
from bigtrain.models.parameters import left_out_names, low_names
from bigtrain.optim.partition import chunk_elements
from bigtrain.optim.step_memory import fake_safe_optimizer
from bigtrain.optim.update import is_elementwise
from bigtrain.optim.whole import MakeOptimizer, whole_optimizer
from bigtrain.prediction.predict import Prediction
from bigtrain.prediction.state_figures import storage_bytes
from bigtrain.slicing.state import SlicedState
from bigtrain.tensors.shards import Extent, box_extents, whole_extents

Slots = Mapping[str, Tensor]
"""The optimizer's state of one parameter, as tensors without values."""


def forecast_state_peaks(
    resolved: ResolvedPlan,
    workload: Workload,
    config: CheckpointConfig,
    prediction: Prediction,
    pp_rank: int = 0,
    dp_rank: int = 0,
    tp_rank: int = 0,
) -> StatePeaks:
    """Predict the peaks of memory of one rank during a save and during a resume.

    An asynchronous save runs during steps, so the bytes of its thread are added to a step's peak.

    Args:
        resolved: the plan of the run.
        workload: a workload with an example.
        config: the job's `checkpoint` section.
        prediction: the prediction of a step on this rank.
        pp_rank: the rank's position on the pp axis.
        dp_rank: the rank's position on the dp axis.
        tp_rank: the rank's position on the tp axis.

    Returns:
        The peaks; both None if the step has no prediction, or the optimizer does not run on fake
        tensors.
    """
    states, step = prediction.states, prediction.own_peak
    if states is None or step is None:
        return StatePeaks()
    try:
        every = [
            _State.of(resolved, workload, slice_rank) for slice_rank in range(resolved.plan.tp)
        ]
    except Exception:  # the user's optimizer does not run on fake tensors
        return StatePeaks()
    plan, known = resolved.plan, every[tp_rank]
    rank = (dp_rank * plan.pp + pp_rank) * plan.tp + tp_rank
    files = files_of(
        [state.held(d, p) for d in range(plan.dp) for p in range(plan.pp) for state in every]
    )
    made = known.made(dp_rank, pp_rank)
    how = {"asynchronous": config.asynchronous, "most_bytes": config.snapshot_bytes}
    one_host = plan.one_host
    added = forecast_save(files, rank, made, one_host=one_host, **how)  # type: ignore[arg-type]
    looked_at = known.compared(made)
    added = replace(added, waiting=max(added.waiting, looked_at), made=max(added.made, looked_at))
    resident = states.total - states.activations
    resume = resident + known.read_beside(dp_rank, pp_rank)
    if is_accelerator(plan.device_type):
        host = max(added.waiting - added.made, added.beside)
        return StatePeaks(StatePeak(resident + added.made, host), StatePeak(resume, known.largest))
    # The last batch is alive until the next one is read.
    batch = storage_bytes(workload.micro_batch.tensors()) * plan.batch.accumulation_steps
    # A rank that writes nothing also takes steps while other ranks write.
    during_save = step.bytes + added.beside if config.asynchronous else 0
    return StatePeaks(
        StatePeak(max(resident + batch + added.waiting, during_save)), StatePeak(resume)
    )


@dataclass(frozen=True)
class _Saved:
    """A tensor of the model, as it is saved."""

    name: str
    first: str
    """The first of the tensor's names; a tied tensor has several."""
    shape: tuple[int, ...]
    """The shape of the slices on a tp rank."""
    dtype: torch.dtype
    is_buffer: bool
    trained: bool
    low: bool
    """Whether layers use the tensor in bf16, and its fp32 values are stored separately."""


class _State:
    """The training state of the ranks that have the same position on the tp axis.

    Args:
        resolved: the plan of the run.
        tensors: the tensors of the whole model.
        slots: the optimizer's state of each trained parameter, by the parameter's first name.
        splits: whether a rank may update any flat slice of a parameter; otherwise it updates only
            whole parameters.
        groups: the names of the parameters in each group of the optimizer.
        slices: the slices of these ranks; None if layers are not sliced.
    """

    def __init__(
        self,
        resolved: ResolvedPlan,
        tensors: Sequence[_Saved],
        slots: Mapping[str, Slots],
        *,
        splits: bool,
        groups: Sequence[Sequence[str]],
        slices: SlicedState | None,
    ) -> None:
        self._plan, self._layout, self._slices = resolved.plan, resolved.layout, slices
        self._tensors, self._slots, self._splits = tensors, slots, splits
        self._groups = groups
        cut = resolved.plan.cut
        self._cut = self._layout is not None and cut is not None and cut.is_distributed
        self._kind = resolved.plan.replicate.optimizer_gets
        if cut is not None and cut.optimizer_gets == "copies":
            self._kind = "copies"
        self._slices_of: dict[int, Mapping[tuple[str, int], Extent]] = {}

    @classmethod
    def of(cls, resolved: ResolvedPlan, workload: Workload, tp_rank: int) -> _State:
        """Return the state under a plan, after a step of the optimizer on fake tensors."""
        slices = resolved.slices.on(tp_rank, None) if resolved.slices is not None else None
        tensors = list(_saved_tensors(workload.model, resolved.plan, slices))
        by_shape: dict[tuple[tuple[int, ...], torch.dtype], Slots] = {}
        wanted = {(t.shape, t.dtype) for t in tensors if t.trained}
        for key, slot in zip(wanted, _slots_of(workload.make_optimizer, wanted), strict=True):
            by_shape[key] = slot
        slots = {t.first: by_shape[t.shape, t.dtype] for t in tensors if t.trained}
        optimizer = whole_optimizer(workload.make_optimizer, workload.model)
        splits, groups = optimizer.kind.elementwise, optimizer.groups
        return cls(resolved, tensors, slots, splits=splits, groups=groups, slices=slices)

    @property
    def largest(self) -> int:
        """Bytes of the largest tensor of the model, as it is saved."""
        return max((math.prod(t.shape) * t.dtype.itemsize for t in self._tensors), default=0)

    def held(self, dp_rank: int, pp_rank: int) -> dict[str, Held]:
        """Return the tensors that one rank contributes to a checkpoint; see `Runner.state`."""
        held = {}
        for tensor in self._tensors_of_stages(pp_rank):
            if tensor.first in self._saved_elsewhere(pp_rank):
                continue
            extents = self._extents(tensor, dp_rank, pp_rank, slot=False)
            name, differ = f"model.{tensor.name}", tensor.is_buffer
            if extents or not self._plan.replicate.num_servers:
                held[name] = Held(tensor.dtype, tensor.shape, extents, differ)
        for name, tensor, slot in self._optimizer(pp_rank):
            extents = whole_extents(slot.shape)
            if is_elementwise(name.rpartition(".")[2], slot, tensor.shape):
                extents = self._extents(tensor, dp_rank, pp_rank, slot=True)
            elif self._kind in ("pieces", "owned") and not self._updates(tensor, dp_rank, pp_rank):
                continue
            held[name] = Held(slot.dtype, tuple(slot.shape), extents, False)
        return held if self._slices is None else _in_whole_tensors(held, self._slices)

    def made(self, dp_rank: int, pp_rank: int) -> dict[str, Making]:
        """Return the tensors that a rank assembles for a save, from a disk or from pieces."""
        on_disk, chunk = self._on_disk, self._chunk(pp_rank)
        joins = bool(self._plan.replicate.num_servers)  # a server joins its pieces of a tensor
        made = {}
        for tensor in self._tensors_of_stages(pp_rank):
            if tensor.first in self._saved_elsewhere(pp_rank):
                continue
            size = self._local(tensor, dp_rank, pp_rank, slot=False)
            laid = self._plan.uses_channels_last and len(tensor.shape) == 4 and not tensor.is_buffer
            cut = chunk is not None and tensor.low and self._kind == "pieces" and size > chunk
            if laid or cut or (joins and tensor.trained and size):
                made[f"model.{tensor.name}"] = Making(size * tensor.dtype.itemsize)
        for name, tensor, slot in self._optimizer(pp_rank):
            if not is_elementwise(name.rpartition(".")[2], slot, tensor.shape):
                continue
            numbers = self._local(tensor, dp_rank, pp_rank, slot=True)
            size, several = numbers * slot.dtype.itemsize, chunk is not None and numbers > chunk
            if on_disk or several or (joins and size):
                made[name] = Making(size, size if on_disk and several else 0)
        return made

    def compared(self, made: Mapping[str, Making]) -> int:
        """Return the bytes of the largest assembled tensor that the ranks of a tp group compare."""
        if self._slices is None:
            return 0
        whole = (
            gathered
            for name, gathered in made.items()
            if self._slices.by_name.get(_parameter_of(name)) is None
        )
        return max((gathered.kept + gathered.passing for gathered in whole), default=0)

    def read_beside(self, dp_rank: int, pp_rank: int) -> int:
        """Return the bytes by which the peak of a resume exceeds the state of a run.

        State of the optimizer that has not been read at the moment of the peak is subtracted.
        """
        at_once = self._kind == "copies"  # the engine allocates all its flat tensors at the start
        chunk = self._chunk(pp_rank)
        sizes = []
        for name, tensor, slot in sorted(self._optimizer(pp_rank), key=lambda saved: saved[0]):
            numbers, sliced = (
                slot.numel(),
                is_elementwise(name.rpartition(".")[2], slot, tensor.shape),
            )
            if sliced:
                numbers = self._local(tensor, dp_rank, pp_rank, slot=True)
            elif self._kind in ("pieces", "owned") and not self._updates(tensor, dp_rank, pp_rank):
                continue
            size = numbers * slot.dtype.itemsize
            stays = 0 if self._on_disk and sliced else size
            read, most = size, numbers
            joins = self._plan.replicate.num_servers
            if (
                sliced and self._in_pieces and self._splits and not joins
            ):  # the tensor that is read becomes the state
                most = numbers if chunk is None else min(chunk, numbers)
                read = most * slot.dtype.itemsize if self._on_disk else 0
            if sliced:
                extents = self._extents(tensor, dp_rank, pp_rank, slot=True)
                read += self._block(tensor, extents, most, slot.dtype)
            sizes.append((stays, read))
        missing = sum(stays for stays, _ in sizes)
        works = self._plan.replicate.num_servers and self._plan.data_rank(dp_rank) is not None
        model = []
        for tensor in self._tensors_of_stages(pp_rank):
            extents = self._extents(tensor, dp_rank, pp_rank, slot=False)
            local_numbers = sum(extent.size for extent in extents)
            numbers = math.prod(tensor.shape) if works else local_numbers
            block = self._block(tensor, extents, numbers, tensor.dtype)
            model.append(numbers * tensor.dtype.itemsize + block)
        highest = max(model, default=0) - missing
        if at_once:
            return max(highest, *(read for _, read in sizes), 0)
        for stays, read in sizes:
            missing -= stays
            highest = max(highest, read - missing)
        return highest

    def _block(
        self, tensor: _Saved, local_extents: Iterable[Extent], most: int, dtype: torch.dtype
    ) -> int:
        """Return the bytes of a block of the file, if `most` elements of a tensor are read at once.

        The result is 0 if no block is needed.
        """
        if self._slices is None or tensor.name not in self._slices.by_name:
            return 0
        slices = self._slices.by_name[tensor.name]
        firsts = [
            Extent(local_extent.start, min(local_extent.size, most))
            for local_extent in local_extents
        ]
        _, extents = self._slices.placed(slices, tensor.shape, firsts)
        return read_beside_bytes(extent.scaled(dtype.itemsize) for extent in extents)

    @property
    def _in_pieces(self) -> bool:
        """Whether `PartitionedUpdate` runs the optimizer."""
        away = self._plan.offload_tiers.optimizer != "device"
        return self._kind == "pieces" or (away and self._kind == "parameters")

    @property
    def _on_disk(self) -> bool:
        return self._in_pieces and self._plan.offload_tiers.optimizer == "disk"

    def _chunk(self, pp_rank: int) -> int | None:
        """Return the number of elements that are updated at a time; None for a whole piece."""
        low = any(t.low for t in self._tensors)
        if not self._in_pieces or not (low or self._plan.offload_tiers.optimizer != "device"):
            return None
        elements = sum(math.prod(t.shape) for t in self._trained(pp_rank))
        return chunk_elements(elements, self._plan.state_ranks)

    def _tensors_of_stages(self, pp_rank: int) -> list[_Saved]:
        if not self._cut or self._layout is None:
            return list(self._tensors)
        names = self._layout.chosen.cut.tensor_names_of(self._layout.stages_of(pp_rank))
        return [tensor for tensor in self._tensors if tensor.first in names]

    def _trained(self, pp_rank: int) -> list[_Saved]:
        return [t for t in self._tensors_of_stages(pp_rank) if t.trained and t.name == t.first]

    def _earlier(self, pp_rank: int) -> set[str]:
        """Return the names of trained parameters of lower pp ranks, which own tied parameters."""
        return {t.name for p in range(pp_rank) for t in self._trained(p)} if self._cut else set()

    def _saved_elsewhere(self, pp_rank: int) -> set[str]:
        """Return the tied parameters with separate fp32 values, which only their owner saves."""
        if self._kind not in ("pieces", "copies"):
            return set()
        # DeepSpeed stores the fp32 values of all parameters in copies that its engine owns.
        separate = {t.first for t in self._tensors if t.low or self._kind == "copies"}
        return separate & self._earlier(pp_rank)

    def _optimizer(self, pp_rank: int) -> Iterator[tuple[str, _Saved, Tensor]]:
        """Yield the optimizer's tensors of a pp rank: name, parameter and tensor.

        A tied parameter's tensors are on the first pp rank that has the parameter.
        """
        earlier = self._earlier(pp_rank)
        for tensor in self._trained(pp_rank):
            if tensor.name not in earlier:
                for key, slot in sorted(self._slots[tensor.first].items()):
                    yield f"optimizer.{tensor.name}.{key}", tensor, slot

    def _updates(self, tensor: _Saved, dp_rank: int, pp_rank: int) -> bool:
        """Return whether a rank updates a part of a parameter."""
        return bool(self._extents(tensor, dp_rank, pp_rank, slot=True))

    def _local(self, tensor: _Saved, dp_rank: int, pp_rank: int, *, slot: bool) -> int:
        return sum(e.size for e in self._extents(tensor, dp_rank, pp_rank, slot=slot))

    def _extents(
        self, tensor: _Saved, dp_rank: int, pp_rank: int, *, slot: bool
    ) -> tuple[Extent, ...]:
        """Return the elements that a rank holds of a tensor.

        If `slot`, they are the elements of an optimizer's tensor for this tensor.
        """
        ranks, kind = self._plan.state_ranks, self._kind
        state_rank = dp_rank % ranks
        if (
            self._plan.replicate.num_servers
        ):  # servers have the trained parameters, workers the rest
            if (self._plan.data_rank(dp_rank) is None) is not tensor.trained:
                return ()
            return (
                self._piece(tensor, pp_rank, state_rank)
                if tensor.trained
                else whole_extents(tensor.shape)
            )
        stage = self._plan.replicate.sharded_states
        if ranks == 1 or tensor.is_buffer or kind == "parameters":
            return whole_extents(tensor.shape)
        if kind == "shards":
            return _rows(tensor.shape, state_rank, ranks)
        if kind == "copies" and stage == 3:
            return _even_slice(math.prod(tensor.shape), state_rank, ranks)
        if not tensor.trained or (kind != "copies" and not slot and not tensor.low):
            return whole_extents(tensor.shape)
        return self._piece(tensor, pp_rank, state_rank)

    def _piece(self, tensor: _Saved, pp_rank: int, state_rank: int) -> tuple[Extent, ...]:
        part = self._updated_slices(pp_rank).get((tensor.first, state_rank))
        return () if part is None else (part,)

    def _updated_slices(self, pp_rank: int) -> Mapping[tuple[str, int], Extent]:
        """Return the elements of a pp rank's parameters, by name and by the updating replica."""
        if pp_rank not in self._slices_of:
            sizes = {t.name: math.prod(t.shape) for t in self._trained(pp_rank)}
            groups = [[name for name in names if name in sizes] for names in self._groups]
            technique = self._plan.techniques["replicate"]
            updated = technique.updated_slices(
                sizes, self._plan.state_ranks, groups=groups, may_split=self._splits
            )
            self._slices_of[pp_rank] = {
                (part.name, part.owner): Extent(part.start, part.stop - part.start)
                for part in updated
                if part.stop > part.start
            }
        return self._slices_of[pp_rank]


def _parameter_of(name: str) -> str:
    """Return the parameter's name in `model.NAME` or `optimizer.NAME.KEY`."""
    part, _, plain = name.partition(".")
    return plain if part == "model" else plain.rpartition(".")[0]


def _in_whole_tensors(local: Mapping[str, Held], slices: SlicedState) -> dict[str, Held]:
    """Return the tensors of a rank, with its slices described as parts of whole tensors."""
    shapes = {name: tensor.shape for name, tensor in local.items()}
    placed = dict(local)
    for name, tensor in local.items():
        tensor_slices = slices.slices_of(name, shapes)
        if tensor_slices is not None:
            shape, extents = slices.placed(tensor_slices, tensor.shape, tensor.extents)
            placed[name] = replace(tensor, shape=shape, extents=extents)
    return placed


def _saved_tensors(model: nn.Module, plan: Plan, slices: SlicedState | None) -> Iterator[_Saved]:
    """Yield the tensors of a model under all their names, with the dtypes of their saved values."""
    double = plan.precision == "fp64"
    low, frozen = plan.bf16_parameters, plan.frozen_in_bf16
    bf16 = set(low_names(model, bf16_parameters=low, frozen_in_bf16=frozen))
    if plan.casts_when_gathered:
        bf16 -= left_out_names(model)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    first: dict[int, str] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if not isinstance(tensor, Tensor):
            continue
        first_name = first.setdefault(id(tensor), name)
        low, dtype = first_name in bf16, tensor.dtype
        trained = name in parameters and tensor.requires_grad
        if double and dtype.is_floating_point:
            dtype = torch.float64
        elif low and (not plan.master_weights or (plan.frozen_in_bf16 and not trained)):
            low, dtype = False, torch.bfloat16
        shape = tuple(tensor.shape)
        if slices is not None and name in slices.by_name:
            shape = slices.by_name[name].local_shape(shape, slices.group.rank, slices.group.size)
        yield _Saved(
            name, first_name, shape, dtype, name not in parameters, trained, low and trained
        )


def _slots_of(
    make_optimizer: MakeOptimizer, wanted: Iterable[tuple[tuple[int, ...], torch.dtype]]
) -> list[Slots]:
    """Return the state that an optimizer makes in its first step, for each shape and dtype."""
    with FakeTensorMode():
        parameters = [nn.Parameter(torch.empty(shape, dtype=dtype)) for shape, dtype in wanted]
        if not parameters:
            return []
        for parameter in parameters:
            parameter.grad = torch.empty_like(parameter)
        optimizer = fake_safe_optimizer(make_optimizer)(parameters)
        optimizer.step()
        return [
            {key: v for key, v in optimizer.state.get(p, {}).items() if isinstance(v, Tensor)}
            for p in parameters
        ]


def _rows(shape: Sequence[int], rank: int, ranks: int) -> tuple[Extent, ...]:
    """Return the rows of a rank under `fully_shard`; the last ranks may have fewer or none."""
    if not shape:
        return whole_extents(shape) if rank == 0 else ()
    each = -(-shape[0] // ranks)
    begin = min(rank * each, shape[0])
    local = (min(begin + each, shape[0]) - begin, *shape[1:])
    return box_extents(shape, (begin, *(0 for _ in shape[1:])), local)


def _even_slice(numbers: int, rank: int, ranks: int) -> tuple[Extent, ...]:
    each = -(-numbers // ranks)
    begin = min(rank * each, numbers)
    length = min(each, numbers - begin)
    return (Extent(begin, length),) if length else ()
