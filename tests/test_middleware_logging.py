"""Logged: which event, how its attempt ended, how long it took; and nothing of what the event says."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest
from tests.deliveries import kept, raw

from penstock.bus.middleware.logging import Logged
from penstock.errors import UsageError

if TYPE_CHECKING:
    from tests.deliveries import World

    from penstock import Delivery
    from penstock.bus.middleware import Middleware, Proceed


async def delivered(world: World, **fields: Any) -> Delivery[Any]:
    """Return a delivery of a bus; that its consumer is closed meanwhile does not matter to middleware."""
    bus = world.bus()
    await world.publish(bus, b"the secret payload", key="secret key", headers={"token": "secret header"}, **fields)
    async with world.running(bus.consume(raw, "billing"), kept) as running:
        await world.until(lambda: running.taken)
    return running.deliveries[0]


def taking(world: World, seconds: float, error: BaseException | None = None) -> Proceed:
    async def proceed() -> None:
        world.clock.advance(seconds)
        if error is not None:
            raise error

    return proceed


async def test_an_attempt_that_succeeds_is_one_line(world: World, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "penstock.handlers")
    logged: Middleware = Logged(clock=world.clock)
    delivery = await delivered(world)
    await logged(delivery, taking(world, 0.25))
    [record] = caplog.records
    assert record.getMessage() == "billing raw/0@0 penstock.untyped, attempt 1: handled in 0.250 s"
    assert (record.levelno, record.name) == (logging.INFO, "penstock.handlers")


async def test_a_failure_is_a_warning_with_its_kind_and_is_raised(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    delivery = await delivered(world)
    caplog.clear()
    logged = Logged(level=logging.DEBUG, clock=world.clock)
    with pytest.raises(ValueError, match="the secret payload"):
        await logged(delivery, taking(world, 1.5, ValueError("the secret payload is wrong")))
    [record] = caplog.records
    assert record.getMessage() == "billing raw/0@0 penstock.untyped, attempt 1: failed after 1.500 s, ValueError"
    assert record.levelno == logging.WARNING


@pytest.mark.parametrize("error", [None, ValueError("secret"), asyncio.CancelledError("secret")])
async def test_no_line_has_payload_key_headers_or_the_text_of_an_error(
    world: World, caplog: pytest.LogCaptureFixture, error: BaseException | None
) -> None:
    delivery = await delivered(world)
    caplog.set_level(logging.DEBUG)
    caplog.clear()
    with suppress(ValueError, asyncio.CancelledError):
        await Logged(clock=world.clock)(delivery, taking(world, 0, error))
    assert len(caplog.records) == 1
    assert "secret" not in caplog.text
    assert all(record.exc_info is None for record in caplog.records)


async def test_what_was_cancelled_is_no_failure(world: World, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "penstock.handlers")
    delivery = await delivered(world)
    with pytest.raises(asyncio.CancelledError):
        await Logged(level=logging.DEBUG, clock=world.clock)(delivery, taking(world, 2, asyncio.CancelledError()))
    [record] = caplog.records
    assert record.getMessage().endswith("attempt 1: cancelled after 2.000 s")
    assert record.levelno == logging.DEBUG


async def test_retries_and_replays_are_told(world: World, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "penstock.handlers")
    bus = world.bus()
    await world.publish(bus, b"x", b"y")
    logged = Logged(clock=world.clock)

    async def handle(delivery: Delivery[Any]) -> None:
        await logged(delivery, taking(world, 0))
        if delivery.replay or delivery.event.data == b"y":
            await delivery.ack()
        elif delivery.attempt == 1:
            await delivery.nack(delay=0)
        else:
            await delivery.reject()

    async with world.running(bus.consume(raw, "billing"), handle) as running:
        await world.until(lambda: len(running.taken) == 3)
        await world.until(lambda: world.rows("billing", "dead"))
        world.replay("billing")
        await world.until(lambda: len(running.taken) == 4)
    endings = [record.getMessage().partition(", ")[2].partition(":")[0] for record in caplog.records]
    assert endings == ["attempt 1", "attempt 2", "attempt 1", "attempt 1, replay 1"]


async def test_a_logger_and_a_level_of_ones_own(world: World, caplog: pytest.LogCaptureFixture) -> None:
    delivery = await delivered(world)
    caplog.set_level(logging.INFO, "shop")
    caplog.clear()
    mine = logging.getLogger("shop")
    await Logged(mine, clock=world.clock)(delivery, taking(world, 0))
    await Logged(mine, logging.DEBUG, clock=world.clock)(delivery, taking(world, 0))  # is not enabled
    await Logged(mine, logging.ERROR, clock=world.clock)(delivery, taking(world, 0))
    assert [(record.name, record.levelno) for record in caplog.records] == [("shop", 20), ("shop", 40)]


@pytest.mark.parametrize("level", ["INFO", None, True])
def test_a_level_is_a_number(level: Any) -> None:
    with pytest.raises(UsageError, match=r"such as logging\.INFO"):
        Logged(level=level)
