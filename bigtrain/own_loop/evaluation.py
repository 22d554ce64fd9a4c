"""Figures of a validation in a loop of one's own, over the rows of all ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from bigtrain.data.batch_dims import count_rows
from bigtrain.data.loader import MicroBatch
from bigtrain.errors import ConfigError
from bigtrain.losses.global_mean import GlobalMeanLoss
from bigtrain.losses.loss import Loss
from bigtrain.losses.tasks import CustomTask, Task
from bigtrain.ranks.context import RunContext

Metric = Callable[[Any, Any], Any]
"""(outputs, targets) -> the mean over the rows of a batch; or (sum, count) of anything."""
Metrics = Mapping[str, Metric]
_METRIC = "metric."


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Evaluation mode, and afterwards each module's own mode again."""
    modes = [(one, one.training) for one in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for one, training in modes:
            one.training = training


def check_metrics(metrics: Any, figures: Iterable[str]) -> Metrics:
    """The metrics as they are given, or none.

    Args:
        metrics: of the user.
        figures: names that the task's own have.

    Raises:
        ConfigError: it is no mapping of names to functions, or a name is taken.
    """
    if metrics is None:
        return {}
    taken = set(figures)
    if not isinstance(metrics, Mapping) or not all(callable(one) for one in metrics.values()):
        raise ConfigError(
            "metrics: give functions of (outputs, targets) by their names, as metrics="
            '{"accuracy": lambda outputs, targets: (outputs.argmax(-1) == targets).float().mean()}.'
        )
    for name in metrics:
        if name in taken:
            raise ConfigError(
                f"metrics: {name!r} is a figure of the loss or the task already. Use another name, "
                f"such as my_{name}."
            )
    return metrics


class EvaluationSums:
    """Sums over the batches of one rank: of the task, and of metrics with what they go by."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._sums: dict[str, Tensor] = {}

    def add(self, task: Task, loss: Loss, batch: MicroBatch, prediction: tuple[Any, Any]) -> None:
        """Take a batch in, with the outputs and targets of it.

        Raises:
            ConfigError: a metric returns something else than a number or (sum, count).
        """
        weight = 1.0
        if isinstance(task, CustomTask) and isinstance(loss, GlobalMeanLoss):
            weight = loss.weight_of(batch)
        with torch.no_grad():
            found = {key: one * weight for key, one in task.measure(*prediction).items()}
            for name, metric in self._metrics.items():
                total, count = _parts(name, metric(*prediction), batch.rows)
                found |= {f"{_METRIC}{name}.sum": total, f"{_METRIC}{name}.count": count}
        for key, value in found.items():
            self._sums[key] = self._sums[key] + value if key in self._sums else value

    def figures(self, task: Task, context: RunContext) -> dict[str, float]:
        """The figures of all ranks' batches; nan of a metric for which nothing was. Collective."""
        gathered = context.gather_objects({key: one.cpu() for key, one in self._sums.items()})
        total: dict[str, Tensor] = {}
        for part in context.broadcast_object(gathered) or []:
            for key, value in (part or {}).items():  # of a lost one there are none
                total[key] = total[key] + value if key in total else value
        own = {key: total.pop(key) for key in [*total] if key.startswith(_METRIC)}
        found = task.summarize(total) if total else {}
        for name in self._metrics:
            part, whole = (float(own.get(f"{_METRIC}{name}.{k}", 0.0)) for k in ("sum", "count"))
            found[name] = part / whole if whole else math.nan
        return found


def _parts(name: str, found: Any, rows: int) -> tuple[Tensor, Tensor]:
    """What a metric returned as a sum and a count."""
    total, count = found if isinstance(found, tuple) and len(found) == 2 else (found, rows)
    numbers = _number(total), _number(count)
    if numbers[0] is None or numbers[1] is None:
        shown = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
        raise ConfigError(
            f"metrics[{name!r}] returned {shown}, and one number is needed: the mean over the rows "
            "of the batch, as .float().mean(); or (sum, count)."
        )
    whole = numbers[1].to(numbers[0].device)
    return (numbers[0] if isinstance(found, tuple) else numbers[0] * whole), whole


def _number(value: Any) -> Tensor | None:
    if isinstance(value, Tensor):
        return value.detach().double().reshape(()) if value.numel() == 1 else None
    try:
        return torch.tensor(float(value), dtype=torch.float64)
    except (TypeError, ValueError):
        return None


def in_step(
    batches: Iterable[Any], context: RunContext, *, computes: bool = True
) -> Iterator[MicroBatch]:
    """A rank's batches, as many on every rank: who has no more repeats one as padding.

    Collective at each batch, so that no rank waits for a pass that another does not do.

    Args:
        batches: (inputs, targets) of this rank's rows; or micro-batches, as many as all others
            have, which are handed on as they are.
        context: ranks that hold parts of one model give the same batches.
        computes: False for a server, whose batches are not looked at.

    Raises:
        ConfigError: on all ranks: ranks of one replica give other rows than each other; something
            is no (inputs, targets).
    """
    own = iter(batches)
    first = next(own, None)
    if isinstance(first, MicroBatch):
        yield from chain([first], own)
        return
    own = chain([] if first is None else [first], own) if computes else iter(())
    shown: MicroBatch | None = None
    while True:
        problem, batch = "", None
        try:
            given = next(own, None)
            batch = None if given is None else _batch(given)
        except ConfigError as error:
            problem = str(error)
        told = (-1.0 if problem else 0.0) if batch is None else float(max(1, batch.rows))
        places = (float(context.dp_rank), float(computes))
        rows = context.all_gather_rows([told, *places])
        if any(row[0] < 0 for row in rows):
            raise ConfigError(problem or "evaluate: another rank refuses its batch; see its error.")
        _check_alike(rows)
        if not any(row[0] for row in rows):
            return
        shown = batch or shown
        lacks = [row[2] and not row[0] for row in rows]
        if any(lacks) and context.all_gather_numbers(float(shown is None)).count(1.0):
            shown = _borrowed(shown, context)
        if batch is None and shown is not None:
            batch = replace(shown, count=0, rows=0)
        if batch is not None:
            yield batch


def _check_alike(rows: list[list[float]]) -> None:
    of_replica: dict[float, set[float]] = {}
    for told, place, _ in rows:
        of_replica.setdefault(place, set()).add(told)
    for place, found in of_replica.items():
        if len(found) > 1:
            counts = " and ".join(f"{int(one)}" for one in sorted(found))
            raise ConfigError(
                f"evaluate: the ranks of replica {int(place)} hold parts of one model, and give "
                f"batches of {counts} rows. Give each of them the same rows: those of "
                "engine.context.dp_rank of engine.context.dp_size."
            )


def _borrowed(shown: MicroBatch | None, context: RunContext) -> MicroBatch | None:
    """A batch of another rank for one that never had any. Collective."""
    everyone = context.all_gather_objects(shown and shown.to("cpu"))
    return shown or next((one for one in everyone if one is not None), None)


def _batch(given: Any) -> MicroBatch:
    inputs, targets = as_pair(given, "evaluate")
    return MicroBatch(inputs, targets, 0, count_rows(inputs, targets))


def as_pair(given: Any, where: str) -> tuple[Any, Any]:
    """A batch of a loop as inputs and targets.

    Raises:
        ConfigError: it is something else.
    """
    if isinstance(given, (tuple, list)) and len(given) == 2:
        return given[0], given[1]
    shown = f"a {type(given).__name__}"
    if isinstance(given, (tuple, list)):
        shown += f" of {len(given)} things"
    if isinstance(given, Mapping):
        shown += f" with {', '.join(map(repr, list(given)[:4]))}"
    raise ConfigError(
        f"{where}: got {shown}, and (inputs, targets) is needed. Take it apart, as "
        f'engine.{where}(...) of (batch["inputs"], batch["targets"]); inputs may be a dict.'
    )
