"""Activation offload: a block's saved tensors are on the host or on disk until its backward pass.

When a block begins, copies of the saved tensors of the block before it are started. When the block
ends, the memory of these tensors is freed. In the backward pass a block's tensors are copied back
when the first of them is needed, and the copies for the block before it are started as well.
So the tensors of at most two blocks are on the device, at moments that do not depend on the speed
of the copies: a run on fake tensors allocates and frees the same bytes at the same ticks.

Source: Rhu et al. 2016, vDNN (arXiv 1602.08124), section III; Rajbhandari et al. 2021,
ZeRO-Infinity (arXiv 2104.07857), section 5.1.2.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import saved_tensors_hooks

from bigtrain.activations.saved_tensors import (
    BlockPass,
    OffloadedTensor,
    PendingRelease,
    ResidentTensor,
    SavedStorage,
    live_referents,
    untyped_storage_of,
)
from bigtrain.devices import is_accelerator
from bigtrain.errors import BigtrainError
from bigtrain.memory.disk import scratch_folder
from bigtrain.tensors.transfer import (
    DiskTransfer,
    HostCopies,
    HostTransfer,
    NullTransfer,
    Transfer,
    WaitFn,
)
from bigtrain.units import KIB

MIN_OFFLOADED_BYTES = 16 * KIB
"""Smaller tensors stay, such as statistics of norms: the system call for each would take longer
than the copy, and together they are about a percent of the saved bytes."""


class ActivationOffloader:
    """Moves saved activations of blocks to the host or to disk between forward and backward.

    The tensors saved last stay until another block begins: usually their backward pass comes first.
    Parameters, buffers, small tensors and tensors of other devices stay. Counts are per rank.

    Args:
        tier: `cpu` for pinned memory of the host, or `disk` for a file. With `cpu` on a CPU nothing
            moves, except in a run on fake tensors, which may represent a run on another device.
        device: the device whose tensors are moved.
        folder: the folder of the file; by default the system's folder for temporary files.
        fake: whether tensors are fake: then nothing is copied, and everything else is the same.
        carrier: makes the copies; None to choose one by `tier` and `device`.

    Raises:
        ConfigError: no file can be created in the folder.
    """

    def __init__(
        self,
        tier: Literal["cpu", "disk"],
        device: torch.device,
        folder: str | None = None,
        *,
        fake: bool = False,
        carrier: Transfer | None = None,
    ) -> None:
        self._device, self._fake = device, fake
        # Fake tensors may be on the CPU in the forecast of a run on a device that is not here.
        if carrier is None and (fake or tier == "disk" or is_accelerator(device)):
            if fake:
                carrier = NullTransfer(pinned=tier == "cpu")
            elif tier == "disk":
                carrier = DiskTransfer(folder or scratch_folder(), HostCopies(device))
            else:
                carrier = HostTransfer(device)
        self._transfer = carrier
        self.bytes_moved = 0
        """Bytes copied in both directions so far."""
        self.bytes_freed = 0
        """Bytes of storages that were copied and then freed on the device, so far."""
        self.bytes_away = 0
        """Bytes that are occupied in the file or on the host at the moment."""
        self.peak_bytes_away = 0
        """The largest value of `bytes_away` so far."""
        self.waited_seconds = 0.0
        """Seconds that the training thread has waited for copies; on CUDA the device waits
        instead."""
        # Autograd calls the hooks from one thread for each device.
        self._lock = threading.RLock()
        self._known: dict[int, tuple[weakref.ref[Any], weakref.ref[SavedStorage]]] = {}
        self._staying: list[weakref.ref[BlockPass]] = []
        self._last: weakref.ref[BlockPass] | None = None
        self._in_backward: weakref.ref[BlockPass] | None = None
        self._brought: list[weakref.ref[SavedStorage]] = []
        # Filled when a last reference is dropped, in any thread; emptied at fixed moments.
        self._leftovers: deque[PendingRelease] = deque()

    def offload(self, module: nn.Module, compute: Callable[[], Any]) -> Any:
        """Run a block's forward pass, and offload the tensors that autograd saves in it.

        Nothing moves under `torch.no_grad`. Several forward passes may be in flight.

        Args:
            module: the block, whose parameters and buffers stay.
            compute: runs the forward pass.

        Returns:
            The result of `compute`.

        Raises:
            BigtrainError: a tensor could not be written. The backward pass raises this error, too,
                if a saved tensor cannot be read, or was changed in place after it was saved.
        """
        if self._transfer is None or not torch.is_grad_enabled():
            return compute()
        with self._lock:
            departing = self._begin_leaving()
            block_pass = BlockPass(self._last)
        try:
            with saved_tensors_hooks(self._packing(module, block_pass), self._unpack):
                result = compute()
        except BaseException:
            self._finish_leaving(departing)
            raise
        error = self._finish_leaving(departing)
        if error is not None:
            raise error
        with self._lock:
            if block_pass.saved:
                self._last = weakref.ref(block_pass)
                self._staying.append(self._last)
        return result

    def __deepcopy__(self, _memo: object) -> ActivationOffloader:
        """Share the offloader: copies of a model offload to the same place."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as an offloader that moves nothing."""
        return ActivationOffloader, ("cpu", torch.device("cpu"))

    def close(self) -> None:
        """Release files and threads; a backward pass that needs an offloaded tensor then fails."""
        with self._lock:
            self._clear_up()
            if self._transfer is not None:
                self._transfer.close()
            self._transfer, self.bytes_away = None, 0

    def _begin_leaving(self) -> list[tuple[weakref.ref[SavedStorage], Tensor, WaitFn]]:
        """Start to copy the saved tensors of the last blocks off the device."""
        self._clear_up()
        departing = []
        for visit in live_referents(self._staying):
            for record in () if visit.backward_begun else visit.records():
                if record.data is None or record.spot is not None:
                    continue
                record.spot, wait = self._open_transfer().copy_out(record.data)
                departing.append((weakref.ref(record), record.data, wait))
                self.bytes_moved += record.nbytes
                self.bytes_away += self._open_transfer().stored_bytes(record.nbytes)
                self.peak_bytes_away = max(self.peak_bytes_away, self.bytes_away)
        self._staying.clear()
        return departing

    def _finish_leaving(
        self, departing: list[tuple[weakref.ref[SavedStorage], Tensor, WaitFn]]
    ) -> BigtrainError | None:
        """Wait for all copies and free their sources; return the first failure."""
        first_error = None
        while departing:
            record_ref, _, wait = departing.pop(0)
            try:
                self._await(wait)
            except BigtrainError as error:
                first_error = first_error or error
                continue
            record = record_ref()
            if record is not None:
                record.data = None
        return first_error

    def _packing(self, module: nn.Module, visit: BlockPass) -> Callable[[Tensor], Any]:
        owned: set[int] = set()

        def is_owned(storage: torch.UntypedStorage) -> bool:
            if storage._cdata not in owned:  # sharded parameters may be gathered during the pass
                tensors = (*module.parameters(), *module.buffers())
                owned.update(
                    found._cdata for found in map(untyped_storage_of, tensors) if found is not None
                )
            return storage._cdata in owned

        def pack(tensor: Tensor) -> ResidentTensor | OffloadedTensor:
            # A user's function mode must not see these operations.
            with torch._C.DisableTorchFunction():
                storage = untyped_storage_of(tensor) if self._may_move(tensor) else None
                if storage is None or storage.nbytes() < MIN_OFFLOADED_BYTES or is_owned(storage):
                    return ResidentTensor(tensor)
                with self._lock:
                    record = self._record(storage, tensor, visit)
                return OffloadedTensor(tensor, record, visit)

        return pack

    def _may_move(self, tensor: Tensor) -> bool:
        if type(tensor) is not (FakeTensor if self._fake else Tensor):
            return False  # parameters, and subclasses, which may hold several tensors
        device = tensor.device
        on_device = device.type == self._device.type and self._device.index in (None, device.index)
        is_plain = tensor.layout == torch.strided and not (tensor.is_conj() or tensor.is_neg())
        return on_device and is_plain and not tensor.is_quantized

    def _record(
        self, storage: torch.UntypedStorage, tensor: Tensor, visit: BlockPass
    ) -> SavedStorage:
        """Return the record of a storage, which all saved tensors with this storage share."""
        key: int = storage._cdata
        known = self._known.get(key)
        record = known[1]() if known is not None else None
        # Until its block ends, a storage is alive on the device. A storage that an earlier block
        # saved may be copied already; the copy is valid only if the storage was not changed since.
        if record is None or not (record.made_in(visit) or record.holds(tensor)):
            record = SavedStorage(tensor, visit, self._leftovers)
            record_ref, nbytes = weakref.ref(record), storage.nbytes()

            def died(dead: weakref.ref[Any]) -> None:
                if self._known.get(key, (None,))[0] is dead:
                    del self._known[key]
                record_then = record_ref()
                if record_then is not None and record_then.spot is not None:
                    self.bytes_freed += nbytes

            self._known[key] = (weakref.ref(storage, died), record_ref)
        visit.save(record)
        return record

    def _unpack(self, saved: ResidentTensor | OffloadedTensor) -> Tensor:
        with torch._C.DisableTorchFunction():
            saved.check()
            if isinstance(saved, ResidentTensor):
                return saved.tensor
            with self._lock:
                self._begin_backward_of(saved.visit)
                record = saved.record
                self._begin_load(record)
                self._wait_copy(record)
                return saved.of(record.here)

    def _begin_backward_of(self, visit: BlockPass) -> None:
        """Begin a block's backward pass: start to load its tensors and the previous block's."""
        if self._in_backward is not None and self._in_backward() is visit:
            return
        self._in_backward, self._last = weakref.ref(visit), None
        visit.backward_begun = True
        self._clear_up()
        previous = visit.before() if visit.before is not None else None
        needed = [*visit.records(), *(previous.records() if previous is not None else ())]
        # Free the other storages. If a retained graph needs them again, they are loaded again.
        for record in live_referents(self._brought):
            if record not in needed:
                self._wait_copy(record)
                record.data = None
        self._brought = [
            weakref.ref(r) for r in live_referents(self._brought) if r.data is not None
        ]
        for record in needed:
            self._begin_load(record)

    def _begin_load(self, record: SavedStorage) -> None:
        """Start to load a storage unless it is on the device."""
        if record.data is not None:
            return
        record.data = record.original()
        if record.data is None:
            target = torch.empty(record.nbytes, dtype=torch.uint8, device=self._device)
            record.wait = self._open_transfer().copy_in(record.spot, target)
            record.data = target
            self.bytes_moved += record.nbytes
        self._brought.append(weakref.ref(record))

    def _wait_copy(self, record: SavedStorage) -> None:
        if record.wait is not None:
            wait, record.wait = record.wait, None
            try:
                self._await(wait)
            except BaseException:
                record.data = None
                raise

    def _await(self, wait: WaitFn) -> None:
        began = time.perf_counter()
        try:
            wait()
        finally:
            self.waited_seconds += time.perf_counter() - began

    def _clear_up(self) -> None:
        """Free the copies of storages that are not needed any more, after transfers have ended."""
        while self._leftovers:
            spot, nbytes, _data, wait = self._leftovers.popleft()
            if wait is not None:
                # Nothing needs this copy; an error that matters has been raised before.
                with contextlib.suppress(BigtrainError):
                    self._await(wait)
            if spot is not None and self._transfer is not None:
                self.bytes_away -= self._transfer.stored_bytes(nbytes)
                self._transfer.free(spot)

    def _open_transfer(self) -> Transfer:
        if self._transfer is None:
            raise BigtrainError(
                "A backward pass needs saved activations of an offloader that is closed. Run the "
                "backward pass before `close`."
            )
        return self._transfer
