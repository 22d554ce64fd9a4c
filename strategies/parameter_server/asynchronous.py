"""Workers that do not wait for each other: each push is applied when it arrives.

A server's version is the number of pushes that it has applied. A worker gets parameters with their
version, and sends the version with its next push. The staleness of a push is the number of other
pushes that were applied in between. A worker that is more than `staleness` steps ahead of the
slowest worker gets its answer when the slowest has caught up (Stale Synchronous Parallel, Ho et al.
2013, section 3). With n workers no push is then more than (n - 1)(2 staleness + 1) versions old.

If a worker dies, the run continues. The worker's pushes stay applied, the other workers do not wait
for it, and its samples of the following batches are skipped.

A server logs the order in which it applied pushes and sent answers. With the log the same run can
be repeated bit for bit.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import Tensor, nn

from bigtrain.core.loop import check_finite
from bigtrain.core.runner import StepLoss
from bigtrain.core.strategy import Assembly
from bigtrain.data.loader import MicroBatch
from bigtrain.errors import ConfigError, LaunchError, UnreadableError
from bigtrain.files.parse import parse_json
from bigtrain.files.regular import MOST_LINES, read_text
from bigtrain.recorder.root_exchange import tolerating_loss_of
from bigtrain.strategies.parameter_server.inbox import (
    ANSWER_NUMBERS,
    PUSH_NUMBERS,
    Heads,
    Inbox,
)
from bigtrain.strategies.parameter_server.server import Server, ServerUpdate
from bigtrain.strategies.parameter_server.worker import PulledUpdate, Worker

LOG = "pushes.jsonl"
"""The name of the log in the run's folder."""


@dataclass(frozen=True)
class Push:
    """A push that a server has applied: one line of the log."""

    server: int
    version: int
    """The server's version before the push: the number of pushes applied earlier."""
    worker: int
    pulled: int
    """The version of the parameters with which the worker computed."""
    staleness: int
    answers: tuple[int, ...]
    """The workers to which parameters are sent right after the push, in this order."""


@dataclass(frozen=True)
class AsyncSettings:
    """The settings of an asynchronous run; see the options of `ParameterServer`."""

    servers: int
    staleness: int
    divide_rate: bool
    replay: str | None


def read_pushes(location: str, workers: int, servers: int) -> list[Push]:
    """Read the log of a run.

    Args:
        location: the path of the log, or of the run's folder.
        workers: the number of workers of the run that repeats the log.
        servers: the number of servers of the run that repeats the log.

    Returns:
        The pushes of all servers, in the order of the log.

    Raises:
        ConfigError: there is no log, it has another number of workers or servers, or its run lost a
            worker or was resumed.
    """
    path = Path(location) / LOG if os.path.isdir(location) else Path(location)
    key = f"strategy.replicate.replay={location}"
    try:
        lines = [parse_json(line, path) for line in read_text(path, most=MOST_LINES).splitlines()]
        pushes = [
            Push(**{**line, "answers": tuple(line["answers"])})
            for line in lines
            if "worker" in line
        ]
        heads = [line for line in lines if "workers" in line]
        known = int(heads[0]["workers"]), int(heads[0]["servers"])
    except (OSError, ValueError, LookupError, TypeError) as error:
        reason = error.reason if isinstance(error, UnreadableError) else error
        raise ConfigError(
            f"{key} is not a log of pushes: {reason}. Give runs/NAME/{LOG} of an asynchronous run, "
            "or leave it out."
        ) from None
    if known != (workers, servers):
        raise ConfigError(
            f"{key} is the log of {known[0]} workers and {known[1]} servers, and this run has "
            f"{workers} workers and {servers} servers. Start {sum(known)} ranks with "
            f"strategy.replicate.servers={known[1]}."
        )
    if any("lost" in line for line in lines):
        raise ConfigError(
            f"{key} is the log of a run that lost a worker, which a replay cannot repeat. Give "
            "the log of a run that lost none, or leave it out."
        )
    if len(heads) > servers:  # each start of a server writes one, and counts versions from 0
        raise ConfigError(
            f"{key} is the log of a run that was resumed, which a replay cannot repeat. Give the "
            "log of a run that was not, or leave it out."
        )
    return pushes


class AsyncPulledUpdate(PulledUpdate):
    """Pushes gradients to every server, then waits for the answer of each server."""

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], assembly: Assembly, servers: int
    ) -> None:
        super().__init__(parameters, assembly, servers)
        self._context = assembly.context
        self._versions = [0.0] * servers
        self.own_loss = 0.0, 0.0
        """The loss of this worker in the step, summed over targets, and the number of targets."""
        self.own_norm = 0.0
        self.mean_loss = 0.0
        """The mean loss over the last pushes, as many pushes as there are workers."""
        self.staleness = 0.0
        """The staleness of this worker's last push, the highest of all servers."""

    def step(self) -> None:
        """See `Update.step`.

        All messages begin before any is waited for, because servers answer independently.
        """
        heads = Heads(self._context)
        for server, version in enumerate(self._versions):
            heads.send([version, *self.own_loss, self.own_norm], server)
        answers = [heads.receive(ANSWER_NUMBERS, server) for server in range(len(self._versions))]
        gradients = {
            name: torch.zeros_like(p) if p.grad is None else p.grad
            for name, p in self.parameters.items()
        }
        self.begin_push(gradients)
        self.begin_pull()
        heads.finish()
        self.messages.finish()
        self._versions = [float(answer[0]) for answer in answers]
        self.staleness = max(float(answer[1]) for answer in answers)
        self.mean_loss = float(answers[0][2])

    def leave(self) -> None:
        """Send each server a header by which it knows that this worker will push no more."""
        heads = Heads(self._context)
        with suppress(RuntimeError):  # a server may have ended
            for server in range(len(self._versions)):
                heads.send([math.nan] * PUSH_NUMBERS, server)
            heads.finish()


class AsyncWorker(Worker):
    """A worker without exchanges with other workers, which clips by the norm of its gradient."""

    def __init__(self, assembly: Assembly, pulled: AsyncPulledUpdate) -> None:
        super().__init__(assembly, pulled)
        self._exchange = pulled

    @property
    def figures(self) -> dict[str, float]:
        """Additional metrics of a step: the staleness of this worker's last push."""
        return {"staleness": self._exchange.staleness}

    def forward_backward(self, micro_batches: Sequence[MicroBatch]) -> StepLoss:
        """See `Runner.forward_backward`.

        The loss is the mean over the last pushes of all workers, which is known after `update`.
        """
        count = float(sum(m.count for m in micro_batches))
        for micro_batch in micro_batches:
            self.label_batch(micro_batch)
        losses = [self.run_micro_batch(m, 1 / max(count, 1.0)) for m in micro_batches]
        own_sum = torch.stack(losses).double().sum()
        if self._checks_finite:
            check_finite({self.context.rank: float(own_sum)})
        self._exchange.own_loss = float(own_sum), count
        return StepLoss(own_sum, lambda _own: self._exchange.mean_loss)

    def norm(self) -> Tensor:
        """Return the norm of this worker's gradient."""
        norm = self.own_norm()
        self._exchange.own_norm = float(norm)
        return norm

    def close(self) -> None:
        """See `Runner.close`."""
        self._exchange.leave()
        self.context.require_all()
        super().close()


class AsyncServer(Server):
    """Applies pushes one by one; one step of a server is one push of each worker on average.

    Args:
        assembly: see `Server`.
        update: see `Server`.
        settings: the settings of the technique.
    """

    def __init__(self, assembly: Assembly, update: ServerUpdate, settings: AsyncSettings) -> None:
        super().__init__(assembly, update)
        self._settings = settings
        workers = update.messages.num_workers
        self._number = self.context.dp_rank
        self._clocks = dict.fromkeys(range(workers), 0)
        """The number of pushes of each worker that is not lost."""
        self._steps = 0
        self._waiting: list[int] = []
        self._version = 0
        self._heads: list[tuple[float, ...]] = []
        """(summed loss, targets, norm, staleness) of the last pushes, one for each worker left."""
        self._staleness = [0] * workers
        recorded: Iterator[Push] = iter(())
        if settings.replay is not None:
            pushes = read_pushes(settings.replay, workers, settings.servers)
            recorded = iter([push for push in pushes if push.server == self._number])
        self._recorded = recorded
        self._log: TextIO | None = None
        self._inbox = Inbox(self.context, settings.servers)

    @property
    def figures(self) -> dict[str, float]:
        """Additional metrics of a step: the mean staleness of the last pushes."""
        return {"staleness": self._last(3) / max(1, len(self._heads))}

    def forward_backward(self, micro_batches: Sequence[MicroBatch]) -> StepLoss:
        """Serve pushes until each worker has pushed once for each step so far, on average.

        So no push is left when all workers have done their last step.

        Raises:
            LaunchError: all workers were lost, or the connection to a live worker broke.
        """
        del micro_batches  # a server's batch is padding
        self._steps += 1
        while sum(self._clocks.values()) < self._steps * len(self._clocks):
            self._serve()
        if not self._clocks:
            raise LaunchError(
                "every worker was lost, and servers compute nothing. Start again with --resume auto"
            )
        self.meter.phase("step")
        return StepLoss(None, lambda _own: self._mean())

    def update(self, loss: StepLoss | None = None) -> float:
        """See `Runner.update`. Every push is applied already.

        Returns:
            The mean gradient norm of the last pushes, one from each worker.
        """
        del loss
        return self._last(2) / max(1, len(self._heads))

    def _serve(self) -> None:
        """Receive and apply the next push, then answer the workers that may continue."""
        recorded = next(self._recorded, None)
        self.meter.phase("backward")
        slowest = min(self._clocks, key=self._clocks.__getitem__)
        worker, head = self._inbox.next(None if recorded is None else recorded.worker, slowest)
        if head is None and not self.context.lost_ranks.confirm(self._rank(worker)):
            raise LaunchError(
                f"the connection to worker {worker} (rank {self._rank(worker)}) broke"
            )
        if head is None or not self._exchanged(worker, self._server.receive_push):
            self._lose(worker)
            return
        pulled, *figures = head
        self.label_gradients()
        self.meter.phase("step")
        staleness = self._version - int(pulled)
        self._apply(staleness)
        self._heads = [*self._heads, (*figures, float(staleness))][-len(self._clocks) :]
        self._clocks[worker] += 1
        self._staleness[worker] = staleness
        self._waiting.append(worker)
        answers = self._ready() if recorded is None else recorded.answers
        push = Push(self._number, self._version, worker, int(pulled), staleness, tuple(answers))
        self._version += 1
        self._write(asdict(push))
        self._answer(answers)

    def _answer(self, workers: Sequence[int]) -> None:
        """Send the parameters to those of the workers that wait for an answer."""
        for worker in workers:
            if worker in self._waiting:
                self._waiting.remove(worker)
                if not self._exchanged(worker, self._send_parameters):
                    self._lose(worker)

    def _send_parameters(self, worker: int) -> None:
        numbers = [self._version, self._staleness[worker], self._mean()]
        heads = Heads(self.context)
        heads.send(numbers, self._rank(worker))
        self._server.send_to(worker)
        heads.finish()

    def _exchanged(self, worker: int, exchange: Callable[[int], None]) -> bool:
        """Run an exchange with a worker; return False if the worker was lost meanwhile."""
        messages, done = self._server.messages, False
        with tolerating_loss_of(self._rank(worker), self.context.recorder):
            exchange(worker)
            messages.finish()
            done = True
        messages.forget()
        return done

    def _lose(self, worker: int) -> None:
        """Continue without a worker: drop its incomplete push, and do not wait for it.

        A log that is being repeated is not followed after that.
        """
        for shard in self._trained:
            shard.grad = None
        if self._clocks.pop(worker, None) is None:
            return
        if worker in self._waiting:
            self._waiting.remove(worker)
        self._recorded = iter(())
        self._write({"server": self._number, "version": self._version, "lost": worker})
        self._answer(self._ready())

    def _rank(self, worker: int) -> int:
        return self._settings.servers + worker

    def _apply(self, staleness: int) -> None:
        """Step the optimizer; with `divide_rate` at a lower rate for a stale gradient."""
        groups = self.optimizer.param_groups
        rates = [group["lr"] for group in groups]
        if self._settings.divide_rate:
            for group in groups:
                group["lr"] = group["lr"] / max(1, staleness)
        self._server.optimizer.step()
        if self.meter.tracking:
            self.meter.label(self._server.resident_tensors(), "optimizer")
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate
        for shard in self._trained:
            shard.grad = None

    def _ready(self) -> tuple[int, ...]:
        """Return the waiting workers that are at most `staleness` steps ahead of the slowest."""
        last = min(self._clocks.values(), default=0) + self._settings.staleness
        return tuple(worker for worker in self._waiting if self._clocks[worker] <= last)

    def _mean(self) -> float:
        """Return the mean loss of the last pushes."""
        return self._last(0) / max(1.0, self._last(1))

    def _last(self, figure: int) -> float:
        return sum(head[figure] for head in self._heads)

    def _write(self, line: Mapping[str, Any]) -> None:
        folder = self.context.recorder.folder
        if folder is None:
            return
        if self._log is None:
            self._log = (folder / LOG).open("a", encoding="utf-8", buffering=1)
            head = {"server": self._number, "workers": len(self._staleness)}
            self._log.write(json.dumps({**head, "servers": self._settings.servers}) + "\n")
        self._log.write(json.dumps(line) + "\n")

    def close(self) -> None:
        """See `Runner.close`."""
        self._inbox.close()
        self.context.require_all()
        if self._log is not None:
            self._log.close()
        super().close()
