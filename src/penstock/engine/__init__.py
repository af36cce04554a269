"""Deciding what is delivered, to whom, when and again: pure, synchronous, without I/O, threads, chance or a clock.

A `Shard` is one part of a subscription: the events of one partition, a cursor, and whoever is given them. It is told
what happened as small frozen values (`messages`: a read came back, the consumer asks for more, an ack, a failure,
time passed) and answers with what is to be done (read this range, hand this over, fetch these parked rows, declare
this gap). What has become settled is collected until somebody takes it as a `Step`, to be written in one transaction.

The engine never sees an event's payload: a range that was read comes as a `Chunk` of columns (lane, expiry, size)
with an opaque source that is handed back with each delivery. Whole ranges are decided at once; nothing here loops
over events unless something is wrong with them, or they are handed over one by one.

From the bottom up: `states` (what may become of an event, one table), `policy` (what a user may choose), `messages`;
`pages` (events in memory), `lanes` (their order), `aside` (events that were parked), `progress` (what is settled and
not yet written), `timers`, `deadlines` and `rate`; `work` (what becomes of an event), `reading` (of the log),
`suspects` (what may have killed a process); `shard` (the machine). Beside them `lag`: how far behind; and one look at
all shards.
"""
