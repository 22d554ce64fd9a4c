"""Strategies that do wrong, each in a different manner, which comparing and verifying must
survive.
"""

from __future__ import annotations

import itertools
import os
import time
from contextlib import nullcontext
from dataclasses import replace
from typing import ClassVar
from unittest import mock

import torch
from torch import nn

from bigtrain.core.loop import LoopRunner
from bigtrain.core.strategy import Assembly
from bigtrain.slicing import sliced_tensor
from bigtrain.slicing.sliced_tensor import local_of
from bigtrain.strategies.ddp import DDP
from bigtrain.strategies.tensor import TensorSlices


class Hangs(DDP):
    """Never returns from `apply`."""

    name: ClassVar[str] = "hangs"
    summary: ClassVar[str] = "hangs"

    def apply(self, assembly: Assembly) -> None:  # noqa: ARG002
        time.sleep(600)


class Crashes(DDP):
    """Ends the process without a message."""

    name: ClassVar[str] = "crashes"
    summary: ClassVar[str] = "crashes"

    def apply(self, assembly: Assembly) -> None:  # noqa: ARG002
        os.kill(os.getpid(), 11)


class Forgets(DDP):
    """One rank makes the averaged gradient of one parameter 1% too large."""

    name: ClassVar[str] = "forgets"
    summary: ClassVar[str] = "forgets"

    def apply(self, assembly: Assembly) -> None:
        super().apply(assembly)
        wrong = dict(assembly.model.named_parameters())["head.bias"]
        if assembly.context.rank == 1:
            wrong.register_hook(lambda gradient: gradient * 1.02)


class NormOff(DDP):
    """The gradient norm is 0.01% too large."""

    name: ClassVar[str] = "norm_off"
    summary: ClassVar[str] = "norm off"

    def apply(self, assembly: Assembly) -> None:
        super().apply(assembly)

        class Runner(LoopRunner):
            def norm(self):
                return super().norm() * 1.0001

        assembly.runner = Runner


class CountsRows(DDP):
    """Divides the loss by the number of rows, including rows whose target is ignored."""

    name: ClassVar[str] = "counts_rows"
    summary: ClassVar[str] = "counts rows"

    def apply(self, assembly: Assembly) -> None:
        super().apply(assembly)

        class Runner(LoopRunner):
            def forward_backward(self, micro_batches):
                every = [replace(m, count=m.targets.numel()) for m in micro_batches]
                return super().forward_backward(every)

        assembly.runner = Runner


class ShiftsMask(DDP):
    """On rank 1 a token of the second block also attends to the token after it."""

    name: ClassVar[str] = "shifts_mask"
    summary: ClassVar[str] = "shifts mask"

    def apply(self, assembly: Assembly) -> None:
        attention = assembly.model.get_submodule("blocks.1.attention")
        plain = attention.forward

        def shifted(x):
            def attend(query, key, value, **_):
                mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril(1)
                return attended(query, key, value, attn_mask=mask)

            attended = nn.functional.scaled_dot_product_attention
            with mock.patch.object(nn.functional, "scaled_dot_product_attention", attend):
                return plain(x)

        if assembly.context.rank == 1:
            attention.forward = shifted
        super().apply(assembly)


class WrongRule(TensorSlices):
    """On one rank every second sliced activation is 1% too large."""

    name: ClassVar[str] = "wrong_rule"
    summary: ClassVar[str] = "wrong rule"

    def apply(self, assembly: Assembly) -> None:
        break_rule(nn.functional.gelu, second_on_rank=assembly.context.rank)


def break_rule(function, *, second_on_rank):
    """Make the second use of a rule, of each pair of uses, wrong on rank 1."""
    plain, calls = sliced_tensor._RULES[function], itertools.count(1)

    def wrong(*args, **kwargs):
        result = plain(*args, **kwargs)
        is_wrong = second_on_rank == 1 and next(calls) % 2 == 0
        return result.like(local_of(result) * 1.01) if is_wrong else result

    sliced_tensor._RULES[function] = wrong


class DropsHooks(DDP):
    """Does not run the hooks on parameter gradients."""

    name: ClassVar[str] = "drops_hooks"
    summary: ClassVar[str] = "drops hooks"

    def apply(self, assembly: Assembly) -> None:
        super().apply(assembly)

        class Runner(LoopRunner):
            def run_gradient_hooks(self):
                pass

        assembly.runner = Runner


class ForgetsDecay(DDP):
    """One group of the optimizer loses its weight decay."""

    name: ClassVar[str] = "forgets_decay"
    summary: ClassVar[str] = "forgets decay"

    def apply(self, assembly: Assembly) -> None:
        super().apply(assembly)

        class Runner(LoopRunner):
            def update(self, loss=None):
                for group in self.optimizer.param_groups:
                    group["weight_decay"] = 0.0
                return super().update(loss)

        assembly.runner = Runner


class SwapsExperts(DDP):
    """On rank 1 the first and the second block exchange their weights."""

    name: ClassVar[str] = "swaps_experts"
    summary: ClassVar[str] = "swaps experts"

    def apply(self, assembly: Assembly) -> None:
        super().apply(assembly)
        if assembly.context.rank == 1:
            first_mlp, second_mlp = (
                assembly.model.get_submodule(f"blocks.{n}.mlp") for n in range(2)
            )
            saved = {name: value.clone() for name, value in first_mlp.state_dict().items()}
            first_mlp.load_state_dict(second_mlp.state_dict())
            second_mlp.load_state_dict(saved)


class NotesUpdates(DDP):
    """Records at the end of each step whether parameters have changed and gradients are cleared."""

    name: ClassVar[str] = "notes_updates"
    summary: ClassVar[str] = "notes updates"
    seen: ClassVar[list[tuple[bool, bool]]] = []

    def apply(self, assembly: Assembly) -> None:
        super().apply(assembly)
        parameters = list(assembly.trained().values())
        before = [p.detach().clone() for p in parameters]

        def note() -> None:
            moved = any(not torch.equal(p, old) for p, old in zip(parameters, before, strict=True))
            cleared = all(p.grad is None or not p.grad.any() for p in parameters)
            self.seen.append((moved, cleared))
            for parameter, old in zip(parameters, before, strict=True):
                old.copy_(parameter.detach())

        assembly.after_update.append(note)


class Surrounds(DDP):
    """Averages around each micro-batch, which a pipeline's order does not allow."""

    name: ClassVar[str] = "surrounds"
    summary: ClassVar[str] = "surrounds"

    def apply(self, assembly: Assembly) -> None:
        assembly.sync = lambda _last: nullcontext()


class Net(nn.Module):
    """A user's model; its hand-written dropout uses a mask whose rows are not samples.

    `verify` can switch off `dropout`, but cannot see `chance`.
    """

    def __init__(self, num_classes: int = 10, chance: float = 0.0, dropout: float = 0.0) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Dropout(0.3))
        self.head = nn.Linear(32, num_classes)
        self.chance, self.dropout = chance, dropout

    def forward(self, images):
        hidden = self.body(images).T
        for share in (self.chance, self.dropout):
            hidden = nn.functional.dropout(hidden, share, self.training)
        return self.head(hidden.T)


class Hooked(Net):
    """A hook doubles the gradient of its head."""

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__(num_classes)
        self.body[3].p = 0.0
        self.head.weight.register_hook(lambda gradient: gradient * 2)


class Greedy(nn.Module):
    """Rank 1 once requests more memory than exists, in its third forward pass."""

    def __init__(self, num_classes: int = 10, wanted: int = 2**50) -> None:
        super().__init__()
        self.body = nn.Linear(64, num_classes)
        self.wanted = wanted
        self.passes = 0

    def forward(self, images):
        import torch

        if images.device.type == "cpu" and not isinstance(images, torch._subclasses.FakeTensor):
            self.passes += 1
            if os.environ.get("RANK") == "1" and self.passes == 3:
                torch.empty(self.wanted)
        return self.body(images.flatten(1))
