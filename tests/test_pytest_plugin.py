"""The pytest plugin: what it brings to the tests of an application, and that it disturbs nobody else's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src"

SHOP = """
import asyncio

from penstock import Bus, Topic

orders = Topic("orders", bytes)
bus = Bus("file:/nowhere/at/all", topics=[orders])
handled = []


@bus.subscriber(orders, "billing")
async def bill(data: bytes) -> None:
    await asyncio.sleep(0)
    handled.append(data)
"""


def run(directory: Path, test: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Run a test file as an application's own suite does: in a process, with warnings as errors."""
    (directory / "shop.py").write_text(SHOP)
    (directory / "test_shop.py").write_text(test)
    (directory / "pytest.ini").write_text("[pytest]\nfilterwarnings = error\naddopts = --strict-markers\n")
    # Whether it is found by its entry point depends on how this package is installed; here it is named.
    plugins = ["no:penstock", "penstock.testing.pytest_plugin", "no:asyncio", "no:anyio", "no:cacheprovider"]
    chosen = [word for plugin in plugins for word in ("-p", plugin)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PENSTOCK_", "PYTEST_"))}
    environment["PYTHONPATH"] = os.pathsep.join([str(SOURCE), str(directory)])
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *chosen, *options],
        cwd=directory, env=environment, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip


ASYNC_TEST = """
import pytest
from shop import bill, bus, orders

{decorator}
async def test_a_bill(penstock_harness):
    async with penstock_harness(bus) as world:
        await bus.publish(orders, b"1")
        await world.drain()
        assert world.settled(bill) == [b"1"]
"""


@pytest.mark.parametrize(
    ("decorator", "options"),
    [
        ("@pytest.mark.asyncio", ["-p", "asyncio", "-o", "asyncio_default_fixture_loop_scope=function"]),
        ("@pytest.mark.anyio", ["-p", "anyio"]),
    ],
    ids=["pytest-asyncio", "anyio"],
)
def test_the_harness_works_with_each_plugin_of_async_tests(decorator: str, options: list[str], tmp_path: Path) -> None:
    anyio_backend = "\n\n@pytest.fixture\ndef anyio_backend():\n    return 'asyncio'\n"
    done = run(tmp_path, ASYNC_TEST.format(decorator=decorator) + anyio_backend, *options)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout


def test_it_works_without_any_plugin_of_async_tests(tmp_path: Path) -> None:
    test = """
import asyncio
from shop import bill, bus, orders

def test_a_bill(penstock_harness):
    async def main():
        async with penstock_harness(bus) as world:
            await bus.publish(orders, b"1")
            await world.drain()
            assert world.settled(bill) == [b"1"]
    asyncio.run(main())
"""
    done = run(tmp_path, test)
    assert done.returncode == 0, done.stdout + done.stderr


def test_it_imports_nothing_heavy_until_a_fixture_is_used(tmp_path: Path) -> None:
    test = """
import sys

def test_of_somebody_else():
    heavy = {"pyarrow", "numpy", "msgspec", "penstock.bus", "penstock.stores"}
    assert not heavy & sys.modules.keys()

def test_of_an_application(penstock_bus):
    assert "pyarrow" in sys.modules
"""
    done = run(tmp_path, test)
    assert done.returncode == 0, done.stdout + done.stderr


SEEDED = """
import asyncio, pytest
from shop import bill, bus, handled, orders

def chaos(penstock_harness, seed):
    async def main():
        handled.clear()
        async with penstock_harness(bus, chaos=seed) as world:
            await bus.publish(orders, b"1")
            await world.drain()
            assert world.settled(bill) == [b"1"]
    asyncio.run(main())

def test_seeds(penstock_harness, penstock_seed):
    chaos(penstock_harness, penstock_seed)

@pytest.mark.penstock_seeds(7, 19)
def test_named_seeds(penstock_harness, penstock_seed):
    chaos(penstock_harness, penstock_seed)
"""


@pytest.mark.parametrize(
    ("options", "seeds"),
    [
        ([], ["seeds[seed 0]", "seeds[seed 1]", "seeds[seed 2]", "named_seeds[seed 7]", "named_seeds[seed 19]"]),
        (["--penstock-seeds=1"], ["seeds[seed 0]", "named_seeds[seed 7]", "named_seeds[seed 19]"]),
        (["--penstock-seed=5"], ["seeds[seed 5]", "named_seeds[seed 5]"]),
    ],
)
def test_a_test_that_takes_a_seed_runs_with_each_and_can_be_repeated_with_one(
    options: list[str], seeds: list[str], tmp_path: Path
) -> None:
    done = run(tmp_path, SEEDED, "-vv", *options)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line.split("::test_")[1].split(" PASSED")[0] for line in done.stdout.splitlines() if "PASSED" in line] == (
        seeds
    )


@pytest.mark.parametrize("seeds", [0, -3])
def test_no_seed_at_all_is_a_mistake_and_skips_no_test_silently(seeds: int, tmp_path: Path) -> None:
    done = run(tmp_path, SEEDED, f"--penstock-seeds={seeds}")
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert f"--penstock-seeds is {seeds}: one seed, or more" in done.stdout + done.stderr


def test_seeds_that_are_none_are_named(tmp_path: Path) -> None:
    done = run(tmp_path, SEEDED.replace("(7, 19)", "('seven')"))
    assert done.returncode != 0
    assert "penstock_seeds takes one seed or more" in done.stdout


def test_a_bus_of_the_fixture_is_in_memory_whatever_the_environment_says(tmp_path: Path) -> None:
    test = """
import asyncio
from penstock import Topic

def test_a_bus(penstock_bus, monkeypatch):
    monkeypatch.setenv("PENSTOCK_LIMITS__EVENT_BYTES_MAX", "no number")
    raw = Topic("raw", bytes)
    async def main():
        async with penstock_bus(raw) as bus:
            await bus.publish(raw, b"1")
            return [event.data async for event in bus.read(raw)]
    assert asyncio.run(main()) == [b"1"]
"""
    done = run(tmp_path, test)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_distribution_names_the_plugin_so_that_pytest_finds_it() -> None:
    import tomllib

    project = tomllib.loads((SOURCE.parent / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["pytest11"] == {"penstock": "penstock.testing.pytest_plugin"}
