"""The replay of a step's memory, compared with a full simulation of every storage."""

import random
from itertools import pairwise

import pytest

from bigtrain.costs.replay import RecordedPass, replay_actions
from bigtrain.memory.timeline import MEMORY_KINDS, Breakdown, Span, Timeline
from bigtrain.schedules.orders import SCHEDULES, SINGLE_STAGE_SCHEDULES, Action, schedule_orders


def passes(dice, parts, *, gradients):
    """The recorded passes of a random micro-batch: storages of all kinds, and gradients
    that stay.
    """
    ticks = [7]
    for _ in range(parts):
        ticks.append(ticks[-1] + dice.randint(3, 8))
    end = ticks[-1] - 1
    spans = []
    for _ in range(12):
        birth = dice.randint(ticks[0], end)
        kind = dice.choice(
            [kind for kind in MEMORY_KINDS if kind not in ("gradients", "parameters")]
        )
        spans.append(Span(dice.randint(1, 10**6), kind, birth, dice.randint(birth + 1, end + 1)))
    if gradients:
        for _ in range(3):
            birth = dice.randint(ticks[-2], end)
            spans.append(Span(dice.randint(1, 10**6), "gradients", birth, end + dice.randint(1, 9)))
    phases = ((ticks[0], "forward"), (ticks[1], "backward"))
    return RecordedPass(Timeline(tuple(spans), phases), tuple(ticks[1:-1]), end)


def simulate_fully(actions, pieces):
    """Simulate every action of every micro-batch in order, with each storage's lifetime."""
    firsts = {}
    for stage, kind, number in actions:
        if kind in "BW":
            firsts.setdefault(stage, number)
    split = {(stage, number) for stage, kind, number in actions if kind == "W"}
    clock, places, phases = 0, {}, []
    for stage, kind, number in actions:
        variant = "first" if firsts[stage] == number else "later"
        recorded = pieces[stage][f"{variant}_split" if (stage, number) in split else variant]
        ticks = (recorded.begin, *recorded.starts, recorded.end + 1)
        point = {"F": 0, "B": 1, "I": 1, "W": 2}[kind]
        places.setdefault((stage, number), (recorded, []))[1].append(clock)
        phases.append((clock, "backward" if point else "forward"))
        clock += ticks[point + 1] - ticks[point]
    spans = []
    for recorded, begins in places.values():
        ticks = (recorded.begin, *recorded.starts, recorded.end + 1)

        def moved(tick, ticks=ticks, begins=begins):
            """A tick of the record as a tick of the step, by the action that contains it."""
            for (start, stop), begin in zip(pairwise(ticks), begins, strict=True):
                if tick < stop:
                    return begin + tick - start
            return begins[-1] + ticks[-1] - ticks[-2]

        for span in recorded.timeline.spans:
            # A storage that is dead at a tick is dead after the tick before: no later action comes
            # between.
            death = moved(span.death - 1) + 1
            if span.kind == "gradients" and span.death > recorded.end:
                death = clock
            spans.append(Span(span.nbytes, span.kind, moved(span.birth), death))
    return Timeline(tuple(spans), tuple(phases))


def random_pieces(dice, stages):
    return {
        stage: {
            "first": passes(dice, 2, gradients=True),
            "later": passes(dice, 2, gradients=False),
            "first_split": passes(dice, 3, gradients=True),
            "later_split": passes(dice, 3, gradients=False),
        }
        for stage in stages
    }


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("seed", range(8))
def test_the_peak_is_that_of_the_whole_step(schedule, seed):
    dice = random.Random(seed)
    pp = dice.choice([1, 2, 4])
    for actions in schedule_orders(schedule, pp, 1 if schedule in SINGLE_STAGE_SCHEDULES else 2, 8):
        pieces = random_pieces(dice, {action.stage for action in actions})
        short, whole = replay_actions(actions, pieces), simulate_fully(actions, pieces)
        beside = Breakdown(parameters=1000, optimizer=5)
        assert short.peak(beside) == whole.peak(beside)


def test_any_order_of_any_stages():
    for seed in range(40):
        dice = random.Random(seed)
        actions = []
        waiting = [(stage, number) for stage in range(3) for number in range(4)]
        going = {}
        while waiting or going:
            if waiting and (not going or dice.random() < 0.5):
                key = waiting.pop(dice.randrange(len(waiting)))
                going[key] = list(dice.choice(["B", "IW"]))
                actions.append(Action(key[0], "F", key[1]))
            else:
                key = dice.choice(list(going))
                actions.append(Action(key[0], going[key].pop(0), key[1]))
                if not going[key]:
                    del going[key]
        pieces = random_pieces(dice, range(3))
        assert replay_actions(actions, pieces).peak() == simulate_fully(actions, pieces).peak()


SMALL = RecordedPass(
    Timeline(
        (
            Span(100, "activations", 1, 6),
            Span(7, "temporary", 2, 3),
            Span(20, "temporary", 4, 6),
            Span(50, "gradients", 5, 7),
        ),
        ((0, "forward"), (4, "backward")),
    ),
    (4,),
    6,
)


def same_variants(recorded, suffix=""):
    """A stage whose first micro-batch, which allocates gradients, is otherwise like the
    later ones.
    """
    return {f"first{suffix}": recorded, f"later{suffix}": recorded}


def test_what_waits_and_what_stays():
    """Activations wait for the backward pass; gradients stay after it."""
    piece = same_variants(SMALL)
    two = [Action(1, "F", 0), Action(1, "F", 1), Action(1, "B", 1)]
    peak = replay_actions(two, {1: piece}).peak()
    assert (peak.phase, peak.breakdown) == (
        "backward",
        Breakdown(activations=200, temporary=20, gradients=50),
    )
    assert replay_actions(two[:2], {1: piece}).peak().breakdown == Breakdown(
        activations=200, temporary=7
    )


def test_between_two_actions_more_may_be_on_its_way_than_beside_them():
    """Between two actions a boundary tensor in transit can exceed the peak inside an action."""
    two = [Action(1, "F", 0), Action(1, "F", 1), Action(1, "B", 1)]
    peak = replay_actions(two, {1: same_variants(SMALL)}, (0, 5, 0), (0, 0, 90)).peak()
    assert (peak.phase, peak.breakdown) == ("forward", Breakdown(activations=200, temporary=90))


def test_a_split_that_was_not_recorded_holds_no_less():
    """A backward pass replayed in two parts without a record of the parts uses at least as
    much memory.
    """
    piece = same_variants(SMALL)
    forward, inputs, weights = (Action(1, kind, 0) for kind in "FIW")
    second_micro_batch = [Action(1, "F", 1), Action(1, "I", 1)]
    peak = replay_actions([forward, inputs, *second_micro_batch], {1: piece}).peak()
    assert peak.breakdown == Breakdown(activations=200, temporary=40)
    peak = replay_actions([forward, inputs, *second_micro_batch, weights], {1: piece}).peak()
    assert peak.breakdown == Breakdown(activations=200, temporary=40, gradients=50)
    # torch's first stage skips the input gradient pass I.
    first = [Action(0, kind, number) for kind, number in [("F", 0), ("F", 1), ("I", 0), ("I", 1)]]
    peak = replay_actions(first, {0: piece}).peak()
    assert peak.breakdown == Breakdown(activations=200, temporary=7)
    peak = replay_actions([*first, Action(0, "W", 0)], {0: piece}).peak()
    assert peak.breakdown == Breakdown(activations=200, temporary=20, gradients=50)


def recorded_pass(*spans):
    """A recorded pass with these spans; its backward pass begins at tick 4."""
    timeline = Timeline(spans, ((0, "forward"), (4, "backward")))
    return RecordedPass(timeline, (4,), 6)


def test_what_is_gathered_is_there_once_and_goes_with_the_next_backward_pass():
    """Gathered parameters exist once, and the next backward pass of the stage frees them."""
    activation = Span(10, "activations", 1, 6)
    arrives = Span(1000, "parameters", 1, 6), Span(7, "temporary", 1, 2)
    again = Span(1000, "parameters", 5, 6), Span(900, "temporary", 4, 5)
    alike = recorded_pass(activation, *arrives)
    then = recorded_pass(activation, *again)
    piece = {1: same_variants(alike) | same_variants(then, "_resumed")}
    forward = [Action(1, "F", 0), Action(1, "F", 1)]
    assert replay_actions(forward[:1], piece).peak().breakdown == Breakdown(
        parameters=1000, activations=10, temporary=7
    )
    # The second forward pass finds the parameters gathered, and adds only its activations.
    assert replay_actions(forward, piece).peak().breakdown == Breakdown(
        parameters=1000, activations=20
    )
    back = [*forward, Action(1, "B", 0)]
    assert replay_actions(back, piece).peak().breakdown == Breakdown(
        parameters=1000, activations=20
    )
    # The second backward pass gathers for itself.
    two_stages = {**piece, 2: same_variants(recorded_pass(Span(5000, "activations", 1, 6)))}
    step = [Action(1, "F", 0), Action(1, "F", 1), Action(1, "B", 0), Action(2, "F", 0)]
    # Nothing is gathered any more.
    assert replay_actions(step, two_stages).peak().breakdown == Breakdown(activations=5000 + 10)
    assert replay_actions([*back, Action(1, "B", 1)], piece).peak().bytes == 1020


def test_a_backward_pass_after_several_forward_passes_goes_astray():
    """A backward pass after several forward passes uses the record of that case (`_strayed`)."""
    usual = recorded_pass(Span(1, "activations", 1, 6))
    astray = recorded_pass(Span(1, "activations", 1, 6), Span(30, "temporary", 5, 6))
    piece = {1: same_variants(usual) | same_variants(astray, "_strayed")}
    forwards = [Action(1, "F", 0), Action(1, "F", 1)]
    assert replay_actions([*forwards[:1], Action(1, "B", 0)], piece).peak().bytes == 1
    assert replay_actions([*forwards, Action(1, "B", 0)], piece).peak().bytes == 2 + 30
    # The backward pass ends that case: after one more forward pass the usual record applies again.
    then = [Action(1, "B", 0), Action(1, "F", 2), Action(1, "B", 1)]
    assert replay_actions([*forwards, *then], piece, (0, 0, 0, 0, 100)).peak().bytes == 2 + 100


def test_the_last_micro_batch_may_go_otherwise():
    """The last micro-batch may have a different record."""
    less = recorded_pass(Span(1, "activations", 1, 6))
    piece = {1: same_variants(less) | same_variants(SMALL, "_last")}
    actions = [Action(1, "F", number) for number in range(3)]
    assert replay_actions(actions, piece).peak().breakdown == Breakdown(
        activations=102, temporary=7
    )
    # The last backward pass was recorded whole, others in parts
    back = [*actions, Action(1, "I", 2), Action(1, "W", 2)]
    assert replay_actions(back, piece).peak().breakdown == Breakdown(
        activations=102, temporary=20, gradients=50
    )


@pytest.mark.parametrize("schedule", ["gpipe", "looped_bfs", "interleaved_1f1b", "dualpipev"])
def test_a_long_step_stays_small(schedule):
    dice = random.Random(0)
    spans = tuple(
        Span(dice.randint(1, 100), "activations", birth, 6001 - birth) for birth in range(1, 3000)
    )
    phases = ((0, "forward"), (3000, "backward"))
    gradients = (Span(10, "gradients", 4000, 6001),)
    first = RecordedPass(Timeline(spans + gradients, phases), (3000,), 6000)
    then = RecordedPass(Timeline(spans, phases), (3000,), 6000)
    v = 1 if schedule in SINGLE_STAGE_SCHEDULES else 2
    actions = schedule_orders(schedule, 4, v, 512)[0]
    pieces = {action.stage: {"first": first, "later": then} for action in actions}
    timeline = replay_actions(actions, pieces)
    assert len(timeline.spans) < 10_000
    assert timeline.peak().breakdown.activations > 0


def test_no_actions():
    assert replay_actions([], {}).peak().bytes == 0


def test_ticks_in_order():
    with pytest.raises(ValueError, match=r"not in order: \(1, 8, 7\)"):
        RecordedPass(SMALL.timeline, (8,), 6)
