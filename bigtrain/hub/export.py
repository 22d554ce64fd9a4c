"""Export a checkpoint as a folder that from_pretrained opens, with the names of the source."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from bigtrain.checkpoint.folders import replacing, write_text
from bigtrain.checkpoint.read import Checkpoint
from bigtrain.checkpoint.write import write_tensors
from bigtrain.errors import ConfigError
from bigtrain.files.parse import read_json_object
from bigtrain.files.regular import is_regular, read_bytes
from bigtrain.hub.adapter_files import (
    BASE_CONFIG,
    SETTINGS,
    WEIGHTS,
    AdapterRecord,
    merged_state,
    peft_state,
    read_model_state,
)
from bigtrain.hub.architecture import Architecture, read_architecture
from bigtrain.hub.conversion import (
    ConvertedTensors,
    Group,
    Rules,
    grouped,
    loading_rules,
    reverse_grouped,
    saving_rules,
)
from bigtrain.hub.folder import COMPANIONS, CONFIG, HubFolder
from bigtrain.hub.saved_files import Origin, configuration_text, main_dtype
from bigtrain.ranks.context import RunContext
from bigtrain.tensors.shards import StateTensor

FILE_BYTES = 5_000_000_000
"""Largest number of bytes of tensors in one file; a larger tensor has a file of its own."""


@dataclass(frozen=True)
class Exported:
    """The result of an export."""

    path: Path
    """The new folder."""
    tensors: int
    """Number of tensors."""
    nbytes: int
    """Bytes of all tensors."""
    notes: tuple[str, ...] = ()
    """Sentences about tensors that differ from those of the source."""
    opened_by: str = "transformers"
    """The library whose function from_pretrained opens the folder."""


def export_folder(
    checkpoint: Checkpoint,
    output: Path,
    dtype: torch.dtype | None,
    *,
    merge: bool = False,
    file_bytes: int = FILE_BYTES,
) -> Exported:
    """Write a checkpoint's model as a folder that from_pretrained of transformers opens.

    If a model has adapters that are not merged, only they are written, and from_pretrained of peft
    opens the folder. Memory holds one tensor of the model and the pieces that are being written.

    Args:
        checkpoint: a checkpoint of an `hf:` model, or of any other model of transformers.
        output: the new folder.
        dtype: dtype of floating-point tensors; None for that of the checkpoint.
        merge: whether to add adapters to the weights, and to write the whole model.
        file_bytes: largest number of bytes of tensors in one file.

    Raises:
        ConfigError: there are no adapters to merge; the checkpoint has no configuration of a model
            of transformers, or its tensors are not those of the model.
        CheckpointError: the folder could not be written; nothing is left of it.
    """
    record = AdapterRecord.read(checkpoint.path)
    if record is not None and not merge:
        return _export_adapters(checkpoint, record, output, dtype)
    architecture, origin = _described(checkpoint)
    with torch.device("meta"):
        model = architecture.build(architecture.config)
    state = read_model_state(checkpoint, dtype)
    if merge:
        state = merged_checkpoint(checkpoint, state, dtype)
    names = None if origin is None else origin.names
    saved, notes = reverted(model, _with_ties(model, state, names), names)
    with replacing(output) as draft:
        draft.mkdir()
        size = _write_files(draft, saved, file_bytes)
        dtypes = {name: tensor.dtype for name, tensor in state.items()}
        text = configuration_text(architecture.config, architecture.name, main_dtype(dtypes))
        write_text(draft / CONFIG, text)
        for name in COMPANIONS:
            if is_regular(checkpoint.path / name):
                (draft / name).write_bytes(read_bytes(checkpoint.path / name, most=1 << 30))
    return Exported(output, len(saved), size, notes)


def _export_adapters(
    checkpoint: Checkpoint, record: AdapterRecord, output: Path, dtype: torch.dtype | None
) -> Exported:
    state = peft_state(record, read_model_state(checkpoint, dtype))
    with replacing(output) as draft:
        draft.mkdir()
        write_tensors(draft / WEIGHTS, state, RunContext.alone())
        write_text(draft / SETTINGS, json.dumps(record.settings, indent=2))
        for name in COMPANIONS:
            if is_regular(checkpoint.path / name):
                (draft / name).write_bytes(read_bytes(checkpoint.path / name, most=1 << 30))
    base = record.settings.get("base_model_name_or_path")
    note = f"Adapters of {base}; --merge writes the whole model."
    return Exported(output, len(state), sum(t.nbytes for t in state.values()), (note,), "peft")


def merged_checkpoint(
    checkpoint: Checkpoint, state: Mapping[str, StateTensor], dtype: torch.dtype | None = None
) -> dict[str, StateTensor]:
    """Return the tensors of a checkpoint's model with the adapters added to the weights.

    Args:
        checkpoint: the checkpoint.
        state: the tensors of the checkpoint's model, by name.
        dtype: dtype for weights that are in 4 bits; None for the dtype that they had before they
            were quantized.

    Raises:
        ConfigError: the checkpoint has no adapters.
    """
    record = AdapterRecord.read(checkpoint.path)
    if record is None:
        raise ConfigError(
            f"export --merge: {checkpoint.path} has no adapters (model.lora). Leave --merge out."
        )
    return merged_state(record, state, dtype)


def _described(checkpoint: Checkpoint) -> tuple[Architecture, Origin | None]:
    path = checkpoint.path / CONFIG
    if not is_regular(path):
        path = checkpoint.path / BASE_CONFIG
    if not is_regular(path):
        raise ConfigError(
            f"export: {checkpoint.path} has no {CONFIG}: its model is none of transformers. Give a "
            "file that ends in .safetensors or .pt."
        )
    settings, content = read_json_object(path), read_bytes(path)
    with tempfile.TemporaryDirectory() as name:  # transformers reads only a file of this name
        (Path(name) / CONFIG).write_bytes(content)
        folder = HubFolder(f"export {checkpoint.path}", Path(name), settings)
        return read_architecture(folder, {}), Origin.read(checkpoint.path)


def _with_ties(
    model: nn.Module, state: Mapping[str, StateTensor], names: Sequence[str] | None
) -> dict[str, StateTensor]:
    """Return all tensors of a model by name; without `names`, tied tensors by one name only.

    Raises:
        ConfigError: the checkpoint lacks a tensor of the model.
    """
    tied: Mapping[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    same: dict[str, set[str]] = {}
    for target, source in tied.items():
        same.setdefault(source, {source}).add(target)
    whole = {}
    for name in model.state_dict():
        others = next((group for group in same.values() if name in group), {name})
        found = next((state[one] for one in (name, *sorted(others)) if one in state), None)
        if found is None:
            raise ConfigError(
                f"export: the checkpoint has no {name}, which {type(model).__name__} of its "
                f"{CONFIG} has. Give a .safetensors file instead of a folder."
            )
        if names is not None or name not in tied:
            whole[name] = found
    return whole


def reverted(
    model: nn.Module, state: Mapping[str, StateTensor], names: Sequence[str] | None
) -> tuple[dict[str, StateTensor], tuple[str, ...]]:
    """Return a model's tensors under the names that files have; stacked tensors are separated.

    Args:
        model: the model of transformers, on any device.
        state: all tensors of the model by their names in the model; tied tensors under each of
            their names if `names` is given.
        names: the names in the files that the model was loaded from; None for the names that
            transformers would write.

    Returns:
        The tensors, and sentences about names that only the source or only the model has.
    """
    if names is None:
        rules = saving_rules(model)
    else:
        used = loading_rules(model)
        grouped(model, names, Rules.of(used))  # marks the rules that were used
        rules = [rule for rule in used if rule.was_used()]
    converted = ConvertedTensors(model, state)
    found: dict[str, StateTensor] = {}
    own_names: dict[str, str] = {}
    reverse = Rules.of([rule.reverse_transform() for rule in rules[::-1]])
    for group in reverse_grouped(state, reverse):
        for name, tensor in converted.of_group(group).items():
            found[_final_name(name, group, reverse)] = tensor
        if group.converter is None:
            own_names[group.name] = next(iter(group.sources))
    if names is None:
        return found, ()
    return _as_named(model, found, own_names, names)


def _final_name(name: str, group: Group, reverse: Rules) -> str:
    return name if group.converter is None else reverse.renamed(name)


def _as_named(
    model: nn.Module,
    found: Mapping[str, StateTensor],
    own_names: Mapping[str, str],
    names: Sequence[str],
) -> tuple[dict[str, StateTensor], tuple[str, ...]]:
    """Return the tensors that the source has, under its names, and those of new modules.

    Args:
        model: the model.
        found: the tensors, by the names that the reversed rules give.
        own_names: the model's names of the tensors that were only renamed. Tied tensors are
            recognized by these names.
        names: the names in the source's files.

    Returns:
        The tensors, and sentences about names that only the source or only the model has.
    """
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    wanted, tied = set(names), getattr(model, "all_tied_weights_keys", None) or {}
    made: dict[str, StateTensor] = {}
    added: list[str] = []
    taken: set[str] = set()
    for name, tensor in found.items():
        forms = (name, name.removeprefix(prefix), f"{prefix}{name}")
        own = next((form for form in forms if form in wanted), None)
        if own is not None:
            made[own] = tensor
            taken.add(own_names.get(name, name))
        elif own_names.get(name, name) not in {*tied, *tied.values()}:
            made[name] = tensor
            added.append(name)
    for name, tensor in found.items():  # a tied tensor that the source lacks gets its first name
        source = own_names.get(name, name)
        group = {source, *(target for target, other in tied.items() if other == source)}
        if source in tied.values() and not group & taken:
            made[name] = tensor
            added.append(name)
    notes = []
    missing = sorted(wanted - made.keys())
    if missing:
        notes.append(f"The source also had {_listed(missing)}, which the model does not use.")
    if added:
        notes.append(f"The source had no {_listed(added)}.")
    return made, tuple(notes)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _write_files(folder: Path, state: Mapping[str, StateTensor], file_bytes: int) -> int:
    """Write the tensors to one or more files with an index; return the bytes of all tensors."""
    parts: list[dict[str, StateTensor]] = [{}]
    filled = 0
    for name, tensor in state.items():
        if parts[-1] and filled + tensor.nbytes > file_bytes:
            parts.append({})
            filled = 0
        parts[-1][name] = tensor
        filled += tensor.nbytes
    total = 0
    places: dict[str, str] = {}
    for number, part in enumerate(parts, start=1):
        file_name = "model.safetensors"
        if len(parts) > 1:
            file_name = f"model-{number:05d}-of-{len(parts):05d}.safetensors"
        write_tensors(folder / file_name, part, RunContext.alone())
        places |= dict.fromkeys(part, file_name)
        total += sum(tensor.nbytes for tensor in part.values())
    if len(parts) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
        write_text(folder / "model.safetensors.index.json", json.dumps(index, indent=2))
    return total
