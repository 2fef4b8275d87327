"""A store process with a disk below its memory: everything comes back right, whatever is killed meanwhile."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from store_process import Engine, Store
from store_support import EVERYTHING, NAMESPACE_ID, RawClient, block_hashes_of, tool_hello
from support import eventually

from vllm_kvtier.store import protocol as m

PREFIXES = [block_hashes_of((32, number)) for number in range(20)]  # two and a half times what memory holds
ALL = ["--disk-admission=all"]


class DiskStore(Store):
    def start(self, *options: str) -> None:
        super().start(f"--disk-path={self.folder / 'disk'}", "--disk-size=64MiB", *options)


@pytest.fixture
def store(tmp_path):
    store = DiskStore(tmp_path)
    yield store
    store.kill()


def all_written(store: Store, blocks: int):
    disk = eventually(lambda: (d := store.disk()).blocks >= blocks and d, 30, f"{blocks} blocks are on disk")
    assert disk.write_failures == 0
    return disk


def fill_all(store: Store) -> None:
    with Engine(store) as engine:
        done = 0
        for block_hashes in PREFIXES:
            assert engine.fill(block_hashes) == 32
            done += 32
            all_written(store, done)


def test_working_set_beyond_memory_loads_from_disk(store):
    store.start(*ALL)
    fill_all(store)
    with Engine(store) as engine:
        at_once = engine.find(PREFIXES[0], wait_seconds=0)
        assert at_once < 32  # memory has lost most of it
        assert [engine.find(block_hashes) for block_hashes in PREFIXES] == [32] * len(PREFIXES)
        # The disk has as much as it had, and nothing is under way any more.
        counts = engine.stat()
        assert counts.index.leases == counts.index.reservations == 0
        assert counts.tiers[0].read_blocks > 32 * len(PREFIXES) / 2 and counts.tiers[0].blocks == 32 * len(PREFIXES)


def test_killed_store_restores_blocks_from_disk(store):
    store.start(*ALL)
    fill_all(store)
    store.kill()
    store.start(*ALL)
    with Engine(store) as engine:
        assert [engine.find(block_hashes) for block_hashes in PREFIXES] == [32] * len(PREFIXES)


def test_cleared_blocks_do_not_come_back_though_the_tier_was_opening(store):
    """The clear was answered at once, with the tier still opening: all came back in the next store."""
    store.start(*ALL)
    fill_all(store)
    store.kill()
    store.await_tiers = False
    store.start(*ALL)
    with RawClient(store.path, tool_hello(), 60.0) as tool:
        assert tool.ask(m.Clear(9)).reason == ""
    store.kill()
    store.await_tiers = True
    store.start(*ALL)
    assert store.disk().blocks == 0


def test_prefetched_blocks_are_in_memory_at_lookup(store):
    store.start(*ALL)
    fill_all(store)
    with Engine(store) as engine:
        engine.send(m.Prefetch(NAMESPACE_ID, PREFIXES[3], EVERYTHING))
        eventually(lambda: engine.ask(m.Inspect(1, NAMESPACE_ID, PREFIXES[3])).num_hash_blocks == 32, 10)
        assert engine.find(PREFIXES[3], wait_seconds=0) == 32


def test_admission_reuse_writes_blocks_seen_twice(store):
    store.start()
    with Engine(store) as engine:
        for block_hashes in PREFIXES[:4]:
            engine.fill(block_hashes)
        assert engine.find(PREFIXES[1]) == 32
        all_written(store, 32)
    time.sleep(0.3)  # nothing else may follow: there is no event for that
    assert store.disk().blocks == 32


def test_block_with_bad_checksum_is_removed_from_disk(store):
    store.start(*ALL)
    with Engine(store) as engine:
        engine.fill(PREFIXES[0])
        all_written(store, 32)
        found = engine.lookup(PREFIXES[0])
        engine.send(m.Discard(NAMESPACE_ID, 0, PREFIXES[0][5 * m.HASH_BYTES : 6 * m.HASH_BYTES], found.slots[0][5]))
        engine.send(m.Release(found.lease))
        assert engine.find(PREFIXES[0]) == 5
        engine.fill(PREFIXES[1])
        all_written(store, 63)  # and before anything else is written, the journal says that it is gone
    store.kill()
    store.start(*ALL)
    with Engine(store) as engine:
        assert engine.find(PREFIXES[0]) == 5


@pytest.mark.parametrize("seconds", [6, pytest.param(120, marks=pytest.mark.slow)])
def test_repeated_kills_under_load_keep_blocks_correct(store, seconds):
    """Two engines store, look up and check at random while the tier process dies, and now and then the store."""
    store.start(*ALL)
    rng = random.Random(seconds)
    script = str(Path(__file__).parents[1] / "store_support.py")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    busy = [
        subprocess.Popen([sys.executable, script, store.path, str(seconds), str(seed)], stdout=subprocess.PIPE, env=env)
        for seed in (1, 2)
    ]
    for each in busy:
        assert each.stdout.readline() == b"begins\n"
    end = time.monotonic() + seconds
    kills = 0
    while time.monotonic() < end - 1:
        time.sleep(rng.uniform(0.1, 0.6))
        if rng.random() < 0.15:
            store.kill()
            store.start(*ALL)
        elif pid := store.tier_process():
            os.kill(pid, signal.SIGKILL)
            kills += 1
    for each in busy:
        assert each.wait(60) == 0, "wrong bytes, or it hung"
        rounds, loaded, _ = map(int, each.stdout.readline().split())
        assert rounds > 10 and loaded > 10
    assert kills
    eventually(lambda: store.disk().state == "ready", 70)
    eventually(lambda: (i := store.counts().index).leases == i.reservations == 0, 20, "nothing is held")
