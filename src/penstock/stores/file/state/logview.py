"""What the small state asks of the log. Nothing here is called while the turn to write a database is held."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from penstock.offsets import Range
    from penstock.rows import Partition


class LogView(Protocol):
    """The log, as the ports of the small state see it."""

    def check_open(self) -> None:
        """Raise `StoreClosed` once the store is closed, and in a forked child."""

    def check_topic(self, log_id: str) -> None:
        """Raise `TopicDeleted` if there is no such log."""

    def check_partition(self, partition: Partition) -> None:
        """Raise `TopicDeleted` if there is no such log, `UsageError` if it has no such partition."""

    def bounds_synced(self, partition: Partition, up_to: int) -> Range:
        """Return the partition's bounds, its log being on the medium at least up to `up_to`, or up to its end.

        May block. An offset beyond the end is no error here: whoever asks compares.
        """
