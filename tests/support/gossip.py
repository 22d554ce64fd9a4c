"""Replicas that train independently and average with one neighbour a step: gossip SGD.

After each step the replicas of a ring form pairs: (0, 1), (2, 3), ... after even steps, and (1, 2),
..., (n-1, 0) after odd ones. Each pair averages its two models. No rank waits for more than one
other rank.

Memory: as one process, and the neighbour's parameters once more.
Communication: the parameters, sent to one neighbour and received from it, once a step.
Constraints: the losses are not those of one process; an even number of replicas; whole models.
Example: bigtrain train -n 2 --strategy gossip.yaml
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

import torch
import torch.distributed as dist

from bigtrain.strategy import (
    Assembly,
    ConfigError,
    Forecast,
    LoopRunner,
    Plan,
    Profile,
    Role,
    SavedTensor,
    StateTensor,
    Strategy,
    Traffic,
    Traits,
    parameter_shapes,
    read_whole,
    replica_state,
    state_of_replica,
)

STEPS = "replicas.gossip.steps"
"""The number of steps in a checkpoint: it decides the next pairs of a resumed run."""


class Gossip(Strategy):
    """One exchange with one neighbour a step."""

    name: ClassVar[str] = "gossip"
    role: ClassVar[Role] = "replicate"
    summary: ClassVar[str] = "replicas train independently and average with one neighbour a step"

    @property
    def traits(self) -> Traits:
        """Say that the numbers differ, so that `verify` refuses with this reason."""
        return Traits(inexact_reason="gossip: each replica averages with one neighbour a step")

    def check(self, plan: Plan) -> None:
        """Refuse an odd number of replicas, and techniques that move or cut parameters."""
        if plan.dp % 2:
            raise ConfigError(
                f"strategy.replicate=gossip pairs replicas, and mesh.dp={plan.dp} is odd. "
                f"Set mesh.dp={plan.dp + 1}, or use strategy.replicate=ddp."
            )
        for role in ("cut", "slice", "offload"):
            if role in plan.techniques:
                raise ConfigError(
                    f"strategy.replicate=gossip averages whole parameters on the device. "
                    f"Leave strategy.{role} out, or use strategy.replicate=ddp."
                )

    def estimate(self, forecast: Forecast, profile: Profile, plan: Plan) -> Forecast:  # noqa: ARG002
        """Add the buffers that receive the neighbour's parameters; they stay for the whole run."""
        buffers = forecast.states.buffers + profile.gradient_bytes
        return replace(forecast, states=replace(forecast.states, buffers=buffers))

    def traffic(self, profile: Profile, plan: Plan) -> tuple[Traffic, ...]:
        """State one send and one receive for each parameter, once a step, without overlap."""
        nbytes, calls = profile.gradient_bytes, len(parameter_shapes(profile))
        sent = Traffic("send", nbytes, calls, "step", "nothing", ranks=2, stride=plan.tp * plan.pp)
        return (sent, replace(sent, kind="receive"))

    def apply(self, assembly: Assembly) -> None:
        """Average after each update, and save every replica."""
        pairs = Pairs(assembly)
        assembly.after_update.append(pairs.average)
        assembly.runner = lambda finished: GossipRunner(finished, pairs)


class Pairs:
    """The exchange of each step with one neighbour."""

    def __init__(self, assembly: Assembly) -> None:
        self.steps = 0
        self._rank, self._size = assembly.context.dp_rank, assembly.context.dp_size
        self._group = assembly.context.dp_group
        self._own = [parameter.detach() for parameter in assembly.trained().values()]
        self._received = [torch.empty_like(tensor) for tensor in self._own]
        assembly.meter.label(self._received, "buffers")

    def average(self) -> None:
        """Send the parameters, receive the neighbour's, and average. Collective."""
        step = 1 if (self._rank + self.steps) % 2 == 0 else -1
        neighbour = (self._rank + step) % self._size
        self.steps += 1
        exchanges = [
            dist.P2POp(exchange, tensor, group=self._group, group_peer=neighbour)
            for exchange, tensors in ((dist.isend, self._own), (dist.irecv, self._received))
            for tensor in tensors
        ]
        for work in dist.batch_isend_irecv(exchanges):
            work.wait()
        for parameter, received in zip(self._own, self._received, strict=True):
            parameter.add_(received).mul_(0.5)


class GossipRunner(LoopRunner):
    """The plain loop; a checkpoint has the state of every replica."""

    def __init__(self, assembly: Assembly, pairs: Pairs) -> None:
        super().__init__(assembly)
        self._pairs = pairs

    def state(self) -> dict[str, StateTensor]:
        """See `Runner.state`: only the first replica has the usual names."""
        steps = StateTensor.of(torch.tensor(self._pairs.steps))
        return replica_state(super().state(), self.context.dp_rank) | {STEPS: steps}

    def load_state(self, saved: Mapping[str, SavedTensor]) -> None:
        """See `Runner.load_state`: another strategy's checkpoint has one model for all."""
        super().load_state(state_of_replica(saved, self.context.dp_rank))
        self._pairs.steps = int(read_whole(saved[STEPS])) if STEPS in saved else 0
