"""C0: every planted bug is caught, by a hunt that finds nothing in code that is right."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING

import pytest

from penstock.stores.file.log import FileLog
from penstock.testing.campaigns import planted
from penstock.testing.campaigns.campaign import Report
from penstock.testing.campaigns.planted import BUGS, CAMPAIGN, Bug, table
from penstock.testing.campaigns.planted import hunts as planted_hunts
from penstock.testing.campaigns.planted.hunts import Misfit, crashes_during
from penstock.testing.campaigns.planted.tools import changed

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.skipif(CAMPAIGN.obstacle() is not None, reason=str(CAMPAIGN.obstacle()))

LEAST = 30
BY_NAME = {bug.name: bug for bug in BUGS}
HUNTS: dict[Callable[[], str | None], str] = {bug.hunt: bug.name for bug in reversed(BUGS)}


def test_the_classic_bugs_are_all_there() -> None:
    assert len(BY_NAME) == len(BUGS) >= LEAST
    assert all(bug.what.endswith(".") and "\n" not in bug.what for bug in BUGS)


@pytest.mark.parametrize("name", BY_NAME)
def test_a_planted_bug_is_caught(name: str) -> None:
    assert BY_NAME[name].caught() is not None


@pytest.mark.parametrize("hunt", HUNTS, ids=HUNTS.values())
def test_without_its_bug_a_hunt_finds_nothing(hunt: Callable[[], str | None], monkeypatch: pytest.MonkeyPatch) -> None:
    # What the campaigns find in code that is right is tried at length where they are tested.
    monkeypatch.setattr(planted_hunts, "CRASHES", 6)
    monkeypatch.setattr(planted_hunts, "BAD_DISKS", 6)
    monkeypatch.setattr(planted_hunts, "DELIVERIES", 2)
    assert hunt() is None


def attributes() -> dict[tuple[str, ...], object]:
    """Return all that a bug could replace: names of modules and of classes, and the code of functions."""
    found: dict[tuple[str, ...], object] = {}
    # A class has as many names as there are modules that import it, and what is in it need be looked at once.
    looked_into: set[type] = set()
    for path, module in list(sys.modules.items()):
        if path.startswith("penstock."):
            for name, value in vars(module).items():
                if name.startswith("__") or isinstance(value, ModuleType):
                    continue
                found[path, name] = value
                if isinstance(value, FunctionType):
                    found[path, name, "__code__"] = value.__code__
                elif isinstance(value, type) and value not in looked_into:
                    looked_into.add(value)
                    found.update({(path, name, inner): each for inner, each in vars(value).items()})
    return found


def differences(before: dict[tuple[str, ...], object]) -> set[tuple[str, ...]]:
    now = attributes()
    return {key for key in before.keys() | now.keys() if before.get(key) is not now.get(key)}


@pytest.mark.parametrize("name", BY_NAME)
def test_a_planted_bug_changes_the_code_and_leaves_it_as_it_was(name: str) -> None:
    before = attributes()
    with BY_NAME[name].plant():
        assert differences(before)
    assert differences(before) == set()
    with pytest.raises(KeyError), BY_NAME[name].plant():
        raise KeyError
    assert differences(before) == set()


def test_the_campaign_counts_what_was_caught_and_reports_what_was_not(monkeypatch: pytest.MonkeyPatch) -> None:
    caught = Bug("caught", "It does wrong.", "somebody", nullcontext, lambda: "found")
    missed = Bug("missed", "It does wrong, too.", "nobody", nullcontext, lambda: None)
    monkeypatch.setattr(planted, "BUGS", (caught, missed))
    report = Report(rounds=2)
    CAMPAIGN.run(report, 0)
    assert report.done == 2
    assert report.tried == {"caught by somebody": 1}
    assert [finding.replay for finding in report.findings] == ["missed"]


def test_a_planted_bug_that_breaks_only_itself_is_not_called_caught() -> None:
    def read() -> None:
        """Take no arguments, unlike the right one."""

    with changed(FileLog, read=read), pytest.raises(Misfit, match="TypeError"):
        crashes_during("publish")()


def test_the_table_has_a_row_for_every_bug() -> None:
    _, _, *rows = table().splitlines()
    assert [row.split(" | ")[0].removeprefix("| ") for row in rows] == [bug.name for bug in BUGS]
    assert all(row.count(" | ") == 2 for row in rows)
