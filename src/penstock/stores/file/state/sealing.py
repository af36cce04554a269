"""Rows that prove themselves: each carries a CRC32C over its table, its key and its values.

SQLite's own pages carry none, and of flipped bits many pass its `integrity_check`. A row is checked whenever it is
read. One that does not fit is never believed and never mended in silence: it is `StateMissing`, with file, table and
row.
"""

from __future__ import annotations

from typing import Any

import google_crc32c
import msgspec

from penstock.errors import StateMissing, UsageError

REPAIR = "restore the file from a copy, or accept what is lost with `penstock repair`"

_encode = msgspec.msgpack.Encoder().encode
_extend = google_crc32c.extend

Row = tuple[Any, ...]


class Table:
    """A table whose rows are sealed: its last column is the checksum, its first ones are the key."""

    def __init__(self, file: str, name: str, key_length: int) -> None:
        self.file = file
        self.name = name
        self._key_length = key_length
        # Begins with the table's name, so that a row of one table is none of another.
        self._seed = int(google_crc32c.value(name.encode()))

    def seal(self, values: Row) -> Row:
        """Return the row as it is stored: these values and their checksum."""
        try:
            return (*values, _extend(self._seed, _encode(values)))
        except UnicodeEncodeError:
            raise UsageError(
                f"row {self.key_of(values)} of {self.name}: a text holds a lone surrogate, which UTF-8 cannot express"
            ) from None

    def checked(self, row: Row) -> Row:
        """Return the values of a stored row, or raise `StateMissing`."""
        values = row[:-1]
        if not self.fits(row):
            raise self.damaged(f"row {self.key_of(values)}: its checksum does not fit")
        return values

    def checked_all(self, rows: list[Row]) -> list[Row]:
        """Return the values of stored rows, or raise `StateMissing` for the first that is damaged."""
        return [self.checked(row) for row in rows]

    def fits(self, row: Row) -> bool:
        """Say whether a stored row is what was written."""
        try:
            fitting: bool = _extend(self._seed, _encode(row[:-1])) == row[-1]
        except UnicodeEncodeError:  # nobody has written such a text
            return False
        return fitting

    def key_of(self, values: Row) -> Row:
        """Return the key of a row."""
        return values[: self._key_length]

    def damaged(self, what: str) -> StateMissing:
        """Return the error that says what is wrong with this table."""
        return StateMissing(f"{self.file}, table {self.name}, {what}; {REPAIR}")
