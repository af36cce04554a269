"""C14 in small, and that it sees what it is there to see."""

from __future__ import annotations

from collections.abc import Callable

import google_crc32c
import pytest

from penstock.stores.file import block, scan
from penstock.testing.campaigns import mutations
from penstock.testing.campaigns.campaign import Report, TooManyFindings
from penstock.testing.campaigns.mutations import CAMPAIGN
from penstock.testing.campaigns.mutations.blocks import MUTATIONS, SEGMENT, originals


class FirstFinding(Report):
    """Ends the campaign at the first finding."""

    def found(self, what: str, replay: str) -> None:
        raise TooManyFindings(what)


class AlwaysRight(int):
    """A CRC that fits everything."""

    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False

    __hash__ = int.__hash__


def test_no_mutant_is_taken_for_a_block_or_does_harm() -> None:
    report = Report(CAMPAIGN.small)
    CAMPAIGN.run(report, 0)
    assert not report.findings, report.findings[0]
    assert report.done == CAMPAIGN.small
    assert sum(report.tried[name] for name in MUTATIONS) == CAMPAIGN.small * mutations.MUTANTS
    assert all(report.tried[name] for name in MUTATIONS)
    # Otherwise only the outermost checks would be tried.
    assert report.tried["mutants taken for blocks, as their CRCs fit"] > 0


def test_what_is_mutated_is_valid() -> None:
    assert {original.kind for original in originals()} == {"SEGMENT", "DATA", "MARKER", "GAP"}
    for original in originals():
        header = block.parse_header(original.data, SEGMENT, original.position)
        block.check_content(header, original.data[block.FRONT_BYTES :])


def test_a_seed_does_the_same_again() -> None:
    first, again = Report(10), Report(10)
    CAMPAIGN.run(first, 7)
    CAMPAIGN.run(again, 7)
    assert first.tried == again.tried


# --- what is broken on purpose must be found --------------------------------------------------


def ignore_crcs(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(google_crc32c, "extend", lambda _seed, _data: AlwaysRight(0))


def ignore_the_content(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(mutations, "check_content", lambda _header, _content: None)


def allow_any_length(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(block, "CONTENT_BYTES_MAX", 1 << 30)


def walk_on_the_spot(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(scan._Expected, "skip_to", lambda _self, _header: None)


def believe_the_number_of_runs(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(block, "RUN_BYTES", 0)


@pytest.mark.parametrize(
    "breakage", [ignore_crcs, ignore_the_content, allow_any_length, walk_on_the_spot, believe_the_number_of_runs]
)
def test_a_parser_that_takes_too_much_is_found(
    breakage: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mutations, "FILES", mutations.MUTANTS)  # all of them stand in segments
    breakage(monkeypatch)
    with pytest.raises(TooManyFindings):
        CAMPAIGN.run(FirstFinding(10), 1)
