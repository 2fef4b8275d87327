"""Loads that a step waits for, on the scheduler's side: for which requests, and what is kept back until the
verification."""

from types import SimpleNamespace

import numpy as np
import pytest
from cache_groups import cache_groups
from source_fakes import bare_identity
from support import Uncontained, make_request
from test_connector_scheduler import half as bare  # noqa: F401
from vllm.v1.request import RequestStatus

from vllm_kvtier.jobs.results import FetchResult, LoadResult
from vllm_kvtier.jobs.transfer_jobs import GroupLoad, LoadJob
from vllm_kvtier.scheduler.connector_scheduler import KVTierConnectorScheduler
from vllm_kvtier.scheduler.integrity import sync_load as module
from vllm_kvtier.scheduler.integrity.checksum_clearing import ChecksumClearing
from vllm_kvtier.scheduler.integrity.sync_load import SyncLoad
from vllm_kvtier.scheduler.matching.request_lifecycle import RequestLifecycle, State
from vllm_kvtier.scheduler.matching.request_state import RequestState
from vllm_kvtier.scheduler.matching.transfer_params import read
from vllm_kvtier.scheduler.planner.load_planner import LoadDecision
from vllm_kvtier.scheduler.sources.base import LookupHit
from vllm_kvtier.scheduler.sources.peer_gpu import PeerGpuSource
from vllm_kvtier.scheduler.sources.store_source import NodeStoreSource
from vllm_kvtier.shapes.read_paths import ReadPath
from vllm_kvtier.vllm_compat.hooks.admission import Admission
from vllm_kvtier.vllm_compat.hooks.waiting_loop import WaitingLoop
from vllm_kvtier.vllm_compat.probe.features import granted
from vllm_kvtier.vllm_compat.probe.row import Feature

HASH_BLOCK_SIZE = 4


@pytest.fixture
def engine():
    return SimpleNamespace(
        connector="ours", running=[], requests={}, get_request_counts=lambda: (0, 1), prev_step_scheduled_req_ids=set()
    )


class Planner:
    """``seconds``: that the bytes of any load are expected to take."""

    seconds, step, busy = 0.1, 0.0, False

    def moving_seconds(self, place, nbytes):
        assert nbytes == 10
        return self.seconds

    def load_seconds(self, place, nbytes):
        return self.moving_seconds(place, nbytes) + (0.005 if self.seconds < 0.1 else 0.0)

    def step_seconds(self):
        return self.step

    def loading(self, place):
        return self.busy


class Pool:
    hash_block_size, group_tokens = 4, [HASH_BLOCK_SIZE]

    def __init__(self, evicted=None):
        self.held, self.evicted = [], evicted

    def evict(self, hashes):
        self.evicted.extend(hashes)

    def pin(self, ids):
        self.held += ids
        return list(ids)

    def free(self, ids):
        for block in ids:
            self.held.remove(block)

    def held_once(self, ids):
        return sum(self.held.count(block) == 1 for block in ids)


def make(engine, milliseconds=100.0, timeout=60.0, evicted=None, seconds=0.1):
    planner = Planner()
    planner.seconds = seconds
    return SyncLoad(milliseconds, timeout, Pool(evicted), lambda: engine, "ours", planner)


def tracked(tokens=17, lender=""):
    """Offered what is in host memory or, if ``lender``, what is in its cache."""
    request = make_request("r", list(range(tokens)), HASH_BLOCK_SIZE)
    t = RequestState(request, read(None), RequestLifecycle("r"))
    blocks, tokens = [[5, 6, 7, 8]], tokens // HASH_BLOCK_SIZE * HASH_BLOCK_SIZE
    if lender:
        peer_gpu = PeerGpuSource.__new__(PeerGpuSource)
        t.hit = LookupHit(peer_gpu, lender, 1, 0, tokens, blocks, nbytes=10, path=ReadPath.MAPPED)
    else:
        t.hit = LookupHit(NodeStoreSource.__new__(NodeStoreSource), "life", 1, 0, tokens, blocks, session=1, nbytes=10)
    t.plan = LoadDecision(True, 0.1, 1.0, "faster")
    return t


def test_sync_load_is_eligible_for_short_loads_of_plain_requests(engine):
    sync_load, t = make(engine), tracked()
    assert sync_load.is_eligible(t, 0, 1)
    assert not make(engine, 0.0).is_eligible(t, 0, 1), "switched off"
    assert not make(engine, seconds=0.11).is_eligible(t, 0, 1), "too long"
    assert not sync_load.is_eligible(t, 16, 1), "nothing would be loaded"
    assert not SyncLoad(100.0, 60.0, None, lambda: None, "ours", Planner()).is_eligible(t, 0, 1), "no scheduler yet"
    t.request.resumable = True
    assert not sync_load.is_eligible(t, 0, 1)
    t.request.resumable = False
    beside = SimpleNamespace(**{**vars(engine), "connector": "a MultiConnector"})
    assert not make(beside).is_eligible(t, 0, 1)


@pytest.mark.parametrize("end, eligible", [(15, False), (16, False), (17, True)])
def test_sync_load_of_media_is_one_that_can_be_rolled_back(engine, end, eligible):
    """The engine would end: see ``rollback.possible``. An asynchronous load that fails is no step that computed."""
    t = tracked()
    t.request.mm_features = [SimpleNamespace(mm_position=SimpleNamespace(offset=2, length=end - 2))]
    engine.use_v2_model_runner = False
    assert make(engine).is_eligible(t, 0, 1) == eligible
    engine.use_v2_model_runner = True
    assert make(engine).is_eligible(t, 0, 1)


@pytest.mark.parametrize("lender", ["", "P/1"])
def test_sync_load_beside_others_must_be_short(engine, lender):
    others = SimpleNamespace(**{**vars(engine), "get_request_counts": lambda: (3, 2)})
    t, sync_load = tracked(lender=lender), make(others)
    sync_load.mapped(lender)
    planner = sync_load._planner
    for tracked_requests in (2, 1):  # whether we know of the others or not
        planner.seconds, planner.step = 0.003, 0.007
        assert not sync_load.is_eligible(t, 0, tracked_requests)
        planner.seconds = module.SHORT_LOAD_SECONDS
        assert sync_load.is_eligible(t, 0, tracked_requests)
        planner.seconds, planner.step = 0.006, 0.024
        assert sync_load.is_eligible(t, 0, tracked_requests), "a quarter of a step"
    planner.busy = True
    assert not sync_load.is_eligible(t, 0, 2), "it would wait for what is under way there, and all others with it"
    planner.busy, planner.seconds = False, 0.001
    assert sync_load.is_eligible(t, 0, 2)
    assert not make(others, 0.5, seconds=0.001).is_eligible(t, 0, 2), "the option is a limit here too"


def test_sync_load_beside_others_maps_no_new_memory(engine):
    others = SimpleNamespace(**{**vars(engine), "get_request_counts": lambda: (3, 2)})
    sync_load = make(others, seconds=0.001)
    assert not sync_load.is_eligible(tracked(lender="P/1"), 0, 4)
    assert make(engine, seconds=0.001).is_eligible(tracked(lender="P/1"), 0, 1), "alone it delays no request"
    sync_load.mapped("P/1")
    assert sync_load.is_eligible(tracked(lender="P/1"), 0, 4) and not sync_load.is_eligible(tracked(lender="P/2"), 0, 4)


def test_sync_load_is_off_while_requests_wait(engine):
    """He would not be matched before the verdict; and several brief loads, one in two steps each, take longer than all
    of them together."""
    t, waiting = tracked(), make_request("s", [1, 2, 3], HASH_BLOCK_SIZE)
    engine.requests = {"r": t.request, "s": waiting}
    engine.get_request_counts = lambda: (1, 1)  # while vLLM schedules, those passed over are in no queue
    sync_load = make(engine, seconds=0.001)
    assert not sync_load.is_eligible(t, 0, 2)
    waiting.num_computed_tokens = 3  # loaded; it is not matched again
    assert sync_load.is_eligible(t, 0, 2)
    waiting.num_computed_tokens, waiting.status = 0, RequestStatus.WAITING_FOR_REMOTE_KVS
    assert sync_load.is_eligible(t, 0, 2)
    waiting.status = RequestStatus.PREEMPTED
    assert not sync_load.is_eligible(t, 0, 2)


@pytest.mark.parametrize("lender", ["", "P/1"])
def test_sync_load_backs_off_after_slow_load(engine, monkeypatch, lender):
    """What others waited for in vain they do not wait for again."""
    now = [100.0]
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    sync_load, t = make(engine, seconds=0.001, evicted=[]), tracked(lender=lender)
    sync_load.mapped(lender)

    def ended(seconds, corrupt):
        ordered(sync_load, t)
        assert t.job.timeout == module.MAX_SYNC_LOAD_SECONDS
        if lender:
            result = FetchResult("r", {11}, True, "because", 1, seconds, checksum_mismatch=corrupt)
            sync_load.apply_results("r", [result])
        else:
            sync_load.apply_results("r", [LoadResult("r", {11}, "because", 1, seconds, 0.0, [(0, 5)] * corrupt)])

    ended(0.5, False)
    assert sync_load.is_eligible(t, 0, 1), "it failed soon"
    assert sync_load.is_eligible(t, 0, 2) == (not lender), "mapping it may take long the next time"
    sync_load.mapped(lender)
    ended(module.MAX_SYNC_LOAD_SECONDS, True)
    assert sync_load.is_eligible(t, 0, 2), "it was waited for anyway"
    ended(module.MAX_SYNC_LOAD_SECONDS, False)
    assert not sync_load.is_eligible(t, 0, 1) and not sync_load.is_eligible(t, 0, 2)
    sync_load.mapped("Q/1")
    assert sync_load.is_eligible(tracked(lender="" if lender else "Q/1"), 0, 1), "another source"
    now[0] += module.BACKOFF_SECONDS
    assert sync_load.is_eligible(t, 0, 1)


def test_sync_load_unknown_bad_blocks_evict_all_of_its_blocks(engine):
    evicted = []
    sync_load, t = make(engine, evicted=evicted), tracked()
    ordered(sync_load, t)
    sync_load.apply_results("r", [LoadResult("r", {99}, "", 1, 0.1, 0.0)])
    assert evicted == [bytes(h) for h in t.request.block_hashes]


def test_sync_load_overdue_verification_waits_for_end_of_step(bare):  # noqa: F811
    """The request may be in that step: vLLM could not take it out again."""
    half, arrived = bare, []
    half._questions, half.has_pending_frees = SimpleNamespace(waiting=[]), lambda: False
    half._info = SimpleNamespace(unsupported="no")
    half._step_timer = half._tables = SimpleNamespace(end_step=lambda: None)
    half._sync_load = SimpleNamespace(verification_pending=True, overdue=lambda: "verdict")
    half.arrived = lambda results, finished: arrived.extend(results)
    half._info.unsupported, half._identity = None, bare_identity(namespace=object())
    half._provenance = SimpleNamespace(admit=lambda request, named: named)
    match = staticmethod(lambda request, computed: (None, False))
    half._matcher = type("Matcher", (), {"match": match, "get": {}.get, "__len__": lambda self: 1})()
    half._engine = SimpleNamespace(waiting_loop=WaitingLoop(), admission=Admission())
    request = SimpleNamespace(request_id="r", skip_reading_prefix_cache=False)
    assert half.match(request, 0) == (None, False) and not arrived
    half._info.unsupported = "no"
    half.end_step()
    assert arrived == ["verdict"]


@pytest.mark.skipif(not granted(Feature.SYNC_LOADS), reason="this vLLM's forward waits for no load")
def test_sync_load_preempted_request_drops_stale_output(engine):
    """vLLM delivers what was in flight of a preempted request, and by then does not know that it was wrong."""
    sync_load, t = make(engine), tracked()
    t.request.num_stale_output_tokens = 3
    sync_load.drop_unverified_output()
    assert not t.request.drop_stale_output
    ordered(sync_load, t)
    sync_load.drop_unverified_output()
    assert t.request.drop_stale_output
    t.request.num_stale_output_tokens, t.request.drop_stale_output = 0, False
    sync_load.drop_unverified_output()
    assert not t.request.drop_stale_output, "it runs"


def ordered(sync_load, t):
    from vllm_kvtier.scheduler.context import BlockGeometry
    from vllm_kvtier.scheduler.integrity.checksum_index import ContentKeys
    from vllm_kvtier.scheduler.sources import job_builder

    make_order = job_builder.peer_fetch_job if t.hit.mapped else job_builder.load_job
    geometry = BlockGeometry(cache_groups([(HASH_BLOCK_SIZE, None)]), HASH_BLOCK_SIZE)
    t.job = make_order(t, geometry, ContentKeys(1), ([11, 12, 13, 14, 15],), 16, 60.0)
    t.num_external_tokens = 16
    sync_load.begin(t, t.job)
    assert t.job.synchronous and sync_load.verification_pending


def test_content_of_a_pending_load_is_unverified(engine):
    """And what is computed on it: vLLM names it in its prefix cache before."""
    sync_load, t = make(engine, evicted=[]), tracked()
    hashes = [bytes(each) for each in t.request.block_hashes]
    assert not sync_load.is_unverified(hashes[0])
    ordered(sync_load, t)
    assert all(map(sync_load.is_unverified, hashes)) and not sync_load.is_unverified(b"other")
    good = LoadResult("r", set(), "", 1, 0.1, 0.0)
    sync_load.verify([good], 2)
    assert all(map(sync_load.is_unverified, hashes)), "a rank has not reported"
    sync_load.apply_results("r", [good])
    ordered(sync_load, t)
    sync_load.verify([good, good], 2)
    assert not any(map(sync_load.is_unverified, hashes)), "before vLLM reads the output, which may end the request"
    sync_load.apply_results("r", [good])
    assert not any(map(sync_load.is_unverified, hashes))


def test_sync_load_that_a_rank_says_nothing_of_is_rolled_back(engine):
    """Once, before the output is read that was computed on it."""
    good = LoadResult("r", set(), "", 1, 0.1, 0.0)
    for results, ranks in (([], 1), ([good], 2), ([LoadResult("s", set(), "", 1, 0.1, 0.0)], 1)):
        evicted = []
        sync_load, t = make(engine, evicted=evicted), tracked()
        sync_load.verify(results, ranks)
        ordered(sync_load, t)
        sync_load.verify(results, ranks)
        assert evicted == [bytes(h) for h in t.request.block_hashes] and sync_load.verification_pending
        sync_load.verify(results, ranks)
        sync_load.apply_results("r", [LoadResult("r", {14}, "", 1, 0.1, 0.0)])
        assert len(evicted) == 4 and not sync_load.verification_pending
        ordered(sync_load, t)
        sync_load.verify([good] * ranks, ranks)
        assert len(evicted) == 4 and sync_load.verification_pending, "the next one is sound"


@pytest.mark.parametrize("bad", [21, 32, 99])
def test_sync_load_of_several_groups_is_kept_as_a_whole_or_not(engine, bad):
    """Blocks of 4, 8 and 4 tokens, of the second group only the last, from token 4 on."""
    evicted = []
    sync_load, t = make(engine, evicted=evicted), tracked()
    sync_load._pool.group_tokens = [4, 8, 4]
    t.positions = {0: np.array([1, 2, 3]), 1: np.array([1]), 2: np.array([2, 3])}
    loads = [(0, [12, 13, 14]), (1, [21]), (2, [31, 32])]
    groups = [GroupLoad(g, np.array(ids), np.zeros(len(ids), np.uint64), np.array(ids)) for g, ids in loads]
    sync_load.begin(t, LoadJob("r", groups, 60.0, "life"))
    sync_load.verify([LoadResult("r", {bad}, "", 1, 0.1, 0.0)], 1)
    assert evicted == [bytes(h) for h in t.request.block_hashes[1:]]


@pytest.mark.parametrize("bad, gone", [((), 4), ((11,), 0), ((14,), 3), ((13, 12), 1)])
def test_sync_load_bad_blocks_are_evicted(engine, bad, gone):
    """Nor is anything that was computed behind it."""
    evicted = []
    sync_load, t = make(engine, evicted=evicted), tracked()
    ordered(sync_load, t)
    results = [LoadResult("other", {11}, "", 1, 0.1, 0.0), LoadResult("r", set(bad), "", 1, 0.1, 0.0)]
    assert sync_load.verified(results[:1]) == set() and sync_load.verified(results) == {"r"}
    sync_load.apply_results("other", results)
    assert sync_load.verification_pending
    sync_load.apply_results("r", results)
    assert evicted == [bytes(h) for h in t.request.block_hashes[gone:]] and not sync_load.verification_pending
    assert sync_load.verified(results) == set()


def test_sync_load_bad_blocks_of_any_rank_count(engine):
    evicted = []
    sync_load, t = make(engine, evicted=evicted), tracked()
    ordered(sync_load, t)
    sync_load.apply_results("r", [LoadResult("r", {14}, "", 1, 0.1, 0.0), LoadResult("r", {12, 13}, "", 1, 0.1, 0.0)])
    assert evicted == [bytes(h) for h in t.request.block_hashes[1:]]


def test_sync_load_blocks_are_private_until_verified(engine):
    sync_load, t = make(engine, evicted=[]), tracked()
    held = sync_load._pool.held
    ordered(sync_load, t)
    assert held == [11, 12, 13, 14]
    sync_load.apply_results("r", [LoadResult("r", {12}, "", 1, 0.1, 0.0)])
    assert not held
    ordered(sync_load, t)
    held += [11, 12]
    sync_load.unpin()  # vLLM resets its prefix cache, in vain: the request has them
    sync_load.pin_again()
    assert sorted(held) == [11, 11, 12, 12, 13, 14]
    held[:] = held[:4]
    sync_load.unpin()
    assert not held
    sync_load.pin_again()
    assert held == [11, 12, 13, 14], "its verdict is still to come"
    sync_load.apply_results("r", [LoadResult("r", set(), "", 1, 0.1, 0.0)])
    assert not held
    sync_load.pin_again()
    assert not held


def test_sync_load_without_verification_result_is_bad(engine, monkeypatch, caplog):
    now = [100.0]
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    sync_load, t = make(engine, evicted=[]), tracked()
    assert sync_load.overdue() is None
    ordered(sync_load, t)
    now[0] += 60.0 + module.RESULT_GRACE_SECONDS - 1
    assert sync_load.overdue() is None
    now[0] += 1
    result = sync_load.overdue()
    assert (result.request_id, result.bad_blocks) == ("r", {11, 12, 13, 14}) and "never verified" in caplog.text


@pytest.mark.parametrize(
    "only, synchronous, flag, expected",
    [(True, False, True, False), (False, False, True, True), (False, False, False, False), (False, False, None, True)],
)
def test_sync_loads_of_other_connectors_are_unverified(bare, only, synchronous, flag, expected):  # noqa: F811
    """Before 0.29 (None) vLLM does not say whether a step has one."""
    half, seen = bare, []
    half._only_connector, half._provenance = only, SimpleNamespace(may_share=lambda state: True)
    half._info, half._pool = SimpleNamespace(groups=[(16, None)]), SimpleNamespace(free_count=lambda: 9)
    half._step_timer = SimpleNamespace(begin_step=lambda *_: None)
    half._tables = SimpleNamespace(
        each_block=False, begin_step=lambda output, get, unverified: seen.append(unverified) or []
    )
    half._exporter, half._offloader = SimpleNamespace(step=5, begin_step=lambda growth: []), None
    half._matcher.prefetching = False
    output = SimpleNamespace(num_scheduled_tokens={}, **({} if flag is None else {"has_sync_kv_loads": flag}))
    KVTierConnectorScheduler._follow(half, output, synchronous)
    assert seen == [expected]


def test_sync_load_blocks_are_not_stored_before_verification(bare):  # noqa: F811
    """And the step's time does not say how long computing takes."""
    half, seen = bare, {}
    half._run_jobs = lambda: None
    half._provenance = SimpleNamespace(may_share=lambda tracked: True)
    half._info = SimpleNamespace(unsupported=None, groups=[(16, None)])
    growth = [
        SimpleNamespace(
            computed=8,
            state=SimpleNamespace(
                life=SimpleNamespace(state=state), request=SimpleNamespace(request_id=state, num_computed_tokens=8)
            ),
        )
        for state in (State.LOCAL, State.VERIFYING, State.LOADED)
    ]
    half._matcher.get = {each.state.request.request_id: each.state for each in growth}.get
    half._questions, half._pool = SimpleNamespace(waiting=[]), SimpleNamespace(free_count=lambda: 9)
    half.has_pending_frees = lambda: False
    half._step_timer = SimpleNamespace(begin_step=lambda output, get, counts: seen.update(counts=counts))
    half._tables = SimpleNamespace(each_block=False, begin_step=lambda *_: growth)
    half._clearing = ChecksumClearing(print)
    half._exporter = SimpleNamespace(
        step=5, urgent=False, begin_step=lambda growth: seen.update(checksums_ready=growth) or []
    )
    half._offloader = SimpleNamespace(begin_step=lambda step, growth, needed, idle: seen.update(stored=growth))
    half._matcher.has_jobs, half._matcher.prefetching = lambda: False, False
    half._matcher.grown = []
    output = SimpleNamespace(num_scheduled_tokens={}, total_num_scheduled_tokens=0)
    others = [growth[0], growth[2]]
    for state, expected in (
        (State.VERIFYING, others), (State.LOADED, [growth[1], *growth]), (State.VERIFYING, others),
        (State.LOCAL, growth), (State.LOADED, growth),
    ):  # fmt: skip
        awaits, growth[1].state.life.state = state is State.VERIFYING, state
        half._sync_load = SimpleNamespace(verification_pending=awaits, drop_unverified_output=lambda: None,
                                           announce=lambda output: None)  # fmt: skip
        KVTierConnectorScheduler.begin_step(half, output)
        assert seen == {"counts": not awaits, "checksums_ready": expected, "stored": expected}


def test_reset_of_the_connector_forgets_what_is_to_be_followed_once_verified(bare):  # noqa: F811
    """Of other weights, it would be stored under the new namespace."""
    half = bare
    half._before_reset = half._after_reset = lambda: None
    half._contain, half._sharing, half._store = Uncontained(), None, SimpleNamespace(renew=lambda: None)
    half._tables = half._checksum_index = SimpleNamespace(clear=lambda: None)
    half._unverified = ("growth",)
    assert KVTierConnectorScheduler.reset(half) and not half._unverified
