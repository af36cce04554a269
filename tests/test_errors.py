from __future__ import annotations

import inspect
import pickle
import re

import pytest

from penstock import errors
from penstock.errors import PenstockError, did_you_mean

CLASSES = [
    cls
    for _, cls in inspect.getmembers(errors, inspect.isclass)
    if issubclass(cls, PenstockError) and cls.__module__ == errors.__name__
]

SAMPLES: list[PenstockError] = [
    errors.InvalidName("topic", "Bad"),
    errors.TooLarge("an event", 10, 5, "make it smaller"),
    errors.UnknownTopic("order", ["orders"]),
    errors.FutureVersion("order.placed", 3, 2),
    errors.UpcasterMissing("order.placed", 1, 2),
    errors.PublishUnknown("orders", 3, None, "no answer"),
    errors.PartialPublish("orders", {0: None}, {1: errors.StoreFull("full")}, None),
    errors.TopicDeleted("abc"),
    errors.TopicDeleted("abc", topic="orders"),
    errors.UnknownSubscription("abc", "billing", topic="orders"),
    errors.Trimmed.at("orders/0", 1, 2, 5),
    errors.BeyondEnd.at("orders/0", 9, 2, 5),
    errors.StoreFull("full"),
    errors.ProjectionFailed("revenue", "orders/0@17", "it raised KeyError"),
]


def drawn() -> dict[str, str | None]:
    """Return the tree at the top of the module: each name with its parent."""
    parents: dict[str, str | None] = {}
    above: list[tuple[int, str]] = []
    for line in (errors.__doc__ or "").splitlines():
        found = re.match(r"^( *)[*+.-] (\w+)", line)
        if not found:
            continue
        depth, name = len(found[1]), found[2]
        above = [(at, cls) for at, cls in above if at < depth]
        parents[name] = above[-1][1] if above else None
        above.append((depth, name))
    return parents


def test_the_tree_that_is_drawn_is_the_tree_that_is() -> None:
    real = {cls.__name__: cls.__bases__[0].__name__ if cls is not PenstockError else None for cls in CLASSES}
    assert drawn() == real


@pytest.mark.parametrize("cls", CLASSES)
def test_every_error_says_when_it_is_raised(cls: type[PenstockError]) -> None:
    assert (cls.__doc__ or "").startswith("Raised when ")


@pytest.mark.parametrize("error", SAMPLES, ids=lambda error: type(error).__name__)
def test_an_error_survives_pickling_with_its_facts(error: PenstockError) -> None:
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert set(vars(again)) == set(vars(error))


@pytest.mark.parametrize(
    ("error", "facts"),
    [
        (errors.TopicDeleted("abc"), {"log_id": "abc"}),
        (errors.UnknownSubscription("abc", "billing"), {"log_id": "abc", "name": "billing"}),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_gone_is_named_by_its_topic_where_that_is_known(
    error: errors.TopicDeleted | errors.UnknownSubscription, facts: dict[str, str]
) -> None:
    named = error.of("orders")
    assert type(named) is type(error)
    assert str(error).startswith("log abc ")
    assert str(named) == str(error).replace("log abc ", "topic 'orders' (log abc) ", 1)
    assert vars(named) == vars(error) == facts


def test_a_topic_that_is_gone_is_not_said_to_be_there() -> None:
    assert str(errors.TopicDeleted("abc", topic="orders")) == (
        "topic 'orders' (log abc) was deleted; if a topic of its name exists again, that is another log: open it anew"
    )


def test_the_nearest_name_is_suggested_or_the_few_there_are() -> None:
    assert did_you_mean("ordres", ["orders", "payments"]) == "; did you mean 'orders'?"
    assert did_you_mean("zzz", ["orders", "payments"]) == "; known: 'orders', 'payments'"
    assert did_you_mean("zzz", map(str, range(100))) == ""
    assert did_you_mean("zzz", []) == ""
