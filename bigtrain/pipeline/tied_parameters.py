"""Keep the copies of a parameter equal if stages on several ranks use the parameter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bigtrain.ranks.context import RunContext
from bigtrain.tensors.shards import as_dtensor_like, local_tensor

TiedParameter = tuple[str, tuple[int, ...]]
"""A parameter's first name in the whole model, and the stages that use it."""


@dataclass(frozen=True)
class _Shared:
    """A tied parameter on one of its ranks."""

    name: str
    parameter: nn.Parameter
    owners: tuple[int, ...]
    """The pp ranks that have a copy, in order."""


class TiedGradients:
    """Sums the gradients of tied parameters over their copies.

    Args:
        ties: all tied parameters of the model.
        ranks: the pp rank of each stage.
        parameters: the parameters of this rank, by their first names.
        context: this rank, and the pp group.
    """

    def __init__(
        self,
        ties: Sequence[TiedParameter],
        ranks: Sequence[int],
        parameters: Mapping[str, nn.Parameter],
        context: RunContext,
    ) -> None:
        self._context = context
        self._shared = []
        for name, stages in ties:
            owners = tuple(sorted({ranks[stage] for stage in stages}))
            if len(owners) > 1 and context.pp_rank in owners and parameters[name].requires_grad:
                self._shared.append(_Shared(name, parameters[name], owners))

    @property
    def owned_elsewhere(self) -> set[str]:
        """The names of this rank's tied parameters that another rank owns.

        The owner counts the parameter in the gradient norm, and writes it to checkpoints.
        """
        return {s.name for s in self._shared if s.owners[0] != self._context.pp_rank}

    def sum_gradients(self) -> None:
        """Set the gradient of each copy to the sum over all copies. Collective over their ranks.

        Each rank sends its gradient to all other ranks with a copy, and adds in the same order, so
        the sums are bitwise equal. For two ranks, which is the usual case, no other exchange sends
        fewer bytes.
        """
        for shared in self._shared:
            if shared.parameter.grad is None:
                shared.parameter.grad = torch.zeros_like(shared.parameter)
            elif shared.parameter.grad.layout is not torch.strided:  # ranks have different rows
                shared.parameter.grad = shared.parameter.grad.to_dense()
            own_gradient = local_tensor(shared.parameter.grad).detach()
            contiguous = own_gradient.contiguous()
            self._sum(contiguous, shared.owners)
            if contiguous is not own_gradient:  # replaced, because its elements may overlap
                shared.parameter.grad = as_dtensor_like(contiguous, shared.parameter.grad)

    def _sum(self, own_gradient: Tensor, owners: Sequence[int]) -> None:
        """Replace a gradient by the sum over its owners.

        The only temporary memory is one received gradient for each other owner, which
        `forecast.TiedBytes` predicts.
        """
        context = self._context
        members = context.ranks_of("pp")
        received = {
            owner: torch.empty_like(own_gradient) for owner in owners if owner != context.pp_rank
        }
        ops = []
        for owner, buffer in received.items():
            ops.append(dist.P2POp(dist.isend, own_gradient, members[owner], context.pp_group))
            ops.append(dist.P2POp(dist.irecv, buffer, members[owner], context.pp_group))
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        if len(received) == 1:
            (other,) = received.values()
            own_gradient += other  # a sum of two is the same in either order
            return
        parts = [received.get(owner, own_gradient) for owner in owners]
        total = next(iter(received.values()))
        torch.add(parts[0], parts[1], out=total)
        for part in parts[2:]:
            total += part
        own_gradient.copy_(total)
