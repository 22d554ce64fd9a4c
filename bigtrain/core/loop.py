"""The plain loop over the micro-batches of a step, used when no technique replaces the loop.

`LoopRunner` is the loop. `StepRunner` is the part that loops and pipelines share: moving a batch to
the device, averaging and clipping the gradients, and the optimizer's step.

The loss of a micro-batch is the sum over its valid targets. Divided by the number of valid targets
of the *global* batch, it gives the gradient of one process with the whole batch, however unevenly
targets are spread over ranks and micro-batches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bigtrain.core.participation import Participation
from bigtrain.core.runner import StepLoss
from bigtrain.core.state import load_optimizer, load_tensors, model_state, module_tensors
from bigtrain.core.strategy import Assembly
from bigtrain.data.loader import MicroBatch
from bigtrain.devices import is_accelerator
from bigtrain.errors import BigtrainError, NonFiniteError
from bigtrain.losses.global_mean import loss_scope
from bigtrain.optim.hold_back import can_hold_back, held_back_by
from bigtrain.optim.in_backward import InBackwardUpdate
from bigtrain.optim.partitioned import PartitionedUpdate
from bigtrain.optim.update import Update, WholeUpdate
from bigtrain.ranks.step_numbers import StepNumbers
from bigtrain.recorder.blocks import unmark_blocks
from bigtrain.slicing.exchange import TensorExchange
from bigtrain.slicing.sliced_tensor import whole_of
from bigtrain.tensors.memory_format import channels_last
from bigtrain.tensors.norms import global_norm
from bigtrain.tensors.shards import SavedTensor, StateTensor, is_distributed


class StepRunner:
    """Average and clip the gradients of this rank's parameters, and update the parameters.

    Args:
        assembly: the finished assembly of the run.
        named: the trained parameters of this rank, by name.
    """

    def __init__(self, assembly: Assembly, named: Mapping[str, nn.Parameter]) -> None:
        self.context = assembly.context
        self.numbers = StepNumbers(assembly.context, assembly.plan.batch.dp_size)
        self.module = assembly.model
        self.loss = assembly.loss
        self.roots: Sequence[nn.Module] = assembly.roots
        self.meter = assembly.meter
        self._precision = assembly.plan.precision
        self._channels_last = assembly.plan.channels_last
        self._clip_norm = assembly.plan.clip_norm
        self._checks_finite = assembly.plan.checks_finite
        self._holds_back = False
        """Whether the device leaves out an update whose loss or gradient norm is not finite."""
        self._device_type = assembly.plan.device_type
        self._keep_gradients = assembly.keep_gradients
        self._average = assembly.average
        self._before_step = assembly.before_step
        self._before_update = assembly.before_update
        self._after_update = assembly.after_update
        self._use = assembly.use
        self.participation = Participation(
            assembly.context,
            assembly.roots,
            assembly.unreached,
            assembly.plan.strategy.name,
            units=assembly.units,
            use=assembly.use,
            follows_freezing=_follows_freezing(assembly),
        )
        self._stepped = False
        self._trained = list(named.values())
        self._by_name, self._gradient_hooks = named, assembly.gradient_hooks
        shards = [p for p in self._trained if is_distributed(p)]
        whole_parameters = [p for p in self._trained if not is_distributed(p)]
        self._clipped_together = [members for members in (shards, whole_parameters) if members]
        """Sharded parameters and whole parameters apart: torch clips no mixture in one call."""
        self._slices = assembly.slices
        sliced_names = assembly.slices.by_name if assembly.slices is not None else {}
        self._sliced = {id(p) for name, p in named.items() if name in sliced_names}
        make_optimizer = assembly.make_optimizer
        self._released: InBackwardUpdate | None = None
        if assembly.plan.release_gradients:
            self._released = InBackwardUpdate(named, make_optimizer, assembly.meter, sliced_names)
        self._update: Update = (
            assembly.update
            or self._released
            or (
                PartitionedUpdate(named, make_optimizer, state_store=assembly.state_store)
                if assembly.state_store is not None
                else WholeUpdate(named, make_optimizer)
            )
        )
        self.optimizer = self._update.optimizer

    def begin_step(self) -> None:
        """Prepare for the passes of a step, also after a step that ended without `update`."""
        for prepare in self._before_step:
            prepare()
        self.participation.begin()
        if self._released is not None:
            self._released.begin_step()

    def forget_gradients(self) -> None:
        """Set all gradients to None."""
        for parameter in self.module.parameters():
            parameter.grad = None

    def count_targets(self, micro_batches: Sequence[MicroBatch]) -> int:
        """Return the number of valid targets of the global batch.

        If the engine's exchange of the step does not have it, this is collective over the dp axis.

        Args:
            micro_batches: the micro-batches of this rank.
        """
        total = self.numbers.targets_of(micro_batches)
        if total is None:
            own_count = sum(m.count for m in micro_batches)
            total = sum(self.context.all_gather_numbers(own_count, "dp"))
        return int(total)

    def sum_scale(self, num_targets: int) -> float:
        """The factor by which a micro-batch's summed loss gives gradients of the global mean.

        The replicas average their gradients, where a sum is needed. So the factor also contains the
        number of replicas.

        Args:
            num_targets: valid targets of the global batch.
        """
        return self.context.dp_size / max(num_targets, 1)

    def step_loss(self, own_sum: Tensor | None, mean: Callable[[float], float]) -> StepLoss:
        """Return the loss of a step, after the ranks have compared their steps where needed.

        If the plan checks that losses are finite, the loss is read here, so that an error stops the
        step before the update; unless the device itself leaves out such an update.

        Args:
            own_sum: 0-dim, the summed loss of this rank; None if it computes no loss.
            mean: returns the mean over all ranks, from this rank's sum; see `mean_loss`.

        Raises:
            NonFiniteError: the plan checks the losses, and one is not finite.
            ConfigError: the ranks used different parameters; see `Participation.check`.
        """
        loss = StepLoss(own_sum, mean)
        if self._checks_finite and not self._holds_back:
            loss.read()
        elif self.participation.has_a_say:
            self.participation.agree()
        self._drop_unused()
        return loss

    def _drop_unused(self) -> None:
        """Replace gradients of zeros by None for the parameters that no replica used."""
        if self._use is None or not self.participation.stand_ins:
            return
        used = [self._use.has(p) for p in self._trained]
        rows = self.context.all_gather_rows(used, "dp")
        for parameter, column in zip(self._trained, zip(*rows, strict=True), strict=True):
            if not any(column):
                parameter.grad = None

    def sum_losses(self, sums: Mapping[int, float]) -> float:
        """Return the sum of the losses of ranks.

        Args:
            sums: the summed loss of each rank, by rank.

        Raises:
            NonFiniteError: the plan checks the losses, and one is not finite.
        """
        if self._checks_finite:
            check_finite(sums)
        known = all(map(math.isfinite, sums.values()))
        return math.fsum(sums.values()) if known else sum(sums.values())  # fsum refuses inf - inf

    def mean_loss(self, own_sum: float, total: float) -> float:
        """Return the sum of the replicas' losses, divided by the number of targets.

        Collective over the dp axis. The replicas also compare their steps.

        Args:
            own_sum: the summed loss of this rank.
            total: valid targets of the global batch.

        Raises:
            NonFiniteError: the plan checks the losses, and one is not finite.
            ConfigError: the ranks used different parameters; see `Participation.check`.
        """
        rows = self.context.all_gather_rows([own_sum, *self.participation.row()], "dp")
        self.participation.check([row[1:] for row in rows])
        ranks, sums = self.context.ranks_of("dp"), [row[0] for row in rows]
        return self.sum_losses(dict(zip(ranks, sums, strict=True))) / max(total, 1)

    def update(self, loss: StepLoss | None = None) -> float:
        """See `Runner.update`."""
        self.meter.phase("step")
        for finish in self._before_update:
            finish()
        if self._checks_finite and not self._holds_back:
            number = self._finite(float(self.clip()))
            self.apply_step()
            return number
        # All work is queued on the device before the host waits, once, for the norm and the loss.
        norm = self.clip()
        if not self._holds_back:
            self.apply_step()
            return float(norm) if loss is None else loss.read_with(norm)
        with held_back_by(self._update.optimizer, self._not_finite(norm, loss)):
            self.apply_step()
        return self._finite(float(norm) if loss is None else loss.read_with(norm))

    def _finite(self, norm: float) -> float:
        """Return a gradient norm.

        Raises:
            NonFiniteError: it is not finite.
        """
        if not math.isfinite(norm):
            stepped = self._released is not None
            raise NonFiniteError(f"the gradient norm is {norm}", stepped=stepped)
        return norm

    def _not_finite(self, norm: Tensor, loss: StepLoss | None) -> Tensor:
        """Return 1 if the norm, or the loss of any replica, is not finite; otherwise 0.

        Collective over the dp axis, on the device: a loss may be infinite on one rank only.
        """
        finite = torch.isfinite(norm)
        own_sum = None if loss is None else loss.own_sum
        if own_sum is not None:
            finite = finite & torch.isfinite(own_sum)
        flag = 1 - finite.float()
        if self.context.dp_size > 1:
            dist.all_reduce(flag, dist.ReduceOp.MAX, group=self.context.dp_group)
        return flag

    def clip(self) -> Tensor:
        """Clip the gradients if the plan has a clipping norm; return their norm before clipping."""
        norm = self.norm()
        if self._clip_norm is not None:
            dtype = torch.float64 if self._precision == "fp64" else torch.float32
            for members in self._clipped_together:
                torch.nn.utils.clip_grads_with_norm_(members, self._clip_norm, norm.to(dtype))
        return norm

    def norm(self) -> Tensor:
        """Return the norm of the gradients of this rank's parameters, 0-dim.

        Collective if gradients are sharded, or if parameters are sliced over the tp axis: the norm
        is of whole gradients.
        """
        if self._released is not None:
            whole_norm, sliced = self._released.norms()
            return whole_norm if self._slices is None else self._slices.norm(sliced, whole_norm)
        return self.norm_of(self._trained)

    def norm_of(self, parameters: Iterable[nn.Parameter]) -> Tensor:
        """Return the norm of these parameters' gradients, 0-dim; see `norm`."""
        sliced: list[Tensor] = []
        whole_tensors: list[Tensor] = []
        for parameter in parameters:
            if parameter.grad is not None:
                group = sliced if id(parameter) in self._sliced else whole_tensors
                group.append(parameter.grad)
        norm = global_norm(whole_tensors, self._device_type)
        if self._slices is None:
            return norm
        return self._slices.norm(global_norm(sliced, self._device_type), norm)

    def take_exchanges(self) -> tuple[TensorExchange, ...]:
        """Return the exchanges over the tp axis since the last call; empty if none are recorded."""
        noted = self._slices.group.exchanges if self._slices is not None else None
        taken = tuple(noted or ())
        if noted:
            noted.clear()
        return taken

    def draw_whole(self) -> None:
        """Let ranks draw the random numbers of whole tensors and slice them, as one process draws.

        This is slow. It makes a run with slices comparable with a run of one process.
        """
        if self._slices is not None:
            self._slices.group.draws.whole = True

    def whole_state(self, state: Mapping[str, StateTensor]) -> dict[str, StateTensor]:
        """Return a state of this rank with its slices described as parts of whole tensors."""
        return dict(state) if self._slices is None else self._slices.whole(state)

    def whole_gradients(self, named: Iterable[tuple[str, nn.Parameter]]) -> dict[str, StateTensor]:
        """Return these parameters' gradients by name, with slices as parts of whole tensors."""
        gradients = {f"model.{n}": StateTensor.of(p.grad) for n, p in named if p.grad is not None}
        return {name.removeprefix("model."): g for name, g in self.whole_state(gradients).items()}

    def own_saved(self, saved: Mapping[str, SavedTensor]) -> Mapping[str, SavedTensor]:
        """Return a saved state as this rank reads it, with slices of the sliced tensors."""
        return saved if self._slices is None else self._slices.own(saved)

    def label_state(self) -> None:
        """See `Runner.label_state`."""
        if self.meter.tracking:
            self.meter.label(self._update.resident_tensors(), "optimizer")

    def apply_step(self) -> None:
        """Step the optimizer, clear the gradients, and call the functions of `after_update`."""
        self._update.step()
        self.label_state()
        # The first gradients are always freed: DDP rebuilds its buckets at the second step, and
        # gradients that still view the old buckets would keep both alive.
        keep = self._keep_gradients and self._stepped
        for parameter in self._trained:
            if keep and parameter.grad is not None:
                parameter.grad.zero_()
            else:
                parameter.grad = None
        self._stepped = True
        for function in self._after_update:
            function()

    def average_gradients(self) -> None:
        """Average the gradients over the replicas, and run the user's hooks on them.

        A gradient that only some replicas have counts as zeros on the others.
        """
        self._average_over_replicas()
        self.run_gradient_hooks()

    def run_gradient_hooks(self) -> None:
        """Run the hooks that users registered on parameters; the gradients are averaged already."""
        self._gradient_hooks.run(self._by_name)

    def _average_over_replicas(self) -> None:
        if self._average is None:
            return
        gradients = []
        wanted_anywhere = self.has_gradient_anywhere()
        for parameter, is_wanted in zip(self._trained, wanted_anywhere, strict=True):
            if is_wanted:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                gradients.append(parameter.grad)
        self._average(gradients)

    def has_gradient_anywhere(self) -> list[bool]:
        """For each trained parameter of this rank, whether any replica has a gradient.

        Collective over the dp axis.
        """
        has_gradient = [p.grad is not None for p in self._trained]
        rows = self.context.all_gather_rows(has_gradient, "dp")
        return [any(column) for column in zip(*rows, strict=True)]

    def label_gradients(self) -> None:
        """Label the existing gradients for the memory meter."""
        if self.meter.tracking:
            self.meter.label((p.grad for p in self._trained), "gradients")

    def place_batch(self, micro_batch: MicroBatch) -> MicroBatch:
        """Return the micro-batch on the device, in the dtype and memory format of the run."""
        placed = micro_batch.to(self.context.device, non_blocking=True)  # from pinned memory
        placed = placed.double() if self._precision == "fp64" else placed
        return placed.map(channels_last) if self._channels_last else placed

    def label_batch(self, micro_batch: MicroBatch) -> None:
        """Label the tensors of a batch for the memory meter, if they are on the device."""
        if self.meter.tracking:
            here = self.context.device.type
            self.meter.label(
                (t for t in micro_batch.tensors() if t.device.type == here), "activations"
            )

    def autocast(self) -> AbstractContextManager[object]:
        """The context of a forward pass: autocast to bf16 in bf16 runs, otherwise nothing."""
        if self._precision != "bf16":
            return nullcontext()
        return torch.autocast(self.context.device.type, dtype=torch.bfloat16)

    def close(self) -> None:
        """See `Runner.close`."""
        for root in self.roots:
            unmark_blocks(root)
        self._gradient_hooks.put_back(self.module)
        self._update.close()


class LoopRunner(StepRunner):
    """Runs forward and backward for each micro-batch, then one optimizer step.

    Args:
        assembly: the finished assembly of the run.
    """

    def __init__(self, assembly: Assembly) -> None:
        named = {n: p for n, p in assembly.model.named_parameters() if p.requires_grad}
        assembly.meter.label_parameters(assembly.model.parameters())
        assembly.meter.label(assembly.model.buffers(), "buffers")
        super().__init__(assembly, named)
        # On a CPU nothing is queued: to wait before the update costs nothing there.
        self._holds_back = (
            self._checks_finite
            and is_accelerator(self._device_type)
            and can_hold_back(self._update)
        )
        self._wrapped = assembly.module
        self._sync = assembly.sync or (lambda _last: nullcontext())
        self._before_backward = assembly.before_backward

    def forward_backward(self, micro_batches: Sequence[MicroBatch]) -> StepLoss:
        """See `Runner.forward_backward`."""
        self.begin_step()
        total = self.count_targets(micro_batches)
        scale = self.sum_scale(total)
        for micro_batch in micro_batches:  # on a CPU all of them are in memory from the start
            self.label_batch(micro_batch)
        losses = []
        check = self._checks_finite and self._released is not None
        for number, micro_batch in enumerate(micro_batches, start=1):
            for announce in self._before_backward:
                announce(self.module, number == len(micro_batches))
            with self._sync(number == len(micro_batches)):
                losses.append(self.run_micro_batch(micro_batch, scale, check=check))
        self.participation.end()
        self.average_gradients()
        # One sum, so that the host waits for the device once a step, not for each micro-batch.
        own_sum = torch.stack(losses).double().sum()
        return self.step_loss(own_sum, lambda own: self.mean_loss(own, total))

    def run_micro_batch(
        self, micro_batch: MicroBatch, scale: float, *, check: bool = False
    ) -> Tensor:
        """Run forward and backward of one micro-batch; return its summed loss, 0-dim and detached.

        Args:
            micro_batch: the micro-batch, on any device.
            scale: the factor of the loss in the backward pass.
            check: whether to check before the backward pass that the loss of every rank is finite;
                collective over the dp axis.

        Raises:
            NonFiniteError: `check` is set, and the loss of a rank is not finite.
        """
        self.meter.phase("forward")
        placed = self.place_batch(micro_batch)
        self.label_batch(placed)
        loss = self.forward_loss(placed)
        if check:
            self.mean_loss(float(loss.detach()), 1)
        self.meter.phase("backward")
        self.backward(loss * scale)
        self.label_gradients()
        return loss.detach()

    def forward_loss(self, placed: MicroBatch) -> Tensor:
        """Return the summed loss of one micro-batch that is on the device, 0-dim."""
        with loss_scope(self.loss, placed):
            with self.autocast():
                output = self._wrapped(placed.inputs)
            loss = self.loss(output, placed.targets, placed.count)
        # Padding, or no valid target: the pass runs only so that this rank joins all collectives.
        return loss * 0.0 if placed.count == 0 else loss

    def backward(self, loss: Tensor) -> None:
        """Run the backward pass of a loss."""
        loss.backward()  # type: ignore[no-untyped-call]

    def gradients(self) -> dict[str, StateTensor]:
        """See `Runner.gradients`.

        Raises:
            BigtrainError: the gradients are released during the backward pass.
        """
        if self._released is not None:
            raise BigtrainError(
                "there are no gradients after the backward pass: each was used and freed in it. "
                "Set optim.release_gradients=false to see them."
            )
        return self.whole_gradients(self.module.named_parameters())

    def predict(self, micro_batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """See `Runner.predict`."""
        placed = self.place_batch(micro_batch)
        with torch.no_grad(), self.autocast():
            return whole_of(self._wrapped(placed.inputs)), placed.targets

    def state(self) -> dict[str, StateTensor]:
        """See `Runner.state`."""
        state = module_tensors(self.module.state_dict())
        named = self.module.named_parameters(remove_duplicate=False)
        values = model_state(state, named, self._update.masters())
        tensors = {f"model.{name}": tensor for name, tensor in values.items()}
        slots = {f"optimizer.{k}": tensor for k, tensor in self._update.state().items()}
        return self.whole_state(tensors | slots)

    def load_state(self, saved: Mapping[str, SavedTensor]) -> None:
        """See `Runner.load_state`."""
        saved = self.own_saved(saved)
        self._load_model(saved)
        trained = {n for n, p in self.module.named_parameters() if p.requires_grad}
        load_optimizer(self._update, trained, trained, saved)

    def _load_model(self, saved: Mapping[str, SavedTensor]) -> None:
        current = module_tensors(self.module.state_dict())
        load_tensors(current, set(current), saved, self._update)


def _follows_freezing(assembly: Assembly) -> bool:
    """Whether a parameter may be frozen during training, because nothing waits for its gradient.

    A wrapper or the engine of another library waits for the gradient. Shards of gradients or of
    parameters would still be updated.
    """
    traits = assembly.plan.replicate
    plain = traits.on_torch and traits.sharded_states < 2 and not traits.owns_step
    return plain and (assembly.module is assembly.model or traits.finds_unused)


def check_finite(losses: Mapping[int, float]) -> None:
    """Check that the losses of all ranks are finite.

    Args:
        losses: the summed loss of each rank, by rank.

    Raises:
        NonFiniteError: a loss is not finite; the message has the rank.
    """
    for rank, value in losses.items():
        if not math.isfinite(value):
            raise NonFiniteError(f"the loss of rank {rank} is {value}")
