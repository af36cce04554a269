"""What every test shares: profiles for generated examples, and skipping by name what is missing here."""

from __future__ import annotations

import importlib.util
import os
import shutil
from datetime import timedelta

import pytest
from hypothesis import HealthCheck, settings

# The machines that run this are shared: an example's time says nothing, so hypothesis sets no deadline.
settings.register_profile("default", max_examples=100, deadline=None, derandomize=True)
settings.register_profile("campaign", max_examples=5_000, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("debug", max_examples=20, deadline=timedelta(seconds=5))
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="also run the tests marked slow")


def _missing(item: pytest.Item) -> str | None:
    if item.get_closest_marker("slow") and not item.config.getoption("--slow"):
        return "slow: run with --slow, or `make campaign`"
    if item.get_closest_marker("root") and os.geteuid() != 0:
        return "root: run as root"
    if item.get_closest_marker("spark"):
        if importlib.util.find_spec("pyspark") is None:
            return "spark: pyspark is not installed (pip install 'penstock[spark]')"
        if shutil.which("java") is None:
            return "spark: no java on PATH (Java 17 or newer is needed)"
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if reason := _missing(item):
            item.add_marker(pytest.mark.skip(reason=reason))
