"""Checks that all ranks use the same parameters in a step, and only planned parameters.

A collective on one rank matches the next collective on the other ranks, even if that one exchanges
values of another module. So each rank hashes the order in which it exchanges modules, and watches
the parameters that were left out of training. The ranks exchange the results together with the
losses, before the update.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from bigtrain.errors import ConfigError
from bigtrain.ranks.context import RunContext

_EXACT_BITS = 52
"""Bits of a hash. A float64, in which hashes are exchanged, represents such integers exactly."""


class GatheredUnits:
    """Records the order in which units (modules or single gradients) are exchanged in a step."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self._order: list[int] = []

    def add(self, name: str) -> int:
        """Register a unit, and return its number."""
        self.names.append(name)
        return len(self.names) - 1

    def note(self, number: int) -> None:
        """Record that a unit is about to be exchanged."""
        self._order.append(number)

    def watch(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Record when the gradients of these parameters, exchanged one by one, are computed."""
        for name, parameter in parameters.items():
            _when_accumulated(parameter, partial(_note, self, self.add(name)))

    def clear(self) -> None:
        """Forget the records of the last step."""
        self._order.clear()

    def word(self) -> int:
        """A hash of the order of units in this step so far."""
        # The hash of a tuple of ints is the same in all processes.
        return hash(tuple(self._order)) % (1 << _EXACT_BITS)

    def counts(self) -> dict[str, int]:
        """The number of exchanges of each unit in this step so far, by name."""
        return {name: self._order.count(number) for number, name in enumerate(self.names)}


class GradientUse:
    """Records which parameters get a gradient in a step, if the tensors themselves do not show it.

    A parameter without a gradient in this step may have zeros: because its gradient stays allocated
    between steps, or because another rank has a gradient for it.
    """

    def __init__(self) -> None:
        self._used: set[int] = set()
        self._watches = False
        self.stand_ins = False
        """Whether this rank may have a gradient of zeros for a parameter that it did not use."""
        self.surprise: Tensor | None = None
        """A parameter that was left out of training but got a gradient in this step, or None."""

    def watch(self, parameters: Iterable[nn.Parameter]) -> None:
        """Record in each step which of these parameters get a gradient."""
        for parameter in parameters:
            _when_accumulated(parameter, self.note)
        self._watches = True

    def note(self, parameter: Tensor) -> None:
        """Record that a parameter got a gradient."""
        self._used.add(id(parameter))

    def has(self, parameter: Tensor) -> bool:
        """Whether a parameter got a gradient in this step so far, on this rank."""
        return id(parameter) in self._used

    def clear(self) -> None:
        """Forget the records of the last step."""
        self._used.clear()
        self.stand_ins = self._watches
        self.surprise = None


def _note(units: GatheredUnits, number: int, _parameter: Tensor) -> None:
    units.note(number)


def _when_accumulated(parameter: nn.Parameter, call: Callable[[Tensor], None]) -> None:
    parameter.register_post_accumulate_grad_hook(call)  # type: ignore[no-untyped-call]


class Participation:
    """Compares the parameters used in a step with the plan, and with the other ranks.

    Args:
        context: the ranks.
        roots: the modules with the parameters, under the model's names.
        unreached: names of the parameters that are not trained, because the loss does not depend on
            them.
        strategy: the name of the strategy, for messages.
        units: records gathered modules; None if none are gathered.
        use: records which parameters get a gradient; None if `Tensor.grad` shows it.
        follows_freezing: whether a parameter may be frozen during training.
    """

    def __init__(
        self,
        context: RunContext,
        roots: Sequence[nn.Module],
        unreached: Iterable[str],
        strategy: str,
        *,
        units: GatheredUnits | None = None,
        use: GradientUse | None = None,
        follows_freezing: bool = False,
    ) -> None:
        named = {n: p for root in roots for n, p in root.named_parameters()}
        self._context, self._strategy = context, strategy
        self._units, self._use, self._follows_freezing = units, use, follows_freezing
        self._step = 0
        self._planned = [(name, p, p.requires_grad) for name, p in named.items()]
        left_out = frozenset(unreached)
        self._left_out = [(n, p) for n, p in named.items() if n in left_out]
        self._problem: str | None = None
        self.stand_ins = False
        """Whether some rank may have gradients of zeros in this step, for unused parameters."""

    @property
    def has_a_say(self) -> bool:
        """Whether the ranks have to compare their steps. The value is the same on all ranks."""
        return bool(self._units or self._use or self._left_out)

    def begin(self) -> None:
        """Begin a step: forget the records of the last step, and check which parameters are frozen.

        Raises:
            ConfigError: after the model was prepared, a parameter was unfrozen, or was frozen
                although `follows_freezing` is not set.
        """
        self._step += 1
        self._problem = None
        self.stand_ins = False
        if self._units is not None:
            self._units.clear()
        if self._use is not None:
            self._use.clear()
        for _, parameter in self._left_out:
            parameter.requires_grad_(False)  # in case the last step failed
        for name, parameter, planned in self._planned:
            if parameter.requires_grad is not planned:
                self._changed(name, planned=planned)
        for _, parameter in self._left_out:
            parameter.requires_grad_(True)  # to see whether a gradient comes

    def _changed(self, name: str, *, planned: bool) -> None:
        if planned and self._follows_freezing:
            return
        was, now = ("trained", "frozen") if planned else ("frozen", "trained")
        raise ConfigError(
            f"{name} was {was} when the model was put under strategy {self._strategy}, and is "
            f"{now} (requires_grad={not planned}) before step {self._step} of this engine, which "
            "cannot change that while it runs. Save with engine.save, close the engine, and "
            f"prepare the model anew with {name}.requires_grad={not planned}; engine.load goes on "
            "from there."
        )

    def end(self) -> None:
        """Check after all passes of a step that no left-out parameter got a gradient.

        A problem is raised at the next `check`, on all ranks.
        """
        surprise = None if self._use is None else self._use.surprise
        for name, parameter in self._left_out:
            has_come = parameter.grad is not None or parameter is surprise
            if has_come and self._problem is None:
                self._problem = used_after_all(name)
            parameter.grad = None
            parameter.requires_grad_(False)

    def refuse(self, problem: str) -> None:
        """Report a problem of this rank in this step; all ranks raise it at the next `check`."""
        self._problem = self._problem or problem

    def row(self) -> list[float]:
        """The numbers of this rank for `check`.

        They are the hash of the exchanged units, whether this rank has a problem, and whether it
        may have gradients of zeros for unused parameters.
        """
        word = 0 if self._units is None else self._units.word()
        stand_ins = self._use is not None and self._use.stand_ins
        return [float(word), float(self._problem is not None), float(stand_ins)]

    def check(self, rows: Sequence[Sequence[float]], *, of_all: bool = False) -> None:
        """Compare the rows of ranks. Collective over these ranks if there is a problem.

        Args:
            rows: the results of `row`, in the order of ranks: by default those of this rank's dp
                group.
            of_all: whether the rows are those of all ranks.

        Raises:
            ConfigError: the orders of exchanges differ, or a rank reported a problem. All
                compared ranks raise it.
        """
        if any(row[1] for row in rows):
            problems = self._gathered(self._problem, of_all=of_all)
            raise ConfigError(next(problem for problem in problems if problem))
        # Ranks of the same stage and slice are compared; the dp axis varies slowest.
        replicas = max(1, self._context.dp_size)
        lanes = len(rows) // replicas if of_all else 1
        if any(row[0] != rows[index % lanes][0] for index, row in enumerate(rows)):
            self._refuse_routes(of_all=of_all)
        self.stand_ins = any(row[2] for row in rows)

    def agree(self) -> None:
        """Gather and compare the rows of the dp group; see `check`."""
        self.check(self._context.all_gather_rows(self.row(), "dp"))

    def _refuse_routes(self, *, of_all: bool) -> NoReturn:
        own_counts = {} if self._units is None else self._units.counts()
        counts: dict[int, dict[str, int]] = dict(
            self._gathered((self._context.rank, own_counts), of_all=of_all)
        )
        calls: dict[str, dict[int, int]] = {}  # a stage's units are on its ranks alone
        for rank, rank_counts in counts.items():
            for name, number in rank_counts.items():
                calls.setdefault(name, {})[rank] = number
        names = [n for n, by_rank in calls.items() if len(set(by_rank.values())) > 1] or [*calls]
        ranks = ", ".join(f"rank {rank} {number}" for rank, number in calls[names[0]].items())
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        raise ConfigError(
            f"step {self._step}: the ranks did not use the same modules in the same order "
            f"({names[0]}{more}; uses of {names[0]}: {ranks}). Strategy {self._strategy} "
            "exchanges each of them over all ranks, so numbers of one module may have been "
            "exchanged as those of another; nothing was updated. Give prepare(..., "
            "example=(inputs, targets)), from which fsdp finds such modules and keeps them "
            "together, or use --strategy ddp with strategy.replicate.find_unused_parameters=true."
        )

    def _gathered(self, value: Any, *, of_all: bool) -> list[Any]:
        """Return the objects of all ranks that are compared. Collective."""
        if of_all or self._context.dp_size == self._context.world_size:
            return self._context.all_gather_objects(value)
        if self._context.dp_size == 1:
            return [value]
        everyone: list[Any] = [None] * self._context.dp_size
        torch.distributed.all_gather_object(everyone, value, group=self._context.group("dp"))
        return everyone


def used_after_all(name: str) -> str:
    """Return the message for a parameter that was left out of training and is used in a step."""
    return (
        f"{name} is used in this step, and was left out of training: no pass over the first "
        "micro-batch used it. Use --strategy ddp with "
        "strategy.replicate.find_unused_parameters=true, or first samples (example=...) with "
        "which every layer is used."
    )
