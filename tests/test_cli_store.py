"""The promises of the commands that work on a store: what they print, what they change, how they end."""

from __future__ import annotations

import io
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from rich.cells import cell_len
from tests.test_cli import penstock

from penstock.cli import main, output
from penstock.errors import PublishUnknown
from penstock.ports import Store
from penstock.rows import Cursor, Partition, Shard, Subscription
from penstock.stores import open_store

PAGE = Path(__file__).parent.parent / "docs" / "guide" / "command-line.md"
URL = "file:./penstock-data"


@pytest.fixture(autouse=True)
def a_directory_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in os.environ:
        if name.startswith("PENSTOCK_") or name in {"NO_COLOR", "FORCE_COLOR", "COLUMNS", "PYTHONUNBUFFERED"}:
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


class Done(NamedTuple):
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def lines(self) -> list[Any]:
        """Its stdout as JSON, line by line."""
        return [json.loads(line) for line in self.out.splitlines()]


Run = Callable[..., Done]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run a command in this process, with `stdin` as its input."""

    def run(*argv: str, stdin: bytes = b"") -> Done:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        code = main(list(argv))
        return Done(code, *capsys.readouterr())

    return run


@contextmanager
def opened() -> Iterator[Store]:
    with closing(open_store(URL)) as store:
        yield store


def one_segment() -> Path:
    (found,) = Path("penstock-data").glob("topics/*/0/*.seg")
    return found


def flip_a_byte(of: bytes) -> None:
    """Damage the only segment where these bytes stand."""
    path = one_segment()
    data = bytearray(path.read_bytes())
    data[data.index(of)] ^= 1
    path.write_bytes(data)


def publish_one_by_one(run: Run, *texts: str) -> None:
    """Publish each text with a command of its own, so that each is a block."""
    for text in texts:
        assert run("publish", "orders", text, "--create").code == 0


# --- which store ---------------------------------------------------------------------------------

ON_A_STORE = [
    "topics",
    "topics show orders",
    "topics delete orders --yes",
    "publish orders x",
    "read orders",
    "trim orders --before 1",
    "schedule ls",
    "schedule cancel x",
    "verify",
    "repair",
]


@pytest.mark.parametrize("command", ON_A_STORE)
def test_a_store_that_does_not_exist_is_an_error_and_is_not_made(command: str, run: Run, tmp_path: Path) -> None:
    done = run(*command.split())
    assert (done.code, done.out) == (1, "")
    assert done.err.startswith("error: there is no store in penstock-data: check --url")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ON_A_STORE)
def test_an_empty_directory_is_not_made_a_store_either(command: str, run: Run) -> None:
    Path("penstock-data").mkdir()
    assert run(*command.split()).code == 1
    assert list(Path("penstock-data").iterdir()) == []


@pytest.mark.parametrize("command", [*ON_A_STORE, "topics create orders", "publish orders x --create", "doctor"])
def test_a_store_in_memory_makes_no_sense_and_the_error_says_what_does(command: str, run: Run) -> None:
    done = run("--url", "memory:", *command.split())
    assert (done.code, done.out) == (2, "")
    assert "give --url file:./directory" in done.err


def test_a_store_that_lost_its_marker_is_not_made_anew_but_repaired(run: Run) -> None:
    publish_one_by_one(run, "a")
    marker = Path("penstock-data/penstock.json")
    content = marker.read_bytes()
    marker.unlink()
    for command in ("topics", "read orders", "verify"):
        done = run(*command.split())
        assert (done.code, done.out) == (3, "")
        assert "`penstock repair` writes it anew" in done.err
    assert not marker.exists()
    assert run("repair").code == 3
    assert run("repair", "--yes").code == 0
    assert json.loads(marker.read_bytes()) == json.loads(content)
    assert run("read", "orders").code == 0


@pytest.mark.parametrize(
    "command", ["topics show", "read", "trim --before 0", "topics delete", "verify", "publish --file /dev/null"]
)
def test_a_topic_that_is_not_there_is_a_usage_error_that_names_the_nearest(command: str, run: Run) -> None:
    run("topics", "create", "orders")
    done = run(*command.split(), "ordres")
    assert (done.code, done.out) == (2, "")
    assert "there is no topic 'ordres'" in done.err
    if command != "verify":
        assert "did you mean 'orders'?" in done.err


# --- topics --------------------------------------------------------------------------------------


def test_topics_lists_what_each_holds(run: Run) -> None:
    assert run("topics", "create", "orders", "--partitions", "2", "--retain-age", "7d").code == 0
    assert run("topics", "create", "logs", "--durability", "os", "--retain-bytes", "8 MiB").code == 0
    run("publish", "logs", "a", "b", "c")
    done = run("topics")
    heading, logs, orders = (line.split() for line in done.out.splitlines())
    assert heading == ["topic", "partitions", "events", "offsets", "size", "durability", "retention", "created"]
    assert logs[:4] == ["logs", "1", "3", "0…3"]
    assert logs[6:10] == ["os", "8.0", "MiB", logs[9]]
    assert orders[:5] == ["orders", "2", "0", "0…0,", "0…0"]

    document = json.loads(run("topics", "--json").out)
    assert [topic["name"] for topic in document["topics"]] == ["logs", "orders"]
    logs_document, orders_document = document["topics"]
    assert logs_document["partitions"] == [{"partition": 0, "first": 0, "end": 3}]
    assert logs_document["bytes"] > 0
    assert orders_document["retention"] == {"age_seconds": 604_800.0, "bytes_max": None, "hard_bytes_max": None}


def test_internal_topics_are_listed_only_when_asked_for(run: Run) -> None:
    from penstock.rows import TopicSettings

    run("topics", "create", "orders")
    with opened() as store:
        store.log.create_topic("_ledger", TopicSettings())
    assert "_ledger" not in run("topics").out
    assert "_ledger" in run("topics", "--all").out
    for options in ((), ("--all",), ("--json",)):
        assert run("topics", "ls", *options).out == run("topics", *options).out
    assert run("topics", "delete", "_ledger", "--yes").code == 2
    assert run("publish", "_ledger", "x").code == 2


def test_topics_show_tells_of_each_partition_and_its_last_append(run: Run) -> None:
    run("topics", "create", "orders", "--partitions", "2", "--content-type", "text/plain", "--source", "urn:shop")
    run("publish", "orders", "a", "--key", "k")
    document = json.loads(run("topics", "show", "orders", "--json").out)
    filled = [each for each in document["partitions"] if each["end"]]
    assert len(filled) == 1
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z", filled[0]["last_appended_at"])
    assert [each["last_appended_at"] for each in document["partitions"] if not each["end"]] == [None]
    assert (document["content_type"], document["source"]) == ("text/plain", "urn:shop")
    assert filled[0]["last_appended_at"] in run("topics", "show", "orders").out


def test_creating_a_topic_again_sets_its_retention_and_nothing_else(run: Run) -> None:
    assert run("topics", "create", "orders").err == "topic 'orders' is created\n"
    assert run("topics", "create", "orders").err == "topic 'orders' exists already, as it should be\n"
    assert "its retention is set anew" in run("topics", "create", "orders", "--retain-age", "1h").err
    assert json.loads(run("topics", "show", "orders", "--json").out)["retention"]["age_seconds"] == 3600.0
    refused = run("topics", "create", "orders", "--partitions", "2")
    assert refused.code == 2
    assert "topic 'orders' exists with " in refused.err
    assert "TopicSettings" not in refused.err


@pytest.mark.parametrize(
    "arguments",
    [
        "Orders",
        "_orders",
        "orders --partitions 0",
        "orders --partitions 1025",
        "orders --retain-age soon",
        "orders --retain-age -1",
        "orders --retain-bytes 8MB",
        "orders --retain-bytes 0",
        "orders --durability none",
    ],
)
def test_a_topic_is_not_created_with_wrong_settings(arguments: str, run: Run) -> None:
    done = run("topics", "create", *arguments.split())
    assert (done.code, done.out) == (2, "")
    assert not Path("penstock-data").exists()


def test_a_topic_is_deleted_only_with_yes_and_shown_first(run: Run) -> None:
    publish_one_by_one(run, "a", "b")
    preview = run("topics", "delete", "orders")
    assert preview.code == 2
    assert preview.out.splitlines()[1].split()[:3] == ["orders", "1", "2"]
    assert "nothing was deleted" in preview.err
    assert len(run("read", "orders").out.splitlines()) == 2
    assert run("topics", "delete", "orders", "--yes").code == 0
    assert json.loads(run("topics", "--json").out) == {"topics": []}


# --- publish -------------------------------------------------------------------------------------


def test_each_argument_is_an_event_and_its_position_is_printed(run: Run) -> None:
    done = run("publish", "orders", "a", "b", "--create")
    assert (done.code, done.out, done.err) == (0, "orders/0@0\norders/0@1\n", "")
    receipts = run("publish", "orders", "c", "--json").lines
    assert receipts == [{"position": "orders/0@2", "topic": "orders", "partition": 0, "offset": 2}]


def test_an_event_carries_what_the_options_say(run: Run) -> None:
    options = "--key k --type order.placed --subject s --content-type text/plain --header tenant=a=b --ttl 1h"
    assert run("publish", "orders", "Grüße", "--create", *options.split()).code == 0
    (event,) = run("read", "orders", "--json").lines
    assert event["data"] == "Grüße"
    assert (event["partitionkey"], event["type"], event["subject"]) == ("k", "order.placed", "s")
    assert (event["datacontenttype"], event["tenant"]) == ("text/plain", "a=b")
    assert event["expirytime"] > event["recordedtime"]


@pytest.mark.parametrize("by_name", [True, False], ids=["a file", "stdin"])
def test_a_file_is_one_event_of_exactly_its_bytes(by_name: bool, run: Run) -> None:
    content = bytes(range(256))
    Path("content").write_bytes(content)
    done = run("publish", "files", "--create", "--file", "content" if by_name else "-", stdin=content)
    assert (done.code, done.out) == (0, "files/0@0\n")
    with opened() as store:
        (batch,) = store.log.read(Partition(store.log.topics()[0].log_id, 0), 0, bytes_max=1 << 20)
        assert [event.data for event in batch] == [content]  # type: ignore[union-attr]


def test_lines_of_json_are_events_of_that_content_type_with_their_bytes_unchanged(run: Run) -> None:
    done = run("publish", "orders", "--create", "--ndjson", stdin=b'{"a":  1}\r\n\n"text"\n[1.50]')
    assert (done.code, done.out, done.err) == (0, "", "3 events are stored in 'orders'\n")
    events = run("read", "orders", "--json")
    assert '"data":{"a":  1}' in events.out
    assert '"data":[1.50]' in events.out
    assert {event["datacontenttype"] for event in events.lines} == {"application/json"}


def test_json_in_a_topic_of_another_content_type_says_what_it_is(run: Run) -> None:
    run("topics", "create", "raw")
    run("publish", "raw", "--ndjson", stdin=b"1\n")
    assert [event["datacontenttype"] for event in run("read", "raw", "--json").lines] == ["application/json"]


@pytest.mark.parametrize(
    ("lines_before", "bad"),
    [(0, b"{"), (1, b'{"a":}'), (2_500, b"nonsense"), (3, b'"\xff"'), (3, b"[" * 100_000)],
)
def test_a_bad_line_is_named_and_everything_before_it_is_stored(lines_before: int, bad: bytes, run: Run) -> None:
    done = run("publish", "orders", "--create", "--ndjson", stdin=b"1\n" * lines_before + bad + b"\n2\n")
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith(f"error: line {lines_before + 1} is not JSON; ")
    stored = {0: "nothing is stored", 1: "the event before it is stored"}
    assert stored.get(lines_before, f"the {lines_before:,} events before it are stored") in done.err
    assert json.loads(run("topics", "--json").out)["topics"][0]["events"] == lines_before


def test_a_line_that_is_too_large_is_named_too_although_its_chunk_is_sent_as_one(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_LIMITS__EVENT_BYTES_MAX", "100")
    lines = [b"1", b"2", b'"%s"' % (b"x" * 200), b"4"]
    done = run("publish", "orders", "--create", "--ndjson", "--json", stdin=b"\n".join(lines))
    assert done.code == 2
    assert [receipt["offset"] for receipt in done.lines] == [0, 1]
    assert "line 3: " in done.err
    assert "the 2 events before it are stored" in done.err


def test_a_line_without_an_end_is_not_read_into_memory_for_ever(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_LIMITS__EVENT_BYTES_MAX", "1000")
    done = run("publish", "orders", "--create", "--ndjson", stdin=b"1\n" + b" " * 3_000_000)
    assert done.code == 2
    assert "line 2 is longer than" in done.err


def test_a_stream_of_any_size_is_divided_so_that_no_batch_is_too_large(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_LIMITS__BATCH_BYTES_MAX", "10_000")
    line = b'"%s"\n' % (b"x" * 1_000)
    assert run("publish", "orders", "--create", "--ndjson", stdin=line * 50).err == "50 events are stored in 'orders'\n"
    blocks = [block for block in run("dump", str(one_segment()), "--json").lines if block["kind"] == "DATA"]
    assert 5 < len(blocks) < 25


@pytest.mark.parametrize("form", ["lines", "array"])
def test_cloudevents_are_published_as_they_are(form: str, run: Run) -> None:
    events = [
        {"specversion": "1.0", "id": str(number), "source": "urn:shop", "type": "t", "data": {"n": number}}
        for number in range(3)
    ]
    stdin = json.dumps(events, indent=1) if form == "array" else "\n".join(map(json.dumps, events))
    assert run("publish", "orders", "--create", "--cloudevents", stdin=stdin.encode()).code == 0
    found = run("read", "orders", "--json").lines
    assert [{name: event[name] for name in events[0]} for event in found] == events


@pytest.mark.parametrize("stdin", [b"{}", b"[{}]", b"[1", b'{"gap": {"topic": "orders"}}', b"nonsense"])
def test_what_is_no_cloudevent_is_a_usage_error(stdin: bytes, run: Run) -> None:
    done = run("publish", "orders", "--create", "--cloudevents", stdin=stdin)
    assert (done.code, done.out) == (2, "")
    assert "nothing is stored" in done.err


def test_what_read_prints_can_be_published_again_and_gets_positions_of_its_own(run: Run) -> None:
    run("publish", "orders", "--create", "--key", "k", "--header", "sequence=mine", "--header", "X-Odd=\t", "a", "b")
    printed = run("read", "orders", "--json").out
    assert run("publish", "copy", "--create", "--cloudevents", stdin=printed.encode()).code == 0
    with opened() as store:
        logs = {info.name: Partition(info.log_id, 0) for info in store.log.topics()}
        first, copied = (
            [event.to_event() for batch in store.log.read(logs[name], 0, bytes_max=1 << 20) for event in batch]  # type: ignore[union-attr]
            for name in ("orders", "copy")
        )
    assert copied == first
    assert [event["penstocktopic"] for event in run("read", "copy", "--json").lines] == ["copy", "copy"]


@pytest.mark.parametrize(
    "arguments",
    [
        "",
        "x --file f",
        "x --ndjson",
        "--ndjson --cloudevents",
        "--cloudevents --key k",
        "--cloudevents --header a=b",
        "x --header a",
        "x --header a=1 --header a=2",
        "x --ttl soon",
        "x --delay 1 --at 2030-01-01T00:00:00Z",
        "x --at tomorrow",
        "x --at 2030-01-01T00:00:00",
        "x --type \x1b",
    ],
)
def test_contradictory_or_wrong_arguments_publish_nothing(arguments: str, run: Run) -> None:
    run("topics", "create", "orders")
    done = run("publish", "orders", *arguments.split(" ") if arguments else [])
    assert (done.code, done.out) == (2, "")
    assert json.loads(run("topics", "--json").out)["topics"][0]["events"] == 0


@pytest.mark.parametrize("arguments", ["Orders x", "orders x --type \x1b", "orders --ndjson --content-type \x1b"])
def test_nothing_is_created_for_events_that_cannot_be(arguments: str, run: Run) -> None:
    done = run("publish", "--create", *arguments.split(" "))
    assert (done.code, done.out) == (2, "")
    assert not Path("penstock-data").exists()


@pytest.mark.parametrize("options", ["", "--ndjson", "--cloudevents"])
@pytest.mark.parametrize("file", ["nope", "."], ids=["missing", "directory"])
def test_nothing_is_created_for_a_file_that_cannot_be_read(file: str, options: str, run: Run) -> None:
    done = run("publish", "orders", "--create", "--file", file, *options.split())
    assert (done.code, done.out) == (1, "")
    assert file in done.err
    assert not Path("penstock-data").exists()
    # Nor is a topic made in a store that is there.
    run("topics", "create", "visits")
    assert run("publish", "orders", "--create", "--file", file, *options.split()).code == 1
    assert [each["name"] for each in json.loads(run("topics", "--json").out)["topics"]] == ["visits"]


@pytest.mark.parametrize("options", ["", "--ndjson"])
def test_a_pipe_that_has_a_name_is_opened_once(options: str, run: Run) -> None:
    os.mkfifo("pipe")
    with subprocess.Popen(["sh", "-c", "exec >pipe; echo 1; sleep 0.2; echo 2"]) as writer:
        assert run("publish", "orders", "--create", "--file", "pipe", *options.split()).code == 0
    assert writer.returncode == 0
    events = [line.split()[-1] for line in run("read", "orders").out.splitlines()]
    assert events == (["1", "2"] if options else [r"1\n2\n"])


def test_an_unknown_outcome_is_cleared_by_sending_again_without_a_duplicate(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    from penstock.bus.publisher import PreparedBatch

    send, attempts = PreparedBatch.send, []

    async def cut_off_after_storing(prepared: PreparedBatch, **options: Any) -> Any:
        receipt = await send(prepared, **options)
        attempts.append(receipt)
        if len(attempts) == 1:
            raise PublishUnknown(prepared.topic, len(prepared), prepared, "cut off")
        return receipt

    monkeypatch.setattr(PreparedBatch, "send", cut_off_after_storing)
    done = run("publish", "orders", "--create", "a", "b")
    assert (done.code, done.out) == (0, "orders/0@0\norders/0@1\n")
    assert len(attempts) == 2
    assert len(run("read", "orders").out.splitlines()) == 2


# --- read ----------------------------------------------------------------------------------------


def test_a_line_shows_position_time_type_key_and_text(run: Run) -> None:
    run("publish", "orders", "--create", "--key", "k", "--type", "order.placed", "hello world")
    (line,) = run("read", "orders").out.splitlines()
    position, time, rest = line.split("  ", 2)
    assert position == "orders/0@0"
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z", time)
    assert rest == "order.placed  k  hello world"


def test_no_payload_can_speak_to_a_terminal(run: Run) -> None:
    run("publish", "orders", "--create", "--key", "k\x1b[2J", "a\x1b]0;owned\x07\nb\u202ec\x9bd")
    Path("binary").write_bytes(b"\xff\xfe\x00" * 10)
    run("publish", "orders", "--file", "binary")
    text, binary = run("read", "orders").out.splitlines()
    assert text.endswith(r"k\x1b[2J  a\x1b]0;owned\x07\nb\u202ec\x9bd")
    assert binary.endswith("<30 bytes: fffe00fffe00fffe00fffe00fffe00ff…>")
    dumped = run("dump", str(one_segment()), "--offset", "0", "--data").out
    assert "\x1b" not in dumped
    assert "\x9b" not in dumped


@pytest.mark.parametrize(
    ("options", "offsets"),
    [
        ("", [0, 1, 2, 3, 4]),
        ("--from 2", [2, 3, 4]),
        ("--to 2", [0, 1]),
        ("--from 1 --to 3", [1, 2]),
        ("--from 3 --to 2", []),
        ("--from 5", []),
        ("--from end", []),
        ("--limit 2", [0, 1]),
        ("--from 1 --limit 1 --partition 0", [1]),
        ("--from-time 2000-01-01T00:00:00Z", [0, 1, 2, 3, 4]),
        ("--from-time 2999-01-01T00:00:00+02:00", []),
    ],
)
def test_a_part_of_a_topic_is_read(options: str, offsets: list[int], run: Run) -> None:
    run("publish", "orders", "--create", *"abcde")
    done = run("read", "orders", "--json", *options.split())
    assert done.code == 0
    assert [int(event["sequence"]) for event in done.lines] == offsets


def test_all_partitions_are_read_and_an_offset_needs_to_know_which(run: Run) -> None:
    run("topics", "create", "orders", "--partitions", "3")
    for number in range(6):
        run("publish", "orders", str(number), "--key", str(number))
    events = run("read", "orders", "--json").lines
    assert sorted(event["partitionkey"] for event in events) == list("012345")
    partitions = [event["penstockpartition"] for event in events]
    assert partitions == sorted(partitions)
    assert len(set(partitions)) > 1
    for options in ("--from 0", "--to 3", "--partition 3"):
        done = run("read", "orders", *options.split())
        assert (done.code, done.out) == (2, "")
    only = run("read", "orders", "--partition", "0", "--json").lines
    assert only == [event for event in events if event["penstockpartition"] == 0]


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ("--from x", 2),
        ("--from -1", 2),
        ("--from 1 --from-time 2026-01-01T00:00:00Z", 2),
        ("--limit 0", 2),
        ("--from 9", 1),
    ],
)
def test_an_offset_that_cannot_be_read_is_an_error(options: str, code: int, run: Run) -> None:
    run("publish", "orders", "--create", "a")
    done = run("read", "orders", *options.split())
    assert (done.code, done.out) == (code, "")


def test_a_line_of_json_stays_one_line_whatever_the_payload(run: Run) -> None:
    Path("pretty.json").write_text('{\n  "a": "b"\r\n}')
    run("publish", "orders", "--create", "--file", "pretty.json", "--content-type", "application/json")
    (event,) = run("read", "orders", "--json").lines
    assert event["data"] == {"a": "b"}


def test_json_is_utf_8_in_every_locale(run: Run) -> None:
    run("publish", "orders", "--create", "--content-type", "text/plain", "Grüße ☃")
    done = penstock("read", "orders", "--json", env={"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii"})
    assert json.loads(done.stdout)["data"] == "Grüße ☃"


# --- trim ----------------------------------------------------------------------------------------


def test_trim_shows_what_would_go_and_removes_it_only_with_yes(run: Run) -> None:
    publish_one_by_one(run, *"abc")
    preview = run("trim", "orders", "--before", "3")
    assert preview.code == 2
    assert preview.out.splitlines()[1].split() == ["orders/0", "0", "3", "3", "3"]
    assert "nothing was removed" in preview.err
    assert len(run("read", "orders").out.splitlines()) == 3
    assert run("trim", "orders", "--before", "3", "--yes").out == "orders/0 begins at 3\n"
    assert run("read", "orders").out == ""
    trimmed = run("read", "orders", "--from", "0")
    assert trimmed.code == 1
    assert "was trimmed" in trimmed.err
    publish_one_by_one(run, "d")
    for options in ([], ["--yes"]):  # it is not shown either what would be refused
        beyond = run("trim", "orders", "--before", "9", *options)
        assert (beyond.code, beyond.out) == (1, "")
        assert "offset 9 is beyond the end; the log holds [3, 4)" in beyond.err


def test_trim_names_the_subscription_that_is_in_the_way_and_needs_force(run: Run) -> None:
    publish_one_by_one(run, *"abc")
    with opened() as store:
        log_id = store.log.topics()[0].log_id
        cursor = Cursor(shard=Shard(log_id, "billing", 0, 0), next_offset=1)
        store.cursors.put_subscription(Subscription(log_id=log_id, name="billing", mode="ordered"), [cursor])
    preview = run("trim", "orders", "--before", "3")
    assert preview.out.splitlines()[-1].split() == ["billing", "1", "no:", "--force", "is", "needed"]
    refused = run("trim", "orders", "--before", "3", "--yes")
    assert (refused.code, refused.out) == (1, "")
    assert "'billing'" in refused.err
    assert refused.err.endswith("; --force removes them all the same\n")
    forced = run("trim", "orders", "--before", "3", "--force")
    assert forced.out.splitlines()[-1].split() == ["billing", "1", "no,", "but", "by", "--force"]
    assert run("trim", "orders", "--before", "3", "--yes", "--force").code == 0
    assert "billing" in run("topics", "delete", "orders").out


# --- schedule ------------------------------------------------------------------------------------


def test_delayed_events_are_listed_and_can_be_cancelled_once(run: Run) -> None:
    run("topics", "create", "orders")
    (first,) = run("publish", "orders", "a", "--delay", "2h", "--json").lines
    (second, third) = run("publish", "orders", "b", "c", "--at", "2035-01-01T00:00:00Z", "--key", "k").out.splitlines()
    assert second.endswith("  2035-01-01T00:00:00.000000Z")
    assert run("read", "orders").out == ""
    document = json.loads(run("schedule", "ls", "--json").out)
    assert [row["id"] for row in document["scheduled"]] == [first["id"], second.split()[0], third.split()[0]]
    assert document["scheduled"][1] == {
        "id": second.split()[0],
        "due_at": "2035-01-01T00:00:00.000000Z",
        "topic": "orders",
        "partition": 0,
        "type": None,
        "key": "k",
        "bytes": 1,
    }
    listed = run("schedule", "ls", "--limit", "2")
    assert len(listed.out.splitlines()) == 3
    assert "there are more" in listed.err
    assert run("schedule", "cancel", first["id"]).code == 0
    gone = run("schedule", "cancel", first["id"])
    assert (gone.code, gone.out) == (1, "")
    assert "does not wait" in gone.err
    assert len(json.loads(run("schedule", "ls", "--json").out)["scheduled"]) == 2


# --- damage --------------------------------------------------------------------------------------


def test_verify_finds_nothing_wrong_with_a_sound_store(run: Run) -> None:
    publish_one_by_one(run, *"abc")
    done = run("verify", "orders")
    assert (done.code, done.err) == (0, "")
    heading, row = (line.split() for line in done.out.splitlines())
    found = dict(zip(heading, row[:7], strict=False))
    assert (found["partition"], found["first"], found["end"], found["events"]) == ("orders/0", "0", "3", "3")
    document = json.loads(run("verify", "--json").out)
    assert document["ok"] is True
    assert run("repair").err == "nothing is to be repaired\n"


def test_damage_is_found_shown_repaired_and_leaves_a_gap(run: Run) -> None:
    publish_one_by_one(run, "before", "needle", "after")
    flip_a_byte(b"needle")
    segment = str(one_segment())

    read = run("read", "orders")
    assert read.code == 3
    assert [line.rpartition("  ")[2] for line in read.out.splitlines()] == ["before"]
    assert read.err.startswith("error: corrupt: ")
    behind = run("read", "orders", "--from", "2")
    assert (behind.code, len(behind.out.splitlines())) == (0, 1)

    verified = run("verify")
    assert verified.code == 3
    (line,) = [line for line in verified.out.splitlines() if line.startswith("corrupt: ")]
    assert re.fullmatch(rf"corrupt: {segment} at byte \d+, offsets 1 to 2: .+", line)
    assert verified.err == "error: 1 problem found; `penstock repair` says what helps\n"
    as_json = run("verify", "--json")
    assert as_json.code == 3
    (damage,) = json.loads(as_json.out)["topics"][0]["partitions"][0]["damages"]
    assert (damage["kind"], damage["start"], damage["stop"]) == ("corrupt", 1, 2)

    for preview in (run("repair"), run("repair", "--dry-run")):
        assert preview.code == 3
        assert "orders/0" in preview.out
        assert "nothing was changed" in preview.err
    assert len(json.loads(run("repair", "--json").out)["actions"]) == 1
    assert run("verify").code == 3

    assert run("repair", "--yes").code == 0
    assert run("verify").code == 0
    healed = run("read", "orders", "--json")
    assert healed.code == 0
    first, gap, last = healed.lines
    assert (int(first["sequence"]), int(last["sequence"])) == (0, 2)
    assert {"topic": "orders", "partition": 0, "start": 1, "stop": 2}.items() <= gap["gap"].items()
    assert healed.err.startswith("orders/0: gap [1, 2): ")
    plain = run("read", "orders")
    assert len(plain.out.splitlines()) == 2
    assert plain.err == healed.err


def test_repair_does_not_both_show_and_do(run: Run) -> None:
    publish_one_by_one(run, "a")
    assert run("repair", "--yes", "--dry-run").code == 2


# --- dump ----------------------------------------------------------------------------------------


def test_dump_shows_every_block_and_its_runs(run: Run) -> None:
    publish_one_by_one(run, "a", "b")
    segment = str(one_segment())
    blocks = run("dump", segment, "--json").lines
    assert [block["kind"] for block in blocks] == ["SEGMENT", "DATA", "MARKER", "DATA", "MARKER"]
    assert [block["block"] for block in blocks] == [0, 1, 2, 3, 4]
    assert [block["byte"] for block in blocks[1:]] == [block["end_byte"] for block in blocks[:-1]]
    assert blocks[0]["topic"] == "orders"
    (a_run,) = blocks[3]["runs"]
    assert (len(a_run["producer"]), a_run["first_sequence"], a_run["length"]) == (32, 0, 1)
    assert all(block["content"] == "ok" for block in blocks)
    heading, *lines = run("dump", segment).out.splitlines()
    assert heading.split()[0] == "block"
    assert [line.split()[1] for line in lines] == [block["kind"] for block in blocks]


def test_dump_shows_payloads_only_when_asked_for(run: Run) -> None:
    publish_one_by_one(run, "secret")
    segment = str(one_segment())
    for options in ("", "--json", "--block 1", "--offset 0", "--block 1 --json"):
        done = run("dump", segment, *options.split())
        assert done.code == 0
        assert "secret" not in done.out
    assert "secret" in run("dump", segment, "--block", "1", "--data").out
    (block,) = run("dump", segment, "--offset", "0", "--data", "--json").lines
    assert [event["data"] for event in block["events"]] == ["secret"]
    assert [column["column"] for column in block["column_facts"]] == ["data"]


@pytest.mark.parametrize("where", ["content", "header"])
def test_dump_goes_on_behind_damage_and_says_where_it_is(where: str, run: Run) -> None:
    publish_one_by_one(run, "before", "needle", "after")
    segment = str(one_segment())
    target = next(block for block in run("dump", segment, "--json").lines if block["offset"] == 1 and block["runs"])
    data = bytearray(Path(segment).read_bytes())
    at = data.index(b"needle") if where == "content" else target["byte"] + 70
    data[at] ^= 1
    Path(segment).write_bytes(data)

    done = run("dump", segment, "--json")
    assert done.code == 3
    assert "1 block is not whole" in done.err
    assert [item.get("end_offset") for item in done.lines][-1] == 3
    if where == "content":
        (damaged,) = [item for item in done.lines if item["content"] != "ok"]
        assert (damaged["byte"], damaged["content"]) == (target["byte"], "the content does not match its CRC")
        assert run("dump", segment, "--block", str(damaged["block"])).code == 3
    else:
        (hole,) = [item["hole"] for item in done.lines if "hole" in item]
        assert (hole["byte"], hole["end_byte"]) == (target["byte"], target["end_byte"])
        assert f"no block from byte {target['byte']} to {target['end_byte']}: " in run("dump", segment).out


def test_dump_refuses_what_is_no_segment(run: Run) -> None:
    publish_one_by_one(run, "a")
    assert run("dump", "penstock-data/control.db").code == 2
    assert run("dump", "nowhere.seg").code == 2
    assert run("dump", str(one_segment()), "--block", "99").code == 2
    assert run("dump", str(one_segment()), "--block", "1", "--offset", "0").code == 2
    assert run("dump", str(one_segment()), "--data").code == 2
    empty = Path("00000000000000000000-0000000000.seg")
    empty.write_bytes(bytes(1024))
    done = run("dump", str(empty))
    assert (done.code, done.out) == (3, "")
    assert "the first block is not whole" in done.err


def test_dump_reads_a_file_in_quarantine_and_in_a_store_that_is_in_use(run: Run) -> None:
    publish_one_by_one(run, "a")
    segment = one_segment()
    with opened() as store:
        store.log.bounds(Partition(store.log.topics()[0].log_id, 0))
        assert run("dump", str(segment)).code == 0
    kept = Path(f"0123-0-{segment.name}-deadbeef")
    shutil.copy(segment, kept)
    assert run("dump", str(kept)).code == 0


# --- doctor --------------------------------------------------------------------------------------


def test_doctor_says_what_is_wrong_and_what_to_do(run: Run) -> None:
    publish_one_by_one(run, "a")
    one_segment().chmod(0o644)
    done = run("doctor", "--json")
    document = json.loads(done.out)
    findings = {finding["name"]: finding for finding in document["findings"]}
    assert (done.code, document["ok"]) == (1, False)
    assert findings["directory"]["ok"] is True
    assert findings["permissions"]["ok"] is False
    assert findings["permissions"]["advice"] in run("doctor").out


def test_doctor_is_content_when_everything_is(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from penstock.stores.file.doctor import Finding

    monkeypatch.setattr("penstock.stores.file.doctor.examine", lambda *_, **__: [Finding("disk", "fine", ok=True)])
    done = run("doctor")
    assert (done.code, done.err) == (0, "")


# --- processes and pipes -------------------------------------------------------------------------


def shell(program: str) -> subprocess.CompletedProcess[str]:
    """Run a program of bash in which `penstock` is the code under test."""
    program = f'penstock() {{ "{sys.executable}" -m penstock "$@"; }}\n{program}'
    return subprocess.run(["bash", "-c", program], capture_output=True, text=True, timeout=120, check=False)


def test_files_and_pipes_go_in_and_come_out() -> None:
    Path("lines").write_text("".join(f'{{"n":{number}}}\n' for number in range(5_000)))
    done = shell(
        """
        penstock publish orders --create --ndjson < lines &&
        penstock read orders --json | penstock publish copy --create --cloudevents &&
        penstock read copy --json | head -n 1
        echo "${PIPESTATUS[@]}"
        """
    )
    first, codes = done.stdout.splitlines()
    assert json.loads(first)["data"] == {"n": 0}
    assert codes == "141 0"
    assert done.stderr == "5,000 events are stored in 'orders'\n5,000 events are stored in 'copy'\n"


def start(*argv: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "penstock", *argv],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


@pytest.mark.parametrize("options", [[], ["--from", "end"]], ids=["from the beginning", "from the end"])
def test_a_follower_sees_what_is_published_later_and_ends_with_130(options: list[str], run: Run) -> None:
    run("topics", "create", "orders", "--partitions", "2")
    run("publish", "orders", "old", "--key", "k")
    with start("read", "orders", "--follow", *options) as follower:
        try:
            if not options:
                assert line_of(follower).endswith("  k  old\n")
            # Nobody can tell from outside when it has looked for the end; whatever comes after that, it sees.
            for number in range(200):
                run("publish", "orders", "new", "--key", str(number))
                if has_printed(follower):
                    break
            assert line_of(follower).endswith("  new\n")
            follower.send_signal(signal.SIGINT)
            out, err = follower.communicate(timeout=60)
        finally:
            follower.kill()
    assert follower.returncode == 130
    assert "old" not in out
    assert err == ""


def has_printed(process: subprocess.Popen[str]) -> bool:
    assert process.stdout is not None
    ready, _, _ = select.select([process.stdout], [], [], 0.5)
    return bool(ready)


def test_a_follower_ends_by_itself_at_its_limit_or_end(run: Run) -> None:
    run("publish", "orders", "--create", "a", "b", "c")
    assert len(run("read", "orders", "--follow", "--limit", "2").out.splitlines()) == 2
    assert len(run("read", "orders", "--follow", "--to", "3").out.splitlines()) == 3


def test_a_follower_of_a_topic_that_is_deleted_says_so(run: Run) -> None:
    run("publish", "orders", "--create", "a")
    with start("read", "orders", "--follow") as follower:
        try:
            line_of(follower)
            run("topics", "delete", "orders", "--yes")
            _, err = follower.communicate(timeout=60)
        finally:
            follower.kill()
    assert follower.returncode == 1
    assert "was deleted" in err


def test_lines_are_stored_as_they_come_and_ctrl_c_says_how_many(run: Run) -> None:
    run("topics", "create", "orders")
    with start("publish", "orders", "--ndjson", "--json") as publisher:
        try:
            assert publisher.stdin is not None
            for number in range(3):
                publisher.stdin.write(f"{number}\n")
                publisher.stdin.flush()
                assert json.loads(line_of(publisher))["offset"] == number
            publisher.send_signal(signal.SIGINT)
            _, err = publisher.communicate(timeout=60)
        finally:
            publisher.kill()
    assert (publisher.returncode, err) == (130, "3 events are stored in 'orders'\n")


# --- terminals -----------------------------------------------------------------------------------


def test_long_work_shows_a_bar_on_a_terminal_only(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    publish_one_by_one(run, "a")
    monkeypatch.setattr(output, "PROGRESS_AFTER_SECONDS", 0)
    assert run("verify").err == ""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    done = run("verify")
    assert "verifying" in done.err
    assert "verifying" not in done.out


def test_on_a_terminal_a_line_is_cut_to_its_width(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    publish_one_by_one(run, "x" * 500)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    (line,) = run("read", "orders").out.splitlines()
    assert len(line) == 80
    assert line.endswith("x…")


@pytest.mark.parametrize("text", ["統計" * 100, "x" + "統計" * 100, "é" * 500, "e\u0301" * 500, "☃️🙂" * 100])
def test_a_line_is_cut_by_the_cells_that_it_takes_and_not_by_its_characters(
    text: str, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish_one_by_one(run, text, text[:2])
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    long, short = run("read", "orders").out.splitlines()
    assert cell_len(long) in {79, 80}  # half of a wide character cannot be seen
    assert long.endswith("…")
    assert short.endswith(text[:2])


def test_what_just_fits_is_not_cut(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    publish_one_by_one(run, "統計" * 4)
    width = cell_len(run("read", "orders").out.rstrip())
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    for columns, end in ((width, "統計\n"), (width - 1, "…\n")):
        monkeypatch.setenv("COLUMNS", str(columns))
        assert run("read", "orders").out.endswith(end)


# --- the guide -----------------------------------------------------------------------------------

EXAMPLES = re.findall(r"^```sh\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)


def test_the_guide_has_examples() -> None:
    assert len(EXAMPLES) >= 6


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash: it is not installed")
@pytest.mark.parametrize("example", EXAMPLES, ids=[example.partition("\n")[0] for example in EXAMPLES])
def test_an_example_of_the_guide_works_as_it_stands(example: str) -> None:
    done = shell(f"set -eo pipefail\n{example}")
    assert done.returncode == 0, done.stderr


def test_the_guide_tells_of_every_command() -> None:
    from typer.main import get_command

    from penstock.cli.app import app

    page = PAGE.read_text()
    command: Any = get_command(app)
    for name in command.commands:
        assert f"`penstock {name}" in page
