"""How long the blocks of a model compute: one forward pass on fake tensors, op by op."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from bigtrain.activations.recompute import is_saved_op
from bigtrain.cutting.choose import DeviceRates
from bigtrain.data.loader import MicroBatch
from bigtrain.tensors.fake import fake_model, fake_tensor
from bigtrain.tensors.op_cost import bytes_touched, flops_of


@dataclass
class BlockCost:
    """Seconds of one forward pass of one micro-batch, at given rates."""

    whole: float = 0.0
    between: float = 0.0
    """Of what `selective` computes again."""


def block_costs(
    model: nn.Module,
    names: Iterable[str],
    micro_batch: MicroBatch,
    rates: DeviceRates,
    device: torch.device,
    *,
    bf16: bool = False,
) -> dict[str, BlockCost]:
    """What each of these modules takes; `""` is the whole model.

    An operation takes as long as its arithmetic or its reading and writing, whichever is longer
    (Williams et al. 2009, Roofline).

    Args:
        model: on any device; it is left as it is.
        names: of the modules.
        micro_batch: one of the run's size.
        rates: of the device.
        device: whose kernels are meant.
        bf16: whether autocast is on.
    """
    costs = {"": BlockCost(), **{name: BlockCost() for name in names}}
    with FakeTensorMode():
        fake = fake_model(model, device, double=False)
        open_now = [costs[""]]
        for name, cost in costs.items():
            if name:
                module = fake.get_submodule(name)
                module.register_forward_pre_hook(lambda *_, cost=cost: open_now.append(cost))
                module.register_forward_hook(lambda *_: _close(open_now))
        inputs = tree_map(lambda t: fake_tensor(t, device), micro_batch.inputs)
        cast = torch.autocast(device.type, dtype=torch.bfloat16) if bf16 else nullcontext()
        with cast, _CostMode(open_now, rates):
            fake(inputs)
    return costs


def _close(open_now: list[BlockCost]) -> None:
    open_now.pop()


class _CostMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds each operation to all that are open."""

    def __init__(self, open_now: list[BlockCost], rates: DeviceRates) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._open, self._rates = open_now, rates

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        made = [t for t in tree_leaves(result) if isinstance(t, Tensor)]
        if not made:  # a question about a tensor
            return result
        work = flops_of(func, args, kwargs, result) / self._rates.flops
        seconds = max(work, bytes_touched(given, made) / self._rates.nbytes)
        dear = is_saved_op(func, args, kwargs)
        for cost in self._open:
            cost.whole += seconds
            cost.between += 0.0 if dear else seconds
        return result
