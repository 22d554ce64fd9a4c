"""The random states of a process, as JSON values."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from bigtrain import devices


def random_state() -> dict[str, Any]:
    """The process's random states as JSON values: Python's, numpy's where in use, torch's."""
    import numpy as np

    name, keys, *rest = np.random.get_state(legacy=True)
    version, internal, gauss = random.getstate()
    state: dict[str, Any] = {
        "python": [version, list(internal), gauss],
        "numpy": [str(name), np.asarray(keys).tolist(), *rest],
        "torch": torch.get_rng_state().numpy().tobytes().hex(),
    }
    if kind := devices.accelerator():
        own = devices.generator_states(kind)
        state[kind] = [one.numpy().tobytes().hex() for one in own]
    return state


def set_random_state(state: Mapping[str, Any]) -> None:
    """Put back what `random_state` took."""
    import numpy as np

    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, np.asarray(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(_bytes_tensor(state["torch"]))
    if (kind := devices.accelerator()) and kind in state:
        # Fewer devices than then: the stages lie elsewhere, and draw anew.
        own = (
            [state[kind]] if isinstance(state[kind], str) else state[kind]
        )  # of one device alone: older
        for number, one in enumerate(own[: devices.device_count()]):
            devices.set_generator_state(_bytes_tensor(one), torch.device(kind, number))


def _bytes_tensor(text: str) -> Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)
