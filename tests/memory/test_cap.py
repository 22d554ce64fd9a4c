"""A cap limits tensors: exactly while they are tracked, and by the kernel's limit afterwards."""

import gc
import mmap
import resource
import sys

import pytest
import torch

from bigtrain.memory.cap import ROOM_BYTES, MemoryCap, is_out_of_memory, requested_bytes
from bigtrain.memory.host_memory import proc_status_bytes
from bigtrain.memory.meter import MemoryMeter
from bigtrain.units import MIB

CPU = torch.device("cpu")
LIMIT = 4096 * MIB
"""More than the free heap of a process that ran other tests; hardly any of it is touched."""

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")


@pytest.fixture
def cap():
    """A cap, which is removed after the test."""
    gc.collect()  # garbage of earlier tests may be a GiB and be freed at any moment
    with MemoryMeter(CPU, 1).step():  # imports modules before the cap applies
        torch.empty(8)
    made = MemoryCap(LIMIT, CPU)
    yield made
    made.lift()
    assert soft_limit() == resource.RLIM_INFINITY


def soft_limit() -> int:
    """The kernel's current limit for this process, in bytes."""
    return resource.getrlimit(resource.RLIMIT_DATA)[0]


def test_tracked_tensors_are_held_to_the_byte(cap):
    meter = MemoryMeter(CPU, 2, cap)
    with meter.step():
        half = torch.empty(LIMIT // 2, dtype=torch.uint8)
        second_half = torch.empty(LIMIT // 2, dtype=torch.uint8)
        del second_half
        with pytest.raises(torch.OutOfMemoryError) as raised:
            torch.empty(LIMIT // 2 + 1, dtype=torch.uint8)
    assert is_out_of_memory(raised.value)
    assert requested_bytes(raised.value) == LIMIT // 2 + 1
    # The refused tensor never existed
    assert meter.peak_bytes() == meter.measured().peak.bytes == LIMIT
    assert half.nbytes == LIMIT // 2


def test_storage_that_grows_is_held_too(cap):
    meter = MemoryMeter(CPU, 1, cap)
    with meter.step():
        tensor = torch.empty(8, dtype=torch.uint8)
        with pytest.raises(torch.OutOfMemoryError):
            tensor.untyped_storage().resize_(LIMIT + 1)
        del tensor


@pytest.mark.parametrize("beside", [0, 60])
def test_what_is_no_tensor_is_no_part_of_the_cap(cap, beside):
    assert soft_limit() == resource.RLIM_INFINITY
    base = proc_status_bytes("VmData")
    meter = MemoryMeter(CPU, 1, cap)
    with meter.step():
        tensor = torch.empty(1024 * MIB, dtype=torch.uint8)
        scratch = mmap.mmap(-1, (beside or 1) * MIB, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    expected = base + beside * MIB + ROOM_BYTES + LIMIT
    assert soft_limit() == pytest.approx(expected, abs=8 * MIB)
    with pytest.raises(RuntimeError) as raised:
        torch.empty(LIMIT + ROOM_BYTES, dtype=torch.uint8)
    assert is_out_of_memory(raised.value)
    scratch.close()
    del tensor


def test_kernel_keeps_it_from_the_beginning_where_nothing_is_tracked(cap):
    error = RuntimeError("could not create a primitive")  # oneDNN's complete message
    assert not is_out_of_memory(error)
    MemoryMeter(CPU, 0, cap)
    expected = proc_status_bytes("VmData") + ROOM_BYTES + LIMIT
    assert soft_limit() == pytest.approx(expected, abs=8 * MIB)
    assert is_out_of_memory(error)


def test_without_a_limit_nothing_is_limited():
    MemoryMeter(CPU, 0, MemoryCap(None, CPU))
    assert soft_limit() == resource.RLIM_INFINITY
