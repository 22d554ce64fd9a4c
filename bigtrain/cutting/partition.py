"""Where to cut a model: the contiguous partition whose slowest stage is fastest, and that fits.

Dynamic programming over (stage, last piece), as in PipeDream (Narayanan et al., SOSP 2019,
section 3.1), with one stage to a device, and each stage's memory as a constraint.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from bigtrain.cutting.partition_tables import (
    TIE_TOLERANCE,
    AtomicUnits,
    Floats,
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

__all__ = ["AtomicUnits", "Partition", "partition"]


def partition(
    pieces: AtomicUnits,
    stages: int,
    *,
    bandwidth: float,
    state_factor: float,
    in_flight: Sequence[int],
    memory: Sequence[int] | None,
    devices: Sequence[int] | None = None,
) -> Partition:
    """Find the partition whose slowest stage is fastest among those that fit.

    A stage's seconds are those of its pieces, and of what it sends: activations over its end,
    gradients of the same size over its start. Its bytes are `state_factor` times its parameters,
    and `in_flight` times what it saves; a tensor counts once in each stage that uses it. Ties go
    to the most even stages (the least sum of squares), then to the fewest bytes over all cuts.

    With several stages to a device the slowest stage is still what is minimised, and the sum of a
    device's stages must fit. The choice of cuts is exact where the best partition without sharing
    fits (`proven`); otherwise a device's memory is dealt to its stages in many ways, for each of
    which the choice is exact: what comes out fits, and may not be the best.

    Args:
        pieces: what there is to be cut.
        stages: how many stages.
        bandwidth: bytes per second from one stage to the next; may be infinite.
        state_factor: bytes held for each byte of parameters: with gradients and optimizer state.
        in_flight: for each stage, the most micro-batches whose saved tensors it holds at once.
        memory: bytes for each stage, or for all stages of its device together; None for no limit.
        devices: the rank of each stage; None for a rank to each.

    Raises:
        ConfigError: more stages than pieces, or nothing (with several stages to a device: nothing
            that was found) fits the memory.
        ValueError: a sequence does not have an entry for each stage.
    """
    n = len(pieces.seconds)
    per_stage = {"in_flight": in_flight, "memory": memory, "devices": devices}
    for name, values in per_stage.items():
        if values is not None and len(values) != stages:
            raise ValueError(f"{name} has {len(values)} entries for {stages} stages")
    if stages > n:
        raise ConfigError(
            f"strategy.cut: {stages} stages, and the model can be cut at {n - 1} places: at most "
            f"{n} stages. Use mesh.pp={n}, or fewer stages on each rank."
        )
    tables = make_tables(pieces, bandwidth, state_factor, in_flight)
    if memory is None:
        memory = [2**62] * stages
    groups: dict[int, list[int]] = {}
    for stage, device in enumerate(devices or range(stages)):
        groups.setdefault(device, []).append(stage)
    limits = list(memory)
    for group in groups.values():
        for stage in group:
            limits[stage] = min(memory[other] for other in group)
    best = exact_partition(tables, limits)
    if best is None:
        raise _too_small(tables, limits)
    if len(groups) == stages or _fullest(best, groups, limits)[0] <= 1.0:
        return best
    return _share(tables, limits, groups, best.slowest)


def _fullest(
    candidate: Partition, groups: dict[int, list[int]], limits: Sequence[int]
) -> tuple[float, int]:
    """How full the fullest device is (1 for just full), and which it is."""
    held_bytes = {d: sum(candidate.bytes[s] for s in group) for d, group in groups.items()}
    return max(
        (held_bytes[d] / limits[group[0]] if limits[group[0]] > 0 else math.inf, d)
        for d, group in groups.items()
    )


def _too_small(tables: Tables, limits: Sequence[int]) -> ConfigError:
    """What the roomiest partition needs where it is tightest."""
    roomiest = _roomiest(tables, limits)
    shares = [held / max(1, limit) for held, limit in zip(roomiest.bytes, limits, strict=True)]
    stage = int(np.argmax(shares))
    return _refusal(tables.stages, f"stage {stage}", roomiest.bytes[stage], limits[stage])


def _roomiest(tables: Tables, limits: Sequence[int]) -> Partition:
    """The partition whose fullest stage is least full."""
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
    """A partition whose devices fit, as fast as is found; none is faster than `fastest`.

    Once a device's memory is dealt to its stages, the rest is exact. The deals are drawn around
    that of the best partition so far, always the same ones; as many as a second or so allows.
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
        stage_limits = _rooms(
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


def _rooms(
    candidate: Partition, limits: Sequence[int], groups: dict[int, list[int]], factors: Floats
) -> list[int]:
    """A device's memory dealt to its stages: as a partition needs it, times a factor for each."""
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
    """The cuts after moving one at a time, as long as the slower of its two stages gets faster."""
    ends = [0, *candidate.cuts, tables.n]
    held_bytes = list(candidate.bytes)
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
            more_left, more_right = new_left - held_bytes[left], new_right - held_bytes[right]
            used_left = sum(held_bytes[stage] for stage in group_of[left])
            used_right = sum(held_bytes[stage] for stage in group_of[right])
            if group_of[left] is group_of[right]:
                more_left = more_right = more_left + more_right
            fits = (used_left + more_left <= limits[left]) & (
                used_right + more_right <= limits[right]
            )
            slower[~fits] = math.inf
            best = int(np.argmin(slower))
            if slower[best] < current * (1 - TIE_TOLERANCE):
                ends[right] = int(positions[best])
                held_bytes[left], held_bytes[right] = int(new_left[best]), int(new_right[best])
                improved = True
    return tuple(ends[1:-1])
