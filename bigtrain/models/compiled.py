"""Compile blocks one by one (`train.compile=blocks`), inside all hooks.

Blocks of one class share compiled programs, and techniques that shard, recompute or cut them see
the same modules as without compilation. Source: PyTorch's recipe "regional compilation".
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import cache, partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from bigtrain.errors import ConfigError
from bigtrain.memory.program_buffers import announce_buffers
from bigtrain.models.blocks import find_blocks
from bigtrain.models.fake_programs import fake_program

PROGRAMS = 64
"""The most programs of a class of blocks, for different sizes, precisions and modes."""


def compile_blocks(root: nn.Module, policies: Mapping[str, str]) -> None:
    """Compile the blocks of a model or of a stage, each at its first call.

    In place, without changing names; copies made later are compiled as well. Not compiled are
    blocks with `selective` recomputation, which observes single operations, blocks that a cut goes
    through, and blocks whose instance overrides `forward`.

    Args:
        root: the model or a stage, before recomputation wraps its blocks. A fake copy gets the
            same programs without their kernels.
        policies: recomputation policies by the block's name in the whole model.
    """
    cut_through = getattr(root, "cut_through", ())
    fake = any(isinstance(parameter, FakeTensor) for parameter in root.parameters())
    if not fake:
        announce_buffers()
    for name, block in find_blocks(root):
        is_overridden = "forward" in block.__dict__ or isinstance(block, torch.jit.ScriptModule)
        if not (is_overridden or name in cut_through or policies.get(name) == "selective"):
            block.forward = partial(_forward, block, fake)


def remove_compiled(root: nn.Module) -> None:
    """Undo `compile_blocks`, for all modules of a tree."""
    for module in root.modules():
        override = module.__dict__.get("forward")
        if isinstance(override, partial) and override.func is _forward:
            del module.__dict__["forward"]


def programs_for_every_size() -> AbstractContextManager[None]:
    """Raise torch's limit of eight programs per class, and keep a block one program under DDP.

    torch would split a program under DDP where a bucket is full.
    """
    from torch._dynamo import config

    return config.patch(recompile_limit=PROGRAMS, optimize_ddp=False)  # type: ignore[no-any-return]


def check_compiler(device_type: str) -> None:
    """Refuse to compile if torch's compiler cannot run here.

    Raises:
        ConfigError: on a CPU there is no C++ compiler, or on a GPU no Triton.
    """
    if device_type == "cpu":
        asked = os.environ.get("CXX", "")
        if not any(shutil.which(name) for name in (asked, "g++", "clang++") if name):
            raise ConfigError(
                "train.compile=blocks needs a C++ compiler, and there is no g++ here. "
                "Run: sudo apt-get install g++ (or set CXX), or leave train.compile out."
            )
    elif find_spec("triton") is None:
        raise ConfigError(
            "train.compile=blocks needs Triton on a GPU, and it is not installed. "
            "Run: pip install triton, or leave train.compile out."
        )


def _forward(block: nn.Module, fake: bool, *args: Any, **kwargs: Any) -> Any:  # noqa: FBT001
    return _program(type(block).forward, fake=fake)(block, *args, **kwargs)


@cache
def _program(forward: Callable[..., Any], *, fake: bool) -> Callable[..., Any]:
    """Compile the forward pass of a class; dropout draws the same numbers as uncompiled."""
    options: dict[str, Any] = {"fallback_random": True}
    if fake:
        return fake_program(forward, options)
    compiled: Callable[..., Any] = torch.compile(forward, dynamic=False, options=options)
    return compiled
