"""A model that a job names `hf:FOLDER_OR_ID`: its class, its values and its files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import nn

from bigtrain.errors import ConfigError
from bigtrain.hub.architecture import Architecture, read_architecture
from bigtrain.hub.folder import HF, HubFolder, find_folder
from bigtrain.hub.saved_files import Origin, SavedFiles
from bigtrain.hub.values import SavedModel, read_values

INITIAL = "none"
"""`model.pretrained=false` or `none`: the model begins with initial weights."""


@dataclass(frozen=True)
class HubModel:
    """A model of the Hub. Its files are read when they are first needed, and only once."""

    name: str
    """The path of a folder, or an id."""
    args: Mapping[str, Any]
    """`model.args`."""
    pretrained: str | None
    """Another source of values (a folder or a file), or `none`; None for the folder itself."""
    excluded: Sequence[str] = ()
    """Modules or tensors that keep initial values (`model.pretrained_except`)."""

    @property
    def key(self) -> str:
        """The job's key and value, for messages."""
        return f"model.name={HF}{self.name}"

    @property
    def has_weights(self) -> bool:
        """Whether the model begins with saved weights."""
        return self.pretrained != INITIAL

    @cached_property
    def folder(self) -> HubFolder:
        """The folder, after a download of files that the Hub's cache lacks.

        Raises:
            ConfigError: see `find_folder`.
        """
        own_weights = self.pretrained is None
        return find_folder(self.name, self.key, weights=own_weights)

    @property
    def source(self) -> str:
        """The absolute path of the folder, or the id."""
        path = Path(self.name).expanduser()
        return str(path.resolve()) if path.exists() else self.name

    @cached_property
    def architecture(self) -> Architecture:
        """The class and the configuration of the model.

        Raises:
            ConfigError: see `read_architecture`.
        """
        return read_architecture(self.folder, self.args)

    def check(self, vocabulary: int | None) -> None:
        """Refuse data with more different tokens than the model's vocabulary.

        Args:
            vocabulary: the number of different tokens of the data; None if the data are not tokens.

        Raises:
            ConfigError: the data have too many; the message has both numbers.
        """
        known = self.architecture.vocabulary
        if known is not None and vocabulary is not None and vocabulary > known:
            raise ConfigError(
                f"data: the samples have {vocabulary} different tokens, and {self.key} knows "
                f"{known}. Use data made with the model's own tokenizer."
            )

    def values(self, model: nn.Module) -> SavedModel:
        """Describe the saved values of a model's tensors; see `read_values`.

        Raises:
            ConfigError: the weights are missing, or do not fit the model.
        """
        if self.pretrained is None:
            return read_values(model, self.folder.path, self.key, self.excluded)
        key = f"model.pretrained={self.pretrained}"
        path = Path(self.pretrained).expanduser()
        if not path.exists():
            raise ConfigError(
                f"{key}: there is no file or folder {path}. Leave model.pretrained out to use the "
                f"weights of {self.name}, or set model.pretrained=false for initial ones."
            )
        return read_values(model, path, key, self.excluded)

    def saved_files(self, saved: SavedModel | None) -> SavedFiles:
        """Return the files that every checkpoint has in addition to its tensors.

        Args:
            saved: the saved values that the model began with; None for initial weights.
        """
        names = None if saved is None else saved.names
        origin = Origin(self.name, self.architecture.name, names)
        return SavedFiles(self.folder, self.architecture, origin)

    def classes(self, num_classes: int | None) -> dict[str, Any]:
        """Return the arguments of `model.args` that follow from the number of classes of the data.

        If the head in the files then has another shape, `read_values` refuses it.
        """
        counts = self.architecture.name.endswith("Classification") and num_classes is not None
        differs = getattr(self.architecture.config, "num_labels", num_classes) != num_classes
        return {"num_labels": num_classes} if counts and differs else {}
