"""Every numbered example prints what it says it prints, and together they use every public name."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import penstock

EXAMPLES = Path(__file__).parent.parent / "examples"
PROGRAMS = sorted(EXAMPLES.glob("[0-9][0-9]_*.py"))
LINES_MAX = 60


def expected_output(program: Path) -> str:
    """Return what the docstring of a program promises."""
    docstring = ast.get_docstring(ast.parse(program.read_text())) or ""
    _, _, block = docstring.partition("It prints::\n\n")
    return textwrap.dedent(block).strip() + "\n"


def names_used(source: str) -> set[str]:
    """Return the names of `penstock` that a program imports and uses, or reaches through the module."""
    tree = ast.parse(source)
    imported = {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == "penstock"
        for alias in node.names
    }
    plain = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    reached = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "penstock"
    }
    return (imported & plain) | reached


def run(program: Path, directory: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")}
    # The Penstock that is tested here, whichever one is installed.
    environment["PYTHONPATH"] = str(EXAMPLES.parent / "src")
    done = subprocess.run(
        [sys.executable, "-W", "error", program],
        cwd=directory,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def anchors(page: Path) -> set[str]:
    """Return what the headings of a page are called in links to them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}


def _marked(program: Path) -> object:
    marks = [pytest.mark.spark] if "penstock.spark" in program.read_text() else []
    return pytest.param(program, id=program.stem, marks=marks)


@pytest.mark.parametrize("program", [_marked(program) for program in PROGRAMS])
def test_an_example_prints_what_it_promises_and_leaves_nothing_behind(program: Path, tmp_path: Path) -> None:
    assert run(program, tmp_path) == expected_output(program)
    assert list(tmp_path.iterdir()) == []


def test_the_examples_are_numbered_without_a_hole_and_small() -> None:
    assert [int(program.name[:2]) for program in PROGRAMS] == list(range(1, len(PROGRAMS) + 1))
    for program in PROGRAMS:
        code = program.read_text().rpartition('"""\n')[2]
        lines = [line for line in code.splitlines() if line]
        assert len(lines) <= LINES_MAX, f"{program.name} has {len(lines)} lines, which is long for an example"


def test_every_public_name_is_used_by_an_example() -> None:
    used = {name for program in PROGRAMS for name in names_used(program.read_text())}
    missing = sorted(set(penstock.__all__) - used)
    assert not missing, f"no example uses {', '.join(missing)}"


def test_a_name_that_is_only_imported_does_not_count_as_used() -> None:
    source = "import penstock\nfrom penstock import Bus, Topic\nTopic('t', bytes)\npenstock.event('e')\n"
    assert names_used(source) == {"Topic", "event"}


def test_the_page_of_examples_lists_each_of_them_and_no_other() -> None:
    page = (EXAMPLES / "README.md").read_text()
    assert re.findall(r"^\| \[(\d\d_\w+)\]\(\1\.py\)", page, re.MULTILINE) == [program.stem for program in PROGRAMS]


@pytest.mark.parametrize("page", [EXAMPLES / "README.md", EXAMPLES.parent / "README.md"], ids=["examples", "readme"])
def test_the_links_of_the_first_pages_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)]+)\)", page.read_text())
    assert len(links) > 20
    for link in links:
        target, _, anchor = link.partition("#")
        assert (page.parent / target).exists(), link
        assert not anchor or anchor in anchors(page.parent / target), link
