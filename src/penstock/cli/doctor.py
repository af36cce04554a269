"""`penstock doctor`: whether this machine and the store's directory are fit for a `file:` store."""

from __future__ import annotations

import os
import tempfile
from dataclasses import asdict
from pathlib import Path

import typer

from penstock.cli.output import Json, print_json, print_table, shown_text
from penstock.cli.session import Session


def doctor(context: typer.Context, as_json: Json = False) -> None:
    """Examine the machine and the directory; exits with 1 if something is wrong."""
    from penstock.stores.file.doctor import examine
    from penstock.stores.file.notifier import find_runtime_directory
    from penstock.stores.file.platform import Platform

    path, settings = context.ensure_object(Session).directory(must_exist=False)
    chosen = settings.file.runtime_directory
    runtime = find_runtime_directory(
        None if chosen == "auto" else Path(chosen),
        system=Path("/run/user"),
        temporary=Path(tempfile.gettempdir()),
        user=os.geteuid(),
    )
    findings = examine(path, Platform(), runtime_directory=runtime)
    wrong = [finding for finding in findings if not finding.ok]
    if as_json:
        print_json({"ok": not wrong, "findings": [asdict(finding) for finding in findings]})
    else:
        print_table(
            ("what", "ok", "found", "advice"),
            [
                (finding.name, "yes" if finding.ok else "no", shown_text(finding.value), shown_text(finding.advice))
                for finding in findings
            ],
        )
    if wrong:
        raise typer.Exit(1)
