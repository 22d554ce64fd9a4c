"""The user's optimizer, made once of whole parameters and then applied to this rank's tensors.

A user's function may group parameters by their dims, shapes, names or identity. Engines update
other tensors: DTensors, flat pieces, or the parameters of one stage. So the function is called
while the model is unchanged. Then the tensors that a rank updates replace the parameters in the
groups.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from bigtrain.errors import ConfigError
from bigtrain.optim.kinds import OptimizerKind, initial_state, kind_of, same_on_shards

MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
"""Makes an optimizer of parameters. A function is passed, because sharding and cutting replace the
parameters."""
_SHOWN = 3


class WholeOptimizer:
    """The optimizer that a factory makes of the whole parameters of a model.

    The factory is called once, when a property is first read. No reference to the parameters is
    kept: the model is sharded later, and the whole parameters have to be freed.

    Args:
        make: the user's function; called with a list of the trained parameters.
        model: the whole, unchanged model, on any device (also meta).
    """

    def __init__(self, make: MakeOptimizer, model: nn.Module) -> None:
        self._make, self._model = make, model
        self._for_forecasts: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()

    @classmethod
    def of(cls, make: MakeOptimizer, named: Mapping[str, nn.Parameter]) -> WholeOptimizer:
        """Return the optimizer of these parameters; `make` itself if it is a `WholeOptimizer`.

        Args:
            make: a factory.
            named: the trained parameters, by name.
        """
        if isinstance(make, WholeOptimizer):
            return make
        factory = cls(make, nn.Module())
        factory.__dict__["_emptied"] = _EmptiedOptimizer(make, list(named.items()))
        return factory

    def __call__(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """Make an optimizer of other parameters for a forecast, until `retire` is called."""
        optimizer = self._make(parameters)
        self._for_forecasts.add(optimizer)
        return optimizer

    def own(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """Make an optimizer of other parameters that `retire` does not change."""
        return self._make(parameters)

    def retire(self) -> None:
        """Make the optimizers that were made for forecasts unusable: every use of groups raises.

        A user's function may store the last optimizer that it made, and a user may make a scheduler
        of it. That scheduler would not change the run, so it has to fail.
        """
        for optimizer in list(self._for_forecasts):
            optimizer.param_groups = _Retired()  # type: ignore[assignment]
        self._for_forecasts.clear()

    @cached_property
    def _emptied(self) -> _EmptiedOptimizer:
        named = self._model.named_parameters(remove_duplicate=False)
        emptied = _EmptiedOptimizer(self._make, list(named))
        del self._model
        return emptied

    @property
    def kind(self) -> OptimizerKind:
        """The properties of the optimizer's step, found by trial steps."""
        return self._emptied.kind

    @property
    def keeps(self) -> str | None:
        """The attribute besides `state` in which the optimizer has tensors; None without one."""
        return self._emptied.keeps

    @property
    def kind_name(self) -> str:
        """The name of the optimizer's class."""
        return self._emptied.kind_name

    @property
    def groups(self) -> list[list[str]]:
        """The names of the parameters of each group."""
        return self._emptied.groups

    @property
    def settings(self) -> list[dict[str, Any]]:
        """The options of each group, such as `lr`, by name."""
        return self._emptied.settings

    def same_on_shards(self, mesh: DeviceMesh) -> bool:
        """Whether DTensors are updated to the same values as whole parameters. Collective.

        Args:
            mesh: the device mesh; parameters are sharded over its last axis.
        """
        return self._emptied.same_on_shards(mesh)

    @property
    def begins_with_state(self) -> bool:
        """Whether the optimizer has state before its first step, as Adagrad has."""
        return self._emptied.begins_with_state

    def left_out(self, names: Iterable[str]) -> list[str]:
        """Return the parameter names among `names` that are in no group."""
        taken = {name for group in self.groups for name in group}
        return [name for name in names if name not in taken]

    def put_on(self, pieces: Mapping[str, Sequence[Tensor]]) -> torch.optim.Optimizer:
        """Replace each parameter in the groups by its pieces; return the optimizer.

        Args:
            pieces: the tensors that this rank updates, by the name of their parameter. Parameters
                of other ranks are left out.

        Raises:
            ConfigError: the optimizer stores copies of whole parameters outside its state, and a
                piece is a part of a parameter.
        """
        return self._emptied.put_on(pieces)

    def begin_state(self) -> None:
        """Create the initial state again, after an engine has replaced tensors in the groups."""
        self._emptied.begin_state()


class _Retired:
    """The groups of an optimizer that was made for a forecast: every use raises."""

    def _refuse(self, *_: Any) -> NoReturn:
        raise ConfigError(
            "optimizer: this one was made for a forecast, and updates nothing. The optimizer of "
            "the run is engine.optimizer: make the scheduler of that, or give "
            f"{LEARNING_RATE_FIX}."
        )

    __iter__ = __getitem__ = __setitem__ = __len__ = _refuse


LEARNING_RATE_FIX = (
    "prepare(..., learning_rate=lambda optimizer: "
    "torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS))"
)


def drop_empty_groups(optimizer: torch.optim.Optimizer) -> None:
    """Remove groups without parameters, for engines that refuse such groups.

    `group_places` returns the indices of the remaining groups.
    """
    indices = [i for i, group in enumerate(optimizer.param_groups) if group["params"]]
    optimizer.param_groups[:] = [optimizer.param_groups[i] for i in indices]
    optimizer.__dict__[_PLACES] = indices


def group_places(optimizer: torch.optim.Optimizer) -> Sequence[int]:
    """Return, for each group of an optimizer, its index among the user's groups."""
    places: Sequence[int] = vars(optimizer).get(_PLACES, range(len(optimizer.param_groups)))
    return places


_PLACES = "_bigtrain_group_places"


def _check_made(optimizer: Any) -> None:
    """Refuse an object that is not an optimizer, and an optimizer that already has a scheduler."""
    if not hasattr(optimizer, "param_groups") or not hasattr(optimizer, "step"):
        raise ConfigError(
            f"optimizer: the function returned a {type(optimizer).__name__}, not an optimizer. "
            "Give functools.partial(torch.optim.AdamW, lr=1e-3), or a function that returns one."
        )
    if hasattr(optimizer.step, "_wrapped_by_lr_sched"):
        raise ConfigError(
            "optimizer: the function makes a learning-rate scheduler, and strategies make "
            "another optimizer of the tensors that they update, so the scheduler would change "
            "nothing. Make it after prepare, of engine.optimizer: "
            "torch.optim.lr_scheduler.CosineAnnealingLR(engine.optimizer, T_max=STEPS); or give "
            f"{LEARNING_RATE_FIX}."
        )


def whole_optimizer(make: MakeOptimizer, model: nn.Module) -> WholeOptimizer:
    """Return the optimizer of a model; its factory has been called.

    Args:
        make: a factory, or a `WholeOptimizer`, which is returned.
        model: the whole, unchanged model.
    """
    optimizer = make if isinstance(make, WholeOptimizer) else WholeOptimizer(make, model)
    _ = optimizer.groups
    return optimizer


class _EmptiedOptimizer:
    """An optimizer that was made of whole parameters, without references to them."""

    def __init__(self, make: MakeOptimizer, everywhere: list[tuple[str, nn.Parameter]]) -> None:
        self._make = make
        name_of: dict[int, str] = {}
        self._first = {name: name_of.setdefault(id(p), name) for name, p in everywhere}
        """The first name of a tied parameter, by any of its names."""
        named = {name: p for name, p in everywhere if self._first[name] == name}
        trained = [p for p in named.values() if p.requires_grad]
        optimizer, stand_ins = _make_whole(make, trained)
        if not trained:  # torch's optimizers refuse an empty list, so they got one element
            name_of[id(stand_ins[0])] = ""
        for parameter, stand_in in zip(trained, stand_ins, strict=False):
            name_of[id(stand_in)] = name_of[id(parameter)]
        _check_made(optimizer)
        self._shapes = {name: p.shape for name, p in named.items()}
        self._attributes = {name: _attributes(p) for name, p in named.items()}
        self.kind_name = type(optimizer).__name__
        group_names = [_names(group["params"], name_of) for group in optimizer.param_groups]
        self.groups = [[name for name in names if name] for names in group_names]
        self.settings = [
            {k: v for k, v in group.items() if k not in ("params", "param_names")}
            for group in optimizer.param_groups
        ]
        self._dims = [sorted({len(self._shapes[name]) for name in names}) for names in self.groups]
        self.begins_with_state = bool(optimizer.state)
        optimizer.state.clear()
        for group in optimizer.param_groups:
            group["params"].clear()  # in place: the optimizer may have a reference to the list
        self.keeps = next(_tensors_in(optimizer), None)
        self._optimizer = optimizer

    @cached_property
    def kind(self) -> OptimizerKind:
        notes = [self._notes_of(names) for names in self.groups]
        begins = self.begins_with_state
        return kind_of(self._optimizer, self._dims, notes, begins_with_state=begins)

    def _notes_of(self, names: Sequence[str]) -> dict[str, Any]:
        """Return the user's attributes of the first parameter that has any."""
        return next((self._attributes[name] for name in names if self._attributes[name]), {})

    def same_on_shards(self, mesh: DeviceMesh) -> bool:
        begins = self.begins_with_state
        return same_on_shards(self._optimizer, self._dims, mesh, begins_with_state=begins)

    def put_on(self, pieces_of: Mapping[str, Sequence[Tensor]]) -> torch.optim.Optimizer:
        pieces: dict[str, dict[int, Tensor]] = {}
        for name, tensors in pieces_of.items():  # may have several names of a tied parameter
            pieces.setdefault(self._first[name], {}).update((id(piece), piece) for piece in tensors)
        if self.keeps is not None:
            return self._made_again(pieces)
        for name, by_id in pieces.items():
            for key, value in self._attributes[name].items():
                for piece in by_id.values():
                    if not hasattr(piece, key):
                        setattr(piece, key, value)
        for group, names in zip(self._optimizer.param_groups, self.groups, strict=True):
            taken = [(name, p) for name in names for p in pieces.get(name, {}).values()]
            group["params"][:] = [piece for _, piece in taken]
            if "param_names" in group:
                group["param_names"] = [name for name, _ in taken]
        if any(isinstance(p, DTensor) for by_id in pieces.values() for p in by_id.values()):
            _leave_fused(self._optimizer)
        self.begin_state()
        return self._optimizer

    def _made_again(self, pieces: Mapping[str, Mapping[int, Tensor]]) -> torch.optim.Optimizer:
        """Call the user's function again, so that the optimizer copies the current values."""
        wholes = []
        for name, by_id in pieces.items():
            for piece in by_id.values():
                is_whole = isinstance(piece, nn.Parameter) and not isinstance(piece, DTensor)
                if not is_whole or len(by_id) > 1 or piece.shape != self._shapes[name]:
                    raise ConfigError(
                        f"optimizer: {self.kind_name} copies parameters in its constructor "
                        f"({self.keeps}), and this strategy gives each rank parts of them. "
                        "Let it put the copies into `state` in its first step, or use --strategy "
                        "ddp."
                    )
                wholes.append(piece)
        self._optimizer = self._make(wholes)  # type: ignore[arg-type]
        return self._optimizer

    def begin_state(self) -> None:
        if self.begins_with_state:
            self._optimizer.state.clear()
            self._optimizer.state.update(initial_state(self._optimizer))


def _make_whole(
    make: MakeOptimizer, trained: Sequence[nn.Parameter]
) -> tuple[torch.optim.Optimizer, Sequence[nn.Parameter]]:
    """Return the optimizer and the parameters of which it was made.

    If the user's function fails for parameters on the meta device, the optimizer is made of CPU
    tensors of the same shapes.
    """
    if not trained:
        placeholder = nn.Parameter(torch.zeros(1))
        return make([placeholder]), [placeholder]
    is_meta = any(parameter.is_meta for parameter in trained)
    try:
        return make(list(trained)), trained
    except Exception:
        if not is_meta:
            raise
    stand_ins = []
    for parameter in trained:  # an expanded tensor needs the memory of one element
        number = torch.zeros((), dtype=parameter.dtype)
        stand_ins.append(nn.Parameter(number.expand(parameter.shape)))
        stand_ins[-1].__dict__.update(_attributes(parameter))
    return make(list(stand_ins)), stand_ins


def _leave_fused(optimizer: torch.optim.Optimizer) -> None:
    """Turn off torch's fused kernels that do not support DTensors."""
    if isinstance(optimizer, torch.optim.SGD | torch.optim.Adagrad):
        for settings in (optimizer.defaults, *optimizer.param_groups):
            if settings.get("fused"):
                settings.update(fused=False, foreach=False)


def _names(members: Sequence[Tensor], name_of: Mapping[int, str]) -> list[str]:
    foreign = [member for member in members if id(member) not in name_of]
    if foreign:
        shapes = ", ".join(str(list(tensor.shape)) for tensor in foreign[:_SHOWN])
        raise ConfigError(
            f"optimizer: it has a tensor that is not a parameter of the model (shape "
            f"{shapes}), and no strategy exchanges its gradients. Make it a parameter of the "
            "model, as a module around model and loss does."
        )
    return [name_of[id(member)] for member in members]


def _attributes(parameter: Tensor) -> dict[str, Any]:
    """Return the attributes that a user has set on a parameter, such as a learning-rate factor."""
    return {
        key: value for key, value in vars(parameter).items() if not key.startswith(("_", "ds_"))
    }


def _tensors_in(optimizer: torch.optim.Optimizer) -> Iterator[str]:
    """Yield the attributes, apart from state and groups, that contain tensors with dims."""
    for key, value in vars(optimizer).items():
        if key not in ("state", "param_groups", "defaults") and _has_tensor(value, set()):
            yield key


def _has_tensor(value: Any, seen: set[int]) -> bool:
    if id(value) in seen:
        return False
    seen.add(id(value))
    if isinstance(value, Tensor):
        return value.dim() > 0
    if isinstance(value, torch.optim.Optimizer):
        return any(True for _ in _tensors_in(value))
    if isinstance(value, dict):
        return any(_has_tensor(v, seen) for pair in value.items() for v in pair)
    if isinstance(value, list | tuple | set | frozenset):
        return any(_has_tensor(v, seen) for v in value)
    return False
