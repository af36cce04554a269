"""`python -m penstock.testing.campaigns`: run the campaigns, all or some, in full or with so many rounds.

Exits with 1 if anything was found, with 2 if it was asked for what there is not.
"""

from __future__ import annotations

import argparse
import secrets
import sys
from pathlib import Path

from penstock.testing.campaigns.runner import (
    MODULES,
    find,
    run_all,
    say,
    summary,
    update_record,
    write_json,
    write_page,
)

SEEDS = 1_000_000


def main() -> int:
    """Run what the command line asks for."""
    arguments = _parser().parse_args()
    if arguments.list:
        for name in MODULES:
            campaign = find(name)
            say(f"{name:>4}  {campaign.title} ({campaign.full:,} rounds; a round: {campaign.unit})")
        return 0
    names = arguments.campaign or list(MODULES)
    seed = secrets.randbelow(SEEDS) if arguments.seed is None else arguments.seed
    say(f"campaigns {', '.join(names)}, seed {seed}")
    results = run_all(
        names,
        seed,
        lambda campaign: arguments.rounds or (campaign.small if arguments.small else campaign.full),
        sys.stderr,
    )
    say("\n" + summary(results))
    if arguments.json is not None:
        write_json(arguments.json, results)
        say(f"\nwritten to {arguments.json}")
    if arguments.record is not None and any(result.full for result in results):
        record = update_record(arguments.record, results)
        say(f"full runs noted in {arguments.record}")
        if arguments.page is not None:
            write_page(arguments.page, record)
            say(f"and their figures in {arguments.page}")
    return int(any(result.findings for result in results) or len(results) < len(names))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m penstock.testing.campaigns", description="Try to break the log, in every way that we know."
    )
    parser.add_argument("campaign", nargs="*", type=_known, help="which ones, such as c2; all if none is named")
    parser.add_argument("--rounds", type=_positive, help="how many rounds of each, instead of the full number")
    parser.add_argument("--small", action="store_true", help="as many rounds as the test suite runs")
    parser.add_argument("--seed", type=int, help="what decides everything; a new one if it is not given")
    parser.add_argument("--json", type=Path, help="a file for the results")
    parser.add_argument("--record", type=Path, help="a file that keeps the last full run of each campaign")
    parser.add_argument("--page", type=Path, help="a page whose figures are written from that record")
    parser.add_argument("--list", action="store_true", help="say what there is, and end")
    return parser


def _known(name: str) -> str:
    if name not in MODULES:
        raise argparse.ArgumentTypeError(f"there is no campaign {name!r}, only {', '.join(MODULES)}")
    return name


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


if __name__ == "__main__":
    sys.exit(main())
