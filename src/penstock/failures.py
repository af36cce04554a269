"""How a failure is written down: the traceback of an exception as text, and a fingerprint of its cause.

What this module promises:

* `trace_of` returns at most `TRACE_BYTES_MAX` bytes, whatever was raised: of a long traceback the innermost frames are
  kept. It holds files, lines, functions and source code, and the names of exceptions. It never holds the value of a
  variable nor the message of an exception, since either may quote a payload.
* `bounded` returns at most `REASON_CHARACTERS_MAX` characters of what an exception says of itself, and something for
  one that cannot say it.
* `fingerprint` is a pure function. Failures with the same cause have the same one, on every machine and in every
  release, though ids, numbers and line numbers differ. What has a traceback is known by the functions that it went
  through; what has none, by the words of its message.
"""

from __future__ import annotations

import re
import traceback
from functools import lru_cache
from typing import TYPE_CHECKING

import xxhash

if TYPE_CHECKING:
    from collections.abc import Iterator

REASON_CHARACTERS_MAX = 4_096
TRACE_BYTES_MAX = 8 << 10
CAUSES_MAX = 4
"""Of a longer chain of exceptions the one that was caught and the first causes are kept."""
FRAMES_MAX = 50
"""Of each exception; so a recursion without end costs no more than anything else."""
CHAIN_MAX = 100
LINE_CHARACTERS_MAX = 200
MESSAGE_CHARACTERS_MAX = 1_000

HEADING = "Traceback (most recent call last):\n"
LED_TO = "\nwhich led to:\n\n"
# As they are written below. A line of source code is indented further, so that it never looks like one.
_FRAME = re.compile(r'^  File "(.*)", line \d+, in (.+)$', re.MULTILINE)
_VARIABLE = re.compile(
    r"""
    "[^"]*" | `[^`]*` | (?<!\w)'[^']*'(?!\w)                      # quoted
    | \b[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}\b             # a UUID
    | \b[0-9a-f]{8,}\b                                            # a hash
    | [-+]?\b\w*\d\w*(?:[.,:]\d+)*                                # whatever has a digit: numbers, times, ids
    """,
    re.VERBOSE | re.IGNORECASE,
)


def bounded(reason: str | BaseException) -> str:
    """Return a reason as text that is no longer than it may be."""
    try:
        text = str(reason)
    except Exception as error:  # noqa: BLE001 - the class of an application may do anything
        text = f"it cannot say what it is: {type(error).__name__}"
    return text if len(text) <= REASON_CHARACTERS_MAX else f"{text[: REASON_CHARACTERS_MAX - 1]}…"


def trace_of(error: BaseException) -> str:
    """Return the traceback of an exception and of what has caused it; empty if it was never raised."""
    chain = _chain(error)
    if all(each.__traceback__ is None for each in chain):
        return ""
    share = (TRACE_BYTES_MAX - len(LED_TO) * (len(chain) - 1)) // len(chain)
    return LED_TO.join(_formatted(each, share) for each in reversed(chain))


def fingerprint(error_type: str, message: str = "", trace: str = "") -> str:
    """Return 16 hexadecimal digits that tell one cause from another."""
    known_by = _functions(trace) or (_VARIABLE.sub("?", message[:MESSAGE_CHARACTERS_MAX]),)
    return xxhash.xxh64_hexdigest("\0".join([error_type, *known_by]).encode("utf-8", "surrogatepass"))


@lru_cache(maxsize=256)  # of many failures most have the same few tracebacks
def _functions(trace: str) -> tuple[str, ...]:
    """Return the functions that a traceback went through, from the innermost outward.

    Each counts once: the depth of a recursion says nothing.
    """
    return tuple(dict.fromkeys(f"{_end_of(file)}:{name}" for file, name in reversed(_FRAME.findall(trace))))


def _end_of(file: str) -> str:
    """Return a file with its directory: where that is differs between machines and environments."""
    return "/".join(file.replace("\\", "/").split("/")[-2:])


# --- the traceback ----------------------------------------------------------------------------


def _chain(error: BaseException) -> list[BaseException]:
    """Return an exception and its causes, from the one that was caught to the first."""
    found: list[BaseException] = []
    behind: BaseException | None = error
    while behind is not None and len(found) < CHAIN_MAX and not any(behind is each for each in found):
        found.append(behind)
        behind = _behind(behind)
    return found if len(found) <= CAUSES_MAX else [found[0], *found[1 - CAUSES_MAX :]]


def _behind(error: BaseException) -> BaseException | None:
    if isinstance(error, BaseExceptionGroup):
        first: BaseException = error.exceptions[0]
        return first
    return error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _formatted(error: BaseException, bytes_max: int) -> str:
    ending = f"{type(error).__qualname__[:LINE_CHARACTERS_MAX]}\n"
    total = sum(1 for _ in traceback.walk_tb(error.__traceback__))
    room = bytes_max - _size(HEADING) - _size(ending) - _size(_left_out(total))
    kept: list[str] = []
    for frame in _frames_outward(error):
        room -= _size(frame)
        if room < 0:
            break
        kept.append(frame)
    left_out = _left_out(total - len(kept)) if len(kept) < total else ""
    return "".join([HEADING, left_out, *reversed(kept), ending])


def _frames_outward(error: BaseException) -> Iterator[str]:
    for frame in reversed(traceback.extract_tb(error.__traceback__, limit=-FRAMES_MAX)):
        source = (frame.line or "")[:LINE_CHARACTERS_MAX]
        yield f'  File "{frame.filename}", line {frame.lineno or 0}, in {frame.name}\n' + (
            f"    {source}\n" if source else ""
        )


def _left_out(count: int) -> str:
    return f"  … {count:,} outer frames left out\n"


def _size(text: str) -> int:
    return len(text.encode("utf-8", "surrogatepass"))
