"""Fake results have the same dtypes as real ones."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bigtrain.tensors.fake_mode import FakeMode

NORMS = {
    "layer": (lambda: nn.LayerNorm(8), (4, 8)),
    "group": (lambda: nn.GroupNorm(2, 8), (4, 8, 3, 3)),
    "batch": (lambda: nn.BatchNorm2d(8), (4, 8, 3, 3)),
    "batch without weights": (lambda: nn.BatchNorm2d(8, affine=False), (4, 8, 3, 3)),
    "layer without weights": (lambda: nn.LayerNorm(8, elementwise_affine=False), (4, 8)),
}


class Types(TorchDispatchMode):
    """Records the dtypes of the results of norms."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if "norm" in str(func):
            self.found = [leaf.dtype for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        return result


def types_of(make, shape, dtype):
    with Types() as types:
        make()(torch.empty(shape, dtype=dtype))
    return types.found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", NORMS)
def test_statistics_of_norms_have_the_precision_of_the_kernels(name, dtype):
    real = types_of(*NORMS[name], dtype)
    with FakeMode():
        for _ in range(2):  # first torch's result, then the cached one
            assert types_of(*NORMS[name], dtype) == real
