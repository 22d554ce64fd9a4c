"""The runner on DeepSpeed's engine: the plain loop, with DeepSpeed's backward pass and step.

The loop scales the loss of each micro-batch so that DeepSpeed's average over the ranks is the mean
over the valid targets of the global batch. The loop also sets which micro-batch is the last of a
step, so that DeepSpeed does not use its own count of micro-batches.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from bigtrain.core.loop import LoopRunner
from bigtrain.core.participation import GradientUse
from bigtrain.core.replicas import broadcast_buffers
from bigtrain.core.state import check_shapes, module_tensors
from bigtrain.core.strategy import Assembly
from bigtrain.data.loader import MicroBatch
from bigtrain.models.parameters import whole_shape
from bigtrain.strategies.deepspeed_adapter import after_gathering
from bigtrain.strategies.zero.on_deepspeed.update import DeepSpeedUpdate
from bigtrain.tensors.shards import SavedTensor, StateTensor, read_like


class DeepSpeedRunner(LoopRunner):
    """The plain loop on DeepSpeed's engine, with the engine's backward pass and step.

    Args:
        assembly: an assembly that already has this `update`.
        update: the update by DeepSpeed's engine, which the loop calls.
    """

    def __init__(self, assembly: Assembly, update: DeepSpeedUpdate) -> None:
        self._engine = update.engine
        self._sharded = update
        assembly.module = update.engine
        assembly.sync = self._at_boundary
        super().__init__(assembly)
        self._label_states()
        self._hooks = ExitStack()
        if self._precision == "bf16":
            self._autocast_inside()
        self._label_gathered()
        self._seen = GradientUse()
        named = () if _ignores_zeros(self.optimizer) else self.module.named_parameters()
        self._watched = [(name, p) for name, p in named if p.requires_grad]
        self._seen.watch(p for _, p in self._watched)

    def begin_step(self) -> None:
        """See `StepRunner.begin_step`."""
        super().begin_step()
        self._seen.clear()

    def _average_over_replicas(self) -> None:
        """Refuse a step in which a parameter got no gradient and would be updated by zeros.

        Nothing is averaged here, because DeepSpeed has averaged the gradients already.
        """
        unused = [name for name, p in self._watched if not self._seen.has(p)]
        if unused:
            more = f" and {len(unused) - 1} more" if len(unused) > 1 else ""
            self.participation.refuse(
                f"{unused[0]}{more} got no gradient in this step. DeepSpeed would still apply "
                "momentum and weight decay to it, and one process would not; nothing was updated. "
                "Use --strategy fsdp_zero2 or fsdp, or torch.optim.SGD without both."
            )

    def _at_boundary(self, last: bool) -> AbstractContextManager[object]:
        self._engine.set_gradient_accumulation_boundary(last)
        return nullcontext()

    def autocast(self) -> AbstractContextManager[object]:
        """See `LoopRunner.autocast`."""
        return nullcontext()  # DeepSpeed disables outer autocasts, so hooks of the model enter it

    def _autocast_inside(self) -> None:
        autocast = super().autocast
        entered: list[AbstractContextManager[object]] = []

        def enter(_module: nn.Module, _inputs: Any) -> None:
            entered.append(autocast())
            entered[-1].__enter__()

        def leave(_module: nn.Module, _inputs: Any, _output: Any) -> None:
            if entered:
                entered.pop().__exit__(None, None, None)

        before = self.module.register_forward_pre_hook(enter)
        after = self.module.register_forward_hook(leave, always_call=True)
        self._hooks.callback(before.remove)
        self._hooks.callback(after.remove)

    def _label_gathered(self) -> None:
        """Label the tensors that stage 3 gathers for a module as parameters."""

        def label(module: nn.Module) -> None:
            if self.meter.tracking:
                self.meter.label(module.parameters(recurse=False), "parameters")

        after_gathering(self._sharded.zero, label)

    def _label_states(self) -> None:
        if self.meter.tracking:
            zero = self._sharded.zero
            self.meter.label(self._sharded.resident_tensors(), "optimizer")
            self.meter.label(getattr(zero, "bit16_groups_flat", ()), "parameters")
            frozen = (p for p in self.module.parameters() if not p.requires_grad)
            self.meter.label((getattr(p, "ds_tensor", None) for p in frozen), "frozen")
            self.meter.label([getattr(zero, "lp_param_buffer", None)], "parameters")
            self.meter.label([getattr(zero, "grad_partitions_flat_buffer", None)], "gradients")
            for bucket in zero.ipg_buckets.values():
                buffers = bucket.buffer if isinstance(bucket.buffer, list) else [bucket.buffer]
                self.meter.label(buffers, "buffers")

    def forward_loss(self, placed: MicroBatch) -> Tensor:
        """See `LoopRunner.forward_loss`."""
        # As under DDP, all ranks use the first rank's buffers, such as BatchNorm's statistics.
        broadcast_buffers(self.context, list(self.module.buffers()))
        return super().forward_loss(placed)

    def backward(self, loss: Tensor) -> None:
        """See `LoopRunner.backward`."""
        self._engine.backward(loss, scale_wrt_gas=False)

    def label_gradients(self) -> None:
        """See `StepRunner.label_gradients`."""
        if self.meter.tracking:
            shards = self._sharded.shards
            gradients = (shards.gradient(number) for number in range(len(shards.pieces)))
            self.meter.label(gradients, "gradients")
        super().label_gradients()

    def run_gradient_hooks(self) -> None:
        """See `StepRunner.run_gradient_hooks`: on whole gradients, gathered from flat slices."""
        for name in self._gradient_hooks.names:
            self._sharded.change_gradient(name, partial(self._gradient_hooks.changed, name))

    def clip(self) -> Tensor:
        """See `LoopRunner.clip`; the gradients are scaled later, in DeepSpeed's step."""
        norm = self._sharded.norm()
        device = self._sharded.shards.pieces[0].device
        self._sharded.shards.set_norm(torch.tensor(norm, dtype=torch.float32, device=device))
        return torch.tensor(norm, dtype=torch.float64)

    def forget_gradients(self) -> None:
        """See `StepRunner.forget_gradients`: DeepSpeed has them in its own buffers."""
        super().forget_gradients()
        self._sharded.shards.clear()

    def gradients(self) -> dict[str, StateTensor]:
        """See `Runner.gradients`."""
        return self._sharded.gradients()

    def load_state(self, saved: Mapping[str, SavedTensor]) -> None:
        """See `Runner.load_state`."""
        super().load_state(saved)
        self._sharded.update_parameters()

    def _load_model(self, saved: Mapping[str, SavedTensor]) -> None:
        parameters, current = self._sharded.parameters, module_tensors(self.module.state_dict())
        first = {id(p): n for n, p in parameters.items()}
        tied = {n: first[id(p)] for n, p in self.module.named_parameters(remove_duplicate=False)}
        shapes = {
            name: whole_shape(parameters[tied[name]] if name in tied else tensor)
            for name, tensor in current.items()
        }
        check_shapes(shapes, set(current), saved)
        with torch.no_grad():
            for name, tensor in current.items():
                if name in tied:
                    self._sharded.load_master(tied[name], saved[f"model.{name}"])
                else:
                    tensor.copy_(read_like(saved[f"model.{name}"], tensor))

    def close(self) -> None:
        """See `Runner.close`."""
        self._hooks.close()
        super().close()


def _ignores_zeros(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a step with gradients of zeros changes no parameter."""
    plain = type(optimizer) is torch.optim.SGD
    return plain and not any(g["momentum"] or g["weight_decay"] for g in optimizer.param_groups)
