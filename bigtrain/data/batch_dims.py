"""The batch dim of each tensor of a batch: the dim that has one entry for each row.

Tensors that all rows share, such as a scalar, have no batch dim.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from bigtrain.errors import ConfigError

BatchDims = tuple[int | None, ...]
"""The batch dim of each tensor of (inputs, targets), in the order of `batch_tensors`.

None for a tensor that all rows share.
"""


def batch_tensors(inputs: Any, targets: Any) -> list[tuple[str, Tensor]]:
    """Return the tensors of a batch with their names, in the order of `map_tensors`.

    The names are the keys of the job's `data.batch_dims`, such as inputs, inputs.position_ids,
    inputs[1] or targets.
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
    """Return the number of rows of a batch: the most frequent size of its tensors in dim 0.

    Sizes of 1 count only if there are no other sizes. Of equally frequent sizes, the first is
    returned. A batch whose tensors all are 0-dim has 1 row; a batch without tensors has 0.

    Args:
        inputs: the inputs of one rank.
        targets: the targets of one rank.
        expected: the number of rows according to the job's keys, which is returned if a tensor has
            this size in dim 0; None if no key sets the number.
    """
    sizes = [t.shape[0] for _, t in batch_tensors(inputs, targets) if t.dim()]
    if not sizes:
        return 1 if batch_tensors(inputs, targets) else 0
    if expected in sizes:
        return expected
    several = [size for size in sizes if size != 1] or sizes
    return Counter(several).most_common(1)[0][0]  # in a tie, the first size


def find_batch_dims(
    inputs: Any,
    targets: Any,
    rows: int,
    *,
    explicit: Mapping[str, int | None],
    example: tuple[Sequence[Tensor], int] | None = None,
) -> BatchDims:
    """Return the batch dim of each tensor, in the order of `batch_tensors`.

    `explicit` sets the batch dims of the tensors that it names. Of the others, a 0-dim tensor has
    no batch dim, and a tensor with `rows` entries in dim 0 has the batch dim 0. Any other tensor is
    compared with the same tensor of the example. If they differ in the size of only one dim, and
    these sizes are the numbers of rows of the batch and of the example, it is the batch dim. A
    tensor for which no dim is found is shared by all rows if dim 0 has one entry.

    Args:
        inputs: the inputs of one rank.
        targets: the targets of one rank.
        rows: the number of rows of the batch; see `count_rows`.
        explicit: the job's `data.batch_dims`: by name, a dim, or None for a tensor that all rows
            share.
        example: the tensors of a micro-batch with another number of rows, and that number; None if
            there is no example.

    Raises:
        ConfigError: `explicit` has a name that no tensor has, or a dim without `rows` entries; or
            the batch dim of a tensor cannot be found.
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
    """Return the only dim whose size differs, if both sizes are the numbers of rows; else None."""
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
