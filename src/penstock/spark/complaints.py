"""What Spark complains of, as people read it: one line instead of a plan and a stack of Java."""

from __future__ import annotations

import logging
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

LINES_MAX: Final = 4
_LAST_WORD: Final = "SQLSTATE:"


def in_one_line(error: BaseException) -> str:
    """Return the beginning of what an error of Spark's says: what follows its code is Spark's own plan."""
    lines = [line.strip() for line in str(error).split("\nJVM stacktrace")[0].splitlines() if line.strip()]
    last = next((number for number, line in enumerate(lines) if _LAST_WORD in line), LINES_MAX)
    return " ".join(lines[: min(last + 1, LINES_MAX)]).rstrip(";")


@contextmanager
def not_logged() -> Iterator[None]:
    """Keep PySpark from logging what it raises within a block, which it does with all of Java's stack."""
    logger = logging.getLogger("SQLQueryContextLogger")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)
