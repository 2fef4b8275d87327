"""The real RequestMatcher and NodeStoreSource in a simulated engine; the test answers for the store and the peers.

Leases of the store and of peers, and the planner's loads, must balance at every moment. Jobs for the workers must name
the slots of exactly the blocks that vLLM allocated.
"""

import time
from types import SimpleNamespace

import pytest
from cache_groups import cache_groups, chunked, mamba, needs
from source_fakes import make_matcher
from tier_fakes import make_tier
from vllm.v1.request import RequestStatus

from vllm_kvtier.config import KVTierConfig
from vllm_kvtier.jobs.transfer_jobs import FailedJob, LoadJob
from vllm_kvtier.scheduler.integrity.checksum_index import ChecksumIndex, ContentKeys
from vllm_kvtier.scheduler.leases.lease_client import LeasedBlocks, PendingLease
from vllm_kvtier.scheduler.matching.request_lifecycle import RequestLifecycle, State
from vllm_kvtier.scheduler.planner.load_planner import LoadDecision
from vllm_kvtier.shapes.read_paths import ReadPath
from vllm_kvtier.store.client import Failed
from vllm_kvtier.store.protocol import HASH_BYTES, Done, Found, Holder
from vllm_kvtier.telemetry.stats import Counters
from vllm_kvtier.wire import messages as m

HASH_BLOCK_SIZE = 4
KEYS = ContentKeys(7)
GROUPS = {
    "full": [(HASH_BLOCK_SIZE, None)],
    "windows": [(HASH_BLOCK_SIZE, None), (HASH_BLOCK_SIZE, 6)],
    "states": [(HASH_BLOCK_SIZE, None), mamba(HASH_BLOCK_SIZE)],
    "chunks": [(HASH_BLOCK_SIZE, None), chunked(HASH_BLOCK_SIZE, 3 * HASH_BLOCK_SIZE)],
    "sizes": [(2 * HASH_BLOCK_SIZE, None), (HASH_BLOCK_SIZE, 9)],
}
ONE = [(HASH_BLOCK_SIZE, None)]


class FakePeers:
    """Asks stay open until ``answer``; every lease that was offered must come back exactly once."""

    def __init__(self, groups, clock):
        self.groups, self.clock = groups, clock
        self.open: list[PendingLease] = []
        self.offered: dict[int, PendingLease] = {}
        self.held: set[int] = set()
        self.dropped: list[tuple] = []
        self.introduced = ["a/1", "b/1"]

    def ask(self, address, timeout=2.0, same_node_instance="", prefer_mapped=False, rehash=None, **fields):
        assert timeout > 0 and set(fields) <= {
            "start", "lora_fingerprint", "reply_host", "reply_port", "block_hashes", "export", "digest",
            "from_prefix_cache",
            "wait_seconds", "partial_up_to",
        }  # fmt: skip
        ask = m.LeaseRequest(len(self.offered), "", **fields)
        pending = PendingLease(address, ask, self.clock() + 2.0, same_node_instance)
        m.decode_engine(m.encode(pending.request))  # it can be sent
        self.open.append(pending)
        return pending

    def cancel(self, pending):
        pending.cancelled = True
        if isinstance(pending.outcome, LeasedBlocks):
            self.give_back(pending.outcome.lease)

    def release(self, offer, done):
        self.give_back(offer.lease)

    def give_back(self, lease):
        assert lease in self.held, f"lease {lease} is given back twice"
        self.held.discard(lease)

    def release_export(self, address, export):
        self.dropped.append((address, export))

    def answer(self, pending, outcome):
        self.open.remove(pending)
        if isinstance(outcome, LeasedBlocks):
            self.held.add(outcome.lease)
            if pending.cancelled or pending.outcome is not None:
                self.give_back(outcome.lease)  # as Peers does with late grants
                return
        pending.outcome = outcome

    def offer(self, pending, tokens, blocks=None, start=None):
        lease = len(self.offered) + 1
        self.offered[lease] = pending
        start = pending.request.start if start is None else start
        if blocks is None:
            blocks = [list(range(1, 1 + -(-tokens // size) - start // size)) for size, _ in self.groups]
        fields = (pending.address, self.introduced[lease % 2], lease, start, tokens, blocks, [])
        if pending.request.from_prefix_cache:
            path = ReadPath.MAPPED if lease % 4 else ReadPath.STAGED
            return LeasedBlocks(*fields, path=path, same_layout=lease % 3 > 0, nbytes=1000 * len(blocks[0]))
        path = list(ReadPath)[lease % 3]
        return LeasedBlocks(*fields, path=path, same_layout=path is ReadPath.DIRECT)

    def unmappable(self, instance):
        """Nothing is asked of it that it does not offer."""

    readable = unmappable


def end_all(matcher, live, peers) -> None:
    """End every request of ``live`` (by name: request, status), and answer every lookup that is left."""
    for name, r in list(live.items()):
        if r.status != "aborted":
            r.request.status = RequestStatus.FINISHED_ABORTED
            matcher.finished(r.request)
        if r.status in ("loading", "aborted"):
            matcher.on_load_ended(name, False)
    for pending in list(peers.open):
        assert pending.cancelled or pending.outcome, "a lookup without a request was not cancelled"
        peers.answer(pending, peers.offer(pending, 40))


class FakePlanner:
    """Decides as the test sets it; loads under way must balance."""

    def __init__(self):
        self.load, self.open, self.near, self.short_load_seconds, self.vain = True, [], True, False, False
        self.waiting = set()

    def step_seconds(self):
        return 0.01

    def handover_seconds(self):
        return 0.01

    def cannot_beat_compute(self, start, end, prompt, trial=True, least=0.0):
        assert 0 <= start < end < prompt
        return self.vain

    def decide(self, source, start, end, nbytes, prompt, least):
        assert least in (0.0, 0.01)
        assert source in ("host", "peer_gpu") and 0 <= start < end <= prompt and nbytes > 0
        return LoadDecision(self.load, 0.1, 0.2, "faster" if self.load else "slower")

    def will_compute(self, request_id, start, prompt):
        assert 0 <= start <= prompt
        self.waiting.add(request_id)

    def remove_request(self, request_id):
        self.waiting.discard(request_id)

    def load_seconds(self, source, nbytes):
        return 0.1 if (source == "peer_gpu") is self.near else 0.2

    def loading(self, source):
        return any(each == source for each, _ in self.open)

    def moving_seconds(self, source, nbytes):
        return 0.001 if self.short_load_seconds else 0.1

    def compute_seconds(self, start, end, prompt):
        assert 0 <= start < end <= prompt
        return 0.05

    def started(self, source, nbytes):
        self.open.append((source, nbytes))

    def ended(self, source, nbytes):
        self.open.remove((source, nbytes))  # ValueError for what never began, as the real one


class World:
    def __init__(self, groups, clock=time.monotonic, make_hurry=lambda planner: None, **options):
        RequestLifecycle.violations = 0
        self.groups = groups = cache_groups(groups)
        self.align = max(size for size, _ in groups)
        self.config = KVTierConfig(
            **{"bidirectional": True, "pull_threshold": 4, "store": "/nowhere/store.sock", **options}
        )
        self.peers, self.planner, self.counters = FakePeers(groups, clock), FakePlanner(), Counters()
        self.sync_load = make_hurry(self.planner)
        pool = SimpleNamespace(
            free_count=lambda: 0 if self.full else 1 << 20, cached_about=lambda hashes, *_: self.cached_about(hashes),
            is_unused=lambda pinned: self.unused, num_blocks=1 << 20,
        )
        made = make_tier(
            groups,
            context={
                "peers": self.peers, "config": self.config, "keys": KEYS, "counters": self.counters,
                "planner": self.planner, "sync_load": self.sync_load, "checksum_index": ChecksumIndex(), "pool": pool,
                "identity": {"bytes_for": lambda tokens: 100 * tokens},
            },
        )  # fmt: skip
        self.tier, self.client, self.load = made.tier, made.client, made.load
        self.matcher = make_matcher(made.load, self.tier)
        self.full = self.unused = False
        self.holders: list[Holder] = []  # that the store names in its next answer
        self.stored: dict[tuple[int, bytes], int] = {}  # (group, hash) -> slot: the store has it
        self.last = 0

    def cached_about(self, block_hashes):
        """Tokens of it in the engine's prefix cache, as far as they are known before it is matched."""
        return 0

    # -- the store -------------------------------------------------------------------------------------------------

    def store(self, request, tokens=None):
        """Put a request's blocks there."""
        for g, (size, _) in enumerate(self.groups):
            for i in range((request.num_tokens if tokens is None else tokens) // size):
                self.last += 16
                self.stored.setdefault((g, self.hash(request, g, i)), self.last)

    def hash(self, request, g, i):
        return bytes(request.block_hashes[(i + 1) * self.groups[g][0] // HASH_BLOCK_SIZE - 1])[:HASH_BYTES]

    def answer(self, pending):
        """As the index does: the longest run from the start whose blocks are there, all ends aligned."""
        asked = pending.asked
        total = len(asked.block_hashes) // HASH_BYTES * HASH_BLOCK_SIZE
        start = asked.start * HASH_BLOCK_SIZE
        for tokens in range(total // self.align * self.align, start, -self.align):
            rows = []
            for g, (size, kind) in enumerate(self.groups):
                needed = next(t for t in range(tokens) if needs(kind, tokens, t)) // size
                row = []
                for i in range(start // size, tokens // size):
                    unit = (i + 1) * size // HASH_BLOCK_SIZE
                    slot = self.stored.get((g, asked.block_hashes[(unit - 1) * HASH_BYTES : unit * HASH_BYTES]))
                    row.append(0 if i < needed else slot)
                rows.append(row)
            if all(None not in row for row in rows):
                self.client.answer(pending, tokens // HASH_BLOCK_SIZE, rows, self.holders)
                return
        self.client.refuse(pending, holders=self.holders)

    def lie(self, pending, rng):
        start, size = pending.asked.start, self.groups[0][0]
        num_hash_blocks = start + self.align // HASH_BLOCK_SIZE
        rows = [[16 * (i + 1) for i in range(self.align // size)] for size, _ in self.groups]
        match rng.randrange(8):
            case 0:
                self.client.refuse(pending, Failed("hung"))
            case 1:
                self.client.refuse(pending, Done(1, 3))
            case 2:
                self.client.answer(pending, num_hash_blocks + 1000, [[5] * (1000 + len(row)) for row in rows])
            case 3:
                self.client.answer(pending, num_hash_blocks, rows[:-1])
            case 4:
                self.client.answer(pending, num_hash_blocks, [row + [7] for row in rows])
            case 5:
                self.client.answer(pending, num_hash_blocks, [[(1 << 20) - 1 for _ in row] for row in rows])
            case 6:
                self.client.answer(pending, num_hash_blocks, [[0] * len(row) for row in rows])
            case 7:
                num_hash_blocks = start + size // HASH_BLOCK_SIZE + (1 if size > HASH_BLOCK_SIZE else 0)
                self.client.answer(
                    pending, num_hash_blocks, [[3] for _ in rows] if size > HASH_BLOCK_SIZE else rows[1:]
                )

    # -- vLLM --------------------------------------------------------------------------------------------------------

    def tables(self, computed, external):
        """Block tables as vLLM makes them: none of what the first token to compute does not read."""
        total, out = computed + external, []
        for group in self.groups:
            size, skipped = group.block_tokens, group.num_skipped_blocks(total)
            ids = []
            for i in range(-(-total // size)):
                self.last += 1
                ids.append(0 if i < skipped else self.last)
            out.append(ids)
        return tuple(out)

    def check_load(self, order, request, tables, computed, total, leased):
        """``leased``: whether the slots are the store's, not a liar's."""
        assert isinstance(order, LoadJob) and order.instance == "life 1" and order.timeout > 0
        rows = {g.group: g for g in order.groups}
        for g, (size, _) in enumerate(self.groups):
            expected = []
            for i in range(computed // size, -(-total // size)):
                if tables[g][i]:
                    full = bytes(request.block_hashes[(i + 1) * size // HASH_BLOCK_SIZE - 1])
                    slot = self.stored.get((g, full[:HASH_BYTES])) if leased else None
                    expected.append((tables[g][i], KEYS.key(full, g, b""), slot))
            got = rows.get(g)
            assert (got is None) == (not expected)
            if got is not None:
                assert got.blocks.tolist() == [block for block, _, _ in expected]
                assert got.keys.tolist() == [key for _, key, _ in expected]
                if leased:
                    assert got.slots.tolist() == [slot for _, _, slot in expected]
                assert (got.slots > 0).all(), "page 0 of the store's memory belongs to no block"

    def balanced(self, alive=True):
        tracked = list(self.matcher._tracked.values())
        busy = (State.HIT, State.LOADING, State.VERIFYING, State.ABANDONED)
        hits = [t.hit for t in tracked if t.life.state in busy]
        host = [hit for hit in hits if hit.source is self.tier] + [t.held for t in tracked if t.held is not None]
        peers = [hit for hit in hits if hit.source is not self.tier]
        for t in tracked:
            answer = t.pending.answer.outcome if t.pending is not None else None
            taken = t.pending is not None and t.pending.outcome
            if isinstance(answer, Found) and answer.lease and (taken is None or taken.found):
                host.append(SimpleNamespace(lease=answer.lease, session=t.pending.answer.session))
            elif t.life.state is State.LOOKUP and isinstance(answer, LeasedBlocks):
                peers.append(answer)
        for ask, *_ in self.tier.prefetcher._lookups.values():
            answer = ask.answer.outcome
            if isinstance(answer, Found) and answer.lease:
                host.append(SimpleNamespace(lease=answer.lease, session=ask.answer.session))
        assert {o.lease for o in host if o.session == self.client.session and self.client.connected} == self.client.held
        assert {o.lease for o in peers} == self.peers.held
        loads = [
            (t.hit.source.timed_as(t.hit), self.load.engine.geometry.load_bytes(t.hit, t.num_computed_tokens))
            for t in tracked
            if t.life.state in busy[1:] and t.hit.source.timed_as(t.hit) and not isinstance(t.job, FailedJob)
        ]
        failed = [t.under_way for t in tracked if t.under_way is not None and isinstance(t.job, FailedJob)]
        loads += [(load.cost_key, load.nbytes) for load in failed]
        assert sorted(loads) == sorted(self.planner.open)
        loading = {t.request.request_id for t in tracked if t.life.state in (State.LOADING, State.ABANDONED)}
        assert set(self.matcher._loading_hashes.values()) <= loading
        assert RequestLifecycle.violations == 0


@pytest.fixture(autouse=True)
def no_violations():
    RequestLifecycle.violations = 0
    yield
    assert RequestLifecycle.violations == 0


def params(*hosts):
    return {"do_remote_decode": True, "kvtier": {"sources": [{"host": h, "port": 1} for h in hosts]}}


def offered(world, request, computed=0):
    """What the matcher says once the store has answered."""
    assert world.matcher.match(request, computed) == (None, False)
    [pending] = world.client.open
    world.answer(pending)
    return world.matcher.match(request, computed)
