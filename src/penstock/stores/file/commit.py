"""Group commit: what several publishers want to append becomes one write and one sync.

Threads that append while another one holds the partition's turn queue up. The first of them then commits for all: small
appends are merged into one block, whose runs keep them apart; a large one stays a block of its own, which its publisher
has encoded before the turn, so that the turn is short. The thread that commits is one of the waiting ones, not a
thread of its own, so that a lone publisher pays for no hand-over.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

import pyarrow as pa

from penstock import columns as cols
from penstock.offsets import Range
from penstock.rows import Appended
from penstock.stores.file.block import (
    FLAG_ZSTD,
    Header,
    Kind,
    Segment,
    aligned,
    block_length,
    content_crc,
    encode_front,
    encode_runs,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.batch import Batch
    from penstock.producers import Run
    from penstock.stores.file.tail import Tail

OWN_BLOCK_BYTES: Final = 64 << 10
"""An append of at least so many bytes is a block of its own, in whatever company."""
MERGED_BYTES_MAX: Final = 1 << 20
GROUP_BYTES_MAX: Final = 8 << 20
"""A group commit takes no more than this, so that the turn goes round."""


class Content(NamedTuple):
    """The runs and body of a DATA block, and all that can be known before its place is."""

    runs: tuple[Run, ...]
    events: int
    mask: int
    runs_bytes: bytes
    body: pa.Buffer
    crc: int
    raw_length: int
    flags: int

    @property
    def length(self) -> int:
        """Of the whole block."""
        return block_length(len(self.runs_bytes), self.body.size)


def encode_content(columns: pa.RecordBatch, runs: Sequence[Run], *, compress: bool = False) -> Content:
    """Encode the content of a DATA block; a body that compressing would not make smaller stays as it is."""
    runs_bytes, body = encode_runs(runs), cols.serialize(columns)
    raw_length, flags = body.size, 0
    if compress:
        packed = pa.compress(body, codec="zstd")
        if packed.size < raw_length:
            body, flags = packed, FLAG_ZSTD
    return Content(
        runs=tuple(runs),
        events=columns.num_rows,
        mask=cols.mask_of(columns.schema.names),
        runs_bytes=runs_bytes,
        body=body,
        crc=content_crc(runs_bytes, body),
        raw_length=raw_length,
        flags=flags,
    )


def encode_data_block(segment: Segment, tail: Tail, content: Content, now: int) -> list[bytes | pa.Buffer]:
    """Return the parts of a DATA block that goes to the end of a log."""
    header = Header(
        kind=Kind.DATA,
        position=tail.position,
        number=tail.number,
        epoch=tail.epoch,
        offset=tail.end,
        span=content.events,
        first_time=now,
        last_time=now,
        durable_number=tail.durable_number,
        durable_offset=tail.durable_end,
        mask=content.mask,
        run_count=len(content.runs),
        runs_length=len(content.runs_bytes),
        body_length=content.body.size,
        content_crc=content.crc,
        raw_length=content.raw_length,
        flags=content.flags,
    )
    padding = aligned(content.body.size) - content.body.size
    parts: list[bytes | pa.Buffer] = [encode_front(segment, header), content.runs_bytes, content.body]
    return [*parts, bytes(padding)] if padding else parts


def encode_marker(segment: Segment, tail: Tail, now: int) -> bytes:
    """Return a MARKER block that goes to the end of a log: a witness of what is durable before it."""
    header = Header(
        kind=Kind.MARKER,
        position=tail.position,
        number=tail.number,
        epoch=tail.epoch,
        offset=tail.end,
        span=0,
        first_time=now,
        last_time=now,
        durable_number=tail.durable_number,
        durable_offset=tail.durable_end,
        mask=0,
        run_count=0,
        runs_length=0,
        body_length=0,
        content_crc=content_crc(b"", b""),
    )
    return encode_front(segment, header)


class Request:
    """One append: what it brings, and what became of it."""

    __slots__ = ("answers", "batch", "content", "error", "leads", "runs", "size", "woken")

    def __init__(self, batch: Batch, runs: Sequence[Run], *, compress: bool = False) -> None:
        self.batch = batch
        self.runs = runs
        self.size: int = batch.columns.get_total_buffer_size()
        # Before the turn, also of a small one: mostly it is alone in its group, and then it is a block as it is.
        self.content = encode_content(batch.columns, runs, compress=compress)
        self.answers: list[Appended] | None = None
        self.error: BaseException | None = None
        self.leads = False
        self.woken: threading.Lock | None = None

    def wake(self) -> None:
        """Let the thread go on that waits for it, if one does."""
        if self.woken is not None and self.woken.locked():
            self.woken.release()

    def result(self) -> list[Appended]:
        """Return the answers, or raise what went wrong."""
        if self.error is not None:
            raise self.error
        assert self.answers is not None
        return self.answers


class Queue:
    """Appends of this process to one partition, committed in groups by one of those who wait.

    `commit` gets a function that takes the group out of the queue, to be called once the turn is had, so that those
    who come late are in it. It sets the answers or the error of each request of the group; what it raises is the error
    of those that have neither.
    """

    def __init__(self, commit: Callable[[Callable[[], list[Request]]], None]) -> None:
        self._commit = commit
        self._lock = threading.Lock()
        self._waiting: deque[Request] = deque()
        self._has_leader = False

    def submit(self, request: Request) -> list[Appended]:
        """Append it, together with whatever else waits."""
        with self._lock:
            self._waiting.append(request)
            request.leads = not self._has_leader
            self._has_leader = True
            if not request.leads:
                request.woken = threading.Lock()
                request.woken.acquire()
        if request.woken is not None:
            try:
                request.woken.acquire()
            except BaseException:  # the caller is interrupted; somebody else must lead, or may do it for nobody
                self._abandon(request)
                raise
        if request.leads:
            self._lead()
        return request.result()

    def _lead(self) -> None:
        group: list[Request] = []

        def take() -> list[Request]:
            with self._lock:
                size = 0
                while self._waiting and (not group or size + self._waiting[0].size <= GROUP_BYTES_MAX):
                    size += self._waiting[0].size
                    group.append(self._waiting.popleft())
            return group

        try:
            self._commit(take)
        except BaseException as error:  # noqa: BLE001 - it is raised by each request's own thread
            if not group:
                # The turn could not be had. Those who wait have waited as well, and would again, one by one.
                with self._lock:
                    group.extend(self._waiting)
                    self._waiting.clear()
            for request in group:
                if request.answers is None and request.error is None:
                    request.error = error
        finally:
            self._choose_leader()
            for request in group:
                request.wake()

    def _choose_leader(self) -> None:
        with self._lock:
            self._has_leader = bool(self._waiting)
            if self._waiting:
                self._waiting[0].leads = True
                self._waiting[0].wake()

    def _abandon(self, request: Request) -> None:
        with self._lock:
            if request in self._waiting:
                self._waiting.remove(request)
        if request.leads:
            self._choose_leader()


class GroupWriter(Protocol):
    """What a group asks of whoever writes it, under the turn."""

    @property
    def compresses(self) -> bool:
        """Whether blocks are compressed."""

    @property
    def end(self) -> int:
        """The next offset."""

    def answer(self, run: Run, now: int) -> Appended | None:
        """Return the answer to a run that must not be stored."""

    def note(self, run: Run, offsets: Range, now: int) -> None:
        """Remember a run that is about to be stored."""

    def write_blocks(self, contents: Sequence[Content], now: int) -> None:
        """Write blocks to the end of the log."""


class Group:
    """The appends of one group commit: what is stored where, and what each is answered."""

    def __init__(self, writer: GroupWriter, requests: list[Request]) -> None:
        self._writer = writer
        self._requests = requests
        self._end = writer.end
        self._answers: list[list[Appended]] = []
        self._blocks: list[Content] = []
        # Small ones, on their way into one block.
        self._merging: list[Batch] = []
        self._merging_runs: list[Run] = []
        self._merging_bytes = 0

    def commit(self, now: int) -> None:
        """Write what is news, and answer everybody."""
        for request in self._requests:
            self._plan(request, now)
        self._finish_merging()
        if self._blocks:
            self._writer.write_blocks(self._blocks, now)
        for request, answers in zip(self._requests, self._answers, strict=True):
            request.answers = answers

    def _plan(self, request: Request, now: int) -> None:
        """Decide which runs of a request are stored, and where."""
        answers: list[Appended] = []
        accepted: list[tuple[Run, Range]] = []
        start = request.batch.start
        for run in request.runs:
            answer = self._writer.answer(run, now)
            if answer is None:
                offsets = Range(self._end, self._end + run.length)
                self._writer.note(run, offsets, now)
                answer = Appended(offsets)
                accepted.append((run, Range(start, start + run.length)))
                self._end = offsets.stop
            answers.append(answer)
            start += run.length
        self._answers.append(answers)
        if len(accepted) < len(request.runs):
            for run, rows in accepted:
                self._merge(request.batch.slice(rows), [run], request.size)
        elif request.size >= OWN_BLOCK_BYTES or len(self._requests) == 1:
            self._finish_merging()
            self._blocks.append(request.content)
        else:
            self._merge(request.batch, request.runs, request.size)

    def _merge(self, batch: Batch, runs: Sequence[Run], size: int) -> None:
        self._merging.append(batch)
        self._merging_runs += runs
        self._merging_bytes += size
        if self._merging_bytes > MERGED_BYTES_MAX:
            self._finish_merging()

    def _finish_merging(self) -> None:
        if self._merging:
            columns = cols.concatenate([batch.columns for batch in self._merging])
            self._blocks.append(encode_content(columns, self._merging_runs, compress=self._writer.compresses))
        self._merging, self._merging_runs, self._merging_bytes = [], [], 0
