"""Asking all ranks where they are, from the hub's one thread, without waiting for any of them."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from bigtrain.recorder.page import Record

RECORDS_S = 2.0
"""A rank that has not sent its record by then does not answer: stopped, or in native code."""


@dataclass
class Inquiry:
    """Ranks that were asked for their records, and what is done with the answers."""

    awaited: set[socket.socket]
    records: dict[int, Record]
    finish: Callable[[dict[int, Record]], None]
    until: float


@dataclass
class Inquiries:
    """Those that are open."""

    open: list[Inquiry] = field(default_factory=list)

    def begin(
        self,
        asked: Iterable[socket.socket],
        known: dict[int, Record],
        finish: Callable[[dict[int, Record]], None],
    ) -> None:
        """Wait for the records of these ranks, and call `finish` with them and the known ones."""
        self.open.append(Inquiry(set(asked), known, finish, time.monotonic() + RECORDS_S))

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
