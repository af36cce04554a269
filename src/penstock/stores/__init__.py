"""Stores, and how a URL finds one.

A store is chosen by the scheme of its URL. The ones below ship with Penstock and are imported when they
are first opened, so that nobody pays for a database driver they do not use. Others register themselves as
an entry point of the group `penstock.stores`, named for their scheme: a function that takes the URL, a
clock and the settings, and returns a `Store`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from penstock.errors import StoreUnavailable, did_you_mean
from penstock.settings import Settings, redact_url

if TYPE_CHECKING:
    from penstock.clock import Clock
    from penstock.ports import Store


class StoreFactory(Protocol):
    """What an entry point of the group `penstock.stores` is."""

    def __call__(self, url: str, *, clock: Clock | None, settings: Settings) -> Store:
        """Open the store that this URL names."""


def _open_memory(url: str, *, clock: Clock | None, settings: Settings) -> Store:
    from penstock.stores.memory import MemoryStore

    if url != "memory:":
        raise StoreUnavailable(
            f"'memory:' takes nothing after it, this is {url!r}: every opening is a new, empty store"
        )
    return MemoryStore(clock=clock, limits=settings.memory)


def _open_file(url: str, *, clock: Clock | None, settings: Settings) -> Store:
    from penstock.stores.file.filesystem import check_filesystem

    path = path_of(url)
    # First, because what follows cannot even be imported on systems where it cannot work.
    check_filesystem(path)
    from penstock.clock import SystemClock
    from penstock.stores.file.platform import Platform
    from penstock.stores.file.store import FileStore

    return FileStore(path, settings=settings.file, platform=Platform(clock=clock or SystemClock()))


def path_of(url: str) -> Path:
    """Return the directory that `file:./data`, `file:/data` or `file:///data` names."""
    rest = url.removeprefix("file:")
    if rest.startswith("//"):
        host, slash, path = rest[2:].partition("/")
        if host not in {"", "localhost"} or not slash:
            raise StoreUnavailable(f"{url!r} names the host {host!r}: a file store is a local directory, file:./data")
        rest = f"/{path}"
    if not rest or "\0" in rest:
        raise StoreUnavailable(f"{url!r} names no directory: write file:./data, or file:/var/lib/data")
    return Path(rest).expanduser()


_SHIPPED: dict[str, StoreFactory] = {"memory": _open_memory, "file": _open_file}

_PLANNED = {"penstock", "postgresql", "mongodb"}
"""Schemes that the design names and this version does not have; told apart from a typing error."""


def open_store(url: str, *, clock: Clock | None = None, settings: Settings | None = None) -> Store:
    """Open the store that `url` names, or raise `StoreUnavailable` saying what to do."""
    scheme, colon, _ = url.partition(":")
    if not colon:
        raise StoreUnavailable(f"{url!r} is not a store's URL: it needs a scheme, as in 'memory:'")
    factory = _SHIPPED.get(scheme) or _registered(scheme)
    if factory is None:
        shown = redact_url(url)
        if scheme in _PLANNED:
            raise StoreUnavailable(f"{shown!r}: this version has no {scheme!r} store yet; it has {_known()}")
        raise StoreUnavailable(f"{shown!r}: there is no store for {scheme!r}{did_you_mean(scheme, _SHIPPED)}")
    return factory(url, clock=clock, settings=settings or Settings())


def _known() -> str:
    return ", ".join(f"{scheme + ':'!r}" for scheme in sorted(_SHIPPED))


def _registered(scheme: str) -> StoreFactory | None:
    from importlib.metadata import entry_points

    for entry in entry_points(group="penstock.stores", name=scheme):
        try:
            factory: StoreFactory = entry.load()
        except ImportError as error:
            raise StoreUnavailable(
                f"the store for {scheme!r} ({entry.value}) cannot be imported: {error}; install what it needs"
            ) from error
        return factory
    return None
