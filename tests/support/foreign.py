"""Checkpoints of other libraries, each written by the library itself."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from support.nets import TinyLM, tokens
from torch import Tensor, nn

LR, CLIP = 1e-2, 0.5


def _batch(step: int) -> tuple[Tensor, Tensor]:
    """The eight samples of a step: (inputs, targets)."""
    samples = tokens(64, ignored=False)
    part = slice(8 * step, 8 * step + 8)
    return samples.inputs[part], samples.targets[part]


def _own(context: Any, step: int) -> tuple[Tensor, Tensor]:
    """This rank's samples of a step: (inputs, targets)."""
    inputs, targets = _batch(step)
    size = 8 // context.world_size
    part = slice(context.rank * size, (context.rank + 1) * size)
    return inputs[part], targets[part]


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The mean squared error of a batch."""
    inputs, targets = batch
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


def _mean(context: Any, losses: list[float]) -> list[float]:
    """The mean over ranks of each loss."""
    rows = context.all_gather_rows(losses)
    return [sum(column) / context.world_size for column in zip(*rows, strict=True)]


def deepspeed_run(context: Any, stage: int, folder: str) -> list[float]:
    """Train three steps, write DeepSpeed's checkpoint, and return the losses of three more."""
    from bigtrain.strategies.deepspeed_adapter import connect_deepspeed

    torch.manual_seed(3)
    model = TinyLM()
    config = {
        "train_batch_size": 8,
        "gradient_clipping": CLIP,
        "zero_optimization": {"stage": stage, "sub_group_size": 200},
        "zero_allow_untested_optimizer": True,
    }
    losses = []
    with ExitStack() as closing:
        deepspeed = connect_deepspeed(context, closing)
        engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.1),
            config=config,
            dist_init_required=False,
        )
        for step in range(6):
            if step == 3:
                engine.save_checkpoint(folder)
            loss = loss_of(engine, _own(context, step))
            losses.append(float(loss.detach()))
            engine.backward(loss)
            engine.step()
    return _mean(context, losses)[3:]


def deepspeed_bf16(context: Any, stage: int, folder: str) -> dict[str, Tensor]:
    """Write a bf16 checkpoint with two groups and a frozen parameter; return DeepSpeed's fp32
    values.
    """
    from bigtrain.strategies.deepspeed_adapter import connect_deepspeed

    torch.manual_seed(3)
    model = TinyLM()
    model.up.bias.requires_grad_(False)
    trained = [p for p in model.parameters() if p.requires_grad]
    flat = {"params": [p for p in trained if p.dim() == 1], "weight_decay": 0.0}
    config = {
        "train_batch_size": 8,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage, "sub_group_size": 200},
        "zero_allow_untested_optimizer": True,
    }
    with ExitStack() as closing:
        deepspeed = connect_deepspeed(context, closing)
        engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=torch.optim.AdamW([{"params": [p for p in trained if p.dim() > 1]}, flat]),
            config=config,
            dist_init_required=False,
        )
        loss = loss_of(engine, _own(context, 0))
        engine.backward(loss)
        engine.step()
        engine.save_checkpoint(folder)
        context.barrier()
        module = import_module("deepspeed.utils.zero_to_fp32")
        state = module.get_fp32_state_dict_from_zero_checkpoint(folder)
        return {name: value.clone() for name, value in state.items()}


def dcp_run(context: Any, folder: str) -> list[float]:
    """Train three steps under fully_shard, write torch's checkpoint, and return three
    more losses.
    """
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(3)
    model = TinyLM()
    fully_shard(model, mesh=context.mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.1)
    losses = []
    for step in range(6):
        if step == 3:
            state, moments = get_state_dict(model, optimizer)
            dcp.save({"model": state, "optim": moments, "step": 3}, checkpoint_id=folder)
        loss = loss_of(model, _own(context, step))
        losses.append(float(loss.detach()))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
    return _mean(context, losses)[3:]


def fsdp1_run(context: Any, file: str) -> list[float]:
    """Train three steps under FullyShardedDataParallel, write a trainer's file, return three
    losses.
    """
    from torch.distributed.fsdp import FullStateDictConfig, StateDictType
    from torch.distributed.fsdp import FullyShardedDataParallel as Fsdp

    torch.manual_seed(3)
    model = Fsdp(TinyLM(), device_id=torch.device("cpu"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.1)
    losses = []
    for step in range(6):
        if step == 3:
            with Fsdp.state_dict_type(
                model, StateDictType.FULL_STATE_DICT, FullStateDictConfig(rank0_only=True)
            ):
                weights, moments = model.state_dict(), Fsdp.optim_state_dict(model, optimizer)
            if context.is_main:
                torch.save({"model": weights, "optimizer": moments, "epoch": 0}, file)
        loss = loss_of(model, _own(context, step))
        losses.append(float(loss.detach()))
        loss.backward()
        model.clip_grad_norm_(CLIP)
        optimizer.step()
        optimizer.zero_grad()
    return _mean(context, losses)[3:]


def trainer_run(
    wrap: Callable[[dict[str, Tensor], dict[str, Any]], Any], file: Path
) -> list[float]:
    """Train three steps in one process, write a trainer's file, and return the losses of three
    more.
    """
    torch.manual_seed(3)
    model = TinyLM()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.1)
    losses = []
    for step in range(6):
        if step == 3:
            torch.save(wrap(model.state_dict(), optimizer.state_dict()), file)
        loss = loss_of(model, _batch(step))
        losses.append(float(loss.detach()))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
    return losses[3:]


def continued_from(context: Any, strategy: str, path: str) -> list[float]:
    """The losses of three more steps by bigtrain, from a converted checkpoint."""
    from bigtrain.engine.engine import Engine
    from bigtrain.job.load import job_from_keys
    from bigtrain.losses.loss import CrossEntropy

    def make(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=LR, weight_decay=0.1)

    job = job_from_keys(strategy, {"train.global_batch_size": 8, "optim.clip_norm": CLIP})
    with Engine(TinyLM, CrossEntropy(), make, job, context) as engine:
        engine.load(Path(path))
        return [engine.step(_own(context, step)).loss for step in range(3, 6)]
