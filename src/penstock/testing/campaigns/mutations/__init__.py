"""C14: bytes that nobody wrote are given to the parser of blocks.

Blocks of every kind are mutated, with CRCs that do not fit and, to get further, with ones that do. What must hold:

* only the documented errors: `Blank`, `Broken`, `NewerFormat` of a block or segment, `InvalidBatch` of a body,
  `IntegrityError` of the producers in a segment's first block;
* a mutant whose CRCs were not made to fit is only taken for a block if it is the original, up to its filling;
* nobody asks for more memory than a block can have, whatever a length field claims;
* nobody goes on for ever: a walk over a file takes a number of reads that its length explains.

Each mutant is parsed by itself; a share of them also stands in a segment, which is walked over.
"""

from __future__ import annotations

import random
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pyarrow as pa

from penstock import columns
from penstock.errors import IntegrityError, InvalidBatch, NewerFormat
from penstock.parsing import parse
from penstock.stores.file.block import (
    BODY_BYTES_MAX,
    CONTENT_BYTES_MAX,
    FRONT_BYTES,
    RUN_BYTES,
    Blank,
    Broken,
    Header,
    Kind,
    body_of,
    check_content,
    decode_runs,
    parse_header,
    parse_prefix,
)
from penstock.stores.file.scan import walk
from penstock.stores.file.segment import SegmentFile
from penstock.testing.campaigns.campaign import Campaign, TooManyFindings
from penstock.testing.campaigns.mutations.blocks import MUTATIONS, NAME, SEGMENT, Mutant, Original, originals
from penstock.testing.machine.plain import MemoryDisk

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

    from penstock.testing.campaigns.campaign import Report

MUTANTS: Final = 1_000
"""In a round."""
FILES: Final = 4
"""Segments of mutants in a round."""
READS_PER_BLOCK: Final = 24
"""More reads than a walk ever needs for 64 bytes of a file."""
PATH: Final = Path("/segments") / str(NAME)


class TooMuch(Exception):
    """More memory or more reads than the bytes explain were asked for."""


class _MeasuringDisk(MemoryDisk):
    """Refuses reads that are too long, or too many."""

    def __init__(self) -> None:
        super().__init__()
        self.reads_left = 0

    def read(self, descriptor: int, count: int, position: int) -> bytes:
        self._measure(count)
        return super().read(descriptor, count, position)

    def read_into(self, descriptor: int, buffer: WriteableBuffer, position: int) -> int:
        self._measure(memoryview(buffer).nbytes)
        return super().read_into(descriptor, buffer, position)

    def _measure(self, count: int) -> None:
        self.reads_left -= 1
        if count > CONTENT_BYTES_MAX or self.reads_left < 0:
            raise TooMuch(f"a read of {count:,} bytes, and {self.reads_left} more were allowed")


def run(report: Report, seed: int) -> None:
    """Mutate so many thousand blocks."""
    chance = random.Random(seed)
    parser = _Parser(report)
    for number in range(report.rounds):
        original = chance.choice(parser.blocks)
        mutation, mutate = chance.choice(list(MUTATIONS.items()))
        where = f"seed {seed}, round {number}, {mutation} of {original.kind} at {original.position}"
        mutants = []
        for index, mutant in enumerate(mutate(original, chance, MUTANTS)):
            parser.parse(original, mutant, f"{where}, mutant {index}")
            if index % (MUTANTS // FILES) == 0:
                mutants.append(mutant)
        report.count(mutation, MUTANTS)
        for index, mutant in enumerate(mutants):
            parser.walk(original, mutant, f"{where}, file {index}")
        report.count("segments walked over", len(mutants))
        report.finish_round()


class _Parser:
    """Gives mutants to the production code."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self.blocks = originals()
        self._disk = _MeasuringDisk()
        self._valid = {block.position: block for block in self.blocks}

    # --- one block ------------------------------------------------------------------------------

    def parse(self, original: Original, mutant: Mutant, where: str) -> None:
        """Parse a mutant as far as it goes."""
        try:
            self._parse(original, mutant, where)
        except TooManyFindings:
            raise
        except Exception as error:  # noqa: BLE001 - the documented ones were caught where they belong
            self._report.found(f"parsing ended with {error!r}", f"{where}: {mutant.data.hex()}")

    def _parse(self, original: Original, mutant: Mutant, where: str) -> None:
        data, position = mutant.data, original.position
        with suppress(Blank, Broken):
            parse_prefix(data, SEGMENT.seed, position)
        try:
            header = parse_header(data, SEGMENT, position)
            if not mutant.signed and data[:FRONT_BYTES] != original.data[:FRONT_BYTES]:
                self._report.found(f"a changed header was taken for {header}", f"{where}: {data.hex()}")
            content = data[FRONT_BYTES : FRONT_BYTES + header.content_length]
            check_content(header, content)
        except (Blank, Broken, NewerFormat):
            return
        if mutant.signed:
            self._report.count("mutants taken for blocks, as their CRCs fit")
            self._use(header, content, where)
        elif not _is_original(original, header, content):
            self._report.found(f"a mutant was taken for {header}", f"{where}: {data.hex()}")

    def _use(self, header: Header, content: bytes, where: str) -> None:
        """Read what is in a block whose CRCs fit."""
        if header.content_length > CONTENT_BYTES_MAX or header.run_count * RUN_BYTES > header.runs_length:
            self._report.found(f"impossible lengths were taken: {header}", where)
        decode_runs(content[: header.runs_length], header.run_count)
        if header.kind != Kind.DATA:
            return
        try:
            body = body_of(header, pa.py_buffer(content))
            if body.size > BODY_BYTES_MAX:
                self._report.found(f"a body became {body.size:,} bytes", where)
            batch = parse(body, header.mask)
        except (Broken, InvalidBatch):
            return
        # What was parsed can be used without a further look.
        columns.sizes(batch)
        columns.digest(batch)

    # --- a segment ------------------------------------------------------------------------------

    def walk(self, original: Original, mutant: Mutant, where: str) -> None:
        """Walk over a segment in which the mutant stands in the place of the original."""
        data = b"".join(mutant.data if block is original else block.data for block in self.blocks)
        self._disk.hold({PATH: data}, {})
        self._disk.reads_left = READS_PER_BLOCK * (len(data) // 64 + 1)
        try:
            self._walk(mutant, where)
        except TooManyFindings:
            raise
        except Exception as error:  # noqa: BLE001 - the documented ones were caught where they belong
            self._report.found(f"walking ended with {error!r}", f"{where}: {mutant.data.hex()}")

    def _walk(self, mutant: Mutant, where: str) -> None:
        def visit(header: Header, content: pa.Buffer) -> None:
            data = content.to_pybytes()
            valid = self._valid.get(header.position)
            if not mutant.signed and not (valid is not None and _is_original(valid, header, data)):
                self._report.found(f"a walk took a mutant for {header}", where)
            self._use(header, data, where)

        try:
            file = SegmentFile(self._disk, PATH, NAME)
            walk(file, visit=visit)
            for _ in file.headers(file.first.end_position, file.size()):
                pass
        except (Blank, Broken, NewerFormat):
            return
        try:
            file.producers()
        except IntegrityError:
            return


def _is_original(original: Original, header: Header, content: bytes) -> bool:
    """Say whether what was taken is what was written, down to the last byte of the content."""
    if original.header is not None and header != original.header:
        return False
    return original.data[FRONT_BYTES : FRONT_BYTES + len(content)] == content


CAMPAIGN = Campaign(
    name="c14",
    title="bytes that nobody wrote are given to the parser of blocks",
    unit=f"{MUTANTS:,} mutants",
    small=100,
    full=10_000,
    run=run,
)
