"""`penstock projection`: what projections have come to, in an application's SQLite file or in a table of Parquet.

Neither needs the application, nor Spark. `--from` names a file of SQLite, a table, or a directory of tables; without it
they are those of the store's own file.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from penstock.cli.output import Json, print_json, print_table, shown_text
from penstock.cli.session import Session
from penstock.errors import IntegrityError, PenstockError, UsageError, did_you_mean

if TYPE_CHECKING:
    from collections.abc import Callable

app = typer.Typer(help="Look at the states of projections.", no_args_is_help=True)

KEYS_SHOWN = 20

From = Annotated[
    Path | None,
    typer.Option("--from", metavar="PATH", help="A file of SQLite, or a directory of tables; else the store's."),
]
Name = Annotated[str, typer.Argument(metavar="NAME", help="The projection's name.")]
Key = Annotated[str | None, typer.Option(metavar="TEXT", help="The state of this key; else the first few.")]
Version = Annotated[int | None, typer.Option(min=1, metavar="N", help="Of this version; else of the newest.")]
Limit = Annotated[int, typer.Option(min=1, metavar="N", help="Show so many keys at most.")]


class Found(NamedTuple):
    """A projection that is kept somewhere."""

    name: str
    version: int
    topic: str
    positions: dict[int, int]
    keys: int
    get: Callable[[str], bytes | None]
    items: Callable[[], Iterator[tuple[str, bytes]]]

    def document(self) -> dict[str, Any]:
        """Return what is known of it, without its states."""
        return {
            "projection": self.name,
            "version": self.version,
            "topic": self.topic,
            "keys": self.keys,
            "positions": {str(partition): offset for partition, offset in self.positions.items()},
        }


@app.command("ls")
def list_projections(context: typer.Context, place: From = None, as_json: Json = False) -> None:
    """List projections, with the number of their keys and how far they are."""
    with _reading():
        found = _found(context, place)
    if as_json:
        print_json([each.document() for each in found])
        return
    print_table(
        ["projection", "version", "topic", "keys", "positions"],
        [[each.name, str(each.version), each.topic, f"{each.keys:,}", _placed(each.positions)] for each in found],
        numbers={"version", "keys"},
    )


@app.command("show")
def show(
    context: typer.Context,
    name: Name,
    *,
    key: Key = None,
    place: From = None,
    version: Version = None,
    limit: Limit = KEYS_SHOWN,
    as_json: Json = False,
) -> None:
    """Show the state of a key, or of the first few keys."""
    with _reading():
        chosen = _chosen(_found(context, place), name, version)
        if key is not None:
            state = chosen.get(key)
            states = [] if state is None else [(key, state)]
        else:
            states = [each for each, _ in zip(chosen.items(), range(limit), strict=False)]
    if key is not None and not states:
        raise PenstockError(f"projection {name!r} has no state for this key")
    if as_json:
        shown = [{"key": each, "state": json.loads(state)} for each, state in states]
        print_json({**chosen.document(), **(shown[0] if key is not None else {"states": shown})})
        return
    print_table(["key", "state"], [[shown_text(each), shown_text(state.decode())] for each, state in states])


@contextmanager
def _reading() -> Iterator[None]:
    try:
        yield
    except sqlite3.DatabaseError as error:
        raise IntegrityError(f"the file of projections cannot be read: {error}") from error


def _chosen(found: list[Found], name: str, version: int | None) -> Found:
    mine = [each for each in found if each.name == name and version in {None, each.version}]
    if not mine:
        which = "" if version is None else f" of version {version}"
        near = did_you_mean(name, {each.name for each in found})
        raise UsageError(f"there is no projection {name!r}{which} here{near}; `penstock projection ls` lists them")
    return max(mine, key=lambda each: each.version)


def _found(context: typer.Context, place: Path | None) -> list[Found]:
    """Return all projections that are kept in a place."""
    from penstock.bus.states import PROJECTIONS_FILE

    if place is None:
        directory, _ = context.ensure_object(Session).directory()
        place = directory / PROJECTIONS_FILE
        if not place.exists():
            raise UsageError(f"no projection was run here yet: there is no {place}; --from names another place")
    if not place.exists():
        raise UsageError(f"there is no {place}")
    return _tables(place) if place.is_dir() else _states(place)


def _states(file: Path) -> list[Found]:
    from functools import partial

    from penstock.bus.states import States

    states = States(file, own=False)
    return [
        Found(
            *(each.name, each.version, each.topic, each.positions, each.keys),
            get=partial(states.get, each.name, each.version),
            items=partial(states.items, each.name, each.version),
        )
        for each in states.listed()
    ]


def _tables(directory: Path) -> list[Found]:
    from penstock.spark.pipelines.tables import Table

    found = []
    for each in (directory, *sorted(directory.iterdir())):
        table = Table(each)
        held = table.latest() if (each / "versions").is_dir() else None
        if held is not None:
            manifest = held.manifest
            positions = dict(enumerate(manifest.offsets))
            found.append(
                Found(
                    *(manifest.projection, manifest.version, manifest.topic, positions, manifest.keys),
                    get=table.get,
                    items=table.items,
                )
            )
    if not found:
        raise UsageError(f"there is no table of a projection in {directory}: `penstock pipeline project` makes one")
    return found


def _placed(positions: dict[int, int]) -> str:
    return " ".join(f"{partition}@{offset}" for partition, offset in sorted(positions.items()))
