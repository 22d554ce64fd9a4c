"""Training state: saved at each commit, and restored when training resumes."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from bigtrain.errors import CheckpointError
from bigtrain.hvd.elastic.commits import CommitFile
from bigtrain.hvd.gathers import allgather_object, broadcast_object
from bigtrain.hvd.state_broadcasts import broadcast_optimizer_state, broadcast_parameters


class State:
    """Base class of states; use `ObjectState` or `TorchState`."""

    def __init__(self) -> None:
        self._reset_callbacks: list[Callable[[], None]] = []

    def register_reset_callbacks(self, callbacks: Sequence[Callable[[], None]]) -> None:
        """Register functions to call when training resumes, for example on fewer ranks."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Call `reset` and the callbacks."""
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def commit(self) -> None:
        """Save the current state. All ranks call it after the same step."""
        self.save()
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Do nothing: the launcher tracks hosts, and restarts all ranks if they change."""

    def reset(self) -> None:
        """Prepare for resuming training. The base class does nothing."""

    @abstractmethod
    def save(self) -> None:
        """Save a copy in memory, and in a file if the launcher restarts ranks."""

    @abstractmethod
    def restore(self) -> None:
        """Restore the last saved copy."""

    @abstractmethod
    def sync(self, root_rank: int = 0) -> None:
        """Overwrite the state with that of a rank. Collective.

        Args:
            root_rank: the rank whose state is sent, numbered among all ranks.
        """


class ObjectState(State):
    """A state of plain objects, each of which is an attribute.

    Args:
        bcast_object: a function that returns on all ranks the object of one rank; by default
            `hvd.broadcast_object`.
        get_rank: not used.
        kwargs: the initial values of the attributes, by name.
    """

    _parts: dict[str, _Part]

    def __init__(
        self,
        bcast_object: Callable[..., Any] | None = None,
        get_rank: Callable[[], int] | None = None,  # noqa: ARG002 - Horovod's
        **kwargs: Any,
    ) -> None:
        super().__init__()
        self._bcast_object = bcast_object or broadcast_object
        self._number = 0
        self._file: CommitFile | None = None
        self._saved = copy.deepcopy(kwargs)
        for name, value in kwargs.items():
            setattr(self, name, value)

    def keep_in(self, file: CommitFile | None) -> None:
        """Write all further commits to a file; None to have them only in memory."""
        self._file = file

    def resume(self) -> bool:
        """Load the newest commit of all nodes, and return whether there is one. Collective.

        Raises:
            CheckpointError: the commit is damaged, cannot be read, or is of other attributes.
        """
        mine = 0 if self._file is None else self._file.number()
        numbers = allgather_object(mine, "commit")
        newest = max(numbers)
        if not newest:
            return False
        root = numbers.index(newest)
        content = self._file.read() if self._file is not None and mine == newest else None
        if content is not None:
            self._take(content["states"], content["objects"])
        self._number = newest
        self.on_reset()
        self.sync(root)
        return True

    def save(self) -> None:
        """Save a copy in memory, and in a file if a later start can resume from it.

        The file is written if the launcher restarts ranks or `BIGTRAIN_ELASTIC` names a folder. The
        first rank of each node writes it.

        Raises:
            ConfigError: an object cannot be stored in the file; see `CommitFile.write`.
        """
        self._saved = {name: copy.deepcopy(getattr(self, name)) for name in self._saved}
        states = self._save_parts()
        if self._file is not None:
            self._file.write(self._number + 1, states, self._saved)
        self._number += 1

    def restore(self) -> None:
        """Restore the last saved copy."""
        self._take({}, copy.deepcopy(self._saved))

    def sync(self, root_rank: int = 0) -> None:
        """Overwrite the state with that of a rank, and save it in memory. Collective."""
        attributes = {name: getattr(self, name) for name in self._saved}
        if attributes:
            # A function of the script is called as Horovod calls it, without a rank.
            is_ours = self._bcast_object is broadcast_object
            received = (
                self._bcast_object(attributes, root_rank)
                if is_ours
                else self._bcast_object(attributes)
            )
            self._take({}, received)
        self._saved = {name: copy.deepcopy(getattr(self, name)) for name in self._saved}

    def _save_parts(self) -> dict[str, Any]:
        return {}

    def _take(self, states: dict[str, Any], objects: dict[str, Any]) -> None:  # noqa: ARG002
        for name, value in objects.items():
            setattr(self, name, value)


class _Part:
    """An object with a state dict, such as a model or an optimizer."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self.saved = copy.deepcopy(value.state_dict())

    def save(self) -> Any:
        self.saved = copy.deepcopy(self.value.state_dict())
        return self.saved

    def restore(self) -> None:
        self.value.load_state_dict(copy.deepcopy(self.saved))

    def sync(self, root_rank: int) -> None:
        if isinstance(self.value, nn.Module):
            broadcast_parameters(self.value.state_dict(), root_rank)
        elif isinstance(self.value, torch.optim.Optimizer):
            broadcast_optimizer_state(self.value, root_rank)
        else:
            self.value.load_state_dict(broadcast_object(self.value.state_dict(), root_rank))
        self.save()


class TorchState(ObjectState):
    """A state of models, optimizers, samplers and plain objects, each of which is an attribute.

    Args:
        model: a module; None for no model.
        optimizer: the optimizer of the model's parameters; None for no optimizer.
        kwargs: further objects, by name. Objects with `state_dict` and `load_state_dict`, such as
            schedulers and an `ElasticSampler`, are saved and restored by these methods.
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        **kwargs: Any,
    ) -> None:
        objects = {"model": model, "optimizer": optimizer, **kwargs}
        self._parts = {name: _Part(value) for name, value in objects.items() if _has_state(value)}
        for name, part in self._parts.items():
            super().__setattr__(name, part.value)
        super().__init__(**{name: v for name, v in objects.items() if name not in self._parts})

    def __setattr__(self, name: str, value: Any) -> None:
        parts = self.__dict__.get("_parts", {})
        if name in parts:
            parts[name] = _Part(value)
        super().__setattr__(name, value)

    def restore(self) -> None:
        """Restore the last saved copy."""
        for part in self._parts.values():
            part.restore()
        super().restore()

    def sync(self, root_rank: int = 0) -> None:
        """Overwrite the state with that of a rank, and save it in memory. Collective."""
        for part in self._parts.values():
            part.sync(root_rank)
        super().sync(root_rank)

    def _save_parts(self) -> dict[str, Any]:
        return {name: part.save() for name, part in self._parts.items()}

    def _take(self, states: dict[str, Any], objects: dict[str, Any]) -> None:
        for name, state in states.items():
            if name not in self._parts:
                raise CheckpointError(
                    f"hvd.elastic: the commit has {name!r}, which the state does not have. Give "
                    "TorchState the same names as before, or remove the commit to begin anew."
                )
            self._parts[name].value.load_state_dict(state)
        super()._take(states, objects)


def _has_state(value: Any) -> bool:
    return all(callable(getattr(value, name, None)) for name in ("state_dict", "load_state_dict"))
