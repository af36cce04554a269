"""Spark sessions with the settings that Penstock's source and sink work well with.

`session()` builds one, or joins the one that runs in this process: there can be only one. Whatever the user has set, in
the call, in `spark-defaults.conf`, through `spark-submit` or on the running session, wins over the defaults here.
PySpark is imported when the first session is asked for, so that importing this module needs neither it nor Java.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import re
import socket
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.errors import SparkUnavailable, UsageError
from penstock.spark.gateway import LOGGING, has_own_logging, scratch_home, start_gateway
from penstock.spark.java import use_java

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pyspark import SparkContext
    from pyspark.sql import SparkSession

logger = logging.getLogger(__name__)

OLDEST_PYSPARK = (4, 2)
"""The first version whose Python data sources have admission control and write Arrow."""

ROWS_PER_ARROW_BATCH = 10_000
"""Into a Python sink 5,000 to 100,000 rows a batch run equally fast; fewer leave less behind when a task fails."""

BYTES_PER_ARROW_BATCH = 8 << 20
"""Spark closes a batch with the row that reaches it. Its own 64 MiB is held several times over by every task."""

MASTER_SECONDS = 10
"""How long a cluster's master may take to accept a connection."""

_one_at_a_time = threading.RLock()


def session(
    master: str | None = None, *, app_name: str = "penstock", config: Mapping[str, str] | None = None
) -> SparkSession:
    """Return a Spark session: a new one, or the one that runs in this process.

    A new one runs on `master`: `local[*]`, `local[N]`, `local-cluster[n,c,m]` or `spark://host:port`; without one, on
    what `SPARK_MASTER` names, else on what Spark itself is configured with, else on `local[*]`. A running one is
    not restarted: of `config` only what Spark lets change at run time is applied, and the rest is logged.

    :param config: settings of Spark; they win over everything else.
    :raises SparkUnavailable: Java or pyspark is missing or too old, and the message says how to get it; or no master
        answers.
    :raises UsageError: a session runs on another master than asked for, or the master is not one.
    """
    wanted = {name: _text(value) for name, value in (config or {}).items()}
    master = _chosen_master(master, wanted)
    require_pyspark()
    with _one_at_a_time:
        running = _running_context()
        if running is None:
            return _build(master, app_name, wanted)
        return _join(running, master, wanted)


# --- what is asked for ------------------------------------------------------------------------


def _text(value: object) -> str:
    """Return a setting as Spark spells it; `True` is what people write, and Java reads `true`."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _chosen_master(master: str | None, config: dict[str, str]) -> str | None:
    configured = config.get("spark.master")
    if master is not None and configured is not None and master != configured:
        raise UsageError(f"two masters are asked for: master={master!r}, and {configured!r} in config['spark.master']")
    chosen = master or configured
    if "spark.remote" in config or "SPARK_REMOTE" in os.environ or (chosen or "").startswith("sc://"):
        raise UsageError(
            "session() starts Spark in this process and does not speak Spark Connect: unset SPARK_REMOTE, or build "
            "the session with SparkSession.builder.remote(…) and use the data source on it as on any other"
        )
    if chosen is not None and chosen.startswith("local") and cores_of(chosen) is None:
        raise UsageError(f"{chosen!r} is no master: write local[*], local[4] or local-cluster[2,1,1024]")
    return chosen


def cores_of(master: str) -> int | None:
    """Return how many tasks run at once on a master of this machine, or `None` for other masters."""
    if master == "local":
        return 1
    if threads := re.fullmatch(r"local\[(\d+|\*)(?:,\s*\d+)?\]", master):
        return (os.cpu_count() or 1) if threads[1] == "*" else int(threads[1])
    if processes := re.fullmatch(r"local-cluster\[\s*(\d+)\s*,\s*(\d+)\s*,\s*\d+\s*\]", master):
        return int(processes[1]) * int(processes[2])
    return None


def _is_on_this_machine(master: str) -> bool:
    return master.startswith("local") or re.match(r"spark://(127\.|localhost:|\[::1\])", master) is not None


def defaults(master: str) -> dict[str, str]:
    """Return the settings of a new session on this master, where the user has none."""
    settings = {
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.execution.arrow.pyspark.enabled": "true",
        "spark.sql.execution.arrow.maxRecordsPerBatch": str(ROWS_PER_ARROW_BATCH),
        "spark.sql.execution.arrow.maxBytesPerBatch": str(BYTES_PER_ARROW_BATCH),
        "spark.ui.enabled": "false",
    }
    if cores := cores_of(master):
        # Spark's own 200 is made for clusters: here it would be 200 tasks of a few rows each.
        settings["spark.sql.shuffle.partitions"] = str(2 * cores)
    if _is_on_this_machine(master):
        # Nobody else has to reach the driver, and a laptop's own name often does not lead to itself.
        settings["spark.driver.host"] = "127.0.0.1"
        settings["spark.driver.bindAddress"] = "127.0.0.1"
    return settings


# --- a new session ----------------------------------------------------------------------------


def _build(master: str | None, app_name: str, config: dict[str, str]) -> SparkSession:
    from pyspark import SparkConf, SparkContext
    from pyspark.sql import SparkSession

    master = master or os.environ.get("SPARK_MASTER")
    if master is not None and master.startswith("spark://"):
        _require_master(master)
    gateway = SparkContext._gateway  # noqa: SLF001 - Java outlives a stopped session; there is no public way to ask
    if gateway is None:
        gateway = _start_java(master, config)
    conf = SparkConf(_jvm=gateway.jvm)
    # These two the launcher itself fills in, so that they cannot be told from the user's.
    conf.set("spark.app.name", app_name).set("spark.ui.showConsoleProgress", "false")
    master = master or conf.get("spark.master") or "local[*]"
    conf.set("spark.master", master)
    for name, value in defaults(master).items():
        conf.setIfMissing(name, value)
    for name, value in config.items():
        conf.set(name, value)
    SparkContext(conf=conf, gateway=gateway)
    return SparkSession.builder.getOrCreate()


def _start_java(master: str | None, config: dict[str, str]) -> Any:
    from pyspark.find_spark_home import _find_spark_home

    if "PYSPARK_GATEWAY_PORT" not in os.environ:  # else `spark-submit` has started Java, and it starts us
        use_java()
    home = Path(_find_spark_home())
    _warn_of_another_spark(home)
    # Tasks run in Python processes that Java starts: in this interpreter, not in whatever `python3` is.
    interpreter = os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", interpreter)
    environment = {}
    if not has_own_logging(os.environ, home):
        environment["LOG4J_CONFIGURATION_FILE"] = LOGGING.as_uri()
    if "SPARK_LOCAL_IP" not in os.environ and not _own_name_resolves():
        environment["SPARK_LOCAL_IP"] = "127.0.0.1"
    if "SPARK_HOME" not in os.environ:
        environment["SPARK_HOME"] = str(scratch_home(home))
    return start_gateway({**({"spark.master": master} if master else {}), **config}, environment)


def _own_name_resolves() -> bool:
    try:
        socket.getaddrinfo(socket.gethostname(), None)
    except OSError:
        return False
    return True


def _warn_of_another_spark(home: Path) -> None:
    """`SPARK_HOME` of another version starts, and then fails with errors that name Java classes."""
    from pyspark.version import __version__ as ours

    jars = [re.fullmatch(r"spark-core_[\d.]+-(.+)\.jar", path.name) for path in home.glob("jars/spark-core_*.jar")]
    versions = [jar[1] for jar in jars if jar]
    if versions and _release(versions[0]) != _release(ours):
        logger.warning(
            "SPARK_HOME is %s, which is Spark %s, but pyspark here is %s; unless that is intended, unset SPARK_HOME",
            home,
            versions[0],
            ours,
        )


# --- a running session ------------------------------------------------------------------------


def _running_context() -> SparkContext | None:
    from py4j.protocol import Py4JError  # type: ignore[import-untyped]
    from pyspark import SparkContext

    context = SparkContext._active_spark_context  # noqa: SLF001 - `SparkContext.getOrCreate()` would make one
    if context is None:
        return None
    try:
        stopped = context._jsc.sc().isStopped()  # noqa: SLF001 - Spark itself may have stopped it, and tells only here
    except (Py4JError, OSError) as error:
        raise SparkUnavailable("Spark's Java process has ended; a new one needs a new Python process") from error
    if stopped:
        context.stop()
        return None
    return context


def _join(running: SparkContext, master: str | None, config: dict[str, str]) -> SparkSession:
    from pyspark.sql import SparkSession

    running_on = running.master or ""
    if master is not None and master != running_on:
        raise UsageError(
            f"a Spark session runs in this process on {running_on}, and there can be only one: "
            f"call its stop() before asking for {master}"
        )
    joined = SparkSession.getActiveSession() or SparkSession.builder.getOrCreate()
    explicit = joined.conf.getAll
    fixed = []
    for name, value in {**defaults(running_on), **config}.items():
        if not joined.conf.isModifiable(name):
            if name in config and joined.conf.get(name, None) != value:
                fixed.append(name)
        elif name in config or name not in explicit:
            joined.conf.set(name, value)
    if fixed:
        logger.warning("the Spark session runs already; not changed, as they need a new one: %s", ", ".join(fixed))
    return joined


# --- what must be here ------------------------------------------------------------------------


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


def _require_master(url: str) -> None:
    """Spark would try for a minute, and then fail with an error about something else."""
    reasons = []
    for place in url.removeprefix("spark://").split(","):
        host, _, port = place.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=MASTER_SECONDS).close()
        except ValueError:
            raise UsageError(f"{url!r} is no master: write spark://host:port") from None
        except OSError as error:
            reasons.append(f"{place}: {error}")
        else:
            return
    raise SparkUnavailable(f"no Spark master answers at {url} ({'; '.join(reasons)}); is the cluster running?")


def require_pyspark() -> None:
    """Raise `SparkUnavailable` unless a pyspark is installed that can start Spark and is new enough."""
    if importlib.util.find_spec("pyspark") is None:
        raise SparkUnavailable("pyspark is not installed: pip install 'penstock[spark]'")
    from pyspark.version import __version__ as version

    if _release(version) < OLDEST_PYSPARK:
        oldest = ".".join(map(str, OLDEST_PYSPARK))
        raise SparkUnavailable(
            f"pyspark {version} is too old, {oldest} or newer is needed: pip install --upgrade 'penstock[spark]'"
        )
    if importlib.util.find_spec("pyspark.java_gateway") is None:
        raise SparkUnavailable(
            "only pyspark-client is installed, which cannot start Spark: pip install 'penstock[spark]'"
        )
