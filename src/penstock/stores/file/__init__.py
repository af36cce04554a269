"""`file:`, a store in a directory: the embedded default, shared by the processes of one machine.

It needs no server. Events are in segment files, which this package specifies below; subscriptions, parked events,
leases and the schedule are in two SQLite databases. Any number of processes may publish to and read from the same
directory: writers take turns (`gate`), readers take no lock at all. An acknowledged event is on the medium.

::

    penstock.json                          that this is a store, its format and its id; written last
    locks                                  no content: bytes to lock, two per gate and one per member
    tails                                  128 bytes per partition: how its log ends (`tail`)
    control.db  bulk.db                    the small state, and the payloads of parked events
    members/<number>.json                  who has the store open
    members/<number>.told                  what it has in hand, as it tells others (`members`)
    topics/<log id>/topic.json             name and settings (`topics`)
    topics/<log id>/<partition>/
        <base>-<epoch>.seg                 a segment: blocks, one after the other
        <base>-<epoch>.idx                 the index of a sealed one; disposable
        first                              where retention has put the beginning
        unnamed.seg                        a segment that is being made; it gets its name once it is synced
    quarantine/                            what was cut off or replaced, for somebody to look at

Blocks
======

A segment is a series of blocks, without anything between them. Numbers are little-endian. A block is::

    prefix (64 bytes) · header (128) · producer runs (48 each, filled up to 64) · body (filled up to 64)

The prefix is the same in every version, for ever::

    0   8s   magic "PENSTOCK"
    8   u16  format version, 1
    10  u16  kind: 1 SEGMENT, 2 DATA, 3 MARKER, 4 GAP
    12  u32  length of the header
    16  u32  length of the runs, with their filling
    20  u32  zero
    24  u64  length of the body, without its filling
    32  u64  own position in the file, in bytes
    40  u64  number of the block, counted through all segments of the partition
    48  12   zero
    60  u32  CRC32C of the 60 bytes before

The header::

    0   16s  log id
    16  u32  partition
    20  u32  flags: 1 the body is compressed with Zstandard
    24  u64  epoch of the writer; never decreases within a segment
    32  u64  base offset of the segment
    40  u64  offset of the first event; the next event's in blocks that have none
    48  u64  how many offsets the block occupies
    56  i64  time of the first append, microseconds since 1970 UTC
    64  i64  time of the last append, which is `appended_at` of all its events
    72  u64  durable number: all blocks below it were on the medium when this one was written
    80  u64  durable offset: all offsets below it were
    88  u32  column mask (`columns`): which columns the body has
    92  u32  number of runs
    96  u64  length of the body before compression
    104 u32  CRC32C of runs and body, fillings of the runs included
    108 16   zero
    124 u32  CRC32C of the 124 bytes before, beginning with the CRC of the prefix

The CRC of a prefix begins with the CRC32C of the segment's salt, 16 random bytes, in all blocks but the first; so bytes
of another file, or of an earlier life of this one, and payloads that look like blocks never match. A run is::

    0   16s  producer
    16  u64  epoch of the producer
    24  u64  first sequence
    32  u32  number of events
    36  u32  zero
    40  u64  digest of these events (`columns.digest`)

* **SEGMENT** is the first block of each file, and synced before the file gets its name. Its body is the length of the
  JSON that follows as u32; then JSON (salt, topic, partition, slot; of the segment before: base, epoch, sealed length,
  end; the latest append time before); then the producers as they were when the segment began (`deduplication`).
* **DATA** holds events; the body is one Arrow IPC record batch message without schema (`columns.serialize`).
* **MARKER** has no body. It is a witness: its durable number proves that the block before it was on the medium.
* **GAP** occupies offsets that are lost; the body is the reason, as text.

A DATA block of one event `b"hi"`, in a segment of base 100 whose salt is 00 01 … 0f, of log 11…11, partition 2. It
stands at byte 576 with number 42 and takes offset 105; epoch 3; its one run is sequence 7 of producer 22…22. ::

    0000  50 45 4e 53 54 4f 43 4b 01 00 02 00 80 00 00 00
    0010  40 00 00 00 00 00 00 00 b0 00 00 00 00 00 00 00
    0020  40 02 00 00 00 00 00 00 2a 00 00 00 00 00 00 00
    0028  00 00 00 00 00 00 00 00 00 00 00 00 d7 ed fd 7c
    0040  11 11 11 11 11 11 11 11 11 11 11 11 11 11 11 11
    0050  02 00 00 00 00 00 00 00 03 00 00 00 00 00 00 00
    0060  64 00 00 00 00 00 00 00 69 00 00 00 00 00 00 00
    0070  01 00 00 00 00 00 00 00 00 40 20 46 48 47 06 00
    0080  00 40 20 46 48 47 06 00 2a 00 00 00 00 00 00 00
    0090  69 00 00 00 00 00 00 00 00 02 00 00 01 00 00 00
    00a0  b0 00 00 00 00 00 00 00 63 d8 99 53 00 00 00 00
    00b0  00 00 00 00 00 00 00 00 00 00 00 00 35 4d e2 85
    00c0  22 22 22 22 22 22 22 22 22 22 22 22 22 22 22 22
    00d0  00 00 00 00 00 00 00 00 07 00 00 00 00 00 00 00
    00e0  01 00 00 00 00 00 00 00 c0 3e b5 83 5f ad f4 f5
    00f0  00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00
    0100  ff ff ff ff 98 00 00 00 14 00 00 00 00 00 00 00
    0110  0c 00 16 00 06 00 05 00 08 00 0c 00 0c 00 00 00
    0120  00 03 04 00 18 00 00 00 10 00 00 00 00 00 00 00
    0130  00 00 0a 00 18 00 0c 00 04 00 08 00 0a 00 00 00
    0140  4c 00 00 00 10 00 00 00 01 00 00 00 00 00 00 00
    0150  00 00 00 00 03 00 00 00 00 00 00 00 00 00 00 00
    0160  00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00
    0170  08 00 00 00 00 00 00 00 08 00 00 00 00 00 00 00
    0180  02 00 00 00 00 00 00 00 00 00 00 00 01 00 00 00
    0190  01 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00
    01a0  00 00 00 00 02 00 00 00 68 69 00 00 00 00 00 00
    01b0  00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00

What ends where
===============

Space is allocated ahead, so a segment ends with zeros; it is cut when the next one begins. The tail record says how far
the log is durable; without one that can be believed, the active segment is walked over (`scan`, `recovery`). An offset
is readable once it is durable, or, in a topic with durability `os`, once it is written.
"""

from __future__ import annotations
