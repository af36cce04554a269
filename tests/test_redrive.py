"""Redriving without Spark: what a job marks, what its run brings back, and who else may be at it meanwhile."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from contextlib import closing
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some
from tests.dead_rows import Kept, a_letter, a_topic, kept, put, seeded, states

from penstock.cli import main
from penstock.clock import SystemClock, VirtualClock
from penstock.errors import UsageError
from penstock.rows import ParkedFilter
from penstock.spark.letters import letters_in, planned
from penstock.spark.pipelines import redrive
from penstock.spark.pipelines.redrive import Letters, Redriven, bring_back, mark, marked_with, new_job, planned_of
from penstock.spark.pipelines.rounds import Ending
from penstock.stores import open_store

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from penstock.ports import Store
    from penstock.rows import TopicInfo

Place = tuple[str, int, int]
NAMES = ("billing", "mailing")


@pytest.fixture
def store() -> Iterator[Store]:
    with closing(open_store("memory:")) as store:
        yield store


@pytest.fixture
def topic(store: Store) -> TopicInfo:
    return a_topic(store, subscriptions=NAMES)


def chosen(topic: TopicInfo, places: Iterable[Place]) -> list[Letters]:
    parts: dict[tuple[str, int], list[int]] = {}
    for name, partition, offset in sorted(places):
        parts.setdefault((name, partition), []).append(offset)
    return [Letters(topic, *where, np.array(offsets, np.int64)) for where, offsets in parts.items()]


def a_job(store: Store, topic: TopicInfo, places: Iterable[Place]) -> str:
    places = list(places)
    job = new_job(len(places), SystemClock())
    mark(store, chosen(topic, places), job)
    return job


# --- a model --------------------------------------------------------------------------------------

PLACES = [(name, partition, offset) for name in NAMES for partition in range(2) for offset in range(5)]
one_place = some.sampled_from(PLACES)
steps = some.one_of(
    some.tuples(some.just("preview"), some.sets(one_place, min_size=1)),
    some.tuples(some.just("run"), some.integers(0, 5), some.integers(0, 4)),
    some.tuples(some.sampled_from(["die", "by hand", "purge"]), one_place),
)


class Model:
    """What should be: every letter with its state, how often it came back, and its job."""

    def __init__(self) -> None:
        self.rows = {place: Kept("dead", 0, "") for place in PLACES}

    def preview(self, places: set[Place], job: str) -> None:
        for place in places & self.rows.keys():
            if self.rows[place].state == "dead":
                self.rows[place] = self.rows[place]._replace(job=job)

    def run(self, job: str, most: int) -> int:
        mine = sorted(place for place, row in self.rows.items() if row.state == "dead" and row.job == job)[:most]
        for place in mine:
            self.replay(place)
        return len(mine)

    def replay(self, place: Place) -> None:
        row = self.rows.get(place)
        if row is not None and row.state == "dead":
            self.rows[place] = Kept("waiting", row.replay + 1, "")

    def die(self, place: Place) -> None:
        if place in self.rows:
            self.rows[place] = self.rows[place]._replace(state="dead")

    def purge(self, place: Place) -> None:
        if place in self.rows and self.rows[place].state != "waiting":
            del self.rows[place]


class OneByOne:
    """Asks for an end after so many letters, which come one at a time."""

    def __init__(self, most: int) -> None:
        self.ending = Ending()
        self._most = most
        if not most:
            self.ending.ask()

    def seen(self, done: int, _total: int) -> None:
        if done >= self._most:
            self.ending.ask()


@given(some.lists(steps, max_size=25))
@settings(max_examples=150)
def test_a_run_brings_back_what_its_preview_marked_and_is_still_its_own_each_once(
    script: list[tuple[Any, ...]],
) -> None:
    model = Model()
    jobs = ["redrive-20260101T000000-7-00000000"]
    with closing(open_store("memory:")) as store, pytest.MonkeyPatch.context() as patch:
        patch.setattr(redrive, "ROWS_TOGETHER", 1)
        topic = a_topic(store, subscriptions=NAMES)
        put(store, (a_letter(topic, *place) for place in PLACES))
        for kind, *given_ in script:
            if kind == "preview":
                jobs.append(a_job(store, topic, given_[0]))
                model.preview(given_[0], jobs[-1])
            elif kind == "run":
                which, most = given_
                job, limit = jobs[which % len(jobs)], OneByOne(most)
                done = bring_back(store, job, progress=limit.seen, ending=limit.ending)
                assert done.replayed == model.run(job, most)
                assert sum(done.subscriptions.values()) == done.replayed
                assert done.left == done.found - done.replayed
            else:
                name, partition, offset = given_[0]
                here = ParkedFilter(
                    log_id=topic.log_id, subscription=name, partition=partition, offsets=frozenset({offset})
                )
                if kind == "by hand":
                    store.parked.replay(here, 0)
                    model.replay(given_[0])
                elif kind == "purge":
                    store.parked.purge(here)
                    model.purge(given_[0])
                else:
                    put(store, [msgspec.structs.replace(row, state="dead") for row in store.parked.page(here)])
                    model.die(given_[0])
            found = {(name, *at): row for name in NAMES for at, row in kept(store, topic, name).items()}
            assert found == model.rows


# --- jobs -----------------------------------------------------------------------------------------


def test_a_job_says_how_many_letters_it_had() -> None:
    assert planned_of(new_job(123, VirtualClock())) == 123
    assert new_job(1, VirtualClock()) != new_job(1, VirtualClock())
    assert new_job(5, VirtualClock()).startswith("redrive-20260101T000000-5-")
    assert planned_of("replay-20260101T000000-0a0a0a0a") is None


def test_of_two_previews_of_the_same_letters_the_later_one_has_them_and_the_earlier_one_says_so(
    store: Store, topic: TopicInfo
) -> None:
    places = [("billing", 0, offset) for offset in range(10)]
    put(store, (a_letter(topic, *place) for place in places))
    earlier, later = a_job(store, topic, places), a_job(store, topic, places[:7])
    first, second = bring_back(store, earlier), bring_back(store, later)
    assert (first.planned, first.found, first.replayed) == (10, 3, 3)
    assert (second.planned, second.found, second.replayed) == (7, 7, 7)


def test_a_letter_that_dies_again_is_not_of_the_job_any_more(store: Store, topic: TopicInfo) -> None:
    put(store, [a_letter(topic, "billing", 1, 4)])
    job = a_job(store, topic, [("billing", 1, 4)])
    assert bring_back(store, job).replayed == 1
    put(store, [a_letter(topic, "billing", 1, 4, replay=1)])
    assert bring_back(store, job)[1:4] == (1, 0, 0)
    assert kept(store, topic, "billing") == {(1, 4): Kept("dead", 1, "")}


def test_what_waits_or_is_done_is_never_marked(store: Store, topic: TopicInfo) -> None:
    put(store, [a_letter(topic, "billing", 0, at, state=state) for at, state in enumerate(["dead", "waiting", "done"])])
    job = new_job(4, SystemClock())
    assert mark(store, chosen(topic, [("billing", 0, offset) for offset in range(4)]), job) == {"billing": 1}
    assert [part.offsets.tolist() for part in marked_with(store, job)] == [[0]]


def test_two_runs_at_once_share_the_work(store: Store, topic: TopicInfo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redrive, "ROWS_TOGETHER", 3)
    places = [(name, partition, offset) for name in NAMES for partition in range(2) for offset in range(10)]
    put(store, (a_letter(topic, *place) for place in places))
    job = a_job(store, topic, places)
    others: list[Redriven] = []

    def between(done: int, _total: int) -> None:
        if not others:
            half = OneByOne(15)
            others.append(bring_back(store, job, progress=half.seen, ending=half.ending))

    mine = bring_back(store, job, progress=between)
    assert (mine.found, mine.replayed + others[0].replayed) == (40, 40)
    assert 15 <= others[0].replayed < others[0].found
    assert {row for name in NAMES for row in kept(store, topic, name).values()} == {Kept("waiting", 1, "")}


def test_a_letter_that_another_job_takes_while_a_run_is_at_it_is_left_to_that_job(
    store: Store, topic: TopicInfo, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redrive, "ROWS_TOGETHER", 2)
    places = [("billing", 0, offset) for offset in range(6)]
    put(store, (a_letter(topic, *place) for place in places))
    job = a_job(store, topic, places)
    later: list[str] = []

    def between(_done: int, _total: int) -> None:
        if not later:
            later.append(a_job(store, topic, places[3:5]))
            # And one comes back by hand, and dies again.
            put(store, [a_letter(topic, *places[5], replay=1)])

    done = bring_back(store, job, progress=between)
    assert (done.found, done.replayed, done.left) == (6, 3, 0)
    mine, others = Kept("waiting", 1, ""), Kept("dead", 0, later[0])
    assert list(kept(store, topic, "billing").values()) == [mine] * 3 + [others] * 2 + [Kept("dead", 1, "")]


def test_a_job_that_nobody_has_marked_is_a_mistake_unless_it_is_done(store: Store, topic: TopicInfo) -> None:
    with pytest.raises(UsageError, match="no dead letter is marked with 'redrive-1'"):
        bring_back(store, "redrive-1")
    with pytest.raises(UsageError, match="the job's id is empty"):
        bring_back(store, "")
    assert bring_back(store, new_job(9, SystemClock()))[1:5] == (9, 0, 0, 0)
    put(store, [a_letter(topic, "billing", 0, 0, job="replay-by-hand")])
    assert bring_back(store, "replay-by-hand")[1:4] == (None, 1, 1)


# --- the rate -------------------------------------------------------------------------------------


class Waiting(Ending):
    """Waits on a virtual clock, and remembers what for."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__()
        self.clock = clock
        self.waits: list[float] = []

    def wait(self, seconds: float) -> bool:
        self.waits.append(round(seconds, 6))
        self.clock.advance(seconds)
        return self.asked


@pytest.mark.parametrize(("rate", "together"), [(3.0, 1), (40.0, 4), (1e6, 1_000)])
def test_letters_come_back_at_most_at_the_rate(store: Store, topic: TopicInfo, rate: float, together: int) -> None:
    places = [("billing", 0, offset) for offset in range(8)]
    put(store, (a_letter(topic, *place) for place in places))
    clock = VirtualClock()
    begun = clock.time_us()
    ending = Waiting(clock)
    assert bring_back(store, a_job(store, topic, places), rate=rate, ending=ending, clock=clock).replayed == 8
    assert ending.waits == [round(together / rate, 6)] * (-(-8 // together) - 1)
    due = [row.due_at for row in store.parked.waiting(ParkedFilter(log_id=topic.log_id, subscription="billing"))]
    assert all(
        second - first == pytest.approx(together / rate * 1e6, abs=2) for first, second in pairwise(due[::together])
    )
    assert due[0] == begun


@pytest.mark.parametrize("rate", [0.0, -1.0, 2e6, float("nan")])
def test_a_rate_that_is_none_is_refused(rate: float) -> None:
    with pytest.raises(UsageError, match="the rate is"):
        redrive.redrive("file:./nowhere", "redrive-x", rate=rate)


def test_a_filter_that_is_none_is_refused_before_anything_is_read() -> None:
    assert redrive.checked_filter("a = b", ["0123456789abcdef"] * 2) == ["0123456789abcdef"]
    for where, fingerprints, why in [
        (None, ["0123456789ABCDEF"], "is no fingerprint"),
        (" ", [], "the expression is empty"),
        ("a" * 100_001, [], "may have 100,000"),
        (None, [f"{number:016x}" for number in range(1_001)], "at most 1,000 fingerprints"),
    ]:
        with pytest.raises(UsageError, match=why):
            redrive.checked_filter(where, fingerprints)


# --- stretches ------------------------------------------------------------------------------------


@given(
    some.sets(some.tuples(some.sampled_from(NAMES), some.integers(0, 2), some.integers(0, 60)), max_size=40),
    some.integers(1, 9),
)
def test_every_dead_letter_is_in_exactly_one_stretch(places: set[Place], tasks: int) -> None:
    with closing(open_store("memory:")) as store, pytest.MonkeyPatch.context() as patch:
        for name, value in {"STRETCH_MIN": 3, "PAGE_ROWS": 4, "BATCH_ROWS": 6}.items():
            patch.setattr(f"penstock.spark.letters.{name}", value)
        topic = a_topic(store, partitions=3, subscriptions=NAMES)
        put(store, (a_letter(topic, *place) for place in places))
        put(store, (a_letter(topic, "billing", 1, offset, state="waiting") for offset in range(100, 105)))
        # The log may be shorter than its letters: they outlive it.
        patch.setattr("penstock.spark.letters._end", lambda *_: 40)
        stretches = planned(store, topic, NAMES, tasks)
        read = [letters_in(store.parked, stretch) for stretch in stretches]
        rows = [row for batches in read for batch in batches for row in batch.to_pylist()]
    found = [(row["subscription"], row["partition"], row["offset"]) for row in rows]
    assert sorted(found) == sorted(places)
    pairs = len({place[:2] for place in places})
    assert len(stretches) <= max(tasks, pairs) + pairs


# --- in processes of their own --------------------------------------------------------------------


class Child:
    """`penstock pipeline redrive` in a process of its own."""

    def __init__(self, url: str, *argv: str, stderr: int = subprocess.PIPE) -> None:
        command = [sys.executable, "-W", "error", "-m", "penstock", "--url", url, "pipeline", "redrive", *argv]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True)

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def ended(self) -> tuple[int, str, str]:
        out, err = self._process.communicate(timeout=60)
        return self._process.returncode, out, err

    @property
    def runs(self) -> bool:
        return self._process.poll() is None


def wait_until_some_came_back(child: Child, url: str, topic: TopicInfo) -> None:
    with closing(open_store(url)) as store:
        wanted = ParkedFilter(log_id=topic.log_id, subscription="billing")
        while not store.parked.waiting(wanted):
            assert child.runs, child.ended()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_run_that_was_killed_or_told_to_end_is_repeated_and_brings_back_the_rest(
    root: Path, number: signal.Signals
) -> None:
    url = f"file:{root}"
    topic = seeded(url, count=1_500)
    with closing(open_store(url)) as store:
        places = [("billing", partition, offset) for partition in range(2) for offset in range(600)]
        job = a_job(store, topic, places)
    # It would take a minute, so that it is killed in the middle, however slow this machine is.
    with Child(url, "--job", job, "--yes", "--rate", "20", "--json") as child:
        wait_until_some_came_back(child, url, topic)
        child.signal(number)
        code, out, err = child.ended()
    before = states(url, topic)["waiting"]
    assert 0 < before < 1_200
    if number == signal.SIGKILL:
        assert code == -signal.SIGKILL
    else:
        told = json.loads(out)
        assert (code, told["replayed"], told["left"], told["done"]) == (1, before, 1_200 - before, False)
        assert f"{told['left']:,} are left: penstock pipeline redrive --job {job} --yes goes on" in err
    with Child(url, "--job", job, "--yes", "--json") as child:
        code, out, err = child.ended()
    told = json.loads(out)
    assert (code, told["planned"], told["found"], told["replayed"]) == (0, 1_200, 1_200 - before, 1_200 - before)
    with closing(open_store(url)) as store:
        rows = kept(store, topic, "billing")
    back = {("billing", *at) for at, row in rows.items() if row == Kept("waiting", 1, "")}
    assert back == set(places)
    assert sum(row == Kept("dead", 0, "") for row in rows.values()) == 300


def test_a_run_at_a_terminal_shows_how_far_it_is(root: Path) -> None:
    url = f"file:{root}"
    topic = seeded(url, count=1_200)
    with closing(open_store(url)) as store:
        job = a_job(store, topic, [("billing", partition, offset) for partition in range(2) for offset in range(600)])
    ours, terminal = os.openpty()
    try:
        with Child(url, "--job", job, "--yes", "--rate", "20", stderr=terminal) as child:
            os.close(terminal)
            shown = ""
            while not re.search(r"letters .*\b\d+/1200\b", shown):
                shown += os.read(ours, 4_096).decode(errors="replace")  # an error at the end of the child
            assert child.runs
    finally:
        os.close(ours)


def test_two_processes_run_a_job_at_once(root: Path) -> None:
    url = f"file:{root}"
    topic = seeded(url, count=4_000)
    with closing(open_store(url)) as store:
        job = a_job(store, topic, [("billing", partition, offset) for partition in range(2) for offset in range(2_000)])
    argv = ("--job", job, "--yes", "--json", "--rate", "4000")
    with Child(url, *argv) as one, Child(url, *argv) as two:
        told = [json.loads(child.ended()[1]) for child in (one, two)]
    assert sum(each["replayed"] for each in told) == 4_000
    with closing(open_store(url)) as store:
        assert set(kept(store, topic, "billing").values()) == {Kept("waiting", 1, "")}


# --- the command, as far as it needs no Spark -------------------------------------------------------


def test_a_job_is_shown_before_it_is_run(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url = f"file:{root}"
    topic = seeded(url, count=10)
    with closing(open_store(url)) as store:
        job = a_job(store, topic, [("billing", 0, offset) for offset in range(4)])
        store.parked.purge(ParkedFilter(log_id=topic.log_id, subscription="billing", offsets=frozenset({3})))
    assert main(["--url", url, "pipeline", "redrive", "--job", job]) == 2
    told = capsys.readouterr()
    assert told.out == f"3 dead letters are marked with {job}, of 4 that were planned\n"
    assert "nothing came back: give --yes to do it" in told.err
    assert states(url, topic) == {"waiting": 0, "dead": 8, "done": 0}
    assert main(["--url", url, "pipeline", "redrive", "--job", job, "--yes"]) == 0
    told = capsys.readouterr()
    assert told.out == "3 dead letters came back, of 4 that were planned\n"
    assert "1 were not marked any more: brought back before, removed, or marked by a later job" in told.err
    assert main(["--url", url, "pipeline", "redrive", "--job", job, "--yes", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "job": job, "done": True, "planned": 4, "found": 0, "replayed": 0, "left": 0, "subscriptions": []
    }  # fmt: skip


@pytest.mark.parametrize(
    ("argv", "why"),
    [
        ([], "say of which topic, or which --job"),
        (["orders", "--job", "redrive-1"], "give --job or a topic and a filter, not both"),
        (["--where", "a = b", "--job", "redrive-1"], "give --job or a topic and a filter, not both"),
        (["--job", "redrive-1", "--yes"], "no dead letter is marked with 'redrive-1'"),
        (["orders", "--continuous"], "give --yes, and a filter that you have looked at"),
        (["ordres"], "there is no topic 'ordres'; did you mean 'orders'?"),
        (["orders", "biling"], "topic 'orders' has no subscription 'biling'; did you mean 'billing'?"),
        (["orders", "--fingerprint", "xyz"], "'xyz' is no fingerprint"),
        (["orders", "--rate", "0"], "the rate is 0.0, it must be above 0"),
    ],
)
def test_a_wrong_command_is_told_before_spark_starts(
    root: Path, capsys: pytest.CaptureFixture[str], argv: list[str], why: str
) -> None:
    url = f"file:{root}"
    seeded(url, count=2)
    assert main(["--url", url, "pipeline", "redrive", *argv]) == 2
    assert why in capsys.readouterr().err
