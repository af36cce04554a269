"""Walking over the blocks of a segment, and telling torn from corrupt where there is none.

Where no valid block stands, one of four things has happened:

* nothing was written there: only zeros follow. That is the end of the segment;
* **torn**: a write was cut off. What follows, if anything, was never proven to be on the medium, and nobody was told
  that it is;
* **corrupt**: a later block testifies that what stood here was on the medium, or the segment is sealed. Somebody was
  told OK, and the bytes have changed since;
* a newer version wrote there: `NewerFormat`, and nothing is touched.

A later block is looked for by its magic, and accepted only if its CRCs, seeded with the segment's salt, fit, it names
the very position at which it stands, and its number is higher.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.errors import Corruption
from penstock.stores.file.block import ALIGNMENT, FRONT_BYTES, MAGIC, Blank, Broken, Header, Kind, parse_header
from penstock.stores.file.segment import SCAN_BYTES, SegmentFile, is_blank_from

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import pyarrow as pa

    from penstock.producers import Run

TORN: Final = "torn"
CORRUPT: Final = "corrupt"
MISSING: Final = "missing"
FOREIGN: Final = "foreign"


class Damage(NamedTuple):
    """Where blocks should be and none can be read."""

    kind: str
    """One of the four words above."""
    file: str
    byte: int
    end_byte: int
    start: int
    """The first offset that is concerned."""
    stop: int | None
    """The offset after the last, or None where nobody can tell."""
    detail: str

    def error(self) -> Corruption:
        """Return it as an error."""
        return Corruption(self.kind, self.file, byte=self.byte, start=self.start, stop=self.stop, detail=self.detail)


class Walked(NamedTuple):
    """What a walk over a segment found."""

    position: int
    """Behind the last valid block."""
    number: int
    """Of the next block."""
    end: int
    """The offset of the next event."""
    epoch: int
    max_time: int
    last: Header
    damages: tuple[Damage, ...]


def walk(
    file: SegmentFile,
    *,
    sealed_at: int | None = None,
    stop_offset: int | None = None,
    proven_to: int | None = None,
    visit: Callable[[Header, pa.Buffer], None] = lambda _header, _content: None,
) -> Walked:
    """Read every block of a segment with its content, up to the end, and show each to `visit`.

    Of a sealed segment, `sealed_at` is the length that it must have, and `stop_offset` where the next one begins: what
    this one holds beyond it was superseded. Of an active one, `proven_to` is where a tail that is believed says that
    the durable part ends; nothing behind it is looked at.
    """
    size = file.size()
    limit = next((length for length in (sealed_at, proven_to) if length is not None), size)
    is_proven = sealed_at is not None or stop_offset is not None or proven_to is not None
    expected = _Expected(file)
    damages: list[Damage] = []
    while expected.position < limit and (stop_offset is None or expected.end < stop_offset):
        try:
            header, content = _valid_block(file, expected)
        except (Blank, Broken) as error:
            if isinstance(error, Blank) and proven_to is None and is_blank_from(file, expected.position, size):
                break
            found = _damage(file, expected, limit, proven=is_proven, why=error)
            damages.append(found.damage)
            if found.next is None:
                break
            expected.skip_to(found.next)
        else:
            visit(header, content)
            if not is_blank_from(file, header.content_position + header.content_length, header.end_position):
                damages.append(_padding(file, header))
            expected.accept(header)
    if stop_offset is not None and expected.end < stop_offset:
        if damages and damages[-1].stop is None:
            damages[-1] = damages[-1]._replace(kind=CORRUPT, stop=stop_offset)
        else:
            damages.append(_cut(file, expected, stop_offset))
    elif sealed_at is not None and size < sealed_at and not damages:
        damages.append(_cut(file, expected, expected.end))
    return expected.walked(tuple(damages))


class _Expected:
    """What the next block must be."""

    def __init__(self, file: SegmentFile) -> None:
        first = file.first
        self.position = first.end_position
        self.number = first.number + 1
        self.end = first.offset
        self.epoch = first.epoch
        self.max_time = file.facts.max_time
        self.last = first

    def check(self, header: Header) -> None:
        """Raise `Broken` if a block that is whole in itself does not belong here."""
        # A gap that replaced damage stands for a number of blocks that nobody knows.
        dense = header.number == self.number or (self.last.kind == Kind.GAP and header.number > self.number)
        if not dense or header.offset != self.end or header.epoch < self.epoch:
            raise Broken(
                f"block {header.number} at offset {header.offset} stands where block {self.number} at offset "
                f"{self.end} should be"
            )

    def skip_to(self, header: Header) -> None:
        """Go on at a block behind damage."""
        self.position, self.number, self.end = header.position, header.number, header.offset

    def accept(self, header: Header) -> None:
        self.position = header.end_position
        self.number = header.number + 1
        self.end = header.end_offset
        self.epoch = max(self.epoch, header.epoch)
        if header.kind == Kind.DATA:
            self.max_time = max(self.max_time, header.last_time)
        self.last = header

    def walked(self, damages: tuple[Damage, ...]) -> Walked:
        return Walked(
            position=self.position,
            number=self.number,
            end=self.end,
            epoch=self.epoch,
            max_time=self.max_time,
            last=self.last,
            damages=damages,
        )


def _valid_block(file: SegmentFile, expected: _Expected) -> tuple[Header, pa.Buffer]:
    header = parse_header(
        file.disk.read(file.descriptor, FRONT_BYTES, expected.position), file.segment, expected.position
    )
    expected.check(header)
    return header, file.read_content(header)


class _Found(NamedTuple):
    damage: Damage
    next: Header | None
    """The next valid block, where reading goes on; None after a torn tail, or if there is none."""


def _damage(file: SegmentFile, expected: _Expected, limit: int, *, proven: bool, why: Exception) -> _Found:
    """Tell torn from corrupt at the expected position, and find the next valid block."""
    nearest: Header | None = None
    for header in later_blocks(file, expected.position, limit, expected.number):
        nearest = nearest or header
        proven = proven or header.durable_number > expected.number
        if proven:
            break
    detail = str(why) or "there are zeros where a block should be"
    damage = Damage(
        kind=CORRUPT if proven else TORN,
        file=str(file.path),
        byte=expected.position,
        end_byte=nearest.position if nearest and proven else limit,
        start=expected.end,
        stop=nearest.offset if nearest and proven else None,
        detail=detail,
    )
    return _Found(damage, nearest if proven else None)


def _padding(file: SegmentFile, header: Header) -> Damage:
    where = header.content_position + header.content_length
    return Damage(
        kind=CORRUPT,
        file=str(file.path),
        byte=where,
        end_byte=header.end_position,
        start=header.end_offset,
        stop=header.end_offset,
        detail="the filling behind a block is not zero; no event is concerned",
    )


def _cut(file: SegmentFile, expected: _Expected, stop: int) -> Damage:
    return Damage(
        kind=CORRUPT,
        file=str(file.path),
        byte=expected.position,
        end_byte=file.size(),
        start=expected.end,
        stop=stop,
        detail=f"the sealed segment is cut off after {file.size()} bytes",
    )


def later_blocks(file: SegmentFile, position: int, stop: int, number: int) -> Iterator[Header]:
    """Yield the valid blocks behind a position whose number is higher, wherever they stand."""
    position += ALIGNMENT
    while position < stop:
        data = file.disk.read(file.descriptor, min(SCAN_BYTES, stop - position), position)
        if not data:
            return
        at = data.find(MAGIC)
        while at >= 0:
            header = _block_at(file, position + at) if (position + at) % ALIGNMENT == 0 else None
            if header is not None and header.number > number:
                yield header
            at = data.find(MAGIC, at + 1)
        position += len(data) // ALIGNMENT * ALIGNMENT or ALIGNMENT


def headers_across(file: SegmentFile, stop: int) -> Iterator[tuple[Header, tuple[Run, ...]]]:
    """Yield all blocks up to a position, with their runs, across damage that concerns no offset, such as a marker's.

    Raises `Blank` or `Broken` where anything else is damaged.
    """
    position, end = file.first.end_position, file.first.offset
    while position < stop:
        try:
            for header, runs in file.headers(position, stop):
                yield header, runs
                position, end = header.end_position, header.end_offset
        except (Blank, Broken):
            following = next(later_blocks(file, position, stop, 0), None)
            if following is None or following.offset != end:
                raise
            position = following.position


def _block_at(file: SegmentFile, position: int) -> Header | None:
    try:
        header = parse_header(file.disk.read(file.descriptor, FRONT_BYTES, position), file.segment, position)
        file.read_content(header)
    except (Blank, Broken):
        return None
    return header
