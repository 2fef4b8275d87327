"""Followed prefills whose last part a step waits for, under vLLM's own schedulers: random lives of a decode engine.

As ``test_sync_load_lives``, with requests whose KV another engine computes meanwhile.
"""

from dataclasses import dataclass
from types import SimpleNamespace

import msgspec
import pytest
from matcher_harness import HASH_BLOCK_SIZE
from scheduler_life import Life, Runner, live, make, synchronous_loads, truth  # noqa: F401
from source_fakes import load_results
from vllm.v1.request import RequestStatus

from vllm_kvtier.jobs.results import FetchResult
from vllm_kvtier.jobs.transfer_jobs import FailedJob, PeerFetchJob, StepWork
from vllm_kvtier.scheduler.leases.lease_client import FollowedLease, LeasedBlocks
from vllm_kvtier.scheduler.matching.request_matcher import RequestMatcher
from vllm_kvtier.scheduler.sources.base import LookupMiss
from vllm_kvtier.scheduler.sources.followed_prefill import FollowedPrefillSource
from vllm_kvtier.shapes.read_paths import ReadPath
from vllm_kvtier.wire import messages as m
from vllm_kvtier.worker.job_table import JobTable

pytestmark = synchronous_loads


class FollowingRunner(Runner):
    def __init__(self, life):
        super().__init__(life)
        self.table = JobTable()

    def _loads(self, orders):
        work, table, rng = StepWork(1), self.table, self.life.rng
        for order in orders:
            getattr(work, order.step_list).append(order)
        now = [order for order in orders if order.synchronous and not isinstance(order, FailedJob)]
        table.sync_loads.begin(now, lambda jobs: None)
        table.submit(work)
        table.fail(work.failed)
        self.loading += [order for order in (*work.loads, *work.fetches) if not order.synchronous]
        ended = [order for order in self.loading if rng.random() < 0.6]
        self.loading = [order for order in self.loading if order not in ended]
        for order in (*now, *ended):
            table.finish(self._load(order))
        out = table.results()
        return out.results, out.finished, out.bad_blocks, out.failed

    def _load(self, order):
        if not isinstance(order, PeerFetchJob):
            return super()._load(order)
        bad = self._copy(order, [(pull.local, pull.remote) for pull in order.groups], 0.3)
        return FetchResult(order.request_id, bad, bool(bad), "", 1, 0.001, checksum_mismatch=bool(bad),
                           load_id=order.load_id)  # fmt: skip


@dataclass
class Prefill:
    """At the other engine: ``computed`` tokens of the prompt, whose blocks there are ``slots``."""

    length: int
    slots: list[int]
    computed: int = 0
    follow: FollowedLease | None = None


class FollowingLife(Life):
    def __init__(self, scheduler, seed, **options):
        super().__init__(scheduler, seed, **options)
        world, self.prefills, self.held, self.parts = self.world, {}, set(), set()
        self.last_parts = self.unscheduled = self.lease = 0
        peers, pool = world.peers, world.load.engine.pool
        peers.follow, peers.stop_following, peers.release = self._follow, self._stop, self._release
        pool.free_count, pool.num_blocks = self.pool.free_count, self.blocks
        lock = SimpleNamespace(known=True, run_when_free=lambda job: job())
        source = FollowedPrefillSource(world.load, lock)
        source._config = msgspec.structs.replace(source._config, follow_share=1.0, pull_threshold=1)
        world.matcher = self.half._matcher = RequestMatcher(world.load, [source, world.tier])
        self.half._outcomes = load_results(world.load, world.matcher, self.half._contain)
        world.sync_load.mapped("p/1")
        self.runner = FollowingRunner(self)

    def events(self):
        often = {self.new: 3, self.store_answers: 3, self.prefill_step: 8, self.step: 12}
        return often | {self.abort: 0.3, self.reset: 0.3, self.prefill_dies: 0.1}

    def _add(self, request, stored):
        name, length = request.request_id, request.num_tokens
        if self.rng.random() < 0.7:
            own = {"export": name, "follow": True}
            params = {"do_remote_prefill": True, "remote_host": "p", "remote_port": 1, "kvtier": own}
            request.kv_transfer_params = params
            (cells,), _ = truth(self.kinds, request.prompt_token_ids, 0)
            slots = []
            for i in range(0, length, HASH_BLOCK_SIZE):
                slots.append((1 << 30) + len(self.content))  # none of the store's
                block = cells[i : i + HASH_BLOCK_SIZE]
                self.content[slots[-1]] = block + [None] * (HASH_BLOCK_SIZE - len(block))
            self.prefills[name] = Prefill(length, slots)
        super()._add(request, stored)

    # -- the prefill engine, and the lease client ----------------------------------------------------------------------

    def _follow(self, address, max_wait, notify, rehash=None, **fields):
        request = m.LeaseRequest(lookup_id=1, instance="", follow=True, **fields)
        follow = FollowedLease(address, request, 1e18, max_wait=max_wait, notify=notify)
        self.prefills[request.export].follow = follow
        return follow

    def _stop(self, follow, done):
        follow.cancelled = True
        self.held -= {leased.lease for leased in follow.grants}

    def _release(self, leased, done):
        self.held.discard(leased.lease)

    def going(self):
        each = [(p, p.follow) for p in self.prefills.values() if p.follow is not None]
        return [(p, follow) for p, follow in each if not (follow.cancelled or follow.complete or follow.ended)]

    def prefill_step(self):
        if not (going := self.going()):
            return
        p, follow = self.rng.choice(going)
        p.computed = min(p.length, p.computed + self.rng.choice((4, 8, 16)))
        final, start = p.computed == p.length, follow.request.start
        granted = max([start, *(leased.tokens for leased in follow.grants)])
        start, end = (start, p.length) if final else (granted, p.computed // HASH_BLOCK_SIZE * HASH_BLOCK_SIZE)
        if start >= end:
            return
        self.lease += 1
        self.held.add(self.lease)
        slots = p.slots[start // HASH_BLOCK_SIZE : -(-end // HASH_BLOCK_SIZE)]
        follow.grants.append(LeasedBlocks(
            ("p", 1), "p/1", self.lease, start, end, [slots], ["rank"], path=ReadPath.MAPPED, nbytes=1000 * len(slots),
            final=final, block_tokens=(HASH_BLOCK_SIZE,),
        ))  # fmt: skip
        follow.outcome = follow.outcome or follow.grants[-1]
        follow.notify()

    def prefill_dies(self):
        for _, follow in self.going()[:1]:
            follow.ended = LookupMiss("unreachable", "")
            follow.outcome = follow.outcome or follow.ended
            follow.notify()

    # -- vLLM ----------------------------------------------------------------------------------------------------------

    def schedule(self):
        scheduler = self.scheduler
        budget = scheduler.max_num_scheduled_tokens
        if self.half._sync_load._unannounced and self.rng.random() < 0.3:
            scheduler.max_num_scheduled_tokens = 0
        step, output = super().schedule()
        scheduler.max_num_scheduled_tokens = budget
        for job in step.kv_connector_metadata.work.fetches:
            self.parts |= {job.request_id} if job.more else set()
            if job.synchronous and job.request_id in self.parts:
                self.last_parts += 1
                self.unscheduled += job.request_id not in step.num_scheduled_tokens
        return step, output

    def store_answers(self):
        super().store_answers()
        self.prefill_step()

    def end(self):
        super().end()
        assert not self.held and not self.runner.table.outstanding and not self.runner.table._parts


@pytest.mark.parametrize("budget", [16, 1024])
@pytest.mark.parametrize("priority", [False, True])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_followed_prefill_never_brings_wrong_token_or_hangs(make, asynchronous, priority, budget):  # noqa: F811
    """Whatever is preempted, aborted, reset and bad, or has no room in the step that reads the last part."""
    names, options = ["last_parts", "bad", "preempted", "unscheduled"], {"priority": priority, "budget": budget}
    live(make, names, FollowingLife, asynchronous=asynchronous, **options)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_request_whose_last_part_is_wrong_and_that_had_no_room_is_computed(make, asynchronous):  # noqa: F811
    life = FollowingLife(make, 1, asynchronous=asynchronous, priority=False, budget=1024)
    life.rng.random = lambda: 0.5  # followed; loads end in the step that begins them, and are good
    request = life.add([3] * 22, 4)
    (p,) = life.prefills.values()
    life.rng.choice = lambda options: options[-1]
    while request.status is not RequestStatus.WAITING_FOR_REMOTE_KVS:
        life.prefill_step()
        life.flying.append(life.schedule())
        life.output()
    life.flying.append(life.schedule())
    life.output()
    budget, life.scheduler.max_num_scheduled_tokens = life.scheduler.max_num_scheduled_tokens, 0
    life.prefill_step()
    assert life.half._sync_load.verification_pending
    life.rng.random = lambda: 0.0  # wrong
    life.flying.append(life.schedule())
    life.output()
    assert life.unscheduled == 1 and life.bad == 1 and not life.half._sync_load.verification_pending
    life.scheduler.max_num_scheduled_tokens = budget
    life.end()
    assert life.got[request.request_id] == life.expected[request.request_id]
