"""Lag is a function of two numbers; the pulse looks at all shards as a loop would."""

from __future__ import annotations

import numpy as np
import pytest
from tests.engine_world import World, plain

from penstock.engine.lag import LagInfo, lag_of, pulse


@pytest.mark.parametrize(
    ("head", "next_offset", "lag"),
    [(0, 0, 0), (5, 0, 5), (5, 1, 4), (5, 5, 0), (1, 1, 0), (3, 7, 0)],
    ids=["empty log", "nothing acked", "acked 0 of 5", "acked 4 of 5", "acked 0 of 1", "log shorter than the cursor"],
)
def test_lag_is_exact(head: int, next_offset: int, lag: int) -> None:
    assert lag_of(next_offset, head) == lag
    info = LagInfo("orders", "billing", 0, next_offset, head, lag_of(next_offset, head), unsettled=0)
    assert info.has_lag is (lag > 0)


def test_lag_of_a_shard_is_exact_before_and_after_its_acks() -> None:
    world = World()
    assert lag_of(world.shard.next_offset, world.shard.head) == 0
    world.publish(*plain(5))
    assert lag_of(world.shard.next_offset, world.shard.head) == 5
    world.ask()
    world.ack(0)
    assert lag_of(world.shard.next_offset, world.shard.head) == 4
    world.ack(4)
    assert lag_of(world.shard.next_offset, world.shard.head) == 4
    world.ack(1, 2, 3)
    assert lag_of(world.shard.next_offset, world.shard.head) == 0


def test_pulse_wakes_the_same_shards_as_a_loop_over_ten_thousand() -> None:
    chance = np.random.default_rng(7)
    heads = chance.integers(0, 100, 700)
    head_of = chance.integers(0, 700, 10_000)
    positions = chance.integers(0, 100, 10_000)
    wanting = chance.random(10_000) < 0.5
    timers = np.where(chance.random(10_000) < 0.9, np.inf, chance.random(10_000) * 20)
    woken = pulse(heads, head_of, positions, wanting, timers, 10.0)
    naive = [
        shard
        for shard in range(10_000)
        if (heads[head_of[shard]] > positions[shard] and wanting[shard]) or timers[shard] <= 10.0
    ]
    assert woken.tolist() == naive
    assert 0 < len(naive) < 10_000
