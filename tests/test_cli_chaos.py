"""`penstock chaos`: finds the handlers that are not idempotent, with the event and the fewest faults, and no others."""

from __future__ import annotations

import json
import os
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from penstock.cli import main
from penstock.testing.worlds.effects import Effects, Place, Tally, differences, plain
from penstock.testing.worlds.faults import Fault, Kind
from penstock.testing.worlds.search import Search, shrunk

SHOP = """
import asyncio
from dataclasses import dataclass

from penstock import Bus, Topic, event


@event("shop.order")
@dataclass(frozen=True)
class Order:
    number: int
    customer: str = "ann"


orders = Topic("orders", Order, key=lambda order: order.customer)
bills = Topic("bills", bytes)
bus = Bus("file:./never", topics=[orders, bills])
seen = {}


def sample(random):
    for number in range(1000):
        yield Order(number, random.choice(["ann", "bob"]))


def state():
    return seen

"""

GOOD = """
@bus.subscriber(orders, "writing")
async def write(order: Order) -> None:
    print("handlers may print")
    await asyncio.sleep(0)
    seen[order.number] = order.customer
"""

BAD = """
@bus.subscriber(orders, "counting")
async def count(order: Order) -> None:
    seen[order.customer] = seen.get(order.customer, 0) + (order.number == 2)
"""


@pytest.fixture(autouse=True)
def nothing_from_outside(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in os.environ:
        if name.startswith("PENSTOCK_"):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


def write_shop(*parts: str) -> None:
    Path("shop.py").write_text(dedent(SHOP) + "".join(map(dedent, parts)))


def chaos(*argv: str, events: int = 4, rounds: int = 0) -> int:
    return main(["chaos", "shop:bus", "--events", str(events), "--rounds", str(rounds), *argv])


SAMPLED = ("--sample", "shop:sample", "--state", "shop:state")


# --- what is found ----------------------------------------------------------------------------


def test_a_handler_that_counts_is_found_with_its_event_and_one_fault_and_others_are_not(
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_shop(GOOD, BAD)
    reports = []
    for _ in range(2):
        assert chaos(*SAMPLED, "--seed", "7", "--json", rounds=1) == 1
        reports.append(capsys.readouterr().out)
    assert reports[0] == reports[1], "the same seed is the same report"
    report = json.loads(reports[0])
    verdicts = {each["handler"]: each["verdict"] for each in report["handlers"]}
    assert verdicts == {"write": "no difference found", "count": "is not idempotent"}
    [finding] = report["findings"]
    assert (finding["handler"], finding["subscription"], finding["origin"]) == ("count", "counting", "sample 2")
    [fault] = finding["faults"]
    assert (fault["kind"], f"orders/0@{fault['offset']}") == ("twice", finding["event"])
    [difference] = finding["differences"]
    assert (difference["calm"], difference["chaos"]) == ("1", "2")


def test_idempotent_handlers_come_through_whatever_goes_wrong(capfd: pytest.CaptureFixture[str]) -> None:
    write_shop(GOOD)
    assert chaos(*SAMPLED, rounds=3) == 0
    printed = capfd.readouterr()
    assert "no difference found" in printed.out
    assert "handlers may print" in printed.err
    assert "handlers may print" not in printed.out
    assert not Path("never").exists(), "the store of the bus itself is not even made"


def test_a_handler_that_is_only_wrong_if_it_is_cut_off_in_the_middle_is_found(
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_shop(
        """
        began = set()

        @bus.subscriber(orders, "halves")
        async def halves(order: Order) -> None:
            if order.number not in began:
                began.add(order.number)
                await asyncio.sleep(0)
                await asyncio.sleep(0)
                seen[order.number] = True
        """
    )
    assert chaos(*SAMPLED) == 1
    printed = capsys.readouterr().out
    assert "halves of 'halves' is not idempotent" in printed
    assert "cut off and repeated at orders/0@0 of 'halves', where it waits for the 1. time" in printed


def test_without_a_state_what_handlers_publish_is_compared(capsys: pytest.CaptureFixture[str]) -> None:
    write_shop(
        """
        @bus.subscriber(orders, "billing")
        async def bill(order: Order) -> None:
            await bus.publish(bills, b"%d" % order.number, key=order.customer)
        """
    )
    assert chaos("--sample", "shop:sample") == 1
    assert "published bills penstock.untyped key" in capsys.readouterr().out


@pytest.mark.parametrize(("again", "kind"), [("True", "twice"), ("order.number not in done", "cut off and repeated")])
def test_who_publishes_again_is_blamed_and_not_who_handles_that(
    again: str, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_shop(
        f"""
        done = set()

        @bus.subscriber(orders, "forwarding")
        async def forward(order: Order) -> None:
            if {again}:
                await bus.publish(bills, b"%d" % order.number, key=order.customer)
                await asyncio.sleep(0)
                done.add(order.number)

        @bus.subscriber(bills, "adding")
        async def add(data: bytes) -> None:
            seen[int(data)] = True
        """
    )
    assert chaos(*SAMPLED, "--json", rounds=2) == 1
    report = json.loads(capsys.readouterr().out)
    verdicts = {each["handler"]: each["verdict"] for each in report["handlers"]}
    assert verdicts == {"forward": "is not idempotent", "add": "no difference found"}
    [finding] = report["findings"]
    assert (finding["handler"], finding["event"], finding["origin"]) == ("forward", "orders/0@0", "sample 0")
    assert finding["faults"][0]["kind"] == kind
    assert "orders/0@0 of 'forwarding'" in finding["again"]


def test_a_handler_that_fails_the_second_time_is_found_by_its_dead_letters(capsys: pytest.CaptureFixture[str]) -> None:
    write_shop(
        """
        @bus.subscriber(orders, "inserting")
        async def insert(order: Order) -> None:
            if order.number in seen:
                raise KeyError("a unique constraint")
            seen[order.number] = order.customer
        """
    )
    assert chaos(*SAMPLED) == 1
    assert "differs: dead letters inserting orders/0@0 KeyError: none without faults, 1 with them" in (
        capsys.readouterr().out
    )


def test_a_seed_finds_a_handler_that_depends_on_the_order_of_other_keys(capsys: pytest.CaptureFixture[str]) -> None:
    write_shop(
        """
        @bus.subscriber(orders, "last")
        async def last(order: Order) -> None:
            seen["last"] = order.number

        def sample(random):
            return [Order(number, f"customer {number}") for number in range(4)]
        """
    )
    assert chaos(*SAMPLED, "--seed", "1", "--json", rounds=8) == 1
    [finding] = json.loads(capsys.readouterr().out)["findings"]
    assert finding["what"].startswith("depends on the order")
    assert {fault["kind"] for fault in finding["faults"]} == {"slow"}
    seed = finding["seed"]
    assert chaos(*SAMPLED, "--seed", str(seed), "--json", rounds=1) == 1
    assert json.loads(capsys.readouterr().out)["findings"] == [finding]


# --- where events come from -------------------------------------------------------------------


def test_events_come_from_lines_of_plain_data_or_of_cloudevents(capsys: pytest.CaptureFixture[str]) -> None:
    write_shop(GOOD, BAD)
    whole: dict[str, Any] = {
        "specversion": "1.0",
        "id": "x",
        "source": "s",
        "type": "shop.order",
        "penstocktopic": "orders",
    }
    whole |= {"penstockpartition": 0, "datacontenttype": "application/json", "data": {"number": 2}}
    Path("events.jsonl").write_text('{"number": 1}\n' + json.dumps(whole) + "\n")
    assert chaos("--input", "events.jsonl", "--state", "shop:state", "--json") == 1
    [finding] = json.loads(capsys.readouterr().out)["findings"]
    assert finding["origin"] == "line 2"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("no json", "line 1 is not JSON"),
        ('{"customer": 1}', "line 1: "),
        ('{"specversion": "1.0", "id": "x", "source": "s", "type": "t", "penstocktopic": "order"}', "'orders'"),
    ],
)
def test_a_line_that_is_no_event_is_named(line: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    write_shop(GOOD)
    Path("events.jsonl").write_text(line + "\n")
    assert chaos("--input", "events.jsonl") == 2
    assert said in capsys.readouterr().err


def test_copies_of_the_last_events_of_a_store_are_tried_and_the_store_stays_as_it_is(
    capsys: pytest.CaptureFixture[str], root: Path
) -> None:
    write_shop(GOOD, BAD)
    url = f"file:{root}"
    assert main(["--url", url, "topics", "create", "orders", "--partitions", "2"]) == 0
    for key, number in (("ann", 2), ("bob", 5), ("ann", 6), ("eve", 7)):
        data = json.dumps({"number": number})
        fields = ["--type", "shop.order", "--key", key, "--content-type", "application/json"]
        assert main(["--url", url, "publish", "orders", data, *fields]) == 0
    capsys.readouterr()

    def stored() -> str:
        for command in (["read", "orders"], ["subscriptions"], ["topics"]):
            assert main(["--url", url, *command, "--json"]) == 0
        return capsys.readouterr().out

    before = stored()
    origins = []
    for events, code in ((3, 0), (4, 1)):  # the first one of all is what one of the handlers counts
        assert chaos("--from-topic", url, "--state", "shop:state", "--json", events=events) == code
        report = json.loads(capsys.readouterr().out)
        assert report["events"] == events
        origins += [finding["origin"] for finding in report["findings"]]
    assert origins in (["orders/0@0"], ["orders/1@0"])
    assert stored() == before


# --- what cannot be tried ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parts", "argv", "code", "said"),
    [
        ([GOOD], [], 2, "one of --input, --sample and --from-topic"),
        ([GOOD], ["--sample", "shop:sample", "--from-topic", "file:./x"], 2, "one of --input"),
        ([], ["--sample", "shop:sample"], 2, "has no handlers"),
        ([GOOD], ["--sample", "shop:sample"], 2, "nothing can be compared"),
        ([GOOD], ["--sample", "shop:simple"], 2, "did you mean 'sample'?"),
        ([GOOD], ["--sample", "sample"], 2, "module:name"),
        ([GOOD], ["--sample", "shop:state"], 2, "has raised: TypeError"),
        ([GOOD, "\ndef sample(random): return 7\n"], ["--sample", "shop:sample"], 2, "returned a int"),
        ([GOOD, "\ndef sample(random): return [7]\n"], ["--sample", "shop:sample"], 2, "no topics here take int"),
        ([GOOD, "\ndef sample(random): return []\n"], ["--sample", "shop:sample"], 2, "there are no events"),
        ([GOOD], [*SAMPLED, "--timeout", "2m"], 2, "--timeout is 120 s"),
        (["\nbus = 7\n"], ["--sample", "shop:sample"], 2, "is a int, not a Bus"),
        (["\nraise ZeroDivisionError('at import')\n"], [*SAMPLED], 1, "has raised: ZeroDivisionError: at import"),
        (
            ["\nraise type('Evil\\x1b[31m\\nX', (Exception,), {})('\\x1b[2J')\n"],
            SAMPLED, 1, r"has raised: Evil\x1b[31m X: \x1b[2J",
        ),
        (["\nimport sys; sys.exit(3)\n"], SAMPLED, 1, "the code of shop:bus has raised: SystemExit: 3"),
        ([GOOD], ["--sample", ".shop:sample"], 2, "'.shop' is no module"),
        ([GOOD], [*SAMPLED, "--reset", "shop..x:reset"], 2, "'shop..x' is no module"),
        (["\nimport os; os._exit(3)\n"], [*SAMPLED], 1, "has ended by itself"),
        (
            [GOOD, "\nimport uuid\ndef state(): return {'id': str(uuid.uuid4())}\n"],
            SAMPLED, 1, "two runs without any fault differ, so that nothing can be said of others: state id",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_tried_is_said_in_a_line(
    parts: list[str], argv: list[str], code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_shop(*parts)
    told = chaos(*argv)
    printed = capsys.readouterr()
    assert said in printed.err
    assert told == (1 if "has raised" in said else code)
    assert printed.out == ""
    assert "\x1b" not in printed.err


def test_a_handler_that_hangs_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    write_shop(
        """
        @bus.subscriber(orders, "hanging")
        async def hang(order: Order) -> None:
            await asyncio.Event().wait()
        """
    )
    assert chaos(*SAMPLED, "--timeout", "1") == 1
    assert "do not come to an end without any fault" in capsys.readouterr().err


def test_what_is_kept_outside_of_the_process_is_reset_before_each_run(capsys: pytest.CaptureFixture[str]) -> None:
    write_shop(
        """
        from pathlib import Path

        @bus.subscriber(orders, "files")
        async def write(order: Order) -> None:
            Path("kept").mkdir(exist_ok=True)
            (Path("kept") / str(len(list(Path("kept").iterdir())))).touch()

        def kept():
            return sorted(path.name for path in Path("kept").iterdir())

        async def reset():
            for path in Path("kept").glob("*"):
                path.unlink()
        """
    )
    arguments = ["--sample", "shop:sample", "--state", "shop:kept"]
    assert chaos(*arguments) == 1
    assert "two runs without any fault differ" in capsys.readouterr().err
    assert chaos(*arguments, "--reset", "shop:reset") == 1
    assert "write of 'files' is not idempotent" in capsys.readouterr().out


# --- the search -------------------------------------------------------------------------------


def faults(count: int) -> list[Fault]:
    return [Fault(kind=Kind.TWICE, topic="t", partition=0, offset=offset, subscription="s") for offset in range(count)]


@pytest.mark.parametrize("wanted", [{37}, {3, 96}, {0, 50, 99}])
def test_as_few_faults_are_left_as_are_needed(wanted: set[int]) -> None:
    runs = 0

    def shows(some: list[Fault]) -> bool:
        nonlocal runs
        runs += 1
        return wanted <= {fault.offset for fault in some}

    assert {fault.offset for fault in shrunk(faults(100), shows, 200)} == wanted
    assert runs <= 150


def test_the_number_of_runs_is_bounded_and_what_is_left_still_shows_it() -> None:
    runs = 0

    def shows(some: list[Fault]) -> bool:
        nonlocal runs
        runs += 1
        return len(some) >= 40

    assert 40 <= len(shrunk(faults(100), shows, 10)) < 100
    assert runs <= 10


def test_a_culprit_that_is_known_is_left_out_when_others_are_looked_for() -> None:
    asked: list[tuple[Any, list[Any]]] = []
    handled = [Tally(Place(name, "t", 0, 0), name, 1) for name in ("one", "two")]

    def run(told: list[Fault] | int, without: Any, /) -> Effects:
        asked.append((told, list(without)))
        found = told if isinstance(told, list) else [fault_of("two", Kind.CRASH_AFTER)]
        hit = {fault.subscription for fault in found if fault.kind is not Kind.CUT} - {name for _, name in without}
        hit -= {"two"} if any(fault.kind is Kind.TWICE for fault in found) else set()
        return Effects(state=sorted(hit), handled=handled, faults=list(found))

    def fault_of(name: str, kind: Kind) -> Fault:
        return Fault(kind=kind, topic="t", partition=0, offset=0, subscription=name)

    search = Search(run)
    found = search.findings([("t", "one"), ("t", "two")], 5, 2)
    assert [(each.subscription, each.seed, each.faults[0].kind) for each in found] == [
        ("one", 5, Kind.TWICE),
        ("two", 5, Kind.CRASH_AFTER),
    ]
    assert (5, [("t", "one")]) in asked
    assert search.runs == len(asked)


@pytest.mark.parametrize(
    ("kind", "again", "blamed"),
    [
        # What was in hand came again, though not the event whose commit had no answer.
        (Kind.COMMIT_UNANSWERED, [Place("another", "out", 0, 7), Place("one", "t", 0, 0)], "t/0@0"),
        # Only what was published again was handled again.
        (Kind.SLOW, [Place("another", "out", 0, 7)], "t/0@1"),
        # A commit of several subscriptions had no answer, and one of them had something in hand.
        (Kind.COMMIT_UNANSWERED, [Place("another", "out", 0, 7), Place("third", "t", 0, 0)], "t/0@0"),
    ],
)
def test_who_handles_what_a_fault_has_published_is_the_last_to_be_blamed(
    kind: Kind, again: list[Place], blamed: str
) -> None:
    fault = Fault(kind=kind, topic="t", partition=0, offset=1, subscription="one")
    calm = [Tally(Place(name, "t", 0, offset), name, 1) for name in ("one", "third") for offset in (0, 1)]

    def run(told: list[Fault] | int, without: Any, /) -> Effects:
        hit = [fault] if told in (5, [fault]) else []
        handled = calm + [Tally(place, place.subscription, 2) for place in again if hit]
        return Effects(state=len(hit), handled=handled, faults=hit)

    found = Search(run)._chaotic(5)
    assert found is not None
    assert found.event == blamed
    assert found.subscription == next((place.subscription for place in again if str(place) == blamed), "one")


def test_differences_name_the_place_and_are_bounded() -> None:
    calm = Effects(state={"a": {"b": [1, 2]}, "c": 1}, published={"x": 1})
    other = Effects(state={"a": {"b": [1, 3]}, "d": "long" * 100}, published={"x": 2})
    found = {each.where: (each.calm, each.chaos[:9]) for each in differences(calm, other)}
    assert found == {
        "state a b 1": ("2", "3"),
        "state c": ("1", "none"),
        "state d": ("none", "longlongl"),
        "published x": ("1", "2"),
    }
    assert len(differences(Effects(state={}), Effects(state=dict.fromkeys(map(str, range(100)), 1)))) == 10
    assert differences(calm, calm) == []


def test_any_value_can_be_compared() -> None:
    class Opaque:
        def __repr__(self) -> str:
            return "<opaque>"

    assert plain({"b": {3, 1}, 2: (1.5, b"x"), "o": Opaque()}) == plain({"o": Opaque(), 2: [1.5, b"x"], "b": {1, 3}})
    assert plain({(1, 2): 3}) == repr({(1, 2): 3})
