"""How drivers and tasks reach a store: opened where it is used, on the host where it is, with a little patience.

A task runs in a process of its own, perhaps on another machine. It opens the store by URL, reads or stages, and closes
it. For a store in a directory that only works on the machine whose directory it is. So the driver sends along which
machine it runs on and which store it has found, and a task that finds itself elsewhere, or another store under the same
path, refuses before it touches anything: in the worst case it would make a new, empty store there, and read nothing.

What the driver itself does is tried a few times if the store does not answer, because an error that leaves a call of
Spark's ends the whole query.
"""

from __future__ import annotations

import logging
import random
import socket
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

from penstock.clock import SystemClock
from penstock.errors import PenstockError, StoreUnavailable, WriterStalled
from penstock.settings import Settings, redact_url
from penstock.stores import open_store, path_of
from penstock.versions import local_directory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from penstock.ports import Store

logger = logging.getLogger(__name__)

R = TypeVar("R")

ATTEMPTS: Final = 5
FIRST_PAUSE_SECONDS: Final = 0.1


class Connection(NamedTuple):
    """All that a task needs in order to open the driver's store."""

    url: str
    settings: Settings
    host: str
    boot_id: bytes
    store_id: str

    @contextmanager
    def open(self) -> Iterator[Store]:
        """Open the store, in a task; close it at the end."""
        self._check_machine()
        store = open_store(self.url, settings=self.settings)
        try:
            if _store_id(store) != self.store_id:
                raise StoreUnavailable(
                    f"{self._shown} is another store here ({socket.gethostname()}) than the driver has found "
                    f"({self.host}): mount the same directory in both places. {_INSTEAD}"
                )
            yield store
        finally:
            store.close()

    def _check_machine(self) -> None:
        if not self.url.startswith("file:"):
            return
        if _boot_id() != self.boot_id:
            raise StoreUnavailable(
                f"{self._shown} is a directory on {self.host}, where the driver runs, and this task runs on another "
                f"machine, {socket.gethostname()}. {_INSTEAD}"
            )
        if not _is_store(self.url):
            raise StoreUnavailable(
                f"{self._shown} is not there for this task, on {socket.gethostname()}, although the driver has found "
                f"it on {self.host}: mount the same directory in both places. {_INSTEAD}"
            )

    @property
    def _shown(self) -> str:
        return redact_url(self.url)


_INSTEAD: Final = (
    "A file: store serves the processes of one machine. Run the executors there (master local[*]), or use a store "
    "that is reached over the network, a database or the daemon"
)


def absolute(url: str) -> str:
    """Return the URL with the directory of a `file:` store made absolute, as tasks run in directories of their own."""
    try:
        return f"file:{path_of(url).absolute()}" if url.startswith("file:") else url
    except PenstockError:
        return url  # whoever opens it says what is wrong


def absolute_lake(where: str) -> str:
    """Return the directory of a lake made absolute, for the same reason."""
    try:
        return str(local_directory(where))
    except PenstockError:
        return where  # the same


@contextmanager
def connect(url: str, settings: Settings) -> Iterator[tuple[Store, Connection]]:
    """Open the store in the driver, and return with it how tasks open the same one."""
    if url.startswith("file:") and not _is_store(url):
        raise StoreUnavailable(
            f"{url} is no store: publish something to it first, or correct the URL (a query does not make one)"
        )
    store = patiently(lambda: open_store(url, settings=settings))
    try:
        if not store.capabilities.shared:
            raise StoreUnavailable(
                f"{redact_url(url)!r} lives in one process, and Spark's tasks are others: use a store that can be "
                f"shared, such as file:./data"
            )
        yield store, Connection(url, settings, socket.gethostname(), _boot_id(), _store_id(store))
    finally:
        store.close()


def _is_store(url: str) -> bool:
    from penstock.stores.file.store import MARKER_FILE

    return (path_of(url) / MARKER_FILE).exists()


def _store_id(store: Store) -> str:
    return getattr(store, "store_id", "")


def _boot_id() -> bytes:
    from penstock.stores.file.platform import read_boot_id

    return read_boot_id()


def patiently(call: Callable[[], R], clock: SystemClock | None = None) -> R:
    """Return what `call` returns; try again, a few times and with growing pauses, if the store does not answer."""
    clock = clock or SystemClock()
    for attempt in range(1, ATTEMPTS):
        try:
            return call()
        except (WriterStalled, OSError) as error:
            logger.warning("attempt %d of %d failed, and is repeated: %s", attempt, ATTEMPTS, error)
            clock.sleep(FIRST_PAUSE_SECONDS * 2**attempt * (1 - random.random() / 2))  # noqa: S311 - no secret
    return call()
