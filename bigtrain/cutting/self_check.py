"""Compare the stages with the whole model in one process: loss and gradients have to be equal."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
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
    buffers = [buffer.clone() for buffer in whole_model.buffers()]
    batch = micro_batch.first_rows(rows, loss.count).to("cpu")
    state = torch.random.get_rng_state()
    expected = loss(whole_model(batch.inputs), batch.targets, batch.count)
    expected.backward()  # type: ignore[no-untyped-call]
    gradients = _take_gradients(whole_model)
    # The stages use the same parameters: a copy would take as much memory again.
    with torch.no_grad():
        for buffer, before in zip(whole_model.buffers(), buffers, strict=True):
            buffer.copy_(before)
    torch.random.set_rng_state(state)
    differences = _Differences(expected, gradients)
    loss_of_stages = _chain(plain_cut, whole_model, batch, loss)
    with differences.measured(whole_model):
        loss_of_stages.backward()  # type: ignore[no-untyped-call]
    torch.random.set_rng_state(state)
    return differences.largest(loss_of_stages)


def _chain(cut: Cut, model: nn.Module, batch: MicroBatch, loss: Loss) -> Tensor:
    boundary: Any = ()
    for index in range(cut.stages):
        tree = copy_modules(model)
        cut.strip(tree, [index], torch.device("cpu"))
        stage = cut.stage(tree, index, loss, torch.device("cpu")).train()
        boundary = stage(*boundary, micro_batch=batch, scale=1.0)
    result: Tensor = boundary
    return result


def _take_gradients(model: nn.Module) -> dict[str, Tensor]:
    """Return the gradients of a model by parameter name, and remove them from the model."""
    gradients = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            gradients[name], parameter.grad = parameter.grad, None
    return gradients


class _Differences:
    """Compares the loss and the gradients of the stages with those of the whole model.

    Each gradient is compared and freed as soon as it is complete.

    Args:
        expected: 0-dim, the loss of the whole model.
        gradients: the gradients of the whole model, by parameter name. They are freed, too.
    """

    def __init__(self, expected: Tensor, gradients: dict[str, Tensor]) -> None:
        self._expected, self._gradients = float(expected.detach()), gradients
        self._scale = max((_largest(each) for each in gradients.values()), default=1.0)
        self._worst, self._worst_name = 0.0, "the loss"
        self._only_stages: list[str] = []

    @contextmanager
    def measured(self, model: nn.Module) -> Iterator[None]:
        """Compare the gradients of the backward pass in a `with` block."""
        names = {id(parameter): name for name, parameter in model.named_parameters()}

        def compare(parameter: Tensor) -> None:
            name, found = names[id(parameter)], parameter.grad
            parameter.grad = None
            expected = self._gradients.pop(name, None)
            if expected is None:
                self._only_stages.append(name)
            elif found is not None:
                self._add(name, _largest(found.sub_(expected)) / max(self._scale, 1e-30))

        hooks = [
            parameter.register_post_accumulate_grad_hook(compare)  # type: ignore[no-untyped-call]
            for parameter in model.parameters()
            if parameter.requires_grad
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def largest(self, loss: Tensor) -> float:
        """Return the largest relative difference; see `compare_cut`.

        Args:
            loss: 0-dim, the loss of the stages.

        Raises:
            ConfigError: see `compare_cut`.
        """
        for name in [*self._only_stages, *self._gradients]:
            raise ConfigError(_difference_message(name, "it has a gradient in only one of the two"))
        gap = abs(self._expected - float(loss.detach())) / max(1.0, abs(self._expected))
        self._add("the loss", gap)
        if not self._worst <= SELF_CHECK_TOLERANCE:
            difference = f"they differ by {self._worst:.2g}, relative"
            raise ConfigError(_difference_message(self._worst_name, difference))
        return self._worst

    def _add(self, name: str, gap: float) -> None:
        if math.isnan(self._worst):  # is the worst, and greater than nothing
            return
        if not gap <= self._worst:  # also true for a gap that is not a number
            self._worst, self._worst_name = gap, name


def _largest(tensor: Tensor) -> float:
    """Return the largest absolute value of a tensor, without a copy of it; 0 if it is empty."""
    if not tensor.numel():
        return 0.0
    low, high = tensor.detach().aminmax()
    return max(-float(low), float(high))


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
