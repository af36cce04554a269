"""`penstock debug`: one event, given to its handler once more, under the debugger.

The event is read from the log, or from the dead letters with `--dead`, and the store is closed before the handler is
called. Nothing is acknowledged, counted or committed (`penstock.bus.trial`); what the handler itself writes, or
publishes, is there. The debugger stops at the handler's first line, and once more where an error was raised.
"""

from __future__ import annotations

import asyncio
import inspect
import sys
from bdb import BdbQuit
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from penstock.cli.application import Target, find_bus, shown_lines, shown_trace
from penstock.cli.arguments import Spot, spot
from penstock.cli.output import say, shown_text
from penstock.cli.session import Session, find_topic, opened_store
from penstock.cli.subscriptions import Name
from penstock.cli.trim import chosen_partition
from penstock.errors import DecodeError, FutureVersion, GapFound, PenstockError, Trimmed, UsageError, did_you_mean

if TYPE_CHECKING:
    from collections.abc import Callable
    from pdb import Pdb
    from types import CodeType, FrameType, TracebackType

    from penstock.batch import StoredEvent
    from penstock.bus.bus import Bus
    from penstock.bus.handlers import Handler, Subscriber
    from penstock.bus.trial import TrialDelivery
    from penstock.ports import Store
    from penstock.rows import Parked, ParkedState, TopicInfo


def debug(
    context: typer.Context,
    target: Target,
    name: Name,
    *,
    offset: Annotated[Spot, typer.Option(parser=spot, metavar="N", help="Which event; or its whole position.")],
    topic: Annotated[
        str | None, typer.Option(metavar="TOPIC", help="Its topic, if subscriptions of several have this name.")
    ] = None,
    partition: Annotated[int | None, typer.Option(min=0, metavar="N", help="If the topic has several.")] = None,
    dead: Annotated[bool, typer.Option("--dead", help="Take the dead letter, with its own copy.")] = False,
    pdb: Annotated[bool, typer.Option("--pdb/--no-pdb", help="Under the debugger, or just once.")] = True,
) -> None:
    """Call a handler with one stored event, in the debugger.

    The subscription stays as it is: nothing is acknowledged or counted. What the handler does elsewhere, it does.
    """
    from penstock.bus.trial import TrialDelivery, handler_for

    session = context.ensure_object(Session)
    bus = find_bus(target, session)
    subscriber = _subscriber(bus, name, topic or (offset.position and offset.position.topic))
    partition = offset.partition(subscriber.topic.name, partition)
    with opened_store(replace(bus.settings, url=bus.url)) as store:
        info = find_topic(store, subscriber.topic.name)
        wanted = _Wanted(info, subscriber, chosen_partition(info, partition).number, offset.offset)
        found = wanted.dead_letter(store) if dead else wanted.stored(store)
    handler = handler_for(subscriber, found.event)
    delivery: TrialDelivery[Any] = TrialDelivery(
        subscriber, found.event, attempt=found.attempt, replay=found.replay, notice=say
    )
    say(f"{delivery.position}, attempt {delivery.attempt}: {handler.name}")
    if not _tried(bus, handler, delivery, with_pdb=pdb):
        raise typer.Exit(1)
    silent = subscriber.manual and not delivery.said
    print("it returned, and said nothing: it would stay in hand" if silent else "done: it would be acknowledged")


def _subscriber(bus: Bus, name: str, topic: str | None) -> Subscriber:
    """Return the subscriber that is meant."""
    named = [each for each in bus.subscribers if each.name == name]
    found = [each for each in named if topic in {None, each.topic.name}]
    if len(found) == 1:
        return found[0]
    if len(found) > 1:
        topics = ", ".join(each.topic.name for each in found)
        raise UsageError(f"several topics have a subscriber {name!r}: {topics}; say which with --topic")
    if named:
        known = did_you_mean(topic or "", [each.topic.name for each in named])
        raise UsageError(f"subscriber {name!r} is not of topic {topic!r}{known}")
    near = did_you_mean(name, {each.name for each in bus.subscribers})
    raise UsageError(f"the bus has no subscriber {name!r}{near}; it is declared with @bus.subscriber(topic, {name!r})")


# --- finding the event ------------------------------------------------------------------------


class _Found(NamedTuple):
    event: StoredEvent
    attempt: int
    replay: int


class _Wanted(NamedTuple):
    """Which event of which subscription."""

    info: TopicInfo
    subscriber: Subscriber
    partition: int
    offset: int

    def stored(self, store: Store) -> _Found:
        """Return the event as the log has it, with the attempt that would be the next."""
        from penstock.offsets import Gap

        partition = self.info.partitions[self.partition]
        bounds = store.log.bounds(partition)
        place = f"{self.info.name}/{self.partition}@{self.offset}"
        if self.offset >= bounds.stop:
            raise UsageError(
                f"there is no event {place}: the partition has the offsets {bounds.start} to {bounds.stop}"
            )
        try:
            [item, *_] = store.log.read(partition, self.offset, bytes_max=1, events_max=1)
        except Trimmed as error:
            raise PenstockError(f"{error}; a dead letter has a copy of its own: --dead") from None
        if isinstance(item, Gap):
            raise GapFound(self.info.name, item)
        return _Found(next(iter(item)), self._attempts(store) + 1, 0)

    def dead_letter(self, store: Store) -> _Found:
        """Return the copy that a dead letter has, with the attempt that failed last."""
        from penstock.runtime.blocks import fetched_row

        row = self._parked(store, "dead")
        if row is None:
            raise UsageError(
                f"{self.subscriber} has no dead letter {self.info.name}/{self.partition}@{self.offset}; without --dead "
                f"the event is taken from the log"
            )
        [event] = fetched_row(row, self.info).source.events(slice(0, 1))
        return _Found(event, max(row.attempts, 1), row.replay)

    def _parked(self, store: Store, state: ParkedState) -> Parked | None:
        from penstock.rows import ParkedFilter

        rows = store.parked.page(
            ParkedFilter(
                log_id=self.info.log_id,
                subscription=self.subscriber.name,
                states=frozenset({state}),
                partition=self.partition,
                offsets=frozenset({self.offset}),
            )
        )
        return rows[0] if rows else None

    def _attempts(self, store: Store) -> int:
        """Return how many attempts at it are on record: with its cursor, or with the copy that waits for the next."""
        waiting = self._parked(store, "waiting")
        cursors = store.cursors.load(self.info.log_id, self.subscriber.name)
        made = [cursor.attempts.get(self.offset, 0) for cursor in cursors if cursor.shard.partition == self.partition]
        return max([0 if waiting is None else waiting.attempts, *made])


# --- calling the handler ----------------------------------------------------------------------


def _tried(bus: Bus, handler: Handler, delivery: TrialDelivery[Any], *, with_pdb: bool) -> bool:
    """Call a handler, and print what would become of its event if it fails; returns whether it does not."""
    from penstock.bus.handlers import code_of

    code = code_of(inspect.unwrap(handler.function))
    try:
        arguments = handler.arguments(delivery.value, delivery)
        _call(bus, handler, arguments, code if with_pdb else None)
    except BdbQuit:
        print("it was left in the debugger, and has no outcome")
        return False
    except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever a handler raises is its verdict
        trace = _from_handler(error.__traceback__, code)
        say(shown_trace(error, trace).removesuffix("\n"))
        if with_pdb and trace is not None:
            _post_mortem(trace)
        print(_verdict(error))
        return False
    return True


def _call(bus: Bus, handler: Handler, arguments: tuple[Any, ...], stop_in: CodeType | None) -> None:
    """Call a handler in this thread, an `async def` one in a loop of its own; stopped where it begins, if wanted."""

    async def awaited() -> None:
        try:
            await handler.function(*arguments)
        finally:
            await bus.close()  # the handler may have used it

    call: Callable[[], Any] = (
        (lambda: asyncio.run(awaited())) if handler.in_loop else lambda: handler.function(*arguments)
    )
    if stop_in is None:
        call()
        return
    # Whoever steps past the handler's end wants its outcome, and not to see who has called it.
    debugger = _debugger(skip=[__name__, "asyncio", "asyncio.*"])

    def stop_there(frame: FrameType, event: str, _: Any) -> Any:
        if event != "call" or frame.f_code is not stop_in:
            return None
        debugger.set_trace(frame)
        return debugger.trace_dispatch

    sys.settrace(stop_there)
    try:
        call()
    finally:
        sys.settrace(None)


def _from_handler(trace: TracebackType | None, code: CodeType | None) -> TracebackType | None:
    """Return a traceback without what is above the handler."""
    found = trace
    while found is not None and found.tb_frame.f_code is not code:
        found = found.tb_next
    return found or trace


def _post_mortem(trace: TracebackType) -> None:
    say("post mortem: `q` leaves")
    debugger = _debugger()
    debugger.reset()
    debugger.interaction(None, trace)


def _debugger(**options: Any) -> Pdb:
    from pdb import Pdb

    class Debugger(Pdb):
        """Says what is raised, and the values that are asked for, with their control characters escaped."""

        def message(self, msg: str) -> None:
            super().message(shown_lines(str(msg)))

        def error(self, msg: str) -> None:
            super().error(shown_lines(str(msg)))

    return Debugger(**options)


def _verdict(error: BaseException) -> str:
    """Return what would have become of an event whose handler raised this."""
    from penstock.bus.verdicts import Reject, RetryLater

    what = shown_text(" ".join(f"{type(error).__name__}: {error}".split())).rstrip(": ")
    match error:
        case Reject():
            return f"rejected: it would become a dead letter at once ({what})"
        case RetryLater():
            return f"failed: it would be tried again in {error.delay_seconds:g} s ({what})"
        case FutureVersion():
            return f"failed: its lane would wait for an upgrade ({what})"
        case DecodeError():
            return f"rejected: it would become a dead letter at once, since it cannot be decoded ({what})"
        case _:
            return f"failed: it would be tried again, as the policy says ({what})"
