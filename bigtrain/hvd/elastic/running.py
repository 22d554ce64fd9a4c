"""Run the training function so that it resumes after a restart."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

from bigtrain.hvd.elastic.commits import CommitFile
from bigtrain.hvd.elastic.state import ObjectState, State
from bigtrain.hvd.session import local_rank

_P = ParamSpec("_P")
_R = TypeVar("_R")


class HorovodInternalError(RuntimeError):
    """Raised by a script on all ranks to resume from the last commit.

    A failed exchange does not raise this error: all ranks end, and the launcher restarts them.
    """


class HostsUpdatedInterrupt(RuntimeError):
    """Raised by a script on all ranks so that the training function is called again.

    Args:
        skip_sync: whether the ranks' states are equal already, and need not be synchronized.
    """

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__("the hosts of the run have changed")
        self.skip_sync = skip_sync


def run_elastic(
    func: Callable[Concatenate[Any, _P], _R],
) -> Callable[..., _R]:
    """Decorate a training function with `@hvd.elastic.run`, so that it resumes from a commit.

    If a rank fails, all ranks end, and torchrun with `--max-restarts` restarts them on the
    available hosts. The function then resumes from the last `state.commit()`, after the callbacks
    of `register_reset_callbacks` were called. If no launcher restarts ranks, commits are only in
    memory, unless the environment variable of `FOLDER_VARIABLE` names a folder.

    Args:
        func: the training function, whose first argument is the state.
    """

    @functools.wraps(func)
    def wrapper(state: Any, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        _begin(state)
        while True:
            try:
                return func(state, *args, **kwargs)
            except HorovodInternalError:
                state.restore()
                skips = False
            except HostsUpdatedInterrupt as interrupt:
                skips = interrupt.skip_sync
            state.on_reset()
            if not skips:
                state.sync()

    return wrapper


def _begin(state: State) -> None:
    if isinstance(state, ObjectState):
        state.keep_in(CommitFile.of_launch(os.environ, writes=local_rank() == 0))
        if state.resume():
            return
    state.sync()
