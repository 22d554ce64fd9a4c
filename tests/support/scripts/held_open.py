"""A script of a library's user that never leaves the `connect` block.

held_open.py ok|fail|uneven|guarded
"""

from __future__ import annotations

import os
import sys
import time

from bigtrain.errors import ConfigError
from bigtrain.ranks.connect import connect
from bigtrain.ranks.exit_status import run_guarded
from bigtrain.ranks.launcher_env import detect_rank_info

connection = connect(detect_rank_info(os.environ), device="cpu", timeout=60)
context = connection.__enter__()
context.barrier()
if sys.argv[1] == "fail":
    if context.rank == 1:
        raise ValueError("odd")
    context.barrier()
elif sys.argv[1] == "guarded":

    def main() -> None:
        if context.rank == 1:
            raise ConfigError("odd")
        time.sleep(240)

    sys.exit(run_guarded(main))
elif sys.argv[1] == "uneven" and context.rank == 1:
    time.sleep(3)
