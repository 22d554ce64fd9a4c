"""Running the training function so that it continues after a restart."""

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
    """Raised by a script on all ranks to continue from the last commit.

    A failed exchange does not raise it: all ranks end, and the launcher restarts them.
    """


class HostsUpdatedInterrupt(RuntimeError):
    """Raised by a script on all ranks to be called again.

    Args:
        skip_sync: whether the ranks' states are equal already.
    """

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__("the hosts of the run have changed")
        self.skip_sync = skip_sync


def run_elastic(
    func: Callable[Concatenate[Any, _P], _R],
) -> Callable[..., _R]:
    """Decorate a training function to start from the last commit: `@hvd.elastic.run`.

    The function's first argument is the state. If a rank fails, all ranks end. torchrun's
    `--max-restarts` restarts them on the available hosts. The function then continues from the last
    `state.commit()`, after the callbacks of `register_reset_callbacks` were called. If no launcher
    restarts ranks, commits stay in memory.
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
