"""Train a model that is cut into stages, on the schedules of torch.distributed.pipelining.

All ranks of one pipeline load the same micro-batches, so all of them know every shape. Only
boundary tensors and their gradients are sent. The micro-batches of a step that have one shape run
in the order of the schedule. Micro-batches that the schedule cannot run, such as a smaller last
one, run one at a time.

A micro-batch's inputs, outputs and graph are released in its backward pass, so the schedule decides
the memory of the micro-batches in flight. Losses are detached, so they keep no graph alive.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bigtrain.core.loop import StepRunner
from bigtrain.core.runner import StepLoss
from bigtrain.core.state import load_optimizer, load_tensors, model_state, module_tensors
from bigtrain.core.strategy import Assembly
from bigtrain.data.loader import MicroBatch
from bigtrain.errors import ConfigError
from bigtrain.pipeline.schedule_loop import HostPace, ScheduleLoop
from bigtrain.pipeline.stage_module import StageModule, StageShapes, is_sharded
from bigtrain.pipeline.stage_worker import StageWorker
from bigtrain.pipeline.tied_parameters import TiedGradients, TiedParameter
from bigtrain.pipeline.transport import StageTransport
from bigtrain.ranks.context import RunContext
from bigtrain.schedules.events import (
    EventRow,
    forward_events,
    one_at_a_time_events,
    schedule_events,
)
from bigtrain.schedules.orders import check_schedule, stage_ranks
from bigtrain.tensors.shards import SavedTensor, StateTensor

_MAX_LOOPS = 64
"""The most loops that are cached, one for each shape: sequences of every length would need many."""
LoopKey = tuple[bool, str, int]
"""Whether in training mode, the signature of the micro-batches, and their number."""


class PipelineRunner(StepRunner):
    """The runner of a pipeline: the stages of one rank, and their optimizer.

    Args:
        assembly: the finished assembly of the run; its stages may be sharded. Its `average` is
            called after the passes of a step if no wrapper averages gradients.
        stages: the stages of this rank; see `orders.stage_ranks`.
        schedule: one of `orders.SCHEDULES`.
        ties: the parameters that several stages use.

    Raises:
        ConfigError: the assembly has a `sync`, which is for the plain loop.
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
            meter.label_parameters(stage.parameters())
            meter.label(stage.buffers(), "buffers")
            for name, parameter in stage.named_parameters():
                if name not in parameters:
                    parameters[name] = parameter
                    self._stage_of[name] = index
        trained = {name: p for name, p in parameters.items() if p.requires_grad}
        if assembly.sync is not None:
            name = assembly.plan.techniques["replicate"].name
            raise ConfigError(
                f"strategy.replicate: {name} sets Assembly.sync, which surrounds the "
                "micro-batches of the plain loop, and a pipeline runs them in another order. Let "
                "it set Assembly.average, which every runner calls after the micro-batches."
            )
        super().__init__(assembly, trained)
        self._named = trained
        self._schedule = schedule
        self._count = stages[0].count
        self._per_rank = self._count // context.pp_size
        if len(self._stages) > 1:  # each micro-batch passes through all of them
            context.recorder.unit = "pass"
        self._ranks = stage_ranks(schedule, context.pp_size, self._per_rank)
        self._ties = TiedGradients(ties, self._ranks, parameters, context)
        self._transport = StageTransport(context, self._ranks)
        self._predictions = StageTransport(context, self._ranks)
        """Sends the tensors of predictions. A send stays open until the next prediction or step, so
        that the stages overlap."""
        self._worker = StageWorker(self, self._stages)
        self._pace = HostPace(context.device)
        self._sharded = any(is_sharded(stage) for stage in stages)
        self._before_backward = assembly.before_backward
        self._loops: OrderedDict[LoopKey, ScheduleLoop] = OrderedDict()

    def forward_backward(self, micro_batches: Sequence[MicroBatch]) -> StepLoss:
        """See `Runner.forward_backward`."""
        self.begin_step()
        self._predictions.wait_sends()
        self._transport.clear()
        self._pace.clear()
        self._set_mode(training=self.module.training)
        # All ranks of a pipeline have the same targets, so only the dp axis is summed over.
        scale = self.sum_scale(self.count_targets(micro_batches))
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
        """Return the mean loss of the global batch from the sums of all ranks. Collective.

        Args:
            own_sum: on the rank of a pipeline's last stage, the summed loss of the pipeline,
                multiplied by the result of `sum_scale`; 0 on other ranks.
        """
        rows = self.context.all_gather_rows([own_sum, *self.participation.row()])
        self.participation.check([row[1:] for row in rows], of_all=True)
        sums = {rank: row[0] for rank, row in enumerate(rows)}
        return self.sum_losses(sums) / (self.context.world_size // self.context.pp_size)

    def _set_mode(self, *, training: bool) -> None:
        for stage in self._stages.values():
            if stage.training is not training:
                stage.train(training)

    def _groups(self, micro_batches: Sequence[MicroBatch]) -> list[list[MicroBatch]]:
        """Group consecutive micro-batches of one shape."""
        signatures = [m.signature() for m in micro_batches]
        breaks = [a != b for a, b in zip(signatures, signatures[1:], strict=False)]
        if self._sharded and breaks and not self.numbers.is_even:
            # Sharded replicas exchange in every pass, so all of them have to use the same groups.
            breaks_of_replicas = self.context.all_gather_rows(breaks, "dp")
            breaks = [any(column) for column in zip(*breaks_of_replicas, strict=True)]
        groups = [[micro_batches[0]]]
        for micro_batch, ends in zip(micro_batches[1:], breaks, strict=True):
            if ends:
                groups.append([])
            groups[-1].append(micro_batch)
        return groups

    def _run(self, group: Sequence[MicroBatch], scale: float, *, final: bool) -> list[Tensor]:
        """Run forward and backward of micro-batches of one shape.

        They run in parts. A part has as many micro-batches as the schedule takes, and runs in the
        order of the schedule. If the schedule takes none of the rest, the rest run one at a time.

        Returns:
            The losses, on the rank of the last stage; empty on other ranks.
        """
        losses: list[Tensor] = []
        num_done = 0
        while num_done < len(group):
            num_left = len(group) - num_done
            in_schedule = self._largest(num_left)
            part = group[num_done : num_done + (in_schedule or num_left)]
            num_done += len(part)
            loop = self._loop(part, in_schedule=in_schedule > 0)
            self._worker.begin(part, scale, final=final and num_done == len(group))
            losses += loop.run()
            self._worker.end()
        return losses

    def _largest(self, available: int) -> int:
        """Return the largest number of micro-batches that the schedule takes; 0 for none."""
        for number in range(available, 0, -1):
            try:
                check_schedule(self._schedule, self.context.pp_size, self._per_rank, number)
            except ConfigError:
                continue
            return number
        return 0

    def _loop(self, part: Sequence[MicroBatch], *, in_schedule: bool) -> ScheduleLoop:
        """Return the loop for these micro-batches, from the cache or a new one.

        Collective over the pp axis if the loop is new. The least recently used loop is dropped from
        a full cache.
        """
        key = (self.module.training, part[0].signature(), len(part))
        if key not in self._loops:
            shapes = self._agreed_shapes(self.place_batch(part[0]))
            events = self._events(len(part), in_schedule=in_schedule)
            self._loops[key] = self._loop_of(events, shapes, self._transport)
            if len(self._loops) > _MAX_LOOPS:
                self._loops.popitem(last=False)
        self._loops.move_to_end(key)
        return self._loops[key]

    def _loop_of(
        self, events: EventRow, shapes: Mapping[int, StageShapes], transport: StageTransport
    ) -> ScheduleLoop:
        return ScheduleLoop(
            events, self._worker, shapes, transport, self._pace, self._before_backward
        )

    def _events(self, micro_batches: int, *, in_schedule: bool) -> EventRow:
        """Return this rank's events, in the schedule's order or one micro-batch at a time."""
        pp, per_rank = self.context.pp_size, self._per_rank
        rows = (
            schedule_events(self._schedule, pp, per_rank, micro_batches)
            if in_schedule
            else one_at_a_time_events(self._ranks, micro_batches)
        )
        return rows[self.context.pp_rank]

    def _agreed_shapes(self, placed: MicroBatch) -> dict[int, StageShapes]:
        """Return the shapes after checking that all ranks have the same programs. Collective.

        Raises:
            ConfigError: the programs differ, because models or versions differ.
        """
        shapes = self._worker.shapes(placed)
        fingerprint = getattr(next(iter(self._stages.values())), "fingerprint", None)
        if fingerprint is not None:
            with self.autocast():
                # 48 bits, because a float64 represents such integers exactly.
                own_fingerprint = int(fingerprint(placed)[:12], 16)
            if len(set(self.context.all_gather_numbers(own_fingerprint, "pp"))) > 1:
                raise ConfigError(
                    "strategy.cut: the ranks of the pipeline trace the model differently. Run the "
                    "same code, model.args and versions on all of them."
                )
        return shapes

    def norm(self) -> Tensor:
        """Return the gradient norm over all stages, 0-dim; a tied parameter counts once.

        Collective over the pp axis, and over the axes of `StepRunner.norm`.
        """
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
        shapes = self._worker.shapes(placed)
        events = forward_events(self._ranks)[self.context.pp_rank]
        loop = self._loop_of(events, shapes, self._predictions)
        self._worker.begin([placed])
        with torch.no_grad():
            outputs = loop.run()
        self._worker.end()
        return (outputs[0], placed.targets) if outputs else None

    def state(self) -> dict[str, StateTensor]:
        """See `Runner.state`."""
        masters, elsewhere = self._update.masters(), self._ties.owned_elsewhere
        # The replicas of two stages may cut a tied parameter at different elements, so only the
        # rank that owns the parameter saves its fp32 values.
        not_saved = {id(masters[name]) for name in elsewhere if name in masters}
        tensors: dict[str, StateTensor] = {}
        for stage in self._stages.values():
            state = module_tensors(stage.state_dict())
            named = stage.named_parameters(remove_duplicate=False)
            for name, tensor in model_state(state, named, masters).items():
                if id(tensor) not in not_saved:
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
        self._predictions.wait_sends()
        super().close()


def gather_names(context: RunContext, names: Iterable[str]) -> set[str]:
    """Return the union of the names of all ranks of the pipeline. Collective over the pp axis."""
    return {name for part in gather_over_stages(context, list(names)) for name in part}


def gather_over_stages(context: RunContext, value: Any) -> list[Any]:
    """Return the objects of all ranks of the pipeline, in rank order. Collective over pp.

    Args:
        context: the ranks.
        value: the object of this rank, which can be pickled.
    """
    if context.pp_group is None:
        return [value]
    gathered: list[Any] = [None] * context.pp_size
    dist.all_gather_object(gathered, value, group=context.pp_group)
    return gathered
