"""`bigtrain plan` and `--strategy auto` as a user runs them."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.programs import run
from support.zygote import interpreter

from bigtrain.assembly.make_plan import make_plan
from bigtrain.errors import ConfigError
from bigtrain.job.arguments import train_arguments
from bigtrain.job.load import load_job
from bigtrain.job.schema import Job
from bigtrain.planner.command import main
from bigtrain.ranks.launcher_env import RankInfo
from bigtrain.train import read_job
from bigtrain.units import format_bytes, parse_bytes

SMALL = [
    "model.args={num_layers: 4, width: 32, num_heads: 2, sequence_length: 16}",
    "data.name=synthetic",
    "data.args={kind: language}",
    "train.global_batch_size=16",
]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_best_plan_is_written_and_can_be_read_back(here: Path, capsys: Any) -> None:
    words = ["--devices", "4", "--cluster", "a100-node", "--memory", "4GiB", *SMALL]
    assert main([*words, "--picture", "front.svg"]) == 0
    said = capsys.readouterr().out
    for part in ("pp x dp", "tokens/s", "MFU", "plan: plan.yaml", "\nrun it:\n"):
        assert part in said, said
    pasted = shlex.split(said.splitlines()[-1])
    assert pasted[:6] == ["bigtrain", "train", "-n", "4", "--plan", "plan.yaml"]
    assert "the memory of" in said
    values = yaml.safe_load((here / "plan.yaml").read_text())
    assert values["predicted"]["peak_bytes"] <= 4 * 2**30
    job = load_job(None, None, SMALL, plan=str(here / "plan.yaml"))
    assert job.strategy.name == "planned"
    assert job.mesh.dp * (job.mesh.pp or 1) == 4
    assert "<svg" in (here / "front.svg").read_text()
    # A second run, with less to search, reports that it replaces the plan of the first.
    assert main(["--devices", "1", "--cluster", "cpu", *SMALL]) == 0
    assert "plan: plan.yaml (replaces an older one)" in capsys.readouterr().out


def test_the_frontier_is_shown_and_each_of_its_plans_can_be_taken(here: Path, capsys: Any) -> None:
    words = ["--devices", "2", "--cluster", "cpu", "--engines", "torch", *SMALL]
    assert main([*words, "--frontier", "--picture", "front.svg", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert len(told["front"]) >= 6
    assert "<svg" in (here / "front.svg").read_text()
    size = f"{told['front_limits'][3] // 1024}KiB"
    assert main([*words, "--at", size]) == 0
    assert f"at most {format_bytes(parse_bytes(size))} of tensors" in capsys.readouterr().out
    taken = yaml.safe_load((here / "plan.yaml").read_text())
    assert taken["predicted"] == told["front"][3]["predicted"]
    assert main([*words, "--frontier"]) == 0
    said = capsys.readouterr().out
    assert "no plan has both less memory and less time" in said
    assert f"--at {size}" in said


def test_a_peak_that_no_plan_has_names_the_least(capsys: Any) -> None:
    assert main(["--devices", "1", "--cluster", "cpu", "--at", "100KiB", *SMALL]) == 1
    assert "Use --at 2MiB, or more --devices" in capsys.readouterr().err


def test_a_file_that_is_no_plan_of_its_own_is_left_alone(here: Path, capsys: Any) -> None:
    words = ["-n", "2", "--cluster", "cpu", *SMALL]
    (here / "plan.yaml").write_text("mine: 1\n")
    with pytest.raises(ConfigError, match=r"plan.yaml exists, and bigtrain plan has not writ.*Use"):
        main(words)
    assert (here / "plan.yaml").read_text() == "mine: 1\n"
    (here / "folder.yaml").mkdir()
    with pytest.raises(ConfigError, match=r"--output folder.yaml: is not a file"):
        main([*words, "--output", "folder.yaml"])
    named = "with a space.yaml"
    (here / named).write_text("mine: 1\n")
    assert main([*words, "--output", named]) == 0  # an explicitly named file is overwritten
    said = capsys.readouterr().out.splitlines()
    assert f"plan: {named} (replaces an older one)" in said
    given = shlex.split(said[-1])
    assert given[:5] == ["bigtrain", "train", "-n", "2", "--plan"]
    assert train_arguments(given[2:], starts_ranks=True).plan == named


def test_more_ranks_than_a_node_has_are_run_by_torchrun(capsys: Any) -> None:
    narrow = ["mesh.pp=1", "mesh.tp=1", "train.micro_batch_size=1", "--engines", "torch"]
    assert main(["default", "-n", "16", "--cluster", "a100-node", *SMALL, *narrow]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[-2] == "run it on each of 2 nodes, with the name of the first node for HOST:"
    words = "torchrun --nnodes=2 --nproc-per-node=8 --rdzv-backend=c10d "
    assert said[-1].startswith(
        f"{words}--rdzv-endpoint=HOST:29400 -m bigtrain.train default --plan"
    )


def test_a_batch_of_the_command_is_not_undone_by_a_word(here: Path, capsys: Any) -> None:
    """The plan is for 12 samples, and the printed command must not reset them to 16."""
    words = ["--devices", "2", "--cluster", "cpu", *SMALL]
    assert main([*words, "--global-batch-size", "12"]) == 0
    line = capsys.readouterr().out.splitlines()[-1]
    assert "train.global_batch_size" not in line
    given = shlex.split(line)
    given = given[given.index("plan.yaml") + 1 :]
    job = load_job(None, None, given, plan=str(here / "plan.yaml"))
    assert job.train.global_batch_size == 12
    assert main(words) == 0
    assert "train.global_batch_size=16" in capsys.readouterr().out


def test_a_machine_gets_one_document(capsys: Any) -> None:
    words = ["--devices", "2", "--cluster", "cpu", "--json", "--engines", "torch", *SMALL]
    assert main(words) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["devices"] == 2
    times = [plan["predicted"]["step_seconds"] for plan in found["plans"]]
    assert times == sorted(times)
    alone = [p for p in found["plans"] if p["strategy"]["replicate"]["name"] == "single"]
    assert all(plan["mesh"]["dp"] == 1 for plan in alone)


def test_what_is_given_is_not_chosen(capsys: Any) -> None:
    words = ["--devices", "4", "--cluster", "a100-node", "--json", *SMALL]
    assert main([*words, "mesh.pp=2", "train.micro_batch_size=2"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {plan["mesh"]["pp"] for plan in found["plans"]} == {2}
    assert {plan["train"]["micro_batch_size"] for plan in found["plans"]} == {2}


def test_nothing_fits_is_said_with_the_least_that_would(capsys: Any) -> None:
    words = ["--devices", "2", "--cluster", "a100-node", "--cap", "269.6MiB", *SMALL]
    assert main(words) == 1
    said = capsys.readouterr().err
    assert "no plan fits" in said
    assert "The smallest peak is" in said
    assert "Use --cap" in said


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--devices", "0"], r"--devices 0: at least 1 is needed. Use --devices 8"),
        (["--devices", "-3"], r"--devices -3: at least 1"),
        (["--memory", "1GiB"], r"--memory 1073741824 .* less than a process .* takes"),
        (
            ["--cap", "1KiB"],
            r"--cap 1024 \(1.0 KiB\) leaves nothing .* --cap 538\.9MiB or more",
        ),
        (["--memory", "lots"], r"--memory 'lots' is not a size in bytes"),
        (["--global-batch-size", "0"], r"--global-batch-size 0: at least 1 sample"),
        (
            ["--devices", "64", "--global-batch-size", "3"],
            r"--global-batch-size 3 does not divide among the replicas of any mesh",
        ),
        (["--devices", "4", "mesh.pp=3"], r"--devices 4 with mesh.pp=3"),
        (["--cluster", "h100"], r"unknown 'h100', did you mean 'h100-node'"),
        (
            ["--cluster", "cpu", "--devices", "64"],
            r"one node of 2 devices, without links between nodes",
        ),
        (["--engines", "jax"], r"--engines jax: jax is not one of the planner's engines"),
        (
            ["--at", "0"],
            r"--at 0 leaves nothing for tensors\. Use --at 1GiB",
        ),
        (
            ["--at", "900GiB"],
            r"--at 900.00GiB: tensors of a rank may take .*Use --at \d+MiB or less",
        ),
        (["--at", "much"], r"--at 'much' is not a size in bytes"),
        (["--picture", "front.pdf"], r"--picture front.pdf: name a file that ends in"),
        (["model.name=nothing"], r"nothing"),
        (["train.stepz=3"], r"train.stepz"),
        (["--output", "/proc/plan.yaml"], r"--output /proc/plan.yaml: cannot be written"),
    ],
)
def test_wrong_input_is_refused_with_the_numbers(words: list[str], message: str) -> None:
    usual = [] if "--cluster" in words else ["--cluster", "a100-node"]
    usual += [] if "--devices" in words else ["--devices", "2"]
    with pytest.raises(ConfigError, match=message):
        main([*usual, *SMALL, *words])


def test_a_model_that_no_rank_has_room_to_build_is_refused(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / "built.py").write_text(
        "import torch\n\nclass Net(torch.nn.Linear):\n"
        "    def __init__(self):\n        super().__init__(4096, 4096)\n"
        "        self.register_buffer('order', torch.unique(torch.arange(8)))\n"
    )
    monkeypatch.syspath_prepend(here)
    words = ["model.name=built:Net", "data.name=synthetic", "data.args.kind=classification"]
    words += ["data.args.input_shape=[4096]", "data.args.num_classes=4096"]
    with pytest.raises(
        ConfigError, match=r"builds the model whole .* takes 64\.0 MiB; its tensors may take 39\.5"
    ):
        main(["--devices", "2", "--cluster", "a100-node", "--cap", "326162325", *words])


def test_a_cluster_file_with_a_missing_figure_is_refused(here: Path) -> None:
    (here / "mine.yaml").write_text("name: mine\nsource: nowhere\ndevice: {name: x, kind: cuda}\n")
    with pytest.raises(ConfigError, match=r"mine.yaml.* is missing"):
        main(["--cluster", "mine.yaml", *SMALL])


@pytest.mark.parametrize("words", [["--memory", "1GiB", "--cap", "1GiB"], ["--nodes", "2"]])
def test_an_option_that_cannot_be_is_refused(words: list[str], capsys: Any) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*words, *SMALL])
    assert ended.value.code == 2
    assert (
        "Leave one of them out" in (said := capsys.readouterr().err) or "no option --nodes" in said
    )


def test_auto_chooses_says_why_and_the_run_follows(here: Path) -> None:
    command = [interpreter(), "-m", "bigtrain", "train", "-n", "2", "--strategy", "auto"]
    words = ["train.steps=4", "log.dir=runs", "log.name=auto", "checkpoint.at_end=false"]
    done = run([*command, *SMALL, *words])
    assert done.status == 0, done.output
    assert "auto: " in done.output
    assert "predicted peak" in done.output
    memory = json.loads((here / "runs/auto/memory.json").read_text())
    assert memory["strategy"].startswith("auto: ")
    assert f"strategy {memory['strategy']}: 2 ranks on cpu" in done.output
    assert memory["predicted_peak_bytes"] == pytest.approx(memory["peak_bytes"], rel=0.01)
    plan = yaml.safe_load((here / "runs/auto/plan.yaml").read_text())
    assert plan["strategy"]["name"] == memory["strategy"]


def test_auto_under_a_cap_that_nothing_fits_is_refused(here: Path) -> None:
    command = [interpreter(), "-m", "bigtrain", "train", "--strategy", "auto", "--cap", "9MiB"]
    done = run([*command, *SMALL, "train.steps=2"])
    assert done.status == 2
    assert "no plan fits" in done.output


TWO = RankInfo(rank=0, local_rank=0, world_size=2, local_world_size=2, launcher="env")


def job_of(*words: str) -> tuple[Job, list[str]]:
    return read_job(train_arguments([*words, *SMALL]), TWO)


def test_a_budget_chooses_what_the_words_leave_open() -> None:
    jobs = {}
    for size in ("1500KiB", "1100KiB"):
        job, told = job_of("--strategy", "fsdp", f"strategy.budget={size}")
        replicate = job.strategy.roles()["replicate"]
        assert (replicate.name, replicate.options["stage"]) == ("zero", 3)
        assert "offload" not in job.strategy.roles()
        assert told[0].startswith("budget: fsdp")
        assert job.strategy.budget is None
        assert (job.mesh.pp, job.mesh.dp) == (1, 2)
        jobs[size] = job
    assert jobs["1500KiB"] != jobs["1100KiB"]
    job, _ = job_of("--strategy", "1f1b", "strategy.budget=2MiB")
    assert job.mesh.pp == 2
    assert job.strategy.roles()["cut"].options["schedule"] == "1f1b"
    job, told = job_of("--strategy", "auto", "strategy.budget=1100KiB")
    assert told[0].startswith("auto: ")
    assert job.strategy.budget is None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["fsdp+full", "1MiB"],
            r"budget chooses which blocks recompute, and so does fsdp\+full .*Leave",
        ),
        (["ddp", "10KiB"], r"no plan fits 10.0 KiB .*Use strategy.budget=\d+MiB, or more"),
        (["fsdp", "900GiB"], r"strategy.budget=900.00GiB: tensors of a rank may take .*Use strat"),
        (["single", "1MiB"], r"no plan of 2 devices has the words single and this mesh"),
        (["fsdp", "lots"], r"'lots' is not a size in bytes"),
    ],
)
def test_a_budget_that_cannot_be_met_is_refused(words: list[str], message: str) -> None:
    strategy, size = words
    with pytest.raises(ConfigError, match=message):
        job_of("--strategy", strategy, f"strategy.budget={size}")


def test_only_train_reads_a_budget() -> None:
    job = load_job(None, "fsdp", [*SMALL, "strategy.budget=1MiB"])
    with pytest.raises(ConfigError, match="lets the planner choose, which only bigtrain train"):
        make_plan(job, 2, "cpu")


def test_auto_and_a_plan_are_two_answers(here: Path) -> None:
    command = [interpreter(), "-m", "bigtrain", "train", "--strategy", "auto", "--plan", "x.yaml"]
    done = run([*command, *SMALL])
    assert done.status == 2
    assert "Leave one of them out" in done.output
