"""The topics of a query, as the driver sees them: which ones there are, their bounds, and the query's own cursor.

With the option `subscription` a query is a subscription of each of its topics, an *external* one: Spark's checkpoint is
what decides where it is, and the cursor here only follows it. It is worth having nevertheless. Retention keeps what the
query has not read yet, and the query's lag is seen where all others are. A pipeline that keeps its progress in what it
writes has such a subscription for the same reasons.

With an archive, what a topic holds is what log and lake hold together.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Final

from penstock.errors import TopicDeleted, UnknownTopic, UsageError
from penstock.rows import Commit, Cursor, Partition, Shard, Subscription
from penstock.spark.positions import At, Positions, Seen, Span

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from penstock.lake.reading import Readable
    from penstock.ports import Store
    from penstock.rows import TopicInfo

_WILD: Final = frozenset("*?[")
MODE: Final = "external"


class Topics:
    """The topics that names and patterns mean, in an open store."""

    def __init__(self, store: Store, patterns: Sequence[str], log: Readable | None = None) -> None:
        self._store = store
        self._patterns = patterns
        self._log: Readable = store.log if log is None else log

    def found(self) -> list[TopicInfo]:
        """Return them; `UnknownTopic` for a name without a topic. A pattern may match none."""
        known = {topic.name: topic for topic in self._store.log.topics()}
        names: set[str] = set()
        for pattern in self._patterns:
            if _WILD.isdisjoint(pattern):
                if pattern not in known:
                    raise UnknownTopic(pattern, [name for name in known if not name.startswith("_")])
                names.add(pattern)
            else:
                # Internal ones are never meant by a pattern.
                names.update(name for name in known if fnmatchcase(name, pattern) and not name.startswith("_"))
        return [known[name] for name in sorted(names)]

    def seen(self) -> dict[str, Seen]:
        """Return what there is to read now."""
        now: dict[str, Seen] = {}
        for topic in self.found():
            try:
                bounds = tuple(self._log.bounds(partition) for partition in topic.partitions)
            except TopicDeleted:
                continue  # at this very moment
            now[topic.name] = Seen(topic.log_id, bounds)
        return now

    def find_time(self, seen: dict[str, Seen], topic: str, partition: int, time_us: int) -> int:
        """Return the offset of the first event appended at this time or later."""
        return self._log.find_time(Partition(seen[topic].log_id, partition), time_us)

    def measure(self, span: Span, bytes_max: int) -> int:
        """Return up to which offset a span has so many bytes, but one event at least."""
        partition = Partition(span.log_id, span.partition)
        found = self._log.read(partition, span.start, bytes_max=bytes_max, events_max=span.stop - span.start)
        return found[-1].range.stop if found else span.stop


class Follower:
    """The external subscription of a query: follows the positions that it is told.

    `whose` says in the subscription what keeps its progress, where that has a name; another one is refused, because
    the two would move it in turns, and what one of them has not read would not be kept.
    """

    def __init__(self, store: Store, name: str, whose: Mapping[str, Any] | None = None) -> None:
        self._store = store
        self._name = name
        self._whose = dict(whose or {})
        self._told: Positions = {}

    def tell(self, positions: Positions) -> None:
        """Move the cursors to these positions, forward or back."""
        for topic, at in positions.items():
            if self._told.get(topic) == at:
                continue
            try:
                self._move(topic, at)
            except TopicDeleted:
                continue  # and its subscriptions with it; the query finds out by itself
            self._told[topic] = at

    def _move(self, topic: str, at: At) -> None:
        cursors = self._store.cursors
        mine = [known for known in cursors.subscriptions(at.log_id) if known.name == self._name]
        if mine and not mine[0].external:
            raise UsageError(
                f"topic {topic!r} has a subscription {self._name!r} that is consumed by handlers: a query needs a "
                f"name of its own"
            )
        if mine:
            self._check_whose(topic, mine[0])
        shards = [Shard(at.log_id, self._name, 0, partition) for partition in range(len(at.offsets))]
        if not mine:
            subscription = Subscription(log_id=at.log_id, name=self._name, mode=MODE, policy=self._whose, external=True)
            first = [Cursor(shard=shard, next_offset=offset) for shard, offset in zip(shards, at.offsets, strict=True)]
            cursors.put_subscription(subscription, first)
            return
        known = {cursor.shard: cursor for cursor in cursors.load(at.log_id, self._name)}
        moved = []
        for shard, offset in zip(shards, at.offsets, strict=True):
            before = known.get(shard)
            # Going back is what a seek does: Spark's word counts, also when it begins anew.
            generation = 0 if before is None else before.generation + (offset < before.next_offset)
            if before is None or before.next_offset != offset:
                moved.append(Cursor(shard=shard, next_offset=offset, generation=generation))
        if moved:
            (refusal,) = cursors.commit([Commit(cursors=tuple(moved))])
            if refusal is not None:
                raise refusal

    def _check_whose(self, topic: str, found: Subscription) -> None:
        for what, mine in self._whose.items():
            if found.policy.get(what) != mine:
                raise UsageError(
                    f"subscription {self._name!r} of topic {topic!r} is of another {what}: give this one a name of its "
                    f"own, or delete that one: `penstock subscriptions rm {topic} {self._name}`"
                )
