"""A lake as a directory: its manifest, where its files are, and every change that is made to it.

A change goes in steps, and a process may be killed between any two of them:

1. Files are written to `_lake/files`, where nobody looks for them, and synced.
2. The next version of the manifest is put: from now on they are in the lake, and whoever reads by it finds them.
3. Files that were replaced are moved to `_lake/files`, and new ones to where globs find them.

After a death before 2 there are files that no version names. After one before 3 everything is there, though a glob does
not see all of it yet. `tidy` puts both right; any archiver calls it, and it may run beside any other.

Files are removed when no version that is kept names them, and when they have lain about for a day: a reader that has
found a version has that long, and so has a task that has written a file which nobody has named yet.
"""

from __future__ import annotations

import uuid
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.clock import Clock, SystemClock
from penstock.errors import IntegrityError, StoreUnavailable, UsageError
from penstock.lake.entries import HIDDEN, NAME, Entry, LakeFile, Manifest, decode, encode
from penstock.versions import Versions, local_directory, sync_directory

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

ATTEMPTS_MAX: Final = 1_000
"""Each attempt that fails means that another archiver has succeeded; so many in a row mean that something is wrong."""

GRACE_SECONDS: Final = 24 * 3600.0
"""For so long a file that nothing names is left alone."""


class Tidied(NamedTuple):
    """What `tidy` has put right."""

    shown: int = 0
    """Files of the lake that globs could not see."""
    hidden: int = 0
    """Files that globs could see and that are not, or no longer, in the lake."""
    removed: int = 0


class Committed(NamedTuple):
    """What became of a change."""

    manifest: Manifest
    added: list[Entry]
    refused: list[Entry]
    """What another archiver has put before us, in part at least; its files are left to `tidy`."""


class Lake:
    """A directory of Parquet files with a manifest. Safe for several processes; nothing stays open."""

    def __init__(self, where: str | Path, *, clock: Clock | None = None, grace_seconds: float = GRACE_SECONDS) -> None:
        self.directory = local_directory(where)
        self._versions = Versions(self.directory / "_lake")
        self._clock = clock or SystemClock()
        self._grace_seconds = grace_seconds
        self._known: tuple[int, Manifest] | None = None

    def __repr__(self) -> str:
        return f"<Lake {self.directory}>"

    @property
    def hidden(self) -> Path:
        """Where files are that globs shall not find."""
        return self.directory / "_lake" / "files"

    # --- the manifest ---------------------------------------------------------------------------

    def manifest(self) -> Manifest:
        """Return what the lake holds now; `UsageError` if there is no lake."""
        return self._latest()[1]

    @property
    def version(self) -> int:
        """The number of the manifest that holds now."""
        return self._latest()[0]

    def exists(self) -> bool:
        """Say whether there is a lake."""
        return bool(self._versions.numbers())

    def _latest(self) -> tuple[int, Manifest]:
        if self._known is not None and self._versions.numbers()[-1:] == [self._known[0]]:
            return self._known
        found = self._versions.latest()
        if found is None:
            raise UsageError(
                f"there is no lake in {self.directory}: `penstock pipeline archive TOPIC --lake DIR` makes one"
            )
        self._known = found.number, decode(found.body)
        return self._known

    def create(self) -> Manifest:
        """Make an empty lake, unless there is one; return what it holds."""
        if not self.exists():
            self._versions.put(0, encode(Manifest(uuid.uuid4().hex)))
        self.hidden.mkdir(exist_ok=True, mode=0o700)
        return self.manifest()

    def commit(self, entries: Sequence[Entry], replaced: Sequence[LakeFile] = ()) -> Committed:
        """Add entries, as far as nothing of their ranges is in the lake yet; then make them visible.

        Entries that replace files are added together or not at all: not if one of those files is not in the lake any
        more.
        """
        for _ in range(ATTEMPTS_MAX):
            number, manifest = self._latest()
            if replaced:
                added = list(entries) if manifest.names.issuperset(file.name for file in replaced) else []
            else:
                added = manifest.fitting(entries)
            refused = sorted(set(entries).difference(added))
            if not added:
                return Committed(manifest, [], refused)
            self._check_there(added)
            changed = manifest.changed(added, replaced)
            if self._versions.put(number + 1, encode(changed)):
                self._known = number + 1, changed
                self._hide(replaced)
                self._show(entry for entry in added if isinstance(entry, LakeFile))
                return Committed(changed, added, refused)
        raise StoreUnavailable(f"{self.directory}: {ATTEMPTS_MAX:,} times another archiver has changed the lake first")

    def _check_there(self, added: Iterable[Entry]) -> None:
        """Refuse to name what is not there: somebody may have removed it, believing that nobody wants it."""
        for entry in added:
            if isinstance(entry, LakeFile) and not (self.hidden / entry.hidden_name).exists():
                raise IntegrityError(
                    f"{self.hidden / entry.hidden_name} was written, and is gone: nothing was archived"
                )

    # --- files ----------------------------------------------------------------------------------

    def path(self, file: LakeFile) -> Path:
        """Return where a file is now; `FileNotFoundError` if it is nowhere."""
        visible, hidden = self.directory / file.path, self.hidden / file.hidden_name
        for path in (visible, hidden, visible):  # it may be moved while we look
            if path.exists():
                return path
        raise FileNotFoundError(f"{visible} is not there, nor in {hidden.parent}")

    def _show(self, files: Iterable[LakeFile]) -> int:
        moved = 0
        for file in files:
            target = self.directory / file.path
            self._make_directory(target.parent)
            with suppress(FileNotFoundError):  # another has moved it
                (self.hidden / file.hidden_name).rename(target)
                moved += 1
        return moved

    def _make_directory(self, directory: Path) -> None:
        if not directory.exists():
            for path in (directory.parent, directory):
                path.mkdir(exist_ok=True, mode=0o700)
                sync_directory(path.parent)

    def _hide(self, files: Iterable[LakeFile]) -> int:
        moved = 0
        for file in files:
            with suppress(FileNotFoundError):
                (self.directory / file.path).rename(self.hidden / file.hidden_name)
                moved += 1
        return moved

    def tidy(self) -> Tidied:
        """Show what is in the lake, hide what is not, and remove what nobody can want any more."""
        waiting = (
            {path.name.removesuffix(HIDDEN): path for path in self.hidden.iterdir()} if self.hidden.exists() else {}
        )
        seen = list(self.directory.glob("topic=*/date=*/*.parquet"))
        # Read after the files were listed: one that is put and shown meanwhile is not taken for a stranger.
        manifest = self.manifest()
        shown = self._show(file for file in manifest.files if file.name in waiting)
        hidden = 0
        for path in seen:
            if NAME.fullmatch(path.name) and path.name not in manifest.names:
                with suppress(FileNotFoundError):
                    path.rename(self.hidden / f"{path.name}{HIDDEN}")
                    hidden += 1
        unnamed = [path for name, path in waiting.items() if name not in manifest.names]
        return Tidied(shown, hidden, self._remove(unnamed))

    def _remove(self, unnamed: Sequence[Path]) -> int:
        oldest = self._clock.time_us() / 1e6 - self._grace_seconds
        old = []
        for path in unnamed:
            with suppress(FileNotFoundError):
                # A move changes it, too: what was hidden a moment ago is not old.
                if path.stat().st_ctime < oldest:
                    old.append(path)
        if not old:
            return 0
        wanted: set[str] = set()
        for number in self._versions.numbers():
            with suppress(FileNotFoundError):  # it was old, and is gone since
                wanted |= decode(self._versions.read(number)).names
        removed = [path for path in old if path.name.removesuffix(HIDDEN) not in wanted]
        for path in removed:
            path.unlink(missing_ok=True)
        return len(removed)
