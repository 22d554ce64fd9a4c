"""State that a forward pass leaves in attributes of modules, for a later pass to read.

A stage that skips the call of a module would miss the state that the call leaves. So the attributes
that change in a forward pass are found first. Then their reads and writes are recorded.
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
"""The names of a module and of its attribute. A name with a dot, such as `config.kind`, means a
field of the object in the attribute before the dot."""
TABLES = ("_parameters", "_buffers", "_modules")
UNTRACED = {*TABLES, "_compiled_call_impl", "training"}


@dataclass
class ChangedObject:
    """An object to which attributes of modules refer, and which changes in a forward pass."""

    value: Any
    fields: set[str]
    """The fields that change; empty for a list or a mapping."""
    holders: set[Attribute]
    """All attributes that refer to it."""

    def names(self) -> dict[str, Attribute]:
        """Return the full name of each changed field: the first of `holders`, a dot, the field."""
        owner, key = min(self.holders)
        return {field: (owner, f"{key}.{field}") for field in self.fields}


class ModuleSnapshot:
    """The attributes of all modules, by reference, for comparing and restoring them."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = dict(model.named_modules())
        self._before = {
            name: {key: (value, _contents(value)) for key, value in _attributes(module)}
            for name, module in self._modules.items()
        }

    def changed(self) -> set[Attribute]:
        """Return the attributes that have changed since the snapshot was made."""
        changed_attributes: set[Attribute] = set()
        for name, module in self._modules.items():
            current, before = dict(_attributes(module)), self._before[name]
            for key in {*current, *before}:
                if key not in current or key not in before:
                    changed_attributes.add((name, key))
                    continue
                value, contents = before[key]
                if not _same(current[key], value) or not _same_all(_contents(value), contents):
                    changed_attributes.add((name, key))
        return changed_attributes

    def changed_objects(self) -> list[ChangedObject]:
        """Return the objects, lists and mappings in attributes whose contents have changed.

        Many modules refer to one configuration object, and often only one of them uses the field
        that changes. So the changed fields of an object are listed one by one. An object is left
        out if its attribute refers to another value at the time of the call.
        """
        objects_by_id: dict[int, ChangedObject] = {}
        for name, key in sorted(self.changed()):
            value, before = self._before[name].get(key, (None, None))
            contents = _contents(value)
            if contents is None or dict(_attributes(self._modules[name])).get(key) is not value:
                continue
            entry = objects_by_id.setdefault(id(value), ChangedObject(value, set(), set()))
            entry.holders.add((name, key))
            if fields_of(value) is not None:
                gone = {field for field in before if field not in contents}
                entry.fields |= gone | {
                    field
                    for field in contents
                    if field not in before or not _same(before[field], contents[field])
                }
        return list(objects_by_id.values())

    def restore(self) -> None:
        """Restore all attributes, and the contents of their containers, as they were."""
        for name, key in self.changed():
            module, before = self._modules[name], self._before[name]
            tables = [table for t in TABLES if key in (table := module.__dict__[t])]
            table = tables[0] if tables else module.__dict__
            if key not in before:
                del table[key]
                continue
            value, contents = before[key]
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
    """Return a copy of the contents of a container, one level deep; None for other values."""
    if isinstance(value, (Tensor, nn.Module, type, FunctionType)):
        return None
    if isinstance(value, (list, set, tuple)):
        return list(value)
    if isinstance(value, dict):
        return dict(value)
    return fields_of(value)


def fields_of(value: Any) -> dict[str, Any] | None:
    """Return a copy of the fields of a plain object; None for any value that is not one."""
    if isinstance(value, (Tensor, nn.Module, type, list, set, tuple, dict)) or callable(value):
        return None
    try:
        fields = object.__getattribute__(value, "__dict__")  # not recorded as a read
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


def _same(left: Any, right: Any) -> bool:
    plain = (int, float, bool, str, bytes, complex)
    return left is right or (
        type(left) is type(right) and isinstance(left, plain) and left == right
    )


def _same_all(left: Any, right: Any) -> bool:
    if left is None or right is None or len(left) != len(right):
        return left is right
    if isinstance(left, dict):
        return all(key in right and _same(left[key], right[key]) for key in left)
    return all(_same(a, b) for a, b in zip(left, right, strict=True))


@contextmanager
def traced_attributes(
    model: nn.Module,
    attributes: set[Attribute],
    objects: Sequence[ChangedObject],
    touched: Callable[[Attribute, bool], None],
) -> Iterator[None]:
    """Report each read and write of these attributes inside a `with` block.

    Args:
        model: the model with the modules.
        attributes: attributes of modules.
        objects: objects whose fields are reported instead of the attributes that refer to them. If
            the class of an object cannot be subclassed, the attributes are reported.
        touched: called with the attribute, or the field as in `ChangedObject.names`, and with
            whether it is written.

    Raises:
        ConfigError: the class of a module cannot be subclassed.
    """
    modules = dict(model.named_modules())
    classes: list[tuple[Any, type]] = []
    attributes = set(attributes)
    called: dict[Attribute, Attribute] = {}
    """One name for an object that several attributes refer to."""
    try:
        for changed in objects:
            called |= dict.fromkeys(changed.holders, min(changed.holders))
            if not changed.fields:
                continue
            classes.append((changed.value, type(changed.value)))
            try:
                watching = _watching_class(type(changed.value), changed.names(), touched)
                object.__setattr__(
                    changed.value, "__class__", watching
                )  # also of a frozen dataclass
            except Exception:  # noqa: BLE001 - a class of C, or one that cannot be derived from
                continue
            attributes -= changed.holders
        for name in sorted({name for name, _ in attributes}):
            module = modules[name]
            own_attributes = {
                key: called.get((name, key), (name, key)) for at, key in attributes if at == name
            }
            classes.append((module, type(module)))
            try:
                module.__class__ = _watching_class(type(module), own_attributes, touched)
            except TypeError as error:
                raise ConfigError(
                    f"strategy.cut: the forward pass changes {sorted(own_attributes)} of "
                    f"{name!r}, whose reads cannot be recorded ({error}). Use a strategy without "
                    "a cut."
                ) from error
        yield
    finally:
        for value, original in classes:
            if type(value) is not original:
                object.__setattr__(value, "__class__", original)


def _watching_class(
    base: Any, names: Mapping[str, Attribute], touched: Callable[[Attribute, bool], None]
) -> type:
    """Return a subclass whose objects report each use of some attributes.

    A read of `__dict__` is reported as a write of all of them. For a module it is not reported,
    because torch reads the `__dict__` all the time.
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

    members: dict[str, Any] = {"__module__": base.__module__, "__qualname__": base.__qualname__}
    members |= {"__getattribute__": get, "__setattr__": put, "__delattr__": remove}
    made: type = type(base)(base.__name__, (base,), members)
    return made


@contextmanager
def refuse_host_randomness() -> Iterator[None]:
    """Refuse code in a `with` block that draws from Python's `random` or from `numpy.random`.

    The stages of a pipeline would draw different numbers.

    Raises:
        ConfigError: some were drawn in the block.
    """
    numpy = sys.modules.get("numpy")
    state, numpy_state = random.getstate(), numpy.random.get_state(legacy=False) if numpy else None
    try:
        yield
        drawn = ["random"] if random.getstate() != state else []
        if numpy and not _equal_states(numpy.random.get_state(legacy=False), numpy_state):
            drawn.append("numpy.random")
        if drawn:
            raise ConfigError(
                f"strategy.cut: the forward pass draws from {' and '.join(drawn)}, and each stage "
                "would draw other numbers. Draw with torch, or use a strategy without a cut."
            )
    finally:
        random.setstate(state)
        if numpy:
            numpy.random.set_state(numpy_state)


def _equal_states(left: Any, right: Any) -> bool:
    return bool(
        (left["state"]["key"] == right["state"]["key"]).all()
        and left["state"]["pos"] == right["state"]["pos"]
    )


def check_closures(model: nn.Module) -> None:
    """Refuse functions whose closure has a module of the model: a copied model would still use it.

    Raises:
        ConfigError: there is such a function. The message has the name of the module, and the
            attribute with the function.
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
                            f"holds the module {module_name or 'the model'!r} in its closure; a "
                            "copy of the model would still call that one. Use a method instead."
                        )


def _functions(value: Any) -> list[FunctionType]:
    if isinstance(value, FunctionType):
        return [value]
    if isinstance(value, dict):
        return [function for item in value.values() for function in _functions(item)]
    if isinstance(value, (list, tuple)):
        return [function for item in value for function in _functions(item)]
    return []


def constant_tensors(model: nn.Module) -> list[Tensor]:
    """Return the tensors in plain attributes of modules, or in lists, tuples and dicts there.

    Parameters and buffers of the model are left out.
    """
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
