"""An exponential moving average of the weights, divided among ranks as the weights are.

A rank averages the weights that it has: shards with the strategies fsdp and ZeRO, its stages in a
pipeline, its slices with the strategy tensor. The average takes as much memory as the rank's
weights, and an update of the average sends nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from bigtrain.engine.alongside.average import AVERAGE_SUFFIX
from bigtrain.engine.engine import Engine
from bigtrain.errors import BigtrainError, ConfigError
from bigtrain.tensors.shards import Extent, SavedTensor, StateTensor

SLOT = AVERAGE_SUFFIX.removeprefix(".")
"""The key of an average in a checkpoint, next to the optimizer's keys of the parameter."""


def ema(engine: Engine, decay: float | Callable[[int], float]) -> Ema:
    """Add an exponential moving average of the trained weights to an engine. Collective.

    The average starts at the current weights. Each step sets average = decay * average +
    (1 - decay) * weight, in the precision in which weights are updated (fp32 if only the
    computation is in bf16). Frozen parameters and buffers are not averaged. The checkpoints of
    `engine.save` and `engine.load` include the average.

    Args:
        engine: an engine of `bigtrain.prepare`, before or after a checkpoint is loaded.
        decay: a number in [0, 1); or a function from the step, counted from 1, to such a number.

    Returns:
        The average; its method `swapped` puts it into the model.

    Raises:
        ConfigError: the decay is not in [0, 1), the engine already has an average, or its ranks do
            not train one common model (parameter servers, local SGD).
    """
    if not callable(decay) and not 0 <= decay < 1:
        raise ConfigError(
            f"ema: decay={decay} needs to be 0 or more and less than 1. Use decay=0.999."
        )
    traits, name = engine.plan.replicate, engine.plan.strategy.name
    if engine.weight_average:
        raise ConfigError("ema: this engine already has an average. Use that one.")
    if traits.num_servers or traits.inexact_reason:
        raise ConfigError(
            f"ema: under strategy {name} the ranks do not have the same model after each step, so "
            "there is nothing to average. Use --strategy ddp or fsdp."
        )
    average = Ema(engine, decay)
    engine.follow_average(average)
    return average


class Ema:
    """A moving average of the weights of an engine; see `ema`."""

    def __init__(self, engine: Engine, decay: float | Callable[[int], float]) -> None:
        self._engine, self._decay = engine, decay
        self._swapped = False
        self._values = {
            name: tensor.values().detach().clone() for name, tensor in self._tensors().items()
        }
        engine.meter.label(self._values.values(), "optimizer")

    @property
    def nbytes(self) -> int:
        """Bytes of the average on this rank."""
        return sum(values.nbytes for values in self._values.values())

    def _tensors(self) -> dict[str, StateTensor]:
        """Return the trained weights on this rank; a tied weight under its first name only."""
        state, tensors = self._engine.runner.state(), {}
        for root in self._engine.runner.roots:
            for name, parameter in root.named_parameters():
                tensor = state.get(f"model.{name}")
                if parameter.requires_grad and tensor is not None:
                    tensors[name] = tensor
        return tensors

    @torch.no_grad()
    def update(self) -> None:
        """Update the average. The engine calls this after each step."""
        step = self._engine.steps_done
        decay = self._decay(step) if callable(self._decay) else self._decay
        for name, tensor in self._tensors().items():
            values = tensor.values()
            average = self._values.get(name)
            if average is None:  # trained from this step on
                self._values[name] = values.detach().clone()
            else:
                average.lerp_(values, 1 - decay)

    def check_step(self) -> None:
        """Refuse a step while the averages are in the model.

        Raises:
            BigtrainError: the averages are in the model.
        """
        if self._swapped:
            raise BigtrainError(
                "a step within `with average.swapped():` would train the average. Leave the block "
                "before engine.step."
            )

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Put the averages into the model in a `with` block, to evaluate, predict or save.

        At the end of the block the weights are put back. Inside the block a copy of the weights
        takes as many bytes as the weights of this rank. Collective.

        Example:
            with average.swapped():
                engine.save("averaged")  # a checkpoint of the averages, to be exported
        """
        self.check_step()
        tensors = self._tensors()
        weights = {name: tensor.values().detach().clone() for name, tensor in tensors.items()}
        self._put({name: self._values[name] for name in tensors if name in self._values})
        self._swapped = True
        try:
            yield
        finally:
            self._swapped = False
            self._put(weights)

    def _put(self, values: Mapping[str, Tensor]) -> None:
        """Write these values into the part of the model on this rank. Collective."""
        runner, context = self._engine.runner, self._engine.context
        model_state = {n: t for n, t in runner.state().items() if n.startswith("model.")}
        first = {
            f"model.{name}": values[names[id(parameter)]]
            for root in runner.roots
            for names in [{id(p): n for n, p in root.named_parameters()}]
            for name, parameter in root.named_parameters(remove_duplicate=False)
            if names[id(parameter)] in values
        }
        saved: dict[str, SavedTensor] = {
            name: _Held(name, tensor, first.get(name)) for name, tensor in model_state.items()
        }
        elsewhere = {
            name for names in context.all_gather_objects(list(model_state)) for name in names or ()
        }
        for name in elsewhere - saved.keys():  # `load_state` needs all names, but reads only own
            saved[name] = _Held(name, _NOTHING, None)
        runner.load_state(saved)

    def state(self) -> dict[str, StateTensor]:
        """Return the averages on this rank, under their names in a checkpoint."""
        saved = {}
        for name, tensor in self._tensors().items():
            average = self._values.get(name)
            if average is not None:
                key = f"optimizer.{name}.{SLOT}"
                saved[key] = replace(tensor, values=partial(_same, average))
        return saved

    @torch.no_grad()
    def load(self, saved: Mapping[str, SavedTensor]) -> None:
        """Load this rank's part of saved averages.

        An average that was not saved starts at the weight.

        Args:
            saved: the tensors of a checkpoint, by name. The model has loaded their weights already.
        """
        for name, tensor in self._tensors().items():
            key, values = f"optimizer.{name}.{SLOT}", tensor.values()
            average = saved[key].read(tensor.extents) if key in saved else values
            self._values[name] = average.to(values.device, values.dtype, copy=True)


def _same(values: Tensor) -> Tensor:
    return values


_NOTHING = StateTensor(torch.float32, (), (), lambda: torch.empty(0))


@dataclass(frozen=True)
class _Held:
    """The part of a tensor on this rank, with the interface of a `SavedTensor`."""

    name: str
    tensor: StateTensor
    values: Tensor | None
    """The values to read instead of those of `tensor`; None to read those of `tensor`."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the tensor."""
        return self.tensor.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole tensor."""
        return self.tensor.shape

    def read(self, extents: Sequence[Extent]) -> Tensor:
        """Return these elements of the tensor as a flat copy.

        Raises:
            BigtrainError: some of the elements are on other ranks.
        """
        values = self.tensor.values() if self.values is None else self.values
        if tuple(extents) == self.tensor.extents:
            return values.detach().clone()
        parts = [part for extent in extents for part in self._parts(extent, values)]
        joined = torch.cat(parts) if parts else values.new_empty(0)
        wanted = sum(extent.size for extent in extents)
        if joined.numel() != wanted:
            raise BigtrainError(
                f"ema: this rank holds {joined.numel()} of the {wanted} elements of {self.name} "
                "that it would put into the model. Use --strategy fsdp or ddp for an average."
            )
        return joined.clone()

    def _parts(self, wanted: Extent, values: Tensor) -> Iterator[Tensor]:
        """Yield the elements of one extent, in consecutive pieces."""
        for number in range(wanted.count):
            begin = wanted.start + number * wanted.pitch
            position = 0
            for extent in self.tensor.extents:
                for inside, part in extent.within(begin, begin + wanted.length):
                    yield values[position + inside : position + inside + part.size]
                position += extent.size
