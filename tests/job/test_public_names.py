"""Keys of other tools are answered with bigtrain's keys, and a YACS file with all words of it."""

from __future__ import annotations

import shlex

import pytest
import torch

from bigtrain.errors import ConfigError
from bigtrain.job.load import load_job
from bigtrain.job.public_names import PUBLIC_NAMES, PUBLIC_VALUES, YACS, public_hint
from bigtrain.job.schema import Job
from bigtrain.optim.factory import learning_rate


def keys_of_a_job():
    return {
        f"{section}.{key}"
        for section, info in Job.model_fields.items()
        for key in getattr(info.annotation, "model_fields", {})
    }


@pytest.mark.parametrize("ours", PUBLIC_NAMES)
def test_each_public_name_is_answered_with_a_key_that_there_is(ours):
    known = keys_of_a_job()
    key = ours.partition("=")[0]
    assert key in known or key.startswith(("model.args.", "data.args.", "strategy.replicate."))
    for name in PUBLIC_NAMES[ours]:
        section = key.partition(".")[0]
        if f"{section}.{name}" in known or name in Job.model_fields:
            continue
        with pytest.raises(ConfigError) as refusal:
            load_job(None, "single", [f"{section}.{name}=1"])
        assert f"unknown key {section}.{name}, did you mean {ours}?" in str(refusal.value)


@pytest.mark.parametrize(
    ("key", "value", "ours"),
    [(key, value, ours) for key in PUBLIC_VALUES for value, ours in PUBLIC_VALUES[key].items()],
)
def test_each_value_of_other_tools_is_answered_with_one_that_loads(key, value, ours):
    with pytest.raises(ConfigError, match=rf"{key}: needs .* Use {key}={ours}\.$"):
        load_job(None, "single", [f"{key}={value}"])
    load_job(None, "single", [f"{key}={ours}"])


def test_no_public_name_has_two_meanings():
    names = [name for names in PUBLIC_NAMES.values() for name in names]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["optim.base_lr=0.1"], "unknown key optim.base_lr, did you mean optim.lr?"),
        (["OPTIM.BASE_LR", "0.1"], "unknown key optim.base_lr, did you mean optim.lr?"),
        (["train.fp16=true"], "unknown key train.fp16, did you mean train.precision=bf16?"),
        (["fp16=true"], "unknown key fp16, did you mean train.precision=bf16?"),
        (["learning_rate=1"], "unknown key learning_rate, did you mean optim.lr?"),
        (["OPTIM.STEPS", "[30]"], "unknown key optim.steps, did you mean optim.milestones?"),
        (["MODEL.ARCH", "resnet50"], "unknown key model.arch, did you mean model.name?"),
        (["TRAIN.BATCH_SIZE", "32"], "global_batch_size (of all ranks) or train.micro_batch_size"),
        (["optim.momentun=0.9"], "unknown key optim.momentun, did you mean optim.momentum?"),
        (["train.lr=1"], "unknown key train.lr, did you mean optim.lr?"),
    ],
)
def test_a_table_of_names_goes_before_the_letters_that_are_alike(words, expected):
    with pytest.raises(ConfigError) as refusal:
        load_job(None, "single", words)
    assert expected in str(refusal.value)


YACS_FILE = """\
CUDNN: {BENCHMARK: true, DETERMINISTIC: false}
MODEL: {ARCH: resnet50, NUM_CLASSES: 1000, PRETRAINED: false, SYNCBN: false, WEIGHTS: null}
OPTIM:
  BASE_LR: 0.2
  DAMPENING: 0.0
  LR_MULT: 0.1
  LR_POLICY: cos
  MAX_EPOCH: 100
  MIN_LR: 0.0
  MOMENTUM: 0.9
  NESTEROV: true
  STEPS: []
  WARMUP_EPOCHS: 5
  WARMUP_FACTOR: 0.1
  WEIGHT_DECAY: 5.0e-05
OUT_DIR: ./exp
RNG_SEED: null
TEST: {BATCH_SIZE: 200, DATASET: ./data/some where/, IM_SIZE: 256, SPLIT: val}
TRAIN: {AUTO_RESUME: true, BATCH_SIZE: 32, DATASET: ./data/some where/, IM_SIZE: 224, WORKERS: 4}
"""


def job_as_advised(tmp_path, text):
    """The job that results from the words in the refusal of a YACS file."""
    path = tmp_path / "resnet50.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match="resnet50.yaml is a YACS file") as refusal:
        load_job(str(path))
    assert "\n" not in str(refusal.value)
    command = str(refusal.value).partition("--config imagenet ")[2].partition(" (ignored")[0]
    return load_job("imagenet", "ddp", shlex.split(command)), str(refusal.value)


def test_a_yacs_file_is_answered_with_the_words_that_mean_the_same(tmp_path):
    job, message = job_as_advised(tmp_path, YACS_FILE)
    assert (job.model.name, job.data.path) == ("resnet50", "./data/some where/")
    assert (job.data.workers, job.data.args["size"], job.log.dir) == (4, 224, "./exp")
    assert (job.train.epochs, job.train.micro_batch_size) == (100, 32)
    assert job.train.global_batch_size is None
    assert job.checkpoint.resume == "auto"
    optim = job.optim
    assert (optim.name, optim.lr, optim.base_batch_size) == ("sgd", 0.2, None)
    assert (optim.momentum, optim.dampening, optim.nesterov) == (0.9, 0.0, True)
    assert (optim.weight_decay, optim.decay_norms_and_biases) == (5e-05, True)
    assert (optim.schedule, optim.final_lr_share, optim.milestones) == ("cosine", 0.0, ())
    assert "ignored: CUDNN.BENCHMARK, MODEL.NUM_CLASSES, TEST.BATCH_SIZE" in message
    rates = [learning_rate(optim, step, 1000, 256, 10) for step in range(50)]
    line = torch.linspace(0.02, 0.2, 51, dtype=torch.float64)[:-1]
    torch.testing.assert_close(torch.tensor(rates, dtype=torch.float64), line)


def test_steps_and_weights_of_a_yacs_file_are_taken(tmp_path):
    text = YACS_FILE.replace("LR_POLICY: cos", "LR_POLICY: steps")
    text = text.replace("STEPS: []", "STEPS: [0, 30, 60]").replace("PRETRAINED: false", "X: 1")
    text = text.replace("WARMUP_EPOCHS: 5", "WARMUP_EPOCHS: 0").replace(
        "WEIGHTS: null", "WEIGHTS: a"
    )
    job, _ = job_as_advised(tmp_path, text.replace("RNG_SEED: null", "RNG_SEED: 3"))
    assert (job.optim.schedule, job.optim.milestones) == ("step", (30.0, 60.0))
    assert (job.optim.step_factor, job.optim.warmup_factor) == (0.1, None)
    assert (job.model.pretrained, job.train.seed) == ("a", 3)


@pytest.mark.parametrize("key", YACS)
def test_each_key_of_yacs_is_also_a_word_with_a_hint_or_a_key(key):
    path = tuple(key.lower().split("."))
    assert public_hint(path) is not None or ".".join(path) in {
        *("optim.momentum", "optim.dampening", "optim.nesterov", "optim.warmup_epochs"),
        *("optim.warmup_factor", "optim.weight_decay", "model.pretrained", "train.workers"),
        "cudnn.deterministic",
    }
