"""torchvision's classification and segmentation models, without its downloads.

torchvision takes seconds to import, so it is imported only for its own models.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bigtrain.errors import ConfigError, did_you_mean
from bigtrain.models.blueprint import describe

# The arguments that make torchvision download weights, in their current and older spellings.
_DOWNLOADS = ("weights", "weights_backbone", "pretrained", "pretrained_backbone")
# Without init_weights these two models warn about its default, and they initialise well only with
# True.
_WITH_INIT_WEIGHTS = ("googlenet", "inception_v3")


_SMALL_IMAGES = "small_images"


def torchvision_names() -> list[str]:
    """Return the names of torchvision's classification and segmentation models.

    Raises:
        ConfigError: torchvision cannot be imported.
    """
    models = _models()
    return [*map(str, models.list_models(module=models)), *segmentation_names()]


def segmentation_names() -> list[str]:
    """Return the names of torchvision's segmentation models."""
    models = _models()
    return [str(name) for name in models.list_models(module=models.segmentation)]


def make_torchvision(name: str, args: Mapping[str, Any]) -> nn.Module:
    """Construct a model of torchvision with initial weights, without a download.

    bigtrain adds the argument `small_images`. If it is True, a ResNet begins with a 3 x 3
    convolution at stride 1 and has no max pooling, as for images of 32 x 32 (He et al. 2016, arXiv
    1512.03385, section 4.2).

    Args:
        name: one of `torchvision_names`.
        args: arguments of torchvision's builder, and `small_images`.

    Raises:
        ConfigError: the model does not take these arguments, or they request a download.
    """
    builder = _models().get_model_builder(name)
    _refuse(name, args)
    args = dict(args)
    small_images = args.pop(_SMALL_IMAGES, False)
    arguments: dict[str, Any] = {"weights": None}
    if "weights_backbone" in inspect.signature(builder).parameters:
        arguments["weights_backbone"] = None
    if name in _WITH_INIT_WEIGHTS:
        arguments["init_weights"] = True
    try:
        model: nn.Module = builder(**arguments | args)
    except (TypeError, ValueError) as error:
        raise _explained(name, builder, args, error) from error
    if small_images:
        _set_small_stem(name, model)
    return model


def _set_small_stem(name: str, model: nn.Module) -> None:
    from torchvision.models import ResNet

    if not isinstance(model, ResNet):
        raise ConfigError(
            f"model.args.{_SMALL_IMAGES}=true is for the ResNets, and model.name is {name}. Use "
            f"model.name=resnet18, or leave model.args.{_SMALL_IMAGES} out."
        )
    first = model.conv1.out_channels
    model.conv1 = nn.Conv2d(3, first, kernel_size=3, stride=1, padding=1, bias=False)
    # torchvision's ResNet initialises all of its convolutions in this way.
    nn.init.kaiming_normal_(model.conv1.weight, mode="fan_out", nonlinearity="relu")
    model.maxpool = nn.Identity()


def check_torchvision(name: str, args: Mapping[str, Any]) -> None:
    """Refuse wrong arguments of a model, by constructing it on the meta device.

    Raises:
        ConfigError: see `make_torchvision`.
    """
    describe(lambda: make_torchvision(name, args))


def cached_weights(name: str) -> Path:
    """Return the file of a model's trained weights in torchvision's download cache.

    Raises:
        ConfigError: torchvision has no model of this name or no trained weights for it, or the
            weights are not in the cache.
    """
    known = torchvision_names() if ":" not in name else []
    if name not in known:
        raise ConfigError(
            f"model.pretrained=cache is torchvision's, and model.name={name} is none of its "
            "models. Give the path of a file."
        )
    weights = _models().get_model_weights(name)
    urls = [str(each.url) for each in (*_default(weights), *weights)]
    folder = Path(torch.hub.get_dir()) / "checkpoints"
    files = [folder / url.rpartition("/")[2] for url in urls]
    cached = next((file for file in files if file.is_file()), None)
    if cached is None:
        wanted = f"no {files[0].name} in {folder}" if files else f"no trained {name}"
        raise ConfigError(
            f"model.pretrained=cache: there is {wanted}, and nothing is downloaded. Fetch it with "
            f"python -c \"import torchvision; torchvision.models.get_model('{name}', "
            "weights='DEFAULT')\", or give the path of a file."
        )
    return cached


def _default(weights: Any) -> list[Any]:
    """Return the default among a model's trained weights; empty if there are none."""
    return [weights.DEFAULT] if len(weights) else []


def _models() -> Any:
    try:
        import torchvision.models
    except (ImportError, OSError, RuntimeError) as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ConfigError(
            f"model.name: torchvision's models cannot be used, its import failed: {reason}. "
            "Run: pip install torchvision (of the release that belongs to your torch)."
        ) from None
    return torchvision.models


def _refuse(name: str, args: Mapping[str, Any]) -> None:
    for key in _DOWNLOADS:
        if args.get(key):
            raise ConfigError(
                f"model.args.{key}={args[key]!r}: {name} starts from initial weights, nothing is "
                f"downloaded. Leave model.args.{key} out; model.pretrained=FILE (or cache, for "
                "torchvision's download cache) starts from trained weights."
            )
    small_images = args.get(_SMALL_IMAGES, False)
    if not isinstance(small_images, bool):
        raise ConfigError(
            f"model.args.{_SMALL_IMAGES}={small_images!r} needs true or false. Use "
            f"model.args.{_SMALL_IMAGES}=true."
        )
    classes = args.get("num_classes", 1)
    if not isinstance(classes, int) or isinstance(classes, bool) or classes < 1:
        raise ConfigError(
            f"model.args.num_classes={classes!r} needs a whole number, at least 1. "
            "Use model.args.num_classes=10."
        )


def _explained(
    name: str, builder: Callable[..., Any], args: Mapping[str, Any], error: Exception
) -> ConfigError:
    text = (str(error).splitlines() or [""])[0]
    unexpected = re.match(r"(\w+)\.__init__\(\) got an unexpected keyword argument '(\w+)'", text)
    if unexpected is None or unexpected[2] not in args:
        shown = ", ".join(f"{key}={value!r}" for key, value in args.items())
        return ConfigError(
            f"model.args: torchvision's {name}({shown}) raised {type(error).__name__}: {text}. "
            "Correct or leave out what it names."
        )
    known = {*inspect.signature(builder).parameters}
    constructor = inspect.unwrap(builder).__globals__.get(unexpected[1])
    if constructor is not None:
        known |= {*inspect.signature(constructor).parameters}
    known -= {*_DOWNLOADS, "progress", "kwargs"}
    return ConfigError(
        f"model.args.{unexpected[2]}: {name} has no argument {unexpected[2]!r}"
        f"{did_you_mean(unexpected[2], known) or '.'} Known: {', '.join(sorted(known))}."
    )
