"""Find the divisors of a user's loss, which are the counts over which its means average.

The loss is recorded on two batches without values (`losses.loss_trace`). From the two recordings
follows a formula (`losses.loss_formula`). It composes the loss of the global batch from the losses
of its micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from types import FunctionType, MethodType, ModuleType
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from bigtrain.data.loader import MicroBatch
from bigtrain.engine.run_loss.try_loss import try_formula, twice
from bigtrain.errors import ConfigError
from bigtrain.losses.global_mean import GlobalMeanLoss, watch_owners
from bigtrain.losses.loss import Loss, MeanLoss, at_least_float32
from bigtrain.losses.loss_formula import LossFormula, NoFormulaError, find_formula
from bigtrain.losses.loss_trace import CallRecorder, Trace, record_loss
from bigtrain.models.blueprint import kept_random_state
from bigtrain.ranks.context import RunContext
from bigtrain.tensors.fake import fake_model, meta_copy, run_without_numbers
from bigtrain.tensors.fake_mode import FakeMode
from bigtrain.tensors.tree import map_tensors, tree_tensors
from bigtrain.tracing.call_hooks import pretend_compiling

_MOST_INVENTED = 2**26
"""The most elements of outputs for which values are made up, if a loss reads values."""


def follow_loss(loss: Loss, model: nn.Module, example: MicroBatch, parts: int) -> Loss:
    """Return a loss whose means are over the global batch.

    Nothing runs on real outputs, no random state changes, and no memory stays allocated. Modules of
    the model that compute means of the loss get hooks.

    Args:
        loss: the user's loss. Only a `MeanLoss` without declared counts changes.
        model: a model on any device. A copy without values is run, if the model can be copied.
        example: a micro-batch with its targets.
        parts: the number of micro-batches of a global batch, over all ranks. With 1 the loss does
            not change.

    Returns:
        A `GlobalMeanLoss`, or `loss` if it does not change.

    Raises:
        ConfigError: the loss of a batch does not follow from the losses of its parts.
    """
    if not _is_to_follow(loss, parts):
        return loss
    skeleton = model
    with suppress(Exception):  # a model that cannot be copied is used itself
        skeleton = meta_copy(model)
    find = _Finder(loss, skeleton)
    try:
        formula = find(example)
    except NoFormulaError as error:
        raise ConfigError(_refusal(loss, str(error))) from None
    followed = GlobalMeanLoss(loss.fn, loss.name, formula, example, find)
    watch_owners(followed, model)
    return followed


def agree_on_loss(
    loss: Loss, model: nn.Module, example: MicroBatch | None, parts: int, context: RunContext
) -> Loss:
    """Call `follow_loss` on every rank, and check that the results are equal. Collective.

    Args:
        loss: see `follow_loss`.
        model: see `follow_loss`.
        example: see `follow_loss`; None to leave the loss unchanged.
        parts: see `follow_loss`.
        context: this rank's context.

    Raises:
        ConfigError: see `follow_loss`; or the loss divides by different counts on different ranks.
            It is raised on all ranks.
    """
    followed, refusal = loss, None
    if example is not None and _is_to_follow(loss, parts):
        try:
            followed = follow_loss(loss, model, example, parts)
        except ConfigError as error:
            refusal = str(error)
    # A `GlobalMeanLoss` was found before the ranks connected, so it is still to be compared.
    elif not isinstance(loss, GlobalMeanLoss):
        return loss
    layout = followed.layout if isinstance(followed, GlobalMeanLoss) else ""
    gathered = context.gather_objects((layout, refusal))
    everyone = context.broadcast_object(gathered) or []
    for answer in everyone:
        if answer is not None and answer[1] is not None:
            raise ConfigError(answer[1])
    layouts = sorted({answer[0] for answer in everyone if answer is not None})
    if len(layouts) > 1:
        raise ConfigError(
            f"model.loss divides by {layouts[0] or 'nothing'} on some ranks and by "
            f"{layouts[1]} on others. Let it compute the same means for every batch, or use "
            f"{_PASTE}."
        )
    return followed


def with_own_totals(loss: Loss, example: MicroBatch) -> MicroBatch:
    """Return an example with the counts of this loss, as if it were the global batch."""
    example = replace(example, count=loss.count(example.targets))
    if isinstance(loss, GlobalMeanLoss):
        (example,) = loss.with_totals([example])
    return example


def _is_to_follow(loss: Loss, parts: int) -> TypeGuard[MeanLoss]:
    return isinstance(loss, MeanLoss) and not loss.counts_surely and parts > 1


_PASTE = "bigtrain.MeanLoss(fn, count_of=lambda targets: ...)"


def _refusal(loss: MeanLoss, reason: str) -> str:
    return (
        f"model.loss: {loss.name}: the loss of a batch does not follow from those of its "
        f"micro-batches: {reason}. Return a sum of means over the batch; or declare the "
        f"counts, as in bigtrain.MeanLoss(fn, ignore_index=-100) or {_PASTE}; or let each "
        "micro-batch count by its rows, which gives other numbers than one process: "
        'bigtrain.MeanLoss(fn, count_of="rows").'
    )


class _Finder:
    """Finds the formula of a loss for a micro-batch.

    Args:
        loss: the user's loss.
        model: a copy of the model without values; the model itself if it cannot be copied.
    """

    def __init__(self, loss: MeanLoss, model: nn.Module) -> None:
        self._loss, self._model = loss, model

    def __call__(self, micro_batch: MicroBatch) -> LossFormula:
        """Return the formula; see `find_formula`.

        Raises:
            NoFormulaError: there is no formula, or the loss cannot be recorded.
        """
        on_cpu = micro_batch.to("cpu")
        batches = on_cpu, twice(on_cpu)
        with kept_random_state(), torch.no_grad(), pretend_compiling():
            try:
                outputs = self._outputs(batches)
                if outputs is not None:
                    with suppress(_LossInModelError):
                        return self._of_outputs(batches, outputs)
                return find_formula(*(self._record_batch(b, n) for n, b in enumerate(batches)))
            except NoFormulaError:
                raise
            except Exception as error:  # noqa: BLE001 - user code of any kind runs here
                reason = (str(error).splitlines() or [type(error).__name__])[0]
                raise NoFormulaError(f"it cannot be followed ({reason})") from None

    def _outputs(self, batches: tuple[MicroBatch, MicroBatch]) -> tuple[Any, Any] | None:
        """Return the model's outputs as fake tensors; None if it does not run on them."""

        def run(device: torch.device) -> tuple[Any, Any]:
            model = fake_model(self._model, device, double=False)
            first, second = (model(batch.fake(device).inputs) for batch in batches)
            return first, second

        try:
            return run_without_numbers(run)
        except Exception:  # noqa: BLE001 - user code of any kind runs here
            return None

    def _of_outputs(
        self, batches: tuple[MicroBatch, MicroBatch], outputs: tuple[Any, Any]
    ) -> LossFormula:
        """Return the formula of a loss that is computed from the model's outputs.

        Args:
            batches: a micro-batch, and a micro-batch with each of its rows twice.
            outputs: the model's outputs for both, as fake tensors.

        Raises:
            NoFormulaError: see `find_formula`; or a trial of the formula fails.
            _LossInModelError: the model's forward pass computes the loss.
        """
        pairs = enumerate(zip(batches, outputs, strict=True))
        try:
            traces = [self._loss_of(b, o, n) for n, (b, o) in pairs]
        except Exception:
            if sum(t.numel() for t in tree_tensors(outputs)) > _MOST_INVENTED:
                raise
            # The loss reads values, so outputs are made up; the second batch has each row twice.
            first = map_tensors(outputs[0], _invented)
            rows = batches[0].rows
            seconds = first, map_tensors(first, lambda t: _twice(t, rows))
            pairs = enumerate(zip(batches, seconds, strict=True))
            traces = [self._loss_of(b, o, n, fakes=False) for n, (b, o) in pairs]
        has_rows = any(
            a.shape != b.shape for a, b in zip(traces[0].outputs, traces[1].outputs, strict=True)
        )
        try:
            formula = find_formula(*traces)
        except NoFormulaError as error:
            if not has_rows or "output of the model without rows" in str(error):
                raise _LossInModelError from None
            raise
        try_formula(self._loss, self._of_real_outputs, batches, outputs)
        return formula

    def _of_real_outputs(
        self, batches: tuple[MicroBatch, MicroBatch], outputs: tuple[Any, Any]
    ) -> LossFormula:
        pairs = enumerate(zip(batches, outputs, strict=True))
        return find_formula(*(self._loss_of(b, o, n, fakes=False) for n, (b, o) in pairs))

    def _loss_of(self, batch: MicroBatch, output: Any, step: int, *, fakes: bool = True) -> Trace:
        def run(recorder: CallRecorder) -> Any:
            outputs = recorder.give(map_tensors(given_output, at_least_float32), known=False)
            return self._loss.fn(outputs, recorder.give(batch.targets, known=True))

        if not fakes:
            given_output = output
            with kept_modules(self._loss.fn):
                return record_loss(run, fakes=False, step=step)
        with kept_modules(self._loss.fn), FakeMode():
            cpu = torch.device("cpu")
            given_output = map_tensors(
                output, lambda t: torch.empty(t.shape, dtype=t.dtype, device=cpu)
            )
            return record_loss(run, fakes=True, step=step)

    def _record_batch(self, batch: MicroBatch, step: int) -> Trace:
        """Record the model's forward pass together with the loss."""

        def run(recorder: CallRecorder) -> Any:
            with recorder.frames(model):
                output = model(recorder.give(batch.inputs, known=True))
            target = recorder.give(batch.targets, known=True)
            return self._loss.fn(map_tensors(output, at_least_float32), target)

        with kept_modules(self._loss.fn), FakeMode():
            model = fake_model(self._model, torch.device("cpu"), double=False).train()
            return record_loss(run, fakes=True, step=step)


class _LossInModelError(Exception):
    """The model's forward pass computes the loss."""


@contextmanager
def kept_modules(fn: Any) -> Iterator[None]:
    """Restore tensors and attributes of the modules that a loss uses, at the end of a `with` block.

    During a recording the modules may store tensors without values, for instance in running means.

    Args:
        fn: the loss: a module, a function that refers to modules, a method, or a functools.partial.
    """
    modules = {id(m): m for module in _modules_of(fn) for m in module.modules()}
    places = [d for m in modules.values() for d in (m.__dict__, m._buffers, m._parameters)]
    before = [dict(namespace) for namespace in places]
    try:
        yield
    finally:
        for namespace, values in zip(places, before, strict=True):
            namespace.clear()
            namespace.update(values)


def _modules_of(fn: Any) -> Iterator[nn.Module]:
    """Yield the modules to which a loss refers by its closure, its globals or its object."""
    referred, seen = [fn], set[int]()
    for _ in range(_MOST_STEPS):
        following: list[Any] = []
        for value in referred:
            if id(value) in seen:
                continue
            seen.add(id(value))
            if isinstance(value, nn.Module):
                yield value
            else:
                following += _referred(value)
        referred = following


_MOST_STEPS = 4
"""The most references from a loss to a module: a lambda, a function, its closure, the module."""


def _referred(value: Any) -> list[Any]:
    """The objects that a function, a method, a partial or a callable object references."""
    if isinstance(value, partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, MethodType):
        return [value.__func__, value.__self__]
    if isinstance(value, FunctionType):
        if (value.__module__ or "").partition(".")[0] == "torch":
            return []
        named = [value.__globals__.get(name) for name in value.__code__.co_names]
        for cell in value.__closure__ or ():
            with suppress(ValueError):  # the cell has no content yet
                named.append(cell.cell_contents)
        return named
    if isinstance(value, (type, ModuleType)) or not hasattr(value, "__dict__"):
        return []
    values = list(vars(value).values())
    if callable(value):
        return [type(value).__call__, *values]
    return [referred for referred in values if isinstance(referred, nn.Module)]


def _twice(tensor: Tensor, rows: int) -> Tensor:
    if not tensor.dim() or tensor.shape[0] % max(rows, 1):
        return tensor
    return torch.cat([tensor, tensor])


def _invented(like: Tensor) -> Tensor:
    """Return made-up values for an output, equal in each call."""
    generator = torch.Generator().manual_seed(0)
    values = torch.rand(like.shape, generator=generator)
    return values.to(like.dtype) if like.is_floating_point() else torch.zeros_like(values).long()
