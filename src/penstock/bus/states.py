"""States: the SQLite file in which an application's projections are, each with its position beside it.

* **One transaction**: the states that some events change, and the position behind these events. Whatever kills the
  process, there are both or neither, so that no event counts twice or not at all.
* **The position decides, and nothing else.** Whoever writes reads it first, in the same transaction, and writes nothing
  if it is not where it began. So a process that was taken for dead, and is not, does no harm, and two do each other
  none.
* **Plain SQL.** A projection is a table `projection_<name>` with the columns `key` and `state`, a text of JSON::

      select key, state ->> '$.total' from projection_revenue order by 2 desc

* The file may be the application's own: nothing in it is touched but `penstock_projections` and these tables.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.errors import DataLost, UsageError

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Callable

    from penstock.bus.folding import Changed

PROJECTIONS_FILE: Final = "projections.db"
"""In the directory of a `file:` store, unless another file is given."""
BUSY_SECONDS: Final = 30.0
"""So long is waited for another process that writes."""
KEYS_PER_QUERY: Final = 500
PAGE_ROWS: Final = 1_000

_POSITIONS: Final = """
CREATE TABLE IF NOT EXISTS penstock_projections (
    name TEXT NOT NULL, version INTEGER NOT NULL, partition INTEGER NOT NULL, topic TEXT NOT NULL,
    log_id TEXT NOT NULL, next_offset INTEGER NOT NULL,
    PRIMARY KEY (name, version, partition)
) WITHOUT ROWID
"""


class Place(NamedTuple):
    """Which projection, of which log."""

    name: str
    version: int
    topic: str
    log_id: str

    @property
    def table(self) -> str:
        """The name of its table, quoted."""
        return table_of(self.name, self.version)


def suffix_of(version: int) -> str:
    """Return what is behind a projection's name where its version matters; nothing for the first."""
    return "" if version == 1 else f".v{version}"


def table_of(name: str, version: int) -> str:
    """Return the name of a projection's table, quoted."""
    return '"' + f"projection_{name}{suffix_of(version)}".replace('"', '""') + '"'


class Listed(NamedTuple):
    """A projection as a file has it."""

    name: str
    version: int
    topic: str
    positions: dict[int, int]
    """The next offset, by partition."""
    keys: int


class States:
    """A file of states, or a database in memory; every connection to it is made here."""

    def __init__(self, path: Path | None, *, own: bool = True) -> None:
        self.path = path
        """None if it is in memory."""
        self._own = own  # whether nobody else has tables in it, whose ways would be disturbed
        self._lock = threading.RLock()
        self._memory: sqlite3.Connection | None = None

    def __repr__(self) -> str:
        return f"<States in {self.path or 'memory'}>"

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """Forget what is in memory."""
        with self._lock:
            if self._memory is not None:
                self._memory.close()
                self._memory = None

    def connect(self) -> sqlite3.Connection:
        """Return a connection to write with, which the caller closes unless it is in memory."""
        import sqlite3  # not before: a bus without projections does without

        if self.path is None:
            if self._memory is None:
                self._memory = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
                self._memory.execute(_POSITIONS)
            return self._memory
        new = not self.path.exists()
        connection = sqlite3.connect(self.path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False)
        if self._own:
            if new:
                with suppress(OSError):
                    self.path.chmod(0o600)
            connection.execute("PRAGMA journal_mode = WAL")
        # Retention follows the subscription, which is told after this has been written: it must last.
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute(_POSITIONS)
        return connection

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection | None]:
        """Open it for a look; None if there is nothing yet."""
        if self.path is None:
            with self._lock:
                yield self._memory
        elif not self.path.exists():
            yield None
        else:
            import sqlite3

            uri = f"{self.path.absolute().as_uri()}?mode=ro"
            with closing(sqlite3.connect(uri, timeout=BUSY_SECONDS, isolation_level=None, uri=True)) as connection:
                yield connection

    # --- looking ------------------------------------------------------------------------------

    def get(self, name: str, version: int, key: str) -> bytes | None:
        """Return the state of a key, as JSON; None if it has none."""
        with self.reading() as connection:
            rows = _rows(connection, f"SELECT state FROM {table_of(name, version)} WHERE key = ?", (key,))  # noqa: S608 - quoted
        return rows[0][0].encode() if rows else None

    def items(self, name: str, version: int) -> Iterator[tuple[str, bytes]]:
        """Yield all keys with their states, by key; a page at a time, each as it is at its moment."""
        after = ""
        query = f"SELECT key, state FROM {table_of(name, version)} WHERE key > ? ORDER BY key LIMIT {PAGE_ROWS}"  # noqa: S608
        while True:
            with self.reading() as connection:
                rows = _rows(connection, query, (after,))
            for key, state in rows:
                yield key, state.encode()
            if len(rows) < PAGE_ROWS:
                return
            after = rows[-1][0]

    def listed(self) -> list[Listed]:
        """Return all projections that are here."""
        query = "SELECT name, version, topic, partition, next_offset FROM penstock_projections ORDER BY 1, 2, 4"
        found: dict[tuple[str, int], Listed] = {}
        with self.reading() as connection:
            for name, version, topic, partition, next_offset in _rows(connection, query):
                if (name, version) not in found:
                    ((keys,),) = _rows(connection, f"SELECT count(*) FROM {table_of(name, version)}") or [(0,)]  # noqa: S608
                    found[name, version] = Listed(name, version, topic, {}, keys)
                found[name, version].positions[partition] = next_offset
        return list(found.values())

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Keep whoever looks out, where all have the same connection."""
        if self.path is None:
            with self._lock:
                yield
        else:
            yield


def _rows(connection: sqlite3.Connection | None, query: str, parameters: Sequence[object] = ()) -> list[tuple]:  # type: ignore[type-arg]
    if connection is None:
        return []
    import sqlite3

    try:
        return connection.execute(query, parameters).fetchall()
    except sqlite3.OperationalError as error:
        if "no such table" in str(error):
            return []  # nothing was folded yet
        raise


class Writer:
    """Writes one projection; used by one thread at a time."""

    def __init__(self, states: States, place: Place) -> None:
        self._states = states
        self._place = place
        self._connection: sqlite3.Connection | None = None

    def close(self) -> None:
        """Close the connection, unless the states are in memory."""
        connection, self._connection = self._connection, None
        if connection is not None and self._states.path is not None:
            connection.close()

    def position(self, partition: int) -> int | None:
        """Return the offset that comes next; None if nothing was folded yet."""
        with self._states.alone():
            return self._position(self._opened(), partition)

    def write(
        self,
        partition: int,
        expected: int | None,
        following: int,
        keys: Iterable[str],
        fold: Callable[[Mapping[str, bytes]], Mapping[str, Changed]],
    ) -> int | None:
        """Fold some events and write what came of it, if the position is the expected one; return where it is then.

        `fold` is given the states of these keys that there are.
        """
        connection = self._opened()
        with self._states.alone():
            connection.execute("BEGIN IMMEDIATE")
            try:
                found = self._position(connection, partition)
                if found == expected:
                    self._apply(connection, fold(self._before(connection, keys)))
                    self._move(connection, partition, following)
                connection.execute("COMMIT")
            except BaseException:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise
        return following if found == expected else found

    def _opened(self) -> sqlite3.Connection:
        if self._connection is None:
            connection = self._states.connect()
            connection.execute(
                f"CREATE TABLE IF NOT EXISTS {self._place.table} (key TEXT PRIMARY KEY, state TEXT NOT NULL)"
                f" WITHOUT ROWID"
            )
            self._connection = connection
        return self._connection

    def _position(self, connection: sqlite3.Connection, partition: int) -> int | None:
        place = self._place
        rows = connection.execute(
            "SELECT log_id, next_offset, topic FROM penstock_projections"
            " WHERE name = ? AND version = ? AND partition = ?",
            (place.name, place.version, partition),
        ).fetchall()
        if not rows:
            return None
        log_id, next_offset, topic = rows[0]
        if topic != place.topic:
            raise UsageError(
                f"projection {place.name!r} was of topic {topic!r}, and is of {place.topic!r} now: raise its version, "
                f"as in version={place.version + 1}, to begin anew"
            )
        if log_id != place.log_id:
            raise DataLost(
                f"projection {place.name!r}: topic {topic!r} was deleted and created anew since: raise its version, as "
                f"in version={place.version + 1}, to begin with the new one"
            )
        return int(next_offset)

    def _before(self, connection: sqlite3.Connection, keys: Iterable[str]) -> dict[str, bytes]:
        wanted = list(dict.fromkeys(keys))
        found: dict[str, bytes] = {}
        for start in range(0, len(wanted), KEYS_PER_QUERY):
            some = wanted[start : start + KEYS_PER_QUERY]
            marks = ",".join("?" * len(some))
            query = f"SELECT key, state FROM {self._place.table} WHERE key IN ({marks})"  # noqa: S608 - quoted
            found.update((key, state.encode()) for key, state in connection.execute(query, some))
        return found

    def _apply(self, connection: sqlite3.Connection, changed: Mapping[str, Changed]) -> None:
        table = self._place.table
        kept = [(key, change.encoded.decode()) for key, change in changed.items() if change.encoded is not None]
        gone = [(key,) for key, change in changed.items() if change.encoded is None]
        connection.executemany(f"INSERT OR REPLACE INTO {table} (key, state) VALUES (?, ?)", kept)  # noqa: S608 - quoted
        connection.executemany(f"DELETE FROM {table} WHERE key = ?", gone)  # noqa: S608 - quoted

    def _move(self, connection: sqlite3.Connection, partition: int, following: int) -> None:
        place = self._place
        connection.execute(
            "INSERT OR REPLACE INTO penstock_projections (name, version, partition, topic, log_id, next_offset)"
            " VALUES (?, ?, ?, ?, ?, ?)",
            (place.name, place.version, partition, place.topic, place.log_id, following),
        )
