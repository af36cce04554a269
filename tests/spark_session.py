"""The one Spark session that all tests share, and whether there can be one here.

A process has one Java, and starting it takes seconds, so tests that need other settings run in a child process. Tests
that use Spark carry the mark `spark`, which skips them by name where Java or pyspark is missing.
"""

from __future__ import annotations

import signal
from functools import cache
from typing import TYPE_CHECKING

import pytest

from penstock.errors import SparkUnavailable
from penstock.spark.java import find_java
from penstock.spark.session import require_pyspark, session

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import SparkSession

MASTER = "local[2]"
SETTINGS = {"spark.driver.memory": "1g"}


@cache
def why_no_spark() -> str | None:
    """Return why Spark cannot run here, in one line, or `None` if it can."""
    try:
        require_pyspark()
        find_java()
    except SparkUnavailable as error:
        return str(error).splitlines()[0]
    return None


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """A session on two threads of this machine. Tests share it: they leave no views, queries or settings behind."""
    handler = signal.getsignal(signal.SIGINT)
    shared = session(MASTER, app_name="penstock-tests", config=SETTINGS)
    signal.signal(signal.SIGINT, handler)  # PySpark has set its own, and tests of interrupts want the usual one
    yield shared
    shared.stop()
