"""Bytes that a save needs in addition to the state, derived from the parts that each rank holds.

The rounds are those of `FileWriting`; bytes are added up instead of moved:

    pieces written    min(3, pieces of its files so far) * min(16 MiB, its largest file)
    leaving           bytes that the rank sends to other writers, in the largest round
    snapshot          asynchronous only: all bytes that the rank contributes; reused by each save
    arriving          bytes of the rank's own piece that others send, in the largest round
    made              tensors to assemble before they are read: from a disk, or from several pieces

Ranks of one host share the memory of `leaving` and `arriving`. Neither is counted then, as a
tracker sees no storage of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bigtrain.checkpoint.layout import PIECE_BYTES, Held, TensorFile, checkpoint_files, plan_entries
from bigtrain.checkpoint.messages import Round
from bigtrain.checkpoint.write import (
    BUFFERS,
    buffer_bytes,
    first_taken,
    given_bytes,
    rounds_of,
)
from bigtrain.job.schema import CheckpointConfig


@dataclass(frozen=True)
class SaveBytes:
    """The peaks of the bytes that one rank needs for a save in addition to the state."""

    waiting: int
    """Bytes while training waits for the save. All but `made` are on the host."""
    beside: int = 0
    """Bytes on the host while a thread writes and training continues."""
    made: int = 0
    """Bytes of `waiting` that are on the state's device: tensors assembled to be read."""


@dataclass(frozen=True)
class Making:
    """Bytes of a tensor that one rank has to assemble before it can read the tensor."""

    kept: int
    """Bytes of the assembled tensor, while its pieces are sent and written."""
    passing: int = 0
    """Further bytes during the assembly."""


def files_of(held_by_rank: Sequence[Mapping[str, Held]]) -> list[TensorFile]:
    """Return a checkpoint's files for the ranks' tensors, if all ranks see the same folder."""
    return checkpoint_files(plan_entries(held_by_rank, range(len(held_by_rank))))


def forecast_save(
    files: Sequence[TensorFile],
    rank: int,
    made: Mapping[str, Making],
    *,
    one_host: bool = False,
    asynchronous: bool = False,
    most_bytes: int | None = None,
) -> SaveBytes:
    """Return the peaks of the bytes that one rank needs in addition to the state.

    Args:
        files: the files of all ranks.
        rank: the rank to forecast.
        made: by name, the bytes of the tensors that this rank has to assemble.
        one_host: whether all ranks are on one host.
        asynchronous: whether training continues during the save.
        most_bytes: see `FileWriting.take`.
    """
    rounds = rounds_of(files)
    shares = [_Share.of(save_round, rank) for save_round in rounds]
    count = len(rounds)
    taken = count
    if asynchronous:
        taken = 0 if most_bytes is None else first_taken(rounds, most_bytes)
    size, buffers = buffer_bytes(files, rank), 0
    snapshot = sum(share.sent + share.own for share in shares[taken:])
    looked: frozenset[str] = frozenset()
    waiting = most_made = 0
    leaving = arriving = 0
    for share in shares[:taken]:
        giving, after = _made(made, looked, share.names)
        leaving = max(leaving, 0 if one_host else share.sent)
        waiting = max(waiting, buffers + leaving + arriving + giving)
        buffers = min(BUFFERS * size, buffers + size * share.writes)
        arriving = max(arriving, 0 if one_host else share.arriving)
        waiting = max(waiting, buffers + leaving + arriving + after)
        most_made, looked = max(most_made, giving), share.names
    for share in shares[taken:]:
        giving, _ = _made(made, looked, share.names)
        waiting = max(waiting, buffers + giving)
        most_made, looked = max(most_made, giving), share.names
    snapshot_peak = buffers
    for share in shares[taken:]:
        buffers = min(BUFFERS * size, buffers + size * share.writes)
    if taken < count:
        last = max(share.arriving for share in shares[taken:])
        snapshot_peak = buffers + (0 if one_host else last)
    waiting, snapshot_peak = waiting + snapshot, snapshot + snapshot_peak if snapshot else 0
    return SaveBytes(waiting, snapshot_peak, most_made)


def estimate_save(
    part_bytes: Sequence[int],
    largest: int,
    config: CheckpointConfig,
    *,
    ranks: int,
    shards: int,
    one_host: bool,
) -> SaveBytes:
    """Estimate the bytes of a save from sizes alone, fast enough for the planner's many plans.

    Args:
        part_bytes: bytes of the model's tensors and of the optimizer's, as these ranks save them.
        largest: bytes of the largest tensor, which one rank writes.
        config: the job's checkpoint section.
        ranks: number of ranks that share the writing.
        shards: number of shards of each tensor; 1 if ranks hold whole tensors or flat slices of
            many tensors.
        one_host: whether all ranks are on one host.
    """
    shares = [max(-(-size // ranks), min(size, largest)) for size in part_bytes if size]
    size = min(PIECE_BYTES, max(shares, default=0))
    pieces = sum(-(-share // PIECE_BYTES) for share in shares)
    messages = 0 if one_host else 2 * size * (shards - 1) // shards
    waiting = min(BUFFERS, pieces) * size + messages
    if not config.asynchronous:
        return SaveBytes(waiting)
    most = config.snapshot_bytes
    snapshot = -(-sum(part_bytes) // shards) if shards > 1 else sum(shares)
    snapshot = snapshot if most is None else min(most, snapshot)
    return SaveBytes(waiting + snapshot, waiting + snapshot)


@dataclass(frozen=True)
class _Share:
    """A rank's part in one round."""

    sent: int
    """Bytes that the rank sends to other ranks."""
    own: int
    """Bytes that the rank puts in its own piece."""
    arriving: int
    """Bytes that other ranks send for its piece."""
    writes: bool
    """Whether the rank assembles a piece."""
    names: frozenset[str]
    """Names of the tensors that the rank reads."""

    @classmethod
    def of(cls, save_round: Round, rank: int) -> _Share:
        sent, own_bytes = given_bytes(save_round, rank)
        arriving = 0
        names: set[str] = set()
        for owner, (file, piece) in save_round.items():
            for source, parts in file.parts(piece).items():
                if source == rank:
                    names |= {part.entry.name for part in parts}
                elif owner == rank:
                    arriving += sum(part.extent.size for part in parts)
        return cls(sent, own_bytes, arriving, rank in save_round, frozenset(names))


def _made(
    made: Mapping[str, Making], before: frozenset[str], names: frozenset[str]
) -> tuple[int, int]:
    """Return the bytes of assembled tensors during the assembly for a round, and after it.

    The tensors of the previous round are released only after the assembly.
    """
    if not made:
        return 0, 0
    new = sum(made[name].kept for name in names - before if name in made)
    passing = max((made[name].passing for name in names - before if name in made), default=0)
    old = sum(made[name].kept for name in before if name in made)
    after = sum(made[name].kept for name in names if name in made)
    return old + new + passing, after
