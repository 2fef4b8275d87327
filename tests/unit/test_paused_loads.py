"""vLLM's own scheduler pauses while a load is under way: it steps until that has ended, and then resets its cache."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from test_engine_thread import BLOCK, KVTIER, engine, kvtier  # noqa: F401
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from vllm_kvtier.jobs.results import LoadResult, PullResult
from vllm_kvtier.jobs.transfer_jobs import FailedJob
from vllm_kvtier.scheduler.leases.pending_leases import FollowedLease, LeasedBlocks
from vllm_kvtier.scheduler.matching.request_lifecycle import Event
from vllm_kvtier.scheduler.sources.followed_prefill import _FollowedLookup
from vllm_kvtier.vllm_compat.connector_types import WorkerReport
from vllm_kvtier.wire import messages as m

PROMPT = 3 * BLOCK + 5


def step(scheduler, **connector_output):
    """Returns the tokens that are computed."""
    scheduled = scheduler.schedule()
    names = list(scheduled.num_scheduled_tokens)
    scheduler.update_from_output(
        scheduled,
        ModelRunnerOutput(
            req_ids=names, req_id_to_index={name: i for i, name in enumerate(names)},
            sampled_token_ids=[[7]] * len(names), logprobs=None, prompt_logprobs_dict={}, pooler_output=[],
            kv_connector_output=KVConnectorOutput(**connector_output),
        ),
    )  # fmt: skip
    return scheduled.total_num_scheduled_tokens


@pytest.fixture
def loading(engine, monkeypatch):  # noqa: F811
    """A core whose only request loads two blocks, in the pause state that it is called with."""
    core = engine(KVTIER)
    half = kvtier(core)._scheduler
    params = SamplingParams(max_tokens=1, ignore_eos=True)
    params.update_from_generation_config({}, 1)
    request = Request("r", list(range(PROMPT)), params, None, block_hasher=get_request_block_hasher(BLOCK, sha256))
    with monkeypatch.context() as once:
        once.setattr(half, "match", lambda request, computed: (half._matcher.track(request), (2 * BLOCK, True))[1])
        once.setattr(half, "allocated", partial(begin, half))
        core.add_request(request)
        assert step(core.scheduler) == 0
    return core, request


def begin(half, request, block_ids, external):
    """A load of no source, whose end the test reports."""
    state = half._matcher.get(request.request_id)
    state.counted = True
    state.life.fire(Event.LOOKUP)
    state.life.fire(Event.HIT)
    half.fail_load(request, block_ids, external)


@pytest.mark.parametrize("pause", [PauseState.PAUSED_ALL, PauseState.PAUSED_NEW])
@pytest.mark.parametrize("outcome", ["well", "failed", "failed later"])
def test_paused_engine_steps_until_load_has_ended_and_is_reset(loading, outcome, pause):
    core, request = loading
    scheduler, pool = core.scheduler, core.scheduler.kv_cache_manager.block_pool
    [blocks] = scheduler.kv_cache_manager.get_block_ids("r")
    scheduler.set_pause_state(pause)
    assert scheduler.has_requests()
    step(scheduler)
    assert scheduler.has_requests(), "it is under way still"
    failed = {"well": [], "failed": blocks[:1], "failed later": blocks[1:2]}[outcome]
    results = [LoadResult("r", set(failed), "hangs" if failed else "", 2, 0.1, 0.0)]
    step(
        scheduler, finished_recving={"r"}, invalid_block_ids=set(failed), kv_connector_worker_meta=WorkerReport(results)
    )
    while scheduler.has_requests():  # with PAUSED_NEW vLLM (0.31 on) computes what holds blocks
        step(scheduler)
    assert scheduler.reset_prefix_cache(reset_running_requests=True)
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
    scheduler.set_pause_state(PauseState.UNPAUSED)
    computed = 0
    while scheduler.has_unfinished_requests():
        computed += step(scheduler)
    assert computed in (0, PROMPT)


@pytest.mark.parametrize("session", [False, True])
@pytest.mark.parametrize("again", [False, True])
def test_request_that_waits_with_loaded_blocks_is_reset_in_a_pause(loading, again, session):
    """Its load has ended, and there are no blocks for what it computes. ``again``: other peers may have the rest."""
    core, request = loading
    request.resumable = session
    scheduler, pool = core.scheduler, core.scheduler.kv_cache_manager.block_pool
    step(scheduler, finished_recving={"r"})
    others = pool.get_new_blocks(pool.get_num_free_blocks())
    if again:
        kvtier(core)._scheduler._matcher.get("r").life.fire(Event.PREEMPT)
    assert step(scheduler) == 0 and request.num_computed_tokens == 2 * BLOCK
    pool.free_blocks(others)
    scheduler.set_pause_state(PauseState.PAUSED_ALL)
    assert not scheduler.has_requests() and scheduler.reset_prefix_cache(reset_running_requests=True)
    scheduler.set_pause_state(PauseState.UNPAUSED)
    assert step(scheduler) == PROMPT


def test_blocks_that_a_session_has_computed_stay_in_a_pause(loading):
    """Its workers may not get media again that end within them."""
    core, request = loading
    scheduler, request.resumable = core.scheduler, True
    step(scheduler, finished_recving={"r"})
    while step(scheduler):
        pass
    more = Request("r", [8] * BLOCK, request.sampling_params, None, resumable=True, block_hasher=request._block_hasher)
    core.add_request(more)
    scheduler.set_pause_state(PauseState.PAUSED_ALL)
    assert request.status is RequestStatus.WAITING and not scheduler.reset_prefix_cache()
    assert request.num_computed_tokens == PROMPT and scheduler.kv_cache_manager.get_block_ids("r")[0]


@pytest.mark.parametrize("bad", [False, True])
def test_paused_engine_steps_until_last_part_is_verified_and_is_reset(loading, bad):
    """The last part of a followed prefill came just before the pause, and the next step was to load it synchronously.
    vLLM made no step, so that its job never began, and could not reset its cache while the load held blocks."""
    core, request = loading
    scheduler, half, pool = core.scheduler, kvtier(core)._scheduler, core.scheduler.kv_cache_manager.block_pool
    step(scheduler)  # the first job
    state = half._matcher.get("r")
    half._sync_load.end(state, replace(state.job), {0: np.arange(2)}, half._matcher._jobs.append)
    scheduler.set_pause_state(PauseState.PAUSED_ALL)
    assert scheduler.has_requests()
    [blocks] = scheduler.kv_cache_manager.get_block_ids("r")
    results = [LoadResult("r", {blocks[1]} if bad else set(), "wrong" if bad else "", 2, 0.1, 0.0)]
    step(scheduler, kv_connector_worker_meta=WorkerReport(results))
    assert not half._matcher.has_jobs() and not half._sync_load.verification_pending
    assert not scheduler.has_requests() and scheduler.reset_prefix_cache(reset_running_requests=True)
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
    scheduler.set_pause_state(PauseState.UNPAUSED)
    assert step(scheduler) == PROMPT and "r" not in scheduler.requests


@pytest.fixture
def following(engine, monkeypatch):  # noqa: F811
    """A core whose only request follows a prefill that has granted its first block, and its jobs by step."""
    core, jobs = engine(KVTIER), []
    half = kvtier(core)._scheduler
    [source] = half._matcher._growing
    take = half._matcher.take_jobs
    monkeypatch.setattr(half._matcher, "take_jobs", lambda: (jobs.append(taken := take()), taken)[1])
    own = {"do_remote_prefill": True, "remote_host": "p", "remote_port": 1, "kvtier": {"export": "e", "follow": True}}
    params = SamplingParams(max_tokens=1, ignore_eos=True, extra_args={"kv_transfer_params": own})
    params.update_from_generation_config({}, 1)
    hasher = get_request_block_hasher(BLOCK, sha256)
    request = Request("r", list(range(PROMPT)), params, None, block_hasher=hasher)
    grant = LeasedBlocks(("p", 1), "p/1", 1, 0, BLOCK, [[5]], [], final=False, hash_block_size=BLOCK)
    asked = m.LeaseRequest(1, "", 0, [], follow=True)
    answer = FollowedLease(("p", 1), asked, 1e18, outcome=grant, grants=[grant])

    def match(request, computed):
        state = half._matcher.track(request)
        state.life.fire(Event.LOOKUP)
        state.life.fire(Event.HIT)
        state.counted, state.pending = True, _FollowedLookup(source, answer, state, 0, PROMPT)
        state.hit = source.read_answer(state.pending)
        return PROMPT, True

    released = []
    monkeypatch.setattr(source._lease_client, "release_export", lambda address, export: released.append(export))
    with monkeypatch.context() as once:
        once.setattr(half, "match", match)
        core.add_request(request)
        assert step(core.scheduler) == 0
    return core, request, jobs, released


@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize("reading", [False, True])
def test_pause_ends_load_that_waits_for_more_of_a_prefill(following, reading, reset):
    """The prefill's engine may be paused too: it answers heartbeats, and grants nothing for as long as it is."""
    core, request, jobs, released = following
    scheduler = core.scheduler
    read = {"kv_connector_worker_meta": WorkerReport([PullResult("r", set(), False, "", 2, 0.1)])}
    if not reading:
        step(scheduler, **read)
    scheduler.set_pause_state(PauseState.PAUSED_ALL)
    assert scheduler.has_requests()
    if reading:
        step(scheduler)
        assert len(jobs) == 1, "it ends when the read has"
        step(scheduler, **read)
        assert scheduler.has_requests()
    step(scheduler)
    [last] = jobs[1][0]
    rest = set(scheduler.kv_cache_manager.get_block_ids("r")[0][1:])
    assert isinstance(last, FailedJob) and last.all_blocks == rest
    report = WorkerReport([LoadResult("r", rest, last.reason, 0, 0.1, 0.0)])
    step(scheduler, finished_recving={"r"}, invalid_block_ids=rest, kv_connector_worker_meta=report)
    assert not scheduler.has_requests() and released == ["e"]
    if reset:
        assert scheduler.reset_prefix_cache(reset_running_requests=True)
    scheduler.set_pause_state(PauseState.UNPAUSED)
    assert step(scheduler) == (PROMPT if reset else PROMPT - BLOCK) and request.is_finished()


def test_engine_that_runs_is_not_kept_stepping_by_loads(loading):
    core, _ = loading
    assert not kvtier(core).has_pending_push_work()
