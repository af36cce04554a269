"""Handlers: the functions of an application that take events, and what their signatures say.

`async def` handlers run in the event loop, `def` handlers in threads. The first parameter is the event, of the class
that it is annotated with; a second one, or one that is annotated with `Delivery`, is its delivery. Several handlers of
a subscriber share its events by their classes: each event goes to exactly one of them, and which one is known before
the first event comes.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, TypeVar, Union, get_args, get_origin, get_type_hints

from penstock.bus.delivered import Delivery
from penstock.errors import UsageError
from penstock.events import check_name

if TYPE_CHECKING:
    from penstock.bus.middleware import Middleware
    from penstock.bus.topic import Topic

CONCURRENCY = 16
CONCURRENCY_MAX = 4_096


@dataclass(frozen=True, slots=True, eq=False)
class Handler:
    """A function that takes events of some classes."""

    function: Callable[..., Any]
    name: str
    classes: tuple[type, ...]
    """Which of the topic's; none for a topic of `bytes`."""
    in_loop: bool
    """Whether it is a coroutine function; others run in threads."""
    takes: tuple[bool, ...]
    """For each parameter, whether it is the delivery."""

    arguments: Callable[[Any, Delivery[Any]], tuple[Any, ...]] = field(init=False, repr=False)
    """What makes of a value and its delivery what it is called with."""
    begin: Callable[[Any, Delivery[Any]], Any] = field(init=False, repr=False)
    """The function, called with a value and its delivery whatever it takes: itself, if it takes both."""

    def __post_init__(self) -> None:
        function = self.function
        begins: dict[tuple[bool, ...], Callable[[Any, Any], Any]] = {
            (False,): lambda value, _: function(value),
            (True,): lambda _, delivery: function(delivery),
            (False, True): function,
            (True, False): lambda value, delivery: function(delivery, value),
        }
        object.__setattr__(self, "arguments", _ARGUMENTS[self.takes])
        object.__setattr__(self, "begin", begins[self.takes])


_ARGUMENTS: Final[Mapping[tuple[bool, ...], Callable[[Any, Any], tuple[Any, ...]]]] = {
    (False,): lambda value, _: (value,),
    (True,): lambda _, delivery: (delivery,),
    (False, True): lambda value, delivery: (value, delivery),
    (True, False): lambda value, delivery: (delivery, value),
}
"""What each signature is called with."""

_ANYTHING: Final = (None, Any, object)
"""Annotations that say nothing; None stands for no annotation."""


def handler_of(function: Callable[..., Any], topic: Topic[Any]) -> Handler:
    """Read what a function's signature says; `UsageError` if it cannot be a handler of this topic."""
    if isinstance(function, staticmethod):
        function = function.__func__  # what is decorated in a class is not yet what the class makes of it
    if isinstance(function, classmethod):
        raise UsageError(
            f"a subscriber of topic {topic.name!r} cannot be a classmethod where it is defined: declare it when its "
            f"class is there, bus.subscriber(…)(Class.method)"
        )
    check_function(function, f"a subscriber of topic {topic.name!r}")
    name = getattr(function, "__qualname__", None) or repr(function)
    who = f"handler {name}"
    if yields(function):
        raise UsageError(f"{who} yields; a handler takes one event and returns")
    parameters = parameters_of(function, who, "the event, and perhaps its delivery")
    hints = hints_of(function, who)
    takes = _takes(parameters, hints, who)
    annotated = {is_delivery: hints.get(each.name) for each, is_delivery in zip(parameters, takes, strict=True)}
    classes = _handled(annotated.get(False), annotated.get(True), who, topic)
    return Handler(function, name, classes, waits(function), takes)


def _handled(event: Any, delivery: Any, who: str, topic: Topic[Any]) -> tuple[type, ...]:
    """Return the classes that a handler takes, by the annotations of its event, and of its delivery."""
    delivered = classes_of(_carried(delivery), who, topic)
    classes = delivered if event in _ANYTHING else classes_of(event, who, topic)
    if not set(classes) <= set(delivered):
        raise UsageError(f"{who} takes {_named(event)}, and {_named(delivery)}, which are of different classes")
    return classes


def _carried(delivery: Any) -> Any:
    """Return of what a delivery is, if its annotation says that: `A` for `Delivery[A]`."""
    for each in _alternatives(delivery):
        if get_origin(each) is Delivery:
            [carried] = get_args(each)
            return None if isinstance(carried, TypeVar) else carried
    return None


def check_function(value: Any, what: str) -> None:
    """Raise `UsageError` unless something can be called for what it does."""
    if not callable(value):
        raise UsageError(f"{what} is a function, not {value!r}")
    # To call a class makes an object, and that is all, unless the object can be awaited.
    if isinstance(value, type) and not hasattr(value, "__await__"):
        raise UsageError(f"{what} is a function, not a class; an object of {value.__name__} may be one")


def check_flag(value: Any, what: str) -> None:
    """Raise `UsageError` unless something is True or False: the text "no" would count as true."""
    if not isinstance(value, bool):
        raise UsageError(f"{what} is True or False, not {value!r}")


def called_of(function: Any) -> Any:
    """Return the function that runs when something is called; for what is not written in Python, what calls it."""
    while not (inspect.isfunction(function) or isinstance(function, types.WrapperDescriptorType)):
        if isinstance(function, functools.partial):
            function = function.func
        elif isinstance(function, types.MethodType | staticmethod):
            function = function.__func__
        else:
            function = type(function).__call__
    return function


def code_of(function: Any) -> types.CodeType | None:
    """Return the code that runs when something is called; None if it is no code of Python."""
    return getattr(called_of(function), "__code__", None)


def waits(function: Any) -> bool:
    """Return whether calling something makes a coroutine: also of an object that is marked as what does."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(called_of(function))


def yields(function: Any) -> bool:
    """Return whether calling something makes a generator, and runs nothing of it."""
    called = called_of(function)
    return inspect.isgeneratorfunction(called) or inspect.isasyncgenfunction(called)


def parameters_of(function: Callable[..., Any], who: str, takes: str) -> list[inspect.Parameter]:
    """Return what has to be given to a function by position; `UsageError` if it wants anything else."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # not all that is written in C has one
        raise UsageError(f"{who} does not say what it takes; a function of yours around it does: {takes}") from None
    wanted = []
    for each in signature.parameters.values():
        if each.kind in {each.VAR_POSITIONAL, each.VAR_KEYWORD}:
            raise UsageError(f"{who} takes *{each.name}; name what it takes: {takes}")
        if each.default is not each.empty:
            continue
        if each.kind is each.KEYWORD_ONLY:
            raise UsageError(f"{who} has a parameter {each.name!r} that nobody gives; a default helps")
        wanted.append(each)
    return wanted


def hints_of(function: Callable[..., Any], who: str) -> Mapping[str, Any]:
    """Return the annotations of a function, as what they mean."""
    signed: Any = function  # from here on, what `inspect.signature` goes by
    while inner := signed.func if isinstance(signed, functools.partial) else getattr(signed, "__wrapped__", None):
        signed = inner
    try:
        return get_type_hints(called_of(signed))
    except NameError as error:
        raise UsageError(
            f"the annotations of {who} cannot be read: {error}; its classes must be known where it is "
            f"defined, outside of `if TYPE_CHECKING` and of functions"
        ) from None
    except Exception as error:  # noqa: BLE001 - an annotation is an expression, which may raise anything
        raise UsageError(f"the annotations of {who} cannot be read: {error}") from None


def _takes(parameters: list[inspect.Parameter], hints: Mapping[str, Any], who: str) -> tuple[bool, ...]:
    """Return for each parameter whether it is the delivery; `UsageError` if it cannot be told, or is too many."""
    if parameters and parameters[0].name == "self" and "self" not in hints:
        raise UsageError(
            f"{who} is a method without its object: declare it with one, bus.subscriber(…)(its_object.method)"
        )
    annotated = [hints.get(each.name) for each in parameters]
    takes = tuple(_is_delivery(hint) for hint in annotated)
    if takes == (False, False):
        if annotated[1] not in _ANYTHING:
            raise UsageError(
                f"{who} takes {_named(annotated[1])} as its second parameter, {parameters[1].name!r}, which is the "
                f"delivery: annotate it with Delivery, or give it a default"
            )
        return False, True
    if takes not in _ARGUMENTS:
        what = "two deliveries" if takes == (True, True) else f"{len(takes)} parameters"
        raise UsageError(f"{who} takes {what}; it takes the event, or the event and its delivery")
    return takes


def _is_delivery(hint: Any) -> bool:
    wanted = [each for each in _alternatives(hint) if each is not types.NoneType]
    return bool(wanted) and all(each is Delivery or get_origin(each) is Delivery for each in wanted)


def _alternatives(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in {Union, types.UnionType} else (hint,)


def classes_of(hint: Any, who: str, topic: Topic[Any]) -> tuple[type, ...]:
    """Return the classes of the topic that an annotation means."""
    known = tuple(topic.types)
    if hint in _ANYTHING:
        return known
    wanted = _alternatives(hint)
    if not known:
        if wanted != (bytes,):
            raise UsageError(f"{who} takes {_named(hint)}, and topic {topic.name!r} has plain bytes")
        return ()
    found = []
    for each in wanted:
        meant = [cls for cls in known if _is_subclass(cls, each)]
        if not meant:
            names = ", ".join(cls.__name__ for cls in known)
            raise UsageError(f"{who} takes {_named(each)}, and topic {topic.name!r} has {names}")
        found += [cls for cls in meant if cls not in found]
    return tuple(found)


def _is_subclass(cls: type, of: Any) -> bool:
    try:
        return isinstance(of, type) and issubclass(cls, of)
    except TypeError:  # of most protocols Python cannot tell
        return False


def _named(hint: Any) -> str:
    return hint.__name__ if isinstance(hint, type) else str(hint)


@dataclass(slots=True)
class Subscriber:
    """A subscription of a topic, and the handlers that an application has for it."""

    topic: Topic[Any]
    name: str
    options: dict[str, Any] = field(default_factory=dict)
    """What `Bus.consume` is given."""
    concurrency: int = CONCURRENCY
    manual: bool = False
    """Whether its handlers ack by themselves."""
    ignore_others: bool = False
    middleware: tuple[Middleware, ...] = ()
    handlers: list[Handler] = field(default_factory=list)

    def __post_init__(self) -> None:
        check_name("subscription", self.name)
        if type(self.concurrency) is not int or not 1 <= self.concurrency <= CONCURRENCY_MAX:
            raise UsageError(f"{self}: concurrency is {self.concurrency!r}, it must be 1 to {CONCURRENCY_MAX:,}")
        check_flag(self.ignore_others, f"{self}: ignore_others")
        for each in self.middleware:
            check_function(each, f"{self}: each of its middleware")

    def __str__(self) -> str:
        return f"subscriber {self.name!r} of topic {self.topic.name!r}"

    def add(self, handler: Handler) -> None:
        """Take one more handler."""
        for other in self.handlers:
            both = set(handler.classes) & set(other.classes)
            if both or not handler.classes:
                what = ", ".join(sorted(cls.__name__ for cls in both)) or "bytes"
                raise UsageError(f"{self} has two handlers of {what}: {other.name} and {handler.name}")
        self.handlers.append(handler)

    def check(self) -> None:
        """Raise `UsageError` if there is a class without a handler, unless that is meant."""
        handled = {cls for handler in self.handlers for cls in handler.classes}
        missing = sorted(cls.__name__ for cls in self.topic.types if cls not in handled)
        if missing and not self.ignore_others:
            raise UsageError(
                f"{self} has no handler of {', '.join(missing)}: add one, or say ignore_others=True to drop them"
            )

    def by_type(self) -> dict[str, Handler]:
        """Return the handler of each type of event; that of plain bytes is under the empty name."""
        found = {self.topic.types[cls].name: handler for handler in self.handlers for cls in handler.classes}
        return found if self.topic.types else {"": self.handlers[0]}
