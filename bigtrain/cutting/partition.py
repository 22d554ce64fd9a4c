"""Partition layers into stages so that the slowest stage is fastest, and all stages fit.

The partition is found by dynamic programming over (stage, last layer), as in PipeDream (Narayanan
et al., SOSP 2019, section 3.1), with one stage on each device, and the memory of each stage as a
constraint.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from bigtrain.cutting.partition_tables import (
    TIE_TOLERANCE,
    Floats,
    LayerCosts,
    Partition,
    Tables,
    backtrack_cuts,
    exact_partition,
    lowest_starts,
    make_tables,
    partition_at,
    sweep_stages,
)
from bigtrain.errors import ConfigError
from bigtrain.units import format_bytes

__all__ = ["LayerCosts", "Partition", "partition"]


def partition(
    layers: LayerCosts,
    stages: int,
    *,
    bandwidth: float,
    state_factor: float,
    in_flight: Sequence[int],
    memory: Sequence[int] | None,
    devices: Sequence[int] | None = None,
) -> Partition:
    """Find the partition whose slowest stage is fastest among the partitions that fit the memory.

    The seconds of a stage are those of its layers and of its messages: activations that it sends to
    the next stage, and gradients of the same size that it sends to the previous stage. The bytes of
    a stage are `state_factor` times its parameters plus `in_flight` times its saved tensors. A
    tensor counts once in each stage that uses it. Among equally fast partitions, the most even
    stages are chosen (the least sum of squares of seconds), then the fewest bytes over all cuts.

    With several stages on a device, the slowest stage is minimised as well, and the stages of a
    device have to fit together. First the best partition is found in which each stage alone may use
    the whole memory. If the stages of that partition fit together, it is optimal
    (`Partition.proven`). Otherwise the memory of a device is divided among its stages in many ways,
    and the best partition is found for each division. The result then fits, but may not be the
    best.

    Args:
        layers: the costs of the layers.
        stages: the number of stages.
        bandwidth: bytes per second from one stage to the next; may be infinite.
        state_factor: resident bytes (parameters, gradients, optimizer state) for each byte of
            parameters.
        in_flight: the most micro-batches in flight on each stage.
        memory: for each stage the bytes of its device, which all stages of the device share; None
            for no limit.
        devices: the rank of each stage; None for one stage on each rank.

    Raises:
        ConfigError: there are more stages than layers, or no partition fits the memory. With
            several stages on a device, only some partitions are tried.
        ValueError: a sequence does not have one entry for each stage.
    """
    n = len(layers.seconds)
    per_stage = {"in_flight": in_flight, "memory": memory, "devices": devices}
    for name, values in per_stage.items():
        if values is not None and len(values) != stages:
            raise ValueError(f"{name} has {len(values)} entries for {stages} stages")
    if stages > n:
        raise ConfigError(
            f"strategy.cut: {stages} stages, and the model can be cut at {n - 1} places: at most "
            f"{n} stages. Use mesh.pp={n}, or fewer stages on each rank."
        )
    tables = make_tables(layers, bandwidth, state_factor, in_flight)
    if memory is None:
        memory = [2**62] * stages
    groups: dict[int, list[int]] = {}
    for stage, device in enumerate(devices or range(stages)):
        groups.setdefault(device, []).append(stage)
    limits = list(memory)
    for group in groups.values():
        for stage in group:
            limits[stage] = min(memory[member] for member in group)
    best = exact_partition(tables, limits)
    if best is None:
        raise _too_small(tables, limits)
    if len(groups) == stages or _fullest(best, groups, limits)[0] <= 1.0:
        return best
    return _share(tables, limits, groups, best.slowest)


def _fullest(
    candidate: Partition, groups: dict[int, list[int]], limits: Sequence[int]
) -> tuple[float, int]:
    """Return the share of its memory that the fullest device needs, and the device."""
    stage_bytes = {d: sum(candidate.bytes[s] for s in group) for d, group in groups.items()}
    return max(
        (stage_bytes[d] / limits[group[0]] if limits[group[0]] > 0 else math.inf, d)
        for d, group in groups.items()
    )


def _too_small(tables: Tables, limits: Sequence[int]) -> ConfigError:
    """Return the error that nothing fits, with the fullest stage of the roomiest partition."""
    roomiest = _roomiest(tables, limits)
    shares = [nbytes / max(1, limit) for nbytes, limit in zip(roomiest.bytes, limits, strict=True)]
    stage = int(np.argmax(shares))
    return _refusal(tables.stages, f"stage {stage}", roomiest.bytes[stage], limits[stage])


def _roomiest(tables: Tables, limits: Sequence[int]) -> Partition:
    """Return the partition whose fullest stage needs the least share of its memory."""
    lows = lowest_starts(tables, [None] * tables.stages)

    def full(stage: int, rows: slice, columns: slice) -> Floats:
        share = tables.bytes(stage, rows, columns) / max(1, limits[stage])
        return np.where(np.isfinite(tables.seconds[rows, columns]), share, math.inf)

    values = sweep_stages(tables, lows, full, np.maximum)
    return partition_at(tables, backtrack_cuts(tables, lows, full, np.maximum, values))


def _refusal(stages: int, where: str, needed: int, limit: int) -> ConfigError:
    return ConfigError(
        f"strategy.cut: no cut into {stages} stages fits the memory: at best {where} needs "
        f"{needed} bytes ({format_bytes(needed)}) and has {limit} ({format_bytes(limit)}). Use a "
        "larger mesh.pp, or a smaller train.micro_batch_size."
    )


def _share(
    tables: Tables, limits: Sequence[int], groups: dict[int, list[int]], fastest: float
) -> Partition:
    """Return the fastest partition found that fits, with several stages on a device.

    `fastest` is a lower bound of the seconds of the slowest stage. For each division of a device's
    memory among its stages, the best partition is found exactly. Divisions are drawn around the
    division of the best partition so far, with a fixed seed, for about a second.
    """
    generator = np.random.default_rng(0)
    best: tuple[tuple[float, float], Partition] | None = None
    stage_limits = [limits[stage] for stage in range(tables.stages)]
    for device_stages in groups.values():
        for stage in device_stages:
            stage_limits[stage] = limits[stage] // len(device_stages)
    tries = min(max(10**9 // (tables.stages * tables.n**2), 8), 160)
    for number in range(tries):
        candidate = exact_partition(tables, stage_limits) or _roomiest(tables, stage_limits)
        if _fullest(candidate, groups, limits)[0] <= 1.0:
            candidate = partition_at(tables, _moved(tables, candidate, limits, groups))
        key = max(1.0, _fullest(candidate, groups, limits)[0]), candidate.slowest
        if best is None or key < best[0]:
            best = key, candidate
        if best[0] <= (1.0, fastest * (1 + TIE_TOLERANCE)):
            break
        spread = (0.0, 0.1, 0.3, 1.0)[(number + 1) % 4]
        stage_limits = _divided_limits(
            best[1], limits, groups, np.exp(generator.normal(size=tables.stages) * spread)
        )
    if best is None:
        raise ValueError("there are no stages")
    candidate = best[1]
    full, device = _fullest(candidate, groups, limits)
    if full > 1.0:
        needed = sum(candidate.bytes[stage] for stage in groups[device])
        where = f"rank {device} with its {len(groups[device])} stages"
        raise _refusal(tables.stages, where, needed, limits[groups[device][0]])
    return replace(candidate, proven=candidate.slowest <= fastest * (1 + TIE_TOLERANCE))


def _divided_limits(
    candidate: Partition, limits: Sequence[int], groups: dict[int, list[int]], factors: Floats
) -> list[int]:
    """Divide each device's memory among its stages in proportion to their needs times factors."""
    stage_limits = list(limits)
    for group in groups.values():
        free = max(0, limits[group[0]] - sum(candidate.bytes[stage] for stage in group))
        weights = [(candidate.bytes[s] + free / len(group) + 1) * factors[s] for s in group]
        for stage, weight in zip(group, weights, strict=True):
            stage_limits[stage] = int(limits[stage] * (weight / sum(weights)) * (1 + 1e-12))
    return stage_limits


def _moved(
    tables: Tables, candidate: Partition, limits: Sequence[int], groups: dict[int, list[int]]
) -> tuple[int, ...]:
    """Return the cuts after moving single cuts while the slower of two adjacent stages improves."""
    ends = [0, *candidate.cuts, tables.n]
    stage_bytes = list(candidate.bytes)
    group_of = {stage: group for group in groups.values() for stage in group}
    improved = True
    while improved:
        improved = False
        for right in range(1, tables.stages):
            left = right - 1
            positions = np.arange(ends[left] + 1, ends[right + 1])
            slower = np.maximum(
                tables.seconds[positions, ends[left]], tables.seconds[ends[right + 1], positions]
            )
            current = slower[ends[right] - positions[0]]
            new_left = tables.bytes(left, positions, ends[left])
            new_right = tables.bytes(right, ends[right + 1], positions)
            more_left, more_right = new_left - stage_bytes[left], new_right - stage_bytes[right]
            used_left = sum(stage_bytes[stage] for stage in group_of[left])
            used_right = sum(stage_bytes[stage] for stage in group_of[right])
            if group_of[left] is group_of[right]:
                more_left = more_right = more_left + more_right
            fits = (used_left + more_left <= limits[left]) & (
                used_right + more_right <= limits[right]
            )
            slower[~fits] = math.inf
            best = int(np.argmin(slower))
            if slower[best] < current * (1 - TIE_TOLERANCE):
                ends[right] = int(positions[best])
                stage_bytes[left], stage_bytes[right] = int(new_left[best]), int(new_right[best])
                improved = True
    return tuple(ends[1:-1])
