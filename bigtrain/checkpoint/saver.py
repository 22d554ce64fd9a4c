"""Saving beside training: a copy of the state is taken, and a thread writes it."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

from bigtrain.checkpoint.folders import has_own_lock, sole_writer
from bigtrain.checkpoint.save import CheckpointWriting
from bigtrain.checkpoint.write import HostBuffer
from bigtrain.errors import CheckpointError, ConfigError
from bigtrain.job.schema import CheckpointConfig
from bigtrain.memory.added_bytes import AddedBytes
from bigtrain.ranks.context import RunContext
from bigtrain.tensors.shards import StateTensor

_END_S = 5.0
"""How long a write may go on when the run has failed: the other ranks may be gone."""


class Saver:
    """Writes the checkpoints of a run, one after the other.

    Asynchronous, a save returns when each rank has copied what it gives of the files: all ranks
    together copy the state once. A thread exchanges, hashes and writes it, through a group of its
    own; hashing and writing hold no lock of the interpreter. The next save waits for it. The room
    for the copy stays.

    Args:
        context: of the run.
        config: whether training goes on while files are written, and what is kept.
    """

    def __init__(self, context: RunContext, config: CheckpointConfig) -> None:
        self._context = context
        self._asynchronous, self._keep = config.asynchronous, config.keep
        self._most_bytes, self._room = config.snapshot_bytes, HostBuffer()
        self._beside: RunContext | None = None
        self._writing: _BackgroundWriting | None = None
        self._error: CheckpointError | None = None
        self._reserved: set[Path] = set()
        self._locks = ExitStack()
        self.copied_bytes = 0
        """What this rank copied for the last save, on the host."""

    def reserve(self, folder: Path) -> None:
        """Keep other runs from saving into a folder until this one is closed. Collective.

        Raises:
            ConfigError: another one saves there; the same on all ranks.
        """
        if folder in self._reserved:
            if self._context.is_main and not has_own_lock(folder):  # it was removed meanwhile
                self._locks.enter_context(sole_writer(folder))
            return
        problem = ""
        if self._context.is_main:
            try:
                self._locks.enter_context(sole_writer(folder))
            except ConfigError as error:
                problem = str(error)
        problem = self._context.broadcast_object(problem)
        if problem:
            raise ConfigError(problem)
        self._reserved.add(folder)

    def save(
        self,
        folder: Path,
        step: int,
        state: Mapping[str, StateTensor],
        meta: Mapping[str, Any],
        texts: Mapping[str, str],
        *,
        best: bool = False,
        added: AddedBytes | None = None,
    ) -> Path:
        """Write a checkpoint, or begin to. Collective; see `CheckpointWriting`.

        `added` counts what the thread holds.

        Returns:
            The checkpoint's folder: it is there when this returns or, asynchronous, after `wait`.

        Raises:
            CheckpointError: it could not be written, or not be begun; the same on all ranks.
        """
        self._context.recorder.enter("save")
        self._join()
        context = self._context
        if self._asynchronous:
            context = self._beside = self._beside or context.for_background()
        writing = CheckpointWriting(
            folder, step, state, meta, context, keep=self._keep, best=best, texts=texts
        )
        if not self._asynchronous:
            return writing.finish(context)
        self.copied_bytes = writing.take(context, self._most_bytes, self._room)
        self._writing = _BackgroundWriting(writing, context, added)
        self._writing.start()
        return writing.path

    def failure(self) -> CheckpointError | None:
        """Why a save failed that ended since the last call; None where none did."""
        if self._writing is not None and not self._writing.is_alive():
            self._join()
        error, self._error = self._error, None
        return error

    def wait(self) -> None:
        """Wait for the save that is under way.

        Raises:
            CheckpointError: it failed.
        """
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.join()
            if writing.error is not None:
                raise writing.error

    def _join(self) -> None:
        try:
            self.wait()
        except CheckpointError as error:
            self._error = error

    def __enter__(self) -> Saver:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with self._locks:
            if kind is None:
                self.wait()
            elif self._writing is not None:
                self._writing.join(_END_S)


class _BackgroundWriting(threading.Thread):
    """Ends a checkpoint that was begun."""

    def __init__(
        self, writing: CheckpointWriting, context: RunContext, added: AddedBytes | None
    ) -> None:
        super().__init__(name="bigtrain-save", daemon=True)
        self._checkpoint, self._context = writing, context
        self._added = added or AddedBytes()
        self.error: CheckpointError | None = None

    def run(self) -> None:
        """See `Thread.run`."""
        try:
            with self._added.counting():
                self._checkpoint.finish(self._context)
        except CheckpointError as error:
            self.error = error
        except (RuntimeError, MemoryError) as error:  # another rank is gone
            words = f"no checkpoint was written to {self._checkpoint.path}: {error}"
            self.error = CheckpointError(words)
