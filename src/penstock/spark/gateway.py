"""Starts Spark's Java process, and passes on what it says on stderr, except for what every start repeats.

PySpark would start it by itself. Doing it here gives three things. What Java prints before Spark's logging begins is
left out; no setting silences it. If Java does not start, the error carries what it said. And what the user has
configured outside of the program can be read before the context is made, so that defaults do not override it.
"""

from __future__ import annotations

import atexit
import os
import select
import shutil
import subprocess
import tempfile
import threading
import time
import warnings
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.errors import SparkUnavailable

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

LOGGING = Path(__file__).with_name("log4j2.properties")

LEFT_OUT = (
    b"WARNING: Using incubator modules: jdk.incubator.vector",
    b"WARNING: package sun.security.action not in java.base",  # Java 24 and newer
    b"Picked up JAVA_TOOL_OPTIONS:",
    b"Picked up JDK_JAVA_OPTIONS:",
    b"NOTE: Picked up JDK_JAVA_OPTIONS:",
)
"""How lines begin that Java prints at every start, and that say nothing about the program."""

KEPT_LINES = 20
"""How many of the first lines an error quotes: what is wrong comes first, then Spark explains all its options."""


def start_gateway(settings: Mapping[str, str], environment: Mapping[str, str]) -> Any:
    """Start Java with these settings on its command line and these variables besides this process's own.

    :returns: what `SparkContext(gateway=…)` takes.
    :raises SparkUnavailable: it has ended instead; the message has its words.
    """
    from pyspark import SparkConf
    from pyspark.errors import PySparkRuntimeError
    from pyspark.java_gateway import launch_gateway

    conf = SparkConf(loadDefaults=False)
    for name, value in settings.items():
        conf.set(name, value)
    reading, writing = os.pipe()
    words = Words(reading)
    words.start()
    atexit.register(words.finish)
    try:
        with _variables(environment), warnings.catch_warnings():
            # PySpark forks with a `preexec_fn`, of which newer Pythons warn where there are threads. It only
            # ignores a signal there.
            warnings.filterwarnings("ignore", "(?s).*multi-threaded.*fork", DeprecationWarning)
            return launch_gateway(conf, {"stderr": writing})  # type: ignore[no-untyped-call]
    except PySparkRuntimeError as error:
        os.close(writing)
        writing = -1
        _close_what_is_left(error)
        raise SparkUnavailable(f"Spark's Java process has ended before it was ready. {words.first()}") from error
    except OSError as error:
        raise SparkUnavailable(
            f"Spark cannot be started: {error}. SPARK_HOME is {os.environ.get('SPARK_HOME', 'not set')}; "
            f"unset it to use the Spark that pyspark brings along"
        ) from error
    finally:
        if writing >= 0:
            os.close(writing)


def has_own_logging(environment: Mapping[str, str], home: Path) -> bool:
    """Say whether the user has configured Spark's logging: in the environment or in Spark's conf directory."""
    if "LOG4J_CONFIGURATION_FILE" in environment:
        return True
    directory = Path(environment.get("SPARK_CONF_DIR") or home / "conf")
    return any(directory.glob("log4j2*.properties")) or any(directory.glob("log4j2*.xml"))


def scratch_home(home: Path) -> Path:
    """Return a directory that serves as `home`, made of links, and is deleted in the end.

    Two things are left out of what pip has installed. Below `python` pyspark has a copy of itself as an archive, which
    Spark would put first on the path of every Python process: it is compiled anew at each start, which takes a second,
    while the installed one is compiled already. And below `work` the executors of `local-cluster` write, which is no
    place to write to.
    """
    scratch = Path(tempfile.mkdtemp(prefix="penstock-spark-"))
    atexit.register(shutil.rmtree, scratch, ignore_errors=True)
    for entry in home.iterdir():
        if entry.name not in {"python", "work"}:
            (scratch / entry.name).symlink_to(entry)
    return scratch


class Words(threading.Thread):
    """Passes on what is said at the other end of a pipe, line by line, until that end is closed."""

    def __init__(self, descriptor: int) -> None:
        super().__init__(name="penstock-spark-stderr", daemon=True)
        self._descriptor = descriptor
        self._first: list[bytes] = []

    def run(self) -> None:
        """Pass on to whatever is descriptor 2 at that time, which is where Java itself would have written."""
        with os.fdopen(self._descriptor, "rb") as lines:
            for line in lines:
                if line.startswith(LEFT_OUT):
                    continue
                if len(self._first) < KEPT_LINES:
                    self._first.append(line)
                with suppress(OSError):  # stderr is closed: nobody wants to know
                    os.write(2, line)

    def finish(self) -> None:
        """Let what was said arrive before this process ends; Java ends only after it."""
        deadline = time.monotonic() + 1
        with suppress(OSError, ValueError):  # the pipe is closed: everything has arrived
            while select.select([self._descriptor], [], [], 0)[0] and time.monotonic() < deadline:
                time.sleep(0.01)

    def first(self) -> str:
        """Return the first lines, for an error; waits a little for what is on its way."""
        self.join(timeout=5)
        said = b"".join(self._first).decode(errors="replace").strip()
        return f"It said:\n{said}" if said else "It said nothing on stderr."


def _close_what_is_left(error: BaseException) -> None:
    """Close the pipe to a process that has ended. PySpark has lost it by then: only its frame still has it."""
    step = error.__traceback__
    while step is not None:
        process = step.tb_frame.f_locals.get("proc")
        if isinstance(process, subprocess.Popen):
            process.communicate()
        step = step.tb_next


@contextmanager
def _variables(wanted: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for a while: a process that is started meanwhile has them, later ones do not."""
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
