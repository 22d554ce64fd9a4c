"""The memory of a model whose passes take different branches: that of the largest branch.

The modules that a pass calls (experts, towers, layers that may be skipped) can depend on values, on
random numbers, or on a counter of the model. Fake tensors have no values, so answers to questions
about values are made up here. Every micro-batch of a run on fake tensors starts from the same
state, so that all of them take the same branch. If a branch does not use all trained parameters,
another branch is tried.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from bigtrain.core.loop import LoopRunner
from bigtrain.core.strategy import Assembly
from bigtrain.memory.tracker import StorageTracker
from bigtrain.prediction.whole_model import WholeModel
from bigtrain.tracing.made_up_answers import Answer, MadeUpAnswers, made_up_chance

BRANCHES: Sequence[tuple[Answer, int]] = (("everything", 0), ("nothing", 0), ("everything", 1))
"""The branches to try, in this order. A pair is the answer to the model's questions, and the number
of passes before the recorded ones."""
_PLAIN = (bool, int, float, str, type(None))
_SEED = 0


class OneBranch(WholeModel):
    """A whole model that takes the same branch in every micro-batch.

    Args:
        answer: the answer to questions about values and random numbers.
        passes: the number of passes before the recorded ones. They advance the model's own counter.
    """

    def __init__(self, answer: Answer, passes: int) -> None:
        self.answer, self.passes = answer, passes
        self.question: str | None = None
        """The first operation of the model that needed a value; None if none did."""
        self.left_out = 0
        """Bytes of the parameters that this branch does not use."""

    def runner(self, assembly: Assembly, tracker: StorageTracker) -> LoopRunner:  # noqa: ARG002
        """Return a loop in which parameters without a gradient get a gradient of zeros.

        Passes that take another branch use these parameters.
        """
        return _FilledLoop(assembly, self)

    def install(self, fake: nn.Module, tracker: StorageTracker) -> AbstractContextManager[object]:
        """Answer the model's questions, and start every pass from the same state.

        See `record.InstallHooks`.
        """
        del tracker
        return self._answering(fake)

    @contextmanager
    def _answering(self, fake: nn.Module) -> Iterator[None]:
        answers = _Shares(self.answer, self._ask)
        beginning = _Beginning(fake, self.passes, answers)
        fake.register_forward_pre_hook(beginning, prepend=True, with_kwargs=True)
        with made_up_chance(self.answer, _SEED):
            beginning.chance = random.getstate()
            with answers:
                yield

    def _ask(self, operation: str) -> None:
        self.question = self.question or operation


class _FilledLoop(LoopRunner):
    """The plain loop, with zeros as gradients of parameters that a pass does not use."""

    def __init__(self, assembly: Assembly, branch: OneBranch) -> None:
        super().__init__(assembly)
        self._branch = branch
        self._missing: list[nn.Parameter] = []

    def backward(self, loss: Tensor) -> None:
        """See `LoopRunner.backward`."""
        super().backward(loss)
        if self._released is not None:  # gradients are freed in the backward pass
            return
        missing = [p for p in self._trained if p.grad is None]
        if missing:
            self._missing = missing
            self._branch.left_out = max(self._branch.left_out, sum(p.nbytes for p in missing))
        for parameter in self._missing:  # in every pass, like the gradients of other parameters
            zeros = torch.zeros_like(parameter)
            parameter.grad = zeros if parameter.grad is None else parameter.grad


@dataclass
class _Beginning:
    """A hook that resets the model's counters and the random state before each pass.

    Each pass starts with the counters that the model has after `passes` passes. The first call of
    the hook runs these passes.
    """

    model: nn.Module
    passes: int
    answers: _Shares
    chance: Any = None
    _before: dict[nn.Module, dict[str, Any]] = field(default_factory=dict)

    def __call__(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        if not self._before:
            with torch.no_grad():
                for _ in range(self.passes):
                    self._restart()
                    model.forward(*args, **kwargs)
            self._before = {module: _plain(module) for module in self.model.modules()}
        for module, before in self._before.items():
            for name in _plain(module).keys() - before.keys():
                delattr(module, name)
            vars(module).update(before)
        self._restart()

    def _restart(self) -> None:
        self.answers.restart()
        if self.chance is not None:
            random.setstate(self.chance)


def _plain(module: nn.Module) -> dict[str, Any]:
    """Return the attributes of a module that are numbers or strings, and so may be counters."""
    return {name: value for name, value in vars(module).items() if type(value) in _PLAIN}


class _Shares(MadeUpAnswers):  # type: ignore[no-untyped-call]
    """Answers that distribute rows over experts, instead of giving all rows to each.

    If the model selects rows by `choices == number`, the first number gets half of the rows, and
    each further number half of the remaining rows, but at least one. So every expert is called, and
    the rows of all experts sum to the batch.
    """

    def __init__(self, answer: Answer, on_question: Any) -> None:
        super().__init__(answer, random.Random(_SEED), on_question)
        self._assigned: dict[int, int] = {}
        """The number of rows assigned so far in this pass, by the storage of the choices."""
        self._masks: dict[int, int] = {}
        """The storage of the choices, by the storage of a mask that compares them."""

    def restart(self) -> None:
        """Begin a pass, in which no row is assigned yet."""
        self._assigned.clear()
        self._masks.clear()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """See `MadeUpAnswers`."""
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if func is torch.ops.aten.eq.Scalar and args[0].dim() == 1:
            self._masks[_storage(result)] = _storage(args[0])
        return result

    def _rows(self, mask: Tensor) -> int:
        choices, rows = self._masks.get(_storage(mask)), super()._rows(mask)
        if choices is None or not rows or mask.dim() != 1:
            return rows
        left = len(mask) - self._assigned.get(choices, 0)
        share = max(1, -(-left // 2))
        self._assigned[choices] = min(len(mask), self._assigned.get(choices, 0) + share)
        return share


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
