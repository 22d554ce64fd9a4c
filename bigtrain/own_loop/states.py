"""What a loop keeps beside model and optimizer, in a checkpoint and back."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from bigtrain.checkpoint.folders import checkpoints_of
from bigtrain.checkpoint.plain_values import from_plain, to_plain
from bigtrain.errors import CheckpointError, ConfigError
from bigtrain.optim.loop_optimizer import LoopOptimizer
from bigtrain.own_loop.learning_rate import LearningRate

SAVED_AS = "loop"
"""Its name among what a checkpoint says of itself."""


class LoopStates:
    """The settings of parameter groups, the schedule, and objects of the user's own.

    Args:
        optimizer: of the loop.
        rate: of it.
    """

    def __init__(self, optimizer: LoopOptimizer, rate: LearningRate) -> None:
        self._optimizer, self._rate = optimizer, rate
        self._attached: dict[str, Any] = {}

    def attach(self, objects: Mapping[str, Any]) -> None:
        """Save and load these with the run.

        Raises:
            ConfigError: one has no `state_dict` and `load_state_dict`, or the name is taken.
        """
        for name, one in objects.items():
            if not callable(getattr(one, "state_dict", None)) or not callable(
                getattr(one, "load_state_dict", None)
            ):
                raise ConfigError(
                    f"attach({name}=...): a {type(one).__name__} has no state_dict() and "
                    "load_state_dict(state). Give a scheduler or another object that has both, or "
                    f"hand plain values to engine.save(folder, extra={{{name!r}: ...}})."
                )
            if self._attached.get(name, one) is not one:
                raise ConfigError(f"attach({name}=...): the name is taken. Use another one.")
        self._attached.update(objects)

    def state(self, extra: Mapping[str, Any] | None) -> dict[str, Any]:
        """All of it as JSON keeps it; the same on every rank.

        Raises:
            ConfigError: something of it cannot be kept.
        """
        if extra is not None and not isinstance(extra, Mapping):
            raise ConfigError(
                f'save(extra=...): got a {type(extra).__name__}. Give a dict, as {{"epoch": 3}}.'
            )
        groups = self._optimizer.changed_settings()
        if self._rate.sets and self._rate.scheduler is None:
            groups = [{k: v for k, v in group.items() if k != "lr"} for group in groups]
        return {
            "groups": to_plain(groups, "engine.optimizer.param_groups"),
            "rate": to_plain(self._rate.state(), "learning_rate.state_dict()"),
            "attached": {
                name: to_plain(one.state_dict(), f"{name}.state_dict()")
                for name, one in self._attached.items()
            },
            "extra": to_plain(dict(extra or {}), "extra"),
        }

    def load(self, kept: Any, steps_done: int) -> tuple[dict[str, Any], list[str]]:
        """Take it over, of a checkpoint that may have been written without any.

        Returns:
            What `save` was given as `extra`; lines on what was not as the loop has it.

        Raises:
            CheckpointError: it cannot be read.
        """
        kept = {} if kept is None else kept
        if not isinstance(kept, Mapping):
            raise CheckpointError("the checkpoint's state of the loop is no mapping. Use another.")
        lines = list(self._load_groups(from_plain(kept.get("groups", []))))
        line = self._rate.load_state(from_plain(kept.get("rate")), steps_done)
        lines += [] if line is None or not steps_done else [line]
        attached = kept.get("attached", {})
        for name, one in self._attached.items():
            if name in attached:
                one.load_state_dict(from_plain(attached[name]))
            else:
                lines.append(f"the checkpoint has no state of {name}, which stays as it is")
        for name in sorted(set(attached) - set(self._attached)):
            lines.append(
                f"the checkpoint has a state of {name}, which is not used: call "
                f"engine.attach({name}=...) before engine.load"
            )
        extra: dict[str, Any] = from_plain(kept["extra"]) if "extra" in kept else {}
        return extra, lines

    def _load_groups(self, saved: list[dict[str, Any]]) -> Iterator[str]:
        groups = self._optimizer.param_groups
        if saved and len(saved) != len(groups):
            yield (
                f"the checkpoint has settings of {len(saved)} parameter groups and the optimizer "
                f"has {len(groups)}: they stay as they are"
            )
            return
        for group, settings in zip(groups, saved, strict=False):
            group.update(settings)


class RemovedCheckpoints:
    """Says it when an older checkpoint was removed, the first time.

    Args:
        keep: how many of the newest stay.
    """

    def __init__(self, keep: int) -> None:
        self._keep, self._told = keep, False
        self._there: set[str] = set()

    def tell(self, folder: Path) -> None:
        """Look at a folder after a save."""
        there = {path.name for path in checkpoints_of(folder)}
        gone = sorted(self._there - there)
        if gone and not self._told:
            sys.stderr.write(
                f"bigtrain: {folder / gone[0]} was removed, as those before the newest "
                f"{self._keep} are from here on; prepare(..., checkpoint__keep={10 * self._keep}) "
                "keeps more\n"
            )
            self._told = True
        self._there = there
