"""Compare the stages with the whole model in one process: loss and gradients have to be equal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from bigtrain.cutting.cut import Cut, copy_modules
from bigtrain.cutting.traced_model import Numerics, TracedModel
from bigtrain.data.loader import MicroBatch
from bigtrain.errors import ConfigError
from bigtrain.hub.nf4 import invent_weights
from bigtrain.losses.loss import Loss
from bigtrain.tensors.fake import fake_model

SELF_CHECK_TOLERANCE = 1e-4
"""The largest relative difference that passes: float32 kernels may sum in different orders."""


def compare_cut(
    cut: Cut, model: nn.Module, micro_batch: MicroBatch, loss: Loss, rows: int = 2
) -> float:
    """Run the whole model, then its stages, on the CPU with invented weights.

    Args:
        cut: the cut of the model.
        model: the whole model, on any device (also meta); it is not changed.
        micro_batch: a micro-batch, of which the first rows are used.
        loss: the loss of the run.
        rows: the number of rows.

    Returns:
        The largest relative difference of the loss or of any gradient. Differences of gradients are
        divided by the largest element of all gradients.

    Raises:
        ConfigError: the loss or a gradient of the stages differs from the whole model's; the
            message has the name of the parameter.
    """
    cpu = torch.device("cpu")
    plain_cut = replace(cut, traced_model=TracedModel(model, loss, cpu, Numerics()))
    whole_model = fake_model(model, cpu, double=False).train()
    _invent(whole_model)
    cut_model = fake_model(model, cpu, double=False).train()
    with torch.no_grad():
        for target, source in zip(_tensors(cut_model), _tensors(whole_model), strict=True):
            target.copy_(source)
    batch = micro_batch.first_rows(rows, loss.count).to("cpu")
    state = torch.random.get_rng_state()
    expected = loss(whole_model(batch.inputs), batch.targets, batch.count)
    expected.backward()  # type: ignore[no-untyped-call]
    torch.random.set_rng_state(state)
    loss_of_stages = _chain(plain_cut, cut_model, batch, loss)
    loss_of_stages.backward()  # type: ignore[no-untyped-call]
    torch.random.set_rng_state(state)
    return _difference(expected, loss_of_stages, whole_model, cut_model)


def _chain(cut: Cut, model: nn.Module, batch: MicroBatch, loss: Loss) -> Tensor:
    boundary: Any = ()
    for index in range(cut.stages):
        tree = copy_modules(model)
        cut.strip(tree, [index], torch.device("cpu"))
        stage = cut.stage(tree, index, loss, torch.device("cpu")).train()
        boundary = stage(*boundary, micro_batch=batch, scale=1.0)
    result: Tensor = boundary
    return result


def _difference(
    expected: Tensor, loss_of_stages: Tensor, whole_model: nn.Module, cut_model: nn.Module
) -> float:
    scale = max(
        (float(p.grad.abs().max()) for p in whole_model.parameters() if p.grad is not None),
        default=1.0,
    )
    worst, worst_name = abs(float(expected.detach()) - float(loss_of_stages.detach())), "the loss"
    worst /= max(1.0, abs(float(expected.detach())))
    for (name, expected_parameter), found_parameter in zip(
        whole_model.named_parameters(), cut_model.parameters(), strict=True
    ):
        if (expected_parameter.grad is None) != (found_parameter.grad is None):
            raise ConfigError(_difference_message(name, "it has a gradient in only one of the two"))
        if (
            expected_parameter.grad is not None
            and found_parameter.grad is not None
            and expected_parameter.grad.numel()
        ):
            gap = float((expected_parameter.grad - found_parameter.grad).abs().max()) / max(
                scale, 1e-30
            )
            if not gap <= worst:
                worst, worst_name = gap, name
    if not worst <= SELF_CHECK_TOLERANCE:
        raise ConfigError(_difference_message(worst_name, f"they differ by {worst:.2g}, relative"))
    return worst


def _difference_message(name: str, difference: str) -> str:
    return (
        f"strategy.cut: the stages compute something else than the whole model: {name}: "
        f"{difference}. Something other than tensors passes between modules. Name other places in "
        "strategy.cut.at, or use a strategy without a cut."
    )


@torch.no_grad()
def _invent(model: nn.Module) -> None:
    """Fill a model with values that keep the activations of any model in range."""
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        if not parameter.is_floating_point():
            parameter.zero_()
        elif parameter.dim() > 1:
            width = max(1, parameter[0].numel())
            parameter.normal_(0.0, width**-0.5, generator=generator)
        else:
            parameter.uniform_(0.5, 1.5, generator=generator)
    invent_weights(model, generator)
    for buffer in model.buffers():
        buffer.fill_(1) if buffer.is_floating_point() else buffer.zero_()


def _tensors(model: nn.Module) -> Sequence[Tensor]:
    return [*model.parameters(), *model.buffers()]
