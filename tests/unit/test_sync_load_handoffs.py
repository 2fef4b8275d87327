"""Hand-offs from mapped memory that a step waits for: which, with which blocks, and what a wrong one costs."""

import dataclasses
import time
from types import SimpleNamespace

import pytest
from matcher_harness import FakePeers
from source_fakes import load_context, load_results
from support import make_request
from test_sync_load import Pool
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.request import RequestStatus

from vllm_kvtier.config import KVTierConfig
from vllm_kvtier.jobs.results import FetchResult, failed_result
from vllm_kvtier.jobs.transfer_jobs import FailedJob, PeerFetchJob
from vllm_kvtier.scheduler.integrity import sync_load as module
from vllm_kvtier.scheduler.integrity.sync_load import SyncLoad
from vllm_kvtier.scheduler.leases.lease_client import FollowedLease, LeasedBlocks
from vllm_kvtier.scheduler.matching import source_selector
from vllm_kvtier.scheduler.matching.request_lifecycle import RequestLifecycle, State
from vllm_kvtier.scheduler.matching.request_matcher import RequestMatcher
from vllm_kvtier.scheduler.planner.cost_model import LoadRate
from vllm_kvtier.scheduler.planner.load_planner import LoadPlanner
from vllm_kvtier.scheduler.sources.base import LookupMiss
from vllm_kvtier.scheduler.sources.followed_prefill import FollowedPrefillSource
from vllm_kvtier.scheduler.sources.prefill_handoff import PrefillHandoffSource
from vllm_kvtier.scheduler.sources.retained_blocks import RetainedBlocksSource
from vllm_kvtier.shapes.read_paths import ReadPath
from vllm_kvtier.wire import messages as m

SIZE = 4
BYTES = 1000  # of a block
KV = {"do_remote_prefill": True, "remote_host": "a", "remote_port": 1}
HANDOFF = {**KV, "remote_request_id": "kvtier/e"}
FOLLOWED = {**KV, "kvtier": {"export": "e", "follow": True}}
RETAINED = {"do_remote_decode": True, "kvtier": {"sources": [{"host": "a", "port": 1}]}}


class Client(FakePeers):
    """``at_once``: what a lookup is answered while it is waited for. ``near``: the engine is known to be on this
    node."""

    def __init__(self):
        super().__init__([(SIZE, None)], time.monotonic)
        self.near, self.at_once, self.waits = True, None, []

    def ask(self, *args, **fields):
        pending = super().ask(*args, **fields)

        def wait(seconds):
            self.waits.append(seconds)
            if self.at_once is not None:
                self.answer(pending, self.at_once)

        pending.wait, pending.on_this_node = wait, self.near
        return pending

    def follow(self, address, max_wait, notify, rehash, **fields):
        request = m.LeaseRequest(lookup_id=len(self.open) + 1, instance="", follow=True, **fields)
        pending = FollowedLease(address, request, 1e18, max_wait=max_wait, notify=notify, on_this_node=self.near)
        pending.wait = self.waits.append
        self.open.append(pending)
        return pending

    def grant(self, pending, leased):
        pending.grants.append(leased)
        pending.outcome = pending.outcome or leased
        self.held.add(leased.lease)
        pending.notify()

    def stop_following(self, pending, done):
        for leased in pending.grants:
            self.held.discard(leased.lease)


class Engine:
    """A decode engine with nothing else to do."""

    def __init__(self, bandwidth=1e6, milliseconds=100.0):
        RequestLifecycle.violations = 0
        self.client, self.planner, self.evicted = Client(), LoadPlanner({"peer_gpu": bandwidth}), []
        self.vllm = SimpleNamespace(
            connector="ours", running=[], requests={}, get_request_counts=lambda: (0, 1),
            prev_step_scheduled_req_ids=set(), finished_recving_kv_req_ids=set(), pause_state=PauseState.UNPAUSED,
        )  # fmt: skip
        self.pool = Pool(self.evicted)
        sync_load = SyncLoad(milliseconds, 60.0, self.pool, lambda: self.vllm, "ours", self.planner)
        self.load = load_context(
            [(SIZE, None)], SIZE, self.client, planner=self.planner, sync_load=sync_load,
            config=KVTierConfig(pull_threshold=1, bidirectional=True, same_node_pulls="mapped"),
            pool=SimpleNamespace(free_count=lambda: 1000, num_blocks=1000, cached_about=lambda *_: 0),
        )  # fmt: skip
        self.sync_load = sync_load
        lock = SimpleNamespace(known=True, run_when_free=lambda job: job())
        handoffs = FollowedPrefillSource(self.load, lock), PrefillHandoffSource(self.load)
        self.matcher = RequestMatcher(self.load, [*handoffs, RetainedBlocksSource(self.load)])
        self.results = load_results(self.load, self.matcher)
        self.leases = 0

    def request(self, tokens, params, name="r"):
        request = make_request(name, list(range(tokens)), SIZE, params)
        self.vllm.requests[name] = request
        return request

    def leased(self, tokens, start=0, **fields):
        self.leases += 1
        ids = list(range(101 + start // SIZE, 101 + -(-tokens // SIZE)))
        fields = {"path": ReadPath.MAPPED, "nbytes": BYTES * len(ids), "block_tokens": (SIZE,), **fields}
        return LeasedBlocks(("a", 1), "a/1", self.leases, start, tokens, [ids], ["rank"], **fields)

    def offered(self, request, computed=0, **fields):
        """The answer to vLLM when the lease is granted."""
        assert self.matcher.match(request, computed) == (None, False)
        [pending] = self.client.open
        end = request.num_tokens if pending.request.export else request.num_tokens // SIZE * SIZE
        leased = self.leased(end, pending.request.start, **fields)
        if pending.request.follow:
            self.client.grant(pending, leased)
        else:
            self.client.answer(pending, leased)
        return self.matcher.match(request, computed)

    def allocate(self, request, computed, external):
        ids = list(range(11, 11 + -(-request.num_tokens // SIZE)))
        self.matcher.allocated(request, (ids,), external)
        jobs, _ = self.matcher.take_jobs()
        return jobs[0], ids[computed // SIZE :]

    def end(self, job, bad=(), seconds=0.001, **fields):
        fields = {"checksum_mismatch": bool(bad), **fields}
        result = FetchResult(job.request_id, set(bad), bool(bad), "", 1, seconds, load_id=job.load_id, **fields)
        self.results.arrived([result], set() if job.synchronous else {job.request_id})

    def finish(self, request):
        request.status = RequestStatus.FINISHED_STOPPED
        self.matcher.finished(request)

    def fetch_once(self):
        """The first hand-off from an engine, which the workers map its memory for."""
        request = self.request(9, HANDOFF, "first")
        assert self.offered(request) == (9, True)
        job, _ = self.allocate(request, 0, 9)
        assert not job.synchronous
        self.end(job)
        self.finish(request)
        self.client.open.clear()
        self.vllm.requests.clear()


@pytest.fixture
def engine():
    made = Engine()
    made.fetch_once()
    yield made
    assert not made.client.held and not made.planner.loading("peer_gpu") and not made.pool.held
    assert RequestLifecycle.violations == 0 and not len(made.matcher)


@pytest.mark.parametrize("params", [HANDOFF, FOLLOWED])
@pytest.mark.parametrize("tokens, computed, brought", [(18, 0, 18), (16, 0, 16), (17, 0, 17), (18, 8, 10), (18, 16, 2)])
def test_handoff_is_read_in_the_step_that_computes_its_last_token(engine, params, tokens, computed, brought):
    request = engine.request(tokens, params)
    assert engine.offered(request, computed) == (tokens - 1 - computed, False), "one token is left to compute"
    job, ids = engine.allocate(request, computed, tokens - 1 - computed)
    assert isinstance(job, PeerFetchJob) and job.synchronous and not job.more
    assert job.block_list == ids[: -(-brought // SIZE)], "with the partial block"
    assert job.groups[0].valid.tolist()[-1] == (tokens - 1) % SIZE + 1
    assert engine.pool.held == job.block_list and engine.sync_load.verification_pending and engine.client.held
    known = engine.load.checksum_index.knows
    assert not any(map(known, ids)), "no engine may lease them"
    other = engine.request(20, None, "other")
    assert engine.matcher.match(other, 0) == (None, False), "vLLM's cache has what is not verified"
    engine.end(job)
    state = engine.matcher.get("r")
    assert (state.life.state, state.report()["pulled_tokens"]) == (State.LOADED, brought)
    assert not engine.client.held, "the lease goes back when the step has ended"
    counts = engine.load.engine.counters.take()
    assert counts["synchronous_loads|ok"] == 1 and counts["fetches|ok"] == 2
    assert counts["pulled_tokens|handoff"] == 9 + brought
    whole = (tokens - 1) // SIZE - computed // SIZE
    assert [known(block) for block in ids] == [True] * whole + [False] * (len(ids) - whole), "vLLM writes the last one"
    engine.finish(request)
    engine.finish(other)


def test_retained_blocks_are_read_in_the_step_that_computes_the_rest(engine):
    request = engine.request(23, RETAINED)
    assert engine.offered(request, 8) == (12, False)
    job, ids = engine.allocate(request, 8, 12)
    assert job.synchronous and job.block_list == ids[:3]
    engine.end(job)
    assert engine.load.engine.counters.take()["pulled_tokens|retained"] == 12
    engine.finish(request)


@pytest.mark.parametrize(
    "fields",
    [
        {"path": ReadPath.DIRECT},
        {"path": ReadPath.STAGED},
        {"block_tokens": (2 * SIZE,), "blocks": [[101, 102, 103]]},
        {"instance": "a/2"},
    ],
    ids=["direct", "staged", "other block size", "not mapped"],
)
def test_handoff_is_asynchronous(engine, fields):
    request = engine.request(18, HANDOFF)
    assert engine.matcher.match(request, 0) == (None, False)
    [pending] = engine.client.open
    engine.client.answer(pending, dataclasses.replace(engine.leased(18), **fields))
    assert engine.matcher.match(request, 0) == (18, True)
    engine.finish(request)


def test_handoff_that_takes_long_is_asynchronous():
    engine = Engine(bandwidth=1e4, milliseconds=400.0)
    engine.fetch_once()
    request = engine.request(18, HANDOFF)
    assert engine.offered(request) == (18, True), "5000 bytes take half a second"
    assert engine.matcher.match(request, 8) == (9, False), "3000 bytes do not"
    engine.finish(request)


def test_handoff_beside_others_must_be_short():
    for bandwidth, expected in ((1e6, (18, True)), (5 * BYTES / module.SHORT_LOAD_SECONDS, (17, False))):
        engine = Engine(bandwidth)
        engine.fetch_once()
        engine.vllm.get_request_counts = lambda: (3, 1)
        request = engine.request(18, HANDOFF)
        assert engine.offered(request) == expected
        engine.finish(request)


def test_followed_prefill_that_goes_on_is_asynchronous(engine):
    request = engine.request(40, FOLLOWED)
    assert engine.matcher.match(request, 0) == (None, False)
    [pending] = engine.client.open
    engine.client.grant(pending, engine.leased(16, final=False))
    assert engine.matcher.match(request, 0) == (40, True)
    engine.client.grant(pending, engine.leased(40))  # while vLLM had no room
    assert engine.matcher.match(request, 0) == (40, True)
    job, ids = engine.allocate(request, 0, 40)
    assert not job.synchronous and job.block_list == ids and not engine.planner.loading("peer_gpu")
    engine.end(job)
    engine.finish(request)


def followed(engine, read=True, tokens=42):
    """(request, answer, vLLM's blocks) of a prefill that goes on, whose first 16 tokens are leased and ``read``."""
    request = engine.request(tokens, FOLLOWED)
    assert engine.matcher.match(request, 0) == (None, False)
    [pending] = engine.client.open
    engine.client.grant(pending, engine.leased(16, final=False))
    assert engine.matcher.match(request, 0) == (tokens, True)
    job, ids = engine.allocate(request, 0, tokens)
    assert job.more and not job.synchronous
    request.status, request.num_computed_tokens = RequestStatus.WAITING_FOR_REMOTE_KVS, tokens
    if read:
        engine.results.arrived([FetchResult("r", set(), False, "", 1, 0.001)], set())
    return request, pending, ids


def last_part(engine):
    engine.matcher.collect_jobs()
    [job] = engine.matcher.take_jobs()[0]
    assert not job.more
    return job


def test_last_part_of_followed_prefill_is_read_in_the_step_that_computes_its_last_token(engine):
    request, pending, ids = followed(engine)
    engine.client.grant(pending, engine.leased(42))
    assert engine.vllm.finished_recving_kv_req_ids == {"r"}, "vLLM schedules it in the next step"
    other = engine.request(20, None, "other")
    assert engine.matcher.match(other, 0) == (None, False), "vLLM's cache will have what is not verified"
    engine.matcher.allocated(request, (ids,), 0)
    job, output = last_part(engine), SimpleNamespace(has_sync_kv_loads=False)
    assert job.synchronous and job.block_list == ids[4:] == engine.pool.held
    engine.sync_load.announce(output)
    assert output.has_sync_kv_loads, "or the forward would not wait"
    assert engine.load.engine.counters.take()["prompt_tokens|handoff"] == 9, "of the first one: it is not verified"
    engine.end(job)
    state, counts = engine.matcher.get("r"), engine.load.engine.counters.take()
    assert (state.life.state, state.report()["pulled_tokens"]) == (State.LOADED, 42)
    assert (counts["synchronous_loads|ok"], counts["pulled_tokens|handoff"]) == (1, 42)
    assert [engine.load.checksum_index.knows(block) for block in ids] == [True] * 10 + [False]
    engine.sync_load.announce(output := SimpleNamespace(has_sync_kv_loads=False))
    assert not output.has_sync_kv_loads
    engine.finish(request)
    engine.finish(other)


def with_image(engine):
    """That ends before the last token: the workers of vLLM's V1 model runner would not have it."""
    place = SimpleNamespace(offset=30, length=11)
    engine.vllm.requests["r"].mm_features = [SimpleNamespace(mm_position=place)]
    engine.vllm.use_v2_model_runner = False


def busy(engine):
    engine.vllm.get_request_counts = lambda: (3, 1)
    engine.planner._cost("peer_gpu").rate = LoadRate(1e3, 1e-6, 1.0)


@pytest.mark.parametrize("fields, before", [
    ({"instance": "a/2"}, None), ({"path": ReadPath.DIRECT}, None), ({}, lambda engine: busy(engine)),
    ({}, lambda engine: setattr(engine.vllm, "requests", {})), ({}, lambda engine: engine.sync_load._mapped.clear()),
    ({}, lambda engine: setattr(engine.sync_load, "_seconds", 0.0)), ({}, lambda engine: with_image(engine)),
    ({}, lambda engine: setattr(engine.vllm, "pause_state", PauseState.PAUSED_NEW)),
])  # fmt: skip
def test_last_part_of_followed_prefill_is_asynchronous(engine, fields, before):
    request, pending, ids = followed(engine)
    if before is not None:
        before(engine)
    engine.client.grant(pending, dataclasses.replace(engine.leased(42), **fields))
    job = last_part(engine)
    assert not job.synchronous and job.block_list == ids[4:] and not engine.vllm.finished_recving_kv_req_ids
    engine.end(job)
    engine.finish(request)


def test_last_part_of_followed_prefill_waits_for_no_stretch_that_is_being_read(engine):
    request, pending, ids = followed(engine, read=False)
    engine.client.grant(pending, engine.leased(42))
    job = last_part(engine)
    assert not job.synchronous and not engine.vllm.finished_recving_kv_req_ids
    engine.results.arrived([FetchResult("r", set(), False, "", 1, 0.001)], set())
    engine.end(job)
    engine.finish(request)


@pytest.mark.parametrize("scheduled", [True, False])
def test_wrong_block_of_last_part_is_computed_from_there_on(engine, scheduled):
    """vLLM may lack room for the request in the step that reads it: it waits with its blocks then."""
    request, pending, ids = followed(engine)
    engine.client.grant(pending, engine.leased(42))
    request.status, request.num_computed_tokens = RequestStatus.WAITING, 41
    if scheduled:
        rolled_back = []
        engine.vllm.running, engine.vllm._preempt_request = [request], lambda *a, **k: rolled_back.append(a[0])
    engine.end(last_part(engine), {ids[6]})
    assert engine.evicted == [bytes(h) for h in request.block_hashes[6:]]
    assert rolled_back == [request] if scheduled else request.num_computed_tokens == 24
    assert engine.matcher.get("r").life.state is State.NEW, "if vLLM asks, other sources may have the rest"
    engine.finish(request)


def test_last_part_that_fails_spoils_no_part_before_it(engine):
    request, pending, ids = followed(engine)
    engine.client.grant(pending, engine.leased(42))
    engine.vllm.running, engine.vllm._preempt_request = [request], lambda *a, **k: None
    engine.results.arrived([failed_result(last_part(engine), "its engine has ended")], set())
    assert engine.evicted == [bytes(h) for h in request.block_hashes[4:]]
    assert not engine.sync_load.is_mapped("a/1")
    engine.finish(request)


def test_abort_before_the_last_part_is_read_releases_all_with_its_step(engine):
    request, pending, ids = followed(engine)
    engine.client.grant(pending, engine.leased(42))
    request.status = RequestStatus.FINISHED_ABORTED
    engine.matcher.finished(request)
    assert engine.pool.held and engine.client.held
    engine.end(last_part(engine))


def test_exception_at_the_end_of_a_followed_prefill_fails_what_is_missing(engine, monkeypatch):
    request, pending, ids = followed(engine)
    with monkeypatch.context() as patched:
        patched.setattr(engine.sync_load, "end", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.client.grant(pending, engine.leased(42))
    engine.matcher._growing[0].grown.append("r")
    job = last_part(engine)
    assert isinstance(job, FailedJob) and not job.synchronous and job.block_list == ids[4:]
    engine.results.arrived([failed_result(job, job.reason)], {"r"})
    engine.finish(request)


def test_followed_prefill_that_maps_memory_makes_others_asynchronous(engine):
    followed, request = engine.request(40, FOLLOWED), engine.request(18, HANDOFF, "s")
    assert engine.matcher.match(followed, 0) == (None, False)
    [pending] = engine.client.open
    engine.client.grant(pending, dataclasses.replace(engine.leased(16, final=False), instance="b/1"))
    assert engine.matcher.match(followed, 0) == (40, True)
    job, _ = engine.allocate(followed, 0, 40)
    followed.status = RequestStatus.WAITING_FOR_REMOTE_KVS
    engine.client.open.clear()
    engine.planner._cost("peer_gpu").rate = LoadRate(1e12, 1e-6, 1.0)
    assert engine.offered(request) == (18, True), "a step would wait for the lock"
    engine.end(job)
    engine.finish(followed)
    engine.finish(request)


def test_followed_prefill_that_has_ended_is_read_at_once_however_it_was_granted(engine):
    request = engine.request(40, FOLLOWED)
    assert engine.matcher.match(request, 0) == (None, False)
    [pending] = engine.client.open
    engine.client.grant(pending, engine.leased(16, final=False))
    engine.client.grant(pending, engine.leased(40))
    assert engine.matcher.match(request, 0) == (39, False)
    job, ids = engine.allocate(request, 0, 39)
    assert job.synchronous and job.block_list == ids and not job.more
    engine.end(job)
    assert not list(engine.matcher._growing[0].more_jobs())
    engine.finish(request)


@pytest.mark.parametrize("instance, computed", [("a/1", 16), ("a/1", 12), ("a/2", 16)])
def test_followed_prefill_of_one_step_is_read_when_its_export_is_granted(engine, instance, computed):
    """Its blocks may be granted before: they have their checksums, and the prefill engine lacks its step's output."""
    request = engine.request(18, FOLLOWED)
    assert engine.matcher.match(request, 0) == (None, False)
    [pending] = engine.client.open
    engine.client.grant(pending, dataclasses.replace(engine.leased(computed, final=False), instance=instance))
    waits = instance == "a/1" and computed == 16
    assert engine.matcher.match(request, 0) == ((None, False) if waits else (18, True))
    if waits:
        engine.client.grant(pending, engine.leased(18))
        assert engine.matcher.match(request, 0) == (17, False)
    engine.finish(request)


def test_followed_prefill_that_ends_without_export_is_computed(engine):
    request = engine.request(18, FOLLOWED)
    assert engine.matcher.match(request, 0) == (None, False)
    [pending] = engine.client.open
    engine.client.grant(pending, engine.leased(16, final=False))
    assert engine.matcher.match(request, 0) == (None, False)
    pending.ended = LookupMiss("unreachable", "")
    assert engine.matcher.match(request, 0) == (0, False)
    engine.finish(request)


def test_followed_prefill_lost_before_allocation_is_recomputed(engine):
    request = engine.request(18, FOLLOWED)
    assert engine.offered(request) == (17, False)
    follow = engine.matcher.get("r").pending.answer
    follow.ended = LookupMiss("unreachable", "")
    follow.grants[0] = dataclasses.replace(follow.grants[0], blocks=[[0]])
    job, ids = engine.allocate(request, 0, 17)
    assert isinstance(job, FailedJob) and job.synchronous and job.block_list == ids
    engine.results.arrived([failed_result(job, "lost")], set())
    assert engine.evicted == [bytes(h) for h in request.block_hashes]
    assert engine.matcher.match(request, 0) == (0, False)
    engine.finish(request)


@pytest.mark.parametrize("params", [HANDOFF, FOLLOWED])
@pytest.mark.parametrize("row, gone", [(0, 2), (1, 3), (2, 4)])
def test_wrong_block_of_handoff_takes_back_what_was_computed_on_it(engine, params, row, gone):
    """The last one is partial, and no hash names it: all before it stays."""
    request = engine.request(18, params)
    assert engine.offered(request, 8) == (9, False)
    job, ids = engine.allocate(request, 8, 9)
    engine.end(job, {ids[row]})
    assert engine.evicted == [bytes(h) for h in request.block_hashes[gone:]]
    state = engine.matcher.get("r")
    assert (state.life.state, state.report()["pulled_tokens"]) == (State.NEW, 0)
    assert engine.matcher.match(request, 8) == (0, False), "it is computed"
    counts = engine.load.engine.counters.take()
    assert counts["synchronous_loads|failed"] == 1 and counts["integrity_failures|peer_gpu"] == 1
    engine.finish(request)


def test_failed_handoff_makes_the_next_one_asynchronous(engine):
    request = engine.request(18, HANDOFF)
    assert engine.offered(request) == (17, False)
    job, _ = engine.allocate(request, 0, 17)
    engine.results.arrived([failed_result(job, "its engine has ended")], set())
    engine.finish(request)
    del engine.vllm.requests["r"]
    request = engine.request(18, HANDOFF, "s")
    assert engine.offered(request) == (18, True)
    engine.finish(request)


@pytest.mark.parametrize("params", [HANDOFF, FOLLOWED])
@pytest.mark.parametrize("bad", [False, True])
def test_abort_before_verification_releases_lease_with_the_step(engine, params, bad):
    request = engine.request(18, params)
    engine.offered(request)
    job, ids = engine.allocate(request, 0, 17)
    request.status = RequestStatus.FINISHED_ABORTED
    engine.matcher.finished(request)
    assert engine.client.held and engine.pool.held and not engine.matcher.take_aborted()
    engine.end(job, ids[:1] if bad else ())


def test_exception_after_handoff_was_built_fails_its_load(engine, monkeypatch):
    request = engine.request(18, HANDOFF)
    engine.offered(request)
    with monkeypatch.context() as patched:
        patched.setattr(engine.sync_load, "begin", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.matcher.allocated(request, ([11, 12, 13, 14, 15],), 17)
    engine.matcher.fail_load(request, ([11, 12, 13, 14, 15],), 17)
    [job], _ = engine.matcher.take_jobs()
    assert isinstance(job, FailedJob) and job.synchronous
    engine.results.arrived([failed_result(job, "")], set())
    engine.finish(request)


# -- the wait for the lease ----------------------------------------------------------------------------------------


def test_lease_of_engine_on_this_node_is_waited_for(engine):
    """Without an empty step of vLLM in between."""
    engine.client.at_once, request = engine.leased(18), engine.request(18, HANDOFF)
    assert engine.matcher.match(request, 0) == (17, False)
    assert engine.client.waits[-1:] == [source_selector.SHORT_WAIT]
    engine.finish(request)


@pytest.mark.parametrize("params, near", [(HANDOFF, False), (FOLLOWED, True)])
def test_lease_that_takes_longer_is_not_waited_for(engine, params, near):
    engine.client.near, waits = near, list(engine.client.waits)
    request = engine.request(18, params)
    assert engine.matcher.match(request, 0) == (None, False) and engine.client.waits == waits
    engine.client.open.clear()
    engine.finish(request)


# -- how long it takes ---------------------------------------------------------------------------------------------


def test_durations_of_handoffs_are_learned():
    engine = Engine(bandwidth=1e6)
    engine.fetch_once()
    assert engine.planner._cost("peer_gpu").measured == 0 and not engine.planner._cost("peer_gpu").warm, "it maps"

    def measured(seconds, asynchronous=False):
        engine.sync_load._seconds = 0.0 if asynchronous else 0.1
        request = engine.request(16, HANDOFF)
        assert engine.offered(request)[1] is asynchronous
        job, _ = engine.allocate(request, 0, 16 if asynchronous else 15)
        engine.end(job, seconds=seconds)
        engine.finish(request)
        engine.vllm.requests.clear()
        return engine.planner._cost("peer_gpu").measured

    expected = engine.planner.load_seconds("peer_gpu", 4 * BYTES)
    assert measured(expected / 2, True) == 0 and engine.planner._cost("peer_gpu").warm
    assert measured(expected / 2, True) == 1
    assert engine.planner.load_seconds("peer_gpu", 4 * BYTES) < expected
    assert measured(expected) == 1, "an upper bound: the forward was launched meanwhile"
    assert measured(expected / 4) == 2
    assert measured(2 * expected, True) == 3
