"""A rank for the launcher tests: connects, adds up, prints its placement, and fails on request."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from pathlib import Path

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[3])

import torch

from bigtrain.errors import ConfigError
from bigtrain.ranks.connect import connect
from bigtrain.ranks.context import RunContext
from bigtrain.ranks.exit_status import run_guarded
from bigtrain.ranks.launcher_env import detect_rank_info


class Deliberate(Exception):
    """The error of a rank that fails on request."""

    pass


def fail(how: str, context: RunContext) -> None:
    """Fail in the manner that `how` names."""
    if how == "raise":
        raise Deliberate(f"rank {context.rank} fails on purpose")
    if how == "config":
        raise ConfigError(f"train.steps=0 found by rank {context.rank}. Use train.steps=1")
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "exit7":
        sys.exit(7)
    if how == "exit75":
        sys.exit(75)


def meanwhile(how: str, context: RunContext) -> None:
    """Wait in the manner that `how` names, while another rank fails."""
    if how == "collective":
        context.barrier()
    elif how == "sleep":
        time.sleep(120)
    elif how == "compute":
        a = torch.ones(6000, 6000)
        for _ in range(1000):
            a @ a


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", "--local-rank")
    parser.add_argument("--fail", default="")
    parser.add_argument("--on", type=int, default=1)
    parser.add_argument("--others", default="collective")
    parser.add_argument("--early", action="store_true", help="a ConfigError before connecting")
    parser.add_argument("--times", type=int, default=1)
    parser.add_argument("--linger", action="store_true", help="the chosen rank sleeps instead")
    options = parser.parse_args()
    placement = detect_rank_info(os.environ)
    if options.early:
        raise ConfigError("train.steps=0 is too few. Use train.steps=1")
    for _ in range(options.times):
        with connect(placement, device="cpu", setup_timeout=60, timeout=60) as context:
            total = context.all_reduce_sum(torch.tensor(context.rank + 1))
            everyone = context.gather_objects(
                {
                    "rank": context.rank,
                    "local_rank": context.local_rank,
                    "world_size": context.world_size,
                    "local_world_size": context.local_world_size,
                    "launcher": context.launcher,
                    "total": int(total),
                    "threads": torch.get_num_threads(),
                    "pid": os.getpid(),
                    "met": time.monotonic(),
                }
            )
            if context.is_main:
                sys.stdout.write(json.dumps(everyone) + "\n")
                sys.stdout.flush()
            if options.fail == "everywhere" or (options.fail and context.rank == options.on):
                if options.linger:
                    time.sleep(120)
                fail("raise" if options.fail == "everywhere" else options.fail, context)
            elif options.fail:
                meanwhile(options.others, context)
    return 0


if __name__ == "__main__":
    sys.exit(run_guarded(main))
