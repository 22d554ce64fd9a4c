"""Start the ranks of one node without any launcher's command line: `bigtrain train -n N`.

torch's elastic agent does the starting and the ending. What it adds to the output is left out:
the last thing on the screen is the failing rank's own traceback. Nothing here imports torch
before ranks are really to be started.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bigtrain.errors import ConfigError
from bigtrain.memory.allocator import allocator_environ
from bigtrain.memory.host_memory import host_memory_line, oom_kill_count
from bigtrain.ranks.exit_status import REQUEUE_STATUS
from bigtrain.ranks.launcher_env import RankInfo

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

# Seconds for the other ranks to end after SIGTERM, before SIGKILL.
_SHUTDOWN_S = 15


def start_ranks(num_ranks: int, arguments: list[str], script: Path) -> int:
    """Run `python -u script arguments` as the ranks of one run on this node, and wait for them.

    Args:
        num_ranks: ranks to start.
        arguments: what the script gets on its command line.
        script: path of the script.

    Returns:
        The exit status: 0; 2 or 75 where the failing rank ended so; 130 or 143 after Ctrl-C or
        SIGTERM; otherwise 1.

    Raises:
        ConfigError: less than one rank, or no such script.
    """
    if num_ranks < 1:
        raise ConfigError(f"-n {num_ranks}: at least 1 rank is needed. Use -n 1")
    if not script.is_file():
        raise ConfigError(f"{script} is not a file, and {num_ranks} ranks were to run it.")

    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    kills = oom_kill_count()
    with (
        tempfile.TemporaryDirectory(prefix="bigtrain-launch-") as folder,
        _agent_surroundings(num_ranks),
    ):
        try:
            _run_agent(num_ranks, [str(script), *arguments], folder)
        except ChildFailedError as failure:
            return _status(failure.get_first_failure(), kills)
        except SignalException as stop:
            return 128 + int(stop.sigval)
        except KeyboardInterrupt:
            return 128 + signal.SIGINT
    return 0


def launcher_hint(placement: RankInfo, cpu_count: int, *, has_gpu: bool = False) -> str | None:
    """Return one line on how to start more ranks, where one rank leaves a CPU's cores unused.

    Args:
        placement: where this process stands.
        cpu_count: cores this process may use.
        has_gpu: whether ranks would be counted by GPUs, so that cores do not matter.
    """
    if placement.world_size > 1 or cpu_count < 2 or has_gpu:
        return None
    if placement.launcher == "deepspeed":
        return (
            f"one rank on {cpu_count} cores: deepspeed starts one for each NUMA node of a CPU. "
            "For two: deepspeed --num_accelerators 2 bigtrain/train.py ..."
        )
    if placement.launcher == "python":
        return f"one rank on {cpu_count} cores. For two: bigtrain train -n 2 ..."
    return None


def _run_agent(num_ranks: int, command: list[str], folder: str) -> None:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    settings: dict[str, Any] = {
        "min_nodes": 1,
        "max_nodes": 1,
        "nproc_per_node": num_ranks,
        "run_id": os.path.basename(folder),
        "rdzv_backend": "c10d",
        # Port 0: the kernel chooses, two runs cannot collide.
        "rdzv_endpoint": "localhost:0",
        "local_addr": "127.0.0.1",
        "max_restarts": 0,
        "logs_specs": DefaultLogsSpecs(log_dir=folder),
        "shutdown_timeout": _SHUTDOWN_S,
    }
    known_fields = {field.name for field in dataclasses.fields(LaunchConfig)}
    config = LaunchConfig(
        **{name: value for name, value in settings.items() if name in known_fields}
    )
    elastic_launch(config, sys.executable)("-u", *command)


def _status(first_failure: tuple[int, ProcessFailure], kills_before: int) -> int:
    """Return the exit status for the first failure; say in one line what a signal meant.

    Args:
        first_failure: the rank that failed first.
        kills_before: how many processes the kernel had ended for want of memory until the start.
    """
    rank, failure = first_failure
    if failure.exitcode < 0:
        number = -failure.exitcode
        cause = "a crash in native code?"
        if number == signal.SIGABRT:
            cause = (
                "a crash in native code? On GPUs NCCL's watchdog ends ranks so, too, where an "
                "exchange takes longer than mesh.timeout: see its line above."
            )
        if number == signal.SIGKILL:
            cause = f"host memory ran out? ({host_memory_line()})"
            if oom_kill_count() > kills_before:
                cause = (
                    f"the kernel ended it, because host memory ran out ({host_memory_line()}). Use "
                    "fewer ranks, a smaller train.micro_batch_size, or --cap SIZE for an "
                    "explanation."
                )
        sys.stderr.write(
            f"bigtrain: rank {rank} was killed (signal {number}): {cause} "
            "See the kernel's log: dmesg | tail\n"
        )
        return 1
    return failure.exitcode if failure.exitcode in (2, REQUEUE_STATUS) else 1


@contextlib.contextmanager
def _agent_surroundings(num_ranks: int) -> Iterator[None]:
    """Share out cores, choose the allocator, silence the agent, and put everything back."""
    before = dict(os.environ)
    disabled = logging.root.manager.disable
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (cores or 1) // num_ranks)))
    os.environ.update(allocator_environ(os.environ))
    logging.disable(logging.ERROR)
    try:
        yield
    finally:
        logging.disable(disabled)
        for name in set(os.environ) - set(before):
            del os.environ[name]
        os.environ.update(before)
