"""Random states of a process as JSON values."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from bigtrain import devices


def random_state() -> dict[str, Any]:
    """Return the random states of Python, numpy and torch, with those of all accelerators.

    The state of this rank's accelerator is also in `own`. A process that resumes may see it at
    another index.
    """
    import numpy as np

    name, keys, *rest = np.random.get_state(legacy=True)
    version, internal, gauss = random.getstate()
    state: dict[str, Any] = {
        "python": [version, list(internal), gauss],
        "numpy": [str(name), np.asarray(keys).tolist(), *rest],
        "torch": torch.get_rng_state().numpy().tobytes().hex(),
    }
    if kind := devices.accelerator():
        states = devices.generator_states(kind)
        state[kind] = [device_state.numpy().tobytes().hex() for device_state in states]
        state["own"] = state[kind][devices.current_device(kind).index]
    return state


def set_random_state(state: Mapping[str, Any]) -> None:
    """Restore the random states that `random_state` returned."""
    import numpy as np

    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, np.asarray(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(_bytes_tensor(state["torch"]))
    if (kind := devices.accelerator()) and kind in state:
        # There may be fewer devices than at the save. Pipeline stages of missing devices are on
        # other devices, and draw other random numbers.
        states = (
            [state[kind]] if isinstance(state[kind], str) else state[kind]
        )  # an older version saved the state of one device
        for number, generator_state in enumerate(states[: devices.device_count()]):
            devices.set_generator_state(_bytes_tensor(generator_state), torch.device(kind, number))
        if "own" in state:  # this rank's device may have had another index at the save
            own_device = devices.current_device(kind)
            devices.set_generator_state(_bytes_tensor(state["own"]), own_device)


def _bytes_tensor(text: str) -> Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)
