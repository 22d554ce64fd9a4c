"""The models of published runs, from their public configurations, on the meta device.

Configurations are those of the models' `config.json` on the Hub. Qwen's first models have their own
code there; Qwen2's classes have the same shapes and the same biases. Fields that no class of
transformers reads are left out.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from typing import Any
from unittest import mock

import published_tools as tools
import torch
import torch.nn.functional as F
from published_rows import Published, Tool
from torch import Tensor, nn

from bigtrain.hub.lora import attach
from bigtrain.job.schema import LoraConfig


def _shape(
    width: int, inner: int, layers: int, heads: int, key_heads: int, vocabulary: int, **more: Any
) -> dict[str, Any]:
    return {
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": key_heads,
        "vocab_size": vocabulary,
        "max_position_embeddings": 32768,
        "pad_token_id": 0,
        **more,
    }


MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Mistral-7B-v0.1": (
        "Mistral",
        _shape(4096, 14336, 32, 32, 8, 32000, sliding_window=None),
    ),
    "Mixtral-8x7B-Instruct-v0.1": (
        "Mixtral",
        _shape(4096, 14336, 32, 32, 8, 32000, sliding_window=None),
    ),
    "Meta-Llama-3-8B": ("Llama", _shape(4096, 14336, 32, 32, 8, 128256)),
    "PowerLM-3b": ("Granite", _shape(2304, 9216, 40, 36, 36, 49152, tie_word_embeddings=True)),
    "Llama-2-7b": ("Llama", _shape(4096, 11008, 32, 32, 32, 32000)),
    "Llama-2-13b": ("Llama", _shape(5120, 13824, 40, 40, 40, 32000)),
    "Llama-2-70b-hf": ("Llama", _shape(8192, 28672, 80, 64, 8, 32000)),
    # Qwen's first models: width of the two halves of its feed-forward layer
    "Qwen-1.8B": ("Qwen2", _shape(2048, 5504, 24, 16, 16, 151936)),
    "Qwen-7B": ("Qwen2", _shape(4096, 11008, 32, 32, 32, 151936)),
    "Qwen-14B": ("Qwen2", _shape(5120, 13696, 40, 40, 40, 152064)),
    "TinyLlama-1.1B": ("Llama", _shape(2048, 5632, 22, 32, 4, 32000)),
    "Llama-3.2-1B": ("Llama", _shape(2048, 8192, 16, 32, 8, 128256, tie_word_embeddings=True)),
    "Llama-3.2-3B": ("Llama", _shape(3072, 8192, 28, 24, 8, 128256, tie_word_embeddings=True)),
}
"""By name: transformers' family, and the public configuration."""


class WithItsLoss(nn.Module):
    """A causal language model that computes its loss as a tool does.

    Args:
        model: a model of transformers.
        tool: how it is run.
        adapted: whether only adapters are trained.
    """

    def __init__(self, model: Any, tool: Tool, *, adapted: bool) -> None:
        super().__init__()
        self.net, self.tool, self.adapted = model, tool, adapted
        self.scale = getattr(model.config, "logits_scaling", None)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the loss, as a sum over the tokens after the first."""
        with torch.autocast(ids.device.type, torch.bfloat16, enabled=self.tool.autocast):
            embedded = self.net.get_input_embeddings()(ids)
            if self.adapted and self.tool.checkpoint == "reentrant":
                embedded.requires_grad_(True)  # noqa: FBT003
            hidden = self.net.model(inputs_embeds=embedded, use_cache=False)[0]
            return self.loss(hidden, ids)

    def loss(self, hidden: Tensor, ids: Tensor) -> Tensor:
        """The loss from the last hidden states."""
        head, order, labels = self.net.lm_head, self.tool.loss, ids[..., 1:]
        if order == "liger":
            inputs = hidden[..., :-1, :].contiguous().view(-1, hidden.shape[-1])
            return tools.LigerLoss.apply(inputs, head.weight, labels.reshape(-1))  # type: ignore
        if order == "chunked":
            logits = [head(part) for part in _split(hidden, -(-ids.shape[1] // 8))]
            return _in_chunks([part.float() for part in logits], ids)
        if order == "chunks of 128":  # Lightning casts the model's result, which the loop keeps
            self.kept = [p.float() for p in [head(part) for part in _split(hidden, 128)]]
            return _in_chunks(self.kept, ids)
        logits = head(hidden)
        if order == "kept":  # the training loop keeps the model's fp32 output
            self.kept = wide = logits.float()
            del logits
            return F.cross_entropy(wide.flatten(0, 1), ids.flatten(), reduction="sum")
        if self.scale is not None:
            logits = logits / self.scale
        if order == "whole":  # labels are shifted instead of logits
            flat = logits.flatten(0, 1).float()
            return F.cross_entropy(flat, ids.flatten(), reduction="sum")
        if order == "shifted":  # without fp32 values before the loss
            flat = logits[..., :-1, :].contiguous().view(-1, logits.shape[-1])
            return F.cross_entropy(flat, labels.reshape(-1), reduction="sum")
        wide = logits.float()
        if order.endswith("older"):
            del logits
        moved = wide[..., :-1, :].contiguous()
        if order.startswith("fast"):
            if order.endswith("older"):
                del wide
            flat = moved.view(-1, moved.shape[-1])
            return tools.FastLoss.apply(flat, labels.reshape(-1)).sum()  # type: ignore
        flat = moved.view(-1, moved.shape[-1])
        return F.cross_entropy(flat, labels.reshape(-1), reduction="sum")


def _split(whole: Tensor, size: int) -> list[Tensor]:
    return list(torch.ops.aten.split.Tensor(whole, size, 1))


def _in_chunks(logits: list[Tensor], ids: Tensor) -> Tensor:
    """The loss of logits in chunks, one after the other."""
    labels = _split(ids, logits[0].shape[1])
    losses = [
        F.cross_entropy(part.flatten(0, 1), label.flatten())
        for part, label in zip(logits, labels, strict=True)
    ]
    return torch.stack(losses).sum()


def described(row: Published) -> nn.Module:
    """The model of a row on the meta device, with its adapters and its tool's layers."""
    import transformers

    tool = row.tool
    family, fields = MODELS[row.model]
    if tool.merged == "litgpt":  # which has no tied weights
        fields = {**fields, "tie_word_embeddings": False}
    config = getattr(transformers, f"{family}Config")(**fields)
    if tool.flash:
        _register_flash()
    config._attn_implementation = "fa2_of_then" if tool.flash else "sdpa"
    with torch.device("meta"):
        model = getattr(transformers, f"{family}ForCausalLM")(config)
        if family == "Mixtral":
            tools.loop_over_experts(model)
        model = model if tool.weights == "fp32" else model.to(torch.bfloat16)
        model.config.use_cache = False
        _adapt(model, row)
    layers = model.model.layers
    if tool.checkpoint == "reentrant":
        tools.checkpointed(layers)
    elif tool.checkpoint == "products":
        tools.every_second_product(layers)
    return WithItsLoss(model, tool, adapted=bool(row.lora))


def _adapt(model: Any, row: Published) -> None:
    tool = row.tool
    if row.adapter:
        _by_peft(model, json.loads(row.adapter))
    elif tool.merged:
        _merged(model, row)
    elif tool.weights not in ("bf16", "fp32"):
        model.requires_grad_(False)  # noqa: FBT003
        tools.in_4_bits(model, row.targets, row.lora, tool.dropout, tool.weights)
        if tool.fused_adapters:
            tools.fuse_adapters(model.model.layers)
    elif row.lora:
        settings = {"rank": row.lora, "alpha": 16, "dropout": tool.dropout}
        attach(model, LoraConfig(**settings, targets=row.targets))
    if tool.upcast:  # peft casts what has no 4 bits; trl casts embeddings and the head back
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.data = parameter.data.float()
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            parameter.data = parameter.data.to(getattr(torch, tool.adapters))


def _by_peft(model: Any, settings: dict[str, Any]) -> None:
    """Add peft's adapters by their published configuration; what is trained is fp32."""
    import peft

    kind = settings.pop("peft_type")
    config = peft.PEFT_TYPE_TO_CONFIG_MAPPING[peft.PeftType[kind]](**settings)
    model.requires_grad_(False)  # noqa: FBT003
    peft.inject_adapter_in_model(config, model)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()


def _merged(model: Any, row: Published) -> None:
    """Merge q, k and v; adapt them, and other layers of Qwen, as litgpt and Qwen do."""
    tool, litgpt = row.tool, row.tool.merged == "litgpt"
    model.requires_grad_(row.head_trained)
    if not litgpt:
        others = [name for name in row.targets if name not in ("q_proj", "k_proj", "v_proj")]
        settings = {"rank": row.lora, "alpha": 16, "dropout": tool.dropout}
        attach(model, LoraConfig(**settings, targets=others))
    kind = tool.weights if tool.weights.startswith("nf4") else ""
    tools.merge_projections(
        model.model.layers,
        rank=row.lora,
        dropout=tool.dropout,
        adapted=[name in row.targets for name in ("q_proj", "k_proj", "v_proj")],
        grouped=litgpt,
        kind=kind,
        keeps_input=tool.keeps_input,
    )
    if kind:
        tools.in_4_bits(model, (), 0, 0.0, kind, keeps_input=tool.keeps_input, head=True)
    if row.head_trained:
        for module in (model.get_input_embeddings(), model.lm_head):
            module.requires_grad_(True)  # noqa: FBT003
            module.to(torch.float32)


def _register_flash() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register("fa2_of_then", tools.flash_attention)
    AttentionMaskInterface.register("fa2_of_then", lambda *_, **__: None)


@contextmanager
def fused(row: Published) -> Iterator[None]:
    """Replace norms and rotary positions by the tool's kernels, if it has any."""
    family = MODELS[row.model][0]
    place = import_module(f"transformers.models.{family.lower()}.modeling_{family.lower()}")
    with ExitStack() as stack:
        if row.tool.fast_norm:
            norm = getattr(place, f"{family}RMSNorm")
            stack.enter_context(mock.patch.object(norm, "forward", _fast_norm))
        if row.tool.fast_rotation:
            stack.enter_context(mock.patch.object(place, "apply_rotary_pos_emb", _rotation))
        if row.tool.fast_gate:
            layer = getattr(place, f"{family}MLP")
            stack.enter_context(mock.patch.object(layer, "forward", _fast_gate))
        yield


_rotation = tools.fast_rotation


def _fast_norm(self: Any, x: Tensor) -> Tensor:
    return tools.FastNorm.apply(x, self.weight)  # type: ignore[no-any-return]


def _fast_gate(self: Any, x: Tensor) -> Tensor:
    return self.down_proj(tools.FastGate.apply(self.gate_proj(x), self.up_proj(x)))  # type: ignore
