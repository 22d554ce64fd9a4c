"""Assigns documents to windows of one length, and reads the windows as samples."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset

from bigtrain.data.tokens.encode import ANSWER
from bigtrain.data.tokens.token_cache import TokenFile

IGNORED_TARGET = -100
"""The value of a target that no loss counts: the default `ignore_index` of torch."""
Masks = Literal["none", "padding", "documents"]
"""The inputs in addition to the tokens: none, a padding mask, or a document mask and positions."""
Places = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Pieces:
    """Parts of documents, each of which is in one window.

    A piece of n inputs reads n + 1 tokens, because the target of an input is the next token.
    """

    starts: Places
    """Index of the first token of each piece."""
    sizes: Places
    """Number of inputs of each piece, at least 1."""

    def __len__(self) -> int:
        return len(self.sizes)


@dataclass(frozen=True)
class LeftOut:
    """Numbers of documents and pieces in no window; tokens of the longest and shortest document."""

    too_long: int = 0
    """Documents that are longer than a window and are not split."""
    longest: int = 0
    """Tokens of the longest document."""
    shortest: int = 0
    """Tokens of the shortest document that is not in `without_answer`; 0 if there is none."""
    without_answer: int = 0
    """Documents without a target, or without an answer if only answers are learned."""
    pieces_without_answer: int = 0
    """Pieces of split documents without an answer, if only answers are learned."""


def document_pieces(
    file: TokenFile,
    documents: range,
    length: int,
    *,
    splits: bool,
    answers_only: bool,
    begin: int | None = None,
    end: int | None = None,
) -> tuple[Pieces, LeftOut]:
    """Return the pieces of some documents, and what is left out.

    Args:
        file: the tokens.
        documents: consecutive numbers of documents in the file.
        length: number of inputs in a window.
        splits: whether a document with more inputs than a window is split; otherwise it is left
            out.
        answers_only: whether documents and pieces without an answer among their targets are left
            out.
        begin: index of the token at which the first document begins; None for its own beginning.
        end: index after the last token of the last document; None for its own end.
    """
    starts = file.starts[documents.start : documents.stop].copy()
    ends = file.starts[documents.start + 1 : documents.stop + 1].copy()
    answers = file.answers[documents.start : documents.stop]
    if len(starts) and begin is not None:
        starts[0] = begin
    if len(ends) and end is not None:
        ends[-1] = end
    inputs = ends - starts - 1
    useful = inputs > 0
    if answers_only:
        useful &= answers > 0
    fits = inputs <= length
    taken = useful if splits else useful & fits
    present = ends - starts
    left_out = LeftOut(
        too_long=0 if splits else int((useful & ~fits).sum()),
        longest=int(present.max(initial=0)),
        shortest=int(present[useful].min()) if useful.any() else 0,
        without_answer=int((~useful).sum()),
    )
    starts, inputs = starts[taken], inputs[taken]
    if not splits or not (inputs > length).any():
        return Pieces(starts, inputs), left_out
    pieces = _split(starts, inputs, length)
    if answers_only:
        answered = np.array(
            [
                bool((file.tokens[a + 1 : a + n + 1] & ANSWER).any())
                for a, n in zip(pieces.starts, pieces.sizes, strict=True)
            ],
            dtype=bool,
        )
        without = int((~answered).sum())
        left_out = LeftOut(**{**vars(left_out), "pieces_without_answer": without})
        pieces = Pieces(pieces.starts[answered], pieces.sizes[answered])
    return pieces, left_out


def _split(starts: Places, inputs: Places, length: int) -> Pieces:
    """Cut documents into pieces of `length` inputs; the last piece of each has the rest."""
    numbers = -(-inputs // length)
    owner = np.repeat(np.arange(len(starts)), numbers)
    within = np.arange(len(owner)) - np.repeat(np.cumsum(numbers) - numbers, numbers)
    sizes = np.minimum(inputs[owner] - within * length, length)
    return Pieces(starts[owner] + within * length, sizes)


@dataclass(frozen=True)
class WindowLayout:
    """The pieces of each window: those of window w are `order[bounds[w]:bounds[w + 1]]`."""

    order: Places
    bounds: Places

    def __len__(self) -> int:
        return len(self.bounds) - 1


def one_each(pieces: Pieces) -> WindowLayout:
    """Return a layout with one piece in each window."""
    return WindowLayout(np.arange(len(pieces)), np.arange(len(pieces) + 1))


def packed(pieces: Pieces, length: int) -> WindowLayout:
    """Return a layout with several pieces in a window, by best-fit-decreasing bin packing.

    The pieces are placed from the longest to the shortest, each in the fullest window that has room
    for it. Windows are then ordered by their first piece, so that documents stay roughly in their
    order. The same pieces give the same layout on every machine.

    Args:
        pieces: the pieces, none of which has more than `length` inputs.
        length: number of inputs in a window.
    """
    windows: list[list[int]] = []
    with_room: list[list[int]] = [[] for _ in range(length + 1)]
    rooms = 0  # bit r: some window has room for exactly r inputs
    for piece in np.argsort(-pieces.sizes, kind="stable").tolist():
        size = int(pieces.sizes[piece])
        larger = rooms >> size
        if larger:
            room = size + (larger & -larger).bit_length() - 1
            window = with_room[room].pop()
            if not with_room[room]:
                rooms &= ~(1 << room)
        else:
            room, window = length, len(windows)
            windows.append([])
        windows[window].append(piece)
        room -= size
        if room:
            with_room[room].append(window)
            rooms |= 1 << room
    ordered = sorted(sorted(window) for window in windows)
    sizes = np.array([len(window) for window in ordered], dtype=np.int64)
    order = np.array([piece for window in ordered for piece in window], dtype=np.int64)
    return WindowLayout(order, np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64))


class TokenSamples(Dataset[tuple[Any, Tensor]]):
    """Windows as samples: tokens and targets, each int64 (seq,), padded on the right.

    The target of a token is the next token of its document. With `masks="none"` the inputs are the
    tokens. Otherwise they are a mapping of arguments of a model's forward:

    * "padding": `input_ids`; `attention_mask` (seq,), int64, 0 for padding;
    * "documents": `input_ids`; `attention_mask` (1, seq, seq), bool, true where a token may attend
      to a token: to itself, and to earlier tokens of its document; `position_ids` (seq,), int64,
      from 0 in each document.

    Padding is a document of its own, so that no row of a mask is empty.

    Args:
        file: the tokens.
        pieces: the pieces of documents.
        layout: which pieces are in which window.
        length: number of inputs in a window, seq above.
        padding: id of the token that fills a window.
        answers_only: whether a target that is no answer is ignored.
        masks: the form of the inputs; see above.
        window: for "documents", the largest number of tokens that a token attends to, including
            itself; None for no limit.
        tokens_name: the key of the tokens in the mapping, if a model does not call them
            `input_ids`.
    """

    deterministic = True

    def __init__(
        self,
        file: TokenFile,
        pieces: Pieces,
        layout: WindowLayout,
        *,
        length: int,
        padding: int,
        answers_only: bool,
        masks: Masks = "none",
        window: int | None = None,
        tokens_name: str = "input_ids",
    ) -> None:
        self.file, self.pieces, self.layout = file, pieces, layout
        self.length, self.padding = length, padding
        self.answers_only, self.masks, self.window = answers_only, masks, window
        self.tokens_name = tokens_name

    def with_masks(
        self, masks: Masks, window: int | None = None, tokens_name: str = "input_ids"
    ) -> TokenSamples:
        """Return the same windows with inputs of another form; see `TokenSamples`."""
        return TokenSamples(
            self.file,
            self.pieces,
            self.layout,
            length=self.length,
            padding=self.padding,
            answers_only=self.answers_only,
            masks=masks,
            window=window,
            tokens_name=tokens_name,
        )

    @property
    def num_inputs(self) -> int:
        """Number of inputs in all windows, without padding."""
        return int(self.pieces.sizes.sum())

    def __len__(self) -> int:
        return len(self.layout)

    def __getitem__(self, index: int) -> tuple[Any, Tensor]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        index %= len(self)
        inputs = np.full(self.length, self.padding, dtype=np.int64)
        targets = np.full(self.length, IGNORED_TARGET, dtype=np.int64)
        bounds = self.layout.bounds
        chosen = self.layout.order[bounds[index] : bounds[index + 1]].tolist()
        ends = [0]
        for piece in chosen:
            start, size = int(self.pieces.starts[piece]), int(self.pieces.sizes[piece])
            read = self.file.tokens[start : start + size + 1]
            ids = (read & ~ANSWER).astype(np.int64)
            place = slice(ends[-1], ends[-1] + size)
            inputs[place] = ids[:-1]
            targets[place] = ids[1:]
            if self.answers_only:
                targets[place][(read[1:] & ANSWER) == 0] = IGNORED_TARGET
            ends.append(place.stop)
        return self._inputs(inputs, ends), torch.from_numpy(targets)

    def _inputs(self, inputs: Places, ends: list[int]) -> Any:
        """Return the inputs of a window.

        Args:
            inputs: the tokens.
            ends: 0, then the end of each piece in the window.
        """
        tokens = torch.from_numpy(inputs)
        if self.masks == "none":
            return tokens
        if self.masks == "padding":
            mask = torch.zeros(self.length, dtype=torch.int64)
            mask[: ends[-1]] = 1
            return {self.tokens_name: tokens, "attention_mask": mask}
        seen = np.zeros((self.length, self.length), dtype=bool)
        position = np.zeros(self.length, dtype=np.int64)
        rule = _causal_mask(self.length, self.window)
        for begin, end in pairwise([*ends, self.length]):
            size = end - begin
            seen[begin:end, begin:end] = rule[:size, :size]
            position[begin:end] = np.arange(size)
        return {
            self.tokens_name: tokens,
            "attention_mask": torch.from_numpy(seen[None]),
            "position_ids": torch.from_numpy(position),
        }


@lru_cache(maxsize=2)
def _causal_mask(length: int, window: int | None) -> npt.NDArray[np.bool_]:
    """Return the mask of a whole window: a token sees itself and `window - 1` tokens before it."""
    mask: npt.NDArray[np.bool_] = np.tri(length, dtype=bool)
    if window is not None:
        mask &= ~np.tri(length, k=-window, dtype=bool)
    return mask
