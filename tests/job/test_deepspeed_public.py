"""DeepSpeed files of public repositories: each runs, or is refused with the right message."""

from __future__ import annotations

import itertools
import json
import re
from importlib.util import find_spec
from typing import Any

import pytest
from support.deepspeed_files import write_config
from support.public_deepspeed import FILES, PublicFile
from support.ranks import run_ranks

from bigtrain.assembly.make_plan import make_plan
from bigtrain.engine.setup import open_setup
from bigtrain.errors import ConfigError
from bigtrain.job.deepspeed_json import deepspeed_config
from bigtrain.job.deepspeed_sections import unused_sections
from bigtrain.job.load import load_job

pytestmark = pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is missing")
SMALL = (
    *("model.args.num_layers=1", "model.args.width=16", "model.args.num_heads=2"),
    *("model.args.sequence_length=8", "train.steps=2", "device=cpu"),
)


def refusal_of(path: str) -> str | None:
    """The message with which a file is refused; None if it can run on two ranks."""
    try:
        make_plan(load_job(None, None, [f"strategy.deepspeed={path}", *SMALL]), 2, "cpu")
    except ConfigError as refused:
        return str(refused)
    return None


def variants(file: PublicFile) -> dict[str, tuple[dict[str, Any], str | None]]:
    """The file, and if it is refused because of fp16, also the file with bf16."""
    variants_by_name = {"as published": (file.config, file.as_published)}
    if file.as_published is not None and "fp16" in file.as_published:
        variants_by_name["in bf16"] = (file.with_bf16, file.in_bf16)
    return variants_by_name


TRAINING = [n for n, f in FILES.items() if None in [said for _, said in variants(f).values()]]
"""The files that run, either unchanged or with bf16 in place of fp16."""


def test_there_are_thirty_of_them_from_many_repositories():
    repositories = {file.source.split()[0] for file in FILES.values()}
    assert len(FILES) >= 30
    assert len(repositories) >= 12
    assert len(TRAINING) >= 18


@pytest.mark.parametrize("name", FILES)
def test_each_runs_or_is_refused_by_the_right_line(name, tmp_path):
    for kind, (config, expected) in variants(FILES[name]).items():
        refusal = refusal_of(write_config(tmp_path, json.dumps(config)))
        if expected is None:
            assert refusal is None, kind
        else:
            assert refusal is not None, kind
            assert re.search(expected, refusal), (kind, refusal)
            assert "\n" not in refusal


def test_what_has_no_use_is_named_in_one_line(tmp_path):
    path = write_config(tmp_path, json.dumps(FILES["dolly"].config))
    plan = make_plan(load_job(None, None, [f"strategy.deepspeed={path}", *SMALL]), 2, "cpu")
    (line,) = plan.warnings
    assert line == (
        f"{path}: not used: tensorboard (log.tensorboard=true), zero_optimization."
        "stage3_gather_16bit_weights_on_model_save (bigtrain checkpoint export)"
    )
    config = deepspeed_config(write_config(tmp_path, json.dumps(FILES["Qwen"].config)))
    assert unused_sections(config) == []


def two_steps(context, path):
    """The losses of two steps of a small model, trained as by `bigtrain train`."""
    job = load_job(None, None, [f"strategy.deepspeed={path}", *SMALL, "memory.predict=false"])
    plan = make_plan(job, context.world_size, "cpu")
    parts = open_setup(job, plan)
    with parts.engine(context) as engine:
        batches = itertools.islice(parts.training_steps(context, 0), 2)
        results = [engine.step(batch) for batch in batches]
        return [(result.loss, result.lr) for result in results]


@pytest.mark.parametrize("name", TRAINING)
def test_what_is_not_refused_trains(name, tmp_path):
    for kind, (config, expected) in variants(FILES[name]).items():
        if expected is None:
            path = write_config(tmp_path, json.dumps(config))
            first, second = run_ranks(two_steps, 2, path)
            assert first == second, kind
            assert all(3 < loss < 7 for loss, _ in first), kind
