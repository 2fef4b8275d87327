"""Real tier processes on a real disk: killed at random instants, and with a slow disk."""

import errno
import os
import random
import shutil
import socket
import threading
import time

import pytest
from disk_support import (
    NAMESPACE_ID,
    SHAPE,
    DiskTierProcess,
    content_of,
    fill,
    holds,
    make_pool,
    move_of,
    name_of,
    size_of,
)
from tier_fixtures import small_disk

from vllm_kvtier import __version__
from vllm_kvtier.store.index.types import ZERO
from vllm_kvtier.store.protocol import PAGE
from vllm_kvtier.store.tiers.disk import process as disk_process
from vllm_kvtier.store.tiers.disk.file_ops import Files
from vllm_kvtier.store.tiers.disk.process import DiskProcess
from vllm_kvtier.store.tiers.process import protocol as m
from vllm_kvtier.store.tiers.process.main import TierProcessMain
from vllm_kvtier.wire.stream import read_frame, write_frame

PLACES, PAGES = 40, 16
BATCH = 8
POOL = (3 * BATCH + PLACES + 1) * PAGES * PAGE


class Disk:
    """The store server's knowledge of its disk while the tier process is killed repeatedly."""

    def __init__(self, pool, options, seed):
        self.pool, self.options, self.rng = pool, options, random.Random(seed)
        self.promised: dict[int, int] = {}  # by place, the block's number
        self.possible: dict[int, int] = {}  # by number, its place
        self.number = 0
        self.kills = self.kept = 0

    def life(self) -> None:
        with DiskTierProcess(self.pool, self.options) as tier_process:
            self.check(tier_process)
            deadline = time.monotonic() + self.rng.expovariate(1 / 0.06)
            kill = threading.Timer(max(0.0, deadline - time.monotonic()), tier_process.process.kill)
            kill.start()
            try:
                self.work(tier_process)
            except (OSError, EOFError):
                self.kills += 1
            kill.join()

    def work(self, tier_process) -> None:
        asked: list[tuple[int, list[m.Move], set[int]]] = []
        while True:
            banks = [bank for bank in range(3) if bank not in [a[0] % 3 for a in asked]]
            if len(asked) == 2:
                answer = tier_process.hear()
                number, moves, given_up = next(a for a in asked if a[0] == answer.id)
                asked = [a for a in asked if a[0] != answer.id]
                assert answer.good == [True] * len(moves), answer.error
                for move in moves:
                    self.promised[move.position] = next(n for n, p in self.possible.items() if name_of(n) == move.hash)
                    del self.possible[self.promised[move.position]]
                for block in given_up:
                    self.possible.pop(block, None)
                continue
            tier_process.last += 1
            while tier_process.last % 3 not in banks:
                tier_process.last += 1
            moves, given_up, gone = [], set(), []
            busy = {move.position for _, others, _ in asked for move in others}
            for at, spot in enumerate(self.rng.sample(range(PLACES), BATCH)):
                position = 1 + spot * PAGES
                if position in busy:
                    continue
                if position in self.promised:
                    block = self.promised.pop(position)
                    self.possible[block] = position
                    given_up.add(block)
                    gone.append(position)
                self.number += 1
                self.possible[self.number] = position
                slot = 1 + (tier_process.last % 3 * BATCH + at) * PAGES
                moves.append(move_of(self.number, slot, PAGES, position))
                fill(self.pool, moves[-1])
            asked.append((tier_process.last, moves, given_up))
            tier_process.send(m.Write(tier_process.last, moves, gone, [SHAPE]))

    def check(self, tier_process) -> None:
        assert isinstance(tier_process.opened, m.Opened) and tier_process.opened.writable, tier_process.opened
        names = {move.hash: move.position for move in tier_process.kept}
        assert len(names) == len(set(names.values())) == len(tier_process.kept)
        known = {name_of(n): p for p, n in self.promised.items()} | {name_of(n): p for n, p in self.possible.items()}
        assert names.items() <= known.items(), "what was never kept, or is gone, came back"
        assert {name_of(n) for n in self.promised.values()} <= set(names), "a block that was promised is lost"
        numbers = {name_of(n): n for n in [*self.promised.values(), *self.possible]}
        self.promised, self.possible = {position: numbers[name] for name, position in names.items()}, {}
        moves = [
            m.Move(
                x.namespace_id, x.group, x.hash, x.parent, x.tenant, 1 + (3 * BATCH + at) * PAGES, x.pages, x.position
            )
            for at, x in enumerate(tier_process.kept)
        ]
        tier_process.read(moves)
        answer = tier_process.hear()
        assert answer.good == [True] * len(moves), answer.error
        assert all(holds(self.pool, move) for move in moves)
        self.kept += len(moves)


def run(path, lives, backend, seed):
    options = {"path": str(path), "size": size_of(PLACES * PAGES + 1), "backend": backend}
    disk = Disk(make_pool(POOL), options, seed)
    for _ in range(lives):
        disk.life()
    assert disk.kills == lives and disk.kept > lives


def test_tier_process_killed_at_random_times_keeps_committed_blocks(tmp_path):
    run(tmp_path, 25, "threads", 1)


def test_tier_process_killed_on_nixl_keeps_committed_blocks(tmp_path):
    run(tmp_path, 10, "POSIX", 2)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["threads", "POSIX"])
def test_tier_process_killed_hundreds_of_times_keeps_committed_blocks(tmp_path, backend):
    run(tmp_path, 300, backend, 3)


class SlowFiles(Files):
    """Whose syncs wait for ``go``."""

    def __init__(self):
        self.go, self.waits = threading.Event(), threading.Semaphore(0)
        self.go.set()

    def sync(self, fd):
        if not self.go.is_set():
            self.waits.release()
        self.go.wait(20)
        super().sync(fd)


@pytest.fixture(params=["auto", "threads"])
def slow(request, tmp_path):
    """(files, pool, send, receive) of a tier backend in this process."""
    files, pool = SlowFiles(), make_pool(POOL)
    ours, theirs = socket.socketpair()
    host = TierProcessMain(pool, theirs, lambda host, options: DiskProcess(host, options, files=files))
    thread = threading.Thread(target=host.serve, daemon=True)
    thread.start()

    def hear():
        return m.decode_to_server(read_frame(ours, time.monotonic() + 20, []))

    options = {"path": str(tmp_path), "size": 4 << 20, "backend": request.param}
    write_frame(ours, m.encode(m.Open(options, pool.nbytes, __version__)))
    assert hear().writable
    yield files, pool, lambda message: write_frame(ours, m.encode(message)), hear
    files.go.set()
    ours.close()
    thread.join(20)


def written(slow, count):
    _, pool, send, hear = slow
    moves = [move_of(n, 1 + n * PAGES, PAGES, 1 + n * PAGES) for n in range(count)]
    for move in moves:
        fill(pool, move)
    send(m.Write(1, moves))
    assert hear().good == [True] * count
    return moves


def test_disk_reads_do_not_wait_for_fsync_of_writes(slow):
    files, pool, send, hear = slow
    written(slow, 4)
    files.go.clear()
    send(m.Write(2, [move_of(9, 1, PAGES, 1 + 9 * PAGES)]))
    assert files.waits.acquire(timeout=20)  # its data's sync has begun
    back = [move_of(n, 1 + (10 + n) * PAGES, PAGES, 1 + n * PAGES) for n in range(4)]
    for number in range(20):
        send(m.Read(10 + number, 0, back))
        answer = hear()
        assert (answer.id, answer.good) == (10 + number, [True] * 4)
        assert all(holds(pool, move) for move in back)
    files.go.set()
    assert hear().id == 2


@pytest.mark.parametrize("slow", ["threads"], indirect=True)
def test_disk_blocks_removed_during_a_read_are_no_corruption(slow):
    files, pool, send, hear = slow
    moves = written(slow, 2)
    pread, begun, removed = files.pread, threading.Semaphore(0), threading.Event()

    def read(fd, into, offset):
        begun.release()
        assert removed.wait(20)
        return pread(fd, into, offset)

    files.pread = read
    send(m.Read(2, 0, moves))
    assert begun.acquire(timeout=20)
    send(m.Drop([moves[0].position]))
    send(m.Read(3, 0, moves[:1]))
    answer = hear()
    assert (answer.id, answer.good) == (3, [False]) and "not on the disk" in answer.error, "asked for after the removal"
    removed.set()
    answer = hear()
    assert (answer.id, answer.good, answer.error) == (2, [False, True], "")


def test_disk_on_a_full_file_system_is_read_only_until_it_is_opened_again(slow):
    """Then it is limited to the room there is. Until then each write would evict blocks, and mostly in vain."""
    files, pool, send, hear = slow
    moves = [move_of(n, 1 + n * PAGES, PAGES, 1 + n * PAGES) for n in range(3)]
    for move in moves:
        fill(pool, move)
    send(m.Write(1, moves[:1]))
    assert hear().good == [True]

    def full(fd, offset, nbytes):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    files.allocate = full
    for number in (1, 2):
        send(m.Write(1 + number, [moves[number]]))
        answer = hear()
        assert answer.good == [False] and not answer.writable and "the file system is full" in answer.error
    send(m.Read(9, 0, moves[:1]))
    assert hear().good == [True]


@pytest.mark.parametrize("slow", ["threads"], indirect=True)
@pytest.mark.parametrize("trouble", ["", "while it is read only", "of the journal"])
def test_disk_write_without_blocks_is_answered_when_removals_are_recorded(slow, trouble):
    files, pool, send, hear = slow
    moves = written(slow, 2)
    if trouble == "while it is read only":  # for lack of room: removals are recorded still

        def full(fd, offset, nbytes):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        files.allocate = full
        send(m.Write(2, [move_of(9, 1, PAGES, 1 + 9 * PAGES)]))
        assert not hear().writable
    files.go.clear()
    if trouble == "of the journal":

        def broken(fd):
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        files.sync = broken
    send(m.Write(3, [], [moves[0].position]))
    if trouble != "of the journal":
        assert files.waits.acquire(timeout=20)
        send(m.Read(4, 0, moves[1:]))
        assert hear().id == 4, "the removal is not durable yet"
        files.go.set()
    answer = hear()
    assert answer.id == 3 and answer.good == []
    assert bool(answer.error) is (trouble == "of the journal") and answer.writable is not bool(trouble)


@pytest.mark.parametrize(
    ("first", "looks", "reason"),
    [
        (2, [(1, 2), (1, 2), (1, 3)], "more room"),
        (8, [(3, 4), (3, 3.5), (3, 2.9)], "others fill"),  # not before the tier would have to give back what it has
    ],
)
def test_disk_follows_the_room_of_its_file_system(tmp_path, monkeypatch, first, looks, reason):
    """It looked each hour, and for more only: others that filled the disk had to fill it to the end."""
    for name, value in (("LOOK_SECONDS", 0.01), ("GROWTH_SECONDS", 0.0)):
        monkeypatch.setattr(disk_process, name, value)
    pool, files = make_pool(POOL), Files()
    looks = [(0, first), *looks]
    files.room = lambda fd, folder, left: tuple(int(mib * (1 << 20)) for mib in looks.pop(0))
    ours, theirs = socket.socketpair()
    host = TierProcessMain(pool, theirs, lambda host, options: DiskProcess(host, options, files=files))
    options = {"path": str(tmp_path), "size": 4 << 20, "backend": "threads"}
    write_frame(ours, m.encode(m.Open(options, pool.nbytes, __version__)))
    assert reason in host.serve() and not looks
    opened = m.decode_to_server(read_frame(ours, time.monotonic() + 20, []))
    assert opened.capacity_pages == int((min(4, first) << 20) * 0.98) // PAGE
    ours.close()


@pytest.mark.parametrize("gone", ["removed", "replaced by another store's", "emptied", "data file removed"])
def test_disk_whose_folder_was_removed_is_opened_again(tmp_path, monkeypatch, gone):
    """It wrote on into deleted files: full by `df`, empty by `du`, and all lost at its end."""
    monkeypatch.setattr(disk_process, "LOOK_SECONDS", 0.05)
    folder = tmp_path / "disk"
    options = {"path": str(folder), "size": 4 << 20, "backend": "threads"}
    pool, (ours, theirs) = make_pool(POOL), socket.socketpair()
    host = TierProcessMain(pool, theirs, DiskProcess)
    ended: list[str] = []
    thread = threading.Thread(target=lambda: ended.append(host.serve()), daemon=True)
    thread.start()
    write_frame(ours, m.encode(m.Open(options, pool.nbytes, __version__)))
    assert m.decode_to_server(read_frame(ours, time.monotonic() + 20, [])).writable
    if gone == "data file removed":
        (folder / "slots").unlink()
    elif gone == "emptied":
        for file in folder.iterdir():
            file.unlink()
    else:
        shutil.rmtree(folder)
    if gone.startswith("replaced"):
        with DiskTierProcess(pool, options) as other:
            assert other.opened.writable
            thread.join(20)
    thread.join(20)
    assert len(ended) == 1 and "removed or replaced" in ended[0]
    ours.close()


def test_disk_that_others_fill_gives_them_room_of_its_own(tmp_path):
    with small_disk(tmp_path / "mounted", total := 64 << 20) as mounted:
        options = {"path": str(mounted / "kvtier"), "size": 1 << 40, "preallocate": True, "backend": "threads"}
        pool = make_pool(POOL)
        with DiskTierProcess(pool, options) as tier_process:
            last = tier_process.opened.capacity_pages - PAGES
            tier_process.write([move_of(n, 1 + n * PAGES, PAGES, position) for n, position in enumerate((1, last))])
            assert tier_process.hear().good == [True, True] and not tier_process.stop()
        with (mounted / "others").open("wb") as others:
            os.posix_fallocate(others.fileno(), 0, 10 << 20)
        with DiskTierProcess(pool, options) as tier_process:
            assert [move.position for move in tier_process.kept] == [1] and tier_process.opened.writable
            found = os.statvfs(mounted)
            assert 0.195 < found.f_bavail * found.f_frsize / total < 0.23


def test_disk_writes_share_fsync_and_dropped_position_is_not_kept(slow):
    files, pool, send, hear = slow
    files.go.clear()
    moves = [move_of(n, 1 + n * PAGES, PAGES, 1 + n * PAGES) for n in range(6)]
    for move in moves:
        fill(pool, move)
    for number, move in enumerate(moves[:4]):
        send(m.Write(1 + number, [move]))
    assert files.waits.acquire(timeout=20)
    send(m.Drop([moves[0].position]))
    again = m.Move(NAMESPACE_ID, 0, name_of(50), ZERO, b"", moves[5].slot, PAGES, moves[1].position)
    pool.view[again.slot * PAGE : (again.slot + PAGES) * PAGE] = content_of(again.hash, PAGES)
    send(m.Write(9, [again], [moves[1].position]))  # into the place of one under way: it waits for that
    send(m.Read(19, 0, [move_of(30, 1 + 10 * PAGES, PAGES, 1 + 30 * PAGES)]))
    assert hear().id == 19  # so all of it is received before the first sync ends
    files.go.set()
    answers = {answer.id: answer for answer in (hear() for _ in range(5))}
    assert [answers[n].good for n in (1, 2, 3, 4, 9)] == [[False], [False], [True], [True], [True]]
    assert "removed meanwhile" in answers[1].error and answers[1].writable
    back = m.Move(NAMESPACE_ID, 0, again.hash, ZERO, b"", moves[4].slot, PAGES, again.position)
    send(m.Read(20, 0, [back, move_of(1, moves[0].slot, PAGES, again.position)]))
    answer = hear()
    assert answer.good == [True, False] and holds(pool, back)
