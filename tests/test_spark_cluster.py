"""On a Spark standalone cluster of real processes, what runs on one machine's threads runs as well."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.spark_drivers import Driven, drive
from tests.spark_topics import fill, plain, stored

if TYPE_CHECKING:
    from collections.abc import Iterator

    from examples.spark_cluster import Cluster

pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]  # several Javas start, on a machine that may be busy

SCRIPT = Path(__file__).parent.parent / "examples" / "spark_cluster.py"


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    from examples.spark_cluster import Cluster

    with Cluster(workers=2) as cluster:
        yield cluster


# --- topics -----------------------------------------------------------------------------------


def check_copies(url: str, rows: list[list[Any]]) -> None:
    """Show that Spark has read what the log says, and that every event is copied twice: by a stream and by a batch."""
    events = stored(url, "orders")
    assert rows == [[row["partition"], row["offset"], row["data"].decode()] for row in events]
    copies = stored(url, "copies")
    assert sorted(row["data"] for row in copies) == sorted([row["data"] for row in events] * 2)
    for key in {row["key"] for row in events}:
        published = [row["data"] for row in events if row["key"] == key]
        assert [row["data"] for row in copies if row["key"] == key] == published * 2


def check_executors(driven: Driven) -> None:
    """Show that tasks ran in two executors, with this interpreter and Penstock, and that nothing was complained of."""
    tasks = driven.answer["tasks"]
    assert sum(task["rows"] for task in tasks) == 1000
    assert len({task["executor"] for task in tasks}) == 2
    assert {task["python"] for task in tasks} == {sys.executable}
    assert all(Path(task["penstock"]).name == "__init__.py" for task in tasks)
    assert driven.stderr == ""


def fill_orders(url: str) -> None:
    fill(url, "orders", plain(1_000), partitions=2)
    fill(url, "copies", [], partitions=3)


def test_topics_are_read_and_written_on_a_cluster(cluster: Cluster, root: Path, tmp_path: Path) -> None:
    url = f"file:{root}"
    fill_orders(url)
    driven = drive("topics", environment={"SPARK_MASTER": cluster.url}, url=url, checkpoint=str(tmp_path / "stream"))
    check_copies(url, driven.answer["rows"])
    check_executors(driven)
    assert driven.answer["master"] == cluster.url


def test_two_executor_processes_give_the_same_result_as_threads(root: Path, tmp_path: Path) -> None:
    import pyspark

    url = f"file:{root}"
    fill_orders(url)
    driven = drive("topics", master="local-cluster[2,1,1024]", url=url, checkpoint=str(tmp_path / "stream"))
    check_copies(url, driven.answer["rows"])
    check_executors(driven)
    assert not (Path(pyspark.__file__).parent / "work").exists(), "executors write to a directory of their own"


@pytest.mark.root
@pytest.mark.skipif(sys.platform != "linux", reason="a machine tells itself apart by /proc")
def test_executors_on_another_machine_are_refused_with_what_to_use_instead(root: Path, tmp_path: Path) -> None:
    """The executors' Python sees another boot id, which is all that tells two machines apart that share a path."""
    url = f"file:{root}"
    fill_orders(url)
    boot_id = tmp_path / "boot_id"
    boot_id.write_text("11111111-2222-3333-4444-555555555555\n")
    python = tmp_path / "python"
    python.write_text(
        f"""#!/bin/sh
if [ -z "$ANOTHER_MACHINE" ]; then exec {sys.executable} "$@"; fi
exec unshare --mount sh -c 'mount --bind {boot_id} /proc/sys/kernel/random/boot_id &&
exec {sys.executable} "$@"' sh "$@"
"""
    )
    python.chmod(0o755)
    errors = drive(
        "elsewhere",
        environment={"PYSPARK_PYTHON": str(python)},
        url=url,
        config={"spark.executorEnv.ANOTHER_MACHINE": "1"},
    ).answer
    assert len(errors) == 2
    for error in errors:
        assert "StoreUnavailable" in error
        assert "this task runs on another machine" in error
        assert "use a store that is reached over the network, a database or the daemon" in error
    assert stored(url, "copies") == []


# --- the script -------------------------------------------------------------------------------


def test_a_cluster_that_fails_half_way_leaves_no_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from examples.spark_cluster import Cluster

    started: list[int] = []
    cluster = Cluster(workers=1, memory_mib=0, directory=tmp_path)  # a worker without memory does not start
    stop = cluster.stop

    def note_and_stop() -> None:
        started.extend(cluster.pids)
        stop()

    monkeypatch.setattr(cluster, "stop", note_and_stop)
    with pytest.raises(RuntimeError, match=r"the worker-1 has ended with"):
        cluster.__enter__()
    assert len(started) == 2
    assert not any(is_running(pid) for pid in started)


def test_the_script_runs_a_program_and_passes_its_outcome_on(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("import os, sys; print(os.environ['SPARK_MASTER'], sys.argv[1:]); sys.exit(7)")
    command = [sys.executable, str(SCRIPT), "--workers", "0", "--run", "program.py", "--option", "1"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stdout.startswith("spark://127.0.0.1:")
    assert done.stdout.endswith("['--option', '1']\n")
    assert done.returncode == 7
    assert done.stderr == ""


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "Ctrl-C"])
def test_the_script_ends_its_cluster_when_told_to_end(how: signal.Signals, tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--workers", "1", "--directory", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as script:
        assert script.stdout is not None
        assert script.stderr is not None
        assert script.stdout.readline().startswith("spark://127.0.0.1:")
        said = re.search(r"\(processes (\d+), (\d+)\)", script.stderr.readline())
        assert said
        children = [int(pid) for pid in said.groups()]
        assert all(is_running(pid) for pid in children)
        script.send_signal(how)
        code = script.wait(timeout=60)
    assert code == (0 if how == signal.SIGINT else 128 + signal.SIGTERM)
    assert not any(is_running(pid) for pid in children)
