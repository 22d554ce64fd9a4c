"""Optimizers that update a parameter in chunks run few of the chunks of a fake tensor."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from bigtrain.optim import lean_adamw
from bigtrain.optim.lean_adamw import chunks
from bigtrain.tensors.op_cost import REPEAT_COUNT


@pytest.mark.parametrize("rest", [0, 1])
@pytest.mark.parametrize("whole", [1, 2, 3, 40])
def test_few_chunks_stand_for_all(whole: int, rest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lean_adamw, "CHUNK_ELEMENTS", 4)
    real = torch.empty(4 * whole + rest)
    every = [part.stop - part.start for part in chunks(real)]
    assert sum(every) == len(real)
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(real)
        few = [(part.stop - part.start, REPEAT_COUNT.get()) for part in chunks(fake)]
    assert len(few) <= 3
    assert sorted(every) == sorted(n for n, times in few for _ in range(times))
