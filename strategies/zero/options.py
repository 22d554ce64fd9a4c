"""What a user may say about ZeRO, and what each engine of it provides."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

from pydantic import Field

from bigtrain.core.strategy import Assembly, Given, Plan, Strategy
from bigtrain.costs.forecast import Forecast, Profile
from bigtrain.costs.traffic import Traffic
from bigtrain.job.schema import Bytes, Role


class ZeroOptions(Strategy):
    """The keys of `strategy.replicate` where its name is `zero`."""

    role: ClassVar[Role] = "replicate"

    stage: int = Field(2, ge=0, le=3)
    """1 shards the optimizer state, 2 the gradients too, 3 the parameters too; 0 nothing."""
    engine: Literal["deepspeed", "torch", "fairscale"] = "deepspeed"
    """Whose implementation: DeepSpeed's, the one on PyTorch's own parts, or fairscale's."""
    bucket_size: Bytes | None = Field(None, gt=0)
    """Bytes that are communicated at once; left out, derived from the model's size."""
    shard_ranks: int | None = Field(None, ge=1)
    """Hybrid sharding (torch, stages 2 and 3): the states are sharded over so many neighbouring
    ranks, and replicated over the groups of them."""
    config: str | None = None
    """A DeepSpeed configuration file, taken as it is (`strategy.deepspeed` is the short form)."""

    def state_ranks(self, plan: Plan) -> int:
        """See `Strategy.state_ranks`."""
        return self.shard_ranks or plan.dp


class ZeroEngine:
    """What does a stage. Stateless; the neutral answers stand here."""

    owns_step: bool = False
    needs_group: bool = False
    """Whether it wants a process group for a single rank, too."""
    materializes: bool = False
    bf16_parameters: bool = False
    optimizer_gets: Given = "copies"
    final_gradients: bool = False
    whole_backward: bool = False
    own_offload: bool = False
    """Whether it moves state and parameters itself, as `strategy.offload` says."""
    moves_parameters: bool = False
    """Whether it keeps the parameters where `strategy.offload` says; its state goes to a home."""

    def check(self, options: ZeroOptions, plan: Plan) -> None:
        """Refuse, as `Strategy.check` does."""

    def check_shared(self, names: Sequence[str]) -> None:
        """Refuse, as `Strategy.check_shared` does."""

    def advise(
        self, options: ZeroOptions, forecast: Forecast, profile: Profile, plan: Plan
    ) -> str | None:
        """One line where it cannot help, as `Strategy.advise`."""
        raise NotImplementedError

    def estimate(
        self, options: ZeroOptions, forecast: Forecast, profile: Profile, plan: Plan
    ) -> Forecast:
        """One rank's memory, as `Strategy.estimate`."""
        raise NotImplementedError

    def traffic(self, options: ZeroOptions, profile: Profile, plan: Plan) -> tuple[Traffic, ...]:
        """What it exchanges and moves, as `Strategy.traffic`."""
        raise NotImplementedError

    def apply(self, options: ZeroOptions, assembly: Assembly) -> None:
        """Change the assembly, as `Strategy.apply`."""
        raise NotImplementedError
