"""Models of the Hub in one process: names, values, folders, and what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from bigtrain.checkpoint.foreign.state_dicts import open_state_dict
from bigtrain.errors import ConfigError
from bigtrain.hub.export import reverted
from bigtrain.hub.saved_files import ORIGIN
from bigtrain.job.schema import ModelConfig
from bigtrain.models.blueprint import Blueprint
from bigtrain.models.spec import ModelSpec
from bigtrain.tensors.shards import Extent, StateTensor, box_extents, copy_saved

pytest.importorskip("transformers")
from support import hub_models  # noqa: E402


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Makes the folder of a family once; tests that change it take a copy."""
    root, made = tmp_path_factory.mktemp("hub"), {}

    def folder(family: str) -> Path:
        if family not in made:
            made[family] = hub_models.save(family, root / family.replace(" ", "_"))
        return made[family]

    return folder


@pytest.fixture
def copied(folders, tmp_path):
    def copy(family: str) -> Path:
        target = tmp_path / family.replace(" ", "_")
        shutil.copytree(folders(family), target)
        return target

    return copy


def described(name: object, classes: int | None = None, **keys: Any) -> Blueprint:
    spec = ModelSpec.of(ModelConfig(name=f"hf:{name}", **keys))
    spec.check()
    return spec.describe(num_classes=classes, sequence_length=None)


def refused(name: object, **keys: Any) -> str:
    """The one line with which a model is refused."""
    with pytest.raises(ConfigError) as said:
        described(name, **keys)
    assert "\n" not in str(said.value)
    return str(said.value)


def logits(blueprint: Blueprint, family: str) -> torch.Tensor:
    model = blueprint.materialize("cpu", seed=0).eval()
    return hub_models.logits_of(model, hub_models.inputs(family))


@pytest.mark.parametrize("family", ["mixtral", "gpt2", hub_models.LEGACY])
def test_values_are_those_that_transformers_opens(family, folders):
    blueprint = described(folders(family))
    model = hub_models.reopened(folders(family), family)
    assert blueprint.deferred
    known = "bert" if family == hub_models.LEGACY else family
    expected = hub_models.logits_of(model, hub_models.inputs(known))
    torch.testing.assert_close(logits(blueprint, known), expected, rtol=0, atol=1e-6)
    buffers = dict(model.named_buffers())
    for name, values in blueprint.model.named_buffers():  # computed, in no file
        assert torch.equal(values, buffers[name]), name


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_parts_of_stacked_experts_are_read_without_the_rest(family, folders):
    blueprint = described(folders(family))
    model = hub_models.reopened(folders(family), family)
    stacked = [n for n, p in model.named_parameters() if p.dim() == 3]
    assert len(stacked) == 4
    for name in stacked:
        whole, saved = model.get_parameter(name).detach(), blueprint.values[name]
        assert saved.read is not None
        shape = tuple(whole.shape)
        for offset, local in (((1, 5, 3), (2, 7, 4)), ((0, 0, 8), (shape[0], shape[1], 8))):
            box = whole
            for dim, (begin, size) in enumerate(zip(offset, local, strict=True)):
                box = box.narrow(dim, begin, size)
            extents = box_extents(shape, offset, local)
            assert torch.equal(saved.read(extents).view(local), box), name
            target = torch.empty(local, dtype=torch.float64)
            copy_saved(saved, target, extents)
            assert torch.equal(target.float(), box), name


def test_a_tensor_is_copied_a_piece_at_a_time(folders, monkeypatch):
    monkeypatch.setattr("bigtrain.tensors.shards.COPIED_BYTES", 96)
    saved = described(folders("llama")).values["lm_head.weight"]
    assert saved.read is not None
    sizes: list[int] = []

    def read(extents: Any) -> torch.Tensor:
        sizes.append(sum(extent.size for extent in extents))
        return inner(extents)

    inner = saved.read
    object.__setattr__(saved, "read", read)
    target = torch.empty(saved.shape)
    copy_saved(saved, target)
    assert torch.equal(target.reshape(-1), inner((Extent(0, target.numel()),)))
    assert max(sizes) == 24


def test_bf16_files_become_fp32_parameters_exactly(tmp_path):
    folder = hub_models.save("llama", tmp_path / "low", dtype=torch.bfloat16)
    blueprint = described(folder)
    assert blueprint.saved_dtypes == ("bf16",)
    model = blueprint.materialize("cpu", seed=0)
    for name, saved in open_state_dict(folder).model.items():
        values = model.get_parameter(name)
        assert values.dtype == torch.float32
        assert torch.equal(values.detach().bfloat16().reshape(-1), saved.values()), name


def test_names_without_the_prefix_of_the_base_model(copied):
    folder = copied("gpt2")  # as the first files on the Hub are
    hub_models.rewrite(folder, lambda tensors: _strip(tensors, "transformer."))
    expected = hub_models.logits_of(hub_models.reopened(folder, "gpt2"), hub_models.inputs("gpt2"))
    torch.testing.assert_close(logits(described(folder), "gpt2"), expected, rtol=0, atol=1e-6)


def _strip(tensors: dict[str, torch.Tensor], prefix: str) -> None:
    for name in list(tensors):
        tensors[name.removeprefix(prefix)] = tensors.pop(name)


def exported_names(folder: Path) -> set[str]:
    """The names that an export of a model that was loaded from a folder gives its tensors."""
    blueprint = described(folder)
    record = json.loads(blueprint.files(torch.float32)[ORIGIN])
    state = blueprint.model.state_dict(keep_vars=True)
    values = {name: StateTensor.of(tensor) for name, tensor in state.items()}
    return set(reverted(blueprint.model, values, record["names"])[0])


def test_an_export_has_the_names_of_the_source_with_and_without_prefix(copied):
    folder = copied("gpt2")
    assert exported_names(folder) == set(hub_models.keys_of(folder))
    hub_models.rewrite(folder, lambda tensors: _strip(tensors, "transformer."))
    names = set(hub_models.keys_of(folder))
    assert "wte.weight" in names
    assert exported_names(folder) == names


def test_an_export_has_both_names_of_a_tied_tensor_if_the_source_had(copied):
    folder = copied("llama tied")
    names = set(hub_models.keys_of(folder))
    assert "lm_head.weight" not in names
    assert exported_names(folder) == names

    def change(tensors: dict[str, torch.Tensor]) -> None:
        if "model.embed_tokens.weight" in tensors:
            tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    hub_models.rewrite(folder, change)
    assert exported_names(folder) == names | {"lm_head.weight"}


def test_a_folder_of_torch_files(copied):
    folder = copied("llama tied")
    state = {n: t.values().view(t.shape) for n, t in open_state_dict(folder).model.items()}
    for path in folder.glob("model*"):
        path.unlink()
    # As torch wrote them: both names of a tied tensor.
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    torch.save(state, folder / "pytorch_model.bin")
    model = described(folder).materialize("cpu", seed=0)
    assert torch.equal(model.lm_head.weight, state["lm_head.weight"])
    state["lm_head.weight"] = state["lm_head.weight"] + 1
    torch.save(state, folder / "pytorch_model.bin")
    said = refused(folder)
    assert "ties lm_head.weight to model.embed_tokens.weight" in said
    model = described(folder, args={"tie_word_embeddings": False}).materialize("cpu", seed=0)
    assert torch.equal(model.lm_head.weight, state["lm_head.weight"])


def test_initial_weights_depend_on_seed_and_name(folders):
    blueprints = [described(folders("mixtral"), pretrained=False) for _ in range(2)]
    assert not blueprints[0].values
    one, other = (blueprint.materialize("cpu", seed=5) for blueprint in blueprints)
    part = described(folders("mixtral"), pretrained=False)
    part.materialize("cpu", seed=5, only=["lm_head.weight"])
    assert torch.equal(part.model.lm_head.weight, one.lm_head.weight)
    for (name, a), b in zip(one.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b), name
    weights = one.model.layers[0].self_attn.q_proj.weight
    assert 0.015 < weights.std() < 0.025  # initializer_range is 0.02
    assert torch.equal(one.model.norm.weight, torch.ones(32))


def test_a_head_for_other_classes_begins_anew_where_that_is_asked_for(folders):
    with pytest.raises(ConfigError) as said:
        described(folders("vit"), classes=7)
    assert "classifier.weight is [2, 32] in the files and [7, 32]" in str(said.value)
    assert "model.pretrained_except=[classifier]" in str(said.value)
    blueprint = described(folders("vit"), classes=7, pretrained_except=("classifier",))
    assert logits(blueprint, "vit").shape == (4, 7)
    assert "classifier.weight" not in blueprint.values
    assert described(folders("vit"), classes=2).values["classifier.weight"].shape == (2, 32)


def test_another_class_takes_the_weights_of_the_same_base(folders):
    said = refused(folders("bert"), args={"architecture": "BertForMaskedLM"})
    assert "no cls.predictions.bias" in said
    blueprint = described(
        folders("bert"),
        args={"architecture": "BertForMaskedLM"},
        pretrained_except=("cls", "classifier", "bert.pooler"),
    )
    assert type(blueprint.model).__name__ == "BertForMaskedLM"
    assert "bert.encoder.layer.0.output.dense.weight" in blueprint.values


def test_weights_of_another_folder(folders, copied):
    folder = copied("llama")
    hub_models.rewrite(folder, lambda tensors: [t.add_(1) for t in tensors.values()])
    model = described(folders("llama"), pretrained=str(folder)).materialize("cpu", seed=0)
    expected = hub_models.reopened(folder, "llama")
    assert torch.equal(model.lm_head.weight, expected.lm_head.weight)
    assert "no file or folder" in refused(folders("llama"), pretrained="/nowhere")


def _drop(name: str) -> Callable[[Path], None]:
    return lambda folder: hub_models.rewrite(folder, lambda tensors: tensors.pop(name, None))


def _add(folder: Path) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        if "lm_head.weight" in tensors:
            tensors["extra.weight"] = torch.ones(2)

    hub_models.rewrite(folder, change)


def _misshape(folder: Path) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        if "lm_head.weight" in tensors:
            tensors["lm_head.weight"] = torch.ones(60, 32)

    hub_models.rewrite(folder, change)


def _config(**fields: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "config.json"
        settings = {**json.loads(path.read_text()), **fields}
        path.write_text(json.dumps({k: v for k, v in settings.items() if v is not None}))

    return change


def _remove(*patterns: str) -> Callable[[Path], None]:
    return lambda folder: [path.unlink() for one in patterns for path in folder.glob(one)]


def _gguf(folder: Path) -> None:
    _remove("*")(folder)
    (folder / "model.Q4_1.gguf").write_bytes(b"GGUF")


def _adapter(folder: Path) -> None:
    _remove("*")(folder)
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "org/base"}')


EXPERT = "model.layers.1.block_sparse_moe.experts.2.w1.weight"
REFUSED: dict[str, tuple[str, Callable[[Path], None], str]] = {
    "no config": ("llama", _remove("config.json"), "has no config.json"),
    "broken config": ("llama", lambda f: (f / "config.json").write_text("{"), "is not readable"),
    "no weights": ("llama", _remove("model*"), "has no weights .*model.pretrained=false"),
    "missing file": ("llama", _remove("model-00002*"), "model-00002-of-0000.* is missing: model"),
    "damaged file": (
        "llama",
        lambda f: next(f.glob("model-00002*")).write_bytes(b"?" * 99),
        "model-00002-of-0000.* is no safetensors file.*Copy the folder again",
    ),
    "missing tensor": (
        "llama",
        _drop("model.layers.1.mlp.up_proj.weight"),
        r"the files have no model.layers.1.mlp.up_proj.weight\. Copy.*except=\[model.layers.1.mlp",
    ),
    "missing expert": ("mixtral", _drop(EXPERT), "model.layers.1.*do not fit together"),
    "spare tensor": ("llama", _add, r"LlamaForCausalLM has no extra.weight.*except=\[extra\]"),
    "other shape": ("llama", _misshape, r"lm_head.weight is \[60, 32\] in the files and \[64, 32"),
    "other sizes": ("llama", _config(hidden_size=16), r"in the files and .* and 2\d more"),
    "quantised": (
        "llama",
        _config(quantization_config={"quant_method": "gptq", "bits": 4}),
        r"is quantised \(gptq\).*dequantize\(\)",
    ),
    "gguf": ("llama", _gguf, "is a GGUF file.*gguf_file='model.Q4_1.gguf'"),
    "adapter": ("llama", _adapter, "is an adapter of org/base.*model.name=hf:org/base"),
    "own code": (
        "llama",
        _config(model_type="mine", auto_map={"AutoModel": "modeling.Mine"}),
        r"brings its own code \(trust_remote_code\), which is never run",
    ),
    "unknown type": ("llama", _config(model_type="lama"), "no model type 'lama', did you mean"),
    "no type": ("llama", _config(model_type=None), "has no model_type.*timm:NAME"),
    "unknown class": (
        "llama",
        _config(architectures=["LlamaForCausalLN"]),
        "has no model 'LlamaForCausalLN', did you mean 'LlamaForCausalLM'",
    ),
    "wrong field": ("llama", _config(hidden_size="wide"), "is not taken by transformers"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_folder_that_cannot_be_trained_is_refused_in_a_line(case, copied):
    family, change, message = REFUSED[case]
    folder = copied(family)
    change(folder)
    with pytest.raises(ConfigError, match=message) as said:
        described(folder)
    assert "\n" not in str(said.value)
    assert str(said.value).startswith(f"model.name=hf:{folder}")


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"args": {"hidden": 3}}, "LlamaConfig has no 'hidden'"),
        ({"args": {"dtype": "bfloat16"}}, "set train.precision"),
        ({"args": {"architecture": "LlamaForCausal"}}, "did you mean 'LlamaForCausalLM'"),
        ({"args": {"architecture": "GPT2LMHeadModel"}}, "is made from a GPT2Config"),
        ({"pretrained_except": ("lm_hed",)}, "have 'lm_hed', did you mean 'lm_head'"),
    ],
)
def test_keys_that_do_not_fit_are_refused_in_a_line(keys, message, folders):
    assert message in refused(folders("llama"), **keys)


def test_paths_and_ids(folders, tmp_path, monkeypatch):
    assert "there is no folder" in refused(tmp_path / "nothing")
    assert "is a file. Give the folder" in refused(folders("llama") / "config.json")
    assert "needs a folder or an id" in refused("")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    said = refused("org/model")
    assert "org/model is not in the cache" in said
    assert "HF_HUB_OFFLINE=1 forbids to fetch it" in said
    assert "hf download org/model" in said


def test_an_id_in_the_cache_is_opened_offline(folders, tmp_path, monkeypatch):
    repository = tmp_path / "models--org--model"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("0" * 40)
    shutil.copytree(folders("llama"), repository / "snapshots" / ("0" * 40))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    blueprint = described("org/model")
    assert "lm_head.weight" in blueprint.values
    assert "tokenizer.json" in blueprint.files(torch.float32)
    assert "org/model is not in the cache" in refused("org/model@v2")


def test_more_tokens_than_the_model_knows_are_refused(folders):
    spec = ModelSpec.of(ModelConfig(name=f"hf:{folders('llama')}"))
    with pytest.raises(ConfigError, match="have 256 different tokens, and .* knows 64"):
        spec.describe(num_classes=256, sequence_length=16)


def test_without_the_library_the_fix_is_named(folders, monkeypatch):
    import builtins
    import importlib

    real = importlib.import_module

    def absent(name: str, *rest: Any) -> Any:
        if name.partition(".")[0] == "transformers":
            raise ModuleNotFoundError(f"No module named {name!r}", name="transformers")
        return real(name, *rest)

    monkeypatch.setattr(importlib, "import_module", absent)
    assert builtins is not None
    assert "not installed. Run: pip install 'bigtrain[hub]'" in refused(folders("llama"))


def test_a_model_of_timm_begins_with_a_file(tmp_path):
    timm = pytest.importorskip("timm")
    torch.manual_seed(1)
    given = timm.create_model("test_vit", num_classes=10)
    torch.save(given.state_dict(), tmp_path / "weights.pth")
    keys = {"name": "timm:test_vit", "pretrained": str(tmp_path / "weights.pth")}
    spec = ModelSpec.of(ModelConfig(**keys))
    assert spec.task == "classification"
    blueprint = spec.describe(num_classes=10, sequence_length=None)
    model = blueprint.materialize("cpu", seed=0)
    for name, values in given.state_dict().items():
        assert torch.equal(model.state_dict()[name], values), name
    for name, message in (
        ("timm:test_vitt", "timm .* has no model 'test_vitt', did you mean"),
        ("timm:test_vit", r"model.args.pretrained=True: .*model.pretrained=FILE"),
    ):
        args = {"pretrained": True} if name.endswith("vit") else {}
        with pytest.raises(ConfigError, match=message):
            ModelSpec.of(ModelConfig(name=name, args=args)).check()
