"""The real Matcher and HostTier with a node store that is late, wrong, or gone, and peers beside it.

Leases of the store and of peers, and the planner's loads, must balance at every moment; what is ordered from the
workers must be the slots of exactly the blocks that vLLM allocated.
"""

import random
import time
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import WITHOUT_SHRINKING, make_request
from test_matching import FakePeers
from tier_fakes import make_tier
from vllm.v1.request import RequestStatus

from vllm_kvtier.config import KVTierConfig
from vllm_kvtier.scheduler import asking, matching
from vllm_kvtier.scheduler.hurry import Hurry
from vllm_kvtier.scheduler.ledger import Keys, Ledger
from vllm_kvtier.scheduler.lifecycle import Lifecycle, State
from vllm_kvtier.scheduler.matching import Matcher
from vllm_kvtier.scheduler.peers import Loan, NoOffer, Offer
from vllm_kvtier.scheduler.planner import Decision
from vllm_kvtier.scheduler.tier import HostAsk, HostOffer
from vllm_kvtier.store.client import Failed
from vllm_kvtier.store.messages import HASH, Done, Found, Holder
from vllm_kvtier.telemetry.stats import Counters
from vllm_kvtier.worker.queues import LoadResult
from vllm_kvtier.worker.work import FetchOrder, LoadOrder, PullOrder

UNIT = 4
KEYS = Keys(7)
GROUPS = {
    "full": [(UNIT, None)],
    "windows": [(UNIT, None), (UNIT, 6)],
    "sizes": [(2 * UNIT, None), (UNIT, 9)],
}
ONE = [(UNIT, None)]


class FakePlanner:
    """Says what it is told to say; loads under way must balance."""

    def __init__(self):
        self.load, self.open, self.near = True, [], True

    def step_seconds(self):
        return 0.01

    def decide(self, source, start, end, nbytes, prompt, least):
        assert least in (0.0, 0.01)
        assert source in ("host", "gpu") and 0 <= start < end <= prompt and nbytes > 0
        return Decision(self.load, 0.1, 0.2, "faster" if self.load else "slower")

    def load_seconds(self, source, nbytes):
        return 0.1 if (source == "gpu") is self.near else 0.2

    def compute_seconds(self, start, end, prompt):
        assert 0 <= start < end <= prompt
        return 0.05

    def started(self, source, nbytes):
        self.open.append((source, nbytes))

    def ended(self, source, nbytes):
        self.open.remove((source, nbytes))  # ValueError for what never began, as the real one


class World:
    def __init__(self, groups, clock=time.monotonic, hurry=None, **options):
        Lifecycle.violations = 0
        self.groups = groups
        self.align = max(size for size, _ in groups)
        self.config = KVTierConfig(**{"bidirectional": True, "pull_threshold": 4, **options})
        made = make_tier(groups)
        self.tier, self.client = made.tier, made.client
        self.peers, self.planner, self.counters = FakePeers(groups, clock), FakePlanner(), Counters()
        self.matcher = Matcher(
            self.config, self.peers, Ledger(), lambda: KEYS, groups, UNIT, lambda: ("me", 9), self.counters,
            True, self.tier, self.planner, hurry, "ours/1", lambda tokens: 100 * tokens,
            lambda: 0 if self.full else 1 << 20,
        )  # fmt: skip
        self.full = False
        self.holders: list[Holder] = []  # that the store names in its next answer
        self.stored: dict[tuple[int, bytes], int] = {}  # (group, hash) -> slot: the store has it
        self.last = 0

    # -- the store -------------------------------------------------------------------------------------------------

    def store(self, request, tokens=None):
        """Put a request's blocks there."""
        for g, (size, _) in enumerate(self.groups):
            for i in range((request.num_tokens if tokens is None else tokens) // size):
                self.last += 16
                self.stored.setdefault((g, self.hash(request, g, i)), self.last)

    def hash(self, request, g, i):
        return bytes(request.block_hashes[(i + 1) * self.groups[g][0] // UNIT - 1])[:HASH]

    def answer(self, pending):
        """As the index does: the longest run from the start whose blocks are there, all ends aligned."""
        asked = pending.asked
        total = len(asked.chain) // HASH * UNIT
        start = asked.start * UNIT
        for tokens in range(total // self.align * self.align, start, -self.align):
            rows = []
            for g, (size, window) in enumerate(self.groups):
                needed = 0 if window is None else max(0, tokens - window) // size
                row = []
                for i in range(start // size, tokens // size):
                    unit = (i + 1) * size // UNIT
                    slot = self.stored.get((g, asked.chain[(unit - 1) * HASH : unit * HASH]))
                    row.append(0 if i < needed else slot)
                rows.append(row)
            if all(None not in row for row in rows):
                self.client.answer(pending, tokens // UNIT, rows, self.holders)
                return
        self.client.refuse(pending, holders=self.holders)

    def lie(self, pending, rng):
        start, size = pending.asked.start, self.groups[0][0]
        units = start + self.align // UNIT
        rows = [[16 * (i + 1) for i in range(self.align // size)] for size, _ in self.groups]
        match rng.randrange(8):
            case 0:
                self.client.refuse(pending, Failed("hung"))
            case 1:
                self.client.refuse(pending, Done(1, 3))
            case 2:
                self.client.answer(pending, units + 1000, [[5] * (1000 + len(row)) for row in rows])
            case 3:
                self.client.answer(pending, units, rows[:-1])
            case 4:
                self.client.answer(pending, units, [row + [7] for row in rows])
            case 5:
                self.client.answer(pending, units, [[(1 << 20) - 1 for _ in row] for row in rows])
            case 6:
                self.client.answer(pending, units, [[0] * len(row) for row in rows])
            case 7:
                units = start + size // UNIT + (1 if size > UNIT else 0)
                self.client.answer(pending, units, [[3] for _ in rows] if size > UNIT else rows[1:])

    # -- vLLM --------------------------------------------------------------------------------------------------------

    def tables(self, computed, external):
        """Block tables as vLLM makes them: none behind the windows of the first token to compute."""
        total, out = computed + external, []
        for size, window in self.groups:
            skipped = 0 if window is None else max(0, total - window + 1) // size
            ids = []
            for i in range(-(-total // size)):
                self.last += 1
                ids.append(0 if i < skipped else self.last)
            out.append(ids)
        return tuple(out)

    def check_load(self, order, request, tables, computed, total, leased):
        """``leased``: whether the slots are the store's, not a liar's."""
        assert isinstance(order, LoadOrder) and order.instance == "life 1" and order.timeout > 0
        rows = {g.group: g for g in order.groups}
        for g, (size, _) in enumerate(self.groups):
            expected = []
            for i in range(computed // size, -(-total // size)):
                if tables[g][i]:
                    full = bytes(request.block_hashes[(i + 1) * size // UNIT - 1])
                    slot = self.stored.get((g, full[:HASH])) if leased else None
                    expected.append((tables[g][i], KEYS.key(full, g, b""), slot))
            got = rows.get(g)
            assert (got is None) == (not expected)
            if got is not None:
                assert got.blocks.tolist() == [block for block, _, _ in expected]
                assert got.keys.tolist() == [key for _, key, _ in expected]
                if leased:
                    assert got.slots.tolist() == [slot for _, _, slot in expected]
                assert (got.slots > 0).all(), "page 0 of the store's memory is nobody's"

    def balanced(self, alive=True):
        tracked = list(self.matcher._tracked.values())
        busy = (State.OFFERED, State.LOADING, State.VERIFYING, State.ABANDONED)
        host = [t.offer for t in tracked if t.life.state in busy and isinstance(t.offer, HostOffer)]
        host += [t.held for t in tracked if t.held is not None]
        peers = [t.offer for t in tracked if t.life.state in busy and not isinstance(t.offer, HostOffer)]
        for t in tracked:
            if isinstance(t.pending, HostAsk):
                answer = t.pending._pending.outcome
                if isinstance(answer, Found) and answer.lease and not isinstance(t.pending._outcome, NoOffer):
                    host.append(SimpleNamespace(lease=answer.lease, session=t.pending._pending.session))
            elif t.pending is not None and t.life.state is State.ASKING and isinstance(t.pending.outcome, Offer):
                peers.append(t.pending.outcome)
        assert {o.lease for o in host if o.session == self.client.session and self.client.connected} == self.client.held
        assert {o.lease for o in peers} == self.peers.held
        loads = [(t.offer.place, t.offer.nbytes) for t in tracked if t.life.state in busy[1:] and t.offer.place]
        assert sorted(loads) == sorted(self.planner.open)
        loading = {t.request.request_id for t in tracked if t.life.state in (State.LOADING, State.ABANDONED)}
        assert set(self.matcher._inbound.values()) <= loading
        assert Lifecycle.violations == 0


class Life(World):
    """Random requests with common beginnings in an engine whose prefix cache is a set of hashes."""

    def __init__(self, groups, seed):
        self.rng = random.Random(seed)
        self.now = 1000.0
        self.live: dict[str, SimpleNamespace] = {}
        self.engine = self.engine_of_one_group() if len(groups) == 1 else None
        pool = SimpleNamespace(evict=self.evict, free=lambda ids: None)
        self.hurry = Hurry(100.0, 60.0, pool, lambda: self.engine, "ours")
        self.alone = self.rng.random() < 0.5  # mostly one request at a time
        super().__init__(groups, lambda: self.now, self.hurry, pull_threshold=self.rng.choice([0, 4, 16]))
        self.real = matching.time
        matching.time = asking.time = SimpleNamespace(monotonic=lambda: self.now)
        self.cached: set[bytes] = set()
        self.unverified: set[bytes] = set()  # of them, from the load that a step waits for or computed on that
        self.made = self.loads = self.lies = self.waited = self.hurried = self.fetched = self.fetched_hurriedly = 0

    def engine_of_one_group(self):
        """vLLM's scheduler, as far as it is asked whether somebody else is there, and takes requests back."""

        def count():
            waiting = sum(r.status == "waiting" for r in self.live.values())
            return len(self.live) - waiting, waiting

        def preempt(request, when, drop_stale_output):
            assert drop_stale_output
            self.live[request.request_id].status = "waiting"
            request.num_preemptions += 1

        return SimpleNamespace(
            connector="ours", get_request_counts=count, running=[], _preempt_request=preempt,
            prev_step_scheduled_req_ids=set(),
        )  # fmt: skip

    def evict(self, hashes, group):
        self.cached.difference_update(hashes)

    def new_request(self):
        rng = self.rng
        if self.alone and self.live and rng.random() < 0.8:
            return
        self.made += 1
        tokens = [rng.randrange(2)] * rng.randint(0, 8 * UNIT) + [rng.randrange(9) for _ in range(rng.randint(1, 9))]
        peer = {"do_remote_decode": True, "remote_host": "a", "remote_port": 1}
        handoff = {"do_remote_prefill": True, "remote_host": "a", "remote_port": 1, "remote_request_id": "e"}
        request = make_request(f"r{self.made}", tokens, UNIT, rng.choice([None, None, peer, handoff]))
        self.live[request.request_id] = SimpleNamespace(request=request, status="waiting", offset=0)
        if self.alone and rng.random() < 0.6:
            self.store(request, rng.randint(1, request.num_tokens))

    def fill_store(self):
        if self.live:
            request = self.rng.choice(list(self.live.values())).request
            self.store(request, self.rng.randint(0, request.num_tokens))

    def hit(self, request):
        ends = range(self.align, request.num_tokens, self.align)
        n = 0
        while n < len(ends) and request.block_hashes[ends[n] // UNIT - 1] in self.cached:
            n += 1
        return n * self.align

    def schedule(self):
        waiting = [r for r in self.live.values() if r.status == "waiting"]
        if not waiting:
            return
        rng, r = self.rng, self.rng.choice(waiting)
        request, name = r.request, r.request.request_id
        self.planner.load, self.planner.near, self.full = rng.random() < 0.8, rng.random() < 0.7, rng.random() < 0.1
        computed = self.hit(request)
        t = self.matcher.track(request)
        external, asynchronous = self.matcher.match(request, computed)
        if external is None:
            assert not asynchronous
            self.waited += 1
            return
        assert not self.unverified, "nobody is matched before the verdict"
        assert 0 <= external <= request.num_tokens - computed
        assert asynchronous is (external > 0 and not t.hurried)
        if external and t.hurried:
            assert isinstance(t.offer, HostOffer) or t.offer.mapped
            assert list(self.live) == [name]
            assert computed + external < request.num_tokens, "vLLM has a token to compute in the same step"
        if rng.random() < 0.2:
            return  # no room; vLLM asks again
        if external and rng.random() < 0.05:
            external = 0  # nor does it want it
        tables = self.tables(computed, external)
        host = isinstance(t.offer, HostOffer)
        total = computed + external
        self.matcher.allocated(request, tables, external)
        orders, _ = self.matcher.take_orders()
        assert [o.request_id for o in orders] == ([name] if external else [])
        if not external:
            r.status = "running"
            self.cached.update(request.block_hashes)
            return
        self.loads += 1
        self.fetched += isinstance(orders[0], FetchOrder)
        self.fetched_hurriedly += isinstance(orders[0], FetchOrder) and t.hurried
        r.status, r.order, r.total = "loading", orders[0], total
        assert getattr(r.order, "hurried", False) is t.hurried
        if t.hurried:
            self.hurried += 1
            r.status = "hurried"
            self.engine.running.append(request)
            self.cached.update(request.block_hashes)
            self.unverified = set(request.block_hashes[computed // UNIT :])
        if host:
            self.check_load(orders[0], request, tables, computed, total, t.offer.lease not in self.liars)
        elif isinstance(t.offer, Loan):
            self.check_fetch(orders[0], t, request, tables, computed, total)

    def check_fetch(self, order, t, request, tables, computed, total):
        assert isinstance(order, FetchOrder if t.offer.mapped else PullOrder) and order.source == t.offer.instance
        for row in order.groups:
            size = self.groups[row.group][0]
            places = [i for i in range(computed // size, -(-total // size)) if tables[row.group][i]]
            assert row.local.tolist() == [tables[row.group][i] for i in places]
            assert row.remote.tolist() == [t.offer.blocks[row.group][i - t.offer.start // size] for i in places]
            hashes = [bytes(request.block_hashes[(i + 1) * size // UNIT - 1]) for i in places]
            assert row.keys.tolist() == [KEYS.key(h, row.group, b"") for h in hashes]
            assert (row.valid == size).all()

    liars: set = set()

    def store_answers(self):
        if not self.client.open:
            return
        pending = self.rng.choice(self.client.open)
        self.holders = []
        for _ in range(self.rng.choice([0, 0, 1, 2])):
            units = pending.asked.start + self.rng.randint(1, 12)
            name = self.rng.choice(["a/1", "b/1", "ours/1"])
            self.holders.append(Holder(host=name[0], port=1, instance=name, units=units))
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
            outcome = NoOffer(rng.choice(["nothing", "timeout", "unreachable", "not_ready"]), "")
            if pending.outcome is not None:
                outcome = self.peers.offer(pending, 40)
            self.peers.answer(pending, outcome)
            return
        ask = pending.ask
        if ask.export:
            asker = [r.request for r in self.live.values() if self.matcher.track(r.request).pending is pending]
            tokens = asker[0].num_tokens if asker else 9
        else:
            least = ask.start // self.align + 1
            tokens = rng.randint(least, max(least, len(ask.chain))) * self.align
        self.peers.answer(pending, self.peers.offer(pending, tokens))

    def load_ends(self):
        loading = [r for r in self.live.values() if r.status in ("loading", "aborted")]
        if not loading:
            return
        r, failed = self.rng.choice(loading), self.rng.random() < 0.3
        name, t = r.request.request_id, self.matcher.get(r.request.request_id)
        if failed and isinstance(t.offer, HostOffer):
            group = self.rng.choice(r.order.groups)
            slot = int(self.rng.choice(group.slots))
            told = len(self.client.told)
            self.matcher.discard(name, [(group.group, slot), (group.group, 1 << 30)])
            [(verb, space, g, block_hash, at, session)] = self.client.told[told:]
            assert (verb, g, at, space) == ("discard", group.group, slot, self.tier.space(b""))
            assert len(block_hash) == HASH and session == t.offer.session
        self.matcher.loaded(name, failed)
        if r.status == "aborted":
            del self.live[name]
        elif failed:
            r.status = "waiting" if self.rng.random() < 0.8 else "running"
        else:
            r.status = "running"
            self.cached.update(r.request.block_hashes[: r.total // UNIT])

    def verdict(self):
        """The output of the step that waited for a load is read."""
        [r] = [r for r in self.live.values() if getattr(r, "order", None) and r.status.startswith("hurried")] or [None]
        if r is None:
            return
        request, name = r.request, r.request.request_id
        failed = self.rng.random() < 0.4 and request.status is not RequestStatus.FINISHED_STOPPED
        (group,) = r.order.groups
        bad = set(self.rng.sample(group.blocks.tolist(), self.rng.randint(1, len(group.blocks)))) if failed else set()
        good = r.total // UNIT * UNIT
        if failed:
            good = min(group.blocks.tolist().index(block) for block in bad) * UNIT + r.total - len(group.blocks) * UNIT
            good = -(-good // UNIT) * UNIT
        results = [LoadResult(name, bad, "", 1, 0.1, 0.0), LoadResult("another", set(), "", 1, 0.1, 0.0)]
        assert self.hurry.judged(results) == {name} and not self.hurry.judged(results[1:])
        ran = request in self.engine.running
        self.hurry.settle(name, results)
        self.matcher.loaded(name, failed)
        self.unverified = set()
        if failed:
            assert request not in self.engine.running
            assert not self.cached & set(request.block_hashes[good // UNIT :]), "what was computed on it is gone too"
        if r.status == "hurried, aborted":
            del self.live[name]
        elif r.status == "hurried, preempted":
            r.status = "waiting"
        elif not failed:
            r.status = "running"
            self.engine.running.remove(request)
        else:
            assert ran and r.status == "waiting" and self.matcher.get(name).life.state in (State.LOCAL, State.NEW)

    def preempt_early(self):
        """Before its first step's output was read."""
        for r in self.live.values():
            if r.status == "hurried":
                r.status = "hurried, preempted"
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
        if r.status.startswith("hurried"):
            if r.request in self.engine.running:
                self.engine.running.remove(r.request)
        r.request.status = self.rng.choice([RequestStatus.FINISHED_ABORTED, RequestStatus.FINISHED_STOPPED])
        loading = r.status == "loading"
        self.matcher.finished(r.request)
        stopped = [r.request.request_id] if loading and isinstance(r.order, LoadOrder) else []
        assert self.matcher.take_aborted() == stopped
        if loading:
            r.status = "aborted"
        elif r.status.startswith("hurried"):
            r.status = "hurried, aborted"
        else:
            del self.live[r.request.request_id]

    def store_dies(self):
        if self.client.connected:
            self.client.lose()
        else:
            self.client.connect("life 1")

    def time_passes(self):
        self.now += self.rng.choice([0.1, 2.0, 3.5, 61.0])

    def end(self):
        try:
            self.verdict()
            for name, r in list(self.live.items()):
                if r.status != "aborted":
                    r.request.status = RequestStatus.FINISHED_ABORTED
                    self.matcher.finished(r.request)
                if r.status in ("loading", "aborted"):
                    self.matcher.loaded(name, False)
            if not self.client.connected:
                self.client.connect("life 1")
            for pending in list(self.client.open):
                self.client.answer(pending, pending.asked.start, [])
            for pending in list(self.peers.open):
                assert pending.cancelled or pending.outcome
                self.peers.answer(pending, self.peers.offer(pending, 40))
            assert not self.client.held and not self.peers.held and not self.planner.open
            assert not len(self.matcher) and not self.matcher._inbound
            assert Lifecycle.violations == 0
        finally:
            matching.time = asking.time = self.real


@pytest.mark.parametrize("groups", sorted(GROUPS))
@given(seed=st.integers(0, 1 << 32))
@settings(max_examples=50, phases=WITHOUT_SHRINKING)
def test_long_random_lives(groups, seed):
    life = Life(GROUPS[groups], seed)
    events = {
        life.new_request: 4, life.fill_store: 4, life.schedule: 12, life.store_answers: 7, life.peer_answers: 5,
        life.load_ends: 4, life.preempt: 1.5, life.forget_cache: 1, life.finish: 2, life.store_dies: 0.3,
        life.time_passes: 0.3, life.tier.renew: 0.1, life.verdict: 4, life.preempt_early: 0.3,
    }  # fmt: skip
    try:
        for _ in range(200):
            life.rng.choices(list(events), list(events.values()))[0]()
            life.balanced()
    finally:
        life.end()


def test_lives_fetch():
    """The machine above has requests fetched from other engines of the node, also in the step that computes on them."""
    fetched, hurried = 0, 0
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
        fetched, hurried = fetched + life.fetched, hurried + life.fetched_hurriedly
    assert fetched > 20 and hurried > 0


# -- single cases ----------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def no_violations():
    Lifecycle.violations = 0
    yield
    assert Lifecycle.violations == 0


def params(*hosts):
    return {"do_remote_decode": True, "kvtier": {"sources": [{"host": h, "port": 1} for h in hosts]}}


def offered(world, request, computed=0):
    """What the matcher says once the store has answered."""
    assert world.matcher.match(request, computed) == (None, False)
    [pending] = world.client.open
    world.answer(pending)
    return world.matcher.match(request, computed)


def test_a_load_from_the_store():
    world = World(ONE)
    request = make_request("r", list(range(18)), UNIT)
    world.store(request, 16)
    assert offered(world, request) == (16, True)
    tables = ([11, 12, 13, 14, 15],)
    world.matcher.allocated(request, tables, 16)
    [order], introduced = world.matcher.take_orders()
    world.check_load(order, request, tables, 0, 16, True)
    assert introduced == {} and len(world.client.held) == len(world.planner.open) == 1
    world.matcher.loaded("r", False)
    assert not world.client.held and not world.planner.open
    report = world.matcher.get("r").report()
    assert (report.pulled, report.pulled_from) == (16, "host")
    world.matcher.finished(request)
    assert not len(world.matcher)


def test_a_report_that_comes_twice_costs_nothing_but_a_complaint():
    """It ends on vLLM's thread: an exception there would end the engine."""
    world = World(ONE)
    request = make_request("r", list(range(18)), UNIT)
    world.store(request)
    assert offered(world, request) == (16, True)
    world.matcher.allocated(request, world.tables(0, 16), 16)
    world.matcher.loaded("r", False)
    world.matcher.loaded("r", False)
    assert Lifecycle.violations == 1 and not world.planner.open and not world.client.held
    Lifecycle.violations = 0


@pytest.mark.parametrize("peer, winner", [(8, "store"), (16, "store"), (18, "store"), (24, "peer"), (None, "store")])
def test_the_longer_of_store_and_peer_wins(peer, winner):
    """The peer's must be longer by what is worth a pull, and the other lease goes back."""
    world = World(ONE)
    request = make_request("r", list(range(33)), UNIT, params("a"))
    world.store(request, 16)
    assert world.matcher.match(request, 0) == (None, False)
    world.answer(world.client.open[0])
    assert world.matcher.match(request, 0) == (None, False), "the peer is asked for what the store lacks"
    [pending] = world.peers.open
    assert len(world.client.held) == 1
    if peer is None:
        world.peers.answer(pending, NoOffer("nothing", ""))
    else:
        world.peers.answer(pending, world.peers.offer(pending, peer))
    expected = 16 if winner == "store" else peer
    assert world.matcher.match(request, 0) == (expected, True)
    assert len(world.client.held) == (winner == "store") and len(world.peers.held) == (winner == "peer")
    world.balanced()
    world.matcher.finished(request)
    assert not world.client.held and not world.peers.held


def test_the_next_peer_is_asked_when_one_has_no_more_than_the_store():
    world = World(ONE)
    request = make_request("r", list(range(33)), UNIT, params("a", "b"))
    world.store(request, 16)
    assert world.matcher.match(request, 0) == (None, False)
    world.answer(world.client.open[0])
    assert world.matcher.match(request, 0) == (None, False)
    world.peers.answer(world.peers.open[0], world.peers.offer(world.peers.open[0], 12))
    assert world.matcher.match(request, 0) == (None, False)
    [pending] = world.peers.open
    assert pending.address == ("b", 1)
    world.peers.answer(pending, world.peers.offer(pending, 32))
    assert world.matcher.match(request, 0) == (32, True) and not world.client.held
    world.matcher.finished(request)


def test_the_whole_prompt_in_the_store_asks_no_peer():
    world = World(ONE)
    request = make_request("r", list(range(34)), UNIT, params("a"))
    world.store(request)
    assert offered(world, request) == (32, True)
    assert not world.peers.open
    world.matcher.finished(request)


def test_a_refused_handoff_falls_back_on_the_store():
    world = World(ONE)
    handoff = {"do_remote_prefill": True, "remote_host": "a", "remote_port": 1, "remote_request_id": "e"}
    request = make_request("r", list(range(34)), UNIT, handoff)
    world.store(request)
    assert world.matcher.match(request, 0) == (None, False) and not world.client.open
    world.peers.answer(world.peers.open[0], NoOffer("unknown", ""))
    assert offered(world, request) == (32, True)
    world.matcher.finished(request)
    assert not world.client.held


@pytest.mark.parametrize("load, policy", [(False, "measured"), (False, "always"), (True, "measured")])
def test_only_what_is_worth_it_is_loaded(load, policy):
    expected = 16 if load or policy == "always" else 0
    world = World(ONE, load_policy=policy)
    world.planner.load = load
    request = make_request("r", list(range(18)), UNIT)
    world.store(request)
    assert offered(world, request) == (expected, expected > 0)
    assert len(world.client.held) == (expected > 0), "what is declined is given back at once"
    world.matcher.finished(request)
    assert not world.client.held and not world.planner.open


@pytest.mark.parametrize("number", range(8))
@pytest.mark.parametrize("groups", sorted(GROUPS))
def test_lies_are_computed(groups, number):
    world = World(GROUPS[groups])
    request = make_request("r", list(range(34)), UNIT)
    assert world.matcher.match(request, 0) == (None, False)
    world.lie(world.client.open[0], SimpleNamespace(randrange=lambda n: number))
    assert world.matcher.match(request, 0) == (0, False)
    assert not world.client.held
    world.matcher.finished(request)


def test_a_store_that_never_answers_is_not_waited_for_for_ever(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(asking, "time", SimpleNamespace(monotonic=lambda: now[0]))
    world = World(ONE)
    request = make_request("r", list(range(18)), UNIT)
    assert world.matcher.match(request, 0) == (None, False)
    now[0] = world.matcher.get("r").pending.deadline + 0.5
    assert world.matcher.match(request, 0) == (None, False), "the client itself says so, a little later than now"
    now[0] += 1.0
    assert world.matcher.match(request, 0) == (0, False)
    world.store(request)
    world.answer(world.client.open[0])
    assert not world.client.held, "a lease that still comes goes back at once"


def test_an_abort_while_the_store_is_asked():
    world = World(ONE)
    request = make_request("r", list(range(18)), UNIT)
    world.store(request)
    assert world.matcher.match(request, 0) == (None, False)
    world.matcher.finished(request)
    world.answer(world.client.open[0])
    assert not world.client.held and not len(world.matcher)


@pytest.mark.parametrize("failed", [False, True])
def test_an_abort_while_it_loads(failed):
    world = World(ONE)
    request = make_request("r", list(range(18)), UNIT)
    world.store(request)
    assert offered(world, request) == (16, True)
    world.matcher.allocated(request, world.tables(0, 16), 16)
    assert world.matcher.take_aborted() == []
    world.matcher.finished(request)
    assert world.matcher.take_aborted() == ["r"] and world.matcher.take_aborted() == []
    assert world.client.held and world.planner.open, "the workers still read"
    world.matcher.loaded("r", failed)
    assert not world.client.held and not world.planner.open and not len(world.matcher)


def test_vllm_goes_on_without_our_answer_while_the_stores_is_held():
    world = World(ONE)
    request = make_request("r", list(range(33)), UNIT, params("a"))
    world.store(request, 16)
    assert world.matcher.match(request, 0) == (None, False)
    world.answer(world.client.open[0])
    assert world.matcher.match(request, 0) == (None, False)
    assert world.client.held and world.peers.open
    world.matcher.allocated(request, ([1],), 0)
    assert not world.client.held and world.peers.open[0].cancelled


@pytest.mark.parametrize("failed", [False, True])
def test_a_request_waits_for_what_another_one_loads(failed):
    world = World(ONE)
    first, second = (make_request(name, [*range(17), i], UNIT) for i, name in enumerate("ab"))
    world.store(first)
    assert offered(world, first) == (16, True)
    world.matcher.allocated(first, world.tables(0, 16), 16)
    assert world.matcher.match(second, 0) == (None, False) and not world.client.open, "it does not even ask"
    world.matcher.loaded("a", failed)
    if failed:  # then it asks for itself
        assert offered(world, second) == (16, True)
        world.matcher.allocated(second, world.tables(0, 16), 16)
        world.matcher.loaded("b", False)
    else:  # vLLM has it in its prefix cache now
        assert world.matcher.match(second, 16) == (0, False) and not world.client.open
    assert not world.client.held
    assert world.counters.take()["awaited|host"] == 1


@pytest.mark.parametrize("offered_already", [False, True])
def test_requests_that_came_together_do_not_all_load_the_same(offered_already):
    """All of them asked the store, or even had its offer, before the first one's load began."""
    world = World(ONE)
    requests = [make_request(f"r{i}", [*range(17), i], UNIT) for i in range(4)]
    world.store(requests[0])
    for request in requests:
        assert world.matcher.match(request, 0) == (None, False)
    for pending in list(world.client.open):
        world.answer(pending)
    for request in requests[: 4 if offered_already else 1]:
        assert world.matcher.match(request, 0) == (16, True)
    world.matcher.allocated(requests[0], world.tables(0, 16), 16)
    for request in requests[1:]:
        assert world.matcher.match(request, 0) == (None, False)
    world.matcher.loaded("r0", False)
    for request in requests[1:]:
        assert world.matcher.match(request, 16) == (0, False)
    assert not world.client.held
    world.balanced()


def test_a_short_prompt_does_not_wait_for_a_long_load():
    world = World(ONE)
    long, short = make_request("l", list(range(200)), UNIT), make_request("s", list(range(9)), UNIT)
    world.store(long)
    assert offered(world, long) == (200, True)
    world.matcher.allocated(long, world.tables(0, 200), 200)
    assert offered(world, short) == (8, True)


def test_nobody_waits_for_the_load_of_an_aborted_request():
    """What it loads does not enter vLLM's prefix cache."""
    world = World(ONE)
    first, second = (make_request(name, [*range(17), i], UNIT) for i, name in enumerate("ab"))
    world.store(first)
    assert offered(world, first) == (16, True)
    world.matcher.allocated(first, world.tables(0, 16), 16)
    world.matcher.finished(first)
    assert offered(world, second) == (16, True)
    world.matcher.loaded("a", False)
    world.matcher.finished(second)
    assert not world.client.held


@pytest.mark.parametrize("loaded", [False, True])
def test_a_preempted_request_asks_again(loaded):
    world = World(ONE)
    request = make_request("r", list(range(18)), UNIT)
    if loaded:
        world.store(request)
        assert offered(world, request) == (16, True)
        world.matcher.allocated(request, world.tables(0, 16), 16)
        world.matcher.loaded("r", False)
    else:
        assert offered(world, request) == (0, False)
        world.matcher.allocated(request, world.tables(0, 0), 0)
    assert loaded or world.matcher.match(request, 0) == (0, False), "once declined, it is not asked for every step"
    world.store(request)
    request.num_preemptions += 1
    assert offered(world, request) == (16, True)
    world.matcher.allocated(request, world.tables(0, 16), 16)
    world.matcher.loaded("r", False)
    assert world.matcher.finished(request).report().pulled == 16
    assert not world.client.held and not world.planner.open


def test_what_was_stored_before_a_reset_is_not_loaded_after_it():
    """The weights may have changed in place meanwhile: asked, answered or held, it is not ours any more."""
    world = World(ONE)
    requests = [make_request(f"r{i}", [i] * 18, UNIT, params("a") if i == 3 else None) for i in range(4)]
    for request in requests:
        world.store(request, 12)
    for request in requests:
        assert world.matcher.match(request, 0) == (None, False)
    first, *rest = list(world.client.open)
    for pending in rest:
        world.answer(pending)
    assert world.matcher.match(requests[2], 0) == (12, True)
    assert world.matcher.match(requests[3], 0) == (None, False) and world.matcher.get("r3").held
    before = world.tier.space(b"")
    world.tier.renew()
    assert world.tier.space(b"") != before
    world.answer(first)
    world.peers.answer(world.peers.open[0], NoOffer("nothing", ""))
    for request in requests:
        assert world.matcher.match(request, 0) == (0, False)
    assert not world.client.held
    again = make_request("r4", [0] * 18, UNIT)
    assert world.matcher.match(again, 0) == (None, False)
    assert world.client.open[0].asked.space == world.tier.space(b"")


def test_bad_blocks_are_forgotten_by_the_store():
    world = World(GROUPS["windows"])
    request = make_request("r", list(range(34)), UNIT)
    world.store(request)
    assert offered(world, request) == (32, True)
    tables = world.tables(0, 32)
    world.matcher.allocated(request, tables, 32)
    [order], _ = world.matcher.take_orders()
    bad = [(0, int(order.groups[0].slots[3])), (1, int(order.groups[1].slots[-1])), (0, 1), (5, 16)]
    world.matcher.discard("r", bad)
    told = [(verb, g, h, slot) for verb, _, g, h, slot, _ in world.client.told]
    assert told == [
        ("discard", 0, world.hash(request, 0, 3), bad[0][1]),
        ("discard", 1, world.hash(request, 1, 7), bad[1][1]),
    ]
    world.matcher.loaded("r", True)
    world.matcher.discard("r", bad)
    world.matcher.discard("nobody", bad)
    assert len(world.client.told) == 2
    assert world.matcher.match(request, 0) == (0, False), "it is computed, not loaded again"


def test_what_the_gpu_has_is_not_asked_for_but_touched():
    world = World(ONE)
    request = make_request("r", list(range(17)), UNIT)
    assert world.matcher.match(request, 16) == (0, False) and not world.client.open
    [(verb, space, chain)] = world.client.told
    assert (verb, space, len(chain)) == ("touch", world.tier.space(b""), 4 * HASH)


def test_no_request_waits_for_a_store_that_is_not_there():
    world = World(ONE)
    world.client.lose()
    request = make_request("r", list(range(17)), UNIT)
    assert world.matcher.match(request, 0) == (0, False)


def test_a_store_that_dies_with_a_lease_of_ours():
    world = World(ONE)
    request = make_request("r", list(range(18)), UNIT)
    world.store(request)
    assert offered(world, request) == (16, True)
    world.client.lose()
    world.client.connect("life 2")
    assert world.matcher.match(request, 0) == (16, True), "the workers know that the slots are another life's"
    world.matcher.allocated(request, world.tables(0, 16), 16)
    [order], _ = world.matcher.take_orders()
    assert order.instance == "life 1"
    world.matcher.loaded("r", True)
    assert not world.planner.open
