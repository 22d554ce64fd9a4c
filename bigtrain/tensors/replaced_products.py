"""What a technique's own linear layers keep of a model, seen while it runs on fake tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks


class ReplacedProducts:
    """Has a model run as under the technique, and notes how its parameters are used.

    Args:
        root: whose forward pass is run; None where the products are torch's.
    """

    def __init__(self, root: nn.Module | None) -> None:
        self._modules = [] if root is None else list(root.modules())
        self._called: dict[nn.Module, None] = {}
        self.viewed: set[nn.Parameter] = set()
        """Those of which a part is saved for the backward pass."""

    @contextmanager
    def noted(self, functions: AbstractContextManager[object]) -> Iterator[None]:
        """To be entered around all passes, with the technique's functions in torch's place."""
        with ExitStack() as entered:
            entered.enter_context(functions)
            if self._modules:
                entered.enter_context(self._noting_views())
            for module in self._modules:
                module.register_forward_pre_hook(self._before)
            yield

    def together(self) -> Iterator[list[nn.Parameter]]:
        """The parameters of each module that has several: they are gathered at once."""
        for module in self._called:
            parameters = list(self._used_by(module))
            if len(parameters) > 1:
                yield parameters

    def _used_by(self, module: nn.Module) -> Iterator[nn.Parameter]:
        """Its own, and those of modules in it that it does not call, as attention's last one."""
        yield from module.parameters(recurse=False)
        for child in module.children():
            if child not in self._called:
                yield from self._used_by(child)

    def _before(self, module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """Hand on no tensor twice, as its hooks do: attention goes by that, and cuts its matrix."""
        self._called[module] = None
        tensors = [one for one in inputs if isinstance(one, Tensor)]
        if len({id(one) for one in tensors}) == len(tensors):
            return inputs
        return tuple(one.view_as(one) if isinstance(one, Tensor) else one for one in inputs)

    def _noting_views(self) -> AbstractContextManager[None]:
        parameters = (p for module in self._modules for p in module.parameters(recurse=False))
        by_storage = {p.untyped_storage()._cdata: p for p in parameters}

        def note(tensor: Tensor) -> Tensor:
            owner = by_storage.get(tensor.untyped_storage()._cdata)
            is_view = owner is not None and tensor is not owner
            # What goes whole into a linear layer is kept by code of the technique's own.
            if owner is not None and is_view and not _is_whole_matrix(tensor, owner):
                self.viewed.add(owner)
            return tensor

        return saved_tensors_hooks(note, lambda tensor: tensor)


def _is_whole_matrix(tensor: Tensor, owner: nn.Parameter) -> bool:
    return owner.dim() <= 2 and tensor.numel() == owner.numel()
