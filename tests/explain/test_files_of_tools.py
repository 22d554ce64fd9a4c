"""The files of four tools: their words, and their faults; no model is described."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from bigtrain.errors import ConfigError
from bigtrain.explain.read_request import read_request
from bigtrain.explain.request import ToolRequest
from bigtrain.explain.settle import command, settle_batch, settle_ranks, settle_strategy
from bigtrain.explain.tools import accelerate_file, axolotl_keys, trl_file
from bigtrain.explain.tools.key_rules import fits
from bigtrain.machine.cluster import load_cluster

DEEPSPEED: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 2},
}
ACCELERATE: dict[str, Any] = {
    "compute_environment": "LOCAL_MACHINE",
    "distributed_type": "FSDP",
    "fsdp_config": {
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        "fsdp_version": 2,
    },
    "mixed_precision": "bf16",
    "num_machines": 1,
    "num_processes": 8,
    "use_cpu": False,
}
AXOLOTL: dict[str, Any] = {
    "base_model": "some/model",
    "micro_batch_size": 2,
    "gradient_accumulation_steps": 4,
    "sequence_len": 2048,
    "optimizer": "adamw_torch_fused",
    "learning_rate": "2e-4",
    "bf16": "auto",
    "flash_attention": True,
}
ADAPTER = {"adapter": "lora", "lora_r": 16, "lora_alpha": 32, "lora_target_linear": True}
TRL: dict[str, Any] = {
    "model_name_or_path": "some/model",
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 4,
    "max_length": 2048,
    "dtype": "float32",
}


def written(folder: Path, values: dict[str, Any], **changes: Any) -> str:
    """Write a file with some keys changed; None dotted_leaves a key out."""
    changed = {**values, **changes}
    changed = {key: value for key, value in changed.items() if value is not None}
    is_json = "zero_optimization" in values
    path = folder / ("ds.json" if is_json else "file.yaml")
    text = json.dumps(changed, indent=1) if is_json else yaml.safe_dump(changed, sort_keys=False)
    path.write_text(text)
    return str(path)


def read(folder: Path, values: dict[str, Any], **changes: Any) -> ToolRequest:
    return read_request(written(folder, values, **changes))


def asked(request: ToolRequest, key: str) -> Any:
    return request.keys[key].value


def found(request: ToolRequest, kind: str) -> list[str]:
    return [finding.line(request.file.path) for finding in request.findings if finding.kind == kind]


@pytest.mark.parametrize(
    ("zero", "words"),
    [
        ({"stage": 0}, "ddp"),
        ({"stage": 1}, "zero1"),
        ({"stage": 2, "offload_optimizer": {"device": "cpu"}}, "zero2+offload_cpu"),
        ({"stage": 2, "cpu_offload": True}, "zero2+offload_cpu"),
        ({"stage": 2, "offload_param": {"device": "cpu"}}, "zero2"),
        (
            {
                "stage": 3,
                "offload_optimizer": {"device": "cpu"},
                "offload_param": {"device": "cpu"},
            },
            "zero3+offload_cpu+offload_parameters_cpu",
        ),
    ],
)
def test_the_stage_of_deepspeed_is_a_word(tmp_path, zero, words):
    request = read(tmp_path, DEEPSPEED, zero_optimization=zero)
    assert (request.tool, request.words) == ("DeepSpeed", words)
    assert asked(request, "train.precision") == "bf16"
    assert asked(request, "train.micro_batch_size") == 4


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "fsdp"),
        ({"fsdp_reshard_after_forward": False}, "fsdp_zero2"),
        ({"fsdp_version": 1, "fsdp_sharding_strategy": "SHARD_GRAD_OP"}, "fsdp_zero2"),
        ({"fsdp_version": 1, "fsdp_sharding_strategy": 3}, "ddp"),
        ({"fsdp_version": 1, "fsdp_sharding_strategy": "HYBRID_SHARD"}, "hybrid"),
        ({"fsdp_offload_params": True}, "fsdp+offload_cpu+offload_parameters_cpu"),
        ({"fsdp_activation_checkpointing": True}, "fsdp+full"),
    ],
)
def test_the_options_of_fsdp_are_words(tmp_path, options, words):
    section = {**ACCELERATE["fsdp_config"], **options}
    assert read(tmp_path, ACCELERATE, fsdp_config=section).words == words


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"distributed_type": "NO", "num_processes": None}, "single"),
        ({"distributed_type": "MULTI_GPU"}, "ddp"),
        ({"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 3}}, "zero3"),
        (
            {
                "distributed_type": "DEEPSPEED",
                "deepspeed_config": {"zero_stage": 2, "offload_optimizer_device": "cpu"},
            },
            "zero2+offload_cpu",
        ),
        ({"parallelism_config": {"parallelism_config_tp_size": 2}}, "fsdp+tensor"),
        (
            {
                "parallelism_config": {
                    "parallelism_config_dp_replicate_size": 2,
                    "parallelism_config_dp_shard_size": 4,
                }
            },
            "hybrid_4",
        ),
        (
            {
                "distributed_type": "MEGATRON_LM",
                "megatron_lm_config": {"megatron_lm_tp_degree": 2, "megatron_lm_pp_degree": 4},
            },
            "1f1b+tensor",
        ),
    ],
)
def test_the_kinds_of_accelerate_are_words(tmp_path, changes, words):
    if "parallelism_config" not in changes:
        changes = {"fsdp_config": None, **changes}
    assert read(tmp_path, ACCELERATE, **changes).words == words


def test_axolotl_asks_for_adapters_and_a_length(tmp_path):
    request = read(tmp_path, AXOLOTL, **ADAPTER, gradient_checkpointing=True)
    assert request.words == "ddp+full"
    assert request.model is not None
    assert request.model.value == "some/model"
    assert asked(request, "model.lora.rank") == 16
    assert asked(request, "model.lora.targets") == ["all-linear"]
    assert asked(request, "optim.lr") == 2e-4  # YAML reads 2e-4 as text
    assert asked(request, "data.args.sequence_length") == 2048
    assert asked(request, "model.chunked_loss") is False
    assert not request.findings
    assert "optim.master_weights" not in request.keys


def test_axolotl_trains_all_parameters_in_bf16_without_masters(tmp_path):
    assert asked(read(tmp_path, AXOLOTL), "optim.master_weights") is False
    sharded = read(tmp_path, AXOLOTL, fsdp_version=2, fsdp_config={"reshard_after_forward": True})
    assert sharded.words == "fsdp"
    assert "optim.master_weights" not in sharded.keys


def test_trl_recomputes_and_computes_in_bf16_by_default(tmp_path):
    request = read(tmp_path, TRL)
    assert (request.tool, request.words) == ("TRL", "ddp+full")
    assert request.keys["train.precision"].why == "TRL's default"
    assert asked(request, "model.chunked_loss") is True
    assert asked(read(tmp_path, TRL, loss_type="nll"), "model.chunked_loss") is False
    assert read(tmp_path, TRL, gradient_checkpointing=False).words == "ddp"
    profile = read(tmp_path, TRL, accelerate_config="zero3")
    assert profile.words == "zero3+full"
    assert profile.ranks is not None
    assert profile.ranks.value == 8


def test_a_file_that_is_named_by_another_is_read(tmp_path):
    """Beside the file that names it, with values that the trainer fills in."""
    auto = {
        "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto"},
        "bf16": {"enabled": "auto"},
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
    }
    written(tmp_path, auto)
    assert read(tmp_path, AXOLOTL, deepspeed="ds.json").words == "zero3"
    assert not found(read(tmp_path, AXOLOTL, deepspeed="ds.json"), "no effect")
    assert read(tmp_path, TRL, deepspeed="ds.json").words == "zero3+full"
    config = {"deepspeed_config_file": "ds.json"}
    changes = {"distributed_type": "DEEPSPEED", "deepspeed_config": config, "fsdp_config": None}
    (tmp_path / "acc").mkdir()
    written(tmp_path / "acc", auto)
    inner = written(tmp_path / "acc", ACCELERATE, **changes)
    assert read_request(inner).words == "zero3"
    assert read(tmp_path, TRL, accelerate_config=inner).words == "zero3+full"


@pytest.mark.parametrize(
    ("values", "changes", "kind", "said"),
    [
        # DeepSpeed: keys that the stage does not read, and what a trainer would fill in
        (
            DEEPSPEED,
            {"zero_optimization": {"stage": 0, "overlap_comm": True}},
            "no effect",
            "overlap_comm=true: it is for stages 1, 2 and 3, and the stage is 0. Leave it out.",
        ),
        (
            DEEPSPEED,
            {"zero_optimization": {"stage": 2, "stage3_max_live_parameters": 1e9}},
            "no effect",
            "stage3_max_live_parameters=1e+09: it is for stage 3, and the stage is 2.",
        ),
        (
            DEEPSPEED,
            {"zero_optimization": {"stage": 2, "max_live_parameters": 1e9}},
            "no effect",
            "zero_optimization.max_live_parameters=1e+09: it is for stage 3",
        ),
        (
            DEEPSPEED,
            {"zero_optimization": {"stage": 3, "round_robin_gradients": True}},
            "no effect",
            "round_robin_gradients=true: it is for stages 1 and 2, and the stage is 3.",
        ),
        (
            DEEPSPEED,
            {"gradient_accumulation_steps": "auto"},
            "no effect",
            "gradient_accumulation_steps=auto: auto is filled in by the Trainer of transformers",
        ),
        (DEEPSPEED, {"fp16": {"enabled": False, "loss_scale": 0}}, "no effect", "fp16 is off."),
        (
            DEEPSPEED,
            {"fp16": {"enabled": True}},
            "contradiction",
            "bf16.enabled=true, fp16.enabled=true: there is one precision",
        ),
        (
            DEEPSPEED,
            {"bf16": None, "fp16": {"enabled": True}},
            "not forecast",
            "fp16 and its loss scaling have no counterpart; it is forecast as bf16",
        ),
        (
            DEEPSPEED,
            {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}},
            "not forecast",
            "it is forecast as the host's memory",
        ),
        (
            DEEPSPEED,
            {"zero_optimization": {"stage": 3, "zero_quantized_weights": True}},
            "not forecast",
            "zero_quantized_weights=true: it has no counterpart. Leave it out",
        ),
        (
            DEEPSPEED,
            {"zero_optimization": {"stage": 2, "overlap_com": True}},
            "not forecast",
            "it is not a key of DeepSpeed. Did you mean 'overlap_comm'?",
        ),
        (
            DEEPSPEED,
            {"optimizer": {"type": "Lamb"}},
            "not forecast",
            "optimizer.type=Lamb: optimizer.type=Lamb is not supported.",
        ),
        # Accelerate
        (
            ACCELERATE,
            {"distributed_type": "MULTI_GPU"},
            "no effect",
            "it is for distributed_type: FSDP",
        ),
        (
            ACCELERATE,
            {"fsdp_config": {"fsdp_version": 2, "fsdp_sharding_strategy": "FULL_SHARD"}},
            "no effect",
            "it is for FSDP 1; fsdp_reshard_after_forward decides it",
        ),
        (
            ACCELERATE,
            {"fsdp_config": {"fsdp_version": 2, "fsdp_forward_prefetch": True}},
            "contradiction",
            "FSDP 2 has no such option",
        ),
        (
            ACCELERATE,
            {
                "fsdp_config": {
                    "fsdp_version": 1,
                    "fsdp_cpu_ram_efficient_loading": True,
                    "fsdp_sync_module_states": False,
                }
            },
            "contradiction",
            "only rank 0 would get the weights",
        ),
        (
            ACCELERATE,
            {"fsdp_config": {"fsdp_offload_params": False, "offload_params": False}},
            "no effect",
            "it is the same option twice",
        ),
        (
            ACCELERATE,
            {"fsdp_config": {"fsdp_offload_params": False, "offload_params": True}},
            "contradiction",
            "it is one option with two values",
        ),
        (
            ACCELERATE,
            {"fsdp_config": {"fsdp_version": 2, "fsdp_offload_params": False}},
            "no effect",
            "fsdp_offload_params=false: it is what Accelerate does without it",
        ),
        (
            ACCELERATE,
            {"fsdp_config": {"fsdp_auto_wrap_policy": "NO_WRAP"}},
            "not forecast",
            "the whole model is gathered at once",
        ),
        (
            ACCELERATE,
            {"deepspeed_config": {"zero_stage": 2}},
            "contradiction",
            "FSDP and DeepSpeed shard the same states",
        ),
        (
            ACCELERATE,
            {
                "distributed_type": "DEEPSPEED",
                "deepspeed_config": {"zero_stage": 2, "zero3_init_flag": True},
            },
            "no effect",
            "zero3_init_flag=true: it is for stage 3",
        ),
        (
            ACCELERATE,
            {"parallelism_config": {"parallelism_config_cp_size": 4}},
            "not forecast",
            "a sequence that is spread over ranks",
        ),
        (ACCELERATE, {"mixed_precison": "bf16"}, "not forecast", "Did you mean 'mixed_precision'?"),
        # axolotl
        (
            AXOLOTL,
            {"bf16": True, "fp16": True},
            "contradiction",
            "bf16=true, fp16=true: there is one precision",
        ),
        (
            AXOLOTL,
            {"flash_attention": None, "sample_packing": True},
            "contradiction",
            "packed documents see each other. Write flash_attention: true",
        ),
        (AXOLOTL, {"sdp_attention": True}, "contradiction", "there is one attention"),
        (AXOLOTL, {"lora_r": 8}, "no effect", "adapter is not set"),
        (AXOLOTL, {"load_in_4bit": True}, "contradiction", "quantised weights cannot be trained"),
        (
            AXOLOTL,
            {**ADAPTER, "adapter": "qlora"},
            "contradiction",
            "load_in_4bit is not on. Write load_in_4bit: true",
        ),
        (
            AXOLOTL,
            {**ADAPTER, "load_in_4bit": True, "load_in_8bit": True},
            "contradiction",
            "the weights have one dtype",
        ),
        (
            AXOLOTL,
            {"deepspeed": {"zero_optimization": {"stage": 2}}, "fsdp": ["full_shard"]},
            "contradiction",
            "both shard the same states",
        ),
        (
            AXOLOTL,
            {
                **ADAPTER,
                "load_in_4bit": True,
                "deepspeed": {"zero_optimization": {"stage": 3}},
            },
            "contradiction",
            "those in 4 bits are stored as uint8, whole on each rank",
        ),
        (
            AXOLOTL,
            {"deepspeed": {"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": 8}},
            "contradiction",
            "deepspeed.train_micro_batch_size_per_gpu=8, micro_batch_size=2: axolotl has another",
        ),
        (
            AXOLOTL,
            {"optimizer": "adamw_bnb_8bit", "fsdp_version": 2, "fsdp_config": {"version": 2}},
            "contradiction",
            "Write optimizer: adamw_torch_8bit.",
        ),
        (
            AXOLOTL,
            {"fsdp": ["full_shard", "offload"], "fsdp_config": {"offload_params": False}},
            "contradiction",
            "offload is on in one of them and off in the other",
        ),
        (
            AXOLOTL,
            {"warmup_steps": 10, "warmup_ratio": 0.1},
            "contradiction",
            "both say how long the warm-up is",
        ),
        (
            AXOLOTL,
            {"gradient_checkpointing_kwargs": {"use_reentrant": False}},
            "no effect",
            "gradient_checkpointing is not on",
        ),
        (AXOLOTL, {"max_steps": 10, "num_epochs": 2}, "no effect", "max_steps decides the length"),
        (AXOLOTL, {"rl": "dpo"}, "not forecast", "preference training runs a second model"),
        (AXOLOTL, {"optimizer": "muon"}, "not forecast", "it is forecast as adamw"),
        (AXOLOTL, {"peft_use_dora": True, **ADAPTER}, "not forecast", "DoRA has no counterpart"),
        (AXOLOTL, {"micro_bach_size": 2}, "not forecast", "Did you mean 'micro_batch_size'?"),
        # TRL
        (TRL, {"packing": True}, "contradiction", "Write attn_implementation: flash_attention_2."),
        (
            TRL,
            {"packing": True, "packing_strategy": "wrapped"},
            "contradiction",
            "wrapped samples begin and end within documents",
        ),
        (TRL, {"lora_r": 8}, "no effect", "use_peft is not on"),
        (
            TRL,
            {"use_peft": True, "load_in_4bit": True, "accelerate_config": "zero3"},
            "contradiction",
            "Write bnb_4bit_quant_storage: bfloat16",
        ),
        (
            TRL,
            {"use_peft": True, "dtype": None},
            "not forecast",
            "Write dtype: bfloat16.",
        ),
        (TRL, {"fsdp_config": {"version": 2}}, "no effect", "fsdp is not on"),
        (
            TRL,
            {
                "fsdp": True,
                "gradient_checkpointing": True,
                "fsdp_config": {"activation_checkpointing": True},
            },
            "contradiction",
            "blocks would be recomputed twice",
        ),
        (TRL, {"optim": "paged_adamw_8bit"}, "not forecast", "its states may move to the host"),
        (TRL, {"max_steps": 10, "num_train_epochs": 2}, "no effect", "max_steps decides"),
        (TRL, {"packin": True}, "not forecast", "Did you mean 'packing'?"),
    ],
)
def test_a_fault_is_found_with_its_line_and_fix(tmp_path, values, changes, kind, said):
    before = found(read(tmp_path, values), kind)
    assert not any(said in line for line in before)
    lines = found(read(tmp_path, values, **changes), kind)
    assert [line for line in lines if said in line], lines
    (line,) = [line for line in lines if said in line]
    assert line.startswith("line")


def test_the_line_is_that_of_the_key(tmp_path):
    path = tmp_path / "file.yaml"
    path.write_text("# a comment\nbase_model: a/b\nmicro_batch_size: 1\n\nbf16: true\nfp16: true\n")
    (line,) = found(read_request(str(path)), "contradiction")
    assert line.startswith("lines 5, 6: bf16=true, fp16=true: ")


def test_ranks_come_from_the_command_the_file_or_the_batch(tmp_path):
    assert settle_ranks(read(tmp_path, ACCELERATE), None).value == 8
    typed = settle_ranks(read(tmp_path, ACCELERATE), 4)
    assert typed.value == 4
    assert "says 8" in typed.why
    assert settle_ranks(read(tmp_path, DEEPSPEED, train_batch_size=32), None).value == 4
    with pytest.raises(ConfigError, match=r"does not say on how many devices .* Add --devices N"):
        settle_ranks(read(tmp_path, AXOLOTL), None)


@pytest.mark.parametrize(
    ("changes", "ranks", "batch"),
    [
        ({}, 2, (4, 2, 16)),
        ({"train_batch_size": 16}, 2, (4, 2, 16)),
        ({"gradient_accumulation_steps": "auto", "train_batch_size": 32}, 2, (4, 4, 32)),
        ({"train_micro_batch_size_per_gpu": "auto", "train_batch_size": 32}, 2, (8, 2, 32)),
        ({"train_micro_batch_size_per_gpu": "auto"}, 2, (1, 2, 4)),
    ],
)
def test_two_keys_of_the_batch_give_the_third(tmp_path, changes, ranks, batch):
    request = read(tmp_path, DEEPSPEED, **changes)
    settle_batch(request, ranks)
    keys = ("micro_batch_size", "accumulation_steps", "global_batch_size")
    assert tuple(asked(request, f"train.{key}") for key in keys) == batch
    assert not request.of_kind("contradiction")


def test_a_batch_that_does_not_divide_is_named_with_both_fixes(tmp_path):
    request = read(tmp_path, DEEPSPEED, train_batch_size=32)
    settle_batch(request, 2)
    (line,) = found(request, "contradiction")
    assert "micro-batch 4 x accumulation 2 x 2 ranks are 16 samples, not 32" in line
    assert line.endswith("Write 16, or gradient_accumulation_steps 4.")


def test_words_follow_the_ranks_of_a_node(tmp_path):
    cluster = load_cluster("h100-node")
    hybrid = {"fsdp_version": 1, "fsdp_sharding_strategy": "HYBRID_SHARD"}
    for ranks, word in ((16, "hybrid_8"), (8, "fsdp"), (1, "single")):
        request = read(tmp_path, ACCELERATE, fsdp_config=hybrid)
        settle_strategy(request, ranks, cluster)
        assert request.words == word


@pytest.mark.parametrize(
    ("ranks", "nodes", "ranks_of_a_node"), [(16, 2, 8), (9, 3, 3), (12, 2, 6), (11, 11, 1)]
)
def test_the_command_for_several_nodes_starts_all_ranks(ranks, nodes, ranks_of_a_node):
    words = command(ranks, load_cluster("h100-node"), ["--strategy", "ddp"]).split()
    assert f"--nnodes={nodes}" in words
    assert f"--nproc-per-node={ranks_of_a_node}" in words


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("none.json", None, "FILE: there is no file none.json. Give the path of a DeepSpeed JSON"),
        ("a.json", '{"zero_optimization": {"stage": 2},\n "bf16" }', "a.json:2 cannot be read"),
        ("a.yaml", "base_model: x\n  bad: [1", "a.yaml:2: it is not YAML"),
        ("a.yaml", "- 1\n- 2\n", "a.yaml has a list without keys"),
        ("a.yaml", "", "a.yaml has nothing"),
        ("a.yaml", "colour: red\nshape: round\n", "is none of the files that are read (its keys"),
        ("a.yaml", "model: {name: gpt}\ntrain: {steps: 1}\n", "is a job of bigtrain. Run: "),
        ("a.json", '{"zero_optimization": {"stage": 7}}', "a.json:1: zero_optimization.stage=7"),
        ("a.json", '{"zero_optimization": 3}', "zero_optimization=3 is not an object"),
        ("a.yaml", "base_model: x\nmicro_batch_size: two\n", "a.yaml:2: micro_batch_size=two: a "),
        ("a.yaml", "base_model: x\nmicro_batch_size: true\n", "a whole number of 1 or more"),
        ("a.yaml", "base_model: x\ndeepspeed: ds.json\n", "a.yaml:2: deepspeed=ds.json: there is"),
        ("a.yaml", "base_model: x\nadapter: lora\n", "lora_r is not set. Write lora_r: 16."),
        ("a.yaml", "base_model: x\nadapter: ia3\n", "a.yaml:2: adapter=ia3 has no counterpart"),
        ("a.yaml", "distributed_type: XLA\n", "a.yaml:1: distributed_type=XLA is for devices"),
        ("a.yaml", "distributed_type: FDSP\n", "distributed_type=FDSP, did you mean 'FSDP'?"),
        ("a.yaml", "distributed_type: DEEPSPEED\n", "there is no section deepspeed_config"),
        ("a.yaml", "distributed_type: NO\nmixed_precision: bf32\n", "mixed_precision=bf32 is none"),
        (
            "a.yaml",
            "model_name_or_path: x\naccelerate_config: zero4\n",
            "a.yaml:2: accelerate_config=zero4, did you mean 'zero",
        ),
        ("a.yaml", "model_name_or_path: x\naccelerate_config: a/b.yaml\n", "there is no such file"),
        (
            "a.yaml",
            "distributed_type: FSDP\nfsdp_config: {fsdp_sharding_strategy: ALL}\n",
            "sharding_strategy=ALL is none of FSDP's. Write one of FULL_SHARD",
        ),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_in_a_line(tmp_path, monkeypatch, name, text, said):
    monkeypatch.chdir(tmp_path)
    if text is not None:
        Path(name).write_text(text)
    with pytest.raises(ConfigError) as refused:
        read_request(name)
    message = str(refused.value)
    assert said in message
    assert "\n" not in message


def test_every_key_of_transformers_is_in_the_table_of_trl():
    """Without a key of the installed version no line would say that it is not forecast."""
    training = pytest.importorskip("transformers").TrainingArguments
    patterns = trl_file.TRL_KEYS
    fields = training.__dataclass_fields__
    known = {*patterns.numbers, *patterns.read}
    others = (*patterns.outside, *patterns.not_forecast)
    assert not [name for name in fields if name not in known and not fits(name, others)]


def test_every_key_of_accelerate_is_in_its_table():
    config = pytest.importorskip("accelerate.commands.config.config_args").ClusterConfig
    table = accelerate_file.ACCELERATE_KEYS
    others = (*table.outside, *table.not_forecast)
    fields = config.__dataclass_fields__
    assert not [name for name in fields if name not in table.read and not fits(name, others)]


@pytest.mark.parametrize(
    "table", [axolotl_keys.AXOLOTL_KEYS, trl_file.TRL_KEYS, accelerate_file.ACCELERATE_KEYS]
)
def test_a_key_has_one_meaning(table):
    assert not table.numbers.keys() & table.read
    for key in (*table.numbers, *table.read):
        assert not fits(key, [name for name in table.not_forecast if "*" not in name])
