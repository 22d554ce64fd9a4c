"""DeepSpeed's pipeline engine around one rank's stage, on the ranks that are there.

DeepSpeed lays its own grid; rank r of ours is (r // pp, r % pp) on (dp, pp), so its axes are given
in that order: its default one has the replicas next to each other.
"""

from __future__ import annotations

import io
import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from importlib import import_module
from typing import Any

import torch
from torch import nn

from bigtrain.ranks.context import RunContext

_MODULES = ("deepspeed", "deepspeed.comm.torch", "deepspeed.pipe", "deepspeed.runtime.pipe.p2p")


def load_deepspeed_pipeline(device_type: str) -> Any:
    """Import DeepSpeed, silently, for one kind of device.

    Raises:
        ImportError: it is not installed, or does not load here.
    """
    logging.getLogger("DeepSpeed").addFilter(lambda record: record.levelno >= logging.ERROR)
    before = set(os.environ)
    # Left to itself it takes a GPU that it finds, whatever device the job is on.
    with default_environment(DS_ACCELERATOR=device_type), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loaded = [import_module(name) for name in _MODULES][0]
    for key in os.environ.keys() - before:  # it leaves some behind
        del os.environ[key]
    return loaded


@contextmanager
def default_environment(**values: str) -> Iterator[None]:
    """Set what is not set, for a while."""
    missing = {key: value for key, value in values.items() if key not in os.environ}
    os.environ.update(missing)
    try:
        yield
    finally:
        for key in missing:
            os.environ.pop(key, None)


def make_pipeline_engine(
    part: nn.Module,
    optimizer: torch.optim.Optimizer,
    config: dict[str, Any],
    context: RunContext,
    closing: ExitStack,
) -> Any:
    """Let DeepSpeed make its engine. Collective over all ranks.

    Args:
        part: this rank's layer; DeepSpeed is told of as many layers as there are stages.
        optimizer: over its trained parameters.
        config: DeepSpeed's.
        context: the mesh.
        closing: takes what is to be undone at the end.

    Raises:
        RuntimeError: DeepSpeed's grid is another one than the mesh.
    """
    deepspeed = load_deepspeed_pipeline(context.device.type)
    # Only some launchers set it, and DeepSpeed reads it all the time.
    closing.enter_context(default_environment(LOCAL_RANK=str(context.local_rank)))
    with warnings.catch_warnings(), redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        _connect(deepspeed, context)
        topology = import_module("deepspeed.runtime.pipe.topology").ProcessTopology(
            axes=["data", "pipe"], dims=[context.dp_size, context.pp_size]
        )
        layer = deepspeed.pipe.LayerSpec
        module = deepspeed.pipe.PipelineModule(
            # Each rank builds its own layer alone.
            layers=[layer(_Given, part) for _ in range(context.pp_size)],
            topology=topology,
            partition_method="uniform",
            loss_fn=None,  # the last stage gives the loss itself
        )
        engine, *_ = deepspeed.initialize(
            model=module, optimizer=optimizer, config=config, dist_init_required=False
        )
    grid = engine.grid
    theirs = (grid.get_data_parallel_id(), grid.get_stage_id())
    if theirs != (context.dp_rank, context.pp_rank):
        raise RuntimeError(
            f"rank {context.rank} is {(context.dp_rank, context.pp_rank)} on the axes dp and pp, "
            f"and {theirs} in DeepSpeed's grid"
        )
    return engine


class _Given(nn.Module):
    """What DeepSpeed builds as a layer: a module that is there."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, wires: Any) -> Any:
        """Call it."""
        return self.part(wires)


def _connect(deepspeed: Any, context: RunContext) -> None:
    """Let DeepSpeed use the process group that is there, and build no kernel for it."""
    # What it keeps of a group outlives the group, and a second engine may have another one.
    import_module("deepspeed.comm.comm").__dict__["cdb"] = None
    import_module("deepspeed.utils.groups").__dict__["_WORLD_GROUP"] = None
    backend: Any = import_module("deepspeed.comm.torch")
    plain = backend.build_shm_op
    backend.build_shm_op = lambda: None
    try:
        name = "nccl" if context.device.type == "cuda" else "gloo"
        deepspeed.init_distributed(name, auto_mpi_discovery=False, verbose=False)
    finally:
        backend.build_shm_op = plain
