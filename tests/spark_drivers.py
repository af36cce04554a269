"""Spark programs that tests run in a process of their own, because a process has one Java and one session.

A program is started as `python spark_drivers.py <program> <arguments as JSON>` and answers with one JSON value, the
last line on stdout. Warnings are errors in it. `drive` is the other end, for the test that starts it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    import pyarrow
    from pyspark.sql import SparkSession

# Tests end before Java's best compiler has earned its cost, and have no use for a collector with many threads.
JAVA_OPTIONS = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
JAVA_VARIABLES = {
    "SPARK_LAUNCHER_OPTS": JAVA_OPTIONS,  # of the Java that finds out how to start Spark
    "SPARK_SUBMIT_OPTS": JAVA_OPTIONS,  # of every driver, also of a program that is run as a user would run it
    "SPARK_DAEMON_JAVA_OPTS": JAVA_OPTIONS,  # of masters and workers
}
DRIVER = {
    "spark.driver.memory": "1g",
    "spark.executor.extraJavaOptions": JAVA_OPTIONS,
}
ALL_EXECUTORS_FIRST = {
    "spark.scheduler.minRegisteredResourcesRatio": "1.0",
    "spark.scheduler.maxRegisteredResourcesWaitingTime": "60s",
}
LIMIT_SECONDS = 240


# --- the other end ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Driven:
    """What became of a program."""

    answer: Any
    stdout: str
    """What was said before the answer."""
    stderr: str


def drive(program: str, *, environment: Mapping[str, str] | None = None, **arguments: Any) -> Driven:
    """Run a program and return its answer; it is an error if it fails."""
    # A session in this process has set variables of Spark's, and the program must do that for itself.
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name in JAVA_VARIABLES or not name.startswith(("SPARK_", "PYSPARK_"))
    }
    done = subprocess.run(
        [sys.executable, "-W", "error", __file__, program, json.dumps(arguments)],
        env={**inherited, **(environment or {})},
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    *before, answer = done.stdout.splitlines()
    return Driven(json.loads(answer), "\n".join(before), done.stderr)


# --- the programs -----------------------------------------------------------------------------


def workers_seen(spark: SparkSession, tasks: int) -> list[dict[str, Any]]:
    """Count rows in tasks that must all run at once, and say of each where it ran."""

    def look(batches: Iterator[pyarrow.RecordBatch]) -> Iterator[pyarrow.RecordBatch]:
        import pyarrow

        import penstock

        rows = sum(batch.num_rows for batch in batches)
        seen = {"rows": rows, "executor": os.getppid(), "python": sys.executable, "penstock": penstock.__file__}
        yield pyarrow.RecordBatch.from_pylist([seen])

    numbers = spark.range(0, 1000, 1, tasks)
    schema = "rows long, executor long, python string, penstock string"
    return [row.asDict() for row in numbers.mapInArrow(look, schema, barrier=True).collect()]


def in_turn() -> Any:
    """Build sessions one after the other, and use each for a batch and a stream. The second one Spark itself stops."""
    from penstock.spark.session import session

    answers = []
    for master in ("local[1]", "local[2]", "local[1]"):
        spark = session(master, config=DRIVER)
        tasks = workers_seen(spark, 1)
        query = spark.readStream.format("rate").load().writeStream.format("noop").start()
        query.processAllAvailable()
        query.stop()
        answers.append([spark.sparkContext.master, spark.conf.get("spark.sql.shuffle.partitions"), tasks[0]["rows"]])
        if master == "local[2]":
            spark.sparkContext._jsc.stop()
        else:
            spark.stop()
    return answers


def settings(names: list[str], config: dict[str, str]) -> Any:
    """Say what a session's settings are."""
    from penstock.spark.session import session

    spark = session("local[1]", config={**DRIVER, **config})
    try:
        found = {name: spark.conf.get(name, None) for name in names}
        return {**found, "JAVA_HOME": os.environ.get("JAVA_HOME"), "tasks": workers_seen(spark, 1)}
    finally:
        spark.stop()


def refused(config: dict[str, str], master: str = "local[1]") -> Any:
    """Say with which error no session could be built."""
    from penstock.errors import PenstockError
    from penstock.spark.session import session

    try:
        session(master, config={**DRIVER, **config}).stop()
    except PenstockError as error:
        return [type(error).__name__, str(error)]
    return None


def java_ended() -> Any:
    """Kill Java under a running session, ask for a session, and say with which error that failed."""
    from penstock.errors import SparkUnavailable
    from penstock.spark.session import session

    spark = session("local[1]", config=DRIVER)
    gateway = spark.sparkContext._gateway
    assert gateway is not None
    gateway.proc.kill()
    gateway.proc.communicate()
    try:
        session()
    except SparkUnavailable as error:
        return str(error)
    return None


def topics(url: str, checkpoint: str, master: str | None = None) -> Any:
    """Copy the topic `orders` to `copies`, as a stream and then as a batch; say what was read, and where tasks ran."""
    from penstock.spark.session import session

    spark = session(master, config={**DRIVER, **ALL_EXECUTORS_FIRST})
    try:
        source = {"url": url, "topic": "orders", "minPartitions": "4"}
        query = (
            spark.readStream.format("penstock")
            .options(**source, maxRowsPerTrigger="600")
            .load()
            .select("key", "data")
            .writeStream.format("penstock")
            .options(url=url, topic="copies", sinkName="copier", checkpointLocation=checkpoint)
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()
        frame = spark.read.format("penstock").options(**source).load()
        frame.select("key", "data").write.format("penstock").options(url=url, topic="copies").mode("append").save()
        places = frame.selectExpr("partition", "offset", "cast(data as string)").collect()
        rows = sorted(list(row) for row in places)
        return {"rows": rows, "tasks": workers_seen(spark, 2), "master": spark.sparkContext.master}
    finally:
        spark.stop()


def elsewhere(url: str, config: dict[str, str]) -> Any:
    """Read a topic, and write to one, with executors that are on another machine; say with which errors."""
    from pyspark.errors import PySparkException

    from penstock.spark.session import session

    spark = session("local-cluster[1,1,1024]", config={**DRIVER, **config, "spark.task.maxFailures": "1"})
    errors = []
    try:
        for work in (
            lambda: spark.read.format("penstock").options(url=url, topic="orders").load().count(),
            lambda: (
                spark.range(3)
                .selectExpr("'x' data")
                .write.format("penstock")
                .options(url=url, topic="copies")
                .mode("append")
                .save()
            ),
        ):
            try:
                work()
            except PySparkException as error:
                errors.append(str(error))
        return errors
    finally:
        spark.stop()


def archive(url: str, lake: str, killed_before: int) -> Any:
    """Archive a topic in small files, and end by SIGKILL instead of putting a version of this number."""
    import signal

    from penstock.spark import archive as archive_topics
    from penstock.spark.session import session
    from penstock.versions import Versions

    put = Versions.put

    def put_or_die(self: Versions, number: int, body: bytes) -> bool:
        if number >= killed_before:
            os.kill(os.getpid(), signal.SIGKILL)
        return put(self, number, body)

    Versions.put = put_or_die  # type: ignore[method-assign]  # for as long as the process lives
    return archive_topics(session("local[2]", config=DRIVER), url, "orders", lake, file_bytes=2_000).document()


PROGRAMS: dict[str, Callable[..., Any]] = {
    program.__name__: program for program in (in_turn, settings, refused, java_ended, topics, elsewhere, archive)
}

if __name__ == "__main__":
    # A started program finds `tests` on no path, so that functions sent to executors must not come from there.
    sys.path.remove(str(Path(__file__).parent))
    answer = PROGRAMS[sys.argv[1]](**json.loads(sys.argv[2]))
    sys.stdout.write(json.dumps(answer) + "\n")
