"""The first steps of a run, compared with a plain torch loop that shares no code with bigtrain.

Rank 0 has a copy of the whole model on the CPU. It computes the user's loss on the whole global
batch, runs the backward pass, clips the gradients, and steps the user's optimizer, as a script for
one device does. The loss and the gradient norm of the run must equal those of this plain loop.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from bigtrain.core.strategy import Plan
from bigtrain.data.loader import MicroBatch
from bigtrain.errors import BigtrainError
from bigtrain.losses.global_mean import GlobalMeanLoss
from bigtrain.losses.loss import CrossEntropy, Loss, MeanLoss, main_logits
from bigtrain.memory.cap import available_bytes
from bigtrain.models.blueprint import Blueprint, kept_random_state
from bigtrain.optim.update import MakeOptimizer
from bigtrain.optim.whole import WholeOptimizer
from bigtrain.ranks.context import RunContext
from bigtrain.tensors.tree import map_tensors, tree_tensors

TOLERANCES = {"fp64": (1e-9, 1e-8), "fp32": (1e-5, 1e-4), "bf16": (1e-2, 5e-2)}
"""By precision, the largest relative differences of the loss and of the gradient norm that are
allowed. Another order of summation and the kernels of another device explain such differences after
a few steps. `verify` compares runs on one kind of device, and allows less."""
_COPIES = 4
"""The memory of the plain loop, in sizes of the model: parameters, gradients and two moments."""


class DifferentNumbersError(BigtrainError):
    """The losses or gradient norms of a run differ from those of a plain torch loop."""


class FirstSteps:
    """Compares the first steps of a run with a plain loop. Every rank calls each method.

    Args:
        steps: the number of steps to compare.
        blueprint: the model as the user gave it, before any technique changes it.
        loss: the loss of the run.
        make_optimizer: the user's function that makes the optimizer.
        plan: the plan of the run, which has the precision and the clipping.
        context: this rank's context.
    """

    def __init__(
        self,
        steps: int,
        blueprint: Blueprint,
        loss: Loss,
        make_optimizer: MakeOptimizer,
        plan: Plan,
        context: RunContext,
    ) -> None:
        self._left, self._plan, self._context = steps, plan, context
        self.note: str | None = _uncomparable(blueprint.model, plan)
        """The reason why nothing is compared; None if steps are compared."""
        self._loop: _PlainLoop | None = None
        self._expected: tuple[float, float] | None = None
        self.compared: list[dict[str, float]] = []
        """For each compared step the loss and gradient norm of the run and of the plain loop; on
        rank 0 only."""
        self.difference: str | None = None
        """A sentence on the first step that differs, on all ranks; None if no step differs."""
        self.ends_run = True
        """Whether a difference ends the run. `bigtrain verify` sets False, to find the source."""
        if context.is_main and self.note is None:
            needed = _COPIES * sum(p.nbytes for p in blueprint.model.parameters())
            room = available_bytes(None, torch.device("cpu"), context.local_world_size)
            if room is not None and needed > room:
                self.note = f"a plain loop needs {needed} bytes on rank 0, which has {room}"
            else:
                model = blueprint.twin().materialize("cpu", seed=context.seed)
                # The caller may have disabled dropout in the described model.
                if not _dropouts(blueprint.model):
                    disable_dropout(model)
                self._loop = _PlainLoop(model, plain_loss(loss), make_optimizer, plan)

    @property
    def active(self) -> bool:
        """Whether `begin` and `check` have to be called in the next step."""
        return self._left > 0

    def begin(
        self, micro_batches: Sequence[MicroBatch], settings: Sequence[Mapping[str, Any]]
    ) -> None:
        """Take the step in the plain loop. Collective.

        Args:
            micro_batches: the micro-batches of this rank.
            settings: for each parameter group, the settings that changed since the optimizer was
                made, such as the learning rate.
        """
        context = self._context
        local = None
        if context.pp_rank == 0 and context.tp_rank == 0:
            local = [
                micro_batch.to("cpu") for micro_batch in micro_batches if not micro_batch.padding
            ]
        everyone = context.gather_objects(local)
        self._left -= 1
        if everyone is None or self._loop is None:
            return
        global_batch = join_micro_batches(
            [
                micro_batch
                for rank_batches in everyone
                if rank_batches
                for micro_batch in rank_batches
            ]
        )
        # `bigtrain verify` sets dropout masks by a mode that is meant for the run only.
        with kept_random_state(), _disable_current_modes():
            self.note = self._loop.is_random(global_batch)
            self._expected = self._loop.step(global_batch, settings) if self.note is None else None
        if self.note is not None:
            self._loop = None

    def check(self, step: int, loss: float, norm: float) -> None:
        """Compare the run's step with the plain loop's. Collective.

        Args:
            step: the number of the step, counted from 1.
            loss: the loss of the run.
            norm: the gradient norm of the run before clipping.

        Raises:
            DifferentNumbersError: the numbers differ by more than rounding, and `ends_run` is set.
                It is raised on all ranks.
        """
        message: str | None = None
        if self._expected is not None:
            plain_loss_value, plain_norm = self._expected
            self.compared.append(
                {
                    "step": step,
                    "loss": loss,
                    "norm": norm,
                    "plain_loss": plain_loss_value,
                    "plain_norm": plain_norm,
                }
            )
            by_loss, by_norm = TOLERANCES[self._plan.precision]
            pairs = (
                ("loss", loss, self._expected[0], by_loss),
                ("gradient norm", norm, self._expected[1], by_norm),
            )
            for quantity, measured, expected, tolerance in pairs:
                if not abs(measured - expected) <= tolerance * max(abs(expected), 1e-6):
                    message = _difference(quantity, step, measured, expected, tolerance, self._plan)
                    break
        self._expected = None
        refusal = self._context.broadcast_object(message)
        self.difference = self.difference or refusal
        if refusal is not None and self.ends_run:
            raise DifferentNumbersError(refusal)
        if not self.active:
            self._loop = None


def disable_dropout(model: nn.Module) -> None:
    """Set all drop probabilities of a model to zero, in place."""
    for module, name in _dropouts(model):
        setattr(module, name, 0.0)


def _dropouts(model: nn.Module) -> list[tuple[nn.Module, str]]:
    """Return each module with the name of an attribute that is a drop probability above zero."""
    dropouts = []
    for module in model.modules():
        kind = type(module).__name__.lower()
        for name, value in vars(module).items():
            drops = "drop" in name.lower() or (name == "p" and ("drop" in kind or "depth" in kind))
            if drops and isinstance(value, float) and 0 < value < 1:
                dropouts.append((module, name))
    return dropouts


def _difference(
    quantity: str, step: int, measured: float, expected: float, tolerance: float, plan: Plan
) -> str:
    return (
        f"step {step}: the {quantity} under {plan.strategy.name} is {measured:.9g}, and "
        f"{expected:.9g} in a plain torch loop on the same global batch, which differs by more "
        f"than rounding (relative {tolerance:.0e}). bigtrain verify finds the first tensor that "
        "differs; without train.check_first_steps nothing is compared."
    )


def _uncomparable(model: nn.Module, plan: Plan) -> str | None:
    if plan.replicate.inexact_reason is not None:
        return plan.replicate.inexact_reason
    is_norm = nn.modules.batchnorm._BatchNorm
    if plan.batch.num_parts > 1 and any(isinstance(m, is_norm) for m in model.modules()):
        return "BatchNorm normalises each micro-batch by itself"
    return None


class _PlainLoop:
    """A plain training loop on the CPU."""

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[[Any, Any], Tensor],
        make_optimizer: MakeOptimizer,
        plan: Plan,
    ) -> None:
        self._is_double = plan.precision == "fp64"
        self._model = (model.double() if self._is_double else model).train()
        self._loss, self._plan = loss, plan
        trained = [p for p in self._model.parameters() if p.requires_grad]
        make = make_optimizer.own if isinstance(make_optimizer, WholeOptimizer) else make_optimizer
        self._optimizer = make(trained)

    def step(self, batch: MicroBatch, settings: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
        """Take one step and return its loss, and the gradient norm before clipping.

        Args:
            batch: the global batch.
            settings: for each parameter group, the settings that changed.
        """
        for group, changed in zip(self._optimizer.param_groups, settings, strict=True):
            group.update(changed)
        self._optimizer.zero_grad(set_to_none=True)
        loss = self._forward(batch)
        loss.backward()  # type: ignore[no-untyped-call]
        gradients = [p.grad for p in self._model.parameters() if p.grad is not None]
        dense = [g.coalesce().values() if g.is_sparse else g for g in gradients]
        norm = float(sum(float(g.double().norm()) ** 2 for g in dense)) ** 0.5
        if self._plan.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(self._model.parameters(), self._plan.clip_norm)
        self._optimizer.step()
        return float(loss.detach()), norm

    def is_random(self, batch: MicroBatch) -> str | None:
        """Return the reason why two passes give different losses; None if the losses are equal."""
        values = []
        state = {n: b.clone() for n, b in self._model.named_buffers()}
        for seed in (1, 2):
            torch.manual_seed(seed)
            with torch.no_grad():
                values.append(float(self._forward(batch)))
        for name, buffer in self._model.named_buffers():
            buffer.data.copy_(state[name])
        if abs(values[0] - values[1]) <= 1e-7 * abs(values[0]):
            return None
        return "the model draws random numbers in its forward pass"

    def _forward(self, batch: MicroBatch) -> Tensor:
        batch = batch.double() if self._is_double else batch
        # The model may modify the containers of its inputs, so it gets copies of them.
        inputs = map_tensors(batch.inputs, lambda tensor: tensor)
        low = self._plan.precision == "bf16"
        with torch.autocast("cpu", dtype=torch.bfloat16) if low else nullcontext():
            output = self._model(inputs)
        return self._loss(output, batch.targets)


def join_micro_batches(parts: Sequence[MicroBatch]) -> MicroBatch:
    """Concatenate micro-batches to one; tensors without a batch dim are those of the first."""
    first = parts[0]
    leaves = [tree_tensors((part.inputs, part.targets)) for part in parts]
    places = iter(range(len(leaves[0])))
    dims = first.row_dims()

    def joined(_: Tensor) -> Tensor:
        index = next(places)
        dim = dims[index]
        return leaves[0][index] if dim is None else torch.cat([row[index] for row in leaves], dim)

    return replace(first.map(joined), rows=sum(part.rows for part in parts), totals=None)


def plain_loss(loss: Loss) -> Callable[[Any, Any], Tensor]:
    """Return a function (output, targets) -> mean loss over a whole batch.

    It is the user's function, or torch's cross entropy for the task's own loss.
    """
    if isinstance(loss, (GlobalMeanLoss, MeanLoss)):
        return loss.fn
    if isinstance(loss, CrossEntropy):
        return lambda output, target: _cross_entropy(loss, output, target)
    return lambda output, target: loss(output, target) / max(loss.count(target), 1)


def _cross_entropy(settings: CrossEntropy, output: Any, target: Tensor) -> Tensor:
    """Return torch's cross entropy of the logits; with auxiliary heads, the task's weighted sum."""
    if not isinstance(output, Tensor):
        return CrossEntropy.__call__(settings, output, target) / max(settings.count(target), 1)
    logits = main_logits(output).float() if output.dtype == torch.bfloat16 else output
    if settings.class_dim == -1 and logits.dim() > 2:
        logits, target = logits.flatten(0, -2), target.flatten()
    return F.cross_entropy(
        logits,
        target,
        ignore_index=settings.ignore_index,
        label_smoothing=settings.label_smoothing,
    )
