"""A module's state and its optimizer's, to a checkpoint's names and back."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from bigtrain.checkpoint.layout import REPLICAS
from bigtrain.errors import CheckpointError
from bigtrain.files.parse import parse_json
from bigtrain.optim.update import Update
from bigtrain.tensors.shards import SavedTensor, StateTensor, local_tensor, read_like


def module_tensors(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """A module's state without what is no tensor; see `extra_states`."""
    return {n: t for n, t in state.items() if isinstance(t, Tensor)}


def extra_modules(roots: Iterable[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """The modules with a state that is no tensor (`get_extra_state`), by its name in the state."""
    for root in roots:
        model = getattr(root, "users_module", root) if hasattr(root, "cut_through") else root
        for path, module in model.named_modules():
            if type(module).get_extra_state is not nn.Module.get_extra_state:
                yield f"{path}._extra_state".lstrip("."), module


def extra_states(roots: Iterable[nn.Module]) -> dict[str, Any]:
    """The states that are no tensors, by their names, each a copy.

    Raises:
        CheckpointError: one is no JSON.
    """
    found: dict[str, Any] = {}
    for name, module in extra_modules(roots):
        state = module.get_extra_state()
        copied = as_json(state)
        if copied is NOT_JSON:
            raise CheckpointError(
                f"{name} is a {type(state).__name__} that JSON does not give back as it is, and "
                "cannot be saved. Let get_extra_state return None, bools, numbers, strings, lists "
                "and dicts with strings as keys."
            )
        found.setdefault(name, copied)
    return found


NOT_JSON = object()


def as_json(state: Any) -> Any:
    """A state as it comes back from JSON; NOT_JSON where it does not."""
    try:
        # Read as it will be: a level deeper, and with the same bounds.
        copied = parse_json(json.dumps({"": {"": state}}, allow_nan=False), "")[""][""]
        return copied if bool(copied == state) else NOT_JSON
    except (TypeError, ValueError, RecursionError, RuntimeError):
        return NOT_JSON


def replica_state(state: Mapping[str, StateTensor], replica: int) -> dict[str, StateTensor]:
    """Name the state of one replica, where each replica has values of its own.

    The first replica's tensors keep their names: every strategy that reads the checkpoint finds a
    model and an optimizer's state there. A tensor NAME of another replica is `replicas.N.NAME`;
    only a technique whose replicas differ reads it back, by `state_of_replica`. A technique may
    save more under `replicas.`, by names that do not begin with a number: `replicas.outer.steps`.

    Args:
        state: the tensors of this rank, by the names of `Runner.state`.
        replica: the rank in the dp axis.
    """
    if replica == 0:
        return dict(state)
    return {f"{REPLICAS}.{replica}.{name}": tensor for name, tensor in state.items()}


def state_of_replica(saved: Mapping[str, SavedTensor], replica: int) -> dict[str, SavedTensor]:
    """Return a checkpoint as one replica reads it: the inverse of `replica_state`.

    Tensors that the checkpoint has for this replica replace those of the first. A replica without
    any (the checkpoint is of fewer replicas, or of another technique) starts as a copy of the
    first.

    Args:
        saved: all tensors of the checkpoint, by name.
        replica: the rank in the dp axis.
    """
    prefix = f"{REPLICAS}.{replica}."
    differing = {n.removeprefix(prefix): t for n, t in saved.items() if n.startswith(prefix)}
    return {**saved, **differing}


def load_tensors(
    current: Mapping[str, Tensor],
    expected: set[str],
    saved: Mapping[str, SavedTensor],
    update: Update,
) -> None:
    """Take a checkpoint's values over into these tensors, and into the fp32 copies of an update.

    Args:
        current: this rank's tensors by the model's plain names.
        expected: the names of the whole model.
        saved: has `model.NAME`.
        update: may keep fp32 values of its own.

    Raises:
        CheckpointError: names or shapes are not those of the model.
    """
    check_shapes({name: tensor.shape for name, tensor in current.items()}, expected, saved)
    with torch.no_grad():
        for name, tensor in current.items():
            value = saved[f"model.{name}"]
            local_tensor(tensor).copy_(read_like(value, tensor))
            update.load_master(name, value)


def check_shapes(
    shapes: Mapping[str, Sequence[int]], expected: set[str], saved: Mapping[str, SavedTensor]
) -> None:
    """Refuse a checkpoint of another model, before anything of it is taken over.

    Args:
        shapes: of the tensors that this rank holds a part of, each whole, by plain names.
        expected: the names of the whole model.
        saved: has `model.NAME`.

    Raises:
        CheckpointError: names or shapes are not those of the model.
    """
    saved_names = {name.removeprefix("model.") for name in saved if name.startswith("model.")}
    missing, extra = sorted(expected - saved_names), sorted(saved_names - expected)
    if missing or extra:
        tie = ""
        if not extra:  # as files of the Hub are
            tie = (
                " Where that is tied to another tensor, convert with: bigtrain checkpoint convert "
                f"SOURCE TARGET --tie {missing[0]}=OTHER"
            )
        raise CheckpointError(
            f"the checkpoint does not fit this model: it lacks {first_names(missing)} and has "
            f"{first_names(extra)} too many. Use the model.name and model.args it was saved with."
            f"{tie}"
        )
    for name, shape in shapes.items():
        found = saved[f"model.{name}"].shape
        if tuple(found) != tuple(shape):
            raise CheckpointError(
                f"{name} has shape {tuple(found)} in the checkpoint and "
                f"{tuple(shape)} in the model. Use the model.args it was saved with."
            )


def model_state(
    state: Mapping[str, Tensor],
    named: Iterable[tuple[str, nn.Parameter]],
    masters: Mapping[str, StateTensor],
) -> dict[str, StateTensor]:
    """What this rank holds of a module, with the fp32 values of those parameters that have some.

    Args:
        state: of `state_dict`, which puts gathered parameters back into shards, other objects:
            it is asked for before `named`.
        named: the parameters by all their names.
        masters: see `Update.masters`.
    """
    # What is no parameter follows the batches that its rank has seen.
    values = {n: replace(StateTensor.of(t), replicas_differ=True) for n, t in state.items()}
    first: dict[int, str] = {}
    for name, parameter in named:
        # Tied parameters are saved under each of their names, as in the module's own state.
        trained = first.setdefault(id(parameter), name)
        if name in values:
            values[name] = masters.get(trained) or replace(values[name], replicas_differ=False)
    return values


def load_optimizer(
    update: Update,
    trained: Collection[str],
    held: Collection[str],
    saved: Mapping[str, SavedTensor],
) -> None:
    """Take a checkpoint's optimizer state over.

    Args:
        update: has the optimizer.
        trained: the trained parameters of the whole model.
        held: those of them on this rank.
        saved: has `optimizer.NAME.KEY`.

    Raises:
        CheckpointError: it has a state of a parameter that the model has not.
    """
    for full in sorted(saved):
        if not full.startswith("optimizer."):
            continue
        name, _, key = full.removeprefix("optimizer.").rpartition(".")
        if name not in trained:
            raise CheckpointError(f"the checkpoint has a state for {name!r}, the model has not")
        if name in held:
            update.load_state(name, key, saved[full])


def first_names(names: Sequence[str]) -> str:
    """The first few of these names."""
    if not names:
        return "nothing"
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
