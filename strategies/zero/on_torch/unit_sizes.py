"""The bytes of the units of fully_shard: of shards, gathered parameters, buffers and gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from bigtrain.core.strategy import Plan
from bigtrain.devices import is_accelerator
from bigtrain.memory.timeline import BlockTicks


@dataclass(frozen=True)
class UnitSizes:
    """The bytes of a unit: of its gathered parameters, its gradient buffer, and a rank's shard."""

    shard_width: int
    """Bytes of an element of a shard, of parameters and of gradients."""
    plan: Plan
    ranks: int
    shared_memory: bool = False
    """Whether the ranks reduce gradients in shared memory."""
    _known: dict[tuple[int, bool], tuple[BlockTicks, int]] = field(default_factory=dict)

    @property
    def used_width(self) -> int:
        """Bytes of an element of a gathered unit."""
        return 2 if self.plan.bf16_parameters else self.shard_width

    @property
    def frozen_width(self) -> int:
        """Bytes of an element of a frozen parameter's shard, which may have no fp32 values."""
        return self.used_width if self.plan.frozen_in_bf16 else self.shard_width

    def shard(self, unit: BlockTicks, *, trained: bool = False) -> int:
        """Bytes of a rank's shard of a unit, padded to as many rows as the first rank has."""
        key = (id(unit), trained)
        if key not in self._known:  # stored with the unit, so that the unit's id is not reused
            nbytes = sum(
                width * self._padded(shape)
                for shape, width, is_trained in zip(
                    unit.shapes, self._shard_widths(unit), unit.trained, strict=True
                )
                if is_trained or not trained
            )
            self._known[key] = unit, nbytes
        return self._known[key][1]

    def _shard_widths(self, unit: BlockTicks) -> tuple[int, ...]:
        """Bytes of an element of each parameter's shard."""
        return unit.widths(self.shard_width, self.frozen_width)

    def _padded(self, shape: tuple[int, ...]) -> int:
        """The number of elements of a rank's shard of a parameter, with padding."""
        return math.ceil(shape[0] / self.ranks) * math.prod(shape[1:]) if shape else 1

    def first_shards(self, units: Sequence[BlockTicks]) -> int:
        """The most bytes above those of the whole model, while its units are sharded one by one.

        A unit's shard is made before its whole parameters are freed.
        """
        excess = most = 0
        for unit in units:
            shard = self.shard(unit)
            most = max(most, excess + shard)
            excess += shard - sum(
                width * math.prod(shape)
                for shape, width in zip(unit.shapes, self._shard_widths(unit), strict=True)
            )
        return most

    @property
    def on_host(self) -> bool:
        """Whether the shards are on the host, and gathered units on the GPU."""
        return self.plan.offload_tiers.parameters == "cpu" and is_accelerator(self.plan.device_type)

    @property
    def copies_reduced(self) -> bool:
        """Whether gradients are copied to be reduced, as by gloo; not in shared memory."""
        return not self.alone and not self.shared_memory

    @property
    def alone(self) -> bool:
        """Whether each rank has a whole copy of the states: nothing is gathered or scattered."""
        return self.ranks == 1

    def padded(self, unit: BlockTicks) -> int:
        """Bytes of the flat buffer that a unit is gathered in, padding included."""
        return 0 if self.alone else self.whole(unit)

    def cast(self, unit: BlockTicks) -> int:
        """Bytes of a rank's shard in the dtype of the gathered unit, while it is sent.

        Parameters whose shards have that dtype are not copied.
        """
        if self.alone:
            return 0
        used_widths = unit.widths(self.used_width, self.used_width)
        shapes = zip(unit.shapes, self._shard_widths(unit), used_widths, strict=True)
        return sum(used * self._padded(shape) for shape, width, used in shapes if used != width)

    def whole(self, unit: BlockTicks) -> int:
        """Bytes of a gathered unit after it is copied out of the flat buffer."""
        widths = unit.widths(self.used_width, self.used_width)
        elements = zip(map(self._padded, unit.shapes), widths, strict=True)
        return self.ranks * sum(count * width for count, width in elements)

    def copied(self, unit: BlockTicks) -> int:
        """The most bytes above those of a whole unit, while a single rank copies its parameters.

        The parameters are copied one after the other. Each is copied from the host, if the shards
        are on the host, then cast, and then copied into the unit. The result of a cast is freed
        after the result of the next cast is made. With several ranks the bytes are zero.
        """
        if not self.alone:
            return 0
        done = last = most = 0
        used_widths = unit.widths(self.used_width, self.used_width)
        for shape, width, used in zip(
            unit.shapes, self._shard_widths(unit), used_widths, strict=True
        ):
            elements = math.prod(shape)
            copies = [width * elements] if self.on_host else []
            copies += [used * elements] if used != width else []
            most = max(most, done + last + sum(copies))
            done, last = done + used * elements, copies[-1] if copies else 0
            most = max(most, done + last)
        return max(0, most - done)

    def reduced(self, unit: BlockTicks) -> int:
        """Bytes of the buffer in which a unit's gradients are reduced, padding included."""
        return self.shard(unit, trained=True) * self.ranks

    def gradients(self, unit: BlockTicks) -> int:
        """Bytes of a unit's whole gradients in the precision of the shards, without padding."""
        return self.shard_width * sum(self._trained_elements(unit))

    def last_gradient(self, unit: BlockTicks, *, summed: bool) -> int:
        """Bytes of the gradient of a unit's last trained parameter; zero if nothing is exchanged.

        fully_shard holds it while it reduces the unit's gradients.

        Args:
            unit: the unit.
            summed: whether gradients are sums in the precision of the shards.
        """
        elements = self._trained_elements(unit)
        if self.alone or not elements:
            return 0
        return elements[-1] * (self.shard_width if summed else self.used_width)

    def converted(self, unit: BlockTicks) -> int:
        """The most bytes above those of `gradients`, while these are converted from `used_width`.

        They are converted one after the other, and each is freed when it is converted.
        """
        sizes = self._trained_elements(unit)
        most = done = 0
        for elements in sizes:
            left = sum(sizes) - done
            done += elements
            most = max(most, self.shard_width * done + self.used_width * left)
        return max(0, most - self.gradients(unit))

    def _trained_elements(self, unit: BlockTicks) -> list[int]:
        pairs = zip(unit.shapes, unit.trained, strict=True)
        return [math.prod(shape) for shape, is_trained in pairs if is_trained]
