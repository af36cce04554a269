"""Which file systems a store may live on.

A store needs record locks that hold between processes, memory that they share through a file (SQLite's WAL), and a
sync that returns when the data is on the medium. Network, cluster and user-space file systems lack one or the other,
sometimes without an error, so they are refused by their type: before anything is written, not after it was lost.

What is unknown is allowed. A type that is not listed is nearly always a local one, and where the mounts cannot be
read there is nothing to go by.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from penstock.errors import StoreUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

MOUNTINFO_BYTES_MAX = 16 << 20

# fmt: off
_NETWORK = frozenset({
    "nfs", "nfs3", "nfs4", "cifs", "smb2", "smb3", "smbfs", "ncpfs", "afs", "afpfs", "coda", "webdav", "davfs", "ftp",
    "ceph", "glusterfs", "lustre", "gpfs", "beegfs", "fhgfs", "pvfs2", "orangefs", "moosefs", "quobyte", "wekafs",
    "panfs",
})
# fmt: on
# Several machines write to one disk: their locks may hold, memory that they share through a file does not.
_CLUSTER = frozenset({"ocfs2", "ocfs2_dlmfs", "gfs", "gfs2", "vmfs"})
# The directory of a host, seen by a virtual machine or container. `virtiofs` belongs here although it can lock: guest
# and host do not see each other's mapped pages, and databases in WAL mode on it were seen to break within a minute.
_HOST = frozenset({"9p", "v9fs", "virtiofs", "vboxsf", "prl_fs", "vmhgfs", "hgfs", "drvfs", "hostfs"})
# A process does what the kernel should: what its sync and its locks are worth, nobody can tell. That holds also for
# `fuseblk`, which is a local disk under such a process.
_USER_SPACE = frozenset({"fuse", "fuseblk", "fuse-t", "macfuse", "osxfuse", "fusefs"})

_VOLATILE = frozenset({"tmpfs", "ramfs", "rootfs", "devtmpfs", "hugetlbfs"})
"""Local and quick, and empty after a reboot."""


@dataclass(frozen=True, slots=True)
class Mount:
    """One mounted file system."""

    type: str
    mount_point: Path
    device: str = ""
    options: tuple[str, ...] = ()
    id: int = 0
    parent: int = -1
    """The mount on which this one is mounted."""
    local: bool = True
    """False if the system itself says that it is not; only macOS does."""


FREE_BYTES_MIN: Final = 1 << 30
"""With less than this free, or less than a tenth of a small disk, space is short."""


@dataclass(frozen=True, slots=True)
class FilesystemInfo:
    """What is known of the file system that holds a path; an empty type is an unknown one."""

    type: str
    mount_point: Path
    device: str
    options: tuple[str, ...]
    free_bytes: int
    """What this user may still write."""
    total_bytes: int
    persistent: bool
    """Whether what is written is there after a reboot."""


def space_is_short(free_bytes: int, total_bytes: int) -> bool:
    """Say whether so little is free that writing may end soon."""
    return free_bytes < min(FREE_BYTES_MIN, total_bytes // 10)


# --- asking -----------------------------------------------------------------------------------


def read_mounts(path: Path) -> list[Mount]:
    """Return the mounts of this machine among which is that of `path`; empty if they cannot be read."""
    existing = nearest_existing(path)
    try:
        if sys.platform == "darwin":
            return [_ask_darwin(existing)]
        # Some directories are mounted when they are first used. This uses it.
        os.statvfs(existing)
        with open("/proc/self/mountinfo", "rb") as file:  # noqa: PTH123 - not a file of ours
            text = file.read(MOUNTINFO_BYTES_MAX).decode("utf-8", "surrogateescape")
    except OSError:
        return []
    return parse_mountinfo(text)


def check_filesystem(
    path: Path, platform_name: str = sys.platform, mounts: Callable[[Path], list[Mount]] = read_mounts
) -> None:
    """Raise `StoreUnavailable` if a store in this directory, which need not exist yet, could lose or damage data."""
    if platform_name == "win32":
        raise StoreUnavailable(
            f"file:{path}: there is no 'file' store on Windows, whose locks and syncs are others: "
            f"use 'memory:', or run the program in WSL, in a directory of its own disk (not under /mnt/c)"
        )
    real = _real(path)
    mount = find_mount(real, mounts(real))
    reason = None if mount is None else why_refused(mount)
    if mount is not None and reason is not None:
        raise StoreUnavailable(
            f"file:{path}: {mount.mount_point} is {reason} ({mount.type}), where locks, shared memory or syncs cannot "
            f"be relied on: use a directory on a local disk; to share events between machines, use a store that is a "
            f"server, such as a database"
        )


def describe(path: Path, mounts: Callable[[Path], list[Mount]] = read_mounts) -> FilesystemInfo:
    """Return what holds this path, or would if it existed."""
    real = _real(path)
    mount = find_mount(real, mounts(real)) or Mount("", Path(real.anchor))
    space = os.statvfs(nearest_existing(real))
    return FilesystemInfo(
        type=mount.type,
        mount_point=mount.mount_point,
        device=mount.device,
        options=mount.options,
        free_bytes=space.f_bavail * space.f_frsize,
        total_bytes=space.f_blocks * space.f_frsize,
        persistent=mount.type not in _VOLATILE,
    )


def why_refused(mount: Mount) -> str | None:
    """Say what kind of file system this is, if it is one to refuse."""
    type_ = mount.type.lower()
    if type_ in _USER_SPACE or type_.startswith(("fuse.", "fusefs_")):
        return "a user-space file system"
    if type_ in _HOST:
        return "a directory of the host of this machine"
    if type_ in _CLUSTER:
        return "a file system of a cluster"
    if type_ in _NETWORK or not mount.local:
        return "a network file system"
    return None


def nearest_existing(path: Path) -> Path:
    """Return the path, or the nearest directory above it that exists."""
    # Unlike `Path.exists`, this takes what may not be looked at for missing.
    return next((above for above in (path, *path.parents) if os.path.exists(above)), Path(path.anchor))  # noqa: PTH110


def _real(path: Path) -> Path:
    # Unlike `Path.resolve`, this takes a loop of links for a path as any other.
    return Path(os.path.realpath(path))


# --- the mounts of Linux ----------------------------------------------------------------------

_OCTAL = re.compile(r"\\([0-7]{3})")


def parse_mountinfo(text: str) -> list[Mount]:
    """Read `/proc/self/mountinfo`; a line that does not look like one is left out.

    Of a line `36 35 98:0 /root /mount/point rw,noatime shared:1 - ext4 /dev/sda1 rw` the number of fields before the
    dash varies. The root, which is another one than `/` for a bind mount, is of no interest.
    """
    mounts = []
    for line in text.split("\n"):  # not `splitlines`: names may hold what else it takes for an end
        before, dash, after = line.partition(" - ")
        here, there = before.split(" "), after.split(" ")
        if dash and len(here) >= 6 and len(there) >= 2 and here[0].isdecimal() and here[1].isdecimal():
            options = [*here[5].split(","), *",".join(there[2:]).split(",")]
            mounts.append(
                Mount(
                    type=there[0],
                    mount_point=Path(_unescape(here[4])),
                    device=_unescape(there[1]),
                    options=tuple(dict.fromkeys(filter(None, options))),
                    id=int(here[0]),
                    parent=int(here[1]),
                )
            )
    return mounts


def _unescape(field: str) -> str:
    return _OCTAL.sub(lambda found: chr(int(found[1], 8)), field)


def find_mount(path: Path, mounts: Sequence[Mount]) -> Mount | None:
    """Return the mount that holds a path without links; None if none does.

    This goes as the kernel goes: from mount to mount, each time to the first one on the way that is mounted on the
    one before. The longest mount point alone would not do: another mount may lie above it and hide it.
    """
    on_the_way = [mount for mount in mounts if path.is_relative_to(mount.mount_point)]
    known = {mount.id for mount in on_the_way}
    # The root is mounted on itself, or on what cannot be seen from here.
    steps = [mount for mount in on_the_way if mount.parent not in known or mount.parent == mount.id]
    found = None
    while steps:
        # Reversed, since of several at the same place the last one lies on top.
        found = min(reversed(steps), key=lambda mount: len(mount.mount_point.parts))
        known.discard(found.id)
        steps = [mount for mount in on_the_way if mount.parent == found.id and mount.id in known]
    return found


# --- the mounts of macOS ----------------------------------------------------------------------

_MNT_LOCAL = 0x1000


class _Statfs(ctypes.Structure):
    """`struct statfs` of macOS, with 64-bit inodes."""

    _fields_ = (
        ("block_size", ctypes.c_uint32),
        ("io_size", ctypes.c_int32),
        ("blocks_and_files", ctypes.c_uint64 * 5),
        ("id", ctypes.c_int32 * 2),
        ("owner", ctypes.c_uint32),
        ("type", ctypes.c_uint32),
        ("flags", ctypes.c_uint32),
        ("subtype", ctypes.c_uint32),
        ("type_name", ctypes.c_char * 16),
        ("mounted_on", ctypes.c_char * 1024),
        ("mounted_from", ctypes.c_char * 1024),
        ("reserved", ctypes.c_uint32 * 8),
    )


def _ask_darwin(path: Path) -> Mount:
    system = ctypes.CDLL(None, use_errno=True)
    # On Intel the plain name is that of the old structure, with 32-bit inodes.
    statfs = getattr(system, "statfs$INODE64", None) or system.statfs
    found = _Statfs()
    if statfs(os.fsencode(path), ctypes.byref(found)) != 0:
        raise OSError(ctypes.get_errno(), "statfs failed", os.fspath(path))
    return Mount(
        type=found.type_name.decode(),
        mount_point=Path(os.fsdecode(found.mounted_on)),
        device=os.fsdecode(found.mounted_from),
        local=bool(found.flags & _MNT_LOCAL),
    )
