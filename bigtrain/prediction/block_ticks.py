"""Record the operations of a model, and when each of its blocks runs.

Moments are ticks of the memory tracker's clock, which counts changes of memory, not seconds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from bigtrain.memory.timeline import BlockTicks
from bigtrain.memory.tracker import StorageTracker
from bigtrain.models.blocks import independent_blocks, modules_outside
from bigtrain.models.parameters import left_out_names
from bigtrain.prediction.operation_log import Operation, OperationLog
from bigtrain.slicing.scatter_gather import Crossing
from bigtrain.slicing.sliced_tensor import is_sliced, leaves_of, local_of
from bigtrain.tensors.compound_ops import compound_cost
from bigtrain.tensors.fake_mode import VIEWS
from bigtrain.tensors.op_cost import REPEAT_COUNT, ProductSize

Moment = Literal[
    "forward begins", "forward ends", "backward begins", "backward ends", "parameter's gradient"
]


_ALL = ""
"""The key of the whole model among the followed modules."""


class BlockTickRecorder:
    """Records the clock ticks at which blocks begin and end, without keeping tensors alive.

    Args:
        model: the model. Its blocks get hooks that are never removed, so pass a copy.
        tracker: the tracker whose clock defines the ticks.
        names: the names of modules to follow in addition to the blocks that share no parameter.
            Names that the model does not have are ignored.
        outside: whether `blocks.modules_outside` count as blocks.
    """

    def __init__(
        self,
        model: nn.Module,
        tracker: StorageTracker,
        names: Iterable[str] = (),
        *,
        outside: bool = False,
    ) -> None:
        self._tracker = tracker
        self._modules = dict(independent_blocks(model))
        apart = modules_outside(model) if outside else []
        self.outside = tuple(name for name, _ in apart)
        """The names of the modules outside of blocks that count as blocks."""
        if apart:
            self._modules |= dict(apart)
            every = {name: place for place, (name, _) in enumerate(model.named_modules())}
            in_tree = sorted(self._modules, key=lambda name: every.get(name, len(every)))
            self._modules = {name: self._modules[name] for name in in_tree}
        self.names = tuple(self._modules)
        """The names of the blocks that share no parameter."""
        inside = {id(p) for block in self._modules.values() for p in block.parameters()}
        self._rest = [p for p in model.parameters() if id(p) not in inside]
        names_left_out = left_out_names(model)
        self._left_out = {id(p) for n, p in model.named_parameters() if n in names_left_out}
        for name in names:
            module = _module(model, name)
            if module is not None:
                self._modules.setdefault(name, module)
        self._notes: dict[str, list[tuple[int, Moment]]] = {name: [] for name in self._modules}
        for name, module in self._modules.items():
            for parameter in module.parameters():
                if parameter.requires_grad:
                    self._at_gradient(parameter, name, "parameter's gradient")
            module.register_forward_pre_hook(self._before(name), with_kwargs=True)
            module.register_forward_hook(self._after(name))
        self._notes[_ALL] = []
        model.register_forward_hook(self._after(_ALL))

    def _before(self, name: str) -> Any:
        def hook(_module: nn.Module, args: Any, kwargs: Any) -> None:
            self._note(name, "forward begins")
            self._at_gradients((args, kwargs), name, "backward ends")

        return hook

    def _after(self, name: str) -> Any:
        def hook(_module: nn.Module, _args: Any, output: Any) -> None:
            self._note(name, "forward ends")
            self._at_gradients(output, name, "backward begins")

        return hook

    def _at_gradients(self, tree: Any, name: str, moment: Moment) -> None:
        for leaf in tree_leaves(tree):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                self._at_gradient(leaf, name, moment)

    def _at_gradient(self, tensor: Tensor, name: str, moment: Moment) -> None:
        tensor.register_hook(lambda _: self._note(name, moment))  # type: ignore[no-untyped-call]

    def _note(self, name: str, moment: Moment) -> None:
        self._notes[name].append((self._tracker.clock, moment))

    def ticks(self, name: str, start: int, stop: int) -> dict[Moment, list[int]]:
        """Return the ticks of a module's events, by moment.

        Args:
            name: the name of a followed module.
            start: the first tick to consider.
            stop: the last tick to consider.

        Returns:
            The ticks of each `Moment` that occurred, in order.
        """
        ticks: dict[Moment, list[int]] = {}
        for tick, moment in self._notes[name]:
            if start <= tick <= stop:
                ticks.setdefault(moment, []).append(tick)
        return ticks

    def visits(
        self, start: int, stop: int, names: Iterable[str] | None = None
    ) -> dict[str, BlockTicks]:
        """Return the modules that ran in one micro-batch, in the order of their forward passes.

        If the inputs of a block need no gradient, its backward pass ends at `stop`.

        Args:
            start: the tick at which the micro-batch starts.
            stop: the tick at which the micro-batch ends.
            names: the names of followed modules; by default the blocks that share no parameter.

        Returns:
            The ticks of each module that ran, by its name.
        """
        wanted = self.names if names is None else [n for n in names if n in self._modules]
        every = {name: self.ticks(name, start, stop) for name in wanted}
        together = _together(every)
        blocks = []
        for place, (name, ticks) in enumerate(every.items()):
            if "forward begins" not in ticks:
                continue
            begins = min(ticks.get("backward begins", [stop]))
            ends = max(ticks.get("backward ends", [stop]))
            if ends in together:
                # Blocks share an input, whose gradient says nothing about the end of this block.
                ends = max(ticks.get("parameter's gradient", [ends]))
            forward = (min(ticks["forward begins"]), max(ticks["forward ends"]))
            parameters = list(self._modules[name].parameters())
            backward = (begins, max(begins, ends))
            ticked = self._block_ticks(parameters, forward, backward)
            blocks.append((name, replace(ticked, place=place, name=name)))
        return dict(sorted(blocks, key=lambda pair: pair[1].forward))

    def outside_blocks(self, start: int, stop: int) -> BlockTicks:
        """Return the parameters outside of called blocks, with the ticks of one micro-batch.

        The forward pass ends when the model's does, before the loss. The backward pass begins when
        the gradient of the model's output exists, after the backward pass of the loss.

        Args:
            start: the tick at which the micro-batch starts.
            stop: the tick at which the micro-batch ends.
        """
        moments = self.ticks(_ALL, start, stop)
        begins = min(moments.get("backward begins", [start]))
        ends = max(moments.get("forward ends", [stop]))
        rest = [*self._rest, *self._only_used(start, stop)]
        return self._block_ticks(rest, (start, ends), (begins, stop))

    def _block_ticks(
        self, parameters: list[nn.Parameter], forward: tuple[int, int], backward: tuple[int, int]
    ) -> BlockTicks:
        return BlockTicks(
            tuple(tuple(p.shape) for p in parameters),
            tuple(p.requires_grad for p in parameters),
            forward,
            backward,
            packed=tuple(p.dtype == torch.uint8 for p in parameters),
            left_out=tuple(id(p) in self._left_out for p in parameters),
        )

    def _only_used(self, start: int, stop: int) -> Iterator[nn.Parameter]:
        """Yield the parameters of blocks that are used without a call, such as by a method."""
        for name in self.names:
            moments = self.ticks(name, start, stop)
            if "forward begins" not in moments and "parameter's gradient" in moments:
                yield from self._modules[name].parameters()

    def loss_ticks(self, start: int, stop: int) -> int:
        """Return the number of ticks from the end of the model's forward pass to `stop`.

        Args:
            start: the tick at which the forward pass starts.
            stop: the tick at which the forward pass of the loss ends.
        """
        return stop - max(self.ticks(_ALL, start, stop).get("forward ends", [stop]))


def _together(every: Mapping[str, Mapping[Moment, list[int]]]) -> set[int]:
    """Return the ticks at which the gradient of an input shared by several blocks is complete."""
    last = (max(ticks["backward ends"]) for ticks in every.values() if "backward ends" in ticks)
    return {tick for tick, times in Counter(last).items() if times > 1}


def _module(model: nn.Module, name: str) -> nn.Module | None:
    try:
        return model.get_submodule(name)
    except AttributeError:  # it belongs to another stage
        return None


class SectionHooks:
    """Records every operation of a model, and the sizes of the inputs of its blocks.

    Args:
        names: the names of the blocks, in the order of the forward pass.
        contiguous_gradients: whether to copy gradients of a block's output to the output's layout,
            as if they were sent between ranks.
    """

    def __init__(self, names: Sequence[str], *, contiguous_gradients: bool = False) -> None:
        self.names = tuple(names)
        self.copies_gradient = False
        """See `RecordedSections.copies_gradient`."""
        self._contiguous_gradients = contiguous_gradients
        self.work: list[tuple[float, ...]] = []
        """For each operation (tick, FLOPs in fp32 and fp64, FLOPs in bf16 and fp16, bytes, calls,
        m, n, k, batch); the last four are a `ProductSize`."""
        self.incoming: list[tuple[int, str, tuple[int, int, int]]] = []
        """For each call of a block (tick, block, bytes). The bytes are those of all inputs, of the
        inputs that get a gradient, and of the inputs that are sequence shards."""
        self.used: dict[str, set[int]] = {}
        """By the name of a parameter or buffer, the ticks at which operations used it."""
        self._owners: dict[int, str] = {}
        self.clock: Callable[[], int] = lambda: 0

    def install(self, fake: nn.Module, tracker: StorageTracker) -> AbstractContextManager[object]:
        """Add hooks to the blocks and discard earlier records; see `record.InstallHooks`."""
        for notes in (self.work, self.incoming, self.used, self._owners):
            notes.clear()
        self.clock = lambda: tracker.clock
        for name in self.names:
            block = fake.get_submodule(name)
            block.register_forward_pre_hook(self._before(name), with_kwargs=True)
            # The output of the last block is not sent.
            is_sent = self._contiguous_gradients and name != self.names[-1]
            block.register_forward_hook(self._after(is_sent=is_sent))
        for tensors in (fake.named_parameters(), fake.named_buffers()):
            for name, tensor in tensors:
                self._owners[tensor.untyped_storage()._cdata] = name
        return OperationLog(self._operation).behind(tracker)

    def _before(self, name: str) -> Any:
        def hook(_module: nn.Module, args: Any, kwargs: Any) -> None:
            arguments = [
                leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)
            ]
            sizes = [leaf.numel() * leaf.element_size() for leaf in arguments]
            wanted = [s for s, leaf in zip(sizes, arguments, strict=True) if leaf.requires_grad]
            sequence_shards = [
                leaf for leaf in leaves_of((args, kwargs)) if _is_sequence_shard(leaf)
            ]
            sent = sum(local_of(leaf).nbytes for leaf in sequence_shards)
            self.incoming.append((self.clock(), name, (sum(sizes), sum(wanted), sent)))

        return hook

    def _after(self, *, is_sent: bool) -> Any:
        def hook(_module: nn.Module, _args: Any, output: Any) -> None:
            for tensor in tree_leaves(output):
                if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                    tensor.register_hook(self._arrived(tensor.stride(), is_sent=is_sent))  # type: ignore[no-untyped-call]

        return hook

    def _arrived(self, strides: tuple[int, ...], *, is_sent: bool) -> Any:
        def hook(gradient: torch.Tensor) -> torch.Tensor:
            pairs = zip(gradient.shape, gradient.stride(), strides, strict=True)
            if any(made != sent for size, made, sent in pairs if size > 1):
                self.copies_gradient = True
                if is_sent:
                    return gradient.new_empty_strided(gradient.shape, strides)
            return gradient

        return hook

    def _operation(self, operation: Operation) -> None:
        clock = self.clock()
        for tensor in operation.inputs:
            owner = self._owners.get(tensor.untyped_storage()._cdata)
            if owner is not None:
                self.used.setdefault(owner, set()).add(clock)
        compound = compound_cost(operation.func, operation.args)
        if compound is not None:
            times = REPEAT_COUNT.get()
            self.work += [
                (clock, 0.0, 0.0, nbytes, calls * times, 0, 0, 0, 0)
                for nbytes, calls in compound.steps
            ]
            return
        if operation.func in VIEWS:
            self.work.append((clock, 0.0, 0.0, 0.0, REPEAT_COUNT.get(), 0, 0, 0, 0))
            return
        flops, nbytes = operation.flops, operation.nbytes
        low = any(t.dtype in (torch.bfloat16, torch.float16) for t in operation.inputs)
        sizes = (0.0 if low else flops, flops if low else 0.0, nbytes)
        product = operation.product if flops else ProductSize()
        self.work.append((clock, *sizes, REPEAT_COUNT.get(), *product))


def _is_sequence_shard(leaf: Any) -> bool:
    """Whether a leaf is a sequence shard. Stages send such shards without gathering them."""
    return is_sliced(leaf) and Crossing(leaf.group).sequence_shard(leaf) == (
        leaf.slices,
        leaf.group,
    )
