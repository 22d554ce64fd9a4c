"""The optimizer's step inside the backward pass: a gradient lives until its parameter has it.

When the backward pass has finished a parameter's gradient, that parameter is updated and the
gradient freed, so that the gradients of the whole model are never there together. The numbers are
those of a step after the backward pass: a parameter is not read again once its gradient is whole.

Sources: Lv et al. 2023, Full Parameter Fine-tuning with Limited Resources (LOMO, arXiv
2306.09782), section 3.2; Pudipeddi et al. 2020, L2L (arXiv 2002.05645), section 3.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor, nn

from bigtrain.errors import ConfigError
from bigtrain.memory.meter import MemoryMeter
from bigtrain.optim.update import MakeOptimizer, WholeUpdate
from bigtrain.tensors.norms import GradientNorm


class InBackwardUpdate(WholeUpdate):
    """The optimizer on the parameters themselves, one at a time, as their gradients come.

    Args:
        parameters: those that are trained, by their plain names; plain tensors or DTensors whose
            gradients arrive reduced.
        make_optimizer: called once, on all of them.
        meter: told whose memory a gradient is.
        apart: names of parameters whose norm is counted apart; see `norms`.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        make_optimizer: MakeOptimizer,
        meter: MemoryMeter,
        apart: Collection[str] = (),
    ) -> None:
        super().__init__(parameters, make_optimizer)
        self._meter = meter
        self._apart = {parameter for name, parameter in parameters.items() if name in apart}
        self._norms = GradientNorm(), GradientNorm()
        self._updated: set[Tensor] = set()
        self._names = {parameter: name for name, parameter in parameters.items()}
        groups = enumerate(self.optimizer.param_groups)
        # By place: whoever loads a state into the optimizer makes its groups anew.
        self._place = {p: place for place, group in groups for p in group["params"]}
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._release)  # type: ignore[no-untyped-call]
            for parameter in parameters.values()
        ]

    def _release(self, parameter: Tensor) -> None:
        """Update one parameter, with the settings that its group has now."""
        gradient = parameter.grad
        if gradient is None:
            return
        if parameter in self._updated:
            raise ConfigError(
                f"optim.release_gradients=true: {self._names[parameter]} got a second gradient in "  # type: ignore[index]
                "one step, after it was updated by the first: of another micro-batch, or of a "
                "reentrant torch.utils.checkpoint. Use one micro-batch and use_reentrant=False, or "
                "optim.release_gradients=false."
            )
        self._meter.label([gradient], "gradients")
        self._updated.add(parameter)
        self._norms[parameter in self._apart].add([gradient])
        group_index = self._place.get(parameter)
        if group_index is not None:
            self._step_one(parameter, self.optimizer.param_groups[group_index])
        parameter.grad = None
        if group_index is not None and self._meter.tracking:
            slots = self.optimizer.state[parameter].values()
            self._meter.label((v for v in slots if isinstance(v, Tensor)), "optimizer")

    def _step_one(self, parameter: Tensor, group: dict[str, Any]) -> None:
        groups, single = self.optimizer.param_groups, {**group, "params": [parameter]}
        # The optimizer itself, shown one parameter: its state and its settings stay in one place.
        self.optimizer.param_groups = [single]
        try:
            self.optimizer.step()
        finally:
            self.optimizer.param_groups = groups
        for key in single:
            if key != "params" and single[key] is not group.get(key):
                raise ConfigError(
                    f"optim.release_gradients=true: {type(self.optimizer).__name__} counts "
                    f"{key!r} for all parameters of a group together, and here they are updated "
                    "one at a time. Set optim.release_gradients=false."
                )

    def begin_step(self) -> None:
        """Say that the gradients that come now are another step's."""
        self._norms = GradientNorm(), GradientNorm()
        self._updated.clear()

    def norms(self) -> tuple[Tensor, Tensor]:
        """The norms of the gradients since the last call: of most, and of those counted apart.

        Collective where they are in shards.
        """
        most, apart = (norm.total() for norm in self._norms)
        self.begin_step()
        return most, apart

    def step(self) -> None:
        """See `Update.step`. It is done already."""

    def close(self) -> None:
        """See `Update.close`."""
        for hook in self._hooks:
            hook.remove()
