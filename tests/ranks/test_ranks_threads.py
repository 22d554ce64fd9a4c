"""Ranks share the cores of their node."""

from __future__ import annotations

import os

import torch
from support.ranks import run_ranks

from bigtrain.ranks.context import RunContext


def count_threads(context: RunContext) -> int:
    del os.environ["OMP_NUM_THREADS"]
    return torch.get_num_threads()


def test_a_set_number_of_threads_is_kept() -> None:
    assert run_ranks(count_threads, 2) == [1, 1]
