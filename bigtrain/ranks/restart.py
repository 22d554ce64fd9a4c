"""Going on after memory ran out: every rank begins anew in its own process, with smaller batches.

A rank that is out of memory has left the others in the middle of an exchange that cannot be
mended. So all of them start their program again, from the last checkpoint or the beginning, under
the same process numbers: no launcher notices, and the numbers that follow are those of a run that
had been started so. What is to be different goes through the environment.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import re
import sys
import time
from collections.abc import MutableMapping, Sequence
from dataclasses import asdict, dataclass

from bigtrain.errors import BigtrainError

RESTART_STATUS = 76
"""With this status a rank asks all ranks to begin anew; no process ends with it."""
RESTART_VARIABLE = "BIGTRAIN_RESTART"
# Rank 0 relays the news: it begins anew when all have them.
_RELAY_S = 0.5


@dataclass(frozen=True)
class Restart:
    """What is different from now on."""

    words: tuple[str, ...]
    """Keys of the job, as on the command line."""
    said: str
    """One line on why, for the log."""

    @classmethod
    def taken(cls, environ: MutableMapping[str, str]) -> Restart | None:
        """What an earlier life of this process left, which is thereby taken."""
        text = environ.pop(RESTART_VARIABLE, None)
        if text is None:
            return None
        values = json.loads(text)
        return cls(tuple(values["words"]), values["said"])

    def text(self) -> str:
        """One line of JSON."""
        return json.dumps(asdict(self))


class RestartRequest(BigtrainError):
    """Raised where all ranks are to begin anew; `run_guarded` does it."""

    exit_status = RESTART_STATUS

    def __init__(self, words: Sequence[str], said: str) -> None:
        super().__init__(said)
        self.restart = Restart(tuple(words), said)


def restart_process(text: str, *, relays: bool = False) -> None:
    """Start this process's program again; does not return.

    Args:
        text: of the `Restart`.
        relays: wait until the other ranks have heard of it.
    """
    if relays:
        time.sleep(_RELAY_S)
    os.environ[RESTART_VARIABLE] = text
    for child in multiprocessing.active_children():
        child.kill()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))
    _close_at_exec()
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def _close_at_exec() -> None:
    """Let the kernel close what libraries have open: a GPU's memory is free when its files are.

    Left open: the three streams, and what the surroundings name, as MPICH's `PMI_FD=7` or a
    `/dev/fd/63` among the words.
    """
    named = {value for name, value in os.environ.items() if name.endswith("_FD")}
    named.update(re.findall(r"/fd/(\d+)", " ".join(sys.orig_argv)))
    with contextlib.suppress(OSError):  # a machine without the folder
        for number in set(os.listdir("/dev/fd")) - {"0", "1", "2"} - named:
            with contextlib.suppress(OSError):  # of the listing itself
                os.set_inheritable(int(number), False)
