"""A shard is told thousands of random things, and a naive model that knows single events only watches its promises."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import numpy as np
import pytest
from tests.engine_world import Event, World, offsets_of, states_of

from penstock.engine.messages import Ack, Done, Extend, FetchFailed, GiveBack, LogTrimmed, Nack, ReadDone, ReadFailed
from penstock.engine.page import GONE
from penstock.engine.policy import Policy
from penstock.engine.states import Outcome
from penstock.offsets import Gap, Range

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.engine.messages import Deliver, Input, Offsets, Output

LANES: list[int | None] = [None, 101, 102, 103, 104]


class Life:
    """What the model knows of one life of a shard: who was handed what."""

    def __init__(self, failures: dict[int, int]) -> None:
        self.hands: dict[int, list[int]] = {}
        self.holder: dict[int, int] = {}
        """Which hand has an offset now."""
        self.had: set[int] = set()
        """Handed over, and not given back since: an ack of it is valid."""
        self.acked: set[int] = set()
        self.failures = failures


class Model(World):
    """The world, and in it a consumer that acts at random."""

    def __init__(self, seed: int) -> None:
        self.random = chance = random.Random(seed)
        lanes = chance.choice([LANES[:1], LANES[1:2], LANES, LANES[1:], [*range(1_000, 1_030)]])
        expiring = chance.choice([0.0, 0.0, 0.2])
        self.new_event: Callable[[], Event] = lambda: Event(
            chance.choice(lanes),
            chance.choice([1, 10, 10, 100]),
            self.wall_us + chance.randrange(10_000_000) if chance.random() < expiring else None,
        )
        self.wall_us = 0
        self.killers: set[int] = set()
        self.kills = chance.random() < 0.3
        self.crashes = not self.kills and chance.random() < 0.5
        self.finished = False
        self.life = Life({})
        window = chance.choice([1, 3, 8, 30])
        policy = Policy(
            max_retries=chance.choice([0, 1, 3]),
            backoff_seconds=chance.choice([0.0, 1.0, 6.0]),
            backoff_seconds_max=chance.choice([6.0, 60.0]),
            exhausted=chance.choice(["dead", "dead", "discard", "halt"]),
            timeout_seconds=chance.choice([None, None, 2.0]),
            window_events=window,
            window_bytes=chance.choice([50, 300, 1 << 20]),
            read_events=chance.choice([1, 4, 100]),
            read_bytes=chance.choice([20, 1 << 20]),
            rate_per_second=chance.choice([None, None, None, 5.0]),
            checkpoint_events=chance.choice([1, 5]),
            checkpoint_seconds=chance.choice([0.0, 1.0]),
            parked_max=chance.choice([0, 3, 1_000]),
        )
        self.singly = chance.choice([True, False, None])
        super().__init__(policy=policy, auto=False, chunk=chance.choice([1, 2, 7, 1_000]))
        self.widest, self.most_parked = policy.window_events, policy.parked_max

    # --- what is checked ----------------------------------------------------------------------

    def tell(self, told: Input) -> list[Output]:
        shard = self.shard
        outputs = super().tell(told)
        if self.shard is shard:
            self._check()
        return outputs

    def _check(self) -> None:
        shard = self.shard
        assert shard.in_memory - shard._work.aside.ready - shard._work.aside.held <= self.widest
        assert sum(not waiting.row.replay for waiting in shard._work.aside._rows.values()) <= self.most_parked
        for offset in range(self.store.next_offset, shard.next_offset):
            for page in shard._work.pages:
                assert not page.start <= offset < page.stop or states_of(page)[offset - page.start] == GONE
        timer = shard.next_timer()
        assert timer is None or timer > 0

    def note(self, handed: Deliver) -> None:
        """Check what is handed over, as an owner of each event would."""
        life, offsets = self.life, offsets_of(handed)
        singly = self.asked_singly
        for at, offset in enumerate(offsets):
            hand = handed.hand + (at if singly else 0)
            assert offset not in life.holder, f"{offset} is in two hands"
            assert offset not in life.acked, f"{offset} was acked in this life"
            replayed = handed.replays.get(offset, 0)
            assert replayed == (self.store.rows[offset][0].replay if offset in self.store.rows else 0)
            if not replayed:
                assert self.store.final(offset) is None, f"{offset} is settled, and that is written"
                together = set() if singly else set(offsets[:at])
                self._check_order(offset, together)
            assert handed.attempts.get(offset, 1) == life.failures.get(offset, 0) + 1, f"attempts of {offset}"
            life.hands.setdefault(hand, []).append(offset)
            life.holder[offset] = hand
            life.had.add(offset)

    def _check_order(self, offset: int, together: set[int]) -> None:
        lane = self.log[offset].lane
        for earlier in range(offset):
            if self.log[earlier].lane == lane and earlier not in together and earlier not in self.life.acked:
                state = self.state(earlier)
                assert state.value == "settled" or self._is_replay(earlier), f"{offset} overtakes {earlier}, {state}"
        for other, hand in self.life.holder.items():
            if self.log[other].lane == lane and not self._is_replay(other):
                assert other in together, f"{offset} and {other}, in hand {hand}, are of one lane"

    def _is_replay(self, offset: int) -> bool:
        row = self.store.rows.get(offset)
        return row is not None and row[0].replay > 0

    # --- the consumer -------------------------------------------------------------------------

    def take(self, events_max: int, *, bytes_max: int = 1 << 30, singly: bool) -> list[int]:
        self.asked_singly = singly
        count = len(self.delivered)
        self.ask(events_max, bytes_max=bytes_max, singly=singly)
        assert len(self.delivered) <= count + 1
        taken: list[int] = []
        for handed in self.delivered[count:]:
            self.note(handed)
            taken = offsets_of(handed)
            assert len(taken) <= events_max
            nbytes = sum(self.log[offset].nbytes for offset in taken)
            assert nbytes <= bytes_max or len(taken) == 1
        self._follow_holders()
        if self.killers & set(taken):
            self.crash(clean=False)
            return []
        return taken

    def _follow_holders(self) -> None:
        """Note who lost what by a timeout: failed, and counted."""
        life = self.life
        for offset, hand in list(life.holder.items()):
            if self.state(offset).value != "held":
                del life.holder[offset]
                life.failures[offset] = life.failures.get(offset, 0) + 1
                assert hand in life.hands

    def do_done(self, hand: int) -> None:
        """Say of all that a hand was given that it is done, whatever was said of it before."""
        offsets = np.array(sorted(self.life.hands.get(hand, [])), np.int64)
        self.do_ack(offsets, Done(hand, (offsets,)))

    def do_ack(self, offsets: Offsets, told: Input | None = None) -> None:
        self.settle_down()
        valid = [offset for offset in self.life.had.intersection(offsets) if self.state(offset).value != "settled"]
        before = self.states()
        self.tell(told or Ack(offsets))
        for offset in {*range(len(self.log))}.difference(valid):
            assert self.state(offset) is before[offset], f"{offset} was not this consumer's to ack"
        for offset in valid:
            assert self.state(offset).value in {"settled", "parked"}
            self.life.acked.add(offset)
            self.life.holder.pop(offset, None)
        self.settle_down()

    def do_nack(
        self, hand: int, offsets: Offsets, delay: float | None, *, retry: bool = True, counted: bool = True
    ) -> None:
        self.settle_down()
        mine = [offset for offset in {*offsets} if self.life.holder.get(offset) == hand]
        self.tell(Nack(hand, offsets, delay_seconds=delay, retry=retry, counted=counted))
        for offset in mine:
            assert self.state(offset).value != "held"
            del self.life.holder[offset]
            self.life.failures[offset] = self.life.failures.get(offset, 0) + counted
            assert counted or not retry or self.state(offset).value != "settled", f"{offset} was not to be blamed"
        self.settle_down()

    def do_give_back(self, hand: int, offsets: Offsets) -> None:
        self.settle_down()
        mine = [offset for offset in {*offsets} if self.life.holder.get(offset) == hand]
        self.tell(GiveBack(hand, offsets))
        for offset in mine:
            assert self.state(offset).value in {"ready", "parked"}
            del self.life.holder[offset]
            self.life.had.discard(offset)

    def do_leave(self) -> None:
        self.settle_down()
        self.leave()
        for offset in self.life.holder:
            self.life.had.discard(offset)
        self.life.holder.clear()
        assert self.shard.in_flight == 0

    def settle_down(self) -> None:
        """Let timers run, so that a timeout is not taken for something else."""
        self.wait(0.0)
        self._follow_holders()

    def crash(self, *, clean: bool) -> None:
        self.policy = self.shard.policy
        failures = dict(self.store.attempts) | {row.offset: row.attempts for row in self.store.waiting}
        self.life = Life(failures)
        self.restart(clean=clean)

    # --- chance -------------------------------------------------------------------------------

    def some_offsets(self) -> Offsets:
        chance, life = self.random, self.life
        if not self.log:
            return Range(0, 0)
        kind = chance.randrange(4)
        if kind == 0:
            low = chance.randrange(len(self.log) + 1)
            return Range(low, chance.randrange(low, len(self.log) + 3))
        known = sorted(life.had) or [0]
        if kind == 1:
            offset = chance.choice(known)
            return Range(offset, offset + 1)
        if kind == 2:
            return np.array(sorted(chance.sample(known, chance.randrange(len(known)) + 1)), np.int64)
        return np.array([chance.randrange(len(self.log) + 2) for _ in range(chance.randrange(5))], np.int64)

    def act(self) -> None:  # noqa: PLR0912, PLR0915 - one branch for each thing that may happen
        chance = self.random
        for hand in [hand for hand in self.life.hands if hand not in self.life.holder.values()]:
            if chance.random() < 0.7:
                del self.life.hands[hand]
        hands = [*self.life.hands, 999_999]
        action = chance.choices(
            ["publish", "read", "fetch", "write", "ask", "ack", "nack", "give back", "leave", "wait", "policy", "crash",
             "replay", "start", "reject", "done"],
            [6, 14, 8, 8, 16, 16, 6, 3, 1, 6, 2, 2, 1, 3, 1, 8],
        )[0]  # fmt: skip
        match action:
            case "publish":
                self.publish(*(self.new_event() for _ in range(chance.choice([0, 1, 1, 5, 20]))))
                if self.kills and self.log and chance.random() < 0.1 and len(self.killers) < 2:
                    offset = len(self.log) - 1
                    if self.state(offset).value == "ahead":
                        self.killers.add(offset)
                elif self.log and chance.random() < 0.1 and not self.killers:
                    self.lose_something()
            case "read" if self.reads:
                self.read_somehow()
            case "fetch" if self.fetches:
                if chance.random() < 0.2:
                    self.tell(FetchFailed(self.fetches.pop().offsets, self.monotonic + chance.random()))
                else:
                    self.answer_fetch()
            case "write":
                if chance.random() < 0.2:
                    self.fail_to_write()
                else:
                    self.write()
            case "ask":
                singly = self.singly if self.singly is not None else chance.random() < 0.5
                self.take(chance.choice([1, 2, 10, 100]), bytes_max=chance.choice([1, 60, 1 << 30]), singly=singly)
            case "ack":
                self.do_ack(self.some_offsets())
            case "done":
                self.do_done(chance.choice(hands))
            case "nack":
                delay = chance.choice([None, None, 0.0, 1.0, 20.0])
                self.do_nack(chance.choice(hands), self.some_offsets(), delay, counted=chance.random() < 0.7)
            case "reject":
                self.do_nack(chance.choice(hands), self.some_offsets(), None, retry=False)
            case "give back":
                self.do_give_back(chance.choice(hands), self.some_offsets())
            case "leave":
                self.do_leave()
            case "wait":
                self.wait(chance.choice([0.0, 0.01, 0.5, 1.0, 3.0, 10.0, 70.0]))
                self._follow_holders()
            case "policy":
                self.change_policy()
            case "crash" if self.crashes:
                self.crash_somehow()
            case "replay":
                dead = [offset for offset, (_, state) in self.store.rows.items() if state == "dead"]
                if dead:
                    offset = chance.choice(dead)
                    self.replay(offset)
                    self.life.had.discard(offset)
                    self.life.failures[offset] = 0
                else:
                    self.see_rows()
            case "start":
                self.start(chance.choice(hands))
                if chance.random() < 0.3:
                    self.tell(Extend(chance.choice(hands), chance.random() * 5))

    def lose_something(self) -> None:
        start = self.random.randrange(len(self.log))
        stop = min(start + self.random.choice([1, 5]), len(self.log))
        known = start < self.shard.read_position or any(gap.range.overlaps(Range(start, stop)) for gap in self.lost)
        if not known and not self.reads:
            self.lost.append(Gap(start, stop, "it was damaged"))

    def read_somehow(self) -> None:
        chance, read = self.random, self.reads[0]
        way = chance.random()
        if way < 0.1:
            self.reads.pop()
            self.tell(ReadFailed(read.start, self.monotonic + chance.random()))
        elif way < 0.2:
            self.reads.pop()
            self.tell(ReadDone(read.start, ()))
        elif way < 0.25:
            self.reads.pop()
            items = self.read(read)
            self.tell(ReadDone(read.start, items[1:]))  # the first is left out
        elif way < 0.27 and not self.killers:
            self.reads.pop()
            first = min(read.start + chance.choice([0, 2]), len(self.log))
            self.tell(LogTrimmed(first))
        else:
            self.answer_read()

    def change_policy(self) -> None:
        chance = self.random
        match chance.randrange(5):
            case 0:
                self.change(paused=chance.random() < 0.5)
            case 1:
                self.change(resumes=self.policy.resumes + 1, paused=False)
                self._forget_halted()
            case 2:
                self.change(timeout_seconds=chance.choice([None, 1.0]))
            case 3:
                self.change(window_events=chance.choice([1, 3, 8, 30]))
            case _:
                self.change(rate_per_second=chance.choice([None, 5.0]))
        self.widest = max(self.widest, self.policy.window_events)

    def _forget_halted(self) -> None:
        """What halted has a new set of attempts."""
        attempts = self.shard.progress.attempts
        rows = {offset: waiting.row.attempts for offset, waiting in self.shard._work.aside._rows.items()}
        for offset, count in self.life.failures.items():
            if count > self.policy.max_retries:
                self.life.failures[offset] = rows.get(offset, attempts.get(offset, 0))

    def crash_somehow(self) -> None:
        clean = self.random.random() < 0.5
        if clean:
            self.do_leave()
            self.write()
            self.write()
            clean = not self.shard.progress.dirty and not self.shard.suspecting
        self.crash(clean=clean)

    # --- the end ------------------------------------------------------------------------------

    def finish(self) -> None:
        """With nothing that goes wrong any more, everything is settled, and that soon."""
        self.finished = True
        if self.policy.exhausted == "halt":
            self.killers.clear()
        singly = self.singly if self.singly is not None else self.random.random() < 0.5
        for _ in range(3_000):
            if self.policy.paused or self.shard.halted:
                self.change(paused=False, resumes=self.policy.resumes + 1)
                self._forget_halted()
            self.publish()
            while self.reads or self.fetches or self.shard.progress.dirty:
                if self.reads:
                    self.answer_read()
                elif self.fetches:
                    self.answer_fetch()
                else:
                    self.write()
            if self.is_done():
                return
            self._follow_holders()
            self.take(100, singly=singly)
            if self.life.holder:
                self.do_ack(np.array(sorted(self.life.holder), np.int64))
            elif not self.reads and not self.fetches and not self.shard.progress.dirty:
                self.wait_for_timer()
                self._follow_holders()
        left = [(offset, self.state(offset)) for offset in range(len(self.log)) if self.store.final(offset) is None]
        raise AssertionError(f"stuck at {self.store.next_offset}: {left[:10]}, timer {self.shard.next_timer()}")

    def is_done(self) -> bool:
        settled = all(self.store.final(offset) is not None for offset in range(len(self.log)))
        return settled and not self.store.waiting

    def check_blame(self) -> None:
        """Only what kills is blamed for it."""
        for park in self.store.parks:
            if park.failure.kind == "ProcessDied" and not self.crashes:
                assert park.row.offset in self.killers
        for offset in self.killers:
            if self.policy.exhausted == "dead":
                assert self.store.final(offset) in {Outcome.DEAD, Outcome.EXPIRED, Outcome.GAP}


def run(seed: int, steps: int = 120) -> Model:
    model = Model(seed)
    for _ in range(steps):
        model.act()
    model.finish()
    model.check_blame()
    return model


@pytest.mark.parametrize("seed", range(40))
def test_every_promise_holds_whatever_a_shard_is_told(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.engine.pages.GONE_WINDOWS", seed % 3 / 10)
    monkeypatch.setattr("penstock.engine.page.RUN_MIN", [1, 2, 512][seed % 3])
    run(seed)
