"""The loss and metrics of a validation in a custom loop, over the rows of all ranks."""

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
"""(outputs, targets) -> the mean over the rows of a batch, or (sum, count) of any quantity."""
Metrics = Mapping[str, Metric]
_METRIC = "metric."


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Set evaluation mode in a `with` block, and restore the mode of each module at its end."""
    modes = [(submodule, submodule.training) for submodule in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for submodule, training in modes:
            submodule.training = training


def check_metrics(metrics: Any, figures: Iterable[str]) -> Metrics:
    """Check the user's metrics and return them; None becomes an empty mapping.

    Args:
        metrics: the argument `metrics` of the user.
        figures: the names of the figures of the task, which are taken.

    Raises:
        ConfigError: `metrics` is no mapping of names to functions, or a name is taken.
    """
    if metrics is None:
        return {}
    taken = set(figures)
    if not isinstance(metrics, Mapping) or not all(callable(metric) for metric in metrics.values()):
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
    """Sums over the batches of one rank: those of the task, and a sum and count of each metric.

    Args:
        metrics: the metrics to compute.
    """

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._sums: dict[str, Tensor] = {}

    def add(self, task: Task, loss: Loss, batch: MicroBatch, prediction: tuple[Any, Any]) -> None:
        """Add a batch to the sums.

        Args:
            task: the task, whose figures are computed.
            loss: the loss of the run.
            batch: the batch.
            prediction: the (outputs, targets) of the batch.

        Raises:
            ConfigError: a metric returns neither a number nor (sum, count).
        """
        weight = 1.0
        if isinstance(task, CustomTask) and isinstance(loss, GlobalMeanLoss):
            weight = loss.weight_of(batch)
        with torch.no_grad():
            added = {key: value * weight for key, value in task.measure(*prediction).items()}
            for name, metric in self._metrics.items():
                total, count = _parts(name, metric(*prediction), batch.rows)
                added |= {f"{_METRIC}{name}.sum": total, f"{_METRIC}{name}.count": count}
        for key, value in added.items():
            self._sums[key] = self._sums[key] + value if key in self._sums else value

    def figures(self, task: Task, context: RunContext) -> dict[str, float]:
        """Return the figures over all ranks, by name. Collective.

        A metric whose count is zero is nan.
        """
        gathered = context.gather_objects({key: value.cpu() for key, value in self._sums.items()})
        total: dict[str, Tensor] = {}
        for part in context.broadcast_object(gathered) or []:
            for key, value in (part or {}).items():  # the part of a lost rank is None
                total[key] = total[key] + value if key in total else value
        of_metrics = {key: total.pop(key) for key in [*total] if key.startswith(_METRIC)}
        figures = task.summarize(total) if total else {}
        for name in self._metrics:
            metric_sum = float(of_metrics.get(f"{_METRIC}{name}.sum", 0.0))
            count = float(of_metrics.get(f"{_METRIC}{name}.count", 0.0))
            figures[name] = metric_sum / count if count else math.nan
        return figures


def _parts(name: str, result: Any, rows: int) -> tuple[Tensor, Tensor]:
    """Return the result of a metric as a sum and a count.

    Raises:
        ConfigError: the result is neither a number nor (sum, count).
    """
    total, count = result if isinstance(result, tuple) and len(result) == 2 else (result, rows)
    numbers = _number(total), _number(count)
    if numbers[0] is None or numbers[1] is None:
        shown = tuple(result.shape) if isinstance(result, Tensor) else type(result).__name__
        raise ConfigError(
            f"metrics[{name!r}] returned {shown}, and one number is needed: the mean over the rows "
            "of the batch, as .float().mean(); or (sum, count)."
        )
    denominator = numbers[1].to(numbers[0].device)
    numerator = numbers[0] if isinstance(result, tuple) else numbers[0] * denominator
    return numerator, denominator


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
    """Yield the batches of this rank, and padding until every rank has the same number.

    Padding is a copy of an earlier batch with no rows that count. Collective at each batch, so that
    no rank waits for a pass that another rank does not run.

    Args:
        batches: (inputs, targets) of this rank's rows; ranks with parts of one model pass the same
            rows. Or micro-batches, of which all ranks have the same number; they are yielded
            unchanged.
        context: this rank's context.
        computes: False for a parameter server, whose batches are ignored.

    Raises:
        ConfigError: ranks of one replica pass different numbers of rows, or a batch is not
            (inputs, targets). It is raised on all ranks.
    """
    own_batches = iter(batches)
    first = next(own_batches, None)
    if isinstance(first, MicroBatch):
        yield from chain([first], own_batches)
        return
    own_batches = chain([] if first is None else [first], own_batches) if computes else iter(())
    shown: MicroBatch | None = None
    while True:
        problem, batch = "", None
        try:
            loop_batch = next(own_batches, None)
            batch = None if loop_batch is None else _batch(loop_batch)
        except ConfigError as error:
            problem = str(error)
        # The rows of the batch; 0 if there are no more batches, -1 if the batch is refused.
        state = (-1.0 if problem else 0.0) if batch is None else float(max(1, batch.rows))
        rows = context.all_gather_rows([state, float(context.dp_rank), float(computes)])
        if any(row[0] < 0 for row in rows):
            raise ConfigError(problem or "evaluate: another rank refuses its batch; see its error.")
        _check_same_rows(rows)
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


def _check_same_rows(rows: list[list[float]]) -> None:
    of_replica: dict[float, set[float]] = {}
    for state, replica, _ in rows:
        of_replica.setdefault(replica, set()).add(state)
    for replica, states in of_replica.items():
        if len(states) > 1:
            counts = " and ".join(f"{int(state)}" for state in sorted(states))
            raise ConfigError(
                f"evaluate: the ranks of replica {int(replica)} hold parts of one model, and give "
                f"batches of {counts} rows. Give each of them the same rows: those of "
                "engine.context.dp_rank of engine.context.dp_size."
            )


def _borrowed(shown: MicroBatch | None, context: RunContext) -> MicroBatch | None:
    """Return a batch to pad with; that of another rank if this rank never had one. Collective."""
    batches = context.all_gather_objects(shown and shown.to("cpu"))
    return shown or next((batch for batch in batches if batch is not None), None)


def _batch(loop_batch: Any) -> MicroBatch:
    inputs, targets = as_pair(loop_batch, "evaluate")
    return MicroBatch(inputs, targets, 0, count_rows(inputs, targets))


def as_pair(batch: Any, where: str) -> tuple[Any, Any]:
    """Return a batch of a loop as (inputs, targets).

    Args:
        batch: the batch that the user passed.
        where: the name of the engine's method, for the message.

    Raises:
        ConfigError: the batch is no pair.
    """
    if isinstance(batch, (tuple, list)) and len(batch) == 2:
        return batch[0], batch[1]
    shown = f"a {type(batch).__name__}"
    if isinstance(batch, (tuple, list)):
        shown += f" of {len(batch)} elements"
    if isinstance(batch, Mapping):
        shown += f" with {', '.join(map(repr, list(batch)[:4]))}"
    raise ConfigError(
        f"{where}: got {shown}, and (inputs, targets) is needed. Give engine.{where} pairs such as "
        '(batch["inputs"], batch["targets"]); inputs may be a dict.'
    )
