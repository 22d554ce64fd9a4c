"""A server: sums the workers' gradients, updates its share of the parameters and sends it back."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from bigtrain.core.loop import StepRunner
from bigtrain.core.runner import StepLoss
from bigtrain.core.state import check_shapes, load_optimizer, module_tensors
from bigtrain.core.strategy import Assembly
from bigtrain.data.loader import MicroBatch
from bigtrain.optim.partition import Slice
from bigtrain.optim.update import is_elementwise, optimizer_tensors, steps_on_device
from bigtrain.optim.whole import WholeOptimizer
from bigtrain.strategies.parameter_server.shards import (
    Messages,
    messages_of,
    piece_view,
    pieces_of,
)
from bigtrain.tensors.norms import local_norm
from bigtrain.tensors.shards import Extent, SavedTensor, StateTensor, read_whole


class ServerUpdate:
    """An `Update` with the optimizer on this server's pieces, each of which is a tensor.

    Args:
        assembly: its model has no values yet. The pieces get their values one parameter after the
            other, so no server ever has the whole model.
        servers: the number of servers.
    """

    def __init__(self, assembly: Assembly, servers: int) -> None:
        context, parameters = assembly.context, assembly.trained()
        self.names = list(parameters)
        self.shapes = {name: tuple(p.shape) for name, p in parameters.items()}
        self.messages = Messages(context, servers)
        whole_optimizer = WholeOptimizer.of(assembly.make_optimizer, parameters)
        self._whole = not whole_optimizer.kind.elementwise
        self.pieces: dict[Slice, nn.Parameter] = {}
        for piece in pieces_of(parameters, servers, may_split=not self._whole):
            if piece.owner == context.dp_rank:
                assembly.materialize([piece.name])
                parameter = parameters[piece.name].detach()
                values = piece_view(parameter, piece).clone()
                self.pieces[piece] = nn.Parameter(
                    values.view(parameter.shape) if self._whole else values
                )
                parameters[piece.name].data = parameter.new_empty(0)
        assembly.materialize([])  # collective: some models are sent by rank 0 as a whole
        shards: dict[str, list[nn.Parameter]] = {name: [] for name in parameters}
        for piece, shard in self.pieces.items():
            shards[piece.name].append(shard)
        self.optimizer = whole_optimizer.put_on(shards)

    def receive_gradients(self, wanted: Mapping[str, bool]) -> None:
        """Receive the workers' gradients, and add them up in the order of the workers' ranks.

        Args:
            wanted: by parameter name, whether any worker has a gradient of it.
        """
        pushed = [shard for piece, shard in self.pieces.items() if wanted[piece.name]]
        for shard in pushed:
            shard.grad = torch.empty_like(shard)
        messages = [
            part for s in pushed if s.grad is not None for part in messages_of(s.grad.view(-1))
        ]
        longest = max((part.numel() for part in messages), default=0)
        buffers = [
            torch.empty(longest, dtype=messages[0].dtype, device=messages[0].device)
            for _ in range(1, self.messages.num_workers if messages else 0)
        ]
        for total in messages:
            arriving = [tensor[: total.numel()] for tensor in buffers]
            rank_of = self.messages.worker_place
            works = [self.messages.receive(t, rank_of(n)) for n, t in enumerate((total, *arriving))]
            for work in works:
                if work is not None:
                    work.wait()
            for tensor in arriving:
                total += tensor

    def receive_push(self, worker: int) -> None:
        """Receive one worker's gradients of all pieces."""
        for shard in self.pieces.values():
            shard.grad = torch.empty_like(shard)
            for part in messages_of(shard.grad.view(-1)):
                self.messages.receive_later(part, self.messages.worker_place(worker))
        self.messages.finish()

    def send_to(self, worker: int) -> None:
        """Begin to send all pieces to one worker."""
        for shard in self.pieces.values():
            for part in messages_of(shard.detach().view(-1)):
                self.messages.send(part, self.messages.worker_place(worker))

    def step(self) -> None:
        """See `Update.step`: update the pieces, and send them to every worker."""
        self.optimizer.step()
        for worker in range(self.messages.num_workers):
            self.send_to(worker)
        self.messages.finish()

    def resident_tensors(self) -> Iterable[Tensor]:
        """See `Update.resident_tensors`."""
        return optimizer_tensors(self.optimizer)

    def parts(self, name: str) -> list[tuple[Slice, nn.Parameter]]:
        """Return the pieces of a parameter on this server, each with its tensor."""
        return [(piece, shard) for piece, shard in self.pieces.items() if piece.name == name]

    def joined(self, name: str, values: Sequence[tuple[Slice, Tensor]]) -> StateTensor:
        """Return one tensor of the state, from a value for each piece of a parameter."""
        extents = tuple(Extent(piece.start, piece.stop - piece.start) for piece, _ in values)

        def read() -> Tensor:
            return torch.cat([value.detach().reshape(-1) for _, value in values])

        return StateTensor(values[0][1].dtype, self.shapes[name], extents, read)

    def state(self) -> dict[str, StateTensor]:
        """See `Update.state`."""
        tensors = {}
        for name in self.names:
            parts = self.parts(name)
            for key in sorted({k for _, s in parts for k in self.optimizer.state.get(s, {})}):
                values = [(piece, self.optimizer.state[shard][key]) for piece, shard in parts]
                first = values[0][1]
                if not isinstance(first, Tensor):
                    continue
                if is_elementwise(key, first, tuple(parts[0][1].shape)):
                    tensors[f"{name}.{key}"] = self.joined(name, values)
                else:
                    tensors[f"{name}.{key}"] = StateTensor.of(first)
        return tensors

    def masters(self) -> dict[str, StateTensor]:
        """See `Update.masters`."""
        return {}

    def load_state(self, name: str, key: str, saved: SavedTensor) -> None:
        """See `Update.load_state`."""
        for piece, shard in self.parts(name):
            slots = self.optimizer.state[shard]
            if is_elementwise(key, saved, self.shapes[name]):
                slots[key] = torch.empty_like(shard).copy_(
                    self.read(piece, saved).view(shard.shape)
                )
            else:
                device = shard.device if steps_on_device(self.optimizer) else "cpu"
                slots[key] = read_whole(saved).to(device)

    def read(self, piece: Slice, saved: SavedTensor) -> Tensor:
        """Read the elements of a piece from a saved tensor, on the CPU."""
        return saved.read([Extent(piece.start, piece.stop - piece.start)])

    def load_master(self, name: str, saved: SavedTensor) -> None:
        """See `Update.load_master`."""
        with torch.no_grad():
            for piece, shard in self.parts(name):
                shard.copy_(self.read(piece, saved).view(shard.shape))

    def close(self) -> None:
        """See `Update.close`."""


class Server(StepRunner):
    """The runner of a server: it receives gradients in place of a forward and backward pass.

    Args:
        assembly: an assembly, which gets `update` as its update.
        update: the pieces and their optimizer, and the messages to and from the workers.
    """

    def __init__(self, assembly: Assembly, update: ServerUpdate) -> None:
        assembly.update = update
        shards = {f"{p.name}.{p.start}": shard for p, shard in update.pieces.items()}
        assembly.meter.label(shards.values(), "parameters")
        # All names of each parameter: a checkpoint has a tied parameter under each name.
        self._names: dict[str, list[str]] = {}
        first: dict[int, str] = {}
        for name, parameter in assembly.model.named_parameters(remove_duplicate=False):
            self._names.setdefault(first.setdefault(id(parameter), name), []).append(name)
        super().__init__(assembly, shards)
        self._server = update

    def forward_backward(self, micro_batches: Sequence[MicroBatch]) -> StepLoss:
        """See `Runner.forward_backward`: receive the gradients of the workers and sum them."""
        self.meter.phase("backward")
        total = self.count_targets(micro_batches)
        self.average_gradients()
        self.label_gradients()
        return self.step_loss(None, lambda own: self.mean_loss(own, total))

    def average_gradients(self) -> None:
        """Add up the workers' gradients, and divide the sum by the size of the dp axis.

        Workers multiply their loss by this size, which includes the servers.
        """
        rows = self.context.all_gather_rows([0.0] * len(self._server.names), "dp")
        wanted = [any(column) for column in zip(*rows, strict=True)]
        self._server.receive_gradients(dict(zip(self._server.names, wanted, strict=True)))
        for shard in self._trained:
            if shard.grad is not None:
                shard.grad /= self.context.dp_size

    def norm(self) -> Tensor:
        """Return the norm of the whole gradient, of which each server has a share. Collective."""
        gradients = [s.grad for s in self._trained if s.grad is not None]
        own_norm = local_norm(gradients, self._device_type)
        squares = self.context.all_gather_numbers(float(own_norm) ** 2, "dp")
        return torch.tensor(math.sqrt(math.fsum(squares)), dtype=torch.float64)

    def gradients(self) -> dict[str, StateTensor]:
        """See `Runner.gradients`."""
        gradients = {}
        for name in self._server.names:
            parts = [(p, s.grad) for p, s in self._server.parts(name) if s.grad is not None]
            if parts:
                gradients[name] = self._server.joined(name, parts)
        return gradients

    def predict(self, micro_batch: MicroBatch) -> None:
        """See `Runner.predict`: only workers predict."""

    def state(self) -> dict[str, StateTensor]:
        """See `Runner.state`."""
        tensors: dict[str, StateTensor] = {}
        for name in self._server.names:
            parts = [(piece, shard) for piece, shard in self._server.parts(name)]
            if parts:
                value = self._server.joined(name, parts)
                tensors |= {f"model.{alias}": value for alias in self._names[name]}
        return tensors | {f"optimizer.{k}": v for k, v in self._server.state().items()}

    def load_state(self, saved: Mapping[str, SavedTensor]) -> None:
        """See `Runner.load_state`."""
        expected = {*module_tensors(self.module.state_dict())}
        own_names = {piece.name for piece in self._server.pieces}
        check_shapes({n: self._server.shapes[n] for n in own_names}, expected, saved)
        for name in own_names:
            self._server.load_master(name, saved[f"model.{name}"])
        load_optimizer(self._server, self._server.names, own_names, saved)
