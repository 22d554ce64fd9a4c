"""The exchanges of this rank: torch's record of collectives, and the messages between ranks.

torch records the collectives of gloo and NCCL in C++ (its Flight Recorder), including those of
DDP's reducer and of `fully_shard`. It does not record the sends and receives of gloo. So
`watch_messages` puts a hook on the group of a pipeline or of a parameter server, and the hook adds
these messages to the events of bigtrain's `FlightRecorder`. Versions of torch without such hooks
need `note_message`, with which pipeline stages record their messages when they begin. Messages of a
parameter server are then not recorded: the page on a run that hangs or has died (`recorder.page`)
shows only the stacks of the ranks.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from bigtrain.devices import in_use
from bigtrain.recorder.ring import FlightRecorder
from bigtrain.versions.torch_versions import COUNTS_EXCHANGES

_RECENT = 40
_HOOK_ID = 0x62_74  # torch identifies the hooks of a group by numbers


def read_exchanges() -> list[dict[str, Any]]:
    """Return the last `_RECENT` exchanges that torch has recorded, the oldest first.

    The stacks of the exchanges are left out, because torch takes two seconds to format the first.

    Returns:
        A dict for each exchange with the keys kind ("all_reduce", "send", ...), bytes, group (the
        name of the process group in torch), group_for (the group's purpose), ranks (of the group),
        number (of the exchange among the group's collectives or messages, from 1), message
        (whether the exchange is a send or a receive), begun (seconds since 1970), age_s (seconds
        since then), timeout_s (seconds) and done.
    """
    exchanges: list[dict[str, Any]] = []
    groups = _groups()
    for dump in _dumps():
        recorded = pickle.loads(dump(includeCollectives=True, includeStackTraces=False))
        entries = recorded.get("entries", ())
        over = _grouped_messages(entries)
        exchanges += [_described(entry, groups, over) for entry in entries[-_RECENT:]]
    exchanges.sort(key=lambda exchange: -float(exchange["age_s"]))
    return exchanges[-_RECENT:]


def start_recording() -> None:
    """Clear torch's record of the exchanges of an earlier process group."""
    reset = getattr(torch._C._distributed_c10d, "_reset_fr_trace", None)
    if reset is not None:
        reset()


def watch_messages(group: dist.ProcessGroup | None, recorder: FlightRecorder) -> None:
    """Record the sends and receives of a group when they begin.

    Does nothing if the group is None or if this version of torch has no hooks on groups.
    """
    if group is None or not COUNTS_EXCHANGES:
        return
    members = dist.get_process_group_ranks(group)

    def begins(call: Any) -> None:
        kind = call.name.name
        if kind in ("SEND", "RECV"):
            tensors = call.input_tensors or call.output_tensors
            size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
            direction = "send to" if kind == "SEND" else "receive from"
            recorder.note(f"{direction} rank {members[call.root]}, {size} bytes")

    group.register_pre_hook(_HOOK_ID, begins)


def note_message(
    recorder: FlightRecorder,
    direction: Literal["send to", "receive from"],
    rank: int,
    tensor: Tensor,
) -> None:
    """Record a message that a pipeline sends or receives, if torch has no hooks on groups.

    Args:
        recorder: this rank's recorder.
        direction: whether this rank sends or receives.
        rank: the other rank.
        tensor: the message.
    """
    if not COUNTS_EXCHANGES:
        recorder.note(f"{direction} rank {rank}, {tensor.numel() * tensor.element_size()} bytes")


def _dumps() -> list[Any]:
    """Return torch's functions that read the records of gloo, and of NCCL if a GPU is in use."""
    bindings = torch._C._distributed_c10d
    dumps = [getattr(bindings, "_dump_fr_trace", None)]
    if in_use():
        dumps.append(getattr(bindings, "_dump_nccl_trace", None))
    return [dump for dump in dumps if dump is not None]


def _groups() -> dict[str, tuple[str, list[int]]]:
    """Return the purpose and the ranks of each process group by the group's name in torch."""
    world = dist.distributed_c10d._world
    groups: dict[str, tuple[str, list[int]]] = {}
    for group, name in list(world.pg_names.items()):
        group_ranks = world.pg_group_ranks.get(group, {})
        groups[name] = group.group_desc, sorted(group_ranks, key=group_ranks.__getitem__)
    return groups


def _is_over(entry: Mapping[str, Any]) -> bool:
    return bool(entry["retired"]) or entry["state"] == "completed"


def _grouped_messages(entries: Sequence[Mapping[str, Any]]) -> dict[tuple[str, int], bool]:
    """Return whether messages that began together are done, by their group and their number.

    NCCL's entries for the single messages remain "scheduled". Only their common entry is marked as
    done; it has the same number as the single entries.
    """
    return {
        (entry["process_group"][0], entry["p2p_seq_id"]): _is_over(entry)
        for entry in entries
        if entry["profiling_name"].endswith(":coalesced")
    }


def _described(
    entry: dict[str, Any],
    groups: dict[str, tuple[str, list[int]]],
    grouped: Mapping[tuple[str, int], bool],
) -> dict[str, Any]:
    name = entry["process_group"][0]
    desc, ranks = groups.get(name, (entry["process_group"][1], []))
    message = bool(entry.get("is_p2p"))
    return {
        "kind": entry["profiling_name"].partition(":")[2].partition(" ")[0],
        "bytes": max(_bytes(entry, "input"), _bytes(entry, "output")),
        "group": name,
        "group_for": desc,
        "ranks": ranks,
        "number": entry["p2p_seq_id"] if message else entry["collective_seq_id"],
        "message": message,
        "begun": entry["time_created_ns"] / 1e9,
        "age_s": round(time.time() - entry["time_created_ns"] / 1e9, 3),
        "timeout_s": entry["timeout_ms"] / 1000,
        "done": _is_over(entry) or (message and grouped.get((name, entry["p2p_seq_id"]), False)),
    }


def _bytes(entry: dict[str, Any], side: str) -> int:
    shapes, kinds = entry[f"{side}_sizes"], entry[f"{side}_dtypes"]
    return sum(prod(shape) * _ITEM.get(kind, 4) for shape, kind in zip(shapes, kinds, strict=False))


_ITEM = {
    **dict.fromkeys(("Double", "Long", "ComplexFloat"), 8),
    **dict.fromkeys(("Half", "BFloat16", "Short"), 2),
    **dict.fromkeys(("Byte", "Char", "Bool", "Float8_e4m3fn", "Float8_e5m2"), 1),
}
"""Bytes of an element by torch's name of its type; elements of other types have 4 bytes."""
