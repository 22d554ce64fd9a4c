"""The temporary memory of an optimizer's step on the tensors that an engine gives it.

An engine may give the optimizer flat pieces of all parameters instead of the parameters. If the
step updates tensors one by one, it then makes temporary tensors as large as a piece, and not as the
largest parameter. If the step updates all tensors at once, its memory does not change. The class of
the optimizer, its options and the device decide between the two. So the step is run on fake tensors
of these shapes, and its memory is recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim import optimizer as torch_optimizer
from torch.utils._foreach_utils import _get_foreach_kernels_supported_devices
from torch.utils._python_dispatch import TorchDispatchMode

from bigtrain.machine.libraries import replaced
from bigtrain.memory.timeline import Span, Timeline
from bigtrain.memory.tracker import StorageTracker
from bigtrain.optim.update import MakeOptimizer
from bigtrain.tensors.fake_mode import FakeMode
from bigtrain.tensors.norms import local_norm

Shapes = Sequence[tuple[int, ...]]
"""The shapes of the tensors of one parameter group."""


_LATE = 1000.0
"""The number that optimizers get when they read the value of a fake tensor, usually a step count.

It is large, because the first steps of some optimizers (RAdam) need less memory than later steps,
and because products of betas that start at 1 would lead to a division by zero."""


class _ScalarNumbers(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Returns a number where an optimizer reads the value of a fake tensor, which has none.

    Args:
        optimizer: the optimizer whose step runs. For ASGD, the weight of the average at step
            `_LATE` is computed, because before step `t0` there is no average, and the step needs
            less memory.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._known = {
            id(optimizer.state[p]["mu"]): 1 / max(1.0, _LATE - group["t0"])
            for group in optimizer.param_groups
            for p in group["params"]
            if "t0" in group and "mu" in optimizer.state.get(p, ())
        }

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        del types
        if func is torch.ops.aten._local_scalar_dense.default:
            return self._known.get(id(args[0]), _LATE)
        return func(*args, **(kwargs or {}))


def fake_safe_optimizer(make_optimizer: MakeOptimizer, device_type: str = "cpu") -> MakeOptimizer:
    """Return a factory of optimizers whose step runs on fake tensors as on real tensors.

    Args:
        make_optimizer: the user's factory.
        device_type: the device type of the run. By default, torch's optimizers update all plain
            parameters on an accelerator at once, and do not count fake tensors as plain.
    """

    def make(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        optimizer = make_optimizer(parameters)
        plain = optimizer.step

        def step() -> None:
            with _ScalarNumbers(optimizer), _default_kernels(device_type):
                plain()

        optimizer.step = step  # type: ignore[assignment, method-assign]
        return optimizer

    return make


@contextmanager
def _default_kernels(device_type: str) -> Iterator[None]:
    """A context in which torch's optimizers choose their kernels as on this type of device."""
    known = _get_foreach_kernels_supported_devices()
    if device_type not in known:
        yield
        return
    types = [*torch_optimizer._foreach_supported_types, FakeTensor]
    kinds: dict[str, object] = {
        "_foreach_supported_types": types,
        # Without such a device, fake tensors are on the CPU: see `devices.tracing_device`.
        "_get_foreach_kernels_supported_devices": lambda: [*known, "cpu"],
    }
    with replaced(torch_optimizer, **kinds):
        yield


class StepMemory:
    """The memory of the optimizer's step on tensors other than the model's parameters.

    Args:
        make_optimizer: the user's factory.
        device: the device of the fake tensors.
        device_type: the device type of the run.
        options: the settings of each parameter group, without its parameters, as the user's
            function sets them.
        kind: the name of the optimizer's class.
    """

    def __init__(
        self,
        make_optimizer: MakeOptimizer,
        device: torch.device,
        device_type: str,
        options: Sequence[dict[str, Any]],
        kind: str,
    ) -> None:
        self.kind = kind
        self._make = fake_safe_optimizer(make_optimizer, device_type)
        self._device, self._device_type = device, device_type
        self._options = [dict(group) for group in options]
        self._known: dict[Any, Timeline | None] = {}
        self._known_norms: dict[Any, int] = {}

    def highest(self, pieces: Sequence[tuple[int, int]]) -> Timeline | None:
        """Return the memory of the step with the highest peak, if pieces are updated one by one.

        Args:
            pieces: (elements, index of the parameter group) of each flat fp32 piece.

        Returns:
            The timeline of that step; None if there are no pieces, or the optimizer fails for one.
        """
        largest: dict[int, int] = {}
        for elements, group in pieces:
            largest[group] = max(elements, largest.get(group, 0))
        groups = max(largest, default=-1) + 1
        timelines = []
        for group, elements in largest.items():
            shapes: list[list[tuple[int, ...]]] = [[] for _ in range(groups)]
            shapes[group] = [(elements,)]
            timelines.append(self.timeline(shapes))
        known = [timeline for timeline in timelines if timeline is not None]
        if not known or len(known) < len(timelines):
            return None
        return max(known, key=lambda timeline: timeline.peak().bytes)

    def __deepcopy__(self, memo: dict[int, object]) -> StepMemory:
        """Return this object: only its cache ever changes."""
        return self

    def timeline(
        self, groups: Sequence[Shapes], dtype: torch.dtype = torch.float32, *, normed: bool = True
    ) -> Timeline | None:
        """Return the temporary memory of a step, without parameters, gradients and state.

        Args:
            groups: for each parameter group, the shapes of its tensors.
            dtype: the dtype of the tensors and of their gradients.
            normed: whether the norm of the gradients is computed before the step.

        Returns:
            A timeline with one phase, `step`; None if there are no tensors, or the optimizer fails
            for them.
        """
        key = tuple(tuple(tuple(shape) for shape in group) for group in groups), dtype, normed
        if key not in self._known:
            try:
                self._known[key] = self._recorded(key[0], dtype, normed=normed)
            except Exception:  # noqa: BLE001 - the user's own optimizer
                self._known[key] = None
        return self._known[key]

    def norm_bytes(self, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype) -> int:
        """Return the most temporary bytes while the norm of gradients is computed.

        Args:
            shapes: the shapes of the gradients.
            dtype: the dtype of the gradients.
        """
        key = tuple(shapes), dtype
        if key not in self._known_norms:
            tracker, mode = self._fakes()
            with mode, tracker.behind(mode):
                gradients = [torch.empty(s, dtype=dtype, device=self._device) for s in shapes]
                begin = tracker.mark()
                local_norm(gradients, self._device_type)
                spans = tracker.timeline().spans
            made = tuple(s._replace(kind="temporary") for s in spans if s.birth > begin)
            self._known_norms[key] = Timeline(made, ((0, "step"),)).peak().bytes
        return self._known_norms[key]

    def _fakes(self) -> tuple[StorageTracker, FakeMode]:
        """Return a new tracker, and the mode in which tensors are fake."""
        of_cuda = self._device_type == "cuda" and self._device.type == "cpu"
        return StorageTracker(fake=True), FakeMode(of_cuda=of_cuda)

    def _recorded(
        self, groups: Sequence[Shapes], dtype: torch.dtype, *, normed: bool
    ) -> Timeline | None:
        if not any(groups):
            return None
        tracker, mode = self._fakes()
        with mode, tracker.behind(mode):
            pieces = [
                [nn.Parameter(torch.empty(s, dtype=dtype, device=self._device)) for s in shapes]
                for shapes in groups
            ]
            optimizer = self._optimizer(pieces)
            everything = list(chain.from_iterable(pieces))
            tracker.enter_phase("step")
            begin = tracker.clock
            for _ in range(2):  # the first step creates the state; the second one is recorded
                for piece in everything:
                    piece.grad = torch.empty_like(piece)
                begin = tracker.mark()
                if normed:
                    gradients = [p.grad for p in everything if p.grad is not None]
                    local_norm(gradients, self._device_type)
                optimizer.step()
                end = tracker.mark()
            timeline = tracker.timeline()
        spans = tuple(
            Span(s.nbytes, "temporary", s.birth - begin, min(s.death, end) - begin)
            for s in timeline.spans
            if begin < s.birth <= end and s.nbytes
        )
        return Timeline(spans, ((0, "step"),))

    def _optimizer(self, pieces: Sequence[Sequence[nn.Parameter]]) -> torch.optim.Optimizer:
        """Return the user's optimizer of these pieces, with the options of the groups."""
        optimizer = self._make(list(chain.from_iterable(pieces)))
        if len(self._options) == len(pieces):
            optimizer.param_groups[:] = [
                {**options, "params": list(members)}
                for options, members in zip(self._options, pieces, strict=True)
            ]
        return optimizer


def group_options(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return the options of each parameter group, without the parameters."""
    return [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
