"""What all pipelines share: rounds, once and for ever; how they are told to end; Spark around them."""

from __future__ import annotations

import signal
import sys
import threading
from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from penstock.cli.pipelines.running import running, tasks_shown
from penstock.cli.session import Session
from penstock.errors import UsageError
from penstock.spark.pipelines.rounds import PAUSE_SECONDS, Ending, caught, rounds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

SIGNALS = (signal.SIGTERM, signal.SIGINT)


@dataclass(frozen=True)
class Done:
    number: int
    idle: bool


def made(*idle: bool) -> Callable[[], Done]:
    """Return a pipeline that has nothing to do in these rounds."""
    every = iter([Done(number, each) for number, each in enumerate(idle)])
    return lambda: next(every)


class Watched(Ending):
    """Waits for nothing, remembers it, and asks for an end after so many times."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most
        self.waits: list[float] = []

    def wait(self, seconds: float) -> bool:
        self.waits.append(seconds)
        if len(self.waits) >= self._most:
            self.ask()
        return self.asked


# --- rounds ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("idle", [True, False])
def test_once_is_one_round_whatever_there_was_to_do(idle: bool) -> None:
    assert list(rounds(made(idle))) == [Done(0, idle)]


def test_a_continuous_pipeline_pauses_only_when_there_was_nothing_to_do() -> None:
    ending = Watched(2)
    done = list(rounds(made(False, False, True, False, True), continuous=True, ending=ending))
    assert [each.number for each in done] == [0, 1, 2, 3, 4]
    assert ending.waits == [PAUSE_SECONDS, PAUSE_SECONDS]


def test_an_end_that_is_asked_for_lets_the_round_under_way_be_the_last() -> None:
    ending = Ending()
    seen = []
    for done in rounds(made(False, False, False), continuous=True, ending=ending):
        seen.append(done.number)
        if done.number == 1:
            ending.ask()
    assert seen == [0, 1]


def test_an_end_that_is_asked_for_ends_a_pause_at_once() -> None:
    ending = Ending()
    found: list[Done] = []

    def run() -> None:
        found.extend(rounds(made(True, True), continuous=True, ending=ending, pause_seconds=3_600))

    thread = threading.Thread(target=run)
    thread.start()
    ending.ask()
    thread.join(60)
    assert not thread.is_alive()
    assert found == [Done(0, True)]


def test_what_a_round_raises_ends_a_continuous_pipeline() -> None:
    def fail() -> Done:
        raise UsageError("no lake")

    with pytest.raises(UsageError, match="no lake"):
        list(rounds(fail, continuous=True))


# --- signals --------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", SIGNALS)
@pytest.mark.parametrize("second", SIGNALS)
def test_a_first_signal_asks_for_an_end_and_a_second_one_interrupts(
    first: signal.Signals, second: signal.Signals
) -> None:
    before = [signal.getsignal(number) for number in SIGNALS]
    with caught() as ending:
        assert not ending.asked
        signal.raise_signal(first)
        assert ending.wait(0)
        with pytest.raises(KeyboardInterrupt, match=second.name):
            signal.raise_signal(second)
    assert [signal.getsignal(number) for number in SIGNALS] == before


def test_handlers_are_as_before_also_after_an_error() -> None:
    before = [signal.getsignal(number) for number in SIGNALS]
    with pytest.raises(UsageError), caught():
        raise UsageError("no lake")
    assert [signal.getsignal(number) for number in SIGNALS] == before


def test_a_pipeline_in_another_thread_catches_no_signals_and_can_be_asked_to_end() -> None:
    before = [signal.getsignal(number) for number in SIGNALS]
    seen: list[Any] = []

    def run() -> None:
        with caught() as ending:
            seen.append([signal.getsignal(number) for number in SIGNALS])
            ending.ask()
            seen.append(ending.wait(3_600))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(60)
    assert seen == [before, True]


# --- a session around it --------------------------------------------------------------------------


class Spark:
    """Stands for a session of Spark, which has set a handler for SIGINT as PySpark does."""

    def __init__(self, asked: tuple[Any, ...], named: dict[str, Any]) -> None:
        self.asked = (asked, named)
        self.stopped = False
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    def stop(self) -> None:
        self.stopped = True


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Spark]]:
    started: list[Spark] = []
    handler = signal.getsignal(signal.SIGINT)

    def session(*asked: Any, **named: Any) -> Spark:
        started.append(Spark(asked, named))
        return started[-1]

    import penstock.spark.session  # noqa: F401 - so that it is there to be replaced

    monkeypatch.setattr(sys.modules["penstock.spark.session"], "session", session)
    yield started
    signal.signal(signal.SIGINT, handler)


def test_a_pipeline_has_a_session_of_its_own_and_hears_signals(
    started: list[Spark], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with running(Session(url=f"file:{tmp_path}"), "local[3]", "redrive") as run:
        [spark] = started
        assert spark.asked == (("local[3]",), {"app_name": "penstock-redrive"})
        assert id(run.spark) == id(spark)
        assert run.settings.url == f"file:{tmp_path}"
        signal.raise_signal(signal.SIGINT)  # the session's own handler would have lost it
        assert run.ending.asked
        assert [each.stopped for each in started] == [False]
    assert [each.stopped for each in started] == [True]
    told = capsys.readouterr()
    assert (told.out, told.err) == ("", "Spark starts …\n")


def test_spark_ends_with_a_pipeline_that_fails_or_is_interrupted(started: list[Spark]) -> None:
    for error in (UsageError("no lake"), KeyboardInterrupt("SIGINT")):
        with pytest.raises(type(error)), running(Session(), "local[*]", "audit"):
            raise error
    assert [spark.stopped for spark in started] == [True, True]


# --- how far Spark is -------------------------------------------------------------------------


class Tracker:
    """Says of two stages how many of their tasks are done, and of a third nothing any more."""

    def getActiveStageIds(self) -> list[int]:  # noqa: N802 - Spark's name
        return [1, 2, 3]

    def getStageInfo(self, number: int) -> SimpleNamespace | None:  # noqa: N802
        return None if number == 3 else SimpleNamespace(numCompletedTasks=number, numTasks=4)


@pytest.mark.parametrize("terminal", [True, False])
def test_the_tasks_of_spark_are_counted_on_a_terminal_alone(terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[int, int | None]] = []
    looked = threading.Event()

    def update(done: int, total: int | None) -> None:
        told.append((done, total))
        looked.set()

    spark: Any = SimpleNamespace(sparkContext=SimpleNamespace(statusTracker=Tracker))
    monkeypatch.setattr("penstock.cli.pipelines.running.progress", lambda *_args, **_options: nullcontext(update))
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal, raising=False)
    with tasks_shown(spark, "tasks"):
        assert not terminal or looked.wait(60)
    assert set(told) == ({(3, 8)} if terminal else set())
    assert not [thread for thread in threading.enumerate() if thread.name == "penstock-progress"]
