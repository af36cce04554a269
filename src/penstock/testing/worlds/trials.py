"""Trials: the same events through an application's own handlers, in a process of its own for each run.

The application is imported anew every time, so that whatever it keeps in memory begins as it does when a program
starts; what it keeps elsewhere is its own `reset` to begin anew. Its code is run. Its store is not even opened.

These functions run in processes that `penstock.testing.campaigns.zygote` forks: each takes the connection to answer by,
and plain values. What an application prints goes to stderr.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import logging
import os
import random
import sys
from collections import Counter
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

import msgspec
from xxhash import xxh3_64_hexdigest

from penstock.bus.bus import Bus
from penstock.bus.topic import Topic
from penstock.clock import SystemClock
from penstock.errors import NotDrained, PenstockError, UsageError, did_you_mean
from penstock.events import Event
from penstock.testing.worlds.effects import Effects, Place, Tally, plain
from penstock.testing.worlds.faults import Chaos, Fault, Script
from penstock.testing.worlds.world import World, world_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from multiprocessing.connection import Connection

    from penstock.testing.worlds.faults import Plan

TIMEOUT_SECONDS: Final = 30.0


class Declared(msgspec.Struct, frozen=True):
    """A handler of an application."""

    topic: str
    subscription: str
    handler: str


class Input(msgspec.Struct, frozen=True):
    """An event to be handled, as its source has it."""

    where: str
    """Where it stood, for a person who has to find it."""
    topic: str
    """Empty if its source does not say."""
    event: Event
    bare: bool = False
    """Whether it is nothing but data: of the only class of its topic."""


class Given(msgspec.Struct, frozen=True):
    """An event to be handled, ready to be published."""

    where: str
    topic: str
    event: Event


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """What a run is told."""

    bus: str
    state: str = ""
    reset: str = ""
    events: list[Given] = []
    seed: int = 0
    faults: list[Fault] | None = None
    """Exactly these; None for those of the seed."""
    without: list[tuple[str, str]] = []
    """Subscriptions, by topic and name, whose handlers are not run."""
    timeout: float = TIMEOUT_SECONDS


class Answer(msgspec.Struct, frozen=True):
    """What a process answers: a value of the type that was asked for, or why there is none."""

    value: bytes = b""
    usage: str = ""
    """The application, or what was said of it, cannot be right."""
    trace: str = ""
    """Its own code has raised."""


ANSWER: Final = msgspec.msgpack.Decoder(Answer)
DECLARED: Final = msgspec.msgpack.Decoder(list[Declared])
GIVEN: Final = msgspec.msgpack.Decoder(list[Given])
EFFECTS: Final = msgspec.msgpack.Decoder(Effects)
INPUTS: Final = msgspec.msgpack.Decoder(list[Input])
WANTED: Final = msgspec.msgpack.Decoder(Wanted)


def _answered(connection: Connection[Any, Any], work: Callable[[], Any]) -> None:
    """Do something with an application's own code, and answer."""
    os.dup2(2, 1)
    logging.getLogger("penstock").setLevel(logging.CRITICAL)
    try:
        answer = Answer(value=msgspec.msgpack.encode(work()))
    except UsageError as error:
        answer = Answer(usage=str(error))
    except Exception as error:  # noqa: BLE001 - it is the application's, and told to whoever runs this
        answer = Answer(trace=f"{type(error).__name__}: {error}")
    connection.send(msgspec.msgpack.encode(answer))


# --- finding things ---------------------------------------------------------------------------


def named(text: str, what: str) -> Any:
    """Return what `module:name` means; `UsageError` if there is no such thing."""
    module, colon, name = text.partition(":")
    if not (module and colon and name):
        raise UsageError(f"{what} is written as module:name, not {text!r}")
    here = str(os.getcwd())  # noqa: PTH109 - a text is what `sys.path` has
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        found: Any = importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise UsageError(f"{what}: there is no module {error.name!r} here or among what is installed") from None
    for part in name.split("."):
        if not hasattr(found, part):
            near = did_you_mean(part, [each for each in vars(found) if not each.startswith("_")])
            raise UsageError(f"{what}: {text!r} is not there{near}")
        found = getattr(found, part)
    return found


def bus_named(text: str) -> Bus:
    """Return an application's bus."""
    bus = named(text, "the bus")
    if not isinstance(bus, Bus):
        raise UsageError(f"{text!r} is a {type(bus).__name__}, not a Bus")
    return bus


# --- what a process does ----------------------------------------------------------------------


def describe(connection: Connection[Any, Any], bus: str) -> None:
    """Answer what handlers an application's bus has: a list of `Declared`."""
    _answered(connection, lambda: _described(bus_named(bus)))


def _described(bus: Bus) -> list[Declared]:
    handlers = [
        Declared(subscriber.topic.name, subscriber.name, handler.name)
        for subscriber in bus.subscribers
        for handler in subscriber.handlers
    ]
    if not handlers:
        raise UsageError("this bus has no handlers: they are declared with @bus.subscriber(topic, name)")
    return handlers


def gather(connection: Connection[Any, Any], bus: str, inputs: bytes, sample: str, most: int) -> None:
    """Answer events that can be published: a list of `Given`."""
    given = INPUTS.decode(inputs)
    _answered(connection, lambda: _gathered(bus_named(bus), given, sample, most))


def _gathered(bus: Bus, inputs: list[Input], sample: str, most: int) -> list[Given]:
    topics = {subscriber.topic.name: subscriber.topic for subscriber in bus.subscribers}
    found = [_given(each, topics) for each in inputs]
    if sample:
        values = named(sample, "--sample")(random.Random(0))  # noqa: S311 - whichever faults there are, events are the same
        found += [_sampled(value, topics, number) for number, value in enumerate(islice(_listed(values), most))]
    return [
        each if each.event.id else msgspec.structs.replace(each, event=_with_id(each.event, number))
        for number, each in enumerate(found[:most])
    ]


def _listed(values: Any) -> Iterator[Any]:
    try:
        return iter(values)
    except TypeError:
        raise UsageError(
            f"--sample: the function returned a {type(values).__name__}; it returns values, or pairs of topic and value"
        ) from None


def _topic_of(name: str, topics: dict[str, Topic[Any]], where: str) -> Topic[Any]:
    if name:
        if name not in topics:
            raise UsageError(f"{where}: no handler has topic {name!r}{did_you_mean(name, topics)}")
        return topics[name]
    if len(topics) > 1:
        raise UsageError(f"{where}: the bus has handlers of {', '.join(sorted(topics))}: say which topic it is of")
    return next(iter(topics.values()))


def _given(each: Input, topics: dict[str, Topic[Any]]) -> Given:
    topic = _topic_of(each.topic, topics, each.where)
    if not each.bare:
        return Given(each.where, topic.name, each.event)
    if len(topic.types) > 1:
        raise UsageError(f"{each.where}: topic {topic.name!r} has several classes: write CloudEvents, with their type")
    if not topic.types:
        return Given(each.where, topic.name, each.event)
    [event_type] = topic.types.values()
    event = msgspec.structs.replace(each.event, type=event_type.name, headers=dict(event_type.headers))
    try:
        value = topic.decode(event)
    except PenstockError as error:
        raise UsageError(f"{each.where}: {error}") from None
    return Given(each.where, topic.name, _event(topic, value))


def _event(topic: Topic[Any], value: Any) -> Event:
    return topic.to_event(value, SystemClock().time_us())


def _with_id(event: Event, number: int) -> Event:
    return msgspec.structs.replace(event, id=f"chaos-{number}")


def _sampled(value: Any, topics: dict[str, Topic[Any]], number: int) -> Given:
    where = f"sample {number}"
    match value:
        case (Topic() | str() as chosen, inner):
            topic = _topic_of(chosen if isinstance(chosen, str) else chosen.name, topics, where)
            return Given(where, topic.name, _event(topic, inner))
        case _:
            fitting = [topic for topic in topics.values() if type(value) in (topic.types or (bytes,))]
            if len(fitting) != 1:
                how_many = len(fitting) or "no"
                raise UsageError(
                    f"{where}: {how_many} topics here take {type(value).__name__}: give pairs of topic and value"
                )
            return Given(where, fitting[0].name, _event(fitting[0], value))


def run(connection: Connection[Any, Any], wanted: bytes) -> None:
    """Answer what the handlers of an application do with some events: `Effects`."""
    told = WANTED.decode(wanted)
    _answered(connection, lambda: asyncio.run(run_here(told)))


async def run_here(wanted: Wanted) -> Effects:
    """Run the handlers of an application on some events, in this process."""
    bus = bus_named(wanted.bus)
    if wanted.reset:
        await _called(named(wanted.reset, "--reset"))
    plan: Plan = Chaos(wanted.seed) if wanted.faults is None else Script(wanted.faults)
    async with world_of(bus, plan, wanted.seed, without=wanted.without) as world:
        for each in wanted.events:
            await bus.publish(each.topic, each.event)
        try:
            await world.drain(timeout=wanted.timeout)
        except NotDrained as error:
            return Effects(trouble=str(error), faults=world.faults, handled=_handled(world))
        state = await _called(named(wanted.state, "--state")) if wanted.state else None
        return _effects(world, wanted.events, state)


async def _called(function: Callable[[], Any]) -> Any:
    result = function()
    return await result if inspect.isawaitable(result) else result


def _effects(world: World, events: Iterable[Given], state: Any) -> Effects:
    ours = {each.event.id: each.where for each in events}
    origins: dict[str, str] = {}
    published: Counter[str] = Counter()
    for stored in world.stored():
        if stored.id in ours:
            origins[str(stored.position)] = ours[stored.id]
        else:
            key = "" if stored.key is None else f" key {stored.key.decode(errors='backslashreplace')}"
            digest = xxh3_64_hexdigest(stored.data)
            published[f"{stored.position.topic} {stored.type or 'bytes'}{key} {digest[:8]}"] += 1
    dead = Counter(f"{each.subscription} {each.position} {each.error.partition(':')[0]}" for each in world.dead)
    return Effects(
        state=plain(state),
        published=dict(published),
        dead=dict(dead),
        handled=_handled(world),
        origins=origins,
        faults=world.faults,
    )


def _handled(world: World) -> list[Tally]:
    return [Tally(Place(name, *position), handler, count) for (name, position, handler), count in world.handled()]
