"""Archiving without Spark: lake and log are the same, whatever step a process dies at, and whoever else is at work."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.lakes import DAY_SECONDS, SMALL, Holed, Killed, World, killed_at, rewrite, rows, seen

from penstock.errors import DataLost, IntegrityError, StoreUnavailable, TrimRefused, UsageError
from penstock.lake import lake as lakes
from penstock.lake.entries import decode
from penstock.lake.lake import Lake
from penstock.lake.reading import ArchivedLog
from penstock.offsets import Range
from penstock.rows import Partition
from penstock.spark.pipelines.archive import Archived, Merge, here
from penstock.versions import Versions

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from penstock.lake.files import Written
    from penstock.spark.pipelines.archive import Job


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path / "lake")


def test_everything_is_archived_once_and_nothing_again(world: World) -> None:
    world.publish(100)
    done = world.archiver().everything()
    assert done.events == 200
    assert done.files > 2
    world.check()
    assert world.archiver().everything() == Archived(merged=0)
    world.publish(5)
    assert world.archiver().everything().events == 10
    world.check()


def test_a_file_has_one_day_and_one_partition(world: World) -> None:
    for _ in range(3):
        world.publish(20)
        world.clock.advance(DAY_SECONDS)
    world.archiver(aim=SMALL._replace(file_bytes=1 << 20)).everything()
    files = world.lake().manifest().files
    assert [(file.partition, file.date, len(file.range)) for file in files] == [
        (partition, day, 20) for partition in (0, 1) for day in ("2026-01-01", "2026-01-02", "2026-01-03")
    ]
    world.check()


def test_a_round_without_need_waits_until_a_file_is_worth_it(world: World) -> None:
    world.publish(5)
    archiver = world.archiver()
    assert archiver.round().idle
    assert world.floors() == [0, 0]
    world.clock.advance(61)
    assert archiver.round().events == 10
    world.publish(60)
    assert archiver.round().events == 120
    world.check()


# --- what retention may have ----------------------------------------------------------------------


def test_what_is_archived_may_be_trimmed_and_what_is_not_may_not(world: World) -> None:
    world.publish(50)
    archiver = world.archiver()
    archiver.everything()
    world.publish(30)
    assert world.floors() == [50, 50]
    partition = world.topic.partitions[0]
    with pytest.raises(TrimRefused):
        world.store.log.trim(partition, 51)
    world.trim()
    assert world.store.log.bounds(partition) == Range(50, 80)
    archiver.everything()
    world.check()


def test_events_are_protected_before_the_first_of_them_is_archived(world: World) -> None:
    world.publish(50)
    partition = world.topic.partitions[0]

    def look(jobs: Sequence[Job]) -> Iterator[Written]:
        with pytest.raises(TrimRefused):
            world.store.log.trim(partition, 10)
        return iter(here(world.store, world.lake(), SMALL)(jobs))

    assert world.archiver(execute=look).everything().events == 100


def test_the_cursor_is_never_ahead_of_the_manifest(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.publish(50)

    archiver = world.archiver()

    def refuse(*_: object) -> bool:
        assert world.floors() == [0, 0]
        raise OSError("no")

    monkeypatch.setattr(Versions, "put", refuse)
    with pytest.raises(OSError, match="no"):
        archiver.everything()
    assert world.floors() == [0, 0]


def test_a_lake_that_was_set_back_takes_the_cursor_back(world: World) -> None:
    world.publish(50)
    world.archiver().everything()
    for version in world.lake()._versions.numbers()[1:]:
        (world.directory / "_lake" / f"v{version:020d}").unlink()
    archiver = world.archiver(execute=lambda jobs: (_ for _ in ()))
    with suppress(ValueError):  # nothing was written for any job
        archiver.round()
    assert world.floors() == [0, 0]
    world.archiver().everything()
    world.check()


def test_two_lakes_do_not_share_a_subscription(world: World, tmp_path: Path) -> None:
    world.publish(10)
    world.archiver().everything()
    other = Lake(tmp_path / "other")
    with pytest.raises(UsageError, match=r"of another lake.*penstock subscriptions rm orders archive"):
        world.archiver(lake=other).everything()
    assert world.archiver(lake=other, subscription="second").everything().events == 20
    assert world.floors("second") == [10, 10]


def test_without_its_subscription_nothing_is_archived_again(world: World) -> None:
    world.publish(50)
    world.archiver().everything()
    world.store.cursors.delete_subscription(world.topic.log_id, "archive")
    assert world.archiver().everything().files == 0
    assert world.floors() == [50, 50]
    world.check()


# --- what is lost, what is new --------------------------------------------------------------------


def test_what_was_trimmed_too_early_ends_it_with_the_range_or_is_declared(world: World) -> None:
    world.publish(50)
    world.archiver().everything()
    world.publish(50)
    world.trim(force=True, before=70)
    with pytest.raises(DataLost, match="partition 0: offsets 50 to 69 were trimmed"):
        world.archiver().everything()
    assert world.archiver(fail_on_data_loss=False).everything().gaps == 40
    found = rows(ArchivedLog(world.store.log, world.lake()), world.topic.partitions[1])
    truth = world.truth[world.topic.partitions[1]]
    gap = {"gap": Range(50, 70), "reason": "trimmed before it was archived"}
    assert found == [*truth[:50], gap, *truth[70:]]
    assert world.floors() == [100, 100]


def test_what_was_trimmed_before_the_lake_began_is_not_missed(world: World) -> None:
    world.publish(50)
    for partition in world.topic.partitions:
        world.store.log.trim(partition, 20)
    assert world.archiver().everything().events == 60
    assert world.lake().manifest().beginning(world.topic.partitions[0]) == 20
    assert ArchivedLog(world.store.log, world.lake()).bounds(world.topic.partitions[0]) == Range(20, 50)


def test_a_gap_of_the_log_is_a_gap_of_the_lake(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.publish(60)
    monkeypatch.setattr(world.store, "log", _Both(Holed(world.store.log, Range(20, 33)), world.store.log))
    assert world.archiver().everything().gaps == 26
    monkeypatch.undo()
    world.trim()
    truth = world.truth[world.topic.partitions[0]]
    gap = {"gap": Range(20, 33), "reason": "lost by a test"}
    found = rows(ArchivedLog(world.store.log, world.lake()), world.topic.partitions[0])
    assert found == [*truth[:20], gap, *truth[33:]]


class _Both:
    """A holed log for reading; everything else is the log's own."""

    def __init__(self, holed: Holed, log: object) -> None:
        self._holed = holed
        self._log = log

    def __getattr__(self, name: str) -> object:
        return getattr(self._holed if name == "read" else self._log, name)


def test_topics_that_are_new_and_match_are_archived_too(world: World) -> None:
    world.publish(20)
    archiver = world.archiver("ord*")
    archiver.everything()
    other = world.create("orders-eu")
    world.create("payments")
    world.publish(10, other)
    assert archiver.everything().events == 20
    assert world.lake().manifest().topics().keys() == {"orders", "orders-eu"}
    world.check()


def test_a_topic_that_is_deleted_and_created_anew_is_another_log(world: World) -> None:
    world.publish(20)
    world.archiver().everything()
    first = world.topic
    world.store.log.delete_topic(first.log_id)
    world.topic = world.create("orders")
    world.publish(5)
    assert world.archiver().everything().events == 10
    manifest = world.lake().manifest()
    assert sorted(manifest.topics()["orders"]) == sorted([first.log_id, world.topic.log_id])
    assert manifest.end(first.partitions[0]) == 20
    assert manifest.end(world.topic.partitions[0]) == 5
    world.check()


def test_what_cannot_be_read_is_told_and_the_rest_is_archived(world: World) -> None:
    world.publish(50)
    lake = world.lake()
    execute = here(world.store, lake, SMALL)

    def damaged(jobs: Sequence[Job]) -> Iterator[Written]:
        for job, written in zip(jobs, execute(jobs), strict=True):
            is_broken = not isinstance(job, Merge) and job.partition == 1
            yield type(written)([], [], "a segment is damaged") if is_broken else written

    with pytest.raises(IntegrityError, match=r"a segment is damaged\. What was written beside it is archived"):
        world.archiver(lake=lake, execute=damaged).everything()
    sound, broken = world.floors()
    assert (sound > 0, broken) == (True, 0)
    world.archiver().everything()
    world.check()


# --- small files ----------------------------------------------------------------------------------


def test_small_neighbours_are_merged_and_a_glob_sees_each_event_once(world: World) -> None:
    for _ in range(6):
        world.publish(3)
        world.archiver(aim=SMALL._replace(merged_files_min=100)).everything()
    assert len(world.lake().manifest().files) == 12
    done = world.archiver().everything()
    assert (done.merged, done.events) == (12, 0)
    assert len(world.lake().manifest().files) == 2
    world.check()


def test_a_file_that_changed_is_never_merged(world: World) -> None:
    for _ in range(3):
        world.publish(3)
        world.archiver(aim=SMALL._replace(merged_files_min=100)).everything()
    one, other, *_ = world.lake().manifest().files
    (world.directory / other.path).write_bytes((world.directory / one.path).read_bytes())
    with pytest.raises(IntegrityError, match=r"offsets 3 to 5 are not all there|the events up to"):
        world.archiver().everything()


def test_a_file_with_other_content_is_never_merged(world: World) -> None:
    for _ in range(3):
        world.publish(3)
        world.archiver(aim=SMALL._replace(merged_files_min=100)).everything()
    rewrite(world, world.lake().manifest().files[1], 4, b"forged")
    with pytest.raises(IntegrityError, match="its content is not what was archived"):
        world.archiver().everything()


def test_files_go_when_no_kept_version_names_them_and_they_are_old(world: World) -> None:
    for _ in range(3):
        world.publish(3)
        world.archiver(aim=SMALL._replace(merged_files_min=100)).everything()
    stranger = world.directory / "_lake" / "files" / "nobody-1.parquet"
    stranger.write_bytes(b"x")
    unfinished = world.directory / "_lake" / "files" / "abc.writing"
    unfinished.write_bytes(b"x")
    assert world.archiver().everything().merged == 6
    old = world.lake(grace_seconds=-1e9)  # everything is old enough
    assert old.tidy().removed == 2, "a version that is kept names the merged ones"
    for _ in range(Versions(world.directory)._kept + 2):
        world.publish(1)
        world.archiver(aim=SMALL._replace(merged_files_min=100)).everything()
    assert world.lake().tidy().removed == 0, "they are not old"
    assert old.tidy().removed == 6
    assert list((world.directory / "_lake" / "files").iterdir()) == []
    world.check()


def test_what_a_glob_shall_not_see_is_hidden_and_what_it_shall_is_shown(world: World) -> None:
    world.publish(10)
    world.archiver().everything()
    file = world.lake().manifest().files[0]
    shown = world.directory / file.path
    stranger = shown.with_name(shown.name.replace(file.token, "f" * 16))
    stranger.write_bytes(shown.read_bytes())
    somebodys = shown.with_name("mine.parquet")
    somebodys.write_bytes(b"")
    shown.rename(world.directory / "_lake" / "files" / file.hidden_name)
    world.lake().tidy()
    assert not stranger.exists()
    somebodys.unlink()  # it was left alone
    world.check()


# --- deaths ---------------------------------------------------------------------------------------


def life(world: World) -> None:
    """Archive twice, so that there is something to merge the second time."""
    for _ in range(2):
        world.archiver(aim=SMALL._replace(merged_files_min=100)).everything()
        world.publish(4)
    world.archiver().everything()


def prepared(directory: Path) -> World:
    world = World(directory)
    world.publish(4)
    return world


def names_of(world: World) -> set[str]:
    """Return all files that a version names."""
    versions = Versions(world.directory / "_lake")
    return {file.name for number in versions.numbers() for file in decode(versions.read(number)).files}


def test_a_death_at_any_step_loses_and_doubles_nothing() -> None:
    with TemporaryDirectory() as made:
        with killed_at(10_000) as undisturbed:
            life(prepared(Path(made) / "whole"))
        assert {"link", "fsync", "rename", "unlink", "mkdir", "open"} == set(undisturbed)
        assert len(Lake(Path(made) / "whole").manifest().files) == 2, "files were merged"
        for step in range(len(undisturbed)):
            world = prepared(Path(made) / f"{step}")
            with pytest.raises(Killed), killed_at(step):
                life(world)
            glimpse = seen(world.directory) if world.directory.exists() else []
            assert len(glimpse) == len(set(glimpse)), "a glob has seen an event twice"
            named = names_of(world) if glimpse else set()
            assert {path.name for path in world.directory.glob("topic=*/*/*")} <= named, "a glob has seen too much"
            world.publish(3)
            world.archiver().everything()
            world.check()


ACTIONS = st.one_of(
    st.tuples(st.just("publish"), st.integers(1, 30)),
    st.tuples(st.just("archive"), st.just(0)),
    st.tuples(st.just("die"), st.integers(0, 120)),
    st.tuples(st.just("beside"), st.integers(1, 20)),
    st.tuples(st.just("trim"), st.just(0)),
    st.tuples(st.just("later"), st.sampled_from([1, 3_600, DAY_SECONDS])),
    st.tuples(st.just("tidy"), st.just(0)),
)


@settings(max_examples=40)
@given(st.lists(ACTIONS, min_size=3, max_size=14))
def test_whatever_happens_lake_and_log_together_have_everything_once(actions: list[tuple[str, int]]) -> None:
    with TemporaryDirectory() as made:
        world = World(Path(made) / "lake")
        for action, number in actions:
            match action:
                case "publish":
                    world.publish(number)
                case "archive":
                    world.archiver().everything()
                case "die":
                    with suppress(Killed), killed_at(number):
                        world.archiver().everything()
                case "beside":
                    beside(world, number)
                case "trim":
                    world.trim()
                case "later":
                    world.clock.advance(number)
                case "tidy":
                    if world.lake().exists():
                        world.lake(grace_seconds=-1e9).tidy()
        world.archiver().everything()
        world.check()


def beside(world: World, count: int) -> None:
    """Archive, while another archiver does the same with more, in files of another size."""
    lake = world.lake()

    def interrupted(jobs: Sequence[Job]) -> list[Written]:
        written = list(here(world.store, lake, SMALL)(jobs))
        world.publish(count)
        world.archiver(aim=SMALL._replace(file_bytes=1_500, file_bytes_min=500)).everything()
        return written

    archiver = world.archiver(lake=lake, execute=interrupted)
    with suppress(StopIteration):
        archiver.round({partition: world.store.log.bounds(partition).stop for partition in world.topic.partitions})


def test_of_two_archivers_at_once_one_has_written_for_nothing(world: World) -> None:
    world.publish(60)
    lake = world.lake()

    def second(jobs: Sequence[Job]) -> list[Written]:
        written = list(here(world.store, lake, SMALL)(jobs))
        world.archiver().everything()
        return written

    done = world.archiver(lake=lake, execute=second).everything()
    assert done.repeated > 0
    assert done.events == 0
    world.check()


def test_of_two_that_merge_the_same_files_one_is_refused(world: World) -> None:
    for _ in range(4):
        world.publish(3)
        world.archiver(aim=SMALL._replace(merged_files_min=100)).everything()
    lake = world.lake()

    def second(jobs: Sequence[Job]) -> list[Written]:
        written = list(here(world.store, lake, SMALL)(jobs))
        world.archiver().everything()
        return written

    done = world.archiver(lake=lake, execute=second).everything()
    assert (done.merged, done.repeated) == (0, 2)
    world.check()


def test_an_archiver_that_always_loses_gives_up_at_last(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.publish(10)
    archiver = world.archiver()
    monkeypatch.setattr(lakes, "ATTEMPTS_MAX", 5)
    monkeypatch.setattr(Versions, "put", lambda *_: False)
    with pytest.raises(StoreUnavailable, match="another archiver"):
        archiver.everything()


def test_a_partition_without_events_is_no_reason_to_do_anything(world: World) -> None:
    assert world.archiver().everything().idle
    assert world.lake().manifest().entries(Partition(world.topic.log_id, 0)) == []
