"""The library door, and what the engine promises to a loop of one's own."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from nets import ReadsItsWeights, TinyConv, TinyLM, tokens
from parity import sgd
from ranks import run_ranks
from torch import nn

import bigtrain
from bigtrain.assembly.make_plan import describe_plan, make_plan
from bigtrain.data import MicroBatch
from bigtrain.engine.engine import Engine
from bigtrain.errors import CheckpointError, ConfigError, NonFiniteError
from bigtrain.job.load import job_from_keys, load_job
from bigtrain.losses.loss import CrossEntropy
from bigtrain.losses.tasks import LanguageTask

BATCH = torch.randn(8, 4), torch.arange(8) % 3


def linear() -> nn.Module:
    return nn.Linear(4, 3)


def test_five_lines_train_a_model_of_ones_own():
    engine = bigtrain.prepare(linear, F.cross_entropy, functools.partial(torch.optim.SGD, lr=0.5))
    losses = [engine.step(BATCH).loss for _ in range(20)]
    report = engine.memory()
    engine.close()
    assert losses[-1] < losses[0]
    assert report is not None
    assert report.ranks[0].predicted.bytes == report.peak_bytes


def test_the_door_computes_what_a_plain_loop_computes():
    engine = bigtrain.prepare(linear, F.cross_entropy, sgd, train__accumulation_steps=3)
    model = nn.Linear(4, 3)
    model.load_state_dict(engine.model.state_dict())
    optimizer = sgd(model.parameters())
    for _ in range(5):
        loss = F.cross_entropy(model(BATCH[0]), BATCH[1])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert engine.step(BATCH).loss == pytest.approx(loss.item(), abs=1e-6)
    engine.close()


def test_a_module_already_built_keeps_its_weights():
    model = linear()
    before = model.weight.detach().clone()
    with bigtrain.prepare(model, F.cross_entropy, sgd) as engine:
        assert engine.model is model
        assert torch.equal(engine.model.weight, before)


def test_the_door_refuses_like_the_command_does():
    with pytest.raises(ConfigError, match=r"unknown key train\.micro_batch, did you mean"):
        bigtrain.prepare(linear, F.cross_entropy, sgd, train__micro_batch=2)
    with pytest.raises(ConfigError, match=r"strategy: unknown 'dppp'"):
        bigtrain.prepare(linear, F.cross_entropy, sgd, strategy="dppp")
    for key in ("optim__lr", "optim__name", "model__chunked_loss", "data__name"):
        with pytest.raises(ConfigError, match=rf"{key}=\.\.\.\) would be ignored"):
            bigtrain.prepare(linear, F.cross_entropy, sgd, **{key: 1})
    with (
        bigtrain.prepare(linear, F.cross_entropy, sgd) as engine,
        pytest.raises(ConfigError, match="the inputs hold no tensor"),
    ):
        engine.step((1, 2))
    keys = {"train__micro_batch_size": 3, "train__accumulation_steps": 2}
    with (
        bigtrain.prepare(linear, F.cross_entropy, sgd, **keys) as engine,
        pytest.raises(ConfigError, match=r"8 rows are more than .* = 3 \* 2 = 6\. Use .*steps=3"),
    ):
        engine.step(BATCH)


def joined_otherwise(context):
    with pytest.raises(ConfigError) as refused:
        Engine(linear, F.cross_entropy, sgd, job_from_keys("ddp", {}), context)
    return str(refused.value)


def test_ranks_that_are_connected_as_another_mesh_are_refused():
    for said in run_ranks(joined_otherwise, 2, pp=2):
        assert "connected as a mesh of pp=2, dp=1, tp=1, and the job plans pp=1, dp=2, tp=1" in said
        assert "Use connect(pp=1, dp=2, tp=1), or give the job mesh.pp=2." in said


def first_weights(context, model):
    with Engine(model, F.cross_entropy, sgd, job_from_keys("ddp", {}), context) as engine:
        return {n: t.clone() for n, t in engine.model.state_dict().items()}, engine.blueprint.reason


@pytest.mark.parametrize("model", [TinyLM, ReadsItsWeights])
def test_all_ranks_begin_with_the_same_weights(model):
    (one, reason), (other, _) = run_ranks(first_weights, 2, model)
    assert (reason == "") == (model is TinyLM)
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_weights_do_not_depend_on_the_number_of_ranks():
    alone = run_ranks(first_weights, 1, TinyLM)[0][0]
    among_two = run_ranks(first_weights, 2, TinyLM)[1][0]
    assert all(torch.equal(alone[name], among_two[name]) for name in alone)


def validated(context, rows):
    samples = tokens(rows)
    loss = CrossEntropy()
    mine = list(range(context.rank, rows, context.world_size))
    longest = -(-rows // context.world_size)
    batches = []
    for index in mine + [0] * (longest - len(mine)):
        inputs, targets = samples.inputs[index : index + 1], samples.targets[index : index + 1]
        padding = len(batches) >= len(mine)
        batches.append(
            MicroBatch(inputs, targets, 0 if padding else loss.count(targets), 0 if padding else 1)
        )
    job = job_from_keys("ddp", {"train.precision": "fp64"})
    task = LanguageTask(13)
    with Engine(TinyLM, loss, sgd, job, context, task=task) as engine:
        return engine.evaluate(batches)


def test_validation_is_the_same_on_any_number_of_ranks():
    alone = run_ranks(validated, 1, 7)[0]
    for found in run_ranks(validated, 2, 7):
        assert found["loss"] == pytest.approx(alone["loss"], abs=1e-12)


def test_a_gradient_that_is_not_finite_stops_before_the_step():
    class Explodes(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return grad * float("inf")

    def loss(output, target):
        return F.cross_entropy(Explodes.apply(output), target)

    with bigtrain.prepare(linear, loss, sgd, memory__predict=False) as engine:
        before = engine.model.weight.detach().clone()
        with pytest.raises(NonFiniteError, match=r"step 1: the gradient norm is (nan|inf)"):
            engine.step(BATCH)
        assert torch.equal(engine.model.weight, before)
        assert engine.steps_done == 0


def test_deterministic_runs_ask_torch_for_it_and_put_it_back():
    with bigtrain.prepare(linear, F.cross_entropy, sgd, train__deterministic=True) as engine:
        assert torch.are_deterministic_algorithms_enabled()
        engine.step(BATCH)
    assert not torch.are_deterministic_algorithms_enabled()


def test_batches_without_a_valid_target_do_no_harm():
    with bigtrain.prepare(linear, F.cross_entropy, sgd) as engine:
        result = engine.step((BATCH[0], torch.full((8,), -100)))
        assert result.loss == 0.0
        assert result.grad_norm == 0.0


def test_accumulation_counts_gradients_once(tmp_path):
    """Between accumulated micro-batches DDP holds one copy of the gradients, not two."""
    peaks = {}
    for rows in (4, 1):
        found = run_ranks(gradient_bytes, 2, rows)
        peaks[rows] = found[0]
    assert peaks[1] <= peaks[4]


def gradient_bytes(context, rows):
    keys = {"train.global_batch_size": 8, "train.micro_batch_size": rows, "memory.track_steps": 5}
    with Engine(
        lambda: TinyLM(width=128), CrossEntropy(), sgd, job_from_keys("ddp", keys), context
    ) as engine:
        samples = tokens(4, ignored=False)
        for _ in range(5):
            engine.step((samples.inputs, samples.targets))
        return engine.meter.measured().peak.breakdown.gradients


def saved(context, folder, how):
    job = job_from_keys("ddp", {})
    with Engine(TinyConv, CrossEntropy(class_dim=1), sgd, job, context) as engine:
        batch = (
            torch.randn(4, 1, 6, 6, generator=torch.Generator().manual_seed(1)),
            torch.arange(4) % 3,
        )
        if how == "save":
            engine.step(batch)
            engine.save(folder)
        else:
            engine.load(folder / "step-1")
        return engine.step(batch).loss, engine.steps_done


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_engine_continues_where_another_stopped(tmp_path, ranks):
    first = run_ranks(saved, ranks, tmp_path, "save")
    assert run_ranks(saved, ranks, tmp_path, "load") == first


def test_another_models_checkpoint_is_refused(tmp_path):
    with bigtrain.prepare(linear, F.cross_entropy, sgd) as engine:
        engine.step(BATCH)
        path = engine.save(tmp_path)
    with (
        bigtrain.prepare(lambda: nn.Linear(5, 3), F.cross_entropy, sgd) as other,
        pytest.raises(CheckpointError, match=r"weight has shape \(3, 4\) .* \(3, 5\) in the model"),
    ):
        other.load(path)
    with (
        bigtrain.prepare(TinyLM, F.cross_entropy, sgd) as other,
        pytest.raises(
            CheckpointError,
            match=r"it lacks down\.bias, .* and 5 more and has bias, weight too many",
        ),
    ):
        other.load(path)
    adamw = functools.partial(torch.optim.AdamW, lr=0.1)
    with (
        bigtrain.prepare(linear, F.cross_entropy, adamw) as other,
        pytest.raises(CheckpointError, match=r"keeps momentum_buffer, this one keeps exp_avg"),
    ):
        other.load(path)


@pytest.mark.parametrize(
    ("words", "ranks", "message"),
    [
        (
            ["strategy.replicate=zeroo"],
            2,
            r"strategy\.replicate: unknown 'zeroo', did you mean 'zero'\?",
        ),
        (["strategy.cut=ddp"], 1, r"strategy\.cut: unknown 'ddp'"),
        (["strategy.replicate=accumulation"], 1, r"strategy\.replicate: unknown 'accumulation'"),
        (["strategy.replicate=os:getcwd"], 1, r"os:getcwd is not a subclass of bigtrain\.Strategy"),
        (["strategy.replicate=no.where:X"], 1, r"replicate=no\.where:X: no module named 'no'"),
        (
            ["strategy.cut=bigtrain.strategies.ddp:DDP"],
            1,
            r"plays the role 'replicate'\. Write strategy\.replicate=",
        ),
        (["strategy.replicate.bucket_size=-3"], 2, r"strategy\.replicate\.bucket_size: .*greater"),
        (["strategy.replicate.bucket_size=big"], 2, r"'big' is not a size"),
        (["strategy.replicate.compress=zip"], 2, r"strategy\.replicate\.compress: .*'fp16'"),
        (
            [
                "strategy.replicate.static_graph=true",
                "strategy.replicate.find_unused_parameters=true",
            ],
            2,
            r"exclude each other",
        ),
        (["strategy.replicate.compress=fp16", "train.precision=fp64"], 2, r"compress=fp16 loses"),
        (["strategy=single"], 2, r"strategy single runs on 1 rank, and 2 were started"),
        (["mesh.pp=2"], 2, r"mesh\.pp=2 and mesh\.tp=1 cut the model"),
        (["train.sync_batchnorm=true"], 2, r"train\.sync_batchnorm=true needs CUDA"),
    ],
)
def test_a_plan_that_cannot_work_is_refused(words, ranks, message):
    with pytest.raises(ConfigError, match=message):
        make_plan(load_job(overrides=words), ranks, "cpu")


def test_a_plan_described_can_be_read_back(tmp_path):
    import yaml

    job = load_job(overrides=["strategy.replicate.bucket_size=1MiB", "train.micro_batch_size=4"])
    plan = make_plan(job, 2, "cpu")
    path = tmp_path / "plan.yaml"
    path.write_text(yaml.safe_dump(describe_plan(plan)))
    again = make_plan(load_job(plan=str(path)), 2, "cpu")
    assert again.techniques == plan.techniques
    assert again.batch == plan.batch
