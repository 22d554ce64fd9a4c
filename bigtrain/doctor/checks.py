"""The checks of `bigtrain doctor --check`: their runs, and the rules that the runs must meet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from bigtrain.doctor.rules import (
    Rule,
    continues,
    ends_with_lost_rank,
    explains_out_of_memory,
    forecast_holds,
    has_saved,
    no_more_than_plain_torch,
    one_context_per_rank,
    same_losses,
    smaller_than,
)

SAVE_EVERY = 3
"""The steps between the checkpoints of checks that save."""


@dataclass(frozen=True)
class Check:
    """One run, and the rules that it must meet."""

    name: str
    promise: str
    """The behaviour that the check shows if it passes."""
    words: Sequence[str]
    """Overrides of the job, in addition to those of all checks."""
    rules: Sequence[Rule]
    strategy: str = "single"
    ranks: int = 1
    needs: str | None = None
    """The library without which the check is skipped; None if it needs none."""
    only: Literal["accelerator"] | None = None
    """The kind of device without which the check is skipped; None if it runs on all."""
    images: bool = False
    """Whether the run trains a convolutional network instead of a transformer."""
    gpu_words: Sequence[str] = ()
    """Further overrides on a GPU, where the model is larger."""
    act: str | None = None
    """The act of the data source between two steps, as arguments of `probing_data.language` in
    JSON without the braces; None if the data source is `synthetic`."""
    saves: bool = False
    """Whether the run saves a checkpoint after every `SAVE_EVERY` steps."""
    after: Sequence[str] = ("single",)
    """The names of earlier checks whose runs the rules read."""
    continues: str | None = None
    """The name of an earlier check whose first checkpoint the run continues."""
    module: str | None = None
    """The module that is run with `python -m MODULE FILE` in place of a training run. It writes
    its figures into FILE as JSON."""


EXACT = (forecast_holds, same_losses("single"))
CHECKS = (
    Check("single", "the forecast of one process", [], [forecast_holds]),
    Check(
        "single_bf16",
        "the forecast under autocast",
        ["train.precision=bf16"],
        [forecast_holds, same_losses("single", 0.02)],
    ),
    Check(
        "recompute_full",
        "blocks recomputed in the backward pass",
        ["strategy.recompute=full"],
        [*EXACT, smaller_than("single")],
    ),
    Check(
        "recompute_selective",
        "products saved, the rest computed again",
        ["strategy.recompute=selective"],
        [*EXACT, smaller_than("single")],
    ),
    Check(
        "accumulation",
        "four micro-batches",
        ["train.micro_batch_size=2"],
        [*EXACT, smaller_than("single")],
    ),
    Check(
        "activations_disk",
        "activations on disk",
        [],
        [*EXACT, smaller_than("single")],
        strategy="single_activations_disk",
    ),
    Check(
        "activations_cpu",
        "activations on the host, copied while the GPU computes",
        ["strategy.offload.activations=cpu"],
        [*EXACT, smaller_than("single")],
        only="accelerator",
    ),
    Check(
        "optimizer_disk",
        "the optimizer's state on disk",
        [],
        EXACT,
        strategy="single_offload_disk",
    ),
    Check(
        "optimizer_cpu",
        "the optimizer's state on the host",
        [],
        EXACT,
        only="accelerator",
        strategy="single_offload_cpu",
    ),
    Check(
        "state_bf16",
        "the optimizer's state in bf16",
        ["optim.state=bf16"],
        [forecast_holds, same_losses("single", 0.01)],
    ),
    Check(
        "release_gradients",
        "each gradient used and freed as soon as it is complete",
        ["optim.release_gradients=true", "optim.clip_norm=null"],
        [forecast_holds],
    ),
    Check("compiled", "blocks compiled", ["train.compile=blocks"], [same_losses("single")]),
    Check("convolutions", "the forecast of ResNet-18", [], [forecast_holds], images=True),
    Check(
        "channels_last",
        "the same in the memory format channels_last",
        ["train.memory_format=channels_last"],
        [forecast_holds],
        images=True,
    ),
    Check("fsdp_1", "fully_shard on one rank", [], [same_losses("single")], strategy="fsdp"),
    Check(
        "zero2_1",
        "DeepSpeed's stage 2 on one rank",
        [],
        [same_losses("single")],
        needs="deepspeed",
        strategy="zero2",
    ),
    Check(
        "frozen",
        "parameters without gradients and state",
        ["model.freeze=['*', '!*mlp*']"],
        [forecast_holds, smaller_than("single")],
    ),
    Check(
        "lora",
        "adapters on frozen weights",
        ["model.lora.rank=16"],
        [forecast_holds, smaller_than("single")],
        needs="peft",
    ),
    Check(
        "qlora",
        "adapters on weights in 4 bits",
        ["model.lora.rank=16", "model.lora.quantize=nf4"],
        [forecast_holds, smaller_than("lora")],
        needs="peft",
        after=("lora",),
    ),
    Check(
        "dropout",
        "random numbers, and checkpoints",
        ["model.args.dropout=0.1", "train.deterministic=true"],
        [forecast_holds, has_saved],
        saves=True,
    ),
    Check(
        "resume",
        "the losses of an interrupted run, bit for bit",
        ["model.args.dropout=0.1", "train.deterministic=true"],
        [continues("dropout")],
        after=("dropout",),
        continues="dropout",
    ),
    Check(
        "save_async",
        "the same losses while files are written",
        [
            *("model.args.dropout=0.1", "train.deterministic=true"),
            "checkpoint.asynchronous=true",
        ],
        [has_saved, same_losses("dropout", 0.0)],
        after=("dropout",),
        saves=True,
    ),
    Check(
        "plain_loop",
        "the losses of a plain torch loop in no more memory",
        [],
        [no_more_than_plain_torch],
        module="bigtrain.doctor.plain_loop",
    ),
    Check("ddp", "two replicas", [], EXACT, ranks=2, strategy="ddp"),
    Check("fsdp", "parameters, gradients and state in shards", [], EXACT, ranks=2, strategy="fsdp"),
    Check(
        "zero2",
        "DeepSpeed's stage 2",
        [],
        EXACT,
        ranks=2,
        needs="deepspeed",
        strategy="zero2",
    ),
    Check("1f1b", "a pipeline", ["train.micro_batch_size=2"], EXACT, ranks=2, strategy="1f1b"),
    Check("tensor", "layers in slices", [], EXACT, ranks=2, strategy="tensor"),
    Check(
        "ring_pause",
        "a pause between steps that is longer than the timeout of an exchange",
        ["mesh.timeout=10"],
        [same_losses("single")],
        ranks=2,
        strategy="ring",
        act='"act": "pause", "at": 10, "seconds": 15',
    ),
    Check(
        "tied_stages",
        "three stages that share a parameter, each with two replicas",
        ["mesh.pp=3", "train.micro_batch_size=1"],
        [same_losses("single")],
        ranks=6,
        strategy="layer_split",
    ),
    Check(
        "one_context",
        "each rank takes up its own GPU alone",
        [],
        [one_context_per_rank],
        ranks=2,
        only="accelerator",
        strategy="ddp+activations_disk",
        act='"act": "report", "at": 10',
    ),
    Check(
        "killed_rank",
        "the other ranks end, and the message names the lost rank",
        [],
        [ends_with_lost_rank],
        ranks=2,
        strategy="ddp",
        act='"act": "die", "at": 10',
    ),
    Check(
        "cap",
        "a run that is out of memory names words that would fit",
        ["memory.cap=24MiB"],
        [explains_out_of_memory],
        gpu_words=["memory.cap=3GiB"],
    ),
)
"""The checks in the order in which they run. `single`, with which others are compared, is first."""
