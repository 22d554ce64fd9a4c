"""Slices written as lines and parsed again; refused lines and their messages."""

from __future__ import annotations

import pytest
import yaml
from support.sliced_nets import Block, Heads, work_on
from support.zygote import forked_cli
from torch import nn

from bigtrain.errors import ConfigError
from bigtrain.models.gpt import GPT, GPTConfig
from bigtrain.slice_planning.choose import plan_slices
from bigtrain.slice_planning.slice_specs import merged_lines, read_lines, read_spec, spec_text
from bigtrain.slicing.slices import Slices, SliceSection

MODEL = GPT(GPTConfig(vocab_size=301, num_layers=2, width=64, num_heads=4))


@pytest.mark.parametrize(
    ("slices", "text"),
    [
        (Slices.even(1, 1024), "1/1024"),
        (Slices.even(0, 256, 64), "0/256:64"),
        (Slices(0, (SliceSection(256, 64),) * 3), "0/3x256:64"),
        (
            Slices(0, (SliceSection(64, 32), SliceSection(16, 8), SliceSection(16, 8))),
            "0/64:32,2x16:8",
        ),
        (
            Slices(2, (SliceSection(5), SliceSection(6), SliceSection(6), SliceSection(5))),
            "2/5,2x6,5",
        ),
    ],
)
def test_a_specification_and_back(slices, text):
    assert spec_text(slices) == text
    shape = [7] * slices.dim + [slices.total]
    assert read_spec(text, shape, "w") == (slices, False)
    assert read_spec(spec_text(slices, gathered=True), shape, "w") == (slices, True)


def test_lengths_may_be_left_out():
    assert read_spec("1", (3, 12), "w")[0] == Slices.even(1, 12)
    assert read_spec("1/:4", (3, 12), "w")[0] == Slices.even(1, 12, 4)
    assert read_spec("1/3x:2", (3, 12), "w")[0] == Slices(1, (SliceSection(4, 2),) * 3)


def test_lines_of_blocks_that_are_alike_are_one():
    texts = {f"blocks.{n}.mlp.{m}.weight": f"{m}/8" for n in range(3) for m in (0, 2)}
    assert merged_lines(texts, ()) == {
        "blocks.*.mlp.0.weight": "0/8",
        "blocks.*.mlp.2.weight": "2/8",
    }
    assert merged_lines({"layer_0.w": "0/8", "layer_1.w": "0/8"}, ()) == {"layer_*.w": "0/8"}
    # A block that differs, or stays whole, is in no pattern.
    assert merged_lines({**texts, "blocks.1.mlp.0.weight": "1/8"}, ())["blocks.0.mlp.0.weight"]
    assert merged_lines({"b.0.w": "0/8", "b.1.w": "0/8"}, ["b.2.w"]) == {
        "b.0.w": "0/8",
        "b.1.w": "0/8",
    }


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_lines_of_a_plan_are_read_as_the_plan(ranks):
    plan = plan_slices(work_on(MODEL, 2, 8, tokens=301), ranks)
    assert read_lines(plan.lines(), MODEL, ranks) == (plan.slices, plan.gathered)
    alone = Block(32, Heads("chunk", 32, 1))
    plan = plan_slices(work_on(alone, 2, 5, 32), ranks)
    assert plan.gathered
    assert read_lines(plan.lines(), alone, ranks) == (plan.slices, plan.gathered)


def test_tied_names_need_one_line_and_the_pattern_with_fewest_stars_counts():
    slices, _ = read_lines({"head.weight": "0"}, MODEL, 2)
    assert slices == dict.fromkeys(("embedding.token.weight", "head.weight"), Slices.even(0, 301))
    lines = {"blocks.*.mlp.expand.weight": "0", "blocks.1.mlp.expand.weight": "whole"}
    assert list(read_lines(lines, MODEL, 2)[0]) == ["blocks.0.mlp.expand.weight"]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ({"blocks.*.mlp.expnd.weight": "0"}, r"is the name of no parameter.*The model has"),
        ({"norm.weigth": "0"}, r"did you mean 'norm.weight'"),
        ({"norm.weight": "first"}, r"'first' is not DIM/SECTIONS. Write it like 0/3x256:64"),
        ({"norm.weight": "1"}, r"slices dim 1, and the tensor \(64,\) has 1 dims.*up to 0"),
        ({"norm.weight": "0/2x30"}, r"are 60 long together, and dim 0 of \(64,\) is 64"),
        ({"norm.weight": "0/2x32:5"}, r"a section of 32 is no multiple of its unit 5"),
        ({"norm.weight": "0/0x8"}, r"no multiple of its unit"),
        (
            {"blocks.*.norm*.weight": "0", "blocks.0.*norm.weight": "1"},
            r"is the name of no parameter",
        ),
        (
            {"blocks.*.mlp.output.weight": "0", "blocks.0.mlp.*.weight": "1"},
            r"both match 'blocks.0.mlp.output.weight', and say '0' and '1'. Write a line for",
        ),
        (
            {"head.weight": "0", "embedding.token.weight": "1"},
            r"'embedding.token.weight' and 'head.weight' are one tensor|are one tensor",
        ),
        (
            {"blocks.*.attention.qkv.weight": "0/3x:16"},
            r"mesh.tp=8: blocks.0.attention.qkv.weight \(blocks.\*.attention.qkv.weight\) has 4 "
            r"units of 16 along dim 0 \(0/3x64:16\), and each rank needs one. Use mesh.tp=4 or",
        ),
    ],
)
def test_what_is_refused(lines, message):
    with pytest.raises(ConfigError, match=message):
        read_lines(lines, MODEL, 8)


def test_nothing_to_slice_is_refused_with_what_would_do():
    tiny = nn.Sequential(nn.LayerNorm(3), nn.Linear(3, 3), nn.LayerNorm(3))
    message = r"'1.weight' \(3, 3\) can be sliced over 3 ranks at most.*Use a smaller mesh.tp"
    with pytest.raises(
        ConfigError, match=f"mesh.tp=4: nothing of the model can be sliced.*{message}"
    ):
        plan_slices(work_on(tiny, 2, 3), 4)
    with pytest.raises(ConfigError, match=r"can be sliced not at all: dim 0: a norm goes along it"):
        plan_slices(work_on(nn.LayerNorm(64), 2, 64), 2)


@pytest.mark.parametrize("strategy", ["tensor", "tensor_sequence"])
def test_what_a_dry_run_prints_slices_the_same_when_it_is_given(strategy, tmp_path):
    """The printed lines, including their reasons, give the same slices when a job contains them."""
    words = ["device=cpu", "model.args.num_layers=2", "model.args.width=64"]
    words += ["model.args.sequence_length=32", "data.name=synthetic"]
    words += ["data.args={kind: language, vocabulary: 257}"]
    args = ["train", "-n", "2", "--strategy", strategy, *words, "--dry-run"]
    printed = forked_cli(args, cwd=tmp_path)
    assert printed.returncode == 0, printed.stderr
    head, _, tail = printed.stdout.partition("strategy:\n  slice:\n    slices:\n")
    lines = [line for line in tail.split("\n") if line.startswith("      ")]
    slices = dict(line.strip().split(": ") for line in lines)
    assert slices["blocks.*.attention.qkv.weight"] == "0/3x64:16"
    assert "(dim 0: a norm goes along it in " in head
    flow = yaml.safe_dump(slices, default_flow_style=True, sort_keys=False, width=10_000).strip()
    again = forked_cli([*args, f"strategy.slice.slices={flow}"], cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert again.stdout.rpartition("    slices:\n")[2] == tail
