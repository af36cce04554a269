"""Scenes with two processes that consume one subscription, where a life would show a bug only with much luck."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

from penstock.bus.bus import Bus
from penstock.bus.topic import Topic
from penstock.clock import VirtualClock
from penstock.stores.memory import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from penstock.bus.delivered import Delivery

STEP_SECONDS: Final = 0.1
PATIENCE_SECONDS: Final = 30.0


def late_commit(mode: str) -> Callable[[], str | None]:
    """Freeze a process while it writes its progress, until another one has what it had; then let it go on."""
    return lambda: asyncio.run(_late_commit(mode))


async def _late_commit(mode: Any) -> str | None:
    clock, topic = VirtualClock(), Topic("t", bytes)
    store = MemoryStore(clock=clock)
    frozen, other = (Bus("memory:", topics=[topic], store=store, clock=clock) for _ in range(2))

    async def ended(work: Awaitable[Any]) -> Any:
        task = asyncio.ensure_future(work)
        end = clock.monotonic() + PATIENCE_SECONDS
        while not task.done():
            assert clock.monotonic() < end, "the scene does not go on"
            await clock.advance_async(STEP_SECONDS, turns=20)
        return task.result()

    async def taken(bus: Bus) -> Delivery[bytes]:
        delivery: Delivery[bytes] = await anext(aiter(bus.consume(topic, "s", mode=mode)))
        return delivery

    await ended(frozen.publish(topic, b"0", key=b"k"))
    late = await ended(taken(frozen))
    thawed, answers = _freeze(frozen)
    await late.ack()
    await (await ended(taken(other))).ack()
    await ended(other.close())
    thawed.set()
    while not answers:
        await clock.advance_async(STEP_SECONDS, turns=20)
    await ended(frozen.close())
    store.close()
    return None if all(answers) else "progress was taken of a process whose events another one had by then"


def _freeze(bus: Bus) -> tuple[asyncio.Event, list[Any]]:
    """Let no call of a bus reach the store until an event is set; return that, and what its commits are answered."""
    backend: Any = bus._make_backend()  # noqa: SLF001 - a process is its calls of the store
    call, thawed, answers = backend.call, asyncio.Event(), list[Any]()

    async def frozen(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        await thawed.wait()
        answer = await call(function, *arguments, **options)
        if function.__name__ == "_commit":
            answers.extend(answer)
        return answer

    backend.call = frozen
    return thawed, answers
