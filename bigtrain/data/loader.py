"""Make the micro-batches of one rank from a data set, step after step.

torch's DataLoader reads ahead from a plan that is made one step at a time, so memory holds a few
micro-batches whatever the length of the epoch. Random augmentation depends on (seed, epoch, sample)
alone.
"""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

from bigtrain.data.batch_dims import BatchDims
from bigtrain.data.sampler import GlobalOrder, MicroBatchPlan, derive_seed, split_global_batch
from bigtrain.data.source import Samples
from bigtrain.devices import accelerator
from bigtrain.errors import ConfigError
from bigtrain.tensors.fake import fake_tensor
from bigtrain.tensors.tree import map_tensors, tree_tensors

Collate = Callable[[Sequence[Any]], Any]


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The samples of one forward pass of one rank."""

    inputs: Any
    """A tensor (rows, ...), or nested tuples, lists, mappings and dataclasses of tensors."""
    targets: Any
    """Of the same form as `inputs`; None if the batch has no targets."""
    count: int | float
    """Number of valid targets (`Loss.count`); 0 for padding, whose loss is multiplied by 0."""
    rows: int
    """Number of samples; 0 for padding."""
    totals: tuple[float, ...] | None = None
    """Sums over the global batch: the number of rows, then the divisor of each mean in the loss.
    None if the loss needs only `count`. See `losses.global_mean`."""
    dims: BatchDims | None = None
    """The batch dim of each tensor, in the order of `tensors`. None means that it is dim 0 of every
    tensor with `rows` entries there, and that all rows share the other tensors."""

    @property
    def padding(self) -> bool:
        """Whether this is padding, which makes the number of forward passes equal on all ranks."""
        return self.rows == 0

    @property
    def tokens_per_sample(self) -> int:
        """Number of targets per sample if the targets are integers (rows, seq); otherwise 1."""
        targets = self.targets
        if isinstance(targets, Tensor) and targets.dim() == 2 and not targets.is_floating_point():
            return targets.shape[1]
        return 1

    def tensors(self) -> list[Tensor]:
        """Return the tensors of the inputs, then those of the targets."""
        return tree_tensors((self.inputs, self.targets))

    def signature(self) -> str:
        """Return a text that determines all shapes in the model: dtypes and shapes of the batch."""
        batch = (self.inputs, self.targets)
        return repr(map_tensors(batch, lambda tensor: (tensor.dtype, tuple(tensor.shape))))

    def map(self, change: Callable[[Tensor], Any]) -> MicroBatch:
        """Return a copy with `change` applied to every tensor of the inputs and targets."""
        inputs, targets = (map_tensors(tree, change) for tree in (self.inputs, self.targets))
        return replace(self, inputs=inputs, targets=targets)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> MicroBatch:
        """Return the micro-batch on a device."""
        return self.map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def double(self) -> MicroBatch:
        """Return a copy with every floating-point tensor converted to fp64."""
        return self.map(lambda t: t.double() if t.is_floating_point() else t)

    def fake(self, device: torch.device, *, double: bool = False) -> MicroBatch:
        """Return a copy with empty tensors of the same shapes and strides on a device.

        Under torch's FakeTensorMode the tensors are fake: they occupy no memory.

        Args:
            device: the device of the new tensors.
            double: whether floating-point tensors become fp64.
        """
        return self.map(lambda tensor: fake_tensor(tensor, device, double=double))

    def row_dims(self) -> BatchDims:
        """Return the batch dim of each of `tensors`, in order; None if all rows share a tensor."""
        if self.dims is not None:
            return self.dims
        return tuple(0 if t.dim() and len(t) == self.rows else None for t in self.tensors())

    def map_rows(self, change: Callable[[Tensor, int], Tensor]) -> MicroBatch:
        """Return a copy with `change(tensor, dim)` applied to every tensor with a batch dim."""
        places = iter(self.row_dims())

        def changed(tensor: Tensor) -> Tensor:
            dim = next(places)
            return tensor if dim is None else change(tensor, dim)

        return self.map(changed)

    def part(self, start: int, stop: int) -> MicroBatch:
        """Return the rows from `start` to `stop`, as views.

        Tensors without a batch dim are kept whole. `count` and `totals` are not changed.
        """
        cut = self.map_rows(lambda tensor, dim: tensor.narrow(dim, start, stop - start))
        return replace(cut, rows=stop - start)

    def first_rows(self, rows: int, count: Callable[[Any], int | float]) -> MicroBatch:
        """Return the first `rows` rows, or all if there are fewer, without totals.

        Args:
            rows: the largest number of rows to return.
            count: returns the number of valid targets of the rows; see `Loss.count`.
        """
        cut = self.part(0, min(rows, self.rows))
        return replace(cut, count=count(cut.targets), totals=None)


SampleKey = tuple[int, int]
"""The epoch, counted from 0, and the index of a sample in the data set."""


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seed the generators that a transform may draw from inside a `with` block."""
    python, others = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        # Not torch.manual_seed: it would also seed the accelerator's generators, and so
        # change every dropout mask of a run that reads in the training process.
        torch.default_generator.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(others)


class SeededSamples(Dataset[Any]):
    """A data set read by (epoch, index), each sample under a seed derived from both.

    Which rank or loading process reads a sample depends on the mesh, but the model must see the
    same augmentation on every mesh. So the CPU generators of torch, Python and numpy are seeded by
    (seed, epoch, index) for each read, and restored after it.

    A data set with `deterministic = True` draws no random numbers. It is read without seeding, and
    through its `__getitems__` if it has one.

    Args:
        samples: the data set.
        seed: the seed of the run.
    """

    def __init__(self, samples: Samples, seed: int) -> None:
        self.samples = samples
        self.seed = seed

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, key: SampleKey) -> Any:
        epoch, index = key
        if getattr(self.samples, "deterministic", False):
            return self.samples[index]
        with _seeded(derive_seed(self.seed, epoch, index)):
            return self.samples[index]

    def __getitems__(self, keys: Sequence[SampleKey]) -> list[Any]:
        many = getattr(self.samples, "__getitems__", None)
        if many is not None and getattr(self.samples, "deterministic", False):
            return list(many([index for _, index in keys]))
        return [self[key] for key in keys]


@dataclass(frozen=True, slots=True)
class Step:
    """One rank's part of a global batch."""

    micro_batches: list[MicroBatch]
    """The micro-batches of this rank; all ranks that compute a loss have the same number."""
    samples: int
    """Number of rows of the global batch, over all ranks."""
    epoch: int
    """The epoch of the global batch, counted from 0."""
    last_in_epoch: bool
    """Whether the global batch is the last one of its epoch."""


@dataclass(frozen=True, slots=True)
class _StepPlan:
    epoch: int
    samples: int
    micro_batches: list[MicroBatchPlan]
    last_in_epoch: bool

    def sample_keys(self) -> Iterator[list[SampleKey]]:
        for plan in self.micro_batches:
            yield [(self.epoch, index) for index in plan.indices]


class StepLoader:
    """Yields the steps of one rank, endlessly, from a position in the global order.

    Each new iteration starts at `samples_seen`. The loader does not record how far an iteration is:
    the caller adds the `samples` of each `Step` to its position.

    Args:
        dataset: samples of (input, target).
        order: the global order; its seed is also that of the augmentation.
        count: returns how many of the targets, which are on the CPU, are valid (`Loss.count`).
        dp_rank: this rank's index among the ranks with different samples; None for a rank that
            computes no loss (`Plan.data_rank`), which gets one micro-batch of padding per step.
        dp_size: number of ranks with different samples.
        micro_batch_size: largest number of rows in a forward pass of one rank.
        samples_seen: number of global samples that earlier steps have used.
        on_read: called before the wait for each micro-batch, with the number of the micro-batch in
            the step, counted from 1; None to call nothing.
        workers: processes that read ahead; 0 to read in this process.
        pin_memory: whether to put batches in pinned memory, if there is a CUDA device.
        collate: makes (inputs, targets) of a list of samples; None for torch's default.

    Raises:
        ConfigError: a number is out of range.
    """

    def __init__(
        self,
        dataset: Samples,
        order: GlobalOrder,
        *,
        count: Callable[[Any], int | float],
        dp_rank: int | None = 0,
        dp_size: int = 1,
        micro_batch_size: int = 1,
        samples_seen: int = 0,
        on_read: Callable[[int], object] | None = None,
        workers: int = 0,
        pin_memory: bool = False,
        collate: Collate | None = None,
    ) -> None:
        _check_layout(dp_rank, dp_size, micro_batch_size)
        self.order = order
        self.samples_seen = samples_seen
        self._count = count
        self._on_read = on_read or (lambda _number: None)
        self._dp_rank, self._dp_size = dp_rank, dp_size
        self._micro_batch_size = micro_batch_size
        self._reader = _Reader(dataset, order.seed, workers, pin_memory, collate)

    def __iter__(self) -> Iterator[Step]:
        batches = self._reader.read(keys for plan in self._plans() for keys in plan.sample_keys())
        for plan in self._plans():
            micro_batches = []
            for number, part in enumerate(plan.micro_batches, start=1):
                self._on_read(number)
                micro_batches.append(_micro_batch(next(batches), part, self._count))
            yield Step(micro_batches, plan.samples, plan.epoch, plan.last_in_epoch)

    def _plans(self) -> Iterator[_StepPlan]:
        position = self.samples_seen
        while True:
            epoch, indices = self.order.batch_at(position)
            position += len(indices)
            ends = position % self.order.samples_per_epoch == 0
            micro_batches = split_global_batch(
                indices, self._dp_rank, self._dp_size, self._micro_batch_size
            )
            yield _StepPlan(epoch, len(indices), micro_batches, last_in_epoch=ends)


def validation_batches(
    dataset: Samples,
    *,
    count: Callable[[Any], int | float],
    dp_rank: int | None = 0,
    dp_size: int = 1,
    micro_batch_size: int = 1,
    workers: int = 0,
    pin_memory: bool = False,
    collate: Collate | None = None,
    seed: int = 0,
) -> Iterator[MicroBatch]:
    """Yield every validation sample exactly once over all ranks, in equally many micro-batches.

    The arguments are those of `StepLoader`. `seed` seeds data sets that draw random numbers.

    Raises:
        ConfigError: a number is out of range, or the data set is empty.
    """
    _check_layout(dp_rank, dp_size, micro_batch_size)
    if not len(dataset):
        raise ConfigError(
            "data.path: the validation set has 0 samples, at least 1 is needed. "
            "Add samples, or hold more of them out."
        )
    plans = split_global_batch(range(len(dataset)), dp_rank, dp_size, micro_batch_size)
    reader = _Reader(dataset, seed, workers, pin_memory, collate)
    batches = reader.read([(0, index) for index in plan.indices] for plan in plans)
    return (_micro_batch(batch, plan, count) for plan, batch in zip(plans, batches, strict=True))


def _check_layout(dp_rank: int | None, dp_size: int, micro_batch_size: int) -> None:
    if dp_rank is not None and not 0 <= dp_rank < dp_size:
        raise ConfigError(
            f"mesh.dp={dp_size}: rank {dp_rank} is not one of 0 to {dp_size - 1}. "
            "Launch as many ranks as the mesh has, or set mesh.dp=-1."
        )
    if micro_batch_size < 1:
        raise ConfigError(
            f"train.micro_batch_size={micro_batch_size}: at least 1 is needed. "
            "Set train.micro_batch_size=1."
        )


def _micro_batch(
    batch: Any, plan: MicroBatchPlan, count: Callable[[Any], int | float]
) -> MicroBatch:
    inputs, targets = batch
    if plan.padding:
        return MicroBatch(inputs, targets, count=0, rows=0)
    return MicroBatch(inputs, targets, count=count(targets), rows=len(plan.indices))


@dataclass(frozen=True)
class _Once:
    """A batch sampler for DataLoader: an iterable of lists of keys that is iterated only once."""

    keys: Iterable[list[SampleKey]]

    def __iter__(self) -> Iterator[list[SampleKey]]:
        return iter(self.keys)


@dataclass(frozen=True)
class _Reader:
    """A DataLoader with the settings that training and validation share."""

    dataset: Samples
    seed: int
    workers: int
    pin_memory: bool
    collate: Collate | None

    def read(self, keys: Iterable[list[SampleKey]]) -> Iterator[Any]:
        """Return an iterator of the batches of the keys; workers read a few batches ahead."""
        loader: DataLoader[Any] = DataLoader(
            SeededSamples(self.dataset, self.seed),
            batch_sampler=_Once(keys),
            num_workers=self.workers,
            pin_memory=self.pin_memory and accelerator() is not None,
            collate_fn=self.collate or default_collate,
            worker_init_fn=_start_worker if self.workers else None,
            # Without this, every new iterator would draw from torch's default generator, and so
            # change the random numbers of the training.
            generator=torch.Generator().manual_seed(0),
        )
        return iter(loader)


def _start_worker(worker: int) -> None:
    """Let a loading process ignore the signals that ask the *training* process to stop.

    A scheduler signals the whole process group. If a loading process ended at the signal, the
    training process would end before it has saved. Only a SIGTERM from the parent ends a
    loading process.
    """
    del worker
    for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if not hasattr(signal, "sigwaitinfo"):  # macOS cannot tell who sent a signal
        return
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    threading.Thread(target=_await_parent, args=(os.getppid(),), daemon=True).start()


def _await_parent(parent: int) -> None:
    while True:
        info = signal.sigwaitinfo({signal.SIGTERM})
        if info.si_pid == parent:
            os._exit(0)
