"""One engine's model inside another's loss, with constant weights: a GAN's discriminator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.func import functional_call

from bigtrain.engine.alongside.average import holds_whole_model
from bigtrain.engine.engine import Engine
from bigtrain.errors import ConfigError


def frozen(engine: Engine) -> Callable[..., Any]:
    """The model of an engine as a function whose inputs get gradients and whose weights do not.

    The loss of another engine may call it. Gradients of the result reach the arguments; the weights
    have the values of the time of the call, and get no gradient.

    Args:
        engine: an engine whose strategy leaves a rank the whole model.

    Raises:
        ConfigError: a rank has a part of the model.
    """
    plan = engine.plan
    reason = ""
    if not holds_whole_model(plan) or plan.tp > 1:
        reason = "a rank has a part of the model, and another engine's loss needs all of it"
    elif "recompute" in plan.techniques:
        reason = "blocks are recomputed in the backward pass, when the weights are not constant"
    if reason:
        raise ConfigError(
            f"frozen: under strategy {plan.strategy.name} {reason}. Use strategy ddp, zero1_torch "
            "or zero2 for this engine; the other engine may have any strategy."
        )

    def call(*args: Any, **kwargs: Any) -> Any:
        weights = {name: p.detach() for name, p in engine.model.named_parameters()}
        return functional_call(engine.model, weights, args, kwargs)

    return call
