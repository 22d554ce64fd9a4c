"""The memory of a sliced model on real ranks equals that of a run on fake tensors, to the byte."""

import time
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from support.ranks import run_ranks
from support.sliced_models import WORDS, gpt_case, recompute, slice_group
from torch._subclasses.fake_tensor import FakeTensorMode

from bigtrain.memory.tracker import StorageTracker
from bigtrain.slicing.exchange import SliceGroup
from bigtrain.slicing.install import slice_modules, slice_tensors
from bigtrain.tensors.fake import fake_model

LENGTH = 9


class PatientTracker(StorageTracker):
    """Waits until gloo's thread releases sent tensors; on GPUs this is not needed."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if func.namespace == "c10d":
            result[-1].wait() if hasattr(result[-1], "wait") else None
            time.sleep(3e-3)
        return result


def tracked_sizes(group, mode, *, fake):
    """Bytes alive after the forward and after the backward pass, and the peak of each."""
    case = gpt_case(tied=False, length=LENGTH)
    torch.manual_seed(0)
    model = case.make().double()
    words, targets = (torch.randint(WORDS, (3, LENGTH)) for _ in range(2))
    tracker = StorageTracker(fake=True) if fake else PatientTracker()
    sizes = []
    with FakeTensorMode() if fake else nullcontext():
        if fake:
            model = fake_model(model, torch.device("cpu"), double=True)
            words, targets = (torch.empty(3, LENGTH, dtype=torch.long) for _ in range(2))
        slice_tensors(model, case.slices, group)
        slice_modules(model, case.slices, group)
        recompute(case.blocks(model), mode)
        with tracker:
            loss = F.cross_entropy(model(words).reshape(-1, WORDS), targets.reshape(-1))
            sizes += [tracker.live_bytes, tracker.peak_bytes]
            loss.backward()
            sizes += [tracker.live_bytes, tracker.peak_bytes]
    return sizes


def real_and_fake_sizes(context):
    """The tracked sizes of a real and of a fake run, by mode and sequence dim."""
    sizes = {}
    for sequence_dim in (None, 1):
        for mode in ("", "full", "selective"):
            group = slice_group(context, sequence_dim=sequence_dim)
            twin = SliceGroup(group.rank, group.size, sequence_dim=sequence_dim, gloo=True)
            sizes[sequence_dim, mode] = (
                tracked_sizes(group, mode, fake=False),
                tracked_sizes(twin, mode, fake=True),
            )
    return sizes


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_run_on_fake_tensors_has_the_memory_of_each_rank(ranks):
    for _ in range(3):  # gloo's thread may still be late
        results = run_ranks(real_and_fake_sizes, ranks, tp=ranks)
        if all(real == fake for sizes in results for real, fake in sizes.values()):
            break
    for sizes in results:
        for key, (real, fake) in sizes.items():
            assert real == fake, key
