"""Find the tensors in files that make each tensor of a model, by the rules of transformers.

In transformers, some tensors of a model differ from those in its files: the experts of a layer are
stacked, names differ between a model with and without a head, and old files have other names. The
rules are renamings and converters (conversion_mapping of transformers). This module applies the
rules to names alone, so that each tensor is read only on the rank that needs it, when it is needed.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from bigtrain.hub.libraries import import_library
from bigtrain.tensors.shards import Extent, StateTensor, box_extents, elements, whole_extents

_LOADING = "transformers.core_model_loading"


@dataclass
class Rules:
    """The renamings and converters of one model, for loading or, reversed, for saving."""

    renamings: Sequence[Any]
    converters: Sequence[Any]

    @classmethod
    def of(cls, transforms: Iterable[Any]) -> Rules:
        """Return transforms of transformers, separated into renamings and converters."""
        loading = import_library(_LOADING, "model.name")
        transforms = list(transforms)
        return cls(
            [one for one in transforms if isinstance(one, loading.WeightRenaming)],
            [one for one in transforms if isinstance(one, loading.WeightConverter)],
        )

    def renamed(self, name: str) -> str:
        """Return a name after all renamings."""
        return str(import_library(_LOADING, "model.name").apply_renamings(name, self.renamings))

    def converter(self, pattern: str) -> Any:
        """Return a fresh copy of the converter that has a source pattern."""
        return copy.deepcopy(next(c for c in self.converters if pattern in c.source_patterns))


@dataclass
class Group:
    """Tensors of files that together make one or several tensors of the model."""

    name: str
    """The name of the group's tensor by the rules; the converter is called with this name."""
    converter: Any = None
    """A WeightConverter of transformers; None for a single tensor that is only renamed."""
    sources: dict[str, list[str]] = field(default_factory=dict)
    """By pattern of the converter, the names of the tensors that it converts, in natural order."""


def loading_rules(model: nn.Module) -> list[Any]:
    """Return transformers' rules for loading a model's files, in their order."""
    mapping = import_library("transformers.conversion_mapping", "model.name")
    return list(mapping.get_model_conversion_mapping(model))


def saving_rules(model: nn.Module) -> list[Any]:
    """Return the rules to reverse for a model that was not loaded from files.

    As in transformers, renamings of old files are left out. Changes of prefixes are also left out,
    because it is not known whether files of such a model have the prefixes.
    """
    mapping = import_library("transformers.conversion_mapping", "model.name")
    loading = import_library(_LOADING, "model.name")
    rules = mapping.get_model_conversion_mapping(model, add_legacy=False)
    return [rule for rule in rules if not isinstance(rule, loading.PrefixChange)]


def reverse_grouped(names: Iterable[str], reverse: Rules) -> list[Group]:
    """Group the tensors of a model that together make tensors of files, by reversed rules.

    Args:
        names: the names in the model.
        reverse: the reversed rules. Converters are applied before renamings, so the names that a
            group's converter makes still have to be renamed.
    """
    loading = import_library(_LOADING, "model.name")
    groups: dict[str, Group] = {}
    for name in sorted(names, key=loading.dot_natural_key):
        renamed, pattern = loading.apply_converters(name, reverse.converters)
        if pattern is None:
            renamed = reverse.renamed(name)
        group = groups.get(renamed)
        if group is None:
            converter = None if pattern is None else reverse.converter(pattern)
            group = groups[renamed] = Group(renamed, converter)
        group.sources.setdefault(pattern or name, []).append(name)
    return list(groups.values())


def grouped(model: nn.Module, names: Iterable[str], rules: Rules) -> tuple[list[Group], list[str]]:
    """Group the tensors in files that together make tensors of a model.

    Args:
        model: a model of transformers, on any device.
        names: the names in the files.
        rules: the rules for loading; each rule records that it was used.

    Returns:
        The groups, and the names that no tensor of the model needs.
    """
    loading = import_library(_LOADING, "model.name")
    wanted = model.state_dict()
    prefix = getattr(model, "base_model_prefix", "")
    groups: dict[str, Group] = {}
    spare = []
    for name in sorted(names, key=loading.dot_natural_key):
        renamed, pattern = loading.rename_source_key(
            name, rules.renamings, rules.converters, prefix, wanted
        )
        if renamed not in wanted and name in wanted:  # the name is that of a tensor of the model
            renamed, pattern = loading.rename_source_key(
                name, [], [], base_model_prefix=prefix, meta_state_dict=wanted
            )
        if renamed not in wanted:
            spare.append(name)
            continue
        group = groups.get(renamed)
        if group is None:
            converter = None if pattern is None else rules.converter(pattern)
            group = groups[renamed] = Group(renamed, converter)
        group.sources.setdefault(pattern or name, []).append(name)
    return list(groups.values()), spare


class ConvertedTensors:
    """The tensors that converters make of tensors in files, when they are read.

    A converter makes all tensors of its group at once. Those of the last group that are not read
    yet are cached.

    Args:
        model: a model of transformers; some converters read its configuration.
        saved: the tensors in the files, by name.
    """

    def __init__(self, model: nn.Module, saved: Mapping[str, StateTensor]) -> None:
        self._model, self._saved = model, saved
        self._group: Group | None = None
        self._waiting: dict[str, Tensor] = {}

    def of_group(self, group: Group) -> dict[str, StateTensor]:
        """Describe the tensors that a group makes, by name.

        Raises:
            Exception: an exception of any class, if the converter does not fit these tensors.
        """
        if group.converter is None:
            return {group.name: self._saved[next(iter(group.sources.values()))[0]]}
        joined = self._joined(group)
        if joined is not None:
            return {group.name: joined}
        apart = self._apart(group)
        if apart is not None:
            return apart
        shapes = self._convert(group, lambda t: torch.empty(t.shape, dtype=t.dtype, device="meta"))
        return {
            name: StateTensor(
                made.dtype,
                tuple(made.shape),
                whole_extents(made.shape),
                lambda name=name: self._take(group, name).reshape(-1),  # type: ignore[misc]
            )
            for name, made in shapes.items()
        }

    def _convert(self, group: Group, make: Any) -> dict[str, Tensor]:
        converter = copy.deepcopy(group.converter)
        for pattern, names in group.sources.items():
            for name in names:
                converter.add_tensor(group.name, name, pattern, make(self._saved[name]))
        made = converter.convert(group.name, model=self._model, config=self._model.config)
        return {n: t[0] if isinstance(t, list) else t for n, t in made.items()}

    def _take(self, group: Group, name: str) -> Tensor:
        """Return one tensor of a group, and remove it from the cache of the last group."""
        if group is not self._group or name not in self._waiting:
            self._waiting.clear()
            self._waiting = self._convert(group, lambda t: t.values().view(t.shape))
            self._group = group
        return self._waiting.pop(name)

    def _joined(self, group: Group) -> StateTensor | None:
        """Describe stacked tensors as runs of their parts, so that any elements can be read.

        None if the converter does more than to stack tensors along dim 0 (a MergeModulelist) and to
        join the stacks along dim 1 (a Concatenate).
        """
        loading = import_library(_LOADING, "model.name")
        operations = group.converter.operations
        stacks = operations and type(operations[0]) is loading.MergeModulelist
        joins = len(operations) == 2 and type(operations[1]) is loading.Concatenate
        if not stacks or operations[0].dim != 0 or len(operations) > 1 + joins:
            return None
        if joins and operations[1].dim != 1:
            return None
        patterns = [p for p in group.converter.source_patterns if p in group.sources]
        columns = [[self._saved[name] for name in group.sources[p]] for p in patterns]
        parts = [part for column in columns for part in column]
        first = parts[0]
        even = len({len(column) for column in columns}) == 1
        same = all(p.dtype == first.dtype and p.shape[1:] == first.shape[1:] for p in parts)
        rows = all(len({part.shape[:1] for part in column}) == 1 for column in columns)
        if not (even and same and rows and (joins or len(columns) == 1)) or not first.shape:
            return None
        height = sum(column[0].shape[0] for column in columns)
        shape = (len(columns[0]), height, *first.shape[1:])
        ordered = [column[number] for number in range(shape[0]) for column in columns]
        return _of_runs(shape, ordered)

    def _apart(self, group: Group) -> dict[str, StateTensor] | None:
        """Describe the parts of a stacked tensor as boxes in it: the reverse of `_joined`.

        None if the converter does more than to split a tensor along dims 0 and 1.
        """
        loading = import_library(_LOADING, "model.name")
        converter, (names, *others) = group.converter, group.sources.values()
        operations = list(converter.operations)
        if others or len(names) != 1 or type(operations[-1]) is not loading.SplitModulelist:
            return None
        splits = operations[:-1]
        plain = all(
            type(one) is loading.Chunk and one.num_shards_attribute is None for one in splits
        )
        if not plain or any(one.dim != 1 for one in splits) or len(splits) > 1:
            return None
        stacked, patterns = self._saved[names[0]], converter.target_patterns
        count = len(patterns) if splits else 1
        regular = operations[-1].dim == 0 and len(stacked.shape) > 1 and len(patterns) == count
        if not regular or stacked.read is None or stacked.shape[1] % count:
            return None
        made = self._convert(group, lambda t: torch.empty(t.shape, dtype=t.dtype, device="meta"))
        number, height = stacked.shape[0], stacked.shape[1] // count
        if len(made) != number * count:
            return None
        parts = {}
        # The operations make the parts in this order: by pattern, then by number.
        for position, name in enumerate(made):
            column, row = divmod(position, number)
            local = (1, height, *stacked.shape[2:])
            offset = (row, column * height, *(0 for _ in stacked.shape[2:]))
            box = box_extents(stacked.shape, offset, local)
            parts[name] = _of_box(stacked, local[1:], box)
        return parts


def _of_box(stacked: StateTensor, shape: tuple[int, ...], box: tuple[Extent, ...]) -> StateTensor:
    """Describe a tensor whose elements are a box of another tensor."""
    whole, inner = whole_extents(shape), stacked.read

    def values() -> Tensor:
        return stacked.values() if inner is None else inner(box)

    return StateTensor(stacked.dtype, shape, whole, values)


def _of_runs(shape: tuple[int, ...], parts: Sequence[StateTensor]) -> StateTensor:
    """Describe a tensor whose row-major elements are those of other tensors, one after another."""
    begins = [0]
    for part in parts:
        begins.append(begins[-1] + torch.Size(part.shape).numel())

    def read(extents: Sequence[Extent]) -> Tensor:
        result = torch.empty(sum(extent.size for extent in extents), dtype=parts[0].dtype)
        position = 0
        for extent in extents:
            for part, begin, end in zip(parts, begins[:-1], begins[1:], strict=True):
                for offset, inside in extent.within(begin, end):
                    own = Extent(inside.start - begin, inside.length, inside.count, inside.pitch)
                    target = result[position + offset : position + offset + own.size]
                    target.copy_(_read(part, own))
            position += extent.size
        return result

    whole = whole_extents(shape)
    return StateTensor(parts[0].dtype, shape, whole, lambda: read(whole), read=read)


def _read(part: StateTensor, extent: Extent) -> Tensor:
    return part.read((extent,)) if part.read is not None else elements(part.values(), extent)


def ignored(model: nn.Module, attribute: str, names: Iterable[str]) -> set[str]:
    """Return the names that a class of transformers allows files to lack, or to have in excess.

    Args:
        model: a model of transformers.
        attribute: `_keys_to_ignore_on_load_missing` or `_keys_to_ignore_on_load_unexpected`.
        names: the names to choose from.
    """
    patterns = list(getattr(model, attribute, None) or ())
    if attribute.endswith("unexpected"):
        # Old files have these buffers for every layer; transformers computes them once.
        buffers = [name for name, _ in model.named_buffers()]
        for end, pattern in (
            ("rotary_emb.inv_freq", r"rotary_emb\.inv_freq"),
            ("position_ids", r"(^|\.)position_ids$"),
        ):
            if any(name.endswith(end) for name in buffers):
                patterns.append(pattern)
    return {name for name in names if any(re.search(pattern, name) for pattern in patterns)}
