"""Replicas synchronize as a few lines of torch would: averages, and DiLoCo's outer step,
with delay.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
import yaml
from support.continued import continue_run
from support.nets import TinyLM, tokens
from support.parity import adamw, largest_difference, train
from support.peaks import assert_same_parts, peaks, text, wide_model
from support.ranks import run_ranks
from support.whole import assert_same_tensors
from torch.nn import functional

from bigtrain.assembly.make_plan import make_plan
from bigtrain.checkpoint.read import Checkpoint
from bigtrain.data import GlobalOrder, StepLoader
from bigtrain.engine.engine import Engine
from bigtrain.errors import ConfigError
from bigtrain.job.load import job_from_keys
from bigtrain.losses.loss import CrossEntropy

OPTION = "strategy.replicate."
plain_sgd = partial(torch.optim.SGD, lr=0.1, weight_decay=1e-2)
momentum_sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def loader(samples, rank, size):
    order = GlobalOrder(len(samples), 8, seed=3)
    rows, count = 8 // size, CrossEntropy().count
    return StepLoader(
        samples, order, count=count, dp_rank=rank, dp_size=size, micro_batch_size=rows
    )


def train_replica(context, keys, steps):
    """The initial weights, the losses, and this replica's final weights."""
    job = job_from_keys("local_sgd", {"train.global_batch_size": 8, **keys})
    with Engine(TinyLM, CrossEntropy(), momentum_sgd, job, context) as engine:
        before = {n: p.detach().clone() for n, p in engine.model.named_parameters()}
        batches = loader(tokens(22), context.dp_rank, context.dp_size)
        losses = [engine.step(b).loss for _, b in zip(range(steps), batches, strict=False)]
        return before, losses, {n: p.detach() for n, p in engine.model.named_parameters()}


def plain_local_sgd(before, steps, replicas, every, outer=False, fragments=1, delay=0, mixing=0.0):
    """The same in one process, with torch's optimizers and one outer optimizer for each
    fragment.
    """
    models = [TinyLM().double() for _ in range(replicas)]
    for model in models:
        model.load_state_dict(before, strict=False)
    inner = [momentum_sgd(model.parameters()) for model in models]
    names = list(before)
    sizes = torch.tensor([before[n].numel() for n in names])
    middles = sizes.cumsum(0) - sizes + sizes // 2
    bounds = [round(int(sizes.sum()) * f / fragments / 64) * 64 for f in range(fragments)]
    owner = [max(f for f in range(fragments) if bounds[f] <= m) for m in middles.tolist()]
    parts = [[n for n, o in zip(names, owner, strict=True) if o == f] for f in range(fragments)]
    anchors = {n: torch.nn.Parameter(before[n].clone()) for n in names}
    rate, momentum = (0.7, 0.9) if outer else (1.0, 0.0)
    outers = [
        torch.optim.SGD([anchors[n] for n in p], lr=rate, momentum=momentum, nesterov=outer)
        for p in parts
    ]
    streams = [iter(loader(tokens(22), r, replicas)) for r in range(replicas)]
    losses, waiting = [], []
    for step in range(1, steps + 1):
        batches = [next(stream).micro_batches[0] for stream in streams]
        total, loss_sum = sum(b.count for b in batches), 0.0
        for model, optimizer, batch in zip(models, inner, batches, strict=True):
            out = model(batch.inputs).flatten(0, -2)
            loss = functional.cross_entropy(out, batch.targets.flatten(), reduction="sum")
            (loss * replicas / total).backward()
            loss_sum += loss.item() / total
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss_sum)
        now = [dict(model.named_parameters()) for model in models]
        with torch.no_grad():
            for fragment in range(fragments):
                if (step - fragment * (every // fragments)) % every == 0:
                    means = {
                        n: sum(parameter[n] for parameter in now) / replicas
                        for n in parts[fragment]
                    }
                    gradients = {n: anchors[n] - mean for n, mean in means.items()}
                    waiting.append((step + delay, fragment, gradients))
            while waiting and waiting[0][0] == step:
                _, fragment, gradients = waiting.pop(0)
                for name, gradient in gradients.items():
                    anchors[name].grad = gradient
                outers[fragment].step()
                for name in parts[fragment]:
                    for parameter in now:
                        parameter[name].lerp_(anchors[name], 1 - mixing)
    return losses, [{n: p.detach() for n, p in m.named_parameters()} for m in models]


FORMS = {
    "average": {"every": 3},
    "average of a fragment at a time": {"every": 4, "fragments": 2},
    "nesterov": {"every": 2, "outer": "nesterov"},
    "fragments": {"every": 3, "outer": "nesterov", "fragments": 2},
    "fragments, late": {
        "every": 3,
        "outer": "nesterov",
        "fragments": 3,
        "delay": 2,
        "mixing": 0.25,
    },
}


@pytest.mark.parametrize("form", FORMS)
def test_replicas_agree_as_in_a_few_lines_of_torch(form):
    options = {"train.precision": "fp64", **{OPTION + k: v for k, v in FORMS[form].items()}}
    results = run_ranks(train_replica, 2, options, 9)
    settings = {**FORMS[form], "outer": "outer" in FORMS[form]}
    losses, weights = plain_local_sgd(results[0][0], 9, 2, **settings)
    for rank, (_, own_losses, own_weights) in enumerate(results):
        assert own_losses == pytest.approx(losses, abs=1e-12)
        for name, value in own_weights.items():
            assert torch.allclose(value, weights[rank][name], rtol=0, atol=1e-12), name


@pytest.mark.parametrize("optimizer", [plain_sgd, momentum_sgd])
def test_agreeing_after_every_step_of_sgd_is_ddp(optimizer):
    """Averaging weights after a linear update equals an update with the averaged gradient."""
    keys = {"train.precision": "fp64"}
    ddp = run_ranks(train, 2, TinyLM, tokens(22), "ddp", keys, 6, optimizer)[0]
    for record in run_ranks(train, 2, TinyLM, tokens(22), "local_sgd_1", keys, 6, optimizer):
        # These are of each replica's share of the batch
        ddp.norms, ddp.gradients = record.norms, record.gradients
        assert largest_difference(ddp, record) < 1e-13


STREAMING = {"name": "local_sgd", "every": 3, "outer": "nesterov", "fragments": 2, "delay": 2}


@pytest.mark.parametrize("replicate", [{"name": "local_sgd", "every": 2}, STREAMING])
def test_a_run_that_is_resumed_goes_on_bit_for_bit(tmp_path, replicate):
    strategy = tmp_path / "form.yaml"
    strategy.write_text(yaml.safe_dump({"strategy": {"replicate": replicate}}))

    def run(strategy, ranks, folder, load=None):
        return run_ranks(continue_run, ranks, str(strategy), tmp_path / folder, adamw, load)

    (path, losses), *_ = run(strategy, 2, "first")
    (again, same), *_ = run(strategy, 2, "again", path)
    assert same == losses
    assert_same_tensors(path, again)
    # Other strategies load the first replica, under the usual names.
    (plain, _), *_ = run("ddp", 2, "ddp", path)
    mine, theirs = Checkpoint(Path(path)), Checkpoint(Path(plain))
    assert set(theirs.names) == {n for n in mine.names if not n.startswith("replicas.")}
    assert all(torch.equal(mine.read(n), theirs.read(n)) for n in theirs.names)
    assert len(run(strategy, 2, "back", plain)[0][1]) == 3


def gradients_in_flight(context, folder):
    """Save one step after a gradient was sent; resume with a smaller delay, and take a step."""
    samples, found, path = tokens(8), [], None
    for delay, steps in ((2, 4), (1, 1)):
        keys = {OPTION + "every": 3, OPTION + "outer": "nesterov", OPTION + "delay": delay}
        job = job_from_keys("local_sgd", {"train.global_batch_size": 16, **keys})
        with Engine(TinyLM, CrossEntropy(), adamw, job, context) as engine:
            if path is not None:
                engine.load(path)
            for _ in range(steps):
                engine.step((samples.inputs, samples.targets))
            path = engine.save(folder)
        found.append([n for n in Checkpoint(path).names if n.startswith("replicas.outer.sent")])
    return found


def test_what_is_in_flight_arrives_after_a_resume_with_a_smaller_delay(tmp_path):
    first, second = run_ranks(gradients_in_flight, 2, tmp_path)[0]
    assert len(first) == 2
    assert not second


@pytest.mark.parametrize(
    "keys",
    [
        {OPTION + "every": 2},
        {OPTION + "every": 2, OPTION + "outer": "nesterov"},
        {OPTION + "every": 2, OPTION + "outer": "nesterov", OPTION + "delay": 1},
    ],
)
def test_the_outer_state_is_in_the_forecast(keys):
    for predicted, measured, note in run_ranks(
        peaks, 2, wide_model, text(), "local_sgd", keys, adamw
    ):
        assert note is None
        assert_same_parts(predicted, measured)


@pytest.mark.parametrize(
    ("beside", "keys", "message"),
    [
        (
            "",
            {"every": 2, "fragments": 3},
            "fragments=3 are more than strategy.replicate.every=2 steps",
        ),
        ("", {"delay": 1}, "delay=1 applies an outer gradient late"),
        (
            "",
            {"outer": "nesterov", "every": 4, "delay": 4},
            "Set strategy.replicate.delay=3 or less",
        ),
        ("", {"every": 0}, "every"),
        (
            "",
            {"optim.master_weights": False, "train.precision": "bf16"},
            "local_sgd averages them: sums would be rounded to 8 bits",
        ),
        ("+1f1b", {}, "local_sgd is for whole models, and strategy.cut makes stages"),
        ("+offload_disk", {}, "strategy.offload.optimizer=disk keeps copies of them"),
    ],
)
def test_what_cannot_be_is_refused(beside, keys, message):
    options = {k if "." in k else OPTION + k: value for k, value in keys.items()}
    with pytest.raises(ConfigError, match=message):
        make_plan(job_from_keys(f"local_sgd{beside}", {"mesh.dp": -1, **options}), 2, "cpu")
