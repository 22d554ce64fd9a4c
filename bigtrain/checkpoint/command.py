"""`bigtrain checkpoint`: inspect, verify, convert, export and compare checkpoints."""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from rich.console import Console
from rich.table import Table

from bigtrain.checkpoint.folders import find_checkpoint, replacing
from bigtrain.checkpoint.foreign.convert import convert, open_source, with_tied
from bigtrain.checkpoint.foreign.state_dicts import saved_state
from bigtrain.checkpoint.manifest import MANIFEST, Manifest
from bigtrain.checkpoint.read import Checkpoint
from bigtrain.checkpoint.state_differences import StateDifference, compare_states
from bigtrain.checkpoint.write import write_tensors
from bigtrain.errors import (
    CheckpointError,
    ConfigError,
    DamagedCheckpointError,
    ForeignFileError,
)
from bigtrain.job.checkpoint_arguments import OWN_CHECKPOINTS, checkpoint_parser
from bigtrain.memory.allocator import return_large_blocks
from bigtrain.ranks.context import RunContext
from bigtrain.tensors.shards import StateTensor
from bigtrain.units import format_bytes

_DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
}
_LARGE_BYTES = 1 << 20
_FILES = (".safetensors", ".pt")
_OTHER_FILES = (".bin", ".pth", ".ckpt", ".npz", ".gguf", ".onnx", ".h5")
"""Suffixes of files that `export` cannot write; a name with any other suffix is a folder's."""


class _Console(Console):
    """A console that raises if its output is closed; rich's console exits with status 1."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


class FolderExport(Protocol):
    """A function that writes a checkpoint as a folder in the Hub's format; see `hub.export`."""

    def __call__(
        self, checkpoint: Checkpoint, output: Path, dtype: torch.dtype | None, *, merge: bool
    ) -> ExportedFolder:
        """Write the folder.

        Args:
            checkpoint: the checkpoint.
            output: the new folder.
            dtype: dtype of floating-point tensors; None for that of the checkpoint.
            merge: whether adapters are merged into the weights, or are written alone.
        """


class StateMerge(Protocol):
    """A function that merges adapters into a model's weights; see `hub.export`."""

    def __call__(
        self,
        checkpoint: Checkpoint,
        state: Mapping[str, StateTensor],
        dtype: torch.dtype | None,
    ) -> dict[str, StateTensor]:
        """Return the tensors by their names in the model without adapters.

        Args:
            checkpoint: the checkpoint.
            state: the tensors of the checkpoint's model, by name.
            dtype: dtype for weights that the checkpoint has in 4 bits; None for the dtype that they
                had before they were quantized.
        """


class ExportedFolder(Protocol):
    """The result of `FolderExport`."""

    @property
    def tensors(self) -> int:
        """Number of tensors."""

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences about tensors that differ from the source's."""

    @property
    def opened_by(self) -> str:
        """The library whose function from_pretrained opens the folder."""


def main(
    arguments: list[str],
    export_folder: FolderExport | None = None,
    merge_state: StateMerge | None = None,
) -> int:
    """Run one action of the command and return the exit status.

    The status is 1 if `verify` finds damage, or if `diff --exit-code` finds a difference.

    Args:
        arguments: the words after `bigtrain checkpoint`.
        export_folder: writes folders in the Hub's format; None to refuse to export a folder.
        merge_state: merges adapters for the export of a file; None if `export_folder` is None.

    Raises:
        ConfigError: there is no checkpoint, or the output file exists already.
        CheckpointError: a checkpoint is damaged, or its kind is not supported.
    """
    options = checkpoint_parser().parse_args(arguments)
    return_large_blocks(_LARGE_BYTES)  # otherwise the heap grows by every piece that is read
    actions: dict[str, Callable[[argparse.Namespace], int]] = {
        "inspect": _inspect,
        "verify": _verify,
        "convert": _convert,
        "export": partial(_export, export_folder=export_folder, merge_state=merge_state),
        "diff": _diff,
    }
    try:
        status = actions[options.action](options)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as `| head`, has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return status


def _find(path: str, action: str) -> Path:
    try:
        return find_checkpoint(path)
    except ConfigError:
        exists = Path(path).exists()
        others = (
            f" Convert a checkpoint of another library with: bigtrain checkpoint convert {path} "
            "TARGET"
            if exists
            else ""
        )
        raise ConfigError(
            f"{action}: there is {'no checkpoint of bigtrain' if exists else 'nothing'} at "
            f"{path!r}. Give {OWN_CHECKPOINTS}.{others}"
        ) from None


def _write_json(values: Any) -> None:
    # JSON has no infinity and no NaN, so they are written as text.
    sys.stdout.write(json.dumps(_finite(values), indent=2) + "\n")


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_finite(inner) for inner in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _inspect(options: argparse.Namespace) -> int:
    description = describe_checkpoint(Checkpoint(_find(options.path, "inspect"), verify=False))
    if options.as_json:
        _write_json(description)
        return 0
    console = _Console(highlight=False, soft_wrap=True)
    console.print(description["path"])
    ranks = f", {description['world_size']} ranks" if description["world_size"] else ""
    console.print(f"  step {description['step']}, {description['samples_seen']} samples{ranks}")
    console.print(f"  format {description['format']}, torch {description['torch']}")
    if description["converted_from"]:
        console.print(f"  converted from {description['converted_from']}")
    if description["strategy"]:
        axes = (description["mesh"] or {}).items()
        mesh = ", mesh " + " x ".join(f"{axis} {size}" for axis, size in axes) if axes else ""
        console.print(f"  strategy {description['strategy']}{mesh}")
        model = description["model"]["name"]
        console.print(f"  model {model}, optimizer {description['optimizer']}")
    _print_parts(console, description)
    if options.tensors:
        table = Table("tensor", "type", "shape", "bytes", box=None)
        for entry in description["tensors"]:
            shape = " x ".join(map(str, entry["shape"])) or "one number"
            table.add_row(entry["name"], entry["dtype"], shape, format_bytes(entry["bytes"]))
        console.print(table)
    table = Table("file", "bytes", box=None)
    for entry in description["files"]:
        table.add_row(entry["name"], format_bytes(entry["bytes"]))
    console.print(table)
    return 0


def _print_parts(console: Console, description: dict[str, Any]) -> None:
    table = Table("part", "tensors", "elements", "bytes", "types", box=None)
    for part, summary in description["parts"].items():
        rows = {part: summary, **{f"  {slot}": inner for slot, inner in summary["slots"].items()}}
        for name, row in rows.items():
            counts = f"{row['tensors']}", f"{row['elements']:,}"
            types = ", ".join(f"{dtype} {count}" for dtype, count in row["dtypes"].items())
            table.add_row(name, *counts, format_bytes(row["bytes"]), types)
    console.print(table)


def describe_checkpoint(checkpoint: Checkpoint) -> dict[str, Any]:
    """Describe the run, tensors and files of a checkpoint as JSON values; sizes are in bytes."""
    meta, manifest = checkpoint.meta, checkpoint.manifest
    job = meta.get("job") or {}
    parts: dict[str, Any] = {}
    tensors = []
    for name, tensor in checkpoint.tensors.items():
        part, _, rest = name.partition(".")
        total = parts.setdefault(part, _empty())
        rows = [total]
        if part == "optimizer":
            rows.append(total["slots"].setdefault(rest.rpartition(".")[2], _empty()))
        for row in rows:
            row["tensors"] += 1
            row["elements"] += math.prod(tensor.shape)
            row["bytes"] += tensor.nbytes
            types = row["dtypes"]
            types[_word(tensor.dtype)] = types.get(_word(tensor.dtype), 0) + 1
        about = {"dtype": _word(tensor.dtype), "shape": list(tensor.shape)}
        tensors.append({"name": name, **about, "bytes": tensor.nbytes})
    files = [{"name": n, "bytes": int(record["bytes"])} for n, record in manifest.files.items()]
    return {
        "path": str(checkpoint.path),
        "format": manifest.format,
        "step": int(meta["step"]),
        "samples_seen": int(meta["samples_seen"]),
        "world_size": meta.get("world_size"),
        "torch": meta.get("torch"),
        "converted_from": meta.get("converted_from"),
        "strategy": (job.get("strategy") or {}).get("name"),
        "mesh": meta.get("mesh") or _mesh_of(job, int(meta.get("world_size") or 0)),
        "model": _of_loop(meta, "model_class") or job.get("model"),
        "optimizer": meta.get("optimizer_class") or (job.get("optim") or {}).get("name"),
        "parts": parts,
        "tensors": tensors,
        "files": files,
    }


def _of_loop(meta: Mapping[str, Any], key: str) -> dict[str, Any] | None:
    """Return a name that a run of the user's own loop records; None if it is not recorded."""
    return {"name": meta[key]} if isinstance(meta.get(key), str) else None


def _mesh_of(job: Mapping[str, Any], world_size: int) -> dict[str, int] | None:
    """Return the mesh axes that follow from a job and its number of ranks; None if unknown."""
    if not job or not world_size:
        return None
    asked, cuts = job.get("mesh") or {}, bool((job.get("strategy") or {}).get("cut"))
    tp = int(asked.get("tp") or 1)
    pp = int(asked.get("pp") or (world_size // tp if cuts else 1))
    return {"pp": pp, "dp": world_size // (pp * tp), "tp": tp}


def _empty() -> dict[str, Any]:
    return {"tensors": 0, "elements": 0, "bytes": 0, "dtypes": {}, "slots": {}}


def _verify(options: argparse.Namespace) -> int:
    path = _find(options.path, "verify")
    try:
        manifest = Manifest.open(path)
        damages = [(name, manifest.damage(name)) for name in manifest.files]
        size = sum(int(record["bytes"]) for record in manifest.files.values())
    except DamagedCheckpointError as error:  # without a manifest no other file can be checked
        damages, size = [(MANIFEST, error.damage)], 0
    damaged = [(name, text) for name, text in damages if text is not None]
    if options.as_json:
        files = [{"name": name, "damage": text} for name, text in damages]
        _write_json({"path": str(path), "damaged": len(damaged), "bytes": size, "files": files})
    else:
        for _, text in damaged:
            sys.stdout.write(f"{text}\n")
        state = f"{len(damaged)} of {len(damages)} damaged" if damaged else "none is damaged"
        sys.stdout.write(f"{path}: {len(damages)} files, {format_bytes(size)}: {state}\n")
    return 1 if damaged else 0


def _convert(options: argparse.Namespace) -> int:
    for name in ("step", "samples"):
        value = getattr(options, name)
        if value is not None and value < 0:
            raise ConfigError(f"convert: --{name} {value}: at least 0 is needed")
    try:
        opened = open_source(Path(options.source), key=options.key, strip=options.strip)
        opened = with_tied(opened, options.tie)
    except DamagedCheckpointError:
        raise
    except CheckpointError as error:  # the source is at fault, and nothing has been written
        raise ForeignFileError(str(error)) from None
    made = convert(opened, Path(options.target), options.step, options.samples)
    source, notes = made.source, list(made.source.notes)
    if not source.optimizer:
        notes.append("No optimizer state was converted: a run from here starts with a new one.")
    if source.samples_seen is None and options.samples is None:
        notes.append(
            "The number of samples it has seen is unknown: data start from the beginning. "
            "Use --samples N to set it."
        )
    if options.as_json:
        about: dict[str, Any] = {"path": str(made.path), "source": source.kind}
        about |= {"step": made.step, "samples_seen": made.samples_seen, "notes": notes}
        _write_json({**about, "model": len(source.model), "optimizer": len(source.optimizer)})
        return 0
    counts = f"{len(source.model)} tensors of the model, {len(source.optimizer)} of the optimizer"
    sys.stdout.write(f"{made.path}: {counts}, from {source.kind}\n")
    for note in notes:
        sys.stdout.write(f"  {note}\n")
    sys.stdout.write(f"Continue from it with: bigtrain train --resume {made.path}\n")
    return 0


def _export(
    options: argparse.Namespace,
    export_folder: FolderExport | None,
    merge_state: StateMerge | None,
) -> int:
    checkpoint = Checkpoint(_find(options.path, "export"))
    output, prefix = Path(options.output), f"{options.part}."
    if output.suffix in _OTHER_FILES or (export_folder is None and output.suffix not in _FILES):
        raise ConfigError(
            f"export: {output} has to end in .safetensors or .pt; for a model of transformers it "
            "may be a new folder"
        )
    if output.exists():
        raise ConfigError(f"export: {output} is there already. Give another name, or remove it.")
    if not output.parent.is_dir():
        folder = output.parent
        raise ConfigError(
            f"export: there is no folder {folder}. Make it: mkdir -p {shlex.quote(str(folder))}"
        )
    if options.merge and options.part != "model":
        raise ConfigError("export: --merge is for --part model. Leave one of the two out.")
    dtype = _DTYPES[options.dtype] if options.dtype else None
    if export_folder is not None and output.suffix not in _FILES:
        return _export_folder(options, checkpoint, output, dtype, export_folder)
    state = {
        name.removeprefix(prefix): saved_state(tensor, dtype)
        for name, tensor in checkpoint.tensors.items()
        if name.startswith(prefix)
    }
    if not state:
        raise ConfigError(
            f"export: {checkpoint.path} has no {options.part} state, only "
            f"{', '.join(sorted({name.partition('.')[0] for name in checkpoint.tensors}))}."
        )
    if options.merge and merge_state is not None:
        state = merge_state(checkpoint, state, dtype)
    with replacing(output) as draft:
        if output.suffix == ".pt":
            tensors = {
                name: state_tensor.values().view(state_tensor.shape)
                for name, state_tensor in state.items()
            }
            torch.save(tensors, draft)
        else:
            write_tensors(draft, state, RunContext.alone())
    _report_file(options, output, state)
    return 0


def _export_folder(
    options: argparse.Namespace,
    checkpoint: Checkpoint,
    output: Path,
    dtype: torch.dtype | None,
    export_folder: FolderExport,
) -> int:
    if options.part != "model":
        raise ConfigError(
            f"export: a folder has the model only, and --part is {options.part}. Give a file that "
            "ends in .safetensors or .pt."
        )
    made = export_folder(checkpoint, output, dtype, merge=options.merge)
    if options.as_json:
        about = {"path": str(output), "tensors": made.tensors, "bytes": made.nbytes}
        _write_json({**about, "notes": list(made.notes)})
        return 0
    sys.stdout.write(f"{output}: {made.tensors} tensors, {format_bytes(made.nbytes)}\n")
    for note in made.notes:
        sys.stdout.write(f"  {note}\n")
    sys.stdout.write(f"Open it with {made.opened_by}: from_pretrained('{output}')\n")
    return 0


def _report_file(options: argparse.Namespace, output: Path, state: dict[str, StateTensor]) -> None:
    size = output.stat().st_size
    if options.as_json:
        _write_json({"path": str(output), "tensors": len(state), "bytes": size})
    else:
        sys.stdout.write(f"{output}: {len(state)} tensors, {format_bytes(size)}\n")


def _diff(options: argparse.Namespace) -> int:
    pair = [Checkpoint(_find(path, "diff")) for path in (options.first, options.second)]
    first, second = pair
    alone = [[n for n in a.tensors if n not in b.tensors] for a, b in (pair, pair[::-1])]
    differences = list(compare_states(first, second))
    differing = sorted((d for d in differences if not d.equal), key=lambda d: (-d.relative, d.name))
    if options.as_json:
        _write_json(
            {
                "first": str(first.path),
                "second": str(second.path),
                "steps": [int(item.meta["step"]) for item in pair],
                "equal": len(differences) - len(differing),
                "different": [_as_json(item) for item in differing],
                "only_in_first": alone[0],
                "only_in_second": alone[1],
            }
        )
    else:
        _print_differences(differing, len(differences))
        for checkpoint, names in zip(pair, alone, strict=True):
            for name in names:
                sys.stdout.write(f"only in {checkpoint.path}: {name}\n")
    return 1 if options.exit_code and (differing or any(alone)) else 0


def _print_differences(differing: list[StateDifference], compared: int) -> None:
    if differing:
        table = Table("tensor", "absolute", "relative", "elements", "", box=None)
        for difference in differing:
            changed = [f"{a} and {b}" for a, b in (difference.shapes,) if a != b]
            changed += [f"{_word(a)} and {_word(b)}" for a, b in (difference.dtypes,) if a != b]
            sizes = (
                f"{difference.absolute:.3g}",
                f"{difference.relative:.3g}",
                f"{difference.elements:,}",
            )
            table.add_row(difference.name, *sizes, ", ".join(changed))
        _Console(highlight=False, soft_wrap=True).print(table)
    equal = compared - len(differing)
    sys.stdout.write(f"{len(differing)} of {compared} tensors differ, {equal} are equal\n")


def _as_json(difference: StateDifference) -> dict[str, Any]:
    return {
        "name": difference.name,
        "absolute": difference.absolute,
        "relative": difference.relative,
        "elements": difference.elements,
        "shapes": [list(shape) for shape in difference.shapes],
        "dtypes": [_word(dtype) for dtype in difference.dtypes],
    }
