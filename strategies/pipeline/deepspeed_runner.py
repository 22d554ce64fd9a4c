"""The runner on DeepSpeed's pipeline engine.

DeepSpeed's schedule says what is done when, its engine computes, sends, reduces and steps. Facts of
DeepSpeed 0.20 (`runtime/pipe`) that the instructions here answer, each in its place:

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

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from importlib import import_module
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from bigtrain.core.strategy import Assembly
from bigtrain.cutting.stage import Stage
from bigtrain.data.loader import MicroBatch
from bigtrain.optim.update import Update, WholeUpdate
from bigtrain.pipeline.runner import PipelineRunner
from bigtrain.pipeline.state import gather_state
from bigtrain.pipeline.tied_parameters import TiedParameter
from bigtrain.strategies.pipeline.deepspeed_start import make_pipeline_engine
from bigtrain.tensors.source import TensorSource


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

    def gradients(self) -> dict[str, TensorSource]:
        """The whole gradients by name. Collective over the replicas."""

    def update_parameters(self) -> None:
        """Let the parameters follow what was loaded."""


class _EngineUpdate(WholeUpdate):
    """The optimizer as DeepSpeed's engine steps it."""

    engine: Any = None

    def step(self) -> None:
        """See `Update.step`."""
        self.engine._exec_optimizer_step()


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
            made = make_pipeline_engine(
                self._part, optimizer, {**config, **more}, context, self._closing
            )
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
        self._part.compute = self._forward
        self._instruct()

    def _whole(self, assembly: Assembly, stage: Stage, start: Callable[..., Any]) -> Update:
        trained = {n: p for n, p in stage.named_parameters() if p.requires_grad}
        spare = {"": nn.Parameter(torch.zeros(1, device=stage.device))}
        update = _EngineUpdate(trained or spare, assembly.make_optimizer)
        update.engine = start(update.optimizer, {})
        return update

    def _instruct(self) -> None:
        """Give the engine our way of doing the instructions of its schedule."""
        instructions: Any = import_module("deepspeed.runtime.pipe.schedule")
        self._schedule_class = instructions.TrainSchedule
        self._p2p: Any = import_module("deepspeed.runtime.pipe.p2p")
        self._plain: Any = import_module("deepspeed.runtime.engine").DeepSpeedEngine

        def nothing(_engine: Any) -> None:
            pass

        self._engine._INSTRUCTION_MAP = {
            instructions.LoadMicroBatch: self._load,
            instructions.RecvActivation: self._receive,
            instructions.ForwardPass: self._forward_pass,
            instructions.SendActivation: self._send,
            instructions.RecvGrad: self._receive_gradients,
            instructions.BackwardPass: self._backward_pass,
            instructions.SendGrad: self._send_gradients,
            # When all ranks know that the losses are finite, and in `update`.
            instructions.ReduceTiedGrads: nothing,
            instructions.ReduceGrads: nothing,
            instructions.OptimizerStep: nothing,
        }

    def _groups(self, micro_batches: Sequence[MicroBatch]) -> list[list[MicroBatch]]:
        return [list(micro_batches)]

    def _run(self, group: Sequence[MicroBatch], scale: float, *, final: bool) -> list[Tensor]:
        del final
        engine = self._engine
        self._batches = [self.place_batch(micro_batch) for micro_batch in group]
        self._scale, self._arrived = scale, 0
        engine.module.train(self.module.training)
        engine.total_loss = None
        engine._exec_schedule(
            self._schedule_class(
                micro_batches=len(group), stages=engine.num_stages, stage_id=engine.stage_id
            )
        )
        self._batches = []
        losses, engine.fwd_outputs = engine.fwd_outputs, []
        return [loss.detach() for loss in losses]

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
                self._p2p.recv(_as_bytes(tensor), stage)
        return received

    def _sent(self, tensors: Sequence[Tensor], stage: int) -> None:
        for tensor in tensors:
            if tensor.numel():
                self._p2p.send(_as_bytes(tensor.detach().contiguous()), stage)

    def _forward(self, wires: Sequence[Tensor]) -> Any:
        number = self._computing
        final = number == len(self._batches) - 1
        return self._compute(self._stage, wires, self._batches[number], self._scale, final)

    def _forward_pass(self, engine: Any, buffer_id: int) -> None:
        self._computing = self._turns[buffer_id]
        buffers = engine.pipe_buffers
        outputs = self._plain.forward(engine, buffers["inputs"][buffer_id])
        buffers["outputs"][buffer_id] = outputs
        if engine.is_last_stage():
            engine.fwd_outputs.append(outputs.detach())

    def _send(self, engine: Any, buffer_id: int) -> None:
        outputs = engine.pipe_buffers["outputs"][buffer_id]
        self._sent(outputs, engine.next_stage)
        # The graph is enough to go back from.
        edges = [get_gradient_edge(out) for out in outputs if out.requires_grad]
        engine.pipe_buffers["outputs"][buffer_id] = edges

    def _receive_gradients(self, engine: Any, buffer_id: int) -> None:
        _, outgoing = self._wires(buffer_id)
        wanted = [meta for meta in outgoing if meta.requires_grad]
        engine.grad_layer = self._received(wanted, engine.next_stage)

    def _backward_pass(self, engine: Any, buffer_id: int) -> None:
        finish = self._begin_backward()
        outputs = engine.pipe_buffers["outputs"][buffer_id]
        engine.pipe_buffers["outputs"][buffer_id] = None
        if engine.is_last_stage():
            if outputs.requires_grad:
                # A tensor of its own: DeepSpeed's hook on the output itself would not know this
                # call, and divide by the number of micro-batches.
                self._plain.backward(engine, outputs * 1.0, scale_wrt_gas=False)
        elif outputs:
            gradients, engine.grad_layer = engine.grad_layer, None
            engine._running_engine_backward = True  # or its hooks ask for its own call
            try:
                torch.autograd.backward(outputs, gradients)
            finally:
                engine._running_engine_backward = False
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

    def gradients(self) -> dict[str, TensorSource]:
        """See `Runner.gradients`."""
        if not self._sharding:
            return super().gradients()
        sources = cast(ShardedUpdate, self._update).gradients()
        own_sources = {name: (self._stage_of[name], source) for name, source in sources.items()}
        return gather_state(self.context, own_sources)

    def load_state(self, read: Callable[[str], Tensor], names: Iterable[str]) -> None:
        """See `Runner.load_state`."""
        super().load_state(read, names)
        if self._sharding:
            cast(ShardedUpdate, self._update).update_parameters()

    def _average_gradients(self) -> None:
        if not self._sharding:
            super()._average_gradients()
            return
        self._engine._exec_reduce_grads()
        if self._average is not None:
            self._average([])  # buffers follow the first replica's

    def close(self) -> None:
        """See `Runner.close`."""
        super().close()
        if not self._sharding:
            self._engine.destroy()
        self._closing.close()


def _as_bytes(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor: not every backend knows every type."""
    return tensor.view(-1).view(torch.uint8)
