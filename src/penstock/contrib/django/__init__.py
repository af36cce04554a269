"""Penstock in a Django project: `INSTALLED_APPS = [..., "penstock.contrib.django"]`, and `PENSTOCK` in the settings.

* `get_bus()` is the project's bus.
* `stage(topic, value)` publishes inside the transaction of Django's own connection: the event appears if and when the
  `atomic()` block commits. A block that is rolled back takes its events along, an inner one, too.
* `with once(delivery) as first:` marks an event as handled in the transaction in which its handler writes.
* `manage.py penstock_run` runs the subscribers, with Django set up, and moves what was staged.
* `manage.py migrate` makes the tables that staging needs; `manage.py check` looks at the configuration.

Staging is for SQLite: the event is a row in your own file. Effects once are for PostgreSQL, too.
"""

from __future__ import annotations

from penstock.contrib.django.buses import get_bus
from penstock.contrib.django.effects import once
from penstock.contrib.django.staging import stage

__all__ = ["get_bus", "once", "stage"]
