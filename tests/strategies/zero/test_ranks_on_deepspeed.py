"""ZeRO on DeepSpeed: the numbers of one process, memory as predicted, one format of checkpoints."""

from __future__ import annotations

import functools
from importlib.util import find_spec
from itertools import product

import pytest
import torch
from support.continued import continue_run
from support.nets import Gained, Sometimes, TinyConv, TinyLM, tokens
from support.parity import Record, adamw, largest_difference, sgd, train
from support.peaks import text, wide_model
from support.ranks import RankFailure, run_ranks
from support.whole import assert_same_tensors, whole_tensors
from torch import nn
from torch.utils.checkpoint import checkpoint

from bigtrain.data import MicroBatch
from bigtrain.data.source import TensorSamples
from bigtrain.engine.engine import Engine
from bigtrain.errors import NonFiniteError
from bigtrain.job.load import job_from_keys
from bigtrain.losses.loss import CrossEntropy

# Not imported here: the ranks import this module, and must load DeepSpeed as a run does.
pytestmark = pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is missing")

OFFLOADED = ["zero2_offload", "zero3_offload"]
STAGES = ["zero1", "zero2", "zero3"]
CLIP = {"optim.clip_norm": 0.5}


class Recomputed(TinyLM):
    """Its block is recomputed in the backward pass."""

    def forward(self, tokens):
        x = self.embedding(tokens)
        x = x + checkpoint(self.block, x, use_reentrant=False)
        return self.head(x)

    def block(self, x):
        return self.down(torch.relu(self.up(self.norm(x))))


def train_cases(context, strategy, cases):
    """One record for each case, in one set of ranks: starting DeepSpeed takes longer than a run."""
    records = []
    for model, keys, steps, optimizer in cases:
        records.append(train(context, model, tokens(22), strategy, keys, steps, optimizer))
    return records


BF16 = {**CLIP, "train.precision": "bf16"}
CASES = {
    "whole batch": (TinyLM, CLIP, 6, sgd),
    "accumulating": (TinyLM, {**CLIP, "train.micro_batch_size": 1}, 6, sgd),
    "recomputing": (Recomputed, {**CLIP, "train.micro_batch_size": 2}, 6, sgd),
    "large buckets": (TinyLM, {**CLIP, "strategy.replicate.bucket_size": "1MiB"}, 6, sgd),
    "adamw": (TinyLM, {}, 10, adamw),
    "bf16": (TinyLM, BF16, 6, sgd),
    "bf16, accumulating": (TinyLM, {**BF16, "train.micro_batch_size": 2}, 6, sgd),
}


@pytest.fixture(scope="module")
def one_process() -> dict[str, Record]:
    plain = {
        name: (model, {k: v for k, v in keys.items() if "bucket" not in k}, *how)
        for name, (model, keys, *how) in CASES.items()
    }
    records = run_ranks(train_cases, 1, "single", list(plain.values()))[0]
    return dict(zip(CASES, records, strict=True))


@pytest.mark.parametrize(
    ("strategy", "world_size"),
    [*product(STAGES, [2]), ("zero3", 4), *product(STAGES[:2], [4])],
)
def test_it_equals_one_process(one_process, strategy, world_size):
    short = ("accumulating", "adamw")
    cases = {name: case for name, case in CASES.items() if world_size == 2 or name in short}
    ranks = run_ranks(train_cases, world_size, strategy, list(cases.values()), timeout_s=120.0)
    for records in ranks:
        for name, record in zip(cases, records, strict=True):
            expected = one_process[name]
            if name == "adamw":
                assert record.losses == pytest.approx(expected.losses, abs=2e-6)
            elif name.startswith("bf16"):
                assert record.losses == pytest.approx(expected.losses, rel=5e-3)
                assert all(t.dtype == torch.float32 for t in record.weights.values())
            else:
                assert largest_difference(expected, record) < 1e-5, name


@pytest.mark.parametrize("strategy", OFFLOADED)
def test_its_own_offload_equals_one_process(one_process, strategy):
    names = ("accumulating", "adamw")
    ranks = run_ranks(train_cases, 2, strategy, [CASES[name] for name in names])
    for accumulated, adaptive in ranks:
        assert largest_difference(one_process["accumulating"], accumulated) < 1e-5
        assert adaptive.losses == pytest.approx(one_process["adamw"].losses, abs=2e-6)


def in_two_groups(parameters):
    parameters = list(parameters)
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=1e-2)


class Frozen(TinyLM):
    """A norm that is not trained, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm.requires_grad_(False)
        self.register_buffer("scale", torch.full((1,), 0.5))

    def forward(self, tokens):
        return super().forward(tokens) * self.scale


def train_runs(context, strategy, runs):
    """For each run: losses with changing rates and an evaluation between the steps, and
    the state.
    """
    results = []
    samples, size = tokens(8), 8 // context.world_size
    mine = slice(context.rank * size, (context.rank + 1) * size)
    batch = samples.inputs[mine], samples.targets[mine]
    for model, optimizer, keys in runs:
        job = job_from_keys(strategy, {"train.global_batch_size": 8, **keys})
        how = {"learning_rate": (1e-2, 5e-3, 1e-3, 2e-2).__getitem__}
        with Engine(model, CrossEntropy(), optimizer, job, context, **how) as engine:
            losses = []
            for _ in range(4):
                losses.append(engine.step(batch).loss)
                engine.evaluate([MicroBatch(*batch, engine.loss.count(batch[1]), size)])
            state = whole_tensors(engine.runner.state())
        results.append((losses, state))
    return results


RUNS = [(TinyLM, in_two_groups, {}), (Frozen, adamw, {}), (Frozen, sgd, {})]


@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_groups_rates_frozen_parameters_and_evaluation(strategy):
    for single, two in zip(
        run_ranks(train_runs, 1, "single", RUNS)[0],
        run_ranks(train_runs, 2, strategy, RUNS, timeout_s=120.0)[1],
        strict=True,
    ):
        assert two[0] == pytest.approx(single[0], abs=2e-6)
        assert single[1].keys() == two[1].keys()
        for name, tensor in single[1].items():
            assert (tensor - two[1][name]).abs().max() < 1e-4, name


def images() -> TensorSamples:
    generator = torch.Generator().manual_seed(3)
    return TensorSamples(torch.randn(16, 1, 8, 8, generator=generator), torch.arange(16) % 3)


def convolving(context, strategy, precision):
    keys = {"train.precision": precision}
    return train(context, TinyConv, images(), strategy, keys, 4)


@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_buffers_follow_the_first_rank_as_under_ddp(strategy):
    ddp = run_ranks(convolving, 2, "ddp", "fp32")[0]
    record = run_ranks(convolving, 2, strategy, "fp32")[0]
    assert largest_difference(ddp, record) < 1e-5
    with pytest.raises(
        AssertionError, match="BatchNorm2d takes no bf16 weights.*--strategy zero1_torch"
    ):
        run_ranks(convolving, 2, strategy, "bf16")


WAYS = [
    ("ddp", 2, "zero3", 4, adamw, "fp32"),
    ("zero3", 2, "ddp", 1, adamw, "fp32"),
    ("zero1", 4, "zero2", 2, sgd, "fp32"),
    ("zero2", 2, "zero3", 2, sgd, "fp32"),
    ("zero3", 2, "zero1", 2, adamw, "bf16"),
]
NUMBERS = [("ddp", 2, "zero1", 2, adamw, "fp32"), ("zero2", 2, "zero1_torch", 2, adamw, "fp32")]


@pytest.mark.parametrize(
    "direction",
    WAYS + NUMBERS,
    ids=lambda way: f"{way[0]}-{way[2]}-{way[5]}",
)
def test_a_checkpoint_goes_from_one_strategy_to_another(direction, tmp_path):
    saver, savers, loader, loaders, optimizer, precision = direction
    about = (precision, Gained if direction in NUMBERS else TinyLM)
    saved = run_ranks(continue_run, savers, saver, tmp_path / "a", optimizer, None, *about)
    path, losses = saved[0]
    again = run_ranks(continue_run, loaders, loader, tmp_path / "b", optimizer, path, *about)
    for _, rank_losses in again:
        close = {"abs": 2e-6} if precision == "fp32" else {"rel": 5e-3}
        assert rank_losses == pytest.approx(losses, **close)
    # A checkpoint written right after loading equals the loaded one, file by file.
    assert_same_tensors(path, again[0][0])


MIXED = [
    (Sometimes, {**CLIP, "train.micro_batch_size": 2}, 4, sgd),
    (Gained, CLIP, 4, sgd),
]


@pytest.fixture(scope="module")
def mixed() -> list[Record]:
    unused = {"strategy.replicate.find_unused_parameters": True}
    cases = [(model, {**keys, **unused}, *how) for model, keys, *how in MIXED]
    return run_ranks(train_cases, 2, "ddp", cases)[0]


@pytest.mark.parametrize("strategy", [*STAGES, *OFFLOADED])
def test_a_micro_batch_may_do_without_a_parameter(mixed, strategy):
    for records in run_ranks(
        train_cases, 2, strategy, [(*c[:3], sgd) for c in MIXED], timeout_s=120.0
    ):
        for single, record in zip(mixed, records, strict=True):
            assert record.losses == pytest.approx(single.losses, abs=2e-6)
            for name, weight in single.weights.items():
                assert (record.weights[name] - weight).abs().max() < 1e-5, name


def test_a_step_may_not_do_without_a_parameter():
    """DeepSpeed would continue its momentum and weight decay, so this is refused with
    alternatives.
    """
    with pytest.raises(RankFailure, match=r"not every pass uses extra .*Use --strategy fsdp_zero2"):
        run_ranks(train_cases, 2, "zero2", [(Sometimes, {}, 4, sgd)], timeout_s=120.0)


class Overflowing(TinyLM):
    """Its loss is NaN from the second step."""

    def forward(self, tokens):
        self.calls = getattr(self, "calls", 0) + 1
        return super().forward(tokens) * (float("inf") if self.calls > 1 else 1.0)


def overflowing(context, strategy):
    samples = tokens(8, ignored=False)
    job = job_from_keys(strategy, {"train.global_batch_size": 16, "memory.predict": False})
    with Engine(Overflowing, CrossEntropy(), sgd, job, context) as engine:
        batch = samples.inputs, samples.targets
        engine.step(batch)
        before = whole_tensors(engine.runner.state())["model.up.weight"]
        with pytest.raises(NonFiniteError, match="step 2: the loss of rank 0 is (nan|inf)"):
            engine.step(batch)
        return torch.equal(before, whole_tensors(engine.runner.state())["model.up.weight"])


@pytest.mark.parametrize("strategy", ["zero1", "zero3"])
def test_a_loss_that_is_no_number_stops_before_the_update(strategy):
    assert run_ranks(overflowing, 2, strategy) == [True, True]


def deep() -> nn.Module:
    return nn.Sequential(
        nn.Embedding(13, 64), *(nn.Linear(64, 64) for _ in range(24)), nn.Linear(64, 13)
    )


def peaks_after_steps(context, strategy, cases):
    """For each case (peak while building, predicted, measured), after three steps."""
    peaks = []
    for model, optimizer, keys, repeats in cases:
        inputs, targets = (t.repeat(repeats, 1) for t in text())
        keys = {"train.global_batch_size": len(inputs) * context.world_size, **keys}
        keys["train.micro_batch_size"] = len(inputs) // repeats
        job, loss = job_from_keys(strategy, keys), CrossEntropy()
        size = len(inputs) // repeats
        example = MicroBatch(inputs[:size], targets[:size], loss.count(targets[:size]), size)
        with Engine(model, loss, optimizer, job, context, example=example) as engine:
            built = engine.meter.peak_bytes()
            for _ in range(3):
                engine.step((inputs.clone(), targets.clone()))
            peaks.append((built, engine.prediction.peak, engine.meter.measured().peak))
    return peaks


MEASURED = [
    (wide_model, adamw, {}, 1),
    (wide_model, adamw, {"train.precision": "bf16"}, 1),
    (wide_model, adamw, {}, 2),
    (wide_model, adamw, {"train.precision": "bf16", "optim.clip_norm": 1.0}, 2),
    (wide_model, sgd, {"strategy.replicate.bucket_size": "256KiB"}, 1),
]


@pytest.mark.parametrize(
    ("strategy", "world_size"),
    [
        *(("zero1", 2), ("zero3", 2)),
        ("zero2", 2),
        ("zero3", 4),
        ("zero1", 4),
    ],
)
def test_the_peak_of_every_rank_is_predicted(strategy, world_size):
    cases = MEASURED[:4] if world_size == 2 else MEASURED[:2]
    ranks = run_ranks(peaks_after_steps, world_size, strategy, cases, timeout_s=120.0)
    for number, _ in enumerate(cases):
        peaks = [measured_peaks[number][2].bytes for measured_peaks in ranks]
        for measured_peaks, peak in zip(ranks, peaks, strict=True):
            predicted = measured_peaks[number][1]
            # Under stage 3 all ranks are equal, except for what gloo's threads keep alive for a
            # moment.
            real = min(peaks) if "3" in strategy else peak
            slack = 0.05 if real == max(peaks) else 0.07
            assert predicted.bytes == pytest.approx(real, rel=slack), (number, predicted, peaks)
            assert predicted.phase == "backward"


class Experts(nn.Module):
    """Experts in two parameters of one module: products with views of them instead of linear
    layers.
    """

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(8, 128, 64) / 8)
        self.down = nn.Parameter(torch.randn(8, 64, 128) / 8)

    def forward(self, x):
        every = x.reshape(1, -1, 64).expand(8, -1, -1)
        inner = torch.bmm(every, self.up.transpose(1, 2)).relu()
        return x + torch.bmm(inner, self.down.transpose(1, 2)).mean(0).view_as(x)


def experts() -> nn.Module:
    return nn.Sequential(nn.Embedding(13, 64), *(Experts() for _ in range(3)), nn.Linear(64, 13))


def test_parameters_that_are_used_by_views_stay_whole_and_that_is_predicted():
    for peaks in run_ranks(
        peaks_after_steps, 2, "zero3", [(experts, adamw, {}, 1)], timeout_s=120.0
    ):
        _, predicted, reached = peaks[0]
        # Too high by at most one parameter and its gradient: measured 4.2%.
        assert -0.005 < predicted.bytes / reached.bytes - 1 < 0.05
        # After the forward pass these three tensors of both experts are still alive.
        assert predicted.breakdown.parameters > 3 * 2 * 8 * 128 * 64 * 4


class Attention(nn.Module):
    """torch's attention module, which detects self-attention by `is`."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(128, 4, batch_first=True)

    def forward(self, x):
        return x + self.attention(x, x, x, need_weights=False)[0]


class LastChannel(nn.Module):
    """A convolution in channels-last order, whose gradient has that order, too."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(128, 128, 3, padding=1)

    def forward(self, x):
        return x + self.conv(x[:, :, None].permute(0, 3, 1, 2)).permute(0, 2, 3, 1)[:, :, 0]


def stack_of(block) -> nn.Module:
    return nn.Sequential(nn.Embedding(13, 128), *(block() for _ in range(3)), nn.Linear(128, 13))


@pytest.mark.parametrize(
    ("strategy", "block", "keys", "repeats"),
    [
        ("zero3", Attention, {"train.precision": "bf16"}, 1),
        ("ddp", LastChannel, {}, 1),
        ("zero2", LastChannel, {}, 2),
    ],
)
def test_what_hooks_and_layouts_keep_is_predicted(strategy, block, keys, repeats):
    cases = [(functools.partial(stack_of, block), adamw, keys, repeats)]
    for peaks in run_ranks(peaks_after_steps, 2, strategy, cases, timeout_s=120.0):
        _, predicted, reached = peaks[0]
        assert predicted.phase == "backward"
        assert predicted.bytes == pytest.approx(reached.bytes, rel=0.005)


@pytest.mark.parametrize("strategy", ["zero1", "zero2"])
def test_with_the_state_on_the_host_the_peak_is_predicted_but_for_scalars(strategy):
    cases = [
        (model, optimizer, {**keys, "strategy.offload.optimizer": "cpu"}, repeats)
        for model, optimizer, keys, repeats in MEASURED[:4]
    ]
    for peaks in run_ranks(peaks_after_steps, 2, strategy, cases, timeout_s=120.0):
        for _built, predicted, reached in peaks:
            assert predicted.bytes == pytest.approx(reached.bytes, abs=64)


def test_each_stage_holds_less_and_stage_3_is_built_in_shards():
    peak = {}
    whole = sum(p.nbytes for p in deep().parameters())
    for strategy in ("ddp", *STAGES):
        ranks = run_ranks(peaks_after_steps, 2, strategy, [(deep, adamw, {}, 2)])
        peak[strategy] = max(peaks[0][2].bytes for peaks in ranks)
    assert peak["ddp"] > peak["zero1"] > peak["zero2"] > peak["zero3"]
    # Shards, copies of shards that DeepSpeed makes while building, and one layer.
    for peaks in run_ranks(peaks_after_steps, 4, "zero3", [(deep, adamw, {}, 1)], timeout_s=120.0):
        assert peaks[0][0] < whole


def norms_after_unused_pass(context, strategies):
    """Gradient norms of a step, after a pass that was not followed by an update."""
    norms = []
    for strategy in strategies:
        job = job_from_keys(strategy, {"train.global_batch_size": 4, "memory.predict": False})
        samples = tokens(4, ignored=False)
        with Engine(TinyLM, CrossEntropy(), sgd, job, context) as engine:
            batch, _ = engine._micro_batches((samples.inputs, samples.targets))
            engine.runner.forward_backward(batch)
            engine.runner.forget_gradients()
            engine.runner.forward_backward(batch)
            norms.append(float(engine.runner.update()))
    return norms


def test_passes_without_an_update_are_forgotten():
    strategies = ["single", "zero1", "zero2", "zero3", "zero2_offload"]
    (norms,) = run_ranks(
        norms_after_unused_pass, 1, strategies, flavour="deepspeed", force_group=True
    )
    assert norms == pytest.approx([norms[0]] * len(norms), rel=1e-6)
