"""References of `bigtrain verify` that differ from strategy `single`.

With bf16 parameters: layers of a strategy with fp32 master weights use bf16 parameters. Residual
sums, norms and embeddings are then bf16, too, while autocast over fp32 parameters leaves them in
fp32. In one process the same numbers come from fp32 parameters that are rounded to bf16 for each
micro-batch, and whose bf16 gradients are accumulated in fp32.

With moved weights: each weight begins one unit in the last place away. The difference of this run
from the reference is the least that rounding explains: a strategy sums in another order.
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
    """Like strategy `single`: nothing is shared or wrapped."""

    role: ClassVar[Role] = "replicate"

    @property
    def traits(self) -> Traits:
        """See `Strategy.traits`."""
        return Traits(final_gradients=True)


class SingleInBf16(_OneProcess):
    """The whole model on one device; its layers use bf16 parameters."""

    name: ClassVar[str] = "single_in_bf16"
    summary: ClassVar[str] = "one process with bf16 parameters, for strategies that have them"

    def apply(self, assembly: Assembly) -> None:
        """Round the parameters in the forward pass."""
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
    """The model on one device, each weight a unit in the last place larger or smaller."""

    name: ClassVar[str] = "single_moved"
    summary: ClassVar[str] = "one process with weights a unit in the last place away"

    def apply(self, assembly: Assembly) -> None:
        """Move the weights, with signs that are the same in every run."""
        signs = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in assembly.model.parameters():
                drawn = torch.randint(0, 2, parameter.shape, generator=signs) * 2 - 1
                unit = torch.finfo(parameter.dtype).eps
                parameter.mul_(1 + unit * drawn.to(parameter))
