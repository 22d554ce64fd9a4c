"""Record digests of a run's tensors in the order of execution, to find the first that differs.

The trace has a digest, which is a few numbers, of every result of a torch function inside a module,
of every output of a module, and of the gradients of both. A digest does not depend on how the
module is wrapped, sharded, sliced or recomputed, nor on the rank. Sliced tensors are gathered for
this purpose, and the second pass of recomputed modules is left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from bigtrain.slicing.exchange import all_gather
from bigtrain.slicing.sliced_tensor import is_sliced, leaves_of, local_of

_PROJECTIONS = 4
_SIGNS = 2**14
"""The length of the rows into which the elements of a tensor are folded. Each row has its own
sign."""
_UNNOTED = frozenset(
    (
        *("__get__", "__set__", "__getitem__", "backward", "chunk", "detach", "expand", "flatten"),
        *("narrow", "permute", "requires_grad_", "reshape", "select", "split", "squeeze", "t"),
        *("transpose", "unbind", "unsqueeze", "view", "view_as"),
    )
)
"""Functions whose results are not recorded, because they compute nothing: access to attributes, and
views, whose storage may not be filled yet."""
_UNFILLED = ("empty", "new_empty", "resize")
"""Beginnings of the names of functions that return tensors without values."""


class Entry(NamedTuple):
    """The digest of one value, or of its gradient, on one rank."""

    step: int
    """The step, from 1."""
    is_gradient: bool
    """Whether the digest is of the gradient of the value."""
    module: str
    """The innermost module whose forward pass ran; empty for the whole model."""
    call: int
    """The number of the module's call in this step, from 0."""
    operation: str
    """The name of the torch function that returned the value; 'output' for a module's output."""
    number: int
    """The number of the value among the results of this operation in the call, from 0."""
    digest: tuple[float, ...]
    """The norm of the tensor, and its products with fixed vectors of signs, divided by the square
    root of the number of elements."""


class ExecutionTrace(TorchFunctionMode):
    """Records the values of a model and their gradients inside its `with` block.

    Args:
        roots: the model, or its stages on this rank, with the names of the user's model.
        gradient_scale: the factor of this run's gradients, by which digests are divided.
    """

    def __init__(self, roots: Iterable[nn.Module], gradient_scale: float) -> None:
        super().__init__()
        self.step = 1
        self.entries: list[Entry] = []
        self._scale = gradient_scale
        self._signs: dict[int, Tensor] = {}
        self._calls: Counter[str] = Counter()
        self._open: dict[str, int] = {}
        self._results: Counter[tuple[str, str]] = Counter()
        self._current = ""
        self._hooks: list[Any] = []
        self._states: set[int] = set()
        """The ids of parameters and buffers, which are not recorded: buffers differ among ranks."""
        for root in roots:
            self._states |= {id(t) for t in (*root.parameters(), *root.buffers())}
            cut_through: frozenset[str] = getattr(root, "cut_through", frozenset())
            for name, module in root.named_modules():
                if name not in cut_through:  # of these modules a stage computes only a part
                    self._hooks += [
                        module.register_forward_pre_hook(partial(self._begin, name), prepend=True),
                        module.register_forward_hook(partial(self._end, name)),
                    ]

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()

    def next_step(self) -> None:
        """Begin the next step."""
        self.step += 1
        self._calls.clear()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """See `TorchFunctionMode`."""
        del types
        result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        unnoted = name in _UNNOTED or name.startswith(_UNFILLED)
        if self._open and not unnoted and not _in_backward():
            self._note_all(name, result)
        return result

    def _begin(self, name: str, _module: nn.Module, _args: Any) -> None:
        if _in_backward():
            return
        # A stage of a pipeline may leave modules without calling the hooks that close them.
        if not name:
            self._open.clear()
        self._open[name] = self._calls[name]
        self._calls[name] += 1
        for key in [key for key in self._results if key[0] == name]:
            del self._results[key]
        self._current = name

    def _end(self, name: str, _module: nn.Module, _args: Any, output: Any) -> None:
        if _in_backward() or name not in self._open:
            return
        self._current = name
        self._note_all("output", output)
        del self._open[name]
        while name and name not in self._open:
            name = name.rpartition(".")[0]
        self._current = name

    def _note_all(self, operation: str, result: Any) -> None:
        with torch._C.DisableTorchFunction():  # a stage of a pipeline intercepts all functions
            for leaf in leaves_of(result):
                value, gather = leaf, _identity
                if is_sliced(leaf):  # all ranks of its group take part in the gather
                    value = local_of(leaf)
                    gather = partial(all_gather, slices=leaf.slices, group=leaf.group)
                known = type(value) is Tensor and value.device.type != "meta"
                if known and id(value) not in self._states:
                    self._note(operation, value, gather)

    def _note(self, operation: str, value: Tensor, gather: Callable[[Tensor], Tensor]) -> None:
        name = self._current if self._current in self._open else ""
        number = self._results[name, operation]
        self._results[name, operation] += 1
        where = (name, self._open.get(name, 0), operation, number)
        self.entries.append(Entry(self.step, False, *where, self._digest(value, 1.0, gather)))
        if value.requires_grad:
            hook = partial(self._note_gradient, where, gather)
            value.register_hook(hook)  # type: ignore[no-untyped-call]

    def _note_gradient(
        self,
        where: tuple[str, int, str, int],
        gather: Callable[[Tensor], Tensor],
        gradient: Tensor,
    ) -> None:
        with torch._C.DisableTorchFunction():
            digest = self._digest(gradient, self._scale, gather)
        self.entries.append(Entry(self.step, True, *where, digest))

    def _digest(
        self, value: Tensor, scale: float, gather: Callable[[Tensor], Tensor]
    ) -> tuple[float, ...]:
        # With the active modes, a block that saves its matrix products for recomputation would also
        # save those of the digest, and its second pass does not compute digests.
        with torch.no_grad(), _disable_current_modes():
            return self._digest_of(gather(value.detach()), scale)

    def _digest_of(self, value: Tensor, scale: float) -> tuple[float, ...]:
        flat = value.reshape(-1).to(torch.float64) / scale
        even = flat.numel() // _SIGNS * _SIGNS
        rows, rest = flat[:even].view(-1, _SIGNS), flat[even:]
        signs = self._signs_of(_SIGNS, flat)
        products = ((rows @ signs.T) * self._signs_of(len(rows), flat).T).sum(0)
        products += signs[:, : len(rest)] @ rest
        products /= max(1, flat.numel()) ** 0.5
        return (float(torch.linalg.vector_norm(flat)), *products.tolist())

    def _signs_of(self, length: int, like: Tensor) -> Tensor:
        if length not in self._signs:
            drawn = torch.Generator().manual_seed(length)
            bits = torch.randint(0, 2, (_PROJECTIONS, length), generator=drawn, dtype=torch.int8)
            self._signs[length] = (bits * 2 - 1).to(like)
        return self._signs[length]


def _identity(value: Tensor) -> Tensor:
    return value


def _in_backward() -> bool:
    """Return whether a backward pass is running, in which functions of modules are recomputed."""
    return torch._C._current_graph_task_id() != -1
