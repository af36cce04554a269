"""Session: what the options of `penstock` itself say, for whichever command follows them; and the store they name.

A store that does not exist is made only by a command that says so. All others tell that it is not there, so that a
mistyped path is an error and not a new, empty store.
"""

from __future__ import annotations

from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.errors import IntegrityError, StoreUnavailable, UsageError, did_you_mean
from penstock.settings import redact_url, resolve

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from penstock.ports import Store
    from penstock.rows import TopicInfo
    from penstock.settings import Resolved, Settings


@dataclass(slots=True)
class Session:
    """One run of the command line. A command gets it by `context.ensure_object(Session)`."""

    url: str | None = None
    config: Path | None = None
    debug: bool = False

    def resolve(self) -> Resolved:
        """Return the settings in force; whatever was given as an option wins over all other sources."""
        return resolve({"url": self.url, "config": self.config})

    @contextmanager
    def open_store(self, *, create: bool = False) -> Iterator[tuple[Store, Settings]]:
        """Open the store for a block, and close it at the end; with `create` it is made if it does not exist."""
        settings = self.resolve().settings
        with opened_store(settings, create=create) as store:
            yield store, settings

    def directory(self, *, must_exist: bool = True) -> tuple[Path, Settings]:
        """Return the directory of a `file:` store, for tools that look at the files themselves.

        If it must exist it holds at least the remains of a store.
        """
        settings = self.resolve().settings
        path = directory_of(settings.url)
        if must_exist and not _is_marked(path):
            _check_remains(path)
        return path, settings


@contextmanager
def opened_store(settings: Settings, *, create: bool = False) -> Iterator[Store]:
    """Open the store that settings name, as `Session.open_store` does."""
    from penstock.stores import open_store

    if settings.url.startswith("memory:"):
        raise UsageError(
            "a memory: store ends with its process, and a command would see an empty one of its own: "
            "give --url file:./directory"
        )
    check_url(settings.url)
    if settings.url.startswith("file:") and not create:
        check_store(directory_of(settings.url))
    with closing(open_store(settings.url, settings=settings)) as store:
        yield store


def check_url(url: str) -> None:
    """Raise `UsageError` if this can be no store's URL, whatever there is; in the words of the library."""
    from penstock.stores import open_store

    scheme, colon, _ = url.partition(":")
    if colon and scheme == "file":
        directory_of(url)
    elif url != "memory:" and not (colon and _is_registered(scheme)):
        try:
            open_store(url).close()  # which refuses it
        except StoreUnavailable as error:
            raise UsageError(str(error)) from None


def _is_registered(scheme: str) -> bool:
    """Say whether somebody else has a store for this scheme, which alone can tell what is wrong with a URL."""
    from importlib.metadata import entry_points

    return bool(entry_points(group="penstock.stores", name=scheme))


def directory_of(url: str) -> Path:
    """Return the directory of a `file:` URL; `UsageError` for any other."""
    from penstock.stores import path_of

    if not url.startswith("file:"):
        raise UsageError(
            f"this looks at the files of a store, and {redact_url(url)!r} has none: give --url file:./directory"
        )
    try:
        return path_of(url)
    except StoreUnavailable as error:
        raise UsageError(str(error)) from None


def check_store(path: Path) -> None:
    """Raise `StoreUnavailable` if there is no store, `IntegrityError` if it does not know what it is."""
    if not _is_marked(path):
        _check_remains(path)
        raise IntegrityError(f"{path} has lost its penstock.json: `penstock repair` writes it anew")


def _is_marked(path: Path) -> bool:
    from penstock.stores.file.store import MARKER_FILE

    return (path / MARKER_FILE).exists()


def _check_remains(path: Path) -> None:
    if not any((path / name).exists() for name in ("control.db", "topics")):
        raise StoreUnavailable(
            f"there is no store in {path}: check --url, PENSTOCK_URL or penstock.toml; "
            f"`penstock topics create` and `penstock publish --create` make one"
        )


def find_topic(store: Store, name: str, *, advice: str = "") -> TopicInfo:
    """Return the topic of this name; `UsageError` if there is none, naming the nearest."""
    known = {info.name: info for info in store.log.topics()}
    if name not in known:
        near = did_you_mean(name, [other for other in known if not other.startswith("_")])
        raise UsageError(f"there is no topic {name!r}{near}; {advice or '`penstock topics` lists them'}")
    return known[name]
