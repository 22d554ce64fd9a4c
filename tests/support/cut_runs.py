"""Run the stages of a cut model one after the other on one device and compare with the
whole model.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support.cutting_nets import Case
from torch import Tensor, nn

from bigtrain.cutting.cut import Cut
from bigtrain.cutting.cut_points import CutPoint, legal_points
from bigtrain.cutting.stage import Stage
from bigtrain.cutting.traced_model import Numerics, TracedModel
from bigtrain.data.loader import MicroBatch
from bigtrain.tensors.tree import map_tensors, tree_tensors

CPU = torch.device("cpu")
NEAR = 1e-12


class Squares:
    """A loss of all floating-point tensors in an output: the sum of mean squares and means."""

    def __call__(self, output: Any, target: Any, count: float | None = None) -> Tensor:
        del target, count
        tensors = [t for t in tree_tensors(output) if t.is_floating_point()]
        return torch.stack([(t.double() ** 2).mean() + t.double().mean() for t in tensors]).sum()

    def count(self, target: Any) -> int:
        del target
        return 1


def batch(inputs: Any) -> MicroBatch:
    """A micro-batch of one sample with these inputs and a dummy target."""
    return MicroBatch(inputs, torch.zeros(1), 1, 1)


def copy_batch(micro_batch: MicroBatch) -> MicroBatch:
    """A copy of a micro-batch, as each rank has a copy for itself."""
    return batch(map_tensors(micro_batch.inputs, torch.clone))


def make_model(case: Case) -> nn.Module:
    """The model of a case in float64, with noise added so that no parameter is zero."""
    torch.manual_seed(0)
    model = case.make().double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def common_points(
    traced_model: TracedModel, micro_batch: MicroBatch
) -> tuple[list[CutPoint], dict[str, str]]:
    """The cut points that are legal in training and in evaluation, and why others are refused."""
    evaluated, refused = legal_points(traced_model.trace(micro_batch, training=False)[0])
    places = {(point.name, point.number) for point in evaluated}
    points, why = legal_points(traced_model.trace(micro_batch, training=True)[0])
    return [p for p in points if (p.name, p.number) in places], refused | why


def stages_of(cut: Cut, model: nn.Module) -> list[Stage]:
    """Every stage, each stripped from a separate copy of the model as on separate ranks."""
    stages = []
    for index in range(cut.stages):
        part = copy.deepcopy(model)
        cut.strip(part, [index], CPU)
        stages.append(cut.stage(part, index, Squares(), CPU))
    return stages


def train_stages(stages: list[Stage], micro_batch: MicroBatch, around: Any) -> float:
    """Run forward and backward, stage after stage, passing only boundary tensors; return
    the loss.
    """
    sent: list[tuple[tuple[Tensor, ...], tuple[Tensor, ...]]] = []
    boundary: tuple[Tensor, ...] = ()
    for stage in stages:
        mine = copy_batch(micro_batch)
        expected = stage.incoming(mine)
        assert [(t.shape, t.dtype) for t in boundary] == [(e.shape, e.dtype) for e in expected]
        incoming = tuple(
            w.detach().clone().requires_grad_(e.requires_grad)
            for w, e in zip(boundary, expected, strict=True)
        )
        with around():
            output = stage(*incoming, micro_batch=mine, scale=1.0)
        boundary = output if not stage.last else (output,)
        sent.append((incoming, boundary))
    loss = float(boundary[0].detach())
    gradients: list[Tensor | None] = [None]
    for incoming, outgoing in reversed(sent):
        pairs = [
            (out, gradient if gradient is not None else torch.ones_like(out))
            for out, gradient in zip(outgoing, gradients, strict=True)
            if out.requires_grad and (gradient is not None or outgoing is boundary)
        ]
        if pairs:
            torch.autograd.backward([p[0] for p in pairs], [p[1] for p in pairs])
        gradients = [w.grad for w in incoming]
    return loss


def evaluate_stages(stages: list[Stage], micro_batch: MicroBatch, around: Any) -> Any:
    """Run the stages without gradients, passing only boundary tensors; return the last output."""
    boundary: Any = ()
    for stage in stages:
        with torch.no_grad(), around():
            boundary = stage.eval()(*boundary, micro_batch=copy_batch(micro_batch))
    return boundary


def difference(a: Tensor | None, b: Tensor | None) -> float:
    """The largest absolute difference; a missing tensor equals zeros and differs from all else by
    inf.
    """
    if a is None or b is None:
        present = a if b is None else b
        return 0.0 if present is None or not bool(present.any()) else float("inf")
    assert a.shape == b.shape
    return (
        float((a.to(torch.complex128) - b.to(torch.complex128)).abs().max()) if a.numel() else 0.0
    )


def compare(
    model: nn.Module, cut: Cut, micro_batches: list[MicroBatch], near: float = NEAR
) -> None:
    """Train and evaluate the whole model and the stages on each batch; assert that they agree."""
    around = cut.traced_model.autocast
    whole, stages = copy.deepcopy(model), stages_of(cut, model)
    for number, micro_batch in enumerate(micro_batches):
        for part in (whole, *stages):
            part.train().zero_grad()
        torch.manual_seed(number)
        with around():
            loss = Squares()(whole(copy_batch(micro_batch).inputs), None)
        loss.backward()
        torch.manual_seed(number)
        got = train_stages(stages, micro_batch, around)
        assert abs(got - float(loss.detach())) <= near, ("loss", number)
        names = set()
        for name, parameter in whole.named_parameters():
            shares = [p for s in stages for n, p in s.named_parameters() if n == name]
            names.add(name)
            assert len(shares) == len(cut.owners[name]) > 0
            gradients = [p.grad for p in shares if p.grad is not None]
            total = torch.stack(gradients).sum(0) if gradients else None
            assert difference(parameter.grad, total) <= near, ("gradient", name, number)
        assert names | set(cut.aliases) >= {n for s in stages for n, _ in s.named_parameters()}
        for name, buffer in whole.named_buffers():
            shares = [b for s in stages for n, b in s.named_buffers() if n == name]
            assert shares, name
            for share in shares:
                assert difference(buffer, share) <= near, ("buffer", name, number)
        torch.manual_seed(number)
        with torch.no_grad(), around():
            expected = whole.eval()(copy_batch(micro_batch).inputs)
        torch.manual_seed(number)
        output = evaluate_stages(stages, micro_batch, around)
        assert type(output) is type(expected)
        pairs = zip(tree_tensors(expected), tree_tensors(output), strict=True)
        assert all(difference(a, b) <= near for a, b in pairs), ("output", number)


def trace_case(case: Case, **numerics: Any) -> tuple[nn.Module, TracedModel, list[MicroBatch]]:
    """The model of a case, its trace, and its micro-batches; `numerics` are those of the trace."""
    model = make_model(case)
    torch.manual_seed(1)
    batches = [batch(make()) for make in (case.inputs, *case.others, case.inputs)]
    return model, TracedModel(model, Squares(), CPU, Numerics(**numerics)), batches


RECOMPUTED = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")
