"""How drivers and tasks reach a store: with patience, and only the store that the driver has found."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from penstock.clock import SystemClock
from penstock.errors import StoreUnavailable, UsageError, WriterStalled
from penstock.settings import Settings
from penstock.spark.connection import ATTEMPTS, absolute, connect, patiently
from penstock.stores import open_store

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


class Hasty(SystemClock):
    """A clock that notes its pauses and makes none."""

    def __init__(self) -> None:
        self.pauses: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)


def failing(times: int, error: Exception) -> Callable[[], str]:
    left = [error] * times

    def call() -> str:
        if left:
            raise left.pop()
        return "done"

    return call


@pytest.mark.parametrize("error", [OSError("gone"), WriterStalled("orders/0", 1, 5.0)])
def test_a_store_that_does_not_answer_is_asked_again_a_few_times(error: Exception) -> None:
    clock = Hasty()
    assert patiently(failing(ATTEMPTS - 1, error), clock) == "done"
    assert len(clock.pauses) == ATTEMPTS - 1
    assert 0 < min(clock.pauses) < max(clock.pauses) < 5
    with pytest.raises(type(error)):
        patiently(failing(ATTEMPTS, error), Hasty())


def test_what_is_wrong_with_the_question_is_told_at_once() -> None:
    clock = Hasty()
    with pytest.raises(UsageError):
        patiently(failing(1, UsageError("no")), clock)
    assert clock.pauses == []


def test_a_directory_is_made_absolute_since_tasks_run_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert absolute("file:./data") == f"file:{tmp_path}/data"
    assert absolute("memory:") == "memory:"
    assert absolute("file://elsewhere") == "file://elsewhere"  # whoever opens it says what is wrong


def test_a_task_opens_the_drivers_store_and_no_other(root: Path) -> None:
    url = f"file:{root}"
    with pytest.raises(StoreUnavailable, match="is no store: publish something to it first"), connect(url, Settings()):
        pass
    assert not root.exists()
    open_store(url).close()
    with connect(url, Settings()) as (_, connection), connection.open() as store:
        assert store.log.topics() == []
    root.rename(root.with_name("moved"))
    with pytest.raises(StoreUnavailable, match="is not there for this task"), connection.open():
        pass
    open_store(url).close()
    with pytest.raises(StoreUnavailable, match="is another store here"), connection.open():
        pass


def test_a_task_on_another_machine_is_refused_before_it_touches_anything(root: Path) -> None:
    with closing(open_store(f"file:{root}")):
        pass
    with connect(f"file:{root}", Settings()) as (_, connection):
        elsewhere = connection._replace(boot_id=b"another", host="driver-host")
    with pytest.raises(StoreUnavailable, match="a directory on driver-host, where the driver runs"), elsewhere.open():
        pass
