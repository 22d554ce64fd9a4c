"""Cross entropy in chunks with the output projection: equal numbers without storing all logits."""

from __future__ import annotations

import copy
import gc
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.nets import TinyLM, tokens
from torch import Tensor, nn
from torch.nn.utils import parametrize

from bigtrain.activations.recompute import checkpoint_block
from bigtrain.data import MicroBatch
from bigtrain.engine.run_loss.choose_loss import choose_loss
from bigtrain.errors import ConfigError
from bigtrain.job.schema import ModelConfig
from bigtrain.losses.chunked_cross_entropy import (
    ChunkedCrossEntropy,
    attach_head,
    check_head,
    head_targets,
)
from bigtrain.losses.linear_cross_entropy import chunk_rows, chunked_cross_entropy
from bigtrain.losses.loss import CrossEntropy
from bigtrain.losses.tasks import LanguageTask
from bigtrain.memory.tracker import StorageTracker
from bigtrain.models import make_model
from bigtrain.models.spec import ModelSpec

VOCABULARY, WIDTH, ROWS = 17, 8, (2, 7)
CHUNKED = ChunkedCrossEntropy(head="head", chunk_size=1024)


def inputs(dtype: torch.dtype = torch.float64, *, bias: bool = False) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    made = {
        "hidden": torch.randn(*ROWS, WIDTH, generator=generator),
        "weight": torch.randn(VOCABULARY, WIDTH, generator=generator),
        "bias": torch.randn(VOCABULARY, generator=generator) if bias else None,
    }
    tensors: dict[str, Any] = {
        name: None if tensor is None else tensor.to(dtype).requires_grad_()
        for name, tensor in made.items()
    }
    target = torch.randint(VOCABULARY, ROWS, generator=generator)
    target[0, 1] = target[1, 6] = -100
    return tensors | {"target": target}


def plain_loss(hidden, weight, bias, target, **options: Any) -> Tensor:
    """The summed loss with all logits at once."""
    logits = F.linear(hidden, weight, bias).flatten(0, -2)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(logits, target.flatten(), reduction="sum", **options)


def gradients(total: Tensor, given_inputs: dict[str, Any]) -> dict[str, Tensor]:
    wanted = {n: t for n, t in given_inputs.items() if t is not None and t.requires_grad}
    return dict(zip(wanted, torch.autograd.grad(total * 0.3, [*wanted.values()]), strict=True))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("rows", [1, 4, 14, 100])
def test_values_and_gradients_are_those_of_the_whole(dtype, bias, smoothing, rows):
    tensors = inputs(dtype, bias=bias)
    options = {"label_smoothing": smoothing}
    expected = plain_loss(**tensors, **options)
    result = chunked_cross_entropy(
        **tensors, **options, chunk_size=rows * VOCABULARY * dtype.itemsize
    )
    within = 1e-12 if dtype == torch.float64 else 1e-6
    torch.testing.assert_close(result, expected, rtol=within, atol=0)
    expected_gradients, result_gradients = gradients(expected, tensors), gradients(result, tensors)
    assert expected_gradients.keys() == result_gradients.keys()
    for name in expected_gradients:
        scale = float(expected_gradients[name].abs().max())
        assert float(
            (expected_gradients[name] - result_gradients[name]).abs().max()
        ) <= within * max(1.0, scale), name


def test_another_ignored_index_and_one_that_is_a_class():
    tensors = inputs()
    tensors["target"][tensors["target"] == -100] = 3
    expected = plain_loss(**tensors, ignore_index=3)
    result = chunked_cross_entropy(**tensors, ignore_index=3, chunk_size=300)
    torch.testing.assert_close(result, expected, rtol=1e-12, atol=0)
    for wanted, actual in zip(
        gradients(expected, tensors).values(), gradients(result, tensors).values(), strict=True
    ):
        torch.testing.assert_close(wanted, actual, rtol=0, atol=1e-12)


def test_no_valid_target_is_zero_in_value_and_gradient():
    tensors = inputs(bias=True)
    tensors["target"].fill_(-100)
    total = chunked_cross_entropy(**tensors, chunk_size=300, label_smoothing=0.1)
    assert total.item() == 0
    assert all(not gradient.any() for gradient in gradients(total, tensors).values())


def test_no_rows_at_all():
    tensors = inputs()
    tensors["hidden"] = torch.zeros(0, WIDTH, dtype=torch.float64, requires_grad=True)
    tensors["target"] = torch.zeros(0, dtype=torch.int64)
    total = chunked_cross_entropy(**tensors)
    assert total.item() == 0
    assert not gradients(total, tensors)["weight"].any()


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_what_is_frozen_costs_no_gradient(frozen):
    tensors = inputs()
    tensors[frozen].requires_grad_(False)
    with StorageTracker() as tracker:
        tracker.label(tensors.values(), "parameters")
        before = tracker.live_bytes
        total = chunked_cross_entropy(**tensors, chunk_size=1)
        gc.collect()
        live = tracker.live_bytes - before
    unfrozen = tensors["weight" if frozen == "hidden" else "hidden"]
    assert unfrozen.nbytes <= live < unfrozen.nbytes + 64
    expected = plain_loss(**tensors)
    for wanted, actual in zip(
        gradients(expected, tensors).values(), gradients(total, tensors).values(), strict=True
    ):
        torch.testing.assert_close(wanted, actual, rtol=0, atol=1e-12)


def test_without_grad_there_is_the_value_and_nothing_is_kept():
    tensors = inputs()
    with torch.no_grad(), StorageTracker() as tracker:
        tracker.label(tensors.values(), "parameters")
        before = tracker.live_bytes
        result = chunked_cross_entropy(**tensors, chunk_size=300)
        assert tracker.live_bytes - before == result.nbytes
    assert not result.requires_grad
    torch.testing.assert_close(result, plain_loss(**tensors).detach(), rtol=1e-12, atol=0)


def test_autocast_and_bf16_parameters_are_as_close_as_bf16_is():
    exact = inputs(torch.float32, bias=True)
    truth = gradients(plain_loss(**exact), exact)
    for whole in (False, True):  # parameters in fp32 under autocast, or all in bf16
        tensors = inputs(torch.bfloat16 if whole else torch.float32, bias=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=not whole):
            total = chunked_cross_entropy(**tensors, chunk_size=300)
            logits = F.linear(tensors["hidden"], tensors["weight"], tensors["bias"])
        usual = F.cross_entropy(
            logits.float().flatten(0, 1), tensors["target"].flatten(), reduction="sum"
        )
        assert total.dtype == torch.float32
        assert float((total - usual).detach().abs()) < 1e-3 * float(usual.detach())
        mine, theirs = gradients(total, tensors), gradients(usual, tensors)
        for name, gradient in mine.items():
            assert gradient.dtype == tensors[name].dtype
            error = float((gradient.float() - truth[name]).abs().max())
            limit = float((theirs[name].float() - truth[name]).abs().max())
            assert error <= 1.5 * limit + 1e-4, name


def test_the_sum_over_many_chunks_in_bf16_loses_nothing():
    """2048 equal summands: a bf16 sum would stop growing after 256 of them."""
    hidden = torch.ones(2048, 4, dtype=torch.bfloat16)
    weight = torch.zeros(2, 4, dtype=torch.bfloat16, requires_grad=True)
    target = torch.zeros(2048, dtype=torch.int64)
    chunked_cross_entropy(hidden, weight, None, target, chunk_size=8).backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [[-1024.0] * 4, [1024.0] * 4]


def test_the_gradients_go_to_inputs_and_weights_in_turn_and_once():
    """The two parts of a backward pass that a pipeline splits, each exactly once."""
    tensors = inputs()
    expected = gradients(plain_loss(**tensors), tensors)
    total = chunked_cross_entropy(**tensors, chunk_size=300) * 0.3
    first = torch.autograd.grad(total, tensors["hidden"], retain_graph=True)[0]
    second = torch.autograd.grad(total, tensors["weight"], retain_graph=True)[0]
    torch.testing.assert_close(first, expected["hidden"], rtol=0, atol=1e-12)
    torch.testing.assert_close(second, expected["weight"], rtol=0, atol=1e-12)
    with pytest.raises(ConfigError, match=r"a second backward pass.*model\.chunked_loss=false"):
        total.backward()


def test_the_rows_of_a_chunk():
    assert chunk_rows(32 * 2**20, 50257, torch.float32) == 166
    assert chunk_rows(32 * 2**20, 50257, torch.float64) == 83
    assert chunk_rows(1, 50257, torch.float32) == 1


# ------------------------------------------------------------------------------ in a model


class Returns(TinyLM):
    """Returns the head's output in a different form."""

    def __init__(self, form: str = "dict") -> None:
        super().__init__()
        self.form = form

    def forward(self, given_tokens: Tensor) -> Any:
        logits = super().forward(given_tokens)
        if self.form == "dict":
            return {"logits": logits}
        if self.form == "scaled":
            return logits * 2.0
        if self.form == "twice":
            return self.head(self.embedding(given_tokens))
        return self.up(self.embedding(given_tokens)) if self.form == "other" else logits


def through(model: nn.Module, loss: CrossEntropy, batch: tuple[Tensor, Tensor]) -> Tensor:
    with head_targets(loss, batch[1]):
        return loss(model(batch[0]), batch[1])


def some_tokens(rows: int = 4) -> tuple[Tensor, Tensor]:
    """Inputs and targets of a few sequences."""
    samples = tokens(rows)
    return samples.inputs, samples.targets


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("form", ["", "dict"])
def test_a_model_with_a_tied_head_has_the_same_loss_and_gradients(form, recompute):
    batch, model = some_tokens(), Returns(form).double()
    twin = copy.deepcopy(model)
    names = list(model.state_dict())
    attach_head(CHUNKED, model)
    attach_head(CHUNKED, model)
    expected = CrossEntropy()(twin(batch[0]), batch[1])
    expected.backward()
    with head_targets(CHUNKED, batch[1]):
        run = checkpoint_block(model, lambda: model(batch[0])) if recompute else model(batch[0])
        total = CHUNKED(run, batch[1])
    total.backward()
    torch.testing.assert_close(total, expected, rtol=1e-12, atol=0)
    for parameter, twin_parameter in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, twin_parameter.grad, rtol=0, atol=1e-12)
    assert list(model.state_dict()) == names


def test_outside_of_given_the_head_gives_logits_and_a_copy_has_its_own():
    batch, model = some_tokens(), TinyLM()
    attach_head(CHUNKED, model)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with torch.no_grad():
            copied.head.weight.mul_(2.0)
        with head_targets(CHUNKED, batch[1]):
            mine = CHUNKED(copied(batch[0]), batch[1])
        torch.testing.assert_close(mine, CrossEntropy()(copied(batch[0]), batch[1]))
        assert copied(batch[0]).shape == (*batch[1].shape, 13)
    with head_targets(CrossEntropy(), batch[1]):
        assert model(batch[0]).dim() == 3


def test_a_wrapper_that_hands_the_output_on_is_let_through():
    class Mark(torch.autograd.Function):
        @staticmethod
        def forward(_ctx: Any, tensor: Tensor) -> Tensor:
            return tensor.view_as(tensor)

        @staticmethod
        def backward(_ctx: Any, gradient: Tensor) -> Tensor:
            return gradient

    batch, model = some_tokens(), TinyLM()
    attach_head(CHUNKED, model)
    model.register_forward_hook(lambda _m, _i, output: Mark.apply(output).clone())
    assert through(model, CHUNKED, batch).dim() == 0


def test_a_head_with_a_computed_weight():
    class Double(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return 2.0 * weight

    batch, model = some_tokens(), TinyLM().double()
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    parametrize.register_parametrization(model.head, "weight", Double())
    twin = copy.deepcopy(model)
    attach_head(CHUNKED, model)
    through(model, CHUNKED, batch).backward()
    CrossEntropy()(twin(batch[0]), batch[1]).backward()
    for parameter, twin_parameter in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, twin_parameter.grad, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ("scaled", r"output of model\.head=head unchanged.*shape \(\).*chunked_loss=false"),
        ("other", r"output of model\.head=head unchanged: got a tensor of shape \(4, 6, 32"),
        ("twice", r"model\.head=head is called more than once.*Set model\.chunked_loss=false"),
    ],
)
def test_a_model_that_does_not_return_its_heads_output(form, message):
    model = Returns(form)
    attach_head(CHUNKED, model)
    with pytest.raises(ConfigError, match=message):
        through(model, CHUNKED, some_tokens())


def test_a_head_that_is_not_called_and_targets_that_do_not_fit():
    batch, model = some_tokens(), TinyLM()
    attach_head(CHUNKED, model)
    with (
        head_targets(CHUNKED, batch[1]),
        pytest.raises(ConfigError, match=r"head=head was not called in the forward pass"),
    ):
        CHUNKED(torch.zeros(4, 6, 13), batch[1])
    with pytest.raises(ConfigError, match=r"logits of shape \(4, 6, 13\) need targets of shape"):
        through(model, CHUNKED, (batch[0], batch[1][:, :5]))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("haed", r"the model has no module 'haed', did you mean 'head'\?.*such as up, down, head"),
        ("norm", r"model\.head=norm is a LayerNorm, and a chunked loss needs an nn\.Linear.*head"),
    ],
)
def test_a_head_that_is_none(name, message):
    with pytest.raises(ConfigError, match=message):
        check_head(name, TinyLM())


def test_a_linear_layer_with_another_forward_is_no_head():
    class Half(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:  # noqa: A002
            return super().forward(input) / 2

    with pytest.raises(
        ConfigError, match=r"model\.head=0 is a Half.*whose forward is not replaced"
    ):
        check_head("0", nn.Sequential(Half(2, 2)))


def batch_of(places: int) -> MicroBatch:
    row = torch.zeros(1, places, dtype=torch.long)
    return MicroBatch(row, row, places, 1)


def test_where_micro_batches_wait_the_smaller_of_gradient_and_logits_decides():
    spec = ModelSpec.of(ModelConfig(name="gpt"))
    task = LanguageTask(num_classes=256)
    model = make_model("gpt", {"num_layers": 1, "width": 64, "num_heads": 2})
    for places, chunked in ((32, False), (128, True)):
        example = batch_of(places)
        alone = choose_loss(spec, task, model, example)
        behind = choose_loss(spec, task, model, example, several_waiting=True)
        assert isinstance(alone, ChunkedCrossEntropy)
        assert isinstance(behind, ChunkedCrossEntropy) is chunked
    asked = ModelSpec.of(ModelConfig(name="gpt", chunked_loss=True))
    choice = choose_loss(asked, task, model, batch_of(8), several_waiting=True)
    assert isinstance(choice, ChunkedCrossEntropy)


def test_a_head_with_a_forward_of_its_own_on_the_instance_is_refused():
    model = TinyLM()
    head = model.head
    head.forward = lambda hidden: 2 * F.linear(hidden, head.weight)
    with pytest.raises(ConfigError, match="needs an nn.Linear whose forward is not replaced"):
        attach_head(CHUNKED, model)


def test_what_a_recomputed_block_remembers_lets_go_of_the_graph():
    """A recomputed block stores its inputs, which must not keep the loss's graph alive."""
    from bigtrain.losses.chunked_cross_entropy import current_targets

    batch = tokens(4)
    model = TinyLM()
    attach_head(CHUNKED, model)
    with head_targets(CHUNKED, batch.targets):
        remembered = current_targets()
        loss = CHUNKED(model(batch.inputs), batch.targets)
    assert remembered is not None
    assert torch.isfinite(loss)
    tensors = [value for value in vars(remembered).values() if isinstance(value, Tensor)]
    assert all(value.grad_fn is None for value in tensors)
