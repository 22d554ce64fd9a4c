"""Published peaks of training runs, with the settings that their sources print.

A row has the printed number in bytes, and says which quantity it is. Everything on which the memory
of a step depends is in the row and in its `Tool`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Literal

from bigtrain.activations.policy import BlockPolicy

Quantity = Literal["allocated", "after a step", "active", "reserved", "process"]
"""In this order: bytes of tensors at the peak; those after a step; those at the peak with blocks
that wait for a stream; bytes that torch's allocator took; bytes of the process, with the CUDA
context."""


AMPERE, HOPPER = 8_519_680, 33_554_432
"""Bytes of a thread's workspace of cuBLAS by torch's default, on an A100 and on an H100."""


@dataclass(frozen=True)
class Tool:
    """How a tool runs a model, where that changes the memory."""

    loss: str = "copied"
    """The order of the loss: see `published_models.WithItsLoss.loss`."""
    weights: Literal["bf16", "fp32", "nf4", "gptq", "gptq columns", "nf4 single"] = "bf16"
    """How one process keeps the weights, frozen or trained."""
    adapters: str = "float32"
    """The dtype of the adapters."""
    dropout: float = 0.1
    autocast: bool = False
    upcast: bool = False
    """Whether norms are fp32 beside weights in 4 bits."""
    checkpoint: str = ""
    """`reentrant`, or `products` (every second product is kept); else bigtrain's own policy."""
    policy: BlockPolicy = "keep"
    """The tensors that the blocks keep: bigtrain's policy."""
    flash: bool = False
    """Whether attention is that of the package flash-attn; else torch's own."""
    fast_norm: bool = False
    fast_rotation: bool = False
    fast_gate: bool = False
    fused_adapters: bool = False
    keeps_input: bool = False
    """Whether products in 4 bits keep their input, as those of bitsandbytes 0.41 and 0.42."""
    merged: Literal["", "litgpt", "Qwen"] = ""
    """The tool in which q, k and v are one layer; empty if they are three."""
    sharding: Literal["", "fsdp1", "fsdp", "fsdp_zero2"] = ""
    """FSDP1, or a strategy of bigtrain; empty for one process."""
    width: int = 0
    """Under FSDP1: bytes of an element of a trained shard."""
    mixed: bool = False
    """Whether parameters are fp32 and computed in bf16, by bigtrain's precision."""
    optimizer: tuple[str, ...] = ("optim.name=adamw", "optim.implementation=foreach")
    clip: float = 1.0
    workspace: int = AMPERE
    """Bytes of cuBLAS' workspace of a thread."""


@dataclass(frozen=True)
class Published:
    """One printed row."""

    family: str
    """The source, a key of `QUANTITIES`."""
    model: str
    gpus: int
    lora: int
    """The rank of the adapters; 0 in full."""
    batch: int
    """Samples of a GPU."""
    length: int
    """Tokens of a sample."""
    peak: int
    """Printed bytes."""
    tool: Tool
    end: int = 0
    """Printed bytes allocated at the end of the run; 0 if they are not printed."""
    quantity: Quantity = "allocated"
    targets: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj")
    adapter: str = ""
    """The configuration of peft's adapter, as JSON, if it is not LoRA."""
    head_trained: bool = False
    """Whether embeddings and head are trained beside adapters."""
    alive: int = 0
    """Bytes of results that are alive after a step, if bytes after a step are printed."""
    label: str = ""
    """The variant, by the source's name."""
    cause: str = ""
    """The cause of a difference above 5 %."""


LENGTH = 4096
FMS = Path(__file__).with_name("published_fms.tsv")


@cache
def fms_rows() -> tuple[Published, ...]:
    """The rows of fms-acceleration's `scripts/benchmarks/refs/*.csv`."""
    return tuple(_fms_rows())


def _fms_rows() -> Iterator[Published]:
    for line in FMS.read_text("utf-8").splitlines()[1:]:
        versions, variant, model, gpus, tuning, batch, peak, end = line.split("\t")
        yield Published(
            f"fms-acceleration {versions}",
            _FMS_NAMES.get(model, model),
            int(gpus),
            16 if tuning == "lora" else 0,
            int(batch),
            LENGTH,
            int(peak),
            _fms_tool(
                versions,
                variant,
                int(gpus),
                lora=tuning == "lora",
                big="70B-GPTQ" in model or "Mixtral" in model,
            ),
            int(end),
            label=variant,
        )


_FMS_NAMES = {
    "Mistral-7B-v0.1-GPTQ": "Mistral-7B-v0.1",
    "Meta-Llama-3-8B-GPTQ": "Meta-Llama-3-8B",
    "Llama-2-70B-GPTQ": "Llama-2-70b-hf",
    "Mixtral-8x7B-Instruct-v0.1-GPTQ": "Mixtral-8x7B-Instruct-v0.1",
}


def _fms_tool(versions: str, variant: str, gpus: int, *, lora: bool, big: bool) -> Tool:
    """The tool of a variant, by its configuration and the versions of its set.

    The configuration of Liger with weights in 4 bits misspells the key of the fast norms, so norms
    are torch's there.
    """
    kind = "nf4" if "bnb" in variant else "gptq" if "gptq" in variant else "bf16"
    if big and kind == "gptq":  # its `quantize_config.json` has a group size of -1
        kind = "gptq columns"
    fast, liger = "foak" in variant, "liger" in variant
    autocast = kind != "bf16" or versions == "liger"
    loss = ("fast" if fast else "copied") + ("" if versions == "main" else "_older")
    tool = Tool(
        loss="liger" if liger else loss,
        weights=kind,  # type: ignore[arg-type]
        autocast=autocast,
        upcast=variant.startswith("baseline") and gpus == 1,
        checkpoint="reentrant",
        flash=True,
        fast_norm=fast and not (liger and kind != "bf16"),
        fast_rotation=fast,
        fused_adapters=fast and kind != "bf16",
        optimizer=(*Tool.optimizer, "optim.weight_decay=0.01", "optim.eps=1e-4"),
    )
    if gpus == 1:
        return tool
    # accelerate keeps trained parameters in fp32 where it computes in bf16 under FSDP1
    width = 4 if lora or autocast else 2
    lower = autocast and kind == "bf16"
    return replace(tool, sharding="fsdp1", width=width, adapters="bfloat16" if lower else "float32")


GIB, GB = 2**30, 10**9
RESERVED = "the allocator's free blocks are in the printed bytes, and not in the forecast"
RESERVED_TOO = (
    "the allocator's free blocks are in the printed bytes: of the two runs whose allocated bytes "
    "are printed beside the reserved ones, they are 12 and 24 %"
)
PROCESS = (
    "the printed bytes include the CUDA context and the allocator's free blocks; neither their "
    "size nor the unit is printed"
)
SMALL_NF4 = (
    "found in part: bitsandbytes 0.42 keeps the inputs of products, which is in the forecast; rows "
    "of the same table with bf16 weights are within 1 %"
)
PEFT_CAUSES = {
    "adalora--rank32": "its allocator keeps three more fp32 values of each trained number",
    "psoft--default": "what a full singular value decomposition at the start leaves on the GPU: "
    "the run with a low-rank one prints 1.24 GB less",
    "osf--rank128": "not found in full; all weights are decomposed at the start, as above",
}
PEFT = Path(__file__).with_name("published_peft.tsv")
_ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_PEFT = Tool(dropout=0.0, optimizer=(*Tool.optimizer, "optim.weight_decay=0.1"))
PEFT_TOKENS = 210
"""The mean length of a sample: 4,198,051 tokens in 5,000 steps of 4, padding not counted."""


def peft_rows() -> Iterator[Published]:
    """PEFT's method comparison; the bf16 logits of the last batch are alive after a step."""
    for line in PEFT.read_text("utf-8").splitlines()[1:]:
        run, _, printed, configuration = line.split("\t")
        yield Published(
            "PEFT",
            "Llama-3.2-3B",
            1,
            0,
            4,
            PEFT_TOKENS,
            int(printed),
            _PEFT,
            quantity="after a step",
            adapter=configuration,
            alive=4 * PEFT_TOKENS * 128256 * 2,
            label=run,
            cause=PEFT_CAUSES.get(run, ""),
        )


_TITAN = Tool(
    loss="whole",
    weights="fp32",
    checkpoint="products",
    sharding="fsdp",
    mixed=True,
    workspace=HOPPER,
)


def titan_rows() -> Iterator[Published]:
    """Torchtitan's rows without compilation or fp8: the highest reserved bytes."""
    whole = replace(_TITAN, sharding="fsdp_zero2")
    older = replace(_TITAN, loss="kept", workspace=AMPERE)
    for label, gpus, batch, gib, tool in (
        ("table of 2024-12", 8, 2, 82.4, _TITAN),
        ("table of 2024-12", 128, 2, 67.0, _TITAN),
        ("commit 5940ddeb5", 8, 1, 49.59, _TITAN),
        ("commit e23bb707d", 8, 1, 49.58, _TITAN),
        ("commit f8f545c45", 8, 1, 49.66, _TITAN),
        ("commit c31ff8b05", 8, 1, 49.66, _TITAN),
        ("commit 5940ddeb5, never resharded", 8, 1, 62.18, whole),
        ("commit 40f8fd007, A100", 8, 1, 59.48, older),
    ):
        yield Published(
            "torchtitan",
            "Meta-Llama-3-8B",
            gpus,
            0,
            batch,
            8192,
            int(gib * GIB),
            tool,
            quantity="reserved",
            label=label,
            cause=RESERVED,
        )


_TUNE = Tool(loss="kept", optimizer=("optim.name=adamw", "optim.implementation=fused"), clip=0.0)


def tune_rows() -> Iterator[Published]:
    """Torchtune's one row of the 3B staircase that is packed and not compiled."""
    yield Published(
        "torchtune",
        "Llama-3.2-3B",
        1,
        0,
        2,
        4096,
        int(60.0 * GIB),
        _TUNE,
        quantity="active",
        label="full, packed",
    )


_QLORA = Tool(
    adapters="bfloat16",
    checkpoint="reentrant",
    sharding="fsdp1",
    width=2,
    dropout=0.1,
    optimizer=("optim.name=adamw", "optim.implementation=foreach"),
)


def fsdp_qlora_rows() -> Iterator[Published]:
    """fsdp_qlora's rows of Llama-2-7B without offload, under FSDP1."""
    four = replace(_QLORA, weights="nf4")
    for tool, batch, length, gib, quantity in (
        (_QLORA, 1, 512, 8.28, "allocated"),
        (_QLORA, 1, 2048, 9.16, "allocated"),
        (_QLORA, 1, 512, 10.24, "reserved"),
        (_QLORA, 1, 2048, 10.22, "reserved"),
        (_QLORA, 4, 2048, 16.14, "reserved"),
        (_QLORA, 6, 2048, 21.35, "reserved"),
        (four, 1, 512, 4.98, "reserved"),
        (four, 1, 2048, 5.21, "reserved"),
        (four, 4, 2048, 11.22, "reserved"),
        (four, 10, 2048, 20.97, "reserved"),
    ):
        yield Published(
            "fsdp_qlora",
            "Llama-2-7b",
            2,
            64,
            batch,
            length,
            int(gib * GIB),
            tool,
            quantity=quantity,  # type: ignore[arg-type]
            targets=_ALL,
            label="QLoRA" if tool is four else "LoRA",
            cause=RESERVED_TOO if quantity == "reserved" else "",
        )


_LIT = Tool(
    loss="chunks of 128",
    merged="litgpt",
    adapters="bfloat16",
    dropout=0.05,
    optimizer=("optim.name=adamw", "optim.implementation=foreach", "optim.weight_decay=0"),
    clip=0.0,
)


def litgpt_rows() -> Iterator[Published]:
    """Litgpt's rows of models with Llama's shapes: decimal GB allocated.

    The tables' longest samples: 1,304 tokens on the A100, at most 512 in the rows of the A10G.
    """
    four = replace(_LIT, weights="nf4 single", keeps_input=True)
    double = replace(_LIT, weights="nf4", keeps_input=True)
    for model, rank, batch, length, gb, tool in (
        ("Llama-2-7b", 8, 1, 1304, 21.30, _LIT),
        ("Llama-2-7b", 8, 2, 1304, 29.07, _LIT),
        ("Llama-2-7b", 8, 1, 1304, 14.14, four),
        ("Llama-2-7b", 8, 1, 1304, 13.84, double),
        ("Llama-2-13b", 8, 1, 1304, 38.12, _LIT),
        ("Llama-2-13b", 8, 1, 1304, 23.14, four),
        ("Llama-2-13b", 8, 1, 1304, 22.55, double),
        ("Llama-3.2-1B", 32, 1, 512, 4.49, _LIT),
        ("Llama-3.2-1B", 32, 2, 512, 5.53, four),
        ("Llama-3.2-3B", 32, 1, 512, 9.67, _LIT),
        ("Llama-3.2-3B", 32, 2, 512, 10.30, four),
        ("Meta-Llama-3-8B", 32, 1, 512, 19.73, _LIT),
        ("Meta-Llama-3-8B", 32, 2, 512, 17.41, four),
        ("Llama-2-7b", 32, 2, 512, 19.77, _LIT),
        ("Llama-2-7b", 32, 2, 512, 13.68, four),
        ("Mistral-7B-v0.1", 32, 2, 512, 20.66, _LIT),
        ("Mistral-7B-v0.1", 32, 2, 512, 14.29, four),
    ):
        yield Published(
            "litgpt",
            model,
            1,
            rank,
            batch,
            length,
            int(gb * GB),
            tool,
            targets=("q_proj", "v_proj"),
            label="" if tool is _LIT else "NF4" if tool is four else "NF4, double",
            cause="" if tool is _LIT or length > 512 else SMALL_NF4,
        )
    full = replace(_LIT, merged="")
    yield Published(
        "litgpt",
        "TinyLlama-1.1B",
        1,
        0,
        4,
        512,
        int(14.10 * GB),
        full,
        label="full",
        cause="not found; other rows of full fine-tuning in the table are below the states",
    )


_QWEN = Tool(
    loss="shifted",
    merged="Qwen",
    autocast=True,
    checkpoint="reentrant",
    flash=True,
    dropout=0.05,
    optimizer=(*Tool.optimizer, "optim.weight_decay=0.1"),
)
_LENGTHS = (256, 512, 1024, 2048, 4096, 8192)


def qwen_rows() -> Iterator[Published]:
    """Qwen's table of one GPU: the process, by a tool that is not named, read as GiB."""
    for model, printed in (
        ("Qwen-1.8B", (6.7, 7.4, 8.4, 11.0, 16.2, 21.8)),
        ("Qwen-7B", (20.1, 20.4, 21.5, 23.8, 29.7, 36.6)),
        ("Qwen-14B", (34.6, 35.1, 35.3, 37.4, 42.5, 55.2)),
    ):
        for length, gb in zip(_LENGTHS, printed, strict=True):
            yield Published(
                "Qwen",
                model,
                1,
                64,
                1,
                length,
                int(gb * GIB),
                _QWEN,
                quantity="process",
                targets=_ALL,
                label="LoRA",
                cause=PROCESS,
            )


def automodel_rows() -> Iterator[Published]:
    """NeMo AutoModel's guide to checkpointing: decimal GB allocated, on one GPU without FSDP."""
    tool = Tool(
        loss="whole",
        fast_norm=True,
        fast_rotation=True,
        fast_gate=True,
        optimizer=("optim.name=adamw",),
        workspace=HOPPER,
    )
    for label, gb, policy in (("plain", 53.03, "keep"), ("recomputed", 33.06, "full")):
        yield Published(
            "AutoModel",
            "Llama-3.2-1B",
            1,
            0,
            8,
            2048,
            int(gb * GB),
            replace(tool, policy=policy),  # type: ignore[arg-type]
            label=label,
        )


QUANTITIES: dict[str, str] = {
    **{
        f"fms-acceleration {versions}": "highest bytes allocated, by transformers' memory tracker"
        for versions in ("main", "granite", "liger")
    },
    "PEFT": "mean bytes allocated after a step, with the gradients and the last logits",
    "torchtitan": "highest reserved bytes",
    "torchtune": "highest active bytes: allocated, and blocks that wait for a stream",
    "fsdp_qlora": "highest reserved bytes of a GPU, and allocated where it says so",
    "litgpt": "highest bytes allocated, in 10^9",
    "AutoModel": "highest bytes allocated, in 10^9, mean of the ranks",
    "Qwen": "memory of the process, by a tool that is not named",
}
"""By source: the quantity that it prints."""
NOT_FORECAST: tuple[dict[str, str], ...] = (
    {
        "rows": "fms-acceleration, gpt_bigcode-santacoder (16)",
        "reason": "the model has 2,048 positions and samples are packed to 4,096 tokens; the bytes "
        "at the end are lower with the larger batch, so lengths vary and are not printed",
    },
    {
        "rows": "torchtitan and torchtune, compiled or fp8; QLoRA and offload of torchtune",
        "reason": "without a GPU the forecast of compiled blocks is of the CPU's program; bigtrain "
        "has no fp8",
    },
    {
        "rows": "torchtitan: context parallel, Qwen3-32B without compilation",
        "reason": "bigtrain's ring has another memory; recomputation is not printed",
    },
    {
        "rows": "torchtune: padded batches; Llama-2-7B of the tutorial and of torchao's table",
        "reason": "the padded lengths are not printed",
    },
    {
        "rows": "litgpt, full fine-tuning of Llama-3.2-1B (8.70 GB) and 3B (16.51 GB)",
        "reason": "less than parameters, gradients and both moments in bf16, which the "
        "configurations name",
    },
    {
        "rows": "litgpt: phi, StableLM, Falcon, Gemma, adapters, and FSDP1 of 2 and 4 GPUs",
        "reason": "blocks that differ from transformers' (parallel residuals, merged layers)",
    },
    {
        "rows": "Qwen: embeddings trained, Q-LoRA, full, several GPUs",
        "reason": "DeepSpeed's buffers and auto-gptq's kernels beside a quantity that is not named",
    },
    {
        "rows": "fsdp_qlora: offload, NO_SHARD, Yi-34B, Llama-2-70B, Mistral",
        "reason": "FSDP1's offload and NO_SHARD are not modelled here",
    },
    {
        "rows": "AutoModel: FSDP, linear cross entropy; Gemma 4, Nemotron",
        "reason": "bf16 shards without fp32 masters, which no strategy of bigtrain has; two rows "
        "print the same bytes; batch or length are not printed",
    },
    {
        "rows": "torchao's and Lightning's tables, DeepSpeed's Muon, BERT of accelerate's tests",
        "reason": "not language models of one input, or bounds instead of measured bytes",
    },
    {
        "rows": "LLaMA-Factory, ms-swift, TRL, axolotl, PEFT's README",
        "reason": "the quantity, the batch or the length is not printed",
    },
)
"""Rows that are not forecast, and why."""


def all_rows() -> tuple[Published, ...]:
    """Every row; those of one model and tool follow each other."""
    rows = list(fms_rows())
    order = {row.tool: place for place, row in reversed(list(enumerate(rows)))}
    rows.sort(key=lambda row: (row.family, row.model, row.lora, order[row.tool]))
    makers = (
        peft_rows,
        titan_rows,
        tune_rows,
        fsdp_qlora_rows,
        litgpt_rows,
        qwen_rows,
        automodel_rows,
    )
    for make in makers:
        rows += make()
    return tuple(rows)
