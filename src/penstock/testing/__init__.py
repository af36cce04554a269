"""What Penstock tests itself with, shipped for those who build on it.

* `penstock.testing.harness`: an application's own bus on a store in memory and a clock that the test moves, with
  faults on demand or by a seed; and `penstock.testing.pytest_plugin`, its fixtures.
* `penstock.testing.conformance`: one suite that every store passes; the contract of `penstock.ports`, run.
* `penstock.testing.journal` and `checker`: what was asked, answered and seen, and whether every promise held.
* `penstock.testing.machine`: a machine in memory that may lose its power before any operation, and runs the file store.
* `penstock.testing.campaigns`: programs that try to break a promise, thousands of times, each replayable from a seed.

Importing this package needs nothing beyond Penstock itself. pytest is needed where a suite is run.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.testing.worlds.watching import Handled as Handled
    from penstock.testing.worlds.world import DeadEvent as DeadEvent
    from penstock.testing.worlds.world import World as World
    from penstock.testing.worlds.world import harness as harness

_HOMES = {
    "DeadEvent": "penstock.testing.worlds.world",
    "Handled": "penstock.testing.worlds.watching",
    "World": "penstock.testing.worlds.world",
    "harness": "penstock.testing.worlds.world",
}

if "pytest" in sys.modules:
    # pytest explains the failed asserts of test modules only, unless it is told of others before their import.
    sys.modules["pytest"].register_assert_rewrite("penstock.testing.conformance")


def __getattr__(name: str) -> object:
    from importlib import import_module

    if name not in _HOMES:
        raise AttributeError(f"module 'penstock.testing' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
