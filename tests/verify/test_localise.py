"""A run that differs is traced back to the first operation, gradient or sum that does."""

from __future__ import annotations

import json

import pytest
import torch
from support.zygote import forked_cli
from torch import nn
from torch.utils.checkpoint import checkpoint

from bigtrain.checkpoint.write import write_tensors
from bigtrain.ranks.context import RunContext
from bigtrain.tensors.shards import StateTensor
from bigtrain.verify.differences import Tolerance, compare_recordings
from bigtrain.verify.execution_trace import ExecutionTrace
from bigtrain.verify.localise import first_difference

TOLERANCE = Tolerance.of("fp32")


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.shift = 0.0
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls.add_(1)  # of this rank alone, as BatchNorm's
        return x + torch.tanh(self.linear(x) + self.shift)


class Model(nn.Module):
    def __init__(self, recompute=False):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([Block(), Block(), Block()])
        self.head = nn.Linear(4, 2)
        self.recompute = recompute

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return self.head(x)


def write_run(folder, model, parts, *, dp=1, loss=1.0, norm=1.0, spoil=None):
    """One step; `parts` has for each rank its micro-batches."""
    folder.mkdir()
    gradients = {}
    for rank, batches in enumerate(parts):
        model.zero_grad()
        trace = ExecutionTrace([model], dp)
        with trace:
            for batch in batches:
                (model(batch).square().sum() * dp).backward()
        trace.close()
        for name, parameter in model.named_parameters():
            gradients[name] = gradients.get(name, 0) + parameter.grad / dp
        found = {"rank": rank, "dp_rank": rank, "num_micro_batches": len(batches)}
        found |= {"blocks": [f"blocks.{i}" for i in range(3)], "entries": trace.entries}
        (folder / f"trace-{rank}.json").write_text(json.dumps(found))
    if spoil is not None:
        gradients[spoil] = gradients[spoil] * 1.02
    record = {"losses": [loss], "norms": [norm], "no_gradients": None}
    (folder / "record.json").write_text(json.dumps(record))
    weights = dict(model.named_parameters())
    for name, tensors in (
        ("gradients-1", gradients),
        ("weights-before", weights),
        ("weights-after", {name: weights[name] - gradients[name] for name in weights}),
    ):
        state = {k: StateTensor.of(v.detach()) for k, v in tensors.items()}
        write_tensors(folder / f"{name}.safetensors", state, RunContext.alone())
    return folder


BATCHES = [torch.randn(3, 4, generator=torch.Generator().manual_seed(i)) for i in range(4)]


def found(tmp_path, model, **wrong):
    one = write_run(tmp_path / "one", Model(), [BATCHES])
    parts = [BATCHES[:2], BATCHES[2:]]
    other = write_run(tmp_path / "other", model, parts, dp=2, **wrong)
    differences = compare_recordings(one, other)
    return first_difference(one, other, differences, TOLERANCE)


@pytest.mark.parametrize("recompute", [False, True])
def test_the_first_wrong_operation_is_named_with_its_block(tmp_path, recompute):
    model = Model(recompute)
    model.blocks[1].shift = 0.01
    said = found(tmp_path, model)
    assert "step 1, add in blocks.1 (block blocks.1)" in said
    assert "on rank 0 (micro-batch 1 of 4)" in said


def test_a_wrong_gradient_of_a_value_is_named_in_the_order_of_the_backward_pass(tmp_path):
    model = Model()

    def spoil(_module, _inputs, output):
        output.register_hook(lambda gradient: gradient * 1.01)

    model.blocks[1].linear.register_forward_hook(spoil)
    said = found(tmp_path, model)
    assert "step 1, the gradient of output in blocks.1.linear (block blocks.1)" in said


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"loss": 1.01}, "the loss, which is 1.0e-02 off, while all values in the model agree"),
        ({"spoil": "blocks.2.linear.bias"}, "parameter blocks.2.linear.bias (block blocks.2)"),
        ({"norm": 1.0001}, "the norm of the gradients, which is 1.0e-04 off, while every"),
        ({}, "does not come again"),
    ],
)
def test_what_is_wrong_beside_the_values(tmp_path, wrong, message):
    assert message in found(tmp_path, Model(), **wrong)


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("ShiftsMask", "scaled_dot_product_attention in blocks.1.attention (block blocks.1)"),
        ("CountsRows", "the loss, which is"),
    ],
)
def test_seeded_faults_are_named_by_the_command(tmp_path, name, message):
    (tmp_path / "wrong.yaml").write_text(
        f"strategy: {{replicate: {{name: 'support.odd_strategies:{name}'}}}}\n"
    )
    words = ["model.args={num_layers: 2, width: 32, num_heads: 2, sequence_length: 16}"]
    words += ["data.name=synthetic", "data.args={kind: language, ignore_fraction: 0.3}"]
    words += ["train.global_batch_size=8", "train.micro_batch_size=2", "--steps", "1"]
    done = forked_cli(["verify", "-n", "2", "--strategies", "wrong.yaml", *words], cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    assert message in done.stdout
