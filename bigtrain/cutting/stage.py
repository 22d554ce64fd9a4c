"""A stage of a cut model. It runs the user's forward pass, but computes only the stage's part.

Every stage runs the code of the modules that the cuts go through. Before its part, a stage computes
with placeholders and skips the calls of other modules. At the end of its part, it leaves the
forward pass by an exception. So a stage needs no graph of the model: control flow, train and eval
mode, keyword arguments, dataclasses and skip connections work as in the user's code.
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
from bigtrain.tensors.not_a_child import NotAChild
from bigtrain.tensors.tree import map_tensors, matching_tensors, tree_tensors
from bigtrain.tracing.call_hooks import handling_calls, pretend_compiling, returned_tensors

GetProgram = Callable[[MicroBatch, bool], StageProgram]
"""Returns the program for the shapes of a micro-batch; the bool is true in training."""
Crossings = tuple[Crossing, Crossing]
"""How the inputs of a stage are received, and how its outputs are sent, with the tp axis."""


class Stage(nn.Module):
    """A module that computes one stage's part of a model, with the parameters of that stage only.

    It has the parameters, buffers and modules of `model` under the same names.

    Args:
        model: the user's module, stripped to this stage; `cut.Cut.stage` intercepts its calls.
        index: the index of the stage, from 0.
        count: the number of stages of the whole model.
        program: returns the program of a micro-batch.
        loss: the loss, summed over valid targets; the last stage computes it.
        device: the device on which the stage computes.
        cut_through: names of the modules whose own code every stage runs, because a cut goes
            through them.
        own_blocks: names of the blocks of the whole model that no cut goes through.
    """

    def __init__(
        self,
        model: nn.Module,
        index: int,
        count: int,
        program: GetProgram,
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
        """How inputs and outputs cross between stages; see `slicing.scatter_gather`."""
        self._program, self._loss, self._device = program, loss, device
        self._whole = NotAChild(model)

    @property
    def users_module(self) -> nn.Module:
        """The user's module with the tensors of this stage."""
        return self._whole.module

    def get_submodule(self, target: str) -> nn.Module:
        """See `nn.Module.get_submodule`. Returns modules of the user's module."""
        return self._whole.module.get_submodule(target) if target else self

    @property
    def device(self) -> torch.device:
        """The device on which the stage computes."""
        return self._device

    def to_device(self, device: torch.device) -> None:
        """Set the device on which the stage computes; the caller moves the parameters to it."""
        self._device = device

    @property
    def last(self) -> bool:
        """Whether this is the last stage, which computes the model's output and the loss."""
        return self.index == self.count - 1

    def train(self, mode: bool = True) -> Stage:  # noqa: FBT001, FBT002 - as nn.Module has it
        """See `nn.Module.train`."""
        # The user may have overridden `train` of the model.
        self._whole.module.train(mode)
        self.training = mode
        return self

    def incoming(self, micro_batch: MicroBatch) -> tuple[Tensor, ...]:
        """Return the inputs of this stage for a micro-batch, as meta tensors."""
        return self.boundary_metas(self._program_of(micro_batch), 0)

    def outgoing(self, micro_batch: MicroBatch) -> tuple[Tensor, ...]:
        """Return the outputs of this stage for a micro-batch, as meta tensors."""
        return self.boundary_metas(self._program_of(micro_batch), 1)

    def boundary_metas(self, program: StageProgram, side: int) -> tuple[Tensor, ...]:
        """Return the inputs or outputs as this rank receives or sends them, as meta tensors.

        Args:
            program: the program of a micro-batch.
            side: 0 for the inputs, 1 for the outputs.
        """
        boundary = ((), *program.boundaries, ())[self.index + side]
        return tuple(tensor.sent_meta(self.crossings[side]) for tensor in boundary)

    def gathered_bytes(self, program: StageProgram) -> int:
        """Return the whole bytes of the inputs that this rank receives in part and then gathers."""
        boundary = ((), *program.boundaries)[self.index]
        return sum(tensor.gathered_bytes(self.crossings[0]) for tensor in boundary)

    def fingerprint(self, micro_batch: MicroBatch) -> str:
        """Return a hash of the program of a micro-batch; it has to be equal on all ranks."""
        return self._program_of(micro_batch).fingerprint()

    def _program_of(self, micro_batch: MicroBatch) -> StageProgram:
        return self._program(micro_batch, self.training)

    def forward(
        self,
        *stage_inputs: Tensor,
        micro_batch: MicroBatch,
        scale: float | None = None,
        final: bool = True,
    ) -> Any:
        """Compute this stage's part of the forward pass.

        Args:
            stage_inputs: the inputs from the previous stage, of the shapes of `incoming`.
            micro_batch: the inputs and targets of the model, on the device; every stage has them.
            scale: the factor of the summed loss; None for the model's output instead of the loss.
            final: whether this is the last micro-batch of a step.

        Returns:
            A tuple of the inputs of the next stage. The last stage returns the summed loss times
            `scale`, or the model's output if `scale` is None.

        Raises:
            ConfigError: the forward pass differs from the pass that was traced.
        """
        recomputes = self.recompute == "always" or (self.recompute == "except_last" and not final)
        if not (recomputes and torch.is_grad_enabled()):
            return self._compute(stage_inputs, micro_batch, scale)

        # The inputs are arguments, because torch saves the random state of each device that has an
        # argument of the checkpoint.
        def compute(stage_inputs: tuple[Tensor, ...], _inputs: Any) -> Any:
            return self._compute(stage_inputs, micro_batch, scale)

        return checkpoint_block(self, compute, stage_inputs, micro_batch.inputs)

    def _compute(
        self, stage_inputs: tuple[Tensor, ...], micro_batch: MicroBatch, scale: float | None
    ) -> Any:
        if scale is None or not self.last:
            return self._part(stage_inputs, micro_batch)
        with loss_scope(self._loss, micro_batch):
            output = self._part(stage_inputs, micro_batch)
            loss = self._loss(output, micro_batch.targets, micro_batch.count)
        if micro_batch.count == 0:  # padding, which is computed so that this rank joins collectives
            loss = loss * 0.0
        return loss * scale

    def _part(self, stage_inputs: tuple[Tensor, ...], micro_batch: MicroBatch) -> Any:
        program = self._program_of(micro_batch)
        inputs = _copy_containers(micro_batch.inputs, program.copied)
        stage_pass = _StagePass(
            program, self.index, stage_inputs, inputs, self._device, self.crossings
        )
        stage_pass.functions.named_parameters = self.named_parameters
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
                    output = self._whole.module(inputs)
                except _Done:
                    unwind_frames()  # before the surrounding contexts are left
                    raise
            stage_pass.check_output(output)
        except _Done as done:
            if done.run is not stage_pass:
                raise
            return stage_pass.outgoing()
        finally:
            stage_pass.forget()
        return output


def _copy_containers(inputs: Any, copied: frozenset[int]) -> Any:
    """Return the inputs in new containers, with copies of the tensors at the given positions."""
    positions = itertools.count()
    return map_tensors(inputs, lambda t: t.clone() if next(positions) in copied else t)


class _Done(BaseException):
    """Raised to leave the forward pass when the stage's part is computed; the stage catches it."""

    def __init__(self, run: _StagePass) -> None:
        super().__init__("the stage is done")
        self.run = run


class _StagePass:
    """One forward pass of one stage; it handles the calls that the outer code makes."""

    def __init__(
        self,
        program: StageProgram,
        index: int,
        stage_inputs: tuple[Tensor, ...],
        inputs: Any,
        device: torch.device,
        crossings: Crossings,
    ) -> None:
        self._program, self._index, self._device = program, index, device
        self._after = crossings[1]
        # Inputs are received here, because the code at the begin of the part may be under no_grad.
        incoming = program.boundaries[index - 1] if index else ()
        self._received = [
            (boundary.value_id, boundary.receive(tensor, crossings[0]))
            for boundary, tensor in zip(incoming, stage_inputs, strict=True)
        ]
        self._begin = program.cuts[index - 1] if index else -1
        self._end = program.cuts[index] if index < len(program.cuts) else -1
        self._before_part = index > 0
        self._event = 0
        self._objects: dict[ValueId, Tensor] = {}
        # Random numbers that the outer code draws before this part belong to other stages, so the
        # random state is restored at the begin of the part.
        self._random_before = _random_state(device) if program.random and index else None
        self.functions = _Functions(self)
        self._remember(-1, tree_tensors(inputs))

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
        skipped = self._program.results.get(event)
        if skipped is None:  # every stage runs the code of a module that a cut goes through
            return run(*args, **kwargs)
        if self._before_part:
            return self._skip(event, skipped)
        with handling_calls(None), self.functions.paused(), pretend_compiling(on=False):
            output = run(*args, **kwargs)
        try:
            # torch's fast paths return an empty tensor instead of an unused None.
            returns_outputs = not is_head_loss(output)
            leaves = matching_tensors(skipped.template, output) if returns_outputs else [output]
        except ValueError as error:
            raise ConfigError(
                f"strategy.cut: {name!r} returned {_shown(output)}, and when it was traced "
                f"{_shown(skipped.template)}. {_SAME_PATH}"
            ) from error
        self._remember(event, leaves)
        return output

    def function(self, leaves: list[Tensor], used: Callable[[], str]) -> None:
        """Count the event that a function of torch has returned tensors to the outer code.

        Args:
            leaves: the tensors.
            used: returns words for messages, with the names of the parameters among the arguments.
        """
        event = self._count_event(tuple(tuple(leaf.shape) for leaf in leaves), used)
        self._remember(event, leaves)

    def _count_event(self, reached: tuple[object, ...], used: Callable[[], str] = str) -> int:
        """Count an event and compare it with the trace.

        Args:
            reached: the module that is called, or the shapes that a function returned.
            used: returns words with the names of the parameters among a function's arguments.

        Raises:
            ConfigError: the trace has another event at this position.
        """
        event, expected = self._event, self._program.expected
        if event >= len(expected) or expected[event] != reached:
            expected_event = expected[event] if event < len(expected) else ("the end",)
            raise ConfigError(
                f"strategy.cut: stage {self._index} takes another path through the model than when "
                f"it was traced: at step {event} it reaches {reached}{used()} instead of "
                f"{expected_event}. {_SAME_PATH}"
            )
        self._event += 1
        return event

    def check_output(self, output: Any) -> None:
        """Check at the end of the model that the pass has computed this stage's part."""
        leaves = tree_tensors(output)
        if self._end >= 0 or self._before_part or self._event != len(self._program.expected):
            raise ConfigError(
                f"strategy.cut: stage {self._index} reached the end of the model without running "
                f"its part. {_SAME_PATH}"
            )
        if any(isinstance(leaf, PlaceholderTensor) for leaf in leaves):
            raise ConfigError(
                "strategy.cut: the model's output contains a tensor of another stage that was not "
                f"sent. {_SAME_PATH}"
            )

    def outgoing(self) -> tuple[Tensor, ...]:
        """Return the outputs of this stage as they are sent."""
        boundary = self._program.boundaries[self._index]
        outputs = [self._objects[expected.value_id] for expected in boundary]
        for tensor, expected in zip(outputs, boundary, strict=True):
            same = tensor.shape == expected.meta.shape and tensor.dtype == expected.meta.dtype
            if not same or isinstance(tensor, PlaceholderTensor):
                raise ConfigError(
                    f"strategy.cut: stage {self._index} has {tuple(tensor.shape)} of "
                    f"{tensor.dtype} to send, and had {tuple(expected.meta.shape)} of "
                    f"{expected.meta.dtype} when it was traced. {_SAME_PATH}"
                )
        pairs = zip(outputs, boundary, strict=True)
        return tuple(expected.send(tensor, self._after) for tensor, expected in pairs)

    def forget(self) -> None:
        """Release the tensors. A reference cycle with the function mode would keep them alive."""
        self._objects.clear()
        self._received.clear()

    def _enter_part(self) -> None:
        for value_id, tensor in self._received:
            become_real(self._objects[value_id], tensor)
        self._received.clear()
        forbid_placeholders()
        self._before_part = False
        if self._random_before is not None:
            _set_random_state(self._random_before, self._device)

    def _skip(self, event: int, result: SkippedResult) -> Any:
        value_ids = iter(result.value_ids)
        leaves: list[Tensor] = []

        def make(meta: Tensor) -> Tensor:
            value_id = next(value_ids)
            if value_id is None:
                leaf: Tensor = placeholder_like(meta, self._device)
            else:
                leaf = leaves[value_id[1]] if value_id[0] == event else self._objects[value_id]
            leaves.append(leaf)
            return leaf

        with self.functions.paused():
            output = map_tensors(result.template, make)
        self._remember(event, leaves)
        return output

    def _remember(self, event: int, leaves: list[Tensor]) -> None:
        for position, leaf in enumerate(leaves):
            if (event, position) in self._program.needed:
                self._objects[(event, position)] = leaf


def _shown(structure: Any) -> str:
    return str(map_tensors(structure, lambda tensor: f"a tensor {tuple(tensor.shape)}"))


_SAME_PATH = (
    "A forward pass that is cut must depend on the inputs' shapes and the mode alone. Move code "
    "that changes from call to call out of it, or use a strategy without a cut."
)


def _random_state(device: torch.device) -> tuple[Tensor, Tensor | None]:
    return torch.get_rng_state(), generator_state(device)


def _set_random_state(state: tuple[Tensor, Tensor | None], device: torch.device) -> None:
    torch.set_rng_state(state[0])
    if state[1] is not None:
        set_generator_state(state[1], device)


class _Functions(TorchFunctionMode):
    """Counts the functions of torch that return tensors to the outer code."""

    def __init__(self, stage_pass: _StagePass) -> None:
        super().__init__()
        self._stage_pass = stage_pass
        self._off = False
        self.named_parameters: Callable[[], Iterable[tuple[str, nn.Parameter]]] = tuple
        """Returns the parameters of the stage by name, for messages."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self._off and not is_apart():
            leaves = returned_tensors(result)
            if leaves:
                self._stage_pass.function(leaves, lambda: self._used(args, kwargs))
        return result

    def _used(self, *arguments: Any) -> str:
        ids = {id(tensor) for tensor in tree_tensors(arguments)}
        names = [name for name, parameter in self.named_parameters() if id(parameter) in ids]
        return f", computed with {', '.join(names)}," if names else ""

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Count no functions inside a `with` block.

        The mode is removed inside the block, so that calls of whole modules are not slower.
        """
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
