"""The state of a module and its optimizer under a checkpoint's names, saved and loaded."""

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
    """The tensors of a module's state; for the rest see `extra_states`."""
    return {n: t for n, t in state.items() if isinstance(t, Tensor)}


def extra_modules(roots: Iterable[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """The modules with an extra state (`get_extra_state`), by its name in the state dict."""
    for root in roots:
        model = getattr(root, "users_module", root) if hasattr(root, "cut_through") else root
        for path, module in model.named_modules():
            if type(module).get_extra_state is not nn.Module.get_extra_state:
                yield f"{path}._extra_state".lstrip("."), module


def extra_states(roots: Iterable[nn.Module]) -> dict[str, Any]:
    """Copies of the extra states of modules, by name.

    Raises:
        CheckpointError: one cannot be written as JSON.
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


def as_json(state: Any) -> Any:
    """A state after a round trip through JSON; NOT_JSON if that fails or changes it."""
    try:
        # Read as from a checkpoint: one level deeper, with the same bounds.
        copied = parse_json(json.dumps({"": {"": state}}, allow_nan=False), "")[""][""]
        return copied if bool(copied == state) else NOT_JSON
    except (TypeError, ValueError, RecursionError, RuntimeError):
        return NOT_JSON


def replica_state(state: Mapping[str, StateTensor], replica: int) -> dict[str, StateTensor]:
    """Return a replica's state under names that include the replica, as its values are separate.

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
    """Copy a checkpoint's values into these tensors, and into the fp32 copies of an update.

    Args:
        current: this rank's tensors, by their names in the model.
        expected: the names of the whole model.
        saved: tensors named `model.NAME`.
        update: may hold fp32 copies.

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
        expected: the names of the whole model.
        saved: tensors named `model.NAME`.

    Raises:
        CheckpointError: names or shapes differ from the model's.
    """
    saved_names = {name.removeprefix("model.") for name in saved if name.startswith("model.")}
    missing, extra = sorted(expected - saved_names), sorted(saved_names - expected)
    if missing or extra:
        tie = ""
        if not extra:  # as those of the Hugging Face Hub
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
    """Return a sentence to add if only one of a checkpoint and a model has weights in 4 bits."""
    for names, words in ((missing, "without"), (extra, "with")):
        if any(name.rpartition(".")[2] == CARRIER for name in names):
            return f" It was saved {words} model.lora.quantize=nf4."
    return ""


def model_state(
    state: Mapping[str, Tensor],
    named: Iterable[tuple[str, nn.Parameter]],
    masters: Mapping[str, StateTensor],
) -> dict[str, StateTensor]:
    """The part of a module's state on this rank, with the fp32 values of parameters that have them.

    Args:
        state: the result of `state_dict`. That call reshards gathered parameters, which makes new
            parameter objects, so it has to come before `named`.
        named: the parameters, under all their names.
        masters: see `Update.masters`.
    """
    # Buffers depend on the batches that a rank has seen.
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
        local_names: those of them on this rank.
        saved: tensors named `optimizer.NAME.KEY`.

    Raises:
        CheckpointError: it has the state of a parameter that the model does not train.
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
    """The first few names, and the number of the others."""
    if not names:
        return "nothing"
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
