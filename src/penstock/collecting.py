"""Collecting: Python's garbage collector, kept off where very many objects are made and are gone soon.

It would look at all of them again and again, and find nothing; reference counts free them as ever.
"""

from __future__ import annotations

import gc
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def uncollected() -> Iterator[None]:
    """Keep the collector off within a block."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()
