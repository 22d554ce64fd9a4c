"""Ask MPI's process manager where rank 0 is: Hydra hands values on between the ranks it started.

mpiexec of MPICH and its relatives gives each rank a connection, PMI_FD, on which lines of
`cmd=NAME key=value ...` are answered. Only what is needed to pass on one value is spoken here.

Source: Balaji et al. 2010, PMI: A Scalable Parallel Process-Management Interface (EuroMPI), section
3; the lines of version 1 as MPICH documents them in its src/pmi.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from typing import TextIO

from bigtrain.errors import LaunchError

_KEY = "bigtrain-rank-0"
_PATIENCE_S = 60.0


def shared_by_hydra(environ: Mapping[str, str]) -> bool:
    """Whether the launcher has left a connection on which values are handed on."""
    return environ.get("PMI_FD", "").isdecimal()


def share_value(value: str | None, environ: Mapping[str, str]) -> str:
    """Return on every rank what rank 0 gave. All ranks call it, once.

    Args:
        value: on rank 0, a word without spaces; None on the others.
        environ: of the process.

    Raises:
        LaunchError: the connection is not there, or says no.
    """
    try:
        with socket.socket(fileno=os.dup(int(environ["PMI_FD"]))) as connection:
            connection.settimeout(_PATIENCE_S)
            with connection.makefile("rw", encoding="ascii", newline="\n") as lines:
                return _speak(lines, value)
    except (OSError, ValueError, KeyError) as error:
        raise LaunchError(
            f"mpiexec's process manager does not say where rank 0 is: {error!r}. Run: mpiexec "
            "-genv MASTER_ADDR HOST ..., with the name of rank 0's host"
        ) from error


def _speak(lines: TextIO, value: str | None) -> str:
    def ask(**said: object) -> dict[str, str]:
        words = " ".join(f"{key}={given}" for key, given in said.items())
        lines.write(f"{words}\n")
        lines.flush()
        answer = lines.readline()
        found = dict(word.partition("=")[::2] for word in answer.split())
        if found.get("rc", "0") != "0" or not answer:
            raise ValueError(answer.strip() or "it hangs up")
        return found

    ask(cmd="init", pmi_version=1, pmi_subversion=1)
    space = ask(cmd="get_my_kvsname")["kvsname"]
    if value is not None:
        ask(cmd="put", kvsname=space, key=_KEY, value=value)
    ask(cmd="barrier_in")
    found = ask(cmd="get", kvsname=space, key=_KEY)["value"]
    ask(cmd="finalize")
    return found
