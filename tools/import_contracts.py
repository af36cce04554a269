"""An import-linter contract that lists what modules may import, rather than what they may not.

The engine decides and does nothing else: no I/O, no clock, no threads, no randomness. A list of what is forbidden
would miss the next module that somebody adds to the standard library or to this package; this one cannot.
"""

from __future__ import annotations

import sys
from typing import Any

from grimp import ImportGraph
from importlinter import Contract, ContractCheck, fields, output


class AllowlistContract(Contract):
    """Modules (and all below them) that import only what is named. Modules that do not exist yet may be listed."""

    modules: Any = fields.ListField(subfield=fields.StringField())
    allowed: Any = fields.ListField(subfield=fields.StringField())

    def check(self, graph: ImportGraph, verbose: bool) -> ContractCheck:  # noqa: FBT001 - import-linter's signature
        found: list[str] = []
        present = [name for name in self.modules if name in graph.modules]
        if not present:
            raise ValueError("none of the modules exists: this contract would hold for nothing")
        for name in present:
            for module in sorted({name, *graph.find_descendants(name)}):
                imports = sorted(graph.find_modules_directly_imported_by(module))
                found += [f"{module} imports {other}" for other in imports if not self._is_allowed(other, inside=name)]
        return ContractCheck(kept=not found, metadata={"found": found})

    def _is_allowed(self, imported: str, *, inside: str) -> bool:
        return any(imported == allowed or imported.startswith(f"{allowed}.") for allowed in (inside, *self.allowed))

    def render_broken_contract(self, check: ContractCheck) -> None:
        for line in check.metadata["found"]:
            output.print_error(f"{line}, which is not on the list", bold=False)
        sys.stdout.flush()
