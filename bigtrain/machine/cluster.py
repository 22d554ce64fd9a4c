"""A cluster as the planner sees it: the figures of its devices, its nodes and its links.

Figures come from a file, by name from configs/clusters or by path, so that a plan can be made
for machines that are not at hand; `machine.local_cluster` has those of this machine. Nothing here
imports torch.
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
"""The folder of the files that come along, below configs/."""


def _size(value: object) -> int:
    """Bytes of '80GB', '79.1GiB' or a number; a number may be written like 80e9."""
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
    """Numbers as they are meant: YAML reads 3e12 as a word, and `true` is no 1."""
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
        """The peak in a precision.

        Raises:
            ConfigError: the cluster does not say.
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
    """Bytes that a process finds; on a CPU a rank's share of the host's."""
    reserved: ByteCount
    """Bytes of it that are no tensors: context, workspaces, communicators."""
    flops: Flops
    """Peaks as in the data sheet. On a node whose ranks share one device (`node.shared`) these,
    and the memory's bandwidth, are the whole node's."""
    efficiency: Efficiency = 0.55
    """The share of the peak that large products reach. The default is an assumption, of the order
    of what is reported of large models; 1 where `flops` was measured."""
    memory_bandwidth: PositiveNumber
    """Bytes per second, those read and those written together."""
    launch: PositiveNumber
    """Seconds that an operation takes at least, however small."""
    processors: StrictCount | None = None
    """Of a GPU, its streaming multiprocessors: they share out the tiles of a product, see
    `step_time.product_efficiency`. Null: products of every size reach the same rate."""

    @model_validator(mode="after")
    def _leaves_room(self) -> DeviceSpec:
        if self.reserved >= self.memory:
            raise ValueError(
                f"device.reserved={format_bytes(self.reserved)} leaves nothing of device.memory="
                f"{format_bytes(self.memory)}; write less"
            )
        return self

    @property
    def usable(self) -> int:
        """Bytes that tensors may take."""
        return self.memory - self.reserved


class NodeSpec(ConfigSection):
    """One node."""

    devices: StrictCount
    """Devices, and so ranks, of one node."""
    host_memory: ByteCount
    """Bytes of the host's memory."""
    host_link: PositiveNumber | None = None
    """Bytes per second between a device and the host's memory, each way, while all devices of the
    node do so; null on a CPU, which is the host."""
    host_bandwidth: PositiveNumber = 2.0e11
    """Bytes per second of the host's memory, those read and those written together, while all
    ranks update there. The default is an assumption, of the order of what one server has."""
    disk_write: PositiveNumber | None = None
    """Bytes per second to the node's disks, all ranks together; null where nobody knows."""
    disk_read: PositiveNumber | None = None
    shared: bool = False
    """Whether the ranks of a node share one device's computing: true on a CPU."""
    cores: StrictCount | None = None
    """Of a node that is shared: how many ranks compute at once at full speed; more of them take
    turns. Null for as many as there are devices."""


class LinkSpec(ConfigSection):
    """What one kind of exchange reaches over a link, in the terms of `collective_seconds`."""

    latency: PositiveNumber
    """Seconds of each step of its ring or chain."""
    bandwidth: PositiveNumber
    """Bytes per second that the busiest rank sends."""
    ranks: StrictCount = 2
    """Between so many ranks, on one node, the curve was measured."""
    curve: list[tuple[PositiveNumber, PositiveNumber]] = Field(default_factory=list)
    """Bytes of a whole exchange and its seconds, ascending: what its size makes of the two figures
    above."""
    after_work: list[tuple[PositiveNumber, PositiveNumber]] = Field(default_factory=list)
    """The same where ranks have computed since the last exchange, so that one waits for another."""
    issue: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Seconds beside it: of an all-gather and a reduce-scatter in the hooks of `fully_shard`, of a
    send in an action of a pipeline's schedule. On a GPU they hide behind what it computes."""


class Link(ConfigSection):
    """How two devices talk."""

    latency: PositiveNumber
    """Seconds until the first byte is there."""
    bandwidth: PositiveNumber
    """Bytes per second and device, each direction, as in the data sheet."""
    efficiency: Efficiency = 0.8
    """The share of it that large messages reach. The default is an assumption; 1 where
    `bandwidth` was measured."""
    kinds: dict[CommOp, LinkSpec] = Field(default_factory=dict)
    """Of exchanges that were measured by themselves; the others have the figures above."""

    def of(self, kind: CommOp) -> Link:
        """The link as one kind of exchange finds it."""
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
    """Where the figures come from."""
    caveat: str = ""
    """Why they may be wrong; said wherever seconds are told by them."""
    device: DeviceSpec
    node: NodeSpec
    inside: Link
    """Between the devices of a node."""
    between: Link | None = None
    """Between devices of different nodes; null where there is one node."""

    @model_validator(mode="after")
    def _has_a_way_to_the_host(self) -> Cluster:
        if self.device.kind == "cuda" and self.node.host_link is None:
            raise ValueError(
                "node.host_link is missing: device.kind is cuda, and what is offloaded goes over "
                "it; write its bytes per second and device, as 25e9"
            )
        return self


def cluster_names() -> list[str]:
    """The names of the clusters that come along."""
    return preset_names(PRESET_FOLDER)


def load_cluster(name_or_path: str) -> Cluster:
    """Read a cluster.

    Args:
        name_or_path: one of `cluster_names`, or the path of a YAML file.

    Raises:
        ConfigError: there is no such cluster, a figure is missing, is no positive number, or is
            one that nobody knows; with the file, the key and the fix.
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
    place, key = tree.origin(path) or shown, ".".join(path)
    if first["type"] == "extra_forbidden":
        known = _keys_at(path[:-1])
        return (
            f"{place}: a cluster has no key {key!r}{did_you_mean(path[-1], known)} "
            f"Known there: {', '.join(known)}."
        )
    if first["type"] == "missing":
        return f"{place}: {key} is missing. Write it; {_known_there(path)}."
    reason = str(first["msg"]).removeprefix("Value error, ")
    if _keys_at(path) and first["type"] == "value_error":  # a check across keys, which names them
        return f"{place}: {reason}."
    return f"{place}: {key}: {reason[:1].lower()}{reason[1:]} (got {first['input']!r})."


def _known_there(path: tuple[str, ...]) -> str:
    where = ".".join(path[:-1]) or "a cluster"
    return f"{where} has the keys {', '.join(_keys_at(path[:-1]))}"


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
    """The section that a field holds, where it holds one: `Link | None` is a Link."""
    kinds = get_args(annotation) if get_origin(annotation) is UnionType else (annotation,)
    for kind in kinds:
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return kind
    return None
