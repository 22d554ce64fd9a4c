"""Find the folder of a model of the Hub: a folder on this machine, or an id in the Hub's cache.

With HF_HUB_OFFLINE=1 nothing is downloaded. Otherwise the files of an id that are missing in the
cache are downloaded, the small files first. Several processes may download at once, because
huggingface_hub locks each file.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bigtrain.errors import ConfigError, UnreadableError, did_you_mean
from bigtrain.files.parse import read_json_object
from bigtrain.files.regular import is_regular, names_in, read_bytes
from bigtrain.hub.libraries import import_library

HF, TIMM = "hf:", "timm:"
"""Prefixes of `model.name`: for a model of the Hub, and for a model of timm."""
CONFIG = "config.json"
_ID = re.compile(r"[\w][\w.-]*(/[\w][\w.-]*)?")
_SMALL = ("*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken")
_WEIGHTS = ("model*.safetensors", "pytorch_model*.bin")
COMPANIONS = (
    *("generation_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model"),
    *("special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt"),
    *("spiece.model", "sentencepiece.bpe.model", "chat_template.jinja", "chat_template.json"),
    *("preprocessor_config.json", "processor_config.json", "image_processor_config.json"),
)
"""Files other than the weights that a user of the trained model needs; checkpoints have copies."""
_MOST_COMPANION = 256 << 20
_ADAPTER = "adapter_config.json"


@dataclass(frozen=True)
class HubFolder:
    """A folder in the Hub's layout."""

    key: str
    """The job's key and value that named the folder, for messages."""
    path: Path
    settings: Mapping[str, Any]
    """The content of config.json."""

    def companions(self) -> dict[str, bytes]:
        """Return the contents of the folder's files in `COMPANIONS`, by name.

        Files that cannot be read are left out: a damaged tokenizer must not end a run that trains
        on token ids.
        """
        found = {}
        for name in COMPANIONS:
            path = self.path / name
            if is_regular(path):
                try:
                    found[name] = read_bytes(path, most=_MOST_COMPANION)
                except UnreadableError:
                    continue
        return found


def find_folder(name: str, key: str, *, weights: bool, config_alone: bool = False) -> HubFolder:
    """Find a folder, or an id in the Hub's cache, and read its configuration.

    Files of an id that the cache lacks are downloaded first, unless HF_HUB_OFFLINE is set.

    Args:
        name: the path of a folder, or `OWNER/NAME` or `OWNER/NAME@REVISION` on the Hub.
        key: the job's key and value, for messages.
        weights: whether the weights are needed, too. Otherwise only small files are fetched.
        config_alone: whether config.json is the only small file that is fetched.

    Raises:
        ConfigError: there is no such folder, the id is not cached and cannot be fetched, or the
            folder has no usable configuration.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        return _opened(path, key)
    if path.suffix == ".gguf":
        raise _gguf(key, path)
    if path.exists():
        raise ConfigError(f"{key}: {path} is a file. Give the folder with its config.json.")
    repository, _, revision = name.partition("@")
    if name.startswith((".", "/", "~")) or not _ID.fullmatch(repository):
        raise ConfigError(
            f"{key}: there is no folder {path}. Give a folder with a {CONFIG} and weights, or an "
            "id of the Hub, OWNER/NAME."
        )
    small = (CONFIG,) if config_alone else _SMALL
    patterns = _WEIGHTS if weights else ()
    return _opened(_fetched(repository, revision or None, key, small, patterns), key)


def _fetched(
    repository: str, revision: str | None, key: str, small: Sequence[str], weights: Sequence[str]
) -> Path:
    """Return the folder of an id in the Hub's cache, after fetching the files that it lacks.

    Args:
        repository: `OWNER/NAME`.
        revision: a branch, tag or commit; None for the main branch.
        key: the job's key and value, for messages.
        small: patterns of the small files.
        weights: patterns of the weights; files of the first pattern that has any are enough.
    """
    hub = import_library("huggingface_hub", key)
    errors = import_library("huggingface_hub.errors", key)
    offline = bool(hub.is_offline_mode())
    at = f" --revision {revision}" if revision else ""
    files = f" {CONFIG}" if tuple(small) == (CONFIG,) else ""

    def snapshot(*patterns: str) -> Path:
        return Path(
            hub.snapshot_download(
                repository,
                revision=revision,
                allow_patterns=list(patterns),
                local_files_only=offline,
            )
        )

    try:
        path = snapshot(*small)
        for pattern in weights:
            path = snapshot(*small, pattern)
            if any(path.glob(pattern)):
                break
    except errors.LocalEntryNotFoundError as error:
        where = import_library("huggingface_hub.constants", key).HF_HUB_CACHE
        why = "HF_HUB_OFFLINE=1 forbids to fetch it" if offline else f"the Hub: {_first(error)}"
        raise ConfigError(
            f"{key}: {repository} is not in the cache {where}, and {why}. On a machine with a "
            f"connection run: hf download {repository}{files}{at}; or give the path of a folder."
        ) from None
    except Exception as error:
        # Errors of HTTP libraries, of authentication, and of a full disk have no common base.
        raise ConfigError(
            f"{key}: {repository} could not be fetched: {type(error).__name__}: {_first(error)}. "
            f"Try: hf download {repository}{files}{at}; or give the path of a folder."
        ) from None
    return path


def _first(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0].rstrip(".")


def _opened(path: Path, key: str) -> HubFolder:
    """Read the configuration of a folder, and refuse models that cannot be trained."""
    config = path / CONFIG
    if not config.is_file():
        names = names_in(path)
        gguf = sorted(name for name in names if name.endswith(".gguf"))
        if gguf:
            raise _gguf(key, path / gguf[0])
        if _ADAPTER in names:
            base = read_json_object(path / _ADAPTER).get("base_model_name_or_path")
            raise ConfigError(
                f"{key}: {path} is an adapter of {base}, not a model. Use model.name={HF}{base}."
            )
        hint = did_you_mean(CONFIG, names) if names else "."
        raise ConfigError(
            f"{key}: {path} has no {CONFIG}{hint} Give a folder that save_pretrained of "
            "transformers has written."
        )
    try:
        settings = read_json_object(config)
    except UnreadableError as error:
        raise ConfigError(
            f"{key}: {config} is not readable: {error.reason}. Write it again with save_pretrained."
        ) from None
    quantised = settings.get("quantization_config")
    if quantised:
        method = quantised.get("quant_method") if isinstance(quantised, dict) else None
        raise ConfigError(
            f"{key}: {path} is quantised ({method or 'its quantization_config names no method'}), "
            "and only weights in fp32, bf16 or fp16 can be trained. Use the folder that it was "
            "made from, or save a dequantised one: AutoModelForCausalLM.from_pretrained(FOLDER)"
            ".dequantize().save_pretrained(NEW)."
        )
    return HubFolder(key, path, settings)


def _gguf(key: str, path: Path) -> ConfigError:
    return ConfigError(
        f"{key}: {path} is a GGUF file, which cannot be trained. Convert it once with "
        f"transformers: m = AutoModelForCausalLM.from_pretrained('{path.parent}', "
        f"gguf_file='{path.name}'); then write m.state_dict() with safetensors to "
        "NEW/model.safetensors, and m.config without its quantization_config to NEW/config.json."
    )
