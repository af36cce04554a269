"""Running a pipeline from the command line: the options that all of them have, Spark's session, progress and the end.

Progress and talk go to stderr. The summary goes to stdout: for people, or with `--json` as one document; a continuous
run prints one JSON document a line, after each round that did something.
"""

from __future__ import annotations

import sys
import threading
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.output import progress, say

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import SparkSession

    from penstock.cli.session import Session
    from penstock.settings import Settings
    from penstock.spark.pipelines.rounds import Ending

Master = Annotated[
    str, typer.Option(metavar="URL", help="Where Spark runs: local[*], or spark://host:port for a cluster.")
]
Continuous = Annotated[
    bool, typer.Option("--continuous/--once", help="Go on with what comes until Ctrl-C; or end when all is done.")
]
DEFAULT_MASTER = "local[*]"
LOOK_SECONDS = 0.2


@dataclass(frozen=True)
class Running:
    """A session of Spark for a pipeline, the store's settings, and whether to end."""

    spark: SparkSession
    settings: Settings
    ending: Ending


@contextmanager
def running(session: Session, master: str, name: str) -> Iterator[Running]:
    """Start Spark for a block; SIGTERM and SIGINT ask for an end within it.

    Whatever can be wrong with the arguments is found before this: starting Spark takes seconds.
    """
    from penstock.spark.pipelines.rounds import caught
    from penstock.spark.session import session as spark_session

    settings = session.resolve().settings
    say("Spark starts …")
    spark = spark_session(master, app_name=f"penstock-{name}")
    try:
        # After Spark has started: PySpark sets a handler of its own for SIGINT.
        with caught() as ending:
            yield Running(spark, settings, ending)
    finally:
        spark.stop()


@contextmanager
def tasks_shown(spark: SparkSession, what: str) -> Iterator[None]:
    """Show within a block how many of Spark's tasks are done, if stderr is a terminal."""
    ended = threading.Event()

    def look() -> None:
        tracker = spark.sparkContext.statusTracker()
        with progress(what, counted=True) as update:
            while not ended.wait(LOOK_SECONDS):
                stages = [tracker.getStageInfo(number) for number in tracker.getActiveStageIds()]
                known = [stage for stage in stages if stage is not None]
                if known:
                    update(sum(stage.numCompletedTasks for stage in known), sum(stage.numTasks for stage in known))

    if not sys.stderr.isatty():
        yield
        return
    looking = threading.Thread(target=look, name="penstock-progress", daemon=True)
    looking.start()
    try:
        yield
    finally:
        ended.set()
        looking.join()
