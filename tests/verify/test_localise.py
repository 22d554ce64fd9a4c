"""A run that differs is traced back to the first operation, gradient or sum that differs."""

from __future__ import annotations

import json

import pytest
import torch
from support.odd_strategies import break_rule
from support.ranks import run_ranks
from support.sliced_models import build_model, gpt_case, run_pass, slice_group
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
        self.calls.add_(1)  # differs between ranks, as BatchNorm's counter does
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
    """Record one step; `parts` contains the micro-batches of each rank."""
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


def find_difference(tmp_path, model, **wrong):
    """The text for the first difference between a recorded run and one with a fault."""
    expected_folder = write_run(tmp_path / "one", Model(), [BATCHES])
    parts = [BATCHES[:2], BATCHES[2:]]
    actual_folder = write_run(tmp_path / "other", model, parts, dp=2, **wrong)
    differences = compare_recordings(expected_folder, actual_folder)
    return first_difference(expected_folder, actual_folder, differences, TOLERANCE)


@pytest.mark.parametrize("recompute", [False, True])
def test_the_first_wrong_operation_is_named_with_its_block(tmp_path, recompute):
    model = Model(recompute)
    model.blocks[1].shift = 0.01
    message = find_difference(tmp_path, model)
    assert "step 1, add in blocks.1 (block blocks.1)" in message
    assert "on rank 0 (micro-batch 1 of 4)" in message


def test_a_wrong_gradient_of_a_value_is_named_in_the_order_of_the_backward_pass(tmp_path):
    model = Model()

    def spoil(_module, _inputs, output):
        output.register_hook(lambda gradient: gradient * 1.01)

    model.blocks[1].linear.register_forward_hook(spoil)
    message = find_difference(tmp_path, model)
    assert "step 1, the gradient of output in blocks.1.linear (block blocks.1)" in message


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"loss": 1.01}, "the loss, which is 1.0e-02 off, while all values in the model agree"),
        ({"spoil": "blocks.2.linear.bias"}, "parameter blocks.2.linear.bias (block blocks.2)"),
        ({"norm": 1.0001}, "the norm of the gradients, which is 1.0e-04 off, while every"),
        ({}, "did not occur again"),
    ],
)
def test_what_is_wrong_beside_the_values(tmp_path, wrong, message):
    assert message in find_difference(tmp_path, Model(), **wrong)


def record_model(context, sequence_dim, broken):
    """The recordings of a model, whole and in slices, on a rank."""
    group, case = slice_group(context, sequence_dim=sequence_dim), gpt_case(tied=True)
    if broken:
        break_rule(torch.nn.functional.gelu, second_on_rank=context.rank)
    records = []
    for model in (build_model(case, None), build_model(case, group, "selective")):
        trace = ExecutionTrace([model], 1.0)
        with trace:
            run_pass(model, case)
        trace.close()
        records.append(trace.entries)
    return records


def first_differing_name(whole, sliced):
    """The name of the first value, or else the first gradient, that differs."""
    known = {entry[:6]: entry.digest for entry in sliced}
    assert known.keys() >= {entry[:6] for entry in whole}
    for entry in sorted(whole, key=lambda entry: entry.is_gradient):
        if known[entry[:6]] != pytest.approx(entry.digest, rel=1e-10, abs=1e-10):
            return entry
    return None


@pytest.mark.parametrize("sequence_dim", [None, 1])
def test_what_lies_in_slices_is_noted_as_the_whole(sequence_dim):
    for whole, sliced in run_ranks(record_model, 2, sequence_dim, False, tp=2):
        assert len(whole) > 100
        assert first_differing_name(whole, sliced) is None
    for whole, sliced in run_ranks(record_model, 2, sequence_dim, True, tp=2):
        first = first_differing_name(whole, sliced)
        assert (first.module, first.operation) == ("blocks.1.mlp.activation", "gelu")
        assert not first.is_gradient


def test_a_wrong_rule_of_slices_is_named_with_its_block(tmp_path):
    (tmp_path / "wrong.yaml").write_text(
        "strategy: {slice: {name: 'support.odd_strategies:WrongRule'}}\n"
    )
    words = ["model.args={num_layers: 2, width: 32, num_heads: 2, sequence_length: 16}"]
    words += ["data.name=synthetic", "data.args={kind: language}", "train.global_batch_size=4"]
    done = forked_cli(
        ["verify", "-n", "2", "--strategies", "wrong.yaml", *words, "--steps", "1"], cwd=tmp_path
    )
    assert done.returncode == 1, done.stderr
    assert "step 1, gelu in blocks.1.mlp.activation (block blocks.1)" in done.stdout


GPT = [
    "model.args={num_layers: 2, width: 32, num_heads: 2, sequence_length: 16}",
    *("data.name=synthetic", "data.args={kind: language, ignore_fraction: 0.3}"),
]
IMAGES = [
    *("model.name=support.odd_strategies:Hooked", "data.name=synthetic"),
    "data.args={kind: classification, input_shape: [1, 8, 8]}",
]


@pytest.mark.parametrize(
    ("name", "model", "message"),
    [
        (
            "ShiftsMask",
            GPT,
            "scaled_dot_product_attention in blocks.1.attention (block blocks.1)",
        ),
        ("CountsRows", GPT, "the loss, which is"),
        ("SwapsExperts", GPT, "in blocks.0.mlp"),
        ("ForgetsDecay", [*GPT, "optim.weight_decay=1.0"], "step 2, embedding in"),
        ("DropsHooks", IMAGES, "the gradient of the parameter head.weight"),
    ],
)
def test_seeded_faults_are_named_by_the_command(tmp_path, name, model, message):
    (tmp_path / "wrong.yaml").write_text(
        f"strategy: {{replicate: {{name: 'support.odd_strategies:{name}'}}}}\n"
    )
    words = [*model, "train.global_batch_size=8", "train.micro_batch_size=2", "--steps", "2"]
    done = forked_cli(["verify", "-n", "2", "--strategies", "wrong.yaml", *words], cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    assert message in done.stdout
    assert "in a plain torch loop on the same global batch" in done.stdout
