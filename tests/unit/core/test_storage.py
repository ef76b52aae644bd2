"""Where a run may lie and what fits there: the mount table is read right, doubt is one sentence, and refusals carry the figures."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from posttrain.core import storage
from posttrain.core.errors import StorageError
from posttrain.core.storage import Mount, Room, bytes_below, check_place, check_room, free_bytes, mount_of, mounts, size

ROOT = Mount("/dev/vda", "/", "ext4", ("rw", "relatime"))
DATA = Mount("/dev/nvme0n1", "/data", "xfs", ("rw",))
SHM = Mount("tmpfs", "/dev/shm", "tmpfs", ("rw",))
NFS = Mount("server:/export", "/net/share", "nfs4", ("rw", "hard"))
LOCKED = Mount("/dev/sr0", "/media", "iso9660", ("ro",))
TABLE = [ROOT, DATA, SHM, NFS, LOCKED]


def test_the_table_is_read_with_its_escapes(tmp_path):
    table = tmp_path / "mounts"
    table.write_text("/dev/vda / ext4 rw,relatime 0 0\n/dev/sdb /my\\040disk\\134x vfat ro,noexec 0 0\n")
    assert mounts(table) == [Mount("/dev/vda", "/", "ext4", ("rw", "relatime")), Mount("/dev/sdb", "/my disk\\x", "vfat", ("ro", "noexec"))]
    assert [mount.writable for mount in mounts(table)] == [True, False]
    assert mounts(tmp_path / "absent") == []


def test_this_machine_has_a_root_where_it_has_a_mount_table():
    found = mount_of("/")
    assert (found is not None) == storage.MOUNT_TABLE.exists()
    assert found is None or found.point == "/"


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/srv/a", ROOT),
        ("/data", DATA),
        ("/data/runs/deep/not/there", DATA),
        ("/database", ROOT),  # no prefix of a name
        ("/data/../home", ROOT),
        ("/dev/shm/x", SHM),
    ],
)
def test_the_innermost_mount_holds_a_path(path, expected):
    assert mount_of(path, TABLE) == expected


def test_of_two_mounts_on_one_point_the_later_hides_the_earlier():
    over = Mount("overlay", "/data", "overlay", ("rw",))
    assert mount_of("/data/x", [*TABLE, over]) == over
    assert mount_of("/data/x", [over, *TABLE]) == DATA


def test_a_link_is_followed_to_where_it_leads(tmp_path):
    (tmp_path / "link").symlink_to("/data/runs")
    assert mount_of(tmp_path / "link" / "a", TABLE) == DATA


@pytest.mark.parametrize("kind", ["ext4", "xfs", "btrfs", "zfs", "apfs", "f2fs", "fuseblk", "bcachefs", "virtiofs", "fuse.mergerfs"])
def test_ordinary_disks_raise_no_alarm(kind):
    assert check_place("/data/run", among=[ROOT, Mount("/dev/x", "/data", kind, ("rw",))]) is None


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("tmpfs", "it is memory"),
        ("overlay", "it is a container's own layer"),
        ("nfs4", "it is a network file system"),
        ("nfs", "it is a network file system"),
        ("cifs", "it is a network file system"),
        ("fuse.sshfs", "it is a network file system"),
        ("lustre", "it is a network file system"),
    ],
)
def test_a_doubtful_place_is_named_in_one_line(kind, words):
    said = check_place("/data/run", among=[ROOT, Mount("dev", "/data", kind, ("rw",))])
    assert said is not None
    assert said.startswith(f"/data/run lies on /data ({kind}, dev): {words}")
    assert "\n" not in said


def test_a_place_that_was_asked_for_is_not_doubted():
    assert check_place("/net/share/run", "/net/share", TABLE) is None


def test_a_read_only_mount_is_refused():
    with pytest.raises(StorageError, match=r"/media/run lies on /media \(iso9660, /dev/sr0\), which is mounted for reading only; remount"):
        check_place("/media/run", among=TABLE)


@pytest.mark.parametrize("expected", ["/data", "/data/", "/dev/nvme0n1", "xfs"])
def test_the_expected_volume_by_point_device_or_kind(expected):
    assert check_place("/data/run", expected, TABLE) is None


def test_nfs_is_also_nfs4():
    assert check_place("/net/share/run", "nfs", TABLE) is None


@pytest.mark.parametrize(
    ("path", "expected"), [("/data2/run", "/data"), ("/data/run", "/"), ("/srv/run", "nfs"), ("/data/run", "/dev/vda")]
)
def test_another_volume_than_expected_is_refused(path, expected):
    with pytest.raises(StorageError, match=f"{path} lies on .* and not on '{expected}'; mount that volume first"):
        check_place(path, expected, TABLE)


def test_a_folder_that_a_volume_was_never_mounted_on_is_refused():
    with pytest.raises(StorageError, match=r"lies on / \(ext4, /dev/vda\) and not on '/mnt/nvme'"):
        check_place("/mnt/nvme/runs/a", "/mnt/nvme", [ROOT])


def test_without_a_mount_table_only_an_expectation_fails(monkeypatch):
    monkeypatch.setattr(storage, "MOUNT_TABLE", Path("/absent"))
    assert check_place("/data/run", among=[]) is None
    with pytest.raises(StorageError, match="no /absent to find '/data' in"):
        check_place("/data/run", "/data", among=[])


def test_room_is_copies_models_and_records_less_what_is_there():
    # 3 x 10 + 4 + 2 = 36, 10 of it written
    room = Room(checkpoint=10, copies=3, models=4, records=2, present=10)
    assert room.needed == 26
    assert str(room) == "3 checkpoints of 10 B at once + 4 B of finished models + 2 B of records, 10 B of it there already = 26 B"
    assert Room(checkpoint=10, copies=1, present=50).needed == 0


def test_what_does_not_fit_is_refused_with_the_figures():
    room = Room(checkpoint=2 * 10**9, copies=3, models=540_000_000)
    with pytest.raises(StorageError) as caught:
        check_room("runs/a", room, free=6_539_999_999)
    assert str(caught.value) == (
        "runs/a: 3 checkpoints of 2 GB at once + 540 MB of finished models = 6.54 GB needed, 6.54 GB free; free some space, "
        "lower machine.save_total_limit, or set machine.export=false"
    )
    assert check_room("runs/a", room, free=6_540_000_000) is not None


def test_a_tight_fit_is_mentioned_and_a_loose_one_is_not():
    room = Room(checkpoint=8, copies=1)
    assert check_room("runs/a", room, free=10) is None
    said = check_room("runs/a", room, free=9)
    assert said == "runs/a: 1 checkpoint of 8 B at once = 8 B needed, 9 B free: little will be left"


def test_free_space_of_a_path_that_is_not_there_yet(tmp_path):
    there = free_bytes(tmp_path)
    assert there > 0
    assert abs(free_bytes(tmp_path / "a" / "b") - there) < 10**9
    status = os.statvfs(tmp_path)
    assert abs(there - status.f_bavail * status.f_frsize) < 10**9


def test_bytes_below_counts_files_of_all_depths(tmp_path):
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "x").write_bytes(b"12345")
    (tmp_path / "y").write_bytes(b"12")
    assert bytes_below(tmp_path) == 7
    assert bytes_below(tmp_path / "absent") == 0


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (1_076_000_000, "1.08 GB"), (22_345_678, "22.3 MB"), (3 * 10**15, "3000 TB")],
)
def test_sizes_for_people(count, text):
    assert size(count) == text


def test_it_imports_without_torch():
    code = "import sys, posttrain.core.storage; sys.exit('torch' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run([sys.executable, "-c", code], check=False, env=environment).returncode == 0
