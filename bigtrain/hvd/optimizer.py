"""An optimizer whose gradients are exchanged while they are computed.

Horovod negotiates the order of exchanges between ranks. Here the order is fixed: gradients are sent
in buckets, the last parameters first. A bucket is sent when all its gradients are computed and all
earlier buckets were sent.

Source: Sergeev and Del Balso 2018, Horovod (arXiv 1802.05799), section 3 (Ring-AllReduce), section
5 (Tensor Fusion).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from bigtrain.errors import ConfigError
from bigtrain.hvd.channel import Handle
from bigtrain.hvd.compression import Compression, Compressor, compressor_of
from bigtrain.hvd.process_sets import ProcessSet, global_process_set, set_of
from bigtrain.hvd.reductions import (
    Average,
    ReduceOp,
    checked_op,
    sparse_allreduce_async,
    start_reduction,
)
from bigtrain.units import MIB

FUSION_BYTES = 64 * MIB
"""The approximate bytes of gradients in one message, which are Horovod's default."""
_ALL = global_process_set


def DistributedOptimizer(  # noqa: N802, PLR0913 - Horovod's name and arguments
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, nn.Parameter]] | None = None,
    compression: Any = Compression.none,
    backward_passes_per_step: int = 1,
    op: ReduceOp = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = _ALL,
) -> Any:
    """Change an optimizer so that gradients are exchanged while they are computed, and return it.

    Its class becomes a subclass with the methods `synchronize`, `skip_synchronize` and
    `set_backward_passes_per_step`. To clip the averaged gradients, call `synchronize`, clip them,
    and call `step` inside of `with optimizer.skip_synchronize()`.

    Args:
        optimizer: an optimizer of the same parameters, in the same order, on every rank.
        named_parameters: pairs of a name and a parameter; the names are used in messages. The order
            of the exchanges is that of the optimizer's parameters.
        compression: a compressor. `hvd.Compression.fp16` halves the bytes and rounds gradients.
        backward_passes_per_step: the number of backward passes whose gradients are added up before
            they are exchanged. They are not averaged, as in Horovod: divide the loss by the number.
        op: the reduction over ranks; see `hvd.allreduce`.
        gradient_predivide_factor: gradients are divided by it before the sum over the ranks, and
            multiplied by it afterwards.
        num_groups: the older form of `groups`, for a number of messages.
        groups: the number of messages, or lists of the parameters that share a message. By default
            messages have about 64 MiB.
        sparse_as_dense: whether to exchange sparse gradients as dense ones.
        process_set: the ranks that take part; the others step with their local gradients.

    Raises:
        ConfigError: `op` is Adasum or not known, `backward_passes_per_step` is less than 1,
            `gradient_predivide_factor` is used without an average, names are missing or occur
            twice, `groups` is neither a number above 0 nor lists of parameters, or the optimizer
            is wrapped already.
    """
    if backward_passes_per_step < 1:
        raise ConfigError(
            f"hvd.DistributedOptimizer: backward_passes_per_step={backward_passes_per_step}, and "
            "a step needs at least 1 backward pass. Use backward_passes_per_step=1."
        )
    chosen = checked_op(op, where="DistributedOptimizer")
    if gradient_predivide_factor != 1.0 and chosen != Average:
        raise ConfigError(
            f"hvd.DistributedOptimizer: gradient_predivide_factor={gradient_predivide_factor} with "
            f"op={chosen} would change the numbers. Use it with op=hvd.Average."
        )
    names = _names(optimizer, named_parameters)
    trained = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    kind = type(optimizer)
    if issubclass(kind, _Exchanging):
        raise ConfigError(
            "hvd.DistributedOptimizer: the optimizer is one already. Wrap it once, on every rank."
        )
    # A scheduler that was made earlier has set `step` on the instance, bound to the old class.
    vars(optimizer).pop("step", None)
    optimizer.__class__ = type(kind.__name__, (_Exchanging, kind), {})
    wrapped = cast("_Exchanging", optimizer)
    wrapped.exchange = _GradientExchange(
        _Buckets(trained, names, groups if groups is not None else num_groups or None),
        backward_passes_per_step,
        compressor_of(compression),
        chosen,
        factor=gradient_predivide_factor,
        dense=sparse_as_dense,
        process_set=set_of(process_set),
        groups=optimizer.param_groups,
    )
    return wrapped


def _names(
    optimizer: torch.optim.Optimizer, named: Iterable[tuple[str, nn.Parameter]] | None
) -> dict[Tensor, str]:
    """Return the names of an optimizer's parameters; refuse missing and equal names."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if named is None:
        return {p: f"parameter {n}" for n, p in enumerate(parameters)}
    pairs = list(named)
    for pair in pairs:
        if not (isinstance(pair, tuple) and len(pair) == 2):
            raise ConfigError(
                f"hvd.DistributedOptimizer: named_parameters has {type(pair).__name__} in it, and "
                "pairs are needed. Give named_parameters=model.named_parameters()."
            )
    seen: set[str] = set()
    for name, _ in pairs:
        if name in seen:
            raise ConfigError(
                f"hvd.DistributedOptimizer: named_parameters has {name!r} twice. Give each "
                "parameter a different name, as model.named_parameters() does."
            )
        seen.add(name)
    names: dict[Tensor, str] = {p: name for name, p in pairs}
    missing = [n for n, p in enumerate(parameters) if p not in names]
    if missing:
        raise ConfigError(
            f"hvd.DistributedOptimizer: {len(missing)} of the optimizer's {len(parameters)} "
            f"parameters are not in named_parameters, the first is number {missing[0]} of shape "
            f"{list(parameters[missing[0]].shape)}. Name all of them, or leave named_parameters "
            "out."
        )
    return names


class _Exchanging(torch.optim.Optimizer):
    """The methods that `DistributedOptimizer` adds to an optimizer's class."""

    exchange: _GradientExchange

    @property
    def backward_passes_per_step(self) -> int:
        """The number of backward passes before a step."""
        return self.exchange.passes

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Set the number of backward passes per step; call it between steps.

        Raises:
            ConfigError: the number is less than 1.
        """
        if passes < 1:
            raise ConfigError(
                f"hvd: set_backward_passes_per_step({passes}), and a step needs at least 1 "
                "backward pass."
            )
        self.exchange.passes = passes

    def synchronize(self) -> None:
        """Exchange the remaining gradients, and wait until all are reduced. Collective."""
        self.exchange.finish()

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """In a `with` block, let `step` skip `synchronize`: the script has called it already."""
        self.exchange.skipped = True
        try:
            yield
        finally:
            self.exchange.skipped = False

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Call `synchronize`, unless it is to be skipped, and step. Collective.

        Args:
            closure: has to be None.

        Raises:
            ConfigError: there is a closure.
        """
        if closure is not None:
            raise ConfigError(
                "hvd: step(closure) computes gradients that are not exchanged between the ranks. "
                "Call backward() first, then step()."
            )
        if not self.exchange.skipped:
            self.exchange.finish()
        return super().step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients.

        Raises:
            ConfigError: there are gradients that are not exchanged yet.
        """
        if self.exchange.is_open():
            raise ConfigError(
                "hvd: zero_grad() between backward() and step() would drop gradients that are on "
                "their way to the other ranks. Call it after step(), or before backward()."
            )
        super().zero_grad(set_to_none)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state. Gradients that were accumulated but not exchanged are dropped."""
        self.exchange.forget()
        super().load_state_dict(state_dict)


class _Buckets:
    """Assigns gradients to messages, in the same order on all ranks: the last parameters first.

    Args:
        parameters: the parameters, in the optimizer's order.
        names: the names of the parameters.
        groups: see `DistributedOptimizer`.
    """

    def __init__(
        self,
        parameters: list[Tensor],
        names: dict[Tensor, str],
        groups: int | Sequence[Sequence[Tensor]] | None,
    ) -> None:
        self.names = names
        self.buckets: list[list[Tensor]] = []
        backward = list(reversed(parameters))
        for chosen in _grouped(backward, groups):
            self._fill(chosen, bucket_limit(groups))
        self.number = {p: n for n, bucket in enumerate(self.buckets) for p in bucket}

    def _fill(self, parameters: list[Tensor], limit: float) -> None:
        bucket: list[Tensor] = []
        filled = 0
        for parameter in parameters:
            fits = bucket and _kind(bucket[0]) == _kind(parameter)
            if not fits or filled + parameter.nbytes > limit:
                bucket = []
                self.buckets.append(bucket)
                filled = 0
            bucket.append(parameter)
            filled += parameter.nbytes

    def name(self, number: int) -> str:
        """Return the name of a bucket, for messages."""
        first, *others = self.buckets[number]
        rest = f" and {len(others)} more" if others else ""
        return f"gradient of {self.names[first]}{rest}"


def bucket_limit(groups: Any) -> float:
    """Return the most bytes of a bucket: infinite if the script chooses the groups.

    Args:
        groups: see `DistributedOptimizer`.
    """
    return FUSION_BYTES if groups is None else float("inf")


def _kind(parameter: Tensor) -> tuple[torch.dtype, torch.device]:
    return parameter.dtype, parameter.device


def _grouped(parameters: list[Tensor], groups: Any) -> list[list[Tensor]]:
    """Return the parameters divided into groups, which are ordered by their first parameter."""
    if groups is None:
        return [parameters]
    if type(groups) is int and groups > 0:
        count = min(groups, len(parameters))
        share, rest = divmod(len(parameters), count) if count else (0, 0)
        ends = [n * share + min(n, rest) for n in range(count + 1)]
        return [parameters[a:b] for a, b in zip(ends[:-1], ends[1:], strict=True)]
    if not isinstance(groups, (list, tuple)):
        raise ConfigError(
            f"hvd.DistributedOptimizer: groups={groups!r}, and a number above 0 or lists of "
            "parameters are needed. Leave it out for messages of 64 MiB."
        )
    group_of: dict[Tensor, int] = {}
    for n, group in enumerate(groups):
        for parameter in group:
            if not isinstance(parameter, Tensor):
                raise ConfigError(
                    f"hvd.DistributedOptimizer: groups[{n}] has {type(parameter).__name__} in it. "
                    "Give lists of parameters."
                )
            if parameter in group_of:
                raise ConfigError(
                    f"hvd.DistributedOptimizer: a parameter is in groups[{group_of[parameter]}] "
                    f"and in groups[{n}]. Put it into one of them."
                )
            group_of[parameter] = n
    grouped: dict[Any, list[Tensor]] = {}
    for parameter in parameters:
        grouped.setdefault(group_of.get(parameter, parameter), []).append(parameter)
    return list(grouped.values())


class _GradientExchange:
    """Reduces gradients over the ranks in buckets, all ranks in one order.

    Args:
        buckets: the parameters whose gradients share a message.
        passes: the number of backward passes per step.
        compressor: converts gradients for the exchange.
        op: the reduction.
        factor: gradients are divided by it before the sum, and multiplied by it afterwards.
        dense: whether sparse gradients are exchanged as dense ones.
        process_set: the ranks that take part.
        groups: the optimizer's parameter groups, which are checked for added parameters at each
            step.
    """

    skipped = False

    def __init__(
        self,
        buckets: _Buckets,
        passes: int,
        compressor: Compressor,
        op: ReduceOp,
        *,
        factor: float,
        dense: bool,
        process_set: ProcessSet,
        groups: Sequence[dict[str, Any]],
    ) -> None:
        self.passes, self._groups = passes, groups
        self._buckets, self._compressor, self._op = buckets, compressor, op
        self._factor, self._dense, self._set = factor, dense, process_set
        self._sparse: dict[Tensor, int] = {}
        self._takes_part = process_set.included() is not False
        self._alone = not self._takes_part or process_set.channel().link.size == 1
        self.forget()
        for parameter in () if self._alone else buckets.number:
            hook: Any = parameter.register_post_accumulate_grad_hook
            hook(self._arrived)

    def forget(self) -> None:
        """Reset the record of this step's gradients, and begin the next step."""
        self._seen = dict.fromkeys(self._buckets.number, 0)
        self._missing = [len(bucket) for bucket in self._buckets.buckets]
        self._open: list[tuple[list[Tensor], list[tuple[Handle, Any]]]] = []
        self._is_over = False

    def is_open(self) -> bool:
        """Whether this step has gradients that are not exchanged yet."""
        return not self._is_over and any(self._seen.values())

    def _arrived(self, parameter: Tensor) -> None:
        if self._is_over:  # the first gradient of the next step
            self.forget()
        self._seen[parameter] += 1
        if self._seen[parameter] > self.passes:
            raise ConfigError(
                f"hvd: {self._buckets.names[parameter]} has a gradient for the "
                f"{self._seen[parameter]}. time since the last step, and "
                f"backward_passes_per_step={self.passes}. Call step(), or give "
                "DistributedOptimizer more backward_passes_per_step."
            )
        if self._seen[parameter] == self.passes:
            self._missing[self._buckets.number[parameter]] -= 1
            count = len(self._buckets.buckets)
            while len(self._open) < count and not self._missing[len(self._open)]:
                self._send_next()

    def _send_next(self) -> None:
        number = len(self._open)
        bucket = self._buckets.buckets[number]
        name = self._buckets.name(number)
        dense, sparse = [], []
        for parameter in bucket:
            if parameter.grad is not None and parameter.grad.is_sparse:
                self._sparse[parameter] = parameter.grad.sparse_dim()
            if parameter in self._sparse and not self._dense:
                sparse.append(parameter)
            else:
                dense.append(parameter)
        handles: list[tuple[Handle, Any]] = []
        sparse_names = ", ".join(self._buckets.names[p] for p in sparse)
        with torch.no_grad():
            if dense:
                flat = torch.cat([self._dense_gradient(p).reshape(-1) for p in dense])
                packed, ctx = self._compressor.compress(flat)
                handle = start_reduction(
                    *(packed, self._op, self._set),
                    name=name,
                    before=1.0 / self._factor,
                    after=self._factor,
                    detail=f"sparse gradients: {sparse_names}" if sparse_names else "",
                )
                handles.append((handle, ctx))
            for parameter in sparse:
                parameter_name = self._buckets.names[parameter]
                gradient = self._sparse_gradient(parameter)
                begun = sparse_allreduce_async(gradient, parameter_name, self._op, self._set)
                handles.append((begun, None))
        self._open.append(([*dense, *sparse], handles))

    def _dense_gradient(self, parameter: Tensor) -> Tensor:
        if parameter.grad is None:  # another rank may have a gradient
            parameter.grad = torch.zeros_like(parameter)
        gradient = parameter.grad
        return gradient.to_dense() if gradient.is_sparse else gradient

    def _sparse_gradient(self, parameter: Tensor) -> Tensor:
        if parameter.grad is None:
            dims = self._sparse[parameter]
            inner = parameter.shape[dims:]
            parameter.grad = torch.sparse_coo_tensor(
                torch.empty((dims, 0), dtype=torch.int64, device=parameter.device),
                parameter.new_empty((0, *inner)),
                parameter.shape,
                check_invariants=False,
            )
        return parameter.grad

    def finish(self) -> None:
        """Send the remaining buckets, wait for all, and store the reduced gradients. Collective."""
        if self._alone or self._is_over:
            return
        self._refuse_later_ones()
        while len(self._open) < len(self._buckets.buckets):
            self._send_next()
        with torch.no_grad():
            for parameters, handles in self._open:
                self._put_back(parameters, handles)
        self._open.clear()
        self._is_over = True

    def _refuse_later_ones(self) -> None:
        """Refuse gradients of parameters that were added or unfrozen too late to be reduced."""
        for n, group in enumerate(self._groups):
            for parameter in group["params"]:
                if parameter.grad is not None and parameter not in self._buckets.number:
                    name = self._buckets.names.get(parameter, f"a parameter of group {n}")
                    raise ConfigError(
                        f"hvd: {name} of shape {list(parameter.shape)} was not trained when "
                        "DistributedOptimizer was called, and its gradient would not be averaged. "
                        "Add groups and set requires_grad before that; then call it."
                    )

    def _put_back(self, parameters: list[Tensor], handles: list[tuple[Handle, Any]]) -> None:
        waiting = list(handles)
        dense = [p for p in parameters if p not in self._sparse or self._dense]
        if dense:
            handle, ctx = waiting.pop(0)
            flat = self._compressor.decompress(handle.result(), ctx)
            parts = torch.split(flat, [parameter.numel() for parameter in dense])
            for parameter, part in zip(dense, parts, strict=True):
                gradient = part.view_as(parameter)
                if parameter in self._sparse:
                    parameter.grad = gradient.to_sparse(self._sparse[parameter])
                elif parameter.grad is not None:
                    parameter.grad.copy_(gradient)
        for parameter, (handle, _) in zip(parameters[len(dense) :], waiting, strict=True):
            parameter.grad = handle.result()
