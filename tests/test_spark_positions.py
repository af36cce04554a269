"""Positions and options: pure functions, so every promise is tested without Spark."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import UsageError
from penstock.offsets import Range
from penstock.spark import positions as at
from penstock.spark.options import Moment, read_options, write_options
from penstock.spark.positions import At, Positions, Seen, Span

GIVEN = {"url": "file:/data", "topic": "orders"}


def seen(*bounds: tuple[int, int], log: str = "log-1") -> Seen:
    return Seen(log, tuple(Range(*pair) for pair in bounds))


def rows(start: Positions, end: Positions) -> int:
    return sum(span.stop - span.start for span in at.spans_between(start, end))


# --- as Spark keeps them ------------------------------------------------------------------------

OFFSETS = st.integers(0, 2**62)
NAMES = st.from_regex(r"[a-z][a-z0-9.-]{0,10}", fullmatch=True)


@st.composite
def topics(draw: st.DrawFn) -> At:
    count = draw(st.integers(1, 12))
    offsets = st.tuples(*[OFFSETS] * count)
    return At(draw(st.text("0123456789abcdef", min_size=1)), draw(offsets), draw(st.none() | offsets))


@given(st.dictionaries(NAMES, topics(), max_size=4))
def test_positions_come_back_and_are_always_written_alike(positions: Positions) -> None:
    encoded = at.encode(positions)
    assert at.decode(json.loads(json.dumps(encoded))) == positions
    shuffled = dict(reversed(positions.items()))
    assert json.dumps(at.encode(shuffled)) == json.dumps(encoded)


@pytest.mark.parametrize("wrong", [{"orders": 5}, {"orders": {"0": 1}}, {"orders": {"log": "x", "7": 1}}, {"a": None}])
def test_what_is_no_position_is_told(wrong: Any) -> None:
    with pytest.raises(UsageError, match="no position of a query on Penstock topics"):
        at.decode(wrong)


# --- the first one ------------------------------------------------------------------------------


def no_time(topic: str, partition: int, time_us: int) -> int:
    raise AssertionError


def test_positions_are_named_by_edges_times_and_offsets() -> None:
    logs = {"a": seen((5, 10), (0, 7)), "b": seen((0, 3), log="log-2")}
    assert at.resolve("earliest", logs, no_time) == {"a": At("log-1", (5, 0)), "b": At("log-2", (0,))}
    assert at.resolve("latest", logs, no_time)["a"].offsets == (10, 7)
    assert at.resolve(Moment(99), logs, lambda topic, partition, time: partition + time)["a"].offsets == (99, 100)
    mixed = {"a": {0: 6, 1: "latest"}, "b": Moment(1)}
    assert at.resolve(mixed, logs, lambda *_: 2) == {  # type: ignore[arg-type] # a dict of one kind to mypy
        "a": At("log-1", (6, 7)),
        "b": At("log-2", (2,)),
    }


@pytest.mark.parametrize(
    ("marks", "said"),
    [
        ({"a": {0: 1}}, "look at partition 1"),
        ({"a": {0: 1, 1: 1, 2: 1}}, "look at partition 2"),
        ({"c": "earliest"}, "name topic 'c', which is not one of those read: a"),
        ({}, "do not say where topic 'a'"),
    ],
)
def test_offsets_that_do_not_fit_the_topics_are_told(marks: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        at.resolve(marks, {"a": seen((0, 5), (0, 5))}, no_time)


# --- the next one -------------------------------------------------------------------------------


@st.composite
def logs_and_starts(draw: st.DrawFn) -> tuple[Positions, dict[str, Seen]]:
    start: Positions = {}
    now: dict[str, Seen] = {}
    for name in sorted(draw(st.sets(NAMES, max_size=4))):
        bounds = [
            Range(first, first + length)
            for first, length in draw(
                st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), min_size=1, max_size=4)
            )
        ]
        now[name] = Seen(f"log-{name}", tuple(bounds))
        if draw(st.booleans()):
            start[name] = At(f"log-{name}", tuple(draw(st.integers(0, part.stop)) for part in bounds))
    return start, now


@given(logs_and_starts(), st.none() | st.integers(1, 60))
def test_a_query_reads_everything_once_whatever_the_limit(
    given_: tuple[Positions, dict[str, Seen]], rows_max: int | None
) -> None:
    start, now = given_
    read: set[tuple[str, int, int]] = set()
    everything = {
        (topic, partition, offset)
        for topic, (_, bounds) in now.items()
        for partition, part in enumerate(bounds)
        for offset in range(max(start[topic].offsets[partition] if topic in start else 0, part.start), part.stop)
    }
    for _ in range(1_000):
        end = at.advance(start, now, rows_max=rows_max)
        assert end == at.advance(start, now, rows_max=rows_max)
        assert json.dumps(at.encode(end)) == json.dumps(at.encode(at.decode(at.encode(end))))
        spans = at.spans_between(start, end)
        found = {
            (span.topic, span.partition, offset)
            for span in spans
            for offset in range(max(span.start, now[span.topic].bounds[span.partition].start), span.stop)
        }
        assert found.isdisjoint(read)
        assert rows_max is None or len(found) <= rows_max
        assert found or read == everything
        read |= found
        if at.encode(end) == at.encode(start):
            break
        start = end
    assert read == everything


def test_a_limit_is_shared_by_how_much_there_is_and_something_is_always_read() -> None:
    start = {"a": At("log-1", (0, 0, 0))}
    logs = {"a": seen((0, 600), (0, 300), (0, 100))}
    assert at.advance(start, logs, rows_max=100)["a"].offsets == (60, 30, 10)
    assert sum(at.advance(start, logs, rows_max=1)["a"].offsets) == 1


def test_a_limit_never_leads_beyond_the_end_of_a_partition_of_which_all_was_trimmed() -> None:
    start = {"a": At("log-1", (0, 0, 0))}
    logs = {"a": seen((1, 1), (0, 5), (0, 5))}
    assert at.advance(start, logs, rows_max=1)["a"].offsets == (1, 1, 0)


def test_bytes_are_measured_where_the_log_is() -> None:
    start = {"a": At("log-1", (0, 5))}
    asked: list[tuple[Span, int]] = []

    def measure(span: Span, bytes_max: int) -> int:
        asked.append((span, bytes_max))
        return span.start + 2

    end = at.advance(start, {"a": seen((0, 10), (0, 10))}, bytes_max=1_000, measure=measure)
    assert end["a"].offsets == (2, 7)
    assert [share for _, share in asked] == [500, 500]


def test_bytes_are_not_measured_where_all_was_trimmed() -> None:
    def measure(span: Span, bytes_max: int) -> int:
        assert span.partition == 1
        assert bytes_max == 1_000
        return span.start + 2

    end = at.advance({"a": At("log-1", (0, 5))}, {"a": seen((3, 3), (0, 10))}, bytes_max=1_000, measure=measure)
    assert end["a"].offsets == (3, 7)


def test_a_new_topic_says_where_it_begins_so_that_a_replay_reads_the_same() -> None:
    start = {"a": At("log-1", (3,))}
    end = at.advance(start, {"a": seen((0, 3)), "b": seen((40, 50), log="log-2")})
    assert at.spans_between(start, end) == [Span("b", "log-2", 0, 40, 50)]
    assert at.encode(end)["b"] == {"log": "log-2", "from": {"0": 40}, "0": 50}
    later = at.advance(end, {"a": seen((0, 3)), "b": seen((45, 60), log="log-2")})
    assert at.spans_between(end, later) == [Span("b", "log-2", 0, 50, 60)]
    assert later["b"].began is None


def test_a_topic_that_is_gone_keeps_its_place() -> None:
    start = {"a": At("log-1", (3,)), "b": At("log-2", (4,))}
    assert at.advance(start, {"b": seen((0, 9), log="log-2")})["a"] == At("log-1", (3,))


def test_an_available_now_run_does_not_pass_what_was_there_when_it_began() -> None:
    logs = {"a": seen((0, 10)), "b": seen((0, 10), log="log-2")}
    limited = at.at_most(logs, {"a": At("log-1", (7,))})
    assert limited == {"a": seen((0, 7))}
    trimmed_since = at.at_most({"a": seen((9, 10))}, {"a": At("log-1", (7,))})
    assert trimmed_since == {"a": seen((9, 9))}


# --- what is between ----------------------------------------------------------------------------


@given(st.lists(st.integers(1, 500), min_size=1, max_size=6), st.integers(1, 20), st.sampled_from([1, 50]))
def test_dividing_spans_loses_nothing_and_keeps_pieces_large_enough(
    lengths: list[int], wanted: int, smallest: int
) -> None:
    spans = [Span("a", "log", partition, 7, 7 + length) for partition, length in enumerate(lengths)]
    pieces = at.divide(spans, wanted, smallest=smallest)
    for span in spans:
        mine = [piece for piece in pieces if piece.partition == span.partition]
        assert [piece.start for piece in mine] == [span.start, *(piece.stop for piece in mine[:-1])]
        assert mine[-1].stop == span.stop
        assert len(mine) == 1 or min(piece.stop - piece.start for piece in mine) >= smallest
    assert len(pieces) < wanted + len(spans)
    if smallest == 1:
        assert len(pieces) >= min(wanted, sum(lengths))


def test_one_long_span_is_divided_as_wanted() -> None:
    pieces = at.divide([Span("a", "log", 0, 0, 100)], 4)
    assert [(piece.start, piece.stop) for piece in pieces] == [(0, 25), (25, 50), (50, 75), (75, 100)]


def test_an_end_before_the_beginning_is_told() -> None:
    with pytest.raises(UsageError, match="begins at offset 5 and ends before it, at 3"):
        at.check_order({"a": At("log-1", (5,))}, {"a": At("log-1", (3,))})


# --- what is lost -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("now", "said"),
    [
        ({"a": seen((10, 20))}, "topic 'a', partition 0: offsets 5 to 9 were trimmed; the log now holds [10, 20)"),
        ({"a": seen((0, 3))}, "topic 'a', partition 0: the log ends at 3, and was read up to 5"),
        ({}, "topic 'a' does not exist any more; it was read up to {'0': 5}"),
        ({"a": seen((0, 9), log="log-9")}, "topic 'a' was deleted and created anew"),
    ],
)
def test_every_loss_is_told_with_its_numbers(now: dict[str, Seen], said: str) -> None:
    (found,) = at.losses({"a": At("log-1", (5,))}, now)
    assert found.startswith(said)


def test_nothing_is_lost_at_the_bounds() -> None:
    for offset in (5, 9):
        assert at.losses({"a": At("log-1", (offset,))}, {"a": seen((5, 9))}) == []


# --- options ------------------------------------------------------------------------------------


def test_every_option_to_read_is_understood() -> None:
    options = read_options(
        {
            **GIVEN,
            "topic": "orders, pay*",
            "startingOffsets": '{"orders": {"log": "x", "0": 5, "1": "earliest"}, "pay": "2026-01-31T12:00:00Z"}',
            "maxRowsPerTrigger": "100",
            "maxBytesPerTrigger": "64 MiB",
            "minPartitions": "8",
            "failOnDataLoss": "False",
            "subscription": "report",
            "types": '["a,b", "c"]',
            "keys": "k1,k2",
            "fromTime": "1970-01-01T00:00:01+00:00",
            "toTime": "1970-01-01T00:00:02Z",
        },
        streaming=True,
    )
    assert options.topics == ("orders", "pay*")
    assert options.starting == {"orders": {0: 5, 1: "earliest"}, "pay": Moment(1_769_860_800_000_000)}
    assert (options.max_rows, options.max_bytes, options.min_partitions) == (100, 64 << 20, 8)
    assert (options.fail_on_data_loss, options.subscription) == (False, "report")
    assert (options.types, options.keys) == (("a,b", "c"), ("k1", "k2"))
    assert (options.from_us, options.to_us) == (1_000_000, 2_000_000)
    assert read_options({**GIVEN, "endingoffsets": "latest"}, streaming=False).ending == "latest"


def test_names_of_options_do_not_mind_case_and_sparks_own_are_left_to_it() -> None:
    given_ = {"URL": "file:/data", "TOPIC": "orders", "checkpointlocation": "/x", "SinkName": "copies"}
    assert write_options(given_, streaming=True).sink == "copies"


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"startingoffset": "earliest"}, "no option 'startingoffset' to read; did you mean 'startingOffsets'?"),
        ({"maxRowsPerTriger": "5"}, "did you mean 'maxRowsPerTrigger'?"),
        ({"path": "/x"}, "a topic is no path"),
        ({"startingOffsets": "first"}, "'startingOffsets' = 'first' is not allowed: give 'earliest'"),
        ({"startingOffsets": '{"orders": {"0": -2}}'}, "is not allowed"),
        ({"startingOffsets": '{"orders": {"0": true}}'}, "is not allowed"),
        ({"startingOffsets": '{"orders": [1]}'}, "is not allowed"),
        ({"startingOffsets": '{"orders"'}, "is not allowed"),
        ({"startingOffsets": "2026-01-31T12:00:00"}, "a time with its zone"),
        ({"maxRowsPerTrigger": "0"}, "1 or more"),
        ({"maxBytesPerTrigger": "some"}, "such as '64 MiB'"),
        ({"failOnDataLoss": "maybe"}, "true or false"),
        ({"topic": "a,,b"}, "a list such as"),
        ({"types": "[1]"}, "a list such as"),
        ({"subscription": "Not Good"}, "name 'Not Good' is not allowed"),
        ({"endingOffsets": "latest"}, "is for batch reads"),
    ],
)
def test_a_wrong_option_to_read_is_told(more: dict[str, str], said: str) -> None:
    with pytest.raises(UsageError) as caught:
        read_options({**GIVEN, **more}, streaming=True)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("given_", "streaming", "said"),
    [
        ({"topic": "orders"}, True, "option 'url' is missing"),
        ({"url": "file:/data"}, False, "option 'topic' is missing"),
        (GIVEN, True, "option 'sinkName' is missing"),
        ({**GIVEN, "sinkName": "x"}, False, "option 'sinkName' is for streams"),
        ({**GIVEN, "sinkname": "X Y"}, True, "is not allowed"),
        ({**GIVEN, "topics": "x"}, True, "no option 'topics' to write; did you mean 'topic'?"),
    ],
)
def test_a_wrong_option_to_write_is_told(given_: dict[str, str], streaming: bool, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        write_options(given_, streaming=streaming)
    assert said in str(caught.value)


@pytest.mark.parametrize("name", ["subscription", "maxRowsPerTrigger", "maxBytesPerTrigger"])
def test_what_only_a_stream_has_is_refused_for_a_batch(name: str) -> None:
    with pytest.raises(UsageError, match=f"option '{name}' is for streams"):
        read_options({**GIVEN, name: "5"}, streaming=False)


def test_a_url_with_a_secret_is_not_shown() -> None:
    with pytest.raises(UsageError) as caught:
        read_options({"url": " ", "topic": "orders"}, streaming=False)
    assert "'url' = …" in str(caught.value)
