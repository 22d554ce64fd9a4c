"""Kernels' results on fake tensors have the shapes and sizes of those on real tensors."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import ctc_loss
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bigtrain.tensors.fake_kernels import lstm_workspace_bytes
from bigtrain.tensors.fake_mode import FakeMode

SHAPES = [
    *((12, 8, 64, 64), (12, 8, 512, 64), (1, 1, 16, 16), (5, 3, 17, 33), (7, 2, 300, 128)),
    *((4, 4, 256, 256), (4, 4, 128, 512), (21, 13, 108, 49), (30, 20, 131, 291)),
]
"""Steps, rows, input width, state width."""


class Results(TorchDispatchMode):
    """Records results of the operations named: shapes, strides, dtypes, bytes of their storages."""

    def __init__(self, word: str) -> None:
        super().__init__()
        self.word, self.seen = word, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        del types
        result = func(*args, **(kwargs or {}))
        if self.word in func.name():
            leaves = [t for t in tree_leaves(result) if isinstance(t, Tensor) and t.numel()]
            self.seen.append([(*_layout(t), t.untyped_storage().nbytes()) for t in leaves])
            keys = [t.untyped_storage()._cdata for t in leaves]
            self.seen.append(len(set(keys)))
        return result


def _layout(tensor):
    return tuple(tensor.shape), tensor.stride(), tensor.dtype


def same_on_fakes(run, word):
    """Assert that both results are equal; return the real one."""
    real, fake = Results(word), Results(word)
    with real:
        run()
    with FakeMode(), fake:
        run()
    assert real.seen
    assert fake.seen == real.seen
    return real.seen


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_an_lstm_saves_the_workspace_that_onednn_requests(shape, dtype):
    steps, rows, width, hidden = shape
    weights = [torch.randn(4 * hidden, n).to(dtype) for n in (width, hidden)]
    biases = [torch.randn(4 * hidden).to(dtype) for _ in range(2)]
    states = [torch.zeros(rows, hidden).to(dtype) for _ in range(2)]
    options = (False, [], 2, hidden, 1, True, False, False, True)
    layer = torch.ops.aten.mkldnn_rnn_layer
    try:
        real = layer(
            torch.randn(steps, rows, width).to(dtype), *weights, *biases, *states, *options
        )
    except RuntimeError:
        pytest.skip(f"oneDNN has no {dtype} here")
    assert lstm_workspace_bytes((steps, rows, width), hidden, dtype) == real[3].nbytes


def test_of_other_types_and_shapes_no_workspace_is_known():
    assert lstm_workspace_bytes((3, 2, 8), 8, torch.float16) == 0
    assert lstm_workspace_bytes((3, 8), 8, torch.float32) == 0


@pytest.mark.parametrize("bias", [True, False])
def test_an_lstm_goes_forward_and_back_with_the_same_storages(bias):
    def run():
        net = nn.LSTM(24, 40, num_layers=2, bidirectional=True, bias=bias)
        net(torch.randn(6, 3, 24))[0].sum().backward()

    same_on_fakes(run, "mkldnn_rnn_layer")


def test_an_lstm_in_evaluation_saves_nothing():
    def run():
        with torch.no_grad():
            nn.LSTM(24, 40).eval()(torch.randn(6, 3, 24))

    same_on_fakes(run, "mkldnn_rnn_layer")


@pytest.mark.parametrize("sizes", [(16, 32), (20, 36), (64, 8)])
def test_grouped_products_run_in_fp32(sizes):
    inner, outer = sizes

    def run():
        rows = torch.randn(10, inner, requires_grad=True)
        experts = torch.randn(4, outer, inner, requires_grad=True)
        ends = torch.tensor([2, 4, 8, 10], dtype=torch.int32)
        product = torch._grouped_mm(rows, experts.transpose(-2, -1), offs=ends)
        product.backward(torch.ones(10, outer))
        torch._grouped_mm(torch.randn(4, 10, inner), torch.randn(4, inner, outer))
        torch._grouped_mm(torch.randn(4, 10, inner), torch.randn(inner, outer), offs=ends)

    same_on_fakes(run, "_grouped_mm")


def test_ctc_holds_the_alignments_of_the_longest_target():
    def run():
        scores = torch.randn(50, 4, 20, requires_grad=True).log_softmax(-1)
        targets = torch.ones(4, 12, dtype=torch.long)
        steps, lengths = torch.full((4,), 50), torch.full((4,), 12)
        ctc_loss(scores, targets, steps, lengths).backward()
        # As in transformers: targets without padding, concatenated.
        whole = targets.masked_select(targets >= 0)
        ctc_loss(scores, whole, steps, lengths)

    assert same_on_fakes(run, "_ctc_loss")[0][1][0] == (4, 50, 25)


def test_a_mask_leaves_all_integers_and_an_unknown_number_of_others():
    with FakeMode():
        numbers = torch.zeros(3, 4, dtype=torch.long)
        assert numbers.masked_select(numbers > 0).shape == (12,)
        with pytest.raises(Exception, match="masked_select"):
            torch.zeros(3, 4).masked_select(numbers > 0)
