"""`bigtrain doctor --check`: short runs of what bigtrain promises, each held to a rule.

For whoever has a machine that bigtrain never ran on: a few minutes, a table of what passed, and one
JSON file with everything that was measured, to be sent in. The runs are those of users, by the
command, in processes of their own.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

from bigtrain.compare.rows import TRACKED_STEPS, ComparisonRow
from bigtrain.compare.subprocess_runs import run_bigtrain
from bigtrain.devices import accelerator, device_count, device_names
from bigtrain.errors import ConfigError
from bigtrain.files.parse import read_json_object
from bigtrain.files.regular import read_text
from bigtrain.job.command_parser import CommandParser
from bigtrain.machine.versions import hardware_and_versions
from bigtrain.units import MIB, format_bytes, signed_share

LIMIT_S = 120.0
"""Seconds that a run may take."""
STEPS = 6
EXACT = {"cpu": 0.005, "accelerator": 0.01}
"""By which share a forecast may be off: kernels of accelerators keep what no forecast knows."""
WORKSPACES = {"cpu": 0, "accelerator": 64 * MIB}
"""Or by so many bytes, where that is more: what kernels take inside does not grow with a model."""
SAME_LOSSES = 1e-5
"""By which share losses may differ where the order of sums may: as `verify` has it in fp32."""

CheckVerdict = Literal["passed", "failed", "skipped"]
Rule = Callable[["CheckedRun", Mapping[str, "CheckedRun"]], str | None]
"""What is wrong with a run, given those before it; None where nothing is."""

_TEXT = ["data.name=synthetic", "train.precision=fp32", "checkpoint.at_end=false"]
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
    "checkpoint.at_end=false",
]


@dataclass(frozen=True)
class Check:
    """One run, and what it has to show."""

    name: str
    shows: str
    words: Sequence[str]
    rules: Sequence[Rule]
    ranks: int = 1
    needs: str | None = None
    """A library without which it is skipped."""
    only: Literal["accelerator"] | None = None
    images: bool = False
    """Whether it trains a convolutional network instead of a transformer."""
    gpu_words: Sequence[str] = ()
    """Further words on a GPU, whose job is larger."""


@dataclass(frozen=True)
class CheckedRun:
    """What came of it."""

    name: str
    shows: str
    verdict: CheckVerdict
    told: str
    """The figures where it passed, else what was wrong, or why it was skipped."""
    command: str = ""
    status: int | None = None
    row: ComparisonRow | None = None
    memory: dict[str, Any] | None = None
    """What memory.json has of it: what tensors asked for, and what the allocator took for them."""
    last_lines: list[str] = field(default_factory=list)
    """Of what it printed, where it did not pass."""


def main(arguments: list[str]) -> int:
    """Run the list; returns the exit status: 0 where nothing failed, else 1."""
    parser = CommandParser(
        prog="bigtrain doctor --check",
        description="Run what bigtrain promises on this machine, and hold each run to a rule.",
    )
    parser.add_argument("--only", metavar="NAMES", help="some of the list, with commas between")
    parser.add_argument("--output", default="check.json", help="the file for all figures")
    options = parser.parse_args(arguments)
    checks = list(_wanted(options.only))
    if not Path(options.output).resolve().parent.is_dir():
        raise ConfigError(f"--output {options.output}: there is no such folder. Make it first.")
    progress = Console(stderr=True, soft_wrap=True, highlight=False, markup=False)
    runs: dict[str, CheckedRun] = {}
    with tempfile.TemporaryDirectory(prefix="bigtrain-check-") as folder:
        for number, check in enumerate(checks, start=1):
            run = run_check(check, runs, Path(folder))
            runs[check.name] = run
            _keep(Path(options.output), runs.values())  # now: the next may end the machine
            progress.print(f"{number}/{len(checks)} {run.name}: {run.verdict}. {run.told}")
    console = Console() if sys.stdout.isatty() else Console(width=160)
    console.print(_table(list(runs.values())))
    console.print(f"all figures: {options.output}", highlight=False, markup=False, soft_wrap=True)
    return 1 if any(run.verdict == "failed" for run in runs.values()) else 0


def _keep(path: Path, runs: Iterable[CheckedRun]) -> None:
    document = {
        "surroundings": hardware_and_versions(),
        "devices": device_names(),
        "checks": [_as_json(run) for run in runs],
    }
    path.write_text(json.dumps(document, indent=1) + "\n", "utf-8")


def _wanted(only: str | None) -> Iterator[Check]:
    names = None if only is None else [name.strip() for name in only.split(",") if name.strip()]
    known = [check.name for check in CHECKS]
    for name in names or ():
        if name not in known:
            raise ConfigError(f"--only: there is no check {name}. Use one of {', '.join(known)}.")
    if names == []:
        raise ConfigError(f"--only names no check. Use one of {', '.join(known)}.")
    # What others are held against runs with them.
    yield from (c for c in CHECKS if names is None or c.name in (*names, "single"))


def run_check(check: Check, before: Mapping[str, CheckedRun], folder: Path) -> CheckedRun:
    """Run one and hold it to its rules.

    Args:
        check: which.
        before: those that ran, by name.
        folder: for what it writes.
    """
    why = _missing(check)
    if why is not None:
        return CheckedRun(check.name, check.shows, "skipped", why)
    line = ["train", "-n", str(check.ranks), *_job(check), *check.words]
    line += check.gpu_words if accelerator() is not None else ()
    if "--strategy" not in line:
        line += ["--strategy", "single"]
    line += [f"log.dir={json.dumps(str(folder))}", f"log.name={check.name}"]
    ended = run_bigtrain(line, folder / f"{check.name}.log", LIMIT_S)
    row = None
    if ended.reason is None:
        row = ComparisonRow.of_run(check.name, check.ranks, folder / check.name)
    printed = read_text(folder / f"{check.name}.log", errors="replace").splitlines()
    shown = ("bigtrain", *line[:-2])
    run = CheckedRun(
        check.name,
        check.shows,
        "passed",
        _figures(row) if row is not None else str(ended.reason),
        " ".join(shown),
        ended.status,
        row,
        None if row is None else read_json_object(folder / check.name / "memory.json"),
        printed[-40:],
    )
    for rule in check.rules:
        wrong = rule(run, before)
        if wrong is not None:
            return CheckedRun(**{**vars(run), "verdict": "failed", "told": wrong})
    return run


def _missing(check: Check) -> str | None:
    """Why a check cannot run here."""
    kind = accelerator()
    if check.only == "accelerator" and kind is None:
        return "torch sees no GPU"
    if kind is not None and device_count() < check.ranks:
        return f"it needs {check.ranks} GPUs, and there is {device_count()}"
    if check.needs is not None and find_spec(check.needs) is None:
        return f"{check.needs} is not installed"
    return None


def _job(check: Check) -> list[str]:
    """The job of a check: small on a CPU, a real one on a GPU."""
    if check.images:
        job, batch = _IMAGES, 16
    else:
        job, batch = [*_TEXT, *(_SMALL if accelerator() is None else _LARGE)], 8
    return [
        *job,
        *(f"train.steps={STEPS}", f"train.global_batch_size={batch}", "train.eval_every=0"),
        *(f"memory.track_steps={TRACKED_STEPS}", "memory.on_oom=stop"),
    ]


def _figures(row: ComparisonRow) -> str:
    peak = "-" if row.peak_bytes is None else format_bytes(row.peak_bytes)
    error = signed_share(row.error, 2)
    loss = row.losses[-1] if row.losses else float("nan")
    return f"peak {peak}, forecast {error}, loss {loss:.6f}"


def forecast_holds(run: CheckedRun, before: Mapping[str, CheckedRun]) -> str | None:
    """The predicted peak is the measured one."""
    del before
    if run.row is None:
        return run.told
    kind = "cpu" if accelerator() is None else "accelerator"
    row, share, size = run.row, EXACT[kind], WORKSPACES[kind]
    if row.error is None or row.peak_bytes is None or row.predicted_peak_bytes is None:
        return "there is no forecast of its peak"
    off = abs(row.predicted_peak_bytes - row.peak_bytes)
    if off <= max(share * row.peak_bytes, size):
        return None
    which = f"{share:.1%}" if share * row.peak_bytes >= size else format_bytes(size)
    return f"its forecast is {signed_share(row.error, 2)} off ({format_bytes(off)}); {which} may be"


def same_losses(other: str, share: float = SAME_LOSSES) -> Rule:
    """Every step's loss is another run's."""

    def rule(run: CheckedRun, before: Mapping[str, CheckedRun]) -> str | None:
        row, reference = run.row, before[other].row
        if row is None or reference is None:
            return run.told if row is None else f"{other} has no losses to compare with"
        if len(row.losses) != len(reference.losses):
            return f"it has {len(row.losses)} losses, and {other} {len(reference.losses)}"
        pairs = zip(row.losses, reference.losses, strict=True)
        shares = [abs(a - b) / abs(b) for a, b in pairs]
        wrong = [each for each in shares if not each <= share]  # so that nan is
        return f"its losses are {wrong[0]:.1e} from those of {other}" if wrong else None

    return rule


def smaller_than(other: str) -> Rule:
    """Its peak is below another run's."""

    def rule(run: CheckedRun, before: Mapping[str, CheckedRun]) -> str | None:
        row, reference = run.row, before[other].row
        peaks = [None if each is None else each.peak_bytes for each in (row, reference)]
        if peaks[0] is None or peaks[1] is None:
            return f"a peak is missing, its own or that of {other}"
        if peaks[0] < peaks[1]:
            return None
        own, others = (format_bytes(peak) for peak in peaks if peak is not None)
        return f"its peak of {own} is not below the {others} of {other}"

    return rule


def ends_for_want_of_memory(run: CheckedRun, before: Mapping[str, CheckedRun]) -> str | None:
    """It ends with status 1, and with words to type that would fit."""
    del before
    text = "\n".join(run.last_lines)
    if run.status != 1:
        return f"it ended with status {run.status} and not with 1"
    missing = [
        words for words in ("out of memory", "what would fit") if words.lower() not in text.lower()
    ]
    return f"it does not say '{missing[0]}'" if missing else None


HELD = (forecast_holds, same_losses("single"))
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
        "blocks computed again",
        ["strategy.recompute=full"],
        [*HELD, smaller_than("single")],
    ),
    Check(
        "recompute_selective",
        "products kept, the rest computed again",
        ["strategy.recompute=selective"],
        [*HELD, smaller_than("single")],
    ),
    Check(
        "accumulation",
        "four micro-batches",
        ["train.micro_batch_size=2"],
        [*HELD, smaller_than("single")],
    ),
    Check(
        "activations_disk",
        "activations on disk",
        ["--strategy", "single_activations_disk"],
        [*HELD, smaller_than("single")],
    ),
    Check(
        "activations_cpu",
        "activations on the host, copied beside computing",
        ["strategy.offload.activations=cpu"],
        [*HELD, smaller_than("single")],
        only="accelerator",
    ),
    Check(
        "optimizer_disk",
        "the optimizer's state on disk",
        ["--strategy", "single_offload_disk"],
        HELD,
    ),
    Check(
        "optimizer_cpu",
        "the optimizer's state on the host",
        ["--strategy", "single_offload_cpu"],
        HELD,
        only="accelerator",
    ),
    Check(
        "state_bf16",
        "the optimizer's state in bf16",
        ["optim.state=bf16"],
        [forecast_holds, same_losses("single", 0.01)],
    ),
    Check(
        "release_gradients",
        "each gradient used as soon as it is there",
        ["optim.release_gradients=true", "optim.clip_norm=null"],
        [forecast_holds],
    ),
    Check("compiled", "blocks compiled", ["train.compile=blocks"], [same_losses("single")]),
    Check("convolutions", "the forecast of ResNet-18", [], [forecast_holds], images=True),
    Check(
        "channels_last",
        "the same, with its channels last",
        ["train.memory_format=channels_last"],
        [forecast_holds],
        images=True,
    ),
    Check("fsdp_1", "fully_shard on one rank", ["--strategy", "fsdp"], [same_losses("single")]),
    Check(
        "zero2_1",
        "DeepSpeed's stage 2 on one rank",
        ["--strategy", "zero2"],
        [same_losses("single")],
        needs="deepspeed",
    ),
    Check("ddp", "two replicas", ["--strategy", "ddp"], HELD, ranks=2),
    Check("fsdp", "shards of everything", ["--strategy", "fsdp"], HELD, ranks=2),
    Check(
        "zero2",
        "DeepSpeed's stage 2",
        ["--strategy", "zero2"],
        HELD,
        ranks=2,
        needs="deepspeed",
    ),
    Check("1f1b", "a pipeline", ["--strategy", "1f1b", "train.micro_batch_size=2"], HELD, ranks=2),
    Check(
        "cap",
        "a run that is out of memory says what would fit",
        ["memory.cap=24MiB"],
        [ends_for_want_of_memory],
        gpu_words=["memory.cap=3GiB"],
    ),
)
"""In the order in which they run; what others are held against first."""


def _as_json(run: CheckedRun) -> dict[str, Any]:
    kept = {**asdict(run), "row": None if run.row is None else run.row.as_json()}
    if run.verdict == "passed":
        kept["last_lines"] = []
    if kept["row"] is not None:
        kept["row"].pop("timeline")
    return kept


def verdicts_line(runs: Sequence[CheckedRun]) -> str:
    """How many passed, failed and were skipped; kinds of which there is none are left out."""
    counts = Counter(run.verdict for run in runs)
    kinds: tuple[CheckVerdict, ...] = ("passed", "failed", "skipped")
    return ", ".join(f"{counts[kind]} {kind}" for kind in kinds if counts[kind]) or "nothing ran"


def _table(runs: Sequence[CheckedRun]) -> Table:
    table = Table(title=verdicts_line(runs), title_justify="left")
    for name in ("check", "what it shows", "", "figures, or what is wrong"):
        table.add_column(name, overflow="fold")
    for run in runs:
        table.add_row(run.name, run.shows, run.verdict, run.told)
    return table
