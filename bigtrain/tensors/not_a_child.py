"""A reference from one module to another that is not its child."""

from __future__ import annotations

from typing import Generic, TypeVar

from torch import nn

Module = TypeVar("Module", bound=nn.Module)


class NotAChild(Generic[Module]):
    """Holds a module without making it a child, so that its parameters get no second names.

    Args:
        module: the module.
    """

    def __init__(self, module: Module) -> None:
        self.module = module
