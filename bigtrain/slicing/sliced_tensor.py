"""A tensor of which each rank of the tp axis holds slices, and which says it is whole.

`SlicedTensor` has the shape of the whole, so a model's own code runs unchanged; what torch's
functions do with one is looked up in a table of rules (`rule`), which compute on the rank's slices
by plain tensors. So autograd, hooks and memory trackers see plain tensors alone. A function without
a rule is given whole tensors: right numbers, at the price of a gather, which is noted.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import register_pytree_node, tree_leaves, tree_map

from bigtrain.errors import ConfigError
from bigtrain.slicing.exchange import SliceGroup, gathered, gathered_for_parts, part_of, to_all
from bigtrain.slicing.slices import Slices

TensorRule = Callable[..., Any]
"""Called as the function is; returns `NotImplemented` where it cannot, and whole tensors must."""
_RULES: dict[Any, TensorRule] = {}
_raw = torch._C.DisableTorchFunctionSubclass
_base: Any = torch._C.TensorBase
_grad_fn, _set_hooks = _base.grad_fn.__get__, _base._backward_hooks.__set__
_set_requires_grad = _base.requires_grad.__set__


def rule(*functions: Any) -> Callable[[TensorRule], TensorRule]:
    """Register what these functions do with sliced tensors."""

    def register(how: TensorRule) -> TensorRule:
        for function in functions:
            _RULES[function] = how
        return how

    return register


def rule_with_function(*functions: Any) -> Callable[[TensorRule], TensorRule]:
    """As `rule`, of one that is told which of them was called, as its first argument."""

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
        "strategy.slice: a torch.autograd.Function of the model's own was given a sliced tensor, "
        f"and its gradient has nowhere to go. {_KEEP_FEEDING}"
    )


_HOOKS = {0: _refuse_gradient}


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
    lent: list[_Lent]
    """Wholes that functions without a rule have made views of: of this and of what shares its
    memory, which have one list together."""

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
        self: SlicedTensor = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=local.dtype, device=local.device, requires_grad=local.requires_grad
        )
        if local.requires_grad:  # autograd sees `local`; a gradient that comes here would be lost
            with _raw():
                _set_hooks(self, _HOOKS)
        self.local, self.slices, self.group, self.lent = local, slices, group, []
        return self

    @classmethod
    def of(cls, local: Tensor, slices: Slices, group: SliceGroup) -> SlicedTensor:
        """The same, with the shape of the whole worked out."""
        shape = list(local.shape)
        shape[slices.dim] = slices.total
        return cls(local, slices, group, shape)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Without the values, which are on several ranks."""
        del tensor_contents
        return f"SlicedTensor(shape={tuple(self.shape)}, {self.slices}, local={self.local.shape})"

    @property
    def negative_dim(self) -> int:
        """The sliced dim counted from the last one, -1."""
        return self.slices.dim - self.dim()

    def like(self, local: Tensor, dim: int | None = None) -> SlicedTensor:
        """Another tensor with the same slices, of the same dim or of another."""
        return self.derived(local, self.slices if dim is None else self.slices.at(dim))

    def derived(
        self, local: Tensor, slices: Slices, shape: Sequence[int] | None = None
    ) -> SlicedTensor:
        """What a function has made of it, which may be a view of it.

        Args:
            local: of this rank.
            slices: of the result.
            shape: of the whole; left out, it is worked out.
        """
        if shape is None:
            found = SlicedTensor.of(local, slices, self.group)
        else:
            found = SlicedTensor(local, slices, self.group, shape)
        if shares_memory(local, self.local):
            found.lent = self.lent
        return found

    def whole(self) -> Tensor:
        """All of it, which all ranks use alike."""
        return gathered(held(self), self.slices, self.group)

    def change(self, local: Tensor) -> SlicedTensor:
        """What an in-place function has made of it."""
        self.local = local
        _agree(self.lent)
        with _raw():
            if local.requires_grad is not self.requires_grad:
                _set_requires_grad(self, local.requires_grad)
                _set_hooks(self, _HOOKS if local.requires_grad else None)
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> SlicedTensor:
        """As of a tensor; the ranks are the same."""
        return self.like(copy.deepcopy(self.local, memo))

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Do what the rule of a function says; without one on whole tensors."""
        del types
        named = dict(kwargs or {})
        how = _RULES.get(func)
        if how is not None:
            if "input" in named and func is not torch.where:  # torch's name of what comes first
                args = (named.pop("input"), *args)
            result = _by_rule(how, args, named)
            if result is not NotImplemented:
                return result
        return on_whole(func, args, named)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Refuse what went past the rules: it has no values here.

        Raises:
            ConfigError: with the operation.
        """
        del types, args, kwargs
        raise ConfigError(
            f"strategy.slice: {func} is called on a sliced tensor where no rule can see it. "
            "Keep the module whole that calls it: strategy.slice.keep=[NAME]."
        )


def _by_rule(how: TensorRule, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What a rule says; nothing where it does not know the way the function is called."""
    try:
        return how(*args, **kwargs)
    except TypeError as error:
        if error.__traceback__ is None or error.__traceback__.tb_next is not None:
            raise  # from inside of the rule
        return NotImplemented


def held(sliced: SlicedTensor) -> Tensor:
    """What this rank holds of a sliced tensor.

    Raises:
        ConfigError: a function of the user's own took it, and gradients would be lost.
    """
    with _raw():
        node = _grad_fn(sliced)
    if node is not None:
        name = node.name()
        raise ConfigError(
            f"strategy.slice: {name}, a torch.autograd.Function of the model's own, is given a "
            "sliced tensor. "
            + ("Recompute with use_reentrant=False." if name in _REENTRANT else _KEEP_FEEDING)
        )
    if sliced.lent:
        _agree(sliced.lent)
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


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


class _Lent:
    """The whole of a sliced tensor that views were made of: what changes one changes the other."""

    def __init__(self, sliced: SlicedTensor) -> None:
        self.local, self.slices, self.group = held(sliced), sliced.slices, sliced.group
        # In inference mode too it has versions, by which it is seen to change.
        grad = torch.is_grad_enabled()
        with torch.inference_mode(mode=False), torch.set_grad_enabled(grad):
            self.whole = gathered(self.local, self.slices, self.group)
        self.note()

    def note(self) -> None:
        """Both are alike now."""
        self._version, self._local_version = self.whole._version, _version(self.local)

    @property
    def is_changed(self) -> bool:
        """Whether the whole was changed in place."""
        return self.whole._version != self._version

    @property
    def is_older(self) -> bool:
        """Whether this rank's slices were changed in place."""
        return _version(self.local) != self._local_version

    def fits(self, sliced: SlicedTensor) -> bool:
        """Whether it may be lent once more."""
        is_same = self.local is sliced.local and self.slices == sliced.slices
        needs = self.local.requires_grad and torch.is_grad_enabled()
        return is_same and self.whole.requires_grad == needs


def _agree(lent: list[_Lent]) -> None:
    """Bring a rank's slices and the wholes that were lent of them together.

    Raises:
        ConfigError: two were changed, and it is not known in which order.
    """
    changed = [one for one in lent if one.is_changed]
    if len(changed) + any(one.is_older for one in changed) > 1:
        raise ConfigError(
            "strategy.slice: two views of a sliced tensor are changed in place, and it is not "
            "known in which order. Keep the module whole that does it: strategy.slice.keep=[NAME]."
        )
    for one in changed:
        one.local.copy_(part_of(one.whole, one.slices, one.group))
        one.note()
    for one in lent:
        if one.is_older:
            one.whole.copy_(gathered(one.local, one.slices, one.group))
            one.note()


def shares_memory(value: Any, whole: Tensor) -> bool:
    """Whether a value is a tensor, or a view of it."""
    if value is whole:
        return True
    if not isinstance(value, Tensor) or value.layout is not torch.strided:
        return False
    return bool(value.untyped_storage()._cdata == whole.untyped_storage()._cdata)


def _has_view(result: Any, whole: Tensor) -> bool:
    return any(shares_memory(leaf, whole) for leaf in tree_leaves(result))


def on_whole(func: Any, args: Any, kwargs: Any) -> Any:
    """Call a function with whole tensors in place of sliced ones; what it changes is sliced again.

    Raises:
        ConfigError: it changes the shape of one.
    """
    name = _name(func)
    lent: dict[int, tuple[SlicedTensor, _Lent]] = {}

    def lend(value: Any) -> Any:
        if not is_sliced(value):
            return value
        if id(value) not in lent:
            if not lent:
                value.group.note_gather(name)
            known = next((one for one in value.lent if one.fits(value)), None)
            lent[id(value)] = (value, known or _Lent(value))
        return lent[id(value)][1].whole

    given = tree_map(lend, (args, kwargs), is_leaf=is_sliced)
    with _raw():
        result = func(*given[0], **given[1])
    changed = {}
    for sliced, one in lent.values():
        if one.whole.shape != sliced.shape or one.whole.dtype != sliced.dtype:
            raise ConfigError(
                f"strategy.slice: {name} changes the shape or the type of a sliced tensor in "
                "place. Keep the module whole that calls it: strategy.slice.keep=[NAME]."
            )
        is_new = one not in sliced.lent
        if one.is_changed:
            sliced.lent += [one] * is_new
            changed[id(one.whole)] = sliced.change(sliced.local)
            if is_new:
                sliced.lent.remove(one)
        elif is_new and _has_view(result, one.whole):
            sliced.lent.append(one)
    return tree_map(lambda leaf: changed.get(id(leaf), leaf), result) if changed else result


def _name(func: Any) -> str:
    name = getattr(func, "__name__", str(func))
    home = getattr(getattr(func, "__self__", None), "__name__", "")
    return f"{home}.{name}" if home and name in ("__get__", "__set__") else name


def as_operand(value: Any, slices: Slices | None, group: SliceGroup) -> Tensor:
    """What a rank computes with: its part along a dim, or all of a tensor, used in its own way.

    Args:
        value: a tensor, whole or sliced in whatever way.
        slices: of the part; None for all of it.
        group: the ranks.
    """
    if not is_sliced(value):
        return to_all(value, group) if slices is None else part_of(value, slices, group)
    own = held(value)
    if slices is None:
        return gathered_for_parts(own, value.slices, group)
    if value.slices.dim == slices.dim and value.slices.same(slices, group.size):
        return own
    return part_of(gathered(own, value.slices, group), slices, group)


def own_part(value: Any, slices: Slices, dim: int, group: SliceGroup) -> Any:
    """What goes with slices of a dim, counted from the last one (-1), of an operand.

    A tensor that is broadcast along it is used by each rank in its own way.
    """
    if not isinstance(value, Tensor):
        return value
    if value.dim() < -dim or value.shape[dim] == 1:
        return as_operand(value, None, group)
    return as_operand(value, slices.at(value.dim() + dim), group)
