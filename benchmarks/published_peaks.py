"""Compare forecasts with published peaks of fine-tuning runs on GPUs, with the rows' own settings.

    python benchmarks/published_peaks.py --output benchmarks/results/published_peaks.json

The rows with exact bytes are those of fms-acceleration (`scripts/benchmarks/refs/*.csv`, variant
`none`): A100-80GB, torch 2.4.1, transformers 4.48.1 (granite: 4.45.2), bf16 weights without
autocast, samples of 4,096 tokens, gradient checkpointing of every block, FlashAttention 2, AdamW
with foreach kernels, LoRA of rank 16 on q, k, v and o with fp32 matrices and dropout 0.1. Several
GPUs: FSDP1 with full shards; the forecast is of `fully_shard`. PEFT's rows (`method_comparison`,
Llama-3.2-3B on an L40S) print the mean of the bytes allocated after a step: these are compared with
the states, and the logits that are then alive. torchtitan's rows (Llama 3 8B on 8 H100, fp32
parameters, bf16 compute, 8,192 tokens) print the highest *reserved* bytes, which are above those
allocated.

Models are transformers' own, on the meta device, from their public configurations. The loss is
computed in the order in which transformers 4.48 does, inside the model: logits, their fp32 values,
a contiguous copy without the last position, cross entropy. No constant is fitted to a row. The one
that is added is documented: cuBLAS has a workspace of 8,519,680 bytes in each of the two threads
that compute matrix products, forward and backward (torch's CUBLAS_WORKSPACE_CONFIG, :4096:2:16:8).

Besides, two estimators that need no download: `accelerate estimate-memory` says four times the
bytes of the fp32 parameters for training with Adam, and DeepSpeed's
`estimate_zero*_model_states_mem_needs` the states of its stages.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from harness import keep
from torch import Tensor, nn

from bigtrain.activations.policy import BlockPolicy
from bigtrain.data.loader import MicroBatch
from bigtrain.hub.lora import attach
from bigtrain.job.load import load_job
from bigtrain.job.schema import LoraConfig
from bigtrain.machine.cluster import load_cluster
from bigtrain.memory.timeline import Peak
from bigtrain.optim.factory import optimizer_factory
from bigtrain.planner.evaluate import PlanEvaluator
from bigtrain.planner.space import Candidate, SearchSpace
from bigtrain.prediction.section_library import SectionLibrary
from bigtrain.timing.step_time import StepTimer

CUBLAS_WORKSPACES = 2 * 8_519_680
"""Bytes of the workspaces of two threads on an A100, torch's default."""
LENGTH = 4096
STATES_BAR, PEAK_BAR = 0.0005, 0.03
_LLAMA = {"rms_norm_eps": 1e-5, "max_position_embeddings": 8192, "pad_token_id": 0}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Mistral-7B-v0.1": (
        "Mistral",
        {
            **_LLAMA,
            **{"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32},
            **{"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000},
            "sliding_window": None,
        },
    ),
    "Meta-Llama-3-8B": (
        "Llama",
        {
            **_LLAMA,
            **{"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32},
            **{"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256},
        },
    ),
    "PowerLM-3b": (
        "Granite",
        {
            **_LLAMA,
            **{"hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 40},
            **{"num_attention_heads": 36, "num_key_value_heads": 36, "vocab_size": 49152},
            "tie_word_embeddings": True,
        },
    ),
    "Llama-3.2-3B": (
        "Llama",
        {
            **_LLAMA,
            **{"hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28},
            **{"num_attention_heads": 24, "num_key_value_heads": 8, "vocab_size": 128256},
            "tie_word_embeddings": True,
        },
    ),
}
"""By name: transformers' family, and the public configuration."""


@dataclass(frozen=True)
class Published:
    """One printed row."""

    model: str
    gpus: int
    lora: int
    """The rank of the adapters; 0 in full."""
    batch: int
    """Samples of a GPU."""
    peak: int
    """Bytes allocated at the peak."""
    end: int
    """Bytes allocated at the end, when there are no gradients."""
    older: bool = False
    """Whether the loss frees the bf16 logits, as transformers 4.45 does."""
    quantity: str = "allocated"
    """What is printed as the peak: bytes allocated at the peak, those after a step, or reserved."""
    length: int = LENGTH
    policy: BlockPolicy = "full"
    """What the blocks keep."""
    mixed: bool = False
    """Whether parameters are fp32 and computed in bf16; otherwise they are bf16."""
    targets: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj")
    reason: str = ""
    """Why the row is not held to the bars."""


_SHARDED: dict[str, Any] = {
    "mixed": True,
    "reason": "fully_shard, not FSDP1: in the rows a further sample of Mistral-7B adds 3.41 GB "
    "under FSDP1, and 3.01 GB on one GPU; adapters are computed in bf16, in the row in fp32",
}
ROWS = (
    Published("Mistral-7B-v0.1", 1, 0, 4, 72_434_837_504, 43_467_876_352),
    Published("Mistral-7B-v0.1", 1, 0, 8, 72_435_230_720, 43_468_269_568),
    Published("Mistral-7B-v0.1", 1, 16, 4, 26_704_571_904, 14_664_493_056),
    Published("Mistral-7B-v0.1", 1, 16, 8, 38_742_912_512, 14_664_886_272),
    Published("Mistral-7B-v0.1", 2, 16, 2, 15_144_870_400, 7_368_030_720, **_SHARDED),
    Published("Mistral-7B-v0.1", 2, 16, 4, 21_959_827_968, 7_368_227_328, **_SHARDED),
    Published("PowerLM-3b", 1, 0, 4, 35_134_836_736, 21_089_537_536, older=True),
    Published("PowerLM-3b", 1, 0, 8, 47_059_390_976, 21_089_930_752, older=True),
    Published("PowerLM-3b", 1, 16, 4, 20_169_870_848, 7_183_026_688, older=True),
    Published("PowerLM-3b", 1, 16, 8, 33_152_880_128, 7_183_419_904, older=True),
    Published("PowerLM-3b", 2, 16, 2, 10_321_519_104, 3_624_651_776, older=True, **_SHARDED),
)
"""fms-acceleration, variant `none`; of Llama-3-8B it prints rows of faster kernels only."""
NOT_FORECAST = (
    {
        "rows": "Mistral-7B-v0.1 and PowerLM-3b, full, 2 GPUs",
        "printed": [36_225_939_968, 36_226_136_576, 17_626_672_128, 23_781_051_904],
        "reason": "bf16 shards without fp32 masters, which no strategy of bigtrain has",
    },
    {
        "rows": "gpt_bigcode-santacoder, Mixtral-8x7B-Instruct-v0.1",
        "printed": [11_267_745_280, 15_193_274_880, 57_554_708_992, 64_851_605_504],
        "reason": "the first has 2,048 positions, and samples have 4,096 tokens; transformers 5 "
        "stacks the experts of the second",
    },
)
"""Rows of the same variant that are not forecast."""

_PEFT = "the logits of the last batch are alive, and its padded length is not printed"
_TITAN = (
    "reserved, not allocated bytes; its selective recomputation keeps every second product, ours "
    "keeps all"
)
_AFTER: dict[str, Any] = {
    "quantity": "after a step",
    "length": 210,
    "policy": "keep",
    "targets": ("q_proj", "v_proj"),
    "reason": _PEFT,
}
_RESERVED: dict[str, Any] = {
    "quantity": "reserved",
    "length": 8192,
    "policy": "selective",
    "mixed": True,
    "reason": _TITAN,
}
OTHER_ROWS = (
    Published("Llama-3.2-3B", 1, 0, 4, 26_063_126_151, 0, **_AFTER),
    Published("Llama-3.2-3B", 1, 32, 4, 6_923_989_748, 0, **_AFTER),
    Published("Llama-3.2-3B", 1, 64, 4, 7_070_843_245, 0, **_AFTER),
    Published("Meta-Llama-3-8B", 8, 0, 1, int(49.59 * 2**30), 0, **_RESERVED),
    Published("Meta-Llama-3-8B", 8, 0, 2, int(82.4 * 2**30), 0, **_RESERVED),
)
"""PEFT's method comparison (L40S) and torchtitan (H100, 8 of a node)."""


class WithItsLoss(nn.Module):
    """A causal language model that computes its loss as transformers did when a row was measured.

    Args:
        model: a model of transformers.
        older: see `Published.older`.
    """

    def __init__(self, model: Any, *, older: bool) -> None:
        super().__init__()
        self.net, self.older = model, older
        self.scale = getattr(model.config, "logits_scaling", None)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the loss, as a sum over the tokens after the first."""
        hidden = self.net.model(ids, use_cache=False)[0]
        logits = self.net.lm_head(hidden)
        if self.scale is not None:
            logits = logits / self.scale
        wide = logits.float()
        if self.older:
            del logits
        moved = wide[..., :-1, :].contiguous()
        labels = ids[..., 1:].contiguous()
        return F.cross_entropy(moved.view(-1, moved.shape[-1]), labels.view(-1), reduction="sum")


class OfTheModel:
    """The loss that a model has computed itself."""

    def __call__(self, output: Tensor, target: Any, count: float | None = None) -> Tensor:
        """Return the model's output."""
        del target, count
        return output

    def count(self, target: Tensor) -> int:
        """The tokens that are predicted."""
        return target.numel() - len(target)


def described(row: Published) -> nn.Module:
    """The model of a row on the meta device: bf16 weights, fp32 adapters."""
    import transformers

    family, fields = MODELS[row.model]
    config = getattr(transformers, f"{family}Config")(**fields)
    config._attn_implementation = "sdpa"
    with torch.device("meta"):
        model = getattr(transformers, f"{family}ForCausalLM")(config)
        model = model if row.mixed else model.to(torch.bfloat16)
        model.config.use_cache = False
        if row.lora:
            attach(model, LoraConfig(rank=row.lora, alpha=16, dropout=0.1, targets=row.targets))
            for name, parameter in model.named_parameters():
                if ".lora_" in name:
                    parameter.data = parameter.data.float()
    return WithItsLoss(model, older=row.older)


def forecast(row: Published) -> tuple[Peak, int, int, int]:
    """Return the peak of a row, the bytes of its states at the end, P, and trained parameters."""
    model = described(row)
    job = load_job(
        None,
        "single",
        [
            # without autocast the parameters have their own dtypes
            f"train.precision={'bf16' if row.mixed else 'fp32'}",
            *("optim.name=adamw", "optim.lr=1e-5", "optim.weight_decay=0.01", "optim.eps=1e-4"),
            *("optim.implementation=foreach", "optim.clip_norm=1.0"),
        ],
    )
    ids = torch.zeros((1, row.length), dtype=torch.int64)
    example = MicroBatch(ids, ids.clone(), row.length - 1, 1)
    library = SectionLibrary(
        model,
        example,
        lambda *_: OfTheModel(),
        optimizer_factory(job.optim, 0),
        torch.device("cpu"),
    )
    evaluator = PlanEvaluator(job, library, StepTimer(load_cluster("a100-node")), {"torch": 0.0})
    candidate = _candidate(row, library.num_blocks)
    fit = evaluator.fit(candidate, evaluator.plan_of(candidate))
    sections = len(fit.levels["keep"].sections)
    rank = fit.forecast(fit.uniform_stages([0, sections], row.policy), 0)
    held = rank.states
    states = held.parameters + held.frozen + held.buffers + held.optimizer
    if row.gpus > 1 or row.quantity == "after a step":  # FSDP1 keeps the gradients' shards
        trained_bytes = sum(p.nbytes for p in model.parameters() if p.requires_grad)
        states += trained_bytes // row.gpus
    numbers = [p.numel() for p in model.parameters()]
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return rank.peak(), states + 3 * row.batch * row.length * 8, sum(numbers), trained


def _candidate(row: Published, blocks: int) -> Candidate:
    """The plan of a row: one process, or full shards."""
    space = SearchSpace(
        devices=row.gpus,
        per_node=8,
        global_batch_size=row.batch * row.gpus,
        num_blocks=blocks,
        pp=1,
        tp=1,
        rows=row.batch,
        engines=("torch",),
        device_type="cuda",
    )
    wanted = "single" if row.gpus == 1 else "fsdp"
    found = {candidate.label: candidate for candidate in space.candidates()}
    return found[wanted]


def others(row: Published, parameters: int) -> dict[str, int]:
    """The bytes that estimators name which know neither activations nor adapters."""
    return {
        # 4 x the bytes of fp32 parameters, for training with Adam
        "accelerate estimate-memory": 4 * 4 * parameters,
        # estimate_zero3_model_states_mem_needs without offload: 18 bytes a parameter over all
        # GPUs, and the largest layer in bf16 and fp32
        "deepspeed estimate_zero3": 18 * parameters // row.gpus + 4 * _largest_layer(row),
        # estimate_zero2: 2 bytes a parameter on each GPU, and 18 over all
        "deepspeed estimate_zero2": 2 * parameters + 18 * parameters // row.gpus,
    }


def _largest_layer(row: Published) -> int:
    fields = MODELS[row.model][1]
    return int(fields["vocab_size"] * fields["hidden_size"])


def compared(row: Published) -> dict[str, Any]:
    """A row with its forecast and the errors."""
    peak, states, parameters, trained = forecast(row)
    states += CUBLAS_WORKSPACES
    predicted = peak.bytes + CUBLAS_WORKSPACES
    if row.quantity == "after a step":
        predicted = states
    found = {
        "model": row.model,
        "gpus": row.gpus,
        "tuning": f"lora r {row.lora}" if row.lora else "full",
        "batch": row.batch,
        "length": row.length,
        "quantity": row.quantity,
        "parameters": parameters,
        "trained": trained,
        "printed": row.peak,
        "forecast": predicted,
        "error": predicted / row.peak - 1,
        "phase": peak.phase,
        "breakdown": dict(vars(peak.breakdown)),
        "reason": row.reason,
        "others": {
            name: {"bytes": size, "error": size / row.peak - 1}
            for name, size in others(row, parameters).items()
        },
    }
    if row.end:
        found |= {"printed_end": row.end, "forecast_end": states}
        found["end_error"] = states / row.end - 1
    return found


def line(number: int, found: dict[str, Any]) -> str:
    """A row as text."""
    known = "; ".join(f"{name} {other['error']:+.0%}" for name, other in found["others"].items())
    end = ""
    if "end_error" in found:
        end = (
            f", at the end {found['printed_end']:,}, forecast {found['forecast_end']:,}: "
            f"{found['end_error']:+.3%}"
        )
    why = f" ({found['reason']})" if found["reason"] else ""
    return (
        f"{number:2} {found['model']}, {found['gpus']} GPUs x {found['batch']} x "
        f"{found['length']}, {found['tuning']}: {found['quantity']} {found['printed']:,}, forecast "
        f"{found['forecast']:,} in {found['phase']}: {found['error']:+.2%}{end}{why}. {known}\n"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare every row, print a table and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--rows", type=int, nargs="+", help="numbers of rows, from 0")
    options = parser.parse_args(arguments)
    rows = []
    for number, row in enumerate((*ROWS, *OTHER_ROWS)):
        if options.rows is not None and number not in options.rows:
            continue
        rows.append(compared(row))
        sys.stdout.write(line(number, rows[-1]))
        sys.stdout.flush()
        libraries = {name: metadata.version(name) for name in ("transformers", "peft")}
        figures = {"libraries": libraries, "rows": rows, "not_forecast": NOT_FORECAST}
        keep(options.output, {**figures, "bars": {"states": STATES_BAR, "peak": PEAK_BAR}})
    return 0


if __name__ == "__main__":
    sys.exit(main())
