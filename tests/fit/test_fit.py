"""`bigtrain fit`: the forecast of a run with its plan, what makes a model fit, and refusals."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from bigtrain import cli
from bigtrain.assembly.make_plan import make_plan
from bigtrain.engine.setup import open_setup
from bigtrain.errors import ConfigError
from bigtrain.fit import command
from bigtrain.fit.methods import Setting, answer, methods
from bigtrain.fit.show import method_report
from bigtrain.fit.subject import Subject, find_subject
from bigtrain.hub import folder as hub_folder
from bigtrain.job.load import load_job
from bigtrain.machine.cluster import load_cluster
from bigtrain.planner.ask import rank_limits
from bigtrain.report.dry_run import predict_ranks

pytest.importorskip("transformers")
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "vocab_size": 64}
SIZES |= {"num_attention_heads": 4, "max_position_embeddings": 64}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **SIZES},
    "bert": {"model_type": "bert", "architectures": ["BertForMaskedLM"], **SIZES},
    "mixtral": {
        "model_type": "mixtral",
        "architectures": ["MixtralForCausalLM"],
        **SIZES,
        "num_key_value_heads": 2,
        "num_local_experts": 4,
    },
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        **SIZES,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
    },
    "vit": {
        "model_type": "vit",
        "architectures": ["ViTForImageClassification"],
        **{k: v for k, v in SIZES.items() if k not in ("vocab_size", "max_position_embeddings")},
        "image_size": 16,
        "patch_size": 8,
    },
    "t5": {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]},
    "unknown": {"model_type": "nonesuch"},
}
SMALL = ("--cluster", "cpu", "--global-batch-size", "4")


class Net(nn.Module):
    """A model by import path."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(48, 16), nn.Linear(16, 10))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.layers(images)


def config(path: Path, kind: str, **fields: Any) -> Path:
    folder = path / kind
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIGS[kind] | fields))
    return folder


def answers(capsys: pytest.CaptureFixture[str], words: Sequence[str], status: int = 0) -> Any:
    assert cli.main(["fit", *words, "--json"]) == status
    document = json.loads(capsys.readouterr().out)
    return {found["method"]: found for found in document["methods"]}


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert cli.main(["fit", *words]) == 2
    said = capsys.readouterr()
    assert not said.out
    lines = said.err.strip().splitlines()
    assert len(lines) == 1, lines
    return lines[0]


@pytest.mark.parametrize("kind", ["llama", "mixtral", "qwen3_moe"])
def test_the_peaks_are_those_of_a_run_with_the_plan(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The planner composes sections; the forecast of a run records the whole model."""
    folder = config(tmp_path, kind)
    found = answers(capsys, [str(folder), *SMALL, "--lora", "4"])
    for name in ("full", "lora"):
        method = found[name]
        assert method["fits"]
        plan = tmp_path / f"{name}.yaml"
        plan.write_text(json.dumps({k: method["plan"][k] for k in ("mesh", "strategy", "train")}))
        words = [f"model.name=hf:{folder}", "model.pretrained=false", "data.name=synthetic"]
        words += ["data.args={kind: language, vocabulary: 64, length: 64}", *method["words"]]
        job = load_job(None, None, words, plan=str(plan))
        (rank,) = predict_ranks(open_setup(job, make_plan(job, 1, "cpu")))
        peak, state = rank.prediction.own_peak, rank.state
        assert peak is not None
        assert state.save is not None
        assert state.resume is not None
        phases = {phase: peaks["device_bytes"] for phase, peaks in method["phases"].items()}
        assert phases["train"] == max(peak.bytes, state.save.bytes)
        assert phases["save"] == state.save.bytes
        assert phases["resume"] == state.resume.bytes
        states = rank.prediction.states
        assert states is not None
        share = states.parameters + states.frozen
        largest = 4 * (4 * 96 * 32 if kind == "mixtral" else 64 * 48 * 4)
        assert share <= phases["load"] <= share + largest + 2**14
        assert (states.frozen > states.parameters) is (name == "lora")
    assert found["lora"]["trained_parameters"] < found["full"]["trained_parameters"]


def setting(memory: str | None = None, *words: str, devices: int = 1) -> Setting:
    """A question for A100s; of their memory 2 GiB are no tensors."""
    cluster = load_cluster("a100-node")
    limit, _ = rank_limits(cluster, memory=memory, cap=None)
    margins = {"torch": 0.005}
    return Setting(cluster, devices, limit, 4, None, margins, tuple(words))


def subject(name: str, length: int | None = None, **args: Any) -> Subject:
    return find_subject(name, length=length, args=args, has_data=False, samples=4)


def test_what_does_not_fit_fits_with_the_words_that_are_named() -> None:
    sizes = ("model.args={num_layers: 3, width: 256, num_heads: 2}",)
    gpt, full = subject("gpt-10m", 8), methods(4)[0]
    tight = setting("2066MiB", *sizes)
    found = answer(gpt, full, tight)
    assert not found.fits
    (said, *fixes) = method_report(gpt, tight, found).lines
    assert re.search(r"full: does not fit. The smallest peak is .*, of which parameters are", said)
    assert len(fixes) == len(found.remedies) > 0
    for remedy in found.remedies:
        option, *number = remedy.words[0].split()
        if option == "--devices":
            again = answer(gpt, full, setting("2066MiB", *sizes, devices=int(number[0])))
        else:
            again = answer(gpt, full, setting("2066MiB", *sizes, *remedy.words))
        assert again.fits, remedy
        assert again.shown is not None
    enough = setting(str(tight.memory.nbytes + found.missing_bytes), *sizes)
    assert answer(gpt, full, enough).fits
    less = setting(str(tight.memory.nbytes + found.missing_bytes - 2**16), *sizes)
    assert not answer(gpt, full, less).fits


def test_what_trains_has_to_resume_as_well(tmp_path: Path) -> None:
    """A resumed run reads the largest tensor in fp32, beside the frozen tensors in bf16."""
    folder = config(tmp_path, "llama", vocab_size=65536, num_hidden_layers=1)
    given, lora = subject(str(folder), 2), methods(2)[1]

    def of_one_row(memory: str | None = None) -> Setting:
        return replace(setting(memory), rows=1)

    enough = answer(given, lora, of_one_row())
    assert enough.fits
    assert enough.highest[0] == "resume"
    assert enough.shown is not None
    between = (enough.highest[1] + enough.shown.peak.bytes) // 2
    tight = of_one_row(str(2**31 + between))
    found = answer(given, lora, tight)
    assert not found.fits
    assert found.missing_bytes > 0
    (said,) = method_report(given, tight, found).lines
    assert re.search(r"does not fit. Training would, but the resume peak is .* would hold it", said)
    assert answer(given, lora, of_one_row(str(2**31 + between + found.missing_bytes))).fits


def test_nothing_fits_is_status_1(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["gpt-10m", "--cluster", "a100-node", "--memory", "2049MiB", "--length", "8"]
    found = answers(capsys, [*words, "--micro-batch-size", "1"], 1)
    assert not found["full"]["fits"]
    assert found["full"]["missing_bytes"] > 0
    assert found["full"]["command"] is None


def test_a_built_in_model_and_ones_own(capsys: pytest.CaptureFixture[str]) -> None:
    own = ["data.name=synthetic", "data.args={input_shape: [3, 4, 4]}"]
    found = answers(capsys, [f"{__name__}:Net", *SMALL, *own])
    assert found["full"]["fits"]
    assert found["full"]["phases"]["train"]["device_bytes"] > 0
    assert subject("lenet").data_words[1].startswith("data.args={kind: classification, input_shap")
    assert "[3,520,520]" in subject("fcn_resnet50").data_words[1]


def test_a_model_of_timm() -> None:
    pytest.importorskip("timm")
    assert "[3,224,224]" in subject("timm:vit_tiny_patch16_224").data_words[1]


def test_notes_say_that_experts_have_no_adapters_and_are_not_in_4_bits(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = config(tmp_path, "mixtral")
    assert cli.main(["fit", str(folder), *SMALL, "--lora", "4"]) == 0
    said = capfd.readouterr()  # of all processes
    notes = [line for line in said.out.splitlines() if line.startswith("model.lora")]
    assert [re.sub("[0-9][0-9.]*", "N", note)[:50] for note in notes] == [
        "model.lora: rank N, alpha N on N layers (q_proj, k",
        "model.lora: N stacked weights of experts (model.la",
        "model.lora.quantize=nfN: Nk weights of N layers in",
    ]
    assert not said.err, "torch logs errors of its fake kernels"


def test_a_fresh_process_is_forked() -> None:
    """This process need not be: libraries of other tests may have started autograd's threads."""
    code = "from bigtrain.fit.command import _can_fork; print(_can_fork())"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "True"


def test_a_process_whose_fork_cannot_run_a_backward_pass_is_not_forked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With a GPU, autograd has a thread for it after its first pass; a fork then refuses."""

    def refuse(*_: Any) -> None:
        raise RuntimeError("Unable to handle autograd's threading in combination with fork")

    monkeypatch.setattr(torch.Tensor, "backward", refuse)
    assert not command._can_fork()


def test_a_process_that_has_used_a_gpu_is_not_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert not command._can_fork()


def test_a_process_that_is_ended_is_reported(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def end(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(command, "usable_cores", lambda: 2)
    monkeypatch.setattr(command, "_can_fork", lambda: True)
    monkeypatch.setattr(command, "answer", end)
    assert cli.main(["fit", "gpt-10m", *SMALL]) == 1
    assert "one of the 2 processes that make plans was ended" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["bert", "vit", "mixtral"])
def test_other_kinds_of_the_hub(kind: str, tmp_path: Path) -> None:
    given = subject(str(config(tmp_path, kind)))
    found = answer(given, methods(4)[0], setting())
    assert found.refused is None
    assert found.fits


def test_only_the_configuration_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    folder, asked = config(tmp_path, "llama"), []

    def snapshot(repository: str, **options: Any) -> str:
        asked.append((repository, options["allow_patterns"]))
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    found = hub_folder.find_folder("owner/name", "fit owner/name", weights=False, config_alone=True)
    assert found.path == folder
    assert asked == [("owner/name", ["config.json"])]


def test_offline_an_id_that_is_not_cached_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ConfigError, match=r"hf download owner/name config\.json; or give the path"):
        hub_folder.find_folder("owner/name", "fit owner/name", weights=False, config_alone=True)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["LLAMA", "--devices", "0"], r"--devices 0: at least 1 is needed. Use --devices 8"),
        (["LLAMA", "--lora", "0"], r"--lora 0: at least 1 is needed. Use --lora 16"),
        (["LLAMA", "--length", "65"], r"--length 65: .* has 64 positions. Use --length 64, or"),
        (["LLAMA", "--devices", "4", "--global-batch-size", "2"], r"Use --global-batch-size 4 or"),
        (["LLAMA", "--cluster", "h100-nod"], r"h100-nod.*h100-node"),
        (["LLAMA", "--engines", "jax"], r"--engines jax: jax is not one of .* Use --engines torch"),
        (["LLAMA", "--memory", "1GiB"], r"--memory \d+ .* is less than a process .* Use --memory"),
        (["LLAMA", "optim.lrr=1"], r"optim.lrr.*optim.lr"),
        (["gpt-20m"], r"fit gpt-20m: there is no such folder or built-in model.* Give a folder"),
        (["EMPTY"], r"has no config.json. Give a folder that save_pretrained"),
        (["UNKNOWN"], r"has no model type 'nonesuch'.* pip install --upgrade transformers"),
        (["T5"], r"the inputs of a T5ForConditionalGeneration are not known here.* data.name="),
        (["a.module:Net"], r"the inputs of your own class are not known. Add the data of its job"),
    ],
)
def test_refusals(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    places = {"LLAMA": "llama", "UNKNOWN": "unknown", "T5": "t5"}
    given = [str(config(tmp_path, places[w])) if w in places else w for w in words]
    given = [str(tmp_path / "empty") if w == "EMPTY" else w for w in given]
    assert re.search(said, refusal(capsys, *given))
