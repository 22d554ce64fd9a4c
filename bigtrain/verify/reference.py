"""One process in other ways than `single`: what `bigtrain verify` holds strategies against.

With bf16 parameters: a strategy that keeps the fp32 values of its parameters apart lets the layers
see them in bf16. Residual sums, norms and embeddings are then bf16, too, which autocast over fp32
parameters leaves in fp32. The same numbers in one process are those of fp32 parameters that are
rounded to bf16 for each micro-batch, and whose gradients, in bf16, are added up in fp32.

With moved weights: how far one process gets from itself, in as many steps, when its weights begin
a unit in the last place away. No other order of sums can be held to less.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import nn

from bigtrain.core.strategy import Assembly, Strategy
from bigtrain.core.traits import Traits
from bigtrain.job.schema import Role
from bigtrain.models.parameters import bf16_parameter_names

WITH_BF16_PARAMETERS = "strategy.replicate=bigtrain.verify.reference:SingleInBf16"
WITH_MOVED_WEIGHTS = "strategy.replicate=bigtrain.verify.reference:SingleMoved"


class _OneProcess(Strategy):
    """As strategy `single`: nothing is shared or wrapped."""

    role: ClassVar[Role] = "replicate"

    @property
    def traits(self) -> Traits:
        """See `Strategy.traits`."""
        return Traits(final_gradients=True)


class SingleInBf16(_OneProcess):
    """The model as it is, on one device, its layers seeing bf16 parameters."""

    name: ClassVar[str] = "single_in_bf16"
    summary: ClassVar[str] = "one process with bf16 parameters: the reference of those that have"

    def apply(self, assembly: Assembly) -> None:
        """Have the forward pass see rounded parameters."""
        assembly.module = _Rounded(assembly.model)


class _Rounded(nn.Module):
    """A model whose forward pass sees its parameters in bf16."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self._names = set(bf16_parameter_names(model))

    def forward(self, *inputs: Any) -> Any:
        parameters = self.model.named_parameters()
        rounded = {n: p.to(torch.bfloat16) for n, p in parameters if n in self._names}
        return torch.func.functional_call(self.model, rounded, inputs)


class SingleMoved(_OneProcess):
    """The model on one device, each weight a unit in the last place larger or smaller."""

    name: ClassVar[str] = "single_moved"
    summary: ClassVar[str] = "one process with weights a unit in the last place away"

    def apply(self, assembly: Assembly) -> None:
        """Move the weights, by signs that are the same in every run."""
        signs = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in assembly.model.parameters():
                drawn = torch.randint(0, 2, parameter.shape, generator=signs) * 2 - 1
                unit = torch.finfo(parameter.dtype).eps
                parameter.mul_(1 + unit * drawn.to(parameter))
