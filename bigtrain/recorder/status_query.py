"""Queries of all ranks' records from the hub's one thread, which never blocks for an answer."""

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
"""Seconds in which a rank must send its record; a stopped rank or one in native code does not."""


@dataclass
class StatusQuery:
    """Ranks that were asked for their records, and the function that takes the answers."""

    awaited: set[socket.socket]
    """The connections whose records have not come."""
    records: dict[int, Record]
    finish: Callable[[dict[int, Record]], None]
    until: float
    """The moment (`time.monotonic`) at which it ends without the others."""


@dataclass
class StatusQueries:
    """The open queries."""

    open: list[StatusQuery] = field(default_factory=list)

    def begin(
        self,
        asked: Iterable[socket.socket],
        known: dict[int, Record],
        finish: Callable[[dict[int, Record]], None],
    ) -> None:
        """Open a query; `finish` is called with the records of these ranks and the known ones."""
        self.open.append(StatusQuery(set(asked), known, finish, time.monotonic() + RECORDS_S))

    def answer(self, connection: socket.socket, rank: int, record: Record) -> None:
        """Add a record to all queries that wait for it."""
        for query in self.open:
            if connection in query.awaited:
                query.awaited.discard(connection)
                query.records[rank] = record

    def give_up(self, connection: socket.socket) -> None:
        """Stop waiting for a rank that has left or was lost."""
        for query in self.open:
            query.awaited.discard(connection)

    def patience_s(self) -> float | None:
        """Return the seconds until a query's time is over; None if none is open."""
        ends = [query.until for query in self.open]
        return max(0.0, min(ends) - time.monotonic()) if ends else None

    def finish_due(self) -> None:
        """Finish the queries that are answered, or whose time is over."""
        for query in list(self.open):
            if not query.awaited or time.monotonic() >= query.until:
                self.open.remove(query)
                query.finish(query.records)


class StatusGather:
    """Counts the rounds in which ranks do not answer; in a rank that runs, a thread answers.

    Silence is counted in rounds and not in seconds, because Ctrl-Z stops the asking rank, too.
    """

    def __init__(self) -> None:
        self._unanswered: dict[int, int] = {}
        self._last = -math.inf

    def call(self, ranks: Mapping[socket.socket, int], period_s: float) -> dict[int, int]:
        """Ask all ranks for a sign of life, at most once in a period.

        Args:
            ranks: by connection, its rank.
            period_s: the seconds between two rounds.

        Returns:
            The number of unanswered rounds, by rank; without ranks that answered the last one.
        """
        now = time.monotonic()
        if now - self._last >= period_s:
            self._last = now
            for connection, rank in ranks.items():
                self._unanswered[rank] = self._unanswered.get(rank, 0) + 1
                send_message(connection, kind="here?")
        return dict(self._unanswered)

    def hear(self, rank: int) -> None:
        """Reset the count of a rank that has answered or has left."""
        self._unanswered.pop(rank, None)


def read_message(line: bytes) -> dict[str, Any]:
    """Return the message of a line; empty if it is no JSON object, as from another program."""
    try:
        return as_object(parse_json(line, "a message"), "a message")
    except UnreadableError:
        return {}


def send_message(connection: socket.socket, **message: Any) -> None:
    """Send a message as a line; a lost peer is noticed by the code that reads its connection."""
    with contextlib.suppress(OSError):
        connection.sendall(json.dumps(message).encode() + b"\n")
