"""The jobs that use a chunked loss, and the head that it is applied to."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import hub_models
from support.nets import TinyConv, TinyLM, tokens
from torch import nn

from bigtrain.data import MicroBatch
from bigtrain.engine.run_loss.choose_loss import check_chunks, choose_loss, find_head
from bigtrain.errors import ConfigError
from bigtrain.job.load import job_from_keys
from bigtrain.job.schema import ModelConfig
from bigtrain.losses.chunked_cross_entropy import ChunkedCrossEntropy
from bigtrain.losses.loss import CrossEntropy, MeanLoss
from bigtrain.losses.tasks import (
    ClassificationTask,
    CustomTask,
    LanguageTask,
    SegmentationTask,
)
from bigtrain.models import make_model
from bigtrain.models.spec import ModelSpec


def spec_of(**keys: Any) -> ModelSpec:
    """The model of a job with these keys in its `model` section."""
    return ModelSpec.of(ModelConfig(**keys))


def batch() -> MicroBatch:
    samples = tokens(4)
    return MicroBatch(samples.inputs, samples.targets, 10, 4)


def large(vocabulary: int = 50257, *, tied: bool = True) -> nn.Module:
    args = {"num_layers": 2, "width": 16, "num_heads": 2, "vocab_size": vocabulary}
    return make_model("gpt", {**args, "sequence_length": 32, "tie_embeddings": tied})


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = TinyLM()

    def forward(self, given_tokens):
        return {"logits": self.inner(given_tokens)}


class Scaled(TinyLM):
    def forward(self, given_tokens):
        return super().forward(given_tokens) * 2.0


class Looks(TinyLM):
    def forward(self, given_tokens):
        return super().forward(given_tokens) if given_tokens.sum().item() else given_tokens


def test_the_head_is_found_by_what_it_returns():
    assert find_head(TinyLM(), batch()) == "head"
    assert find_head(Nested(), batch()) == "inner.head"


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_the_head_of_a_mixture_of_experts_is_found(family):
    """torch's own fakes refuse a grouped product in fp32."""
    pytest.importorskip("transformers")
    model, ids = hub_models.make(family), torch.zeros(4, 10, dtype=torch.long)
    assert find_head(model, MicroBatch(ids, ids, 40, 4)) == "lm_head"


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Scaled, r"no head was found: the model returns the output of none of its 3 calls.*Set"),
        (Looks, r"no head was found: the model does not run on fake tensors \(DataDependent.*Set"),
    ],
)
def test_a_head_that_cannot_be_found(model, message):
    with pytest.raises(ConfigError, match=message) as caught:
        find_head(model(), batch())
    text = str(caught.value)
    assert "Set model.head to the linear layer" in text
    assert "(the last ones are up, down, head)" in text
    assert "model.chunked_loss=false" in text


def test_which_jobs_have_it_when_nothing_is_said():
    language, large_model = LanguageTask(50257, label_smoothing=0.1), large()
    choice = choose_loss(spec_of(name="gpt"), language, large_model, batch())
    assert choice == ChunkedCrossEntropy(head="head", label_smoothing=0.1)
    size = choose_loss(spec_of(name="gpt", chunk_size="1MiB"), language, large_model, batch())
    assert isinstance(size, ChunkedCrossEntropy)
    assert size.chunk_size == 2**20
    off = spec_of(name="gpt", chunked_loss=False)
    for config, task in (
        (off, language),
        (spec_of(name="lenet"), ClassificationTask(3)),
        (spec_of(name="support.nets:TinyLM"), language),
    ):
        assert type(choose_loss(config, task, large_model, batch())) is CrossEntropy


def test_a_model_of_ones_own_has_it_when_it_is_asked_for():
    language = LanguageTask(13)
    asked = spec_of(name="support.nets:TinyLM", chunked_loss=True)
    assert choose_loss(asked, language, TinyLM(), batch()) == ChunkedCrossEntropy(head="head")
    named = spec_of(name="support.nets:TinyLM", chunked_loss=True, head="up")
    assert choose_loss(named, language, TinyLM(), batch()) == ChunkedCrossEntropy(head="up")
    classes = spec_of(name="support.nets:TinyConv", chunked_loss=True)
    images = MicroBatch(torch.zeros(2, 1, 8, 8), torch.zeros(2), 2, 2)
    choice = choose_loss(classes, ClassificationTask(3), TinyConv(), images)
    assert choice == ChunkedCrossEntropy(head="head")


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"chunked_loss": True, "loss": "torch.nn.functional:cross_entropy"},
            r"model\.chunked_loss=true is.*model\.loss=torch\.nn.*Leave one of the two out",
        ),
        (
            {"chunked_loss": False, "chunk_size": 100},
            r"model\.chunk_size=100 is for a chunked loss, and model\.chunked_loss is false.*Set",
        ),
        (
            {"name": "lenet", "head": "fc"},
            r"model\.head=fc is for.*off for this model and loss\. Set model\.chunked_loss=true",
        ),
        (
            {"loss": "a:b", "head": "head"},
            r"model\.head=head is for.*off for this model and loss.*leave model\.head out",
        ),
    ],
)
def test_keys_that_contradict_each_other(keys, message):
    with pytest.raises(ConfigError, match=message):
        check_chunks(spec_of(**keys))


def test_a_task_without_a_cross_entropy_over_the_last_dim():
    asked = spec_of(name="support.nets:TinyConv", chunked_loss=True)
    with pytest.raises(ConfigError, match=r"loss of a segmentation task is another.*=false"):
        choose_loss(asked, SegmentationTask(3), TinyConv(), batch())


def test_a_chunk_has_a_size():
    with pytest.raises(ConfigError, match=r"model\.chunk_size"):
        job_from_keys("single", {"model.chunk_size": 0})


def test_a_named_head_must_be_there():
    asked = spec_of(name="gpt", head="haed")
    with pytest.raises(ConfigError, match=r"no module 'haed', did you mean 'head'\?"):
        choose_loss(asked, LanguageTask(13), large(13), batch())


def segmenting(**args) -> nn.Module:
    with torch.device("meta"):
        return make_model("deeplabv3_resnet50", {"num_classes": 3, **args})


def test_the_weight_of_auxiliary_heads_is_the_job_s():
    task = SegmentationTask(3)
    model = segmenting(aux_loss=True)
    for weight, expected in ((None, None), (0.4, 0.4), (0, 0)):
        config = spec_of(name="deeplabv3_resnet50", auxiliary_weight=weight)
        assert choose_loss(config, task, model, batch()).auxiliary_weight == expected


def test_a_weight_for_no_head_and_for_another_loss_is_refused():
    config = spec_of(name="deeplabv3_resnet50", auxiliary_weight=0.4)
    with pytest.raises(ConfigError, match=r"=0\.4 .* deeplabv3_resnet50 has none\. Set .*=true"):
        choose_loss(config, SegmentationTask(3), segmenting(), batch())
    custom = CustomTask(MeanLoss(torch.nn.functional.mse_loss))
    with pytest.raises(ConfigError, match=r"=0\.4 is for a cross entropy, .* is a MeanLoss"):
        choose_loss(config, custom, TinyConv(), batch())
    spec = spec_of(
        name="deeplabv3_resnet50", auxiliary_weight=0.4, loss="torch.nn:CrossEntropyLoss"
    )
    with pytest.raises(ConfigError, match=r"=0\.4 is for the task's own.*and model\.loss=torch"):
        check_chunks(spec)
