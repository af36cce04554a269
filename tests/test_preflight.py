"""What is missing on a machine is said before a step fails for want of it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / "tools" / "preflight.py"


def preflight(*arguments: str, environment: dict[str, str] | None = None) -> tuple[int, str]:
    command = [sys.executable, str(SCRIPT), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout == ""
    return done.returncode, done.stderr


def a_java(directory: Path, version: str) -> dict[str, str]:
    """Make a Java and return an environment in which it is the one that is named."""
    program = directory / "bin" / "java"
    program.parent.mkdir(parents=True)
    program.write_text(f"#!/bin/sh\necho 'openjdk version \"{version}\"' >&2\n")
    program.chmod(0o755)
    return {"JAVA_HOME": str(directory), "PATH": "/nowhere", "HOME": str(directory)}


def test_the_set_up_needs_python_and_no_java() -> None:
    assert preflight(environment={"PATH": "/nowhere"}) == (0, "")


def test_an_old_python_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    from tools.preflight import main

    monkeypatch.setattr(sys, "version_info", (3, 9, 2, "final", 0))
    said = main([])  # type: ignore[no-untyped-call] # see there
    assert said.startswith("Penstock needs Python 3.11 or newer; this is 3.9 (")
    assert "make setup PYTHON=" in said


def test_a_java_that_spark_can_run_on_is_found(tmp_path: Path) -> None:
    assert preflight("java", environment=a_java(tmp_path, "17.0.15")) == (0, "")


def test_without_a_java_that_does_the_reason_and_the_way_out_are_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tools.preflight import main

    from penstock.spark import java

    monkeypatch.setattr(java, "SYSTEM_HOMES", tmp_path / "none")
    for name, value in a_java(tmp_path, "11.0.2").items():
        monkeypatch.setenv(name, value)
    said = main(["java"])  # type: ignore[no-untyped-call] # see there
    assert f"Java 11 in {tmp_path} (JAVA_HOME): too old" in said
    assert "apt install openjdk-17-jre-headless" in said


def test_before_the_set_up_the_set_up_is_asked_for() -> None:
    command = [sys.executable, "-S", "-E", str(SCRIPT), "java"]  # without site-packages, thus without Penstock
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "run make setup first" in done.stderr


def test_anything_else_is_answered_with_the_usage() -> None:
    assert preflight("jave") == (1, "usage: preflight.py [java]\n")


def test_an_old_python_can_parse_it() -> None:
    import ast

    ast.parse(SCRIPT.read_text(), feature_version=(3, 4))
    assert 'f"' not in SCRIPT.read_text()
