"""What every test shares: profiles for generated examples, and skipping by name what is missing here."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

    from tests.deliveries import World
    from tests.file_children import Child

sys.path.insert(0, str(Path(__file__).parent.parent))  # so that tests can share what is in `tests.file_children`

from tests.postgres import postgres_server
from tests.spark_drivers import JAVA_VARIABLES
from tests.spark_session import spark, why_no_spark

__all__ = ["postgres_server", "spark"]  # fixtures: pytest finds them here

# The machines that run this are shared: an example's time says nothing, so hypothesis sets no deadline.
settings.register_profile("default", max_examples=100, deadline=None, derandomize=True)
settings.register_profile("campaign", max_examples=5_000, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("debug", max_examples=20, deadline=timedelta(seconds=5))
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))

os.environ.update({name: value for name, value in JAVA_VARIABLES.items() if name not in os.environ})

# A shell starts background jobs with interrupts ignored, and programs inherit that; tests of interrupts would be void.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="also run the tests marked slow")


def _missing(item: pytest.Item) -> str | None:
    if item.get_closest_marker("slow") and not item.config.getoption("--slow"):
        return "slow: run with --slow, or `make slow`"
    if item.get_closest_marker("root") and os.geteuid() != 0:
        return "root: run as root"
    if item.get_closest_marker("spark") and (reason := why_no_spark()):
        return f"spark: {reason}"
    return None


# --- several processes ------------------------------------------------------------------------

SPARK_FILES = {
    "test_bench.py",
    "test_cli_spark.py",
    "test_spark_archive.py",
    "test_spark_audit.py",
    "test_spark_decoding.py",
    "test_spark_live.py",
    "test_spark_project.py",
    "test_spark_redrive.py",
    "test_spark_session.py",
    "test_spark_sink.py",
    "test_spark_source.py",
}
"""Whose tests share the session of Spark; so they run in one process, and no other one starts Java for a session."""

LONG_GROUPS = (
    "spark",
    "test_campaign_simulator.py",
    "test_planted_bugs.py",
    "test_cli_store.py",
    "test_docs.py",
    "test_campaign_spark.py",
    "test_spark_cluster.py",
    "test_campaign_crashes.py",
    "test_cli_subscriptions.py",
)
"""What begins first, so that no process has minutes of work left when the others have ended."""


def group_of(file: str) -> str:
    """Return what a test file runs in one process with: itself, or all that share the session of Spark."""
    return "spark" if file in SPARK_FILES else file


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist, without which there is one process
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Tests of one group run in one process, in their order.

    `--dist loadgroup` would do that, but it passes on a test's group as a part of its name, which pytest 9.2 ignores:
    https://github.com/pytest-dev/pytest-xdist/issues/1386.
    """
    if config.getoption("dist") != "loadgroup":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class Groups(LoadScopeScheduling):  # type: ignore[misc]  # it ships no type information
        def _split_scope(self, nodeid: str) -> str:
            return group_of(Path(nodeid.partition("::")[0]).name)

    return Groups(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if reason := _missing(item):
            item.add_marker(pytest.mark.skip(reason=reason))
        if "spark" in getattr(item, "fixturenames", ()) and item.path.name not in SPARK_FILES:
            raise pytest.UsageError(f"{item.nodeid} uses the session of Spark: add its file to SPARK_FILES")
    places = {group: place for place, group in enumerate(LONG_GROUPS)}
    items.sort(key=lambda item: places.get(group_of(item.path.name), len(places)))


@pytest.fixture
def root() -> Iterator[Path]:
    """Where a file store may be made; not `tmp_path`, because the path of a socket must be short."""
    with tempfile.TemporaryDirectory(prefix="penstock-", dir="/tmp") as made:
        yield Path(made) / "data"


@pytest.fixture
def start() -> Iterator[Callable[..., Child]]:
    """Start programs of `tests.file_children`; whatever becomes of the test, none outlives it."""
    from tests.file_children import Child

    children: list[Child] = []

    def start(program: str, **arguments: Any) -> Child:
        children.append(Child(program, **arguments))
        return children[-1]

    yield start
    for child in children:
        child.dispose()


@pytest.fixture(params=["memory", "file"])
async def world(request: pytest.FixtureRequest, root: Path) -> AsyncIterator[World]:
    """A store of each kind, a clock that moves as it is told to, and buses: see `tests.deliveries`."""
    from tests.deliveries import World

    made = World(request.param, root)
    yield made
    await made.close()
