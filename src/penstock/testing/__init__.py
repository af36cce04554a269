"""What Penstock tests itself with, shipped for those who build on it.

* `penstock.testing.conformance`: one suite that every store passes; the contract of `penstock.ports`, run.
* `penstock.testing.journal` and `checker`: what was asked, answered and seen, and whether every promise held.
* `penstock.testing.machine`: a machine in memory that may lose its power before any operation, and runs the file store.
* `penstock.testing.campaigns`: programs that try to break a promise, thousands of times, each replayable from a seed.

Importing this package needs nothing beyond Penstock itself. pytest is needed where a suite is run.
"""

from __future__ import annotations

import sys

if "pytest" in sys.modules:
    # pytest explains the failed asserts of test modules only, unless it is told of others before their import.
    sys.modules["pytest"].register_assert_rewrite("penstock.testing.conformance")
