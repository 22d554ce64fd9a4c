"""Every classification and segmentation model of torchvision, cut into 2 and into 4 stages.

A model of up to `NUMBERS` parameters runs in float32 on small images, and is compared with the
whole model: the loss, every gradient and buffer in training, and the output in evaluation. A larger
model would take seconds for each of these, so its stages run on fake tensors and only shapes and
types are compared: of the loss, the buffers and the output, and for 4 stages also which parameters
get a gradient. Of each family at least one model is compared in numbers, even if it is large
(`LARGE`). One of each family is tested in every run, the others are marked `full`.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from support.zoo import FAMILIES, NAMES, SEGMENTATION, family_of
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torchvision import models
from torchvision.models.regnet import BlockParams

from bigtrain.cutting.cut import Cut, copy_modules, cut_at
from bigtrain.cutting.cut_points import legal_points
from bigtrain.cutting.stage import Stage
from bigtrain.cutting.traced_model import Numerics, TracedModel
from bigtrain.data.loader import MicroBatch
from bigtrain.losses.loss import CrossEntropy
from bigtrain.tensors.fake import fake_model, fake_tensor
from bigtrain.tensors.tree import tree_tensors

CPU = torch.device("cpu")
NUMBERS = 30_000_000
LARGE = {"alexnet", "vgg11", "vit_b_32"}
NEAR = 1e-5
SIZES = {"vit": 224, "maxvit": 224, "inception": 299, "googlenet": 32, "alexnet": 63}


def on_the_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    """RegNet computes its widths with tensors and reads them, so it cannot be built on meta."""

    def called(*args: Any, **kwargs: Any) -> Any:
        with torch.device("cpu"):
            return function(*args, **kwargs)

    return called


def describe_model(name: str) -> nn.Module:
    """The model on the meta device."""
    options = {"weights_backbone": None} if name in SEGMENTATION else {}
    with torch.device("meta"), warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(BlockParams, "from_init_params", on_the_cpu(BlockParams.from_init_params))
        warnings.simplefilter("ignore", FutureWarning)
        if name in ("googlenet", "inception_v3"):
            options["init_weights"] = False
        return models.get_model(name, weights=None, **options)


def filled(model: nn.Module) -> nn.Module:
    """Fill the model with values that keep activations in range, faster than its own
    initialization.
    """
    model = model.to_empty(device=CPU)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            width = parameter[0].numel() if parameter.dim() > 1 else 1
            bound = (3 / width) ** 0.5 if width > 1 else 1.0
            parameter.uniform_(-bound if width > 1 else 0.5, bound)
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                buffer.fill_(1 if name == "running_var" else 0)
    return model


def example(name: str) -> MicroBatch:
    size = next((size for start, size in SIZES.items() if name.startswith(start)), 32)
    images = torch.randn(2, 3, size, size)
    if name in SEGMENTATION:
        return MicroBatch(images, torch.randint(0, 5, (2, size, size)), 2 * size * size, 2)
    return MicroBatch(images, torch.randint(0, 5, (2,)), 2, 2)


def balanced_cut(traced_model: TracedModel, micro_batch: MicroBatch, stages: int) -> Cut:
    """The cut into stages with equal FLOPs and bytes."""
    trace, _ = traced_model.trace(micro_batch, training=True)
    evaluated, _ = traced_model.trace(micro_batch, training=False)
    evaluated_points = {(point.name, point.number) for point in legal_points(evaluated)[0]}
    points = [p for p in legal_points(trace)[0] if (p.name, p.number) in evaluated_points]
    work = [(cost.tick, cost.flops + cost.nbytes) for cost in trace.costs]
    total = sum(amount for _, amount in work)
    before = {p.call: sum(amount for tick, amount in work if tick < p.tick) for p in points}
    chosen: set[int] = set()
    for stage in range(1, stages):
        left = [call for call in before if call not in chosen]
        chosen.add(min(left, key=lambda call: abs(before[call] - total * stage / stages)))
    return cut_at(trace, sorted(chosen), traced_model)


def chain(stages: list[Stage], micro_batch: MicroBatch, *, training: bool) -> Any:
    """Run the stages in order; return the loss in training, otherwise the output."""
    boundary: Any = ()
    for stage in stages:
        expected = stage.train(training).incoming(micro_batch)
        assert [(t.shape, t.dtype) for t in boundary] == [(e.shape, e.dtype) for e in expected]
        boundary = stage(*boundary, micro_batch=micro_batch, scale=1.0 if training else None)
    return boundary


def stages_of(cut: Cut, model: nn.Module, loss: Any) -> list[Stage]:
    stages = []
    for index in range(cut.stages):
        tree = copy_modules(model)
        cut.strip(tree, [index], CPU)
        stages.append(cut.stage(tree, index, loss, CPU))
    return stages


def run(
    model: nn.Module, micro_batch: MicroBatch, loss: Any, cut: Cut | None, *, backward: bool = True
) -> dict[str, Tensor]:
    """All results of a training step and of an evaluation, by name."""
    stages = [] if cut is None else stages_of(cut, model, loss)
    torch.manual_seed(0)
    if cut is None:
        total = loss(model.train()(micro_batch.inputs), micro_batch.targets, micro_batch.count)
    else:
        total = chain(stages, micro_batch, training=True)
    if backward:
        total.backward()
    results = {"loss": total.detach()}
    results |= {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    results |= {f"{n} after": b.clone() for n, b in model.named_buffers()}
    with torch.no_grad():
        if cut is None:
            output = model.eval()(micro_batch.inputs)
        else:
            output = chain(stages, micro_batch, training=False)
    return results | {f"output {i}": t for i, t in enumerate(tree_tensors(output))}


def fresh(model: nn.Module, *, numbers: bool) -> nn.Module:
    return copy.deepcopy(model) if numbers else fake_model(model, CPU, double=False)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.filterwarnings("ignore:The given NumPy array:UserWarning")
def test_a_cut_model_is_the_whole_model(name: str) -> None:
    torch.manual_seed(0)
    micro_batch = example(name)
    loss = CrossEntropy(255, 1, 0.0) if name in SEGMENTATION else CrossEntropy()
    model = describe_model(name)
    traced_model = TracedModel(model, loss, CPU, Numerics())
    cuts = [balanced_cut(traced_model, micro_batch, stages) for stages in (2, 4)]
    names = {name for name, _ in model.named_parameters()}
    for cut in cuts:
        assert names <= set().union(*(cut.tensor_names_of([stage]) for stage in range(cut.stages)))
    size = sum(parameter.numel() for parameter in model.parameters())
    numbers = size <= NUMBERS or name in LARGE
    mode: Any = nullcontext() if numbers else FakeTensorMode()
    if numbers:
        model = filled(model)
    with mode:
        if not numbers:
            micro_batch = MicroBatch(
                fake_tensor(micro_batch.inputs, CPU), fake_tensor(micro_batch.targets, CPU), 2, 2
            )
        whole = run(fresh(model, numbers=numbers), micro_batch, loss, None)
        for cut in cuts:
            backward = numbers or cut.stages == 4
            part = fresh(model, numbers=numbers)
            parts = run(part, micro_batch, loss, cut, backward=backward)
            assert parts.keys() == (whole.keys() if backward else whole.keys() - names)
            for key, other in parts.items():
                tensor = whole[key]
                assert (tensor.shape, tensor.dtype) == (other.shape, other.dtype), key
                if numbers and tensor.numel():
                    scale = max(1.0, float(tensor.abs().max()))
                    assert float((tensor - other).abs().max()) <= NEAR * scale, key


def test_every_family_of_models_has_one_that_is_always_cut() -> None:
    assert len(NAMES) == 86
    for family, name in FAMILIES.items():
        assert name in NAMES
        assert family_of(name) == family
    assert {family_of(name) for name in NAMES} == set(FAMILIES)
