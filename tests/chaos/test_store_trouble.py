"""A store whose disk's process hangs, whose directory is no use, that ends in the midst of things: it serves on, says
why, and leaves nothing behind."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from store_process import Engine, Store
from store_support import EVERYTHING, NAMESPACE_ID, block_hashes_of
from support import eventually, stop

from vllm_kvtier.store import protocol as m

PREFIXES = [block_hashes_of((32, number)) for number in range(20)]  # two and a half times what memory holds
ALL = ["--disk-admission=all", "--disk-size=64MiB"]


@pytest.fixture
def store(tmp_path):
    store = Store(tmp_path)
    yield store
    if pid := store.process and store.tier_process():
        os.kill(pid, signal.SIGCONT)
    store.kill()


@pytest.fixture
def small(tmp_path):
    """A file system of 4 MiB; what it was mounted at."""
    path = tmp_path / "small"
    path.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", path], capture_output=True).returncode:
        pytest.skip("nothing can be mounted here")
    yield path
    subprocess.run(["umount", "-l", path], check=True)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except OSError:
        return False


def opens(store: Store, *options: str, state: str):
    """Start, where the disk is not expected to be ready."""
    store.await_tiers = False
    store.start(*options)
    return eventually(lambda: (d := store.disk()).state == state and d, 20, f"the disk is {state}")


def fill(store: Store, engine: Engine, prefixes=PREFIXES) -> None:
    for done, block_hashes in enumerate(prefixes, 1):
        engine.fill(block_hashes)
        eventually(lambda done=done: store.disk().blocks >= done * 32, 20)


def test_lookup_does_not_wait_for_hung_tier_process(store):
    store.start(f"--disk-path={store.folder / 'disk'}", *ALL)
    with Engine(store) as engine:
        fill(store, engine)
        pid = store.tier_process()
        stop(pid)
        for wait_seconds in (0.0, 0.3):  # the latter's time limit ends nevertheless
            for block_hashes in PREFIXES[: 1 if wait_seconds else None]:
                found = engine.ask(m.Lookup(1, NAMESPACE_ID, block_hashes, 0, EVERYTHING, wait_seconds))
                engine.send(m.Release(found.lease))
        assert store.counts().index.reservations <= 64  # of 256 blocks: an eighth of memory, and a chunk beyond
        disk = store.disk()
        assert (disk.restarts, disk.timeouts) == (0, 0), "all were answered before it was killed for that"
        eventually(lambda: not alive(pid), 30, "it is killed")
        eventually(lambda: store.disk().state == "ready", 30)
        assert engine.find(PREFIXES[0]) == 32
        eventually(lambda: (i := store.counts().index).leases == i.reservations == 0, 10)


def test_hung_tier_process_ends_with_its_store(store):
    store.start(f"--disk-path={store.folder / 'disk'}", *ALL)
    pid = store.tier_process()
    stop(pid)
    store.kill()
    eventually(lambda: not alive(pid), 5, "it dies with its store")


def test_store_stop_during_reads_and_writes_leaves_reusable_disk_data(store):
    """Reads, writes and lookups that wait are under way: it ends soon, with all its processes and with nothing but
    the tier's data left, which the next one can use."""
    folder = store.folder / "disk"
    store.start(f"--disk-path={folder}", *ALL)
    with Engine(store) as engine:
        fill(store, engine)
        for number, block_hashes in enumerate(PREFIXES):
            engine.send(m.Lookup(number, NAMESPACE_ID, block_hashes, 0, EVERYTHING, 20.0))
        engine.send(m.Prefetch(NAMESPACE_ID, block_hashes_of((32, 3), (9, "more")), EVERYTHING))
        pid = store.tier_process()
        store.process.terminate()
        assert store.process.wait(15) == 0, "it waits for none of them to end by its time limit"
    assert not alive(pid)
    assert not Path(store.path).exists()
    names = sorted(p.name for p in folder.iterdir())
    assert names[1:] == ["lock", "slots"] and names[0].startswith("journal.")
    store.start(f"--disk-path={folder}", *ALL)
    with Engine(store) as engine:
        assert [engine.find(block_hashes) for block_hashes in PREFIXES] == [32] * len(PREFIXES)


@pytest.mark.slow
def test_tier_process_restarts_leak_nothing(store):
    store.start(f"--disk-path={store.folder / 'disk'}", *ALL)
    with Engine(store) as engine:
        fill(store, engine, PREFIXES[:2])

        def descriptors() -> int:
            return len(os.listdir(f"/proc/{store.process.pid}/fd"))

        before, lives = descriptors(), 0
        deadline = time.monotonic() + 4
        while time.monotonic() < deadline:
            pid = eventually(store.tier_process, 70)
            os.kill(pid, signal.SIGKILL)
            lives += 1
            eventually(lambda pid=pid: not alive(pid), 5)
        eventually(lambda: store.disk().state == "ready", 70)
        assert descriptors() <= before + 1
        assert engine.find(PREFIXES[0]) == 32


@pytest.mark.parametrize("what", ["a file", "no folder", "another store's", "too small"])
def test_unusable_directory_is_reported_with_cause(store, tmp_path, what):
    path, options, words = tmp_path / "disk", [], ""
    other = Store(tmp_path / "other")
    other.folder.mkdir()
    if what == "a file":
        path.write_bytes(b"")
        words = "Not a directory"
    elif what == "no folder":
        path = Path("/proc/nothing/here")
        words = "cannot use /proc/nothing/here"
    elif what == "too small":
        options = ["--disk-size=8192"]
        words = "too small"
    else:
        other.start(f"--disk-path={path}", *ALL)
        words = "another store uses"
    try:
        disk = opens(store, f"--disk-path={path}", *ALL, *options, state="unavailable")
        assert words in disk.reason
        with Engine(store) as engine:
            engine.fill(PREFIXES[0])
            assert engine.find(PREFIXES[0]) == 32
    finally:
        other.kill()


def test_disk_resized_between_starts_keeps_within_size(store):
    folder = store.folder / "disk"
    store.start(f"--disk-path={folder}", *ALL)
    with Engine(store) as engine:
        fill(store, engine)
    store.kill()
    small = ["--disk-admission=all", "--disk-size=2MiB"]
    store.start(f"--disk-path={folder}", *small)
    assert os.stat(folder / "slots").st_size <= 2 << 20 and store.disk().used_bytes <= 2 << 20
    with Engine(store) as engine:
        for block_hashes in PREFIXES:
            engine.find(block_hashes)  # right, as far as it goes
            engine.fill(block_hashes)
    store.kill()
    store.start(f"--disk-path={folder}", *ALL)
    with Engine(store) as engine:
        for block_hashes in PREFIXES:
            engine.find(block_hashes)


@pytest.mark.parametrize("preallocate", [False, True])
def test_full_file_system_keeps_what_fits_and_reports_cause(store, small, preallocate):
    """It promises 64 MiB and has 4: what fits is kept, the rest is refused with a reason, and the store serves."""
    store.start(f"--disk-path={small / 'disk'}", *ALL, f"--disk-preallocate={preallocate}")
    with Engine(store) as engine:
        for block_hashes in PREFIXES:
            engine.fill(block_hashes)
            assert engine.find(block_hashes) == 32
            time.sleep(0.15)
        disk = eventually(lambda: (d := store.disk()).reason and d, 10)
        assert "full" in disk.reason or "No space" in disk.reason
        assert disk.used_bytes <= 4 << 20
        assert engine.find(PREFIXES[-1]) == 32
    store.kill()
    store.await_tiers = False
    store.start(f"--disk-path={small / 'disk'}", *ALL)
    with Engine(store) as engine:
        eventually(lambda: sum(engine.find(block_hashes) for block_hashes in PREFIXES) > 32, 20)


def test_read_only_file_system_serves_reads(store, small):
    store.start(f"--disk-path={small / 'disk'}", *ALL)
    with Engine(store) as engine:
        fill(store, engine, PREFIXES[:3])
    store.kill()
    remount = ["mount", "-o", "remount,ro", small]  # not as long as the process has files open
    eventually(lambda: subprocess.run(remount, capture_output=True).returncode == 0, 10)
    disk = opens(store, f"--disk-path={small / 'disk'}", *ALL, state="read_only")
    assert "Read-only file system" in disk.reason
    with Engine(store) as engine:
        assert engine.find(PREFIXES[0]) == 32
        engine.fill(PREFIXES[5])


@pytest.mark.parametrize("part", ["journal", "slots", "header"])
def test_damaged_disk_returns_no_wrong_block_and_is_rewritten(store, part):
    folder = store.folder / "disk"
    store.start(f"--disk-path={folder}", *ALL)
    with Engine(store) as engine:
        fill(store, engine, PREFIXES[:4])
    store.kill()
    if part == "journal":
        path = next(folder.glob("journal.*"))
        where = 200
    else:
        path, where = folder / "slots", 12 if part == "header" else 40 * 4096
    with path.open("r+b") as file:
        file.seek(where)
        file.write(b"\xa5" * (100 if part != "slots" else 40 * 4096))
    store.start(f"--disk-path={folder}", *ALL)
    with Engine(store) as engine:
        found = [engine.find(block_hashes) for block_hashes in PREFIXES[:4]]  # right, as far as it goes
        assert found == [0] * 4 if part != "slots" else found[0] < 32 and found[1:] == [32] * 3
        for done, block_hashes in enumerate(PREFIXES, 1):  # also what was damaged: it is written anew
            engine.fill(block_hashes)
            there = 32 * (max(done, 4) if part == "slots" else done)
            eventually(lambda there=there: store.disk().blocks >= there, 20)
        assert store.disk().blocks == 32 * len(PREFIXES)
        assert [engine.find(block_hashes) for block_hashes in PREFIXES] == [32] * len(PREFIXES)
