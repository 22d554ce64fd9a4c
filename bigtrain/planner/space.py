"""What there is to choose from: mesh, replicas, schedule, micro-batch, offload.

What blocks keep is no choice of its own: every candidate is given what costs the least time among
what fits (see `judge`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from bigtrain.errors import ConfigError
from bigtrain.job.schema import Job, StrategyConfig
from bigtrain.job.strategy_words import read_strategy
from bigtrain.schedules.orders import V_SHAPED_SCHEDULES

REPLICATE_PRESETS = (
    *("ddp", "zero1_torch", "fsdp_zero2", "fsdp"),
    *("zero1", "zero2", "zero3"),
    *("oss", "sharded_ddp"),
)
"""How replicas share their state: the presets of these names."""
PLANNED_ENGINES = ("torch", "deepspeed", "fairscale")
"""Whose implementations there are."""
PIPELINE_REPLICATE_PRESETS = ("ddp", "zero1_torch", "fsdp_zero2", "fsdp")
SEARCHED_SCHEDULES = (
    "1f1b",
    "gpipe",
    "interleaved_1f1b",
    "zbv_zero_bubble",
    "interleaved_zero_bubble",
)
"""Of the schedules those that differ in what they are good for: time, memory, or both."""
WORDS = {"zbv_zero_bubble": "zbv", "interleaved_zero_bubble": "zero_bubble"}
"""What presets call them, where that is not the schedule's own name."""
MAX_ROWS = 64
"""Rows of a micro-batch from which on more do not make a device faster."""


@cache
def replicate_options(preset: str) -> Mapping[str, Any]:
    """What a preset says of the replicate role."""
    found = read_strategy(preset, "plan").values["strategy"]
    options: dict[str, Any] = found["replicate"]
    # DeepSpeed is zero's own default, and a preset need not say it.
    return {"engine": "deepspeed", **options} if options["name"] == "zero" else options


@dataclass(frozen=True)
class Candidate:
    """One plan before it is checked."""

    pp: int
    dp: int
    replicate: str
    rows: int
    """Of a micro-batch."""
    micro_batches: int
    """Of a step, for each replica."""
    schedule: str | None = None
    stages_per_rank: int = 1
    offload: str = "device"
    """Where the optimizer's state is: device, cpu, disk."""
    shard_ranks: int | None = None
    """See `zero`; None for all replicas."""

    @property
    def engine(self) -> str:
        """Who shares the replicas' state."""
        return str(replicate_options(self.replicate).get("engine", "torch"))

    @property
    def zero_stage(self) -> int:
        """Of ZeRO; 0 where every replica has everything."""
        return int(replicate_options(self.replicate).get("stage", 0))

    @property
    def fully_sharded(self) -> bool:
        """Whether fully_shard does it.

        The parameters are the fp32 values, gathered in bf16, and backward passes stay whole.
        """
        return self.engine == "torch" and self.zero_stage > 1

    @property
    def stages(self) -> int:
        """Stages of the model."""
        return self.pp * self.stages_per_rank

    @property
    def label(self) -> str:
        """Its name in tables: words that `--strategy` takes; the mesh is not among them."""
        words = []
        if self.schedule is not None:
            stages = f"_{self.stages_per_rank}" if self.stages_per_rank > 2 else ""
            words.append(WORDS.get(self.schedule, self.schedule) + stages)
        if self.dp > 1 or self.pp == 1:
            hybrid = self.shard_ranks is not None
            words.append(f"hybrid_{self.shard_ranks}" if hybrid else self.replicate)
        if self.offload != "device":
            words.append(f"offload_{self.offload}")
        return "+".join(words)

    def strategy(self, **more: Any) -> StrategyConfig:
        """The section of a job."""
        replicate = dict(replicate_options(self.replicate))
        if self.shard_ranks is not None:
            replicate["shard_ranks"] = self.shard_ranks
        values: dict[str, Any] = {"name": "planned", "replicate": replicate, **more}
        if self.schedule is not None:
            cut: dict[str, Any] = {"name": "pipeline", "schedule": self.schedule}
            if self.schedule.startswith("interleaved"):
                cut["stages_per_rank"] = self.stages_per_rank
            values["cut"] = {**cut, **more.get("cut", {})}
        if self.offload != "device":
            values["offload"] = {"optimizer": self.offload}
        return StrategyConfig.model_validate(values)

    def job(self, job: Job, **more: Any) -> Job:
        """A copy of the job with this candidate's mesh, batch and strategy."""
        mesh = job.mesh.model_copy(update={"pp": self.pp, "dp": self.dp, "tp": 1})
        batch = {
            "global_batch_size": self.rows * self.micro_batches * self.dp,
            "micro_batch_size": self.rows,
            "accumulation_steps": None,
        }
        train = job.train.model_copy(update=batch)
        return job.model_copy(
            update={"mesh": mesh, "train": train, "strategy": self.strategy(**more)}
        )


@dataclass(frozen=True)
class SearchSpace:
    """What is open, and what is given."""

    devices: int
    per_node: int
    global_batch_size: int
    num_blocks: int
    """Blocks of the model: stages begin with one."""
    pp: int | None = None
    """Where it is given."""
    dp: int | None = None
    rows: int | None = None
    engines: tuple[str, ...] = ("torch", "deepspeed")
    fallback_tier: str | None = None
    """Where the optimizer's state may be instead, where nothing fits with it on the device."""

    def meshes(self) -> list[tuple[int, int]]:
        """(pp, dp) for all devices.

        Raises:
            ConfigError: none divides devices and batch as asked for.
        """
        found = [
            (pp, self.devices // pp)
            for pp in range(1, self.devices + 1)
            if self.devices % pp == 0
            and pp <= self.num_blocks + 1
            and self.pp in (None, pp)
            and self.dp in (None, -1, self.devices // pp)
        ]
        if not found:
            raise ConfigError(
                f"plan: --devices {self.devices} with mesh.pp={self.pp} and mesh.dp={self.dp}: "
                f"pp * dp has to be {self.devices}, and the model's {self.num_blocks} blocks make "
                f"at most {self.num_blocks + 1} stages. Leave mesh.pp or mesh.dp out."
            )
        dividing = [(pp, dp) for pp, dp in found if self.global_batch_size % dp == 0]
        if not dividing:
            least = min(dp for _, dp in found)
            raise ConfigError(
                f"plan: --global-batch-size {self.global_batch_size} cannot be dealt to the "
                f"replicas of any mesh: {self.devices} devices and at most {self.num_blocks + 1} "
                f"stages make {least} replicas at least. Use --global-batch-size "
                f"{-(-self.global_batch_size // least) * least}, or fewer --devices."
            )
        return dividing

    def candidates(self, place: str = "device") -> Iterator[Candidate]:
        """All of them; what a technique refuses is not left out yet.

        Args:
            place: of the optimizer's state.
        """
        for pp, dp in self.meshes():
            for rows in self._rows(self.global_batch_size // dp):
                steps = self.global_batch_size // dp // rows
                for replicate, shards in self._replicate(pp, dp):
                    for schedule, per_rank in self._schedules(pp, steps):
                        given = (pp, dp, replicate, rows, steps, schedule, per_rank)
                        one = Candidate(*given, place, shards)
                        if schedule != "interleaved_zero_bubble" or not one.fully_sharded:
                            yield one  # with whole backward passes it is interleaved_1f1b

    def _rows(self, share: int) -> list[int]:
        if self.rows is not None:
            return [self.rows] if share % self.rows == 0 else []
        return [n for n in range(1, min(share, MAX_ROWS) + 1) if share % n == 0 and _is_round(n)]

    def _replicate(self, pp: int, dp: int) -> Iterator[tuple[str, int | None]]:
        if dp == 1:
            yield "single", None
            return
        for name in REPLICATE_PRESETS if pp == 1 else PIPELINE_REPLICATE_PRESETS:
            if replicate_options(name).get("engine", "torch") in self.engines:
                yield name, None
        if self.per_node < dp and dp % self.per_node == 0 and pp == 1:
            yield "fsdp", self.per_node  # hybrid: gathered inside of a node

    def _schedules(self, pp: int, micro_batches: int) -> Iterator[tuple[str | None, int]]:
        if pp == 1:
            yield None, 1
            return
        for schedule in SEARCHED_SCHEDULES:
            if schedule.startswith("interleaved"):
                for per_rank in (2, 4):
                    if pp * per_rank <= self.num_blocks + 1 and micro_batches >= pp:
                        yield schedule, per_rank
            elif schedule in V_SHAPED_SCHEDULES:
                if 2 * pp <= self.num_blocks + 1:
                    yield schedule, 2
            else:
                yield schedule, 1


def _is_round(number: int) -> bool:
    """Powers of two, and three times them: what kernels are quick with, and divides batches."""
    while number % 2 == 0:
        number //= 2
    return number in (1, 3)
