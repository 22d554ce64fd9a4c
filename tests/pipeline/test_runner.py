"""Options that a pipeline refuses before the ranks connect."""

from __future__ import annotations

import pytest

from bigtrain.assembly.make_plan import make_plan
from bigtrain.engine.setup import open_setup
from bigtrain.errors import ConfigError
from bigtrain.job.load import job_from_keys, load_job


@pytest.mark.parametrize(
    ("option", "value", "fix"),
    [
        ("static_graph", True, "static_graph=false"),
        ("find_unused_parameters", True, "find_unused_parameters=false"),
        ("compress", "bf16", "compress=none"),
    ],
)
def test_options_of_distributed_data_parallel_are_refused(
    option: str, value: object, fix: str
) -> None:
    keys = {f"strategy.replicate.{option}": value, "mesh.pp": 2, "train.global_batch_size": 8}
    keys["strategy.cut"] = {"name": "pipeline", "schedule": "1f1b"}
    with pytest.raises(ConfigError, match=rf"replicate\.{option}=.*mesh\.pp=2.*Set .*{fix}"):
        make_plan(job_from_keys("ddp", keys), 4, "cpu")


def test_engines_that_take_whole_models_are_refused() -> None:
    pytest.importorskip("fairscale")
    keys = {"mesh.pp": 2, "train.global_batch_size": 8}
    keys["strategy.cut"] = {"name": "pipeline", "schedule": "1f1b"}
    with pytest.raises(ConfigError, match=r"mesh\.pp=2.*Set strategy\.replicate\.engine=torch"):
        make_plan(job_from_keys("oss", keys), 4, "cpu")


def test_shards_cannot_be_of_two_stages() -> None:
    """A V schedule has the first and the last stage on one rank."""
    words = ["model.name=gpt", "model.args={num_layers: 4, width: 32, num_heads: 2}"]
    words += ["data.name=synthetic", "data.args={kind: language}", "train.global_batch_size=8"]
    words += ["strategy.cut.schedule=zbv_zero_bubble", "mesh.pp=2"]
    job = load_job(None, "1f1b_fsdp", words)
    message = r"embedding\.token\.weight is used by two stages of one rank.*replicate\.stage=1"
    with pytest.raises(ConfigError, match=message):
        open_setup(job, make_plan(job, 4, "cpu"))
    untied = load_job(None, "1f1b_fsdp", [*words, "model.args.tie_embeddings=false"])
    assert open_setup(untied, make_plan(untied, 4, "cpu")).resolved.layout is not None
