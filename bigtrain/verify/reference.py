"""References of `bigtrain verify` that differ from the strategy `single`.

`SingleInBf16` is for strategies whose layers use bf16 parameters with fp32 master weights. Residual
sums, norms and embeddings are then in bf16, while autocast over fp32 parameters leaves them in
fp32. One process gets the same numbers if its fp32 parameters are rounded to bf16 for each
micro-batch, and the bf16 gradients are accumulated in fp32.

`SingleMoved` starts with each weight moved by one unit in the last place. A strategy sums in
another order. So rounding alone may make it differ from the reference as much as this run does, or
more.
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
    """A strategy for one process, which shares nothing."""

    role: ClassVar[Role] = "replicate"

    @property
    def traits(self) -> Traits:
        """See `Strategy.traits`."""
        return Traits(final_gradients=True)


class SingleInBf16(_OneProcess):
    """The whole model on one device, with layers that use bf16 parameters."""

    name: ClassVar[str] = "single_in_bf16"
    summary: ClassVar[str] = "one process with bf16 parameters, for strategies that have them"

    def apply(self, assembly: Assembly) -> None:
        """Wrap the model, so that the forward pass uses rounded parameters."""
        assembly.module = _Rounded(assembly.model)


class _Rounded(nn.Module):
    """A model whose forward pass uses its parameters in bf16."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self._names = set(bf16_parameter_names(model))

    def forward(self, *inputs: Any) -> Any:
        parameters = self.model.named_parameters()
        rounded = {n: p.to(torch.bfloat16) for n, p in parameters if n in self._names}
        return torch.func.functional_call(self.model, rounded, inputs)


class SingleMoved(_OneProcess):
    """The whole model on one device, with each weight one unit in the last place away."""

    name: ClassVar[str] = "single_moved"
    summary: ClassVar[str] = "one process with weights a unit in the last place away"

    def apply(self, assembly: Assembly) -> None:
        """Make each weight one unit in the last place larger or smaller, the same in every run."""
        signs = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in assembly.model.parameters():
                drawn = torch.randint(0, 2, parameter.shape, generator=signs) * 2 - 1
                unit = torch.finfo(parameter.dtype).eps
                parameter.mul_(1 + unit * drawn.to(parameter))
