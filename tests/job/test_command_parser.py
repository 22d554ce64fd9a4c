"""The words of the commands: versions, jobs by position or option, and the nearest known word."""

from __future__ import annotations

import platform
from typing import Any

import pytest
import torch

from bigtrain.cli import main
from bigtrain.errors import ConfigError
from bigtrain.job.arguments import (
    compare_arguments,
    plan_arguments,
    speedup_arguments,
    train_arguments,
    verify_arguments,
)
from bigtrain.job.load import load_job


def test_the_version_says_what_a_report_needs(capsys: Any) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    output = capsys.readouterr().out
    assert output.startswith("bigtrain 0.1.0, torch ")
    assert torch.__version__.partition("+")[0] in output
    assert platform.python_version() in output


@pytest.mark.parametrize(
    ("words", "nearest"),
    [
        (["tran"], "there is no 'tran', did you mean 'train'? Known: init, train, plan,"),
        (["checkpoint", "inspct"], "there is no 'inspct', did you mean 'inspect'?"),
        (["train", "--stratgy", "fsdp"], "no option --stratgy, did you mean '--strategy'?"),
        (["train", "--stratgy=fsdp"], "no option --stratgy, did you mean '--strategy'?"),
        (["compare", "--strategie", "a"], "no option --strategie, did you mean '--strateg"),
        (["verify", "--stepz", "3"], "no option --stepz, did you mean '--steps'?"),
        (["plan", "--memry", "3GiB"], "no option --memry, did you mean '--memory'?"),
        (["verify", "--optimizer", "sgdd"], "there is no 'sgdd', did you mean 'sgd'?"),
        (["strategies", "--jsn"], "there is no option --jsn, did you mean '--json'?"),
        (
            ["checkpoint", "inspect", "x", "--tensor"],
            "no option --tensor, did you mean '--tensors'?",
        ),
        (["frobnicate"], "there is no 'frobnicate'. Known: init, train, plan, fit, check"),
    ],
)
def test_the_nearest_word_is_named(words: list[str], nearest: str, capsys: Any) -> None:
    try:
        status: Any = main(words)
    except SystemExit as ended:
        status = ended.code
    assert status == 2
    errors = capsys.readouterr().err
    assert nearest in errors
    assert "pace" not in errors


@pytest.mark.parametrize(
    ("words", "job", "overrides"),
    [
        (["digits"], "digits", []),
        (["digits", "train.steps=3"], "digits", ["train.steps=3"]),
        (["my/job.yaml"], "my/job.yaml", []),
        (["job.yml", "OPTIM.LR", "3e-4"], "job.yml", ["OPTIM.LR", "3e-4"]),
        (["--config", "digits"], "digits", []),
        (["train.steps", "3"], None, ["train.steps", "3"]),
        (["TRAIN.STEPS", "3"], None, ["TRAIN.STEPS", "3"]),
        (["device", "cpu"], None, ["device", "cpu"]),
        (["device=cpu"], None, ["device=cpu"]),
        ([], None, []),
    ],
)
def test_a_job_is_named_by_its_place(
    words: list[str], job: str | None, overrides: list[str]
) -> None:
    for starts_ranks in (True, False):
        options = train_arguments(words, starts_ranks=starts_ranks)
        assert (options.config, options.overrides) == (job, overrides)
    if overrides[:1] != ["device"] and not any(word.isupper() for word in overrides):
        assert compare_arguments(words).job == job
        assert plan_arguments(words).job == job


def test_two_jobs_are_one_too_many(capsys: Any) -> None:
    with pytest.raises(SystemExit):
        train_arguments(["digits", "--config", "mnist"])
    assert (
        "--config mnist and digits both name a job. Leave one of them out"
        in capsys.readouterr().err
    )


def test_an_unknown_job_is_told_as_one() -> None:
    with pytest.raises(ConfigError, match=r"job: unknown 'digts', did you mean 'digits'\? Known:"):
        load_job("digts")


@pytest.mark.parametrize("option", ["--strategy", "--strategies"])
@pytest.mark.parametrize("read", [compare_arguments, verify_arguments, speedup_arguments])
def test_strategies_are_named_alike(read: Any, option: str) -> None:
    assert read([option, "ddp,fsdp+full"]).strategies == "ddp,fsdp+full"


@pytest.mark.parametrize("option", ["-n", "--num-ranks", "--devices"])
def test_a_plan_has_ranks_as_others_have(option: str) -> None:
    assert plan_arguments([option, "4"]).devices == 4
