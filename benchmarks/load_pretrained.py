"""Host memory of each rank while a model of the Hub is loaded, under strategies, beside its share.

    python benchmarks/load_pretrained.py [--ranks 2 4] [--output FILE]

Models are made from configurations and saved in bf16, in several files: a Llama of 633 million
parameters and a Mixtral of 379 million. `full` trains all parameters in fp32. `lora` trains
adapters in a bf16 run. `peak` is the highest RssAnon of a rank from just before the first tensor of
the model to the last value, in addition to that before: pages of the files do not count. `over` is
the difference of the peak and the rank's share, in units of the model's largest tensor in fp32; at
most one is wanted. `sum` is the sum of all ranks' peaks over the bytes of the model in one process,
and `shares` the same of the shares. The first load in a process allocates modules and buffers of
libraries, so each rank loads a small model before.

Strategies of which each rank has the whole model are measured on 2 ranks only.
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

SHARDED = ("fsdp", "fsdp_zero2", "zero3", "1f1b", "tensor")
WHOLE = ("ddp", "zero1_torch", "zero1", "zero2")
AXES = {"1f1b": "pp", "tensor": "tp"}
METHODS: dict[str, dict[str, Any]] = {
    "full": {},
    "lora": {"model.lora.rank": 8, "train.precision": "bf16"},
}
_SIZES = {"max_position_embeddings": 64, "pad_token_id": 0, "num_key_value_heads": 4}
_LLAMA = {"hidden_size": 1280, "intermediate_size": 3456, "num_hidden_layers": 32}
_LLAMA |= {"num_attention_heads": 20, "vocab_size": 32000}
_MIXTRAL = {"hidden_size": 1024, "intermediate_size": 1792, "num_hidden_layers": 14}
_MIXTRAL |= {"num_attention_heads": 16, "vocab_size": 16384, "num_local_experts": 4}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama, 32 layers": ("LlamaForCausalLM", "LlamaConfig", {**_SIZES, **_LLAMA}),
    "mixtral, 14 layers of 4 experts": (
        "MixtralForCausalLM",
        "MixtralConfig",
        {**_SIZES, **_MIXTRAL},
    ),
}


def measure(
    strategy: str, ranks: int, small: Path, folder: Path, keys: dict[str, Any]
) -> dict[str, Any]:
    """The figures of all ranks under one strategy."""
    axes = {AXES[strategy]: ranks} if strategy in AXES else {}
    arguments = (strategy, small, folder, keys)
    rows = run_ranks(load_twice, ranks, *arguments, timeout_s=600.0, fresh=True, **axes)
    model = rows[0]["model_bytes"]
    over = [(row["peak_bytes"] - row["share_bytes"]) / row["largest_bytes"] for row in rows]
    totals = {key: sum(row[f"{key}_bytes"] for row in rows) / model for key in ("peak", "share")}
    return {"sum": totals["peak"], "shares": totals["share"], "over": over, "ranks": rows}


def show(name: str, method: str, strategy: str, row: dict[str, Any]) -> None:
    """Print the figures of one strategy on one line."""
    over = ", ".join(f"{one:+.2f}" for one in row["over"])
    shares = ", ".join(f"{rank['share_bytes'] / 2**20:.0f}" for rank in row["ranks"])
    sys.stdout.write(
        f"{name:32} {method:5} {strategy:12} shares {shares} MiB (sum {row['shares']:.3f}), "
        f"over {over} tensors, sum {row['sum']:.3f}\n"
    )
    sys.stdout.flush()


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print a table and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--strategies", nargs="+", default=(*SHARDED, *WHOLE))
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(arguments)
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        small = hub_models.save("llama", Path(scratch) / "small")
        for name, family in MODELS.items():
            hub_models.FAMILIES[name] = family
            folder = hub_models.save(name, Path(scratch) / "large", dtype=torch.bfloat16)
            for ranks in options.ranks:
                for method, keys in METHODS.items():
                    for strategy in options.strategies:
                        if strategy in WHOLE and ranks > 2:
                            continue
                        row = measure(strategy, ranks, small, folder, keys)
                        show(f"{name}, {ranks} ranks", method, strategy, row)
                        of_ranks = found.setdefault(name, {}).setdefault(f"{ranks} ranks", {})
                        of_ranks.setdefault(method, {})[strategy] = row
            for path in folder.iterdir():
                path.unlink()
            folder.rmdir()
    keep(options.output, {"models": found})
    return 0


if __name__ == "__main__":
    sys.exit(main())
