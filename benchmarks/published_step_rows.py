"""Rows of published step times, with the settings that their sources print.

llm-foundry's rows are in `published_foundry.tsv`: all 209 rows in 16 bits of
`scripts/train/benchmarking/README.md` (mosaicml/llm-foundry). The other rows are below. A row whose
settings are not all printed is left out, and named in `NOT_FORECAST`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from bigtrain.activations.policy import BlockPolicy

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
EVERY_LINEAR = (*ATTENTION, "gate_proj", "up_proj", "down_proj")
QUERY_VALUE = ("q_proj", "v_proj")


@dataclass(frozen=True)
class StepRow:
    """One printed row."""

    source: str
    gpu: str
    """A key of `published_steps.CLUSTERS`."""
    model: str
    """A key of `published_causal.MODELS`, or of `FOUNDRY_SHAPES`."""
    length: int
    """Tokens of a sample."""
    devices: int
    rows: int
    """Samples of a micro-batch."""
    micro_batches: int
    """Micro-batches of a step."""
    blocks: BlockPolicy
    """The tensors that the blocks keep."""
    strategy: str
    seconds: float
    """The printed seconds of a step."""
    lora: int = 0
    """The rank of the adapters; 0 in full."""
    targets: tuple[str, ...] = ()
    weights: str = "fp32"
    """The dtype of the parameters. With fp32 the computation is in bf16; with bf16 there are no
    fp32 copies."""
    adapters: str = "fp32"
    """The dtype in which adapters are computed."""
    compiled: bool = False
    optimizer: str = "foreach"


FOUNDRY_SHAPES = {
    "125m": (12, 768, 12),
    "350m": (24, 1024, 16),
    "760m": (24, 1536, 12),
    "1b": (24, 2048, 16),
    "3b": (32, 2560, 20),
    "7b": (32, 4096, 32),
    "13b": (40, 5120, 40),
    "30b": (48, 7168, 56),
    "70b": (80, 8192, 64),
}
"""Layers, width and heads of MPT (`scripts/train/yamls/pretrain`); the vocabulary is 50,368."""


def foundry_rows() -> list[StepRow]:
    """The rows of llm-foundry."""
    lines = (Path(__file__).parent / "published_foundry.tsv").read_text("utf-8").splitlines()
    rows = []
    for line in lines[1:]:
        gpu, model, *numbers, blocks, strategy, tokens = line.split("\t")
        length, devices, size, count = map(int, numbers)
        policy: BlockPolicy = "full" if blocks == "full" else "keep"
        seconds = size * count * length / float(tokens)
        settings = (model, length, devices, size, count, policy, strategy, seconds)
        rows.append(StepRow("llm-foundry", gpu, *settings))
    return rows


def _fms() -> list[StepRow]:
    """Return fms-acceleration's rows of the variant `none` (`scripts/benchmarks/refs`).

    Samples of 4,096 tokens, gradient checkpointing, FlashAttention 2, weights in bf16; on two GPUs
    FSDP1.
    """
    printed = {  # model, tuning: tokens/s a GPU on 1 GPU with 4 and 8 samples, on 2 with 2 and 4
        ("Mistral-7B", 0): (3063, 3143, 2777, 3009),
        ("Mistral-7B", 16): (3324, 3354, 2946, 3169),
        ("PowerLM-3b", 0): (5099, 5224, 4578, 4991),
        ("PowerLM-3b", 16): (5033, 5106, 3990, 4783),
    }
    rows = []
    for (model, rank), tokens in printed.items():
        for rate, devices, size in zip(tokens, (1, 1, 2, 2), (4, 8, 2, 4), strict=True):
            alone = devices == 1
            row = StepRow(
                *("fms-acceleration", "a100", model, 4096, devices, size, 1, "full"),
                *("single" if alone else "fsdp", size * 4096 / rate, rank, ATTENTION),
                weights="bf16" if alone else "fp32",
            )
            rows.append(row)
    return rows


def _qwen() -> list[StepRow]:
    """Return the rows of Qwen's README.

    One A100, batch 1, accumulation 8, gradient checkpointing, FlashAttention 2, LoRA of rank 64 on
    all linear layers, weights in bf16, autocast.
    """
    lengths = (256, 512, 1024, 2048, 4096, 8192)
    printed = {
        ("Qwen-1.8B", 64): (1.0, 1.0, 1.1, 1.7, 3.3, 6.8),
        ("Qwen-1.8B", 0): (2.1, 2.2, 2.2, 2.3, 2.8, 5.6),
        ("Qwen-7B", 64): (1.2, 1.5, 2.8, 5.2, 10.1, 21.3),
        ("Qwen-14B", 64): (1.6, 2.4, 4.4, 8.4, 17.0, 36.0),
    }
    return [
        StepRow(
            *("Qwen", "a100", model, length, 1, 1, 8, "full", "single", seconds, rank),
            *(EVERY_LINEAR, "bf16" if rank else "fp32", "bf16"),
        )
        for (model, rank), row in printed.items()
        for length, seconds in zip(lengths, row, strict=True)
    ]


def _titan() -> list[StepRow]:
    """Return torchtitan's rows: fp32 parameters, bf16 compute, AdamW.

    Its H100 has 96 GB of HBM2e and 500 W (`benchmarks/llama3_h100_202412_torchtitan.md`; commits
    5940ddeb5, 40f8fd007, d66b72a6a).
    """

    def titan(tokens: int, devices: int, size: int, strategy: str = "fsdp") -> StepRow:
        settings = ("Llama-3-8B", 8192, devices, size, 1, "selective", strategy)
        return StepRow("torchtitan", "h100-500w", *settings, size * 8192 / tokens)  # type: ignore

    def qwen(tokens: int, devices: int, size: int) -> StepRow:
        settings = ("Qwen3-32B", 4096, devices, size, 1, "full", "fsdp", size * 4096 / tokens)
        return StepRow("torchtitan", "h100-500w", *settings)  # type: ignore[arg-type]

    eager = titan(5762, 8, 2)
    return [
        eager,
        titan(5605, 128, 2),
        titan(5605, 8, 1),
        titan(5763, 8, 1, "fsdp_zero2"),
        replace(eager, compiled=True, seconds=2 * 8192 / 6667),
        replace(eager, compiled=True, devices=128, seconds=2 * 8192 / 6514),
        replace(titan(2615, 8, 1), gpu="a100"),
        replace(titan(2714, 8, 1), gpu="a100", optimizer="fused"),
        qwen(1444, 8, 1),
        qwen(1614, 8, 2),
        qwen(1518, 16, 4),
    ]


OTHERS = (
    # torchtune's README: one A100, samples packed to 4,096 tokens, batch 2, all states in bf16
    StepRow(
        *("torchtune", "a100", "Llama-3.2-3B", 4096, 1, 2, 1, "keep", "single", 8192 / 7075),
        weights="bf16",
    ),
    StepRow(
        *("torchtune", "a100", "Llama-3.2-3B", 4096, 1, 2, 1, "keep", "single", 8192 / 8998),
        weights="bf16",
        compiled=True,
    ),
    # NeMo AutoModel's docs/performance-summary.mdx: one H100, mock data, global batch 32; its
    # adapters have the dtype of the weights
    StepRow(
        *("AutoModel", "h100", "Llama-3-8B", 4096, 1, 2, 16, "keep", "single", 10.51),
        *(16, EVERY_LINEAR, "bf16", "bf16"),
    ),
    StepRow(
        *("AutoModel", "h100", "Qwen2.5-7B", 4096, 1, 2, 16, "keep", "single", 9.29),
        *(16, EVERY_LINEAR, "bf16", "bf16"),
    ),
    # LLaMA-Factory's wiki, "Performance comparison": FlashAttention 2, accumulation 2,
    # autocast
    StepRow(
        *("LLaMA-Factory", "a100-40", "Llama-2-7B", 1024, 1, 4, 2, "full", "single"),
        *(2 * 4 * 1024 / 2954, 8, EVERY_LINEAR, "bf16", "bf16"),
    ),
    # PEFT's method_comparison: one L40S, 4,198,051 tokens in 5,000 steps of 4 samples
    *(
        StepRow(
            *("PEFT", "l40s", "Llama-3.2-3B", 210, 1, 4, 1, "keep", "single", 4 * 210 / tokens),
            *(rank, QUERY_VALUE, "bf16"),
        )
        for rank, tokens in ((0, 2315), (32, 7198), (64, 7058))
    ),
)

NOT_FORECAST = {
    "llm-foundry in fp8, torchtitan in fp8, MXFP8 and NVFP4": "bigtrain has no such precision",
    "fms-acceleration's foak and liger, Unsloth": "their kernels are not in bigtrain",
    "rows with weights in 4 bits": "the seconds of unpacking are not forecast",
    "torchtitan and AutoModel with context parallelism": "no strategy of bigtrain has it",
    "litgpt, fsdp_qlora": "the lengths of their samples are not printed, or they are in 4 bits",
    "torchtune on RTX 4090 and A6000": "there is no cluster file, and blocks are recomputed in "
    "part by its own policy",
    "Mixtral, Qwen3-30B-A3B": "the tokens of each expert are not printed",
    "Ascend, ms-swift": "the number of samples is not printed",
}


def other_rows() -> list[StepRow]:
    """The rows of other sources."""
    return [*_fms(), *_qwen(), *_titan(), *OTHERS]
