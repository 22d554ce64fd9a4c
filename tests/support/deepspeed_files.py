"""A DeepSpeed configuration file with every value "auto", to be filled in from the job."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

AUTO: dict[str, Any] = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
    "fp16": {"enabled": "auto"},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
    },
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}},
    "zero_optimization": {
        "stage": 2,
        "reduce_bucket_size": "auto",
        "allgather_bucket_size": "auto",
        "overlap_comm": True,
        "stage3_prefetch_bucket_size": "auto",
    },
    "steps_per_print": 1000000,
}


def write_config(folder: Path, text: str | None = None, **changes: Any) -> str:
    """Write a configuration file into `folder` and return its path.

    Args:
        folder: where it is written.
        text: its text; the default is the configuration above.
        changes: top-level keys that replace those of the default.
    """
    path = folder / "ds.json"
    path.write_text(text if text is not None else json.dumps({**AUTO, **changes}))
    return str(path)
