"""C0: do the tests catch anything? Classic bugs are planted in store and delivery, one at a time; each must be caught.

A bug is in the code only while its hunt runs. A hunt is a campaign that is aimed at where the bug would show, or one
scene; it finds nothing in code that is right, and at least one thing in code that is wrong. What is reported here is a
bug that nobody noticed.
"""

from __future__ import annotations

import inspect
import sys
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from penstock.testing.campaigns.campaign import Campaign
from penstock.testing.campaigns.planted import claims, delivery, engines, forks, log, scenes, shards, state, takeovers
from penstock.testing.campaigns.planted.hunts import (
    REORDERED,
    crashes_during,
    lives_of_delivery,
    lives_on_a_bad_disk,
)
from penstock.testing.machine.faults import FAILING, SHORT
from penstock.testing.simulator.plan import CALM, Plan

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from penstock.testing.campaigns.campaign import Report

C1: Final = "c1"
C1S: Final = "c1s"
C2: Final = "c2"
C5: Final = "c5"
RECOVERY: Final = "scenes of recovery"
DAMAGE: Final = "scenes of damage"
PROCESSES: Final = "scenes with two processes"
CURSORS: Final = "scenes with cursors"
FORKS: Final = "forks"
ENGINE: Final = "scenes with the engine"
TAKEOVER: Final = "scenes with a takeover"

# Lives of delivery, aimed at where a bug would show
PEACE: Final = ("nothing",)
KEYS: Final = (b"a", b"b")
FLAKY: Final = ("good", "good", "flaky")
DEADLY: Final = ("good", "good", "good", "bad", "flaky")
KILLERS: Final[dict[str, Any]] = {
    "kinds": ("good", "good", "flaky", "killer"), "publishes": 2, "seconds": 2.0, "disturbances": PEACE,
}  # fmt: skip
LATER: Final[dict[str, Any]] = {"kinds": FLAKY, "keys": KEYS, "delays": (2.0,), "disturbances": PEACE}
"""Whatever fails is parked."""


MANY_KEYS: Final = tuple(b"%d" % key for key in range(12))
SHARED: Final[dict[str, Any]] = {"mode": "key_shared", "consumers": 2}
CLAIMED: Final[dict[str, Any]] = {"mode": "shared", "consumers": None}
LOST_ANSWERS: Final = Plan(fails_after=0.1, slow=0.2, slow_seconds=1.5)
MOVES: Final[dict[str, Any]] = {
    **SHARED, "processes": 3, "partitions": 1, "kinds": ("good", "slow"), "keys": MANY_KEYS,
    "tired": 0.3, "publishes": 12, "batches": False, "disturbances": PEACE,
}  # fmt: skip
"""Slots go from one process to another all the time, and their handlers are slow."""


class Bug(NamedTuple):
    """A bug that is planted to see whether it is caught."""

    name: str
    what: str
    """What the code does then."""
    catcher: str
    """A campaign, or scenes of its own."""
    plant: Callable[[], AbstractContextManager[None]]
    hunt: Callable[[], str | None]
    """Returns the first thing that is wrong, or None."""

    def caught(self) -> str | None:
        """Plant the bug, hunt for it, and return what gave it away."""
        with self.plant():
            return self.hunt()


def _bug(plant: Callable[[], AbstractContextManager[None]], catcher: str, hunt: Callable[[], str | None]) -> Bug:
    """Return a bug that is called and described as the function that plants it."""
    return Bug(plant.__name__.replace("_", "-"), inspect.getdoc(plant) or "", catcher, plant, hunt)


BUGS: Final = (
    # What is synced
    _bug(log.ack_before_sync, C2, crashes_during("publish", after="write .*/tails")),
    _bug(log.retried_sync, C5, lives_on_a_bad_disk(FAILING)),
    _bug(log.poisoned_pages_synced_again, C5, lives_on_a_bad_disk(FAILING)),
    _bug(log.short_write_believed, C5, lives_on_a_bad_disk(SHORT)),
    _bug(log.unsynced_recovery, RECOVERY, scenes.lost_tails),
    _bug(state.cursor_before_the_sync, CURSORS, scenes.a_cursor_over_unsynced_events),
    # In which order names change
    _bug(log.unsynced_segment_name, C2, crashes_during("publish", after=r"sync .*\.seg")),
    _bug(log.unsynced_rename, C2, crashes_during("trim", after=r"remove .*\.seg", ways=REORDERED)),
    _bug(log.name_before_content, C2, crashes_during("publish", after=r"rename .*unnamed\.seg")),
    _bug(log.resurrected_topic, C2, crashes_during("delete", after=r"remove .*deleted\.json", ways=REORDERED)),
    _bug(log.topic_found_too_early, C2, crashes_during("create topic", after=r"rename .*topic\.json")),
    _bug(log.directory_of_a_killed_process, C2, crashes_during("publish", after="make directory")),
    _bug(log.trim_before_the_start, C2, crashes_during("trim", after=r"remove .*\.seg")),
    _bug(log.old_segment_removed_first, RECOVERY, scenes.crashes_while_healing),
    # What is believed after a crash
    _bug(log.tail_of_another_boot_believed, C2, crashes_during("publish", after=r"sync .*\.seg")),
    _bug(log.epoch_not_raised, RECOVERY, scenes.a_torn_write),
    _bug(log.torn_tail_not_cut, RECOVERY, scenes.a_torn_write),
    _bug(log.cut_without_quarantine, RECOVERY, scenes.a_torn_write),
    _bug(log.payload_taken_for_a_block, RECOVERY, scenes.a_payload_like_a_block),
    _bug(state.offset_reuse, RECOVERY, scenes.a_log_shorter_than_its_cursor),
    # What is believed of damaged bytes
    _bug(log.corruption_taken_for_torn, DAMAGE, scenes.damage_before_a_witness),
    _bug(log.sealed_length_not_checked, DAMAGE, scenes.sealed_segments_cut),
    _bug(log.crc_without_the_lengths, DAMAGE, scenes.damaged_headers),
    _bug(log.index_believed, DAMAGE, scenes.damaged_indexes),
    _bug(state.checksum_not_checked, DAMAGE, scenes.damaged_rows),
    # What readers and writers know of each other
    _bug(log.reads_past_the_durable_end, PROCESSES, scenes.a_reader_beside_a_writer),
    _bug(log.producers_lost_at_the_roll, C5, lives_on_a_bad_disk(FAILING)),
    _bug(log.producers_not_caught_up, PROCESSES, scenes.two_writers),
    _bug(log.deleted_topic_written, PROCESSES, scenes.a_writer_after_the_deletion),
    _bug(log.turn_kept_through_fork, FORKS, forks.a_child_forked_in_a_turn),
    _bug(log.lock_outlives_its_owner, FORKS, forks.a_turn_outlived_by_a_child),
    _bug(log.turn_not_given_back, FORKS, forks.a_turn_whose_work_failed),
    # The small state, and what enters by itself
    _bug(state.cursor_beyond_the_end, CURSORS, scenes.cursors_that_are_refused),
    _bug(state.cursor_goes_back, CURSORS, scenes.cursors_that_are_refused),
    _bug(state.lease_epoch_reused, C2, crashes_during("acquire")),
    _bug(state.stale_fence_accepted, PROCESSES, scenes.a_stale_lease),
    _bug(state.outbox_row_deleted_first, C2, crashes_during("run the mover", before=r"write .*\.seg")),
    _bug(state.scheduled_row_done_first, C2, crashes_during("run the scheduler", before=r"write .*\.seg")),
    _bug(
        state.another_sequence_at_each_claim,
        C2,
        crashes_during("run the scheduler", after="write .*/tails", before="commit control.db"),
    ),
    # How delivery reads
    _bug(delivery.resumes_one_too_far, C1, lives_of_delivery(0)),
    _bug(delivery.notifications_alone, C1, lives_of_delivery(0, CALM, deaf=True, disturbances=PEACE)),
    _bug(delivery.failed_read_ends_reading, C1, lives_of_delivery(2, Plan(fails_before=0.05), disturbances=PEACE)),
    _bug(delivery.empty_read_believed, ENGINE, engines.a_read_that_finds_nothing),
    _bug(delivery.gap_declared_at_once, ENGINE, engines.a_read_that_leaves_something_out),
    # In which order it hands over
    _bug(
        delivery.delayed_event_overtaken,
        C1,
        lives_of_delivery(0, CALM, batches=True, kinds=FLAKY, keys=KEYS, delays=(0.5,), disturbances=PEACE),
    ),
    _bug(delivery.parked_event_overtaken, C1, lives_of_delivery(0, CALM, batches=False, **LATER)),
    _bug(
        delivery.requeued_at_the_back,
        C1,
        lives_of_delivery(0, CALM, batches=False, kinds=FLAKY, keys=KEYS, delays=(0.1,), disturbances=PEACE),
    ),
    _bug(delivery.poisoned_lane_dropped, C1, lives_of_delivery(1, CALM, kinds=DEADLY, keys=KEYS, disturbances=PEACE)),
    # What is settled by what
    _bug(
        delivery.leaving_is_acking,
        C1,
        lives_of_delivery(0, CALM, batches=False, kinds=("good", "slow"), tired=0.2, disturbances=PEACE),
    ),
    _bug(
        delivery.late_ack_ignored,
        C1,
        lives_of_delivery(
            0, CALM, batches=False, kinds=("good", "slow"), policy={"timeout_seconds": 1.0}, disturbances=PEACE
        ),
    ),
    _bug(delivery.ack_of_a_stranger, ENGINE, engines.an_ack_of_what_nobody_has),
    _bug(
        delivery.rate_limited_thrown_away,
        C1,
        lives_of_delivery(0, CALM, policy={"rate_per_second": 5.0}, disturbances=PEACE),
    ),
    _bug(
        delivery.timeouts_without_end,
        C1,
        lives_of_delivery(
            0, CALM, batches=False, kinds=("good", "stuck"), policy={"timeout_seconds": 1.0}, disturbances=PEACE
        ),
    ),
    _bug(delivery.parked_rows_forgotten, C1, lives_of_delivery(0, CALM, **LATER)),
    _bug(delivery.attempts_lost_aside, C1, lives_of_delivery(0, CALM, **LATER)),
    _bug(
        delivery.replay_not_seen,
        C1,
        lives_of_delivery(0, CALM, acts=("replay",), kinds=DEADLY, tired=0.0, seconds=6.0, disturbances=PEACE),
    ),
    _bug(delivery.dead_letter_not_kept, C1, lives_of_delivery(0, CALM, kinds=DEADLY, disturbances=PEACE)),
    # What delivery writes
    _bug(delivery.attempts_in_memory, C1, lives_of_delivery(0, CALM, **KILLERS)),
    _bug(
        delivery.settled_ahead_forgotten,
        C1,
        lives_of_delivery(0, CALM, batches=False, kinds=("good", "good", "slow"), disturbances=("kill",)),
    ),
    _bug(
        delivery.cursor_at_the_highest_ack,
        C1,
        lives_of_delivery(0, CALM, batches=False, kinds=("good", "good", "slow"), disturbances=("kill",)),
    ),
    _bug(delivery.refused_step_forgotten, C1, lives_of_delivery(0, Plan(refused=0.1), disturbances=PEACE)),
    _bug(delivery.refused_step_told_as_written, C1, lives_of_delivery(0, Plan(refused=0.1), disturbances=PEACE)),
    _bug(delivery.unknown_step_repeated, C1, lives_of_delivery(0, Plan(fails_after=0.1), disturbances=PEACE)),
    _bug(delivery.parked_row_not_written, C1, lives_of_delivery(0, CALM, **LATER)),
    _bug(delivery.record_left_out, C1, lives_of_delivery(0, CALM, disturbances=PEACE)),
    _bug(delivery.commit_without_a_fence, TAKEOVER, takeovers.late_commit("failover")),
    # Who has a shard, and who may have killed whom
    _bug(
        delivery.lapsed_lease_not_noticed,
        C1,
        lives_of_delivery(2, Plan(frozen=0.05, frozen_seconds=6.0), mode="failover", disturbances=("freeze",)),
    ),
    _bug(delivery.nobody_takes_over, C1, lives_of_delivery(4, CALM, mode="failover", disturbances=("freeze",))),
    _bug(
        delivery.lease_kept_by_a_seat_that_was_lost,
        C1,
        lives_of_delivery(
            9,
            Plan(slow=0.3, slow_seconds=1.0, refused=0.1),
            acts=("seek",),
            tired=0.2,
            batches=False,
            partitions=1,
            disturbances=PEACE,
        ),
    ),
    _bug(delivery.policy_read_once, C1, lives_of_delivery(1, CALM, acts=("pause",), tired=0.0, disturbances=PEACE)),
    _bug(delivery.nobody_is_suspected, C1, lives_of_delivery(0, CALM, **KILLERS)),
    _bug(delivery.suspect_tried_before_it_is_written, C1, lives_of_delivery(0, CALM, **KILLERS)),
    # The ledger
    _bug(delivery.record_forgotten_first, C1, lives_of_delivery(6, Plan(fails_before=0.1))),
    _bug(
        delivery.record_appended_twice,
        C1,
        lives_of_delivery(1, Plan(fails_before=0.1, fails_after=0.1), disturbances=PEACE),
    ),
    # How a subscription is shared
    _bug(shards.removed_consumer_acked, C1S, lives_of_delivery(79, **SHARED)),
    _bug(shards.slot_goes_while_in_hand, C1S, lives_of_delivery(0, CALM, **MOVES)),
    _bug(
        shards.slot_goes_before_its_commit,
        C1S,
        lives_of_delivery(4, CALM, policy={"checkpoint_events": 10, "checkpoint_seconds": 0.4}, **MOVES),
    ),
    _bug(shards.slots_of_others_taken, C1S, lives_of_delivery(1, **SHARED)),
    _bug(shards.lost_answer_keeps_its_slots, C1S, lives_of_delivery(14, LOST_ANSWERS, **SHARED, tired=0.1)),
    _bug(shards.slots_of_a_dead_process_taken_for_clean, C1S, lives_of_delivery(0, CALM, **SHARED, **KILLERS)),
    _bug(shards.rows_of_all_slots_loaded, C1S, lives_of_delivery(26, **SHARED)),
    _bug(shards.passed_over_is_settled, C1S, lives_of_delivery(0, **SHARED)),
    _bug(shards.progress_of_others_overwritten, C1S, lives_of_delivery(0, **SHARED)),
    _bug(shards.attempts_of_others_overwritten, C1S, lives_of_delivery(0, CALM, **SHARED, **KILLERS)),
    _bug(shards.settled_without_a_lease, TAKEOVER, takeovers.late_commit("key_shared")),
    # How events are claimed
    _bug(claims.claimed_twice, C1S, lives_of_delivery(0, **CLAIMED)),
    _bug(claims.given_back_to_nobody, C1S, lives_of_delivery(0, **CLAIMED)),
    _bug(claims.settled_is_still_claimed, C1S, lives_of_delivery(1, **CLAIMED)),
    _bug(claims.berth_of_a_dead_process_taken_for_clean, C1S, lives_of_delivery(0, CALM, **CLAIMED, **KILLERS)),
    _bug(claims.berths_are_left_behind, C1S, lives_of_delivery(1, **CLAIMED)),
    _bug(claims.rows_of_all_berths_loaded, C1S, lives_of_delivery(0, **CLAIMED)),
    _bug(claims.lost_answer_keeps_its_berth, C1S, lives_of_delivery(27, LOST_ANSWERS, **CLAIMED, tired=0.1)),
    _bug(claims.given_back_while_in_hand, C1S, lives_of_delivery(0, **CLAIMED)),
    _bug(claims.read_before_it_was_given_back, ENGINE, engines.a_read_of_what_others_have_by_now),
    _bug(claims.attempts_are_given_back_as_none, C1S, lives_of_delivery(0, **CLAIMED)),
)


def run(report: Report, seed: int) -> None:
    """Plant one bug after the other, beginning where the seed says."""
    for number in range(report.rounds):
        bug = BUGS[(seed + number) % len(BUGS)]
        if bug.caught() is None:
            report.found(f"nobody noticed: {bug.what}", bug.name)
        else:
            report.count(f"caught by {bug.catcher}")
        report.finish_round()


def table() -> str:
    """Return all bugs as a table in Markdown."""
    rows = [f"| {bug.name} | {bug.what} | {bug.catcher} |" for bug in BUGS]
    return "\n".join(["| bug | what the code does then | caught by |", "| --- | --- | --- |", *rows])


def _obstacle() -> str | None:
    return None if sys.platform == "linux" else "Linux is needed for locks that a child inherits"


CAMPAIGN = Campaign(
    name="c0",
    title="planted bugs: do the tests catch them?",
    unit="planted bug",
    small=len(BUGS),
    full=len(BUGS),
    run=run,
    obstacle=_obstacle,
)
