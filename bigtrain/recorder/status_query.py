"""Queries of all ranks' records by the hub, whose single thread never blocks for an answer."""

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
"""Seconds in which a rank must send its record. A rank that is stopped, or in native code that
holds Python's lock, does not send it."""


@dataclass
class StatusQuery:
    """A request to ranks for their records, and the function that gets the answers."""

    awaited: set[socket.socket]
    """The connections of the ranks that have not answered."""
    records: dict[int, Record]
    """The records of the ranks that have answered, by rank."""
    finish: Callable[[dict[int, Record]], None]
    """Called with `records` when the query ends."""
    until: float
    """The time (`time.monotonic`) at which the query ends even if ranks have not answered."""


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
        """Open a query. The caller sends the requests to the ranks.

        Args:
            asked: the connections of the ranks that have to answer.
            known: records that are known already, by rank; answers are added to this dict.
            finish: called with all these records when the query ends.
        """
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
        """Return the seconds until the first query's time is over; None if no query is open."""
        ends = [query.until for query in self.open]
        return max(0.0, min(ends) - time.monotonic()) if ends else None

    def finish_due(self) -> None:
        """Finish the queries that all their ranks have answered or whose time is over."""
        for query in list(self.open):
            if not query.awaited or time.monotonic() >= query.until:
                self.open.remove(query)
                query.finish(query.records)


class StatusGather:
    """Counts the successive rounds of requests that each rank has not answered.

    A thread of each rank answers, so a rank that runs answers even if its main thread waits.
    Rounds and not seconds are counted, because Ctrl-Z also stops the rank that sends the requests.
    """

    def __init__(self) -> None:
        self._unanswered: dict[int, int] = {}
        self._last = -math.inf

    def call(self, ranks: Mapping[socket.socket, int], period_s: float) -> dict[int, int]:
        """Request an answer from all ranks, unless the last round began less than a period ago.

        Args:
            ranks: the rank of each connection.
            period_s: the least seconds between two rounds.

        Returns:
            The number of unanswered rounds by rank, including a round that this call begins. Ranks
            that have answered all rounds are left out.
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
    """Return the message in a line; an empty dict if the line is not a JSON object.

    Another program may have sent such a line.
    """
    try:
        return as_object(parse_json(line, "a message"), "a message")
    except UnreadableError:
        return {}


def send_message(connection: socket.socket, **message: Any) -> None:
    """Send a message as a line of JSON.

    Errors are ignored: the code that reads the connection notices a lost peer.
    """
    with contextlib.suppress(OSError):
        connection.sendall(json.dumps(message).encode() + b"\n")
