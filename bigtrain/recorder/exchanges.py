"""The exchanges of this rank: what torch has recorded of them, and the messages of a pipeline.

torch records collectives of gloo and NCCL in C++ by itself (its Flight Recorder), those of DDP's
reducer and of `fully_shard` included. Sends and receives of gloo it leaves out, so a hook on the
pipeline's group writes them into the ring. Where an older torch has no hooks, the
stages' messages are noted as they are begun; of others a page shows stacks alone.
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
_HOOK_ID = 0x62_74  # one of ours on a group; others may have theirs


def read_exchanges() -> list[dict[str, Any]]:
    """The exchanges that torch has recorded in this process, the oldest first.

    Without their stacks: torch takes two seconds to put the first one into words.

    Returns:
        kind, bytes, group (its name in torch), ranks, number (of the group's collectives, from 1),
        message (a send or a receive), age_s, timeout_s, done.
    """
    found: list[dict[str, Any]] = []
    groups = _groups()
    for dump in _dumps():
        recorded = pickle.loads(dump(includeCollectives=True, includeStackTraces=False))
        entries = recorded.get("entries", ())
        over = _grouped_messages(entries)
        found += [_described(entry, groups, over) for entry in entries[-_RECENT:]]
    found.sort(key=lambda exchange: -float(exchange["age_s"]))
    return found[-_RECENT:]


def start_recording() -> None:
    """Forget what an earlier process group of this process has exchanged."""
    reset = getattr(torch._C._distributed_c10d, "_reset_fr_trace", None)
    if reset is not None:
        reset()


def watch_messages(group: dist.ProcessGroup | None, recorder: FlightRecorder) -> None:
    """Write the sends and receives of a group into the ring as they begin."""
    if group is None or not COUNTS_EXCHANGES:
        return
    members = dist.get_process_group_ranks(group)

    def begins(call: Any) -> None:
        kind = call.name.name
        if kind in ("SEND", "RECV"):
            tensors = call.input_tensors or call.output_tensors
            size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
            way = "send to" if kind == "SEND" else "receive from"
            recorder.note(f"{way} rank {members[call.root]}, {size} bytes")

    group.register_pre_hook(_HOOK_ID, begins)


def note_message(
    recorder: FlightRecorder, way: Literal["send to", "receive from"], rank: int, tensor: Tensor
) -> None:
    """Write a message of ours into the ring, where no hook does."""
    if not COUNTS_EXCHANGES:
        recorder.note(f"{way} rank {rank}, {tensor.numel() * tensor.element_size()} bytes")


def _dumps() -> list[Any]:
    """The recorders that this torch has: of gloo, and of NCCL where a group is on it."""
    own = torch._C._distributed_c10d
    dumps = [getattr(own, "_dump_fr_trace", None)]
    if in_use():
        dumps.append(getattr(own, "_dump_nccl_trace", None))
    return [dump for dump in dumps if dump is not None]


def _groups() -> dict[str, tuple[str, list[int]]]:
    """Of each group's name in torch what it is for, and its ranks."""
    world = dist.distributed_c10d._world
    found: dict[str, tuple[str, list[int]]] = {}
    for group, name in list(world.pg_names.items()):
        places = world.pg_group_ranks.get(group, {})
        found[name] = group.group_desc, sorted(places, key=places.__getitem__)
    return found


def _is_over(entry: Mapping[str, Any]) -> bool:
    return bool(entry["retired"]) or entry["state"] == "completed"


def _grouped_messages(entries: Sequence[Mapping[str, Any]]) -> dict[tuple[str, int], bool]:
    """Of messages that began together whether they are over: by their group, and their number.

    NCCL's record of one of them stays as it was scheduled. What ends is an entry of all of them,
    which has the number of each.
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
"""Bytes of a number by torch's name of its type; all others have 4."""
