"""`penstock pipeline project`: an application's projections over the whole history of their topics, into Parquet."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.application import Target, find_bus
from penstock.cli.output import Json, print_json, print_json_line, print_table, say
from penstock.cli.pipelines.running import DEFAULT_MASTER, Continuous, Master, Running, running
from penstock.cli.session import Session
from penstock.errors import UsageError, did_you_mean

if TYPE_CHECKING:
    from penstock.bus.bus import Bus
    from penstock.bus.projections import Projection
    from penstock.spark.pipelines.project import Projected

Names = Annotated[list[str] | None, typer.Argument(metavar="[NAME]...", help="Which projections; all unless told.")]
Into = Annotated[
    Path, typer.Option(metavar="DIR", help="Where tables are: DIR/NAME, with the files in DIR/NAME/latest.")
]
Rebuild = Annotated[bool, typer.Option("--rebuild", help="Begin anew where a table is of an older version.")]
Buckets = Annotated[
    int | None, typer.Option(min=1, max=4_096, metavar="N", help="Files of a new table, by key; 64 unless told.")
]


def project(
    context: typer.Context,
    target: Target,
    names: Names = None,
    *,
    into: Into,
    master: Master = DEFAULT_MASTER,
    continuous: Continuous = False,
    rebuild: Rebuild = False,
    buckets: Buckets = None,
    as_json: Json = False,
) -> None:
    """Fold a topic's history, and what comes, into tables of states.

    Tables are Parquet, and say by themselves how far they are: stop it at any moment, and start it again. For example:
    penstock pipeline project shop:bus revenue --into ./tables
    """
    session = context.ensure_object(Session)
    bus = find_bus(target, session)
    chosen = _chosen(bus, target, names or [])
    with running(session, master, "project") as run:
        _run(run, bus, chosen, into, continuous=continuous, rebuild=rebuild, buckets=buckets, as_json=as_json)


def _chosen(bus: Bus, target: str, names: list[str]) -> list[Projection[object]]:
    known = {each.name: each for each in bus.projections}
    if not known:
        raise UsageError(
            f"{target} has no projections: declare them with @bus.projection(topic, name), and import their modules "
            f"where the bus is"
        )
    for name in names:
        if name not in known:
            raise UsageError(f"{target} has no projection {name!r}{did_you_mean(name, known)}")
    return [known[name] for name in names or known]


def _run(
    run: Running,
    bus: Bus,
    chosen: list[Projection[object]],
    into: Path,
    *,
    continuous: bool,
    rebuild: bool,
    buckets: int | None,
    as_json: bool,
) -> None:
    from penstock.spark.pipelines.project import project as fold
    from penstock.spark.pipelines.rounds import rounds
    from penstock.spark.pipelines.tables import BUCKETS

    def make() -> _Round:
        done = []
        for projection in chosen:
            if run.ending.asked:
                break

            def told(events: int, total: int, name: str = projection.name) -> None:
                say(f"{name}: {events:,} of {total:,} events")

            done.append(
                fold(
                    run.spark, bus, projection, into,
                    rebuild=rebuild, buckets=buckets or BUCKETS, ending=run.ending, told=told,
                )
            )  # fmt: skip
        return _Round(done)

    from msgspec import json

    for each in rounds(make, continuous=continuous, ending=run.ending):
        if continuous and as_json and not each.idle:
            print_json_line(json.encode([asdict(done) for done in each.done]))
        elif as_json and not continuous:
            print_json([asdict(done) for done in each.done])
        elif not as_json and not (continuous and each.idle):
            _print(each.done)


class _Round:
    """What was done for all projections."""

    def __init__(self, done: list[Projected]) -> None:
        self.done = done

    @property
    def idle(self) -> bool:
        return all(each.idle for each in self.done)


def _print(done: list[Projected]) -> None:
    print_table(
        ["projection", "folded", "keys", "behind", "table"],
        [
            [each.projection, f"{each.events:,}", f"{each.keys:,}", f"{each.behind:,}", f"{each.directory}/latest"]
            for each in done
        ],
        numbers={"folded", "keys", "behind"},
    )
