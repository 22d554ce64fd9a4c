"""Small models of transformers, saved to folders in two or more files, with a tokenizer."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

WORDS, LENGTH = 64, 12
_SIZES = {
    **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "vocab_size": WORDS},
}
_GROUPED = {**_SIZES, "num_key_value_heads": 2, "max_position_embeddings": 64}
_GROUPED |= {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_IMAGES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
_QUIET = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": WORDS}
_GPT2 |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
_T5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "vocab_size": WORDS}
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 8}

FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", _GROUPED),
    "llama tied": ("LlamaForCausalLM", "LlamaConfig", {**_GROUPED, "tie_word_embeddings": True}),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", _GPT2),
    "gpt2 untied": ("GPT2LMHeadModel", "GPT2Config", {**_GPT2, "tie_word_embeddings": False}),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", _GROUPED),
    "qwen3_moe": ("Qwen3MoeForCausalLM", "Qwen3MoeConfig", {**_GROUPED, **_MOE}),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", {**_GROUPED, "num_local_experts": 4}),
    "mistral": ("MistralForCausalLM", "MistralConfig", _GROUPED),
    "gemma": ("GemmaForCausalLM", "GemmaConfig", {**_GROUPED, "head_dim": 8}),
    "bert": ("BertForSequenceClassification", "BertConfig", {**_SIZES, **_QUIET}),
    "bert mlm": ("BertForMaskedLM", "BertConfig", {**_SIZES, **_QUIET}),
    "t5": ("T5ForConditionalGeneration", "T5Config", {**_T5, "dropout_rate": 0.0}),
    "vit": (
        "ViTForImageClassification",
        "ViTConfig",
        {**_IMAGES, **_QUIET, "num_attention_heads": 4, "image_size": 16, "patch_size": 8},
    ),
    "convnext": (
        "ConvNextForImageClassification",
        "ConvNextConfig",
        {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 2, 1]},
    ),
}
"""By name: the class, its configuration's class, and the fields."""
CAUSAL = ("llama", "llama tied", "gpt2", "gpt2 untied", "qwen2", "qwen3_moe", "mixtral")
CAUSAL += ("mistral", "gemma")
LEGACY = "bert legacy"
"""A BERT whose files have the names of before 2018: `LayerNorm.gamma` and `LayerNorm.beta`."""


@contextmanager
def quiet() -> Iterator[None]:
    """Without the lines that transformers prints when a model is made or saved."""
    import transformers

    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers.logging.set_verbosity(level)


def make(family: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    """A model with weights that differ from initial ones in every tensor."""
    import transformers

    name, config, fields = FAMILIES[family]
    with quiet():
        torch.manual_seed(3)
        model: Any = getattr(transformers, name)(getattr(transformers, config)(**fields))
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.05)
    return model.to(dtype).eval()


def save(
    family: str,
    folder: Path,
    *,
    dtype: torch.dtype = torch.float32,
    change: Callable[[dict[str, torch.Tensor]], None] | None = None,
) -> Path:
    """Save a family's model in two or more files.

    Args:
        family: a key of `FAMILIES`, or `LEGACY`.
        folder: is made.
        dtype: of the parameters.
        change: changes the tensors of the files, by their names.
    """
    with quiet():
        model: Any = make("bert" if family == LEGACY else family, dtype)
        size = sum(p.nbytes for p in model.parameters())
        model.save_pretrained(folder, max_shard_size=size // 3 or 1)
    tokenizer(folder)
    if family == LEGACY:
        rename(folder, {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"})
    if change is not None:
        rewrite(folder, change)
    return folder


def rename(folder: Path, ends: dict[str, str]) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            for end, other in ends.items():
                if name.endswith(end):
                    tensors[name.removesuffix(end) + other] = tensors.pop(name)

    rewrite(folder, change)


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Change the tensors of each file of a folder, and its index."""
    from safetensors.torch import load_file, save_file

    index = folder / "model.safetensors.index.json"
    places = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path, metadata={"format": "pt"})
        places |= dict.fromkeys(tensors, path.name)
    if index.exists():
        index.write_text(json.dumps({"metadata": {}, "weight_map": places}))


def tokenizer(folder: Path) -> None:
    """Write a tokenizer of `WORDS` words with a chat template."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"w{n}": n for n in range(WORDS)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    made = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0")
    made.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    made.save_pretrained(folder)


def keys_of(folder: Path) -> list[str]:
    """The names of the tensors in a folder's files."""
    from safetensors import safe_open

    names = []
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            names += list(file.keys())
    return sorted(names)


def inputs(family: str, step: int = 0, rows: int = 4) -> Any:
    """A batch of inputs: token ids, images, or a mapping where a model has two inputs."""
    generator = torch.Generator().manual_seed(step)
    if family in ("vit", "convnext"):
        size = 16 if family == "vit" else 32
        return torch.randn((rows, 3, size, size), generator=generator)
    ids = torch.randint(3, WORDS, (rows, LENGTH), generator=generator)
    if family == "t5":
        return {"input_ids": ids, "decoder_input_ids": ids.roll(1, 1)}
    return ids


def logits_of(model: nn.Module, given: Any) -> torch.Tensor:
    with torch.no_grad():
        output = model(**given) if isinstance(given, dict) else model(given)
    return output.logits


def reopened(folder: Path, family: str) -> Any:
    """The model as transformers opens it, in the dtype of its files."""
    import transformers

    name = FAMILIES["bert" if family == LEGACY else family][0]
    with quiet():
        model, report = getattr(transformers, name).from_pretrained(
            folder, output_loading_info=True
        )
    assert not report["missing_keys"], report
    assert not report["mismatched_keys"], report
    return model.eval()
