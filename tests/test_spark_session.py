"""A session has the settings that the source and the sink need, or says clearly why there is none."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.spark_drivers import drive, workers_seen

from penstock.errors import UsageError
from penstock.spark.session import cores_of, defaults, session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def in_a_child(code: str, path: Path) -> str:
    environment = {**os.environ, "PYTHONPATH": str(path)}
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


# --- without Spark ----------------------------------------------------------------------------

ASK = """
from penstock.errors import SparkUnavailable
from penstock.spark.session import session
try:
    session("local[1]")
except SparkUnavailable as error:
    print(error)
"""


def test_without_pyspark_the_module_is_importable_and_says_what_to_install(tmp_path: Path) -> None:
    said = in_a_child("import sys; sys.modules['pyspark'] = None" + ASK, tmp_path)
    assert said == "pyspark is not installed: pip install 'penstock[spark]'"


def test_an_old_pyspark_is_named_with_what_is_needed(tmp_path: Path) -> None:
    (tmp_path / "pyspark").mkdir()
    (tmp_path / "pyspark" / "__init__.py").touch()
    (tmp_path / "pyspark" / "version.py").write_text("__version__ = '4.1.12'\n")
    said = in_a_child(ASK, tmp_path)
    assert said == "pyspark 4.1.12 is too old, 4.2 or newer is needed: pip install --upgrade 'penstock[spark]'"


def test_the_client_without_spark_is_told_apart(tmp_path: Path) -> None:
    (tmp_path / "pyspark").mkdir()
    (tmp_path / "pyspark" / "__init__.py").touch()
    (tmp_path / "pyspark" / "version.py").write_text("__version__ = '4.3.0.dev1'\n")
    assert in_a_child(ASK, tmp_path).startswith("only pyspark-client is installed, which cannot start Spark")


@pytest.mark.parametrize(
    ("master", "cores"),
    [
        ("local", 1),
        ("local[3]", 3),
        ("local[*]", os.cpu_count()),
        ("local[4, 2]", 4),
        ("local-cluster[2,3,1024]", 6),
        ("local[", None),
        ("spark://host:7077", None),
        ("yarn", None),
    ],
)
def test_the_cores_of_a_master_are_read_from_its_name(master: str, cores: int | None) -> None:
    assert cores_of(master) == cores


def test_a_real_cluster_keeps_its_own_partitions_and_addresses() -> None:
    settings = defaults("spark://host:7077")
    assert "spark.sql.shuffle.partitions" not in settings
    assert "spark.driver.host" not in settings
    assert defaults("spark://127.0.0.1:7077")["spark.driver.host"] == "127.0.0.1"
    assert defaults("local[3]")["spark.sql.shuffle.partitions"] == "6"


def test_two_different_masters_are_refused() -> None:
    with pytest.raises(UsageError, match=r"two masters are asked for: master='local\[1\]', and 'local\[2\]' in config"):
        session("local[1]", config={"spark.master": "local[2]"})


@pytest.mark.parametrize("master", ["local[", "local[x]", "local-cluster[2,1]"])
def test_a_master_that_is_none_is_refused(master: str) -> None:
    with pytest.raises(UsageError, match=r"is no master: write local\[\*\]"):
        session(master)


def test_spark_connect_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="Spark Connect"):
        session("sc://localhost")
    monkeypatch.setenv("SPARK_REMOTE", "sc://localhost")
    with pytest.raises(UsageError, match="Spark Connect"):
        session()


# --- the shared session -----------------------------------------------------------------------


@pytest.mark.spark
def test_a_session_has_the_right_settings(spark: SparkSession) -> None:
    assert spark.conf.get("spark.sql.session.timeZone") == "UTC"
    assert spark.conf.get("spark.sql.execution.arrow.pyspark.enabled") == "true"
    assert spark.conf.get("spark.sql.execution.arrow.maxRecordsPerBatch") == "10000"
    assert spark.conf.get("spark.sql.execution.arrow.maxBytesPerBatch") == str(8 << 20)
    assert spark.conf.get("spark.sql.shuffle.partitions") == "4"
    assert spark.conf.get("spark.driver.host") == "127.0.0.1"
    assert spark.sparkContext.uiWebUrl is None


@pytest.mark.spark
def test_tasks_run_in_this_interpreter(spark: SparkSession) -> None:
    assert {task["python"] for task in workers_seen(spark, 2)} == {sys.executable}


@pytest.mark.spark
def test_asking_again_joins_the_running_session(spark: SparkSession) -> None:
    assert session() is spark
    assert session("local[2]", app_name="another") is spark
    assert spark.sparkContext.appName == "penstock-tests"


@pytest.mark.spark
def test_joining_sets_what_can_be_set_and_says_what_cannot(
    spark: SparkSession, caplog: pytest.LogCaptureFixture
) -> None:
    try:
        with caplog.at_level(logging.WARNING):
            session(config={"spark.sql.shuffle.partitions": "7", "spark.driver.memory": "3g"})
        assert spark.conf.get("spark.sql.shuffle.partitions") == "7"
        assert spark.conf.get("spark.driver.memory") == "1g"
        (record,) = caplog.records
        assert record.getMessage().endswith("not changed, as they need a new one: spark.driver.memory")
        session()
        assert spark.conf.get("spark.sql.shuffle.partitions") == "7", "what was set on the session is left alone"
    finally:
        spark.conf.set("spark.sql.shuffle.partitions", "4")


@pytest.mark.spark
def test_another_master_than_the_running_one_is_refused(spark: SparkSession) -> None:
    with pytest.raises(UsageError, match=r"runs in this process on local\[2\].*call its stop\(\) before asking for"):
        session("local[1]")
    assert spark.range(3).count() == 3


# --- sessions of their own --------------------------------------------------------------------

own_java = pytest.mark.timeout(300)  # it takes seconds to start, and more on a machine that is busy


@own_java
@pytest.mark.spark
def test_sessions_start_run_and_stop_without_a_word_one_after_the_other() -> None:
    driven = drive("in_turn")
    assert driven.answer == [["local[1]", "2", 1000], ["local[2]", "4", 1000], ["local[1]", "2", 1000]]
    assert driven.stdout == ""
    assert driven.stderr == ""


@own_java
@pytest.mark.spark
def test_what_the_user_has_configured_wins_over_defaults(tmp_path: Path) -> None:
    (tmp_path / "spark-defaults.conf").write_text(
        "spark.sql.session.timeZone Europe/Vienna\nspark.sql.shuffle.partitions 5\n"
    )
    old = tmp_path / "old" / "bin" / "java"
    old.parent.mkdir(parents=True)
    old.write_text("#!/bin/sh\necho 'openjdk version \"11.0.2\"' >&2\n")
    old.chmod(0o755)
    driven = drive(
        "settings",
        environment={"SPARK_CONF_DIR": str(tmp_path), "JAVA_HOME": str(tmp_path / "old")},
        names=["spark.sql.session.timeZone", "spark.sql.shuffle.partitions", "spark.app.name", "spark.ui.enabled"],
        config={"spark.sql.shuffle.partitions": "6", "spark.app.name": "mine"},
    )
    assert driven.answer["spark.sql.session.timeZone"] == "Europe/Vienna"
    assert driven.answer["spark.sql.shuffle.partitions"] == "6"
    assert driven.answer["spark.app.name"] == "mine"
    assert driven.answer["spark.ui.enabled"] == "false"
    assert driven.answer["JAVA_HOME"] != str(tmp_path / "old")
    assert "where Spark finds no Java 17 or newer" in driven.stderr


@own_java
@pytest.mark.spark
def test_a_java_that_does_not_start_is_quoted() -> None:
    driven = drive("refused", config={"spark.driver.extraJavaOptions": "-Xmx1g"})
    name, message = driven.answer
    assert name == "SparkUnavailable"
    assert "has ended before it was ready" in message
    assert "Not allowed to specify max heap" in message
    assert "ResourceWarning" not in driven.stderr


@own_java
@pytest.mark.spark
def test_a_session_whose_java_has_ended_is_not_joined() -> None:
    assert drive("java_ended").answer == "Spark's Java process has ended; a new one needs a new Python process"


@own_java
@pytest.mark.spark
def test_a_cluster_that_is_not_there_is_an_error_at_once() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and nobody listens
        url = f"spark://127.0.0.1:{taken.getsockname()[1]}"
        name, message = drive("refused", config={}, master=url).answer
    assert name == "SparkUnavailable"
    assert message.startswith(f"no Spark master answers at {url} (")
    assert drive("refused", config={}, master="spark://somewhere").answer[0] == "UsageError"


@own_java
@pytest.mark.spark
def test_a_spark_home_that_is_gone_is_named(tmp_path: Path) -> None:
    gone = str(tmp_path / "gone")
    name, message = drive("refused", environment={"SPARK_HOME": gone}, config={}).answer
    assert name == "SparkUnavailable"
    assert f"SPARK_HOME is {gone}; unset it" in message


@own_java
@pytest.mark.spark
def test_a_spark_home_of_another_version_is_warned_of(tmp_path: Path) -> None:
    for name in ("bin/spark-submit", "jars/spark-core_2.12-3.5.1.jar"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text("#!/bin/sh\nexit 1\n")
        (tmp_path / name).chmod(0o755)
    driven = drive("refused", environment={"SPARK_HOME": str(tmp_path)}, config={})
    assert driven.answer[0] == "SparkUnavailable"
    assert f"SPARK_HOME is {tmp_path}, which is Spark 3.5.1, but pyspark here is" in driven.stderr
