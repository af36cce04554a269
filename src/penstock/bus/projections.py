"""Projections: what a pure function makes of a topic's events, as a table with one state per key.

A projection is declared once, with `@bus.projection(topic, name)`, and runs in two places, with the same result: in the
application, which folds events as they come into SQLite (`penstock.bus.projecting`), and on Spark, over any amount of
history, into Parquet (`penstock.spark.pipelines.project`). ::

    @bus.projection(orders, "revenue", key=lambda order: order.customer)
    def revenue(total: int | None, order: OrderPlaced) -> int | None:
        return (total or 0) + order.amount

    revenue.get("ada")
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from functools import update_wrapper
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from penstock.bus.folding import Fold, StateForm
from penstock.bus.handlers import called_of, classes_of, hints_of, parameters_of
from penstock.bus.states import suffix_of
from penstock.errors import UsageError
from penstock.events import check_name

if TYPE_CHECKING:
    from penstock.bus.states import States
    from penstock.bus.topic import Topic

S = TypeVar("S")

NAME_MAX: Final = 100
VERSION_MAX: Final = 1_000_000
_LIKE_A_VERSION: Final = re.compile(r".*\.v\d+")


class Projection(Generic[S]):
    """A projection that was declared with a bus; called, it is the function itself."""

    def __init__(
        self,
        function: Callable[[Any, Any], S | None],
        topic: Topic[Any],
        name: str,
        states: Callable[[], States],
        *,
        key: Callable[[Any], Any] | None = None,
        version: int = 1,
        ignore_others: bool = False,
        embedded: bool = True,
    ) -> None:
        check_name("projection", name)
        who = f"projection {name!r}"
        if len(name) > NAME_MAX or _LIKE_A_VERSION.fullmatch(name):
            raise UsageError(
                f"{who}: a name has at most {NAME_MAX} characters, and does not end like a version, in .v2"
            )
        if type(version) is not int or not 1 <= version <= VERSION_MAX:
            raise UsageError(f"{who}: version is {version!r}, it must be a number from 1 on")
        if key is not None and not callable(key):
            raise UsageError(f"{who}: key is {key!r}; it must be a function of the event")
        self.name = name
        self.version = version
        """Raise it when the function changes what states mean: the projection begins anew, beside the one before."""
        self.topic = topic
        self.ignore_others = ignore_others
        self.embedded = embedded
        """Whether it runs where the bus runs, and not on Spark alone."""
        self._states = states
        self.classes, form = _signature(function, topic, who, ignore_others=ignore_others)
        self.fold = Fold(name, topic.name, function, key, form)
        update_wrapper(self, function)

    def __repr__(self) -> str:
        return f"<Projection {self.name!r} of topic {self.topic.name!r}, version {self.version}>"

    def __str__(self) -> str:
        return f"projection {self.name!r} of topic {self.topic.name!r}"

    def __call__(self, state: S | None, event: Any) -> S | None:
        """Return the next state, as the function does; for tests."""
        result: S | None = self.fold.function(state, event)
        return result

    @property
    def subscription(self) -> str:
        """The name of the subscription that it has where the bus runs it."""
        return f"projection.{self.name}{suffix_of(self.version)}"

    @property
    def types(self) -> frozenset[str]:
        """The types of events that it takes; empty for all."""
        return frozenset(self.topic.types[cls].name for cls in self.classes) if self.ignore_others else frozenset()

    # --- looking ------------------------------------------------------------------------------

    def get(self, key: str) -> S | None:
        """Return the state of a key as this bus has it, or None; a short look into SQLite, which does not wait."""
        encoded = self._states().get(self.name, self.version, key)
        return None if encoded is None else self.fold.state.decode(encoded)

    def items(self) -> Iterator[tuple[str, S]]:
        """Yield all keys with their states, by key; what is written meanwhile may be among them or not."""
        for key, encoded in self._states().items(self.name, self.version):
            yield key, self.fold.state.decode(encoded)

    def positions(self) -> dict[int, int]:
        """Return how far it is: the offset that comes next, by partition."""
        for listed in self._states().listed():
            if (listed.name, listed.version) == (self.name, self.version):
                return listed.positions
        return {}


def _signature(
    function: Callable[..., Any], topic: Topic[Any], who: str, *, ignore_others: bool
) -> tuple[tuple[type, ...], StateForm]:
    """Return the classes of events that a function takes, and what its states are."""
    if not callable(function):
        raise UsageError(f"{who} is a function of a state and an event, not {function!r}")
    called = called_of(function)
    if inspect.iscoroutinefunction(called) or inspect.isasyncgenfunction(called) or inspect.isgeneratorfunction(called):
        raise UsageError(
            f"{who} must be a plain function, without `async` and `yield`: it computes, and waits for nothing"
        )
    parameters = parameters_of(function, who, "the state and the event")
    if len(parameters) != 2:
        raise UsageError(f"{who} takes {len(parameters)} parameters; it takes the state and the event")
    hints = hints_of(function, who)
    classes = classes_of(hints.get(parameters[1].name), who, topic)
    others = sorted(cls.__name__ for cls in topic.types if cls not in classes)
    if others and not ignore_others:
        raise UsageError(
            f"{who} takes no {', '.join(others)}, which topic {topic.name!r} has, too: annotate its event with all of "
            f"them, or say ignore_others=True to leave the others out"
        )
    stated = hints.get(parameters[0].name, hints.get("return", Any))
    return classes, StateForm.of(stated, who)
