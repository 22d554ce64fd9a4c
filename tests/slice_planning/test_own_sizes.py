"""A model that reads sizes of its tensors is sliced only where whole sizes are returned."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.own_sizes import ALL_LISTED, WAYS, WORDS, OwnSizes
from support.sliced_nets import work_on
from support.zygote import forked_cli
from torch import Tensor, nn

from bigtrain.errors import ConfigError
from bigtrain.slice_planning.axis_trace import trace_axes
from bigtrain.slice_planning.choose import plan_slices
from bigtrain.strategies.tensor import TensorSlices

LISTED = r"'the model' reads it from a list of parameters, such as parameters\(\)"


def work(use: str, heads: int = 4) -> Any:
    return work_on(OwnSizes(use, heads), 2, 6, tokens=WORDS)


@pytest.mark.parametrize("use", [way for way in WAYS if way not in ALL_LISTED])
def test_what_is_taken_from_a_list_of_all_parameters_stays_whole(use: str) -> None:
    plan = plan_slices(work(use), 2)
    assert {"qkv.weight", "out.weight", "down.weight"} <= plan.slices.keys()
    assert ("up.weight" in plan.slices) == (use in ("sizes", "type"))
    if "up.weight" in plan.whole_reasons:
        where = "up" if use == "called" else "the model"
        assert plan.whole_reasons["up.weight"] == LISTED.replace("\\", "").replace(
            "the model", where
        )


@pytest.mark.parametrize("use", ALL_LISTED)
def test_where_all_are_taken_so_nothing_is_sliced_and_the_weights_are_named(use: str) -> None:
    message = rf"mesh.tp=2: nothing.*'qkv.weight' \(96, 32\) can be sliced not at all: {LISTED}"
    with pytest.raises(ConfigError, match=rf"{message}.*Read each by its name in the model's code"):
        plan_slices(work(use), 2)


def test_lines_that_slice_what_is_taken_from_a_list_are_refused() -> None:
    lines, plan = {"up.weight": "0", "up.bias": "0", "down.weight": "1"}, SimpleNamespace(tp=2)
    message = rf"slices slices up.weight, and {LISTED}.*a line up.weight: whole"
    with pytest.raises(ConfigError, match=message):
        TensorSlices(slices=lines).lay_slices(work("numbers"), plan)
    slices_read = TensorSlices(slices=lines).lay_slices(work("sizes"), plan)
    assert slices_read.by_name.keys() == lines.keys()


def test_more_ranks_than_heads_slice_what_has_enough_parts() -> None:
    plan = plan_slices(work("sizes", heads=2), 4)
    assert plan.sliced_share(OwnSizes("sizes")) > 0.9
    assert plan.slices["qkv.weight"].dim == 1, "it is sliced along its input"
    why = "dim 0: it has 2 parts that stay together, for 4 ranks: mesh.tp=2 would work"
    assert plan.whole_reasons["qkv.bias"] == why
    lines = {"qkv.weight": "0/3x:16"}
    message = r"mesh.tp=4: qkv.weight has 2 units of 16 along dim 0.*Use mesh.tp=2 or less"
    with pytest.raises(ConfigError, match=message):
        TensorSlices(slices=lines).lay_slices(work("sizes", heads=2), SimpleNamespace(tp=4))


class Copies(OwnSizes):
    """Computes with a copy of one of its modules."""

    def __init__(self) -> None:
        super().__init__("sizes")
        self.activation = nn.GELU()

    def middle(self, hidden: Tensor) -> Tensor:
        activation = copy.deepcopy(self.activation)
        assert type(activation._parameters) is dict
        out: Tensor = activation(super().middle(hidden))
        return out


def test_copies_of_modules_have_tables_of_their_own() -> None:
    trace = trace_axes(Copies(), torch.zeros(2, 6, dtype=torch.long), -1)
    assert not trace.failed
    assert not trace.listed


def test_keeping_everything_is_refused_with_the_key() -> None:
    keep = ("words", "qkv", "out", "up", "down", "head")
    with pytest.raises(ConfigError, match=r"strategy.slice.keep says.*Leave modules out of strat"):
        plan_slices(work("sizes"), 2, keep=keep)


def test_the_command_ends_with_the_weights_before_ranks_connect(tmp_path: Path) -> None:
    words = ["model.name=support.own_sizes:OwnSizes", "model.args.use=penalty"]
    words += ["data.name=synthetic", "data.args={kind: language, length: 6, vocabulary: 13}"]
    words += ["train.global_batch_size=8", "train.steps=1", "memory.predict=false"]
    done = forked_cli(["train", "-n", "2", "--strategy", "tensor", *words], cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert re.search(rf"bigtrain: mesh.tp=2: nothing of the model.*{LISTED}", done.stderr)
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())
