"""`bigtrain explain`: show a configuration of another tool as a job, with its forecast."""

from __future__ import annotations

import json
import sys

from bigtrain.devices import accelerator
from bigtrain.errors import ConfigError
from bigtrain.explain.outlook import find_better, forecast_file
from bigtrain.explain.read_request import read_request
from bigtrain.explain.request import TYPED, Asked, ToolRequest
from bigtrain.explain.settle import (
    forecast_words,
    pasted_words,
    settle_batch,
    settle_ranks,
    settle_strategy,
)
from bigtrain.explain.show import Explanation, document, text_lines
from bigtrain.explain.subject import check_layers, open_subject
from bigtrain.job.arguments import ExplainOptions, explain_arguments
from bigtrain.job.load import load_job, parse_overrides
from bigtrain.machine.cluster import Cluster, load_cluster

USUAL_CLUSTER = "h100-node"
"""The devices of a forecast if this machine has no GPU and the user names none."""

_CHOSEN = (
    *("mesh.", "train.micro_batch_size", "train.accumulation_steps", "model.chunked_loss"),
    "optim.implementation",
)
"""Keys that the planner chooses, or leaves at their defaults."""


def main(arguments: list[str]) -> int:
    """Explain a file, and return the exit status.

    Args:
        arguments: the command line of `bigtrain explain`, without the program's name.

    Raises:
        ConfigError: the file, the model or a number is at fault.
    """
    options = explain_arguments(arguments)
    told = explain(options)
    if options.as_json:
        sys.stdout.write(json.dumps(document(told), indent=1) + "\n")
    else:
        sys.stdout.write("".join(f"{line}\n" for line in text_lines(told)))
    return 0


def explain(options: ExplainOptions) -> Explanation:
    """Read the file, forecast its plan, and search for a better plan.

    Raises:
        ConfigError: the file, the model or a number is at fault.
    """
    request = read_request(options.file)
    ranks = settle_ranks(request, options.devices)
    model = _model(request, options.model)
    cluster, note = _cluster(request, options.cluster, ranks.value)
    _check_devices(ranks.value, cluster)
    _take_words(request, options.overrides)
    subject = open_subject(request, model, options.overrides)
    check_layers(request, subject)
    settle_strategy(request, ranks.value, cluster)
    settle_batch(request, ranks.value)
    pasted = pasted_words(request, subject)
    words = forecast_words(request, subject)
    file = forecast_file(request, ranks.value, cluster, words, pasted)
    # The planner chooses the mesh, the micro-batch, and whether the loss is computed in chunks.
    free = [word for word in words if not word.startswith(_CHOSEN)]
    pasted = [word for word in pasted if not word.startswith("optim.implementation")]
    job = load_job(None, "single", free)
    better = find_better(file, job, ranks.value, cluster, options.memory, pasted)
    return Explanation(request, subject, ranks, cluster, note, file, better)


def _model(request: ToolRequest, model: str | None) -> str:
    if model is not None:
        return model
    if request.model is None:
        raise ConfigError(
            f"MODEL: {request.file.path} names no model. Write it after the file: a folder, "
            "hf:OWNER/NAME, a built-in name such as gpt2, or package.module:Class."
        )
    return str(request.model.value)


def _cluster(request: ToolRequest, name: str | None, ranks: int) -> tuple[Cluster, str]:
    """Return the devices, and a note if the user has named none."""
    if name is not None:
        return load_cluster(name), ""
    if accelerator() is None and not request.on_cpu:
        return load_cluster(USUAL_CLUSTER), "this machine has no GPU; --cluster NAME for others"
    from bigtrain.machine.local_cluster import measure_local_cluster

    return measure_local_cluster(ranks), "this machine; --cluster NAME for others"


def _check_devices(ranks: int, cluster: Cluster) -> None:
    node = cluster.node.devices
    if ranks > node and cluster.between is None:
        raise ConfigError(
            f"{ranks} ranks, and cluster {cluster.name} is one node of {node} devices. Add "
            f"--cluster {USUAL_CLUSTER}, or --devices {node}."
        )


def _take_words(request: ToolRequest, words: list[str]) -> None:
    """Override keys of the file by the keys on the command line.

    Raises:
        ConfigError: an override is not a key with a value.
    """
    tree = parse_overrides(words)
    for path in tree.origins:
        key, value = ".".join(path), tree.values
        for part in path:
            value = value[part]
        request.keys[key] = Asked(value, why=TYPED)
