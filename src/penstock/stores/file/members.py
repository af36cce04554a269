"""Members: who has a store open.

Each opening is a member with a random number. It holds a lock on the byte of that number for as long as it lives, so
that everybody sees its death at once, however it dies. `members/<number>.json` only says who it is, for people, and
`members/<number>.told` what it tells others at the moment; it is replaced as a whole, by a rename, and never synced.
What the dead have left there is believed by nobody, and swept by whoever comes next.
"""

from __future__ import annotations

import os
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from penstock.rows import TELLERS_MAX, TOLD_BYTES_MAX, StoreMember, Told, check_told

if TYPE_CHECKING:
    from penstock.stores.file.gate import Gates
    from penstock.stores.file.platform import Platform

_own: set[tuple[str, int]] = set()
"""The members of this process, by store: the system does not tell a process of its own locks."""
os.register_at_fork(after_in_child=_own.clear)


class Says(msgspec.Struct, frozen=True):
    """What the file of a member says of it."""

    process: int
    program: str
    opened_at: int


_read_says = msgspec.json.Decoder(Says).decode
_read_told = msgspec.msgpack.Decoder(list[Told]).decode
TOLD_FILE_BYTES_MAX: Final = 2 * TELLERS_MAX * TOLD_BYTES_MAX
"""A file that is larger was not written by a member, and is not read."""


class Member:
    """One opening of a store."""

    def __init__(self, root: Path, store_id: str, gates: Gates, platform: Platform) -> None:
        """Enter, and sweep what the dead have left."""
        self._directory = root / "members"
        self._store_id = store_id
        self._gates = gates
        self._disk = platform.disk
        self._clock = platform.clock
        self.number = int.from_bytes(platform.random(4), "big")
        self._telling = threading.Lock()
        self._told: dict[str, Told] = {}
        gates.enter(self.number)
        _own.add((store_id, self.number))
        self._disk.make_directory(self._directory)
        says = Says(os.getpid(), Path(sys.argv[0]).name, platform.clock.time_us())
        self._write(f"{self.number}.json", msgspec.json.encode(says))
        for name in self._disk.names(self._directory):
            number = name.partition(".")[0]
            if number.isdigit() and not self.is_alive(int(number)):
                self._forget(name)

    def _write(self, name: str, data: bytes) -> int:
        descriptor = self._disk.open(self._directory / name, create=True)
        try:
            return self._disk.write(descriptor, data, 0)
        finally:
            self._disk.close(descriptor)

    def _forget(self, name: str) -> None:
        with suppress(FileNotFoundError):  # another one sweeps, too
            self._disk.remove(self._directory / name)

    def others(self) -> list[StoreMember]:
        """Return who else has the store open now; of one whose file cannot be read only that it is there."""
        found = []
        for name in self._disk.names(self._directory):
            number = name.removesuffix(".json")
            if number.isdigit() and int(number) != self.number and self.is_alive(int(number)):
                found.append(self._read(name))
        return sorted(found, key=lambda member: (member.opened_at, member.process))

    def _read(self, name: str) -> StoreMember:
        try:
            says = _read_says(self._bytes(name))
        except (FileNotFoundError, ValueError):  # it enters or leaves at this moment
            return StoreMember(0, "", 0)
        return StoreMember(says.process, says.program, says.opened_at)

    def _bytes(self, name: str) -> bytes:
        descriptor = self._disk.open(self._directory / name, write=False)
        try:
            return self._disk.read(descriptor, min(self._disk.size(descriptor), TOLD_FILE_BYTES_MAX), 0)
        finally:
            self._disk.close(descriptor)

    # --- what members tell ----------------------------------------------------------------------

    def tell(self, who: str, document: bytes) -> None:
        """See `Telling`."""
        with self._telling:
            told = {name: each for name, each in self._told.items() if name != who}
            check_told(document, len(told))
            if document:
                told[who] = Told(who, self._clock.time_us(), document)
            if told:
                self._replace(msgspec.msgpack.encode(list(told.values())))
            elif self._told:
                self._forget(f"{self.number}.told")
            self._told = told

    def _replace(self, data: bytes) -> None:
        new = f"{self.number}.new"
        self._forget(new)  # what an earlier attempt has left may be longer
        if self._write(new, data) != len(data):
            raise OSError(f"{self._directory / new} was written in part")
        self._disk.rename(self._directory / new, self._directory / f"{self.number}.told")

    def told(self) -> list[Told]:
        """See `Telling`."""
        found: list[Told] = []
        for name in self._disk.names(self._directory):
            number, _, kind = name.partition(".")
            if kind == "told" and number.isdigit() and self.is_alive(int(number)):
                with suppress(FileNotFoundError, ValueError):  # it leaves at this moment, or is nobody's
                    found += _read_told(self._bytes(name))
        return sorted(found)

    def is_alive(self, member: int) -> bool:
        """Say whether a member still has the store open."""
        return (self._store_id, member) in _own or self._gates.is_alive(member)

    def leave(self) -> None:
        """Have the store open no longer."""
        for kind in ("told", "new", "json"):
            self._forget(f"{self.number}.{kind}")
        _own.discard((self._store_id, self.number))
        self._gates.leave(self.number)
