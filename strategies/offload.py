"""Optimizer state on disk or in the host's memory instead of on the device.

Memory: saves the 8 bytes of state that AdamW has for each fp32 parameter, except for the part that
is being updated (1/32). On a GPU `optimizer: cpu` moves the update itself to the host.
Communication: none between ranks. With a disk, the state is read and written once in each step.
Between GPU and host, each parameter costs 4 bytes of gradient and 4 bytes of value in a step.
Constraints: a folder on a real disk, or host memory, with room for the state. Only `zero` moves
parameters: stages 2 and 3 on torch, and stage 3 on DeepSpeed.
Example: python bigtrain/train.py --strategy single strategy.offload.optimizer=disk

Source: Ren et al. 2021, ZeRO-Offload (arXiv 2101.06840), sections 3 and 4; Rajbhandari et al.
2021, ZeRO-Infinity (arXiv 2104.07857), sections 5 and 6.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

from torch import nn

from bigtrain.activations.policy import BlockPolicy
from bigtrain.core.strategy import Assembly, ModelFacts, Plan, Strategy
from bigtrain.core.traits import SPARSE, Need, OffloadTiers, StorageTier, Traits
from bigtrain.core.variants import Shape, Variant
from bigtrain.costs.forecast import Forecast, Profile
from bigtrain.costs.traffic import Traffic, offloaded_activations, parameter_shapes
from bigtrain.devices import is_accelerator
from bigtrain.errors import ConfigError
from bigtrain.job.schema import Role
from bigtrain.memory.disk import (
    MEMORY_FILE_SYSTEMS,
    file_system,
    folder_problem,
    free_disk_bytes,
    scratch_folder,
)
from bigtrain.memory.host_memory import free_host_bytes
from bigtrain.memory.timeline import Span, Timeline
from bigtrain.models.blocks import find_blocks
from bigtrain.optim.partition import chunk_elements
from bigtrain.optim.state_store import (
    DiskStateStore,
    HostStateStore,
    disk_shortage_message,
    host_shortage_message,
)


class Offload(Strategy):
    """Moves state that is used once a step to the host or to a disk."""

    name: ClassVar[str] = "offload"
    role: ClassVar[Role] = "offload"
    summary: ClassVar[str] = (
        "optimizer state, parameters or activations in the host's memory or on disk"
    )

    optimizer: StorageTier = "device"
    """Where the optimizer's state (and fp32 copies) is stored between the steps."""
    parameters: StorageTier = "device"
    """Where the parameters are stored between their uses. Only `zero` moves them: its stages 2 and
    3 on torch, and its stage 3 on DeepSpeed. `disk` is refused."""
    activations: StorageTier = "device"
    """Where tensors that blocks save for backward are stored until then; see strategy.recompute."""
    path: str | None = None
    """An existing folder on a disk with room; by default the system's folder of temporary files."""

    @property
    def need(self) -> Need:
        """See `Strategy.need`: named after the largest of the states that are moved."""
        tiers: dict[Need, StorageTier] = {
            "parameters": self.parameters,
            "activations": self.activations,
            "optimizer": self.optimizer,
        }
        return next((need for need, tier in tiers.items() if tier != "device"), "nothing")

    @property
    def traits(self) -> Traits:
        """See `Strategy.traits`."""
        places = (self.optimizer, self.parameters, self.activations)
        moved = self.optimizer != "device"
        return Traits(
            offload_tiers=OffloadTiers(*places, self._folder),
            cannot_hold=SPARSE if moved else frozenset(),
        )

    def variants(self, shape: Shape) -> Iterable[Variant]:
        """See `Strategy.variants`: optimizer state to the host from a GPU, to disk from a CPU."""
        tier = "cpu" if is_accelerator(shape.device_type) else "disk"
        yield Variant(f"offload_{tier}", {"optimizer": tier})

    def remedies(self, plan: Plan, limit: int) -> Sequence[Sequence[str]]:  # noqa: ARG002
        """See `Strategy.remedies`."""
        return [["strategy.offload.optimizer=disk"], ["strategy.offload.activations=disk"]]

    def check(self, plan: Plan) -> None:
        """Refuse options that move nothing, an unusable folder, and parameters that cannot move."""
        places = (self.optimizer, self.parameters, self.activations)
        if set(places) == {"device"}:
            raise ConfigError(
                "strategy.offload moves nothing. Set strategy.offload.optimizer=cpu or "
                "strategy.offload.optimizer=disk, or strategy.offload.activations."
            )
        if self.path is not None and "disk" not in places:
            raise ConfigError(
                f"strategy.offload.path={self.path} is for offload to disk, and no option says "
                "disk. Leave it out, or set strategy.offload.optimizer=disk."
            )
        if "disk" in places:
            fault = folder_problem(self._folder)
            if fault is not None:
                raise ConfigError(f"strategy.offload.path={self._folder} {fault}.")
        if plan.replicate.own_offload:
            return
        if self.parameters != "device" and not plan.replicate.moves_parameters:
            name = plan.techniques["replicate"].name
            raise ConfigError(
                f"strategy.offload.parameters={self.parameters}: {name} keeps whole "
                "parameters on the device. Use --strategy fsdp or zero3 with "
                "strategy.offload.parameters=cpu."
            )
        if self.parameters == "disk":
            raise ConfigError(
                "strategy.offload.parameters=disk: parameters can be offloaded to the host's "
                "memory only. Set strategy.offload.parameters=cpu (the optimizer's state may go to "
                "disk: strategy.offload.optimizer=disk)."
            )

    @property
    def _folder(self) -> str:
        return self.path or scratch_folder()

    def block_policies(self, model: nn.Module, plan: Plan) -> Mapping[str, BlockPolicy]:
        """Offload the activations of every block that is not recomputed."""
        if not plan.moves_activations:
            return {}
        return {name: "offload" for name, _ in find_blocks(model)}

    def check_model(self, facts: ModelFacts, plan: Plan) -> None:
        """Refuse a disk or a host whose free bytes are too few for the state of one rank."""
        profile = facts.profile
        if profile is None or plan.replicate.own_offload:
            return
        elements = profile.trained_elements / plan.state_ranks
        state = round(elements * profile.state_slots) * _item(plan)
        if self.optimizer == "disk":
            free = free_disk_bytes(self._folder)
            if state > free:
                raise ConfigError(disk_shortage_message(self._folder, state, free, 1))
        elif self._on_host(plan):
            memory, wanted = free_host_bytes(), state + round(elements) * _item(plan)
            if memory is not None and wanted > memory:
                raise ConfigError(host_shortage_message(wanted, memory, 1))

    def _on_host(self, plan: Plan) -> bool:
        """Whether the host updates parameters that are on a GPU."""
        moved = self.parameters == "device" and plan.device_type != "cpu"
        return self.optimizer == "cpu" and moved

    def advise(self, forecast: Forecast, profile: Profile, plan: Plan) -> str | None:  # noqa: ARG002
        """Return one line if the options save no memory."""
        places = {
            "optimizer": self.optimizer,
            "parameters": self.parameters,
            "activations": self.activations,
        }
        hosted = [key for key, tier in places.items() if tier == "cpu"]
        if plan.replicate.own_offload:
            return None  # the replicate technique does the offload, and gives the advice
        if hosted and plan.device_type == "cpu":
            return (
                f"strategy.offload.{hosted[0]}=cpu moves nothing: this run is on the CPU, and so "
                "are its parameters, optimizer state and activations. Use "
                f"strategy.offload.{_DISK.get(hosted[0], 'optimizer')}=disk."
            )
        only_state = (self.parameters, self.activations) == ("device", "device")
        if (
            only_state
            and self.optimizer != "device"
            and profile.untraceable is None
            and profile.state_slots == 0
        ):
            return "strategy.offload moves nothing: this optimizer keeps no state."
        on_disk = "disk" in (self.optimizer, self.activations)
        kind = file_system(self._folder) if on_disk else None
        if kind in MEMORY_FILE_SYSTEMS:
            return (
                f"strategy.offload.path={self._folder} is a {kind}, whose files are memory: "
                "nothing is saved. Set strategy.offload.path to a folder on a disk."
            )
        return None

    def estimate(self, forecast: Forecast, profile: Profile, plan: Plan) -> Forecast:
        """Remove the optimizer's state, and add the chunk of it that is being updated."""
        if plan.replicate.own_offload or profile.trained_elements == 0:
            return forecast
        states = replace(forecast.states, optimizer=profile.state_scalars)
        if self._on_host(plan):
            return replace(forecast, states=states, step=Timeline((), forecast.step.phases))
        if self.optimizer != "disk":
            return forecast
        ranks = plan.state_ranks
        chunk_limit = chunk_elements(profile.trained_elements, ranks)
        chunk = min(chunk_limit, profile.trained_elements // ranks)
        chunk_bytes = round(chunk * profile.state_slots) * _item(plan)
        share = chunk / profile.trained_elements
        return replace(forecast, states=states, step=_chunked(forecast.step, share, chunk_bytes))

    def traffic(self, profile: Profile, plan: Plan) -> tuple[Traffic, ...]:
        """Return the transfers of state, once a step, and of activations, for each micro-batch.

        The replicate technique returns the transfers of parameters and, under DeepSpeed, those of
        the optimizer's state.
        """
        messages = []
        nbytes, calls = offloaded_activations(profile) if plan.moves_activations else (0, 0)
        if nbytes and self.activations == "disk":
            messages += [
                Traffic("to_disk", nbytes, calls, "micro_batch", "forward"),
                Traffic("from_disk", nbytes, calls, "micro_batch", "backward"),
            ]
        if nbytes and plan.device_type != "cpu":
            # If the activations are then written to a disk, the copy to the host is synchronous.
            to_disk_after = self.activations == "disk"
            messages += [
                Traffic(
                    "to_host",
                    nbytes,
                    calls,
                    "micro_batch",
                    "nothing" if to_disk_after else "forward",
                ),
                Traffic(
                    "from_host",
                    nbytes,
                    calls,
                    "micro_batch",
                    "nothing" if to_disk_after else "backward",
                ),
            ]
        return (*messages, *self._state_traffic(profile, plan))

    def _state_traffic(self, profile: Profile, plan: Plan) -> list[Traffic]:
        """Return the transfers of the optimizer's state, or of gradients and values.

        With a disk, the state is written and read. If the host updates, the GPU sends gradients
        and receives values.
        """
        if plan.replicate.own_offload or self.optimizer == "device":
            return []
        ranks = plan.state_ranks
        elements, item = -(-profile.trained_elements // ranks), _item(plan)
        tensors = -(-len(parameter_shapes(profile)) // ranks)
        if self._on_host(plan):  # each chunk during the update of the previous one
            return [
                Traffic("to_host", elements * item, tensors, "step", "step"),
                Traffic("from_host", elements * item, tensors, "step", "step"),
            ]
        if self.optimizer != "disk":
            return []
        pieces = plan.replicate.optimizer_gets == "pieces"
        # Pieces in bf16 runs have fp32 values, which are stored with the state.
        values = 1 if pieces and plan.bf16_parameters else 0
        nbytes = round(elements * (profile.state_slots + values)) * item
        if not nbytes:
            return []
        calls = tensors * max(1, math.ceil(profile.state_slots + values))
        messages = [  # a chunk is read during the update of another; the step waits for writes
            Traffic("from_disk", nbytes, calls, "step", "step"),
            Traffic("to_disk", nbytes, calls, "step", "nothing"),
        ]
        if plan.device_type != "cpu" and self.parameters == "device":
            messages.append(Traffic("from_host", nbytes, calls, "step", "nothing"))
            messages.append(Traffic("to_host", nbytes, calls, "step", "nothing"))
        return messages

    def apply(self, assembly: Assembly) -> None:
        """Set the store of the optimizer's state, for the `Update` that makes the optimizer."""
        if assembly.plan.replicate.own_offload:
            return
        if self.optimizer == "disk":
            assembly.state_store = DiskStateStore(assembly.context, self._folder)
        elif self._on_host(assembly.plan):
            assembly.state_store = HostStateStore(assembly.context)


_DISK = {"optimizer": "optimizer", "activations": "activations"}
"""For an option that moves nothing if it is cpu: the option to set to disk instead."""


def _item(plan: Plan) -> int:
    """Return the bytes of an element of the state, in the precision of the update."""
    return 8 if plan.precision == "fp64" else 4


def _chunked(step: Timeline, share: float, chunk_bytes: int) -> Timeline:
    """Return the timeline of a step that updates the state chunk by chunk.

    Args:
        step: the timeline of a step that updates all elements at once.
        share: the share of the elements in a chunk.
        chunk_bytes: bytes of a chunk's state, which are in memory during the whole step.
    """
    spans = tuple(s._replace(nbytes=round(s.nbytes * share)) for s in step.spans)
    start = step.phases[0][0]
    end = max((span.death for span in spans), default=start + 1)
    return Timeline((*spans, Span(chunk_bytes, "temporary", start, end)), step.phases)
