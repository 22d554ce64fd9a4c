"""The FLOPs and bytes of each operation of a run on fake tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bigtrain.activations.recompute import is_saved_op
from bigtrain.cutting.choose import DeviceRates
from bigtrain.data.loader import MicroBatch
from bigtrain.memory.program_buffers import kernels_announced
from bigtrain.memory.tracker import StorageTracker
from bigtrain.tensors.compound_ops import compound_cost
from bigtrain.tensors.cuda_program import cuda_program
from bigtrain.tensors.fake import fake_model
from bigtrain.tensors.op_cost import ProductSize, bytes_touched, flops_of, product_size


class Operation(NamedTuple):
    """One call of an operation."""

    func: Any
    """The operation; None for a fused kernel of a compiled block."""
    args: Any
    kwargs: Any
    result: Any
    inputs: list[Tensor]
    is_result: list[Tensor]

    @property
    def flops(self) -> float:
        """FLOPs of a matrix product, convolution or attention; 0 for other operations."""
        if self.func is None:
            return 0.0
        return float(flops_of(self.func, self.args, self.kwargs, self.result))

    @property
    def product(self) -> ProductSize:
        """The sizes (m, n, k, batch) of an operation that has FLOPs."""
        return product_size(self.func, self.args, self.result)

    @property
    def nbytes(self) -> float:
        """Bytes that the operation reads and writes."""
        compound = compound_cost(self.func, self.args)
        if compound is not None:
            return sum(nbytes * calls for nbytes, calls in compound.steps)
        return float(bytes_touched(self.inputs, self.is_result))


class OperationLog(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Reports each operation on fake tensors that returns a tensor, after it has run.

    In a compiled block it reports the matrix products, and each fused kernel of other operations.

    Args:
        note: called with each operation.
    """

    def __init__(self, note: Callable[[Operation], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._note = note
        self._kernels = ExitStack()

    def __enter__(self) -> OperationLog:
        self._kernels.enter_context(kernels_announced(self._kernel))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._kernels.close()

    def _kernel(self, touched: list[Tensor]) -> None:
        self._note(Operation(None, (), {}, None, touched, []))

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True, so that the mode sees a compiled block run, but not its compilation."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See `TorchDispatchMode`."""
        del types
        if (
            func is torch.ops.prim.device.default
        ):  # called more often than all other operations together
            return args[0].fake_device
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self._seen(func, args, kwargs, result)
        return result

    @contextmanager
    def behind(self, tracker: StorageTracker) -> Iterator[None]:
        """Report the operations that a tracker sees, inside of a `with` block.

        This is faster than a second dispatch mode.
        """
        before, tracker.on_operation = tracker.on_operation, self._seen
        try:
            with kernels_announced(self._kernel):
                yield
        finally:
            tracker.on_operation = before

    def _seen(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        made = _tensors_among((result,))
        # A compiled program allocates its buffers by this operation, which writes nothing.
        is_buffer = func is torch.ops.aten.empty_strided.default
        if made and not is_buffer:  # an operation without a result is a query about a tensor
            inputs = _tensors_among(args)
            if kwargs:
                inputs += _tensors_among(kwargs.values())
            self._note(Operation(func, args, kwargs, result, inputs, made))


def _tensors_among(values: Iterable[Any]) -> list[Tensor]:
    """Return all tensors in some values; `tree_leaves`, which is slow, only opens containers."""
    tensors: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            tensors.append(value)
        elif isinstance(value, list | tuple | dict):
            tensors += [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
    return tensors


@dataclass
class BlockCost:
    """The predicted seconds of a module's forward pass over one micro-batch."""

    whole: float = 0.0
    """Seconds of all operations."""
    between: float = 0.0
    """Seconds of the operations that the policy `selective` recomputes."""


def block_costs(
    model: nn.Module,
    names: Iterable[str],
    micro_batch: MicroBatch,
    rates: DeviceRates,
    device: torch.device,
    *,
    bf16: bool = False,
    of_cuda: bool = False,
) -> dict[str, BlockCost]:
    """Predict the seconds of modules in one forward pass of a model.

    An operation takes the time of its FLOPs or of its reads and writes, whichever is longer
    (Williams et al. 2009, Roofline).

    Args:
        model: a model on any device; it is not changed.
        names: the names of the modules.
        micro_batch: a micro-batch with as many rows as those of the run.
        rates: the FLOPs and bytes per second of the device.
        device: the device whose kernels are assumed.
        bf16: whether the forward pass runs under autocast to bf16.
        of_cuda: see `stands_for_cuda`.

    Returns:
        The cost of each module by its name, and that of the whole model under "".

    Raises:
        Exception: any exception that the model's code raises on tensors without values.
    """
    costs = {"": BlockCost(), **{name: BlockCost() for name in names}}
    open_costs = [costs[""]]

    def note(operation: Operation) -> None:
        seconds = max(operation.flops / rates.flops, operation.nbytes / rates.nbytes)
        dear = is_saved_op(operation.func, operation.args, operation.kwargs)
        for cost in open_costs:
            cost.whole += seconds
            cost.between += 0.0 if dear else seconds

    with cuda_program() if of_cuda else nullcontext(), FakeTensorMode():
        fake = fake_model(model, device, double=False)
        for name, cost in costs.items():
            if name:
                module = fake.get_submodule(name)
                module.register_forward_pre_hook(lambda *_, cost=cost: open_costs.append(cost))
                module.register_forward_hook(lambda *_: _close(open_costs))
        inputs = micro_batch.fake(device).inputs
        cast = torch.autocast(device.type, dtype=torch.bfloat16) if bf16 else nullcontext()
        with cast, OperationLog(note):
            fake(inputs)
    return costs


def _close(open_now: list[BlockCost]) -> None:
    open_now.pop()
