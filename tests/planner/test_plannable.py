"""The planner searches each technique, bigtrain's or a user's, by the technique's description."""

from __future__ import annotations

import ast
import re
import shlex
from pathlib import Path
from typing import get_args

import pytest
import yaml
from support.programs import run
from support.rooms import sources, tree
from support.zygote import interpreter

from bigtrain.activations.policy import BlockPolicy
from bigtrain.core.registry import TECHNIQUE_ALIASES, TECHNIQUES, techniques_of
from bigtrain.core.variants import Shape, preset_options
from bigtrain.job.presets import preset_names
from bigtrain.machine.residuals import EngineName
from bigtrain.schedules.orders import SCHEDULES

ROOT = Path(__file__).resolve().parents[2]
KNOWS = {
    "planner.ask": "of one process the strategy is single",
    "planner.auto": "chooses among torch's",
    "planner.command": "the same",
    "prediction.fake_runs.runs": "leaves out torch's own files",
}
APART = [
    module
    for module in sources()
    if module.split(".")[0] in ("costs", "planner", "prediction") and module not in KNOWS
]
"""The rooms that record, replay, search and compare techniques without naming any of them."""
SMALL = [
    "model.name=gpt",
    "model.args={num_layers: 2, width: 32, num_heads: 2, sequence_length: 16}",
    *("data.name=synthetic", "data.args={kind: language}", "train.precision=fp64"),
]


PLAIN = {"tensor", "every"}
"""Names that are also words of sentences; only a text that is exactly such a word is a name."""


def words_of(node: ast.AST) -> set[str]:
    """The words of all strings of a module except docstrings, without `PLAIN` words in
    sentences.
    """
    documents = {
        id(inner.value)
        for inner in ast.walk(node)
        if isinstance(inner, ast.Expr) and isinstance(inner.value, ast.Constant)
    }
    texts = [
        inner.value
        for inner in ast.walk(node)
        if isinstance(inner, ast.Constant)
        and isinstance(inner.value, str)
        and id(inner) not in documents
    ]
    found = [re.findall(r"\w+", text) for text in texts]
    return {word for words in found for word in words if len(words) == 1 or word not in PLAIN}


@pytest.mark.parametrize("module", [*APART, "core.loop", "core.strategy", "engine.remedies"])
def test_what_plans_names_no_technique_engine_or_preset(module):
    names = {*preset_names("strategies"), *get_args(EngineName)}
    names |= {
        name for table in (*TECHNIQUES.values(), *TECHNIQUE_ALIASES.values()) for name in table
    }
    # Schedules are orders, recompute policies are shared by techniques, and offload is a role.
    names -= {*SCHEDULES, *get_args(BlockPolicy), "offload"}
    code = tree(sources()[module])
    assert not words_of(code) & names
    for node in ast.walk(code):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "getattr":
            assert "technique" not in ast.unparse(node), ast.unparse(node)


@pytest.mark.parametrize(("pp", "dp"), [(1, 1), (1, 8), (2, 1), (2, 4)])
def test_what_is_offered_is_the_preset_of_its_name(pp, dp):
    shape = Shape(pp, dp, 4, "cpu", 12, 8)
    offered = [v for one in techniques_of("replicate") for v in one.variants(shape)]
    found = [variant for variant in offered if variant.is_word]
    assert found
    for variant in found:
        is_hybrid = variant.label == "hybrid_4"
        preset = "fsdp" if is_hybrid else variant.label
        said = dict(variant.options)
        assert said.pop("engine", "deepspeed") == preset_options("replicate", preset).get(
            "engine", "deepspeed"
        )
        more = {"shard_ranks": 4} if is_hybrid else {}
        wanted = {**preset_options("replicate", preset), **more}
        assert said == {key: value for key, value in wanted.items() if key != "engine"}
    labels = [variant.label for variant in found]
    assert len(labels) == len(set(labels))
    assert ("single" in labels) == (dp == 1)
    assert ("zero3" in labels) == (dp > 1 and pp == 1)


def test_a_technique_of_ones_own_is_searched_ranked_and_its_plan_runs(tmp_path, monkeypatch):
    """The example of CONTRIBUTING.md, which does not mention planning."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    block = re.findall(r"```python\n(.*?)```", text, re.DOTALL)[0]
    (tmp_path / "mymodule.py").write_text(block)
    monkeypatch.chdir(tmp_path)
    bigtrain = [interpreter(), "-m", "bigtrain"]
    given = ["--devices", "2", "--cluster", "cpu", "--engines", "torch", "--memory", "8GiB"]
    own = "strategy.replicate=mymodule:MyStrategy"
    planned = run([*bigtrain, "plan", *given, "--global-batch-size=8", *SMALL, "mesh.pp=1", own])
    assert planned.status == 0, planned.output
    assert "my_strategy" in planned.output
    assert "ddp" in planned.output
    plan = yaml.safe_load(Path("plan.yaml").read_text())
    assert plan["strategy"]["replicate"]["name"] == "mymodule:MyStrategy"
    (line,) = [one for one in planned.output.splitlines() if one.startswith("bigtrain train ")]
    words = shlex.split(line.removeprefix("bigtrain "))
    assert words[:4] == ["train", "-n", "2", "--plan"]
    assert not any(word.startswith("strategy.") for word in words)
    ran = run([*bigtrain, *words, "train.steps=2"])
    assert ran.status == 0, ran.output
    peaks = next(line for line in ran.output.splitlines() if line.startswith("│ peak"))
    # A gloo thread may hold three numbers a moment longer.
    assert peaks.count("exact") + peaks.count(" 0.0%") == 2, ran.output
