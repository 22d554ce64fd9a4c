"""`bigtrain verify`: strategies pass, a wrong one is caught and named, randomness is refused."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from support.zygote import forked_cli

from bigtrain.checkpoint.write import write_tensors
from bigtrain.engine.first_steps import disable_dropout
from bigtrain.ranks.context import RunContext
from bigtrain.ranks.exit_status import run_guarded
from bigtrain.tensors.shards import StateTensor
from bigtrain.verify.command import main
from bigtrain.verify.differences import (
    Differences,
    StepDifferences,
    Tolerance,
    compare_recordings,
)
from bigtrain.verify.reference import SingleInBf16, SingleMoved

NET = [
    *(
        "model.name=support.odd_strategies:Net",
        "data.name=synthetic",
        "data.args.kind=classification",
    ),
    *("data.args.input_shape=[1,8,8]", "train.global_batch_size=8"),
]


def bigtrain(folder, *words):
    return forked_cli(["verify", *words], cwd=folder, timeout=300)


def verdicts(done):
    return {row["strategy"]: row for row in json.loads(done.stdout)["rows"]}


def test_users_own_model_passes_in_double_precision(tmp_path):
    names = "ddp,fsdp,1f1b"
    words = ("--strategies", names, "-n", "2", "--json", "train.precision=fp64")
    done = bigtrain(tmp_path, *words, *NET)
    assert done.returncode == 0, done.stderr
    for row in verdicts(done).values():
        assert row["verdict"] == "pass"
        assert row["differences"]["loss"] < 1e-12
        assert row["differences"]["gradient"] < 1e-9


def test_what_has_other_numbers_by_intent_is_refused(tmp_path):
    done = bigtrain(tmp_path, "--strategies", "local_sgd", "-n", "2", *NET)
    assert done.returncode == 2
    assert "local_sgd: replicas train independently and synchronize every 8 steps" in done.stderr


def test_bf16_parameters_are_held_against_one_process_that_has_them(tmp_path):
    words = ["model.args={num_layers: 2, width: 32, num_heads: 2, sequence_length: 32}"]
    words += ["train.global_batch_size=32", "train.micro_batch_size=8", "train.precision=bf16"]
    words += ["data.name=synthetic", "data.args={kind: language}", "--json", "-n", "2"]
    done = bigtrain(tmp_path, "--strategies", "ddp,fsdp,zero1_torch", *words)
    assert done.returncode == 0, done.stderr + done.stdout
    rows = verdicts(done)
    assert rows["ddp"]["differences"]["gradient"] < 1e-6
    assert rows["fsdp"]["differences"]["gradient"] < 1e-6  # fsdp reduces gradients in fp32
    assert rows["zero1_torch"]["differences"]["gradient"] < 5e-2


def test_the_reference_with_bf16_parameters_has_gradients_in_fp32():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    assembly = SimpleNamespace(model=model, module=model)
    SingleInBf16().apply(assembly)
    inputs = torch.randn(3, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = assembly.module(inputs)
        product = torch.nn.functional.linear(inputs, *(p.bfloat16() for p in model[0].parameters()))
        assert torch.equal(output, model[1](product))
    output.square().sum().backward()
    gradient = model[0].weight.grad
    assert gradient.dtype == torch.float32
    assert torch.equal(gradient, gradient.bfloat16().float())


def step(gradient, loss=0.0, norm=0.0):
    return StepDifferences(loss, norm, gradient)


def differences_of(*steps, update=0.0):
    """The differences of a run with these steps."""
    every = [
        max(values) for values in zip(*((s.loss, s.norm, s.gradient) for s in steps), strict=True)
    ]
    return Differences(*every, update, steps=steps)


@pytest.mark.parametrize(
    ("differences", "passes"),
    [
        (differences_of(step(1e-7), step(5e-2)), True),
        (differences_of(step(1e-7), step(5e-2), update=5e-3), True),
        (
            differences_of(step(2e-2), step(2e-2)),
            False,
        ),  # a wrong gradient differs in the first step already
        (differences_of(step(1e-7), step(2e-1)), False),
        (differences_of(step(1e-7, norm=1e-4), step(1e-7)), False),
        (differences_of(step(1e-7), step(1e-7), update=5e-2), False),
    ],
)
def test_a_step_is_held_to_what_one_process_is_from_itself(differences, passes):
    tolerance = Tolerance.of("fp32")
    moved = differences_of(step(7e-6, norm=8e-8), step(1e-2, norm=1e-5), update=1e-3)
    assert differences.passed(tolerance, moved) is passes
    assert not differences.passed(tolerance)  # the difference has not grown


def test_moved_weights_are_a_unit_in_the_last_place_away():
    model = torch.nn.Linear(16, 16)
    before = model.weight.detach().clone()
    SingleMoved().apply(SimpleNamespace(model=model))
    apart = (model.weight.detach() / before - 1).abs()
    assert 0.5e-7 < apart.min() <= apart.max() < 2.5e-7


def test_wrong_strategy_is_caught_by_its_parameter_and_one_that_cannot_run_is_told(tmp_path):
    for name in ("Forgets", "NormOff"):
        (tmp_path / f"{name.lower()}.yaml").write_text(
            f"strategy: {{replicate: {{name: 'support.odd_strategies:{name}'}}}}\n"
        )
    names = "ddp,forgets.yaml,normoff.yaml,fairscale_fsdp"
    done = bigtrain(tmp_path, "--strategies", names, "-n", "2", *NET, "--output", "found")
    assert done.returncode == 1, done.stderr
    assert "forgets: gradients that differ most: head.bias" in done.stdout
    assert "forgets: updates that differ most: head.bias" in done.stdout
    message = (
        "forgets: first difference: step 1, the gradient of the parameter head.bias (block head)"
    )
    assert message in done.stdout
    assert "normoff: first difference: step 1, the norm of the gradients, which is" in done.stdout
    rows = {
        row["strategy"]: row
        for row in json.loads((tmp_path / "found/verify.json").read_text())["rows"]
    }
    assert rows["ddp"]["verdict"] == "pass"
    assert rows["forgets"]["verdict"] == "differs"
    assert rows["fairscale_fsdp"]["verdict"] == "refused"
    assert "CUDA" in rows["fairscale_fsdp"]["reason"]
    # Recordings are as large as the model and must be deleted
    assert not list(tmp_path.rglob("*.safetensors"))
    assert not list(tmp_path.rglob("trace-*.json"))


def test_dropout_that_is_tied_to_no_samples_is_off_and_named(tmp_path):
    done = bigtrain(tmp_path, "--strategies", "ddp", "-n", "2", *NET, "model.args.dropout=0.5")
    assert done.returncode == 0, done.stderr
    message = (
        "ddp: dropout is off, as its masks do not belong to samples: "
        "the model: bernoulli_ draws (32, 8)"
    )
    assert message in done.stdout


def test_dropout_is_the_same_in_one_process_and_in_stages(tmp_path):
    words = ["model.args={num_layers: 2, width: 64, num_heads: 2, sequence_length: 16}"]
    words += ["model.args.dropout=0.1", "data.name=synthetic", "train.precision=fp32", "--json"]
    words += ["data.args={kind: language, length: 16}", "train.global_batch_size=8"]
    words += ["train.micro_batch_size=2", "--strategies", "zero3,1f1b+full", "-n", "2"]
    done = bigtrain(tmp_path, *words, "--steps", "2")
    assert done.returncode == 0, done.stderr + done.stdout
    assert all(row["dropout_off"] is None for row in verdicts(done).values())


def test_model_that_draws_lots_is_refused(tmp_path):
    done = bigtrain(
        tmp_path, "--strategies", "ddp", *NET, "train.global_batch_size=8", "model.args.chance=0.5"
    )
    assert done.returncode == 2
    assert "draws random numbers that verify cannot turn off" in done.stderr


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        ("support.nets:TinyConv", "[1,8,8]"),
        ("resnet18", "[3,32,32]"),
    ],
)
def test_batchnorm_is_compared_in_equal_micro_batches(tmp_path, model, shape):
    words = [f"model.name={model}", "data.name=synthetic", "data.args.kind=classification"]
    words += [f"data.args.input_shape={shape}", "train.global_batch_size=8"]
    words += ["model.args.num_classes=10", "train.precision=fp64", "--steps", "2"]
    done = bigtrain(tmp_path, "--strategies", "ddp,fsdp", "-n", "2", "--json", *words)
    assert done.returncode == 0, done.stderr + done.stdout
    assert all(row["differences"]["gradient"] < 1e-8 for row in verdicts(done).values())


def test_jobs_own_optimizer_is_held_to_its_losses(tmp_path):
    done = bigtrain(
        tmp_path,
        "--strategies",
        "ddp",
        "-n",
        "2",
        "--optimizer",
        "job",
        "--json",
        *NET,
        "train.global_batch_size=8",
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["optimizer"] == "job"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--strategies", "nope"], "unknown 'nope'"),
        (["--optimizer", "adam"], "there is no 'adam'"),
        (["--steps", "0"], "at least 1 is needed"),
        (["model.name=support.odd_strategies:Nothing"], "has no 'Nothing'"),
    ],
)
def test_wrong_input(tmp_path, monkeypatch, capsys, words, message):
    monkeypatch.chdir(tmp_path)
    assert run_guarded(lambda: main(["--strategies", "ddp", *words])) == 2
    errors = capsys.readouterr().err
    assert message in errors
    assert "Traceback" not in errors


def test_dropout_is_turned_off_wherever_it_is_a_modules_own():
    from torchvision.ops import StochasticDepth

    model = torch.nn.ModuleList(
        [torch.nn.Dropout(0.5), torch.nn.MultiheadAttention(4, 2, 0.2), StochasticDepth(0.3, "row")]
    )
    disable_dropout(model)
    assert model[0].p == 0
    assert model[1].dropout == 0
    assert model[2].p == 0


def recording(folder, gradient, loss=1.0, updated=True):
    folder.mkdir()
    record = {"losses": [loss], "norms": [1.0], "chance": None, "no_gradients": None}
    (folder / "record.json").write_text(json.dumps(record))
    before = {name: torch.ones_like(tensor) for name, tensor in gradient.items()}
    after = {name: 1 - 0.01 * tensor for name, tensor in gradient.items()}
    for name, tensors in (
        ("gradients-1", gradient),
        ("weights-before", before),
        ("weights-after", after if updated else before),
    ):
        state = {k: StateTensor.of(v) for k, v in tensors.items()}
        write_tensors(folder / f"{name}.safetensors", state, RunContext.alone())
    return folder


def test_differences_are_relative_to_each_tensor_and_rounding_is_no_difference(tmp_path):
    first_gradients = {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([1e-9])}
    two = {"a": torch.tensor([1.0, 2.2]), "b": torch.tensor([2e-9])}
    differences = compare_recordings(
        recording(tmp_path / "1", first_gradients), recording(tmp_path / "2", two, loss=1.5)
    )
    assert differences.loss == pytest.approx(0.5)
    assert differences.gradient == pytest.approx(0.1)
    assert differences.update == pytest.approx(0.1, rel=1e-3)
    assert differences.worst_gradients[0][0] == "a"
    assert dict(differences.worst_gradients)["b"] < 1e-4  # 1e-9 compared with 2.0 is rounding
    assert not differences.passed(Tolerance.of("fp32"))
    assert differences.passed(Tolerance(1.0, 0.2, 0.2))


def test_weights_that_are_never_updated_do_not_pass(tmp_path):
    first_recording = recording(tmp_path / "1", {"a": torch.full((4,), 0.1)})
    idle = compare_recordings(
        first_recording, recording(tmp_path / "2", {"a": torch.full((4,), 0.1)}, updated=False)
    )
    assert idle.gradient == 0
    assert idle.update == pytest.approx(1.0, rel=1e-3)
    assert not idle.passed(Tolerance.of("bf16"))


def test_missing_and_unfinished_numbers_never_pass(tmp_path):
    first_recording = recording(tmp_path / "1", {"a": torch.ones(2)})
    lacks = compare_recordings(first_recording, recording(tmp_path / "2", {"b": torch.ones(2)}))
    assert lacks.missing == ("a", "b")
    assert not lacks.passed(Tolerance(9.0, 9.0, 9.0))
    broken = compare_recordings(
        first_recording, recording(tmp_path / "3", {"a": torch.tensor([1.0, float("nan")])})
    )
    assert not broken.passed(Tolerance.of("bf16"))
    endless = compare_recordings(
        first_recording, recording(tmp_path / "4", {"a": torch.ones(2)}, loss=float("nan"))
    )
    assert not endless.passed(Tolerance.of("bf16"))
