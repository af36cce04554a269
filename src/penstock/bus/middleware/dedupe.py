"""Dedupe: events that were handled before are not handled again, as far as that can be known without a transaction.

For handlers whose effects are not in a database: a mail that is sent, another service that is called. What it gives:

* An event is marked **after** its handler has succeeded. One that comes again after that is acknowledged without
  calling the handler. One whose handler failed, or refused it by hand, is not marked; nor is, with `ack="manual"`, one
  that is not acked yet when its handler returns.
* While an attempt is under way in this process, a second one at the same event waits for its end.
* So these still give a duplicate: a process that dies after the effect and before the mark is written, a few
  milliseconds; and two processes that have the same event at the same moment. Whoever must exclude that writes through
  `delivery.once`.
* Without a `path` marks are in memory alone, and gone with the process. With one they are in a SQLite file, which the
  processes of a machine may share; each sees the marks of the others within milliseconds. They survive the death of
  a process. A power cut may lose the last ones.
* If the file takes no marks any more (a full disk), they are kept in memory, a warning is logged, and it is tried
  again.

The event loop looks at a set of hashes, 128 bits of each mark, and at nothing else; a thread does the rest. At most
`most` marks are remembered, none for longer than a little over `keep`, and the oldest are forgotten first.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sqlite3
import threading
import time
import weakref
from collections import deque
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from penstock.clock import Clock, SystemClock, seconds
from penstock.errors import StoreUnavailable, UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    from penstock.bus.delivered import Delivery
    from penstock.bus.middleware import Proceed

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.005
"""How often the file is looked at for what others have marked, and given what was marked here."""

BUSY_SECONDS = 5.0
"""How long a write waits for that of another process."""

ROWS_MAX = 500
"""So many rows are read or removed at a time, each with a group of marks or less."""

FAILED_SECONDS = 1.0
"""How long it waits after the file could not be used."""

SWEEP_SECONDS = 60.0
"""How often old rows are removed from the file."""

MARK_BYTES = 16

GROUP_MARKS_MAX = 1_024
"""Marks are forgotten by groups of so many …"""
GROUPS_OF_KEEP = 64
"""… that are not filled for longer than this part of the time that marks are kept."""

_SCHEMA = (
    "CREATE TABLE IF NOT EXISTS penstock_dedupe"
    " (number INTEGER PRIMARY KEY AUTOINCREMENT, mark BLOB NOT NULL, marked_at INTEGER NOT NULL)"
)


class Dedupe:
    """Middleware that lets an event pass once; see above for what that means.

    * `path`: a SQLite file of its own, made if it is missing; None remembers in memory alone.
    * `keep`: for how long, in seconds or as a `timedelta`; `most`: how many events, about 105 bytes of memory each.

    Making one does no I/O. It is for one event loop. `close()` it, or use it as a context manager, at the end.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        keep: float | timedelta = timedelta(days=7),
        most: int = 1_000_000,
        clock: Clock | None = None,
    ) -> None:
        keep_us = round(seconds(keep, "how long marks are kept") * 1_000_000)
        if keep_us < 1:
            raise UsageError("marks that are not kept recognise nothing: `keep` is more than 0")
        if type(most) is not int or most < 1:
            raise UsageError(f"`most` is a number of marks, at least 1, and not {most!r}")
        self.duplicates = 0
        """How many events were not handled again."""
        self._clock = clock or SystemClock()
        self._memory = _Memory(keep_us, most)
        self._marks = self._memory.marks
        self._running: dict[bytes, asyncio.Event | None] = {}
        self._file = None if path is None else _File(Path(path), self._memory, self._clock)
        self._fresh = None if self._file is None else self._memory.fresh
        self._opened = self._file is None
        """Whether it may be used: it is open, and not closed."""
        self._closed = False
        if self._file is not None:
            # What was marked is written, whether or not somebody thinks of closing.
            self._close_file = weakref.finalize(self, self._file.close)

    def __repr__(self) -> str:
        where = "memory" if self._file is None else str(self._file.path)
        return f"<Dedupe in {where}, {len(self._marks):,} marks>"

    async def __call__(self, delivery: Delivery[Any], proceed: Proceed, /) -> None:
        """See `Middleware`."""
        if not self._opened:
            await self._open()
        mark = delivery._digest  # noqa: SLF001 - what identifies it, of the same package
        running, marks = self._running, self._marks
        while mark in running:
            await self._ended(mark)
        if mark in marks and self._memory.knows(mark, self._clock.time_us()):
            self.duplicates += 1
            if logger.isEnabledFor(logging.DEBUG):
                logger.debug("%s at %s was handled before", delivery.subscription, delivery.position)
            if delivery._by_hand:  # noqa: SLF001 - the same
                await delivery.ack()  # as its handler would
            return
        running[mark] = None
        try:
            await proceed()
            if not delivery._succeeded:  # noqa: SLF001 - the same
                return  # it was refused by hand, or nothing is said yet
            marks.add(mark)
            fresh = self._fresh
            if fresh is not None:
                fresh.append(mark)
                if len(fresh) > self._memory.most:  # the thread waits for the file
                    self._memory.trim()
            else:
                self._memory.note((mark,), self._clock.time_us())
        finally:
            ended = running.pop(mark)
            if ended is not None:
                ended.set()

    async def _ended(self, mark: bytes) -> None:
        ended = self._running[mark]
        if ended is None:
            ended = self._running[mark] = asyncio.Event()
        await ended.wait()

    # --- the file -----------------------------------------------------------------------------

    async def _open(self) -> None:
        if not self._closed:
            assert self._file is not None
            await asyncio.to_thread(self._file.open)
            self._opened = not self._closed
        if self._closed:
            raise UsageError(f"{self!r} is closed: make another one")

    async def flush(self) -> None:
        """Return when what was marked before is in the file, and what others had marked before is known here."""
        if not self._opened:
            await self._open()
        if self._file is not None:
            await asyncio.to_thread(self._file.turned)

    def close(self) -> None:
        """Write what was marked, and close the file; may be repeated."""
        self._closed, self._opened = True, False
        if self._file is not None:
            self._close_file()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Memory:
    """The marks that are known, and when to forget them. Safe to use from any thread."""

    def __init__(self, keep_us: int, most: int) -> None:
        self.keep_us = keep_us
        self.most = most
        self.marks: set[bytes] = set()
        self.fresh: deque[bytes] = deque()
        """What was marked by the event loop, and not taken by the thread of a file yet; the oldest first."""
        self._groups: deque[tuple[int, list[bytes]]] = deque()
        """When the first mark of a group was made, and all of them; the oldest first."""
        self._grain_us = keep_us // GROUPS_OF_KEEP
        self.group_max = min(GROUP_MARKS_MAX, most // 16 + 1)
        self._lock = threading.Lock()

    def trim(self) -> None:
        """Forget the oldest of the fresh marks if they alone are too many."""
        with self._lock:
            while len(self.fresh) > self.most:
                self.marks.discard(self.fresh.popleft())

    def take(self, at_us: int) -> list[bytes]:
        """Return the fresh marks, and count their age from now on."""
        with self._lock:
            marks = [self.fresh.popleft() for _ in range(len(self.fresh))]
        self.note(marks, at_us)
        return marks

    def note(self, marks: Sequence[bytes], at_us: int) -> None:
        """Count the age of these marks from now on, and forget what is too old, or too much."""
        with self._lock:
            groups, most = self._groups, self.group_max
            began, newest = groups[-1] if groups else (0, [])
            if newest and len(newest) + len(marks) <= most and at_us - began <= self._grain_us:
                newest.extend(marks)
            else:
                groups.extend((at_us, list(marks[begin : begin + most])) for begin in range(0, len(marks), most))
            self._forget(at_us)

    def knows(self, mark: bytes, now_us: int) -> bool:
        """Say whether a mark is known, and not too old by now."""
        with self._lock:
            self._forget(now_us)
            return mark in self.marks

    def _forget(self, now_us: int) -> None:
        groups, oldest_us = self._groups, now_us - self.keep_us - self._grain_us
        while groups and (groups[0][0] < oldest_us or len(self.marks) > self.most):
            self.marks.difference_update(groups.popleft()[1])


class _File:
    """The marks in a file. Everything here is done by its thread, or while that does not run."""

    def __init__(self, path: Path, memory: _Memory, clock: Clock) -> None:
        self.path = path
        self._memory = memory
        self._clock = clock
        self._connection: sqlite3.Connection | None = None
        self._thread: threading.Thread | None = None
        self._unwritten: deque[tuple[list[bytes], int]] = deque()
        """What is to be written: the marks of one turn, and its time."""
        self._read_to = 0
        """The highest number of a row that is known."""
        self._version = -1
        self._swept_at = -SWEEP_SECONDS
        self._failing = False
        self._lifetime = threading.RLock()
        self._changed = threading.Condition()
        self._asked = 0
        self._answered = 0
        self._stopping = False

    def open(self) -> None:
        """Open the file, learn what is in it, and start the thread; once, whoever asks and however often.

        Whoever has asked first may have been cancelled, and this goes on nevertheless.
        """
        with self._lifetime:
            if self._thread is not None or self._stopping:
                return
            try:
                # With the right permissions from the beginning; those of the files beside it follow.
                os.close(os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600))
                self._connection = self._connect()
                self._read_to = self._too_many()
                self._look()
            except (OSError, sqlite3.Error) as error:
                self._disconnect()
                raise StoreUnavailable(
                    f"{self.path} cannot be opened to remember marks ({error}): name a file of its own, in a directory "
                    f"that exists and may be written to"
                ) from error
            self._thread = threading.Thread(target=self._run, name="penstock-dedupe", daemon=True)
            self._thread.start()

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self.path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False)
        try:
            _switch_to_wal(connection)
            connection.execute("PRAGMA synchronous = NORMAL")
            connection.execute(_SCHEMA)
        except BaseException:
            connection.close()
            raise
        return connection

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def close(self) -> None:
        """Let the thread write what there is, and end."""
        with self._lifetime:
            with self._changed:
                self._stopping = True
                self._changed.notify_all()
            # The last reference may vanish in any thread, this one's own included.
            if self._thread is not None and self._thread is not threading.current_thread():
                self._thread.join()

    def turned(self) -> None:
        """Return when a whole turn of the thread was made that began after this call."""
        with self._changed:
            self._asked += 1
            wanted = self._asked
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._answered >= wanted or self._stopping)

    def _run(self) -> None:
        stopping = False
        while not stopping:
            with self._changed:
                pause = FAILED_SECONDS if self._failing else POLL_SECONDS
                self._changed.wait_for(lambda: self._stopping or self._asked > self._answered, pause)
                stopping, asked = self._stopping, self._asked
            try:
                self._turn()
                self._failing = False
            except Exception as error:  # noqa: BLE001 - whatever it is, marks are still known here
                self._warn(error)
            with self._changed:
                self._answered = asked
                self._changed.notify_all()
        self._disconnect()

    def _warn(self, error: Exception) -> None:
        if not self._failing:  # once, and not every second
            self._failing = True
            logger.warning(
                "%s takes no marks (%s): they are kept in memory, and it is tried again; a restart would forget %d",
                self.path,
                error,
                sum(len(marks) for marks, _ in self._unwritten),
            )

    # --- a turn of the thread -----------------------------------------------------------------

    def _turn(self) -> None:
        assert self._connection is not None
        now_us = self._clock.time_us()
        while marks := self._memory.take(now_us):
            together = self._memory.group_max
            for begin in range(0, len(marks), together):
                self._unwritten.append((marks[begin : begin + together], now_us))
            while len(self._unwritten) > 1 and sum(len(row) for row, _ in self._unwritten) > self._memory.most:
                self._unwritten.popleft()
        [version] = self._connection.execute("PRAGMA data_version").fetchone()
        if version != self._version:
            self._look()
            self._version = version
        if self._unwritten:
            self._write()
        if self._clock.monotonic() - self._swept_at >= SWEEP_SECONDS:
            self._sweep(now_us)

    def _look(self) -> None:
        """Learn what others have marked since the last time."""
        assert self._connection is not None
        memory, rows = self._memory, [(0, b"", 0)] * ROWS_MAX
        oldest_us = self._clock.time_us() - memory.keep_us
        while len(rows) == ROWS_MAX:
            rows = self._connection.execute(
                "SELECT number, mark, marked_at FROM penstock_dedupe WHERE number > ? ORDER BY number LIMIT ?",
                (self._read_to, ROWS_MAX),
            ).fetchall()
            for _, row, marked_at in rows:
                marks = (row[begin : begin + MARK_BYTES] for begin in range(0, len(row), MARK_BYTES))
                new = [mark for mark in marks if mark not in memory.marks]
                if marked_at >= oldest_us:
                    memory.marks.update(new)
                    memory.note(new, marked_at)
            self._read_to = rows[-1][0] if rows else self._read_to

    def _too_many(self) -> int:
        """Return the number of the newest row whose marks are too many with those of all newer ones; 0 if none is."""
        assert self._connection is not None
        found = self._connection.execute(
            "SELECT number FROM (SELECT number, SUM(LENGTH(mark)) OVER (ORDER BY number DESC) AS bytes"
            " FROM penstock_dedupe) WHERE bytes > ? ORDER BY number DESC LIMIT 1",
            (self._memory.most * MARK_BYTES,),
        ).fetchone()
        return 0 if found is None else int(found[0])

    def _write(self) -> None:
        assert self._connection is not None
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            self._look()  # what others wrote meanwhile has lower numbers, and would be passed over
            self._connection.executemany(
                "INSERT INTO penstock_dedupe (mark, marked_at) VALUES (?, ?)",
                [(b"".join(marks), marked_at) for marks, marked_at in self._unwritten],
            )
            [last] = self._connection.execute("SELECT MAX(number) FROM penstock_dedupe").fetchone()
            self._connection.execute("COMMIT")
        except BaseException:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            raise
        self._read_to = last
        self._unwritten.clear()

    def _sweep(self, now_us: int) -> None:
        """Remove rows that are too old, or too many; few at a time, so that nobody waits for long."""
        assert self._connection is not None
        [first, last] = self._connection.execute("SELECT MIN(number), MAX(number) FROM penstock_dedupe").fetchone()
        if first is None:
            self._swept_at = self._clock.monotonic()
            return
        young = self._connection.execute(
            "SELECT number FROM penstock_dedupe WHERE marked_at >= ? ORDER BY number LIMIT 1",
            (now_us - self._memory.keep_us,),
        ).fetchone()
        kept = last + 1 if young is None else young[0]
        below = max(kept, self._too_many() + 1)
        self._connection.execute("DELETE FROM penstock_dedupe WHERE number < ?", (min(below, first + ROWS_MAX),))
        if below <= first + ROWS_MAX:
            self._swept_at = self._clock.monotonic()


def _switch_to_wal(connection: sqlite3.Connection) -> None:
    """Let the file have a log beside it; SQLite itself does not wait for another one that does the same."""
    end = time.monotonic() + BUSY_SECONDS
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() > end:
                raise
            time.sleep(POLL_SECONDS)
        else:
            return
