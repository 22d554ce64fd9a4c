"""Compound operations count the memory and the bytes of the operations that they stand for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bigtrain.hub.nf4 import Nf4Layout, dequantized
from bigtrain.memory.tracker import StorageTracker
from bigtrain.prediction.block_ticks import SectionHooks
from bigtrain.prediction.operation_log import OperationLog
from bigtrain.tensors.compound_ops import CompoundOp
from bigtrain.tensors.fake_mode import FakeMode
from bigtrain.tensors.kernel_workspaces import workspaces_of

SHAPES = [(64, 64), (1000, 96), (4096, 4096), (3000, 4160)]
"""One piece; one piece with few scales; four equal pieces; three pieces, the last one smaller."""


@contextmanager
def observed(device_type: str) -> Iterator[tuple[StorageTracker, SectionHooks]]:
    mode = FakeMode(of_cuda=device_type == "cuda")
    tracker = StorageTracker(fake=True, inside=workspaces_of(device_type))
    hooks = SectionHooks([])
    with mode, tracker.behind(mode), OperationLog(hooks._operation).behind(tracker):
        yield tracker, hooks


def cost_of(layout: Nf4Layout, dtype: torch.dtype, device: str) -> tuple[Any, ...]:
    with observed(device) as (tracker, hooks):
        nbytes = torch.empty(layout.nbytes, dtype=torch.uint8)
        carrier = nn.Parameter(nbytes, requires_grad=False)
        hooks.work.clear()
        before = tracker.live_bytes
        result = dequantized(carrier, layout, dtype)
        peak, left = tracker.peak_bytes - before, tracker.live_bytes - before
    shape = (tuple(result.shape), result.dtype, result.stride())
    return [entry[1:] for entry in hooks.work], peak, left, shape


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_dequantization_costs_the_same_as_one_operation(
    shape: tuple[int, int], dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = Nf4Layout(shape)
    alone = cost_of(layout, dtype, device)
    monkeypatch.setattr(CompoundOp, "runs_on", lambda _self, _tensor: False)
    assert alone == cost_of(layout, dtype, device)
    assert len(alone[0]) > 20
    assert alone[1] > alone[2] > 0


def test_one_operation_runs_where_the_function_had_forty() -> None:
    seen: list[Any] = []
    mode = FakeMode()
    layout = Nf4Layout((4096, 4096))
    with mode:
        carrier = torch.empty(layout.nbytes, dtype=torch.uint8)
        mode.on_operation = lambda func, *_: seen.append(func)
        result: Tensor = dequantized(carrier, layout, torch.bfloat16)
    assert [func.name() for func in seen] == ["bigtrain::dequantize_nf4"]
    assert result.shape == layout.shape


def test_real_tensors_run_the_function_itself() -> None:
    layout = Nf4Layout((64, 64))
    carrier = torch.zeros(layout.nbytes, dtype=torch.uint8)
    carrier[: layout.header_bytes].view(torch.float32).fill_(1)
    assert dequantized(carrier, layout, torch.float32).shape == (64, 64)
