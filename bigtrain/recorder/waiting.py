"""Which rank waits for which exchange, and which rank it waits for."""

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
"""Sources that wait for messages: a stack that ends there, behind a message, waits for it."""


_PURPOSES = {
    "barrier": "all ranks",
    "broadcast_object": "rank 0's word",
    "mean_loss": "the loss",
    "norm": "the gradients' norm",
    "global_norm": "the gradients' norm",
    "average_gradients": "the gradients",
    "forward_backward": "the number of targets",
    "evaluate": "the validation figures",
    "save": "a checkpoint",
    "save_or_explain": "a checkpoint",
}
"""What functions of bigtrain exchange."""


@dataclass(frozen=True)
class Wait:
    """What one rank waits for."""

    rank: int
    kind: str
    """all_reduce and the like; `recv` and `send` of a message."""
    purpose: str
    block: str
    """Where the exchange began, in a pass through the model."""
    size: int
    """Bytes."""
    seconds: float
    group: str
    number: int
    """Of the group's collectives, from 1; 0 of a message."""
    peers: tuple[int, ...]
    """The ranks that take part, without this one."""
    message: bool = False
    timeout_s: float = 0.0
    """What the backend allows it; 0 where it does not say."""

    def words(self) -> str:
        """For example "the gradients at layers.7 (all_reduce, 12.6 MiB) for 30 s"."""
        purpose = self.purpose or "an exchange"
        if self.message:
            way = "from" if self.kind == "recv" else "to"
            purpose = f"a message {way} rank {self.peers[0]}"
        if self.block and (self.purpose or self.message):
            purpose += f" at {self.block}"
        seconds = f"{self.seconds:.1f}" if self.seconds < 1 else f"{self.seconds:.0f}"
        return f"{purpose} ({self.kind}, {format_bytes(self.size)}) for {seconds} s"


def known_waits(records: Mapping[int, dict[str, Any] | None]) -> dict[int, Wait]:
    """Of each rank that waits for an exchange the one that has not ended for longest."""
    found = {rank: own_wait(record) for rank, record in records.items() if record is not None}
    return {rank: wait for rank, wait in found.items() if wait is not None}


def _in_exchange(record: dict[str, Any]) -> bool:
    return any("/torch/distributed/distributed_c10d.py:" in line for line in record["stack"][-1:])


def own_wait(record: dict[str, Any]) -> Wait | None:
    """What a rank waits for, by its record."""
    exchanges = [e for e in record["exchanges"] if "kind" in e]
    active = [e for e in exchanges if not e["done"] and e["kind"] != "send"]
    if not active and exchanges and (record["error"] == "RuntimeError" or _in_exchange(record)):
        # The backend broke it off, and counts it as ended: the error is on its way, or has come.
        last = exchanges[-1]
        active = [last] if last["age_s"] <= record["idle_s"] + 1 else []
    if not active:
        return _message(record)
    first = min(active, key=lambda e: e["begun"])
    return Wait(
        rank=record["rank"],
        kind=first["kind"],
        purpose=_purpose(record["stack"]),
        block=_block_at(record, first["begun"]),
        size=first["bytes"],
        seconds=first["age_s"],
        group=first["group"],
        number=first["number"],
        peers=tuple(rank for rank in first["ranks"] if rank != record["rank"]),
        message=first["message"],
        timeout_s=first["timeout_s"],
    )


def _message(record: dict[str, Any]) -> Wait | None:
    """A send or a receive as the last event, where the main thread stands at its wait."""
    if not record["events"] or not _stands_at_a_wait(record["stack"]):
        return None
    for event in reversed(record["events"]):
        match = _MESSAGE.fullmatch(event[2])
        if match is None:
            return None
        # Messages are begun together: a rank waits for what it is to receive.
        if match[1] == "receive from" or event is record["events"][0]:
            kind = "recv"
            return Wait(
                rank=record["rank"],
                kind=kind,
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
    """What a rank waits for, as far as the calls tell that led there."""
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
        if name == "_engine_run_backward":  # DDP's reducer, which Python does not see
            return "the gradients"
        if "/bigtrain/" in line and name in _PURPOSES:
            return _PURPOSES[name]
    return ""


def _stands_at_a_wait(stack: list[str]) -> bool:
    return any(source in line.replace("\\", "/") for line in stack[-2:] for source in _WAITS_IN)


def _block_at(record: dict[str, Any], moment: float) -> str:
    """The block that was computed when an exchange began; nothing outside of the passes."""
    block = ""
    for seconds, phase, what, _, _ in record["events"]:
        if seconds > moment:
            break
        block = what if phase in ("forward", "backward") and not _MESSAGE.fullmatch(what) else ""
    return block


def blamed(
    wait: Wait, waits: Mapping[int, Wait], records: Mapping[int, dict[str, Any] | None]
) -> int | None:
    """The rank that an exchange waits for in the end; None where all have come, or in a circle.

    A rank that has not come may wait itself, for another one: it is followed.
    """
    seen = {wait.rank}
    while True:
        absent = [rank for rank in wait.peers if not _has_come(rank, wait, waits, records)]
        if not absent:
            return None
        # One that does not answer, or that does not wait itself, is the end of the chain.
        last = [rank for rank in absent if rank not in waits]
        if last:
            return min(last, key=lambda rank: (records.get(rank) is not None, rank))
        following = next((rank for rank in absent if rank not in seen), None)
        if following is None:
            return None
        seen.add(following)
        wait = waits[following]


def _has_come(
    rank: int,
    wait: Wait,
    waits: Mapping[int, Wait],
    records: Mapping[int, dict[str, Any] | None],
) -> bool:
    record = records.get(rank)
    if record is None:
        return False
    if wait.message:  # who sends, or waits for this rank in turn, is not told by numbers
        return False
    own = waits.get(rank)
    if own is not None and own.group == wait.group and own.number >= wait.number:
        return True
    numbers = [
        e["number"]
        for e in record["exchanges"]
        if e.get("group") == wait.group and not e.get("message")
    ]
    return max(numbers, default=0) >= wait.number
