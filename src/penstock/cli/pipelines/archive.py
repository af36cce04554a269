"""`penstock pipeline archive`: topics into a Parquet lake, once or for ever."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.output import Json, print_json, print_json_line, say, shown_size
from penstock.cli.pipelines.running import DEFAULT_MASTER, Continuous, Master, running
from penstock.cli.session import Session, opened_store

if TYPE_CHECKING:
    from penstock.settings import Settings
    from penstock.spark.pipelines.archive import Archived, Archiver
    from penstock.spark.pipelines.rounds import Ending

Topics = Annotated[list[str], typer.Argument(metavar="TOPIC…", help="Names, or patterns such as 'orders*'.")]
Directory = Annotated[str, typer.Option("--lake", metavar="DIR", help="The lake's directory; made if it is not there.")]
Name = Annotated[str, typer.Option(metavar="NAME", help="Of each topic; one for each lake.")]
AllowLoss = Annotated[
    bool, typer.Option("--allow-data-loss", help="Declare what was trimmed too early as a gap, and go on.")
]


def archive(
    context: typer.Context,
    topics: Topics,
    *,
    lake: Directory,
    master: Master = DEFAULT_MASTER,
    continuous: Continuous = False,
    subscription: Name = "archive",
    allow_data_loss: AllowLoss = False,
    as_json: Json = False,
) -> None:
    """Archive topics into a Parquet lake.

    With --once everything is archived that is there now. With --continuous a file is written when there is enough for
    one, and after a quarter of an hour whatever there is. Either may be stopped at any moment, and run beside others:
    what is in the lake is not archived again. What is archived may be removed by retention, and nothing else.
    """
    from penstock.spark.pipelines.archive import archiver
    from penstock.spark.pipelines.rounds import rounds
    from penstock.versions import local_directory

    session = context.ensure_object(Session)
    settings = session.resolve().settings
    directory = local_directory(lake)
    _check(settings, topics)
    with (
        running(session, master, "archive") as run,
        archiver(
            run.spark,
            settings.url,
            topics,
            directory,
            settings=settings,
            subscription=subscription,
            fail_on_data_loss=not allow_data_loss,
        ) as made,
    ):
        if not continuous:
            _report(_everything(made, run.ending), as_json=as_json)
            return
        for done in rounds(made.round, continuous=True, ending=run.ending):
            if not done.idle:
                _report(done, as_json=as_json, lines=True)


def _check(settings: Settings, topics: list[str]) -> None:
    """Find what is wrong before Spark starts, which takes seconds."""
    from penstock.spark.topics import Topics as Found

    with opened_store(settings) as store:
        if not Found(store, topics).found():
            say("no topic matches yet")


def _everything(made: Archiver, ending: Ending) -> Archived:
    def tell(done: Archived, left: int) -> None:
        say(f"{done.events:,} events in {done.files:,} files, {shown_size(done.bytes)}; {left:,} events left")

    return made.everything(tell, ending)


def _report(done: Archived, *, as_json: bool, lines: bool = False) -> None:
    from msgspec import json

    if as_json and lines:
        print_json_line(json.encode(done.document()))
    elif as_json:
        print_json(done.document())
    else:
        print(_sentence(done))


def _sentence(done: Archived) -> str:
    said = f"{done.events:,} events archived in {done.files:,} files, {shown_size(done.bytes)}"
    for number, what in (
        (done.merged, "files merged"),
        (done.gaps, "offsets are gaps"),
        (done.repeated, "files written for nothing, as another archiver was quicker"),
        (done.removed, "files removed that nothing names"),
    ):
        if number:
            said += f"; {number:,} {what}"
    return said
