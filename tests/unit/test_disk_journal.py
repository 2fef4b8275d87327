"""The disk tier's journal and table by themselves, and a tier process opened on what was damaged, exchanged or in
use."""

import errno
import os
import random
import shutil
import socket
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
from disk_support import SHAPE, DiskTierProcess, content_of, fill, holds, make_pool, move_of, name_of, size_of
from tier_fixtures import small_disk

from vllm_kvtier import __version__
from vllm_kvtier.errors import KVTierError
from vllm_kvtier.store.index.types import ZERO
from vllm_kvtier.store.protocol import PAGE
from vllm_kvtier.store.tiers.disk import directory, file_ops, mounts
from vllm_kvtier.store.tiers.disk import journal as j
from vllm_kvtier.store.tiers.disk.directory import open_storage
from vllm_kvtier.store.tiers.disk.file_ops import Files
from vllm_kvtier.store.tiers.disk.process import DiskProcess
from vllm_kvtier.store.tiers.disk.slot_table import ROW, SlotTable, pack, parents_first, unpack, without_conflicts
from vllm_kvtier.store.tiers.process import main
from vllm_kvtier.store.tiers.process import protocol as m
from vllm_kvtier.wire.stream import read_frame, write_frame

STORAGE = b"a storage's name"
FILES = Files()


def rows_of(*moves: m.Move) -> np.ndarray:
    return np.frombuffer(b"".join(pack(move, 7) for move in moves), ROW)


def read(folder, capacity=1000) -> j.Found:
    return j.read(FILES, str(folder), STORAGE, capacity)


def new_journal(folder) -> j.Journal:
    journal = j.Journal(FILES, str(folder), STORAGE, read(folder))
    journal.open()
    return journal


def positions(found: j.Found) -> list[int]:
    return found.rows["place"].tolist()


def test_journal_appended_rows_are_restored(tmp_path):
    journal = new_journal(tmp_path)
    moves = [move_of(i, 0, 3, 1 + 3 * i, name_of(i - 1) if i else ZERO) for i in range(5)]
    journal.append([j.namespace_id(SHAPE), *j.put(rows_of(*moves))])
    journal.append([j.gone([4, 10])])
    journal.append(j.put(rows_of(move_of(9, 0, 2, 4))))
    found = read(tmp_path)
    assert positions(found) == [1, 7, 13, 4] and found.shapes == {SHAPE.namespace_id: SHAPE} and not found.note
    assert list(unpack(found.rows))[0] == moves[0]
    journal = new_journal(tmp_path)
    journal.append([j.gone([1])])
    assert positions(read(tmp_path)) == [7, 13, 4]
    journal.replace(j.snapshot(found.rows[:2], [SHAPE]))
    journal.append(j.put(rows_of(move_of(10, 0, 1, 99))))
    assert positions(read(tmp_path)) == [1, 7, 99]
    assert [name for name in os.listdir(tmp_path)] == ["journal.2"]


def test_journal_with_a_namespace_of_an_unknown_kind_keeps_the_others(tmp_path):
    """A later version of the store has written it; the server frees the positions of blocks of no known namespace."""
    journal, other = new_journal(tmp_path), b"of another kind!"
    unknown = j._encode(m.NamespaceShape(other, 16, SHAPE.groups)).replace(b"full", b"newK")
    assert b"newK" in unknown
    rows = rows_of(move_of(0, 0, 3, 1), msgspec.structs.replace(move_of(1, 0, 3, 4), namespace_id=other))
    journal.append([j.namespace_id(SHAPE), (j.NAMESPACE_ID, unknown), *j.put(rows)])
    found = read(tmp_path)
    assert positions(found) == [1, 4] and found.shapes == {SHAPE.namespace_id: SHAPE} and not found.note
    new_journal(tmp_path).append([j.gone([4])])
    assert positions(read(tmp_path)) == [1]


def test_journal_leaves_that_of_a_store_in_a_new_folder_alone(tmp_path):
    """It took its snapshot by path: that became the other's newest journal, and the other's own was removed."""
    folder = tmp_path / "disk"
    folder.mkdir()
    ours = new_journal(folder)
    shutil.rmtree(folder)
    folder.mkdir()
    theirs = new_journal(folder)
    theirs.append([j.namespace_id(SHAPE), *j.put(rows_of(move_of(1, 1, 2, 10)))])
    with pytest.raises(OSError, match="removed or replaced"):
        ours.replace(j.snapshot(rows_of(), ()))
    assert not ours.broken and positions(read(folder)) == [10]


def test_journal_torn_end_is_dropped_for_good(tmp_path):
    journal = new_journal(tmp_path)
    journal.append(j.put(rows_of(move_of(1, 0, 1, 1))))
    whole = read(tmp_path).end
    journal.append(j.put(rows_of(move_of(2, 0, 1, 2))))
    end = read(tmp_path).end
    path = tmp_path / "journal.1"
    data = path.read_bytes()
    for cut in range(whole, end - 8):  # zeros are at its end
        path.write_bytes(data[:cut] + b"\xff" * 64)
        found = read(tmp_path)
        assert positions(found) == [1] and found.end == whole and not found.note
    new_journal(tmp_path).append([j.gone([55])])
    assert positions(read(tmp_path)) == [1]


def test_journal_damaged_synced_frame_empties_the_tier(tmp_path):
    """What follows a damaged frame might say that a block before it is gone: none of them is believed."""
    journal = new_journal(tmp_path)
    for number in range(1, 6):
        journal.append(j.put(rows_of(move_of(number, 0, 1, number))))
    path = tmp_path / "journal.1"
    data, found = path.read_bytes(), read(tmp_path)
    assert positions(found) == [1, 2, 3, 4, 5]
    rng = random.Random(1)
    last = found.end - (found.end - found.base) // 5
    for at in [*rng.sample(range(found.base, last), 60), *range(60), *range(64, found.base)]:  # between: padding
        damaged = bytearray(data)
        damaged[at] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        found = read(tmp_path)
        assert positions(found) == [] and found.note and not found.base
    damaged = bytearray(data)
    damaged[last + 40] ^= 1
    path.write_bytes(damaged)
    assert positions(read(tmp_path)) == [1, 2, 3, 4]  # as a crash would leave it


def test_journal_of_conflicting_rows_the_later_wins():
    rows = rows_of(
        *(move_of(1, 0, 4, 1), move_of(2, 0, 4, 3), move_of(3, 0, 2, 20), move_of(1, 0, 1, 30)),
        *(move_of(4, 0, 50, 60), move_of(5, 0, 2, 99), move_of(6, 0, 1, 0), move_of(7, 0, 0, 40)),
    )
    good, others = without_conflicts(rows, 100)
    assert good["place"].tolist() == [3, 20, 30] and sorted(others.tolist()) == [0, 1, 40, 60, 99]


def test_journal_without_conflicts_equals_pairwise_check():
    rng = random.Random(3)
    for _ in range(200):
        moves = [
            move_of(rng.randrange(12), 0, rng.randint(1, 5), rng.randint(1, 30)) for _ in range(rng.randint(0, 12))
        ]
        moves = list({move.position: move for move in moves}.values())
        good, others = without_conflicts(rows_of(*moves), 33)
        kept = list(unpack(good))
        assert len(good) + len(others) == len(moves)
        for number, a in enumerate(kept):
            assert a.position + a.pages <= 33
            for b in kept[:number]:
                assert a.hash != b.hash and (a.position + a.pages <= b.position or b.position + b.pages <= a.position)


def test_journal_rows_are_ordered_parents_first():
    block_hashes = [move_of(i, 0, 1, 1 + i, name_of(i - 1) if i else ZERO) for i in range(50)]
    rng = random.Random(2)
    for _ in range(20):
        rng.shuffle(block_hashes)
        ordered = list(unpack(parents_first(rows_of(*block_hashes))))
        assert [x.hash for x in ordered] == [name_of(i) for i in range(50)]
    orphans = rows_of(move_of(2, 0, 1, 2, name_of(1)), move_of(3, 0, 1, 3, name_of(2)))
    assert (parents_first(orphans) == orphans).all()
    circle = rows_of(move_of(1, 0, 1, 2, name_of(2)), move_of(2, 0, 1, 3, name_of(1)))
    assert len(parents_first(circle)) == 2


def test_slot_table_equals_dict_model():
    rng, table, model = random.Random(5), SlotTable(4000, rows_of()), {}
    for number in range(1500):
        move = move_of(number, 0, rng.randint(1, 9), rng.randint(1, 3900))
        lost = table.within(move.position, move.pages)
        span = range(move.position, move.position + move.pages)
        assert lost == sorted(p for p, x in model.items() if p + x.pages > span[0] and p <= span[-1])
        assert table.remove([*lost, 3999]) == lost
        for position in lost:
            del model[position]
        table.add([pack(move, number)])
        model[move.position] = move
        some = rng.choice(list(model.values()))
        assert table.mark(some) is not None and table.mark(move) == number
    assert list(unpack(table.rows())) == [m.Move(*_fields(x)) for x in model.values()] and len(table) == len(model)


def _fields(move: m.Move) -> tuple:
    return move.namespace_id, move.group, move.hash, move.parent, move.tenant, 0, move.pages, move.position


def test_journal_is_restored_without_calls_for_each_block(tmp_path):
    """A tier of a million blocks is not there before that."""
    count, calls, before = 20_000, [], sys.getprofile()
    rows = np.zeros(count, ROW)
    rows["place"], rows["pages"] = np.arange(1, count + 1), 1
    names = np.random.default_rng(0).bytes(16 * (count + 1))
    rows["hash"], rows["parent"] = np.frombuffer(names[16:], "V16"), np.frombuffer(names[:-16], "V16")
    new_journal(tmp_path).replace(j.snapshot(rows, [SHAPE]))
    sys.setprofile(lambda frame, event, arg: calls.append(event))
    try:
        table = SlotTable(count + 1, read(tmp_path, count + 1).rows)
        ordered = parents_first(table.rows())
    finally:
        sys.setprofile(before)
    assert len(table) == count and (ordered["place"] == rows["place"]).all() and len(calls) < 1000


# -- a directory, through a tier process ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pool():
    return make_pool(16 << 20)


def options(path, **more) -> dict:
    return {"path": str(path), "size": 4 << 20, "backend": "threads", **more}


def keep(pool, path, moves, **more) -> None:
    with DiskTierProcess(pool, options(path, **more)) as tier_process:
        for move in moves:
            fill(pool, move)
        tier_process.write(moves, namespaces=[SHAPE])
        assert all(tier_process.hear().good)
        assert tier_process.stop() == 0


MOVES = [move_of(i, 1 + 10 * i, 10, 1 + 20 * i) for i in range(5)]


def test_disk_with_more_blocks_than_may_be_unsent_is_restored(tmp_path, pool, monkeypatch):
    monkeypatch.setattr(main, "MAX_UNSENT_BYTES", 1 << 20)
    count = 50_000  # 3 MB in messages
    rows = np.zeros(count, ROW)
    rows["place"], rows["pages"] = np.arange(1, count + 1), 1
    rows["hash"] = np.frombuffer(np.random.default_rng(0).bytes(16 * count), "V16")
    size = size_of(count + 1)
    storage = open_storage(FILES, str(tmp_path), size, preallocate=False, direct=False)
    storage.journal.replace(j.snapshot(rows, [SHAPE]))
    storage.close(FILES)
    ours, theirs = socket.socketpair()
    thread = threading.Thread(target=main.TierProcessMain(pool, theirs, DiskProcess).serve, daemon=True)
    thread.start()
    write_frame(ours, m.encode(m.Open(options(tmp_path, size=size), pool.nbytes, __version__)))
    found = 0
    while isinstance(message := m.decode_to_server(read_frame(ours, time.monotonic() + 20, [])), m.Kept):
        found += len(message.moves)
    ours.close()
    thread.join(20)
    assert found == count and message.writable


def test_disk_with_exchanged_data_file_starts_empty(tmp_path, pool):
    keep(pool, tmp_path, MOVES)
    (tmp_path / "slots").unlink()
    with DiskTierProcess(pool, options(tmp_path)) as tier_process:
        assert not tier_process.kept and "replaced" in tier_process.opened.note and tier_process.opened.writable
    keep(pool, tmp_path / "other", MOVES)
    shutil.copy(tmp_path / "other" / "slots", tmp_path / "slots")
    with DiskTierProcess(pool, options(tmp_path)) as tier_process:
        assert not tier_process.kept and "other data" in tier_process.opened.note


def test_disk_with_older_data_than_journal_rejects_old_blocks(tmp_path, pool):
    """A disk that lost writes it had acknowledged: whole blocks, but others than the journal names."""
    keep(pool, tmp_path, MOVES)
    old = (tmp_path / "slots").read_bytes()
    keep(pool, tmp_path, [move_of(100 + i, 1 + 10 * i, 10, 1 + 20 * i) for i in range(3)])
    (tmp_path / "slots").write_bytes(old)
    with DiskTierProcess(pool, options(tmp_path)) as tier_process:
        assert {x.hash for x in tier_process.kept} == {name_of(n) for n in (100, 101, 102, 3, 4)}
        moves = [m.Move(*_fields(x)[:5], 200 + 10 * n, x.pages, x.position) for n, x in enumerate(tier_process.kept)]
        tier_process.read(moves)
        answer = tier_process.hear()
        assert dict(zip([x.hash for x in moves], answer.good, strict=True)) == {
            name_of(n): n < 10 for n in (100, 101, 102, 3, 4)
        }
        assert "other bytes than" in answer.error
        assert all(holds(pool, x) for x, good in zip(moves, answer.good, strict=True) if good)


def test_disk_directory_in_use_is_refused(tmp_path, pool):
    with DiskTierProcess(pool, options(tmp_path)), DiskTierProcess(pool, options(tmp_path)) as second:
        assert isinstance(second.opened, m.Refused) and "another store uses" in second.opened.reason
        assert second.process.wait(10) == 1


def test_disk_refused_again_says_the_same(tmp_path, pool):
    """The server logs a reason once; the time in it was another one at each attempt."""
    lines = []
    for _ in range(2):
        with DiskTierProcess(pool, options(tmp_path, size=0), stderr=subprocess.PIPE) as tier_process:
            lines.append(tier_process.process.communicate(timeout=20)[1])
    assert b"too small" in lines[0] and lines[0] == lines[1]


def test_disk_with_smaller_size_keeps_fitting_blocks(tmp_path, pool):
    keep(pool, tmp_path, MOVES)
    with DiskTierProcess(pool, options(tmp_path, size=size_of(60))) as tier_process:
        assert [x.position for x in tier_process.kept] == [1, 21, 41] and tier_process.opened.capacity_pages == 60
        assert (tmp_path / "slots").stat().st_size == 60 * PAGE
    with DiskTierProcess(pool, options(tmp_path)) as tier_process:  # larger again: what was cut off does not come back
        assert [x.position for x in tier_process.kept] == [1, 21, 41]
        tier_process.write([move_of(50, 1, 5, 900)])
        assert tier_process.hear().good == [True]


def test_disk_preallocation_allocates_whole_file(tmp_path, pool):
    keep(pool, tmp_path / "a", MOVES[:1], preallocate=True)
    keep(pool, tmp_path / "b", MOVES[:1])
    taken = {name: (tmp_path / name / "slots").stat().st_blocks * 512 for name in "ab"}
    assert taken["a"] >= 0.97 * (4 << 20) > 1 << 20 > taken["b"]


def test_disk_full_tier_takes_no_more_than_its_size_with_its_journal(tmp_path):
    """The data file alone had the size: in a volume with that limit, kubelet ended the pod once the tier was full."""
    size, pages, rows = 256 << 20, 16, []
    storage = open_storage(FILES, str(tmp_path), size, preallocate=True, direct=False)
    for position in range(1, storage.capacity - pages, pages):
        rows.append(pack(move_of(position, 0, pages, position), 7))
    storage.journal.append(j.put(np.frombuffer(b"".join(rows), ROW)))
    assert 0.97 * size < sum(path.stat().st_blocks * 512 for path in tmp_path.iterdir()) <= size
    storage.close(FILES)


class SmallFiles(Files):
    """Of a file system with room for 62 pages; the data file is not to have all."""

    def left_to_others(self, folder):
        return 20 * PAGE

    def room(self, fd, folder, left):
        return 0, 82 * PAGE - left


def test_disk_larger_than_its_file_system_fits_there(tmp_path, pool):
    """It filled the file system, and from then on it took no new block and evicted none."""
    keep(pool, tmp_path, MOVES)
    storage = open_storage(SmallFiles(), str(tmp_path), 4 << 20, preallocate=True, direct=True)
    assert storage.capacity == 60 and storage.writable and not storage.sparse
    assert storage.notes == [
        "it may take 248 KiB of its 4 MiB: its file system has no more room beside what stays free for others"
    ]
    assert storage.table.rows()["place"].tolist() == [1, 21, 41]
    assert (tmp_path / "slots").stat().st_size == 60 * PAGE
    storage.close(FILES)


def test_disk_knows_the_room_of_its_file_system(tmp_path, monkeypatch):
    fd = os.open(tmp_path / "slots", os.O_RDWR | os.O_CREAT)
    os.posix_fallocate(fd, 0, 8 << 20)
    folder = str(tmp_path)  # of files in it ext4 and XFS say what their file system has, also if a quota leaves less
    numbers = {folder: SimpleNamespace(f_blocks=11, f_bfree=7, f_bavail=5, f_frsize=4096)}
    monkeypatch.setattr(os, "statvfs", numbers.get)
    has, room = FILES.room(fd, folder, 0)
    assert 0 <= has - (8 << 20) < 1 << 16 and room == has + 5 * 4096  # and of what describes it
    assert FILES.left_to_others(folder) == 4096, "a fifth of the nine that df adds up: two are root's"
    assert FILES.room(fd, folder, 7 * 4096) == (has, has - 2 * 4096), "it gives back of what it has"
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    assert FILES.room(fd, folder, 1 << 30) == (has, room - room // 2), "never more than half of what others do not use"
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    assert FILES.room(fd, folder, 1 << 30) == (has, 0), "kubelet evicts pods by what is free"
    numbers[folder] = SimpleNamespace(f_blocks=0, f_bfree=0, f_bavail=0, f_frsize=0)
    assert FILES.room(fd, folder, FILES.left_to_others(folder))[1] > 1 << 60  # some file systems do not say

    def quotactl_fd(number, of, command, who, quota):
        if command.value != 0x80000701:
            return -1
        quota[0], quota[2] = 9 << 10, (8 << 20) + 4096  # KiB that this group may use, bytes that it does
        return 0

    monkeypatch.setattr(file_ops._libc, "syscall", quotactl_fd)
    assert FILES.room(fd, folder, 0) == (has, has + (1 << 20) - 4096)
    os.close(fd)


def test_disk_gives_way_on_a_full_file_system(tmp_path, pool):
    """Where not even the journal can say so before."""
    keep(pool, tmp_path, MOVES)

    class FullFiles(SmallFiles):
        shrunk = False

        def truncate(self, fd, nbytes):
            self.shrunk |= nbytes == 60 * PAGE
            super().truncate(fd, nbytes)

        def pwrite(self, fd, data, offset):
            if not self.shrunk:
                raise OSError(errno.ENOSPC, "No space left on device")
            return super().pwrite(fd, data, offset)

    storage = open_storage(FullFiles(), str(tmp_path), 4 << 20, preallocate=False, direct=False)
    assert storage.writable and (tmp_path / "slots").stat().st_size == 60 * PAGE
    storage.close(FILES)


@pytest.mark.parametrize(("name", "share"), [("", 0.98), ("kvtier", 0.8 * 0.98)])
def test_disk_takes_all_of_a_file_system_only_if_it_is_mounted_at_its_path(tmp_path, name, share):
    """It left 2 % to others, below which kubelet evicts the pods of a node."""
    with small_disk(tmp_path / "mounted", total := 64 << 20) as mounted:
        for _ in range(2):  # what the tier has already is no one else's
            storage = open_storage(FILES, str(mounted / name), 1 << 40, preallocate=True, direct=False)
            assert share - 0.01 < storage.capacity * PAGE / total <= share, storage.notes
            storage.close(FILES)


def test_mount_of_a_path_is_the_last_one_above_it(tmp_path):
    table = tmp_path / "mountinfo"
    table.write_text(
        "21 1 8:1 / / rw - ext4 /dev/root rw\n"
        "22 21 8:2 / /nvme rw,noatime shared:5 - xfs /dev/nvme0n1 rw\n"
        "24 21 8:2 / /tank rw - zfs tank rw\n"
        "25 21 0:9 / /ceph rw - ceph 10.0.0.1:/ rw\n"
        "23 21 8:1 /var/lib/kv /a\\040disk rw master:1 propagate_from:2 - ext4 /dev/root rw\n"
    )
    found = {path: mounts.mount_of(Path(path), table) for path in ("/nvme/x", "/nvmes", "/a disk/x")}
    assert [each.kind for each in found.values()] == ["xfs", "ext4", "ext4"]
    assert [str(each.point) for each in found.values()] == ["/nvme", "/", "/a disk"]
    own = [mounts.has_own(Path(path), table) for path in ("/nvme", "/nvme/x", "/a disk", "/tank", "/ceph")]
    assert own == [True, False, False, False, False], "a container's volume is a folder of the host's disk"
    assert mounts.mount_of(Path("/x"), tmp_path / "none").kind == ""


def test_disk_whose_file_system_is_not_mounted_is_not_made_above(tmp_path, monkeypatch):
    """After a reboot without its disk a tier filled the file system of the mount point."""
    table, fstab = tmp_path / "mountinfo", tmp_path / "fstab"
    root, nvme = "21 1 8:1 / / rw - ext4 /dev/root rw\n", "22 21 8:2 / /nvme rw - xfs /dev/nvme0n1 rw\n"
    entries = ["#/dev/x /old ext4 defaults", "LABEL=a / ext4 defaults", "/dev/nvme0n1 /nvme xfs"]
    entries += ["/swap none swap sw", "  # entr\u00e9es", "\t/dev/usb /old ext4 rw,noauto", ""]
    fstab.write_bytes("\n".join(entries).encode("latin-1"))
    for text, expected in ((root, Path("/nvme")), (root + nvme, None), ("", None)):
        table.write_text(text)
        assert mounts.unmounted(Path("/nvme/kvtier"), table, fstab) == expected
    table.write_text(root)
    assert [mounts.unmounted(Path(path), table, fstab) for path in ("/nvmes", "/old/kvtier")] == [None, None]
    assert mounts.unmounted(Path("/nvme"), table, tmp_path / "none") is None
    for folder, text in (("x/kvtier", f"there is no {tmp_path}/x: mount"), ("kvtier", "nothing is mounted at")):
        with pytest.raises(KVTierError, match=text):
            open_storage(FILES, str(tmp_path / folder), 1 << 20, preallocate=False, direct=False)
        monkeypatch.setattr(directory, "unmounted", lambda folder: tmp_path)
    assert sorted(tmp_path.iterdir()) == [fstab, table]


def test_disk_new_folder_is_named_with_its_file_system(tmp_path):
    point = mounts.mount_of(tmp_path).point
    for expected in ([f"{tmp_path}/a is new, on the file system that is mounted at {point}"], []):
        storage = open_storage(FILES, str(tmp_path / "a"), 1 << 20, preallocate=False, direct=False)
        assert storage.notes == expected and stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o700
        storage.close(FILES)


class ReadOnlyFiles(Files):
    """As on a file system mounted read-only; root may write anywhere, so permissions would not do."""

    def open(self, path, flags):
        if flags & (os.O_RDWR | os.O_CREAT):
            raise OSError(30, "Read-only file system")
        return super().open(path, flags)


def test_disk_read_only_directory_is_restored(tmp_path, pool):
    keep(pool, tmp_path, MOVES)
    storage = open_storage(ReadOnlyFiles(), str(tmp_path), 4 << 20, preallocate=False, direct=True)
    assert not storage.writable and len(storage.table) == 5 and "read only" in storage.notes[0]
    storage.close(FILES)


@pytest.mark.parametrize("size", [0, 100, 15 * PAGE])
def test_journal_in_too_small_file_is_refused(tmp_path, pool, size):
    with DiskTierProcess(pool, options(tmp_path, size=size)) as tier_process:
        assert isinstance(tier_process.opened, m.Refused) and "too small" in tier_process.opened.reason


def test_disk_test_content_differs_by_hash():
    assert content_of(name_of(1), 2) != content_of(name_of(2), 2)
