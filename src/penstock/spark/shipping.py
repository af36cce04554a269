"""Event classes and projections on their way to Spark's workers.

A `Shipment` carries an event type to a worker: by name where the worker can import it, and else in full, with what
plain cloudpickle loses of a msgspec Struct or cannot carry of a class that msgspec has looked at. A `FoldShipment`
carries a projection's functions, in the same way and with the same classes.
"""

from __future__ import annotations

import dataclasses
import io
import sys
import sysconfig
import threading
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from inspect import Parameter, signature
from typing import Any, Final, NamedTuple, TypeVar, get_type_hints

import msgspec
from msgspec import inspect
from pyspark import cloudpickle

from penstock.bus.folding import Fold, StateForm
from penstock.codecs import Codec, check_json, codec_named
from penstock.errors import CodecError, UsageError
from penstock.events import EventType
from penstock.spark.types import fields_of

R = TypeVar("R")

_CLASSES_REMEMBERED_MAX = 16
_SHIPPING = threading.Lock()


@dataclass(frozen=True, slots=True)
class Shipment:
    """An event type, pickled: first with its classes by name, then, for a worker that cannot import them, in full."""

    name: str
    version: int
    cls: str
    parcels: tuple[bytes, ...]
    reason: str

    @classmethod
    def of(cls, event_type: EventType[Any]) -> Shipment:
        """Pack an event type; call it where no other thread makes msgspec look at the class."""
        contents = _contents(event_type)
        place = f"{event_type.cls.__module__}.{event_type.cls.__qualname__}"
        parcels, reason = _parcels(f"class {place}", contents, [event_type.cls, *contents[2].values()])
        return cls(event_type.name, event_type.version, place, parcels, reason)

    def open(self) -> EventType[Any]:
        """Return the event type in this process."""
        return _opened(self)


@lru_cache(maxsize=_CLASSES_REMEMBERED_MAX)
def _opened(shipment: Shipment) -> EventType[Any]:
    def made(contents: _Contents) -> EventType[Any]:
        return _event_type(shipment.name, shipment.version, contents)

    return _first_that_opens(f"class {shipment.cls}", shipment.parcels, shipment.reason, made)


# --- projections ------------------------------------------------------------------------------


class Folding(NamedTuple):
    """A projection as a worker needs it: its functions, and the types of its events by name."""

    fold: Fold
    types: dict[str, EventType[Any]]


@dataclass(frozen=True, slots=True)
class FoldShipment:
    """A projection, pickled in the same two ways."""

    name: str
    topic: str
    types: tuple[tuple[str, int], ...]
    """The names and versions of its events' types, in the order in which the classes are packed."""
    parcels: tuple[bytes, ...]
    reason: str

    @classmethod
    def of(cls, fold: Fold, types: Iterable[EventType[Any]]) -> FoldShipment:
        """Pack a projection; call it where no other thread makes msgspec look at its classes."""
        types = list(types)
        packed = [_contents(event_type) for event_type in types]
        state = fold.state
        contents = (fold.function, fold.key, state.annotation, state.allowed, packed)
        things: list[object] = [fold.function, fold.key, *(state.allowed or ()), inspect.type_info(state.annotation)]
        things += [thing for each, _, upcasters in packed for thing in (each, *upcasters.values())]
        parcels, reason = _parcels(f"projection {fold.name!r}", contents, things)
        return cls(fold.name, fold.topic, tuple((each.name, each.version) for each in types), parcels, reason)

    def open(self) -> Folding:
        """Return the projection in this process."""
        return _opened_fold(self)


@lru_cache(maxsize=_CLASSES_REMEMBERED_MAX)
def _opened_fold(shipment: FoldShipment) -> Folding:
    def made(contents: tuple[Any, Any, Any, Any, list[_Contents]]) -> Folding:
        function, key, annotation, allowed, packed = contents
        check_json(annotation)
        types = [_event_type(*stated, each) for stated, each in zip(shipment.types, packed, strict=True)]
        fold = Fold(shipment.name, shipment.topic, function, key, StateForm(annotation, allowed))
        return Folding(fold, {each.name: each for each in types})

    return _first_that_opens(f"projection {shipment.name!r}", shipment.parcels, shipment.reason, made)


# --- parcels ----------------------------------------------------------------------------------

_Contents = tuple[type, str | Codec, dict[int, Any]]


def _contents(event_type: EventType[Any]) -> _Contents:
    codec = event_type.codec
    return (
        event_type.cls,
        codec.name if type(codec).__module__ == codec_named.__module__ else codec,
        dict(event_type.upcasters) if event_type.version > 1 else {},
    )


def _event_type(name: str, version: int, contents: _Contents) -> EventType[Any]:
    cls, codec, upcasters = contents
    chosen: Codec = codec_named(codec) if isinstance(codec, str) else codec
    chosen.check(cls)
    return EventType(name, version, cls, chosen, upcasters)


def _parcels(what: str, contents: object, things: Iterable[object]) -> tuple[tuple[bytes, ...], str]:
    """Return something pickled, by name and then in full, and why it is not in full, if it is not."""
    try:
        parcels = [_packed(contents, ())]
    except Exception as error:
        raise UsageError(
            f"{what} cannot be sent to Spark's workers ({type(error).__name__}: {str(error)[:200]}): "
            f"define it in a module that they can import"
        ) from error
    reason = ""
    try:
        if modules := list(_own_modules(things)):
            parcels.append(_packed(contents, modules))
    except Exception as error:  # noqa: BLE001 - then it travels by name or not at all, and the worker says why
        reason = f"; it cannot be sent in full, {type(error).__name__}: {str(error)[:200]}"
    return tuple(parcels), reason


def _first_that_opens(what: str, parcels: Iterable[bytes], reason: str, made: Callable[[Any], R]) -> R:
    reasons = []
    for parcel in parcels:
        try:
            return made(cloudpickle.loads(parcel))
        except (ImportError, AttributeError, CodecError) as error:
            reasons.append(f"{type(error).__name__}: {str(error)[:200]}")
    raise UsageError(
        f"{what} did not reach a worker of Spark ({'; '.join(reasons)}{reason}): define it "
        f"in a module that workers can import, or send that module along with spark.addArtifacts(…, pyfile=True)"
    )


def _packed(contents: object, by_value: Iterable[types.ModuleType]) -> bytes:
    with _SHIPPING:  # What is pickled by value is one setting for the whole process.
        registered = []
        try:
            for module in by_value:
                cloudpickle.register_pickle_by_value(module)  # type: ignore[no-untyped-call]
                registered.append(module)
            file = io.BytesIO()
            _ClassPickler(file).dump(contents)  # type: ignore[no-untyped-call]
            return file.getvalue()
        finally:
            for module in registered:
                cloudpickle.unregister_pickle_by_value(module)  # type: ignore[no-untyped-call]


def _own_modules(things: Iterable[object]) -> Iterator[types.ModuleType]:
    """Yield the modules of classes, of those they are made of, and of functions, unless they are installed."""
    installed = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    seen: set[str] = {"__main__", "builtins"}
    pending: list[object] = list(things)
    met: set[int] = set()
    while pending:
        thing = pending.pop()
        if id(thing) in met:
            continue
        met.add(id(thing))
        if isinstance(thing, type):
            pending.extend(thing.__mro__)
            pending.extend(kind for _, kind in fields_of(thing) or ())
        elif isinstance(thing, inspect.Type):
            pending.extend(getattr(thing, name) for name in thing.__struct_fields__)
        elif isinstance(thing, tuple):
            pending.extend(thing)
        elif not isinstance(thing, types.FunctionType):
            continue
        name = getattr(thing, "__module__", "builtins")
        file = getattr(sys.modules.get(name), "__file__", None)
        if name not in seen and name.partition(".")[0] != "penstock" and file and not file.startswith(tuple(installed)):
            yield sys.modules[name]
        seen.add(name)


class _ClassPickler(cloudpickle.Pickler):
    """Cloudpickle, for classes that msgspec has looked at: of a Struct it would silently lose every field."""

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is msgspec.Meta:
            return _make_meta, ({name: getattr(obj, name) for name in dir(obj) if not name.startswith("_")},)
        if type(obj).__module__ == "dataclasses" and not isinstance(obj, type):
            # `MISSING` and its like mean something by being the only ones: a second would be taken for a default.
            for name, only in vars(dataclasses).items():
                if only is obj:
                    return getattr, (dataclasses, name)
        reduced = super().reducer_override(obj)  # type: ignore[no-untyped-call]
        if reduced is NotImplemented or not isinstance(obj, type) or len(reduced) < 3:
            return reduced
        if isinstance(obj, type(msgspec.Struct)):
            return _reduced_struct(obj)
        members = reduced[2][0]
        members.pop("__msgspec_cache__", None)  # Notes for this process, which cannot be pickled.
        if "__annotations__" in members and not hasattr(obj, "__pydantic_validator__"):
            members["__annotations__"] = _annotations(obj)
        return reduced


def _make_meta(stated: dict[str, Any]) -> msgspec.Meta:
    return msgspec.Meta(**stated)


def _annotations(cls: type) -> dict[str, Any]:
    """Return a class's own annotations; texts are resolved, as their names mean nothing where it goes."""
    own = vars(cls).get("__annotations__", {})
    if not any(isinstance(annotation, str) for annotation in own.values()):
        return dict(own)
    hints = get_type_hints(cls, include_extras=True)
    return {name: hints[name] for name in own}


_OPTIONS: Final = (
    *("frozen", "eq", "order", "array_like", "gc", "repr_omit_defaults", "omit_defaults", "forbid_unknown_fields"),
    *("weakref", "dict", "cache_hash", "tag", "tag_field"),
)
_MADE_ANEW: Final = {"__annotations__", "__slots__", "__dict__", "__weakref__", "__match_args__", "__post_init__"}


class _Born(NamedTuple):
    """What a Struct class must have when it is made."""

    name: str
    bases: tuple[type, ...]
    module: str
    qualname: str
    fields: list[tuple[str, str, object, object]]
    has_code: bool


def _reduced_struct(cls: type[msgspec.Struct]) -> tuple[Any, ...]:
    """Say how to make a Struct class: what it must be born with, and what it is given then."""
    own = vars(cls).get("__annotations__", {})
    fields = {field.name: field for field in msgspec.structs.fields(cls)}
    stated = [
        (name, fields[name].encode_name, fields[name].default, fields[name].default_factory)
        for name in own
        if name in fields
    ]
    options = {name: getattr(cls.__struct_config__, name) for name in _OPTIONS}
    has_code = "__post_init__" in vars(cls)
    born = _Born(cls.__name__, cls.__bases__, cls.__module__, cls.__qualname__, stated, has_code)
    stated_by = signature(cls).parameters
    options["kw_only"] = any(stated_by[name].kind is Parameter.KEYWORD_ONLY for name in own if name in fields)
    members = {
        name: member
        for name, member in vars(cls).items()
        if name not in _MADE_ANEW
        and not name.startswith("__struct_")
        and not isinstance(member, types.MemberDescriptorType | types.GetSetDescriptorType)
    }
    grown = (members, _annotations(cls), vars(cls).get("__post_init__"))
    return _make_struct, (born, options), grown, None, None, _grow_struct


def _make_struct(born: _Born, options: Mapping[str, Any]) -> type[msgspec.Struct]:
    namespace: dict[str, Any] = {"__module__": born.module, "__qualname__": born.qualname, "__annotations__": {}}
    for name, encode_name, default, factory in born.fields:
        namespace["__annotations__"][name] = Any  # Later: a class may be among its own fields.
        namespace[name] = msgspec.field(default=default, default_factory=factory, name=encode_name)  # type: ignore[call-overload]
    if born.has_code:
        # msgspec looks for it once, when the class is made; and its code may refer to the class.
        later: list[Callable[[Any], None]] = []

        def post_init(self: Any) -> None:
            later[0](self)

        namespace |= {"__post_init__": post_init, "__penstock_later__": later}
    make: Any = type(msgspec.Struct)
    made: type[msgspec.Struct] = make(born.name, born.bases, namespace, **options)
    return made


def _grow_struct(cls: type[msgspec.Struct], grown: tuple[dict[str, Any], dict[str, Any], Any]) -> None:
    members, annotations, post_init = grown
    for name, member in members.items():
        setattr(cls, name, member)
    cls.__annotations__ = annotations
    if post_init is not None:
        vars(cls)["__penstock_later__"].append(post_init)
