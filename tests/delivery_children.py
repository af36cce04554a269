"""A consumer in a process of its own, for tests that kill, freeze and wake processes; and the other end of it.

It tells every delivery before it handles it, and every settlement once it is on the medium, one JSON value per line.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from penstock import Bus, Topic
from penstock.errors import StaleDelivery, SubscriptionBusy
from penstock.settings import DeliverySettings, FileSettings, Settings

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from penstock.testing.journal import Journal

NAME = "s"
PATIENCE_SECONDS = 40.0

topic = Topic("jobs", bytes, partitions=2)


def settings_of(root: str | Path, lease_seconds: float) -> Settings:
    """Return the settings that all processes of a test share."""
    runtime = os.path.dirname(root)  # noqa: PTH120 - of a text, too
    return Settings(
        url=f"file:{root}",
        file=FileSettings(runtime_directory=runtime),
        delivery=DeliverySettings(lease_seconds=lease_seconds),
    )


# --- the other end ----------------------------------------------------------------------------


class Consuming:
    """A consumer in another process; what it tells is collected, and told to a journal, by a thread."""

    def __init__(self, root: Path, journal: Journal | None = None, log: str = "", **options: Any) -> None:
        arguments = json.dumps({"root": str(root)} | options)
        self._process = subprocess.Popen(
            [sys.executable, __file__, arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.journal = journal
        self._ordered = options.get("mode") != "shared"
        self._log = log
        self._told = threading.Condition()
        self.heard: list[dict[str, Any]] = []
        self._thread = threading.Thread(target=self._listen)
        self._thread.start()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with self._told:
                with suppress(json.JSONDecodeError):  # a killed process may have been in the middle of a line
                    self._note(json.loads(line))
                self._told.notify_all()
        with self._told:
            self.heard.append({"what": "ended"})
            self._told.notify_all()

    def _note(self, fact: dict[str, Any]) -> None:
        self.heard.append(fact)
        if self.journal is None:
            return
        place = (fact.get("partition", 0), fact.get("offset", 0))
        if fact["what"] == "delivered":
            keys = [fact["key"].encode()] if self._ordered else None
            self.journal.delivered(NAME, self._log, *place, [fact["data"].encode()], keys)
        elif fact["what"] == "settled":
            self.journal.settled(NAME, self._log, *place, place[1] + 1, "acked")

    def facts(self, what: str) -> list[dict[str, Any]]:
        """Return what was told of one kind, so far."""
        return [fact for fact in self.heard if fact["what"] == what]

    async def until(self, condition: Callable[[], Any]) -> None:
        """Wait until a condition holds of what was heard."""

        def wait() -> bool:
            with self._told:
                return bool(self._told.wait_for(condition, PATIENCE_SECONDS))

        assert await asyncio.to_thread(wait), f"it did not happen: {self.heard[-20:]}"

    async def hears(self, what: str, count: int = 1) -> list[dict[str, Any]]:
        """Wait for so many facts of a kind, and return them."""
        await self.until(lambda: len(self.facts(what)) >= count)
        return self.facts(what)

    def tell(self, word: str) -> None:
        """Tell it a word."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{word}\n")
        self._process.stdin.flush()

    def signal(self, number: int) -> None:
        """Send it a signal."""
        os.kill(self._process.pid, number)

    async def end(self) -> int:
        """Let it leave, and wait until it has."""
        self.tell("leave")
        code = await asyncio.to_thread(self._process.wait, PATIENCE_SECONDS)
        await asyncio.to_thread(self._thread.join)
        return code

    async def killed(self) -> None:
        """Kill it, and wait until all that it has told is heard."""
        if self._process.poll() is None:
            self.signal(signal.SIGKILL)
        await asyncio.to_thread(self._process.wait)
        await asyncio.to_thread(self._thread.join)

    def dispose(self) -> None:
        """Leave nothing of it behind."""
        if self._process.poll() is None:
            self.signal(signal.SIGKILL)
        self._process.wait()
        self._thread.join()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):
                pipe.close()


# --- the program ------------------------------------------------------------------------------


def told(what: str, **more: Any) -> None:
    """Tell the other end."""
    sys.stdout.write(json.dumps({"what": what, **more}) + "\n")
    sys.stdout.flush()


async def consume(
    *,
    root: str,
    mode: str,
    lease_seconds: float = 60.0,
    consumer_id: str | None = None,
    hold: bool = False,
    deadly: str = "",
) -> None:
    """Consume until told to leave. `hold`: settle nothing before being told to; `deadly`: the payload that kills."""
    go = asyncio.Event()
    if not hold:
        go.set()
    loop = asyncio.get_running_loop()
    options: Any = {"mode": mode, "consumer_id": consumer_id, "heartbeat": "debug"}
    async with Bus(settings=settings_of(root, lease_seconds), topics=[topic]) as bus:
        consumer = bus.consume(topic, NAME, **options)
        try:
            await consumer.__aenter__()
        except SubscriptionBusy as busy:
            told("busy", text=str(busy))
            return

        def listen() -> None:
            for line in sys.stdin:
                if line.strip() == "go":
                    loop.call_soon_threadsafe(go.set)
                else:
                    loop.call_soon_threadsafe(lambda: asyncio.ensure_future(consumer.close()))

        threading.Thread(target=listen, daemon=True).start()
        told("ready", active=consumer.active)
        try:
            async for delivery in consumer:
                await handle(consumer, delivery, go, deadly)
        except StaleDelivery as stale:
            told("replaced", text=str(stale))


async def handle(consumer: Any, delivery: Any, go: asyncio.Event, deadly: str) -> None:
    """Handle one event."""
    event, place = delivery.event, delivery.position
    here = {"partition": place.partition, "offset": place.offset}
    told("delivered", **here, data=event.data.decode(), key=event.key.decode(), attempt=delivery.attempt)
    if event.data.decode() == deadly:
        os.kill(os.getpid(), signal.SIGKILL)
    await go.wait()
    try:
        await delivery.ack()
        await consumer.flush()
        told("settled", **here)
    except StaleDelivery as stale:
        told("stale", **here, text=str(stale))


if __name__ == "__main__":
    asyncio.run(consume(**json.loads(sys.argv[1])))
