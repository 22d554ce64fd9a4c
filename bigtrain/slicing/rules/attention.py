"""Rules of attention: each rank computes some of the heads."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bigtrain.slicing.column_parallel import forget_input
from bigtrain.slicing.exchange import (
    SliceGroup,
    copied_to_ranks,
    gathered_with_partial_grad,
    scattered,
)
from bigtrain.slicing.rules.norms import rank_random
from bigtrain.slicing.rules.products import linear, scaled
from bigtrain.slicing.sliced_tensor import (
    SlicedTensor,
    as_operand,
    is_sliced,
    local_of,
    matching_part,
    rule,
    whole_of,
)
from bigtrain.slicing.slices import Slices


@rule(F.scaled_dot_product_attention)
def _attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,  # noqa: FBT001, FBT002 - torch's own
    scale: float | None = None,
    enable_gqa: bool = False,  # noqa: FBT001, FBT002
) -> Any:
    sliced = [t for t in (query, key, value, attn_mask) if is_sliced(t)]
    # The first operand that is sliced by heads or by samples; the others follow its slices.
    main = next((t for t in sliced if t.negative_dim <= -3), sliced[0])
    dim, group, slices = main.negative_dim, main.group, main.slices
    if dim > -3:
        return _by_value_columns(
            sliced,
            query,
            key,
            value,
            attn_mask,
            dropout_p=dropout_p,
            is_causal=is_causal,
            scale=scale,
            enable_gqa=enable_gqa,
        )
    forget_input(group)
    times = query.shape[-3] // key.shape[-3] if enable_gqa and dim == -3 else 1
    if times > 1 and (main is key or main is value):
        slices = scaled(slices, 1, times) or slices
    if group.draws.whole and dropout_p > 0:
        q, k, v, mask = whole_of((query, key, value, attn_mask))
        result = F.scaled_dot_product_attention(
            q, k, v, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
        result_slices = slices.at(result.dim() + dim)
        return SlicedTensor.of(scattered(result, result_slices, group), result_slices, group)
    q, mask = (_local_part(t, slices, dim, group) for t in (query, attn_mask))
    shared = scaled(slices, times, 1)
    again = None if shared is None else scaled(shared, 1, times)
    if times == 1 or (shared and again and again.same(slices, group.size)):
        k, v = (_local_part(t, shared or slices, dim, group) for t in (key, value))
    else:
        k, v = (_shared_heads(t, slices, times, group) for t in (key, value))
        enable_gqa = False
    with rank_random(group, draws=dropout_p > 0):
        local = F.scaled_dot_product_attention(
            q, k, v, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    return SlicedTensor.of(local, slices.at(local.dim() + dim), group)


def _by_value_columns(
    sliced: list[Any],
    query: Any,
    key: Any,
    value: Any,
    mask: Any,
    *,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Any:
    """Compute attention with values sliced by width; attention weights are equal on all ranks."""
    if len(sliced) > 1 or sliced[0] is not value or value.negative_dim != -1:
        return NotImplemented
    group = value.group
    q, k = as_operand(query, None, group), as_operand(key, None, group)
    whole_mask = None if mask is None else as_operand(mask, None, group)
    return value.like(
        F.scaled_dot_product_attention(
            q,
            k,
            local_of(value),
            whole_mask,
            dropout_p,
            is_causal,
            scale=scale,
            enable_gqa=enable_gqa,
        )
    )


def _local_part(value: Any, slices: Slices, dim: int, group: SliceGroup) -> Any:
    """Return a rank's part of any tensor along a dim, which is counted from the last dim (-1)."""
    if not is_sliced(value):
        return matching_part(value, slices, dim, group)
    if value.negative_dim == dim and value.slices.same(slices, group.size):
        return local_of(value)
    gathered = gathered_with_partial_grad(local_of(value), value.slices, group)
    if gathered.dim() < -dim or gathered.shape[dim] == 1:
        return gathered
    return slices.at(gathered.dim() + dim).local(gathered, group.rank, group.size)


def _shared_heads(value: Any, slices: Slices, times: int, group: SliceGroup) -> Tensor:
    """Return a key or value head for each of a rank's query heads; `times` queries share one."""
    gathered = (
        gathered_with_partial_grad(local_of(value), value.slices, group)
        if is_sliced(value)
        else copied_to_ranks(value, group)
    )
    parts = slices.parts(group.rank, group.size)
    heads = [head // times for begin, n in parts for head in range(begin, begin + n)]
    return gathered.index_select(-3, torch.tensor(heads, device=gathered.device))


@rule(F.multi_head_attention_forward)
def _multi_head_attention(
    query: Any,
    key: Any,
    value: Any,
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
    inputs: tuple[Any, ...] = (query, key, value)
    if any(is_sliced(t) and t.slices.dim == t.dim() - 1 for t in inputs):
        return NotImplemented
    is_batched = query.dim() == 3
    if not is_batched:
        batched = {id(t): t.unsqueeze(1) for t in inputs}  # so that `query is key` stays true
        inputs = tuple(batched[id(t)] for t in inputs)
    del embed_dim_to_check
    separate = (q_proj_weight, k_proj_weight, v_proj_weight) if use_separate_proj_weight else None
    projected = _projections(inputs, in_proj_weight, in_proj_bias, separate)
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
    mixed = mixed.permute(2, 0, 1, 3).flatten(-2)
    if is_sliced(mixed) or is_sliced(out_proj_weight):
        # The output is sharded like the residual stream. In torch's function dim 0 is the sequence.
        sequence_dim = inputs[0].slices.dim if is_sliced(inputs[0]) else 0
        out = linear(mixed, out_proj_weight, out_proj_bias, sequence_dim)
    else:
        out = F.linear(mixed, out_proj_weight, out_proj_bias)
    if weights is not None and average_attn_weights:
        weights = weights.mean(1)
    if not is_batched:
        out, weights = out.squeeze(1), None if weights is None else weights.squeeze(0)
    return out, weights


def _projections(inputs: tuple[Any, ...], weight: Any, bias: Any, separate: Any) -> tuple[Any, ...]:
    query, key, value = inputs
    if separate is None and query is key and key is value:
        return tuple(F.linear(query, weight, bias).chunk(3, -1))
    weights = weight.chunk(3, 0) if separate is None else separate
    biases = (None, None, None) if bias is None else bias.chunk(3, 0)
    return tuple(F.linear(x, w, b) for x, w, b in zip(inputs, weights, biases, strict=True))


def _mask(
    attn_mask: Tensor | None, padding: Tensor | None, q: Any, keys: int, heads: int
) -> Tensor | None:
    """Return the sum of both masks, (batch or 1, heads or 1, queries, keys); None without masks."""
    mask = None
    if attn_mask is not None:
        mask = _additive(attn_mask, q.dtype)
        mask = mask[None, None] if mask.dim() == 2 else mask.reshape(-1, heads, *mask.shape[1:])
    if padding is not None:
        padding = padding if padding.dim() == 2 else padding[None]
        rows = _additive(padding, q.dtype).view(-1, 1, 1, keys)
        mask = rows if mask is None else mask + rows
    return mask


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill(mask, float("-inf"))


def _causal(q: Any, k: Any) -> Tensor:
    ones = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device)
    return _additive(~ones.tril(), q.dtype)
