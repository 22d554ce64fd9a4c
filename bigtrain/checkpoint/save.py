"""Saving one checkpoint atomically: it is complete, or it does not exist.

    checkpoints/step-100/
        model-00001-of-00004.safetensors      tensors under the model's own names
        model.safetensors.index.json          the file of each tensor
        optimizer-00001-of-00004.safetensors  `NAME.KEY` for each slot of each parameter
        optimizer.safetensors.index.json
        state.json                            step, position, random states, job, versions
        manifest.json                         hashes of all pieces; written last
    checkpoints/latest                        name of the newest checkpoint

A checkpoint is written under a temporary name, and renamed once it is on the disk.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from bigtrain.checkpoint.folders import draft_folder, publish, write_text
from bigtrain.checkpoint.layout import checkpoint_files, index_texts
from bigtrain.checkpoint.manifest import FORMAT, MANIFEST, STATE, file_record, manifest_text
from bigtrain.checkpoint.messages import HostBuffer
from bigtrain.checkpoint.write import FileRecord, FileWriting, gather_entries
from bigtrain.errors import CheckpointError, LostRankError
from bigtrain.ranks.context import RunContext
from bigtrain.tensors.shards import StateTensor

KeptFile = str | bytes | Callable[[Path], Mapping[str, FileRecord]]
"""The content of a file, or a function that writes it into the folder of a checkpoint whose tensors
have been written, and returns the file's record."""


def save_checkpoint(
    folder: Path,
    step: int,
    state: Mapping[str, StateTensor],
    meta: Mapping[str, Any],
    context: RunContext,
    *,
    keep: int = 1,
    texts: Mapping[str, KeptFile] | None = None,
) -> Path:
    """Write a whole checkpoint, and return its folder. Collective; see `CheckpointWriting`."""
    writing = CheckpointWriting(folder, step, state, meta, context, keep=keep, texts=texts)
    return writing.finish(context)


class CheckpointWriting:
    """The writing of one checkpoint by all ranks: the constructor begins it, `finish` ends it.

    The constructor is collective. `finish` may be called in another thread. The ranks that see the
    folder made by rank 0 write files: all ranks on a shared disk, the ranks of the first node if
    each node has its own disk.

    Args:
        folder: the run's `checkpoints/`.
        step: optimizer steps done.
        state: this rank's parts of the tensors `model.NAME` and `optimizer.NAME.KEY`.
        meta: the rest of the state, as JSON values; those of rank 0 are written.
        context: the context of all ranks.
        keep, best: see `publish`.
        texts: further files by name; those of rank 0 are written.

    Raises:
        CheckpointError: the checkpoint cannot be begun; raised on all ranks.
    """

    def __init__(
        self,
        folder: Path,
        step: int,
        state: Mapping[str, StateTensor],
        meta: Mapping[str, Any],
        context: RunContext,
        *,
        keep: int = 1,
        best: bool = False,
        texts: Mapping[str, KeptFile] | None = None,
    ) -> None:
        self.path = folder / f"step-{step}"
        self._step, self._keep, self._best = step, keep, best
        self._meta, self._texts = meta, texts or {}
        self._draft = draft = _agreed(context, lambda: draft_folder(folder, step), folder)
        seen = [row[0] > 0 for row in context.all_gather_rows([draft.is_dir()])]
        owners = [rank for rank, sees in enumerate(seen) if sees or rank == 0]
        try:
            self._files = checkpoint_files(gather_entries(state, context, owners))
        except CheckpointError:
            self._discard(context)
            raise
        self._writing = FileWriting(draft, self._files, state, context, share_memory=True)

    def take(self, context: RunContext, most_bytes: int | None, room: HostBuffer) -> int:
        """Copy the bytes that are not written yet; see `FileWriting.take`. Collective."""
        return self._writing.take(context, most_bytes, room)

    def finish(self, context: RunContext) -> Path:
        """Write the rest, then `publish` the checkpoint. Collective.

        Args:
            context: the context of all ranks.

        Returns:
            The checkpoint's folder.

        Raises:
            CheckpointError: the checkpoint could not be written; raised on all ranks. Earlier
                checkpoints are unchanged.
        """
        try:
            with context.long_timeout():  # another rank's file sync may exceed the usual timeout
                return self._finish(context)
        except CheckpointError:
            self._discard(context)
            raise

    def _finish(self, context: RunContext) -> Path:
        records: dict[str, FileRecord] = {}
        problem: OSError | LostRankError | None = None
        try:
            records = self._writing.finish(context)
        except (OSError, LostRankError) as error:
            problem = error
        words = None if problem is None else f"rank {context.rank}: {problem}"
        gathered = context.all_gather_objects((words, isinstance(problem, LostRankError), records))
        written = {name for outcome in gathered if outcome for name in outcome[2]}
        lost = any(outcome and outcome[1] for outcome in gathered)
        if lost or (None in gathered and not written.issuperset(f.name for f in self._files)):
            raise LostRankError(_no_checkpoint(self._draft.parent, "a rank was lost during it"))
        failed = [outcome[0] for outcome in gathered if outcome and outcome[0] is not None]
        if failed:
            raise _failure(self._draft.parent, failed[0])

        def publish_files() -> Path:
            small: dict[str, KeptFile] = {**index_texts(self._files), **self._texts}
            head = {"format": FORMAT, "step": self._step, "torch": torch.__version__}
            small[STATE] = json.dumps({**head, **self._meta}, indent=1)
            every = {
                name: record
                for outcome in gathered
                if outcome
                for name, record in outcome[2].items()
            }
            for name, text in small.items():
                if callable(text):
                    every |= text(self._draft)
                    continue
                content = text.encode() if isinstance(text, str) else text
                write_text(self._draft / name, content)
                every[name] = file_record(content)
            write_text(self._draft / MANIFEST, manifest_text(every))
            return publish(self._draft, self._step, self._keep, best=self._best)

        return _agreed(context, publish_files, self._draft.parent)

    def _discard(self, context: RunContext) -> None:
        if context.is_main:
            shutil.rmtree(self._draft, ignore_errors=True)


def _agreed(context: RunContext, make: Any, folder: Path) -> Path:
    """Return on every rank the path that `make` returns on rank 0.

    Raises:
        CheckpointError: `make` failed on rank 0; raised on all ranks.
    """
    result: tuple[Path | None, str | None] = (None, None)
    if context.is_main:
        try:
            result = make(), None
        except OSError as error:
            result = None, f"rank 0: {error}"
    path, problem = context.broadcast_object(result)
    if problem is not None:
        raise _failure(folder, problem)
    return Path(path)


def _failure(folder: Path, problem: str) -> CheckpointError:
    return CheckpointError(_no_checkpoint(folder, problem))


def _no_checkpoint(folder: Path, problem: str) -> str:
    return f"no checkpoint was written to {folder}: {problem}"
