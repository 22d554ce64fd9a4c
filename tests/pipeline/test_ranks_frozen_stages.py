"""Stages without trained parameters, losses that read values, and outputs changed after
a return.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.frozen_stages import FROZEN, chain_losses, chain_plain, chain_resumed
from support.ranks import run_ranks
from support.value_losses import CASES, plain_losses, strategy_losses

from bigtrain.ranks.context import RunContext

STEPS = 4


def chains(context: RunContext, strategy: str, names: list[str]) -> Any:
    """The results of every net, all in one set of ranks."""
    return {frozen: chain_losses(context, frozen, strategy, {}, STEPS) for frozen in names}


ENDS = ["first", "last"]
MESHES = [
    (2, 2, "1f1b", [*FROZEN]),
    *((2, 2, other, ENDS) for other in ("gpipe", "layer_split", "zero_bubble")),
    *((2, 2, other, ["first", "middle"]) for other in ("interleaved_1f1b", "zbv")),
    (4, 4, "1f1b", ["middle", "adapted"]),  # whole stages in the middle
    *((4, 2, f"1f1b_{other}", ENDS) for other in ("ddp", "zero1", "fsdp")),
]


@pytest.mark.parametrize(("ranks", "pp", "strategy", "names"), MESHES)
def test_stages_without_trained_parameters(
    ranks: int, pp: int, strategy: str, names: list[str]
) -> None:
    plain = {frozen: chain_plain(frozen, STEPS) for frozen in names}
    for results in run_ranks(chains, ranks, strategy, names, pp=pp):
        for frozen, (losses, error, num_saved) in results.items():
            assert error is None, frozen
            assert losses == pytest.approx(plain[frozen], abs=2e-6), frozen
            assert num_saved  # parameters are saved, including frozen ones


def test_deepspeed_refuses_a_stage_that_trains_nothing() -> None:
    arguments = ("first", "pipeline_deepspeed_zero1", {}, STEPS)
    for losses, error, _ in run_ranks(chain_losses, 4, *arguments, pp=2):
        assert not losses
        assert error.startswith("strategy.replicate: stage 0 of the pipeline has no parameter")
        assert "--strategy 1f1b_zero1" in error


def resume_chains(context: RunContext, folder: str) -> Any:
    """Save, or resume, the chains with frozen ends."""
    return {frozen: chain_resumed(context, frozen, Path(folder)) for frozen in ("first", "last")}


@pytest.mark.parametrize("pp", [1, 2])
def test_their_checkpoints_go_on_under_other_strategies(tmp_path: Path, pp: int) -> None:
    """Saved by a pipeline of two stages; read by one process and by replicas."""
    plain = {frozen: chain_plain(frozen, STEPS) for frozen in ("first", "last")}
    run_ranks(resume_chains, 2, str(tmp_path), pp=2)
    for resumed_losses in run_ranks(resume_chains, 2, str(tmp_path), pp=pp):
        for frozen, losses in resumed_losses.items():
            assert losses == pytest.approx(plain[frozen][2:], abs=2e-6), frozen


def value_loss_results(context: RunContext, strategies: list[str]) -> Any:
    """The losses of models whose losses read values, by strategy and case."""
    return {
        (strategy, case): strategy_losses(context, case, strategy, {}, 3)
        for strategy in strategies
        for case in CASES
    }


@pytest.mark.parametrize(
    "strategies",
    [["1f1b", "zero_bubble"], ["gpipe", "layer_split"]],
)
def test_losses_that_ask_for_values_and_outputs_that_change(strategies: list[str]) -> None:
    for results in run_ranks(value_loss_results, 2, strategies, pp=2):
        for (strategy, case), (losses, error) in results.items():
            assert error is None, (strategy, case)
            assert losses == pytest.approx(plain_losses(case, 3), abs=2e-6), (strategy, case)
