"""The tests are of a machine without a GPU, also on one that has some."""

from __future__ import annotations

from collections.abc import MutableMapping

SHOWN = "BIGTRAIN_TEST_GPU"
"""Set to 1, it lets the tests see the machine's GPUs."""
_NONE = {
    "CUDA_VISIBLE_DEVICES": "",
    "HIP_VISIBLE_DEVICES": "",
    # An empty ZE_AFFINITY_MASK would hide nothing.
    "ONEAPI_DEVICE_SELECTOR": "opencl:cpu",
}


def hide_gpus(environ: MutableMapping[str, str]) -> None:
    """Hide them from torch and from all programs that are started; to be called before torch is."""
    if environ.get(SHOWN) != "1":
        environ.update(_NONE)
