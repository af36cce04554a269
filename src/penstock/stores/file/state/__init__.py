"""The small state of a file store: everything but the events, in two SQLite databases.

`control.db` holds subscriptions, cursors, parked rows, settlement records, leases, the schedule and manifests, and
`bulk.db` the payloads of parked rows. Both are in WAL mode and synced at every commit. Writers of all processes take
turns at the same kind of gate as those of the log, so that nobody starves; reads never wait. Every row that a promise
rests on carries a checksum, and every table knows how many rows it has: what is damaged or missing is reported, never
believed, and never invented.

From the bottom up: `sealing` (checksums of rows), `schema`, `tallies` (counts), `connections`, `database` (group
commit), `payloads` and `witnesses` (what several ports share), then a file per port, and `rebuild` for damage.
"""
