"""Read pretrained weights of a model from a file: for all tensors, or all but some modules.

Nothing is downloaded. For torchvision's models the file may be in torchvision's download cache.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from bigtrain.checkpoint.foreign.state_dicts import is_state_dict, open_state_dict
from bigtrain.errors import CheckpointError, ConfigError, as_word
from bigtrain.models.blueprint import Blueprint
from bigtrain.models.parameters import named_tensors
from bigtrain.models.torchvision_models import cached_weights
from bigtrain.tensors.shards import StateTensor

CACHE = "cache"
"""The value of `model.pretrained` for the file that torchvision has downloaded before."""
_LISTED = 3


def use_pretrained(blueprint: Blueprint, name: str, source: str, excluded: Sequence[str]) -> Path:
    """Let the tensors of a blueprint begin with the values of a file.

    Args:
        blueprint: the blueprint of the model; it is changed.
        name: the name of the model (`model.name`).
        source: the path of a state dict, or `cache`.
        excluded: names of modules or tensors that begin with initial values instead
            (`model.pretrained_except`).

    Returns:
        The path of the file.

    Raises:
        ConfigError: the file does not exist or is no state dict, its names or shapes differ from
            the model's, or an excluded name is unknown.
    """
    path = cached_weights(name) if source == CACHE else Path(source)
    key = f"model.pretrained={source}"
    if not path.exists():
        raise ConfigError(
            f"{key}: there is no file {path}. Give the path of a state dict (.pth, .safetensors), "
            f"or {CACHE} for the file that torchvision has downloaded."
        )
    if not is_state_dict(path):
        raise ConfigError(
            f"{key}: {path} is no state dict by its name. Give a .pth, .pt, .bin or .safetensors."
        )
    try:
        saved = open_state_dict(path).model
    except CheckpointError as error:
        raise ConfigError(f"{key}: {error}. Give a state dict of {name}.") from None
    wanted = named_tensors(blueprint.model)
    _check_excluded(excluded, wanted, saved)
    saved = {n: tensor for n, tensor in saved.items() if not _is_in(n, excluded)}
    wanted = {n: tensor for n, tensor in wanted.items() if not _is_in(n, excluded)}
    _check(key, name, saved, wanted)
    blueprint.values = saved
    return path


def _is_in(name: str, modules: Sequence[str]) -> bool:
    return any(name == module or name.startswith(f"{module}.") for module in modules)


def _check_excluded(
    excluded: Sequence[str],
    wanted: Mapping[str, torch.Tensor],
    saved: Mapping[str, StateTensor],
) -> None:
    """Refuse an excluded name that neither the model nor the file has.

    A name that only the file has is allowed, and excludes tensors of the file.
    """
    for module in excluded:
        if not any(_is_in(name, [module]) for name in (*wanted, *saved)):
            known = sorted({name.split(".")[0] for name in wanted})
            raise ConfigError(
                f"model.pretrained_except: the model has no {module!r}. It has {', '.join(known)}."
            )


def _check(
    key: str,
    model: str,
    saved: Mapping[str, StateTensor],
    wanted: Mapping[str, torch.Tensor],
) -> None:
    """Refuse a file whose names or shapes differ from the model's."""
    others = [n for n in wanted if n in saved and tuple(wanted[n].shape) != saved[n].shape]
    if others:
        first = others[0]
        modules = list(dict.fromkeys(n.rpartition(".")[0] or n for n in others))
        raise ConfigError(
            f"{key}: {first} is {list(saved[first].shape)} in the file and "
            f"{list(wanted[first].shape)} in {model}{_more(others)}: another number of classes, or "
            f"another model. Set {as_word('model.pretrained_except', modules)} to begin there "
            "with initial weights."
        )
    # Files from before torch 0.4.1 have no such counters; torch assumes 0 for them, too.
    missing = [n for n in wanted if n not in saved and not n.endswith(".num_batches_tracked")]
    spare = [n for n in saved if n not in wanted]
    for names, where, how in (
        (missing, "the file has no", "to begin there with initial weights"),
        (spare, f"{model} has no", "to leave them out"),
    ):
        if names and len(names) < len(wanted) // 2:
            modules = list(dict.fromkeys(n.rpartition(".")[0] or n for n in names))[:8]
            raise ConfigError(
                f"{key}: {where} {names[0]}{_more(names)}. Set "
                f"{as_word('model.pretrained_except', modules)} {how}."
            )
        if names:
            raise ConfigError(
                f"{key}: {where} {', '.join(names[:_LISTED])}{_more(names, _LISTED)}: it is of "
                f"another model than {model}, or its names have a prefix. Give a state dict of "
                f"{model}; bigtrain checkpoint convert and export make one from a checkpoint."
            )


def _more(names: Sequence[str], shown: int = 1) -> str:
    return f" and {len(names) - shown} more" if len(names) > shown else ""
