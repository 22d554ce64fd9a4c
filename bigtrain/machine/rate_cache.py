"""Measure the rates of this machine, and cache them for later runs."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from typing import Any, get_args

import torch

from bigtrain.devices import accelerator, device_count
from bigtrain.files.drafts import say_damaged
from bigtrain.machine.busy import CpuClock, describe_others, others_cores
from bigtrain.machine.cache import Cache, device_fingerprint
from bigtrain.machine.cluster import CommOp, SharedOp
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

RATES = Cache("rates")
"""The rates of this machine, by hardware, version of torch and number of ranks."""
NOTABLE_SPEEDUP = 2.0
"""bf16 is recommended if its products are at least this many times faster than products in fp32.
With a smaller factor, conversions take up the time that the products gain."""


def measured_rates(again: bool = False, ranks: int | None = None) -> MeasuredRates:
    """Return the rates of this machine from the cache, or measure them, which takes some seconds.

    Cached rates that were measured while other programs used the machine are measured again. If the
    machine is busier in the new measurement, the cached rates are returned. A warning is printed if
    the returned rates were measured on a busy machine.

    Args:
        again: whether to measure even if rates are cached.
        ranks: the number of ranks between which links are measured; see `link_ranks`.
    """
    cached = None if again else cached_rates(ranks)
    if cached is not None and not describe_others(cached.others_cores):
        return cached
    clock = CpuClock()
    rates = measure_rates(link_ranks(ranks))
    if rates.device == "cpu":  # the speed of a GPU does not depend on other programs' cores
        rates = replace(rates, others_cores=others_cores([clock.read()]))
    if cached is not None and (cached.others_cores or 0.0) < (rates.others_cores or 0.0):
        rates = cached  # the machine was less busy at the earlier measurement
    elif not rates.problems:  # the next measurement may have no problems
        _store(rates)
    busy = describe_others(rates.others_cores)
    if busy:
        sys.stderr.write(
            f"the rates of this machine were measured {busy}: they are too low, and so is every "
            "forecast of seconds by them. They are measured again at the next use, or on an idle "
            "machine with: bigtrain doctor --again\n"
        )
    return rates


def faster_precision(flops: Mapping[str, float]) -> list[str]:
    """Return a line of advice if products in bf16 are far faster than in fp32; otherwise nothing.

    Args:
        flops: the operations per second by precision; see `MeasuredRates`.
    """
    fp32, bf16 = flops.get("fp32", 0.0), flops.get("bf16", 0.0)
    if not fp32 or bf16 < NOTABLE_SPEEDUP * fp32:
        return []
    return [
        f"bf16 products run at {format_flops(bf16)}, fp32 products at {format_flops(fp32)} "
        f"({bf16 / fp32:.1f} times): train.precision=bf16 uses them"
    ]


def cached_rates(ranks: int | None = None) -> MeasuredRates | None:
    """Return the cached rates of this machine; None if there are none for its fingerprint.

    Args:
        ranks: see `measured_rates`.
    """
    entry = RATES.read().get(_key(link_ranks(ranks)))
    if entry is None:
        return None
    rates = _rates_of(entry.get("rates")) if isinstance(entry, dict) else None
    if rates is None:
        say_damaged(RATES.path, "its entry for this machine holds no rates")
    return rates


def rates_fingerprint(ranks: int | None = None) -> dict[str, Any]:
    """Return the hardware, versions and number of ranks to which rates belong, as JSON values.

    Args:
        ranks: see `measured_rates`.
    """
    scratch = None
    with contextlib.suppress(OSError):  # raised if no temporary folder is writable
        scratch = scratch_folder()
    return {
        **device_fingerprint(accelerator() or "cpu"),
        # Versions of bigtrain differ in the figures.
        "figures": [figure.name for figure in fields(MeasuredRates)],
        "exchanges": [*get_args(CommOp), *get_args(SharedOp)],
        "waits": "counters in shared memory",  # as opposed to messages of gloo
        "cpu": cpu_name(),
        "cores": usable_cores(),
        "memory": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "gpus": device_count(),
        "cuda": torch.version.cuda,
        "link_ranks": link_ranks(ranks),
        "scratch": [scratch, file_system(scratch) if scratch else None],
    }


def _key(ranks: int) -> str:
    return json.dumps(rates_fingerprint(ranks), sort_keys=True)


def _rates_of(values: object) -> MeasuredRates | None:
    """Return rates from JSON values; None if the values are not complete rates."""
    names = {f.name for f in fields(MeasuredRates)}
    if not isinstance(values, dict) or set(values) != names or values["problems"] != {}:
        return None
    flops = values["flops"]
    if not isinstance(flops, dict) or {*flops} != {*PRODUCT_TYPES}:
        return None
    kinds = values["link_kinds"]
    if not isinstance(kinds, dict) or not all(map(_is_link, kinds.values())):
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


def _is_link(figures: object) -> bool:
    names = {"latency", "bytes", "curve", "after_work", "work", "issue"}
    if not isinstance(figures, dict) or set(figures) != names:
        return False
    for curve in (figures["curve"], figures["after_work"]):
        if not isinstance(curve, list) or not all(_is_point(point) for point in curve):
            return False
    may_be_zero = (figures["work"], figures["issue"])
    are_seconds = all(number == 0 or _is_positive(number) for number in may_be_zero)
    return are_seconds and _is_positive(figures["latency"]) and _is_positive(figures["bytes"])


def _is_point(point: object) -> bool:
    return isinstance(point, list | tuple) and len(point) == 2 and all(map(_is_positive, point))


def _is_positive(number: object) -> bool:
    if isinstance(number, bool) or not isinstance(number, int | float):
        return False
    return math.isfinite(number) and number > 0


def _store(rates: MeasuredRates) -> None:
    """Add the rates to the cache, which may also have entries of other machines."""
    entry = {"rates": asdict(rates), "measured": time.strftime("%Y-%m-%d %H:%M:%S")}
    RATES.update(lambda entries: entries.update({_key(rates.link_ranks): entry}))
