"""Finds a Java that Spark can run on.

Spark needs Java 17 or newer, with the module `jdk.incubator.vector`. Looked at, in this order: `JAVA_HOME`, `java` on
`PATH`, then the places where systems and tools put Java. The first one that is good enough is taken, and each is asked
itself what it is, with a time limit. If none is, `SparkUnavailable` says what was found and how to get one.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.errors import SparkUnavailable

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

logger = logging.getLogger(__name__)

OLDEST = 17
"""The first version of Java that Spark 4 runs on."""

NEEDED_MODULE = "jdk.incubator.vector"
"""Spark names it on Java's command line; a Java that was trimmed to less does not start then."""

ANSWER_SECONDS = 20
"""How long a Java may take to say what it is. A cold one on a busy machine needs a few."""

SYSTEM_HOMES = Path("/usr/lib/jvm")

HOW_TO_GET = f"""\
  Debian, Ubuntu:  apt install openjdk-{OLDEST}-jre-headless
  macOS:           brew install openjdk@{OLDEST}
  conda:           conda install -c conda-forge openjdk={OLDEST}
If there is one already, let JAVA_HOME name the directory that holds its bin/java."""


@dataclass(frozen=True)
class Java:
    """One Java, as it describes itself."""

    origin: str
    """Where it was found, in words: `JAVA_HOME`, `PATH` or a directory."""
    home: Path
    version: int | None
    """17 for Java 17; `None` if it gave no answer that says so."""
    problem: str | None = None
    """Why Spark cannot run on it, or `None`."""

    def __str__(self) -> str:
        name = f"Java {self.version}" if self.version else "a java"
        return f"{name} in {self.home} ({self.origin}){': ' + self.problem if self.problem else ''}"


def find_java(environment: Mapping[str, str] | None = None) -> Java:
    """Return the first Java that Spark can run on.

    :raises SparkUnavailable: there is none; the message lists what was found instead.
    """
    unfit: list[Java] = []
    for origin, program in _candidates(os.environ if environment is None else environment):
        java = _describe(origin, program)
        if java.problem is None:
            return java
        if java.home not in [known.home for known in unfit]:
            unfit.append(java)
    found = "".join(f"\n  {java}" for java in unfit) or " none"
    raise SparkUnavailable(f"Spark needs Java {OLDEST} or newer. Found:{found}\nTo install one:\n{HOW_TO_GET}")


def use_java() -> Java:
    """Find a Java and see to it that what starts Spark takes that one, through `JAVA_HOME` of this process."""
    java = find_java()
    named = os.environ.get("JAVA_HOME")
    if java.origin == "JAVA_HOME" or (named is None and java.origin == "PATH"):
        return java
    if named is not None:
        logger.warning("JAVA_HOME is %s, where Spark finds no Java %d or newer; taking %s", named, OLDEST, java)
    os.environ["JAVA_HOME"] = str(java.home)
    return java


# --- where to look ----------------------------------------------------------------------------


def _candidates(environment: Mapping[str, str]) -> Iterator[tuple[str, Path]]:
    if named := environment.get("JAVA_HOME"):
        yield "JAVA_HOME", Path(named) / "bin" / "java"
    if on_path := shutil.which("java", path=environment.get("PATH", os.defpath)):
        yield "PATH", Path(on_path)
    seen: set[Path] = set()
    for home in _usual_homes(environment):
        program = home / "bin" / "java"
        if program.is_file() and program.resolve() not in seen:
            seen.add(program.resolve())
            yield "a usual place", program


def _usual_homes(environment: Mapping[str, str]) -> Iterator[Path]:
    user = Path(environment.get("HOME") or Path.home())
    if conda := environment.get("CONDA_PREFIX"):
        yield Path(conda) / "lib" / "jvm"
    if sys.platform == "darwin":
        if told := _told_by_macos():
            yield told
        for prefix in ("/opt/homebrew/opt", "/usr/local/opt"):
            yield from _sorted(Path(prefix), "openjdk*")
        for machines in (Path("/Library/Java/JavaVirtualMachines"), user / "Library/Java/JavaVirtualMachines"):
            yield from _sorted(machines, "*/Contents/Home")
    yield from _sorted(SYSTEM_HOMES, "*")
    yield from _sorted(Path(environment.get("SDKMAN_DIR") or user / ".sdkman") / "candidates" / "java", "*")
    yield from _sorted(user / ".jdks", "*")


def _sorted(directory: Path, pattern: str) -> list[Path]:
    try:
        return sorted(directory.glob(pattern))
    except OSError:
        return []  # a directory that may not be read is a place without Java


def _told_by_macos() -> Path | None:
    try:
        told = _run(["/usr/libexec/java_home", "--version", f"{OLDEST}+"])
    except (OSError, subprocess.SubprocessError):
        return None
    return Path(told.stdout.strip()) if told.returncode == 0 else None


# --- what it is -------------------------------------------------------------------------------


def _describe(origin: str, program: Path) -> Java:
    home = program.resolve().parent.parent
    try:
        told = _run([str(program), "-XshowSettings:properties", "-version"])
    except subprocess.TimeoutExpired:
        return Java(origin, home, None, f"it did not say what it is within {ANSWER_SECONDS} seconds")
    except OSError as error:
        return Java(origin, home, None, error.strerror or str(error))
    answer = told.stderr + told.stdout
    # What a shim or a link leads to, only Java itself knows.
    if said := re.search(r"^\s*java\.home = (.+)$", answer, re.MULTILINE):
        home = Path(said[1].strip())
    version = version_in(answer)
    if version is None:
        return Java(origin, home, None, "it did not say which version it is")
    if version < OLDEST:
        return Java(origin, home, version, "too old")
    if not _has_needed_module(home):
        return Java(origin, home, version, f"a trimmed Java, without the module {NEEDED_MODULE}")
    return Java(origin, home, version)


def version_in(answer: str) -> int | None:
    """Return the version in what `java -version` prints: 17 in `version "17.0.15"`, 8 in `version "1.8.0_402"`."""
    said = re.search(r'version "(?:1\.)?(\d+)', answer)
    return int(said[1]) if said else None


def _has_needed_module(home: Path) -> bool:
    try:
        release = (home / "release").read_text(errors="replace")
    except OSError:
        return True  # nothing says that it is trimmed
    modules = re.search(r'^MODULES="(.*)"$', release, re.MULTILINE)
    return modules is None or NEEDED_MODULE in modules[1].split()


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(  # noqa: S603 - the program is what the user's own settings name
        command,
        capture_output=True,
        stdin=subprocess.DEVNULL,
        text=True,
        errors="replace",
        timeout=ANSWER_SECONDS,
        check=False,
    )
