"""`model.lora`: which layers get adapters, and what is refused."""

from __future__ import annotations

import re
import sys
from typing import Any

import pytest
import torch
from torch import nn

from bigtrain.errors import ConfigError
from bigtrain.job.load import load_job
from bigtrain.job.schema import LoraConfig

pytest.importorskip("peft")
from support import hub_models  # noqa: E402

from bigtrain.assembly.make_plan import make_plan  # noqa: E402
from bigtrain.checkpoint.command import main as checkpoint_command  # noqa: E402
from bigtrain.checkpoint.save import save_checkpoint  # noqa: E402
from bigtrain.engine.setup import frozen_notes  # noqa: E402
from bigtrain.hub.adapter_files import (  # noqa: E402
    RECORD,
    AdapterRecord,
    peft_settings,
    with_adapter_files,
)
from bigtrain.hub.export import export_folder, merged_checkpoint  # noqa: E402
from bigtrain.hub.lora import adapters_of, attach, name_without_adapter  # noqa: E402
from bigtrain.models.blueprint import describe  # noqa: E402
from bigtrain.models.spec import ModelSpec  # noqa: E402
from bigtrain.ranks.context import RunContext  # noqa: E402
from bigtrain.tensors.shards import StateTensor  # noqa: E402


class Net(nn.Module):
    def __init__(self, *, tied: bool = False, sparse: bool = False) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 8, sparse=sparse)
        self.first = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8))
        self.attention = nn.MultiheadAttention(8, 2)
        self.conv = nn.Conv1d(8, 8, 1)
        self.head = nn.Linear(8, 8, bias=False)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.first(self.table(x)))
        return out


def section(**keys: Any) -> LoraConfig:
    return LoraConfig.model_validate({"rank": 2, **keys})


def adapted(model: nn.Module, **keys: Any) -> tuple[str, ...]:
    adapters = adapters_of(attach(model, section(**keys)))
    assert adapters is not None
    return adapters.targets


@pytest.mark.parametrize(
    ("targets", "names"),
    [
        (["all-linear"], ["first.0", "first.2"]),
        (["table"], ["table"]),
        (["first.*"], ["first.0", "first.2"]),
        (["first.[01]", "head"], ["first.0", "head"]),
        (["all-linear", "table"], ["table", "first.0", "first.2"]),
    ],
)
def test_the_layers_that_a_pattern_names(targets, names):
    assert list(adapted(Net(), targets=targets)) == names


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral", "bert", "t5", "vit"])
def test_all_linear_leaves_the_head_out(family):
    model = hub_models.make(family)
    names = adapted(model)
    assert names
    head = {"bert": "classifier", "vit": "classifier"}.get(family, "lm_head")
    assert head not in names
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained
    assert all(".lora_" in name for name in trained)


def test_only_adapters_and_named_modules_are_trained():
    model = attach(Net(), section(targets=["first.0"], modules_to_save=["head"], alpha=6))
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert trained == [
        "first.0.lora_A.default.weight",
        "first.0.lora_B.default.weight",
        "head.weight",
    ]
    assert adapters_of(model).scale == 3


def test_alpha_is_twice_the_rank():
    assert adapters_of(attach(Net(), section(rank=5))).scale == 2


def test_the_other_values_are_those_without_adapters():
    plain = describe(Net).materialize("cpu", seed=3)
    blueprint = describe(
        lambda: attach(Net(), section(targets=["first.*", "table"])), name_without_adapter
    )
    assert blueprint.deferred, blueprint.reason
    model = blueprint.materialize("cpu", seed=3)
    values = dict(plain.named_parameters())
    for name, parameter in model.named_parameters():
        if "lora_" not in name:
            assert torch.equal(parameter, values[name_without_adapter(name)]), name
    assert model.first[0].lora_A.default.weight.abs().sum() > 0
    assert not model.first[0].lora_B.default.weight.any()


REFUSED = [
    ({"targets": ["firrst"]}, {}, "no module of Net fits it, did you mean 'first'"),
    ({"targets": ["conv"]}, {}, "conv is a Conv1d, and adapters are for Linear, Embedding"),
    ({"targets": ["first"]}, {}, "first is a Sequential.*Use 0"),
    ({"targets": ["out_proj"]}, {}, "MultiheadAttention reads the weight of attention.out_proj"),
    ({"targets": ["table"]}, {"tied": True}, "the weight of table is also head.weight"),
    ({"targets": ["head"]}, {"tied": True}, "the weight of head is also table.weight"),
    ({"targets": ["table"]}, {"sparse": True}, "table is an Embedding with sparse=True"),
    ({"modules_to_save": ["heat"]}, {}, "modules_to_save.*no module.*did you mean 'head'"),
    ({"targets": ["head"], "modules_to_save": ["head"]}, {}, "trains head itself"),
    ({"modules_to_save": ["head"]}, {"tied": True}, "modules_to_save=head: the weight of head is"),
]


@pytest.mark.parametrize(("keys", "net", "message"), REFUSED)
def test_names_that_do_not_fit_the_model_are_refused(keys, net, message):
    made = []

    def make() -> nn.Module:
        made.append(Net(**net))
        return attach(made[-1], section(**keys))

    with pytest.raises(ConfigError, match=message):
        describe(make)
    assert len(made) == 1  # it is not constructed on the CPU once more


def test_a_model_without_linear_layers_is_refused():
    with pytest.raises(ConfigError, match="all-linear: Sequential has no linear layer"):
        attach(nn.Sequential(nn.Conv2d(3, 3, 1), nn.Linear(3, 3)), section())


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("model.lora.rank=0", r"model\.lora\.rank"),
        ("model.lora.rank=2.5", r"model\.lora\.rank"),
        ("model.lora={rank: 2, dropout: 1.0}", r"model\.lora\.dropout"),
        ("model.lora={rank: 2, dropout: -0.1}", r"model\.lora\.dropout"),
        ("model.lora={rank: 2, alpha: 0}", r"model\.lora\.alpha"),
        ("model.lora={alpha: 2}", r"model\.lora\.rank is missing\. Add model\.lora\.rank="),
        ("model.lora={rank: 2, targets: []}", r"model\.lora\.targets.*all-linear"),
        ("model.lora={rank: 2, target: q_proj}", r"unknown key model\.lora\.target.*targets"),
    ],
)
def test_wrong_values_are_refused(word, message):
    with pytest.raises(ConfigError, match=message):
        load_job("default", "ddp", [word])


def test_words_of_the_command_line():
    job = load_job("default", "ddp", ["model.lora.rank=4", "model.lora.targets=[qkv, output]"])
    assert job.model.lora == section(rank=4, targets=["qkv", "output"])


def test_freezing_and_adapters_exclude_each_other():
    with pytest.raises(ConfigError, match=r"freeze=\[head\].*Leave model.freeze out"):
        load_job("default", "ddp", ["model.lora.rank=4", "model.freeze=[head]"])


def test_without_peft_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ConfigError, match=r"model\.lora\.rank=2.*pip install 'bigtrain\[hub\]'"):
        attach(Net(), section())


def saved(folder: Any, model: nn.Module) -> Any:
    state = {f"model.{n}": StateTensor.of(t) for n, t in model.state_dict().items()}
    files = with_adapter_files(model, {})
    return save_checkpoint(folder, 1, state, {"samples_seen": 0}, RunContext.alone(), texts=files)


def test_a_file_has_the_merged_weights(tmp_path, capsys):
    model = attach(Net(), section(targets=["first.0", "table"], alpha=4))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_()
    step = saved(tmp_path, model)
    ids = torch.arange(8)
    expected = model(ids)
    given = [str(step), str(tmp_path / "whole.safetensors"), "--merge"]
    assert checkpoint_command(["export", *given], export_folder, merged_checkpoint) == 0
    from safetensors.torch import load_file

    plain = Net()
    plain.load_state_dict(load_file(tmp_path / "whole.safetensors"))
    torch.testing.assert_close(plain(ids), expected, rtol=1e-5, atol=1e-6)
    assert "whole.safetensors" in capsys.readouterr().out


def test_a_checkpoint_without_adapters_is_not_merged(tmp_path):
    step = saved(tmp_path, Net())
    given = ["export", str(step), str(tmp_path / "whole.safetensors"), "--merge"]
    with pytest.raises(ConfigError, match="has no adapters .*Leave --merge out"):
        checkpoint_command(given, export_folder, merged_checkpoint)


def test_optimizer_state_is_not_merged(tmp_path):
    step = saved(tmp_path, attach(Net(), section()))
    given = ["export", str(step), str(tmp_path / "a.pt"), "--merge", "--part", "optimizer"]
    with pytest.raises(ConfigError, match="--merge is for --part model"):
        checkpoint_command(given, export_folder, merged_checkpoint)


@pytest.mark.parametrize("text", ["[]", "{}", '{"format": 9}', "no json"])
def test_a_damaged_record_is_refused(tmp_path, text):
    (tmp_path / RECORD).write_text(text)
    with pytest.raises(ConfigError, match=f"{RECORD} is not readable"):
        AdapterRecord.read(tmp_path)


def test_the_settings_name_ends_of_names_if_they_mean_the_same_layers():
    def named(**keys: Any) -> Any:
        adapters = adapters_of(attach(hub_models.make("llama"), section(**keys)))
        return peft_settings(adapters)["target_modules"]

    assert named(targets=["q_proj", "v_proj"]) == ["q_proj", "v_proj"]
    assert named(targets=["layers.0.*.q_proj"]) == ["model.layers.0.self_attn.q_proj"]


def notes_of(word: str, *words: str, strategy: str = "single") -> str:
    job = load_job("default", strategy, [word, *words])
    plan = make_plan(job, 1, "cpu")
    blueprint = ModelSpec.of(job.model).describe(num_classes=None, sequence_length=None)
    return "\n".join(frozen_notes(job, plan, blueprint))


def test_a_run_says_what_is_trained_and_what_frozen_parameters_need():
    small = "model.args={num_layers: 2, width: 32, num_heads: 2}"
    said = notes_of("model.lora.rank=4", small)
    assert "model.lora: rank 4, alpha 8 on 8 layers (qkv, output, expand); 4.1k trained" in said
    assert re.search(
        r"frozen parameters: 37\.8k, 14\d\.\d KiB in fp32 before they are sharded", said
    )
    low = notes_of("model.lora.rank=4", small, "train.precision=bf16")
    assert "in bf16 and fp32 before" in low  # autocast uses embeddings and norms in fp32
    low = notes_of("model.freeze=[blocks.0]", small, "train.precision=bf16", strategy="fsdp")
    assert " in bf16 before" in low
    assert "model.lora" not in low
    assert notes_of(small) == ""


def test_a_run_says_that_stacked_experts_get_no_adapter(tmp_path):
    folder = hub_models.save("mixtral", tmp_path / "mixtral")
    said = notes_of(f"model.name=hf:{folder}", "model.lora.rank=2")
    assert "stacked weights of experts (model.layers.0.mlp.experts.gate_up_proj, ...)" in said


def test_dropout_is_before_the_adapter():
    model = attach(Net(), section(targets=["first.0"], dropout=0.25))
    dropped = [module.p for module in model.first.modules() if isinstance(module, nn.Dropout)]
    assert dropped == [0.25]
