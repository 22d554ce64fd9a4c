"""Models described first and materialised later, tensor by tensor.

A description allocates no tensors: the constructor runs on the meta device while its operations
on each tensor are recorded. Materialising a tensor replays on the CPU only the operations on which
that tensor depends, with the random generator seeded by the run's seed and the tensor's name. So
the initial weights do not depend on the order, the rank, the world size or the device, and a rank
that holds a part of the model computes and allocates only that part. The weights therefore differ
from the weights of torch.manual_seed(seed) followed by the constructor.

If several tensors depend on one random draw (both chunks of one `randn`, the norm of a weight, a
deep copy of a layer), the draw is seeded by the name of the first of these tensors in the order of
the model. So these tensors are as consistent as in a model that is built by one call of the
constructor.
"""

from __future__ import annotations

import copy
import hashlib
import pickle
import random
import sys
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from bigtrain.errors import ConfigError, UnfitModelError, did_you_mean
from bigtrain.models.caches import NOTE, switch_off_caches, switch_on_caches
from bigtrain.models.init_recorder import InitRecorder
from bigtrain.models.init_replay import CannotDefer, InitRecording, TensorSpec, view_storage
from bigtrain.models.parameters import first_named_tensors, named_tensors
from bigtrain.tensors.shards import StateTensor, copy_saved

ReadPart = Callable[[str, torch.Tensor, StateTensor], torch.Tensor | None]
"""Reads a part of a saved value; see `read` of `Blueprint.materialize`."""


def initial_seed(seed: int, name: str) -> int:
    """Return the seed of one tensor's random numbers, the same in all processes and versions.

    Args:
        seed: the seed of the run.
        name: the tensor's first name in the model.

    Returns:
        An integer in [0, 2**63).
    """
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@dataclass(frozen=True)
class _Origin:
    """A tensor's view of its storage, and the operations that fill the storage."""

    spec: TensorSpec
    closure: list[int]


@dataclass
class Blueprint:
    """A model whose tensors are materialised on demand, all or some of them, on any device."""

    model: nn.Module
    """The modules. If deferred, their tensors are on meta until they are materialised."""
    reason: str = ""
    """Why the model is not deferred, in one line; '' if it is deferred."""
    values: Mapping[str, StateTensor] = field(default_factory=dict)
    """Saved values that replace initial values, by the tensors' first names."""
    made: Mapping[str, Callable[[int], torch.Tensor]] = field(default_factory=dict)
    """By the tensors' first names, functions that compute initial values from the run's seed. They
    are used instead of the constructor."""
    saved_dtypes: tuple[str, ...] = ()
    """The dtypes of `values` in their files, for a model of the Hub."""
    files: Callable[[torch.dtype | None], Mapping[str, str | bytes]] | None = None
    """Returns the contents of files that every checkpoint stores (configuration, tokenizer), by
    name, given the dtype of the saved parameters. None for a model without such files."""
    _make: Callable[[], nn.Module] | None = None
    _recording: InitRecording | None = None
    _origins: dict[str, _Origin] = field(default_factory=dict)
    _owners: dict[int, str] = field(default_factory=dict)
    """For each random operation, by index, the name from which its seed is computed."""
    _first_names: dict[str, str] = field(default_factory=dict)
    """By each name of a tensor, its first name in the whole model, before stages are dropped."""
    _seed_name: Callable[[str], str] = str
    """Returns the name from which the seed of a tensor is computed, given its first name."""
    _uncached: list[Any] = field(default_factory=list)
    """Configurations whose `use_cache` was switched off."""

    def __post_init__(self) -> None:
        self._uncached = switch_off_caches(self.model)

    @property
    def notes(self) -> tuple[str, ...]:
        """Lines for the user about changes to the model."""
        return (NOTE,) if self._uncached else ()

    def give_back(self) -> None:
        """Restore `use_cache` in the configurations of a module that belongs to the caller."""
        switch_on_caches(self._uncached)

    @contextmanager
    def given_back(self) -> Iterator[None]:
        """Restore `use_cache` inside a `with` block, in which the configurations are saved."""
        switch_on_caches(self._uncached)
        try:
            yield
        finally:
            self._uncached = switch_off_caches(self.model)

    @classmethod
    def of(cls, module: nn.Module) -> Blueprint:
        """Return the blueprint of a module that has values; materialising only moves them.

        Raises:
            ConfigError: the module has tensors on the meta device, or tensors without a shape.
        """
        _refuse_lazy(module)
        for name, tensor in first_named_tensors(module).items():
            if tensor.is_meta:
                raise ConfigError(
                    f"model: {name!r} is on the meta device and has no values. Give the function "
                    "that makes the model instead: describe(lambda: MyModel(...))."
                )
        return cls(module, reason="given already built")

    @property
    def deferred(self) -> bool:
        """Whether the values can be computed tensor by tensor."""
        return self._recording is not None

    @property
    def whole_bytes(self) -> int:
        """Bytes that every rank holds while it builds the model; 0 if it is deferred."""
        tensors = () if self.deferred else first_named_tensors(self.model).values()
        return sum(tensor.nbytes for tensor in tensors)

    @property
    def read_widths(self) -> dict[str, int]:
        """The bytes of an element in the files, by the first names of tensors.

        Only of tensors whose saved values are read in parts, directly into their memory.
        """
        values = self.values.items() if self.deferred else ()
        return {n: saved.dtype.itemsize for n, saved in values if saved.read is not None}

    def change(self, change: Callable[[nn.Module], nn.Module]) -> None:
        """Apply a function to the module, and to each module that the constructor makes later.

        Args:
            change: changes a module, and returns it or its replacement.
        """
        self.model, make = change(self.model), self._make
        if make is not None:
            self._make = lambda: change(make())

    def twin(self) -> Blueprint:
        """Return a separate blueprint of the same model; a module that has values is copied."""
        if self._make is None:
            return Blueprint.of(copy.deepcopy(self.model))
        twin = describe(self._make, self._seed_name)
        twin.values, twin.made = self.values, self.made
        return twin

    def materialize(
        self,
        device: torch.device | str,
        *,
        seed: int,
        only: Collection[str] | None = None,
        finish: Callable[[str, torch.Tensor], None] | None = None,
        read: ReadPart | None = None,
    ) -> nn.Module:
        """Give parameters and buffers their initial values, in place.

        The tensor objects stay the same (except in modules such as nn.RNN, which hold weak
        references to their tensors), so ties and existing references stay valid. A deferred model
        needs memory for about one tensor in addition to the result. Any other model is built whole.
        A saved value is read directly into the memory of its tensor, a piece at a time.

        Args:
            device: the device of the tensors; initial values are computed on the CPU.
            seed: the seed of the run; ignored for a module that was given with values.
            only: names as in `named_parameters` and `named_buffers` (any name of a tied tensor), or
                None for all tensors. The other tensors are not changed.
            finish: called with the first name and the object of each tensor after it has its value.
                In a deferred model, the next tensor is allocated after the call.
            read: returns this rank's part of a saved value, or None to read it whole. It gets the
                tensor's first name, an empty meta tensor of its shape, and the saved value. It is
                not called for tensors that share a storage.

        Returns:
            `model`.

        Raises:
            ConfigError: a name in `only` is not in the model, or a second call of the constructor
                makes tensors of other names or shapes.
        """
        tensors = self._chosen(only)
        with kept_random_state():
            if self._recording is not None:
                self._replay(self._recording, tensors, torch.device(device), seed, finish, read)
                return self.model
            if self._make is not None:
                _seed_all(seed)
                _build_again(self._make, self.model)
        for tensor in tensors.values():
            tensor.data = tensor.data.to(device)
        for name, tensor in tensors.items():
            saved = self.saved_value(name)
            if saved is not None:
                copy_saved(saved, tensor.data)
            if finish is not None:
                finish(name, tensor)
        return self.model

    def saved_value(self, name: str) -> StateTensor | None:
        """Return the saved value of a tensor, by any of its names; None if it has none."""
        return self.values.get(self._first_names.get(name, name))

    def put(self, name: str, values: torch.Tensor) -> None:
        """Let a parameter of a deferred model have its values in the memory of `values`.

        Args:
            name: any name of the parameter.
            values: a tensor of the parameter's shape, of any dtype and on any device.
        """
        _fill(self.model, self.model.get_parameter(name), values)

    def initial_value(self, name: str, seed: int) -> torch.Tensor:
        """Compute the initial value of a tensor on the CPU, without changing the model.

        Args:
            name: the tensor's first name.
            seed: the seed of the run.

        Raises:
            ValueError: the model is not deferred.
        """
        if self._recording is None:
            raise ValueError("the model has values already")
        with kept_random_state():
            origin = self._origins[name]
            return self._initial(self._recording, origin, torch.device("cpu"), seed, None)

    def _chosen(self, only: Collection[str] | None) -> dict[str, torch.Tensor]:
        """Return the chosen tensors by first name, in the order of the model."""
        tensors = first_named_tensors(self.model)
        if only is None:
            return tensors
        aliases = named_tensors(self.model)
        for name in only:
            if name not in aliases:
                hint = did_you_mean(name, aliases) or "."
                raise ConfigError(
                    f"only: the model has no parameter or buffer {name!r}{hint} "
                    "Use names as in model.named_parameters()."
                )
        wanted = {id(aliases[name]) for name in only}
        return {name: tensor for name, tensor in tensors.items() if id(tensor) in wanted}

    def _replay(
        self,
        recording: InitRecording,
        tensors: dict[str, torch.Tensor],
        device: torch.device,
        seed: int,
        finish: Callable[[str, torch.Tensor], None] | None,
        read: ReadPart | None,
    ) -> None:
        storage_uses: dict[int, int] = {}
        for origin in self._origins.values():
            storage_uses[origin.spec.storage] = storage_uses.get(origin.spec.storage, 0) + 1
        shared: dict[int, torch.UntypedStorage] = {}
        for name, tensor in tensors.items():
            origin = self._origins[self._first_names.get(name, name)]
            saved, overlaps = self.saved_value(name), storage_uses[origin.spec.storage] > 1
            make = self.made.get(self._first_names.get(name, name))
            if saved is None and make is not None:
                values = make(seed).to(device)
            elif saved is not None and not overlaps:  # no initial value is computed
                values = _saved_values(name, origin.spec, saved, device, read)
            else:
                together = shared if overlaps else None
                values = self._initial(recording, origin, device, seed, together)
                if saved is not None:
                    copy_saved(saved, values)
            tensor = _fill(self.model, tensor, values)
            del values
            if finish is not None:
                finish(name, tensor)

    def _initial(
        self,
        recording: InitRecording,
        origin: _Origin,
        device: torch.device,
        seed: int,
        shared: dict[int, torch.UntypedStorage] | None,
    ) -> torch.Tensor:
        """Compute the initial value of a tensor.

        Args:
            recording: the recorded construction.
            origin: the view of the tensor, and the operations on which it depends.
            device: the device of the result.
            seed: the seed of the run.
            shared: storages that several tensors share, by key, so that the tensors share them
                again; a new storage is added. None for a tensor with a storage of its own.
        """
        spec, closure = origin.spec, origin.closure
        storage = None if shared is None else shared.get(spec.storage)
        if storage is None:
            storage = recording.replay(
                spec.storage, closure, lambda op: initial_seed(seed, self._owners[op])
            )
            if shared is None:
                storage, spec = _trimmed(storage, spec)
            storage = _moved(storage, device)
            if shared is not None:
                shared[spec.storage] = storage
        return view_storage(storage, spec)


def describe(make: Callable[[], nn.Module], seed_name: Callable[[str], str] = str) -> Blueprint:
    """Run a model's constructor on the meta device and record how to compute the values.

    If that is impossible (the constructor reads random values, draws on the CPU, uses an
    operation without a meta kernel, ...), the constructor runs on the CPU instead. `reason` of the
    result then has the cause.

    Args:
        make: builds the model; called once, or once on meta and once on the CPU.
        seed_name: returns the name from which the seed of a tensor is computed, given its first
            name.

    Raises:
        ConfigError: the result is not a module, or has tensors without a shape.
    """
    try:
        return _describe_on_meta(make, seed_name)
    except UnfitModelError:
        raise
    except CannotDefer as finding:
        reason = str(finding)
    except Exception as error:
        # Any error is caught: the construction on the CPU shows whether the model is at fault.
        reason = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
    with kept_random_state():
        _seed_all(0)
        return Blueprint(_checked(make()), reason=reason, _make=make)


def as_blueprint(model: Callable[[], nn.Module] | nn.Module | Blueprint) -> Blueprint:
    """Return the blueprint of a module or of its constructor; a blueprint is returned as it is."""
    if isinstance(model, Blueprint):
        return model
    return Blueprint.of(model) if isinstance(model, nn.Module) else describe(model)


def _describe_on_meta(make: Callable[[], nn.Module], seed_name: Callable[[str], str]) -> Blueprint:
    with kept_random_state():
        # All ranks have to find the same. So a constructor that seeds must change the state on all
        # of them, also on a rank whose script has used the same seed just before.
        _seed_all(_UNLIKELY_SEED)
        state = _RandomState()
        with InitRecorder() as recorder:
            model = make()
        recorder.check()
        if state.changed():
            raise CannotDefer("it draws or seeds random numbers on the CPU")
    recording = recorder.recording
    _checked(model)
    for module in model.modules():
        if not getattr(module, "_is_hf_initialized", False) and _is_of_transformers(type(module)):
            raise CannotDefer("transformers skips initialisation on the meta device")
    tensors = first_named_tensors(model)
    for name, tensor in tensors.items():
        if tensor.device.type != "meta":
            raise CannotDefer(f"it puts {name!r} on {tensor.device} itself")
    for name in _loose_tensors(model):
        raise CannotDefer(f"it keeps a tensor at {name!r} that is no parameter or buffer")
    blueprint = Blueprint(model, _make=make, _recording=recording, _seed_name=seed_name)
    first = {id(tensor): name for name, tensor in tensors.items()}
    blueprint._first_names = {name: first[id(t)] for name, t in named_tensors(model).items()}
    for name, tensor in tensors.items():
        spec = recording.spec(tensor)
        closure = recording.closure(spec.storage)
        blueprint._origins[name] = _Origin(spec, closure)
        draws, own = 0, seed_name(name)
        for index in closure:
            if recording.operations[index].random and index not in blueprint._owners:
                blueprint._owners[index] = f"{own}#{draws}" if draws else own
                draws += 1
    return blueprint


def _is_of_transformers(module_type: type[nn.Module]) -> bool:
    return any(base.__module__.startswith("transformers.") for base in module_type.__mro__)


def _checked(model: Any) -> nn.Module:
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"model: the constructor returned {type(model).__name__}, not a torch.nn.Module. "
            "Let it return the model."
        )
    _refuse_lazy(model)
    return model


def _refuse_lazy(model: nn.Module) -> None:
    for path, module in model.named_modules():
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None and is_lazy(tensor):
                kind = type(module).__name__
                raise ConfigError(
                    f"model: {'.'.join(filter(None, (path, name)))!r} has no shape before the "
                    f"first batch. Replace {kind} by {kind.removeprefix('Lazy')} with its sizes."
                )


def _loose_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the tensors in plain attributes of modules, and in lists or dicts there, by path."""
    registered = {id(tensor) for tensor in first_named_tensors(model).values()}
    loose: dict[str, torch.Tensor] = {}

    def collect(path: str, value: object) -> None:
        if isinstance(value, torch.Tensor):
            if id(value) not in registered:
                loose[path] = value
        elif isinstance(value, (list, tuple)):
            for position, item in enumerate(value):
                collect(f"{path}[{position}]", item)
        elif isinstance(value, dict):
            for key, item in value.items():
                collect(f"{path}[{key!r}]", item)

    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if name not in ("_parameters", "_buffers", "_modules"):
                collect(f"{path}.{name}" if path else name, value)
    return loose


def _build_again(make: Callable[[], nn.Module], target: nn.Module) -> None:
    """Construct the model again, and move its values into the tensor objects of `target`."""
    old = {**first_named_tensors(target), **_loose_tensors(target)}
    shapes = {name: tensor.shape for name, tensor in old.items()}
    apart = len({tensor.untyped_storage()._cdata for tensor in old.values()}) == len(old)
    if apart:  # free the old values before the new values are made
        for tensor in old.values():
            tensor.data = tensor.data.new_empty(0)
    source = make()
    new = {**first_named_tensors(source), **_loose_tensors(source)}
    for name in new.keys() | shapes.keys():
        if name not in new or shapes.get(name) != new[name].shape:
            raise ConfigError(
                f"model: two constructions differ at {name!r}. Make the model's shape depend on "
                "its arguments only."
            )
    for name, tensor in old.items():
        if apart:
            value = new[name].data
            # If `source` is in a reference cycle (as with `set_model_inputs`), it stays alive for a
            # while, and would keep the storages of tensors that this rank drops later.
            new[name].data = value.new_empty(0)
            tensor.data = value
        else:
            tensor.data.copy_(new[name].data)


def _saved_values(
    name: str, spec: TensorSpec, saved: StateTensor, device: torch.device, read: ReadPart | None
) -> torch.Tensor:
    """Read a saved value, or this rank's part, into memory with the order of dims of `spec`."""
    form = torch.empty_strided(spec.size, spec.stride, dtype=spec.dtype, device="meta")
    values = None if read is None else read(name, form, saved)
    if values is None:
        values = torch.empty_like(form, device=device, memory_format=torch.preserve_format)
        copy_saved(saved, values)
    return values


def _trimmed(
    storage: torch.UntypedStorage, spec: TensorSpec
) -> tuple[torch.UntypedStorage, TensorSpec]:
    """Copy a view out of its storage, so that a slice does not keep the whole storage alive."""
    span = 1 + sum((n - 1) * step for n, step in zip(spec.size, spec.stride, strict=True))
    if 0 in spec.size or span * spec.dtype.itemsize == storage.nbytes():
        return storage, spec
    flat = TensorSpec(spec.storage, spec.dtype, (span,), (1,), spec.offset)
    trimmed = view_storage(storage, flat).clone().untyped_storage()
    return trimmed, TensorSpec(spec.storage, spec.dtype, spec.size, spec.stride, 0)


def _moved(storage: torch.UntypedStorage, device: torch.device) -> torch.UntypedStorage:
    flat = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)
    moved: torch.UntypedStorage = flat.to(device).untyped_storage()
    return moved


@torch.no_grad()
def _fill(model: nn.Module, tensor: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Give a tensor object of the model these values, on any device; return the object."""
    kind = type(tensor)
    fresh = values
    if kind is not torch.Tensor:
        fresh = torch.Tensor._make_subclass(kind, values, tensor.requires_grad)
    fresh.requires_grad_(tensor.requires_grad)
    fresh.__dict__.update(tensor.__dict__)
    hooks, later_hooks = tensor._backward_hooks, tensor._post_accumulate_grad_hooks
    try:
        # The device of a tensor cannot be assigned, but two tensors can be swapped.
        torch.utils.swap_tensors(tensor, fresh)  # type: ignore[no-untyped-call]
    except RuntimeError:  # nn.RNN holds weak references, which forbid a swap: replace the object
        for module in model.modules():
            for name, existing in (*module._parameters.items(), *module._buffers.items()):
                if existing is tensor:
                    setattr(module, name, fresh)
        tensor = fresh
    # The swap exchanged autograd's metadata, with the hooks in it, so they are registered again.
    if hooks:
        tensor._backward_hooks = None
        tensor._backward_hooks = hooks
    if later_hooks:
        tensor._post_accumulate_grad_hooks = OrderedDict()
        tensor._post_accumulate_grad_hooks = later_hooks
    return tensor


_UNLIKELY_SEED = 5_846_113_790_442_671
"""A seed that no constructor uses."""


class _RandomState:
    """The states of the random generators that a constructor may use on the CPU."""

    def __init__(self) -> None:
        self.torch = torch.default_generator.get_state()
        self.python = random.getstate()
        numpy = sys.modules.get("numpy")
        self.numpy: Any = None if numpy is None else numpy.random.get_state()

    def changed(self) -> bool:
        """Whether any of the generators has been used or seeded since."""
        now = _RandomState()
        return (
            not torch.equal(self.torch, now.torch)
            or self.python != now.python
            or (self.numpy is not None and pickle.dumps(self.numpy) != pickle.dumps(now.numpy))
        )

    def restore(self) -> None:
        torch.default_generator.set_state(self.torch)
        random.setstate(self.python)
        if self.numpy is not None:
            sys.modules["numpy"].random.set_state(self.numpy)


def _seed_all(seed: int) -> None:
    torch.default_generator.manual_seed(seed)
    _seed_others(seed)


def _seed_others(seed: int) -> None:
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)


@contextmanager
def kept_random_state() -> Iterator[None]:
    """Restore the random generators of the CPU at the end of a `with` block."""
    state = _RandomState()
    try:
        yield
    finally:
        state.restore()
