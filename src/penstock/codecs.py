"""Codecs turn the value of an event into bytes and back.

Three are built in: `json` (the default) and `msgpack`, both by msgspec, and `raw`, which hands bytes
through. `register_codec` adds others. What they promise:

* A dataclass, msgspec Struct, attrs class or pydantic model that was encoded decodes to an equal value.
* Equal values give equal bytes: `json` and `msgpack` sort dictionaries by their string keys, and sets
  whose members can be compared. Other dictionaries and sets keep Python's order.
* Nothing is changed in silence. NaN and infinity, for which JSON has no form, are refused by `json`.
* Every failure is an `EncodeError` or a `DecodeError` that names the class and, where known, the path.
  Payloads may be private and errors are logged, so the text never quotes a payload beyond the few words
  of msgspec's own messages, and the error of a class's own code is named but not quoted.
* Hostile bytes cost time in proportion to their length and run no code but the class's own.

Pydantic is recognised by the attributes of its classes and never imported. Its wire form uses aliases,
as its validation does, and leaves out computed fields, so that a model reads what it wrote.
"""

from __future__ import annotations

import json
import os
import re
import threading
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar, cast, get_args

import msgspec
from msgspec import inspect

from penstock.errors import DecodeError, EncodeError, UsageError, did_you_mean

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

T = TypeVar("T")

_CLASSES_REMEMBERED_MAX = 1_024
_REASON_CHARACTERS_MAX = 200
_PATH = re.compile(r" - at (?:`key` in )?`[^`]*`\Z")


class Codec(Protocol):
    """Bytes for values and values for bytes; stateless, and safe to call from any thread.

    `encode` raises `EncodeError`, the others `DecodeError`, and nothing else.
    """

    @property
    def name(self) -> str:
        """The name that `@event(…, codec=name)` chooses."""

    @property
    def content_type(self) -> str:
        """The media type that its bytes are stored and exported under."""

    def check(self, cls: type) -> None:
        """Raise `EncodeError` if values of `cls` can never be written and read; called once per class."""

    def encode(self, value: object) -> bytes:
        """Return the bytes of `value`."""

    def decode(self, data: bytes, cls: type[T]) -> T:
        """Return the value of class `cls` that `data` holds."""

    def decode_builtins(self, data: bytes) -> object:
        """Return what `data` holds as dictionaries, lists and scalars: what upcasters work on."""

    def convert(self, obj: object, cls: type[T]) -> T:
        """Return the value of class `cls` that `obj`, as from `decode_builtins`, stands for."""


class PerClass(dict[type, T], Generic[T]):
    """What is worth building once for each class: a dictionary, since a hit then costs one lookup.

    It starts again when full, so that a program that makes classes on the fly does not keep them all. One thread builds
    at a time: msgspec notes on a class how it is read, and a second thread that comes while it does so finds the note
    half written, which ends the process.
    """

    _building = threading.RLock()

    def __init__(self, build: Callable[[type[Any]], T]) -> None:
        super().__init__()
        self._build = build

    def __missing__(self, cls: type[Any]) -> T:
        with self._building:
            if cls in self:
                return self[cls]
            if len(self) >= _CLASSES_REMEMBERED_MAX:
                self.clear()
            built = self[cls] = self._build(cls)
            return built

    @classmethod
    def renew_lock(cls) -> None:
        """Forget who builds: in a child of a fork, nobody does."""
        cls._building = threading.RLock()


os.register_at_fork(after_in_child=PerClass.renew_lock)


# --- JSON and MessagePack --------------------------------------------------------------------


class _Refused(ValueError):
    """A reason in our own words, which may be shown; msgspec adds the path to it."""


class _MsgspecCodec:
    """What JSON and MessagePack share: they differ in the half of msgspec that reads and writes them."""

    has_nan = True

    def __init__(
        self,
        name: str,
        content_type: str,
        encoder: type[msgspec.json.Encoder | msgspec.msgpack.Encoder],
        decoder: type[msgspec.json.Decoder[Any] | msgspec.msgpack.Decoder[Any]],
    ) -> None:
        self.name = name
        self.content_type = content_type
        self.readers = PerClass(self._build_reader)
        self._write_sorted = encoder(enc_hook=_dump_pydantic, order="deterministic").encode
        self._write = encoder(enc_hook=_dump_pydantic).encode
        self._read_builtins = decoder().decode
        self._decoder = decoder

    def check(self, cls: type) -> None:
        marks = ("__dataclass_fields__", "__struct_fields__", "__attrs_attrs__", "__pydantic_validator__")
        if not any(hasattr(cls, mark) for mark in marks):
            raise EncodeError(
                f"{cls.__qualname__} is not a dataclass, msgspec Struct, attrs class or pydantic model; "
                f"if it should be one: @event goes above @dataclass and its like"
            )
        try:
            self.readers[cls]
        except Exception as error:
            raise EncodeError(f"{cls.__qualname__} has no form in {self.name}: {_shorten(error)}") from error

    def encode(self, value: object) -> bytes:
        try:
            # A pydantic dataclass looks like a dataclass to msgspec, and is not one.
            plain = _dump_pydantic(value) if _is_pydantic[type(value)] else value
            try:
                data = self._write_sorted(plain)
            except TypeError:
                # msgspec sorts only string keys and comparable members, and refuses the rest.
                data = self._write(plain)
            if not self.has_nan and _may_hold_floats[type(value)] and data.find(b"null") >= 0:
                _refuse_nan(plain)
        except Exception as error:  # noqa: BLE001 - whatever a value holds, there is one kind of failure
            reason = "it is nested too deeply" if isinstance(error, RecursionError) else _shorten(error)
            raise EncodeError(f"{type(value).__qualname__} cannot be written as {self.name}: {reason}") from None
        return data

    def decode(self, data: bytes, cls: type[T]) -> T:
        try:
            value: T = self.readers[cls](data)
        except Exception as error:  # noqa: BLE001 - a class's own __post_init__ may raise anything
            raise self._unreadable(_named(cls), error) from None
        return value

    def decode_builtins(self, data: bytes) -> object:
        try:
            return self._read_builtins(data)
        except Exception as error:  # noqa: BLE001 - whatever the bytes, there is one kind of failure
            raise self._unreadable("payload", error) from None

    def convert(self, obj: object, cls: type[T]) -> T:
        try:
            if _is_pydantic[cls]:
                return cast("T", _load_pydantic(cls, obj))
            self.readers[cls]  # builds what msgspec needs to know of the class
            # JSON has only string keys; a dictionary keyed by numbers gets them back here.
            return msgspec.convert(obj, cls, dec_hook=_load_pydantic, str_keys=True)
        except Exception as error:  # noqa: BLE001 - as in decode
            raise self._unreadable(_named(cls), error) from None

    def _build_reader(self, cls: type[Any]) -> Callable[[bytes], Any]:
        if _is_pydantic[cls]:
            return lambda data: _load_pydantic(cls, self._read_builtins(data))
        return self._decoder(cls, dec_hook=_load_pydantic).decode

    def _unreadable(self, what: str, error: Exception) -> DecodeError:
        return DecodeError(f"{what} cannot be read from {self.name}: {_reason(error)}")


class _JsonCodec(_MsgspecCodec):
    """JSON, read by pydantic itself where it can be, and without `null` where a number was."""

    has_nan = False

    def _build_reader(self, cls: type[Any]) -> Callable[[bytes], Any]:
        return partial(_validate_json, cls) if _is_pydantic[cls] else super()._build_reader(cls)


def check_json(annotation: Any) -> None:
    """Raise `EncodeError` unless values of this annotation have a form in JSON; it need not be a class with fields."""
    try:
        shape = inspect.type_info(annotation)
        _JSON.readers[annotation]
    except Exception as error:
        raise EncodeError(f"{_named(annotation)} has no form in JSON: {_shorten(error)}") from error
    if isinstance(shape, inspect.CustomType) and not _is_pydantic[shape.cls]:
        raise EncodeError(f"{_named(annotation)} is not a dataclass, msgspec Struct, attrs class or pydantic model")


def _named(annotation: Any) -> str:
    return getattr(annotation, "__qualname__", None) or str(annotation)


_write_strictly = json.JSONEncoder(allow_nan=False, check_circular=False).encode


def _refuse_nan(value: object) -> None:
    # msgspec writes null for NaN and infinity, which a float field cannot read back. Python's own encoder
    # raises for them.
    _write_strictly(msgspec.to_builtins(value, enc_hook=_dump_pydantic, str_keys=True))


def _look_for_floats(cls: type[Any]) -> bool:
    """Say whether a value of `cls` may hold a float; most events cannot, and need no search for NaN."""
    try:
        root = inspect.type_info(cls)
    except Exception:  # noqa: BLE001 - annotations that msgspec cannot read may mean anything
        return True
    seen: set[int] = set()
    pending: list[object] = [root]
    while pending:
        node = pending.pop()
        if isinstance(node, (inspect.FloatType, inspect.AnyType, inspect.CustomType)):
            return True
        if isinstance(node, tuple):
            pending.extend(node)
        elif isinstance(node, (inspect.Type, inspect.Field)) and id(node) not in seen:
            seen.add(id(node))
            pending.extend(getattr(node, name) for name in node.__struct_fields__)
    return False


_may_hold_floats = PerClass(_look_for_floats)


def _reason(error: Exception) -> str:
    """Say why bytes could not be read, in words that are msgspec's or ours."""
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if isinstance(error, UnicodeError):
        return "a string is not valid UTF-8"
    # msgspec repeats the text of what a class's own code raised, and keeps that error as the cause.
    raised = (error.__cause__ or error) if isinstance(error, msgspec.MsgspecError) else error
    if isinstance(raised, msgspec.MsgspecError | _Refused):
        return _shorten(error)
    where = _PATH.search(str(error)) if isinstance(error, msgspec.MsgspecError) else None
    return f"the class raised {type(raised).__name__}{where.group() if where else ''}"


def _shorten(error: Exception) -> str:
    return str(error)[:_REASON_CHARACTERS_MAX]


# --- pydantic, by the attributes of its classes ----------------------------------------------

_is_pydantic = PerClass(lambda cls: hasattr(cls, "__pydantic_validator__"))


def _dump_pydantic(value: Any) -> object:
    """Return the builtins of a pydantic object; msgspec's hook for whatever it cannot write itself."""
    if not _is_pydantic[type(value)]:
        raise _Refused(f"objects of class {type(value).__qualname__} are not supported")
    try:
        # A field that holds what its annotation forbids would be refused only when read: refuse it now.
        return value.__pydantic_serializer__.to_python(
            value, mode="json", by_alias=True, round_trip=True, warnings="error"
        )
    except Exception as error:  # noqa: BLE001 - the model's own serializers run here
        raise _Refused(f"pydantic cannot dump {type(value).__qualname__} ({type(error).__name__})") from None


def _load_pydantic(cls: type[Any], obj: object) -> Any:
    """Return the pydantic object that `obj` stands for; msgspec's hook for whatever it cannot read itself."""
    if not _is_pydantic[cls]:
        raise _Refused(f"objects of class {cls.__qualname__} are not supported")
    # Through JSON, because a strict model accepts the text of a date or a number only from there; and
    # through Python's, because it keeps NaN.
    return _validate_json(cls, json.dumps(obj, default=msgspec.to_builtins).encode())


def _validate_json(cls: type[Any], data: bytes) -> Any:
    try:
        return cls.__pydantic_validator__.validate_json(data)
    except Exception as error:  # noqa: BLE001 - the model's own validators run here
        if not hasattr(error, "errors"):
            raise _Refused(f"the class raised {type(error).__name__}") from None
        # Types and locations only: pydantic's own text quotes the input.
        names = _declared_names(cls)
        facts = error.errors(include_url=False, include_context=False, include_input=False)[:3]
        raise _Refused("; ".join(f"{fact['type']} at `{_path(fact['loc'], names)}`" for fact in facts)) from None


def _path(location: Iterable[int | str], names: set[str]) -> str:
    # A part that no class declares is a dictionary's key, which is payload: hidden, as msgspec does.
    shown = (f"[{at}]" if isinstance(at, int) else f".{at}" if at in names else "[...]" for at in location)
    return "$" + "".join(shown)


def _declared_names(cls: type) -> set[str]:
    """Return every field name and alias of a pydantic class and of those that its fields refer to."""
    names: set[str] = set()
    seen: set[int] = set()
    pending: list[Any] = [cls]
    while pending:
        kind = pending.pop()
        if id(kind) not in seen:
            seen.add(id(kind))
            pending.extend(get_args(kind))
            for name, field in getattr(kind, "__pydantic_fields__", {}).items():
                aliases = (name, field.alias, field.validation_alias)
                names.update(alias for alias in aliases if isinstance(alias, str))
                pending.append(field.annotation)
    return names


# --- bytes as they are -----------------------------------------------------------------------


class _RawCodec:
    """Bytes, or a class derived from `bytes`, handed through; there is nothing in them to upcast."""

    name = "raw"
    content_type = "application/octet-stream"

    def check(self, cls: type) -> None:
        if not issubclass(cls, bytes):
            raise EncodeError(f"class {cls.__qualname__} is not bytes: codec 'raw' carries only those")

    def encode(self, value: object) -> bytes:
        if not isinstance(value, bytes):
            raise EncodeError(f"{type(value).__qualname__} is not bytes: codec 'raw' carries only those")
        return bytes(value)

    def decode(self, data: bytes, cls: type[T]) -> T:
        if not issubclass(cls, bytes):
            raise DecodeError(f"{cls.__qualname__} cannot be read from raw bytes")
        return cast("T", data if cls is bytes else cls(data))

    def decode_builtins(self, data: bytes) -> object:
        raise DecodeError("raw bytes have no fields: an older version of them cannot be upcast")

    def convert(self, obj: object, cls: type[T]) -> T:
        raise DecodeError(f"{cls.__qualname__} cannot be made from fields: codec 'raw' carries only bytes")


# --- finding a codec -------------------------------------------------------------------------

_lock = threading.Lock()
_by_name: dict[str, Codec] = {}
_by_media_type: dict[str, Codec] = {}


def register_codec(codec: Codec, *aliases: str) -> None:
    """Make `codec` known by its name, its content type and the further content types `aliases`.

    A name or a content type that belongs to a codec of another class is refused with `UsageError`.
    """
    media_types = [media_type(content_type) for content_type in (codec.content_type, *aliases)]
    with _lock:
        for known in (_by_name.get(codec.name), *map(_by_media_type.get, media_types)):
            if known is not None and _place(known) != _place(codec):
                raise UsageError(f"codec {_place(codec)} would replace {known.name!r}, which is {_place(known)}")
        _by_name[codec.name] = codec
        _by_media_type.update(dict.fromkeys(media_types, codec))


def codec_named(name: str) -> Codec:
    """Return the codec of that name; raise `UsageError` with the nearest one if there is none."""
    try:
        return _by_name[name]
    except KeyError:
        raise UsageError(f"there is no codec {name!r}{did_you_mean(str(name), _by_name)}") from None


def codec_for(content_type: str) -> Codec | None:
    """Return the codec for a content type, whatever its parameters and case; `…+json` is JSON."""
    media = media_type(content_type)
    return _by_media_type.get(media) or (_by_name["json"] if is_json(media) else None)


def media_type(content_type: str) -> str:
    """Return a content type without its parameters, in lower case."""
    return content_type.partition(";")[0].strip().lower()


def is_json(media: str) -> bool:
    """Say whether a media type means JSON: its subtype is `json` or ends in `+json`."""
    return media.endswith(("/json", "+json"))


def reader_of(codec: Codec, cls: type[T]) -> Callable[[bytes], T]:
    """Return what reads values of a class at the least cost: what it raises is whatever its library does.

    For those who read very many, and ask `codec.decode` again for the one that could not be read, and for its error.
    """
    return codec.readers[cls] if isinstance(codec, _MsgspecCodec) else lambda data: codec.decode(data, cls)


def forget_classes() -> None:
    """Let go of the classes that decoders were built for, because one of them was replaced."""
    _is_pydantic.clear()
    _may_hold_floats.clear()
    _JSON.readers.clear()
    _MSGPACK.readers.clear()


def _place(codec: Codec) -> str:
    return f"{type(codec).__module__}.{type(codec).__qualname__}"


_JSON = _JsonCodec("json", "application/json", msgspec.json.Encoder, msgspec.json.Decoder)
_MSGPACK = _MsgspecCodec("msgpack", "application/vnd.msgpack", msgspec.msgpack.Encoder, msgspec.msgpack.Decoder)
register_codec(_JSON)
register_codec(_MSGPACK, "application/msgpack", "application/x-msgpack")
register_codec(_RawCodec())
