"""Noting when each block of a model is computed with, forward and backward."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from bigtrain.memory.timeline import BlockTicks
from bigtrain.memory.tracker import StorageTracker
from bigtrain.models.blocks import independent_blocks


class BlockTickRecorder:
    """The clock ticks at which blocks begin and end; nothing is kept alive by the noting.

    Args:
        model: hooks are put on its blocks, for good: give a copy.
        tracker: whose clock it is.
        names: of the modules to follow; left out, the blocks that share no parameter.
    """

    def __init__(
        self, model: nn.Module, tracker: StorageTracker, names: Iterable[str] | None = None
    ) -> None:
        self._tracker = tracker
        named = independent_blocks(model)
        if names is not None:
            named = [(n, m) for n, m in ((n, _module(model, n)) for n in names) if m is not None]
        self._names = [name for name, _ in named]
        self._blocks = [block for _, block in named]
        inside = {id(p) for block in self._blocks for p in block.parameters()}
        self._rest = [p for p in model.parameters() if id(p) not in inside]
        self._notes: list[tuple[int, int, str]] = []
        for number, block in enumerate(self._blocks):
            for parameter in block.parameters():
                if parameter.requires_grad:
                    parameter.register_hook(self._at_gradient(number))  # type: ignore[no-untyped-call]
            block.register_forward_pre_hook(self._before(number), with_kwargs=True)
            block.register_forward_hook(self._after(number))

    def _at_gradient(self, number: int) -> Any:
        return lambda _: self._note(number, "parameter's gradient")

    def _before(self, number: int) -> Any:
        def hook(_module: nn.Module, args: Any, kwargs: Any) -> None:
            self._note(number, "forward begins")
            self._on_gradients(number, (args, kwargs), "backward ends")

        return hook

    def _after(self, number: int) -> Any:
        def hook(_module: nn.Module, _args: Any, output: Any) -> None:
            self._note(number, "forward ends")
            self._on_gradients(number, output, "backward begins")

        return hook

    def _on_gradients(self, number: int, tree: Any, what: str) -> None:
        for leaf in tree_leaves(tree):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(lambda _: self._note(number, what))  # type: ignore[no-untyped-call]

    def _note(self, number: int, what: str) -> None:
        self._notes.append((self._tracker.clock, number, what))

    def blocks(self, start: int, stop: int) -> list[BlockTicks]:
        """The blocks in the order of a pass between two ticks; those that did not run are left out.

        A block whose inputs need no gradient is taken to be done at the end of the pass.
        """
        return list(self.named(start, stop).values())

    def named(self, start: int, stop: int) -> dict[str, BlockTicks]:
        """The same with their names."""
        found = []
        together = self._together(start, stop)
        for number, block in enumerate(self._blocks):
            ticks: dict[str, list[int]] = {}
            for tick, whose, what in self._notes:
                if whose == number and start <= tick <= stop:
                    ticks.setdefault(what, []).append(tick)
            if "forward begins" not in ticks:
                continue
            begins = min(ticks.get("backward begins", [stop]))
            ends = max(ticks.get("backward ends", [stop]))
            if ends in together:  # its own part of that gradient is there with its last parameter's
                ends = max(ticks.get("parameter's gradient", [ends]))
            forward = (min(ticks["forward begins"]), max(ticks["forward ends"]))
            visit = _block_ticks(list(block.parameters()), forward, (begins, max(begins, ends)))
            found.append((self._names[number], visit))
        return dict(sorted(found, key=lambda pair: pair[1].forward))

    def _together(self, start: int, stop: int) -> set[int]:
        """Ticks at which the gradient of an input is there that several blocks have."""
        last: dict[int, int] = {}
        for tick, number, what in self._notes:
            if what == "backward ends" and start <= tick <= stop:
                last[number] = max(tick, last.get(number, tick))
        return {tick for tick, times in Counter(last.values()).items() if times > 1}

    def outside_blocks(self, start: int, stop: int) -> BlockTicks:
        """What is in no block: there from the first moment of a pass to the last."""
        return _block_ticks(self._rest, (start, stop), (start, stop))


def _module(model: nn.Module, name: str) -> nn.Module | None:
    try:
        return model.get_submodule(name)
    except AttributeError:  # another stage's
        return None


def _block_ticks(
    parameters: list[nn.Parameter], forward: tuple[int, int], backward: tuple[int, int]
) -> BlockTicks:
    return BlockTicks(
        tuple(tuple(p.shape) for p in parameters),
        tuple(p.requires_grad for p in parameters),
        forward,
        backward,
    )
