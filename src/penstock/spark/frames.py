"""DataFrames of topics, for people who have a bus or a URL at hand.

These are thin: everything they do can be written with `format("penstock")`, whose options they take by the same
names, as Python values.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

from penstock.bus.bus import Bus
from penstock.bus.topic import Topic
from penstock.errors import UsageError
from penstock.spark.connection import absolute

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

Topics = str | Topic[Any] | Sequence[str | Topic[Any]]


def read(spark: SparkSession, bus: Bus | str, topic: Topics, **options: Any) -> DataFrame:
    """Return the events of a topic, or of several, that are stored now.

    `bus` is a bus or the URL of its store; `topic` a `Topic`, a name, a pattern, or a list of them. Options are those
    of `format("penstock")`: `read(spark, bus, orders, startingOffsets="latest", types=["order.placed"])`.
    """
    return spark.read.format("penstock").options(**options_of(bus, topic, options)).load()


def stream(
    spark: SparkSession, bus: Bus | str, topic: Topics, *, subscription: str | None = None, **options: Any
) -> DataFrame:
    """Return the events of a topic, or of several, as a stream.

    With a `subscription` the query is shown as one, with its lag, and retention keeps what it has not read.
    """
    if subscription is not None:
        options["subscription"] = subscription
    return spark.readStream.format("penstock").options(**options_of(bus, topic, options)).load()


def register_views(spark: SparkSession, url: str, names: Iterable[str]) -> None:
    """Make a temporary view of each topic, under its name."""
    for name in names:
        read(spark, url, name).createOrReplaceTempView(f"`{name}`")


def url_of(bus: Bus | str) -> str:
    """Return the URL of a bus's store, as tasks can open it."""
    return absolute(bus if isinstance(bus, str) else bus.url)


def names_of(topics: Topics) -> list[str]:
    """Return the names and patterns that somebody gives."""
    listed = [topics] if isinstance(topics, str | Topic) else topics
    return [each if isinstance(each, str) else each.name for each in listed]


def options_of(bus: Bus | str, topic: Topics, options: Mapping[str, Any]) -> dict[str, str]:
    """Return the options of `format("penstock")` as Spark passes them on."""
    return {
        "url": url_of(bus),
        "topic": _text("topic", names_of(topic)),
        **{name: _text(name, value) for name, value in options.items()},
    }


def _text(name: str, value: Any) -> str:
    """Return an option as Spark passes it on."""
    match value:
        case str():
            return value
        case bool():
            return str(value).lower()
        case int():
            return str(value)
        case datetime():
            return value.isoformat()
        case Mapping():
            return json.dumps(value, default=datetime.isoformat)
        case list() | tuple() | set() | frozenset():
            return json.dumps(sorted(value) if isinstance(value, set | frozenset) else list(value))
    raise UsageError(f"option {name!r} cannot be {value!r}: give a text, a number, a time, a list or a dict")
