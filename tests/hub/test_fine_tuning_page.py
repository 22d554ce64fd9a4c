"""The commands and code blocks of the page on fine-tuning run in order, with a small model."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.zygote import forked_cli, interpreter

pytest.importorskip("transformers")
pytest.importorskip("peft")
from support import hub_models  # noqa: E402
from support.tokenizers_made import make_tokenizer  # noqa: E402

from bigtrain import cli  # noqa: E402

PAGE = Path(__file__).parents[2] / "docs" / "fine_tuning.md"
REAL = "HuggingFaceTB/SmolLM2-135M-Instruct"
TOKENS = 300
COUNTED = """
assert "Llama" in type(model).__name__
named = dict(adapted.named_parameters())
assert any("lora_B" in name and bool(p.any()) for name, p in named.items())
"""


def blocks() -> list[tuple[str, str]]:
    """The code blocks of the page with the small model's name, by language."""
    text = PAGE.read_text("utf-8").replace(f"hf:{REAL}", "hf:base").replace(REAL, "base")
    return re.findall(r"```(\w+)\n(.*?)```", text, re.DOTALL)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the small model, the data and the job of the page."""
    root = tmp_path_factory.mktemp("tuning")
    name, config, fields = hub_models.FAMILIES["llama"]
    sizes: dict[str, Any] = {"vocab_size": TOKENS, "max_position_embeddings": 512}
    hub_models.FAMILIES["tuned"] = (name, config, {**fields, **sizes})
    hub_models.save("tuned", root / "base")
    make_tokenizer(root / "base", size=TOKENS)
    (samples,) = [block for language, block in blocks() if language == "json"]
    assert all(json.loads(line)["response"] for line in samples.splitlines())
    (root / "answers.jsonl").write_text(samples * 10)
    (job,) = [block for language, block in blocks() if language == "yaml"]
    (root / "tune.yaml").write_text(job)
    return root


def test_the_check_of_the_page_predicts_a_peak(
    base: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(base)
    monkeypatch.setenv("XDG_CACHE_HOME", str(base / "cache"))
    commands = [
        shlex.split(line)
        for language, block in blocks()
        for line in block.splitlines()
        if language == "bash" and line.startswith("bigtrain check ")
    ]
    (words,) = commands
    assert cli.main(words[1:]) == 0
    assert re.search(r"fsdp on 2 ranks .* below --peak 4GiB", capsys.readouterr().out)
    assert cli.main([*words[1:-1], "1KiB"]) == 1
    assert yaml.safe_load((base / "tune.yaml").read_text())["log"] == {"name": "tuned"}


def test_the_page_runs_as_it_stands(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(base / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    script = ""
    for language, block in blocks():
        if language == "python":
            script += block
        for line in block.splitlines() if language == "bash" else ():
            first, *words = shlex.split(line)
            assert first == "bigtrain"
            done = forked_cli(words, cwd=base)
            assert done.returncode == 0, done.stderr
    run = base / "runs" / "tuned"
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert len([step for step in steps if "loss" in step]) > 2
    assert list(run.rglob("events.out.tfevents*"))
    memory = json.loads((run / "memory.json").read_text())
    assert abs(memory["peak_bytes"] / memory["predicted_peak_bytes"] - 1) < 0.01
    assert (base / "tuned" / "tokenizer.json").exists()
    assert (base / "adapters" / "adapter_config.json").exists()
    (base / "use.py").write_text(f"{script}{COUNTED}", "utf-8")
    command = [interpreter(), "use.py"]
    done = subprocess.run(command, cwd=base, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
