"""Records of tensors and operations for the analysis; the table of axis rules by operation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from bigtrain.slice_planning.dim_axes import Dim, Dims, block, new_dim, unify

Lookup = Callable[[Tensor], "HeldTensor | None"]


@dataclass(eq=False)
class HeldTensor:
    """A tensor that depends on parameters.

    Other tensors are whole on every rank at no cost, so their axes are not tracked.
    """

    dims: Dims
    nbytes: int
    of_weights: bool
    """Whether it is computed from parameters and constants alone, not from the model's inputs."""
    trained: bool
    """Whether it may get a gradient."""
    name: str = ""
    """The name of a parameter or buffer; '' for other tensors."""
    view_of: HeldTensor | None = None
    """The tensor of which it is a view; None if it is not a view."""

    @property
    def root(self) -> HeldTensor:
        """The first tensor in its chain of views that has the same number of bytes."""
        tensor = self
        while tensor.view_of is not None and tensor.view_of.nbytes == self.nbytes:
            tensor = tensor.view_of
        return tensor

    @property
    def base(self) -> HeldTensor:
        """The first tensor in its chain of views, which is not a view."""
        tensor = self
        while tensor.view_of is not None:
            tensor = tensor.view_of
        return tensor


@dataclass(eq=False)
class OpRecord:
    """A record of an operation on tensors that depend on parameters."""

    name: str
    where: str
    """The module in whose code it runs."""
    flops: int
    inputs: list[HeldTensor]
    outputs: list[HeldTensor] = field(default_factory=list)
    summed: list[Dim] = field(default_factory=list)
    """Dims that are summed over: a slice of one gives a partial sum."""
    weight: WeightUse | None = None
    """The weight, if the operation is a plain product with a weight; otherwise None."""


class WeightUse(NamedTuple):
    """A weight in a product."""

    weight: HeldTensor
    other: HeldTensor | None
    """The other factor of the product; None if it depends on no parameters."""
    out: Dim
    """The weight's dim of output features."""
    summed: Dim | None
    """The weight's dim of input features; None if there are groups."""


class OpCall:
    """A call of an operation, as a rule sees it.

    Args:
        func: an operation of aten, or of another library.
        arguments: its arguments, by position and by name.
        result: its result.
        lookup: returns the `HeldTensor` of a tensor, or None.
        where: the module in whose code it runs.
    """

    def __init__(
        self,
        func: Any,
        arguments: tuple[Sequence[Any], dict[str, Any]],
        result: Any,
        lookup: Lookup,
        where: str,
    ) -> None:
        args, kwargs = arguments
        self.func = func
        self.name: str = func._overloadpacket.__name__
        self.lookup, self.where = lookup, where
        self.result = result
        self.results = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self.tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        self.summed: list[Dim] = []
        self.weight: WeightUse | None = None
        self._bound = {
            argument.name: args[n]
            if n < len(args)
            else kwargs.get(argument.name, _default(argument))
            for n, argument in enumerate(func._schema.arguments)
        }

    def arg(self, name: str, otherwise: Any = None) -> Any:
        """Return an argument by its name in the schema, or `otherwise`."""
        return self._bound.get(name, otherwise)

    def tensor(self, name: str) -> Tensor:
        """Return an argument that is a tensor.

        Raises:
            TypeError: the argument is not a tensor.
        """
        value = self._bound.get(name)
        if not isinstance(value, Tensor):
            raise TypeError(f"{self.name}: {name} is no tensor")
        return value

    def dims(self, tensor: Tensor | None) -> Dims | None:
        """Return the dims of a tensor; None if it does not depend on parameters."""
        traced = self.lookup(tensor) if tensor is not None else None
        return traced.dims if traced is not None else None

    def dims_or_new(self, tensor: Tensor) -> Dims:
        """Return the dims of a tensor; new ones if it does not depend on parameters."""
        known = self.dims(tensor)
        return known if known is not None else tuple(new_dim(length) for length in tensor.shape)

    def block(self, dim: Dim, why: str) -> None:
        """Mark a dim as not sliceable because of this operation."""
        block(dim, f"{why} in {self.where or 'the model'!r}")

    def blocked_dim(self, length: int, why: str) -> Dim:
        """Return a new dim that cannot be sliced."""
        return new_dim(length, f"{why} in {self.where or 'the model'!r}")

    def use_weight(self, factors: tuple[Tensor, Tensor], out: Dim, summed: Dim | None) -> None:
        """Record the second factor of a product as its weight, if it depends on parameters.

        Args:
            factors: the two factors of the product.
            out: the weight's dim of output features.
            summed: the weight's dim of input features; None if there are groups.
        """
        factor, weight = map(self.lookup, factors)
        if weight is not None:
            self.weight = WeightUse(weight, factor, out, summed)

    def of_weights(self, tensor: Tensor) -> bool:
        """Whether a tensor depends on no parameters, or on parameters and constants alone."""
        traced = self.lookup(tensor)
        return traced is None or traced.of_weights


AxisRule = Callable[[OpCall], Iterable[Dims]]
"""Unifies, splits and blocks an operation's axes; returns the dims of its results."""
AXIS_RULES: dict[str, AxisRule] = {}


def axis_rule(*names: str) -> Callable[[AxisRule], AxisRule]:
    """A decorator that registers a function as the rule of operations of these names."""

    def put(function: AxisRule) -> AxisRule:
        AXIS_RULES.update(dict.fromkeys(names, function))
        return function

    return put


def _default(argument: Any) -> Any:
    return argument.default_value if argument.has_default_value() else None


def same_dims(shape: Sequence[int], operands: Iterable[Dims]) -> Dims:
    """Return the dims of an elementwise result; dims that are not broadcast are unified."""
    result: list[Dim] = []
    candidates = [dims for dims in operands if len(dims) <= len(shape)]
    for n, length in enumerate(shape):
        aligned = [dims[n - len(shape)] for dims in candidates if len(shape) - n <= len(dims)]
        # A dim without axes has length 1 and is broadcast.
        unbroadcast = [dim for dim in aligned if dim]
        for dim in unbroadcast[1:]:
            unify(unbroadcast[0], dim)
        result.append(unbroadcast[0] if unbroadcast else new_dim(length))
    return tuple(result)


@axis_rule("native_dropout", "masked_fill", "masked_fill_", "fill_", "_to_copy", "copy_", "detach",
      "alias", "lift_fresh", "_prelu_kernel", "prelu", "_conj", "_fused_dropout", "contiguous",
      "rrelu_with_noise", "heaviside", "nan_to_num", "as_strided_", "hardswish",
           "log_sigmoid_forward", "floor_divide", "polar", "complex", "real", "imag",
           "fake_quantize_per_tensor_affine")  # fmt: skip
def elementwise(op: OpCall) -> list[Dims]:
    """Rule of elementwise operations."""
    operand_dims = [dims for dims in map(op.dims, op.tensors) if dims is not None]
    return [same_dims(result.shape, operand_dims) for result in op.results]


def opaque(op: OpCall, why: str = "") -> list[Dims]:
    """Rule of operations without their own rule: block all dims of operands and results."""
    why = why or f"{op.name!r} needs it whole"
    for tensor in op.tensors:
        for dim in op.dims(tensor) or ():
            op.block(dim, why)
    return [tuple(op.blocked_dim(length, why) for length in t.shape) for t in op.results]


def rule_of(op: OpCall) -> AxisRule:
    """Return the rule of an operation: by name, or `elementwise` if torch says it is pointwise."""
    if op.func.namespace not in ("aten", "prims"):
        return AXIS_RULES.get(f"{op.func.namespace}::{op.name}", opaque)
    rule = AXIS_RULES.get(op.name) or AXIS_RULES.get(op.name.removesuffix("_"))
    if rule is not None:
        return rule
    return elementwise if torch.Tag.pointwise in op.func.tags else opaque
