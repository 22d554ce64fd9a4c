"""Whether a model's own code gets along with the widths that one rank has.

AutoTP replaces layers, and the code around them sees this rank's part of each tensor. AutoTP also
changes attributes that the code of well-known models looks at (`num_heads`, `hidden_size`). Whether
that comes out right for a model is seen here without ranks and without numbers: it is run twice on
fake tensors, once with this project's own slices, where its code sees whole tensors, and once with
AutoTP's layers. Call by call both have to do the same, with the same numbers, on tensors of which
the second has just what the first holds of them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bigtrain.core.workload import Workload
from bigtrain.errors import ConfigError, as_word
from bigtrain.slicing.exchange import SliceGroup
from bigtrain.slicing.install import slice_modules, slice_tensors
from bigtrain.slicing.sliced_tensor import SlicedTensor
from bigtrain.slicing.slices import Slices
from bigtrain.strategies.autotp.adapter import (
    Spec,
    column_layers,
    replace_layers,
    training_layers,
)
from bigtrain.tensors.fake import fake_model

_OF_SIZES = frozenset(
    {
        *("view", "reshape", "unflatten", "flatten", "expand", "__getitem__"),
        *("split", "split_with_sizes", "narrow", "chunk", "tensor_split"),
        *("new_zeros", "new_ones", "new_empty", "new_full"),
        *("zeros", "ones", "empty", "full", "arange"),
    }
)
"""Functions whose whole numbers are sizes, of which a rank has others."""


@dataclass(frozen=True)
class _Call:
    name: str
    where: str
    """The module in whose code it is."""
    numbers: tuple[float, ...]
    """What it is given beside tensors, and beside sizes."""
    shapes: tuple[tuple[int, ...], ...]
    """What a rank holds of each tensor that comes out."""
    sliced: bool
    drew: bool
    """Random numbers."""


def check_local_widths(
    workload: Workload, slices: Mapping[str, Slices], specs: Sequence[Spec], ranks: int
) -> None:
    """Refuse a model whose code does something else with a rank's widths.

    Raises:
        ConfigError: with the module, and what it does.
    """
    layers = {name.rpartition(".")[0] for name in slices}
    with FakeTensorMode(), training_layers():
        expected = _calls(workload, layers, lambda model: _hold(model, slices, ranks))
        found = _calls(workload, layers, lambda model: _replace(model, slices, specs, ranks))
    for one, other in zip(expected, found, strict=False):
        if (one.name, one.numbers) != (other.name, other.numbers):
            what = f"calls {_shown(other)} with a rank's widths, and {_shown(one)} with whole ones"
            raise _refusal(other.where, what)
        if one.shapes != other.shapes:
            what = (
                f"makes {_shapes(other)} of a rank's widths in {other.name}, and its part of the "
                f"whole is {_shapes(one)}: its code goes by a size that AutoTP leaves as it is, or "
                "changes and should not"
            )
            raise _refusal(other.where, what)
        if one.sliced and other.drew:
            what = "draws random numbers for a rank's part, which all ranks would draw alike"
            raise _refusal(other.where, f"{what} (set dropout to 0)")
    if len(expected) != len(found):
        raise _refusal("", f"makes {len(found)} calls with a rank's widths, not {len(expected)}")


def _hold(model: nn.Module, slices: Mapping[str, Slices], ranks: int) -> None:
    group = SliceGroup(0, ranks, None)
    slice_tensors(model, slices, group)
    slice_modules(model, slices, group)


def _replace(
    model: nn.Module, slices: Mapping[str, Slices], specs: Sequence[Spec], ranks: int
) -> None:
    replace_layers(model, specs, ranks, None)
    for name, own in slices.items():
        parameter = model.get_parameter(name)
        parameter.data = own.local(parameter.detach(), 0, ranks).contiguous()
    for name, layer in column_layers(model):
        layer.register_forward_pre_hook(_refuse_strided(name))


def _calls(
    workload: Workload, layers: Collection[str], change: Callable[[nn.Module], None]
) -> list[_Call]:
    device = torch.device("cpu")
    model = fake_model(workload.model, device, double=False).train()
    change(model)
    drawing = _Drawing()
    recorder = _Recorder(layers, drawing)
    for name, module in model.named_modules():
        module.register_forward_pre_hook(recorder.entering(name))
        module.register_forward_hook(recorder.leave)
    inputs = workload.micro_batch.fake(device).inputs
    try:
        with drawing, recorder:
            model(inputs)
    except ConfigError:
        raise
    except Exception as error:
        said = " ".join(str(error).split())[:160]
        what = f"fails with a rank's widths ({type(error).__name__}: {said})"
        raise _refusal(recorder.where, what) from error
    return recorder.seen


class _Drawing(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notices random numbers."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.drew = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        self.drew |= _draws(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


class _Recorder(TorchFunctionMode):
    def __init__(self, layers: Collection[str], drawing: _Drawing) -> None:
        super().__init__()
        self.seen: list[_Call] = []
        self.drawing = drawing
        self._layers = layers
        self._inside: list[str] = []

    @property
    def where(self) -> str:
        """The module whose code is running."""
        return self._inside[-1] if self._inside else ""

    def entering(self, name: str) -> Callable[[nn.Module, Any], None]:
        """A hook of a module."""

        def enter(_module: nn.Module, _inputs: Any) -> None:
            self._inside.append(name)

        return enter

    def leave(self, _module: nn.Module, _inputs: Any, output: Any) -> None:
        """A hook of a module."""
        where = self._inside.pop()
        if where in self._layers:
            self._note(where, where, (), output)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        given = kwargs or {}
        if self.where in self._layers:  # what it does inside is its own affair
            return func(*args, **given)
        self.drawing.drew = False
        made = func(*args, **given)
        name = resolve_name(func) or getattr(func, "__name__", str(func))
        kinds = (float,) if name.rpartition(".")[2] in _OF_SIZES else (float, int)
        numbers = tuple(n for n in tree_leaves((args, given)) if isinstance(n, kinds))
        if any(isinstance(t, Tensor) for t in tree_leaves(made)):
            self._note(name, self.where, numbers, made)
        return made

    def _note(self, name: str, where: str, numbers: tuple[Any, ...], made: Any) -> None:
        # A sliced tensor is a tree, whose leaf is what a rank holds.
        leaves = tree_leaves(made, is_leaf=lambda leaf: isinstance(leaf, Tensor))
        tensors = [t for t in leaves if isinstance(t, Tensor)]
        parts = [t.local if isinstance(t, SlicedTensor) else t for t in tensors]
        shapes = tuple(tuple(part.shape) for part in parts)
        sliced = any(part is not t for part, t in zip(parts, tensors, strict=True))
        self.seen.append(_Call(name, where, numbers, shapes, sliced, self.drawing.drew))


def _draws(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    for number, argument in enumerate(func._schema.arguments):
        if argument.name in ("dropout_p", "p"):
            given = args[number] if number < len(args) else kwargs.get(argument.name)
            return bool(argument.default_value if given is None else given)
    return True


def _refuse_strided(name: str) -> Callable[[nn.Module, Any], None]:
    def look(_module: nn.Module, inputs: Any) -> None:
        if not inputs[0].is_contiguous():
            what = (
                "is given a tensor that is not contiguous, whose gradient DeepSpeed's "
                "ColumnParallel.backward may add up in a copy and lose"
            )
            raise _refusal(name, what)

    return look


def _shapes(call: _Call) -> str:
    return " and ".join(str(list(shape)) for shape in call.shapes)


def _shown(call: _Call) -> str:
    return f"{call.name}{f' with {list(call.numbers)}' if call.numbers else ''}"


def _refusal(where: str, what: str) -> ConfigError:
    fix = f"Keep it whole: {as_word('strategy.slice.keep', [where])}, or use" if where else "Use"
    return ConfigError(f"strategy autotp: {where or 'the model'} {what}. {fix} --strategy tensor.")
