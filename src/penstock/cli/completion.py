"""`penstock completion`: the script that makes a shell complete `penstock`.

The script asks `penstock` itself at every Tab, so it never grows old: commands that come with a later
version are completed without installing it anew.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer
from typer.completion import shell_complete

HELP = """Print the script that makes a shell complete penstock.

\b
bash: add to ~/.bashrc
  eval "$(penstock completion bash)"
\b
zsh: add to ~/.zshrc, below compinit
  eval "$(penstock completion zsh)"
\b
fish: run once
  penstock completion fish > ~/.config/fish/completions/penstock.fish
"""


class Shell(StrEnum):
    """The shells that a script can be printed for."""

    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


def completion(
    context: typer.Context, shell: Annotated[Shell, typer.Argument(help="The shell to complete in.")]
) -> None:
    """Print the completion script of a shell; `HELP` is what a person reads."""
    root = context.find_root()
    program = str(root.info_name)
    code = shell_complete(root.command, {}, program, f"_{program.upper()}_COMPLETE", f"source_{shell}")
    raise typer.Exit(code)
