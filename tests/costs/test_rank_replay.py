"""The states of a rank with several stages."""

from __future__ import annotations

from bigtrain.costs.forecast import BoundaryBytes, Forecast
from bigtrain.costs.rank_replay import RankActions, join_stages
from bigtrain.memory.timeline import Breakdown, Timeline
from bigtrain.schedules.orders import Action

EMPTY = Timeline((), ((0, "forward"),))


def stage(frozen: int, *tensors: tuple[str, int]) -> Forecast:
    return Forecast(
        states=Breakdown(parameters=3, frozen=frozen, activations=5),
        passes={"first": EMPTY, "later": EMPTY},
        step=EMPTY,
        gradients=0,
        boundary=BoundaryBytes(),
        tensors=(),
        frozen_tensors=tensors,
    )


def test_frozen_parameters_that_stages_share_count_once_and_the_batch_too():
    actions = [Action(number, kind, 0) for kind in "FB" for number in (0, 1)]
    stages = {0: stage(10, ("tied", 6), ("a", 4)), 1: stage(8, ("tied", 6), ("b", 2))}
    states = join_stages(RankActions(actions), stages).states
    assert states == Breakdown(parameters=6, frozen=12, activations=5)
    sharded = {number: stage(5, ("tied", 6), (f"{number} a", 4)) for number in (0, 1)}
    assert join_stages(RankActions(actions), sharded).states.frozen == 5 + 2
