"""Positions: where a query is in its topics, and every decision about it, as pure functions.

Spark keeps a query's position as JSON in its checkpoint, and asks for the next one. The answer depends on nothing but
the position it gives and the bounds of the logs, so that a query which is stopped, killed or started again on another
machine goes on as if nothing had happened. The JSON has string keys in a fixed order, because Spark compares it as
text::

    {"orders": {"log": "5f1c…", "0": 1200, "1": 998}}

A topic that a query meets for the first time also says where it begins, as `"from": {"0": 0, "1": 0}`: only so does
the same pair of positions mean the same events for ever, whatever is trimmed meanwhile. The id of the log tells a topic
from one of the same name that was created after it was deleted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from penstock.errors import UsageError
from penstock.offsets import Range
from penstock.spark.options import Edge, Marks, Moment


class At(NamedTuple):
    """The next offset in each partition of a topic."""

    log_id: str
    offsets: tuple[int, ...]
    began: tuple[int, ...] | None = None
    """Where each partition begins, in the first position that has this topic."""


Positions = dict[str, At]
"""By topic, in the order of their names."""


class Seen(NamedTuple):
    """A topic as its log says now."""

    log_id: str
    bounds: tuple[Range, ...]


class Span(NamedTuple):
    """Events to read: consecutive ones of one partition."""

    topic: str
    log_id: str
    partition: int
    start: int
    stop: int

    @property
    def where(self) -> str:
        """The partition as messages name it."""
        return f"topic {self.topic!r}, partition {self.partition}"


# --- as Spark keeps them ------------------------------------------------------------------------


def encode(positions: Positions) -> dict[str, Any]:
    """Return positions as JSON that is always written alike."""
    encoded: dict[str, Any] = {}
    for topic, at in sorted(positions.items()):
        encoded[topic] = {"log": at.log_id}
        if at.began is not None:
            encoded[topic]["from"] = _numbered(at.began)
        encoded[topic].update(_numbered(at.offsets))
    return encoded


def _numbered(offsets: Sequence[int]) -> dict[str, int]:
    return {str(partition): offset for partition, offset in enumerate(offsets)}


def decode(encoded: Mapping[str, Any]) -> Positions:
    """Read what `encode` returned; `UsageError` for anything else."""
    try:
        return {topic: _decode_topic(dict(value)) for topic, value in sorted(encoded.items())}
    except (KeyError, ValueError, TypeError, AttributeError):
        raise UsageError(
            f"this is no position of a query on Penstock topics, so not its checkpoint: {encoded}"
        ) from None


def _decode_topic(value: dict[str, Any]) -> At:
    log_id, began = str(value.pop("log")), value.pop("from", None)
    return At(log_id, _listed(value), None if began is None else _listed(began))


def _listed(numbered: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(int(numbered[str(partition)]) for partition in range(len(numbered)))


# --- the first position -------------------------------------------------------------------------


def resolve(marks: Marks, seen: Mapping[str, Seen], find_time: Callable[[str, int, int], int]) -> Positions:
    """Return the positions that an option names; `find_time(topic, partition, time)` looks a time up."""
    if isinstance(marks, Mapping):
        strangers = [topic for topic in marks if topic not in seen]
        if strangers:
            raise UsageError(f"the offsets name topic {strangers[0]!r}, which is not one of those read: {_names(seen)}")
    found: Positions = {}
    for topic, (log_id, bounds) in sorted(seen.items()):
        of_topic = _marks_of(marks, topic, len(bounds))
        offsets = []
        for partition, (mark, readable) in enumerate(zip(of_topic, bounds, strict=True)):
            match mark:
                case "earliest":
                    offset = readable.start
                case "latest":
                    offset = readable.stop
                case Moment(time_us):
                    offset = find_time(topic, partition, time_us)
                case _:
                    offset = mark
            offsets.append(offset)
        found[topic] = At(log_id, tuple(offsets))
    return found


def _marks_of(marks: Marks, topic: str, partitions: int) -> list[Edge | Moment | int]:
    if isinstance(marks, Mapping):
        if topic not in marks:
            raise UsageError(f"the offsets do not say where topic {topic!r} is to begin or end: name it, too")
        of_topic = marks[topic]
    else:
        of_topic = marks
    if not isinstance(of_topic, Mapping):
        return [of_topic] * partitions
    if sorted(of_topic) != list(range(partitions)):
        wrong = set(of_topic) ^ set(range(partitions))
        raise UsageError(
            f"the offsets of topic {topic!r} must name its partitions 0 to {partitions - 1}, each once; "
            f"look at partition {min(wrong)}"
        )
    return [of_topic[partition] for partition in range(partitions)]


def _names(topics: Iterable[str]) -> str:
    return ", ".join(sorted(topics)) or "none"


# --- the next one -------------------------------------------------------------------------------

Measure = Callable[[Span, int], int]
"""Returns up to which offset a span (never an empty one) has so many bytes, but one event at least."""


def advance(
    start: Positions,
    seen: Mapping[str, Seen],
    *,
    rows_max: int | None = None,
    bytes_max: int | None = None,
    measure: Measure | None = None,
) -> Positions:
    """Return how far to read next from `start`: to the end of the logs, or as far as the limits allow.

    Both limits are shared out among the partitions, by how much each of them has. Something is always read if there
    is something.
    """
    begin = {topic: _begin(start.get(topic), now) for topic, now in seen.items()}
    spans = spans_between(begin, {topic: _end(begin[topic], now) for topic, now in seen.items()})
    # What was trimmed is not going to be read, and takes no share.
    spans = [span._replace(start=max(span.start, seen[span.topic].bounds[span.partition].start)) for span in spans]
    if rows_max is not None:
        spans = _admit(spans, rows_max)
    readable = sum(span.start < span.stop for span in spans)
    if bytes_max is not None and measure is not None and readable:
        share = max(bytes_max // readable, 1)
        spans = [span._replace(stop=measure(span, share)) if span.start < span.stop else span for span in spans]
    stops = {(span.topic, span.partition): span.stop for span in spans}
    # A topic that is gone keeps its place: should this be the wrong store, nothing is forgotten.
    positions = {topic: at._replace(began=None) for topic, at in start.items()}
    for topic, at in begin.items():
        offsets = tuple(stops.get((topic, partition), offset) for partition, offset in enumerate(at.offsets))
        known = start.get(topic)
        is_new = known is None or known.log_id != at.log_id
        positions[topic] = At(at.log_id, offsets, at.offsets if is_new else None)
    return dict(sorted(positions.items()))


def _begin(known: At | None, now: Seen) -> At:
    if known is not None and known.log_id == now.log_id:
        return known._replace(began=None)
    return At(now.log_id, tuple(bounds.start for bounds in now.bounds))


def _end(begin: At, now: Seen) -> At:
    ends = (max(offset, bounds.stop) for offset, bounds in zip(begin.offsets, now.bounds, strict=True))
    return At(now.log_id, tuple(ends))


def _admit(spans: list[Span], rows_max: int) -> list[Span]:
    backlogs = [span.stop - span.start for span in spans]
    total = sum(backlogs)
    if total <= rows_max:
        return spans
    shares = [backlog * rows_max // total for backlog in backlogs]
    # What division left over goes to spans that have more than their share: to one of which all was trimmed, it would
    # be a step beyond the end of the log.
    unserved = [index for index, backlog in enumerate(backlogs) if shares[index] < backlog]
    for index in unserved[: rows_max - sum(shares)]:
        shares[index] += 1
    return [span._replace(stop=span.start + share) for span, share in zip(spans, shares, strict=True)]


def at_most(seen: Mapping[str, Seen], ends: Positions) -> dict[str, Seen]:
    """Return the logs as if nothing had been appended after `ends`, and no topic created."""
    return {
        topic: now._replace(
            bounds=tuple(
                Range(bounds.start, max(bounds.start, min(bounds.stop, end)))
                for bounds, end in zip(now.bounds, ends[topic].offsets, strict=True)
            )
        )
        for topic, now in seen.items()
        if topic in ends and ends[topic].log_id == now.log_id
    }


# --- what is between two ------------------------------------------------------------------------


def spans_between(start: Positions, end: Positions) -> list[Span]:
    """Return the events from one position to a later one, the same for the same two positions."""
    found = []
    for topic, at in sorted(end.items()):
        known = start.get(topic)
        if at.began is not None:
            begins = at.began
        elif known is not None and known.log_id == at.log_id:
            begins = known.offsets
        else:
            raise UsageError(f"topic {topic!r} appears in a position that does not say where it begins: {encode(end)}")
        found += [
            Span(topic, at.log_id, partition, begin, stop)
            for partition, (begin, stop) in enumerate(zip(begins, at.offsets, strict=True))
            if begin < stop
        ]
    return found


def check_order(start: Positions, end: Positions) -> None:
    """Raise `UsageError` if a batch would end before it begins."""
    for topic, at in start.items():
        for partition, (begin, stop) in enumerate(zip(at.offsets, end[topic].offsets, strict=True)):
            if begin > stop:
                raise UsageError(
                    f"topic {topic!r}, partition {partition}: the read begins at offset {begin} and ends before it, at "
                    f"{stop}: look at startingOffsets, endingOffsets, fromTime and toTime"
                )


def divide(spans: Sequence[Span], wanted: int, *, smallest: int = 1) -> list[Span]:
    """Divide spans into pieces of like size, `wanted` or a few more; none is made smaller than `smallest` for it."""
    total = sum(span.stop - span.start for span in spans)
    pieces: list[Span] = []
    for span in spans:
        count = span.stop - span.start
        parts = min(-(-wanted * count // total), max(count // smallest, 1))
        edges = [span.start + count * part // parts for part in range(parts + 1)]
        pieces += [span._replace(start=start, stop=stop) for start, stop in pairwise(edges)]
    return pieces


# --- what is lost -------------------------------------------------------------------------------


def losses(start: Positions, seen: Mapping[str, Seen]) -> list[str]:
    """Say, one by one, which events a query at `start` can never read any more."""
    found = []
    for topic, at in sorted(start.items()):
        now = seen.get(topic)
        if now is None:
            found.append(f"topic {topic!r} does not exist any more; it was read up to {_numbered(at.offsets)}")
        elif now.log_id != at.log_id:
            found.append(f"topic {topic!r} was deleted and created anew; it was read up to {_numbered(at.offsets)}")
        else:
            found += [
                text
                for partition, (offset, bounds) in enumerate(zip(at.offsets, now.bounds, strict=True))
                if (text := _loss(f"topic {topic!r}, partition {partition}", offset, bounds))
            ]
    return found


def within(positions: Positions, seen: Mapping[str, Seen]) -> Positions:
    """Return the positions moved into the bounds of the logs, where they are outside of them."""
    return {
        topic: known._replace(
            offsets=tuple(
                min(max(offset, bounds.start), bounds.stop)
                for offset, bounds in zip(known.offsets, seen[topic].bounds, strict=True)
            )
        )
        for topic, known in positions.items()
    }


def _loss(where: str, offset: int, bounds: Range) -> str:
    if offset < bounds.start:
        return f"{where}: offsets {offset} to {bounds.start - 1} were trimmed; the log now holds {bounds}"
    if offset > bounds.stop:
        return (
            f"{where}: the log ends at {bounds.stop}, and was read up to {offset}; it was cut, or it is another store"
        )
    return ""
