"""Compare forecasts with published costs of sharding: bytes and seconds of runs that differ in it.

    python benchmarks/published_sharding.py --output benchmarks/results/published_sharding.json

* torchtitan, commit 5940ddeb5: Llama 3 8B on 8 H100 with 500 W. Parameters are freed after each
  block's forward pass except the last's (its default), after every one, or never. It prints
  reserved bytes and tokens/s.
* Lightning's pages on FSDP, of Fabric and of the Trainer: 1 billion parameters in fp32 on 2 A100 of
  40 GB, one sample of 35 tokens, Adam. Both print allocated bytes, in units of 2**20. The bytes of
  Fabric's page are those of Adam in torch 2.0, with two lists of temporaries; since July 2023 it
  has one (pytorch issue 97712). The Trainer frees gradients after the next forward pass.

Jobs, clusters and what is added are those of `published_peaks.py` and `published_steps.py`. FSDP1
is forecast as `fully_shard`; its NO_SHARD as `ddp` whose gradients are views of the buckets.
Nothing is measured, and no constant is fitted to a row.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import published_models
import published_peaks
import published_steps
import torch
import torch.nn.functional as F
from harness import keep
from published_causal import OfTheModel
from published_rows import AMPERE, HOPPER, titan_rows
from published_step_rows import StepRow
from torch import Tensor, nn

from bigtrain.activations.policy import BlockPolicy
from bigtrain.core.variants import Variant, preset_options
from bigtrain.data.loader import MicroBatch
from bigtrain.job.load import load_job
from bigtrain.memory.timeline import Peak, highest_peak
from bigtrain.planner.evaluate import PlanEvaluator
from bigtrain.planner.space import Candidate
from bigtrain.prediction.section_library import SectionLibrary
from bigtrain.timing.step_time import StepTimer

MIB, GIB = 2**20, 2**30
BAR = 0.03
"""The share of the printed figure above which a difference is given a cause."""
POOLS = (
    "reserved bytes: torch's allocator has a pool for each stream. fully_shard makes the shards of "
    "the gradients (3.7 GiB) in the stream of its reductions, and its gathers their buffers "
    "(embedding and head: 2.0 GiB) in another; at the forecast peak both are free. That is 5.7 of "
    "the 8.2 to 8.4 GiB"
)
HOST = (
    "likely the host: with 12 microseconds for each of 14,000 operations, not the 5 that the "
    "cluster file assumes, DDP is forecast as 0.23 s. FSDP1's own work on the host is not forecast"
)
POWER = "the H100 has 500 W and HBM2e; the cluster file is that of the 700 W card"


@dataclass(frozen=True)
class Row:
    """One printed row."""

    source: str
    label: str
    strategy: str
    nbytes: int
    """Printed bytes."""
    seconds: float
    """Printed seconds of a step."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of the strategy beyond those of its preset."""
    causes: tuple[str, str] = ("", "")
    """Causes of differences above 3 %: of the bytes, of the seconds."""
    late_gradients: bool = False
    """Whether gradients are freed after the next forward pass, not before it."""

    def candidate(self, devices: int) -> Candidate:
        """The row's plan: one sample on each device."""
        options = {**preset_options("replicate", self.strategy), **self.options}
        return Candidate(1, devices, Variant(self.strategy, options), 1, 1)


def _titan(label: str, gib: float, tokens: int, strategy: str, **options: Any) -> Row:
    seconds = 8192 / tokens
    return Row("torchtitan", label, strategy, int(gib * GIB), seconds, options, (POOLS, POWER))


TITAN = (
    _titan("default: all but the last block", 49.59, 5605, "fsdp", keep_gathered=1),
    _titan("always", 49.41, 5593, "fsdp"),
    _titan("never", 62.18, 5763, "fsdp_zero2"),
)
BESIDE = {"gradient_as_bucket_view": False}
_LIGHTNING: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("DDP", "ddp", BESIDE),
    ("NO_SHARD", "ddp", {}),
    ("SHARD_GRAD_OP", "fsdp_zero2", {}),
    ("FULL_SHARD", "fsdp", {}),
)


def _lightning(source: str, printed: Sequence[tuple[int, float]], *, late: bool) -> list[Row]:
    return [
        Row(source, label, strategy, mib * MIB, seconds, options, ("", HOST), late)
        for (label, strategy, options), (mib, seconds) in zip(_LIGHTNING, printed, strict=True)
    ]


FABRIC = _lightning(
    "Lightning Fabric", ((26953, 0.26), (23181, 0.30), (11815, 0.31), (11578, 0.36)), late=False
)
TRAINER = _lightning(
    "Lightning Trainer",
    ((23125, 1 / 4.31), (19296, 1 / 3.04), (11772, 1 / 3.61), (9627, 1 / 3.19)),
    late=True,
)


class EncoderDecoder(nn.Module):
    """Lightning's example: torch's `nn.Transformer` between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(33278, 1024)
        self.register_buffer("positions", torch.zeros(5000, 1, 1024))  # made, and not used
        self.dropout = nn.Dropout(0.2)
        self.transformer = nn.Transformer(1024, 64, 32, 32, 4096, 0.2, batch_first=True)
        self.head = nn.Linear(1024, 33278)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the loss, as a sum over the tokens; the targets have the shape of the inputs."""
        size = ids.shape[1]
        mask = torch.full((size, size), float("-inf"), device=ids.device).triu(1)
        source, target = (self.dropout(self.embedding(ids) * 32.0) for _ in range(2))
        hidden = self.transformer(source, target, tgt_mask=mask, tgt_is_causal=True)
        logs = F.log_softmax(self.head(hidden), dim=-1)
        return F.nll_loss(logs.view(-1, logs.shape[-1]), ids.flatten(), reduction="sum")


class EarlierAdam(torch.optim.Adam):
    """Adam as in torch 2.0: the root of the second moments and the divisor are two new lists."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update the parameters."""
        del closure
        for group in self.param_groups:
            lists: list[list[Any]] = [[] for _ in range(6)]
            self._init_group(group, *lists)  # type: ignore[no-untyped-call]
            params, grads, means, squares, _, steps = lists
            torch._foreach_add_(steps, 1)
            torch._foreach_mul_(means, group["betas"][0])
            torch._foreach_add_(means, grads, alpha=1 - group["betas"][0])
            torch._foreach_mul_(squares, group["betas"][1])
            torch._foreach_addcmul_(squares, grads, grads, 1 - group["betas"][1])
            roots = torch._foreach_sqrt(squares)
            torch._foreach_div_(roots, 0.5)
            divisors = torch._foreach_add(roots, group["eps"])
            torch._foreach_addcdiv_(params, means, divisors, [-group["lr"]] * len(params))


def lightning_evaluator(kind: type[torch.optim.Adam]) -> PlanEvaluator:
    """Evaluate plans of Lightning's example with an optimizer."""
    job = load_job(None, "single", ["train.precision=fp32", "optim.name=adam"])
    ids = torch.zeros((1, 35), dtype=torch.int64)

    def make(parameters: Iterable[Any]) -> torch.optim.Optimizer:
        return kind(parameters, lr=0.1, foreach=True)

    with torch.device("meta"):
        model = EncoderDecoder()
    batch = MicroBatch(ids, ids.clone(), ids.numel(), 1)
    library = SectionLibrary(model, batch, lambda *_: OfTheModel(), make, torch.device("cpu"))
    timer = published_steps.FlatParameterTimer(published_steps.CLUSTERS["a100-40"])
    return PlanEvaluator(job, library, timer, {"torch": 0.0})


def peak_of(judge: PlanEvaluator, row: Row, devices: int, blocks: BlockPolicy) -> Peak:
    """The peak of a row's plan on a rank."""
    candidate = row.candidate(devices)
    fit = judge.fit(candidate, judge.plan_of(candidate))
    stages = fit.uniform_stages([0, len(fit.levels["keep"].sections)], blocks)
    rank = fit.forecast(stages, 0)
    if not row.late_gradients or rank.states.gradients:
        return rank.peak()
    states = replace(rank.states, gradients=rank.gradients)
    return highest_peak([rank.peak(), rank.passes["first"].only("forward").peak(states)])


def compared(row: Row, peak: Peak, workspaces: int, parts: dict[str, float]) -> dict[str, Any]:
    """A row with its forecasts and their errors."""
    nbytes, seconds = peak.bytes + workspaces, sum(parts.values())
    return {
        **{"source": row.source, "label": row.label, "strategy": row.strategy},
        **{"options": row.options, "printed": row.nbytes, "forecast": nbytes},
        **{"error": nbytes / row.nbytes - 1, "phase": peak.phase},
        **{"breakdown": dict(vars(peak.breakdown)), "workspaces": workspaces},
        **{"printed_seconds": row.seconds, "seconds": seconds, "parts": parts},
        **{"seconds_error": seconds / row.seconds - 1},
        "causes": [
            cause if abs(error) > BAR else ""
            for cause, error in zip(
                row.causes, (nbytes / row.nbytes - 1, seconds / row.seconds - 1), strict=True
            )
        ],
    }


def differences(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """By row: bytes and speed beside the row of its source that shards and frees the most."""
    found = []
    for row in rows:
        least = next(
            other for other in rows if other["source"] == row["source"] and is_least(other)
        )
        if row is least:
            continue
        found.append(
            {
                **{"source": row["source"], "label": row["label"], "beside": least["label"]},
                **{key: row[key] - least[key] for key in ("printed", "forecast")},
                "printed_speed": least["printed_seconds"] / row["printed_seconds"] - 1,
                "speed": least["seconds"] / row["seconds"] - 1,
            }
        )
    return found


def is_least(row: dict[str, Any]) -> bool:
    """Whether a row is the one with which the others of its source are compared."""
    return row["label"] in ("FULL_SHARD", TITAN[0].label)


def titan_results() -> Iterator[dict[str, Any]]:
    """Forecast torchtitan's rows."""
    published = next(row for row in titan_rows() if row.label == "commit 5940ddeb5")
    step = StepRow(
        *("torchtitan", "h100-500w", "Llama-3-8B", 8192, 8, 1, 1, "selective", "fsdp", 1.0)
    )
    judge = published_peaks.Forecaster(published).evaluator
    job, sections = published_steps.library_of(step)
    timer = StepTimer(published_steps.CLUSTERS[step.gpu])
    timed = PlanEvaluator(job, sections, timer, {"torch": 0.0})
    for row in TITAN:
        candidate = row.candidate(8)
        with published_models.fused(published):
            peak = peak_of(judge, row, 8, published.tool.policy)
        seconds = timed.seconds_with(candidate, timed.plan_of(candidate), step.blocks)
        yield compared(row, peak, 2 * HOPPER, dict(vars(seconds)))


def lightning_results() -> Iterator[dict[str, Any]]:
    """Forecast Lightning's rows."""
    for rows, kind in ((FABRIC, EarlierAdam), (TRAINER, torch.optim.Adam)):
        judge = lightning_evaluator(kind)
        for row in rows:
            candidate = row.candidate(2)
            peak = peak_of(judge, row, 2, "keep")
            seconds = judge.seconds_with(candidate, judge.plan_of(candidate), "keep")
            yield compared(row, peak, 2 * AMPERE, dict(vars(seconds)))


def main(arguments: Sequence[str] | None = None) -> None:
    """Compare the rows, print them and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(arguments)
    rows = []
    for results in (lightning_results(), titan_results()):
        for found in results:
            rows.append(found)
            sys.stdout.write(
                f"{found['source']}, {found['label']}: {found['printed'] / MIB:,.0f} MiB, forecast "
                f"{found['forecast'] / MIB:,.0f} ({found['error']:+.2%}, {found['phase']}); "
                f"{found['printed_seconds']:.4f} s, forecast {found['seconds']:.4f} "
                f"({found['seconds_error']:+.1%})\n"
            )
            sys.stdout.flush()
    document = {"differences": differences(rows), "rows": rows}
    for found in document["differences"]:
        sys.stdout.write(
            f"{found['source']}, {found['label']} beside {found['beside']}: "
            f"{found['printed'] / MIB:+,.0f} MiB, forecast {found['forecast'] / MIB:+,.0f}; "
            f"speed {found['printed_speed']:+.1%}, forecast {found['speed']:+.1%}\n"
        )
    keep(options.output, document)


if __name__ == "__main__":
    main()
