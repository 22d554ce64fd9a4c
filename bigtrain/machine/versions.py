"""Describe the hardware and the versions to which a measurement belongs."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any

from bigtrain.devices import device_count, device_names, driver_versions
from bigtrain.errors import UnreadableError
from bigtrain.files.regular import is_there, read_text

_DRIVER_MODULE = Path("/sys/module/nvidia/version")
_LIBRARIES = ("torch", "deepspeed", "fairscale")


def installed_version(name: str) -> str | None:
    """Return the version of an installed library without importing it; None if it is missing."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _driver() -> dict[str, str]:
    """Return the version of NVIDIA's driver from its kernel module; torch does not report it."""
    if not is_there(_DRIVER_MODULE):
        return {}
    with contextlib.suppress(UnreadableError):
        return {"driver": read_text(_DRIVER_MODULE).strip()}
    return {}


def hardware_and_versions() -> dict[str, Any]:
    """Return the hardware and the versions of this machine, as JSON values."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    gpus = f"{device_count()} x {device_names()[0]}" if device_count() else "no GPU"
    return {
        "hardware": f"{os.cpu_count()} cores, {platform.machine()}, {memory:.0f} GiB, {gpus}",
        "python": platform.python_version(),
        "versions": {
            **{name: installed_version(name) for name in _LIBRARIES},
            **driver_versions(),
            **_driver(),
        },
    }
