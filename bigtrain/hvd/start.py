"""Connect and disconnect the ranks, and record a timeline of their exchanges."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bigtrain.errors import ConfigError
from bigtrain.hvd.channel import channels, close_channels
from bigtrain.hvd.process_sets import (
    ProcessSet,
    add_process_set,
    forget_process_sets,
    global_process_set,
)
from bigtrain.hvd.session import PATIENCE_S, rank, session, size
from bigtrain.ranks.connect import connect
from bigtrain.ranks.context import RunContext
from bigtrain.ranks.launcher_env import detect_rank_info


def init(
    comm: Sequence[int] | None = None, process_sets: Sequence[ProcessSet] | str | None = None
) -> None:
    """Connect the ranks. A second call does nothing. Collective.

    Args:
        comm: None, or all ranks in ascending order. Horovod also takes some of the ranks or an MPI
            communicator; both are refused.
        process_sets: the sets to connect in addition to that of all ranks. "dynamic" has no effect,
            as `add_process_set` may always be called.

    Raises:
        ConfigError: a variable of the launcher is missing, wrong or contradicts another; there are
            fewer GPUs than ranks; `comm` is not a list or tuple of all ranks; `process_sets` is
            another string; or a set has no ranks, a rank that does not exist, or the same ranks as
            another set.
        LaunchError: the ranks did not find each other, or a process group exists already.
    """
    if session.context is not None:
        return
    placement = detect_rank_info(os.environ)
    everyone = list(range(placement.world_size))
    if comm is not None and (
        not isinstance(comm, (list, tuple)) or list(comm or everyone) != everyone
    ):
        raise ConfigError(
            f"hvd.init: comm={comm!r}, and all {placement.world_size} ranks take part; "
            "communicators of MPI are not taken. Call hvd.init(), and "
            "hvd.add_process_set([...]) for some ranks."
        )
    if isinstance(process_sets, str) and process_sets.lower() != "dynamic":
        raise ConfigError(
            f'hvd.init: process_sets={process_sets!r}. Use process_sets="dynamic", or a list.'
        )
    context = session.closing.enter_context(connect(placement, timeout=PATIENCE_S))
    init_with(context)
    for process_set in process_sets or () if not isinstance(process_sets, str) else ():
        add_process_set(process_set)


def init_with(context: RunContext) -> None:
    """Initialize with ranks that are connected already. Collective.

    Args:
        context: the context of this process.
    """
    session.open(context)
    global_process_set.connect(0, range(context.world_size))


def shutdown() -> None:
    """Disconnect from the other ranks; `init` may be called again."""
    close_channels()
    forget_process_sets()
    session.context = None
    session.closing.close()


class _Timeline:
    """Events in the format that chrome://tracing and Perfetto read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.events: list[dict[str, Any]] = []

    def add(self, kind: str, name: str, begun: float, over: float) -> None:
        self.events.append(
            {
                **{"name": kind, "cat": "hvd", "ph": "X", "pid": rank(), "tid": name},
                **{"ts": begun * 1e6, "dur": (over - begun) * 1e6},
            }
        )

    def write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps({"traceEvents": self.events}), "utf-8")


_timelines: list[_Timeline] = []


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:  # noqa: ARG001
    """Record two events for each exchange, until `stop_timeline` is called.

    The first event is the agreement of the ranks on the exchange. The second one is the exchange,
    until the script has waited for its result. Process sets that are connected later are not
    recorded.

    Args:
        file_path: the file that rank 0 writes, for chrome://tracing or Perfetto. Only the exchanges
            of rank 0 are in it.
        mark_cycles: not used, as there are no cycles.

    Raises:
        ConfigError: a timeline is being recorded already.
        LaunchError: `init` was not called.
    """
    session.opened()
    if _timelines:
        raise ConfigError(
            f"hvd.start_timeline: {_timelines[0].path} is being written. Call hvd.stop_timeline()."
        )
    _timelines.append(_Timeline(Path(file_path)))
    for channel in channels():
        channel.timeline = _timelines[0].add


def stop_timeline() -> None:
    """Stop recording, and write the file on rank 0; without `start_timeline`, do nothing.

    Raises:
        LaunchError: `init` was not called.
    """
    session.opened()
    for channel in channels():
        channel.timeline = None
    while _timelines:
        timeline = _timelines.pop()
        if rank() == 0 or size() == 1:
            timeline.write()
