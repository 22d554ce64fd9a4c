"""Training loops as people write them by hand, one for each technique, on two CPU ranks.

They train a GPT; those of data parallelism also train timm's ViT and ConvNeXt (`blocks_of`). Each
loop does what bigtrain's strategy of the same name does: forward and backward passes, one norm over
all ranks, clipping to 1, AdamW, and the mean loss of all ranks as a number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn.functional import cross_entropy, linear
from torch.nn.parallel import DistributedDataParallel

ROWS = 4
"""Rows of a step on each rank; pipelines and slices have one batch of twice as many."""
MICRO_BATCHES = 4
"""Micro-batches of a step in the pipelines."""
NO_KEYS: Mapping[str, int] = {}
MakeModel = Callable[[], nn.Module]


class Loop(Protocol):
    """A hand-written training loop."""

    def step(self, inputs: Tensor, targets: Tensor) -> float:
        """Train on one batch, (rows, tokens) each; return the mean loss of all ranks."""


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Return the optimizer of all loops."""
    return torch.optim.AdamW(parameters, lr=1e-3, fused=True)


def loss_of(output: Tensor, targets: Tensor) -> Tensor:
    """Return the mean loss of logits (rows, tokens, classes) or (rows, classes)."""
    return cross_entropy(output.flatten(0, -2), targets.flatten())


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Return the modules that a user would wrap one by one: those of `blocks`, or of all stages."""
    if hasattr(model, "blocks"):
        return list(cast(Iterable[nn.Module], model.blocks))
    stages = cast(Iterable[Any], model.stages)
    return [block for stage in stages for block in stage.blocks]


def checkpoint_blocks(model: nn.Module) -> nn.Module:
    """Let every block recompute its activations, with torch's wrapper; return the model."""
    blocks = set(blocks_of(model))
    apply_activation_checkpointing(model, check_fn=lambda module: module in blocks)
    return model


def shard_blocks(model: nn.Module, mesh: DeviceMesh, *, reshard: bool) -> None:
    """Apply fully_shard to every block and to the model; see `FullyShard`."""
    for block in blocks_of(model):
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard)


def mean_over_ranks(loss: Tensor) -> float:
    """Return the mean of the ranks' losses."""
    total = loss.detach().clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


class _Replicas:
    """Replicas whose gradients are summed by a wrapper of torch."""

    model: nn.Module
    optimizer: torch.optim.Optimizer

    def step(self, inputs: Tensor, targets: Tensor) -> float:
        loss = loss_of(self.model(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return mean_over_ranks(loss)


class Ddp(_Replicas):
    """DistributedDataParallel, gradients as views of its buckets."""

    def __init__(self, make: MakeModel) -> None:
        self.model = DistributedDataParallel(make(), gradient_as_bucket_view=True)
        self.optimizer = adamw(self.model.parameters())


class ZeroRedundancy(_Replicas):
    """DistributedDataParallel with torch's ZeroRedundancyOptimizer."""

    def __init__(self, make: MakeModel) -> None:
        self.model = DistributedDataParallel(make(), gradient_as_bucket_view=True)
        self.optimizer = ZeroRedundancyOptimizer(
            self.model.parameters(), torch.optim.AdamW, lr=1e-3, fused=True
        )


class FullyShard(_Replicas):
    """fully_shard around every block and around the model.

    Args:
        make: makes the model.
        reshard: whether parameters are freed between the forward and the backward pass.
    """

    def __init__(self, make: MakeModel, *, reshard: bool) -> None:
        self.model = make()
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        shard_blocks(self.model, mesh, reshard=reshard)
        self.optimizer = adamw(self.model.parameters())


class DeepSpeed:
    """DeepSpeed's engine with one of its ZeRO stages.

    Args:
        make: makes the model.
        stage: the stage of ZeRO.
        rows: the rows of a step on each rank.
        zero: further keys of the section `zero_optimization`.
    """

    def __init__(
        self, make: MakeModel, stage: int, rows: int = ROWS, zero: Mapping[str, int] = NO_KEYS
    ) -> None:
        import deepspeed

        model = make()
        config = {
            "train_micro_batch_size_per_gpu": rows,
            "gradient_accumulation_steps": 1,
            "gradient_clipping": 1.0,
            "zero_optimization": {"stage": stage, **zero},
            "steps_per_print": 1_000_000,
        }
        self.engine: Any = deepspeed.initialize(
            model=model, optimizer=adamw(model.parameters()), config=config
        )[0]

    def step(self, inputs: Tensor, targets: Tensor) -> float:
        loss = loss_of(self.engine(inputs), targets)
        self.engine.backward(loss)
        self.engine.step()
        return mean_over_ranks(loss)


class _SumGradient(torch.autograd.Function):
    """The input of a layer whose columns are sliced: the gradient is summed over the ranks."""

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:
        gradient = gradient.contiguous()
        dist.all_reduce(gradient)
        return gradient


class _SumOutput(torch.autograd.Function):
    """The output of a layer whose rows are sliced: it is summed over the ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        dist.all_reduce(x)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:
        return gradient


class _Columns(nn.Module):
    """A linear layer with a slice of the output features, of each of `parts` equal parts."""

    def __init__(self, whole: nn.Linear, parts: int) -> None:
        super().__init__()
        rank, ranks = dist.get_rank(), dist.get_world_size()

        def own(tensor: Tensor) -> nn.Parameter:
            pieces = [part.chunk(ranks)[rank] for part in tensor.detach().chunk(parts)]
            return nn.Parameter(torch.cat(pieces))

        self.weight, self.bias = own(whole.weight), own(whole.bias)

    def forward(self, x: Tensor) -> Tensor:
        return linear(cast(Tensor, _SumGradient.apply(x)), self.weight, self.bias)


class _Rows(nn.Module):
    """A linear layer with a slice of the input features."""

    def __init__(self, whole: nn.Linear) -> None:
        super().__init__()
        rank, ranks = dist.get_rank(), dist.get_world_size()
        self.weight = nn.Parameter(whole.weight.detach().chunk(ranks, 1)[rank].clone())
        self.bias = whole.bias

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, _SumOutput.apply(linear(x, self.weight))) + self.bias


class Slices:
    """The blocks' layers sliced as in Megatron-LM; both ranks have the same batch."""

    def __init__(self, make: MakeModel) -> None:
        self.model = make()
        for block in cast(Iterable[Any], self.model.blocks):
            block.attention.num_heads //= dist.get_world_size()
            block.attention.qkv = _Columns(block.attention.qkv, 3)
            block.attention.output = _Rows(block.attention.output)
            block.mlp.expand = _Columns(block.mlp.expand, 1)
            block.mlp.output = _Rows(block.mlp.output)
        self.sliced = [
            parameter
            for module in self.model.modules()
            if isinstance(module, (_Columns, _Rows))
            for name, parameter in module.named_parameters(recurse=False)
            if name == "weight" or isinstance(module, _Columns)
        ]
        slices = set(self.sliced)
        self.whole = [p for p in self.model.parameters() if p not in slices]
        self.optimizer = adamw(self.model.parameters())

    def step(self, inputs: Tensor, targets: Tensor) -> float:
        loss = loss_of(self.model(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        square = nn.utils.get_total_norm([cast(Tensor, p.grad) for p in self.sliced]) ** 2
        dist.all_reduce(square)
        square += nn.utils.get_total_norm([cast(Tensor, p.grad) for p in self.whole]) ** 2
        nn.utils.clip_grads_with_norm_(self.model.parameters(), 1.0, square.sqrt())
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()


class _Stage(nn.Module):
    """Half of a GPT: the embedding and the first blocks, or the last blocks and the head."""

    def __init__(self, model: Any, *, is_first: bool) -> None:
        super().__init__()
        half = len(model.blocks) // 2
        self.embedding = model.embedding if is_first else None
        self.blocks = model.blocks[:half] if is_first else model.blocks[half:]
        self.norm = None if is_first else model.norm
        self.head = None if is_first else model.head

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.embedding is None else self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return x if self.norm is None or self.head is None else self.head(self.norm(x))


class Pipeline:
    """A pipeline of torch.distributed.pipelining, with two stages.

    Args:
        make: makes the model.
        schedule: the class of the schedule.
    """

    def __init__(self, make: MakeModel, schedule: Any) -> None:
        self.is_first = dist.get_rank() == 0
        self.module = _Stage(make(), is_first=self.is_first)
        stage = PipelineStage(self.module, dist.get_rank(), 2, torch.device("cpu"))
        self.schedule = schedule(stage, MICRO_BATCHES, loss_fn=loss_of)
        self.optimizer = adamw(self.module.parameters())

    def step(self, inputs: Tensor, targets: Tensor) -> float:
        losses: list[Tensor] = []
        if self.is_first:
            self.schedule.step(inputs)
        else:
            self.schedule.step(target=targets, losses=losses)
        gradients = [cast(Tensor, p.grad) for p in self.module.parameters()]
        square = nn.utils.get_total_norm(gradients) ** 2
        dist.all_reduce(square)
        nn.utils.clip_grads_with_norm_(self.module.parameters(), 1.0, square.sqrt())
        self.optimizer.step()
        self.optimizer.zero_grad()
        loss = torch.zeros(()) if self.is_first else torch.stack(losses).mean().detach()
        dist.all_reduce(loss)
        return loss.item()


LOOPS: dict[str, Callable[[MakeModel], Loop]] = {
    "ddp": Ddp,
    "zero1_torch": ZeroRedundancy,
    "fsdp_zero2": partial(FullyShard, reshard=False),
    "fsdp": partial(FullyShard, reshard=True),
    **{f"zero{stage}": partial(DeepSpeed, stage=stage) for stage in (1, 2, 3)},
    "tensor": Slices,
    "gpipe": partial(Pipeline, schedule=ScheduleGPipe),
    "1f1b": partial(Pipeline, schedule=Schedule1F1B),
}
"""The loop beside each strategy of bigtrain."""
