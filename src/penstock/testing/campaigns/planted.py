"""C0: do the tests catch anything? Classic bugs are planted in the store, one at a time, and each must be caught.

A bug is in the code only while its hunt runs. A hunt is a campaign that is aimed at where the bug would show, or one
scene; it finds nothing in code that is right, and at least one thing in code that is wrong. What is reported here is a
bug that nobody noticed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.testing.campaigns import planted_checks as checks
from penstock.testing.campaigns import planted_log as log
from penstock.testing.campaigns import planted_state as state
from penstock.testing.campaigns.campaign import Campaign
from penstock.testing.campaigns.planted_hunts import REORDERED, crashes_during, lives_on_a_bad_disk, quietly
from penstock.testing.machine.faults import FAILING, SHORT

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from penstock.testing.campaigns.campaign import Report

C2: Final = "c2"
C5: Final = "c5"
RECOVERING: Final = "scenes of recovery"
DAMAGE: Final = "scenes of damage"
PROCESSES: Final = "two processes"
FORKS: Final = "forks"
CURSORS: Final = "cursors"
MOVING: Final = "a crash of the mover"


class Bug(NamedTuple):
    """A bug that is planted to see whether it is caught."""

    name: str
    what: str
    """What the code does wrong."""
    catcher: str
    """What catches it: a campaign, or a scene of its own."""
    plant: Callable[[], AbstractContextManager[None]]
    hunt: Callable[[], str | None]
    """Returns the first thing that is wrong, or None."""

    def caught(self) -> str | None:
        """Plant the bug, hunt for it, and return what gave it away."""
        with self.plant(), quietly():
            return self.hunt()


_SYNCS = (
    Bug(
        "ack-before-sync",
        "A write is acknowledged without a sync.",
        C2,
        log.ack_before_sync,
        crashes_during("publish", after=r"write .*/tails"),
    ),
    Bug(
        "retried-sync",
        "A sync that failed is tried again, and believed.",
        C5,
        log.retried_sync,
        lives_on_a_bad_disk(FAILING),
    ),
    Bug(
        "poisoned-pages-synced-again",
        "Pages whose sync failed are synced by the next process, and believed.",
        C5,
        log.poisoned_pages_synced_again,
        lives_on_a_bad_disk(FAILING),
    ),
    Bug(
        "unsynced-recovery",
        "Recovery believes what it reads, without a sync.",
        RECOVERING,
        log.unsynced_recovery,
        checks.lost_tails,
    ),
    Bug(
        "short-write-believed",
        "A write that was cut short is taken for whole.",
        C5,
        log.short_write_believed,
        lives_on_a_bad_disk(SHORT),
    ),
    Bug(
        "cursor-before-the-sync",
        "A cursor passes events that are not durable.",
        CURSORS,
        state.cursor_before_the_sync,
        checks.a_cursor_over_unsynced_events,
    ),
)
_NAMES = (
    Bug(
        "unsynced-segment-name",
        "The directory of a new segment is not synced.",
        C2,
        log.unsynced_segment_name,
        crashes_during("publish", after=r"sync .*\.seg"),
    ),
    Bug(
        "unsynced-rename",
        "`topic.json` and `first` are replaced without a sync of their directory.",
        C2,
        log.unsynced_rename,
        crashes_during("trim", after=r"remove .*\.seg", ways=REORDERED),
    ),
    Bug(
        "name-before-content",
        "A segment gets its name before its bytes are synced.",
        C2,
        log.name_before_content,
        crashes_during("publish", after=r"rename .*unnamed\.seg"),
    ),
    Bug(
        "resurrected-topic",
        "The mark of a deleted topic goes before its segments are durably gone.",
        C2,
        log.resurrected_topic,
        crashes_during("delete", after=r"remove .*deleted\.json", ways=REORDERED),
    ),
    Bug(
        "trim-before-the-start",
        "Segments are removed before the new start is durable.",
        C2,
        log.trim_before_the_start,
        crashes_during("trim", after=r"remove .*\.seg"),
    ),
    Bug(
        "old-segment-removed-first",
        "Healing removes the old segment before the tail tells of the new one.",
        RECOVERING,
        log.old_segment_removed_first,
        checks.crashes_while_healing,
    ),
)
_RECOVERY = (
    Bug(
        "tail-of-another-boot-believed",
        "A tail that was written before a reboot is believed.",
        C2,
        log.tail_of_another_boot_believed,
        crashes_during("publish", after=r"sync .*\.seg"),
    ),
    Bug(
        "epoch-not-raised",
        "Recovery goes on in the epoch of the writer before.",
        RECOVERING,
        log.epoch_not_raised,
        checks.a_torn_write,
    ),
    Bug(
        "torn-tail-not-cut",
        "The rest of a torn write stays behind the end of the log.",
        RECOVERING,
        log.torn_tail_not_cut,
        checks.a_torn_write,
    ),
    Bug(
        "cut-without-quarantine",
        "A torn write is cut off, and not kept for anybody to look at.",
        RECOVERING,
        log.cut_without_quarantine,
        checks.a_torn_write,
    ),
    Bug(
        "corruption-taken-for-torn",
        "Damage to acknowledged events is cut off like a torn write.",
        DAMAGE,
        log.corruption_taken_for_torn,
        checks.damage_before_a_witness,
    ),
    Bug(
        "payload-taken-for-a-block",
        "A later block is recognised by its magic alone.",
        RECOVERING,
        log.payload_taken_for_a_block,
        checks.a_payload_like_a_block,
    ),
    Bug(
        "offset-reuse",
        "Recovery does not ask the cursors how far the log went, and gives offsets out again.",
        RECOVERING,
        state.witness_ignored,
        checks.a_log_shorter_than_its_cursor,
    ),
)
_BYTES = (
    Bug(
        "sealed-length-not-checked",
        "A sealed segment may be shorter than its successor says.",
        DAMAGE,
        log.sealed_length_not_checked,
        checks.sealed_segments_cut,
    ),
    Bug(
        "crc-without-the-lengths",
        "The CRC of a block does not cover its lengths.",
        DAMAGE,
        log.crc_without_the_lengths,
        checks.damaged_headers,
    ),
    Bug(
        "index-believed",
        "A damaged index is believed.",
        DAMAGE,
        log.index_believed,
        checks.damaged_indexes,
    ),
    Bug(
        "checksum-not-checked",
        "Rows of the databases are believed without a look at their checksum.",
        DAMAGE,
        state.checksum_not_checked,
        checks.damaged_rows,
    ),
)
_SHARING = (
    Bug(
        "reads-past-the-durable-end",
        "Events are shown while their sync is under way.",
        PROCESSES,
        log.reads_past_the_durable_end,
        checks.a_reader_beside_a_writer,
    ),
    Bug(
        "producers-lost-at-the-roll",
        "A segment begins with an empty table of producers.",
        C5,
        log.producers_lost_at_the_roll,
        lives_on_a_bad_disk(FAILING),
    ),
    Bug(
        "producers-not-caught-up",
        "A writer does not learn which sequences others have stored.",
        PROCESSES,
        log.producers_not_caught_up,
        checks.two_writers,
    ),
    Bug(
        "deleted-topic-written",
        "A writer does not look whether the topic is still there.",
        PROCESSES,
        log.deleted_topic_written,
        checks.a_writer_after_the_deletion,
    ),
    Bug(
        "turn-kept-through-fork",
        "A child uses the gates that it inherited.",
        FORKS,
        log.turn_kept_through_fork,
        checks.a_child_forked_in_a_turn,
    ),
    Bug(
        "lock-outlives-its-owner",
        "A lock is inherited by a child, and lives on in it.",
        FORKS,
        log.lock_outlives_its_owner,
        checks.a_turn_outlived_by_a_child,
    ),
)
_STATE = (
    Bug(
        "cursor-beyond-the-end",
        "A cursor beyond the end of the log is taken.",
        CURSORS,
        state.cursor_beyond_the_end,
        checks.cursors_that_are_refused,
    ),
    Bug(
        "cursor-goes-back",
        "A cursor before the committed one is taken.",
        CURSORS,
        state.cursor_goes_back,
        checks.cursors_that_are_refused,
    ),
    Bug(
        "lease-epoch-reused",
        "Epochs of leases begin anew with every process.",
        C2,
        state.lease_epoch_reused,
        crashes_during("acquire"),
    ),
    Bug(
        "stale-fence-accepted",
        "A write for a lease does not look at its epoch.",
        PROCESSES,
        state.stale_fence_accepted,
        checks.a_stale_lease,
    ),
)
_ENTRANCES = (
    Bug(
        "outbox-row-deleted-first",
        "A staged row is deleted before its event is appended.",
        MOVING,
        state.outbox_row_deleted_first,
        checks.a_crash_while_moving,
    ),
    Bug(
        "scheduled-row-done-first",
        "A scheduled row is done before its event is appended.",
        C2,
        state.scheduled_row_done_first,
        crashes_during("run the scheduler", before=r"write .*\.seg"),
    ),
    Bug(
        "another-sequence-at-each-claim",
        "What is due gets another sequence whenever it is claimed.",
        C2,
        state.another_sequence_at_each_claim,
        crashes_during("run the scheduler", after="write .*/tails", before="commit control.db"),
    ),
)

BUGS: tuple[Bug, ...] = (
    *_SYNCS,
    *_NAMES,
    *_RECOVERY,
    *_BYTES,
    *_SHARING,
    *_STATE,
    *_ENTRANCES,
)


def run(report: Report, seed: int) -> None:
    """Plant one bug after the other, beginning where the seed says."""
    for number in range(report.rounds):
        bug = BUGS[(seed + number) % len(BUGS)]
        if bug.caught() is None:
            report.found(f"{bug.name}: {bug.what} Nothing noticed.", f"bug {bug.name}")
        else:
            report.count(f"caught by {bug.catcher}")
        report.finish_round()


def table() -> str:
    """Return all bugs as a table in Markdown."""
    rows = [f"| {bug.name} | {bug.what} | {bug.catcher} |" for bug in BUGS]
    return "\n".join(["| bug | what the code does wrong | caught by |", "| --- | --- | --- |", *rows])


CAMPAIGN = Campaign(
    name="c0",
    title="planted bugs: do the tests catch them?",
    unit="planted bug",
    small=len(BUGS),
    full=len(BUGS),
    run=run,
)
