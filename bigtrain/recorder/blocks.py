"""Hooks on the blocks of a model, which record when each block is computed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from bigtrain.recorder.ring import FlightRecorder


class BlockMark:
    """The hooks of one block.

    They are methods of a class, because a module with a closure as a hook cannot be pickled.

    Args:
        recorder: this rank's recorder.
        name: the block's name in the recorded events.
    """

    def __init__(self, recorder: FlightRecorder, name: str) -> None:
        self._recorder, self._name = recorder, name

    def begin(self, _module: nn.Module, _inputs: Any) -> None:
        """Record that the block's forward pass begins."""
        self._recorder.enter_block(self._name)

    def end(self, _module: nn.Module, _inputs: Any, output: Any) -> None:
        """Add the hook `backward` to the first tensor of the block's output.

        The hook is on the node of the autograd graph and not on the module, because a module's
        backward hooks make a view of each output.
        """
        while isinstance(output, tuple | list) and output:
            output = output[0]
        if isinstance(output, Tensor) and output.grad_fn is not None:
            output.grad_fn.register_prehook(self.backward)

    def backward(self, _gradients: Any) -> None:
        """Record that the block's backward pass begins."""
        self._recorder.enter_block(self._name)


def mark_blocks(blocks: Iterable[tuple[str, nn.Module]], recorder: FlightRecorder) -> None:
    """Add hooks to blocks that record when each block is computed.

    The hook before a forward pass runs before existing hooks.

    Args:
        blocks: the name and the module of each block.
        recorder: this rank's recorder.
    """
    for name, block in blocks:
        mark = BlockMark(recorder, name)
        block.register_forward_pre_hook(mark.begin, prepend=True)
        block.register_forward_hook(mark.end)


def unmark_blocks(root: nn.Module) -> None:
    """Remove the hooks of `mark_blocks` from a module and all modules in it."""
    for module in root.modules():
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for key, hook in list(hooks.items()):
                if isinstance(getattr(hook, "__self__", None), BlockMark):
                    del hooks[key]
