"""Start hello.py on new ranks: start.py NUM_RANKS ARGUMENTS..."""

from __future__ import annotations

import sys
from pathlib import Path

from bigtrain.ranks.launch import start_ranks

if __name__ == "__main__":
    sys.exit(start_ranks(int(sys.argv[1]), sys.argv[2:], Path(__file__).with_name("hello.py")))
