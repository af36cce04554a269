"""Buses: the one bus of a Django project, found by its settings and configured by them."""

from __future__ import annotations

import threading

from django.apps import apps
from django.utils.module_loading import import_string

from penstock.bus.bus import Bus
from penstock.contrib.django.configuration import configuration, outbox_of
from penstock.errors import UsageError

_lock = threading.Lock()
_configured: dict[str, Bus] = {}
"""The bus by the path that the settings name, once it was configured."""


def get_bus() -> Bus:
    """Return the project's bus, with its store and its outbox as the settings say; `UsageError` if there is none.

    It is not opened. Staging needs no more; a process that publishes or consumes opens it, as any other bus.
    """
    apps.check_apps_ready()
    wanted = configuration()
    with _lock:
        bus = _configured.get(wanted.bus)
        if bus is None:
            bus = find_bus(wanted.bus)
            bus.configure(url=wanted.url, outbox=outbox_of(wanted.database))
            _configured[wanted.bus] = bus
        return bus


def find_bus(path: str) -> Bus:
    """Import the bus of this dotted path; `UsageError` if it is none."""
    try:
        found = import_string(path)
    except ImportError as error:
        raise UsageError(f"PENSTOCK['bus'] is {path!r}, which cannot be imported: {error}") from error
    if not isinstance(found, Bus):
        raise UsageError(f"PENSTOCK['bus'] is {path!r}, a {type(found).__name__}; it must be a penstock.Bus")
    return found
