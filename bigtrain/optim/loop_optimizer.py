"""The optimizer as a training loop of the user's own sees it: its groups, and their settings.

What updates parameters is another object under each engine: one on flat pieces, on one stage's
parameters, on a server's share, on nothing at all (a worker). A scheduler of torch wants one that
is there from the start, has the user's groups on every rank, and stays. So the loop gets this view,
whose settings go to the engine's optimizer before each step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from bigtrain.errors import ConfigError
from bigtrain.optim.whole import group_places

_OF_PARAMETERS = ("params", "param_names")


class LoopOptimizer(torch.optim.Optimizer):
    """The user's parameter groups, on every rank the same and in his order.

    `param_groups` can be read and set: `lr`, `momentum`, `betas`, `weight_decay`, whatever the
    optimizer has. torch's `LRScheduler` classes work on it. A group's `params` are what this rank
    updates of it: pieces, or nothing.

    Args:
        optimizer: gives the optimizer that updates; it may have fewer groups, see `group_places`.
        settings: of each of the user's groups, without its parameters.
    """

    def __init__(
        self,
        optimizer: Callable[[], torch.optim.Optimizer],
        settings: Sequence[Mapping[str, Any]],
    ) -> None:
        self._updating = optimizer
        self._stepping = False
        self.defaults = dict(optimizer().defaults)
        self.param_groups = [{"params": [], **_copied(one)} for one in settings]
        for place, group in self._pairs():
            own = {k: v for k, v in group.items() if k not in _OF_PARAMETERS}
            self.param_groups[place].update(_copied(own), params=group["params"])
        self._agreed = [_settings(group) for group in self.param_groups]
        """The settings when view and optimizer were last alike."""
        self._ever_set: list[set[str]] = [set() for _ in self.param_groups]
        self._set_below: list[set[str]] = [set() for _ in self.param_groups]

    def _pairs(self) -> list[tuple[int, dict[str, Any]]]:
        """The groups of the optimizer that updates, with their places among the user's."""
        optimizer = self._updating()
        return list(zip(group_places(optimizer), optimizer.param_groups, strict=True))

    @property
    def state(self) -> Any:  # type: ignore[override]
        """What this rank's optimizer keeps of what it updates."""
        return self._updating().state

    def hand_over(self) -> None:
        """Give the optimizer that updates what was set here; take over what was set there."""
        self._note_what_was_set()
        for place, group in self._pairs():
            view, agreed = self.param_groups[place], self._agreed[place]
            view["params"] = group["params"]
            for key in group.keys() - set(_OF_PARAMETERS):
                if key in view and not _same(view[key], agreed.get(key)):
                    value = view[key]
                    if isinstance(group[key], Tensor) and not isinstance(value, Tensor):
                        group[key].fill_(float(value))
                    else:
                        group[key] = value.clone() if isinstance(value, Tensor) else value
                elif key not in agreed or not _same(group[key], agreed[key]):
                    view[key] = _copy(group[key])
                    self._set_below[place].add(key)
        self._agreed = [_settings(group) for group in self.param_groups]

    def stepped(self) -> None:
        """Say that the engine has updated: schedulers note it, settings that it counts are read."""
        self._stepping = True
        try:
            self.step()
        finally:
            self._stepping = False
        self.hand_over()

    def changed_settings(self, *, below: bool = True) -> list[dict[str, Any]]:
        """Of each group what was ever set since the start, by a scheduler or the loop.

        Args:
            below: whether also what was set at the optimizer that updates.
        """
        self._note_what_was_set()
        return [
            {key: _copy(group[key]) for key in sorted(own | (other if below else set()))}
            for group, own, other in zip(
                self.param_groups, self._ever_set, self._set_below, strict=True
            )
        ]

    def _note_what_was_set(self) -> None:
        for group, agreed, keys in zip(
            self.param_groups, self._agreed, self._ever_set, strict=True
        ):
            for key, value in _settings(group).items():
                if key not in agreed or not _same(value, agreed[key]):
                    keys.add(key)

    def step(self, closure: Any = None) -> Any:
        """Refused: `engine.step` updates.

        Raises:
            ConfigError: always, but for the engine.
        """
        del closure
        if not self._stepping:
            raise ConfigError(
                "engine.optimizer.step(): engine.step(batch) has done the backward pass and the "
                "update already. Leave backward, step and zero_grad out of the loop."
            )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Nothing is left to clear: `engine.step` has done it."""
        del set_to_none

    def add_param_group(self, param_group: dict[str, Any]) -> NoReturn:
        """Refused: what is sharded and cut is decided when the engine is made.

        Raises:
            ConfigError: always.
        """
        del param_group
        raise ConfigError(
            "engine.optimizer.add_param_group: groups are made by the optimizer that prepare is "
            "given, as in prepare(model, loss, lambda parameters: torch.optim.AdamW([{'params': "
            "..., 'lr': ...}, ...])). Make all of them there."
        )

    def state_dict(self) -> NoReturn:
        """Refused: a rank has a part of the state.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            "engine.optimizer.state_dict(): each rank has a part of it. engine.save(folder) saves "
            "the whole state, engine.load(path) takes it over under any strategy."
        )

    def load_state_dict(self, state_dict: Any) -> NoReturn:
        """Refused: a rank has a part of the state.

        Raises:
            ConfigError: always.
        """
        del state_dict
        raise ConfigError(
            "engine.optimizer.load_state_dict(): each rank has a part of the state. "
            "engine.load(path) takes a checkpoint over under any strategy; one of another library "
            "becomes one by: bigtrain checkpoint convert SOURCE TARGET"
        )

    def __reduce__(self) -> NoReturn:
        raise ConfigError(
            "engine.optimizer cannot be pickled or copied: it belongs to this engine. "
            "engine.save(folder) saves its state."
        )


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return _copied({k: v for k, v in group.items() if k not in _OF_PARAMETERS})


def _copied(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _copy(value) for key, value in settings.items()}


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        both = isinstance(one, Tensor) and isinstance(other, Tensor)
        return both and one.shape == other.shape and bool(torch.equal(one, other))
    try:
        return bool(one == other)
    except (TypeError, ValueError, RuntimeError):
        return one is other
