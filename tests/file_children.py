"""Programs for tests of the file store with several processes, and the faulty disk that they and the tests use.

A program is started as `python file_children.py <program> <arguments as JSON>`. It answers on stdout, one JSON value
per line, and takes what it is told from stdin. `Child` is the other end of it, for the process that starts it.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.errors import PenstockError
from penstock.ports import Store
from penstock.rows import Appended, Manifest, Partition, TopicSettings
from penstock.settings import FileSettings
from penstock.stores.file.platform import Platform, SystemDisk
from penstock.stores.file.store import FileStore
from penstock.testing.conformance.builders import PLENTY, a_cursor, a_part, append, commit
from penstock.testing.conformance.builders import a_shard as shard_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from _typeshed import ReadableBuffer

TOPIC = "orders"
END_SECONDS = 30.0


# --- the other end ----------------------------------------------------------------------------


class Child:
    """A program that runs in a process of its own."""

    def __init__(self, program: str, **arguments: Any) -> None:
        command = [sys.executable, __file__, program, json.dumps(arguments)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.pid = self._process.pid

    def tell(self, *words: Any) -> None:
        """Send a line."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(words) + "\n")
        self._process.stdin.flush()

    def hear(self) -> Any:
        """Return the next line, waiting for it; it is an error if the child has ended instead."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the child has ended with {self._process.wait()}"
        return json.loads(line)

    def ask(self, *words: Any) -> Any:
        """Send a line and return the answer."""
        self.tell(*words)
        return self.hear()

    def hear_all(self) -> list[Any]:
        """Return all whole lines that are still to come, up to the child's end."""
        assert self._process.stdout is not None
        # A killed process may have been in the middle of a line.
        return [json.loads(line) for line in self._process.stdout if line.endswith("\n")]

    def signal(self, number: int) -> None:
        """Send it a signal."""
        os.kill(self.pid, number)

    def kill(self) -> None:
        """End it the hard way, and wait until it is gone."""
        if self._process.poll() is None:
            self.signal(signal.SIGKILL)
        self._process.wait()

    def end(self) -> int:
        """Close its stdin, and wait until it has ended by itself."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        return self._process.wait(END_SECONDS)

    def dispose(self) -> None:
        """Leave nothing of it behind."""
        self.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):  # what it was told last never reached it
                pipe.close()


# --- the disk ---------------------------------------------------------------------------------


class ScriptedDisk(SystemDisk):
    """The machine's disk, where a test steps in before single operations on segments.

    Each hook gets the file's path, and may raise. `on_write` returns how many bytes go out, or None for all of them.
    """

    def __init__(self, *, syncs: bool = True) -> None:
        self._paths: dict[int, Path] = {}
        self._syncs = syncs
        self.synced: list[int] = []
        """The inode numbers of the segments that were synced, or tried to."""
        self.on_sync: Callable[[Path], None] = lambda _: None
        self.on_allocate: Callable[[Path], None] = lambda _: None
        self.on_write: Callable[[Path], int | None] = lambda _: None
        self.on_truncate: Callable[[Path], None] = lambda _: None

    def open(self, path: Path, *, create: bool = False, exclusive: bool = False, write: bool = True) -> int:
        descriptor = super().open(path, create=create, exclusive=exclusive, write=write)
        self._paths[descriptor] = path
        return descriptor

    def _segment(self, descriptor: int) -> Path | None:
        path = self._paths.get(descriptor)
        return path if path is not None and path.suffix == ".seg" else None

    def sync(self, descriptor: int) -> None:
        path = self._segment(descriptor)
        if path is not None:
            self.synced.append(self.inode(descriptor))
            self.on_sync(path)
        if self._syncs:
            super().sync(descriptor)

    def sync_directory(self, path: Path) -> None:
        if self._syncs:
            super().sync_directory(path)

    def allocate(self, descriptor: int, position: int, count: int) -> None:
        path = self._segment(descriptor)
        if path is not None:
            self.on_allocate(path)
        super().allocate(descriptor, position, count)

    def truncate(self, descriptor: int, length: int) -> None:
        path = self._segment(descriptor)
        if path is not None:
            self.on_truncate(path)
        super().truncate(descriptor, length)

    def write(self, descriptor: int, data: ReadableBuffer, position: int) -> int:
        return self._write_part(descriptor, [data], position, super().write_many)

    def write_many(self, descriptor: int, buffers: Sequence[ReadableBuffer], position: int) -> int:
        return self._write_part(descriptor, buffers, position, super().write_many)

    def _write_part(
        self,
        descriptor: int,
        buffers: Sequence[ReadableBuffer],
        position: int,
        write: Callable[[int, Sequence[ReadableBuffer], int], int],
    ) -> int:
        path = self._segment(descriptor)
        count = self.on_write(path) if path is not None else None
        if count is None:
            return write(descriptor, buffers, position)
        return write(descriptor, [b"".join(map(bytes, buffers))[:count]], position)


class Once:
    """A hook that raises the first time, or so many times, and counts how often it was called."""

    def __init__(self, error: int, *, times: int = 1) -> None:
        self._error = error
        self._times = times
        self.calls = 0

    def __call__(self, path: Path) -> None:
        self.calls += 1
        if self.calls <= self._times:
            raise OSError(self._error, os.strerror(self._error), str(path))


# --- what both ends do ------------------------------------------------------------------------


def open_at(root: str | Path, disk: SystemDisk | None = None, **settings: Any) -> FileStore:
    """Open a store; without markers by itself, unless asked for."""
    options: dict[str, Any] = {"marker_seconds": 3600.0, "runtime_directory": str(Path(root).parent)} | settings
    return FileStore(Path(root), settings=FileSettings(**options), platform=Platform(disk=disk or SystemDisk()))


def the_partition(store: Store) -> Partition:
    """Return the first partition of the topic that all tests use, which is created at the first call."""
    return store.log.create_topic(TOPIC, TopicSettings()).partitions[0]


def producer_of(number: int) -> bytes:
    """Return a lasting producer."""
    return bytes([number]) * 6 + b"\x40" + bytes([number]) * 9


def payload_of(number: int, sequence: int) -> bytes:
    """Return what producer `number` publishes with a sequence; long enough to cross pages."""
    return b"%d:%d:" % (number, sequence) + bytes([sequence % 251]) * (sequence * 37 % 200)


def send(store: Store, partition: Partition, number: int, first: int, count: int) -> Appended:
    """Append so many events of a producer, from a sequence on."""
    payloads = [payload_of(number, sequence) for sequence in range(first, first + count)]
    [answer] = append(store, partition, a_part(*payloads, producer=producer_of(number), first=first))
    return answer


def describe(answer: Appended) -> dict[str, Any]:
    """Return an answer as JSON."""
    return {
        "start": answer.offsets.start if answer.offsets is not None else None,
        "stop": answer.offsets.stop if answer.offsets is not None else None,
        "duplicate": answer.duplicate,
        "refused": type(answer.refused).__name__ if answer.refused else None,
    }


def blame(error: Exception) -> dict[str, Any]:
    """Return an error as JSON."""
    return {
        "error": type(error).__name__,
        "known": isinstance(error, PenstockError),
        "pid": getattr(error, "pid", None),
        "text": str(error),
    }


def tell(value: Any) -> None:
    """Answer."""
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


def told() -> Iterator[list[Any]]:
    """Yield what this program is told, line by line."""
    for line in sys.stdin:
        yield json.loads(line)


# --- programs ---------------------------------------------------------------------------------


def publish(*, root: str, number: int, first: int = 0, per_append: int = 3, until: int, **settings: Any) -> None:
    """Publish from the first line on stdin until the log has reached an offset; tell each answer at once."""
    store = open_at(root, **settings)
    partition = the_partition(store)
    tell("ready")
    next(told())
    stop = 0
    while stop < until:
        answer = send(store, partition, number, first, per_append)
        assert answer.offsets is not None
        tell([first, answer.offsets.start])
        first, stop = first + per_append, answer.offsets.stop
    store.close()


class Obedient:
    """A program that does what it is told, one thing at a time, and answers each."""

    def __init__(self, root: str, **settings: Any) -> None:
        self._root, self._settings = root, settings
        self._disk = ScriptedDisk()
        self._store = open_at(root, self._disk, **settings)
        self._partition = the_partition(self._store)
        self._heads = self._store.log.heads([self._partition])

    def send(self, number: int, first: int, count: int) -> Any:
        return describe(send(self._store, self._partition, number, first, count))

    def hold(self, number: int, first: int, count: int) -> Any:
        """Append, but stay inside of the turn until the next line."""

        def wait(_: Path) -> None:
            self._disk.on_sync = lambda _: None
            tell("in turn")
            next(told())

        self._disk.on_sync = wait
        return self.send(number, first, count)

    def read(self, start: int) -> Any:
        found = self._store.log.read(self._partition, start, bytes_max=PLENTY)
        return [item.range.stop for item in found]

    def heads(self) -> Any:
        return self._heads.read().tolist()

    def synced(self) -> Any:
        return self._disk.synced

    def acquire(self, name: str, seconds: float) -> Any:
        return self._store.leases.acquire(name, str(os.getpid()), seconds) is not None

    def renew_topic(self) -> Any:
        self._partition = the_partition(self._store)
        return self._partition.log_id


def obey(*, root: str, **settings: Any) -> None:
    """Run an `Obedient`."""
    obedient = Obedient(root, **settings)
    tell("ready")
    for action, *arguments in told():
        try:
            tell(getattr(obedient, action)(*arguments))
        except Exception as error:  # noqa: BLE001 - whoever told decides what it means
            tell(blame(error))


def contend(*, root: str, number: int, rounds: int, **settings: Any) -> None:
    """Do, from the first line on stdin, what the other contenders do at the same time; tell all that came of it."""
    store = open_at(root, **settings)
    tell("ready")
    next(told())
    tell(contended(store, number, rounds))
    for _ in told():  # whoever leaves gives up its leases, so all stay to the end
        pass
    store.close()


def contended(store: Store, number: int, rounds: int) -> dict[str, Any]:
    """Append runs of one's own and runs that all have, and want leases, manifests and cursors."""
    partition = the_partition(store)
    [topic] = [topic for topic in store.log.topics() if topic.name == TOPIC]
    shared, own, leases, manifests, refused = [], [], [], [], 0
    for step in range(rounds):
        shared.append(describe(send(store, partition, 0, step * 3, 3)))
        own.append(describe(send(store, partition, number, step * 2, 2)))
        lease = store.leases.acquire(f"lease-{step}", str(number), 600)
        if lease is not None:
            leases.append([lease.name, lease.epoch])
        manifest = Manifest(sink="lake", query="q", batch=step, body=b"%d" % number)
        manifests.append(store.manifests.prepare(manifest).body.decode())
        cursor = a_cursor(shard_of(topic, slot=number), own[-1]["stop"])
        refused += commit(store, cursor) is not None
    return {"shared": shared, "own": own, "leases": leases, "manifests": manifests, "refused": refused}


def fork(*, root: str, **settings: Any) -> None:
    """Fork twice with an open store: in silence, and while a thread is in its turn. See the test."""
    disk = ScriptedDisk()
    store = open_at(root, disk, **settings)
    partition = the_partition(store)
    send(store, partition, 1, 0, 1)
    store.leases.acquire("lease", "parent", 600)
    _run_forked(lambda: _use_after_fork(store, partition, root))
    tell({"parent": describe(send(store, partition, 1, 1, 1))})

    inside, leave = threading.Event(), threading.Event()

    def wait(_: Path) -> None:
        disk.on_sync = lambda _: None
        inside.set()
        leave.wait()

    disk.on_sync = wait
    thread = threading.Thread(target=lambda: tell({"held": describe(send(store, partition, 1, 2, 1))}))
    thread.start()
    inside.wait()
    _run_forked(lambda: _wait_after_fork(root))
    tell("still in turn")
    next(told())
    leave.set()
    thread.join()
    tell({"parent": describe(send(store, partition, 1, 3, 1))})
    store.close()


def _run_forked(work: Callable[[], None]) -> None:
    child = os.fork()
    if child == 0:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - a test reads it
            tell({"failed": repr(error)})
        # Runs what is registered for the end of a program, as a worker that ends does.
        sys.exit(0)
    _, status = os.waitpid(child, 0)
    tell({"status": status})


def _use_after_fork(store: FileStore, partition: Partition, root: str) -> None:
    try:
        send(store, partition, 2, 0, 1)
    except PenstockError as error:
        tell({"inherited": blame(error)})
    own = open_at(root)
    tell({"child": describe(send(own, the_partition(own), 2, 0, 1))})
    own.close()
    store.close()
    del own, store
    gc.collect()


def _wait_after_fork(root: str) -> None:
    own = open_at(root, stall_seconds=0.3)
    try:
        send(own, the_partition(own), 2, 1, 1)
    except PenstockError as error:
        tell({"child": blame(error), "parent_pid": os.getppid()})
    own.close()


PROGRAMS: dict[str, Callable[..., None]] = {"publish": publish, "obey": obey, "contend": contend, "fork": fork}

if __name__ == "__main__":
    PROGRAMS[sys.argv[1]](**json.loads(sys.argv[2]))
