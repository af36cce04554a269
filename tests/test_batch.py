from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pytest
import xxhash
from hypothesis import example, given
from hypothesis import strategies as st

from penstock import columns as cols
from penstock.batch import KIND_EVENTS_MIN, NEVER, STORED_SCHEMA, UNTYPED, Batch, Kind, Place, StoredEvent
from penstock.errors import InvalidBatch, InvalidEvent, TooLarge, UsageError
from penstock.events import VERSION_HEADER, Event
from penstock.offsets import Position, Range
from penstock.parsing import parse
from penstock.producers import Run
from penstock.testing.campaigns.planted.tools import changed

PLACE = Place(topic="orders", partition=3, appended_at=1_700_000_000_000_000, source="/shop", content_type="text/plain")

texts = st.text(st.characters(blacklist_categories=("Cs", "Cc", "Cn")), min_size=1, max_size=12)
moments = st.datetimes(timezones=st.just(UTC))
events = st.builds(
    Event,
    data=st.binary(max_size=40),
    type=st.none() | texts,
    key=st.none() | st.binary(max_size=12),
    id=st.none() | texts,
    source=st.none() | texts,
    subject=st.none() | texts,
    time=st.none() | moments,
    expires_at=st.none() | moments,
    content_type=st.none() | texts,
    headers=st.dictionaries(texts, st.binary(max_size=8), max_size=3),
)
event_lists = st.lists(events, max_size=12)
placed_lists = st.tuples(st.lists(events, min_size=1, max_size=12), st.integers(0, 10**12))


def runs_of(*counts: int) -> tuple[Run, ...]:
    return tuple(Run(bytes([index + 1]) * 16, 0, 100 * index, count, 0) for index, count in enumerate(counts))


def placed(listed: list[Event], start: int) -> Batch:
    batch = Batch.from_events(listed)
    half = len(listed) // 2
    counts = [count for count in (half, len(listed) - half) if count]
    return batch.at(start, PLACE, runs_of(*counts))


def resolved(listed: list[Event]) -> list[Event]:
    """What must be read back: the publisher's words, or what the place and the runs say instead."""
    half = len(listed) // 2
    counts = [count for count in (half, len(listed) - half) if count]
    ids = [id_ for run in runs_of(*counts) for id_ in run.derived_ids()]
    return [
        msgspec.structs.replace(
            event,
            id=event.id or identity,
            type=event.type or UNTYPED,
            source=event.source or PLACE.source,
            content_type=event.content_type or PLACE.content_type,
        )
        for event, identity in zip(listed, ids, strict=True)
    ]


# --- round trips against plain lists ---------------------------------------------------------


@given(placed_lists)
def test_events_come_back_as_they_were_given(case: tuple[list[Event], int]) -> None:
    listed, start = case
    batch = placed(listed, start)
    assert [event.to_event() for event in batch] == resolved(listed)
    assert [event.offset for event in batch] == list(range(start, start + len(listed)))
    assert [event.position for event in batch] == [Position("orders", 3, offset) for offset in batch.range]


@given(placed_lists)
def test_bytes_come_back_as_the_same_events(case: tuple[list[Event], int]) -> None:
    listed, start = case
    batch = placed(listed, start)
    again = Batch.from_bytes(batch.to_bytes(), batch.mask, start=start, place=batch.place, runs=batch.runs)
    assert again.columns.equals(batch.columns)
    assert [event.to_event() for event in again] == resolved(listed)


@given(placed_lists, st.data())
def test_a_slice_is_the_slice_of_the_list(case: tuple[list[Event], int], data: st.DataObject) -> None:
    listed, start = case
    low = data.draw(st.integers(0, start + len(listed) + 3))
    high = data.draw(st.integers(low, low + len(listed) + 3))
    part = placed(listed, start).slice(Range(low, high))
    inside = [index for index in range(len(listed)) if low <= start + index < high]
    assert [event.to_event() for event in part] == [resolved(listed)[index] for index in inside]
    assert part.offsets.tolist() == [start + index for index in inside]
    assert part.sizes.tolist() == placed(listed, start).sizes[inside].tolist()


def test_a_slice_copies_nothing() -> None:
    batch = Batch.build([b"x" * 100] * 1000)
    part = batch.slice(Range(10, 990))
    assert part.columns.column("data").buffers()[2].address == batch.columns.column("data").buffers()[2].address


@given(placed_lists, st.data())
def test_a_selection_is_the_chosen_events_in_order(case: tuple[list[Event], int], data: st.DataObject) -> None:
    listed, start = case
    chosen = data.draw(st.lists(st.integers(0, len(listed) - 1)))
    batch = placed(listed, start)
    selected = batch.select([start + index for index in chosen])
    expected = sorted(set(chosen))
    assert len(selected) == len(expected)
    assert selected.columns is batch.columns
    assert [event.to_event() for event in selected] == [resolved(listed)[index] for index in expected]
    assert selected.offsets.tolist() == [start + index for index in expected]
    assert selected.to_arrow().equals(batch.to_arrow().take(pa.array(expected, pa.int64())))
    assert selected.sizes.tolist() == batch.sizes[expected].tolist()
    assert selected.slots().tolist() == batch.slots()[expected].tolist()
    cut = Range(start + 1, start + len(listed))
    assert selected.slice(cut).offsets.tolist() == [start + index for index in expected if index >= 1]


def test_a_selection_of_a_selection_has_what_both_have() -> None:
    batch = Batch.build([b"0", b"1", b"2", b"3"]).at(10, PLACE, ())
    assert batch.select([10, 11, 13]).select([11, 12, 13]).offsets.tolist() == [11, 13]


def test_a_text_beyond_ascii_is_not_a_control_character() -> None:
    table = pa.table({"data": [b"a"], "subject": ["Größe \xa0 ¡ Â"], "type": ["typ"]})
    (event,) = Batch.from_arrow(table)
    assert event.subject == "Größe \xa0 ¡ Â"


def test_a_selection_outside_of_the_batch_is_refused_with_its_offset() -> None:
    batch = placed([Event(data=b"a"), Event(data=b"b")], 10)
    with pytest.raises(UsageError, match=r"offset 12 is not in this batch, which covers \[10, 12\)"):
        batch.select([10, 12])


@given(placed_lists)
def test_to_arrow_always_has_the_full_schema_with_everything_resolved(case: tuple[list[Event], int]) -> None:
    listed, start = case
    batch = placed(listed, start)
    table = batch.to_arrow()
    table.validate(full=True)
    assert table.schema.equals(STORED_SCHEMA)
    assert table.column("offset").to_pylist() == list(batch.range)
    assert set(table.column("topic").to_pylist()) == {"orders"}
    for name in ("id", "source", "type", "subject", "key", "content_type", "data"):
        assert table.column(name).to_pylist() == [getattr(event, name) for event in resolved(listed)]
    assert batch.to_arrow(["data", "offset"]).schema.names == ["data", "offset"]


def test_an_unknown_column_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(UsageError, match="did you mean 'offset'"):
        Batch.build([b"a"]).to_arrow(["offsets"])


@given(event_lists)
def test_columns_that_no_event_uses_are_left_out(listed: list[Event]) -> None:
    names = Batch.from_events(listed).columns.schema.names
    used = [
        name for name in cols.NAMES if name == "data" or any(getattr(event, name) not in (None, {}) for event in listed)
    ]
    assert names == used


def test_one_value_stands_for_all_events() -> None:
    batch = Batch.build([b"a", b"b"], type="order.placed", key=["k", None])
    assert [event.type for event in batch] == ["order.placed"] * 2
    assert [event.key for event in batch] == [b"k", None]


def test_times_are_kept_as_integers_and_come_back_to_the_microsecond() -> None:
    moment = datetime(2026, 1, 1, tzinfo=UTC)
    batch = Batch.build([b"a"] * 3, time=[moment, None, moment + timedelta(microseconds=1)])
    assert [event.time for event in batch] == [moment, None, moment + timedelta(microseconds=1)]
    assert [batch.value("time", row) for row in range(3)][1:] == [None, int(moment.timestamp() * 1e6) + 1]


def test_a_repr_shows_no_payload() -> None:
    batch = placed([Event(data=b"secret", headers={"token": b"hidden"})], 7)
    (event,) = batch
    assert "orders/3@7" in repr(event)
    for text in (repr(event), repr(batch)):
        assert "secret" not in text
        assert "hidden" not in text


# --- input that is wrong ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"data": [b"a", None]}, "no data"),
        ({"data": [1]}, "column 'data'"),
        ({"data": [b"a"], "key": [5]}, "column 'key'"),
        ({"data": [b"a"], "key": [b"a", b"b"]}, "column 'key' has 2 values for 1 events"),
        ({"data": [b"a"], "type": [b"\xff"]}, "column 'type'"),
        ({"data": [b"a"], "type": ["\ud800"]}, "column 'type'"),
        ({"data": [b"a"], "headers": [{"a": 1}]}, "column 'headers'"),
        ({"data": [b"a"], "time": ["yesterday"]}, "column 'time'"),
    ],
)
def test_values_that_do_not_fit_are_refused_by_the_name_of_their_column(values: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidEvent, match=words):
        Batch.build(**values)


def test_a_batch_beyond_the_limit_is_refused() -> None:
    with pytest.raises(TooLarge, match="67,108,864"):
        Batch.build([b"x" * (1 << 20)] * 65)


@pytest.mark.parametrize(
    ("table", "words"),
    [
        (pa.table({"data": [b"a"], "keys": [b"k"]}), "no event column 'keys'; did you mean 'key'"),
        (pa.table({"key": [b"k"]}), "'data' is missing"),
        (pa.table({"data": pa.array([b"a", None])}), "no data"),
        (pa.table({"data": [b"a"], "type": [5.5]}), "column 'type'"),
        (pa.table({"data": [b"a"], "type": ["a\x00b"]}), "control character"),
        (pa.table({"data": [b"a"], "subject": ["C1 \x85 control"]}), "control character"),
        (pa.table({"data": [b"a"], "subject": ["\x7f"]}), "control character"),
        (pa.table({"data": [b"a"], "id": [""]}), "empty"),
        (pa.table({"data": [b"a"], "headers": pa.array([{"a\n": b""}], pa.map_(pa.string(), pa.binary()))}), "headers"),
    ],
)
def test_arrow_data_that_is_not_events_is_refused_by_the_name_of_its_column(table: pa.Table, words: str) -> None:
    with pytest.raises(InvalidEvent, match=words):
        Batch.from_arrow(table)


def test_arrow_data_is_cast_where_nothing_is_lost() -> None:
    table = pa.table(
        {
            "data": pa.array(["text"], pa.large_string()),
            "type": pa.array(["order.placed"]).dictionary_encode(),
            "time": pa.array([datetime(2026, 1, 1, tzinfo=UTC)], pa.timestamp("ms", tz="UTC")),
        }
    )
    (event,) = Batch.from_arrow(table)
    assert (event.data, event.type, event.time) == (b"text", "order.placed", datetime(2026, 1, 1, tzinfo=UTC))


def sample() -> Batch:
    return Batch.from_events(
        [
            Event(
                data=bytes([index]) * 20,
                type="order.placed",
                key=b"ada" if index % 2 else None,
                time=datetime(2026, 1, 1, tzinfo=UTC),
                headers={"traceparent": b"00-1"} if index % 3 else {},
            )
            for index in range(8)
        ]
    )


@given(st.data())
def test_mutated_bytes_are_refused_or_are_a_valid_batch(data: st.DataObject) -> None:
    batch = sample()
    raw = bytearray(batch.to_bytes())
    for _ in range(data.draw(st.integers(1, 6))):
        match data.draw(st.sampled_from(["flip", "flip", "number", "cut", "grow"])):
            case "flip" if raw:
                raw[data.draw(st.integers(0, len(raw) - 1))] ^= 1 << data.draw(st.integers(0, 7))
            case "number" if len(raw) >= 8:
                place = data.draw(st.integers(0, len(raw) // 4 - 1)) * 4
                raw[place : place + 4] = data.draw(
                    st.sampled_from([b"\xff\xff\xff\xff", b"\xff\xff\xff\x7f", b"\0\0\0\x80", b"\0\0\0\0", b"\1\0\0\0"])
                )
            case "cut":
                del raw[data.draw(st.integers(0, len(raw))) :]
            case "grow":
                raw += bytes(data.draw(st.integers(1, 64)))
            case _:
                pass
    mask = data.draw(st.just(batch.mask) | st.integers(-1, 1 << 11))
    before = pa.total_allocated_bytes()
    try:
        parsed = Batch.from_bytes(bytes(raw), mask)
    except InvalidBatch:
        return
    # What passed is whole: every cell can be looked at, and nothing was allocated beyond the input's size.
    assert pa.total_allocated_bytes() - before <= 4 * len(raw) + 4096
    for event in parsed:
        event.to_event()
    parsed.to_arrow()
    cols.digest(parsed.columns)


@given(st.binary(max_size=300), st.integers(-5, 1 << 12))
def test_arbitrary_bytes_are_never_a_batch(raw: bytes, mask: int) -> None:
    with pytest.raises(InvalidBatch):
        Batch.from_bytes(raw, mask)


def test_a_compressed_body_is_refused_before_it_is_unpacked() -> None:
    batch = Batch.build([b"\0" * 1_000_000] * 30)
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.ipc.new_stream(sink, batch.columns.schema, options=options) as writer:
        writer.write_batch(batch.columns)
    reader = pa.ipc.MessageReader.open_stream(sink.getvalue())
    reader.read_next_message()
    packed = reader.read_next_message().serialize()
    assert packed.size < 100_000
    before = pa.total_allocated_bytes()
    with pytest.raises(InvalidBatch, match="compressed"):
        Batch.from_bytes(packed, batch.mask)
    assert pa.total_allocated_bytes() == before


@pytest.mark.parametrize("name", ["type", "headers"])
def test_a_text_that_is_not_utf8_is_refused_and_one_that_is_not_ascii_is_kept(name: str) -> None:
    value: Any = {"Größe": b"1"} if name == "headers" else "Größe"
    batch = Batch.build([b"a", b"b"], **{name: [value, value]})
    raw = batch.to_bytes().to_pybytes()
    (again, _) = Batch.from_bytes(raw, batch.mask)
    assert again.to_event() == Event(data=b"a", **{"type": UNTYPED, name: value})
    with pytest.raises(InvalidBatch, match="UTF8"):
        Batch.from_bytes(raw.replace("ö".encode(), b"\xff\xff", 1), batch.mask)


def test_bytes_of_other_columns_than_announced_are_refused() -> None:
    batch = Batch.build([b"a"], type="t", key=["k"])
    with pytest.raises(InvalidBatch, match="3 columns, 1 were announced"):
        Batch.from_bytes(batch.to_bytes(), cols.mask_of(["data"]))


def test_a_mask_without_data_or_of_a_newer_format_is_refused() -> None:
    raw = Batch.build([b"a"]).to_bytes()
    for mask in (0, 1, 1 << 10 | 1 << 9):
        with pytest.raises(InvalidBatch, match="mask"):
            Batch.from_bytes(raw, mask)


def test_buffers_that_end_between_two_numbers_are_read_as_far_as_they_count() -> None:
    times = pa.py_buffer(np.arange(3, dtype=np.int64).tobytes() + b"odd")
    offsets = pa.py_buffer(np.array([0, 1, 2, 3], np.int32).tobytes() + b"odd")
    time = pa.Array.from_buffers(cols.TIMESTAMP, 3, [None, times])
    data = pa.Array.from_buffers(pa.binary(), 3, [None, offsets, pa.py_buffer(b"abc")])
    mask = cols.mask_of(["time", "data"])
    batch = Batch(pa.RecordBatch.from_arrays([time, data], schema=cols.schema_of(mask))).slice(Range(1, 3))
    assert [event.data for event in batch] == [b"b", b"c"]
    assert batch.sizes.tolist() == [9, 9]
    assert cols.times(batch.columns.column("time"), 0).tolist() == [1, 2]
    cols.check_rules(batch.columns)


def test_a_time_that_python_cannot_say_is_refused() -> None:
    array = pa.array([1 << 62], pa.int64()).view(cols.TIMESTAMP)
    record = pa.RecordBatch.from_arrays(
        [array, pa.array([b"a"])], schema=cols.schema_of(cols.mask_of(["time", "data"]))
    )
    with pytest.raises(InvalidBatch, match="years 1 to 9999"):
        parse(record.serialize(), cols.mask_of(["time", "data"]))


# --- lanes, sizes, digests -------------------------------------------------------------------


@given(st.lists(st.none() | st.binary(max_size=40), min_size=1, max_size=30), st.integers(1, 100))
def test_lanes_are_the_hash_of_each_key(keys: list[bytes | None], partitions: int) -> None:
    batch = Batch.build([b""] * len(keys), key=keys).at(0, PLACE, ())
    assert batch.partitions(partitions, keyless=partitions - 1).tolist() == [
        partitions - 1 if key is None and partitions > 1 else xxhash.xxh64_intdigest(key or b"", 0) % partitions
        for key in keys
    ]
    assert batch.slots().tolist() == [
        PLACE.partition % 64 if key is None else xxhash.xxh64_intdigest(key, 1) % 64 for key in keys
    ]


def test_lanes_are_computed_once() -> None:
    batch = Batch.build([b""] * 3, key=["a", "b", "c"])
    assert batch.key_hashes(0)[0] is batch.key_hashes(0)[0]


def test_the_hashes_of_known_keys_never_change() -> None:
    # A key's partition decides its order for ever: these numbers are part of the format.
    keys = ["ada", "grace", "", "x" * 100]
    batch = Batch.build([b""] * 4, key=keys).at(0, PLACE, ())
    assert batch.partitions(8, keyless=0).tolist() == [xxhash.xxh64_intdigest(k.encode(), 0) % 8 for k in keys]
    assert batch.key_hashes(0)[0].tolist()[0] == 0xD36C3934091206D0
    assert batch.key_hashes(1)[0].tolist()[0] == 0x2A1046E4B2E1AEA1
    assert batch.key_hashes(0)[0].tolist()[2] == 0xEF46DB3751D8E999  # xxHash's own test vector


@given(placed_lists)
def test_a_size_is_what_the_columns_hold(case: tuple[list[Event], int]) -> None:
    listed, start = case
    batch = placed(listed, start)
    expected = [
        sum(
            len(value.encode() if isinstance(value, str) else value)
            for name in ("data", "type", "key", "id", "source", "subject", "content_type")
            if (value := getattr(event, name)) is not None
        )
        + 8 * sum(name in batch.columns.schema.names for name in ("time", "expires_at"))
        + sum(len(name.encode()) + len(value) for name, value in event.headers.items())
        for event in listed
    ]
    assert batch.sizes.tolist() == expected


def test_expiries_are_microseconds_or_never() -> None:
    moment = datetime(1970, 1, 1, 0, 0, 1, tzinfo=UTC)
    assert Batch.build([b"a"]).expiries.tolist() == [NEVER]
    assert Batch.build([b"a", b"b"], expires_at=[moment, None]).expiries.tolist() == [1_000_000, NEVER]


@given(event_lists, event_lists, event_lists)
def test_a_digest_does_not_depend_on_the_batch_around_it(
    before: list[Event], listed: list[Event], after: list[Event]
) -> None:
    alone = Batch.from_events(listed)
    among = Batch.from_events([*before, *listed, *after]).slice(Range(len(before), len(before) + len(listed)))
    assert cols.digest(alone.columns) == cols.digest(among.columns)
    again = Batch.from_bytes(among.to_bytes(), among.mask)
    assert cols.digest(again.columns) == cols.digest(alone.columns)


@given(st.lists(events, min_size=1, max_size=5), st.lists(events, min_size=1, max_size=5))
def test_other_content_has_another_digest(first: list[Event], second: list[Event]) -> None:
    same = cols.digest(Batch.from_events(first).columns) == cols.digest(Batch.from_events(second).columns)
    assert same == (first == second)


def test_moving_a_byte_between_columns_or_events_changes_the_digest() -> None:
    variants = [
        Batch.build([b"ab", b"c"]),
        Batch.build([b"a", b"bc"]),
        Batch.build([b"a", b"c"], key=["b", None]),
        Batch.build([b"a", b"c"], key=[None, "b"]),
        Batch.build([b"a", b"c"], key=["", "b"]),
        Batch.build([b"a", b"c"], type=["b", None]),
        Batch.build([b"a", b"c"], headers=[{"b": b""}, None]),
        Batch.build([b"a", b"c"], headers=[{"": b"b"}, None]),
    ]
    assert len({cols.digest(batch.columns) for batch in variants}) == len(variants)


def test_derived_ids_follow_producer_and_sequence_through_slices() -> None:
    batch = Batch.build([b"x"] * 5).at(20, PLACE, runs_of(2, 3))
    ids = [event.id for event in batch]
    assert ids == [f"{'01' * 16}-0", f"{'01' * 16}-1", f"{'02' * 16}-100", f"{'02' * 16}-101", f"{'02' * 16}-102"]
    assert [event.id for event in batch.slice(Range(21, 24))] == ids[1:4]
    assert batch.to_arrow(["id"]).column("id").to_pylist() == ids
    assert batch.select([24]).to_arrow(["id"]).column("id").to_pylist() == ids[4:]


def test_a_compact_selection_leaves_out_the_columns_that_it_does_not_use() -> None:
    batch = Batch.build([b"a", b"b", b"c"], key=["k", None, None]).at(7, PLACE, runs_of(3))
    alone = batch.select([8, 9]).compact()
    assert alone.columns.schema.names == ["data"]
    assert (alone.place, alone.start, [event.data for event in alone]) == (None, 0, [b"b", b"c"])


def test_numpy_offsets_are_64_bit() -> None:
    assert Batch.build([b"a"]).at(1 << 40, PLACE, ()).offsets.dtype == np.int64


# --- cells that are expected to be asked for --------------------------------------------------


def test_cells_are_the_same_whichever_were_expected() -> None:
    batch = Batch.build(
        [b"%d" % number for number in range(20)],
        key=[None if number % 3 else f"key-{number}" for number in range(20)],
        time=[datetime(2026, 1, 1, tzinfo=UTC)] * 20,
        id=[f"id-{number}" for number in range(20)],
    )
    expected = [event.to_event() for event in batch]
    some = Batch(batch.columns)
    some.expect(np.array([3, 7, 12]))
    assert [StoredEvent(some, row).to_event() for row in (3, 7, 12)] == [expected[row] for row in (3, 7, 12)]
    assert len(some._lists["data"] or ()) == 3, "no other was converted"
    assert [event.to_event() for event in some] == expected, "one that was not expected is there all the same"


def test_who_asks_while_another_finds_out_that_all_are_wanted_is_answered() -> None:
    batch = Batch.build([b"%d" % number for number in range(20)], key=[f"key-{number}" for number in range(20)])
    batch.expect(np.array([3, 7]))
    assert [batch.value("data", row) for row in (3, 7)] == [b"3", b"7"]
    values = batch._lists["data"]
    # As if this were another thread, which had found the values before they were replaced.
    assert batch.value("key", 8) == b"key-8"
    assert batch._lists["data"] is values, "what others look at stays until there is something better"
    assert (batch.value("data", 3), batch.value("data", 8)) == (b"3", b"8")


@given(st.lists(st.none() | st.text(max_size=3), min_size=1, max_size=8), st.integers(0, 7))
def test_columns_are_all_alike_if_every_value_is_the_first(values: list[str | None], low: int) -> None:
    texts = pa.array(values, pa.string()).slice(min(low, len(values) - 1))
    assert cols.all_alike(texts) == (len(set(texts.to_pylist())) == 1)


HEADERS = st.sampled_from(
    [{"dataversion": b"2"}, {"dataversion": b"3"}, {"tenant": b"2"}, {"dataversion": b"2", "tenant": b"acme"}, {}]
)


KINDS = st.tuples(st.none() | st.sampled_from(["placed", "paid"]), st.none() | st.just("text/plain"), HEADERS)


@given(
    before=st.lists(KINDS, max_size=3),
    rows=st.lists(KINDS, min_size=1, max_size=1) | st.lists(KINDS, min_size=2, max_size=2),
    times=st.sampled_from([KIND_EVENTS_MIN, KIND_EVENTS_MIN - 1]),
    after=st.lists(KINDS, max_size=3),
)
@example(before=[], rows=[(None, None, {"dataversion": b"2"}), (None, None, {"tenant": b"2"})], times=16, after=[])
def test_a_batch_has_a_kind_if_one_decoder_serves_all_of_its_events(
    before: list[Any], rows: list[Any], times: int, after: list[Any]
) -> None:
    kinds = [*before, *rows * times, *after]
    events = [Event(data=b"x", type=type, content_type=text, headers=headers) for type, text, headers in kinds]
    batch = Batch.from_events(events).slice(Range(len(before), len(kinds) - len(after)))
    [(type, content_type, headers), *others] = {(kind, text, tuple(stated.items())) for kind, text, stated in rows}
    versioned = tuple(name for name, _ in headers) == (VERSION_HEADER,)
    if others or len(batch) < KIND_EVENTS_MIN or not (versioned or not headers):
        assert batch.kind is None
    else:
        assert batch.kind == Kind(type or UNTYPED, content_type, headers[0][1] if versioned else None)


def test_a_header_that_some_events_have_not_is_not_that_of_all() -> None:
    headers = pa.array([[], [("a", b"1")], [("a", b"1")]], pa.map_(pa.string(), pa.binary()))
    assert cols.only_header(headers, "a") is None
    assert cols.only_header(headers[1:], "a") == pa.array([b"1", b"1"], pa.binary())
    assert cols.only_header(headers[1:], "b") is None


@pytest.mark.parametrize("even_max", [0, cols.EVEN_MAX])
@pytest.mark.parametrize("compared_max", [0, 2, cols.COMPARED_MAX])
@given(data=st.data())
def test_a_key_is_found_at_all_of_its_places(compared_max: int, even_max: int, data: st.DataObject) -> None:
    length = data.draw(st.sampled_from([1, 7, 8, 12]))
    alike = st.binary(min_size=length, max_size=length)
    few = data.draw(
        st.lists(alike | st.binary(max_size=20) if data.draw(st.booleans()) else alike, min_size=1, max_size=4)
    )
    missing = st.none() if data.draw(st.booleans()) else st.nothing()
    keys = data.draw(st.lists(st.sampled_from(few) | missing, max_size=20))
    low = data.draw(st.integers(0, len(keys)))
    column = pa.array(keys, pa.binary()).slice(low)
    with changed(cols, EVEN_MAX=even_max, COMPARED_MAX=compared_max):
        for key in few:
            assert cols.places_of(column, key).tolist() == [at for at, each in enumerate(keys[low:]) if each == key]


@pytest.mark.parametrize("stated", [{}, {"id": ["a", None, None]}, {"source": [None, "elsewhere", None]}])
def test_a_digest_is_that_of_the_identity_within_its_scope(stated: dict[str, list[str | None]]) -> None:
    made = (Run(b"p" * 16, 0, 7, 2, 0), Run(b"q" * 16, 0, 1, 1, 0))
    batch = Batch.build([b"x"] * 3, **stated).at(5, Place("t", 0, 1, "home", "c"), made)
    for scope in ("t/one", "t/two", "t/one"):
        for event in batch:
            assert event.digest(scope) == xxhash.xxh3_128_digest("\0".join((scope, *event.identity)).encode())
    assert len({event.digest(scope) for event in batch for scope in ("t/one", "t/two")}) == 6
