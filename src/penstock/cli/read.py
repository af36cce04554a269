"""`penstock read`: the events of a topic, once or as they come.

With `--json` each event is a CloudEvent on a line of its own. Its position is in the attributes `penstocktopic`,
`penstockpartition` and `sequence`, and when it was appended in `recordedtime`; `penstock publish --cloudevents` takes
such lines and leaves these out. A line break in a JSON payload becomes a space, so that a line stays a line.
"""

from __future__ import annotations

import shutil
import sys
import threading
from datetime import datetime
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.arguments import moment
from penstock.cli.output import JsonLines, fitted, print_json_line, say, shown_bytes, shown_text, shown_time
from penstock.cli.session import Session, find_topic
from penstock.cli.trim import chosen_partition
from penstock.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.batch import Batch, StoredEvent
    from penstock.lake.reading import Readable
    from penstock.offsets import Gap
    from penstock.ports import Store
    from penstock.rows import Partition, TopicInfo

READ_BYTES = 1 << 20
READ_EVENTS = 5_000
HEARTBEAT_SECONDS = 0.5
"""A follower looks so often by itself; hints only make it quicker."""

TOPIC_ATTRIBUTE = "penstocktopic"
PARTITION_ATTRIBUTE = "penstockpartition"
POSITION_ATTRIBUTES = frozenset({TOPIC_ATTRIBUTE, PARTITION_ATTRIBUTE, "sequence", "recordedtime"})


def read(
    context: typer.Context,
    topic: Annotated[str, typer.Argument(metavar="TOPIC", help="The topic's name.")],
    *,
    partition: Annotated[int | None, typer.Option(min=0, metavar="N", help="Only this one.")] = None,
    start: Annotated[str | None, typer.Option("--from", metavar="OFFSET", help="Where to begin; or `end`.")] = None,
    stop: Annotated[int | None, typer.Option("--to", min=0, metavar="OFFSET", help="Where to end, exclusive.")] = None,
    from_time: Annotated[
        datetime | None, typer.Option(parser=moment, metavar="TIME", help="Appended then or later, in ISO 8601.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, metavar="N", help="How many events at most.")] = None,
    archive: Annotated[str | None, typer.Option(metavar="DIR", help="A lake, where older events are read.")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Wait for more, until Ctrl-C.")] = False,
    as_json: JsonLines = False,
) -> None:
    """Print the events of a topic, partition by partition.

    With --archive what the log does not hold any more is read from a lake, and what is in neither is a gap.

    A gap that the log declares is told on stderr. Damage ends the reading with exit code 3, after what is before it.
    """
    if start is not None and from_time is not None:
        raise UsageError("give --from or --from-time, not both")
    if start is not None and start != "end" and not start.isdecimal():
        raise UsageError(f"--from is an offset or `end`, not {start!r}")
    with context.ensure_object(Session).open_store() as (store, _):
        info = find_topic(store, topic)
        partitions = info.partitions
        if partition is not None or stop is not None or (start is not None and start != "end"):
            partitions = [chosen_partition(info, partition)]
        log = _log(store, archive)
        reader = _Reader(log, _Printer(info, limit, as_json=as_json), stop)
        reader.begin({each: _start(log, each, start, from_time) for each in partitions})
        reader.drain()
        if follow:
            _follow(store, info, reader)


def _log(store: Store, archive: str | None) -> Readable:
    """Return the log, together with its archive if there is one."""
    if archive is None:
        return store.log
    from penstock.lake.lake import Lake
    from penstock.lake.reading import ArchivedLog

    return ArchivedLog(store.log, Lake(archive))


def _start(log: Readable, partition: Partition, start: str | None, from_time: datetime | None) -> int:
    from penstock.clock import datetime_to_us

    if from_time is not None:
        return log.find_time(partition, datetime_to_us(from_time))
    if start is None:
        return log.bounds(partition).start
    return log.bounds(partition).stop if start == "end" else int(start)


def _follow(store: Store, info: TopicInfo, reader: _Reader) -> None:
    woken = threading.Event()

    def listen(partition: Partition) -> None:
        if partition.log_id == info.log_id:
            woken.set()

    stop_listening: Callable[[], None] = store.notifier.listen(listen) if store.notifier else lambda: None
    try:
        heads, drained = store.log.heads(info.partitions), None
        while not reader.is_done():
            ends = heads.read().tolist()
            if ends != drained:
                reader.drain()  # of a topic that was deleted it raises `TopicDeleted`
                drained = ends
            woken.wait(HEARTBEAT_SECONDS)
            woken.clear()
    finally:
        stop_listening()


class _Reader:
    """Where each partition is read next."""

    def __init__(self, log: Readable, printer: _Printer, stop: int | None) -> None:
        self._log = log
        self._printer = printer
        self._stop = stop
        self._next: dict[Partition, int] = {}

    def begin(self, starts: dict[Partition, int]) -> None:
        """Say where to begin; `BeyondEnd` for an offset that the log does not have yet."""
        for partition, offset in starts.items():
            if offset > self._log.bounds(partition).stop:
                self._log.read(partition, offset, bytes_max=1)  # the store says what is wrong with it
        self._next = starts

    def is_done(self) -> bool:
        """Say whether all was printed that was asked for."""
        reached = self._stop is not None and all(offset >= self._stop for offset in self._next.values())
        return reached or self._printer.left == 0

    def drain(self) -> None:
        """Print everything that is stored now."""
        for partition in self._next:
            end = self._log.bounds(partition).stop
            end = end if self._stop is None else min(end, self._stop)
            while self._next[partition] < end and self._printer.left != 0:
                self._next[partition] = self._read_some(partition, self._next[partition], end)

    def _read_some(self, partition: Partition, offset: int, end: int) -> int:
        from penstock.joining import before
        from penstock.offsets import Gap

        left = self._printer.left
        wanted = min(end - offset, READ_EVENTS, end if left is None else left)
        for item in before(self._log.read(partition, offset, bytes_max=READ_BYTES, events_max=wanted), end):
            if isinstance(item, Gap):
                self._printer.print_gap(partition, item)
            else:
                self._printer.print_batch(item)
            offset = item.range.stop
        sys.stdout.flush()
        return offset


class _Printer:
    """Prints events, and counts how many it may still print."""

    def __init__(self, info: TopicInfo, limit: int | None, *, as_json: bool) -> None:
        self._topic = info.name
        self._as_json = as_json
        self.left = limit
        """None for any number."""
        self._width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None

    def print_batch(self, batch: Batch) -> None:
        """Print events one by one."""
        for event in batch:
            if self.left == 0:
                return
            if self._as_json:
                print_json_line(structured(event))
            else:
                self._print_line(event)
            if self.left is not None:
                self.left -= 1

    def _print_line(self, event: StoredEvent) -> None:
        from penstock.batch import UNTYPED

        parts = (
            str(event.position),
            shown_time(event.appended_at) if event.appended_at else "-",
            "-" if event.type == UNTYPED else shown_text(event.type),
            "-" if event.key is None else shown_bytes(event.key),
            shown_bytes(event.data),
        )
        line = "  ".join(parts)
        print(line if self._width is None else fitted(line, self._width))

    def print_gap(self, partition: Partition, gap: Gap) -> None:
        """Tell of offsets that hold no event and never will."""
        from msgspec import json

        say(f"{self._topic}/{partition.number}: {shown_text(str(gap))}")
        if self._as_json:
            document = {
                "topic": self._topic,
                "partition": partition.number,
                "start": gap.start,
                "stop": gap.stop,
                "reason": gap.reason,
            }
            print_json_line(json.encode({"gap": document}))


def structured(event: StoredEvent) -> bytes:
    """Return an event as a CloudEvent with its position."""
    from msgspec import json, structs

    from penstock import cloudevents

    envelope = event.to_event()
    # These two are said by the position; headers of their names could only come from a copy of another log.
    headers = {
        name: value for name, value in envelope.headers.items() if name not in {TOPIC_ATTRIBUTE, PARTITION_ATTRIBUTE}
    }
    document = cloudevents.to_structured(
        structs.replace(envelope, headers=headers),
        sequence=event.offset,
        recorded_at=event.appended_at,
    )
    position = json.encode({TOPIC_ATTRIBUTE: event.position.topic, PARTITION_ATTRIBUTE: event.position.partition})
    return document[:-1] + b"," + position[1:]
