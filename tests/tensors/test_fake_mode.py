"""Cached results of our fake mode equal those of torch's."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
import torchvision
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bigtrain.models.gpt import GPT, GPTConfig
from bigtrain.tensors.fake import fake_model
from bigtrain.tensors.fake_mode import FakeMode


class Log(TorchDispatchMode):
    """Logs each operation with all properties of its results."""

    def __init__(self):
        super().__init__()
        self.lines, self.storages = [], {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        operands = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, FakeTensor)]
        for leaf in tree_leaves(result):
            if isinstance(leaf, FakeTensor):
                storage = leaf.untyped_storage()
                shares = [
                    storage._cdata == operand.untyped_storage()._cdata for operand in operands
                ]
                same = [leaf is operand for operand in operands]
                self.lines.append(
                    (
                        *(str(func), tuple(leaf.shape), leaf.stride(), leaf.storage_offset()),
                        *(leaf.dtype, leaf.fake_device, leaf.layout, leaf.requires_grad),
                        *(storage.nbytes(), leaf.is_inference(), shares, same),
                    )
                )
        return result


def gpt():
    config = GPTConfig(vocab_size=64, sequence_length=16, num_layers=2, width=32, num_heads=4)
    tokens = torch.zeros(2, 16, dtype=torch.int64)
    return (
        GPT(config),
        (tokens,),
        lambda logits: F.cross_entropy(logits.flatten(0, 1), tokens.flatten()),
    )


def vision(make, size):
    with torch.device("meta"):
        described = make()

    def faked():
        model = fake_model(described, torch.device("cpu"), double=False)
        return model, (torch.zeros(2, 3, size, size),), lambda logits: logits.square().mean()

    return faked


def lstm():
    class Last(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm, self.head = nn.LSTM(8, 16, num_layers=2, batch_first=True), nn.Linear(16, 4)

        def forward(self, inputs):
            return self.head(self.lstm(inputs)[0][:, -1])

    return Last(), (torch.zeros(3, 5, 8),), lambda name: name.sum()


def odd():
    """Views of every kind, tensors without dims, results that share storage, in-place functions."""

    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(4, 6))
            self.register_buffer("count", torch.zeros(()))

        def forward(self, inputs):
            self.count += 1
            mixed = inputs @ self.weight
            first, *tail = mixed.split([2, 4], dim=1)
            parts = mixed.unbind(0)
            total = (first * self.count).sum() + tail[0].t().reshape(-1).topk(2).values.sum()
            scaled = mixed * torch.tensor(2.0) + inputs.new_ones(()) + mixed.mean()
            low = scaled.to(torch.bfloat16) * self.count
            low.mul_(2).clamp_(min=0)
            complex_part = torch.fft.rfft(mixed).abs().sum()
            return total + parts[0].sum() + low.float().norm() + complex_part

    return Odd(), (torch.zeros(3, 4),), lambda name: name


VIT = {"image_size": 32, "patch_size": 16, "num_layers": 2, "num_heads": 2}
MODELS = {
    "gpt": lambda: gpt,
    "resnet18": lambda: vision(torchvision.models.resnet18, 64),
    "squeezenet1_1": lambda: vision(torchvision.models.squeezenet1_1, 64),
    "vit": lambda: vision(
        lambda: torchvision.models.VisionTransformer(**VIT, hidden_dim=32, mlp_dim=64), 32
    ),
    "lstm": lambda: lstm,
    "odd": lambda: odd,
}


def steps(mode, make, *, low):
    """The operations of two steps, the second of which uses the cache."""
    build = make()
    with mode, Log() as log:
        model, inputs, loss = build()
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16, enabled=low):
                loss_value = loss(model(*inputs))
            loss_value.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return log.lines


def without_norm_statistics(lines):
    """torch's fakes give the statistics of a low-precision input its precision: see `FakeMode`."""
    return [line for line in lines if "_norm" not in line[0]]


@pytest.mark.parametrize("low", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_each_operation_gives_what_torchs_own_mode_gives(name, low):
    ours = steps(FakeMode(), MODELS[name], low=low)
    again = steps(FakeMode(), MODELS[name], low=low)
    plain = FakeTensorMode()
    plain.cache_enabled = False  # cached results share no storage
    torchs = steps(plain, MODELS[name], low=low)
    assert ours == again
    if name == "lstm":  # torch's fakes omit oneDNN's workspace: see `fake_kernels`
        assert min(len(ours), len(torchs)) > 50
        return
    assert len(ours) == len(torchs) > 50
    assert without_norm_statistics(ours) == without_norm_statistics(torchs)


def test_a_function_that_was_refused_is_refused_again():
    with FakeMode():
        left, right = torch.empty(2, 3), torch.empty(2, 3)
        for _ in range(2):
            with pytest.raises(RuntimeError):
                left @ right
            with pytest.raises(RuntimeError):
                left.t().view(6)


def test_what_is_set_by_default_counts():
    with FakeMode():
        kinds = []
        for dtype in (torch.float32, torch.float64, torch.float32):
            torch.set_default_dtype(dtype)
            try:
                ones = torch.ones(3, dtype=torch.int64)
                kinds.append(((ones / 2).dtype, torch.zeros(3).dtype))
            finally:
                torch.set_default_dtype(torch.float32)
    assert kinds == [(k, k) for k in (torch.float32, torch.float64, torch.float32)]


def test_tensors_of_another_mode_and_with_numbers_are_left_to_torch():
    with FakeMode():
        scalar = torch.tensor(3.0)
        assert scalar.constant is not None
        assert float(scalar + 1 if scalar.constant is None else scalar) == 3.0
        assert (torch.empty(2, 3) * scalar).shape == (2, 3)
