"""The promises of the commands for subscriptions: what they show, what they change, what a consumer leaves behind."""

from __future__ import annotations

import io
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.test_cli_store import Done, Run, flip_a_byte, line_of, publish_one_by_one, start

from penstock.cli import main
from penstock.engine.policy import Policy
from penstock.events import Event
from penstock.offsets import Bitmap, Range, RangeSet
from penstock.ports import Store
from penstock.rows import Claim, Commit, Cursor, Parked, Settling, Shard, Subscription, TopicInfo, TopicSettings
from penstock.stores import open_store

URL = "file:./penstock-data"


@pytest.fixture(autouse=True)
def nothing_from_outside(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in os.environ:
        if name.startswith("PENSTOCK_") or name in {"NO_COLOR", "FORCE_COLOR", "COLUMNS", "PYTHONUNBUFFERED"}:
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run a command in this process."""

    def run(*argv: str) -> Done:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))
        code = main(list(argv))
        return Done(code, *capsys.readouterr())

    return run


@contextmanager
def topic(name: str = "orders") -> Iterator[tuple[Store, TopicInfo]]:
    """Open the store, and find a topic."""
    with closing(open_store(URL)) as store:
        (info,) = [each for each in store.log.topics() if each.name == name]
        yield store, info


def policy_of(name: str) -> Policy:
    with topic() as (store, info):
        found = store.cursors.subscription(info.log_id, name)
        assert found is not None
        return Policy.of(found.policy)


def cursors_of(name: str) -> list[int]:
    """Return where a subscription is in each partition."""
    with topic() as (store, info):
        return [cursor.next_offset for cursor in store.cursors.load(info.log_id, name)]


def lag_of(run: Run, name: str) -> dict[str, Any]:
    """Return the only partition's."""
    (found,) = json.loads(run("lag", "orders", name, "--json").out)["lag"]
    return dict(found)


def published(run: Run, *texts: str) -> None:
    """Publish events of the topic `orders` in one block."""
    assert run("publish", "orders", "--create", *texts).code == 0


def halfway(run: Run) -> None:
    """Make the subscription `billing` of ten events: one is a dead letter, one waits, one is settled too early."""
    published(run, *"0123456789")
    assert run("subscriptions", "create", "orders", "billing", "--mode", "failover").code == 0
    with topic() as (store, info):
        shard = Shard(info.log_id, "billing", 0, 0)
        ahead = Bitmap(4)
        ahead.set(6)
        dead = Parked(shard=shard, offset=1, state="dead", lane=0, event=Event())
        waiting = Parked(shard=shard, offset=2, state="waiting", lane=0, event=Event())
        cursor = Cursor(shard=shard, next_offset=4, settled=ahead.to_bytes())
        assert store.cursors.commit([Commit(cursors=(cursor,), parked=(dead, waiting))]) == [None]


def external(run: Run) -> None:
    """Make a subscription `query` whose progress is kept elsewhere."""
    published(run, "a", "b")
    with topic() as (store, info):
        store.cursors.put_subscription(
            Subscription(log_id=info.log_id, name="query", mode="spark", external=True),
            [Cursor(shard=Shard(info.log_id, "query", 0, 0), next_offset=1)],
        )


# --- which store, topic and subscription ---------------------------------------------------------

ON_A_STORE = [
    "subscriptions",
    "subscriptions ls",
    "subscriptions show orders billing",
    "subscriptions create orders billing --mode failover",
    "subscriptions set orders billing --window 5",
    "subscriptions rm orders billing --yes",
    "lag",
    "lag orders billing",
    "lag --watch --count 1",
    "seek orders billing --to latest",
    "pause orders billing",
    "resume orders billing",
    "consume orders billing --mode failover --max 1",
]


@pytest.mark.parametrize("command", ON_A_STORE)
def test_a_store_that_does_not_exist_is_an_error_and_is_not_made(command: str, run: Run, tmp_path: Path) -> None:
    done = run(*command.split())
    assert (done.code, done.out) == (1, "")
    assert done.err.startswith("error: there is no store in penstock-data: check --url")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ON_A_STORE)
def test_a_store_in_memory_makes_no_sense(command: str, run: Run) -> None:
    done = run("--url", "memory:", *command.split())
    assert (done.code, done.out) == (2, "")
    assert "give --url file:./directory" in done.err


@pytest.mark.parametrize("command", [command for command in ON_A_STORE if "orders" in command])
def test_a_topic_that_is_not_there_is_a_usage_error_that_names_the_nearest(command: str, run: Run) -> None:
    run("topics", "create", "orders")
    done = run(*command.replace("orders", "ordres").split())
    assert (done.code, done.out) == (2, "")
    assert "there is no topic 'ordres'; did you mean 'orders'?" in done.err


OF_ONE = [
    "subscriptions show orders NAME",
    "subscriptions set orders NAME --window 5",
    "subscriptions rm orders NAME",
    "subscriptions rm orders NAME --yes",
    "lag orders NAME",
    "seek orders NAME --to latest --yes",
    "pause orders NAME",
    "resume orders NAME",
]


@pytest.mark.parametrize("command", OF_ONE)
def test_a_subscription_that_is_not_there_is_a_usage_error_that_names_the_nearest(command: str, run: Run) -> None:
    run("topics", "create", "orders")
    none = run(*command.replace("NAME", "billing").split())
    assert (none.code, none.out) == (2, "")
    assert none.err == "error: topic 'orders' has no subscription 'billing'; it has none\n"
    run("subscriptions", "create", "orders", "billing", "--mode", "exclusive")
    done = run(*command.replace("NAME", "biling").split())
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("error: topic 'orders' has no subscription 'biling'; did you mean 'billing'?; ")
    assert "`penstock subscriptions ls orders` lists them" in done.err


# --- ls and show ---------------------------------------------------------------------------------


def test_subscriptions_lists_how_each_does(run: Run) -> None:
    halfway(run)
    run("topics", "create", "visits")
    run("subscriptions", "create", "visits", "counting", "--mode", "exclusive", "--no-protect")
    run("pause", "visits", "counting")
    heading, orders, visits = (line.split() for line in run("subscriptions").out.splitlines())
    assert " ".join(heading) == "topic name mode lag unsettled parked dead oldest state protect"
    assert orders[:7] == ["orders", "billing", "failover", "6", "5", "1", "1"]
    assert orders[-3:] == ["s", "-", "yes"]
    assert visits == ["visits", "counting", "exclusive", "0", "0", "0", "0", "-", "paused", "no"]

    document = json.loads(run("subscriptions", "--json").out)
    assert [each["name"] for each in document["subscriptions"]] == ["billing", "counting"]
    assert document["subscriptions"][0].pop("oldest_seconds") > 0
    assert document["subscriptions"][0] == {
        "topic": "orders",
        "name": "billing",
        "mode": "failover",
        "lag": 6,
        "unsettled": 5,
        "parked": 1,
        "dead": 1,
        "paused": False,
        "external": False,
        "protect": True,
    }


def test_subscriptions_of_one_topic_are_listed_with_or_without_ls(run: Run) -> None:
    published(run, "a")
    run("topics", "create", "visits")
    run("subscriptions", "create", "orders", "billing", "--mode", "exclusive")
    run("subscriptions", "create", "visits", "counting", "--mode", "exclusive")
    for command in ("subscriptions ls visits", "subscriptions visits"):
        document = json.loads(run(*command.split(), "--json").out)
        assert [each["name"] for each in document["subscriptions"]] == ["counting"]
        assert "billing" not in run(*command.split()).out
    assert "billing" in run("subscriptions", "ls").out


def test_a_mistyped_command_of_subscriptions_is_named(run: Run) -> None:
    published(run, "a")
    done = run("subscriptions", "shw", "orders", "billing")
    assert (done.code, done.out) == (2, "")
    assert "Did you mean 'show'?" in done.err
    assert run("subscriptions", "--json", "ls").code == 2


def test_subscriptions_of_internal_topics_are_listed_only_when_asked_for(run: Run) -> None:
    published(run, "a")
    with topic() as (store, _):
        info = store.log.create_topic("_inner", TopicSettings())
        store.cursors.put_subscription(Subscription(log_id=info.log_id, name="mine", mode="exclusive"))
    assert "_inner" not in run("subscriptions").out
    assert "_inner" not in run("lag").out
    for command in ("subscriptions --all", "subscriptions ls --all", "subscriptions _inner", "lag _inner"):
        assert "_inner" in run(*command.split()).out


def test_show_tells_the_policy_with_its_defaults_marked_and_every_partition(run: Run) -> None:
    halfway(run)
    run("subscriptions", "set", "orders", "billing", "--max-retries", "7", "--heartbeat", "off")
    document = json.loads(run("subscriptions", "show", "orders", "billing", "--json").out)
    assert document["policy"]["max_retries"] == {"value": 7, "default": False}
    assert document["policy"]["heartbeat_seconds"] == {"value": None, "default": False}
    assert document["policy"]["window_events"] == {"value": 10_000, "default": True}
    (partition,) = document["partitions"]
    assert partition["updated_at"].endswith("Z")
    assert {
        "partition": 0,
        "cursor": 4,
        "head": 10,
        "lag": 6,
        "unsettled": 5,
        "parked": 1,
        "dead": 1,
        "owner": None,
        "epoch": None,
        "generation": 0,
    }.items() <= partition.items()

    shown = [line.split() for line in run("subscriptions", "show", "orders", "billing").out.splitlines()]
    assert ["max_retries", "7", "set"] in shown
    assert ["heartbeat_seconds", "off", "set"] in shown
    assert ["window_bytes", "16.0", "MiB", "default"] in shown
    assert shown[-5][:7] == ["0", "4", "10", "6", "5", "1", "1"]
    assert [" ".join(line) for line in shown[-3::2]] == ["1 key waits for another attempt", "nobody consumes it"]


def test_show_tells_who_shares_a_subscription_and_which_slots_are_whose(run: Run) -> None:
    published(run, "a")
    assert run("subscriptions", "create", "orders", "billing").code == 0
    with topic() as (store, info):
        shard = Shard(info.log_id, "billing", 5, 0)
        waiting = Parked(shard=shard, offset=0, state="waiting", lane=0, event=Event())
        assert store.cursors.commit([Commit(parked=(waiting,))]) == [None]
        process = store.leases.acquire("process/p", "p", 60)
        assert process is not None
        names = [f"slot/{info.log_id}/billing/{slot}" for slot in (0, 1, 2, 5)]
        assert len(store.leases.acquire_some(names, "team", 9, under=process)) == 4
        store.leases.acquire(f"member/{info.log_id}/billing/worker-1", "worker-1", 60, under=process)
        free, mine = json.loads(run("subscriptions", "show", "orders", "billing", "--json").out)["sharing"]
        assert (free["process"], free["consumers"], len(free["slots"]), free["epochs"]) == (None, [], 60, None)
        assert (mine["process"], mine["consumers"], mine["slots"]) == ("process/p", ["worker-1"], [0, 1, 2, 5])
        assert (mine["parked"], mine["epochs"][1] - mine["epochs"][0]) == (1, 3)
        shown = [" ".join(line.split()) for line in run("subscriptions", "show", "orders", "billing").out.splitlines()]
        assert any(line.startswith("process/p worker-1 4 64 0-2, 5 ") for line in shown)
        assert any(line.startswith("nobody yet - 60 0 3-4, 6-63 - 0") for line in shown)
        assert shown[-1] == "60 slots have no owner at the moment: whoever is there takes them within a second"
        assert "worker-1" in run("subscriptions", "rm", "orders", "billing").out


def test_show_tells_why_slots_do_not_move(run: Run) -> None:
    published(run, "a")
    assert run("subscriptions", "create", "orders", "billing").code == 0
    assert run("subscriptions", "show", "orders", "billing").out.splitlines()[-1] == (
        "idle: nobody consumes it, and nobody has yet"
    )
    with topic() as (store, info):
        for number, slots in ((1, range(40)), (2, range(40, 64))):
            process = store.leases.acquire(f"process/p{number}", f"p{number}", 60)
            assert process is not None
            names = [f"slot/{info.log_id}/billing/{slot}" for slot in slots]
            assert len(store.leases.acquire_some(names, f"team-{number}", 64, under=process)) == len(slots)
            store.leases.acquire(f"member/{info.log_id}/billing/worker-{number}", f"worker-{number}", 60, under=process)
        assert run("pause", "orders", "billing").code == 0
        document = json.loads(run("subscriptions", "show", "orders", "billing", "--json").out)
        assert [(each["process"], each["due"]) for each in document["sharing"]] == [
            ("process/p1", 32),
            ("process/p2", 32),
        ]
        assert document["waits"] == [
            "it is paused: `penstock resume orders billing` lets it go on",
            "process/p1 has 8 slots more than its due: each goes when its handlers are done",
        ]


def test_show_tells_who_has_claimed_what(run: Run) -> None:
    published(run, *"abcdefgh")
    assert run("subscriptions", "create", "orders", "mail", "--mode", "shared").code == 0
    with topic() as (store, info):
        main = Shard(info.log_id, "mail", 0, 0)
        process = store.leases.acquire("process/p", "p", 60)
        assert process is not None
        store.leases.acquire(f"shard/{info.log_id}/mail/1/0", "pool", 60, under=process)
        store.leases.acquire(f"member/{info.log_id}/mail/worker-1", "worker-1", 60, under=process)
        for berth, most, settled in ((1, 3, [Range(0, 1)]), (2, 2, [])):
            settling = Settling(shard=main, generation=0, berth=berth, claim=Claim(most, 8), settled=RangeSet(settled))
            assert store.cursors.commit([Commit(settling=settling)]) == [None]
        document = json.loads(run("subscriptions", "show", "orders", "mail", "--json").out)
        nobody, mine = document["sharing"]
        assert (mine["process"], mine["consumers"], mine["berths"]) == ("process/p", ["worker-1"], ["1/0"])
        assert (nobody["process"], nobody["berths"], nobody["epochs"]) == (None, ["2/0"], None)
        assert (mine["claimed"], nobody["claimed"]) == (3, 2)
        shown = [" ".join(line.split()) for line in run("subscriptions", "show", "orders", "mail").out.splitlines()]
        assert any(line.startswith("process/p worker-1 1/0 3 ") for line in shown)
        assert shown[-1] == "2 claimed events have no owner at the moment: whoever is there takes them within a second"


def test_a_mode_is_changed_while_nobody_consumes(run: Run) -> None:
    published(run, "a")
    assert run("subscriptions", "create", "orders", "billing").code == 0
    changed = run("subscriptions", "set", "orders", "billing", "--mode", "shared", "--window", "50")
    assert changed.err.splitlines()[1:] == ["  window_events: 10,000 → 50", "  mode: key_shared → shared"]
    assert json.loads(run("subscriptions", "show", "orders", "billing", "--json").out)["mode"] == "shared"
    # Whoever says nothing of a mode takes the one that it has.
    assert run("consume", "orders", "billing", "--max", "1").code == 0
    refused = run("consume", "orders", "billing", "--mode", "exclusive", "--max", "1")
    assert refused.code == 2
    assert "subscriptions set orders billing --mode exclusive" in refused.err
    with topic() as (store, info):
        store.leases.acquire(f"member/{info.log_id}/billing/worker-1", "worker-1", 60)
        refused = run("subscriptions", "set", "orders", "billing", "--mode", "exclusive")
        assert refused.code == 2
        assert "is consumed by worker-1 in mode 'shared': end them first" in refused.err


def test_what_a_later_version_has_stored_in_a_policy_is_shown_and_kept(run: Run) -> None:
    halfway(run)
    with topic() as (store, info):
        found = store.cursors.subscription(info.log_id, "billing")
        assert found is not None
        store.cursors.put_subscription(msgspec.structs.replace(found, policy={"colour": "red"}))
    assert run("subscriptions", "set", "orders", "billing", "--window", "5").code == 0
    document = json.loads(run("subscriptions", "show", "orders", "billing", "--json").out)
    assert document["policy"]["colour"] == {"value": "red", "default": False}
    assert ["colour", "red", "set"] in [
        line.split() for line in run("subscriptions", "show", "orders", "billing").out.splitlines()
    ]


def test_a_subscription_that_is_kept_elsewhere_is_shown_and_not_touched(run: Run) -> None:
    external(run)
    assert run("subscriptions").out.splitlines()[1].split()[-2:] == ["external", "yes"]
    assert run("lag").out.splitlines()[1].endswith("elsewhere")
    assert "max_retries" not in run("subscriptions", "show", "orders", "query").out
    for command in (
        "subscriptions set orders query --window 5",
        "seek orders query --to 0 --yes",
        "pause orders query",
    ):
        done = run(*command.split())
        assert (done.code, done.out) == (2, "")
        assert "is driven from outside" in done.err
    assert cursors_of("query") == [1]


# --- create --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("start_at", "offset"),
    [("earliest", 0), ("latest", 3), ("2", 2), ("3", 3), ("2020-01-01T00:00:00Z", 0), ("2199-01-01T00:00:00Z", 3)],
)
def test_a_subscription_begins_where_it_is_told_to(start_at: str, offset: int, run: Run) -> None:
    published(run, *"abc")
    done = run("subscriptions", "create", "orders", "billing", "--mode", "exclusive", "--start", start_at)
    assert (done.code, done.out, done.err) == (0, "", "subscription 'billing' of topic 'orders' is created\n")
    assert cursors_of("billing") == [offset]


def test_a_subscription_begins_with_the_earliest_event_of_every_partition(run: Run) -> None:
    run("topics", "create", "orders", "--partitions", "3")
    assert run("subscriptions", "create", "orders", "billing", "--mode", "failover").code == 0
    assert cursors_of("billing") == [0, 0, 0]


def test_creating_a_subscription_again_changes_its_policy_and_not_its_place(run: Run) -> None:
    published(run, *"abc")
    create = ("subscriptions", "create", "orders", "billing", "--mode", "exclusive")
    assert run(*create, "--start", "1").code == 0
    assert run(*create).err == "subscription 'billing' of topic 'orders' exists already, as it should be\n"
    changed = run(*create, "--max-retries", "9", "--start", "latest")
    assert changed.code == 0
    assert changed.err.splitlines() == [
        "subscription 'billing' of topic 'orders' exists; it is changed",
        "where it is stays as it is: `penstock seek orders billing --to latest` moves it",
    ]
    assert (policy_of("billing").max_retries, cursors_of("billing")) == (9, [1])
    refused = run("subscriptions", "create", "orders", "billing", "--mode", "failover")
    assert refused.code == 2
    assert "has mode 'exclusive', not 'failover'" in refused.err


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ("Billing --mode exclusive", "subscription name 'Billing' is not allowed"),
        ("billing --mode shared-ish", "--mode"),
        ("billing --mode exclusive --start earlist", "did you mean 'earliest'?"),
        ("billing --mode exclusive --start -1", "--start is '-1'"),
        ("billing --mode exclusive --start 4", "orders/0 holds offsets"),
        ("billing --mode exclusive --start 2026-01-31T12:00:00", "has no time zone"),
        ("billing --mode exclusive --max-retries -1", "max_retries"),
        ("billing --mode exclusive --max-retries many", "--max-retries"),
        ("billing --mode exclusive --heartbeat nromal", "did you mean 'normal'?"),
        ("billing --mode exclusive --exhausted forget", "--exhausted"),
        ("billing --mode exclusive --checkpoint 100", "write each, or how many events and how long"),
        ("billing --mode exclusive --checkpoint 100,soon", "is no duration"),
        ("billing --mode exclusive --rate -1", "--rate"),
        ("billing --mode exclusive --window 0", "window_events"),
        ("billing --mode exclusive --window-bytes 1MB", "is no size"),
        ("billing --mode exclusive --timeout soon", "is no duration"),
        ("billing --mode exclusive --backoff 2m", "backoff_seconds_max, 60, is less than backoff_seconds, 120"),
        ("billing --mode exclusive --jitter 2", "jitter"),
    ],
)
def test_a_subscription_is_not_created_with_wrong_arguments(arguments: str, why: str, run: Run) -> None:
    published(run, *"abc")
    done = run("subscriptions", "create", "orders", *arguments.split())
    assert (done.code, done.out) == (2, "")
    assert why in " ".join(done.err.split())
    assert json.loads(run("subscriptions", "--json").out) == {"subscriptions": []}


def test_an_offset_of_several_partitions_is_refused(run: Run) -> None:
    run("topics", "create", "orders", "--partitions", "2")
    done = run("subscriptions", "create", "orders", "billing", "--mode", "exclusive", "--start", "0")
    assert done.code == 2
    assert "has 2 partitions" in done.err


# --- set -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "fields"),
    [
        (["--max-retries", "5"], {"max_retries": 5}),
        (["--backoff", "2s", "--backoff-max", "5m"], {"backoff_seconds": 2.0, "backoff_seconds_max": 300.0}),
        (["--jitter", "0.5"], {"jitter": 0.5}),
        (["--exhausted", "halt"], {"exhausted": "halt"}),
        (["--timeout", "30s"], {"timeout_seconds": 30.0}),
        (["--heartbeat", "high_priority"], {"heartbeat_seconds": 0.1}),
        (["--heartbeat", "2.5"], {"heartbeat_seconds": 2.5}),
        (["--heartbeat", "off"], {"heartbeat_seconds": None}),
        (["--window", "1000", "--window-bytes", "1 MiB"], {"window_events": 1000, "window_bytes": 1 << 20}),
        (["--read-events", "10", "--read-bytes", "64 KiB"], {"read_events": 10, "read_bytes": 1 << 16}),
        (["--rate", "10"], {"rate_per_second": 10.0}),
        (["--checkpoint", "100,5s"], {"checkpoint_events": 100, "checkpoint_seconds": 5.0}),
        (["--parked-max", "0"], {"parked_max": 0}),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_set_changes_what_it_names_and_nothing_else(options: list[str], fields: dict[str, Any], run: Run) -> None:
    halfway(run)
    run("subscriptions", "set", "orders", "billing", "--max-retries", "4")
    done = run("subscriptions", "set", "orders", "billing", *options)
    assert (done.code, done.out) == (0, "")
    heading, *lines = done.err.splitlines()
    assert heading == "subscription 'billing' of topic 'orders' is changed"
    assert [line.partition(":")[0].strip() for line in lines] == list(fields)
    assert policy_of("billing") == Policy(**{"max_retries": 4, **fields})
    assert run("subscriptions", "set", "orders", "billing", *options).err == (
        "subscription 'billing' of topic 'orders' is so already\n"
    )


def test_what_was_set_can_be_taken_away(run: Run) -> None:
    halfway(run)
    run("subscriptions", "set", "orders", "billing", "--timeout", "30", "--rate", "5", "--checkpoint", "9,1")
    run("subscriptions", "set", "orders", "billing", "--timeout", "0", "--rate", "0", "--checkpoint", "each")
    assert policy_of("billing") == Policy()


def test_set_says_whether_retention_waits(run: Run) -> None:
    halfway(run)
    done = run("subscriptions", "set", "orders", "billing", "--no-protect", "--window", "7")
    assert done.err.splitlines()[1:] == ["  window_events: 10,000 → 7", "  retention waits for it: no"]
    assert json.loads(run("subscriptions", "--json").out)["subscriptions"][0]["protect"] is False
    assert policy_of("billing").window_events == 7


@pytest.mark.parametrize("options", ["", "--max-retries -1", "--heartbeat slow", "--exhausted die", "--window 1.5"])
def test_nothing_is_set_that_is_not_right(options: str, run: Run) -> None:
    halfway(run)
    done = run("subscriptions", "set", "orders", "billing", *options.split())
    assert (done.code, done.out) == (2, "")
    assert done.err
    assert policy_of("billing") == Policy()


# --- rm ------------------------------------------------------------------------------------------


def test_a_subscription_is_deleted_only_with_yes_and_shown_first(run: Run) -> None:
    halfway(run)
    preview = run("subscriptions", "rm", "orders", "billing")
    assert preview.code == 2
    assert preview.out.splitlines()[1].split() == ["orders", "billing", "failover", "5", "1", "1", "-"]
    assert "nothing was deleted" in preview.err
    assert len(json.loads(run("subscriptions", "--json").out)["subscriptions"]) == 1
    done = run("subscriptions", "rm", "orders", "billing", "--yes")
    assert (done.code, done.out, done.err) == (0, "", "subscription 'billing' of topic 'orders' is deleted\n")
    assert json.loads(run("subscriptions", "--json").out) == {"subscriptions": []}


# --- lag -----------------------------------------------------------------------------------------


def test_lag_is_shown_partition_by_partition(run: Run) -> None:
    halfway(run)
    run("topics", "create", "visits", "--partitions", "2")
    run("subscriptions", "create", "visits", "counting", "--mode", "exclusive")
    heading, orders, *visits = (line.split() for line in run("lag").out.splitlines())
    assert " ".join(heading) == "topic subscription partition cursor head lag unsettled parked dead oldest kept"
    assert orders[:9] == ["orders", "billing", "0", "4", "10", "6", "5", "1", "1"]
    assert orders[-1] == "here"
    assert [line[:3] for line in visits] == [["visits", "counting", "0"], ["visits", "counting", "1"]]
    assert len(run("lag", "visits").out.splitlines()) == 3
    assert len(run("lag", "orders", "billing").out.splitlines()) == 2

    document = json.loads(run("lag", "orders", "--json").out)
    (found,) = document["lag"]
    assert found.pop("oldest_seconds") > 0
    assert found == {
        "topic": "orders",
        "subscription": "billing",
        "partition": 0,
        "next_offset": 4,
        "head": 10,
        "lag": 6,
        "unsettled": 5,
        "parked": 1,
        "dead": 1,
        "external": False,
    }


@pytest.mark.parametrize("command", ["lag --watch 0.05 --count 3", "lag orders --watch=0.05 --count 3"])
def test_a_watch_prints_one_block_for_each_look(command: str, run: Run) -> None:
    halfway(run)
    done = run(*command.split())
    assert (done.code, done.err) == (0, "")
    blocks = done.out.split("\n\n")
    assert len(blocks) == 3
    assert all(block.splitlines()[2].startswith("orders  billing") for block in blocks)
    assert "\x1b" not in done.out
    looks = run(*command.split(), "--json").lines
    assert [look["lag"][0]["lag"] for look in looks] == [6, 6, 6]
    assert sorted(look["at"] for look in looks) == [look["at"] for look in looks]


@pytest.mark.parametrize("command", ["lag --watch orders billing", "lag orders --watch billing", "lag orders --watch"])
def test_watch_needs_no_value(command: str, run: Run) -> None:
    halfway(run)
    (look,) = run(*command.split(), "--count", "1", "--json").lines
    assert len(look["lag"]) == 1


def test_on_a_terminal_a_watch_is_drawn_in_place(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    halfway(run)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    done = run("lag", "--watch", "0.05", "--count", "2")
    assert done.out.count("\x1b[H\x1b[J") == 2
    monkeypatch.setenv("TERM", "dumb")
    assert "\x1b[H" not in run("lag", "--watch", "0.05", "--count", "2").out


@pytest.mark.parametrize("options", ["--count 2", "--watch 0", "--watch 1 --count 0", "orders billing more"])
def test_a_watch_with_wrong_arguments_is_a_usage_error(options: str, run: Run) -> None:
    halfway(run)
    done = run("lag", *options.split())
    assert (done.code, done.out) == (2, "")


def test_a_watch_goes_on_until_it_is_interrupted(run: Run) -> None:
    halfway(run)
    with start("lag", "--watch", "0.05", "--json") as watch:
        try:
            for _ in range(3):
                assert json.loads(line_of(watch))["lag"][0]["lag"] == 6
            watch.send_signal(signal.SIGINT)
            _, err = watch.communicate(timeout=60)
        finally:
            watch.kill()
    assert (watch.returncode, err) == (130, "")


@pytest.mark.parametrize("command", ["lag", "subscriptions", "lag --watch 0.05 --count 2"])
def test_damage_in_one_topic_hides_no_other(command: str, run: Run) -> None:
    publish_one_by_one(run, "needle")
    run("subscriptions", "create", "orders", "billing", "--mode", "exclusive")
    flip_a_byte(b"needle")
    run("topics", "create", "visits")
    run("subscriptions", "create", "visits", "counting", "--mode", "exclusive")
    done = run(*command.split())
    assert done.code == 3
    assert "billing" in done.out
    assert "counting" in done.out
    assert "error: corrupt: " in done.err
    shown = run("subscriptions", "show", "orders", "billing", "--json")
    assert (shown.code, json.loads(shown.out)["lag"]) == (3, 1)


# --- seek ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("to", "offset", "skipped", "again"),
    [
        # The cursor is at 4; 2 waits aside, 6 is settled.
        ("4", 4, 1, 1),
        ("earliest", 0, 0, 4),
        ("3", 3, 1, 2),
        ("6", 6, 3, 1),
        ("8", 8, 4, 0),
        ("latest", 10, 6, 0),
        ("2199-01-01T00:00:00+01:00", 10, 6, 0),
    ],
)
def test_seek_shows_what_would_be_skipped_or_come_again_and_does_it_with_yes(
    to: str, offset: int, skipped: int, again: int, run: Run
) -> None:
    halfway(run)
    preview = run("seek", "orders", "billing", "--to", to)
    assert preview.code == 2
    assert preview.out.splitlines()[1].split() == ["orders/0", "4", str(offset), str(skipped), str(again)]
    assert preview.err == "error: nothing was moved: give --yes to do it\n"
    as_json = run("seek", "orders", "billing", "--to", to, "--json")
    assert as_json.code == 2
    row = {"partition": 0, "from": 4, "to": offset, "skipped": skipped, "delivered_again": again}
    assert json.loads(as_json.out) == {"topic": "orders", "name": "billing", "done": False, "partitions": [row]}
    assert cursors_of("billing") == [4]

    done = run("seek", "orders", "billing", "--to", to, "--yes", "--json")
    assert (done.code, done.err) == (0, "")
    assert json.loads(done.out) == {"topic": "orders", "name": "billing", "done": True, "partitions": [row]}
    assert cursors_of("billing") == [offset]
    after = lag_of(run, "billing")
    assert (after["lag"], after["parked"], after["dead"]) == (10 - offset, 0, 1)


def test_seek_moves_one_partition_or_all(run: Run) -> None:
    run("topics", "create", "orders", "--partitions", "2")
    for number in range(20):
        run("publish", "orders", "x", "--key", str(number))
    run("subscriptions", "create", "orders", "billing", "--mode", "exclusive", "--start", "latest")
    ends = cursors_of("billing")
    assert all(ends)
    assert run("seek", "orders", "billing", "--to", "1", "--yes").code == 2
    assert run("seek", "orders", "billing", "--to", "1", "--partition", "1", "--yes").code == 0
    assert cursors_of("billing") == [ends[0], 1]
    done = run("seek", "orders", "billing", "--to", "earliest", "--yes")
    assert [line.split()[:3] for line in done.out.splitlines()[1:]] == [
        ["orders/0", str(ends[0]), "0"],
        ["orders/1", "1", "0"],
    ]
    assert cursors_of("billing") == [0, 0]


def test_seek_goes_to_a_time(run: Run) -> None:
    published(run, "a")
    between = datetime.now(UTC)
    published(run, "b")
    run("subscriptions", "create", "orders", "billing", "--mode", "exclusive")
    assert run("seek", "orders", "billing", "--to", between.isoformat(), "--yes").code == 0
    assert cursors_of("billing") == [1]
    before = (between - timedelta(days=1)).isoformat()
    assert run("seek", "orders", "billing", "--to", before, "--yes").code == 0
    assert cursors_of("billing") == [0]


@pytest.mark.parametrize("options", ["", "--to 11", "--to soon", "--to 1 --partition 1", "--to -1"])
def test_a_subscription_is_not_moved_where_nothing_is(options: str, run: Run) -> None:
    halfway(run)
    done = run("seek", "orders", "billing", *options.split(), "--yes")
    assert (done.code, done.out) == (2, "")
    assert cursors_of("billing") == [4]


# --- pause and resume ----------------------------------------------------------------------------


def test_a_paused_subscription_hands_nothing_over_until_it_is_resumed(run: Run) -> None:
    published(run, "a")
    run("subscriptions", "create", "orders", "billing", "--mode", "exclusive")
    assert run("pause", "orders", "billing").err == "subscription 'billing' of topic 'orders' is paused\n"
    assert run("pause", "orders", "billing").err.endswith("is paused already\n")
    waiting = run("consume", "orders", "billing", "--mode", "exclusive", "--wait", "0.5")
    assert (waiting.code, waiting.out) == (0, "")
    assert waiting.err == "the subscription is paused: `penstock resume orders billing` lets it go on\n"
    assert run("resume", "orders", "billing").err == "subscription 'billing' of topic 'orders' goes on\n"
    assert "was not paused" in run("resume", "orders", "billing").err
    assert policy_of("billing").resumes == 2
    assert run("consume", "orders", "billing", "--mode", "exclusive", "--max", "1").out.endswith("  a\n")


# --- consume -------------------------------------------------------------------------------------

CONSUME = ("consume", "orders", "billing", "--mode", "exclusive")


@pytest.mark.parametrize("options", [[], ["--batch"], ["--json"], ["--json", "--batch"]], ids=" ".join)
def test_events_are_printed_as_read_does_and_settled(options: list[str], run: Run) -> None:
    published(run, *"abcde")
    read = run("read", "orders", *[option for option in options if option == "--json"])
    done = run(*CONSUME, *options, "--max", "5")
    assert (done.code, done.out, done.err) == (0, read.out, "")
    assert lag_of(run, "billing")["lag"] == 0
    assert run("subscriptions").out.splitlines()[1].split()[:3] == ["orders", "billing", "exclusive"]


@pytest.mark.parametrize("options", [[], ["--batch"]], ids=["one by one", "batches"])
def test_consuming_ends_after_so_many_and_the_next_one_goes_on_there(options: list[str], run: Run) -> None:
    published(run, *"abcde")
    printed = []
    for count in (2, 3):
        done = run(*CONSUME, *options, "--max", str(count), "--json")
        assert done.code == 0
        printed.append([int(event["sequence"]) for event in done.lines])
    assert printed == [[0, 1], [2, 3, 4]]
    assert cursors_of("billing") == [5]


@pytest.mark.parametrize("count", [3, 9])
def test_what_is_not_acknowledged_is_given_back_and_no_attempt_is_counted(count: int, run: Run) -> None:
    published(run, *"abcde")
    for _ in range(2):
        done = run(*CONSUME, "--no-ack", "--max", str(count), "--wait", "0.5")
        assert done.code == 0
        assert [line[-1] for line in done.out.splitlines()] == list("abcde")[:count]
        assert lag_of(run, "billing")["unsettled"] == 5
    with topic() as (store, info):
        (cursor,) = store.cursors.load(info.log_id, "billing")
        assert cursor.attempts == {}


def test_consuming_ends_when_nothing_came_for_long_enough(run: Run) -> None:
    published(run, "a")
    done = run(*CONSUME, "--wait", "0.5", "--start", "latest")
    assert (done.code, done.out, done.err) == (0, "", "")
    assert cursors_of("billing") == [1]
    published(run, "b")
    assert run(*CONSUME, "--wait", "0.5").out.endswith("  b\n")


def test_all_partitions_are_consumed(run: Run) -> None:
    run("topics", "create", "orders", "--partitions", "3")
    for number in range(12):
        run("publish", "orders", str(number), "--key", str(number))
    done = run(*CONSUME, "--max", "12", "--json")
    assert sorted(int(event["partitionkey"]) for event in done.lines) == list(range(12))
    assert sum(each["lag"] for each in json.loads(run("lag", "--json").out)["lag"]) == 0


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ("consume orders billing --mode key_shared", 2),
        ("consume orders billing --mode shared", 2),
        ("consume orders billing --mode failover", 2),
        ("consume orders billing --mode exclusive --start never", 2),
        ("consume orders billing --mode exclusive --max 0", 2),
        ("consume orders billing --mode exclusive --wait soon", 2),
        ("consume orders billing --mode exclusive --wait 0", 2),
        ("consume orders Billing --mode exclusive", 2),
    ],
)
def test_nothing_is_consumed_with_wrong_arguments(arguments: str, code: int, run: Run) -> None:
    published(run, "a")
    run("subscriptions", "create", "orders", "billing", "--mode", "exclusive")
    done = run(*arguments.split())
    assert (done.code, done.out) == (code, "")
    assert done.err
    assert cursors_of("billing") == [0]


@pytest.mark.parametrize("as_json", [False, True], ids=["lines", "json"])
def test_a_gap_is_told_on_stderr_and_to_programs_on_stdout_too(as_json: bool, run: Run) -> None:
    publish_one_by_one(run, "before", "needle", "after")
    flip_a_byte(b"needle")
    assert run("repair", "--yes").code == 0
    done = run(*CONSUME, "--max", "2", *(["--json"] if as_json else []))
    assert done.code == 0
    (told,) = done.err.splitlines()
    assert told.startswith("orders/0: gap [1, 2): ")
    if as_json:
        (gap,) = [line["gap"] for line in done.lines if "gap" in line]
        assert {"topic": "orders", "partition": 0, "start": 1, "stop": 2}.items() <= gap.items()
        assert [int(line["sequence"]) for line in done.lines if "gap" not in line] == [0, 2]
    else:
        assert len(done.out.splitlines()) == 2
    assert lag_of(run, "billing")["lag"] == 0


# --- consumers as processes ----------------------------------------------------------------------


@contextmanager
def consuming(*options: str, mode: str = "exclusive", **more: Any) -> Iterator[subprocess.Popen[str]]:
    """Run a consumer as a process."""
    command = [sys.executable, "-m", "penstock", "consume", "orders", "billing", "--mode", mode, *options]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **more}
    with subprocess.Popen(command, text=True, **pipes) as process:
        try:
            yield process
        finally:
            process.kill()


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Return how a process ended, and what it printed since."""
    # Not by `communicate`, which does not see what was read ahead with the last line.
    out, err = (stream.read() if stream is not None else "" for stream in (process.stdout, process.stderr))
    return process.wait(60), out, err


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
@pytest.mark.parametrize("options", [(), ("--batch",)], ids=["one by one", "batches"])
def test_a_signal_ends_a_consumer_well(number: int, code: int, options: tuple[str, ...], run: Run) -> None:
    published(run, *"abc")
    with consuming(*options) as consumer:
        lines = [line_of(consumer)]
        consumer.send_signal(number)
        status, out, err = ended(consumer)
    assert (status, err) == (code, "")
    lines += out.splitlines(keepends=True)
    assert [line[-2] for line in lines] == list("abc")[: len(lines)]
    assert cursors_of("billing") == [len(lines)]
    with topic() as (store, info):
        lease = store.leases.acquire(f"shard/{info.log_id}/billing/0/0", "somebody", 10)
        assert lease is not None
        assert lease.clean


def test_a_consumer_prints_what_is_published_later_and_show_says_who_it_is(run: Run) -> None:
    run("topics", "create", "orders")
    with consuming("--id", "till-7") as consumer:
        for text in "ab":
            published(run, text)
            assert line_of(consumer).endswith(f"  {text}\n")
        (partition,) = json.loads(run("subscriptions", "show", "orders", "billing", "--json").out)["partitions"]
        assert partition["owner"] == "till-7"
        assert partition["epoch"] >= 1
        assert "till-7" in run("subscriptions", "show", "orders", "billing").out
        assert "till-7" in run("subscriptions", "rm", "orders", "billing").out
        consumer.terminate()
        assert ended(consumer) == (143, "", "")
    assert cursors_of("billing") == [2]


def test_a_second_exclusive_consumer_is_refused_and_the_same_one_takes_over(run: Run) -> None:
    published(run, "a")
    with consuming("--id", "till-7") as first:
        line_of(first)
        refused = run(*CONSUME, "--max", "1")
        assert (refused.code, refused.out) == (1, "")
        assert "is exclusive, and consumer 'till-7' has it" in refused.err
        assert run(*CONSUME, "--id", "till-7", "--wait", "0.5").code == 0


def test_a_second_failover_consumer_stands_by_until_the_first_ends(run: Run) -> None:
    published(run, "a")
    with consuming(mode="failover") as first:
        line_of(first)
        with consuming("--max", "1", mode="failover") as second:
            assert second.stderr is not None
            assert second.stderr.readline() == "standing by: another consumer has orders/0\n"
            first.terminate()
            assert ended(first) == (143, "", "")
            published(run, "b")
            status, out, err = ended(second)
    assert (status, err) == (0, "")
    assert out.endswith("  b\n")
    assert cursors_of("billing") == [2]


def test_what_a_reader_that_went_away_did_not_get_is_not_settled(run: Run) -> None:
    published(run, "a")
    with consuming() as consumer:
        line_of(consumer)
        assert consumer.stdout is not None
        consumer.stdout.close()
        consumer.stdout = None
        published(run, "b")
        status, _, err = ended(consumer)
    assert (status, err) == (141, "")
    assert cursors_of("billing") == [1]


def test_a_reader_that_goes_away_ends_a_consumer_that_has_nothing_to_print(run: Run) -> None:
    published(run, "a")
    with consuming() as consumer:
        line_of(consumer)
        assert consumer.stdout is not None
        consumer.stdout.close()
        consumer.stdout = None
        assert ended(consumer)[0] == 141


def test_a_signal_ends_a_consumer_whose_reader_does_not_read(run: Run) -> None:
    Path("large").write_bytes(b"x" * 500_000)  # more than any pipe holds
    assert run("publish", "orders", "--create", "--file", "large").code == 0
    with consuming() as consumer:
        assert consumer.stdout is not None
        assert select.select([consumer.stdout], [], [], 60)[0]
        consumer.terminate()
        assert consumer.wait(60) == 143
    assert cursors_of("billing") == [0]


def test_a_reader_that_takes_its_time_gets_everything(run: Run) -> None:
    Path("large").write_bytes(b"x" * 500_000)
    for _ in range(3):
        assert run("publish", "orders", "--create", "--file", "large").code == 0
    with consuming("--max", "3") as consumer:
        assert consumer.stdout is not None
        assert select.select([consumer.stdout], [], [], 60)[0]
        assert lag_of(run, "billing")["lag"] == 3
        status, out, err = ended(consumer)
    assert (status, err) == (0, "")
    assert [line.rpartition("  ")[2] for line in out.splitlines()] == ["x" * 500_000] * 3
    assert cursors_of("billing") == [3]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="/dev/full: this system has none")
def test_what_cannot_be_printed_is_not_settled(run: Run) -> None:
    published(run, "a")
    with Path("/dev/full").open("w") as full, consuming(stdout=full) as consumer:
        status, _, err = ended(consumer)
    assert (status, err) == (1, "error: [Errno 28] No space left on device\n")
    assert cursors_of("billing") == [0]


def test_a_consumer_whose_subscription_is_deleted_or_moved_says_so(run: Run) -> None:
    published(run, "a", "b")
    with consuming() as consumer:
        for _ in range(2):
            line_of(consumer)
        assert run("seek", "orders", "billing", "--to", "1", "--yes").code == 0
        assert line_of(consumer).endswith("  b\n")
        assert run("subscriptions", "rm", "orders", "billing", "--yes").code == 0
        status, _, err = ended(consumer)
    assert status == 1
    assert err.endswith("error: subscription 'billing' of topic 'orders' was deleted meanwhile\n")
