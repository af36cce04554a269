"""The application that Django knows Penstock as."""

from __future__ import annotations

from django.apps import AppConfig
from django.core.checks import register


class PenstockConfig(AppConfig):
    """Brings the checks, the migration of the outbox, and the command `penstock_run`."""

    name = "penstock.contrib.django"
    label = "penstock"
    verbose_name = "Penstock"

    def ready(self) -> None:
        """Register the checks."""
        from penstock.contrib.django.checks import check_configuration

        register(check_configuration, "penstock")
