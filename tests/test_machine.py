"""The virtual machine: what it promises of a disk that loses its power, and that production code runs on it."""

from __future__ import annotations

import random
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from penstock.testing.machine import ROOT, SURVIVALS, Machine, Survival, VirtualDisk

KEPT, DROPPED = SURVIVALS[:2]
PATH = Path("/file")


def after(disk: VirtualDisk, survival: Survival, seed: int = 0) -> VirtualDisk:
    return disk.after_power_loss(survival, random.Random(seed))


def written(disk: VirtualDisk, data: bytes, *, path: Path = PATH, position: int = 0) -> int:
    descriptor = disk.open(path, create=True)
    assert disk.write(descriptor, data, position) == len(data)
    return descriptor


def content(disk: VirtualDisk, path: Path = PATH) -> bytes | None:
    return bytes(disk.file(path).content) if disk.exists(path) else None


# --- what survives ------------------------------------------------------------------------------


def test_a_sync_makes_bytes_durable_and_not_the_name() -> None:
    disk = VirtualDisk()
    descriptor = written(disk, b"data")
    disk.sync(descriptor)
    assert content(after(disk, DROPPED)) is None
    assert content(after(disk, Survival("dropped", "kept"))) == b"data"
    disk.sync_directory(Path("/"))
    assert content(after(disk, DROPPED)) == b"data"


def test_a_sync_of_the_directory_makes_the_name_durable_and_not_the_bytes() -> None:
    disk = VirtualDisk()
    written(disk, b"data")
    disk.sync_directory(Path("/"))
    assert content(after(disk, DROPPED)) == b""
    assert content(after(disk, KEPT)) == b"data"


@pytest.mark.parametrize("how", ["rename", "remove"])
def test_a_name_that_was_changed_may_come_back_until_its_directory_is_synced(how: str) -> None:
    disk = VirtualDisk()
    disk.sync(written(disk, b"data"))
    disk.sync_directory(Path("/"))
    if how == "rename":
        disk.rename(PATH, Path("/other"))
    else:
        disk.remove(PATH)
    assert content(disk) is None
    assert content(after(disk, DROPPED)) == b"data"
    disk.sync_directory(Path("/"))
    assert content(after(disk, DROPPED)) is None
    assert content(after(disk, DROPPED), Path("/other")) == (b"data" if how == "rename" else None)


def test_a_directory_that_was_made_is_lost_with_all_that_is_in_it_until_its_own_is_synced() -> None:
    disk = VirtualDisk()
    disk.make_directory(Path("/a"))
    disk.sync(written(disk, b"data", path=Path("/a/file")))
    disk.sync_directory(Path("/a"))
    assert not after(disk, DROPPED).exists(Path("/a/file"))
    disk.sync_directory(Path("/"))
    assert content(after(disk, DROPPED), Path("/a/file")) == b"data"


@pytest.mark.parametrize("unit", [512, 4096])
def test_a_torn_write_ends_at_a_unit_of_the_medium_and_every_end_occurs(unit: int) -> None:
    disk = VirtualDisk()
    descriptor = written(disk, b"a" * 100)
    disk.sync(descriptor)
    disk.sync_directory(Path("/"))
    disk.write(descriptor, b"b" * (3 * unit), 100)
    lengths = {len(content(after(disk, Survival("torn", "kept", unit), seed)) or b"") for seed in range(200)}
    assert lengths == {100, unit, 2 * unit, 3 * unit, 3 * unit + 100}


def test_shuffled_writes_survive_in_every_combination() -> None:
    disk = VirtualDisk()
    descriptor = written(disk, bytes(2048))
    disk.sync(descriptor)
    disk.sync_directory(Path("/"))
    disk.write(descriptor, b"b" * 1024, 512)
    found = {bytes(after(disk, Survival("shuffled", "kept"), seed).file(PATH).content) for seed in range(100)}
    parts = {(data[512:1024], data[1024:1536]) for data in found}
    assert parts == {(a, b) for a in (bytes(512), b"b" * 512) for b in (bytes(512), b"b" * 512)}
    assert all(data[:512] == data[1536:] == bytes(512) for data in found)


def test_a_length_may_survive_without_the_bytes_and_the_other_way_round() -> None:
    disk = VirtualDisk()
    descriptor = written(disk, b"")
    disk.sync(descriptor)
    disk.sync_directory(Path("/"))
    disk.allocate(descriptor, 0, 1024)
    disk.write(descriptor, b"b" * 512, 0)
    found = {content(after(disk, Survival("shuffled", "kept"), seed)) for seed in range(100)}
    assert found == {b"", bytes(1024), b"b" * 512, b"b" * 512 + bytes(512)}


def test_a_killed_process_loses_nothing_but_a_later_power_loss_does() -> None:
    disk = VirtualDisk()
    written(disk, b"data")
    killed = disk.after_kill()
    assert content(killed) == b"data"
    assert content(after(killed, DROPPED)) is None
    killed.sync(killed.open(PATH))
    killed.sync_directory(Path("/"))
    assert content(after(killed, DROPPED)) == b"data"
    assert content(after(disk, DROPPED)) is None


# --- files as the system has them -----------------------------------------------------------------


def test_a_file_that_was_removed_is_still_there_for_whoever_has_it_open() -> None:
    disk = VirtualDisk()
    descriptor = written(disk, b"data")
    disk.remove(PATH)
    assert disk.read(descriptor, 10, 0) == b"data"
    assert disk.names(Path("/")) == []
    disk.close(descriptor)
    with pytest.raises(OSError, match="Bad file descriptor"):
        disk.read(descriptor, 1, 0)


def test_errors_are_those_of_the_system() -> None:
    disk = VirtualDisk()
    written(disk, b"data")
    disk.make_directory(Path("/a"))
    written(disk, b"data", path=Path("/a/file"))
    with pytest.raises(FileExistsError):
        disk.open(PATH, create=True, exclusive=True)
    with pytest.raises(FileNotFoundError):
        disk.open(Path("/other"))
    with pytest.raises(FileNotFoundError):
        disk.open(Path("/b/file"), create=True)
    with pytest.raises(NotADirectoryError):
        disk.open(PATH / "file", create=True)
    with pytest.raises(IsADirectoryError):
        disk.open(Path("/a"))
    with pytest.raises(OSError, match="not empty"):
        disk.remove_directory(Path("/a"))
    with pytest.raises(FileNotFoundError):
        disk.rename(Path("/other"), PATH)
    assert disk.names(Path("/b")) == []
    assert not disk.exists(PATH / "file")


# --- the machine ----------------------------------------------------------------------------------


def test_a_commit_is_one_operation_and_is_durable_with_it() -> None:
    machine = Machine()
    left: dict[str, Machine] = {}

    def copy(operation: str) -> None:
        left[operation] = machine.after_power_loss(DROPPED, random.Random(1))

    path = Path("/app.db")
    connection = machine.databases.connect(path)
    connection.execute("BEGIN IMMEDIATE")
    connection.execute("CREATE TABLE t (x)")
    connection.execute("COMMIT")
    machine.on_step = copy
    connection.execute("BEGIN IMMEDIATE")
    connection.execute("INSERT INTO t VALUES (1)")
    connection.execute("COMMIT")
    connection.execute("BEGIN")
    connection.execute("SELECT * FROM t").fetchall()
    connection.execute("COMMIT")
    assert list(left) == ["commit app.db", "after the commit of app.db"]
    for operation, rows in zip(left, ([], [(1,)]), strict=True):
        with closing(left[operation].databases.connect(path)) as found:
            assert found.execute("SELECT * FROM t").fetchall() == rows


def test_an_applications_commit_is_one_too_and_its_rollback_leaves_nothing() -> None:
    machine = Machine()
    path = Path("/app.db")
    with closing(machine.databases.connect_application(path)) as connection:
        connection.execute("CREATE TABLE t (x)")
        connection.execute("INSERT INTO t VALUES (1)")
        connection.commit()
        connection.execute("INSERT INTO t VALUES (2)")
        connection.rollback()
        connection.execute("INSERT INTO t VALUES (3)")
    with closing(machine.after_kill().databases.connect(path)) as found:
        assert found.execute("SELECT x FROM t").fetchall() == [(1,)]


def test_connections_to_one_file_see_each_other_and_a_renamed_file_stays_the_same() -> None:
    machine = Machine()
    path, other = Path("/app.db"), Path("/other.db")
    first, second = machine.databases.connect(path), machine.databases.connect(path)
    first.execute("BEGIN IMMEDIATE")
    first.execute("CREATE TABLE t (x)")
    first.execute("COMMIT")
    assert second.execute("SELECT * FROM t").fetchall() == []
    machine.disk.rename(path, other)
    third = machine.databases.connect(other)
    assert third.execute("SELECT * FROM t").fetchall() == []
    with pytest.raises(sqlite3.OperationalError, match="no such table"):
        machine.databases.connect(path).execute("SELECT * FROM t")


def test_a_machine_boots_anew_after_a_power_loss_and_not_after_a_kill() -> None:
    machine = Machine()
    assert machine.after_kill().platform.boot_id == machine.platform.boot_id
    assert machine.after_power_loss(KEPT, random.Random(1)).platform.boot_id != machine.platform.boot_id
    assert machine.disk.names(ROOT) == []
