"""A checkpoint of bigtrain's, made of another library's or of an older one; tensor by tensor.

The tensor that is read and three pieces of the file that is written are in memory, not more.
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
    "the Hub, a state dict (.pt, .pth, .bin, .ckpt, .safetensors)"
)


@dataclass(frozen=True)
class Conversion:
    """What was made."""

    path: Path
    """The new checkpoint's folder."""
    source: ForeignState
    step: int
    samples_seen: int


def open_source(path: Path) -> ForeignState:
    """Describe whatever checkpoint is at a path.

    Raises:
        ConfigError: none is.
        CheckpointError: it is damaged, holds code, or is of a kind that is not read.
    """
    if not path.exists():
        raise ConfigError(f"convert: {path} does not exist. Give {SOURCE_KINDS}.")
    if path.is_dir():
        try:
            own: Path | None = find_checkpoint(str(path))
        except ConfigError:
            own = None
        if own is not None:
            return _open_own(own)
        folder = find_zero_folder(path)
        if folder is not None:
            return open_zero_folder(folder)
        if is_dcp_folder(path):
            return open_dcp_folder(path)
    if is_state_dict(path):
        return open_state_dict(path)
    raise ConfigError(f"convert: {path} is nothing that is read here. Give {SOURCE_KINDS}.")


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
    """A source that has its tensors under more names: the Hub's files leave out tied ones.

    Args:
        source: as it was opened.
        ties: `NAME=OTHER`: the tensor NAME has the values of OTHER.

    Raises:
        ConfigError: there is no OTHER, or a NAME already.
    """
    model = dict(source.model)
    for tie in ties:
        name, _, other = tie.partition("=")
        if not name or other not in model or name in model:
            wrong = f"there is no {other!r}" if other not in model else f"{name!r} is there already"
            raise ConfigError(
                f"convert: --tie {tie}: {wrong}{did_you_mean(other, model)} Write --tie NAME=OTHER "
                "for a tensor NAME that has the values of OTHER."
            )
        model[name] = model[other]
    return replace(source, model=model)


def convert(
    source: ForeignState, target: Path, step: int | None = None, samples_seen: int | None = None
) -> Conversion:
    """Write a checkpoint, and point `latest` beside it at it.

    Args:
        source: is read while it is written.
        target: `step-N` itself, a run's folder, or the folder that is to have `step-N`.
        step: N, where the source does not say it or is wrong.
        samples_seen: where the data go on; the same.

    Raises:
        ConfigError: there is one of that step already, or another process writes there.
        CheckpointError: it could not be written; what was there stays.
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
        what = "a checkpoint" if is_complete(final) else "something"
        raise ConfigError(
            f"convert: there is {what} at {final} already. Give another folder, or --step N."
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
