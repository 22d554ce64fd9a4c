"""The model that a user names, with samples of the shapes on which it is trained."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bigtrain.errors import ConfigError, did_you_mean, unquoted_word
from bigtrain.hub.architecture import ARCHITECTURE, Architecture, read_architecture
from bigtrain.hub.folder import HF, TIMM, find_folder
from bigtrain.hub.timm_models import image_shape
from bigtrain.models import list_models, sequence_length, task_of
from bigtrain.models.gpt import PRESETS

SAMPLE_TOKENS = 2048
"""Number of tokens of a sample, unless the model has fewer positions."""
_LANGUAGE = ("ForCausalLM", "LMHeadModel", "ForMaskedLM")
_IMAGES = "ForImageClassification"
_TORCHVISION_SIDE, _SEGMENTATION_SIDE = 224, 520
"""Pixels on a side of the images on which torchvision's weights were trained."""


@dataclass(frozen=True)
class Subject:
    """A model, and the keys of the jobs for it, as KEY=VALUE."""

    name: str
    """The name that the user gave, without `hf:`."""
    model_words: tuple[str, ...]
    """Keys of the model for the forecast, which does not read weights."""
    data_words: tuple[str, ...]
    """Keys of the data for the forecast: random samples. Empty if the user names data."""
    run_words: tuple[str, ...]
    """Keys for a run: the model with its weights, and data with a path for the user to replace."""
    length: int | None = None
    """Number of tokens of a sample; None if samples are not tokens or the length is not known."""


def find_subject(
    name: str, *, length: int | None, args: Mapping[str, Any], has_data: bool, samples: int
) -> Subject:
    """Return the model that a name stands for, with the shapes of its samples.

    Args:
        name: `hf:ID_OR_FOLDER`, a folder, an id of the Hub (`OWNER/NAME`), `timm:NAME`, a built-in
            name, or `package.module:Class`.
        length: number of tokens of a sample; None for `SAMPLE_TOKENS` or the model's own length.
        args: the arguments of the model that the user sets (`model.args`).
        has_data: whether the user names data; random samples are then not needed.
        samples: number of random samples in `data_words`.

    Raises:
        ConfigError: nothing has this name, its configuration is not cached and cannot be fetched,
            or the shapes of its samples are not known.
    """
    if name.startswith(TIMM):
        shape = image_shape(name.removeprefix(TIMM))
        return _of_images(name, shape, _classes(args, 1000), samples, has_data=has_data)
    if not name.startswith(HF) and ":" in name:
        return _of_class(name, has_data=has_data)
    if not name.startswith(HF) and "/" not in name and name in list_models():
        return _built_in(name, length, args, samples, has_data=has_data)
    if not name.startswith(HF) and "/" not in name and not Path(name).expanduser().is_dir():
        raise ConfigError(
            f"fit {name}: there is no such folder or built-in model"
            f"{did_you_mean(name, list_models()) or '.'} Give a folder with a config.json, an id "
            "of the Hub (OWNER/NAME), timm:NAME, a built-in name such as gpt2, or "
            "package.module:Class."
        )
    return _of_hub(name.removeprefix(HF), length, args, samples, has_data=has_data)


def _of_hub(
    name: str, length: int | None, args: Mapping[str, Any], samples: int, *, has_data: bool
) -> Subject:
    folder = find_folder(name, f"fit {name}", weights=False, config_alone=True)
    architecture = read_architecture(folder, args)
    known = (f"model.name={HF}{folder.path}", "model.pretrained=false")
    run = f"model.name={HF}{name}"
    if has_data:
        return Subject(name, known, (), (run,), length)
    if architecture.name.endswith(_LANGUAGE):
        tokens = _length(name, architecture, length)
        words = _language_words(architecture.vocabulary or 0, tokens, samples)
        named = (run, "data.path=FILE.jsonl", f"data.args.sequence_length={tokens}")
        return Subject(name, known, words, named, tokens)
    if architecture.name.endswith(_IMAGES):
        config = architecture.config
        side = getattr(config, "image_size", None) or _TORCHVISION_SIDE
        sides = tuple(side) if isinstance(side, (list, tuple)) else (side, side)
        shape = (getattr(config, "num_channels", 3), *sides)
        words = _image_words(shape, config.num_labels, samples)
        return Subject(name, known, words, (run, "data.name=image_folder", "data.path=FOLDER"))
    raise ConfigError(
        f"fit {name}: the inputs of a {architecture.name} are not known here; those of causal and "
        f"masked language models and of image classifiers are. Add the data of its job: "
        "data.name=package.module:function, or another class: "
        f"model.args.{ARCHITECTURE}=CLASS."
    )


def _length(name: str, architecture: Architecture, length: int | None) -> int:
    """Return the number of tokens of a sample.

    Raises:
        ConfigError: the model has fewer positions than `length`.
    """
    positions = getattr(architecture.config.get_text_config(), "max_position_embeddings", None)
    if not isinstance(positions, int) or positions < 1:
        return length or SAMPLE_TOKENS
    if length is not None and length > positions:
        raise ConfigError(
            f"--length {length}: {name} has {positions} positions. Use --length {positions}, or "
            f"model.args.max_position_embeddings={length}."
        )
    return length or min(SAMPLE_TOKENS, positions)


def _built_in(
    name: str, length: int | None, args: Mapping[str, Any], samples: int, *, has_data: bool
) -> Subject:
    run = (f"model.name={name}",)
    if has_data:
        return Subject(name, run, (), run, length)
    if name in PRESETS:
        tokens = length or sequence_length(name, args) or SAMPLE_TOKENS
        vocabulary = args.get("vocab_size", PRESETS[name]["vocab_size"])
        words = _language_words(int(vocabulary), tokens, samples)
        sized = (*run, f"data.args.sequence_length={tokens}")
        return Subject(name, run, words, (*sized, "data.path=FILE.txt"), tokens)
    if name == "lenet":
        return _of_images(name, (1, 28, 28), _classes(args, 10), samples, has_data=has_data)
    if task_of(name) == "segmentation":
        shape = (3, _SEGMENTATION_SIDE, _SEGMENTATION_SIDE)
        return _of_images(name, shape, _classes(args, 21), samples, kind="segmentation")
    shape = (3, _TORCHVISION_SIDE, _TORCHVISION_SIDE)
    return _of_images(name, shape, _classes(args, 1000), samples)


def _of_images(
    name: str,
    shape: tuple[int, ...],
    classes: int,
    samples: int,
    *,
    kind: str = "classification",
    has_data: bool = False,
) -> Subject:
    run = (f"model.name={name}",)
    words = () if has_data else _image_words(shape, classes, samples, kind)
    data = "voc" if kind == "segmentation" else "image_folder"
    return Subject(name, run, words, (*run, f"data.name={data}", "data.path=FOLDER"))


def _of_class(name: str, *, has_data: bool) -> Subject:
    if not has_data:
        raise ConfigError(
            f"fit {name}: the inputs of your own class are not known. Add the data of its job, "
            "such as data.name=package.module:function, or data.name=synthetic "
            "'data.args={kind: language, vocabulary: 32000, length: 2048}'."
        )
    run = (f"model.name={name}",)
    return Subject(name, run, (), run)


def _classes(args: Mapping[str, Any], default: int) -> int:
    number = args.get("num_classes", default)
    return number if isinstance(number, int) else default


def _language_words(vocabulary: int, length: int, samples: int) -> tuple[str, ...]:
    values = {"kind": "language", "vocabulary": vocabulary, "length": length, "samples": samples}
    return ("data.name=synthetic", unquoted_word("data.args", values))


def _image_words(
    shape: tuple[int, ...], classes: int, samples: int, kind: str = "classification"
) -> tuple[str, ...]:
    values = {
        "kind": kind,
        "input_shape": list(shape),
        "num_classes": classes,
        "samples": samples,
    }
    return ("data.name=synthetic", unquoted_word("data.args", values))
