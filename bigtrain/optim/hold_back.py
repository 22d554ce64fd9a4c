"""Updates that the device leaves out by itself, so that the host need not wait before them.

A run stops before an update if its loss or its gradient norm is not finite. If the host reads both
first, the device idles while the host then prepares the update. torch's fused kernels take a tensor
that says whether to leave the update out, as for torch.amp.GradScaler. So the whole step is
queued, and the host waits once, at its end.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from bigtrain.optim.partitioned import PartitionedUpdate
from bigtrain.optim.update import Update, WholeUpdate


def can_hold_back(update: Update) -> bool:
    """Whether a tensor on the device can keep an update from being made.

    The optimizer has to be one of torch's fused ones, on parameters that it does not copy to the
    host or to a disk.
    """
    in_place = type(update) is WholeUpdate or (
        isinstance(update, PartitionedUpdate) and update.stays_on_device
    )
    optimizer = update.optimizer
    return (
        in_place
        and bool(getattr(optimizer, "_step_supports_amp_scaling", False))
        and all(group.get("fused") for group in optimizer.param_groups)
    )


@contextmanager
def held_back_by(optimizer: torch.optim.Optimizer, not_finite: Tensor) -> Iterator[None]:
    """Let the optimizer's steps in a `with` block change nothing if `not_finite` is 1.

    Args:
        optimizer: an optimizer of an update that `can_hold_back`.
        not_finite: 0-dim, fp32, 0 or 1, on the device of the parameters.
    """
    optimizer.found_inf = not_finite  # type: ignore[attr-defined]
    try:
        yield
    finally:
        del optimizer.found_inf  # type: ignore[attr-defined]
