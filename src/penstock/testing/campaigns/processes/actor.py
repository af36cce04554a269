"""What a process that may be killed does with a store: each call is told of before and after.

`survey` is a program of its own: it looks at everything in a store, sends again what is unknown, and goes on writing.
"""

from __future__ import annotations

import itertools
import logging
import re
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from penstock import columns
from penstock.batch import Batch
from penstock.errors import PenstockError, TopicDeleted, Trimmed, WriterStalled, WritingStopped
from penstock.offsets import Gap, Range
from penstock.producers import Run
from penstock.rows import Commit, Cursor, Fence, Partition, Shard, Subscription, TopicInfo, TopicSettings
from penstock.settings import FileSettings
from penstock.stores.file.platform import Platform
from penstock.stores.file.store import FileStore
from penstock.stores.file.verify import verify
from penstock.testing.campaigns.processes.reports import (
    SUBSCRIPTION,
    Answered,
    Asked,
    Bounds,
    Call,
    Create,
    Delete,
    Hole,
    Logged,
    Progress,
    Publish,
    Seen,
    Settle,
    Subscribe,
    Topics,
    Trim,
    Unreadable,
    Verified,
    lasting_id,
    now,
    payloads_of,
)
from penstock.testing.journal import Outcome

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Sequence
    from multiprocessing.connection import Connection

PAGE_BYTES: Final = 1 << 20
TEXT_MAX: Final = 500
_NAMES: Final = re.compile(r"^((\w+ )?%\w:? )+")
"""What the format of a log record begins with: which partition, which file."""


class Reporter:
    """Tells the campaign; safe for several threads. If it is `in_step`, it waits for a word after each call."""

    def __init__(self, connection: Connection[Any, Any], *, in_step: bool = False) -> None:
        self._connection = connection
        self._in_step = in_step
        self._lock = threading.Lock()
        self._numbers = itertools.count()

    def tell(self, message: object) -> None:
        """Send a message."""
        with self._lock:
            self._connection.send(message)

    def call(self, call: Call, work: Callable[[], int | str | None]) -> Answered:
        """Do some work and tell of it; returns what was told."""
        with self._lock:
            number = next(self._numbers)
            self._connection.send(Asked(number, now(), call))
        try:
            value = work()
        except Exception as error:  # noqa: BLE001 - the campaign judges it
            answer = _failed(number, error)
        else:
            answer = Answered(number, now(), Outcome.OK, value)
        with self._lock:
            self._connection.send(answer)
            if self._in_step:
                self._connection.recv()
        return answer


def _failed(number: int, error: Exception) -> Answered:
    # Of what could not be mended after a failed sync the store itself says that it may appear after a crash.
    is_known = isinstance(error, PenstockError) and not isinstance(error, WritingStopped)
    return Answered(
        number,
        now(),
        Outcome.FAILED if is_known else Outcome.UNKNOWN,
        error=type(error).__name__,
        text=str(error)[:TEXT_MAX],
        clear=isinstance(error, PenstockError | OSError),
        pid=error.pid if isinstance(error, WriterStalled) else None,
    )


class _Telling(logging.Handler):
    """Tells the campaign what the store logs."""

    def __init__(self, reporter: Reporter) -> None:
        super().__init__(logging.WARNING)
        self._reporter = reporter

    def emit(self, record: logging.LogRecord) -> None:
        kind = re.split(r"[;:(]", _NAMES.sub("", record.msg))[0].strip()
        self._reporter.tell(Logged(record.levelno >= logging.ERROR, kind, record.getMessage()[:TEXT_MAX]))


def tell_what_is_logged(reporter: Reporter) -> None:
    """Send warnings and errors of the store to the campaign, and nowhere else."""
    logger = logging.getLogger("penstock")
    logger.addHandler(_Telling(reporter))
    logger.propagate = False


class Actor:
    """Uses a store, and tells of it. One per thread."""

    def __init__(self, store: FileStore, reporter: Reporter) -> None:
        self.store = store
        self.reporter = reporter

    # --- writing --------------------------------------------------------------------------------

    def publish(self, call: Publish, producer: bytes) -> Answered:
        """Append events."""
        partition = Partition(call.log, call.partition)
        batch = Batch.build(payloads_of(call.source, call.first, call.length))
        run = Run(producer, 0, call.first, call.length, columns.digest(batch.columns))

        def work() -> int:
            [answer] = self.store.log.append(partition, batch, [run])
            if answer.refused is not None:
                raise answer.refused
            assert answer.offsets is not None  # only the last publish of a producer is ever repeated
            return answer.offsets.start

        return self.reporter.call(call, work)

    def repeat(self, calls: Sequence[Publish]) -> None:
        """Send again what lasting producers have sent before; for as long as somebody else does not move."""
        for call in calls:
            while self.publish(call, lasting_id(call.source)).error == WriterStalled.__name__:
                pass

    def settle(self, partition: Partition, position: int, fence: Fence | None = None) -> Answered:
        """Commit the cursor of a partition."""
        shard = Shard(partition.log_id, SUBSCRIPTION, 0, partition.number)
        commit = Commit(cursors=(Cursor(shard=shard, next_offset=position),), fences=() if fence is None else (fence,))

        def work() -> None:
            [refusal] = self.store.cursors.commit([commit])
            if refusal is not None:
                raise refusal

        lease, epoch = fence or ("", 0)
        return self.reporter.call(Settle(*partition, position, lease, epoch), work)

    def trim(self, partition: Partition, before: int, *, force: bool) -> Answered:
        """Remove what is below an offset."""

        def work() -> int:
            return self.store.log.trim(partition, before, force=force)

        return self.reporter.call(Trim(*partition, before), work)

    # --- topics ---------------------------------------------------------------------------------

    def create(self, name: str, settings: TopicSettings) -> None:
        """Create a topic, and its subscription."""
        answer = self.reporter.call(Create(name), lambda: self.store.log.create_topic(name, settings).log_id)
        if isinstance(log := answer.value, str):
            self.subscribe(log, settings.partitions)

    def subscribe(self, log: str, partitions: int) -> None:
        """Create the subscription of a log."""

        def work() -> None:
            shards = [Shard(log, SUBSCRIPTION, 0, partition) for partition in range(partitions)]
            cursors = [Cursor(shard=shard, next_offset=0) for shard in shards]
            self.store.cursors.put_subscription(Subscription(log_id=log, name=SUBSCRIPTION, mode="key_shared"), cursors)

        self.reporter.call(Subscribe(log, partitions), work)

    def has_subscription(self, topic: TopicInfo) -> bool:
        """Say whether a log has its subscription."""
        return bool(self.store.cursors.subscriptions(topic.log_id))

    def delete(self, log: str) -> None:
        """Delete a topic."""

        def work() -> None:
            self.store.log.delete_topic(log)

        self.reporter.call(Delete(log), work)

    # --- looking --------------------------------------------------------------------------------

    def look(self, partition: Partition, start: int, events_max: int) -> int:
        """Read some events from an offset on; returns the offset after them."""
        for item in self.store.log.read(partition, start, bytes_max=PAGE_BYTES, events_max=events_max):
            if isinstance(item, Gap):
                self.reporter.tell(Hole(*partition, item.start, item.stop))
            else:
                self.reporter.tell(Seen(*partition, item.start, item.columns.column("data").to_pylist()))
            start = item.range.stop
        return start

    def look_around(self, partition: Partition, chance: random.Random, events_max: int) -> None:
        """Read some events somewhere, which another thread or process may be removing."""
        bounds = self.bounds(partition)
        if bounds is not None:
            try:
                self.look(partition, chance.randint(bounds.start, bounds.stop), events_max)
            except (PenstockError, OSError) as error:
                self._tell_of(error, partition)

    def bounds(self, partition: Partition) -> Range | None:
        """Return the bounds of a partition, if it can be read."""
        try:
            return self.store.log.bounds(partition)
        except (PenstockError, OSError) as error:
            self._tell_of(error, partition)
            return None

    def _tell_of(self, error: Exception, partition: Partition) -> None:
        """Tell why something could not be read, unless it was removed meanwhile."""
        if not isinstance(error, Trimmed | TopicDeleted):
            self.reporter.tell(Unreadable(*partition, f"{type(error).__name__}: {error}"[:TEXT_MAX]))

    def look_at_all(self) -> None:
        """Tell what is in the store: all topics, all events, all cursors."""
        topics = self.store.log.topics()
        subscribed = {topic.log_id for topic in topics if self.has_subscription(topic)}
        self.reporter.tell(Topics({topic.log_id for topic in topics}, subscribed))
        for topic in topics:
            for partition in topic.partitions:
                bounds = self.store.log.bounds(partition)
                self.reporter.tell(Bounds(*partition, bounds.start, bounds.stop))
                start = bounds.start
                while start < bounds.stop:
                    start = self.look(partition, start, 1000)
            self._tell_cursors(topic)

    def _tell_cursors(self, topic: TopicInfo) -> None:
        for cursor in self.store.cursors.load(topic.log_id, SUBSCRIPTION):
            partition = Partition(topic.log_id, cursor.shard.partition)
            self.reporter.tell(Progress(*partition, cursor.next_offset, self.store.log.bounds(partition).stop))


# --- the survey -------------------------------------------------------------------------------


def survey(
    connection: Connection[Any, Any],
    *,
    root: str,
    settings: FileSettings,
    boot_id: bytes | None,
    repeats: Sequence[Publish],
    source: str,
    first: int,
) -> None:
    """Look at everything, see that the store is whole, send again what is unknown, write something new, look again.

    With a `boot_id` the machine was started anew. Without a `source` nothing is written.
    """
    reporter = Reporter(connection)
    tell_what_is_logged(reporter)
    platform = Platform() if boot_id is None else Platform(boot_id=boot_id)
    store = FileStore(Path(root), settings=settings, platform=platform)
    actor = Actor(store, reporter)
    actor.look_at_all()
    _verify(reporter, Path(root), platform)
    if source:
        actor.repeat(repeats)
        for topic in store.log.topics():
            for partition in topic.partitions:
                actor.publish(Publish(*partition, source, first, 2, lasting=True), lasting_id(source))
                first += 2
        actor.look_at_all()
        _verify(reporter, Path(root), platform)
    store.close()


def _verify(reporter: Reporter, root: Path, platform: Platform) -> None:
    found = verify(root, platform)
    reporter.tell(Verified([*found.state, *(str(damage.error()) for damage in found.damages)]))
