"""Run a strategy and a reference in one process, and compare their recordings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from bigtrain.compare.contenders import ComparedStrategy, without_strategy
from bigtrain.compare.subprocess_runs import QuietRun, RunOutcome
from bigtrain.core.strategy import Plan
from bigtrain.errors import BigtrainError, ConfigError
from bigtrain.files.parse import read_json_object
from bigtrain.job.arguments import ComparisonOptions
from bigtrain.job.load import ONE_PROCESS
from bigtrain.job.schema import Precision
from bigtrain.verify.differences import Differences, Tolerance, compare_recordings
from bigtrain.verify.localise import first_difference
from bigtrain.verify.reference import WITH_BF16_PARAMETERS, WITH_MOVED_WEIGHTS
from bigtrain.verify.tied_dropout import untied_reason

Verdict = Literal["pass", "differs", "refused", "failed"]


@dataclass(frozen=True)
class VerifiedStrategy:
    """The result of verifying one strategy."""

    strategy: str
    num_ranks: int
    verdict: Verdict
    precision: Precision
    reason: str | None = None
    """The reason why the strategy was refused, failed, or differs from a plain torch loop."""
    differences: Differences | None = None
    """The differences from the reference; None if the strategy did not run."""
    first_difference: str | None = None
    """A description of the first operation that differs from the reference, if the run differs."""
    moved: Differences | None = None
    """The differences of the reference from itself with perturbed weights; None if they were not
    needed."""
    dropout_off: str | None = None
    """The reason why dropout was off; None if it was as in the job."""
    plain_loop: str | None = None
    """The reason why the first steps were not compared with a plain torch loop; None if they
    were."""

    def as_json(self) -> dict[str, Any]:
        """Return the result as JSON values."""
        return asdict(self)


PLAIN = ("train.compile=none", "train.memory_format=contiguous")
"""KEY=VALUE words for the reference, which computes the model as it is written."""
_COMPILED = "train.compile=blocks: masks are tied to samples operation by operation"


class Bench:
    """Runs strategies and compares them with a reference, which runs in one process.

    The reference computes the whole global batch at once. If a sample's result depends on its
    micro-batch, the reference has the strategy's micro-batches. This is so with BatchNorm, and in
    bf16, where kernels sum over rows. In bf16 the layers of the reference use parameters of the
    same dtype as the strategy's layers. Dropout is off in both runs if its masks cannot be tied to
    samples. A reference is reused for all strategies that need the same settings.

    Args:
        options: the options of the command line.
        words: further KEY=VALUE words of every run.
        folder: the folder for the runs' files.
        localises: whether to search for the first operation that differs.
    """

    def __init__(
        self,
        options: ComparisonOptions,
        words: Sequence[str],
        folder: Path,
        *,
        localises: bool = True,
    ) -> None:
        self._options = options
        self._localises = localises
        self._words = words
        self._folder = folder
        self._references: dict[tuple[str, ...], Path] = {}
        self._micro_sizes: dict[Path, int] = {}
        self._from_itself: dict[Path, Differences] = {}
        self._dropout_off: str | None = None
        """The reason why dropout is off for the current strategy; None if it is on."""

    def check(self, contender: ComparedStrategy) -> VerifiedStrategy:
        """Run one strategy and compare it with the reference.

        Raises:
            ConfigError: the reference cannot run, or the model draws random numbers that verify
                cannot turn off.
            BigtrainError: the reference failed.
        """
        label, ranks = contender.label, contender.num_ranks
        if contender.plan is None:
            return VerifiedStrategy(label, ranks, "refused", "fp32", contender.refusal)
        self._dropout_off = _COMPILED if contender.plan.compiles_blocks else None
        reference = self._reference(contender.plan)
        self._dropout_off = self._dropout_off or untied_reason(reference, reference)
        row = self._compare(contender, contender.plan)
        if row.differences is not None and self._dropout_off is None:
            self._dropout_off = untied_reason(reference, self._folder / label)
            if self._dropout_off is not None:
                try:
                    row = self._compare(contender, contender.plan)
                except ConfigError as error:  # the reference without dropout cannot run
                    row = replace(row, verdict="refused", reason=str(error), differences=None)
        row = replace(row, dropout_off=self._dropout_off)
        if row.verdict == "differs" and self._localises:
            return replace(row, first_difference=self._localise(contender.plan, contender, row))
        return row

    def _compare(self, contender: ComparedStrategy, plan: Plan) -> VerifiedStrategy:
        label, ranks, precision = contender.label, contender.num_ranks, plan.precision
        reference = self._reference(plan)
        folder = self._folder / (label if self._dropout_off is None else f"{label}-no-dropout")
        words = [*self._options.overrides, *self._words]
        ended = self._record(folder, contender.strategy, ranks, words)
        if ended.reason is not None:
            verdict: Verdict = "refused" if ended.status == 2 else "failed"
            return VerifiedStrategy(label, ranks, verdict, precision, ended.reason)
        differences = compare_recordings(reference, folder)
        plain_loop = read_json_object(folder / "record.json")["plain_loop"]
        reason = _differs_from_plain_loop(folder)
        _forget(folder)
        row = VerifiedStrategy(
            label, ranks, "pass", precision, reason, differences, plain_loop=plain_loop
        )
        if reason is not None:
            return replace(row, verdict="differs", moved=self._moved(plan, reference))
        tolerance, losses_only = Tolerance.of(precision), self._options.optimizer == "job"
        if differences.passed(tolerance, losses_only=losses_only):
            return row
        moved = self._moved(plan, reference)
        row = replace(row, moved=moved)
        if moved is not None and differences.passed(tolerance, moved, losses_only=losses_only):
            return row
        return replace(row, verdict="differs")

    def _moved(self, plan: Plan, reference: Path) -> Differences | None:
        """Return the differences of the reference from itself with perturbed weights.

        The result is None in bf16, where a unit in the last place of a weight is not a small
        change.
        """
        if plan.precision == "bf16":
            return None
        if reference not in self._from_itself:
            folder = self._made(plan, self._micro_sizes[reference], WITH_MOVED_WEIGHTS)
            self._from_itself[reference] = compare_recordings(reference, folder)
            _forget(folder)
        return self._from_itself[reference]

    def _localise(self, plan: Plan, contender: ComparedStrategy, row: VerifiedStrategy) -> str:
        """Run the reference and the strategy again with a trace, and return the first difference.

        The reference has the strategy's micro-batches.
        """
        try:
            reference = self._made(plan, plan.batch.micro_size, traced=True)
        except (BigtrainError, ConfigError) as error:
            return f"not found: {error}"
        folder = self._folder / f"{row.strategy}-traced"
        words = [*self._options.overrides, *self._words]
        ended = self._record(folder, contender.strategy, row.num_ranks, words, traced=True)
        if ended.reason is not None:
            return f"not found: {ended.reason}"
        if row.differences is None:
            raise ValueError(f"{row.strategy} was not compared")
        tolerance = Tolerance.of(row.precision)
        difference = first_difference(reference, folder, row.differences, tolerance, row.moved)
        _forget(folder)
        return difference

    def close(self) -> None:
        """Remove the recorded tensors of all runs. They are as large as the model for each step."""
        for folder in self._folder.iterdir():
            _forget(folder)

    def _reference(self, plan: Plan) -> Path:
        if plan.precision == "bf16":
            return self._made(plan, plan.batch.micro_size)
        reference = self._made(plan, plan.batch.global_size)
        if read_json_object(reference / "record.json")["has_batchnorm"]:
            return self._made(plan, plan.batch.micro_size)
        return reference

    def _made(self, plan: Plan, micro: int, *changes: str, traced: bool = False) -> Path:
        clip = "null" if plan.clip_norm is None else repr(plan.clip_norm)
        of_plan: tuple[str, ...] = (
            f"train.global_batch_size={plan.batch.global_size}",
            f"train.micro_batch_size={micro}",
            f"train.precision={plan.precision}",
            f"optim.clip_norm={clip}",
        )
        if plan.bf16_parameters and plan.master_weights:
            of_plan += (WITH_BF16_PARAMETERS,)
        of_plan += changes
        made = (*of_plan, f"traced {traced}", f"dropout {self._dropout_off is None}")
        if made not in self._references:
            folder = self._folder / f"reference-{len(self._references) + 1}"
            words = [*without_strategy(self._options.overrides), *self._words]
            words += [*ONE_PROCESS, *PLAIN, *of_plan]
            ended = self._record(folder, "single", 1, words, traced=traced)
            if ended.status == 2:
                raise ConfigError(str(ended.reason))
            reason = ended.reason or _differs_from_plain_loop(folder)
            if reason is not None:
                raise BigtrainError(f"the reference, one process, failed: {reason}")
            if self._dropout_off is not None or untied_reason(folder, folder) is None:
                _refuse_random_model(folder)
            self._references[made] = folder
            self._micro_sizes[folder] = micro
        return self._references[made]

    def _record(
        self, folder: Path, strategy: str, ranks: int, words: Sequence[str], *, traced: bool = False
    ) -> RunOutcome:
        options = ["--trace"] if traced else []
        if self._dropout_off is not None:
            options.append("--no-dropout")
        run = QuietRun(
            command="record",
            strategy=strategy,
            num_ranks=ranks,
            folder=folder,
            words=words,
            job=self._options.job,
            options=options,
        )
        return run.run(self._options.time_limit)


def _forget(folder: Path) -> None:
    """Remove the recorded tensors and traces of a run."""
    for pattern in ("*.safetensors", "trace-*.json"):
        for path in folder.glob(pattern):
            path.unlink()


def _differs_from_plain_loop(folder: Path) -> str | None:
    """Return how a run differs from a plain torch loop; None if it does not."""
    recording = read_json_object(folder / "record.json")
    difference: str | None = recording["differs_from_plain_loop"]
    return difference


def _refuse_random_model(folder: Path) -> None:
    random_pair = read_json_object(folder / "record.json")["chance"]
    if random_pair is not None:
        raise ConfigError(
            f"the model draws random numbers that verify cannot turn off: two passes over one "
            f"batch gave the losses {random_pair[0]:.6g} and {random_pair[1]:.6g}. verify handles "
            "dropout whose masks have a row for each sample, and turns torch's modules off; set "
            "the model's other probabilities to 0 with model.args."
        )
