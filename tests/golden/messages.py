"""The complete messages for wrong input, for all inputs that are refused without ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from golden import product

LOADED: list[tuple[str, list[str]]] = [
    ("optim:\n  lrr: 1\n", []),
    ("train:\n  steps: 1\n  lr: 1\n", []),
    ("modell: {}\n", []),
    ("train: {steps: many}\n", []),
    ("train: {precision: fp8}\n", []),
    ("train: {steps: 1, steps: 2}\n", []),
    ("train: [1\n", []),
    ("- a\n", []),
    ("train: {steps: 1, epochs: 1}\n", []),
    ("strategy: dpp\n", []),
    ("mesh: {dp: 0}\n", []),
    ("optim: {state: bf16, name: sgd}\n", []),
    ("{}", ["train.stepz=3"]),
    ("{}", ["zzz.qqq=3"]),
    ("{}", ["TRAIN.STEPS"]),
    ("{}", ["train.steps=[1"]),
    ("{}", ["-x=3"]),
    ("{}", ["strategy.replicate=1"]),
    ("{}", ["train.steps=5", "train.epochs=2"]),
    ("{}", ["train.steps=0"]),
    ("{}", ["device=tpu"]),
    ("{}", ["memory.cap=much"]),
    ("{}", ["model.chunk_size=0"]),
    ("{}", ["optim.name=adamx"]),
    ("{}", ["optim.betas=[0.9, 1.5]"]),
    ("{}", ["optim.name=sgd", "optim.master_weights=false"]),
    ("{}", ["optim.stochastic_rounding=true"]),
    ("{}", ["optim.name=adafactor", "optim.implementation=fused"]),
    ("{}", ["optim.state=bf16", "optim.implementation=foreach"]),
    ("{}", ["optim.release_gradients=true", "optim.clip_norm=1"]),
    ("{}", ["strategy.deepspeed=none.json"]),
]
"""Pairs of the text of a job file and the words on the command line."""

NAMES: list[tuple[str | None, str | None]] = [
    ("none.yaml", None),
    ("defalt", None),
    (None, "zeroo"),
    (None, "none/zero.yaml"),
]
"""Jobs and strategies with names that do not exist."""

CHANGED = [["strategy=nothing"], ["train.micro=2"]]

PLANS: list[tuple[str, int, dict[str, Any]]] = [
    ("1f1b", 1, {}),
    ("1f1b", 4, {"mesh.pp": 3}),
    ("1f1b", 4, {"mesh.pp": 2, "mesh.dp": 3}),
    ("1f1b", 4, {"mesh.pp": 2, "mesh.tp": 2}),
    ("1f1b", 2, {"train.accumulation_steps": 1}),
    ("dualpipev", 2, {"train.accumulation_steps": 3}),
    ("gpipe", 2, {"strategy.cut.stages_per_rank": 2}),
    ("1f1b", 2, {"strategy.cut.at": ["a", "b"]}),
    ("1f1b", 2, {"strategy.cut.schedule": "2f2b"}),
    ("1f1b", 2, {"strategy.cut.memry": 1}),
    ("1f1b", 2, {"strategy.replicate.name": "zero", "strategy.replicate.stage": 2}),
    ("pipeline_deepspeed", 2, {"strategy.cut.schedule": "gpipe"}),
    ("layer_split", 1, {}),
    ("single", 2, {"mesh.pp": 2}),
    ("single", 2, {"mesh.tp": 2}),
    ("single", 2, {}),
    ("ddp", 8, {"mesh.dp": 3}),
    ("ddp", 2, {"train.global_batch_size": 7}),
    ("ddp", 2, {"train.global_batch_size": 10, "train.micro_batch_size": 4}),
    (
        "ddp",
        2,
        {
            "train.global_batch_size": 32,
            "train.micro_batch_size": 4,
            "train.accumulation_steps": 3,
        },
    ),
    ("ddp", 2, {"train.global_batch_size": 1, "train.accumulation_steps": 4}),
    ("single", 1, {"strategy.replicate": "zeroo"}),
    ("single", 1, {"strategy.cut": "ddp"}),
    ("single", 1, {"strategy.replicate": "accumulation"}),
    ("single", 1, {"strategy.replicate": "os:getcwd"}),
    ("single", 1, {"strategy.replicate": "no.where:X"}),
    ("ddp", 2, {"strategy.replicate.bucket_size": -3}),
    ("ddp", 2, {"strategy.replicate.bucket_size": "big"}),
    ("ddp", 2, {"strategy.replicate.bucket": 1}),
    ("ddp", 2, {"strategy.replicate.compress": "zip"}),
    (
        "ddp",
        2,
        {
            "strategy.replicate.static_graph": True,
            "strategy.replicate.find_unused_parameters": True,
        },
    ),
    ("ddp", 2, {"strategy.replicate.compress": "fp16", "train.precision": "fp64"}),
    ("ddp", 2, {"train.sync_batchnorm": True}),
    ("hybrid", 3, {}),
    ("hybrid", 4, {"strategy.replicate.shard_ranks": 3}),
    ("fairscale_fsdp", 2, {}),
    ("zero2", 2, {"train.precision": "fp64"}),
    ("zero1", 2, {"strategy.replicate.stage": 4}),
    ("zero1_torch", 2, {"strategy.replicate.engine": "jax"}),
    ("zero2", 2, {"strategy.offload.optimizer": "disk"}),
    ("oss", 2, {"strategy.offload.optimizer": "disk"}),
    ("ddp", 2, {"strategy.offload.parameters": "cpu"}),
    ("fsdp", 2, {"strategy.offload.parameters": "disk"}),
    ("single", 1, {"strategy.offload.optimizer": "tape"}),
    ("zero3", 2, {"optim.release_gradients": True}),
    ("zero2", 2, {"optim.name": "adafactor"}),
    ("fsdp", 2, {"optim.name": "adafactor"}),
    ("fsdp", 2, {"optim.name": "adamw_4bit"}),
    ("oss", 2, {"optim.master_weights": False, "train.precision": "bf16"}),
    ("single", 1, {"strategy.recompute": {"every": 2, "layers": ["blocks.0"]}}),
    ("single", 1, {"strategy.recompute": {"budget": "1GiB", "mode": "full"}}),
    ("single", 1, {"strategy.recompute": {"mode": "ful"}}),
    ("single", 1, {"strategy.recompute": {"every": 0}}),
    ("single", 1, {"strategy.recompute": {"budget": "much"}}),
    ("single", 1, {"strategy.recompute": {"budget": "150%"}}),
    ("single", 1, {"strategy.recompute": {"budget": True}}),
    ("single", 1, {"strategy.recompute": {"budget": "-1GiB"}}),
    ("single", 1, {"strategy.recompute": {"budget": 0}}),
    ("single", 1, {"strategy.recompute": {"blocks": {"a": "full"}, "mode": "full"}}),
    ("single", 1, {"strategy.recompute": {"blocks": {"a": "offload"}}}),
    ("single_activations_disk", 1, {"strategy.recompute": {"mode": "selective"}}),
    ("gpipe", 2, {"strategy.recompute": {"mode": "full"}, "strategy.cut.checkpoint": "always"}),
    ("zero3", 2, {"strategy.recompute": {"mode": "selective"}}),
    ("zbv", 2, {"strategy.recompute": {"mode": "selective"}}),
]
"""Presets with keys on a number of ranks, refused before a model is built."""

SHAPED: list[tuple[str, int, dict[str, Any]]] = [
    ("single", 1, {"strategy.recompute": {"layers": ["layer.0"]}}),
    ("single", 1, {"strategy.recompute": {"layers": ["layers"]}}),
    ("single", 1, {"strategy.recompute": {"layers": ["layers.0", "layers.0.1"]}}),
    ("single", 1, {"strategy.recompute": {"every": 9}}),
    ("single", 1, {"strategy.recompute": {"blocks": {"layers.9": "full"}}}),
    ("single", 1, {"strategy.recompute": {"budget": 1000}}),
    ("fsdp", 2, {"strategy.recompute": {"budget": 1000}}),
    ("1f1b", 2, {"strategy.recompute": {"budget": 1000}}),
    ("1f1b", 32, {}),
    ("1f1b", 2, {"strategy.cut.at": ["layer.1"]}),
    ("1f1b", 2, {"strategy.cut.at": ["embedding"]}),
    ("1f1b", 3, {"strategy.cut.at": ["layers.3", "layers.1"]}),
    ("1f1b", 2, {"strategy.cut.memory": 100}),
    ("1f1b_fsdp", 4, {"strategy.cut.schedule": "zbv_zero_bubble"}),
]
"""The same, refused while the model with tied weights is cut, priced or profiled."""

OPENED: list[tuple[str, int, list[str]]] = [
    ("single", 1, ["data.path=/nowhere/at/all"]),
    ("single", 1, ["model.name=nothere.module:Net"]),
    ("single", 1, ["model.name=nothing"]),
    ("single", 1, [*product.GPT, "train.global_batch_size=100000"]),
    ("ddp", 128, [*product.GPT, "train.global_batch_size=128"]),
    ("single", 1, ["model.name=lenet", "data.name=synthetic", "data.args={kind: language}"]),
    ("single", 1, ["data.name=synthetic"]),
    ("single", 1, ["checkpoint.resume=nowhere"]),
    ("single", 1, ["model.chunked_loss=true", "model.loss=torch.nn.functional:cross_entropy"]),
    ("single", 1, ["model.chunked_loss=false", "model.chunk_size=100"]),
    ("single", 1, ["model.name=lenet", "model.head=fc"]),
    ("single", 1, [*product.GPT, "model.head=haed"]),
]

MODELS: list[tuple[str, dict[str, Any]]] = [
    ("gpt", {"hue": 3}),
    ("gpt", {"num_layer": 3}),
    ("gpt", {"num_layers": 0}),
    ("gpt", {"num_layers": 1.5}),
    ("gpt", {"width": "wide"}),
    ("gpt", {"bias": 1}),
    ("gpt", {"dropout": "no"}),
    ("gpt", {"dropout": 1.0}),
    ("gpt", {"num_heads": 5}),
    ("gtp", {}),
    ("resnet18", {"num_clases": 3}),
    ("resnet18", {"weights": "DEFAULT"}),
    ("my_modells:Net", {}),
    ("my_modells:", {}),
]

SOURCES: list[tuple[str, dict[str, Any]]] = [
    ("txet", {}),
    ("zzzz", {}),
    ("nowhere.at_all:x", {}),
    (":x", {}),
    ("text", {"sequence_lenght": 5}),
    ("text", {"sequence_length": 0}),
    ("text", {"validation_fraction": 1.0}),
    ("voc", {"year": "2013"}),
    ("synthetic", {"kind": "sound"}),
]

CLUSTER: dict[str, Any] = {
    "name": "mine",
    "source": "nowhere",
    "device": {
        "name": "x",
        "kind": "cuda",
        "memory": "8GiB",
        "reserved": "1GiB",
        "flops": {"fp32": 1e13, "bf16": 1e14},
        "memory_bandwidth": 1e12,
        "launch": 1e-5,
    },
    "node": {"devices": 2, "host_memory": "64GiB", "host_link": 2e10},
    "inside": {"latency": 1e-5, "bandwidth": 1e10},
}
FIGURES: list[dict[str, Any]] = [
    {"device.launch": None},
    {"device": None},
    {"device.flops.bf16": None},
    {"device.memry": "1GiB"},
    {"links": 3},
    {"node.devices": 0},
    {"node.devices": 2.5},
    {"device.memory_bandwidth": -1.0},
    {"device.memory_bandwidth": True},
    {"device.memory_bandwidth": "fast"},
    {"device.memory": "much"},
    {"device.reserved": "16GiB"},
    {"device.efficiency": 1.5},
    {"device.kind": "tpu"},
    {"node.host_link": None},
]
"""Changes to a cluster's file; None deletes the key."""

SMALL = [
    "model.args={num_layers: 4, width: 32, num_heads: 2, sequence_length: 16}",
    "data.name=synthetic",
    "data.args={kind: language}",
    "train.global_batch_size=16",
]
PLANNER = [
    ["--cluster", "a100-node", "--devices", "0"],
    ["--cluster", "a100-node", "--devices", "-3"],
    ["--cluster", "a100-node", "--devices", "2", "--memory", "1GiB"],
    ["--cluster", "a100-node", "--devices", "2", "--memory", "lots"],
    ["--cluster", "a100-node", "--devices", "2", "--global-batch-size", "0"],
    ["--cluster", "a100-node", "--devices", "64", "--global-batch-size", "3"],
    ["--cluster", "a100-node", "--devices", "4", "mesh.pp=3"],
    ["--cluster", "h100"],
    ["--cluster", "cpu", "--devices", "64"],
    ["--cluster", "a100-node", "--devices", "2", "--engines", "jax"],
    ["--cluster", "cpu", "--devices", "2", "train.precision=fp64"],
    ["--cluster", "a100-node", "--memory", "1GiB", "--cap", "1GiB"],
    ["--cluster", "a100-node", "--nodes", "2"],
]


def cases() -> dict[str, tuple[Any, ...]]:
    """By name: the function of the product that is called, and its input."""
    asked: list[tuple[Any, ...]] = [
        *(("load", text, words) for text, words in LOADED),
        *(("name", *inputs) for inputs in NAMES),
        *(("change", words) for words in CHANGED),
        *(("plan", *inputs) for inputs in PLANS),
        *(("shape", *inputs) for inputs in SHAPED),
        *(("open", *inputs) for inputs in OPENED),
        *(("model", *inputs) for inputs in MODELS),
        *(("source", *inputs) for inputs in SOURCES),
        *(("cluster", inputs) for inputs in FIGURES),
        *(("planner", inputs) for inputs in PLANNER),
    ]
    return {" ".join(str(part) for part in inputs): inputs for inputs in asked}


def compute(asked: tuple[Any, ...]) -> str | None:
    """The message of the refusal; None if the input is accepted."""
    door, *arguments = asked
    return DOORS[door](*arguments)


def _load(text: str, words: list[str]) -> str | None:
    Path("job.yaml").write_text(text, "utf-8")
    return product.loaded(words, "job.yaml", None)


def _plan(strategy: str, ranks: int, keys: dict[str, Any]) -> str | None:
    return product.planned(strategy, keys, ranks)


def _shape(strategy: str, ranks: int, keys: dict[str, Any]) -> str | None:
    keys = {"train.global_batch_size": 96, **keys}
    return product.rank_forecasts("tied", strategy, ranks, keys).get("refused")


def _cluster(changes: dict[str, Any]) -> str | None:
    values: dict[str, Any] = yaml.safe_load(yaml.safe_dump(CLUSTER))
    for path, value in changes.items():
        *above, last = path.split(".")
        inner = values
        for key in above:
            inner = inner[key]
        inner[last] = value
        if value is None:
            del inner[last]
    Path("mine.yaml").write_text(yaml.safe_dump(values, sort_keys=False), "utf-8")
    return product.clustered("mine.yaml")


DOORS: dict[str, Any] = {
    "load": _load,
    "name": lambda config, strategy: product.loaded([], config, strategy),
    "change": lambda words: product.changed("ddp", words),
    "plan": _plan,
    "shape": _shape,
    "open": lambda strategy, ranks, words: product.opened(strategy, words, ranks),
    "model": product.modelled,
    "source": product.sourced,
    "cluster": _cluster,
    "planner": lambda words: product.unplannable([*words, *SMALL]),
}
