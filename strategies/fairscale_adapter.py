"""All private names of fairscale that we use, its versions, and the functions that use the names.

No other module reads a private name of fairscale, replaces a part of it or imports an undocumented
part. A version that lacks one of the names is refused before the ranks connect. An untested version
gives a warning.
"""

from __future__ import annotations

import sys
import warnings
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bigtrain.machine.libraries import ForeignLibrary, foreign_names

_PIPE = "fairscale.nn.pipe"
_SHARDED = "fairscale.nn.data_parallel.ShardedDataParallel"
_FULLY_SHARDED = "fairscale.nn.data_parallel.FullyShardedDataParallel"

# Run on CPUs, that is without stage 3, with 0.4.9, 0.4.12 and 0.4.13, the last there is. 0.4.6 and
# 0.4.0, imported alone, lack two of these names.
FAIRSCALE = ForeignLibrary("fairscale", "0.4.9", "0.4.14", (
    *foreign_names("read", "find the parameters that a rank updates", "fairscale.optim.OSS",
        "optim partition_parameters world_size param_groups"),
    *foreign_names("replace", "free gradients as soon as they are sent", _SHARDED,
        "_try_consume_work_handle"),
    *foreign_names("read", "free gradients as soon as they are sent", _SHARDED,
        "_work_handles refresh_trainable"),
    *foreign_names("read", "free gradients as soon as they are sent",
        "fairscale.internal.params.Workhandle", "handle callback"),
    *foreign_names("read", "restore plain names and shapes", _FULLY_SHARDED,
        "_fsdp_wrapped_module _orig_size"),
    *foreign_names("read", "restore plain names and shapes",
        "fairscale.nn.misc.flatten_params_wrapper.FlattenParamsWrapper", "_fpw_module"),
    *foreign_names("replace", "run tasks in the calling thread", f"{_PIPE}.pipeline.Pipeline",
        "in_queues out_queues"),
    *foreign_names("replace", "recompute in a step of any length", f"{_PIPE}.pipeline.Pipeline",
        "checkpoint_stop"),
    *foreign_names("read", "run micro-batches cut before", f"{_PIPE}.pipeline.Pipeline", "run"),
    *foreign_names("read", "run micro-batches cut before", f"{_PIPE}.Pipe", "pipeline"),
    *foreign_names("read", "run micro-batches cut before", f"{_PIPE}.microbatch", "Batch"),
    *foreign_names("read", "run tasks in the calling thread", f"{_PIPE}.worker",
        "join_workers Task.compute"),
    *foreign_names("read", "run tasks in the calling thread", f"{_PIPE}.stream", "use_device"),
    *foreign_names("read", "recognize recomputation", f"{_PIPE}.checkpoint", "is_recomputing"),
))  # fmt: skip
_WRAPPERS = ("_fsdp_wrapped_module.", "_fpw_module.")
"""The parts that fairscale adds to the names of parameters in wrapped modules."""


def require_fairscale(user: str, instead: str) -> None:
    """Refuse to go on without a fairscale that has all our names.

    Args:
        user: the key and value that need it.
        instead: the fix for users without it, as the end of a sentence.

    Raises:
        ConfigError: it is not installed, cannot be imported, or lacks a name.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it warns that parts have moved to torch
            import fairscale.nn.data_parallel
            import fairscale.optim  # noqa: F401

            FAIRSCALE.missing_names()  # imports the modules that have them
    except ImportError as error:
        raise FAIRSCALE.does_not_load(error, user, instead) from None
    FAIRSCALE.refuse_missing(user, instead)


def take_over_waiting(wrapped: Any) -> deque[Any]:
    """Stop ShardedDataParallel from waiting for reductions during a backward pass.

    Returns:
        Its reductions in flight, the oldest first, for `finish_oldest`.
    """
    wrapped._try_consume_work_handle = lambda: None
    handles: deque[Any] = wrapped._work_handles
    return handles


def finish_oldest(handles: deque[Any]) -> None:
    """Wait for the oldest reduction in flight, and call fairscale's callback for it."""
    work = handles.popleft()
    work.handle.wait()
    work.callback()


def plain_name(name: str) -> str:
    """Return the name that a parameter or buffer had before fairscale wrapped the blocks."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def whole_size(tensor: Tensor) -> torch.Size:
    """Return the shape that a tensor had before fairscale sharded it."""
    size: torch.Size = getattr(tensor, "_orig_size", tensor.shape)
    return size


def is_second_pass() -> bool:
    """Whether Pipe is recomputing a stage."""
    from fairscale.nn.pipe.checkpoint import is_recomputing

    return bool(is_recomputing())


class _InlineQueue:
    """A queue of Pipe that runs each task when it is put."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._done: deque[tuple[bool, Any]] = deque()

    def put(self, task: Any) -> None:
        """Run a task; None closes the queue."""
        from fairscale.nn.pipe.stream import use_device

        if task is None:
            self._done.append((False, None))
            return
        try:
            with use_device(self._device):
                batch = task.compute()
        except Exception:  # noqa: BLE001 - Pipe raises it at the end of the clock cycle
            self._done.append((False, sys.exc_info()))
        else:
            self._done.append((True, (task, batch)))

    def get(self) -> tuple[bool, Any]:
        """Return the result of the oldest task."""
        return self._done.popleft()


def do_without_workers(pipe: Any, devices: Sequence[torch.device]) -> None:
    """Let a Pipe run its tasks in the calling thread, in the order of its clock cycles."""
    from fairscale.nn.pipe.worker import join_workers

    pipeline = pipe.pipeline
    join_workers(pipeline.in_queues, pipeline.out_queues)
    pipeline.in_queues = pipeline.out_queues = [_InlineQueue(device) for device in devices]


def run_pipe(pipe: Any, inputs: Sequence[Tensor], recomputed: int) -> list[Tensor]:
    """Run micro-batches through a Pipe without its own splitting and concatenation.

    Args:
        pipe: all stages.
        inputs: one tensor for each micro-batch.
        recomputed: how many of them, from the first, are recomputed for their backward pass.

    Returns:
        The first output of each.
    """
    from fairscale.nn.pipe.microbatch import Batch

    pipeline = pipe.pipeline
    pipeline.checkpoint_stop = recomputed
    batches = [Batch((tensor,), number) for number, tensor in enumerate(inputs)]
    pipeline.run(batches)
    return [batch[0] for batch in batches]
