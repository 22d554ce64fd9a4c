"""`bigtrain doctor --check`: short runs that test what bigtrain promises, each checked by rules.

They show in a few minutes whether bigtrain does what it promises on a new machine. All measured
figures are written to one JSON file, which a user can attach to an issue. Each run is a command
in a separate process, as a user would start it.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from bigtrain.compare.rows import TRACKED_STEPS, ComparisonRow
from bigtrain.compare.subprocess_runs import QuietRun
from bigtrain.devices import accelerator, device_count, device_names
from bigtrain.errors import ConfigError
from bigtrain.files.regular import read_text
from bigtrain.machine.versions import hardware_and_versions
from bigtrain.units import MIB, format_bytes, signed_share

LIMIT_S = 120.0
"""The seconds that a run may take."""
STEPS = 6
PEAK_TOLERANCE = {"cpu": 0.005, "accelerator": 0.01}
"""The share of the measured peak by which a forecast may be off. It is larger on an accelerator,
whose kernels allocate workspaces that a forecast does not include."""
WORKSPACES = {"cpu": 0, "accelerator": 64 * MIB}
"""The bytes by which a forecast may be off, if they are more than that share: for a small model,
workspaces are a large part of the peak."""
LOSS_TOLERANCE = 1e-5
"""The share by which losses may differ if sums are in another order. It is that of `verify` in
fp32."""

CheckVerdict = Literal["passed", "failed", "skipped"]
Rule = Callable[["CheckedRun", Mapping[str, "CheckedRun"]], str | None]
"""Returns the fault of a run; None if it has none. The arguments are the run, and the earlier runs
by name."""

_TEXT = ["data.name=synthetic", "train.precision=fp32"]
_SMALL = [
    "model.name=gpt",
    "model.args={num_layers: 4, width: 128, num_heads: 4, vocab_size: 512, sequence_length: 128}",
    "data.args={kind: language, vocabulary: 512}",
]
_LARGE = [
    "model.name=gpt2",
    "data.args={kind: language, vocabulary: 50257}",
]
_IMAGES = [
    "model.name=resnet18",
    "data.name=synthetic",
    "data.args={input_shape: [3, 64, 64], num_classes: 10}",
    "model.args={num_classes: 10}",
]


@dataclass(frozen=True)
class Check:
    """One run, and the rules that it must meet."""

    name: str
    promise: str
    """The behaviour that the check shows if it passes."""
    words: Sequence[str]
    """Overrides of the job, in addition to those of all checks."""
    rules: Sequence[Rule]
    strategy: str = "single"
    ranks: int = 1
    needs: str | None = None
    """The library without which the check is skipped; None if it needs none."""
    only: Literal["accelerator"] | None = None
    """The kind of device without which the check is skipped; None if it runs on all."""
    images: bool = False
    """Whether the run trains a convolutional network instead of a transformer."""
    gpu_words: Sequence[str] = ()
    """Further overrides on a GPU, where the model is larger."""


@dataclass(frozen=True)
class CheckedRun:
    """The result of a check."""

    name: str
    promise: str
    verdict: CheckVerdict
    explanation: str
    """The figures if the check passed, the fault if it failed, the reason if it was skipped."""
    command: str = ""
    """The command line that repeats the run; empty if the check was skipped."""
    status: int | None = None
    """The exit status of the run, 1 if it took too long; None if the check was skipped."""
    row: ComparisonRow | None = None
    """The measured and predicted figures of the run; None if it was skipped or failed."""
    memory: dict[str, Any] | None = None
    """The content of the run's memory.json: the bytes that tensors requested, and the bytes that
    the allocator took for them."""
    last_lines: list[str] = field(default_factory=list)
    """The last lines that the run printed."""


def write_figures(path: Path, runs: Iterable[CheckedRun]) -> None:
    """Write all figures of the runs as one JSON document."""
    document = {
        "surroundings": hardware_and_versions(),
        "devices": device_names(),
        "checks": [_as_json(run) for run in runs],
    }
    path.write_text(json.dumps(document, indent=1) + "\n", "utf-8")


def chosen_checks(only: str | None) -> Iterator[Check]:
    """Yield the checks to run, in their order.

    Args:
        only: the names of checks, separated by commas; None for all. The check `single`, with which
            others are compared, always runs.

    Raises:
        ConfigError: a name is unknown, or no name is given.
    """
    names = None if only is None else [name.strip() for name in only.split(",") if name.strip()]
    known = [check.name for check in CHECKS]
    for name in names or ():
        if name not in known:
            raise ConfigError(f"--only: there is no check {name}. Use one of {', '.join(known)}.")
    if names == []:
        raise ConfigError(f"--only names no check. Use one of {', '.join(known)}.")
    # The rules of other checks compare their runs with that of `single`.
    yield from (c for c in CHECKS if names is None or c.name in (*names, "single"))


def run_check(check: Check, before: Mapping[str, CheckedRun], folder: Path) -> CheckedRun:
    """Run a check and apply its rules.

    Args:
        check: the check.
        before: the earlier results, by name.
        folder: the folder in which the run gets a folder for its files.
    """
    reason = _skip_reason(check)
    if reason is not None:
        return CheckedRun(check.name, check.promise, "skipped", reason)
    words = [*_job(check), *check.words, *(check.gpu_words if accelerator() is not None else ())]
    run = QuietRun(
        command="train",
        strategy=check.strategy,
        num_ranks=check.ranks,
        folder=folder / check.name,
        words=words,
    )
    ended = run.run(LIMIT_S)
    row = None
    if ended.reason is None:
        row = ComparisonRow.of_run(check.name, check.ranks, run.folder)
    checked = CheckedRun(
        name=check.name,
        promise=check.promise,
        verdict="passed",
        explanation=_figures(row) if row is not None else str(ended.reason),
        command=shlex.join(["bigtrain", *run.line]),
        status=ended.status,
        row=row,
        memory=None if row is None else run.json("memory.json"),
        last_lines=read_text(run.log, errors="replace").splitlines()[-40:],
    )
    for rule in check.rules:
        fault = rule(checked, before)
        if fault is not None:
            return replace(checked, verdict="failed", explanation=fault)
    return checked


def _skip_reason(check: Check) -> str | None:
    """Return why a check cannot run here; None if it can."""
    kind = accelerator()
    if check.only == "accelerator" and kind is None:
        return "torch sees no GPU"
    if kind is not None and device_count() < check.ranks:
        return f"it needs {check.ranks} GPUs, and there is {device_count()}"
    if check.needs is not None and find_spec(check.needs) is None:
        return f"{check.needs} is not installed"
    return None


def _job(check: Check) -> list[str]:
    """Return the overrides of a check's job: a small model on a CPU, a common one on a GPU."""
    if check.images:
        job, batch = _IMAGES, 16
    else:
        job, batch = [*_TEXT, *(_SMALL if accelerator() is None else _LARGE)], 8
    return [
        *job,
        *(f"train.steps={STEPS}", f"train.global_batch_size={batch}"),
        f"memory.track_steps={TRACKED_STEPS}",
    ]


def _figures(row: ComparisonRow) -> str:
    peak = "-" if row.peak_bytes is None else format_bytes(row.peak_bytes)
    error = signed_share(row.error, 2)
    loss = row.losses[-1] if row.losses else float("nan")
    return f"peak {peak}, forecast {error}, loss {loss:.6f}"


def forecast_holds(run: CheckedRun, before: Mapping[str, CheckedRun]) -> str | None:
    """The rule that the predicted peak equals the measured one, within the tolerance.

    Args:
        run: the run to check.
        before: not used.

    Returns:
        The fault; None if the rule is met.
    """
    del before
    if run.row is None:
        return run.explanation
    kind = "cpu" if accelerator() is None else "accelerator"
    row, share, size = run.row, PEAK_TOLERANCE[kind], WORKSPACES[kind]
    if row.error is None or row.peak_bytes is None or row.predicted_peak_bytes is None:
        return "there is no forecast of its peak"
    off = abs(row.predicted_peak_bytes - row.peak_bytes)
    if off <= max(share * row.peak_bytes, size):
        return None
    allowed = f"{share:.1%}" if share * row.peak_bytes >= size else format_bytes(size)
    error = f"{signed_share(row.error, 2)} off ({format_bytes(off)})"
    return f"its forecast is {error}; {allowed} is allowed"


def same_losses(reference_name: str, share: float = LOSS_TOLERANCE) -> Rule:
    """Return the rule that the loss of every step equals that of another run, within a tolerance.

    Args:
        reference_name: the name of the check whose run is the reference.
        share: the share of the reference's loss by which a loss may differ.
    """

    def rule(run: CheckedRun, before: Mapping[str, CheckedRun]) -> str | None:
        row, reference = run.row, before[reference_name].row
        if row is None or reference is None:
            return (
                run.explanation
                if row is None
                else f"{reference_name} has no losses to compare with"
            )
        if len(row.losses) != len(reference.losses):
            return f"it has {len(row.losses)} losses, and {reference_name} {len(reference.losses)}"
        pairs = zip(row.losses, reference.losses, strict=True)
        shares = [abs(a - b) / abs(b) for a, b in pairs]
        large = [each for each in shares if not each <= share]  # `not <=` so that nan counts
        return (
            f"its losses differ by {large[0]:.1e} from those of {reference_name}" if large else None
        )

    return rule


def smaller_than(reference_name: str) -> Rule:
    """Return the rule that the peak of a run is below that of another run.

    Args:
        reference_name: the name of the check whose run is the reference.
    """

    def rule(run: CheckedRun, before: Mapping[str, CheckedRun]) -> str | None:
        row, reference = run.row, before[reference_name].row
        peaks = [None if each is None else each.peak_bytes for each in (row, reference)]
        if peaks[0] is None or peaks[1] is None:
            return f"a peak is missing, that of this run or of {reference_name}"
        if peaks[0] < peaks[1]:
            return None
        size, limit = format_bytes(peaks[0]), format_bytes(peaks[1])
        return f"its peak of {size} is not below the {limit} of {reference_name}"

    return rule


def explains_out_of_memory(run: CheckedRun, before: Mapping[str, CheckedRun]) -> str | None:
    """The rule that the run ends with status 1 and prints changes that are predicted to fit.

    Args:
        run: the run to check, whose job does not fit its memory cap.
        before: not used.

    Returns:
        The fault; None if the rule is met.
    """
    del before
    text = "\n".join(run.last_lines)
    if run.status != 1:
        return f"it ended with status {run.status} instead of 1"
    missing = [
        words
        for words in ("out of memory", "predicted to fit:")
        if words.lower() not in text.lower()
    ]
    return f"it does not say '{missing[0]}'" if missing else None


EXACT = (forecast_holds, same_losses("single"))
CHECKS = (
    Check("single", "the forecast of one process", [], [forecast_holds]),
    Check(
        "single_bf16",
        "the forecast under autocast",
        ["train.precision=bf16"],
        [forecast_holds, same_losses("single", 0.02)],
    ),
    Check(
        "recompute_full",
        "blocks recomputed in the backward pass",
        ["strategy.recompute=full"],
        [*EXACT, smaller_than("single")],
    ),
    Check(
        "recompute_selective",
        "products saved, the rest computed again",
        ["strategy.recompute=selective"],
        [*EXACT, smaller_than("single")],
    ),
    Check(
        "accumulation",
        "four micro-batches",
        ["train.micro_batch_size=2"],
        [*EXACT, smaller_than("single")],
    ),
    Check(
        "activations_disk",
        "activations on disk",
        [],
        [*EXACT, smaller_than("single")],
        strategy="single_activations_disk",
    ),
    Check(
        "activations_cpu",
        "activations on the host, copied while the GPU computes",
        ["strategy.offload.activations=cpu"],
        [*EXACT, smaller_than("single")],
        only="accelerator",
    ),
    Check(
        "optimizer_disk",
        "the optimizer's state on disk",
        [],
        EXACT,
        strategy="single_offload_disk",
    ),
    Check(
        "optimizer_cpu",
        "the optimizer's state on the host",
        [],
        EXACT,
        only="accelerator",
        strategy="single_offload_cpu",
    ),
    Check(
        "state_bf16",
        "the optimizer's state in bf16",
        ["optim.state=bf16"],
        [forecast_holds, same_losses("single", 0.01)],
    ),
    Check(
        "release_gradients",
        "each gradient used and freed as soon as it is complete",
        ["optim.release_gradients=true", "optim.clip_norm=null"],
        [forecast_holds],
    ),
    Check("compiled", "blocks compiled", ["train.compile=blocks"], [same_losses("single")]),
    Check("convolutions", "the forecast of ResNet-18", [], [forecast_holds], images=True),
    Check(
        "channels_last",
        "the same in the memory format channels_last",
        ["train.memory_format=channels_last"],
        [forecast_holds],
        images=True,
    ),
    Check("fsdp_1", "fully_shard on one rank", [], [same_losses("single")], strategy="fsdp"),
    Check(
        "zero2_1",
        "DeepSpeed's stage 2 on one rank",
        [],
        [same_losses("single")],
        needs="deepspeed",
        strategy="zero2",
    ),
    Check("ddp", "two replicas", [], EXACT, ranks=2, strategy="ddp"),
    Check("fsdp", "parameters, gradients and state in shards", [], EXACT, ranks=2, strategy="fsdp"),
    Check(
        "zero2",
        "DeepSpeed's stage 2",
        [],
        EXACT,
        ranks=2,
        needs="deepspeed",
        strategy="zero2",
    ),
    Check("1f1b", "a pipeline", ["train.micro_batch_size=2"], EXACT, ranks=2, strategy="1f1b"),
    Check(
        "cap",
        "a run that is out of memory names words that would fit",
        ["memory.cap=24MiB"],
        [explains_out_of_memory],
        gpu_words=["memory.cap=3GiB"],
    ),
)
"""The checks in the order in which they run. `single`, with which others are compared, is first."""


def _as_json(run: CheckedRun) -> dict[str, Any]:
    values = {**asdict(run), "row": None if run.row is None else run.row.as_json()}
    if run.verdict == "passed":
        values["last_lines"] = []
    if values["row"] is not None:
        values["row"].pop("timeline")  # it is as large as all other values together
    return values
