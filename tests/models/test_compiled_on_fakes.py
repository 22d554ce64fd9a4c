"""Programs of compiled blocks on fake tensors: their buffers, and the bytes their kernels touch."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from bigtrain.memory.tracker import StorageTracker
from bigtrain.models import compiled as compiled_module
from bigtrain.models.compiled import compile_blocks
from bigtrain.prediction.operation_log import Operation, OperationLog

ROWS, WIDTH = 16, 32
NUMBERS = ROWS * WIDTH


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH, bias=False)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(torch.sin(self.inner(x)).exp())


def saved(*, compiled: bool, log: OperationLog | None = None) -> tuple[int, int, int]:
    """Bytes that a block saves, its forward peak, and the bytes left at the end."""
    tracker = StorageTracker(fake=True)
    with FakeTensorMode(), tracker, log or nullcontext():
        model = nn.Sequential(Block(), Block())
        if compiled:
            compile_blocks(model, {})
        x = torch.randn(ROWS, WIDTH, requires_grad=True)
        model[0](x)  # a program allocates constants at its first call
        before = tracker.live_bytes
        tracker.peak_bytes = before
        y = model[1](x)
        saved_bytes, highest = tracker.live_bytes - before, tracker.peak_bytes - before
        gradient = torch.ones_like(y)
        torch.autograd.backward(y, gradient)
        del y, gradient
        return saved_bytes - 4 * NUMBERS, highest, tracker.live_bytes - before


def test_saved_bytes_of_a_program_are_predicted_exactly(monkeypatch: Any) -> None:
    compiled: list[str] = []
    kernel = compiled_module._NoKernels.__getattr__
    monkeypatch.setattr(
        compiled_module._NoKernels,
        "__getattr__",
        lambda self, name: (compiled.append(name), kernel(self, name))[1],
    )
    kernels: list[float] = []
    products: list[float] = []

    def note(operation: Operation) -> None:
        if operation.func is None:
            kernels.append(operation.nbytes)
            assert operation.flops == 0
        elif operation.flops:
            products.append(operation.flops)

    # Uncompiled: the sine's input, the exponential of its result, and a mask of floats.
    assert saved(compiled=False)[0] == 3 * 4 * NUMBERS
    # Compiled: the sine's input and a mask of bytes; the cheap rest is recomputed.
    saved_bytes, _, left = saved(compiled=True, log=OperationLog(note))
    assert saved_bytes == 4 * NUMBERS + NUMBERS
    assert left == 4 * (WIDTH * WIDTH + NUMBERS)  # gradients of the weight and of the input
    assert compiled  # the kernels were requested, and replaced by fakes
    # The forward pass reads the product's result and writes one tensor.
    assert kernels[0] == 2 * 4 * NUMBERS
    # Two forward matrix products; in the backward pass one for the weight and one for the input.
    assert products == [2 * NUMBERS * WIDTH] * 4
