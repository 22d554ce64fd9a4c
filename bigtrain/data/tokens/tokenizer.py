"""Tokenizers of transformers: from a folder, or by id from the hub's cache."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import os
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from bigtrain.errors import ConfigError, plain_text
from bigtrain.files.parse import read_json_object
from bigtrain.files.regular import is_there, names_in

MODEL_PREFIX = "hf:"
"""The prefix of a `model.name` that is a folder or an id of the hub."""
_HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?(@[\w./-]+)?")
_FILES = re.compile(r"tokenizer.*\.json|tokenizer\.model|spiece\.model|vocab\..*|tekken\.json")
"""Names of files; the folder of a tokenizer has at least one of them."""
_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_EXTRA = "pip install 'bigtrain[hub]'"

Message = Mapping[str, Any]
TextSpan = tuple[int, int]
"""Begin and end of a part of a text, in characters; the end is exclusive."""


class TemplateError(Exception):
    """A chat template cannot render a conversation; the message has the reason."""


class TextTokenizer:
    """A tokenizer of transformers, with the operations that training needs.

    Args:
        name: the folder or id that the tokenizer was loaded from.
        inner: the tokenizer of transformers.
    """

    def __init__(self, name: str, inner: Any) -> None:
        self.name, self._inner = name, inner
        self.size = len(inner)
        """Number of tokens in the vocabulary, including added tokens."""
        self.end: int | None = inner.eos_token_id
        """Id of the token that ends a text; None if there is no such token."""
        self._special = frozenset(inner.all_special_ids)
        self.prefix, self.suffix = self._around()

    @property
    def padding(self) -> int:
        """Id of the token that fills a window; targets there are ignored."""
        of_padding = self._inner.pad_token_id
        return int(of_padding if of_padding is not None else self.end or 0)

    @property
    def fingerprint(self) -> str:
        """A hash that is equal for tokenizers that give the same tokens."""
        inner = self._inner
        backend = getattr(inner, "backend_tokenizer", None)
        words = backend.to_str() if backend is not None else json.dumps(inner.get_vocab())
        template = json.dumps(inner.chat_template, sort_keys=True)
        special = json.dumps(inner.special_tokens_map, sort_keys=True, default=str)
        versions = [importlib.metadata.version(name) for name in ("transformers", "tokenizers")]
        parts = (type(inner).__name__, words, template, special, *versions)
        return hashlib.sha256("\0".join(parts).encode("utf-8", "surrogatepass")).hexdigest()

    @property
    def has_template(self) -> bool:
        """Whether the tokenizer has a chat template."""
        return bool(self._inner.chat_template)

    def marks_answers(self, tools: Any) -> bool:
        """Whether the chat template for these tools marks answers, by `{% generation %}`."""
        return _GENERATION.search(self._inner.get_chat_template(None, tools)) is not None

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of each text, without `prefix` and `suffix`."""
        found: list[list[int]] = self._call(texts)["input_ids"]
        return found

    def encode_with_spans(self, texts: Sequence[str]) -> list[tuple[list[int], list[TextSpan]]]:
        """Return the token ids of each text, and the span of characters of each token.

        Raises:
            TemplateError: the tokenizer does not provide these spans.
        """
        if not self._inner.is_fast:
            raise TemplateError(
                f"the tokenizer {self.name} does not tell which characters a token stands for"
            )
        found = self._call(texts, return_offsets_mapping=True)
        return list(zip(found["input_ids"], found["offset_mapping"], strict=True))

    def render(self, messages: Sequence[Message], tools: Any = None, *, asks: bool = False) -> str:
        """Return a conversation as text by the chat template.

        Args:
            messages: mappings with `role` and `content`.
            tools: descriptions of functions; None if the record has none.
            asks: whether the text ends with the beginning of an answer (transformers'
                add_generation_prompt).

        Raises:
            TemplateError: the template refuses these messages.
        """
        options = {"tools": tools, "add_generation_prompt": asks, "tokenize": False}
        return str(self._by_template(messages, options))

    def encode_with_marks(
        self, messages: Sequence[Message], tools: Any
    ) -> tuple[list[int], list[int]]:
        """Return the token ids of a conversation, and 1 for each token of an answer, else 0.

        The answers are those that the template marks.

        Raises:
            TemplateError: the template refuses these messages.
        """
        options = {"tools": tools, "tokenize": True, "return_dict": True}
        found = self._by_template(messages, {**options, "return_assistant_tokens_mask": True})
        return found["input_ids"], found["assistant_masks"]

    def is_special(self, token: int) -> bool:
        """Whether a token is not text but special, such as the token that ends an answer."""
        return token in self._special

    def _call(self, texts: Sequence[str], **options: Any) -> Any:
        return self._inner(
            list(texts),
            add_special_tokens=False,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,  # a text may be longer than the model takes: it is cut into windows
            **options,
        )

    def _by_template(self, messages: Sequence[Message], options: Mapping[str, Any]) -> Any:
        try:
            return self._inner.apply_chat_template(list(messages), **options)
        except Exception as error:  # noqa: BLE001 - the template's code is the user's
            raise TemplateError(plain_text(error) or type(error).__name__) from None

    def _around(self) -> tuple[list[int], list[int]]:
        """Return the ids of the tokens that the tokenizer adds before and after every text."""
        plain = self.encode(["a"])[0]
        whole = list(self._inner("a", add_special_tokens=True)["input_ids"])
        for start in range(len(whole) - len(plain) + 1):
            if whole[start : start + len(plain)] == plain:
                return whole[:start], whole[start + len(plain) :]
        return [], []


def check_tokenizer(name: str) -> None:
    """Check that a tokenizer may be loaded, without importing transformers.

    Args:
        name: see `load_tokenizer`.

    Raises:
        ConfigError: transformers is not installed, the name is neither a folder nor an id, or the
            folder has no files of a tokenizer.
    """
    if importlib.util.find_spec("transformers") is None:
        raise ConfigError(
            f"data.args.tokenizer={_plain(name)} needs transformers, which is not installed. "
            f"Run: {_EXTRA}"
        )
    _located(_plain(name))


def load_tokenizer(name: str) -> TextTokenizer:
    """Load a tokenizer; a second call for unchanged files returns the same object.

    Args:
        name: a folder with a tokenizer's files, or an id of the hub (`OWNER/NAME` or
            `OWNER/NAME@REVISION`); both may begin with `hf:`. The files of an id come from the
            hub's cache or, unless HF_HUB_OFFLINE is set, are downloaded.

    Raises:
        ConfigError: see `check_tokenizer`; or the files are not available, or transformers cannot
            make a tokenizer of them.
    """
    check_tokenizer(name)
    place = _located(_plain(name))
    return _loaded(place, _state_of(place))


def positions_beside(name: str) -> int | None:
    """Return the number of positions in the config.json next to a tokenizer's files.

    None if there is no such file or number, or if `name` is an id.

    Args:
        name: see `load_tokenizer`.
    """
    try:
        config = read_json_object(Path(_located(_plain(name))) / "config.json")
    except ConfigError:
        return None
    most = config.get("max_position_embeddings") or config.get("n_positions")
    return most if isinstance(most, int) and most > 0 else None


def _plain(name: str) -> str:
    return name.removeprefix(MODEL_PREFIX)


def _located(name: str) -> str:
    """Return the folder with `~` replaced, or the id.

    Raises:
        ConfigError: the name is neither a folder with a tokenizer nor an id.
    """
    try:
        folder = Path(name).expanduser()
    except RuntimeError as error:  # there is no such user
        raise ConfigError(f"data.args.tokenizer={name}: {error}. Write the folder out.") from None
    if os.path.isdir(folder):
        if not any(_FILES.fullmatch(file) for file in names_in(folder)):
            raise ConfigError(
                f"data.args.tokenizer={name}: the folder has no file of a tokenizer, such as "
                "tokenizer.json. Set data.args.tokenizer to a folder that has one, or to an id."
            )
        return str(folder)
    if is_there(folder) or not _HUB_ID.fullmatch(name):
        state = "is not a folder" if is_there(folder) else "does not exist"
        raise ConfigError(
            f"data.args.tokenizer={name} {state}. Give a folder with tokenizer.json, or an id of "
            "the hub such as OWNER/NAME."
        )
    return name


def _state_of(place: str) -> tuple[tuple[str, int, int], ...]:
    """Return names, sizes and modification times of a tokenizer's files; empty for an id."""
    if not os.path.isdir(place):
        return ()
    found = []
    for file in sorted(names_in(place)):
        state = os.stat(os.path.join(place, file))
        if _FILES.fullmatch(file) or file.endswith((".json", ".jinja")):
            found.append((file, state.st_size, state.st_mtime_ns))
    return tuple(found)


@lru_cache(maxsize=4)
def _loaded(place: str, state: tuple[tuple[str, int, int], ...]) -> TextTokenizer:
    del state  # only a part of the cache's key: files that changed are read again
    from transformers import AutoTokenizer

    is_folder = os.path.isdir(place)
    try:
        repository, _, revision = (place, "", "") if is_folder else place.partition("@")
        inner = AutoTokenizer.from_pretrained(
            repository, revision=revision or None, local_files_only=is_folder
        )
    except Exception as error:  # transformers raises errors of any kind for wrong files
        if not is_folder and isinstance(error, OSError):
            offline = "HF_HUB_OFFLINE" in os.environ
            reason = "HF_HUB_OFFLINE is set" if offline else "the hub cannot be reached"
            raise ConfigError(
                f"data.args.tokenizer={place}: it is neither a folder nor in the hub's cache, and "
                f"{reason} or has no such id. Give a folder that has its files."
            ) from error
        raise ConfigError(
            f"data.args.tokenizer={place}: transformers cannot make a tokenizer of these files: "
            f"{plain_text(error).rstrip('.')}. Give another folder or id."
        ) from error
    return TextTokenizer(place, inner)
