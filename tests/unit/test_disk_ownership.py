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


def opened(folder: Path | str) -> None:
    storage = open_storage(FILES, str(folder), 1 << 20, preallocate=False, direct=False)
    try:
        assert storage.writable
    finally:
        storage.close(FILES)


def refused(folder: Path | str, words: str) -> None:
    with pytest.raises(KVTierError, match=words):
        opened(folder)


# Modes of the parent and of the folder, whether another user owns the folder, and the files; words of the refusal.
CASES = {
    "a container's root, a folder of a user below a bind mount": (0o755, 0o755, True, False, ""),
    "a group's folder, made by another member": (0o2775, 0o2770, True, False, ""),
    "a volume that another user wrote": (0o755, 0o2775, True, True, ""),
    "runAsUser was changed, with fsGroup": (0o755, 0o2775, False, True, ""),
    "an init container's mkdir and chmod in an emptyDir": (0o777, 0o777, False, False, ""),
    "open to all": (0o755, 0o1777, True, False, ""),
    "made by another user on a scratch disk": (0o1777, 0o755, True, False, f"belongs to user {ANOTHER}"),
    "made by another user, no sticky bit": (0o777, 0o700, True, True, f"belongs to user {ANOTHER}"),
    "files of another user, open to all": (0o755, 0o777, False, True, f"is not used: it belongs to user {ANOTHER}"),
    "the same with the sticky bit": (0o755, 0o1777, True, True, f"is not used: it belongs to user {ANOTHER}"),
}


@as_root
@pytest.mark.parametrize("parent, mode, others_folder, others_files, words", CASES.values(), ids=CASES)
def test_disk_folder_is_refused_only_where_every_user_could_make_it_or_its_files(
    tmp_path, folder, parent, mode, others_folder, others_files, words
):
    opened(folder)
    for path in [folder] * others_folder + list(folder.iterdir()) * others_files:
        os.chown(path, ANOTHER, ANOTHER)
    folder.chmod(mode)
    tmp_path.chmod(parent)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    check = disk(folder, 1 << 20)[0]
    if words:
        refused(folder, words)
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
        assert check.state == "fail" and words in check.message and check.fix
    else:
        opened(folder)
        assert "not use" not in check.message


@as_root
@pytest.mark.parametrize("name", ["lock", "slots", "journal.1"])
def test_disk_file_of_another_user_is_refused_in_a_folder_open_to_all(folder, name):
    opened(folder)
    folder.chmod(0o777)
    os.chown(folder / name, ANOTHER, ANOTHER)
    refused(folder, f"{name} is not used: it belongs to user {ANOTHER}")
    assert f"{name} is not used" in disk(folder, 1 << 20)[0].message


@pytest.mark.parametrize("name", ["lock", "slots"])
def test_disk_file_that_is_no_file_is_refused(folder, name):
    os.mkfifo(folder / name)
    refused(folder, f"{name} is not used: it is not a file")


@pytest.mark.parametrize("name", ["lock", "slots", "journal.1"])
def test_disk_file_that_is_a_link_is_refused(folder, tmp_path, name):
    opened(folder)
    victim = tmp_path / "victim"
    (folder / name).rename(victim)
    before = victim.read_bytes()
    (folder / name).symlink_to(victim)
    refused(folder, f"{name} is not used: it is a link")
    assert f"{name} is not used: it is a link" in disk(folder, 1 << 20)[0].message
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


@as_root
def test_disk_folder_of_another_user_is_used_if_it_is_mounted(folder, tmp_path, monkeypatch):
    tmp_path.chmod(0o1777)
    os.chown(folder, ANOTHER, ANOTHER)
    refused(folder, f"belongs to user {ANOTHER}")
    monkeypatch.setattr(file_ops, "mount_of", lambda path: mounts.Mount(folder, "/", "ext4"))
    opened(folder)


@as_root
@pytest.mark.parametrize("end", ["", "/"])
def test_disk_folder_behind_a_link_is_used_if_the_link_is_not_of_another_user(tmp_path, folder, monkeypatch, end):
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    scratch.chmod(0o1777)
    link = scratch / "link"
    link.symlink_to(folder)
    opened(f"{link}{end}")
    os.chown(link, ANOTHER, ANOTHER, follow_symlinks=False)
    refused(f"{link}{end}", f"a link of user {ANOTHER}")
    monkeypatch.setattr(file_ops, "mount_of", lambda path: mounts.Mount(folder, "/", "ext4"))
    refused(f"{link}{end}", f"a link of user {ANOTHER}")
    scratch.chmod(0o755)
    opened(f"{link}{end}")


def test_disk_folder_behind_a_link_to_nothing_fails_the_check(tmp_path):
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "nothing")
    refused(link, "it is a link to nothing")
    assert disk(link, 1 << 20)[0].state == "fail"


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

    folder.parent.chmod(0o1777)
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
