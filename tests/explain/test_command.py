"""`bigtrain explain` as a user runs it, with small models."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.zygote import forked_cli

from bigtrain import cli
from bigtrain.assembly.make_plan import make_plan
from bigtrain.engine.setup import open_setup
from bigtrain.job.arguments import train_arguments
from bigtrain.job.load import load_job
from bigtrain.report.dry_run import fullest_rank, predict_ranks

pytest.importorskip("transformers")
pytest.importorskip("peft")
from support import hub_models  # noqa: E402

DEEPSPEED = """{
  "train_micro_batch_size_per_gpu": 2,
  "gradient_accumulation_steps": 2,
  "gradient_clipping": 1.0,
  "optimizer": {"type": "AdamW", "params": {"lr": 3e-4}},
  "zero_optimization": {
    "stage": 2,
    "reduce_bucket_size": 5e4,
    "allgather_bucket_size": 5e4,
    "stage3_max_live_parameters": 1e9
  },
  "steps_per_print": 100
}
"""
AXOLOTL: dict[str, Any] = {
    "base_model": "./base",
    "adapter": "lora",
    "lora_r": 4,
    "lora_alpha": 8,
    "lora_target_modules": ["q_proj", "value_proj"],
    "sequence_len": 32,
    "micro_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "bf16": True,
    "fp16": True,
    "flash_attention": True,
    "sample_packing": True,
    "gradient_checkpointing": True,
    "optimizer": "adamw_bnb_8bit",
    "learning_rate": "2e-4",
    "deepspeed": "zero3.json",
    "wandb_project": "mine",
}
TRL = {
    "model_name_or_path": "./base",
    "per_device_train_batch_size": 2,
    "max_length": 32,
    "accelerate_config": "accelerate.yaml",
}
ACCELERATE = {
    "distributed_type": "FSDP",
    "fsdp_config": {
        "fsdp_version": 2,
        "fsdp_transformer_layer_cls_to_wrap": "BertLayer",
        "fsdp_reshard_after_forward": False,
    },
    "mixed_precision": "bf16",
    "num_processes": 2,
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("explained")
    hub_models.save("llama", root / "base")
    (root / "ds.json").write_text(DEEPSPEED)
    zero3 = {"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": "auto"}
    (root / "zero3.json").write_text(json.dumps(zero3))
    for name, values in (("axolotl", AXOLOTL), ("trl", TRL), ("accelerate", ACCELERATE)):
        (root / f"{name}.yaml").write_text(yaml.safe_dump(values, sort_keys=False))
    (root / "text.txt").write_text("w1 w2 w3 w4 " * 400)
    return root


@pytest.fixture(autouse=True)
def here(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(files)
    monkeypatch.setenv("XDG_CACHE_HOME", str(files / "cache"))


def explained(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert cli.main(["explain", *words, "--json"]) == 0
    text = capsys.readouterr().out
    return json.loads(text[text.index("{") :])


def job_of(command: str, *more: str) -> tuple[Any, int]:
    """The job and the ranks of a command that was printed, with the test's data."""
    words = shlex.split(command.replace("DATA.jsonl", "text.txt"))
    at = words.index("bigtrain/train.py")
    options = train_arguments([*words[at + 1 :], *more])
    job = load_job(options.config, options.strategy, options.overrides)
    return job, int(words[at - 1]) if words[at - 1].isdigit() else 1


def test_a_deepspeed_file_is_forecast_as_the_run_of_its_words(capsys):
    found = explained(capsys, "ds.json", "base", "--devices", "2", "--cluster", "cpu")
    assert (found["tool"], found["asks"]["strategy"], found["ranks"]) == ("DeepSpeed", "zero2", 2)
    assert found["asks"]["train.global_batch_size"] == 8
    assert found["asks"]["train.precision"] == "fp32"
    forecast = found["forecast"]
    assert forecast["peak_bytes"] == sum(forecast["breakdown"].values())
    assert forecast["step_seconds"] > 0
    assert found["fits"] is True
    (silent,) = [f for f in found["findings"] if f["kind"] == "no effect"]
    assert [key["key"] for key in silent["keys"]] == [
        "zero_optimization.stage3_max_live_parameters"
    ]
    assert silent["keys"][0]["line"] == 10
    assert found["no_influence"] == ["steps_per_print"]
    # The words run the file itself, and their forecast is the one that was shown.
    assert "strategy.deepspeed=ds.json" in forecast["command"]
    job, ranks = job_of(forecast["command"], "model.pretrained=false", "device=cpu")
    assert ranks == 2
    setup = open_setup(job, make_plan(job, ranks, "cpu"))
    fullest = fullest_rank(setup, predict_ranks(setup))
    assert fullest is not None
    assert fullest.peak.bytes == forecast["peak_bytes"]
    better = found["better"]
    if better is None:
        assert "no plan on these devices is faster" in found["reason"]
        return
    job, ranks = job_of(better["command"], "device=cpu")
    plan = make_plan(job, ranks, "cpu")
    assert plan.batch.global_size == 8
    assert better["step_seconds"] <= forecast["step_seconds"]


def test_adapters_of_axolotl_are_compared_with_the_layers(capsys):
    words = ["axolotl.yaml", "--devices", "2", "--cluster", "a100-node"]
    assert cli.main(["explain", *words]) == 0
    said = capsys.readouterr().out
    assert re.search(r"^axolotl.yaml \(axolotl\) with hf:./base \(LlamaForCausalLM, ", said)
    assert re.search(r"strategy +zero3\+full +line \d+ deepspeed; line \d+ gradient_chec", said)
    assert re.search(r"batch +2 x 2 steps x 2 ranks = 8 ", said)
    assert "adapters    rank 4, alpha 8, dropout 0, targets [q_proj]" in said
    line = next(line for line in said.splitlines() if "value_proj" in line)
    assert "LlamaForCausalLM has no layer value_proj. Its layers are" in line
    assert "bf16=true, fp16=true: there is one precision" in said
    assert "it is forecast with optim.name=adamw" in said
    assert "no influence on the memory or the seconds of a step\n  wandb_project" in said
    assert re.search(r"^peak of a rank +\d.* [KM]iB +\d.* [KM]iB$", said, re.MULTILINE)
    assert "\nthe file's plan in words:\ndeepspeed --num_gpus 2 bigtrain/train.py --strat" in said
    job, _ = job_of(said.splitlines()[said.splitlines().index("the file's plan in words:") + 1])
    assert job.model.lora is not None
    assert job.model.lora.targets == ("q_proj",)


def test_layers_that_fsdp_wraps_are_compared_with_the_model(capsys):
    found = explained(capsys, "trl.yaml", "--cluster", "a100-node")
    assert (found["tool"], found["ranks"]) == ("TRL", 2)
    assert found["asks"]["strategy"] == "fsdp_zero2+full"
    (wrong,) = [f for f in found["findings"] if f["kind"] == "contradiction"]
    assert wrong["reason"].startswith("LlamaForCausalLM has no layer of class BertLayer")
    assert wrong["fix"] == "Write LlamaDecoderLayer."
    assert wrong["keys"][0]["path"] == "accelerate.yaml"
    assert found["forecast"]["peak_bytes"] > 0


def test_a_built_in_model_and_keys_of_the_user(capsys):
    args = "model.args={num_layers: 2, width: 32, num_heads: 2, sequence_length: 16}"
    words = ["accelerate.yaml", "gpt", "--cluster", "a100-node", "--memory", "2.001GiB", args]
    found = explained(capsys, *words, "train.micro_batch_size=4")
    assert found["model"] == "gpt"
    assert found["asks"]["train.global_batch_size"] == 8
    assert found["asks"]["data.args.sequence_length"] == 16
    assert found["limit_bytes"] < 2 * 2**20
    (batch,) = [part for part in found["sources"] if part["part"] == "batch"]
    assert "the command line" in batch["source"]


def test_the_words_of_a_deepspeed_file_train_within_its_forecast(files, capsys):
    """Two ranks run the file, and predict the peak that was shown."""
    found = explained(capsys, "ds.json", "base", "--devices", "2", "--cluster", "cpu")
    words = shlex.split(found["forecast"]["command"].replace("DATA.jsonl", "text.txt"))
    at = words.index("bigtrain/train.py")
    more = ["train.steps=3", "log.name=mine", "train.eval_every=0"]
    done = forked_cli(["train", "-n", "2", *words[at + 1 :], *more], cwd=files)
    assert done.returncode == 0, done.stderr
    memory = json.loads((files / "runs" / "mine" / "memory.json").read_text())
    assert memory["predicted_peak_bytes"] == found["forecast"]["peak_bytes"]
    # DeepSpeed fills buckets that are larger than the model only in part.
    assert 0.9 < memory["peak_bytes"] / found["forecast"]["peak_bytes"] < 1.01


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["ds.json", "-n", "2"],
            "MODEL: ds.json names no model. Write it after the file: a folder",
        ),
        (["ds.json", "base"], "ds.json does not say on how many devices it runs. Add --devices N"),
        (["ds.json", "./none", "--devices", "2"], "MODEL: there is no folder ./none. Give a "),
        (["ds.json", "gpt3", "--devices", "2"], "gpt3"),
        (["ds.json", "no.module:Net", "--devices", "2"], "no.module"),
        (["none.json", "base"], "FILE: there is no file none.json"),
        (["text.txt", "base"], "FILE: text.txt has a str without keys"),
        ([], "there is no file. Write bigtrain explain FILE MODEL"),
        (["ds.json", "base", "--devices", "0"], "--devices 0: at least 1 is needed"),
        (["ds.json", "base", "--cluster", "cpu", "--devices", "8"], "one node of 2 devices. Add "),
        (["ds.json", "base", "--devices", "2", "--cluster", "h200"], "did you mean 'h200-node'?"),
        (["ds.json", "base", "--device", "2"], "there is no option --device"),
        (["ds.json", "base", "-n", "2", "strategy=ddp"], "the file names the strategy. Leave it"),
        (["ds.json", "base", "-n", "2", "train.batch=3"], "train.batch"),
        (
            ["ds.json", "base", "-n", "2", "train.global_batch_size=7"],
            "train.global_batch_size=7 is not micro-batch 2 x accumulation 1 x 2 ranks. Use ",
        ),
        (
            ["ds.json", "lenet", "-n", "2", "--cluster", "a100-node", "--memory", "1KiB"],
            "is less than a process on a100-node takes without any tensor",
        ),
    ],
)
def test_wrong_input_is_refused_in_a_line(capsys, words, said):
    try:
        status = cli.main(["explain", *words])
    except SystemExit as error:  # of the reader of options
        status = int(str(error.code))
    assert status == 2
    errors = capsys.readouterr().err
    assert said in errors, errors
    assert "Traceback" not in errors
