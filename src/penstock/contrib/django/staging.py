"""Staging: publishing inside a transaction of Django's own connection.

The event is a row in the database that Django writes to, inserted by the same SQLite connection: no callback after the
commit, and nothing to lose between the two. It shares the fate of whatever else is in the `atomic()` block, of an inner
block that is rolled back, too. Outside of any block Django commits each statement by itself, and so it does this one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar, Unpack

from django.db import connections, transaction

from penstock.contrib.django.buses import get_bus
from penstock.contrib.django.configuration import configuration
from penstock.errors import UsageError

if TYPE_CHECKING:
    from typing import Any

    from penstock.bus.topic import EventFields, Topic
    from penstock.events import Event

T = TypeVar("T")


def stage(topic: Topic[T] | str, value: T | Event, *, using: str | None = None, **fields: Unpack[EventFields]) -> None:
    """Publish `value` if and when the current transaction commits.

    `using` is the alias of the database, as everywhere in Django; it must be the one that `PENSTOCK['database']` names,
    which is taken if none is given. `fields` are those of `bus.publish`: key, headers and the like. The event is moved
    to the store by any process that has the bus open, such as `manage.py penstock_run`.
    """
    alias = configuration().database if using is None else using
    connection = connections[alias]
    _check(connection, alias)
    bus = get_bus()
    # Django would refuse a statement of its own here, and this one passes it by.
    connection.validate_no_broken_transaction()
    connection.ensure_connection()
    with connection.wrap_database_errors:
        if connection.in_atomic_block or not connection.get_autocommit():
            bus.stage(connection.connection, topic, value, **fields)
        else:
            with transaction.atomic(using=alias):
                bus.stage(connection.connection, topic, value, **fields)


def _check(connection: Any, alias: str) -> None:
    if connection.vendor != "sqlite":
        raise UsageError(
            f"an event is staged in an SQLite database, and {alias!r} is {connection.vendor}: publish after the commit "
            f"instead, with transaction.on_commit and bus.sync()"
        )
    if connection.is_in_memory_db():
        raise UsageError(
            f"database {alias!r} is in memory, where no other process could find what is staged: use a file; for tests "
            f'DATABASES[{alias!r}]["TEST"] = {{"NAME": "test.sqlite3"}}'
        )
