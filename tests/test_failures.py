"""The promises of penstock.failures: tracebacks that are bounded and tell no data, fingerprints that know a cause."""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.failures import FRAMES_MAX, LED_TO, REASON_CHARACTERS_MAX, TRACE_BYTES_MAX, bounded, fingerprint, trace_of

SECRET = "card 4111-1111"


def raised(function: Callable[[], object]) -> BaseException:
    with pytest.raises(BaseException) as caught:  # noqa: PT011 - whatever it is
        function()
    return caught.value


def charge(card: str) -> None:
    assert card
    raise ValueError(f"cannot charge {card}")


def bill(card: str) -> None:
    try:
        charge(card)
    except ValueError as error:
        raise RuntimeError(f"cannot bill {card}") from error


def deep(depth: int) -> None:
    if not depth:
        raise RecursionError("too deep")
    deep(depth - 1)


# --- tracebacks -------------------------------------------------------------------------------


def test_a_trace_tells_files_functions_and_source_and_neither_message_nor_variables() -> None:
    trace = trace_of(raised(lambda: charge(SECRET)))
    assert trace.startswith("Traceback (most recent call last):\n")
    assert re.search(r'  File ".*/test_failures.py", line \d+, in charge\n    raise ValueError\(f"cannot', trace)
    assert trace.endswith("ValueError\n")
    assert SECRET not in trace


def test_a_trace_begins_with_what_caused_it() -> None:
    cause, caught = trace_of(raised(lambda: bill(SECRET))).split(LED_TO)
    assert ("in charge\n" in cause, cause.endswith("ValueError\n")) == (True, True)
    assert ("in bill\n" in caught, caught.endswith("RuntimeError\n")) == (True, True)
    assert SECRET not in cause + caught


def test_what_was_suppressed_is_no_cause_and_what_a_group_holds_is() -> None:
    def suppressing() -> None:
        try:
            charge(SECRET)
        except ValueError:
            raise RuntimeError from None

    assert LED_TO not in trace_of(raised(suppressing))
    group = BaseExceptionGroup("both", [raised(lambda: charge(SECRET)), OSError()])
    cause, caught = trace_of(group).split(LED_TO)
    assert "in charge\n" in cause
    assert caught.endswith("ExceptionGroup\n")


def test_what_was_never_raised_has_no_trace() -> None:
    assert trace_of(ValueError("no")) == ""


def test_of_a_deep_trace_the_innermost_frames_are_kept() -> None:
    trace = trace_of(raised(lambda: deep(400)))
    assert trace.count("in deep\n") <= FRAMES_MAX
    assert 'raise RecursionError("too deep")\nRecursionError\n' in trace
    (left_out,) = re.findall(r"… (\d+) outer frames left out", trace)
    assert int(left_out) + trace.count("  File ") == 403  # with `raised` and its lambda
    assert len(trace.encode()) <= TRACE_BYTES_MAX


@given(
    st.integers(0, 200),
    st.integers(0, 8),
    st.text(st.characters(exclude_categories=()), max_size=3_000).map(lambda text: text.replace("\0", "")),
)
def test_a_trace_is_bounded_whatever_was_raised(depth: int, causes: int, name: str) -> None:
    def caused(left: int) -> None:
        try:
            code = compile("def f(depth): f(depth - 1) if depth else 1 / 0", name.encode("utf-8", "replace"), "exec")
            scope: dict[str, Callable[[int], object]] = {}
            exec(code, scope)
            scope["f"](depth)
        except ZeroDivisionError:
            if left:
                caused(left - 1)
            raise type(f"E{name[:50]}", (Exception,), {})(name)  # noqa: B904 - a chain of contexts is wanted

    trace = trace_of(raised(lambda: caused(causes)))
    assert len(trace.encode("utf-8", "surrogatepass")) <= TRACE_BYTES_MAX


def test_a_chain_that_bites_its_tail_ends() -> None:
    one, two = raised(lambda: charge("1")), raised(lambda: charge("2"))
    one.__cause__, two.__cause__ = two, one
    assert trace_of(one).count(LED_TO) == 1


# --- fingerprints -----------------------------------------------------------------------------

UNQUOTED = st.text("abcdefghijklmnopqrstuvwxyzäöü -", max_size=20)
VARIABLES = st.one_of(
    st.integers(0).map(str),
    st.integers(0, 1 << 64).map(hex),
    st.floats(0, 1e6).map("{:.3f}".format),
    st.uuids().map(str),
    st.uuids().map(lambda found: found.hex),
    UNQUOTED.map(lambda text: f"'{text}'"),
    UNQUOTED.map(lambda text: f'"{text}"'),
    st.datetimes().map(lambda time: time.strftime("%H:%M:%S")),
)


@given(st.lists(st.tuples(VARIABLES, VARIABLES), min_size=1, max_size=5))
def test_ids_numbers_and_quoted_text_do_not_matter_in_a_message(pairs: list[tuple[str, str]]) -> None:
    words = ["order", "of", "customer", "is", "gone"]
    one, two = (" ".join(f"{word} {pair[side]}" for word, pair in zip(words, pairs, strict=False)) for side in (0, 1))
    assert fingerprint("KeyError", one) == fingerprint("KeyError", two)


@given(st.text(), st.text(st.characters(exclude_categories=())), st.text())
def test_a_fingerprint_is_sixteen_hexadecimal_digits_of_anything(kind: str, message: str, trace: str) -> None:
    found = fingerprint(kind, message, trace)
    assert re.fullmatch("[0-9a-f]{16}", found)
    assert found == fingerprint(kind, message, trace)


def test_other_words_and_other_types_are_other_causes() -> None:
    found = {
        fingerprint("KeyError", "no order 7"),
        fingerprint("KeyError", "no customer 7"),
        fingerprint("ValueError", "no order 7"),
        fingerprint("KeyError", "no order 7", 'Traceback:\n  File "a.py", line 1, in f\n'),
    }
    assert len(found) == 4


def a_trace(*frames: tuple[str, int, str]) -> str:
    lines = [f'  File "{file}", line {line}, in {name}\n    call({line})\n' for file, line, name in frames]
    return "".join(["Traceback (most recent call last):\n", *lines, "ValueError\n"])


FRAMES = st.lists(st.tuples(st.sampled_from(["a.py", "b.py"]), st.sampled_from(["f", "g", "h"])), min_size=1)


@given(FRAMES, st.lists(st.integers(1, 9_999), min_size=60, max_size=60), st.uuids())
def test_a_cause_is_known_by_its_functions_wherever_the_code_is(
    frames: list[tuple[str, str]], lines: list[int], id: uuid.UUID
) -> None:
    frames = frames[:30]
    here = a_trace(*((f"/srv/v1/shop/{file}", 1, name) for file, name in frames))
    there = a_trace(*((f"C:\\v2\\shop\\{file}", line, name) for (file, name), line in zip(frames, lines, strict=False)))
    assert fingerprint("ValueError", "a", here) == fingerprint("ValueError", f"b {id}", there)
    more = [*frames, ("c.py", "f")]
    assert fingerprint("ValueError", "a", here) != fingerprint(
        "ValueError", "a", a_trace(*((file, 1, name) for file, name in more))
    )


def test_the_depth_of_a_recursion_does_not_matter() -> None:
    found = {fingerprint("RecursionError", "", trace_of(raised(lambda: deep(depth)))) for depth in (300, 350, 401)}  # noqa: B023 - run here
    assert len(found) == 1


def test_fingerprints_are_the_same_for_ever() -> None:
    assert fingerprint("KeyError", "no order 'a-7'") == "cb29b13e496d912f"
    assert fingerprint("KeyError", "", a_trace(("/srv/shop/a.py", 7, "f"), ("b.py", 8, "g"))) == "70c3859832e6b124"


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no")


def test_a_reason_has_an_end_and_one_that_cannot_be_said_is_no_failure_of_its_own() -> None:
    assert bounded(ValueError("short")) == "short"
    assert bounded("short") == "short"
    long = bounded(ValueError("x" * 1_000_000))
    assert (len(long), long[-1]) == (REASON_CHARACTERS_MAX, "…")
    assert bounded(Unspeakable()) == "it cannot say what it is: RuntimeError"
