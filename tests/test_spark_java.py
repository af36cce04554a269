"""A Java is found where there is one, and where there is none the message says what to do."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from penstock.errors import SparkUnavailable
from penstock.spark import java
from penstock.spark.java import find_java, use_java, version_in

if TYPE_CHECKING:
    from collections.abc import Callable

MODULES = "java.base jdk.incubator.vector"


@pytest.fixture(autouse=True)
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the machine have no Java but those that a test makes."""
    for name in ("JAVA_HOME", "CONDA_PREFIX", "SDKMAN_DIR"):
        monkeypatch.setenv(name, "")  # so that it is put back, whatever a test does to it
        monkeypatch.delenv(name)
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    monkeypatch.setenv("HOME", str(tmp_path / "user"))
    monkeypatch.setattr(java, "SYSTEM_HOMES", tmp_path / "system")
    monkeypatch.setattr(sys, "platform", "linux")


@pytest.fixture
def a_java(tmp_path: Path) -> Callable[..., Path]:
    """Make a program that answers as a Java does, and return its home."""

    def make(place: str, version: str, *, modules: str | None = MODULES, script: str | None = None) -> Path:
        home = tmp_path / place
        (home / "bin").mkdir(parents=True)
        answer = f'cat >&2 <<END\n    java.home = {home}\nopenjdk version "{version}" 2025-01-01\nEND\n'
        (home / "bin" / "java").write_text("#!/bin/sh\nPATH=/usr/bin:/bin\n" + (script or answer))
        (home / "bin" / "java").chmod(0o755)
        if modules is not None:
            (home / "release").write_text(f'JAVA_VERSION="{version}"\nMODULES="{modules}"\n')
        return home

    return make


def on_path(home: Path, tmp_path: Path) -> None:
    (tmp_path / "path").mkdir()
    (tmp_path / "path" / "java").symlink_to(home / "bin" / "java")


@pytest.mark.parametrize(
    ("answer", "version"),
    [
        ('openjdk version "17.0.15" 2025-04-15', 17),
        ('java version "1.8.0_402"', 8),
        ('openjdk version "21" 2023-09-19', 21),
        ('openjdk version "26-ea" 2026-03-17', 26),
        ('Picked up JAVA_TOOL_OPTIONS: -Xmx1g\nopenjdk version "11.0.2"', 11),
        ("The operation couldn't be completed. Unable to locate a Java Runtime.", None),
    ],
)
def test_a_version_is_read_from_what_java_prints(answer: str, version: int | None) -> None:
    assert version_in(answer) == version


def test_java_home_comes_first_then_path_then_the_usual_places(
    a_java: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    system, sdkman = a_java("system/java-21", "21.0.1"), a_java("user/.sdkman/candidates/java/17-tem", "17.0.1")
    assert find_java().home == system
    (system / "bin" / "java").unlink()
    assert find_java().home == sdkman
    path = a_java("elsewhere", "18")
    on_path(path, tmp_path)
    assert find_java().home == path
    named = a_java("named", "25.0.3")
    monkeypatch.setenv("JAVA_HOME", str(named))
    assert find_java() == java.Java("JAVA_HOME", named, 25)


def test_a_shim_on_the_path_is_followed_to_the_java_behind_it(a_java: Callable[..., Path], tmp_path: Path) -> None:
    real = a_java("versions/17", "17.0.1")
    on_path(a_java("shims", "", script=f'exec {real}/bin/java "$@"\n'), tmp_path)
    assert find_java().home == real


def test_a_good_java_home_is_left_alone(a_java: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    link = a_java("real", "17.0.1").with_name("link")
    link.symlink_to("real")
    monkeypatch.setenv("JAVA_HOME", str(link))
    assert use_java().version == 17
    assert os.environ["JAVA_HOME"] == str(link)


def test_a_good_java_on_the_path_needs_no_java_home(a_java: Callable[..., Path], tmp_path: Path) -> None:
    on_path(a_java("real", "17.0.1"), tmp_path)
    assert use_java().version == 17
    assert "JAVA_HOME" not in os.environ


def test_an_old_java_home_gives_way_to_a_newer_java_and_that_is_said(
    a_java: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    newer = a_java("newer", "17.0.15")
    on_path(newer, tmp_path)
    monkeypatch.setenv("JAVA_HOME", str(a_java("old", "1.8.0_402")))
    with caplog.at_level(logging.WARNING):
        use_java()
    assert os.environ["JAVA_HOME"] == str(newer)
    (record,) = caplog.records
    assert str(tmp_path / "old") in record.getMessage()
    assert f"taking Java 17 in {newer} (PATH)" in record.getMessage()


def test_an_old_java_on_the_path_gives_way_to_one_in_a_usual_place(a_java: Callable[..., Path], tmp_path: Path) -> None:
    on_path(a_java("old", "11.0.2"), tmp_path)
    newer = a_java("system/java-17", "17.0.15")
    use_java()
    assert os.environ["JAVA_HOME"] == str(newer)


def test_without_any_java_the_message_says_how_to_get_one() -> None:
    with pytest.raises(SparkUnavailable) as raised:
        find_java()
    message = str(raised.value)
    assert message.startswith("Spark needs Java 17 or newer. Found: none\n")
    assert "apt install openjdk-17-jre-headless" in message
    assert "brew install openjdk@17" in message
    assert "conda install" in message


def test_what_was_found_and_does_not_do_is_listed_with_the_reason(
    a_java: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(java, "ANSWER_SECONDS", 1)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "gone"))
    on_path(a_java("old", "1.8.0_402"), tmp_path)
    a_java("system/a-trimmed", "21.0.1", modules="java.base")
    a_java("system/b-broken", "", script="echo nonsense")
    a_java("system/c-hanging", "", script="exec sleep 60")
    with pytest.raises(SparkUnavailable) as raised:
        find_java()
    assert str(raised.value).splitlines()[1:6] == [
        f"  a java in {tmp_path}/gone (JAVA_HOME): No such file or directory",
        f"  Java 8 in {tmp_path}/old (PATH): too old",
        f"  Java 21 in {tmp_path}/system/a-trimmed (a usual place): "
        f"a trimmed Java, without the module jdk.incubator.vector",
        f"  a java in {tmp_path}/system/b-broken (a usual place): it did not say which version it is",
        f"  a java in {tmp_path}/system/c-hanging (a usual place): it did not say what it is within 1 seconds",
    ]
