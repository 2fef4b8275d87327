"""RemoteStoreWorker through whatever may happen to its loads, in any order; and once with NIXL."""

import random
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from remote_store_fakes import FarNode
from remote_store_harness import BLOCKS, World, keys_of
from support import WITHOUT_SHRINKING, eventually
from worker_fakes import cache

from vllm_kvtier.errors import KVTierError
from vllm_kvtier.jobs.transfer_jobs import GroupLoad, LoadJob
from vllm_kvtier.remote_store import transfers as node_reads
from vllm_kvtier.remote_store.nixl_agent import Server
from vllm_kvtier.wire.reactor import Reactor
from vllm_kvtier.wire.slots import PAGE
from vllm_kvtier.worker.context import RankContext
from vllm_kvtier.worker.remote_store import remote_store_worker as far
from vllm_kvtier.worker.remote_store import staging_ring
from vllm_kvtier.worker.remote_store.remote_store_worker import RemoteStoreWorker


@given(st.integers(0, 2**32))
@settings(max_examples=150, deadline=None, phases=WITHOUT_SHRINKING)
def test_remote_worker_random_operations_keep_invariants(seed):
    """Each load ends once; good blocks are right; nothing is written into a block whose load has ended."""
    rng = random.Random(seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(node_reads, "GRACE_SECONDS", rng.choice([0.0, 0.001]))
        patch.setattr(node_reads, "STALL_SECONDS", 0.002)
        # One look a turn.
        patch.setattr(far.Poller, "_run_slice", _one_poll)
        world = World(buffers=(rng.choice([2, 3, 5]), rng.choice([PAGE, 3 * PAGE])))
        free, loading, sent, wrong = list(range(1, BLOCKS)), {}, 0, {}
        settled: dict[int, torch.Tensor] = {}

        def ended():
            for name in [name for name in loading if name in world.results]:
                blocks, result = loading.pop(name), world.results[name]
                bad = result.bad_blocks
                assert bad <= set(blocks) and bool(bad) == result.failed
                good = [block for block in blocks if block not in bad]
                assert all(world.right(0, good)), "what is called right is right"
                assert not wrong[name] & set(good)
                free.extend(blocks)
                for block in blocks:  # they are another request's
                    world.bytes[:3, block] = rng.randrange(256)
                    settled[block] = world.bytes[:3, block].clone()

        for _ in range(rng.randint(5, 60)):
            what = rng.random()
            if what < 0.35 and free and sent < 12:
                name = f"r{sent}"
                sent += 1
                count = rng.randint(1, min(len(free), 8))
                loading[name] = [free.pop(rng.randrange(len(free))) for _ in range(count)]
                for block in loading[name]:
                    settled.pop(block, None)
                node = rng.choice("ab")
                order = world.order(name, node, groups=((0, loading[name]),), timeout=rng.choice([0.001, 60]))
                wrong[name] = set()
                if rng.random() < 0.2:
                    at = rng.randrange(count)
                    wrong[name] = {loading[name][at]}
                    world.nodes[node].bytes[int(order.groups[0].slots[at]) * PAGE + rng.randrange(64)] ^= 1
                world.worker.load([order], None)
            elif what < 0.6:
                agent = rng.choice(["agent of a", "agent of b"])
                world.network.behaviour[agent] = rng.choice(["done", "done", "hangs", "fails"])
            elif what < 0.65 and loading:
                world.worker.cancel_loads([rng.choice(list(loading))])
            elif what < 0.7:
                world.worker.suspend()
                ended()
                before = world.bytes.clone()
                world.turn(2)
                assert (world.bytes == before).all()
                world.worker.step(1, None)
            elif what < 0.75:
                world.network.deliver()
            world.turn()
            ended()
        world.network.behaviour = {}
        for _ in range(300):
            world.turn()
            ended()
            if not loading and len(world.ring.free) == world.ring.count:
                break
        world.network.deliver()
        assert not loading and len(world.ring.free) == world.ring.count
        for block, content in settled.items():
            assert (world.bytes[:3, block] == content).all(), f"block {block} was written after its load had ended"
        assert not world.worker._transfers and not world.worker._broken


def _one_poll(drive) -> None:
    drive._running = any([poll() for poll in drive._polls])
    if drive._running:
        drive._reactor.call_soon(drive._slice)


def test_remote_worker_loads_with_real_nixl(monkeypatch):
    """The real agents over UCX's loopback: the store's server is asked for progress, as its tier process would be."""
    try:
        truth, truth_bytes = cache(BLOCKS, seed=1)
        node = FarNode(truth, ranks=2)
        server = Server(SimpleNamespace(address=node.address, nbytes=node.nbytes), "server of a node")
    except KVTierError as error:
        pytest.skip(str(error))
    mine, mine_bytes = cache(BLOCKS, seed=2)
    server.register({0})
    stop, reactor, told, results = threading.Event(), Reactor("far"), [], []

    def progress():
        while not stop.wait(2e-4):
            server.progress()

    thread = threading.Thread(target=progress)
    thread.start()
    try:
        monkeypatch.setattr(staging_ring, "HOST_BUFFERS", (3, 4 * PAGE))
        worker = RemoteStoreWorker(RankContext(1, reactor, told.append, results.append), mine, node.setup())
        assert told[0].nbytes
        reactor.start()
        far_source = node.source()
        far_source = type(far_source)("node", server.name, node.address, server.metadata, 1)
        slots = node.fill(0, range(1, 20), keys_of(range(1, 20)) ^ worker._salts[0], rank=1)
        load = GroupLoad(0, np.arange(1, 20), keys_of(range(1, 20)), slots)
        worker.load([LoadJob("r", [load], 20.0, "node", remote_store=far_source)], None)
        eventually(lambda: results, 20)
        assert not results[0].failed, results[0]
        assert (mine_bytes[:3, 1:20] == truth_bytes[:3, 1:20]).all()
        node.bytes[int(slots[4]) * PAGE + node.offsets[1][0] + 5] ^= 1
        worker.load([LoadJob("s", [load], 20.0, "node", remote_store=far_source)], None)
        eventually(lambda: len(results) > 1, 20)
        assert results[1].corrupt == [(0, int(slots[4]))]
    finally:
        stop.set()
        thread.join()
        reactor.stop()
