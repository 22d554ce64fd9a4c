"""What one operation of torch does: tensors it changes, its arithmetic, the bytes it touches."""

from __future__ import annotations

from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

REPEAT_COUNT: ContextVar[int] = ContextVar("STANDS_FOR", default=1)
"""How often what is done now is done in a run: on fake tensors a loop's equal rounds go once."""


def loop_starts(tensor: Tensor, number: int, step: int) -> Iterator[int]:
    """The starts of a loop's rounds: all of them, and on fake tensors only those that differ.

    Without numbers every round but the first and the last takes what another takes. One of them is
    gone through, and says by `REPEAT_COUNT` how many it stands for.

    Args:
        tensor: that the loop works on.
        number: of rows.
        step: rows of a round.
    """
    starts = range(0, number, step)
    if len(starts) <= 3 or not isinstance(tensor, FakeTensor):
        yield from starts
        return
    yield starts[0]
    token = REPEAT_COUNT.set(REPEAT_COUNT.get() * (len(starts) - 2))
    try:
        yield starts[1]
    finally:
        REPEAT_COUNT.reset(token)
    yield starts[-1]


def mutated_tensors(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The tensors that an operation changes in place."""
    mutated = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            mutated += [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
    return mutated


def flops_of(func: Any, args: Any, kwargs: Any, result: Any) -> int:
    """Arithmetic operations of matrix products, convolutions and attention; 0 of all else."""
    formula = flop_registry.get(func._overloadpacket)
    return int(formula(*args, **kwargs, out_val=result)) if formula is not None else 0


def bytes_touched(inputs: list[Tensor], outputs: list[Tensor]) -> int:
    """Bytes that an operation reads and writes; none for a view."""
    input_storages = {t.untyped_storage()._cdata for t in inputs}
    new_outputs = [t for t in outputs if t.untyped_storage()._cdata not in input_storages]
    if not new_outputs and outputs:
        in_place = {id(t) for t in inputs} & {id(t) for t in outputs}
        if not in_place:
            return 0
        new_outputs = outputs
    return sum(t.numel() * t.element_size() for t in (*inputs, *new_outputs))
