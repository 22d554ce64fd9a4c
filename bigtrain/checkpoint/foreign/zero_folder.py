"""DeepSpeed's folders of ZeRO stages 1, 2 and 3: `*_model_states.pt`, `*_optim_states.pt`.

Each rank's file has its partition of the fp32 parameters and of the optimizer's state as flat
tensors. Up to stage 2, the concatenated partitions are the concatenated parameters of a group. In
stage 3, every parameter is split into one equal piece per rank (the last pieces are padded), and a
rank's flat tensors consist of its pieces.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bigtrain.checkpoint.foreign.state import (
    ForeignState,
    joined_tensor,
    number_tensor,
    untried,
    unwrapped_names,
)
from bigtrain.checkpoint.foreign.torch_files import Inert, TorchTensor, read_torch_file
from bigtrain.errors import CheckpointError
from bigtrain.files.regular import read_pointer
from bigtrain.tensors.shards import StateTensor

_TRIED = "0.19.8"
"""DeepSpeed's version of the files that the tests read."""
_OPTIMIZER, _MODEL = "*_optim_states.pt", "*_model_states.pt"
FlatSlice = tuple[TorchTensor, int, int]


def find_zero_folder(path: Path) -> Path | None:
    """Return `path`, or the folder that its `latest` names, if DeepSpeed wrote it; else None."""
    pointer = path / "latest"
    inner = read_pointer(pointer)
    for folder in (path, path / inner):
        if folder.is_dir() and any(folder.glob(_MODEL)):
            return folder
    return None


def open_zero_folder(folder: Path) -> ForeignState:
    """Return the state in a folder of DeepSpeed's engine; tensors are read on demand.

    Raises:
        CheckpointError: the folder is incomplete or damaged, or was written by a pipeline or with
            tensor parallelism.
    """
    models = _in_order(folder, _MODEL)
    _check_layout(folder, models)
    described = [read_torch_file(path) for path in models]
    ranks = [read_torch_file(path) for path in _in_order(folder, _OPTIMIZER)]
    if not ranks:
        return _without_zero(folder, described[0])
    states = [rank["optimizer_state_dict"] for rank in ranks]
    stage = _number(states[0].get("zero_stage", 0))
    counts = states[0].get("partition_count", len(ranks))
    wanted = max(counts) if isinstance(counts, list) else int(counts)
    if wanted != len(ranks):
        raise CheckpointError(
            f"{folder} has the optimizer states of {len(ranks)} ranks, and {wanted} ranks wrote "
            "it. Copy the files of all ranks into one folder."
        )
    make = _stage_3 if stage == 3 else _stage_2
    groups = make(described, states)
    shapes = {name: shape for group in groups for name, shape in group.shapes.items()}
    module: Mapping[str, TorchTensor] = described[0]["module"]
    names = unwrapped_names(module)
    masters = {name: t for group in groups for name, t in group.parameters.items()}
    frozen = _frozen(described, stage)
    model: dict[str, StateTensor] = {}
    for name in module:
        first = _tied_to(name, module, described[0], {*shapes, *frozen})
        values = masters.get(first) or frozen.get(first)
        if values is None and stage == 3 and name not in described[0].get("buffer_names", ()):
            raise CheckpointError(f"{folder} has no values of the parameter {name}.")
        model[names[name]] = values or module[name].as_state()
    slots: dict[str, StateTensor] = {}
    for group in groups:
        slots |= {f"{names[n]}.{key}": t for (n, key), t in group.slots.items()}
    return ForeignState(
        f"DeepSpeed ZeRO stage {stage}, {len(ranks)} ranks",
        model,
        slots,
        int(described[0].get("global_steps", 0)),
        int(described[0].get("global_samples", 0)),
        untried("DeepSpeed", described[0].get("ds_version"), _TRIED),
    )


def _in_order(folder: Path, pattern: str) -> list[Path]:
    """Return the files that match, ordered by the numbers in their names."""
    return sorted(folder.glob(pattern), key=lambda p: [int(n) for n in re.findall(r"\d+", p.name)])


def _check_layout(folder: Path, models: Sequence[Path]) -> None:
    others = [path.name for path in models if re.search(r"mp_rank_0*[1-9]", path.name)]
    others += [path.name for path in folder.glob("layer_*-model_states.pt")]
    if others:
        raise CheckpointError(
            f"{folder} was written by a pipeline or with tensor parallelism ({others[0]}), which "
            "is not supported. Write it with data parallelism alone (ZeRO stages 1 to 3)."
        )


def _number(value: Any) -> int:
    """Return the integer of a number or of one of DeepSpeed's enumerations."""
    return int(value.arguments[0] if isinstance(value, Inert) else value)


def _without_zero(folder: Path, described: Mapping[str, Any]) -> ForeignState:
    """Return the model's state of stage 0, in which every rank has the whole model."""
    module: Mapping[str, TorchTensor] = described["module"]
    if any(not t.numel and math.prod(t.shape) for t in module.values()):
        raise CheckpointError(f"{folder} has no {_OPTIMIZER}, which hold the parameters.")
    names = unwrapped_names(module)
    return ForeignState(
        "DeepSpeed without ZeRO",
        {names[name]: tensor.as_state() for name, tensor in module.items()},
        step=int(described.get("global_steps", 0)),
        samples_seen=int(described.get("global_samples", 0)),
        notes=(
            "The optimizer's state was left out: it has numbers instead of names.",
            *untried("DeepSpeed", described.get("ds_version"), _TRIED),
        ),
    )


def _tied_to(
    name: str, module: Mapping[str, TorchTensor], described: Mapping[str, Any], known: set[str]
) -> str:
    """Return the name under which a tensor's values are stored: another name if it is tied."""
    if name in known:
        return name
    told = described.get("shared_params") or {}
    if told.get(name) in known:
        return str(told[name])
    # Stage 3 does not record ties, but tied tensors share one storage, even though it is empty.
    same = (
        candidate
        for candidate in known
        if candidate in module and module[candidate] == module[name]
    )
    return next(same, name)


def _frozen(described: Sequence[Mapping[str, Any]], stage: int) -> dict[str, StateTensor]:
    """Return the frozen parameters by name."""
    shapes: Mapping[str, Sequence[int]] = described[0].get("frozen_param_shapes") or {}
    frozen = {}
    for name, shape in shapes.items():
        pieces = [rank["frozen_param_fragments"][name] for rank in described]
        flat = _Flat(pieces if stage == 3 else pieces[:1])
        frozen[name] = joined_tensor(shape, list(flat.slices(0, math.prod(shape))))
    return frozen


class _Flat:
    """The concatenation of flat tensors."""

    def __init__(self, tensors: Sequence[TorchTensor]) -> None:
        self.tensors = tensors

    @property
    def numel(self) -> int:
        return sum(tensor.numel for tensor in self.tensors)

    def slices(self, start: int, stop: int) -> Iterator[FlatSlice]:
        for tensor in self.tensors:
            first, last = max(0, start), min(stop, tensor.numel)
            if first < last:
                yield tensor, first, last
            start, stop = start - tensor.numel, stop - tensor.numel


@dataclass(frozen=True)
class _Group:
    """The tensors of parameters that were flattened together."""

    shapes: Mapping[str, Sequence[int]]
    parameters: Mapping[str, StateTensor]
    slots: Mapping[tuple[str, str], StateTensor]


def _moments(state: Mapping[str, Any], number: int, key: str) -> Mapping[str, Any]:
    """Return the optimizer state of a rank's flat tensor with this number."""
    base = state[key]
    if isinstance(base, list):  # DeepSpeed's "elastic" form, for another number of ranks
        return {"step": state.get("base_optimizer_state_step"), **base[number]}
    groups = base["param_groups"]  # some of DeepSpeed's kernels count steps there
    step = groups[number].get("step") if number < len(groups) else None
    return {"step": step, **base["state"].get(number, {})}


def _steps_of(moments: Mapping[str, Any]) -> StateTensor | None:
    step = moments.get("step")
    if step is None:
        return None
    return number_tensor(float(step.values()[0]) if isinstance(step, TorchTensor) else float(step))


def _flat_keys(moments: Mapping[str, Any], numel: int) -> list[str]:
    return [k for k, v in moments.items() if isinstance(v, TorchTensor) and v.numel == numel > 1]


def _stage_2(
    described: Sequence[Mapping[str, Any]], states: Sequence[Mapping[str, Any]]
) -> list[_Group]:
    groups = []
    paddings = states[0].get("param_alignment_paddings")
    for number, shapes in enumerate(described[0]["param_shapes"]):
        partitions = [state["single_partition_of_fp32_groups"][number] for state in states]
        moments = [_moments(state, number, "base_optimizer_state") for state in states]
        flats = {"": _Flat(partitions)}
        for key in _flat_keys(moments[0], partitions[0].numel):
            flats[key] = _Flat([moment[key] for moment in moments])
        step, offset = _steps_of(moments[0]), 0
        parameters, slots = {}, {}
        for index, (name, shape) in enumerate(shapes.items()):
            for key, flat in flats.items():
                slices = list(flat.slices(offset, offset + math.prod(shape)))
                tensor = joined_tensor(shape, slices)
                if key:
                    slots[name, key] = tensor
                else:
                    parameters[name] = tensor
            if step is not None and len(flats) > 1:
                slots[name, "step"] = step
            offset += math.prod(shape) + (paddings[number][index] if paddings else 0)
        groups.append(_Group(shapes, parameters, slots))
    return groups


def _stage_3(
    described: Sequence[Mapping[str, Any]], states: Sequence[Mapping[str, Any]]
) -> list[_Group]:
    shapes = {name: s for group in described[0]["param_shapes"] for name, s in group.items()}
    flat_groups = [state["fp32_flat_groups"] for state in states]
    moments = [
        [_moments(state, number, "optimizer_state_dict") for number in range(len(flat_groups[0]))]
        for state in states
    ]
    by_rank: list[dict[str, _Flat]] = []
    for rank_flat_groups, rank_moments in zip(flat_groups, moments, strict=True):
        flats = {"": _Flat(rank_flat_groups)}
        for key in _flat_keys(rank_moments[0], rank_flat_groups[0].numel):
            flats[key] = _Flat([moment[key] for moment in rank_moments])
        by_rank.append(flats)
    needed = sum(-(-math.prod(shape) // len(states)) for shape in shapes.values())
    if by_rank[0][""].numel < needed:
        raise CheckpointError(
            f"a rank's partition has {by_rank[0][''].numel} elements, and {needed} are needed for "
            f"{len(states)} ranks: the parameters are partitioned in another way (secondary "
            "partitions, experts), which is not supported."
        )
    step, offset = _steps_of(moments[0][0]), 0
    parameters, slots = {}, {}
    for name, shape in shapes.items():
        left, piece = math.prod(shape), -(-math.prod(shape) // len(states))
        for key in by_rank[0]:
            slices, missing = [], left
            for flats in by_rank:
                slices += list(flats[key].slices(offset, offset + min(piece, missing)))
                missing -= min(piece, missing)
            tensor = joined_tensor(shape, slices)
            if key:
                slots[name, key] = tensor
            else:
                parameters[name] = tensor
        if step is not None and len(by_rank[0]) > 1:
            slots[name, "step"] = step
        offset += piece
    return [_Group(shapes, parameters, slots)]
