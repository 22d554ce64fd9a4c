"""Run the optimizer's step inside the backward pass, and free each gradient at once.

As soon as the backward pass has computed a parameter's gradient, the parameter is updated and the
gradient is freed, so the gradients of the whole model never exist together. The results are those
of a step after the backward pass, because the backward pass does not read a parameter again after
its gradient is complete.

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
    """Updates each parameter in the backward pass when its gradient is complete.

    The gradient is freed after the update.

    Args:
        parameters: the trained parameters, by name in the model: plain tensors, or DTensors whose
            gradients are reduced when they are accumulated.
        make_optimizer: makes the optimizer of all parameters.
        meter: labels gradients and optimizer state in the memory record.
        apart: names of parameters whose gradients have a separate norm; see `norms`.
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
        # By index, because loading a state into the optimizer replaces its groups.
        self._group_index = {p: index for index, group in groups for p in group["params"]}
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._release)  # type: ignore[no-untyped-call]
            for parameter in parameters.values()
        ]

    def _release(self, parameter: Tensor) -> None:
        """Update one parameter with the current settings of its group, and free its gradient."""
        gradient = parameter.grad
        if gradient is None:
            return
        if parameter in self._updated:
            raise ConfigError(
                f"optim.release_gradients=true: {self._names[parameter]} got a second gradient in "  # type: ignore[index]
                "one step, after it was updated by the first: from another micro-batch, or from a "
                "reentrant torch.utils.checkpoint. Use one micro-batch and use_reentrant=False, or "
                "optim.release_gradients=false."
            )
        self._meter.label([gradient], "gradients")
        self._updated.add(parameter)
        self._norms[parameter in self._apart].add([gradient])
        group_index = self._group_index.get(parameter)
        if group_index is not None:
            self._step_one(parameter, self.optimizer.param_groups[group_index])
        parameter.grad = None
        if group_index is not None and self._meter.tracking:
            slots = self.optimizer.state[parameter].values()
            self._meter.label((v for v in slots if isinstance(v, Tensor)), "optimizer")

    def _step_one(self, parameter: Tensor, group: dict[str, Any]) -> None:
        groups, single = self.optimizer.param_groups, {**group, "params": [parameter]}
        # The optimizer itself steps, on a group of one parameter, so `optimizer.state` has the
        # state of all parameters.
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
        """Start a new step, with norms of zero and no updated parameters."""
        self._norms = GradientNorm(), GradientNorm()
        self._updated.clear()

    def norms(self) -> tuple[Tensor, Tensor]:
        """Return two 0-dim norms of the step's gradients, and start a new step.

        The second norm is of the parameters in `apart`, and the first norm is of all other
        parameters. Collective if gradients are sharded.
        """
        others, apart = (norm.total() for norm in self._norms)
        self.begin_step()
        return others, apart

    def step(self) -> None:
        """See `Update.step`. Does nothing: every parameter is updated already."""

    def close(self) -> None:
        """See `Update.close`."""
        for hook in self._hooks:
            hook.remove()
