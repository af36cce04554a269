"""Measuring: how a figure comes about, and the one form in which every area reports.

* **Fair.** The rounds of a subject and of its ceiling alternate in one process, so that whatever slows this
  machine down slows both. A round lasts 20 ms or more, the garbage collector is off meanwhile, and the median
  of the rounds counts.
* **A ceiling** is the least that the work could cost, such as the bare Arrow calls. The ratio of the two says
  how near we are, 1 being the ceiling itself; it means the same on every machine. It is the median of the ratios
  of neighbouring rounds: a machine that is slower in one minute than in the next is so in both of a pair.
* **A goal** is text, `ratio >= 0.7` or `value <= 40 ns/event`, and that very text is what is checked.
* **A figure that falls short is reported as it is.** To measure is to succeed.
"""

from __future__ import annotations

import math
import operator
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Self

from penstock.collecting import uncollected

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROUNDS = 15
ROUND_SECONDS = 0.020

Work = Callable[[], object]


@contextmanager
def scratch_directory() -> Iterator[Path]:
    """Make a directory below the current one, on the disk of whoever asks; removed at the end, whatever happens."""
    with tempfile.TemporaryDirectory(prefix="penstock-bench-", dir=Path.cwd(), ignore_cleanup_errors=True) as made:
        yield Path(made)


SPARK_MASTER = "local[*]"


@contextmanager
def spark_session() -> Iterator[SparkSession]:
    """Start Spark for a block, on all cores of this machine."""
    from penstock.spark.session import session

    spark = session(SPARK_MASTER, app_name="penstock-bench")
    try:
        yield spark
    finally:
        spark.stop()


# --- goals and figures -----------------------------------------------------------------------

_OPERATORS = {">=": operator.ge, "<=": operator.le}
_GOAL = re.compile(r"(?P<what>ratio|value) (?P<operator>>=|<=) (?P<bound>[0-9]+(?:\.[0-9]+)?)(?: (?P<unit>\S+))?")


@dataclass(frozen=True, slots=True)
class Goal:
    """What a figure should be: its ratio, or its value in a unit, at least or at most a bound."""

    what: str
    operator: str
    bound: float
    unit: str | None

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read a goal; a ratio has no unit, and a value must have one."""
        found = _GOAL.fullmatch(text)
        if found is None or (found["what"] == "value") != (found["unit"] is not None):
            raise ValueError(f"{text!r} is not a goal such as 'ratio >= 0.7' or 'value <= 40 ns/event'")
        return cls(found["what"], found["operator"], float(found["bound"]), found["unit"])

    def holds(self, *, value: float, unit: str, ratio: float | None) -> bool:
        """Say whether a figure reaches this goal."""
        if self.what == "value":
            if unit != self.unit:
                raise ValueError(f"a goal in {self.unit} says nothing about a value in {unit}")
            measured = value
        else:
            if ratio is None:
                raise ValueError("a goal for the ratio needs a ceiling")
            measured = ratio
        return bool(_OPERATORS[self.operator](measured, self.bound))


@dataclass(frozen=True, slots=True)
class Figure:
    """One result, field by field as it is reported."""

    name: str
    value: float
    unit: str
    ceiling: float | None
    ratio: float | None
    goal: str
    holds: bool

    @classmethod
    def of(
        cls,
        name: str,
        value: float,
        unit: str,
        *,
        goal: str,
        ceiling: float | None = None,
        ratio: float | None = None,
    ) -> Self:
        """Round what was measured to four digits, and decide by these whether the goal is reached."""
        value = _rounded(value)
        ceiling, ratio = (None if number is None else _rounded(number) for number in (ceiling, ratio))
        holds = Goal.parse(goal).holds(value=value, unit=unit, ratio=ratio)
        return cls(name, value, unit, ceiling, ratio, goal, holds)


def _rounded(number: float) -> float:
    return float(f"{number:.4g}")


# --- timing ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Timing:
    """How long one call took, in seconds, round by round: of the subject, and of its ceiling if it has one."""

    subject: Sequence[float]
    ceiling: Sequence[float] | None = None

    def nanoseconds_per_event(self, name: str, events: int, *, goal: str) -> Figure:
        """Return the figure of calls that handle so many events each."""
        return self._figure(name, "ns/event", goal, lambda seconds: seconds / events * 1e9)

    def events_per_second(self, name: str, events: int, *, goal: str) -> Figure:
        """Return the figure of calls that handle so many events each."""
        return self._figure(name, "events/s", goal, lambda seconds: events / seconds)

    def microseconds(self, name: str, *, goal: str) -> Figure:
        """Return the figure of whole calls."""
        return self._figure(name, "µs", goal, lambda seconds: seconds * 1e6)

    def milliseconds(self, name: str, *, goal: str) -> Figure:
        """Return the figure of whole calls."""
        return self._figure(name, "ms", goal, lambda seconds: seconds * 1e3)

    def _figure(self, name: str, unit: str, goal: str, in_unit: Callable[[float], float]) -> Figure:
        value = in_unit(median(self.subject))
        if self.ceiling is None:
            return Figure.of(name, value, unit, goal=goal)
        ratio = median(ceiling / subject for subject, ceiling in zip(self.subject, self.ceiling, strict=True))
        return Figure.of(name, value, unit, goal=goal, ceiling=in_unit(median(self.ceiling)), ratio=ratio)


def compare(
    subject: Work,
    ceiling: Work | None,
    rounds: int,
    *,
    between: Work = lambda: None,
    clock: Callable[[], float] = time.perf_counter,
) -> Timing:
    """Time both in turn, so many rounds each; `between` tidies up after every round, untimed."""
    contestants = [subject] if ceiling is None else [subject, ceiling]

    def run_round(work: Work, calls: int) -> float:
        elapsed = _time(work, calls, clock)
        between()
        return elapsed

    def calls_to_fill_a_round(work: Work) -> int:
        calls = 1
        while run_round(work, calls) < ROUND_SECONDS:
            calls *= 2
        return calls

    # This also warms everything up.
    calls = [calls_to_fill_a_round(work) for work in contestants]
    seconds: list[list[float]] = [[] for _ in contestants]
    for _ in range(rounds):
        for index, work in enumerate(contestants):
            seconds[index].append(run_round(work, calls[index]) / calls[index])
    return Timing(*seconds)


def sample(
    contestants: Sequence[Work],
    count: int,
    *,
    before: Work = lambda: None,
    clock: Callable[[], float] = time.perf_counter,
) -> list[list[float]]:
    """Time single calls of each in turn, so many times; return all times of each.

    This is for what cannot be repeated within a round: `before` prepares every call, untimed.
    """
    seconds: list[list[float]] = [[] for _ in contestants]
    for _ in range(count):
        for index, work in enumerate(contestants):
            before()
            seconds[index].append(_time(work, 1, clock))
    return seconds


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the least of the values that so many percent do not exceed."""
    ordered = sorted(values)
    return ordered[max(math.ceil(len(ordered) * percent / 100) - 1, 0)]


def _time(work: Work, calls: int, clock: Callable[[], float]) -> float:
    with uncollected():
        start = clock()
        for _ in range(calls):
            work()
        return clock() - start
