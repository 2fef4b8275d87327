"""What vLLM's own scheduler wants free before it gives a waiting request blocks, and what exports give back."""

import time
from functools import partial
from types import SimpleNamespace

import pytest
from test_engine_thread import BLOCK, KVTIER, engine, kvtier  # noqa: F401
from test_matching_models import Peers
from test_paused_loads import begin, step
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.request import Request

from vllm_kvtier.jobs.results import LoadResult
from vllm_kvtier.scheduler.leases.exports import Export, GroupBlocks, LeaseKind
from vllm_kvtier.scheduler.matching.request_lifecycle import Event, State
from vllm_kvtier.vllm_compat import requests
from vllm_kvtier.vllm_compat.connector_types import WorkerReport
from vllm_kvtier.vllm_compat.hooks.admission import NEEDED, Admission
from vllm_kvtier.vllm_compat.probe.features import release

WATERMARK = 8
PREFILLED = {"do_remote_prefill": True, "remote_host": "a", "remote_port": 1, "remote_request_id": "kvtier/e"}
RETAINED = {**PREFILLED, "do_remote_prefill": False, "do_remote_decode": True}


def ask(name, tokens, first, generate=1, resumable=False, **params):
    params = SamplingParams(max_tokens=generate, ignore_eos=True, **params)
    params.update_from_generation_config({}, 1)
    return Request(name, [first, *range(1, tokens)], params, None, resumable=resumable,
                   block_hasher=get_request_block_hasher(BLOCK, sha256))  # fmt: skip


def export(half, count, kind=LeaseKind.RETAINED):
    """``count`` blocks of a request that has ended."""
    ids = [block.block_id for block in half.pool.get_new_blocks(count)]
    made = Export(
        id="e", kind=kind, tokens=count * BLOCK, block_hashes=[b"%032d" % i for i in range(count)], digest=b"",
        lora_fingerprint=b"", groups=[GroupBlocks(BLOCK, ids)], pinned=ids, ready_step=-1,
        deadline=time.monotonic() + 480,
    )  # fmt: skip
    assert half._exports.add(made)


@pytest.fixture
def half(engine, monkeypatch):  # noqa: F811
    """Of an engine that loads as many tokens as ``half.loads`` says of a request."""
    core = engine({**KVTIER, "kv_connector_extra_config": {"store": "off", "bidirectional": True, "retain_share": 0.9}})
    half = kvtier(core)._scheduler
    half.core, half.loads, half.asked = core, {}, []
    half.pool = core.scheduler.kv_cache_manager.block_pool
    match, allocated = half._matcher.match, half.allocated

    def matched(request, computed):
        half.asked.append(request.request_id)
        if request.request_id not in half.loads:
            return match(request, computed)
        state = half._matcher.track(request)
        if state.life.state is State.LOCAL:
            state.life.fire(Event.PREEMPT)  # offered again
        return half.loads[request.request_id], True

    def given(request, block_ids, external):
        (partial(begin, half) if external else allocated)(request, block_ids, external)

    monkeypatch.setattr(half._matcher, "match", matched)
    monkeypatch.setattr(half, "allocated", given)
    return half


def load_fails(half, name, first=0):
    """From its block ``first`` on. vLLM asks again if nothing was loaded."""
    [blocks] = half.core.scheduler.kv_cache_manager.get_block_ids(name)
    step(
        half.core.scheduler, finished_recving={name}, invalid_block_ids={blocks[first]},
        kv_connector_worker_meta=WorkerReport([LoadResult(name, {blocks[first]}, "gone", 2, 0.1, 0.0)]),
    )  # fmt: skip


@pytest.mark.parametrize("watermark", [0, WATERMARK])
def test_retained_blocks_give_way_to_watermark(half, watermark):
    """With --watermark vLLM admits a request beside others only if more is free than it takes. Exports gave back what
    it takes, and the queue stood for ``retain_seconds``."""
    scheduler = half.core.scheduler
    scheduler.kv_cache_manager.watermark_blocks = watermark
    half.core.add_request(ask("runs", 10 * BLOCK, 500, generate=20))
    step(scheduler)
    export(half, 20)
    half.core.add_request(ask("waits", 4 * BLOCK - 3, 600))
    step(scheduler)
    assert "waits" not in scheduler.requests, "it had its one token"
    assert half._exports.counts()["exports"] == (not watermark), "it is kept where there is room for both"


@pytest.mark.parametrize("watermark", [0, WATERMARK])
def test_retained_blocks_give_way_to_watermark_of_request_whose_load_has_ended(half, watermark):
    scheduler = half.core.scheduler
    scheduler.kv_cache_manager.watermark_blocks = watermark
    half.core.add_request(ask("runs", 8 * BLOCK, 500, generate=20))
    half.loads["loads"] = 4 * BLOCK
    half.core.add_request(ask("loads", 6 * BLOCK, 600))
    step(scheduler)
    export(half, half.pool.get_num_free_blocks() - 8)
    step(scheduler, finished_recving={"loads"},
         kv_connector_worker_meta=WorkerReport([LoadResult("loads", set(), "", 2, 0.1, 0.0)]))  # fmt: skip
    step(scheduler)
    step(scheduler)
    assert "loads" not in scheduler.requests and half._exports.counts()["exports"] == (not watermark)


def test_retained_blocks_give_way_to_session_that_goes_on(half):
    """A session with its blocks, and all requests behind it, waited for ``retain_seconds``."""
    scheduler = half.core.scheduler
    half.core.add_request(ask("session", 4 * BLOCK, 500, resumable=True))
    step(scheduler)
    export(half, half.pool.get_num_free_blocks() - 5)
    half.core.add_request(ask("idle", BLOCK, 600, generate=9))
    step(scheduler)
    assert half._exports.counts()["exports"] == 1, "it waits for input, not for blocks"
    half.core.add_request(ask("session", 6 * BLOCK, 700, resumable=True))
    half.core.add_request(ask("behind", 9, 800))
    step(scheduler)
    step(scheduler)
    assert scheduler.requests["session"].num_computed_tokens == 10 * BLOCK and "behind" not in scheduler.requests
    assert not half._exports.counts()["exports"]


def test_retained_blocks_give_way_to_request_whose_load_failed_in_part(half):
    """It goes on behind what was loaded, and may be loaded from another peer once it is preempted."""
    scheduler = half.core.scheduler
    half.loads["loads"] = 4 * BLOCK
    half.core.add_request(ask("loads", 12 * BLOCK, 500))
    step(scheduler)
    export(half, half.pool.get_num_free_blocks() - 2)
    load_fails(half, "loads", first=2)
    half._matcher.get("loads").life.fire(Event.PREEMPT)
    half.core.add_request(ask("behind", 9, 600))
    step(scheduler)
    step(scheduler)
    assert half.asked == ["loads", "behind"] and not {"loads", "behind"} & set(scheduler.requests)
    assert not half._exports.counts()["exports"]


def test_retained_blocks_give_way_to_request_that_another_connector_loaded(half, monkeypatch):
    scheduler = half.core.scheduler
    half.core.add_request(ask("loads", 12 * BLOCK, 500))
    with monkeypatch.context() as once:
        once.setattr(scheduler.connector, "get_num_new_matched_tokens", lambda request, computed: (2 * BLOCK, True))
        once.setattr(scheduler.connector, "update_state_after_alloc", lambda *_: None)
        step(scheduler)
    export(half, half.pool.get_num_free_blocks() - 2)
    step(scheduler, finished_recving={"loads"})
    step(scheduler)
    step(scheduler)
    assert not half.asked and "loads" not in scheduler.requests and not half._exports.counts()["exports"]


def test_retained_blocks_give_way_to_private_request(half, monkeypatch):
    """One whose LoRA adapter is not identified, or a session up to vLLM 0.31. It waited for ``retain_seconds``, and all
    requests behind it."""
    monkeypatch.setattr(half._provenance, "admit", lambda *_: False)
    export(half, 10)
    half.core.add_request(ask("private", 30 * BLOCK + 3, 500))
    half.core.add_request(ask("behind", 9, 600))
    step(half.core.scheduler)
    assert not half.core.scheduler.requests and not half._exports.counts()["exports"]


def test_retained_blocks_give_way_to_load_beside_which_vllm_wants_some_for_drafts(half, monkeypatch):
    """Exports kept those, and the queue, for ``retain_seconds``."""
    scheduler, method = half.core.scheduler, (0, 31, 0) <= release() < (0, 32, 0)
    monkeypatch.setattr(scheduler, "_spec_decode_step_blocks", (lambda: 9) if method else 9, raising=False)
    export(half, 20)
    half.loads["r"] = 15 * BLOCK
    half.core.add_request(ask("r", 15 * BLOCK + 5, 500))
    step(scheduler)
    step(scheduler)
    assert len(scheduler.kv_cache_manager.get_block_ids("r")[0]) == 15
    assert half._exports.counts()["exports"] == (release() < (0, 31, 0))


@pytest.mark.parametrize("others, kept", [(["second"], 18), (["second", "third"], 0)])
def test_load_that_is_offered_again_waits_behind_those_that_have_their_blocks(half, others, kept):
    """A load fails in the step in which others end. It is offered again at once, from elsewhere, and vLLM does not
    admit it while it keeps the rest of the others' blocks free: each waited for the other. ``kept``: blocks of an
    export."""
    scheduler, half.loads = half.core.scheduler, {"first": 2 * BLOCK, **dict.fromkeys(others, 5 * BLOCK)}
    half.core.add_request(ask("first", 3 * BLOCK, 500))
    for i, name in enumerate(others):
        half.core.add_request(ask(name, 20 * BLOCK, 501 + i))
    step(scheduler)
    if kept:
        export(half, kept)
    [blocks] = scheduler.kv_cache_manager.get_block_ids("first")
    results = [LoadResult("first", {blocks[0]}, "gone", 2, 0.1, 0.0)]
    results += [LoadResult(name, set(), "", 2, 0.1, 0.0) for name in others]
    step(scheduler, finished_recving=set(half.loads), invalid_block_ids={blocks[0]},
         kv_connector_worker_meta=WorkerReport(results))  # fmt: skip
    half.core.add_request(ask("behind", 9, 600))
    for _ in range(5):
        step(scheduler)
    assert list(scheduler.requests) == ["first"] and len(scheduler.kv_cache_manager.get_block_ids("first")[0]) == 2


def test_watermark_keeps_nothing_for_the_only_request(half):
    scheduler = half.core.scheduler
    scheduler.kv_cache_manager.watermark_blocks = WATERMARK
    export(half, 26)
    half.core.add_request(ask("r", 9 * BLOCK - 3, 600))
    step(scheduler)
    assert "r" not in scheduler.requests and half._exports.counts()["exports"] == 1


def test_load_that_failed_is_offered_again_and_has_its_blocks(half):
    """vLLM counted the blocks that the failed load was to get beside those that it got now: 45 of 39."""
    scheduler = half.core.scheduler
    half.loads["r"] = 22 * BLOCK
    half.core.add_request(ask("r", 22 * BLOCK + 5, 500))
    assert step(scheduler) == 0
    load_fails(half, "r")
    half.core.add_request(ask("behind", BLOCK, 600))
    assert step(scheduler) == BLOCK
    assert half.asked == ["r", "r", "behind"] and len(scheduler.kv_cache_manager.get_block_ids("r")[0]) == 22


def test_load_that_a_reset_took_back_keeps_no_blocks_from_others(half):
    """vLLM counted its blocks for the request that came to stand before it."""
    scheduler = half.core.scheduler
    half.loads = {"dropped": 22 * BLOCK}
    half.core.add_request(ask("dropped", 22 * BLOCK + 5, 500))
    step(scheduler)
    scheduler.set_pause_state(PauseState.PAUSED_ALL)
    step(scheduler, finished_recving={"dropped"},
         kv_connector_worker_meta=WorkerReport([LoadResult("dropped", set(), "", 2, 0.1, 0.0)]))  # fmt: skip
    assert scheduler.reset_prefix_cache(reset_running_requests=True)
    assert scheduler._inflight_prefill_reserved_blocks() == 0
    scheduler.set_pause_state(PauseState.UNPAUSED)
    step(scheduler)
    assert len(scheduler.kv_cache_manager.get_block_ids("dropped")[0]) == 22


@pytest.mark.parametrize("version", [(0, 30, 0), (0, 31, 0)])
def test_request_that_vllm_admits_without_an_answer_is_not_skipped(half, monkeypatch, version):
    """One that reads no prefix cache. It counted among those that a step may skip; later it counted nowhere, although
    vLLM up to 0.30 does skip it."""
    skipped, computed = [], BLOCK if release() >= (0, 31, 0) else 0
    monkeypatch.setattr(requests, "release", lambda: version)
    first, second = (1, 2) if version >= (0, 31, 0) else (2, 4 if computed else 5)
    monkeypatch.setattr(half._engine.waiting_loop, "skipped", lambda *at: skipped.append(at))
    monkeypatch.setattr(half._matcher, "match", lambda request, computed: (half._matcher.track(request), (None, 0))[1])
    half.core.add_request(ask("reads nothing", BLOCK, 500, prompt_logprobs=1))
    half.core.add_request(ask("reads", BLOCK, 600))
    assert step(half.core.scheduler) == computed and len(skipped) == first
    monkeypatch.setattr(half._provenance, "admit", lambda *_: None)
    half.core.add_request(ask("nor does this", BLOCK, 500, prompt_logprobs=1))
    assert step(half.core.scheduler) == computed and len(skipped) == second


@pytest.mark.parametrize("params", [PREFILLED, RETAINED], ids=["hand-off", "retained"])
@pytest.mark.parametrize("drafts, loads", [(0, True), (8, True), (9, False)])
def test_load_that_fits_only_without_drafts_is_computed(half, monkeypatch, params, drafts, loads):
    """vLLM gives an asynchronous load its blocks only if those for a step's drafts are free beside it: 31 and 9 of 39.
    The queue stood for a minute and more."""
    scheduler, peers, allocated = half.core.scheduler, Peers(half._geometry.groups), []
    for name in ("ask", "known", "cancel", "release", "release_export"):
        monkeypatch.setattr(half._peers, name, getattr(peers, name))
    monkeypatch.setattr(peers, "release_export", lambda address, export: None)
    monkeypatch.setattr(half, "allocated", lambda request, blocks, external: allocated.append(external))
    method = (0, 31, 0) <= release() < (0, 32, 0)
    monkeypatch.setattr(scheduler, "_spec_decode_step_blocks", (lambda: drafts) if method else drafts, raising=False)
    request = ask("r", 32 * BLOCK - 3, 500)
    request.kv_transfer_params = params
    half.core.add_request(request)
    assert step(scheduler) == 0
    peers.grant(31 * BLOCK)
    computed = step(scheduler)
    assert allocated == [31 * BLOCK if loads else 0] and bool(computed) is not loads
    assert bool(peers.released) is not loads


def test_blocks_for_drafts_are_read_from_each_release():
    admission = Admission()
    assert admission.draft_blocks() == 0
    needed = dict.fromkeys(NEEDED)
    for found, blocks in ({}, 0), ({"_spec_decode_step_blocks": lambda: 9}, 9), ({"_spec_decode_step_blocks": 9}, 9):
        admission.install(SimpleNamespace(**needed, **found))  # up to 0.30, of 0.31, since 0.32
        assert admission.draft_blocks() == blocks


@pytest.mark.parametrize("lacking", ["num_lookahead_tokens", "num_spec_tokens", "_inflight_prefills", "waiting"])
def test_scheduler_of_the_user_s_own_is_left_alone(lacking):
    """vLLM's ``--scheduler-cls``. Each match raised, and the connector was switched off."""
    admission, manager = Admission(), SimpleNamespace(watermark_blocks=2)
    has = {**dict.fromkeys(NEEDED, 0), "running": [1], "waiting": [], "kv_cache_manager": manager}
    request = ask("r", BLOCK, 0)
    own = SimpleNamespace(**{name: value for name, value in has.items() if name != lacking}, skipped_waiting=[request])
    admission.install(own)
    assert admission.asked_for(request) == admission.draft_tokens() == admission.reserved_blocks() == 0
    assert not admission.kept_free() and not any(admission.queues)


@pytest.mark.parametrize("kind", [LeaseKind.RETAINED, LeaseKind.HANDOFF])
def test_blocks_of_exports_are_no_request_s(half, kind):
    context = half._matcher._context
    export(half, 20, kind)
    assert context.no_request_has_blocks()
    half.core.add_request(ask("runs", BLOCK, 500, generate=3))
    step(half.core.scheduler)
    assert not context.no_request_has_blocks()
    half._exports.clear()  # its blocks are freed when they are unpinned
    step(half.core.scheduler)
    step(half.core.scheduler)
    assert "runs" not in half.core.scheduler.requests and context.no_request_has_blocks()
