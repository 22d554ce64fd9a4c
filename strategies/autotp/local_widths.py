"""Whether a model's own code gets along with the widths that one rank has.

AutoTP replaces layers, and the code around them sees tensors of this rank. AutoTP changes some
attributes that code of well-known models looks at (`num_heads`, `hidden_size`). Whether that is
right for a model is seen here without ranks: AutoTP's own layers are put in twice, for one rank and
for as many as there will be, and both are run on fake tensors. Operation by operation the second
has to do the same with the same numbers, on tensors that are the same or a rank's part of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bigtrain.core.workload import Workload
from bigtrain.errors import ConfigError
from bigtrain.slicing.slices import Slices
from bigtrain.strategies.autotp.adapter import (
    Spec,
    column_layers,
    replace_layers,
    training_layers,
)
from bigtrain.tensors.fake import fake_model


@dataclass(frozen=True)
class _Operation:
    name: str
    where: str
    numbers: tuple[float, ...]
    """What it is given beside tensors and sizes."""
    shapes: tuple[tuple[int, ...], ...]
    """Of what comes out."""
    draws: bool
    """Random numbers."""


def check_local_widths(
    workload: Workload, slices: Mapping[str, Slices], specs: Sequence[Spec], ranks: int
) -> None:
    """Refuse a model whose code does something else with a rank's widths.

    Raises:
        ConfigError: with the module, and what it does.
    """
    with FakeTensorMode(), training_layers():
        whole = _operations(workload, {}, specs, 1)
        local = _operations(workload, slices, specs, ranks)
    for one, other in zip(whole, local, strict=False):
        if one.name != other.name or one.numbers != other.numbers:
            what = f"does {_shown(other)} with a rank's widths, and {_shown(one)} with whole ones"
            raise _refusal(other.where, what)
        is_part = one.shapes != other.shapes
        if is_part and not _are_parts(one.shapes, other.shapes, ranks):
            what = (
                f"makes {list(other.shapes[0])} of a rank's widths by {other.name}, where "
                f"{list(one.shapes[0])} is whole, and that is no part of it for {ranks} ranks"
            )
            raise _refusal(other.where, what)
        if is_part and other.draws:
            what = "draws random numbers for a rank's part, which all ranks would draw alike"
            raise _refusal(other.where, f"{what}. Leave dropout out (model.args.dropout=0), or")
    if len(whole) != len(local) or whole[-1].shapes != local[-1].shapes:
        raise _refusal("", "does not end as the whole model does")


def _operations(
    workload: Workload, slices: Mapping[str, Slices], specs: Sequence[Spec], ranks: int
) -> list[_Operation]:
    device = torch.device("cpu")
    model = fake_model(workload.model, device, double=False).train()
    replace_layers(model, specs, ranks, None)
    for name, own in slices.items():
        parameter = model.get_parameter(name)
        parameter.data = own.local(parameter.detach(), 0, ranks)
    recorder = _Recorder()
    for name, module in model.named_modules():
        module.register_forward_pre_hook(recorder.entering(name))
        module.register_forward_hook(recorder.leave)
    for name, layer in column_layers(model):
        layer.register_forward_pre_hook(_refuse_strided(name))
    inputs = workload.micro_batch.fake(device).inputs
    try:
        with recorder:
            model(inputs)
    except ConfigError:
        raise
    except Exception as error:
        said = " ".join(str(error).split())[:160]
        what = f"fails with {ranks} rank's widths: {type(error).__name__}: {said}"
        raise _refusal(recorder.where, what) from error
    return recorder.seen


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[_Operation] = []
        self._inside: list[str] = []

    @property
    def where(self) -> str:
        return self._inside[-1] if self._inside else ""

    def entering(self, name: str) -> Callable[[nn.Module, Any], None]:
        def enter(_module: nn.Module, _inputs: Any) -> None:
            self._inside.append(name)

        return enter

    def leave(self, _module: nn.Module, _inputs: Any, _output: Any) -> None:
        self._inside.pop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        made = func(*args, **(kwargs or {}))
        leaves = tree_leaves((args, kwargs or {}))
        numbers = tuple(n for n in leaves if isinstance(n, float))
        shapes = tuple(tuple(t.shape) for t in tree_leaves(made) if isinstance(t, Tensor))
        if shapes:
            draws = _draws(func, args, kwargs or {})
            self.seen.append(_Operation(str(func), self.where, numbers, shapes, draws))
        return made


def _draws(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    for number, argument in enumerate(func._schema.arguments):
        if argument.name in ("dropout_p", "p"):
            given = args[number] if number < len(args) else kwargs.get(argument.name)
            return bool(argument.default_value if given is None else given)
    return True


def _are_parts(whole: Sequence[Sequence[int]], local: Sequence[Sequence[int]], ranks: int) -> bool:
    """Whether each tensor is the same, or a rank's part of one along one dim."""
    if len(whole) != len(local):
        return False
    for one, other in zip(whole, local, strict=True):
        if len(one) != len(other):
            return False
        differ = [(n, m) for n, m in zip(one, other, strict=True) if n != m]
        if len(differ) > 1 or any(n != m * ranks for n, m in differ):
            return False
    return True


def _refuse_strided(name: str) -> Callable[[nn.Module, Any], None]:
    def look(_module: nn.Module, inputs: Any) -> None:
        if not inputs[0].is_contiguous():
            what = (
                "is given a tensor that is not contiguous, of which DeepSpeed's "
                "ColumnParallel.backward may add up a copy of the gradient and lose the sum"
            )
            raise _refusal(name, what)

    return look


def _shown(operation: _Operation) -> str:
    numbers = f" with {', '.join(map(str, operation.numbers))}" if operation.numbers else ""
    return f"{operation.name}{numbers}"


def _refusal(where: str, what: str) -> ConfigError:
    module = where or "the model"
    fix = f"keep it whole: strategy.slice.keep=[{where}], or use" if where else "use"
    joint = " " if what.endswith(" or") else ". "
    fix = fix if what.endswith(" or") else fix[0].upper() + fix[1:]
    return ConfigError(f"strategy autotp: {module} {what}{joint}{fix} --strategy tensor.")
