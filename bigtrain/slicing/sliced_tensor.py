"""A tensor of which each rank of the tp axis holds slices, and which says it is whole.

`SlicedTensor` has the shape of the whole, so a model's own code runs unchanged; what torch's
functions do with one is looked up in a table of rules (`rule`), which compute on the rank's slices
by plain tensors. So autograd, hooks and memory trackers see plain tensors alone. A function without
a rule is given whole tensors: right numbers, at the price of a gather, which is noted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import register_pytree_node, tree_leaves, tree_map

from bigtrain.errors import ConfigError
from bigtrain.slicing.exchange import SliceGroup, gathered, part_of
from bigtrain.slicing.slices import Slices

Rule = Callable[..., Any]
"""Called as the function is; returns `NotImplemented` where it cannot, and whole tensors must."""
_RULES: dict[Any, Rule] = {}
_raw = torch._C.DisableTorchFunctionSubclass
_grad_fn = torch._C.TensorBase.grad_fn.__get__  # type: ignore[attr-defined]


def rule(*functions: Any) -> Callable[[Rule], Rule]:
    """Register what these functions do with sliced tensors."""

    def register(how: Rule) -> Rule:
        for function in functions:
            _RULES[function] = how
        return how

    return register


def rule_with_function(*functions: Any) -> Callable[[Rule], Rule]:
    """As `rule`, of one that is told which of them was called, as its first argument."""

    def register(how: Rule) -> Rule:
        for function in functions:
            _RULES[function] = _bound(how, function)
        return how

    return register


def _bound(how: Rule, function: Any) -> Rule:
    return lambda *args, **kwargs: how(function, *args, **kwargs)


class SlicedTensor(torch.Tensor):
    """A whole tensor, of which this rank holds slices."""

    local: Tensor
    """What this rank holds: a plain tensor, with autograd's graph."""
    slices: Slices
    group: SliceGroup
    gathers: bool = False
    """Of a weight: whether its product is gathered at once."""
    rows: tuple[int, ...] = ()
    """Of a matrix that is a view of more dims: those that its first dim is made of."""

    @staticmethod
    def __new__(
        cls, local: Tensor, slices: Slices, group: SliceGroup, shape: Sequence[int]
    ) -> SlicedTensor:
        """Let this rank's slices stand for the whole.

        Args:
            cls: this class.
            local: of the shape `slices.local_shape(shape, group.rank, group.size)`.
            slices: how the whole is dealt out.
            group: the ranks.
            shape: of the whole.
        """
        self: SlicedTensor = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, shape, dtype=local.dtype, device=local.device, requires_grad=local.requires_grad
        )
        self.local, self.slices, self.group = local, slices, group
        return self

    @classmethod
    def of(cls, local: Tensor, slices: Slices, group: SliceGroup) -> SlicedTensor:
        """The same, with the shape of the whole worked out."""
        shape = list(local.shape)
        shape[slices.dim] = slices.total
        return cls(local, slices, group, shape)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        """Without the values, which are on several ranks."""
        del tensor_contents
        return f"SlicedTensor(shape={tuple(self.shape)}, {self.slices}, local={self.local.shape})"

    @property
    def negative_dim(self) -> int:
        """The sliced dim counted from the last one, -1."""
        return self.slices.dim - self.dim()

    def like(self, local: Tensor, dim: int | None = None) -> SlicedTensor:
        """Another tensor with the same slices, of the same dim or of another."""
        return SlicedTensor.of(
            local, self.slices if dim is None else self.slices.at(dim), self.group
        )

    def whole(self) -> Tensor:
        """All of it, which all ranks use alike."""
        return gathered(held(self), self.slices, self.group)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Do what the rule of a function says; without one on whole tensors."""
        del types
        how = _RULES.get(func)
        if how is not None:
            result = how(*args, **(kwargs or {}))
            if result is not NotImplemented:
                return result
        return on_whole(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Refuse what went past the rules: it has no values here.

        Raises:
            ConfigError: with the operation.
        """
        del types, args, kwargs
        raise ConfigError(
            f"strategy.slice: {func} is called on a sliced tensor where no rule can see it. "
            "Keep the module whole that calls it: strategy.slice.keep=[NAME]."
        )


def held(sliced: SlicedTensor) -> Tensor:
    """What this rank holds of a sliced tensor.

    Raises:
        ConfigError: a function of the user's own took it, and gradients would be lost.
    """
    with _raw():
        node = _grad_fn(sliced)
    if node is not None:
        raise ConfigError(
            f"strategy.slice: {node.name()}, a torch.autograd.Function of the model's "
            "own, is given a sliced tensor. Keep the modules whole that feed it: "
            "strategy.slice.keep=[NAME]."
        )
    return sliced.local


def is_sliced(value: Any) -> bool:
    """Whether a value is a sliced tensor."""
    return isinstance(value, SlicedTensor)


def whole_of(value: Any) -> Any:
    """Sliced tensors in any structure made whole."""
    return tree_map(
        lambda leaf: leaf.whole() if is_sliced(leaf) else leaf, value, is_leaf=is_sliced
    )


def leaves_of(value: Any) -> list[Any]:
    """The leaves of a structure, sliced tensors among them."""
    return tree_leaves(value, is_leaf=is_sliced)


# What takes structures apart (hooks of fully_shard, recomputation) finds the rank's own tensors.
register_pytree_node(
    SlicedTensor,
    lambda sliced: ([held(sliced)], (sliced.slices, sliced.group, tuple(sliced.shape))),
    lambda local, of: SlicedTensor(next(iter(local)), *of),
)


def on_whole(func: Any, args: Any, kwargs: Any) -> Any:
    """Call a function with whole tensors in place of sliced ones; what it changes is sliced again.

    Raises:
        ConfigError: it changes one in a way that is not known.
    """
    sliced = [leaf for leaf in leaves_of((args, kwargs)) if is_sliced(leaf)]
    name = getattr(func, "__name__", str(func))
    if sliced:
        sliced[0].group.note_gather(name)
    changes = name.endswith("_") and not name.endswith("__") and args and is_sliced(args[0])
    if not changes and not (name in ("__setitem__",) and is_sliced(args[0])):
        with _raw():
            return func(*whole_of(args), **whole_of(kwargs))
    target: SlicedTensor = args[0]
    changed = target.whole().clone()
    with _raw():
        func(changed, *whole_of(args[1:]), **whole_of(kwargs))
    target.local = part_of(changed, target.slices, target.group)
    return target
