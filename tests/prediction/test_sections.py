"""Concatenated sections, compared with bytes that are counted tick by tick."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from bigtrain.memory.timeline import Timeline
from bigtrain.prediction.compose import boundary_bytes, stage_ends
from bigtrain.prediction.sections import (
    Anchor,
    OpLog,
    Section,
    SectionPass,
    Storage,
    concatenate_sections,
)


def random_section(rng: random.Random, windows: int, storages: int = 12) -> SectionPass:
    """A section whose storages live until any later moment that an anchor can express."""
    lengths = tuple(rng.randint(3, 7) for _ in range(windows))
    anchors = list(Anchor)[:windows]
    storages_drawn = []
    for _ in range(storages):
        window = rng.choice(anchors)
        birth = rng.randint(1, lengths[window])
        later = [a for a in anchors if a > window]
        until = rng.choice([window, *later, Anchor.END, Anchor.OPTIMIZER])
        first = birth + 1 if until == window else 2
        death = rng.randint(first, lengths[until] + 1) if until in anchors else 1
        storages_drawn.append(
            Storage(rng.randint(1, 99), "activations", window, birth, until, death)
        )
    gradients = tuple(n for n, s in enumerate(storages_drawn) if s.until == Anchor.OPTIMIZER)
    return SectionPass(lengths, tuple(storages_drawn), gradients=gradients)


def count_bytes(passes: Sequence[SectionPass]) -> list[int]:
    """Bytes at each tick, counted by checking every storage of every section."""
    windows = len(passes[0].lengths)
    order = [(n, 0) for n in range(len(passes))]
    order += [(n, 1) for n in reversed(range(len(passes)))]
    order += [(n, 2) for n in range(len(passes))] if windows == 3 else []
    moments = [(n, w, t) for n, w in order for t in range(1, passes[n].lengths[w] + 1)]
    sizes = []
    for now in range(len(moments)):
        alive = 0
        for n, section in enumerate(passes):
            for s in section.storages:
                ends = s.until <= Anchor.WEIGHTS
                past = [m for m in moments[: now + 1] if m[0] == n]
                born = any(m[1:] >= (s.window, s.birth) for m in past)
                dead = ends and any(m[1:] >= (s.until, s.death) for m in past)
                # A storage that dies after the last tick of a window is freed when the next window
                # begins.
                gone = ends and s.death > section.lengths[s.until]
                last = (n, int(s.until), section.lengths[s.until]) if gone else None
                over = last is not None and last in moments[:now]
                alive += s.nbytes if born and not dead and not over else 0
        sizes.append(alive)
    return sizes


def bytes_of(timeline: Timeline, ticks: int) -> list[int]:
    return [
        sum(s.nbytes for s in timeline.spans if s.birth <= tick < s.death)
        for tick in range(1, ticks + 1)
    ]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("windows", [2, 3])
def test_every_tick_holds_what_the_sections_say(seed, windows):
    rng = random.Random(seed)
    passes = [random_section(rng, windows) for _ in range(rng.randint(1, 4))]
    timeline, _, stop = concatenate_sections(passes, begins=False, is_sent=False)
    expected = count_bytes(passes)
    assert stop == len(expected)
    assert bytes_of(timeline, stop) == expected


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("windows", [2, 3])
def test_a_row_of_equal_sections_peaks_as_one_laid_out_in_full(seed, windows):
    rng = random.Random(seed)
    first, inner, last = (random_section(rng, windows) for _ in range(3))
    quick = [first, *[inner] * 12, last]
    whole = [first, *(replace(inner) for _ in range(12)), last]
    rows = (quick, whole)
    short, full = (concatenate_sections(r, begins=False, is_sent=False)[0] for r in rows)
    assert len(short.spans) < len(full.spans)
    assert short.peak().bytes == full.peak().bytes


def test_what_other_sections_let_go_of():
    far = Storage(5, "temporary", Anchor.FORWARD, 1, Anchor.LAST, 2)
    tied = Storage(7, "gradients", Anchor.INPUTS, 1, Anchor.FIRST, 2)
    turned = Storage(11, "temporary", Anchor.FORWARD, 2, Anchor.TURN, 1)
    rows = [
        SectionPass((3, 3), ()),
        SectionPass((3, 3), (far, tied, turned)),
        SectionPass((3, 3), ()),
        SectionPass((3, 3), ()),
    ]
    timeline, _, stop = concatenate_sections(rows, begins=False, is_sent=False)
    assert stop == 24
    assert sorted(timeline.spans) == [
        (5, "temporary", 4, 9 + 2),
        (7, "gradients", 19, 21 + 2),
        (11, "temporary", 5, 12 + 1),
    ]
    sent, _, _ = concatenate_sections(rows, begins=False, is_sent=True)
    assert (5, "temporary", 4, 13) in sent.spans  # the last section is on another rank


def test_what_crosses_an_end_stays_until_the_end():
    output = Storage(5, "activations", Anchor.FORWARD, 1, Anchor.INPUTS, 2)
    back = Storage(7, "temporary", Anchor.INPUTS, 1, Anchor.INPUTS, 2)
    row = [SectionPass((3, 3), (output, back), boundary=((0,), (1,)))]
    alone, _, _ = concatenate_sections(row, begins=False, is_sent=False)
    assert sorted(alone.spans) == [(5, "activations", 1, 5), (7, "temporary", 4, 5)]
    inside, _, stop = concatenate_sections(row, begins=True, is_sent=True)
    # Received after the tick at which the backward pass begins, before that of its first operation
    assert stop == 9
    assert sorted(inside.spans) == [(5, "activations", 1, 10), (7, "temporary", 5, 10)]
    parts, _, stop = concatenate_sections(row, begins=True, is_sent=True, scatter_ranks=(1, 2))
    assert stop == 10  # a part is received, and then gathered
    gradients = [span for span in sorted(parts.spans) if span.kind == "temporary"]
    assert [(span.nbytes, span.birth) for span in gradients] == [(7, 5), (7, 6)]


def test_sequence_shards_are_sent_unchanged_and_the_rest_is_scattered() -> None:
    log = OpLog(*[np.zeros(0)] * 5)
    empty = SectionPass((1, 1), ())
    whole = Section("one", (empty, empty), log, log, (), incoming=8192, incoming_gradients=4096)
    sharded = replace(whole, sequence_shards=4096)
    assert boundary_bytes(whole, 4) == (2048, 1024)
    assert boundary_bytes(sharded, 4) == (4096 + 1024, 4096)
    assert boundary_bytes(sharded, 1) == (8192, 4096)
    assert stage_ends(whole, sharded, (4, 4)) == (4, 1)
    assert stage_ends(sharded, None, (4, 4)) == (1, 4)
