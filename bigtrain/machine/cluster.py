"""A cluster as the planner sees it: the figures of its devices, its nodes and its links.

The figures come from a file, so that a plan can be made for other machines. The file is one of
configs/clusters, or the user gives its path. `machine.local_cluster` measures the figures of this
machine. This module does not import torch.
"""

from __future__ import annotations

import math
from types import UnionType
from typing import Annotated, Any, Literal, cast, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, Field, ValidationError, model_validator

from bigtrain.errors import ConfigError, did_you_mean
from bigtrain.job.presets import ConfigTree, preset_names, read_preset
from bigtrain.job.schema import Precision
from bigtrain.job.sections import ConfigSection
from bigtrain.units import format_bytes, parse_bytes

CommOp = Literal["all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "send"]
SharedOp = Literal["shared_all_gather", "shared_reduce_scatter"]
"""Exchanges of fully_shard in memory that the ranks of one host share."""
MeasuredOp = CommOp | SharedOp

PRESET_FOLDER = "clusters"
"""The folder in configs/ with the cluster files that come with bigtrain."""


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
    """Convert a number, or text of a number, to a float; return other text as it is.

    YAML reads 3e12 as text. Booleans are refused, because Python would take `true` for 1.
    """
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
"""A number of bytes, written as '80GiB', '141GB' or a plain number."""
PositiveNumber = Annotated[float, BeforeValidator(_number), Field(gt=0, allow_inf_nan=False)]
Efficiency = Annotated[float, BeforeValidator(_number), Field(gt=0, le=1)]
StrictCount = Annotated[int, Field(ge=1, strict=True)]


class Flops(ConfigSection):
    """Floating-point operations per second of one device by precision, for dense products."""

    fp32: PositiveNumber
    bf16: PositiveNumber
    fp64: PositiveNumber | None = None

    def of(self, precision: Precision) -> float:
        """Return the floating-point operations per second in a precision.

        Raises:
            ConfigError: the cluster's file does not have this precision.
        """
        peak: float | None = getattr(self, precision)
        if peak is None:
            raise ConfigError(
                f"train.precision={precision}: the cluster has no device.flops.{precision}. "
                f"Write device.flops.{precision} into its file, or use train.precision=fp32."
            )
        return peak


class DeviceSpec(ConfigSection):
    """One device: a GPU, or one rank's part of a node on whose CPU the ranks compute."""

    name: str
    kind: Literal["cuda", "cpu"]
    memory: ByteCount
    """Bytes that a process can use; on a CPU a rank's share of the host's memory."""
    reserved: ByteCount
    """Bytes of `memory` that tensors cannot use: context, workspaces, communicators."""
    flops: Flops
    """Operations per second as in the data sheet. If the ranks of a node share one device
    (`node.shared`), this figure and `memory_bandwidth` are those of the whole node."""
    efficiency: Efficiency = 0.55
    """The share of `flops` that large products reach; 1 if `flops` was measured. The default is an
    assumption, similar to reported values for large models."""
    memory_bandwidth: PositiveNumber
    """Bytes per second that the device reads and writes in its memory, taken together."""
    launch: PositiveNumber
    """Seconds that the smallest operation takes."""
    processors: StrictCount | None = None
    """The number of a GPU's streaming multiprocessors, over which the tiles of a product are
    distributed; see `step_time.product_efficiency`. If null, products of every size reach the same
    rate."""

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
    """One node of a cluster."""

    devices: StrictCount
    """The number of devices, and of ranks, of a node."""
    host_memory: ByteCount
    """Bytes of the host's memory."""
    host_link: PositiveNumber | None = None
    """Bytes per second between one device and the host's memory, in each direction, while all
    devices of the node copy; null on a CPU, which is the host."""
    host_bandwidth: PositiveNumber = 2.0e11
    """Bytes per second that are read and written in the host's memory, taken together, while all
    ranks update parameters there. The default is an assumption, typical of a server."""
    disk_write: PositiveNumber | None = None
    """Bytes per second that all ranks together write to the node's disks; null if unknown."""
    disk_read: PositiveNumber | None = None
    """Bytes per second that all ranks together read from the node's disks; null if unknown."""
    shared: bool = False
    """Whether the ranks of a node share one device's processor, as on a CPU."""
    cores: StrictCount | None = None
    """The number of ranks that can compute at full speed at once on a shared node; more ranks share
    the cores. Null means `devices`."""


class LinkSpec(ConfigSection):
    """Measured figures of one kind of exchange over a link; see `collective_seconds`."""

    latency: PositiveNumber
    """Seconds of each step of the exchange's ring or chain."""
    bandwidth: PositiveNumber
    """Bytes per second that the busiest rank sends."""
    ranks: StrictCount = 2
    """The number of ranks, on one node, between which the curve was measured."""
    curve: list[tuple[PositiveNumber, PositiveNumber]] = Field(default_factory=list)
    """Pairs of the bytes of a whole exchange and its seconds, ascending. For bytes between the ends
    of the curve, the curve replaces latency and bandwidth."""
    after_work: list[tuple[PositiveNumber, PositiveNumber]] = Field(default_factory=list)
    """The curve for ranks that have computed after the last exchange, and wait for each other."""
    work: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """The seconds that ranks computed before each exchange of `after_work`. 0 if that is not known,
    or if the wait is not known to depend on them."""
    issue: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Additional seconds on the CPU for an all-gather or a reduce-scatter in the hooks of
    `fully_shard`, or for a send in an action of a pipeline's schedule. On a GPU this time overlaps
    with computation."""


class Link(ConfigSection):
    """The link between two devices."""

    latency: PositiveNumber
    """Seconds until the first byte arrives."""
    bandwidth: PositiveNumber
    """Bytes per second and device in each direction, as in the data sheet."""
    efficiency: Efficiency = 0.8
    """The share of `bandwidth` that large messages reach; 1 if `bandwidth` was measured. The
    default is an assumption."""
    channels: StrictCount | None = None
    """The number of a GPU's streaming multiprocessors that an exchange over this link keeps busy:
    NCCL runs one thread block for each of its channels. Computation that overlaps with the exchange
    has to do without them. If null, an exchange does not slow down computation."""
    kinds: dict[MeasuredOp, LinkSpec] = Field(default_factory=dict)
    """The figures of the kinds of exchange that were measured separately. Other kinds use those of
    the link."""

    def of(self, kind: MeasuredOp) -> Link:
        """Return a link with the latency and bandwidth of one kind of exchange."""
        measured = self.kinds.get(kind)
        if measured is None:
            return self
        return Link(latency=measured.latency, bandwidth=measured.bandwidth, efficiency=1.0)

    @property
    def rate(self) -> float:
        """Bytes per second and device in each direction that large messages reach."""
        return self.bandwidth * self.efficiency


class Cluster(ConfigSection):
    """A cluster of equal nodes with equal devices."""

    name: str
    source: str
    """The source of the figures."""
    caveat: str = ""
    """The reason why the figures may be wrong, which is printed with each forecast of seconds."""
    device: DeviceSpec
    node: NodeSpec
    inside: Link
    """The link between the devices of a node."""
    between: Link | None = None
    """The link between devices of different nodes; null if there is only one node."""

    def op_of(self, kind: str, *, shared_memory: bool) -> MeasuredOp:
        """Return the exchange whose figures give the seconds of traffic of a kind.

        Args:
            kind: a kind of traffic between ranks; see `costs.traffic`.
            shared_memory: whether the ranks exchange in shared memory.
        """
        op = "send" if kind == "receive" else kind
        shared = f"shared_{op}"
        if shared_memory and shared in self.inside.kinds:
            op = shared
        return cast(MeasuredOp, op)

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
    """Read a cluster from its file.

    Args:
        name_or_path: one of `cluster_names`, or the path of a YAML file.

    Raises:
        ConfigError: there is no such cluster, a figure is missing or wrong, or a key is unknown.
            The message contains the file, the key and the fix.
    """
    tree = read_preset(PRESET_FOLDER, name_or_path, "--cluster")
    is_name = name_or_path in cluster_names()
    shown = f"{PRESET_FOLDER}/{name_or_path}.yaml" if is_name else name_or_path
    try:
        return Cluster.model_validate(tree.values)
    except ValidationError as error:
        raise ConfigError(_refusal(error, tree, shown)) from None


def _refusal(error: ValidationError, tree: ConfigTree, shown: str) -> str:
    """Return a line for the first of pydantic's errors: file and line, key, reason, fix."""
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
    # The message of a check of several keys already contains the keys.
    if _keys_at(path) and first["type"] == "value_error":
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
    """Return the section that a field's type is, also for `Link | None`; None for other types."""
    kinds = get_args(annotation) if get_origin(annotation) is UnionType else (annotation,)
    for kind in kinds:
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return kind
    return None
