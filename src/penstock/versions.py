"""Versions: a directory in which several processes agree on what holds, without a lock, a leader or a database.

What holds is the version of the highest number. To change it is to read it, to write whatever files it shall name, and
to put the next one. Of several processes that put the same number exactly one succeeds; the others read again what
holds now, and decide anew. So nothing that a version names is ever lost to another writer, and a writer that is killed
anywhere leaves files behind that no version names, and nothing else.

* **Put if absent.** A version is written under another name, synced, and then linked to its own, which the file system
  refuses if the name is taken. It is there whole or not at all, also after a power cut.
* **A version never changes**, and holds a checksum of itself: one that was damaged is an `IntegrityError`, never
  passed over for an older one.
* **Bounded.** Old versions are removed by whoever puts one, but for the newest few; a reader that has found a number
  and comes too late for its body asks again.

It needs a directory that can link files, as those of one machine can; an object store is refused by name.
"""

from __future__ import annotations

import os
import re
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

import xxhash

from penstock.errors import IntegrityError, UsageError

KEPT: Final = 10
"""So many versions are kept beside the newest: whoever reads one has that long to finish."""

BODY_BYTES_MAX: Final = 256 << 20

_NAME: Final = re.compile(r"v(\d{20})")
_SCHEME: Final = re.compile(r"[a-z][a-z0-9+.-]+:", re.IGNORECASE)
_SUM_BYTES: Final = 16


class Version(NamedTuple):
    """One state of things."""

    number: int
    body: bytes


def local_directory(where: str | Path) -> Path:
    """Return the directory that a path or a `file:` URL names; `UsageError` for one that is elsewhere."""
    text = str(where)
    if text.startswith("file:"):
        text = "/" + text.removeprefix("file:").lstrip("/") if text.startswith("file:/") else text.removeprefix("file:")
    elif _SCHEME.match(text):
        raise UsageError(
            f"{text.split(':')[0]}: cannot be written to: versions are agreed upon by linking files, which needs a "
            f"directory of this machine; give a path, and copy its files from there"
        )
    if not text.strip():
        raise UsageError("the directory's name is empty")
    return Path(text).absolute()


class Versions:
    """The versions in one directory, which is made with the first."""

    def __init__(self, directory: Path, *, kept: int = KEPT) -> None:
        self.directory = directory
        self._kept = kept

    def numbers(self) -> list[int]:
        """Return the numbers of all that are there, rising."""
        try:
            names = [path.name for path in self.directory.iterdir()]
        except FileNotFoundError:
            return []
        return sorted(int(found[1]) for name in names if (found := _NAME.fullmatch(name)))

    def latest(self) -> Version | None:
        """Return the one that holds, or None if there is none yet."""
        while numbers := self.numbers():
            with suppress(FileNotFoundError):  # it was old, and is gone since: there is a newer one
                return Version(numbers[-1], self.read(numbers[-1]))
        return None

    def read(self, number: int) -> bytes:
        """Return the body of one; `FileNotFoundError` if it is not there, or not any more."""
        path = self._path(number)
        content = path.read_bytes()
        body, checksum = content[:-_SUM_BYTES], content[-_SUM_BYTES:]
        if checksum != _checksum(body):
            raise IntegrityError(f"{path} is damaged: its checksum is another. Bring it back from a copy")
        return body

    def put(self, number: int, body: bytes) -> bool:
        """Make this the next version; False if somebody else has made one of this number, or a later one.

        When it returns True it is on the medium. The caller has synced whatever files the body names.
        """
        if len(body) > BODY_BYTES_MAX:
            raise UsageError(f"version {number} of {self.directory} would have {len(body):,} bytes, too many")
        newest = max(self.numbers(), default=-1)
        if number <= newest:
            return False
        self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        draft = self.directory / f".{uuid.uuid4().hex}.draft"
        try:
            _write(draft, body + _checksum(body))
            try:
                os.link(draft, self._path(number))
            except FileExistsError:
                return False
        finally:
            draft.unlink(missing_ok=True)
        sync_directory(self.directory)
        self._remove_old(number)
        return True

    def _remove_old(self, newest: int) -> None:
        for number in self.numbers():
            if number < newest - self._kept:
                self._path(number).unlink(missing_ok=True)

    def _path(self, number: int) -> Path:
        return self.directory / f"v{number:020d}"


def sync_directory(directory: Path) -> None:
    """Make the names in a directory last through a power cut."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write(path: Path, content: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _checksum(body: bytes) -> bytes:
    return xxhash.xxh3_128_digest(body)
