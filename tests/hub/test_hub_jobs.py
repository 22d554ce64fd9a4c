"""Jobs whose model is one of the Hub: their loss, their lines, and what an export refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bigtrain.assembly.make_plan import make_plan
from bigtrain.checkpoint.command import main
from bigtrain.checkpoint.read import Checkpoint
from bigtrain.checkpoint.save import save_checkpoint
from bigtrain.engine.setup import open_setup
from bigtrain.errors import ConfigError
from bigtrain.hub.export import export_folder
from bigtrain.job.load import load_job
from bigtrain.losses.chunked_cross_entropy import ChunkedCrossEntropy
from bigtrain.losses.loss import CrossEntropy
from bigtrain.ranks.context import RunContext
from bigtrain.tensors.shards import StateTensor

pytest.importorskip("transformers")
from support import hub_models  # noqa: E402

BYTES = 256


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    """Opens the run of a model with a vocabulary of bytes, on a small text."""
    root = tmp_path_factory.mktemp("jobs")
    (root / "text.txt").write_text("a line of text\n" * 400)

    def open_run(family: str, *words: str) -> Any:
        name, config, fields = hub_models.FAMILIES[family]
        hub_models.FAMILIES["bytes"] = (name, config, {**fields, "vocab_size": BYTES})
        folder = root / family
        if not folder.exists():
            hub_models.save("bytes", folder, dtype=torch.bfloat16)
        keys = [f"model.name=hf:{folder}", "data.name=text", f"data.path={root / 'text.txt'}"]
        keys += ["data.args.sequence_length=16", "device=cpu", "memory.predict=false"]
        keys += ["train.steps=2", "train.global_batch_size=4", *words]
        job = load_job(None, "single", keys)
        return open_setup(job, make_plan(job, 1, "cpu"))

    return open_run


def test_a_causal_model_has_its_loss_in_chunks(opened):
    parts = opened("llama")
    loss = parts.workload.loss
    assert isinstance(loss, ChunkedCrossEntropy)
    assert loss.head == "lm_head"
    assert type(opened("llama", "model.chunked_loss=false").workload.loss) is CrossEntropy


def test_logits_that_are_changed_after_the_head_have_no_chunks(opened, monkeypatch):
    name, _, fields = hub_models.FAMILIES["gemma"]
    del name
    fields = {**fields, "final_logit_softcapping": 30.0}
    family = ("Gemma2ForCausalLM", "Gemma2Config", fields)
    monkeypatch.setitem(hub_models.FAMILIES, "gemma2", family)
    assert type(opened("gemma2").workload.loss) is CrossEntropy
    with pytest.raises(ConfigError, match="model.chunked_loss=true: no head was found"):
        opened("gemma2", "model.chunked_loss=true")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "bf16 in the files; parameters, gradients and optimizer state in fp32"),
        (("train.precision=bf16",), "optimizer state in fp32 (masters), computed in bf16"),
        (
            ("train.precision=bf16", "optim.master_weights=false"),
            "parameters and optimizer state in bf16, without fp32 masters",
        ),
        (("model.pretrained=false",), "initial weights; parameters"),
    ],
)
def test_the_dtype_of_the_parameters_is_printed(opened, words, said):
    notes = [note for note in opened("llama", *words).workload.notes if "hf:" in note]
    assert len(notes) == 1
    assert said in notes[0]


def test_an_export_to_a_folder_needs_a_model_of_transformers(tmp_path):
    state = {"model.weight": StateTensor.of(torch.ones(2))}
    meta = {"samples_seen": 0, "world_size": 1, "seed": 0, "random": []}
    step = save_checkpoint(tmp_path / "run", 1, state, meta, RunContext.alone())
    with pytest.raises(ConfigError, match="has no config.json: its model is none of transformers"):
        export_folder(Checkpoint(step), tmp_path / "out", None)
    words = ["export", str(step), str(tmp_path / "out"), "--part", "optimizer"]
    with pytest.raises(ConfigError, match="a folder has the model only, and --part is optimizer"):
        main(words, export_folder=export_folder)
    with pytest.raises(ConfigError, match="has to end in .safetensors or .pt"):
        main(["export", str(step), str(tmp_path / "out.bin")], export_folder=export_folder)
    assert not (tmp_path / "out").exists()
