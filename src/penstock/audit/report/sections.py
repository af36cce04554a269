"""Sections: the parts of the report, from what is found to markup."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from penstock.audit.report import charts
from penstock.audit.report.pieces import (
    at_most,
    badge,
    command,
    counted,
    element,
    number,
    offsets,
    share,
    table,
    text,
    took,
    when,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from penstock.audit.results import Audit, Hour, PartitionAudit, SubscriptionAudit

WORST: Final = 25
"""So many things to look at first are named."""
PARTITIONS: Final = 32
"""So many partitions of a subscription are drawn, the worst first."""
HOURS: Final = 24
"""The last so many hours are in the table; all are in the charts."""

GRAVITY: Final = {"lost": 0, "unproven": 1, "proven": 2, "external": 3}
BARS: Final = ("acked", "dead", "expired", "skipped", "parked", "pending", "unproven", "lost")
"""What a bar is made of. `discarded`, gaps and what only a later version knows are drawn with `skipped`."""
_WITH_SKIPPED: Final = ("skipped", "discarded", "gap", "other")
_WORDS: Final = {"skipped": "skipped, discarded or a gap"}


def anchor(index: int, partition: PartitionAudit | None = None) -> str:
    """Return the name of a place in the page."""
    return f"s{index}" if partition is None else f"s{index}-p{partition.partition}"


# --- all of it ------------------------------------------------------------------------------------


def figures(audit: Audit) -> str:
    """Return the numbers that matter most."""
    counts = audit.counts
    shown = [
        ("events", counts.events, ""),
        ("lost", counts.lost, "lost" if counts.lost else ""),
        ("unproven", counts.unproven, ""),
        ("proven", counts.proven, ""),
        ("pending", counts.pending, ""),
        ("parked", counts.parked, ""),
        ("dead", counts.dead, ""),
        ("duplicates", counts.duplicates, ""),
    ]
    boxes = (
        element("div", element("dt", text(name)), element("dd", number(value)), class_=kind)
        for name, value, kind in shown
    )
    return element("dl", *boxes, class_="figures")


def overview(audit: Audit) -> str:
    """Return a row for each subscription, each with a link to its own section."""
    rows = [
        [
            element("a", text(f"{each.topic} / {each.subscription}"), href=f"#{anchor(index)}"),
            badge(each.verdict),
            number(each.counts.events),
            share(each.counts.proven, each.counts.events),
            number(each.counts.pending + each.counts.parked),
            number(each.counts.unproven),
            number(each.counts.lost),
            at_most(each.latency.p99_us),
        ]
        for index, each in enumerate(audit.subscriptions)
    ]
    headers = ["subscription", "verdict", "events", "proven", "to come", "unproven", "lost", "p99"]
    return element(
        "section", element("h2", "Subscriptions"), table(headers, rows, numbers=headers[2:]), id="subscriptions"
    )


def worst(audit: Audit) -> str:
    """Return what to look at first, with the command that shows it."""
    found = list(_worst(audit))
    if not found:
        return ""
    shown = [row for _, row in sorted(found, key=lambda each: each[0])[:WORST]]
    more = f" These are the first {WORST} of {len(found)}." if len(found) > WORST else ""
    return element(
        "section",
        element("h2", "What to look at first"),
        element("p", f"Commands are for the store {element('code', text(audit.url))}.{more}", class_="soft"),
        table(["what", "where", "to see it"], shown),
        id="worst",
    )


def _worst(audit: Audit) -> Iterator[tuple[tuple[int, int], list[str]]]:
    for index, each in enumerate(audit.subscriptions):
        for partition in each.partitions:
            for start, stop in partition.lost:
                what = element("strong", f"{number(stop - start)} lost")
                yield (
                    (0, start - stop),
                    [what, _where(index, each, partition, start, stop), read(each, partition, start)],
                )
        for slow in each.slowest[:1]:
            [partition] = [known for known in each.partitions if known.partition == slow.partition]
            place = _where(index, each, partition, slow.start, slow.stop)
            what = f"slow: up to {took(slow.within_us)}, settled {text(when(slow.at))}"
            yield (2, -slow.within_us), [what, place, read(each, partition, slow.start)]
        for letter in each.dead[:3]:
            [partition] = [known for known in each.partitions if known.partition == letter.partition]
            place = _where(index, each, partition, letter.offset, letter.offset + 1)
            what = f"dead after {counted(letter.attempts, 'attempt')}: {text(letter.error_type or 'no error')}"
            words = ("dlq", "show", each.topic, each.subscription, letter.offset, "--partition", letter.partition)
            yield (1, letter.offset), [what, place, command("penstock", *words)]


def _where(index: int, each: SubscriptionAudit, partition: PartitionAudit, start: int, stop: int) -> str:
    place = f"{each.topic}/{partition.partition}, {each.subscription}: {offsets(start, stop)}"
    return element("a", text(place), href=f"#{anchor(index, partition)}")


def read(each: SubscriptionAudit, partition: PartitionAudit, start: int) -> str:
    """Return the command that shows an event."""
    where = ("--partition", partition.partition, "--from", start, "--limit", 1)
    return command("penstock", "read", each.topic, *where)


# --- one subscription -----------------------------------------------------------------------------


def subscription(index: int, each: SubscriptionAudit) -> str:
    """Return the section of a subscription."""
    counts = each.counts
    title = element("h2", text(f"{each.topic} / {each.subscription}"))
    about = f"mode {each.mode}, {counted(len(each.partitions), 'partition')}"
    header = element("header", title, badge(each.verdict), element("span", text(about), class_="soft"))
    if each.verdict == "external":
        said = (
            f"Its progress is kept elsewhere, in the checkpoint of a query, so there is no ledger to prove it by. "
            f"{number(counts.pending)} events are ahead of it."
        )
        return element("section", header, element("p", said, class_="soft"), id=anchor(index))
    parts = [
        (kind, sum(getattr(counts, name) for name in _WITH_SKIPPED) if kind == "skipped" else getattr(counts, kind))
        for kind in BARS
    ]
    return element(
        "section",
        header,
        element("h3", "What became of its events"),
        charts.bar(
            parts, f"{number(counts.events)} events: {', '.join(f'{number(n)} {kind}' for kind, n in parts if n)}"
        ),
        _legend(
            [(kind, f"{_WORDS.get(kind, kind)} {number(n)} ({share(n, counts.events)})") for kind, n in parts if n]
        ),
        _notes(each),
        element("h3", "Its offsets, from the first to the last"),
        *_partitions(index, each),
        _times(each),
        id=anchor(index),
    )


def _legend(entries: Sequence[tuple[str, str]], *, rule: bool = False) -> str:
    items = []
    for kind, words in entries:
        shape = (
            f'<line class="line {text(kind)}" x1="0" y1="5" x2="10" y2="5"/>'
            if rule
            else f'<rect class="{text(kind)}" width="10" height="10"/>'
        )
        items.append(
            element("li", f'<svg class="key" viewBox="0 0 10 10" aria-hidden="true">{shape}</svg>', text(words))
        )
    return element("ul", *items, class_="legend")


def _notes(each: SubscriptionAudit) -> str:
    notes = []
    if each.counts.duplicates:
        notes.append(
            f"{number(each.counts.duplicates)} were settled more than once without a seek or a replay between."
        )
    if each.counts.retried:
        notes.append(f"{number(each.counts.retried)} had failed before they were settled.")
    if each.rows_dead or each.rows_waiting:
        notes.append(f"Kept aside now: {number(each.rows_dead)} dead letters, {number(each.rows_waiting)} that wait.")
    return element("p", text(" ".join(notes)), class_="soft") if notes else ""


def _partitions(index: int, each: SubscriptionAudit) -> Iterator[str]:
    order = sorted(each.partitions, key=lambda known: (GRAVITY[known.verdict], known.partition))
    for partition in order[:PARTITIONS]:
        yield _partition(index, partition)
    if len(order) > PARTITIONS:
        yield element("p", f"{len(order) - PARTITIONS} more partitions are not drawn.", class_="soft")


def _partition(index: int, partition: PartitionAudit) -> str:
    amiss = [
        f"{kind} {', '.join(offsets(*pair) for pair in found[:8])}{' …' if len(found) > 8 else ''}"
        for kind, found in (("lost:", partition.lost), ("unproven:", partition.unproven))
        if found
    ]
    words = f"partition {partition.partition}: cursor at {number(partition.next_offset)}"
    drawn = charts.timeline(partition.timeline, f"{words}; {'; '.join(amiss) or 'no holes'}")
    notes = [*amiss, *partition.breaks[:5]]
    return element(
        "div",
        element("div", element("span", text(words)), badge(partition.verdict), class_="axis"),
        drawn or element("p", "No event yet.", class_="soft"),
        element(
            "div",
            element("span", number(partition.first)),
            element("span", number(max(partition.end - 1, partition.first))),
            class_="axis",
        ),
        element("ul", *(element("li", text(note)) for note in notes), class_="notes") if notes else "",
        class_="partition",
        id=anchor(index, partition),
    )


# --- time -----------------------------------------------------------------------------------------


def _times(each: SubscriptionAudit) -> str:
    latency = each.latency
    if not latency.events:
        return ""
    low = max(next(at for at, count in enumerate(latency.histogram) if count) - 1, 0)
    points, so_far = [], 0
    for count in latency.histogram[low:]:
        so_far += count
        points.append(so_far / latency.events)
    bounds = [(name, getattr(latency, f"{name}_us")) for name in ("p50", "p95", "p99", "max")]
    said = ", ".join(f"{name} {at_most(bound)}" for name, bound in bounds)
    distribution = element(
        "div",
        element("h3", "From append to ack"),
        charts.curve(points, f"share of events acked within a time: {said}"),
        element(
            "div",
            element("span", took(1 << low)),
            element("span", took(1 << (len(latency.histogram) - 1))),
            class_="axis",
        ),
        element("p", text(f"{said}. Lines: 50, 95 and 99 % of {number(latency.events)} events."), class_="soft"),
    )
    return element("div", distribution, _by_hour(each.hours), class_="two") + _hours_table(each.hours)


def _by_hour(hours: Sequence[Hour]) -> str:
    if len(hours) < 2:
        return ""
    bounds = [hour.latency.max_us for hour in hours if hour.latency.max_us] or [1]
    top = max(max(bounds).bit_length(), 2) - 1
    series = {
        name: [
            None if (bound := getattr(hour.latency, f"{name}_us")) is None else (bound.bit_length() - 1) / top
            for hour in hours
        ]
        for name in ("p50", "p99", "max")
    }
    most = max(sum(hour.settled.values()) for hour in hours) or 1
    settled = [
        [(kind, hour.settled.get(kind, 0) / most) for kind in ("acked", "dead", "expired", "skipped", "parked")]
        for hour in hours
    ]
    axis = element(
        "div",
        element("span", text(when(hours[0].begins)[5:16])),
        element("span", text(when(hours[-1].begins)[5:16])),
        class_="axis",
    )
    return element(
        "div",
        element("h3", f"By the hour: settled, up to {number(most)}"),
        charts.columns(settled, "how many were settled in each hour"),
        element("h3", f"By the hour: time to ack, up to {took(max(bounds))}, in powers of two"),
        charts.lines(series, "median, 99th percentile and maximum of each hour"),
        axis,
        _legend([(name, name) for name in series], rule=True),
    )


def _hours_table(hours: Sequence[Hour]) -> str:
    shown = hours[-HOURS:]
    headers = ["hour (UTC)", "acked", "dead", "expired", "other", "retried", "p50", "p95", "p99", "max"]
    rows = []
    for hour in reversed(shown):
        rest = sum(count for kind, count in hour.settled.items() if kind not in {"acked", "dead", "expired"})
        latency = hour.latency
        rows.append(
            [
                text(when(hour.begins)[:16]),
                *(number(hour.settled.get(kind, 0)) for kind in ("acked", "dead", "expired")),
                number(rest),
                number(hour.retried),
                *(at_most(bound) for bound in (latency.p50_us, latency.p95_us, latency.p99_us, latency.max_us)),
            ]
        )
    title = f"The last {len(shown)} of {len(hours)} hours, in numbers"
    return element("details", element("summary", title), table(headers, rows, numbers=headers[1:]))
