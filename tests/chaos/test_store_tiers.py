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
from store_support import EVERYTHING, SPACE, chain_of
from support import eventually

from vllm_kvtier.store import messages as m

CHAINS = [chain_of((32, number)) for number in range(20)]  # two and a half times what memory holds
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
        for chain in CHAINS:
            assert engine.fill(chain) == 32
            done += 32
            all_written(store, done)


def test_more_than_memory_holds_comes_back_from_disk(store):
    store.start(*ALL)
    fill_all(store)
    with Engine(store) as engine:
        at_once = engine.find(CHAINS[0], patience=0)
        assert at_once < 32  # memory has lost most of it
        assert [engine.find(chain) for chain in CHAINS] == [32] * len(CHAINS)
        # The disk has as much as it had, and nothing is under way any more.
        counts = engine.stat()
        assert counts.index.leases == counts.index.reservations == 0
        assert counts.tiers[0].read_blocks > 32 * len(CHAINS) / 2 and counts.tiers[0].blocks == 32 * len(CHAINS)


def test_a_killed_store_finds_its_disk_again(store):
    store.start(*ALL)
    fill_all(store)
    store.kill()
    store.start(*ALL)
    with Engine(store) as engine:
        assert [engine.find(chain) for chain in CHAINS] == [32] * len(CHAINS)


def test_what_is_warmed_is_in_memory_when_it_is_asked_for(store):
    store.start(*ALL)
    fill_all(store)
    with Engine(store) as engine:
        engine.tell(m.Warm(SPACE, CHAINS[3], EVERYTHING))
        eventually(lambda: engine.ask(m.Inspect(1, SPACE, CHAINS[3])).units == 32, 10)
        assert engine.find(CHAINS[3], patience=0) == 32


def test_only_what_is_seen_twice_is_written(store):
    store.start()
    with Engine(store) as engine:
        for chain in CHAINS[:4]:
            engine.fill(chain)
        assert engine.find(CHAINS[1]) == 32
        all_written(store, 32)
    time.sleep(0.3)  # nothing else may follow: there is no event for that
    assert store.disk().blocks == 32


def test_what_fails_its_checksum_is_gone_from_the_disk_too(store):
    store.start(*ALL)
    with Engine(store) as engine:
        engine.fill(CHAINS[0])
        all_written(store, 32)
        found = engine.lookup(CHAINS[0])
        engine.tell(m.Discard(SPACE, 0, CHAINS[0][5 * m.HASH : 6 * m.HASH], found.slots[0][5]))
        engine.tell(m.Release(found.lease))
        assert engine.find(CHAINS[0]) == 5
        engine.fill(CHAINS[1])
        all_written(store, 63)  # and before anything else is written, the journal says that it is gone
    store.kill()
    store.start(*ALL)
    with Engine(store) as engine:
        assert engine.find(CHAINS[0]) == 5


@pytest.mark.parametrize("seconds", [6, pytest.param(120, marks=pytest.mark.slow)])
def test_killed_again_and_again_under_load(store, seconds):
    """Two engines store, look up and check at random while the mover dies, and now and then the store."""
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
        elif pid := store.mover():
            os.kill(pid, signal.SIGKILL)
            kills += 1
    for each in busy:
        assert each.wait(60) == 0, "wrong bytes, or it hung"
        rounds, loaded, _ = map(int, each.stdout.readline().split())
        assert rounds > 10 and loaded > 10
    assert kills
    eventually(lambda: store.disk().state == "ready", 70)
    eventually(lambda: (i := store.counts().index).leases == i.reservations == 0, 20, "nothing is held")
