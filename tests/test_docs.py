"""What the documents show is what happens."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs" / "guide").glob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def snippets() -> list[tuple[str, str]]:
    found = []
    for page in PAGES:
        for number, code in enumerate(BLOCK.findall(page.read_text())):
            found.append((f"{page.name}-{number}", code))
    return found


SNIPPETS = snippets()


def run(arguments: list[str], directory: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")}
    # The Penstock that is tested here, whichever one is installed.
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "src")])
    done = subprocess.run(
        [sys.executable, "-W", "error", *arguments],
        cwd=directory,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_pages_have_snippets() -> None:
    assert {"README.md-0", "publishing.md-0", "events.md-0", "conformance.md-0"} <= {name for name, _ in SNIPPETS}


def _marked(name: str, code: str) -> object:
    return pytest.param(code, id=name, marks=[pytest.mark.spark] if "penstock.spark" in code else [])


@pytest.mark.parametrize("code", [_marked(name, code) for name, code in SNIPPETS])
def test_a_snippet_runs_as_it_stands(code: str, tmp_path: Path) -> None:
    (tmp_path / "snippet.py").write_text(code)
    run(["snippet.py"], tmp_path)


def test_the_first_program_prints_what_the_readme_says(tmp_path: Path) -> None:
    readme = (ROOT / "README.md").read_text()
    (expected,) = re.findall(r"^```text\n(.*?)^```$", readme, re.MULTILINE | re.DOTALL)
    (tmp_path / "first.py").write_text(BLOCK.findall(readme)[0])
    assert run(["first.py"], tmp_path) == expected


@pytest.mark.spark
@pytest.mark.timeout(300)  # nine processes and Spark, on a machine that may be busy
def test_the_demo_checks_itself(tmp_path: Path) -> None:
    shown = run(["-m", "examples.demo", "4000"], tmp_path)
    assert "SIGKILL to a producer" in shown
    assert shown.count("lost 0") == 4  # of each service, and of the audit
    assert "1 dead letter of inventory: KeyError 'perpetuum mobile'" in shown
    assert "no damage" in shown
    assert "equal the log\n" in shown
    assert "equal the log byte for byte" in shown
    assert "revenue" in shown
    assert "Nothing is lost" in shown
    assert (tmp_path / "penstock-data" / "audit.html").read_text().startswith("<!doctype html>")


def test_every_decision_page_says_what_why_and_at_what_cost() -> None:
    pages = sorted((ROOT / "docs" / "decisions").glob("0*.md"))
    assert len(pages) >= 5
    for page in pages:
        text = page.read_text()
        assert "**Decided.**" in text, page
        assert "**Why.**" in text, page
        assert "**Costs.**" in text, page


def test_the_settings_page_names_every_setting() -> None:
    from penstock.settings import SETTINGS

    page = (ROOT / "docs" / "guide" / "settings.md").read_text()
    for name in SETTINGS:
        assert f"`{name}`" in page
        assert f"`PENSTOCK_{name.upper().replace('.', '__')}`" in page


def test_the_page_of_subscribers_says_what_the_code_does(tmp_path: Path) -> None:
    from penstock.bus import handlers, handling, runner, watchdog
    from penstock.settings import DeliverySettings

    page = (ROOT / "docs" / "guide" / "subscribers.md").read_text()
    assert f"`concurrency={handlers.CONCURRENCY}`, the default" in page
    assert f"(settings.md), {DeliverySettings().drain_seconds:g} s, or on a second signal" in page
    assert (handling.SLOW_SECONDS, handling.UPGRADE_SECONDS) == (60, 60), "the page says a minute"
    assert runner.LOOK_SECONDS_MIN == 0.01, "the page says a hundredth of a second"
    assert watchdog.BLOCKED_SECONDS == 1, "the page says one second"
    (tmp_path / "handlers.py").write_text(BLOCK.findall(page)[1])
    assert f"```text\n{run(['handlers.py'], tmp_path)}```" in page


def test_the_lock_has_only_names_versions_and_hashes() -> None:
    for line in (ROOT / "requirements.lock").read_text().splitlines():
        assert re.fullmatch(
            r"""\s*\#.*                                   # who needs it
              | [a-z0-9._-]+==[\w.!+-]+(\ ;\ [^\\]+)?\ \\  # a name, a version, perhaps a marker
              | \s+--hash=sha256:[0-9a-f]{64}(\ \\)?      # what it must be
            """,
            line,
            re.VERBOSE,
        ), line
        assert "://" not in line
