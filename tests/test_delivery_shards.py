"""`key_shared` and `shared` over four real processes that come, go, are killed, frozen and woken up, under load."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.delivery_children import Consuming
from tests.test_delivery_processes import Scene

KEYS = 50
"""So many that each process has some, whichever slots it has."""


@pytest.fixture
def scene(root: Path) -> Iterator[Scene]:
    made = Scene(root)
    yield made
    made.dispose()


both = pytest.mark.parametrize("mode", ["key_shared", "shared"])


async def shared(*children: Consuming) -> None:
    """Wait until each of these processes was given something."""
    for child in children:
        await child.hears("delivered")


@both
async def test_four_processes_share_a_subscription_and_come_and_go_under_load(scene: Scene, mode: str) -> None:
    await scene.publish(20)
    first = scene.start(mode=mode)
    await first.hears("settled", 5)
    load = asyncio.ensure_future(scene.publish(1_500, 20, keys=KEYS))
    others = [scene.start(mode=mode) for _ in range(3)]
    for child in others:
        await child.hears("ready")
    await shared(*others)
    assert await first.end() == 0
    late = scene.start(mode=mode)
    await late.hears("ready")
    await load
    assert await scene.drained(*others, late)
    for child in (*others, late):
        assert await child.end() == 0
    assert scene.outcomes() == {"acked": 1_520}
    assert scene.verdict() == []
    # Nobody was killed, so that nothing came twice.
    assert sum(len(child.facts("delivered")) for child in (first, *others, late)) == 1_520


@both
async def test_the_part_of_a_killed_process_is_taken_over_at_once(scene: Scene, mode: str) -> None:
    await scene.publish(7)
    children = [scene.start(mode=mode) for _ in range(4)]
    for child in children:
        await child.hears("ready")
    load = asyncio.ensure_future(scene.publish(1_000, 7, keys=KEYS))
    victim, *others = children
    await shared(*children)
    await victim.killed()
    begun = time.monotonic()
    keys = {fact["key"] for fact in victim.facts("delivered")}
    before = {child: len(child.facts("delivered")) for child in others}

    async def goes_on(child: Consuming) -> None:
        await child.until(lambda: keys & {fact["key"] for fact in child.facts("delivered")[before[child] :]})

    _, waiting = await asyncio.wait(
        [asyncio.ensure_future(goes_on(child)) for child in others], return_when="FIRST_COMPLETED"
    )
    print(f"\ntakeover after a kill: {time.monotonic() - begun:.2f} s")  # noqa: T201 - a figure for people
    for task in waiting:
        task.cancel()
    await load
    assert await scene.drained(*children[1:])
    for child in children[1:]:
        assert await child.end() == 0
    assert scene.outcomes() == {"acked": 1_007}
    assert scene.verdict() == []


@both
async def test_a_frozen_process_loses_its_part_and_is_refused_when_it_wakes_up(scene: Scene, mode: str) -> None:
    await scene.publish(70)
    frozen = scene.start(mode=mode, lease_seconds=1.0, hold=True)
    held = await frozen.hears("delivered")
    other = scene.start(mode=mode, lease_seconds=1.0)
    await other.hears("ready")
    await scene.freeze(frozen)
    begun = time.monotonic()
    assert await scene.drained(other)
    print(f"\ntakeover after a freeze, with a lease of 1 s: {time.monotonic() - begun:.2f} s")  # noqa: T201 - a figure for people
    frozen.journal = None  # what it had fetched before, it may handle before it learns that it was replaced
    frozen.tell("go")
    frozen.signal(signal.SIGCONT)
    stale = await frozen.hears("stale")
    assert (stale[0]["partition"], stale[0]["offset"]) == (held[0]["partition"], held[0]["offset"])
    assert frozen.facts("settled") == []
    # It has its part again, and does it.
    count = len(frozen.facts("delivered"))
    frozen.journal = scene.journal
    await scene.publish(140, 70, keys=KEYS)
    assert await scene.drained(frozen, other)
    await frozen.hears("delivered", count + 1)
    assert await frozen.end() == 0
    assert await other.end() == 0
    assert scene.outcomes() == {"acked": 210}
    assert scene.verdict() == []


@both
async def test_an_event_that_kills_its_process_ends_as_a_dead_letter_whoever_has_its_slot(
    scene: Scene, mode: str
) -> None:
    await scene.publish(40)
    deaths = 0
    children = [scene.start(mode=mode, deadly="17") for _ in range(2)]
    while True:
        for child in children:
            await child.hears("ready")
        if await scene.drained(*children):
            break
        children = [child for child in children if not child.facts("ended")]
        deaths += 1
        assert deaths < 20, "it is never over"
        children.append(scene.start(mode=mode, deadly="17"))
    for child in children:
        assert await child.end() == 0
    assert scene.dead() == [(b"17", "ProcessDied", 4)]
    assert scene.outcomes() == {"acked": 39, "dead": 1}
