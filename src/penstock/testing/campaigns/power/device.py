"""A disk whose power can fail: an ext4 in a file, mounted through a loop device.

`cut` is what the kernel offers for this very test: from that moment on nothing more reaches the disk, and every call
gets EIO. What was not synced, and what the journal of the file system had not committed, is gone when it is mounted
again. It is no more than that: what was sent to the disk counts as being on the medium, whether it was flushed or not.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import struct
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

IMAGE_BYTES: Final = 24 << 20
TOOL_SECONDS: Final = 60.0
_IOC_SHUTDOWN: Final = 0x8004587D  # _IOR('X', 125, __u32), EXT4_IOC_SHUTDOWN


class Cut(IntEnum):
    """What the file system still does when the power fails."""

    AFTER_SYNC = 0
    """It writes everything first, as if a sync came just in time."""
    AFTER_JOURNAL = 1
    """It commits its journal, but no data that is not on the disk yet."""
    AT_ONCE = 2
    """Nothing."""


class Device:
    """The file, and where it is mounted."""

    def __init__(self, directory: Path) -> None:
        self._image = directory / "image"
        self.mount_point = directory / "mount"
        self.mount_point.mkdir()

    def format(self, block_bytes: int) -> None:
        """Make an empty file system."""
        self._image.unlink(missing_ok=True)
        with self._image.open("wb") as image:
            image.truncate(IMAGE_BYTES)
        _run("mkfs.ext4", "-q", "-F", "-b", str(block_bytes), str(self._image))

    @contextmanager
    def mounted(self, options: str) -> Iterator[None]:
        """Mount it in this block; first what its journal holds is brought into place."""
        _run("mount", "-t", "ext4", "-o", f"loop,{options}", str(self._image), str(self.mount_point))
        try:
            yield
        finally:
            self._unmount()

    def _unmount(self) -> None:
        try:
            _run("umount", str(self.mount_point))
        except OSError:
            _run("umount", "-l", str(self.mount_point))  # whatever keeps it, it is not left behind
            raise

    def cut(self, how: Cut) -> None:
        """Let the power fail."""
        descriptor = os.open(self.mount_point, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.ioctl(descriptor, _IOC_SHUTDOWN, struct.pack("I", how))
        finally:
            os.close(descriptor)


def _run(tool: str, *arguments: str) -> None:
    path = shutil.which(tool, path="/usr/sbin:/usr/bin:/sbin:/bin")
    if path is None:
        raise OSError(f"{tool} is not installed")
    done = subprocess.run(  # noqa: S603 - a tool of the system
        [path, *arguments], capture_output=True, text=True, timeout=TOOL_SECONDS, check=False
    )
    if done.returncode:
        raise OSError(f"{tool} {' '.join(arguments)}: {done.stderr.strip()}")


def obstacle() -> str | None:
    """Say what keeps the power from failing here."""
    if sys.platform != "linux":
        return "Linux is needed: the power of an ext4 fails"
    if os.geteuid() != 0:
        return "root is needed to mount a file system"
    try:
        with tempfile.TemporaryDirectory(prefix="penstock-", dir="/tmp") as directory:
            device = Device(Path(directory))
            device.format(1024)
            with device.mounted("data=ordered"):
                device.cut(Cut.AT_ONCE)
    except OSError as error:
        return f"an ext4 in a file can be mounted and shut down, but not here: {error}"
    return None
