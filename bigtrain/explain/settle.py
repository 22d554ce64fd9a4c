"""Settle the ranks, strategy and batch of a request, and return the keys of its job."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

from bigtrain.errors import ConfigError, unquoted_word
from bigtrain.explain.request import TYPED, Asked, ToolRequest
from bigtrain.explain.subject import ExplainedModel
from bigtrain.machine.cluster import Cluster

_MICRO = "train.micro_batch_size"
_STEPS = "train.accumulation_steps"
_GLOBAL = "train.global_batch_size"
_LENGTH = "data.args.sequence_length"
DATA_PLACEHOLDER = "DATA.jsonl"
"""The path of the data in a command; the user replaces it."""
_SCHEDULES = ("optim.warmup", "optim.schedule", "train.epochs", "train.steps")
"""Keys of the length of a run, which changes neither its memory nor the seconds of a step."""


def settle_ranks(request: ToolRequest, devices: int | None) -> Asked:
    """Return the number of ranks: from the command line, the file, or the file's batch.

    Args:
        request: the settings that the file requests.
        devices: the number on the command line; None without one.

    Raises:
        ConfigError: neither the command line nor the file determines the number.
    """
    if devices is not None:
        said = request.ranks
        differs = said is not None and said.value != devices
        why = (
            f"--devices; {request.file.path} says {said.value}" if differs and said else "--devices"
        )
        return Asked(devices, why=why)
    if request.ranks is not None:
        return request.ranks
    total, micro = request.keys.get(_GLOBAL), request.keys.get(_MICRO)
    steps = request.keys.get(_STEPS)
    if total is not None and micro is not None and steps is not None:
        share = micro.value * steps.value
        if total.value % share == 0:
            written = (*total.written, *micro.written, *steps.written)
            return Asked(total.value // share, written, "the batch divided by a rank's share")
    raise ConfigError(
        f"{request.file.path} does not say on how many devices it runs. Add --devices N, such as "
        "--devices 8."
    )


def settle_strategy(request: ToolRequest, ranks: int, cluster: Cluster) -> None:
    """Adapt strategies that depend on the number of ranks, or on the ranks of a node.

    Args:
        request: the settings that the file requests; its strategy and keys may change.
        ranks: the number of ranks.
        cluster: the devices.
    """
    asked, node = request.strategy, min(ranks, cluster.node.devices)
    if asked.value == "hybrid":
        word = "fsdp" if node == ranks else f"hybrid_{node}"
        request.strategy = Asked(word, asked.written, "shards within a node")
    if ranks == 1 and asked.value in ("ddp", "fsdp", "fsdp_zero2", "hybrid"):
        request.strategy = Asked("single", asked.written, "one rank has nothing to share")
        request.added.pop("offload_parameters_cpu", None)
    if ranks > 1 and asked.value == "single":
        request.strategy = Asked("ddp", asked.written, f"{ranks} ranks")
    if request.strategy.value != "ddp" and request.strategy.value != "single":
        request.keys.pop("optim.implementation", None)
    if "offload_cpu" in request.added:
        request.keys.pop("optim.implementation", None)


def settle_batch(request: ToolRequest, ranks: int) -> None:
    """Complete the three keys of the batch, and report values that contradict each other.

    Args:
        request: the settings that the file requests; its keys and findings change.
        ranks: the number of ranks.

    Raises:
        ConfigError: the global batch of the command line does not fit the other keys.
    """
    sizes = [request.keys[key].value for key in ("mesh.tp", "mesh.pp") if key in request.keys]
    replicas = max(1, ranks // max(1, _product(sizes)))
    total, micro, steps = (request.keys.get(key) for key in (_GLOBAL, _MICRO, _STEPS))
    if total is not None and total.why == TYPED and steps and steps.why != TYPED:
        steps = None  # the command line overrides the file's accumulation
    if total is not None and micro is None:
        share = max(1, total.value // replicas)
        made = max(1, share // (steps.value if steps is not None else 1))
        micro = Asked(made, total.written, f"{total.value} over {replicas} ranks")
    micro = micro or Asked(1, why="assumed: the file has no micro-batch size")
    if steps is None and total is not None:
        made = max(1, total.value // (micro.value * replicas))
        steps = Asked(made, (*total.written, *micro.written), f"{total.value} samples a step")
    steps = steps or Asked(1, why="assumed: the file has no accumulation")
    product = micro.value * steps.value * replicas
    if total is not None and total.value != product and not total.written:
        raise ConfigError(
            f"train.global_batch_size={total.value} is not micro-batch {micro.value} x "
            f"accumulation {steps.value} x {replicas} ranks. Use "
            f"train.global_batch_size={product}."
        )
    if total is not None and total.value != product:
        written = dict.fromkeys((*total.written, *micro.written, *steps.written))
        request.find(
            "contradiction",
            list(written),
            f"micro-batch {micro.value} x accumulation {steps.value} x {replicas} ranks are "
            f"{product} samples, not {total.value}; it is forecast with {product}",
            f"Write {product}, or " + _fitting(total.value, micro.value, replicas),
        )
    request.keys |= {_MICRO: micro, _STEPS: steps}
    request.keys[_GLOBAL] = Asked(product, why=f"{micro.value} x {steps.value} x {replicas}")


def _fitting(total: int, micro: int, replicas: int) -> str:
    steps, rest = divmod(total, micro * replicas)
    if rest == 0 and steps:
        return f"gradient_accumulation_steps {steps}."
    return f"a multiple of {micro * replicas}."


def _product(sizes: Sequence[int]) -> int:
    product = 1
    for size in sizes:
        product *= size
    return product


def forecast_words(request: ToolRequest, subject: ExplainedModel) -> list[str]:
    """Return the keys of the job that is forecast, KEY=VALUE.

    Args:
        request: the request, with settled strategy and batch; keys of the command line are in it.
        subject: the model.
    """
    made = [f"model.name={subject.name}"]
    if subject.name.startswith("hf:"):
        made.append("model.pretrained=false")
    keys = _keys(request, subject)
    left_out = [*_SCHEDULES]
    if subject.data:
        made += subject.data
        made.append(f"data.args.samples={max(1024, int(keys[_GLOBAL].value))}")
        left_out.append("data.")
    return [*made, *_words(keys, left_out)]


def pasted_words(request: ToolRequest, subject: ExplainedModel) -> list[str]:
    """Return the keys of the job to run, KEY=VALUE, without strategy, mesh and batch.

    Args:
        request: the request, with settled strategy and batch.
        subject: the model.
    """
    made, keys = [f"model.name={subject.name}"], _keys(request, subject)
    left_out = [_MICRO, _STEPS, _GLOBAL, "model.chunked_loss", "mesh."]
    if subject.is_language and subject.data:
        made += ["data.name=text", f"data.path={DATA_PLACEHOLDER}"]
    elif subject.data:
        made += subject.data
        left_out.append("data.")
    if "train.epochs" in keys and "train.steps" not in keys:
        made.append("train.steps=null")
    return [*made, *_words(keys, left_out)]


def _words(keys: Mapping[str, Asked], left_out: Sequence[str]) -> list[str]:
    return [
        unquoted_word(key, asked.value)
        for key, asked in keys.items()
        if not key.startswith(tuple(left_out))
    ]


def _keys(request: ToolRequest, subject: ExplainedModel) -> dict[str, Asked]:
    """Return the keys of the request that apply to the model and the optimizer."""
    keys = dict(request.keys)
    if not (subject.is_language and subject.name.startswith("hf:")):
        keys.pop("model.chunked_loss", None)
    if keys.get("model.chunked_loss") is not None and keys["model.chunked_loss"].value is True:
        del keys["model.chunked_loss"]  # chunks are the default if the head allows it
    if keys.get("optim.implementation") is not None and keys["optim.name"].value not in (
        "adamw",
        "sgd",
    ):
        del keys["optim.implementation"]
    return keys


def command(ranks: int, cluster: Cluster, words: Sequence[str]) -> str:
    """Return the command that starts a run, quoted for a shell.

    Args:
        ranks: the number of ranks.
        cluster: the devices, which determine the ranks of a node.
        words: the options and keys of `bigtrain/train.py`.
    """
    node = cluster.node.devices
    if ranks == 1:
        launcher = ["python", "bigtrain/train.py"]
    elif ranks <= node:
        launcher = ["deepspeed", "--num_gpus", str(ranks), "bigtrain/train.py"]
    else:
        # torchrun starts the same number of ranks on each node.
        nodes = next(n for n in range(-(-ranks // node), ranks + 1) if ranks % n == 0)
        launcher = ["torchrun", f"--nnodes={nodes}", f"--nproc-per-node={ranks // nodes}"]
        launcher += ["--rdzv-backend=c10d", "--rdzv-endpoint=HOST:29400", "bigtrain/train.py"]
    return shlex.join([*launcher, *words])
