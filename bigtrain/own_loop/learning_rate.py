"""The learning rate of each step: a number, a function of the step, or a scheduler of torch."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.optim.lr_scheduler import ReduceLROnPlateau

from bigtrain.errors import ConfigError
from bigtrain.optim.loop_optimizer import LoopOptimizer

RateArgument = float | Callable[[int], float | Sequence[float]] | Callable[[Any], Any]
"""A learning rate; a function of the step, counted from 0, that returns its rate or a list with a
rate for each parameter group; or a function of the optimizer that returns a scheduler."""
_FORMS = (
    "Give a number; a function of the step, as learning_rate=lambda step: 1e-3 * 0.99**step; or "
    "a function that makes a scheduler, as learning_rate=lambda optimizer: "
    "torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS)."
)


class LearningRate:
    """Sets the learning rate of each step in the optimizer of a custom loop.

    Args:
        argument: see `RateArgument`; None leaves the rate to the loop.
        optimizer: the loop's optimizer.

    Raises:
        ConfigError: `argument` is no `RateArgument`, or makes a `ReduceLROnPlateau`, which the loop
            has to step.
    """

    def __init__(self, argument: RateArgument | None, optimizer: LoopOptimizer) -> None:
        self._optimizer = optimizer
        self._function: Callable[[int], float | Sequence[float]] | None = None
        self.scheduler: Any = None
        if argument is None:
            return
        if isinstance(argument, (int, float)) and not isinstance(argument, bool):
            rate = float(argument)
            self._set(rate)
        elif callable(argument):
            self._take(argument)
        else:
            raise ConfigError(f"learning_rate: got {_shown(argument)}. {_FORMS}")

    def _take(self, argument: Callable[[Any], Any]) -> None:
        problem: Exception | None = None
        try:
            first = argument(0)
        except Exception as error:  # noqa: BLE001 - a function that makes a scheduler takes no number
            problem = error
        else:
            if _rates(first) is not None:
                self._function = argument
                self._set(first)
                return
        try:
            scheduler = argument(self._optimizer)
        except Exception as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(
                f"learning_rate: called with the step 0 it gave {_outcome(problem)}, and with the "
                f"optimizer {_outcome(error)}. {_FORMS}"
            ) from error
        if not (hasattr(scheduler, "step") and hasattr(scheduler, "state_dict")):
            raise ConfigError(f"learning_rate: it gave {_shown(scheduler)}. {_FORMS}")
        if isinstance(scheduler, ReduceLROnPlateau):
            raise ConfigError(
                "learning_rate: ReduceLROnPlateau steps by a figure of the loop, and not after "
                "every step. Make it on engine.optimizer, call its step(figure) after "
                "engine.evaluate, and engine.attach(scheduler=...) to save it."
            )
        self.scheduler = scheduler

    @property
    def sets(self) -> bool:
        """Whether this object changes the rate at every step: by a function or a scheduler."""
        return self._function is not None or self.scheduler is not None

    def before_step(self, step: int) -> None:
        """Set the rate of a step, counted from 0, if a function of the step defines it.

        Raises:
            ConfigError: the function returns neither a number nor a rate for each parameter group.
        """
        if self._function is not None:
            self._set(self._function(step))

    def after_step(self) -> None:
        """Step the scheduler, if there is one."""
        if self.scheduler is not None:
            self.scheduler.step()

    def _set(self, result: Any) -> None:
        groups, rates = self._optimizer.param_groups, _rates(result)
        if rates is None or len(rates) not in (1, len(groups)):
            raise ConfigError(
                f"learning_rate: it gave {_shown(result)} for {len(groups)} parameter groups. "
                "Return one number for all of them, or a list with one for each."
            )
        for number, group in enumerate(groups):
            group["lr"] = rates[number if len(rates) > 1 else 0]

    def state(self) -> dict[str, Any] | None:
        """Return the state of the scheduler for a checkpoint; None without a scheduler."""
        if self.scheduler is None:
            return None
        return {"kind": type(self.scheduler).__name__, "state": self.scheduler.state_dict()}

    def load_state(self, saved: Mapping[str, Any] | None, steps_done: int) -> str | None:
        """Load the state of the scheduler, if there is one.

        If no state was saved, or the state of another kind of scheduler, the scheduler is stepped
        to the position of the run.

        Args:
            saved: the result of `state` in a checkpoint.
            steps_done: the number of steps that the run has taken.

        Returns:
            A line on the stepping; None if the scheduler was not stepped.
        """
        if self.scheduler is None:
            return None
        kind = type(self.scheduler).__name__
        if saved is not None and saved["kind"] == kind:
            self.scheduler.load_state_dict(saved["state"])
            return None
        with warnings.catch_warnings():  # torch warns because the optimizer has not stepped
            warnings.simplefilter("ignore")
            for group in self._optimizer.param_groups:
                group["lr"] = group.get("initial_lr", group["lr"])
            for _ in range(steps_done):
                self.scheduler.step()
        before = "no schedule" if saved is None else f"the schedule of a {saved['kind']}"
        return (
            f"the checkpoint has {before}: this run's {kind} was stepped {steps_done} times, to "
            "the same position"
        )


def _rates(result: Any) -> list[float] | None:
    """Return a number, or a list of numbers, as a list of floats; None for anything else."""
    values = list(result) if isinstance(result, (list, tuple)) else [result]
    try:
        numbers = [float(value) for value in values if not isinstance(value, (str, bool))]
    except (TypeError, ValueError):
        return None
    return numbers if numbers and len(numbers) == len(values) else None


def _shown(value: Any) -> str:
    return (
        repr(value)
        if isinstance(value, (str, int, float, list, tuple))
        else f"a {type(value).__name__}"
    )


def _outcome(error: Exception | None) -> str:
    return "no number" if error is None else f"{type(error).__name__}: {error}"
