"""Operations of CUDA, and the tensors that they save, on fake tensors of the CPU."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from bigtrain.assembly.make_plan import make_plan
from bigtrain.assembly.resolve import resolve_plan
from bigtrain.core.workload import Workload
from bigtrain.data import MicroBatch
from bigtrain.devices import accelerator
from bigtrain.job.load import job_from_keys
from bigtrain.losses.loss import CrossEntropy
from bigtrain.prediction.predict import forecast_rank
from bigtrain.tensors.cuda_program import (
    FP32_OPERATIONS,
    FP32_RESULTS,
    LOW_OPERATIONS,
    WIDEST_OPERATIONS,
    cuda_program,
)
from bigtrain.tensors.tree import tree_tensors

HEADER = Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h"
KNOWN_TO_BOTH = re.compile(r"conv|prelu|mm$|matmul|linear|_thnn|scaled_dot_product|grid_sampler")
"""Operations of torch's lists that the CPU's autocast treats in the same way, and kernels of cuDNN
and of fused cells, which fake tensors of the CPU do not call."""


def _listed(macro: str) -> set[str]:
    body = re.search(rf"define {macro}\(_\)(.*?)\n\n", HEADER.read_text() + "\n\n", re.DOTALL)
    assert body is not None
    named = re.findall(r"_\((\w+)(?:, (\w+))?\)", body[1])
    return {f"{name}.{overload}" if overload else name for name, overload in named}


@pytest.mark.parametrize(
    ("macro", "operations"),
    [
        ("AT_FORALL_FP32", FP32_OPERATIONS),
        ("AT_FORALL_FP32_SET_OPT_DTYPE", FP32_RESULTS),
        ("AT_FORALL_LOWER_PRECISION_FP", LOW_OPERATIONS),
        ("AT_FORALL_PROMOTE", WIDEST_OPERATIONS),
    ],
)
def test_the_lists_are_those_of_the_torch_that_is_installed(macro, operations):
    listed = {name for name in _listed(macro) if "imname" not in name}  # of named tensors
    assert {name for name in listed if not KNOWN_TO_BOTH.search(name)} <= set(operations)
    assert set(operations) - {"rms_norm"} <= listed  # torch 2.11 does not list rms_norm


def _low(device: str) -> torch.Tensor:
    return torch.empty(4, 8, dtype=torch.bfloat16, device=device)


def _wide(device: str, *shape: int) -> torch.Tensor:
    return torch.empty(*(shape or (4, 8)), device=device)


def _classes(device: str) -> torch.Tensor:
    return torch.zeros(4, dtype=torch.long, device=device)


OPERATIONS: dict[str, Callable[[str], object]] = {
    "cross_entropy": lambda d: F.cross_entropy(_low(d), _classes(d)),
    "smoothed": lambda d: F.cross_entropy(_low(d), _classes(d), label_smoothing=0.1),
    "probabilities": lambda d: F.cross_entropy(_low(d), _low(d)),
    "softmax": lambda d: F.softmax(_low(d), -1),
    "softmax of a dtype": lambda d: F.softmax(_low(d), -1, dtype=torch.bfloat16),
    "log_softmax": lambda d: F.log_softmax(_low(d), -1),
    "sum": lambda d: _low(d).sum(),
    "sum over a dim": lambda d: _low(d).sum(1),
    "sum in bf16": lambda d: _low(d).sum(1, dtype=torch.bfloat16),
    "mean": lambda d: _low(d).mean(),
    "prod": lambda d: _low(d).prod(),
    "cumsum": lambda d: _low(d).cumsum(0),
    "norm": lambda d: _low(d).norm(dim=1),
    "normalize": lambda d: F.normalize(_low(d)),
    "mse": lambda d: F.mse_loss(_low(d), _low(d)),
    "kl_div": lambda d: F.kl_div(_low(d), _low(d), reduction="batchmean"),
    "margin": lambda d: F.multilabel_soft_margin_loss(_low(d), _low(d)),
    "pow": lambda d: _low(d) ** 2,
    "layer_norm": lambda d: F.layer_norm(_wide(d), (8,)),
    "rms_norm": lambda d: F.rms_norm(_low(d), (8,)),
    "rms_norm, weight": lambda d: F.rms_norm(_wide(d), (8,), _wide(d, 8)),
    "rms_norm, mixed": lambda d: F.rms_norm(_low(d), (8,), _wide(d, 8)),
    "rms_norm, channels_last": lambda d: F.rms_norm(
        _wide(d, 2, 4, 4, 8).to(memory_format=torch.channels_last), (8,)
    ),
    "rms_norm, transposed": lambda d: F.rms_norm(_wide(d, 2, 4, 3, 8).transpose(1, 2), (8,)),
    "rms_norm, a part of the columns": lambda d: F.rms_norm(_wide(d, 4, 16)[:, :8], (8,)),
    "group_norm": lambda d: F.group_norm(_wide(d), 2),
    "batch_norm": lambda d: F.batch_norm(_wide(d, 2, 4, 8), None, None, training=True),
    "linear": lambda d: F.linear(_wide(d), _wide(d, 3, 8), _wide(d, 3)),
    "einsum": lambda d: torch.einsum("ab,cb->ac", _wide(d), _wide(d, 3, 8)),
    "mv": lambda d: torch.mv(_wide(d), _wide(d, 8)),
    "multi_dot": lambda d: torch.linalg.multi_dot([_wide(d, 8, 8)] * 3),
    "convolution": lambda d: F.conv2d(_wide(d, 1, 3, 8, 8), _wide(d, 4, 3, 3, 3)),
    "padded": lambda d: F.conv1d(_wide(d, 1, 3, 8), _wide(d, 4, 3, 3), padding="same"),
    "bilinear": lambda d: F.bilinear(_wide(d), _wide(d), _wide(d, 2, 8, 8)),
    "addcmul": lambda d: torch.addcmul(_low(d), _low(d), _wide(d)),
    "cat": lambda d: torch.cat([_low(d), _wide(d)]),
    "stack": lambda d: torch.stack([_low(d), _wide(d)]),
    "dot": lambda d: torch.dot(_wide(d, 8), _low(d)[0]),
    "index_put": lambda d: _wide(d).index_put((_classes(d),), _low(d)),
    "scatter_add": lambda d: _wide(d).scatter_add(
        0, torch.zeros(4, 8, dtype=torch.long, device=d), _low(d)
    ),
    "upsample": lambda d: F.interpolate(_low(d)[None], scale_factor=2),
    "reflection_pad": lambda d: F.pad(_low(d)[None], (1, 1), mode="reflect"),
    "pool": lambda d: F.avg_pool3d(_low(d).view(1, 1, 2, 2, 8), (1, 1, 2)),
    "grid_sample": lambda d: F.grid_sample(
        _wide(d, 1, 1, 4, 4), _wide(d, 1, 4, 4, 2), align_corners=False
    ),
    "dropout": lambda d: F.dropout(_low(d), 0.1),
    "gelu": lambda d: F.gelu(_low(d)),
    "rnn_cell": lambda d: torch.rnn_tanh_cell(
        _wide(d), _wide(d), _wide(d, 8, 8), _wide(d, 8, 8), _wide(d, 8), _wide(d, 8)
    ),
}
"""Calls of torch's functions with tensors on a device."""


class Dispatched(TorchDispatchMode):
    """Notes the operations with the dtypes of their inputs and results."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, list[torch.dtype], list[torch.dtype]]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if not func.name().startswith(("prim::device", "aten::empty", "aten::detach")):
            both = [[t.dtype for t in tree_tensors(each)] for each in ((args, kwargs), result)]
            self.calls.append((func.name(), *both))
        return result


def _dispatched(call: Callable[[str], object], device: str, *, autocast: bool):
    with FakeTensorMode(), Dispatched() as noted:
        torch.set_autocast_dtype(device, torch.bfloat16)
        torch.set_autocast_enabled(device, autocast)
        try:
            call(device)
        finally:
            torch.set_autocast_enabled(device, False)
    return noted.calls


@pytest.mark.filterwarnings("ignore:Mismatch dtype")
@pytest.mark.parametrize("autocast", [False, True])
def test_the_operations_are_those_of_fake_tensors_on_cuda(autocast):
    """Fake tensors on CUDA need no GPU in the forward pass."""
    differing = []
    for name, call in OPERATIONS.items():
        with cuda_program():
            emulated = _call_or_error(call, "cpu", autocast)
        if emulated != _call_or_error(call, "cuda", autocast):
            differing.append(name)
    assert differing == []


def _call_or_error(call: Callable[[str], object], device: str, autocast: bool):
    try:
        return _dispatched(call, device, autocast=autocast)
    except RuntimeError as error:  # mixed dtypes, which only autocast converts
        return str(error).splitlines()[0]


def test_a_norm_by_the_root_mean_square_saves_no_intermediate_results():
    saved: list[torch.Tensor] = []
    with cuda_program(), FakeTensorMode():
        rows = torch.ones(16, 64, requires_grad=True)
        weight = torch.ones(64, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
            result = F.rms_norm(rows, (64,), weight, 1e-5)
        assert sorted(tuple(t.shape) for t in saved) == [(16, 1), (16, 64), (64,)]
        result.sum().backward()
        assert rows.grad is not None
        assert weight.grad is not None
        assert (rows.grad.shape, weight.grad.shape) == ((16, 64), (64,))


def test_what_autocast_computes_in_fp32_is_cudas_list():
    with cuda_program(), FakeTensorMode(), torch.autocast("cpu", dtype=torch.bfloat16):
        low = F.linear(torch.ones(4, 8), torch.ones(8, 8))
        assert low.dtype == torch.bfloat16
        results = [
            F.layer_norm(low, (8,)),
            low.softmax(-1),
            F.log_softmax(low, -1),
            low.exp(),
            low.pow(2),
            low.sum(),
            F.cross_entropy(low, torch.zeros(4, dtype=torch.long)),
            F.mse_loss(low, low),
        ]
        assert {each.dtype for each in results} == {torch.float32}
        assert F.gelu(low).dtype == (low + low).dtype == torch.bfloat16
    with FakeTensorMode(), torch.autocast("cpu", dtype=torch.bfloat16):
        low = F.linear(torch.ones(4, 8), torch.ones(8, 8))
        assert F.layer_norm(low, (8,)).dtype == low.softmax(-1).dtype == torch.bfloat16


def test_dropout_saves_a_byte_per_number_and_attention_no_mask():
    saved_bytes: dict[str, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        saved_bytes[str(tensor.dtype)] = (
            saved_bytes.get(str(tensor.dtype), 0) + tensor.untyped_storage().nbytes()
        )
        return tensor

    with cuda_program(), FakeTensorMode():
        inputs = torch.ones(2, 4, 64, 16, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            F.dropout(inputs, 0.1, training=True)
            assert saved_bytes == {"torch.bool": inputs.numel()}
            saved_bytes.clear()
            F.scaled_dot_product_attention(inputs, inputs, inputs, dropout_p=0.1)
        # The 2 x 4 x 64 x 64 probabilities are not saved
        assert sum(saved_bytes.values()) < 6 * inputs.nbytes
        assert F.dropout(inputs, 0.1, training=False) is inputs


def test_afterwards_the_cpus_own_kernels_are_back():
    values = torch.ones(4, 8, requires_grad=True)
    with pytest.raises(RuntimeError, match="fails inside"), cuda_program():
        raise RuntimeError("fails inside")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low = F.linear(values, torch.ones(8, 8))
        assert F.layer_norm(low, (8,)).dtype == torch.bfloat16
    assert "NativeDropout" not in type(F.dropout(values, 0.5, training=True).grad_fn).__name__


def test_what_is_computed_again_is_the_same_program():
    with cuda_program(), FakeTensorMode():
        layer = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Dropout(0.1))
        inputs = torch.ones(4, 8, requires_grad=True)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = checkpoint(layer, inputs, use_reentrant=False)
        assert output.dtype == torch.float32
        output.sum().backward()
        assert inputs.grad is not None


noted_types: set[torch.dtype] = set()


class Noted(nn.Module):
    """A block whose norm gets bf16 from a product; CUDA's autocast converts it to fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.product, self.norm = nn.Linear(16, 16), nn.LayerNorm(16)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.norm(self.product(rows))
        noted_types.add(output.dtype)
        return output


@pytest.mark.skipif(accelerator() is not None, reason="the accelerator's kernels would be traced")
@pytest.mark.parametrize(
    ("strategy", "ranks", "keys"),
    [("single", 1, {"strategy.recompute": "1GiB"}), ("1f1b", 2, {"mesh.pp": 2})],
)
def test_all_that_is_traced_of_a_run_on_cuda_is_its_program(strategy, ranks, keys):
    """The prices of a budget, the trace of a cut, and the forecast."""
    words = {"train.global_batch_size": 8, "train.precision": "bf16", **keys}
    plan, loss = make_plan(job_from_keys(strategy, words), ranks, "cuda"), CrossEntropy()
    batch = torch.randn(plan.batch.micro_size, 16), torch.zeros(plan.batch.micro_size).long()
    example = MicroBatch(*batch, loss.count(batch[1]), plan.batch.micro_size)
    model = nn.Sequential(*(Noted() for _ in range(4)))
    workload = Workload(model, example, loss, torch.optim.AdamW)
    noted_types.clear()
    resolved = resolve_plan(plan, workload)
    assert noted_types == {torch.float32}
    assert forecast_rank(resolved, workload).forecast is not None
    assert noted_types == {torch.float32}
