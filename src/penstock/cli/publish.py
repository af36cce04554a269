"""`penstock publish`: events from arguments, from a file or from a stream of lines.

A stream is published as it comes: what has arrived is stored before more is waited for, so that `tail -f … | penstock
publish --ndjson` works. A line that cannot be published ends it; everything before that line is stored, and the error
says how much that is, so that one can go on from there.
"""

from __future__ import annotations

import sys
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO, NamedTuple

import typer

from penstock.cli.arguments import duration, header, moment
from penstock.cli.incoming import Envelope, Item, Lines, event_of, from_arguments, from_cloudevents, from_json, opened
from penstock.cli.output import JsonLines, print_json_line, progress, say, shown_time
from penstock.cli.session import Session, find_topic, opened_store
from penstock.errors import PartialPublish, PublishError, PublishUnknown, UsageError

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Iterator, Sequence

    from penstock.bus.bus import Bus
    from penstock.bus.delayed import ScheduledReceipt
    from penstock.bus.topic import EventFields
    from penstock.events import Event
    from penstock.offsets import Position
    from penstock.ports import Store
    from penstock.rows import TopicInfo
    from penstock.settings import Limits, Settings

CHUNK_LINES = 1_000
SEND_ATTEMPTS = 3
JSON_CONTENT_TYPE = "application/json"


class Timing(NamedTuple):
    """When events are to appear, and for how long they are worth delivering."""

    ttl: float | None
    delay: float | None
    at: datetime | None

    @property
    def is_later(self) -> bool:
        """Whether they wait in the schedule."""
        return self.delay is not None or self.at is not None


Topic = Annotated[str, typer.Argument(metavar="TOPIC", help="The topic's name.")]
Data = Annotated[list[str] | None, typer.Argument(metavar="[DATA]…", help="Each is the data of one event.")]
File = Annotated[Path | None, typer.Option("--file", metavar="PATH", help="One event of its bytes; - is stdin.")]
Ndjson = Annotated[bool, typer.Option("--ndjson", help="Each line of stdin, or --file, is JSON: one event.")]
CloudEvents = Annotated[bool, typer.Option("--cloudevents", help="The same, of CloudEvents; or one array.")]
Key = Annotated[str | None, typer.Option(metavar="TEXT", help="Events of one key keep their order.")]
Type = Annotated[str | None, typer.Option(metavar="NAME", help="The type of the events.")]
Subject = Annotated[str | None, typer.Option(metavar="TEXT", help="What the events are about.")]
ContentType = Annotated[str | None, typer.Option(metavar="TYPE", help="Of the data, instead of the topic's.")]
Header = Annotated[list[str] | None, typer.Option("--header", metavar="NAME=VALUE", help="May be repeated.")]
Ttl = Annotated[
    float | None, typer.Option(parser=duration, metavar="TIME", help="Not worth delivering after it: 90, 15m.")
]
Delay = Annotated[
    float | None, typer.Option(parser=duration, metavar="TIME", help="Appear so much later: 90, 15m, 7d.")
]
At = Annotated[datetime | None, typer.Option(parser=moment, metavar="TIME", help="Appear then: 2026-01-31T12:00:00Z.")]
Create = Annotated[bool, typer.Option("--create", help="Create the topic, and the store, if missing.")]


def publish(
    context: typer.Context,
    topic: Topic,
    data: Data = None,
    *,
    file: File = None,
    ndjson: Ndjson = False,
    cloudevents: CloudEvents = False,
    key: Key = None,
    type: Type = None,
    subject: Subject = None,
    content_type: ContentType = None,
    headers: Header = None,
    ttl: Ttl = None,
    delay: Delay = None,
    at: At = None,
    create: Create = False,
    as_json: JsonLines = False,
) -> None:
    """Publish events; prints where each is stored.

    Lines are stored as they come. Of a stream the positions are printed with --json only.
    """
    from penstock.events import check_event, check_name

    envelope = Envelope(key, type, subject, content_type, _headers(headers or []))
    is_stream = ndjson or cloudevents
    _check(data or [], file, envelope, ndjson=ndjson, cloudevents=cloudevents)
    if delay is not None and at is not None:
        raise UsageError("give --delay or --at, not both")
    # Before a store or a topic is made for it.
    check_name("topic", topic)
    check_event(event_of(b"", envelope))
    settings = context.ensure_object(Session).resolve().settings
    with (
        _source(data or [], file, envelope, settings.limits, is_stream=is_stream) as source,
        opened_store(settings, create=create) as store,
    ):
        info = _topic(store, topic, create=create, content_type=content_type or (JSON_CONTENT_TYPE if ndjson else None))
        if ndjson and content_type is None and info.settings.content_type != JSON_CONTENT_TYPE:
            envelope = envelope._replace(content_type=JSON_CONTENT_TYPE)
        with _publishing(store, settings, topic, Timing(ttl, delay, at)) as publisher:
            publisher.report = _printer(as_json=as_json, quiet=is_stream)
            if source.stream is None:
                publisher.take(source.items, lambda: True)
            else:
                _publish_stream(publisher, source.stream, None if cloudevents else envelope, settings.limits)


def _headers(texts: list[str]) -> dict[str, str]:
    """Return headers by name; each may be given once."""
    found: dict[str, str] = {}
    for name, value in map(header, texts):
        if name in found:
            raise UsageError(f"--header {name} is given twice: an event has one value of each")
        found[name] = value
    return found


def _check(data: list[str], file: Path | None, envelope: Envelope, *, ndjson: bool, cloudevents: bool) -> None:
    if ndjson and cloudevents:
        raise UsageError("give --ndjson or --cloudevents, not both")
    if data and (file or ndjson or cloudevents):
        raise UsageError("events come from arguments, or from --file, --ndjson and --cloudevents, not from both")
    if not data and not file and not ndjson and not cloudevents:
        raise UsageError("nothing to publish: give DATA or --file; --ndjson or --cloudevents take lines from stdin")
    if cloudevents and any(envelope):
        raise UsageError("a CloudEvent says itself what it is: --key, --type and the like go with other data")


class _Source(NamedTuple):
    """Where events come from: a stream of lines, or else these."""

    stream: BinaryIO | None
    items: Iterator[Item]


@contextmanager
def _source(
    data: list[str], file: Path | None, envelope: Envelope, limits: Limits, *, is_stream: bool
) -> Iterator[_Source]:
    """Find what is to be published, or raise; a stream is opened once, since it may be a pipe that has a name."""
    if is_stream:
        with opened(file) as stream:
            yield _Source(stream, iter(()))
        return
    items = from_arguments(data, file, envelope, limits)
    if str(file) == "-":
        with opened(file):  # and read later, when there is a topic for it
            yield _Source(None, items)
    else:
        yield _Source(None, iter([*items]))


def _topic(store: Store, name: str, *, create: bool, content_type: str | None) -> TopicInfo:
    from penstock.rows import TopicSettings

    if create and not any(info.name == name for info in store.log.topics()):
        settings = TopicSettings() if content_type is None else TopicSettings(content_type=content_type)
        return store.log.create_topic(name, settings)
    return find_topic(store, name, advice="--create makes it")


# --- publishing ---------------------------------------------------------------------------------


def _printer(*, as_json: bool, quiet: bool) -> Callable[[Sequence[Position | ScheduledReceipt]], None]:
    """Return what prints receipts; `quiet` prints them for programs only."""
    from msgspec import json

    from penstock.offsets import Position

    def report(receipts: Sequence[Position | ScheduledReceipt]) -> None:
        for receipt in receipts:
            if isinstance(receipt, Position):
                line, document = str(receipt), {"position": str(receipt), **receipt._asdict()}
            else:
                due_at = shown_time(receipt.due_at)
                line, document = f"{receipt.id}  {due_at}", {"id": receipt.id, "topic": receipt.topic, "due_at": due_at}
            if as_json:
                print_json_line(json.encode(document))
            elif not quiet:
                print(line)
        sys.stdout.flush()

    return report


def _publish_stream(publisher: _Publisher, stream: BinaryIO, envelope: Envelope | None, limits: Limits) -> None:
    try:
        with progress("publishing") as update:
            lines = Lines(stream, limits, update)
            items = from_cloudevents(lines) if envelope is None else from_json(lines, envelope)
            publisher.take(items, lines.arrived)
    except UsageError:  # which tells it already
        raise
    except BaseException:
        say(publisher.outcome())
        raise
    say(publisher.outcome())


@contextmanager
def _publishing(store: Store, settings: Settings, topic: str, timing: Timing) -> Iterator[_Publisher]:
    import asyncio

    from penstock.bus.bus import Bus

    # The loop runs only while something is sent. In between, waiting for a line is interrupted by Ctrl-C at once.
    with asyncio.Runner() as runner:
        bus = Bus(settings.url, settings=settings, store=store)
        try:
            yield _Publisher(runner, bus, topic, timing, settings.limits.batch_bytes_max // 2)
        finally:
            runner.run(bus.close())


class _Publisher:
    """Sends events in chunks, and counts what is stored."""

    def __init__(self, runner: asyncio.Runner, bus: Bus, topic: str, timing: Timing, chunk_bytes_max: int) -> None:
        self._runner = runner
        self._bus = bus
        self._topic = topic
        self._timing = timing
        self._chunk_bytes_max = chunk_bytes_max
        self.report: Callable[[Sequence[Position | ScheduledReceipt]], None] = lambda _receipts: None
        """Called with what was stored, as soon as it is."""
        self.stored = 0

    def outcome(self) -> str:
        """Say how much was done."""
        events = "event is" if self.stored == 1 else "events are"
        return f"{self.stored:,} {events} {'scheduled for' if self._timing.is_later else 'stored in'} {self._topic!r}"

    def take(self, items: Iterator[Item], arrived: Callable[[], bool]) -> None:
        """Publish all of them; `UsageError` names the first that cannot be, and all before it are stored.

        `arrived` says whether the next one is here; otherwise those before it do not wait for it.
        """
        chunk: list[Item] = []
        chunk_bytes = 0
        while True:
            try:
                item = next(items, None)
            except UsageError as error:
                self._flush(chunk)
                raise self._refused(str(error)) from None
            if item is None:
                break
            size = _rough_size(item.event)
            if chunk and chunk_bytes + size > self._chunk_bytes_max:
                self._flush(chunk)
                chunk, chunk_bytes = [], 0
            chunk.append(item)
            chunk_bytes += size
            if len(chunk) == CHUNK_LINES or not arrived():
                self._flush(chunk)
                chunk, chunk_bytes = [], 0
        self._flush(chunk)

    def _refused(self, why: str) -> UsageError:
        before = {0: "nothing is stored", 1: "the event before it is stored"}
        return UsageError(f"{why}; {before.get(self.stored, f'the {self.stored:,} events before it are stored')}")

    def _flush(self, chunk: list[Item]) -> None:
        if self._timing.is_later:
            for item in chunk:
                self._send([item])
        elif chunk:
            self._send(chunk)

    def _send(self, items: list[Item]) -> None:
        try:
            receipts = self._runner.run(self._sent([item.event for item in items]))
        except UsageError as error:
            if len(items) == 1:
                raise self._refused(f"{items[0].where}: {error}") from None
            # One of them cannot be stored, and so none is: find it, and store those before it.
            for item in items:
                self._send([item])
        else:
            self.stored += len(items)
            self.report(receipts)

    async def _sent(self, events: list[Event]) -> Sequence[Position | ScheduledReceipt]:
        ttl, delay, at = self._timing
        try:
            if at is not None:
                return [await self._bus.publish(self._topic, events[0], at=at, **_ttl(ttl))]
            if delay is not None:
                return [await self._bus.publish(self._topic, events[0], delay=delay, **_ttl(ttl))]
            receipt = await self._bus.publish_batch(self._topic, [_expiring(event, ttl) for event in events])
        except (PublishUnknown, PartialPublish) as error:
            receipt = await self._sent_again(error, len(events))
        return getattr(receipt, "positions", [receipt])

    async def _sent_again(self, error: PublishUnknown | PartialPublish, count: int) -> Any:
        """Repeat what may be stored, which never makes a duplicate."""
        for _ in range(SEND_ATTEMPTS):
            try:
                return await error.prepared.send()
            except (PublishUnknown, PartialPublish) as again:
                error = again
        raise PublishError(
            f"{self.stored:,} events are stored; of the next {count:,} each may be, or not: {error.__cause__ or error}"
        ) from error


def _ttl(ttl: float | None) -> EventFields:
    return {} if ttl is None else {"ttl": ttl}


def _expiring(event: Event, ttl: float | None) -> Event:
    from msgspec import structs

    if ttl is None:
        return event
    try:
        return structs.replace(event, expires_at=datetime.now(UTC) + timedelta(seconds=ttl))
    except OverflowError:
        raise UsageError("--ttl ends after the year 9999: leave it out") from None


def _rough_size(event: Event) -> int:
    """Return about how much an event takes in a batch."""
    headers = sum(len(name) + len(value) for name, value in event.headers.items())
    return len(event.data) + len(event.key or b"") + headers + 200
