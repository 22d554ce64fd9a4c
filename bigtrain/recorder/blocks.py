"""Hooks on the blocks of a live model, which record when each is computed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from bigtrain.recorder.ring import FlightRecorder


class BlockMark:
    """The hooks of one block. It is a class, as a module with a closure cannot be pickled.

    Args:
        recorder: records the events.
        name: the block's name.
    """

    def __init__(self, recorder: FlightRecorder, name: str) -> None:
        self._recorder, self._name = recorder, name

    def begin(self, _module: nn.Module, _inputs: Any) -> None:
        """Record that the block's forward pass begins."""
        self._recorder.enter_block(self._name)

    def end(self, _module: nn.Module, _inputs: Any, output: Any) -> None:
        """Add a hook for the backward pass to the block's output.

        It is a hook on the graph's node and not on the tensor, so that no view or copy is made.
        """
        while isinstance(output, tuple | list) and output:
            output = output[0]
        if isinstance(output, Tensor) and output.grad_fn is not None:
            output.grad_fn.register_prehook(self.backward)

    def backward(self, _gradients: Any) -> None:
        """Record that the block's backward pass begins."""
        self._recorder.enter_block(self._name)


def mark_blocks(blocks: Iterable[tuple[str, nn.Module]], recorder: FlightRecorder) -> None:
    """Record when these blocks are computed.

    Args:
        blocks: names and modules; these hooks run before existing ones.
        recorder: this rank's recorder.
    """
    for name, block in blocks:
        mark = BlockMark(recorder, name)
        block.register_forward_pre_hook(mark.begin, prepend=True)
        block.register_forward_hook(mark.end)


def unmark_blocks(root: nn.Module) -> None:
    """Undo `mark_blocks`, for all modules of a tree."""
    for module in root.modules():
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for key, hook in list(hooks.items()):
                if isinstance(getattr(hook, "__self__", None), BlockMark):
                    del hooks[key]
