"""The bytes that real ranks send in a step, compared with formulas written independently here.

Sums over all ranks, to the byte. If an engine differs from its formula, the difference is a
separate term; docs/internals/strategies_measured.md lists the same differences.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
from support.nets import LENGTH, VOCABULARY, BlockLM, tokens
from support.parity import UNSEEN, adamw, shuffled_steps
from support.ranks import run_ranks

from bigtrain.assembly.make_plan import make_plan
from bigtrain.data import GlobalOrder, StepLoader
from bigtrain.engine.engine import Engine
from bigtrain.job.load import job_from_keys
from bigtrain.losses.loss import CrossEntropy
from bigtrain.versions.torch_versions import COUNTS_EXCHANGES

pytestmark = pytest.mark.skipif(not COUNTS_EXCHANGES, reason="torch before 2.14 has no such hooks")
WIDTH, ROWS, STEPS = 256, 12, 8
"""In its first steps DeepSpeed's stage 3 also compares the order of modules between ranks."""
make = partial(BlockLM, width=WIDTH)


class Sizes(NamedTuple):
    """Sizes of the model's tensors, in bytes of fp32."""

    gradients: int
    embedding: int
    """The embedding, which is also the head's weight."""
    vectors: int
    """Biases and norms with `width` numbers each."""
    boundary: int
    """The activations of the batch between two blocks."""


def sizes() -> Sizes:
    parameters = dict(make().named_parameters())
    return Sizes(
        4 * sum(p.numel() for p in parameters.values()),
        4 * parameters["embedding.weight"].numel(),
        4 * sum(p.numel() for p in parameters.values() if p.shape == (WIDTH,)),
        4 * ROWS * LENGTH * WIDTH,
    )


def ring_all_reduce(n: int, size: Sizes) -> int:
    """Ring all-reduce: 2 (n-1)/n of the gradients per rank on average (Patarasu and Yuan 2009)."""
    return 2 * (n - 1) * size.gradients


def all_reduce(n: int, size: Sizes) -> int:
    """The same volume for a collective, whose bytes are rounded to integers on each rank."""
    return n * (2 * (n - 1) * size.gradients // n)


def padding(n: int) -> int:
    """The rows that `fully_shard` adds to the embedding for n equal shards."""
    return 4 * WIDTH * (-VOCABULARY % n)


def gather_and_scatter(n: int, size: Sizes) -> int:
    """Parameters are gathered once and gradients are scattered once."""
    return 2 * (n - 1) * (size.gradients + padding(n))


def parameter_servers(n: int, size: Sizes, servers: int) -> int:
    """Parameter servers: gradients from each worker, parameters to each worker (Li et al. 2014)."""
    return 2 * (n - servers) * size.gradients


def reduce_to_owners(n: int, size: Sizes) -> int:
    """DeepSpeed's ZeRO 1 and 2 reduce each whole gradient to its owner, then gather parameters."""
    return n * size.gradients + (n - 1) * size.gradients


def broadcast_after(n: int, size: Sizes) -> int:
    """torch's ZeRO 1 all-reduces gradients, and each rank takes part in all broadcasts."""
    return 2 * (n - 1) * size.gradients + n * size.gradients


def zero_3(n: int, size: Sizes) -> int:
    """ZeRO 3: 3 (n-1)/n (Rajbhandari et al. 2020, section 7), less the skipped gathers."""
    return (n - 1) * (3 * size.gradients - size.embedding + 2 * padding(n))


def deepspeed_zero_3(n: int, size: Sizes) -> int:
    """The same in DeepSpeed, plus gathers.

    The parameters that the preset does not shard are gathered once (vectors up to a 5000th of all
    numbers), and the tied embedding once more in each pass.
    """
    return (n - 1) * (3 * size.gradients - size.vectors + 2 * size.embedding)


def pipeline_messages(n: int, size: Sizes, a_rank: int) -> int:
    """Pipeline: activations forward and gradients backward; two stages exchange the tied
    gradient.
    """
    return 2 * (a_rank * n - 1) * size.boundary + 2 * size.embedding


SERVERS, CUT = "strategy.replicate.servers", {"train.micro_batch_size": 3}
Formula = Callable[[int, Sizes], int]
CASES: dict[str, tuple[str, dict[str, Any], tuple[int, ...], Formula]] = {
    "sync_sgd": ("sync_sgd", {}, (2, 3, 4), all_reduce),
    "ddp": ("ddp", {}, (2, 3, 4), all_reduce),
    "fsdp_zero2": ("fsdp_zero2", {}, (2, 4), gather_and_scatter),
    "ring": ("ring", {}, (2, 3, 4), ring_all_reduce),
    # 100,007 numbers are divided by neither 2 nor 3 nor 4.
    "ring, uneven chunks": (
        "ring",
        {"strategy.replicate.bucket_size": 400_028},
        (3, 4),
        ring_all_reduce,
    ),
    "one server": ("parameter_server", {}, (2, 3, 4), partial(parameter_servers, servers=1)),
    "two servers": (
        "parameter_server",
        {SERVERS: 2},
        (3, 4),
        partial(parameter_servers, servers=2),
    ),
    "zero1": ("zero1", {}, (2, 4), reduce_to_owners),
    "zero2": ("zero2", {}, (2, 4), reduce_to_owners),
    "zero1_torch": ("zero1_torch", {}, (2, 4), broadcast_after),
    "zero3": ("zero3", {}, (2, 4), deepspeed_zero_3),
    "fsdp": ("fsdp", {}, (2, 4), zero_3),
    "gpipe": ("gpipe", CUT, (2, 4), partial(pipeline_messages, a_rank=1)),
    "1f1b": ("1f1b", CUT, (2, 4), partial(pipeline_messages, a_rank=1)),
    "interleaved_1f1b": ("interleaved_1f1b", CUT, (2,), partial(pipeline_messages, a_rank=2)),
}


def sent_bytes(context, strategy, keys) -> list[int]:
    """Bytes that each rank has sent in the median step; known on rank 0."""
    job = job_from_keys(strategy, {"train.global_batch_size": ROWS, **UNSEEN, **keys})
    loss, samples = CrossEntropy(), tokens(8 * ROWS, ignored=False)
    plan = make_plan(job, context.world_size, "cpu")
    rows = plan.batch.micro_size
    order = GlobalOrder(len(samples), rows, shuffle=False)
    example = next(iter(StepLoader(samples, order, count=loss.count, micro_batch_size=rows)))
    with Engine(make, loss, adamw, job, context, example=example.micro_batches[0]) as engine:
        for batch in shuffled_steps(engine, samples, loss, STEPS):
            engine.step(batch)
        report = engine.memory()
    return [rank.volume.sent_bytes for rank in report.ranks] if report else []


@pytest.mark.parametrize(
    ("case", "ranks"),
    [(case, ranks) for case, row in CASES.items() for ranks in row[2]],
)
def test_all_ranks_together_send_what_the_formula_says(case, ranks):
    strategy, keys, _, formula = CASES[case]
    pp = ranks if keys is CUT else 1
    bytes_sent = run_ranks(sent_bytes, ranks, strategy, keys, pp=pp, timeout_s=120)[0]
    assert len(bytes_sent) == ranks
    assert sum(bytes_sent) == formula(ranks, sizes())
