"""Finds the model, the optimizer's state and the step in a trainer's file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bigtrain.checkpoint.foreign.state import MODEL_KEYS, number_tensor, unwrapped_names
from bigtrain.checkpoint.foreign.torch_files import TorchTensor
from bigtrain.errors import CheckpointError, ConfigError, did_you_mean
from bigtrain.tensors.shards import StateTensor

_STEPS = ("global_step", "step", "global_steps", "iteration")
_OPTIMIZERS = (
    *("optimizer", "optim", "optimizer_state_dict", "optim_state_dict", "optimizer_states"),
    *("optimizer_state", "optimizers", "opt"),
)
_LIGHTNING = "pytorch-lightning_version"
_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")
_MOST_KEYS = 12  # most keys that a message lists

_Tree = Mapping[Any, Any]


@dataclass
class TrainerState:
    """The state that is found in a file."""

    model: dict[str, StateTensor]
    """The model's tensors by plain names."""
    optimizer: dict[str, StateTensor] = field(default_factory=dict)
    """The optimizer's tensors by `NAME.KEY`."""
    step: int | None = None
    samples_seen: int | None = None
    own: list[str] = field(default_factory=list)
    """Names of the model's tensors in the file's order; of tied tensors, only the first name."""
    left_out: list[str] = field(default_factory=list)
    """Names of entries that are not converted."""
    notes: list[str] = field(default_factory=list)
    """Sentences about names and parts that were changed or left out."""


def read_trainer(saved: Any, path: Path, key: str | None, strip: str | None) -> TrainerState:
    """Find the model in an object that `torch.save` wrote, with its optimizer state and step.

    Args:
        saved: the object that `read_torch_file` returned.
        path: the file, for messages.
        key: the model's key if there are several models, else None. Dots separate the keys of
            nested dicts.
        strip: a prefix that the caller will remove; None to detect Lightning's.

    Raises:
        CheckpointError: the object has no model, or several.
        ConfigError: there is no such key.
    """
    if not isinstance(saved, Mapping):
        raise CheckpointError(
            f"{path} has a {type(saved).__name__} instead of named tensors. Save model.state_dict()"
        )
    tensors, left_out = _chosen(saved, path, key) if key else _model_below(saved, path)
    raw = {str(name): value.as_state() for name, value in tensors.items() if is_tensor(value)}
    if not raw:
        raise CheckpointError(f"{path} has no named tensors of a model{_keys_in_words(saved, key)}")
    left_out += [str(name) for name, value in tensors.items() if not is_tensor(value)]
    names = unwrapped_names(raw)
    notes: list[str] = []
    if _LIGHTNING in saved and strip is None:
        names, notes = _without_attribute(names)
    state = TrainerState({names[name]: tensor for name, tensor in raw.items()}, notes=notes)
    places = {
        (t.stored, t.shape, t.stride): name
        for name, t in reversed(list(tensors.items()))
        if is_tensor(t)
    }
    state.own = [names[str(name)] for name in tensors if name in set(places.values())]
    state.step = _number(saved, _STEPS)
    state.samples_seen = _number(saved, ("samples_seen",))
    if key is None:
        taken = _take_optimizer(saved, state, names)
        left_out = [name for name in left_out if name != taken]
    state.left_out = left_out
    return state


def is_tensor(value: Any) -> bool:
    """Whether a value is a tensor in a file of `torch.save`."""
    return isinstance(value, TorchTensor)


def _model_below(tree: _Tree, path: Path, below: str = "") -> tuple[_Tree, list[str]]:
    """Return the dict of the model in nested dicts, and the names of entries next to it."""
    left_out: list[str] = []
    while True:
        inner = {k: v for k, v in tree.items() if _holds_model(v) and not _is_extra(k)}
        known = [key for key in MODEL_KEYS if key in inner]
        # A few tensors next to dicts of many tensors are counts and similar, not a model.
        loose_tensors = sum(map(is_tensor, tree.values()))
        choice = known or [key for key in inner if _count(inner[key]) > loose_tensors]
        if not choice:
            return tree, left_out
        if len(choice) > 1:
            listed = ", ".join(f"{k!r} ({_count(inner[k])} tensors)" for k in choice[:_MOST_KEYS])
            raise CheckpointError(
                f"{path} has more than one model: {listed}. Choose one: --key {below}{choice[0]}"
            )
        left_out += [str(key) for key in tree if key != choice[0]]
        tree, below = inner[choice[0]], f"{below}{choice[0]}."


def _chosen(tree: _Tree, path: Path, key: str) -> tuple[_Tree, list[str]]:
    """Return the dict of the model under a key, and the names of entries next to it."""
    left_out: list[str] = []
    rest = key
    while rest:
        # A key may contain dots: the longest matching key counts.
        parts = rest.split(".")
        heads = [".".join(parts[:n]) for n in range(len(parts), 0, -1)]
        by_text = {str(name): name for name in tree}
        head = next((head for head in heads if head in by_text), None)
        value = None if head is None else tree[by_text[head]]
        if head is None or not isinstance(value, Mapping):
            inner = [
                name for name, inner_key in by_text.items() if isinstance(tree[inner_key], Mapping)
            ]
            fault = f"{head!r} is not a dict" if head else f"there is no {parts[0]!r}"
            listed = ", ".join(map(repr, inner[:_MOST_KEYS])) or "none"
            raise ConfigError(
                f"convert: --key {key}: {fault} in {path}{did_you_mean(parts[0], inner)} Dicts "
                f"there: {listed}."
            )
        left_out += [name for name in by_text if name != head]
        tree, rest = value, rest[len(head) + 1 :]
    model, more = _model_below(tree, path, f"{key}.")
    return model, [*left_out, *more]


def _is_extra(name: Any) -> bool:
    """Whether a name is that of a module's `get_extra_state`."""
    return str(name).endswith("_extra_state")


def _holds_model(value: Any) -> bool:
    """Whether a value is a mapping with a tensor, at any depth, outside of optimizer states."""
    if not isinstance(value, Mapping) or _is_optimizer(value):
        return False
    return any(is_tensor(item) or _holds_model(item) for item in value.values())


def _count(value: Any) -> int:
    if isinstance(value, Mapping):
        return sum(_count(item) for item in value.values())
    return int(is_tensor(value))


def _is_optimizer(value: Any) -> bool:
    if not isinstance(value, Mapping):
        return False
    nested = isinstance(value.get("state"), Mapping) and "param_groups" in value
    return nested or any(str(name).startswith("param_groups.") for name in value)


def _keys_in_words(tree: _Tree, key: str | None) -> str:
    listed = ", ".join(
        f"{name!r} ({_description(value)})" for name, value in list(tree.items())[:_MOST_KEYS]
    )
    rest = f" and {len(tree) - _MOST_KEYS} more" if len(tree) > _MOST_KEYS else ""
    under = f" below --key {key}" if key else ""
    choose = "Choose one that has: bigtrain checkpoint convert --key NAME"
    return f"{under}. It has {listed or 'nothing'}{rest}. {choose}"


def _description(value: Any) -> str:
    count = _count(value)
    return f"{count} tensors" if count else type(value).__name__


def _number(tree: _Tree, keys: Sequence[str]) -> int | None:
    for key in keys:
        value = tree.get(key)
        if type(value) is int and value >= 0:
            return value
    return None


def _without_attribute(names: dict[str, str]) -> tuple[dict[str, str], list[str]]:
    """Remove from names the attribute under which a Lightning module has its only model."""
    first = {plain.partition(".")[0] for plain in names.values()}
    if len(first) != 1 or not all("." in plain for plain in names.values()):
        return names, []
    prefix = f"{first.pop()}."
    note = f"Removed from all names: {prefix} (--strip '' keeps it)."
    return {name: plain.removeprefix(prefix) for name, plain in names.items()}, [note]


def _take_optimizer(tree: _Tree, state: TrainerState, names: dict[str, str]) -> str:
    """Add the optimizer's state if its tensors can be assigned to parameters; return its key."""
    for key in _OPTIMIZERS:
        saved: Any = tree.get(key)
        if isinstance(saved, Sequence) and not isinstance(saved, str) and len(saved) == 1:
            saved = saved[0]  # Lightning stores a list of optimizers
        if not isinstance(saved, Mapping) or not _is_optimizer(saved):
            continue
        slots = _slots(saved)
        of_parameter = _names_of_slots(saved, slots, state, names)
        if not slots or isinstance(of_parameter, str):
            if slots:
                state.notes.append(f"The optimizer's state was left out: {of_parameter}.")
            return key if slots else ""
        for number, values in slots.items():
            for slot, value in values.items():
                tensor = _slot_tensor(value)
                if tensor is not None:
                    state.optimizer[f"{of_parameter[number]}.{slot}"] = tensor
        if state.step is None:
            state.step = _steps_of(slots)
        return key
    return ""


def _slots(optimizer: _Tree) -> dict[Any, dict[str, Any]]:
    """Return the state of each parameter, by the parameter's number or name."""
    inner = optimizer.get("state")
    if isinstance(inner, Mapping):
        return {k: dict(v) for k, v in inner.items() if isinstance(v, Mapping) and v}
    slots: dict[Any, dict[str, Any]] = {}
    for key, value in optimizer.items():  # flat keys, as `get_optimizer_state_dict` can return them
        head, _, rest = str(key).partition(".")
        name, _, slot = rest.rpartition(".")
        if head == "state" and name:
            slots.setdefault(name, {})[slot] = value
    return slots


def _slot_tensor(value: Any) -> StateTensor | None:
    if is_tensor(value):
        tensor: StateTensor = value.as_state()
        return tensor
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return number_tensor(value) if is_number else None


def _names_of_slots(
    optimizer: _Tree, slots: Mapping[Any, Any], state: TrainerState, names: dict[str, str]
) -> dict[Any, str] | str:
    """Return the plain name of each parameter that has state, or the reason why it is unknown."""
    if all(isinstance(number, str) for number in slots):  # as of FSDP and get_optimizer_state_dict
        plain = unwrapped_names(slots)
        by_number = {number: names.get(number, plain[number]) for number in slots}
        strange = next((name for name in by_number.values() if name not in state.model), None)
        return f"it has {strange!r}, which the model does not have" if strange else by_number
    groups = optimizer.get("param_groups") or []
    numbers = [number for group in groups for number in group.get("params", ())]
    named = [name for group in groups for name in group.get("param_names") or ()]
    if len(named) == len(numbers) and named:
        plain = unwrapped_names(named)
        of_number = {n: names.get(m, plain[m]) for n, m in zip(numbers, named, strict=True)}
        return _with_equal_shapes(of_number, slots, state)
    if len(groups) != 1:
        return f"its {len(groups)} groups have numbers instead of names"
    ordered = [name for name in state.own if name.rpartition(".")[2] not in _BUFFERS]
    if len(ordered) != len(numbers):
        return (
            f"it has {len(numbers)} parameters by number, and the model has {len(ordered)} "
            "tensors, so they cannot be matched"
        )
    matched = _with_equal_shapes(dict(zip(numbers, ordered, strict=True)), slots, state)
    if not isinstance(matched, str):
        state.notes.append(
            "The optimizer's state has numbers: they were matched to the model's tensors in order, "
            "as in optimizer(model.parameters())."
        )
    return matched


def _with_equal_shapes(
    of_number: dict[Any, str], slots: Mapping[Any, Mapping[str, Any]], state: TrainerState
) -> dict[Any, str] | str:
    """Return the names if each moment has the shape of its parameter; otherwise the reason."""
    for number, values in slots.items():
        name = of_number.get(number)
        if name is None or name not in state.model:
            return f"it has {name or number!r}, which the model does not have"
        for slot, value in values.items():
            if is_tensor(value) and value.shape not in ((), (1,), tuple(state.model[name].shape)):
                return (
                    f"its {slot} of parameter {number} has the shape {list(value.shape)}, and "
                    f"{name} has {list(state.model[name].shape)}"
                )
    return of_number


def _steps_of(slots: Mapping[Any, Mapping[str, Any]]) -> int | None:
    """Return the number of steps that the optimizer counted; None if it counted none."""
    counts = []
    for values in slots.values():
        value = values.get("step")
        if is_tensor(value) and value is not None and value.numel == 1:
            counts.append(int(value.values()))
        elif isinstance(value, int | float):
            counts.append(int(value))
    return max(counts, default=None)
