"""The promises of the command line: where things are printed, how commands end, what nobody gets to see."""

from __future__ import annotations

import json
import os
import platform
import pty
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import metadata, version
from pathlib import Path
from textwrap import dedent
from typing import Any, NoReturn

import pytest
from typer.main import get_command

from penstock.cli import main
from penstock.cli.app import app
from penstock.cli.session import Session
from penstock.errors import (
    IntegrityError,
    InvalidBatch,
    InvalidName,
    PenstockError,
    SettingsError,
    SparkUnavailable,
    StoreFull,
    UsageError,
)

SECRET = "geheim"
URL_WITH_SECRET = f"postgresql://app:{SECRET}@db/events"


@pytest.fixture(autouse=True)
def nothing_from_outside(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No setting, colour, buffering or file of the machine reaches a test."""
    for name in os.environ:
        if name.startswith("PENSTOCK_") or name in {"NO_COLOR", "FORCE_COLOR", "COLUMNS", "PYTHONUNBUFFERED"}:
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


def penstock(*argv: str, env: Mapping[str, str] | None = None, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own."""
    command = [sys.executable, "-m", "penstock", *argv]
    options = {"stdout": subprocess.PIPE, **options}
    return subprocess.run(
        command,
        env={**os.environ, **(env or {})},
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
        check=False,
        **options,
    )


def run_program(program: str) -> subprocess.CompletedProcess[str]:
    """Run a program that has `sys` and `main` in a process of its own."""
    program = f"import sys\nfrom penstock.cli import main\n{dedent(program)}"
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)


def on_a_terminal(*argv: str, env: Mapping[str, str] | None = None) -> str:
    """Return what a person sees who runs the command in a window of 100 columns."""
    ours, theirs = pty.openpty()
    try:
        done = penstock(*argv, env={"TERM": "xterm", "COLUMNS": "100", **(env or {})}, stdout=theirs)
        assert done.returncode == 0
        return os.read(ours, 1 << 16).decode()
    finally:
        os.close(ours)
        os.close(theirs)


def fail_with(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make `config show` raise."""

    def resolve(session: Session) -> NoReturn:
        raise error

    monkeypatch.setattr(Session, "resolve", resolve)


# --- stdout and stderr -----------------------------------------------------------------------


def test_data_goes_to_stdout_and_talk_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--url", URL_WITH_SECRET, "config", "show"]) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("setting ")
    assert printed.err.startswith("warning: other users can see the password in --url")


@pytest.mark.parametrize("command", ["version", "config show", "config show --origin"])
def test_json_prints_exactly_one_document_and_nothing_else(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command.split(), "--json"]) == 0
    printed = capsys.readouterr()
    assert isinstance(json.loads(printed.out), dict)
    assert printed.out.isascii()
    assert printed.err == ""


def test_what_was_printed_before_a_failure_is_not_lost() -> None:
    done = run_program(
        """
        from penstock.cli import config
        from penstock.errors import IntegrityError
        def print_table(headers, rows):
            print("so far")
            raise IntegrityError("and no further")
        config.print_table = print_table
        sys.exit(main(["config", "show"]))
        """
    )
    assert (done.returncode, done.stdout, done.stderr) == (3, "so far\n", "error: and no further\n")


def test_a_path_that_is_no_text_is_shown_and_does_not_fail(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PENSTOCK_URL", os.fsdecode(b"file:./\xff"))
    assert main(["config", "show"]) == 0
    assert r"file:./\udcff" in capsys.readouterr().out


# --- how a command ends ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (PenstockError("it is so"), 1),
        (SettingsError("it is so"), 2),
        (StoreFull("it is so"), 1),
        (OSError("it is so"), 1),
        (UsageError("it is so"), 2),
        (InvalidName("topic", "A B"), 2),
        (IntegrityError("it is so"), 3),
        (InvalidBatch("it is so"), 3),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else str(value),
)
def test_an_error_is_one_line_on_stderr_and_its_own_exit_code(
    error: Exception, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fail_with(error, monkeypatch)
    assert main(["config", "show", "--json"]) == code
    assert capsys.readouterr() == ("", f"error: {error}\n")


def test_an_error_ends_the_process_with_its_code_and_without_a_traceback() -> None:
    done = penstock("config", "show", env={"PENSTOCK_LIMITS__HEADERS_MAX": "few"})
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: limits.headers_max = 'few' (PENSTOCK_LIMITS__HEADERS_MAX)")
    assert done.stderr.count("\n") == 1


def test_an_unexpected_error_is_one_line_that_says_how_to_see_more_and_shows_no_password(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fail_with(ZeroDivisionError(f"no\nway to {URL_WITH_SECRET}"), monkeypatch)
    assert main(["config", "show"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: unexpected ZeroDivisionError: no way to ")
    assert err.endswith(" (`penstock --debug` shows the traceback)\n")
    assert err.count("\n") == 1
    assert SECRET not in err


ESCAPES = "\x1b]0;pwned\x07 \x1b[2J"
EVIL = type("Evil\x1b[31m", (Exception,), {})


@pytest.mark.parametrize("error", [StoreFull(f"no {ESCAPES}"), EVIL(f"no {ESCAPES}")], ids=["ours", "another's"])
@pytest.mark.parametrize("options", [[], ["--debug"]], ids=["plain", "debug"])
def test_no_error_can_speak_to_the_terminal(
    error: Exception, options: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fail_with(error, monkeypatch)
    assert main([*options, "config", "show"]) == 1
    _, err = capsys.readouterr()
    assert r"no \x1b]0;pwned\x07 \x1b[2J" in err
    assert "\x1b" not in err
    assert "\x07" not in err


def test_what_to_install_is_told_in_several_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fail_with(SparkUnavailable("no Java:\n    brew install \x1b[2J"), monkeypatch)
    assert main(["config", "show"]) == 1
    assert capsys.readouterr() == ("", "error: no Java:\n    brew install \\x1b[2J\n")


@pytest.mark.parametrize(
    "url", ["bogus:", "/tmp", "", "file:", "memory:x", "postgresql://db/events"], ids=lambda url: url or "empty"
)
@pytest.mark.parametrize("command", ["topics", "dlq stats", "verify", "publish orders --create x"])
def test_what_is_no_url_of_a_store_is_wrong_usage(
    command: str, url: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["--url", url, *command.split()]) == 2
    out, err = capsys.readouterr()
    assert (out, err[:7], err.count("\n")) == ("", "error: ", 1)
    assert list(tmp_path.iterdir()) == []


def test_settings_that_are_wrong_are_wrong_usage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--config", "/nope", "topics"]) == 2
    assert "/nope (named by --config) cannot be read" in capsys.readouterr().err
    (tmp_path / "penstock.toml").write_text("ulr = 'memory:'\n")
    assert main(["topics"]) == 2
    assert "there is no setting 'ulr' in penstock.toml; did you mean 'url'?" in capsys.readouterr().err


@pytest.mark.parametrize(("error", "code"), [(IntegrityError("damaged"), 3), (ZeroDivisionError("damaged"), 1)])
def test_with_debug_the_traceback_is_shown_and_the_code_stays(
    error: Exception, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fail_with(error, monkeypatch)
    assert main(["--debug", "config", "show"]) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("Traceback (most recent call last):")
    assert ", in resolve\n" in err
    assert err.splitlines()[-1].startswith("error: ")


def test_an_interrupt_ends_a_command_quietly_with_130(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Session, "resolve", lambda session: signal.raise_signal(signal.SIGINT))
    assert main(["config", "show"]) == 130
    assert capsys.readouterr() == ("", "")


def test_an_interrupt_while_the_program_still_loads_is_as_quiet(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(name: str) -> NoReturn:
        raise KeyboardInterrupt

    monkeypatch.setattr("penstock.cli.import_module", interrupted)
    assert main(["version"]) == 130
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("lines", [1, 100_000], ids=["less than a buffer", "more than any buffer"])
def test_a_reader_that_goes_away_ends_a_command_quietly_with_141(lines: int) -> None:
    done = run_program(
        f"""
        import os
        ours, theirs = os.pipe()
        os.dup2(theirs, 1)
        os.close(ours)
        from penstock.cli import config
        config.print_table = lambda headers, rows: [print("a line") for _ in range({lines})]
        sys.exit(main(["config", "show"]))
        """
    )
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="/dev/full: this system has none")
def test_output_that_cannot_be_written_is_a_failure_and_not_a_success() -> None:
    with Path("/dev/full").open("w") as full:
        done = penstock("version", stdout=full)
    assert (done.returncode, done.stderr) == (1, "error: [Errno 28] No space left on device\n")


# --- streams that the caller has closed --------------------------------------------------------


def in_a_shell(command: str) -> subprocess.CompletedProcess[str]:
    """Run `penstock …` by a shell, which alone can close a stream."""
    program = f'penstock() {{ "{sys.executable}" -m penstock "$@"; }}; {command}'
    return subprocess.run(["sh", "-c", program], capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(
    "command",
    [
        "--version",
        "--help",
        "version --help",
        "version",
        "version --json",
        "config show",
        "topics",
        "top --once",
        "publish orders more",
        "publish orders more --json",
        "publish other more --create",
        "consume orders billing",
        "subscriptions create orders other",
    ],
)
def test_without_stdout_nothing_is_done_and_one_line_says_why(command: str) -> None:
    assert main(["publish", "orders", "x", "--create"]) == 0
    done = in_a_shell(f"penstock {command} >&-")
    assert (done.returncode, done.stdout, done.stderr) == (
        1,
        "",
        "error: stdout is closed: there is nowhere to print to; >/dev/null takes what nobody wants\n",
    )
    left = in_a_shell("penstock topics --json; penstock subscriptions")
    assert '"events": 1' in left.stdout
    assert "other" not in left.stdout


def test_an_application_runs_without_stdout_since_it_prints_nothing(tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(
        dedent(
            """
            from penstock import Bus, Topic
            bus = Bus("file:./penstock-data", topics=[orders := Topic("orders", bytes)])
            @bus.subscriber(orders, "billing")
            async def bill(data):
                import os, signal
                print("handled")
                os.kill(os.getpid(), signal.SIGTERM)
            """
        )
    )
    assert main(["publish", "orders", "x", "--create"]) == 0
    assert main(["subscriptions", "create", "orders", "billing"]) == 0
    done = in_a_shell("penstock run shop:bus >&-")
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert "Error" not in done.stderr


@pytest.mark.parametrize(
    "command", ["publish nope x", "topics create more", "nope", "--url postgresql://a:b@c/d version"]
)
def test_without_stderr_talk_goes_nowhere_and_not_among_the_data(command: str) -> None:
    assert main(["publish", "orders", "x", "--create"]) == 0
    talking, silent = in_a_shell(f"penstock {command}"), in_a_shell(f"penstock {command} 2>&-")
    assert talking.stderr != ""
    assert (silent.returncode, silent.stdout) == (talking.returncode, talking.stdout)


@pytest.mark.parametrize("options", ["--ndjson", "--cloudevents", "--file -", "--ndjson --file -"])
def test_without_stdin_nothing_is_read_from_it_nor_made_for_it(options: str, tmp_path: Path) -> None:
    done = in_a_shell(f"penstock publish orders --create {options} <&-")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "error: stdin is closed: there is nothing to read from\n"
    assert list(tmp_path.iterdir()) == []


def test_who_reads_nothing_needs_no_stdin() -> None:
    assert main(["publish", "orders", "x", "--create"]) == 0
    for command in ("publish orders y", "topics", "top --once --interval 0.1"):
        done = in_a_shell(f"penstock {command} <&-")
        assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="/proc: this system has none")
def test_no_file_gets_the_place_of_a_stream_that_is_closed() -> None:
    done = in_a_shell(
        f"""'{sys.executable}' -c '
import os
from penstock.cli import main
main(["version"])
os.write(7, " ".join(os.readlink(f"/proc/self/fd/{{each}}") for each in range(3)).encode())
' 7>&1 <&- >&- 2>&-"""
    )
    assert done.stdout == "/dev/null /dev/null /dev/null"


# --- what is missing -------------------------------------------------------------------------


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_without_its_extra_the_command_line_says_in_one_line_what_to_install(missing: str) -> None:
    done = run_program(f"sys.modules[{missing!r}] = None; sys.exit(main(['version']))")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "the command line needs an extra: pip install 'penstock[cli]'\n"


def test_importing_the_command_line_is_cheap_and_so_is_starting_it() -> None:
    done = run_program(
        """
        assert not {"typer", "rich", "click"} & set(sys.modules), "typer or rich is imported before main"
        assert main(["config", "show"]) == 0
        assert "typer" in sys.modules
        assert not {"pyarrow", "numpy", "rich.console"} & set(sys.modules), "a small command imports much"
        """
    )
    assert (done.returncode, done.stderr) == (0, "")


# --- finding one's way -----------------------------------------------------------------------


def test_python_m_penstock_is_the_command() -> None:
    done = penstock("--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"penstock {version('penstock')}\n", "")


def test_the_command_alone_shows_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    alone = capsys.readouterr()
    assert main(["--help"]) == 0
    assert alone == capsys.readouterr()
    assert alone.out.startswith("Usage: penstock [OPTIONS] COMMAND")
    assert alone.err == ""


def commands(command: Any = None, path: tuple[str, ...] = ()) -> Iterable[tuple[str, ...]]:
    """Yield every command and group as the words that call it."""
    command = command or get_command(app)
    yield path
    for name, below in getattr(command, "commands", {}).items():
        yield from commands(below, (*path, name))


@pytest.mark.parametrize("path", list(commands()), ids=" ".join)
def test_every_command_has_a_help_that_says_what_it_does(
    path: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*path, "--help"]) == 0
    usage, blank, purpose, *_ = capsys.readouterr().out.splitlines()
    assert usage.startswith(f"Usage: {' '.join(('penstock', *path))} ")
    assert blank == ""
    assert purpose.strip().endswith(".")


@pytest.mark.parametrize(("typed", "meant"), [("vsion", "version"), ("confg show", "config"), ("config shw", "show")])
def test_a_mistyped_command_is_a_usage_error_that_names_the_nearest_one(
    typed: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(typed.split()) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert f"Did you mean '{meant}'?" in err


@pytest.mark.parametrize("argv", ["--nope", "version --nope", "version too much", "completion tcsh", "config"])
def test_wrong_arguments_are_a_usage_error_and_print_no_data(argv: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv.split()) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("Usage: penstock ")


def test_the_help_says_where_a_url_with_a_password_belongs(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--help"])
    assert "PENSTOCK_URL_FILE" in capsys.readouterr().out


# --- penstock version ------------------------------------------------------------------------


def test_version_names_everything_that_a_report_of_a_problem_needs(
    capsys: pytest.CaptureFixture[str],
) -> None:
    main(["version", "--json"])
    found = json.loads(capsys.readouterr().out)
    extras = found.pop("extras")
    assert found == {
        "penstock": version("penstock"),
        "python": platform.python_version(),
        "pyarrow": version("pyarrow"),
        "numpy": version("numpy"),
        "msgspec": version("msgspec"),
        "platform": platform.platform(),
    }
    assert set(extras) == set(metadata("penstock").get_all("Provides-Extra") or ())
    assert extras["cli"] is True


def test_an_extra_counts_as_installed_only_with_all_of_its_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    from penstock.cli.version import installed_extras

    class Distribution:
        requires = (
            "pyarrow>=18",
            "rich>=13.9; extra == 'whole'",
            "typer>=0.15; extra == 'whole'",
            "pandas<3,>=2.2; extra == 'half'",
            'rich; python_version > "3" and extra == "half"',
            "no-such-thing; extra == 'none'",
        )

    def distribution(name: str) -> Distribution:
        if name in {"penstock", "rich", "typer"}:
            return Distribution()
        from importlib.metadata import PackageNotFoundError

        raise PackageNotFoundError(name)

    monkeypatch.setattr("penstock.cli.version.distribution", distribution)
    assert installed_extras() == {"whole": True, "half": False, "none": False}


# --- penstock config show --------------------------------------------------------------------


def test_config_show_prints_every_setting_with_its_value(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "show"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == [
        "setting                    value",
        "url                        file:./penstock-data",
        "limits.event_bytes_max     1 MiB",
    ]


def test_config_show_says_where_each_value_came_from(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "other.toml"
    file.write_text('url = "file:./from-file"\n[limits]\nheaders_max = 9\n')
    monkeypatch.setenv("PENSTOCK_URL", "file:./from-environment")
    monkeypatch.setenv("PENSTOCK_MEMORY__BYTES_MAX", "1 GiB")
    argv = ["--url", "file:./from-flag", "--config", "other.toml", "config", "show", "--origin"]
    assert main(argv) == 0
    rows = [line.split("  ") for line in capsys.readouterr().out.splitlines()]
    shown = {cells[0]: tuple(cell.strip() for cell in cells if cell)[1:] for cells in rows}
    assert shown["setting"] == ("value", "origin")
    assert shown["url"] == ("file:./from-flag", "--url")
    assert shown["limits.headers_max"] == ("9", "other.toml:limits.headers_max")
    assert shown["memory.bytes_max"] == ("1 GiB", "PENSTOCK_MEMORY__BYTES_MAX")
    assert shown["memory.rows_max"] == ("100_000", "default")

    main([*argv, "--json"])
    document = json.loads(capsys.readouterr().out)
    assert document.keys() == shown.keys() - {"setting"}
    assert document["memory.bytes_max"] == {
        "value": 1 << 30,
        "origin": {"kind": "environment", "where": "PENSTOCK_MEMORY__BYTES_MAX"},
    }
    assert document["url"]["origin"] == {"kind": "flag", "where": "--url"}


def test_a_settings_file_that_is_not_there_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--config", "none.toml", "config", "show"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: none.toml (named by --config) cannot be read")


@pytest.mark.parametrize("source", ["flag", "variable", "file named by a variable"])
@pytest.mark.parametrize("form", ["", "--json", "--origin", "--json --origin"])
def test_a_password_is_never_printed(
    source: str,
    form: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    argv = []
    if source == "flag":
        argv = ["--url", URL_WITH_SECRET]
    elif source == "variable":
        monkeypatch.setenv("PENSTOCK_URL", URL_WITH_SECRET)
    else:
        (tmp_path / "url").write_text(URL_WITH_SECRET)
        monkeypatch.setenv("PENSTOCK_URL_FILE", str(tmp_path / "url"))
    assert main([*argv, "config", "show", *form.split()]) == 0
    out, err = capsys.readouterr()
    assert SECRET not in out + err
    assert "postgresql://app:***@db/events" in out
    assert ("--url" in err) == (source == "flag")


def test_a_variable_that_no_setting_has_is_talked_about_on_stderr_and_leaves_the_data_alone() -> None:
    done = penstock("config", "show", "--json", env={"PENSTOCK_URI": "memory:"})
    assert done.returncode == 0
    assert json.loads(done.stdout)["url"] == {"value": "file:./penstock-data"}
    assert "PENSTOCK_URI is ignored" in done.stderr


# --- terminals -------------------------------------------------------------------------------


def test_only_a_terminal_gets_escape_sequences() -> None:
    assert "\x1b[1m" in on_a_terminal("config", "show")
    for argv in (("config", "show"), ("--help",)):
        piped = penstock(*argv, env={"FORCE_COLOR": "1", "TERM": "xterm"})
        assert "\x1b" not in piped.stdout + piped.stderr


def test_no_color_leaves_plain_text_and_values_are_never_taken_for_markup() -> None:
    seen = on_a_terminal("config", "show", env={"NO_COLOR": "1", "PENSTOCK_URL": "[red]:smile:"})
    assert "\x1b" not in seen
    assert "[red]:smile:" in seen


# --- penstock completion ---------------------------------------------------------------------


@pytest.fixture
def path_with_penstock(tmp_path: Path) -> str:
    """A PATH on which the command `penstock` is the code under test, installed or not."""
    script = tmp_path / "bin" / "penstock"
    script.parent.mkdir()
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m penstock "$@"\n')
    script.chmod(0o700)
    return f"{script.parent}{os.pathsep}{os.environ['PATH']}"


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash: it is not installed")
def test_bash_completes_commands_after_evaluating_the_script(path_with_penstock: str) -> None:
    program = """
        script=$(penstock completion bash) && bash -n <<<"$script" && eval "$script" || exit 1
        complete -p penstock
        COMP_WORDS=(penstock bench ba) COMP_CWORD=2
        _penstock_completion penstock
        printf '<%s>' "${COMPREPLY[@]}"
    """
    done = subprocess.run(
        ["bash", "--norc", "-c", program],
        env={**os.environ, "PATH": path_with_penstock},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "complete -o default -F _penstock_completion penstock\n<batch>"
    assert done.stderr == ""


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_get_a_script_that_they_can_parse_where_they_are_installed(
    shell: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["completion", shell]) == 0
    script, err = capsys.readouterr()
    assert err == ""
    assert f"_PENSTOCK_COMPLETE=complete_{shell}" in script
    if shutil.which(shell):
        subprocess.run([shell, "-n"], input=script, text=True, check=True)


@pytest.fixture
def completed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[[str], set[str]]:
    """Return what a shell that shows a help beside each word is offered for what was typed."""

    def completed(typed: str) -> set[str]:
        monkeypatch.setenv("_PENSTOCK_COMPLETE", "complete_fish")
        monkeypatch.setenv("_TYPER_COMPLETE_FISH_ACTION", "get-args")
        monkeypatch.setenv("_TYPER_COMPLETE_ARGS", f"penstock {typed}")
        assert main([]) == 0
        return {line.split("\t")[0] for line in capsys.readouterr().out.splitlines()}

    return completed


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        (
            "",
            {
                "bench",
                "chaos",
                "completion",
                "config",
                "consume",
                "debug",
                "dlq",
                "doctor",
                "dump",
                "health",
                "lag",
                "lake",
                "metrics",
                "pause",
                "pipeline",
                "projection",
                "publish",
                "read",
                "repair",
                "resume",
                "run",
                "schedule",
                "seek",
                "spark",
                "subscriptions",
                "top",
                "topics",
                "trim",
                "verify",
                "version",
            },
        ),
        ("config ", {"show"}),
        ("config show --o", {"--origin"}),
        ("completion ", {"bash", "zsh", "fish"}),
        ("--", {"--url", "--config", "--debug", "--version", "--help"}),
    ],
)
def test_what_is_completed_is_what_there_is(
    typed: str, offered: set[str], completed: Callable[[str], set[str]]
) -> None:
    assert completed(typed) == offered


@pytest.mark.parametrize("path", list(commands()), ids=" ".join)
def test_no_help_of_an_option_is_so_long_that_a_shell_takes_its_end_for_an_option(
    path: tuple[str, ...], completed: Callable[[str], set[str]]
) -> None:
    assert {word[:2] for word in completed(" ".join([*path, "--"]))} == {"--"}


def test_an_option_of_all_commands_that_stands_behind_one_is_told_its_place() -> None:
    ended = penstock("health", "--url", "memory:")
    assert ended.returncode == 2
    assert "--url goes before the command: penstock --url … COMMAND" in ended.stderr
    assert "before the command" not in penstock("health", "--nothing").stderr
