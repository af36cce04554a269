"""What the simulator itself sees of a store, and tells the journal: writes under leases, and what can be read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.errors import PenstockError
from penstock.offsets import Gap
from penstock.rows import Commit, Fence, Lease
from penstock.testing.journal import Outcome

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.ports import Store
    from penstock.testing.journal import Journal

READ_BYTES = 1 << 24


def tell_call(
    journal: Journal, store: Store | None, function: Callable[..., Any], args: Sequence[Any], answer: object
) -> None:
    """Tell what a call of the store shows of its leases, right after it was made; errors are answers here.

    Nothing can come between a call and this, so that the order is the true one, whatever its caller was told of it.
    """
    port = getattr(function, "__self__", None)
    if store is None or port is None:
        return
    if port is store.leases:
        if function.__name__ == "acquire" and isinstance(answer, Lease):
            journal.granted(answer.name, answer.epoch)
        elif function.__name__ == "acquire_some" and isinstance(answer, list):
            for lease in answer:
                journal.granted(lease.name, lease.epoch)
    elif port is store.cursors and function.__name__ == "commit":
        commits = args[0]
        refusals = [answer] * len(commits) if isinstance(answer, BaseException) else answer
        assert isinstance(refusals, list)
        for commit, refusal in zip(commits, refusals, strict=True):
            assert isinstance(commit, Commit)
            for fence in commit.fences:
                journal.wrote(*fence, _outcome(refusal))
    elif port in {store.schedule, store.manifests, store.parked, store.cursors}:
        for fence in args:
            if isinstance(fence, Fence):
                journal.wrote(*fence, _outcome(answer))


def _outcome(answer: object) -> Outcome:
    if isinstance(answer, PenstockError):
        return Outcome.FAILED
    return Outcome.UNKNOWN if isinstance(answer, BaseException) else Outcome.OK


def tell_contents(journal: Journal, store: Store) -> list[bytes]:
    """Tell everything that can be read now, anew, and return the payloads; internal topics are nobody's publishes."""
    journal.restarted()
    found: list[bytes] = []
    for topic in store.log.topics():
        if topic.name.startswith("_"):
            continue
        for partition in topic.partitions:
            bounds = store.log.bounds(partition)
            journal.bounds(*partition, bounds.start, bounds.stop)
            position = bounds.start
            while position < bounds.stop:
                for item in store.log.read(partition, position, bytes_max=READ_BYTES):
                    if isinstance(item, Gap):
                        journal.gap(*partition, item.range.start, item.range.stop)
                    else:
                        payloads = [event.data for event in item]
                        journal.stored(*partition, item.range.start, payloads)
                        found += payloads
                    position = item.range.stop
    return found
