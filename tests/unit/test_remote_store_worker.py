"""RemoteStoreWorker: loads from other nodes' memory into a cache on a CPU, with a stand-in for NIXL."""

import threading
from types import SimpleNamespace

import pytest
import torch
from remote_store_fakes import FarNode, Network, Turns
from remote_store_harness import BLOCKS, World, keys_of
from worker_fakes import cache

from vllm_kvtier.errors import KVTierError
from vllm_kvtier.jobs.results import ABORTED
from vllm_kvtier.remote_store import transfers as node_reads
from vllm_kvtier.store.memory.memory_limits import MemoryLimits
from vllm_kvtier.wire import link as m
from vllm_kvtier.wire.geometry import Field, GroupView, Region
from vllm_kvtier.wire.slots import PAGE
from vllm_kvtier.worker.cache_view import CacheView
from vllm_kvtier.worker.context import RankContext
from vllm_kvtier.worker.copy.base import make_copier
from vllm_kvtier.worker.remote_store import remote_store_worker, staging_ring
from vllm_kvtier.worker.remote_store.remote_store_worker import RemoteStoreWorker


@pytest.mark.parametrize("ranks, rank", [(1, 0), (3, 0), (3, 1), (3, 2)])
def test_remote_worker_loads_blocks_exactly(ranks, rank):
    world = World(ranks=ranks, rank=rank)
    assert world.told == [m.PoolReady(rank, "far", world.ring.nbytes)]
    groups = (0, tuple(range(1, 15))), (1, (16, 17, 19))
    before = world.bytes.clone()
    world.load(world.order("r", groups=groups, rank=rank))
    world.until("r")
    result = world.results["r"]
    assert not result.failed and result.reason == "" and result.bytes > 0
    assert result.fenced == 0.0 < result.seconds, "all of it was the link's time"
    assert all(world.right(0, groups[0][1]) + world.right(1, groups[1][1]))
    untouched = [b for b in range(BLOCKS) if b not in groups[0][1]]
    assert (world.bytes[:3, untouched] == before[:3, untouched]).all()
    assert len(world.ring.free) == world.ring.count and not world.worker.under_way()
    begun = [entry for entry in world.network.log if entry[0] == "begin"]
    assert len(begun) > 2, "more pieces than buffers"


def test_remote_worker_reads_only_its_rank_part():
    """A rank reads its part of a slot; a slot that is one part goes whole, in runs."""
    divided, whole = World(ranks=3, rank=1), World()
    for world, rank in ((divided, 1), (whole, 0)):
        world.load(world.order("r", groups=((0, (1, 2)),), rank=rank))
        world.until("r")
    read = [sum(e[2] for e in world.network.log if e[0] == "begin") for world in (divided, whole)]
    assert read == [2 * divided.nodes["a"].layouts[0].nbytes, 2 * whole.nodes["a"].slot_pages[0] * PAGE]


@pytest.mark.parametrize("name", ["int8", "rot4"])
def test_remote_worker_decodes_encoded_blocks(name):
    """The same as from the memory of a node store on this node."""
    fields = (Field("k", 64), Field("v", 64))

    def made(seed) -> tuple[CacheView, torch.Tensor]:
        memory = torch.randn((2, BLOCKS, 2 * 16 * 128), generator=torch.Generator().manual_seed(seed)).bfloat16()
        regions = tuple(
            Region(f"l{n}", memory[n].data_ptr(), 8192, 2, 4096, 0, 16, 256, 256, dtype="bfloat16", fields=fields)
            for n in range(2)
        )
        return CacheView([GroupView(0, 16, "full", None, regions)], BLOCKS, "cpu", [memory.untyped_storage()]), memory

    world = World(view=made(1), mine=made(2), names=[name], buffers=(2, 8 * PAGE))
    blocks = tuple(range(1, 12))
    order = world.order("r", groups=((0, blocks),))
    near, near_bytes = made(3)
    node = world.nodes["a"]
    pool = node.address, node.nbytes, SimpleNamespace(buffer=memoryview(node._memory))
    copier = make_copier(near, pool, node.layouts, node.offsets[0])
    copier.register(0, node.nbytes)
    [load] = order.groups
    assert not copier.load(0, load.blocks, load.keys ^ world.worker._salts[0], load.slots).bad.any()
    world.load(order)
    world.until("r")
    assert not world.results["r"].failed
    assert torch.equal(world.bytes[:, 1:12], near_bytes[:, 1:12])
    assert not torch.equal(world.bytes[:, 1:12], world.truth_bytes[:, 1:12]), "something was lost"


def test_remote_worker_flipped_bit_is_reported_by_block(caplog):
    world = World()
    order = world.order("r", groups=((0, (1, 2, 3)), (1, (4, 5))))
    slot = int(order.groups[0].slots[1])
    world.nodes["a"].bytes[slot * PAGE + 17] ^= 4
    world.load(order)
    world.until("r")
    result = world.results["r"]
    assert result.checksum_mismatch and result.corrupt == [(0, slot)] and "wrong checksum" in result.reason
    assert "1 blocks have a wrong checksum" in caplog.text
    assert 2 in result.bad_blocks and 1 not in result.bad_blocks
    assert all(world.right(1, (4, 5))) and world.right(0, (1,)) == [True]
    assert not world.told[1:], "the store is asked again, for what is right"


def test_remote_worker_other_content_in_slot_is_detected():
    world = World()
    order = world.order("r", groups=((0, (1, 2)),))
    order.groups[0].keys[:] = keys_of([7, 8])
    world.load(order)
    world.until("r")
    assert world.results["r"].bad_blocks == {1, 2} and world.results["r"].checksum_mismatch


def test_remote_worker_invalid_slot_fails_the_load():
    world = World(buffers=(3, 16 * PAGE))
    order = world.order("r", groups=((0, (1, 2)),))
    order.groups[0].slots[1] = 0
    world.load(order)
    world.until("r")
    assert world.results["r"].bad_blocks == {1, 2} and not world.results["r"].checksum_mismatch
    assert len(world.ring.free) == world.ring.count


def test_remote_store_death_fails_loads_and_keeps_buffers_until_safe(monkeypatch):
    world = World()
    world.network.behaviour = {"agent of a": "fails", "agent of b": "hangs"}
    world.load(world.order("slow", "b", groups=((0, (7,)),)), world.order("dies", "a", groups=((0, (1, 2, 3)),)))
    world.until("dies")
    assert world.results["dies"].bad_blocks == {1, 2, 3} and "it broke" in world.results["dies"].reason
    assert m.RemoteStoreLost(0, "a", 1, "a read failed: it broke") in world.told
    # Another store is being read from: the agent lives on for a while, and may still write.
    assert "closed" not in world.network.log and len(world.ring.free) < world.ring.count - 1
    free = list(world.ring.free)
    before = world.bytes.clone()
    world.network.deliver()
    assert (world.bytes == before).all() and world.ring.free == free, "what comes late lands in the ring"
    world.network.behaviour = {}
    world.until("slow")
    assert world.right(0, (7,)) == [True] and not world.results["slow"].failed
    world.turn(3)
    assert "closed" in world.network.log and len(world.ring.free) == world.ring.count
    world.load(world.order("again", "a", groups=((0, (1, 2, 3)),)))
    world.until("again")
    assert not world.results["again"].failed and all(world.right(0, (1, 2, 3)))


def test_remote_worker_hung_store_fails_load_and_frees_buffers(monkeypatch):
    monkeypatch.setattr(node_reads, "STALL_SECONDS", 0.02)
    world = World()
    world.network.behaviour = {"agent of a": "hangs"}
    world.load(world.order("r"))
    world.until("r", turns=100)
    assert world.results["r"].bad_blocks == {1, 2, 3, 4, 5} and "no progress" in world.results["r"].reason
    world.turn(3)
    assert len(world.ring.free) == world.ring.count


def test_remote_worker_hung_store_leaves_buffers_for_others(monkeypatch):
    world = World(buffers=(4, 2 * PAGE))
    world.network.behaviour = {"agent of a": "hangs"}
    world.load(world.order("slow", "a", groups=((0, tuple(range(1, 12))),)))
    world.turn(3)
    world.load(world.order("quick", "b", groups=((0, tuple(range(12, 20))),)))
    world.until("quick")
    assert "slow" not in world.results and all(world.right(0, range(12, 20)))


def test_remote_load_past_deadline_fails():
    world = World(buffers=(2, 2 * PAGE))
    world.network.behaviour = {"agent of a": "hangs"}
    world.load(world.order("r", groups=((0, tuple(range(1, 20))),), timeout=0.01))
    world.turn(20)
    assert "r" not in world.results, "what is under way may still be right, and is waited for"
    world.network.behaviour = {}
    world.until("r")
    assert "within 0.01 s" in world.results["r"].reason and world.results["r"].bad_blocks
    good = set(range(1, 20)) - world.results["r"].bad_blocks
    assert all(world.right(0, good))


def test_remote_worker_cancelled_load_ends_after_running_reads(monkeypatch):
    world = World(buffers=(2, 2 * PAGE))
    world.network.behaviour = {"agent of a": "hangs"}
    world.load(world.order("r", groups=((0, tuple(range(1, 20))),)))
    world.worker.cancel_loads(["r", "another"])
    world.turn(5)
    assert "r" not in world.results
    world.network.behaviour = {}
    world.until("r")
    assert "aborted" in world.results["r"].reason
    assert len([entry for entry in world.network.log if entry[0] == "begin"]) <= 2, "no more was begun"


def test_remote_worker_suspends_with_sleep_mode():
    """Once ``rest`` has returned nothing touches the cache, whatever arrives."""
    world = World()
    world.network.behaviour = {"agent of a": "hangs"}
    world.load(world.order("r"))
    world.worker.suspend()
    assert world.results["r"].bad_blocks == {1, 2, 3, 4, 5} and "sleep" in world.results["r"].reason
    before = world.bytes.clone()
    world.network.behaviour = {}
    world.turn(5)
    assert (world.bytes == before).all() and len(world.ring.free) == world.ring.count
    world.worker._load([world.order("asleep", groups=((0, (9,)),))], None)
    world.until("asleep")
    assert world.results["asleep"].failed
    world.worker.step(3, None)
    world.load(world.order("awake", groups=((0, (9,)),)))
    world.until("awake")
    assert world.right(0, (9,)) == [True]


def test_remote_worker_unclosable_agent_disables_loads(caplog):
    world = World()
    world.network.closes = False
    world.network.behaviour = {"agent of a": "fails"}
    world.load(world.order("r"))
    world.until("r")
    world.turn(3)
    assert world.told[-1] == m.PoolReady(0, "far", 0), "no store is asked any more"
    assert "restart" in caplog.text
    kept = world.ring.count - len(world.ring.free)
    assert kept
    world.network.behaviour = {}
    world.load(world.order("later", "b"))
    world.until("later")
    assert world.results["later"].failed and world.ring.count - len(world.ring.free) == kept
    assert not world.turns.soon, "nothing spins"


def test_remote_worker_unexpected_error_fails_loads_only(monkeypatch, caplog):
    world = World()
    monkeypatch.setattr(world.worker._reads, "poll", lambda: 1 / 0)
    world.load(world.order("r"))
    world.until("r")
    assert world.results["r"].failed and world.told[-1].nbytes == 0 and "ZeroDivisionError" in caplog.text


def test_remote_worker_copier_error_fails_the_load(caplog):
    world = World()
    world.worker._copier.load = lambda *_: 1 / 0
    world.load(world.order("r"))
    world.until("r")
    assert world.results["r"].bad_blocks == {1, 2, 3, 4, 5} and "copying" in world.results["r"].reason
    assert len(world.ring.free) == world.ring.count


def test_remote_worker_new_metadata_is_added_again():
    world = World()
    first, second = world.order("1", groups=((0, (1,)),)), world.order("2", groups=((0, (2,)),))
    second.remote_store = world.nodes["a"].source(generation=2)
    for name, order in (("1", first), ("2", second)):
        world.load(order)
        world.until(name)
    introduced = [entry[1:] for entry in world.network.log if entry[0] == "add_remote_agent"]
    assert introduced == [("agent of a", 1), ("agent of a", 2)]


def test_remote_worker_known_stores_are_bounded(monkeypatch):
    monkeypatch.setattr(remote_store_worker, "MAX_STORES", 1)
    world = World()
    for name in ("a", "b", "a"):
        world.load(world.order(f"{name}{len(world.results)}", name, groups=((0, (1,)),)))
        world.until(f"{name}{len(world.results)}") if len(world.results) == 0 else world.turn(5)
    assert len(world.results) == 3 and not any(r.failed for r in world.results.values())
    assert ("remove", "agent of a") in world.network.log and list(world.worker._stores) == ["a"]


def test_remote_worker_reports_cancelled_load_of_store_that_leaves(monkeypatch):
    """Its load is cancelled, and another store takes its place before the results are taken."""
    monkeypatch.setattr(remote_store_worker, "MAX_STORES", 1)
    world = World()
    free, world.ring.free = world.ring.free, []
    world.load(world.order("r", groups=((0, (1,)),)))
    world.worker.cancel_loads(["r"])
    world.load(world.order("next", "b", groups=((0, (2,)),)))
    world.ring.free += free
    world.until("r", "next")
    assert world.results["r"].reason == ABORTED and world.right(0, (2,)) == [True]


def test_remote_worker_without_nixl_reports_it_and_reads_nothing(caplog):
    def missing(*_):
        raise KVTierError("NIXL cannot be imported")

    told = []
    view, _ = cache(BLOCKS, 1)
    setup = FarNode(view).setup()
    context = RankContext(0, Turns(), told.append, lambda result: None)
    worker = RemoteStoreWorker(context, view, setup, make_reader=missing)
    assert told == [m.PoolReady(0, "far", 0)] and "NIXL cannot be imported" in caplog.text
    assert not worker.under_way()


@pytest.mark.parametrize("host", [False, True])
def test_remote_worker_without_gpu_access_uses_host_memory(caplog, host):
    view, _ = cache(BLOCKS, 1)
    tried, told = [], []

    def ring(_, part_bytes, on_device):
        tried.append(on_device)
        if on_device:
            raise KVTierError("no GPUDirect here")
        return staging_ring.StagingRing(view, part_bytes, on_device)

    on_gpu = SimpleNamespace(groups=view.groups, device=torch.device("cuda"))
    setup = FarNode(view).setup(host)
    RemoteStoreWorker(RankContext(0, Turns(), told.append, print), on_gpu, setup, ring, make_reader=Network().reader)
    assert tried == ([False] if host else [True, False]) and told[-1].nbytes
    assert ("no GPUDirect here" in caplog.text) is not host


def test_remote_worker_pins_memory_before_nixl_registration(monkeypatch):
    """UCX pins what is not pinned, and CUDA refuses to pin it once more."""
    view, _ = cache(BLOCKS, 1)
    done, make = [], staging_ring.StagingRing.copier
    monkeypatch.setattr(staging_ring.StagingRing, "copier", lambda *args: done.append("pinned") or make(*args))

    def reader(ring, name, kind):
        made = Network().reader(ring, name, kind)
        monkeypatch.setattr(made, "register", lambda pieces: done.append("registered"))
        return made

    RemoteStoreWorker(RankContext(0, Turns(), [].append, print), view, FarNode(view).setup(), make_reader=reader)
    assert done[:2] == ["pinned", "registered"]


def test_remote_worker_without_memory_is_disabled_with_cause(monkeypatch, caplog):
    monkeypatch.setattr(staging_ring, "memory_limits", lambda: MemoryLimits(1 << 20, 1 << 20, "this test"))
    view, _ = cache(BLOCKS, 1)
    told = []
    context = RankContext(0, Turns(), told.append, print)
    RemoteStoreWorker(context, view, FarNode(view).setup(), make_reader=Network().reader)
    assert told == [m.PoolReady(0, "far", 0)] and "this test" in caplog.text


def test_remote_worker_idle_collect_returns_on_result(monkeypatch):
    monkeypatch.setattr(remote_store_worker, "IDLE_SECONDS", 5.0)
    world = World()
    world.worker.collect(idle=True)  # nothing is loading
    world.network.behaviour = {"agent of a": "hangs"}
    world.load(world.order("r"))

    def finish():
        world.network.behaviour = {}
        world.until("r")

    thread = threading.Timer(0.05, finish)
    thread.start()
    world.worker.collect(idle=True)
    thread.join()
    assert "r" in world.results
