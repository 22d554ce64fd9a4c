"""YAML files, strategies, plans and overrides, and the messages for wrong ones."""

from __future__ import annotations

import os
import random
import subprocess

import pytest
import yaml

from bigtrain.errors import ConfigError, as_word
from bigtrain.job.load import job_from_keys, load_job, override_job, parse_overrides
from bigtrain.job.presets import preset_names, read_yaml
from bigtrain.job.schema import Job


def write(tmp_path, text, name="job.yaml"):
    path = tmp_path / name
    path.write_text(text)
    return str(path)


def test_both_forms_of_override_are_read():
    tree = parse_overrides(
        ["optim.lr=3e-4", "TRAIN.STEPS", "7", "model.args.Width=2", "x.y=[1, 2]"]
    )
    assert tree.values == {
        "optim": {"lr": "3e-4"},
        "train": {"steps": 7},
        "model": {"args": {"Width": 2}},
        "x": {"y": [1, 2]},
    }
    job = load_job(overrides=["optim.lr=3e-4", "TRAIN.STEPS", "7", "data.path="])
    assert (job.optim.lr, job.train.steps, job.data.path) == (3e-4, 7, None)


def test_the_layers_lie_over_each_other_in_order(tmp_path):
    config = write(
        tmp_path,
        "train: {steps: 5, seed: 1}\nstrategy: {replicate: {name: ddp, static_graph: true}}\n",
    )
    strategy = write(
        tmp_path, "strategy: {replicate: {name: single}}\ntrain: {seed: 2}\n", "mine.yaml"
    )
    job = load_job(config)
    assert job.strategy.replicate.options == {"static_graph": True}
    job = load_job(config, strategy)
    assert job.strategy.name == "mine"
    # A named strategy replaces all options of the earlier one
    assert job.strategy.replicate.options == {}
    assert (job.train.steps, job.train.seed) == (5, 2)
    assert load_job(config, strategy, ["train.seed=3"]).train.seed == 3


def test_a_strategy_may_be_named_in_the_file_and_on_the_command_line(tmp_path):
    config = write(tmp_path, "strategy: ddp\n")
    assert load_job(config).strategy.name == "ddp"
    assert load_job(config, overrides=["strategy=single"]).strategy.name == "single"
    job = load_job(config, overrides=["strategy.replicate.bucket_size=1MiB"])
    assert job.strategy.replicate.options == {"bucket_size": "1MiB"}
    assert job_from_keys(
        "ddp", {"strategy.replicate.static_graph": True}
    ).strategy.replicate.options


def test_what_a_key_displaces_goes_with_it():
    job = load_job(overrides=["train.epochs=2"])
    assert (job.train.steps, job.train.epochs) == (None, 2)
    config = load_job(overrides=["model.name=lenet", "model.args.num_classes=3"])
    assert config.model.args == {"num_classes": 3}


def test_the_arguments_of_another_model_are_forgotten(tmp_path):
    config = write(tmp_path, "model: {name: gpt, args: {width: 8}}\ndata: {name: voc, path: /x}\n")
    job = load_job(config, overrides=["model.name=lenet", "data.name=digits"])
    assert job.model.args == {}
    assert job.data.path is None


def test_every_preset_loads_and_survives_being_saved(tmp_path):
    for name in preset_names("jobs"):
        job = load_job(name)
        again = write(tmp_path, yaml.safe_dump(job.model_dump(mode="json")), f"{name}.yaml")
        assert load_job(again) == job
    for name in preset_names("strategies"):
        assert load_job(strategy=name).strategy.name == name


def test_a_plan_file_lies_over_the_job(tmp_path):
    plan = write(
        tmp_path,
        "mesh: {dp: 2}\nstrategy: {name: ddp, replicate: {name: ddp}}\n"
        "train: {micro_batch_size: 3}\npredicted: {peak_bytes: 12}\n",
    )
    job = load_job(plan=plan)
    assert (job.mesh.dp, job.train.micro_batch_size, job.strategy.name) == (2, 3, "ddp")


@pytest.mark.parametrize(
    ("text", "overrides", "message"),
    [
        (
            "optim:\n  lrr: 1\n",
            [],
            r"job\.yaml:2: unknown key optim\.lrr, did you mean optim\.lr\?",
        ),
        ("train:\n  steps: 1\n  lr: 1\n", [], r"job\.yaml:3: unknown key train\.lr, .*optim\.lr\?"),
        ("modell: {}\n", [], r"job\.yaml:1: unknown key modell, did you mean model\?"),
        (
            "train: {steps: many}\n",
            [],
            r"\.yaml:1: train\.steps: needs a whole .*got 'many'",
        ),
        (
            "train: {precision: fp8}\n",
            [],
            r"needs 'fp32'.*got 'fp8'.*Set train\.precision to",
        ),
        ("train: {steps: 1, steps: 2}\n", [], r"job\.yaml:1: the key 'steps' is written twice"),
        ("train: [1\n\noptim: {lr: 1}\n", [], r"job\.yaml:1: not valid YAML"),
        ("train:\n  steps: @3\n", [], r"job\.yaml:2: not valid YAML: found character '@'"),
        ("- a\n", [], r"job\.yaml: a job is a mapping"),
        ("train: {steps: 1, epochs: 1}\n", [], r"steps=1 and epochs=1\.0 both say"),
        ("strategy: dpp\n", [], r"strategy: unknown 'dpp', did you mean 'ddp'\?"),
        ("mesh: {dp: 0}\n", [], r"mesh\.dp: dp=0 has no ranks"),
        ("{}", ["train.stepz=3"], r"^unknown key train\.stepz, did you mean train\.steps\?"),
        ("{}", ["zzz.qqq=3"], r"unknown key zzz\. Known here: model, data"),
        ("{}", ["TRAIN.STEPS"], r"'TRAIN\.STEPS' has no value\. Write train\.steps=VALUE"),
        ("{}", ["train.steps=[1"], r"train\.steps=\[1: not a value"),
        ("{}", ["-x=3"], r"'-x=3' is not an option"),
        ("{}", ["train.steps=-3"], r"train\.steps: needs 1 or more .got -3.*Use train\.steps=1\.$"),
        (
            "{}",
            ["optim.clip_norm=0"],
            r"needs more than 0.*Set optim\.clip_norm to such",
        ),
        ("{}", ["mesh.tp=true"], r"^mesh\.tp: needs a number \(got true\)\.$"),
        ("{}", ["optim.lr=false"], r"^optim\.lr: needs a number \(got false\)\.$"),
        ("{}", ["optim.betas=[true, 0.9]"], r"^optim\.betas: needs a number \(got \[True, 0\.9\]"),
        ("train: {seed: yes}\n", [], r"job\.yaml:1: train\.seed: needs a number \(got true\)"),
        ("{}", [f"train.seed={2**63}"], r"^train\.seed: a whole number is at most 9,223,372,036,"),
        ("{}", [f"optim.betas=[{10**400}, 0.9]"], r"^optim\.betas: a whole number is at most 9,"),
        ("{}", [f"memory.cap={10**400}"], r"^memory\.cap: a size has at most 1048576 TiB\. Write"),
        ("{}", ["memory.cap=9999999999TiB"], r"^memory\.cap: a size has at most 1048576 TiB\."),
        (
            "optim: {name: adamw}\n",
            ["optim.nesterov=true"],
            r"^optim: nesterov=true is for sgd, and name is adamw\. Leave",
        ),
        (
            "train: {seed: 1}\noptim: {lr: 1,\n  nesterov: true}\n",
            [],
            r"job\.yaml:3: optim: nesterov=true is for sgd",
        ),
        (
            "{}",
            ["log.name=../x"],
            r"log\.name: '\.\./x' is not below log\.dir\. Give a name such as",
        ),
        ("{}", ["log.name=a/../../x"], r"is not below log\.dir"),
        ("{}", ["log.name=/x"], r"is not below log\.dir"),
        ("{}", ["log.name=''"], r"is not below log\.dir"),
        ("{}", ["log.name=."], r"is not below log\.dir"),
        (
            "{}",
            [f"log.name={'a' * 300}"],
            r"^log\.name='a+\.\.\.' is no path: it has a name of 300",
        ),
        (
            "{}",
            [f"log.dir={'a/' * 3000}"],
            r"^log\.dir='[a/]+\.\.\.' is no path: it has 6000 bytes",
        ),
        ('log: {name: "a\\0b"}\n', [], r"job\.yaml:1: not valid YAML: it has a NUL"),
        ('log: {name: "a\\ud800"}\n', [], r"job\.yaml:1: not valid YAML: .*half of a character"),
        ("train: {seed: 2020-99-99}\n", [], r"job\.yaml:1: not valid YAML: .* is no timestamp"),
        ("train: {5: 1}\n", [], r"job\.yaml:1: the key 5 is a int, and keys are words"),
        ("train: {null: 1}\n", [], r"job\.yaml:1: the key null is a null, and keys are words"),
        ("strategy: {name: 5}\n", [], r"job\.yaml:1: strategy\.name: 5 names no strategy"),
        ("{}", ["train.seed=!!int x"], r"^train\.seed=!!int x: not a value \('x' is no int\)"),
        ("{}", ["a" + ".a" * 400 + "=1"], r"is not an option"),
        ("{}", ["mesh=1", "mesh.pp=2"], r"mesh is set as a whole, and mesh\.pp in addition"),
        ("{}", ["mesh=null", "mesh.pp=2"], r"mesh is set as a whole, and mesh\.pp in addition"),
        ("{}", ["data.args=1", "data.args.b=2"], r"data\.args is set as a whole"),
        ("train: 5\n", ["train.steps=2"], r"job\.yaml:1: train: needs a mapping of keys"),
        ("optim: [1]\n", [], r"job\.yaml:1: optim: needs a mapping of keys"),
        (
            "{}",
            ["data.args.b=2", "data.args=1"],
            r"data\.args is set as a whole, and data\.args\.b",
        ),
        ("{}", ["mesh.timeout=.inf"], r"mesh\.timeout: needs a finite number .got inf"),
        ("{}", ["memory.cap=[]"], r"^memory\.cap: \[\] is not a size in bytes.*2GiB"),
        ("{}", ["model.chunk_size={a: 1}"], r"^model\.chunk_size: \{'a': 1\} is not a size"),
        ("{}", ["memory.cap=true"], r"memory\.cap: true is not a size"),
        ("{}", ["strategy.replicate=1"], r"strategy\.replicate: needs a mapping .*got 1"),
    ],
)
def test_a_wrong_job_is_refused_with_the_place_and_the_fix(tmp_path, text, overrides, message):
    with pytest.raises(ConfigError, match=message):
        load_job(write(tmp_path, text), overrides=overrides)


KEYS = [
    f"{section}.{key}"
    for section, info in Job.model_fields.items()
    for key in ("", *getattr(info.annotation, "model_fields", ()))
]
WRONG = (
    *("[]", "{}", "[1, 2]", "{a: 1}", "[[]]", "[a: b]", "{name: {}}", "{1: 2}", "''", "'x y'"),
    *("-3", "0", "1.5", ".nan", ".inf", "-1e400", "0x10", "12:30", "9" * 23, "2020-01-01"),
    *("true", "~", "abc", "2GiB", "!!binary aGk="),
)


def test_wrong_values_drawn_by_a_seed_are_a_line_each():
    """Some values are right for some keys; all others must raise ConfigError."""
    drawn, messages = random.Random(0), list[str]()
    for _ in range(200):
        word = f"{drawn.choice(KEYS).rstrip('.')}={drawn.choice(WRONG)}"
        try:
            load_job(overrides=[word])
        except ConfigError as error:
            messages.append(str(error))
    assert len(messages) > 100
    assert all("\n" not in message and len(message) < 300 for message in messages)


def test_a_missing_or_unknown_file_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"job: there is no file 'none.yaml'"):
        load_job("none.yaml")
    with pytest.raises(ConfigError, match=r"job: unknown 'defalt', did you mean 'default'"):
        load_job("defalt")
    with pytest.raises(
        ConfigError,
        match=r"unknown 'zeroo'.*Similar names: zero3, .*`bigtrain strategies`",
    ):
        load_job(strategy="zeroo")
    with pytest.raises(ConfigError, match=r"a strategy file has no key 'modle'"):
        load_job(strategy=write(tmp_path, "modle: {}\n"))
    (tmp_path / "bad.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_yaml(tmp_path / "bad.yaml")


@pytest.mark.parametrize("turned", [False, True])
def test_a_named_strategy_and_its_keys_may_stand_side_by_side(turned):
    words = ["strategy=fsdp", "strategy.recompute=full"]
    words = words[::-1] if turned else words
    for job in (load_job(None, None, words), override_job(load_job(None, "ddp"), words)):
        roles = job.strategy.roles()
        assert (job.strategy.name, roles["replicate"].options["stage"]) == ("fsdp", 3)
        assert roles["recompute"].options == {"mode": "full"}


@pytest.mark.parametrize("turned", [False, True])
def test_a_name_does_not_displace_what_is_said_beside_it(turned):
    words = ["model.args={num_classes: 7}", "model.name=resnet18"]
    job = load_job(None, None, words[::-1] if turned else words)
    assert (job.model.name, job.model.args) == ("resnet18", {"num_classes": 7})
    lengths = ["train.steps=5", "train.epochs=2"]
    with pytest.raises(ConfigError, match="steps=5 and epochs=2.0 both say how long"):
        load_job(None, None, lengths[::-1] if turned else lengths)


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        3,
        1e-5,
        "a b",
        "x;y",
        [0.9, 0.999],
        [],
        ("a.b", "c"),
        {"name": "ddp", "n": [1, 2]},
    ],
)
def test_words_that_are_advised_come_through_a_shell_as_they_were(value):
    word = as_word("data.args.some", value)
    (pasted,) = subprocess.run(
        ["sh", "-c", f"printf '%s\\n' {word}"], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    value_read = parse_overrides([pasted]).values["data"]["args"]["some"]
    expected = list(value) if isinstance(value, tuple) else value
    assert (float(value_read) if isinstance(value, float) else value_read) == expected


def test_keys_below_and_a_mapping_beside_them_are_both_taken():
    for words in (["data.args={a: 1}", "data.args.b=2"], ["data.args.b=2", "data.args={a: 1}"]):
        assert load_job(None, None, words).data.args == {"a": 1, "b": 2}
    again = ["data.args={a: 1}", "data.args={b: 2}"]
    assert load_job(None, None, again).data.args == {"b": 2}


@pytest.mark.parametrize("kind", ["pipe", "folder", "loop", "device"])
def test_a_job_that_is_no_file_is_refused_at_once(tmp_path, kind):
    path = tmp_path / "job.yaml"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero" if kind == "device" else path.name)
    words = "job.yaml cannot be read: .*Give the path of a YAML file"
    for load in (lambda: load_job(str(path)), lambda: load_job(strategy=str(path))):
        with pytest.raises(ConfigError, match=words):
            load()


def test_an_empty_section_says_nothing(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text("train:\noptim: null\nstrategy: single\n")
    job = load_job(str(path), None, ["train.steps=2"])
    assert (job.train.steps, job.optim) == (2, load_job(None, "single").optim.__class__())


@pytest.mark.parametrize(
    ("words", "steps", "epochs"),
    [((), 20, 0.0), (("optim.warmup_epochs=2",), 0, 2.0), (("optim.warmup_steps=3",), 3, 0.0)],
)
def test_a_warm_up_in_other_units_displaces_that_of_the_job(words, steps, epochs):
    optim = load_job(overrides=words).optim
    assert (optim.warmup_steps, optim.warmup_epochs) == (steps, epochs)


def test_the_place_of_a_fault_in_a_section_is_that_of_the_users_own_key(tmp_path):
    words = ["optim.state=bf16"]  # the default job sets `name`, which is right
    with pytest.raises(ConfigError, match=r"^optim: state=bf16 is for name=adamw"):
        load_job(overrides=[*words, "optim.name=adam"])
    config = write(tmp_path, "optim:\n  name: sgd\n  state: bf16\n")
    with pytest.raises(ConfigError, match=r"job.yaml:3: optim: state=bf16 is for name=adamw"):
        load_job(config)
    for key in ("base_batch_size", "warmup_factor"):
        with pytest.raises(ConfigError) as raised:
            load_job(overrides=[f"optim.{key}=0.5", "optim.warmup_steps=0"])
        assert "default.yaml" not in str(raised.value)
    with pytest.raises(ConfigError) as raised:
        load_job(overrides=["optim.name=sgd", "optim.nesterov=true"])
    assert str(raised.value).startswith("optim: nesterov=true needs momentum")
    # The default job sets clip_norm, the user sets the other key
    with pytest.raises(ConfigError) as raised:
        load_job(overrides=["optim.release_gradients=true"])
    assert str(raised.value).startswith("optim: release_gradients=true updates each parameter")


@pytest.mark.parametrize("words", [["digits"], ["digits", "train.steps=3"], ["my/job.yaml"]])
def test_a_job_without_its_option_is_told_how_to_name_it(words):
    with pytest.raises(ConfigError, match=f"{words[0]} is a job. Write --config {words[0]}"):
        load_job(overrides=words)
