"""`bigtrain strategies`: each preset with its summary, its number of ranks and its combinations.

Several names joined by `+` are explained as one strategy.

There is no list of valid combinations. `make_plan` is called with each addition, and if it refuses
the combination, its reason is shown.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from bigtrain.assembly.make_plan import device_type_of, make_plan
from bigtrain.core.registry import make_technique, technique_class
from bigtrain.core.strategy import Plan
from bigtrain.core.traits import Need
from bigtrain.errors import ConfigError
from bigtrain.job.command_parser import CommandParser
from bigtrain.job.load import job_from_keys
from bigtrain.job.presets import preset_line, preset_names
from bigtrain.job.schema import Job, Role, RoleConfig
from bigtrain.job.strategy_words import KIND, read_strategy, whole_strategies
from bigtrain.ranks.exit_status import error_summary

RANKS = (1, 2, 4)
"""The numbers of ranks that are tried."""
HEADINGS = ("Memory", "Communication", "Constraints", "Example", "Source")
"""The sections of a technique's docstring."""


@dataclass(frozen=True)
class Addition:
    """A technique or another setting that a user may add to a preset."""

    name: str
    """The key of the addition in the JSON document."""
    shown: str
    """The words for the addition in the text for a terminal."""
    keys: Mapping[str, Any]
    """The keys of a job that make the addition, by dotted name."""
    has: Callable[[Plan], bool]
    """Returns whether a plan already has the addition."""
    least_ranks: int = 1
    """The smallest number of ranks with which the addition is tried."""

    @property
    def words(self) -> str:
        """The addition as KEY=VALUE words of the command line."""
        return " ".join(f"{key}={value}" for key, value in self.keys.items())


ADDITIONS = (
    Addition(
        *("recompute_full", "recompute full"),
        {"strategy.recompute.mode": "full"},
        lambda plan: _option(plan, "recompute", "mode") == "full",
    ),
    Addition(
        *("recompute_selective", "recompute selective"),
        {"strategy.recompute.mode": "selective"},
        lambda plan: _option(plan, "recompute", "mode") == "selective",
    ),
    Addition(
        *("optimizer_disk", "optimizer state on disk"),
        {"strategy.offload.optimizer": "disk"},
        lambda plan: plan.offload_tiers.optimizer == "disk",
    ),
    Addition(
        *("activations_disk", "activations on disk"),
        {"strategy.offload.activations": "disk"},
        lambda plan: plan.offload_tiers.activations == "disk",
    ),
    Addition(
        *("cut_1f1b", "a cut by 1f1b"),
        {"strategy.cut.name": "pipeline", "strategy.cut.schedule": "1f1b", "mesh.pp": 2},
        lambda plan: "cut" in plan.techniques,
        least_ranks=2,
    ),
    Addition(
        *("accumulation", "accumulation"),
        {"train.accumulation_steps": 2},
        lambda plan: plan.batch.accumulation_steps > 1,
    ),
    Addition(
        *("bf16", "bf16"),
        {"train.precision": "bf16"},
        lambda plan: plan.precision == "bf16",
    ),
    Addition(
        *("fp64", "fp64"),
        {"train.precision": "fp64"},
        lambda plan: plan.precision == "fp64",
    ),
)


def _option(plan: Plan, role: Role, key: str) -> Any:
    return getattr(plan.techniques.get(role), key, None)


@dataclass(frozen=True)
class PlanAttempt:
    """The result of trying to plan a job on several numbers of ranks."""

    plan: Plan | None
    """The plan for the first number of ranks that `make_plan` accepted; None if it accepted
    none."""
    ranks: int | None
    """The number of ranks of `plan`; None if `make_plan` accepted none."""
    reason: str | None
    """Why `make_plan` refused the first number of ranks, if it accepted none."""


def main(arguments: list[str]) -> int:
    """Run `bigtrain strategies`: list the strategies, or explain one.

    Args:
        arguments: the command's arguments.

    Returns:
        The exit status 0.

    Raises:
        ConfigError: the name is unknown.
    """
    parser = CommandParser(
        prog="bigtrain strategies",
        description="List the strategies and what they combine with, or explain one; several names "
        "joined by + are one strategy.",
    )
    parser.add_argument(
        "name", nargs="?", metavar="NAME", help="the one to explain: NAME, or NAME+NAME"
    )
    parser.add_argument(
        "--json", dest="as_json", action="store_true", help="one JSON document on standard output"
    )
    options = parser.parse_args(arguments)
    rows = strategy_list(None if options.name is None else [options.name])
    if options.as_json:
        sys.stdout.write(json.dumps(rows, indent=2) + "\n")
    elif options.name is None:
        _show_list(rows)
    else:
        _show_one(rows[0])
    return 0


def strategy_list(names: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Return an entry for each strategy, as JSON values: its roles, ranks and combinations.

    Args:
        names: the strategies, each a preset, a file, or several of them joined by `+`; None lists
            all presets that are whole strategies.

    Raises:
        ConfigError: a name is unknown.
    """
    with _quiet():
        return [_row(name) for name in (whole_strategies() if names is None else names)]


def refusals() -> Iterator[tuple[str, int | None, str | None]]:
    """Yield each whole strategy's name, its smallest number of ranks, and why it cannot run here.

    The number is None if the strategy cannot run on this machine; otherwise the reason is None.
    """
    for name in whole_strategies():
        with _quiet():
            tried = _try_alone(job_from_keys(name, {}))
        yield name, tried.ranks, tried.reason


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """A context in which standard output becomes standard error, and warnings are not shown.

    Libraries print messages when they are imported.
    """
    with contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _row(name: str) -> dict[str, Any]:
    job = job_from_keys(name, {})
    roles = job.strategy.roles()
    tried = _try_alone(job)
    return {
        "name": job.strategy.name,
        "summary": _summary(name, roles),
        "need": _need(roles),
        "roles": {role: config.name for role, config in roles.items()},
        "options": {role: config.options for role, config in roles.items()},
        "sections": {role: _sections(role, config) for role, config in roles.items()},
        "device": device_type_of(job),
        "ranks": tried.ranks,
        "runs_on": [count for count in RANKS if _try(job, [count]).plan is not None],
        "unavailable": tried.reason,
        "combines": {addition.name: _combined(name, addition, tried) for addition in ADDITIONS},
    }


def _summary(name: str, roles: Mapping[Role, RoleConfig]) -> str:
    """Return a preset's summary; for a file or several words, the summaries of the techniques."""
    if name in preset_names(KIND):
        return preset_line(KIND, name)
    return "; ".join(_line(role, config) for role, config in roles.items())


def _need(roles: Mapping[Role, RoleConfig]) -> Need:
    """Return the need of a strategy: the last of its techniques' needs in the order of `NEEDS`."""
    needs = [make_technique(role, config).need for role, config in roles.items()]
    return max(needs, key=list(NEEDS).index)


def _line(role: Role, config: RoleConfig) -> str:
    """Return a technique's summary with the options that the preset sets."""
    options = ", ".join(f"{key}={value}" for key, value in config.options.items())
    summary = technique_class(role, config.name).summary
    return f"{summary} ({options})" if options else summary


def _sections(role: Role, config: RoleConfig) -> dict[str, str]:
    """Return the sections of the docstring of a technique's module, by heading."""
    document = sys.modules[technique_class(role, config.name).__module__].__doc__ or ""
    sections: dict[str, str] = {}
    heading = None
    for line in document.splitlines():
        heading_match = re.match(rf"({'|'.join(HEADINGS)}): (.*)", line)
        if heading_match:
            heading = heading_match[1]
            sections[heading] = heading_match[2].strip()
        elif not line.strip():
            heading = None
        elif heading is not None:
            sections[heading] += f" {line.strip()}"
    return sections


def _try_alone(job: Job) -> PlanAttempt:
    # A distributed pipeline needs two ranks. Its refusal of one rank would hide a reason for which
    # it also refuses more ranks.
    cut = job.strategy.roles().get("cut")
    is_distributed = cut is not None and "devices" not in cut.options
    return _try(job, [count for count in RANKS if count > 1 or not is_distributed])


def _try(job: Job, counts: Iterable[int]) -> PlanAttempt:
    reason = None
    for count in counts:
        try:
            return PlanAttempt(make_plan(job, count, device_type_of(job)), count, None)
        except ConfigError as error:
            reason = reason or str(error)
        except Exception as error:  # noqa: BLE001 - a broken library may raise anything
            reason = reason or error_summary(error)
    return PlanAttempt(None, None, reason)


def _combined(name: str, addition: Addition, alone: PlanAttempt) -> dict[str, Any]:
    """Return whether an addition works with a strategy, as JSON values.

    `works` is None if the strategy cannot run here without the addition. `own` is whether the
    strategy already has the addition.
    """
    if alone.plan is None or alone.ranks is None:
        return {"works": None, "own": False, "ranks": None, "reason": alone.reason}
    if addition.has(alone.plan):
        return {"works": True, "own": True, "ranks": alone.ranks, "reason": None}
    least = max(alone.ranks, addition.least_ranks)
    try:
        job = job_from_keys(name, addition.keys)
    except ConfigError as error:
        return {"works": False, "own": False, "ranks": None, "reason": str(error)}
    tried = _try(job, [count for count in RANKS if count >= least])
    works = tried.plan is not None
    return {"works": works, "own": False, "ranks": tried.ranks, "reason": tried.reason}


def _console() -> Console:
    width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else 120
    return Console(width=width, markup=False, highlight=False)


NEEDS: Mapping[Need, str] = {
    "nothing": "All of it fits on one device",
    "optimizer": "The optimizer's state does not fit",
    "activations": "Activations do not fit",
    "gradients": "The optimizer's state and the gradients do not fit",
    "parameters": "The parameters do not fit either",
    "model": "The model does not fit: stages of layers on the ranks",
    "layer": "A single layer does not fit, or takes too long: slices of layers on the ranks",
    "slow links": "Links are too slow for an exchange in every step (numbers differ by design)",
    "learning": "For study: other strategies do the same better",
}
"""The headings of the list by the need that strategies serve, from the least to the greatest."""


def _show_list(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print a line for each strategy and for each word that can be added to a strategy, by need."""
    console = _console()
    lines: dict[Need, list[tuple[str, str, str]]] = {need: [] for need in NEEDS}
    for row in rows:
        more = "+" if len(row["runs_on"]) > 1 else ""
        ranks = "-" if row["ranks"] is None else f"{row['ranks']}{more}"
        lines[row["need"]].append((row["name"], ranks, row["summary"]))
    for name in _added_words():
        roles = job_from_keys(f"single+{name}", {}).strategy.roles()
        lines[_need(roles)].append((f"+{name}", "", preset_line(KIND, name)))
    width = max(len(name) for group in lines.values() for name, _, _ in group)
    for need, group in lines.items():
        if not group:
            continue
        console.print(Text(NEEDS[need], style="bold"))
        table = Table.grid(padding=(0, 2, 0, 0))
        table.add_column(no_wrap=True, min_width=width + 2)
        table.add_column(no_wrap=True, min_width=2)
        table.add_column()
        for name, ranks, summary in group:
            table.add_row(f"  {name}", ranks, summary)
        console.print(table)
    console.print()
    for row in rows:
        if row["unavailable"] is not None:
            console.print(f"{row['name']} cannot run here: {row['unavailable']}")
    console.print(
        "The number is the number of ranks (2+: two or more; -: it cannot run here). Words with + "
        "are added to another strategy, as in ddp+full; some take a value, as every_3."
    )
    console.print("To read what one does, costs and combines with: bigtrain strategies NAME")
    console.print("To use one: bigtrain train -n 2 --strategy NAME")


def _added_words() -> Iterator[str]:
    """Yield the presets that can only be added to others; of several with equal keys, the first."""
    meanings: list[Any] = []
    for name in sorted(set(preset_names(KIND)) - set(whole_strategies())):
        values = read_strategy(name, "").values
        meaning = {**values, "strategy": {**values["strategy"], "name": ""}}
        if meaning not in meanings:
            meanings.append(meaning)
            yield name


def _show_one(row: Mapping[str, Any]) -> None:
    console = _console()
    console.print(Text(row["name"], style="bold"), row["summary"], sep=": ")
    if row["unavailable"] is not None:
        console.print(f"It cannot run here: {row['unavailable']}")
    else:
        ranks = f"{row['ranks']} rank{'s' if row['ranks'] > 1 else ''}"
        more = " or more" if len(row["runs_on"]) > 1 else ""
        console.print(f"It runs here on {ranks}{more} ({row['device']}).")
    for role, name in row["roles"].items():
        console.print()
        console.print(Text(f"strategy.{role}: {name}", style="bold"))
        parts = Table.grid(padding=(0, 2, 0, 0))
        for heading, text in row["sections"][role].items():
            parts.add_row(f"  {heading}", text)
        parts.add_row("  Options", _all_options(role, name, row["options"][role]))
        console.print(parts)
    if row["unavailable"] is not None:
        return
    console.print()
    answers = Table.grid(padding=(0, 2, 0, 0))
    answers.add_column(no_wrap=True)
    for addition in ADDITIONS:
        answers.add_row(*_answer(addition, row["combines"][addition.name], row["ranks"]))
    console.print(answers)


def _all_options(role: Role, name: str, preset_options: Mapping[str, Any]) -> str:
    """Return the options of a technique as KEY=VALUE words: the preset's values or the defaults."""
    fields = technique_class(role, name).model_fields
    words = [
        f"{key}={_word(preset_options.get(key, field.get_default(call_default_factory=True)))}"
        for key, field in fields.items()
    ]
    return " ".join(words) or "none"


def _word(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return str(value).lower().replace("none", "null")
    return f"[{','.join(map(str, value))}]" if isinstance(value, list | tuple) else str(value)


def _answer(addition: Addition, combination: Mapping[str, Any], ranks: int) -> tuple[Text, str]:
    if combination["own"]:
        return Text(f"has {addition.shown}", style="dim"), ""
    if not combination["works"]:
        return Text(f"refuses {addition.shown}:", style="red"), combination["reason"]
    more = f" (from {combination['ranks']} ranks on)" if combination["ranks"] > ranks else ""
    return Text(f"works with {addition.shown}:", style="green"), addition.words + more
