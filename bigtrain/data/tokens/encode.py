"""Encodes files as documents of tokens, with a mark on each token of an answer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import NoReturn, TypeVar

import numpy as np
import numpy.typing as npt

from bigtrain.data.tokens.records import TextRecord, is_lines, read_records, read_text_parts
from bigtrain.data.tokens.tokenizer import TemplateError, TextSpan, TextTokenizer
from bigtrain.errors import ConfigError

ANSWER = np.uint32(1 << 31)
"""The bit that marks a token of an answer, which the model learns; the lower bits are its id."""
Tokens = npt.NDArray[np.uint32]
_BATCH = 256
"""Number of records that are encoded in one call, for which the tokenizer uses several threads."""
Item = TypeVar("Item")
PLAIN_FILES = "files of plain text"
"""This name and the next two are keys of `Encoder.counts`."""
MARKED_ANSWERS = "answers marked by the chat template"
RENDERED_ANSWERS = "answers found by rendering each turn"


class Encoder:
    """Turns files into documents of tokens.

    * Plain text, and records with `text`: every token is part of an answer.
    * Records with `prompt` and `response`: the two are encoded separately, because a prompt is
      encoded alone when the trained model is used. The answer is the response and the token that
      ends a text.
    * Records with `messages`: they are encoded by the chat template. If the template marks answers
      with `{% generation %}`, these are the answers. Otherwise the conversation is rendered up to
      each message of the assistant. The answer is the text that the message adds, without the white
      space after the token that ends the answer.

    Args:
        tokenizer: the tokenizer.
        ignored: fields of records that are left out.
        lenient: whether bytes of plain text that are not UTF-8 are replaced; otherwise they are
            refused.
    """

    def __init__(
        self, tokenizer: TextTokenizer, *, ignored: Collection[str] = (), lenient: bool = False
    ) -> None:
        self._tokenizer, self._ignored, self._lenient = tokenizer, ignored, lenient
        self._prefix = list(tokenizer.prefix)
        end = [] if tokenizer.end is None else [tokenizer.end]
        # Some tokenizers end each text themselves, by `end` or by another token.
        self._suffix = list(tokenizer.suffix) or end
        self.counts: Counter[str] = Counter()
        """Documents by form, and conversations by how their answers were found."""

    def documents(
        self, path: Path, advance: Callable[[int], object]
    ) -> Iterator[tuple[Tokens, bool]]:
        """Yield pieces of documents, each with whether the piece is the last of its document.

        Args:
            path: a file of JSON lines, recognized by its suffix, or of plain text. A file of plain
                text is one document.
            advance: called with the number of bytes that were encoded since the last call.

        Raises:
            ConfigError: the file cannot be read, a line is no record, or the tokenizer or its
                template cannot encode a record.
        """
        if not is_lines(path):
            yield from self._plain(path, advance)
            return
        for batch in _batches(read_records(path, self._ignored), _BATCH):
            for tokens in self._records([record for record, _ in batch]):
                yield tokens, True
            advance(sum(size for _, size in batch))

    def _plain(self, path: Path, advance: Callable[[int], object]) -> Iterator[tuple[Tokens, bool]]:
        start = self._prefix
        for part, size in read_text_parts(path, lenient=self._lenient):
            ids = start + self._tokenizer.encode([part.text])[0]
            start = []
            yield _marked(ids + (self._suffix if part.is_last else []), True), part.is_last
            advance(size)
        self.counts[PLAIN_FILES] += 1

    def _records(self, records: Sequence[TextRecord]) -> Iterator[Tokens]:
        texts = iter(self._encoded(record.text for record in records))
        prompts = iter(self._encoded(record.prompt for record in records))
        chats = [record for record in records if record.text is None]
        conversations = iter(self._conversations(chats))
        for record in records:
            if record.text is None:
                yield next(conversations)
            elif record.prompt is None:
                self.counts["texts"] += 1
                yield _marked(self._prefix + next(texts) + self._suffix, True)
            else:
                self.counts["prompts with a response"] += 1
                asked = _marked(self._prefix + next(prompts), False)
                yield np.concatenate([asked, _marked(next(texts) + self._suffix, True)])

    def _encoded(self, texts: Iterable[str | None]) -> list[list[int]]:
        present = [text for text in texts if text is not None]
        return self._tokenizer.encode(present) if present else []

    def _conversations(self, records: Sequence[TextRecord]) -> list[Tokens]:
        """Return the tokens of each conversation.

        Raises:
            ConfigError: there is no chat template, or it cannot render a conversation.
        """
        if records and not self._tokenizer.has_template:
            raise ConfigError(
                f"data.path: {records[0].place} has messages, and the tokenizer "
                f"{self._tokenizer.name} has no chat template to write them as text. Set "
                "data.args.tokenizer to one that has (an instruct model's), or write the lines "
                "with 'prompt' and 'response'."
            )
        found: list[Tokens] = []
        for record in records:
            try:
                found.append(self._conversation(record))
            except TemplateError as error:
                self._refuse(record, str(error))
        return found

    def _refuse(self, record: TextRecord, reason: str) -> NoReturn:
        raise ConfigError(
            f"data.path: {record.place}: the chat template of {self._tokenizer.name} cannot show "
            f"these messages: {reason.rstrip('.')}. Correct the line, or the tokenizer's "
            "chat_template.jinja."
        ) from None

    def _conversation(self, record: TextRecord) -> Tokens:
        self.counts["conversations"] += 1
        if self._tokenizer.marks_answers(record.tools):
            self.counts[MARKED_ANSWERS] += 1
            ids, ones = self._tokenizer.encode_with_marks(record.messages, record.tools)
            return _marked(ids, np.asarray(ones, dtype=bool))
        self.counts[RENDERED_ANSWERS] += 1
        text, answers = self._answers(record)
        ids, spans = self._tokenizer.encode_with_spans([text])[0]
        marks = np.zeros(len(ids), dtype=bool)
        for begin, end in answers:
            inside = [n for n, (a, b) in enumerate(spans) if a >= begin and b <= end and a < b]
            marks[inside] = True
            self._unmark_after_end(text, ids, spans, inside, marks)
        return _marked(ids, marks)

    def _unmark_after_end(
        self,
        text: str,
        ids: Sequence[int],
        spans: Sequence[TextSpan],
        inside: Sequence[int],
        marks: npt.NDArray[np.bool_],
    ) -> None:
        """Unmark the white space after the token that ends an answer, at which a model stops."""
        for place in reversed(inside):
            if self._tokenizer.is_special(ids[place]):
                return
            if text[slice(*spans[place])].strip():
                break
            marks[place] = False
        marks[list(inside)] = True  # no special token ends the answer: the white space does

    def _answers(self, record: TextRecord) -> tuple[str, list[TextSpan]]:
        """Return the text of a conversation, and the span of each answer of the assistant.

        Raises:
            TemplateError: the text of a message is different if further messages follow.
        """
        messages, tools = record.messages, record.tools
        render = self._tokenizer.render
        whole = render(messages, tools)
        found: list[TextSpan] = []
        for turn, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            until = render(messages[: turn + 1], tools)
            if turn:
                before = render(messages[:turn], tools, asks=True)
                begin = len(before) if until.startswith(before) else -1
            else:  # no template renders a conversation without messages
                begin = until.find(str(message.get("content") or ""))
            if begin < 0 or not whole.startswith(until):
                raise TemplateError(
                    f"message {turn + 1} is shown in another way when it is the last one, so its "
                    "answer cannot be found; put {% generation %} and {% endgeneration %} around "
                    "the answers in the template"
                )
            found.append((begin, len(until)))
        return whole, found


def _marked(ids: Sequence[int], answers: bool | npt.NDArray[np.bool_]) -> Tokens:
    tokens = np.asarray(ids, dtype=np.uint32)
    return tokens | (np.asarray(answers).astype(np.uint32) * ANSWER)


def _batches(items: Iterable[Item], size: int) -> Iterator[list[Item]]:
    rest = iter(items)
    while batch := list(islice(rest, size)):
        yield batch
