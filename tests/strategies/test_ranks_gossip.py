"""The gossip example of CONTRIBUTING.md equals a plain torch loop, and works with all commands.

Nothing in the toolkit knows this technique: it uses only `bigtrain.strategy`.
"""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

import pytest
import torch
import yaml
from support.continued import continue_run
from support.nets import TinyLM, tokens
from support.parity import adamw
from support.peaks import assert_same_parts, peaks, text, wide_model
from support.ranks import run_ranks
from support.whole import assert_same_tensors
from support.zygote import forked_cli
from torch.nn import functional

from bigtrain.assembly.make_plan import make_plan
from bigtrain.checkpoint.read import Checkpoint
from bigtrain.data import GlobalOrder, StepLoader
from bigtrain.engine.engine import Engine
from bigtrain.errors import ConfigError
from bigtrain.job.load import job_from_keys
from bigtrain.losses.loss import CrossEntropy

GOSSIP = {"strategy.replicate": "support.gossip:Gossip"}
SMALL = [
    "model.name=gpt",
    "model.args={num_layers: 2, width: 32, num_heads: 2, sequence_length: 16}",
    *("data.name=synthetic", "data.args={kind: language}"),
]
momentum_sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def job(**keys):
    return job_from_keys("ddp", {"train.global_batch_size": 8, **GOSSIP, **keys})


def loader(samples, rank, size):
    order = GlobalOrder(len(samples), 8, seed=3)
    return StepLoader(
        samples,
        order,
        count=CrossEntropy().count,
        dp_rank=rank,
        dp_size=size,
        micro_batch_size=8 // size,
    )


def train_replica(context, steps):
    """The initial weights, the losses, and this replica's final weights."""
    with Engine(
        TinyLM, CrossEntropy(), momentum_sgd, job(**{"train.precision": "fp64"}), context
    ) as engine:
        before = {n: p.detach().clone() for n, p in engine.model.named_parameters()}
        batches = loader(tokens(22), context.dp_rank, context.dp_size)
        losses = [engine.step(b).loss for _, b in zip(range(steps), batches, strict=False)]
        return before, losses, {n: p.detach() for n, p in engine.model.named_parameters()}


def plain_gossip(before, steps, replicas):
    """The same in one process: models that step independently, and a table of the pairs that
    average.
    """
    pairs = {2: [[(0, 1)], [(0, 1)]], 4: [[(0, 1), (2, 3)], [(1, 2), (3, 0)]]}[replicas]
    models = [TinyLM().double() for _ in range(replicas)]
    for model in models:
        model.load_state_dict(before, strict=False)
    optimizers = [momentum_sgd(model.parameters()) for model in models]
    streams = [iter(loader(tokens(22), r, replicas)) for r in range(replicas)]
    losses = []
    for step in range(steps):
        batches = [next(stream).micro_batches[0] for stream in streams]
        total, mean = sum(b.count for b in batches), 0.0
        for model, optimizer, batch in zip(models, optimizers, batches, strict=True):
            output = model(batch.inputs).flatten(0, -2)
            loss = functional.cross_entropy(output, batch.targets.flatten(), reduction="sum")
            (loss * replicas / total).backward()
            mean += loss.item() / total
            optimizer.step()
            optimizer.zero_grad()
        losses.append(mean)
        with torch.no_grad():
            for first, second in pairs[step % 2]:
                for a, b in zip(
                    models[first].parameters(), models[second].parameters(), strict=True
                ):
                    average = (a + b) / 2
                    a.copy_(average)
                    b.copy_(average)
    return losses, [dict(model.named_parameters()) for model in models]


@pytest.mark.parametrize("replicas", [2, 4])
def test_pairs_average_as_in_a_plain_torch_loop(replicas):
    ranks = run_ranks(train_replica, replicas, 7)
    losses, weights = plain_gossip(ranks[0][0], 7, replicas)
    for rank, (_, own_losses, own_weights) in enumerate(ranks):
        assert own_losses == pytest.approx(losses, abs=1e-12)
        for name, value in own_weights.items():
            assert torch.allclose(value, weights[rank][name], rtol=0, atol=1e-12), name
    if replicas == 4:  # the last pairs were (0, 1) and (2, 3)
        first_weights, same, third_weights, _ = (
            own_weights["up.weight"] for _, _, own_weights in ranks
        )
        assert torch.equal(first_weights, same)
        assert not torch.allclose(first_weights, third_weights)


@pytest.mark.parametrize("replicas", [2, 4])
def test_a_run_that_is_resumed_goes_on_bit_for_bit(tmp_path, replicas):
    """Three steps, then a checkpoint: on four ranks the two members of a last pair differ."""
    strategy = tmp_path / "gossip.yaml"
    strategy.write_text(yaml.safe_dump({"strategy": {"replicate": "support.gossip:Gossip"}}))

    def run(strategy, ranks, folder, load=None):
        return run_ranks(continue_run, ranks, str(strategy), tmp_path / folder, adamw, load)

    (path, losses), *_ = run(strategy, replicas, "first")
    (again, same), *_ = run(strategy, replicas, "again", path)
    assert same == losses
    assert_same_tensors(path, again)
    saved = Checkpoint(Path(path))
    assert {n.split(".")[1] for n in saved.names if n.startswith("replicas.")} == {
        "gossip",
        *map(str, range(1, replicas)),
    }
    if replicas == 4:
        return
    # Other strategies load the first replica, under the usual names; gossip starts from their
    # weights.
    (plain, _), *_ = run("ddp", 2, "ddp", path)
    theirs = Checkpoint(Path(plain))
    assert set(theirs.names) == {n for n in saved.names if not n.startswith("replicas.")}
    assert all(torch.equal(saved.read(n), theirs.read(n)) for n in theirs.names)
    assert len(run(strategy, 4, "back", plain)[0][1]) == 3


def test_the_buffers_that_receive_are_in_the_forecast():
    for predicted, measured, note in run_ranks(peaks, 2, wide_model, text(), "ddp", GOSSIP, adamw):
        assert note is None
        assert_same_parts(predicted, measured)


@pytest.mark.parametrize(
    ("added", "keys", "world_size", "message"),
    [
        ("", {}, 3, "gossip pairs replicas, and mesh.dp=3 is odd. Set mesh.dp=4"),
        ("+1f1b", {"mesh.pp": 2}, 4, "Leave strategy.cut out"),
        ("+offload_disk", {}, 2, "Leave strategy.offload out"),
    ],
)
def test_a_ring_without_pairs_and_parts_of_a_model_are_refused(added, keys, world_size, message):
    job = job_from_keys(
        f"ddp{added}", {"train.global_batch_size": 12, "mesh.dp": -1, **GOSSIP, **keys}
    )
    with pytest.raises(ConfigError, match=message):
        make_plan(job, world_size, "cpu")


def test_it_is_planned_runs_by_a_plan_and_verify_names_the_reason(tmp_path):
    options = ["--devices", "2", "--cluster", "cpu", "--engines", "torch", "--memory", "8GiB"]
    technique = "strategy.replicate=support.gossip:Gossip"
    sizes = ["--global-batch-size=8", "train.micro_batch_size=4", "mesh.pp=1"]
    planned = forked_cli(["plan", *options, *sizes, *SMALL, technique], cwd=tmp_path)
    assert planned.returncode == 0, planned.stderr
    (row,) = [line for line in planned.stdout.splitlines() if " gossip " in line]
    # Gossip is not the fastest plan here, so its plan is written from that of the fastest.
    plan = yaml.safe_load((tmp_path / "plan.yaml").read_text())
    plan["strategy"]["replicate"] = "support.gossip:Gossip"
    del plan["predicted"]
    (tmp_path / "gossip.yaml").write_text(yaml.safe_dump(plan))
    ran = forked_cli(
        ["train", "-n", "2", "--plan", "gossip.yaml", *SMALL, "train.steps=2"], cwd=tmp_path
    )
    assert ran.returncode == 0, ran.stderr
    table = {
        line.split("│")[1].strip(): line for line in ran.stdout.splitlines() if line.count("│") > 6
    }
    assert table["buffers"].count("133.5 KiB") == 4, ran.stdout
    for name in ("buffers", "peak"):
        assert table[name].count("exact") == 2, ran.stdout
    assert table["peak"].split("│")[2].strip() in row
    for name in ("sent", "received"):  # three numbers a step (targets, loss) are sent as well
        assert table[name].count("-0.1%") + table[name].count("exact") == 2, ran.stdout
    refused = forked_cli(
        ["verify", "-n", "2", "--strategies", "ddp", technique, *SMALL], cwd=tmp_path
    )
    assert refused.returncode == 2, refused.stdout
    assert "gossip: each replica averages with one neighbour a step" in refused.stderr


def test_the_page_shows_the_code_that_runs():
    root = Path(__file__).parents[2]
    blocks = re.findall(r"```python\n(.*?)```", (root / "CONTRIBUTING.md").read_text(), re.DOTALL)
    assert (root / "tests/support/gossip.py").read_text() in blocks
