"""Where a run is about to write: on the volume that is meant, on a kind of disk that keeps things, with room for all that is planned.

A run that finds the disk full after a night, or its checkpoints inside a container that is gone, has lost the night. Both can be known
before it starts. Source: spec/book-6 1.K.2-1.K.3. Quotas are not seen: the system reports the free space of the whole volume.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from posttrain.core.errors import StorageError

MOUNT_TABLE = Path("/proc/self/mounts")
EXPECTED_MOUNT = "POSTTRAIN_EXPECTED_MOUNT"
"""Environment variable that names the volume every run of this machine must lie on."""
_MEMORY = frozenset({"tmpfs", "ramfs", "devtmpfs"})
_LAYERS = frozenset({"overlay", "aufs", "fuse.fuse-overlayfs", "fuse-overlayfs"})
_NETWORK = re.compile(
    r"nfs\d*|cifs|smb\d*|smbfs|9p|afs|ceph|glusterfs|lustre|beegfs|gpfs|davfs|ncpfs"
    r"|fuse\.(sshfs|glusterfs|ceph|s3fs|gcsfuse|goofys|rclone|juicefs|curlftpfs|mount-s3|blobfuse2?|davfs2?)"
)
_ESCAPE = re.compile(r"\\([0-7]{3})")
_TIGHT = 0.8
"""Share of the free space from which a plan is mentioned."""


@dataclass(frozen=True, slots=True)
class Mount:
    """One line of the mount table. Example: Mount("/dev/nvme0n1", "/data", "ext4", ("rw", "relatime"))"""

    device: str
    point: str
    kind: str
    options: tuple[str, ...] = ()

    @property
    def writable(self) -> bool:
        """Whether it is mounted for writing."""
        return "ro" not in self.options

    @property
    def doubt(self) -> str | None:
        """Why one would rather not keep a run here; None on an ordinary disk."""
        if self.kind in _MEMORY:
            return "it is memory: gone when the machine restarts, and it takes from what training can use"
        if self.kind in _LAYERS:
            return "it is a container's own layer: slow to write, and gone with the container"
        if _NETWORK.fullmatch(self.kind):
            return "it is a network file system: every checkpoint waits for it; write to a local disk and copy afterwards"
        return None

    def __str__(self) -> str:
        return f"{self.point} ({self.kind}, {self.device})"


def mounts(table: Path = MOUNT_TABLE) -> list[Mount]:
    """The mount table, in the order of mounting; [] on a system that has none."""
    try:
        lines = table.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return []
    fields = [[_ESCAPE.sub(lambda code: chr(int(code[1], 8)), field) for field in line.split()] for line in lines]
    return [Mount(device, point, kind, tuple(options.split(","))) for device, point, kind, options, *_ in fields]


def mount_of(path: str | Path, among: Sequence[Mount] | None = None) -> Mount | None:
    """The mount that `path`, which need not exist yet, lies or would lie on; None when the system has no mount table."""
    real = Path(os.path.realpath(path))
    holding = [mount for mount in (mounts() if among is None else among) if real.is_relative_to(mount.point)]
    # of two mounts on one point the later one hides the earlier
    return max(enumerate(holding), key=lambda entry: (len(Path(entry[1].point).parts), entry[0]))[1] if holding else None


def check_place(path: str | Path, expected: str | None = None, among: Sequence[Mount] | None = None) -> str | None:
    """Look at the volume under a run directory. Returns a sentence to warn with, None when there is nothing to say.

    Args:
        expected: mount point, device or file system type that `path` must lie on, e.g. "/mnt/nvme" or "nfs".

    Raises StorageError when the volume is mounted for reading only, and when it is not the expected one.
    """
    mount = mount_of(path, among)
    if mount is None:
        if expected:
            raise StorageError(f"this system has no {MOUNT_TABLE} to find '{expected}' in; leave out the expected mount and check {path}")
        return None
    if expected and not _is(mount, expected):
        raise StorageError(f"{path} lies on {mount} and not on '{expected}'; mount that volume first, or choose an --out on it")
    if not mount.writable:
        raise StorageError(f"{path} lies on {mount}, which is mounted for reading only; remount it or choose another --out")
    return f"{path} lies on {mount}: {mount.doubt}" if mount.doubt and not expected else None


def _is(mount: Mount, expected: str) -> bool:
    if expected.startswith("/") and os.path.realpath(expected) == mount.point:
        return True
    return expected in (mount.device, mount.kind) or mount.kind == f"{expected}4"  # nfs4 is what nfs is called today


@dataclass(frozen=True, slots=True)
class Room:
    """Bytes that a run, or a stage of it, is going to write.

    Example: Room(checkpoint=10, copies=3, models=4, records=2, present=10).needed  ->  26: 3 checkpoints of 10, 4 and 2, of which a
    checkpoint of 10 is there already.
    """

    checkpoint: int
    """Of one checkpoint, its export included."""
    copies: int
    """Checkpoints that lie there at once: those kept and the one being written."""
    models: int = 0
    """Of all finished models that are kept."""
    records: int = 0
    present: int = 0
    """Of these, what an earlier process wrote."""

    @property
    def needed(self) -> int:
        """Bytes still to be written."""
        return max(0, self.checkpoint * self.copies + self.models + self.records - self.present)

    def __str__(self) -> str:
        parts = [f"{self.copies} checkpoint{'s' if self.copies > 1 else ''} of {size(self.checkpoint)} at once"]
        parts += [f"{size(self.models)} of finished models"] if self.models else []
        parts += [f"{size(self.records)} of records"] if self.records else []
        there = f", {size(self.present)} of it there already" if self.present else ""
        return f"{' + '.join(parts)}{there} = {size(self.needed)}"


def check_room(path: str | Path, room: Room, free: int | None = None) -> str | None:
    """Compare a plan with the free space at `path`. Returns a sentence to warn with when most of it will be used, else None.

    Raises StorageError with the figures when the plan does not fit.
    """
    free = free_bytes(path) if free is None else free
    if room.needed > free:
        raise StorageError(
            f"{path}: {room} needed, {size(free)} free; free some space, lower machine.save_total_limit, or set machine.export=false"
        )
    return f"{path}: {room} needed, {size(free)} free: little will be left" if room.needed > _TIGHT * free else None


def free_bytes(path: str | Path) -> int:
    """Bytes that this user may still write at `path`, which need not exist yet."""
    place = Path(os.path.realpath(path))
    while not place.exists():
        place = place.parent
    return shutil.disk_usage(place).free


def bytes_below(folder: str | Path) -> int:
    """Size of all files below a folder; 0 when there is none."""
    return sum(file.stat().st_size for file in Path(folder).rglob("*") if file.is_file())


def size(count: int) -> str:
    """Bytes as a person reads them, in powers of 1000. Example: 1_076_000_000 -> "1.08 GB"."""
    for unit, scale in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= scale:
            return f"{count / scale:.3g} {unit}" if count < 1000 * scale else f"{count / scale:.0f} {unit}"
    return f"{count} B"
