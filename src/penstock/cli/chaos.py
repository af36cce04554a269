"""`penstock chaos`: an application's own handlers, with everything going wrong that may, to see what they make of it.

Handlers see an event again after a crash, and events of other keys in another order; nobody promises otherwise. This
runs them on the same events calmly and with faults, and compares what they have done. The application is imported and
its handlers are run, in processes of their own; the store of its bus is never opened, and `--from-topic` only reads.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from penstock.cli.application import check_module, one_line
from penstock.cli.arguments import duration
from penstock.cli.output import Json, print_json, print_table, say, shown_text
from penstock.cli.session import Session
from penstock.errors import PenstockError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    from penstock.settings import Limits
    from penstock.testing.campaigns.zygote import Zygote
    from penstock.testing.worlds.effects import Effects
    from penstock.testing.worlds.faults import Fault
    from penstock.testing.worlds.search import Finding, Run, Subject
    from penstock.testing.worlds.trials import Declared, Given, Input, Wanted

EVENTS: Final = 100
EVENTS_MAX: Final = 10_000
ROUNDS: Final = 10
TIMEOUT_SECONDS_MAX: Final = 50.0
METAVAR: Final = "MODULE:NAME"


def chaos(
    context: typer.Context,
    bus: Annotated[str, typer.Argument(metavar="MODULE:BUS", help="The application's bus, as in shop:bus.")],
    *,
    seed: Annotated[int, typer.Option(metavar="N", help="What goes wrong; the same one, the same again.")] = 0,
    events: Annotated[int, typer.Option(min=1, max=EVENTS_MAX, metavar="N", help="How many at most.")] = EVENTS,
    rounds: Annotated[int, typer.Option(min=0, metavar="N", help="How many seeds, from --seed on.")] = ROUNDS,
    file: Annotated[
        Path | None, typer.Option("--input", metavar="PATH", help="Events, one JSON document a line; - is stdin.")
    ] = None,
    sample: Annotated[
        str | None, typer.Option(metavar=METAVAR, help="A function that takes a Random and yields values.")
    ] = None,
    from_topic: Annotated[
        str | None, typer.Option(metavar="URL", help="Copies of the last events in this store; it is only read.")
    ] = None,
    topic: Annotated[str | None, typer.Option(metavar="NAME", help="Only this topic; that of --input.")] = None,
    state: Annotated[
        str | None, typer.Option(metavar=METAVAR, help="A function that returns what handlers have done.")
    ] = None,
    reset: Annotated[
        str | None, typer.Option(metavar=METAVAR, help="A function called before each run, to begin anew.")
    ] = None,
    timeout: Annotated[
        float | None, typer.Option(parser=duration, metavar="TIME", help="How long a run may take; 30s, at most 50s.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Find handlers that are not idempotent; exits with 1 if there are any.

    The module is imported, and its handlers are run: on a store in memory, whatever the bus's own is. Runs are compared
    by what --state returns, by what handlers publish, and by dead letters.
    """
    from penstock.testing.campaigns.zygote import Zygote
    from penstock.testing.worlds import trials
    from penstock.testing.worlds.search import Search

    if sum(source is not None for source in (file, sample, from_topic)) != 1:
        raise UsageError("events come from one of --input, --sample and --from-topic: give one of them")
    _check_names(bus, sample, state, reset)
    limit = trials.TIMEOUT_SECONDS if timeout is None else timeout
    if not 0 < limit <= TIMEOUT_SECONDS_MAX:
        raise UsageError(f"--timeout is {limit:g} s; it must be more than 0 and at most {TIMEOUT_SECONDS_MAX:g}")
    session = context.ensure_object(Session)
    with Zygote(trials.__name__) as zygote:
        application = _Application(zygote, bus)
        handlers = application.described()
        if file is not None:
            inputs = _from_file(file, topic or "", events, session.resolve().settings.limits)
        elif from_topic is not None:
            inputs = _from_store(Session(from_topic, session.config), handlers, topic, events)
        else:
            inputs = []
        given = application.gathered(inputs, sample or "", events)
        if not given:
            raise UsageError("there are no events: nothing can be tried")
        wanted = trials.Wanted(bus=bus, state=state or "", reset=reset or "", events=given, seed=seed, timeout=limit)
        search = Search(application.runner(wanted))
        names = dict.fromkeys((each.topic, each.subscription) for each in handlers)
        findings = search.findings(names, seed, rounds)
    report = _Report(bus, seed, rounds, len(given), search.runs, handlers, findings)
    if as_json:
        print_json(report.document())
    else:
        report.print()
    if findings:
        raise typer.Exit(1)


def _check_names(*targets: str | None) -> None:
    """Raise `UsageError` for what can be in no module; that there is a name at all is seen to where it is looked up."""
    for target in targets:
        if target and (module := target.partition(":")[0]):
            check_module(module)


class _Application:
    """The application, in processes of its own."""

    def __init__(self, zygote: Zygote, bus: str) -> None:
        self._zygote = zygote
        self._bus = bus

    def _ask(self, program: Callable[..., None], decode: Callable[[bytes], Any], **arguments: Any) -> Any:
        from penstock.testing.campaigns.zygote import Crashed
        from penstock.testing.worlds.trials import ANSWER

        child = self._zygote.start(program, **arguments)
        try:
            heard = child.hear()
        except EOFError:
            raise PenstockError(f"the process that runs {self._bus} has ended by itself: stderr may say why") from None
        finally:
            child.kill()
            child.connection.close()
        if isinstance(heard, Crashed):  # by what is no `Exception`, such as `sys.exit()`
            kind, _, message = heard.trace.rstrip().rpartition("\n")[2].partition(": ")
            raise PenstockError(f"the code of {self._bus} has raised: {one_line(kind, message)}")
        answer = ANSWER.decode(heard)
        if answer.usage:
            raise UsageError(answer.usage)
        if answer.trace:
            raise PenstockError(f"the code of {self._bus} has raised: {one_line(*answer.trace.split(': ', 1))}")
        return decode(answer.value)

    def described(self) -> list[Declared]:
        """Return its handlers."""
        from penstock.testing.worlds import trials

        found: list[Declared] = self._ask(trials.describe, trials.DECLARED.decode, bus=self._bus)
        return found

    def gathered(self, inputs: list[Input], sample: str, most: int) -> list[Given]:
        """Return events that can be published to it."""
        import msgspec

        from penstock.testing.worlds import trials

        encoded = msgspec.msgpack.encode(inputs)
        found: list[Given] = self._ask(
            trials.gather, trials.GIVEN.decode, bus=self._bus, inputs=encoded, sample=sample, most=most
        )
        return found

    def runner(self, wanted: Wanted) -> Run:
        """Return what runs it with some faults, or with those of a seed."""
        import msgspec

        from penstock.testing.worlds import trials

        def run(faults: list[Fault] | int, without: Collection[Subject], /) -> Effects:
            told = msgspec.structs.replace(wanted, without=list(without))
            if isinstance(faults, int):
                told = msgspec.structs.replace(told, seed=faults, faults=None)
            else:
                told = msgspec.structs.replace(told, faults=faults)
            found: Effects = self._ask(trials.run, trials.EFFECTS.decode, wanted=msgspec.msgpack.encode(told))
            return found

        return run


# --- where events come from -------------------------------------------------------------------


def _from_file(file: Path, topic: str, most: int, limits: Limits) -> list[Input]:
    """Return what stands in a file: CloudEvents as `penstock read --json` prints them, or nothing but their data."""
    from itertools import islice

    from penstock.cli.incoming import Lines, opened

    with opened(file) as stream:
        lines = Lines(stream, limits, lambda _done, _total: None)
        return list(islice((_input(number, line, topic) for number, line in lines), most))


def _input(number: int, line: bytes, topic: str) -> Input:
    import msgspec

    from penstock.cli.incoming import cloudevent
    from penstock.cli.read import TOPIC_ATTRIBUTE
    from penstock.events import Event
    from penstock.testing.worlds.trials import Input

    where = f"line {number}"
    try:
        document = msgspec.json.decode(line)
    except (ValueError, RecursionError):
        raise UsageError(f"{where} is not JSON") from None
    if not isinstance(document, dict) or "specversion" not in document:
        return Input(where, topic, Event(data=line), bare=True)
    return Input(where, topic or str(document.get(TOPIC_ATTRIBUTE, "")), cloudevent(where, line).event)


def _from_store(session: Session, handlers: list[Declared], topic: str | None, most: int) -> list[Input]:
    """Return copies of the last events of the topics that have handlers."""
    from penstock.cli.session import find_topic

    names = [topic] if topic is not None else list(dict.fromkeys(each.topic for each in handlers))
    with session.open_store() as (store, _):
        found = [pair for name in names for pair in _last_events(store, find_topic(store, name), most)]
    return [copy for _, copy in sorted(found, key=lambda pair: pair[0])[-most:]]


def _last_events(store: Any, info: Any, most: int) -> Iterator[tuple[Any, Input]]:
    import msgspec

    from penstock.cli.read import READ_BYTES
    from penstock.offsets import Gap
    from penstock.testing.worlds.trials import Input

    for partition in info.partitions:
        bounds = store.log.bounds(partition)
        at = max(bounds.start, bounds.stop - most)
        while at < bounds.stop:
            for item in store.log.read(partition, at, bytes_max=READ_BYTES):
                at = item.range.stop
                for event in () if isinstance(item, Gap) else item:
                    # Whether it is still worth being handled is not the question here.
                    copy = msgspec.structs.replace(event.to_event(), expires_at=None)
                    yield event.appended_at, Input(str(event.position), info.name, copy)


# --- what is told -----------------------------------------------------------------------------


class _Report:
    """What came of it."""

    def __init__(  # noqa: PLR0917 - what a report is of
        self,
        bus: str,
        seed: int,
        rounds: int,
        events: int,
        runs: int,
        handlers: list[Declared],
        findings: list[Finding],
    ) -> None:
        self._head = {"bus": bus, "seed": seed, "rounds": rounds, "events": events, "runs": runs}
        self._handlers = handlers
        self._findings = findings

    def _verdict(self, handler: Declared) -> str:
        mine = (handler.topic, handler.subscription, handler.handler)
        found = [each.what for each in self._findings if (each.topic, each.subscription, each.handler) == mine]
        return "; ".join(dict.fromkeys(found)) or "no difference found"

    def document(self) -> dict[str, Any]:
        """Return it for programs."""
        from msgspec import structs, to_builtins

        return {
            **self._head,
            "handlers": [{**structs.asdict(each), "verdict": self._verdict(each)} for each in self._handlers],
            "findings": [to_builtins(each) for each in self._findings],
        }

    def print(self) -> None:
        """Print it for people."""
        print_table(
            ("handler", "subscription", "topic", "verdict"),
            [(each.handler, each.subscription, each.topic, self._verdict(each)) for each in self._handlers],
        )
        for each in self._findings:
            print()
            where = f"{each.event} ({each.origin})"
            print(shown_text(f"{each.handler} of {each.subscription!r} {each.what}, at {where}"))
            for fault in each.faults:
                print(shown_text(f"  fault: {fault}"))
            for place in each.again:
                print(shown_text(f"  handled again: {place}"))
            for difference in each.differences:
                print(shown_text(f"  differs: {difference}"))
            print(f"  repeat: --seed {each.seed} --rounds {int(each.needs_seed)}")
        say(f"{self._head['events']:,} events, {self._head['runs']:,} runs, seed {self._head['seed']}")
