"""Killing and freezing Spark: the campaign finds nothing, and it does find what is wrong with a sink or a topic."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from msgspec.structs import replace

from penstock.batch import Batch
from penstock.events import Event
from penstock.producers import Run, lasting_producer
from penstock.rows import Manifest, Partition
from penstock.runtime import sinks
from penstock.testing.campaigns import spark
from penstock.testing.campaigns.campaign import Report
from penstock.testing.campaigns.processes import quick_directory
from penstock.testing.campaigns.spark import EACH_ONCE
from penstock.testing.campaigns.spark.driver import INPUT, OUTPUT
from penstock.testing.campaigns.spark.household import Guard
from penstock.testing.campaigns.spark.life import Life, Unexpected
from penstock.testing.campaigns.spark.steps import Point, Round
from penstock.testing.campaigns.spark.topics import Topics, topic_named
from penstock.testing.conformance.builders import Part, a_run, append, pages

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from penstock.ports import Store

# Spark starts a dozen Pythons for each driver: seconds on an idle machine, a minute on a busy one.
DRIVERS = pytest.mark.timeout(1800)


@pytest.fixture
def life() -> Iterator[Callable[..., Life]]:
    """Make one store; no process of its drivers outlives the test."""
    made: list[Life] = []
    with quick_directory() as directory:

        def make(plant: str = "") -> Life:
            made.append(Life(Report(1), Path(directory), random.Random(1), plant=plant))
            return made[-1]

        yield make
        for one in made:
            one.end()


@pytest.mark.spark
@DRIVERS
def test_a_driver_stopped_at_any_point_leaves_the_output_equal_to_the_input() -> None:
    report = Report(spark.CAMPAIGN.small)
    spark.CAMPAIGN.run(report, 1)
    assert report.findings == []
    assert report.done == spark.CAMPAIGN.small
    assert {round_.point for round_ in EACH_ONCE} == set(Point) - {Point.BEFORE_TRIM, Point.ANYWHERE}
    for what in (*map(str, EACH_ONCE), "drivers woken that failed", "events orphaned", "events compared"):
        assert report.tried[what], what


@pytest.mark.slow  # as in test_spark_sink.py, here to the last event
@pytest.mark.spark
@DRIVERS
def test_a_query_without_its_checkpoint_is_refused_until_it_adopts_the_sink(life: Callable[..., Life]) -> None:
    copying = life()
    copying.play(Round(Point.AFTER_DONE))
    [*_, reached] = (copying.checkpoint / "offsets" / "0").read_text().splitlines()
    shutil.rmtree(copying.checkpoint)
    before = copying.topics.ends(OUTPUT)

    copying.start(ends=True)
    refused = copying.outcome()
    assert refused.failed
    assert "SinkConflict" in refused.why
    assert "adopt it" in refused.why
    assert copying.topics.ends(OUTPUT) == before

    # What the lost checkpoint said is where its successor begins; the refusal has left a checkpoint, too.
    shutil.rmtree(copying.checkpoint)
    copying.start(ends=True, adopt=True, starting=reached)
    copying.run_to_end()
    # What the refused query had staged is in a log of its own, for the sweep.
    assert copying.topics.staged()
    copying.sweep()
    assert copying.complaints(complete=True) == []


# --- planted bugs, in Spark's workers ---------------------------------------------------------

PLANT = pytest.MonkeyPatch().setattr
"""For as long as the process lives."""


def ignore_the_first_manifest() -> None:
    def commit(
        store: Store, sink: Any, batch: int, topic: Any, staged: Any, *, clock: Any, adopt: bool = False
    ) -> None:
        plan = sinks._plan(store, sink, topic, staged, clock)
        manifest = Manifest(sink=sink.name, query=sink.query, batch=batch, body=sinks._encode(plan))
        store.manifests.prepare(manifest, adopt=adopt)
        sinks.complete(store, manifest)

    PLANT(sinks, "commit", commit)


def append_as_a_new_producer() -> None:
    def a_run_of_another(_producer: bytes, epoch: int, _first: int, count: int, digest: int) -> Run:
        return Run(lasting_producer(), epoch, 0, count, digest)

    PLANT(sinks, "Run", a_run_of_another)


def finish_before_the_append() -> None:
    def complete(store: Store, manifest: Any) -> None:
        store.manifests.finish(manifest.sink, manifest.query, manifest.batch)
        plan = sinks._plan_of(manifest)
        for partition in plan.lines:
            if parts := [part for part in plan.parts if part.partition == partition]:
                sinks._append_parts(store, plan, parts)

    PLANT(sinks, "complete", complete)


def leave_what_was_staged() -> None:
    def finish(store: Store, manifest: Any, _plan: Any) -> None:
        store.manifests.finish(manifest.sink, manifest.query, manifest.batch)

    PLANT(sinks, "_finish", finish)


@pytest.mark.slow
@pytest.mark.spark
@DRIVERS
@pytest.mark.parametrize(
    ("bug", "point", "found"),
    [
        (ignore_the_first_manifest, Point.AFTER_DONE, "there more than once"),
        (append_as_a_new_producer, Point.IN_APPEND, "there more than once"),
        (finish_before_the_append, Point.IN_APPEND, "lost"),
        (leave_what_was_staged, Point.AFTER_STAGING, "are left in the staging log"),
    ],
)
def test_a_bug_in_the_sink_is_found(life: Callable[..., Life], bug: Any, point: Point, found: str) -> None:
    broken = life(plant=f"{__name__}:{bug.__name__}")
    broken.play(Round(point))
    if bug is ignore_the_first_manifest:
        with pytest.raises(Unexpected, match="ProducerConflict"):  # the log itself sees that something is wrong
            broken.finish()
        told = broken.complaints(complete=False)
    else:
        broken.finish()
        told = broken.complaints(complete=True)
    assert found in "\n".join(told)


@pytest.mark.slow
@pytest.mark.spark
@DRIVERS
def test_a_woken_driver_that_appends_is_found(life: Callable[..., Life]) -> None:
    broken = life(plant=f"{__name__}:{append_as_a_new_producer.__name__}")
    with pytest.raises(Unexpected, match="frozen has appended"):
        broken.play(Round(Point.IN_APPEND, freeze=True))


# --- what the campaign itself does ------------------------------------------------------------


def copy(topics: Topics, change: Callable[[list[Any]], list[Any]] = list) -> None:
    """Copy the input to the output, as a query would; `change` has the events of each partition in its hands."""
    with topics.open() as store:
        there = topic_named(store, OUTPUT)
        for number, partition in enumerate(topic_named(store, INPUT).partitions):
            read = [event.to_event() for page in pages(store, partition, 0) for batch in page for event in batch]
            events = Batch.from_events(change(read) if number == 1 else read)
            producer = lasting_producer()
            for lane, part in events.divide(events.partitions(there.settings.partitions, keyless=0)):
                append(store, Partition(there.log_id, lane), Part(part, a_run(part, producer)))


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (list, None),
        (lambda events: events[:-1], "lost: event "),
        (lambda events: [*events, events[-1]], "there more than once: event "),
        (lambda events: [*events, Event(headers={"number": b"-1"})], "nobody has sent: event -1"),
        (lambda events: [*events[:-1], replace(events[-1], subject="another")], "not as it was sent: event "),
        (lambda events: events[::-1], "out of order: key-"),
    ],
)
def test_what_differs_is_told(change: Callable[[list[Any]], list[Any]], found: str | None) -> None:
    with quick_directory() as directory:
        topics = Topics(Path(directory), random.Random(1))
        topics.publish(200)
        copy(topics, change)
        told = list(topics.compare(complete=True))
        assert found in "\n".join(told) if found else not told
        assert not list(topics.verify())


def test_what_is_only_on_its_way_is_no_complaint_before_the_end() -> None:
    with quick_directory() as directory:
        topics = Topics(Path(directory), random.Random(1))
        topics.publish(50)
        assert not list(topics.compare(complete=False))
        assert list(topics.compare(complete=True))


def test_the_guard_ends_who_is_frozen_when_the_campaign_is_gone() -> None:
    guard = Guard()
    with subprocess.Popen(
        [sys.executable, "-c", "print(flush=True); import threading; threading.Event().wait()"],
        stdout=subprocess.PIPE,
        start_new_session=True,
    ) as frozen:
        assert frozen.stdout is not None
        frozen.stdout.readline()
        guard.note("+", frozen.pid)
        os.kill(frozen.pid, signal.SIGSTOP)
        guard.end()
        assert frozen.wait(30) == -signal.SIGKILL
