"""The sections and the timed parts of a plan, for the planner's candidates and for a run."""

from __future__ import annotations

from dataclasses import replace

from bigtrain.activations.policy import BlockPolicy
from bigtrain.core.strategy import Plan
from bigtrain.devices import is_accelerator
from bigtrain.prediction.fake_runs.slices import without_slices
from bigtrain.prediction.section_library import ModelSections, SectionLibrary
from bigtrain.timing.block_seconds import BlockTimer, Slowdowns, slowdowns
from bigtrain.timing.step_time import StepTimer, TimedParts


class PlanTimer:
    """Returns the sections of plans, each with the slowdown of its timed block.

    Args:
        library: the sections of the model.
        timer: predicts seconds from the rates of the cluster.
        blocks: times the model's blocks on this machine; None for sections without slowdowns.
    """

    def __init__(
        self, library: SectionLibrary, timer: StepTimer, blocks: BlockTimer | None
    ) -> None:
        self.section_library, self.timer, self.blocks = library, timer, blocks
        self._slowdowns: dict[bool, Slowdowns | None] = {}
        self._slowed: dict[ModelSections, ModelSections] = {}

    def first_blocks(self, count: int) -> PlanTimer:
        """Return a timer for a model with only the first blocks; the slowdowns are the same.

        Args:
            count: the number of blocks.
        """
        shorter = PlanTimer(self.section_library.first_blocks(count), self.timer, self.blocks)
        shorter._slowdowns = self._slowdowns
        return shorter

    def sections(
        self,
        plan: Plan,
        rows: int,
        choice: BlockPolicy,
        *,
        waiting: bool = False,
        cut: bool = False,
        exact: bool = True,
    ) -> ModelSections:
        """Return the model's sections with their slowdowns.

        See `SectionLibrary.model_sections` for the arguments.

        Raises:
            ConfigError: the model does not run on fake tensors, or not with this policy.
        """
        model = self.section_library.model_sections(
            plan, rows, choice, waiting=waiting, cut=cut, exact=exact
        )
        timed = self.slowdowns(plan)
        if timed is None:
            return model
        if model not in self._slowed:
            model_sections = self.section_library.model_sections(
                plan, rows, "keep", waiting=waiting, cut=cut, exact=False
            )
            self._slowed[model] = timed.applied(model, model_sections, choice, rows, self.timer)
        return self._slowed[model]

    def slowdowns(self, plan: Plan) -> Slowdowns | None:
        """The slowdowns of the model's blocks; None if no block was timed.

        Args:
            plan: the plan. Blocks are timed once for plans with bf16 parameters, and once for plans
                without them.
        """
        if self.blocks is None:
            return None
        bf16 = plan.bf16_parameters
        if bf16 not in self._slowdowns:
            timed = self.blocks.seconds(bf16_parameters=bf16)
            unsliced = without_slices(plan)

            def sections_at(rows: int) -> ModelSections:
                return self.section_library.model_sections(unsliced, rows, "keep")

            self._slowdowns[bf16] = (
                slowdowns(
                    timed,
                    self.blocks.oversubscription,
                    self.blocks.model,
                    sections_at,
                    self.timer,
                )
                if timed
                else None
            )
        return self._slowdowns[bf16]

    def timed_parts(self, plan: Plan) -> TimedParts:
        """The slowdown of the optimizer's step and the shares of split backward passes."""
        timed = self.slowdowns(plan)
        if timed is None:
            return TimedParts()
        parts = timed.parts(plan.batch.micro_size)
        # The update was timed on the device. On the host of an accelerator nothing was timed.
        on_host = plan.offload_tiers.optimizer == "cpu" and is_accelerator(plan.device_type)
        return replace(parts, update=1.0) if on_host else parts
