"""The rounds of C11, each in a process of its own: a disk that is full, and descriptors that are used up."""

from __future__ import annotations

import errno
import gc
import os
import random
import resource
import shutil
import tempfile
from contextlib import contextmanager, suppress
from itertools import count, islice
from pathlib import Path
from typing import TYPE_CHECKING, Final

from penstock.errors import IntegrityError, PenstockError, StoreFull
from penstock.testing.campaigns.exhaustion.client import Client

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from penstock.testing.campaigns.nursery import Child

ACTIONS: Final = 12
"""How much is done before something runs out, and how much meanwhile."""
SPACE_BYTES: Final = 3_000_000
"""What is free before it is published away, the reserve included."""
REFUSALS: Final = 10
"""After so many in a row, large and small, the disk is full."""
COMMITS_IN_RESERVE: Final = 10
FREE_DESCRIPTORS_MAX: Final = 12


# --- the disk is full ---------------------------------------------------------------------------


class Ballast:
    """A file that takes space away from everybody else."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / "ballast"

    @contextmanager
    def leaving(self, free_bytes: int) -> Iterator[None]:
        """In this block at most so many bytes of the file system are free."""
        status = os.statvfs(self._path.parent)
        excess = status.f_bavail * status.f_frsize - free_bytes
        descriptor = os.open(self._path, os.O_CREAT | os.O_WRONLY)
        try:
            if excess > 0:
                os.posix_fallocate(descriptor, 0, excess)
            yield
        finally:
            os.close(descriptor)
            self._path.unlink()


def is_full(error: Exception) -> bool:
    """Say whether an error tells that the disk is full."""
    return isinstance(error, StoreFull) or (isinstance(error, OSError) and error.errno == errno.ENOSPC)


def fill_disk(child: Child, *, directory: str, seed: int) -> None:
    """Use a store on a disk that is full from time to time."""
    chance = random.Random(seed)
    root = Path(directory) / "store"
    try:
        client, ballast = Client(root, chance, is_full), Ballast(root.parent)
        work_normally(client, chance)
        if chance.random() < 0.3:
            client.tries(client.die_in_a_sync)
        if chance.random() < 0.25:
            publish_into_the_reserve(client, ballast)
        else:
            free_bytes = chance.choice([0, 4096, chance.randrange(100_000), chance.randrange(2_000_000)])
            with ballast.leaving(free_bytes), client.lacking():
                work(client, chance)
        goes_on(client, chance)
        finish(child, client)
    finally:
        shutil.rmtree(root)


def publish_into_the_reserve(client: Client, ballast: Ballast) -> None:
    """Publish until not even the smallest fits: what is left is enough to settle, and to remove what was read."""
    with ballast.leaving(SPACE_BYTES):
        with client.lacking():
            refusals = 0
            while refusals < REFUSALS:
                refusals = 0 if client.tries(client.publish) else refusals + 1
        for _ in range(COMMITS_IN_RESERVE):
            client.tries(client.commit)
        client.tries(client.trim)


# --- descriptors are used up --------------------------------------------------------------------


@contextmanager
def few_descriptors(free: int) -> Iterator[None]:
    """In this block the process can open so many files more, and no others."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    descriptors = set(open_descriptors())
    # The limit is on numbers, and the lowest that are free are given first.
    unused = (number for number in count() if number not in descriptors)
    limit = next(islice(unused, free, None))
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def open_descriptors() -> list[int]:
    """Return the numbers of all files that this process has open."""
    gc.collect()  # a store that was given up may hold some until then
    found = []
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - the numbers are wanted, not paths
        with suppress(OSError):  # the one by which they were listed
            os.fstat(int(name))
            found.append(int(name))
    return found


def is_about_descriptors(error: Exception) -> bool:
    """Say whether an error tells that no file can be opened; it must not speak of damage."""
    if isinstance(error, OSError):
        return error.errno == errno.EMFILE
    return isinstance(error, PenstockError) and not isinstance(error, IntegrityError)


def use_up_descriptors(child: Child, *, directory: str, seed: int) -> None:
    """Use a store while the process can hardly open a file."""
    chance = random.Random(seed)
    root = Path(directory) / "store"
    try:
        client = Client(root, chance, is_about_descriptors)
        work_normally(client, chance)
        client.store.close()
        before = len(open_descriptors())
        client.reopen()
        if chance.random() < 0.3:
            client.tries(client.die_in_a_sync)
        with few_descriptors(chance.randrange(FREE_DESCRIPTORS_MAX)), client.lacking():
            work(client, chance)
        goes_on(client, chance)
        client.store.close()
        left = len(open_descriptors()) - before
        if left > 0:
            client.complaints.append(f"{left} descriptors were left open")
        finish(child, client)
    finally:
        shutil.rmtree(root)


# --- both ---------------------------------------------------------------------------------------


def actions_of(client: Client) -> list[Callable[[], None]]:
    """Return everything that a client can do."""
    return [client.create, client.publish, client.commit, client.park, client.schedule, client.trim, client.read]


def work_normally(client: Client, chance: random.Random) -> None:
    """Do everything at least once."""
    client.tries(client.create)
    for action in [*actions_of(client), *chance.choices(actions_of(client), k=ACTIONS)]:
        client.tries(action)


def work(client: Client, chance: random.Random) -> None:
    """Do some of everything, mostly publish."""
    for action in chance.choices([*actions_of(client), client.publish, client.publish], k=ACTIONS):
        client.tries(action)


def goes_on(client: Client, chance: random.Random) -> None:
    """Expect that everything works at once now, in the store that is open or in one that is opened anew."""
    if chance.random() < 0.3:
        client.tries(client.reopen)
    client.settle()
    for action in actions_of(client):
        client.tries(action)
    client.look()


def finish(child: Child, client: Client) -> None:
    """Look at everything once more, in a store that was opened anew, and tell all complaints."""
    client.reopen()
    client.look()
    client.verify()
    for complaint in dict.fromkeys(client.complaints):
        child.tell(complaint)
    child.tell(client.tried)


def warm_up() -> None:
    """Use a store once, so that everything that is imported or set up at its first use is."""
    directory = Path(tempfile.mkdtemp(prefix="penstock-", dir="/tmp"))
    try:
        chance = random.Random(0)
        client = Client(directory / "store", chance, is_full)
        work_normally(client, chance)
        client.look()
        client.verify()
    finally:
        shutil.rmtree(directory)
