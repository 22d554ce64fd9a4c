"""Models that begin with the weights of a file: on every rank, whatever holds which part."""

from __future__ import annotations

import itertools
import shlex

import pytest
import torch
from support.ranks import run_ranks
from support.whole import whole_tensors

from bigtrain.assembly.make_plan import make_plan
from bigtrain.engine.setup import open_setup
from bigtrain.errors import ConfigError
from bigtrain.job.load import load_job
from bigtrain.models import make_model

KEYS = (
    *("data.name=digits", "model.name=lenet", "device=cpu", "memory.predict=false"),
    *("train.steps=2", "train.global_batch_size=8", "optim.name=sgd", "optim.lr=0.1"),
)
SMALL = "shufflenet_v2_x0_5"


def saved(path, name="lenet", wrapped="", **args):
    """A state dict of other weights than initial ones; written as torch does."""
    torch.manual_seed(7)
    state = make_model(name, args).state_dict()
    state = {f"{wrapped}{n}": t + 0.25 if t.is_floating_point() else t for n, t in state.items()}
    torch.save({"state_dict": state} if wrapped else state, path)
    return state


def opened(strategy, words, ranks=1):
    job = load_job(None, strategy, [*KEYS, *words])
    return open_setup(job, make_plan(job, ranks, "cpu"))


def beginning(context, strategy, words):
    """The weights before the first step, and the losses of two."""
    parts = opened(strategy, words, context.world_size)
    with parts.engine(context) as engine:
        state = {n: t.clone() for n, t in whole_tensors(engine.runner.state()).items()}
        batches = itertools.islice(parts.training_steps(context, 0), 2)
        losses = [engine.step(batch).loss for batch in batches]
    return {n.removeprefix("model."): t for n, t in state.items() if "model." in n}, losses


@pytest.mark.parametrize(
    ("strategy", "pp"), [("fsdp", 1), ("zero3", 1), ("1f1b", 2)], ids=lambda value: str(value)
)
def test_ranks_begin_with_the_values_of_the_file(strategy, pp, tmp_path):
    path = tmp_path / "lenet.pth"
    expected = saved(path, wrapped="module.")
    words = (f"model.pretrained={path}", "train.check_first_steps=2")
    found = run_ranks(beginning, 2, strategy, words, pp=pp)[0][0]
    assert found.keys() == {name.removeprefix("module.") for name in expected}
    for name, values in found.items():
        torch.testing.assert_close(values, expected[f"module.{name}"], rtol=0, atol=0)


def test_a_head_for_other_classes_begins_anew_where_that_is_asked_for(tmp_path):
    path = tmp_path / "weights.pth"
    expected = saved(path, SMALL, num_classes=1000)
    words = [f"model.name={SMALL}", f"model.pretrained={path}", "data.name=synthetic"]
    words += ["data.args.num_classes=10", "data.args.input_shape=[3,64,64]"]
    with pytest.raises(ConfigError, match=r"fc.weight is \[1000, 1024\] .* \[10, 1024\]") as said:
        opened("single", words)
    fix = shlex.split(str(said.value).partition(" Set ")[2].partition(" to begin")[0])
    assert fix == ["model.pretrained_except=[fc]"]
    model = opened("single", [*words, *fix]).blueprint.twin().materialize("cpu", seed=0)
    for name, values in model.state_dict().items():
        same = values.shape == expected[name].shape and torch.equal(values, expected[name])
        assert same == (not name.startswith("fc."))


def test_tensors_that_only_the_file_has_are_left_out_as_the_message_says(tmp_path):
    path = tmp_path / "weights.pth"
    torch.save(saved(path) | {"extra.weight": torch.ones(2)}, path)
    words = [f"model.pretrained={path}"]
    with pytest.raises(ConfigError, match="lenet has no extra.weight") as said:
        opened("single", words)
    fix = shlex.split(str(said.value).partition(" Set ")[2].partition(" to leave")[0])
    assert fix == ["model.pretrained_except=[extra]"]
    opened("single", [*words, *fix])
    with pytest.raises(ConfigError, match="the model has no 'other'"):
        opened("single", [*words, "model.pretrained_except=[other]"])


def test_torchvisions_own_cache_is_looked_into(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    words = [f"model.name={SMALL}", "model.pretrained=cache", "data.name=synthetic"]
    words += ["data.args.num_classes=1000", "data.args.input_shape=[3,64,64]"]
    with pytest.raises(ConfigError, match=r"no shufflenetv2_x0.5-\w+.pth .*nothing is downloaded"):
        opened("single", words)
    folder = tmp_path / "hub" / "checkpoints"
    folder.mkdir(parents=True)
    expected = saved(folder / "shufflenetv2_x0.5-f707e7126e.pth", SMALL)
    model = opened("single", words).blueprint.materialize("cpu", seed=0)
    torch.testing.assert_close(model.state_dict(), expected, rtol=0, atol=0)


def other_names(path):
    torch.save({"a.weight": torch.zeros(2), "b.weight": torch.zeros(3)}, path)


def without_one(path):
    state = saved(path)
    del state[max(state)]
    torch.save(state, path)


REFUSED = {
    "no file": (lambda _: None, "there is no file .*Give the path of a state dict"),
    "no state dict": (lambda path: path.write_bytes(b"x" * 99), "Give a state dict of lenet"),
    "of another model": (other_names, "the file has no .* and 7 more: it is of another model than"),
    "one is missing": (
        without_one,
        r"the file has no (\S+)\.weight. Set 'model.pretrained_except=\[\1\]' to begin there",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_would_leave_other_weights_is_refused(case, tmp_path):
    write, message = REFUSED[case]
    path = tmp_path / "weights.pth"
    write(path)
    with pytest.raises(ConfigError, match=f"model.pretrained={path}: .*{message}") as said:
        opened("single", [f"model.pretrained={path}"])
    assert "\n" not in str(said.value)


def test_keys_that_say_nothing_are_refused(tmp_path):
    path = tmp_path / "weights.pth"
    saved(path)
    with pytest.raises(ConfigError, match="the model has no 'head'. It has classifier, features"):
        opened("single", [f"model.pretrained={path}", "model.pretrained_except=[head]"])
    with pytest.raises(ConfigError, match="no file is given. Set model.pretrained=FILE"):
        opened("single", ["model.pretrained_except=[fc]"])
    with pytest.raises(ConfigError, match="model.pretrained=cache is torchvision's"):
        opened("single", ["model.pretrained=cache"])
