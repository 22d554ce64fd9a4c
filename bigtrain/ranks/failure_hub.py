"""Inform every rank at once that another rank failed, was killed, or was stopped.

Collectives notice the end of a rank late or never. A rank that computes, sleeps or waits for a file
notices nothing. Some launchers (srun by default) leave the other ranks running. So every rank
has a connection to a small hub in the process of rank 0. A rank that fails reports its failure to
the hub. If a rank is killed, the kernel closes its connection. There is no heartbeat that could be
late, so a rank that is only busy is never taken for dead.

The hub also decides which rank prints: the first rank that reports shows its traceback, and all
other ranks end without a traceback.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import queue
import secrets
import selectors
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from bigtrain.memory.host_memory import host_memory_line
from bigtrain.ranks.exit_status import exit_process
from bigtrain.ranks.restart import RESTART_STATUS, restart_process
from bigtrain.recorder.lost_ranks import rank_name
from bigtrain.recorder.page import Cause, Record, records_by_files, show_page
from bigtrain.recorder.ring import FlightRecorder
from bigtrain.recorder.status_query import StatusGather, StatusQueries, read_message, send_message

PRINT_GRACE_S = 3.0
"""Seconds that other ranks wait, so that the failing rank prints and exits first.

Launchers blame the first rank that exits, and check about once a second.
"""
EXIT_GRACE_S = 10.0
"""Additional seconds for a main thread that is already exiting, before the process is ended."""
_REPLY_S = 5.0
_CONNECT_S = 15.0
_MOMENT_S = 1.5
"""Seconds that the remaining ranks have to notice the end of the hub and to write their records.
A busy machine needs that long."""
_FAILED = 1
"""The exit status of a failure. Only after a failure does the hub request the ranks' records, and
not after a stop, a restart or wrong input."""
_LONGEST_HELLO = 4096
"""The largest number of bytes that an unidentified peer may send without the end of a line."""
_MOST_STRANGERS = 64
"""The largest number of unidentified connections, in addition to one for each rank."""


@dataclass(frozen=True, slots=True)
class RunEnd:
    """Why the run ends: the report of the first rank that failed, or the loss of a rank."""

    rank: int
    """The rank that failed or was lost."""
    text: str
    """The message, one line; empty if there is nothing to print."""
    status: int
    """The exit status of all other ranks."""
    speaker: int = -1
    """The rank that prints the line; -1 if the failing rank prints its own message."""


def lost_rank_message(rank: int, lost: int, names: Sequence[str] = ()) -> str:
    """Return the line that a remaining rank prints if another rank ended without a message.

    Args:
        rank: the rank that prints the line.
        lost: the rank that ended.
        names: the names of all ranks; empty to use numbers.
    """
    return (
        f"bigtrain: rank {rank} lost {rank_name(lost, names)}: it ended without a message "
        "(killed by the system? exit status -9 or 137 means that host memory ran out; "
        f"{host_memory_line()}{_watchdog()})"
    )


def _watchdog() -> str:
    # A rank has loaded torch; the process that starts ranks has not.
    from bigtrain.devices import accelerator

    if accelerator() is None:
        return ""
    return (
        "; -6 or 134: an exchange between GPUs took longer than mesh.timeout, see the line of its "
        "watchdog"
    )


class FailureHub:
    """The hub in the process of rank 0: a daemon thread with a connection to each rank."""

    def __init__(self, *, one_node: bool, token: str = "", world_size: int = 1) -> None:
        """Listen on a free port.

        Args:
            one_node: listen on the loopback only.
            token: the secret that a rank must send; empty for a new one.
            world_size: the number of ranks that will connect.
        """
        if one_node:
            self._server = socket.create_server(("127.0.0.1", 0))
        elif socket.has_dualstack_ipv6():
            self._server = socket.create_server(
                ("", 0), family=socket.AF_INET6, dualstack_ipv6=True
            )
        else:
            self._server = socket.create_server(("", 0))
        self.port: int = self._server.getsockname()[1]
        # The token keeps other programs on the network from ending ranks through this port.
        self.token = token or secrets.token_hex(16)
        self._most_strangers = world_size + _MOST_STRANGERS
        self._ending: RunEnd | None = None
        self._ranks: dict[socket.socket, int] = {}
        self._buffers: dict[socket.socket, bytes] = {}
        self._left: set[int] = set()
        self._spare: set[int] = set()
        self._names: list[str] = []
        self._queries = StatusQueries()
        self._silence = StatusGather()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._server, selectors.EVENT_READ)
        threading.Thread(target=self._serve, name="bigtrain-hub", daemon=True).start()

    def _serve(self) -> None:
        # After rank 0 has left, the thread ends with the last connection.
        while 0 not in self._left or self._buffers:
            for key, _ in self._selector.select(self._queries.patience_s()):
                if key.fileobj is self._server:
                    with contextlib.suppress(OSError):  # the peer has closed it already
                        self._accept(self._server.accept()[0])
                elif isinstance(key.fileobj, socket.socket):
                    self._receive(key.fileobj)
            self._queries.finish_due()
        self._selector.close()
        self._server.close()

    def _accept(self, connection: socket.socket) -> None:
        """Accept a connection; drop the oldest unidentified connection if there are too many."""
        strangers = [stranger for stranger in self._buffers if stranger not in self._ranks]
        if len(strangers) >= self._most_strangers:
            self._drop(strangers[0])
        self._buffers[connection] = b""
        self._selector.register(connection, selectors.EVENT_READ)

    def _query(self, finish: Callable[[dict[int, Record]], None], known: dict[int, Record]) -> None:
        """Request the records that are not in `known`; then call `finish` with all records."""
        asked = [c for c, r in self._ranks.items() if r not in known and r not in self._left]
        self._queries.begin(asked, known, finish)
        for connection in asked:
            send_message(connection, kind="records?")

    def _receive(self, connection: socket.socket) -> None:
        try:
            data = connection.recv(65536)
        except OSError:
            data = b""
        if not data:
            self._closed(connection)
            return
        *lines, rest = (self._buffers[connection] + data).split(b"\n")
        self._buffers[connection] = rest
        if connection not in self._ranks and len(rest) > _LONGEST_HELLO:
            self._drop(connection)
            return
        for line in lines:
            if connection in self._buffers:
                self._answer(connection, line)

    def _answer(self, connection: socket.socket, line: bytes) -> None:
        message = read_message(line)
        kind = message.get("kind")
        if connection not in self._ranks:
            self._introduce(connection, message)
        elif kind == "bye":
            self._left.add(self._ranks[connection])
            self._queries.give_up(connection)
            self._silence.hear(self._ranks[connection])
            if self._ranks[connection] == 0:
                # The hub ends with rank 0's process. Peers must not take that for a lost rank 0.
                for peer in self._ranks:
                    send_message(peer, kind="unwatched")
            send_message(connection, kind="ok")
        elif kind == "record":
            self._queries.answer(connection, self._ranks[connection], message["record"])
        elif kind == "here":
            self._silence.hear(self._ranks[connection])
        elif kind == "spare":
            self._spare, self._names = set(message["ranks"]), message["names"]
        elif kind == "roll":
            present = {c: rank for c, rank in self._ranks.items() if rank not in self._left}
            rounds = self._silence.call(present, float(message["period_s"]))
            send_message(connection, kind="silence", rounds=rounds)
        elif kind == "show":
            self._query(
                lambda records: send_message(connection, kind="records", records=records), {}
            )
        elif kind == "end":
            rank = self._ranks[connection]
            if self._ending is None:
                ending = RunEnd(rank, message["text"], int(message["status"]))
                self._end(ending, connection, message.get("record"))
                return
            # A rank may report twice, from its signal thread and from its main thread.
            send_message(connection, kind="verdict", first=self._ending.rank == rank)

    def _introduce(self, connection: socket.socket, message: dict[str, Any]) -> None:
        rank = message.get("rank")
        token = str(message.get("token")).encode(errors="replace")
        known = message.get("kind") == "hello" and hmac.compare_digest(token, self.token.encode())
        if not (known and isinstance(rank, int)):
            self._drop(connection)
            return
        self._ranks[connection] = rank
        send_message(connection, kind="ok")
        if self._ending:
            send_message(connection, kind="end", **asdict(self._ending))

    def _closed(self, connection: socket.socket) -> None:
        rank = self._ranks.get(connection)
        self._drop(connection)
        self._queries.give_up(connection)
        if rank is None or rank in self._left or self._ending:
            return
        if rank in self._spare:
            self._left.add(rank)
            self._silence.hear(rank)
            for peer in self._ranks:
                send_message(peer, kind="lost", rank=rank)
            return
        self._ending = RunEnd(rank, "", _FAILED)

        def tell(records: dict[int, Record]) -> None:
            present = [r for r in self._ranks.values() if r not in self._left]
            # A rank that has sent its record can print; a rank that has not may be stopped.
            speaker = min((r for r in present if r in records), default=min(present, default=-1))
            text = lost_rank_message(speaker, rank, self._names)
            self._ending = RunEnd(rank, text, _FAILED, speaker)
            self._tell(self._ending, None, records)

        self._query(tell, {})

    def _end(self, ending: RunEnd, reporter: socket.socket, record: Record | None) -> None:
        self._ending = ending
        if ending.status != _FAILED:
            self._tell(ending, reporter, {})
            return
        known = {} if record is None else {ending.rank: record}
        self._query(lambda records: self._tell(ending, reporter, records), known)

    def _tell(
        self, ending: RunEnd, reporter: socket.socket | None, records: dict[int, Record]
    ) -> None:
        """Send all ranks why the run ends; the rank that prints also gets the records."""
        for connection, rank in self._ranks.items():
            if connection is not reporter:
                their_records = records if rank == ending.speaker else {}
                send_message(connection, kind="end", records=their_records, **asdict(ending))
        if reporter is not None:
            send_message(reporter, kind="verdict", first=True, records=records)

    def _drop(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        self._buffers.pop(connection, None)
        self._ranks.pop(connection, None)
        connection.close()


class FailureListener:
    """The connection of one rank to the hub, with a thread that ends this process if necessary."""

    def __init__(
        self,
        host: str,
        port: int,
        token: str,
        rank: int,
        recorder: FlightRecorder | None = None,
    ) -> None:
        """Connect to the hub and start the thread.

        Args:
            host: the hub's host.
            port: the hub's port.
            token: the hub's secret.
            rank: the rank of this process.
            recorder: this rank's events, which the hub may request; None for an empty recorder.

        Raises:
            OSError: the hub cannot be reached.
        """
        self.rank = rank
        self.ending: RunEnd | None = None
        self.records: dict[int, Record] = {}
        """By rank, the records that the hub collected after this rank's report ended the run."""
        self.recorder = recorder or FlightRecorder(rank)
        self.recorder.lost_ranks.tell = self._say
        self._sending = threading.Lock()
        self._ended = threading.Event()
        self._leaving = threading.Event()
        self._closing = threading.Event()
        self._unwatched = False
        self._rounds: dict[int, int] = {}
        self._unheard = 0
        self._replies: queue.Queue[dict[str, Any]] = queue.Queue()
        self._socket = socket.create_connection((host, port), timeout=_CONNECT_S)
        self._socket.settimeout(None)
        self._say(kind="hello", token=token, rank=rank)
        self._thread = threading.Thread(target=self._listen, name="bigtrain-watch", daemon=True)
        self._thread.start()
        self._reply()

    def report(self, text: str, status: int, *, patience_s: float = 0.0) -> RunEnd | None:
        """Report that this rank ends the run.

        Args:
            text: the error, one line, for the other ranks.
            status: the exit status of the other ranks.
            patience_s: seconds to wait first for the report of another rank. A collective usually
                breaks because a rank died, and the hub's message about the dead rank comes a moment
                later.

        Returns:
            None if this rank is the first and prints its error; otherwise why the run ended.
        """
        if self._ended.wait(patience_s):
            return self.ending  # known already, and the hub may have ended
        record = self.recorder.record() if status == _FAILED else None
        self._say(kind="end", text=text, status=status, record=record)
        reply = self._reply()
        if reply.get("first", True):
            self.records = _by_rank(reply.get("records", {}))
            if status == _FAILED and not reply:  # the hub does not answer, or has just ended
                if self.ending is not None:
                    return self.ending
                self.records = records_by_files(self.recorder, _MOMENT_S)
                speaker = min(self.records)
                return None if speaker == self.rank else RunEnd(speaker, "", status)
            return None
        self._ended.wait(_REPLY_S)
        return self.ending

    def grace(self) -> None:
        """Wait `PRINT_GRACE_S`, so that the failing rank prints and exits before this process."""
        self._leaving.set()
        threading.Event().wait(PRINT_GRACE_S)

    def ask(self) -> None:
        """Let the hub request the records of all ranks, which this rank then shows as a page."""
        self._say(kind="show")

    def silent_rank(self, period_s: float) -> tuple[int, float] | None:
        """Let the hub check that all ranks answer. A thread calls this regularly.

        Args:
            period_s: seconds between two calls.

        Returns:
            The rank that has been silent for longest, and the least number of seconds that it has
            been silent; None if all ranks answer. A rank that computes or waits still answers, with
            another thread.
        """
        if self._unwatched or self._closing.is_set() or self.ending:
            return None
        rounds = {**self._rounds, 0: max(self._rounds.get(0, 0), self._unheard)}
        self._unheard += 1  # reset by the next message of the hub, which is in rank 0
        self._say(kind="roll", period_s=period_s)
        rank = max(rounds, key=rounds.__getitem__)
        return (rank, (rounds[rank] - 1) * period_s) if rounds[rank] > 1 else None

    def close(self) -> None:
        """Leave the hub. After that, the end of this process does not count as a lost rank."""
        self._closing.set()
        self._say(kind="bye")
        self._reply()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        if self._thread is not threading.current_thread():
            self._thread.join(_REPLY_S)
        self._socket.close()

    def _say(self, **message: Any) -> None:
        # Both the main thread and the listening thread send.
        with self._sending:
            send_message(self._socket, **message)

    def _reply(self) -> dict[str, Any]:
        try:
            return self._replies.get(timeout=_REPLY_S)
        except queue.Empty:
            return {}

    def _listen(self) -> None:
        buffer = b""
        while True:
            try:
                data = self._socket.recv(65536)
            except OSError:
                data = b""
            if not data:
                break
            *lines, buffer = (buffer + data).split(b"\n")
            for line in lines:
                self._hear(json.loads(line))
        self._replies.put({})
        if not (self._unwatched or self._closing.is_set() or self.ending):
            text = lost_rank_message(self.rank, 0, self.recorder.lost_ranks.names)
            self._end(RunEnd(0, text, _FAILED, self.rank), {})
            # The process must not exit before this thread has shown the page. A thread that a
            # daemon thread starts is a daemon by default.
            threading.Thread(target=self._show_without_hub, daemon=False).start()

    def _hear(self, message: dict[str, Any]) -> None:
        kind = message.pop("kind")
        if kind == "unwatched":
            self._unwatched = True
        elif kind == "records?":
            self._say(kind="record", record=self.recorder.record())
        elif kind == "here?":
            self._say(kind="here")
        elif kind == "lost":
            self.recorder.lose(message["rank"])
        elif kind == "silence":
            self._rounds, self._unheard = _by_rank(message["rounds"]), 0
        elif kind == "records":
            show_page(self.recorder, _by_rank(message["records"]), Cause("asked", self.rank))
        elif kind == "end":
            records = _by_rank(message.pop("records", {}))
            self._end(RunEnd(**message), records)
        else:
            self._replies.put(message)

    def _show_without_hub(self) -> None:
        records = records_by_files(self.recorder, _MOMENT_S)
        if min(records) == self.rank:
            show_page(self.recorder, records, Cause("lost", 0))

    def _end(self, ending: RunEnd, records: dict[int, Record]) -> None:
        """Record why the run ends, print it if this rank is the speaker, and end the process."""
        self.ending = ending
        if ending.status == RESTART_STATUS:
            restart_process(ending.text, has_hub=self.rank == 0)
        if ending.speaker == self.rank and not self._closing.is_set():
            sys.stderr.write(ending.text + "\n")
            if records:
                show_page(self.recorder, records, Cause("lost", ending.rank))
        self._ended.set()
        threading.Thread(
            target=self._enforce, args=(ending,), name="bigtrain-end", daemon=True
        ).start()

    def _enforce(self, ending: RunEnd) -> None:
        # The main thread may be in a collective, a system call or a long kernel, where it receives
        # no exception: this thread ends the process after the grace period.
        threading.Event().wait(PRINT_GRACE_S)
        if self._leaving.is_set():
            threading.Event().wait(EXIT_GRACE_S)
        if not self._closing.is_set():
            exit_process(ending.status)


def _by_rank(values: dict[str, Any]) -> dict[int, Any]:
    """Return the values by rank as a number; the keys of JSON are text."""
    return {int(rank): value for rank, value in values.items()}
