"""The runner on DeepSpeed's pipeline engine.

DeepSpeed's schedule orders the instructions; its engine computes, sends, reduces and steps. The
methods here replace instructions of DeepSpeed 0.19 (`runtime/pipe`), for these reasons:

* DeepSpeed sends the shapes to the next stage with the first micro-batch only, so a smaller
  micro-batch hangs or is misread. Here every rank computes the shapes of every micro-batch, and no
  shapes are sent.
* DeepSpeed sends a gradient for every floating-point tensor, asserts that each exists, and sends
  none for complex numbers. Here a boundary tensor of any dtype has a gradient if the loss depends
  on it.
* DeepSpeed reuses receive buffers by position and size, not by dtype: an integer that is received
  into a floating-point buffer is misread. Here each micro-batch has separate buffers.
* DeepSpeed runs a stage's backward pass once for each tensor that was sent, with the graph
  retained. It also copies a stage's inputs, and holds its outputs until the backward pass. Here one
  backward pass serves all tensors, and gradient edges replace the outputs.
* Only DeepSpeed's first and last stage get the batch. Here all stages get it.
* DeepSpeed averages losses over micro-batches in fp32, as if all had the same number of targets.
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
from bigtrain.pipeline.stage_module import StageShapes
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
    """A stage as a layer of DeepSpeed, which maps inputs to outputs, or to the loss."""

    def __init__(self, stage: Stage) -> None:
        super().__init__()
        self.stage = stage
        self.compute: Callable[[Sequence[Tensor]], Any] = lambda _inputs: None

    def forward(self, inputs: tuple[Tensor, ...]) -> Any:
        """Compute the stage's part of the micro-batch that the schedule has reached."""
        return self.compute(inputs)


class ShardedUpdate(Update, Protocol):
    """An `Update` whose states and gradients are sharded over the replicas."""

    def clip(self, elsewhere: Collection[str]) -> float:
        """Return the gradient norm over all stages, by which the next step clips. Collective.

        Args:
            elsewhere: names of tied parameters whose gradients another stage counts.
        """

    def gradients(self) -> dict[str, StateTensor]:
        """Return the gradients, or shards of them, that this rank has, by name."""

    def update_parameters(self) -> None:
        """Copy the loaded values of the shards into the parameters. Collective."""


class _EngineUpdate(WholeUpdate):
    """An `Update` whose optimizer is stepped by DeepSpeed's engine."""

    engine: Any = None

    def step(self) -> None:
        """See `Update.step`."""
        step_pipeline(self.engine)


class DeepSpeedPipelineRunner(PipelineRunner):
    """The runner of a pipeline with one stage on each rank, on DeepSpeed's engine.

    Args:
        assembly: the assembly; it has `shard` if the optimizer's state is sharded over the
            replicas.
        stage: the stage of this rank.
        config: DeepSpeed's configuration without sharding; `shard` adds the section for ZeRO.
        ties: the parameters that several stages use.
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
        self._num_begun = 0
        self._micro_batch_of: dict[int, int] = {}
        """The number of the micro-batch that is in each of the engine's buffers."""
        self._computing = 0
        self._losses: list[Tensor] = []
        self._output_gradients: Sequence[Tensor] = ()
        self._part.compute = self._forward
        self._instruct()

    def _whole(self, assembly: Assembly, stage: Stage, start: Callable[..., Any]) -> Update:
        trained = {n: p for n, p in stage.named_parameters() if p.requires_grad}
        update = _EngineUpdate(trained, assembly.make_optimizer)
        if not trained:  # DeepSpeed refuses an optimizer without parameters
            spare = nn.Parameter(torch.zeros(1, device=stage.device))
            update.optimizer.param_groups[0]["params"].append(spare)
        update.engine = start(update.optimizer, {})
        return update

    def _instruct(self) -> None:
        """Replace the instructions of the engine's schedule by the methods here."""

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
            # Gradients are reduced later, when all ranks know that the losses are finite. The
            # method `update` steps the optimizer.
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
        self._worker.begin(self._batches, scale)
        self._num_begun, self._losses = 0, []
        engine.module.train(self.module.training)
        run_schedule(engine, len(group))
        self._batches = []
        self._worker.end()
        losses, self._losses = self._losses, []
        return losses

    @property
    def _stage(self) -> Stage:
        return self._part.stage

    def _shapes(self, buffer_id: int) -> StageShapes:
        """Return the stage's inputs and outputs for a buffer's micro-batch, on the meta device."""
        micro_batch = self._batches[self._micro_batch_of[buffer_id]]
        return self._worker.shapes(micro_batch)[self._stage.index]

    def _load(self, engine: Any, buffer_id: int) -> None:
        if engine.is_first_stage():
            self._begin_micro_batch(buffer_id)
            engine.pipe_buffers["inputs"][buffer_id] = ()

    def _begin_micro_batch(self, buffer_id: int) -> None:
        self._micro_batch_of[buffer_id] = self._num_begun
        self._num_begun += 1

    def _receive(self, engine: Any, buffer_id: int) -> None:
        self._begin_micro_batch(buffer_id)
        incoming, _ = self._shapes(buffer_id)
        inputs = self._receive_from(incoming, engine.prev_stage)
        for tensor, meta in zip(inputs, incoming, strict=True):
            tensor.requires_grad_(meta.requires_grad)
        engine.pipe_buffers["inputs"][buffer_id] = tuple(inputs)

    def _receive_from(self, metas: Sequence[Tensor], stage: int) -> list[Tensor]:
        device = self.context.device
        received = [torch.empty(meta.shape, dtype=meta.dtype, device=device) for meta in metas]
        for tensor in received:
            if tensor.numel():
                receive_from_stage(_as_bytes(tensor), stage)
        return received

    def _send_to(self, tensors: Sequence[Tensor], stage: int) -> None:
        for tensor in tensors:
            if tensor.numel():
                send_to_stage(_as_bytes(tensor.detach().contiguous()), stage)

    def _forward(self, inputs: Sequence[Tensor]) -> Any:
        return self._worker.forward(self._stage, self._computing, inputs)

    def _forward_pass(self, engine: Any, buffer_id: int) -> None:
        self._computing = self._micro_batch_of[buffer_id]
        buffers = engine.pipe_buffers
        outputs = forward_stage(engine, buffers["inputs"][buffer_id])
        buffers["outputs"][buffer_id] = outputs
        if engine.is_last_stage():
            self._losses.append(outputs.detach())

    def _send(self, engine: Any, buffer_id: int) -> None:
        outputs = engine.pipe_buffers["outputs"][buffer_id]
        self._send_to(outputs, engine.next_stage)
        # The backward pass needs only the gradient edges, so the outputs can be freed.
        edges = [get_gradient_edge(out) for out in outputs if out.requires_grad]
        engine.pipe_buffers["outputs"][buffer_id] = edges

    def _receive_gradients(self, engine: Any, buffer_id: int) -> None:
        _, outgoing = self._shapes(buffer_id)
        with_gradient = [meta for meta in outgoing if meta.requires_grad]
        self._output_gradients = self._receive_from(with_gradient, engine.next_stage)

    def _backward_pass(self, engine: Any, buffer_id: int) -> None:
        outputs = engine.pipe_buffers["outputs"][buffer_id]
        engine.pipe_buffers["outputs"][buffer_id] = None
        with self._worker.backward_pass():
            if engine.is_last_stage():
                if outputs.requires_grad:
                    # A new tensor: DeepSpeed's hook on the output itself would not recognize this
                    # call, and would divide by the number of micro-batches.
                    backward_loss(engine, outputs * 1.0)
            elif outputs:
                gradients, self._output_gradients = self._output_gradients, ()
                backward_from(engine, outputs, gradients)

    def _send_gradients(self, engine: Any, buffer_id: int) -> None:
        incoming, _ = self._shapes(buffer_id)
        inputs = engine.pipe_buffers["inputs"][buffer_id]
        engine.pipe_buffers["inputs"][buffer_id] = None
        gradients = [
            torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
            for tensor, meta in zip(inputs, incoming, strict=True)
            if meta.requires_grad
        ]
        self._send_to(gradients, engine.prev_stage)

    def clip(self) -> Tensor:
        """See `StepRunner.clip`; with sharded gradients the sharded update clips."""
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
        """See `StepRunner.average_gradients`; under ZeRO stage 1 the result is in shards."""
        if not self._sharding:
            super().average_gradients()
            return
        reduce_pipeline_gradients(self._engine)
        if self._average is not None:
            self._average([])  # broadcasts the buffers of the first replica

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

    DeepSpeed makes a separate grid of ranks. Rank r of the mesh is (r // pp, r % pp) on (dp, pp),
    so the axes of the grid are given in this order. By default DeepSpeed would place the replicas
    of a stage on neighbouring ranks.

    Args:
        part: the layer of this rank, one of as many layers as there are stages.
        optimizer: the optimizer over the trained parameters of the layer.
        config: DeepSpeed's configuration.
        context: this rank and the mesh.
        closing: takes the callbacks that undo the changes to DeepSpeed at the end.

    Raises:
        RuntimeError: DeepSpeed's grid differs from the mesh.
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
            layers=[layer(_ExistingLayer, part) for _ in range(context.pp_size)],
            topology=topology,
            partition_method="uniform",
            loss_fn=None,  # the last stage returns the loss
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


class _ExistingLayer(nn.Module):
    """A layer that DeepSpeed builds around a module that exists already."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, inputs: Any) -> Any:
        """Call the existing module."""
        return self.part(inputs)


def _as_bytes(tensor: Tensor) -> Tensor:
    """Return a contiguous tensor as bytes, because not every backend can send every dtype."""
    return tensor.view(-1).view(torch.uint8)
