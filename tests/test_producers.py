from __future__ import annotations

import uuid

from hypothesis import given
from hypothesis import strategies as st

from penstock.producers import Run, born_at, lasting_producer, process_producer


@given(st.integers(0, 253_402_300_799_999_999))
def test_a_process_is_a_uuid_of_version_7_that_carries_its_birth(now_us: int) -> None:
    producer = process_producer(now_us)
    as_uuid = uuid.UUID(bytes=producer)
    assert (as_uuid.version, as_uuid.variant) == (7, uuid.RFC_4122)
    assert born_at(producer) == now_us // 1000 * 1000


def test_a_lasting_producer_is_a_uuid_of_version_4_without_a_birth() -> None:
    producer = lasting_producer()
    assert uuid.UUID(bytes=producer).version == 4
    assert born_at(producer) is None


def test_no_two_producers_are_alike() -> None:
    assert len({process_producer(0) for _ in range(1000)}) == 1000


def test_an_id_is_derived_from_producer_and_sequence() -> None:
    run = Run(bytes(16), 0, 7, 3, 0)
    assert run.derived_ids() == [f"{'0' * 32}-{sequence}" for sequence in (7, 8, 9)]
    assert run.end_sequence == 10
