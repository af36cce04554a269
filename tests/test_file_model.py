"""One partition of the file store against a Python list, in whatever order of steps."""

from __future__ import annotations

import os
import shutil
import tempfile
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.file_children import ScriptedDisk, producer_of

from penstock.batch import Batch
from penstock.clock import VirtualClock
from penstock.errors import BeyondEnd, ProducerConflict, TopicDeleted, Trimmed
from penstock.offsets import Range
from penstock.producers import PRODUCER_RUNS_KEPT
from penstock.rows import Partition, TopicSettings
from penstock.settings import FileSettings
from penstock.stores.file.platform import Platform
from penstock.stores.file.store import FileStore
from penstock.testing.conformance.builders import PLENTY, Part, a_part, append, error_of

BOOTS = [bytes([number]) * 16 for number in range(1, 4)]
PRODUCERS = [1, 2, 3]
SIZES = st.sampled_from([0, 1, 60, 700, 3000])
SETTINGS = {"segment_bytes": 4000, "allocate_bytes": 2048, "marker_seconds": 3600.0}


class Stored(NamedTuple):
    """An event that must be in the log."""

    data: bytes
    time_us: int


class Sent(NamedTuple):
    """A run that was stored, and where."""

    part: Part
    offsets: Range


class LogMachine(RuleBasedStateMachine):
    """The log as a list of events, of which the first are trimmed, and a list of the runs that made them."""

    def __init__(self) -> None:
        super().__init__()
        self.base = Path(tempfile.mkdtemp(prefix="penstock-", dir="/tmp"))
        self.directories = count()
        self.clock = VirtualClock()
        self.boot = BOOTS[0]
        self.root = self.base / "data"
        self.store = self._open()
        self.partition = self._create()
        self.events: list[Stored] = []
        self.first = 0
        self.sent: list[Sent] = []
        self.sequences = dict.fromkeys(PRODUCERS, 0)
        self.payloads = count()

    def teardown(self) -> None:
        self.store.close()
        shutil.rmtree(self.base)

    def _open(self) -> FileStore:
        options: dict[str, Any] = {**SETTINGS, "runtime_directory": str(self.base)}
        platform = Platform(disk=ScriptedDisk(syncs=False), clock=self.clock, boot_id=self.boot)
        return FileStore(self.root, settings=FileSettings(**options), platform=platform)

    def _create(self) -> Partition:
        return self.store.log.create_topic("orders", TopicSettings()).partitions[0]

    # --- publishing -----------------------------------------------------------------------------

    def _news(self, producer: int, sizes: list[int], skip: int) -> Part:
        first = self.sequences[producer] + skip
        self.sequences[producer] = first + len(sizes)
        data = [b"%d." % next(self.payloads) + bytes([size % 251]) * size for size in sizes]
        return a_part(*data, producer=producer_of(producer), first=first)

    def _stored(self, part: Part) -> Range:
        offsets = Range(len(self.events), len(self.events) + len(part.batch))
        self.events += [Stored(event.data, self.clock.time_us()) for event in part.batch]
        self.sent.append(Sent(part, offsets))
        return offsets

    def _is_remembered(self, sent: Sent) -> bool:
        of_same = [other for other in self.sent if other.part.run.producer == sent.part.run.producer]
        return sent in of_same[-PRODUCER_RUNS_KEPT:]

    runs = st.lists(
        st.tuples(st.sampled_from(PRODUCERS), st.lists(SIZES, min_size=1, max_size=4), st.sampled_from([0, 0, 0, 2])),
        min_size=1,
        max_size=4,
    )

    @initialize(runs=runs)
    def begin(self, runs: list[tuple[int, list[int], int]]) -> None:
        assert self.store.log.bounds(self.partition) == Range(0, 0)
        self.publish(runs)

    @rule(sizes=st.lists(SIZES, min_size=2, max_size=6), producer=st.sampled_from(PRODUCERS))
    def publish_one_by_one(self, sizes: list[int], producer: int) -> None:
        for size in sizes:
            self.publish([(producer, [size], 0)])
            self.clock.advance(0.01)

    @rule(runs=runs)
    def publish(self, runs: list[tuple[int, list[int], int]]) -> None:
        parts = [self._news(*run) for run in runs]
        answers = append(self.store, self.partition, *parts)
        assert [(answer.offsets, answer.duplicate, answer.refused) for answer in answers] == [
            (self._stored(part), False, None) for part in parts
        ]

    @precondition(lambda self: self.sent)
    @rule(chance=st.randoms(use_true_random=False), size=SIZES)
    def publish_repeats_with_news_between(self, chance: Any, size: int) -> None:
        before, after = chance.choice(self.sent), chance.choice(self.sent)
        news = self._news(chance.choice(PRODUCERS), [size], 0)
        answers = append(self.store, self.partition, before.part, news, after.part)
        assert (answers[1].offsets, answers[1].duplicate) == (self._stored(news), False)
        for sent, answer in ((before, answers[0]), (after, answers[2])):
            assert (answer.duplicate, answer.refused) == (True, None)
            if self._is_remembered(sent):
                assert answer.offsets == sent.offsets

    @precondition(lambda self: self.sent)
    @rule(chance=st.randoms(use_true_random=False))
    def publish_other_content_under_a_known_sequence(self, chance: Any) -> None:
        sent = chance.choice(self.sent)
        if not self._is_remembered(sent):
            return
        run = sent.part.run
        data = [b"other"] * (run.length + chance.choice([0, 1]))
        [answer] = append(self.store, self.partition, a_part(*data, producer=run.producer, first=run.first_sequence))
        assert isinstance(answer.refused, ProducerConflict)

    # --- time and space -------------------------------------------------------------------------

    @rule(seconds=st.sampled_from([0.001, 1, 3600]))
    def wait(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @rule()
    def fall_silent(self) -> None:
        self.store.log.mark_idle(0.0)

    @rule(share=st.sampled_from([0.1, 0.3, 0.5, 1]))
    def trim(self, share: float) -> None:
        before = self.first + round((len(self.events) - self.first) * share)
        first = self.store.log.trim(self.partition, before)
        assert self.first <= first <= before
        if before == len(self.events):
            assert first == before
        self.first = first

    # --- opening anew ---------------------------------------------------------------------------

    @rule()
    def reopen(self) -> None:
        self.store.close()
        self.store = self._open()

    @rule()
    def lose_the_tails(self) -> None:
        self.store.close()
        (self.root / "tails").unlink()
        self.store = self._open()

    @rule(booted=st.booleans(), clean=st.booleans())
    def go_on_with_a_copy(self, booted: bool, clean: bool) -> None:
        """Copy the directory as it is, and use the copy from now on: as after a crash, or as a restored backup."""
        if clean:
            self.store.close()
        copy = self.base / f"data-{next(self.directories)}"
        shutil.copytree(self.root, copy)
        if not clean:
            self.store.close()
        shutil.rmtree(self.root)
        self.root = copy
        if booted:
            self.boot = BOOTS[(BOOTS.index(self.boot) + 1) % len(BOOTS)]
        self.store = self._open()

    @precondition(lambda self: len(self.sent) >= 15)
    @rule()
    def delete_and_create_anew(self) -> None:
        old = self.partition
        self.store.log.delete_topic(old.log_id)
        assert error_of(lambda: self.store.log.bounds(old)) is TopicDeleted
        self.partition = self._create()
        assert self.partition != old
        self.events, self.sent, self.first = [], [], 0

    # --- reading --------------------------------------------------------------------------------

    @rule(
        share=st.floats(0, 1),
        bytes_max=st.sampled_from([1, 100, 2000, PLENTY]),
        events_max=st.sampled_from([None, 1, 3]),
    )
    def read(self, share: float, bytes_max: int, events_max: int | None) -> None:
        start = self.first + round((len(self.events) - self.first) * share)
        found = self.store.log.read(self.partition, start, bytes_max=bytes_max, events_max=events_max)
        at, size = start, 0
        for item in found:
            assert isinstance(item, Batch)
            assert item.start == at
            assert item.place is not None
            assert [Stored(event.data, item.place.appended_at) for event in item] == self.events[at : item.range.stop]
            at, size = item.range.stop, size + int(item.sizes.sum())
        assert at > start or start == len(self.events)
        assert events_max is None or at - start <= events_max
        assert size <= bytes_max or at == start + 1
        if events_max is None and at < len(self.events):
            [following] = self.store.log.read(self.partition, at, bytes_max=1)
            assert isinstance(following, Batch)
            assert size + int(following.sizes.sum()) > bytes_max
        if bytes_max == PLENTY and events_max is None:
            assert at == len(self.events)

    @precondition(lambda self: self.first < len(self.events))
    @rule(share=st.floats(0, 0.99), count=st.integers(1, 9))
    def read_as_many_bytes_as_some_events_have(self, share: float, count: int) -> None:
        start = self.first + int((len(self.events) - self.first) * share)
        wanted = self.store.log.read(self.partition, start, bytes_max=PLENTY, events_max=count)
        bytes_max = sum(int(item.sizes.sum()) for item in wanted if isinstance(item, Batch))
        found = self.store.log.read(self.partition, start, bytes_max=bytes_max)
        assert found[-1].range.stop == wanted[-1].range.stop == min(start + count, len(self.events))

    @rule()
    def read_outside(self) -> None:
        log = self.store.log
        assert error_of(lambda: log.read(self.partition, len(self.events) + 1, bytes_max=1)) is BeyondEnd
        assert error_of(lambda: log.trim(self.partition, len(self.events) + 1)) is BeyondEnd
        if self.first:
            assert error_of(lambda: log.read(self.partition, self.first - 1, bytes_max=1)) is Trimmed

    @precondition(lambda self: self.events)
    @rule(share=st.floats(0, 1), shift=st.sampled_from([-1, 0, 1]))
    def find_time(self, share: float, shift: int) -> None:
        times = [event.time_us for event in self.events]
        asked = times[round((len(times) - 1) * share)] + shift
        found = [offset for offset, event in enumerate(self.events) if event.time_us >= asked]
        expected = max(found[0] if found else len(self.events), self.first)
        assert self.store.log.find_time(self.partition, asked) == expected

    @invariant()
    def bounds_are_those_of_the_list(self) -> None:
        bounds = Range(self.first, len(self.events))
        assert self.store.log.bounds(self.partition) == bounds
        assert self.store.log.heads([self.partition]).read().tolist() == [bounds.stop]


examples, steps = (30, 30) if os.environ.get("HYPOTHESIS_PROFILE", "default") == "default" else (1_000, 60)
TestLogAgainstAList = LogMachine.TestCase
TestLogAgainstAList.settings = settings(
    max_examples=examples,
    stateful_step_count=steps,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
