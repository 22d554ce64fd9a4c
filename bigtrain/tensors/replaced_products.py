"""Record how a model uses its parameters if a technique replaces torch's linear function."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves


class ReplacedProducts:
    """Runs a fake model as ZeRO stage 3 would, and records how the model uses its parameters.

    Args:
        root: the model; None to record nothing, because linear layers are torch's.
        clock: returns the current tick.
    """

    def __init__(self, root: nn.Module | None, clock: Callable[[], int] = lambda: 0) -> None:
        self._modules = [] if root is None else list(root.modules())
        self._has_frozen = root is not None and not all(p.requires_grad for p in root.parameters())
        self._running: list[nn.Module] = []
        self._read: dict[nn.Module, dict[nn.Parameter, None]] = {}
        """By module, the parameters of other modules its code reads. ZeRO stage 3 gathers them
        with the module's own. Recorded only for models with frozen parameters."""
        self._called: dict[nn.Module, None] = {}
        self._clock = clock
        self._begins: dict[nn.Module, list[int]] = {}
        self._forward: dict[nn.Module, list[int]] = {}
        self._ends: dict[nn.Module, list[int]] = {}
        self.viewed: dict[nn.Parameter, list[int]] = {}
        """By parameter, the ticks at which its views that were saved for backward are freed."""

    @contextmanager
    def noted(self, functions: AbstractContextManager[object]) -> Iterator[None]:
        """Return the context of all passes; entering `functions` replaces torch functions."""
        with ExitStack() as entered:
            entered.enter_context(functions)
            if self._modules:
                entered.enter_context(self._noting_views())
            if self._has_frozen:
                entered.enter_context(self._noting_reads())
            for module in self._modules:
                module.register_forward_pre_hook(self._before)
                # Recomputation of a block ends by an exception in its last module.
                module.register_forward_hook(self._after, always_call=True)
            yield

    def gathered_together(self) -> Iterator[tuple[list[nn.Parameter], list[int], list[int]]]:
        """Yield the parameters of each called module, which ZeRO stage 3 gathers together.

        Yields:
            The parameters; the ticks at which the module's forward passes began and ended,
            alternating; the ticks at which a gradient of its output was ready.
        """
        for module in self._called:
            read = self._read_by_others()
            parameters = [p for p in self._used_by(module) if p not in read]
            if parameters:
                yield parameters, self._forward.get(module, []), self._begins.get(module, [])

    def gathered_uses(self) -> Iterator[tuple[list[nn.Parameter], list[int], list[int], list[int]]]:
        """Yield the parameters of each called module that are frozen or belong to other modules.

        Only the module's own backward pass determines how long these parameters are gathered.

        Yields:
            The parameters; the ticks at which the module's forward passes began and ended,
            alternating; the ticks at which a gradient of its output was ready; the ticks at which a
            gradient of its input was ready.
        """
        read = self._read_by_others()
        for module in self._called:
            frozen = [p for p in self._used_by(module) if not p.requires_grad and p not in read]
            parameters = [*frozen, *self._read.get(module, ())]
            if parameters:
                forward, begins = self._forward.get(module, []), self._begins.get(module, [])
                yield parameters, forward, begins, self._ends.get(module, [])

    def _read_by_others(self) -> set[nn.Parameter]:
        return {parameter for parameters in self._read.values() for parameter in parameters}

    def _used_by(self, module: nn.Module) -> Iterator[nn.Parameter]:
        """Yield the parameters of a module and of its children that are never called.

        nn.MultiheadAttention uses the weight of its output projection without calling that module.
        """
        yield from module.parameters(recurse=False)
        for child in module.children():
            if child not in self._called:
                yield from self._used_by(child)

    def _before(self, module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """Make each input a different object, as the technique's hooks do.

        nn.MultiheadAttention splits its weight unless query, key and value are one object.
        """
        self._called[module] = None
        self._running.append(module)
        self._forward.setdefault(module, []).append(self._clock())
        tensors = [value for value in inputs if isinstance(value, Tensor)]
        if self._has_frozen:
            # A view of each input, because other modules may have the same input.
            return tuple(
                self._noting_gradient(value, module) if isinstance(value, Tensor) else value
                for value in inputs
            )
        if len({id(value) for value in tensors}) == len(tensors):
            return inputs
        return tuple(
            value.view_as(value) if isinstance(value, Tensor) else value for value in inputs
        )

    def _after(self, module: nn.Module, _inputs: Any, output: Any) -> None:
        if module in self._running:
            del self._running[self._running.index(module) :]
        self._forward.setdefault(module, []).append(self._clock())
        begins = self._begins.setdefault(module, [])
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(lambda _: begins.append(self._clock()))  # type: ignore[no-untyped-call]

    def _noting_gradient(self, value: Tensor, module: nn.Module) -> Tensor:
        """Return a view; record the tick at which the module has computed the view's gradient."""
        view = value.view_as(value)
        if view.requires_grad:
            ends = self._ends.setdefault(module, [])
            view.register_hook(lambda _: ends.append(self._clock()))  # type: ignore[no-untyped-call]
        return view

    @contextmanager
    def _noting_reads(self) -> Iterator[None]:
        """Record each read of a parameter that none of the running modules has.

        peft's layers, for example, look at the dtype of the matrices of their adapters.
        """
        plain = nn.Module.__getattr__

        def read(module: nn.Module, name: str) -> Any:
            value = plain(module, name)
            if isinstance(value, nn.Parameter) and self._running and module not in self._running:
                reader = self._running[-1]
                if all(value is not parameter for parameter in self._used_by(reader)):
                    self._read.setdefault(reader, {})[value] = None
            return value

        nn.Module.__getattr__ = read  # type: ignore[method-assign]
        try:
            yield
        finally:
            nn.Module.__getattr__ = plain  # type: ignore[method-assign]

    def _noting_views(self) -> AbstractContextManager[None]:
        parameters = (p for module in self._modules for p in module.parameters(recurse=False))
        by_storage = {p.untyped_storage()._cdata: p for p in parameters}

        def note(tensor: Tensor) -> Tensor | _SavedView:
            owner = by_storage.get(tensor.untyped_storage()._cdata)
            if owner is not None and not _is_parameter_itself(tensor, owner):
                ends, saved_view = self.viewed.setdefault(owner, []), _SavedView(tensor)
                weakref.finalize(saved_view, lambda: ends.append(self._clock()))
                return saved_view
            return tensor

        return saved_tensors_hooks(note, _unpack)


@dataclass(eq=False)
class _SavedView:
    """A view that is saved for the backward pass; this object is freed when autograd drops it."""

    tensor: Tensor


def _unpack(saved: Tensor | _SavedView) -> Tensor:
    return saved.tensor if isinstance(saved, _SavedView) else saved


def _is_parameter_itself(saved: Tensor, owner: nn.Parameter) -> bool:
    """Whether a saved tensor is the parameter itself, whose storage the technique frees and fills.

    A view with other strides, such as a transposed weight, keeps the gathered storage alive.
    """
    same = saved.shape == owner.shape and saved.stride() == owner.stride()
    return bool(same and saved.storage_offset() == owner.storage_offset())
