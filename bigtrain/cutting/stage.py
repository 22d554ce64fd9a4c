"""One stage of a cut model: the user's own forward pass, of which it computes its part.

Every stage runs the code of the modules that the cuts go through. Before its part it computes
with ghosts and skips all calls, at the end of its part it leaves by an exception. So a stage
needs no graph of the model: control flow, train and eval mode, keyword arguments, dataclasses
and skip connections are those of the user's code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from bigtrain.cutting.calls import watching
from bigtrain.cutting.ghost import become, ghost_like
from bigtrain.cutting.script import Mark, Result, Script
from bigtrain.cutting.structure import map_tensors, tensors_of
from bigtrain.data.loader import MicroBatch
from bigtrain.recompute import recomputed
from bigtrain.tasks import Loss

GetScript = Callable[[MicroBatch, bool], Script]
"""The script for a micro-batch of these shapes, and whether it trains."""


class Stage(nn.Module):
    """A model of which only one stage's parameters are left, and its part of the forward pass.

    It has the parameters, buffers and modules of `model` under their own names.

    Args:
        model: the user's module, its calls watched (`cut.Cut.stage` makes it so).
        index: which stage this is, from 0.
        count: how many there are.
        script: what is to be done for a micro-batch.
        loss: sums over valid targets; taken by the last stage.
        device: where it computes.
        cut_through: names of the modules whose own code a cut goes through.
        own_blocks: the blocks of the whole model that no cut goes through; see `blocks`.
    """

    def __init__(
        self,
        model: nn.Module,
        index: int,
        count: int,
        script: GetScript,
        loss: Loss,
        device: torch.device,
        cut_through: frozenset[str] = frozenset(),
        own_blocks: tuple[str, ...] = (),
    ) -> None:
        super().__init__()
        self._parameters = model._parameters
        self._buffers = model._buffers
        self._modules = model._modules
        self.training = model.training
        self.index, self.count = index, count
        self.cut_through, self.own_blocks = cut_through, own_blocks
        self.recompute: Literal["never", "except_last", "always"] = "never"
        self._script, self._loss, self._device = script, loss, device
        self._whole = _Hidden(model)

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        return self._device

    def to_device(self, device: torch.device) -> None:
        """Compute there from now on; the caller has moved the parameters."""
        self._device = device

    @property
    def last(self) -> bool:
        """Whether the model's output comes from here."""
        return self.index == self.count - 1

    def train(self, mode: bool = True) -> Stage:  # noqa: FBT001, FBT002 - as nn.Module has it
        """See `nn.Module.train`."""
        super().train(mode)
        self._whole.module.training = mode
        return self

    def incoming(self, micro_batch: MicroBatch) -> tuple[Tensor, ...]:
        """Shapes and types of the wires that come in, on the meta device."""
        if self.index == 0:
            return ()
        return tuple(wire.sent for wire in self._of(micro_batch).wires[self.index - 1])

    def outgoing(self, micro_batch: MicroBatch) -> tuple[Tensor, ...]:
        """Shapes and types of the wires that go out."""
        return tuple(wire.sent for wire in self._of(micro_batch).wires[self.index])

    def _of(self, micro_batch: MicroBatch) -> Script:
        return self._script(micro_batch, self.training)

    def forward(
        self,
        *wires: Tensor,
        micro_batch: MicroBatch,
        scale: float | None = None,
        final: bool = True,
    ) -> Any:
        """Compute this stage's part.

        Args:
            wires: from the stage before, as `incoming` says.
            micro_batch: inputs and targets on the device; every stage has them.
            scale: what the summed loss is multiplied by.
            final: whether it is the last micro-batch of a step.

        Returns:
            The wires for the next stage; of the last stage the loss, or, without a scale, the
            model's output.
        """
        again = self.recompute == "always" or (self.recompute == "except_last" and not final)
        if not (again and torch.is_grad_enabled()):
            return self._compute(wires, micro_batch, scale)
        return recomputed(self, lambda: self._compute(wires, micro_batch, scale))

    def _compute(
        self, wires: tuple[Tensor, ...], micro_batch: MicroBatch, scale: float | None
    ) -> Any:
        run = _Run(self._of(micro_batch), self.index, wires, micro_batch.inputs, self._device)
        try:
            with watching(run), run.functions:
                output = self._whole(micro_batch.inputs)
        except _Done as done:
            if done.run is not run:
                raise
            return run.outgoing()
        if scale is None:
            return output
        loss = self._loss(output, micro_batch.targets, micro_batch.count)
        if micro_batch.count == 0:  # padding: it only keeps the ranks in step
            loss = loss * 0.0
        return loss * scale


class _Hidden:
    """A module that is no child of the one that holds it: its names are that one's already."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self, inputs: Any) -> Any:
        return self.module(inputs)


class _Done(BaseException):
    """A stage's part is computed; nothing below the stage may catch this."""

    def __init__(self, run: _Run) -> None:
        super().__init__("the stage is done")
        self.run = run


class _Run:
    """One forward pass of one stage; watches the calls that the spine's code makes."""

    def __init__(
        self,
        script: Script,
        index: int,
        wires: tuple[Tensor, ...],
        inputs: Any,
        device: torch.device,
    ) -> None:
        self._script, self._index, self._wires, self._device = script, index, wires, device
        self._begin = script.cuts[index - 1] if index else -1
        self._end = script.cuts[index] if index < len(script.cuts) else -1
        self._ghostly = index > 0
        self._event = 0
        self._objects: dict[Mark, Tensor] = {}
        self.functions = _Functions(self)
        self._note(-1, tensors_of(inputs))

    def call(
        self, name: str, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """See `Watcher.call`."""
        del name
        event = self._event
        self._event += 1
        if event == self._end:
            raise _Done(self)
        if event == self._begin:
            with self.functions.paused():
                self._begin_part()
        result = self._script.results.get(event)
        if result is None:  # a module that a cut goes through: its code is followed
            return run(*args, **kwargs)
        if self._ghostly:
            return self._skip(event, result)
        with watching(None), self.functions.paused():
            output = run(*args, **kwargs)
        self._note(event, tensors_of(output))
        return output

    def function(self, leaves: list[Tensor]) -> None:
        """A function of torch has returned tensors to the code of the spine."""
        self._note(self._event, leaves)
        self._event += 1

    def outgoing(self) -> tuple[Tensor, ...]:
        """The wires at the end of this part."""
        return tuple(
            wire.pack(self._objects[wire.mark].to(wire.meta.dtype))
            for wire in self._script.wires[self._index]
        )

    def _begin_part(self) -> None:
        for wire, tensor in zip(self._script.wires[self._index - 1], self._wires, strict=True):
            become(self._objects[wire.mark], wire.unpack(tensor))
        self._ghostly = False

    def _skip(self, event: int, result: Result) -> Any:
        marks = iter(result.marks)
        leaves: list[Tensor] = []

        def make(meta: Tensor) -> Tensor:
            mark = next(marks)
            leaf = ghost_like(meta, self._device) if mark is None else self._objects[mark]
            leaves.append(leaf)
            return leaf

        with self.functions.paused():
            output = map_tensors(result.template, make)
        self._note(event, leaves)
        return output

    def _note(self, event: int, leaves: list[Tensor]) -> None:
        for place, leaf in enumerate(leaves):
            if (event, place) in self._script.kept:
                self._objects[(event, place)] = leaf


class _Functions(TorchFunctionMode):
    """Counts what functions of torch give to the code of the spine."""

    def __init__(self, run: _Run) -> None:
        super().__init__()
        self._run = run
        self._off = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self._off:
            leaves = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
            if leaves:
                self._run.function(leaves)
        return result

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Not watch: what a whole call does inside is its own affair, and must cost nothing."""
        top = torch._C._len_torch_function_stack() - 1
        ours = top >= 0 and torch._C._get_function_stack_at(top) is self
        if ours:
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        off, self._off = self._off, True
        try:
            yield
        finally:
            self._off = off
            if ours:
                self.__enter__()  # type: ignore[no-untyped-call]
