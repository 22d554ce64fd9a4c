"""A worker: computes gradients of its share of the global batch, and has no optimizer state."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from bigtrain.core.loop import LoopRunner
from bigtrain.core.strategy import Assembly
from bigtrain.optim.whole import WholeOptimizer
from bigtrain.strategies.parameter_server.shards import (
    Messages,
    messages_of,
    piece_view,
    pieces_of,
)
from bigtrain.tensors.shards import SavedTensor, StateTensor


class PulledUpdate:
    """An `Update` that pushes gradients to the servers and pulls updated parameters."""

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], assembly: Assembly, servers: int
    ) -> None:
        self.parameters = parameters
        self.messages = Messages(assembly.context, servers)
        optimizer = WholeOptimizer.of(assembly.make_optimizer, parameters)
        self.pieces = pieces_of(parameters, servers, may_split=optimizer.kind.elementwise)
        # The optimizer has no parameters, but schedules set and read its learning rate.
        self.optimizer = optimizer.put_on({})

    def push(self, gradients: Mapping[str, Tensor]) -> None:
        """Send gradients to the servers, and wait until they have arrived."""
        self.begin_push(gradients)
        self.messages.finish()

    def begin_push(self, gradients: Mapping[str, Tensor]) -> None:
        """Begin to send gradients; they must not change until `messages.finish`."""
        for piece in self.pieces:
            if piece.name in gradients:
                gradient = gradients[piece.name]
                gradient = (gradient.to_dense() if gradient.is_sparse else gradient).contiguous()
                for part in messages_of(piece_view(gradient, piece)):
                    self.messages.send(part, piece.owner)

    def step(self) -> None:
        """See `Update.step`: receive every parameter in place."""
        self.begin_pull()
        self.messages.finish()

    def begin_pull(self) -> None:
        """Begin to receive every parameter in place; `messages.finish` waits for them."""
        for piece in self.pieces:
            parameter = self.parameters[piece.name].detach()
            for part in messages_of(piece_view(parameter, piece)):
                self.messages.receive_later(part, piece.owner)

    def resident_tensors(self) -> Iterable[Tensor]:
        """See `Update.resident_tensors`."""
        return ()

    def state(self) -> dict[str, StateTensor]:
        """See `Update.state`."""
        return {}

    def masters(self) -> dict[str, StateTensor]:
        """See `Update.masters`."""
        return {}

    def load_state(self, name: str, key: str, saved: SavedTensor) -> None:
        """See `Update.load_state`."""

    def load_master(self, name: str, saved: SavedTensor) -> None:
        """See `Update.load_master`."""

    def close(self) -> None:
        """See `Update.close`."""


class Worker(LoopRunner):
    """The plain loop; servers sum its gradients and update its parameters.

    Args:
        assembly: an assembly, which gets `pulled` as its update.
        pulled: the update, which exchanges messages with the servers.
    """

    def __init__(self, assembly: Assembly, pulled: PulledUpdate) -> None:
        assembly.update = pulled
        super().__init__(assembly)
        self._pulled = pulled
        self._buffers = list(assembly.model.buffers())

    def average_gradients(self) -> None:
        """Push the gradients, with zeros for gradients that only other workers have."""
        wanted_anywhere = self.has_gradient_anywhere()
        gradients = {}
        for (name, parameter), is_wanted in zip(
            self._pulled.parameters.items(), wanted_anywhere, strict=True
        ):
            if is_wanted:
                gradient = parameter.grad
                gradients[name] = torch.zeros_like(parameter) if gradient is None else gradient
        self._pulled.push(gradients)
        self._broadcast_buffers()

    def _broadcast_buffers(self) -> None:
        """Copy the first worker's buffers (BatchNorm statistics) to all, as `ddp` does."""
        messages, first = self._pulled.messages, self._pulled.messages.worker_place(0)
        for buffer in self._buffers:
            if self.context.dp_rank == first:
                for worker in range(1, messages.num_workers):
                    messages.send(buffer, messages.worker_place(worker))
            else:
                messages.receive_later(buffer, first)
        messages.finish()

    def own_norm(self) -> Tensor:
        """Return the norm of this worker's gradients."""
        return super().norm()

    def norm(self) -> Tensor:
        """Return the norm of the summed gradients, from the norms of the servers. Collective."""
        squares = self.context.all_gather_numbers(0.0, "dp")
        return torch.tensor(math.sqrt(math.fsum(squares)), dtype=torch.float64)

    def gradients(self) -> dict[str, StateTensor]:
        """See `Runner.gradients`: the servers have them."""
        return {}

    def state(self) -> dict[str, StateTensor]:
        """See `Runner.state`: without the trained parameters, which the servers save."""
        trained = {id(parameter) for parameter in self._pulled.parameters.values()}
        every = self.module.named_parameters(remove_duplicate=False)
        on_servers = {f"model.{name}" for name, parameter in every if id(parameter) in trained}
        return {name: value for name, value in super().state().items() if name not in on_servers}
