"""Conversion of another library's checkpoint, or of an older format, tensor by tensor.

At any time, memory holds the tensor that is read and three pieces of the file that is written.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from bigtrain.checkpoint.folders import find_checkpoint, is_complete, sole_writer
from bigtrain.checkpoint.foreign.dcp_folder import is_dcp_folder, open_dcp_folder
from bigtrain.checkpoint.foreign.state import ForeignState
from bigtrain.checkpoint.foreign.state_dicts import is_state_dict, open_state_dict, saved_state
from bigtrain.checkpoint.foreign.zero_folder import find_zero_folder, open_zero_folder
from bigtrain.checkpoint.layout import STATE_PARTS
from bigtrain.checkpoint.read import Checkpoint
from bigtrain.checkpoint.save import save_checkpoint
from bigtrain.errors import ConfigError, did_you_mean
from bigtrain.files.regular import is_regular, read_text
from bigtrain.ranks.context import RunContext
from bigtrain.tensors.shards import StateTensor

SOURCE_KINDS = (
    "a checkpoint of bigtrain, a folder of DeepSpeed (ZeRO), of torch.distributed.checkpoint or of "
    "the Hub, a file of torch.save (whatever its name: .pt, .pth.tar, .ckpt) or of safetensors"
)


@dataclass(frozen=True)
class Conversion:
    """The result of a conversion."""

    path: Path
    """The new checkpoint's folder."""
    source: ForeignState
    step: int
    """Optimizer steps done, according to the new checkpoint."""
    samples_seen: int
    """Global samples seen, according to the new checkpoint."""


def open_source(path: Path, *, key: str | None = None, strip: str | None = None) -> ForeignState:
    """Open a checkpoint of any supported kind, without reading its tensors.

    Args:
        path: a file or folder.
        key: the model's key in a trainer's file with several models.
        strip: a prefix to remove from names; tensors without it are left out. None to detect
            Lightning's prefix.

    Raises:
        ConfigError: there is no checkpoint, nothing under the key, or no name with the prefix.
        CheckpointError: the checkpoint is damaged, holds code, or its kind is not supported.
    """
    source = _open_source(path, key, strip)
    return with_prefix_stripped(source, strip) if strip else source


def _open_source(path: Path, key: str | None, strip: str | None) -> ForeignState:
    if not path.exists():
        raise ConfigError(f"convert: {path} does not exist. Give {SOURCE_KINDS}.")
    if path.is_dir():
        try:
            own_checkpoint: Path | None = find_checkpoint(str(path))
        except ConfigError:
            own_checkpoint = None
        if own_checkpoint is not None:
            return _open_own(_without_key(own_checkpoint, key))
        folder = find_zero_folder(path)
        if folder is not None:
            return open_zero_folder(_without_key(folder, key))
        if is_dcp_folder(path):
            return open_dcp_folder(_without_key(path, key))
    if is_state_dict(path):
        return open_state_dict(path, key=key, strip=strip)
    raise ConfigError(f"convert: {path} is not a supported checkpoint. Give {SOURCE_KINDS}.")


def _without_key(path: Path, key: str | None) -> Path:
    if key is None:
        return path
    raise ConfigError(
        f"convert: --key {key} chooses in a file of torch.save, and {path} is a folder. Leave it "
        "out; --strip PREFIX takes tensors whose names begin with it."
    )


def with_prefix_stripped(source: ForeignState, prefix: str) -> ForeignState:
    """Return only the tensors whose names begin with a prefix, without the prefix in their names.

    Args:
        source: the opened source.
        prefix: the prefix, such as `model.`. The names of `source` have no prefixes of DDP and
            torch.compile; these are also removed from the beginning of `prefix`.

    Raises:
        ConfigError: no name begins with the prefix.
    """
    for wrapper in ("module.", "_orig_mod.", "_fsdp_wrapped_module."):
        prefix = prefix.removeprefix(wrapper)
    if not any(name.startswith(prefix) for name in source.model):
        first = sorted({f"{name.partition('.')[0]}." for name in source.model})
        raise ConfigError(
            f"convert: --strip {prefix}: no name of a tensor begins with it. Names begin with "
            f"{', '.join(first[:12])}{' and others' if len(first) > 12 else ''}. "
            "Use one of these, or leave --strip out."
        )
    model, optimizer = (
        {n.removeprefix(prefix): t for n, t in state.items() if n.startswith(prefix)}
        for state in (source.model, source.optimizer)
    )
    count = len(source.model) - len(model)
    note = f"Left out: {count} tensors whose names do not begin with {prefix}"
    notes = (*source.notes, note) if count else source.notes
    return replace(source, model=model, optimizer=optimizer, notes=notes)


def _open_own(path: Path) -> ForeignState:
    checkpoint = Checkpoint(path)
    parts: dict[str, dict[str, StateTensor]] = {part: {} for part in STATE_PARTS}
    for name, tensor in checkpoint.tensors.items():
        part, _, rest = name.partition(".")
        parts[part][rest] = saved_state(tensor)
    made = ("format", "step", "samples_seen", "torch", "files")
    meta = {key: value for key, value in checkpoint.meta.items() if key not in made}
    config = path / "config.json"
    return ForeignState(
        f"bigtrain's format {checkpoint.manifest.format}",
        parts["model"],
        parts["optimizer"],
        int(checkpoint.meta["step"]),
        int(checkpoint.meta["samples_seen"]),
        meta=meta,
        texts={"config.json": read_text(config)} if is_regular(config) else {},
    )


def with_tied(source: ForeignState, ties: Iterable[str]) -> ForeignState:
    """Return the source with further names of tied tensors, which files of the Hub leave out.

    Args:
        source: the opened source.
        ties: `NAME=OTHER` gives the tensor NAME the values of OTHER.

    Raises:
        ConfigError: there is no OTHER, or NAME exists already.
    """
    model = dict(source.model)
    for tie in ties:
        name, _, tied_to = tie.partition("=")
        if not name or tied_to not in model or name in model:
            wrong = (
                f"there is no {tied_to!r}" if tied_to not in model else f"{name!r} exists already"
            )
            raise ConfigError(
                f"convert: --tie {tie}: {wrong}{did_you_mean(tied_to, model)} Write --tie "
                "NAME=OTHER for a tensor NAME that has the values of OTHER."
            )
        model[name] = model[tied_to]
    return replace(source, model=model)


def convert(
    source: ForeignState, target: Path, step: int | None = None, samples_seen: int | None = None
) -> Conversion:
    """Write a checkpoint of the source's state, and point the file `latest` at it.

    Args:
        source: the opened source; its tensors are read while the checkpoint is written.
        target: the folder `step-N` itself, a run's folder, or the folder that will hold `step-N`.
        step: N. None takes the step of `target`, else the step of the source, else 0.
        samples_seen: the position in the data, in global samples. None takes the position of the
            source, else 0.

    Raises:
        ConfigError: a checkpoint of that step exists already, or another process writes there.
        CheckpointError: the checkpoint could not be written; the folder is unchanged.
    """
    named = re.fullmatch(r"step-(\d+)", target.name)
    if named:
        wanted, folder = int(named[1]), target.parent
        if step is not None and step != wanted:
            raise ConfigError(f"convert: {target} is not of step {step}. Leave --step out.")
        step = wanted
    else:
        is_run = (target / "checkpoints").is_dir() or (target / "config.yaml").is_file()
        folder = target / "checkpoints" if is_run else target
    step = step if step is not None else source.step or 0
    samples = samples_seen if samples_seen is not None else source.samples_seen or 0
    final = folder / f"step-{step}"
    if final.exists():
        existing = "a checkpoint" if is_complete(final) else "something"
        raise ConfigError(
            f"convert: there is {existing} at {final} already. Give another folder, or --step N."
        )
    state = {f"model.{name}": tensor for name, tensor in source.model.items()}
    state |= {f"optimizer.{name}": tensor for name, tensor in source.optimizer.items()}
    meta = {"world_size": 0, "seed": 0, "random": [], **source.meta, "converted_from": source.kind}
    with sole_writer(folder):
        path = save_checkpoint(
            folder,
            step,
            state,
            {**meta, "samples_seen": samples},
            RunContext.alone(),
            keep=sys.maxsize,
            texts=source.texts,
        )
    return Conversion(path, source, step, samples)
