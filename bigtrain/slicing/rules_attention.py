"""What torch's own multi-head attention does with sliced projections: heads are dealt out."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bigtrain.slicing.sliced_tensor import is_sliced, rule


@rule(F.multi_head_attention_forward)
def _multi_head_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Any,
    in_proj_bias: Any,
    bias_k: Any,
    bias_v: Any,
    add_zero_attn: bool,  # noqa: FBT001 - torch's own
    dropout_p: float,
    out_proj_weight: Any,
    out_proj_bias: Any,
    training: bool = True,  # noqa: FBT001, FBT002
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,  # noqa: FBT001, FBT002
    attn_mask: Tensor | None = None,
    use_separate_proj_weight: bool = False,  # noqa: FBT001, FBT002
    q_proj_weight: Any = None,
    k_proj_weight: Any = None,
    v_proj_weight: Any = None,
    static_k: Any = None,
    static_v: Any = None,
    average_attn_weights: bool = True,  # noqa: FBT001, FBT002
    is_causal: bool = False,  # noqa: FBT001, FBT002
) -> Any:
    extras = (bias_k, bias_v, static_k, static_v)
    if add_zero_attn or any(extra is not None for extra in extras):
        return NotImplemented
    if any(is_sliced(t) for t in (query, key, value)):
        return NotImplemented
    is_batched = query.dim() == 3
    if not is_batched:
        query, key, value = (t.unsqueeze(1) for t in (query, key, value))
    del embed_dim_to_check
    separate = (q_proj_weight, k_proj_weight, v_proj_weight) if use_separate_proj_weight else None
    projected = _projections((query, key, value), in_proj_weight, in_proj_bias, separate)
    # (seq, batch, width) to (batch, heads, seq, head)
    q, k, v = (t.unflatten(-1, (num_heads, -1)).permute(1, 2, 0, 3) for t in projected)
    mask = _mask(attn_mask, key_padding_mask, q, k.shape[2], num_heads)
    p = dropout_p if training else 0.0
    weights = None
    if need_weights:
        scores = (q * (q.shape[-1] ** -0.5)) @ k.transpose(-2, -1)
        if mask is None and is_causal:
            mask = _causal(q, k)
        weights = torch.softmax(scores if mask is None else scores + mask, -1)
        weights = F.dropout(weights, p) if p > 0 else weights
        mixed = weights @ v
    else:
        causal = is_causal and mask is None
        mixed = F.scaled_dot_product_attention(q, k, v, mask, p, causal)
    out = F.linear(mixed.permute(2, 0, 1, 3).flatten(-2), out_proj_weight, out_proj_bias)
    if weights is not None and average_attn_weights:
        weights = weights.mean(1)
    if not is_batched:
        out, weights = out.squeeze(1), None if weights is None else weights.squeeze(0)
    return out, weights


def _projections(
    inputs: tuple[Tensor, Tensor, Tensor], weight: Any, bias: Any, separate: Any
) -> tuple[Any, ...]:
    query, key, value = inputs
    if separate is None and query is key and key is value:
        return tuple(F.linear(query, weight, bias).chunk(3, -1))
    weights = weight.chunk(3, 0) if separate is None else separate
    biases = (None, None, None) if bias is None else bias.chunk(3, 0)
    return tuple(F.linear(x, w, b) for x, w, b in zip(inputs, weights, biases, strict=True))


def _mask(
    attn_mask: Tensor | None, padding: Tensor | None, q: Any, keys: int, heads: int
) -> Tensor | None:
    """Both masks as one that is added to the scores: (batch or 1, heads or 1, queries, keys)."""
    found = None
    if attn_mask is not None:
        found = _additive(attn_mask, q.dtype)
        found = found[None, None] if found.dim() == 2 else found.view(-1, heads, *found.shape[1:])
    if padding is not None:
        padding = padding if padding.dim() == 2 else padding[None]
        rows = _additive(padding, q.dtype).view(-1, 1, 1, keys)
        found = rows if found is None else found + rows
    return found


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill(mask, float("-inf"))


def _causal(q: Any, k: Any) -> Tensor:
    ones = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device)
    return _additive(~ones.tril(), q.dtype)
