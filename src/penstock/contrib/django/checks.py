"""Checks: what `manage.py check`, and every command that runs the checks, says of the configuration."""

from __future__ import annotations

from typing import Any

from django.core import checks

from penstock.contrib.django.buses import find_bus
from penstock.contrib.django.configuration import EXAMPLE, configuration, outbox_of
from penstock.errors import PenstockError


def check_configuration(**_: Any) -> list[Any]:
    """Report settings that are wrong, a bus that cannot be found, and a database that nothing can be staged in."""
    try:
        found = configuration()
    except PenstockError as error:
        return [checks.Error(str(error), hint=f"For example: {EXAMPLE}", id="penstock.E001")]
    try:
        find_bus(found.bus)
    except PenstockError as error:
        return [checks.Error(str(error), hint="Name the module-level Bus of your project.", id="penstock.E002")]
    if outbox_of(found.database) is None:
        return [
            checks.Warning(
                f"events cannot be staged: database {found.database!r} is no SQLite file",
                hint="Publish after the commit instead, with transaction.on_commit and bus.sync(); or name another "
                "database as PENSTOCK['database'].",
                id="penstock.W001",
            )
        ]
    return []
