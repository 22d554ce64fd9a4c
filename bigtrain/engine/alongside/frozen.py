"""One engine's model in another engine's loss, with constant weights, as a GAN's discriminator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.func import functional_call

from bigtrain.engine.alongside.average import holds_whole_model
from bigtrain.engine.engine import Engine
from bigtrain.errors import ConfigError


def frozen(engine: Engine) -> Callable[..., Any]:
    """Return the model of an engine as a function whose weights get no gradients.

    The loss of another engine may call the function. Gradients of the result reach the arguments.
    The weights are constants with the values at the time of the call.

    Args:
        engine: an engine with the whole model on each rank.

    Returns:
        A function with the arguments and the result of the model.

    Raises:
        ConfigError: a rank has only a part of the model, or the model's blocks are recomputed.
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
