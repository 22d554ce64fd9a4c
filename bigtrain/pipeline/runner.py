"""Training a model that is cut into stages, on the schedules of torch.distributed.pipelining.

All ranks of one pipeline load the same micro-batches, so all of them know every shape: nothing is
sent but the tensors that cross a cut, and their gradients. A step's micro-batches of one shape
run in the schedule's order; those left over (a smaller last one) run through one at a time.

Memory in flight follows the schedule: a micro-batch's inputs, outputs and graph are let go with its
backward pass, and the losses that are kept to the end of a step are detached numbers by then.
torch 2.15 does so if it is told not to collect outputs; before it, `schedule_loop` does.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from bigtrain.core.loop import StepRunner
from bigtrain.core.runner import StepLoss
from bigtrain.core.state import load_optimizer, load_tensors, model_state, module_tensors
from bigtrain.core.strategy import Assembly
from bigtrain.data.loader import MicroBatch
from bigtrain.errors import ConfigError
from bigtrain.pipeline.one_at_a_time import StageTransport, backward_through, forward_through
from bigtrain.pipeline.schedule_loop import ScheduleLoop
from bigtrain.pipeline.state import gather_names
from bigtrain.pipeline.tied_parameters import TiedGradients, TiedParameter
from bigtrain.pipeline.torch_stage import (
    StageCaller,
    StageModule,
    StageShapes,
    TorchSchedule,
    is_sharded,
)
from bigtrain.schedules.orders import check_schedule, stage_ranks
from bigtrain.slicing.sliced_tensor import whole_of
from bigtrain.tensors.shards import SavedTensor, StateTensor
from bigtrain.tensors.tree import map_tensors
from bigtrain.versions.torch_versions import SCHEDULES_LET_GO

_KEPT = 64
"""Schedules that are kept for shapes seen before; sequences of every length would be many."""
BatchSignature = tuple[bool, str]


class PipelineRunner(StepRunner):
    """The stages of one rank, and their optimizer.

    Args:
        assembly: sharded or not; `average` is called where no wrapper averages.
        stages: this rank's, as `orders.stage_ranks` lays them.
        schedule: one of `orders.SCHEDULES`.
        ties: parameters that several stages use.
    """

    def __init__(
        self,
        assembly: Assembly,
        stages: Sequence[StageModule],
        schedule: str,
        *,
        ties: Sequence[TiedParameter] = (),
    ) -> None:
        context, meter = assembly.context, assembly.meter
        self._stages = {stage.index: stage for stage in sorted(stages, key=lambda s: s.index)}
        self._stage_of: dict[str, int] = {}
        parameters: dict[str, nn.Parameter] = {}
        for index, stage in self._stages.items():
            meter.label(stage.parameters(), "parameters")
            meter.label(stage.buffers(), "buffers")
            for name, parameter in stage.named_parameters():
                if name not in parameters:
                    parameters[name] = parameter
                    self._stage_of[name] = index
        trained = {name: p for name, p in parameters.items() if p.requires_grad}
        if assembly.sync is not None:
            name = assembly.plan.techniques["replicate"].name
            raise ConfigError(
                f"strategy.replicate: {name} sets Assembly.sync, which "
                "surrounds the micro-batches of the plain loop, and a pipeline has its own order. "
                "Let it set Assembly.average, which all of them call after the micro-batches."
            )
        super().__init__(assembly, trained)
        self._named = trained
        self._schedule = schedule
        self._count = stages[0].count
        self._per_rank = self._count // context.pp_size
        ranks = stage_ranks(schedule, context.pp_size, self._per_rank)
        self._ties = TiedGradients(ties, ranks, parameters, context)
        self._transport = StageTransport(context, ranks)
        self._sharded = any(is_sharded(stage) for stage in stages)
        self._placed: dict[int, tuple[MicroBatch, int]] = {}
        self._built: OrderedDict[tuple[BatchSignature, int], Any] = OrderedDict()

    def forward_backward(self, micro_batches: Sequence[MicroBatch]) -> StepLoss:
        """See `Runner.forward_backward`."""
        context = self.context
        self.begin_step()
        self._transport.wait_sends()
        self._placed.clear()  # of a step that failed
        self._set_mode(training=self.module.training)
        # All ranks of a pipeline have the same targets: they count once.
        total = sum(context.all_gather_numbers(sum(m.count for m in micro_batches), "dp"))
        # Replicas average their gradients; a sum is wanted, so undo that here.
        scale = context.dp_size / max(total, 1)
        for micro_batch in micro_batches:
            self.label_batch(micro_batch)
        losses: list[Tensor] = []
        remaining = len(micro_batches)
        for group in self._groups(micro_batches):
            remaining -= len(group)
            losses += self._run(group, scale, final=remaining == 0)
        self.participation.end()
        own_sum = torch.stack(losses).double().sum() if losses else None
        loss = self.step_loss(own_sum, self._mean_loss)
        self._ties.sum_gradients()
        self.average_gradients()
        self.label_gradients()
        return loss

    def _mean_loss(self, own_sum: float) -> float:
        """Each pipeline's last stage has `scale` times its sum, the other ranks have nothing."""
        rows = self.context.all_gather_rows([own_sum, *self.participation.row()])
        self.participation.check([row[1:] for row in rows], of_all=True)
        sums = {rank: row[0] for rank, row in enumerate(rows)}
        return self.sum_losses(sums) / (self.context.world_size // self.context.pp_size)

    def _set_mode(self, *, training: bool) -> None:
        for stage in self._stages.values():
            if stage.training is not training:
                stage.train(training)

    def _groups(self, micro_batches: Sequence[MicroBatch]) -> list[list[MicroBatch]]:
        """Neighbours of one shape together."""
        signatures = [_signature(m) for m in micro_batches]
        breaks = [a != b for a, b in zip(signatures, signatures[1:], strict=False)]
        if self._sharded and breaks:
            # Replicas exchange in every pass, so all of them must take these in one order.
            breaks_of_replicas = self.context.all_gather_rows(breaks, "dp")
            breaks = [any(column) for column in zip(*breaks_of_replicas, strict=True)]
        groups = [[micro_batches[0]]]
        for micro_batch, ends in zip(micro_batches[1:], breaks, strict=True):
            if ends:
                groups.append([])
            groups[-1].append(micro_batch)
        return groups

    def _run(self, group: Sequence[MicroBatch], scale: float, *, final: bool) -> list[Tensor]:
        """Forward and backward of micro-batches of one shape; the losses on the last stage's rank.

        As many as the schedule takes go in its order, the rest one at a time.
        """
        signature = (self.module.training, _signature(group[0]))
        losses: list[Tensor] = []
        num_done = 0
        while num_done < len(group):
            number = self._largest(len(group) - num_done)
            part = group[num_done : num_done + max(1, number)]
            num_done += len(part)
            ends = final and num_done == len(group)
            if number:
                losses += self._scheduled(signature, part, scale, final=ends)
            else:
                losses += self._relayed(signature, part[0], scale, final=ends)
        return losses

    def _largest(self, available: int) -> int:
        """How many of these micro-batches the schedule takes at once; 0 for none."""
        if self._schedule == "naive":
            return 0
        for number in range(available, 0, -1):
            try:
                check_schedule(self._schedule, self.context.pp_size, self._per_rank, number)
            except ConfigError:
                continue
            return number
        return 0

    def _scheduled(
        self, signature: BatchSignature, part: Sequence[MicroBatch], scale: float, *, final: bool
    ) -> list[Tensor]:
        schedule = self._cached((signature, len(part)), lambda: self._build(part))
        last = len(part) - 1
        arguments = [
            {"micro_batch": m, "scale": scale, "final": final and number == last}
            for number, m in enumerate(part)
        ]
        losses: list[Tensor] = schedule.step(arguments)
        return losses

    def _cached(self, key: Any, make: Callable[[], Any]) -> Any:
        """What was made for this key, or what is made now; the least used one goes."""
        if key not in self._built:
            self._built[key] = make()
            if len(self._built) > _KEPT:
                self._built.popitem(last=False)
        self._built.move_to_end(key)
        return self._built[key]

    def _build(self, part: Sequence[MicroBatch]) -> Any:
        """Make the schedule for micro-batches of this shape. Collective at its first step."""
        shapes = self._agreed_shapes(self.place_batch(part[0]))
        calls = {i: StageCaller(stage, self._compute) for i, stage in self._stages.items()}
        make = TorchSchedule if SCHEDULES_LET_GO else ScheduleLoop
        return make(self._schedule, calls, shapes, len(part), self.context, self._begin_backward)

    def _agreed_shapes(self, batch: MicroBatch) -> dict[int, StageShapes]:
        """The shapes, where all ranks of the pipeline go through the model alike. Collective.

        Raises:
            ConfigError: their models or versions differ.
        """
        agreed_shapes = self._shapes(batch)
        fingerprint = getattr(next(iter(self._stages.values())), "fingerprint", None)
        if fingerprint is not None:
            with self.autocast():
                own_fingerprint = int(
                    fingerprint(batch)[:12], 16
                )  # no more bits than a float64 holds
            if len(set(self.context.all_gather_numbers(own_fingerprint, "pp"))) > 1:
                raise ConfigError(
                    "strategy.cut: the ranks of the pipeline do not go through the model alike. "
                    "Let them all run the same code, model.args and versions."
                )
        return agreed_shapes

    def _shapes(self, placed: MicroBatch) -> dict[int, StageShapes]:
        with self.autocast():
            return {
                index: (
                    tuple(stage.incoming(placed)) if index else (),
                    tuple(stage.outgoing(placed)) if index < self._count - 1 else (),
                )
                for index, stage in self._stages.items()
            }

    def _relayed(
        self, signature: BatchSignature, micro_batch: MicroBatch, scale: float, *, final: bool
    ) -> list[Tensor]:
        shapes = self._cached(
            (signature, 0), lambda: self._agreed_shapes(self.place_batch(micro_batch))
        )
        kept_graphs: dict[int, tuple[Sequence[Tensor], Sequence[GradientEdge | None]]] = {}
        loss = forward_through(
            self._transport,
            self._stages,
            shapes,
            lambda stage, wires: self._compute(stage, wires, micro_batch, scale, final),
            keep=lambda index, wires, edges: kept_graphs.update({index: (wires, edges)}),
        )
        backward_through(self._transport, self._count, kept_graphs, shapes, self._begin_backward)
        return [] if loss is None else [loss.detach()]

    def _compute(
        self,
        stage: StageModule,
        wires: Sequence[Tensor],
        micro_batch: MicroBatch,
        scale: float,
        final: bool,  # noqa: FBT001 - handed on
    ) -> Any:
        self.meter.phase("forward")
        placed = self._place_once(micro_batch)
        with self.autocast():
            return whole_of(stage(*wires, micro_batch=placed, scale=scale, final=final))

    def _place_once(self, micro_batch: MicroBatch) -> MicroBatch:
        """The micro-batch on the device, which is let go of when all stages here had it."""
        placed, num_left = self._placed.pop(id(micro_batch), (None, len(self._stages)))
        if placed is None:
            placed = self.place_batch(micro_batch)
            self.label_batch(placed)
        if num_left > 1:
            self._placed[id(micro_batch)] = placed, num_left - 1
        return placed

    def _begin_backward(self) -> Callable[[], None]:
        self.meter.phase("backward")
        return self.label_gradients

    def norm(self) -> Tensor:
        """The norm over all stages; a tied parameter counts once. Collective."""
        elsewhere = self._ties.owned_elsewhere
        counted = [p for name, p in self._named.items() if name not in elsewhere]
        own_norm = self.norm_of(counted).to(self.context.device)
        return self.context.all_reduce_sum(own_norm.square(), "pp").sqrt()

    def gradients(self) -> dict[str, StateTensor]:
        """See `Runner.gradients`."""
        return self.whole_gradients(self._named.items())

    def predict(self, micro_batch: MicroBatch) -> tuple[Tensor, Tensor] | None:
        """See `Runner.predict`."""
        self._set_mode(training=False)
        placed = self.place_batch(micro_batch)
        with torch.no_grad(), self.autocast():
            output = forward_through(
                self._transport,
                self._stages,
                self._shapes(placed),
                lambda stage, wires: whole_of(stage(*wires, micro_batch=placed)),
            )
        return (output, placed.targets) if self._count - 1 in self._stages else None

    def state(self) -> dict[str, StateTensor]:
        """See `Runner.state`."""
        masters, elsewhere = self._update.masters(), self._ties.owned_elsewhere
        tensors: dict[str, StateTensor] = {}
        for stage in self._stages.values():
            state, named = (
                module_tensors(stage.state_dict()),
                stage.named_parameters(remove_duplicate=False),
            )
            for name, tensor in model_state(state, named, masters).items():
                tensors.setdefault(f"model.{name}", tensor)
        for key, tensor in self._update.state().items():
            if key.rpartition(".")[0] not in elsewhere:
                tensors[f"optimizer.{key}"] = tensor
        return self.whole_state(tensors)

    def load_state(self, saved: Mapping[str, SavedTensor]) -> None:
        """See `Runner.load_state`."""
        saved = self.own_saved(saved)
        stages = self._stages.values()
        current = {n: t for stage in stages for n, t in module_tensors(stage.state_dict()).items()}
        load_tensors(current, gather_names(self.context, current), saved, self._update)
        trained = gather_names(self.context, self._named)
        load_optimizer(self._update, trained, self._named, saved)

    def close(self) -> None:
        """See `Runner.close`."""
        self._transport.wait_sends()
        super().close()


def _signature(micro_batch: MicroBatch) -> str:
    """What decides the shapes inside the model: those of a batch, and what in it is no tensor."""
    both = (micro_batch.inputs, micro_batch.targets)
    return repr(map_tensors(both, lambda tensor: (tensor.dtype, tuple(tensor.shape))))
