"""`penstock spark sql`, and the subscriptions that `penstock topics show` lists."""

from __future__ import annotations

import subprocess
import sys
from contextlib import closing
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import msgspec
import pytest
from tests.spark_topics import fill, info_of, plain, read

from penstock.cli import spark as commands
from penstock.cli.app import run
from penstock.errors import UsageError
from penstock.rows import Cursor, Shard, Subscription
from penstock.stores import open_store

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession


@pytest.mark.spark
def test_one_query_over_topics_is_printed_as_json_lines(root: Path) -> None:
    url = f"file:{root}"
    fill(url, "order-lines", plain(10))
    fill(url, "shop.eu", plain(4))
    query = (
        "select key, count(*) as lines from `order-lines` join `shop.eu` as shop using (key) "
        "where shop.offset >= 0 group by key order by key"
    )
    command = [sys.executable, "-W", "error", "-m", "penstock", "--url", url, "spark", "sql", query, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=110)
    assert done.stderr == ""
    assert [msgspec.json.decode(line) for line in done.stdout.splitlines()] == [
        {"key": "key-0", "lines": 2},
        {"key": "key-1", "lines": 2},
        {"key": "key-2", "lines": 2},
        {"key": "key-3", "lines": 1},
    ]


@pytest.mark.spark
def test_a_query_that_spark_does_not_understand_is_one_line(spark: SparkSession) -> None:
    with pytest.raises(UsageError, match=r"there is no topic 'order'; did you mean 'orders'\?"):
        commands._run(spark, "select * from order", ["orders", "_sink.x"])
    with pytest.raises(UsageError, match=r"Spark does not understand this query: .*Syntax error at or near 'selec'"):
        commands._run(spark, "selec 1", [])


@pytest.mark.spark
def test_rows_are_shown_as_people_read_them(spark: SparkSession, root: Path) -> None:
    fill(f"file:{root}", "orders", plain(1), partitions=1)
    frame = read(spark, f"file:{root}", "orders").select("offset", "subject", "key", "data")
    (row,) = frame.collect()
    assert [commands._shown(value) for value in row] == ["0", "-", "key-0", "000000"]
    assert commands._numbers(frame) == {"offset"}
    assert commands._shown(datetime(2026, 1, 2, tzinfo=UTC)) == "2026-01-02T00:00:00.000000Z"
    encoded = commands._encoded({"data": b"\xff", "headers": {"a": b"x"}, "list": [b"y"]})
    assert msgspec.json.decode(encoded) == {"data": "/w==", "headers": {"a": "x"}, "list": ["y"]}


def test_a_store_that_is_not_there_is_told_before_spark_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["--url", f"file:{tmp_path / 'nowhere'}", "spark", "sql", "select 1"]) == 1
    assert "there is no store in" in capsys.readouterr().err


def test_the_subscriptions_of_a_topic_are_shown_with_their_lag(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url = f"file:{root}"
    fill(url, "orders", plain(50), partitions=2)
    with closing(open_store(url)) as store:
        topic = info_of(store, "orders")
        ends = [store.log.bounds(partition).stop for partition in topic.partitions]
        subscription = Subscription(log_id=topic.log_id, name="report", mode="external", external=True)
        passed = [
            Cursor(shard=Shard(topic.log_id, "report", 0, number), next_offset=end - 3)
            for number, end in enumerate(ends)
        ]
        store.cursors.put_subscription(subscription, passed)
    assert run(["--url", url, "topics", "show", "orders", "--json"]) == 0
    document = msgspec.json.decode(capsys.readouterr().out)
    assert document["subscriptions"] == [
        {"name": "report", "mode": "external", "external": True, "protect": True, "lag": 6}
    ]
    assert run(["--url", url, "topics", "show", "orders"]) == 0
    assert "report        external    6  yes" in capsys.readouterr().out
