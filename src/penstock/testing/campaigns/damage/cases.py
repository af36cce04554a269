"""Every way in which the segments of the specimen are damaged.

* **flips and cuts**: each bit of each byte of a sealed segment, of the active one, of an index and of the file that
  says where the log begins; and each length to which they can be cut;
* **pages** of 512 bytes and of 4 KiB: zeroed, swapped, of an earlier moment, of the same file of another partition;
* **files**: missing, doubled under another name, of another partition or log;
* **combinations** of the above, drawn.
"""

from __future__ import annotations

from itertools import combinations
from typing import TYPE_CHECKING, Final

from penstock.stores.file.scan import CORRUPT, FOREIGN, MISSING
from penstock.stores.file.segment import SegmentName
from penstock.testing.campaigns.damage.oracle import Expected
from penstock.testing.campaigns.damage.segments import Case

if TYPE_CHECKING:
    import random
    from collections.abc import Iterator
    from pathlib import Path

    from penstock.testing.campaigns.damage.specimen import Layout, Log, Specimen

PAGE_BYTES: Final = (512, 4096)
FLIP, CUT = "a bit flipped", "a file cut"
STRANGE: Final = "of another partition"
DOUBLED: Final = "a segment doubled"


# --- single bits and lengths ----------------------------------------------------------------------


def bits_of(log: Log) -> list[tuple[Path, int]]:
    """Return every bit that can be flipped."""
    return [(path, bit) for path, data in log.files.items() for bit in range(8 * len(data))]


def lengths_of(log: Log) -> list[tuple[Path, int]]:
    """Return every length to which a file can be cut."""
    return [(path, length) for path, data in log.files.items() for length in range(len(data))]


def flipped(log: Log, path: Path, bit: int) -> Case:
    """Return the case of one flipped bit."""
    data = bytearray(log.files[path])
    data[bit // 8] ^= 1 << bit % 8
    return Case(FLIP, f"{_place(log, path)}, bit {bit % 8} of byte {bit // 8}", log, {path: bytes(data)})


def cut(log: Log, path: Path, length: int) -> Case:
    """Return the case of a file that was cut."""
    return Case(CUT, f"{_place(log, path)}, cut to {length} bytes", log, {path: log.files[path][:length]})


def _place(log: Log, path: Path) -> str:
    return f"partition {log.slot}, {path.name}"


# --- pages ----------------------------------------------------------------------------------------


def pages(specimen: Specimen) -> Iterator[Case]:
    """Yield all damage of whole pages."""
    log = specimen.logs[0]
    for layout in log.layouts:
        for size in PAGE_BYTES:
            yield from _changed(log, layout, size, _zeroed(log, layout, size))
            yield from _changed(log, layout, size, _swapped(log, layout, size))
            yield from _changed(log, layout, size, _replaced(specimen, layout, size))


def _changed(log: Log, layout: Layout, size: int, found: Iterator[tuple[str, bytes]]) -> Iterator[Case]:
    path = log.path(layout)
    for what, data in found:
        if data != log.files[path]:
            kind = what.partition(":")[0]
            told = _told_of_first_page(layout, str(path), size) if what.startswith(f"{STRANGE}: 0,") else None
            yield Case(f"a page {kind}", f"{_place(log, path)}, pages of {size} bytes, {what}", log, {path: data}, told)


def _told_of_first_page(layout: Layout, path: str, size: int) -> tuple[Expected, ...] | None:
    """Return what must be told if a whole first block is another's: then so is the file."""
    if size < layout.blocks[0].content_stop:
        return None
    return (Expected(FOREIGN, path, 0, layout.name.base, layout.next_base),)


def _split(data: bytes, size: int) -> list[bytes]:
    return [data[at : at + size] for at in range(0, len(data), size)]


def _zeroed(log: Log, layout: Layout, size: int) -> Iterator[tuple[str, bytes]]:
    whole = _split(log.files[log.path(layout)], size)
    for index, page in enumerate(whole):
        yield f"zeroed: {index}", b"".join([*whole[:index], bytes(len(page)), *whole[index + 1 :]])


def _swapped(log: Log, layout: Layout, size: int) -> Iterator[tuple[str, bytes]]:
    whole = _split(log.files[log.path(layout)], size)
    for one, other in combinations(range(len(whole)), 2):
        mixed = list(whole)
        mixed[one], mixed[other] = mixed[other], mixed[one]
        yield f"swapped with another: {one} and {other}", b"".join(mixed)


def _replaced(specimen: Specimen, layout: Layout, size: int) -> Iterator[tuple[str, bytes]]:
    log, *others = specimen.logs
    name = log.path(layout).name
    whole = _split(log.files[log.path(layout)], size)
    sources = [("of an earlier moment", f"step {step}", data) for step, data in enumerate(log.earlier[name])]
    sources += [(STRANGE, f"{other.slot}", other.files[other.directory / name]) for other in others]
    for kind, which, data in sources:
        for index, page in enumerate(_split(data.ljust(len(b"".join(whole)), b"\0"), size)[: len(whole)]):
            fitted = page[: len(whole[index])].ljust(len(whole[index]), b"\0")
            yield f"{kind}: {index}, {which}", b"".join([*whole[:index], fitted, *whole[index + 1 :]])


# --- files ----------------------------------------------------------------------------------------


def files(specimen: Specimen) -> Iterator[Case]:
    """Yield all damage of whole files; of a partition that has several sealed segments."""
    _, log, other = specimen.logs
    yield from _missing(log)
    yield from _doubled(log)
    for stranger in (specimen.logs[0], other):
        yield from _foreign(log, stranger)
    yield from _indexes(log, other)


def _missing(log: Log) -> Iterator[Case]:
    sealed = log.layouts[:-1]
    for first in range(len(sealed)):
        for last in range(first, len(sealed)):
            gone = sealed[first : last + 1]
            told = Expected(MISSING, str(log.path(gone[-1])), 0, gone[0].name.base, gone[-1].next_base)
            where = f"partition {log.slot}, without segments {first} to {last}"
            yield Case("a segment missing", where, log, {log.path(layout): None for layout in gone}, (told,))
    active = log.layouts[-1]
    told = Expected(MISSING, str(log.directory), 0, active.name.base, log.end)
    yield Case("a segment missing", f"partition {log.slot}, without the last", log, {log.path(active): None}, (told,))


def _doubled(log: Log) -> Iterator[Case]:
    """Yield copies under names that are not theirs: another epoch, or an offset inside of a segment."""
    sealed = log.layouts[:-1]
    names = [layout.name._replace(epoch=1) for layout in sealed]
    names += [SegmentName(layout.name.base + 1, 0) for layout in sealed]
    for layout in log.layouts:
        for name in names:
            path = log.directory / str(name)
            stop = next(other.name.base for other in log.layouts if other.name.base > name.base)
            told = Expected(CORRUPT, str(path), 0, name.base, stop)
            where = f"partition {log.slot}, {layout.name} also as {name}"
            yield Case(DOUBLED, where, log, {path: log.files[log.path(layout)]}, (told,))


def _foreign(log: Log, stranger: Log) -> Iterator[Case]:
    """Yield whole segments of others: foreign if the name is theirs, else they are not even what they are called."""
    for layout in log.layouts[:-1]:
        for other in stranger.layouts:
            kind = FOREIGN if other.name == layout.name else CORRUPT
            told = Expected(kind, str(log.path(layout)), 0, layout.name.base, layout.next_base)
            where = f"partition {log.slot}, {layout.name} is {other.name} of partition {stranger.slot}"
            data = stranger.files[stranger.path(other)]
            yield Case("a segment of another log", where, log, {log.path(layout): data}, (told,))


def _indexes(log: Log, stranger: Log) -> Iterator[Case]:
    """Yield indexes that are whole, and another segment's: nothing may rest on them."""
    for source in (log, stranger):
        for layout in log.layouts[:-1]:
            for other in source.layouts[:-1]:
                path = log.path(layout).with_suffix(".idx")
                data = source.files[source.path(other).with_suffix(".idx")]
                if data != log.files[path]:
                    where = f"{_place(log, path)} is that of {other.name}, partition {source.slot}"
                    yield Case("an index of another segment", where, log, {path: data}, ())


# --- combinations ---------------------------------------------------------------------------------


def combined(specimen: Specimen, chance: random.Random) -> Case:
    """Return a drawn combination of damage in one or several segments."""
    log = chance.choice(specimen.logs)
    after: dict[Path, bytearray] = {}
    words = []
    for _ in range(chance.randint(2, 4)):
        path = log.path(chance.choice(log.layouts))
        data = after.setdefault(path, bytearray(log.files[path]))
        at, word = chance.randrange(len(data)), chance.choice(["flip", "zero", "cut", "noise"])
        length = chance.choice([1, 64, 192, *PAGE_BYTES])
        if word == "flip":
            data[at] ^= 1 << chance.randrange(8)
        elif word == "zero":
            data[at : at + length] = bytes(len(data[at : at + length]))
        elif word == "noise":
            data[at : at + length] = chance.randbytes(len(data[at : at + length]))
        elif at >= 1:
            del data[at:]
        words.append(f"{word} {path.name} at {at} ({length})")
    changed = {path: bytes(data) for path, data in after.items()}
    return Case("damage combined", f"partition {log.slot}: {', '.join(words)}", log, changed)
