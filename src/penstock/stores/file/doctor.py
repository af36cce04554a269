"""Whether a directory and its machine are fit for a store: what `penstock doctor` shows.

`examine` returns findings and changes nothing. It writes to files of its own only, inside of the directory because
only there the answers count, and removes them; a store in use is not disturbed, and none of its files is opened, since
closing one again would drop this process's locks on it.
"""

from __future__ import annotations

import os
import platform as python_platform
import resource
import shlex
import sqlite3
import stat
import statistics
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from itertools import islice
from typing import TYPE_CHECKING

from penstock.errors import StoreUnavailable
from penstock.stores.file.filesystem import FREE_BYTES_MIN, check_filesystem, describe, space_is_short
from penstock.stores.file.platform import DIRECTORY_MODE, FILE_MODE, SystemRecordLocks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from penstock.stores.file.platform import Platform
    from penstock.stores.file.sockets import DatagramSockets

SYNC_COUNT = 20
SYNC_SECONDS_MAX = 0.05
"""A publish waits for at least one sync."""
FILES_MAX = 10_000
"""How many files are looked at for their permissions."""
DESCRIPTORS_MIN = 1_024
CHILD_SECONDS_MAX = 30.0
WALL_CLOCK_MIN = datetime(2024, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at; `advice` says what to do if it is not `ok`, and else is empty."""

    name: str
    value: str
    ok: bool
    advice: str = ""


def examine(
    path: Path, platform: Platform, *, runtime_directory: Path | None = None, sockets: DatagramSockets | None = None
) -> list[Finding]:
    """Look at everything; what cannot be looked at is a finding, not an error."""
    directory = examine_directory(path)
    findings = [directory]
    if directory.ok:
        findings += [
            _guarded("permissions", lambda: examine_permissions(path)),
            _guarded("sync", lambda: examine_sync(path, platform)),
            _guarded("locks", lambda: examine_locks(path, platform)),
        ]
    return [
        *findings,
        _guarded("file system", lambda: examine_filesystem(path)),
        _guarded("free space", lambda: examine_space(path)),
        _guarded("sockets", lambda: examine_sockets(runtime_directory, platform, sockets or platform.sockets)),
        examine_clock(platform),
        examine_descriptors(resource.getrlimit(resource.RLIMIT_NOFILE)[0]),
        examine_sqlite(sqlite3.sqlite_version_info, sqlite3.threadsafety),
        examine_versions(),
    ]


def _guarded(name: str, look: Callable[[], Finding]) -> Finding:
    try:
        return look()
    except OSError as error:
        return Finding(name, str(error), ok=False, advice="this could not be looked at: see the error")


def _judged(name: str, value: str, *, ok: bool, advice: str) -> Finding:
    return Finding(name, value, ok=ok, advice="" if ok else advice)


# --- the directory ----------------------------------------------------------------------------


def examine_directory(path: Path) -> Finding:
    """Whether it is there and can be written to."""
    if not os.path.lexists(path):
        return Finding("directory", f"{path} does not exist", ok=False, advice="open a store there, or check the path")
    if not path.is_dir():
        return Finding("directory", f"{path} is not a directory", ok=False, advice="choose another path")
    return _judged(
        "directory",
        os.fspath(path),
        ok=os.access(path, os.R_OK | os.W_OK | os.X_OK),
        advice="this user may not write there: run as its owner, or choose another directory",
    )


def examine_permissions(path: Path) -> Finding:
    """Whether directories are 0700 and files 0600, or stricter."""
    looked, first_open, open_count = 0, "", 0
    for name in islice(_names(path), FILES_MAX):
        try:
            mode = os.lstat(name).st_mode
        except FileNotFoundError:  # a store in use removes files
            continue
        looked += 1
        allowed = DIRECTORY_MODE if stat.S_ISDIR(mode) else FILE_MODE
        if not stat.S_ISLNK(mode) and stat.S_IMODE(mode) & ~allowed:
            first_open, open_count = first_open or name, open_count + 1
    return _judged(
        "permissions",
        f"{looked} looked at, {open_count} too open" + (f", the first: {first_open}" if open_count else ""),
        ok=open_count == 0,
        advice=f"others may read the events: chmod -R u=rwX,go= {shlex.quote(os.fspath(path))}",
    )


def _names(path: Path) -> Iterator[str]:
    # Links are not followed, and directories that vanish or may not be read are left out.
    for directory, _, files in os.walk(path):
        yield directory
        for file in files:
            yield os.path.join(directory, file)  # noqa: PTH118 - there may be many


def examine_filesystem(path: Path) -> Finding:
    """Whether a store may live there, and survives a reboot."""
    found = describe(path)
    value = f"{found.type or 'unknown'} at {found.mount_point} ({','.join(found.options)})"
    try:
        check_filesystem(path)
    except StoreUnavailable as error:
        return Finding("file system", value, ok=False, advice=str(error))
    return _judged(
        "file system",
        value,
        ok=found.persistent,
        advice="it is in memory, and everything in it is lost at a reboot: use a directory on a disk",
    )


def examine_space(path: Path) -> Finding:
    """Whether there is room for some segments."""
    found = describe(path)
    gib = 1 << 30
    return _judged(
        "free space",
        f"{found.free_bytes / gib:.1f} of {found.total_bytes / gib:.1f} GiB",
        ok=not space_is_short(found.free_bytes, found.total_bytes),
        advice=f"less than {FREE_BYTES_MIN / gib:.0f} GiB is free, or a tenth: make room, or set a retention",
    )


@contextmanager
def _own_file(path: Path, platform: Platform) -> Iterator[tuple[Path, int]]:
    file = path / f".doctor-{platform.random(8).hex()}"
    descriptor = platform.disk.open(file, create=True, exclusive=True)
    try:
        yield file, descriptor
    finally:
        platform.disk.close(descriptor)
        platform.disk.remove(file)


def examine_sync(path: Path, platform: Platform) -> Finding:
    """How long a small write and its sync take."""
    disk, clock = platform.disk, platform.clock
    seconds = []
    with _own_file(path, platform) as (_, descriptor):
        for number in range(SYNC_COUNT):
            begin = clock.monotonic()
            disk.write(descriptor, bytes(512), 512 * number)
            disk.sync(descriptor)
            seconds.append(clock.monotonic() - begin)
    median = statistics.median(seconds)
    return _judged(
        "sync",
        f"median {median * 1e3:.2f} ms, longest {max(seconds) * 1e3:.2f} ms of {SYNC_COUNT}",
        ok=median <= SYNC_SECONDS_MAX,
        advice=f"a publish waits for a sync, which takes over {SYNC_SECONDS_MAX * 1e3:.0f} ms: use a quicker disk",
    )


# --- the machine ------------------------------------------------------------------------------

_TRY_LOCKS = """
import errno, fcntl, sys
answers = []
with open(sys.argv[1], "r+b") as file:
    for byte in (0, 1):
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, byte)
            answers.append("free")
        except OSError as error:
            answers.append("locked" if error.errno in (errno.EAGAIN, errno.EACCES) else str(error))
print(*answers)
"""


def examine_locks(path: Path, platform: Platform) -> Finding:
    """Whether another process sees which byte is locked here, and its own locks end with it."""
    advice = "locks do not hold between processes here, and two writers would damage the store: use another file system"
    with _own_file(path, platform) as (file, descriptor):
        locks = SystemRecordLocks(descriptor)
        locks.try_lock(0)
        try:
            child = subprocess.run(  # noqa: S603 - this Python, and a script that is written above
                [sys.executable, "-I", "-c", _TRY_LOCKS, os.fspath(file)],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=CHILD_SECONDS_MAX,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return Finding("locks", f"no answer within {CHILD_SECONDS_MAX:.0f} s", ok=False, advice=advice)
        seen = child.stdout.strip() or "nothing, as the other process failed"
        ended = locks.try_lock(1)
    return _judged(
        "locks",
        f"of a locked and a free byte another process saw: {seen}" + ("" if ended else "; its lock outlived it"),
        ok=seen == "locked free" and ended,
        advice=advice,
    )


def examine_sockets(directory: Path | None, platform: Platform, sockets: DatagramSockets) -> Finding:
    """Whether a datagram arrives in the runtime directory."""
    advice = (
        "other processes see new events only at their heartbeats: set XDG_RUNTIME_DIR to a directory with mode 0700"
    )
    if directory is None:
        return Finding("sockets", "no runtime directory", ok=False, advice=advice)
    path = directory / f"doctor-{platform.random(4).hex()}.sock"
    arrived = None
    try:
        receiver = sockets.receiver(path)
        try:
            sender = sockets.sender()
            try:
                sender.send(b"penstock", path)
                arrived = receiver.receive()
            finally:
                sender.close()
        finally:
            receiver.close()
            platform.disk.remove(path)
    except OSError as error:
        return Finding("sockets", f"{directory}: {error}", ok=False, advice=advice)
    return _judged("sockets", os.fspath(directory), ok=arrived == b"penstock", advice=advice)


def examine_clock(platform: Platform) -> Finding:
    """Whether the wall clock was ever set; and which boot this is."""
    wall = datetime.fromtimestamp(platform.clock.time_us() / 1e6, UTC)
    return _judged(
        "clock",
        f"{wall.isoformat(timespec='milliseconds')}, boot {platform.boot_id.hex()}",
        ok=wall >= WALL_CLOCK_MIN,
        advice="the clock is years behind, so that times of events and retention by age are wrong: set it",
    )


def examine_descriptors(limit: int) -> Finding:
    """Whether enough files may be open: a few for each partition that is used."""
    unlimited = limit == resource.RLIM_INFINITY
    return _judged(
        "open files",
        "unlimited" if unlimited else f"at most {limit}",
        ok=unlimited or limit >= DESCRIPTORS_MIN,
        advice=f"raise the limit to {DESCRIPTORS_MIN} or more: ulimit -n {DESCRIPTORS_MIN}",
    )


def has_wal_reset_fix(library: tuple[int, ...]) -> bool:
    """Say whether SQLite has the correction of 2026 of a race between a checkpoint and a write, in WAL mode.

    It is in 3.51.3 and later, and in the corrections 3.50.7 and 3.44.6 of older ones. A distribution may have put it
    into another version, which its number does not tell. See https://sqlite.org/wal.html#walresetbug.
    """
    return library >= (3, 51, 3) or (3, 50, 7) <= library < (3, 51) or (3, 44, 6) <= library < (3, 45)


def examine_sqlite(library: tuple[int, ...], threadsafety: int) -> Finding:
    """Whether the SQLite library is one to rely on."""
    value = f"{'.'.join(map(str, library))}, thread safety {threadsafety}"
    if threadsafety == 0:
        return Finding("sqlite", value, ok=False, advice="it was built for one thread: use another build of SQLite")
    if has_wal_reset_fix(library):
        return Finding("sqlite", value, ok=True)
    # It damages databases, rarely, when a checkpoint and a write coincide. Those of the store's databases take turns.
    return Finding("sqlite", f"{value}; for an outbox in your own database 3.51.3 or later is safer", ok=True)


def examine_versions() -> Finding:
    """Which versions are installed."""
    installed = [f"{name} {version(name)}" for name in ("penstock", "pyarrow")]
    return Finding("versions", ", ".join([f"python {python_platform.python_version()}", *installed]), ok=True)
