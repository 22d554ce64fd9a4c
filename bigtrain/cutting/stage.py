"""One stage of a cut model: the user's own forward pass, of which it computes its part.

Every stage runs the code of the modules that the cuts go through. Before its part it computes
with ghosts and skips all calls, at the end of its part it leaves by an exception. So a stage
needs no graph of the model: control flow, train and eval mode, keyword arguments, dataclasses
and skip connections are those of the user's code.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from bigtrain.activations.recompute import checkpoint_block
from bigtrain.cutting.placeholder import (
    PlaceholderTensor,
    become_real,
    forbid_placeholders,
    placeholder_like,
    placeholder_phase,
)
from bigtrain.cutting.stage_program import SkippedResult, StageProgram, ValueId
from bigtrain.data.loader import MicroBatch
from bigtrain.devices import generator_state, set_generator_state
from bigtrain.errors import ConfigError
from bigtrain.losses.chunked_cross_entropy import is_head_loss
from bigtrain.losses.global_mean import is_apart, loss_scope, unwind_frames
from bigtrain.losses.loss import Loss
from bigtrain.slicing.scatter_gather import Crossing
from bigtrain.tensors.tree import map_tensors, matching_tensors, tree_tensors
from bigtrain.tracing.call_hooks import handling_calls, pretend_compiling, returned_tensors

GetProgram = Callable[[MicroBatch, bool], StageProgram]
"""The script for a micro-batch of these shapes, and whether it trains."""
Crossings = tuple[Crossing, Crossing]
"""How what comes into a stage, and what goes out of it, is handed on."""


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
        script: GetProgram,
        loss: Loss,
        device: torch.device,
        cut_through: frozenset[str] = frozenset(),
        own_blocks: tuple[str, ...] = (),
    ) -> None:
        super().__init__()
        self._parameters = model._parameters
        self._buffers = model._buffers
        self._modules = model._modules
        self._non_persistent_buffers_set = model._non_persistent_buffers_set
        self.training = model.training
        self.index, self.count = index, count
        self.cut_through, self.own_blocks = cut_through, own_blocks
        self.recompute: Literal["never", "except_last", "always"] = "never"
        self.crossings: Crossings = (Crossing(), Crossing())
        """Of the wires: what each rank sends and receives of them, see `slicing.scatter_gather`."""
        self._script, self._loss, self._device = script, loss, device
        self._whole = _Hidden(model)

    @property
    def users_module(self) -> nn.Module:
        """The model with this stage's tensors in it, as the user wrote it."""
        return self._whole.module

    def get_submodule(self, target: str) -> nn.Module:
        """See `nn.Module.get_submodule`: the user's, also where it is called as a field of this."""
        return self._whole.module.get_submodule(target) if target else self

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
        # The model's own `train`, which may be the user's.
        self._whole.module.train(mode)
        self.training = mode
        return self

    def incoming(self, micro_batch: MicroBatch) -> tuple[Tensor, ...]:
        """Shapes and types of the wires that come in, on the meta device."""
        return self.wires(self._of(micro_batch), 0)

    def outgoing(self, micro_batch: MicroBatch) -> tuple[Tensor, ...]:
        """Shapes and types of the wires that go out."""
        return self.wires(self._of(micro_batch), 1)

    def wires(self, script: StageProgram, side: int) -> tuple[Tensor, ...]:
        """Those that come in (0) or go out (1) by a script, as this rank sends or receives them."""
        boundary = ((), *script.boundaries, ())[self.index + side]
        return tuple(wire.sent_meta(self.crossings[side]) for wire in boundary)

    def gathered_bytes(self, script: StageProgram) -> int:
        """Of the wires that come in by a script in parts: the bytes of all parts."""
        wires = ((), *script.boundaries)[self.index]
        return sum(wire.gathered_bytes(self.crossings[0]) for wire in wires)

    def fingerprint(self, micro_batch: MicroBatch) -> str:
        """Tells the scripts of two ranks apart: all ranks must have the same one."""
        return self._of(micro_batch).fingerprint()

    def _of(self, micro_batch: MicroBatch) -> StageProgram:
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

        # Given what it computes from, torch knows of which devices random numbers are drawn.
        def compute(wires: tuple[Tensor, ...], _inputs: Any) -> Any:
            return self._compute(wires, micro_batch, scale)

        return checkpoint_block(self, compute, wires, micro_batch.inputs)

    def _compute(
        self, wires: tuple[Tensor, ...], micro_batch: MicroBatch, scale: float | None
    ) -> Any:
        if scale is None or not self.last:
            return self._part(wires, micro_batch)
        with loss_scope(self._loss, micro_batch):
            output = self._part(wires, micro_batch)
            loss = self._loss(output, micro_batch.targets, micro_batch.count)
        if micro_batch.count == 0:  # padding: it only keeps the ranks in step
            loss = loss * 0.0
        return loss * scale

    def _part(self, wires: tuple[Tensor, ...], micro_batch: MicroBatch) -> Any:
        script = self._of(micro_batch)
        inputs = _own(micro_batch.inputs, script.copied)
        stage_pass = _Run(script, self.index, wires, inputs, self._device, self.crossings)
        stage_pass.functions.named = self.named_parameters
        try:
            with (
                placeholder_phase(),
                handling_calls(stage_pass),
                stage_pass.functions,
                pretend_compiling(),
            ):
                if not self.index:
                    forbid_placeholders()
                try:
                    output = self._whole(inputs)
                except _Done:
                    unwind_frames()  # before what was entered ahead of them is left
                    raise
            stage_pass.check_output(output)
        except _Done as done:
            if done.run is not stage_pass:
                raise
            return stage_pass.outgoing()
        finally:
            stage_pass.forget()
        return output


def _own(inputs: Any, copied: frozenset[int]) -> Any:
    """The inputs in containers of their own; those that the model changes are copied."""
    places = itertools.count()
    return map_tensors(inputs, lambda t: t.clone() if next(places) in copied else t)


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
        script: StageProgram,
        index: int,
        wires: tuple[Tensor, ...],
        inputs: Any,
        device: torch.device,
        crossings: Crossings,
    ) -> None:
        self._script, self._index, self._device = script, index, device
        self._after = crossings[1]
        # Here, and not where the part begins: that may be under no_grad.
        incoming = script.boundaries[index - 1] if index else ()
        self._received = [
            (wire.value_id, wire.receive(tensor, crossings[0]))
            for wire, tensor in zip(incoming, wires, strict=True)
        ]
        self._begin = script.cuts[index - 1] if index else -1
        self._end = script.cuts[index] if index < len(script.cuts) else -1
        self._before_part = index > 0
        self._event = 0
        self._objects: dict[ValueId, Tensor] = {}
        # What the spine draws before this part is another stage's, and must not be missing here.
        self._drawn = _random_state(device) if script.random and index else None
        self.functions = _Functions(self)
        self._note(-1, tree_tensors(inputs))

    def call(
        self, name: str, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """See `CallHandler.call`."""
        event = self._count_event((name,))
        if event == self._end:
            raise _Done(self)
        if event == self._begin:
            with self.functions.paused():
                self._enter_part()
        skipped = self._script.results.get(event)
        if skipped is None:  # a module that a cut goes through: its code is followed
            return run(*args, **kwargs)
        if self._before_part:
            return self._skip(event, skipped)
        with handling_calls(None), self.functions.paused(), pretend_compiling(on=False):
            output = run(*args, **kwargs)
        try:
            # torch's own fast paths return an empty tensor for a None, which nobody takes.
            returns_outputs = not is_head_loss(output)
            leaves = matching_tensors(skipped.template, output) if returns_outputs else [output]
        except ValueError as error:
            raise ConfigError(
                f"strategy.cut: {name!r} returned {_shown(output)}, and in its rehearsal "
                f"{_shown(skipped.template)}. {_SAME_WAY}"
            ) from error
        self._note(event, leaves)
        return output

    def function(self, leaves: list[Tensor], used: Callable[[], str]) -> None:
        """A function of torch has returned tensors to the code of the spine."""
        event = self._count_event(tuple(tuple(leaf.shape) for leaf in leaves), used)
        self._note(event, leaves)

    def _count_event(self, what: tuple[object, ...], used: Callable[[], str] = str) -> int:
        """Count an event; it must be the one that the rehearsal saw.

        `used` names the parameters that it is computed with.
        """
        event, expected = self._event, self._script.expected
        if event >= len(expected) or expected[event] != what:
            expected_event = expected[event] if event < len(expected) else ("the end",)
            raise ConfigError(
                f"strategy.cut: stage {self._index} takes another way through the model than its "
                f"rehearsal: at step {event} it comes to {what}{used()} instead of "
                f"{expected_event}. {_SAME_WAY}"
            )
        self._event += 1
        return event

    def check_output(self, output: Any) -> None:
        """Complain where the model's end is reached, and this stage's part has not been done."""
        leaves = tree_tensors(output)
        if self._end >= 0 or self._before_part or self._event != len(self._script.expected):
            raise ConfigError(
                f"strategy.cut: stage {self._index} came to the end of the model without its part. "
                f"{_SAME_WAY}"
            )
        if any(isinstance(leaf, PlaceholderTensor) for leaf in leaves):
            raise ConfigError(
                "strategy.cut: the model's output holds a tensor of another stage that was not "
                f"sent. {_SAME_WAY}"
            )

    def outgoing(self) -> tuple[Tensor, ...]:
        """The wires at the end of this part."""
        wires = self._script.boundaries[self._index]
        outputs = [self._objects[wire.value_id] for wire in wires]
        for tensor, wire in zip(outputs, wires, strict=True):
            expected_meta = wire.meta
            same = tensor.shape == expected_meta.shape and tensor.dtype == expected_meta.dtype
            if not same or isinstance(tensor, PlaceholderTensor):
                raise ConfigError(
                    f"strategy.cut: stage {self._index} has {tuple(tensor.shape)} of "
                    f"{tensor.dtype} to send, and its rehearsal {tuple(expected_meta.shape)} of "
                    f"{expected_meta.dtype}. {_SAME_WAY}"
                )
        pairs = zip(outputs, wires, strict=True)
        return tuple(wire.send(tensor, self._after) for tensor, wire in pairs)

    def forget(self) -> None:
        """Let go of the tensors at once: the run and its watch of functions hold each other."""
        self._objects.clear()
        self._wires = ()

    def _enter_part(self) -> None:
        for mark, tensor in self._received:
            become_real(self._objects[mark], tensor)
        self._received.clear()
        forbid_placeholders()
        self._before_part = False
        if self._drawn is not None:
            _set_random_state(self._drawn, self._device)

    def _skip(self, event: int, result: SkippedResult) -> Any:
        marks = iter(result.value_ids)
        leaves: list[Tensor] = []

        def make(meta: Tensor) -> Tensor:
            mark = next(marks)
            if mark is None:
                leaf: Tensor = placeholder_like(meta, self._device)
            else:
                leaf = leaves[mark[1]] if mark[0] == event else self._objects[mark]
            leaves.append(leaf)
            return leaf

        with self.functions.paused():
            output = map_tensors(result.template, make)
        self._note(event, leaves)
        return output

    def _note(self, event: int, leaves: list[Tensor]) -> None:
        for position, leaf in enumerate(leaves):
            if (event, position) in self._script.needed:
                self._objects[(event, position)] = leaf


def _shown(structure: Any) -> str:
    return str(map_tensors(structure, lambda tensor: f"a tensor {tuple(tensor.shape)}"))


_SAME_WAY = (
    "What a forward pass does must follow from the inputs' shapes and the mode alone. Take what "
    "changes from call to call out of it, or use a strategy without a cut."
)


def _random_state(device: torch.device) -> tuple[Tensor, Tensor | None]:
    return torch.get_rng_state(), generator_state(device)


def _set_random_state(state: tuple[Tensor, Tensor | None], device: torch.device) -> None:
    torch.set_rng_state(state[0])
    if state[1] is not None:
        set_generator_state(state[1], device)


class _Functions(TorchFunctionMode):
    """Counts what functions of torch give to the code of the spine."""

    def __init__(self, run: _Run) -> None:
        super().__init__()
        self._run = run
        self._off = False
        self.named: Callable[[], Iterable[tuple[str, nn.Parameter]]] = tuple
        """Gives the parameters of the stage by name, where there is something to complain of."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self._off and not is_apart():
            leaves = returned_tensors(result)
            if leaves:
                self._run.function(leaves, lambda: self._used(args, kwargs))
        return result

    def _used(self, *given: Any) -> str:
        ids = {id(tensor) for tensor in tree_tensors(given)}
        names = [name for name, parameter in self.named() if id(parameter) in ids]
        return f", computed with {', '.join(names)}," if names else ""

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
