"""A recording begins like a training run."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from bigtrain.verify import record


class SetupReached(Exception):  # noqa: N818
    """Raised at the end of the tested part."""


def test_a_rank_has_its_device_and_growing_segments_before_a_forecast(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[Any] = []
    device = torch.device("cuda", 1)

    def opened(*_: object) -> None:
        raise SetupReached

    monkeypatch.setattr(record, "grow_segments", calls.append)
    monkeypatch.setattr(record, "pick_device", lambda *_: device)
    monkeypatch.setattr(record, "set_current", calls.append)
    monkeypatch.setattr(record, "open_setup", opened)
    with pytest.raises(SetupReached):
        record.main(["--record", "nowhere", "train.global_batch_size=8"])
    assert calls == [os.environ, device]
