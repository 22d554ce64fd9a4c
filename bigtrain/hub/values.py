"""The saved value of each tensor of a model, described without reading it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from bigtrain.checkpoint.foreign.state_dicts import is_state_dict, open_state_dict
from bigtrain.errors import CheckpointError, ConfigError, as_word, did_you_mean
from bigtrain.hub.conversion import ConvertedTensors, Rules, grouped, ignored, loading_rules
from bigtrain.tensors.shards import StateTensor

_COMPARED = 1 << 22
"""Number of elements of two tensors that are compared at a time."""

_WORDS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


@dataclass(frozen=True)
class SavedModel:
    """The weights in a folder, as the tensors of a model."""

    values: Mapping[str, StateTensor]
    """The saved tensors, by the first names of the model's tensors."""
    names: tuple[str, ...]
    """The names in the files of the tensors that the model uses."""
    dtypes: tuple[str, ...]
    """The floating-point dtypes of these tensors in the files: bf16, fp32, ..."""


def read_values(model: nn.Module, path: Path, key: str, excluded: Sequence[str]) -> SavedModel:
    """Describe the value of each tensor of a model of transformers, from the files of a folder.

    Args:
        model: the model, usually on the meta device.
        path: a folder in the Hub's layout, or a single file with a state dict.
        key: the job's key and value that named `path`, for messages.
        excluded: modules or tensors that keep initial values (`model.pretrained_except`).

    Raises:
        ConfigError: there are no weights, a file is missing or damaged, a tensor is missing, spare
            or of another shape, or tied tensors differ.
    """
    saved = _opened(path, key)
    rules = loading_rules(model)
    groups, spare = grouped(model, saved, Rules.of(rules))
    converted = ConvertedTensors(model, saved)
    values: dict[str, StateTensor] = {}
    taken: list[str] = []
    for group in groups:
        try:
            made = converted.of_group(group)
        except Exception as error:
            # A converter may raise any exception if its inputs do not fit.
            first = next(iter(group.sources.values()))[0]
            raise ConfigError(
                f"{key}: {first} and the tensors of the files that make {group.name} do not fit "
                f"together: {(str(error).splitlines() or [''])[0]}. Copy the folder again."
            ) from None
        values |= made
        taken += [name for names in group.sources.values() for name in names]
    wanted = model.state_dict()
    _check_excluded(excluded, [*wanted, *saved])
    values = {n: values[n] for n in wanted if n in values and not _is_in(n, excluded)}
    spare = [name for name in spare if not _is_in(name, excluded)]
    _check_shapes(key, model, values, wanted)
    _check_names(key, model, values, spare, excluded)
    dtypes = {_word(saved[name].dtype) for name in taken if saved[name].dtype.is_floating_point}
    return SavedModel(_by_first_names(key, model, values), tuple(taken), tuple(sorted(dtypes)))


def _word(dtype: torch.dtype) -> str:
    return _WORDS.get(dtype, str(dtype).removeprefix("torch."))


def _opened(path: Path, key: str) -> Mapping[str, StateTensor]:
    if not is_state_dict(path):
        raise ConfigError(
            f"{key}: {path} has no weights (model.safetensors, pytorch_model.bin, or an index of "
            "several). Copy them there, or set model.pretrained=false to begin with initial ones."
        )
    try:
        return open_state_dict(path).model
    except CheckpointError as error:
        raise ConfigError(f"{key}: {error}. Copy the folder again.") from None


def _is_in(name: str, modules: Collection[str]) -> bool:
    return any(name == module or name.startswith(f"{module}.") for module in modules)


def _check_excluded(excluded: Sequence[str], names: Iterable[str]) -> None:
    names = list(names)
    for module in excluded:
        if not any(_is_in(name, [module]) for name in names):
            parents = {name[:end] for name in names for end in _ends(name)}
            raise ConfigError(
                f"model.pretrained_except: neither the model nor its files have {module!r}"
                f"{did_you_mean(module, parents)} The model has "
                f"{', '.join(dict.fromkeys(name.partition('.')[0] for name in names))}."
            )


def _ends(name: str) -> list[int]:
    return [position for position, letter in enumerate(name) if letter == "."] + [len(name)]


def _check_shapes(
    key: str,
    model: nn.Module,
    values: Mapping[str, StateTensor],
    wanted: Mapping[str, torch.Tensor],
) -> None:
    others = [n for n, v in values.items() if n in wanted and tuple(wanted[n].shape) != v.shape]
    if others:
        first = others[0]
        raise ConfigError(
            f"{key}: {first} is {list(values[first].shape)} in the files and "
            f"{list(wanted[first].shape)} in {type(model).__name__} by its configuration"
            f"{_more(others)}. Set {as_word('model.pretrained_except', _modules(others))} to begin "
            "there with initial weights, or correct model.args."
        )


def _check_names(
    key: str,
    model: nn.Module,
    values: Mapping[str, StateTensor],
    spare: Sequence[str],
    excluded: Sequence[str],
) -> None:
    """Refuse tensors that the files lack, and tensors in files that the model does not have."""
    kind = type(model).__name__
    same = _same_tensors(model)
    missing = [
        name
        for name in model.state_dict(keep_vars=True)
        if not any(other in values or _is_in(other, excluded) for other in same[name])
    ]
    # Files of torch versions before 0.4.1 lack this counter.
    missing = [name for name in missing if not name.endswith(".num_batches_tracked")]
    missing = sorted(
        set(missing) - ignored(model, "_keys_to_ignore_on_load_missing", missing), key=missing.index
    )
    spare = sorted(
        set(spare) - ignored(model, "_keys_to_ignore_on_load_unexpected", spare), key=spare.index
    )
    if missing and not values:
        raise ConfigError(
            f"{key}: none of the {len(spare)} tensors in the files is one of {kind}: they begin "
            f"with {', '.join(spare[:3])}. Give a folder of {kind}, or set model.args.architecture."
        )
    for found, where, how in (
        (missing, "the files have no", "to begin there with initial weights"),
        (spare, f"{kind} has no", "to leave them out"),
    ):
        if found:
            raise ConfigError(
                f"{key}: {where} {found[0]}{_more(found)}. Copy the folder again if it is not "
                f"complete; or set {as_word('model.pretrained_except', _modules(found)[:8])} {how}."
            )


def _modules(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(name.rpartition(".")[0] or name for name in names))


def _more(names: Sequence[str]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""


def _same_tensors(model: nn.Module) -> dict[str, list[str]]:
    """Return for each name all names of the same tensor; a tied tensor has several names."""
    names: dict[int, list[str]] = {}
    state = model.state_dict(keep_vars=True)
    for name, tensor in state.items():
        names.setdefault(id(tensor), []).append(name)
    return {name: names[id(tensor)] for name, tensor in state.items()}


def _by_first_names(
    key: str, model: nn.Module, values: Mapping[str, StateTensor]
) -> dict[str, StateTensor]:
    """Return the values by the first names of tensors; refuse tied tensors whose values differ."""
    first_of: dict[int, str] = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        first_of.setdefault(id(tensor), name)
    state = model.state_dict(keep_vars=True)
    found: dict[str, StateTensor] = {}
    named: dict[str, str] = {}
    for name, value in values.items():
        first = first_of[id(state[name])]
        if first in found and not _equal(found[first], value):
            raise ConfigError(
                f"{key}: the configuration ties {name} to {named[first]}, and the files have "
                "different values of them. Set model.args.tie_word_embeddings=false."
            )
        found.setdefault(first, value)
        named.setdefault(first, name)
    return found


def _equal(one: StateTensor, other: StateTensor) -> bool:
    """Whether two saved tensors have equal values."""
    if one is other or one.shape != other.shape:
        return one is other
    if one.read is None or other.read is None:
        return torch.equal(one.values(), other.values())
    for extent in one.extents:
        for begin in range(extent.start, extent.start + extent.length, _COMPARED):
            part = (type(extent)(begin, min(_COMPARED, extent.start + extent.length - begin)),)
            if not torch.equal(one.read(part), other.read(part)):
                return False
    return True
