"""Penstock: a reliable event bus for Python.

Everything that an application needs is here; the rest of the package is for those who extend it. Names are
imported when they are first used, so that `import penstock` costs next to nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.batch import Batch as Batch
    from penstock.batch import StoredEvent as StoredEvent
    from penstock.bus.buffered import BufferedPublisher as BufferedPublisher
    from penstock.bus.bus import Bus as Bus
    from penstock.bus.consumer import Consumer as Consumer
    from penstock.bus.dead_letters import DeadLetters as DeadLetters
    from penstock.bus.delayed import ScheduledReceipt as ScheduledReceipt
    from penstock.bus.delivered import DeliveredBatch as DeliveredBatch
    from penstock.bus.delivered import Delivery as Delivery
    from penstock.bus.deliveries import Checkpoint as Checkpoint
    from penstock.bus.deliveries import Retry as Retry
    from penstock.bus.health import Health as Health
    from penstock.bus.health import SubscriptionHealth as SubscriptionHealth
    from penstock.bus.letters import DeadGroup as DeadGroup
    from penstock.bus.letters import DeadLetter as DeadLetter
    from penstock.bus.letters import DeadStats as DeadStats
    from penstock.bus.letters import Replayed as Replayed
    from penstock.bus.projections import Projection as Projection
    from penstock.bus.publisher import Prepared as Prepared
    from penstock.bus.publisher import Receipt as Receipt
    from penstock.bus.shipments import PendingReceipt as PendingReceipt
    from penstock.bus.sync import SyncBus as SyncBus
    from penstock.bus.sync import SyncConsumer as SyncConsumer
    from penstock.bus.sync import SyncDeliveredBatch as SyncDeliveredBatch
    from penstock.bus.sync import SyncDelivery as SyncDelivery
    from penstock.bus.sync import SyncPrepared as SyncPrepared
    from penstock.bus.topic import Topic as Topic
    from penstock.bus.verdicts import Reject as Reject
    from penstock.bus.verdicts import RetryLater as RetryLater
    from penstock.engine.lag import LagInfo as LagInfo
    from penstock.events import Event as Event
    from penstock.events import event as event
    from penstock.events import upcaster as upcaster
    from penstock.metrics import Metric as Metric
    from penstock.offsets import Gap as Gap
    from penstock.offsets import Position as Position
    from penstock.offsets import Range as Range
    from penstock.rows import Retention as Retention
    from penstock.settings import Settings as Settings
    from penstock.stores import open_store as open_store

_HOMES = {
    "Batch": "penstock.batch",
    "StoredEvent": "penstock.batch",
    "BufferedPublisher": "penstock.bus.buffered",
    "Bus": "penstock.bus.bus",
    "Consumer": "penstock.bus.consumer",
    "DeliveredBatch": "penstock.bus.delivered",
    "Delivery": "penstock.bus.delivered",
    "DeadLetters": "penstock.bus.dead_letters",
    "ScheduledReceipt": "penstock.bus.delayed",
    "Checkpoint": "penstock.bus.deliveries",
    "Retry": "penstock.bus.deliveries",
    "DeadGroup": "penstock.bus.letters",
    "DeadLetter": "penstock.bus.letters",
    "DeadStats": "penstock.bus.letters",
    "Replayed": "penstock.bus.letters",
    "Health": "penstock.bus.health",
    "SubscriptionHealth": "penstock.bus.health",
    "Projection": "penstock.bus.projections",
    "Prepared": "penstock.bus.publisher",
    "Receipt": "penstock.bus.publisher",
    "PendingReceipt": "penstock.bus.shipments",
    "SyncBus": "penstock.bus.sync",
    "SyncConsumer": "penstock.bus.sync",
    "SyncDeliveredBatch": "penstock.bus.sync",
    "SyncDelivery": "penstock.bus.sync",
    "SyncPrepared": "penstock.bus.sync",
    "Topic": "penstock.bus.topic",
    "Reject": "penstock.bus.verdicts",
    "RetryLater": "penstock.bus.verdicts",
    "LagInfo": "penstock.engine.lag",
    "Event": "penstock.events",
    "event": "penstock.events",
    "upcaster": "penstock.events",
    "Metric": "penstock.metrics",
    "Gap": "penstock.offsets",
    "Position": "penstock.offsets",
    "Range": "penstock.offsets",
    "Retention": "penstock.rows",
    "Settings": "penstock.settings",
    "open_store": "penstock.stores",
}

__all__ = [*_HOMES, "__version__"]  # noqa: PLE0604 - a list of names, computed


def __getattr__(name: str) -> object:
    from importlib import import_module

    if name == "__version__":
        from importlib.metadata import version

        value: object = version("penstock")
    elif name in _HOMES:
        value = getattr(import_module(_HOMES[name]), name)
    else:
        raise AttributeError(f"module 'penstock' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
