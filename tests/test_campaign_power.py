"""Failing power: the disk does fail, the campaign finds nothing, and it does find bugs that are planted."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from penstock.stores.file.state import connections, schema
from penstock.stores.file.tail import State
from penstock.stores.file.writer import PartitionWriter
from penstock.testing.campaigns import campaign, power
from penstock.testing.campaigns.campaign import Report, TooManyFindings
from penstock.testing.campaigns.power.device import Cut, Device
from penstock.testing.campaigns.processes.reports import Answered, Asked, Bounds, Ledger, Publish, Topics, now
from penstock.testing.journal import Outcome

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Iterator


@pytest.fixture
def power_can_fail() -> None:
    if (reason := power.CAMPAIGN.obstacle()) is not None:
        pytest.skip(reason)


@pytest.fixture
def device(power_can_fail: None) -> Iterator[Device]:
    with tempfile.TemporaryDirectory(prefix="penstock-", dir="/tmp") as directory:
        device = Device(Path(directory))
        device.format(4096)
        yield device


# --- the disk ---------------------------------------------------------------------------------


@pytest.mark.root
@pytest.mark.parametrize("how", list(Cut))
def test_when_the_power_fails_what_was_synced_stays_and_nothing_is_written_any_more(device: Device, how: Cut) -> None:
    path = device.mount_point / "file"
    with device.mounted("data=ordered"), path.open("wb", buffering=0) as file:
        file.write(b"synced")
        os.fsync(file.fileno())
        (device.mount_point / "other").write_bytes(b"not synced")
        device.cut(how)
        with pytest.raises(OSError, match="Input/output error"):
            file.write(b"too late")
    with device.mounted("data=ordered"):
        assert path.read_bytes() == b"synced"
        survived = (device.mount_point / "other").exists()
    # The test would be worth nothing if the disk forgot nothing.
    assert survived == (how != Cut.AT_ONCE)


def test_without_root_the_campaign_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert power.CAMPAIGN.obstacle() == "root is needed to mount a file system"


def test_without_its_tools_the_campaign_names_the_one_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
    reason = power.CAMPAIGN.obstacle()
    assert reason is not None
    assert "mkfs.ext4 is not installed" in reason


# --- the campaign -----------------------------------------------------------------------------


@pytest.mark.root
@pytest.mark.usefixtures("power_can_fail")
def test_a_power_failure_breaks_no_promise() -> None:
    report = Report(power.CAMPAIGN.small)
    power.CAMPAIGN.run(report, 1)
    assert report.findings == []
    assert report.done == power.CAMPAIGN.small
    for what in ("power failed at once", "failures in step", "events acknowledged", "events read"):
        assert report.tried[what], what


PLANT = pytest.MonkeyPatch().setattr
"""For as long as the process of a planted bug lives."""


def acknowledge_before_the_sync() -> None:
    def sync_to(self: PartitionWriter, _file: Any, after: Any) -> None:
        self._tail = self._tails.write(
            self._files.slot,
            after,
            state=State.OPEN,
            durable_position=after.position,
            durable_number=after.number,
            durable_end=after.end,
        )

    PLANT(PartitionWriter, "sync_to", sync_to)


def commit_without_a_sync() -> None:
    configure = schema.configure

    def configure_carelessly(connection: sqlite3.Connection, *, reading: bool) -> None:
        configure(connection, reading=reading)
        connection.execute("PRAGMA synchronous = NORMAL")

    PLANT(connections, "configure", configure_carelessly)


@pytest.mark.root
@pytest.mark.usefixtures("power_can_fail")
@pytest.mark.parametrize("bug", [acknowledge_before_the_sync, commit_without_a_sync])
def test_a_forgotten_sync_is_found(monkeypatch: pytest.MonkeyPatch, bug: Any) -> None:
    monkeypatch.setattr(campaign, "FINDINGS_MAX", 1)
    report = Report(60)
    with pytest.raises(TooManyFindings):
        power.run(report, 5, plant=f"{__name__}:{bug.__name__}")


# --- what counts ------------------------------------------------------------------------------


PID, LOG = 1, "log"


def published(ledger: Ledger, number: int) -> None:
    """Publish one event, the answer to which comes at once."""
    ledger.hear(PID, Asked(number, now(), Publish(LOG, 0, "source", number, 1, lasting=True)))
    ledger.hear(PID, Answered(number, now(), Outcome.OK, number))


@pytest.mark.parametrize(("answered", "found"), [("before", ["I1"]), ("after", [])])
def test_only_what_was_answered_before_the_power_failed_must_be_there(answered: str, found: list[str]) -> None:
    report = Report(1)
    ledger = Ledger(report, lambda: "again", refusals=())
    if answered == "before":
        published(ledger, 0)
    ledger.power_fails()
    if answered == "after":
        published(ledger, 0)
    assert len(ledger.to_repeat()) == (answered == "after")
    ledger.power_returns()
    for message in (Topics({LOG}, set()), Bounds(LOG, 0, 0, 0)):
        ledger.hear(PID, message)
    ledger.check()
    assert sorted({finding.what.split(":")[0] for finding in report.findings}) == found


def test_a_call_of_a_process_that_died_is_unknown_and_is_sent_again_until_it_is_ok() -> None:
    ledger = Ledger(Report(1), lambda: "again", refusals=())
    call = Publish(LOG, 0, "source", 0, 1, lasting=True)
    ledger.hear(PID, Asked(0, now(), call))
    assert ledger.to_repeat() == []
    ledger.end_of(PID)
    assert ledger.to_repeat() == [call]
    published(ledger, 0)
    assert ledger.to_repeat() == []
