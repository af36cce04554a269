"""Versions: of several writers of a number exactly one succeeds, and what holds is whole, or an error."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from penstock.errors import IntegrityError, UsageError
from penstock.versions import Version, Versions, local_directory


def test_there_is_none_before_the_first(tmp_path: Path) -> None:
    assert Versions(tmp_path / "none").latest() is None
    assert not (tmp_path / "none").exists()


def test_the_highest_number_holds(tmp_path: Path) -> None:
    versions = Versions(tmp_path / "v")
    assert versions.put(0, b"first")
    assert versions.put(1, b"second")
    assert versions.latest() == Version(1, b"second")


def test_a_number_is_put_once_and_never_below_another(tmp_path: Path) -> None:
    versions = Versions(tmp_path)
    assert versions.put(3, b"a")
    assert not versions.put(3, b"b")
    assert not versions.put(2, b"c")
    assert versions.latest() == Version(3, b"a")
    assert [path.name for path in tmp_path.iterdir()] == [f"v{3:020d}"]  # and no draft is left behind


def test_of_many_that_put_the_same_number_one_succeeds(tmp_path: Path) -> None:
    count, barrier = 8, threading.Barrier(8)
    put: list[bytes] = []

    def write(body: bytes) -> None:
        barrier.wait()
        if Versions(tmp_path).put(0, body):
            put.append(body)

    writers = [threading.Thread(target=write, args=(f"{number}".encode(),)) for number in range(count)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert len(put) == 1
    assert Versions(tmp_path).latest() == Version(0, put[0])


def test_old_ones_go_and_a_few_stay(tmp_path: Path) -> None:
    versions = Versions(tmp_path, kept=2)
    for number in range(6):
        versions.put(number, b"%d" % number)
    assert versions.numbers() == [3, 4, 5]


@pytest.mark.parametrize("cut", [0, 5, 16, 20])
def test_a_damaged_version_is_an_error_and_not_passed_over(tmp_path: Path, cut: int) -> None:
    versions = Versions(tmp_path)
    versions.put(0, b"old")
    versions.put(1, b"what holds now")
    path = tmp_path / f"v{1:020d}"
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(IntegrityError, match="damaged"):
        versions.latest()


def test_a_flipped_bit_is_found(tmp_path: Path) -> None:
    versions = Versions(tmp_path)
    versions.put(0, b"what holds now")
    path = tmp_path / f"v{0:020d}"
    content = bytearray(path.read_bytes())
    for position in range(len(content)):
        content[position] ^= 1
        path.write_bytes(content)
        with pytest.raises(IntegrityError):
            versions.latest()
        content[position] ^= 1


def test_files_are_for_their_owner_alone(tmp_path: Path) -> None:
    Versions(tmp_path / "v").put(0, b"x")
    assert (tmp_path / "v").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "v" / f"v{0:020d}").stat().st_mode & 0o777 == 0o600


def test_a_directory_is_named_by_path_or_url(tmp_path: Path) -> None:
    assert local_directory(tmp_path) == tmp_path
    assert local_directory(f"file:{tmp_path}") == tmp_path
    assert local_directory(f"file://{tmp_path}") == tmp_path
    assert local_directory("file:./lake") == Path("lake").absolute()
    assert local_directory("lake") == Path("lake").absolute()
    for wrong in ("s3://bucket/lake", "hdfs://host/lake"):
        with pytest.raises(UsageError, match="cannot be written to"):
            local_directory(wrong)
    with pytest.raises(UsageError, match="empty"):
        local_directory("")
