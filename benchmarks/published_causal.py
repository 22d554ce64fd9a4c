"""Language models of published step times, from their public configurations, on the meta device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bigtrain.data.loader import MicroBatch
from bigtrain.hub.lora import attach
from bigtrain.job.load import load_job
from bigtrain.job.schema import Job, LoraConfig
from bigtrain.optim.factory import optimizer_factory
from bigtrain.prediction.section_library import SectionLibrary


def _shape(
    width: int, inner: int, layers: int, heads: int, key_heads: int, vocabulary: int, **more: Any
) -> dict[str, Any]:
    return {
        **{"hidden_size": width, "intermediate_size": inner, "num_hidden_layers": layers},
        **{"num_attention_heads": heads, "num_key_value_heads": key_heads},
        **{"vocab_size": vocabulary, "max_position_embeddings": 32768, "pad_token_id": 0, **more},
    }


MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Mistral-7B": ("Mistral", _shape(4096, 14336, 32, 32, 8, 32000, sliding_window=None)),
    "PowerLM-3b": ("Granite", _shape(2304, 9216, 40, 36, 36, 49152, tie_word_embeddings=True)),
    "Llama-2-7B": ("Llama", _shape(4096, 11008, 32, 32, 32, 32000)),
    "Llama-3-8B": ("Llama", _shape(4096, 14336, 32, 32, 8, 128256)),
    "Llama-3.2-3B": ("Llama", _shape(3072, 8192, 28, 24, 8, 128256, tie_word_embeddings=True)),
    "Qwen2.5-7B": ("Qwen2", _shape(3584, 18944, 28, 28, 4, 152064)),
    "Qwen3-32B": ("Qwen3", _shape(5120, 25600, 64, 64, 8, 151936, head_dim=128)),
    # Qwen's first models have their own code; Qwen2's classes have the same shapes and biases.
    "Qwen-1.8B": ("Qwen2", _shape(2048, 5504, 24, 16, 16, 151936)),
    "Qwen-7B": ("Qwen2", _shape(4096, 11008, 32, 32, 32, 151936)),
    "Qwen-14B": ("Qwen2", _shape(5120, 13696, 40, 40, 40, 152064)),
}
"""By name: transformers' family, and the public configuration."""


class WithItsLoss(nn.Module):
    """A causal language model of transformers with the loss of its whole logits, in fp32."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.net = model

    def forward(self, ids: Tensor) -> Tensor:
        """Return the loss, as a sum over the tokens after the first."""
        logits = self.net.lm_head(self.net.model(ids, use_cache=False)[0]).float()
        moved = logits[..., :-1, :].contiguous()
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


def causal_model(
    name: str, rank: int, targets: Sequence[str], weights: str, adapters: str
) -> nn.Module:
    """Make a model, with adapters if their rank is not 0."""
    import transformers

    family, fields = MODELS[name]
    config = getattr(transformers, f"{family}Config")(**fields)
    config._attn_implementation = "sdpa"
    with torch.device("meta"):
        model = getattr(transformers, f"{family}ForCausalLM")(config)
        model = model.to(torch.bfloat16) if weights == "bf16" else model
        model.config.use_cache = False
        if rank:
            attach(model, LoraConfig(rank=rank, alpha=16, targets=tuple(targets)))
            for key, parameter in model.named_parameters():
                if ".lora_" in key:
                    dtype = torch.float32 if adapters == "fp32" else torch.bfloat16
                    parameter.data = parameter.data.to(dtype)
    return WithItsLoss(model)


def causal_library(
    name: str,
    length: int,
    *,
    rank: int,
    targets: Sequence[str],
    weights: str,
    adapters: str,
    compiled: bool,
    optimizer: str,
) -> tuple[Job, SectionLibrary]:
    """Return a job in the row's precision, and the sections of its model."""
    job = load_job(
        None,
        "single",
        [
            f"train.precision={'fp32' if weights == 'bf16' else 'bf16'}",
            f"train.compile={'blocks' if compiled else 'none'}",
            *("optim.name=adamw", "optim.lr=1e-5", "optim.clip_norm=1.0"),
            f"optim.implementation={optimizer}",
        ],
    )
    ids = torch.zeros((1, length), dtype=torch.int64)
    library = SectionLibrary(
        causal_model(name, rank, targets, weights, adapters),
        MicroBatch(ids, ids.clone(), length - 1, 1),
        lambda *_: OfTheModel(),
        optimizer_factory(job.optim, 0),
        torch.device("cpu"),
    )
    return job, library
