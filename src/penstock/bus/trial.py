"""Trial: one event, given to its handler by itself and without consequences for its subscription.

The handler and the event are the real ones. The delivery looks like any other, with its position, attempt and headers,
but it is inert: `ack`, `nack`, `reject`, `extend` and `once` settle, count and write nothing, and say so to whoever
asked for the trial. Middleware is left out. What the handler does by itself, to a database or by publishing, it does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar, cast

from penstock.bus.delivered import Delivery
from penstock.engine.messages import Ack, Extend, Nack
from penstock.engine.states import Outcome
from penstock.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from penstock.batch import StoredEvent
    from penstock.bus.handlers import Handler, Subscriber
    from penstock.engine.messages import Input, Offsets

T = TypeVar("T")


class TrialDelivery(Delivery[T]):
    """A delivery of which whatever is said is told to `notice`, and goes no further."""

    __slots__ = ("_notice", "_subscriber")

    def __init__(
        self,
        subscriber: Subscriber,
        event: StoredEvent,
        *,
        attempt: int,
        replay: int,
        notice: Callable[[str], None],
    ) -> None:
        nobody = cast("Any", None)  # no seat has handed it over, and no engine knows of it
        super().__init__(nobody, nobody, 0, subscriber.topic, event, attempt, replay)
        self._subscriber = subscriber
        self._notice = notice

    @property
    def subscription(self) -> str:
        """The name of the subscription that it is tried for."""
        return self._subscriber.name

    @property
    def identity(self) -> tuple[str, str, str]:
        """What it would have if it were delivered."""
        return (self._scope, *self.event.identity)

    @property
    def _digest(self) -> bytes:
        """The same."""
        return self.event.digest(self._scope)

    @property
    def _scope(self) -> str:
        return f"{self._topic.name}/{self._subscriber.name}"

    @property
    def stale(self) -> bool:
        """Nobody can take it over."""
        return False

    @property
    def said(self) -> bool:
        """Whether the handler has said anything of it."""
        return self._said

    def once(self, *_: Any, **__: Any) -> Any:
        """Return what says that this is the first time, as a context for `with` or `async with`."""
        return _Once(self._notice)

    def _tell(self, told: Input) -> None:
        match told:
            case Ack(outcome=Outcome.DISCARDED):
                what = "discard: it stays as it is"
            case Ack():
                what = "ack: nothing is settled"
            case Nack(retry=False):
                what = "reject: it does not become a dead letter"
            case Nack():
                what = "nack: no attempt is counted"
            case Extend():
                what = "extend: a trial has no end of its time"
            case _:
                what = f"{type(told).__name__}: nothing happens"
        self._notice(f"this is a trial: {what}")

    def _start(self) -> None:
        pass

    def _give_back(self, offsets: Offsets) -> None:
        self._notice(f"this is a trial: nobody else gets {len(offsets)} event back")


class _Once:
    """What `once` is in a trial."""

    def __init__(self, notice: Callable[[str], None]) -> None:
        self._notice = notice

    def __enter__(self) -> bool:
        self._notice("this is a trial: once: it counts as the first time, and no mark is written")
        return True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    async def __aenter__(self) -> bool:
        return self.__enter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass


def handler_for(subscriber: Subscriber, event: StoredEvent) -> Handler:
    """Return the handler that a subscriber has for an event; `UsageError` if there is none."""
    type_ = event.type if subscriber.topic.types else ""
    handler = subscriber.by_type().get(type_)
    if handler is None:
        known = ", ".join(sorted(subscriber.by_type()))
        raise UsageError(f"{subscriber} has no handler of {type_!r}, the type of {event.position}; it has {known}")
    return handler
