"""Runs campaigns one after the other, shows how far they are, and sums up what was tried and found.

The last full run of each campaign is kept in a record, from which the figures of the page *How Penstock is tested* are
written.
"""

from __future__ import annotations

import importlib
import platform
import sys
import time
import traceback
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, TextIO

import msgspec

from penstock.testing.campaigns.campaign import Campaign, Finding, Report, TooManyFindings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

MODULES = {
    "c0": "planted",
    "c1": "simulated",
    "c1s": "simulated.shared",
    "c2": "virtual.crashes",
    "c3": "power",
    "c4": "syscalls",
    "c5": "virtual.faults",
    "c6": "damage",
    "c7": "processes",
    "c7d": "deliveries",
    "c8": "spark",
    "c11": "exhaustion",
    "c12": "clocks",
    "c14": "mutations",
}
"""Where each campaign is. The missing numbers are for what is not there yet: networks and servers."""

BAR = 30
SHOW_SECONDS = 0.2
COUNTS_MAX = 15
"""So many of a campaign's counts are on the page; all are in the record."""
FIGURES = ("<!-- figures: begin -->", "<!-- figures: end -->")
BUGS = ("<!-- planted bugs: begin -->", "<!-- planted bugs: end -->")
"""Between what the page is written here."""


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """What came of a campaign."""

    name: str
    title: str
    unit: str
    seed: int
    asked: int
    """Rounds that were asked for."""
    rounds: int
    seconds: float
    tried: dict[str, int]
    findings: list[Finding]
    skipped: str | None = None
    """Why it did not run."""
    full: bool = False
    """Whether it was asked for all that it has, and ran to its end."""
    date: str = ""
    python: str = platform.python_version()
    system: str = platform.system()


def find(name: str) -> Campaign:
    """Return the campaign of this name."""
    module = importlib.import_module(f"penstock.testing.campaigns.{MODULES[name]}")
    campaign = module.CAMPAIGN
    assert isinstance(campaign, Campaign)
    return campaign


def run(campaign: Campaign, rounds: int, seed: int, *, show: Callable[[Report], None] = lambda _report: None) -> Result:
    """Run a campaign; whatever it raises by itself is a finding, too."""
    skipped = campaign.obstacle()
    report = Report(rounds=rounds, on_round=show)
    begun = time.monotonic()
    if skipped is None:
        try:
            campaign.run(report, seed)
        except TooManyFindings as error:
            report.count(str(error))
        except Exception:  # noqa: BLE001 - a campaign that breaks has proved nothing
            report.findings.append(Finding(f"the campaign itself failed:\n{traceback.format_exc()}", f"seed {seed}"))
    return Result(
        name=campaign.name,
        title=campaign.title,
        unit=campaign.unit,
        seed=seed,
        asked=rounds,
        rounds=report.done,
        seconds=round(time.monotonic() - begun, 1),
        tried=dict(report.tried),
        findings=report.findings,
        skipped=skipped,
        full=skipped is None and campaign.full <= rounds <= report.done,
        date=datetime.now(UTC).date().isoformat(),
    )


def run_all(names: Sequence[str], seed: int, rounds: Callable[[Campaign], int], out: TextIO) -> list[Result]:
    """Run campaigns and tell of each; an interrupt ends it with what there is so far."""
    results = []
    for name in names:
        campaign = find(name)
        try:
            with _progress(campaign, out) as show:
                results.append(run(campaign, rounds(campaign), seed, show=show))
        except KeyboardInterrupt:
            out.write("\ninterrupted\n")
            break
        _tell(results[-1], out)
    return results


@contextmanager
def _progress(campaign: Campaign, out: TextIO) -> Iterator[Callable[[Report], None]]:
    """Show a bar on a terminal; elsewhere only what comes at the end."""
    begun = shown = time.monotonic()

    def show(report: Report) -> None:
        nonlocal shown
        now = time.monotonic()
        if not out.isatty() or (now - shown < SHOW_SECONDS and report.done < report.rounds):
            return
        shown = now
        share = min(report.done / max(report.rounds, 1), 1.0)
        left = (now - begun) / share * (1 - share) if share else 0.0
        bar = ("█" * round(share * BAR)).ljust(BAR, "·")
        found = f", {len(report.findings)} found" if report.findings else ""
        out.write(f"\r{campaign.name:>4} {bar} {report.done:,} of {report.rounds:,}, {left:.0f} s left{found}\x1b[K")
        out.flush()

    yield show
    if out.isatty():
        out.write("\r\x1b[K")


def _tell(result: Result, out: TextIO) -> None:
    out.write(f"{result.name:>4} {result.title}: {outcome(result)}\n")
    for finding in result.findings:
        out.write("     " + "\n     ".join(f"{finding.what}\nreplay: {finding.replay}".splitlines()) + "\n")
    out.flush()


def outcome(result: Result) -> str:
    """Say what came of it, in a few words."""
    if result.skipped is not None:
        return f"skipped, {result.skipped}"
    found = f"{len(result.findings)} FOUND" if result.findings else "nothing found"
    return f"{found} in {result.rounds:,} rounds, {result.seconds:,.0f} s"


# --- what is kept -------------------------------------------------------------------------------


def summary(results: Sequence[Result]) -> str:
    """Return a table for people at a terminal."""
    rows = [("", "campaign", "rounds", "seconds", "found")]
    for result in results:
        numbers = (f"{result.rounds:,}", f"{result.seconds:,.0f}", f"{len(result.findings):,}")
        rows.append((result.name, result.title, *(numbers if result.skipped is None else ("skipped", "", ""))))
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    lines = [
        "  ".join(text.rjust(width) if column > 1 else text.ljust(width) for column, (text, width) in enumerate(pairs))
        for pairs in (list(zip(row, widths, strict=True)) for row in rows)
    ]
    lines.insert(1, "-" * len(lines[0]))
    return "\n".join(lines)


def write_json(path: Path, results: Sequence[Result]) -> None:
    """Write everything down, for programs."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=2) + b"\n")


def update_record(path: Path, results: Sequence[Result]) -> list[Result]:
    """Note the full runs among these in the record, and return all that it holds."""
    kept = {result.name: result for result in (_read_results(path.read_bytes()) if path.exists() else [])}
    kept |= {result.name: result for result in results if result.full}
    record = [kept[name] for name in MODULES if name in kept]
    write_json(path, record)
    return record


_read_results = msgspec.json.Decoder(list[Result]).decode


def write_page(page: Path, record: Sequence[Result]) -> None:
    """Write the figures of the last full runs, and the table of planted bugs, into the page."""
    text = page.read_text(encoding="utf-8")
    text = _between(FIGURES, text, _figures(record))
    page.write_text(_between(BUGS, text, planted_bugs()), encoding="utf-8")


def planted_bugs() -> str:
    """Return the table that says which test catches which planted bug."""
    from penstock.testing.campaigns.planted import table  # which is heavy, and needed here alone

    return table()


def _between(marks: tuple[str, str], text: str, new: str) -> str:
    before, rest = text.split(marks[0])
    _, after = rest.split(marks[1])
    return f"{before}{marks[0]}\n\n{new.strip()}\n\n{marks[1]}{after}"


def _figures(record: Sequence[Result]) -> str:
    lines = [
        "The last full run of each campaign:",
        "",
        "| | campaign | rounds | a round is | seed | seconds | found | when |",
        "| --- | --- | ---: | --- | ---: | ---: | ---: | --- |",
    ]
    for result in record:
        figures = f"{result.rounds:,} | {result.unit} | {result.seed} | {result.seconds:,.0f} | {len(result.findings)}"
        when = f"{result.date}, Python {result.python}, {result.system}"
        lines.append(f"| {result.name} | {result.title} | {figures} | {when} |")
    lines += ["", "What was done, as the campaigns counted it:", ""]
    for result in record:
        counts = sorted(result.tried.items(), key=lambda item: -item[1])
        told = [f"{what}: {count:,}" for what, count in counts[:COUNTS_MAX]]
        if rest := counts[COUNTS_MAX:]:
            told.append(f"{len(rest)} kinds more: {sum(count for _, count in rest):,}")
        lines.append(f"- **{result.name}**: " + "; ".join(told) + ".")
    return "\n".join(lines)


def say(text: str) -> None:
    """Print."""
    sys.stdout.write(text + "\n")
