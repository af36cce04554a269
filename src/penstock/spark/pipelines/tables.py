"""The table of a projection: Parquet files by bucket of keys, agreed upon by versions, each with its position inside.

::

    <directory>/versions/v…          what holds: the position in the log, and which file each bucket has
    <directory>/data/….parquet       a bucket's states; a file is written once, and never changed
    <directory>/latest/….parquet     the files of the newest version, for pandas, DuckDB, Polars and Spark

* **States and position are one version**, put if absent (`penstock.versions`). So the table says by itself which events
  are in it, and nothing else needs to be kept: no checkpoint, no lock.
* A file has the columns `key`, those of the state (`value` for one without fields), and `_state`, which is the state
  as JSON: exactly what the next event is folded into. Rows are in the order of their keys.
* `latest` is a link to a directory that never changes, so whoever reads it sees one version. Old ones stay for the last
  few versions; then they, and files that nobody names, are removed.

Reading needs no Spark.
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec
import numpy as np
import xxhash

from penstock.clock import Clock, SystemClock
from penstock.errors import IntegrityError, UsageError
from penstock.versions import Versions, sync_directory

if TYPE_CHECKING:
    import numpy.typing as npt
    import pyarrow as pa

FORMAT: Final = 1
KEY: Final = "key"
STATE: Final = "_state"
BUCKETS: Final = 64
BUCKETS_MAX: Final = 4_096
BUCKET_SEED: Final = 42
"""That of Spark's own `xxhash64`; and not that of partitions or slots: else a partition had keys of few buckets."""
ORPHAN_SECONDS: Final = 3_600.0
"""A file that no version names may be of somebody who is about to name it; after so long it is not."""

_DATA: Final = "data"
_VERSIONS: Final = "versions"
_SNAPSHOTS: Final = "snapshots"
_LATEST: Final = "latest"


class BucketFile(msgspec.Struct, frozen=True):
    """The states of one bucket."""

    name: str
    rows: int


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """One version of the table."""

    format: int = FORMAT
    projection: str
    version: int
    """The projection's, as its author counts."""
    topic: str
    log_id: str
    offsets: tuple[int, ...]
    """The next offset of each partition: everything before is in the table, and nothing else."""
    buckets: int
    files: dict[int, BucketFile] = {}
    events: int = 0
    """How many events were folded, since the beginning."""

    @property
    def keys(self) -> int:
        """How many states there are."""
        return sum(file.rows for file in self.files.values())


_READ: Final = msgspec.json.Decoder(Manifest)
_WRITE: Final = msgspec.json.Encoder()


class Held(NamedTuple):
    """What holds now."""

    number: int
    manifest: Manifest


class Table:
    """A table in a directory, which is made with its first version."""

    def __init__(self, directory: Path, *, clock: Clock | None = None) -> None:
        self.directory = directory
        self._versions = Versions(directory / _VERSIONS)
        self._clock = clock or SystemClock()

    @property
    def data(self) -> Path:
        """The directory of the files."""
        return self.directory / _DATA

    @property
    def latest_link(self) -> Path:
        """The directory of the newest version's files."""
        return self.directory / _LATEST

    def latest(self) -> Held | None:
        """Return what holds; None if nothing was written yet."""
        found = self._versions.latest()
        return None if found is None else Held(found.number, self._manifest(found.number, found.body))

    def _manifest(self, number: int, body: bytes) -> Manifest:
        try:
            manifest = _READ.decode(body)
        except msgspec.DecodeError as error:
            raise IntegrityError(f"version {number} of {self.directory} is no table of a projection: {error}") from None
        if manifest.format > FORMAT:
            raise UsageError(f"{self.directory} was written by a newer version of Penstock: upgrade, to read it")
        return manifest

    # --- reading ------------------------------------------------------------------------------

    def get(self, key: str) -> bytes | None:
        """Return the state of a key, as JSON; None if it has none."""
        held = self._held()
        file = held.manifest.files.get(bucket_of(key, held.manifest.buckets))
        if file is None:
            return None
        import pyarrow.parquet as pq

        rows = pq.read_table(self.data / file.name, columns=[STATE], filters=[(KEY, "=", key)])
        return rows.column(STATE)[0].as_py().encode() if rows.num_rows else None

    def items(self) -> Iterator[tuple[str, bytes]]:
        """Yield all keys with their states, bucket by bucket and by key in each."""
        import pyarrow.parquet as pq

        for _, file in sorted(self._held().manifest.files.items()):
            for batch in pq.ParquetFile(self.data / file.name).iter_batches(columns=[KEY, STATE]):
                for key, state in zip(batch.column(KEY).to_pylist(), batch.column(STATE).to_pylist(), strict=True):
                    yield key, state.encode()

    def _held(self) -> Held:
        held = self.latest()
        if held is None:
            raise UsageError(f"there is no table in {self.directory}: `penstock pipeline project` makes one")
        return held

    # --- writing ------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Make the directory that files are written to."""
        self.data.mkdir(parents=True, exist_ok=True, mode=0o700)

    def put(self, number: int, manifest: Manifest) -> bool:
        """Make this the next version, if nobody else has made one; its files are on the medium."""
        sync_directory(self.data)
        doomed = self._named(self._versions.numbers())
        if not self._versions.put(number, _WRITE.encode(manifest)):
            return False
        self.show()
        self._remove(doomed)
        return True

    def discard(self, names: set[str]) -> None:
        """Remove files that were written for nothing."""
        for name in names:
            (self.data / name).unlink(missing_ok=True)

    def show(self) -> None:
        """Let `latest` be what holds, if it is not; whoever was killed before that is made up for by the next one."""
        shown = -1
        while (held := self.latest()) is not None and held.number != shown:  # it may move on meanwhile
            with suppress(FileNotFoundError):  # its files are gone already: there are newer ones
                self._show(held)
            shown = held.number

    def _show(self, held: Held) -> None:
        name = f"{held.number:020d}"
        snapshot = self.directory / _SNAPSHOTS / name
        with suppress(OSError):
            if os.readlink(self.latest_link) == f"{_SNAPSHOTS}/{name}":  # noqa: PTH115 - the text of it is wanted
                return
        if not snapshot.exists():
            snapshot.parent.mkdir(exist_ok=True, mode=0o700)
            draft = snapshot.with_name(f".{uuid.uuid4().hex}")
            draft.mkdir(mode=0o700)
            try:
                for file in held.manifest.files.values():
                    os.link(self.data / file.name, draft / file.name)
                with suppress(OSError):  # somebody else has made the very same
                    draft.rename(snapshot)
            finally:
                shutil.rmtree(draft, ignore_errors=True)
        link = self.directory / f".{uuid.uuid4().hex}.latest"
        link.symlink_to(f"{_SNAPSHOTS}/{name}")
        link.replace(self.latest_link)

    # --- what is left over --------------------------------------------------------------------

    def _named(self, numbers: list[int]) -> set[str]:
        """Return the files that these versions name."""
        names: set[str] = set()
        for number in numbers:
            with suppress(FileNotFoundError):  # removed at this very moment
                names |= {file.name for file in self._manifest(number, self._versions.read(number)).files.values()}
        return names

    def _remove(self, doomed: set[str]) -> None:
        """Remove what versions have named that are gone, and what nobody has named for long."""
        numbers = self._versions.numbers()
        kept = self._named(numbers)
        self.discard(doomed - kept)
        before = self._clock.time_us() / 1e6 - ORPHAN_SECONDS
        for path in self.data.iterdir():
            with suppress(FileNotFoundError):
                if path.name not in kept and path.stat().st_mtime < before:
                    path.unlink()
        for path in (self.directory / _SNAPSHOTS).iterdir():
            old = path.name.isdigit() and int(path.name) < min(numbers)
            with suppress(FileNotFoundError):
                if old or (path.name.startswith(".") and path.stat().st_mtime < before):
                    shutil.rmtree(path, ignore_errors=True)


def bucket_of(key: str, buckets: int) -> int:
    """Return the bucket of a key."""
    return int(np.uint64(xxhash.xxh64_intdigest(key.encode(), BUCKET_SEED)).astype(np.int64)) % buckets


def buckets_of(keys: pa.Array, buckets: int) -> npt.NDArray[np.int32]:
    """Return the bucket of each key, all at once; the same as `pmod(xxhash64(key), buckets)` in Spark."""
    import pyarrow as pa

    from penstock.columns import key_hashes

    hashes, _ = key_hashes(pa.record_batch({KEY: keys.cast(pa.binary())}), BUCKET_SEED)
    return (hashes.view(np.int64) % buckets).astype(np.int32)
