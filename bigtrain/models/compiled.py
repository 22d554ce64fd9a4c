"""Compile blocks one by one (`train.compile=blocks`), inside all hooks.

Blocks of one class share compiled programs. Techniques that shard, recompute or cut blocks see the
same modules as without compilation. Source: PyTorch's recipe "regional compilation".

On fake tensors, inductor lowers and fuses operations, plans memory, and writes the program that
calls the kernels, as in a run. That program is executed unchanged, so it allocates and frees the
same buffers. Its kernels are not compiled and do nothing.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import cache, partial
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from bigtrain.devices import KINDS
from bigtrain.errors import ConfigError
from bigtrain.memory.program_buffers import announce_buffers, announce_kernel
from bigtrain.models.blocks import find_blocks

PROGRAMS = 64
"""The most compiled programs of one class of blocks, for different sizes, dtypes and modes."""


def compile_blocks(root: nn.Module, policies: Mapping[str, str]) -> None:
    """Compile the blocks of a model or of a stage, each at its first call.

    The blocks are changed in place, and keep their names. Copies of a block that are made later are
    compiled as well. Some blocks are not compiled: blocks with `selective` recomputation, which
    observes single operations; blocks that a cut goes through; blocks whose instance overrides
    `forward`; TorchScript modules.

    Args:
        root: the model or a stage, before recomputation wraps its blocks. A copy on fake tensors
            gets the same programs without their kernels.
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
    """A context that raises torch's limit of eight programs per class to `PROGRAMS`.

    Under DDP, torch would split a program at the end of each bucket. In this context, each block
    stays one program.
    """
    from torch._dynamo import config

    return config.patch(recompile_limit=PROGRAMS, optimize_ddp=False)  # type: ignore[no-any-return]


def check_compiler(device_type: str) -> None:
    """Refuse to compile if torch's compiler cannot run on this machine.

    Args:
        device_type: the type of the run's devices, such as 'cpu' or 'cuda'.

    Raises:
        ConfigError: the device is a CPU and there is no C++ compiler, or it is a GPU and Triton is
            not installed.
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
    """Compile the forward pass of a class; dropout draws the same numbers as if not compiled."""
    options: dict[str, Any] = {"fallback_random": True}
    if fake:
        return fake_program(forward, options)
    compiled: Callable[..., Any] = torch.compile(forward, dynamic=False, options=options)
    return compiled


def fake_program(forward: Callable[..., Any], options: Mapping[str, Any]) -> Callable[..., Any]:
    """Compile a function as `torch.compile` does, but for calls with fake tensors.

    Args:
        forward: the function; it is compiled at the first call with each size.
        options: options of inductor.
    """
    backend = _FakeBackend(options)
    program: Callable[..., Any] = torch.compile(forward, backend=backend, dynamic=False)
    return program


class _FakeBackend:
    """A backend of `torch.compile` that neither reads nor fills the caches of compiled programs."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = {**options, "fx_graph_cache": False, "fx_graph_remote_cache": False}

    def __call__(self, graph: torch.fx.GraphModule, example: Any) -> Any:
        from torch._functorch import config
        from torch._inductor.compile_fx import compile_fx

        with config.patch(enable_autograd_cache=False, enable_remote_autograd_cache=False):
            return compile_fx(graph, example, _lower, config_patches=self._options)


def _lower(graph: torch.fx.GraphModule, example: Any, **settings: Any) -> Any:
    """Lower the graph of a forward pass, or of a backward pass when it first runs."""
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.graph import GraphLowering

    with mock.patch.object(GraphLowering, "_compile_to_module_lines", _load):
        return compile_fx_inner(graph, example, **settings)


def _load(lowered: Any, written: Any) -> SimpleNamespace:
    """Execute a written program; inductor would import it from a file and compile its kernels."""
    source = written.value
    names: dict[str, Any] = {"__name__": "fake_program"}
    names |= {**lowered.constants, **lowered.torchbind_constants}
    with _no_kernels():
        exec(compile(source, "<program of inductor>", "exec"), names)  # noqa: S102
    names |= _ON_FAKES
    lowered.cache_key = lowered.cache_path = ""
    lowered.cache_linemap = []
    return SimpleNamespace(call=names["call"], runner=names.get("runner"), __file__="")


@contextmanager
def _no_kernels() -> Iterator[None]:
    from torch._inductor import async_compile

    with mock.patch.object(async_compile, "AsyncCompile", _NoKernels):
        yield


class _NoKernels:
    """Replaces inductor's `AsyncCompile`, which compiles a program's kernels."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_args, **_kwargs: _NO_KERNEL

    def wait(self, _names: dict[str, Any]) -> None:
        """Do nothing: no kernel is being compiled."""


class _NoKernel:
    """A kernel that writes nothing; the program has already allocated the outputs."""

    def __call__(self, *args: Any, **_kwargs: Any) -> None:
        announce_kernel([argument for argument in args if isinstance(argument, Tensor)])

    run = __call__


_NO_KERNEL = _NoKernel()


def _empty(device: str) -> Callable[..., Tensor]:
    def empty(size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty_strided(size, stride, dtype=dtype, device=device)

    return empty


def _reinterpret(
    tensor: Tensor, size: tuple[int, ...], stride: tuple[int, ...], offset: int
) -> Tensor:
    return tensor.as_strided(size, stride, tensor.storage_offset() + offset)


def _nothing(*_args: Any, **_kwargs: Any) -> None:
    pass


_ON_FAKES: dict[str, Any] = {
    **{f"empty_strided_{kind}": _empty(kind) for kind in ("cpu", *KINDS)},
    "reinterpret_tensor": _reinterpret,
    **dict.fromkeys(("assert_size_stride", "assert_size_stride_grouped"), _nothing),
    **dict.fromkeys(("assert_alignment", "assert_tensor_metadata"), _nothing),
}
"""Replacements of functions that read memory, or that allocate tensors past dispatch modes."""
