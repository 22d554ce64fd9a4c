"""Optimizer state on disk or in the host's memory instead of beside the parameters.

Memory: the 8 bytes that AdamW keeps for each fp32 parameter go, but for a 32nd part of them that
is in memory while it is updated. On a GPU `optimizer: cpu` moves the update itself to the host.
Communication: none between ranks. To disk and back: the state once each way and step. Between
GPU and host: 4 bytes of gradient over and 4 of values back for each parameter and step.
Constraints: a folder on a real disk, or host memory, with room for the state. Parameters are
moved by `zero` alone: by stages 2 and 3 on torch, and by stage 3 on DeepSpeed.
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
    """State that is needed once a step, kept where there is more room."""

    name: ClassVar[str] = "offload"
    role: ClassVar[Role] = "offload"
    summary: ClassVar[str] = "optimizer state or activations on disk or in the host's memory"

    optimizer: StorageTier = "device"
    """Where the optimizer's state (and fp32 copies) lives between the steps."""
    parameters: StorageTier = "device"
    """Where the parameters live between their uses (stages 2 and 3 of `zero` alone)."""
    activations: StorageTier = "device"
    """Where what blocks save for the backward pass is meanwhile; see strategy.recompute."""
    path: str | None = None
    """An existing folder on a disk with room; left out, the system's for temporary files."""

    @property
    def need(self) -> Need:
        """See `Strategy.need`: by the largest of what it moves."""
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
        """See `Strategy.variants`: the optimizer's state where there is room for it."""
        place = "cpu" if is_accelerator(shape.device_type) else "disk"
        yield Variant(f"offload_{place}", {"optimizer": place})

    def remedies(self, plan: Plan, limit: int) -> Sequence[Sequence[str]]:  # noqa: ARG002
        """See `Strategy.remedies`."""
        return [["strategy.offload.optimizer=disk"], ["strategy.offload.activations=disk"]]

    def check(self, plan: Plan) -> None:
        """Refuse what moves nothing, a folder that cannot be used, parameters that stay."""
        places = (self.optimizer, self.parameters, self.activations)
        if set(places) == {"device"}:
            raise ConfigError(
                "strategy.offload moves nothing. Set strategy.offload.optimizer=cpu or "
                "strategy.offload.optimizer=disk, or strategy.offload.activations."
            )
        if self.path is not None and "disk" not in places:
            raise ConfigError(
                f"strategy.offload.path={self.path} is for what goes to disk, and nothing does. "
                "Leave it out, or set strategy.offload.optimizer=disk."
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
                "strategy.offload.parameters=disk: parameters go to the host's memory, and no "
                "further. Set strategy.offload.parameters=cpu (the optimizer's state may go to "
                "disk: strategy.offload.optimizer=disk)."
            )

    @property
    def _folder(self) -> str:
        return self.path or scratch_folder()

    def block_policies(self, model: nn.Module, plan: Plan) -> Mapping[str, BlockPolicy]:
        """Every block that is not computed again is moved away."""
        if not plan.moves_activations:
            return {}
        return {name: "offload" for name, _ in find_blocks(model)}

    def check_model(self, facts: ModelFacts, plan: Plan) -> None:
        """Refuse a place that is too small for the state of one rank alone."""
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
        """Whether the host updates for the device: not where the parameters are there already."""
        moved = self.parameters == "device" and plan.device_type != "cpu"
        return self.optimizer == "cpu" and moved

    def advise(self, forecast: Forecast, profile: Profile, plan: Plan) -> str | None:  # noqa: ARG002
        """Say where nothing is gained."""
        places = {
            "optimizer": self.optimizer,
            "parameters": self.parameters,
            "activations": self.activations,
        }
        hosted = [key for key, place in places.items() if place == "cpu"]
        if plan.replicate.own_offload:
            return None  # what does the work says where it gains nothing
        if hosted and plan.device_type == "cpu":
            return (
                f"strategy.offload.{hosted[0]}=cpu moves nothing: this run is on the CPU, and so "
                "are its parameters, optimizer state and activations. Use "
                f"strategy.offload.{_DISK.get(hosted[0], 'optimizer')}=disk."
            )
        moved = self.optimizer != "device" and self.activations == "device"
        if moved and profile.untraceable is None and profile.state_slots == 0:
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
        """The state leaves; one chunk of it is there during the step."""
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
        """State each way once a step, what blocks save each way for each micro-batch.

        Parameters, and all but activations under DeepSpeed, are stated by who moves them.
        """
        messages = []
        nbytes, calls = offloaded_activations(profile) if plan.moves_activations else (0, 0)
        if nbytes and self.activations == "disk":
            messages += [
                Traffic("to_disk", nbytes, calls, "micro_batch", "forward"),
                Traffic("from_disk", nbytes, calls, "micro_batch", "backward"),
            ]
        if nbytes and plan.device_type != "cpu":
            # On their way to a disk they are copied over before anything else is done.
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
        """The optimizer's: state to disk and back, or gradients to the host and values back."""
        if plan.replicate.own_offload or self.optimizer == "device":
            return []
        ranks = plan.state_ranks
        elements, item = -(-profile.trained_elements // ranks), _item(plan)
        tensors = -(-len(parameter_shapes(profile)) // ranks)
        if self._on_host(plan):  # chunk by chunk, beside the update of the one before
            return [
                Traffic("to_host", elements * item, tensors, "step", "step"),
                Traffic("from_host", elements * item, tensors, "step", "step"),
            ]
        if self.optimizer != "disk":
            return []
        pieces = plan.replicate.optimizer_gets == "pieces"
        values = 1 if pieces and plan.bf16_parameters else 0  # the fp32 ones go along
        nbytes = round(elements * (profile.state_slots + values)) * item
        if not nbytes:
            return []
        calls = tensors * max(1, math.ceil(profile.state_slots + values))
        messages = [  # the next chunk is read meanwhile; a written one is waited for
            Traffic("from_disk", nbytes, calls, "step", "step"),
            Traffic("to_disk", nbytes, calls, "step", "nothing"),
        ]
        if plan.device_type != "cpu" and self.parameters == "device":
            messages.append(Traffic("from_host", nbytes, calls, "step", "nothing"))
            messages.append(Traffic("to_host", nbytes, calls, "step", "nothing"))
        return messages

    def apply(self, assembly: Assembly) -> None:
        """Say where the state will live; whoever makes the optimizer takes it there."""
        if assembly.plan.replicate.own_offload:
            return
        if self.optimizer == "disk":
            assembly.state_store = DiskStateStore(assembly.context, self._folder)
        elif self._on_host(assembly.plan):
            assembly.state_store = HostStateStore(assembly.context)


_DISK = {"optimizer": "optimizer", "activations": "activations"}
"""What may go to disk."""


def _item(plan: Plan) -> int:
    """Bytes of one number of state: it is kept in the precision that is updated."""
    return 8 if plan.precision == "fp64" else 4


def _chunked(step: Timeline, share: float, chunk_bytes: int) -> Timeline:
    """What a step needs beside the states where a share of them is updated at a time."""
    spans = tuple(s._replace(nbytes=round(s.nbytes * share)) for s in step.spans)
    start = step.phases[0][0]
    end = max((span.death for span in spans), default=start + 1)
    return Timeline((*spans, Span(chunk_bytes, "temporary", start, end)), step.phases)
