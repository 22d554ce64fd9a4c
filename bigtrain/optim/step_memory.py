"""What an optimizer's step needs beside what it is given, on whatever tensors an engine hands it.

An engine may give the optimizer flat pieces of all parameters in place of the parameters. A step
that goes through them one by one then has a copy of all where one process has a copy of the
largest; one that works on all at once needs as much as before. Which of them an optimizer does
depends on its class, its options and the kind of device. So its own step is run, on fake tensors
of these shapes.
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
"""Of the tensors of one parameter group."""


_LATE = 1000.0
"""What optimizers are told where they read a number: a step count, most of all. Some (RAdam) begin
with steps that need less than later ones; and by products that are 1 at first they would divide."""


class _ScalarNumbers(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Answers where an optimizer reads a number from a tensor: fake ones have none.

    Args:
        optimizer: whose step it is. What ASGD weighs its average with is known: it has none before
            its step `t0`, and needs less until then.
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
    """Make the optimizer such that its step runs on fake tensors, as it runs on real ones.

    Args:
        make_optimizer: the user's.
        device_type: of the run. On an accelerator torch's optimizers work on all plain parameters
            at once unless they are told otherwise, and do not know fake tensors for such.
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
    """Let torch's optimizers choose among their kernels as they do on a kind of device."""
    known = _get_foreach_kernels_supported_devices()
    if device_type not in known:
        yield
        return
    types = [*torch_optimizer._foreach_supported_types, FakeTensor]
    kinds: dict[str, object] = {
        "_foreach_supported_types": types,
        # Without such a device its fakes are on the CPU: see `devices.tracing_device`.
        "_get_foreach_kernels_supported_devices": lambda: [*known, "cpu"],
    }
    with replaced(torch_optimizer, **kinds):
        yield


class StepMemory:
    """The optimizer's step on other tensors than the parameters of the model.

    Args:
        make_optimizer: the user's.
        device: of the fake tensors.
        device_type: of the run.
        options: the keys of each parameter group, without its parameters, as the user's function
            makes them of the whole parameters.
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
        self._options = [dict(one) for one in options]
        self._known: dict[Any, Timeline | None] = {}

    def highest(self, pieces: Sequence[tuple[int, int]]) -> Timeline | None:
        """Of flat fp32 pieces, each of which is updated by itself, the step that needs most.

        Args:
            pieces: of each its elements, and the number of its parameter group.
        """
        largest: dict[int, int] = {}
        for elements, group in pieces:
            largest[group] = max(elements, largest.get(group, 0))
        groups = max(largest, default=-1) + 1
        found = []
        for group, elements in largest.items():
            shapes: list[list[tuple[int, ...]]] = [[] for _ in range(groups)]
            shapes[group] = [(elements,)]
            found.append(self.timeline(shapes))
        known = [one for one in found if one is not None]
        if not known or len(known) < len(found):
            return None
        return max(known, key=lambda one: one.peak().bytes)

    def __deepcopy__(self, memo: dict[int, object]) -> StepMemory:
        """Nothing of it changes but what is known."""
        return self

    def timeline(
        self, groups: Sequence[Shapes], dtype: torch.dtype = torch.float32, *, normed: bool = True
    ) -> Timeline | None:
        """What a step makes and lets go, beside parameters, gradients and state that are there.

        Args:
            groups: of each parameter group the shapes that the optimizer is given.
            dtype: of what is updated and of its gradients.
            normed: whether the norm of the gradients is taken before.

        Returns:
            One phase, `step`; None where the optimizer does not run on such tensors.
        """
        key = tuple(tuple(tuple(shape) for shape in group) for group in groups), dtype, normed
        if key not in self._known:
            try:
                self._known[key] = self._recorded(key[0], dtype, normed=normed)
            except Exception:  # noqa: BLE001 - the user's own optimizer
                self._known[key] = None
        return self._known[key]

    def _recorded(
        self, groups: Sequence[Shapes], dtype: torch.dtype, *, normed: bool
    ) -> Timeline | None:
        if not any(groups):
            return None
        tracker = StorageTracker(fake=True)
        mode = FakeMode(of_cuda=self._device_type == "cuda" and self._device.type == "cpu")
        with mode, tracker.behind(mode):
            pieces = [
                [nn.Parameter(torch.empty(s, dtype=dtype, device=self._device)) for s in shapes]
                for shapes in groups
            ]
            optimizer = self._optimizer(pieces)
            everything = list(chain.from_iterable(pieces))
            tracker.enter_phase("step")
            begin = tracker.clock
            for _ in range(2):  # in the first one the state is made
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
        """The user's, with the groups' own options on these pieces."""
        optimizer = self._make(list(chain.from_iterable(pieces)))
        if len(self._options) == len(pieces):
            optimizer.param_groups[:] = [
                {**options, "params": list(own)}
                for options, own in zip(self._options, pieces, strict=True)
            ]
        return optimizer


def group_options(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The keys of each parameter group, without its parameters."""
    return [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
