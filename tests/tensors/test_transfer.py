"""The file of offloaded activations, and the order of calls on a CUDA device."""

from __future__ import annotations

import errno
import gc
import os
import random
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from support.late_copies import LateCopies
from support.moving import BLOCK, CPU, mixed, same, save_and_leave, train, wrap
from torch import nn

from bigtrain.activations.offload import ActivationOffloader
from bigtrain.errors import BigtrainError, ConfigError
from bigtrain.optim.state_store import HostStateStore
from bigtrain.ranks.context import RunContext
from bigtrain.tensors.transfer import (
    DiskTransfer,
    FileAllocator,
    HostCopies,
    HostTransfer,
    NullTransfer,
)


@pytest.fixture
def mover(tmp_path) -> Iterator[ActivationOffloader]:
    made = ActivationOffloader("disk", CPU, str(tmp_path))
    yield made
    made.close()


def test_room_is_given_to_one_at_a_time_and_joined_again():
    space, file_space = FileAllocator(), {}
    generator = random.Random(3)
    for _ in range(2000):
        if file_space and generator.random() < 0.5:
            location = generator.choice([*file_space])
            space.release(location, file_space.pop(location))
        else:
            size = generator.randrange(1, 50000)
            location = space.allocate(size)
            assert location % 4096 == 0
            assert all(location >= p + s or location + size <= p for p, s in file_space.items())
            file_space[location] = size
    for location, size in file_space.items():
        space.release(location, size)
    assert space._free == [(0, space.end)]
    end = space.end
    assert space.allocate(end) == 0
    assert space.allocate(1) == end


def test_no_file_stays_and_the_thread_ends(tmp_path):
    threads = threading.active_count()
    mover = ActivationOffloader("disk", CPU, str(tmp_path))
    model, x = mixed(3)
    wrap(model, mover.offload)
    loss = model(x).sum()
    assert list(tmp_path.iterdir()) == []
    mover.close()
    assert threading.active_count() == threads
    message = "of an offloader that is closed. Run the backward pass before `close`"
    with pytest.raises(BigtrainError, match=message):
        loss.backward()


def test_a_mover_that_is_forgotten_closes_itself(tmp_path):
    threads = threading.active_count()
    save_and_leave(
        ActivationOffloader("disk", CPU, str(tmp_path)), nn.Identity(), torch.randn(128, 128)
    )
    gc.collect()
    assert threading.active_count() == threads


def test_a_folder_that_takes_no_file(tmp_path):
    with pytest.raises(
        ConfigError, match="nowhere: no file can be made on .* Set it to a folder that"
    ):
        ActivationOffloader("disk", CPU, str(tmp_path / "nowhere"))


def test_a_full_disk_is_an_error_of_the_next_block(mover, monkeypatch):
    model, x = mixed(3)
    y = mover.offload(model.blocks[0], lambda: model.blocks[0](x))

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("os.pwritev", full)
    message = r"strategy\.offload\.path=.*No space left on device.*make room on that disk, or"
    with pytest.raises(BigtrainError, match=message):
        mover.offload(model.blocks[1], lambda: model.blocks[1](y))


def test_what_cannot_be_read_is_an_error_of_the_backward_pass(mover, monkeypatch):
    model, x = mixed(4)
    wrap(model, mover.offload)
    loss = model(x).sum()
    monkeypatch.setattr("os.preadv", lambda *_: time.sleep(0.1) or 0)
    with pytest.raises(BigtrainError, match="the file was cut off"):
        loss.backward()
    del loss, x, model
    gc.collect()
    mover.close()  # reads in progress fail as well, and their results are not needed


def test_a_system_that_writes_and_reads_a_little_at_a_time(mover, monkeypatch):
    plain = train(mixed, None)
    for name in ("pwritev", "preadv"):
        whole = getattr(os, name)
        monkeypatch.setattr(
            f"os.{name}", lambda fd, views, position, m=whole: m(fd, [views[0][:50001]], position)
        )
    assert same(train(mixed, mover), plain)


def test_it_waits_for_what_is_slow_and_says_how_long(mover, monkeypatch):
    model, x = mixed(3)
    write, blocked = os.pwritev, threading.Event()

    def slow(*args) -> int:
        blocked.wait(0.05)
        return write(*args)

    monkeypatch.setattr("os.pwritev", slow)
    wrap(model, mover.offload)
    loss = model(x).sum()
    assert mover.bytes_freed == 2 * BLOCK - x.nbytes, "a storage is freed only after it is written"
    assert mover.waited_seconds > 0.2
    loss.backward()


class Cuda:
    """Stands in for torch.cuda and records which stream waits for which."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.events = 0
        self.inside = "main"

    def Stream(self, _device):  # noqa: N802 - torch's name
        return Stream(self, "side")

    def current_stream(self, _device):
        return Stream(self, self.inside)

    @contextmanager
    def stream(self, stream):
        before, self.inside = self.inside, stream.name
        yield
        self.inside = before


class Stream:
    device = torch.device("cuda", 0)

    def __init__(self, cuda: Cuda, name: str) -> None:
        self.cuda, self.name = cuda, name

    def wait_stream(self, other_stream) -> None:
        self.cuda.told.append(f"{self.name} waits for all of {other_stream.name}")

    def record_event(self) -> Event:
        self.cuda.events += 1
        self.cuda.told.append(f"{self.name} marks {self.cuda.events}")
        return Event(self.cuda, self.cuda.events)

    def wait_event(self, event: Event) -> None:
        self.cuda.told.append(f"{self.name} waits for {event.number}")


class Event:
    def __init__(self, cuda: Cuda, number: int) -> None:
        self.cuda, self.number = cuda, number

    def synchronize(self) -> None:
        self.cuda.told.append(f"the host waits for {self.number}")


@pytest.fixture
def cuda(monkeypatch) -> Cuda:
    stand_in = Cuda()
    for name in ("Stream", "current_stream", "stream"):
        monkeypatch.setattr(f"torch.cuda.{name}", getattr(stand_in, name))
    stand_in.devices = []
    monkeypatch.setattr(
        "torch.cuda.set_device",
        lambda device: stand_in.devices.append((device, threading.current_thread().name)),
    )
    empty_like, copy = torch.empty_like, torch.Tensor.copy_

    def pinned(*args, pin_memory=False, **kwargs):
        stand_in.told += ["pinned"] if pin_memory else []
        return empty_like(*args, **kwargs)

    def copied(target, source, *, non_blocking=False):
        stand_in.told.append(f"copy on {stand_in.inside}{', not waiting' * non_blocking}")
        return copy(target, source)

    monkeypatch.setattr("torch.empty_like", pinned)
    monkeypatch.setattr("torch.Tensor.copy_", copied)
    return stand_in


COPY = ["side waits for all of main", "copy on side, not waiting"]


def test_copies_follow_what_is_computed_and_are_waited_for_by_the_device_alone(cuda):
    carrier = HostTransfer(torch.device("cuda", 0))
    source = torch.arange(10, dtype=torch.uint8)
    spot, wait = carrier.copy_out(source)
    assert cuda.told == ["pinned", *COPY, "side marks 1"]
    wait()
    assert cuda.told.pop() == "main waits for 1"
    cuda.told.clear()
    target = torch.zeros(10, dtype=torch.uint8)
    wait = carrier.copy_in(spot, target)
    assert cuda.told == [*COPY, "side marks 2"]
    wait()
    assert cuda.told.pop() == "main waits for 2"
    assert torch.equal(target, source)
    cuda.told.clear()
    carrier.free(spot)
    carrier.close()
    assert cuda.told == ["side marks 3", "the host waits for 3"]


def test_a_file_has_one_buffer_while_the_other_is_copied(cuda, tmp_path, monkeypatch):
    monkeypatch.setattr("bigtrain.tensors.transfer.BOUNCE_BYTES", 8)
    for name in ("pwritev", "preadv"):
        whole = getattr(os, name)

        def noted(fd, views, offset, whole=whole, name=name):
            cuda.told.append(f"{name[1:-1]} {len(views[0])}")
            return whole(fd, views, offset)

        monkeypatch.setattr(os, name, noted)
    copies = HostCopies(torch.device("cuda", 0))
    transfer = DiskTransfer(str(tmp_path), copies)
    assert cuda.told == ["pinned", "pinned"], "the number of buffers must not depend on the copies"
    cuda.told.clear()
    source = torch.arange(20, dtype=torch.uint8)
    spot, wait = transfer.copy_out(source)
    wait()
    copy = ["side waits for 1", "copy on side, not waiting"]
    assert cuda.told == [
        "main marks 1",
        *(*copy, "side marks 2"),
        *(*copy, "side marks 3", "the host waits for 2", "write 8"),
        *(*copy, "side marks 4", "the host waits for 3", "write 8"),
        *("the host waits for 4", "write 4"),
    ]
    cuda.told.clear()
    target = torch.zeros(20, dtype=torch.uint8)
    wait = transfer.copy_in(spot, target)
    wait()
    copy = ["side waits for 5", "copy on side, not waiting"]
    assert cuda.told == [
        "main marks 5",
        *("read 8", *copy, "side marks 6"),
        *("read 8", *copy, "side marks 7"),
        *("the host waits for 6", "read 4", *copy, "side marks 8"),
        *("side marks 9", "main waits for 9"),
    ]
    assert torch.equal(target, source)
    transfer.close()


def test_the_thread_that_copies_to_a_file_is_on_the_rank_s_own_device(cuda, tmp_path):
    transfer = DiskTransfer(str(tmp_path), HostCopies(torch.device("cuda", 1)))
    _, wait = transfer.copy_out(torch.arange(8, dtype=torch.uint8))
    wait()
    assert cuda.devices == [(torch.device("cuda", 1), "bigtrain-disk_0")]
    transfer.close()


def test_late_copies_to_a_file_change_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr("bigtrain.tensors.transfer.BOUNCE_BYTES", 4096)
    plain = train(mixed, None)
    late = DiskTransfer(str(tmp_path), LateCopies())
    mover = ActivationOffloader("disk", CPU, carrier=late)
    assert same(train(mixed, mover), plain)
    mover.close()


def test_a_tensor_is_there_until_the_file_has_it(tmp_path):
    late = LateCopies()
    transfer = DiskTransfer(str(tmp_path), late)
    source = torch.ones(8, dtype=torch.uint8)
    alive = weakref.ref(source)
    _, wait = transfer.copy_out(source)
    wait()
    assert late.done == 1
    late.asked.clear()
    del source
    assert alive() is None
    transfer.close()


def test_the_host_waits_for_one_copy_where_it_needs_the_values(cuda):
    copies = HostCopies(torch.device("cuda", 0))
    buffer = copies.host_buffer(torch.ones(3, requires_grad=True))
    assert not buffer.requires_grad
    copies.copy(buffer, torch.ones(3))
    wait = copies.host_wait()
    assert cuda.told == ["pinned", *COPY, "side marks 1"]
    wait()
    assert cuda.told.pop() == "the host waits for 1"


def test_pinned_memory_comes_in_powers_of_two(cuda):
    copies = HostCopies(torch.device("cuda", 0))
    assert [copies.host_bytes(n) for n in (0, 1, 4096, 4097, 3 << 20)] == [
        0,
        1,
        4096,
        8192,
        4 << 20,
    ]
    assert HostCopies(torch.device("cpu")).host_bytes(4097) == 4097


def test_a_gradient_is_there_until_its_copy_is_made(cuda):
    """A temporary without another reference: its memory must not be reused while it is read."""
    store = HostStateStore(RunContext.alone(), HostCopies(torch.device("cuda", 0)))
    gradient = torch.ones(8)
    alive = weakref.ref(gradient)
    wait = store.begin_copy(gradient, torch.zeros(8))
    del gradient
    assert alive() is not None
    assert torch.equal(wait(), torch.ones(8))
    assert alive() is None
    # From a CPU the copy is made immediately, and keeps nothing alive.
    gradient = torch.ones(8)
    alive = weakref.ref(gradient)
    HostStateStore(RunContext.alone()).begin_copy(gradient, torch.zeros(8))
    del gradient
    assert alive() is None


def test_of_a_cpu_copies_are_made_at_once():
    copies = HostCopies(torch.device("cpu"))
    buffer = copies.host_buffer(torch.zeros(3))
    copies.copy(buffer, torch.ones(3))
    assert torch.equal(buffer, torch.ones(3))
    copies.host_wait()()
    copies.device_wait()()


def test_on_a_gpu_the_host_is_where_things_go(cuda):
    mover = ActivationOffloader("cpu", torch.device("cuda"))
    assert isinstance(mover._transfer, HostTransfer)
    assert mover._transfer.stored_bytes(4097) == 8192
    assert NullTransfer(pinned=True).stored_bytes(4097) == 8192
    mover.close()
