"""The batch dim of each tensor of a batch; some tensors have none."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from bigtrain.errors import ConfigError

BatchDims = tuple[int | None, ...]
"""The batch dim of each tensor of (inputs, targets) in order; None if it belongs to all rows."""


def batch_tensors(inputs: Any, targets: Any) -> list[tuple[str, Tensor]]:
    """Return the tensors of a batch with their names, in the order of `map_tensors`.

    Names are those of `data.batch_dims`, such as inputs, inputs.position_ids, inputs[1], targets.
    """
    return [*_named("inputs", inputs), *_named("targets", targets)]


def _named(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _named(f"{name}.{key}", item)
    elif isinstance(value, (tuple, list)):
        for number, item in enumerate(value):
            yield from _named(f"{name}[{number}]", item)
    elif not isinstance(value, (nn.Module, type)) and not callable(value):
        for key, item in getattr(value, "__dict__", {}).items():
            if isinstance(item, (Tensor, tuple, list, Mapping)):
                yield from _named(f"{name}.{key}", item)


def count_rows(inputs: Any, targets: Any, expected: int | None = None) -> int:
    """Return the rows of a batch: the most frequent first size of its tensors; 0 without tensors.

    Args:
        inputs: the inputs of one rank.
        targets: the targets of one rank.
        expected: the rows that the job's keys say; returned if the first size of some tensor.
    """
    sizes = [t.shape[0] for _, t in batch_tensors(inputs, targets) if t.dim()]
    if not sizes:
        return 1 if batch_tensors(inputs, targets) else 0
    if expected in sizes:
        return expected
    several = [size for size in sizes if size != 1] or sizes
    return Counter(several).most_common(1)[0][0]  # the first one of a tie


def find_batch_dims(
    inputs: Any,
    targets: Any,
    rows: int,
    *,
    explicit: Mapping[str, int | None],
    example: tuple[Sequence[Tensor], int] | None = None,
) -> BatchDims:
    """Find the batch dim of each tensor.

    If the first size is the number of rows, the first dim is the batch dim; a tensor without dims,
    or with one row, belongs to all rows. Any other tensor needs the example: its batch dim is the
    one that has the example's rows there and the batch's rows here, if all other dims agree.

    Args:
        inputs: the inputs of one rank.
        targets: the targets of one rank.
        rows: the result of `count_rows`.
        explicit: the job's `data.batch_dims`, by name.
        example: the tensors of a micro-batch with another number of rows, and that number.

    Raises:
        ConfigError: `explicit` has a name that no tensor has, or a batch dim cannot be found.
    """
    named = batch_tensors(inputs, targets)
    unknown = sorted(set(explicit) - {name for name, _ in named})
    if unknown:
        names = ", ".join(name for name, _ in named)
        raise ConfigError(
            f"data.batch_dims: the batch has no tensor {unknown[0]!r}. Its tensors are {names}."
        )
    before = example[0] if example is not None and len(example[0]) == len(named) else None
    dims: list[int | None] = []
    for number, (name, tensor) in enumerate(named):
        if name in explicit:
            dims.append(_checked(name, tensor, explicit[name], rows))
        elif not tensor.dim() or tensor.shape[0] == rows:
            dims.append(0 if tensor.dim() else None)
        else:
            dim = None
            if example is not None and before is not None and example[1] != rows:
                dim = _grown(tensor, before[number], rows, example[1])
            if dim is None and tensor.shape[0] != 1:
                raise ConfigError(_unclear(name, tensor, rows))
            dims.append(dim)
    return tuple(dims)


def _checked(name: str, tensor: Tensor, dim: int | None, rows: int) -> int | None:
    if dim is None:
        return None
    if not -tensor.dim() <= dim < tensor.dim() or tensor.shape[dim] != rows:
        raise ConfigError(
            f"data.batch_dims={{{name}: {dim}}}: {name} has the shape {tuple(tensor.shape)}, and "
            f"needs the {rows} rows of the batch in that dim. Name another dim, or null for a "
            "tensor that belongs to all rows."
        )
    return dim % tensor.dim()


def _grown(tensor: Tensor, before: Tensor, rows: int, rows_before: int) -> int | None:
    """Return the only dim that changed, if it changed with the rows; otherwise None."""
    if tensor.dim() != before.dim():
        return None
    sizes = list(zip(before.shape, tensor.shape, strict=True))
    changed = [dim for dim, (a, b) in enumerate(sizes) if a != b]
    if len(changed) == 1 and sizes[changed[0]] == (rows_before, rows):
        return changed[0]
    return None


def _unclear(name: str, tensor: Tensor, rows: int) -> str:
    dim = next((dim for dim, size in enumerate(tensor.shape) if size == rows), None)
    return (
        f"step: {name} has the shape {tuple(tensor.shape)} and the batch {rows} rows: it is not "
        "clear along which dim it is cut into micro-batches. Name the dim with "
        f'prepare(..., data__batch_dims={{"{name}": {dim}}}), None for a tensor that belongs to '
        "all rows."
    )
