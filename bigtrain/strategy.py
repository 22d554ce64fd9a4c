"""The seam every technique is written against: what it refuses, costs and does.

A `Strategy` is stateless: `check` before anything runs, `estimate` on a forecast, `apply` on an
`Assembly`. What comes out of the last `apply` is a live `Runner`, which does one optimizer step
over the micro-batches of a global batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor, nn

from bigtrain.config import Batch, Precision, Role, StrategyConfig
from bigtrain.data.loader import MicroBatch
from bigtrain.distributed import RunContext
from bigtrain.forecast import Forecast, Profile
from bigtrain.memory import Meter
from bigtrain.tasks import Loss

MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
"""Sharding and cutting change the parameters first, so the optimizer is made from what is left."""


@dataclass(frozen=True)
class Plan:
    """What will be run: the mesh, one technique per role, the batch, the precision."""

    strategy: StrategyConfig
    techniques: dict[Role, Strategy]
    pp: int
    dp: int
    tp: int
    batch: Batch
    precision: Precision
    device_type: str
    clip_norm: float | None = None
    sync_batchnorm: bool = False

    @property
    def world_size(self) -> int:
        """How many ranks the mesh has."""
        return self.pp * self.dp * self.tp


class Runner(Protocol):
    """A live model and optimizer."""

    module: nn.Module
    """The model as the user wrote it: plain parameter names."""
    optimizer: torch.optim.Optimizer

    def forward_backward(self, micro_batches: Sequence[MicroBatch]) -> float:
        """Run this rank's micro-batches of one global batch, forward and backward.

        Returns:
            The mean loss over the valid targets of the global batch, the same on every rank.

        Raises:
            NonFiniteError: the loss of some rank is not finite; the message names it.
        """

    def update(self) -> float:
        """Clip, step the optimizer and clear the gradients; return the global gradient norm."""

    def predict(self, micro_batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Return (output, targets) on the device, without gradients, in evaluation mode."""

    def state(self) -> dict[str, Tensor]:
        """The training state under plain names: `model.NAME`, `optimizer.NAME.KEY`."""

    def load_state(self, read: Callable[[str], Tensor], names: Iterable[str]) -> None:
        """Take the state over: `read(name)` gives each of `names` on the CPU."""

    def close(self) -> None:
        """Let go of what outlives the objects (hooks, files, threads)."""


@dataclass
class Assembly:
    """A run being put together; each technique changes what is its own.

    The fields from `module` on are what a technique may replace.
    """

    context: RunContext
    plan: Plan
    loss: Loss
    meter: Meter
    model: nn.Module
    """As the user wrote it, materialised: plain parameter names."""
    make_optimizer: MakeOptimizer
    module: nn.Module
    """What the forward pass calls: the model, or its wrapper."""
    sync: Callable[[bool], AbstractContextManager[object]] = lambda _last: nullcontext()
    """Entered around each micro-batch; told whether it is the last of the step."""
    keep_gradients: bool = False
    """Clear gradients by zeros, because their memory stays allocated anyhow."""
    runner: Callable[[Assembly], Runner] | None = None
    """Set by the one technique that owns the step; otherwise the plain loop does it."""


class Strategy(BaseModel):
    """One technique. Its fields are its options, typed and checked as any key of a job.

    Subclasses set `name`, `role` and `summary`, and override what is not neutral.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: ClassVar[str]
    role: ClassVar[Role]
    summary: ClassVar[str]
    """One line for lists: what is sharded, recomputed or moved, at what cost."""
    owns_step: ClassVar[bool] = False
    """Whether it replaces the micro-batch loop; a job has at most one such technique."""

    def check(self, plan: Plan) -> None:
        """Refuse what cannot work, before any process group exists.

        Raises:
            ConfigError: with the key, the numbers and the fix.
        """

    def estimate(self, forecast: Forecast, profile: Profile, plan: Plan) -> Forecast:  # noqa: ARG002
        """Turn the forecast of what came before into the forecast with this technique."""
        return forecast

    def apply(self, assembly: Assembly) -> None:
        """Change the assembly: wrap the module, shard its parameters, set the sync."""
