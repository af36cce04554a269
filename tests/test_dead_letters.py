"""The promises of `bus.dead_letters`: what is shown, what a filter means, what comes back, what goes."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import pytest
from tests.deliveries import World, acked, raw, wide

import penstock
from penstock import Bus, Event, Position, Topic
from penstock.bus import dead_letters
from penstock.bus.deliveries import Retry
from penstock.clock import us_to_datetime
from penstock.errors import DecodeError, UnknownSubscription, UnknownTopic, UsageError
from penstock.rows import Commit, Parked, Shard, Subscription


@penstock.event("letters.order")
@dataclass(frozen=True)
class Order:
    id: str
    total: int


orders = Topic("orders", Order, key=lambda order: order.id)


class Refused(Exception):
    """What the handlers of these tests raise."""


def charge(data: bytes) -> None:
    raise Refused(f"order {data.decode()} was refused by 10.0.0.{len(data)}")


async def failing(delivery: Any) -> None:
    """Handle a delivery as an application does: what is raised becomes the reason."""
    try:
        if delivery.event.data.startswith(b"bad"):
            charge(delivery.event.data)
    except Refused as error:
        await delivery.nack(reason=error)
    else:
        await delivery.ack()


async def with_dead(world: World, bus: Bus, *payloads: bytes, name: str = "s", topic: Topic[Any] = raw) -> None:
    """Publish events, each with a key of its own, and let a subscription give up on those that are bad."""
    for payload in payloads:
        await world.publish(bus, payload, topic=topic, key=payload)
    consumer = bus.consume(topic, name, mode="exclusive", retry=Retry(max_retries=0))
    async with world.running(consumer, failing) as running:
        await world.until(lambda: len(running.taken) == len(payloads))


async def opened(world: World) -> Bus:
    """Return a bus whose topics are there."""
    bus = world.bus()
    await bus.subscriptions(raw)
    return bus


def parked(world: World, *rows: dict[str, Any], name: str = "s", topic: Topic[Any] = wide) -> None:
    """Park rows of a subscription that nobody consumes."""
    info, store = world.info(topic), world.store.whole
    store.cursors.put_subscription(Subscription(log_id=info.log_id, name=name, mode="exclusive"))
    made = []
    for row in rows:
        said: dict[str, Any] = {"state": "dead", "lane": 0, "event": Event(data=b"x"), "partition": 0}
        said |= {"parked_at": world.clock.time_us(), **row}
        made.append(Parked(shard=Shard(info.log_id, name, 0, said.pop("partition")), **said))
    assert store.cursors.commit([Commit(parked=tuple(made))]) == [None]


def states(world: World, name: str = "s", topic: Topic[Any] = wide) -> dict[tuple[int, int], str]:
    return {(row.shard.partition, row.offset): row.state for row in world.rows(name, topic=topic)}


def places(letters: list[penstock.DeadLetter]) -> list[tuple[int, int]]:
    return [(letter.position.partition, letter.position.offset) for letter in letters]


# --- looking ----------------------------------------------------------------------------------


async def test_exhausted_retries_leave_a_dead_letter_with_provenance_and_the_traceback(world: World) -> None:
    bus = world.bus()
    before = us_to_datetime(world.clock.time_us())
    await with_dead(world, bus, b"good", b"bad 1", b"fine")
    [letter] = await bus.dead_letters.ls(raw, "s")
    assert (letter.topic, letter.subscription, letter.position) == ("raw", "s", Position("raw", 0, 1))
    assert (letter.state, letter.attempts, letter.replay, letter.job) == ("dead", 1, 0, "")
    assert (letter.error_type, letter.error_message) == ("Refused", "order bad 1 was refused by 10.0.0.5")
    assert letter.error_trace.startswith("Traceback (most recent call last):\n")
    assert "in failing\n" in letter.error_trace
    assert "in charge\n" in letter.error_trace
    assert "bad 1" not in letter.error_trace
    assert (letter.value, letter.event.key) == (b"bad 1", b"bad 1")
    assert before <= letter.parked_at <= letter.failed_at <= us_to_datetime(world.clock.time_us())
    shown = await bus.dead_letters.show(raw, "s", 1)
    assert shown.event == letter.event
    assert shown.origin.id == f"{shown.origin.producer}-{shown.origin.sequence}"
    assert shown.origin.source == "penstock:raw"
    assert shown.origin.appended_at is not None
    assert before <= shown.origin.appended_at <= letter.parked_at
    # And the others went on.
    assert world.outcomes("s") == {"acked": [0, 2], "dead": [1]}
    for secret in ("bad 1", "10.0.0.5", "Traceback"):
        assert secret not in repr(shown)


async def test_a_traceback_outlives_retries_aside_and_goes_with_a_failure_that_has_none(world: World) -> None:
    bus = world.bus()
    await world.publish(bus, b"bad", key="k")
    reasons: list[str | Exception] = [ValueError("never raised"), "words"]

    async def handle(delivery: Any) -> None:
        if delivery.attempt == 1:
            await failing(delivery)
        else:
            await delivery.nack(reason=reasons.pop(0))

    retry = Retry(max_retries=2, delay=20, jitter=0)
    async with world.running(bus.consume(raw, "s", mode="exclusive", retry=retry), handle) as running:
        await world.until(lambda: len(running.taken) == 1)
        await running.consumer.flush()
        [letter] = await bus.dead_letters.ls(raw, "s", states=["waiting"])
        assert "in charge\n" in letter.error_trace
        await world.until(lambda: len(running.taken) == 2)
        await running.consumer.flush()
        [letter] = await bus.dead_letters.ls(raw, "s", states=["waiting"])
        assert (letter.error_type, letter.error_message, letter.error_trace) == ("ValueError", "never raised", "")
        await world.until(lambda: len(running.taken) == 3)
        await running.consumer.flush()
        [letter] = await bus.dead_letters.ls(raw, "s")
        assert (letter.error_message, letter.error_trace, letter.attempts) == ("words", "", 3)


async def test_a_value_is_decoded_when_it_is_asked_for_and_what_cannot_be_is_shown_raw(world: World) -> None:
    bus = world.bus(orders)
    await bus.publish(orders, Order("a", 5))
    await bus.publish(orders, Event(type="letters.order", data=b"\xff{"))

    async def decoding(delivery: Any) -> None:
        try:
            await delivery.reject(f"refused {delivery.value.total}")
        except DecodeError as error:
            await delivery.reject(error)

    async with world.running(bus.consume(orders, "s", mode="exclusive"), decoding) as running:
        await world.until(lambda: len(running.taken) == 2)
    sound, broken = await bus.dead_letters.ls(orders, "s")
    assert (sound.value, sound.error_message) == (Order("a", 5), "refused 5")
    assert (broken.error_type, broken.event.data) == ("DecodeError", b"\xff{")
    assert "in decode\n" in broken.error_trace
    with pytest.raises(DecodeError):
        _ = broken.value
    # Whoever does not know the class sees bytes.
    undeclared = world.bus(raw)
    [first, _] = await undeclared.dead_letters.ls("orders", "s")
    assert json.loads(first.value) == {"id": "a", "total": 5}


async def test_letters_are_paged_by_position_in_the_states_that_are_asked_for(world: World) -> None:
    bus = await opened(world)
    parked(world, *({"partition": part, "offset": offset} for part in (0, 1) for offset in range(5)))
    parked(world, {"partition": 2, "offset": 0, "state": "waiting"}, {"partition": 3, "offset": 0, "state": "done"})
    every = [(part, offset) for part in (0, 1) for offset in range(5)]
    assert places(await bus.dead_letters.ls(wide, "s")) == every
    after: Position | None = None
    paged: list[tuple[int, int]] = []
    while page := await bus.dead_letters.ls(wide, "s", after=after, limit=3):
        assert len(page) <= 3
        paged += places(page)
        after = page[-1].position
    assert paged == every
    assert places(await bus.dead_letters.ls(wide, "s", states=["waiting", "done"])) == [(2, 0), (3, 0)]
    assert await bus.dead_letters.count(wide, "s") == 10
    assert await bus.dead_letters.count(wide, "s", states=["done"]) == 1


async def test_a_letter_is_shown_in_every_state_and_after_the_log_has_let_go_of_it(world: World) -> None:
    bus = world.bus()
    await world.publish(bus, *[b"%d" % number * 500 for number in range(40)])
    parked(world, {"offset": 3}, {"offset": 4, "state": "waiting"}, topic=raw)
    assert (await bus.dead_letters.show(raw, "s", 3)).origin.appended_at is not None
    assert (await bus.dead_letters.show(raw, "s", 4)).state == "waiting"
    assert world.store.whole.log.trim(world.info().partitions[0], 39, force=True) > 4
    letter = await bus.dead_letters.show(raw, "s", 3, partition=0)
    assert (letter.event.data, letter.origin.appended_at) == (b"x", None)
    with pytest.raises(UsageError, match="has no dead letter at raw/0@7"):
        await bus.dead_letters.show(raw, "s", 7)


def moment(world: World, seconds: float) -> datetime:
    return us_to_datetime(world.clock.time_us()) + timedelta(seconds=seconds)


async def test_every_filter_counts_for_looking_replaying_and_purging(world: World) -> None:
    bus = await opened(world)
    now = world.clock.time_us()
    trace = 'Traceback:\n  File "a.py", line 1, in f\n'
    rows: list[dict[str, Any]] = [
        {"offset": 0, "error_type": "KeyError", "error_message": "no order 17", "event": Event(key=b"a")},
        {"offset": 1, "error_type": "KeyError", "error_message": "no order 23", "parked_at": now + 10_000_000},
        {"offset": 2, "error_type": "ValueError", "error_message": "no order 23", "event": Event(key=b"b")},
        {"offset": 3, "error_type": "ValueError", "error_trace": trace, "partition": 1},
        {
            "offset": 0,
            "error_type": "ValueError",
            "error_message": "same place",
            "partition": 1,
            "event": Event(key=b"a"),
        },
    ]
    cause = penstock.failures.fingerprint
    cases: list[tuple[dict[str, Any], list[tuple[int, int]]]] = [
        ({}, [(0, 0), (0, 1), (0, 2), (1, 0), (1, 3)]),
        ({"error": "KeyError"}, [(0, 0), (0, 1)]),
        ({"fingerprint": cause("KeyError", "no order 99")}, [(0, 0), (0, 1)]),
        ({"fingerprint": cause("ValueError", "whatever", trace)}, [(1, 3)]),
        ({"contains": "order 23"}, [(0, 1), (0, 2)]),
        ({"partition": 1}, [(1, 0), (1, 3)]),
        ({"partition": 0, "offsets": [0, 2, 9]}, [(0, 0), (0, 2)]),
        ({"key": "a"}, [(0, 0), (1, 0)]),
        ({"key": b"a", "partition": 1}, [(1, 0)]),
        ({"since": moment(world, 10)}, [(0, 1)]),
        ({"until": moment(world, 10)}, [(0, 0), (0, 2), (1, 0), (1, 3)]),
        ({"until": moment(world, 10), "key": "a", "error": "ValueError"}, [(1, 0)]),
        ({"contains": "nothing says so"}, []),
        ({"error": None, "key": None, "partition": 1}, [(1, 0), (1, 3)]),
    ]
    for where, expected in cases:
        parked(world, *rows)
        assert places(await bus.dead_letters.ls(wide, "s", **where)) == expected, where
        assert await bus.dead_letters.count(wide, "s", **where) == len(expected), where
        assert sum(group.count for group in await bus.dead_letters.groups(wide, "s", **where)) == len(expected), where
        replayed = await bus.dead_letters.replay(wide, "s", **where)
        assert (replayed.matched, replayed.replayed) == (len(expected), len(expected)), where
        waiting = [place for place, state in states(world).items() if state == "waiting"]
        assert sorted(waiting) == expected, where
        parked(world, *rows)
        assert await bus.dead_letters.purge(wide, "s", **where) == len(expected), where
        assert sorted(states(world)) == sorted({(0, 0), (0, 1), (0, 2), (1, 0), (1, 3)} - set(expected)), where


@pytest.mark.parametrize(
    ("where", "said"),
    [
        ({"errror": "KeyError"}, "no filter 'errror'; did you mean 'error'?"),
        ({"offsets": [1]}, "say which `partition` the offset is of"),
        ({"offsets": [-1], "partition": 0}, "at least 0"),
        ({"offsets": [2**63], "partition": 0}, "as positions have them"),
        ({"offsets": range(100_001), "partition": 0}, "at most 100,000 offsets"),
        ({"partition": 4}, "the partitions 0 to 3, not 4"),
        ({"since": datetime(2026, 1, 1)}, "no time zone"),  # noqa: DTZ001 - which is the point
    ],
)
async def test_a_wrong_filter_is_an_error_and_changes_nothing(world: World, where: dict[str, Any], said: str) -> None:
    bus = await opened(world)
    parked(world, {"offset": 1})
    for call in (bus.dead_letters.ls, bus.dead_letters.groups, bus.dead_letters.replay, bus.dead_letters.purge):
        with pytest.raises(UsageError) as caught:
            await call(wide, "s", **where)
        assert said in str(caught.value)
    assert states(world) == {(0, 1): "dead"}


async def test_wrong_calls_are_errors(world: World) -> None:
    bus = await opened(world)
    parked(world, {"offset": 1})
    letters = bus.dead_letters
    with pytest.raises(UnknownSubscription):
        await letters.ls(wide, "nobody")
    with pytest.raises(UnknownTopic, match="did you mean 'wide'"):
        await letters.ls("wid", "s")
    with pytest.raises(UsageError, match="1 to 1,000"):
        await letters.ls(wide, "s", limit=1_001)
    with pytest.raises(UsageError, match="not sleeping"):
        await letters.ls(wide, "s", states=["sleeping"])  # type: ignore[list-item]
    with pytest.raises(UsageError, match="which `partition`"):
        await letters.show(wide, "s", 1)
    for rate in (0, -1, float("nan"), float("inf")):
        with pytest.raises(UsageError, match="events a second"):
            await letters.replay(wide, "s", rate=rate)
    with pytest.raises(UsageError, match="a `job` or a filter"):
        await letters.replay(wide, "s", job="a job", error="KeyError")
    with pytest.raises(UsageError, match="of which topic"):
        await letters.stats(name="s")
    assert states(world) == {(0, 1): "dead"}


# --- groups and stats -------------------------------------------------------------------------


async def test_letters_with_the_same_cause_are_one_group_though_their_messages_differ(world: World) -> None:
    bus = world.bus()
    await with_dead(world, bus, b"bad 17", b"good", b"bad 4711", b"bad 5")
    parked(world, {"offset": 3, "error_type": "Oops", "error_message": "it 'x' failed"}, topic=raw)
    first, second = await bus.dead_letters.groups(raw, "s")
    assert (first.count, first.error_type, second.count, second.error_type) == (2, "Refused", 1, "Oops")
    assert first.message == "order bad 4711 was refused by 10.0.0.8"
    assert first.sample == Position("raw", 0, 2)
    assert first.first <= first.last
    letters = await bus.dead_letters.ls(raw, "s", fingerprint=first.fingerprint)
    assert [letter.position.offset for letter in letters] == [0, 2]
    assert "4711" not in repr(first)


async def test_groups_and_stats_stream_pages_and_are_bounded(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    bus = await opened(world)
    monkeypatch.setattr(dead_letters, "PAGE_ROWS", 7)
    monkeypatch.setattr(dead_letters, "GROUPS_MAX", 3)
    parked(world, *({"offset": number, "error_type": f"E{number % 5}"} for number in range(50)))
    limits: list[int] = []

    def limited(page: Any, *args: Any, limit: int, **options: Any) -> Any:
        limits.append(limit)
        return page(*args, limit=limit, **options)

    await world.settle()  # what a bus does when it opens is over
    world.store.hooks["parked.page"] = limited
    groups = await bus.dead_letters.groups(wide, "s")
    assert [(group.count, bool(group.fingerprint)) for group in groups] == [(10, True)] * 3 + [(20, False)]
    [stats] = await bus.dead_letters.stats(wide)
    assert (stats.dead, stats.errors) == (50, {"…": 20, "E0": 10, "E1": 10, "E2": 10})
    assert set(limits) == {7}


async def test_stats_count_every_subscription_by_state_and_error(world: World) -> None:
    bus = await opened(world)
    now = world.clock.time_us()
    parked(
        world,
        {"offset": 0, "error_type": "KeyError", "parked_at": now, "last_retry_at": now + 5_000_000},
        {"offset": 1, "error_type": "KeyError", "parked_at": now + 1_000_000},
        {"offset": 2, "error_type": "ValueError", "parked_at": now + 2_000_000},
        {"offset": 3, "state": "waiting", "parked_at": now - 1_000_000},
        {"offset": 4, "state": "done", "parked_at": now - 1_000_000},
    )
    parked(world, name="other", topic=raw)
    found = await bus.dead_letters.stats()
    assert [(each.topic, each.subscription, each.dead, each.waiting, each.done) for each in found] == [
        ("raw", "other", 0, 0, 0),
        ("wide", "s", 3, 1, 1),
    ]
    assert (found[0].oldest, found[0].newest, found[0].errors) == (None, None, {})
    assert (found[1].oldest, found[1].newest) == (moment(world, 0), moment(world, 5))
    assert list(found[1].errors.items()) == [("KeyError", 2), ("ValueError", 1)]
    assert await bus.dead_letters.stats(wide) == await bus.dead_letters.stats(wide, "s") == found[1:]


# --- replaying --------------------------------------------------------------------------------


async def test_a_replayed_letter_comes_to_its_subscription_only_at_its_position_marked_and_moves_no_cursor(
    world: World,
) -> None:
    bus = world.bus()
    await with_dead(world, bus, b"good", b"bad 1", b"bad 2", b"fine")
    async with (
        world.running(bus.consume(raw, "s", mode="exclusive"), acked) as running,
        world.running(bus.consume(raw, "peer", mode="exclusive"), acked) as peer,
    ):
        await world.until(lambda: len(peer.taken) == 4)
        await peer.consumer.flush()
        before = world.cursor("s")
        result = await bus.dead_letters.replay(raw, "s", offsets=[1])
        assert (result.matched, result.replayed) == (1, 1)
        await world.until(lambda: len(running.taken) == 1)
        await running.consumer.flush()
        await world.run(5)
        # Partition, offset, data, attempt, replay.
        assert [taken[:5] for taken in running.taken] == [(0, 1, b"bad 1", 1, 1)]
        assert len(peer.taken) == 4
        assert world.cursor("s").next_offset == before.next_offset == 4
        done = await bus.dead_letters.show(raw, "s", 1)
        assert (done.state, done.replay) == ("done", 1)
        [left] = await bus.dead_letters.ls(raw, "s")
        assert (left.position.offset, left.replay) == (2, 0)


async def test_a_letter_that_fails_again_is_dead_again_with_its_new_error(world: World) -> None:
    bus = world.bus()
    await with_dead(world, bus, b"bad 1")
    await world.run(60)

    async def worse(delivery: Any) -> None:
        await delivery.reject("it is no better")

    async with world.running(bus.consume(raw, "s", mode="exclusive"), worse) as running:
        await bus.dead_letters.replay(raw, "s")
        await world.until(lambda: len(running.taken) == 1)
        await running.consumer.flush()
    [letter] = await bus.dead_letters.ls(raw, "s")
    assert (letter.replay, letter.error_message, letter.error_trace) == (1, "it is no better", "")
    assert letter.failed_at - letter.parked_at >= timedelta(seconds=60)


async def test_a_dry_run_names_exactly_the_letters_that_its_job_brings_back_each_once(world: World) -> None:
    bus = await opened(world)
    parked(world, *({"offset": number, "error_message": "a cause"} for number in range(5)))
    preview = await bus.dead_letters.replay(wide, "s", contains="a cause", dry_run=True)
    assert (preview.matched, preview.replayed) == (5, 0)
    assert set(states(world).values()) == {"dead"}
    parked(world, {"offset": 9, "error_message": "a cause"})  # after the preview: not part of it
    assert await bus.dead_letters.purge(wide, "s", offsets=[4], partition=0) == 1
    # Another process does it, and repeats it.
    other = world.bus()
    done = await other.dead_letters.replay("wide", "s", job=preview.job)
    assert (done.job, done.matched, done.replayed) == (preview.job, 4, 4)
    assert states(world) == {(0, 0): "waiting", (0, 1): "waiting", (0, 2): "waiting", (0, 3): "waiting", (0, 9): "dead"}
    [row] = [row for row in world.rows("s", topic=wide) if row.offset == 2]
    park_again = Parked(
        shard=row.shard, offset=2, state="dead", lane=0, event=row.event, replay=row.replay, job=row.job
    )
    assert world.store.whole.cursors.commit([Commit(parked=(park_again,))]) == [None]
    again = await bus.dead_letters.replay(wide, "s", job=preview.job)
    assert (again.matched, again.replayed) == (0, 0)
    assert states(world)[0, 2] == "dead"


async def test_a_replay_at_a_rate_brings_back_no_more_than_that_each_second(world: World) -> None:
    bus = await opened(world)
    parked(world, *({"offset": number} for number in range(10)))

    def waiting() -> int:
        return list(states(world).values()).count("waiting")

    replay = asyncio.ensure_future(bus.dead_letters.replay(wide, "s", rate=2))
    await world.settle()
    begun = world.clock.monotonic()
    seen = []
    while not replay.done():
        seen.append((world.clock.monotonic() - begun, waiting()))
        await world.run(0.25)
    assert replay.result().replayed == waiting() == 10
    assert seen == [(0.25 * step, step // 2 + 1) for step in range(18)]


async def test_a_replay_at_a_rate_is_not_caught_by_what_dies_again_meanwhile(world: World) -> None:
    bus = world.bus()
    await with_dead(world, bus, *(b"bad %d" % number for number in range(6)))

    async with world.running(bus.consume(raw, "s", mode="exclusive"), failing) as running:
        result = await world.done(bus.dead_letters.replay(raw, "s", rate=1))
        assert (result.matched, result.replayed) == (6, 6)
        await world.until(lambda: len(running.taken) == 6)
        await running.consumer.flush()
    assert {letter.replay for letter in await bus.dead_letters.ls(raw, "s")} == {1}


async def test_a_replay_that_was_cut_off_goes_on_by_its_job(world: World) -> None:
    bus = await opened(world)
    parked(world, *({"offset": number} for number in range(10)))
    cut = asyncio.ensure_future(bus.dead_letters.replay(wide, "s", rate=1))
    await world.run(3.5)
    cut.cancel()
    await asyncio.wait([cut])
    [job] = {letter.job for letter in await bus.dead_letters.ls(wide, "s")}
    parked(world, {"offset": 20})
    result = await bus.dead_letters.replay(wide, "s", job=job)
    assert (result.matched, result.replayed) == (6, 6)
    assert [place for place, state in states(world).items() if state == "dead"] == [(0, 20)]


@pytest.mark.parametrize("together", [100, 1_000])
@pytest.mark.parametrize("where", [{}, {"contains": "again"}], ids=["by the store", "row by row"])
async def test_a_filter_that_matches_more_than_a_page_acts_on_all(
    world: World, monkeypatch: pytest.MonkeyPatch, where: dict[str, Any], together: int
) -> None:
    monkeypatch.setattr(dead_letters, "ROWS_TOGETHER", together)
    bus = await opened(world)
    count = 3 * dead_letters.PAGE_ROWS + 1
    rows = [{"partition": number % 2, "offset": number, "error_message": "again"} for number in range(count)]
    parked(world, *rows, {"offset": 9_999, "state": "waiting", "error_message": "again"})
    assert await bus.dead_letters.count(wide, "s", **where) == count
    assert (await bus.dead_letters.replay(wide, "s", **where)).replayed == count
    assert set(states(world).values()) == {"waiting"}
    parked(world, *rows)
    assert await bus.dead_letters.purge(wide, "s", **where) == count
    assert states(world) == {(0, 9_999): "waiting"}


async def test_more_than_one_transaction_of_letters_comes_back(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dead_letters, "ROWS_TOGETHER", 4)
    bus = await opened(world)
    for count in (8, 9):
        parked(world, *({"offset": number} for number in range(count)))
        assert (await bus.dead_letters.replay(wide, "s")).replayed == count


# --- purging ----------------------------------------------------------------------------------


async def test_a_purge_never_removes_what_waits(world: World) -> None:
    bus = await opened(world)
    parked(world, {"offset": 1}, {"offset": 2, "state": "waiting"}, {"offset": 3, "state": "done"})
    assert await bus.dead_letters.purge(wide, "s", partition=0, offsets=[2]) == 0
    assert await bus.dead_letters.purge(wide, "s") == 2
    assert states(world) == {(0, 2): "waiting"}


async def test_a_letter_that_was_replayed_between_the_look_and_the_purge_stays(world: World) -> None:
    bus = await opened(world)
    parked(world, {"offset": 1, "error_message": "late"}, {"offset": 2, "error_message": "late"})
    whole = world.store.whole

    def replayed_first(purge: Any, rows: Any) -> Any:
        info = world.info(wide)
        only = penstock.rows.ParkedFilter(log_id=info.log_id, subscription="s", offsets=frozenset({1}))
        assert whole.parked.replay(only, 0) == 1
        return purge(rows)

    world.store.hooks["parked.purge"] = replayed_first
    assert await bus.dead_letters.purge(wide, "s", contains="late") == 1
    assert states(world) == {(0, 1): "waiting"}
