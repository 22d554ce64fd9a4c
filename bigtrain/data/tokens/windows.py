"""How documents fill windows of one length, and the samples that the windows give."""

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
"""A target that no loss counts."""
Masks = Literal["none", "padding", "documents"]
"""The inputs besides tokens: none; a mask of padding; a mask of documents and positions.
"""
Places = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Pieces:
    """Parts of documents that a window takes whole: a target follows each of their inputs.

    Places are indices of tokens; a piece of n inputs reads n + 1 tokens.
    """

    starts: Places
    sizes: Places
    """The inputs of each piece, at least 1."""

    def __len__(self) -> int:
        return len(self.sizes)


@dataclass(frozen=True)
class LeftOut:
    """The documents and pieces that no window has."""

    too_long: int = 0
    longest: int = 0
    """The tokens of the longest document."""
    shortest: int = 0
    without_answer: int = 0
    pieces_without_answer: int = 0


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
    """Return the pieces of some documents.

    Args:
        file: the tokens.
        documents: the numbers of the documents, in order.
        length: the inputs of a window.
        splits: whether a document that is longer is split; otherwise it is left out.
        answers_only: whether documents and pieces without an answer among their targets are left
            out.
        begin: the first token, if the first document is to be cut there.
        end: the token after the last, if the last document is to be cut there.
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
    """Cut documents into pieces of `length` inputs, and one of the rest."""
    numbers = -(-inputs // length)
    owner = np.repeat(np.arange(len(starts)), numbers)
    within = np.arange(len(owner)) - np.repeat(np.cumsum(numbers) - numbers, numbers)
    sizes = np.minimum(inputs[owner] - within * length, length)
    return Pieces(starts[owner] + within * length, sizes)


@dataclass(frozen=True)
class WindowLayout:
    """Which pieces are in which window: those of window w are `order[bounds[w]:bounds[w + 1]]`."""

    order: Places
    bounds: Places

    def __len__(self) -> int:
        return len(self.bounds) - 1


def one_each(pieces: Pieces) -> WindowLayout:
    """Give each piece a window."""
    return WindowLayout(np.arange(len(pieces)), np.arange(len(pieces) + 1))


def packed(pieces: Pieces, length: int) -> WindowLayout:
    """Fill windows with several pieces: best fit decreasing, the same on every machine.

    The longest piece comes first; each goes into the fullest window that still takes it. Windows
    are then ordered by their first piece, so that the order of documents stays roughly theirs.
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
    """Windows as samples: inputs and the tokens that follow, int64 (seq,), padded on the right.

    With `masks="none"` inputs are the tokens. Otherwise they are a mapping for a model's forward:

    * "padding": `input_ids`, and `attention_mask` (seq,), int64, 0 for padding;
    * "documents": `input_ids`; `attention_mask` (1, seq, seq), bool, true where a token may see
      another: one before it, of its own document; `position_ids` (seq,), from 0 in each document.

    Padding is a document of its own, so that no row of a mask is empty.

    Args:
        file: the tokens.
        pieces: the pieces of documents.
        layout: which pieces are in which window.
        length: the inputs of a window.
        padding: the token that fills a window.
        answers_only: whether a target that is no answer is ignored.
        masks: the form of inputs; see above.
        window: of a mask of documents, the tokens that a token sees at most; None for all.
        tokens_name: the name of the tokens in a mapping, where a model does not call them
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
        """Return the same windows with other inputs; see the class."""
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
        """The inputs of all windows that are no padding."""
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
            ends: 0, and the end of each document.
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
