"""C4 in small; and that it would find what it looks for."""

from __future__ import annotations

import os
import random
import signal
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from penstock.errors import Corruption
from penstock.stores.file.platform import SystemDisk
from penstock.testing.campaigns.campaign import Report
from penstock.testing.campaigns.nursery import Child, Nursery
from penstock.testing.campaigns.syscalls import (
    CAMPAIGN,
    FAULTS,
    KILL,
    WARM_UP,
    Injection,
    count_calls,
    findings,
    injections,
)
from penstock.testing.campaigns.syscalls import judge as syscalls_judge
from penstock.testing.campaigns.syscalls.judge import Judge, complaints, possible, steps_of
from penstock.testing.campaigns.syscalls.life import Life

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from _typeshed import ReadableBuffer

needs_strace = pytest.mark.skipif(CAMPAIGN.obstacle() is not None, reason=str(CAMPAIGN.obstacle()))


@needs_strace
def test_no_system_call_that_fails_breaks_a_promise() -> None:
    report = Report(rounds=CAMPAIGN.small)
    CAMPAIGN.run(report, 1)
    assert report.findings == []
    assert report.done == CAMPAIGN.small


# --- planted bugs -----------------------------------------------------------------------------


def warm_up_with_swallowed_errors() -> None:
    """Plant a bug: a write that fails is taken for one that worked."""
    write_many = SystemDisk.write_many

    def swallow(self: SystemDisk, descriptor: int, buffers: Sequence[ReadableBuffer], position: int) -> int:
        try:
            return write_many(self, descriptor, buffers, position)
        except OSError:
            return sum(memoryview(buffer).nbytes for buffer in buffers)

    SystemDisk.write_many = swallow  # type: ignore[method-assign]
    syscalls_judge.warm_up()


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the name of a warm-up that plants a bug into the nursery."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    return f"{Path(__file__).stem}:{warm_up_with_swallowed_errors.__name__}"


@needs_strace
@pytest.mark.parametrize("bug", [False, True])
def test_a_swallowed_error_of_a_write_is_found(root: Path, planted: str, bug: bool) -> None:
    root.parent.joinpath("counted").mkdir()
    with Nursery(planted if bug else WARM_UP) as nursery:
        calls = count_calls(nursery, root.parent / "counted")
        [step, call] = min(place for place in calls if place[1].startswith("pwritev"))
        found = list(findings(nursery, root, Injection(step, call, 1, "EIO"), rebooted=False))
    assert bool(found) == bug


# --- the judge --------------------------------------------------------------------------------


def lived(root: Path) -> list[Any]:
    """Return what a life without failures tells."""
    told: list[Any] = []
    Life(root, told.append, lambda _: None).run()
    return told


def place_of(told: list[Any], what: str) -> int:
    return next(index for index, value in enumerate(told) if value[0] == what)


def claim_a_publish_that_never_was(told: list[Any]) -> None:
    index = place_of(told, "publish")
    told[index:index] = [["publish", told[index][1] | {"first": 50, "count": 1}], ["ok", 17]]


def claim_that_a_publish_failed(told: list[Any]) -> None:
    for index, value in enumerate(told):
        if value[0] == "publish" and value[1]["first"] == 15:
            told[index + 1] = ["failed", "StoreFull"]


def claim_that_a_commit_failed(told: list[Any]) -> None:
    for index, value in enumerate(told):
        if value[0] == "commit" and value[1]["position"] == 9:
            told[index + 1] = ["failed", "StoreFull"]


def claim_that_it_failed(what: str) -> Callable[[list[Any]], None]:
    def tamper(told: list[Any]) -> None:
        told[place_of(told, what) + 1] = ["failed", "StoreFull"]

    tamper.__name__ = f"claim that it failed to {what}"
    return tamper


def claim_another_offset(told: list[Any]) -> None:
    told[place_of(told, "publish") + 3] = ["ok", 2]


@pytest.mark.parametrize(
    ("tamper", "expected"),
    [
        (lambda _: None, None),
        (claim_a_publish_that_never_was, "was acknowledged here"),
        (claim_that_a_publish_failed, "every publish of it failed"),
        (claim_that_a_commit_failed, "the cursor is"),
        (claim_that_it_failed("subscribe"), "the list of subscriptions is"),
        (claim_that_it_failed("park"), "what is parked is"),
        (claim_that_it_failed("claim"), "how many are scheduled is 0"),
        (claim_that_it_failed("trim"), "outside of the log"),
        (claim_that_it_failed("delete"), "exists is False"),
        (claim_another_offset, "I4"),
    ],
)
def test_the_judge_finds_what_differs_from_what_was_told(
    root: Path, tamper: Callable[[list[Any]], None], expected: str | None
) -> None:
    told = lived(root)
    tamper(told)
    found = Judge(root, steps_of(told), rebooted=False).findings()
    assert found == [] if expected is None else any(expected in finding for finding in found)


def test_the_judge_finds_topics_that_share_a_slot(root: Path) -> None:
    told = lived(root)
    for path in root.glob("topics/*/topic.json"):
        path.write_bytes(path.read_bytes().replace(b'"slot":1', b'"slot":0'))
    assert "2 topics share slot 0 of the tails" in Judge(root, steps_of(told), rebooted=True).findings()


def test_the_judge_does_not_pass_over_damage(root: Path) -> None:
    told = lived(root)
    segment = next(root.glob("topics/*/0/*.seg"))
    data = bytearray(segment.read_bytes())
    data[data.rindex(bytes([20]) * 40)] ^= 1  # in the payload of what was published last
    segment.write_bytes(data)
    with pytest.raises(Corruption):
        Judge(root, steps_of(told), rebooted=True).findings()


def test_errors_that_nobody_should_see_are_complained_of() -> None:
    fine = steps_of([["open", {}], ["unknown", "EIO"], ["open", {}], ["ok", True]])
    assert list(complaints(fine, once=True)) == []
    wrong = steps_of([["open", {}], ["wrong", "KeyError"], ["open", {}], ["ok", True]])
    assert "KeyError" in "".join(complaints(wrong, once=False))
    again = steps_of([["open", {}], ["unknown", "EIO"], ["open", {}], ["failed", "StoreFull"]])
    assert list(complaints(again, once=False)) == []
    assert "failed again" in "".join(complaints(again, once=True))


def test_what_may_be_stored_follows_from_the_outcomes() -> None:
    assert possible(0, []) == {0}
    assert possible(0, [(1, "failed")]) == {0}
    assert possible(0, [(1, "unknown"), (2, "unknown")]) == {0, 1, 2}
    assert possible(0, [(1, "unknown"), (2, "ok")]) == {2}


def test_a_step_that_was_cut_off_is_unknown() -> None:
    [opened, cut] = steps_of([["open", {}], ["ok", True], ["publish", {"log": "a"}]])
    assert (opened.outcome, cut.outcome) == ("ok", "unknown")


# --- what is tried ----------------------------------------------------------------------------


def test_every_call_of_a_life_fails_in_every_way_and_rare_kinds_come_early() -> None:
    calls = {(0, "openat"): 30, (3, "openat"): 2, (3, "fdatasync"): 1, (4, "gettid"): 9}
    tried = list(injections(calls, random.Random(1)))
    assert tried == list(injections(calls, random.Random(1)))
    assert tried != list(injections(calls, random.Random(2)))
    faults = {name: faults for faults in FAULTS for name in faults.names}
    ways = {name: len(faults[name].once) + len(faults[name].lasting) + 1 for name in ("openat", "fdatasync")}
    assert len(set(tried)) == len(tried) == 32 * ways["openat"] + ways["fdatasync"]
    assert {injection.call for injection in tried[: 2 * ways["fdatasync"]]} == {"openat", "fdatasync"}


def test_an_injection_says_how_to_repeat_it() -> None:
    assert Injection(3, "fdatasync", 2, "EIO").rule == "fdatasync:error=EIO:when=2"
    assert Injection(3, "fdatasync", 2, "EIO", 2).rule == "fdatasync:error=EIO:when=2+"
    assert Injection(3, "openat", 1, KILL).rule == "openat:signal=SIGKILL:when=1"
    assert "in step 3" in str(Injection(3, "fdatasync", 2, "EIO", 2))


# --- the nursery ------------------------------------------------------------------------------


def work(child: Child, *, how: str) -> None:
    """End in some way."""
    child.tell(how)
    if how == "pauses":
        child.pause()
        child.tell("goes on")
    elif how == "breaks":
        raise KeyError(how)
    elif how == "is killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "hangs":
        threading.Event().wait()


def warm_up_nothing() -> None:
    """Be quick."""


def test_a_nursery_tells_how_each_child_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    module = Path(__file__).stem
    with Nursery(f"{module}:warm_up_nothing") as nursery:
        assert nursery.run(f"{module}:work", 30, how="ends") == (0, ["ends"], False)
        assert nursery.run(f"{module}:work", 30, how="is killed") == (-signal.SIGKILL, ["is killed"], False)
        broken = nursery.run(f"{module}:work", 30, how="breaks")
        assert (broken.code, broken.hung) == (1, False)
        assert "KeyError" in broken.told[1]
        assert nursery.run(f"{module}:work", 0.2, how="hangs") == (-signal.SIGKILL, ["hangs"], True)
        nursery.begin(f"{module}:work", how="pauses")
        assert nursery.pauses(30)
        nursery.let_go()
        assert nursery.end(30) == (0, ["pauses", "goes on"], False)
        nursery.begin(f"{module}:work", how="ends")
        assert not nursery.pauses(30)
        assert nursery.end(30).code == 0


def test_a_nursery_that_cannot_start_says_so() -> None:
    with pytest.raises(RuntimeError, match="did not start"), Nursery("penstock:nothing_of_this_name"):
        pass
