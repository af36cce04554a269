"""Scenes with one shard of the engine, where no life of delivery would show a bug, or not for sure."""

from __future__ import annotations

import numpy as np

from penstock.engine.messages import Ack, Ask, Chunk, Claimed, Declare, Deliver, HeadMoved, Now, Read, ReadDone, Shed
from penstock.engine.policy import Policy
from penstock.engine.shard import Shard
from penstock.offsets import Range, RangeSet

NOW = Now(1.0, 1_000_000)


def _shard(head: int) -> Shard:
    shard = Shard(next_offset=0, policy=Policy(), clean=True, head=head, now=NOW)
    shard.handle(HeadMoved(head), NOW)
    return shard


def _chunk(start: int, stop: int) -> Chunk:
    ones = np.ones(stop - start, np.int64)
    return Chunk(
        Range(start, stop),
        nbytes=stop - start,
        sizes=lambda: ones,
        lanes=None,
        expiries=None,
        appended_at=ones,
        source=None,
    )


def a_read_that_finds_nothing() -> str | None:
    """Let a read bring nothing, though the log is longer; at the next heartbeat it must be repeated."""
    shard = _shard(head=3)
    shard.handle(ReadDone(0, ()), NOW)
    asked = shard.handle(HeadMoved(3), NOW)
    return None if any(isinstance(output, Read) for output in asked) else "a read that found nothing is not repeated"


def a_read_that_leaves_something_out() -> str | None:
    """Let a read begin too late; it must be repeated before anything is called lost."""
    shard = _shard(head=6)
    told = shard.handle(ReadDone(0, (_chunk(3, 6),)), NOW)
    lost = [output for output in told if isinstance(output, Declare)]
    return f"after one read {lost[0].gap} is declared" if lost else None


def an_ack_of_what_nobody_has() -> str | None:
    """Ack an event that is in memory and was not handed over; nothing must come of it."""
    shard = _shard(head=3)
    shard.handle(ReadDone(0, (_chunk(0, 3),)), NOW)
    shard.handle(Ack(Range(0, 1)), NOW)
    return "an event is settled that nobody ever had" if shard.next_offset else None


def a_read_of_what_others_have_by_now() -> str | None:
    """Give back what is being read, and get half of it again; the other half has been claimed by somebody else."""
    claimed = RangeSet([Range(0, 4)])
    shard = Shard(next_offset=4, policy=Policy(), clean=True, head=4, now=NOW, berth=1, claimed=claimed)
    asked = shard.handle(HeadMoved(4), NOW)
    assert any(isinstance(output, Read) for output in asked), "nothing is being read"
    shard.handle(Shed(), NOW)
    shard.handle(Claimed((Range(0, 2),), 4), NOW)
    shard.handle(ReadDone(0, (_chunk(0, 4),)), NOW)
    told = shard.handle(Ask(events_max=10, bytes_max=1_000), NOW)
    events = sum(output.events for output in told if isinstance(output, Deliver))
    return "events are handed over that are another's" if events > 2 else None
