"""What a forward pass leaves in its modules: numbers, tensors and lists that a later one reads.

A stage that skips a module's call would miss what the call leaves behind. So attributes that
change in a forward pass are found, and then those who read and write them are watched.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FunctionType
from typing import Any

from torch import Tensor, nn

from bigtrain.errors import ConfigError

Attribute = tuple[str, str]
"""A module's name, and its attribute's; `config.kind` for a field of an object that it holds."""
TABLES = ("_parameters", "_buffers", "_modules")
UNTRACED = {*TABLES, "_compiled_call_impl", "training"}


@dataclass
class ChangedObject:
    """An object that modules hold, and what of it changes in a forward pass."""

    value: Any
    fields: set[str]
    """Empty for a list or a mapping."""
    holders: set[Attribute]
    """All that hold it."""

    def names(self) -> dict[str, Attribute]:
        """What each field is called, behind the first that holds the object."""
        owner, key = min(self.holders)
        return {field: (owner, f"{key}.{field}") for field in self.fields}


class ModuleSnapshot:
    """All that the modules hold by reference, to be compared and put back."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = dict(model.named_modules())
        self._held = {
            name: {key: (value, _contents(value)) for key, value in _attributes(module)}
            for name, module in self._modules.items()
        }

    def changed(self) -> set[Attribute]:
        """The attributes that hold something else now."""
        changed_attributes: set[Attribute] = set()
        for name, module in self._modules.items():
            current, before = dict(_attributes(module)), self._held[name]
            for key in {*current, *before}:
                if key not in current or key not in before:
                    changed_attributes.add((name, key))
                    continue
                value, contents = before[key]
                if not _same(current[key], value) or not _same_all(_contents(value), contents):
                    changed_attributes.add((name, key))
        return changed_attributes

    def changed_objects(self) -> list[ChangedObject]:
        """The objects, lists and mappings that modules hold, and of which the contents changed.

        A configuration is held by many modules and read by all of them, and a field of it
        that changes often by one: so fields are told apart. What a module holds no longer is
        not among them.
        """
        found: dict[int, ChangedObject] = {}
        for name, key in sorted(self.changed()):
            value, before = self._held[name].get(key, (None, None))
            contents = _contents(value)
            if contents is None or dict(_attributes(self._modules[name])).get(key) is not value:
                continue
            entry = found.setdefault(id(value), ChangedObject(value, set(), set()))
            entry.holders.add((name, key))
            if fields_of(value) is not None:
                gone = {field for field in before if field not in contents}
                entry.fields |= gone | {
                    field
                    for field in contents
                    if field not in before or not _same(before[field], contents[field])
                }
        return list(found.values())

    def restore(self) -> None:
        """Put all back."""
        for name, key in self.changed():
            module, held = self._modules[name], self._held[name]
            tables = [table for t in TABLES if key in (table := module.__dict__[t])]
            table = tables[0] if tables else module.__dict__
            if key not in held:
                del table[key]
                continue
            value, contents = held[key]
            _refill(value, contents)
            if not tables and isinstance(value, Tensor):
                table = next((t for t in (module._parameters, module._buffers) if key in t), table)
            table[key] = value


def _attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    for key, value in module.__dict__.items():
        if key not in UNTRACED:
            yield key, value
    for table in TABLES:
        yield from module.__dict__[table].items()


def _contents(value: Any) -> Any:
    """A container's contents, one level deep; None for what is none."""
    if isinstance(value, (Tensor, nn.Module, type, FunctionType)):
        return None
    if isinstance(value, (list, set, tuple)):
        return list(value)
    if isinstance(value, dict):
        return dict(value)
    return fields_of(value)


def fields_of(value: Any) -> dict[str, Any] | None:
    """A copy of the fields of a plain object; None for what has none, and for tensors and types."""
    if isinstance(value, (Tensor, nn.Module, type, list, set, tuple, dict)) or callable(value):
        return None
    try:
        fields = object.__getattribute__(value, "__dict__")  # unseen by those who watch reads
    except AttributeError:
        return None
    return dict(fields) if isinstance(fields, dict) else None


def _refill(value: Any, contents: Any) -> None:
    if isinstance(value, list):
        value[:] = contents
    elif isinstance(value, (dict, set)):
        value.clear()
        value.update(contents)
    elif contents is not None and not isinstance(value, tuple):
        value.__dict__.clear()
        value.__dict__.update(contents)


def _same(one: Any, other: Any) -> bool:
    plain = (int, float, bool, str, bytes, complex)
    return one is other or (type(one) is type(other) and isinstance(one, plain) and one == other)


def _same_all(one: Any, other: Any) -> bool:
    if one is None or other is None or len(one) != len(other):
        return one is other
    if isinstance(one, dict):
        return all(key in other and _same(one[key], other[key]) for key in one)
    return all(_same(a, b) for a, b in zip(one, other, strict=True))


@contextmanager
def traced_attributes(
    model: nn.Module,
    attributes: set[Attribute],
    objects: Sequence[ChangedObject],
    touched: Callable[[Attribute, bool], None],
) -> Iterator[None]:
    """Say so whenever one of these attributes is read or written, inside of a `with` block.

    Args:
        model: whose modules hold them.
        attributes: of modules.
        objects: of which fields are watched in place of the attributes that hold them. Where
            an object's class allows no watching, these attributes are watched instead.
        touched: is called with the attribute, or with a field's name behind its holder's, and
            with whether it is written.

    Raises:
        ConfigError: a module's class allows no watching.
    """
    modules = dict(model.named_modules())
    classes: list[tuple[Any, type]] = []
    attributes = set(attributes)
    called: dict[Attribute, Attribute] = {}
    """What several modules hold bears one name."""
    try:
        for held in objects:
            called |= dict.fromkeys(held.holders, min(held.holders))
            if not held.fields:
                continue
            classes.append((held.value, type(held.value)))
            try:
                watching = _watching_class(type(held.value), held.names(), touched)
                object.__setattr__(held.value, "__class__", watching)  # of frozen ones, too
            except Exception:  # noqa: BLE001 - a class of C, or one that cannot be derived from
                continue
            attributes -= held.holders
        for name in sorted({name for name, _ in attributes}):
            module = modules[name]
            own = {
                key: called.get((name, key), (name, key)) for at, key in attributes if at == name
            }
            classes.append((module, type(module)))
            try:
                module.__class__ = _watching_class(type(module), own, touched)
            except TypeError as error:
                raise ConfigError(
                    f"strategy.cut: the forward pass changes {sorted(own)} of {name!r}, and who "
                    f"reads it cannot be watched ({error}). Use a strategy without a cut."
                ) from error
        yield
    finally:
        for value, original in classes:
            if type(value) is not original:
                object.__setattr__(value, "__class__", original)


def _watching_class(
    base: Any, names: Mapping[str, Attribute], touched: Callable[[Attribute, bool], None]
) -> type:
    """A class whose objects tell of each use of some names; of all, where an object is taken apart.

    A module's own `__dict__` is read at every turn by torch, and is not among them.
    """
    apart = not issubclass(base, nn.Module)

    def get(self: Any, key: str) -> Any:
        if key in names:
            touched(names[key], False)  # noqa: FBT003
        elif apart and key == "__dict__":
            for name in names.values():
                touched(name, True)  # noqa: FBT003
        return base.__getattribute__(self, key)

    def put(self: Any, key: str, value: Any) -> None:
        if key in names:
            touched(names[key], True)  # noqa: FBT003
        base.__setattr__(self, key, value)

    def remove(self: Any, key: str) -> None:
        if key in names:
            touched(names[key], True)  # noqa: FBT003
        base.__delattr__(self, key)

    own: dict[str, Any] = {"__module__": base.__module__, "__qualname__": base.__qualname__}
    own |= {"__getattribute__": get, "__setattr__": put, "__delattr__": remove}
    made: type = type(base)(base.__name__, (base,), own)
    return made


@contextmanager
def refuse_host_randomness() -> Iterator[None]:
    """Refuse random numbers of Python and numpy: each stage would draw its own.

    Raises:
        ConfigError: some were drawn.
    """
    numpy = sys.modules.get("numpy")
    state, other = random.getstate(), numpy.random.get_state(legacy=False) if numpy else None
    try:
        yield
        drawn = ["random"] if random.getstate() != state else []
        if numpy and not _equal_states(numpy.random.get_state(legacy=False), other):
            drawn.append("numpy.random")
        if drawn:
            raise ConfigError(
                f"strategy.cut: the forward pass draws from {' and '.join(drawn)}, and each stage "
                "would draw other numbers. Draw with torch, or use a strategy without a cut."
            )
    finally:
        random.setstate(state)
        if numpy:
            numpy.random.set_state(other)


def _equal_states(one: Any, other: Any) -> bool:
    return bool(
        (one["state"]["key"] == other["state"]["key"]).all()
        and one["state"]["pos"] == other["state"]["pos"]
    )


def check_closures(model: nn.Module) -> None:
    """Refuse functions that hold a module of the model: in a copy they would still hold it.

    Raises:
        ConfigError: with the module's name, and where the function is kept.
    """
    names = {id(module): name for name, module in model.named_modules()}
    for owner, module in model.named_modules():
        for key, value in module.__dict__.items():
            if key in TABLES:
                continue
            for function in _functions(value):
                for cell in function.__closure__ or ():
                    try:
                        module_name = names.get(id(cell.cell_contents))
                    except ValueError:  # an empty cell
                        continue
                    if module_name is not None:
                        raise ConfigError(
                            f"strategy.cut: a function in {key!r} of {owner or 'the model'!r} "
                            f"holds the module {module_name or 'the model'!r} from outside; in a "
                            "copy of "
                            "the model it would still be this one's. Use a method instead."
                        )


def _functions(value: Any) -> list[FunctionType]:
    if isinstance(value, FunctionType):
        return [value]
    if isinstance(value, dict):
        return [found for item in value.values() for found in _functions(item)]
    if isinstance(value, (list, tuple)):
        return [found for item in value for found in _functions(item)]
    return []


def constant_tensors(model: nn.Module) -> list[Tensor]:
    """Tensors that modules hold as plain attributes, or in lists, tuples and dicts."""
    registered = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    constants_by_id: dict[int, Tensor] = {}

    def collect(value: Any) -> None:
        if isinstance(value, Tensor):
            if id(value) not in registered:
                constants_by_id[id(value)] = value
        elif isinstance(value, (list, tuple)):
            for item in value:
                collect(item)
        elif type(value) is dict:
            for item in value.values():
                collect(item)

    for module in model.modules():
        for key, value in module.__dict__.items():
            if key not in UNTRACED and "hook" not in key:
                collect(value)
    return list(constants_by_id.values())
