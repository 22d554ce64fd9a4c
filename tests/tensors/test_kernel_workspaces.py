"""Bytes that CUDA's kernels allocate internally, as recorded on an H100."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from bigtrain.memory.tracker import StorageTracker
from bigtrain.tensors.fake_mode import FakeMode
from bigtrain.tensors.kernel_workspaces import (
    column_sum_bytes,
    workspace_bytes,
    workspaces_of,
)

ATEN = torch.ops.aten


@pytest.mark.parametrize(
    ("rows", "columns", "seen"),
    [
        (8192, 1024, 67_108_896),
        (8192, 768, 50_331_672),
        (12_608, 768, 77_463_576),
        # Wide sums are divided among as many blocks as the GPU can run at once.
        (8192, 4096, 138_412_160),
        (8192, 2304, 139_198_536),
    ],
)
def test_sums_over_rows(rows: int, columns: int, seen: int) -> None:
    assert column_sum_bytes(rows, columns, 4, 132) == seen


def test_short_sums_take_nothing() -> None:
    assert column_sum_bytes(31, 4096, 4, 132) == 0
    assert column_sum_bytes(1, 7, 4, 132) == 0
    assert column_sum_bytes(512, 4096, 4, 132) == 0  # 128 for each thread, so one block is enough
    assert column_sum_bytes(8192, 4096, 4, 54) < column_sum_bytes(8192, 4096, 4, 132)


def attention(shape: tuple[int, ...], dtype: torch.dtype, layout: str = "qkv") -> int:
    batch, heads, length, width = shape
    with FakeMode():
        whole = torch.empty(batch, length, 3 * heads * width, dtype=dtype)
        query = whole.chunk(3, -1)[0].unflatten(-1, (heads, width)).transpose(1, 2)
        func = ATEN._scaled_dot_product_cudnn_attention_backward.default
        if dtype == torch.float32:
            func = ATEN._scaled_dot_product_efficient_attention_backward.default
        return workspace_bytes(func, (query, query, query, query), None)


@pytest.mark.parametrize(
    ("shape", "dtype", "seen"),
    [
        ((8, 16, 1024, 64), torch.bfloat16, 34_078_976),
        ((64, 12, 197, 64), torch.bfloat16, 39_337_216),
        ((2, 8, 1000, 80), torch.bfloat16, 5_184_256),
        ((2, 16, 2048, 128), torch.bfloat16, 33_816_832),
        ((1, 4, 256, 64), torch.bfloat16, 266_496),
        ((8, 12, 1024, 64), torch.float32, 25_952_256),
    ],
)
def test_attention_going_back(shape: tuple[int, ...], dtype: torch.dtype, seen: int) -> None:
    assert attention(shape, dtype) == seen


def test_a_norm_copies_inputs_that_are_not_contiguous() -> None:
    with FakeMode():
        plain = torch.empty(64, 197, 768)
        turned = torch.empty(197, 64, 768).transpose(0, 1)
        norm, back = ATEN.native_layer_norm.default, ATEN.native_layer_norm_backward.default
        assert workspace_bytes(norm, (plain, [768]), None) == 0
        assert workspace_bytes(norm, (turned, [768]), None) == 38_731_776
        assert workspace_bytes(back, (turned, turned, [768]), None) == 77_463_552


def test_what_passes_is_in_the_peak_and_nowhere_else() -> None:
    """In a linear layer's backward pass, the sum of its bias gradient is the peak."""

    def peak(device_type: str) -> tuple[int, int]:
        mode = FakeMode()
        tracker = StorageTracker(fake=True, inside=workspaces_of(device_type))
        with mode, tracker.behind(mode):
            layer = nn.Linear(64, 1024)
            out = layer(torch.empty(8192, 64))
            out.backward(torch.empty(8192, 1024))
        spans = tracker.timeline().spans
        assert all(span.death > span.birth for span in spans)
        return tracker.peak_bytes, tracker.live_bytes

    (on_cpu, left), (on_cuda, left_on_cuda) = peak("cpu"), peak("cuda")
    assert left == left_on_cuda
    assert on_cuda - on_cpu == 67_108_896


def test_operations_without_a_rule_take_nothing() -> None:
    assert workspace_bytes(ATEN.mm.default, (), None) == 0
    for device_type in ("cpu", "xpu"):
        assert workspaces_of(device_type)(ATEN.sum.dim_IntList, (), None) == 0
