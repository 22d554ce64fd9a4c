"""The computations in which other tools differ from torch's own parts, as autograd functions.

Each function allocates, saves and frees the tensors that the tool's kernel does; on fake tensors
values do not matter. Sources: fms-acceleration (`fms_acceleration_foak`, which carries
Unsloth's kernels, and Liger's loss), bitsandbytes 0.43 (`MatMul4Bit`), flash-attn 2.7
(`flash_attn_interface.py`), transformers 4.45 and 4.48 (`loss_utils.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)


class FlashAttention(Function):
    """FlashAttention 2: (batch, length, heads, size); its backward pass sums queries in fp32."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        batch, length, heads, _ = query.shape
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        sums = query.new_empty((batch, heads, length), dtype=torch.float32)
        ctx.save_for_backward(query, key, value, out, sums)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value, _, sums = ctx.saved_tensors
        results = tuple(t.new_empty(t.shape) for t in (query, key, value))
        kept = [torch.empty_like(sums), query.new_empty(query.shape, dtype=torch.float32)]
        if key.shape[2] != query.shape[2]:
            # each query head has its own gradient of the keys and values, which are then summed
            kept += [query.new_empty(query.shape) for _ in range(2)]
        del kept, grad
        return results


def flash_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **_: Any
) -> tuple[Tensor, None]:
    """Attend as transformers does with FlashAttention 2: fp32 inputs are cast to bf16 before."""
    del module, mask
    inputs = [t.transpose(1, 2) for t in (query, key, value)]
    if inputs[0].dtype == torch.float32:
        inputs = [t.to(torch.bfloat16) for t in inputs]
    return FlashAttention.apply(*inputs), None


class FastNorm(Function):
    """Unsloth's RMSNorm: one fp32 number a row is saved; the gradient is written in place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        rows = x.view(-1, x.shape[-1])
        ctx.save_for_backward(rows, weight, rows.new_empty(len(rows), dtype=torch.float32))
        return torch.empty_like(rows).view(x.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        del ctx
        return grad.view(-1, grad.shape[-1]).view(grad.shape), None


class FastRotation(Function):
    """Unsloth's rotary positions: in place, forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        del ctx
        return x.view(x.shape[0] * x.shape[1], -1).view(x.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        del ctx
        batch, length, heads, size = grad.shape
        return grad.reshape(batch * length, heads * size).view(grad.shape)


def fast_rotation(
    query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, *_: Any, **__: Any
) -> tuple[Tensor, ...]:
    """Rotate as `apply_rotary_pos_emb` does, with Unsloth's kernel."""
    del cos, sin
    return tuple(FastRotation.apply(x.transpose(1, 2)).transpose(1, 2) for x in (query, key))


class FastGate(Function):
    """Liger's gate of a feed-forward layer: SiLU is computed again, gradients are in place."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return torch.empty_like(gate)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        del grad
        gate, up = ctx.saved_tensors
        return gate, up


class FastLoss(Function):
    """Unsloth's cross entropy: logits are saved, and their gradient overwrites them."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> Tensor:
        rows = len(logits)
        losses = logits.new_empty(rows, dtype=torch.float32)
        sums = logits.new_empty(rows, dtype=torch.float32)
        ctx.save_for_backward(logits, sums, labels)
        return losses

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        del grad
        return ctx.saved_tensors[0], None


class LigerLoss(Function):
    """Liger's head and cross entropy in chunks; gradients are computed in the forward pass."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        del labels
        rows, width = hidden.shape
        parts = math.ceil(len(weight) / width)
        size = 1 << (math.ceil(rows / parts) - 1).bit_length()
        grad_weight = torch.zeros_like(weight) if weight.requires_grad else None
        grad_hidden = torch.zeros_like(hidden)
        losses = hidden.new_zeros(rows, dtype=torch.float32)
        for begin in range(0, rows, size):
            chunk = hidden[begin : begin + size]
            logits = chunk @ weight.t()
            logits = logits.float()
            logits = logits.to(hidden.dtype)
            scaled = logits * 1.0
            grad_hidden[begin : begin + size] = scaled @ weight
            if grad_weight is not None:
                torch.addmm(grad_weight, logits.t(), chunk, out=grad_weight)
        ctx.save_for_backward(grad_hidden, grad_weight)
        return losses.sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        del grad
        hidden, weight = ctx.saved_tensors
        return hidden, weight, None


class Product4Bit(Function):
    """bitsandbytes' product with weights in NF4: the weight is whole while it is used.

    Releases before 0.43 keep the input for the backward pass, which does not need it.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        packed: Tensor,
        shape: tuple[int, int],
        older: bool = False,  # noqa: FBT001, FBT002
    ) -> Tensor:
        ctx.shape, ctx.packed, ctx.input = shape, packed, x if older else None
        return F.linear(x, _unpacked(x, packed, shape))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        ctx.input = None
        return grad @ _unpacked(grad, ctx.packed, ctx.shape), None, None, None


def _unpacked(x: Tensor, packed: Tensor, shape: tuple[int, int]) -> Tensor:
    """The weight in the dtype of `x`; its scales, which are 8 bits wide, are fp32 for a while."""
    scales = packed.new_empty(packed.numel() * 2 // 64, dtype=torch.float32)
    weight = x.new_empty(shape)
    del scales
    return weight


class Linear4Bit(nn.Module):
    """A frozen linear layer in 4 bits, as bitsandbytes (NF4) or GPTQ keeps it.

    bitsandbytes has a scale of 8 bits for each 64 numbers, and an fp32 scale for each 256 scales
    (double quantization). Without double quantization the scales are fp32. GPTQ has a scale of 16
    bits and a zero of 4 bits for each 128 numbers, or for each column, and an index of 32 bits for
    each input. Both compute in 16 bits.
    """

    def __init__(self, layer: nn.Linear, kind: str, *, keeps_input: bool = False) -> None:
        super().__init__()
        self.keeps_input = keeps_input
        self.shape = (layer.out_features, layer.in_features)
        numbers, meta = layer.weight.numel(), layer.weight.device
        self.weight = nn.Parameter(
            torch.empty((numbers // 2, 1), dtype=torch.uint8, device=meta), requires_grad=False
        )
        self.bias = layer.bias
        if kind == "nf4 single":  # fp32 scales, as `bnb.nf4` of Lightning has them
            kind, self.singles = "", None
            self.register_buffer("scales", torch.empty(numbers // 64, device=meta))
            return
        group = layer.in_features if kind == "gptq columns" else 128
        scales = -(-numbers // 64) if kind == "nf4" else 5 * numbers // (2 * group)
        self.register_buffer("scales", torch.empty(scales, dtype=torch.uint8, device=meta))
        singles = -(-scales // 256) + 273 if kind == "nf4" else layer.in_features
        self.register_buffer("singles", torch.empty(singles, device=meta))

    def forward(self, x: Tensor) -> Tensor:
        """Return the product in the dtype of `x`."""
        product = Product4Bit.apply(x.to(torch.bfloat16), self.weight, self.shape, self.keeps_input)
        result: Tensor = product.to(x.dtype)
        return result if self.bias is None else result + self.bias


class Adapted4Bit(nn.Module):
    """peft's adapter beside a layer in 4 bits: the layer's result is cloned."""

    def __init__(self, layer: Linear4Bit, rank: int, dropout: float) -> None:
        super().__init__()
        out, width = layer.shape
        meta = layer.weight.device
        self.base, self.dropout = layer, nn.Dropout(dropout)
        self.lora_a = nn.Linear(width, rank, bias=False, device=meta, dtype=torch.float32)
        self.lora_b = nn.Linear(rank, out, bias=False, device=meta, dtype=torch.float32)

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of the layer and its adapter."""
        result = self.base(x).clone()
        casts = not torch.is_autocast_enabled(x.device.type)
        inner = x.to(self.lora_a.weight.dtype) if casts else x
        added = self.lora_b(self.lora_a(self.dropout(inner))) * 1.0
        total: Tensor = result + (added.to(result.dtype) if casts else added)
        return total


class FusedAdapted(Function):
    """Unsloth's fused layers in 4 bits with adapters: one saved input, and one after dropout."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float, *layers: Tensor) -> tuple[Tensor, ...]:
        rows, outs, dropped = x.reshape(-1, x.shape[-1]), [], []
        for packed, a, b in _triples(layers):
            out = rows @ _unpacked(x, packed, (len(b), x.shape[-1])).t()
            kept = torch.native_dropout(rows, p, True)[0] if p else rows  # noqa: FBT003
            out += (kept @ a.t().to(x.dtype)) @ (1.0 * b.t().to(x.dtype))
            outs.append(out.view(*x.shape[:-1], -1))
            dropped.append(kept)
        ctx.save_for_backward(x, *dropped, *layers)
        ctx.count = len(dropped)
        return tuple(outs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        x, *saved = ctx.saved_tensors
        dropped, layers = saved[: ctx.count], saved[ctx.count :]
        flat = [grad.reshape(-1, grad.shape[-1]) for grad in grads]
        results: list[Any] = []
        for grad, kept, (_, a, b) in zip(flat, dropped, _triples(layers), strict=True):
            grad_a = kept.t() @ (grad @ b.to(x.dtype))
            grad_b = (a.to(x.dtype) @ kept.t()) @ grad
            results += [None, grad_a.t().to(a.dtype), grad_b.t().to(b.dtype)]
        total = x.new_empty(0)
        for place, (grad, kept, (packed, a, b)) in enumerate(
            zip(flat, dropped, _triples(layers), strict=True)
        ):
            weight = _unpacked(x, packed, (len(b), x.shape[-1]))
            if place == 0:  # three layers write into the saved input, one makes a new tensor
                total = grad @ weight if ctx.count == 1 else x.view(-1, x.shape[-1])
            else:
                total += grad @ weight
            del weight
            total += (kept != 0) * (grad @ b.to(x.dtype) @ (1.0 * a.to(x.dtype)))
        return (total.view(x.shape), None, *results)


def _triples(layers: Any) -> list[tuple[Tensor, Tensor, Tensor]]:
    return [tuple(layers[at : at + 3]) for at in range(0, len(layers), 3)]


class FusedProjections(nn.Module):
    """Layers in 4 bits with adapters and a common input, such as q, k and v, computed at once."""

    def __init__(self, layers: list[Adapted4Bit]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return the results of all layers."""
        layers: list[Any] = list(self.layers)
        parts = [(m.base.weight, m.lora_a.weight, m.lora_b.weight) for m in layers]
        p = layers[0].dropout.p if self.training else 0.0
        flat = [tensor for part in parts for tensor in part]
        return FusedAdapted.apply(x.to(torch.bfloat16), p, *flat)  # type: ignore[no-any-return]


class Taken(nn.Module):
    """Stands for one of q, k and v, and returns its part of a layer that computes all three."""

    def __init__(self, first: Any, place: int) -> None:
        super().__init__()
        self.place = place
        self.held = [first]  # in a list, so that it is no child

    def forward(self, x: Tensor) -> Tensor:
        """Return the result. The first of the three computes all of them."""
        fused = self.held[0]
        if self.place == 0:
            fused.results = list(fused(x))
        result: Tensor = fused.results[self.place]
        if self.place == len(fused.results) - 1:
            del fused.results
        return result


class MergedProjections(nn.Module):
    """q, k and v as one layer, with one adapter for those that are adapted.

    Args:
        layers: q, k and v.
        rank: the rank of an adapter.
        dropout: the dropout of the adapters' common input.
        adapted: for each of the three, whether it has an adapter.
        grouped: whether each has its own `A` and a group of a convolution (litgpt); else one
            adapter maps to all three (Qwen's `c_attn`).
        kind: the format in 4 bits in which the weight is kept; empty if it is not in 4 bits.
        keeps_input: see `Product4Bit`.
    """

    def __init__(
        self,
        layers: Sequence[nn.Linear],
        rank: int,
        dropout: float,
        adapted: Sequence[bool],
        *,
        grouped: bool,
        kind: str = "",
        keeps_input: bool = False,
    ) -> None:
        super().__init__()
        first, meta = layers[0], layers[0].weight.device
        self.sizes = [layer.out_features for layer in layers]
        merged = nn.Linear(first.in_features, sum(self.sizes), first.bias is not None, meta)
        merged = merged.to(first.weight.dtype).requires_grad_(False)  # noqa: FBT003
        self.linear: nn.Module = (
            Linear4Bit(merged, kind, keeps_input=keeps_input) if kind else merged
        )
        self.adapted, self.grouped = list(adapted), grouped
        self.outs = [size for size, own in zip(self.sizes, adapted, strict=True) if own]
        groups = sum(adapted) if grouped else 1
        self.dropout = nn.Dropout(dropout)
        self.lora_a = nn.Linear(first.in_features, rank * groups, bias=False, device=meta)
        self.lora_b = nn.Linear(rank, sum(self.outs), bias=False, device=meta)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return the three results, views of one tensor."""
        whole = self.linear(x)
        inner = self.lora_a(self.dropout(x if self.grouped else x.to(self.lora_a.weight.dtype)))
        if not self.grouped:
            return self._parts((whole + self.lora_b(inner) * 1.0).to(whole.dtype))
        weight = self.lora_b.weight.unsqueeze(-1)
        parts = inner.transpose(-2, -1).chunk(len(self.outs), dim=1)
        kernels = torch.ops.aten.split_with_sizes(weight, self.outs)
        if len(set(self.sizes)) == 1:
            added = F.conv1d(inner.transpose(-2, -1), weight, groups=len(self.outs))
        else:
            pairs = zip(parts, kernels, strict=True)
            added = torch.cat([F.conv1d(part, kernel) for part, kernel in pairs], dim=1)
        added = added.transpose(-2, -1)
        if not all(self.adapted):
            padded = x.new_zeros((*x.shape[:-1], sum(self.sizes)))
            places = torch.empty(sum(self.outs), dtype=torch.int64, device=x.device)
            added = padded.index_copy_(-1, places, added)
        return self._parts(whole + added * 1.0)

    def _parts(self, whole: Tensor) -> tuple[Tensor, ...]:
        parts: tuple[Tensor, ...] = torch.ops.aten.split_with_sizes(whole, self.sizes, -1)
        return tuple(parts)


def merge_projections(blocks: nn.ModuleList, **options: Any) -> None:
    """Compute q, k and v of each attention by one layer with adapters."""
    for block in blocks:
        attention: Any = block.self_attn
        names = ("q_proj", "k_proj", "v_proj")
        layers = [getattr(attention, name) for name in names]
        attention.fused = MergedProjections(layers, **options)
        for place, name in enumerate(names):
            setattr(attention, name, Taken(attention.fused, place))


def every_second_product(blocks: nn.ModuleList) -> None:
    """Recompute blocks as torchtitan's selective operators: every second product is kept."""
    kept = {
        torch.ops.aten.mm.default,
        torch.ops.aten._scaled_dot_product_efficient_attention.default,
        torch.ops.aten._scaled_dot_product_flash_attention.default,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    }

    def contexts() -> Any:
        counts = {True: 0, False: 0}

        def policy(context: Any, operation: Any, *_: Any, **__: Any) -> CheckpointPolicy:
            product = operation == torch.ops.aten.mm.default
            counts[context.is_recompute] += product
            keeps = operation in kept and not (product and counts[context.is_recompute] % 2 == 0)
            return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call]

    checkpointed(blocks, reentrant=False, context_fn=contexts, preserve_rng_state=False)


def in_4_bits(
    model: nn.Module,
    targets: tuple[str, ...],
    rank: int,
    dropout: float,
    kind: str,
    *,
    keeps_input: bool = False,
    head: bool = False,
) -> None:
    """Keep every linear layer in 4 bits, the head only if `head`; add adapters to some."""
    for name, module in list(model.named_modules()):
        skipped = ".lora_" in name or (name.endswith("lm_head") and not head)
        if not isinstance(module, nn.Linear) or skipped:
            continue
        parent = model.get_submodule(name.rpartition(".")[0])
        packed, own = Linear4Bit(module, kind, keeps_input=keeps_input), name.rpartition(".")[2]
        new = Adapted4Bit(packed, rank, dropout) if rank and own in targets else packed
        setattr(parent, own, new)


def fuse_adapters(blocks: nn.ModuleList) -> None:
    """Compute q, k and v of each attention, and o, with their adapters by Unsloth's functions."""
    for block in blocks:
        attention: Any = block.self_attn
        names = ("q_proj", "k_proj", "v_proj")
        attention.fused = FusedProjections([getattr(attention, name) for name in names])
        for place, name in enumerate(names):
            setattr(attention, name, Taken(attention.fused, place))
        attention.o_proj = _Only(FusedProjections([attention.o_proj]))


class _Only(nn.Module):
    def __init__(self, fused: FusedProjections) -> None:
        super().__init__()
        self.fused = fused

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.fused(x)[0]
        return result


class LoopedExperts(nn.Module):
    """Mixtral's experts as transformers 4.48 computed them: one after the other.

    Here each expert gets equally many tokens. If shares are uneven, their sum is the same, and only
    the intermediate results of one expert take other memory.
    """

    def __init__(self, width: int, inner: int, experts: int, chosen: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, experts, bias=False)
        shapes = {"w1": (width, inner), "w2": (inner, width), "w3": (width, inner)}
        self.experts = nn.ModuleList(
            nn.ModuleDict({name: nn.Linear(*shape, bias=False) for name, shape in shapes.items()})
            for _ in range(experts)
        )
        self.chosen = chosen

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of the chosen experts' results."""
        rows = x.view(-1, x.shape[-1])
        weights = F.softmax(self.gate(rows), dim=1, dtype=torch.float)
        best, selected = torch.topk(weights, self.chosen, dim=-1)
        best = (best / best.sum(dim=-1, keepdim=True)).to(x.dtype)
        result = torch.zeros_like(rows)
        mask = F.one_hot(selected, len(self.experts)).permute(2, 1, 0)
        share = len(rows) * self.chosen // len(self.experts)
        for layers in self.experts:
            expert: Any = layers
            places = torch.empty(share, dtype=torch.int64, device=x.device)
            own = rows[None, places].reshape(-1, x.shape[-1])
            out = expert["w2"](F.silu(expert["w1"](own)) * expert["w3"](own))
            result.index_add_(0, places, (out * best[places, 0, None]).to(x.dtype))
        del mask
        return result.view(x.shape)


def loop_over_experts(model: Any) -> None:
    """Replace stacked experts by those that are computed one after the other."""
    config = model.config
    for block in model.model.layers:
        block.mlp = LoopedExperts(
            config.hidden_size,
            config.intermediate_size,
            config.num_local_experts,
            config.num_experts_per_tok,
        )


def checkpointed(blocks: nn.ModuleList, *, reentrant: bool = True, **options: Any) -> None:
    """Recompute each block in its backward pass, by torch's checkpoint inside the block."""
    for block in blocks:
        block.forward = _Recomputed(type(block).forward, block, reentrant, options)


class _Recomputed:
    """A block's forward pass under torch's checkpoint; bound again in copies of the block."""

    def __init__(self, run: Callable[..., Any], block: nn.Module, reentrant: bool, options: Any):  # noqa: FBT001
        self.run, self.block, self.reentrant, self.options = run, block, reentrant, options

    def __call__(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        def run(x: Tensor) -> Any:
            return self.run(self.block, x, *args, **kwargs)

        return checkpoint(run, x, use_reentrant=self.reentrant, **self.options)
