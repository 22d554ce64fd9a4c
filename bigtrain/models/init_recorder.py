"""Runs a constructor on meta and records what it does to its tensors.

A constructor under `InitRecorder` allocates nothing: its tensors are on meta, and every operation
that makes or changes one is kept. Where torch drops on meta what the replay needs (the values
of `torch.tensor([...])`, initialisers that return early) it is caught on the way; where that
is not possible `CannotDefer` says why, and the constructor is to be run for real.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from bigtrain.models.init_replay import CPU, CannotDefer, InitRecording, RecordedCall, view_storage

_ALLOCATIONS = frozenset({"empty", "empty_like", "empty_strided", "empty_permuted"}) | frozenset(
    {"new_empty", "new_empty_strided"}
)
_OVERWRITES = frozenset({"normal_", "uniform_", "fill_", "zero_", "copy_", "random_"})
_CONSTANTS = frozenset({torch.tensor, torch.as_tensor, torch.asarray})
_VALUE_READS = frozenset({"item", "tolist", "numpy", "__array__"}) | frozenset(
    {"__bool__", "__int__", "__float__", "__index__", "__complex__"}
)
_IS_META = torch.Tensor.is_meta.__get__  # type: ignore[attr-defined]


class InitRecorder:
    """A context in which tensors are made on meta and what is done to them is recorded.

    Two modes share it: one below autograd sees every operation; one above sees the few calls
    that never arrive below with their meaning intact, because torch drops their values on meta.
    """

    def __init__(self) -> None:
        self.recording = InitRecording()
        self.busy = False
        """While True, torch works for the recorder itself and nothing is recorded."""
        self._lent: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Real tensors that lie over someone else's memory, and what was in it."""
        self._modes = (torch.device("meta"), _Calls(self), _Operations(self))

    def __enter__(self) -> InitRecorder:
        for mode in self._modes:
            mode.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for mode in reversed(self._modes):
            mode.__exit__(kind, error, trace)

    def check(self) -> None:
        """Confirm, after the construction, that what was taken for constant stayed so.

        Raises:
            CannotDefer: it did not.
        """
        if not all(torch.equal(tensor, before) for tensor, before in self._lent):
            raise CannotDefer("it changes an array after making a tensor of it")

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Let torch calls through unseen."""
        before, self.busy = self.busy, True
        try:
            yield
        finally:
            self.busy = before

    def value(self, tensor: torch.Tensor) -> torch.Tensor:
        """The values of a meta tensor, as a CPU tensor, where they are not random.

        Raises:
            CannotDefer: they are random, and the seed is not known yet.
        """
        with self.paused():
            spec = self.recording.spec(tensor)
            closure = self.recording.closure(spec.storage)
            if self.recording.is_random(closure):
                raise CannotDefer("it reads values that are random")
            storage = self.recording.replay(spec.storage, closure, lambda _: 0)
            return view_storage(storage, spec).clone()

    def constant(self, function: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Make a tensor of given values for real, and record its copy to meta."""
        with self.paused():
            real = function(*args, **{**kwargs, "device": CPU})
        return real.detach().to("meta").requires_grad_(real.requires_grad)

    def adopted(self, real: torch.Tensor) -> torch.Tensor:
        """Put on meta, and record, a tensor that torch made over an array's memory."""
        with self.paused():
            values = real.detach().clone()
            self._lent.append((real, values))
            kwargs = {"device": torch.device("meta")}
            copy = torch.ops.aten._to_copy.default
            result: torch.Tensor = copy(values, **kwargs)
        self.record(copy, (values,), kwargs, outputs=(result,))
        return result

    def initialization(self, tensor: torch.Tensor, frame: FrameType) -> bool:
        """Answer `tensor.is_meta`; a function of torch.nn.init that asks is recorded whole.

        Such functions return early on meta, so their operations are never seen.

        Raises:
            CannotDefer: someone else asks, and may skip what we must record.
        """
        code = frame.f_code
        function = getattr(torch.nn.init, code.co_name, None)
        if getattr(function, "__code__", None) is not code or function is None:
            raise CannotDefer(f"{code.co_name} asks whether a tensor is on meta")
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        kwargs = {name: frame.f_locals[name] for name in names}
        self.record(function, (), kwargs, random=True, written=(tensor,), overwrites=True)
        return True

    def record(
        self,
        function: Callable[..., Any],
        args: Any,
        kwargs: dict[str, Any],
        *,
        outputs: Sequence[Any] = (),
        written: Sequence[torch.Tensor] = (),
        overwrites: bool = False,
        random: bool = False,
    ) -> None:
        """Add one call to the recording, after it was made."""
        with self.paused():
            recording = self.recording
            leaves = tree_leaves((args, kwargs))
            read = [recording.spec(leaf).storage for leaf in leaves if _on_meta(leaf)]
            if any(isinstance(leaf, torch.Generator) for leaf in leaves):
                raise CannotDefer("it draws from a generator of its own")
            changed = [recording.spec(tensor).storage for tensor in written]
            whole = overwrites and _covers_storage(written[0]) and read.count(changed[0]) == 1
            fresh = tuple(
                recording.spec(leaf) if _on_meta(leaf) and recording.adopt(leaf) else None
                for leaf in outputs
            )
            made = [spec.storage for spec in fresh if spec]
            if not made and not changed:
                return  # a view
            frozen_args, frozen_kwargs = tree_map(self._freeze, (args, kwargs))
            reads = tuple(dict.fromkeys(r for r in read if not (whole and r == changed[0])))
            operation = RecordedCall(
                function=function,
                args=frozen_args,
                kwargs=frozen_kwargs,
                fresh=fresh,
                reads=reads,
                overwritten=changed[0] if whole else None,
                random=random,
                default_dtype=torch.get_default_dtype(),
            )
            recording.append(operation, [*made, *changed])

    def _freeze(self, leaf: Any) -> Any:
        if _on_meta(leaf):
            return self.recording.spec(leaf)
        if isinstance(leaf, torch.Tensor):
            return leaf.detach().clone()  # it may be changed after this call
        if isinstance(leaf, torch.device):
            return CPU
        return leaf


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, recorder: InitRecorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.recorder = recorder

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        recorder, kwargs = self.recorder, kwargs or {}
        if recorder.busy:
            return func(*args, **kwargs)
        name = func.overloadpacket.__name__
        if name == "_to_copy" and _on_meta(args[0]) and _leaves_meta(kwargs.get("device")):
            return func(recorder.value(args[0]), *args[1:], **kwargs)
        if name == "lift_fresh" and args[0].device == CPU:  # torch.from_numpy, which no mode sees
            return recorder.adopted(args[0])
        with recorder.paused():
            result = func(*args, **kwargs)
            outputs = tree_leaves(result)
        if name == "set_" or not any(map(_on_meta, (*tree_leaves((args, kwargs)), *outputs))):
            return result  # the tensor changes its storage, no storage changes; or all is real
        if name in _ALLOCATIONS:
            recorder.recording.adopt(result)
            return result
        recorder.record(
            func,
            args,
            kwargs,
            outputs=outputs,
            written=_written(func, args, kwargs),
            overwrites=name in _OVERWRITES,
            random=torch.Tag.nondeterministic_seeded in func.tags,
        )
        return result


class _Calls(TorchFunctionMode):
    def __init__(self, recorder: InitRecorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        recorder, kwargs = self.recorder, kwargs or {}
        if recorder.busy:
            return func(*args, **kwargs)
        if func == _IS_META and _on_meta(args[0]):
            return recorder.initialization(args[0], sys._getframe(1))
        name = getattr(func, "__name__", "")
        data: Any = args[0] if args else kwargs.get("data")
        new = name == "new_tensor" and _on_meta(data)
        if new or (func in _CONSTANTS and not isinstance(data, torch.Tensor)):
            if new:
                func, args, kwargs = torch.tensor, args[1:], {"dtype": data.dtype, **kwargs}
            if not _leaves_meta(kwargs.get("device")):
                return recorder.constant(func, args, kwargs)
            with recorder.paused():
                return func(*args, **kwargs)
        if name in _VALUE_READS and _on_meta(args[0]):
            return func(recorder.value(args[0]), *args[1:], **kwargs)
        return func(*args, **kwargs)


def _on_meta(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.device.type == "meta"


def _leaves_meta(device: Any) -> bool:
    return device is not None and torch.device(device).type != "meta"


def _covers_storage(tensor: torch.Tensor) -> bool:
    size = tensor.numel() * tensor.element_size()
    return tensor.is_contiguous() and size == tensor.untyped_storage().nbytes()


def _written(func: Any, args: Any, kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The meta tensors among the arguments that the operator's schema says it writes."""
    written = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            by_position = position < len(args) and not argument.kwarg_only
            value = args[position] if by_position else kwargs.get(argument.name)
            written += [leaf for leaf in tree_leaves(value) if _on_meta(leaf)]
    return written
