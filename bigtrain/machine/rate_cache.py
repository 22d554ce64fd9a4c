"""Rates that were measured on this node, kept for the next run."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import math
import os
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import torch

from bigtrain.devices import device_names
from bigtrain.errors import UnreadableError
from bigtrain.files.drafts import read_cache, say_damaged, write_cache
from bigtrain.machine.busy import CpuClock, others_cores, others_in_words
from bigtrain.machine.rates import (
    PRODUCT_TYPES,
    MeasuredRates,
    cpu_name,
    link_ranks,
    measure_rates,
    usable_cores,
)
from bigtrain.memory.disk import file_system, scratch_folder
from bigtrain.units import format_flops

WORTH_SAYING = 2.0
"""How many times faster products in bf16 are, from which on they are mentioned: less goes into
conversions."""


def measured_rates(again: bool = False, ranks: int | None = None) -> MeasuredRates:
    """The rates of this machine: as they were kept, or measured now, which takes some seconds.

    Args:
        again: measure, also where rates are kept.
        ranks: between which the links are measured; left out, see `link_ranks`.
    """
    cached = None if again else cached_rates(ranks)
    if cached is not None and not others_in_words(cached.others_cores):
        return cached
    clock = CpuClock()
    rates = measure_rates(link_ranks(ranks))
    if rates.device == "cpu":  # what a GPU reaches does not depend on others' cores
        rates = replace(rates, others_cores=others_cores([clock.read()]))
    if cached is not None and (cached.others_cores or 0.0) < (rates.others_cores or 0.0):
        rates = cached  # it was quieter then
    elif not rates.problems:  # what was in the way may be gone next time
        _keep(rates)
    busy = others_in_words(rates.others_cores)
    if busy:
        sys.stderr.write(
            f"the rates of this machine were measured {busy}: they are too low, and so is what is "
            "planned by them. They are measured again the next time, or on an idle machine with "
            "bigtrain doctor --again\n"
        )
    return rates


def faster_precision(flops: Mapping[str, float]) -> list[str]:
    """A line where the machine has bf16 products that are far faster than those of fp32.

    Args:
        flops: see `MeasuredRates`.
    """
    slow, fast = flops.get("fp32", 0.0), flops.get("bf16", 0.0)
    if not slow or fast < WORTH_SAYING * slow:
        return []
    return [
        f"bf16 products run at {format_flops(fast)}, those of fp32 at {format_flops(slow)} "
        f"({fast / slow:.1f} times): train.precision=bf16 uses them"
    ]


def cached_rates(ranks: int | None = None) -> MeasuredRates | None:
    """The rates that are kept for this hardware, torch and number of ranks; None without any."""
    entry = _entries().get(_key(link_ranks(ranks)))
    found = None if entry is None else _rates_of(entry.get("rates"))
    if entry is not None and found is None:
        say_damaged(cache_file(), "its entry for this machine holds no rates")
    return found


def cache_file() -> Path:
    """Where rates are kept."""
    folder = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(folder):  # the standard says: then it does not count
        folder = os.path.join(os.path.expanduser("~"), ".cache")
    return Path(folder) / "bigtrain" / "rates.json"


def hardware_fingerprint(ranks: int | None = None) -> dict[str, Any]:
    """What rates belong to, as JSON values.

    Args:
        ranks: see `measured_rates`.
    """
    scratch = None
    with contextlib.suppress(OSError):  # no folder takes files
        scratch = scratch_folder()
    return {
        "figures": [figure.name for figure in fields(MeasuredRates)],  # others in other versions
        "cpu": cpu_name(),
        "cores": usable_cores(),
        "memory": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "gpus": device_names(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "link_ranks": link_ranks(ranks),
        "scratch": [scratch, file_system(scratch) if scratch else None],
    }


def _key(ranks: int) -> str:
    return json.dumps(hardware_fingerprint(ranks), sort_keys=True)


def _entries() -> dict[str, dict[str, Any]]:
    """What is in the cache; a file that is damaged has nothing in it."""
    try:
        cache = read_cache(cache_file())
    except UnreadableError:
        return {}
    return {key: entry for key, entry in cache.items() if isinstance(entry, dict)}


def _rates_of(values: object) -> MeasuredRates | None:
    """Rates from JSON values; None where these are not rates."""
    names = {f.name for f in fields(MeasuredRates)}
    if not isinstance(values, dict) or set(values) != names or values["problems"] != {}:
        return None
    flops = values["flops"]
    if not isinstance(flops, dict) or {*flops} != {*PRODUCT_TYPES}:
        return None
    kinds = values["link_kinds"]
    if not isinstance(kinds, dict) or not all(_is_link(found) for found in kinds.values()):
        return None
    optional = {"to_device_bytes"} if values["device"] == "cpu" else set()
    scalar_names = names - {"device", "flops", "problems", "link_kinds", "others_cores"}
    numbers = [values[n] for n in scalar_names if not (n in optional and values[n] is None)]
    if not all(_is_positive(number) for number in (*numbers, *flops.values())):
        return None
    others = values["others_cores"]
    if others is not None and others != 0 and not _is_positive(others):
        return None
    if not isinstance(values["device"], str):
        return None
    return MeasuredRates(**values)


def _is_link(found: object) -> bool:
    names = {"latency", "bytes", "curve", "after_work", "issue"}
    if not isinstance(found, dict) or set(found) != names:
        return False
    for curve in (found["curve"], found["after_work"]):
        if not isinstance(curve, list) or not all(_is_point(point) for point in curve):
            return False
    is_issue = found["issue"] == 0 or _is_positive(found["issue"])
    return is_issue and _is_positive(found["latency"]) and _is_positive(found["bytes"])


def _is_point(point: object) -> bool:
    return isinstance(point, list | tuple) and len(point) == 2 and all(map(_is_positive, point))


def _is_positive(number: object) -> bool:
    if isinstance(number, bool) or not isinstance(number, int | float):
        return False
    return math.isfinite(number) and number > 0


def _keep(rates: MeasuredRates) -> None:
    """Write the rates beside those of other machines that share the folder.

    A folder that cannot be written costs the next process some seconds, and nothing else.
    """
    entries = _entries()
    entries[_key(rates.link_ranks)] = {
        "rates": asdict(rates),
        "measured": time.strftime("%Y-%m-%d %H:%M:%S"),
    }
    with contextlib.suppress(OSError):
        write_cache(cache_file(), entries, indent=1)


@contextlib.contextmanager
def lock_file(path: Path, timeout: float) -> Iterator[None]:
    """Hold a lock, which goes with the file descriptor, whatever becomes of the process.

    Where the file system knows no locks, it is as if one had it.

    Args:
        path: of the file, which is made.
        timeout: seconds to wait for others.

    Raises:
        OSError: it cannot be made, or others have had it for too long.
    """
    with path.open("a") as file:
        ends = time.monotonic() + timeout
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as error:
                if error.errno not in (errno.EAGAIN, errno.EACCES, errno.EINTR):
                    break  # no locks on this file system
                if time.monotonic() > ends:
                    raise
            time.sleep(0.02)
        yield
