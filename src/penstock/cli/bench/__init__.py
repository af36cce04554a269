"""`penstock bench`: how fast Penstock is on this machine, and how near to what the machine can do.

An area is a module of this package with a function `figures(rounds)`, and one line in `AREAS`. It is imported
when it is measured. All areas report in one form, which `harness` describes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.bench.harness import ROUNDS, Figure
from penstock.cli.bench.machine import Machine, this_machine
from penstock.cli.output import Json, print_json, print_table, say
from penstock.cli.version import versions

AREAS = {
    "batch": "Building, checking and dividing batches; publishing to memory.",
    "bus": "Typed handlers, effects once, single sends; and a peer.",
    "delivery": "Consumers, one and ten thousand, against the bare log and disk.",
    "log": "The file store against the bare disk, in one process and many.",
    "pipelines": "Archive, audit, redrive and project against bare Spark.",
    "shards": "Consumers that share a subscription, in one process and more.",
    "spark": "Spark's source and sink against rows that are nowhere stored.",
}
"""Every area, and what it measures."""

app = typer.Typer(help="Measure how fast Penstock is here.", no_args_is_help=True)

Rounds = Annotated[int, typer.Option(min=1, metavar="N", help="How often to time each thing; the median counts.")]
Keep = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        file_okay=False,
        writable=True,
        help="Also write each area's document to DIR/<area>.json.",
    ),
]


@dataclass(frozen=True, slots=True)
class Report:
    """What one area reports."""

    area: str
    machine: Machine
    versions: dict[str, str]
    figures: list[Figure]


def measure(area: str, rounds: int) -> Report:
    """Measure one area."""
    figures = list(import_module(f"{__name__}.{area}").figures(rounds))
    return Report(area, this_machine(), versions(), figures)


def _reports(areas: Iterable[str], rounds: int, keep: Path | None) -> Iterator[Report]:
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)  # first, so that a wrong path costs no measurement
    for area in areas:
        report = measure(area, rounds)
        if keep is not None:
            _write(report, keep)
        yield report


def _command(area: str) -> Callable[..., None]:
    def bench(rounds: Rounds = ROUNDS, keep: Keep = None, as_json: Json = False) -> None:
        (report,) = _reports([area], rounds, keep)
        if as_json:
            print_json(asdict(report))
        else:
            _print(report)

    return bench


for _area, _about in AREAS.items():
    app.command(_area, help=_about)(_command(_area))


@app.command("all")
def every_area(rounds: Rounds = ROUNDS, keep: Keep = None, as_json: Json = False) -> None:
    """Every area, one after the other."""
    reports = _reports(AREAS, rounds, keep)
    if as_json:
        print_json([asdict(report) for report in reports])
    else:
        for report in reports:
            _print(report)


def _write(report: Report, directory: Path) -> None:
    path = directory / f"{report.area}.json"
    path.write_text(json.dumps(asdict(report), indent=2) + "\n", encoding="utf-8")
    say(f"{path} is written")


def _print(report: Report) -> None:
    print(f"{report.area}: {report.machine}")
    print(", ".join(f"{name} {version}" for name, version in report.versions.items()))
    print_table(
        ("figure", "value", "unit", "ceiling", "ratio", "goal", "holds"),
        [
            (
                figure.name,
                _number(figure.value),
                figure.unit,
                _number(figure.ceiling),
                _number(figure.ratio),
                figure.goal,
                "yes" if figure.holds else "no",
            )
            for figure in report.figures
        ],
        numbers={"value", "ceiling", "ratio"},
    )


def _number(number: float | None) -> str:
    return "-" if number is None else f"{number:,.10g}"
