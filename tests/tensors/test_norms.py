"""Gradient norms are right to 3e-7 for any size, dtype and layout, and nothing is copied."""

from __future__ import annotations

import math

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from bigtrain.tensors.norms import GradientNorm, global_norm, local_norm


def exact(*tensors):
    return math.sqrt(sum(float(t.detach().double().square().sum()) for t in tensors))


def random_tensor(*shape, dtype=torch.float32):
    """Random numbers of this shape, the same each time."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(dtype)


MILLION = random_tensor(1_200_001)
CASES = {
    "a slice and a rest": MILLION,
    "one slice": random_tensor(256),
    "less than a slice": random_tensor(17),
    "0-dim": torch.tensor(-3.0),
    "empty": torch.empty(0, 4),
    "a transposed matrix": MILLION[:1_200_000].view(1000, 1200).t(),
    "channels last": random_tensor(64, 128, 9, 9).to(memory_format=torch.channels_last),
    "a column": MILLION[:1_200_000].view(-1, 2)[:, 1],
    "every other element": MILLION[::2].view(1, -1),
    "expanded": random_tensor(1, 7).expand(30_000, 7),
    "equal": torch.full((2**16,), 0.0881),
    "bf16": MILLION.to(torch.bfloat16),
    "bf16 with gaps": MILLION[1::3].to(torch.bfloat16)[::2],
    "fp16": MILLION.to(torch.float16),
    "fp64": MILLION.double(),
    "sparse": torch.sparse_coo_tensor(
        [[1, 1, 2]], torch.tensor([2.0, 3.0, 4.0]), (4,), check_invariants=True
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_norm_is_right_whatever_the_layout(case):
    tensor = CASES[case]
    wanted = exact(tensor.to_dense())
    norm = local_norm([tensor])
    assert norm.dtype == torch.float64
    assert norm.shape == ()
    assert float(norm) == pytest.approx(wanted, rel=4e-7)


def test_torch_alone_would_be_off():
    assert abs(float(torch.linalg.vector_norm(MILLION)) / exact(MILLION) - 1) > 1e-6


def test_fake_tensors_go_the_way_of_the_device_that_is_meant():
    with FakeTensorMode():
        tensor = torch.empty(1000)
        assert local_norm([tensor]).dtype == torch.float64
        assert local_norm([tensor], "cuda").dtype == torch.float32  # one kernel for all tensors
    assert local_norm([torch.ones(4)], "cuda").dtype == torch.float64  # a shard on the host


def test_many_are_one_norm_together_or_one_by_one():
    tensors = [
        random_tensor(3),
        random_tensor(20_000),
        random_tensor(4, 4, dtype=torch.float64),
        random_tensor(9).bfloat16(),
    ]
    assert float(global_norm(tensors)) == pytest.approx(exact(*tensors), rel=3e-7)
    one_by_one = GradientNorm()
    for tensor in tensors:
        one_by_one.add([tensor])
    assert float(one_by_one.total()) == pytest.approx(exact(*tensors), rel=3e-7)
    assert float(global_norm([])) == 0.0


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_what_is_not_finite_comes_through(value):
    spoilt = random_tensor(20_000)
    spoilt[12_345] = value
    assert not math.isfinite(float(local_norm([random_tensor(5), spoilt])))


class Largest(TorchDispatchMode):
    """Records the largest number of elements in a new storage of an operation."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result._base is None:
            aliases = any(
                isinstance(a, torch.Tensor)
                and a.untyped_storage().data_ptr() == result.untyped_storage().data_ptr()
                for a in args
            )
            self.elements = max(self.elements, 0 if aliases else result.numel())
        return result


@pytest.mark.parametrize("case", [name for name in CASES if name != "sparse"])
def test_nothing_is_copied(case):
    tensor = CASES[case]
    half = tensor.dtype in (torch.bfloat16, torch.float16)
    with Largest() as largest:
        local_norm([tensor])
    assert largest.elements <= (2**20 if half else max(1, tensor.numel() // 2**7))


def test_the_gradient_of_half_precision_is_not_converted_whole_inside_an_operation():
    tensor = random_tensor(2**23).bfloat16()
    with torch.profiler.profile(profile_memory=True) as profile:
        local_norm([tensor])
    assert max(event.cpu_memory_usage for event in profile.events()) <= 2 * 4 * 2**20
