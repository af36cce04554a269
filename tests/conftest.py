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

from tests.spark_session import spark, why_no_spark

__all__ = ["spark"]  # a fixture: pytest finds it here

# The machines that run this are shared: an example's time says nothing, so hypothesis sets no deadline.
settings.register_profile("default", max_examples=100, deadline=None, derandomize=True)
settings.register_profile("campaign", max_examples=5_000, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("debug", max_examples=20, deadline=timedelta(seconds=5))
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    sharing = {item.path for item in items if "spark" in getattr(item, "fixturenames", ())}
    for item in items:
        if reason := _missing(item):
            item.add_marker(pytest.mark.skip(reason=reason))
        # Tests of one file run in one process, in their order; and all that share the session of Spark in one.
        item.add_marker(pytest.mark.xdist_group("spark" if item.path in sharing else item.path.name))


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
