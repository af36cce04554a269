"""The judgement over a life: what is left of the store is compared with what was told.

It runs where nothing fails any more. The store is opened as by the next process, or as after a reboot; what nobody
knows to be stored is published again, something new as well, and everything is looked at once more.
"""

from __future__ import annotations

import shutil
import tempfile
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from penstock.rows import ParkedFilter, Partition, Shard
from penstock.stores.file.platform import Platform
from penstock.stores.file.verify import verify
from penstock.testing.campaigns.syscalls.life import (
    ATTEMPTS,
    NEXT_BOOT,
    SUBSCRIPTION,
    Life,
    open_at,
    payloads_of,
    send,
    stored_in,
)
from penstock.testing.checker import check
from penstock.testing.conformance.builders import a_cursor, an_event, commit
from penstock.testing.journal import Journal, Outcome

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from penstock.stores.file.store import FileStore
    from penstock.testing.campaigns.nursery import Child

T = TypeVar("T")

FIRST_NEW_SEQUENCE = 100


class Step(NamedTuple):
    """One attempt at one step of a life."""

    what: str
    facts: dict[str, Any]
    outcome: str
    answer: Any

    def __str__(self) -> str:
        facts = ", ".join(f"{name} {value}" for name, value in self.facts.items())
        return f"{self.what}({facts}): {self.outcome} {self.answer}"


def steps_of(told: Sequence[Any]) -> list[Step]:
    """Return what a life has told as steps; one that was under way at its end has an unknown outcome."""
    begun, ended = told[::2], [*told[1::2], ["unknown", "the process ended"]]
    return [Step(what, facts, *end) for (what, facts), end in zip(begun, ended, strict=False)]


def possible(initial: T, written: Iterable[tuple[T, str]]) -> set[T]:
    """Return what may be stored after these writes: each a value, and the outcome of writing it."""
    values = {initial}
    for value, outcome in written:
        if outcome == "ok":
            values = {value}
        elif outcome != "failed":
            values = values | {value}
    return values


def judge(child: Child, *, root: str, told: list[Any], rebooted: bool, once: bool) -> None:
    """Tell every promise that did not hold, as text."""
    steps = steps_of(told)
    for complaint in [*complaints(steps, once=once), *Judge(Path(root), steps, rebooted=rebooted).findings()]:
        child.tell(complaint)


def complaints(steps: Sequence[Step], *, once: bool) -> Iterable[str]:
    """Yield what callers should not have seen."""
    for step in steps:
        if step.outcome == "wrong":
            yield f"an error that no caller should see: {step}"
    failed_in_a_row = 0
    for step in steps:
        failed_in_a_row = 0 if step.outcome == "ok" else failed_in_a_row + 1
        if once and failed_in_a_row == ATTEMPTS:
            yield f"a single failure, and the step failed again when it was repeated: {step}"


def warm_up() -> None:
    """Live and judge once, so that everything that is imported or set up at its first use is."""
    told: list[Any] = []
    directory = tempfile.mkdtemp(prefix="penstock-", dir="/tmp")
    try:
        root = Path(directory) / "data"
        Life(root, told.append, lambda _: None).run()
        found = Judge(root, steps_of(told), rebooted=False).findings()
        assert not found, found
    finally:
        shutil.rmtree(directory)


class Judge:
    """Looks at one store."""

    def __init__(self, root: Path, steps: Sequence[Step], *, rebooted: bool) -> None:
        self._root = root
        self._steps = steps
        self._platform = Platform(boot_id=NEXT_BOOT) if rebooted else Platform()
        self._journal = Journal()
        self._findings: list[str] = []

    def findings(self) -> list[str]:
        """Open the store, look, go on, look again; returns what is wrong."""
        for step in self._steps:
            self._note(step)
        store = open_at(self._root, self._platform)
        logs = self._look_at_topics(store)
        self._look_at_logs(store, logs)
        for log in logs:
            self._look_at_state(store, log)
            self._go_on(store, log)
        self._look_at_logs(store, logs)
        store.close()
        report = verify(self._root, self._platform)
        self._findings += [f"damage: {damage}" for damage in [*report.damages, *report.state]]
        return list(dict.fromkeys(self._findings))

    def _of(self, what: str, log: str) -> list[Step]:
        return [step for step in self._steps if step.what == what and step.facts.get("log") == log]

    def _expect(self, what: str, found: object, expected: set[Any]) -> None:
        if found not in expected:
            self._findings.append(f"{what} is {found}, and should be {' or '.join(map(str, expected))}")

    def _note(self, step: Step) -> None:
        """Let the journal know what a step has told."""
        log = step.facts.get("log", "")
        outcome = {"ok": Outcome.OK, "failed": Outcome.FAILED}.get(step.outcome, Outcome.UNKNOWN)
        if step.what == "publish":
            payloads = payloads_of(log, step.facts["first"], step.facts["count"])
            offset = step.answer if outcome is Outcome.OK else None
            self._journal.published(log, 0, payloads, outcome, offset=offset)
        elif step.what == "commit":
            self._journal.committed(SUBSCRIPTION, log, 0, step.facts["position"], outcome)
        elif step.what == "read" and outcome is Outcome.OK:
            for start, payloads in step.answer:
                self._journal.stored(log, 0, start, [bytes.fromhex(payload) for payload in payloads])

    # --- looking --------------------------------------------------------------------------------

    def _look_at_topics(self, store: FileStore) -> list[str]:
        """Return the logs that are there, if they should be."""
        found = {topic.log_id for topic in store.log.topics()}
        for created in self._steps:
            if created.what == "create" and created.outcome == "ok":
                log = created.answer
                deletions = [(False, step.outcome) for step in self._of("delete", log)]
                self._expect(f"that log {log} exists", log in found, possible(True, deletions))  # noqa: FBT003
                if log not in found:
                    self._journal.deleted(log)
        slots = Counter(entry.slot for entry in store.log.topic_directory.entries())
        self._findings += [
            f"{count} topics share slot {slot} of the tails" for slot, count in slots.items() if count > 1
        ]
        return sorted(found)

    def _look_at_logs(self, store: FileStore, logs: Sequence[str]) -> None:
        self._journal.restarted()
        for log in logs:
            self._look_at_log(store, log)
        self._findings += [f"{found.invariant}, {found.where}: {found.what}" for found in check(self._journal)]

    def _look_at_log(self, store: FileStore, log: str) -> None:
        bounds = store.log.bounds(Partition(log, 0))
        trims = [step for step in self._of("trim", log) if step.outcome != "failed"]
        self._journal.trimmed(log, 0, min(bounds.start, max((step.facts["before"] for step in trims), default=0)))
        self._journal.bounds(log, 0, bounds.start, bounds.stop)
        for start, payloads in stored_in(store, log):
            self._journal.stored(log, 0, start, payloads)
        for cursor in store.cursors.load(log, SUBSCRIPTION):
            self._journal.cursor(SUBSCRIPTION, log, 0, cursor.next_offset, bounds.stop)

    def _look_at_state(self, store: FileStore, log: str) -> None:
        """Compare the small state with what it can be."""
        subscriptions = [subscription.name for subscription in store.cursors.subscriptions(log)]
        subscribed = [((SUBSCRIPTION,), step.outcome) for step in self._of("subscribe", log)]
        self._expect("the list of subscriptions", tuple(subscriptions), possible((), subscribed))
        positions = [cursor.next_offset for cursor in store.cursors.load(log, SUBSCRIPTION)]
        committed = [((step.facts["position"],), step.outcome) for step in self._of("commit", log)]
        self._expect("the cursor", tuple(positions), possible((), committed))
        rows = store.parked.page(ParkedFilter(log_id=log, subscription=SUBSCRIPTION))
        parked = [((step.facts["offset"],), step.outcome) for step in self._of("park", log)]
        self._expect("what is parked", tuple(row.offset for row in rows), possible((), parked))
        waiting = [row for row in store.schedule.page() if row.log_id == log]
        scheduled = [(1, step.outcome) for step in self._of("schedule", log)]
        scheduled += [(0, step.outcome) for step in self._of("claim", log)]
        self._expect("how many are scheduled", len(waiting), possible(0, scheduled))
        if any(event != an_event() for event in [*(row.event for row in rows), *(row.event for row in waiting)]):
            self._findings.append("an event that was parked or scheduled is not what it was")

    # --- going on -------------------------------------------------------------------------------

    def _go_on(self, store: FileStore, log: str) -> None:
        """Publish what nobody knows to be stored, and something new; then pass all of it."""
        published = self._of("publish", log)
        known = {step.facts["first"] for step in published if step.outcome == "ok"}
        unknown = {step.facts["first"]: step.facts["count"] for step in published if step.facts["first"] not in known}
        for first, count in [*unknown.items(), (FIRST_NEW_SEQUENCE, 2)]:
            offset = send(store, log, first, count)
            self._journal.published(log, 0, payloads_of(log, first, count), Outcome.OK, offset=offset)
        end = store.log.bounds(Partition(log, 0)).stop
        if any(subscription.name == SUBSCRIPTION for subscription in store.cursors.subscriptions(log)):
            refused = commit(store, a_cursor(Shard(log, SUBSCRIPTION, 0, 0), end))
            assert refused is None, refused
            self._journal.committed(SUBSCRIPTION, log, 0, end, Outcome.OK)
