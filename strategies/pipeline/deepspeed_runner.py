"""The runner on DeepSpeed's pipeline engine.

DeepSpeed's schedule says what is done when, its engine computes, sends, reduces and steps. Facts of
DeepSpeed 0.19 (`runtime/pipe`) that the instructions here answer, each in its place:

* It tells the next stage the shapes at the first send only, so a smaller micro-batch hangs or is
  misread; here every rank knows the shapes of every micro-batch, and none are sent.
* It sends gradients of all that is floating point, and asserts that each is there; complex numbers
  get none. Here those wires have gradients that the loss has one for, whatever their type.
* Buffers for what is received are kept by place and size, not by type: integers before floating
  point come in as what they are not. Here each micro-batch has its own.
* It goes back through a stage once for each tensor that was sent, with the graph retained; here
  once for all. It copies what a stage is given, and keeps what it sent to its backward pass.
* Only the first and the last stage see the batch; here all do.
* It averages losses over micro-batches as if each had as many targets, in fp32.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, redirect_stdout
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from bigtrain.core.strategy import Assembly
from bigtrain.cutting.stage import Stage
from bigtrain.data.loader import MicroBatch
from bigtrain.optim.update import Update, WholeUpdate
from bigtrain.pipeline.runner import PipelineRunner
from bigtrain.pipeline.tied_parameters import TiedParameter
from bigtrain.ranks.context import RunContext
from bigtrain.strategies.deepspeed_adapter import (
    backward_from,
    backward_loss,
    connect_deepspeed,
    forward_stage,
    receive_from_stage,
    reduce_pipeline_gradients,
    run_schedule,
    send_to_stage,
    set_instructions,
    step_pipeline,
)
from bigtrain.tensors.shards import SavedTensor, StateTensor


class _StageLayer(nn.Module):
    """A stage as DeepSpeed calls it: the wires in, the wires or the loss out."""

    def __init__(self, stage: Stage) -> None:
        super().__init__()
        self.stage = stage
        self.compute: Callable[[Sequence[Tensor]], Any] = lambda _wires: None

    def forward(self, wires: tuple[Tensor, ...]) -> Any:
        """Compute the stage's part for the micro-batch whose turn it is."""
        return self.compute(wires)


class ShardedUpdate(Update, Protocol):
    """An update whose states are in shards over the replicas, the gradients as well."""

    def clip(self, elsewhere: Collection[str]) -> float:
        """Let the next step clip by the norm over all stages; return it.

        Args:
            elsewhere: tied parameters, which another stage counts.
        """

    def gradients(self) -> dict[str, StateTensor]:
        """What this rank has of the gradients, by name."""

    def update_parameters(self) -> None:
        """Let the parameters follow what was loaded."""


class _EngineUpdate(WholeUpdate):
    """The optimizer as DeepSpeed's engine steps it."""

    engine: Any = None

    def step(self) -> None:
        """See `Update.step`."""
        step_pipeline(self.engine)


class DeepSpeedPipelineRunner(PipelineRunner):
    """See `bigtrain.core.strategy.Runner`.

    Args:
        assembly: `shard` is set where the optimizer's state is sharded over the replicas.
        stage: this rank's.
        config: DeepSpeed's, without what shards.
        ties: parameters that several stages use.
    """

    def __init__(
        self,
        assembly: Assembly,
        stage: Stage,
        config: dict[str, Any],
        *,
        ties: Sequence[TiedParameter] = (),
    ) -> None:
        self._closing = ExitStack()
        self._part = _StageLayer(stage)
        context = assembly.context
        engines: list[Any] = []

        def start(optimizer: torch.optim.Optimizer, more: Mapping[str, Any]) -> Any:
            made = _make_engine(self._part, optimizer, {**config, **more}, context, self._closing)
            engines.append(made)
            return made

        if assembly.shard is not None:
            assembly.update = assembly.shard(assembly, start)
        else:
            assembly.update = self._whole(assembly, stage, start)
        self._engine = engines[0]
        super().__init__(assembly, [stage], "1f1b", ties=ties)
        self._sharding = assembly.shard is not None
        self._batches: list[MicroBatch] = []
        self._arrived = 0
        self._turns: dict[int, int] = {}
        """By buffer: the micro-batch that it is for."""
        self._scale = 1.0
        self._computing = 0
        self._losses: list[Tensor] = []
        self._arrived_gradients: Sequence[Tensor] = ()
        self._part.compute = self._forward
        self._instruct()

    def _whole(self, assembly: Assembly, stage: Stage, start: Callable[..., Any]) -> Update:
        trained = {n: p for n, p in stage.named_parameters() if p.requires_grad}
        update = _EngineUpdate(trained, assembly.make_optimizer)
        if not trained:  # DeepSpeed wants something
            spare = nn.Parameter(torch.zeros(1, device=stage.device))
            update.optimizer.param_groups[0]["params"].append(spare)
        update.engine = start(update.optimizer, {})
        return update

    def _instruct(self) -> None:
        """Give the engine our way of doing the instructions of its schedule."""

        def nothing(_engine: Any) -> None:
            pass

        actions: dict[str, Callable[..., None]] = {
            "LoadMicroBatch": self._load,
            "RecvActivation": self._receive,
            "ForwardPass": self._forward_pass,
            "SendActivation": self._send,
            "RecvGrad": self._receive_gradients,
            "BackwardPass": self._backward_pass,
            "SendGrad": self._send_gradients,
            # When all ranks know that the losses are finite, and in `update`.
            "ReduceTiedGrads": nothing,
            "ReduceGrads": nothing,
            "OptimizerStep": nothing,
        }
        set_instructions(self._engine, actions)

    def _groups(self, micro_batches: Sequence[MicroBatch]) -> list[list[MicroBatch]]:
        return [list(micro_batches)]

    def _run(self, group: Sequence[MicroBatch], scale: float, *, final: bool) -> list[Tensor]:
        del final
        engine = self._engine
        self._batches = [self.place_batch(micro_batch) for micro_batch in group]
        self._scale, self._arrived, self._losses = scale, 0, []
        engine.module.train(self.module.training)
        run_schedule(engine, len(group))
        self._batches = []
        losses, self._losses = self._losses, []
        return losses

    @property
    def _stage(self) -> Stage:
        return self._part.stage

    def _wires(self, buffer_id: int) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """The wires in and out of the micro-batch of a buffer, on the meta device."""
        shapes = self._shapes(self._batches[self._turns[buffer_id]])
        return shapes[self._stage.index]

    def _load(self, engine: Any, buffer_id: int) -> None:
        if engine.is_first_stage():
            self._take_turn(buffer_id)
            engine.pipe_buffers["inputs"][buffer_id] = ()

    def _take_turn(self, buffer_id: int) -> None:
        self._turns[buffer_id] = self._arrived
        self._arrived += 1

    def _receive(self, engine: Any, buffer_id: int) -> None:
        self._take_turn(buffer_id)
        incoming, _ = self._wires(buffer_id)
        wires = self._received(incoming, engine.prev_stage)
        for wire, meta in zip(wires, incoming, strict=True):
            wire.requires_grad_(meta.requires_grad)
        engine.pipe_buffers["inputs"][buffer_id] = tuple(wires)

    def _received(self, metas: Sequence[Tensor], stage: int) -> list[Tensor]:
        device = self.context.device
        received = [torch.empty(meta.shape, dtype=meta.dtype, device=device) for meta in metas]
        for tensor in received:
            if tensor.numel():
                receive_from_stage(_as_bytes(tensor), stage)
        return received

    def _sent(self, tensors: Sequence[Tensor], stage: int) -> None:
        for tensor in tensors:
            if tensor.numel():
                send_to_stage(_as_bytes(tensor.detach().contiguous()), stage)

    def _forward(self, wires: Sequence[Tensor]) -> Any:
        number = self._computing
        final = number == len(self._batches) - 1
        return self._compute(self._stage, wires, self._batches[number], self._scale, final)

    def _forward_pass(self, engine: Any, buffer_id: int) -> None:
        self._computing = self._turns[buffer_id]
        buffers = engine.pipe_buffers
        outputs = forward_stage(engine, buffers["inputs"][buffer_id])
        buffers["outputs"][buffer_id] = outputs
        if engine.is_last_stage():
            self._losses.append(outputs.detach())

    def _send(self, engine: Any, buffer_id: int) -> None:
        outputs = engine.pipe_buffers["outputs"][buffer_id]
        self._sent(outputs, engine.next_stage)
        # The graph is enough to go back from.
        edges = [get_gradient_edge(out) for out in outputs if out.requires_grad]
        engine.pipe_buffers["outputs"][buffer_id] = edges

    def _receive_gradients(self, engine: Any, buffer_id: int) -> None:
        _, outgoing = self._wires(buffer_id)
        wanted = [meta for meta in outgoing if meta.requires_grad]
        self._arrived_gradients = self._received(wanted, engine.next_stage)

    def _backward_pass(self, engine: Any, buffer_id: int) -> None:
        finish = self._begin_backward()
        outputs = engine.pipe_buffers["outputs"][buffer_id]
        engine.pipe_buffers["outputs"][buffer_id] = None
        if engine.is_last_stage():
            if outputs.requires_grad:
                # A tensor of its own: DeepSpeed's hook on the output itself would not know this
                # call, and divide by the number of micro-batches.
                backward_loss(engine, outputs * 1.0)
        elif outputs:
            gradients, self._arrived_gradients = self._arrived_gradients, ()
            backward_from(engine, outputs, gradients)
        finish()

    def _send_gradients(self, engine: Any, buffer_id: int) -> None:
        incoming, _ = self._wires(buffer_id)
        wires = engine.pipe_buffers["inputs"][buffer_id]
        engine.pipe_buffers["inputs"][buffer_id] = None
        trained = [w for w, meta in zip(wires, incoming, strict=True) if meta.requires_grad]
        input_gradients = [torch.zeros_like(w) if w.grad is None else w.grad for w in trained]
        self._sent(input_gradients, engine.prev_stage)

    def clip(self) -> Tensor:
        """See `StepRunner.clip`; what shards the gradients has their norm, and clips by it."""
        if not self._sharding:
            return super().clip()
        norm = cast(ShardedUpdate, self._update).clip(self._ties.owned_elsewhere)
        return torch.tensor(norm, dtype=torch.float64)

    def gradients(self) -> dict[str, StateTensor]:
        """See `Runner.gradients`."""
        if not self._sharding:
            return super().gradients()
        return cast(ShardedUpdate, self._update).gradients()

    def load_state(self, saved: Mapping[str, SavedTensor]) -> None:
        """See `Runner.load_state`."""
        super().load_state(saved)
        if self._sharding:
            cast(ShardedUpdate, self._update).update_parameters()

    def average_gradients(self) -> None:
        """See `StepRunner.average_gradients`; under ZeRO stage 1 the shards are reduced."""
        if not self._sharding:
            super().average_gradients()
            return
        reduce_pipeline_gradients(self._engine)
        if self._average is not None:
            self._average([])  # buffers follow the first replica's

    def close(self) -> None:
        """See `Runner.close`."""
        super().close()
        if not self._sharding:
            self._engine.destroy()
        self._closing.close()


def _make_engine(
    part: nn.Module,
    optimizer: torch.optim.Optimizer,
    config: dict[str, Any],
    context: RunContext,
    closing: ExitStack,
) -> Any:
    """Let DeepSpeed make its engine around this rank's stage. Collective over all ranks.

    DeepSpeed lays its own grid; rank r of ours is (r // pp, r % pp) on (dp, pp), so its axes are
    given in that order: its default one has the replicas next to each other.

    Args:
        part: this rank's layer; DeepSpeed is told of as many layers as there are stages.
        optimizer: over its trained parameters.
        config: DeepSpeed's.
        context: the mesh.
        closing: takes what is to be undone at the end.

    Raises:
        RuntimeError: DeepSpeed's grid is another one than the mesh.
    """
    with warnings.catch_warnings(), redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        deepspeed = connect_deepspeed(context, closing)
        topology = deepspeed.runtime.pipe.ProcessTopology(
            axes=["data", "pipe"], dims=[context.dp_size, context.pp_size]
        )
        layer = deepspeed.pipe.LayerSpec
        module = deepspeed.pipe.PipelineModule(
            # Each rank builds its own layer alone.
            layers=[layer(_Given, part) for _ in range(context.pp_size)],
            topology=topology,
            partition_method="uniform",
            loss_fn=None,  # the last stage gives the loss itself
        )
        engine, *_ = deepspeed.initialize(
            model=module, optimizer=optimizer, config=config, dist_init_required=False
        )
    grid = engine.grid
    theirs = (grid.get_data_parallel_id(), grid.get_stage_id())
    if theirs != (context.dp_rank, context.pp_rank):
        raise RuntimeError(
            f"rank {context.rank} is {(context.dp_rank, context.pp_rank)} on the axes dp and pp, "
            f"and {theirs} in DeepSpeed's grid"
        )
    return engine


class _Given(nn.Module):
    """What DeepSpeed builds as a layer: a module that is there."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, wires: Any) -> Any:
        """Call it."""
        return self.part(wires)


def _as_bytes(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor: not every backend knows every type."""
    return tensor.view(-1).view(torch.uint8)
