"""Settings: what may be tuned, where each value came from, and what is refused.

What this module promises:

* **One order of precedence.** Flags, then the environment, then `penstock.toml`, then defaults.
  `Resolved.origins` says which of them won, for every setting.
* **Nothing wrong lies in wait.** Every value given is checked, also one that a higher source
  overrides; the error names the setting, the value, its place and what is allowed there.
* **No secret is shown.** Not by `repr`, not by `Resolved.rows`, not in an error or a log line.
* **One reader of the environment.** `resolve` reads it, nothing else in the library does.

A setting is one field below, and its description is data beside its default. A group of settings is one
more frozen dataclass and one field in `Settings`; its names in the environment (`PENSTOCK_GROUP__NAME`),
in the file (`[group]`) and in flags (`group.name`) follow from that.
"""

from __future__ import annotations

import difflib
import logging
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from itertools import chain
from operator import attrgetter
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, TypeVar

from penstock.errors import SettingsError, did_you_mean

_log = logging.getLogger(__name__)

_FILE_NAME = "penstock.toml"
_PREFIX = "PENSTOCK_"
_CONFIG_VARIABLE = "PENSTOCK_CONFIG"
_HIDDEN = "***"
_SHOWN_MAX = 2_000  # no store's URL is longer, and the patterns that hide secrets take quadratic time

_BYTES_PER = {"GiB": 1 << 30, "MiB": 1 << 20, "KiB": 1 << 10, "B": 1}
_WHOLE_NUMBER = re.compile(rf"(?P<number>[+-]?[0-9]+(?:_[0-9]+)*)\s*(?P<size>{'|'.join(_BYTES_PER)})?")
_TRUTH = dict.fromkeys(("true", "1", "yes", "on"), True) | dict.fromkeys(("false", "0", "no", "off"), False)

Value = str | int | float | bool
_V = TypeVar("_V", str, int, float, bool)


# --- secrets ---------------------------------------------------------------------------------

# `file:` is followed by a path; every other scheme that can carry a password by `//`.
_SCHEME = re.compile(r"file:|[a-z][a-z0-9+.-]*://", re.IGNORECASE)

# A name that sounds like a secret, and its value up to the next `name=`. Going that far also covers a value
# with a bare `&`, `;` or `#` in it, and the `host=… password=…` form that database drivers accept as well.
_SECRET_PARAMETER = re.compile(
    r"(?:^|(?<=[?&;#\s]))([\w.%+-]*(?:pass|pwd|secret|token|credential|key)[\w.%+-]*\s*=)"
    r".*?(?=[?&;#\s]\s*[\w.%+-]+\s*=|\Z)",
    re.IGNORECASE | re.DOTALL,
)

# After a host comes a port, and a port is digits. Anything else is a password that lost its `@host`.
_PASSWORD_AS_PORT = re.compile(r"([a-z][a-z0-9+.-]*://[^:/?#,\[]*:)(?!\d*(?:[,/?#]|\Z)).*", re.IGNORECASE | re.DOTALL)


def redact_url(url: str) -> str:
    """Return `url` with its passwords and secret-looking parameters replaced by `***`.

    It never raises, and in doubt it hides too much: a password is often written with a bare `/`, `?`, `#`
    or `@`, which a parser that follows the standard would take for the end of it and show the rest.
    """

    def hide_value(found: re.Match[str]) -> str:
        # Its `@` stays, since that may be the one that ends a password in front of the host.
        return found[1] + (f"{_HIDDEN}@{_HIDDEN}" if "@" in found[0] else _HIDDEN)

    if len(url) > _SHOWN_MAX:
        found = _SCHEME.match(url[:_SHOWN_MAX])
        return f"{found[0] if found else ''}{_HIDDEN}"
    shown = _SECRET_PARAMETER.sub(hide_value, url)
    scheme = _SCHEME.match(shown)
    colon, at = shown.find(":", scheme.end() if scheme else 0), shown.rfind("@")
    if 0 <= colon < at:
        return f"{shown[: colon + 1]}{_HIDDEN}{shown[at:]}"
    return shown if at >= 0 else _PASSWORD_AS_PORT.sub(rf"\1{_HIDDEN}", shown)


# --- the settings ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What is known of one setting. Its type is that of its default."""

    default: Value
    doc: str
    unit: str
    minimum: int
    redact: Callable[[str], str] | None

    @property
    def allowed(self) -> str:
        """What may be given, as words that complete "give …"."""
        match self.default:
            case bool():
                return "true or false"
            case int():
                size = ", or a size such as '8 MiB' (B, KiB, MiB, GiB)" if self.unit == "bytes" else ""
                return f"a whole number of at least {self.minimum}{size}"
            case float():
                return f"a number of at least {self.minimum}"
            case _:
                return "a text that is not empty"

    def parse(self, text: str) -> Value:
        """Return the value that `text` spells, still to be checked; ValueError or KeyError if none."""
        match self.default:
            case bool():
                return _TRUTH[text.strip().lower()]
            case int():
                found = _WHOLE_NUMBER.fullmatch(text.strip())
                if not found or (found["size"] and self.unit != "bytes"):
                    raise ValueError
                return int(found["number"]) * _BYTES_PER[found["size"] or "B"]
            case float():
                return float(text)
            case _:
                return text

    def check(self, value: object) -> Value:
        """Return `value` in this setting's type; ValueError if it is of another type or out of range."""
        if isinstance(self.default, float) and type(value) is int:
            value = float(value)
        # The exact type, because to isinstance a bool is an int, and `true` is no number of bytes.
        if type(value) is not type(self.default):
            raise ValueError
        match value:
            case bool():
                return value
            case int() | float() if self.minimum <= value < math.inf:
                return value
            case str() if value.strip():
                return value
        raise ValueError

    def show(self, value: Value) -> str:
        """Return `value` as a person would write it, without its secret."""
        if self.redact:
            return self.redact(str(value))
        match value:
            case bool():
                return str(value).lower()
            case int() if self.unit == "bytes":
                suffix = next(suffix for suffix, size in _BYTES_PER.items() if value % size == 0)
                return f"{value // _BYTES_PER[suffix]} {suffix}"
            case int():
                return f"{value:_}"
            case _:
                return str(value)


def setting(
    default: _V, doc: str, *, unit: str = "", minimum: int = 1, redact: Callable[[str], str] | None = None
) -> _V:
    """Declare a setting: a dataclass field that carries its `Setting`.

    A `unit` of "bytes" also accepts sizes such as `8 MiB`. A secret names the function that makes it fit
    to be shown, and stays out of its group's `repr` altogether.
    """
    known = Setting(default=default, doc=doc, unit=unit, minimum=minimum, redact=redact)
    return field(default=default, repr=redact is None, metadata={"setting": known})


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How large what is published may be. Beyond a limit `TooLarge` is raised and nothing is written."""

    event_bytes_max: int = setting(1 << 20, "Bytes of one event: payload, key, all columns.", unit="bytes")
    batch_bytes_max: int = setting(8 << 20, "Bytes of one publish_batch, per partition.", unit="bytes")
    headers_max: int = setting(64, "Number of headers of one event.")
    headers_bytes_max: int = setting(16 << 10, "Bytes of one event's header names and values.", unit="bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySettings:
    """How much the `memory:` store may hold. Beyond it `StoreFull` is raised and nothing is written."""

    bytes_max: int = setting(256 << 20, "Bytes of all events that the memory: store holds.", unit="bytes")
    rows_max: int = setting(100_000, "Number of parked, scheduled and staged rows that it holds.")


@dataclass(frozen=True, slots=True, kw_only=True)
class FileSettings:
    """How the `file:` store uses its directory."""

    segment_bytes: int = setting(256 << 20, "Bytes of a segment file, after which the next one begins.", unit="bytes")
    allocate_bytes: int = setting(4 << 20, "Bytes by which the file being written is extended ahead.", unit="bytes")
    reserve_bytes: int = setting(
        16 << 20, "Bytes of the disk that events leave free for cursors; at most a twentieth of it.", unit="bytes"
    )
    stall_seconds: float = setting(
        5.0, "How long to wait for a writer that does not move before giving up.", unit="s", minimum=0
    )
    marker_seconds: float = setting(0.1, "Silence after which the last block gets a witness.", unit="s", minimum=0)
    retain_seconds: float = setting(60.0, "How often retention is looked at.", unit="s", minimum=0)
    parked_rows_max: int = setting(1_000_000, "Number of parked rows of all subscriptions.")
    scheduled_rows_max: int = setting(1_000_000, "Number of delayed publishes that wait.")
    runtime_directory: str = setting(
        "auto", "Where processes of a user wake each other; auto: /run/user/<uid>, or one in the temporary directory."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DeliverySettings:
    """How a process takes part in delivery."""

    lease_seconds: float = setting(
        10.0,
        "How long a process that is frozen keeps its shards, at least 0.5; one that is killed keeps none.",
        unit="s",
        minimum=0,
    )
    drain_seconds: float = setting(
        30.0,
        "How long handlers may take to end when their process is told to, before they are cancelled.",
        unit="s",
        minimum=0,
    )
    dead_letter_days: float = setting(
        30.0, "How long dead letters are kept after they failed last; 0 keeps them for ever.", unit="d", minimum=0
    )
    stalled_seconds: float = setting(
        60.0, "How long events may wait without any progress before health says stalled.", unit="s", minimum=0
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Every setting, at its default unless given."""

    url: str = setting(
        "file:./penstock-data",
        "URL of the store: file:./directory, or memory: for a store that ends with the process.",
        redact=redact_url,
    )
    limits: Limits = field(default_factory=Limits)
    file: FileSettings = field(default_factory=FileSettings)
    memory: MemorySettings = field(default_factory=MemorySettings)
    delivery: DeliverySettings = field(default_factory=DeliverySettings)


def _walk(group: Any, prefix: str = "") -> Iterator[tuple[str, Setting]]:
    for item in fields(group):
        if known := item.metadata.get("setting"):
            yield prefix + item.name, known
        else:
            yield from _walk(item.default_factory, f"{prefix}{item.name}.")


def _build(group: Any, values: Mapping[str, Value], prefix: str = "") -> Any:
    parts: dict[str, Any] = {}
    for item in fields(group):
        name = prefix + item.name
        parts[item.name] = values[name] if name in values else _build(item.default_factory, values, f"{name}.")
    return group(**parts)


SETTINGS: Mapping[str, Setting] = MappingProxyType(dict(_walk(Settings)))
"""Every setting by its dotted name, in the order of declaration."""


# --- where values come from ------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a value came from: `where` is what to look for in order to change it."""

    kind: Literal["flag", "environment", "file", "default"]
    where: str


class Row(NamedTuple):
    """One setting as `penstock config show` prints it; nothing here holds a secret."""

    name: str
    value: str
    default: str
    origin: Origin
    doc: str


@dataclass(frozen=True, slots=True)
class Resolved:
    """The settings in force, and the origin of each by its dotted name."""

    settings: Settings
    origins: Mapping[str, Origin]

    def rows(self) -> Iterator[Row]:
        """Yield every setting, ready to be shown."""
        for name, known in SETTINGS.items():
            value = known.show(attrgetter(name)(self.settings))
            yield Row(name, value, known.show(known.default), self.origins[name], known.doc)


class _Given(NamedTuple):
    name: str
    value: object
    origin: Origin
    # The content of a `…_FILE` is private whatever the setting: the variable may name the wrong file.
    private: bool = False


def resolve(
    flags: Mapping[str, object] | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    directory: Path | None = None,
) -> Resolved:
    """Return the settings in force, or raise SettingsError for the first thing that is wrong.

    `flags` are keyed by dotted name, or `config` for the path of the file; None means not given. Without
    `environ` the environment of this process is read, without `directory` its working directory is searched.
    """
    environ = os.environ if environ is None else environ
    directory = directory or Path()
    flags = {name: value for name, value in (flags or {}).items() if value is not None}
    config = flags.pop("config", None)

    values = {name: known.default for name, known in SETTINGS.items()}
    origins = dict.fromkeys(SETTINGS, Origin("default", "default"))
    # From the weakest source to the strongest, so that the last word stands.
    for given in chain(
        _from_file(config, environ, directory), _from_environment(environ, directory), _from_flags(flags)
    ):
        values[given.name] = _accept(given)
        origins[given.name] = given.origin
    return Resolved(_build(Settings, values), MappingProxyType(origins))


def _accept(given: _Given) -> Value:
    known = SETTINGS[given.name]
    value = given.value
    try:
        # TOML has types of its own; only a size, which it lacks, is spelled as a string there.
        if isinstance(value, str) and (given.origin.kind != "file" or known.unit == "bytes"):
            value = known.parse(value)
        return known.check(value)
    except (ValueError, KeyError, OverflowError):
        quoted = _HIDDEN if given.private or known.redact else repr(given.value)
        # Not chained, because Python's own error may quote the value.
        raise SettingsError(
            f"{given.name} = {quoted} ({given.origin.where}) is not allowed: give {known.allowed}"
        ) from None


def _from_flags(flags: Mapping[str, object]) -> Iterator[_Given]:
    for name, value in flags.items():
        if name not in SETTINGS:
            raise _unknown(name, "the flags", [*SETTINGS, "config"])
        yield _Given(name, value, Origin("flag", f"--{name}"))


def _from_environment(environ: Mapping[str, str], directory: Path) -> Iterator[_Given]:
    known = {_CONFIG_VARIABLE}
    for name in SETTINGS:
        variable = _PREFIX + name.upper().replace(".", "__")
        file_variable = f"{variable}_FILE"
        known |= {variable, file_variable}
        if variable in environ and file_variable in environ:
            raise SettingsError(f"{name} is given by both {variable} and {file_variable}: unset one of them")
        if variable in environ:
            yield _Given(name, environ[variable], Origin("environment", variable))
        if file_variable in environ:
            path = directory / environ[file_variable]
            content = _read(path, named_by=file_variable).strip()
            yield _Given(name, content, Origin("environment", f"{file_variable} ({path})"), private=True)
    for variable in sorted(environ.keys() - known):
        if variable.startswith(_PREFIX):
            # No error: for a service called penstock Kubernetes sets PENSTOCK_SERVICE_HOST and more.
            _log.warning("%s is ignored: no setting has this name%s", variable, _nearest(variable, known))


def _nearest(variable: str, known: Iterable[str]) -> str:
    # The prefix that all names share would make them all look alike, so only the rest is compared.
    rests = [name.removeprefix(_PREFIX) for name in sorted(known)]
    near = difflib.get_close_matches(variable.removeprefix(_PREFIX), rests, n=1)
    return f"; did you mean {_PREFIX}{near[0]}?" if near else ""


def _from_file(config: object, environ: Mapping[str, str], directory: Path) -> Iterator[_Given]:
    named_by = None
    if config is not None:
        named_by = "--config"
    elif (config := environ.get(_CONFIG_VARIABLE)) is not None:
        named_by = _CONFIG_VARIABLE
    path = directory / (str(config) if named_by else _FILE_NAME)
    content = _read(path, named_by)
    if not content:
        return

    import tomllib

    try:
        document = tomllib.loads(content)
    except ValueError as error:
        raise SettingsError(f"{path} is not valid TOML: {error}") from None
    groups = {name.rpartition(".")[0] for name in SETTINGS} - {""}
    for name, value in _flatten(document):
        if name in groups:
            if value != {}:
                raise SettingsError(f"{name} in {path} is a group of settings: write them below [{name}]")
        elif name not in SETTINGS:
            raise _unknown(name, str(path), SETTINGS)
        else:
            yield _Given(name, value, Origin("file", f"{path}:{name}"))


def _flatten(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, object]]:
    for key, value in table.items():
        if isinstance(value, dict) and value:
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _read(path: Path, named_by: str | None) -> str:
    place = f"{path} (named by {named_by})" if named_by else f"{path}"
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        # Not chained, because Python's own error holds the content.
        raise SettingsError(f"{place} is not UTF-8 text at line {line}: write it as UTF-8") from None
    except OSError as error:
        # A file that nobody named need not be there, and then says nothing.
        if named_by is None and isinstance(error, FileNotFoundError):
            return ""
        reason = error.strerror or "unknown error"
        raise SettingsError(f"{place} cannot be read: {reason}; give the path of a readable file") from error


def _unknown(name: str, where: str, known: Iterable[str]) -> SettingsError:
    return SettingsError(f"there is no setting {name!r} in {where}{did_you_mean(name, known)}")
