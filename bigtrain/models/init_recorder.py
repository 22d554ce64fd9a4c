"""Run a constructor on the meta device and record its operations on tensors.

Under `InitRecorder` a constructor allocates nothing: its tensors are on meta, and every operation
that makes or changes a tensor is recorded. On meta, torch drops some information that the replay
needs (the values of `torch.tensor([...])`, and initialisers that return early), so these calls are
intercepted. If a call cannot be recorded, `CannotDefer` is raised with the reason, and the
constructor has to run on the CPU.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType, FunctionType, TracebackType
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
_INITIALISERS = {
    function.__code__: function
    for function in vars(torch.nn.init).values()
    if isinstance(function, FunctionType)
}
"""The functions of torch.nn.init by their code objects: libraries may replace the names."""
_IS_META = torch.Tensor.is_meta.__get__  # type: ignore[attr-defined]


class InitRecorder:
    """A context in which tensors are made on meta and operations on them are recorded.

    It consists of two torch modes. A dispatch mode, below autograd, sees every operation. On meta,
    torch drops the values of a few calls before the dispatch mode sees them. So a function mode,
    above autograd, sees these calls.
    """

    def __init__(self) -> None:
        self.recording = InitRecording()
        self.busy = False
        """Whether the recorder itself is calling torch; such calls are not recorded."""
        self._shared: list[tuple[torch.Tensor, torch.Tensor]] = []
        """CPU tensors that share the memory of a NumPy array, with copies of their values."""
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
        """Check after the construction that no array changed that shares memory with a tensor.

        These are the arrays given to `torch.from_numpy`, `torch.as_tensor` and `torch.asarray`.
        `torch.tensor` copies an array, which may change later.

        Raises:
            CannotDefer: an array changed after a tensor was made that shares its memory.
        """
        if not all(_equal(tensor, before) for tensor, before in self._shared):
            raise CannotDefer("it changes an array after making a tensor of it")

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Record no torch calls inside a `with` block."""
        before, self.busy = self.busy, True
        try:
            yield
        finally:
            self.busy = before

    def value(self, tensor: torch.Tensor) -> torch.Tensor:
        """Compute the values of a meta tensor, as a CPU tensor.

        Raises:
            CannotDefer: the values are random, and the seed is not known yet.
        """
        with self.paused():
            spec = self.recording.spec(tensor)
            closure = self.recording.closure(spec.storage)
            if self.recording.is_random(closure):
                raise CannotDefer("it reads values that are random")
            storage = self.recording.replay(spec.storage, closure, lambda _: 0)
            return view_storage(storage, spec).clone()

    def constant(self, function: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Make a tensor of constant values on the CPU, and return its copy on meta.

        The copy is recorded with the values.

        Args:
            function: a function such as `torch.tensor`.
            args: the arguments of the call.
            kwargs: the keyword arguments of the call.
        """
        with self.paused():
            real = function(*args, **{**kwargs, "device": CPU})
            values = real.detach()
            if function is not torch.tensor:  # the others may share the memory of an array
                values = values.clone()
                self._shared.append((real.detach(), values))
        return values.to("meta").requires_grad_(real.requires_grad)

    def adopted(self, real: torch.Tensor) -> torch.Tensor:
        """Copy a tensor that shares an array's memory to meta, and record the copy."""
        with self.paused():
            values = real.detach().clone()
            self._shared.append((real, values))
            kwargs = {"device": torch.device("meta")}
            copy = torch.ops.aten._to_copy.default
            result: torch.Tensor = copy(values, **kwargs)
        self.record(copy, (values,), kwargs, outputs=(result,))
        return result

    def initialization(self, tensor: torch.Tensor, frame: FrameType) -> bool:
        """Return `tensor.is_meta`; if a function of torch.nn.init reads it, record that function.

        The functions of torch.nn.init return early on meta, so their operations are never seen.

        Args:
            tensor: a meta tensor.
            frame: the frame that reads `tensor.is_meta`.

        Raises:
            CannotDefer: other code reads `is_meta`, and may skip operations that must be recorded.
        """
        code = frame.f_code
        function = _INITIALISERS.get(code)
        if function is None:
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
        """Add a call to the recording, after the call was made, unless it only made views.

        Args:
            function: the function that was called.
            args: its arguments.
            kwargs: its keyword arguments.
            outputs: the tensors that it returned.
            written: the meta tensors that it wrote.
            overwrites: whether it ignores the earlier values of the first tensor in `written`.
            random: whether it draws random numbers.

        Raises:
            CannotDefer: the call draws from a generator of its own, or an argument was not
                recorded.
        """
        with self.paused():
            recording = self.recording
            leaves = tree_leaves((args, kwargs))
            read = [recording.spec(leaf).storage for leaf in leaves if _on_meta(leaf)]
            if any(isinstance(leaf, torch.Generator) for leaf in leaves):
                raise CannotDefer("it draws random numbers from its own generator")
            changed = [recording.spec(tensor).storage for tensor in written]
            overwrites_all = (
                overwrites and _covers_storage(written[0]) and read.count(changed[0]) == 1
            )
            fresh = tuple(
                recording.spec(leaf) if _on_meta(leaf) and recording.adopt(leaf) else None
                for leaf in outputs
            )
            made = [spec.storage for spec in fresh if spec]
            if not made and not changed:
                return  # a view
            frozen_args, frozen_kwargs = tree_map(self._freeze, (args, kwargs))
            reads = tuple(
                dict.fromkeys(r for r in read if not (overwrites_all and r == changed[0]))
            )
            operation = RecordedCall(
                function=function,
                args=frozen_args,
                kwargs=frozen_kwargs,
                fresh=fresh,
                reads=reads,
                overwritten=changed[0] if overwrites_all else None,
                random=random,
                default_dtype=torch.get_default_dtype(),
            )
            recording.append(operation, [*made, *changed])

    def _freeze(self, leaf: Any) -> Any:
        if _on_meta(leaf):
            return self.recording.spec(leaf)
        if isinstance(leaf, torch.Tensor):
            return leaf.detach().clone()  # the constructor may change the tensor after this call
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
            result = args[0] if _only_fills(name, args, kwargs) else func(*args, **kwargs)
            outputs = tree_leaves(result)
        if name == "set_" or not any(map(_on_meta, (*tree_leaves((args, kwargs)), *outputs))):
            return result  # `set_` changes no content; without meta tensors, nothing is recorded
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


def _only_fills(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call fills a meta tensor in place with correct arguments, so that it does nothing.

    torch's kernels for meta tensors take a tenth of a millisecond for it, most of a constructor.
    """
    if name not in ("normal_", "uniform_", "zero_") or not _on_meta(args[0]):
        return False
    if name == "zero_":
        return True
    numbers = args[1:]
    plain = len(numbers) == 2 and all(isinstance(n, (int, float)) for n in numbers)
    if kwargs or not plain or not args[0].is_floating_point():
        return False
    first, second = numbers
    return bool(second >= 0 if name == "normal_" else first <= second)


def _leaves_meta(device: Any) -> bool:
    return device is not None and torch.device(device).type != "meta"


def _covers_storage(tensor: torch.Tensor) -> bool:
    size = tensor.numel() * tensor.element_size()
    return tensor.is_contiguous() and size == tensor.untyped_storage().nbytes()


def _written(func: Any, args: Any, kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Return the meta tensors among the arguments that an operator writes, by its schema."""
    written = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            by_position = position < len(args) and not argument.kwarg_only
            value = args[position] if by_position else kwargs.get(argument.name)
            written += [leaf for leaf in tree_leaves(value) if _on_meta(leaf)]
    return written


def _equal(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one shape have equal elements; NaN equals NaN."""
    return bool(((tensor == other) | ((tensor != tensor) & (other != other))).all())
