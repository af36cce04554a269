"""C11 in small; and that it would find what it looks for."""

from __future__ import annotations

import errno
import os
import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from penstock.errors import PenstockError, StateMissing, StoreError, StoreFull
from penstock.offsets import Range
from penstock.rows import Appended, Commit
from penstock.testing.campaigns.campaign import Report
from penstock.testing.campaigns.exhaustion import CAMPAIGN, mounted
from penstock.testing.campaigns.exhaustion import rounds as exhaustion_rounds
from penstock.testing.campaigns.exhaustion.client import Client
from penstock.testing.campaigns.exhaustion.rounds import (
    Ballast,
    few_descriptors,
    is_about_descriptors,
    is_full,
    use_up_descriptors,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence


@pytest.mark.skipif(CAMPAIGN.obstacle() is not None, reason=str(CAMPAIGN.obstacle()))
def test_nothing_that_runs_out_breaks_a_promise() -> None:
    report = Report(rounds=CAMPAIGN.small)
    CAMPAIGN.run(report, 1)
    assert report.findings == []
    assert report.tried["publish: StoreFull"] > 0
    assert report.tried["publish: ok all the same"] > 0


class Listener:
    """Stands for a child, and keeps what it tells."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def tell(self, value: Any) -> None:
        self.told.append(value)

    @property
    def complaints(self) -> list[str]:
        return [value for value in self.told if isinstance(value, str)]


@pytest.mark.parametrize("seed", range(3))
def test_used_up_descriptors_break_no_promise_without_root_either(root: Path, seed: int) -> None:
    listener = Listener()
    use_up_descriptors(listener, directory=str(root.parent), seed=seed)  # type: ignore[arg-type]
    assert listener.complaints == []


# --- planted bugs -----------------------------------------------------------------------------


def test_a_descriptor_that_is_left_open_is_found(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leaked: list[int] = []
    monkeypatch.setattr(exhaustion_rounds, "goes_on", lambda *_: leaked.append(os.open(os.devnull, os.O_RDONLY)))
    listener = Listener()
    try:
        use_up_descriptors(listener, directory=str(root.parent), seed=0)  # type: ignore[arg-type]
    finally:
        os.close(leaked[0])
    assert "1 descriptors were left open" in listener.complaints


@pytest.fixture
def client(root: Path) -> Iterator[Client]:
    client = Client(root, random.Random(1), is_full)
    client.create()
    client.publish()
    client.look()
    assert client.complaints == []
    yield client
    client.store.close()


def forget_to_write(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    end = client.store.log.bounds(client.store.log.topics()[0].partitions[0]).stop
    monkeypatch.setattr(client.store.log, "append", lambda _, batch, __: [Appended(Range(end, end + len(batch)))])
    client.publish()


def refuse_and_write(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    append = client.store.log.append

    def refuse(*arguments: Any) -> list[Appended]:
        append(*arguments)
        raise StoreFull("the disk is full")

    monkeypatch.setattr(client.store.log, "append", refuse)
    with client.lacking():
        client.tries(client.publish)


def forget_a_commit(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    client.commit()
    client.publish()
    forgotten: Callable[[Sequence[Commit]], list[None]] = lambda commits: [None] * len(commits)  # noqa: E731
    monkeypatch.setattr(client.store.cursors, "commit", forgotten)
    client.commit()


def forget_what_is_scheduled(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client.store.schedule, "add", lambda _: None)
    client.schedule()


def fail_for_no_reason(client: Client, _: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise StoreFull("the disk is full")

    client.tries(fail)


def fail_without_saying_why(client: Client, _: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise KeyError("slot")

    with client.lacking():
        client.tries(fail)


@pytest.mark.parametrize(
    ("bug", "expected"),
    [
        (forget_to_write, "was acknowledged here"),
        (refuse_and_write, "every publish of it failed"),
        (forget_a_commit, "a commit of"),
        (forget_what_is_scheduled, "was stored and is gone"),
        (fail_for_no_reason, "though nothing is lacking"),
        (fail_without_saying_why, "does not say what is lacking"),
    ],
)
def test_a_client_complains_of_broken_promises(
    client: Client,
    monkeypatch: pytest.MonkeyPatch,
    bug: Callable[[Client, pytest.MonkeyPatch], None],
    expected: str,
) -> None:
    bug(client, monkeypatch)
    monkeypatch.undo()
    client.look()
    assert any(expected in complaint for complaint in client.complaints)


# --- what runs out ----------------------------------------------------------------------------


@pytest.mark.parametrize("free", [0, 1, 5])
def test_just_so_many_descriptors_are_left(free: int) -> None:
    with few_descriptors(free):
        opened = [os.open(os.devnull, os.O_RDONLY) for _ in range(free)]
        with pytest.raises(OSError, match="Too many open files"):
            os.open(os.devnull, os.O_RDONLY)
    for descriptor in opened:
        os.close(descriptor)


@pytest.mark.root
def test_ballast_leaves_just_so_much_space(root: Path) -> None:
    with mounted(root) as disk, Ballast(disk).leaving(100_000):
        status = os.statvfs(disk)
        assert 100_000 - status.f_frsize < status.f_bavail * status.f_frsize <= 100_000


@pytest.mark.parametrize(
    ("error", "full", "descriptors"),
    [
        (StoreFull("full"), True, True),
        (OSError(errno.ENOSPC, "full"), True, False),
        (OSError(errno.EMFILE, "too many"), False, True),
        (StoreError("cannot be opened"), False, True),
        (StateMissing("damaged"), False, False),
        (KeyError("slot"), False, False),
    ],
)
def test_an_error_is_clear_if_it_says_what_is_lacking(
    error: PenstockError | OSError | KeyError, full: bool, descriptors: bool
) -> None:
    assert (is_full(error), is_about_descriptors(error)) == (full, descriptors)
