"""The order of a pipeline's actions, compared with torch's classes and published figures."""

from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
from published.formulas import in_flight_together
from torch.distributed.pipelining import schedules as torch_schedules

from bigtrain.errors import ConfigError
from bigtrain.schedules.bubble import StageSeconds, simulate_step
from bigtrain.schedules.in_flight import in_flight_at_peak, in_flight_by_stage, peak_in_flight
from bigtrain.schedules.orders import (
    SCHEDULES,
    SINGLE_STAGE_SCHEDULES,
    TORCH_SCHEDULES,
    V_SHAPED_SCHEDULES,
    Action,
    schedule_orders,
    stage_ranks,
)
from bigtrain.schedules.transfers import backward_starts, transfers

EQUAL = StageSeconds(1.0, 1.0, 1.0)


def per_rank(schedule):
    return 1 if schedule in SINGLE_STAGE_SCHEDULES else 2


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("pp", "micro_batches"), [(1, 2), (2, 4), (4, 8), (4, 16), (3, 12)])
def test_every_micro_batch_goes_forward_and_backward_once(schedule, pp, micro_batches):
    stages = pp * per_rank(schedule)
    orders = schedule_orders(schedule, pp, per_rank(schedule), micro_batches)
    ranks = stage_ranks(schedule, pp, per_rank(schedule))
    done = [action for actions in orders for action in actions]
    assert len(done) == len(set(done))
    for rank, actions in enumerate(orders):
        assert {ranks[action.stage] for action in actions} == {rank}
    for stage in range(stages):
        for number in range(micro_batches):
            kinds = {kind for s, kind, k in done if (s, k) == (stage, number)}
            assert kinds in ({"F", "B"}, {"F", "I", "W"})
    whole = simulate_step(orders, [EQUAL] * stages)  # it raises if a rank would wait forever
    assert whole.busy == pytest.approx([3.0 * micro_batches * per_rank(schedule)] * pp)


def stage(pp, count, index):
    return SimpleNamespace(
        group_size=pp, group_rank=0, num_stages=count, stage_index=index, submod=None
    )


@pytest.mark.parametrize("schedule", TORCH_SCHEDULES)
def test_torch_runs_its_tables_in_this_order(schedule):
    """The table with all sends and receives, which torch's runtime executes."""
    made = getattr(torch_schedules, TORCH_SCHEDULES[schedule])([stage(4, 8, 0), stage(4, 8, 4)], 8)
    for rank, actions in enumerate(schedule_orders(schedule, 4, 2, 8)):
        lowered = []
        for action in made.pipeline_order_with_comms[rank]:
            if action.is_compute_op:
                lowered.extend(action.sub_actions or [action])
        assert actions == tuple(
            (a.stage_index, a.computation_type.value, a.microbatch_index) for a in lowered
        )


@pytest.mark.parametrize(
    ("schedule", "name"), [("gpipe", "ScheduleGPipe"), ("1f1b", "Schedule1F1B")]
)
@pytest.mark.parametrize("micro_batches", [4, 7])
def test_torch_runs_one_stage_in_this_order(schedule, name, micro_batches):
    """The loop of torch's class, with a stage that records its calls."""
    for rank in range(4):
        single = MagicMock(group_size=4, num_stages=4, stage_index=rank, is_last=rank == 3)
        for ops in ("fwd_recv", "fwd_send", "bwd_recv", "bwd_send"):
            getattr(single, f"get_{ops}_ops").return_value = []
        made = getattr(torch_schedules, name)(single, micro_batches)
        made._initialize_stage = MagicMock()
        made._step_microbatches([()] * micro_batches, [{}] * micro_batches)
        kinds = {"forward_one_chunk": "F", "backward_one_chunk": "B"}
        noted = [
            Action(rank, kinds[call], arguments[0])
            for call, arguments, _ in single.method_calls
            if call in kinds
        ]
        assert tuple(noted) == schedule_orders(schedule, 4, 1, micro_batches)[rank]


@pytest.mark.parametrize(("pp", "micro_batches"), [(2, 4), (4, 8), (4, 16), (8, 32)])
def test_published_bubbles(pp, micro_batches):
    p, m = pp, micro_batches

    def share(schedule, v):
        cost = StageSeconds(1 / v, 1 / v, 1 / v)
        return simulate_step(schedule_orders(schedule, p, v, m), [cost] * (p * v)).share

    assert share("naive", 1) == pytest.approx((p - 1) / p)
    assert share("gpipe", 1) == pytest.approx((p - 1) / (m + p - 1))
    assert share("1f1b", 1) == pytest.approx((p - 1) / (m + p - 1))
    for v in (2, 4):
        interleaved = (p - 1) / (v * m + p - 1)
        assert share("interleaved_1f1b", v) == pytest.approx(interleaved)
        assert share("looped_bfs", v) == pytest.approx(interleaved)
    for schedule in ("interleaved_zero_bubble", "zbv_zero_bubble", "dualpipev"):
        assert share(schedule, 2) == pytest.approx((p - 1) / (6 * m + p - 1))
        assert share(schedule, 2) < share("1f1b", 1)


def test_in_flight():
    for p, m in ((2, 4), (4, 8), (4, 16), (8, 32)):

        def held(schedule, v, p=p, m=m):
            return [in_flight_together(actions) for actions in schedule_orders(schedule, p, v, m)]

        assert held("naive", 1) == [1] * p
        assert held("gpipe", 1) == [m] * p
        assert held("1f1b", 1) == [p - rank for rank in range(p)]
        assert held("looped_bfs", 2) == [2 * m] * p
        # In units of a rank's layers p (1 + (p - 1) / (p v)): Korthikanti et al., arXiv 2205.05198.
        assert held("interleaved_1f1b", 2)[0] == 2 * p + p - 1
        assert held("zbv_zero_bubble", 2) == [2 * p] * p
        assert held("dualpipev", 2) == [2 * p + 1] * p
    assert peak_in_flight(schedule_orders("1f1b", 4, 1, 8)[1]) == {1: 3}
    assert peak_in_flight(schedule_orders("looped_bfs", 4, 2, 8)[1]) == {1: 8, 5: 8}
    split = [Action(0, "F", 0), Action(0, "I", 0), Action(0, "F", 1), Action(0, "W", 0)]
    assert peak_in_flight(split) == {0: 2}


@pytest.mark.parametrize(
    "schedule", ["interleaved_1f1b", "interleaved_zero_bubble", "zbv_zero_bubble"]
)
def test_what_is_sent_is_kept_also_where_torch_is_not_asked(schedule, monkeypatch):
    placed = [transfers(schedule, 4, 2, 8, rank) for rank in range(4)]
    transfers.cache_clear()
    monkeypatch.setattr("bigtrain.schedules.transfers.MAX_PLACED_ACTIONS", 0)
    guessed = [transfers(schedule, 4, 2, 8, rank) for rank in range(4)]
    transfers.cache_clear()
    for mine, real in zip(guessed, placed, strict=True):
        for some, real_counts in zip(mine, real, strict=True):
            assert some == {
                direction: n
                for direction, n in real_counts.items()
                if direction[1].startswith("SEND")
            }


def test_unequal_stages_wait_for_the_slowest():
    slow = [StageSeconds(1.0, 1.0, 1.0), StageSeconds(3.0, 3.0, 3.0)]
    step = simulate_step(schedule_orders("1f1b", 2, 1, 10), slow)
    assert step.seconds == pytest.approx(1.0 + 10 * 9.0 + 2.0)
    assert step.busy == (30.0, 90.0)


def test_a_schedule_that_never_ends():
    with pytest.raises(ValueError, match="never reaches"):
        simulate_step(((Action(0, "B", 0), Action(0, "F", 0)),), [EQUAL])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("1f2b", 2, 1, 4), r"'1f2b' is none of naive, .*did you mean '1f1b'"),
        (("gpipe", 2, 2, 4), r"gpipe has 1 stage on each rank, not 2\. Use stages_per_rank=1"),
        (("dualpipev", 2, 3, 4), r"dualpipev has 2 stages on each rank, not 3"),
        (("1f1b", 4, 1, 3), r"1f1b with mesh.pp=4 needs at least 4 micro-batches .* are 3"),
        (("dualpipev", 2, 2, 3), r"needs at least 4 micro-batches"),
        (
            ("interleaved_1f1b", 2, 2, 5),
            r"2 equal rounds, and 5 micro-.* Use 4 micro-batches",
        ),
    ],
)
def test_refusals(arguments, message):
    with pytest.raises(ConfigError, match=message):
        schedule_orders(*arguments)


@pytest.mark.parametrize("schedule", TORCH_SCHEDULES)
@pytest.mark.parametrize("pp", [1, 2, 3, 4])
def test_where_we_do_not_refuse_torch_does_not_either(schedule, pp):
    count = 2 * pp
    for micro_batches in range(1, 14):
        stages = [
            stage(pp, count, 0),
            stage(pp, count, count - 1 if schedule in V_SHAPED_SCHEDULES else pp),
        ]
        try:
            schedule_orders(schedule, pp, 2, micro_batches)
        except ConfigError:
            with pytest.raises((ValueError, AssertionError)):
                getattr(torch_schedules, TORCH_SCHEDULES[schedule])(stages, micro_batches)
        else:
            getattr(torch_schedules, TORCH_SCHEDULES[schedule])(stages, micro_batches)


def test_at_a_turn_an_output_leaves_while_a_gradient_comes():
    # Of the first of two ranks F0 F1 B0 F2 B1 B2.
    out, back, sent = (0, "SEND_F"), (0, "RECV_B"), (0, "SEND_B")
    transit, later = {out: 1, back: 1}, {out: 1, back: 1, sent: 1}
    assert backward_starts("1f1b", 2, 1, 3, 0) == ({}, {}, transit, {}, later, {})
    assert backward_starts("gpipe", 2, 1, 3, 0) == ()


@pytest.mark.parametrize("schedule", SINGLE_STAGE_SCHEDULES)
def test_what_one_stage_has_in_flight_is_known_without_its_order(schedule):
    for pp in (1, 2, 3, 8):
        for micro_batches in (pp, pp + 1, 2 * pp, 5 * pp + 1):
            arguments = (schedule, pp, 1, micro_batches)
            orders = schedule_orders(*arguments)
            most = tuple(peak_in_flight(row)[rank] for rank, row in enumerate(orders))
            assert in_flight_by_stage(*arguments, splits=False) == most
            assert in_flight_at_peak(*arguments, splits=False, later=False) == most
            later = tuple(map(most_after_a_backward_pass, orders))
            assert in_flight_at_peak(*arguments, splits=False, later=True) == later


def most_after_a_backward_pass(row):
    kinds = [kind for _, kind, _ in row]
    first = kinds.index("B") + 1
    return max(
        kinds[:end].count("F") - kinds[:end].count("B") for end in range(first, len(kinds) + 1)
    )
