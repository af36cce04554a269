"""`penstock dump`: the blocks of one segment file, for whoever wants to see what is on the disk.

It reads the file alone: nothing is locked or changed, and the store may be in use or damaged. Where no whole block
stands it says so, and goes on at the next one. A block at the very end that is not whole may be one that is being
written now.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from penstock.cli.output import JsonLines, print_json_line, print_table, shown_bytes, shown_text, shown_time_us
from penstock.errors import Corruption, IntegrityError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pyarrow as pa

    from penstock.batch import Batch
    from penstock.producers import Run
    from penstock.stores.file.block import Header
    from penstock.stores.file.segment import SegmentFile

_NAME = re.compile(r"\d{20}-\d{10}\.seg")
"""Also inside of a longer name: a file in quarantine keeps its name in the middle of its new one."""

LINE = "{:>8}  {:<7}  {:>10}  {:>9}  {:<23}  {:<27}  {:>17}  {:>6}  {:<7}  {}"
HEADINGS = ("block", "kind", "byte", "length", "offsets", "appended", "durable", "runs", "content", "columns")


class Block(NamedTuple):
    """One block whose header is whole."""

    header: Header
    runs: tuple[Run, ...]
    content: pa.Buffer | None
    """Runs and body; None if they are damaged."""
    problem: str
    """What is wrong with the content; empty if nothing is."""


class Hole(NamedTuple):
    """Bytes where no block stands, and why."""

    byte: int
    end_byte: int
    problem: str


def dump(
    file: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="A segment, topics/…/…/….seg.")],
    block: Annotated[int | None, typer.Option(min=0, metavar="N", help="One block in full, by number.")] = None,
    offset: Annotated[int | None, typer.Option(min=0, metavar="N", help="The block of this offset in full.")] = None,
    data: Annotated[bool, typer.Option("--data", help="With one block: its events, too.")] = False,
    as_json: JsonLines = False,
) -> None:
    """Show the blocks of a segment file; exits with 3 if one is damaged."""
    if block is not None and offset is not None:
        raise UsageError("give --block or --offset, not both")
    if data and block is None and offset is None:
        raise UsageError("--data goes with --block or --offset")
    segment = _opened(file)
    if block is None and offset is None:
        _print_all(segment, as_json=as_json)
        return
    chosen = _find(segment, block, offset)
    if as_json:
        _print_json(_document(segment, chosen, full=True, data=data))
    else:
        _print_block(segment, chosen, data=data)
    if chosen.problem:
        raise _damage(segment, chosen.header.position, chosen.header.offset, chosen.problem)


def _opened(file: Path) -> SegmentFile:
    from penstock.stores.file.block import Blank, Broken
    from penstock.stores.file.platform import Platform
    from penstock.stores.file.segment import SegmentFile, SegmentName

    found = _NAME.search(file.name)
    name = SegmentName.parse(found[0]) if found else None
    if name is None:
        raise UsageError(f"{file} is not named like a segment, which is {SegmentName(0, 0)}")
    try:
        return SegmentFile(Platform().disk, file, name)
    except (Blank, Broken) as error:
        detail = (
            f"the first block is not whole, and without it no other can be checked: {str(error) or 'there are zeros'}"
        )
        raise Corruption("corrupt", str(file), byte=0, start=name.base, stop=None, detail=detail) from None


def _damage(segment: SegmentFile, byte: int, start: int, detail: str) -> Corruption:
    return Corruption("corrupt", str(segment.path), byte=byte, start=start, stop=None, detail=detail)


# --- walking ------------------------------------------------------------------------------------


def walk(segment: SegmentFile) -> Iterator[Block | Hole]:
    """Yield all that stands in the file, whole or not, up to the zeros at its end."""
    from penstock.stores.file.block import FRONT_BYTES, Blank, Broken, parse_header
    from penstock.stores.file.scan import later_blocks
    from penstock.stores.file.segment import is_blank_from

    position, number, size = 0, segment.first.number, segment.size()
    while position < size:
        try:
            header = parse_header(
                segment.disk.read(segment.descriptor, FRONT_BYTES, position), segment.segment, position
            )
        except (Blank, Broken) as error:
            if is_blank_from(segment, position, size):
                return
            following = next(later_blocks(segment, position, size, number), None)
            end = size if following is None else following.position
            yield Hole(position, end, str(error) or "there are zeros where a block should be")
            position = end
        else:
            yield _block(segment, header)
            position, number = header.end_position, header.number


def _block(segment: SegmentFile, header: Header) -> Block:
    from penstock.stores.file.block import Broken, decode_runs

    try:
        content = segment.read_content(header)
    except Broken as error:
        return Block(header, (), None, str(error))
    runs = decode_runs(content.slice(0, header.runs_length).to_pybytes(), header.run_count)
    return Block(header, runs, content, "")


def _find(segment: SegmentFile, number: int | None, offset: int | None) -> Block:
    for item in walk(segment):
        if isinstance(item, Block) and (
            item.header.number == number
            or (offset is not None and item.header.offset <= offset < item.header.end_offset)
        ):
            return item
    what = f"block {number}" if offset is None else f"block with offset {offset}"
    raise UsageError(f"{segment.path} has no whole {what}; without --block and --offset all are listed")


# --- all blocks ---------------------------------------------------------------------------------


def _print_all(segment: SegmentFile, *, as_json: bool) -> None:
    problems = 0
    if not as_json:
        print(LINE.format(*HEADINGS).rstrip())
    for item in walk(segment):
        problems += bool(item.problem)
        if isinstance(item, Hole):
            _print_hole(item, as_json=as_json)
        elif as_json:
            _print_json(_document(segment, item, full=False, data=False))
        else:
            print(_line(item))
    sys.stdout.flush()
    if problems:
        raise IntegrityError(
            f"{segment.path}: {problems:,} {'block is' if problems == 1 else 'blocks are'} not whole; "
            f"`penstock verify` tells what that means"
        )


def _print_hole(hole: Hole, *, as_json: bool) -> None:
    if as_json:
        _print_json({"hole": hole._asdict()})
    else:
        print(f"no block from byte {hole.byte} to {hole.end_byte}: {hole.problem}")


def _print_json(document: dict[str, Any]) -> None:
    from msgspec import json

    print_json_line(json.encode(document))


def _line(block: Block) -> str:
    header = block.header
    return LINE.format(
        header.number,
        header.kind.name,
        header.position,
        header.end_position - header.position,
        f"[{header.offset}, {header.end_offset})",
        _time(header.last_time),
        f"{header.durable_number}@{header.durable_offset}",
        header.run_count,
        "damaged" if block.problem else "ok",
        ",".join(_columns(header.mask)),
    ).rstrip()


def _time(time_us: int) -> str:
    return shown_time_us(time_us) if time_us else "-"


def _columns(mask: int) -> list[str]:
    from penstock.columns import NAMES

    return [name for bit, name in enumerate(NAMES) if mask >> bit & 1]


# --- one block ----------------------------------------------------------------------------------


def _facts(segment: SegmentFile, block: Block) -> dict[str, Any]:
    """Return everything that a block's header says, and what its kind holds beyond that."""
    from penstock.stores.file.block import Kind

    header = block.header
    facts: dict[str, Any] = {
        "block": header.number,
        "kind": header.kind.name,
        "byte": header.position,
        "end_byte": header.end_position,
        "epoch": header.epoch,
        "offset": header.offset,
        "end_offset": header.end_offset,
        "first_time": _time(header.first_time),
        "last_time": _time(header.last_time),
        "durable_number": header.durable_number,
        "durable_offset": header.durable_offset,
        "mask": header.mask,
        "columns": _columns(header.mask),
        "runs_bytes": header.runs_length,
        "body_bytes": header.body_length,
        "content_crc": f"{header.content_crc:08x}",
        "content": block.problem or "ok",
    }
    if header.kind == Kind.SEGMENT:
        facts |= _segment_facts(segment)
    elif header.kind == Kind.GAP and block.content is not None:
        facts["reason"] = block.content.to_pybytes().decode("utf-8", "replace")
    return facts


def _segment_facts(segment: SegmentFile) -> dict[str, Any]:
    told = segment.facts
    return {
        "topic": told.topic.name,
        "log_id": told.topic.log_id,
        "partition": told.partition,
        "slot": told.slot,
        "producers": len(segment.producers()),
        "predecessor": "none"
        if told.predecessor is None
        else f"{told.predecessor.base:020}-{told.predecessor.epoch:010}.seg, {told.predecessor.length} bytes",
    }


def _batch(block: Block) -> Batch | None:
    """Return the events of a block; None if it holds none, or they cannot be read."""
    from penstock.batch import Batch
    from penstock.stores.file.block import Kind

    if block.header.kind != Kind.DATA or block.content is None:
        return None
    body = block.content.slice(block.header.runs_length)
    return Batch.from_bytes(body, block.header.mask, start=block.header.offset, runs=block.runs)


def _runs(block: Block) -> list[dict[str, Any]]:
    return [
        {
            "producer": run.producer.hex(),
            "epoch": run.epoch,
            "first_sequence": run.first_sequence,
            "length": run.length,
            "digest": f"{run.digest:016x}",
        }
        for run in block.runs
    ]


def _column_facts(batch: Batch) -> list[dict[str, Any]]:
    return [
        {"column": field.name, "type": str(field.type), "nulls": column.null_count, "bytes": column.nbytes}
        for field, column in zip(batch.columns.schema, batch.columns.columns, strict=True)
    ]


def _document(segment: SegmentFile, block: Block, *, full: bool, data: bool) -> dict[str, Any]:
    document = {**_facts(segment, block), "runs": _runs(block)}
    batch = _batch(block) if full else None
    if batch is not None:
        document["column_facts"] = _column_facts(batch)
        if data:
            document["events"] = [dict(row) for row in _events(batch)]
    return document


def _events(batch: Batch) -> Iterator[list[tuple[str, str]]]:
    for event in batch:
        yield [
            ("offset", str(event.offset)),
            ("id", shown_text(event.id or "-")),
            ("type", shown_text(event.type)),
            ("key", "-" if event.key is None else shown_bytes(event.key)),
            ("data", shown_bytes(event.data)),
        ]


def _print_block(segment: SegmentFile, block: Block, *, data: bool) -> None:
    facts = {**_facts(segment, block), "columns": ", ".join(_columns(block.header.mask)) or "-"}
    print_table(("what", "value"), [(name, shown_text(str(value))) for name, value in facts.items()])
    if block.runs:
        print()
        _print_rows(_runs(block), {"epoch", "first_sequence", "length"})
    batch = _batch(block)
    if batch is None:
        return
    print()
    _print_rows(_column_facts(batch), {"nulls", "bytes"})
    if data:
        print()
        _print_rows([dict(row) for row in _events(batch)], {"offset"})


def _print_rows(rows: list[dict[str, Any]], numbers: set[str]) -> None:
    print_table(list(rows[0]), [[str(value) for value in row.values()] for row in rows], numbers=numbers)
