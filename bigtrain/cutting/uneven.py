"""The warning about a cut that gives one rank far more work than the others, with the reason."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from bigtrain.cutting.cut_points import CutPoint, legal_points
from bigtrain.tracing.records import END_OF_PASS, ForwardTrace

MOST_WORK = 2.0
"""The warning is for a rank with more than this many times the average work of the others."""


def uneven_note(
    trace: ForwardTrace,
    starts: Sequence[CutPoint],
    seconds: Sequence[float],
    devices: Sequence[int],
    *,
    named: bool,
) -> str:
    """Return a line about the rank with far more work than the others; "" if there is none.

    Args:
        trace: the trace of the model.
        starts: the cut points at which the second and later stages begin.
        seconds: the seconds of each stage.
        devices: the rank of each stage.
        named: whether the user named the cuts.
    """
    work = dict.fromkeys(devices, 0.0)
    for device, stage_work in zip(devices, seconds, strict=True):
        work[device] += stage_work
    fullest = max(work, key=lambda device: work[device])
    others = [stage_work for device, stage_work in work.items() if device != fullest]
    if not others or work[fullest] <= MOST_WORK * sum(others) / len(others):
        return ""
    share = 100 * work[fullest] / sum(work.values())
    text = (
        f"cut: rank {fullest} has {share:.0f} % of the work of {len(work)} ranks, and the others "
        "wait for it"
    )
    if named:
        return f"{text}: strategy.cut.at asks for it. Leave it out to balance the stages."
    stages = [stage for stage, device in enumerate(devices) if device == fullest]
    heaviest = max(stages, key=lambda stage: seconds[stage])
    ticks = [0, *(point.tick for point in starts), END_OF_PASS]
    reason = _nearest_refusal(trace, ticks[heaviest], ticks[heaviest + 1])
    if not reason:
        names = ["the input", *(repr(point.name) for point in starts), "the end"]
        between = f"{names[heaviest]} and {names[heaviest + 1]}"
        reason = f"between {between} no module is called at which the model could be cut"
    return f"{text}: {reason}."


def _nearest_refusal(trace: ForwardTrace, first: int, last: int) -> str:
    """Return the reason against a cut near the middle of an interval of ticks; "" without one."""
    points, refused = legal_points(trace)
    legal = {point.name for point in points}
    work = sorted(cost.tick for cost in trace.costs if first < cost.tick < last)
    middle = len(work) / 2
    inside = {
        call.name: abs(bisect_right(work, call.begin) - middle)
        for call in reversed(trace.calls)
        if first < call.begin < last and call.name in refused and call.name not in legal
    }
    # Near the middle, a block is preferred to a layer in it: its name is clearer to the author.
    if not inside:
        return ""
    reach = max(len(work) / 8, min(inside.values()))
    near = [name for name, distance in inside.items() if distance <= reach]
    name = min(near, key=lambda near_name: (near_name.count("."), inside[near_name]))
    return f"the model cannot be cut before {name!r}: {refused[name]}"
