"""Options that pipelines on fairscale and on DeepSpeed refuse."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from bigtrain.assembly.make_plan import make_plan
from bigtrain.errors import ConfigError
from bigtrain.job.load import job_from_keys

FP64 = {"train.precision": "fp64"}
FAIRSCALE = "gpipe_fairscale"


DEEPSPEED = "pipeline_deepspeed"


REFUSED = {
    "schedule=1f1b: fairscale's Pipe has gpipe only": (FAIRSCALE, 1, {"schedule": "1f1b"}),
    "and mesh.dp=2. Leave it out and set strategy.recompute=full": (
        *(FAIRSCALE, 2),
        {"checkpoint": "except_last", "strategy.replicate": "ddp"},
    ),
    "does not say on how many": (FAIRSCALE, 1, {"devices": None}),
    "engine=fairscale puts one stage on each device": (FAIRSCALE, 1, {"stages_per_rank": 2}),
    "at names 2 places, and strategy.cut.devices=2 has 1 cuts": (FAIRSCALE, 1, {"at": ["a", "b"]}),
    "zero shards the states of a model that is on one": (
        FAIRSCALE, 2, {"strategy.replicate.name": "zero", "strategy.replicate.engine": "torch"},
    ),
    "DeepSpeed's pipelines have 1f1b only": (DEEPSPEED, 2, {"schedule": "gpipe"}),
    "have one stage on each rank": (DEEPSPEED, 2, {"stages_per_rank": 2}),
    "which engine=fairscale does": (DEEPSPEED, 2, {"devices": 2}),
    "needs at least 2 ranks on the pp axis": (DEEPSPEED, 1, {}),
    "stages 2 and 3 would shard nothing": (
        f"{DEEPSPEED}_zero1", 4, {"strategy.replicate.stage": 2},
    ),
    "ZeRO on DeepSpeed updates in fp32": (f"{DEEPSPEED}_zero1", 4, FP64),
    "shards it in another way": (f"{DEEPSPEED}_zero1", 4, {"strategy.replicate.engine": "torch"}),
    "a DeepSpeed file is for a whole model": (
        f"{DEEPSPEED}_zero1", 4, {"strategy.replicate.config": "ds.json"},
    ),
    "keeps all its states on the device": (DEEPSPEED, 2, {"strategy.offload.optimizer": "disk"}),
}  # fmt: skip


@pytest.mark.parametrize("message", REFUSED)
def test_what_an_engine_cannot_do_is_refused(message: str, tmp_path, monkeypatch) -> None:
    strategy, ranks, keys = REFUSED[message]
    library = "fairscale" if strategy == FAIRSCALE else "deepspeed"
    if find_spec(library) is None:
        pytest.skip(f"{library} is missing")
    named = {k if "." in k else f"strategy.cut.{k}": v for k, v in keys.items()}
    monkeypatch.chdir(tmp_path)
    Path("ds.json").write_text('{"train_batch_size": 32}')
    with pytest.raises(ConfigError, match=message):
        make_plan(job_from_keys(strategy, {"train.global_batch_size": 32, **named}), ranks, "cpu")


@pytest.mark.parametrize("strategy", ["zero_bubble", "zbv", "dualpipev"])
def test_a_torch_that_splits_backward_passes_wrongly_is_refused(strategy, monkeypatch) -> None:
    monkeypatch.setattr("bigtrain.strategies.pipeline.on_torch.SPLITS_BACKWARD", False)
    monkeypatch.setattr("bigtrain.strategies.pipeline.on_torch.TORCH", (2, 12))
    message = r"torch 2\.12 counts some of them twice\. Run: pip install 'torch>=2\.13', or set str"
    keys = {"train.global_batch_size": 32, "train.micro_batch_size": 4}
    with pytest.raises(ConfigError, match=message):
        make_plan(job_from_keys(strategy, keys), 2, "cpu")
    make_plan(job_from_keys("interleaved_1f1b", keys), 2, "cpu")


def test_replicas_of_stages_on_several_gpus_are_refused(monkeypatch) -> None:
    monkeypatch.setattr("bigtrain.strategies.pipeline.device_count", lambda: 4)
    keys = {"strategy.cut.devices": 2, "strategy.replicate": "ddp"}
    job = job_from_keys("layer_split_devices", {"train.global_batch_size": 32, **keys})
    with pytest.raises(ConfigError, match=r"mesh\.dp=2 replicas can be averaged only.*mesh\.dp=1"):
        make_plan(job, 2, "cuda")
    assert make_plan(job, 2, "cpu").dp == 2


def actions_of(strategy: str, ranks: int, keys: dict[str, object], rank: int = 0) -> str:
    keys = {"train.global_batch_size": 6, "train.micro_batch_size": 2, **keys}
    plan = make_plan(job_from_keys(strategy, keys), ranks, "cpu")
    actions = plan.techniques["cut"].actions(plan, rank)
    return " ".join(f"{kind}{number}@{stage}" for stage, kind, number in actions.actions)


@pytest.mark.skipif(find_spec("fairscale") is None, reason="fairscale is missing")
def test_fairscale_takes_all_micro_batches_forward_then_back() -> None:
    # Each cycle contains all stages that have work.
    assert actions_of(FAIRSCALE, 1, {}) == (
        "F0@0 F1@0 F0@1 F2@0 F1@1 F2@1 B2@1 B1@1 B2@0 B0@1 B1@0 B0@0"
    )
    assert actions_of(FAIRSCALE, 1, {"strategy.cut.checkpoint": "always"}) == (
        "F0@0 F1@0 F0@1 F2@0 F1@1 F2@1 I2@1 W2@1 I1@1 I2@0 W1@1 W2@0 I0@1 I1@0 W0@1 W1@0 I0@0 W0@0"
    )


@pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is missing")
@pytest.mark.parametrize("rank", [0, 1])
def test_deepspeed_has_the_order_of_1f1b(rank: int) -> None:
    assert actions_of(DEEPSPEED, 2, {}, rank) == actions_of("1f1b", 2, {}, rank)
