"""The tables that events are staged in, in the database that is the outbox."""

from __future__ import annotations

from typing import Any

from django.db import migrations

from penstock.contrib.django.configuration import configuration
from penstock.errors import UsageError
from penstock.outbox import create_tables, drop_tables


def _is_outbox(connection: Any) -> bool:
    return bool(connection.vendor == "sqlite" and connection.alias == configuration().database)


def create(_apps: Any, editor: Any) -> None:
    """Create the tables; staging would do so, too, in the first transaction that needs them."""
    if _is_outbox(editor.connection):
        editor.connection.ensure_connection()
        create_tables(editor.connection.connection)


def drop(_apps: Any, editor: Any) -> None:
    """Drop the tables, unless an event waits in them."""
    if _is_outbox(editor.connection):
        editor.connection.ensure_connection()
        waiting = drop_tables(editor.connection.connection)
        if waiting:
            raise UsageError(
                f"{waiting:,} staged events wait in database {editor.connection.alias!r}: let `manage.py penstock_run` "
                f"move them, and decide about those that were set aside, before their tables go"
            )


class Migration(migrations.Migration):
    """Creates the outbox."""

    initial = True
    dependencies: list[tuple[str, str]] = []  # noqa: RUF012 - Django's own form
    operations = [migrations.RunPython(create, drop)]  # noqa: RUF012 - the same
