"""The promises of penstock.settings: precedence, checking, origins and secrecy."""

from __future__ import annotations

import json
import logging
import os
import pickle
import subprocess
import sys
import tempfile
from dataclasses import FrozenInstanceError, dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock import settings as module
from penstock.errors import SettingsError
from penstock.settings import (
    SETTINGS,
    Limits,
    MemorySettings,
    Origin,
    Resolved,
    Settings,
    redact_url,
    resolve,
    setting,
)

EVENT_BYTES = "limits.event_bytes_max"
EVENT_BYTES_VARIABLE = "PENSTOCK_LIMITS__EVENT_BYTES_MAX"


def variable_of(name: str) -> str:
    return "PENSTOCK_" + name.upper().replace(".", "__")


def message_of(
    flags: dict[str, object] | None = None,
    *,
    environ: dict[str, str] | None = None,
    toml: str | bytes | None = None,
    directory: Path,
) -> str:
    """Return the message of the SettingsError that these sources cause."""
    if toml is not None:
        (directory / "penstock.toml").write_bytes(toml.encode() if isinstance(toml, str) else toml)
    with pytest.raises(SettingsError) as caught:
        resolve(flags, environ=environ or {}, directory=directory)
    return str(caught.value)


def event_bytes(directory: Path, *, environ: str) -> int:
    return resolve(environ={EVENT_BYTES_VARIABLE: environ}, directory=directory).settings.limits.event_bytes_max


# --- defaults --------------------------------------------------------------------------------


def test_without_any_source_every_setting_has_its_documented_default(tmp_path: Path) -> None:
    resolved = resolve(environ={}, directory=tmp_path)
    assert resolved.settings == Settings()
    assert resolved.settings.url == "file:./penstock-data"
    assert resolved.settings.limits == Limits(
        event_bytes_max=1_048_576, batch_bytes_max=8_388_608, headers_max=64, headers_bytes_max=16_384
    )
    assert resolved.settings.memory == MemorySettings(bytes_max=268_435_456, rows_max=100_000)
    assert set(resolved.origins.values()) == {Origin("default", "default")}


def test_settings_cannot_be_changed_after_they_are_resolved(tmp_path: Path) -> None:
    resolved = resolve(environ={}, directory=tmp_path)
    with pytest.raises(FrozenInstanceError):
        resolved.settings.limits.headers_max = 5  # type: ignore[misc]
    with pytest.raises(TypeError):
        resolved.origins["url"] = Origin("flag", "--url")  # type: ignore[index]


def test_settings_survive_pickling_on_their_way_to_other_processes() -> None:
    settings = Settings(url="memory:", limits=Limits(headers_max=3))
    assert pickle.loads(pickle.dumps(settings)) == settings


def test_every_setting_is_documented_and_its_default_is_allowed() -> None:
    for known in SETTINGS.values():
        assert known.doc.endswith(".")
        assert known.check(known.default) == known.default
        assert known.check(known.parse(known.show(known.default))) == known.default


def test_importing_settings_does_not_load_the_toml_parser() -> None:
    program = "import sys, penstock.settings; sys.exit('tomllib' in sys.modules or 'pyarrow' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)


# --- precedence ------------------------------------------------------------------------------

PRECEDENCE = ("flag", "environment", "file")


def values_of(name: str) -> st.SearchStrategy[object]:
    if isinstance(SETTINGS[name].default, float):
        return st.floats(0, 1e6).map(lambda number: round(number, 3))
    if isinstance(SETTINGS[name].default, int):
        return st.integers(min_value=1, max_value=1 << 45) | st.integers(1, 64).map(lambda number: number << 20)
    return st.from_regex(r"(file:\./|penstock://u:p@)[a-z0-9_ é%-]{1,20}[a-z]", fullmatch=True)


def sources_of(name: str) -> st.SearchStrategy[dict[str, object]]:
    return st.fixed_dictionaries({}, optional=dict.fromkeys(PRECEDENCE, values_of(name)))


def toml_of(values: dict[str, object]) -> str:
    """Return the values as TOML: the top level first, since a table has no end but the next one."""
    lines = []
    for name, value in sorted(values.items(), key=lambda item: "." in item[0]):
        lines += [f"{name} = {json.dumps(value, ensure_ascii=False)}"]
    return "\n".join(lines)


@given(
    sources=st.fixed_dictionaries({name: sources_of(name) for name in SETTINGS}),
    as_shown=st.booleans(),
    through_files=st.sets(st.sampled_from(sorted(SETTINGS))),
)
def test_the_highest_source_that_gives_a_value_wins_and_the_origin_says_so(
    sources: dict[str, dict[str, object]], as_shown: bool, through_files: set[str]
) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        config = directory / "penstock.toml"
        config.write_text(toml_of({name: by["file"] for name, by in sources.items() if "file" in by}), "utf-8")
        flags: dict[str, object] = {name: by.get("flag") for name, by in sources.items()}
        environ: dict[str, str] = {}
        where = {name: {"flag": f"--{name}", "file": f"{config}:{name}"} for name in SETTINGS}
        for name, by in sources.items():
            if "environment" not in by:
                continue
            # What `config show` prints is also a way to write a number.
            spell = SETTINGS[name].show if as_shown and name != "url" else str
            text = spell(by["environment"])  # type: ignore[arg-type]
            if name in through_files:
                path = directory / name
                path.write_text(f" {text}\n", "utf-8")
                environ[f"{variable_of(name)}_FILE"] = str(path)
                where[name]["environment"] = f"{variable_of(name)}_FILE ({path})"
            else:
                environ[variable_of(name)] = text
                where[name]["environment"] = variable_of(name)

        resolved = resolve(flags, environ=environ, directory=directory)

    for name, by in sources.items():
        winner = next((kind for kind in PRECEDENCE if kind in by), None)
        value = attrgetter(name)(resolved.settings)
        assert value == (by[winner] if winner else SETTINGS[name].default)
        assert type(value) is type(SETTINGS[name].default)
        assert resolved.origins[name].kind == (winner or "default")
        assert resolved.origins[name].where == (where[name][winner] if winner else "default")


def test_a_flag_of_none_means_that_it_was_not_given(tmp_path: Path) -> None:
    resolved = resolve({"url": None, "config": None}, environ={"PENSTOCK_URL": "memory:"}, directory=tmp_path)
    assert resolved.settings.url == "memory:"


def test_a_value_that_is_overridden_is_checked_all_the_same(tmp_path: Path) -> None:
    message = message_of({EVENT_BYTES: 5}, toml=f"{EVENT_BYTES} = 0", directory=tmp_path)
    assert "penstock.toml" in message


def test_resolve_never_touches_the_process_environment_when_one_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Forbidden:
        def __getattr__(self, name: str) -> NoReturn:
            pytest.fail(f"os.environ.{name} was used")

        def __getitem__(self, name: str) -> NoReturn:
            pytest.fail(f"os.environ[{name!r}] was read")

        def __contains__(self, name: object) -> NoReturn:
            pytest.fail(f"{name!r} was looked for in os.environ")

        def __iter__(self) -> NoReturn:
            pytest.fail("os.environ was listed")

    (tmp_path / "penstock.toml").write_text("[limits]\nheaders_max = 2")
    with monkeypatch.context() as patch:
        patch.setattr(os, "environ", Forbidden())
        resolved = resolve({}, environ={"PENSTOCK_URL": "memory:"}, directory=tmp_path)
    assert (resolved.settings.url, resolved.settings.limits.headers_max) == ("memory:", 2)


def test_without_arguments_the_process_environment_and_working_directory_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PENSTOCK_URL", "file:./from-environment")
    Path("penstock.toml").write_text("[limits]\nheaders_max = 7")
    resolved = resolve()
    assert resolved.settings.url == "file:./from-environment"
    assert resolved.settings.limits.headers_max == 7
    assert resolved.origins["limits.headers_max"] == Origin("file", "penstock.toml:limits.headers_max")


def test_the_file_is_searched_in_the_directory_only_and_not_above_it(tmp_path: Path) -> None:
    (tmp_path / "penstock.toml").write_text('url = "memory:"')
    below = tmp_path / "below"
    below.mkdir()
    assert resolve(environ={}, directory=below).settings.url == Settings().url


@pytest.mark.parametrize("by_flag", [True, False])
def test_the_file_may_be_named_by_flag_or_variable_and_replaces_the_searched_one(tmp_path: Path, by_flag: bool) -> None:
    (tmp_path / "penstock.toml").write_text("unknown = 1")
    other = tmp_path / "other.toml"
    other.write_text('url = "memory:"')
    flags: dict[str, object] = {"config": other} if by_flag else {}
    environ = {"PENSTOCK_CONFIG": "missing.toml" if by_flag else "other.toml"}
    resolved = resolve(flags, environ=environ, directory=tmp_path)
    assert resolved.settings.url == "memory:"
    assert resolved.origins["url"] == Origin("file", f"{other}:url")


# --- what may be written ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("1", 1),
        ("1_000_000", 1_000_000),
        (" 12 ", 12),
        ("7B", 7),
        ("16 KiB", 16_384),
        ("8MiB", 8_388_608),
        ("1GiB", 1_073_741_824),
        ("1_024 KiB", 1_048_576),
    ],
)
def test_a_byte_field_accepts_whole_numbers_and_sizes(tmp_path: Path, text: str, number: int) -> None:
    assert event_bytes(tmp_path, environ=text) == number
    (tmp_path / "penstock.toml").write_text(f"[limits]\nevent_bytes_max = {json.dumps(text)}")
    assert resolve(environ={}, directory=tmp_path).settings.limits.event_bytes_max == number


WRONG_SIZES = ["", " ", "0", "-1", "-1 MiB", "64k", "8MB", "8mib", "8 M", "1.5MiB", "MiB", "1__0", "_1"]
WRONG_SIZES += ["0x10", "١٢", "true", "9" * 5_000]


@pytest.mark.parametrize("text", WRONG_SIZES)
def test_a_wrong_size_is_refused_with_its_name_value_place_and_what_is_allowed(tmp_path: Path, text: str) -> None:
    message = message_of(environ={EVENT_BYTES_VARIABLE: text}, directory=tmp_path)
    assert EVENT_BYTES in message
    assert repr(text) in message
    assert f"({EVENT_BYTES_VARIABLE})" in message
    assert "give a whole number of at least 1, or a size such as '8 MiB' (B, KiB, MiB, GiB)" in message


def test_a_count_is_no_size(tmp_path: Path) -> None:
    message = message_of({"limits.headers_max": "64 B"}, directory=tmp_path)
    assert message == "limits.headers_max = '64 B' (--limits.headers_max) is not allowed: " + (
        "give a whole number of at least 1"
    )


@pytest.mark.parametrize("written", ["true", "0", "-5", "1.0", '"5"', "[5]", "1979-05-27"])
def test_a_toml_value_of_the_wrong_type_or_range_is_refused(tmp_path: Path, written: str) -> None:
    message = message_of(toml=f"[limits]\nheaders_max = {written}", directory=tmp_path)
    assert "limits.headers_max = " in message
    assert f"({tmp_path}/penstock.toml:limits.headers_max)" in message
    assert "give a whole number of at least 1" in message


@pytest.mark.parametrize("value", [True, 0, -1, 1.5, b"5", [1]])
def test_a_flag_of_the_wrong_type_or_range_is_refused(tmp_path: Path, value: object) -> None:
    message = message_of({EVENT_BYTES: value}, directory=tmp_path)
    assert f"{EVENT_BYTES} = {value!r} (--{EVENT_BYTES})" in message


@pytest.mark.parametrize("empty", ["", "  "])
def test_an_empty_url_is_refused_and_not_taken_for_the_default(tmp_path: Path, empty: str) -> None:
    message = message_of(environ={"PENSTOCK_URL": empty}, directory=tmp_path)
    assert "(PENSTOCK_URL) is not allowed: give a text that is not empty" in message


@dataclass(frozen=True, slots=True, kw_only=True)
class Polling:
    """A group as a later version may add it."""

    eager: bool = setting(False, "Whether to poll at once.")
    interval_seconds: float = setting(0.5, "Seconds between polls; 0 polls all the time.", minimum=0)
    token: str = setting("none", "What the server asks for.", redact=lambda _: "***")


@dataclass(frozen=True, slots=True, kw_only=True)
class Extended(Settings):
    """All settings and one more group."""

    polling: Polling = field(default_factory=Polling)


@pytest.fixture
def extended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "Settings", Extended)
    monkeypatch.setattr(module, "SETTINGS", dict(module._walk(Extended)))


def polling(resolved: Resolved) -> Polling:
    assert isinstance(resolved.settings, Extended)
    return resolved.settings.polling


@pytest.mark.usefixtures("extended")
def test_a_new_group_is_a_dataclass_and_a_field(tmp_path: Path) -> None:
    (tmp_path / "penstock.toml").write_text("[polling]\neager = true\ninterval_seconds = 3")
    resolved = resolve(
        {"polling.interval_seconds": "2.5"}, environ={"PENSTOCK_POLLING__EAGER": "off"}, directory=tmp_path
    )
    assert polling(resolved) == Polling(eager=False, interval_seconds=2.5)
    shown = {row.name: row.value for row in resolved.rows()}
    assert (shown["polling.eager"], shown["polling.interval_seconds"]) == ("false", "2.5")


@pytest.mark.usefixtures("extended")
@pytest.mark.parametrize(
    ("truth", "texts"), [(True, "true 1 Yes on TRUE"), (False, "FALSE 0 no Off false")], ids=["true", "false"]
)
def test_a_boolean_may_be_spelled_in_the_usual_ways(tmp_path: Path, truth: bool, texts: str) -> None:
    for text in texts.split():
        resolved = resolve(environ={"PENSTOCK_POLLING__EAGER": text}, directory=tmp_path)
        assert polling(resolved).eager is truth


@pytest.mark.usefixtures("extended")
def test_a_whole_number_in_the_file_is_fine_for_a_fraction(tmp_path: Path) -> None:
    (tmp_path / "penstock.toml").write_text("polling.interval_seconds = 0")
    value = polling(resolve(environ={}, directory=tmp_path)).interval_seconds
    assert (value, type(value)) == (0.0, float)


@pytest.mark.usefixtures("extended")
@pytest.mark.parametrize(
    ("key", "written", "allowed"),
    [
        ("eager", "1", "true or false"),
        ("eager", '"true"', "true or false"),
        ("interval_seconds", "true", "a number of at least 0"),
        ("interval_seconds", "inf", "a number of at least 0"),
        ("interval_seconds", "nan", "a number of at least 0"),
        ("interval_seconds", "-0.1", "a number of at least 0"),
        ("interval_seconds", '"1.5"', "a number of at least 0"),
        ("interval_seconds", "1" + "0" * 400, "a number of at least 0"),
        ("token", "5", "a text that is not empty"),
    ],
)
def test_booleans_fractions_and_texts_in_the_file_have_their_own_types(
    tmp_path: Path, key: str, written: str, allowed: str
) -> None:
    message = message_of(toml=f"polling.{key} = {written}", directory=tmp_path)
    assert f"polling.{key} = " in message
    assert message.endswith(f"is not allowed: give {allowed}")


@pytest.mark.usefixtures("extended")
@pytest.mark.parametrize(("name", "text"), [("EAGER", "maybe"), ("INTERVAL_SECONDS", "soon")])
def test_a_text_that_spells_no_value_is_refused(tmp_path: Path, name: str, text: str) -> None:
    message = message_of(environ={f"PENSTOCK_POLLING__{name}": text}, directory=tmp_path)
    assert repr(text) in message
    assert f"(PENSTOCK_POLLING__{name})" in message


# --- names that are no settings --------------------------------------------------------------


def test_an_unknown_name_in_the_file_is_refused_with_the_nearest_one_and_the_file(tmp_path: Path) -> None:
    message = message_of(toml="[limits]\nevent_byte_max = 5", directory=tmp_path)
    assert "'limits.event_byte_max'" in message
    assert str(tmp_path / "penstock.toml") in message
    assert "did you mean 'limits.event_bytes_max'?" in message


def test_an_unknown_table_in_the_file_is_refused_even_if_it_is_empty(tmp_path: Path) -> None:
    assert "'limts'" in message_of(toml="[limts]", directory=tmp_path)


def test_a_known_table_may_be_empty(tmp_path: Path) -> None:
    (tmp_path / "penstock.toml").write_text("[limits]\n[memory]\n")
    assert resolve(environ={}, directory=tmp_path).settings == Settings()


@pytest.mark.parametrize("written", ["limits = 5", "limits = []", "[[limits]]\nheaders_max = 5"])
def test_a_group_that_is_no_table_is_refused_with_the_way_to_write_it(tmp_path: Path, written: str) -> None:
    message = message_of(toml=written, directory=tmp_path)
    assert message == f"limits in {tmp_path}/penstock.toml is a group of settings: write them below [limits]"


def test_an_unknown_flag_is_refused_with_the_nearest_one(tmp_path: Path) -> None:
    message = message_of({"limits.header_max": 5}, directory=tmp_path)
    assert message == "there is no setting 'limits.header_max' in the flags; did you mean 'limits.headers_max'?"


def test_an_unknown_environment_variable_is_only_a_warning_with_the_nearest_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    environ = {
        "PENSTOCK_LIMIT__HEADERS_MAX": "hunter2",
        "PENSTOCK_SERVICE_HOST": "10.0.0.1",
        "PENSTOCK_PORT_7000_TCP_ADDR": "10.0.0.1",
        "PATH": "/bin",
    }
    assert resolve(environ=environ, directory=tmp_path).settings == Settings()
    assert {record.name for record in caplog.records} == {"penstock.settings"}
    assert {record.levelno for record in caplog.records} == {logging.WARNING}
    near, port, host = [record.getMessage() for record in caplog.records]
    assert near.startswith("PENSTOCK_LIMIT__HEADERS_MAX is ignored")
    assert near.endswith("did you mean PENSTOCK_LIMITS__HEADERS_MAX?")
    assert "PENSTOCK_PORT_7000_TCP_ADDR" in port
    assert "PENSTOCK_SERVICE_HOST" in host
    assert "did you mean" not in port + host
    assert "hunter2" not in caplog.text


def test_known_environment_variables_cause_no_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "penstock.toml").write_text("")
    (tmp_path / "size").write_text("5")
    environ = {
        "PENSTOCK_CONFIG": "penstock.toml",
        "PENSTOCK_URL": "memory:",
        f"{EVENT_BYTES_VARIABLE}_FILE": "size",
    }
    assert resolve(environ=environ, directory=tmp_path).settings.limits.event_bytes_max == 5
    assert caplog.records == []


# --- files that cannot be used ---------------------------------------------------------------


def test_malformed_toml_is_refused_with_path_and_line(tmp_path: Path) -> None:
    message = message_of(toml='url = "memory:"\nlimits = [\n  = 3', directory=tmp_path)
    assert message.startswith(f"{tmp_path}/penstock.toml is not valid TOML: ")
    assert "line 3" in message


def test_toml_that_is_not_utf8_is_refused_with_path_and_line(tmp_path: Path) -> None:
    message = message_of(toml=b'# one\n# two\nurl = "\xff"', directory=tmp_path)
    assert message == f"{tmp_path}/penstock.toml is not UTF-8 text at line 3: write it as UTF-8"


@pytest.mark.parametrize("by_flag", [True, False])
def test_a_named_file_that_does_not_exist_is_refused_with_who_named_it(tmp_path: Path, by_flag: bool) -> None:
    name = "absent.toml"
    message = (
        message_of({"config": name}, directory=tmp_path)
        if by_flag
        else message_of(environ={"PENSTOCK_CONFIG": name}, directory=tmp_path)
    )
    assert str(tmp_path / name) in message
    assert f"named by {'--config' if by_flag else 'PENSTOCK_CONFIG'}" in message
    assert "No such file" in message
    assert "give the path of a readable file" in message


def test_a_searched_file_that_cannot_be_read_is_refused_and_not_taken_for_absent(tmp_path: Path) -> None:
    (tmp_path / "penstock.toml").mkdir()
    assert f"{tmp_path}/penstock.toml cannot be read: " in message_of(directory=tmp_path)


def test_a_variable_and_its_file_variant_together_are_refused(tmp_path: Path) -> None:
    environ = {"PENSTOCK_URL": "memory:", "PENSTOCK_URL_FILE": "secret"}
    message = message_of(environ=environ, directory=tmp_path)
    assert message == "url is given by both PENSTOCK_URL and PENSTOCK_URL_FILE: unset one of them"


def test_a_file_variable_whose_file_is_unreadable_is_refused_with_both_names(tmp_path: Path) -> None:
    message = message_of(environ={"PENSTOCK_URL_FILE": "/nowhere/secret"}, directory=tmp_path)
    assert message.startswith("/nowhere/secret (named by PENSTOCK_URL_FILE) cannot be read: No such file")


def test_a_file_variable_whose_file_is_no_text_is_refused_without_its_content(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"\xffhunter2")
    with pytest.raises(SettingsError, match=r"named by PENSTOCK_URL_FILE\) is not UTF-8 text") as caught:
        resolve(environ={"PENSTOCK_URL_FILE": "secret"}, directory=tmp_path)
    assert caught.value.__cause__ is None
    assert "hunter2" not in str(caught.value)


# --- secrets ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        # Nothing to hide.
        ("", ""),
        ("memory:", "memory:"),
        ("file:./penstock-data", "file:./penstock-data"),
        ("file:/home/me@work/data:1", "file:/home/me@work/data:1"),
        ("file:./key=3/data", "file:./key=3/data"),
        ("penstock://[::1]:7000", "penstock://[::1]:7000"),
        ("postgresql://u@h:5432/db?sslmode=require", "postgresql://u@h:5432/db?sslmode=require"),
        ("postgresql://h1:1,h2:2/db", "postgresql://h1:1,h2:2/db"),
        # A password where the standard puts it.
        ("postgresql://u:hunter2@h:5432/db?a=b", "postgresql://u:***@h:5432/db?a=b"),
        ("postgresql://:hunter2@h", "postgresql://:***@h"),
        ("postgresql://u:hunt%40er%2F2@[::1]:5432/db", "postgresql://u:***@[::1]:5432/db"),
        ("mongodb://u:hunter2@h1:1,[::2]:2,h3/db", "mongodb://u:***@h1:1,[::2]:2,h3/db"),
        ("file://u:hunter2@h/x", "file://u:***@h/x"),
        # A password that should have been percent-encoded.
        ("postgresql://u:hunt/er@2@h/db", "postgresql://u:***@h/db"),
        ("postgresql://u:1/hunter2@h/db", "postgresql://u:***@h/db"),
        ("postgresql://u:hunt?token=er2@h/db", "postgresql://u:***@***"),
        # A password whose host is missing, or whose scheme is.
        ("postgresql://u:hunter2", "postgresql://u:***"),
        ("postgresql://u:hunt/er2", "postgresql://u:***"),
        ("u:hunter2@h/db", "u:***@h/db"),
        ("jdbc:postgresql://u:hunter2@h/db", "jdbc:***@h/db"),
        # Several of them: everything from the first to the last goes.
        ("nats://u:hunter2@h1,nats://v:hunter3@h2", "nats://u:***@h2"),
        # Parameters.
        ("penstock://h:7000?token=hunter2", "penstock://h:7000?token=***"),
        ("penstock://h/?a=b&API_KEY=hunter2&c=d", "penstock://h/?a=b&API_KEY=***&c=d"),
        (
            "postgresql://u:hunter2@h/db?sslpassword=hunter3&a=b",
            "postgresql://u:***@h/db?sslpassword=***&a=b",
        ),
        ("postgresql://h/db?password=hunt&er#2&a=b", "postgresql://h/db?password=***&a=b"),
        ("postgresql://h:1/db?password=hunt@er2", "postgresql://h:***@***"),
        ("jdbc:postgresql://h/db;secret=hunter2", "jdbc:postgresql://h/db;secret=***"),
        ("host=h password = 'hunter 2' dbname=d", "host=h password =*** dbname=d"),
    ],
)
def test_a_url_is_shown_without_its_secrets_and_otherwise_as_it_is(url: str, shown: str) -> None:
    assert redact_url(url) == shown


def assert_hidden(password: str, url: str) -> None:
    """Assert that no four characters of the password are shown, unless they are also elsewhere in the URL."""
    shown = redact_url(url.replace("{}", password))
    elsewhere = url + "***@***"
    for start in range(len(password) - 3):
        piece = password[start : start + 4]
        assert piece in elsewhere or piece not in shown


passwords = st.text(min_size=4, max_size=30) | st.text("ab1:/?#@&;=[]% ", min_size=4, max_size=30)
places = st.sampled_from(
    [
        "postgresql://user:{}@host:5432/database?sslmode=require",
        "mongodb+srv://user:{}@one:1,[::2]:2,three/database",
        "penstock://:{}@[fe80::1%25eth0]:7000",
        "penstock://host?token={}&compression=lz4",
        "postgresql:///database?host=/run&user=user&password={}",
    ]
)


@given(password=passwords, place=places)
def test_a_percent_encoded_password_never_appears_in_a_shown_url(password: str, place: str) -> None:
    assert_hidden(quote(password, safe=""), place)


@given(password=passwords, place=places.filter(lambda place: ":{}@" in place))
def test_a_raw_password_before_a_host_never_appears_in_a_shown_url(password: str, place: str) -> None:
    assert_hidden(password, place)


@given(password=passwords, place=places.filter(lambda place: "={}" in place))
def test_a_raw_password_in_a_parameter_never_appears_in_a_shown_url(password: str, place: str) -> None:
    # With a `=` it may be two parameters, and nobody can tell.
    assert_hidden(password.replace("=", "-"), place)


@given(st.text() | st.text("pg:/?#@&;=[]%,. key", max_size=40))
def test_any_text_can_be_shown_as_a_url(text: str) -> None:
    assert isinstance(redact_url(text), str)


SECRET_URL = "postgresql://user:hunter2@host/db?token=hunter2"


@given(st.sampled_from(PRECEDENCE))
def test_a_secret_is_in_the_settings_but_never_in_what_is_shown_of_them(source: str) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        if source == "file":
            Path(temporary, "penstock.toml").write_text(f'url = "{SECRET_URL}"')
        resolved = resolve(
            {"url": SECRET_URL if source == "flag" else None},
            environ={"PENSTOCK_URL": SECRET_URL} if source == "environment" else {},
            directory=Path(temporary),
        )
    assert resolved.settings.url == SECRET_URL
    shown: list[Any] = [resolved, resolved.settings, list(resolved.rows())]
    assert "hunter2" not in f"{shown!r} {shown!s}"


@pytest.mark.parametrize("written", [f'["{SECRET_URL}"]', f'[{{ at = "{SECRET_URL}" }}]'])
def test_a_secret_of_the_wrong_type_is_not_quoted_by_the_error(tmp_path: Path, written: str) -> None:
    message = message_of(toml=f"url = {written}", directory=tmp_path)
    assert message.startswith(f"url = *** ({tmp_path}/penstock.toml:url) is not allowed")
    assert "hunter2" not in message


def test_the_content_of_a_file_variable_is_never_quoted_since_it_may_name_the_wrong_file(
    tmp_path: Path,
) -> None:
    (tmp_path / "secret").write_text("hunter2")
    message = message_of(environ={f"{EVENT_BYTES_VARIABLE}_FILE": "secret"}, directory=tmp_path)
    assert f"{EVENT_BYTES} = *** ({EVENT_BYTES_VARIABLE}_FILE ({tmp_path}/secret)) is not allowed" in message


# --- what is shown ---------------------------------------------------------------------------


def test_rows_show_every_setting_with_value_default_origin_and_documentation(tmp_path: Path) -> None:
    environ = {"PENSTOCK_URL": "penstock://u:hunter2@h", "PENSTOCK_MEMORY__ROWS_MAX": "2000"}
    rows = list(resolve({EVENT_BYTES: 1_500}, environ=environ, directory=tmp_path).rows())
    assert [row.name for row in rows] == list(SETTINGS)
    shown = {name: (value, default, origin.where) for name, value, default, origin, _ in rows}
    assert shown["url"] == ("penstock://u:***@h", "file:./penstock-data", "PENSTOCK_URL")
    assert shown[EVENT_BYTES] == ("1500 B", "1 MiB", f"--{EVENT_BYTES}")
    assert shown["memory.rows_max"] == ("2_000", "100_000", "PENSTOCK_MEMORY__ROWS_MAX")
    assert shown["memory.bytes_max"] == ("256 MiB", "256 MiB", "default")
    assert all(row.doc for row in rows)


@given(st.integers(min_value=1))
def test_a_size_is_shown_in_a_form_that_can_be_given_back(number: int) -> None:
    known = SETTINGS[EVENT_BYTES]
    assert known.parse(known.show(number)) == number


def test_a_url_of_absurd_length_is_hidden_whole_but_for_its_scheme() -> None:
    assert redact_url("postgresql://u:" + "secret" * 100_000) == "postgresql://***"
    assert redact_url("secret" * 100_000) == "***"
