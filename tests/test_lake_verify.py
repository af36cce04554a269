"""`penstock lake`: what is wrong with a lake is found and named, and nothing else is."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from tests.lakes import SMALL, World, rewrite
from tests.spark_topics import fill, plain

from penstock.cli.app import run
from penstock.lake.entries import LakeFile, Manifest, encode
from penstock.lake.lake import Lake
from penstock.lake.verify import Problem, verify
from penstock.offsets import Range
from penstock.rows import Partition
from penstock.spark.pipelines.archive import Archiver, here
from penstock.stores import open_store

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def world(tmp_path: Path) -> World:
    made = World(tmp_path / "lake")
    made.publish(200)
    made.archiver().everything()
    return made


def problems(world: World) -> list[Problem]:
    return verify(world.lake(), world.store.log).problems


def file_of(world: World, number: int = 1) -> LakeFile:
    entry = world.lake().manifest().entries(world.topic.partitions[0])[number]
    assert isinstance(entry, LakeFile)
    return entry


def replace_manifest(world: World, manifest: Manifest) -> None:
    lake = world.lake()
    assert lake._versions.put(lake.version + 1, encode(manifest))


def test_a_sound_lake_has_no_problem_and_everything_was_compared(world: World) -> None:
    report = verify(world.lake(), world.store.log)
    assert report.problems == []
    assert [partition.compared for partition in report.partitions] == [200, 200]
    world.store.log.trim(world.topic.partitions[0], 25)
    report = verify(world.lake(), world.store.log)
    assert report.problems == []
    assert [partition.compared for partition in report.partitions] == [175, 200]
    assert verify(world.lake(), None).problems == []


def test_an_event_that_differs_is_found_by_its_offset(world: World) -> None:
    file = file_of(world)
    rewrite(world, file, file.start + 2, b"forged")
    kinds = {(problem.kind, problem.start, problem.stop) for problem in problems(world)}
    assert kinds == {("damaged", file.start, file.stop), ("different", file.start + 2, file.start + 3)}
    assert all(problem.file == file.path for problem in problems(world))


def test_a_forged_manifest_does_not_hide_it(world: World) -> None:
    file = file_of(world)
    rewrite(world, file, file.start + 2, b"forged")
    from penstock.lake.files import FileReader, content_of

    with FileReader(file, world.directory / file.path) as reader:
        digest = content_of(reader.rows(number) for number in range(reader.row_groups))
    manifest = world.lake().manifest()
    replace_manifest(world, manifest.changed([file._replace(digest=digest)], [file]))
    assert [(problem.kind, problem.start) for problem in problems(world)] == [("different", file.start + 2)]


def test_in_a_part_that_the_log_still_has_it_is_found_as_well(world: World) -> None:
    file = file_of(world)
    rewrite(world, file, file.stop - 1, b"forged")
    partition = world.topic.partitions[0]
    with_log = world.store.log
    assert file.start + 2 < file.stop - 1
    with_log.trim(partition, file.start + 2)
    assert ("different", file.stop - 1) in {(problem.kind, problem.start) for problem in problems(world)}


def test_a_file_that_is_gone_is_named(world: World) -> None:
    file = file_of(world)
    (world.directory / file.path).unlink()
    [problem] = problems(world)
    assert (problem.kind, problem.file, problem.start, problem.stop) == ("missing", file.path, file.start, file.stop)


def test_offsets_that_are_there_twice_are_found(world: World) -> None:
    file = file_of(world)
    manifest = world.lake().manifest()
    path = world.directory / file.path
    double = file._replace(token="double")
    path.with_name(double.name).write_bytes(path.read_bytes())
    replace_manifest(world, manifest.changed([double]))
    [problem] = problems(world)
    assert (problem.kind, problem.start, problem.stop) == ("overlap", file.start, file.stop)


def test_a_hole_is_one_only_if_the_log_has_not_got_it_either(world: World) -> None:
    file = file_of(world)
    replace_manifest(world, world.lake().manifest().changed([], [file]))
    report = verify(world.lake(), world.store.log)
    assert report.problems == []
    assert [partition.waiting for partition in report.partitions] == [len(file.range), 0]
    world.store.log.trim(world.topic.partitions[0], file.start + 1, force=True)
    [problem] = problems(world)
    assert (problem.kind, problem.start, problem.stop) == ("hole", file.start, file.start + 1)
    assert [(problem.kind, problem.start) for problem in verify(world.lake(), None).problems] == [("hole", file.start)]


def test_a_log_that_was_deleted_is_no_problem(world: World) -> None:
    world.store.log.delete_topic(world.topic.log_id)
    report = verify(world.lake(), world.store.log)
    assert report.problems == []
    assert [partition.compared for partition in report.partitions] == [0, 0]


# --- the commands ---------------------------------------------------------------------------------


@pytest.fixture
def archived(root: Path, tmp_path: Path) -> tuple[str, str]:
    url, directory = f"file:{root}", str(tmp_path / "lake")
    fill(url, "orders", plain(50), partitions=2)
    store = open_store(url)
    lake = Lake(directory)
    Archiver(store, lake, ["orders"], here(store, lake, SMALL), aim=SMALL).everything()
    store.close()
    return url, directory


def document(capsys: pytest.CaptureFixture[str]) -> Any:
    return json.loads(capsys.readouterr().out)


def test_a_lake_is_shown_and_verified(archived: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    url, directory = archived
    assert run(["lake", "show", directory, "--json"]) == 0
    shown = document(capsys)["partitions"]
    assert [row["partition"] for row in shown] == [0, 1]
    assert sum(row["events"] for row in shown) == 50
    assert run(["lake", "show", directory]) == 0
    assert capsys.readouterr().out.splitlines()[1].startswith("orders/0")
    assert run(["--url", url, "lake", "verify", directory, "--json"]) == 0
    found = document(capsys)
    assert found["ok"] is True
    assert sum(partition["compared"] for partition in found["partitions"]) == 50
    assert run(["lake", "verify", directory, "--alone"]) == 0


def test_a_problem_is_printed_and_exits_with_3(archived: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    url, directory = archived
    file = Lake(directory).manifest().files[0]
    (Lake(directory).directory / file.path).unlink()
    assert run(["--url", url, "lake", "verify", directory, "orders"]) == 3
    printed = capsys.readouterr()
    last = file.stop - 1
    assert f"missing: orders/{file.partition} offsets {file.start} to {last}, {file.path}: " in printed.out
    assert "1 problem found" in printed.err


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["lake", "verify", "{lake}", "ordres"], "the lake has no topic 'ordres'; did you mean 'orders'?"),
        (["lake", "show", "{lake}x"], "there is no lake in"),
        (["lake", "show", "s3://bucket/lake"], "needs a directory of this machine"),
    ],
)
def test_what_is_not_there_is_a_usage_error(
    archived: tuple[str, str], argv: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([word.format(lake=archived[1]) for word in argv]) == 2
    assert said in capsys.readouterr().err


def test_the_ends_of_a_lake_are_those_without_a_hole(world: World) -> None:
    file = file_of(world)
    manifest = world.lake().manifest().changed([], [file])
    partition = Partition(world.topic.log_id, 0)
    assert manifest.end(partition) == file.start
    assert list(manifest.archived(partition).missing(Range(0, 200))) == [file.range]
