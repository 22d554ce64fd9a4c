"""Unusual code in models either works on slices or is refused by name."""

import copy
import gc
import io
import pickle
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from support.ranks import run_ranks
from support.sliced import compared, slice_group, sliced_copy
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from bigtrain.activations.recompute import checkpoint_block
from bigtrain.errors import ConfigError
from bigtrain.slicing.exchange import copied_to_ranks, reduce_scatter
from bigtrain.slicing.sliced_tensor import SlicedTensor, is_sliced
from bigtrain.slicing.slices import Slices, SliceSection

WIDTH, INNER = 6, 10
COLUMNS, ROWS = Slices.even(0, INNER), Slices.even(1, INNER)
SLICES = {"up.weight": COLUMNS, "up.bias": COLUMNS, "down.weight": ROWS}


class Layers(nn.Module):
    """Two layers, the first sliced by columns and the second by rows."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class Changed(Layers):
    """Inputs that all ranks use are changed in place between their uses."""

    def forward(self, x):
        x = x * 1
        y = self.down(F.gelu(self.up(x)))
        x = x.detach().requires_grad_() * 1
        with torch.no_grad():
            x.add_(1.0)
        y = y + super().forward(x)
        x.data = x.data * 2
        y = y + super().forward(x)
        x = y * 1
        x.mul_(0.5)
        return super().forward(x) + super().forward(x)


class Recomputed(Layers):
    def __init__(self, of_sliced):
        super().__init__()
        self.of_sliced = of_sliced

    def forward(self, x):
        if self.of_sliced:
            return self.down(checkpoint(lambda h: F.gelu(h) * 2, self.up(x), use_reentrant=False))
        x = x * 1
        x = x + checkpoint(super().forward, x, use_reentrant=False)
        return x + checkpoint(super().forward, x.clone(), use_reentrant=True)


class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.cell = kind(WIDTH, INNER, num_layers=2, batch_first=True)

    def forward(self, x):
        return self.cell(x)[0]


class Normed(nn.Module):
    """Weights that are computed from other parameters."""

    def __init__(self):
        super().__init__()
        self.up = parametrizations.weight_norm(nn.Linear(WIDTH, INNER))
        self.down = parametrizations.spectral_norm(nn.Linear(INNER, WIDTH))

    def forward(self, x):
        return self.down(torch.tanh(self.up(x)))


class Direct(Layers):
    """Accesses its parameters and buffers in unusual ways."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(INNER))
        self.scales = nn.ParameterList([nn.Parameter(torch.randn(INNER)) for _ in range(2)])
        self.shifts = nn.ParameterDict({"a": nn.Parameter(torch.randn(INNER))})

    def forward(self, x):
        up = self.up._parameters.get("weight")
        hidden = F.linear(x, up, self.up._parameters["bias"])
        self.mean = 0.9 * self.mean + 0.1 * hidden.detach().mean((0, 1))
        self.mean.mul_(1.5)
        for scale in self.scales:
            hidden = hidden * scale
        hidden = hidden + self.shifts["a"] - self.mean
        return self.down(hidden) + up.pow(2).mean() * next(self.down.parameters()).new_ones(())


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, INNER, bias=False)
        self.second = nn.Linear(WIDTH, INNER, bias=False)
        self.second.weight = self.first.weight

    def forward(self, x):
        return F.linear(self.first(x), self.first.weight.t()) + self.second(x) @ self.second.weight


@dataclass
class Answer:
    hidden: torch.Tensor
    rest: dict


class Hooked(Layers):
    """Its hooks see whole shapes, and their results are used."""

    def __init__(self):
        super().__init__()
        self.up.register_forward_pre_hook(lambda _, args: (args[0] * 2,))
        self.up.register_forward_hook(lambda own, _, out: out * own.weight.shape[0])

    def forward(self, x):
        hidden = self.up(x)
        if hidden.requires_grad:
            hidden.register_hook(lambda gradient: gradient * 3)
        answer = Answer(hidden, {"twice": hidden * 2})
        return self.down(answer.hidden + answer.rest["twice"])


def run(model):
    x = torch.linspace(-1, 1, 4 * 3 * WIDTH, dtype=torch.float64).view(4, 3, WIDTH)
    out = model(x.requires_grad_())
    return out, out.pow(2).sum()


def make_double(make, *args):
    """Make a module in float64, with the same values each time."""
    torch.manual_seed(0)
    return make(*args).double()


def all_slices(model, ranks):
    """Every tensor that can be sliced, sliced on its first dim."""
    named = (*model.named_parameters(), *model.named_buffers())
    return {
        name: Slices.even(0, tensor.shape[0])
        for name, tensor in named
        if tensor.dim() and tensor.shape[0] >= ranks
    }


def compare_unusual_models(context):
    group = slice_group(context)
    results = {}

    def note(name, model, slices, steps=1):
        results[name] = compared(model, run, slices, group, steps)

    note("changed", make_double(Changed), SLICES)
    note("recomputed", make_double(Recomputed, False), SLICES)
    note("recomputed, sliced", make_double(Recomputed, True), SLICES)
    for kind in (nn.LSTM, nn.GRU, nn.RNN):
        model = make_double(Recurrent, kind)
        note(kind.__name__, model, all_slices(model, group.size))
    model = make_double(Normed)
    note("normed", model, all_slices(model, group.size), steps=2)
    inner = ("mean", "scales.0", "scales.1", "shifts.a")
    note("direct", make_double(Direct), {**SLICES, **dict.fromkeys(inner, COLUMNS)}, steps=2)
    note("tied", make_double(Tied), {"second.weight": COLUMNS})
    note("hooked", make_double(Hooked), SLICES)
    return results


def test_what_models_do_is_right_on_slices():
    for results in run_ranks(compare_unusual_models, 2, tp=2):
        for name, result in results.items():
            assert not result.error, f"{name}: {result.error}"
            assert result.worst < 1e-12, (name, result)


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


class Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.sum()

    @staticmethod
    def backward(ctx, gradient):
        return gradient.expand(4, 3, INNER)


def refusals(context):
    group, messages = slice_group(context), {}
    model = sliced_copy(make_double(Layers), SLICES, group)
    x = torch.ones(4, 3, WIDTH, dtype=torch.float64)
    hidden = model.up(x)

    def note(name, call):
        try:
            call()
        except ConfigError as error:
            messages[name] = str(error)

    note("its result", lambda: Double.apply(hidden) + 1)
    note("its gradient", lambda: Total.apply(hidden).backward())
    recomputed = checkpoint(F.gelu, hidden, use_reentrant=True)
    note("reentrant", lambda: model.down(recomputed))
    note("dispatch", lambda: add_by_dispatch(hidden))
    note("pickle", lambda: pickle.dumps(model))
    note("save", lambda: torch.save(model.up, io.BytesIO()))
    note("shape", lambda: (hidden * 1).unsqueeze_(0))
    note("data", lambda: setattr(hidden, "data", hidden * 2))
    note("buffer", lambda: setattr(model.up, "weight", torch.zeros(3, 3)))
    two = {"first.weight": COLUMNS, "second.weight": Slices.even(1, WIDTH)}
    note("two ways", lambda: sliced_copy(make_double(Tied), two, group))
    few = {"up.weight": Slices(0, (SliceSection(INNER, INNER),))}
    note("few", lambda: sliced_copy(make_double(Layers), few, group))
    return messages


def add_by_dispatch(hidden):
    """Add without torch functions, so that only the dispatcher sees it."""
    with torch._C.DisableTorchFunctionSubclass():
        return torch.add(hidden, 1)


REFUSED = {
    "its result": "DoubleBackward, a torch.autograd.Function of the model, is given",
    "its gradient": "a torch.autograd.Function of the model was given a sliced tensor",
    "reentrant": "CheckpointFunctionBackward, .*Recompute with use_reentrant=False",
    "dispatch": "aten.add.Tensor is called on a sliced tensor where no rule can see it",
    "pickle": "Linear holds this rank's slices and is not pickled",
    "save": "Linear holds this rank's slices and is not pickled",
    "shape": "unsqueeze_ changes the shape or the type",
    "data": "`data` or `grad` of a sliced tensor is set",
    "buffer": r"Linear.weight is sliced, 10 long in dim 0, and is set to a tensor of \[3, 3\]",
    "two ways": "first.weight and second.weight are one tensor, and are sliced in two ways",
    "few": r"up.weight can be sliced over 1 ranks at most, and mesh.tp=2.*keep=\[up\]",
}


def test_what_cannot_be_right_is_refused_by_name():
    for messages in run_ranks(refusals, 2, tp=2):
        assert messages.keys() == REFUSED.keys()
        for name, words in REFUSED.items():
            with pytest.raises(ConfigError, match=words):
                raise ConfigError(messages[name])


def compare_modes_and_copies(context):
    group, results = slice_group(context), {}
    whole = make_double(Layers)
    model = sliced_copy(whole, SLICES, group)
    x = torch.linspace(-1, 1, 12 * WIDTH, dtype=torch.float64).view(4, 3, WIDTH)

    def difference(expected, actual):
        return (expected - actual).abs().max().item()

    copied = copy.deepcopy(model)
    with torch.no_grad():
        copied.up.weight.mul_(2)
    wanted = whole(x)
    results["deepcopy is apart"] = difference(model(x), wanted)
    copied.load_state_dict(model.state_dict())
    results["deepcopy"] = difference(copied(x), wanted)
    results["same group"] = float(copied.up._bigtrain_slice_group is not group)
    with torch.no_grad():
        results["no_grad"] = difference(model(x), wanted)
    with torch.inference_mode():
        results["inference"] = difference(model(x), wanted)
        changed = model.up(x)
        changed.diagonal(0, 1, 2).zero_()
        plain = whole.up(x)
        plain.diagonal(0, 1, 2).zero_()
        results["inference, in place"] = difference(changed.whole(), plain)
        results["inference, einsum"] = difference(
            torch.einsum("ab,b->a", model.up.weight, x[0, 0]).whole(), whole.up.weight @ x[0, 0]
        )
    results["sliced still"] = float(not is_sliced(model.up(x)))
    hidden = copy.deepcopy(model.up(x).detach())
    results["deepcopy of a tensor"] = difference(hidden.whole(), whole.up(x))
    with torch.autocast("cpu", torch.bfloat16):
        expected, actual = whole.float()(x.float()), model.float()(x.float())
    results["autocast"] = difference(expected, actual) / expected.abs().max().item() / 40
    results["autocast, type"] = float(expected.dtype is not actual.dtype)
    return results


def test_modes_and_copies():
    for differences in run_ranks(compare_modes_and_copies, 2, tp=2):
        assert {name: value for name, value in differences.items() if not value < 1e-3} == {}


def alive_tensors(context):
    """Tensors that are alive after this many steps, and the cache of `copied_to_ranks` for one."""
    group = slice_group(context)
    model = sliced_copy(make_double(Direct), {**SLICES, "mean": COLUMNS}, group)
    counts = []
    gc.collect()
    gc.disable()
    try:
        for step in range(20):
            _, loss = run(model)
            loss.backward()
            model.zero_grad()
            del loss, _
            if step > 3:
                counts.append(sum(isinstance(o, torch.Tensor) for o in gc.get_objects()))
    finally:
        gc.enable()
    whole = torch.ones(3, requires_grad=True)
    twice = copied_to_ranks(whole, group) is copied_to_ranks(whole, group)
    first_copy = copied_to_ranks(whole, group)
    whole.data = torch.zeros(3)
    second_copy = copied_to_ranks(whole, group)
    return (
        counts,
        twice,
        bool((second_copy == first_copy).any()),
        isinstance(first_copy, SlicedTensor),
    )


def test_nothing_is_left_after_a_step_and_nothing_stale_is_used():
    for counts, twice, is_stale, _ in run_ranks(alive_tensors, 2, tp=2):
        # The backend's thread may keep the last sent tensor alive; a leak would keep one per step.
        assert min(counts[-8:]) <= min(counts[:8]) + 1, counts
        assert not is_stale
        assert twice


class Dropping(Layers):
    def __init__(self, recomputes):
        super().__init__()
        self.recomputes = recomputes

    def middle(self, hidden):
        return F.dropout(F.gelu(hidden), 0.5)

    def forward(self, x):
        hidden = self.up(x)
        if self.recomputes:
            return self.down(checkpoint(self.middle, hidden, use_reentrant=False))
        return self.down(self.middle(hidden))


def drawn_numbers(context):
    """Gradients with dropout, recomputed or not; dropped elements; numbers drawn afterwards."""
    group = slice_group(context)
    gradients = []
    for recomputes in (False, True):
        model = sliced_copy(make_double(Dropping, recomputes), SLICES, group)
        torch.manual_seed(3)
        run(model)[1].backward()
        gradients.append([p.grad for p in model.parameters()])
    ones = SlicedTensor.of(torch.ones(200, 150), Slices.even(1, 300), group)
    dropped = (F.dropout(ones, 0.3).local == 0).float()
    channels = SlicedTensor.of(torch.ones(40, 50, 3), Slices.even(2, 6), group)
    common = F.dropout1d(channels, 0.3).local[:, :, 0]
    noise = torch.empty_like(ones).normal_()
    whole = ones * torch.rand_like(ones)
    return gradients, dropped, common, noise.whole(), whole.whole(), torch.rand(3)


def test_random_numbers_of_slices_are_a_ranks_own_and_all_others_common():
    first, second = run_ranks(drawn_numbers, 2, tp=2)
    for once, again in (first[0], second[0]):
        assert all(
            torch.equal(first_numbers, second_numbers)
            for first_numbers, second_numbers in zip(once, again, strict=True)
        )
    for result in (first, second):
        assert 0.28 < result[1].mean() < 0.32
    assert 0.3 < (first[1] != second[1]).float().mean() < 0.55  # 2 * 0.3 * 0.7 are expected
    for first_numbers, second_numbers in zip(first[2:], second[2:], strict=True):
        assert torch.equal(first_numbers, second_numbers)


class Block(Layers):
    """Its parts are recomputed, around a sliced buffer and saved matrix products."""

    def __init__(self, selective, changes):
        super().__init__()
        self.selective, self.changes = selective, changes
        self.down = nn.Linear(INNER, WIDTH, bias=False)
        self.register_buffer("mean", torch.randn(INNER))

    def inside(self, x):
        y = self.down(F.relu(self.up(x) - self.mean, inplace=True))
        return y.relu_() if self.changes else y * 2

    def forward(self, x):
        x = x * 1
        return x + checkpoint_block(self, self.inside, x, selective=self.selective)


def recomputed_blocks(context):
    group, slices = slice_group(context), {**SLICES, "mean": COLUMNS}
    results = [compared(make_double(Block, mode, False), run, slices, group) for mode in (0, 1)]
    results.append(compared(make_double(Block, False, True), run, slices, group))
    with pytest.raises(ConfigError, match="selective saves the results of matrix products"):
        run(sliced_copy(make_double(Block, True, True), slices, group))
    return results


def test_blocks_of_slices_are_computed_again():
    for results in run_ranks(recomputed_blocks, 2, tp=2):
        for result in results:
            assert not result.error, result.error
            assert result.worst < 1e-12, result


def change_exchange_results(context):
    """Parts with a different memory order, and sums that are changed in place."""
    group = slice_group(context, sequence_dim=1)
    slices = Slices.even(1, 4)
    partial = torch.arange(120.0).view(2, 5, 3, 4).permute(0, 3, 1, 2)
    shard = reduce_scatter(partial, slices, group)
    model = sliced_copy(make_double(Layers), SLICES, group)
    x = torch.linspace(-1, 1, 15 * WIDTH, dtype=torch.float64).view(3, 5, WIDTH).requires_grad_()
    hidden = model.up(x)
    hidden += 1
    out = model.down(F.relu(hidden, inplace=True))
    out.mul_(2).sum().backward()
    return shard - slices.local(partial, group.rank, group.size) * group.size, x.grad


def test_results_of_exchanges_have_any_memory_order_and_may_be_changed():
    whole = make_double(Layers)
    x = torch.linspace(-1, 1, 15 * WIDTH, dtype=torch.float64).view(3, 5, WIDTH).requires_grad_()
    (whole.down(F.relu(whole.up(x) + 1)) * 2).sum().backward()
    for difference, gradient in run_ranks(change_exchange_results, 2, tp=2):
        assert not difference.any()
        assert (gradient - x.grad).abs().max() < 1e-12
