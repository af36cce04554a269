"""Effects once: the mark of a handled event, in a transaction of Django's own connection.

What a handler writes through the ORM and the mark are committed together, or rolled back together. It takes any
database that `penstock.inbox` does: SQLite, PostgreSQL and what is like them.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from django.db import DEFAULT_DB_ALIAS, connections, transaction

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

    from penstock.bus.delivered import Delivery


@contextmanager
def once(delivery: Delivery[Any], *, using: str | None = None, scope: str | None = None) -> Iterator[bool]:
    """Begin an `atomic()` block, and mark in it that an event is handled; for `def` handlers.

    What it gives is False if the event was marked before, and then the block must do nothing. Within an `atomic()` of
    the caller it is a part of that. `using` is the alias of the database, as everywhere in Django; `scope` is that of
    `delivery.once`.
    """
    alias = DEFAULT_DB_ALIAS if using is None else using
    with transaction.atomic(using=alias):
        connection = connections[alias]
        with connection.cursor() as cursor:
            # Some drivers begin a transaction with its first statement, and the mark must find one to be a part of.
            cursor.execute("SELECT 1")
        with connection.wrap_database_errors, delivery.once(connection.connection, scope=scope) as first:
            yield first
