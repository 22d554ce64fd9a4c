"""Horovod's small interface, so that a script for Horovod runs after one changed import.

    import bigtrain.hvd as hvd      # was: import horovod.torch as hvd

The ranks are started by torchrun, mpirun, srun or `deepspeed`; `init` reads which one this is from
the launcher's variables. Exchanges go through torch.distributed: NCCL on GPUs, gloo on a CPU. What
Horovod negotiates between the ranks is fixed here: gradients go in buckets, those of the last
parameters first, each as soon as it is full and those before it are on their way. As everywhere in
bigtrain a rank that fails ends all ranks, and one that hangs is told of.

What is other than there: `Adasum` is refused, and `name` is taken and not used.

Source: Sergeev and Del Balso 2018, Horovod (arXiv 1802.05799), section 3 (Ring-AllReduce), section
5 (Tensor Fusion).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bigtrain.errors import ConfigError, LaunchError
from bigtrain.ranks.connect import connect
from bigtrain.ranks.context import RunContext
from bigtrain.ranks.launcher_env import detect_rank_info
from bigtrain.tensors.tree import map_tensors, tree_tensors
from bigtrain.units import MIB

Average: Literal["average"] = "average"
Sum: Literal["sum"] = "sum"
Adasum: Literal["adasum"] = "adasum"
"""Refused: it is here for scripts that offer it as an option."""
ReduceOp = Literal["average", "sum", "adasum"]

FUSION_BYTES = 64 * MIB
"""Gradients that are exchanged in one message, about: Horovod's default."""
_PATIENCE_S = 1800.0
"""Of an exchange, in which other ranks may wait for one that evaluates or writes."""


class Compression:
    """What gradients travel as."""

    none: ClassVar[torch.dtype | None] = None
    fp16: ClassVar[torch.dtype | None] = torch.float16


class _Session:
    """What `init` has opened; Horovod's interface has one for a process."""

    def __init__(self) -> None:
        self.context: RunContext | None = None
        self.closing = ExitStack()

    def opened(self) -> RunContext:
        if self.context is None:
            raise LaunchError("hvd: the ranks are not connected yet. Call hvd.init() first.")
        return self.context


_session = _Session()


def init() -> None:
    """Connect the ranks; a second call does nothing.

    Raises:
        ConfigError: the launcher's variables contradict each other, or GPUs are fewer than ranks.
        LaunchError: the ranks did not find each other.
    """
    if _session.context is None:
        placement = detect_rank_info(os.environ)
        connected = connect(placement, timeout=_PATIENCE_S)
        _session.context = _session.closing.enter_context(connected)


def shutdown() -> None:
    """Leave the other ranks; `init` may be called again."""
    _session.context = None
    _session.closing.close()


def is_initialized() -> bool:
    """Whether `init` has connected the ranks."""
    return _session.context is not None


def rank() -> int:
    """Number of this process among all, from 0."""
    return _session.opened().rank


def local_rank() -> int:
    """Number of this process among those of its node, from 0."""
    return _session.opened().local_rank


def size() -> int:
    """How many processes there are."""
    return _session.opened().world_size


def local_size() -> int:
    """How many of them are on this node."""
    return _session.opened().local_world_size


def allreduce(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
) -> Tensor:
    """Return the average of a tensor over the ranks, or the sum. Collective.

    Args:
        tensor: of the same shape on every rank; left as it is.
        average: the older way to say `op`: False for the sum.
        name: not used.
        op: `hvd.Average` or `hvd.Sum`.
    """
    return allreduce_(tensor.detach().clone(), average, name, op)


def allreduce_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,  # noqa: ARG001 - Horovod's
    op: ReduceOp | None = None,
) -> Tensor:
    """The same in place, see `allreduce`; returns its argument.

    Raises:
        ConfigError: `op` is Adasum, or an average of whole numbers is asked for.
    """
    averages = _averages(op or (Sum if average is False else Average))
    if averages and not tensor.dtype.is_floating_point:
        raise ConfigError(
            f"hvd.allreduce: an average of {tensor.dtype} would be cut off. "
            "Give op=hvd.Sum, or tensor.float()."
        )
    if size() > 1:
        dist.all_reduce(tensor)
        if averages:
            tensor /= size()
    return tensor


def broadcast_(tensor: Tensor, root_rank: int, name: str | None = None) -> Tensor:  # noqa: ARG001
    """Take over a rank's tensor, in place. Collective; returns its argument."""
    if size() > 1:
        dist.broadcast(tensor, root_rank)
    return tensor


def broadcast_object(obj: Any, root_rank: int = 0, name: str | None = None) -> Any:  # noqa: ARG001
    """Return a rank's object on every rank. Collective."""
    if size() == 1:
        return obj
    box = [obj if rank() == root_rank else None]
    dist.broadcast_object_list(box, root_rank, device=_session.opened().device)
    return box[0]


def broadcast_parameters(
    params: Mapping[str, Any] | Iterable[tuple[str, Any]], root_rank: int = 0
) -> None:
    """Take over a rank's weights, in place. Collective.

    Args:
        params: `model.state_dict()` or `model.named_parameters()`: as many on every rank.
        root_rank: whose.
    """
    named = params.items() if isinstance(params, Mapping) else params
    with torch.no_grad():
        for _, tensor in named:
            if isinstance(tensor, Tensor):
                broadcast_(tensor.detach(), root_rank)


def broadcast_optimizer_state(optimizer: torch.optim.Optimizer, root_rank: int = 0) -> None:
    """Take over a rank's optimizer state and options, as after a resume on that one. Collective.

    Args:
        optimizer: of the same parameters on every rank; the others' may have no state yet.
        root_rank: whose.
    """
    if size() == 1:
        return
    mine = optimizer.state_dict()
    here = _session.opened().device
    frame = map_tensors(mine, lambda t: _Frame(tuple(t.shape), t.dtype, t.device.type == "cpu"))
    frame = broadcast_object(frame if rank() == root_rank else None, root_rank)
    if rank() != root_rank:
        mine = _filled(frame, here)
    for tensor in tree_tensors(mine):
        broadcast_(tensor, root_rank)
    if rank() != root_rank:
        optimizer.load_state_dict(mine)


@dataclass(frozen=True)
class _Frame:
    """A tensor without its numbers."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    on_host: bool


def _filled(frame: Any, device: torch.device) -> Any:
    """The same structure with tensors to be written into."""
    if isinstance(frame, _Frame):
        place = torch.device("cpu") if frame.on_host else device
        return torch.empty(frame.shape, dtype=frame.dtype, device=place)
    if isinstance(frame, dict):
        return {key: _filled(value, device) for key, value in frame.items()}
    if isinstance(frame, (list, tuple)):
        return type(frame)(_filled(value, device) for value in frame)
    return frame


def DistributedOptimizer(  # noqa: N802, PLR0913 - Horovod's name and arguments
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, nn.Parameter]] | None = None,  # noqa: ARG001
    compression: torch.dtype | None = Compression.none,
    backward_passes_per_step: int = 1,
    op: ReduceOp = Average,
    gradient_predivide_factor: float = 1.0,
) -> Any:
    """Return the optimizer, whose gradients are from now on exchanged while they are computed.

    It is of a subclass of its own class, with `synchronize` and `skip_synchronize` beside: call
    these to clip the averaged gradients before `step`.

    Args:
        optimizer: of the same parameters, in the same order, on every rank.
        named_parameters: not used; parameters go in the optimizer's order.
        compression: `hvd.Compression.fp16` halves the bytes, and changes the numbers.
        backward_passes_per_step: backward passes whose gradients are added up before they are
            exchanged. Sums, not means, as in Horovod: divide the loss by it.
        op: `hvd.Average` or `hvd.Sum`, over the ranks.
        gradient_predivide_factor: what gradients are divided by before the sum over the ranks, and
            multiplied by afterwards.

    Raises:
        ConfigError: `op` is Adasum, or `backward_passes_per_step` is less than 1.
    """
    if backward_passes_per_step < 1:
        raise ConfigError(
            f"hvd.DistributedOptimizer: backward_passes_per_step={backward_passes_per_step}, and "
            "1 at least comes before a step. Use backward_passes_per_step=1."
        )
    scale = (size() if _averages(op) else 1) / gradient_predivide_factor
    kind = type(optimizer)
    vars(optimizer).pop("step", None)  # a scheduler's, made before: it would call the old class's
    optimizer.__class__ = type(kind.__name__, (_Exchanging, kind), {})
    wrapped = cast("_Exchanging", optimizer)
    wrapped.exchange = _GradientExchange(
        [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad],
        backward_passes_per_step,
        compression,
        before=gradient_predivide_factor,
        after=scale,
    )
    return wrapped


def _averages(op: ReduceOp) -> bool:
    if op == Adasum:
        raise ConfigError("hvd: Adasum is not here. Use op=hvd.Average or op=hvd.Sum.")
    return op == Average


class _Exchanging(torch.optim.Optimizer):
    """What `DistributedOptimizer` adds to an optimizer's class."""

    exchange: _GradientExchange

    def synchronize(self) -> None:
        """Wait until all gradients are exchanged. Collective."""
        self.exchange.finish()

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Step inside the `with` block without it: `synchronize` was called before."""
        self.exchange.skipped = True
        try:
            yield
        finally:
            self.exchange.skipped = False

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Exchange what is left, and step."""
        if closure is not None:
            raise ConfigError(
                "hvd: step(closure) computes gradients that nobody has exchanged yet. Go backward "
                "first, then call step()."
            )
        if not self.exchange.skipped:
            self.exchange.finish()
        return super().step()


class _GradientExchange:
    """Sums gradients over the ranks in buckets, all ranks in one order.

    Args:
        parameters: in the optimizer's order.
        passes: backward passes of a step.
        travels_as: what gradients are converted to on their way; None for as they are.
        before: what they are divided by before the sum.
        after: what the sum is divided by.
    """

    skipped = False

    def __init__(
        self,
        parameters: list[nn.Parameter],
        passes: int,
        travels_as: torch.dtype | None,
        *,
        before: float,
        after: float,
    ) -> None:
        self._passes, self._travels_as = passes, travels_as
        self._before, self._after = before, after
        self._buckets: list[list[nn.Parameter]] = []
        filled = 0
        for parameter in reversed(parameters):
            fits = self._buckets and self._buckets[-1][0].dtype == parameter.dtype
            if not fits or filled + parameter.nbytes > FUSION_BYTES:
                self._buckets.append([])
                filled = 0
            self._buckets[-1].append(parameter)
            filled += parameter.nbytes
        self._number = {p: n for n, bucket in enumerate(self._buckets) for p in bucket}
        self._begin()
        for parameter in parameters if size() > 1 else ():
            hook: Any = parameter.register_post_accumulate_grad_hook
            hook(self._arrived)

    def _begin(self) -> None:
        self._seen = dict.fromkeys(self._number, 0)
        self._missing = [len(bucket) for bucket in self._buckets]
        self._open: list[tuple[list[nn.Parameter], Tensor, Any]] = []
        self._is_over = False

    def _arrived(self, parameter: nn.Parameter) -> None:
        if self._is_over:  # the first gradient of the next step
            self._begin()
        self._seen[parameter] += 1
        if self._seen[parameter] > self._passes:
            raise ConfigError(
                f"hvd: a parameter has a gradient for the {self._seen[parameter]}. time since the "
                f"last step, and backward_passes_per_step={self._passes}. Call step(), or give "
                "DistributedOptimizer more backward_passes_per_step."
            )
        if self._seen[parameter] == self._passes:
            self._missing[self._number[parameter]] -= 1
            while len(self._open) < len(self._buckets) and not self._missing[len(self._open)]:
                self._send_next()

    def _send_next(self) -> None:
        bucket = self._buckets[len(self._open)]
        for parameter in bucket:
            if parameter.grad is None:  # not on this rank; another one may have some
                parameter.grad = torch.zeros_like(parameter)
        flat = torch.cat([p.grad.reshape(-1) for p in bucket if p.grad is not None])
        flat = flat if self._before == 1.0 else flat.div_(self._before)
        flat = flat if self._travels_as is None else flat.to(self._travels_as)
        self._open.append((bucket, flat, dist.all_reduce(flat, async_op=True)))

    def finish(self) -> None:
        """Send what no backward pass has completed, wait for all, and put them back. Collective."""
        if size() == 1 or self._is_over:
            return
        while len(self._open) < len(self._buckets):
            self._send_next()
        for bucket, flat, work in self._open:
            work.wait()
            summed = flat if self._travels_as is None else flat.to(bucket[0].dtype)
            summed /= self._after
            parts = torch.split(summed, [parameter.numel() for parameter in bucket])
            for parameter, part in zip(bucket, parts, strict=True):
                if parameter.grad is not None:
                    parameter.grad.copy_(part.view_as(parameter.grad))
        self._open.clear()
        self._is_over = True
