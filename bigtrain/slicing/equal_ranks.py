"""What several ranks hold whole is the same on all of them, bit for bit: looked at before a save.

Ranks that hold slices of the same layers compute with tensors of which each has all: norms, biases
of sums, what could not be sliced. Nothing is sent to keep these equal. They stay so because all
ranks do the same with the same numbers, random ones included.
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
"""Of a hash that a float64 holds."""


def check_equal_ranks(state: Mapping[str, StateTensor], context: RunContext, step: int) -> None:
    """Refuse a state of which the ranks of a tp group hold different values. Collective.

    Args:
        state: as this rank holds it; what lies in slices is left out.
        context: of all ranks.
        step: optimizer steps done.

    Raises:
        UnequalRanksError: the same on all ranks.
    """
    if context.tp_size == 1:
        return
    own = {name: digest(t) for name, t in state.items() if not t.in_slices}
    own[_RANDOM] = _combined(_stream())
    together = int(_combined(f"{n} {own[n]}" for n in sorted(own))[:_EXACT_DIGITS], 16)
    sums = context.all_gather_numbers(together)
    groups = [
        range(first, first + context.tp_size)
        for first in range(0, context.world_size, context.tp_size)
    ]
    if all(len({sums[rank] for rank in group}) == 1 for group in groups):
        return
    raise UnequalRanksError(_message(context.all_gather_objects(own), groups, step))


def digest(tensor: StateTensor) -> str:
    """A hash of what a rank holds of a tensor; a piece at a time of one on a device."""
    values = tensor.values().contiguous().view(torch.uint8)
    return _combined(hash_piece(memoryview(p.cpu().numpy())) for p in _pieces(values))  # type: ignore[arg-type]


def _pieces(values: Tensor) -> Iterable[Tensor]:
    on_host = values.device.type == "cpu" or not len(values)
    return (values,) if on_host else torch.split(values, PIECE_BYTES)


def _combined(parts: Iterable[str]) -> str:
    return hash_piece("\n".join(parts).encode())


def _stream() -> Iterable[str]:
    """Hashes of torch's generators, of which the ranks of a group have the same."""
    states = [torch.get_rng_state()]
    if kind := devices.accelerator():
        states.append(devices.generator_states(kind)[torch.accelerator.current_device_index()])
    return (hash_piece(state.numpy().tobytes()) for state in states)


def _message(
    everyone: Sequence[Mapping[str, str]], groups: Sequence[Sequence[int]], step: int
) -> str:
    found: dict[str, tuple[int, list[int]]] = {}
    for group in groups:
        first = everyone[group[0]]
        for name in dict.fromkeys(name for rank in group for name in everyone[rank]):
            others = [rank for rank in group if everyone[rank].get(name) != first.get(name)]
            if others:
                found.setdefault(name, (group[0], others))
    name, (one, others) = next(iter(found.items()))
    ranks = f"rank {others[0]}" if len(others) == 1 else f"ranks {', '.join(map(str, others))}"
    more = f", and so are {len(found) - 1} other tensors" if len(found) > 1 else ""
    return (
        f"step {step}: {name} is not the same on {ranks} as on rank {one} of the same mesh.tp group"
        f"{more}. Each of them holds it whole and has to compute the same, so no checkpoint was "
        "written. Go on from the last one with --resume auto train.deterministic=true; if it comes "
        "again, a module draws random numbers of its own or does something else on each rank: "
        "let it use torch's."
    )
