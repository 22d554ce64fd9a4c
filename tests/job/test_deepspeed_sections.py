"""Every key of DeepSpeed has a verdict: passed on, compared with the job, reported, or refused."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

import pytest
from support.deepspeed_files import write_config

from bigtrain.errors import ConfigError
from bigtrain.job import deepspeed_sections as tables
from bigtrain.job.deepspeed_json import deepspeed_config
from bigtrain.job.deepspeed_sections import engine_part, unused_sections
from bigtrain.strategies.deepspeed_adapter import load_deepspeed

needs_deepspeed = pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is missing")
KNOWN = {*tables.COMPARED, *tables.PASSED, *tables.NOT_USED, *tables.REFUSED}
ZERO_KNOWN = {*tables.ZERO_PASSED, *tables.ZERO_NOT_USED, *tables.ZERO_REFUSED}
OLD = {"bfloat16", "cpu_offload", "cpu_offload_param", "cpu_offload_use_pin_memory"}
"""Names that DeepSpeed replaces by current ones before the tables are used."""


class Asked(dict[str, Any]):
    """A configuration that records the keys that are looked up."""

    def __init__(self, values: dict[str, Any]) -> None:
        super().__init__(values)
        self.names: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        self.names.add(key)
        return super().get(key, default)

    def __contains__(self, key: object) -> bool:
        self.names.add(str(key))
        return super().__contains__(key)

    def keys(self) -> Any:
        return self  # `in` then calls `__contains__`

    def __copy__(self) -> Asked:
        return self


@needs_deepspeed
def test_every_key_that_deepspeed_looks_for_has_a_verdict():
    load_deepspeed("cpu")
    asked = Asked({"train_micro_batch_size_per_gpu": 1, "optimizer": {}, "scheduler": {}})
    import_module("deepspeed.runtime.config").DeepSpeedConfig(asked)
    assert {"aio", "autotuning", "flops_profiler", "activation_checkpointing"} < asked.names
    assert asked.names - KNOWN - OLD == set()


@needs_deepspeed
def test_every_key_of_its_sections_has_a_verdict():
    load_deepspeed("cpu")

    def names(module: str, kind: str) -> set[str]:
        fields = getattr(import_module(f"deepspeed.runtime.{module}"), kind).model_fields
        return {field.alias or name for name, field in fields.items()}

    zero = names("zero.config", "DeepSpeedZeroConfig")
    assert zero - ZERO_KNOWN - OLD == set()
    for section, kind in (
        ("offload_param", "DeepSpeedZeroOffloadParamConfig"),
        ("offload_optimizer", "DeepSpeedZeroOffloadOptimizerConfig"),
    ):
        known = tables._PARTS[f"zero_optimization.{section}"]
        assert names("zero.offload_config", kind) == known
    assert names("precision_config", "DeepSpeedBF16Config") == tables._PARTS["bf16"]


def test_no_key_has_two_verdicts():
    for groups in (
        (tables.COMPARED, tables.PASSED, tables.NOT_USED, tables.REFUSED),
        (tables.ZERO_PASSED, tables.ZERO_NOT_USED, tables.ZERO_REFUSED),
    ):
        assert sum(map(len, groups)) == len(set().union(*groups))


SWITCHED_ON: dict[str, Any] = {
    "disable_allgather": True,
    "gradient_allreduce_op": "sum",
    "managed_gradient_accumulation": False,
    "sequence_parallel_size": 2,
    "sparse_attention": {"mode": "fixed"},
    "sparse_gradients": True,
    "graph_harvesting": True,
    "tensor_parallel": {"autotp_size": 4},
    "weight_quantization": {"quantized_initialization": {"num_bits": 8}},
    "compression_training": {"head_pruning": {"shared_parameters": {"enabled": True}}},
}
SWITCHED_OFF: dict[str, Any] = {
    "disable_allgather": False,
    "gradient_allreduce_op": "mean",
    "managed_gradient_accumulation": True,
    "sequence_parallel_size": 1,
    "sparse_attention": {},
    "sparse_gradients": False,
    "graph_harvesting": "false",
    "tensor_parallel": {"autotp_size": 1, "tp": {"tp_size": 1}},
    "weight_quantization": None,
    "compression_training": {"head_pruning": {"shared_parameters": {"enabled": False}}},
}


@pytest.mark.parametrize("key", tables.REFUSED)
def test_what_is_not_done_is_refused_where_it_is_on_and_let_go_where_it_is_off(key, tmp_path):
    on = SWITCHED_ON.get(key, {"enabled": True})
    with pytest.raises(
        ConfigError, match=rf"ds.json: {key}(=\S+)? is not supported\. \w+"
    ) as refusal:
        deepspeed_config(write_config(tmp_path, **{key: on}))
    assert "\n" not in str(refusal.value)
    off = SWITCHED_OFF.get(key, {"enabled": False})
    config = deepspeed_config(write_config(tmp_path, **{key: off}))
    assert key not in engine_part(config)
    assert unused_sections(config) == []


ZERO_ON: dict[str, Any] = {
    "mics_shard_size": 4,
    "zero_hpz_partition_size": 8,
    "zenflow": {"topk_ratio": 0.1},
    "zeropp_loco_param": {"err_beta": 0.8, "enabled": True},
}


@pytest.mark.parametrize("key", tables.ZERO_REFUSED)
def test_so_is_what_zero_does_otherwise(key, tmp_path):
    zero = {"stage": 3, key: ZERO_ON.get(key, True)}
    with pytest.raises(ConfigError, match=rf"zero_optimization.{key}(=\S+)? is not supported\. "):
        deepspeed_config(write_config(tmp_path, zero_optimization=zero))
    off = -1 if key == "mics_shard_size" else None if key == "zenflow" else False
    config = deepspeed_config(write_config(tmp_path, zero_optimization={"stage": 3, key: off}))
    assert key not in engine_part(config)["zero_optimization"]


OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "a typing error": (
        {"gradient_clip": 1.0},
        "gradient_clip is not a key of DeepSpeed, did you mean 'gradient_clipping'",
    ),
    "in a section": (
        {"zero_optimization": {"stage": 2, "offload_optimizer": {"devise": "cpu"}}},
        "zero_optimization.offload_optimizer.devise is not a key .* did you mean 'device'",
    ),
    "no section": ({"optimizer": "AdamW"}, "optimizer=AdamW is not an object. Write one"),
    "no parameters": (
        {"scheduler": {"type": "WarmupLR", "params": [1]}},
        r"scheduler.params=\[1\] is not an object",
    ),
    "fp16 as a word": ({"fp16": {"enabled": "True"}}, "fp16.enabled=true: fp16 is not supported"),
    "bf16 without masters": (
        {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}},
        "bf16.bf16_master_weights_and_grads=true is not supported. Use optim.master_weights",
    ),
    "a part of the state": (
        {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}},
        "offload_optimizer.ratio=0.5 is not supported. Leave it out",
    ),
}


@pytest.mark.parametrize("case", OTHERS)
def test_other_keys_are_refused_by_name(case, tmp_path):
    changes, words = OTHERS[case]
    with pytest.raises(ConfigError, match=words) as refusal:
        deepspeed_config(write_config(tmp_path, **changes))
    assert "\n" not in str(refusal.value)


def test_older_files_mean_the_same_in_todays_words(tmp_path):
    old = {"stage": 2, "cpu_offload": True, "cpu_offload_use_pin_memory": True}
    config = deepspeed_config(
        write_config(tmp_path, zero_optimization=old, bfloat16={"enabled": True}, bf16=None)
    )
    assert config["zero_optimization"] == {
        "stage": 2,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
    }
    assert config["bf16"] == {"enabled": True}
    short = {"stage": 3, "prefetch_bucket_size": 7, "max_live_parameters": 9}
    config = deepspeed_config(write_config(tmp_path, zero_optimization=short))
    assert config["zero_optimization"] == {
        "stage": 3,
        "stage3_prefetch_bucket_size": 7,
        "stage3_max_live_parameters": 9,
    }
    assert "_comment" not in deepspeed_config(write_config(tmp_path, _comment="for people"))
