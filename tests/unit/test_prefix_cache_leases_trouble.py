"""What an engine that grants leases, or one that asks for them, could do to the other or to itself."""

import time
import tracemalloc
from collections import Counter, deque
from types import SimpleNamespace

import pytest
from source_fakes import load_context, make_matcher, source_of
from support import FakePool, Uncontained, make_request

from vllm_kvtier.config import KVTierConfig
from vllm_kvtier.scheduler.connector_scheduler import KVTierConnectorScheduler
from vllm_kvtier.scheduler.integrity.checksum_clearing import ChecksumClearing
from vllm_kvtier.scheduler.integrity.checksum_index import ChecksumEntry, ChecksumIndex, ContentKeys
from vllm_kvtier.scheduler.leases import exports
from vllm_kvtier.scheduler.leases.exports import Export, ExportTable, GroupBlocks, Lease, LeaseKind, Refusal
from vllm_kvtier.scheduler.leases.lease_client import LeasedBlocks, PendingLease
from vllm_kvtier.scheduler.leases.prefix_cache_leases import PrefixCacheLeases
from vllm_kvtier.scheduler.matching.request_lifecycle import RequestLifecycle, State
from vllm_kvtier.scheduler.sources.base import Candidate, LookupHit
from vllm_kvtier.shapes.read_paths import ReadPath
from vllm_kvtier.vllm_compat.hooks.block_pool import BlockPool
from vllm_kvtier.wire import messages as m

HASH_BLOCK_SIZE = 4
KEYS = ContentKeys(3)


class Peers:
    def __init__(self):
        self.given_back = []

    def ask(self, address, timeout, same_node_instance="", prefer_mapped=False, rehash=None, **fields):
        return PendingLease(address, m.LeaseRequest(1, "", **fields), time.monotonic() + 2.0)

    def release(self, offer, done):
        self.given_back.append(offer.lease)

    def cancel(self, pending):
        pending.cancelled = True


def offered(tokens_of_prompt, groups, tokens, blocks, sync_load=None):
    """A matcher whose request asked an engine of this node, which answers with a lease of ``tokens``."""
    RequestLifecycle.violations = 0
    checksum_index = ChecksumIndex([size for size, _ in groups])
    load = load_context(
        groups, HASH_BLOCK_SIZE, Peers(), config=KVTierConfig(pull_threshold=1), keys=KEYS, sync_load=sync_load,
        checksum_index=checksum_index,
    )  # fmt: skip
    matcher = make_matcher(load)
    request = make_request("r", list(range(tokens_of_prompt)), HASH_BLOCK_SIZE)
    t = matcher.track(request)
    peer = Candidate(source_of(matcher, "peer_gpu"), ("there", 1), "it/1", tokens_of_prompt)
    t.candidates, t.begun_at = deque([peer]), time.monotonic()
    assert matcher.match(request, 0) == (None, False) and t.life.state is State.LOOKUP
    t.pending.answer.outcome = LeasedBlocks(("there", 1), "it/1", 7, 0, tokens, blocks, [], nbytes=10)
    return matcher, request, t, checksum_index


def test_block_not_leased_is_not_taken_as_received():
    """An id of 0 in a group that keeps whole prefixes: nothing would be copied there, without an error."""
    matcher, request, t, _ = offered(13, [(HASH_BLOCK_SIZE, None)], 12, [[5, 0, 7]])
    external, _ = matcher.match(request, 0)
    if not external:
        return  # it was not taken
    matcher.allocated(request, ([11, 12, 13, 14],), external)
    (order,), _ = matcher.take_jobs()
    assert order.groups[0].local.tolist() == [11, 12, 13], "vLLM computes on block 12, which no job fills"


@pytest.mark.parametrize("groups, tokens, blocks", [
    ([(HASH_BLOCK_SIZE, None)], 6, [[5, 6]]),
    ([(2 * HASH_BLOCK_SIZE, None)], 4, [[5]]),
])  # fmt: skip
def test_lease_ending_within_a_block_is_harmless(groups, tokens, blocks):
    matcher, request, t, _ = offered(17, groups, tokens, blocks)
    external, _ = matcher.match(request, 0)
    if external:
        matcher.allocated(request, (list(range(11, 11 + len(blocks[0]))),), external)  # raises in vLLM's schedule()


def test_sync_load_recomputed_last_block_has_no_checksum():
    """A synchronous copy of a whole prompt: the step computes the last token again, into the last block. What the
    source had summed there is not what is there now."""
    sync_load = SimpleNamespace(
        verification_pending=False, possible=True, is_eligible=lambda t, computed, tracked: True,
        begin=lambda t, order: setattr(order, "synchronous", True),
    )  # fmt: skip
    matcher, request, t, checksum_index = offered(12, [(HASH_BLOCK_SIZE, None)], 12, [[5, 6, 7]], sync_load)
    external, asynchronous = matcher.match(request, 0)
    assert (external, asynchronous) == (11, False) and t.synchronous
    matcher.allocated(request, ([11, 12, 13],), external)
    checksum_index.remove([13])  # as BlockTables has it when the request is admitted, in the same step
    matcher.on_load_ended("r", failed=False)
    made = {entry: checksum_index.has(ChecksumEntry(0, entry, KEYS.key(bytes(request.block_hashes[i]), 0, b""),
            HASH_BLOCK_SIZE))
            for i, entry in enumerate((11, 12, 13))}  # fmt: skip
    assert made == {11: True, 12: True, 13: False}


# -- the lender -----------------------------------------------------------------------------------------------------


def make_lender(groups, blocks=64, budget=0.5):
    pool = FakePool(blocks, HASH_BLOCK_SIZE)
    checksum_index = ChecksumIndex([size for size, _ in groups])
    checksum_index.publish(0)
    table = ExportTable(HASH_BLOCK_SIZE, {kind: int(blocks * budget) for kind in LeaseKind})
    table.mark_checksums_ready(10)
    lock = SimpleNamespace(known=True, run_when_free=lambda job, refuse=None: job())
    engine = load_context(groups, HASH_BLOCK_SIZE, keys=KEYS, pool=BlockPool(pool)).engine
    lender = PrefixCacheLeases(engine, lock, checksum_index, table)
    return SimpleNamespace(lender=lender, pool=pool, checksum_index=checksum_index, table=table)


def put(world, block, block_hash, group=0, size=HASH_BLOCK_SIZE):
    world.pool.cached[(bytes(block_hash), group)] = block
    world.checksum_index.mark(ChecksumEntry(group, block, KEYS.key(bytes(block_hash), group, b""), size), 1)


def ask(world, block_hashes, start=0):
    answers = []
    world.lender.lease(
        m.LeaseRequest(1, "", start, block_hashes, from_prefix_cache=True, mapped=True), "reader", 5.0, answers.append
    )
    return answers[0]


def test_prefix_cache_lease_is_refused_if_too_many_ask():
    world = make_lender([(HASH_BLOCK_SIZE, None)])
    world.lender._scheduler_lock = SimpleNamespace(known=True, run_when_free=lambda job, refuse: refuse())
    assert ask(world, [bytes(32)]) is Refusal.BUSY and not world.table.counts()["leases"]


def test_prefix_cache_lease_is_refused_to_connection_with_too_many(monkeypatch):
    """A peer may lease one block after the other, release none and send heartbeats."""
    monkeypatch.setattr(exports, "MAX_LEASES", 3)
    world = make_lender([(HASH_BLOCK_SIZE, None)])
    block_hashes = [bytes(h) for h in make_request("r", list(range(4)), HASH_BLOCK_SIZE).block_hashes]
    put(world, 5, block_hashes[0])
    assert [isinstance(ask(world, block_hashes), Lease) for _ in range(4)] == [True] * 3 + [False]
    assert ask(world, block_hashes) is Refusal.BUSY and world.table.counts()["leases"] == 3


def test_prefix_cache_reset_succeeds_with_leased_blocks():
    """vLLM's reset fails, and pausing or sleeping raises, while any block is held: readers find out by checksums."""
    world = make_lender([(HASH_BLOCK_SIZE, None)])
    block_hashes = [bytes(h) for h in make_request("r", list(range(12)), HASH_BLOCK_SIZE).block_hashes]
    for i, block_hash in enumerate(block_hashes):
        put(world, 5 + i, block_hash)
    assert isinstance(ask(world, block_hashes), Lease)
    half = KVTierConnectorScheduler.__new__(KVTierConnectorScheduler)
    half._engine = SimpleNamespace(paused_scheduler=None)
    half._exports, half._checksum_index, half._config = world.table, world.checksum_index, KVTierConfig()
    half._offloader = half._events = None
    half._contain, half._matcher = Uncontained(), SimpleNamespace(clear_checksums=lambda: None)
    half._clearing = ChecksumClearing(lambda message: None)
    half._sync_load = SimpleNamespace(unpin=lambda: None)

    def drain():
        for ids in world.table.take_freed():
            BlockPool(world.pool).free(ids)

    half._exporter = SimpleNamespace(drain=drain)
    half._before_reset()
    assert [b.block_id for b in world.pool.blocks if b.ref_cnt] == []
    assert world.table.counts()["peer_fetch_blocks"] == 0


def test_lease_request_starting_beyond_hashes_is_harmless():
    world = make_lender([(HASH_BLOCK_SIZE, None)])
    block_hashes = [bytes(h) for h in make_request("r", list(range(12)), HASH_BLOCK_SIZE).block_hashes]
    tracemalloc.start()
    try:
        answer = ask(world, block_hashes, start=1 << 24)  # up to 1 << 40 can be sent
        assert not isinstance(answer, Lease)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_prefix_cache_lease_makes_the_keys_of_all_blocks_at_once(monkeypatch):
    """vLLM's scheduler waits meanwhile: with a key at a time, a lease of 131,072 tokens took twice as long."""
    world, masks, mask = make_lender([(HASH_BLOCK_SIZE, None)]), [], ContentKeys._mask
    block_hashes = [bytes(h) for h in make_request("r", list(range(80)), HASH_BLOCK_SIZE).block_hashes]
    for i, block_hash in enumerate(block_hashes):
        put(world, 5 + i, block_hash)
    monkeypatch.setattr(ContentKeys, "_mask", lambda *about: masks.append(about) or mask(*about))
    lease = ask(world, block_hashes, start=2 * HASH_BLOCK_SIZE)
    assert isinstance(lease, Lease) and lease.export.pinned == list(range(7, 25)) and len(masks) == 1


def test_lease_request_with_evicted_window_does_bounded_work(monkeypatch):
    """The prefix is here, the window's blocks are not (they are evicted first): found by a few looks a block."""
    num_hash_blocks, window = 8192, 128
    world = make_lender([(HASH_BLOCK_SIZE, None), (HASH_BLOCK_SIZE, window)], blocks=2 * num_hash_blocks)
    block_hashes = [n.to_bytes(32, "little") for n in range(1, num_hash_blocks + 1)]
    holds, looked = {}, Counter()
    for i, block_hash in enumerate(block_hashes):
        world.checksum_index.mark(ChecksumEntry(0, 1 + i, KEYS.key(block_hash, 0, b""), HASH_BLOCK_SIZE), 1)
        holds[1 + i] = block_hash
    world.lender._pool.holds = lambda block, block_hash, group: holds.get(block) == block_hash and group == 0
    find, cover = world.checksum_index.find, GroupBlocks.cover

    def count_find(key):
        looked["find"] += 1
        return find(key)

    def count_cover(self, start, tokens):
        window = self.kind.window or tokens
        looked["cover"] += min(tokens - start, window) // HASH_BLOCK_SIZE
        return cover(self, start, tokens)

    monkeypatch.setattr(world.checksum_index, "find", count_find)
    monkeypatch.setattr(GroupBlocks, "cover", count_cover)
    assert not isinstance(ask(world, block_hashes), Lease)
    assert (
        num_hash_blocks <= looked["find"] <= 2 * num_hash_blocks
        and num_hash_blocks / 2 <= looked["cover"] <= num_hash_blocks * window // HASH_BLOCK_SIZE
    ), looked


def test_checksum_index_finds_content_while_any_block_has_it():
    """Two requests compute one prefix at once. vLLM goes on with the first copy; the second is evicted first."""
    checksum_index = ChecksumIndex([HASH_BLOCK_SIZE])
    checksum_index.publish(0)
    checksum_index.mark(ChecksumEntry(0, 5, 77, HASH_BLOCK_SIZE), 1)
    checksum_index.mark(ChecksumEntry(0, 6, 77, HASH_BLOCK_SIZE), 1)
    checksum_index.take_changes()
    checksum_index.remove([6])
    assert checksum_index.find(77) == (5, 1)
    assert checksum_index.take_changes() == ([], []), "the directory would drop it"


# -- the reader -----------------------------------------------------------------------------------------------------


def test_lease_from_before_reset_is_refused():
    """``reset_prefix_cache(reset_connector=True)`` comes with new weights: a request that waited then must not go on
    with what another engine had computed with the old ones. The store's offers have an epoch for that."""
    matcher, request, t, _ = offered(13, [(HASH_BLOCK_SIZE, None)], 12, [[5, 6, 7]])
    external, _ = matcher.match(request, 0)
    assert external == 12 and t.life.state is State.HIT  # vLLM has no room yet
    source_of(matcher, "peer_gpu")._context.namespace_ids.renew()  # as KVTierConnectorScheduler.reset does
    external, _ = matcher.match(request, 0)
    assert not external, "KV of the old weights"


def test_peer_with_failed_lease_is_not_retried_by_other_name():
    """The store names an address for x/1 at which y/1 answers: else the request would be loaded, and fail, for ever."""
    matcher, request, t, _ = offered(13, [(HASH_BLOCK_SIZE, None)], 12, [[5, 6, 7]])
    external, _ = matcher.match(request, 0)
    matcher.allocated(request, ([11, 12, 13],), external)
    peers = source_of(matcher, "peer_gpu")
    t.hit = LookupHit(peers, "y/1", 7, 0, 12, [[5, 6, 7]], path=ReadPath.MAPPED, nbytes=10)  # as it called itself
    matcher.on_load_ended("r", failed=True)
    assert t.life.state is State.NEW
    assert peers.is_eligible(t, Candidate(peers, ("there", 1), "it/1", 13), 0) is False


def test_engine_without_peer_copy_reports_it():
    """With a wire codec or a host buffer no fetch ever works: the scheduler side must not try one for each request."""
    import numpy as np
    from worker_halves import worker_without_threads

    from vllm_kvtier.jobs.transfer_jobs import GroupPull, PeerFetchJob, StepWork

    half = worker_without_threads()
    one = np.array([1])
    order = PeerFetchJob("r", "it/1", [GroupPull(0, one, one, one.astype(np.uint64), one.astype(np.int32))], 60.0)
    half._fetch([order], StepWork(1))
    assert half._jobs._done[0].failed and half._jobs._done[0].unmappable


def test_late_peer_leaves_checksums_valid():
    """A request that ran alone: blocks behind its window are others' since, with checksums that exports go by."""
    from vllm_kvtier.scheduler.leases.export_builder import ExportBuilder
    from vllm_kvtier.scheduler.matching.request_state import RequestState
    from vllm_kvtier.scheduler.matching.transfer_params import read
    from vllm_kvtier.scheduler.offload.block_tables import Growth, Table

    groups, shared = [(HASH_BLOCK_SIZE, None), (HASH_BLOCK_SIZE, 2 * HASH_BLOCK_SIZE)], [False]
    checksum_index = ChecksumIndex([HASH_BLOCK_SIZE, HASH_BLOCK_SIZE])
    pool = FakePool(64, HASH_BLOCK_SIZE)
    engine = load_context(groups, HASH_BLOCK_SIZE, keys=KEYS, pool=BlockPool(pool)).engine
    table = ExportTable(HASH_BLOCK_SIZE, dict.fromkeys(LeaseKind, 64))
    exporter = ExportBuilder(engine, table, checksum_index, lambda: shared[0])
    request = make_request("a", list(range(40)), HASH_BLOCK_SIZE)
    t = RequestState(request, read(None), RequestLifecycle("a"))
    table = Table([list(range(1, 11)), list(range(21, 31))])
    request.num_computed_tokens = 36
    exporter.begin_step([Growth(t, table, 36)])
    # vLLM gave block 22 to another request meanwhile, whose export is out
    others = ChecksumEntry(1, 22, 999, HASH_BLOCK_SIZE)
    checksum_index.mark(others, exporter.step)
    shared[0] = True
    exporter.begin_step([Growth(t, table, 40)])
    assert checksum_index.has(others)


def test_unreleased_lease_does_not_block_own_requests(monkeypatch):
    """It may ping for minutes, its engine standing still; one lease alone may be nearly all of the cache."""
    now = [100.0]
    table = ExportTable(HASH_BLOCK_SIZE, dict.fromkeys(LeaseKind, 64), clock=lambda: now[0])
    blocks = list(range(1, 51))
    export = Export(
        "", LeaseKind.PEER_FETCH, 200, (), b"", b"", [GroupBlocks(HASH_BLOCK_SIZE, blocks)], list(blocks), -1, now[0]
    )
    table.lease_cached(export, 0, "reader", 5.0, served=False)
    for _ in range(10):
        now[0] += 3.0
        table.renew("reader", 5.0)
        table.expire()
    assert table.counts()["peer_fetch_blocks"] == 50
    table.release_for_requests(10)  # a request of our own needs them
    assert table.counts()["peer_fetch_blocks"] == 0
