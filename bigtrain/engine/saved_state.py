"""Save and load the state of an engine: model, optimizer, schedule, position and random states."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from typing import Any

from bigtrain.checkpoint.folders import as_folder
from bigtrain.checkpoint.save import KeptFile
from bigtrain.checkpoint.saver import Saver
from bigtrain.checkpoint.together import (
    check_optimizer_state,
    config_texts,
    newest_of_all,
    open_together,
    random_streams,
)
from bigtrain.core.state import extra_modules, extra_states
from bigtrain.engine.alongside.average import AVERAGE_SUFFIX, WeightAverage
from bigtrain.engine.seeds import continue_streams
from bigtrain.errors import CheckpointError, DamagedCheckpointError
from bigtrain.hub.adapter_files import with_adapter_files
from bigtrain.models.blueprint import Blueprint
from bigtrain.optim.whole import WholeOptimizer
from bigtrain.own_loop.calls import LoopCalls
from bigtrain.own_loop.states import SAVED_AS, RemovedCheckpoints
from bigtrain.slicing.equal_ranks import check_equal_ranks
from bigtrain.tensors.shards import StateTensor


class SavedState(LoopCalls):
    """The methods `save` and `load` of an engine, which defines the attributes named here."""

    in_own_loop = False
    """Whether `prepare` made the engine. The job then does not describe model and optimizer."""
    blueprint: Blueprint
    weight_average: WeightAverage | None
    _closing: ExitStack
    _model_class: str
    _removed: RemovedCheckpoints

    @property
    def _whole_optimizer(self) -> WholeOptimizer:
        raise NotImplementedError

    @cached_property
    def saver(self) -> Saver:
        """The writer of this run's checkpoints."""
        return self._closing.enter_context(Saver(self.context, self.job.checkpoint))

    def save(
        self,
        folder: str | Path,
        *,
        best: Mapping[str, float] | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> Path:
        """Write a checkpoint into a folder and return its path. Collective.

        With `checkpoint.asynchronous` the checkpoint is complete once `saver.wait` returns.

        Args:
            folder: the folder of this run's checkpoints. Of these, only the newest
                `checkpoint.keep` and the best one are kept.
            best: the figures of a validation, if they are the best so far. The checkpoint is then
                the best one.
            extra: plain values that `load` returns, such as `{"epoch": 3}`; those of rank 0 are
                saved.

        Raises:
            ConfigError: `folder` is no path, or a state of the loop cannot be saved.
            CheckpointError: the checkpoint could not be written (a full disk, a deleted folder).
                It is raised on all ranks. Earlier checkpoints stay, and the run can continue.
            UnequalRanksError: unsliced tensors differ between ranks of the tp axis.
        """
        loop, folder = self._loop_states.state(extra), as_folder(folder, "save")
        self.saver.reserve(folder)
        with self._explaining("while a checkpoint was written"), self.meter.saving() as added:
            state = self.runner.state()
            if self.weight_average is not None:
                state |= self.weight_average.state()
            check_equal_ranks(state, self.context, self.steps_done)
            meta: dict[str, Any] = {
                "samples_seen": self.samples_seen,
                "validation": best,
                SAVED_AS: loop,
            }
            if self.in_own_loop:
                optimizer_class = self._whole_optimizer.kind_name
                meta |= {"model_class": self._model_class, "optimizer_class": optimizer_class}
            if self._extra_at_start:
                meta["extra_state"] = self._extra_states()
            meta["job"] = self.job.model_dump(mode="json")
            meta["mesh"] = {axis: getattr(self.plan, axis) for axis in ("pp", "dp", "tp")}
            texts = self._kept_files(state)
            path = self.saver.save(
                folder,
                self.steps_done,
                state,
                {**meta, **random_streams(self.context)},
                texts,
                best=best is not None,
                added=added,
            )
        if self.in_own_loop and self.context.is_main:
            self._removed.tell(folder)
        return path

    def _kept_files(self, state: Mapping[str, StateTensor]) -> Mapping[str, KeptFile]:
        """Return the files other than weights that other libraries need to open the model.

        The mapping may be empty on ranks that do not write the files.
        """
        if self.blueprint.files is None:
            with self.blueprint.given_back():
                files: Mapping[str, KeptFile] = config_texts(self.runner.module)
        elif self.context.is_main:  # rank 0 writes them
            dtypes = (t.dtype for name, t in state.items() if name.startswith("model."))
            files = self.blueprint.files(next((d for d in dtypes if d.is_floating_point), None))
        else:
            files = {}
        return with_adapter_files(self.blueprint.model, files)

    def load(self, path: str | Path, *, weights_only: bool = False) -> dict[str, Any]:
        """Load a checkpoint: weights, optimizer, schedule, position, random states. Collective.

        Args:
            path: the path of a checkpoint; or a folder that was passed to `save`, whose newest
                checkpoint is loaded.
            weights_only: whether to load only the state of the model: parameters, buffers and extra
                states. The checkpoint may then be of any optimizer. The optimizer's state and the
                position of the run do not change, and an average starts at the loaded weights.

        Returns:
            The `extra` that was passed to `save`; empty with `weights_only`.

        Raises:
            ConfigError: `path` is no path.
            CheckpointError: there is no checkpoint, it is damaged, or it is of another model. It is
                raised on all ranks.
        """
        path = as_folder(path, "load")
        path = newest_of_all(path, self.context) or path
        checkpoint = open_together(path, self.context)
        tensors = {n: t for n, t in checkpoint.tensors.items() if not n.endswith(AVERAGE_SUFFIX)}
        if weights_only:
            tensors = {n: t for n, t in tensors.items() if not n.startswith("optimizer.")}
        check_optimizer_state(tensors, self.runner.optimizer)
        with self._explaining("while a checkpoint was read"), self.meter.resuming():
            try:
                self.runner.load_state(tensors)
            except DamagedCheckpointError as error:
                if self.context.world_size == 1:
                    raise  # the caller can load another checkpoint instead
                # Other ranks saw no damage, so they would not load another checkpoint.
                raise CheckpointError(str(error)) from None
        if self.weight_average is not None:
            self.weight_average.load(tensors if weights_only else checkpoint.tensors)
        self.runner.label_state()  # the optimizer's state was made outside of a step
        extra = checkpoint.meta.get("extra_state", {})
        for name, module in extra_modules(self.runner.roots):
            if name in extra:
                module.set_extra_state(extra[name])
        if weights_only:
            return {}
        self.steps_done = self.context.recorder.step = int(checkpoint.meta["step"])
        self.samples_seen = int(checkpoint.meta["samples_seen"])
        extra_values, lines = self._loop_states.load(checkpoint.meta.get(SAVED_AS), self.steps_done)
        for line in lines if self.context.is_main else ():
            sys.stderr.write(f"bigtrain: {line}\n")
        continue_streams(checkpoint.meta, self.context, self.steps_done)
        return extra_values

    @cached_property
    def _extra_at_start(self) -> dict[str, Any]:
        """The extra states (`get_extra_state`) of the modules before the first step."""
        return extra_states(self.runner.roots)

    def _extra_states(self) -> dict[str, Any] | None:
        """Return the extra states of all modules on rank 0, and None on other ranks. Collective.

        A module runs only on the ranks of its stage. So the state that is returned for a module is
        that of the lowest rank on which the state has changed.
        """
        ranks = self.context.gather_objects(extra_states(self.runner.roots))
        if ranks is None:
            return None
        merged = dict(self._extra_at_start)
        for name, start in self._extra_at_start.items():
            states = (rank[name] for rank in ranks if rank is not None and name in rank)
            merged[name] = next((state for state in states if state != start), start)
        return merged
