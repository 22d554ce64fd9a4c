"""Horovod's optimizer: on real ranks the same numbers as in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.ranks import run_ranks
from torch import nn

import bigtrain.hvd as hvd
import bigtrain.hvd.optimizer as optimizer_module
from bigtrain.errors import ConfigError, LaunchError
from bigtrain.ranks.context import RunContext

STEPS = 4


@pytest.fixture(autouse=True)
def no_session():
    """End a session that another test has left open."""
    hvd.shutdown()
    yield
    hvd.shutdown()


def net(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 3)).double()


def rows(step: int, part: slice) -> tuple[torch.Tensor, torch.Tensor]:
    drawn = torch.Generator().manual_seed(step)
    inputs = torch.randn(24, 5, generator=drawn, dtype=torch.float64)
    return inputs[part], inputs[part, :3].argmax(1)


def trained_weights(
    context: RunContext, passes: int, options: dict[str, Any], fusion: int = 2**26
) -> list[torch.Tensor]:
    """The weights after a few steps in which each rank has a share of 24 rows."""
    hvd.init_with(context)
    optimizer_module.FUSION_BYTES = fusion
    model = net(hvd.rank())
    plain = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(
        plain,
        named_parameters=model.named_parameters(),
        backward_passes_per_step=passes,
        **options,
    )
    assert isinstance(optimizer, torch.optim.SGD)
    hvd.broadcast_parameters(model.state_dict())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    share = 24 // (hvd.size() * passes)
    for step in range(STEPS):
        for part in range(passes):
            first = (hvd.rank() * passes + part) * share
            inputs, targets = rows(step, slice(first, first + share))
            loss = nn.functional.cross_entropy(model(inputs), targets) / passes
            loss.backward()
        optimizer.synchronize()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        with optimizer.skip_synchronize():
            optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize(("ranks", "passes", "fusion"), [(2, 1, 2**26), (3, 2, 600)])
def test_the_weights_are_those_of_one_process(ranks, passes, fusion):
    alone = trained_weights(RunContext.alone(), 1, {})
    for options in ({}, {"gradient_predivide_factor": 2.0}):
        for weights in run_ranks(trained_weights, ranks, passes, options, fusion):
            for weight, expected in zip(weights, alone, strict=True):
                assert torch.allclose(weight, expected, rtol=0, atol=1e-12)


def test_fp16_on_the_way_changes_the_numbers_a_little():
    alone = trained_weights(RunContext.alone(), 1, {})
    compressed = run_ranks(trained_weights, 2, 1, {"compression": hvd.Compression.fp16})[0]
    differences = [float((a - b).abs().max()) for a, b in zip(alone, compressed, strict=True)]
    assert 0 < max(differences) < 1e-2


def broadcast_and_average(context: RunContext) -> dict[str, Any]:
    """The results of broadcasting a model and its optimizer, and of averages."""
    hvd.init_with(context)
    mine = torch.full((3,), float(hvd.rank() + 1))
    model = net(hvd.rank())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5 * (hvd.rank() + 1))
    if hvd.rank() == 1:  # like a rank that has read a checkpoint
        inputs, targets = rows(0, slice(0, 24))
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    hvd.broadcast_optimizer_state(optimizer, root_rank=1)
    state = optimizer.state_dict()
    return {
        "mean": hvd.allreduce(mine, name="mean").tolist(),
        "sum": hvd.allreduce(mine, op=hvd.Sum).tolist(),
        "older": hvd.allreduce(mine, average=False).tolist(),
        "mine": mine.tolist(),
        "object": hvd.broadcast_object({"from": hvd.rank()}, root_rank=1),
        "lr": state["param_groups"][0]["lr"],
        "moments": [state["state"][n]["exp_avg"] for n in range(4)],
        "who": (hvd.rank(), hvd.local_rank(), hvd.size(), hvd.local_size()),
        "nodes": (hvd.cross_rank(), hvd.cross_size(), hvd.is_homogeneous()),
    }


def test_what_goes_between_the_ranks():
    first, second = run_ranks(broadcast_and_average, 2)
    for result in (first, second):
        assert result["mean"] == [1.5] * 3
        assert result["sum"] == result["older"] == [3.0] * 3
        assert result["object"] == {"from": 1}
        assert result["lr"] == 1.0
        for moment, second_moment in zip(result["moments"], second["moments"], strict=True):
            assert torch.equal(moment, second_moment)
    assert (first["mine"], second["mine"]) == ([1.0] * 3, [2.0] * 3)
    assert first["nodes"] == second["nodes"] == (0, 1, True)
    assert (first["who"], second["who"]) == ((0, 0, 2, 2), (1, 1, 2, 2))


def backward_twice(context: RunContext) -> str:
    """Run a second backward pass before the step, although one was declared."""
    hvd.init_with(context)
    model = net(0)
    hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    try:
        for _ in range(2):
            model(rows(0, slice(0, 4))[0]).sum().backward()
    except ConfigError as error:
        return str(error)
    return ""


def test_too_many_backward_passes_are_refused():
    for message in run_ranks(backward_twice, 2):
        assert "for the 2. time since the last step, and backward_passes_per_step=1" in message
        assert "Call step(), or give" in message


def test_what_is_not_here_is_refused_with_what_is(monkeypatch):
    with pytest.raises(LaunchError, match=r"not connected yet. Call hvd.init\(\) first"):
        hvd.rank()
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    assert not hvd.is_initialized()
    hvd.init()
    hvd.init()
    assert hvd.is_initialized()
    assert (hvd.rank(), hvd.size(), hvd.local_rank()) == (0, 1, 0)
    assert hvd.broadcast_object("same") == "same"
    model = net(0)
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match=r"Adasum is not supported. Use op=hvd.Average"):
        hvd.DistributedOptimizer(plain, op=hvd.Adasum)
    with pytest.raises(
        ConfigError, match=r"backward_passes_per_step=0, and a step needs at least 1"
    ):
        hvd.DistributedOptimizer(plain, backward_passes_per_step=0)
    with pytest.raises(ConfigError, match=r"an average of torch.int64 .* Give op=hvd.Sum"):
        hvd.allreduce(torch.ones(2, dtype=torch.int64))
    with pytest.raises(ConfigError, match=r"step\(closure\).*then step\(\)"):
        hvd.DistributedOptimizer(plain).step(lambda: 0.0)


def two_rows(seed: int) -> nn.Module:
    """Parameters with exactly two rows, which could be mistaken for pairs when unpacked."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Linear(2, 2)).double()


def parameters_sent(context: RunContext) -> dict[str, Any]:
    hvd.init_with(context)
    forms: dict[str, Any] = {
        "state dict": lambda m: m.state_dict(),
        "dict": lambda m: (
            dict(reversed(list(m.named_parameters()))) if hvd.rank() else dict(m.named_parameters())
        ),
        "pairs": lambda m: list(m.named_parameters()),
        "generator of pairs": lambda m: m.named_parameters(),
        "tensors": lambda m: list(m.parameters()),
        "generator": lambda m: m.parameters(),
        "both": lambda m: [*m.parameters(), *m.named_buffers()],
        "tuple": lambda m: tuple(m.parameters()),
    }
    outcomes: dict[str, Any] = {}
    for name, form in forms.items():
        model = two_rows(hvd.rank())
        hvd.broadcast_parameters(form(model), root_rank=1)
        outcomes[name] = [p.detach() for p in model.parameters()]
        assert all(p.requires_grad for p in model.parameters())
    model = two_rows(0)
    linear = nn.Linear(3, 2 + hvd.rank())
    refused: dict[str, Any] = {
        "module": lambda: hvd.broadcast_parameters(model),
        "number": lambda: hvd.broadcast_parameters({"a": torch.ones(1), "step": 3}),
        "list": lambda: hvd.broadcast_parameters([["a", torch.ones(1)]]),
        "none": lambda: hvd.broadcast_parameters([None]),
        "one": lambda: hvd.broadcast_parameters(torch.ones(2, 2)),
        "shapes": lambda: hvd.broadcast_parameters(linear.state_dict()),
        "names": lambda: hvd.broadcast_parameters({f"w{hvd.rank()}": torch.ones(2)}),
    }
    for name, call in refused.items():
        with pytest.raises(ConfigError) as error:
            call()
        outcomes[name] = str(error.value)
    return outcomes


def test_parameters_come_over_whatever_holds_them():
    expected = list(two_rows(1).parameters())
    for outcomes in run_ranks(parameters_sent, 2):
        for name, weights in outcomes.items():
            if isinstance(weights, list):
                for weight, expected_weight in zip(weights, expected, strict=True):
                    assert torch.equal(weight, expected_weight), name
        assert "Sequential is no dict or list of parameters. Give model.state" in outcomes["module"]
        assert "'step' is int, and tensors or pairs" in outcomes["number"]
        assert "list found, and tensors" in outcomes["list"]
        assert "NoneType found" in outcomes["none"]
        assert "Parameter" in outcomes["one"] or "Tensor is no dict or list" in outcomes["one"]
        assert "'bias', of float32 [2], root_rank=0, and rank 1 for broadcast" in outcomes["shapes"]
        assert "'w0'" in outcomes["names"]
        assert "'w1'" in outcomes["names"]


def states_sent(context: RunContext, kind: str) -> dict[str, Any]:
    """Rank 1 has trained, as if it had read a checkpoint; rank 0 has only made its optimizer."""
    hvd.init_with(context)
    me = hvd.rank()
    model = net(0)
    makers: dict[str, Any] = {
        "sgd": lambda p: torch.optim.SGD(p, lr=0.1 + me),
        "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.5 + me / 4, nesterov=bool(me)),
        "adam": lambda p: torch.optim.AdamW(p, lr=0.1, betas=(0.5, 0.9 - me / 10)),
        "tensor lr": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.1 + me), amsgrad=True),
        "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.1 + me),
    }
    optimizer = makers[kind](model.parameters())
    if kind != "lbfgs":
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

    def loss() -> torch.Tensor:
        inputs, targets = rows(0, slice(0, 24))
        loss_value = nn.functional.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss_value.backward()
        return loss_value

    if me == 1:
        plain = makers[kind](model.parameters())
        if kind == "lbfgs":
            optimizer.step(loss)
        else:
            inputs, targets = rows(0, slice(0, 24))
            value = nn.functional.cross_entropy(model(inputs), targets)
            gradients = torch.autograd.grad(value, list(model.parameters()))
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter.grad = gradient
            plain.step()
            optimizer.load_state_dict(plain.state_dict())
    hvd.broadcast_optimizer_state(optimizer, 1, model=model)
    return optimizer.state_dict()


def flat(state: Any) -> list[Any]:
    if isinstance(state, dict):
        return [item for key in state for item in (key, *flat(state[key]))]
    if isinstance(state, (list, tuple)):
        return [item for one in state for item in flat(one)]
    return [state.tolist() if isinstance(state, torch.Tensor) else state]


@pytest.mark.parametrize("kind", ["sgd", "momentum", "adam", "tensor lr", "lbfgs"])
def test_the_state_of_an_optimizer_comes_over(kind):
    first, second = run_ranks(states_sent, 2, kind)
    assert flat(first) == flat(second)
    assert kind == "sgd" or first["state"]


def other_groups(context: RunContext) -> str:
    hvd.init_with(context)
    parameters = list(net(0).parameters())
    groups = [parameters] if hvd.rank() else [parameters[:2], parameters[2:]]
    optimizer = torch.optim.SGD([{"params": group} for group in groups], lr=0.1)
    with pytest.raises(ConfigError) as error:
        hvd.broadcast_optimizer_state(optimizer)
    return str(error.value)


def test_optimizers_of_other_groups_are_refused():
    for message in run_ranks(other_groups, 2):
        assert "rank 0 has groups of [2, 2] parameters, and rank 1 of [4]. Make the same" in message


class Bag(nn.Module):
    """An embedding with sparse gradients, a layer that one rank does not use, and a head."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.bag = nn.Embedding(20, 6, sparse=True)
        self.side = nn.Linear(6, 6)
        self.head = nn.Linear(6, 3)
        self.double()

    def forward(self, words: torch.Tensor, *, aside: bool) -> torch.Tensor:
        mean = self.bag(words).mean(1)
        return self.head(mean + self.side(mean) if aside else mean)


def words_of(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    drawn = torch.Generator().manual_seed(step)
    words = torch.randint(0, 20, (12, 4), generator=drawn)
    return words, words.sum(1) % 3


def train_embedding_bag(
    context: RunContext, options: list[dict[str, Any]]
) -> list[list[torch.Tensor]]:
    """The weights for each set of options; SGD without momentum accepts sparse gradients."""
    hvd.init_with(context)
    weights = []
    for chosen in options:
        bag_options = dict(chosen)
        model = Bag(0)
        groups = bag_options.pop("by", None)
        if groups == "lists":
            bag_options["groups"] = [[model.head.weight, model.bag.weight], [model.side.bias]]
        plain = torch.optim.SGD(model.parameters(), lr=0.5)
        optimizer = hvd.DistributedOptimizer(plain, model.named_parameters(), **bag_options)
        for step in range(STEPS):
            words, targets = words_of(step)
            half = slice(6 * hvd.rank(), 6 * hvd.rank() + 6)
            out = model(words[half], aside=hvd.rank() == 0)
            nn.functional.cross_entropy(out, targets[half]).backward()
            optimizer.step()
            optimizer.zero_grad()
        weights.append([p.detach() for p in model.parameters()])
    return weights


def test_sparse_gradients_and_groups_give_the_same_weights():
    options: list[dict[str, Any]] = [
        {},
        {"sparse_as_dense": True},
        {"groups": 2},
        {"num_groups": 3, "sparse_as_dense": True},
        {"by": "lists"},
        {"by": "lists", "sparse_as_dense": True},
        {"op": hvd.Sum},
    ]
    model = Bag(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(STEPS):
        words, targets = words_of(step)
        optimizer.zero_grad()
        for rank in range(2):
            half = slice(6 * rank, 6 * rank + 6)
            out = model(words[half], aside=rank == 0)
            (nn.functional.cross_entropy(out, targets[half]) / 2).backward()
        optimizer.step()
    for results in run_ranks(train_embedding_bag, 2, options):
        for chosen, weights in zip(options, results, strict=True):
            same = [
                torch.allclose(weight, expected, rtol=0, atol=1e-12)
                for weight, expected in zip(weights, model.parameters(), strict=True)
            ]
            assert all(same) == ("op" not in chosen), chosen


def steps_of(context: RunContext) -> dict[str, Any]:
    """Unusual orders of backward passes and steps in a script."""
    hvd.init_with(context)
    me, results = hvd.rank(), {}
    model = net(0)
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    outer = hvd.add_process_set([0])
    optimizer = hvd.DistributedOptimizer(plain, backward_passes_per_step=2)

    def backward() -> None:
        model(rows(me, slice(0, 4))[0]).sum().backward()

    backward()
    with pytest.raises(ConfigError) as error:
        optimizer.zero_grad()
    results["zero"] = str(error.value)
    optimizer.step()  # after fewer passes than declared, as at the end of an epoch
    results["short"] = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    optimizer.zero_grad()
    optimizer.set_backward_passes_per_step(1)
    results["passes"] = optimizer.backward_passes_per_step
    backward()
    optimizer.load_state_dict(optimizer.state_dict())  # as after an abandoned step
    optimizer.zero_grad()
    backward()
    optimizer.synchronize()
    once = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    optimizer.step()  # without skip_synchronize; they must not be averaged again
    for before, parameter in zip(once, model.parameters(), strict=True):
        assert torch.equal(before, parameter.grad)
    results["weights"] = [p.detach().clone() for p in model.parameters()]
    own_model = net(0)
    mine = hvd.DistributedOptimizer(
        torch.optim.SGD(own_model.parameters(), lr=0.1), process_set=outer
    )
    own_model(rows(me, slice(0, 4))[0]).sum().backward()
    mine.step()
    results["own"] = [p.detach() for p in own_model.parameters()]
    return results


def test_steps_out_of_turn():
    first, second = run_ranks(steps_of, 2)
    for first_weight, second_weight in zip(first["weights"], second["weights"], strict=True):
        assert torch.equal(first_weight, second_weight)
    model = net(0)
    for rank in range(2):
        (model(rows(rank, slice(0, 4))[0]).sum() / 2).backward()
    for result in (first, second):
        assert "zero_grad() between backward() and step() would drop" in result["zero"]
        assert result["passes"] == 1
        for gradient, parameter in zip(result["short"], model.parameters(), strict=True):
            assert torch.allclose(gradient, parameter.grad, rtol=0, atol=1e-12)
    # Each alone, as rank 1 is not in the process set
    for rank, result in enumerate((first, second)):
        alone = net(0)
        alone(rows(rank, slice(0, 4))[0]).sum().backward()
        torch.optim.SGD(alone.parameters(), lr=0.1).step()
        for weight, expected in zip(result["own"], alone.parameters(), strict=True):
            assert torch.allclose(weight, expected, rtol=0, atol=1e-12)


def add_parameters_later(context: RunContext) -> list[str]:
    """Parameters that are added or unfrozen after the optimizer was made."""
    hvd.init_with(context)
    messages = []
    for is_added in (True, False):
        model = net(0)
        first, last = model[0], model[2]
        last.requires_grad_(is_added)
        parameters = first.parameters() if is_added else model.parameters()
        plain = torch.optim.SGD(parameters, lr=0.1)
        named = None if is_added else model.named_parameters()
        optimizer = hvd.DistributedOptimizer(plain, named)
        if is_added:
            optimizer.add_param_group({"params": last.parameters()})
        else:
            model(rows(0, slice(0, 4))[0]).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            last.requires_grad_(True)
        model(rows(0, slice(0, 4))[0]).sum().backward()
        with pytest.raises(ConfigError) as error:
            optimizer.step()
        messages.append(str(error.value))
    return messages


def test_gradients_that_would_not_be_averaged_are_refused():
    for added, unfrozen in run_ranks(add_parameters_later, 2):
        assert "hvd: a parameter of group 1 of shape [3, 16] was not trained when" in added
        assert "hvd: 2.weight of shape [3, 16] was not trained when" in unfrozen
        assert "Add groups and set requires_grad before that" in unfrozen


def average_metrics(context: RunContext) -> list[Any]:
    """Metrics exchanged without gradients, as in validation."""
    hvd.init_with(context)
    metrics = []
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            value = torch.tensor([float(hvd.rank())]) * 2
            metrics.append(hvd.allreduce(value, name="loss").item())
            metrics.append(hvd.allreduce_(value.clone(), op=hvd.Sum).item())
            metrics.append(hvd.allgather(value).tolist())
            metrics.append(hvd.broadcast(value, 1).item())
            metrics.append(hvd.broadcast_(value, 1).item())
            metrics.append(hvd.reducescatter(value.repeat(2)).item())
            metrics.append(hvd.alltoall(value.repeat(2)).tolist())
    return metrics


def test_metrics_are_exchanged_without_gradients():
    for metrics in run_ranks(average_metrics, 2):
        assert metrics == [1.0, 2.0, [0.0, 2.0], 2.0, 2.0, 2.0, [2.0, 2.0]] * 2


def test_arguments_of_the_optimizer_are_checked(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    hvd.init()
    model = net(0)
    parameters = list(model.parameters())
    pairs = list(model.named_parameters())
    refused: list[tuple[str, dict[str, Any]]] = [
        ("named_parameters has Parameter in it, and", {"named_parameters": parameters}),
        ("has '0.weight' twice", {"named_parameters": [*pairs, pairs[0]]}),
        (
            r"1 of the optimizer's 4 parameters are not .* shape \[16, 5\]",
            {"named_parameters": pairs[1:]},
        ),
        ("groups=-1, and a number above 0", {"groups": -1}),
        (r"groups\[0\] has str in it", {"groups": [["a"]]}),
        (r"is in groups\[0\] and in groups\[1\]", {"groups": [parameters[:1], parameters[:1]]}),
        (
            "gradient_predivide_factor=2.0 with op=sum",
            {"op": hvd.Sum, "gradient_predivide_factor": 2.0},
        ),
        ("compression=None has no compress", {"compression": None}),
    ]
    for message, options in refused:
        with pytest.raises(ConfigError, match=message):
            hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=0.1), **options)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=0.1), num_groups=2)
    with pytest.raises(ConfigError, match="is one already. Wrap it once"):
        hvd.DistributedOptimizer(optimizer)
    with pytest.raises(
        ConfigError, match=r"set_backward_passes_per_step\(0\), and a step needs at least 1"
    ):
        optimizer.set_backward_passes_per_step(0)
