"""Share a value, the address of rank 0, between ranks through MPI's process manager.

mpiexec of MPICH (Hydra) gives each rank a connection, PMI_FD, on which it answers lines of
`cmd=NAME key=value ...`. This module uses only the commands that share a single value.

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
    """Whether the launcher has opened a connection for `share_value`."""
    return environ.get("PMI_FD", "").isdecimal()


def share_value(value: str | None, environ: Mapping[str, str]) -> str:
    """Return rank 0's value on every rank. All ranks must call this, and only once.

    Args:
        value: the value on rank 0, a word without spaces; None on the other ranks.
        environ: the environment of the process.

    Raises:
        LaunchError: the connection does not exist, or the request was refused.
    """
    try:
        with socket.socket(fileno=os.dup(int(environ["PMI_FD"]))) as connection:
            connection.settimeout(_PATIENCE_S)
            with connection.makefile("rw", encoding="ascii", newline="\n") as lines:
                return _speak(lines, value)
    except (OSError, ValueError, KeyError) as error:
        raise LaunchError(
            f"mpiexec's process manager does not share the address of rank 0: {error!r}. Run: "
            "mpiexec -genv MASTER_ADDR HOST ..., with the name of rank 0's host"
        ) from error


def _speak(lines: TextIO, value: str | None) -> str:
    def ask(**request: object) -> dict[str, str]:
        words = " ".join(f"{key}={argument}" for key, argument in request.items())
        lines.write(f"{words}\n")
        lines.flush()
        answer = lines.readline()
        fields = dict(word.partition("=")[::2] for word in answer.split())
        if fields.get("rc", "0") != "0" or not answer:
            raise ValueError(answer.strip() or "the connection was closed")
        return fields

    ask(cmd="init", pmi_version=1, pmi_subversion=1)
    space = ask(cmd="get_my_kvsname")["kvsname"]
    if value is not None:
        ask(cmd="put", kvsname=space, key=_KEY, value=value)
    ask(cmd="barrier_in")
    shared = ask(cmd="get", kvsname=space, key=_KEY)["value"]
    ask(cmd="finalize")
    return shared
