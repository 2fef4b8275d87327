"""The real RequestMatcher: sources grant, refuse, lie, answer late or never; vLLM aborts, preempts and finds no
room."""

import random
import time
from collections import OrderedDict
from types import SimpleNamespace

import pytest
from cache_groups import chunked
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from matcher_harness import FakePeers, FakePlanner, end_all
from source_fakes import load_context, make_matcher, source_of
from support import WITHOUT_SHRINKING, make_request
from vllm.v1.request import RequestStatus

from vllm_kvtier.config import KVTierConfig
from vllm_kvtier.jobs.transfer_jobs import PeerFetchJob, PullJob, remember_peer
from vllm_kvtier.scheduler.integrity.checksum_index import ChecksumIndex
from vllm_kvtier.scheduler.leases.lease_client import LeasedBlocks
from vllm_kvtier.scheduler.matching import request_matcher
from vllm_kvtier.scheduler.matching import source_selector as asking
from vllm_kvtier.scheduler.matching.request_lifecycle import RequestLifecycle, State
from vllm_kvtier.scheduler.sources import retained_blocks
from vllm_kvtier.scheduler.sources.base import LookupMiss
from vllm_kvtier.scheduler.sources.retained_blocks import PullerIndex
from vllm_kvtier.shapes.read_paths import ReadPath

HASH_BLOCK_SIZE = 4
GROUPS = {
    "full": [(HASH_BLOCK_SIZE, None)],
    "windows": [(HASH_BLOCK_SIZE, None), (HASH_BLOCK_SIZE, 6)],
    "chunks": [(HASH_BLOCK_SIZE, None), chunked(HASH_BLOCK_SIZE, 3 * HASH_BLOCK_SIZE)],
    "sizes": [(2 * HASH_BLOCK_SIZE, None), (HASH_BLOCK_SIZE, None)],
}
HANDOFF = {"do_remote_prefill": True, "remote_host": "a", "remote_port": 1, "remote_request_id": "kvtier/e"}
SOURCE = {**HANDOFF, "do_remote_prefill": False, "do_remote_decode": True}
CODES = [
    "no_matching_blocks", "unknown_export", "digest_mismatch", "checksums_not_ready", "peer_restarted",
    "namespace_mismatch", "timeout", "unreachable", "malformed",
]  # fmt: skip


class Machine(RuleBasedStateMachine):
    @initialize(groups=st.sampled_from(sorted(GROUPS)), threshold=st.sampled_from([0, 1, 5, 64]), both=st.booleans())
    def start(self, groups, threshold, both):
        RequestLifecycle.violations = 0
        self.groups = GROUPS[groups]
        self.align = max(size for size, _ in self.groups)
        self.now = time.monotonic()  # other modules make deadlines from the real clock
        self.real_time = request_matcher.time
        request_matcher.time = asking.time = SimpleNamespace(monotonic=lambda: self.now)
        self.peers = FakePeers(self.groups, lambda: self.now)
        self.config = KVTierConfig(bidirectional=both, pull_threshold=threshold)
        self.matcher = make_matcher(
            load_context(self.groups, HASH_BLOCK_SIZE, self.peers, config=self.config, checksum_index=ChecksumIndex())
        )
        self.live: dict[str, SimpleNamespace] = {}
        self.made = 0

    @rule(
        tokens=st.integers(1, 9 * HASH_BLOCK_SIZE),
        kind=st.sampled_from(["plain", "handoff", "handoff", "sources", "sources", "broken"]),
    )
    def new_request(self, tokens, kind):
        self.made += 1
        params = {
            "plain": None,
            "handoff": HANDOFF,
            "sources": {
                **SOURCE,
                "kvtier": {"sources": [{"host": "b", "port": 2}, {"host": "me", "port": 9}, {"host": "a", "port": 1}]},
            },
            "broken": {"do_remote_prefill": True, "remote_host": "²", "remote_port": "²"},
        }[kind]  # fmt: skip
        request = make_request(f"r{self.made}", list(range(tokens)), HASH_BLOCK_SIZE, params)
        self.live[request.request_id] = SimpleNamespace(request=request, status="waiting", order=None, kind=kind)

    def pick(self, data, *statuses):
        names = sorted(n for n, r in self.live.items() if r.status in statuses)
        return data.draw(st.sampled_from(names)) if names else None

    @rule(data=st.data(), local=st.integers(0, 9), room=st.sampled_from([True, True, False]), ignored=st.integers(0, 9))
    def schedule(self, data, local, room, ignored):
        """vLLM asks, may find no room, may ignore our answer (prompt log probabilities), else allocates."""
        name = self.pick(data, "waiting")
        if name is None:
            return
        r = self.live[name]
        request = r.request
        computed = min(local * self.align, (request.num_tokens - 1) // self.align * self.align)
        before = [len(p.request.block_hashes) for p in self.peers.open]
        external, asynchronous = self.matcher.match(request, computed)
        if external is None:
            assert not asynchronous
            if ignored:
                return
            external, asynchronous = 0, False
        assert isinstance(external, int) and 0 <= external <= request.num_tokens - computed
        assert asynchronous is (external > 0)
        if external:
            assert external >= max(1, self.config.pull_threshold)
            again, _ = self.matcher.match(request, computed)
            assert again == external, "asked twice in a row, it says the same"
        if not self.config.bidirectional and r.kind == "sources":
            assert before == [len(p.request.block_hashes) for p in self.peers.open], "off means off"
        if not room:
            return
        if external and ignored == 0:
            external = 0
        tables = tuple(
            [0 if g and i % 5 == 3 else 1 + i for i in range(-(-(computed + external) // size))]
            for g, (size, _) in enumerate(self.groups)
        )
        self.matcher.allocated(request, tables, external)
        request.num_computed_tokens = computed + external
        orders, introductions = self.matcher.take_jobs()
        assert [o.request_id for o in orders] == ([name] if external else [])
        if not external:
            r.status = "running"
            return
        r.status, r.order = "loading", orders[0]
        assert set(introductions) <= {orders[0].instance}
        path = self.matcher.get(name).hit.path
        assert isinstance(orders[0], PeerFetchJob if path is ReadPath.MAPPED else PullJob)
        assert getattr(orders[0], "staged", False) is (path is ReadPath.STAGED)
        for pull, (size, _), table in zip(orders[0].groups, self.groups, tables, strict=True):
            wanted = [b for b in table[computed // size :] if b]
            assert pull.local.tolist() == wanted
            assert len(pull.remote) == len(pull.keys) == len(pull.valid) == len(wanted)
            assert all(0 < v <= size for v in pull.valid)

    @precondition(lambda self: self.peers.open)
    @rule(data=st.data(), how=st.sampled_from(["grant", "grant", "refuse", "lie", "late refusal"]))
    def answer(self, data, how):
        pending = data.draw(st.sampled_from(self.peers.open))
        if how == "late refusal" and pending.outcome is None:
            pending.outcome = LookupMiss("timeout", "no answer")  # Peers' own time-out; the grant may still come
            return
        if how in ("refuse", "late refusal") or (pending.outcome and how != "grant"):
            if pending.outcome is None:
                self.peers.answer(pending, LookupMiss(data.draw(st.sampled_from(CODES)), "words"))
            return
        if how == "lie":
            outcome = self.peers.offer(
                pending,
                data.draw(st.integers(0, 60)),
                data.draw(st.none() | st.lists(st.lists(st.integers(0, 1 << 40), max_size=10), max_size=3)),
                data.draw(st.none() | st.integers(0, 50)),
            )
        else:
            limit = len(pending.request.block_hashes) * HASH_BLOCK_SIZE
            if pending.request.export:
                tokens = next((r.request.num_tokens for r in self.live.values() if self.asks(r, pending)), 40)
            else:
                tokens = data.draw(
                    st.integers(pending.request.start // self.align + 1, max(1, limit // self.align) + 1)
                )
                tokens = min(
                    tokens * self.align, max(limit // self.align * self.align, pending.request.start + HASH_BLOCK_SIZE)
                )
            outcome = self.peers.offer(pending, tokens)
        self.peers.answer(pending, outcome)

    def asks(self, r, pending):
        t = self.matcher.get(r.request.request_id)
        return t is not None and t.pending is pending

    @rule(data=st.data(), failed=st.booleans(), twice=st.booleans())
    def load_ends(self, data, failed, twice):
        name = self.pick(data, "loading", "aborted")
        if name is None:
            return
        r = self.live[name]
        self.matcher.on_load_ended(name, failed)
        if r.status == "aborted":
            del self.live[name]
            self.matcher.on_load_ended(name, failed)  # a report for what is gone does nothing
            return
        state = self.matcher.get(name)
        if failed:
            few = len(state.failed) <= request_matcher.MAX_FAILED_PEERS
            hung = request_matcher.time.monotonic() > state.allocated_at + self.matcher._config.transfer_timeout
            assert state.life.state is (State.NEW if few and not hung else State.LOCAL)
            assert not any(each.source.name == "handoff" for each in state.candidates or ()), "it is not asked again"
        else:
            assert state.life.state is State.LOADED
        r.status = "waiting" if failed else "running"
        if failed:
            r.request.num_computed_tokens = 0

    @rule(data=st.data(), aborted=st.booleans())
    def finish(self, data, aborted):
        name = self.pick(data, "waiting", "running", "loading")
        if name is None:
            return
        r = self.live[name]
        loading = r.status == "loading"
        r.request.status = RequestStatus.FINISHED_ABORTED if aborted else RequestStatus.FINISHED_STOPPED
        asking = self.matcher.get(name)
        asked = asking is not None and asking.life.state is State.LOOKUP and r.kind == "handoff"
        drops = len(self.peers.dropped)
        tracked = self.matcher.finished(r.request)
        assert tracked.report()["pulled_tokens"] >= 0
        if asked:
            assert len(self.peers.dropped) == drops + 1, "an abort releases the other side at once"
        assert self.matcher.take_aborted() == [], "a pull is one transfer: it cannot be stopped"
        if loading:
            r.status = "aborted"
            assert self.peers.held, "the source may not reuse what is still being read"
        else:
            del self.live[name]

    @rule(data=st.data())
    def preempt(self, data):
        name = self.pick(data, "running")
        if name is not None:
            self.live[name].status = "waiting"
            self.live[name].request.num_computed_tokens = 0

    @rule(seconds=st.sampled_from([0.5, 2.0, 3.5, 61.0]))
    def time_passes(self, seconds):
        self.now += seconds

    @rule()
    def puller_index(self):
        if self.live:
            request = next(iter(self.live.values())).request
            if request.block_hashes:
                source_of(self.matcher, "retained").puller_index.record(bytes(request.block_hashes[-1]), ("a", 1))

    @invariant()
    def bounds(self):
        if not hasattr(self, "live"):
            return
        assert RequestLifecycle.violations == 0
        assert set(self.matcher._tracked) <= set(self.live)
        states = {n: self.matcher.get(n).life.state for n in self.live if self.matcher.get(n)}
        holding = [n for n, s in states.items() if s in (State.HIT, State.LOADING, State.ABANDONED)]
        unseen = [
            p for n in states if (p := self.matcher.get(n).pending) and states[n] is State.LOOKUP
            and isinstance(p.answer.outcome, LeasedBlocks)
        ]  # fmt: skip
        assert len(self.peers.held) == len(holding) + len(unseen), (states, self.peers.held)

    def teardown(self):
        if not hasattr(self, "live"):
            return
        try:
            end_all(self.matcher, self.live, self.peers)
            assert not self.peers.held and not len(self.matcher)
            assert RequestLifecycle.violations == 0
        finally:
            request_matcher.time = asking.time = self.real_time


Machine.TestCase.settings = settings(settings.default, stateful_step_count=40, max_examples=60)
TestMachine = Machine.TestCase


class Draws:
    """Stands for hypothesis' ``data`` where a seed decides."""

    def __init__(self, rng):
        self.rng = rng

    def draw(self, strategy):
        return strategy(self.rng) if callable(strategy) else self.rng.choice(strategy)


class _Seeded:
    """The strategies that the machine draws from, as functions of a random generator."""

    @staticmethod
    def sampled_from(values):
        return list(values)

    @staticmethod
    def integers(low, high):
        return lambda rng: rng.randint(low, max(low, high))

    @staticmethod
    def none():
        return _Or(lambda rng: None)

    @staticmethod
    def lists(element, max_size):
        return _Or(lambda rng: [element(rng) for _ in range(rng.randint(0, max_size))])


class _Or:
    def __init__(self, function):
        self.function = function

    def __call__(self, rng):
        return self.function(rng)

    def __or__(self, other):
        return _Or(lambda rng: rng.choice([self, other])(rng))


@pytest.mark.parametrize("groups", sorted(GROUPS))
@given(seed=st.integers(0, 1 << 32))
@settings(max_examples=60, phases=WITHOUT_SHRINKING)
def test_request_matcher_random_operations_keep_invariants(groups, seed):
    """The machine's own rules in long walks; hypothesis alone seldom gets to the end of a pull."""
    rng = random.Random(seed)
    data, m = Draws(rng), Machine()
    real = globals()["st"]
    globals()["st"] = _Seeded
    try:
        m.start(groups=groups, threshold=rng.choice([0, 1, 5, 5]), both=rng.random() < 0.7)
        kinds = ["plain", "handoff", "handoff", "sources", "sources", "broken"]
        events = {
            lambda: m.new_request(tokens=rng.randint(1, 9 * HASH_BLOCK_SIZE), kind=rng.choice(kinds)): 4,
            lambda: m.schedule(
                data=data, local=rng.choice([0, 0, 0, 1, 3]), room=rng.random() < 0.7, ignored=rng.randint(0, 9)
            ): 8,
            lambda: m.peers.open and m.answer(
                data=data, how=rng.choice(["grant", "grant", "grant", "refuse", "lie", "late refusal"])
            ): 6,
            lambda: m.load_ends(data=data, failed=rng.random() < 0.3, twice=True): 3,
            lambda: m.finish(data=data, aborted=rng.random() < 0.5): 3,
            lambda: m.preempt(data=data): 1,
            lambda: m.time_passes(seconds=rng.choice([0.1, 0.1, 2.0, 3.5, 61.0])): 0.5,
            m.puller_index: 0.5,
        }  # fmt: skip
        for _ in range(150):
            rng.choices(list(events), list(events.values()))[0]()
            m.bounds()
    finally:
        globals()["st"] = real
        m.teardown()


# -- single cases ----------------------------------------------------------------------------------------------------


def matcher(groups=((HASH_BLOCK_SIZE, None),), info=(), **options):
    peers = FakePeers(list(groups), time.monotonic)
    config = KVTierConfig(**{"bidirectional": True, "pull_threshold": 4, **options})
    return make_matcher(load_context(groups, HASH_BLOCK_SIZE, peers, config=config, info=info)), peers




@pytest.fixture(autouse=True)
def no_violations():
    RequestLifecycle.violations = 0
    yield
    assert RequestLifecycle.violations == 0


def test_matcher_handoff_is_looked_up_loaded_and_released():
    made, peers = matcher()
    request = make_request("r", list(range(18)), HASH_BLOCK_SIZE, HANDOFF)
    made._planner = FakePlanner()
    made.prefetch_lookup(request)
    assert made.match(request, 0) == (None, False)
    assert not made._planner.waiting, "the other engine computes it: other requests need not load because of it"
    [pending] = peers.open
    assert pending.request.export == "e" and len(pending.request.digest) == 16
    peers.answer(pending, peers.offer(pending, 18))
    assert made.match(request, 0) == (18, True)
    made.allocated(request, ([11, 12, 13, 14, 15],), 18)
    [order], introduced = made.take_jobs()
    assert order.groups[0].local.tolist() == [11, 12, 13, 14, 15] and order.groups[0].valid.tolist() == [4, 4, 4, 4, 2]
    assert list(introduced) == [order.instance] and made.take_jobs() == ([], {})
    assert len(set(order.groups[0].keys.tolist())) == 5
    made.on_load_ended("r", False)
    assert not peers.held and made.match(request, 0) == (0, False)


@pytest.mark.parametrize("how", ["loaded", "loaded, but for the last block", "failed", "aborted"])
def test_matcher_samples_of_one_handoff_load_it_once(how):
    """vLLM makes a request for each of ``n`` samples, with the same params. All are answered before one has blocks."""
    made, peers = matcher()
    samples = [make_request(f"r{i}", list(range(34)), HASH_BLOCK_SIZE, HANDOFF) for i in range(4)]
    for request in samples:
        assert made.match(request, 0) == (None, False)
    for pending in list(peers.open):
        peers.answer(pending, peers.offer(pending, 34))

    def match_all(computed):
        """Who loads, if vLLM has blocks for all of them."""
        answers = {}
        for request in samples:
            state = made.get(request.request_id)
            if state is not None and state.life.state in (State.LOOKUP, State.HIT):
                answers[request.request_id], asynchronous = made.match(request, computed)
                if asynchronous:
                    made.allocated(request, (list(range(1, 10)),), answers[request.request_id])
        return answers

    assert match_all(0) == {"r0": 34, "r1": None, "r2": None, "r3": None}
    assert match_all(0) == {"r1": None, "r2": None, "r3": None} and len(peers.held) == 4
    if how == "aborted":
        samples[0].status = RequestStatus.FINISHED_ABORTED
        made.finished(samples[0])
        assert match_all(0) == {"r1": 34, "r2": None, "r3": None}
    made.on_load_ended("r0", how == "failed")
    if how == "failed":
        assert match_all(0) == {"r1": 34, "r2": None, "r3": None}
    if how in ("failed", "aborted"):
        made.on_load_ended("r1", False)
    if how == "loaded, but for the last block":
        assert match_all(28) == {"r1": 6, "r2": 6, "r3": 6}, "one after the other would be slower"
        for request in samples[1:]:
            made.on_load_ended(request.request_id, False)
    else:
        assert set(match_all(32).values()) == {0}, "vLLM has all but two tokens"
    assert not peers.held


def test_matcher_samples_load_side_by_side_without_a_prefix_cache():
    """vLLM would have nothing of the first one's load for the others."""
    made, peers = matcher(info={"prefix_caching": False})
    samples = [make_request(f"r{i}", list(range(34)), HASH_BLOCK_SIZE, HANDOFF) for i in range(2)]
    for request in samples:
        assert made.match(request, 0) == (None, False)
    for pending in list(peers.open):
        peers.answer(pending, peers.offer(pending, 34))
    for request in samples:
        assert made.match(request, 0) == (34, True)
        made.allocated(request, (list(range(1, 10)),), 34)


@pytest.mark.parametrize("before", [16, 12])
def test_matcher_handoff_is_kept_when_vllm_evicts_what_was_there(before):
    """The request waits for free blocks, or still for the answer; what vLLM has of its prompt becomes less."""
    made, peers = matcher(bidirectional=False)
    request = make_request("r", list(range(40)), HASH_BLOCK_SIZE, HANDOFF)
    assert made.match(request, 16) == (None, False)
    [pending] = peers.open
    peers.answer(pending, peers.offer(pending, 40))
    assert made.match(request, before) == (40 - before, True)
    assert made.match(request, 12) == (28, True)
    made.allocated(request, (list(range(21, 31)),), 28)
    [order], _ = made.take_jobs()
    assert order.groups[0].local.tolist() == [24, 25, 26, 27, 28, 29, 30], "what vLLM has is not read"
    assert order.groups[0].remote.tolist() == [4, 5, 6, 7, 8, 9, 10]
    made.on_load_ended("r", False)
    assert not peers.held and not peers.dropped and not peers.open


@pytest.mark.parametrize("answered", [False, True])
def test_matcher_asks_retained_blocks_again_once_from_where_vllm_begins(answered):
    made, peers = matcher()
    request = make_request("r", list(range(40)), HASH_BLOCK_SIZE, SOURCE)
    assert made.match(request, 16) == (None, False)
    if answered:
        peers.answer(peers.open[0], peers.offer(peers.open[0], 40))
        assert made.match(request, 16) == (24, True) and len(peers.held) == 1
    assert made.match(request, 8) == (None, False)
    *late, pending = peers.open
    assert [each.cancelled for each in late] == [True] * (not answered) and not peers.held
    assert pending.request.start == 8 and pending.address == ("a", 1)
    for each in late:
        peers.answer(each, peers.offer(each, 40))
    peers.answer(pending, peers.offer(pending, 40))
    assert made.match(request, 8) == (32, True)
    assert made.match(request, 4) == (0, False) and not peers.open and not peers.held


def test_matcher_requests_of_one_prefix_wait_for_one_hung_load_in_all(monkeypatch):
    """Their peer leases its blocks, and no read of them ends. Each request that gave up waiting was waited for by the
    next ones: the last one waited ``transfer_timeout`` times the number of requests."""
    now = [time.monotonic()]
    for module in (request_matcher, asking):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    peers, groups = FakePeers([(HASH_BLOCK_SIZE, None)], lambda: now[0]), [(HASH_BLOCK_SIZE, None)]
    config = KVTierConfig(bidirectional=True, pull_threshold=4)
    made = make_matcher(load_context(groups, HASH_BLOCK_SIZE, peers, config=config))
    requests = [make_request(f"r{i}", [*range(40), i], HASH_BLOCK_SIZE, SOURCE) for i in range(4)]

    def load(request):
        assert made.match(request, 0) == (None, False) and len(peers.open) == 1, "it waits for another request"
        peers.answer(peers.open[0], peers.offer(peers.open[0], 40))
        assert made.match(request, 0) == (40, True)
        made.allocated(request, (list(range(1, 11)),), 40)

    load(requests[0])
    now[0] += 1.0
    for request in requests[1:]:
        assert made.match(request, 0) == (None, False) and not peers.open
    now[0] += config.transfer_timeout
    made.on_load_ended("r0", True)
    for request in requests[1:]:
        load(request)


@pytest.mark.parametrize("window", [None, 8])
def test_matcher_waits_for_part_of_a_load_only_without_windows(window):
    """vLLM finds windows at the load's end alone: requests that shared half of their prompts loaded one by one."""
    groups = [(HASH_BLOCK_SIZE, None), (HASH_BLOCK_SIZE, window)]
    peers = FakePeers(groups, time.monotonic)
    config = KVTierConfig(bidirectional=True, pull_threshold=4)
    made = make_matcher(load_context(groups, HASH_BLOCK_SIZE, peers, config=config))
    first, half, same = (
        make_request(name, [*range(24), *end], HASH_BLOCK_SIZE, SOURCE)
        for name, end in (("first", range(16)), ("half", range(16, 32)), ("same", range(18)))
    )
    made.match(first, 0)
    peers.answer(peers.open[0], peers.offer(peers.open[0], 40))
    tokens, _ = made.match(first, 0)
    made.allocated(first, (list(range(1, 11)), list(range(11, 21))), tokens)
    assert made.match(same, 0) == (None, False) and not peers.open, "it waits"
    assert made.match(half, 0) == (None, False) and bool(peers.open) is (window is not None)


def test_matcher_queries_next_source_after_refusal():
    made, peers = matcher()
    params = {"do_remote_decode": True, "kvtier": {"sources": [{"host": h, "port": 1} for h in "abc"]}}
    request = make_request("r", list(range(40)), HASH_BLOCK_SIZE, params)
    for host in "abc":
        assert made.match(request, 0) == (None, False)
        [pending] = peers.open
        assert pending.address == (host, 1) and len(pending.request.block_hashes) == 10
        peers.answer(pending, LookupMiss("no_matching_blocks", ""))
    assert made.match(request, 0) == (0, False) and not peers.open


@pytest.mark.parametrize("tokens, computed", [(3, 0), (40, 36)])
def test_matcher_hit_not_worth_loading_is_released_at_once(tokens, computed):
    made, peers = matcher(pull_threshold=16)
    assert made.match(make_request("r", list(range(tokens)), HASH_BLOCK_SIZE, HANDOFF), computed) == (0, False)
    assert peers.dropped == [(("a", 1), "e")] and not peers.open


def test_matcher_abort_before_lookup_releases_export():
    made, peers = matcher()
    made.finished(make_request("r", list(range(40)), HASH_BLOCK_SIZE, HANDOFF))
    assert peers.dropped == [(("a", 1), "e")] and not len(made)


def test_matcher_request_scheduled_before_answer_cancels_lookup():
    """``skip_reading_prefix_cache``: the lease that arrives later must not be held while the request decodes."""
    made, peers = matcher()
    request = make_request("r", list(range(40)), HASH_BLOCK_SIZE, HANDOFF)
    assert made.match(request, 0) == (None, False)
    made.allocated(request, ([1],), 0)
    [pending] = peers.open
    assert pending.cancelled
    peers.answer(pending, peers.offer(pending, 40))
    assert not peers.held and made.match(request, 0) == (0, False)


@pytest.mark.parametrize("seed", range(3))
def test_matcher_names_engines_that_workers_have_forgotten_again(seed, monkeypatch):
    """Of engines that are restarted again and again, neither side remembers more than so many."""
    monkeypatch.setattr("vllm_kvtier.jobs.transfer_jobs.MAX_PEERS_REMEMBERED", 8)
    monkeypatch.setattr("vllm_kvtier.scheduler.matching.request_matcher.MAX_PEERS_REMEMBERED", 8)
    rng, (made, peers), known, named = random.Random(seed), matcher(), OrderedDict(), 0
    for i in range(200):
        request = make_request(f"r{i}", [i * 10 + j for j in range(40)], HASH_BLOCK_SIZE, HANDOFF)
        made.match(request, 0)
        peers.introduced = [f"p/{rng.randint(i // 20, i // 20 + 5)}"] * 2
        peers.answer(peers.open[0], peers.offer(peers.open[0], 40))
        made.match(request, 0)
        made.allocated(request, (list(range(1, 11)),), 40)
        [job], new = made.take_jobs()
        for instance, ranks in new.items():
            remember_peer(known, instance, ranks)
        assert job.instance in known and len(known) <= 8 and len(made._known_peers) <= 8
        named += len(new)
        made.on_load_ended(request.request_id, False)
        made.finished(request)
    assert named < 60


@given(st.data())
def test_matcher_hits_of_any_shape_never_raise(data):
    """An exception here would end the engine."""
    groups = GROUPS[data.draw(st.sampled_from(sorted(GROUPS)))]
    made, peers = matcher(groups)
    params = data.draw(
        st.sampled_from([HANDOFF, SOURCE])
    )
    request = make_request("r", list(range(data.draw(st.integers(8, 40)))), HASH_BLOCK_SIZE, params)
    if made.match(request, 0)[0] is None:
        [pending] = peers.open
        numbers = st.integers(0, 44) | st.integers(0, 1 << 40)
        blocks = data.draw(st.none() | st.lists(st.lists(numbers, max_size=12), max_size=3))
        tokens, start = data.draw(st.integers(0, 60)), data.draw(st.integers(0, 44))
        peers.answer(pending, peers.offer(pending, tokens, blocks, start))
        got, _ = made.match(request, 0)
        if got:
            tables = tuple(list(range(1, 1 + -(-got // size))) for size, _ in groups)
            made.allocated(request, tables, got)
            made.take_jobs()
            made.on_load_ended("r", True)
    made.finished(request)
    assert not peers.held and not len(made)


def test_puller_index_is_bounded_and_expires(monkeypatch):
    monkeypatch.setattr(retained_blocks, "MAX_PULLERS", 10)
    now = [0.0]
    monkeypatch.setattr(retained_blocks, "time", SimpleNamespace(monotonic=lambda: now[0]))
    where = PullerIndex(seconds=5.0)
    for i in range(100):
        where.record(bytes([i]) * 8, ("h", i + 1))
    assert len(where._at) == 10
    block_hashes = [bytes([i]) * 8 for i in range(90, 100)]
    assert (
        where.find(block_hashes) == ("h", 100)
        and where.find(block_hashes[:3]) == ("h", 93)
        and where.find([b"?" * 8]) is None
    )
    now[0] = 6.0
    assert where.find(block_hashes) is None
    random.seed(0)
