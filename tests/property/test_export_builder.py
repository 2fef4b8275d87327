"""Exporter and checksum index, following block tables that evolve like vLLM's: what is promised is in the checksum
table.

The model keeps, a block and token slot, a *version*: every forward that writes a slot makes a new one, also when the
same token is computed again, because another batch shape may give other bits. A worker's checksum is a snapshot of
the versions of the slots it covers. From ``ready_step`` on, every block of a live export must have the right key and
a snapshot equal to what the block holds now; else a peer would see a checksum failure that is none.
"""

import random
from types import SimpleNamespace

import pytest
from cache_groups import cache_groups, chunked, needs
from hypothesis import given, settings
from hypothesis import strategies as st
from source_fakes import load_context, make_matcher
from support import WITHOUT_SHRINKING, FakePool, Uncontained, make_request, step_output
from vllm.v1.request import RequestStatus

from vllm_kvtier.config import KVTierConfig
from vllm_kvtier.scheduler.context import BlockGeometry
from vllm_kvtier.scheduler.integrity.checksum_index import ChecksumEntry, ChecksumIndex, ContentKeys
from vllm_kvtier.scheduler.leases.export_builder import ExportBuilder
from vllm_kvtier.scheduler.leases.exports import ExportTable, Lease, LeaseKind, Refusal
from vllm_kvtier.scheduler.leases.lease_client import LeasedBlocks, PendingLease
from vllm_kvtier.scheduler.leases.prefill_stretches import PrefillStretches
from vllm_kvtier.scheduler.leases.prefix_cache_leases import PrefixCacheLeases
from vllm_kvtier.scheduler.matching.request_lifecycle import RequestLifecycle, State
from vllm_kvtier.scheduler.matching.transfer_params import read
from vllm_kvtier.scheduler.offload.block_tables import BlockTables
from vllm_kvtier.scheduler.sources.base import LookupMiss
from vllm_kvtier.telemetry.stats import Counters
from vllm_kvtier.vllm_compat import requests as vr
from vllm_kvtier.vllm_compat.hooks.block_pool import BlockPool
from vllm_kvtier.vllm_compat.hooks.scheduler_lock import METHODS, SchedulerLock
from vllm_kvtier.wire import messages as m

HASH_BLOCK_SIZE = 4
BLOCKS = 48
PREFILL = {"do_remote_decode": True}
HANDOFF = {"do_remote_prefill": True, "remote_host": "h", "remote_port": 1, "remote_request_id": "kvtier/x"}


class ReadyPeers:
    """Grants every ask at once (or refuses): blocks of a source that has everything."""

    def __init__(self, groups):
        self.groups, self.grant, self.leases, self.count = groups, True, set(), 0

    def ask(self, address, timeout, rehash=None, **fields):
        pending = PendingLease(address, m.LeaseRequest(0, "", **fields), 0.0)
        start = pending.request.start
        if not self.grant:
            pending.outcome = LookupMiss("no_matching_blocks", "")
            return pending
        self.count += 1
        tokens = self.tokens
        blocks = [[7] * (-(-tokens // size) - start // size) for size, _ in self.groups]
        pending.outcome = LeasedBlocks(address, "i", self.count, start, tokens, blocks, [])
        self.leases.add(self.count)
        return pending

    def cancel(self, pending):
        """The request is to be looked up again, because vLLM has evicted what came before it."""
        self.leases.remove(pending.outcome.lease)

    def release(self, offer, done):
        self.leases.remove(offer.lease)

    def release_export(self, address, export):
        pass


class Running:
    """One request as vLLM's scheduler sees it."""

    def __init__(self, request):
        self.request = request
        self.tables: list[list[int]] = []
        self.status = "waiting"  # waiting, loading, running, preempted
        self.resumed = False
        self.external = 0


class Engine:
    def __init__(self, groups, bidirectional, seed, shared=False):
        RequestLifecycle.violations = 0
        self.rng = random.Random(seed)
        self.orders, self.checked = [], 0
        groups = cache_groups(groups)
        self.groups, self.align = groups, BlockGeometry(groups, HASH_BLOCK_SIZE).alignment
        self.fake = FakePool(BLOCKS, HASH_BLOCK_SIZE)
        self.pool = BlockPool(self.fake)
        budget = {
            LeaseKind.HANDOFF: 30, LeaseKind.RETAINED: 16, LeaseKind.PEER_FETCH: 20, LeaseKind.STRETCH: 30,
        }  # fmt: skip
        self.table = ExportTable(HASH_BLOCK_SIZE, budget, align=self.align // HASH_BLOCK_SIZE)
        self.checksum_index, self.peers, counters = (
            ChecksumIndex([size for size, _ in groups]),
            ReadyPeers(groups),
            Counters(),
        )
        config = KVTierConfig(bidirectional=bidirectional, pull_threshold=1)
        self.keys = ContentKeys(0x1234567)
        load = load_context(
            groups, HASH_BLOCK_SIZE, self.peers, config=config, keys=self.keys, counters=counters, pool=self.pool,
            checksum_index=self.checksum_index, identity={"address": ("me", 1)},
        )  # fmt: skip
        self.matcher = make_matcher(load)
        self.exporter = ExportBuilder(load.engine, self.table, self.checksum_index, lambda: shared)
        self.tables = BlockTables(groups, HASH_BLOCK_SIZE, self.checksum_index.remove, self.exporter.checksums)
        lock = SchedulerLock(Uncontained())
        lock.install(SimpleNamespace(**dict.fromkeys(METHODS, lambda: None)))
        self.lender = PrefixCacheLeases(load.engine, lock, self.checksum_index, self.table)
        self.stretches = PrefillStretches(load.engine, lock, self.exporter, self.table)
        self.sent: dict[str, int] = {}  # of a prefill that is followed: tokens that its reader has
        self.stretched = 0
        self.directory: set[int] = set()  # what the node store knows of us
        self.loans: list[tuple[Lease, list[bytes]]] = []
        self.lent = 0
        if shared:
            self.checksum_index.publish(0)
        self.requests: dict[str, Running] = {}
        self.content = [[0] * (2 * HASH_BLOCK_SIZE) for _ in range(BLOCKS)]  # versions
        self.version = 0
        self.checksums: dict[int, tuple[int, int, tuple]] = {}  # block -> (key, valid, snapshot)
        self.exports = []
        self.count = self.made = 0

    # -- a small vLLM ----------------------------------------------------------------------------------------------

    def write(self, r: Running, first: int, last: int, what=None) -> None:
        for g, (size, _) in enumerate(self.groups):
            for t in range(first, last):
                block = r.tables[g][t // size]
                if block:
                    self.version += 1
                    self.content[block][t % size] = self.version

    def cache(self, r: Running, tokens: int) -> None:
        """vLLM caches full blocks when it schedules them."""
        for g, (size, _) in enumerate(self.groups):
            for i in range(min(tokens, len(r.request.block_hashes) * HASH_BLOCK_SIZE) // size):
                if r.tables[g][i]:
                    key = (bytes(r.request.block_hashes[(i + 1) * size // HASH_BLOCK_SIZE - 1]), g)
                    self.fake.cached.setdefault(key, r.tables[g][i])

    def local_hit(self, request) -> tuple[int, list[list[int]]]:
        most = (request.num_tokens - 1) // self.align * self.align
        for n in range(most, 0, -self.align):
            tables = []
            for g, group in enumerate(self.groups):
                size, skipped = group.block_tokens, group.num_skipped_blocks(n)
                ids = [0] * skipped
                for i in range(skipped, n // size):
                    key = (bytes(request.block_hashes[(i + 1) * size // HASH_BLOCK_SIZE - 1]), g)
                    ids.append(self.fake.cached.get(key))
                tables.append(ids)
            if all(None not in ids for ids in tables):
                return n, tables
        return 0, [[] for _ in self.groups]

    def room(self, r: Running, tokens: int, tables=None) -> bool:
        tables = r.tables if tables is None else tables
        needed = sum(-(-tokens // size) - len(ids) for (size, _), ids in zip(self.groups, tables, strict=True))
        taken = sum(1 for ids in tables for i in ids if i and self.fake.blocks[i].ref_cnt == 0)
        return needed + taken <= self.pool.free_count()

    def grow(self, r: Running, tokens: int, skip_window_at: int = 0) -> tuple[list[int], ...]:
        new = []
        for g, group in enumerate(self.groups):
            size, skipped = group.block_tokens, group.num_skipped_blocks(skip_window_at)
            fresh = []
            while len(r.tables[g]) < -(-tokens // size):
                if len(r.tables[g]) < skipped:
                    block = 0
                else:
                    block = self.fake.take(self.fake.free_ids()[self.count % self.pool.free_count()])
                    self.count += 1
                r.tables[g].append(block)
                fresh.append(block)
            new.append(fresh)
        return tuple(new)

    def slide(self, r: Running) -> None:
        """Blocks that no later token reads go back to the pool; vLLM does this before it allocates."""
        for g, group in enumerate(self.groups):
            for i in range(min(len(r.tables[g]), group.num_skipped_blocks(r.request.num_computed_tokens))):
                if r.tables[g][i]:
                    self.fake.free_blocks([self.fake.blocks[r.tables[g][i]]])
                    r.tables[g][i] = 0

    def release(self, r: Running) -> None:
        for ids in r.tables:
            self.fake.free_blocks([self.fake.blocks[i] for i in reversed(ids) if i])
        r.tables = [[] for _ in self.groups]

    # -- events -------------------------------------------------------------------------------------------------------

    def new_request(self):
        rng = self.rng
        tokens = [int(rng.random() < 0.3) for _ in range(rng.randint(1, 3 * HASH_BLOCK_SIZE))]
        repeat = rng.randint(0, 4)
        params = rng.choice([None, PREFILL, PREFILL, HANDOFF, {**HANDOFF, **PREFILL}])
        self.made += 1
        name = f"r{self.made}"
        if params is not None and params.get("do_remote_decode") and rng.random() < 0.7:
            params = {**params, "kvtier": {"export_as": f"router/{name}"}}
        r = Running(make_request(name, [1] * (repeat * HASH_BLOCK_SIZE) + tokens, HASH_BLOCK_SIZE, params))
        r.tables = [[] for _ in self.groups]
        self.requests[name] = r

    def step(self):
        """One schedule() and its forward; then what the workers did."""
        new, cached, scheduled, loading = [], [], {}, []
        rng = self.rng
        self.peers.grant = rng.random() < 0.7
        for name, r in self.requests.items():
            request = r.request
            if r.status == "running" and rng.random() < 0.8:
                self.slide(r)
                chunk = min(request.num_tokens - request.num_computed_tokens, rng.randint(1, 9))
                target = request.num_computed_tokens + chunk
                if not self.room(r, target):
                    self.release(r)
                    r.status, r.resumed, request.num_computed_tokens = "preempted", True, 0
                    continue
                cached.append((name, self.grow(r, target), request.num_computed_tokens, False))
                scheduled[name] = chunk
            elif r.status in ("waiting", "preempted", "loaded"):
                if r.status != "loaded":
                    hit, tables = self.local_hit(request)
                    lacking = (request.num_tokens - hit) // HASH_BLOCK_SIZE * HASH_BLOCK_SIZE
                    whole = (request.kv_transfer_params or {}).get("do_remote_prefill")
                    self.peers.tokens = request.num_tokens if whole else (hit + lacking) // self.align * self.align
                    external, _ = self.matcher.match(request, hit)
                    self.exporter.release_for_requests(request.num_tokens - hit)
                    hit_again, tables = self.local_hit(request)
                    assert hit_again == hit
                    if not self.room(r, request.num_tokens, tables):
                        continue
                    for ids in tables:
                        self.fake.touch([self.fake.blocks[i] for i in ids if i])
                    r.tables = [list(ids) for ids in tables]
                    request.num_computed_tokens = hit
                    if external:
                        self.grow(r, hit + external, hit + external)
                        request.num_computed_tokens = hit + external
                        r.status, r.external, r.hit = "loading", external, hit
                        self.matcher.allocated(request, tuple(r.tables), external)
                        loading.append(name)
                        continue
                    self.grow(r, hit, hit)
                    self.matcher.allocated(request, tuple(r.tables), 0)
                self.slide(r)
                most = 9 if "kvtier" in (request.kv_transfer_params or {}) else 9 * HASH_BLOCK_SIZE
                chunk = min(request.num_tokens - request.num_computed_tokens, rng.randint(1, most))
                if not self.room(r, request.num_computed_tokens + chunk):
                    self.release(r)
                    r.status, r.resumed, request.num_computed_tokens = "preempted", r.resumed, 0
                    continue
                self.grow(r, request.num_computed_tokens + chunk)
                scheduled[name] = chunk
                r.status = "running"
                tables = tuple(list(ids) for ids in r.tables)
                if r.resumed and rng.random() < 0.5:
                    cached.append((name, tables, request.num_computed_tokens, True))
                else:
                    computed = request.num_computed_tokens
                    new.append((name, tables, computed))
        for name, n in scheduled.items():
            self.cache(self.requests[name], self.requests[name].request.num_computed_tokens + n)
        output = step_output(scheduled, new, cached)
        batches = self.exporter.begin_step(self.tables.begin_step(output, self.matcher.get))
        orders, _ = self.matcher.take_jobs()
        assert {o.request_id for o in orders} == set(loading)
        # The forward, then the sums behind it.
        for name, n in scheduled.items():
            r = self.requests[name]
            self.write(r, r.request.num_computed_tokens, r.request.num_computed_tokens + n)
        seen = set()
        for batch in batches:
            for block, key, valid in zip(batch.ids.tolist(), batch.keys.tolist(), batch.valid.tolist(), strict=True):
                assert block, "the null block has no checksum"
                assert block not in seen, "two checksums of one block in a step: which one counts?"
                seen.add(block)
                self.checksums[block] = (key, valid, tuple(self.content[block][:valid]))
        self.orders += orders
        if self.rng.random() < 0.7:
            self.table.mark_checksums_ready(self.exporter.step)
        for name, n in scheduled.items():
            r = self.requests[name]
            r.request.num_computed_tokens += n
            if r.request.num_computed_tokens == r.request.num_tokens:
                r.request.append_output_token_ids(int(rng.random() < 0.3))
                if (r.request.kv_transfer_params or {}).get("do_remote_decode"):
                    self.finish_as(name, "FINISHED_LENGTH_CAPPED")  # routers ask a prefill for one token

    def loads_end(self):
        if not self.orders:
            return
        order = self.orders.pop(self.rng.randrange(len(self.orders)))
        r = self.requests.get(order.request_id)
        failed = self.rng.random() < 0.2
        for g in order.groups:
            for block, key, valid in zip(g.local.tolist(), g.keys.tolist(), g.valid.tolist(), strict=True):
                for slot in range(valid):
                    self.version += 1
                    self.content[block][slot] = self.version
                self.checksums[block] = (0, 0, ()) if failed else (key, valid, tuple(self.content[block][:valid]))
        self.matcher.on_load_ended(order.request_id, failed)
        if r.status == "aborted":
            self.release(r)
            del self.requests[order.request_id]
            return
        if failed:
            r.request.num_computed_tokens = 0
            self.release(r)
            r.status = "preempted" if r.resumed else "waiting"
            return
        self.cache(r, r.request.num_computed_tokens)
        r.request.num_computed_tokens = min(r.request.num_computed_tokens, r.request.num_tokens - 1)
        r.status = "loaded"

    def finish(self):
        how = self.rng.choice(["FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED", "FINISHED_STOPPED", "FINISHED_ABORTED"])
        if not self.requests:
            return
        name = self.rng.choice(list(self.requests))
        r = self.requests[name]
        done = r.request.num_computed_tokens >= r.request.num_prompt_tokens
        if r.status == "aborted" or (not done and self.rng.random() < 0.8):
            return
        if r.status != "running" or not done:
            how = "FINISHED_ABORTED"
        self.finish_as(name, how)

    def finish_as(self, name, how):
        r = self.requests[name]
        r.request.status = RequestStatus[how]
        self.slide(r)
        tracked = self.matcher.finished(r.request)
        table = self.tables.remove(r.request.request_id)
        export = self.exporter.finished(tracked, tuple(list(ids) for ids in r.tables), table)
        if export is not None:
            self.exports.append((export, r.request))
        if tracked.hints.export_as:
            assert export is None or export.id == tracked.hints.export_as
            self.exporter.prefill_ended(tracked.hints.export_as)
        self.exporter.drain()
        if r.status == "loading":
            r.status = "aborted"
            return
        self.release(r)
        del self.requests[name]

    def preempt(self):
        r = self.requests[self.rng.choice(list(self.requests))] if self.requests else None
        if r is not None and r.status == "running":
            self.release(r)
            r.status, r.resumed, r.request.num_computed_tokens = "preempted", True, 0

    def exports_end(self):
        self.table.release_for_requests(self.rng.randint(1, 20))
        self.exporter.drain()

    # -- other engines of the node ---------------------------------------------------------------------------------

    def lend(self):
        """Somebody asks for a prefix of what some request has, from some token on."""
        if not self.requests:
            return
        request = self.rng.choice(list(self.requests.values())).request
        block_hashes = [bytes(h) for h in request.block_hashes]
        start = (
            self.rng.randint(0, len(block_hashes) * HASH_BLOCK_SIZE // self.align) * self.align
            if self.rng.random() < 0.4
            else 0
        )
        ask = m.LeaseRequest(1, "", start, block_hashes, from_prefix_cache=True, mapped=True)
        answers = []
        self.lender.lease(ask, "reader", 5.0, answers.append)
        (found,) = answers
        if isinstance(found, Lease):
            assert start < found.tokens <= len(block_hashes) * HASH_BLOCK_SIZE and found.tokens % self.align == 0
            self.loans.append((found, block_hashes))
            self.lent += 1

    def follow(self):
        """The reader of a prefill asks for what was computed since the last time. With a wrong prompt it gets
        nothing."""
        named = [r for r in self.requests.values() if "kvtier" in (r.request.kv_transfer_params or {})]
        if not named:
            return
        r = self.rng.choice(named)
        request, name = r.request, r.request.kv_transfer_params["kvtier"]["export_as"]
        prompt, wrong = request.num_prompt_tokens, self.rng.random() < 0.1
        tail = vr.tail_hash(request, prompt, HASH_BLOCK_SIZE) if prompt % HASH_BLOCK_SIZE else b""
        digest = b"wrong" if wrong else vr.prefix_digest(vr.block_hashes(request, prompt, HASH_BLOCK_SIZE), tail)
        sent, answers = self.sent.get(name, 0), []
        ask = m.LeaseRequest(1, "", sent, [], export=name, digest=digest, follow=True, stretches=True)
        self.stretches.lease(ask, "reader", 5.0, answers.append)
        (found,) = answers
        if not isinstance(found, Lease):
            ended = r.status == "aborted" and found is Refusal.UNKNOWN
            assert ended or found is Refusal.NOT_READY or (found is Refusal.DIGEST and wrong)
            return
        assert not wrong and r.status in ("running", "preempted"), "the latter of blocks that others hold too"
        assert found.start == sent < found.tokens <= prompt and found.tokens % self.align == 0
        self.sent[name] = found.tokens
        self.loans.append((found, [bytes(h) for h in request.block_hashes]))
        self.stretched += 1

    def loan_ends(self):
        if self.loans:
            lease, _ = self.loans.pop(self.rng.randrange(len(self.loans)))
            assert self.table.release(lease.id, "reader", True)
            self.exporter.drain()

    def what_is_lent_is_as_it_was_summed(self):
        for lease, block_hashes in self.loans:
            for g, group in enumerate(lease.export.groups):
                size = group.block_tokens
                first = next(t for t in range(lease.start, lease.tokens) if needs(group.kind, lease.tokens, t))
                assert all(group.ids[first // size : lease.tokens // size]), "what a reader needs is not leased"
                for place, block in enumerate(group.ids[lease.start // size :], lease.start // size):
                    if not block:
                        continue
                    key = self.keys.key(block_hashes[(place + 1) * size // HASH_BLOCK_SIZE - 1], g, b"")
                    assert self.fake.blocks[block].ref_cnt > 0
                    assert self.checksums.get(block) == (key, size, tuple(self.content[block][:size]))

    def the_directory_is_kept_current(self):
        added, gone = self.checksum_index.take_changes()
        self.directory |= set(added)
        self.directory -= set(gone)
        here = [(key, valid) for key, valid, _, g in self.checksum_index._made.values() if g == 0]
        found = {key for key, _ in here if self.checksum_index.find(key)}
        assert self.directory == found
        whole = {key for key, valid in here if valid == self.groups[0][0]}
        assert found == (whole if self.checksum_index.published else set()), "also what several blocks hold"

    # -- what always holds -------------------------------------------------------------------------------------------

    def what_is_promised_is_in_the_table(self):
        self.exports = [e for e in self.exports if not e[0].ended]
        for export, request in self.exports:
            if export.ready_step > self.exporter.step:
                continue
            self.checked += 1
            for g, group in enumerate(export.groups):
                size = group.block_tokens
                for place, block in enumerate(group.ids):
                    if not block:
                        continue
                    end = min((place + 1) * size, export.tokens)
                    if end % HASH_BLOCK_SIZE:
                        block_hash = vr.tail_hash(request, end, HASH_BLOCK_SIZE)
                    else:
                        block_hash = bytes(request.block_hashes[end // HASH_BLOCK_SIZE - 1])
                    valid = end - place * size
                    expected = (self.keys.key(block_hash, g, b""), valid, tuple(self.content[block][:valid]))
                    where = f"{export.id} group {g} place {place} of {export.tokens} tokens, block {block}"
                    assert self.fake.blocks[block].ref_cnt > 0, where
                    assert self.checksums.get(block) == expected, where

    def nothing_is_kept_for_ever(self):
        assert len(self.tables) == sum(name in self.tables for name in self.requests)
        loading = {n for n, r in self.requests.items() if r.status in ("loading", "aborted")}
        assert len(self.matcher) <= len(self.requests)
        for name in self.requests:
            t = self.matcher.get(name)
            assert (t is not None and t.life.state in (State.LOADING, State.ABANDONED)) == (name in loading)
        assert RequestLifecycle.violations == 0

    def end(self):
        for name, r in list(self.requests.items()):
            if r.status != "aborted":
                r.request.status = RequestStatus.FINISHED_ABORTED
                self.tables.remove(name)
                tracked = self.matcher.finished(r.request)
                self.exporter.finished(tracked, tuple(r.tables))
                self.exporter.prefill_ended(tracked.hints.export_as)
            if r.status in ("loading", "aborted"):
                self.matcher.on_load_ended(name, False)
            self.release(r)
        self.table.clear()
        self.table.disconnect("reader")
        self.exporter.drain()
        assert not self.peers.leases and not len(self.matcher) and not len(self.tables)
        assert not self.exporter.running
        assert all(b.ref_cnt == 0 for b in self.fake.blocks), "a block is still held"


GROUPS = [
    [(HASH_BLOCK_SIZE, None)],
    [(HASH_BLOCK_SIZE, None), (HASH_BLOCK_SIZE, 6)],
    [(HASH_BLOCK_SIZE, None), chunked(HASH_BLOCK_SIZE, 3 * HASH_BLOCK_SIZE)],
    [(2 * HASH_BLOCK_SIZE, None), (HASH_BLOCK_SIZE, 7)],
]


@pytest.mark.parametrize("groups", GROUPS, ids=["full", "windows", "chunks", "sizes"])
@given(seed=st.integers(0, 1 << 32), bidirectional=st.booleans(), shared=st.booleans())
@settings(max_examples=40, phases=WITHOUT_SHRINKING)
def test_export_builder_random_operations_keep_invariants(groups, bidirectional, shared, seed):
    engine = Engine(groups, bidirectional, seed, shared)
    events = [engine.step, engine.new_request, engine.loads_end, engine.finish, engine.preempt, engine.exports_end]
    events += [engine.lend, engine.loan_ends, engine.follow]
    for _ in range(120):
        engine.rng.choices(events, [8, 5, 4, 2, 0.7, 0.2, 3, 2, 4])[0]()
        engine.what_is_promised_is_in_the_table()
        engine.what_is_lent_is_as_it_was_summed()
        engine.the_directory_is_kept_current()
        engine.nothing_is_kept_for_ever()
    engine.end()
    assert shared or bidirectional or not engine.lent


def test_export_builder_random_operations_grant_leases():
    """The machine above does lease, from every kind of model."""
    for groups in GROUPS:
        lent = 0
        for seed in range(8):
            engine = Engine(groups, False, seed, True)
            events = [engine.step, engine.new_request, engine.loads_end, engine.finish, engine.lend, engine.loan_ends]
            for _ in range(120):
                engine.rng.choices(events, [8, 5, 4, 1, 3, 2])[0]()
                engine.what_is_lent_is_as_it_was_summed()
            engine.end()
            lent += engine.lent
        assert lent > 20


def test_prefill_stretches_are_granted_while_prefills_run():
    """The machine above does grant stretches, of full attention only."""
    for groups in GROUPS:
        granted = 0
        for seed in range(8):
            engine = Engine(groups, False, seed)
            events = [engine.step, engine.new_request, engine.preempt, engine.follow, engine.loan_ends]
            for _ in range(120):
                engine.rng.choices(events, [8, 5, 0.5, 6, 2])[0]()
                engine.what_is_lent_is_as_it_was_summed()
            engine.end()
            granted += engine.stretched
        assert granted > 10 if len(groups) == 1 else not granted


# -- single cases ----------------------------------------------------------------------------------------------------


def test_block_pool_without_full_attention_groups_reports_no_cached_tokens():
    """A query to a model of sliding windows only."""
    assert BlockPool(FakePool(8, HASH_BLOCK_SIZE)).cached_tokens([b"x" * 32], [], HASH_BLOCK_SIZE) == 0


class Alone:
    """An exporter and one prefill, step by step, for cases that lives seldom meet."""

    def __init__(self, tokens):
        self.pool = FakePool(BLOCKS, HASH_BLOCK_SIZE)
        self.table = ExportTable(HASH_BLOCK_SIZE, dict.fromkeys(LeaseKind, BLOCKS))
        self.checksum_index, config = ChecksumIndex(), KVTierConfig(pull_threshold=1)
        load = load_context(
            [(HASH_BLOCK_SIZE, None)], HASH_BLOCK_SIZE, config=config, keys=ContentKeys(5), pool=BlockPool(self.pool)
        )
        self.engine, self.exporter = load.engine, ExportBuilder(load.engine, self.table, self.checksum_index)
        self.tables = BlockTables(
            cache_groups([(HASH_BLOCK_SIZE, None)]), HASH_BLOCK_SIZE, self.checksum_index.remove, lambda t: True
        )
        self.tracked = {}
        self.add("p", tokens, PREFILL)

    def add(self, name, tokens, params=None):
        request = make_request(name, tokens, HASH_BLOCK_SIZE, params)
        self.tracked[name] = SimpleNamespace(request=request, hints=read(params))

    def finish(self, name, ids):
        return self.exporter.finished(self.tracked[name], (ids,), self.tables.remove(name))

    def step(self, *new):
        """Each of ``new`` (name, block ids) is scheduled for all its tokens; {block: valid} of the sums ordered."""
        scheduled = {n: self.tracked[n].request.num_tokens for n, _ in new}
        output = step_output(scheduled, [(n, (ids,), 0) for n, ids in new])
        ordered = [
            (block, valid)
            for batch in self.exporter.begin_step(self.tables.begin_step(output, self.tracked.get))
            for block, valid in zip(batch.ids.tolist(), batch.valid.tolist(), strict=True)
        ]
        assert len(dict(ordered)) == len(ordered), "two checksums of one block in a step"
        for name, _ in new:
            request = self.tracked[name].request
            request.num_computed_tokens = request.num_tokens
            request.append_output_token_ids(1)
            request.status = RequestStatus.FINISHED_LENGTH_CAPPED
        return dict(ordered)


def test_unchecksummed_blocks_of_request_join_next_step():
    alone = Alone([1] * (2 * HASH_BLOCK_SIZE + 1))
    assert alone.step(("p", [5, 6, 7])) == {5: HASH_BLOCK_SIZE, 6: HASH_BLOCK_SIZE, 7: 1}
    alone.checksum_index.remove([6, 7])
    export = alone.finish("p", [5, 6, 7])
    assert export.ready_step == alone.exporter.step + 1
    assert alone.step() == {6: HASH_BLOCK_SIZE, 7: 1}


@pytest.mark.parametrize("blocks", [2, 40])
def test_end_of_prefill_looks_at_no_hash_whose_checksum_a_step_has_entered(blocks, monkeypatch):
    """Its reader waits meanwhile, and a long prompt has thousands."""
    ids = list(range(5, 5 + blocks))
    alone, looked = Alone([1] * (blocks * HASH_BLOCK_SIZE)), []
    alone.step(("p", ids))
    keys = ContentKeys(5)
    monkeypatch.setattr(alone.exporter, "_keys", lambda: SimpleNamespace(
        of=lambda hashes, *rest: looked.extend(hashes) or keys.of(hashes, *rest), key=keys.key))  # fmt: skip
    export = alone.finish("p", ids)
    assert not looked and (export.ready_step, export.pinned, export.tokens) == (1, ids, blocks * HASH_BLOCK_SIZE)


def test_end_of_prefill_after_a_reset_looks_at_all_hashes():
    """Another request has a checksum for one of its blocks since."""
    alone = Alone([1] * (2 * HASH_BLOCK_SIZE))
    alone.step(("p", [5, 6]))
    alone.checksum_index.clear()
    other = [ChecksumEntry(0, block, 7, HASH_BLOCK_SIZE) for block in (5, 6)]
    alone.checksum_index.take_missing(other, 1)
    assert alone.finish("p", [5, 6]).ready_step == 2
    assert alone.step() == {5: HASH_BLOCK_SIZE, 6: HASH_BLOCK_SIZE}


def test_export_builder_pending_checksum_is_dropped_with_its_block():
    """The export ended before the next step, and that step's forward writes something else into the block."""
    alone = Alone([1] * (2 * HASH_BLOCK_SIZE))
    alone.step(("p", [5, 6]))
    alone.checksum_index.remove([5, 6])
    alone.finish("p", [5, 6])
    alone.table.clear()
    alone.exporter.drain()
    alone.add("other", [0] * HASH_BLOCK_SIZE)
    assert alone.step(("other", [6])) == {5: HASH_BLOCK_SIZE}, "block 5 is free, block 6 has other content"


@pytest.mark.parametrize("name, exported", [("wanted", True), ("", True), ("x", False)])
def test_prefill_that_is_dropped_while_it_waits_is_not_exported(name, exported):
    """Its decode engine's client left before the first step."""
    alone = Alone([1] * HASH_BLOCK_SIZE)
    lock = SimpleNamespace(known=True, run_when_free=lambda job, refuse=None: job())
    PrefillStretches(alone.engine, lock, alone.exporter, alone.table).release_export(name)
    own = {"kvtier": {"export_as": "x"}} if name else {}
    alone.add("q", [2] * HASH_BLOCK_SIZE, {**PREFILL, **own})
    alone.step(("q", [5]))
    assert (alone.exporter.finished(alone.tracked["q"], ([5],)) is not None) == exported
    alone.exporter.prefill_ended("x")
    PrefillStretches(alone.engine, lock, alone.exporter, alone.table).release_export("x")
    assert "x" not in alone.exporter.unwanted, "the name of an ended prefill is kept for nothing"


def test_prefill_with_the_name_of_an_earlier_one_is_known_as_its_own():
    """A router asked again, after its first prefill ended without tokens. Stretches of the second one were refused, and
    it was exported although no engine was to read it."""
    alone, found = Alone([1] * HASH_BLOCK_SIZE), []
    lock = SimpleNamespace(known=True, run_when_free=lambda job, refuse=None: job())
    stretches = PrefillStretches(alone.engine, lock, alone.exporter, alone.table)
    alone.exporter.on_queued("x")
    alone.exporter.prefill_ended("x")
    alone.exporter.on_queued("x")
    stretches.lease(m.LeaseRequest(1, "i", 0, [], export="x", follow=True), b"c", 1.0, found.append)
    assert found == [Refusal.NOT_READY]
    stretches.release_export("x")
    alone.add("q", [2] * HASH_BLOCK_SIZE, {**PREFILL, "kvtier": {"export_as": "x"}})
    alone.step(("q", [5]))
    assert alone.exporter.finished(alone.tracked["q"], ([5],)) is None


def test_stretch_of_ended_prefill_is_refused_for_good_before_the_lock_is_known():
    """As where the probe found no lock. Its reader would wait for ten times the time limit."""
    alone, found = Alone([1] * HASH_BLOCK_SIZE), []
    stretches = PrefillStretches(alone.engine, SimpleNamespace(known=False), alone.exporter, alone.table)
    ask = m.LeaseRequest(1, "i", 0, [], export="x", follow=True)
    stretches.lease(ask, b"c", 1.0, found.append)
    alone.exporter.prefill_ended("x")
    stretches.lease(ask, b"c", 1.0, found.append)
    assert found == [Refusal.NOT_READY, Refusal.UNKNOWN]


def test_export_builder_resumed_prompt_has_one_checksum_per_block():
    """Resumed after a preemption, a prefill of several tokens completes the block that its prompt only began."""
    alone = Alone([1] * (HASH_BLOCK_SIZE + 1))
    alone.tracked["p"].request.append_output_token_ids([1] * HASH_BLOCK_SIZE)
    assert alone.step(("p", [5, 6, 7])) == {5: HASH_BLOCK_SIZE, 6: 1}, "what it generates is not handed off"
    export = alone.finish("p", [5, 6, 7])
    assert (export.tokens, export.ready_step) == (HASH_BLOCK_SIZE + 1, 1)
    assert alone.step() == {}
