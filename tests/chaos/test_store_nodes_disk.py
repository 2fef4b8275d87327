"""Two node stores, one with a disk: what lies there and not in its memory the other gets, right, and nothing
that happens to the one costs the other more than it."""

import os
import signal
import time

import pytest
from store_process import Engine, Store
from store_support import EVERYTHING, NAMESPACE_ID, block_hashes_of
from support import eventually, stop

from vllm_kvtier.devtools.processes import free_port
from vllm_kvtier.store import protocol as m

PREFIXES = [block_hashes_of((32, number)) for number in range(6)]  # three quarters of what one memory holds


class Pair:
    """A has a disk, B none; each knows the other."""

    def __init__(self, folder):
        ports = [free_port() for _ in range(2)]
        self.stores, self.options = [], []
        for side, (own, other) in enumerate([ports, ports[::-1]]):
            home = folder / "ab"[side]
            home.mkdir()
            self.stores.append(Store(home, (), {"UCX_TLS": "tcp"}))
            self.options.append([f"--nodes=127.0.0.1:{other}", f"--node-listen=127.0.0.1:{own}"])
        self.options[0] += [f"--disk-path={folder / 'disk'}", "--disk-size=64MiB", "--disk-admission=all"]

    def start(self, side: int) -> Store:
        store = self.stores[side]
        store.kill()
        store.start(*self.options[side])
        return store

    def close(self) -> None:
        for store in self.stores:
            store.kill()


@pytest.fixture
def pair(tmp_path):
    """A was killed and started anew: all that it had is on its disk, and nothing in its memory. B is new."""
    pair = Pair(tmp_path)
    try:
        a = pair.start(0)
        with Engine(a) as near:
            assert [near.fill(block_hashes) for block_hashes in PREFIXES] == [32] * len(PREFIXES)

            def written() -> bool:
                lane = a.disk().extra
                return lane["queued_blocks"] == 0 and lane["written"] == 32 * len(PREFIXES)

            eventually(written, 30, "all of it is on the disk")
        a = pair.start(0)
        assert a.disk().blocks == 32 * len(PREFIXES) and a.counts().index.entries == 0
        pair.start(1)
        yield pair
    finally:
        pair.close()


def quiet(*stores: Store) -> None:
    for store in stores:
        eventually(lambda store=store: (i := store.counts().index).leases == i.reservations == 0, 20)


def test_blocks_on_disk_of_another_node_are_found(pair):
    a, b = pair.stores
    with Engine(b) as far:
        # Asked for half of the first, so that there is a beginning in A's memory when all of it is asked for.
        assert far.find(PREFIXES[0][: len(PREFIXES[0]) // 2]) == 16
        assert [far.find(block_hashes) for block_hashes in PREFIXES] == [32] * len(PREFIXES)
        assert far.find(block_hashes_of((32, "nobody's"))) == 0
        # it is B's own by now
        assert [far.find(block_hashes, wait_seconds=0) for block_hashes in PREFIXES] == [32] * len(PREFIXES)
    mine, theirs = a.tier("nodes"), b.tier("nodes")
    assert a.disk().read_blocks == theirs.read_blocks == 32 * len(PREFIXES)
    assert mine.extra["lease_promotions"] == len(PREFIXES) + 1 and mine.extra["leased_blocks"] >= 32 * len(PREFIXES)
    # A did not ask B, which had asked A.
    assert mine.lookups == 0 and theirs.extra["leases_granted"] == 0
    quiet(a, b)


def test_restarted_reader_gets_promoted_blocks_from_memory_again(pair):
    a, b = pair.stores
    with Engine(b) as far:
        assert far.find(PREFIXES[0]) == 32
    b = pair.start(1)
    with Engine(b) as far:
        assert far.find(PREFIXES[0]) == 32
    assert a.disk().read_blocks == 32  # once


def test_hung_disk_delays_lookup_by_promotion_timeout_only(pair):
    a, b = pair.stores
    tier_process = _disk_mover(a)
    stop(tier_process)
    with Engine(b) as far:
        began = time.monotonic()
        assert far.find(PREFIXES[1], wait_seconds=1.0) == 0
        assert time.monotonic() - began < 8  # its request to the disk would end after 10 s
        # An engine that asks meanwhile learns how much is being promoted, and can tell whether that is worth a wait.
        told = far.ask(m.Lookup(1, NAMESPACE_ID, PREFIXES[1], 0, EVERYTHING)).promotion
        assert told.num_hash_blocks == 32 and 0 < told.seconds < 30
        os.kill(tier_process, signal.SIGCONT)
        assert far.find(PREFIXES[1]) == 32
        # It was waited for, not given up as dead: neither side began anew.
        assert (b.tier("nodes").restarts, b.tier("nodes").timeouts, a.disk().restarts) == (0, 0, 0)
    quiet(a, b)


@pytest.mark.parametrize("victim", [0, 1])
def test_node_dying_during_promotion_fails_the_read(pair, victim):
    a, b = pair.stores
    tier_process = _disk_mover(a)
    stop(tier_process)
    with Engine(b) as far:
        began = time.monotonic()
        assert far.find(PREFIXES[2], wait_seconds=0.5) == 0  # A is bringing it up
        eventually(lambda: a.tier("nodes").extra["lease_promotions"] == 1)
        pair.stores[victim].kill()
        if victim == 0:
            assert far.find(PREFIXES[3], wait_seconds=1.0) == 0
            assert time.monotonic() - began < 20  # of 75 for a read
        else:
            os.kill(tier_process, signal.SIGCONT)
            quiet(a)
    survivor = pair.start(victim)
    quiet(survivor, pair.stores[1 - victim])
    with Engine(b) as far:
        eventually(lambda: far.find(PREFIXES[2], wait_seconds=5.0) == 32, 60, "found as soon as both are there again")


def _disk_mover(store: Store) -> int:
    """Pid of its disk's tier process: the one that has the disk's files open."""
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/stat") as stat:
                    parent = int(stat.read().rpartition(") ")[2].split()[1])
                if parent == store.process.pid:
                    folder = f"/proc/{entry}/fd"
                    if any("/disk/" in os.readlink(f"{folder}/{fd}") for fd in os.listdir(folder)):
                        return int(entry)
            except OSError:
                continue  # it ended meanwhile
    raise AssertionError("no tier process has the disk open")
