"""Folding: a projection's function over events, one after the other, from states as bytes to states as bytes.

This is the whole of what a projection computes, without I/O and without time, so that it is the same wherever it runs:
in an application that writes to SQLite, and in Spark's tasks.

* **Where batches are divided makes no difference.** A state that comes out of a batch is written as JSON, read again as
  its annotation says, and written once more. What was not as annotated is an error; what a reader would take for the
  same, such as 0 for 0.0, is made the same.
* **A failure has a place**: the position of the event that the function could not take. Nothing is passed over.
* **Keys are texts.** People look states up by them, and so do SQL and pandas.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import length_hint
from typing import Annotated, Any, Final, Literal, NamedTuple, Union, get_args, get_origin

from penstock.codecs import check_json, codec_named
from penstock.errors import CodecError, ProjectionFailed, UsageError
from penstock.failures import bounded
from penstock.offsets import Position

Where = Callable[[int], Position]
"""Says where the event of a number is; asked only when something went wrong."""

KEY_BYTES_MAX: Final = 1_024
REASON_CHARACTERS_MAX: Final = 500


class Changed(NamedTuple):
    """What became of a key's state."""

    encoded: bytes | None
    """As JSON; None if the key is gone."""
    state: Any


@dataclass(frozen=True, slots=True)
class StateForm:
    """What states are, and how they are written."""

    annotation: Any
    allowed: frozenset[type] | None
    """The classes that a state may have, exactly; None if that cannot be told from the annotation."""

    @classmethod
    def of(cls, annotation: Any, who: str) -> StateForm:
        """Read an annotation, in which None does not count; `UsageError` if such a state cannot be written."""
        stated = [each for each in _members(annotation) if each is not type(None)]
        if not stated:
            raise UsageError(f"{who} has no state but None: annotate its first parameter, as in `state: int | None`")
        wanted = Union[tuple(stated)] if len(stated) > 1 else stated[0]  # noqa: UP007 - of a list of any length
        try:
            check_json(wanted)
        except CodecError as error:
            raise UsageError(f"the state of {who} cannot be kept: {error}") from error
        classes = [_classes(each) for each in stated]
        known = None if None in classes else frozenset(each for some in classes for each in some or ())
        return cls(wanted, known)

    def encode(self, state: Any) -> bytes:
        """Return a state as it is kept; `CodecError` if it is not as annotated."""
        once = _JSON.encode(state)
        return _JSON.encode(self.decode(once))

    def decode(self, encoded: bytes) -> Any:
        """Return the state that is kept so."""
        return _JSON.decode(encoded, self.annotation)


_JSON: Final = codec_named("json")


def _members(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) if get_origin(annotation) in {Union, types.UnionType} else (annotation,)


def _classes(annotation: Any) -> set[type] | None:
    origin = get_origin(annotation)
    if origin is Annotated:
        return _classes(get_args(annotation)[0])
    if origin is Literal:
        return {type(value) for value in get_args(annotation)}
    cls = origin or annotation
    if not isinstance(cls, type) or cls is object:
        return None
    return {float, int} if cls is float else {cls}


@dataclass(frozen=True, slots=True)
class Fold:
    """A projection's function, with all that it needs to be called anywhere."""

    name: str
    topic: str
    function: Callable[[Any, Any], Any]
    key: Callable[[Any], Any] | None
    state: StateForm

    def keys(self, values: Sequence[Any], stored: Sequence[bytes | None], where: Where) -> list[str]:
        """Return the key of each event's state; `stored` are the keys that the events themselves have."""
        found: list[str] = []
        try:
            for key in stored if self.key is None else map(self.key, values):
                # The usual case first: it is asked for every event there is.
                found.append(  # noqa: PERF401 - how many there are says which one failed
                    key if type(key) is str and 0 < len(key) <= _SURELY_SHORT else _text(key)
                )
        except Exception as error:
            raise self.failure(where(len(found)), "its key", error) from error
        try:
            "".join(found).encode()  # once for all, as next to none has a lone surrogate
        except UnicodeEncodeError as error:
            number = next(index for index, key in enumerate(found) if not _is_unicode(key))
            raise self.failure(where(number), "its key", error) from error
        return found

    def fold(
        self, before: Mapping[str, bytes], keys: Sequence[str], values: Sequence[Any], where: Where
    ) -> dict[str, Changed]:
        """Return the states that differ after these events, in the order in which they were first met.

        `before` has the states of these keys that there are; others in it are of no concern.
        """
        function = self.function
        allowed = None if self.state.allowed is None else self.state.allowed | {type(None)}
        touched = dict.fromkeys(keys)
        states: dict[str, Any] = {key: self.state.decode(before[key]) for key in touched if key in before}
        get, rest = states.get, iter(keys)
        try:
            for key, value in zip(rest, values, strict=True):
                state = function(get(key), value)
                if allowed is not None and type(state) not in allowed:
                    raise _wrong(state, allowed)  # noqa: TRY301 - told like whatever else goes wrong there
                states[key] = state
        except Exception as error:
            # To count events on the way would cost as much as all else that is done for one.
            number = len(keys) - length_hint(rest) - 1
            raise self.failure(where(number), "its function", error) from error
        changed = {}
        for key in touched:
            state = states.get(key)
            encoded = None if state is None else self._encoded(key, state, keys, where)
            if encoded != before.get(key):
                changed[key] = Changed(encoded, state)
        return changed

    def _encoded(self, key: str, state: Any, keys: Sequence[str], where: Where) -> bytes:
        try:
            return self.state.encode(state)
        except CodecError as error:
            last = len(keys) - 1 - next(index for index, each in enumerate(reversed(keys)) if each == key)
            raise self.failure(where(last), "its state", error) from error

    def failure(self, position: Position, what: str, error: Exception) -> ProjectionFailed:
        """Return the error of a projection that cannot go on at an event."""
        said = bounded(error)[:REASON_CHARACTERS_MAX]
        # Our own errors are sentences; of others the class is half of what they say.
        reason = said if isinstance(error, CodecError | UsageError) else f"{type(error).__name__} {said}".strip()
        return ProjectionFailed(self.name, str(position), f"{what}: {reason}")


_SURELY_SHORT: Final = KEY_BYTES_MAX // 4
"""A text of so many characters is not too long, whatever they are."""


def _is_unicode(text: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _text(key: Any) -> str:
    """Return a key as text; `UsageError` for one that is none."""
    if key is None:
        raise UsageError("the event has none: declare the projection with key=…, a function of the event")
    try:
        text = key.decode() if isinstance(key, bytes) else key
    except UnicodeDecodeError:
        raise UsageError(
            "it is no UTF-8: make a text of it with key=…, such as key=lambda event: event.id.hex()"
        ) from None
    if not isinstance(text, str):
        raise UsageError(f"it is {type(key).__name__}, and must be str or bytes: str(…) makes a text of it")
    if not text or len(text.encode("utf-8", "surrogatepass")) > KEY_BYTES_MAX:
        raise UsageError(f"it has 1 to {KEY_BYTES_MAX:,} bytes as text, and this one has not")
    return text


def _wrong(state: Any, allowed: frozenset[type]) -> UsageError:
    wanted = " or ".join(sorted(each.__qualname__ for each in allowed - {type(None)}))
    advice = "; declare it without `async`" if isinstance(state, types.CoroutineType) else ""
    return UsageError(f"it returned {type(state).__qualname__}, not {wanted} or None{advice}")
