from __future__ import annotations

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from penstock import columns as cols
from penstock.batch import Batch
from penstock.hashing import FEW_LENGTHS, GROUPED_MIN, SHORT_MAX, xxh64_alike, xxh64_short
from penstock.testing.campaigns.planted.tools import changed

seeds = st.sampled_from([0, 1, 2**64 - 1])


def hashed(keys: list[bytes], seed: int) -> list[int]:
    lengths = np.array([len(key) for key in keys], np.int64)
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]]).astype(np.int64) if keys else lengths
    data = np.frombuffer(b"".join(keys), np.uint8)
    found: list[int] = xxh64_short(data, starts, lengths, seed).tolist()
    return found


@given(st.lists(st.binary(max_size=SHORT_MAX), max_size=40), seeds)
def test_short_keys_hash_as_the_library_does(keys: list[bytes], seed: int) -> None:
    assert hashed(keys, seed) == [xxhash.xxh64_intdigest(key, seed) for key in keys]


@pytest.mark.parametrize("length", range(SHORT_MAX + 1))
def test_keys_of_one_length_hash_as_the_library_does(length: int) -> None:
    keys = [bytes((7 * number + index) % 256 for index in range(length)) for number in range(20)]
    assert hashed(keys, 1) == [xxhash.xxh64_intdigest(key, 1) for key in keys]


@given(
    st.lists(st.none() | st.binary(max_size=60), min_size=1, max_size=20),
    st.sampled_from([0, cols.ONE_BY_ONE_MAX]),
    st.data(),
)
def test_a_slice_of_a_batch_hashes_its_own_keys_long_or_short_few_or_many(
    keys: list[bytes | None], few: int, data: st.DataObject
) -> None:
    low = data.draw(st.integers(0, len(keys) - 1))
    columns = Batch.build([b""] * len(keys), key=[*keys[:-1], keys[-1] or b"key"]).columns.slice(low)
    with changed(cols, ONE_BY_ONE_MAX=few):
        hashes, present = Batch(columns).key_hashes(0)
    expected = [*keys[:-1], keys[-1] or b"key"][low:]
    for number, key in enumerate(expected):
        if key is None:
            assert present is not None
            assert not present[number]
        else:
            assert hashes[number] == xxhash.xxh64_intdigest(key, 0)


@given(st.integers(1, SHORT_MAX), st.integers(1, 40), seeds, st.data())
def test_keys_of_one_length_that_follow_each_other_hash_as_the_library_does(
    length: int, count: int, seed: int, data: st.DataObject
) -> None:
    keys = data.draw(st.lists(st.binary(min_size=length, max_size=length), min_size=count, max_size=count))
    found = xxh64_alike(np.frombuffer(b"".join(keys), np.uint8), count, length, seed).tolist()
    assert found == [xxhash.xxh64_intdigest(key, seed) for key in keys]


@pytest.mark.parametrize("shortest", [1, 4, 8, 12, SHORT_MAX - FEW_LENGTHS + 1])
def test_many_keys_of_few_lengths_hash_as_the_library_does(shortest: int) -> None:
    keys = [
        bytes((7 * number + index) % 256 for index in range(shortest + number % FEW_LENGTHS))
        for number in range(GROUPED_MIN + 1)
    ]
    assert hashed(keys, 1) == [xxhash.xxh64_intdigest(key, 1) for key in keys]


@pytest.mark.parametrize("length", [1, 3, 8, 9, 12, 13, 15, 16, 20, SHORT_MAX])
@pytest.mark.parametrize("differing", [0, 1, 2, 5])
def test_keys_that_begin_alike_hash_as_the_library_does(length: int, differing: int) -> None:
    numbers = [0, 5, 0, 77, 4_000, 0, 0] if differing else [0] * 7
    keys = [(b"customer-%022d" % 0)[: length - differing] + b"%05d" % number for number in numbers]
    keys = [key[:length] if differing else (b"x" * length) for key in keys]
    keys = [key.ljust(length, b"-") for key in keys]
    found = xxh64_alike(np.frombuffer(b"".join(keys), np.uint8), len(keys), length, 1).tolist()
    assert found == [xxhash.xxh64_intdigest(key, 1) for key in keys]


@pytest.mark.parametrize("place", range(20))
def test_one_key_that_begins_otherwise_is_not_taken_for_the_others(place: int) -> None:
    keys = [b"customer-000001"] * 20
    keys[place] = b"costumer-000001"
    found = xxh64_alike(np.frombuffer(b"".join(keys), np.uint8), 20, 15, 1).tolist()
    assert found == [xxhash.xxh64_intdigest(key, 1) for key in keys]
