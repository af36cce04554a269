"""Penstock in Spark: topics as DataFrames, streams and tables.

`format("penstock")` works by itself in every Spark session of an interpreter that Penstock is installed in. What is
here makes it pleasant from Python:

* `session()` gives a session with the right settings, or says what is missing;
* `read(spark, bus, topic)` and `stream(spark, bus, topic, subscription=…)` are DataFrames of a topic's events;
* `decode(df, EventClass)` turns their payloads into typed columns;
* `register_views(spark, url, names)` makes tables of topics for SQL;
* `archive(spark, bus, topics, lake)` moves what topics hold to a Parquet lake, and may be repeated at any time;
* `audit(spark, bus)` says what became of every event of every subscription;
* `project(spark, bus, projection, into)` folds a projection into a table of Parquet, from where the table is;
* `dead_letters(spark, bus, topic, subscription)` is a DataFrame of what subscriptions gave up on;
* `preview_redrive(…)` chooses some of them, and `redrive(bus, job)` brings them back.

Needs the extra `spark`: `pip install 'penstock[spark]'`, and Java 17 or later. Importing this module needs neither.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.spark.session import require_pyspark, session

if TYPE_CHECKING:
    from penstock.spark.decoding import decode as decode
    from penstock.spark.frames import read as read
    from penstock.spark.frames import register_views as register_views
    from penstock.spark.frames import stream as stream
    from penstock.spark.letters import dead_letters as dead_letters
    from penstock.spark.pipelines.archive import archive as archive
    from penstock.spark.pipelines.audit import audit as audit
    from penstock.spark.pipelines.project import project as project
    from penstock.spark.pipelines.redrive import preview_redrive as preview_redrive
    from penstock.spark.pipelines.redrive import redrive as redrive

_HOMES = {
    "archive": "penstock.spark.pipelines.archive",
    "audit": "penstock.spark.pipelines.audit",
    "dead_letters": "penstock.spark.letters",
    "decode": "penstock.spark.decoding",
    "preview_redrive": "penstock.spark.pipelines.redrive",
    "project": "penstock.spark.pipelines.project",
    "read": "penstock.spark.frames",
    "redrive": "penstock.spark.pipelines.redrive",
    "register_views": "penstock.spark.frames",
    "stream": "penstock.spark.frames",
}

__all__ = [*_HOMES, "session"]  # noqa: PLE0604 - a list of names, computed


def __getattr__(name: str) -> object:
    from importlib import import_module

    if name not in _HOMES:
        raise AttributeError(f"module 'penstock.spark' has no attribute {name!r}")
    require_pyspark()
    value: object = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
