"""Observing a forward pass on tensors without values."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from bigtrain.tensors.fake import fake_tensor
from bigtrain.tracing.call_hooks import is_watched
from bigtrain.tracing.watch import (
    CallLog,
    ForwardObserver,
    fake_twin,
    log_calls,
    untraceable_message,
    untraceable_reason,
    watch_forward,
)

CPU = torch.device("cpu")


class Gate(nn.Module):
    def forward(self, x):
        return x if x.sum() > 0 else -x


class Squared(nn.Module):
    """A layer whose result is saved, and one that is called inside of vmap."""

    def __init__(self):
        super().__init__()
        self.first, self.mapped = nn.Linear(3, 3), nn.Linear(3, 3)
        self.scale = torch.ones(3)

    def forward(self, x):
        return torch.vmap(self.mapped)(self.first(x) ** 2) * self.scale


class Seen(ForwardObserver):
    def __init__(self):
        self.calls, self.operations, self.functions, self.saved = [], [], [], 0

    def call(self, name, run, args, kwargs):
        self.calls.append(name)
        return super().call(name, run, args, kwargs)

    def function(self, func, args, kwargs, result):  # noqa: ARG002
        self.functions.append(getattr(func, "__name__", ""))

    def operation(self, func, args, kwargs, result):  # noqa: ARG002
        self.operations.append(func._overloadpacket.__name__)

    def save(self, tensor):  # noqa: ARG002
        self.saved += 1


def watch_model(model, observer):
    """Run a model on fake tensors under an observer."""
    twin, mode = fake_twin(model, CPU)
    with mode:
        x = fake_tensor(torch.ones(2, 3), CPU)
    with watch_forward(twin, observer, mode):
        return twin(x)


def test_an_observer_sees_calls_functions_operations_and_saved_tensors():
    seen = Seen()
    output = watch_model(Squared(), seen)
    assert output.shape == (2, 3)
    assert seen.calls == ["", "first"]  # calls inside of vmap are not reported
    assert "linear" in seen.functions
    assert {"addmm", "pow", "mul"} <= {*seen.operations}
    assert seen.saved > 0
    assert not is_watched()


def test_an_error_names_the_module_and_ends_the_watch():
    seen, model = Seen(), nn.Sequential(nn.Linear(3, 3), Gate())
    twin, mode = fake_twin(model, CPU)
    with mode:
        x = fake_tensor(torch.ones(2, 3), CPU)
    with (
        pytest.raises(Exception, match="_local_scalar_dense") as raised,
        watch_forward(twin, seen, mode),
    ):
        twin(x)
    assert untraceable_message(raised.value, seen) == (
        "the model does not run on tensors without values; '1' fails: its computation depends on "
        "the value of a tensor (aten._local_scalar_dense.default)"
    )
    assert all(module._compiled_call_impl is None for module in twin.modules())
    assert not is_watched()


def test_an_observer_may_make_up_an_answer():
    class Answers(Seen):
        def answer(self, func, args, error):  # noqa: ARG002
            return True

    assert watch_model(Gate(), Answers()).shape == (2, 3)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ValueError("no\nmore"), "ValueError: no"),
        (KeyError(), "KeyError"),
    ],
)
def test_a_reason_is_one_line(error, reason):
    assert untraceable_reason(error) == reason


def test_a_log_of_calls_changes_nothing_and_goes_with_its_block():
    model, log = Squared(), CallLog()
    x = torch.randn(2, 3)
    plain = model(x)
    with log_calls(model, log):
        torch.testing.assert_close(model(x), plain)
    model(x)
    assert log.calls == {"": 1, "first": 1, "mapped": 1}
    assert log.stack == []


def test_a_log_of_calls_says_where_an_error_was():
    model, log = nn.Sequential(nn.Linear(3, 3), nn.Linear(4, 4)), CallLog()
    with pytest.raises(RuntimeError), log_calls(model, log):
        model(torch.ones(2, 3))
    assert log.stack == ["", "1"]
