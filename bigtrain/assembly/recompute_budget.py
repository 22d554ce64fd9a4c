"""Choose a recompute policy for each block under a budget of bytes, and check it by a forecast."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from bigtrain.activations.budget_solver import BudgetSolution, fastest_within, lowest_peak
from bigtrain.activations.policy import BLOCK_POLICIES, BlockPolicy
from bigtrain.assembly.block_prices import BudgetProblem, UniformForecast, make_budget_problem
from bigtrain.core.layer_strategies import RecomputeStrategy
from bigtrain.core.resolved import ResolvedPlan
from bigtrain.core.strategy import CutStrategy, Plan
from bigtrain.core.workload import Workload
from bigtrain.cutting.choose import NOMINAL_RATES
from bigtrain.cutting.layout import Layout
from bigtrain.devices import tracing_device
from bigtrain.errors import ConfigError
from bigtrain.memory.timeline import MEMORY_KINDS, MemoryKind, Peak
from bigtrain.models.blocks import find_blocks
from bigtrain.prediction.operation_log import BlockCost, block_costs
from bigtrain.prediction.predict import forecast_rank
from bigtrain.slicing.state import ModelSlices
from bigtrain.tensors.cuda_program import stands_for_cuda
from bigtrain.tracing.watch import untraceable_reason
from bigtrain.units import format_bytes

RECOMPUTE_RATES = {**NOMINAL_RATES, "cpu": replace(NOMINAL_RATES["cpu"], nbytes=1e9)}
"""Nominal rates, of which only the ratio matters. On a CPU, operations between matrix products
(GELU, norms) move about a 50th as many bytes a second as products do FLOPs. The rates are constants
because all ranks must make the same choice."""
MAX_FORECASTS = 8
"""The most forecasts of a search. Each checks a solution, and corrects the solver's budget."""


def meet_budget(
    plan: Plan,
    technique: RecomputeStrategy,
    limit: int,
    workload: Workload,
    layout: Layout | None = None,
    slices: ModelSlices | None = None,
) -> ResolvedPlan:
    """Choose the fastest policy for each block with which no rank's peak exceeds a limit.

    Needs no process group, and gives the same result on all ranks.

    Args:
        plan: the plan of the run.
        technique: the plan's recompute technique.
        limit: the most bytes of each rank.
        workload: a workload with an example.
        layout: the cut of the model; None without a cut.
        slices: the slices of the model's layers; None without slices.

    Raises:
        ConfigError: the workload has no example, the model has no blocks or cannot be forecast, or
            the smallest peak exceeds the limit.
    """
    if workload.example is None:
        raise ConfigError(
            "strategy.recompute.budget chooses policies by a forecast of memory, and a forecast "
            "needs one micro-batch. Give prepare(..., example=(inputs, targets))."
        )
    names = [name for name, _ in find_blocks(workload.model)]
    if not names:
        raise ConfigError(
            "strategy.recompute.budget chooses a policy for each repeated block, and this model "
            "has none. Name the modules to recompute: strategy.recompute.layers=[...]."
        )
    bf16 = plan.precision == "bf16"
    device, rates = tracing_device(plan.device_type), RECOMPUTE_RATES[plan.device_type]
    try:
        seen = (workload.model, names, workload.example, rates, device)
        costs = block_costs(*seen, bf16=bf16, of_cuda=stands_for_cuda(plan.device_type, device))
    except Exception as error:  # the user's model may raise anything
        raise ConfigError(_no_forecast(untraceable_reason(error))) from error
    task = _BudgetTask(plan, technique, limit, workload, layout, slices, costs)
    blocks: dict[str, BlockPolicy] = dict.fromkeys(names, "keep")
    lines = []
    for pp_rank in range(plan.pp):
        solution = task.solve(names, pp_rank)
        blocks.update(solution.blocks)
        lines.append(task.line(solution, pp_rank))
    chosen = task.with_policies(blocks)
    return replace(chosen, notes=tuple(lines))


@dataclass(frozen=True)
class _ProvenSolution:
    """The policies of one rank's blocks, with the peak of a forecast and the added seconds."""

    blocks: dict[str, BlockPolicy]
    peak: Peak
    seconds: float


def _no_forecast(reason: str) -> str:
    return (
        "strategy.recompute.budget chooses policies by a forecast of memory, and this run cannot "
        f"be forecast: {reason}. "
        "Use strategy.recompute.mode=full, or every, or layers."
    )


def _uniform_solution(chain: BudgetProblem, index: int, peak: Peak) -> _ProvenSolution:
    seconds = sum(prices[index].seconds for prices in chain.policy_costs)
    return _ProvenSolution(dict.fromkeys(chain.names, chain.policies[index]), peak, seconds)


@dataclass(frozen=True)
class _BudgetTask:
    plan: Plan
    technique: RecomputeStrategy
    limit: int
    workload: Workload
    layout: Layout | None
    slices: ModelSlices | None
    costs: Mapping[str, BlockCost]

    def solve(self, names: Sequence[str], pp_rank: int) -> _ProvenSolution:
        """Choose policies for the blocks of one rank.

        Raises:
            ConfigError: no choice fits. The message contains the smallest peak.
        """
        uniform = dict(self._uniform(names, pp_rank))
        peak_keeping_all = uniform["keep"].forecast.peak()
        if peak_keeping_all.bytes <= self.limit:
            block_names = [
                name for profile, _ in uniform["keep"].stages for name, _, _ in profile.windows
            ]
            return _ProvenSolution(dict.fromkeys(block_names, "keep"), peak_keeping_all, 0.0)
        waiting = self._waiting(pp_rank)
        place = self.plan.offload_tiers.activations
        chain = make_budget_problem(uniform, self.costs, waiting=waiting, place=place)
        solutions = [
            _uniform_solution(chain, place, uniform_forecast.forecast.peak())
            for place, uniform_forecast in enumerate(uniform.values())
        ]
        solutions += self._search(chain, pp_rank)
        feasible = [solution for solution in solutions if solution.peak.bytes <= self.limit]
        if not feasible:
            solutions.append(self._proven(chain, lowest_peak(*chain.solver_arguments), pp_rank))
            feasible = solutions[-1:] if solutions[-1].peak.bytes <= self.limit else []
        if not feasible:
            smallest = min((solution.peak for solution in solutions), key=lambda peak: peak.bytes)
            raise ConfigError(self._too_small(smallest, pp_rank))
        return min(feasible, key=lambda solution: (solution.seconds, solution.peak.bytes))

    def _uniform(
        self, names: Sequence[str], pp_rank: int
    ) -> Iterator[tuple[BlockPolicy, UniformForecast]]:
        """Yield each policy that works with the model, and the forecast if all blocks have it."""
        for choice in BLOCK_POLICIES:
            if "offload" in choice and not self.plan.moves_activations:
                continue
            if choice == "selective" and not self.plan.keeps_products:
                continue
            try:
                yield choice, self._forecast(dict.fromkeys(names, choice), pp_rank)
            except ConfigError:
                if choice == "keep":
                    raise
                # The other policies need not work with every model.

    def with_policies(self, blocks: Mapping[str, BlockPolicy]) -> ResolvedPlan:
        """Return the resolved plan with a policy for each block."""
        techniques = {**self.plan.techniques, "recompute": self.technique.with_policies(blocks)}
        plan = replace(self.plan, techniques=techniques)
        return ResolvedPlan.of(plan, self.workload.model, self.layout, self.slices)

    def _forecast(self, blocks: Mapping[str, BlockPolicy], pp_rank: int) -> UniformForecast:
        rank = forecast_rank(self.with_policies(blocks), self.workload, pp_rank)
        if rank.forecast is None:
            raise ConfigError(_no_forecast(str(rank.note)))
        return UniformForecast(
            rank.forecast, tuple(zip(rank.profiles, rank.unit_forecasts, strict=True))
        )

    def _waiting(self, pp_rank: int) -> int:
        """Return how many micro-batches besides the current one have activations on a rank."""
        cut = self.plan.techniques.get("cut")
        if self.layout is None or not isinstance(cut, CutStrategy):
            return 0
        own_stages = self.layout.stages_of(pp_rank)
        in_flight = [
            most for stage, most in enumerate(cut.in_flight(self.plan)) if stage in own_stages
        ]
        return max(in_flight, default=1) - 1

    def _search(self, chain: BudgetProblem, pp_rank: int) -> list[_ProvenSolution]:
        """Return solutions for several budgets of the solver, each with its forecast.

        If a forecast exceeds the limit, the next budget is lower by the excess. Otherwise the next
        budget is the solver's peak of the solution plus the bytes that its forecast leaves free.
        The search ends if the next budget is not below a budget whose solution exceeded the limit.
        """
        solutions: dict[tuple[int, ...], _ProvenSolution] = {}
        budget_left, refused = self.limit - chain.base, math.inf
        for _ in range(MAX_FORECASTS):
            answer = fastest_within(chain.policy_costs, budget_left, chain.tail, chain.waiting)
            if answer is None or answer.picks in solutions:
                break
            solutions[answer.picks] = self._proven(chain, answer, pp_rank)
            left = self.limit - solutions[answer.picks].peak.bytes
            if left < 0:
                refused = budget_left
                budget_left += left
                continue
            budget_left += left - (budget_left - answer.peak)
            if budget_left <= answer.peak or budget_left >= refused:
                break
        return list(solutions.values())

    def _proven(
        self, chain: BudgetProblem, answer: BudgetSolution, pp_rank: int
    ) -> _ProvenSolution:
        picks = zip(chain.names, answer.picks, strict=True)
        blocks = {name: chain.policies[pick] for name, pick in picks}
        return _ProvenSolution(
            blocks, self._forecast(blocks, pp_rank).forecast.peak(), answer.seconds
        )

    def line(self, solution: _ProvenSolution, pp_rank: int) -> str:
        """Return a line for the user: the chosen policies, their cost and the predicted peak."""
        where = f"pp rank {pp_rank}: " if self.plan.pp > 1 else ""
        counts = Counter(solution.blocks.values())
        policies = ", ".join(_policy_words(c, counts[c]) for c in BLOCK_POLICIES if counts[c])
        share = solution.seconds / (3 * self.costs[""].whole) if self.costs[""].whole else 0.0
        return (
            f"{where}budget {format_bytes(self.limit)}: predicted peak "
            f"{format_bytes(solution.peak.bytes)}; of {len(solution.blocks)} blocks, {policies}; "
            f"a step takes about {100 * share:.0f} % longer"
        )

    def _fix(self, kind: MemoryKind) -> str:
        """Return what lowers the memory of a kind, as words of the command line."""
        if kind == "buffers" and self.plan.replicate.sharded_states == 3:
            return "--strategy zero2"  # fully_shard's buffers are as large as its units
        return _FIXES[kind]

    def _too_small(self, peak: Peak, pp_rank: int) -> str:
        where = f" on pp rank {pp_rank}" if self.plan.pp > 1 else ""
        breakdown = vars(peak.breakdown)
        kind = max(MEMORY_KINDS, key=breakdown.__getitem__)
        return (
            f"strategy.recompute.budget={self.limit} ({format_bytes(self.limit)}) is below the "
            f"smallest peak that this job reaches{where}, {peak.bytes} bytes "
            f"({format_bytes(peak.bytes)}, in the {peak.phase} phase), of which {kind} are "
            f"{format_bytes(breakdown[kind])}. Use strategy.recompute.budget={peak.bytes}, or "
            f"{self._fix(kind)}."
        )


def _policy_words(policy: BlockPolicy, count: int) -> str:
    verb, saved = _POLICY_WORDS[policy]
    return f"{count} {verb if count > 1 else verb + 's'} {saved}"


_POLICY_WORDS: dict[BlockPolicy, tuple[str, str]] = {
    "keep": ("save", "all activations"),
    "selective": ("save", "inputs and matrix products"),
    "full": ("save", "inputs only"),
    "offload": ("offload", "all activations"),
    "full_offload": ("offload", "inputs only"),
}
"""The words for a policy in a line for the user: a verb, and the tensors that are saved."""

_FIXES: dict[MemoryKind, str] = {
    "parameters": "--strategy fsdp on more ranks",
    "frozen": "--strategy fsdp on more ranks",
    "gradients": "--strategy zero2 on more ranks",
    "optimizer": "--strategy zero1 on more ranks",
    "activations": "a smaller train.micro_batch_size",
    "buffers": "a smaller strategy.replicate.bucket_size",
    "temporary": "a smaller train.micro_batch_size",
}
