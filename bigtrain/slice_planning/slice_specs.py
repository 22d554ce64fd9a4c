"""Slices as lines of text by name patterns: `blocks.*.attention.qkv.weight: 0/3x256:64`.

A line is `PATTERN: DIM/SECTIONS`. In a pattern `*` matches any characters between two dots.
Sections are `TIMESxLENGTH:UNIT`, separated by commas; TIMES and UNIT are left out if they are 1.
Without lengths (`0/3x:64`, `1`) the dim is divided evenly into sections. A trailing ` gather` means
that the weight's product is gathered immediately. `whole` instead of DIM/SECTIONS keeps a tensor
whole, although a more general pattern would slice it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations

from torch import Tensor, nn

from bigtrain.errors import ConfigError, did_you_mean
from bigtrain.slicing.slices import Slices, SliceSection

_KEY = "strategy.slice.slices"
GATHER, WHOLE = "gather", "whole"
_NUMBER = re.compile(r"\d+")
_SPEC = re.compile(r"(\d+)(?:/([\dx:,]*))?(?:\s+(gather))?")
_SECTION = re.compile(r"(?:(\d+)x)?(\d*)(?::(\d+))?")


def spec_text(slices: Slices, *, gathered: bool = False) -> str:
    """Return slices as text: `0/3x256:64` is dim 0, three sections of 256 in units of 64."""
    parts: list[str] = []
    sections = list(slices.sections)
    while sections:
        first = sections[0]
        times = next((n for n, s in enumerate(sections) if s != first), len(sections))
        del sections[:times]
        unit = f":{first.unit}" if first.unit > 1 else ""
        parts.append(f"{f'{times}x' if times > 1 else ''}{first.length}{unit}")
    return f"{slices.dim}/{','.join(parts)}{f' {GATHER}' if gathered else ''}"


def merged_lines(texts: Mapping[str, str], others: Iterable[str]) -> dict[str, str]:
    """Return lines in which names that differ only in numbers share a pattern.

    Args:
        texts: specifications by name.
        others: names without a specification, which no pattern may match.

    Returns:
        Specifications by pattern. All names that a pattern matches have the same specification.
    """
    everything = [*texts, *(name for name in others if name not in texts)]
    kinds: dict[str, list[str]] = {}
    for name in everything:
        kinds.setdefault(_NUMBER.sub("*", name), []).append(name)
    lines: dict[str, str] = {}
    covered: set[str] = set()
    for name, text in texts.items():
        if name in covered:
            continue
        kind = kinds[_NUMBER.sub("*", name)]
        pattern, matched = _widest(name, text, texts, kind)
        covered |= matched
        lines[pattern] = text
    return lines


def _widest(
    name: str, text: str, texts: Mapping[str, str], kind: Sequence[str]
) -> tuple[str, set[str]]:
    """Return the pattern that matches the most names with this text, and these names.

    Of equally good patterns, it is the first with the fewest stars.
    """
    places = [match.span() for match in _NUMBER.finditer(name)]
    best, most = name, {name}
    for count in range(1, min(len(places), 4) + 1):
        for stars in combinations(places, count):
            pattern = name
            for begin, end in reversed(stars):
                pattern = f"{pattern[:begin]}*{pattern[end:]}"
            expression = pattern_expression(pattern)
            matched = {known_name for known_name in kind if expression.fullmatch(known_name)}
            if len(matched) > len(most) and all(
                texts.get(known_name) == text for known_name in matched
            ):
                best, most = pattern, matched
    return best, most


def pattern_expression(pattern: str) -> re.Pattern[str]:
    """Compile a name pattern to a regular expression."""
    return re.compile(r"[^.]+".join(map(re.escape, pattern.split("*"))))


def read_lines(
    lines: Mapping[str, str], model: nn.Module, ranks: int
) -> tuple[dict[str, Slices], frozenset[str]]:
    """Read the slices of a model's parameters and buffers from lines.

    If several patterns match a name, the pattern with the fewest stars counts. A tied tensor needs
    a line for only one of its names.

    Args:
        lines: specifications by pattern.
        model: a model on any device.
        ranks: the number of ranks of the tp axis.

    Returns:
        Slices by name, and the weights whose product is gathered immediately.

    Raises:
        ConfigError: a pattern matches nothing, two equally general patterns contradict each other,
            or a specification does not fit a tensor or the number of ranks.
    """
    state = _state(model)
    specs: dict[str, tuple[int, str, str]] = {}
    for pattern, spec in lines.items():
        expression, stars = pattern_expression(pattern), pattern.count("*")
        names = [name for name in state if expression.fullmatch(name)]
        if not names:
            raise ConfigError(
                f"{_KEY}: {pattern!r} is the name of no parameter or buffer"
                f"{did_you_mean(pattern, list(state)) or '.'} The model has "
                f"{', '.join(map(repr, list(state)[:3]))} and {max(0, len(state) - 3)} more."
            )
        for name in names:
            before = specs.get(name)
            if before is not None and before[0] == stars and before[2] != spec:
                raise ConfigError(
                    f"{_KEY}: {before[1]!r} and {pattern!r} both match {name!r}, and say "
                    f"{before[2]!r} and {spec!r}. Write a line for {name!r} itself."
                )
            if before is None or stars < before[0]:
                specs[name] = (stars, pattern, spec)
    slices: dict[str, Slices] = {}
    gathered: set[str] = set()
    for name, (_, pattern, spec) in specs.items():
        if spec.strip() == WHOLE:
            continue
        where = name if pattern == name else f"{name} ({pattern})"
        slices[name], gathers = read_spec(spec, tuple(state[name].shape), where)
        check_ranks(slices[name], ranks, where)
        if gathers:
            gathered.add(name)
    return _with_tied(slices, state), frozenset(gathered)


def kept_names(keep: Sequence[str], model: nn.Module) -> frozenset[str]:
    """Return the names of the parameters and buffers that patterns name, directly or by a module.

    Args:
        keep: patterns of names of modules or tensors.
        model: a model on any device.

    Returns:
        All names of each tensor, tied ones included.

    Raises:
        ConfigError: a pattern matches no module and no tensor.
    """
    state = _state(model)
    names: set[str] = set()
    for pattern in keep:
        expression = re.compile(rf"{pattern_expression(pattern).pattern}(\..+)?")
        matched = {name for name in state if expression.fullmatch(name)}
        if not matched:
            modules = [name for name, _ in model.named_modules() if name]
            raise ConfigError(
                f"strategy.slice.keep={pattern} is the name of no module with parameters"
                f"{did_you_mean(pattern, modules) or '.'} The model has "
                f"{', '.join(modules[:3])} and {max(0, len(modules) - 3)} more."
            )
        names |= matched
    tensor_ids = {id(state[name]) for name in names}
    return frozenset(name for name, tensor in state.items() if id(tensor) in tensor_ids)


def read_spec(spec: str, shape: Sequence[int], where: str) -> tuple[Slices, bool]:
    """Parse the specification of a tensor.

    Args:
        spec: the text.
        shape: the shape of the whole tensor.
        where: the tensor's name, for messages.

    Returns:
        The slices, and whether the weight's product is gathered immediately.

    Raises:
        ConfigError: the text is not a specification, or does not fit the shape.
    """
    match = _SPEC.fullmatch(spec.strip())
    if match is None:
        raise ConfigError(
            f"{_KEY}: {where}: {spec!r} is not DIM/SECTIONS. Write it like 0/3x256:64 (dim 0, "
            "three sections of 256 in units of 64), 1 (the whole of dim 1) or whole."
        )
    dim = int(match[1])
    if dim >= len(shape):
        raise ConfigError(
            f"{_KEY}: {where}: {spec!r} slices dim {dim}, and the tensor {tuple(shape)} has "
            f"{len(shape)} dims, the first of which is 0. Use a dim up to {len(shape) - 1}."
        )
    sections: list[SliceSection] = []
    for part in (match[2] or "").split(","):
        section = _SECTION.fullmatch(part)
        times, length, unit = section.groups() if section is not None else ("0", "", "")
        count = int(times or 1)
        section_length = int(length) if length else shape[dim] // max(1, count)
        if not count or not section_length or section_length % int(unit or 1):
            raise ConfigError(
                f"{_KEY}: {where}: in {spec!r} a section of {section_length} is no multiple of its "
                f"unit {unit or 1}. Use a unit that divides it."
            )
        sections += [SliceSection(section_length, int(unit or 1))] * count
    slices = Slices(dim, tuple(sections))
    if slices.total != shape[dim]:
        raise ConfigError(
            f"{_KEY}: {where}: the sections of {spec!r} are {slices.total} long together, and dim "
            f"{dim} of {tuple(shape)} is {shape[dim]}. Use sections that add up to it."
        )
    return slices, match[3] is not None


def check_ranks(slices: Slices, ranks: int, where: str) -> None:
    """Refuse slices that leave a rank without a part.

    Raises:
        ConfigError: some rank would have no part; the message has the largest number of ranks.
    """
    if slices.most_ranks >= ranks:
        return
    fewest = min(slices.sections, key=lambda s: s.length // s.unit)
    kind = f"units of {fewest.unit}" if fewest.unit > 1 else "elements"
    raise ConfigError(
        f"mesh.tp={ranks}: {where} has {slices.most_ranks} {kind} along dim {slices.dim} "
        f"({spec_text(slices)}), and each rank needs one. Use mesh.tp={slices.most_ranks} or less, "
        "or keep it whole."
    )


def _state(model: nn.Module) -> dict[str, Tensor]:
    named = (
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    )
    return dict(named)


def _with_tied(by_name: Mapping[str, Slices], state: Mapping[str, Tensor]) -> dict[str, Slices]:
    """Return the slices under all names of each tensor.

    Raises:
        ConfigError: two names of one tensor have different slices.
    """
    by_tensor: dict[int, tuple[str, Slices]] = {}
    for name, slices in by_name.items():
        first_name, before = by_tensor.setdefault(id(state[name]), (name, slices))
        if before != slices:
            raise ConfigError(
                f"{_KEY}: {first_name!r} and {name!r} are one tensor, and are sliced as "
                f"{spec_text(before)} and {spec_text(slices)}. Write a line for one of them."
            )
    return {
        name: by_tensor[id(tensor)][1] for name, tensor in state.items() if id(tensor) in by_tensor
    }
