"""The life of one store: drivers that copy one topic to another, and what happens to them."""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from penstock.clock import SystemClock
from penstock.runtime import sinks
from penstock.testing.campaigns.spark.driver import INPUT, OUTPUT, Query
from penstock.testing.campaigns.spark.household import Driver, Guard, Outcome, Step
from penstock.testing.campaigns.spark.steps import Point, Round
from penstock.testing.campaigns.spark.topics import Topics

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.testing.campaigns.campaign import Report

ROWS: Final = 60
"""In a batch."""
BATCHES_AHEAD: Final = 4
"""So many batches, about, wait in the input when a round begins."""
STEPS_MAX: Final = 40
"""A kill anywhere comes after so many steps of any kind at most, and a moment."""
MOMENT_SECONDS_MAX: Final = 0.5
DRIVERS_MAX: Final = 3
"""No more drivers than this end before they have come to the point of one round: there is enough to do."""


class Unexpected(Exception):
    """Raised when a query goes another way than it should."""


def _is_at(point: Point, step: Step) -> bool:
    # A driver that has first completed what another one left behind has appended when its own batch is prepared.
    # And a task is not killed a second time, since Spark has patience for few times.
    told = step.told
    return told.point == point and not {Point.AFTER_MANIFEST: told.number, Point.IN_TASK: told.attempt}.get(point)


class Life:
    """One store, its query, and its drivers, of which at most two are there at a time."""

    def __init__(self, report: Report, directory: Path, chance: random.Random, *, plant: str = "") -> None:
        self._report = report
        self._directory = directory
        self._chance = chance
        self._plant = plant
        self._driver: Driver | None = None
        self._frozen: Driver | None = None
        self._guard = Guard()
        self._drivers = 0
        self._owed: set[tuple[int, int]] = set()
        self.checkpoint = directory / "checkpoint"
        self.topics = Topics(directory, chance)

    # --- drivers --------------------------------------------------------------------------------

    def start(self, *, ends: bool, adopt: bool = False, starting: str = "earliest") -> Driver:
        """Start a driver that goes on from the checkpoint."""
        self._drivers += 1
        self._report.count("drivers started")
        scratch = self._directory / f"scratch-{self._drivers}"
        scratch.mkdir()
        query = Query(
            url=self.topics.url,
            checkpoint=str(self.checkpoint),
            post=str(self._directory / f"post-{self._drivers}"),
            scratch=str(scratch),
            rows=ROWS,
            ends=ends,
            min_partitions=self._chance.choice([None, None, 6]),
            starting=starting,
            adopt=adopt,
            plant=self._plant,
        )
        environment = {**os.environ, **self.topics.environment}
        environment |= {"TMPDIR": str(scratch), "SPARK_LOCAL_DIRS": str(scratch)}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
        self._owed.clear()
        self._driver = Driver(query, environment, self._guard)
        return self._driver

    def end(self) -> None:
        """End every process."""
        try:
            for driver in (self._driver, self._frozen):
                if driver is not None:
                    self._end(driver)
            self._driver = self._frozen = None
        finally:
            self._guard.end()

    def _end(self, driver: Driver) -> None:
        driver.end()
        shutil.rmtree(driver.query.scratch, ignore_errors=True)

    def _end_driver(self) -> None:
        assert self._driver is not None
        self._end(self._driver)
        self._driver = None

    # --- rounds ---------------------------------------------------------------------------------

    def play(self, round_: Round) -> None:
        """Let a driver come to a point, and stop it there."""
        self._fill()
        step = self._await(round_)
        if round_.point == Point.IN_TASK and not round_.freeze:
            self._kill_worker(step)
        elif round_.freeze:
            self._freeze(round_, step)
        else:
            self._end_driver()
            if step is not None:
                step.drop()
        self._report.count(str(round_))
        if round_.point == Point.AFTER_STAGING and not self.topics.unfinished():
            self._report.count("events orphaned", self.topics.staged())
        self._meddle(round_)
        if self._frozen is not None:
            self._replace_frozen(step)

    def _fill(self) -> None:
        """See to it that there is enough to do."""
        if (missing := BATCHES_AHEAD * ROWS - self._waiting()) > 0:
            self.topics.publish(missing)

    def _waiting(self) -> int:
        return sum(self.topics.ends(INPUT)) - sum(self.topics.ends(OUTPUT))

    def _await(self, round_: Round) -> Step | None:
        """Let a driver run until it comes to the point."""
        if round_.point == Point.ANYWHERE:
            self._await_anywhere()
            return None
        left = round_.comes
        for _ in range(DRIVERS_MAX):
            driver = self._driver or self.start(ends=self._chance.random() < 0.5)
            while isinstance(said := self._hear(driver), Step):
                left -= _is_at(round_.point, said)
                if not left:
                    return said
                said.go()
            self._ended_well(said)
            self._fill()
        raise Unexpected(f"no driver has come to {round_.point.value}")

    def _await_anywhere(self) -> None:
        """Let a driver take some steps, and pass a moment more; it may have ended by then."""
        driver = self._driver or self.start(ends=self._chance.random() < 0.5)
        for _ in range(self._chance.randint(1, STEPS_MAX)):
            said = self._hear(driver)
            if isinstance(said, Outcome):
                self._ended_well(said)
                self.start(ends=False)
                return
            assert said is not None
            said.go()
        end = time.monotonic() + self._chance.random() * MOMENT_SECONDS_MAX
        while (left := end - time.monotonic()) > 0:
            last = driver.hear(left)
            if isinstance(last, Step):
                last.go()
            elif last is not None and last.failed:
                raise Unexpected(f"the query has failed: {last.why}")

    def _hear(self, driver: Driver) -> Step | Outcome | None:
        """Return what a driver says; a worker that was killed must have a successor before its batch is delivered."""
        said = driver.hear()
        if isinstance(said, Step):
            self._report.count(f"steps: {said.point.value.replace('_', ' ')}")
            told = said.told
            if told.attempt:
                self._owed.discard((told.batch, told.task))
            elif said.point != Point.IN_TASK and any(batch == told.batch for batch, _ in self._owed):
                raise Unexpected(f"batch {told.batch} is delivered, and the task that was killed was not run again")
        return said

    def _ended_well(self, said: Outcome | None) -> None:
        """Take in that the driver has ended; it should not have failed."""
        assert said is not None
        assert self._driver is not None
        ends = self._driver.query.ends
        self._end_driver()
        if said.failed or not ends:
            raise Unexpected(f"the query has ended{' and failed' if said.failed else ''}: {said.why}")
        self._report.count("queries ended")

    def _kill_worker(self, step: Step | None) -> None:
        """Kill one Python worker, and nothing else."""
        assert step is not None
        self._owed.add((step.told.batch, step.told.task))
        with suppress(ProcessLookupError):
            os.kill(step.told.pid, signal.SIGKILL)
        step.drop()

    # --- zombies, orphans, helpers --------------------------------------------------------------

    def _freeze(self, round_: Round, step: Step | None) -> None:
        assert step is not None, round_
        assert self._driver is not None
        self._driver.household.stop()
        self._frozen, self._driver = self._driver, None

    def _replace_frozen(self, step: Step | None) -> None:
        """Let another driver do all the work, then wake the first one: it must change nothing."""
        assert step is not None
        assert self._frozen is not None
        self.start(ends=True)
        self.run_to_end()
        before = self.topics.ends(OUTPUT)
        zombie, self._frozen = self._frozen, None
        self._driver = zombie
        zombie.household.wake()
        step.go()
        said = self.outcome()
        self._report.count(f"drivers woken that {'failed' if said.failed else 'ended'}")
        if self.topics.ends(OUTPUT) != before:
            raise Unexpected(f"a driver that was frozen has appended: {before} became {self.topics.ends(OUTPUT)}")
        if self.topics.unfinished():
            raise Unexpected("a driver that was frozen has prepared a batch")

    def _meddle(self, round_: Round) -> None:
        """Do what another process does meanwhile."""
        if round_.completed:
            with self.topics.open() as store:
                self._report.count("batches completed by another process", sinks.complete_all(store))
        if round_.swept:
            self.sweep()

    def sweep(self) -> None:
        """Remove what is staged and not prepared, as if it was old enough."""
        staged = self.topics.staged()
        with self.topics.open() as store:
            sinks.sweep(store, clock=SystemClock(), idle_seconds=-1.0)
        self._report.count("orphans swept", staged - self.topics.staged())

    # --- looking --------------------------------------------------------------------------------

    def run_to_end(self) -> None:
        """Let the driver run until it has done everything."""
        said = self.outcome()
        if said.failed:
            raise Unexpected(f"the query has failed: {said.why}")
        self._report.count("queries ended")

    def outcome(self) -> Outcome:
        """Let the driver run until it ends, and return how."""
        assert self._driver is not None
        while isinstance(said := self._hear(self._driver), Step):
            said.go()
        assert said is not None
        self._end_driver()
        return said

    def finish(self) -> None:
        """Let a driver do all that is left, if there is anything."""
        if self._driver is None and not self._waiting() and not self.topics.staged():
            return
        if self._driver is not None:
            self._end_driver()
        self.topics.publish(ROWS)  # which is a batch at least, and removes what is still staged
        self.start(ends=True)
        self.run_to_end()

    def complaints(self, *, complete: bool) -> list[str]:
        """Say what is not as it should be."""
        found = list(self.topics.compare(complete=complete))
        self._report.count("comparisons")
        if complete:
            self._report.count("events compared", sum(self.topics.ends(INPUT)))
            if unfinished := self.topics.unfinished():
                found.append(f"{unfinished} manifests are not finished")
            if staged := self.topics.staged():
                found.append(f"{staged:,} events are left in the staging log")
            found += self.topics.verify()
        return found
