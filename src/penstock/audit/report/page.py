"""The page: all sections of a report in their order, the verdict on top."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from penstock.audit.report import charts, sections
from penstock.audit.report.pieces import SIGNS, element, number, text, when
from penstock.audit.report.style import STYLE

if TYPE_CHECKING:
    from penstock.audit.results import Audit

SUBSCRIPTIONS: Final = 200
"""So many subscriptions have a section of their own, the worst first; the list has all of them."""

POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
"""What a browser may do with the page: show it."""

TERMS: Final = {
    "proven": "a settlement record says how the event ended, and no seek has taken that back.",
    "parked": "the event is kept aside and waits, for a retry or behind another one of its lane.",
    "pending": "the cursor has not passed the event.",
    "unproven": "the cursor has passed it and no record says how, but a record is missing that may have said so.",
    "lost": "the cursor has passed it, no record says how, and no record is missing that could have.",
    "duplicates": "settled more than once, without a seek or a replay between; counted above as well.",
    "external": "a subscription whose progress is kept elsewhere, such as by a Spark query.",
}


def page(audit: Audit) -> str:
    """Return the report as one HTML document."""
    title = f"Audit: {audit.verdict}"
    order = sorted(
        enumerate(audit.subscriptions), key=lambda each: (sections.GRAVITY[each[1].verdict], each[1].topic, each[0])
    )
    head = (
        '<meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{text(POLICY)}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="referrer" content="no-referrer">'
        f"<title>{text(title)}</title><style>{STYLE}</style>"
    )
    body = [
        charts.PATTERNS,
        element("h1", f"Audit of deliveries, {text(when(audit.at))} UTC, {text(audit.url)}"),
        _verdict(audit),
        sections.figures(audit),
        sections.worst(audit),
        sections.overview(audit),
        *(sections.subscription(index, each) for index, each in order[:SUBSCRIPTIONS]),
        _footer(audit),
    ]
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body>{"".join(body)}</body></html>\n'


def _verdict(audit: Audit) -> str:
    asked = f"Events that were appended since {when(audit.since)} UTC. " if audit.since else ""
    said = f"{asked}{number(audit.records)} settlement records, looked at in {audit.seconds:.1f} s."
    return element(
        "div",
        element("span", SIGNS[audit.verdict], class_="sign", aria_hidden="true"),
        element("div", element("strong", text(audit.sentence)), element("span", text(said), class_="soft")),
        class_=f"verdict {audit.verdict}",
        role="status",
    )


def _footer(audit: Audit) -> str:
    terms = "".join(element("dt", text(name)) + element("dd", text(words)) for name, words in TERMS.items())
    unreadable = (
        f" {number(audit.unreadable)} records could not be read, and count as missing." if audit.unreadable else ""
    )
    return element(
        "footer",
        element("h3", "What the words mean"),
        element("dl", terms),
        element(
            "p",
            "Times are upper bounds: the ledger counts them in steps of powers of two, from the append of an event to "
            f"its ack. Hours are those in which something was settled.{unreadable}",
        ),
    )
