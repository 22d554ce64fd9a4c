"""A reference from one module to another that is not its child."""

from __future__ import annotations

from typing import Generic, TypeVar

from torch import nn

Module = TypeVar("Module", bound=nn.Module)


class NotAChild(Generic[Module]):
    """Holds a module that is no child of its holder, so its names do not appear there again.

    Args:
        module: the module.
    """

    def __init__(self, module: Module) -> None:
        self.module = module
