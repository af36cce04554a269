"""Valid blocks of every kind, and mutants of them, many at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import google_crc32c
import numpy as np
import pyarrow as pa

from penstock.batch import Batch
from penstock.deduplication import ProducerTable
from penstock.offsets import Range
from penstock.producers import Run
from penstock.rows import TopicInfo, TopicSettings
from penstock.stores.file.block import (
    ALIGNMENT,
    FRONT_BYTES,
    PREFIX_BYTES,
    Header,
    Kind,
    Segment,
    aligned,
    content_crc,
    encode_front,
    seed_of,
)
from penstock.stores.file.commit import Content, encode_content
from penstock.stores.file.segment import Facts, SegmentName, encode_first_block
from penstock.testing.conformance.builders import OTHER_PRODUCER, PRODUCER, a_run, an_event

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterator

LOG_ID: Final = bytes(range(100, 116))
PARTITION: Final = 2
NAME: Final = SegmentName(1000, 3)
SALT: Final = bytes(range(16))
SEGMENT: Final = Segment(LOG_ID, PARTITION, NAME.base, seed_of(SALT))
NOW: Final = 1_767_225_600_000_000
FIRST_NUMBER: Final = 40

CONTENT_CRC: Final = slice(PREFIX_BYTES + 104, PREFIX_BYTES + 108)
FIELDS: Final = {
    "version": (8, 2), "kind": (10, 2), "header length": (12, 4), "runs length": (16, 4), "body length": (24, 8),
    "position": (32, 8), "number": (40, 8), "log id": (64, 8), "partition": (80, 4), "flags": (84, 4),
    "epoch": (88, 8), "base": (96, 8), "offset": (104, 8), "span": (112, 8), "first time": (120, 8),
    "last time": (128, 8), "durable number": (136, 8), "durable offset": (144, 8), "mask": (152, 4),
    "number of runs": (156, 4), "raw length": (160, 8), "content CRC": (168, 4),
}  # fmt: skip
"""Where each field of prefix and header stands, and how long it is."""
LIMITS: Final = (
    0,
    1,
    2,
    3,
    4,
    63,
    64,
    65,
    127,
    128,
    255,
    1 << 16,
    (1 << 26) + 1,
    1 << 28,
    1 << 31,
    1 << 32,
    1 << 63,
    1 << 64,
)


class Original(NamedTuple):
    """A valid block."""

    kind: str
    position: int
    data: bytes
    header: Header | None
    """None for a segment's own."""

    @property
    def content_stop(self) -> int:
        """Where its content ends, within its bytes."""
        return len(self.data) if self.header is None else FRONT_BYTES + self.header.content_length


class Mutant(NamedTuple):
    """What became of a block."""

    data: bytes
    signed: bool
    """Its CRCs fit, so that it may be taken for a block although nobody wrote it."""


def originals() -> list[Original]:
    """Return the blocks of a whole segment, in their order."""
    found = [Original("SEGMENT", 0, _first_block(), None)]
    number, offset = FIRST_NUMBER + 1, NAME.base
    for kind, content in _contents():
        position = found[-1].position + len(found[-1].data)
        header = Header(
            kind=kind,
            position=position,
            number=number,
            epoch=NAME.epoch,
            offset=offset,
            span=content.events,
            first_time=NOW,
            last_time=NOW,
            durable_number=number,
            durable_offset=offset,
            mask=content.mask,
            run_count=len(content.runs),
            runs_length=len(content.runs_bytes),
            body_length=content.body.size,
            content_crc=content.crc,
            raw_length=content.raw_length,
            flags=content.flags,
        )
        data = encode_front(SEGMENT, header) + content.runs_bytes + content.body.to_pybytes()
        found.append(Original(kind.name, position, data.ljust(aligned(len(data)), b"\0"), header))
        number, offset = number + 1, header.end_offset
    return found


def _first_block() -> bytes:
    producers = ProducerTable()
    for sequence, producer in enumerate((PRODUCER, OTHER_PRODUCER)):
        producers.remember(Run(producer, 1, sequence, 3, 7), Range(3 * sequence, 3 * sequence + 3), NOW)
    topic = TopicInfo(name="orders", log_id=LOG_ID.hex(), settings=TopicSettings(partitions=3), created_at=NOW)
    facts = Facts(salt=SALT.hex(), topic=topic, slot=5, partition=PARTITION, max_time=NOW)
    return encode_first_block(facts, NAME, FIRST_NUMBER, NOW, producers)


def _contents() -> Iterator[tuple[Kind, Content]]:
    plain = Batch.build([b"one", b"two" * 20, b""])
    rich = Batch.from_events([an_event(b"%d" % number, key=None if number == 1 else b"key") for number in range(3)])
    several = [a_run(Batch(plain.columns[at : at + 1]), producer, at) for at, producer in enumerate(_PRODUCERS)]
    yield Kind.DATA, encode_content(plain.columns, several)
    yield Kind.DATA, encode_content(rich.columns, [a_run(rich)])
    yield Kind.MARKER, _plain(b"", 0)
    yield Kind.DATA, encode_content(Batch.build([b"abcd" * 100] * 4).columns, several[:1], compress=True)
    yield Kind.GAP, _plain(b"lost, and this is why", 5)
    yield Kind.DATA, encode_content(plain.columns, [])
    yield Kind.MARKER, _plain(b"", 0)


_PRODUCERS: Final = (PRODUCER, OTHER_PRODUCER, bytes(range(32, 48)))


def _plain(body: bytes, span: int) -> Content:
    return Content((), span, 0, b"", pa.py_buffer(body), content_crc(b"", body), len(body), 0)


# --- mutating -------------------------------------------------------------------------------------


def sign(data: bytearray, position: int, *, content: bool = False) -> bytes:
    """Make the CRCs of a front fit, and if asked the one of the content; as much of it as is there."""
    if content:
        stop = FRONT_BYTES + int.from_bytes(data[16:20], "little") + int.from_bytes(data[24:32], "little")
        data[CONTENT_CRC] = _crc(0, data[FRONT_BYTES:stop])
    data[PREFIX_BYTES - 4 : PREFIX_BYTES] = _crc(SEGMENT.seed if position else 0, data[: PREFIX_BYTES - 4])
    prefix_crc = int.from_bytes(data[PREFIX_BYTES - 4 : PREFIX_BYTES], "little")
    data[FRONT_BYTES - 4 : FRONT_BYTES] = _crc(prefix_crc, data[PREFIX_BYTES : FRONT_BYTES - 4])
    return bytes(data)


def _crc(seed: int, data: bytearray) -> bytes:
    return int(google_crc32c.extend(seed, bytes(data))).to_bytes(4, "little")


def _flip(original: Original, chance: random.Random, count: int, first: int, stop: int) -> Iterator[bytes]:
    """Yield copies of a block with one to eight bits flipped between two bytes."""
    length, bits = len(original.data), chance.randint(1, 8)
    drawn = np.frombuffer(chance.randbytes(8 * count * bits), np.uint64).reshape(count, bits)
    places = (first + (drawn >> np.uint64(3)) % np.uint64(stop - first)).astype(np.int64)
    copies = np.tile(np.frombuffer(original.data, np.uint8), (count, 1))
    masks = np.uint8(1) << (drawn & np.uint64(7)).astype(np.uint8)
    np.bitwise_xor.at(copies, (np.arange(count)[:, None], places), masks)
    whole = copies.tobytes()
    return (whole[at : at + length] for at in range(0, count * length, length))


def flipped(original: Original, chance: random.Random, count: int) -> Iterator[Mutant]:
    """Flip bits anywhere."""
    return (Mutant(data, signed=False) for data in _flip(original, chance, count, 0, len(original.data)))


def changed_inside(original: Original, chance: random.Random, count: int) -> Iterator[Mutant]:
    """Flip bits of runs and body, or of the header if there are none, and make the CRCs fit."""
    first = FRONT_BYTES if original.content_stop > FRONT_BYTES else PREFIX_BYTES
    for data in _flip(original, chance, count, first, original.content_stop):
        yield Mutant(sign(bytearray(data), original.position, content=True), signed=True)


def cut(original: Original, chance: random.Random, count: int) -> Iterator[Mutant]:
    """Cut the end off."""
    for _ in range(count):
        yield Mutant(original.data[: chance.randrange(len(original.data))], signed=False)


def extended(original: Original, chance: random.Random, count: int) -> Iterator[Mutant]:
    """Put something into a block, so that the rest is moved."""
    for extra in _noise(chance, count, ALIGNMENT):
        at = chance.randrange(len(original.data) + 1)
        yield Mutant(original.data[:at] + extra + original.data[at:], signed=False)


def at_limits(original: Original, chance: random.Random, count: int) -> Iterator[Mutant]:
    """Give fields values that somebody may have thought impossible, and make the CRCs fit."""
    fields = list(FIELDS.values())
    for _ in range(count):
        data = bytearray(original.data)
        for _ in range(chance.choice((1, 1, 1, 2, 3))):
            at, size = chance.choice(fields)
            was = int.from_bytes(data[at : at + size], "little")
            value = chance.choice((chance.choice(LIMITS), was + 1, was - 1, chance.choice(LIMITS) - 1, -was))
            data[at : at + size] = (value % (1 << 8 * size)).to_bytes(size, "little")
        yield Mutant(sign(data, original.position, content=chance.random() < 0.5), signed=True)


def spliced(original: Original, chance: random.Random, count: int) -> Iterator[Mutant]:
    """Go on with another block, or with another place of the same."""
    others = originals()
    for _ in range(count):
        other = chance.choice(others).data
        at = chance.randrange(len(original.data))
        yield Mutant(original.data[:at] + other[chance.choice((at, chance.randrange(len(other)))) :], signed=False)


def random_bytes(original: Original, chance: random.Random, count: int) -> Iterator[Mutant]:
    """Noise; some of it under a front that fits, with lengths that do not."""
    for data in _noise(chance, count, len(original.data)):
        if chance.random() < 0.5:
            yield Mutant(data, signed=False)
        else:
            yield Mutant(sign(bytearray(original.data[:FRONT_BYTES] + data), original.position), signed=True)


def _noise(chance: random.Random, count: int, length: int) -> Iterator[bytes]:
    whole = chance.randbytes(count * length)
    return (whole[at : at + length] for at in range(0, count * length, length))


MUTATIONS: Final[dict[str, Callable[[Original, random.Random, int], Iterator[Mutant]]]] = {
    "bits flipped": flipped,
    "cut": cut,
    "something put in": extended,
    "spliced with another": spliced,
    "random bytes": random_bytes,
    "fields at their limits, CRCs that fit": at_limits,
    "content changed, CRCs that fit": changed_inside,
}
