"""The promises of the cleaner: dead letters go when they are too old, once, and nothing else does."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING, Any

import pytest
from tests.deliveries import Faulty, make_store

from penstock import Bus, Event, Topic
from penstock.bus.local import Local
from penstock.clock import VirtualClock
from penstock.errors import StoreFull
from penstock.rows import Commit, Parked, ParkedFilter, Shard, Subscription
from penstock.runtime import cleaner
from penstock.runtime.cleaner import Cleaner
from penstock.settings import DeliverySettings, Settings

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

raw = Topic("raw", bytes, partitions=2)
DAY = 86_400


class Scene:
    """A store with a subscription, a clock, and cleaners over them."""

    def __init__(self, store: Faulty, clock: VirtualClock) -> None:
        self.store = store
        self.clock = clock
        self.log_id = store.whole.log.create_topic("raw", raw.settings).log_id
        store.whole.cursors.put_subscription(Subscription(log_id=self.log_id, name="s", mode="exclusive"))

    def park(self, offset: int, state: Any = "dead", *, partition: int = 0, **said: Any) -> None:
        shard = Shard(self.log_id, "s", 0, partition)
        said = {"parked_at": self.clock.time_us(), **said}
        row = Parked(shard=shard, offset=offset, state=state, lane=0, event=Event(data=b"x"), **said)
        assert self.store.whole.cursors.commit([Commit(parked=(row,))]) == [None]

    def places(self) -> list[tuple[int, int]]:
        rows = self.store.whole.parked.page(ParkedFilter(log_id=self.log_id, subscription="s"), limit=10_000)
        return [(row.shard.partition, row.offset) for row in rows]

    def cleaner(self, owner: str = "one", *, keep_days: float = 30.0) -> Cleaner:
        host = Local("memory:", settings=Settings(), clock=self.clock, store=self.store)
        host._store = self.store  # open, without a thread
        return Cleaner(host, owner=owner, clock=self.clock, jitter=lambda: 0.0, keep_days=keep_days)


@pytest.fixture(params=["memory", "file"])
def scene(request: pytest.FixtureRequest, root: Path) -> Iterator[Scene]:
    clock = VirtualClock()
    with closing(Faulty(make_store(request.param, clock, root))) as store:
        yield Scene(store, clock)


async def test_dead_letters_and_what_is_done_go_after_their_days_and_what_waits_stays(scene: Scene) -> None:
    scene.park(0)
    scene.park(1, "done")
    scene.park(2, "waiting")
    scene.park(0, partition=1)
    loop = scene.cleaner()
    loop.start()
    await scene.clock.advance_async(29 * DAY)
    scene.park(3)
    assert len(scene.places()) == 5
    await scene.clock.advance_async(DAY - 1)
    assert len(scene.places()) == 5
    await scene.clock.advance_async(3600 + 1)
    assert scene.places() == [(0, 2), (0, 3)]
    await scene.clock.advance_async(30 * DAY)
    assert scene.places() == [(0, 2)]
    await loop.stop()


async def test_one_that_was_brought_back_and_died_again_is_new(scene: Scene) -> None:
    await scene.clock.advance_async(100 * DAY)
    now = scene.clock.time_us()
    scene.park(0, parked_at=now - 40 * DAY * 1_000_000, last_retry_at=now - 1_000_000)
    scene.park(1, parked_at=now - 40 * DAY * 1_000_000, last_retry_at=now - 31 * DAY * 1_000_000)
    await scene.cleaner().once()
    assert scene.places() == [(0, 0)]


async def test_one_that_does_not_say_when_it_was_parked_stays(scene: Scene) -> None:
    scene.park(0, parked_at=0)
    await scene.cleaner().once()
    assert scene.places() == [(0, 0)]


async def test_more_than_a_page_goes_and_what_is_new_in_between_stays(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cleaner, "PAGE_ROWS", 3)
    new = scene.clock.time_us() + 20 * DAY * 1_000_000
    for offset in range(20):
        scene.park(offset, partition=offset % 2, last_retry_at=new if offset in {3, 4, 5, 11} else 0)
    await scene.clock.advance_async(31 * DAY)
    await scene.cleaner().once()
    assert scene.places() == [(0, 4), (1, 3), (1, 5), (1, 11)]


async def test_zero_days_keep_them_for_ever(scene: Scene) -> None:
    scene.park(0)
    loop = scene.cleaner(keep_days=0)
    loop.start()
    await scene.clock.advance_async(1000 * DAY)
    await loop.stop()
    assert scene.places() == [(0, 0)]


async def test_while_another_process_has_the_lease_nothing_goes_and_soon_after_it_does(scene: Scene) -> None:
    scene.park(0)
    await scene.clock.advance_async(31 * DAY)
    lease = scene.store.whole.leases.acquire("dead-letters", "other", 90)
    loop = scene.cleaner()
    loop.start()
    await scene.clock.advance_async(80)
    assert scene.places() == [(0, 0)]
    await scene.clock.advance_async(60)
    assert scene.places() == []
    await loop.stop()
    assert lease is not None


async def test_while_nothing_is_too_old_nothing_is_written(scene: Scene) -> None:
    scene.park(0)
    await scene.clock.advance_async(29 * DAY)
    await scene.cleaner().once()
    assert scene.store.calls["leases.acquire"] == scene.store.calls["parked.purge"] == 0


async def test_what_could_not_be_removed_is_removed_later(scene: Scene) -> None:
    scene.park(0)
    await scene.clock.advance_async(31 * DAY)
    scene.store.fail("parked.purge", StoreFull("not now"), times=1)
    loop = scene.cleaner()
    loop.start()
    await scene.clock.advance_async(0)
    assert scene.places() == [(0, 0)]
    await scene.clock.advance_async(10)
    assert scene.places() == []
    await loop.stop()


async def test_a_bus_cleans_as_its_settings_say(scene: Scene) -> None:
    scene.park(0)
    await scene.clock.advance_async(8 * DAY)
    for days, left in ((30.0, [(0, 0)]), (7.0, [])):
        settings = Settings(delivery=DeliverySettings(dead_letter_days=days))
        async with Bus("memory:", topics=[raw], store=scene.store, clock=scene.clock, settings=settings):
            await scene.clock.advance_async(0)
        assert scene.places() == left
