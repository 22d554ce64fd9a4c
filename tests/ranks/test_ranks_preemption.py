"""A signal to one rank is known to all at the end of the step, and a second signal ends the
process.
"""

from __future__ import annotations

import signal

import pytest
from support.ranks import run_ranks

from bigtrain.ranks.context import RunContext
from bigtrain.ranks.preemption import PREEMPTION_SIGNALS, PreemptionNotice


def signal_rank_1(context: RunContext, number: int) -> tuple[bool, bool, str, bool]:
    """Send signals to rank 1; return what this rank knows before and after."""
    before = [signal.getsignal(n) for n in PREEMPTION_SIGNALS]
    with PreemptionNotice(context) as notice:
        nothing = notice.agreed()
        if context.rank == 1:
            signal.raise_signal(number)
            signal.raise_signal(number)  # the same signal, forwarded by the launcher
        # Rank 0 may arrive before rank 1 has received the signal: the exchange synchronizes them.
        stops = notice.agreed()
    restored = before == [signal.getsignal(n) for n in PREEMPTION_SIGNALS]
    return nothing, stops, notice.signal_name, restored


@pytest.mark.parametrize("number", PREEMPTION_SIGNALS)
def test_all_ranks_agree(number: signal.Signals) -> None:
    assert run_ranks(signal_rank_1, 3, number) == [(False, True, number.name, True)] * 3


def test_the_others_are_asked_now_and_then() -> None:
    with PreemptionNotice(RunContext.alone(), every=3) as notice:
        signal.raise_signal(signal.SIGUSR1)
        assert [notice.agreed() for _ in range(4)] == [False, False, True, True]


def test_a_later_signal_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    with PreemptionNotice(RunContext.alone()) as notice:
        assert not notice.is_second()
        signal.raise_signal(signal.SIGUSR1)
        assert not notice.is_second()
        monkeypatch.setattr("bigtrain.ranks.preemption.SAME_S", -1.0)
        with pytest.raises(SystemExit, match="143"):
            signal.raise_signal(signal.SIGUSR1)
        assert notice.is_second()
        assert notice.agreed()
        assert notice.signal_name == "SIGUSR1"
