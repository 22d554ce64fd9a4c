"""The state of a custom loop in a checkpoint, other than that of model and optimizer."""

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
"""The key of this state in the manifest of a checkpoint."""


class LoopStates:
    """The settings of parameter groups, the scheduler, and the attached objects of the user.

    Args:
        optimizer: the loop's optimizer.
        rate: the learning rate of the loop.
    """

    def __init__(self, optimizer: LoopOptimizer, rate: LearningRate) -> None:
        self._optimizer, self._rate = optimizer, rate
        self._attached: dict[str, Any] = {}

    def attach(self, objects: Mapping[str, Any]) -> None:
        """Include objects in the state, by name; see `LoopCalls.attach`.

        Raises:
            ConfigError: an object has no `state_dict` or no `load_state_dict`, or a name is taken.
        """
        for name, attached in objects.items():
            if not callable(getattr(attached, "state_dict", None)) or not callable(
                getattr(attached, "load_state_dict", None)
            ):
                raise ConfigError(
                    f"attach({name}=...): a {type(attached).__name__} has no state_dict() and "
                    "load_state_dict(state). Give a scheduler or another object that has both, or "
                    f"hand plain values to engine.save(folder, extra={{{name!r}: ...}})."
                )
            if self._attached.get(name, attached) is not attached:
                raise ConfigError(f"attach({name}=...): the name is taken. Use another one.")
        self._attached.update(objects)

    def state(self, extra: Mapping[str, Any] | None) -> dict[str, Any]:
        """Return the state of the loop as plain values for JSON.

        Args:
            extra: the argument `extra` of `save`.

        Raises:
            ConfigError: `extra` is no mapping, or a value cannot be saved.
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
                name: to_plain(attached.state_dict(), f"{name}.state_dict()")
                for name, attached in self._attached.items()
            },
            "extra": to_plain(dict(extra or {}), "extra"),
        }

    def load(self, saved: Any, steps_done: int) -> tuple[dict[str, Any], list[str]]:
        """Load the state of a loop from a checkpoint.

        Args:
            saved: the result of `state` in the checkpoint; None if the checkpoint has no state of a
                loop.
            steps_done: the number of steps that the run has taken.

        Returns:
            The argument `extra` of `save`; and lines on differences between the checkpoint and this
            loop.

        Raises:
            CheckpointError: `saved` is no mapping.
        """
        saved = {} if saved is None else saved
        if not isinstance(saved, Mapping):
            raise CheckpointError(
                "the checkpoint's state of the loop is not a mapping. Use another checkpoint."
            )
        lines = list(self._load_groups(from_plain(saved.get("groups", []))))
        line = self._rate.load_state(from_plain(saved.get("rate")), steps_done)
        lines += [] if line is None or not steps_done else [line]
        states = saved.get("attached", {})
        for name, attached in self._attached.items():
            if name in states:
                attached.load_state_dict(from_plain(states[name]))
            else:
                lines.append(f"the checkpoint has no state of {name}, which stays as it is")
        for name in sorted(set(states) - set(self._attached)):
            lines.append(
                f"the checkpoint has a state of {name}, which is not used: call "
                f"engine.attach({name}=...) before engine.load"
            )
        extra: dict[str, Any] = from_plain(saved["extra"]) if "extra" in saved else {}
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
    """Reports, once, that a save has removed an older checkpoint.

    Args:
        keep: the number of newest checkpoints that stay.
    """

    def __init__(self, keep: int) -> None:
        self._keep, self._reported = keep, False
        self._existing: set[str] = set()

    def tell(self, folder: Path) -> None:
        """Compare a folder of checkpoints with its last state, and report the first removal.

        Args:
            folder: the folder of the checkpoints, after a save.
        """
        existing = {path.name for path in checkpoints_of(folder)}
        removed = sorted(self._existing - existing)
        if removed and not self._reported:
            sys.stderr.write(
                f"bigtrain: {folder / removed[0]} was removed: only the newest {self._keep} "
                f"checkpoints stay; prepare(..., checkpoint__keep={10 * self._keep}) keeps more\n"
            )
            self._reported = True
        self._existing = existing
