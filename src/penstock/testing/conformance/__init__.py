"""One suite that every store passes: the docstrings of `penstock.ports`, as tests.

The author of a store derives from `StoreConformance` and says how to open one:

    class TestMyStore(StoreConformance):
        def open(self, clock: VirtualClock) -> Store:
            return MyStore(new_directory(), clock=clock)

A store that is durable overrides `reopen` as well, and one that has an outbox `transaction`. What a store
cannot do is skipped, and the reason of the skip names the capability. Nothing here sleeps or measures time:
the store gets a `VirtualClock` and must take all its time from it.

What grows in a store is bounded, but the ports do not say where: `StoreFull` is left to a store's own tests.
"""

from __future__ import annotations

from penstock.testing.conformance.cursors import CursorsConformance
from penstock.testing.conformance.entrances import OutboxConformance, ScheduleConformance
from penstock.testing.conformance.leases import LeasesConformance
from penstock.testing.conformance.lifetime import LifetimeConformance
from penstock.testing.conformance.log import LogConformance
from penstock.testing.conformance.manifests import ManifestsConformance
from penstock.testing.conformance.notifier import NotifierConformance
from penstock.testing.conformance.parked import ParkedRowsConformance
from penstock.testing.conformance.producers import ProducersConformance
from penstock.testing.conformance.retention import RetentionConformance
from penstock.testing.conformance.settling import SettlingConformance
from penstock.testing.conformance.telling import TellingConformance
from penstock.testing.conformance.threads import ThreadsConformance

__all__ = ["StoreConformance"]


class StoreConformance(
    LogConformance,
    ProducersConformance,
    RetentionConformance,
    CursorsConformance,
    SettlingConformance,
    ParkedRowsConformance,
    LeasesConformance,
    ScheduleConformance,
    OutboxConformance,
    ManifestsConformance,
    NotifierConformance,
    TellingConformance,
    ThreadsConformance,
    LifetimeConformance,
):
    """Everything that a store promises; derive a `Test…` class from it."""
