"""A cluster as the planner sees it: the figures of its devices, its nodes and its links.

The figures come from a file, by name from configs/clusters or by path, so that a plan can be made
for other machines. `machine.local_cluster` measures those of this machine. This module does not
import torch.
"""

from __future__ import annotations

import math
from types import UnionType
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, Field, ValidationError, model_validator

from bigtrain.errors import ConfigError, did_you_mean
from bigtrain.job.presets import ConfigTree, preset_names, read_preset
from bigtrain.job.schema import ConfigSection, Precision
from bigtrain.units import format_bytes, parse_bytes

CommOp = Literal["all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "send"]

PRESET_FOLDER = "clusters"
"""The folder of the files that come with bigtrain, below configs/."""


def _size(value: object) -> int:
    """Return the bytes of '80GB', '79.1GiB' or a number, which may be written like 80e9."""
    number = _number(value)
    if isinstance(number, float) and math.isfinite(number):
        return int(number)
    if not isinstance(value, str):
        raise ValueError("is not a size in bytes; write it like 80GiB or 80e9")
    try:
        return parse_bytes(value)
    except ConfigError:
        raise ValueError("is not a size in bytes; write it like 80GiB or 80e9") from None


def _number(value: object) -> object:
    """Return a number that YAML reads as text (3e12) as a float; refuse `true`, which is no 1."""
    if isinstance(value, bool) or value is None:
        raise ValueError("is not a number; write it like 3.35e12")
    if isinstance(value, (int, float)):
        return float(value)
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value


ByteCount = Annotated[int, BeforeValidator(_size), Field(gt=0)]
"""Bytes, written '80GiB', '141GB' or as a number."""
PositiveNumber = Annotated[float, BeforeValidator(_number), Field(gt=0, allow_inf_nan=False)]
Efficiency = Annotated[float, BeforeValidator(_number), Field(gt=0, le=1)]
StrictCount = Annotated[int, Field(ge=1, strict=True)]


class Flops(ConfigSection):
    """Floating-point operations per second of one device, by precision; dense, no sparsity."""

    fp32: PositiveNumber
    bf16: PositiveNumber
    fp64: PositiveNumber | None = None

    def of(self, precision: Precision) -> float:
        """Return the peak in a precision.

        Raises:
            ConfigError: the cluster's file does not have it.
        """
        peak: float | None = getattr(self, precision)
        if peak is None:
            raise ConfigError(
                f"train.precision={precision}: the cluster has no device.flops.{precision}. "
                f"Write device.flops.{precision} into its file, or use train.precision=fp32."
            )
        return peak


class DeviceSpec(ConfigSection):
    """One device: a GPU, or a rank's part of a node that computes on its CPU."""

    name: str
    kind: Literal["cuda", "cpu"]
    memory: ByteCount
    """Bytes that a process can use; on a CPU a rank's share of the host's memory."""
    reserved: ByteCount
    """Bytes of `memory` that are no tensors: context, workspaces, communicators."""
    flops: Flops
    """Peaks as in the data sheet. On a node whose ranks share one device (`node.shared`) these,
    and the memory's bandwidth, are the whole node's."""
    efficiency: Efficiency = 0.55
    """The share of the peak that large products reach. The default is an assumption, similar to
    the reported values of large models; 1 if `flops` was measured."""
    memory_bandwidth: PositiveNumber
    """Bytes per second, read and written bytes added."""
    launch: PositiveNumber
    """Seconds that the smallest operation takes."""
    processors: StrictCount | None = None
    """A GPU's streaming multiprocessors, over which the tiles of a product are distributed: see
    `products.product_efficiency`. Null: products of every size reach the same rate."""

    @model_validator(mode="after")
    def _leaves_memory(self) -> DeviceSpec:
        if self.reserved >= self.memory:
            raise ValueError(
                f"device.reserved={format_bytes(self.reserved)} leaves nothing of device.memory="
                f"{format_bytes(self.memory)}; write less"
            )
        return self

    @property
    def usable(self) -> int:
        """Bytes that tensors may use."""
        return self.memory - self.reserved


class NodeSpec(ConfigSection):
    """One node."""

    devices: StrictCount
    """Devices, and so ranks, of one node."""
    host_memory: ByteCount
    """Bytes of the host's memory."""
    host_link: PositiveNumber | None = None
    """Bytes per second between one device and the host's memory, in each direction, while all
    devices of the node copy; null on a CPU, which is the host."""
    host_bandwidth: PositiveNumber = 2.0e11
    """Bytes per second of the host's memory, read and written bytes added, while all ranks update
    parameters there. The default is an assumption, typical of one server."""
    disk_write: PositiveNumber | None = None
    """Bytes per second to the node's disks, all ranks together; null if unknown."""
    disk_read: PositiveNumber | None = None
    """Bytes per second from the node's disks, all ranks together; null if unknown."""
    shared: bool = False
    """Whether the ranks of a node share one device's processor: true on a CPU."""
    cores: StrictCount | None = None
    """On a shared node, the number of ranks that can compute at full speed at once; more ranks
    share the cores. Null: as many as there are devices."""


class LinkSpec(ConfigSection):
    """Measured figures of one kind of exchange over a link; see `collective_seconds`."""

    latency: PositiveNumber
    """Seconds of each step of its ring or chain."""
    bandwidth: PositiveNumber
    """Bytes per second that the busiest rank sends."""
    ranks: StrictCount = 2
    """The number of ranks, on one node, between which the curve was measured."""
    curve: list[tuple[PositiveNumber, PositiveNumber]] = Field(default_factory=list)
    """Pairs of the bytes of a whole exchange and its seconds, ascending. Between its ends the curve
    replaces latency and bandwidth."""
    after_work: list[tuple[PositiveNumber, PositiveNumber]] = Field(default_factory=list)
    """The curve for ranks that computed since the last exchange, and so wait for each other."""
    issue: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Additional seconds on the CPU: of an all-gather or a reduce-scatter in the hooks of
    `fully_shard`, of a send in an action of a pipeline's schedule. On a GPU they overlap with its
    computation."""


class Link(ConfigSection):
    """The link between two devices."""

    latency: PositiveNumber
    """Seconds until the first byte arrives."""
    bandwidth: PositiveNumber
    """Bytes per second and device, each direction, as in the data sheet."""
    efficiency: Efficiency = 0.8
    """The share of the bandwidth that large messages reach. The default is an assumption; 1 if
    `bandwidth` was measured."""
    kinds: dict[CommOp, LinkSpec] = Field(default_factory=dict)
    """Figures of the exchanges that were measured separately; others use those of the link."""

    def of(self, kind: CommOp) -> Link:
        """Return the link with the figures of one kind of exchange."""
        measured = self.kinds.get(kind)
        if measured is None:
            return self
        return Link(latency=measured.latency, bandwidth=measured.bandwidth, efficiency=1.0)

    @property
    def rate(self) -> float:
        """Bytes per second and device, each direction, that large messages reach."""
        return self.bandwidth * self.efficiency


class Cluster(ConfigSection):
    """Equal nodes of equal devices."""

    name: str
    source: str
    """The source of the figures."""
    caveat: str = ""
    """Why the figures may be wrong; printed with every forecast of seconds by them."""
    device: DeviceSpec
    node: NodeSpec
    inside: Link
    """Between the devices of a node."""
    between: Link | None = None
    """Between devices of different nodes; null if there is one node."""

    @model_validator(mode="after")
    def _has_host_link(self) -> Cluster:
        if self.device.kind == "cuda" and self.node.host_link is None:
            raise ValueError(
                "node.host_link is missing: device.kind is cuda, and offloaded tensors are copied "
                "over it; write its bytes per second and device, as 25e9"
            )
        return self


def cluster_names() -> list[str]:
    """Return the names of the clusters that come with bigtrain."""
    return preset_names(PRESET_FOLDER)


def load_cluster(name_or_path: str) -> Cluster:
    """Read a cluster.

    Args:
        name_or_path: one of `cluster_names`, or the path of a YAML file.

    Raises:
        ConfigError: there is no such cluster, a figure is missing or no positive number, or a key
            is unknown; the message has the file, the key and the fix.
    """
    tree = read_preset(PRESET_FOLDER, name_or_path, "--cluster")
    is_name = name_or_path in cluster_names()
    shown = f"{PRESET_FOLDER}/{name_or_path}.yaml" if is_name else name_or_path
    try:
        return Cluster.model_validate(tree.values)
    except ValidationError as error:
        raise ConfigError(_refusal(error, tree, shown)) from None


def _refusal(error: ValidationError, tree: ConfigTree, shown: str) -> str:
    """One line for the first of pydantic's complaints: file and line, key, reason, fix."""
    first = error.errors()[0]
    path = tuple(str(part) for part in first["loc"])
    origin, key = tree.origin(path) or shown, ".".join(path)
    if first["type"] == "extra_forbidden":
        known = _keys_at(path[:-1])
        return (
            f"{origin}: a cluster has no key {key!r}{did_you_mean(path[-1], known)} "
            f"Known there: {', '.join(known)}."
        )
    if first["type"] == "missing":
        return f"{origin}: {key} is missing. Write it; {_known_keys(path)}."
    reason = str(first["msg"]).removeprefix("Value error, ")
    if _keys_at(path) and first["type"] == "value_error":  # a check of several keys names them
        return f"{origin}: {reason}."
    return f"{origin}: {key}: {reason[:1].lower()}{reason[1:]} (got {first['input']!r})."


def _known_keys(path: tuple[str, ...]) -> str:
    section = ".".join(path[:-1]) or "a cluster"
    return f"{section} has the keys {', '.join(_keys_at(path[:-1]))}"


def _keys_at(path: tuple[str, ...]) -> list[str]:
    kind: type[BaseModel] = Cluster
    for key in path:
        annotation = kind.model_fields[key].annotation if key in kind.model_fields else None
        inner = _section(annotation)
        if inner is None:
            return []
        kind = inner
    return list(kind.model_fields)


def _section(annotation: Any) -> type[BaseModel] | None:
    """The section of a field, if it is one: `Link | None` is a `Link`."""
    kinds = get_args(annotation) if get_origin(annotation) is UnionType else (annotation,)
    for kind in kinds:
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return kind
    return None
