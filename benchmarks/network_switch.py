"""A network switch as a program: it carries frames between network namespaces.

    python benchmarks/network_switch.py RATE DELAY NAMESPACE...

RATE is in bits per second, DELAY in seconds. Each namespace gets `eth0`, a TAP device whose other
side is this process. Every interface sends and receives at RATE at the same time; a frame arrives
DELAY after its last bit was sent. If more is sent than the rate allows, the sender waits: no frame
is lost. `ready` on standard output says that the interfaces exist; they are removed when this
process ends.

The kernel's own tool for this is `tc qdisc ... netem`, which kernels of small virtual machines
lack. The work here is small: the kernel hands over frames before it segments them (up to 64 KiB),
so a gigabit is a few thousand reads per second. The process runs with real-time priority
(SCHED_FIFO), as ranks that compute on all cores would delay it by milliseconds; the ranks lack the
processor time that it takes.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import os
import select
import signal
import struct
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path

_TUNSETIFF, _TUNSETOFFLOAD = 0x400454CA, 0x400454D0
_TAP, _NO_INFO, _WITH_HEADER = 0x0002, 0x1000, 0x4000
_CHECKSUM, _TSO4, _TSO6 = 0x01, 0x02, 0x04
_CLONE_NEWNET = 0x40000000
_PR_SET_PDEATHSIG = 1
HEADER_BYTES = 10
"""Of what comes with each frame: whether it is to be cut, and where its checksum goes."""
LARGEST_FRAME = HEADER_BYTES + 14 + 2**16
MOST_WAITING_S = 0.05
"""Seconds of sending that an interface takes on before it lets its sender wait."""


@dataclass
class Port:
    """One interface, as the switch sees it."""

    fd: int
    mac: bytes
    sends_until: float = 0.0
    """When what it has been given is sent."""
    receives_until: float = 0.0


class Wires:
    """The arrival times of frames, by rate and delay. Times are seconds of one clock.

    Args:
        ports: the interfaces.
        rate: bits a second of each, each way.
        delay: seconds from the last bit sent to the frame's arrival.
    """

    def __init__(self, ports: list[Port], rate: float, delay: float) -> None:
        self._ports, self._delay = ports, delay
        self._seconds_per_byte = 8 / rate
        self._waiting: list[tuple[float, int, Port, bytes]] = []
        self._number = count()

    def take(self, source: Port, frame: bytes, now: float) -> None:
        """Accept a frame of an interface; it will arrive at its address, or at all interfaces."""
        seconds = (len(frame) - HEADER_BYTES) * self._seconds_per_byte
        source.sends_until = sent = max(now, source.sends_until) + seconds
        address = frame[HEADER_BYTES : HEADER_BYTES + 6]
        others = [port for port in self._ports if port is not source]
        named = [port for port in others if port.mac == address]
        for port in named or others:
            # Its first bit may arrive while the last is not sent yet.
            port.receives_until = max(sent, port.receives_until + seconds)
            arrival = port.receives_until + self._delay
            heapq.heappush(self._waiting, (arrival, next(self._number), port, frame))

    def next_arrival(self) -> float | None:
        """Return the time of the next arrival; None if no frame is on its way."""
        return self._waiting[0][0] if self._waiting else None

    def arrived(self, now: float) -> list[tuple[Port, bytes]]:
        """Return the frames that have arrived, in order."""
        frames = []
        while self._waiting and self._waiting[0][0] <= now:
            _, _, port, frame = heapq.heappop(self._waiting)
            frames.append((port, frame))
        return frames

    def takes(self, source: Port, now: float) -> bool:
        """Whether an interface accepts more frames: no receiver, nor itself, has a long queue."""
        latest = max(p.receives_until for p in self._ports if p is not source)
        return max(source.sends_until, latest) - now < MOST_WAITING_S


def open_port(namespace: Path, name: str, mac: bytes) -> Port:
    """Make an interface in a namespace; its frames are read and written here."""
    libc = ctypes.CDLL(None, use_errno=True)
    with Path("/proc/self/ns/net").open() as own_namespace, namespace.open() as host_namespace:
        if libc.setns(host_namespace.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"{namespace} cannot be entered")
        try:
            fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
            flags = _TAP | _NO_INFO | _WITH_HEADER
            fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH22x", name.encode(), flags))
            fcntl.ioctl(fd, _TUNSETOFFLOAD, _CHECKSUM | _TSO4 | _TSO6)
        finally:
            libc.setns(own_namespace.fileno(), _CLONE_NEWNET)
    return Port(fd, mac)


def mac_of(number: int) -> bytes:
    """Return the address of a host's interface, which no manufacturer uses."""
    return bytes((0x02, 0, 0, 0, number // 256, number % 256))


def forward(ports: list[Port], links: Wires) -> None:
    """Receive frames and deliver them, forever."""
    by_fd = {port.fd: port for port in ports}
    while True:
        now = time.monotonic()
        for port, frame in links.arrived(now):
            with suppress(OSError):  # the interface is not up yet
                os.write(port.fd, frame)
        open_fds = [port.fd for port in ports if links.takes(port, now)]
        then = links.next_arrival()
        wait = 1.0 if then is None else max(0.0, then - time.monotonic())
        if len(open_fds) < len(ports):
            wait = min(wait, MOST_WAITING_S / 4)
        for fd in select.select(open_fds, [], [], wait)[0]:
            with suppress(OSError):
                links.take(by_fd[fd], os.read(fd, LARGEST_FRAME), time.monotonic())


def main() -> None:
    """Make the interfaces and forward frames until the parent process ends."""
    rate, delay, *namespaces = sys.argv[1:]
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    with suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(10))
    ports = [
        open_port(Path("/run/netns") / name, "eth0", mac_of(number))
        for number, name in enumerate(namespaces)
    ]
    print("ready", flush=True)
    forward(ports, Wires(ports, float(rate), float(delay)))


if __name__ == "__main__":
    main()
