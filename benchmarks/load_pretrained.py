"""Host memory of each rank while a model of the Hub is loaded, under strategies, beside its share.

    python benchmarks/load_pretrained.py [--ranks 2] [--output FILE]

Models are made from configurations and saved in bf16, in several files; ranks hold fp32. `peak` is
the highest RssAnon of a rank from the first value of the model to the last, in addition to that
before: pages of the files do not count. `over` is the difference of the peak and the rank's share,
in units of the model's largest tensor; at most one is wanted. `sum` is the sum of all ranks' peaks
over the model's bytes. The first load in a process allocates modules and buffers of libraries, so
each rank loads a small model before.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from harness import keep

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from support import hub_models  # noqa: E402
from support.hub_loads import load_twice  # noqa: E402
from support.ranks import run_ranks  # noqa: E402

STRATEGIES = ("ddp", "fsdp", "zero1", "zero3", "1f1b", "tensor")
AXES = {"1f1b": "pp", "tensor": "tp"}
_SIZES = {"hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8}
_SIZES |= {"num_key_value_heads": 4, "max_position_embeddings": 64, "pad_token_id": 0}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama, 8 layers": (
        "LlamaForCausalLM",
        "LlamaConfig",
        {**_SIZES, "intermediate_size": 1536, "vocab_size": 8192},
    ),
    "mixtral, 8 layers of 4 experts": (
        "MixtralForCausalLM",
        "MixtralConfig",
        {**_SIZES, "intermediate_size": 768, "vocab_size": 4096, "num_local_experts": 4},
    ),
}


def measure(strategy: str, ranks: int, small: Path, folder: Path) -> dict[str, Any]:
    """The figures of all ranks under one strategy."""
    axes = {AXES[strategy]: ranks} if strategy in AXES else {}
    rows = run_ranks(load_twice, ranks, strategy, small, folder, timeout_s=600.0, **axes)
    model = rows[0]["model_bytes"]
    over = [(row["peak_bytes"] - row["share_bytes"]) / row["largest_bytes"] for row in rows]
    return {"sum": sum(row["peak_bytes"] for row in rows) / model, "over": over, "ranks": rows}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print a table and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--strategies", nargs="+", default=STRATEGIES)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(arguments)
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        small = hub_models.save("llama", Path(scratch) / "small")
        for name, family in MODELS.items():
            hub_models.FAMILIES[name] = family
            folder = hub_models.save(name, Path(scratch) / "large", dtype=torch.bfloat16)
            for strategy in options.strategies:
                row = found.setdefault(name, {})[strategy] = measure(
                    strategy, options.ranks, small, folder
                )
                over = ", ".join(f"{one:+.2f}" for one in row["over"])
                shares = ", ".join(f"{rank['share_bytes'] / 2**20:.1f}" for rank in row["ranks"])
                sys.stdout.write(
                    f"{name:32} {strategy:8} shares {shares} MiB, over {over} tensors, "
                    f"sum {row['sum']:.3f}\n"
                )
            for path in folder.iterdir():
                path.unlink()
            folder.rmdir()
    keep(options.output, {"world_size": options.ranks, "models": found})
    return 0


if __name__ == "__main__":
    sys.exit(main())
