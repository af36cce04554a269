"""Configuration: what `settings.PENSTOCK` says, checked.

A dictionary with these keys:

* `bus`: where the project's bus is, as a dotted path: `"shop.events.bus"`. Required.
* `url`: the store, instead of the one that the bus names by itself.
* `database`: the alias of the database whose SQLite file is the outbox; `"default"` unless given.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from django.conf import settings
from django.db import connections

from penstock.errors import UsageError, did_you_mean

if TYPE_CHECKING:
    from collections.abc import Mapping

EXAMPLE = 'PENSTOCK = {"bus": "shop.events.bus"}'


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """The settings of a project."""

    bus: str
    url: str | None = None
    database: str = "default"


def configuration() -> Configuration:
    """Return what the settings say; `UsageError` says what is wrong with them."""
    given = getattr(settings, "PENSTOCK", None)
    if given is None:
        raise UsageError(f"the settings have no PENSTOCK: write {EXAMPLE}")
    if not isinstance(given, dict):
        raise UsageError(f"PENSTOCK is a {type(given).__name__}, it must be a dictionary: {EXAMPLE}")
    known = [field.name for field in fields(Configuration)]
    for name in given:
        if name not in known:
            raise UsageError(f"PENSTOCK has no setting {name!r}{did_you_mean(str(name).lower(), known)}")
    for name, value in given.items():
        if not isinstance(value, str) or not value:
            # Not the value itself: a URL may hold a password.
            raise UsageError(f"PENSTOCK[{name!r}] must be a text that is not empty, not a {type(value).__name__}")
    _check_bus(given)
    found = Configuration(**given)
    if found.database not in connections.settings:
        known = list(connections.settings)
        raise UsageError(f"PENSTOCK['database'] is {found.database!r}{did_you_mean(found.database, known)}")
    return found


def _check_bus(given: Mapping[str, Any]) -> None:
    if "bus" not in given:
        raise UsageError(f"PENSTOCK does not say where the bus is: {EXAMPLE}")
    if "." not in given["bus"] or ":" in given["bus"]:
        raise UsageError(f"PENSTOCK['bus'] is {given['bus']!r}, it must be a dotted path: {EXAMPLE}")


def outbox_of(alias: str) -> str | None:
    """Return the SQLite file of a database; None if it is another kind of database, or one in memory."""
    connection = connections[alias]
    if connection.vendor != "sqlite" or connection.is_in_memory_db():
        return None
    name = str(connection.settings_dict["NAME"])
    return unquote(urlsplit(name).path) if name.startswith("file:") else name
