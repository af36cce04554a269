from __future__ import annotations

import ctypes
import os
from pathlib import Path

import pytest

from penstock.errors import StoreUnavailable
from penstock.stores.file import filesystem
from penstock.stores.file.filesystem import (
    Mount,
    check_filesystem,
    describe,
    find_mount,
    nearest_existing,
    parse_mountinfo,
    read_mounts,
    why_refused,
)

MOUNTINFO = r"""
22 27 0:21 / /proc rw,nosuid shared:12 - proc proc rw
27 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw,discard
31 27 0:41 / /srv/net rw,relatime shared:5 master:3 - nfs4 server:/export rw,vers=4.2,hard
32 31 259:1 / /srv/net/local rw - xfs /dev/nvme0n1p1 rw
33 27 0:43 / /srv/with\040space\134and\011more rw - fuse.sshfs user@host:/a\040b rw,user_id=0
34 27 254:0 /home/shared /srv/bound rw,noatime shared:1 - ext4 /dev/vda rw,discard
35 27 0:44 / /run rw,nosuid - tmpfs tmpfs rw,size=10k
36 27 0:45 / /merged rw - overlay overlay rw,lowerdir=/l,upperdir=/u,workdir=/w
a line that is none
37 x 0:45 / /bad rw - nfs nfs rw
38 27 0:45 / /bad rw
"""


def mounted(text: str, path: str) -> Mount:
    found = find_mount(Path(path), parse_mountinfo(text))
    assert found is not None
    return found


def check(text: str, path: str) -> None:
    check_filesystem(Path(path), "linux", lambda _: parse_mountinfo(text))


# --- which mount holds a path -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "type_"),
    [
        ("/", "ext4"),
        ("/srv/network", "ext4"),  # not below /srv/net
        ("/srv/net", "nfs4"),
        ("/srv/net/data/not/yet/there", "nfs4"),
        ("/srv/net/local/data", "xfs"),
        ("/srv/with space\\and\tmore/data", "fuse.sshfs"),
        ("/srv/bound/data", "ext4"),
        ("/merged/data", "overlay"),
        ("/bad/data", "ext4"),
    ],
)
def test_the_deepest_mount_on_the_way_holds_a_path(path: str, type_: str) -> None:
    assert mounted(MOUNTINFO, path).type == type_


def test_device_and_options_are_read_from_both_sides_of_the_dash() -> None:
    mount = mounted(MOUNTINFO, "/srv/with space\\and\tmore")
    assert mount.device == "user@host:/a b"
    assert mounted(MOUNTINFO, "/srv/bound").options == ("rw", "noatime", "discard")


def test_of_stacked_mounts_the_last_one_wins() -> None:
    lines = [
        "1 1 0:1 / / rw - rootfs rootfs rw",
        "20 1 8:1 / / rw - ext4 /dev/sda1 rw",
        "21 20 8:2 / /data rw - xfs /dev/sdb1 rw",
        "22 21 0:50 / /data rw - nfs server:/ rw",
    ]
    assert mounted("\n".join(lines), "/data/x").type == "nfs"
    assert mounted("\n".join(reversed(lines)), "/data/x").type == "nfs"
    assert mounted("\n".join(lines), "/other").type == "ext4"


def test_a_mount_above_hides_a_deeper_one() -> None:
    hidden = "\n".join(
        [
            "20 1 8:1 / / rw - ext4 /dev/sda1 rw",
            "21 20 8:2 / /data rw - xfs /dev/sdb1 rw",
            "22 21 8:3 / /data/deep rw - btrfs /dev/sdc1 rw",
            "23 21 0:50 / /data rw - nfs server:/ rw",
        ]
    )
    assert mounted(hidden, "/data/deep/x").type == "nfs"


def test_without_parents_the_last_mount_of_the_root_wins() -> None:
    assert mounted("5 1 0:1 / / rw - ext4 a rw\n6 2 0:2 / / rw - xfs b rw", "/x").type == "xfs"


def test_where_no_mount_is_known_the_path_is_allowed() -> None:
    assert find_mount(Path("/data"), []) is None
    check("", "/data")


def test_a_name_with_a_strange_line_break_stays_one_line() -> None:
    text = "20 1 8:1 / / rw - ext4 a rw\n21 20 0:9 / /a\x0cb\u2028c rw - nfs server:/ rw\n"
    assert mounted(text, "/a\x0cb\u2028c/data").type == "nfs"


# --- what is refused --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("type_", "words"),
    [
        ("nfs", "network"),
        ("nfs4", "network"),
        ("cifs", "network"),
        ("SMB3", "network"),
        ("ceph", "network"),
        ("davfs", "network"),
        ("9p", "host"),
        ("virtiofs", "host"),
        ("vboxsf", "host"),
        ("fuse", "user-space"),
        ("fuseblk", "user-space"),
        ("fuse.glusterfs", "user-space"),
        ("macfuse", "user-space"),
        ("ocfs2", "cluster"),
    ],
)
def test_what_cannot_lock_share_or_sync_is_refused(type_: str, words: str) -> None:
    reason = why_refused(Mount(type_, Path("/")))
    assert reason is not None
    assert words in reason


@pytest.mark.parametrize(
    "type_", ["ext4", "xfs", "btrfs", "zfs", "overlay", "tmpfs", "apfs", "f2fs", "bcachefs", "fused", "new"]
)
def test_what_is_local_or_unknown_is_allowed(type_: str) -> None:
    assert why_refused(Mount(type_, Path("/"))) is None


def test_the_refusal_says_what_it_is_and_what_to_use() -> None:
    with pytest.raises(StoreUnavailable, match=r"file:/srv/net/data: /srv/net is a network file system \(nfs4\)") as e:
        check(MOUNTINFO, "/srv/net/data")
    assert "use a directory on a local disk" in str(e.value)
    assert "server:/export" not in str(e.value)


def test_a_link_is_judged_by_where_it_leads(tmp_path: Path) -> None:
    real, link = tmp_path / "real", tmp_path / "link"
    real.mkdir()
    link.symlink_to(real)
    mounts = f"20 1 8:1 / / rw - ext4 a rw\n21 20 0:9 / {os.path.realpath(real)} rw - nfs server:/ rw\n"
    with pytest.raises(StoreUnavailable):
        check(mounts, f"{link}/data")
    check(mounts, f"{tmp_path}/other")


def test_windows_is_refused_with_what_to_use() -> None:
    with pytest.raises(StoreUnavailable, match=r"no 'file' store on Windows.*use 'memory:', or.*WSL"):
        check_filesystem(Path("data"), "win32")


@pytest.mark.parametrize(
    ("mount", "refused"),
    [
        (Mount("apfs", Path("/")), False),
        (Mount("smbfs", Path("/")), True),
        (Mount("a_new_one", Path("/"), local=False), True),
    ],
)
def test_macos_is_judged_by_type_and_by_its_own_word(mount: Mount, refused: bool) -> None:
    if refused:
        with pytest.raises(StoreUnavailable, match="network"):
            check_filesystem(Path("/Users/x/data"), "darwin", lambda _: [mount])
    else:
        check_filesystem(Path("/Users/x/data"), "darwin", lambda _: [mount])


def test_the_structure_of_macos_has_its_size() -> None:
    assert ctypes.sizeof(filesystem._Statfs) == 2168
    assert filesystem._Statfs.type_name.offset == 72


# --- describing -------------------------------------------------------------------------------


def test_this_machine_is_described(tmp_path: Path) -> None:
    found = describe(tmp_path / "not" / "yet" / "there")
    assert found.total_bytes >= found.free_bytes > 0
    assert tmp_path.resolve().is_relative_to(found.mount_point)
    assert found.type == find_type(tmp_path)


def find_type(path: Path) -> str:
    mount = find_mount(path.resolve(), read_mounts(path))
    return "" if mount is None else mount.type


@pytest.mark.parametrize(("path", "persistent"), [("/run/data", False), ("/srv/bound", True)])
def test_memory_is_allowed_and_told(path: str, persistent: bool) -> None:
    check(MOUNTINFO, path)
    assert describe(Path(path), lambda _: parse_mountinfo(MOUNTINFO)).persistent == persistent


def test_a_description_without_mounts_says_unknown(tmp_path: Path) -> None:
    found = describe(tmp_path, lambda _: [])
    assert (found.type, found.mount_point, found.persistent) == ("", Path("/"), True)


def test_the_nearest_existing_directory_is_found(tmp_path: Path) -> None:
    assert nearest_existing(tmp_path / "a" / "b") == tmp_path
