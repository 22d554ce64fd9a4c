"""What a technique's own linear layers keep of a model, seen while it runs on fake tensors."""

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
    """Has a model run as under the technique, and notes how its parameters are used.

    Args:
        root: whose forward pass is run; None where the products are torch's.
        clock: tells the time.
    """

    def __init__(self, root: nn.Module | None, clock: Callable[[], int] = lambda: 0) -> None:
        self._modules = [] if root is None else list(root.modules())
        self._called: dict[nn.Module, None] = {}
        self._clock = clock
        self._begins: dict[nn.Module, list[int]] = {}
        self._forward: dict[nn.Module, list[int]] = {}
        self.viewed: dict[nn.Parameter, list[int]] = {}
        """Those of which a view is saved for the backward pass, and the times at which one goes."""

    @contextmanager
    def noted(self, functions: AbstractContextManager[object]) -> Iterator[None]:
        """To be entered around all passes, with the technique's functions in torch's place."""
        with ExitStack() as entered:
            entered.enter_context(functions)
            if self._modules:
                entered.enter_context(self._noting_views())
            for module in self._modules:
                module.register_forward_pre_hook(self._before)
                # A block that is computed again stops in its last module.
                module.register_forward_hook(self._after, always_call=True)
            yield

    def together(self) -> Iterator[tuple[list[nn.Parameter], list[int], list[int]]]:
        """The parameters of each module: they are gathered at once, when it is gone through.

        With them the times at which its forward passes began and ended, in turn, and those at which
        a gradient of its output was there.
        """
        for module in self._called:
            parameters = list(self._used_by(module))
            if parameters:
                yield parameters, self._forward.get(module, []), self._begins.get(module, [])

    def _used_by(self, module: nn.Module) -> Iterator[nn.Parameter]:
        """Its own, and those of modules in it that it does not call, as attention's last one."""
        yield from module.parameters(recurse=False)
        for child in module.children():
            if child not in self._called:
                yield from self._used_by(child)

    def _before(self, module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """Hand on no tensor twice, as its hooks do: attention goes by that, and cuts its matrix."""
        self._called[module] = None
        self._forward.setdefault(module, []).append(self._clock())
        tensors = [one for one in inputs if isinstance(one, Tensor)]
        if len({id(one) for one in tensors}) == len(tensors):
            return inputs
        return tuple(one.view_as(one) if isinstance(one, Tensor) else one for one in inputs)

    def _after(self, module: nn.Module, _inputs: Any, output: Any) -> None:
        self._forward.setdefault(module, []).append(self._clock())
        begins = self._begins.setdefault(module, [])
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(lambda _: begins.append(self._clock()))  # type: ignore[no-untyped-call]

    def _noting_views(self) -> AbstractContextManager[None]:
        parameters = (p for module in self._modules for p in module.parameters(recurse=False))
        by_storage = {p.untyped_storage()._cdata: p for p in parameters}

        def note(tensor: Tensor) -> Tensor | _Kept:
            owner = by_storage.get(tensor.untyped_storage()._cdata)
            if owner is not None and not _lies_as(tensor, owner):
                ends, kept = self.viewed.setdefault(owner, []), _Kept(tensor)
                weakref.finalize(kept, lambda: ends.append(self._clock()))
                return kept
            return tensor

        return saved_tensors_hooks(note, _given_back)


@dataclass(eq=False)
class _Kept:
    """A view that is saved for the backward pass; it goes when that has come by."""

    tensor: Tensor


def _given_back(saved: Tensor | _Kept) -> Tensor:
    return saved.tensor if isinstance(saved, _Kept) else saved


def _lies_as(saved: Tensor, owner: nn.Parameter) -> bool:
    """Whether what is saved is the parameter itself, which the technique empties and fills.

    A view of it, as transposed weights are, has hold of what was gathered.
    """
    same = saved.shape == owner.shape and saved.stride() == owner.stride()
    return bool(same and saved.storage_offset() == owner.storage_offset())
