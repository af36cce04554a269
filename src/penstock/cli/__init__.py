"""The command line: `penstock`, also as `python -m penstock`.

It needs the extra `cli`, and says so in one line where that is missing. Importing this package imports
nothing of the extra; `main` does.
"""

from __future__ import annotations

import sys
from importlib import import_module

_NEEDED = ("typer", "rich")
_INTERRUPTED = 130  # 128 + SIGINT, as shells count it


def main(argv: list[str] | None = None) -> int:
    """Run the command in `argv`, or in this process's arguments, and return its exit code."""
    try:
        try:
            for name in _NEEDED:
                import_module(name)
        except ModuleNotFoundError:
            print("the command line needs an extra: pip install 'penstock[cli]'", file=sys.stderr)
            return 1

        from penstock.cli.app import run

        return run(argv)
    except KeyboardInterrupt:
        return _INTERRUPTED
