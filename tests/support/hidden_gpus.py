"""Hide the GPUs of the machine, so that the tests run on CPUs everywhere."""

from __future__ import annotations

from collections.abc import MutableMapping

SHOWN = "BIGTRAIN_TEST_GPU"
"""If this variable is 1, the tests see the machine's GPUs."""
_NONE = {
    "CUDA_VISIBLE_DEVICES": "",
    "HIP_VISIBLE_DEVICES": "",
    # An empty ZE_AFFINITY_MASK would not hide anything.
    "ONEAPI_DEVICE_SELECTOR": "opencl:cpu",
}


def hide_gpus(environ: MutableMapping[str, str]) -> None:
    """Hide GPUs from torch and from child processes. Call this before torch is imported."""
    if environ.get(SHOWN) != "1":
        environ.update(_NONE)
