"""`bigtrain.prepare`, and the guarantees of the engine for a user's training loop."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from support.nets import TinyLM
from support.parity import sgd
from torch import nn

import bigtrain
from bigtrain.assembly.make_plan import describe_plan, make_plan
from bigtrain.errors import CheckpointError, ConfigError, NonFiniteError
from bigtrain.job.load import load_job

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
        (["strategy.replicate.bucket_size=-3"], 2, r"replicate\.bucket_size: needs more than 0"),
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
        (["strategy.replicate.compress=fp16", "train.precision=fp64"], 2, r"compress=fp16 rounds"),
        (["strategy=single"], 2, r"strategy single runs on 1 rank, and 2 were started"),
        (["mesh.pp=2"], 2, r"mesh\.pp=2 cuts the model over ranks"),
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
