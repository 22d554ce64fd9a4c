"""`bigtrain strategies`: table, explanations and JSON agree with `make_plan`."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
import torch
from support.programs import run
from support.zygote import interpreter

from bigtrain.assembly.make_plan import device_type_of, make_plan
from bigtrain.compare.list_strategies import ADDITIONS, NEEDS, RANKS, main, strategy_list
from bigtrain.errors import ConfigError
from bigtrain.job.load import load_job
from bigtrain.job.presets import preset_line
from bigtrain.job.strategy_words import whole_strategies

NEEDS_CPU = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")


@pytest.fixture(scope="module")
def rows() -> dict[str, dict[str, Any]]:
    """All presets by name, from the command's JSON."""
    done = run([interpreter("deepspeed"), "-m", "bigtrain", "strategies", "--json"])
    assert done.status == 0, done.output
    document = json.loads(done.output)  # nothing else was printed, not on standard error either
    return {row["name"]: row for row in document}


def test_every_preset_is_there_with_all_that_the_json_promises(rows):
    assert list(rows) == whole_strategies()
    for row in rows.values():
        assert row["summary"]
        assert row["roles"]
        assert set(row["combines"]) == {addition.name for addition in ADDITIONS}
        for heading in ("Memory", "Communication", "Constraints", "Example"):
            assert all(sections[heading] for sections in row["sections"].values()), row["name"]
        assert (row["ranks"] is None) == (row["unavailable"] is not None)


def test_what_does_not_work_has_a_reason_and_nothing_else_has_one(rows):
    seen = set()
    for row in rows.values():
        for answer in row["combines"].values():
            seen.add(answer["works"])
            assert bool(answer["reason"]) == (answer["works"] is not True)
            assert (answer["ranks"] is None) == (answer["works"] is not True)
    assert {True, False} <= seen


@pytest.mark.parametrize(
    ("name", "addition", "works", "reason"),
    [
        ("fsdp", "recompute_full", True, ""),
        ("fsdp", "recompute_selective", True, ""),
        ("fsdp", "fp64", True, ""),
        ("zero3", "recompute_selective", False, "change them in place"),
        ("zero3", "recompute_full", True, ""),
        ("zero2", "fp64", False, "DeepSpeed updates in fp32"),
        ("zero2", "cut_1f1b", False, "both own the training step"),
        ("zero2", "optimizer_disk", False, "nvme"),
        ("oss", "cut_1f1b", False, "takes a whole model"),
        ("ddp", "cut_1f1b", True, ""),
        ("oss", "optimizer_disk", False, "fairscale keeps all its states"),
        (
            "single_activations_disk",
            "recompute_selective",
            False,
            "or leave strategy.offload.activations out",
        ),
        ("zero_bubble", "recompute_selective", False, "two for each micro-batch"),
        ("single", "accumulation", True, ""),
        ("single", "bf16", True, ""),
    ],
)
def test_what_combines(rows, name, addition, works, reason):
    answer = rows[name]["combines"][addition]
    assert answer["works"] is works
    assert not answer["own"]
    assert reason in (answer["reason"] or "")


def test_what_a_preset_does_already_is_its_own(rows):
    """A preset that includes an addition says so."""
    included = {
        (name, addition)
        for name, row in rows.items()
        for addition, answer in row["combines"].items()
        if answer["own"]
    }
    assert ("ddp_checkpointing", "recompute_full") in included
    assert ("single_selective", "recompute_selective") in included
    assert ("single_offload_disk", "optimizer_disk") in included
    assert ("single_activations_disk", "activations_disk") in included
    assert {("gpipe", "cut_1f1b"), ("1f1b", "cut_1f1b"), ("1f1b", "accumulation")} <= included
    assert not {addition for name, addition in included if name in ("single", "ddp", "fsdp")}


def test_how_many_ranks_a_preset_needs(rows):
    assert (rows["single"]["ranks"], rows["single"]["runs_on"]) == (1, [1])
    assert (rows["1f1b"]["ranks"], rows["1f1b"]["runs_on"]) == (2, [2, 4])
    assert (rows["hybrid"]["ranks"], rows["hybrid"]["runs_on"]) == (2, [2, 4])
    assert rows["ddp"]["ranks"] == 1
    # A preset that already shards within a pair of ranks needs another pair as a pipeline's
    # replica.
    assert rows["hybrid"]["combines"]["cut_1f1b"]["ranks"] == 4


@NEEDS_CPU
def test_a_preset_that_needs_a_gpu_says_so(rows):
    row = rows["fairscale_fsdp"]
    assert "needs CUDA" in row["unavailable"]
    assert {answer["works"] for answer in row["combines"].values()} == {None}


@pytest.mark.parametrize("addition", ADDITIONS, ids=lambda addition: addition.name)
@pytest.mark.parametrize("name", ["single", "fsdp", "sharded_ddp", "zero_bubble"])
def test_the_words_do_on_the_command_line_what_is_said_of_them(rows, name, addition):
    answer = rows[name]["combines"][addition.name]
    if answer["own"]:
        return
    job = load_job("default", name, [*addition.words.split(), "train.global_batch_size=null"])
    device = device_type_of(job)
    if answer["works"]:
        plan = make_plan(job, answer["ranks"], device)
        assert addition.has(plan)
        return
    for count in RANKS:
        with pytest.raises(ConfigError):
            make_plan(job, count, device)


def grouped(capsys, monkeypatch, width):
    """The names below each heading of the list, and all lines."""
    monkeypatch.setenv("COLUMNS", str(width))
    assert main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= width
    names_by_heading, heading = {}, ""
    for line in lines[: lines.index("")]:
        if not line.startswith(" "):
            heading = line
        elif line[2] != " ":
            names_by_heading.setdefault(heading, []).append(line.split()[0])
    return names_by_heading, lines


@pytest.mark.parametrize("width", [80, 140])
def test_the_list_has_every_preset_once_below_its_need(capsys, monkeypatch, width):
    names_by_heading, lines = grouped(capsys, monkeypatch, width)
    assert list(names_by_heading) == list(NEEDS.values())
    listed = [name for names in names_by_heading.values() for name in names]
    assert sorted(n for n in listed if not n.startswith("+")) == sorted(whole_strategies())
    assert len(listed) == len(set(listed))
    assert {"ddp", "single"} == set(names_by_heading[NEEDS["nothing"]])
    assert {"zero1", "oss", "+offload_disk"} <= set(names_by_heading[NEEDS["optimizer"]])
    assert {"zero2", "fsdp_zero2", "sharded_ddp"} <= set(names_by_heading[NEEDS["gradients"]])
    assert {"zero3", "fsdp", "+offload_parameters_cpu"} <= set(
        names_by_heading[NEEDS["parameters"]]
    )
    assert {"+full", "+budget", "ddp_checkpointing"} <= set(names_by_heading[NEEDS["activations"]])
    assert {"1f1b", "1f1b_zero1", "layer_split"} <= set(names_by_heading[NEEDS["model"]])
    assert {"tensor", "tensor_sequence", "3d"} == set(names_by_heading[NEEDS["layer"]])
    assert {"local_sgd", "diloco"} == set(names_by_heading[NEEDS["slow links"]])
    assert {"ring", "parameter_server", "sync_sgd"} <= set(names_by_heading[NEEDS["learning"]])
    if width == 140:
        assert len(lines) < 90  # one line for each preset
    assert "To use one: bigtrain train -n 2 --strategy NAME" in lines


def test_each_preset_says_in_one_line_what_no_other_says(rows):
    lines = [row["summary"] for row in rows.values()]
    lines += [preset_line("strategies", n) for n in ("full", "selective", "budget", "every")]
    for line in lines:
        assert line.endswith("."), line
        assert len(line) <= 95, line
    assert len(set(lines)) == len(lines)
    for stage, words in (("1", "Optimizer state sharded"), ("2", "state and gradients sharded")):
        assert words in rows[f"zero{stage}"]["summary"]
    assert "parameters sharded" in rows["zero3"]["summary"]


def test_what_a_technique_says_of_itself_is_where_it_is_listed(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "own_need.py").write_text(
        "from typing import ClassVar\n"
        "from bigtrain.strategy import Need, Role, Strategy\n"
        "class Own(Strategy):\n"
        "    name: ClassVar[str] = 'own'\n"
        "    role: ClassVar[Role] = 'replicate'\n"
        "    summary: ClassVar[str] = 'does its own'\n"
        "    far: bool = False\n"
        "    @property\n"
        "    def need(self) -> Need:\n"
        "        return 'slow links' if self.far else 'nothing'\n"
    )
    for far, need in ((True, "slow links"), (False, "nothing")):
        path = tmp_path / f"own_{far}.yaml"
        strategy_text = f"strategy: {{replicate: {{name: 'own_need:Own', far: {far}}}}}\n"
        path.write_text(strategy_text)
        (row,) = strategy_list([str(path)])
        assert (row["need"], row["summary"].split(" (")[0]) == (need, "does its own")
    (row,) = strategy_list(["zero1_torch+full"])
    assert row["need"] == "activations"
    (row,) = strategy_list(["zero2+full"])
    assert row["need"] == "gradients"


def test_one_is_explained(rows, capsys):
    assert main(["fsdp"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"fsdp: {rows['fsdp']['summary']}"[:60])
    for heading in ("Memory", "Communication", "Constraints", "Example", "Source", "Options"):
        assert f"\n  {heading} " in shown
    assert "stage=3 engine=torch" in shown
    assert "works with recompute full: " in shown
    assert "strategy.recompute.mode=full" in shown
    assert main(["single_selective"]) == 0
    shown = capsys.readouterr().out
    assert "has recompute selective" in shown
    assert main(["sharded_ddp"]) == 0
    assert "refuses a cut by 1f1b: " in capsys.readouterr().out


def test_a_file_is_explained_as_a_preset_is(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("strategy:\n  replicate: {name: zero, stage: 3, engine: torch}\n")
    (row,) = strategy_list([str(path)])
    assert (row["name"], row["roles"], row["ranks"]) == ("mine", {"replicate": "zero"}, 1)


def test_an_unknown_name_is_the_users_and_the_nearest_is_named():
    done = run([interpreter("deepspeed"), "-m", "bigtrain", "strategies", "fsdpp"])
    assert done.status == 2
    assert "did you mean 'fsdp'?" in done.output
    assert "Traceback" not in done.output


def test_explaining_one_loads_no_engine_that_it_does_not_need():
    code = (
        "import sys; from bigtrain.compare.list_strategies import main; main(['ddp', '--json']); "
        "print([n for n in ('deepspeed', 'fairscale') if n in sys.modules], file=sys.stderr)"
    )
    done = run([sys.executable, "-c", code])
    assert done.output.splitlines()[-1] == "[]", done.output
