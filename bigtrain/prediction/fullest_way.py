"""The memory of a model that goes other ways in other passes: of the fullest of them.

Experts, towers, layers left out: which modules a pass calls may follow from values, from chance, or
from a count of the model's own. Without numbers there is no answer to the first, so one is made up
here, and every micro-batch of a run on fake tensors begins as the first one did: all go the same
way. Several ways are tried where one does not come by all that is trained.
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

WAYS: Sequence[tuple[Answer, int]] = (("everything", 0), ("nothing", 0), ("everything", 1))
"""What is answered, and how many passes the model has been through before."""
_PLAIN = (bool, int, float, str, type(None))
_SEED = 0


class OneWay(WholeModel):
    """A whole model that takes the same way in every micro-batch.

    Args:
        answer: to what it asks of values and of chance.
        passes: that it has been through before, by its own count.
    """

    def __init__(self, answer: Answer, passes: int) -> None:
        self.answer, self.passes = answer, passes
        self.question: str | None = None
        """The first operation that asked for values."""
        self.left_out = 0
        """Bytes of the parameters that this way does not come by."""

    def runner(self, assembly: Assembly, tracker: StorageTracker) -> LoopRunner:  # noqa: ARG002
        """The loop. What gets no gradient is given zeros: other passes come by it."""
        return _FilledLoop(assembly, self)

    def install(self, fake: nn.Module, tracker: StorageTracker) -> AbstractContextManager[object]:
        """Answer, and begin every pass anew; see `record.InstallHooks`."""
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
    """The plain loop, with zeros for the gradients of what a pass does not come by."""

    def __init__(self, assembly: Assembly, way: OneWay) -> None:
        super().__init__(assembly)
        self._way = way
        self._missing: list[nn.Parameter] = []

    def backward(self, loss: Tensor) -> None:
        """See `LoopRunner.backward`."""
        super().backward(loss)
        if self._released is not None:  # none of them stays
            return
        missing = [p for p in self._trained if p.grad is None]
        if missing:
            self._missing = missing
            self._way.left_out = max(self._way.left_out, sum(p.nbytes for p in missing))
        for parameter in self._missing:  # made in every pass, as all other gradients are
            zeros = torch.zeros_like(parameter)
            parameter.grad = zeros if parameter.grad is None else parameter.grad


@dataclass
class _Beginning:
    """Called before each pass: the model, and what is drawn, are as before the first one."""

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
            self._before = {one: _plain(one) for one in self.model.modules()}
        for one, before in self._before.items():
            for name in _plain(one).keys() - before.keys():
                delattr(one, name)
            vars(one).update(before)
        self._restart()

    def _restart(self) -> None:
        self.answers.restart()
        if self.chance is not None:
            random.setstate(self.chance)


def _plain(module: nn.Module) -> dict[str, Any]:
    """Numbers and words that a module keeps: counts, most of all."""
    return {name: value for name, value in vars(module).items() if type(value) in _PLAIN}


class _Shares(MadeUpAnswers):  # type: ignore[no-untyped-call]
    """Answers such that rows which are told apart by a number are dealt out, not given to each.

    Of the rows of which `choices == number` is asked, the first number gets half, the next half of
    what is left, and each at least one: every expert is called, and all together have as many as
    there are.
    """

    def __init__(self, answer: Answer, on_question: Any) -> None:
        super().__init__(answer, random.Random(_SEED), on_question)
        self._dealt: dict[int, int] = {}
        self._masks: dict[int, int] = {}

    def restart(self) -> None:
        """A pass begins."""
        self._dealt.clear()
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
        left = len(mask) - self._dealt.get(choices, 0)
        share = max(1, -(-left // 2))
        self._dealt[choices] = min(len(mask), self._dealt.get(choices, 0) + share)
        return share


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
