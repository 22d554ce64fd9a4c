"""The model that a file is explained for, and a check of the layers that the file names."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from bigtrain.errors import ConfigError, plain_text, unquoted_word
from bigtrain.explain.request import TYPED, Asked, ToolRequest
from bigtrain.hub.folder import HF
from bigtrain.hub.libraries import import_library
from bigtrain.hub.lora import ALL_LINEAR
from bigtrain.job.schema import ModelConfig
from bigtrain.models.blocks import find_blocks
from bigtrain.models.spec import ModelSpec

ASSUMED_LENGTH = 1024
_LENGTH = "data.args.sequence_length"
_TARGETS = "model.lora.targets"
_SAVED = "model.lora.modules_to_save"
_SHOWN = 8


@dataclass(frozen=True)
class ExplainedModel:
    """A model, and overrides for samples of its form."""

    name: str
    """`model.name` of a job."""
    spec: ModelSpec
    """The description of the model."""
    model: nn.Module
    """The model on the meta device, without adapters."""
    data: tuple[str, ...]
    """Overrides for samples of the file's length; empty if the command line names the data."""
    is_language: bool
    """Whether the model is a causal language model."""

    @property
    def class_name(self) -> str:
        """The name of the model's class."""
        return type(self.model).__name__

    @property
    def parameters(self) -> int:
        """The number of elements of all parameters."""
        return sum(p.numel() for p in self.model.parameters())


def job_name_of(model: str) -> str:
    """Return `model.name` for the argument MODEL: folders and ids of the Hub get `hf:`.

    Raises:
        ConfigError: the argument looks like a path, and there is no such folder.
    """
    if model.startswith(HF) or ":" in model:
        return model
    if Path(model).expanduser().is_dir():
        return f"{HF}{model}"
    if model.startswith((".", "/", "~")):
        raise ConfigError(
            f"MODEL: there is no folder {plain_text(model, 120)}. Give a folder with a "
            "config.json, hf:OWNER/NAME, a built-in name such as gpt2, or package.module:Class."
        )
    return f"{HF}{model}" if "/" in model else model


def open_subject(request: ToolRequest, model: str, words: Sequence[str]) -> ExplainedModel:
    """Return the model on the meta device, and choose samples for it.

    Args:
        request: the settings that the file requests. A missing sequence length is added, and keys
            that do not apply to the model are removed.
        model: the argument MODEL.
        words: the overrides on the command line, KEY=VALUE.

    Raises:
        ConfigError: there is no such model, or no samples for it are known.
    """
    name = job_name_of(model)
    if not name.startswith(HF):  # the file's arguments are for transformers
        request.keys = {
            key: asked
            for key, asked in request.keys.items()
            if not key.startswith("model.args.") or asked.why == TYPED
        }
    args = dict(request.keys["model.args"].value) if "model.args" in request.keys else {}
    args |= {
        key.removeprefix("model.args."): asked.value
        for key, asked in request.keys.items()
        if key.startswith("model.args.")
    }
    spec = ModelSpec.of(
        ModelConfig.model_validate({"name": name, "args": args, "pretrained": _initial(name)})
    )
    spec.check()
    is_language = spec.is_language or spec.is_hub_language
    length = _length(request, spec) if is_language else None
    vocabulary = _vocabulary(spec)
    described = spec.describe(num_classes=vocabulary, sequence_length=length)
    data: tuple[str, ...] = ()
    if not any(word.startswith("data.name=") for word in words):
        data = _samples(spec, name, length, vocabulary)
    if not is_language:
        request.keys.pop(_LENGTH, None)
    return ExplainedModel(name, spec, described.model, data, is_language)


def _initial(name: str) -> str | None:
    """Return `model.pretrained` for a forecast, which reads no weights."""
    return "none" if name.startswith(HF) else None


def _length(request: ToolRequest, spec: ModelSpec) -> int:
    """Return the tokens of a sample; add an assumed or corrected length to the request."""
    known = request.keys.get(_LENGTH)
    most = spec.sequence_length
    if spec.hub is not None:
        config = spec.hub.architecture.config.get_text_config()
        most = getattr(config, "max_position_embeddings", None) or getattr(
            config, "n_positions", None
        )
    if known is None:
        length = min(ASSUMED_LENGTH, most) if isinstance(most, int) else ASSUMED_LENGTH
        request.keys[_LENGTH] = Asked(length, why="assumed: the file has no sequence length")
        return length
    length = int(known.value)
    if isinstance(most, int) and length > most:
        request.find(
            "contradiction",
            known.written,
            f"the model has {most} positions; it is forecast with {most}"
            + ("" if known.written else f" ({length} is {known.why})"),
            f"Write {most} or less.",
        )
        request.keys[_LENGTH] = Asked(most, known.written, "the positions of the model")
        return most
    return length


def _vocabulary(spec: ModelSpec) -> int | None:
    return spec.hub.architecture.vocabulary if spec.hub is not None else None


def _samples(
    spec: ModelSpec, name: str, length: int | None, vocabulary: int | None
) -> tuple[str, ...]:
    """Return overrides for synthetic samples of the form that the model needs.

    Raises:
        ConfigError: the form is not known.
    """
    if length is not None:
        args: dict[str, object] = {"kind": "language", "length": length}
        if vocabulary is not None:
            args["vocabulary"] = vocabulary
    elif spec.task in ("classification", "segmentation"):
        side = 28 if name == "lenet" else 224
        shape = f"[{1 if name == 'lenet' else 3},{side},{side}]"
        words = f"data.args={{kind: {spec.task}, input_shape: {shape}}}"
        return ("data.name=synthetic", words)
    else:
        raise ConfigError(
            f"MODEL: {name} is no causal language model, and no samples for it are known. Add "
            "words for its data: data.name=package.module:function, or data.name=synthetic "
            "'data.args={kind: classification, input_shape: [3,224,224]}'."
        )
    return ("data.name=synthetic", unquoted_word("data.args", args))


def check_layers(request: ToolRequest, subject: ExplainedModel) -> None:
    """Report names of layers in the file that the model does not have.

    Args:
        request: the settings that the file requests; its keys and findings change.
        subject: the model.
    """
    if request.layer_classes is not None:
        classes = {type(module).__name__ for module in subject.model.modules()}
        missing = [name for name in request.layer_classes.value if name not in classes]
        blocks = {type(block).__name__ for _, block in find_blocks(subject.model)}
        if missing:
            request.find(
                "contradiction",
                request.layer_classes.written,
                f"{subject.class_name} has no layer of class {', '.join(missing)}, and Accelerate "
                "refuses it",
                f"Write {', '.join(sorted(blocks)) or 'the class of its blocks'}.",
            )
    if "model.lora.rank" not in request.keys:
        return
    if _TARGETS not in request.keys:
        _take_default_targets(request, subject)
    for key in (_TARGETS, _SAVED):
        _check_names(request, subject, key)


def _take_default_targets(request: ToolRequest, subject: ExplainedModel) -> None:
    """Set the targets to peft's default for the kind of model, as peft does without targets."""
    kind = subject.spec.hub.folder.settings.get("model_type") if subject.spec.hub else None
    constants = import_library("peft.utils.constants", "model.lora")
    known: Mapping[str, list[str]] = constants.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
    names = known.get(str(kind))
    if names is not None:
        request.keys[_TARGETS] = Asked(list(names), why=f"peft's default for {kind}")
        return
    request.find(
        "contradiction",
        request.keys["model.lora.rank"].written,
        f"no target modules are named, and peft has no default for {kind or subject.class_name}",
        "Name them: lora_target_modules: all-linear.",
    )
    request.keys[_TARGETS] = Asked([ALL_LINEAR], why="no layers are named")


def _check_names(request: ToolRequest, subject: ExplainedModel, key: str) -> None:
    """Report and drop names that fit no module; replace patterns by the modules that they fit."""
    asked = request.keys.get(key)
    if asked is None:
        return
    modules = dict(subject.model.named_modules())
    layers = {
        name: module
        for name, module in modules.items()
        if key == _SAVED or isinstance(module, nn.Linear | nn.Embedding) or _is_conv1d(module)
    }
    fitting: list[str] = []
    missing: list[str] = []
    for name in asked.value:
        found = _fits(str(name), layers)
        (fitting.extend(found) if found else missing.append(str(name)))
    if missing:
        ends = dict.fromkeys(name.rpartition(".")[2] for name in layers if name)
        shown = ", ".join(list(ends)[:_SHOWN])
        request.find(
            "contradiction",
            asked.written,
            f"{subject.class_name} has no layer {', '.join(missing)}",
            f"Its layers are {shown}.",
        )
    if fitting or key == _SAVED:
        names = tuple(dict.fromkeys(fitting))
        if names:
            request.keys[key] = Asked(list(names), asked.written, asked.why)
        else:
            del request.keys[key]
    else:
        request.keys[key] = Asked([ALL_LINEAR], asked.written, "none of the names fits")


def _is_conv1d(module: nn.Module) -> bool:
    return type(module).__name__ == "Conv1D"


def _fits(name: str, layers: Mapping[str, nn.Module]) -> list[str]:
    """Return the names in a job for a name or regular expression; empty if no layer fits."""
    if name == ALL_LINEAR:
        return [name]
    if any(layer == name or layer.endswith(f".{name}") for layer in layers):
        return [name]
    try:
        found = [layer for layer in layers if re.fullmatch(name, layer)]
    except re.error:
        return []
    ends = {layer.rpartition(".")[2] for layer in found}
    same = {layer for layer in layers if layer.rpartition(".")[2] in ends}
    return sorted(ends) if same == set(found) else found
