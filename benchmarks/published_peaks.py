"""Compare forecasts with published peaks of training runs on GPUs, with the rows' own settings.

    python benchmarks/published_peaks.py --output benchmarks/results/published_peaks.json

The rows, their sources and what each source prints are in `published_rows.py`. Models are
transformers' own, on the meta device, from their public configurations (`published_models.py`).
Where a tool differs from torch or transformers of today, the forecast computes as the tool does
(`published_tools.py`, `published_fsdp1.py`). No constant is fitted to a row. One documented
constant is added: cuBLAS has a workspace in each of the two threads that compute matrix products,
forward and backward. It has 8,519,680 bytes on an A100 (CUBLAS_WORKSPACE_CONFIG, :4096:2:16:8), and
33,554,432 on an H100.

Besides, two estimators that need no download: `accelerate estimate-memory` says four times the
bytes of the fp32 parameters for training with Adam, and DeepSpeed's
`estimate_zero*_model_states_mem_needs` the states of its stages.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from harness import keep
from published_causal import OfTheModel
from published_fsdp1 import Sharded, sharded_peak
from published_models import MODELS, described, fused
from published_rows import NOT_FORECAST, QUANTITIES, Published, all_rows
from torch import nn

from bigtrain.data.loader import MicroBatch
from bigtrain.errors import ConfigError
from bigtrain.job.load import load_job
from bigtrain.machine.cluster import load_cluster
from bigtrain.memory.timeline import Peak
from bigtrain.optim.factory import optimizer_factory
from bigtrain.planner.evaluate import PlanEvaluator
from bigtrain.planner.space import Candidate, SearchSpace
from bigtrain.prediction.section_library import SectionLibrary
from bigtrain.timing.step_time import StepTimer

STATES_BAR, PEAK_BAR, MEDIAN_BAR = 0.0005, 0.03, 0.05


OWN = ("fsdp", "fsdp_zero2")
"""bigtrain's strategies among the rows' ways of sharding."""
REFUSALS = (AttributeError, ConfigError, ImportError, RuntimeError, TypeError, ValueError)


class Forecaster:
    """The forecasts of one model with one tool, for any batch; fake runs are shared."""

    def __init__(self, row: Published) -> None:
        self.row, self.model, tool = row, described(row), row.tool
        words = [
            # without autocast the parameters have their own dtypes
            f"train.precision={'bf16' if tool.mixed else 'fp32'}",
            "optim.lr=1e-5",
            *((f"optim.clip_norm={tool.clip}",) if tool.clip else ()),
            *tool.optimizer,
        ]
        job = load_job(None, "single", words)
        ids = torch.zeros((1, row.length), dtype=torch.int64)
        example = MicroBatch(ids, ids.clone(), row.length - 1, 1)
        library = SectionLibrary(
            self.model,
            example,
            lambda *_: OfTheModel(),
            optimizer_factory(job.optim, 0),
            torch.device("cpu"),
        )
        timer = StepTimer(load_cluster("a100-node"))
        self.evaluator = PlanEvaluator(job, library, timer, {"torch": 0.0})
        self.blocks = library.num_blocks

    def peak(self, row: Published) -> tuple[Peak, int]:
        """Return the peak of a row and the bytes of its states, of each rank.

        The states have the gradients where these are alive at the end: on several GPUs, and after
        a step.
        """
        candidate = self._candidate(row)
        with fused(row):
            fit = self.evaluator.fit(candidate, self.evaluator.plan_of(candidate))
            stages = fit.uniform_stages([0, len(fit.levels["keep"].sections)], row.tool.policy)
            if row.tool.sharding == "fsdp1":
                return self._under_fsdp1(row, fit.profile(stages[0]))
            rank = fit.forecast(stages, 0)
        held = rank.states
        states = held.parameters + held.frozen + held.buffers + held.optimizer
        if row.gpus > 1 or row.quantity == "after a step":  # gradients are alive
            states += sum(p.nbytes for p in self.trained) // row.gpus
        return rank.peak(), states

    @property
    def trained(self) -> list[nn.Parameter]:
        """The parameters that are trained."""
        return [p for p in self.model.parameters() if p.requires_grad]

    def _under_fsdp1(self, row: Published, profile: Any) -> tuple[Peak, int]:
        net: Any = self.model.net
        blocks = net.model.layers
        frozen_block = sum(p.nbytes for p in blocks[0].parameters() if not p.requires_grad)
        block = sum(p.numel() for p in blocks[0].parameters() if p.requires_grad)
        numbers = sum(p.numel() for p in self.trained)
        frozen = sum(p.nbytes for p in self.model.parameters() if not p.requires_grad)
        used = 2 if row.tool.autocast else row.tool.width
        hidden = row.batch * row.length * MODELS[row.model][1]["hidden_size"] * 2
        sizes = Sharded(
            gpus=row.gpus,
            trained=numbers,
            width=row.tool.width,
            frozen=frozen,
            block=frozen_block + block * used,
            rest=frozen - frozen_block * len(blocks) + (numbers - block * len(blocks)) * used,
            block_trained=block,
            held_input=hidden if row.lora else 0,
            late=bool(row.lora) and not row.tool.fused_adapters,
        )
        peak = sharded_peak(profile, sizes, self.trained[0].element_size())
        gradients = numbers * row.tool.width // row.gpus
        return peak, sizes.states.total + profile.buffer_bytes + gradients

    def _candidate(self, row: Published) -> Candidate:
        """The plan of a row: one process, or shards by bigtrain."""
        gpus = row.gpus if row.tool.sharding in OWN else 1
        space = SearchSpace(
            devices=gpus,
            per_node=8,
            global_batch_size=row.batch * gpus,
            num_blocks=self.blocks,
            pp=1,
            tp=1,
            rows=row.batch,
            engines=("torch",),
            device_type="cuda",
        )
        found = {candidate.label: candidate for candidate in space.candidates()}
        return found[row.tool.sharding if gpus > 1 else "single"]


def others(row: Published, parameters: int) -> dict[str, int]:
    """The bytes that other estimators name. They know neither activations nor adapters."""
    fields = MODELS[row.model][1]
    largest = int(fields["vocab_size"] * fields["hidden_size"])
    return {
        # 4 x the bytes of fp32 parameters, for training with Adam
        "accelerate estimate-memory": 4 * 4 * parameters,
        # estimate_zero3_model_states_mem_needs without offload: 18 bytes a parameter over all
        # GPUs, and the largest layer in bf16 and fp32
        "deepspeed estimate_zero3": 18 * parameters // row.gpus + 4 * largest,
        # estimate_zero2: 2 bytes a parameter on each GPU, and 18 over all
        "deepspeed estimate_zero2": 2 * parameters + 18 * parameters // row.gpus,
    }


def compared(row: Published, forecaster: Forecaster) -> dict[str, Any]:
    """A row with its forecast and the errors."""
    peak, states = forecaster.peak(row)
    workspaces = 2 * row.tool.workspace
    batch = 3 * row.batch * row.length * 8
    states += workspaces + batch
    predicted = peak.bytes + workspaces
    if row.quantity == "after a step":
        predicted = states + row.alive
    packed = sum(p.numel() for p in forecaster.model.parameters() if p.dtype == torch.uint8)
    parameters = packed + sum(p.numel() for p in forecaster.model.parameters())
    found = {
        "family": row.family,
        "model": row.model,
        "label": row.label,
        "gpus": row.gpus,
        "tuning": f"lora r {row.lora}" if row.lora else "full",
        "batch": row.batch,
        "length": row.length,
        "strategy": row.tool.sharding or "single",
        "quantity": row.quantity,
        "parameters": parameters,
        "trained": sum(p.numel() for p in forecaster.trained),
        "printed": row.peak,
        "forecast": predicted,
        "error": predicted / row.peak - 1,
        "phase": peak.phase,
        "breakdown": dict(vars(peak.breakdown)),
        "workspaces": workspaces,
        "cause": row.cause,
        "others": {
            name: {"bytes": size, "error": size / row.peak - 1}
            for name, size in others(row, parameters).items()
        },
    }
    if row.end:
        found |= {"printed_end": row.end, "forecast_end": states}
        found["end_error"] = states / row.end - 1
    return found


def line(number: int, found: dict[str, Any]) -> str:
    """A row as text."""
    end = f", at the end {found['end_error']:+.3%}" if "end_error" in found else ""
    why = f" ({found['cause']})" if found["cause"] else ""
    return (
        f"{number:3} {found['family']} {found['label']} {found['model']}, {found['gpus']} x "
        f"{found['batch']} x {found['length']}, {found['tuning']}: {found['quantity']} "
        f"{found['printed']:,}, forecast {found['forecast']:,} in {found['phase']}: "
        f"{found['error']:+.2%}{end}{why}\n"
    )


def medians(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """For each family, and for all rows: the median of the errors' sizes, and the worst row."""
    families: dict[str, list[dict[str, Any]]] = {"all": list(rows)}
    for row in rows:
        families.setdefault(row["family"], []).append(row)
    return {
        family: {
            "rows": len(members),
            "median": statistics.median(abs(row["error"]) for row in members),
            "worst": max((row["error"] for row in members), key=abs),
            "above 5 %": sum(abs(row["error"]) > MEDIAN_BAR for row in members),
            "quantity": QUANTITIES.get(family, ""),
        }
        for family, members in families.items()
    }


def shared(row: Published) -> Published:
    """The row without the fields in which rows of one `Forecaster` may differ."""
    gpus = row.gpus if row.tool.sharding in OWN else 1
    return replace(row, family="", batch=0, peak=0, end=0, label="", cause="", gpus=gpus, alive=0)


def _first_line(error: Exception) -> str:
    line = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return re.sub(r"/\S*/(site-packages|lib/python3\.\d+)/", "", line)  # no paths of this machine


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare every row, print a table and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--rows", type=int, nargs="+", help="numbers of rows, from 0")
    parser.add_argument("--family", help="only sources whose name begins so")
    options = parser.parse_args(arguments)
    began, rows, forecasters = time.monotonic(), [], dict[Published, Forecaster]()
    refused: list[dict[str, str]] = []
    for number, row in enumerate(all_rows()):
        if options.rows is not None and number not in options.rows:
            continue
        if options.family and not row.family.startswith(options.family):
            continue
        key = shared(row)
        try:
            if key not in forecasters:
                forecasters = {key: Forecaster(row)}  # rows of one model follow each other
            rows.append(compared(row, forecasters[key]))
        except REFUSALS as error:  # some of peft's adapters read the weights' values
            refused.append({"rows": f"{row.family} {row.label}", "reason": _first_line(error)})
            continue
        sys.stdout.write(line(number, rows[-1]))
        sys.stdout.flush()
    libraries = {name: metadata.version(name) for name in ("transformers", "peft")}
    figures: dict[str, Any] = {
        "libraries": libraries,
        "seconds": round(time.monotonic() - began),
        "medians": medians(rows),
        "rows": rows,
        "not_forecast": [*NOT_FORECAST, *refused],
    }
    keep(options.output, {**figures, "bars": {"states": STATES_BAR, "peak": PEAK_BAR}})
    for line_of_refusal in refused:
        sys.stdout.write(f"not forecast: {line_of_refusal}\n")
    for family, found in figures["medians"].items():
        sys.stdout.write(f"{family}: {found}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
