"""The cases of the forecasts: presets on nets, precisions and ranks, and keys that
change memory.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from golden import product


class Case(NamedTuple):
    """One job; the forecast of every rank is recorded."""

    net: str
    strategy: str
    ranks: int
    keys: dict[str, Any]
    share: float | None = None

    @property
    def name(self) -> str:
        text = " ".join(f"{key}={value}" for key, value in self.keys.items())
        text += "" if self.share is None else f" budget {self.share}"
        return f"{self.net} {self.strategy} x{self.ranks} {text}"


PRESETS = (
    *("1f1b", "1f1b_checkpointing", "1f1b_ddp", "1f1b_fsdp", "1f1b_zero1", "1f1b_zero2"),
    *("ddp", "ddp_checkpointing", "ddp_offload_disk", "dualpipev", "fairscale_fsdp"),
    *("fsdp", "fsdp_checkpointing", "fsdp_zero2", "gpipe", "gpipe_fairscale", "hybrid"),
    *("interleaved_1f1b", "layer_split", "layer_split_devices", "oss"),
    *("pipeline_deepspeed", "pipeline_deepspeed_zero1", "sharded_ddp", "single"),
    *("single_activations_disk", "single_checkpointing", "single_offload_cpu"),
    *("single_offload_disk", "single_selective", "zbv", "zero1", "zero1_torch"),
    *("zero1_torch_offload_disk", "zero2", "zero2_checkpointing", "zero2_offload", "zero3"),
    *("zero3_checkpointing", "zero3_offload", "zero_bubble"),
)
"""The presets whose forecasts are recorded; add a new one if it is a separate kind of run."""
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "gpt": {},
    "tied": {"optim.clip_norm": 1.0},
    "conv": {"optim.name": "sgd", "optim.momentum": 0.9},
    "odd": {},
}
WHOLE = ("single", "ddp", "fsdp", "zero1_torch", "1f1b")
RECOMPUTE, OFFLOAD, REPLICATE = "strategy.recompute", "strategy.offload", "strategy.replicate"
LOW = {"train.precision": "bf16", "optim.master_weights": False}
STEPS = {"train.micro_batch_size": 2}


def presets() -> list[Case]:
    """Every preset on every net, in both precisions, on 1, 2 and 4 ranks."""
    return [
        Case(net, strategy, ranks, {"train.global_batch_size": 16, "train.precision": bits, **keys})
        for net, keys in OPTIMIZERS.items()
        for strategy in PRESETS
        for bits in ("fp32", "bf16")
        for ranks in (1, 2, 4)
    ]


def changed() -> list[Case]:
    """Presets with one changed key."""
    again: list[dict[str, Any]] = [
        {f"{RECOMPUTE}.mode": "selective"},
        {f"{RECOMPUTE}.every": 2},
        {f"{RECOMPUTE}.layers": ["layers.1", "layers.3"]},
        {f"{RECOMPUTE}.blocks": {"layers.0": "selective", "layers.2": "full"}},
        {f"{RECOMPUTE}.mode": "full", **STEPS},
    ]
    moved: list[dict[str, Any]] = [
        {f"{OFFLOAD}.optimizer": "disk"},
        {f"{OFFLOAD}.optimizer": "cpu", **STEPS},
        {f"{OFFLOAD}.activations": "disk"},
        {f"{OFFLOAD}.activations": "disk", f"{RECOMPUTE}.mode": "full"},
        {f"{OFFLOAD}.parameters": "cpu"},
    ]
    updated: list[dict[str, Any]] = [
        {"optim.release_gradients": True},
        {"optim.release_gradients": True, **STEPS},
        {"optim.clip_norm": 0.5},
        {"optim.name": "adafactor"},
        {"optim.name": "adamw_8bit"},
        {"optim.name": "adamw_4bit"},
        {"optim.state": "bf16"},
        {"optim.implementation": "foreach"},
        {"train.precision": "fp64"},
        LOW,
        {**LOW, "optim.release_gradients": True},
        {**LOW, **STEPS},
    ]
    nets = [
        ("tied", strategy, keys)
        for strategy in (*WHOLE, "zero2", "zero_bubble")
        for keys in (*again, *moved, *updated)
    ]
    cases = [Case(net, s, _ranks(s), {"train.global_batch_size": 8, **k}) for net, s, k in nets]
    return [*cases, *_accumulated(), *_budgets(), *_options()]


def _ranks(strategy: str) -> int:
    return 1 if strategy.startswith("single") else 2


def _accumulated() -> list[Case]:
    """Every preset with several micro-batches, and with saved matrix products."""
    return [
        Case("tied", strategy, _ranks(strategy), {"train.global_batch_size": 24, **keys})
        for strategy in PRESETS
        for keys in (STEPS, {f"{RECOMPUTE}.mode": "selective"})
    ]


def _budgets() -> list[Case]:
    """Budgets as shares of the peak without one; the last is below the smallest reachable peak."""
    plain = {"train.global_batch_size": 64}
    moved = {**plain, f"{OFFLOAD}.activations": "disk"}
    low = {**plain, "train.precision": "bf16"}
    cases = [
        Case(net, strategy, _ranks(strategy), {**plain, **more}, share)
        for net, more in OPTIMIZERS.items()
        for strategy in ("single", "fsdp", "1f1b")
        for share in (1.0, 0.9, 0.7, 0.2)
    ]
    cases += [
        Case("tied", s, _ranks(s), k, share)
        for s, k in (
            *(("single", moved), ("single", low), ("ddp", plain), ("zero1_torch", plain)),
            *(("gpipe", plain), ("zero2", plain), ("zero_bubble", plain)),
        )
        for share in (0.9, 0.75)
    ]
    return cases


def _options() -> list[Case]:
    """Options of single techniques, and a model without a forecast."""
    some: list[tuple[str, int, dict[str, Any]]] = [
        ("ddp", 2, {f"{REPLICATE}.bucket_size": "4KiB"}),
        ("ddp", 2, {f"{REPLICATE}.compress": "fp16"}),
        ("ddp", 2, {f"{REPLICATE}.compress": "powersgd"}),
        ("ddp", 2, {f"{REPLICATE}.static_graph": True}),
        ("hybrid", 4, {f"{REPLICATE}.shard_ranks": 4}),
        ("1f1b", 3, {}),
        ("1f1b", 2, {"strategy.cut.at": ["layers.4"]}),
        ("1f1b", 2, {"strategy.cut.memory": "1MiB"}),
        ("1f1b", 2, {"strategy.cut.checkpoint": "except_last"}),
        ("gpipe", 2, {"strategy.cut.checkpoint": "except_last"}),
        ("gpipe", 2, {"strategy.cut.checkpoint": "always"}),
        ("1f1b", 2, {"strategy.cut.schedule": "naive"}),
        ("interleaved_1f1b", 2, {"strategy.cut.stages_per_rank": 3}),
        ("zero_bubble", 2, {"strategy.cut.stages_per_rank": 3}),
        ("1f1b_ddp", 4, {"train.accumulation_steps": 6}),
        ("1f1b_fsdp", 4, {"train.accumulation_steps": 6, "train.precision": "bf16"}),
        ("1f1b_fsdp", 4, {f"{RECOMPUTE}.mode": "full"}),
        ("layer_split_devices", 1, {"strategy.cut.devices": 3}),
    ]
    return [
        Case(net, strategy, ranks, {"train.global_batch_size": 24, **keys})
        for net, strategy, ranks, keys in [
            *((net, *case) for net in ("tied", "odd", "conv") for case in some),
            *(
                ("looks", preset, _ranks(preset), {})
                for preset in ("single", "ddp", "fsdp", "1f1b")
            ),
            ("looks", "single", 1, {f"{RECOMPUTE}.mode": "full"}),
            ("looks", "single", 1, {RECOMPUTE: {"budget": 10**6}}),
        ]
    ]


def cases() -> dict[str, Case]:
    """All cases by name."""
    return {case.name: case for case in [*presets(), *changed()]}


def compute(case: Case) -> Any:
    """The forecast of a case before it runs."""
    return product.rank_forecasts(*case)
