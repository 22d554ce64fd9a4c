"""The private names of fairscale that the techniques use, and the functions that use these names.

`FAIRSCALE` lists them with the versions that were tested. No other module reads a private name of
fairscale, replaces a part of it or imports an undocumented part. A version that lacks one of the
names is refused before the ranks connect. An untested version gives a warning.
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

# All strategies but stage 3 were run on CPUs with 0.4.9, 0.4.12 and 0.4.13, the latest version.
# 0.4.6 and 0.4.0 were only imported: they lack two of these names.
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
    """Refuse a job that needs fairscale if a name in `FAIRSCALE` cannot be imported.

    Args:
        user: the key and value of the job that need fairscale, for the message.
        instead: an alternative for users without fairscale, as the end of a sentence.

    Raises:
        ConfigError: fairscale is not installed, cannot be imported, or lacks a name.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # fairscale warns that parts have moved to torch
            import fairscale.nn.data_parallel
            import fairscale.optim  # noqa: F401

            FAIRSCALE.missing_names()  # imports the modules that have them
    except ImportError as error:
        raise FAIRSCALE.does_not_load(error, user, instead) from None
    FAIRSCALE.refuse_missing(user, instead)


def take_over_waiting(wrapped: Any) -> deque[Any]:
    """Stop ShardedDataParallel from waiting for reductions during a backward pass.

    Returns:
        The reductions in flight, the oldest first. `finish_oldest` waits for them.
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
    """Return whether Pipe is recomputing a stage in the calling thread."""
    from fairscale.nn.pipe.checkpoint import is_recomputing

    return bool(is_recomputing())


class _InlineQueue:
    """A queue of Pipe that runs each task when it is put."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._done: deque[tuple[bool, Any]] = deque()

    def put(self, task: Any) -> None:
        """Run a task and store its result; None closes the queue."""
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
        pipe: a Pipe with all stages of the model.
        inputs: one tensor for each micro-batch.
        recomputed: the number of micro-batches, from the first on, whose forward pass is recomputed
            for the backward pass.

    Returns:
        The first output of the last stage for each micro-batch.
    """
    from fairscale.nn.pipe.microbatch import Batch

    pipeline = pipe.pipeline
    pipeline.checkpoint_stop = recomputed
    batches = [Batch((tensor,), number) for number, tensor in enumerate(inputs)]
    pipeline.run(batches)
    return [batch[0] for batch in batches]
