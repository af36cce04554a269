"""Untrusted bytes into columns of events: everything is checked before anything is used.

Three gates, in this order. Before Arrow touches the bytes, its envelope is read by hand: compressed bodies (30 kB
can unpack to 900 MB), dictionaries, a foreign number of columns and lengths that do not add up are refused. Then
Arrow checks every offset, length and UTF-8 byte. Then the rules of events are checked. What comes out can be used
without a further look, and shares the memory of the bytes.

Parsing allocates nothing in proportion to a number that was merely claimed.
"""

from __future__ import annotations

import struct
from functools import cache
from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa

from penstock.columns import BODY_BYTES_MAX, SCHEMA, check_rules, schema_of
from penstock.errors import InvalidBatch

_ENVELOPE_BYTES_MAX: Final = 1 << 20
_RECORD_BATCH, _VERSION_5 = 3, 4  # of MessageHeader and MetadataVersion in Arrow's Message.fbs


class _Layout(NamedTuple):
    """What bytes with a certain column mask must look like."""

    schema: pa.Schema
    as_bytes: pa.Schema
    """The same with texts taken as bytes."""
    nodes: int
    """How many arrays Arrow counts: a map has four, with its entries, names and values."""
    texts: tuple[int, ...]
    """Which columns are texts."""
    headers: int
    """Which one is the headers, or -1."""


@cache  # at most 1,024 masks
def _layout(mask: int) -> _Layout:
    if not 0 < mask < 1 << len(SCHEMA) or not mask & 1 << SCHEMA.get_field_index("data"):
        raise InvalidBatch(
            f"column mask {mask:#x} is not one of this format: the writer is newer, or these are other bytes"
        )
    schema = schema_of(mask)
    untyped = {pa.string(): pa.binary(), SCHEMA.field("headers").type: pa.map_(pa.binary(), pa.binary())}
    return _Layout(
        schema,
        pa.schema([(field.name, untyped.get(field.type, field.type)) for field in schema]),
        nodes=sum(4 if field.name == "headers" else 1 for field in schema),
        texts=tuple(index for index, field in enumerate(schema) if field.type == pa.string()),
        headers=schema.get_field_index("headers"),
    )


def parse(data: bytes | memoryview | pa.Buffer, mask: int) -> pa.RecordBatch:
    """Return the batch that `columns.serialize` wrote, without copying it, or raise `InvalidBatch`."""
    layout = _layout(mask)
    try:
        view = memoryview(data)
        _check_envelope(view, layout.nodes)
        buffer = pa.py_buffer(view)
        # Checking UTF-8 text by text is most of the cost. Texts are nearly always ASCII, which is told for a
        # whole column at once; so all else is checked with texts taken as bytes, and only then they are texts.
        pa.ipc.read_record_batch(buffer, layout.as_bytes).validate(full=True)
        batch = pa.ipc.read_record_batch(buffer, layout.schema)
        if not _is_ascii(batch, layout):
            batch.validate(full=True)
        check_rules(batch)
    except InvalidBatch:
        raise
    except (pa.ArrowException, struct.error, IndexError, ValueError, OverflowError, OSError) as error:
        raise InvalidBatch(f"these bytes are not a batch of events: {error}") from None
    return batch


def _is_ascii(batch: pa.RecordBatch, layout: _Layout) -> bool:
    texts = [batch.column(index) for index in layout.texts]
    if layout.headers >= 0:
        texts.append(batch.column(layout.headers).keys)
    for array in texts:
        data = array.buffers()[2]
        if data is not None and np.frombuffer(data, np.uint8).max(initial=0) >= 0x80:
            return False
    return True


def _check_envelope(data: memoryview, nodes: int) -> None:
    """Check what Arrow itself would accept or act upon: compression, lengths, the number of columns."""
    if len(data) > BODY_BYTES_MAX + _ENVELOPE_BYTES_MAX:
        raise InvalidBatch(f"{len(data):,} bytes are more than any batch has ({BODY_BYTES_MAX:,})")
    continuation, metadata_bytes = struct.unpack_from("<Ii", data, 0)
    if continuation != 0xFFFFFFFF or not 0 < metadata_bytes <= len(data) - 8:
        raise InvalidBatch("this is not an Arrow IPC message")
    table = _Flatbuffer(data[8 : 8 + metadata_bytes])
    message = table.root()
    version, header_type = table.scalar(message, 0, "<h"), table.scalar(message, 1, "<B")
    body_bytes = table.scalar(message, 3, "<q")
    if version != _VERSION_5 or header_type != _RECORD_BATCH or table.field(message, 4):
        raise InvalidBatch("this is an Arrow message, but not a plain record batch of format version 5")
    if 8 + metadata_bytes + body_bytes != len(data):
        found = len(data) - 8 - metadata_bytes
        raise InvalidBatch(f"the message claims {body_bytes:,} bytes of body, {found:,} are there")
    record = table.follow(message, 2)
    if table.field(record, 3) or table.field(record, 4):
        raise InvalidBatch("the body is compressed or holds views; Penstock writes neither")
    if (found := table.vector_length(record, 1)) != nodes:
        raise InvalidBatch(f"the message has {found} columns, {nodes} were announced")
    if not 0 <= table.scalar(record, 0, "<q") <= len(data):
        raise InvalidBatch("the number of events is impossible for this many bytes")


class _Flatbuffer:
    """The few steps through a flatbuffer that `_check_envelope` takes; none of them leaves its bytes."""

    def __init__(self, data: memoryview) -> None:
        self.data = data

    def root(self) -> int:
        return int(struct.unpack_from("<I", self.data, 0)[0])

    def field(self, table: int, number: int) -> int:
        """Return where a field's value stands, or 0 where it has its default."""
        vtable = table - struct.unpack_from("<i", self.data, table)[0]
        if vtable < 0:  # which `unpack_from` would count from the end
            raise IndexError("a table points outside of the message")
        if 4 + 2 * number >= struct.unpack_from("<H", self.data, vtable)[0]:
            return 0
        place = struct.unpack_from("<H", self.data, vtable + 4 + 2 * number)[0]
        return int(table + place) if place else 0

    def scalar(self, table: int, number: int, form: str) -> int:
        place = self.field(table, number)
        return int(struct.unpack_from(form, self.data, place)[0]) if place else 0

    def follow(self, table: int, number: int) -> int:
        place = self.field(table, number)
        if not place:
            raise IndexError("the message has no content")
        return int(place + struct.unpack_from("<I", self.data, place)[0])

    def vector_length(self, table: int, number: int) -> int:
        return int(struct.unpack_from("<I", self.data, self.follow(table, number))[0])
