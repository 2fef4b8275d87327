"""Random lives of requests that the node store and peers serve late, wrongly or not at all, and that vLLM aborts and
preempts: all leases and loads balance, in every step."""

import random
import time
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matcher_harness import GROUPS, HASH_BLOCK_SIZE, KEYS, ONE, World, end_all, no_violations  # noqa: F401
from support import WITHOUT_SHRINKING, make_request
from vllm.v1.request import RequestStatus

from vllm_kvtier.jobs.results import LoadResult
from vllm_kvtier.jobs.transfer_jobs import FailedJob, LoadJob, PeerFetchJob, PullJob
from vllm_kvtier.scheduler.integrity.sync_load import SyncLoad
from vllm_kvtier.scheduler.matching import lookup_prefetch, request_matcher, source_selector
from vllm_kvtier.scheduler.matching.request_lifecycle import RequestLifecycle, State
from vllm_kvtier.scheduler.sources.base import LookupMiss
from vllm_kvtier.store.protocol import HASH_BYTES, Holder


class Life(World):
    """Random requests with common beginnings in an engine whose prefix cache is a set of hashes."""

    def __init__(self, groups, seed):
        self.rng = random.Random(seed)
        self.now = time.monotonic()  # other modules make deadlines from the real clock
        self.live: dict[str, SimpleNamespace] = {}
        self.engine = self.engine_of_one_group() if len(groups) == 1 else None
        pool = SimpleNamespace(
            hash_block_size=HASH_BLOCK_SIZE, group_tokens=[HASH_BLOCK_SIZE], evict=self.evict, pin=list,
            free=lambda ids: None,
        )  # fmt: skip
        self.alone = self.rng.random() < 0.5  # mostly one request at a time
        super().__init__(
            groups,
            lambda: self.now,
            lambda planner: SyncLoad(100.0, 60.0, pool, lambda: self.engine, "ours", planner),
            pull_threshold=self.rng.choice([0, 4, 16]),
        )
        self.real = request_matcher.time
        request_matcher.time = source_selector.time = lookup_prefetch.time = SimpleNamespace(monotonic=lambda: self.now)
        self.cached: set[bytes] = set()
        self.unverified: set[bytes] = set()  # of them, from the load that a step waits for or computed on that
        self.made = self.loads = self.lies = self.waited = self.synchronous = self.fetched = self.fetched_hurriedly = 0
        self.among_others = 0

    def engine_of_one_group(self):
        """vLLM's scheduler, as far as it is asked whether other requests run, and for preemptions."""

        def count():
            waiting = sum(r.status == "waiting" for r in self.live.values())
            return len(self.live) - waiting, waiting

        def preempt(request, when, drop_stale_output):
            assert drop_stale_output
            self.live[request.request_id].status = "waiting"
            request.num_preemptions += 1

        return SimpleNamespace(
            connector="ours", get_request_counts=count, running=[], _preempt_request=preempt,
            prev_step_scheduled_req_ids=set(), requests={},
        )  # fmt: skip

    def evict(self, hashes):
        self.cached.difference_update(hashes)

    def new_request(self):
        rng = self.rng
        if self.alone and self.live and rng.random() < 0.8:
            return
        self.made += 1
        tokens = [rng.randrange(2)] * rng.randint(0, 8 * HASH_BLOCK_SIZE) + [
            rng.randrange(9) for _ in range(rng.randint(1, 9))
        ]
        peer = {"do_remote_decode": True, "remote_request_id": "kvtier/e", "remote_host": "a", "remote_port": 1}
        handoff = {"do_remote_prefill": True, "remote_host": "a", "remote_port": 1, "remote_request_id": "kvtier/e"}
        request = make_request(f"r{self.made}", tokens, HASH_BLOCK_SIZE, rng.choice([None, None, peer, handoff]))
        self.live[request.request_id] = SimpleNamespace(request=request, status="waiting", offset=0)
        if self.alone and rng.random() < 0.6:
            self.store(request, rng.randint(1, request.num_tokens))
        if rng.random() < 0.7:
            self.matcher.prefetch_lookup(request)

    def fill_store(self):
        if self.live:
            request = self.rng.choice(list(self.live.values())).request
            self.store(request, self.rng.randint(0, request.num_tokens))

    def cached_about(self, block_hashes):
        guess = self.rng.random()
        if guess < 0.2:
            return self.rng.randint(0, len(block_hashes)) * HASH_BLOCK_SIZE
        return (
            next((i for i, h in enumerate(block_hashes) if h not in self.cached), len(block_hashes)) * HASH_BLOCK_SIZE
        )

    def hit(self, request):
        ends = range(self.align, request.num_tokens, self.align)
        n = 0
        while n < len(ends) and request.block_hashes[ends[n] // HASH_BLOCK_SIZE - 1] in self.cached:
            n += 1
        return n * self.align

    def schedule(self):
        waiting = [r for r in self.live.values() if r.status == "waiting"]
        if not waiting:
            return
        rng, r = self.rng, self.rng.choice(waiting)
        request, name = r.request, r.request.request_id
        self.planner.load, self.planner.near, self.full = rng.random() < 0.8, rng.random() < 0.7, rng.random() < 0.1
        self.planner.vain = rng.random() < 0.1
        self.planner.short_load_seconds = rng.random() < 0.3
        if self.engine is not None:  # sometimes the others are yet to come
            self.engine.requests = {id(each): each.request for each in waiting if rng.random() < 0.5 or each is r}
        computed = self.hit(request)
        t = self.matcher.track(request)
        external, asynchronous = self.matcher.match(request, computed)
        if external is None:
            assert not asynchronous
            self.waited += 1
            return
        assert not self.unverified, "no request is matched before the verification"
        assert 0 <= external <= request.num_tokens - computed
        assert asynchronous is (external > 0 and not t.synchronous)
        if external and t.synchronous:
            assert t.hit.source is self.tier or t.hit.mapped
            assert list(self.live) == [name] or (self.planner.short_load_seconds and len(self.engine.requests) == 1)
            assert computed + external < request.num_tokens, "vLLM has a token to compute in the same step"
        if rng.random() < 0.2:
            return  # no room; vLLM asks again
        if external and rng.random() < 0.05:
            external = 0  # nor does it want it
        tables = self.tables(computed, external)
        host = t.hit is not None and t.hit.source is self.tier
        total = computed + external
        self.matcher.allocated(request, tables, external)
        orders, _ = self.matcher.take_jobs()
        assert [o.request_id for o in orders] == ([name] if external else [])
        if not external:
            r.status = "running"
            self.cached.update(request.block_hashes)
            return
        self.loads += 1
        self.fetched += isinstance(orders[0], PeerFetchJob)
        self.fetched_hurriedly += isinstance(orders[0], PeerFetchJob) and t.synchronous
        r.status, r.order, r.total = "loading", orders[0], total
        assert getattr(r.order, "synchronous", False) is t.synchronous
        if t.synchronous:
            self.synchronous += 1
            self.among_others += len(self.live) > 1
            r.status = "synchronous"
            self.engine.running.append(request)
            self.cached.update(request.block_hashes)
            self.unverified = set(request.block_hashes[computed // HASH_BLOCK_SIZE :])
        if isinstance(orders[0], FailedJob):
            assert orders[0].block_list == [i for ids, (size, _) in zip(tables, self.groups, strict=True)
                                            for i in ids[computed // size : -(-total // size)] if i]  # fmt: skip
        elif host:
            self.check_load(orders[0], request, tables, computed, total, t.hit.lease not in self.liars)
        elif t.hit.source.name == "peer_gpu":
            self.check_fetch(orders[0], t, request, tables, computed, total)

    def check_fetch(self, order, t, request, tables, computed, total):
        assert isinstance(order, PeerFetchJob if t.hit.mapped else PullJob) and order.instance == t.hit.instance
        for row in order.groups:
            size = self.groups[row.group][0]
            places = [i for i in range(computed // size, -(-total // size)) if tables[row.group][i]]
            assert row.local.tolist() == [tables[row.group][i] for i in places]
            assert row.remote.tolist() == [t.hit.blocks[row.group][i - t.hit.start // size] for i in places]
            hashes = [bytes(request.block_hashes[(i + 1) * size // HASH_BLOCK_SIZE - 1]) for i in places]
            assert row.keys.tolist() == [KEYS.key(h, row.group, b"") for h in hashes]
            assert (row.valid == size).all()

    liars: set = set()
    unsure = False  # whether something of ours may have raised

    def store_answers(self):
        if not self.client.open:
            return
        pending = self.rng.choice(self.client.open)
        self.holders = []
        for _ in range(self.rng.choice([0, 0, 1, 2])):
            num_hash_blocks = pending.asked.start + self.rng.randint(1, 12)
            name = self.rng.choice(["a/1", "b/1", "ours/1"])
            self.holders.append(Holder(host=name[0], port=1, instance=name, num_hash_blocks=num_hash_blocks))
        if self.rng.random() < 0.2:
            self.lies += 1
            before = set(self.client.held)
            self.lie(pending, self.rng)
            self.liars = self.liars | (self.client.held - before)
        else:
            self.answer(pending)

    def peer_answers(self):
        if not self.peers.open:
            return
        pending, rng = self.rng.choice(self.peers.open), self.rng
        if pending.outcome is not None or rng.random() < 0.4:
            code = rng.choice(["no_matching_blocks", "timeout", "unreachable", "checksums_not_ready"])
            outcome = LookupMiss(code, "")
            if pending.outcome is not None:
                outcome = self.peers.offer(pending, 40)
            self.peers.answer(pending, outcome)
            return
        ask = pending.request
        if ask.export:
            asker = [r.request for r in self.live.values() if self.matcher.track(r.request).pending is pending]
            tokens = asker[0].num_tokens if asker else 9
        else:
            least = ask.start // self.align + 1
            tokens = rng.randint(least, max(least, len(ask.block_hashes))) * self.align
        self.peers.answer(pending, self.peers.offer(pending, tokens))

    def load_ends(self):
        loading = [r for r in self.live.values() if r.status in ("loading", "aborted")]
        if not loading:
            return
        r, failed = self.rng.choice(loading), self.rng.random() < 0.3
        name, t = r.request.request_id, self.matcher.get(r.request.request_id)
        if isinstance(r.order, FailedJob):
            failed = True
        elif failed and t.hit.source is self.tier:
            group = self.rng.choice(r.order.groups)
            slot = int(self.rng.choice(group.slots))
            told = len(self.client.told)
            wrong = [(group.group, slot), (group.group, 1 << 30)]
            self.tier.on_load_failed(t, LoadResult(name, {1}, "wrong", 0, 0.0, 0.0, wrong))
            [(verb, namespace_id, g, block_hash, at, session)] = self.client.told[told:]
            assert (verb, g, at, namespace_id) == ("discard", group.group, slot, self.tier.namespace_id(b""))
            assert len(block_hash) == HASH_BYTES and session == t.hit.session
        self.matcher.on_load_ended(name, failed)
        if r.status == "aborted":
            del self.live[name]
        elif failed:
            r.status = "waiting" if self.rng.random() < 0.8 else "running"
        else:
            r.status = "running"
            self.cached.update(r.request.block_hashes[: r.total // HASH_BLOCK_SIZE])

    def verdict(self):
        """The output of the step that waited for a load is read."""
        [r] = [r for r in self.live.values() if getattr(r, "order", None) and r.status.startswith("synchronous")] or [
            None
        ]
        if r is None:
            return
        request, name = r.request, r.request.request_id
        failed = self.rng.random() < 0.4 and request.status is not RequestStatus.FINISHED_STOPPED
        (group,) = r.order.groups
        failed |= isinstance(r.order, FailedJob)
        bad = set(self.rng.sample(group.blocks.tolist(), self.rng.randint(1, len(group.blocks)))) if failed else set()
        good = r.total // HASH_BLOCK_SIZE * HASH_BLOCK_SIZE
        if failed:
            good = (
                min(group.blocks.tolist().index(block) for block in bad) * HASH_BLOCK_SIZE
                + r.total
                - len(group.blocks) * HASH_BLOCK_SIZE
            )
            good = -(-good // HASH_BLOCK_SIZE) * HASH_BLOCK_SIZE
        results = [LoadResult(name, bad, "", 1, 0.1, 0.0), LoadResult("another", set(), "", 1, 0.1, 0.0)]
        assert self.sync_load.verified(results) == {name} and not self.sync_load.verified(results[1:])
        ran = request in self.engine.running
        self.sync_load.apply_results(name, results)
        self.matcher.on_load_ended(name, failed)
        self.unverified = set()
        if failed:
            assert request not in self.engine.running
            assert not self.cached & set(request.block_hashes[good // HASH_BLOCK_SIZE :]), (
                "what was computed on it is gone too"
            )
        if r.status == "synchronous, aborted":
            del self.live[name]
        elif r.status == "synchronous, preempted":
            r.status = "waiting"
        elif not failed:
            r.status = "running"
            self.engine.running.remove(request)
        else:
            assert ran and r.status == "waiting" and self.matcher.get(name).life.state in (State.LOCAL, State.NEW)

    def preempt_early(self):
        """Before its first step's output was read."""
        for r in self.live.values():
            if r.status == "synchronous":
                r.status = "synchronous, preempted"
                self.engine.running.remove(r.request)
                r.request.num_preemptions += 1
                assert self.matcher.match(r.request, self.hit(r.request)) == (None, False)

    def preempt(self):
        running = [r for r in self.live.values() if r.status == "running"]
        if running:
            r = self.rng.choice(running)
            r.status = "waiting"
            r.request.num_preemptions += 1

    def forget_cache(self):
        self.cached = {h for h in self.cached if self.rng.random() < 0.5}

    def finish(self):
        if not self.live:
            return
        r = self.rng.choice(list(self.live.values()))
        if r.status.endswith("aborted"):
            return
        if r.status.startswith("synchronous"):
            if r.request in self.engine.running:
                self.engine.running.remove(r.request)
        r.request.status = self.rng.choice([RequestStatus.FINISHED_ABORTED, RequestStatus.FINISHED_STOPPED])
        loading = r.status == "loading"
        self.matcher.finished(r.request)
        stopped = [r.request.request_id] if loading and isinstance(r.order, LoadJob) else []
        assert self.matcher.take_aborted() in (stopped, [] if self.unsure else stopped)
        if loading:
            r.status = "aborted"
        elif r.status.startswith("synchronous"):
            r.status = "synchronous, aborted"
        else:
            del self.live[r.request.request_id]

    def store_dies(self):
        if self.client.connected:
            self.client.lose()
        else:
            self.client.connect("life 1")

    def time_passes(self):
        self.now += self.rng.choice([0.1, 2.0, 3.5, 61.0])

    def steps(self):
        self.matcher.expire_prefetches()

    def end(self):
        try:
            self.verdict()
            end_all(self.matcher, self.live, self.peers)
            if not self.client.connected:
                self.client.connect("life 1")
            for pending in list(self.client.open):
                self.client.answer(pending, pending.asked.start, [])
            assert not self.client.held and not self.peers.held and not self.planner.open
            assert not len(self.matcher) and not self.matcher._loading_hashes
            assert not len(self.tier.prefetcher) and not self.tier.prefetcher._queue
            assert RequestLifecycle.violations == 0
        finally:
            request_matcher.time = source_selector.time = lookup_prefetch.time = self.real


@pytest.mark.parametrize("groups", sorted(GROUPS))
@given(seed=st.integers(0, 1 << 32))
@settings(max_examples=50, phases=WITHOUT_SHRINKING)
def test_store_random_operations_keep_invariants(groups, seed):
    life = Life(GROUPS[groups], seed)
    events = {
        life.new_request: 4, life.fill_store: 4, life.schedule: 12, life.store_answers: 7, life.peer_answers: 5,
        life.load_ends: 4, life.preempt: 1.5, life.forget_cache: 1, life.finish: 2, life.store_dies: 0.3,
        life.time_passes: 0.3, life.steps: 0.6, life.tier.renew: 0.1, life.verdict: 4, life.preempt_early: 0.3,
    }  # fmt: skip
    try:
        for _ in range(200):
            life.rng.choices(list(events), list(events.values()))[0]()
            life.balanced()
    finally:
        life.end()


def test_store_random_operations_fetch_from_peers():
    """The machine above has requests fetched from other engines of the node, also in the step that computes on them,
    and among other requests where that is brief."""
    fetched, synchronous, among_others = 0, 0, 0
    for seed in range(40):
        life = Life(ONE, seed)
        events = [life.new_request, life.fill_store, life.schedule, life.store_answers, life.peer_answers]
        events += [life.load_ends, life.finish, life.verdict]
        try:
            for _ in range(300):
                life.rng.choices(events, [4, 1, 12, 7, 9, 4, 1, 4])[0]()
                life.balanced()
        finally:
            life.end()
        fetched, synchronous = fetched + life.fetched, synchronous + life.fetched_hurriedly
        among_others += life.among_others
    assert fetched > 20 and synchronous > 0 and among_others > 0
