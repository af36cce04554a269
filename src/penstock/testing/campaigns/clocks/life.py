"""The life of a store whose clock jumps, and a model that knows what must come of each step.

The model knows three times: the wall clock of the store, its boot clock, and how long everything really took.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.batch import Batch
from penstock.clock import VirtualClock
from penstock.errors import ProducerExpired, StoreError
from penstock.offsets import Range
from penstock.rows import Retention, Scheduled, Subscription, TopicSettings
from penstock.settings import FileSettings
from penstock.stores.file.platform import Platform
from penstock.stores.file.retention import DRIFT_SECONDS_MAX
from penstock.stores.file.store import FileStore
from penstock.testing.conformance.builders import PLENTY, PRODUCER, a_cursor, a_part, a_shard, an_event, append, commit
from penstock.testing.machine.plain import HastyDisk

if TYPE_CHECKING:
    import random
    from collections.abc import Callable
    from pathlib import Path

    from penstock.rows import Lease
    from penstock.testing.campaigns.campaign import Report
    from penstock.testing.conformance.builders import Part

HOUR, DAY, YEAR = 3600.0, 86_400.0, 365 * 86_400.0
AGE_SECONDS: Final = DAY
EARLIEST_US, LATEST_US = 631_152_000_000_000, 4_102_444_800_000_000  # the years 1990 and 2100
JUMPS: Final = (1.0, HOUR / 2, 2 * HOUR, DAY, 40 * DAY, YEAR, 20 * YEAR)
PASSES: Final = (0.000_001, 1.0, 60.0, HOUR, DAY / 2, 2 * DAY)
LEASE, SCHEDULER, SUBSCRIPTION = "lease", "scheduler", "billing"
ALARM: Final = "disagree"
EARLY: Final = "events removed before their time, which were appended while the clock was wrong"


class Wrong(Exception):
    """A promise did not hold."""


def expect(true: bool, what: str) -> None:  # noqa: FBT001 - as with `assert`, there is nothing to name
    """Raise `Wrong` unless something holds."""
    if not true:
        raise Wrong(what)


class Stored(NamedTuple):
    """An event, as the model knows it."""

    payload: bytes
    appended_at: int
    """By the wall clock."""
    lived: float
    """By the time that really passed."""
    opening: int
    """Counts openings of the store."""
    drift: float
    """By how much the wall clock was wrong then, as that opening could know."""


class Listener(logging.Handler):
    """Keeps what the store says to the log of the program."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a message."""
        self.said.append(record.getMessage())


class Life:
    """One store, step by step."""

    def __init__(self, root: Path, report: Report, chance: random.Random, listener: Listener, steps: list[str]) -> None:
        """Begin; the names of all steps are put into `steps`."""
        self._root = root
        self._report = report
        self._chance = chance
        self._listener = listener
        self._steps = steps
        self._clock = VirtualClock()
        self._lived = 0.0
        self._boots = self._openings = 0
        self._events: list[Stored] = []
        self._parts: list[tuple[Part, Range]] = []
        self._first = self._latest = self._passed = 0
        self._epoch = 0
        self._lease: Lease | None = None
        self._due: dict[str, int] = {}
        self._claimed: dict[str, tuple[bytes, int | None]] = {}
        self._open()
        self._topic = self._store.log.create_topic(
            "orders", TopicSettings(retention=Retention(age_seconds=AGE_SECONDS))
        )
        self._partition = self._topic.partitions[0]
        subscription = Subscription(log_id=self._topic.log_id, name=SUBSCRIPTION, mode="key_shared", protect=False)
        self._store.cursors.put_subscription(subscription)

    def _open(self) -> None:
        settings = FileSettings(
            segment_bytes=2_500, allocate_bytes=1_024, marker_seconds=HOUR, runtime_directory=str(self._root.parent)
        )
        platform = Platform(
            disk=HastyDisk(),
            clock=self._clock,
            boot_id=self._boots.to_bytes(16, "big"),
            random=self._chance.randbytes,
        )
        self._store = FileStore(self._root, settings=settings, platform=platform)
        self._openings += 1
        self._difference = self._clock.time_us() / 1e6 - self._clock.monotonic()

    def close(self) -> None:
        """End it."""
        self._store.close()

    def step(self) -> None:
        """Do something, and see that all promises hold."""
        steps: dict[Callable[[], None], int] = {
            self._jump: 8, self._set_right: 4, self._pass: 5, self._reopen: 1,
            self._append: 10, self._append_of_process: 3, self._repeat: 3, self._retain: 5, self._seek: 5,
            self._commit: 3, self._acquire: 4, self._schedule: 4,
        }  # fmt: skip
        [step] = self._chance.choices(list(steps), list(steps.values()))
        name = step.__name__.strip("_").replace("_", " ")
        self._report.count(name)
        self._steps.append(name)
        step()
        self._check_lease()
        self._check_tail()

    # --- time -----------------------------------------------------------------------------------

    @property
    def _drift(self) -> float:
        return self._clock.time_us() / 1e6 - self._clock.monotonic() - self._difference

    def _jump(self) -> None:
        """Set the wall clock forward or back."""
        by = self._chance.choice(JUMPS) * self._chance.choice((1, -1))
        if EARLIEST_US < self._clock.time_us() + by * 1e6 < LATEST_US:
            self._clock.jump_wall(by)

    def _set_right(self) -> None:
        """Set the wall clock to what it would be without all jumps since the store was opened."""
        self._clock.jump_wall(-self._drift)

    def _pass(self) -> None:
        """Let time pass on both clocks; when it is not called, they stand still."""
        by = self._chance.choice(PASSES)
        self._clock.advance(by)
        self._lived += by

    # --- the log --------------------------------------------------------------------------------

    def _append(self) -> None:
        first = len(self._events)
        self._store_part(a_part(*self._payloads(first), producer=PRODUCER, first=first), refusable=False)

    def _append_of_process(self) -> None:
        born = (self._clock.time_us() // 1000).to_bytes(6, "big")
        producer = born + b"\x70" + self._chance.randbytes(9)
        self._store_part(a_part(*self._payloads(len(self._events)), producer=producer), refusable=True)

    def _payloads(self, first: int) -> list[bytes]:
        return [b"%d" % (first + index) * 20 for index in range(self._chance.randint(1, 3))]

    def _store_part(self, part: Part, *, refusable: bool) -> None:
        end = len(self._events)
        [answer] = append(self._store, self._partition, part)
        if refusable and isinstance(answer.refused, ProducerExpired):
            return  # the clock was ahead once, and nobody can tell how old this producer is
        stored = Range(end, end + len(part.batch))
        expect(answer == (stored, False, None), f"events got {answer} at the end of a log of {end}")
        now = self._clock.time_us()
        for payload in part.batch.columns.column("data").to_pylist():
            self._events.append(Stored(payload, now, self._lived, self._openings, self._drift))
        self._parts.append((part, stored))
        self._latest = max(self._latest, now)

    def _repeat(self) -> None:
        """Append again what is stored: it is never news, whatever the clock says."""
        if not self._parts:
            return
        part, offsets = self._chance.choice(self._parts)
        [answer] = append(self._store, self._partition, part)
        lasting = part.run.producer == PRODUCER
        known = answer.duplicate and answer.offsets in {None, offsets}
        expect(known or (not lasting and answer.refused is not None), f"a repeat of {offsets} was answered {answer}")
        expect(self._store.log.bounds(self._partition).stop == len(self._events), "a repeat was stored")

    def _seek(self) -> None:
        """Look for a time: nothing is missed, and nothing before it is returned."""
        times = [stored.appended_at for stored in self._events] or [self._clock.time_us()]
        time_us = self._chance.choice(times) + self._chance.choice((-1, 0, 1, round(DAY * 1e6), -round(DAY * 1e6)))
        found = self._store.log.find_time(self._partition, time_us)
        reached = [at for at in range(self._first, len(self._events)) if self._events[at].appended_at >= time_us]
        expected = reached[0] if reached else len(self._events)
        # What retention has removed may have had that time, too; then the beginning is the answer.
        removed = self._first > 0 and any(stored.appended_at >= time_us for stored in self._events[: self._first])
        expect(found == expected or (removed and found == self._first), f"{time_us} is at {found}, not {expected}")

    def _check_tail(self) -> None:
        log = self._store.log
        tail = log.tail(log.handle(self._partition))
        expect(tail.max_time >= self._latest, f"the latest append time went back to {tail.max_time}")
        expect((tail.first, tail.end) == (self._first, len(self._events)), f"the log has other ends: {tail}")

    def _check_log(self) -> None:
        start = self._first
        while start < len(self._events):
            for item in self._store.log.read(self._partition, start, bytes_max=PLENTY):
                expect(isinstance(item, Batch), f"nothing was lost, and there is {item}")
                assert isinstance(item, Batch)
                assert item.place is not None
                found = [(data, item.place.appended_at) for data in item.columns.column("data").to_pylist()]
                wanted = [stored[:2] for stored in self._events[item.start : item.range.stop]]
                expect(found == wanted and item.start == start, f"offset {start} holds {found}, not {wanted}")
                start = item.range.stop

    def _reopen(self) -> None:
        """Close, perhaps start the machine anew, perhaps set its clock meanwhile, and open."""
        self._store.close()
        if self._chance.random() < 0.5:
            self._boots += 1
            self._clock = VirtualClock(self._clock.time_us())
        if self._chance.random() < 0.5:
            self._jump()
        self._lease = None  # of a process that is gone
        self._open()
        self._check_log()

    # --- retention ------------------------------------------------------------------------------

    def _retain(self) -> None:
        """Let retention remove what is old: by the wall clock, and only if the boot clock agrees."""
        drift, now = self._drift, self._clock.time_us()
        self._listener.said.clear()
        self._store.log.retain()
        first = self._store.log.bounds(self._partition).start
        alarmed = any(ALARM in said for said in self._listener.said)
        expect(alarmed == (abs(drift) > DRIFT_SECONDS_MAX), f"the clocks disagree by {drift} s, alarm: {alarmed}")
        if alarmed:
            self._report.count("retention paused")
            expect(first == self._first, f"the clocks disagree by {drift} s, and {self._first} to {first} were removed")
        elif now - self._latest > AGE_SECONDS * 1e6:
            expect(first == len(self._events), f"everything is too old, and {first} is still there")
        for stored in self._events[self._first : first]:
            self._check_removed(stored, now)
        self._report.count("events removed by age", first - self._first)
        self._first = first

    def _check_removed(self, stored: Stored, now: int) -> None:
        expect(now - stored.appended_at > AGE_SECONDS * 1e6, f"{stored} was removed at {now}")
        if stored.opening != self._openings:
            return  # another opening may have believed another clock
        early = self._lived - stored.lived < AGE_SECONDS - 2 * DRIFT_SECONDS_MAX
        if early and abs(stored.drift) > DRIFT_SECONDS_MAX:
            self._report.count(EARLY)
        else:
            expect(not early, f"{stored} was removed after {self._lived - stored.lived} s")

    # --- the small state ------------------------------------------------------------------------

    def _commit(self) -> None:
        self._passed = self._chance.randint(self._passed, len(self._events))
        refused: StoreError | None = commit(self._store, a_cursor(a_shard(self._topic), self._passed))
        expect(refused is None, f"a cursor at {self._passed} was refused: {refused}")
        [cursor] = self._store.cursors.load(self._topic.log_id, SUBSCRIPTION)
        expect(cursor.next_offset == self._passed, f"the cursor is {cursor}, not at {self._passed}")

    def _acquire(self) -> None:
        """Take a lease, or try to; only the boot clock says whether somebody else has it."""
        owner = self._chance.choice("ab")
        held = self._lease is not None and self._lease.expires_at > self._clock.monotonic()
        free = not held or (self._lease is not None and self._lease.owner == owner)
        lease = self._store.leases.acquire(LEASE, owner, self._chance.choice(PASSES))
        expect((lease is not None) == free, f"{self._lease} is held: {held}; {owner} got {lease}")
        if lease is not None:
            expect(lease.epoch > self._epoch, f"{lease} follows epoch {self._epoch}")
            self._epoch, self._lease = lease.epoch, lease

    def _check_lease(self) -> None:
        if self._lease is None:
            return
        held = self._lease.expires_at > self._clock.monotonic()
        holder = self._store.leases.holder(LEASE)
        expect(holder == (self._lease if held else None), f"{self._lease} is held: {held}; the holder is {holder}")

    def _schedule(self) -> None:
        """Add a row, and claim what is due by the wall clock."""
        now, id_ = self._clock.time_us(), f"{len(self._due) + len(self._claimed)}-{self._chance.random()}"
        due_at = now + round(self._chance.choice((*PASSES, *JUMPS)) * self._chance.choice((1, -1)) * 1e6)
        row = Scheduled(id=id_, log_id=self._topic.log_id, partition=0, due_at=due_at, event=an_event())
        self._store.schedule.add([row])
        self._due[id_] = due_at
        lease = self._store.leases.acquire(SCHEDULER, "a", HOUR)
        expect(lease is not None and lease.epoch > self._epoch, f"{lease} follows epoch {self._epoch}")
        assert lease is not None
        self._epoch = lease.epoch
        expect(self._store.schedule.next_due() == min(self._due.values()), "another row is due first")
        claimed = self._store.schedule.claim(now, 100, lease.fence)
        expected = sorted((due, name) for name, due in self._due.items() if due <= now)
        expect([(row.due_at, row.id) for row in claimed] == expected, f"claimed {claimed}, due are {expected}")
        for row in claimed:
            given = (row.producer, row.sequence)
            expect(self._claimed.setdefault(row.id, given) == given, f"{row} was claimed with other numbers before")
        finished = [row.id for row in claimed if self._chance.random() < 0.5]
        self._store.schedule.done(finished, lease.fence)
        for name in finished:
            del self._due[name], self._claimed[name]
