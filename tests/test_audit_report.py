"""The report: what it says, to whomever looks at it, and that nothing in it can do anything."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import msgspec
import numpy as np
import pytest
from tests.audit_specimen import specimen

from penstock.audit.report.pieces import at_most, offsets, share, took
from penstock.audit.report.style import STYLE
from penstock.audit.results import Counts, Latency, total

VOID = {"meta", "rect", "line", "path", "circle", "polyline", "polygon"}


class Outline(HTMLParser):
    """Checks that elements are closed in order, and gathers links and ids."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.names: set[str] = set()
        self.texts: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.add(tag)
        found = dict(attrs)
        self.ids += [found["id"] or ""] if "id" in found else []
        self.links += [found["href"] or ""] if "href" in found else []
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def outline(page: str) -> Outline:
    found = Outline()
    found.feed(page)
    found.close()
    return found


def test_the_page_is_whole_and_its_links_lead_somewhere() -> None:
    found = outline(specimen().html())
    assert found.open == []
    assert len(found.ids) == len(set(found.ids))
    assert len(found.links) > 10
    for link in found.links:
        assert link.startswith("#")
        assert link[1:] in found.ids


def test_the_page_needs_nothing_and_does_nothing() -> None:
    page = specimen().html()
    found = outline(page)
    assert not found.names & {"script", "link", "img", "iframe", "object", "embed", "form", "base"}
    assert "://" not in page.replace("file:/srv", "")
    assert "@import" not in page
    assert re.findall(r"url\(([^)]*)\)", page) == ["#p-pending", "#p-unproven", "#p-lost"]
    assert not re.search(r"\son\w+=", page)
    assert "default-src 'none'" in page.replace("&#x27;", "'")


def test_the_verdict_comes_first_in_words() -> None:
    audit = specimen()
    page = audit.html()
    assert audit.sentence == "4 events are lost, in orders/billing."
    assert page.index(audit.sentence) < page.index("What to look at first") < page.index("What the words mean")
    assert "✗ lost" in page
    assert "? unproven" in page
    text = "".join(outline(page).texts)
    assert "penstock read orders --partition 0 --from 9000 --limit 1" in text
    assert "penstock dlq show orders billing 1207 --partition 0" in text
    assert "lost: 9,000 to 9,002, 20,111" in text
    assert "records 12 to 13 are missing" in text


def test_whatever_a_name_is_it_stays_a_name() -> None:
    evil = '"><script>alert(1)</script>'
    found = outline(specimen(topic=evil, names=(evil, "<b>", "a&b", "'c'")).html())
    assert "script" not in found.names
    assert "b" not in found.names
    assert found.open == []
    assert evil in "".join(found.texts)


def test_it_is_made_for_light_dark_phones_and_paper() -> None:
    for rule in ("prefers-color-scheme: dark", "max-width: 40rem", "@media print", "overflow-wrap: anywhere"):
        assert rule in STYLE
    light, dark = (
        set(re.findall(r"(--\w+):", part)) for part in STYLE.split("@media (prefers-color-scheme: dark)")[:2]
    )
    assert light == dark, "every colour has its counterpart"
    assert set(re.findall(r"var\((--\w+)\)", STYLE)) <= light


def test_an_audit_is_json_and_comes_back() -> None:
    audit = specimen()
    assert msgspec.json.decode(msgspec.json.encode(audit), type=type(audit)) == audit
    assert audit.counts.events == sum(each.counts.events for each in audit.subscriptions if each.verdict != "external")
    for each in audit.subscriptions:
        assert each.counts == total(partition.counts for partition in each.partitions)
        for partition in each.partitions:
            assert sum(map(sum, partition.timeline.values())) == (partition.counts.events if partition.timeline else 0)


# --- single values --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("histogram", "bounds"),
    [
        ([], (None, None, None, None)),
        ([1], (1, 1, 1, 1)),
        ([0, 0, 90, 0, 9, 1], (4, 16, 16, 32)),
        ([50, 50], (1, 2, 2, 2)),
    ],
)
def test_percentiles_are_the_upper_bounds_of_their_buckets(
    histogram: list[int], bounds: tuple[int | None, ...]
) -> None:
    found = Latency.of(np.array(histogram, np.int64))
    assert (found.p50_us, found.p95_us, found.p99_us, found.max_us) == bounds
    assert found.events == sum(histogram)


def test_values_are_written_for_people() -> None:
    assert [share(part, 10_000) for part in (0, 1, 5_000, 9_999, 10_000)] == [
        "0 %",
        "< 0.1 %",
        "50.0 %",
        "> 99.9 %",
        "100 %",
    ]
    assert [took(each) for each in (None, 8, 4_096, 1 << 23, 1 << 38)] == ["-", "8 µs", "4.1 ms", "8.39 s", "3.18 d"]
    assert at_most(4_096) == "≤ 4.1 ms"
    assert (offsets(5, 6), offsets(5, 9)) == ("5", "5 to 8")
    assert Counts(proven=2, lost=1).events == 3
