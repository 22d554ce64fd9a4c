"""Saving checkpoints: at once, or by a thread that writes a copy of the state."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

from bigtrain.checkpoint.folders import has_own_lock, sole_writer
from bigtrain.checkpoint.messages import HostBuffer
from bigtrain.checkpoint.save import CheckpointWriting, KeptFile
from bigtrain.errors import CheckpointError, ConfigError
from bigtrain.job.schema import CheckpointConfig
from bigtrain.memory.added_bytes import AddedBytes
from bigtrain.ranks.context import RunContext
from bigtrain.tensors.shards import StateTensor

_END_S = 5.0
"""Seconds for which a write may continue after the run failed; other ranks may have ended."""


class Saver:
    """Writes the checkpoints of a run, one at a time.

    An asynchronous save returns once each rank has copied its share of the files to the host;
    together the ranks copy the state once. If a rank's copy would exceed
    `checkpoint.snapshot_bytes`, the rest is written before the save returns. A thread exchanges the
    copies through its own process group, and hashes and writes them. Hashing and writing release
    Python's GIL. The next save waits for the thread. The memory of the copies is reused for each
    save, because the first write to newly allocated memory is slow.

    Args:
        context: the context of the run.
        config: whether to save asynchronously, how many bytes a rank may copy for such a save, and
            how many checkpoints to keep.
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
        """Bytes that this rank copied to the host for the last save."""

    def reserve(self, folder: Path) -> None:
        """Lock a folder against saves of other runs until this saver is closed. Collective.

        Raises:
            ConfigError: another run saves there; raised on all ranks.
        """
        if folder in self._reserved:
            # The lock is missing if somebody removed the folder during the run.
            if self._context.is_main and not has_own_lock(folder):
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
        texts: Mapping[str, KeptFile],
        *,
        best: bool = False,
        added: AddedBytes | None = None,
    ) -> Path:
        """Write a checkpoint or, if saves are asynchronous, begin to write it. Collective.

        The arguments are those of `CheckpointWriting`. `added` counts the bytes of the tensors that
        the writing thread makes.

        Returns:
            The checkpoint's folder. It exists when this method returns or, if saves are
            asynchronous, after `wait`.

        Raises:
            CheckpointError: the checkpoint could not be begun or written; raised on all ranks.
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
        """Return the error of a save that failed since the last call; None if no save failed."""
        if self._writing is not None and not self._writing.is_alive():
            self._join()
        error, self._error = self._error, None
        return error

    def wait(self) -> None:
        """Wait for the running save.

        Raises:
            CheckpointError: the save failed.
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
    """A thread that finishes a checkpoint."""

    def __init__(
        self, writing: CheckpointWriting, context: RunContext, added: AddedBytes | None
    ) -> None:
        super().__init__(name="bigtrain-save", daemon=True)
        self._checkpoint, self._context = writing, context
        self._added = added or AddedBytes()
        self.error: CheckpointError | None = None

    def run(self) -> None:
        """Finish the checkpoint, and store its error for the main thread."""
        try:
            with self._added.counting():
                self._checkpoint.finish(self._context)
        except CheckpointError as error:
            self.error = error
        except (RuntimeError, MemoryError) as error:  # another rank has ended
            words = f"no checkpoint was written to {self._checkpoint.path}: {error}"
            self.error = CheckpointError(words)
