"""Check before a save that whole tensors are equal, bit for bit, on all ranks of a tp group.

The ranks that hold slices of the same layers also hold whole tensors: norm weights, biases after
row-parallel layers, whatever could not be sliced. No exchange keeps these equal. They stay equal
because all ranks do the same operations on the same numbers, random numbers included.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from bigtrain import devices
from bigtrain.checkpoint.layout import PIECE_BYTES
from bigtrain.checkpoint.manifest import hash_piece
from bigtrain.errors import UnequalRanksError
from bigtrain.ranks.context import RunContext
from bigtrain.tensors.shards import StateTensor

_RANDOM = "the stream of random numbers"
_EXACT_DIGITS = 12
"""Hexadecimal digits of a hash that a float64 represents exactly."""


def check_equal_ranks(state: Mapping[str, StateTensor], context: RunContext, step: int) -> None:
    """Refuse a state whose whole tensors differ between the ranks of a tp group. Collective.

    Args:
        state: this rank's state; sliced tensors are skipped.
        context: the context of all ranks.
        step: optimizer steps done.

    Raises:
        UnequalRanksError: on all ranks, with the same message.
    """
    if context.tp_size == 1:
        return
    hashes = {name: digest(t) for name, t in state.items() if not t.in_slices}
    hashes[_RANDOM] = _combined(_stream())
    combined = int(_combined(f"{n} {hashes[n]}" for n in sorted(hashes))[:_EXACT_DIGITS], 16)
    sums = context.all_gather_numbers(combined)
    groups = [
        range(first, first + context.tp_size)
        for first in range(0, context.world_size, context.tp_size)
    ]
    if all(len({sums[rank] for rank in group}) == 1 for group in groups):
        return
    raise UnequalRanksError(_message(context.all_gather_objects(hashes), groups, step))


def digest(tensor: StateTensor) -> str:
    """Return a hash of this rank's values; a device's tensor is copied to the host in pieces."""
    values = tensor.values().contiguous().view(torch.uint8)
    return _combined(hash_piece(memoryview(piece.cpu().numpy())) for piece in _pieces(values))  # type: ignore[arg-type]


def _pieces(values: Tensor) -> Iterable[Tensor]:
    on_host = values.device.type == "cpu" or not len(values)
    return (values,) if on_host else torch.split(values, PIECE_BYTES)


def _combined(parts: Iterable[str]) -> str:
    return hash_piece("\n".join(parts).encode())


def _stream() -> Iterable[str]:
    """Return hashes of the states of torch's generators, which a tp group's ranks must share."""
    states = [torch.get_rng_state()]
    if kind := devices.accelerator():
        states.append(devices.generator_states(kind)[torch.accelerator.current_device_index()])
    return (hash_piece(state.numpy().tobytes()) for state in states)


def _message(
    everyone: Sequence[Mapping[str, str]], groups: Sequence[Sequence[int]], step: int
) -> str:
    unequal: dict[str, tuple[int, list[int]]] = {}
    for group in groups:
        first = everyone[group[0]]
        for name in dict.fromkeys(name for rank in group for name in everyone[rank]):
            others = [rank for rank in group if everyone[rank].get(name) != first.get(name)]
            if others:
                unequal.setdefault(name, (group[0], others))
    name, (first_rank, others) = next(iter(unequal.items()))
    ranks = f"rank {others[0]}" if len(others) == 1 else f"ranks {', '.join(map(str, others))}"
    more = f", and so are {len(unequal) - 1} other tensors" if len(unequal) > 1 else ""
    return (
        f"step {step}: {name} is not the same on {ranks} as on rank {first_rank} of the same "
        f"mesh.tp group{more}. Each of them holds it whole and must compute the same values, so no "
        "checkpoint was written. Resume from the last checkpoint with --resume auto "
        "train.deterministic=true; if it happens again, a module draws random numbers from its own "
        "generator or computes something else on each rank: let it use torch's generator."
    )
