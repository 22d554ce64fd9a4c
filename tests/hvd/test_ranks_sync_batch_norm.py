"""Batch normalization over all ranks equals torch's in one process with all samples."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.ranks import run_ranks
from torch import nn

import bigtrain.hvd as hvd
from bigtrain.errors import ConfigError
from bigtrain.ranks.context import RunContext

SHARES = {"even": (4, 4), "uneven": (3, 5), "one has none": (0, 8), "one each": (1, 1)}
CASES: list[tuple[str, type[nn.Module], tuple[int, ...], dict[str, Any]]] = [
    ("even", nn.BatchNorm2d, (5, 3, 2), {}),
    ("uneven", nn.BatchNorm1d, (5,), {"momentum": None, "eps": 1e-3}),
    ("uneven", nn.BatchNorm3d, (5, 2, 2, 2), {"affine": False}),
    ("one has none", nn.BatchNorm1d, (5, 3), {"momentum": 0.3}),
    ("one each", nn.BatchNorm1d, (5,), {"track_running_stats": False}),
]
STEPS = 3


def samples(case: int, step: int) -> torch.Tensor:
    share, _, shape, _ = CASES[case]
    drawn = torch.Generator().manual_seed(100 * case + step)
    return 3 + 2 * torch.randn(sum(SHARES[share]), *shape, generator=drawn, dtype=torch.float64)


def layer(kind: type[nn.Module], case: int) -> nn.Module:
    made = kind(CASES[case][2][0], **CASES[case][3]).double()
    for n, parameter in enumerate(made.parameters()):
        nn.init.uniform_(parameter, 0.5 + n, 1.5 + n, generator=torch.Generator().manual_seed(n))
    return made


def run_layer(norm: nn.Module, case: int, part: slice) -> dict[str, Any]:
    """The outputs, gradients and statistics of a layer over several steps."""
    outs, gradients = [], []
    for step in range(STEPS):
        inputs = samples(case, step)[part].requires_grad_()
        out = norm(inputs)
        (out * samples(case, step + 50)[part]).sum().backward()
        outs.append(out.detach())
        gradients.append(inputs.grad)
    norm.eval()
    outs.append(norm(samples(case, 9)[part]).detach())
    of_weights = [parameter.grad for parameter in norm.parameters()]
    buffers = [b.detach().clone() for b in norm.buffers()]
    return {"out": outs, "inputs": gradients, "weights": of_weights, "buffers": buffers}


def run_on_ranks(context: RunContext) -> list[dict[str, Any]]:
    hvd.init_with(context)
    results = []
    for case, (share, *_) in enumerate(CASES):
        first = sum(SHARES[share][: hvd.rank()])
        part = slice(first, first + SHARES[share][hvd.rank()])
        results.append(run_layer(layer(hvd.SyncBatchNorm, case), case, part))
    half = hvd.SyncBatchNorm(5).to(torch.bfloat16)
    results.append({"half": half(samples(1, 0)[hvd.rank() :].bfloat16()).dtype})
    with pytest.raises(ConfigError, match="has no channels"):
        half(torch.ones(3))
    with pytest.raises(ConfigError, match="1 value for each channel on all ranks has no variance"):
        hvd.SyncBatchNorm(5)(torch.ones(1 - hvd.rank(), 5))
    return results


def test_it_is_torch_s_over_the_samples_of_all_ranks():
    results = run_ranks(run_on_ranks, 2)
    for case, (share, kind, *_) in enumerate(CASES):
        expected = run_layer(layer(kind, case), case, slice(None))
        for name in ("out", "inputs"):
            for step, whole in enumerate(expected[name]):
                parts = torch.cat([rank[case][name][step] for rank in results])
                assert torch.allclose(parts, whole, rtol=0, atol=1e-10), (share, name, step)
        for n, whole in enumerate(expected["weights"]):
            summed = results[0][case]["weights"][n] + results[1][case]["weights"][n]
            assert torch.allclose(summed, whole, rtol=0, atol=1e-10)
        for rank in results:
            for buffer, expected_buffer in zip(
                rank[case]["buffers"], expected["buffers"], strict=True
            ):
                assert torch.allclose(buffer.double(), expected_buffer.double(), rtol=0, atol=1e-12)
    assert results[0][-1]["half"] == torch.bfloat16
