"""`penstock spark`: topics looked at with Spark."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.output import JsonLines, print_json_line, print_table, say, shown_bytes, shown_text, shown_time
from penstock.cli.session import Session
from penstock.errors import UsageError, did_you_mean

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

app = typer.Typer(help="Look at topics with Spark.", no_args_is_help=True)

ROWS_SHOWN = 1_000

Query = Annotated[str, typer.Argument(metavar="QUERY", help="One SQL query; every topic is a table.")]
Limit = Annotated[int, typer.Option(min=1, metavar="N", help="Print so many rows at most.")]
Master = Annotated[str | None, typer.Option(metavar="URL", help="Where Spark runs; without it, on this machine.")]


@app.command("sql")
def sql(
    context: typer.Context, query: Query, limit: Limit = ROWS_SHOWN, master: Master = None, as_json: JsonLines = False
) -> None:
    """Run one query over topics as tables.

    For example: select type, count(*) from orders group by type. A table has the columns of an event: topic, partition,
    offset, id, source, type, subject, time, appended_at, expires_at, key, content_type, headers, data. A payload is
    read with cast(data as string), or from_json(cast(data as string), 'total double'). A topic whose name is no plain
    word is quoted: `order-lines`.
    """
    from penstock.spark import register_views, session

    with context.ensure_object(Session).open_store() as (store, settings):
        known = [topic.name for topic in store.log.topics()]
    # Only those that the query may mean: each costs Spark a moment.
    words = set(re.findall(r"[\w.-]+", query.lower()))
    mentioned = [name for name in known if name in words or not words.isdisjoint(name.split("."))]
    running = session(master)
    try:
        register_views(running, settings.url, mentioned)
        frame = _run(running, query, known)
        rows = frame.limit(limit + 1).collect()
    finally:
        running.stop()
    if as_json:
        for row in rows[:limit]:
            print_json_line(_encoded(row.asDict(recursive=True)))
    else:
        print_table(frame.columns, [[_shown(value) for value in row] for row in rows[:limit]], numbers=_numbers(frame))
    if len(rows) > limit:
        say(f"there are more rows than {limit:,}: ask for more with --limit")


def _run(spark: SparkSession, query: str, known: list[str]) -> DataFrame:
    from pyspark.errors import AnalysisException

    from penstock.spark.complaints import in_one_line, not_logged

    try:
        with not_logged():
            return spark.sql(query)
    except AnalysisException as error:
        if error.getCondition() == "TABLE_OR_VIEW_NOT_FOUND":
            name = (error.getMessageParameters() or {}).get("relationName", "").strip("`")
            shown = [topic for topic in known if not topic.startswith("_")]
            raise UsageError(f"there is no topic {name!r}{did_you_mean(name, shown)}") from None
        raise UsageError(f"Spark does not understand this query: {in_one_line(error)}") from None


def _numbers(frame: DataFrame) -> set[str]:
    numeric = ("int", "bigint", "smallint", "tinyint", "double", "float", "decimal")
    return {name for name, kind in frame.dtypes if kind.startswith(numeric)}


def _shown(value: Any) -> str:
    from datetime import datetime

    match value:
        case None:
            return "-"
        case bytes() | bytearray():
            return shown_bytes(bytes(value))
        case datetime():
            return shown_time(value.astimezone())
        case _:
            return shown_text(str(value))


def _encoded(row: dict[str, Any]) -> bytes:
    from msgspec import json

    return json.encode({name: _plain(value) for name, value in row.items()})


def _plain(value: Any) -> Any:
    """Return a value as JSON has it: bytes as text if they are, else in base64, as CloudEvents do."""
    from base64 import b64encode

    match value:
        case bytes() | bytearray():
            try:
                return bytes(value).decode()
            except UnicodeDecodeError:
                return b64encode(value).decode()
        case dict():
            return {str(key): _plain(item) for key, item in value.items()}
        case list() | tuple():
            return [_plain(item) for item in value]
        case _:
            return value
