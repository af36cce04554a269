"""Killing and freezing consumers between the steps of a delivery; and bugs in them that must be found by it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest
from msgspec import structs

from penstock import ports
from penstock.engine.work import Work
from penstock.producers import lasting_producer
from penstock.rows import Commit
from penstock.runtime import ledger
from penstock.runtime.committer import Committer
from penstock.runtime.presence import Presence
from penstock.runtime.seat import Seat
from penstock.testing.campaigns import deliveries
from penstock.testing.campaigns.campaign import Report
from penstock.testing.campaigns.deliveries import consumer
from penstock.testing.campaigns.deliveries.rounds import MODULES, play
from penstock.testing.campaigns.deliveries.script import AFTER, BEFORE, SCENES, SIDES, Fault
from penstock.testing.campaigns.deliveries.steps import CHANGING, STEPS
from penstock.testing.campaigns.zygote import Zygote

if TYPE_CHECKING:
    from multiprocessing.connection import Connection


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    with Zygote(*MODULES, __name__) as started:
        yield started


# --- every step, by name ----------------------------------------------------------------------


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("step", STEPS)
def test_a_consumer_is_killed(zygote: Zygote, step: str, side: str) -> None:
    scene = SCENES[STEPS[step]]
    played, found = play(zygote, scene, [Fault(step, side)])
    assert found == []
    assert [(ends.step, ends.fault.side) for ends in played.reached[len(scene.before) :]] == [(step, side)]


@pytest.mark.parametrize(
    ("step", "side"),
    [
        ("commit: progress", BEFORE),
        ("commit: a failed attempt", BEFORE),
        ("commit: parks a retry with its followers", BEFORE),
        ("commit: a parked row is done", BEFORE),
        ("commit: dead letter", AFTER),
        ("commit: marks suspects", BEFORE),
        ("commit: attempt of a suspect, alone", AFTER),
        ("commit: gives back an attempt", BEFORE),
        ("commit: seek", BEFORE),
        ("renewal of the process's lease", BEFORE),
        ("lease of the shard", AFTER),
        ("release of the shard", BEFORE),
        ("ledger: append", BEFORE),
        ("ledger: forget", BEFORE),
    ],
)
def test_a_consumer_is_frozen_taken_over_and_woken(zygote: Zygote, step: str, side: str) -> None:
    scene = SCENES[STEPS[step]].freezing()
    played, found = play(zygote, scene, [Fault(step, side, freeze=True)])
    assert found == []
    assert [(ends.step, ends.fault.side) for ends in played.reached[len(scene.before) :]] == [(step, side)]
    if step.startswith("commit") and side == BEFORE:
        refusals = [what for what in played.books.counts if what.startswith("refused")]
        assert refusals, "it was woken in front of a commit, which must be refused"


def test_every_step_of_a_delivery_has_a_name_and_every_name_is_that_of_a_step(zygote: Zygote) -> None:
    made: set[str] = set()
    for name in dict.fromkeys(STEPS.values()):
        played, found = play(zygote, SCENES[name])
        assert found == [], name
        assert {step for step, scene in STEPS.items() if scene == name} <= set(played.steps), name
        made.update(played.steps)
    assert made == set(STEPS)


def test_every_call_that_changes_a_store_is_known() -> None:
    looking = {
        "topics", "read", "heads", "bounds", "find_time", "subscriptions", "subscription", "revision", "load",
        "settlements", "page", "count", "due", "waiting", "holder", "held", "next_due", "unfinished", "last",
        "pending", "places",
    }  # fmt: skip
    for name, port in {
        "log": ports.Log,
        "cursors": ports.Cursors,
        "parked": ports.ParkedRows,
        "leases": ports.Leases,
        "schedule": ports.Schedule,
        "manifests": ports.Manifests,
    }.items():
        calls = {call for call, _ in inspect.getmembers(port, inspect.isfunction) if not call.startswith("_")}
        assert set(CHANGING[name]) == calls - looking, name


# --- more than one step -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "scene",
    ["a bit of everything", "in batches", "several partitions", "the same consumer again", "handed over"],
)
def test_a_delivery_in_which_several_processes_die(zygote: Zygote, scene: str) -> None:
    _, found = play(zygote, SCENES[scene], [Fault(comes=5), Fault(side=AFTER, comes=9), Fault(comes=7)])
    assert found == []


@pytest.mark.parametrize(
    "scene", ["an event that kills", "an event that kills, beside other partitions", "a parked event that kills"]
)
def test_an_event_that_kills_its_process_each_time_is_a_dead_letter_and_no_other_is(zygote: Zygote, scene: str) -> None:
    counts: list[str] = []
    _, found = play(zygote, SCENES[scene], count=counts.append)
    assert found == []
    # Unseen, in a group, and alone as often as it may be tried.
    assert counts.count("processes killed by an event") == 2 + 1 + SCENES[scene].max_retries


def test_the_campaign_finds_nothing() -> None:
    report = Report(deliveries.CAMPAIGN.small)
    deliveries.CAMPAIGN.run(report, 2)
    assert report.findings == []
    assert report.done == deliveries.CAMPAIGN.small
    assert report.tried["events handed over"]
    assert any(what.startswith("killed") for what in report.tried)


def test_a_round_follows_from_its_seed() -> None:
    assert deliveries.any_round("1-2") == deliveries.any_round("1-2") != deliveries.any_round("1-3")


# --- planted bugs, in the consumers' processes ------------------------------------------------

PLANT = pytest.MonkeyPatch().setattr
"""For as long as the process lives."""

Program = Callable[..., None]


PLAYS_MAX = 8
"""Processes are scheduled by the system: what a death is blamed on may be another event each time."""


def planted(plant: Callable[[], None]) -> Program:
    """Return a program that consumes with a bug in it."""

    @functools.wraps(plant)
    def program(connection: Connection[Any, Any], **arguments: Any) -> None:
        plant()
        consumer.consume(connection, **arguments)

    return program


@planted
def park_without_the_row() -> None:
    def commit(self: Committer, entries: list[Any]) -> list[Any]:
        whole = [self._commit_of(entry, self._clock.time_us()) for entry in entries]
        cursors = self._host.store.cursors
        answers = cursors.commit([structs.replace(each, parked=()) for each in whole])
        for each in whole:
            if each.parked:
                cursors.commit([structs.replace(each, settlement=b"")])
        return answers

    PLANT(Committer, "_commit", commit)


@planted
def commit_without_fence() -> None:
    commit_of = Committer._commit_of

    def unfenced(self: Committer, *arguments: Any) -> Commit:
        return structs.replace(commit_of(self, *arguments), fences=())

    PLANT(Committer, "_commit_of", unfenced)


@planted
def try_suspects_without_a_word() -> None:
    def count_nothing(self: Work, _offset: int) -> None:
        self.progress.touch()

    PLANT(Work, "count_ahead", count_nothing)


@planted
def take_every_end_for_a_clean_one() -> None:
    acquire = Presence.acquire

    async def clean(self: Presence, name: str, owner: str) -> Any:
        lease = await acquire(self, name, owner)
        return None if lease is None else lease._replace(clean=True)

    PLANT(Presence, "acquire", clean)


@planted
def try_suspects_of_all_partitions_at_once() -> None:
    PLANT(Seat, "tries_alone", property(lambda _: False))


@planted
def bury_without_a_letter() -> None:
    write = Work._write

    def unwritten(self: Work, page: Any, due_at: Any, state: str, failure: Any) -> Any:
        return [] if state == "dead" else write(self, page, due_at, state, failure)

    PLANT(Work, "_write", unwritten)


@planted
def forget_records_first() -> None:
    async def round_(self: ledger.Ledger) -> float:
        store = self._host.store
        records = store.cursors.settlements(ledger.PAGE)
        if records:
            topic = store.log.create_topic(ledger.TOPIC, ledger.SETTINGS)
            store.cursors.forget_settlements(records[-1].number)
            ledger._append(store.log, topic.partitions[0], records, ledger.producer_of(topic.log_id))
        return ledger.BUSY_SECONDS

    PLANT(ledger.Ledger, "_round", round_)


@planted
def move_records_as_somebody_else() -> None:
    PLANT(ledger, "producer_of", lambda _log_id: lasting_producer())


@pytest.mark.parametrize(
    ("bug", "scene", "fault", "found"),
    [
        (park_without_the_row, "a long delay", Fault("commit: progress", AFTER), "neither settled nor parked"),
        (commit_without_fence, "nothing fails", Fault("commit: progress", freeze=True), "I10"),
        (try_suspects_without_a_word, "an event that kills", None, "goes on to do so"),
        (take_every_end_for_a_clean_one, "an event that kills", None, "goes on to do so"),
        (
            try_suspects_of_all_partitions_at_once,
            "an event that kills, beside other partitions",
            None,
            "ends as ['acked'], but it is ['dead']",
        ),
        (bury_without_a_letter, "a dead letter", None, "and its row is None"),
        (forget_records_first, "a retry", Fault("ledger: forget", AFTER), "the ledger is not what was written"),
        (
            move_records_as_somebody_else,
            "a retry",
            Fault("ledger: append", AFTER),
            "the ledger is not what was written",
        ),
    ],
)
def test_a_bug_in_the_consumers_is_found(
    zygote: Zygote, bug: Program, scene: str, fault: Fault | None, found: str
) -> None:
    chosen = SCENES[scene].freezing() if fault is not None and fault.freeze else SCENES[scene]
    findings: list[str] = []
    for _ in range(PLAYS_MAX):
        _, findings = play(zygote, chosen, [] if fault is None else [fault], program=bug)
        if any(found in finding for finding in findings):
            return
    raise AssertionError(findings)
