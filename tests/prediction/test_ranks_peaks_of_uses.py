"""The peak of models that use parameters more than once, transposed, or updated in place."""

from __future__ import annotations

import pytest
import torch
from support.parity import sgd
from support.peaks import peaks, repeat_if_above
from support.ranks import run_ranks
from torch import Tensor, nn

WIDTH = 128


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


class Transposed(nn.Module):
    """Parameters of the model itself, transposed in each pass: a view of them is saved."""

    def __init__(self) -> None:
        super().__init__()
        self.v, self.w = (nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(torch.tanh(x @ self.v.t()) @ self.w.t()))


class TransposedLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.weight.t())


class Shared(nn.Module):
    """A layer that is called twice in every pass."""

    def __init__(self) -> None:
        super().__init__()
        self.twice, self.once = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.twice(x))
        return self.head(torch.tanh(self.twice(torch.tanh(self.once(x)))))


class Teacher(nn.Module):
    """A moving average of the student's weights, which the forward pass updates in place."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = layers(), layers().requires_grad_(False)
        self.head = nn.Linear(WIDTH, 8)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            pairs = zip(self.teacher.parameters(), self.student.parameters(), strict=True)
            with torch.no_grad():
                for slow, fast in pairs:
                    slow.mul_(0.9).add_(fast, alpha=0.1)
        return self.head(self.student(x) - self.teacher(x).detach())


class LastTeacher(Teacher):
    """The same, but the teacher is called before the student."""

    def forward(self, x: Tensor) -> Tensor:
        target = self.teacher(x).detach()
        return self.head(self.student(x) - target)


class RegisteredFirst(Teacher):
    """The student is called first, and the teacher is the model's first module."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.teacher, self.student = layers().requires_grad_(False), layers()
        self.head = nn.Linear(WIDTH, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.student(x) - self.teacher(x).detach())


NETS = {
    "transposed": Transposed,
    "transposed layers": lambda: nn.Sequential(
        TransposedLayer(), TransposedLayer(), nn.Linear(WIDTH, 8)
    ),
    "shared": Shared,
    "teacher": Teacher,
    "teacher first": LastTeacher,
    "teacher registered first": RegisteredFirst,
}
UNDER_DEEPSPEED = (
    "transposed",
    "transposed layers",
    "shared",
    "teacher first",
    "teacher registered first",
)
UNDER_FSDP = ("teacher", "teacher first", "teacher registered first")


def peaks_of_all(context, strategy, names, precision):
    batch = torch.randn(16, WIDTH), torch.arange(16) % 8
    keys = {"train.precision": precision}
    return [peaks(context, NETS[name], batch, strategy, keys, sgd) for name in names]


CASES = [
    ("zero3", "fp32", UNDER_DEEPSPEED),
    ("fsdp", "fp32", UNDER_FSDP),
    ("zero3", "bf16", UNDER_DEEPSPEED),
    ("fsdp", "bf16", UNDER_FSDP),
    ("fsdp_zero2", "fp32", UNDER_FSDP),
    ("ddp", "fp32", tuple(NETS)),
    ("zero2", "fp32", UNDER_DEEPSPEED),
]


@pytest.mark.parametrize(("strategy", "precision", "names"), CASES)
def test_the_peak_of_odd_uses_of_parameters_is_predicted(strategy, precision, names):
    rows = repeat_if_above(
        lambda: [
            row
            for rank in run_ranks(peaks_of_all, 2, strategy, names, precision, timeout_s=150)
            for row in rank
        ],
        lambda row: row[1].bytes > 1.005 * row[0].bytes,
    )
    for name, (predicted, measured, note) in zip(names * 2, rows, strict=True):
        assert note is None
        assert predicted.bytes == pytest.approx(measured.bytes, rel=0.005), (name, measured)
