"""`engine.optimizer`: the user's parameter groups and their settings, for a custom training loop.

The optimizer that updates the parameters differs between engines and ranks: it has flat pieces, the
parameters of one stage, the share of a parameter server, or nothing (on a worker). A scheduler of
torch needs one object that exists from the start, has the user's groups on every rank, and is never
replaced. So a training loop gets a view of the optimizer. Before each step, the settings of the
view are copied to the optimizer.
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
    """The user's parameter groups, the same on every rank and in the user's order.

    Every option of the optimizer, such as `lr`, `momentum`, `betas` and `weight_decay`, can be read
    and set in `param_groups`. torch's `LRScheduler` classes work on this object. The `params` of a
    group are the tensors that this rank updates: parameters, pieces of them, or none.

    Args:
        optimizer: returns the optimizer that updates this rank's tensors. It may have fewer groups
            than the user's; see `group_places`.
        settings: the settings of each of the user's groups, without its parameters.
    """

    def __init__(
        self,
        optimizer: Callable[[], torch.optim.Optimizer],
        settings: Sequence[Mapping[str, Any]],
    ) -> None:
        self._updating = optimizer
        self._stepping = False
        self.defaults = dict(optimizer().defaults)
        self.param_groups = [{"params": [], **_copied(options)} for options in settings]
        for index, group in self._pairs():
            options = {k: v for k, v in group.items() if k not in _OF_PARAMETERS}
            self.param_groups[index].update(_copied(options), params=group["params"])
        self._agreed = [_settings(group) for group in self.param_groups]
        """The settings when this view and the updating optimizer were last synchronized."""
        self._ever_set: list[set[str]] = [set() for _ in self.param_groups]
        """For each group, the keys of settings that were ever changed on this view."""
        self._set_below: list[set[str]] = [set() for _ in self.param_groups]
        """For each group, the keys of settings that were ever changed on the updating optimizer."""

    def _pairs(self) -> list[tuple[int, dict[str, Any]]]:
        """Return the groups of the updating optimizer, with their indices in the user's order."""
        optimizer = self._updating()
        return list(zip(group_places(optimizer), optimizer.param_groups, strict=True))

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The state of the optimizer that updates this rank's tensors."""
        return self._updating().state

    def hand_over(self) -> None:
        """Copy settings that were changed here to the updating optimizer, and the reverse.

        If a setting was changed on both, the value of this view is used.
        """
        self._note_what_was_set()
        for index, group in self._pairs():
            view, agreed = self.param_groups[index], self._agreed[index]
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
                    self._set_below[index].add(key)
        self._agreed = [_settings(group) for group in self.param_groups]

    def stepped(self) -> None:
        """Count a step of the engine for schedulers, and read settings that the step changed."""
        self._stepping = True
        try:
            self.step()
        finally:
            self._stepping = False
        self.hand_over()

    def changed_settings(self, *, below: bool = True) -> list[dict[str, Any]]:
        """Return for each group the settings that a scheduler or the loop has ever changed, by key.

        Args:
            below: whether to include settings that the updating optimizer has changed.
        """
        self._note_what_was_set()
        return [
            {key: _copy(group[key]) for key in sorted(here | (keys_below if below else set()))}
            for group, here, keys_below in zip(
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
        """Refuse a step of the user's loop: `engine.step` updates the parameters.

        Raises:
            ConfigError: the caller is not the engine.
        """
        del closure
        if not self._stepping:
            raise ConfigError(
                "engine.optimizer.step(): engine.step(batch) has done the backward pass and the "
                "update already. Leave backward, step and zero_grad out of the loop."
            )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing: `engine.step` clears the gradients."""
        del set_to_none

    def add_param_group(self, param_group: dict[str, Any]) -> NoReturn:
        """Refuse to add a group: the engine decides at its start how parameters are sharded.

        Raises:
            ConfigError: always.
        """
        del param_group
        raise ConfigError(
            "engine.optimizer.add_param_group: the function that is passed to prepare makes all "
            "groups, as in prepare(model, loss, lambda parameters: torch.optim.AdamW([{'params': "
            "..., 'lr': ...}, ...])). Make all of them there."
        )

    def state_dict(self) -> NoReturn:
        """Refuse to return the state, of which each rank has a part; `engine.save` saves it.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            "engine.optimizer.state_dict(): each rank has a part of it. engine.save(folder) saves "
            "the whole state, engine.load(path) loads it under any strategy."
        )

    def load_state_dict(self, state_dict: Any) -> NoReturn:
        """Refuse to load a state, of which each rank has a part; `engine.load` loads it.

        Raises:
            ConfigError: always.
        """
        del state_dict
        raise ConfigError(
            "engine.optimizer.load_state_dict(): each rank has a part of the state. "
            "engine.load(path) loads a checkpoint under any strategy. Convert one of another "
            "library first: bigtrain checkpoint convert SOURCE TARGET"
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


def _same(left: Any, right: Any) -> bool:
    if isinstance(left, Tensor) or isinstance(right, Tensor):
        both = isinstance(left, Tensor) and isinstance(right, Tensor)
        return both and left.shape == right.shape and bool(torch.equal(left, right))
    try:
        return bool(left == right)
    except (TypeError, ValueError, RuntimeError):
        return left is right
