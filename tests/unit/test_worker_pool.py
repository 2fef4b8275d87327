"""The node store's memory in a worker: mapped, registered piece by piece, changed with the store."""

import heapq
import itertools
import logging
import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support import Clock, eventually
from worker_fakes import MIB, Link, cache, ids, load, run

from vllm_kvtier.errors import KVTierError
from vllm_kvtier.store import messages as m
from vllm_kvtier.store.client import StoreClient
from vllm_kvtier.store.options import StoreOptions
from vllm_kvtier.store.server import StoreServer
from vllm_kvtier.wire.reactor import Reactor
from vllm_kvtier.wire.slots import PAGE, PIECE, part_layout
from vllm_kvtier.worker.copier import make_copier
from vllm_kvtier.worker.offload import Offload
from vllm_kvtier.worker.pool import PATIENCE, Pool
from vllm_kvtier.worker.work import GroupLoad, LoadOrder, StoreOrder


@pytest.fixture
def clock():
    return Clock()


class Turns:
    """A reactor that runs when told to."""

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
        while self.turn():
            pass


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
        assert start // PIECE == (start + nbytes - 1) // PIECE, "no registration across a multiple of PIECE"
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

    def tell(self, instance, ready, pool):
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
    made.pool = Pool(
        made.turns, connect, make, lambda: made.changes.append((made.pool.instance, made.pool.registered_pages)),
        busy=lambda: made.busy, clock=clock,
    )
    made.pool.start()
    return made


def test_memory_is_registered_in_pieces_as_it_becomes_ready(world):
    pool, size = world.pool, 2 * PIECE + 3 * MIB
    world.client.tell("a", 0, size)
    world.turns.all()
    assert pool.instance == "a" and pool.registered_pages == 0 and pool.reason == ""
    world.client.tell("a", PIECE - PAGE, size)
    world.turns.all()
    assert not world.changes  # a slot may end in the last page of the piece
    world.client.tell("a", size - MIB, size)
    assert pool.registered_pages == 0  # nothing on the turn that heard of it
    world.turns.turn()
    assert world.changes == [("a", PIECE // PAGE)]  # and one piece a turn
    world.turns.all()
    assert pool.registered_pages == 2 * PIECE // PAGE
    world.client.tell("a", size, size)
    world.turns.all()
    assert pool.registered_pages == size // PAGE == world.changes[-1][1] and len(world.changes) == 3


def test_a_pool_that_ran_out_of_memory_is_used_as_far_as_it_goes(world):
    world.client.tell("a", PIECE, 4 * PIECE)
    world.client.tell("a", PIECE + 5 * MIB, PIECE + 5 * MIB)
    world.turns.all()
    assert world.pool.registered_pages == (PIECE + 5 * MIB) // PAGE


def test_waiting_loads_go_before_registering_but_not_for_ever(world):
    world.busy = True
    world.client.tell("a", 4 * PIECE, 4 * PIECE)
    began = world.clock.now
    world.turns.all()
    assert world.pool.registered_pages == 4 * PIECE // PAGE
    assert 3 * PATIENCE <= world.clock.now - began < 4 * PATIENCE


def test_what_the_driver_refuses_leaves_the_rest_in_use(world, caplog):
    world.most = 2 * PIECE
    with caplog.at_level(logging.WARNING, "vllm.kvtier.pool"):
        world.client.tell("a", 4 * PIECE, 4 * PIECE)
        world.turns.all()
        world.client.tell("a", 4 * PIECE, 4 * PIECE)
        world.turns.all()
    assert world.pool.registered_pages == 2 * PIECE // PAGE
    assert "only 512 MiB" in world.pool.reason and "ulimit -l" in world.pool.reason
    assert len(caplog.records) == 1


@pytest.mark.parametrize("error", [KVTierError("no layout"), RuntimeError("out of memory")])
def test_memory_that_cannot_be_used_is_not_tried_again_until_another_store_serves(world, error):
    world.refuse = error
    world.client.tell("a", PIECE, PIECE)
    world.client.tell("a", PIECE, PIECE)
    world.turns.all()
    assert world.pool.current is None and str(error) in world.pool.reason
    assert [m.closed for m in world.client.mappings] == [True]
    world.refuse = None
    world.client.tell("b", PIECE, PIECE)
    world.turns.all()
    assert world.pool.instance == "b" and world.pool.registered_pages == PIECE // PAGE and world.pool.reason == ""


def test_the_old_memory_stays_while_nobody_serves_and_while_copies_use_it(world, clock):
    pool, client = world.pool, world.client
    client.tell("a", PIECE, PIECE)
    world.turns.all()
    offload = Offload(pool, [MIB, MIB], clock=clock)
    offload.submit_load(load("r", 1000, instance="a"), clock.now + 20)
    offload.drive()
    client.tell("", 0, 0)
    assert pool.instance == "a" and pool.registered_pages == PIECE // PAGE
    client.tell("a", PIECE, PIECE)  # only the connection was lost
    world.turns.all()
    assert len(client.mappings) == 1

    client.tell("b", PIECE, PIECE)
    world.turns.all()
    assert world.changes[-1] == ("", 0) and not client.mappings[0].closed and len(client.mappings) == 1
    offload.submit_load(load("too early", 5, instance="b"), None)
    assert offload.drive().loads[0].request_id == "too early"
    client.tell("c", PIECE, PIECE)  # and once more before the copies on the first one ended
    clock.now += 20
    result, = offload.drive().loads
    assert result.request_id == "r" and result.failed and not result.checksum
    assert not world.copiers[0].closed, "unpinning takes seconds, and the model runner drives"
    world.turns.all()
    assert client.mappings[0].closed and world.copiers[0].closed
    assert pool.instance == "c" and pool.registered_pages == PIECE // PAGE and len(client.mappings) == 2
    offload.submit_load(load("again", 5, instance="c"), None)
    assert not run(offload, clock, 1).loads[0].failed


def test_memory_of_a_store_that_is_gone_is_let_go_in_the_end(world):
    world.client.tell("a", PIECE, PIECE)
    world.turns.all()
    world.client.tell("", 0, 0)
    assert world.pool.instance == "a"
    world.turns.all()  # until nothing is due: the grace is over
    assert world.pool.instance == "" and world.client.mappings[0].closed and world.changes[-1] == ("", 0)
    world.client.tell("b", PIECE, PIECE)
    world.turns.all()
    assert world.pool.instance == "b"


def test_disconnected_between_hearing_and_mapping(world):
    world.client.mappable = False
    world.client.tell("a", PIECE, PIECE)
    assert world.pool.current is None
    world.client.mappable = True
    world.client.tell("a", PIECE, PIECE)
    world.turns.all()
    assert world.pool.registered_pages == PIECE // PAGE


def test_closing_unmaps_whatever_runs(world, clock):
    world.client.tell("a", 2 * PIECE, 2 * PIECE)
    world.turns.all()
    offload = Offload(world.pool, [MIB, MIB], clock=clock)
    offload.submit_load(load("r", 100, instance="a"), None)
    offload.drive()
    world.pool.close()
    world.pool.close()
    assert world.client.closed and world.copiers[0].closed and world.client.mappings[0].closed
    clock.now += 1
    assert offload.drive().loads[0].failed  # what had not begun
    world.turns.all()
    world.client.tell("b", PIECE, PIECE)
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


def test_with_a_real_store_that_is_restarted(reactor, tmp_path):
    path = str(tmp_path / "store.sock")
    server = serve(path)
    view, memory = cache(64, 2)
    layouts = [part_layout(g) for g in view.groups]
    hello = m.Hello("rank 0", os.getpid(), "worker")
    pool = Pool(
        reactor,
        lambda changed: StoreClient(reactor, path, hello, on_change=changed),
        lambda mapping: make_copier(view, (mapping.address, mapping.nbytes, mapping), layouts, [0, 0]),
        lambda: None,
    )
    reactor.on_stop(pool.close)
    pool.start()
    offload = Offload(pool, [part.nbytes for part in layouts])
    whole = (4 << 20) // PAGE
    eventually(lambda: pool.registered_pages == whole)
    first = pool.instance
    assert first == server.instance
    blocks = np.arange(1, 33)
    before = memory.clone()

    def order(instance):
        return StoreOrder(next(ids), 0, blocks, blocks.astype(np.uint64), blocks, -1, instance)

    def back(name, instance):
        return LoadOrder(name, [GroupLoad(0, blocks, blocks.astype(np.uint64), blocks)], 10.0, instance)

    def copied(submit, enough):
        on(reactor, submit)
        total = SimpleNamespace(loads=[], stored=[], cut=[])

        def look():
            ended = on(reactor, offload.drive)
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
        assert result.checksum and 1 in result.bad_blocks
        memory.copy_(before)
        fresh = order(pool.instance)
        assert copied(lambda: offload.submit_store(fresh), lambda t: t.stored).stored == [fresh.id]
        memory.zero_()
        result, = copied(lambda: offload.submit_load(back("r", pool.instance), None), lambda t: t.loads).loads
        assert not result.failed and torch.equal(memory[:3, 1:33], before[:3, 1:33])
        mappings = [line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:" in line]
        assert len([line for line in mappings if "kvtier" in line]) <= 2  # the server's own, and ours
    finally:
        server.stop()
