"""The cases of the planner: small models on the clusters that bigtrain provides."""

from __future__ import annotations

from typing import Any

from golden import product

LANGUAGE = ["data.name=synthetic", "data.args={kind: language}"]
PICTURES = ["data.name=synthetic", "data.args={kind: classification, input_shape: [3, 32, 32]}"]
MODELS = {
    "gpt of 4": [
        "model.args={num_layers: 4, width: 32, num_heads: 2, sequence_length: 16}",
        *(*LANGUAGE, "train.global_batch_size=16"),
    ],
    "gpt of 12, bf16": [
        "model.args={num_layers: 12, width: 64, num_heads: 4, sequence_length: 32}",
        *(*LANGUAGE, "train.global_batch_size=24", "train.precision=bf16"),
    ],
    "gpt-10m": ["model.name=gpt-10m", *LANGUAGE, "train.global_batch_size=8"],
    "lenet": [
        "model.name=lenet",
        "data.name=synthetic",
        "data.args={kind: classification, input_shape: [1, 32, 32]}",
        *("train.global_batch_size=32", "optim.name=sgd", "optim.momentum=0.9"),
    ],
    "resnet18": ["model.name=resnet18", *PICTURES, "train.global_batch_size=16"],
}
CLUSTERS = {"a100-node": 8, "h100-node": 4, "v100-node": 2, "cpu": 2}
# Of a cap on a GPU, 256 MiB and 5% are not for tensors; these caps leave 7.2, 0.1 and 2.5 MiB.
MORE = {
    "one device": ("gpt of 4", ["--cluster", "h200-node", "--devices", "1"]),
    "a cap": (
        "gpt of 12, bf16",
        ["--cluster", "a100-node", "--devices", "2", "--cap", "290510740"],
    ),
    "a cap of one": ("gpt of 12, bf16", ["--cluster", "cpu", "--devices", "1", "--cap", "15MiB"]),
    "nothing fits": (
        "gpt of 4",
        ["--cluster", "a100-node", "--devices", "2", "--cap", "282646420"],
    ),
    "nothing fits, deep": (
        "gpt of 12, bf16",
        ["--cluster", "a100-node", "--devices", "1", "--cap", "285267860", "--engines", "torch"],
    ),
    "a mesh": ("gpt of 4", ["--cluster", "a100-node", "--devices", "4", "mesh.pp=2"]),
    "rows": (
        "gpt of 4",
        ["--cluster", "v100-node", "--devices", "2", "train.micro_batch_size=2"],
    ),
}


def cases() -> dict[str, list[str]]:
    """The arguments of `bigtrain plan`, by the names of the cases."""
    arguments = {
        f"{model} on {devices} of {cluster}": [
            *("--cluster", cluster, "--devices", str(devices), *words)
        ]
        for model, words in MODELS.items()
        for cluster, devices in CLUSTERS.items()
    }
    for name, (model, words) in MORE.items():
        arguments[f"{model}: {name}"] = [*words, *MODELS[model]]
    return arguments


def compute(arguments: list[str]) -> Any:
    """The planner's JSON document; a plan that is in the front and among the best is
    listed once.
    """
    document = product.planner_document(arguments)
    del document["search_seconds"]
    document["cluster"] = document["cluster"]["name"]  # its figures are in configs/clusters
    best = document["plans"]
    document["front"] = [
        f"plans[{best.index(plan)}]" if plan in best else plan for plan in document["front"]
    ]
    return document
