"""A user's mean loss over the global batch, whichever counts its means divide by.

`loss_formula` finds the calls of the loss that average, and the divisor of each. Before the first
forward pass of a step, the divisors are counted on the targets of each micro-batch and added up
over the global batch. While the loss runs, its averages divide by these totals. So the loss of a
micro-batch is its contribution to the loss of the global batch, and contributions add up. This
holds for several means with different counts, and for a loss that the model itself computes in its
forward pass.
"""

from __future__ import annotations

import inspect
import operator
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from bigtrain.errors import ConfigError
from bigtrain.losses.chunked_cross_entropy import (
    HeadTargets,
    current_targets,
    head_targets,
    restored_targets,
)
from bigtrain.losses.loss import Loss, at_least_float32
from bigtrain.losses.loss_formula import Change, LossFormula, Place
from bigtrain.losses.loss_trace import IN_LOSS, changes_arguments, function_name
from bigtrain.tensors.tree import map_tensors, tree_tensors

MODEL = "model."
"""The prefix of the names of frames that are modules of the model."""


class CountedBatch(Protocol):
    """The attributes of a `data.MicroBatch` that are used here."""

    @property
    def inputs(self) -> Any:
        """See `MicroBatch.inputs`."""

    @property
    def targets(self) -> Any:
        """See `MicroBatch.targets`."""

    @property
    def count(self) -> int | float:
        """See `MicroBatch.count`."""

    @property
    def totals(self) -> tuple[float, ...] | None:
        """See `MicroBatch.totals`."""

    @property
    def padding(self) -> bool:
        """See `MicroBatch.padding`."""


AnyBatch = TypeVar("AnyBatch", bound=CountedBatch)
FindFormula = Callable[[Any], LossFormula]
"""Records the loss of a micro-batch and returns its formula; see `engine.run_loss.follow_loss`."""


class GlobalMeanLoss:
    """A user's mean loss of (output, target); a call returns one micro-batch's contribution to it.

    It is a `Loss` whose count is the number of rows. Outside of a `loss_scope` with totals, as in a
    validation, a call returns the batch's mean, multiplied by the number of rows of the batch.

    Args:
        fn: the user's function of (output, target).
        name: the name of `fn` in messages.
        formula: the formula of the first micro-batch.
        first: the first micro-batch.
        find: finds the formulas of micro-batches with other shapes or other branches.
    """

    def __init__(
        self,
        fn: Callable[[Any, Any], Any],
        name: str,
        formula: LossFormula,
        first: CountedBatch,
        find: FindFormula,
    ) -> None:
        self.fn, self.name = fn, name
        self._find = find
        self._first = formula
        self._formulas: dict[str, list[LossFormula]] = {_signature(first): [formula]}

    @property
    def layout(self) -> str:
        """The names of the totals, which must be the same on all ranks."""
        return self._first.layout

    @property
    def owners(self) -> frozenset[str]:
        """The modules of the model that compute means of the loss in their forward pass."""
        frames = self._first.frames - {IN_LOSS}
        return frozenset(frame.removeprefix(MODEL) for frame in frames)

    def count(self, target: Any) -> int:
        """Return the number of rows of a micro-batch with these targets."""
        leaves = tree_tensors(target)
        if leaves:
            return len(leaves[0]) if leaves[0].dim() else 1
        return len(target) if hasattr(target, "__len__") else 1

    def __call__(self, output: Any, target: Any, count: float | None = None) -> Tensor:
        """Return a micro-batch's contribution to the mean, times the rows of the global batch.

        Args:
            output: the output of the model.
            target: the targets of the micro-batch.
            count: the number of rows, which is used only without totals; None to count them.

        Raises:
            ConfigError: the user's function did not return one number.
            ConfigError: the user's function did not make the calls of its recording.
        """
        output = map_tensors(output, at_least_float32)
        scope = current_scope()
        if scope is None or scope.loss is not self:
            return self._checked(self.fn(output, target)) * (
                self.count(target) if count is None else count
            )
        scope.enter(IN_LOSS)
        try:
            value = self._checked(self.fn(output, target))
        finally:
            scope.leave()
        scope.check_all_seen()
        if scope.formula.shares_result:
            value = value * scope.share
        return value * scope.rows

    def _checked(self, value: Any) -> Tensor:
        if not isinstance(value, Tensor) or value.numel() != 1:
            got = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise ConfigError(
                f"model.loss: {self.name} returned {got}, and the mean as one number is needed. "
                "Return loss.mean()."
            )
        return at_least_float32(value.reshape(()))

    def with_totals(
        self, micro_batches: Sequence[AnyBatch], totals: Sequence[float] | None = None
    ) -> list[AnyBatch]:
        """Return the micro-batches of a step, each with the totals of the global batch.

        Args:
            micro_batches: the micro-batches of this rank.
            totals: the sums of `own_totals` over the ranks that have different samples; None for
                this rank's own.

        Raises:
            ConfigError: see `own_totals`.
        """
        sums = tuple(self.own_totals(micro_batches) if totals is None else totals)
        return [replace(cast(Any, batch), totals=sums) for batch in micro_batches]

    def own_totals(self, micro_batches: Sequence[CountedBatch]) -> list[float]:
        """Return the rows of this rank's micro-batches, then the sum of each divisor of the loss.

        Raises:
            ConfigError: a micro-batch's loss has other divisors than the first micro-batch's.
        """
        counted = [self._counts(batch) for batch in micro_batches if not batch.padding]
        sums = torch.zeros(self._first.width, dtype=torch.float64)
        if counted:  # this waits only once for the device of the targets
            sums = torch.stack(counted).sum(0).cpu()
        return [sum(float(batch.count) for batch in micro_batches), *sums.tolist()]

    def weight_of(self, micro_batch: CountedBatch) -> float:
        """Return the weight that each row of this batch has in the mean of a validation.

        If the loss has a single mean, a batch is weighted by the count of this mean. If it has
        several means, a batch is weighted by its rows.
        """
        if self._first.width != 1:
            return 1.0
        return float(self._counts(micro_batch)) / max(1.0, self.count(micro_batch.targets))

    def formula_of(self, micro_batch: CountedBatch) -> LossFormula:
        """Return the formula of a micro-batch, by its shapes and the branches of its loss.

        A formula that is not known is recorded, which takes two runs of the loss.

        Raises:
            ConfigError: the loss has other divisors than for the first micro-batch.
        """
        known = self._formulas.setdefault(_signature(micro_batch), [])
        if _has_no_values(micro_batch):  # a forecast: all variants need the same memory
            return known[0] if known else self._first
        for formula in known:
            if _guards_hold(formula, micro_batch):
                return formula
        formula = self._find(micro_batch)
        if formula.layout != self._first.layout:
            raise ConfigError(
                f"model.loss: {self.name} divides by {formula.layout or 'nothing'} in this "
                f"micro-batch, and by {self._first.layout or 'nothing'} in the first one. Let it "
                "compute the same means for every batch, or use bigtrain.MeanLoss(fn, "
                "count_of=lambda targets: ...)."
            )
        known.insert(0, formula)
        del known[_MOST_VARIANTS:]
        while len(self._formulas) > _MOST_SHAPES:
            self._formulas.pop(next(iter(self._formulas)))
        return formula

    def _counts(self, micro_batch: CountedBatch) -> Tensor:
        """Return the totals of one micro-batch, on the device of its targets."""
        formula = self.formula_of(micro_batch)
        values = _replayed(formula, micro_batch)
        device = next((tensor.device for tensor in values.values()), torch.device("cpu"))
        parts = []
        for total in formula.totals:
            if total.compute is None:
                parts.append(torch.tensor([total.static], dtype=torch.float64, device=device))
                continue
            needed = [
                values[node.number] if node.number in values else node.value.to(device)
                for node in total.needs
                if node.value is not None
            ]
            counted = total.compute(*needed).to(torch.float64).reshape(-1)
            parts.append(counted.to(device))
        return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64, device=device)


_MOST_SHAPES = 256
_MOST_VARIANTS = 8


def _signature(micro_batch: CountedBatch) -> str:
    both = (micro_batch.inputs, micro_batch.targets)
    return repr(map_tensors(both, lambda tensor: (tensor.dtype, tuple(tensor.shape))))


def _has_no_values(micro_batch: CountedBatch) -> bool:
    both = (micro_batch.inputs, micro_batch.targets)
    return any(isinstance(t, FakeTensor) or t.is_meta for t in tree_tensors(both))


def _batch_tensors(formula: LossFormula, micro_batch: CountedBatch) -> list[Tensor]:
    """Return the tensors of a micro-batch that correspond to those of the recording."""
    targets = tree_tensors(micro_batch.targets)
    if len(formula.inputs) == len(targets):
        return targets
    return [*tree_tensors(micro_batch.inputs), *targets]


def _replayed(formula: LossFormula, micro_batch: CountedBatch) -> dict[int, Tensor]:
    """Compute the nodes on which the totals and the branches depend, by node number."""
    tensors = _batch_tensors(formula, micro_batch)
    if any(changes_arguments(call.func) for call in formula.replayed):
        tensors = [tensor.clone() for tensor in tensors]  # the loss itself still has to change them
    values = {node.number: t for node, t in zip(formula.inputs, tensors, strict=True)}
    device = tensors[0].device if tensors else torch.device("cpu")
    with torch.no_grad():
        for call in formula.replayed:
            call.replay(values, device)
    return values


def _guards_hold(formula: LossFormula, micro_batch: CountedBatch) -> bool:
    if not formula.guards:
        return True
    values = _replayed(formula, micro_batch)
    return all(bool(values[node.number]) is expected for node, expected in formula.guards)


@dataclass
class LossScope:
    """The totals of the micro-batch whose loss is being computed, and the calls that use them."""

    loss: GlobalMeanLoss
    formula: LossFormula
    totals: Sequence[float]
    count: float

    def __post_init__(self) -> None:
        self._seen: set[Place] = set()
        self._frames: list[_Watch | None] = []

    @property
    def rows(self) -> float:
        """The rows of the global batch."""
        return self.totals[0]

    @property
    def share(self) -> float:
        """The fraction of the global batch's rows that are in this micro-batch."""
        return self.count / max(self.rows, 1)

    def enter(self, frame: str | None) -> None:
        """Start to watch the calls of a frame.

        Args:
            frame: the name of the frame; None to watch nothing until `leave` is called.
        """
        self._pause()
        watch = None if frame is None else _Watch(self, frame)
        self._frames.append(watch)
        if watch is not None:
            watch.__enter__()  # type: ignore[no-untyped-call]

    def leave(self) -> None:
        """End the frame that `enter` has started last, and resume the frame before it."""
        self._pause()
        self._frames.pop()
        if self._frames and self._frames[-1] is not None:
            self._frames[-1].__enter__()  # type: ignore[no-untyped-call]

    def _pause(self) -> None:
        if self._frames and self._frames[-1] is not None:
            self._frames[-1].__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def unwind(self) -> None:
        """End all frames that an exception has left open."""
        if self._frames:
            self._pause()
            self._frames.clear()

    def check_all_seen(self) -> None:
        """Check that every call that has to divide by a total was made.

        Raises:
            ConfigError: the loss did not make the calls of its recording.
        """
        if len(self._seen) < len(self.formula.changes):
            missing = next(p for p in self.formula.changes if p not in self._seen)
            raise ConfigError(
                f"model.loss: {self.loss.name} did not call {function_name(missing[2])} as it did "
                "when its means were found. Let it make the same calls for every batch, or use "
                "bigtrain.MeanLoss(fn, count_of=lambda targets: ...)."
            )

    def note(self, call_site: Place) -> None:
        """Note that a changed call was made, for `check_all_seen`."""
        self._seen.add(call_site)


class _Watch(TorchFunctionMode):
    """Changes the calls of one frame as the formula of the scope requires."""

    def __init__(self, scope: LossScope, frame: str) -> None:
        super().__init__()
        self._scope = scope
        self._changes: dict[Any, dict[int, tuple[Place, tuple[Change, ...]]]] = {}
        for call_site, changes in scope.formula.changes.items():
            if call_site[0] == frame:
                self._changes.setdefault(call_site[2], {})[call_site[3]] = call_site, changes
        self._calls: dict[Any, int] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        changes_of = self._changes.get(func)
        if changes_of is None:
            return func(*args, **kwargs)
        number = self._calls.get(func, 0)
        self._calls[func] = number + 1
        if number not in changes_of:
            return func(*args, **kwargs)
        call_site, changes = changes_of[number]
        self._scope.note(call_site)
        return _changed(self._scope, func, args, kwargs, changes)


def _changed(
    scope: LossScope, func: Any, args: Any, kwargs: Mapping[str, Any], changes: Sequence[Change]
) -> Any:
    """Make a call of the loss with the changes of the formula, and return its result."""
    totals = scope.totals[1:]
    leaves, spec = tree_flatten((args, dict(kwargs)))
    for change in changes:
        leaf = leaves[change.position] if change.position < len(leaves) else None
        if change.recipe is not None:
            statistic = change.recipe.of(totals)
            if not isinstance(leaf, Tensor):
                leaves[change.position] = statistic.item()
            else:  # a 0-dim tensor may stay on the host
                device = leaf.device if statistic.dim() else "cpu"
                leaves[change.position] = statistic.to(device, leaf.dtype)
        elif change.kind == "number":
            total = totals[change.total]
            leaves[change.position] = 1 / max(total, 1e-300) if change.inverse else total
        elif change.kind == "share":
            leaves[change.position] = _uncounted(partial(operator.mul, leaf, scope.share))
    args, kwargs = tree_unflatten(leaves, spec)
    divisor = next((c for c in changes if c.kind in ("mean", "loss")), None)
    if divisor is None:
        return func(*args, **kwargs)
    total = totals[divisor.total] or 1.0  # if the count is 0, the sum is 0, too
    if divisor.kind == "mean":
        summed = torch.sum(*args, **kwargs)
    elif func is F.ctc_loss:  # its mean first divides the loss of each row by the row's length
        summed = func(*args, **kwargs)
        total /= args[0].shape[1] if args[0].dim() == 3 else 1
    else:
        summed = _summed(func, args, kwargs)
    return _uncounted(lambda: summed / total)


def _uncounted(compute: Callable[[], Any]) -> Any:
    """Make a call that the user's code does not make, and mark it so that recorders skip it."""
    before, _state.apart = _state.apart, True
    try:
        return compute()
    finally:
        _state.apart = before


def is_apart() -> bool:
    """Whether this thread is making a call that the user's code does not make."""
    return _state.apart


def _summed(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
    """Call a loss of torch with reduction="sum"."""
    bound = inspect.signature(func).bind(*args, **kwargs)
    others = {k: v for k, v in bound.arguments.items() if k not in ("size_average", "reduce")}
    result: Tensor = func(**{**others, "reduction": "sum"})
    return result


class _ThreadState(threading.local):
    scope: LossScope | None = None
    apart: bool = False


_state = _ThreadState()


def current_scope() -> LossScope | None:
    """Return the scope that this thread has entered; None if there is none."""
    return _state.scope


@contextmanager
def loss_scope(loss: Loss, micro_batch: CountedBatch) -> Iterator[None]:
    """Set the targets and the divisors of a micro-batch, in this thread, inside of a `with` block.

    The block contains the forward pass of the micro-batch in training and the call of its loss.

    Args:
        loss: the loss. Divisors are set if it is a `GlobalMeanLoss`; for `ChunkedCrossEntropy`, see
            `head_targets`.
        micro_batch: the micro-batch. Without totals, no divisors are set.

    Raises:
        ConfigError: see `GlobalMeanLoss.formula_of`.
    """
    with ExitStack() as stack:
        stack.enter_context(head_targets(loss, micro_batch.targets))
        scope = None
        if isinstance(loss, GlobalMeanLoss) and micro_batch.totals is not None:
            formula = loss.formula_of(micro_batch)
            scope = LossScope(loss, formula, micro_batch.totals, micro_batch.count)
        stack.enter_context(_entered(scope))
        yield


@contextmanager
def _entered(scope: LossScope | None) -> Iterator[None]:
    before, _state.scope = _state.scope, scope
    try:
        yield
    finally:
        unwind_frames()
        _state.scope = before


def unwind_frames() -> None:
    """End the frames of modules that an exception has left open."""
    if _state.scope is not None:
        _state.scope.unwind()


ScopeState = tuple[HeadTargets | None, LossScope | None]


def scope_state() -> ScopeState:
    """Return the state that a recomputed forward pass needs; see `restored_scope`."""
    return current_targets(), current_scope()


@contextmanager
def restored_scope(state: ScopeState) -> Iterator[None]:
    """Restore a state that `scope_state` returned, inside of a `with` block."""
    targets, scope = state
    with restored_targets(targets), _entered(scope):
        yield


def watch_owners(loss: Loss, model: nn.Module) -> None:
    """Register hooks so that modules that compute means of the loss divide by the totals.

    If such a module calls other modules, calls inside of these are not watched: watching them would
    take time, and compiled code does not support it.

    Args:
        loss: the loss; nothing is done unless modules compute means of it.
        model: the user's model, before it is wrapped.
    """
    owners = loss.owners if isinstance(loss, GlobalMeanLoss) else frozenset()
    if not owners:
        return
    for name, module in model.named_modules():
        if any(isinstance(hook, _FrameHook) for hook in module._forward_pre_hooks.values()):
            continue
        owner = name in owners
        inside = any(name.startswith(f"{o}.") if o else bool(name) for o in owners)
        if owner or inside:
            module.register_forward_pre_hook(_FrameHook(name, owner, begins=True))
            module.register_forward_hook(_FrameHook(name, owner, begins=False), always_call=True)


class _FrameHook:
    """Starts or ends a module's frame; it is an object, not a closure, so that it can be copied."""

    def __init__(self, name: str, owner: bool, *, begins: bool) -> None:  # noqa: FBT001
        self._name, self._owner, self._begins = name, owner, begins

    def __call__(self, *_: Any) -> None:
        scope = _state.scope
        if scope is None:
            return
        if self._begins:
            scope.enter(MODEL + self._name if self._owner else None)
        else:
            scope.leave()
