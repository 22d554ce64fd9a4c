"""The learning rates of a `scheduler` section, equal to DeepSpeed's rates in every step.

DeepSpeed sets a first rate when a scheduler is made, and a new rate after each step. So step 0 has
the rate before any iteration, and step k the rate after iteration k - 1.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from bigtrain.errors import ConfigError, did_you_mean


def _whole(value: object) -> object:
    """Convert a number of steps that is written as 1e3 to an integer."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Rate = Annotated[float, Field(ge=0)]
Steps = Annotated[int, BeforeValidator(_whole)]


class Schedule(BaseModel):
    """A type of scheduler: its parameters with DeepSpeed's defaults, and its rates."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    last_batch_iteration: Literal[-1] = -1
    """The iteration after which DeepSpeed resumes. A job resumes from a checkpoint instead."""

    decays_over: ClassVar[bool] = False
    """Whether the rates depend on `total_num_steps`."""

    own_highest: ClassVar[str] = ""
    """The parameter that sets the highest rate; empty if the optimizer's rate is the highest."""

    def highest(self, base: float) -> float:
        """Return the highest rate of the schedule; `base` is the optimizer's rate."""
        return base

    def total(self) -> int | None:
        """Return the step at which the decay ends; None without a decay."""
        return None

    def rate(self, step: int, base: float) -> float:
        """Return the learning rate of an optimizer step.

        Args:
            step: the number of optimizer steps before it.
            base: the optimizer's rate.
        """
        return self.at(step - 1, base)

    @abstractmethod
    def at(self, iteration: int, base: float) -> float:
        """Return the rate after an iteration, counted from 0; -1 means before the first."""


class _Rising(Schedule):
    """The warm-up, which three schedulers share."""

    warmup_num_steps: Steps = Field(1000, ge=1)
    warmup_type: Literal["log", "linear"] = "log"
    no_warmup: bool = Field(False, exclude=True)
    """Whether the file has "auto" for the warm-up's length, and the job has no warm-up."""

    @property
    def rising_steps(self) -> int:
        """The warm-up steps; DeepSpeed uses at least two."""
        return 0 if self.no_warmup else max(2, self.warmup_num_steps)

    def risen(self, iteration: int) -> float:
        """Return the share of the warm-up's rise that is done after an iteration, from 0 to 1."""
        if self.warmup_type == "log":
            return 1.0 / math.log(self.rising_steps) * math.log(iteration + 1)
        return iteration / self.rising_steps


class WarmupLR(_Rising):
    """A warm-up, then a constant rate."""

    own_highest: ClassVar[str] = "warmup_max_lr"
    warmup_min_lr: Rate = 0.0
    warmup_max_lr: Rate | None = None

    def highest(self, base: float) -> float:
        """See `Schedule.highest`."""
        return base if self.warmup_max_lr is None else self.warmup_max_lr

    def at(self, iteration: int, base: float) -> float:
        """See `Schedule.at`."""
        highest = self.highest(base)
        if self.no_warmup:
            return self.minimum + (highest - self.minimum) * self.remaining(max(0, iteration))
        if iteration < 0:
            return self.minimum
        rising = iteration < self.rising_steps
        share = self.risen(iteration) if rising else self.remaining(iteration)
        return self.minimum + (highest - self.minimum) * share

    @property
    def minimum(self) -> float:
        """The rate before the first iteration."""
        return self.warmup_min_lr

    def remaining(self, iteration: int) -> float:  # noqa: ARG002
        """Return the share of the decay that remains after an iteration, from 1 to 0."""
        return 1.0


class WarmupDecayLR(WarmupLR):
    """A warm-up, then a linear decay."""

    decays_over: ClassVar[bool] = True
    total_num_steps: Steps = Field(ge=1)
    warmup_max_lr: Rate | None = 0.001

    def total(self) -> int | None:
        """See `Schedule.total`."""
        return self.total_num_steps

    def remaining(self, iteration: int) -> float:
        """See `WarmupLR.remaining`."""
        length = max(1.0, self.total_num_steps - self.rising_steps)
        return max(0.0, (self.total_num_steps - iteration) / length)


class WarmupCosineLR(_Rising):
    """A warm-up, then a cosine decay; both are shares of the optimizer's rate."""

    decays_over: ClassVar[bool] = True
    total_num_steps: Steps = Field(ge=1)
    warmup_min_ratio: float = Field(0.0, ge=0)
    cos_min_ratio: float = Field(0.0001, ge=0)

    def total(self) -> int | None:
        """See `Schedule.total`."""
        return self.total_num_steps

    def at(self, iteration: int, base: float) -> float:
        """See `Schedule.at`."""
        if iteration < 0 and not self.no_warmup:
            return 0.0
        if iteration < self.rising_steps and not self.no_warmup:
            start = self.warmup_min_ratio
            return base * (start + self.risen(iteration) * (1 - start))
        done = max(0, iteration) - self.rising_steps + 1
        progress = min(1.0, done / max(1, self.total_num_steps - self.rising_steps))
        remaining = (1 + math.cos(math.pi * progress)) / 2
        return base * max(0.0, self.cos_min_ratio + (1 - self.cos_min_ratio) * remaining)


class LRRangeTest(Schedule):
    """A rising rate, to find where training diverges."""

    own_highest: ClassVar[str] = "lr_range_test_min_lr"
    lr_range_test_min_lr: Rate = 1e-3
    lr_range_test_step_size: Steps = Field(2000, ge=1)
    lr_range_test_step_rate: float = 1.0
    lr_range_test_staircase: bool = False

    def highest(self, base: float) -> float:  # noqa: ARG002
        """Return the first rate, to which all rates are proportional; see `Schedule.highest`."""
        return self.lr_range_test_min_lr

    def at(self, iteration: int, base: float) -> float:
        """See `Schedule.at`."""
        intervals = (iteration + 1) / self.lr_range_test_step_size
        if self.lr_range_test_staircase:
            intervals = math.floor(intervals)
        return self.highest(base) * (1 + self.lr_range_test_step_rate * intervals)


class OneCycle(Schedule):
    """One cycle of rising and falling rates, then a decay."""

    own_highest: ClassVar[str] = "cycle_max_lr"
    cycle_min_lr: Rate
    cycle_max_lr: Rate
    decay_lr_rate: float = Field(0.0, ge=0)
    cycle_first_step_size: Steps = Field(2000, ge=1)
    cycle_second_step_size: Steps | None = Field(None, ge=0)
    cycle_first_stair_count: Steps = Field(0, ge=0)
    cycle_second_stair_count: Steps | None = Field(None, ge=0)
    decay_step_size: Steps = Field(0, ge=0)
    cycle_momentum: bool = True
    cycle_min_mom: float = 0.8
    cycle_max_mom: float = 0.9
    decay_mom_rate: float = 0.0

    def highest(self, base: float) -> float:  # noqa: ARG002
        """See `Schedule.highest`."""
        return self.cycle_max_lr

    @property
    def _second(self) -> int:
        second = self.cycle_second_step_size
        return self.cycle_first_step_size if second is None else second

    def at(self, iteration: int, base: float) -> float:  # noqa: ARG002
        """See `Schedule.at`."""
        low, cycle = self.cycle_min_lr, self.cycle_first_step_size + self._second
        if iteration < 0:
            return low
        if iteration < cycle:
            return low + (self.cycle_max_lr - low) * self._height(iteration + 1, cycle)
        if not self.decay_step_size or not self.decay_lr_rate:
            return low
        return low / (1 + self.decay_lr_rate * (iteration - cycle + 1) / self.decay_step_size)

    def _height(self, done: int, cycle: int) -> float:
        """Return the position between lowest (0) and highest (1) rate after `done` iterations."""
        first, second = self.cycle_first_step_size, self._second
        step_of_cycle = done % cycle
        rises = step_of_cycle <= first
        stairs = self.cycle_first_stair_count
        if not rises and self.cycle_second_stair_count is not None:
            stairs = self.cycle_second_stair_count
        steps, length = (step_of_cycle, first) if rises else (cycle - step_of_cycle, second)
        return steps * stairs // length / stairs if stairs else steps / length


DEEPSPEED_SCHEDULES: dict[str, type[Schedule]] = {
    kind.__name__.lower(): kind
    for kind in (WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest)
}
"""The schedulers by DeepSpeed's names in lower case."""
HIGHEST = [kind.own_highest for kind in DEEPSPEED_SCHEDULES.values() if kind.own_highest]
"""The parameters for which "auto" stands for the job's learning rate."""


def read_schedule(
    path: str, section: Mapping[str, Any], fill: Mapping[str, Any], *, has_betas: bool
) -> Schedule | None:
    """Return the schedule of a `scheduler` section; None if the section names no type.

    Args:
        path: the path of the file, for messages.
        section: the `scheduler` section of the file.
        fill: by parameter, the value that "auto" stands for.
        has_betas: whether the optimizer has betas; OneCycle would change the first.

    Raises:
        ConfigError: a type or parameter is unknown or missing, DeepSpeed does not accept a value,
            or OneCycle would change a beta.
    """
    named = section.get("type", "auto")
    if named in ("auto", None):
        return None
    kind = DEEPSPEED_SCHEDULES.get(str(named).lower())
    if kind is None:
        names = [each.__name__ for each in DEEPSPEED_SCHEDULES.values()]
        raise ConfigError(
            f"{path}: scheduler.type={named}{did_you_mean(str(named), names)} A job supports "
            f"{', '.join(names)}. For another schedule remove scheduler from the file and set "
            "optim.schedule."
        )
    written = section.get("params") or {}
    known = {key: fill.get(key) if value == "auto" else value for key, value in written.items()}
    params = {key: value for key, value in known.items() if value is not None}
    if kind.decays_over and "total_num_steps" not in written:
        raise ConfigError(
            f'{path}: scheduler.type={named} needs params.total_num_steps. Write "auto" for the '
            "job's own length, or a number."
        )
    if written.get("warmup_num_steps") == "auto" and not fill.get("warmup_num_steps"):
        params |= {"warmup_num_steps": 1, "no_warmup": True}
    try:
        made = kind.model_validate(params)
    except ValidationError as error:
        raise _refused(path, kind, error) from None
    if isinstance(made, OneCycle) and made.cycle_momentum and has_betas:
        raise ConfigError(
            f"{path}: scheduler.params.cycle_momentum is true (the default): DeepSpeed would "
            "change the first of the optimizer's betas between cycle_min_mom and cycle_max_mom, "
            'and a job does not change optim.betas. Write "cycle_momentum": false.'
        )
    return made


def _refused(path: str, kind: type[Schedule], error: ValidationError) -> ConfigError:
    first = error.errors()[0]
    key = str(first["loc"][0])
    name = f"{path}: scheduler.params.{key}"
    if first["type"] == "extra_forbidden":
        known = [each for each in kind.model_fields if each != "no_warmup"]
        return ConfigError(
            f"{name}: {kind.__name__} does not have it{did_you_mean(key, known)} "
            f"Known: {', '.join(known)}."
        )
    if first["type"] == "missing":
        return ConfigError(f"{name} is missing, and {kind.__name__} needs it. Write a number.")
    message = str(first["msg"])
    more = ""
    if key == "warmup_num_steps":
        more = ' Write "auto" with optim.warmup_steps=0 for none.'
    return ConfigError(
        f"{name}={first['input']!r}: {message[:1].lower()}{message[1:]}, as in DeepSpeed.{more}"
    )
