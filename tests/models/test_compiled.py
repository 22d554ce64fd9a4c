"""Compiled blocks: which blocks are compiled, and one program for all blocks of a class."""

from __future__ import annotations

import copy

import pytest
import torch
from support.nets import VOCABULARY, tokens
from torch import nn

from bigtrain.activations.policy import apply_policies, remove_policies
from bigtrain.assembly.make_plan import make_plan
from bigtrain.engine.engine import Engine
from bigtrain.errors import ConfigError
from bigtrain.job.load import job_from_keys
from bigtrain.losses.loss import CrossEntropy
from bigtrain.memory.timeline import Peak
from bigtrain.models import compiled
from bigtrain.models.blocks import find_blocks
from bigtrain.models.compiled import compile_blocks, programs_for_every_size
from bigtrain.ranks.context import RunContext


class Block(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.nn.functional.gelu(self.inner(x))


class Dropping(Block):
    """Saves a mask of bytes if compiled, and a mask of floats otherwise."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.nn.functional.dropout(self.inner(x).sin().exp(), 0.5, self.training)


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> list[torch.fx.GraphModule]:
    """The programs that torch traces; they run uncompiled, so no C++ compiler is needed."""
    made: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, _example: object) -> torch.fx.GraphModule:
        made.append(graph)
        return graph

    def program(forward: object, *, fake: bool) -> object:
        assert not fake
        return torch.compile(forward, backend=keep, dynamic=False)

    monkeypatch.setattr(compiled, "_program", program)
    torch._dynamo.reset()
    return made


def test_blocks_that_are_alike_share_a_program_and_all_else_stays(programs) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ModuleList(Block() for _ in range(5)))
    blocks = model[1]
    blocks[3].forward = lambda x: 2 * x
    x = torch.randn(4, 8)
    before = [block(x) for block in blocks]
    compile_blocks(model, {"1.4": "selective"})
    after = [block(x) for block in blocks]
    for was, now in zip(before, after, strict=True):
        torch.testing.assert_close(now, was)
    assert len(programs) == 1
    assert [bool(block.__dict__.get("forward")) for block in blocks] == [True] * 4 + [False]
    remove_policies(model)
    assert [bool(block.__dict__.get("forward")) for block in blocks] == [False] * 3 + [True, False]


def test_a_copy_computes_with_its_own_parameters_and_recomputation_goes_around(programs) -> None:
    model = nn.Sequential(Block(), Block())
    compile_blocks(model, {})
    apply_policies(model, {"0": "full", "1": "full"})
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.zero_()
    x = torch.randn(4, 8, requires_grad=True)
    torch.testing.assert_close(copied(x), x)
    model(x).sum().backward()
    assert programs
    grads = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    remove_policies(model)
    assert not any("forward" in module.__dict__ for module in model.modules())
    model(x).sum().backward()
    for parameter, grad in zip(model.parameters(), grads, strict=True):
        torch.testing.assert_close(grad, parameter.grad)


def test_more_sizes_than_torch_allows_are_all_compiled(programs) -> None:
    sizes = range(8, 8 + 3 * 12, 3)
    model = nn.ModuleList(Block(size) for size in sizes)
    compile_blocks(model, {})
    with programs_for_every_size():
        for size, (_, block) in zip(sizes, find_blocks(model), strict=True):
            block(torch.randn(2, size))
    assert len(programs) == len(sizes) > 8


def trained(**keys: object) -> tuple[list[float], Peak, Peak]:
    """The losses of four steps, two of them tracked; the forecast peak and the tracked peak."""
    torch.manual_seed(0)
    fixed = {"train.global_batch_size": 4, "memory.track_steps": 2}
    job = job_from_keys("single", {**fixed, **keys})
    context = RunContext.alone(torch.device("cpu"))
    make = lambda parameters: torch.optim.SGD(parameters, 0.1)  # noqa: E731
    model = nn.Sequential(nn.Embedding(VOCABULARY, 8), nn.Sequential(Dropping(), Dropping()))
    model.append(nn.Linear(8, VOCABULARY))
    samples = tokens(4)
    batch = (samples.inputs, samples.targets)
    with Engine(model, CrossEntropy(), make, job, context) as engine:
        losses = [engine.step(batch).loss for _ in range(4)]
        return losses, engine.prediction.peak, engine.meter.measured().peak


@pytest.mark.filterwarnings("default::UserWarning")  # torch warns while it traces
def test_a_compiled_run_equals_the_uncompiled_one_and_its_peak_is_predicted() -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    losses, predicted, tracked = trained(**{"train.compile": "blocks"})
    # One in the forecast, one in the run
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 2
    assert predicted == tracked
    expected, as_written, _ = trained()
    assert losses == pytest.approx(expected, rel=1e-6)
    assert predicted.bytes < as_written.bytes


@pytest.mark.parametrize(
    ("strategy", "ranks", "words"),
    [
        ("zero3", 2, "train.compile=blocks: DeepSpeed's stage 3 gathers .* Use --strategy fsdp"),
        ("zero_bubble", 2, "splits it in two. Use strategy.cut.schedule=1f1b, or train.compile="),
    ],
)
def test_what_compiles_no_block_is_refused_with_the_fix(strategy, ranks, words) -> None:
    job = job_from_keys(strategy, {"train.global_batch_size": 8, "train.compile": "blocks"})
    with pytest.raises(ConfigError, match=words):
        make_plan(job, ranks, "cpu")


def test_a_cap_that_the_compiler_would_break_is_refused() -> None:
    keys = {"train.global_batch_size": 8, "train.compile": "blocks", "memory.cap": "100MiB"}
    with pytest.raises(ConfigError, match=r"memory.cap=104857600 limits all of that. Use train"):
        make_plan(job_from_keys("single", keys), 1, "cpu")


def test_a_missing_compiler_is_named_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    job = job_from_keys("single", {"train.global_batch_size": 8, "train.compile": "blocks"})
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ConfigError, match="Run: sudo apt-get install g"):
        make_plan(job, 1, "cpu")
    monkeypatch.setattr(compiled, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match="Run: pip install triton"):
        make_plan(job, 1, "cuda")
