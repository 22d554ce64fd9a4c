"""Inductor's programs on fake tensors: they allocate and free as in a run, without kernels.

Inductor lowers, fuses and plans as it does for a run, and writes the program that calls the
kernels. That program is run unchanged; its kernels are not compiled and do nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from bigtrain.devices import KINDS
from bigtrain.memory.program_buffers import announce_kernel


def fake_program(forward: Callable[..., Any], options: Mapping[str, Any]) -> Callable[..., Any]:
    """Compile a function as `torch.compile` does, for fake tensors.

    Args:
        forward: the function; it is compiled at the first call for each size.
        options: of inductor.
    """
    backend = _FakeBackend(options)
    program: Callable[..., Any] = torch.compile(forward, backend=backend, dynamic=False)
    return program


class _FakeBackend:
    """A backend of `torch.compile` that bypasses the caches in which a run looks for programs."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = {**options, "fx_graph_cache": False, "fx_graph_remote_cache": False}

    def __call__(self, graph: torch.fx.GraphModule, example: Any) -> Any:
        from torch._functorch import config
        from torch._inductor.compile_fx import compile_fx

        with config.patch(enable_autograd_cache=False, enable_remote_autograd_cache=False):
            return compile_fx(graph, example, _lower, config_patches=self._options)


def _lower(graph: torch.fx.GraphModule, example: Any, **settings: Any) -> Any:
    """Lower the graph of a forward pass, or of a backward pass when that first runs."""
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.graph import GraphLowering

    with mock.patch.object(GraphLowering, "_compile_to_module_lines", _load):
        return compile_fx_inner(graph, example, **settings)


def _load(lowered: Any, written: Any) -> SimpleNamespace:
    """Execute a written program, instead of importing it from a file and compiling its kernels."""
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
    """A kernel that writes nothing: the program has allocated its outputs."""

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
"""Replacements of functions that read memory, or allocate tensors without any dispatch mode."""
