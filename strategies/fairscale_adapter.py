"""All that is used of fairscale's inside: the names, the versions, and the ways to get at them.

No other module reads a private name of fairscale's, replaces a part of it or imports what its users
are not told of. A version without one of the names is refused before the ranks connect, another
version than those that were seen to work is told of.
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
    *foreign_names("read", "know who updates what", "fairscale.optim.OSS",
        "optim partition_parameters world_size param_groups"),
    *foreign_names("replace", "let gradients go as soon as they are sent", _SHARDED,
        "_try_consume_work_handle"),
    *foreign_names("read", "let gradients go as soon as they are sent", _SHARDED,
        "_work_handles refresh_trainable"),
    *foreign_names("read", "let gradients go as soon as they are sent",
        "fairscale.internal.params.Workhandle", "handle callback"),
    *foreign_names("read", "undo its names and shapes", _FULLY_SHARDED,
        "_fsdp_wrapped_module _orig_size"),
    *foreign_names("read", "undo its names and shapes",
        "fairscale.nn.misc.flatten_params_wrapper.FlattenParamsWrapper", "_fpw_module"),
    *foreign_names("replace", "do tasks where they are given", f"{_PIPE}.pipeline.Pipeline",
        "in_queues out_queues"),
    *foreign_names("replace", "recompute in a step of any length", f"{_PIPE}.pipeline.Pipeline",
        "checkpoint_stop"),
    *foreign_names("read", "run micro-batches that are there", f"{_PIPE}.pipeline.Pipeline", "run"),
    *foreign_names("read", "run micro-batches that are there", f"{_PIPE}.Pipe", "pipeline"),
    *foreign_names("read", "run micro-batches that are there", f"{_PIPE}.microbatch", "Batch"),
    *foreign_names("read", "do tasks where they are given", f"{_PIPE}.worker",
        "join_workers Task.compute"),
    *foreign_names("read", "do tasks where they are given", f"{_PIPE}.stream", "use_device"),
    *foreign_names("read", "know a second pass", f"{_PIPE}.checkpoint", "is_recomputing"),
))  # fmt: skip
_WRAPPERS = ("_fsdp_wrapped_module.", "_fpw_module.")
"""What fairscale puts into the names of what it has wrapped."""


def require_fairscale(user: str, instead: str) -> None:
    """Refuse to go on without a fairscale that has all that is used of it.

    Args:
        user: the key with its value that wants it.
        instead: what else the user can do, as the end of a sentence.

    Raises:
        ConfigError: it is not installed, does not load here, or is without a name.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that parts have moved to torch, and are there no more
            import fairscale.nn.data_parallel
            import fairscale.optim  # noqa: F401

            FAIRSCALE.missing_names()  # imports the modules that have them
    except ImportError as error:
        raise FAIRSCALE.does_not_load(error, user, instead) from None
    FAIRSCALE.refuse_missing(user, instead)


def take_over_waiting(wrapped: Any) -> deque[Any]:
    """Let ShardedDataParallel wait for no reduction before the end of a backward pass.

    Returns:
        Its reductions under way, the oldest first, for `finish_reduction`.
    """
    wrapped._try_consume_work_handle = lambda: None
    handles: deque[Any] = wrapped._work_handles
    return handles


def finish_oldest(handles: deque[Any]) -> None:
    """Wait for the oldest reduction under way, and do what fairscale does after it."""
    work = handles.popleft()
    work.handle.wait()
    work.callback()


def plain_name(name: str) -> str:
    """The name that a parameter or buffer had before fairscale wrapped the blocks."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def whole_size(tensor: Tensor) -> torch.Size:
    """The shape that a tensor had before fairscale sharded it; its own where it did not."""
    size: torch.Size = getattr(tensor, "_orig_size", tensor.shape)
    return size


def is_second_pass() -> bool:
    """Whether Pipe computes something again."""
    from fairscale.nn.pipe.checkpoint import is_recomputing

    return bool(is_recomputing())


class _InlineQueue:
    """A queue of Pipe's whose tasks are done as they are put."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._done: deque[tuple[bool, Any]] = deque()

    def put(self, task: Any) -> None:
        """Do it; None is the farewell."""
        from fairscale.nn.pipe.stream import use_device

        if task is None:
            self._done.append((False, None))
            return
        try:
            with use_device(self._device):
                batch = task.compute()
        except Exception:  # noqa: BLE001 - Pipe raises it when the cycle is over
            self._done.append((False, sys.exc_info()))
        else:
            self._done.append((True, (task, batch)))

    def get(self) -> tuple[bool, Any]:
        """The result of the task that was put first."""
        return self._done.popleft()


def do_without_workers(pipe: Any, devices: Sequence[torch.device]) -> None:
    """Let the tasks of a Pipe be done where they are given, in the order of its clock."""
    from fairscale.nn.pipe.worker import join_workers

    pipeline = pipe.pipeline
    join_workers(pipeline.in_queues, pipeline.out_queues)
    pipeline.in_queues = pipeline.out_queues = [_InlineQueue(device) for device in devices]


def run_pipe(pipe: Any, inputs: Sequence[Tensor], recomputed: int) -> list[Tensor]:
    """Send micro-batches through a Pipe, which neither cuts them nor puts outputs together.

    Args:
        pipe: the whole of it.
        inputs: one tensor for each micro-batch.
        recomputed: how many of them, from the first, are computed again.

    Returns:
        The first output of each.
    """
    from fairscale.nn.pipe.microbatch import Batch

    pipeline = pipe.pipeline
    pipeline.checkpoint_stop = recomputed
    batches = [Batch((tensor,), number) for number, tensor in enumerate(inputs)]
    pipeline.run(batches)
    return [batch[0] for batch in batches]
