"""The file systems that are mounted, and what /etc/fstab says should be."""

from pathlib import Path
from typing import NamedTuple

TABLE, FSTAB = Path("/proc/self/mountinfo"), Path("/etc/fstab")
REMOTE = {
    "nfs", "nfs4", "cifs", "smb3", "9p", "lustre", "ceph", "gpfs", "beegfs", "wekafs", "fuse.ceph", "fuse.glusterfs",
    "fuse.juicefs", "fuse.sshfs",
}  # fmt: skip
_SHARED = ("zfs", "bcachefs", "virtiofs", "fuse", "overlay")  # their room is not that of what is mounted


class Mount(NamedTuple):
    """``root``: the folder of the file system that is at ``point``; "/" unless that is a bind mount or a subvolume."""

    point: Path
    root: str
    kind: str  # of file system


def mount_of(path: Path, table: Path = TABLE) -> Mount:
    """Where ``path``, which need not exist, is or would be; an unknown kind at "/" if the table cannot be read."""
    found, path = Mount(Path("/"), "", ""), path.resolve()
    for line in filter(None, _lines(table)):
        columns, _, rest = (part.split() for part in line.partition(" - "))
        point = Path(_plain(columns[4]))
        if path.is_relative_to(point) and len(point.parts) >= len(found.point.parts):
            found = Mount(point, columns[3], rest[0])
    return found


def has_own(path: Path, table: Path = TABLE) -> bool:
    """Whether a whole file system is mounted at ``path`` itself."""
    mount = mount_of(path, table)
    shared = mount.kind in REMOTE or mount.kind.startswith(_SHARED)
    return mount.root == "/" and not shared and mount.point == path.resolve()


def unmounted(path: Path, table: Path = TABLE, fstab: Path = FSTAB) -> Path | None:
    """A folder above ``path`` where a file system should be mounted, by ``fstab``, and none is."""
    path, mount = path.resolve(), mount_of(path, table)
    entries = (line.split() for line in _lines(fstab))
    entries = (each for each in entries if len(each) > 1 and each[0][0] != "#")
    wanted = (each for each in entries if "noauto" not in "".join(each[3:4]).split(","))
    points = (Path(_plain(columns[1])) for columns in wanted)
    above = (point for point in points if path.is_relative_to(point) and not mount.point.is_relative_to(point))
    return next(above, None) if mount.kind else None


def _lines(table: Path) -> list[str]:
    try:
        return table.read_text("utf-8", "surrogateescape").split("\n")
    except OSError:
        return []


def _plain(text: str) -> str:
    return text.replace("\\040", " ")
