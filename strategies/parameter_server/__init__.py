"""Servers hold the parameters and the optimizer's state; workers compute, push and pull.

The first `servers` ranks of the job are servers, the others workers. Workers push gradients. Each
server sums the gradients of its share in the order of the workers, clips them by the global norm
and updates its share. Then the workers pull the parameters. The results are those of one process.

Memory: a worker has parameters, gradients and activations, and no optimizer state. A server has its
share of the parameters, gradients and optimizer state, and 4 MiB for every worker but the first
while it receives gradients.
Communication: every worker sends all gradients and receives all parameters once a step. A server
receives and sends its share once for each worker. Its link is the bottleneck: with n workers and k
servers, n/k times the parameters pass it in each direction.
Constraints: at least one server and one worker; no pipeline; no offload of the optimizer's state.
BatchNorm statistics are those of the first worker.
Example: bigtrain train -n 3 --strategy parameter_server

Source: Li et al. 2014, Scaling Distributed Machine Learning with the Parameter Server (OSDI '14),
sections 3.1 to 3.4.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import ClassVar, Literal

from pydantic import Field

from bigtrain.core.runner import Runner
from bigtrain.core.strategy import Assembly, Plan, Strategy
from bigtrain.core.traits import Need, Traits
from bigtrain.core.variants import Shape, Variant
from bigtrain.costs.forecast import Forecast, Profile
from bigtrain.costs.traffic import Traffic, TrafficKind, parameter_shapes
from bigtrain.devices import is_accelerator
from bigtrain.errors import ConfigError
from bigtrain.job.schema import Role
from bigtrain.memory.timeline import Breakdown, Phase, Span, Timeline, scale_timeline
from bigtrain.models.parameters import names_of
from bigtrain.optim.partition import even_bounds
from bigtrain.recorder.exchanges import watch_messages
from bigtrain.strategies.parameter_server.asynchronous import (
    AsyncPulledUpdate,
    AsyncServer,
    AsyncSettings,
    AsyncWorker,
    read_pushes,
)
from bigtrain.strategies.parameter_server.server import Server, ServerUpdate
from bigtrain.strategies.parameter_server.shards import MESSAGE_ELEMENTS
from bigtrain.strategies.parameter_server.worker import PulledUpdate, Worker
from bigtrain.units import format_bytes

_NOTICE_EVERY = 20
_INEXACT_REASON = (
    "pushes are applied as they arrive, to parameters that others have changed meanwhile: by "
    "intent the losses are not those of one process"
)


class ParameterServer(Strategy):
    """Servers, which have the optimizer's state, and workers, which compute gradients."""

    name: ClassVar[str] = "parameter_server"
    role: ClassVar[Role] = "replicate"
    summary: ClassVar[str] = "servers hold parameters and optimizer state, workers push and pull"

    servers: int = Field(1, ge=1)
    """The number of servers, which have shards of parameters and state: the first ranks."""
    mode: Literal["synchronous", "asynchronous"] = "synchronous"
    """Whether a push waits for the other workers' pushes, or is applied when it arrives."""
    staleness: int = Field(2, ge=0)
    """Asynchronous: steps that the fastest worker may be ahead of the slowest."""
    divide_rate: bool = False
    """Asynchronous: divide the learning rate of a gradient by its staleness."""
    replay: str | None = None
    """Asynchronous: the log of a run (`runs/NAME/pushes.jsonl`), to repeat its order of pushes."""

    @property
    def need(self) -> Need:
        """See `Strategy.need`: to compare servers with `ddp` and `zero`."""
        return "learning"

    @property
    def traits(self) -> Traits:
        """See `Strategy.traits`."""
        return Traits(
            owns_step=True,
            materializes=True,
            optimizer_gets="pieces",
            optimizer_sees="parameters",
            cannot_hold=frozenset({"gradient_hooks", "accumulate_hooks", "writes", "packed"}),
            state_ranks=self.servers,
            sharded_states=1,
            num_servers=self.servers,
            sends_messages=True,
            notice_every=_NOTICE_EVERY if self._asynchronous else 1,
            inexact_reason=_INEXACT_REASON if self._asynchronous else None,
        )

    @property
    def _asynchronous(self) -> bool:
        return self.mode == "asynchronous"

    def warning(self) -> str | None:
        """See `Strategy.warning`."""
        return f"parameter_server: {_INEXACT_REASON}" if self._asynchronous else None

    def variants(self, shape: Shape) -> Iterable[Variant]:
        """Return no variant: a plan with ranks that compute nothing is never the fastest."""
        del shape
        return ()

    def check(self, plan: Plan) -> None:
        """Refuse plans without a worker, and techniques that need the state on every rank."""
        if plan.dp == 1:
            raise ConfigError(
                "strategy.replicate=parameter_server needs a server and a worker, and there is 1 "
                "rank. Start 2 with `bigtrain train -n 2`, or use --strategy single."
            )
        if self.servers >= plan.dp:
            raise ConfigError(
                f"strategy.replicate.servers={self.servers} of {plan.dp} ranks leaves no worker. "
                f"Set strategy.replicate.servers={plan.dp - 1}, or start {self.servers + 1} ranks."
            )
        if self.replay is not None:
            if not self._asynchronous:
                raise ConfigError(
                    f"strategy.replicate.replay={self.replay} is an order of pushes, and "
                    "strategy.replicate.mode=synchronous has a fixed order. Set "
                    "strategy.replicate.mode=asynchronous."
                )
            read_pushes(self.replay, plan.dp - self.servers, self.servers)
        if self._asynchronous and is_accelerator(plan.device_type):
            raise ConfigError(
                "strategy.replicate.mode=asynchronous: the order of messages between servers and "
                "workers is not known before, and NCCL, the backend of a GPU, waits for ever for "
                "messages in another order or from a lost worker. "
                "Use strategy.replicate.mode=synchronous, or device=cpu."
            )
        if plan.cut is not None:
            raise ConfigError(
                "strategy.replicate=parameter_server serves whole models, and strategy.cut makes "
                "stages. Leave strategy.cut out, or use strategy.replicate=ddp."
            )
        offload = plan.offload_tiers.state_word
        if offload is not None:
            raise ConfigError(
                "strategy.replicate=parameter_server keeps parameters and optimizer state on its "
                f"servers, and {offload} would move them. Set "
                "strategy.offload=null, or use strategy.replicate=zero."
            )
        if plan.sync_batchnorm:
            raise ConfigError(
                "train.sync_batchnorm=true exchanges between all ranks in the forward pass, and "
                "servers have no forward pass. "
                "Set train.sync_batchnorm=false, or use strategy.replicate=ddp."
            )

    def estimate(self, forecast: Forecast, profile: Profile, plan: Plan) -> Forecast:
        """Return the forecast of `plan.dp_rank`: a worker or a server.

        If the rank is None, it is the forecast with the higher peak of the two.
        """
        worker = replace(
            forecast,
            states=replace(forecast.states, optimizer=0),
            step=Timeline((), forecast.step.phases),
        )
        server = self._server(forecast, profile, plan)
        if plan.dp_rank is None:
            return max(worker, server, key=lambda role: role.peak().bytes)
        return worker if plan.data_rank(plan.dp_rank) is not None else server

    def _server(self, forecast: Forecast, profile: Profile, plan: Plan) -> Forecast:
        """Return the forecast of a server: its share, and the gradients that it receives."""
        share = math.ceil(profile.gradient_bytes / self.servers)
        number_bytes = profile.gradient_bytes / max(1, profile.trained_elements)
        longest = max(map(math.prod, parameter_shapes(profile)), default=0)
        longest = min(longest, math.ceil(profile.trained_elements / self.servers), MESSAGE_ELEMENTS)
        # An asynchronous server receives one push at a time, into the gradients themselves.
        others = 0 if self._asynchronous else plan.batch.dp_size - 1
        waiting = round(others * longest * number_bytes)
        phases: tuple[tuple[int, Phase], ...] = ((0, "backward"),)
        arriving = Span(waiting, "temporary", 0, 1)
        passes = {
            "first": Timeline((arriving, Span(share, "gradients", 0, 1)), phases),
            "later": Timeline((arriving,), phases),
        }
        states = Breakdown(
            parameters=share, optimizer=math.ceil(forecast.states.optimizer / self.servers)
        )
        step = scale_timeline(forecast.step, 1 / self.servers)
        return replace(forecast, states=states, passes=passes, step=step, gradients=share)

    def advise(self, forecast: Forecast, profile: Profile, plan: Plan) -> str | None:
        """Return a line with the predicted peak of each role."""
        roles = []
        for dp_rank in (plan.dp - 1, 0):
            own_plan = replace(plan, dp_rank=dp_rank)
            predicted = self.estimate(forecast, profile, own_plan)
            for technique in plan.in_order[plan.in_order.index(self) + 1 :]:
                predicted = technique.estimate(predicted, profile, own_plan)
            roles.append(format_bytes(predicted.peak().bytes))
        each = "the server" if self.servers == 1 else f"each of {self.servers} servers"
        return f"a worker is predicted to need {roles[0]}, {each} {roles[1]}"

    def traffic(self, profile: Profile, plan: Plan) -> tuple[Traffic, ...]:
        """Return the messages of `plan.dp_rank`: gradients to servers, and parameters to workers.

        The bytes are exact for an elementwise optimizer. If the rank is None, the messages are
        those of the rank with the most: a server, unless there are as many servers as workers.
        """
        workers, rank = plan.batch.dp_size, plan.dp_rank
        if rank is None:
            rank = 0 if workers > self.servers else plan.dp - 1
        is_server = plan.data_rank(rank) is None
        tensors = len(parameter_shapes(profile))
        nbytes, calls = profile.gradient_bytes, max(self.servers, tensors)
        if is_server:
            bounds = even_bounds(profile.trained_elements, self.servers)
            share = bounds[rank + 1] - bounds[rank]
            size = profile.gradient_bytes / max(1, profile.trained_elements)
            nbytes = workers * round(share * size)
            calls = workers * -(-tensors // self.servers)
        stride = plan.pp * plan.tp
        sent = Traffic("send", nbytes, calls, "step", "nothing", ranks=2, stride=stride)
        received = replace(sent, kind="receive", nothing_sent=True)
        return (sent, received, *self._statistics(profile, workers, plan.data_rank(rank), stride))

    def _statistics(
        self, profile: Profile, workers: int, worker: int | None, stride: int
    ) -> tuple[Traffic, ...]:
        """Return the messages by which each other worker gets the first worker's buffers."""
        if self._asynchronous or not profile.buffer_bytes or worker is None or workers == 1:
            return ()
        nbytes = profile.buffer_bytes * (workers - 1 if worker == 0 else 1)
        kind: TrafficKind = "receive" if worker else "send"
        return (
            Traffic(
                kind,
                nbytes,
                calls=1,
                every="step",
                overlaps="nothing",
                ranks=2,
                stride=stride,
                nothing_sent=worker > 0,
            ),
        )

    def apply(self, assembly: Assembly) -> None:
        """Make this rank a worker, with the whole model, or a server, with its share."""
        context = assembly.context
        watch_messages(context.dp_group, context.recorder)
        if assembly.plan.data_rank(context.dp_rank) is None:
            assembly.runner = self._make_server
            return
        assembly.materialize(names_of(assembly.model))
        for parameter in assembly.trained().values():
            parameter.data = parameter.data.contiguous()  # flat slices are sent
        assembly.runner = self._make_worker

    def _make_worker(self, assembly: Assembly) -> Runner:
        if self._asynchronous:
            pulled = AsyncPulledUpdate(assembly.trained(), assembly, self.servers)
            self._spare_workers(assembly)
            return AsyncWorker(assembly, pulled)
        return Worker(assembly, PulledUpdate(assembly.trained(), assembly, self.servers))

    def _make_server(self, assembly: Assembly) -> Runner:
        update = ServerUpdate(assembly, self.servers)
        if self._asynchronous:
            self._spare_workers(assembly)
            settings = AsyncSettings(self.servers, self.staleness, self.divide_rate, self.replay)
            return AsyncServer(assembly, update, settings)
        return Server(assembly, update)

    def _spare_workers(self, assembly: Assembly) -> None:
        """Let the run continue if a worker dies, as no other worker waits for it. Collective."""
        servers, size = self.servers, assembly.context.world_size
        names = [f"server {n}" for n in range(servers)]
        names += [f"worker {n}" for n in range(size - servers)]
        assembly.context.tolerate_losses(range(servers, size), names)
