"""Strategies written as words: their meaning, their order, and the messages if they clash."""

from __future__ import annotations

import json
import re
from itertools import product
from pathlib import Path

import pytest
import yaml
from support.plan_candidates import candidate_of
from support.zygote import forked_cli

from bigtrain.assembly.make_plan import make_plan
from bigtrain.compare.list_strategies import strategy_list
from bigtrain.core.registry import techniques_of
from bigtrain.core.strategy import Plan
from bigtrain.core.variants import Shape, Variant
from bigtrain.errors import ConfigError
from bigtrain.job.load import job_from_keys, load_job, override_job
from bigtrain.job.presets import preset_names
from bigtrain.job.schema import ROLES, Job, Role
from bigtrain.job.strategy_words import read_strategy, strategy_label, whole_strategies
from bigtrain.planner.space import Candidate
from bigtrain.schedules.orders import V_SHAPED_SCHEDULES

TORCH_1F1B = {"name": "pipeline", "schedule": "1f1b"}
FULL = {"name": "checkpointing", "mode": "full"}
STAGE_2, STAGE_3 = ({"name": "zero", "stage": stage} for stage in (2, 3))
STATE_ON_DISK = {"name": "offload", "optimizer": "disk"}
TENSOR = {"name": "tensor"}
ALIASES = {
    "3d": {
        "cut": TORCH_1F1B,
        "slice": TENSOR,
        "replicate": {"name": "zero", "stage": 1, "engine": "torch"},
    },
    "1f1b_checkpointing": {"cut": TORCH_1F1B, "recompute": FULL},
    "1f1b_ddp": {"cut": TORCH_1F1B, "replicate": {"name": "ddp"}},
    "1f1b_fsdp": {"cut": TORCH_1F1B, "replicate": {**STAGE_3, "engine": "torch"}},
    "1f1b_zero1": {
        "cut": TORCH_1F1B,
        "replicate": {"name": "zero", "stage": 1, "engine": "torch"},
    },
    "1f1b_zero2": {"cut": TORCH_1F1B, "replicate": {**STAGE_2, "engine": "torch"}},
    "ddp_checkpointing": {"replicate": {"name": "ddp"}, "recompute": FULL},
    "ddp_offload_disk": {"replicate": {"name": "ddp"}, "offload": STATE_ON_DISK},
    "fsdp_checkpointing": {"replicate": {**STAGE_3, "engine": "torch"}, "recompute": FULL},
    "single_activations_disk": {
        "replicate": {"name": "single"},
        "offload": {"name": "offload", "activations": "disk"},
    },
    "single_checkpointing": {"replicate": {"name": "single"}, "recompute": FULL},
    "single_offload_cpu": {
        "replicate": {"name": "single"},
        "offload": {"name": "offload", "optimizer": "cpu"},
    },
    "single_offload_disk": {"replicate": {"name": "single"}, "offload": STATE_ON_DISK},
    "single_selective": {
        "replicate": {"name": "single"},
        "recompute": {"name": "checkpointing", "mode": "selective"},
    },
    "zero1_torch_offload_disk": {
        "replicate": {"name": "zero", "stage": 1, "engine": "torch"},
        "offload": STATE_ON_DISK,
    },
    "zero2_checkpointing": {"replicate": STAGE_2, "recompute": FULL},
    "zero2_offload": {
        "replicate": STAGE_2,
        "offload": {"name": "offload", "optimizer": "cpu"},
    },
    "zero3_checkpointing": {"replicate": STAGE_3, "recompute": FULL},
    "zero3_offload": {
        "replicate": STAGE_3,
        "offload": {"name": "offload", "optimizer": "cpu", "parameters": "cpu"},
    },
}
"""The meaning of presets that combine others, recorded before they were written as words."""
SMALL = [
    "model.args={num_layers: 2, width: 16, num_heads: 2, sequence_length: 16}",
    *("data.name=synthetic", "data.args.kind=language", "train.global_batch_size=8"),
]


def roles(job: Job) -> dict[str, object]:
    return {r: c.model_dump() for r in ROLES if (c := getattr(job.strategy, r)) is not None}


def write(folder: Path, text: str, name: str = "mine.yaml") -> str:
    (folder / name).write_text(text)
    return str(folder / name)


@pytest.mark.parametrize("name", ALIASES)
def test_an_alias_is_what_it_was(name: str) -> None:
    job = load_job(None, name)
    assert roles(job) == ALIASES[name]
    assert job.strategy.name == name
    spread = "cut" in ALIASES[name] and "replicate" in ALIASES[name]
    assert job.mesh.pp == (2 if spread else None)
    assert job.mesh.tp == (2 if name == "3d" else None)
    plain = {"strategy", "mesh"}
    assert job.model_dump(exclude=plain) == load_job(None, "single").model_dump(exclude=plain)


def test_the_aliases_are_all_that_combine_others() -> None:
    folder = Path(__file__).parents[2] / "configs" / "strategies"
    texts = {path.stem: yaml.safe_load(path.read_text()) for path in folder.glob("*.yaml")}
    named = {name for name, text in texts.items() if isinstance(text["strategy"], str)}
    assert named == {*ALIASES, "offload_optimizer_cpu", "offload_optimizer_disk"}
    assert {role for text in texts.values() for role in text["strategy"] if role in ROLES} == {
        *ROLES
    }


def test_a_role_by_itself_is_a_word() -> None:
    words = {
        "full": {"recompute": FULL},
        "every": {"recompute": {"name": "checkpointing", "every": 2}},
        "every_3": {"recompute": {"name": "checkpointing", "every": 3}},
        "budget": {"recompute": {"name": "checkpointing", "budget": "80%"}},
        "budget_6GiB": {"recompute": {"name": "checkpointing", "budget": "6GiB"}},
        "offload_optimizer_disk": {"offload": STATE_ON_DISK},
        "offload_disk+offload_activations_cpu": {
            "offload": {"name": "offload", "optimizer": "disk", "activations": "cpu"}
        },
        "selective+every_2": {
            "recompute": {"name": "checkpointing", "mode": "selective", "every": 2}
        },
        "hybrid_4": {"replicate": {**STAGE_3, "engine": "torch", "shard_ranks": 4}},
        "accumulation_4": {"accumulate": {"name": "accumulation"}},
    }
    for text, expected in words.items():
        job = load_job(None, text)
        assert roles(job) == expected
        assert job.strategy.name == text
    assert load_job(None, "ddp+accumulation_4").train.accumulation_steps == 4
    only_add = set(preset_names("strategies")) - set(whole_strategies())
    assert {"full", "selective", "offload_disk", "accumulation"} <= only_add
    assert not {"ddp", "hybrid", "gpipe", "1f1b_checkpointing"} & only_add


def test_words_lie_over_the_job_and_keys_over_the_words(tmp_path: Path) -> None:
    config = write(tmp_path, "mesh: {pp: 8, tp: 1}\nstrategy: {replicate: ddp}\n", "job.yaml")
    mesh = write(tmp_path, "mesh: {pp: 4}\ntrain: {seed: 3}\n")
    job = load_job(config, f"1f1b+fsdp+{mesh}", ["strategy.recompute.every=2", "train.seed=4"])
    assert (job.mesh.pp, job.train.seed, job.strategy.name) == (4, 4, "1f1b+fsdp+mine")
    assert [*roles(job)] == ["cut", "replicate", "recompute"]
    # A file's keys override those of its words.
    file = write(tmp_path, "strategy: 1f1b_fsdp\nmesh: {pp: 4}\n")
    assert load_job(None, file).mesh.pp == 4
    file = write(tmp_path, "strategy: {name: fsdp+selective, recompute: {every: 2}}\n")
    job = load_job(None, file)
    assert (job.strategy.name, roles(job)["recompute"]) == (
        "mine",
        {"name": "checkpointing", "mode": "selective", "every": 2},
    )


def test_equal_sayings_do_not_clash(tmp_path: Path) -> None:
    file = write(tmp_path, "strategy: {replicate: {name: ddp}, recompute: full}\n")
    assert roles(load_job(None, f"ddp_checkpointing+{file}+full")) == ALIASES["ddp_checkpointing"]
    assert load_job(None, "1f1b_fsdp+1f1b+full").mesh.pp == 2


@pytest.mark.parametrize("words", ["1f1b+fsdp+full", "zero1_torch+offload_disk", "ddp+selective"])
def test_a_file_a_plan_and_the_command_line_say_the_same(words: str, tmp_path: Path) -> None:
    job = load_job(None, words)
    assert job.strategy.name == words
    short = write(tmp_path, f"strategy: {words}\n")
    named = write(tmp_path, f"strategy: {{name: {words}}}\n", "named.yaml")
    default = load_job("default")
    for file in (short, named):
        assert load_job(file).strategy == job.strategy
        for loaded in (load_job(None, file), load_job(None, None, plan=file)):
            assert roles(loaded) == roles(job)
            assert loaded.strategy.name == Path(file).stem
    forms = [[f"strategy={words}"], ["STRATEGY", words], [f"strategy={{name: {words}}}"]]
    for form in [*forms, [f"strategy.name={words}"]]:
        assert load_job(None, None, form) == job
        assert override_job(default, form).strategy == job.strategy
    assert job_from_keys(words, {}).strategy == job.strategy
    assert load_job(None, words.replace("+", " + ")) == job
    beside = load_job(None, None, [f"strategy={{name: {words}, accumulate: accumulation}}"])
    assert roles(beside) == {**roles(job), "accumulate": {"name": "accumulation"}}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("ddp+zero2", "--strategy ddp+zero2: ddp and zero2 both set strategy.replicate (ddp, "
         "zero). Keep one of them."),
        ("1f1b+full+gpipe", "1f1b and gpipe both set strategy.cut (pipeline schedule=1f1b, "
         "pipeline schedule=gpipe)"),
        ("zero2+three.yaml", "zero2 and three.yaml:2 both set strategy.replicate (zero stage=2, "
         "zero stage=3). Keep one"),
        ("three.yaml+ddp", "three.yaml:2 and ddp both set strategy.replicate (zero, ddp)"),
        ("zero1+zero1_torch", "(zero stage=1, zero stage=1 engine=torch)"),
        ("ddp_checkpointing+zero2", "ddp_checkpointing and zero2 both set strategy.replicate"),
        ("full+selective", "both set strategy.recompute.mode (full, selective)"),
        ("offload_cpu+offload_disk", "both set strategy.offload.optimizer (cpu, disk)"),
        ("1f1b_zero1+pp.yaml", "1f1b_zero1 and pp.yaml:1 both set mesh.pp (2, 4)"),
        ("accumulation+accumulation_4", "both set train.accumulation_steps (2, 4)"),
        ("ddp+clash.yaml", "clash.yaml:1: strategy=zero2+fsdp: zero2 and fsdp both set"),
        ("ddp+", "--strategy: 'ddp+' has no word next to a +. Write words like ddp+full."),
        ("ddp++full", "'ddp++full' has no word next to a +"),
        ("", "--strategy: '' names no strategy. Write words like ddp+full."),
        ("ddp,full", "'ddp,full': join words by +, as in ddp+full."),
        ("ddp full", "'ddp full': join words by +"),
        ("auto+full", "'auto+full': auto chooses the whole strategy"),
        ("autotp", "--strategy: autotp was removed. Use --strategy tensor (or zero1_torch+tensor"),
        ("autotp+full", "--strategy autotp+full: autotp was removed. Use --strategy tensor"),
        ("ddp+fulll", "--strategy ddp+fulll: unknown 'fulll', did you mean 'full'? Similar "),
        ("DDP+full", "unknown 'DDP', did you mean 'ddp'?"),
        ("mylib:Net+full", "Use strategy.replicate=mylib:Net (or its role)"),
        ("every_x", "unknown 'every_x', did you mean 'every'?"),
        ("full_3", "unknown 'full_3', did you mean 'full'?"),
        ("zero2+none.yaml", "--strategy zero2+none.yaml: there is no file 'none.yaml'"),
        ("itself.yaml", "itself.yaml:1: strategy=ddp+itself.yaml: itself.yaml names itself."),
        ("list.yaml", "list.yaml:1: strategy: ['ddp', 'full'] names no strategy. Write words, as"),
        ("takes.yaml", "takes.yaml:2: a strategy file has no key 'takes'"),
        ("label.yaml", "label.yaml:1: strategy: unknown 'mine'"),
        ("accumulation_0", "--strategy: accumulation_0: train.accumulation_steps: needs "
         "1 or more (got 0)"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_with_both_sides(
    words: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "strategy:\n  replicate: {name: zero, stage: 3}\n", "three.yaml")
    write(tmp_path, "mesh: {pp: 4}\n", "pp.yaml")
    write(tmp_path, "strategy: zero2+fsdp\n", "clash.yaml")
    write(tmp_path, "strategy: ddp+itself.yaml\n", "itself.yaml")
    write(tmp_path, "strategy: [ddp, full]\n", "list.yaml")
    write(tmp_path, "strategy: ddp\ntakes: mesh.pp\n", "takes.yaml")
    write(tmp_path, "strategy: {name: mine, recompute: full}\n", "label.yaml")
    with pytest.raises(ConfigError, match=re.escape(message)):
        load_job(None, words)


@pytest.mark.parametrize(
    ("text", "overrides", "message"),
    [
        ("\nstrategy: ddp+zero2\n", [], "job.yaml:2: strategy=ddp+zero2: ddp and zero2 both set"),
        ("strategy: ddp+fulll\n", [], "job.yaml:1: strategy=ddp+fulll: unknown 'fulll', did you"),
        ("strategy: {name: zeroo}\n", [], "job.yaml:1: strategy: unknown 'zeroo'"),
        ("strategy: [ddp]\n", [], "job.yaml:1: strategy: ['ddp'] names no strategy."),
        ("strategy: autotp\n", [], "job.yaml:1: strategy: autotp was removed. Use --strategy"),
        ("strategy: auto\n", [], "job.yaml:1: strategy: 'auto': auto chooses the whole"),
        ("{}", ["strategy=ddp+zero2"], "strategy=ddp+zero2: ddp and zero2 both set"),
        ("{}", ["strategy=ddp", "+", "full"], "'+': write a strategy's words without spaces"),
        ("{}", ["strategy="], "strategy: '' names no strategy."),
        ("{}", ["strategy.name=fdsp"], "strategy: unknown 'fdsp', did you mean 'fsdp'?"),
    ],
)
def test_a_job_with_wrong_words_is_refused(
    text: str, overrides: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, text, "job.yaml")
    with pytest.raises(ConfigError, match=re.escape(message)):
        load_job("job.yaml", overrides=overrides)


def test_a_label_beside_spelled_out_roles_stays_one(tmp_path: Path) -> None:
    file = write(tmp_path, "strategy: {name: zero2, replicate: ddp}\n")
    assert load_job(file).strategy.name == "zero2"
    assert (
        load_job(None, None, plan=file).strategy.replicate == load_job("digits").strategy.replicate
    )
    assert strategy_label(f"zero2+{file}") == "zero2+mine"


def test_a_path_with_a_plus_in_it_is_a_file(tmp_path: Path) -> None:
    assert load_job(None, write(tmp_path, "strategy: ddp\n", "a+b.yaml")).strategy.name == "a+b"


def techniques(plan: Plan) -> dict[str, object]:
    """Names and options; a schedule's default replaces a number that is left out."""
    options_by_role = {role: (t.name, t.model_dump()) for role, t in plan.techniques.items()}
    if "cut" in options_by_role:
        options_by_role["cut"][1].update(stages_per_rank=plan.techniques["cut"].per_rank(), at=())
    return options_by_role


def variants_of(role: Role, *, pp: int, dp: int) -> list[Variant]:
    """The variants of all techniques of a role for a small cluster."""
    shape = Shape(pp, dp, devices_per_node=2, device_type="cpu", num_blocks=16, micro_batches=8)
    return [variant for technique in techniques_of(role) for variant in technique.variants(shape)]


def candidates() -> list[Candidate]:
    """One candidate for each strategy that the planner may name."""
    presets = [v.label for v in variants_of("replicate", pp=1, dp=2) if v.is_word]
    plans = [
        candidate_of(1, 2, replicate, 2, 1, None, 1, offload)
        for replicate, offload in product(presets, (None, "disk"))
    ]
    plans += [candidate_of(1, 1, "single", 8, 1, None, 1, "disk")]
    plans += [candidate_of(1, 4, "fsdp", 1, 2, shard_ranks=ranks) for ranks in (2, 4)]
    schedules = dict.fromkeys(str(v.options["schedule"]) for v in variants_of("cut", pp=2, dp=1))
    for schedule, offload in product(schedules, (None, "disk")):
        numbers = (2, 4) if schedule.startswith("interleaved") else (2,)
        for number in numbers if schedule in V_SHAPED_SCHEDULES or len(numbers) > 1 else (1,):
            plans.append(candidate_of(2, 1, "single", 1, 8, schedule, number, offload))
            plans += [
                candidate_of(2, 2, replicate, 1, 4, schedule, number, offload)
                for replicate in ("ddp", "zero1_torch", "fsdp_zero2", "fsdp")
            ]
    return plans


@pytest.mark.parametrize("one", candidates(), ids=lambda one: f"{one.label} {one.pp}x{one.dp}")
def test_what_the_planner_calls_a_plan_is_typed_back(one: Candidate) -> None:
    planned, words = one.job(load_job(None, "single", SMALL)), one.label
    mesh = [f"mesh.pp={one.pp}", f"mesh.dp={one.dp}", f"train.micro_batch_size={one.rows}"]
    typed = load_job(None, words, [*SMALL, *mesh])
    try:
        wanted = make_plan(planned, one.pp * one.dp, "cpu")
    except ConfigError as error:  # both forms are refused, with the same message
        with pytest.raises(ConfigError, match=re.escape(str(error))):
            make_plan(typed, one.pp * one.dp, "cpu")
        return
    assert techniques(make_plan(typed, one.pp * one.dp, "cpu")) == techniques(wanted)


def test_a_composition_is_explained_as_one() -> None:
    (row,) = strategy_list(["1f1b+fsdp+full"])
    assert row["name"] == "1f1b+fsdp+full"
    assert row["roles"] == {"cut": "pipeline", "replicate": "zero", "recompute": "checkpointing"}
    assert (row["ranks"], row["combines"]["recompute_full"]["own"]) == (2, True)


WORDS = ["1f1b+fsdp+full", "zero1_torch+full+offload_disk", "ddp+selective"]


def test_compositions_train_as_one_process_does(tmp_path: Path) -> None:
    words = ["--strategies", ",".join(WORDS), "-n", "2", "--json", "train.precision=fp64"]
    done = forked_cli(["verify", *words, *SMALL], tmp_path, timeout=300)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["rows"]
    assert [row["strategy"] for row in rows] == WORDS
    for row in rows:
        assert row["verdict"] == "pass"
        assert row["differences"]["loss"] < 1e-12


def test_a_run_is_called_by_its_words(tmp_path: Path) -> None:
    words = ["--strategy", "ddp+offload_disk", "train.steps=2", "checkpoint.at_end=false"]
    done = forked_cli(["train", "-n", "2", *words, *SMALL], tmp_path)
    assert done.returncode == 0, done.stderr
    assert "strategy ddp+offload_disk: " in done.stdout
    folder = tmp_path / "runs" / "gpt-ddp+offload_disk-1"
    assert json.loads((folder / "memory.json").read_text())["strategy"] == "ddp+offload_disk"
    again = load_job(str(folder / "config.yaml"))
    assert roles(again) == ALIASES["ddp_offload_disk"]
    assert again.strategy.name == "ddp+offload_disk"
    assert load_job(None, None, plan=str(folder / "plan.yaml")).strategy.name == "ddp+offload_disk"
    words = ["--strategies", "ddp+full,single_checkpointing", "-n", "2", "--steps", "2", "--json"]
    done = forked_cli(["compare", *words, *SMALL], tmp_path)
    assert [row["strategy"] for row in json.loads(done.stdout)["rows"]] == [
        *("ddp+full", "single_checkpointing")
    ]


def test_reading_a_strategy_says_what_it_says_in_full() -> None:
    assert read_strategy("1f1b_ddp+full", "--strategy").values == {
        "strategy": {
            "cut": TORCH_1F1B,
            "replicate": {"name": "ddp"},
            "recompute": FULL,
            "name": "1f1b_ddp+full",
        },
        "mesh": {"pp": 2},
    }
