"""`penstock pipeline`: what moves or examines events in bulk, one file for each; `running` has what they share."""

from __future__ import annotations

import typer

from penstock.cli.pipelines import archive, audit, project, redrive

app = typer.Typer(help="Archive, audit, redrive and project events with Spark.", no_args_is_help=True)
app.command("archive")(archive.archive)
app.command("audit")(audit.audit)
app.command("redrive")(redrive.redrive)
app.command("project")(project.project)
