"""`manage.py penstock_run`: the subscribers of the project, until SIGTERM or Ctrl-C.

Handlers are found in the module of the bus and in the module `subscribers` of every installed application. While it
runs, what was staged is moved to the store. It ends as `penstock run` does: 0 if all handlers ended by themselves, 1 if
some had to be cancelled or something failed, 2 if it cannot be run as it is.
"""

from __future__ import annotations

from typing import Any

from django.core.management.base import BaseCommand, CommandError
from django.utils.module_loading import autodiscover_modules

from penstock.bus.loop import run_to_end
from penstock.bus.subscribers import announcement
from penstock.contrib.django.buses import get_bus
from penstock.contrib.django.connections import look_after_connections
from penstock.errors import PenstockError, SettingsError, UsageError

SUBSCRIBERS = "subscribers"


class Command(BaseCommand):
    """Runs the subscribers."""

    help = "Runs the subscribers of the project's bus until SIGTERM or Ctrl-C, and moves what was staged."

    def handle(self, *_args: Any, **_options: Any) -> None:
        """Run them to their end."""
        try:
            bus = get_bus()
            autodiscover_modules(SUBSCRIBERS)
            if not bus.subscribers and not any(projection.embedded for projection in bus.projections):
                raise UsageError(
                    "there is nothing to run: declare handlers with @bus.subscriber(topic, name), in the module of the "
                    f"bus or in the module {SUBSCRIBERS!r} of an installed application"
                )
            look_after_connections(bus)
            for line in announcement(bus.url, bus.subscribers, bus.projections):
                self.stderr.write(line, style_func=str)
            orderly = run_to_end(bus.run())
        except PenstockError as error:
            usage = isinstance(error, UsageError | SettingsError)
            raise CommandError(str(error), returncode=2 if usage else 1) from error
        except OSError as error:  # the store cannot be opened where it is
            raise CommandError(str(error)) from error
        if not orderly:
            raise CommandError("handlers had to be cancelled; their events went back")
