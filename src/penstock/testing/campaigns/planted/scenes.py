"""Hunts for planted bugs where no campaign in memory looks: one scene each.

Each returns what is wrong, in words, or None; and each finds nothing in code that is right.
"""

from __future__ import annotations

from contextlib import closing, suppress
from typing import TYPE_CHECKING

from penstock.errors import NewerFormat, PenstockError, StateMissing, TopicDeleted
from penstock.stores.file.block import (
    FRONT_BYTES,
    Blank,
    Broken,
    Header,
    Kind,
    Segment,
    content_crc,
    encode_front,
)
from penstock.stores.file.segment import SegmentFile, segment_names
from penstock.stores.file.verify import verify
from penstock.testing.campaigns.planted.scene import KEPT, LOST, OTHER_PRODUCER, in_a_scene
from penstock.testing.campaigns.virtual.life import SUBSCRIPTION, send
from penstock.testing.machine import ROOT

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.stores.file.tail import Tail
    from penstock.testing.campaigns.planted.scene import Scene
    from penstock.testing.machine import Machine

SYNC = r"sync .*\.seg"


# --- several processes ----------------------------------------------------------------------------


@in_a_scene()
def two_writers(scene: Scene) -> str | None:
    """Let one writer send again what another one has stored."""
    other = scene.open()
    scene.publish(b"a")
    scene.publish(b"b", store=other)
    act = scene.publish(b"c")
    again = send(other, act)
    return None if again == act.answer else f"offset {act.answer} was stored again, at {again}"


@in_a_scene()
def a_reader_beside_a_writer(scene: Scene) -> str | None:
    """Read at each moment of an append; what was read must outlast a power loss of that moment."""
    scene.publish(b"a")
    found: list[str] = []

    def look(operation: str) -> None:
        seen = scene.read(scene.open(scene.after_kill()))
        wrong = scene.wrong_on(scene.after_power_loss(LOST), seen)
        if wrong is not None:
            found.append(f"{wrong}, and were read before {operation!r}")

    scene.machine.on_step = look
    scene.publish(b"b")
    scene.machine.on_step = lambda _: None
    return next(iter(found), None)


@in_a_scene()
def a_writer_after_the_deletion(scene: Scene) -> str | None:
    """Publish to a topic that another process was killed in deleting."""
    other = scene.open()
    scene.publish(b"a", store=other)
    with scene.killed_before("sync directory"):
        scene.store.log.delete_topic(scene.topic.log_id)
    try:
        scene.publish(b"b", store=other)
    except TopicDeleted:
        return None
    return "an event was acknowledged by a topic that is deleted"


@in_a_scene()
def a_stale_lease(scene: Scene) -> str | None:
    """Commit for a lease that another process holds by now."""
    scene.publish(b"a")
    lease = scene.store.leases.acquire("lease", "one", 1.0)
    scene.machine.clock.advance(2.0)
    assert lease is not None
    assert scene.open().leases.acquire("lease", "another", 1.0) is not None
    return None if scene.commit(1, fences=(lease.fence,)) is not None else "a commit under a stale lease was taken"


# --- cursors --------------------------------------------------------------------------------------


@in_a_scene()
def cursors_that_are_refused(scene: Scene) -> str | None:
    """Commit a cursor beyond the end, and one that goes back."""
    scene.publish(b"a", b"b")
    if scene.commit(3) is None:
        return "a cursor at offset 3 was taken, and the log ends at 2"
    assert scene.commit(2) is None
    return None if scene.commit(1) is not None else "a cursor went back from offset 2 to 1"


@in_a_scene(durability="os")
def a_cursor_over_unsynced_events(scene: Scene) -> str | None:
    """Commit a cursor in a topic that does not sync; what it has passed must outlast a power loss."""
    scene.publish(b"a", b"b")
    assert scene.commit(2) is None
    return scene.wrong_on(scene.after_power_loss(LOST))


@in_a_scene()
def a_log_shorter_than_its_cursor(scene: Scene) -> str | None:
    """Lose events that a cursor has passed, by a medium that lied; their offsets must not be given out again."""
    tail = scene.tail(scene.store)
    scene.publish(b"a", b"b")
    assert scene.commit(2) is None
    after = scene.after_power_loss(LOST)
    [path] = scene.segments(after)
    after.disk.file(path).replace(bytes(after.disk.file(path).content[: tail.position]))
    offset = send(scene.open(after), scene.act([b"new"], OTHER_PRODUCER, 0))
    return None if offset >= 2 else f"a cursor has passed offset {offset}, and it was given out again"


# --- recovery -------------------------------------------------------------------------------------


def crashes_while_healing() -> str | None:
    """Kill a process during a sync; then crash the one that heals the log before each of its operations."""
    return _healing_a_part() or _healing_all()


@in_a_scene()
def _healing_a_part(scene: Scene) -> str | None:
    scene.publish(b"durable")
    return _crash_while_healing(scene)


@in_a_scene()
def _healing_all(scene: Scene) -> str | None:
    return _crash_while_healing(scene)


def _crash_while_healing(scene: Scene) -> str | None:
    with scene.killed_before(SYNC):
        scene.publish(b"unknown")
    healing = scene.after_kill()
    found: list[str | None] = []
    healing.on_step = lambda _: found.extend(
        scene.wrong_on(after) for after in (scene.after_kill(healing), scene.after_power_loss(LOST, healing))
    )
    scene.wrong_on(healing)
    return next((wrong for wrong in found if wrong is not None), None)


@in_a_scene(durability="os")
def lost_tails(scene: Scene) -> str | None:
    """Lose the tails while the machine runs; what is recovered and read then must outlast a power loss."""
    scene.publish(b"a")
    after = scene.after_kill()
    after.disk.remove(ROOT / "tails")
    seen = scene.read(scene.open(after))
    return scene.wrong_on(scene.after_power_loss(LOST, after), seen)


@in_a_scene()
def a_torn_write(scene: Scene) -> str | None:
    """Tear the last write; it must be kept in quarantine, cut off, and followed in a higher epoch."""
    scene.publish(b"a")
    tail = scene.tail(scene.store)
    with scene.killed_before(SYNC):
        scene.publish(b"torn" * 100)
    after = scene.after_power_loss(KEPT)
    [path] = scene.segments(after)
    _damage(after, path, tail.position + FRONT_BYTES + 100)
    store = scene.open(after)
    scene.read(store)
    if (epoch := scene.tail(store).epoch) <= tail.epoch:
        return f"the log was recovered and goes on in epoch {epoch}; it was {tail.epoch}"
    if any(after.disk.file(path).content[tail.position :]):
        return f"what was torn still stands in {path.name}"
    kept = [after.disk.file(path).content for path in after.disk.paths() if "quarantine" in path.parts]
    return None if any(b"torn" in content for content in kept) else "what was torn is not in quarantine"


@in_a_scene()
def a_payload_like_a_block(scene: Scene) -> str | None:
    """Tear a write whose payload looks like blocks that testify to it; nobody was told that it is stored."""
    tail = scene.tail(scene.store)
    with scene.killed_before(SYNC):
        scene.publish(b"-".join([_forged_front(tail)] * 64))  # one of them begins where a block may
    after = scene.after_power_loss(KEPT)
    [path] = scene.segments(after)
    _damage(after, path, tail.position + 8)
    return scene.wrong_on(after)


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


def _damage(machine: Machine, path: Path, byte: int, bit: int = 4) -> None:
    """Flip a bit on the medium."""
    content = bytearray(machine.disk.file(path).content)
    content[byte] ^= 1 << bit
    machine.disk.file(path).replace(bytes(content))


@in_a_scene()
def damage_before_a_witness(scene: Scene) -> str | None:
    """Damage an acknowledged block that later ones testify to; all others must still be there."""
    for payload in (b"damaged", b"b", b"c"):
        scene.publish(payload)
    after = scene.after_power_loss(KEPT)
    [path] = scene.segments(after)
    _damage(after, path, bytes(after.disk.file(path).content).index(b"damaged"))
    store = scene.open(after)
    found = [scene.read_one(store, offset) for offset in (1, 2)]
    return None if found == [b"b", b"c"] else f"offset 0 was damaged, and offsets 1 and 2 are {found}"


@in_a_scene()
def sealed_segments_cut(scene: Scene) -> str | None:
    """Cut sealed segments to other lengths; each must be told."""
    scene.fill()
    for path in scene.segments(scene.machine)[:-1]:
        file = scene.machine.disk.file(path)
        content = bytes(file.content)
        for length in range(len(content) - 1, len(content) - 200, -20):
            file.replace(content[:length])
            if verify(ROOT, scene.machine.platform).ok:
                return f"{path.name} was cut from {len(content)} to {length} bytes, and nobody noticed"
        file.replace(content)
    return None


@in_a_scene()
def damaged_headers(scene: Scene) -> str | None:
    """Flip each bit of a block's prefix and header; nobody must take it for a block."""
    scene.publish(b"a")
    [name] = segment_names(scene.machine.disk, scene.directory)
    [path] = scene.segments(scene.machine)
    file = SegmentFile(scene.machine.disk, path, name)
    start = file.first.end_position
    for bit in range(8 * FRONT_BYTES):
        _damage(scene.machine, path, start + bit // 8, bit % 8)
        with suppress(Blank, Broken, NewerFormat):
            header, _ = next(file.headers(start, file.size()))
            return f"a block with another bit {bit % 8} in byte {bit // 8} was taken for one: {header}"
        _damage(scene.machine, path, start + bit // 8, bit % 8)
    return None


@in_a_scene()
def damaged_indexes(scene: Scene) -> str | None:
    """Damage each byte of an index; what is read must not change."""
    scene.fill()
    sealed, following, *_ = segment_names(scene.machine.disk, scene.directory)
    scene.read_one(scene.store, following.base - 1)  # which looks at all of the first segment
    path = (scene.directory / str(sealed)).with_suffix(".idx")
    for byte in range(len(scene.machine.disk.file(path).content)):
        _damage(scene.machine, path, byte)
        with closing(scene.open()) as store:
            try:
                found = [scene.read_one(store, offset) for offset in range(following.base)]
            except PenstockError as error:
                return f"byte {byte} of the index: {error}"
        if found != [scene.stored[offset] for offset in range(following.base)]:
            return f"byte {byte} of the index: other events were read"
        _damage(scene.machine, path, byte)
    return None


@in_a_scene()
def damaged_rows(scene: Scene) -> str | None:
    """Change a cursor behind the store's back; it must not be believed."""
    scene.publish(b"a", b"b")
    assert scene.commit(2) is None
    with closing(scene.machine.databases.connect(ROOT / "control.db")) as connection:
        connection.execute("UPDATE cursors SET next_offset = 1")
    try:
        [cursor] = scene.open().cursors.load(scene.topic.log_id, SUBSCRIPTION)
    except StateMissing:
        return None
    return f"a row that was changed was believed: {cursor}"
