"""Tensors that CUDA's autocast, dropout and attention save, on fake tensors of the CPU."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from bigtrain.assembly.make_plan import make_plan
from bigtrain.assembly.resolve import resolve_plan
from bigtrain.core.workload import Workload
from bigtrain.data import MicroBatch
from bigtrain.devices import accelerator
from bigtrain.job.load import job_from_keys
from bigtrain.losses.loss import CrossEntropy
from bigtrain.prediction.predict import forecast_rank
from bigtrain.tensors.cuda_program import FP32_OPERATIONS, cuda_program

LEFT_OUT = re.compile(r"upsample|margin|frobenius|nuclear|pdist|fft|linalg_matrix_norm")
"""Functions of torch's list that no model of torchvision, timm or transformers calls in bf16."""


def test_the_list_is_that_of_the_torch_that_is_installed():
    header = Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h"
    listed = set()
    for macro in ("AT_FORALL_FP32", "AT_FORALL_FP32_SET_OPT_DTYPE"):
        body = re.search(rf"define {macro}\(_\)(.*?)\n\n", header.read_text() + "\n\n", re.DOTALL)
        assert body is not None
        for name, overload in re.findall(r"_\((\w+)(?:, (\w+))?\)", body[1]):
            listed.add(f"{name}.{overload}" if overload else name)
    wanted = {name for name in listed if not LEFT_OUT.search(name)}
    assert wanted - set(FP32_OPERATIONS) <= {"sum.dim_DimnameList"}
    # Norms and sums have more overloads than the list names.
    assert set(FP32_OPERATIONS) <= listed | {"linalg_vector_norm", "sum", "sum.dim_IntList"}


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
