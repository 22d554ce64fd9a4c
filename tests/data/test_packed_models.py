"""Documents packed into one window give a model what each gives alone: losses and gradients."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tokenizers_made import make_tokenizer, write_lines
from torch import Tensor, nn
from torch.utils.data import default_collate

from bigtrain.data import open_data
from bigtrain.data.source import Data
from bigtrain.data.tokens.windows import IGNORED_TARGET
from bigtrain.errors import ConfigError
from bigtrain.losses.loss import CrossEntropy
from bigtrain.models.gpt import GPT, GPTConfig

transformers = pytest.importorskip("transformers")
for model_class in ("LlamaForCausalLM", "GPT2LMHeadModel"):
    getattr(transformers, model_class)  # imported here: it takes seconds the first time

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 300,
}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64, "vocab_size": 300}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
SLIDING = ["sliding_attention"] * 2


def of(family: str, **changes: Any) -> nn.Module:
    config = getattr(transformers, f"{family}Config")
    head = "LMHeadModel" if family == "GPT2" else "ForCausalLM"
    sizes = dict(GPT2) if family == "GPT2" else dict(SIZES)
    made = config(**{**sizes, **changes})
    made.use_cache = False
    torch.manual_seed(0)
    return getattr(transformers, family + head)(made).eval()


def own_gpt() -> nn.Module:
    torch.manual_seed(0)
    return GPT(GPTConfig(vocab_size=300, num_layers=2, width=32, num_heads=2)).eval()


CAUSAL: dict[str, Callable[[], nn.Module]] = {
    "llama": lambda: of("Llama"),
    "gpt": own_gpt,
    "gpt2": lambda: of("GPT2"),
    "mistral, short window": lambda: of("Mistral", sliding_window=3),
    "mistral, long window": lambda: of("Mistral", sliding_window=32),
    "qwen2": lambda: of("Qwen2"),
    "qwen3": lambda: of("Qwen3", head_dim=16),
    "gemma": lambda: of("Gemma", head_dim=16),
    "mixtral": lambda: of("Mixtral", **EXPERTS),
}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def records() -> list[dict[str, str]]:
    return [{"prompt": "p" * (1 + n % 4), "response": "rst"[: n % 3] + "one"} for n in range(11)]


def opened(folder: Path, tokenizer: str, **args: Any) -> Data:
    path = write_lines(folder / "data.jsonl", records())
    args = {"tokenizer": tokenizer, "validation_fraction": 0, "sequence_length": 24, **args}
    return open_data("text", str(path), args, seed=0)


def loss_and_gradients(model: nn.Module, batches: list[tuple[Any, Tensor]]) -> dict[str, Tensor]:
    """The sums over batches."""
    model.zero_grad()
    total = torch.zeros((), dtype=torch.float64)
    for inputs, targets in batches:
        output = model(**inputs) if isinstance(inputs, dict) else model(inputs)
        loss = CrossEntropy()(output, targets)
        loss.backward()
        total += loss.detach()
    return {"loss": total, **{n: p.grad for n, p in model.named_parameters() if p.grad is not None}}


def alone(data: Data) -> list[tuple[Tensor, Tensor]]:
    """Every document as a batch of its own, without padding."""
    found = []
    for index in range(len(data.train)):
        inputs, targets = data.train.with_masks("none")[index]
        size = int(data.train.pieces.sizes[index])
        found.append((inputs[None, :size], targets[None, :size]))
    return found


IN_FLOAT32 = ("gemma", "mixtral")
"""Gemma's norms are in float32 whatever the weights are; grouped products have no float64."""


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        *((family, torch.float64) for family in CAUSAL if family not in IN_FLOAT32),
        *((family, torch.float32) for family in ("llama", "gpt2", *IN_FLOAT32)),
    ],
)
def test_a_packed_loss_is_the_sum_over_documents(tmp_path, tokenizer, family, dtype):
    model = CAUSAL[family]().to(dtype)
    each = opened(tmp_path, tokenizer)
    expected = loss_and_gradients(model, alone(each))
    data = opened(tmp_path, tokenizer, packing=True)
    data = data.for_model(model)
    windows = [data.train[n] for n in range(len(data.train))]
    assert len(windows) < len(each.train) / 2
    assert sum(int((targets != IGNORED_TARGET).sum()) for _, targets in windows) == sum(
        int((targets != IGNORED_TARGET).sum()) for _, targets in alone(each)
    )
    found = loss_and_gradients(model, [default_collate(windows)])
    assert found.keys() == expected.keys()
    near = {torch.float64: 1e-12, torch.float32: 1e-6}[dtype]
    for name, value in expected.items():
        scale = max(float(value.abs().max()), 1e-3)
        assert float((found[name] - value).abs().max()) <= 10 * near * scale, name
    assert float(found["loss"]) == pytest.approx(float(expected["loss"]), rel=near)


def test_without_the_mask_it_leaks(tmp_path, tokenizer):
    """The comparison can fail: without the mask, and without the positions, the loss is another."""
    model = CAUSAL["llama"]().double()
    data = opened(tmp_path, tokenizer, packing=True).for_model(model)
    inputs, targets = default_collate([data.train[n] for n in range(len(data.train))])
    right = float(loss_and_gradients(model, [(inputs, targets)])["loss"])
    causal = torch.ones(24, 24, dtype=torch.bool).tril()
    for name, wrong in (("attention_mask", causal.expand(len(targets), 1, 24, 24)),):
        leaking = float(loss_and_gradients(model, [({**inputs, name: wrong}, targets)])["loss"])
        assert abs(leaking / right - 1) > 1e-4
    gpt2 = CAUSAL["gpt2"]().double()
    right = float(loss_and_gradients(gpt2, [(inputs, targets)])["loss"])
    through = {**inputs, "position_ids": torch.arange(24).expand(len(targets), 24)}
    assert abs(float(loss_and_gradients(gpt2, [(through, targets)])["loss"]) / right - 1) > 1e-4


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt"])
def test_padding_changes_nothing_and_needs_no_mask(tmp_path, tokenizer, family):
    model = CAUSAL[family]().double()
    data = opened(tmp_path, tokenizer).for_model(model)
    batch = default_collate([data.train[n] for n in range(len(data.train))])
    assert isinstance(batch[0], Tensor)
    found, expected = (loss_and_gradients(model, part) for part in ([batch], alone(data)))
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.allclose(found[name], value, rtol=1e-11, atol=1e-11), name


def test_a_model_that_sees_both_sides_gets_a_mask_of_padding(tmp_path, tokenizer):
    sizes = {key: value for key, value in SIZES.items() if key != "num_key_value_heads"}
    torch.manual_seed(0)
    model = transformers.BertLMHeadModel(transformers.BertConfig(**sizes)).eval().double()
    data = opened(tmp_path, tokenizer).for_model(model)
    batch = default_collate([data.train[n] for n in range(len(data.train))])
    assert batch[0]["attention_mask"].dtype == torch.int64
    found, expected = (loss_and_gradients(model, part) for part in ([batch], alone(data)))
    assert float(found["loss"]) == pytest.approx(float(expected["loss"]), rel=1e-12)


class OwnModel(nn.Module):
    """A user's model, with a parameter for each input."""

    def __init__(self, rows: int = 300) -> None:
        super().__init__()
        self.embedding = nn.Embedding(rows, 8)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor) -> Tensor:
        del attention_mask, position_ids
        return self.embedding(input_ids)


class WithoutMask(OwnModel):
    def forward(self, input_ids: Tensor) -> Tensor:  # type: ignore[override]
        return self.embedding(input_ids)


def mamba() -> nn.Module:
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "state_size": 4, "vocab_size": 300}
    return transformers.MambaForCausalLM(transformers.MambaConfig(**sizes))


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "no mask": (WithoutMask, r"WithoutMask does not take attention_mask and position_ids, which"),
    "state space": (mamba, r"MambaForCausalLM does not take position_ids, which keep them apart"),
    "eager": (
        lambda: of("Llama", attn_implementation="eager"),
        r"LlamaForCausalLM takes with the attention 'sdpa', and it has 'eager'\. Set its attn_imp",
    ),
    "two masks": (
        lambda: of(
            "Qwen2",
            layer_types=["full_attention", "sliding_attention"],
            sliding_window=4,
            use_sliding_window=True,
        ),
        r"one mask, and those of Qwen2ForCausalLM need two: its sliding window of 4 tokens is "
        r"shorter than the 24 of a sample\. Set data\.args\.sequence_length=4 or",
    ),
    "linear attention": (
        lambda: of("Qwen3Next", layer_types=["linear_attention", "full_attention"], head_dim=16),
        r"Qwen3NextForCausalLM has linear_attention, which would carry one document into the next",
    ),
    "both sides": (
        lambda: transformers.BertLMHeadModel(
            transformers.BertConfig(
                **{key: value for key, value in SIZES.items() if key != "num_key_value_heads"}
            )
        ),
        r"BertLMHeadModel has layers that are no causal attention",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_packing_is_refused_where_documents_would_mix(tmp_path, tokenizer, case):
    make, message = REFUSED[case]
    data = opened(tmp_path, tokenizer, packing=True)
    with pytest.raises(ConfigError, match=message) as caught:
        data.for_model(make())
    assert "\n" not in str(caught.value)
    assert "data.args.packing=false" in str(caught.value)


def test_sizes_that_a_model_has_not_are_refused(tmp_path, tokenizer):
    data = opened(tmp_path, tokenizer, packing=True)
    assert isinstance(data.for_model(OwnModel()).train[0][0], dict)
    few = of("Llama", vocab_size=100)
    message = r"tokenizer: it has \d+ tokens, and LlamaForCausalLM has 100\. Use the model's own"
    with pytest.raises(ConfigError, match=message):
        data.for_model(few)
    short = of("GPT2", n_positions=16)
    message = r"sequence_length=24 is more than the 16 positions of GPT2LMHeadModel\. Set .*=16 or"
    with pytest.raises(ConfigError, match=message):
        data.for_model(short)
