"""A tensor with the shape of the whole tensor; each rank of the tp axis holds slices of it.

`SlicedTensor` has the whole shape, so a model's code runs unchanged. A rule (`rule`) defines what a
torch function does with sliced tensors. Rules compute with plain tensors, this rank's slices, so
autograd, hooks and memory trackers see only plain tensors. A function without a rule is called with
whole tensors: the result is right but costs a gather, which `SliceGroup.gathers` counts.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import register_pytree_node, tree_leaves, tree_map

from bigtrain.errors import ConfigError
from bigtrain.slicing.exchange import (
    SliceGroup,
    copied_to_ranks,
    gathered,
    gathered_with_partial_grad,
    scattered,
)
from bigtrain.slicing.slices import Slices

TensorRule = Callable[..., Any]
"""Called with the function's arguments; returns the result, or `NotImplemented` if the function
needs whole tensors."""
_RULES: dict[Any, TensorRule] = {}
_raw = torch._C.DisableTorchFunctionSubclass
_base: Any = torch._C.TensorBase
_grad_fn, _set_hooks = _base.grad_fn.__get__, _base._backward_hooks.__set__
_set_requires_grad = _base.requires_grad.__set__


def rule(*functions: Any) -> Callable[[TensorRule], TensorRule]:
    """A decorator that registers a function as the rule of these torch functions."""

    def register(how: TensorRule) -> TensorRule:
        for function in functions:
            _RULES[function] = how
        return how

    return register


def rule_with_function(*functions: Any) -> Callable[[TensorRule], TensorRule]:
    """A decorator like `rule`, for a rule whose first argument is the called torch function."""

    def register(how: TensorRule) -> TensorRule:
        for function in functions:
            _RULES[function] = functools.partial(how, function)
        return how

    return register


_REENTRANT = ("CheckpointFunctionBackward",)
_KEEP_FEEDING = "Keep the modules whole that feed it: strategy.slice.keep=[NAME]."


def _refuse_gradient(gradient: Tensor) -> None:
    del gradient
    raise ConfigError(
        "strategy.slice: a torch.autograd.Function of the model was given a sliced tensor, "
        f"and its gradient would be lost. {_KEEP_FEEDING}"
    )


_HOOKS = {0: _refuse_gradient}


class SlicedTensor(torch.Tensor):
    """A whole tensor of which this rank holds slices."""

    local: Tensor
    """This rank's slices: a plain tensor with the autograd graph."""
    slices: Slices
    group: SliceGroup
    gathers: bool = False
    """Whether this is a weight whose product is gathered immediately."""
    rows: tuple[int, ...] = ()
    """The lengths of the dims that were flattened to this matrix's first dim; empty if unknown."""
    whole_copies: list[_WholeCopy]
    """Gathered copies of this tensor of which functions without a rule have returned views. Sliced
    tensors that share memory share this list."""

    @staticmethod
    def __new__(
        cls, local: Tensor, slices: Slices, group: SliceGroup, shape: Sequence[int]
    ) -> SlicedTensor:
        """Wrap this rank's slices in a tensor of the whole shape.

        Args:
            cls: this class.
            local: this rank's slice, of the shape `slices.local_shape(shape, group.rank,
                group.size)`.
            slices: how the whole is divided.
            group: the ranks.
            shape: the shape of the whole tensor.
        """
        self: SlicedTensor = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=local.dtype, device=local.device, requires_grad=local.requires_grad
        )
        if local.requires_grad:  # autograd uses `local`; a gradient of the wrapper would be lost
            with _raw():
                _set_hooks(self, _HOOKS)
        self.local, self.slices, self.group, self.whole_copies = local, slices, group, []
        return self

    @classmethod
    def of(cls, local: Tensor, slices: Slices, group: SliceGroup) -> SlicedTensor:
        """Wrap this rank's slices in a tensor whose whole shape is computed from them."""
        shape = list(local.shape)
        shape[slices.dim] = slices.total
        return cls(local, slices, group, shape)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Return the shape and the slices; the values are on several ranks."""
        del tensor_contents
        return f"SlicedTensor(shape={tuple(self.shape)}, {self.slices}, local={self.local.shape})"

    @property
    def negative_dim(self) -> int:
        """The sliced dim counted from the last one, -1."""
        return self.slices.dim - self.dim()

    def like(self, local: Tensor, dim: int | None = None) -> SlicedTensor:
        """Return a sliced tensor of `local`, with the same sections along the same dim or `dim`."""
        return self.derived(local, self.slices if dim is None else self.slices.at(dim))

    def derived(
        self, local: Tensor, slices: Slices, shape: Sequence[int] | None = None
    ) -> SlicedTensor:
        """Return the sliced result of a function of this tensor; it may be a view of the tensor.

        Args:
            local: this rank's slices of the result.
            slices: the slices of the result.
            shape: the shape of the whole result; None to compute it from `local` and `slices`.
        """
        if shape is None:
            result = SlicedTensor.of(local, slices, self.group)
        else:
            result = SlicedTensor(local, slices, self.group, shape)
        if shares_memory(local, self.local):
            result.whole_copies = self.whole_copies
        return result

    def whole(self) -> Tensor:
        """Gather the whole tensor, which all ranks must use in the same way. Collective."""
        return gathered(local_of(self), self.slices, self.group)

    def change(self, local: Tensor) -> SlicedTensor:
        """Store the result of an in-place function as this tensor's slices; return the tensor."""
        self.local = local
        _agree(self.whole_copies)
        with _raw():
            if local.requires_grad is not self.requires_grad:
                _set_requires_grad(self, local.requires_grad)
                _set_hooks(self, _HOOKS if local.requires_grad else None)
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> SlicedTensor:
        """Return a copy of the slices with the same group of ranks."""
        return self.like(copy.deepcopy(self.local, memo))

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call the rule of a function, or the function with whole tensors if no rule applies."""
        del types
        named = dict(kwargs or {})
        how = _RULES.get(func)
        if how is not None:
            if "input" in named and func is not torch.where:  # torch's name of the first argument
                args = (named.pop("input"), *args)
            result = _by_rule(how, args, named)
            if result is not NotImplemented:
                return result
        return on_whole(func, args, named)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Refuse an operation that bypassed the rules: the wrapper itself has no values.

        Raises:
            ConfigError: always; the message names the operation.
        """
        del types, args, kwargs
        raise ConfigError(
            f"strategy.slice: {func} is called on a sliced tensor where no rule can see it. "
            "Keep the module whole that calls it: strategy.slice.keep=[NAME]."
        )


def _by_rule(how: TensorRule, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call a rule; return `NotImplemented` if its signature does not fit the call."""
    try:
        return how(*args, **kwargs)
    except TypeError as error:
        if error.__traceback__ is None or error.__traceback__.tb_next is not None:
            raise  # raised inside the rule
        return NotImplemented


def local_of(sliced: SlicedTensor) -> Tensor:
    """Return this rank's slices of a sliced tensor, including in-place changes of whole copies.

    Raises:
        ConfigError: a custom autograd function of the model returned the tensor, so that its
            gradient would be lost.
    """
    with _raw():
        node = _grad_fn(sliced)
    if node is not None:
        name = node.name()
        raise ConfigError(
            f"strategy.slice: {name}, a torch.autograd.Function of the model, is given a "
            "sliced tensor. "
            + ("Recompute with use_reentrant=False." if name in _REENTRANT else _KEEP_FEEDING)
        )
    if sliced.whole_copies:
        _agree(sliced.whole_copies)
    return sliced.local


def is_sliced(value: Any) -> bool:
    """Whether a value is a sliced tensor."""
    return isinstance(value, SlicedTensor)


def whole_of(value: Any) -> Any:
    """Return a structure with its sliced tensors gathered. Collective if there are any."""
    return tree_map(
        lambda leaf: leaf.whole() if is_sliced(leaf) else leaf, value, is_leaf=is_sliced
    )


def leaves_of(value: Any) -> list[Any]:
    """Return the leaves of a structure; a sliced tensor is a leaf."""
    return tree_leaves(value, is_leaf=is_sliced)


def _rebuilt(leaves: Iterable[Any], context: Any) -> Any:
    """Return the sliced tensor of a leaf; the leaf itself if a function made it something else.

    torch 2.11 maps the arguments of `checkpoint` to None, to collect their devices.
    """
    leaf = next(iter(leaves))
    return SlicedTensor(leaf, *context) if isinstance(leaf, Tensor) else leaf


# Code that flattens structures (fully_shard's hooks, recomputation) finds this rank's tensors.
register_pytree_node(
    SlicedTensor,
    lambda sliced: ([local_of(sliced)], (sliced.slices, sliced.group, tuple(sliced.shape))),
    _rebuilt,
)


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


class _WholeCopy:
    """A gathered copy of a sliced tensor, stored because views of the copy exist.

    An in-place change of the copy must be written to this rank's slices, and the reverse.
    """

    def __init__(self, sliced: SlicedTensor) -> None:
        self.local, self.slices, self.group = local_of(sliced), sliced.slices, sliced.group
        # Made outside of inference mode, the copy has a version counter, which shows changes.
        grad = torch.is_grad_enabled()
        with torch.inference_mode(mode=False), torch.set_grad_enabled(grad):
            self.whole = gathered(self.local, self.slices, self.group)
        self.note()

    def note(self) -> None:
        """Record the version counters of the copy and of the slices; call it when the two agree."""
        self._version, self._local_version = self.whole._version, _version(self.local)

    @property
    def is_changed(self) -> bool:
        """Whether the copy was changed in place since `note`."""
        return self.whole._version != self._version

    @property
    def is_older(self) -> bool:
        """Whether this rank's slices were changed in place since `note`."""
        return _version(self.local) != self._local_version

    def fits(self, sliced: SlicedTensor) -> bool:
        """Whether this copy may be used again for a sliced tensor."""
        is_same = self.local is sliced.local and self.slices == sliced.slices
        needs = self.local.requires_grad and torch.is_grad_enabled()
        return is_same and self.whole.requires_grad == needs


def _agree(whole_copies: list[_WholeCopy]) -> None:
    """Make a rank's slices and their whole copies equal again after an in-place change.

    Raises:
        ConfigError: several of them were changed, and it is not known in which order.
    """
    changed = [whole_copy for whole_copy in whole_copies if whole_copy.is_changed]
    if len(changed) + any(whole_copy.is_older for whole_copy in changed) > 1:
        raise ConfigError(
            "strategy.slice: two views of a sliced tensor are changed in place, and it is not "
            "known in which order. Keep the module whole that does it: strategy.slice.keep=[NAME]."
        )
    for whole_copy in changed:
        whole_copy.local.copy_(scattered(whole_copy.whole, whole_copy.slices, whole_copy.group))
        whole_copy.note()
    for whole_copy in whole_copies:
        if whole_copy.is_older:
            whole_copy.whole.copy_(gathered(whole_copy.local, whole_copy.slices, whole_copy.group))
            whole_copy.note()


def shares_memory(value: Any, whole: Tensor) -> bool:
    """Whether a value is `whole`, or a strided tensor with the same storage."""
    if value is whole:
        return True
    if not isinstance(value, Tensor) or value.layout is not torch.strided:
        return False
    return bool(value.untyped_storage()._cdata == whole.untyped_storage()._cdata)


def _has_view(result: Any, whole: Tensor) -> bool:
    return any(shares_memory(leaf, whole) for leaf in tree_leaves(result))


def on_whole(func: Any, args: Any, kwargs: Any) -> Any:
    """Call a function with gathered tensors, and write its in-place changes to the slices.

    Raises:
        ConfigError: the function changes the shape or the dtype of a sliced tensor in place.
    """
    name = _name(func)
    copies: dict[int, tuple[SlicedTensor, _WholeCopy]] = {}

    def gathered_copy(value: Any) -> Any:
        if not is_sliced(value):
            return value
        if id(value) not in copies:
            if not copies:
                value.group.note_gather(name)
            known = next(
                (whole_copy for whole_copy in value.whole_copies if whole_copy.fits(value)), None
            )
            copies[id(value)] = (value, known or _WholeCopy(value))
        return copies[id(value)][1].whole

    arguments = tree_map(gathered_copy, (args, kwargs), is_leaf=is_sliced)
    with _raw():
        result = func(*arguments[0], **arguments[1])
    changed = {}
    for sliced, whole_copy in copies.values():
        if whole_copy.whole.shape != sliced.shape or whole_copy.whole.dtype != sliced.dtype:
            raise ConfigError(
                f"strategy.slice: {name} changes the shape or the type of a sliced tensor in "
                "place. Keep the module whole that calls it: strategy.slice.keep=[NAME]."
            )
        is_new = whole_copy not in sliced.whole_copies
        if whole_copy.is_changed:
            sliced.whole_copies += [whole_copy] * is_new
            changed[id(whole_copy.whole)] = sliced.change(sliced.local)
            if is_new:
                sliced.whole_copies.remove(whole_copy)
        elif is_new and _has_view(result, whole_copy.whole):
            sliced.whole_copies.append(whole_copy)
    return tree_map(lambda leaf: changed.get(id(leaf), leaf), result) if changed else result


def _name(func: Any) -> str:
    name = getattr(func, "__name__", str(func))
    home = getattr(getattr(func, "__self__", None), "__name__", "")
    return f"{home}.{name}" if home and name in ("__get__", "__set__") else name


def as_operand(value: Any, slices: Slices | None, group: SliceGroup) -> Tensor:
    """Return the plain tensor that a rank computes with: its slices of a tensor, or all of it.

    Args:
        value: a tensor, whole or sliced in any way.
        slices: the slices of the result; None for the whole tensor, whose gradient is then partial.
        group: the ranks.
    """
    if not is_sliced(value):
        return copied_to_ranks(value, group) if slices is None else scattered(value, slices, group)
    local = local_of(value)
    if slices is None:
        return gathered_with_partial_grad(local, value.slices, group)
    if value.slices.dim == slices.dim and value.slices.same(slices, group.size):
        return local
    return scattered(gathered(local, value.slices, group), slices, group)


def matching_part(value: Any, slices: Slices, dim: int, group: SliceGroup) -> Any:
    """Return an operand's part that matches slices of another operand in a pointwise function.

    Collective if the operand is sliced along another dim or by other sections. The backward pass
    is collective also if the operand is not sliced.

    Args:
        value: the operand; anything but a tensor is returned as it is.
        slices: the slices of the other operand. Only their sections are used.
        dim: the sliced dim, counted from the last dim (-1). An operand that is broadcast along the
            sliced dim is returned whole.
        group: the ranks.

    Returns:
        A plain tensor: this rank's part, or the whole operand.
    """
    if not isinstance(value, Tensor):
        return value
    if value.dim() < -dim or value.shape[dim] == 1:
        return as_operand(value, None, group)
    return as_operand(value, slices.at(value.dim() + dim), group)
