"""Deliveries that are repeated, at the same time or after a death, have one effect through `delivery.once`."""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import subprocess
import sys
import textwrap
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.databases import driver
from tests.deliveries import kept, raw
from tests.delivery_children import settings_of

from penstock import Bus, Retry, Topic
from penstock.errors import UsageError

if TYPE_CHECKING:
    from tests.deliveries import World

    from penstock import Delivery

ROOT = Path(__file__).parent.parent


@pytest.fixture
def path(tmp_path: Path) -> Path:
    with closing(sqlite3.connect(tmp_path / "app.db")) as connection:
        connection.execute("CREATE TABLE effects (subscription TEXT NOT NULL, what TEXT NOT NULL)")
        connection.execute("PRAGMA journal_mode = WAL")
    return tmp_path / "app.db"


def effects(path: Path) -> list[tuple[str, str]]:
    with closing(sqlite3.connect(path)) as connection:
        return connection.execute("SELECT * FROM effects ORDER BY rowid").fetchall()


class Handler:
    """A handler with a connection of its own, which remembers whether it was the first."""

    def __init__(self, path: Path, *, ack: bool = True, scope: str | None = None) -> None:
        self.path = path
        self.ack = ack
        self.scope = scope
        self.firsts: list[bool] = []

    def write(self, delivery: Delivery[Any]) -> None:
        with (
            closing(sqlite3.connect(self.path, timeout=60)) as connection,
            delivery.once(connection, scope=self.scope) as first,
        ):
            self.firsts.append(first)
            if first:
                values = (delivery.subscription, delivery.event.data.decode())
                connection.execute("INSERT INTO effects VALUES (?, ?)", values)

    async def __call__(self, delivery: Delivery[Any]) -> None:
        self.write(delivery)
        if self.ack:
            await delivery.ack()


async def consumed(world: World, bus: Bus, topic: Topic[Any], name: str, handler: Handler) -> None:
    """Let a subscription have its first event."""
    async with world.running(bus.consume(topic, name), handler) as running:
        await world.until(lambda: running.taken)


# --- S6: killed after the handler's commit, before the ack ------------------------------------

CONSUMER = """
    import asyncio, os, signal, sqlite3, sys
    from penstock import Bus, Topic
    from tests.delivery_children import settings_of

    async def main(root, path, dies):
        orders = Topic("orders", bytes)
        async with Bus(settings=settings_of(root, 60.0), topics=[orders]) as bus:
            async with bus.consume(orders, "billing", mode="exclusive") as consumer:
                async for delivery in consumer:
                    connection = sqlite3.connect(path)
                    with delivery.once(connection) as first:
                        if first:
                            values = (delivery.subscription, delivery.event.data.decode())
                            connection.execute("INSERT INTO effects VALUES (?, ?)", values)
                    connection.close()
                    print("first" if first else "again", delivery.event.data.decode(), flush=True)
                    if dies:
                        os.kill(os.getpid(), signal.SIGKILL)
                    await delivery.ack()
                    if delivery.event.data == b"last":
                        return

    asyncio.run(main(sys.argv[1], sys.argv[2], sys.argv[3] == "dies"))
"""


async def test_killed_after_the_commit_and_before_the_ack_it_is_redelivered_and_has_one_effect(
    root: Path, path: Path
) -> None:
    def consume(end: str) -> tuple[int, list[str]]:
        command = [sys.executable, "-c", textwrap.dedent(CONSUMER), str(root), str(path), end]
        environment = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)
        return done.returncode, done.stdout.splitlines()

    orders = Topic("orders", bytes)
    async with Bus(settings=settings_of(root, 60.0), topics=[orders]) as bus:
        await bus.publish_batch(orders, [b"one", b"last"])
    assert await asyncio.to_thread(consume, "dies") == (-signal.SIGKILL, ["first one"])
    assert effects(path) == [("billing", "one")]
    assert await asyncio.to_thread(consume, "lives") == (0, ["again one", "first last"])
    assert effects(path) == [("billing", "one"), ("billing", "last")]


async def test_what_a_killed_consumer_had_handled_comes_again_and_has_no_effect_again(world: World, path: Path) -> None:
    before, after = world.bus(), world.bus()
    await world.publish(before, b"a", b"b", key="k")
    unacked = Handler(path, ack=False)
    async with world.running(before.consume(raw, "billing", mode="failover"), unacked) as running:
        await world.until(lambda: running.taken)
        await world.kill(before, running)
    again = Handler(path)
    async with world.running(after.consume(raw, "billing", mode="failover"), again) as running:
        await world.until(lambda: len(running.taken) == 2)
    assert (unacked.firsts, again.firsts) == ([True], [False, True])
    assert effects(path) == [("billing", "a"), ("billing", "b")]


# --- S16: at the same time, and to several subscriptions --------------------------------------


async def test_duplicates_that_are_delivered_at_the_same_time_have_one_effect(world: World, path: Path) -> None:
    bus = world.bus()
    for key in "abcdefgh":  # of other keys, so that nothing waits for anything
        await world.publish(bus, b"paid", key=key, id="payment-1", source="bank")
    handler = Handler(path)
    async with world.running(bus.consume(raw, "billing"), kept) as running:
        await world.until(lambda: len(running.taken) == 8)
        await asyncio.gather(*(asyncio.to_thread(handler.write, delivery) for delivery in running.deliveries))
    assert sorted(handler.firsts) == [False] * 7 + [True]
    assert effects(path) == [("billing", "paid")]


async def test_every_subscription_has_its_own_effect(world: World, path: Path) -> None:
    bus = world.bus()
    await world.publish(bus, b"a")
    for name in ("billing", "mails"):
        await consumed(world, bus, raw, name, Handler(path))
    assert effects(path) == [("billing", "a"), ("mails", "a")]


async def test_subscriptions_of_one_name_in_two_topics_are_two(world: World, path: Path) -> None:
    bus = world.bus()
    handler = Handler(path)
    for topic in (raw, Topic("wide", bytes, partitions=4)):
        await world.publish(bus, b"a", topic=topic, id="e-1", source="bank")
        await consumed(world, bus, topic, "billing", handler)
    assert handler.firsts == [True, True]


async def test_subscriptions_that_share_a_scope_share_the_effect(world: World, path: Path) -> None:
    bus = world.bus()
    await world.publish(bus, b"a")
    handler = Handler(path, scope="the one effect")
    for name in ("billing", "mails"):
        await consumed(world, bus, raw, name, handler)
    assert handler.firsts == [True, False]
    assert effects(path) == [("billing", "a")]


# --- one identity, however it comes -----------------------------------------------------------


async def test_an_event_is_itself_when_it_is_parked_and_when_it_comes_back_from_the_dead(
    world: World, path: Path
) -> None:
    bus = world.bus()
    await world.publish(bus, b"a", key="k")
    identities = []
    handler = Handler(path, ack=False)

    async def handle(delivery: Delivery[Any]) -> None:
        identities.append(delivery.identity)
        handler.write(delivery)
        if delivery.replay:
            await delivery.ack()
        elif delivery.attempt == 2:
            await delivery.reject("no more of it")
        else:
            await delivery.nack(delay=30)  # so late that it is kept aside

    async with world.running(bus.consume(raw, "billing", retry=Retry(max_retries=5)), handle) as running:
        await world.until(lambda: len(running.taken) == 1)
        await world.until(lambda: world.rows("billing", "waiting"))
        await world.until(lambda: len(running.taken) == 2)
        await world.until(lambda: world.rows("billing", "dead"))
        assert world.replay("billing") == 1
        await world.until(lambda: len(running.taken) == 3)
    assert [taken.replay for taken in running.taken] == [0, 0, 1]
    assert len(set(identities)) == 1
    assert handler.firsts == [True, False, False]


async def test_identity_is_the_subscription_and_the_events_source_and_id(world: World) -> None:
    bus = world.bus()
    await world.publish(bus, b"a", id="e-1", source="bank")
    await world.publish(bus, b"b")
    async with world.running(bus.consume(raw, "billing")) as running:
        await world.until(lambda: len(running.taken) == 2)
    stated, derived = (delivery.identity for delivery in running.deliveries)
    assert stated == ("raw/billing", "bank", "e-1")
    assert derived == ("raw/billing", "penstock:raw", running.deliveries[1].event.id)


async def test_an_asynchronous_handler_writes_once(world: World, path: Path) -> None:
    bus = world.bus()
    await world.publish(bus, b"a", b"a", id="e-1")
    with closing(driver("pyformat").AsyncConnection(path)) as connection:
        async with world.running(bus.consume(raw, "billing"), kept) as running:
            await world.until(lambda: running.taken)
            firsts = []
            for _ in range(2):
                async with running.deliveries[0].once(connection) as first:
                    firsts.append(first)
    assert firsts == [True, False]


async def test_a_wrong_connection_is_refused_when_once_is_called(world: World) -> None:
    bus = world.bus()
    await world.publish(bus, b"a")
    async with world.running(bus.consume(raw, "billing"), kept) as running:
        await world.until(lambda: running.taken)
        with pytest.raises(UsageError, match="DB-API connection"):
            running.deliveries[0].once("app.db")
