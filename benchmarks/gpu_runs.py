"""Train common models on one GPU, beside their forecasts and beside plain transformers and peft.

    python benchmarks/gpu_runs.py --folder FOLDER --output benchmarks/results/gpu_runs.json

Models are built from public configurations with random weights, so nothing is downloaded. Runs that
only measure memory share the GPU. After them, the timed runs have it alone. `plain` rows are loops
of transformers, peft and torch with the same model, batch, precision and recomputation, each in a
process of its own. Bytes of a plain loop are those that its tensors requested from the allocator.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Condition
from typing import Any

import torch
from harness import keep

from bigtrain.compare.rows import ComparisonRow
from bigtrain.compare.subprocess_runs import QuietRun, run_bigtrain
from bigtrain.devices import (
    accelerator,
    allocator_peaks,
    current_device,
    reset_peaks,
    start_kernels,
    synchronize,
)
from bigtrain.machine.rate_cache import measured_rates

STEPS, TRACKED = 8, 2
_LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "rms_norm_eps": 1e-5}
MODELS: dict[str, dict[str, Any]] = {
    "mistral-7b": {
        **{"model_type": "mistral", "architectures": ["MistralForCausalLM"]},
        **{"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32},
        **{"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000},
        **{"max_position_embeddings": 32768, "sliding_window": None, "rms_norm_eps": 1e-5},
    },
    "llama-3.2-1b": {
        **_LLAMA,
        **{"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16},
        **{"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256},
        **{"max_position_embeddings": 8192, "tie_word_embeddings": True, "head_dim": 64},
    },
    "qwen3-0.6b": {
        **{"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "head_dim": 128},
        **{"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28},
        **{"num_attention_heads": 16, "num_key_value_heads": 8, "vocab_size": 151936},
        **{"max_position_embeddings": 8192, "tie_word_embeddings": True},
    },
    "qwen3-moe": {
        **{"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "head_dim": 128},
        **{"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 8},
        **{"num_attention_heads": 16, "num_key_value_heads": 4, "vocab_size": 32000},
        **{"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 768},
        **{"max_position_embeddings": 8192, "tie_word_embeddings": False},
    },
}
"""By name: the public configuration of a language model of transformers."""
MODELS["mistral-8-layers"] = {**MODELS["mistral-7b"], "num_hidden_layers": 8}
"""A part of Mistral-7B, whose random weights are drawn in a quarter of the time."""
SMALL = {
    **{"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 512},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32},
}
"""The sizes of all models with `--small`."""


@dataclass(frozen=True)
class Run:
    """One job."""

    name: str
    model: str
    """A name of `MODELS`, or a model of bigtrain."""
    rows: int
    length: int
    """The tokens of a row; 0 for images."""
    words: Sequence[str] = ()
    strategy: str = "single"
    timed: bool = False
    """Whether the run has the GPU alone."""
    plain: str | None = None
    """`full` or `lora`: the plain loop beside the run. None: there is none."""
    gib: float = 20.0
    """A bound of the run's peak in GiB, by which runs share the GPU."""


BF16 = ("train.precision=bf16",)
ALL_BF16 = (*BF16, "optim.master_weights=false", "optim.state=bf16")
ATTENTION = "model.lora.targets=[q_proj,k_proj,v_proj,o_proj]"
LORA = ("model.lora.rank=16", "model.lora.alpha=16", ATTENTION)
RUNS = (
    Run("lora", "mistral-7b", 4, 4096, (*BF16, *LORA), "single+full", gib=30),
    Run("lora", "mistral-8-layers", 4, 4096, (*BF16, *LORA), "single+full", True, "lora"),
    Run(
        "lora_bf16",
        "mistral-8-layers",
        4,
        4096,
        (*ALL_BF16, *LORA),
        "single+full",
        True,
    ),
    Run(
        "qlora",
        "mistral-7b",
        4,
        4096,
        (*BF16, *LORA, "model.lora.quantize=nf4"),
        "single+full",
        gib=20,
    ),
    Run("full", "llama-3.2-1b", 8, 2048, ALL_BF16, "single+full", True, "full", 20),
    Run("full_masters", "llama-3.2-1b", 4, 2048, BF16, gib=40),
    Run("lora_all", "llama-3.2-1b", 4, 2048, (*BF16, "model.lora.rank=16"), gib=20),
    Run("selective", "llama-3.2-1b", 4, 2048, BF16, "single+selective", gib=30),
    Run("full", "qwen3-0.6b", 4, 2048, BF16, gib=25),
    Run("full", "qwen3-moe", 4, 1024, BF16, gib=20),
    Run("frozen", "qwen3-0.6b", 4, 2048, (*BF16, "model.freeze=['*','!*mlp*']"), gib=20),
    Run("full", "timm:vit_base_patch16_224", 64, 0, BF16, timed=True),
    Run("full", "timm:convnext_tiny", 64, 0, BF16, gib=12),
    Run("full", "resnet50", 128, 0, (*BF16, "train.memory_format=channels_last"), timed=True),
    Run("offload", "llama-3.2-1b", 4, 2048, BF16, "single+full+offload_cpu", gib=20),
    Run("fsdp", "llama-3.2-1b", 4, 2048, BF16, "fsdp+full", gib=30),
    Run("zero2", "llama-3.2-1b", 4, 2048, BF16, "zero2+full", gib=35),
    Run("full_bf16", "mistral-7b", 4, 4096, ALL_BF16, "single+full", gib=76),
)


def command_of(run: Run, folder: Path) -> QuietRun:
    """Return the command of a run, whose model has its `config.json` below the folder."""
    words = [
        *run.words,
        f"train.steps={STEPS}",
        f"train.global_batch_size={run.rows}",
        f"memory.track_steps={TRACKED}",
        "data.name=synthetic",
    ]
    if run.model in MODELS:
        vocabulary = MODELS[run.model]["vocab_size"]
        words += [
            f"model.name=hf:{folder / run.model}",
            "model.pretrained=false",
            f"data.args={{kind: language, vocabulary: {vocabulary}, length: {run.length}}}",
        ]
    else:
        images = "data.args={input_shape: [3, 224, 224], num_classes: 1000}"
        words += [f"model.name={run.model}", images]
    return QuietRun(
        command="train",
        strategy=run.strategy,
        num_ranks=1,
        folder=folder / f"{run.model.replace(':', '-')}-{run.name}",
        words=words,
    )


def measured(run: Run, folder: Path, limit_s: float) -> dict[str, Any]:
    """Return the figures of a run by bigtrain; with an error, the reason and the last lines."""
    command = command_of(run, folder)
    began = time.monotonic()
    planned = None
    if run.timed:
        output = folder / "plan.yaml"
        words = ["plan", "-n", "1", f"--output={output}", *command.words]
        outcome = run_bigtrain(words, folder / "plan.log", limit_s)
        planned = {"seconds": time.monotonic() - began, "error": outcome.reason}
    outcome = command.run(limit_s)
    figures: dict[str, Any] = {
        **{"run": run.name, "model": run.model, "strategy": run.strategy, "rows": run.rows},
        **{"length": run.length, "words": list(run.words), "alone": run.timed},
        "wall_seconds": time.monotonic() - began,
        "plan": planned,
    }
    if outcome.reason is not None:
        text = command.log.read_text(errors="replace").splitlines()[-25:]
        return {**figures, "error": outcome.reason, "last_lines": text}
    row = ComparisonRow.of_run(run.name, 1, command.folder).as_json()
    (rank,) = command.json("memory.json")["ranks"]
    names = ("peak_bytes", "predicted_peak_bytes", "prediction_error", "breakdown", "phase")
    figures |= {name: row[name] for name in names}
    figures |= {name: rank.get(name) for name in ("allocated_bytes", "reserved_bytes")}
    figures |= {name: rank.get(name) for name in ("predicted_phase", "predicted_breakdown")}
    figures |= {name: row[name] for name in ("step_seconds", "predicted_step_seconds")}
    return {**figures, "losses": [round(loss, 5) for loss in row["losses"]]}


def plain_loop(config: Path, tuning: str, rows: int, length: int) -> dict[str, Any]:
    """Train a model with transformers, peft and torch alone; return bytes and seconds.

    Args:
        config: the folder with the model's `config.json`.
        tuning: `full`: bf16 parameters, all trained. `lora`: adapters in fp32 on bf16 parameters.
        rows: the rows of a batch.
        length: the tokens of a row.
    """
    import peft
    import transformers

    device = current_device(str(accelerator() or "cpu"))
    start_kernels(device)
    before = reset_peaks(device)
    torch.manual_seed(0)
    shape = transformers.AutoConfig.from_pretrained(config)
    with device:
        model: Any = transformers.AutoModelForCausalLM.from_config(shape, dtype=torch.bfloat16)
    model.config.use_cache = False
    if tuning == "lora":
        names = ["q_proj", "k_proj", "v_proj", "o_proj"]
        model = peft.get_peft_model(
            model, peft.LoraConfig(r=16, lora_alpha=16, target_modules=names)
        )
        model.enable_input_require_grads()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)
    tokens = torch.randint(shape.vocab_size, (rows, length + 1))
    seconds, losses = [], []
    for _ in range(STEPS):
        synchronize(device)
        began = time.perf_counter()
        batch = tokens.to(device)
        loss = model(input_ids=batch[:, :-1], labels=batch[:, :-1]).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        synchronize(device)
        seconds.append(time.perf_counter() - began)
    peaks = allocator_peaks(device)
    return {
        "peak_bytes": peaks.requested - before,
        "allocated_bytes": peaks.allocated,
        "reserved_bytes": peaks.reserved,
        "step_seconds": statistics.median(seconds[TRACKED:]),
        "losses": [round(each, 5) for each in losses],
    }


def beside(run: Run, folder: Path, limit_s: float) -> dict[str, Any]:
    """Return the figures of a run's plain loop, which runs in a process of its own."""
    words = [run.model, str(run.plain), str(run.rows), str(run.length)]
    command = [sys.executable, __file__, "--folder", str(folder), "--plain-loop", *words]
    figures = {"run": f"plain_{run.plain}", "model": run.model, "rows": run.rows, "alone": True}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s)
    except subprocess.TimeoutExpired:
        return {**figures, "error": "time limit"}
    if done.returncode:
        return {**figures, "error": done.stderr.splitlines()[-8:]}
    return {**figures, **json.loads(done.stdout.splitlines()[-1])}


class Budget:
    """Lets runs share a GPU while the sum of their bounds is below its memory."""

    def __init__(self, gib: float) -> None:
        self._free = gib
        self._condition = Condition()

    def take(self, gib: float) -> None:
        """Wait until so much is free, and take it."""
        with self._condition:
            self._condition.wait_for(lambda: self._free >= gib)
            self._free -= gib

    def give(self, gib: float) -> None:
        """Give back what a run had taken."""
        with self._condition:
            self._free += gib
            self._condition.notify_all()


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the list, and print a line for each run."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--deadline", type=float, default=1e9, help="no run begins after SECONDS")
    parser.add_argument("--only", nargs="*", help="MODEL:RUN")
    parser.add_argument("--gib", type=float, default=62, help="what runs may share")
    parser.add_argument("--jobs", type=int, default=4)
    parser.add_argument("--no-rates", action="store_true")
    parser.add_argument("--small", action="store_true", help="tiny models, to try the list")
    parser.add_argument("--plain-loop", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    options.folder.mkdir(parents=True, exist_ok=True)
    if options.plain_loop:
        name, tuning, rows, length = options.plain_loop
        print(json.dumps(plain_loop(options.folder / name, tuning, int(rows), int(length))))
        return
    if options.small:
        MODELS.update({name: {**shape, **SMALL} for name, shape in MODELS.items()})
    for name, shape in MODELS.items():
        path = options.folder / name / "config.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps({**shape, "torch_dtype": "bfloat16"}))
    began = time.monotonic()
    runs = [r for r in RUNS if not options.only or f"{r.model}:{r.name}" in options.only]
    if options.small:
        runs = [replace(run, rows=2, length=64) for run in runs if run.model in MODELS]
    figures: list[dict[str, Any]] = []

    def add(found: dict[str, Any]) -> None:
        figures.append(found)
        keep(options.output, {"runs": figures})
        text = {k: v for k, v in found.items() if k not in ("losses", "words", "last_lines")}
        print(json.dumps(text), flush=True)

    budget = Budget(options.gib)

    def shared(run: Run) -> None:
        gib = min(run.gib, options.gib)
        budget.take(gib)
        try:
            if time.monotonic() - began < options.deadline:
                add(measured(run, options.folder, 200))
        finally:
            budget.give(gib)

    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(shared, (run for run in runs if not run.timed)))
    if not options.no_rates:
        measured_rates()
    for run in runs:
        if run.timed and time.monotonic() - began < options.deadline:
            add(measured(run, options.folder, 200))
            if run.plain and accelerator() is not None:
                add(beside(run, options.folder, 120))


if __name__ == "__main__":
    main()
