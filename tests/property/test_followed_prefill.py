"""Loads that follow a prefill, against a plain model: two ranks, any order of grants, reads, failures, aborts and ends.

The prefill engine is a list of block ids that grows, the ranks are job tables and a dict of what each block holds. A
load must end once, on all ranks, when nothing writes its blocks any more. What it does not report as bad must be the
right blocks of the prefill engine, each of them read once.
"""

import copy
import random
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
from cache_groups import cache_groups
from hypothesis import given, settings
from hypothesis import strategies as st
from source_fakes import load_context, load_results
from support import WITHOUT_SHRINKING, make_request
from vllm.v1.request import RequestStatus

from vllm_kvtier.config import KVTierConfig
from vllm_kvtier.jobs.results import PullResult, failed_result
from vllm_kvtier.jobs.transfer_jobs import PullJob, StepWork
from vllm_kvtier.scheduler.leases.lease_client import FollowedLease, LeasedBlocks
from vllm_kvtier.scheduler.matching.request_lifecycle import RequestLifecycle, State
from vllm_kvtier.scheduler.matching.request_matcher import RequestMatcher
from vllm_kvtier.scheduler.sources.base import LookupMiss
from vllm_kvtier.scheduler.sources.followed_prefill import FREE_BLOCK_SHARE, FollowedPrefillSource
from vllm_kvtier.wire import messages as m
from vllm_kvtier.worker.job_table import JobTable

HASH_BLOCK_SIZE = 4
RANKS = 2
BLOCKS = 400
SHARE = 0.25
SMALL, LARGE = (HASH_BLOCK_SIZE, None), (2 * HASH_BLOCK_SIZE, None)
GROUPS = [[SMALL], [LARGE], [SMALL, LARGE]]


class Client:
    """The lease client. ``held``: leases that the prefill engines would count."""

    def __init__(self):
        self.followed: list[FollowedLease] = []
        self.held: set[int] = set()
        self.stopped: list[FollowedLease] = []
        self.consumed: set[int] = set()
        self.dropped: list[str] = []

    def follow(self, address, max_wait, notify, rehash, **fields):
        request = m.LeaseRequest(lookup_id=len(self.followed) + 1, instance="", follow=True, **fields)
        pending = FollowedLease(address, request, 1e18, max_wait=max_wait, notify=notify)
        self.followed.append(pending)
        return pending

    def stop_following(self, pending, done):
        pending.cancelled = True
        self.stopped.append(pending)
        for leased in pending.grants:
            if leased.final and done and leased.lease in self.held:
                self.consumed.add(leased.lease)
            self.held.discard(leased.lease)

    def release(self, leased, done):
        assert not done
        self.held.discard(leased.lease)

    def release_export(self, address, export):
        self.dropped.append(export)

    def readable(self, instance):
        pass


@dataclass
class Prefill:
    """One request at both engines. ``computed``: by the prefill engine; ``ids``: its blocks, by group."""

    request: object
    ids: list[list[int]]
    computed: int = 0
    over: bool = False  # it ended without an export
    state: str = "waiting"  # at the decode engine: waiting, loading, done, local
    local: int = 0
    tables: list[list[int]] = field(default_factory=list)
    reads: list[int] = field(default_factory=list)  # our blocks that rank 0 began to read
    ranks: list[bool] = field(default_factory=lambda: [False] * RANKS)  # which reported the end of the load
    bad: set[int] = field(default_factory=set)


class World:
    def __init__(self, groups, seed):
        RequestLifecycle.violations = 0
        self.rng, self.groups = random.Random(seed), cache_groups(groups)
        self.client, self.free = Client(), BLOCKS
        pool = SimpleNamespace(free_count=lambda: self.free, num_blocks=BLOCKS)
        config = KVTierConfig(pull_threshold=1, follow_share=SHARE)
        load = load_context(
            groups, HASH_BLOCK_SIZE, self.client, config=config, pool=pool, info={"world_size": RANKS},
        )  # fmt: skip
        self.load = load
        self.source = FollowedPrefillSource(load)
        self.matcher = RequestMatcher(load, [self.source])
        self.results = load_results(load, self.matcher)
        self.tables = [JobTable() for _ in range(RANKS)]
        self.running: list[tuple[int, PullJob]] = []  # (rank, job)
        self.content = [{} for _ in range(RANKS)]  # rank -> our block -> (group, remote block, key)
        self.prefills: dict[str, Prefill] = {}
        self.block, self.lease, self.made, self.early, self.ended, self.evicted = 0, 0, 0, 0, 0, 0

    def blocks(self, count):
        self.block += count
        return list(range(self.block - count + 1, self.block + 1))

    # -- the prefill engine -------------------------------------------------------------------------------------------

    def new_request(self):
        self.made += 1
        name = f"r{self.made}"
        length = self.rng.randint(1, 60)
        own = {"export": f"export-{name}", "follow": True}
        params = {"do_remote_prefill": True, "remote_host": "p", "remote_port": 1, "kvtier": own}
        request = make_request(name, [self.rng.randrange(9) for _ in range(length)], HASH_BLOCK_SIZE, params)
        self.prefills[name] = Prefill(request, [self.blocks(-(-length // size)) for size, _ in self.groups])
        if self.rng.random() < 0.5:
            self.prefills[name].local = self.aligned(self.rng.randrange(length))

    def aligned(self, tokens):
        align = max(size for size, _ in self.groups)
        return tokens // align * align

    def followed(self, p):
        name = f"export-{p.request.request_id}"
        return next((f for f in reversed(self.client.followed) if f.request.export == name), None)

    def is_followed(self, p):
        follow = self.followed(p)
        return follow is not None and not (follow.complete or follow.ended or follow.cancelled)

    def pick(self):
        going = [p for p in self.prefills.values() if self.is_followed(p)]
        return self.rng.choice(going) if going else None

    def prefill_step(self):
        p = self.pick()
        if p is None:
            return
        follow, length = self.followed(p), p.request.num_tokens
        if p.over:  # it ended before it was asked for again
            self.end_with(p, "unknown_export")
            return
        p.computed = min(length, p.computed + self.rng.choice((4, 8, 16, 32)))
        granted = max(follow.request.start, *(leased.tokens for leased in follow.grants), 0)
        final = p.computed == length
        start, end = (follow.request.start, length) if final else (granted, self.aligned(p.computed))
        if start >= end:
            if final:
                self.end_with(p, "no_matching_blocks")
            return
        self.lease += 1
        rows = [
            ids[start // size : -(-end // size)] for ids, (size, _) in zip(p.ids, self.groups, strict=True)
        ]
        self.client.held.add(self.lease)
        leased = LeasedBlocks(("p", 1), "p/1", self.lease, start, end, rows, ["rank"], final=final)
        follow.grants.append(leased)
        follow.outcome = follow.outcome or leased
        follow.notify()

    def evict(self):
        """vLLM needs blocks of a prompt that waits."""
        waiting = [p for p in self.prefills.values() if p.state == "waiting" and p.local]
        if waiting:
            p = self.rng.choice(waiting)
            p.local, self.evicted = self.aligned(self.rng.randrange(p.local)), self.evicted + 1

    def prefill_ends(self):
        p = self.pick()
        if p is not None:
            p.over = True
            self.end_with(p, self.rng.choice(("unreachable", "unknown_export", "timeout")))

    def end_with(self, p, code):
        follow = self.followed(p)
        if not follow.cancelled:
            follow.ended = LookupMiss(code, code)
            follow.outcome = follow.outcome or follow.ended
            follow.notify()

    # -- vLLM ---------------------------------------------------------------------------------------------------------

    def schedule(self):
        for p in self.prefills.values():
            if p.state != "waiting":
                continue
            tokens, asynchronous = self.matcher.match(p.request, p.local)
            if tokens is None:
                continue
            needed = sum(-(-p.request.num_tokens // size) for size, _ in self.groups)
            if tokens and needed > self.free:
                continue
            p.tables = [self.blocks(-(-p.request.num_tokens // size)) for size, _ in self.groups]
            self.matcher.allocated(p.request, tuple(p.tables), tokens)
            p.state = "loading" if tokens else "local"
            if tokens:
                assert asynchronous and tokens == p.request.num_tokens - p.local
                self.free -= needed
                if not self.followed(p).complete:
                    self.early += 1
        following = [f for f in self.source._following.values() if not f.closed]
        assert len(following) < 2 or sum(f.num_blocks for f in following) <= SHARE * BLOCKS
        assert not following or self.free >= FREE_BLOCK_SHARE * BLOCKS - max(f.num_blocks for f in following)

    def step(self):
        self.schedule()
        self.matcher.collect_jobs()
        jobs, _ = self.matcher.take_jobs()
        for rank, table in enumerate(self.tables):
            work = StepWork(1)
            for job in jobs:
                getattr(work, job.step_list).append(copy.copy(job))
            table.submit(work)
            table.fail(work.failed)
            self.running += [(rank, job) for job in work.pulls]
            if not rank:
                for job in work.pulls:
                    p = self.prefills.get(job.request_id)
                    if p is not None:
                        p.reads += job.block_list

    def read(self):
        """A rank's read ends: right, or with some wrong blocks, or not at all."""
        if not self.running:
            return
        rank, job = self.running.pop(self.rng.randrange(len(self.running)))
        how = self.rng.random()
        if how < 0.05:
            self.tables[rank].finish(failed_result(job, "no read"))
            return
        bad = set(self.rng.sample(job.block_list, 1)) if how < 0.1 else set()
        for g in job.groups:
            for ours, theirs, key in zip(g.local.tolist(), g.remote.tolist(), g.keys.tolist(), strict=True):
                self.content[rank][ours] = None if ours in bad else (g.group, theirs, key)
        self.tables[rank].finish(PullResult(job.request_id, bad, bool(bad), "", 1, 0.1))

    def collect(self):
        results, finished = [], set()
        for rank, table in enumerate(self.tables):
            out = table.results()
            results += out.results
            for name in out.finished:
                p = self.prefills[name]
                assert not p.ranks[rank], "it ended twice"
                assert not any(r == rank and job.request_id == name for r, job in self.running), "it is still written"
                p.ranks[rank] = True
                if all(p.ranks):
                    finished.add(name)
            for name in out.failed:
                assert name in out.finished
            for p in self.prefills.values():
                p.bad |= out.bad_blocks & {block for ids in p.tables for block in ids}
        self.results.arrived(results, finished)
        for name in finished:
            self.check(self.prefills[name])

    def check(self, p):
        self.ended += 1
        aborted, p.state = p.state == "aborted", "done"
        assert len(set(p.reads)) == len(p.reads), "a block was read twice"
        self.free += sum(-(-p.request.num_tokens // size) for size, _ in self.groups)
        if aborted:
            return
        t = self.matcher.get(p.request.request_id)
        assert t.life.state is (State.NEW if p.bad else State.LOADED)
        keys = self.load.engine.identity.content_keys()
        for g, (size, _) in enumerate(self.groups):
            for position in range(p.local // size, len(p.tables[g])):
                ours = p.tables[g][position]
                if ours in p.bad:
                    continue
                end = (position + 1) * size
                if end <= p.request.num_tokens:
                    key = keys.key(bytes(p.request.block_hashes[end // HASH_BLOCK_SIZE - 1]), g, b"")
                for content in self.content:
                    group, theirs, got = content[ours]
                    assert (group, theirs) == (g, p.ids[g][position])
                    assert end > p.request.num_tokens or got == key

    def pause(self):
        self.matcher.end_waiting_loads()

    def abort(self):
        going = [p for p in self.prefills.values() if p.state in ("waiting", "loading")]
        if going:
            p = self.rng.choice(going)
            p.request.status = RequestStatus.FINISHED_ABORTED
            self.matcher.finished(p.request)
            p.state = "aborted" if p.state == "loading" else "done"

    def run(self, events, weights, count):
        for _ in range(count):
            self.rng.choices(events, weights)[0]()
        for _ in range(60):
            for p in self.prefills.values():
                if self.is_followed(p):
                    p.over = True
                    self.end_with(p, "unreachable")
            self.step()
            while self.running:
                self.read()
            self.collect()

    def is_clean(self):
        states = {name: p.state for name, p in self.prefills.items() if p.state not in ("done", "local")}
        assert not states, "a load hangs"
        for p in self.prefills.values():
            p.request.status = RequestStatus.FINISHED_STOPPED
            self.matcher.finished(p.request)
        assert not len(self.matcher) and not self.source._following and not self.client.held
        assert not any(table.outstanding or table._parts for table in self.tables)
        assert self.free == BLOCKS and RequestLifecycle.violations == 0


@pytest.mark.parametrize("groups", GROUPS, ids=["full", "large blocks", "two sizes"])
@given(seed=st.integers(0, 1 << 32))
@settings(max_examples=30, phases=WITHOUT_SHRINKING)
def test_loads_that_follow_prefills_end_right(groups, seed):
    world = World(groups, seed)
    events = [world.new_request, world.prefill_step, world.step, world.read, world.collect, world.abort]
    events += [world.prefill_ends, world.evict, world.pause]
    world.run(events, [3, 8, 8, 8, 6, 0.4, 0.6, 1, 0.3], 200)
    world.is_clean()


def test_checksums_of_stretches_are_entered_before_the_load_ends(monkeypatch):
    """Its request waits at that end."""
    world, p = _matched()
    world.step()
    marked = []
    monkeypatch.setattr(world.load.checksum_index, "mark", lambda entry: marked.append(entry.block))
    while p.state == "loading":
        before = len(marked)
        world.prefill_step()
        world.step()
        while world.running:
            world.read()
            assert not p.bad
        world.collect()
        whole = [block for block in p.reads if block != p.tables[0][-1]]
        assert marked == whole
    assert before > 0 and len(marked) == p.request.num_tokens // HASH_BLOCK_SIZE
    world.is_clean()


def test_load_that_cannot_be_closed_is_closed_by_a_later_step(monkeypatch):
    """Its next job raises, and so does the job that reports what is missing."""
    world = World(GROUPS[0], 0)
    while not world.source._following:
        world.new_request()
        for _ in range(4):
            world.prefill_step()
            world.step()
    with monkeypatch.context() as patched:
        patched.setattr(world.source, "_next_job", lambda f: 1 / 0)
        patched.setattr("vllm_kvtier.scheduler.sources.job_builder.failed_job", lambda *_: 1 / 0)
        world.source.grown.append(next(iter(world.source._following)))
        with pytest.raises(ZeroDivisionError):
            world.matcher.collect_jobs()
    world.run([world.step], [1], 1)
    world.is_clean()


def test_machine_above_reads_while_prefills_go_on():
    early = ended = 0
    for seed in range(6):
        world = World(GROUPS[0], seed)
        world.run([world.new_request, world.prefill_step, world.step, world.read, world.collect], [2, 8, 8, 8, 6], 200)
        world.is_clean()
        early, ended = early + world.early, ended + world.ended
    assert early > ended / 3 > 10


def _matched(tokens=40):
    """A world with one request that holds a hit on a prefill's first stretch; vLLM had no room for it yet."""
    world = World(GROUPS[0], 0)
    while not world.prefills or next(iter(world.prefills.values())).request.num_tokens < tokens:
        world = World(GROUPS[0], world.rng.randrange(1 << 30))
        world.new_request()
    (p,) = world.prefills.values()
    assert world.matcher.match(p.request, 0) == (None, False)
    while not world.followed(p).grants:
        world.prefill_step()
    assert not p.over and world.matcher.match(p.request, 0) == (p.request.num_tokens, True)
    return world, p


@pytest.mark.parametrize("has_own", [True, False])
def test_request_does_not_wait_for_prefill_of_another(has_own):
    """That may last, or hang; the two share half of it. A request with a hand-off of its own asks for that, and another
    is computed."""
    world, shared = World([(HASH_BLOCK_SIZE, None)], 1), list(range(32))

    def add(name: str, tokens: list[int], params: dict | None) -> Prefill:
        request = make_request(name, tokens, HASH_BLOCK_SIZE, params)
        world.prefills[name] = Prefill(request, [world.blocks(-(-len(tokens) // HASH_BLOCK_SIZE))])
        return world.prefills[name]

    def handed_off(name: str) -> dict:
        own = {"export": f"export-{name}", "follow": True}
        return {"do_remote_prefill": True, "remote_host": name, "remote_port": 1, "kvtier": own}

    add("a", shared + [7] * 24, handed_off("a"))
    world.step()
    world.prefill_step()
    world.step()
    second = add("b", shared + [5] * 4, handed_off("b") if has_own else None)
    world.step()
    assert world.matcher.get("a").life.state is State.LOADING
    assert (world.followed(second) is not None, second.state) == (has_own, "waiting" if has_own else "local")


@pytest.mark.parametrize("export", [False, True])
def test_paused_engine_ends_load_when_its_read_ends(export):
    """The prefill engine may be paused too, and answers heartbeats. ``export``: it came during the read."""
    world, p = _matched()
    world.rng.random = lambda: 1.0  # no read fails
    world.step()
    reading = {block for _, job in world.running for block in job.block_list}
    assert reading
    world.pause()
    if export:
        while not world.followed(p).complete:
            world.prefill_step()
    else:
        world.prefill_step()  # granted, and not read any more
    for _ in range(3):
        world.step()
        while world.running:
            world.read()
        world.collect()
    assert p.state == "done" and world.ended == 1
    rest = {block for block in p.tables[0] if block not in reading}
    assert p.bad == (set() if export else rest)
    assert not world.client.held and world.client.dropped == ([] if export else ["export-" + p.request.request_id])
    world.is_clean()


@pytest.mark.parametrize("granted", [False, True])
def test_followed_prefill_is_kept_when_vllm_evicts_what_was_there(granted):
    world = World(GROUPS[0], 0)
    name = {"export": "export-r", "follow": True}
    params = {"do_remote_prefill": True, "remote_host": "p", "remote_port": 1, "kvtier": name}
    p = Prefill(make_request("r", list(range(40)), HASH_BLOCK_SIZE, params), [world.blocks(10)], computed=20, local=16)
    world.prefills["r"] = p
    world.step()
    [first] = world.client.followed
    assert first.request.start == 16
    if granted:
        world.prefill_step()
        assert world.matcher.match(p.request, 16) == (24, True) and first.grants
    p.local = 12
    world.schedule()
    assert first.cancelled and not world.client.held and not world.client.dropped and p.state == "waiting"
    [_, again] = world.client.followed
    assert (again.request.start, again.request.export) == (0, "export-r")
    p.local = 8
    while not p.ranks[0]:
        world.prefill_step()
        world.step()
        world.read()
        world.collect()
    assert not p.bad and set(p.reads) == set(p.tables[0][2:]), "what vLLM has is not read"
    world.run([lambda: None], [1], 1)
    world.is_clean()


def _malformed(world, p):
    follow = world.followed(p)
    follow.grants.append(LeasedBlocks(("p", 1), "p/1", 99, 3, 5, [[0]], ["rank"], final=False))
    follow.notify()


def _shorter(world, p):
    """The export, with fewer tokens than the prompt has."""
    follow = world.followed(p)
    follow.grants.append(LeasedBlocks(("p", 1), "p/1", 99, 0, 29, [list(range(1, 9))], ["rank"]))
    follow.notify()


@pytest.mark.parametrize("end", [lambda world, p: world.end_with(p, "unreachable"), _malformed, _shorter])
def test_followed_prefill_lost_before_allocation_fails_the_load(end):
    """An error in our code would count, and switch the connector off after a few."""
    world, p = _matched()
    end(world, p)
    p.over = True
    world.run([lambda: None], [1], 1)
    assert p.state == "done" and p.bad == set(p.tables[0]) and not p.reads
    world.is_clean()


@pytest.mark.parametrize("final", [False, True])
def test_grant_with_a_gap_before_it_is_malformed(final):
    """Any process may send it: an error in our code would count."""
    world = World(GROUPS[0], 0)
    own = {"export": "export-r", "follow": True}
    params = {"do_remote_prefill": True, "remote_host": "p", "remote_port": 1, "kvtier": own}
    request = make_request("r", list(range(40)), HASH_BLOCK_SIZE, params)
    assert world.matcher.match(request, 0) == (None, False)
    follow = world.client.followed[0]
    follow.outcome = LeasedBlocks(("p", 1), "p/1", 1, 8, 40, [list(range(1, 9))], ["rank"], final=final)
    follow.grants.append(follow.outcome)
    assert world.matcher.match(request, 0) == (0, False) and follow in world.client.stopped
