"""Describe this machine as a cluster of one node, by the rates that were measured on it."""

from __future__ import annotations

import os
import platform
from typing import Literal

import torch

from bigtrain.devices import capacity_bytes, device_count, device_names, processors
from bigtrain.errors import ConfigError
from bigtrain.machine.busy import describe_others
from bigtrain.machine.cluster import Cluster, DeviceSpec, Flops, Link, NodeSpec
from bigtrain.machine.rate_cache import cached_rates, measured_rates
from bigtrain.machine.rates import MeasuredRates, cpu_name, usable_cores
from bigtrain.units import GIB, MIB, format_bytes

LAUNCH_SECONDS = {"cuda": 5e-6, "cpu": 5e-6}
"""Seconds of the smallest operation that is issued from Python; an assumption."""
MAX_LINKED_RANKS = 8
"""The most ranks on one CPU between which links are measured. The links between more ranks are
assumed to be as fast."""
PROCESS_BYTES = {"cuda": 2 * GIB, "cpu": 512 * MIB}
"""Bytes of a process without tensors; an assumption. On a CPU it is the interpreter with torch."""


def measure_local_cluster(ranks: int | None = None) -> Cluster:
    """Return this machine as a cluster.

    If the rates of this machine are not cached, they are measured, which takes some seconds.

    Args:
        ranks: the number of ranks that share the CPU; None means one rank for each core. On a
            machine with GPUs there is one rank for each GPU.

    Raises:
        ConfigError: a rate could not be measured.
    """
    rates = measured_rates(ranks=None if ranks is None else min(ranks, MAX_LINKED_RANKS))
    host = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if rates.device != "cpu":
        memory, name = capacity_bytes(torch.device(rates.device, 0)), device_names()[0]
        return cluster_from_rates(
            rates,
            devices=device_count(),
            device_memory=memory,
            host_memory=host,
            device_name=name,
            device_processors=processors(0),
        )
    return cluster_from_rates(rates, devices=ranks or usable_cores(), host_memory=host)


def cached_local_cluster(ranks: int, device_type: str) -> Cluster | None:
    """Return this machine as a cluster by its cached rates. Nothing is measured.

    Args:
        ranks: the number of ranks on this machine.
        device_type: the type of the ranks' devices.

    Returns:
        The cluster; None if no rates are cached, or only rates of another type of device.

    Raises:
        ConfigError: see `cluster_from_rates`.
    """
    rates = cached_rates(min(ranks, MAX_LINKED_RANKS)) or cached_rates()
    if rates is None or rates.device != device_type:
        return None
    host = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if device_type == "cpu":
        return cluster_from_rates(rates, devices=ranks, host_memory=host)
    memory, name = capacity_bytes(torch.device(device_type, 0)), device_names()[0]
    return cluster_from_rates(
        rates,
        devices=ranks,
        device_memory=memory,
        host_memory=host,
        device_name=name,
        device_processors=processors(0),
    )


def cluster_from_rates(
    rates: MeasuredRates,
    *,
    devices: int,
    host_memory: int,
    device_memory: int | None = None,
    device_name: str | None = None,
    device_processors: int | None = None,
) -> Cluster:
    """Return a cluster of one node with these rates.

    Args:
        rates: the rates of this machine.
        devices: the number of GPUs of the node, or of ranks that share its CPU.
        host_memory: bytes of the host's memory.
        device_memory: bytes of a GPU's memory; None on a CPU, where each rank has an equal share
            of the host's memory.
        device_name: the GPU's name; None means the name of the CPU.
        device_processors: the number of a GPU's multiprocessors. Products that do not use all of
            them do not reach the measured rate. None means that all products reach it.

    Raises:
        ConfigError: a needed rate could not be measured, or the memory is too small.
    """
    kind: Literal["cuda", "cpu"] = "cpu" if rates.device == "cpu" else "cuda"
    if kind == "cuda" and device_memory is None:
        raise ConfigError("device_memory is missing: a GPU needs it. Pass its bytes.")
    memory = device_memory or host_memory // devices
    if memory <= PROCESS_BYTES[kind]:
        raise ConfigError(
            f"--devices {devices}: each has {format_bytes(memory)} of this machine's "
            f"{format_bytes(host_memory)}, and a process without tensors takes "
            f"{format_bytes(PROCESS_BYTES[kind])}. "
            f"Use --devices {max(1, host_memory // PROCESS_BYTES[kind] - 1)} or fewer, "
            "or --cluster and a file."
        )
    copy_rate = _needed(rates, "memory", rates.copy_bytes)
    flops = {name: _needed(rates, "compute", rates.flops.get(name)) for name in ("fp32", "bf16")}
    return Cluster(
        name="here",
        source=f"measured on {platform.node() or 'this machine'} by bigtrain doctor",
        caveat=describe_others(rates.others_cores),
        device=DeviceSpec(
            name=device_name or cpu_name(),
            kind=kind,
            memory=memory,
            reserved=PROCESS_BYTES[kind],
            flops=Flops(fp32=flops["fp32"], bf16=flops["bf16"]),
            efficiency=1.0,
            memory_bandwidth=2 * copy_rate,  # each byte is read and written
            launch=LAUNCH_SECONDS[kind],
            processors=device_processors,
        ),
        node=NodeSpec(
            devices=devices,
            host_memory=host_memory,
            host_link=_needed(rates, "device", rates.to_device_bytes) if kind == "cuda" else None,
            disk_write=rates.disk_write_bytes,
            disk_read=rates.disk_read_bytes,
            shared=kind == "cpu",
            cores=usable_cores() if kind == "cpu" else None,
        ),
        inside=_link(rates),
    )


def _link(rates: MeasuredRates) -> Link:
    """Return the link, with the latency of a whole exchange divided by its number of steps."""
    ring = rates.link_ranks - 1
    steps = {"all_reduce": 2 * ring, "send": 1}
    latency = _needed(rates, "link", rates.link_latency) / steps["all_reduce"]
    kinds = {
        kind: {
            "latency": figures["latency"] / steps.get(kind, ring),
            "bandwidth": figures["bytes"],
            "ranks": rates.link_ranks,
            **{key: figures[key] for key in ("curve", "after_work", "work", "issue")},
        }
        for kind, figures in rates.link_kinds.items()
    }
    base = {"latency": latency, "bandwidth": _needed(rates, "link", rates.link_bytes)}
    return Link.model_validate({**base, "efficiency": 1.0, "kinds": kinds})


def _needed(rates: MeasuredRates, part: str, rate: float | None) -> float:
    if rate is None:
        reason = rates.problems.get(part, "no reason is known")
        raise ConfigError(
            f"the rates of this machine have no {part}: {reason}. Run `bigtrain doctor --again`, "
            "or plan with --cluster and a file."
        )
    return rate
