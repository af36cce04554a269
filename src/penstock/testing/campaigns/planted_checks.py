"""Hunts for planted bugs where no campaign in memory looks: one scene each, on a virtual machine or with forks.

Each returns what is wrong, in words, or None; and each finds nothing in code that is right.
"""

from __future__ import annotations

import os
import random
import re
import select
import shutil
import signal
import tempfile
import warnings
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from penstock.errors import NewerFormat, PenstockError, StateMissing, TopicDeleted, WriterStalled
from penstock.events import Event
from penstock.offsets import Gap
from penstock.outbox import SqliteOutbox
from penstock.rows import Commit, Cursor, Shard, Staged, Subscription, TopicSettings
from penstock.runtime.entrances import LEASE_SECONDS
from penstock.stores.file.block import FRONT_BYTES, Blank, Broken, Header, Kind, Segment, content_crc, encode_front
from penstock.stores.file.gate import shared_gates
from penstock.stores.file.platform import Platform
from penstock.stores.file.segment import SegmentFile, segment_names
from penstock.stores.file.store import FileStore
from penstock.stores.file.verify import verify
from penstock.testing.campaigns.life import APPLICATION, SMALL, SUBSCRIPTION, Published, run_mover, send
from penstock.testing.machine import ROOT, Machine, Survival

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Callable, Iterator

    from penstock.stores.file.tail import Tail

LOST: Final = Survival("dropped", "dropped")
"""A power loss that takes everything that was not synced."""
KEPT: Final = Survival("kept", "kept")
READ_BYTES: Final = 1 << 26
PRODUCER: Final = b"\1" * 6 + b"\x40" + bytes(9)
OTHER_PRODUCER: Final = b"\2" * 6 + b"\x40" + bytes(9)
STALL_SECONDS: Final = 0.5
PATIENCE_SECONDS: Final = 20.0
DONE: Final = b"+"


# --- a small log ----------------------------------------------------------------------------------


class _Log:
    """A topic of one partition, in a store on a virtual machine, and what was acknowledged there."""

    def __init__(self, **settings: Any) -> None:
        self.machine = Machine(1)
        self.store = _opened(self.machine)
        self.topic = self.store.log.create_topic("orders", TopicSettings(**settings))
        self.partition = self.topic.partitions[0]
        self.directory = ROOT / "topics" / self.topic.log_id / "0"
        self.shard = Shard(self.topic.log_id, SUBSCRIPTION, 0, 0)
        subscription = Subscription(log_id=self.topic.log_id, name=SUBSCRIPTION, mode="exclusive", protect=False)
        self.store.cursors.put_subscription(subscription, [Cursor(shard=self.shard, next_offset=0)])
        self.stored: dict[int, bytes] = {}

    def publish(self, *payloads: bytes, store: FileStore | None = None) -> Published:
        """Publish, with the sequences that follow."""
        act = self.act([*payloads], PRODUCER, len(self.stored))
        act.answer = send(store or self.store, act)
        self.stored.update(enumerate(payloads, act.answer))
        return act

    def act(self, payloads: list[bytes], producer: bytes, first: int) -> Published:
        """Return a publish that is not done yet."""
        return Published(what="publish", partition=self.partition, payloads=payloads, producer=producer, first=first)

    def fill(self) -> None:
        """Publish so much that there are several segments."""
        for number in range(12):
            self.publish(b"%d" % number * 300, b"%d" % number * 100)

    def commit(self, offset: int, **stated: Any) -> PenstockError | None:
        """Move the cursor."""
        [refusal] = self.store.cursors.commit(
            [Commit(cursors=(Cursor(shard=self.shard, next_offset=offset),), **stated)]
        )
        return refusal

    def segments(self, machine: Machine) -> list[Path]:
        """Return the partition's segments."""
        return [self.directory / str(name) for name in segment_names(machine.disk, self.directory)]

    def tail(self, store: FileStore) -> Tail:
        """Return how the log ends."""
        return store.log.tail(store.log.handle(self.partition))

    def read(self, store: FileStore) -> dict[int, bytes]:
        """Return what can be read, by offset."""
        found: dict[int, bytes] = {}
        bounds = store.log.bounds(self.partition)
        position = bounds.start
        while position < bounds.stop:
            for item in store.log.read(self.partition, position, bytes_max=READ_BYTES):
                if not isinstance(item, Gap):
                    found.update(enumerate((event.data for event in item), item.start))
                position = item.range.stop
        return found

    def wrong_on(self, machine: Machine, wanted: dict[int, bytes] | None = None) -> str | None:
        """Open the store on another machine, and say what is not as it was acknowledged, or is as it should not be."""
        store = _opened(machine)
        try:
            found = self.read(store)
            send(store, self.act([b"new"], OTHER_PRODUCER, 0))
        except PenstockError as error:
            return f"{type(error).__name__}: {error}"
        finally:
            store.close()
            machine.turn_off()
        wanted = self.stored if wanted is None else wanted
        wrong = sorted(offset for offset, payload in wanted.items() if found.get(offset) != payload)
        return f"offsets {wrong} are not as they were" if wrong else None


def _opened(machine: Machine) -> FileStore:
    return FileStore(ROOT, settings=SMALL, platform=machine.platform)


class _Killed(BaseException):
    """Ends a process of a virtual machine."""


@contextmanager
def _killed_before(machine: Machine, operation: str) -> Iterator[None]:
    """Kill whoever does such an operation in this block, right before it."""

    def kill(text: str) -> None:
        if re.search(operation, text):
            raise _Killed

    machine.on_step = kill
    try:
        with suppress(_Killed):
            yield
    finally:
        machine.on_step = lambda _: None


# --- several processes on one machine -------------------------------------------------------------


def two_writers() -> str | None:
    """Let one writer send again what another one has stored."""
    log = _Log()
    other = _opened(log.machine)
    log.publish(b"a")
    log.publish(b"b", store=other)
    act = log.publish(b"c")
    again = send(other, act)
    return None if again == act.answer else f"offset {act.answer} was stored again, at {again}"


def a_reader_beside_a_writer() -> str | None:
    """Read at each moment of an append; what was read must outlast a power loss of that moment."""
    log = _Log()
    log.publish(b"a")
    found: list[str] = []

    def look(operation: str) -> None:
        beside = log.machine.after_kill()
        reader = _opened(beside)
        seen = log.read(reader)
        beside.turn_off()
        wrong = log.wrong_on(log.machine.after_power_loss(LOST, random.Random(0)), seen)
        if wrong is not None:
            found.append(f"{wrong}, and were read before {operation!r}")

    log.machine.on_step = look
    log.publish(b"b")
    log.machine.on_step = lambda _: None
    return next(iter(found), None)


def a_writer_after_the_deletion() -> str | None:
    """Publish to a topic that another process was killed in deleting."""
    log = _Log()
    other = _opened(log.machine)
    log.publish(b"a", store=other)
    with _killed_before(log.machine, "sync directory"):
        log.store.log.delete_topic(log.topic.log_id)
    try:
        log.publish(b"b", store=other)
    except TopicDeleted:
        return None
    return "an event was acknowledged by a topic that is deleted"


def a_stale_lease() -> str | None:
    """Commit for a lease that another process holds by now."""
    log = _Log()
    other = _opened(log.machine)
    log.publish(b"a")
    lease = log.store.leases.acquire("lease", "one", 1.0)
    log.machine.clock.advance(2.0)
    assert lease is not None
    assert other.leases.acquire("lease", "another", 1.0) is not None
    return None if log.commit(1, fence=lease.fence) is not None else "a commit under a stale lease was taken"


def cursors_that_are_refused() -> str | None:
    """Commit a cursor beyond the end, and one that goes back."""
    log = _Log()
    log.publish(b"a", b"b")
    if log.commit(3) is None:
        return "a cursor at offset 3 was taken, and the log ends at 2"
    assert log.commit(2) is None
    return None if log.commit(1) is not None else "a cursor went back from offset 2 to 1"


def a_cursor_over_unsynced_events() -> str | None:
    """Commit a cursor in a topic that does not sync; what it has passed must outlast a power loss."""
    log = _Log(durability="os")
    log.publish(b"a", b"b")
    assert log.commit(2) is None
    return log.wrong_on(log.machine.after_power_loss(LOST, random.Random(0)))


def a_crash_while_moving() -> str | None:
    """Kill the mover right before it appends what was staged; the next one must append it."""
    log = _Log()
    with closing(_Outbox(log.machine)) as outbox:
        with closing(log.machine.databases.connect_application(APPLICATION)) as connection:
            outbox.producer  # noqa: B018 - which makes the tables
            outbox.stage(connection, [Staged(topic="orders", event=Event(type="staged", data=b"staged"))])
            connection.commit()
        with _killed_before(log.machine, r"write .*\.seg"):
            run_mover(log.store, outbox, log.machine)
    after = log.machine.after_kill()
    after.clock.advance(LEASE_SECONDS)
    store = _opened(after)
    with closing(_Outbox(after)) as outbox:
        run_mover(store, outbox, after)
    found = [*log.read(store).values()]
    return None if found == [b"staged"] else f"one event was staged, and there are {found}"


class _Outbox(SqliteOutbox):
    """An outbox in a database of a virtual machine, which is no file that could be compared."""

    def __init__(self, machine: Machine) -> None:
        super().__init__(APPLICATION, connect=machine.databases.connect)

    def _check_file(self, cursor: sqlite3.Cursor) -> None:
        """Every connection is to this one."""


# --- recovery -------------------------------------------------------------------------------------


def crashes_while_healing() -> str | None:
    """Kill a process during a sync; then kill the one that heals the log, and cut its power, before each operation."""
    return _crash_while_healing(b"in the same segment") or _crash_while_healing()


def _crash_while_healing(*durable: bytes) -> str | None:
    log = _Log()
    for payload in durable:
        log.publish(payload)
    with _killed_before(log.machine, r"sync .*\.seg"):
        log.publish(b"b")
    healing = log.machine.after_kill()
    found: list[str] = []

    def crash(operation: str) -> None:
        for after in (healing.after_kill(), healing.after_power_loss(LOST, random.Random(0))):
            if (wrong := log.wrong_on(after)) is not None:
                found.append(f"{wrong}, after a crash before {operation!r}")

    healing.on_step = crash
    log.wrong_on(healing)
    return next(iter(found), None)


def lost_tails() -> str | None:
    """Lose the tails while the machine runs; what is recovered and read then must outlast a power loss."""
    log = _Log(durability="os")
    log.publish(b"a")
    after = log.machine.after_kill()
    after.disk.remove(ROOT / "tails")
    seen = log.read(_opened(after))
    return log.wrong_on(after.after_power_loss(LOST, random.Random(0)), seen)


def a_log_shorter_than_its_cursor() -> str | None:
    """Lose events that a cursor has passed, on a medium that lied; their offsets must not be given out again."""
    log = _Log()
    tail = log.tail(log.store)
    log.publish(b"a", b"b")
    assert log.commit(2) is None
    after = log.machine.after_power_loss(LOST, random.Random(0))
    [path] = log.segments(after)
    after.disk.file(path).replace(bytes(after.disk.file(path).content[: tail.position]))
    store = _opened(after)
    offset = send(store, log.act([b"new"], OTHER_PRODUCER, 0))
    return None if offset >= 2 else f"a cursor has passed offset {offset}, and it was given out again"


def a_torn_write() -> str | None:
    """Tear the last write; it must be kept in quarantine, cut off, and followed in a higher epoch."""
    log = _Log()
    log.publish(b"a")
    tail, before = log.tail(log.store), dict(log.stored)
    with _killed_before(log.machine, r"sync .*\.seg"):
        log.publish(b"torn" * 100)
    after = log.machine.after_power_loss(KEPT, random.Random(0))
    [path] = log.segments(after)
    _flip(after, path, tail.position + 300)
    store = _opened(after)
    log.read(store)
    if (epoch := log.tail(store).epoch) <= tail.epoch:
        return f"the log was recovered and goes on in epoch {epoch}; it was {tail.epoch}"
    if any(after.disk.file(path).content[tail.position :]):
        return f"what was torn still stands in {path.name}"
    if not any(b"torn" in after.disk.file(kept).content for kept in after.disk.paths() if "quarantine" in kept.parts):
        return "what was torn is not in quarantine"
    return log.wrong_on(after.after_kill(), before)


def a_payload_like_a_block() -> str | None:
    """Tear a write whose payload looks like blocks that testify to it; nobody was told that it is stored."""
    log = _Log()
    tail = log.tail(log.store)
    with _killed_before(log.machine, r"sync .*\.seg"):
        log.publish(b"-".join([_forged_front(tail)] * 64))  # one of them begins where a block may
    after = log.machine.after_power_loss(KEPT, random.Random(0))
    [path] = log.segments(after)
    _flip(after, path, tail.position + 8)
    return log.wrong_on(after)


def _forged_front(tail: Tail) -> bytes:
    header = Header(
        kind=Kind.MARKER,
        position=tail.position,
        number=tail.number + 9,
        epoch=tail.epoch,
        offset=tail.end + 9,
        span=0,
        first_time=0,
        last_time=0,
        durable_number=tail.number + 9,
        durable_offset=tail.end + 9,
        mask=0,
        run_count=0,
        runs_length=0,
        body_length=0,
        content_crc=content_crc(b"", b""),
    )
    return encode_front(Segment(tail.log_id, 0, tail.segment_base, 0), header)


# --- damage ---------------------------------------------------------------------------------------


def _flip(machine: Machine, path: Path, byte: int) -> None:
    """Change a byte on the medium."""
    content = bytes(machine.disk.file(path).content)
    machine.disk.file(path).replace(content[:byte] + bytes([content[byte] ^ 0x10]) + content[byte + 1 :])


def damage_before_a_witness() -> str | None:
    """Damage an acknowledged block that later ones testify to; all others must still be there."""
    log = _Log()
    for payload in (b"damaged", b"b", b"c"):
        log.publish(payload)
    after = log.machine.after_power_loss(KEPT, random.Random(0))
    [path] = log.segments(after)
    _flip(after, path, bytes(after.disk.file(path).content).index(b"damaged"))
    store = _opened(after)
    found = [_read_one(log, store, offset) for offset in (1, 2)]
    return None if found == [b"b", b"c"] else f"offset 0 was damaged, and offsets 1 and 2 are {found}"


def sealed_segments_cut() -> str | None:
    """Cut a sealed segment to other lengths; each must be told."""
    log = _Log()
    log.fill()
    log.store.close()
    for path in log.segments(log.machine)[:-1]:
        content = bytes(log.machine.disk.file(path).content)
        for length in range(len(content) - 1, len(content) - 200, -20):
            log.machine.disk.file(path).replace(content[:length])
            if verify(ROOT, log.machine.platform).ok:
                return f"{path.name} was cut from {len(content)} to {length} bytes, and nobody noticed"
        log.machine.disk.file(path).replace(content)
    return None


def damaged_indexes() -> str | None:
    """Damage each byte of an index; what is read must not change."""
    log = _Log()
    log.fill()
    sealed, following, *_ = segment_names(log.machine.disk, log.directory)
    _read_one(log, log.store, following.base - 1)  # which looks at all of the first segment
    path = (log.directory / str(sealed)).with_suffix(".idx")
    content = bytes(log.machine.disk.file(path).content)
    for byte in range(len(content)):
        _flip(log.machine, path, byte)
        store = _opened(log.machine)
        try:
            found = {offset: _read_one(log, store, offset) for offset in range(following.base)}
        except PenstockError as error:
            return f"byte {byte} of the index: {error}"
        if found != {offset: log.stored[offset] for offset in found}:
            return f"byte {byte} of the index: other events were read"
        store.close()
        log.machine.disk.file(path).replace(content)
    return None


def _read_one(log: _Log, store: FileStore, offset: int) -> bytes | None:
    [item] = store.log.read(log.partition, offset, bytes_max=READ_BYTES, events_max=1)
    return None if isinstance(item, Gap) else next(event.data for event in item)


def damaged_headers() -> str | None:
    """Flip each bit of a block's prefix and header; nobody must take it for a block."""
    log = _Log()
    log.publish(b"a")
    [path] = log.segments(log.machine)
    [name] = segment_names(log.machine.disk, log.directory)
    file = SegmentFile(log.machine.disk, path, name)
    content = bytes(log.machine.disk.file(path).content)
    start = file.first.end_position
    for bit in range(8 * FRONT_BYTES):
        byte = start + bit // 8
        changed = bytes([content[byte] ^ 1 << bit % 8])
        log.machine.disk.file(path).replace(content[:byte] + changed + content[byte + 1 :])
        with suppress(Blank, Broken, NewerFormat):
            header, _ = next(file.headers(start, len(content)))
            return f"a block with another bit {bit % 8} in byte {bit // 8} was taken for one: {header}"
    return None


def damaged_rows() -> str | None:
    """Change a cursor behind the store's back; it must not be believed."""
    log = _Log()
    log.publish(b"a", b"b")
    assert log.commit(2) is None
    connection = log.machine.databases.connect(ROOT / "control.db")
    connection.execute("BEGIN IMMEDIATE")
    connection.execute("UPDATE cursors SET next_offset = 1")
    connection.execute("COMMIT")
    connection.close()
    try:
        [cursor] = _opened(log.machine).cursors.load(log.topic.log_id, SUBSCRIPTION)
    except StateMissing:
        return None
    return f"a row that was changed was believed: {cursor}"


# --- forks ----------------------------------------------------------------------------------------


@contextmanager
def _lock_file() -> Iterator[Path]:
    directory = Path(tempfile.mkdtemp(prefix="penstock-", dir="/tmp"))
    try:
        yield directory / "locks"
    finally:
        shutil.rmtree(directory)


@contextmanager
def _forked(work: Callable[[Callable[[], None]], None]) -> Iterator[int]:
    """Run work in a child that is gone after this block; it says when it is done, and the pipe that tells is returned."""
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 dislikes forks, which are the point here
        child = os.fork()
    if child == 0:
        os.close(reading)
        try:
            work(lambda: os.write(writing, DONE) and None)
        finally:
            os._exit(0)
    os.close(writing)
    try:
        yield reading
    finally:
        os.close(reading)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def _is_done(reading: int) -> bool:
    ready, _, _ = select.select([reading], [], [], PATIENCE_SECONDS)
    return bool(ready) and os.read(reading, 1) == DONE


def a_child_forked_in_a_turn() -> str | None:
    """Fork in the middle of a turn; when that has ended, the child must get a turn of its own."""
    with _lock_file() as path, ExitStack() as children:

        def take_a_turn(done: Callable[[], None]) -> None:
            with shared_gates(path, Platform()).gate(9).turn("the child's", STALL_SECONDS):
                done()

        with shared_gates(path, Platform()).gate(9).turn("the parent's", STALL_SECONDS):
            reading = children.enter_context(_forked(take_a_turn))
        return None if _is_done(reading) else "a child that was forked in a turn never gets one"


def a_turn_outlived_by_a_child() -> str | None:
    """End a process in its turn whose child lives on; others must get the turn."""
    with _lock_file() as path:
        living, ending = os.pipe()

        def end_in_a_turn(done: Callable[[], None]) -> None:
            with shared_gates(path, Platform()).gate(9).turn("the dead one's", STALL_SECONDS):
                if os.fork() == 0:
                    os.close(ending)
                    os.read(living, 1)  # until the one who asks has closed the other end
                else:
                    done()
                os._exit(0)

        try:
            with _forked(end_in_a_turn) as reading:
                assert _is_done(reading)
                with shared_gates(path, Platform()).gate(9).turn("mine", STALL_SECONDS):
                    return None
        except WriterStalled as error:
            return f"a process ended in its turn, and nobody gets it: {error}"
        finally:
            os.close(ending)
            os.close(living)
