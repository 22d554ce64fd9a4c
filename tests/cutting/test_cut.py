"""Cuts: the owners of tensors, refusals with reasons, and stages that leave the traced path."""

from __future__ import annotations

import copy
import random
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.cut_runs import (
    CPU,
    RECOMPUTED,
    Squares,
    batch,
    common_points,
    compare,
    make_model,
    stages_of,
    trace_case,
)
from support.cutting_configured import (
    CheckedSettings,
    Configured,
    ConfiguredEarly,
    ConfiguredFrozen,
    ConfiguredMapping,
    ConfiguredNamespace,
    ConfiguredTaken,
    Settings,
)
from support.cutting_nets import CASES, Case, Language, linear, rows, words
from support.cutting_odd_nets import Cached, Constants, Counting, Recurrent, ValueDependent
from torch import Tensor, nn

from bigtrain.cutting.choose import CutRequest, choose_cut
from bigtrain.cutting.cut import cut_at
from bigtrain.cutting.cut_points import legal_points
from bigtrain.cutting.placeholder import PlaceholderTensor, placeholder_like
from bigtrain.cutting.traced_model import Numerics, TracedModel
from bigtrain.errors import ConfigError


def identity(model: Any, x: Tensor) -> Tensor:
    """Return the input."""
    return x


class Chain(nn.Module):
    """Four layers; `between` is called with the model and the output of the second layer."""

    def __init__(self, between: Callable[[Any, Tensor], Tensor] = identity) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(linear() for _ in range(4)))
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[1](self.layers[0](x))
        return self.layers[3](self.layers[2](self.between(self, x)))


def cut_of(case: Case, at: str) -> Any:
    """The model of a case, a micro-batch, and the model's cut before the module `at`."""
    model, traced_model, batches = trace_case(case)
    trace, _ = traced_model.trace(batches[0], training=True)
    call = next(index for index, call in enumerate(trace.calls) if call.name == at)
    return model, batches[0], cut_at(trace, [call], traced_model)


def test_no_batch_is_kept() -> None:
    """The real tensors of a batch are freed after its step; only its shapes are remembered."""
    _, traced_model, batches = trace_case(next(iter(CASES.values())))
    copied = batches[0].map(torch.clone)
    traced_model.trace(copied, training=True)
    gone = [weakref.ref(tensor) for tensor in copied.tensors()]
    del copied
    assert gone
    assert not any(tensor() is not None for tensor in gone)


@RECOMPUTED
@pytest.mark.parametrize("name", CASES)
def test_every_tensor_has_an_owner_and_a_stage_holds_only_its_own(name: str) -> None:
    model, traced_model, batches = trace_case(CASES[name])
    points, _ = common_points(traced_model, batches[0])
    trace, _ = traced_model.trace(batches[0], training=True)
    cut = cut_at(trace, [points[len(points) // 2].call], traced_model)
    every = {name for name, _ in (*model.named_parameters(), *model.named_buffers())}
    assert set(cut.owners) == every == cut.tensor_names_of(range(cut.stages))
    tied = dict(cut.ties)
    for name, _ in model.named_parameters():
        assert (name in tied) == (len(cut.owners[name]) > 1)
    for index, stage in enumerate(stages_of(cut, model)):
        stages_by_tensor: dict[int, int] = {}
        pending: list[Any] = [m.__dict__ for m in stage._whole.module.modules()]
        while pending:
            value = pending.pop()
            if isinstance(value, Tensor) and not isinstance(value, PlaceholderTensor):
                stages_by_tensor[value.untyped_storage()._cdata] = value.untyped_storage().nbytes()
            elif isinstance(value, dict):
                pending += value.values()
            elif isinstance(value, (list, tuple)):
                pending += value
        model_tensors = [*model.named_parameters(), *model.named_buffers()]
        wanted = sum(
            t.untyped_storage().nbytes() for n, t in model_tensors if index in cut.owners[n]
        )
        constants = model.table.nbytes if isinstance(model, Constants) else 0
        assert sum(stages_by_tensor.values()) == wanted + constants


def test_a_stripped_recurrent_layer_keeps_no_weights_in_its_lists() -> None:
    model, _, cut = cut_of(CASES["recurrent"], "head")
    assert isinstance(model, Recurrent)
    stage = stages_of(cut, model)[1]
    assert [name for name, _ in stage.named_parameters()] == ["head.weight", "head.bias"]
    assert all(isinstance(weight, PlaceholderTensor) for weight in stage.lstm._flat_weights)


def test_a_tied_weight_is_listed_with_its_stages() -> None:
    _, _, cut = cut_of(Case(Language, words), "blocks.1")
    assert cut.ties == [("embed.weight", (0, 1))]
    assert cut.aliases == {"head.weight": "embed.weight"}


def test_autocast_gives_the_same_numbers() -> None:
    torch.manual_seed(0)
    for case in (Case(Language, words), CASES["vision"], CASES["convolutions"]):
        model = case.make()
        inputs = case.inputs()
        inputs = inputs.float() if inputs.is_floating_point() else inputs
        traced_model = TracedModel(model, Squares(), CPU, Numerics(autocast=True))
        points, _ = common_points(traced_model, batch(inputs))
        trace, _ = traced_model.trace(batch(inputs), training=True)
        dtypes = set()
        for point in points:
            cut = cut_at(trace, [point.call], traced_model)
            compare(model, cut, [batch(inputs)])
            dtypes |= {tensor.dtype for tensor in stages_of(cut, model)[0].outgoing(batch(inputs))}
        assert torch.bfloat16 in dtypes


def test_what_looks_at_values_is_refused_by_name() -> None:
    model = make_model(Case(ValueDependent, rows))
    traced_model = TracedModel(model, Squares(), CPU, Numerics())
    with pytest.raises(ConfigError, match=r"'gate' fails: its computation depends"):
        traced_model.trace(batch(rows()), training=True)


@pytest.mark.parametrize(
    ("make", "offered", "why"),
    [
        (Cached, {"writer", "head", "head.1", "head.2"}, "read after it by another module"),
        (Counting, {"last", "last.1"}, r"'scaled.calls' changes in the forward pass and is used"),
        (ConfiguredEarly, {"head"}, "'config.kind' changes in the forward pass and is used"),
        (ConfiguredTaken, {"head"}, "'config.kind' changes in the forward pass and is used"),
        (ConfiguredFrozen, set(), "'config.kind' changes in the forward pass and is used"),
        (ConfiguredNamespace, {"head"}, "'config' changes in the forward pass and is used"),
        (
            ConfiguredMapping,
            {"writer", "head"},
            "'reader.seen' changes in the forward pass and is used",
        ),
    ],
)
def test_no_cut_between_a_module_that_leaves_something_and_its_reader(
    make: Any, offered: set[str], why: str
) -> None:
    _, traced_model, batches = trace_case(Case(make, rows))
    points, refused = common_points(traced_model, batches[0])
    assert {point.name for point in points} <= offered
    assert any(why in reason for reason in refused.values()), refused


@pytest.mark.parametrize("make", [Settings, CheckedSettings])
def test_a_configuration_is_cut_where_nobody_needs_what_changes_of_it(make: Any) -> None:
    """transformers' classifiers set `config.problem_type` in the last code of the first pass."""
    _, traced_model, batches = trace_case(Case(lambda: Configured(make), rows))
    points, refused = common_points(traced_model, batches[0])
    assert {"layers.1", "layers.2", "head"} <= {point.name for point in points}, refused
    assert traced_model.fake_model.get_submodule("").config.kind is None  # unchanged


def scale_randomly(model: nn.Module, x: Tensor) -> Tensor:
    """Scale by a random number of Python."""
    return x * random.random()


def test_random_numbers_of_python_are_refused() -> None:
    state = random.getstate()
    traced_model = TracedModel(Chain(scale_randomly).double(), Squares(), CPU, Numerics())
    with pytest.raises(ConfigError, match="the forward pass draws from random, and each stage"):
        traced_model.trace(batch(rows()), training=True)
    assert random.getstate() == state


def test_functions_that_hold_a_module_are_refused() -> None:
    model = Chain()
    model.layers[1].register_forward_hook(lambda *_: setattr(model, "seen", 1))
    with pytest.raises(ConfigError, match="in '_forward_hooks' of 'layers.1' holds the module"):
        TracedModel(model, Squares(), CPU, Numerics())


def test_different_parameters_on_the_same_memory_stay_together() -> None:
    model = Chain().double()
    model.layers[3].weight.data = model.layers[0].weight.data
    traced_model = TracedModel(model, Squares(), CPU, Numerics())
    trace, _ = traced_model.trace(batch(rows()), training=True)
    points, _ = legal_points(trace)
    with pytest.raises(ConfigError, match="'layers.0.weight' and 'layers.3.weight' are different"):
        cut_at(trace, [points[1].call], traced_model)


class Steps:
    """A counter outside of any module, which the trace does not see."""

    taken = 0


def every_other_time(model: Any, x: Tensor) -> Tensor:
    """Take a different path after three calls."""
    Steps.taken += 1
    return x.tanh() if Steps.taken > 3 else x


def another_shape(model: Any, x: Tensor) -> Tensor:
    """Return a different shape after three calls."""
    Steps.taken += 1
    return x[:1] if Steps.taken > 3 else x


@pytest.mark.parametrize("between", [every_other_time, another_shape])
def test_a_stage_that_goes_another_way_says_so(between: Any) -> None:
    Steps.taken = 0
    model = Chain(between).double()
    traced_model = TracedModel(model, Squares(), CPU, Numerics())
    trace, _ = traced_model.trace(batch(rows()), training=True)
    call = next(i for i, c in enumerate(trace.calls) if c.name == "layers.3")
    cut = cut_at(trace, [call], traced_model)
    Steps.taken = 10
    stage = stages_of(cut, model)[0].train()
    with pytest.raises(ConfigError, match="another path through the model than when it was traced"):
        stage(micro_batch=batch(rows()), scale=1.0)


def use_gain_after_three_calls(model: Any, x: Tensor) -> Tensor:
    """Use a parameter only after three calls."""
    Steps.taken += 1
    return x * model.gain if Steps.taken > 3 else x


def test_a_stage_names_the_parameter_that_is_used_of_a_sudden() -> None:
    Steps.taken = 0
    model = Chain(use_gain_after_three_calls)
    model.gain = nn.Parameter(torch.ones(8))
    model = model.double()
    traced_model = TracedModel(model, Squares(), CPU, Numerics())
    trace, _ = traced_model.trace(batch(rows()), training=True)
    call = next(i for i, c in enumerate(trace.calls) if c.name == "layers.3")
    cut = cut_at(trace, [call], traced_model)
    Steps.taken = 10
    stage = stages_of(cut, model)[0].train()
    with pytest.raises(ConfigError, match=r"it reaches .*, computed with gain, instead of \('lay"):
        stage(micro_batch=batch(rows()), scale=1.0)


class Alternates(nn.Module):
    """Skips a layer in every other call, by a count that all of its code reads."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = linear(), linear(), linear()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x = self.first(x)
        return self.last(self.middle(x) if self.calls % 2 else x)


def test_it_is_said_why_there_are_too_few_places_for_cuts() -> None:
    _, traced_model, batches = trace_case(Case(Alternates, rows))
    with pytest.raises(ConfigError) as raised:
        choose_cut(traced_model, batches[0], CutRequest(2))
    assert str(raised.value) == (
        "strategy.cut: 2 stages, and the model can be cut at 0 places: at most 1 stages. It cannot "
        "be cut before 'middle' and 1 others: the model's own code behaves differently from call "
        "to call. Use a strategy without a cut."
    )
    _, traced_model, batches = trace_case(Case(Chain, rows))
    with pytest.raises(
        ConfigError, match=r"9 stages, .* at 3 places: at most 4 stages\. Use mesh.pp=4, or"
    ):
        choose_cut(traced_model, batches[0], CutRequest(9))


class Swallows(nn.Module):
    """Catches an exception that it should pass on."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = linear(), linear()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        try:
            y = self.last(x)
        except BaseException:
            y = x
        return y


def test_a_stage_whose_end_is_caught_says_so() -> None:
    model, micro_batch, cut = cut_of(Case(Swallows, rows), "last")
    with pytest.raises(ConfigError, match="reached the end of the model without running its part"):
        stages_of(cut, model)[0].train()(micro_batch=micro_batch, scale=1.0)


def test_a_shape_that_goes_round_a_cut_is_refused() -> None:
    class Short(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = linear(), linear(), linear()

        def forward(self, x: Tensor) -> Tensor:
            x = self.a(x)
            return self.c(self.b(x) if len(x) > 2 else x)

    model, _, cut = cut_of(Case(Short, rows), "b")
    with pytest.raises(ConfigError, match="the model does not call 'b', where it is cut"):
        stages_of(cut, model)[0].train()(micro_batch=batch(rows(2)), scale=1.0)


def test_a_cut_that_evaluation_forbids_is_refused() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = linear(), linear(), linear()

        def forward(self, x: Tensor) -> Tensor:
            x = self.a(x)
            y = self.b(x)
            if not self.training:
                x += 1.0
            return self.c(x + y)

    with pytest.raises(ConfigError, match="before 'b' in every mode.*changed in place after it"):
        cut_of(Case(Mixed, rows), "b")


class Held:
    def __init__(self, x: Tensor) -> None:
        self.x = x


class Deep:
    """A tensor in an object that is inside another object."""

    def __init__(self, x: Tensor) -> None:
        self.inner = Held(x)


class Hiding(nn.Module):
    """Returns a tensor, and the same tensor inside nested objects."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = linear()

        def forward(self, x: Tensor) -> tuple[Tensor, Deep]:
            x = self.layer(x)
            return x, Deep(x)

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = linear(), Hiding.Layer(), linear(), linear()

    def forward(self, x: Tensor) -> Tensor:
        x, deep = self.b(self.a(x))
        return self.d(self.c(x) * deep.inner.x)


def test_tensors_in_objects_within_objects_are_refused() -> None:
    model = make_model(Case(Hiding, rows))
    traced_model = TracedModel(model, Squares(), CPU, Numerics())
    trace, _ = traced_model.trace(batch(rows()), training=True)
    for at in ("c", "d"):
        call = next(index for index, call in enumerate(trace.calls) if call.name == at)
        with pytest.raises(ConfigError, match="the result of 'b' has tensors in objects within"):
            cut_at(trace, [call], traced_model)


def test_a_gradient_hook_on_a_parameter_of_two_stages_is_refused() -> None:
    model = Language().double()
    model.embed.weight.register_hook(lambda gradient: gradient.clamp(-1, 1))
    traced_model = TracedModel(model, Squares(), CPU, Numerics())
    trace, _ = traced_model.trace(batch(words()), training=True)
    call = next(index for index, call in enumerate(trace.calls) if call.name == "blocks.1")
    with pytest.raises(ConfigError, match="'embed.weight' has a gradient hook"):
        cut_at(trace, [call], traced_model)


def test_a_ghost_that_slips_through_is_not_computed_with() -> None:
    """A placeholder that reaches an operation raises instead of being computed with."""
    model, micro_batch, cut = cut_of(Case(Chain, rows), "layers.2")
    stage = stages_of(cut, model)[1].train()
    bias = stage.layers[0].bias
    stage.layers[3].register_forward_pre_hook(lambda _, args: (args[0] + bias,))
    with pytest.raises(ConfigError, match="uses a tensor of another stage that was not sent"):
        stage(torch.randn_like(rows()), micro_batch=micro_batch, scale=1.0)


def test_ranks_can_compare_their_scripts() -> None:
    model, micro_batch, cut = cut_of(Case(Chain, rows), "layers.2")
    first, two = (stage.train().fingerprint(micro_batch) for stage in stages_of(cut, model))
    different, micro_batch, cut = cut_of(Case(Chain, rows), "layers.3")
    assert first == two != stages_of(cut, different)[0].train().fingerprint(micro_batch)


def test_a_model_is_left_as_it_was_by_its_rehearsal() -> None:
    model = make_model(Case(Counting, rows))
    before = copy.deepcopy(model.state_dict())
    traced_model = TracedModel(model, Squares(), CPU, Numerics())
    traced_model.trace(batch(rows()), training=True)
    assert model.scaled.calls == traced_model.fake_model.scaled.calls == 0
    assert type(traced_model.fake_model.scaled) is Counting.Scaled
    assert all(torch.equal(before[key], tensor) for key, tensor in model.state_dict().items())


def test_a_ghost_says_what_the_real_tensor_would() -> None:
    """A placeholder answers questions about shape, type and device as the real tensor would."""
    real = torch.randn(4, 6, dtype=torch.float64, requires_grad=True).t()
    placeholder = placeholder_like(real.detach().to("meta").requires_grad_(), CPU)
    for tensor in (
        placeholder,
        (placeholder * 2).sum(0),
        placeholder @ placeholder.T,
        placeholder + torch.ones(4, 6).T,
    ):
        assert isinstance(tensor, PlaceholderTensor)
        assert tensor.device == CPU
        assert tensor.requires_grad
    assert placeholder.stride() == real.stride()
    assert not placeholder.detach().requires_grad
    assert not (placeholder > 0).requires_grad
    filled = torch.zeros(6, 4, dtype=torch.float64)
    same = filled
    same += placeholder
    assert same is filled
