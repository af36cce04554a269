"""Redriving with Spark: dead letters as a DataFrame, previews by SQL, runs, the command, and its figure."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from contextlib import closing
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tests.dead_rows import T0, TRACE, Kept, a_letter, a_topic, kept, put, seeded

import penstock.spark
from penstock import Bus, Retry, Topic
from penstock.cli import main
from penstock.cli.bench.pipelines import redrive as bench
from penstock.cli.bench.pipelines.sizes import Sizes
from penstock.errors import UnknownTopic, UsageError
from penstock.events import Event
from penstock.failures import fingerprint
from penstock.rows import ParkedFilter
from penstock.spark.pipelines import redrive
from penstock.spark.pipelines.rounds import Ending
from penstock.stores import open_store

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from pyspark.sql import SparkSession

    from penstock.ports import Store
    from penstock.rows import Parked, TopicInfo

pytestmark = pytest.mark.spark

LETTERS = 100_000
NAMES = ("billing", "mailing")


@pytest.fixture
def store(root: Path) -> Iterator[Store]:
    with closing(open_store(f"file:{root}")) as store:
        yield store


@pytest.fixture
def topic(store: Store) -> TopicInfo:
    return a_topic(store, subscriptions=NAMES)


def of(topic: TopicInfo, name: str, **said: Any) -> ParkedFilter:
    return ParkedFilter(log_id=topic.log_id, subscription=name, **said)


# --- the DataFrame --------------------------------------------------------------------------------


def test_a_dead_letter_is_a_row_with_all_that_is_known_of_it(
    spark: SparkSession, store: Store, topic: TopicInfo
) -> None:
    event = Event(
        data=b"\xff\x00", key=b"ada", type="order.placed", id="7", time=datetime(2026, 2, 3, tzinfo=UTC),
        headers={"tenant": b"acme"},
    )  # fmt: skip
    said: dict[str, Any] = {"attempts": 4, "replay": 2, "last_retry_at": T0 + 60, "job": "mine"}
    failure = {"error_type": "Declined", "error_message": "grüße \udcff", "error_trace": TRACE}
    put(store, [a_letter(topic, "billing", 1, 5, event=event, **said, **failure), a_letter(topic, "billing", 0, 9)])
    put(store, [a_letter(topic, "mailing", 0, 9), a_letter(topic, "billing", 0, 8, state="waiting")])
    letters = penstock.spark.dead_letters(spark, store.url, "orders", "billing")
    full, empty = (row.asDict() for row in letters.orderBy("offset").collect())
    naive = datetime.fromtimestamp  # Spark gives times without a zone, in that of this machine
    assert full == {
        "topic": "orders", "subscription": "billing", "partition": 1, "offset": 5, "key": b"ada",
        "type": "order.placed", "id": "7", "time": naive(datetime(2026, 2, 3, tzinfo=UTC).timestamp()),
        "data": b"\xff\x00", "headers": {"tenant": b"acme"}, "attempts": 4, "replay": 2, "error_type": "Declined",
        "error_message": "grüße ?", "fingerprint": fingerprint("Declined", trace=TRACE),
        "parked_at": naive((T0 + 5) / 1e6), "last_retry_at": naive((T0 + 60) / 1e6), "job": "mine",
    }  # fmt: skip
    assert {name for name, value in empty.items() if value is None} == {"key", "type", "id", "time", "last_retry_at"}
    both = penstock.spark.dead_letters(spark, store.url, "orders")
    assert sorted(tuple(row) for row in both.select("subscription", "partition", "offset").collect()) == [
        ("billing", 0, 9), ("billing", 1, 5), ("mailing", 0, 9)
    ]  # fmt: skip


def test_what_is_not_there_is_told(spark: SparkSession, store: Store, topic: TopicInfo) -> None:
    with pytest.raises(UnknownTopic):
        penstock.spark.dead_letters(spark, store.url, "ordres")
    with pytest.raises(UsageError, match=r"topic 'orders' has no subscription 'biling'; did you mean 'billing'\?"):
        penstock.spark.dead_letters(spark, store.url, "orders", "biling")
    assert penstock.spark.dead_letters(spark, store.url, "orders").count() == 0
    assert penstock.spark.preview_redrive(spark, store.url, "orders").planned == 0


# --- previews and runs ----------------------------------------------------------------------------


def test_a_hundred_thousand_letters_chosen_by_sql_come_back_once_to_the_failing_subscription(
    spark: SparkSession, store: Store, topic: TopicInfo
) -> None:
    """P6."""

    def rows(name: str, count: int, first: int = 0) -> Iterator[Parked]:
        for number in range(first, first + count):
            event = Event(data=b'{"total":%d}' % (number % 1_000))
            error = "KeyError" if number % 10 == 0 else "TimeoutError"
            said = {"event": event, "error_type": error, "error_message": f"order {number}", "error_trace": TRACE}
            yield a_letter(topic, name, number % 2, number // 2, **said)

    put(store, rows("billing", LETTERS))
    put(store, rows("mailing", 100))
    job = penstock.spark.preview_redrive(
        spark,
        store.url,
        "orders",
        "billing",
        where="error_type = 'TimeoutError' and get_json_object(cast(data as string), '$.total') >= 500",
    )
    meant = [n for n in range(LETTERS) if n % 10 and n % 1_000 >= 500]
    expected = {(n % 2, n // 2) for n in meant}
    assert (job.planned, job.marked, job.taken) == (len(expected), len(expected), 0)
    assert [(group.count, group.error_type, group.message) for group in job.groups] == [
        (len(expected), "TimeoutError", "order 502")
    ]
    assert [letter.position.offset for letter in job.samples] == sorted(at for p, at in expected if p == 0)[:5]
    # They match, and are not of the job: one that dies after the preview, and one that was shown and is gone.
    put(store, rows("billing", 600, first=LETTERS))
    gone = min(expected)
    store.parked.purge(of(topic, "billing", partition=gone[0], offsets=frozenset({gone[1]})))
    by_hand = max(expected)
    store.parked.replay(of(topic, "billing", partition=by_hand[0], offsets=frozenset({by_hand[1]})), 7)
    done = job.run()
    assert (done.planned, done.found, done.replayed, done.left) == (len(expected), *[len(expected) - 2] * 2, 0)
    assert done.subscriptions == {("orders", "billing"): len(expected) - 2}
    back = store.parked.waiting(of(topic, "billing"))
    assert {(row.shard.partition, row.offset) for row in back} == expected - {gone}
    assert {row.replay for row in back} == {1}
    assert store.parked.waiting(of(topic, "mailing")) == []
    assert job.run().replayed == 0
    # A letter that dies again is not of the job, whatever the filter said.
    put(store, [a_letter(topic, "billing", *by_hand, error_type="TimeoutError", replay=1)])
    assert (job.run().replayed, store.parked.count(of(topic, "billing", job=job.id))["dead"]) == (0, 0)


def test_a_job_of_all_subscriptions_brings_each_letter_back_to_its_own(
    spark: SparkSession, store: Store, topic: TopicInfo
) -> None:
    said = {"error_type": "Declined", "error_trace": TRACE}
    put(store, [a_letter(topic, "billing", 0, offset, **said) for offset in range(3)])
    put(store, [a_letter(topic, "mailing", 1, 2, **said), a_letter(topic, "mailing", 1, 3, error_message="other")])
    cause = fingerprint("Declined", trace=TRACE)
    earlier = penstock.spark.preview_redrive(spark, store.url, "orders", "billing", where="offset = 2")
    job = penstock.spark.preview_redrive(spark, store.url, "orders", fingerprints=[cause])
    assert (job.subscriptions, job.taken, job.marked) == ({"billing": 3, "mailing": 1}, 1, 4)
    assert penstock.spark.redrive(store.url, earlier.id)[1:4] == (1, 0, 0)
    assert penstock.spark.redrive(store.url, job.id).subscriptions == {
        ("orders", "billing"): 3,
        ("orders", "mailing"): 1,
    }
    assert set(kept(store, topic, "billing").values()) == {Kept("waiting", 1, "")}
    assert kept(store, topic, "mailing") == {(1, 2): Kept("waiting", 1, ""), (1, 3): Kept("dead", 0, "")}
    again = penstock.spark.preview_redrive(spark, store.url, "orders", only_new=True)
    assert [letter.position.offset for letter in again.samples] == [3]


def test_many_causes_are_told_apart_and_the_rest_is_counted_together(
    spark: SparkSession, store: Store, topic: TopicInfo, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redrive, "GROUPS_MAX", 2)
    causes = [7] * 4 + [5] * 3 + [1, 2]
    put(store, [a_letter(topic, "billing", 0, at, error_type=f"Error{cause}") for at, cause in enumerate(causes)])
    groups = penstock.spark.preview_redrive(spark, store.url, "orders").groups
    assert [(group.error_type, group.count, group.sample.offset) for group in groups[:2]] == [
        ("Error7", 4, 0), ("Error5", 3, 4)
    ]  # fmt: skip
    assert (groups[2].fingerprint, groups[2].count, groups[2].first) == (
        "",
        2,
        datetime.fromtimestamp((T0 + 7) / 1e6, UTC),
    )


@pytest.mark.parametrize(
    ("where", "why"),
    [
        ("no_such > 1", r"Spark does not understand this expression: .*`no_such` cannot be resolved"),
        ("offset >", r"Spark does not understand this expression: .*Syntax error"),
        ("offset + 1", r"Spark does not understand this expression: .*is not a boolean"),
        ("cast(cast(data as string) as int) > 1", r"the expression fails for a dead letter: .*CAST_INVALID_INPUT"),
    ],
)
def test_a_wrong_expression_is_one_line_and_marks_nothing(
    spark: SparkSession, store: Store, topic: TopicInfo, where: str, why: str
) -> None:
    put(store, [a_letter(topic, "billing", 0, 0, event=Event(data=b"no number"))])
    with pytest.raises(UsageError, match=why) as raised:
        penstock.spark.preview_redrive(spark, store.url, "orders", where=where)
    assert "\n" not in str(raised.value)
    assert "MapInArrow" not in str(raised.value)
    assert kept(store, topic, "billing") == {(0, 0): Kept("dead", 0, "")}


async def consumed(bus: Bus, topic: Topic[bytes], name: str, count: int, fails: str) -> list[tuple[str, int]]:
    seen = []
    async with bus.consume(topic, name, retry=Retry(max_retries=0)) as consumer:
        async for delivery in consumer:
            seen.append((delivery.value.decode(), delivery.replay))
            if delivery.value.decode().startswith(fails):
                await delivery.nack(reason=TimeoutError("no answer"))
            else:
                await delivery.ack()
            if len(seen) == count:
                break
    return seen


def test_handlers_get_exactly_the_letters_that_were_previewed(spark: SparkSession, root: Path) -> None:
    url = f"file:{root}"
    orders = Topic("orders", bytes, partitions=2)
    said = [f"{kind}{number}" for number in range(10) for kind in ("eur", "usd")]

    async def fail() -> None:
        async with Bus(url, topics=[orders]) as bus:
            for each in said:
                await bus.publish(orders, each.encode(), key=each)
            for name in NAMES:
                assert len(await consumed(bus, orders, name, len(said), fails="")) == len(said)

    asyncio.run(fail())
    bus = Bus(url, topics=[orders])
    job = penstock.spark.preview_redrive(spark, bus, orders, "billing", where="cast(data as string) like 'usd%'")
    assert job.run().replayed == 10

    async def again() -> list[tuple[str, int]]:
        async with Bus(url, topics=[orders]) as bus:
            seen = await consumed(bus, orders, "billing", 10, fails="usd3")
            stats = {each.subscription: (each.dead, each.waiting, each.done) for each in await bus.dead_letters.stats()}
            assert stats == {"billing": (11, 0, 9), "mailing": (20, 0, 0)}
            return seen

    assert sorted(asyncio.run(again())) == [(each, 1) for each in sorted(said) if each.startswith("usd")]
    assert job.run()[1:4] == (10, 0, 0)  # one has died again


# --- the command ----------------------------------------------------------------------------------


def test_the_command_shows_marks_and_says_how_to_go_on(root: Path) -> None:
    url = f"file:{root}"
    topic = seeded(url, count=7)
    argv = ["orders", "billing", "--where", "offset < 3", "--master", "local[1]"]
    command = [sys.executable, "-W", "error", "-m", "penstock", "--url", url, "pipeline", "redrive", *argv]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=110)
    assert done.returncode == 0, done.stderr
    *_, last = done.stdout.splitlines()
    job = last.split()[6].rstrip(":")
    assert last == f"6 dead letters are marked with {job}: billing 6"
    assert done.stderr == f"Spark starts …\nnothing came back yet: penstock pipeline redrive --job {job} --yes\n"
    with closing(open_store(url)) as store:
        assert sum(row == Kept("dead", 0, job) for row in kept(store, topic, "billing").values()) == 6


class Shared:
    """The session that all tests share, for a command that would stop its own."""

    def __init__(self, spark: SparkSession) -> None:
        self._spark = spark
        self.stopped = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._spark, name)

    def stop(self) -> None:
        self.stopped += 1


@pytest.fixture
def shared(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> Shared:
    shared = Shared(spark)
    # By its module: the package has a function of the same name.
    monkeypatch.setattr(sys.modules["penstock.spark.session"], "session", lambda *_, **__: shared)
    return shared


def test_with_yes_the_command_does_both(root: Path, shared: Shared, capsys: pytest.CaptureFixture[str]) -> None:
    url = f"file:{root}"
    topic = seeded(url, count=7)
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    assert main(["--url", url, "pipeline", "redrive", "orders", "--where", "offset = 1", "--yes", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    wanted = {"done": True, "planned": 2, "marked": 2, "taken": 0, "found": 2, "replayed": 2, "left": 0}
    assert {name: told[name] for name in wanted} == wanted
    assert told["subscriptions"] == [{"topic": "orders", "name": "billing", "count": 2}]
    assert [(group["count"], group["offset"]) for group in told["groups"]] == [(2, 1)]
    assert [letter["offset"] for letter in told["samples"]] == [1, 1]
    with closing(open_store(url)) as store:
        assert [at for at, row in kept(store, topic, "billing").items() if row.state == "waiting"] == [(0, 1), (1, 1)]
    # An expression that is none ends it like any other mistake, and Spark with it.
    assert main(["--url", url, "pipeline", "redrive", "orders", "--where", "offset ="]) == 2
    assert "Spark does not understand this expression" in capsys.readouterr().err
    assert shared.stopped == 2
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == handlers


def test_a_continuous_redrive_brings_back_what_dies_once_each_until_it_is_told_to_end(
    root: Path, shared: Shared, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"file:{root}"
    topic = seeded(url, count=3, partitions=1)
    rounds = iter([[a_letter(topic, "billing", 0, 1, replay=1), a_letter(topic, "billing", 0, 5)], []])

    def idle(ending: Ending, _seconds: float) -> bool:
        dying = next(rounds)
        with closing(open_store(url)) as store:
            put(store, dying)
        if not dying:
            signal.raise_signal(signal.SIGTERM)
        return ending.asked

    monkeypatch.setattr(Ending, "wait", idle)
    assert main(["--url", url, "pipeline", "redrive", "orders", "--yes", "--continuous", "--json"]) == 0
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(each["planned"], each["replayed"], each["done"]) for each in told] == [(3, 3, True), (1, 1, True)]
    with closing(open_store(url)) as store:
        assert kept(store, topic, "billing") == {
            (0, 0): Kept("waiting", 1, ""),
            (0, 1): Kept("dead", 1, ""),  # it came back before
            (0, 2): Kept("waiting", 1, ""),
            (0, 5): Kept("waiting", 1, ""),
        }


# --- the figure -----------------------------------------------------------------------------------


def test_the_bench_measures_a_preview_and_its_run(spark: SparkSession, root: Path) -> None:
    sizes = Sizes(redrive_letters=300, redrive_partitions=2)
    [figure] = bench.figures(spark, root, sizes, 2)
    assert (figure.name, figure.unit, figure.goal) == ("redrive", "s", "value <= 5 s")
    assert np.isfinite(figure.value)
    assert figure.value > 0
