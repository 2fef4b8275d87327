"""The disk tier's directory where other users may have prepared it: a scratch disk that all may write to."""

import os
import subprocess
from pathlib import Path

import pytest
from disk_support import DiskTierProcess, make_pool

from vllm_kvtier.doctor.machine.disk import disk
from vllm_kvtier.errors import KVTierError
from vllm_kvtier.store import linux
from vllm_kvtier.store.protocol import PAGE
from vllm_kvtier.store.tiers.disk import file_ops, mounts
from vllm_kvtier.store.tiers.disk import journal as j
from vllm_kvtier.store.tiers.disk.directory import open_storage
from vllm_kvtier.store.tiers.disk.file_ops import Files
from vllm_kvtier.store.tiers.process import protocol as m

FILES, ANOTHER = Files(), 4321
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user")


@pytest.fixture
def folder(tmp_path) -> Path:
    made = tmp_path / "kvtier"
    made.mkdir(mode=0o700)
    return made


def opened(folder: Path) -> None:
    storage = open_storage(FILES, str(folder), 1 << 20, preallocate=False, direct=False)
    try:
        assert storage.writable
    finally:
        storage.close(FILES)


def refused(folder: Path, words: str) -> None:
    with pytest.raises(KVTierError, match=words):
        opened(folder)


@as_root
def test_disk_folder_of_another_user_is_refused(folder):
    os.chown(folder, ANOTHER, ANOTHER)
    refused(folder, f"belongs to user {ANOTHER}")
    assert not list(folder.iterdir())
    check = disk(folder, 1 << 20)[0]
    assert check.state == "fail" and f"belongs to user {ANOTHER}" in check.message and check.fix


@as_root
@pytest.mark.parametrize("name", ["lock", "slots", "journal.1"])
def test_disk_file_of_another_user_is_refused(folder, name):
    opened(folder)
    os.chown(folder / name, ANOTHER, ANOTHER)
    (folder / name).chmod(0o666)
    before = (folder / name).read_bytes()
    refused(folder, f"{name} is not used: it belongs to user {ANOTHER}")
    assert (folder / name).read_bytes() == before


@pytest.mark.parametrize("name", ["lock", "slots", "journal.1"])
def test_disk_file_that_is_a_link_is_refused(folder, tmp_path, name):
    opened(folder)
    victim = tmp_path / "victim"
    (folder / name).rename(victim)
    before = victim.read_bytes()
    (folder / name).symlink_to(victim)
    refused(folder, f"{name} is not used: it is a link")
    (folder / name).unlink()
    (folder / name).hardlink_to(victim)
    refused(folder, f"{name} is not used: .* hard link")
    assert victim.read_bytes() == before


@pytest.mark.parametrize("make", [Path.symlink_to, Path.hardlink_to])
def test_journal_is_not_written_through_a_link(folder, tmp_path, make):
    victim = tmp_path / "victim"
    victim.write_text("a file of the victim")
    make(folder / "journal.1.new", victim)
    journal = j.Journal(FILES, str(folder), b"a storage's name", j.Found())
    with pytest.raises(OSError, match="link"):
        journal.open()
    assert victim.read_text() == "a file of the victim"


def test_disk_folder_that_others_may_write_to_is_refused_unless_it_is_mounted(folder, monkeypatch):
    folder.chmod(0o777)
    refused(folder, r"others may use it \(mode 0777\)")
    for mode in (0o1777, 0o2770, 0o755):  # as /tmp; with a pod's fsGroup; as the folder of a mounted disk
        folder.chmod(mode)
        opened(folder)
    folder.chmod(0o2777)  # Kubernetes' emptyDir with fsGroup
    monkeypatch.setattr(file_ops, "mount_of", lambda path: mounts.Mount(folder, "/", "ext4"))
    opened(folder)


@as_root
def test_disk_folder_behind_a_link_is_used_if_the_link_is_not_of_another_user(folder, tmp_path, monkeypatch):
    link = tmp_path / "link"
    link.symlink_to(folder)
    opened(link)
    os.chown(link, ANOTHER, ANOTHER, follow_symlinks=False)
    refused(link, f"a link of user {ANOTHER}")
    monkeypatch.setattr(file_ops, "mount_of", lambda path: mounts.Mount(folder, "/", "ext4"))
    refused(link, f"a link of user {ANOTHER}")


@as_root
def test_disk_folder_of_the_user_that_a_file_server_takes_root_for_is_used(folder, monkeypatch):
    """NFS exports with root_squash, or with one user for all."""

    class Renamed:
        def __init__(self, dir):
            self.fd = os.open(dir, linux.O_TMPFILE | os.O_RDWR)
            os.chown(self.fd, ANOTHER, ANOTHER)

        def fileno(self):
            return self.fd

        def __enter__(self):
            return self

        def __exit__(self, *_):
            os.close(self.fd)

    os.chown(folder, ANOTHER, ANOTHER)
    refused(folder, f"belongs to user {ANOTHER}")
    monkeypatch.setattr(file_ops.tempfile, "TemporaryFile", Renamed)
    opened(folder)


def test_disk_tier_process_refuses_in_words_and_says_the_same_again(folder, tmp_path):
    """The server logs a reason once."""
    (folder / "slots").symlink_to(tmp_path / "nothing yet")
    pool, lines = make_pool(16 * PAGE), []
    for _ in range(2):
        options = {"path": str(folder), "size": 1 << 20, "backend": "threads"}
        with DiskTierProcess(pool, options, stderr=subprocess.PIPE) as tier_process:
            assert isinstance(tier_process.opened, m.Refused)
            assert f"{folder}/slots is not used: it is a link" in tier_process.opened.reason
            lines.append(tier_process.process.communicate(timeout=20)[1])
    assert lines[0] == lines[1] and not (tmp_path / "nothing yet").exists()
