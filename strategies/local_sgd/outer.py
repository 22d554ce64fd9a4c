"""The synchronization of replicas, by averages or an outer optimizer, and their runner."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bigtrain.checkpoint.layout import REPLICAS
from bigtrain.core.loop import LoopRunner
from bigtrain.core.replicas import GradientAverager
from bigtrain.core.state import replica_state, state_of_replica
from bigtrain.core.strategy import Assembly
from bigtrain.optim.partition import partition_evenly
from bigtrain.ranks.context import RunContext
from bigtrain.tensors.shards import SavedTensor, StateTensor, read_like, read_whole

PREFIX = f"{REPLICAS}.outer."
"""The prefix of the names of the outer state in a checkpoint."""


@dataclass(frozen=True)
class OuterSettings:
    """The settings of the synchronization; see the options of `LocalSGD`."""

    every: int
    learning_rate: float | None
    """The outer learning rate; None if replicas take the average."""
    momentum: float
    fragments: int
    delay: int
    mixing: float

    def due(self, step: int) -> int | None:
        """Return the fragment to synchronize after so many steps; None if there is none.

        The result is the same on every replica.
        """
        stride = self.every // self.fragments
        fragment, rest = divmod(step % self.every, stride)
        return fragment if rest == 0 and fragment < self.fragments else None


@dataclass
class _Sent:
    """An outer gradient in flight; `flat` is its sum over the replicas once `work` is done."""

    fragment: int
    step: int
    flat: Tensor
    work: dist.Work | None


class Outer:
    """Synchronizes the trained parameters of the replicas.

    With an outer optimizer each parameter has two more tensors. The anchor is its value at the last
    synchronization, which is the same on all replicas. The other tensor is a momentum.

    Args:
        parameters: the trained parameters by plain name.
        context: the replicas are the ranks of its dp axis.
        settings: the settings of the technique.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], context: RunContext, settings: OuterSettings
    ) -> None:
        self.steps = 0
        """The number of inner steps done, which decides the fragment to synchronize."""
        self._settings, self._context = settings, context
        self._parameters = parameters
        sizes = {name: parameter.numel() for name, parameter in parameters.items()}
        self._fragments: list[list[str]] = [[] for _ in range(settings.fragments)]
        for name, fragment, _, _ in partition_evenly(sizes, settings.fragments, may_split=False):
            self._fragments[fragment].append(name)
        self._average = GradientAverager(context)
        self._anchors: dict[str, Tensor] = {}
        self._momenta: dict[str, Tensor] = {}
        self._sent: list[_Sent] = []
        if settings.learning_rate is not None:
            for name, parameter in parameters.items():
                self._anchors[name] = parameter.detach().clone()
                self._momenta[name] = torch.zeros_like(parameter)

    @property
    def differs(self) -> bool:
        """Whether the parameters may differ between replicas after the steps done."""
        settings = self._settings
        is_plain = settings.fragments == 1 and settings.delay == 0
        return not is_plain or self.steps % settings.every != 0

    def resident_tensors(self) -> Iterable[Tensor]:
        """Yield the anchors and momenta."""
        yield from self._anchors.values()
        yield from self._momenta.values()

    @torch.no_grad()
    def after_step(self) -> None:
        """Count an inner step, and synchronize the fragments that are then due. Collective."""
        self.steps += 1
        # Several fragments are due at once after a resume with a smaller delay.
        while self._sent and self.steps >= self._sent[0].step + self._settings.delay:
            self._arrive(self._sent.pop(0))
        fragment = self._settings.due(self.steps)
        if fragment is None:
            return
        names = self._fragments[fragment]
        values = [self._parameters[name].detach() for name in names]
        if self._settings.learning_rate is None:
            self._average(values)
        elif self._settings.delay == 0:
            for name, value in zip(names, values, strict=True):
                value.neg_().add_(self._anchors[name])  # in place, without a copy
            self._average(values)
            self._step(names, values)
            for name, value in zip(names, values, strict=True):
                value.copy_(self._anchors[name])
        elif names:
            flat = torch.cat(
                [(self._anchors[n] - v).reshape(-1) for n, v in zip(names, values, strict=True)]
            )
            work = dist.all_reduce(flat, group=self._context.dp_group, async_op=True)
            self._sent.append(_Sent(fragment, self.steps, flat, work))

    def _arrive(self, sent: _Sent) -> None:
        """Apply a fragment's outer gradient after the delay."""
        self._wait(sent)
        names = self._fragments[sent.fragment]
        sizes = [self._parameters[name].numel() for name in names]
        parts = torch.split(sent.flat, sizes)
        gradients = [p.view_as(self._parameters[n]) for n, p in zip(names, parts, strict=True)]
        self._step(names, gradients)
        for name in names:
            # The replica has trained on while the fragment was in flight, so its parameters are
            # mixed with the anchors.
            self._parameters[name].detach().lerp_(self._anchors[name], 1 - self._settings.mixing)

    def _wait(self, sent: _Sent) -> None:
        """Wait for the sum over the replicas, and divide it to get the average."""
        if sent.work is not None:
            sent.work.wait()
            sent.flat /= self._context.dp_size
            sent.work = None

    def _step(self, names: Sequence[str], gradients: Sequence[Tensor]) -> None:
        """Update the anchors by SGD with Nesterov momentum; overwrite the outer gradients."""
        rate, momentum = self._settings.learning_rate or 0.0, self._settings.momentum
        for name, gradient in zip(names, gradients, strict=True):
            average = self._momenta[name].mul_(momentum).add_(gradient)
            self._anchors[name].sub_(gradient.add_(average, alpha=momentum), alpha=rate)

    def state(self) -> dict[str, StateTensor]:
        """Return the outer state under the names of a checkpoint; the same on every replica."""
        state = {f"{PREFIX}steps": StateTensor.of(torch.tensor(self.steps))}
        if self._settings.learning_rate is None:
            return state
        for name in self._parameters:
            state[f"{PREFIX}{name}.anchor"] = StateTensor.of(self._anchors[name])
            state[f"{PREFIX}{name}.momentum"] = StateTensor.of(self._momenta[name])
        for sent in self._sent:
            self._wait(sent)
            head = f"{PREFIX}sent.{sent.fragment}"
            state[f"{head}.gradient"] = StateTensor.of(sent.flat)
            state[f"{head}.step"] = StateTensor.of(torch.tensor(sent.step))
        return state

    @torch.no_grad()
    def load_state(self, saved: Mapping[str, SavedTensor]) -> None:
        """Restore the outer state from a checkpoint. The parameters must be loaded already.

        If the checkpoint has no outer state, the count of steps starts at 0. A parameter without a
        saved anchor gets its loaded value as the anchor, and a momentum of zeros. An outer gradient
        in flight is restored only if its fragment has as many elements in this run.

        Args:
            saved: all tensors of the checkpoint, by name.
        """
        self._sent.clear()
        self.steps = int(read_whole(saved[f"{PREFIX}steps"])) if f"{PREFIX}steps" in saved else 0
        for name, anchor in self._anchors.items():
            known = saved.get(f"{PREFIX}{name}.anchor")
            momentum = saved.get(f"{PREFIX}{name}.momentum")
            if known is None or momentum is None:
                anchor.copy_(self._parameters[name])
                self._momenta[name].zero_()
            else:
                anchor.copy_(read_like(known, anchor))
                self._momenta[name].copy_(read_like(momentum, anchor))
        for fragment, names in enumerate(self._fragments):
            sent = saved.get(f"{PREFIX}sent.{fragment}.gradient")
            size = sum(self._parameters[name].numel() for name in names)
            if sent is None or not self._anchors or tuple(sent.shape) != (size,):
                continue
            flat = read_whole(sent).to(self._context.device)
            step = int(read_whole(saved[f"{PREFIX}sent.{fragment}.step"]))
            self._sent.append(_Sent(fragment, step, flat, None))
        self._sent.sort(key=lambda sent: sent.step)


class Replica(LoopRunner):
    """The plain loop. Its gradients, and their norm, are those of this replica alone.

    Args:
        assembly: its `after_update` calls `outer.after_step`.
        outer: the synchronization of the replicas; its state is saved with this replica's.
    """

    def __init__(self, assembly: Assembly, outer: Outer) -> None:
        super().__init__(assembly)
        self._outer = outer
        assembly.meter.label(outer.resident_tensors(), "optimizer")

    def state(self) -> dict[str, StateTensor]:
        """Return this replica's state, named by `replica_state`, and the outer state.

        The outer state is the same on all replicas. If the parameters are the same too, as they are
        right after a synchronization, only the first replica saves them.
        """
        state = super().state()
        replica = self.context.dp_rank
        if replica > 0 and not self._outer.differs:
            for name, _ in self.module.named_parameters(remove_duplicate=False):
                state.pop(f"model.{name}", None)
        return replica_state(state, replica) | self._outer.state()

    def load_state(self, saved: Mapping[str, SavedTensor]) -> None:
        """Load this replica's state and the outer state; see `state_of_replica`."""
        super().load_state(state_of_replica(saved, self.context.dp_rank))
        self._outer.load_state(saved)
