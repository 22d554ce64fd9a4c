"""The seconds of ZeRO stage 3 as DeepSpeed ran it in April 2021, for figures of that year.

Narayanan et al. 2021 (arXiv 2104.04473, table 2 and figure 10) measured that code. Its exchanges
differ from those of `fully_shard` in five ways, which its source shows (deepspeedai/DeepSpeed at
35251023, `runtime/zero/partition_parameters.py` and `stage3.py`):

* Each weight is gathered alone: four all-gathers for a block, and not one.
* Python makes a list with one piece for each rank. The list form of `all_gather` then copies each
  piece out of one buffer, and `reduce_scatter` copies each piece into one. So a gather among 1,536
  ranks starts 1,536 copies.
* Before a module computes, the host waits for the whole GPU (`torch.cuda.synchronize`). Therefore
  the host's work does not overlap with the computation before it.
* One weight is gathered ahead, after that wait. The gather overlaps with one module, and not with a
  block.
* A reduction ends before the next module begins, for the same reason.

DeepSpeed changed all five in January 2022 (pull request 1453: batched calls, `*_base` collectives,
finer synchronization). The seconds are a closed form. Its constants are those of the cluster file
and the seconds of one iteration of the Python loop, which was timed. None is fitted to a figure.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from bigtrain.machine.cluster import Cluster, CommOp
from bigtrain.machine.collective_cost import collective_seconds

SLICE_SECONDS = 8.2e-6
"""Seconds of one iteration of the loop over ranks: `narrow`, `append` and `get_rank` of a group.
Timed with torch 2.14 on one core of an AMD EPYC, the processor of a DGX A100: the best of 20 loops
over 384 ranks."""


AT_SCALE = 0.34
"""The share of the links' bandwidth that the paper's own all-reduces among replicas reached: an
effective bisection bandwidth of 12.9 TB/s on 3,072 GPUs (section 5.9), where half of the 3,072
network cards of 25 GB/s carry 38.4."""


@dataclass(frozen=True)
class Weight:
    """A weight of a block."""

    share: float
    """Its share of the block's FLOPs."""
    nbytes: float
    """Its bytes in 16 bits."""


def weights_of(width: int) -> list[Weight]:
    """Return the weights of a GPT's block in the order of the forward pass.

    They are those of qkv, of attention's output, and two of the MLP. Smaller parameters persist on
    all ranks (`stage3_param_persistence_threshold`).
    """
    return [Weight(part / 12, 2.0 * part * width**2) for part in (3, 1, 4, 4)]


def step_seconds(
    layers: int,
    width: int,
    devices: int,
    compute: float,
    cluster: Cluster,
    *,
    bandwidth_share: float | None = None,
) -> dict[str, float]:
    """Return the seconds of a step of one micro-batch with recomputed blocks.

    Args:
        layers: the number of blocks.
        width: the width of the model.
        devices: the number of ranks, of which each has a shard of every weight.
        compute: the seconds of computing in a step: the forward pass, its repetition, and the
            backward pass, which takes as long as two forward passes.
        cluster: the cluster, with its links and the seconds to launch a kernel.
        bandwidth_share: the share of the bandwidth between nodes that exchanges reach, instead of
            the cluster's own.
    """
    if bandwidth_share is not None and cluster.between is not None:
        between = cluster.between.model_copy(update={"efficiency": bandwidth_share})
        cluster = cluster.model_copy(update={"between": between})
    weights, forward = weights_of(width), compute / 4 / layers
    once = _pass(weights, forward, devices, cluster, backward=False)
    # The last weight is still there after the recomputation: its next use is near enough.
    back = _pass(weights[::-1], 2 * forward, devices, cluster, backward=True)
    total = layers * (2 * once + back)
    return {"compute": compute, "exchange": total - compute, "total": total}


def _pass(
    weights: list[Weight], compute: float, devices: int, cluster: Cluster, *, backward: bool
) -> float:
    """Return the seconds of one pass through a block.

    While a module computes, the next weight is gathered. The last module gathers the first weight
    of the next block.
    """
    slices = devices * SLICE_SECONDS
    copies = devices * cluster.device.launch
    seconds = 0.0
    for module, following in pairwise([*weights, weights[0]]):
        gathered = not (backward and following is weights[0])
        gather = _exchange("all_gather", following, devices, cluster) if gathered else 0.0
        launching = slices + copies if gathered else 0.0
        # DeepSpeed computes each gathered weight's norm for a debug message, even if unprinted.
        seconds += module.nbytes / cluster.device.memory_bandwidth
        computing = module.share * compute
        if backward:  # the hook of the gradient runs while the GPU computes
            computing = max(computing, slices + copies)
        # The gather runs while the host starts copies of pieces, and while the GPU computes.
        seconds += max(launching + computing, slices * gathered + gather)
        if backward:
            # The gradient is copied to a bucket, and divided by the number of ranks.
            seconds += 4 * module.nbytes / cluster.device.memory_bandwidth
            seconds += _exchange("reduce_scatter", module, devices, cluster)
    return seconds


def _exchange(kind: CommOp, weight: Weight, devices: int, cluster: Cluster) -> float:
    """Return the seconds of an exchange and of the copies of its pieces on the GPU."""
    copied = 2 * weight.nbytes / cluster.device.memory_bandwidth
    return copied + collective_seconds(kind, weight.nbytes, devices, 1, cluster)
