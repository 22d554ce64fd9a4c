"""Save and load the state of a module and its optimizer under the names of a checkpoint."""

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
from bigtrain.hub.nf4 import CARRIER
from bigtrain.optim.update import Update
from bigtrain.tensors.shards import SavedTensor, StateTensor, local_tensor, read_like


def module_tensors(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors of a module's state dict; `extra_states` returns its other values."""
    return {n: t for n, t in state.items() if isinstance(t, Tensor)}


def extra_modules(roots: Iterable[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules with an extra state (`get_extra_state`), with its name in a state dict.

    Args:
        roots: the model, or the stages of this rank.
    """
    for root in roots:
        model = getattr(root, "users_module", root) if hasattr(root, "cut_through") else root
        for path, module in model.named_modules():
            if type(module).get_extra_state is not nn.Module.get_extra_state:
                yield f"{path}._extra_state".lstrip("."), module


def extra_states(roots: Iterable[nn.Module]) -> dict[str, Any]:
    """Return copies of the extra states of modules, by name in the state dict.

    Args:
        roots: the model, or the stages of this rank.

    Raises:
        CheckpointError: a state does not survive a round trip through JSON.
    """
    states: dict[str, Any] = {}
    for name, module in extra_modules(roots):
        state = module.get_extra_state()
        copied = as_json(state)
        if copied is NOT_JSON:
            raise CheckpointError(
                f"{name} is a {type(state).__name__} that JSON cannot store unchanged, so it "
                "cannot be saved. Let get_extra_state return None, bools, numbers, strings, "
                "lists and dicts with strings as keys."
            )
        states.setdefault(name, copied)
    return states


NOT_JSON = object()
"""Returned by `as_json` for a state that JSON cannot store unchanged."""


def as_json(state: Any) -> Any:
    """Return a state after a round trip through JSON; NOT_JSON if that fails or changes it."""
    try:
        # The state is nested two levels deeper, as in a checkpoint, so that the same limit of depth
        # applies.
        copied = parse_json(json.dumps({"": {"": state}}, allow_nan=False), "")[""][""]
        return copied if bool(copied == state) else NOT_JSON
    except (TypeError, ValueError, RecursionError, RuntimeError):
        return NOT_JSON


def replica_state(state: Mapping[str, StateTensor], replica: int) -> dict[str, StateTensor]:
    """Return a replica's state under names that include the replica, for replicas that differ.

    The first replica's tensors keep their names, so that every strategy finds a model and an
    optimizer's state in the checkpoint. A tensor NAME of another replica is named
    `replicas.N.NAME`. Only a technique whose replicas differ reads that tensor back, with
    `state_of_replica`. A technique may save other values under `replicas.`, by names that do not
    begin with a number: `replicas.outer.steps`.

    Args:
        state: the tensors of this rank, by the names of `Runner.state`.
        replica: the rank in the dp axis.
    """
    if replica == 0:
        return dict(state)
    return {f"{REPLICAS}.{replica}.{name}": tensor for name, tensor in state.items()}


def state_of_replica(saved: Mapping[str, SavedTensor], replica: int) -> dict[str, SavedTensor]:
    """Return a checkpoint as one replica reads it: the inverse of `replica_state`.

    Tensors that the checkpoint has for this replica replace the tensors of the first replica. If
    the checkpoint has none (it was saved with fewer replicas, or by another technique), the replica
    starts as a copy of the first.

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
    """Copy a checkpoint's values into these tensors, and into the fp32 copies of an update.

    Args:
        current: this rank's tensors, by their names in the model.
        expected: the names of all tensors of the whole model.
        saved: the tensors of a checkpoint, named `model.NAME`.
        update: the optimizer's update, which may have fp32 copies of parameters.

    Raises:
        CheckpointError: names or shapes differ from the model's.
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
    """Refuse a checkpoint of another model, before any of it is loaded.

    Args:
        shapes: whole shapes of the tensors of which this rank holds a part, by name.
        expected: the names of all tensors of the whole model.
        saved: the tensors of a checkpoint, named `model.NAME`.

    Raises:
        CheckpointError: names or shapes differ from the model's.
    """
    saved_names = {name.removeprefix("model.") for name in saved if name.startswith("model.")}
    missing, extra = sorted(expected - saved_names), sorted(saved_names - expected)
    if missing or extra:
        tie = ""
        if not extra:  # checkpoints of the Hugging Face Hub have tied tensors once
            tie = (
                " Where that is tied to another tensor, convert with: bigtrain checkpoint convert "
                f"SOURCE TARGET --tie {missing[0]}=OTHER"
            )
        raise CheckpointError(
            f"the checkpoint does not fit this model: it lacks {first_names(missing)} and has "
            f"{first_names(extra)} too many. Use the model.name and model.args it was saved with."
            f"{_other_quantization(missing, extra)}{tie}"
        )
    for name, shape in shapes.items():
        saved_shape = saved[f"model.{name}"].shape
        if tuple(saved_shape) != tuple(shape):
            raise CheckpointError(
                f"{name} has shape {tuple(saved_shape)} in the checkpoint and "
                f"{tuple(shape)} in the model. Use the model.args it was saved with."
            )


def _other_quantization(missing: Sequence[str], extra: Sequence[str]) -> str:
    """Return a sentence for an error if either the checkpoint or the model has 4-bit weights."""
    for names, words in ((missing, "without"), (extra, "with")):
        if any(name.rpartition(".")[2] == CARRIER for name in names):
            return f" It was saved {words} model.lora.quantize=nf4."
    return ""


def model_state(
    state: Mapping[str, Tensor],
    named: Iterable[tuple[str, nn.Parameter]],
    masters: Mapping[str, StateTensor],
) -> dict[str, StateTensor]:
    """Return a module's state on this rank, with the fp32 values of parameters that have them.

    Args:
        state: the tensors of `state_dict`. Call `state_dict` before `named` is made: it reshards
            gathered parameters, which makes new parameter objects.
        named: the parameters, under all their names.
        masters: the fp32 values of parameters by name; see `Update.masters`.
    """
    # Buffers may differ between replicas: they depend on the batches that a rank has seen.
    values = {n: replace(StateTensor.of(t), replicas_differ=True) for n, t in state.items()}
    first: dict[int, str] = {}
    for name, parameter in named:
        # Tied parameters are saved under each of their names, as in the module's state dict.
        trained = first.setdefault(id(parameter), name)
        if name in values:
            values[name] = masters.get(trained) or replace(values[name], replicas_differ=False)
    return values


def load_optimizer(
    update: Update,
    trained: Collection[str],
    local_names: Collection[str],
    saved: Mapping[str, SavedTensor],
) -> None:
    """Load a checkpoint's optimizer state.

    Args:
        update: the optimizer's `Update`.
        trained: names of the trained parameters of the whole model.
        local_names: names of the trained parameters on this rank.
        saved: the tensors of a checkpoint, named `optimizer.NAME.KEY`.

    Raises:
        CheckpointError: the checkpoint has the state of a parameter that the model does not train.
    """
    for full in sorted(saved):
        if not full.startswith("optimizer."):
            continue
        name, _, key = full.removeprefix("optimizer.").rpartition(".")
        if name not in trained:
            raise CheckpointError(f"the checkpoint has a state for {name!r}, the model has not")
        if name in local_names:
            update.load_state(name, key, saved[full])


def first_names(names: Sequence[str]) -> str:
    """Return the first three names and the number of the others; "nothing" without names."""
    if not names:
        return "nothing"
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
