"""The pytest plugin: fixtures for tests of applications that have a bus. pytest finds it by itself.

* `penstock_harness`: `penstock.testing.harness`, as a fixture: `async with penstock_harness(bus) as world:`.
* `penstock_bus`: makes a bus on `memory:` that reads neither the environment nor `penstock.toml`:
  `penstock_bus(orders, invoices)`.
* `penstock_seed`: a seed for chaos. A test that takes it runs once for each of the seeds: 0, 1 and 2, or as many as
  `--penstock-seeds` says; `--penstock-seed 7` runs it with that one alone, to repeat what failed; the marker
  `@pytest.mark.penstock_seeds(7, 19)` names those of one test.

All of them are plain fixtures, so that they work with pytest-asyncio, with anyio's plugin on asyncio, and with
`asyncio.run` in a test. Nothing of Penstock is imported before one of them is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractAsyncContextManager

    from penstock.bus.bus import Bus
    from penstock.bus.topic import Topic
    from penstock.testing.worlds.world import World

SEEDS = 3
MARKER = "penstock_seeds"
FIXTURE = "penstock_seed"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Offer to say which seeds tests of chaos run with."""
    group = parser.getgroup("penstock", "chaos in tests of event handlers")
    group.addoption(
        "--penstock-seeds", type=int, default=SEEDS, metavar="N", help=f"with so many seeds; {SEEDS} unless said"
    )
    group.addoption("--penstock-seed", type=int, default=None, metavar="SEED", help="with this seed alone")


def pytest_configure(config: pytest.Config) -> None:
    """Make the marker known, and refuse to run with no seed at all, which would skip every test of chaos."""
    config.addinivalue_line("markers", f"{MARKER}(*seeds): the seeds of chaos that a test runs with")
    seeds: int = config.getoption("--penstock-seeds")
    if seeds < 1:
        raise pytest.UsageError(f"--penstock-seeds is {seeds}: one seed, or more; --penstock-seed names a single one")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test that takes a seed once for each."""
    if FIXTURE in metafunc.fixturenames:
        metafunc.parametrize(FIXTURE, _seeds(metafunc), ids="seed {}".format)


def _seeds(metafunc: pytest.Metafunc) -> list[int]:
    one: int | None = metafunc.config.getoption("--penstock-seed")
    if one is not None:
        return [one]
    marker = metafunc.definition.get_closest_marker(MARKER)
    if marker is None:
        return list(range(metafunc.config.getoption("--penstock-seeds")))
    if not marker.args or not all(type(seed) is int for seed in marker.args):
        raise pytest.UsageError(f"{metafunc.definition.nodeid}: {MARKER} takes one seed or more, as whole numbers")
    return list(marker.args)


@pytest.fixture
def penstock_harness() -> Callable[..., AbstractAsyncContextManager[World]]:
    """Return `penstock.testing.harness`, which lets a bus run in a world of its own."""
    from penstock.testing.worlds.world import harness

    return harness


@pytest.fixture
def penstock_bus() -> Callable[..., Bus]:
    """Return what makes a bus on `memory:` of some topics; options are those of `Bus`."""
    from penstock.bus.bus import Bus
    from penstock.settings import Settings

    def make(*topics: Topic[Any], **options: Any) -> Bus:
        return Bus("memory:", topics=topics, **{"settings": Settings(url="memory:"), **options})

    return make
