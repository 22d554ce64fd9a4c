"""Low-rank adapters (LoRA) on a model, with the modules of the library peft; QLoRA.

peft's layers are used unchanged: they contain the frozen layer as `base_layer`, and the matrices A
and B. peft's wrapper for `modules_to_save` is not used, because it has a second, frozen copy of
each of these modules, which no code reads.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from bigtrain.errors import ConfigError, UnfitModelError, as_word, did_you_mean
from bigtrain.hub.libraries import EXTRA, import_library
from bigtrain.hub.nf4 import (
    BLOCK,
    CARRIER,
    Nf4Layout,
    Nf4Linear,
    dequantized,
    fits_blocks,
    quantized,
)
from bigtrain.job.schema import LoraConfig
from bigtrain.machine.versions import installed_version
from bigtrain.tensors.shards import Extent, StateTensor, whole_extents

ALL_LINEAR = "all-linear"
"""The target that means every linear layer but the head."""
BASE = "base_layer"
"""The attribute of an adapted layer that is the frozen layer."""
ADAPTER = "default"
"""The name of the only adapter of a run."""
_KEY = "model.lora"
QUANTIZE = f"{_KEY}.quantize=nf4"
"""The job's key and value that select weights in 4 bits."""
_QUANTIZED = ("torch.nn.modules.linear.Linear", "transformers.pytorch_utils.Conv1D")
"""The classes that are quantized. Derived classes are not: they may use the weight otherwise."""
_TORCHAO = (0, 18)
"""The first version of torchao whose package `quantization` has NF4."""


def word_of(dtype: torch.dtype) -> str:
    """Return the name of a dtype in torch, such as bfloat16."""
    return str(dtype).removeprefix("torch.")


DTYPES = {word_of(dtype): dtype for dtype in (torch.float32, torch.bfloat16, torch.float16)}
DTYPES[word_of(torch.float64)] = torch.float64
"""The dtypes that a saved weight may have, by name."""


@dataclass(frozen=True)
class QuantizedLayer:
    """A linear layer whose weight is in 4 bits."""

    shape: tuple[int, int]
    """Output and input features."""
    transposed: bool
    """Whether the model without adapters stores the transpose (Conv1D)."""
    dtype: str = "float32"
    """The name of the dtype that the weight had before it was quantized."""


@dataclass(frozen=True)
class Adapters:
    """The modules of a model that have adapters, and the modules whose own weights are trained."""

    config: LoraConfig
    targets: tuple[str, ...]
    """Names of the modules that have adapters."""
    trained: tuple[str, ...]
    """Names of the modules whose own weights are trained (`modules_to_save`)."""
    transposed: tuple[str, ...]
    """The targets whose weight is stored as its transpose (Conv1D)."""
    shortest: tuple[str, ...]
    """The targets in peft's file: the last parts of their names, if these match no other module,
    otherwise the whole names."""
    base: str | None = None
    """The folder or id of the model without adapters; None if it is not known."""
    class_name: str | None = None
    """The class of the model, if it is one of transformers."""
    quantized: Mapping[str, QuantizedLayer] = field(default_factory=dict)
    """The layers whose weights are in 4 bits, by their names in the model without adapters."""
    unquantized: tuple[str, ...] = ()
    """The linear layers, except the head, that are not quantized; empty without quantization."""

    @property
    def alpha(self) -> float:
        """See `LoraConfig.alpha`."""
        alpha = 2 * self.config.rank if self.config.alpha is None else self.config.alpha
        return int(alpha) if alpha == int(alpha) else alpha

    @property
    def scale(self) -> float:
        """The factor by which the product B A is multiplied before it is added to a weight."""
        return self.alpha / self.config.rank

    def adapted_name(self, name: str) -> str:
        """Return a tensor's name in the adapted model, given its name without adapters."""
        module, _, own = name.rpartition(".")
        own = CARRIER if own == "weight" and module in self.quantized else own
        return f"{module}.{BASE}.{own}" if module in self.targets else f"{module}.{own}".strip(".")


def attach(
    model: nn.Module, config: LoraConfig, base: str | None = None, class_name: str | None = None
) -> nn.Module:
    """Freeze a model and add adapters to the layers that the job names.

    Args:
        model: the model, on any device, which is changed in place.
        config: the section `model.lora`.
        base: the folder or id of the model, for peft's file.
        class_name: the class of the model, if it is one of transformers.

    Returns:
        `model`. Its attribute `lora_adapters`, an `Adapters`, names the modules that were changed.

    Raises:
        ConfigError: peft is not installed, a name or pattern does not fit the model, or a weight
            cannot be quantized.
    """
    peft = import_library("peft", f"{_KEY}.rank={config.rank}")
    saved = _matching(model, config.modules_to_save, f"{_KEY}.modules_to_save")
    shared = _shared_modules(model)
    _check_saved(saved, shared)
    targets = _targets(model, config, saved, shared)
    modules = dict(model.named_modules())
    packed, unquantized = _quantized_layers(model, config, saved, shared)
    adapters = Adapters(
        config,
        tuple(targets),
        tuple(saved),
        tuple(name for name in targets if _kind(modules[name]) == "conv1d"),
        tuple(_shortest(targets, modules)),
        base,
        class_name,
        packed,
        tuple(unquantized),
    )
    settings = peft.LoraConfig(
        r=config.rank,
        lora_alpha=adapters.alpha,
        lora_dropout=config.dropout,
        target_modules="|".join(re.escape(name) for name in targets),
    )
    with warnings.catch_warnings():
        # peft warns of each Conv1D because its weight is transposed, but adapts it correctly.
        warnings.simplefilter("ignore")
        peft.inject_adapter_in_model(settings, model, adapter_name=ADAPTER)
    for name in saved:
        model.get_submodule(name).requires_grad_(True)
    for name, layer in packed.items():
        Nf4Linear.convert(modules[name], transposed=layer.transposed, key=QUANTIZE)
    model.lora_adapters = adapters  # type: ignore[assignment]
    return model


def _quantized_layers(
    model: nn.Module, config: LoraConfig, saved: Sequence[str], shared: Mapping[str, str]
) -> tuple[dict[str, QuantizedLayer], list[str]]:
    """Return the layers to quantize, and the names of the linear layers that are not quantized.

    Neither result contains the head, layers that are never called, or layers inside modules in
    `saved`.

    Raises:
        ConfigError: torchao is not installed, a weight cannot be divided into blocks, or there is
            no layer to quantize.
    """
    if config.quantize is None:
        if config.quantize_except:
            key = f"{_KEY}.quantize_except"
            raise ConfigError(
                f"{as_word(key, config.quantize_except)} is without effect, as nothing is "
                f"quantized. Set {QUANTIZE}, or leave {key} out."
            )
        return {}, []
    _check_torchao()
    left_out = _matching(model, config.quantize_except, f"{_KEY}.quantize_except")
    packed: dict[str, QuantizedLayer] = {}
    others: list[str] = []
    modules = dict(model.named_modules())
    for name in _linear_layers(model):
        module = modules[name]
        if any(name == one or name.startswith(f"{one}.") for one in saved):
            continue
        kind = f"{type(module).__module__}.{type(module).__qualname__}"
        is_left_out = name in left_out or _has_above(name, left_out)
        if is_left_out or name in shared or kind not in _QUANTIZED:
            others.append(name)
            continue
        shape = tuple(module.get_parameter("weight").shape)
        if not fits_blocks(shape):
            raise UnfitModelError(
                f"{QUANTIZE} divides a weight into blocks of {BLOCK} elements, and {name}.weight "
                f"has {' x '.join(map(str, shape))} = {math.prod(shape)}. Set "
                f"{as_word(f'{_KEY}.quantize_except', [name])} to leave it as it is."
            )
        transposed = _kind(module) == "conv1d"
        rows, columns = shape[::-1] if transposed else shape
        packed[name] = QuantizedLayer((rows, columns), transposed)
    if not packed:
        raise UnfitModelError(
            f"{QUANTIZE}: {type(model).__name__} has no linear layer to quantize besides its head "
            f"and those that are left out. Leave {_KEY}.quantize out."
        )
    return packed, others


def _check_torchao() -> None:
    """Check that a torchao with NF4 is installed, without importing it, which takes seconds."""
    version = installed_version("torchao")
    if version is None:
        raise ConfigError(f"{QUANTIZE} needs torchao, which is not installed. Run: {EXTRA}")
    if tuple(map(int, re.findall(r"\d+", version)[:2])) < _TORCHAO:
        needed = ".".join(map(str, _TORCHAO))
        raise ConfigError(
            f"{QUANTIZE} needs torchao {needed} or later, and {version} is installed. Run: "
            f"pip install 'torchao>={needed}'"
        )


def _shortest(targets: Sequence[str], modules: Mapping[str, nn.Module]) -> list[str]:
    """Return the last parts of names; whole names if peft matches further modules by the parts."""
    ends = dict.fromkeys(name.rpartition(".")[2] for name in targets)
    meant = {name for name in modules if name.rpartition(".")[2] in ends}
    return list(ends) if meant == set(targets) else list(targets)


def adapters_of(model: nn.Module) -> Adapters | None:
    """Return the adapted modules of a model; None if it has no adapters."""
    found = getattr(model, "lora_adapters", None)
    return found if isinstance(found, Adapters) else None


def name_without_adapter(name: str) -> str:
    """Return the name that a tensor of an adapted model has in the model without adapters."""
    return name.replace(f".{BASE}.", ".")


def quantized_value(weight: StateTensor, layer: QuantizedLayer) -> StateTensor:
    """Return the bytes of a weight in 4 bits; the weight is read and quantized on demand."""
    layout = Nf4Layout(layer.shape)
    shape = (layout.nbytes,)

    def values() -> Tensor:
        if weight.read is not None and not layer.transposed:
            read = weight.read
            return quantized(
                lambda begin, end: read((Extent(begin, end - begin),)), layout, QUANTIZE
            )
        whole = weight.values() if weight.read is None else weight.read(weight.extents)
        if layer.transposed:
            whole = whole.view(layer.shape[::-1]).t().flatten()
        return quantized(lambda begin, end: whole[begin:end], layout, QUANTIZE)

    return StateTensor(torch.uint8, shape, whole_extents(shape), values)


def dequantized_value(carrier: StateTensor, layer: QuantizedLayer) -> StateTensor:
    """Return a weight as in the model without adapters, in fp32; it is dequantized on demand."""
    shape = layer.shape[::-1] if layer.transposed else layer.shape

    def values() -> Tensor:
        whole = dequantized(carrier.values(), Nf4Layout(layer.shape), torch.float32)
        return (whole.t() if layer.transposed else whole).reshape(-1)

    return StateTensor(torch.float32, shape, whole_extents(shape), values)


def _check_saved(saved: Sequence[str], shared: Mapping[str, str]) -> None:
    """Refuse to train a tied parameter as the weight of only one of its modules."""
    for module, other in shared.items():
        holder = next((one for one in saved if module == one or module.startswith(f"{one}.")), None)
        if holder is not None:
            raise UnfitModelError(
                f"{_KEY}.modules_to_save={holder}: the weight of {module} is also {other}, which "
                f"would be trained with it. Leave it out of {_KEY}.modules_to_save, or untie them "
                "(for transformers: model.args.tie_word_embeddings=false)."
            )


def _targets(
    model: nn.Module, config: LoraConfig, saved: Sequence[str], shared: Mapping[str, str]
) -> list[str]:
    """Return the names of the modules that get an adapter, in the order of the model."""
    modules = dict(model.named_modules())
    found: dict[str, str] = {}
    for pattern in config.targets:
        if pattern == ALL_LINEAR:
            names = list(_linear_layers(model))
            if not names:
                raise UnfitModelError(
                    f"{_KEY}.targets={ALL_LINEAR}: {type(model).__name__} has no linear layer "
                    f"besides its head. Name modules in {_KEY}.targets."
                )
        else:
            names = _matching(model, [pattern], f"{_KEY}.targets")
            names = _adaptable(modules, names, pattern)
        found |= {name: found.get(name, pattern) for name in names}
    for name, pattern in found.items():
        _check_target(modules, name, pattern, saved, shared)
    return [name for name in modules if name in found]


def _adaptable(modules: Mapping[str, nn.Module], names: Sequence[str], pattern: str) -> list[str]:
    """Return the names of the modules that can have an adapter.

    Other modules are skipped if the pattern has wildcards and also fits a module that can have an
    adapter. Otherwise they are refused.
    """
    fitting = [name for name in names if _kind(modules[name]) is not None]
    others = [name for name in names if name not in fitting]
    if others and (not fitting or not _is_wild(pattern)):
        inside = [
            name for name in modules if name.startswith(f"{others[0]}.") and _kind(modules[name])
        ]
        raise UnfitModelError(
            f"{_KEY}.targets={pattern}: {others[0]} is a {type(modules[others[0]]).__name__}, and "
            "adapters are for Linear, Embedding and GPT-2's Conv1D. "
            + (f"Use {inside[0].rpartition('.')[2]}." if inside else "Name such layers.")
        )
    return fitting


def _is_wild(pattern: str) -> bool:
    return any(letter in pattern for letter in "*?[")


def _kind(module: nn.Module) -> str | None:
    """Return the kind of a layer that can have an adapter; None for any other module."""
    if isinstance(module, nn.Linear):
        return "linear"
    if isinstance(module, nn.Embedding):
        return "embedding"
    is_theirs = type(module).__module__ == "transformers.pytorch_utils"
    return "conv1d" if is_theirs and type(module).__name__ == "Conv1D" else None


def _linear_layers(model: nn.Module) -> Iterator[str]:
    """Yield the names of the linear layers, except the head and the layers in `_uncalled`."""
    head = _head_of(model)
    uncalled = _uncalled(model)
    for name, module in model.named_modules():
        if _kind(module) in ("linear", "conv1d") and name not in uncalled and module is not head:
            yield name


def _head_of(model: nn.Module) -> nn.Module | None:
    """Return the output layer that transformers names, or else the last linear child of a model."""
    getter = getattr(model, "get_output_embeddings", None)
    head = getter() if callable(getter) else None
    if isinstance(head, nn.Module):
        return head
    top = [module for module in model.children() if _kind(module) == "linear"]
    return top[-1] if top else None


def _uncalled(model: nn.Module) -> set[str]:
    """Return the names of linear layers that nn.MultiheadAttention reads instead of calling."""
    return {
        f"{name}.out_proj" if name else "out_proj"
        for name, module in model.named_modules()
        if isinstance(module, nn.MultiheadAttention)
    }


def _shared_modules(model: nn.Module) -> dict[str, str]:
    """Return, for each module with a tied parameter, another name of that parameter."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    shared = {}
    for several in names.values():
        for name in several:
            other = next((one for one in several if one != name), None)
            if other is not None:
                shared[name.rpartition(".")[0]] = other
    return shared


def _check_target(
    modules: Mapping[str, nn.Module],
    name: str,
    pattern: str,
    saved: Sequence[str],
    shared: Mapping[str, str],
) -> None:
    key = f"{_KEY}.targets={pattern}"
    inside = next((one for one in saved if name == one or name.startswith(f"{one}.")), None)
    if inside is not None:
        raise UnfitModelError(
            f"{key} names {name}, and {_KEY}.modules_to_save trains {inside} itself. Leave one of "
            "the two out."
        )
    if name in shared:
        raise UnfitModelError(
            f"{key}: the weight of {name} is also {shared[name]}, and an adapter would change one "
            f"of the two. Leave {name} out of {_KEY}.targets, or untie them (for transformers: "
            "model.args.tie_word_embeddings=false)."
        )
    parent = modules.get(name.rpartition(".")[0])
    if isinstance(parent, nn.MultiheadAttention):
        raise UnfitModelError(
            f"{key}: nn.MultiheadAttention reads the weight of {name} without calling it, so an "
            f"adapter would have no effect. Leave it out of {_KEY}.targets."
        )
    if isinstance(modules[name], nn.Embedding) and modules[name].sparse:
        raise UnfitModelError(
            f"{key}: {name} is an Embedding with sparse=True, whose gradient an adapter does not "
            "have. Set sparse=False."
        )


def _matching(model: nn.Module, patterns: Sequence[str], key: str) -> list[str]:
    """Return the names of modules that fit a pattern, except those inside another such module.

    Raises:
        ConfigError: a pattern fits no module.
    """
    names = [name for name, _ in model.named_modules() if name]
    found: set[str] = set()
    for pattern in patterns:
        fitting = [name for name in names if _fits(name, pattern)]
        if not fitting:
            ends = list(dict.fromkeys([*(name.rpartition(".")[2] for name in names), *names]))
            layers = dict.fromkeys(
                name.rpartition(".")[2] for name, one in model.named_modules() if _kind(one)
            )
            raise UnfitModelError(
                f"{as_word(key, [pattern])}: no module of {type(model).__name__} fits it"
                f"{did_you_mean(pattern, ends)} Its layers are {', '.join(layers)}."
            )
        found.update(fitting)
    return [name for name in names if name in found and not _has_above(name, found)]


def _fits(name: str, pattern: str) -> bool:
    """Whether a module's name, or the end of it after a dot, fits a pattern."""
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}")


def _has_above(name: str, names: Collection[str]) -> bool:
    parts = name.split(".")
    return any(".".join(parts[:end]) in names for end in range(1, len(parts)))
