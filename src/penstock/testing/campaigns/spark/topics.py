"""The two topics of a query, as the campaign sees them: what it put into one, and what must be in the other."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from uuid import UUID

from penstock.batch import Batch
from penstock.rows import Partition, TopicSettings
from penstock.runtime.staging import PREFIX
from penstock.settings import FileSettings
from penstock.stores.file.platform import Platform
from penstock.stores.file.store import FileStore
from penstock.stores.file.verify import verify
from penstock.testing.campaigns.spark.driver import INPUT, OUTPUT
from penstock.testing.conformance.builders import Part, a_run, append, pages

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from penstock.batch import StoredEvent
    from penstock.ports import Store
    from penstock.rows import TopicInfo

PARTITIONS: Final = {INPUT: 4, OUTPUT: 3}
KEYS: Final = 24
KEYLESS_SHARE: Final = 0.1
LARGE_SHARE: Final = 0.02
LARGE_BYTES: Final = 100_000
SEGMENT_BYTES: Final = 1 << 20
ALLOCATE_BYTES: Final = 128 << 10
COMPLAINTS_MAX: Final = 5
"""Of one kind; more of them say nothing more."""
_NUMBER: Final = "number"
_BEGINNING: Final = datetime(2026, 1, 1, tzinfo=UTC)
_FIELDS: Final = ("id", "source", "type", "subject", "time", "expires_at", "key", "content_type", "data")


class Seen(NamedTuple):
    """One event, as it was read."""

    id: str
    """Its number, which the campaign knows it by; it is in a header."""
    key: bytes | None
    content: tuple[Any, ...]


class Topics:
    """A store with the two topics."""

    def __init__(self, directory: Path, chance: random.Random) -> None:
        self.root = directory / "data"
        self.url = f"file:{self.root}"
        self._settings = FileSettings(
            segment_bytes=SEGMENT_BYTES, allocate_bytes=ALLOCATE_BYTES, runtime_directory=str(directory)
        )
        self._chance = chance
        self._producer = UUID(int=chance.getrandbits(128)).bytes
        self._published = 0
        self._sequences: defaultdict[int, int] = defaultdict(int)
        with self.open() as store:
            for name, partitions in PARTITIONS.items():
                store.log.create_topic(name, TopicSettings(partitions=partitions))

    @property
    def environment(self) -> dict[str, str]:
        """How a driver gets the same settings."""
        return {
            "PENSTOCK_FILE__SEGMENT_BYTES": str(SEGMENT_BYTES),
            "PENSTOCK_FILE__ALLOCATE_BYTES": str(ALLOCATE_BYTES),
            "PENSTOCK_FILE__RUNTIME_DIRECTORY": self._settings.runtime_directory,
        }

    def open(self) -> Opened:
        """Open the store, for the time of a block."""
        return Opened(FileStore(self.root, settings=self._settings))

    def publish(self, count: int) -> None:
        """Put so many events more into the input."""
        batch = self._events(count)
        with self.open() as store:
            topic = topic_named(store, INPUT)
            lanes = batch.partitions(PARTITIONS[INPUT], keyless=self._chance.randrange(PARTITIONS[INPUT]))
            for number, part in batch.divide(lanes):
                run = a_run(part, self._producer, self._sequences[number])
                self._sequences[number] += len(part)
                [answer] = append(store, Partition(topic.log_id, number), Part(part, run))
                assert answer.offsets is not None, answer

    def _events(self, count: int) -> Batch:
        chance, first = self._chance, self._published
        self._published += count
        numbers = range(first, first + count)
        large = [chance.random() < LARGE_SHARE for _ in numbers]
        return Batch.build(
            [chance.randbytes(LARGE_BYTES if is_large else chance.randrange(200)) for is_large in large],
            key=[None if chance.random() < KEYLESS_SHARE else b"key-%d" % chance.randrange(KEYS) for _ in numbers],
            id=[None if number % 7 == 0 else f"event-{number}" for number in numbers],
            type=[chance.choice([None, "order.placed", "order.paid"]) for _ in numbers],
            subject=[chance.choice([None, f"subject {number}"]) for number in numbers],
            time=[_BEGINNING + timedelta(microseconds=chance.randrange(10**14)) for _ in numbers],
            expires_at=[chance.choice([None, _BEGINNING + timedelta(days=36500)]) for _ in numbers],
            content_type=[chance.choice([None, "application/json"]) for _ in numbers],
            headers=[{_NUMBER: b"%d" % number, "bytes": chance.randbytes(4)} for number in numbers],
        )

    # --- looking --------------------------------------------------------------------------------

    def ends(self, name: str) -> list[int]:
        """Return how far the partitions of a topic go."""
        with self.open() as store:
            return [store.log.bounds(partition).stop for partition in topic_named(store, name).partitions]

    def compare(self, *, complete: bool) -> Iterator[str]:
        """Say what the output has that it should not have; and if the query has ended, what it should have."""
        with self.open() as store:
            sent = list(_read(store, topic_named(store, INPUT)))
            came = list(_read(store, topic_named(store, OUTPUT)))
        known = {event.id: event for _, event in sent}
        assert len(known) == len(sent), "ids are unique"
        counted = Counter(event.id for _, event in came)
        yield from _shown("nobody has sent", [f"{event.id} in {at}" for at, event in came if event.id not in known])
        yield from _shown(
            "there more than once", [f"{id_} {count} times" for id_, count in counted.items() if count > 1]
        )
        changed = [f"{event.id} in {at}" for at, event in came if known.get(event.id, event) != event]
        yield from _shown("not as it was sent", changed)
        if complete:
            yield from _shown("lost", [f"{event.id} of {at}" for at, event in sent if event.id not in counted])
        yield from _shown("out of order", list(_out_of_order([event for _, event in sent], came)))

    def staged(self) -> int:
        """Return how many events are in staging logs."""
        with self.open() as store:
            staging = [topic for topic in store.log.topics() if topic.name.startswith(PREFIX)]
            bounds = [store.log.bounds(lane) for topic in staging for lane in topic.partitions]
            return sum(bound.stop - bound.start for bound in bounds)

    def unfinished(self) -> int:
        """Return how many manifests are not done."""
        with self.open() as store:
            return len(store.manifests.unfinished())

    def verify(self) -> Iterator[str]:
        """Say what is damaged."""
        report = verify(self.root, Platform())
        yield from (f"damage: {damage}" for damage in [*report.damages, *report.state])


class Opened:
    """A store that is closed at the end of a block."""

    def __init__(self, store: FileStore) -> None:
        self._store = store

    def __enter__(self) -> Store:
        return self._store

    def __exit__(self, *_: object) -> None:
        self._store.close()


def topic_named(store: Store, name: str) -> TopicInfo:
    """Return a topic that is there."""
    [topic] = [topic for topic in store.log.topics() if topic.name == name]
    return topic


def _read(store: Store, topic: TopicInfo) -> Iterator[tuple[str, Seen]]:
    """Yield every event, and where it is."""
    for partition in topic.partitions:
        start = store.log.bounds(partition).start
        for page in pages(store, partition, start):
            for batch in page:
                for event in batch:
                    yield f"{topic.name}/{partition.number} at {event.offset}", _seen(event)


def _seen(event: StoredEvent) -> Seen:
    content = (*(getattr(event, name) for name in _FIELDS), dict(event.headers))
    return Seen(f"event {event.headers[_NUMBER].decode()}", event.key, content)


def _out_of_order(sent: list[Seen], came: list[tuple[str, Seen]]) -> Iterator[str]:
    """Yield the keys whose events are not, from the first on, those that were sent, in one partition."""
    by_key: defaultdict[bytes, list[tuple[str, str]]] = defaultdict(list)
    for at, event in came:
        if event.key is not None:
            by_key[event.key].append((at.partition(" ")[0], event.id))
    for key, events in by_key.items():
        expected = [event.id for event in sent if event.key == key]
        ids = [id_ for _, id_ in events]
        places = sorted({at for at, _ in events})
        if ids != expected[: len(ids)] or len(places) > 1:
            differ = (number for number, pair in enumerate(zip(ids, expected, strict=False)) if pair[0] != pair[1])
            yield f"{key.decode()}: from its event {next(differ, 0)} of {len(ids)} on, in {', '.join(places)}"


def _shown(what: str, found: list[str]) -> Iterator[str]:
    if found:
        more = f" and {len(found) - COMPLAINTS_MAX:,} more" if len(found) > COMPLAINTS_MAX else ""
        yield f"{what}: {'; '.join(found[:COMPLAINTS_MAX])}{more}"
