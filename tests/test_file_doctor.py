from __future__ import annotations

import errno
import fcntl
import os
import resource
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from penstock.clock import VirtualClock
from penstock.stores.file import doctor
from penstock.stores.file.doctor import (
    SYNC_COUNT,
    Finding,
    examine,
    examine_clock,
    examine_descriptors,
    examine_directory,
    examine_filesystem,
    examine_locks,
    examine_permissions,
    examine_sockets,
    examine_space,
    examine_sqlite,
    examine_sync,
    has_wal_reset_fix,
)
from penstock.stores.file.filesystem import FilesystemInfo
from penstock.stores.file.platform import Platform, SystemDisk
from penstock.stores.file.sockets import UnixDatagramSockets

if TYPE_CHECKING:
    from collections.abc import Iterator

FIXED_SQLITE = (3, 51, 3)


@pytest.fixture
def directory() -> Iterator[Path]:
    # Not `tmp_path`: the path of a socket must be short.
    with tempfile.TemporaryDirectory(prefix="doctor-", dir="/tmp") as made:
        yield Path(made)


def examined(directory: Path, platform: Platform | None = None) -> dict[str, Finding]:
    findings = examine(directory, platform or Platform(), runtime_directory=directory)
    assert all(finding.advice for finding in findings if not finding.ok)
    assert not any(finding.advice for finding in findings if finding.ok)
    return {finding.name: finding for finding in findings}


def test_everything_is_looked_at_and_nothing_is_left_behind(directory: Path) -> None:
    found = examined(directory)
    assert list(directory.iterdir()) == []
    for name in ("directory", "permissions", "sync", "locks", "sockets", "clock", "versions"):
        assert found[name].ok, found[name]
    assert {"file system", "free space", "open files", "sqlite"} <= found.keys()
    assert "pyarrow" in found["versions"].value


def test_a_missing_directory_is_a_finding_and_is_not_made(directory: Path) -> None:
    found = examined(directory / "missing")
    assert not found["directory"].ok
    assert "sync" not in found
    assert found["file system"].value
    assert list(directory.iterdir()) == []


def test_a_file_is_no_directory(directory: Path) -> None:
    (directory / "file").touch()
    assert "not a directory" in examine_directory(directory / "file").value


def test_what_is_too_open_is_counted_and_named(directory: Path) -> None:
    (directory / "topics").mkdir(0o700)
    (directory / "fine").touch(0o600)
    (directory / "link").symlink_to("fine")
    assert examine_permissions(directory).ok
    open_one = directory / "topics" / "open.seg"
    open_one.touch()
    open_one.chmod(0o640)
    found = examine_permissions(directory)
    assert not found.ok
    assert "1 too open" in found.value
    assert str(open_one) in found.value


def info(**changed: Any) -> FilesystemInfo:
    facts: dict[str, Any] = {
        "type": "ext4",
        "mount_point": Path("/"),
        "device": "/dev/sda1",
        "options": ("rw",),
        "free_bytes": 1 << 40,
        "total_bytes": 1 << 41,
        "persistent": True,
    }
    return FilesystemInfo(**facts | changed)


@pytest.mark.parametrize(("facts", "ok"), [({}, True), ({"type": "tmpfs", "persistent": False}, False)])
def test_a_file_system_in_memory_is_told(
    facts: dict[str, Any], ok: bool, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "describe", lambda _: info(**facts))
    assert examine_filesystem(directory).ok == ok


@pytest.mark.parametrize(("free_bytes", "ok"), [(1 << 30, True), ((1 << 30) - 1, False)])
def test_little_space_is_told(free_bytes: int, ok: bool, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "describe", lambda _: info(free_bytes=free_bytes))
    assert examine_space(directory).ok == ok


class SlowDisk(SystemDisk):
    """Takes its time by the virtual clock, or fails."""

    def __init__(self, clock: VirtualClock, seconds: float, fault: OSError | None = None) -> None:
        self.clock = clock
        self.seconds = seconds
        self.fault = fault
        self.syncs = 0

    def sync(self, descriptor: int) -> None:
        self.syncs += 1
        if self.fault is not None:
            raise self.fault
        self.clock.advance(self.seconds)


@pytest.mark.parametrize(("seconds", "ok"), [(0.002, True), (0.2, False)])
def test_syncs_are_measured_by_the_clock(directory: Path, seconds: float, ok: bool) -> None:
    clock = VirtualClock()
    disk = SlowDisk(clock, seconds)
    found = examine_sync(directory, Platform(clock=clock, disk=disk))
    assert disk.syncs == SYNC_COUNT
    assert found.ok == ok
    assert f"median {seconds * 1e3:.2f} ms" in found.value


def test_a_disk_that_fails_is_a_finding(directory: Path) -> None:
    clock = VirtualClock()
    disk = SlowDisk(clock, 0, OSError(errno.EIO, "planted"))
    found = examined(directory, Platform(clock=clock, disk=disk))["sync"]
    assert not found.ok
    assert "planted" in found.value
    assert list(directory.iterdir()) == []


def test_locks_that_do_not_hold_are_told(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert examine_locks(directory, Platform()).ok
    monkeypatch.setattr(fcntl, "lockf", lambda *_: None)  # as a file system that only pretends
    found = examine_locks(directory, Platform())
    assert not found.ok
    assert "saw: free free" in found.value


def test_another_process_that_hangs_is_not_waited_for(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*_: Any, **options: Any) -> None:
        raise subprocess.TimeoutExpired("python", options["timeout"])

    monkeypatch.setattr(subprocess, "run", run)
    assert "no answer" in examine_locks(directory, Platform()).value
    assert list(directory.iterdir()) == []


def test_sockets_need_a_directory_with_a_short_path(directory: Path) -> None:
    platform, sockets = Platform(), UnixDatagramSockets()
    assert examine_sockets(directory, platform, sockets).ok
    assert not examine_sockets(None, platform, sockets).ok
    long = directory / ("x" * 120)
    long.mkdir()
    assert "path too long" in examine_sockets(long, platform, sockets).value


@pytest.mark.parametrize(("seconds", "ok"), [(0, False), (1_704_067_199, False), (1_704_067_200, True)])
def test_a_clock_that_was_never_set_is_told(seconds: int, ok: bool) -> None:
    class Wall(VirtualClock):
        def time_us(self) -> int:
            return seconds * 1_000_000

    found = examine_clock(Platform(clock=Wall(), boot_id=b"\xab" * 16))
    assert found.ok == ok
    assert "ab" * 16 in found.value


def test_few_open_files_are_told() -> None:
    assert examine_descriptors(1_024).ok
    assert not examine_descriptors(256).ok
    assert examine_descriptors(resource.RLIM_INFINITY).ok


@pytest.mark.parametrize(
    ("library", "fixed"),
    [
        ((3, 40, 1), False),
        ((3, 44, 5), False),
        ((3, 44, 6), True),
        ((3, 45, 0), False),
        ((3, 50, 6), False),
        ((3, 50, 7), True),
        ((3, 51, 2), False),
        ((3, 51, 3), True),
        ((3, 53, 0), True),
    ],
)
def test_which_sqlite_has_the_wal_reset_bug_is_known(library: tuple[int, ...], fixed: bool) -> None:
    assert has_wal_reset_fix(library) == fixed
    finding = examine_sqlite(library, 3)
    assert finding.ok
    assert ("outbox" in finding.value) != fixed


def test_a_sqlite_for_one_thread_is_told() -> None:
    assert examine_sqlite(FIXED_SQLITE, 1).ok
    assert "one thread" in examine_sqlite(FIXED_SQLITE, 0).advice


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere: run as another user")
def test_a_directory_of_somebody_else_is_told(directory: Path) -> None:
    directory.chmod(0o500)
    try:
        assert "may not write" in examine_directory(directory).advice
    finally:
        directory.chmod(0o700)
