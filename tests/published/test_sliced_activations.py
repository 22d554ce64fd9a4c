"""Table 2 of Korthikanti et al. 2022 (arXiv 2205.05198) on tensor-parallel ranks, as in torch.

Neither a GPU nor ranks are needed: fake tensors tell what CUDA's kernels save on one of the ranks.
"""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from bigtrain.slicing.exchange import SliceGroup
from bigtrain.slicing.install import slice_modules, slice_tensors
from bigtrain.slicing.sliced_tensor import SlicedTensor
from bigtrain.slicing.slices import Slices
from bigtrain.tensors.fake import fake_model
from published.formulas import Transformer
from published.layers import Layer, saved_bytes

MODELS = {
    # and the micro-batch
    "22B": (Transformer(48, 6144, 64, 2048, 51200), 4),
    "175B": (Transformer(96, 12288, 96, 2048, 51200), 1),
}


def sliced_saved_bytes(t: int, sequence_dim: int | None, b: int, s: int, h: int, a: int) -> int:
    """Bytes that autograd saves for the sliced layer on one of `t` ranks, with CUDA's kernels."""
    columns = {"qkv": Slices.even(0, 3 * h, 3 * h // a), "up": Slices.even(0, 4 * h)}
    slices = {
        f"{n}.{kind}": columns_of
        for n, columns_of in columns.items()
        for kind in ("weight", "bias")
    }
    slices["projection.weight"] = Slices.even(1, h, h // a)
    slices["down.weight"] = Slices.even(1, 4 * h)
    group = SliceGroup(t - 1, t, sequence_dim=sequence_dim)
    with torch.device("meta"):
        layer = Layer(h, a).to(torch.bfloat16)
    with FakeTensorMode():
        layer = fake_model(layer, torch.device("cuda"), double=False)
        slice_tensors(layer, slices, group)
        slice_modules(layer, slices, group)
        x = torch.empty(s, b, h, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        if sequence_dim is None:
            return saved_bytes(layer, x)
        sequence_slices = Slices.even(0, s)
        shard = sequence_slices.local(x, group.rank, t).detach().clone().requires_grad_()
        return saved_bytes(layer, SlicedTensor.of(shard, sequence_slices, group))


@pytest.mark.parametrize("name", ["22B", "175B"])
@pytest.mark.parametrize("t", [2, 8])
def test_what_autograd_saves_of_a_layer_in_slices(name, t):
    """With tensor and with sequence parallelism, to the byte; the norms save 16sb bytes more.

    Without sequence parallelism each rank has both norms of all tokens.
    """
    model, b = MODELS[name]
    s, h, a = model.sequence_length, model.width, model.num_heads
    norms = 16 * s * b
    saved = sliced_saved_bytes(t, None, b, s, h, a)
    assert saved == model.activation_bytes(b, t) + norms
    assert sliced_saved_bytes(t, 0, b, s, h, a) == model.activation_bytes(b, t, True) + norms // t
