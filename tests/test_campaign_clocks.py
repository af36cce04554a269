"""C12 in small, and that it sees what it is there to see."""

from __future__ import annotations

import builtins
from collections.abc import Callable
from typing import Any

import pytest

from penstock.clock import VirtualClock
from penstock.deduplication import ProducerTable
from penstock.stores.file import writer
from penstock.stores.file.log import FileLog
from penstock.stores.file.reader import PartitionReader
from penstock.stores.file.retention import Drift
from penstock.stores.file.state.leases import FileLeases
from penstock.stores.file.state.schedule import FileSchedule
from penstock.testing.campaigns.campaign import Report, TooManyFindings
from penstock.testing.campaigns.clocks import CAMPAIGN
from penstock.testing.campaigns.clocks.life import ALARM


def test_no_jump_of_the_clock_breaks_a_promise() -> None:
    report = Report(CAMPAIGN.small)
    CAMPAIGN.run(report, 0)
    assert not report.findings, report.findings[0]
    assert report.done == CAMPAIGN.small
    # Otherwise retention was never put to the test.
    assert report.tried["events removed by age"] > 0
    assert report.tried["retention paused"] > 0


# --- what is broken on purpose must be found --------------------------------------------------


class FirstFinding(Report):
    """Ends the campaign at the first finding."""

    def found(self, what: str, replay: str) -> None:
        raise TooManyFindings(what)


class OnlyWall(VirtualClock):
    """Takes the wall clock for the boot clock."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__()
        self._of = clock

    def monotonic(self) -> float:
        return self._of.time_us() / 1e6


def expire_leases_by_the_wall_clock(patch: pytest.MonkeyPatch) -> None:
    make = FileLeases.__init__

    def make_with_wall(self: Any, *arguments: Any, **named: Any) -> None:
        make(self, *arguments, **named)
        self._clock = OnlyWall(self._clock)

    patch.setattr(FileLeases, "__init__", make_with_wall)


def trust_the_wall_clock(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Drift, "trusted_now", lambda self: self._clock.time_us())


def trust_no_clock(patch: pytest.MonkeyPatch) -> None:
    trusted_now = Drift.trusted_now

    def never(self: Drift) -> None:
        trusted_now(self)

    patch.setattr(Drift, "trusted_now", never)


def raise_no_alarm(patch: pytest.MonkeyPatch) -> None:
    from penstock.stores.file.retention import logger

    patch.setattr(logger, "error", lambda text, *_: logger.info(text.replace(ALARM, "")))


def remove_what_is_not_old(patch: pytest.MonkeyPatch) -> None:
    retain = FileLog.retain

    def retain_too_much(self: FileLog) -> None:
        self._drift._clock = VirtualClock(self._platform.clock.time_us() + 10**15)
        self._drift._difference = self._drift._measure()
        retain(self)

    patch.setattr(FileLog, "retain", retain_too_much)


def let_the_latest_time_go_back(patch: pytest.MonkeyPatch) -> None:
    def last(*values: Any, **options: Any) -> Any:
        return values[1] if len(values) == 2 and values[1] > 10**14 else builtins.max(*values, **options)

    patch.setattr(writer, "max", last, raising=False)


def forget_producers_when_the_clock_jumps(patch: pytest.MonkeyPatch) -> None:
    def advance(self: ProducerTable, now_us: int) -> None:
        self._latest_us = now_us
        original(self, now_us)

    original = ProducerTable._advance
    patch.setattr(ProducerTable, "_advance", advance)


def find_the_event_after(patch: pytest.MonkeyPatch) -> None:
    find = PartitionReader.find_time
    patch.setattr(
        PartitionReader, "find_time", lambda self, time_us, first, end: min(find(self, time_us, first, end) + 1, end)
    )


def claim_too_early(patch: pytest.MonkeyPatch) -> None:
    claim = FileSchedule.claim
    patch.setattr(FileSchedule, "claim", lambda self, now, limit, fence: claim(self, now + 3_600_000_000, limit, fence))


@pytest.mark.parametrize(
    "breakage",
    [
        expire_leases_by_the_wall_clock,
        trust_the_wall_clock,
        trust_no_clock,
        raise_no_alarm,
        remove_what_is_not_old,
        let_the_latest_time_go_back,
        forget_producers_when_the_clock_jumps,
        find_the_event_after,
        claim_too_early,
    ],
)
def test_a_store_that_believes_the_wrong_clock_is_found(
    breakage: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    breakage(monkeypatch)
    with pytest.raises(TooManyFindings):
        CAMPAIGN.run(FirstFinding(40), 1)
