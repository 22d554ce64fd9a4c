"""The files, in addition to the weights, that make a checkpoint a folder in the Hub's layout."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bigtrain.errors import ConfigError, UnreadableError
from bigtrain.files.parse import read_json_object
from bigtrain.files.regular import is_regular
from bigtrain.hub.architecture import Architecture
from bigtrain.hub.folder import CONFIG, HubFolder

ORIGIN = "hub.json"
"""The file of a checkpoint that records where its model came from."""
_FORMAT = 1


@dataclass(frozen=True)
class Origin:
    """Where the model of a checkpoint came from."""

    source: str
    """The folder or id that the job named."""
    class_name: str
    """The model's class in transformers."""
    names: Sequence[str] | None
    """The names of the tensors in the source's files; None for a model with initial weights."""

    def text(self) -> str:
        """Return the content of the file."""
        names = None if self.names is None else list(self.names)
        record = {"format": _FORMAT, "source": self.source, "class": self.class_name}
        return json.dumps({**record, "names": names}, indent=0)

    @classmethod
    def read(cls, folder: Path) -> Origin | None:
        """Read the file `ORIGIN` of a checkpoint; None if the checkpoint has no such file.

        Raises:
            ConfigError: the file is damaged.
        """
        path = folder / ORIGIN
        if not is_regular(path):
            return None
        try:
            record = read_json_object(path)
            names = record["names"]
            strings = [record["source"], record["class"], *(names or ())]
            if not all(isinstance(one, str) for one in strings) or record["format"] != _FORMAT:
                raise ValueError("it has not the form that a run writes")
        except (UnreadableError, KeyError, TypeError, ValueError) as error:
            reason = getattr(error, "reason", error)
            raise ConfigError(f"export: {path} is not readable: {reason}.") from None
        return cls(record["source"], record["class"], None if names is None else tuple(names))


@dataclass(frozen=True)
class SavedFiles:
    """The configuration, the tokenizer and the origin, for every checkpoint of a run."""

    folder: HubFolder
    architecture: Architecture
    origin: Origin

    def files(self, dtype: torch.dtype | None) -> dict[str, str | bytes]:
        """Return the contents by name.

        Args:
            dtype: the dtype of the saved parameters, in which from_pretrained opens the model; None
                if no parameter has a floating-point dtype.
        """
        text = configuration_text(self.architecture.config, self.architecture.name, dtype)
        return {**self.folder.companions(), CONFIG: text, ORIGIN: self.origin.text()}


def configuration_text(config: Any, class_name: str, dtype: torch.dtype | None) -> str:
    """Return the text of config.json for a class of transformers and its saved dtype."""
    config = copy.deepcopy(config)
    config.architectures = [class_name]
    if dtype is not None:
        config.dtype = dtype
        for name in config.sub_configs:
            inner = getattr(config, name, None)
            if inner is not None:
                inner.dtype = dtype
    return str(config.to_json_string())


def main_dtype(dtypes: Mapping[str, torch.dtype]) -> torch.dtype | None:
    """Return the first floating-point dtype of tensors; None if there is none."""
    return next((dtype for dtype in dtypes.values() if dtype.is_floating_point), None)
