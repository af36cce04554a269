"""Members: who has a store open.

Each opening is a member with a random number. It holds a lock on the byte of that number for as long as it lives, so
that everybody sees its death at once, however it dies. `members/<number>.json` only says who it is, for people; what
the dead have left there is swept by whoever comes next.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from penstock.rows import StoreMember

if TYPE_CHECKING:
    from penstock.stores.file.gate import Gates
    from penstock.stores.file.platform import Platform

_own: set[tuple[str, int]] = set()
"""The members of this process, by store: the system does not tell a process of its own locks."""
os.register_at_fork(after_in_child=_own.clear)


class Told(msgspec.Struct, frozen=True):
    """What the file of a member says."""

    process: int
    program: str
    opened_at: int


_read_told = msgspec.json.Decoder(Told).decode


class Member:
    """One opening of a store."""

    def __init__(self, root: Path, store_id: str, gates: Gates, platform: Platform) -> None:
        """Enter, and sweep what the dead have left."""
        self._directory = root / "members"
        self._store_id = store_id
        self._gates = gates
        self._disk = platform.disk
        self.number = int.from_bytes(platform.random(4), "big")
        gates.enter(self.number)
        _own.add((store_id, self.number))
        self._tell(platform.clock.time_us())
        for name in self._disk.names(self._directory):
            number = name.removesuffix(".json")
            if number.isdigit() and not self.is_alive(int(number)):
                self._forget(name)

    def _tell(self, now: int) -> None:
        told = Told(os.getpid(), Path(sys.argv[0]).name, now)
        self._disk.make_directory(self._directory)
        descriptor = self._disk.open(self._directory / f"{self.number}.json", create=True)
        try:
            self._disk.write(descriptor, msgspec.json.encode(told), 0)
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
            descriptor = self._disk.open(self._directory / name, write=False)
            try:
                data = self._disk.read(descriptor, self._disk.size(descriptor), 0)
            finally:
                self._disk.close(descriptor)
            told = _read_told(data)
        except (FileNotFoundError, ValueError):  # it enters or leaves at this moment
            return StoreMember(0, "", 0)
        return StoreMember(told.process, told.program, told.opened_at)

    def is_alive(self, member: int) -> bool:
        """Say whether a member still has the store open."""
        return (self._store_id, member) in _own or self._gates.is_alive(member)

    def leave(self) -> None:
        """Have the store open no longer."""
        self._forget(f"{self.number}.json")
        _own.discard((self._store_id, self.number))
        self._gates.leave(self.number)
