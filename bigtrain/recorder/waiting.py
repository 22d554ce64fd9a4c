"""Find the exchange that each rank waits for, and the rank that the exchange waits for."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bigtrain.units import format_bytes

_MESSAGE = re.compile(r"(send to|receive from) rank (\d+), (\d+) bytes")
_WAITS_IN = (
    "/pipeline/transport.py",
    "/pipeline/tied_parameters.py",
    "/parameter_server/shards.py",
    "/parameter_server/server.py",
    "/parameter_server/inbox.py",
    "/recorder/root_exchange.py",
)
"""Source files that wait for messages. A rank whose stack ends there waits for the message that it
recorded last."""


_PURPOSES = {
    "barrier": "all ranks",
    "broadcast_object": "a value of rank 0",
    "mean_loss": "the loss",
    "norm": "the gradients' norm",
    "global_norm": "the gradients' norm",
    "average_gradients": "the gradients",
    "forward_backward": "the number of targets",
    "everyone": "the number of targets",
    "evaluate": "the validation figures",
    "save": "a checkpoint",
    "save_or_explain": "a checkpoint",
}
"""Descriptions of exchanged values, by the name of the function of bigtrain that exchanges them."""


@dataclass(frozen=True)
class Wait:
    """The exchange that one rank waits for."""

    rank: int
    """The rank that waits."""
    kind: str
    """The kind of exchange, such as 'all_reduce'; 'recv' or 'send' for a message. In shared memory
    ranks wait for each other by an exchange of one number; the kind is then that of the values."""
    purpose: str
    """A description of the exchanged values; empty if unknown."""
    block: str
    """The block in whose pass the exchange began; empty outside of passes."""
    size: int
    """The size of the exchange in bytes; 0 if it is not known, as in shared memory."""
    seconds: float
    """Seconds since the exchange began."""
    group: str
    """The name of the process group in torch; "messages" for a message that the recorder noted."""
    number: int
    """The number of the exchange among those of its group, from 1; 0 for a noted message."""
    peers: tuple[int, ...]
    """The other ranks of the exchange."""
    message: bool = False
    """Whether the exchange is a send or a receive."""
    timeout_s: float = 0.0
    """Seconds after which the backend aborts the exchange; 0 if unknown."""

    def words(self) -> str:
        """Describe the exchange: "the gradients at layers.7 (all_reduce, 12.6 MiB) for 30 s"."""
        purpose = self.purpose or "an exchange"
        if self.message:
            preposition = "from" if self.kind == "recv" else "to"
            purpose = f"a message {preposition} rank {self.peers[0]}"
        if self.block and (self.purpose or self.message):
            purpose += f" at {self.block}"
        seconds = f"{self.seconds:.1f}" if self.seconds < 1 else f"{self.seconds:.0f}"
        size = f", {format_bytes(self.size)}" if self.size else ""
        return f"{purpose} ({self.kind}{size}) for {seconds} s"


def known_waits(records: Mapping[int, dict[str, Any] | None]) -> dict[int, Wait]:
    """Return the exchange that each rank waits for, by rank; ranks that do not wait are left out.

    Args:
        records: the record of each rank, by rank; None for a rank that has not answered.
    """
    waits = {rank: wait_of(record) for rank, record in records.items() if record is not None}
    return {rank: wait for rank, wait in waits.items() if wait is not None}


def _in_exchange(record: dict[str, Any]) -> bool:
    calls = ("/torch/distributed/distributed_c10d.py:", "/ranks/context.py:")
    return any(call in line for line in record["stack"][-1:] for call in calls)


def wait_of(record: dict[str, Any]) -> Wait | None:
    """Return the oldest unfinished exchange in a rank's record; None if the rank does not wait.

    Unfinished sends are ignored. If torch has recorded no unfinished exchange, the result may be a
    message that the recorder noted.
    """
    exchanges = [e for e in record["exchanges"] if "kind" in e]
    active = [e for e in exchanges if not e["done"] and e["kind"] != "send"]
    if not active and exchanges and (record["error"] == "RuntimeError" or _in_exchange(record)):
        # The backend aborted the last exchange and marked it as done. The exchange's error was
        # raised or is about to be raised.
        last = exchanges[-1]
        active = [last] if last["age_s"] <= record["idle_s"] + 1 else []
    if not active:
        return _message(record)
    first = min(active, key=lambda e: e["begun"])
    kind, size, purpose = first["kind"], first["bytes"], _purpose(record["stack"])
    if any("/ranks/shared_buffers.py:" in line.replace("\\", "/") for line in record["stack"]):
        gathers = purpose != "the gradients"
        kind, size = f"{'all_gather' if gathers else 'reduce_scatter'} in shared memory", 0
    return Wait(
        rank=record["rank"],
        kind=kind,
        purpose=purpose,
        block=_block_at(record, first["begun"]),
        size=size,
        seconds=first["age_s"],
        group=first["group"],
        number=first["number"],
        peers=tuple(rank for rank in first["ranks"] if rank != record["rank"]),
        message=first["message"],
        timeout_s=first["timeout_s"],
    )


def _message(record: dict[str, Any]) -> Wait | None:
    """Return the message that was recorded last, if the main thread's stack ends in its wait."""
    if not record["events"] or not _is_waiting(record["stack"]):
        return None
    for event in reversed(record["events"]):
        match = _MESSAGE.fullmatch(event[2])
        if match is None:
            return None
        # Sends and receives begin together, and a rank waits for what it receives.
        if match[1] == "receive from" or event is record["events"][0]:
            return Wait(
                rank=record["rank"],
                kind="recv" if match[1] == "receive from" else "send",
                purpose="",
                block="",
                size=int(match[3]),
                seconds=record["idle_s"],
                group="messages",
                number=0,
                peers=(int(match[2]),),
                message=True,
            )
    return None


def _purpose(stack: list[str]) -> str:
    """Describe the exchanged values by the functions on the stack; empty if none is known."""
    calls = [line.replace("\\", "/") for line in reversed(stack)]
    names = {line.rpartition(" ")[2] for line in calls}
    for line in calls:
        if "/fsdp/_fully_shard/" in line:
            gradients = names & {
                "foreach_reduce",
                "post_backward",
                "_root_post_backward_final_callback",
            }
            return "the gradients" if gradients else "the weights"
        if "nn/modules/_functions.py" in line:
            return "the statistics of a batch"
        name = line.rpartition(" ")[2]
        if name == "_engine_run_backward":  # DDP's reducer is C++, so no Python stack shows it
            return "the gradients"
        if "/bigtrain/" in line and name in _PURPOSES:
            return _PURPOSES[name]
    return ""


def _is_waiting(stack: list[str]) -> bool:
    return any(source in line.replace("\\", "/") for line in stack[-2:] for source in _WAITS_IN)


def _block_at(record: dict[str, Any], moment: float) -> str:
    """Return the block that was computed when an exchange began; empty outside of passes."""
    block = ""
    for seconds, phase, event, _, _ in record["events"]:
        if seconds > moment:
            break
        block = event if phase in ("forward", "backward") and not _MESSAGE.fullmatch(event) else ""
    return block


def blamed(
    wait: Wait, waits: Mapping[int, Wait], records: Mapping[int, dict[str, Any] | None]
) -> int | None:
    """Return the rank that keeps an exchange from ending.

    A rank that has not begun the exchange may itself wait for another exchange. The chain of such
    waits is followed to its end.

    Args:
        wait: the exchange.
        waits: the exchange that each waiting rank waits for, by rank.
        records: the record of each rank, by rank; None for a rank that has not answered.

    Returns:
        The rank at the end of the chain; None if all ranks have begun the exchange, or if they wait
        for each other in a circle.
    """
    seen = {wait.rank}
    while True:
        absent = absent_ranks(wait, waits, records)
        if not absent:
            return None
        # A rank that does not answer, or does not wait itself, ends the chain.
        last = [rank for rank in absent if rank not in waits]
        if last:
            return min(last, key=lambda rank: (records.get(rank) is not None, rank))
        following = next((rank for rank in absent if rank not in seen), None)
        if following is None:
            return None
        seen.add(following)
        wait = waits[following]


def absent_ranks(
    wait: Wait, waits: Mapping[int, Wait], records: Mapping[int, dict[str, Any] | None]
) -> list[int]:
    """Return the other ranks of an exchange that are not known to have begun it.

    See `blamed` for the arguments.
    """
    return [rank for rank in wait.peers if not _has_come(rank, wait, waits, records)]


def _has_come(
    rank: int,
    wait: Wait,
    waits: Mapping[int, Wait],
    records: Mapping[int, dict[str, Any] | None],
) -> bool:
    record = records.get(rank)
    if record is None:
        return False
    if wait.message:  # messages have no numbers that both sides share
        return False
    their_wait = waits.get(rank)
    if (
        their_wait is not None
        and their_wait.group == wait.group
        and their_wait.number >= wait.number
    ):
        return True
    numbers = [
        e["number"]
        for e in record["exchanges"]
        if e.get("group") == wait.group and not e.get("message")
    ]
    return max(numbers, default=0) >= wait.number
