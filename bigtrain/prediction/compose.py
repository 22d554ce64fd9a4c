"""Compose sections into the profile of a whole model, or of one stage."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from bigtrain.costs.forecast import BoundaryBytes, Profile
from bigtrain.memory.timeline import BlockTicks, Breakdown, Span, Timeline, scale_timeline
from bigtrain.prediction.record_sections import RecordedSections
from bigtrain.prediction.sections import (
    PassPair,
    Section,
    SectionTensor,
    concatenate_sections,
)
from bigtrain.slicing.exchange import TensorExchange
from bigtrain.slicing.scatter_gather import scattered_bytes

_MOST = 0.75
"""The share of the parameters that have a copy at the peak. With at least this share, an optimizer
counts as one that updates all parameters at once."""
_NUMBER_BYTES = 8
"""The most bytes of a storage that is a number, such as a step count or a norm, and not a copy of a
parameter."""


def compose_profile(
    base: RecordedSections,
    sections: Sequence[Section],
    *,
    after: Section | None = None,
    recomputed: Sequence[str] = (),
    released: bool = False,
    scatter_ranks: tuple[int, int] = (1, 1),
) -> Profile:
    """Return the profile of consecutive sections, as a run of these sections would record it.

    Args:
        base: the run from which the memory of the optimizer's step is taken.
        sections: the sections, in the order of the forward pass, with distinct names.
        after: the section that follows on another rank; None if the model ends with `sections`.
        recomputed: the names of the recomputed blocks.
        released: whether gradients are freed as soon as they are used.
        scatter_ranks: the number of ranks over which the inputs of the stage are scattered, and the
            number for its outputs; see `slicing.scatter_gather`.
    """
    if base.profile is not None:
        return base.profile
    tensors = _distinct(sections)
    trained = [t for t in tensors if t.trained]
    elements = sum(t.numbers for t in trained)
    timelines, visits, ends = [], [], []
    for number in (0, 1):
        passes = [section.passes[number] for section in sections]
        begins, is_sent = bool(sections[0].name), after is not None
        sides = {"begins": begins, "is_sent": is_sent}
        parts = stage_ends(sections[0], after, scatter_ranks)
        timeline, section_ticks, stop = concatenate_sections(passes, **sides, scatter_ranks=parts)
        timelines.append(timeline)
        visits.append(_placed(section_ticks, sections))
        ends.append(stop)
    names = [section.name for section in sections if section.name]
    windows = tuple(
        (name, first, again)
        for name, first, again in zip(names, *visits, strict=True)
        if name in recomputed
    )
    return Profile(
        parameter_bytes=sum(t.nbytes for t in tensors if not t.is_buffer),
        gradient_bytes=0 if released else sum(t.nbytes for t in trained),
        buffer_bytes=sum(t.nbytes for t in tensors if t.is_buffer),
        optimizer_bytes=sum(t.state_bytes for t in tensors),
        batch_bytes=base.batch_bytes,
        frozen_bytes=sum(t.nbytes for t in tensors if not (t.trained or t.is_buffer)),
        trained_elements=elements,
        state_slots=base.state_slots,
        state_scalars=sum(t.state_scalars for t in tensors),
        passes={"first": timelines[0], "later": timelines[1]},
        step=_step(base, trained),
        updated=tuple((t.shape, 0) for t in trained),
        step_memory=base.step_memory,
        early_share=base.early_share,
        blocks=tuple(zip(*visits, strict=True)),
        outside_blocks=_rest(sections, tensors, timelines[0], ends[0]),
        boundary=_boundary(sections, after, scatter_ranks),
        windows=windows,
        recomputed=frozenset(recomputed),
        exchanges=(
            *(e for s in sections for direction in s.exchanges for e in direction),
            *_gathers(sections[0], after, scatter_ranks),
        ),
        tensors=_named_tensors(sections),
        frozen_tensors=_frozen_tensors(sections),
    )


def _placed(ticks: Sequence[BlockTicks], sections: Sequence[Section]) -> list[BlockTicks]:
    """Return the ticks of all blocks, each with the place and the name of its block."""
    blocks = [section for section in sections if section.name]
    pairs = zip(ticks, blocks, strict=True)
    return [replace(t, place=block.place, name=block.name) for t, block in pairs]


def _named_tensors(sections: Sequence[Section]) -> tuple[tuple[str, int, str], ...]:
    """Return `Profile.tensors`."""
    return tuple(
        (_name_in_stage(section, t), t.nbytes, t.kind)
        for section in sections
        for t in section.tensors
        if t.trained
    )


def _frozen_tensors(sections: Sequence[Section]) -> tuple[tuple[str, int], ...]:
    """Return `Profile.frozen_tensors`."""
    return tuple(
        (_name_in_stage(section, t), t.nbytes)
        for section in sections
        for t in section.tensors
        if not (t.trained or t.is_buffer)
    )


def _name_in_stage(section: Section, tensor: SectionTensor) -> str:
    """Return a name that differs between tensors of several blocks; tied tensors share one."""
    return tensor.name if tensor.is_between else f"{section.name} {tensor.name}".strip()


def with_split_backward(
    profile: Profile, sections: Sequence[PassPair], scatter_ranks: tuple[int, int] = (1, 1)
) -> Profile:
    """Return a stage's profile with split backward passes in addition to the whole ones.

    Args:
        profile: the profile of the same stage with whole backward passes.
        sections: the passes of the stage's sections, recorded with a split backward pass.
        scatter_ranks: see `stage_ends`.
    """
    first, later = (
        concatenate_sections(
            [passes[number] for passes in sections],
            begins=True,
            is_sent=True,
            scatter_ranks=scatter_ranks,
        )[0]
        for number in (0, 1)
    )
    return replace(profile, passes={**profile.passes, "first_split": first, "later_split": later})


def stage_ends(
    first: Section, after: Section | None, scatter_ranks: tuple[int, int]
) -> tuple[int, int]:
    """Return the numbers of ranks over which a stage's inputs and its outputs are scattered.

    Sequence shards are not scattered, because each rank sends its own shard. The number is then 1.

    Args:
        first: the first section of the stage.
        after: see `compose_profile`.
        scatter_ranks: see `compose_profile`; the numbers for tensors that are no shards.
    """
    ends = zip((first, after), scatter_ranks, strict=True)
    into, out = (1 if end is not None and end.sequence_shards else ranks for end, ranks in ends)
    return into, out


def boundary_bytes(section: Section, ranks: int) -> tuple[int, int]:
    """Return the bytes of the inputs that one rank receives, and of the gradients that it sends.

    Args:
        section: the first block of a stage.
        ranks: the number of tp ranks over which a tensor is scattered if each rank has all of it.
    """
    inputs, gradients = (scattered_bytes(nbytes, ranks) for nbytes in _whole(section))
    return section.sequence_shards + inputs, section.sequence_shards + gradients


def _gathered(section: Section | None, ranks: int) -> tuple[int, int]:
    """Return the bytes of the whole inputs, and of the whole gradients, that are sent in parts."""
    inputs, gradients = (n if scattered_bytes(n, ranks) < n else 0 for n in _whole(section))
    return inputs, gradients


def _whole(section: Section | None) -> tuple[int, int]:
    """Return the bytes of the inputs, and of their gradients, that all tp ranks have whole."""
    if section is None:
        return 0, 0
    shards = section.sequence_shards
    return section.incoming - shards, section.incoming_gradients - shards


def section_states(sections: Sequence[Section]) -> Breakdown:
    """Return the bytes of the states of some sections, if one process holds all of them.

    The part `parameters` includes frozen parameters. A tied tensor outside of blocks counts once.
    """
    tensors = _distinct(sections)
    return Breakdown(
        parameters=sum(t.nbytes for t in tensors if not t.is_buffer),
        gradients=sum(t.nbytes for t in tensors if t.trained),
        buffers=sum(t.nbytes for t in tensors if t.is_buffer),
        optimizer=sum(t.state_bytes for t in tensors),
    )


def count_parameters(sections: Sequence[Section], *, trained: bool = False) -> int:
    """Return the number of elements of all parameters, or of the trained ones only.

    A tied parameter counts once.
    """
    return sum(t.numbers for t in _distinct(sections) if t.trained or not (trained or t.is_buffer))


def _distinct(sections: Sequence[Section]) -> list[SectionTensor]:
    """Return each tensor once; tensors outside of blocks are equal if their names are."""
    outside = {t.name: t for t in _outside(sections)}
    return [
        *outside.values(),
        *(t for s in sections if s.name for t in s.tensors if not t.is_between),
    ]


def _outside(sections: Sequence[Section]) -> list[SectionTensor]:
    """Return the tensors outside of blocks; one that several sections use occurs several times."""
    return [t for s in sections for t in s.tensors if t.is_between or not s.name]


def _rest(
    sections: Sequence[Section], tensors: Sequence[SectionTensor], first: Timeline, stop: int
) -> BlockTicks:
    outside = {t.name for t in _outside(sections)}
    own_parameters = [t for t in tensors if t.name in outside and not t.is_buffer]
    own_parameters = list({t.name: t for t in own_parameters}.values())
    backward_start = first.phases[1][0] - 1
    return BlockTicks(
        tuple(t.shape for t in own_parameters),
        tuple(t.trained for t in own_parameters),
        (0, backward_start - sections[-1].passes[0].loss_ticks),
        (0, stop),
        packed=tuple(t.is_packed for t in own_parameters),
        left_out=tuple(t.is_left_out for t in own_parameters),
    )


def merge_steps(profiles: Sequence[Profile]) -> Profile:
    """Return one profile for the optimizer's step of a rank with several stages.

    Only the fields on which the optimizer's step depends cover all stages; the others are those of
    the first profile. If the optimizer updates all parameters at once, the steps of the stages
    overlap, and shorter steps are scaled to the length of the longest. If it updates one parameter
    at a time, the steps follow each other.

    Args:
        profiles: the profiles of the rank's stages.
    """
    goes_one_by_one = all(
        _goes_one_by_one(p.step, [size for _, size, _ in p.tensors]) for p in profiles
    )
    lengths = [max((s.death for s in p.step.spans), default=0) - _begin(p) + 1 for p in profiles]
    spans: list[Span] = []
    offset = 0
    for profile, length in zip(profiles, lengths, strict=True):
        factor = 1.0 if goes_one_by_one else max(lengths) / length
        begin = _begin(profile)
        spans += [
            span._replace(
                birth=offset + int((span.birth - begin) * factor),
                death=offset + math.ceil((span.death - begin) * factor),
            )
            for span in profile.step.spans
        ]
        offset += length if goes_one_by_one else 0
    totals = [f"{part}_bytes" for part in ("parameter", "frozen", "gradient", "optimizer")]
    totals += ["trained_elements", "state_scalars"]
    return replace(
        profiles[0],
        **{
            key: sum(getattr(p, key) for p in profiles)
            for key in (*totals, "trained_elements", "state_scalars")
        },
        step=Timeline(tuple(spans), ((0, "step"),)),
        updated=tuple(updated for p in profiles for updated in p.updated),
        tensors=tuple(tensor for p in profiles for tensor in p.tensors),
        frozen_tensors=tuple(tensor for p in profiles for tensor in p.frozen_tensors),
    )


def _begin(profile: Profile) -> int:
    return profile.step.phases[0][0]


def _goes_one_by_one(step: Timeline, sizes: Sequence[int]) -> bool:
    """Whether an optimizer updates its parameters one by one, and not all at once.

    An optimizer that updates all at once has copies of most parameters at the peak. An optimizer
    that updates one by one has storages of only one parameter.

    Args:
        step: the recorded timeline of the step.
        sizes: bytes of each parameter of the recorded run.
    """
    highest = step.highest_tick()
    alive = Counter(
        s.nbytes for s in step.spans if s.birth <= highest < s.death and s.nbytes > _NUMBER_BYTES
    )
    wanted = Counter(size for size in sizes if size > _NUMBER_BYTES)
    copied = max(  # copies may have the precision of the parameters, half of it, or double
        sum(min(count, alive[round(size * factor)]) for size, count in wanted.items())
        for factor in (1, 0.5, 2)
    )
    return copied < _MOST * wanted.total()


def _step(base: RecordedSections, trained: Sequence[SectionTensor]) -> Timeline:
    """Return the timeline of the optimizer's step on other parameters than the recorded ones.

    The memory of an optimizer that updates all parameters at once grows with their number. That of
    an optimizer that updates one by one does not.
    """
    recorded_tensors = [t for t in _distinct(base.sections) if t.trained]
    if _goes_one_by_one(base.step, [t.nbytes for t in recorded_tensors]):
        return base.step
    numbers = sum(t.numbers for t in recorded_tensors)
    return scale_timeline(base.step, sum(t.numbers for t in trained) / numbers)


def _boundary(
    sections: Sequence[Section], after: Section | None, scatter_ranks: tuple[int, int]
) -> BoundaryBytes:
    outgoing = (0, 0) if after is None else boundary_bytes(after, scatter_ranks[1])
    sizes = *boundary_bytes(sections[0], scatter_ranks[0]), *outgoing
    return replace(BoundaryBytes(*sizes), gathered=_gathered(sections[0], scatter_ranks[0])[0])


def _gathers(
    first: Section, after: Section | None, scatter_ranks: tuple[int, int]
) -> Iterator[TensorExchange]:
    """Yield the all-gathers of the stage's inputs, and of its outputs' gradients."""
    for nbytes in (_gathered(first, scatter_ranks[0])[0], _gathered(after, scatter_ranks[1])[1]):
        if nbytes:
            yield TensorExchange("all_gather", nbytes)
