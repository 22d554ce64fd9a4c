"""Made-up results for operations that need values, so that a pass without values continues.

On a tensor without values, `item`, `nonzero` and indexing by a mask have no result. Here they get
one: nothing, everything, or something at random. So each pass takes a route that some values would
lead to. Modules that all passes call are likely to be called whatever the values are.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

Answer = Literal["nothing", "everything", "chance"]
_OPS = torch.ops.aten
_READS = {_OPS._local_scalar_dense.default, _OPS.is_nonzero.default}
_PLACES = {_OPS.nonzero.default}
_UNIQUE = {
    *(_OPS._unique2.default, _OPS.unique_dim.default),
    *(_OPS.unique_consecutive.default, _OPS.unique_dim_consecutive.default),
}
_TAGS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


class MadeUpAnswers(TorchDispatchMode):
    """Makes up results of operations that need values, and reports each of them.

    Args:
        answer: the kind of result: zeros and empty selections, ones and full selections, or random.
        draw: the generator for random results.
        on_question: called with the name of each operation that needs values.
    """

    def __init__(
        self, answer: Answer, draw: random.Random, on_question: Callable[[str], None]
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._answer, self._draw, self._on_question = answer, draw, on_question

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """See `TorchDispatchMode`."""
        del types
        kwargs = kwargs or {}
        if func in _READS and not _has_numbers(args[0]):
            self._ask(func)
            return self._number(args[0])
        if func in _PLACES and not _has_numbers(args[0]):
            self._ask(func)
            return self._selected_indices(args[0])
        if func is _OPS.masked_select.default:
            self._ask(func)
            return args[0].new_empty(self._count(args[0].numel()))
        if func in _UNIQUE:
            self._ask(func)
            return self._unique(func, args, kwargs)
        if func in (_OPS.index.Tensor, _OPS.index_put.default, _OPS.index_put_.default):
            args = self._without_masks(func, args)
        elif any(tag in func.tags for tag in _TAGS):
            self._ask(func)  # no result can be made up: the pass ends here with a known reason
        return func(*args, **kwargs)

    def _ask(self, func: Any) -> None:
        name = func.overloadpacket.__name__.lstrip("_")
        self._on_question("item" if func in _READS else name)

    def _count(self, most: int) -> int:
        if self._answer == "nothing":
            return 0
        return most if self._answer == "everything" else self._draw.randint(0, most)

    def _number(self, tensor: Tensor) -> bool | int | float:
        high = 1 if self._answer == "everything" else 0
        if self._answer == "chance":
            high = self._draw.randint(0, 1 if tensor.dtype is torch.bool else 3)
        if tensor.dtype is torch.bool:
            return bool(high)
        return float(high) if tensor.is_floating_point() else high

    def _selected_indices(self, tensor: Tensor) -> Tensor:
        return tensor.new_empty((self._rows(tensor), tensor.dim()), dtype=torch.int64)

    def _rows(self, mask: Tensor) -> int:
        """Return the number of elements that a mask selects."""
        # A mask of rows selects at most all rows; a mask of more dims mostly selects one per row.
        return self._count(mask.shape[0] if mask.dim() else 1)

    def _unique(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensor = args[0]
        number = max(1, self._count(tensor.numel()))
        shape: tuple[int, ...] = (number,)
        inverse = tensor.new_empty(tensor.shape, dtype=torch.int64)
        if "dim" in func.overloadpacket.__name__:
            dim = int(args[1] if len(args) > 1 else kwargs["dim"])
            number = max(1, self._count(tensor.shape[dim]))
            shape = (*tensor.shape[:dim], number, *tensor.shape[dim + 1 :])
            inverse = tensor.new_empty(tensor.shape[dim], dtype=torch.int64)
        return tensor.new_empty(shape), inverse, tensor.new_empty(number, dtype=torch.int64)

    def _without_masks(self, func: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Replace masks by index tensors of a made-up length."""
        if not any(_is_mask(index) for index in args[1]):
            return args
        if func is not _OPS.index.Tensor:  # a write does not change the shape
            return args
        self._ask(_OPS.nonzero.default)
        indices: list[Tensor | None] = []
        for index in args[1]:
            if not _is_mask(index):
                indices.append(index)
                continue
            count = self._rows(index)
            indices += [index.new_empty(count, dtype=torch.int64) for _ in range(index.dim())]
        return (args[0], indices, *args[2:])


def _is_mask(index: Any) -> bool:
    return isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8)


def _has_numbers(tensor: Any) -> bool:
    """Whether an object is a plain tensor with data, and neither fake nor on the meta device."""
    return type(tensor) is Tensor and not tensor.is_meta


@contextmanager
def made_up_chance(answer: Answer, seed: int) -> Iterator[Callable[[], bool]]:
    """Set the random numbers of Python and numpy to the lowest, or the highest, in a `with` block.

    Args:
        answer: "nothing" for the lowest numbers, "everything" for the highest, "chance" for the
            numbers of a seed.
        seed: the seed.

    Yields:
        A function that returns whether any random number was drawn in the block.
    """
    numpy = getattr(sys.modules.get("numpy"), "random", None)
    before, numpy_before = random.getstate(), None if numpy is None else numpy.get_state()
    words = {"nothing": 0, "everything": _HIGHEST}.get(answer)
    if words is None:
        random.seed(seed)
    else:
        random.setstate((3, (*[words] * 624, 0), None))
    if numpy is not None:
        numpy.set_state(("MT19937", random.getstate()[1][:624], random.getstate()[1][624]))
    begin = random.getstate(), None if numpy is None else _generator_position(numpy)
    try:
        yield (
            lambda: (
                begin != (random.getstate(), None if numpy is None else _generator_position(numpy))
            )
        )
    finally:
        random.setstate(before)
        if numpy is not None:
            numpy.set_state(numpy_before)


def _generator_position(numpy: Any) -> tuple[int, int]:
    """Return the position of numpy's generator, and a word that depends on its seed."""
    state = numpy.get_state()
    return int(state[2]), int(state[1][0])


def _word_that_gives_ones() -> int:
    """Return the state word from which a Mersenne Twister makes 32 one bits: tempering inverted."""
    ones = 0xFFFFFFFF
    y = ones ^ (ones >> 18)
    y ^= (y << 15) & 0xEFC60000
    word = y
    for _ in range(5):
        word = y ^ ((word << 7) & 0x9D2C5680)
    y = word & ones
    word = y
    for _ in range(3):
        word = y ^ (word >> 11)
    return word & ones


_HIGHEST = _word_that_gives_ones()
