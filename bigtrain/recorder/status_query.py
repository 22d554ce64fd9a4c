"""Asking all ranks where they are, from the hub's one thread, without waiting for any of them."""

from __future__ import annotations

import contextlib
import json
import math
import socket
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from bigtrain.errors import UnreadableError
from bigtrain.files.parse import as_object, parse_json
from bigtrain.recorder.page import Record

RECORDS_S = 2.0
"""A rank that has not sent its record by then does not answer: stopped, or in native code."""


@dataclass
class StatusQuery:
    """Ranks that were asked for their records, and what is done with the answers."""

    awaited: set[socket.socket]
    records: dict[int, Record]
    finish: Callable[[dict[int, Record]], None]
    until: float


@dataclass
class StatusQueries:
    """Those that are open."""

    open: list[StatusQuery] = field(default_factory=list)

    def begin(
        self,
        asked: Iterable[socket.socket],
        known: dict[int, Record],
        finish: Callable[[dict[int, Record]], None],
    ) -> None:
        """Wait for the records of these ranks, and call `finish` with them and the known ones."""
        self.open.append(StatusQuery(set(asked), known, finish, time.monotonic() + RECORDS_S))

    def answer(self, connection: socket.socket, rank: int, record: Record) -> None:
        """Take a record."""
        for inquiry in self.open:
            if connection in inquiry.awaited:
                inquiry.awaited.discard(connection)
                inquiry.records[rank] = record

    def give_up(self, connection: socket.socket) -> None:
        """Wait no longer for a rank that has left or is lost."""
        for inquiry in self.open:
            inquiry.awaited.discard(connection)

    def patience_s(self) -> float | None:
        """Seconds until one of them is over; None where none is open."""
        ends = [inquiry.until for inquiry in self.open]
        return max(0.0, min(ends) - time.monotonic()) if ends else None

    def finish_due(self) -> None:
        """Finish those that all have answered, or whose time is over."""
        for inquiry in list(self.open):
            if not inquiry.awaited or time.monotonic() >= inquiry.until:
                self.open.remove(inquiry)
                inquiry.finish(inquiry.records)


class StatusGather:
    """Which ranks still answer at all, whatever they do: a thread of each does.

    Silence is counted in rounds, not in seconds: Ctrl-Z stops those who ask, too.
    """

    def __init__(self) -> None:
        self._unanswered: dict[int, int] = {}
        self._last = -math.inf

    def call(self, ranks: Mapping[socket.socket, int], period_s: float) -> dict[int, int]:
        """Ask them whether they are there, at most once in so many seconds.

        Returns:
            Of each rank that has not answered yet the rounds that it was asked in.
        """
        now = time.monotonic()
        if now - self._last >= period_s:
            self._last = now
            for connection, rank in ranks.items():
                self._unanswered[rank] = self._unanswered.get(rank, 0) + 1
                send_message(connection, kind="here?")
        return dict(self._unanswered)

    def hear(self, rank: int) -> None:
        """Take an answer, or that a rank has left."""
        self._unanswered.pop(rank, None)


def read_message(line: bytes) -> dict[str, Any]:
    """What a line says; nothing where it is not an object of JSON, as from a stranger."""
    try:
        return as_object(parse_json(line, "a message"), "a message")
    except UnreadableError:
        return {}


def send_message(connection: socket.socket, **message: Any) -> None:
    """Send a line; a peer that is gone is noticed where its connection is read."""
    with contextlib.suppress(OSError):
        connection.sendall(json.dumps(message).encode() + b"\n")
