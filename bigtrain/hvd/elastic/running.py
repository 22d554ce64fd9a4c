"""The function that trains, called so that it goes on where it was."""

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
    """Raised by a script on all ranks to go on from the last commit.

    An exchange that breaks does not raise it: then all ranks end, and the launcher starts them.
    """


class HostsUpdatedInterrupt(RuntimeError):
    """Raised by a script on all ranks to be called again.

    Args:
        skip_sync: the ranks' states are equal.
    """

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__("the hosts of the run have changed")
        self.skip_sync = skip_sync


def run_elastic(
    func: Callable[Concatenate[Any, _P], _R],
) -> Callable[..., _R]:
    """Let a training function begin at the last commit: `@hvd.elastic.run`.

    Its first argument is the state. Where a rank fails all ranks end; torchrun's `--max-restarts`
    starts them again, on as many hosts as there are, and the function goes on from the last
    `state.commit()`, with the callbacks of `register_reset_callbacks` called first. Where nothing
    starts ranks again, commits stay in memory.
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
