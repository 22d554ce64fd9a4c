"""AdamW in little memory, compared with torch's and torchao's: numbers, rounding, memory."""

from __future__ import annotations

import sys
from unittest import mock

import pytest
import torch
from torch import nn

from bigtrain.errors import ConfigError
from bigtrain.job.optim_keys import OptimConfig
from bigtrain.memory.tracker import StorageTracker
from bigtrain.optim.factory import optimizer_factory
from bigtrain.optim.lean_adamw import CHUNK_ELEMENTS, LeanAdamW, stochastically_rounded
from bigtrain.optim.low_bit_adamw import LowBitAdamW

KEYS = {"lr": 1e-2, "weight_decay": 0.1, "betas": (0.9, 0.95)}


def after_steps(make, *, shape=(64, 256), dtype=torch.float32, steps=5, format=None):
    torch.manual_seed(0)
    weight = torch.randn(shape)
    if format is not None:
        weight = weight.to(memory_format=format)
    parameters = [nn.Parameter(weight.to(dtype)), nn.Parameter(torch.zeros(7, dtype=dtype))]
    optimizer = make(parameters)
    for _ in range(steps):
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape).to(dtype)
        optimizer.step()
    return parameters, optimizer


def torchs(parameters):
    return torch.optim.AdamW(parameters, fused=True, **KEYS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_in_full_precision_it_is_torchs(dtype):
    shape = (3, CHUNK_ELEMENTS // 2 + 5)  # more than one chunk, and a partial one
    ours, _ = after_steps(lambda p: LeanAdamW(p, **KEYS), shape=shape, dtype=dtype)
    theirs, _ = after_steps(torchs, shape=shape, dtype=dtype)
    for mine, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-5, atol=1e-6)


def test_memory_in_another_order_and_with_gaps():
    shape = (4, 3, 5, 5)
    ours, _ = after_steps(lambda p: LeanAdamW(p, **KEYS), shape=shape, format=torch.channels_last)
    theirs, _ = after_steps(torchs, shape=shape)
    torch.testing.assert_close(ours[0], theirs[0])
    wide = torch.ones(6, 8)
    gaps = nn.Parameter(wide[:, :4])
    gaps.grad = torch.ones(6, 4)
    LeanAdamW([gaps], lr=0.1).step()
    torch.testing.assert_close(gaps.detach(), torch.full((6, 4), 0.9))
    assert bool((wide[:, 4:] == 1).all())


def test_moments_in_bf16_stay_close():
    ours, optimizer = after_steps(lambda p: LeanAdamW(p, state=torch.bfloat16, **KEYS))
    theirs, _ = after_steps(torchs)
    assert optimizer.state[ours[0]]["exp_avg_sq"].dtype == torch.bfloat16
    torch.testing.assert_close(ours[0], theirs[0], rtol=0, atol=5e-3)


def test_a_step_needs_a_few_mebibytes_beside_the_states():
    for state, dtype in ((torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16)):
        parameters, optimizer = after_steps(
            lambda p, state=state: LeanAdamW(p, state=state, **KEYS),
            shape=(2048, 1024),
            dtype=dtype,
            steps=1,
        )
        step_tensors = [*parameters, *(p.grad for p in parameters)]
        step_tensors += [v for slots in optimizer.state.values() for v in slots.values()]
        tracker = StorageTracker()
        with tracker:
            tracker.label(step_tensors, "optimizer")
            before = tracker.live_bytes
            optimizer.step()
        assert tracker.peak_bytes - before <= 6 * 2**20


def test_stochastic_rounding_is_right_on_average_and_takes_neighbours():
    generator = torch.Generator().manual_seed(0)
    # An eighth of the distance from 1 to the next bf16 number
    value = torch.full((100_000,), 1.0 + 2**-10)
    rounded = stochastically_rounded(value, generator)
    assert set(rounded.tolist()) == {1.0, 1.0 + 2**-7}
    assert float(rounded.double().mean()) == pytest.approx(1.0 + 2**-10, abs=1e-4)
    exact_values = torch.tensor([0.0, -0.0, 1.5, -2.0, float("inf"), 2.0**-120])
    torch.testing.assert_close(
        stochastically_rounded(exact_values, generator), exact_values, rtol=0, atol=0
    )


@pytest.mark.parametrize("stochastic", [True, False])
def test_small_changes_of_bf16_parameters_count_only_with_it(stochastic):
    parameter = nn.Parameter(torch.ones(4096, dtype=torch.bfloat16))
    optimizer = LeanAdamW([parameter], lr=1e-4, stochastic_rounding=stochastic)
    for _ in range(100):
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    moved = 1 - float(parameter.detach().float().mean())
    assert moved == pytest.approx(0.01 if stochastic else 0.0, abs=5e-4)


def test_the_second_moment_fades_in_bf16():
    parameter = nn.Parameter(torch.zeros(4096))
    optimizer = LeanAdamW([parameter], lr=0.0, state=torch.bfloat16)
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    before = float(optimizer.state[parameter]["exp_avg_sq"].float().mean())
    for _ in range(300):
        parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    after = float(optimizer.state[parameter]["exp_avg_sq"].float().mean())
    assert after == pytest.approx(before * 0.999**300, rel=0.02)


def test_rounding_repeats_and_moves_no_other_generator():
    def lean(seed):
        return after_steps(
            lambda p: LeanAdamW(p, state=torch.bfloat16, seed=seed, **KEYS), dtype=torch.bfloat16
        )

    (first, _), drawn = lean(0), torch.rand(1)
    (again, _), drawn_again = lean(0), torch.rand(1)
    (second_seed, _) = lean(1)
    after_steps(torchs)
    assert torch.equal(drawn, torch.rand(1))
    assert torch.equal(drawn, drawn_again)
    assert torch.equal(first[0], again[0])
    assert not torch.equal(first[0], second_seed[0])


@pytest.mark.parametrize(("bits", "slots"), [(8, 2 * (1 + 4 / 256)), (4, 2 * (0.5 + 4 / 128))])
def test_few_bits_are_torchaos(bits, slots):
    """Compared with torchao's update, uncompiled, from the same numbers."""
    from torchao import optim

    kind = {8: optim.AdamW8bit, 4: optim.AdamW4bit}[bits]
    with mock.patch("torch.compile", lambda function, **_: function):
        theirs, _ = after_steps(lambda p: kind(p, **KEYS))
    ours, optimizer = after_steps(lambda p: LowBitAdamW(p, bits, **KEYS))
    # A number halfway between two codes may be rounded to either.
    close = (ours[0] - theirs[0]).abs() < 1e-5
    assert float(close.float().mean()) > 0.999
    torch.testing.assert_close(ours[1], theirs[1])
    state = optimizer.state[ours[0]]
    state_bytes = sum(v.numel() * v.element_size() for k, v in state.items() if k != "step")
    assert state_bytes / ours[0].numel() == pytest.approx(slots)


def test_full_moments_are_taken_over_into_few_bits():
    (weight, bias), torch_adamw = after_steps(torchs)
    optimizer = LowBitAdamW([weight, bias], 8, **KEYS)
    for parameter in (weight, bias):
        optimizer.state[parameter] = dict(torch_adamw.state[parameter])
    before = torch_adamw.state[weight]["exp_avg"].clone()
    weight.grad = bias.grad = None
    weight.grad = before * 0
    optimizer.step()
    moment = optimizer._read(optimizer.state[weight], "exp_avg", slice(0, 16384), torch.float32)
    assert optimizer.state[weight]["exp_avg"].dtype == torch.uint8
    torch.testing.assert_close(moment.view(64, 256), before * 0.9, rtol=0.1, atol=0.01)


def test_without_torchao_it_says_what_to_install():
    with (
        mock.patch.dict(sys.modules, {"torchao.optim.subclass_8bit": None}),
        pytest.raises(ConfigError) as refusal,
    ):
        optimizer_factory(OptimConfig(name="adamw_8bit"))
    assert "optim.name=adamw_8bit" in str(refusal.value)
    assert "pip install 'bigtrain[lowbit]'" in str(refusal.value)
    assert "optim.state=bf16" in str(refusal.value)


def test_the_closure_is_called():
    parameter = nn.Parameter(torch.ones(3))
    optimizer = LeanAdamW([parameter], lr=0.1)

    def closure():
        loss = parameter.square().sum()
        loss.backward()
        return loss.detach()

    assert float(optimizer.step(closure)) == 3.0
    assert float(parameter.detach()[0]) == pytest.approx(0.9)
