"""The node store's memory in a worker: mapped, registered piece by piece, changed with the store."""

import errno
import heapq
import itertools
import logging
import os
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support import Clock, eventually
from worker_fakes import MIB, Link, cache, ids, load, run

from vllm_kvtier.errors import KVTierError
from vllm_kvtier.jobs.transfer_jobs import GroupLoad, LoadJob, StoreJob
from vllm_kvtier.store import protocol as m
from vllm_kvtier.store.client import StoreClient
from vllm_kvtier.store.memory import client_mapping
from vllm_kvtier.store.memory.client_mapping import PoolMapping
from vllm_kvtier.store.options import StoreOptions
from vllm_kvtier.store.server.server import StoreServer
from vllm_kvtier.wire.reactor import Reactor
from vllm_kvtier.wire.slots import PAGE, PIECE_BYTES, part_layout
from vllm_kvtier.worker.copy.base import make_copier
from vllm_kvtier.worker.device import cuda_driver
from vllm_kvtier.worker.store import store_memory
from vllm_kvtier.worker.store.copy_engine import CopyEngine
from vllm_kvtier.worker.store.store_memory import MAX_DELAY, MemoryUser, StoreMemory


@pytest.fixture
def clock():
    return Clock()


class Turns:
    """A reactor that runs when asked to."""

    def __init__(self, clock):
        self.clock, self.soon, self.timers, self.order = clock, [], [], itertools.count()

    def call_soon(self, callback):
        self.soon.append(callback)

    def call_later(self, delay, callback):
        heapq.heappush(self.timers, (self.clock.now + delay, next(self.order), callback))

    def turn(self):
        """One turn; False when nothing is due."""
        now, self.soon = self.soon, []
        if not now and self.timers:
            when, _, callback = heapq.heappop(self.timers)
            self.clock.now = max(self.clock.now, when)
            now = [callback]
        for callback in now:
            callback()
        return bool(now)

    def all(self):
        while self.turn() or unmapped():
            pass


def unmapped():
    """Whether memory was being given back; it has been by then."""
    under_way = [thread for thread in threading.enumerate() if thread.name == store_memory.UNMAP_THREAD]
    for thread in under_way:
        thread.join()
    return bool(under_way)


class FakeMapping:
    def __init__(self, instance, nbytes):
        self.instance, self.nbytes, self.address, self.closed = instance, nbytes, 0, False

    def close(self):
        assert not self.closed
        self.closed = True


class FakeCopier(Link):
    def __init__(self, clock, mapping):
        super().__init__(clock)
        self.mapping, self.registered, self.closed, self.most = mapping, [], False, None

    def register(self, start, nbytes):
        assert not self.closed and not self.mapping.closed
        assert start == sum(n for _, n in self.registered)
        assert start // PIECE_BYTES == (start + nbytes - 1) // PIECE_BYTES, "no registration across a multiple of PIECE"
        if self.most is not None and start + nbytes > self.most:
            raise RuntimeError("the limit on locked memory (ulimit -l) is reached")
        self.registered.append((start, nbytes))

    def close(self):
        assert not self.mapping.closed, "unmapped under the copier"
        self.closed = True


class FakeClient:
    connected, instance, ready_pages, pool_pages, mappable, closed = False, "", 0, 0, True, False

    def __init__(self, changed):
        self.changed, self.mappings = changed, []

    def start(self):
        pass

    def close(self):
        self.closed = True

    def open_pool(self):
        if not self.mappable:
            return None
        self.mappings.append(FakeMapping(self.instance, self.pool_pages * PAGE))
        return self.mappings[-1]

    def send(self, instance, ready, pool):
        self.connected, self.instance = bool(instance), instance
        self.ready_pages, self.pool_pages = ready // PAGE, pool // PAGE
        self.changed()


@pytest.fixture
def world(clock):
    made = SimpleNamespace(changes=[], copiers=[], busy=False, refuse=None, clock=clock, most=None)

    def make(mapping):
        if made.refuse is not None:
            raise made.refuse
        made.copiers.append(FakeCopier(clock, mapping))
        made.copiers[-1].most = made.most
        return made.copiers[-1]

    def connect(changed):
        made.client = FakeClient(changed)
        return made.client

    made.turns = Turns(clock)
    made.pool = StoreMemory(
        made.turns, connect, make,
        MemoryUser(
            lambda: made.changes.append((made.pool.instance, made.pool.registered_pages)), busy=lambda: made.busy
        ),
        clock=clock,
    )  # fmt: skip
    made.pool.start()
    return made


@pytest.mark.parametrize("found_by", ["dup", "mmap"])  # Python's mmap duplicates the descriptor once more
def test_store_memory_that_found_no_descriptor_is_mapped_later(world, caplog, monkeypatch, found_by):
    def fails(*_):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patch:
        patch.setattr(client_mapping.mmap, "mmap", fails)
        mapped = lambda: PoolMapping(os.open("/dev/null", os.O_RDONLY), 0, "a")  # noqa: E731
        patch.setattr(world.client, "open_pool", fails if found_by == "dup" else mapped)
        world.client.send("a", MIB, MIB)
        assert "Too many open files" in world.pool.reason and "Traceback" not in caplog.text
    world.turns.all()
    assert world.pool.registered_pages == MIB // PAGE and world.pool.reason == ""


def test_store_memory_is_registered_in_pieces(world):
    pool, size = world.pool, 2 * PIECE_BYTES + 3 * MIB
    world.client.send("a", 0, size)
    world.turns.all()
    assert pool.instance == "a" and pool.registered_pages == 0 and pool.reason == ""
    world.client.send("a", PIECE_BYTES - PAGE, size)
    world.turns.all()
    assert not world.changes  # a slot may end in the last page of the piece
    world.client.send("a", size - MIB, size)
    assert pool.registered_pages == 0  # nothing in the call that reported it
    world.turns.turn()
    assert world.changes == [("a", PIECE_BYTES // PAGE)]  # and one piece a turn
    world.turns.all()
    assert pool.registered_pages == 2 * PIECE_BYTES // PAGE
    world.client.send("a", size, size)
    world.turns.all()
    assert pool.registered_pages == size // PAGE == world.changes[-1][1] and len(world.changes) == 3


def test_store_memory_partly_registered_is_used(world):
    world.client.send("a", PIECE_BYTES, 4 * PIECE_BYTES)
    world.client.send("a", PIECE_BYTES + 5 * MIB, PIECE_BYTES + 5 * MIB)
    world.turns.all()
    assert world.pool.registered_pages == (PIECE_BYTES + 5 * MIB) // PAGE


def test_store_memory_loads_go_before_registration_for_bounded_time(world):
    world.busy = True
    world.client.send("a", 4 * PIECE_BYTES, 4 * PIECE_BYTES)
    began = world.clock.now
    world.turns.all()
    assert world.pool.registered_pages == 4 * PIECE_BYTES // PAGE
    assert 3 * MAX_DELAY <= world.clock.now - began < 4 * MAX_DELAY


def test_store_memory_registration_failure_keeps_the_rest(world, caplog):
    world.most = 2 * PIECE_BYTES
    with caplog.at_level(logging.WARNING, "vllm.kvtier.worker.store.store_memory"):
        world.client.send("a", 4 * PIECE_BYTES, 4 * PIECE_BYTES)
        world.turns.all()
        world.client.send("a", 4 * PIECE_BYTES, 4 * PIECE_BYTES)
        world.turns.all()
    assert world.pool.registered_pages == 2 * PIECE_BYTES // PAGE
    assert "only 512 MiB" in world.pool.reason and "ulimit -l" in world.pool.reason
    assert len(caplog.records) == 1


@pytest.mark.parametrize("error", [KVTierError("no layout"), RuntimeError("out of memory")])
def test_store_memory_unusable_is_retried_with_next_store_only(world, error):
    world.refuse = error
    world.client.send("a", PIECE_BYTES, PIECE_BYTES)
    world.client.send("a", PIECE_BYTES, PIECE_BYTES)
    world.turns.all()
    assert world.pool.current is None and str(error) in world.pool.reason
    assert [m.closed for m in world.client.mappings] == [True]
    world.refuse = None
    world.client.send("b", PIECE_BYTES, PIECE_BYTES)
    world.turns.all()
    assert world.pool.instance == "b" and world.pool.registered_pages == PIECE_BYTES // PAGE and world.pool.reason == ""


def test_store_memory_of_a_device_without_nvidias_driver_is_refused_once(world, monkeypatch, caplog):
    """The missing library was taken for too few descriptors, and mapped again every minute."""
    def absent(name):
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(cuda_driver.ctypes, "CDLL", absent)
    with pytest.raises(cuda_driver.CudaError) as caught:
        cuda_driver._library()
    world.refuse = caught.value
    world.client.send("a", PIECE_BYTES, PIECE_BYTES)
    world.turns.all()
    assert "libcuda.so.1" in world.pool.reason and "tried again" not in caplog.text
    assert len(world.client.mappings) == 1


def test_store_memory_of_old_store_stays_while_copies_use_it(world, clock):
    pool, client = world.pool, world.client
    client.send("a", PIECE_BYTES, PIECE_BYTES)
    world.turns.all()
    offload = CopyEngine(pool, [MIB, MIB], clock=clock)
    offload.submit_load(load("r", 1000, instance="a"), clock.now + 20)
    offload.poll()
    client.send("", 0, 0)
    assert pool.instance == "a" and pool.registered_pages == PIECE_BYTES // PAGE
    client.send("a", PIECE_BYTES, PIECE_BYTES)  # only the connection was lost
    world.turns.all()
    assert len(client.mappings) == 1

    client.send("b", PIECE_BYTES, PIECE_BYTES)
    world.turns.all()
    assert world.changes[-1] == ("", 0) and not client.mappings[0].closed and len(client.mappings) == 1
    offload.submit_load(load("too early", 5, instance="b"), None)
    assert offload.poll().loads[0].request_id == "too early"
    client.send("c", PIECE_BYTES, PIECE_BYTES)  # and once more before the copies on the first one ended
    clock.now += 20
    result, = offload.poll().loads
    assert result.request_id == "r" and result.failed and not result.checksum_mismatch
    world.turns.all()
    assert client.mappings[0].closed and world.copiers[0].closed
    assert pool.instance == "c" and pool.registered_pages == PIECE_BYTES // PAGE and len(client.mappings) == 2
    offload.submit_load(load("again", 5, instance="c"), None)
    assert not run(offload, clock, 1).loads[0].failed


def test_store_memory_of_gone_store_is_unmapped_after_grace_period(world):
    world.client.send("a", PIECE_BYTES, PIECE_BYTES)
    world.turns.all()
    world.client.send("", 0, 0)
    assert world.pool.instance == "a"
    world.turns.all()  # until nothing is due: the grace is over
    assert world.pool.instance == "" and world.client.mappings[0].closed and world.changes[-1] == ("", 0)
    world.client.send("b", PIECE_BYTES, PIECE_BYTES)
    world.turns.all()
    assert world.pool.instance == "b"


def test_store_memory_that_is_given_back_does_not_hold_up_the_reactor(world):
    """Unpinning 200 GiB takes seconds, in which peers would get no checksums."""
    world.client.send("a", PIECE_BYTES, PIECE_BYTES)
    world.turns.all()
    unpinned, (copier,), (mapping,) = threading.Event(), world.copiers, world.client.mappings
    close = copier.close
    copier.close = lambda: unpinned.wait(2) and close()
    world.client.send("b", PIECE_BYTES, PIECE_BYTES)
    assert world.pool.instance == "" and not mapping.closed
    unpinned.set()
    world.turns.all()
    assert mapping.closed and copier.closed and world.pool.instance == "b"


def test_store_memory_is_given_back_where_no_thread_can_be_started(world, monkeypatch):
    """It stayed pinned otherwise, and the next store's memory was never mapped."""
    world.client.send("a", PIECE_BYTES, PIECE_BYTES)
    world.turns.all()

    def start(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    world.client.send("b", PIECE_BYTES, PIECE_BYTES)
    world.turns.all()
    assert world.client.mappings[0].closed and world.copiers[0].closed and world.pool.instance == "b"


def test_store_memory_mapping_after_disconnect_is_retried(world):
    world.client.mappable = False
    world.client.send("a", PIECE_BYTES, PIECE_BYTES)
    assert world.pool.current is None
    world.client.mappable = True
    world.client.send("a", PIECE_BYTES, PIECE_BYTES)
    world.turns.all()
    assert world.pool.registered_pages == PIECE_BYTES // PAGE


def test_store_memory_close_unmaps_with_copies_running(world, clock):
    world.client.send("a", 2 * PIECE_BYTES, 2 * PIECE_BYTES)
    world.turns.all()
    offload = CopyEngine(world.pool, [MIB, MIB], clock=clock)
    offload.submit_load(load("r", 100, instance="a"), None)
    offload.poll()
    world.pool.close()
    world.pool.close()
    assert world.client.closed and world.copiers[0].closed and world.client.mappings[0].closed
    clock.now += 1
    assert offload.poll().loads[0].failed  # what had not begun
    world.turns.all()
    world.client.send("b", PIECE_BYTES, PIECE_BYTES)
    world.turns.all()
    assert world.pool.current is None and len(world.client.mappings) == 1


# -- with a real store -----------------------------------------------------------------------------------------------


@pytest.fixture
def reactor():
    reactor = Reactor("test")
    reactor.start()
    yield reactor
    reactor.stop()


def serve(path):
    server = StoreServer(path, StoreOptions(size="4MiB"))
    server.start()
    return server


def on(reactor, function):
    """What ``function`` returns on the reactor's thread."""
    answer = []
    reactor.call_soon(lambda: answer.append(function()))
    return eventually(lambda: answer)[0]


def store_mappings() -> set[str]:
    """This process's, each with its address and inode. Other tests' may be left to be collected."""
    return {line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:kvtier" in line}


def test_store_memory_follows_restarted_store(reactor, tmp_path):
    path, earlier = str(tmp_path / "store.sock"), store_mappings()
    server = serve(path)
    view, memory = cache(64, 2)
    layouts = [part_layout(g) for g in view.groups]
    hello = m.Hello("rank 0", os.getpid(), "worker")
    pool = StoreMemory(
        reactor,
        lambda changed: StoreClient(reactor, path, hello, on_change=changed),
        lambda mapping: make_copier(view, (mapping.address, mapping.nbytes, mapping), layouts, [0, 0]),
        MemoryUser(lambda: None),
    )
    reactor.on_stop(pool.close)
    pool.start()
    offload = CopyEngine(pool, [part.nbytes for part in layouts])
    whole = (4 << 20) // PAGE
    eventually(lambda: pool.registered_pages == whole)
    first = pool.instance
    assert first == server.instance
    blocks = np.arange(1, 33)
    before = memory.clone()

    def order(instance):
        return StoreJob(next(ids), 0, blocks, blocks.astype(np.uint64), blocks, -1, instance)

    def back(name, instance):
        return LoadJob(name, [GroupLoad(0, blocks, blocks.astype(np.uint64), blocks)], 10.0, instance)

    def copied(submit, enough):
        on(reactor, submit)
        total = SimpleNamespace(loads=[], stored=[], cut=[])

        def look():
            ended = on(reactor, offload.poll)
            for name in ("loads", "stored", "cut"):
                getattr(total, name).extend(getattr(ended, name))
            return enough(total)

        eventually(look)
        return total

    kept = order(first)
    assert copied(lambda: offload.submit_store(kept), lambda t: t.stored).stored == [kept.id]
    server.stop()
    # Nobody serves; what is there can still be loaded.
    result, = copied(lambda: offload.submit_load(back("r", first), None), lambda t: t.loads).loads
    assert not result.failed

    server = serve(path)
    try:
        eventually(lambda: pool.instance == server.instance and pool.registered_pages == whole)
        stale = order(first)
        ended = copied(
            lambda: (offload.submit_store(stale), offload.submit_load(back("old", first), None)),
            lambda t: t.loads and t.cut,
        )
        assert ended.cut == [(stale.id, 0)] and ended.loads[0].bad_blocks == set(blocks.tolist())
        # The new memory holds nothing under these keys.
        result, = copied(lambda: offload.submit_load(back("none", pool.instance), None), lambda t: t.loads).loads
        assert result.checksum_mismatch and 1 in result.bad_blocks
        memory.copy_(before)
        fresh = order(pool.instance)
        assert copied(lambda: offload.submit_store(fresh), lambda t: t.stored).stored == [fresh.id]
        memory.zero_()
        result, = copied(lambda: offload.submit_load(back("r", pool.instance), None), lambda t: t.loads).loads
        assert not result.failed and torch.equal(memory[:3, 1:33], before[:3, 1:33])
        assert len(store_mappings() - earlier) <= 2  # the server's own, and ours
    finally:
        server.stop()
