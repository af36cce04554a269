"""`xxh64` of many short keys at once, in numpy columns.

Hashing is the only thing that is done to every key of every batch. One call per key into the C library costs
more in Python's calls than in hashing; below 32 bytes, where nearly all keys are, xxh64 is a short chain of
multiplications, and numpy takes each link for all keys together. It gives the same numbers as the library,
which a test checks, and which it must for ever: a key's hash decides its partition.

The algorithm for short inputs: begin with the seed, a prime and the length; mix in the input by 8 bytes, then by
4, then by single bytes; stir at the end. Keys of one kind often begin alike (`customer-…`): what all of them have in
common is mixed in once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SHORT_MAX = 31
"""Longer keys have four more accumulators, and are rare: they go through the C library."""
FEW_LENGTHS = 5
"""Keys of so few lengths are hashed length by length, if there are enough of them …"""
GROUPED_MIN = 4_096
"""… which is faster than to see for each step which of them have it."""

_MASK = (1 << 64) - 1
_PRIME_5 = 0x27D4EB2F165667C5
_P1 = np.uint64(0x9E3779B185EBCA87)
_P2 = np.uint64(0xC2B2AE3D27D4EB4F)
_P3 = np.uint64(0x165667B19E3779F9)
_P4 = np.uint64(0x85EBCA77C2B2AE63)
_P5 = np.uint64(_PRIME_5)

Words = npt.NDArray[np.uint64]


def xxh64_short(
    data: npt.NDArray[np.uint8], starts: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64], seed: int
) -> Words:
    """Return `xxh64(data[start : start + length], seed)` for each key; none is longer than `SHORT_MAX`."""
    hashes = lengths.astype(np.uint64) + np.uint64((seed + _PRIME_5) & _MASK)
    if not len(lengths):
        return hashes
    # Words are read at any byte, so that each key's are read at once; the padding lets the last ones end behind.
    padded = np.zeros(len(data) + SHORT_MAX, np.uint8)
    padded[: len(data)] = data
    by_eight = np.ndarray(len(data) + 1, "<u8", padded, strides=(1,))
    by_four = np.ndarray(len(data) + 1, "<u4", padded, strides=(1,))
    shortest, longest = int(lengths.min()), int(lengths.max())
    if longest - shortest < FEW_LENGTHS and len(lengths) > GROUPED_MIN and shortest:
        for length in range(shortest, longest + 1):
            mine = np.flatnonzero(lengths == length)
            if len(mine):
                hashes[mine] = _mixed(_reader({8: by_eight, 4: by_four, 1: padded}, starts[mine]), length, seed)
        return hashes
    places, left = starts.copy(), lengths.copy()

    def take(mixed: Words, width: int, *, all_have_it: bool) -> None:
        """Keep what was mixed for those keys that still have so many bytes, and move on in these."""
        if all_have_it:
            hashes[:] = mixed
            np.add(places, width, out=places)
            np.subtract(left, width, out=left)
        else:
            has = left >= width
            np.copyto(hashes, mixed, where=has)
            step = has * np.int64(width)
            np.add(places, step, out=places)
            np.subtract(left, step, out=left)

    for number in range(1, longest // 8 + 1):
        word = _rotated(by_eight[places] * _P2, 31)
        word *= _P1
        word ^= hashes
        word = _rotated(word, 27)
        word *= _P1
        word += _P4
        take(word, 8, all_have_it=shortest >= 8 * number)
    if (left >= 4).any():
        word = by_four[places].astype(np.uint64)
        word *= _P1
        word ^= hashes
        word = _rotated(word, 23)
        word *= _P2
        word += _P3
        take(word, 4, all_have_it=False)
    while left.any():
        word = padded[places].astype(np.uint64)
        word *= _P5
        word ^= hashes
        word = _rotated(word, 11)
        word *= _P1
        take(word, 1, all_have_it=False)
    return _stirred(hashes)


def _reader(
    by_width: dict[int, npt.NDArray[Any]], starts: npt.NDArray[np.int64]
) -> Callable[[int, int], npt.NDArray[Any]]:
    return lambda at, width: by_width[width][starts + at]


def xxh64_alike(data: npt.NDArray[np.uint8], count: int, length: int, seed: int) -> Words:
    """Return `xxh64` of so many keys of one length, 1 to `SHORT_MAX`, that follow each other in the data.

    Most batches have such keys. Each step is one of all keys, and their words are read without an index: it takes a
    fourth of the time.
    """

    def read(at: int, width: int) -> npt.NDArray[Any]:
        return np.ndarray(count, f"<u{width}", data, at, (length,))

    return _mixed(read, length, seed)


def _mixed(read: Callable[[int, int], npt.NDArray[Any]], length: int, seed: int) -> Words:
    """Return the hashes of keys of one length; `read(at, width)` gives so many bytes of each."""
    hashes = np.array([(seed + _PRIME_5 + length) & _MASK], np.uint64)  # one, as long as all are alike
    at = 0
    for width, mix in _widths(length):
        read_here = read(at, width)
        if len(hashes) == 1 and _all_same(read_here):
            read_here = read_here[:1]
        # As a copy: to calculate with words that are not aligned is slower.
        hashes, at = mix(read_here.astype(np.uint64), hashes), at + width
    count = len(read(0, 1))
    return _stirred(hashes if len(hashes) == count else np.full(count, hashes[0]))


def _widths(length: int) -> Iterator[tuple[int, Callable[[Words, Words], Words]]]:
    """Yield how a key of this length is taken in: by how many bytes, and by what mixes them in."""
    yield from [(8, _mix_8)] * (length // 8)
    yield from [(4, _mix_4)] * (length % 8 // 4)
    yield from [(1, _mix_1)] * (length % 4)


def _all_same(words: npt.NDArray[Any]) -> bool:
    # As a rule two of them tell already.
    return bool(words[0] == words[-1] and words[0] == words[len(words) // 2] and (words == words[0]).all())


def _mix_8(words: Words, hashes: Words) -> Words:
    words *= _P2
    words = _rotated(words, 31)
    words *= _P1
    words = _joined(words, hashes)
    words = _rotated(words, 27)
    words *= _P1
    words += _P4
    return words


def _mix_4(words: Words, hashes: Words) -> Words:
    words *= _P1
    words = _rotated(_joined(words, hashes), 23)
    words *= _P2
    words += _P3
    return words


def _mix_1(words: Words, hashes: Words) -> Words:
    words *= _P5
    words = _rotated(_joined(words, hashes), 11)
    words *= _P1
    return words


def _joined(words: Words, hashes: Words) -> Words:
    """Return both, one into the other; either may be of one word, for all."""
    if len(words) < len(hashes):
        return words ^ hashes
    words ^= hashes
    return words


def _rotated(words: Words, bits: int) -> Words:
    low = words >> np.uint64(64 - bits)
    words <<= np.uint64(bits)
    words |= low
    return words


def _stirred(words: Words) -> Words:
    for bits, prime in ((33, _P2), (29, _P3)):
        words ^= words >> np.uint64(bits)
        words *= prime
    words ^= words >> np.uint64(32)
    return words
