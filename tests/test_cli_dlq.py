"""The promises of `penstock dlq`: what it shows, what it asks before, what it does."""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.test_cli_store import Done, Run

from penstock.cli import letters, main
from penstock.events import Event
from penstock.failures import fingerprint
from penstock.ports import Store
from penstock.rows import Commit, Parked, ParkedFilter, Shard, TopicInfo
from penstock.stores import open_store

URL = "file:./penstock-data"
TRACE = 'Traceback (most recent call last):\n  File "shop/bill.py", line 7, in charge\n    card.debit()\nDeclined\n'
T0 = 1_767_225_600_000_000  # 2026-01-01


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
def topic() -> Iterator[tuple[Store, TopicInfo]]:
    with closing(open_store(URL)) as store:
        (info,) = [each for each in store.log.topics() if each.name == "orders"]
        yield store, info


def states() -> dict[tuple[int, int], str]:
    with topic() as (store, info):
        rows = store.parked.page(ParkedFilter(log_id=info.log_id, subscription="billing"), limit=1_000)
        return {(row.shard.partition, row.offset): row.state for row in rows}


def park(*rows: dict[str, Any]) -> None:
    with topic() as (store, info):
        made = []
        for row in rows:
            said: dict[str, Any] = {"state": "dead", "lane": 0, "event": Event(), "partition": 0, "parked_at": T0} | row
            made.append(Parked(shard=Shard(info.log_id, "billing", 0, said.pop("partition")), **said))
        assert store.cursors.commit([Commit(parked=tuple(made))]) == [None]


ROWS: list[dict[str, Any]] = [
    {
        "offset": 0,
        "error_type": "Declined",
        "error_message": "card 17 of ada\x1b[2J",
        "error_trace": TRACE,
        "attempts": 4,
        "replay": 1,
        "last_retry_at": T0 + 60_000_000,
        "event": Event(
            data=b'{"id":1,"tags":["\xc3\xa4"]}',
            id="0123456789abcdef0123456789abcdef-42",
            source="shop",
            type="order.placed",
            key=b"ada",
            content_type="application/json",
            headers={"tenant": b"acme"},
        ),
    },
    {
        "offset": 1,
        "error_type": "Declined",
        "error_message": "card 23 of bob",
        "error_trace": TRACE,
        "parked_at": T0 + 5,
        "event": Event(id="1", source="shop", type="order.placed"),
    },
    {
        "offset": 2,
        "error_type": "KeyError",
        "error_message": "no total",
        "event": Event(data=b"plain\ntext \x07", key=b"ada"),
    },
    {"offset": 3, "error_message": "unreadable", "event": Event(data=bytes(range(250, 256)) + b"Hi")},
    {"offset": 4, "state": "waiting"},
    {"offset": 5, "state": "done"},
]


@pytest.fixture
def parked(run: Run) -> None:
    """Make the subscription `billing` with four dead letters, one event that waits, and one that is done."""
    assert run("publish", "orders", "--create", *"0123456789").code == 0
    assert run("subscriptions", "create", "orders", "billing", "--mode", "exclusive", "--start", "latest").code == 0
    park(*ROWS)


def document(done: Done) -> Any:
    return json.loads(done.out)


# --- which store, topic and subscription ---------------------------------------------------------

COMMANDS = ["ls orders billing", "show orders billing 1", "groups orders billing", "stats orders billing",
            "replay orders billing --yes", "purge orders billing --yes"]  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS)
def test_what_is_not_there_is_an_error_that_names_the_nearest(command: str, run: Run) -> None:
    none = run("dlq", *command.split())
    assert (none.code, none.out) == (1, "")
    assert none.err.startswith("error: there is no store in penstock-data")
    run("topics", "create", "orders")
    done = run("dlq", *command.replace("orders", "ordres").split())
    assert (done.code, done.out) == (2, "")
    assert "there is no topic 'ordres'; did you mean 'orders'?" in done.err
    run("subscriptions", "create", "orders", "billing")
    done = run("dlq", *command.replace("billing", "biling").split())
    assert (done.code, done.out) == (2, "")
    assert "no subscription 'biling'; did you mean 'billing'?" in done.err


# --- ls and show ---------------------------------------------------------------------------------


@pytest.mark.usefixtures("parked")
def test_ls_lists_dead_letters_with_why(run: Run) -> None:
    done = run("dlq", "ls", "orders", "billing")
    heading, first, second, third, fourth = done.out.splitlines()
    assert heading.split() == ["position", "failed", "error", "cause", "attempts", "replay", "key", "message"]
    cause = fingerprint("Declined", "", TRACE)
    assert first.split()[:7] == ["orders/0@0", "2026-01-01T00:01:00.000000Z", "Declined", cause, "4", "1", "ada"]
    assert first.endswith(r"card 17 of ada\x1b[2J")
    assert cause in second
    assert ("KeyError" in third, " - " in fourth) == (True, True)

    found = document(run("dlq", "ls", "orders", "billing", "--json"))
    assert found["more"] is False
    assert [each["offset"] for each in found["letters"]] == [0, 1, 2, 3]
    assert found["letters"][0] == {
        "topic": "orders",
        "name": "billing",
        "partition": 0,
        "offset": 0,
        "state": "dead",
        "error_type": "Declined",
        "error_message": "card 17 of ada\x1b[2J",
        "fingerprint": cause,
        "attempts": 4,
        "replay": 1,
        "parked_at": "2026-01-01T00:00:00.000000Z",
        "last_retry_at": "2026-01-01T00:01:00.000000Z",
        "job": None,
        "key": "ada",
        "type": "order.placed",
        "bytes": 22,
    }


FILTERS: list[tuple[list[str], list[int]]] = [
    (["--error", "Declined"], [0, 1]),
    (["--fingerprint", fingerprint("Declined", "", TRACE)], [0, 1]),
    (["--contains", "total"], [2]),
    (["--partition", "0"], [0, 1, 2, 3]),
    (["--offset", "1", "--offset", "3", "--offset", "4"], [1, 3]),
    (["--key", "ada"], [0, 2]),
    (["--since", "2026-01-01T00:00:00.000001Z"], [1]),
    (["--until", "2026-01-01T01:00:00.000001+01:00", "--error", "KeyError"], [2]),
]


@pytest.mark.usefixtures("parked")
@pytest.mark.parametrize(("options", "offsets"), FILTERS)
def test_every_filter_means_the_same_for_all_commands(options: list[str], offsets: list[int], run: Run) -> None:
    listed = document(run("dlq", "ls", "orders", "billing", *options, "--json"))["letters"]
    assert [each["offset"] for each in listed] == offsets
    grouped = document(run("dlq", "groups", "orders", "billing", *options, "--json"))["groups"]
    assert sum(each["count"] for each in grouped) == len(offsets)
    previewed = document(run("dlq", "replay", "orders", "billing", *options, "--json"))
    assert [each["offset"] for each in previewed["samples"]] == offsets
    replayed = document(run("dlq", "replay", "orders", "billing", *options, "--yes", "--json"))
    assert (replayed["matched"], replayed["replayed"], replayed["done"]) == (len(offsets), len(offsets), True)
    assert [offset for (_, offset), state in states().items() if state == "waiting"] == sorted([*offsets, 4])
    park(*ROWS[:4])
    dead = [*options, "--until", "2026-01-02T00:00:00Z"] if "--until" not in options else options
    assert document(run("dlq", "purge", "orders", "billing", *dead, "--yes", "--json"))["count"] >= len(offsets)
    assert {offset for _, offset in states()} & {0, 1, 2, 3} == {0, 1, 2, 3} - set(offsets)


@pytest.mark.usefixtures("parked")
def test_ls_shows_other_states_and_says_that_there_are_more(run: Run) -> None:
    for state, offset in (("waiting", 4), ("done", 5)):
        (found,) = document(run("dlq", "ls", "orders", "billing", "--state", state, "--json"))["letters"]
        assert (found["state"], found["offset"]) == (state, offset)
    done = run("dlq", "ls", "orders", "billing", "--limit", "2")
    assert len(done.out.splitlines()) == 3
    assert done.err == "there are more: these are the first 2, --limit shows others\n"
    assert document(run("dlq", "ls", "orders", "billing", "--limit", "2", "--json"))["more"] is True


@pytest.mark.usefixtures("parked")
def test_ls_lists_more_than_a_page(run: Run) -> None:
    park(*({"offset": 10 + number} for number in range(1_500)))
    found = document(run("dlq", "ls", "orders", "billing", "--limit", "1400", "--json"))
    assert [each["offset"] for each in found["letters"]] == [0, 1, 2, 3, *range(10, 1_406)]
    assert found["more"] is True


@pytest.mark.usefixtures("parked")
def test_show_tells_all_of_a_letter_and_prints_json_in_lines(run: Run) -> None:
    out = run("dlq", "show", "orders", "billing", "0").out
    table, trace, payload = out.split("\n\n")
    values = dict(line.split(maxsplit=1) for line in table.splitlines())
    assert (values["error"], values["attempts"], values["replay"]) == ("Declined", "4", "1")
    assert values["message"] == r"card 17 of ada\x1b[2J"
    assert (values["producer"], values["sequence"]) == ("0123456789abcdef0123456789abcdef", "42")
    assert (values["source"], values["key"], values["header"].split()) == ("shop", "ada", ["tenant", "acme"])
    assert values["appended"].endswith("Z")
    assert trace == TRACE.rstrip()
    assert payload == '{\n  "id": 1,\n  "tags": [\n    "ä"\n  ]\n}\n'

    found = document(run("dlq", "show", "orders", "billing", "0", "--partition", "0", "--json"))
    assert found["error_trace"] == TRACE
    assert (found["event"]["id"], found["event"]["data"]) == (
        "0123456789abcdef0123456789abcdef-42",
        {"id": 1, "tags": ["ä"]},
    )


@pytest.mark.usefixtures("parked")
def test_show_prints_text_as_it_is_and_what_cannot_be_decoded_raw(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run("dlq", "show", "orders", "billing", "2").out.endswith("\n\nplain\ntext \\x07\n")
    dump = "00000000  fa fb fc fd fe ff 48 69                          ......Hi\n"
    assert run("dlq", "show", "orders", "billing", "3").out.endswith(f"\n\n{dump}")
    found = document(run("dlq", "show", "orders", "billing", "3", "--json"))
    assert (found["event"]["data_base64"], found["error_trace"]) == ("+vv8/f7/SGk=", None)
    monkeypatch.setattr(letters, "HEX_BYTES_SHOWN", 4)
    assert run("dlq", "show", "orders", "billing", "3").out.endswith("… 4 bytes more: --json has all of them\n")


@pytest.mark.usefixtures("parked")
def test_a_letter_is_named_by_its_position_as_ls_shows_it(run: Run) -> None:
    by_offset = run("dlq", "show", "orders", "billing", "1")
    assert run("dlq", "show", "orders", "billing", "orders/0@1") == by_offset
    for argv, why in {
        ("paid/0@1",): "paid/0@1 is not in orders",
        ("orders/0@1", "--partition", "1"): "orders/0@1 is not in orders/1",
        ("0@1",): "neither an offset nor a position such as 'orders/0@17'",
        (f"{2**63}",): "neither an offset nor a position",
    }.items():
        done = run("dlq", "show", "orders", "billing", *argv)
        assert (done.code, done.out) == (2, "")
        assert why in done.err


@pytest.mark.usefixtures("parked")
def test_a_letter_that_is_not_there_is_a_usage_error(run: Run) -> None:
    done = run("dlq", "show", "orders", "billing", "9")
    assert (done.code, done.out) == (2, "")
    assert "has no dead letter at orders/0@9" in done.err


# --- groups and stats ----------------------------------------------------------------------------


@pytest.mark.usefixtures("parked")
def test_groups_put_letters_with_the_same_cause_together(run: Run) -> None:
    heading, first, *others = run("dlq", "groups", "orders", "billing").out.splitlines()
    assert heading.split() == ["count", "error", "cause", "first", "last", "sample", "message"]
    cause = fingerprint("Declined", "", TRACE)
    assert first.split()[:3] == ["2", "Declined", cause]
    assert [line.split()[0] for line in others] == ["1", "1"]
    found = document(run("dlq", "groups", "orders", "billing", "--json"))["groups"]
    assert found[0] == {
        "fingerprint": cause,
        "error_type": "Declined",
        "count": 2,
        "first": "2026-01-01T00:00:00.000000Z",
        "last": "2026-01-01T00:01:00.000000Z",
        "message": "card 17 of ada\x1b[2J",
        "partition": 0,
        "offset": 0,
    }


@pytest.mark.usefixtures("parked")
def test_stats_count_by_subscription(run: Run) -> None:
    run("topics", "create", "visits")
    run("subscriptions", "create", "visits", "counting")
    heading, orders, visits = (line.split() for line in run("dlq", "stats").out.splitlines())
    assert heading == ["topic", "name", "dead", "waiting", "done", "oldest", "newest", "errors"]
    assert orders[:5] == ["orders", "billing", "4", "1", "1"]
    assert " ".join(orders[7:]) == "Declined 2, KeyError 1, - 1"
    assert visits == ["visits", "counting", "0", "0", "0", "-", "-", "-"]
    for arguments in (("orders",), ("orders", "billing")):
        (found,) = document(run("dlq", "stats", *arguments, "--json"))["stats"]
        assert found == {
            "topic": "orders",
            "name": "billing",
            "dead": 4,
            "waiting": 1,
            "done": 1,
            "oldest": "2026-01-01T00:00:00.000000Z",
            "newest": "2026-01-01T00:01:00.000000Z",
            "errors": {"Declined": 2, "KeyError": 1, "": 1},
        }


# --- replay --------------------------------------------------------------------------------------


@pytest.mark.usefixtures("parked")
def test_replay_shows_how_many_and_some_and_asks(run: Run) -> None:
    park(*({"offset": offset} for offset in (6, 7, 8)))
    before = states()
    done = run("dlq", "replay", "orders", "billing")
    assert (done.code, done.err) == (2, "error: nothing was replayed: give --yes to do it\n")
    assert len(done.out.splitlines()) == 1 + 5 + 2
    assert done.out.endswith("\n\n7 would be delivered again; these are the first 5\n")
    none = run("dlq", "replay", "orders", "billing", "--error", "Nothing")
    assert (none.code, none.out) == (2, "0 would be delivered again\n")
    assert states() == before


@pytest.mark.usefixtures("parked")
def test_replayed_letters_are_delivered_at_their_positions_to_their_subscription_alone(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_DELIVERY__DEAD_LETTER_DAYS", "0")  # those of this test are very old
    run("subscriptions", "create", "orders", "peer", "--mode", "exclusive", "--start", "latest")
    park({"offset": 4, "state": "done"})
    done = run("dlq", "replay", "orders", "billing", "--error", "Declined", "--rate", "1000", "--yes")
    assert (done.code, done.out) == (0, "2 of 2 dead letters are delivered again\n")
    assert "brings 2 back, which takes about 0 s" in done.err
    consumed = run("consume", "orders", "billing", "--max", "2", "--wait", "10", "--json")
    assert (consumed.code, consumed.err) == (0, "")
    assert sorted(int(line["sequence"]) for line in consumed.lines) == [0, 1]
    assert run("consume", "orders", "peer", "--wait", "0.1", "--json").out == ""
    with topic() as (store, info):
        assert [cursor.next_offset for cursor in store.cursors.load(info.log_id, "billing")] == [10]
    assert states() == {
        (0, offset): state for offset, state in enumerate(["done", "done", "dead", "dead", "done", "done"])
    }


@pytest.mark.usefixtures("parked")
def test_what_was_marked_is_replayed_by_its_job_and_nothing_else(run: Run) -> None:
    done = run("dlq", "replay", "orders", "billing", "--error", "Declined", "--mark")
    assert done.code == 0
    job = done.out.strip()
    assert done.err == f"2 dead letters are marked: --job {job} --yes replays them\n"
    park({"offset": 8, "error_type": "Declined"})
    preview = run("dlq", "replay", "orders", "billing", "--job", job)
    assert (preview.code, preview.out) == (2, "2 would be delivered again\n")
    found = document(run("dlq", "replay", "orders", "billing", "--job", job, "--yes", "--json"))
    assert found == {
        "topic": "orders", "name": "billing", "done": True, "job": job, "matched": 2, "replayed": 2, "samples": [],
    }  # fmt: skip
    again = run("dlq", "replay", "orders", "billing", "--job", job, "--yes", "--json")
    assert (document(again)["matched"], again.code) == (0, 0)
    assert again.err.startswith(f"no dead letters are marked for job {job!r}: all of it was delivered again already")
    assert [offset for (_, offset), state in states().items() if state == "dead"] == [2, 3, 8]


@pytest.mark.usefixtures("parked")
@pytest.mark.parametrize(
    ("options", "said"),
    [
        *(
            (f"--rate {rate}{how}", "must be above 0 and at most 1,000,000 events a second")
            for rate in ("0", "-1", "nan", "inf", "2000000")
            for how in ("", " --yes", " --mark", " --job a --yes")
        ),
        ("--offset 9223372036854775808", "is no offset"),
        ("--offset 9223372036854775807 --yes", "is no offset"),
        ("--offset -1 --yes", "is no offset"),
        ("--mark --yes", "--mark only marks them"),
        ("--job a --error KeyError --yes", "a `job` or a filter"),
        ("--since yesterday", "is no time"),
        ("--partition 1 --yes", "has the partitions 0 to 0, not 1"),
    ],
)
def test_wrong_options_are_usage_errors_and_change_nothing(options: str, said: str, run: Run) -> None:
    job = run("dlq", "replay", "orders", "billing", "--mark").out.strip()
    before = states()
    done = run("dlq", "replay", "orders", "billing", *options.split())
    assert (done.code, done.out) == (2, "")
    assert said in done.err
    assert "brings" not in done.err
    assert states() == before
    # Nothing was taken from the job of somebody else.
    assert run("dlq", "replay", "orders", "billing", "--job", job, "--yes").out.startswith("4 of 4 ")


@pytest.mark.usefixtures("parked")
@pytest.mark.parametrize("command", ["ls", "groups", "purge", "purge --yes"])
def test_what_can_be_no_offset_is_a_usage_error(command: str, run: Run) -> None:
    before = states()
    done = run("dlq", *command.split(), "orders", "billing", "--offset", "9223372036854775808")
    assert (done.code, done.out) == (2, "")
    assert "'9223372036854775808' is no offset" in done.err
    last = run("dlq", *command.split(), "orders", "billing", "--offset", "9223372036854775806")
    assert last.code == (2 if command == "purge" else 0)
    assert states() == before


@pytest.mark.usefixtures("parked")
@pytest.mark.parametrize("options", [[], ["--yes"], ["--yes", "--json"]], ids=" ".join)
def test_what_is_no_name_of_a_job_is_an_error(options: list[str], run: Run) -> None:
    done = run("dlq", "replay", "orders", "billing", "--job", "typo", *options)
    assert (done.code, done.out) == (1, "")
    assert done.err == (
        "error: no dead letters are marked for job 'typo', and no job has such a name: `--mark` prints it\n"
    )


@pytest.mark.usefixtures("parked")
@pytest.mark.parametrize("job", ["replay-20260131T120000-0123abcd", "redrive-20260131T120000-17-0123abcd"])
def test_a_job_that_may_be_done_is_told_to_have_nothing_left_and_is_no_error(job: str, run: Run) -> None:
    done = run("dlq", "replay", "orders", "billing", "--job", job, "--yes")
    assert (done.code, done.out) == (0, "0 of 0 dead letters are delivered again\n")
    assert f"no dead letters are marked for job {job!r}" in done.err
    assert run("dlq", "replay", "orders", "billing", "--job", job).code == 2
    assert run("dlq", "replay", "orders", "billing", "--job", job[:-1], "--yes").code == 1


# --- purge ---------------------------------------------------------------------------------------


@pytest.mark.usefixtures("parked")
def test_purge_shows_how_many_asks_and_never_removes_what_waits(run: Run) -> None:
    before = states()
    done = run("dlq", "purge", "orders", "billing")
    assert (done.code, done.err) == (2, "error: nothing was removed: this cannot be undone; give --yes to do it\n")
    assert done.out.endswith("\n\n5 would be removed\n")
    found = document(run("dlq", "purge", "orders", "billing", "--key", "ada", "--json"))
    assert (found["done"], found["count"], len(found["samples"])) == (False, 2, 2)
    assert states() == before
    done = run("dlq", "purge", "orders", "billing", "--key", "ada", "--yes")
    assert (done.code, done.out) == (0, "2 are removed\n")
    assert run("dlq", "purge", "orders", "billing", "--yes").out == "3 are removed\n"
    assert states() == {(0, 4): "waiting"}
