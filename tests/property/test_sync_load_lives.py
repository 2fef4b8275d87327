"""Loads that a step waits for, among others, under vLLM's own schedulers: random lives of an engine.

The real KVTierConnectorScheduler, Matcher and SyncLoad; a store that answers on command, some of whose blocks are
bad; a small pool, so that requests are preempted; and a model runner whose "KV" of a token is a hash of all that it
reads from the blocks before it. So whatever is computed on a block that holds anything else changes all that is
generated.
"""

import random
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from matcher_harness import HASH_BLOCK_SIZE, ONE, World
from source_fakes import bare_identity, load_results
from support import Uncontained
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from vllm_kvtier.jobs.results import LoadResult
from vllm_kvtier.jobs.transfer_jobs import FailedJob
from vllm_kvtier.scheduler.connector_scheduler import KVTierConnectorScheduler
from vllm_kvtier.scheduler.integrity.checksum_clearing import ChecksumClearing
from vllm_kvtier.scheduler.integrity.sync_load import SyncLoad
from vllm_kvtier.scheduler.matching.provenance import Provenance
from vllm_kvtier.scheduler.matching.request_lifecycle import State
from vllm_kvtier.vllm_compat.connector_types import StepMetadata, WorkerReport
from vllm_kvtier.vllm_compat.hooks.admission import Admission
from vllm_kvtier.vllm_compat.hooks.block_pool import BlockPool
from vllm_kvtier.vllm_compat.hooks.waiting_loop import LoadedFirst, WaitingLoop
from vllm_kvtier.vllm_compat.probe.features import granted
from vllm_kvtier.vllm_compat.probe.row import Feature

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))

synchronous_loads = pytest.mark.skipif(not granted(Feature.SYNC_LOADS), reason="this vLLM's forward waits for no load")

LOADED_FIRST = hasattr(Scheduler, "_select_waiting_queue_for_scheduling")  # up to 0.30
BLOCKS = 30
WORDS = 50  # of the vocabulary


class Connector(KVConnectorBase_V1):
    """A façade, as KVTierConnector; ``half`` comes later."""

    half = None
    get_num_new_matched_tokens = lambda self, request, computed: self.half.match(request, computed)  # noqa: E731

    def on_new_request(self, request):
        pass

    def update_state_after_alloc(self, request, blocks, external):
        self.half.allocated(request, blocks.get_block_ids(), external)

    def build_connector_meta(self, output):
        return StepMetadata(self.half.begin_step(output))

    def update_connector_output(self, output):
        report = output.kv_connector_worker_meta
        self.half.arrived(report.results if report else [], set(output.finished_recving or ()))

    def request_finished(self, request, block_ids):
        self.half._matcher.finished(request)
        return False, None

    def get_kv_connector_stats(self):
        self.half.end_step()

    start_load_kv = wait_for_layer_load = save_kv_layer = wait_for_save = lambda self, *_, **__: None


def fold(cells, token):
    return hash((tuple(cells), token)) & 0xFFFFFFFF


def truth(tokens, count):
    """(the cells of this prompt, what is generated behind it)."""
    cells, tokens = [], list(tokens)
    for i in range(len(tokens) + count):
        if i == len(tokens):
            tokens.append(cells[-1] % WORDS)
        cells.append(fold(cells, tokens[i]))
    return cells, tokens


def has_synchronous(step):
    return getattr(step, "has_sync_kv_loads", False)  # from 0.29 on


class Runner:
    """Model runner and worker side: a step runs when it is scheduled."""

    def __init__(self, life):
        self.life, self.states = life, {}
        self.cells = [[None] * HASH_BLOCK_SIZE for _ in range(BLOCKS)]
        self.loading = []  # asynchronous loads under way

    def run(self, step):
        for name in step.finished_req_ids:
            self.states.pop(name, None)
        for new in step.scheduled_new_reqs:
            tokens = getattr(new, "prefill_token_ids", None) or new.prompt_token_ids
            self.states[new.req_id] = SimpleNamespace(tokens=list(tokens), blocks=list(new.block_ids[0]))
            self.states[new.req_id].computed = new.num_computed_tokens
        cached = step.scheduled_cached_reqs
        for i, name in enumerate(cached.req_ids):
            state = self.states[name]
            if name in cached.all_token_ids:
                state.tokens = list(cached.all_token_ids[name])
            blocks = cached.new_block_ids[i][0] if cached.new_block_ids[i] else []
            state.blocks = list(blocks) if name in cached.resumed_req_ids else state.blocks + list(blocks)
            state.computed = cached.num_computed_tokens[i]
        work = step.kv_connector_metadata.work
        results, done, bad = self._loads([*work.loads, *work.failed, *work.fetches, *work.pulls])
        sampled = {name: self._compute(name, count) for name, count in step.num_scheduled_tokens.items()}
        names = list(sampled)
        report = WorkerReport(results) if results else None
        kv = KVConnectorOutput(invalid_block_ids=bad, finished_recving=done or None, kv_connector_worker_meta=report)
        return ModelRunnerOutput(
            req_ids=names, req_id_to_index={name: i for i, name in enumerate(names)},
            sampled_token_ids=[sampled[name] for name in names], logprobs=None, prompt_logprobs_dict={},
            pooler_output=[], kv_connector_output=kv,
        )  # fmt: skip

    def _compute(self, name, count):
        state = self.states[name]
        before = [self.cells[state.blocks[i // HASH_BLOCK_SIZE]][i % HASH_BLOCK_SIZE] for i in range(state.computed)]
        for at in range(state.computed, state.computed + count):
            before.append(fold(before, state.tokens[at]))
            self.cells[state.blocks[at // HASH_BLOCK_SIZE]][at % HASH_BLOCK_SIZE] = before[at]
        end = state.computed + count
        if end < len(state.tokens):
            return []
        assert end == len(state.tokens), f"{name} computes unknown tokens"
        state.tokens.append(self.cells[state.blocks[(end - 1) // HASH_BLOCK_SIZE]][(end - 1) % HASH_BLOCK_SIZE] % WORDS)
        return [state.tokens[-1]]

    def _loads(self, orders):
        results, done = [], set()
        for order in orders:
            if order.synchronous:
                results.append(self._load(order))
            else:
                self.loading.append(order)
        for order in list(self.loading):
            if self.life.rng.random() < 0.4:
                self.loading.remove(order)
                results.append(self._load(order))
                done.add(order.request_id)
        return results, done, {block for result in results for block in result.bad_blocks}

    def _load(self, order):
        if isinstance(order, FailedJob):
            return LoadResult(order.request_id, order.all_blocks, "failed", 0, 0.001, 0.0)
        bad = self._copy(order, [(load.blocks, load.slots) for load in order.groups], 0.5)
        return LoadResult(order.request_id, bad, "", 100, 0.001, 0.0, [(0, 1)] * bool(bad))

    def _copy(self, order, groups, spoilt):
        """Fill blocks from slots, with a chance of ``spoilt`` some with garbage: these blocks."""
        rng, bad = self.life.rng, set()
        spoils = rng.random() < spoilt
        for blocks, slots in groups:
            for block, slot in zip(blocks.tolist(), slots.tolist(), strict=True):
                self.cells[block] = list(self.life.content[slot])
                if spoils and rng.random() < 0.3:
                    self.cells[block] = ["garbage"] * HASH_BLOCK_SIZE
                    bad.add(block)
        self.life.bad += bool(bad) and order.synchronous is self.life.hurries
        return bad


class Life:
    def __init__(self, make, seed, contain=None, hurries=True, **options):
        """``hurries``: whether loads are synchronous where they can be."""
        self.rng, contain, self.hurries = random.Random(seed), contain or Uncontained(), hurries
        most = 100.0 if hurries else 0.0  # ms
        self.scheduler = scheduler = make(**options)
        self.ahead = 2 if options["asynchronous"] else 1
        self.pool = pool = BlockPool(scheduler.kv_cache_manager.block_pool)
        self.world = world = World(
            ONE, make_hurry=lambda planner: SyncLoad(most, 60.0, pool, lambda: scheduler, scheduler.connector, planner)
        )
        world.planner.observe_load = world.planner.observe_handover = lambda *_: None
        self.half = half = KVTierConnectorScheduler.__new__(KVTierConnectorScheduler)
        half._engine = SimpleNamespace(paused_scheduler=None, waiting_loop=WaitingLoop(), admission=Admission())
        loaded = LoadedFirst(contain)
        loaded.install(scheduler)
        half._engine.admission.install(scheduler, loaded.queue)
        half._info = SimpleNamespace(unsupported=None, groups=ONE, followed=lambda ids: ids)
        half._contain, half._passive = contain, False
        half._matcher, half._sync_load, half._pool = world.matcher, world.sync_load, pool
        half._outcomes = load_results(world.load, world.matcher, contain)
        half._run_jobs, half._provenance = lambda: None, Provenance(pool)
        half._geometry = world.load.engine.geometry
        half._identity = bare_identity(namespace=object())
        half._offloader = half._sharing = half._events = half._store = None
        half._clearing = ChecksumClearing(print)
        half._exporter = SimpleNamespace(
            begin_step=lambda growth: [], step=1, urgent=False, drain=lambda: None,
            release_for_requests=lambda needed: None,
        )  # fmt: skip
        half._tables = SimpleNamespace(
            each_block=False, look_at_each_block=lambda _: None, begin_step=lambda *_: [], end_step=lambda: None,
        )
        half._questions, half._reactor = SimpleNamespace(waiting=[]), SimpleNamespace(call_soon=lambda job: None)
        half._step_timer = SimpleNamespace(begin_step=lambda *_, **__: None, end_step=lambda: None)
        half._exports = SimpleNamespace(clear=lambda: None, revoke=lambda seconds: None, has_freed=lambda: False)
        half._checksum_index, half._gauges = SimpleNamespace(clear=lambda: None), SimpleNamespace(refresh=lambda: None)
        pool.around_reset(half._before_reset, half._after_reset, half._contain)
        scheduler.connector.half = half
        scheduler.requires_kv_delivery = self.rng.random() < 0.5  # what is in flight of the preempted is dropped
        self.runner, self.flying = Runner(self), []
        self.content, self.live, self.expected, self.got, self.made = {}, {}, {}, {}, 0
        self.taken = []
        self.synchronous = self.among = self.bad = self.preempted = self.resets = self.in_flight = self.early = 0
        self.roots = [[self.rng.randrange(WORDS) for _ in range(60)] for _ in range(4)]
        self._watch_the_others()

    def _watch_the_others(self):
        """vLLM takes tokens only from requests whose loads failed."""
        update, scheduler = self.scheduler._update_requests_with_invalid_blocks, self.scheduler

        def updated(requests, invalid, *args, **kwargs):
            found = update(requests, invalid, *args, **kwargs)
            for name in found[0]:
                t = self.world.matcher.get(name)
                assert t.life.state in (State.VERIFYING, State.LOADING), f"{name} has nothing to do with that load"
            return found

        scheduler._update_requests_with_invalid_blocks = updated

    # -- what happens ----------------------------------------------------------------------------------------------

    def new(self):
        if len(self.live) >= 7:
            return
        rng = self.rng
        self.made += 1
        tokens = rng.choice(self.roots)[: rng.randint(0, 44)] if rng.random() < 0.5 else []
        tokens = tokens + [rng.randrange(WORDS) for _ in range(rng.randint(1, 9 if tokens else 50))]
        params = SamplingParams(max_tokens=rng.choice([1, 2, 7, 30]), ignore_eos=True, temperature=0.0)
        if rng.random() < 0.1:
            params.skip_reading_prefix_cache = True  # as prompt log-probabilities do
        params.update_from_generation_config({}, 1)
        request = Request(
            f"r{self.made}", tokens, params, None, block_hasher=get_request_block_hasher(HASH_BLOCK_SIZE, sha256),
            priority=rng.randrange(3),
        )  # fmt: skip
        self._add(request, rng.random() < 0.7)

    def add(self, tokens, count, stored=False):
        self.made += 1
        params = SamplingParams(max_tokens=count, ignore_eos=True, temperature=0.0)
        params.update_from_generation_config({}, 1)
        hasher = get_request_block_hasher(HASH_BLOCK_SIZE, sha256)
        request = Request(f"r{self.made}", tokens, params, None, block_hasher=hasher)
        self._add(request, stored)
        return request

    def _add(self, request, stored):
        tokens = list(request.prompt_token_ids)
        cells, all_tokens = truth(tokens, request.max_tokens)
        if stored:
            count = len(tokens) // HASH_BLOCK_SIZE * HASH_BLOCK_SIZE
            self.world.store(request, count)
            for i in range(count // HASH_BLOCK_SIZE):
                slot = self.world.stored[0, self.world.hash(request, 0, i)]
                self.content[slot] = cells[i * HASH_BLOCK_SIZE : (i + 1) * HASH_BLOCK_SIZE]
        self.live[request.request_id] = request
        self.expected[request.request_id], self.got[request.request_id] = all_tokens[len(tokens) :], []
        self.scheduler.add_request(request)

    def store_answers(self):
        for pending in list(self.world.client.open):
            if self.rng.random() < 0.8:
                self.world.answer(pending)

    def squeeze(self):
        """Others take all that is free, or give it back: a request that needs a block has another one preempted."""
        pool = self.scheduler.kv_cache_manager.block_pool
        if self.taken:
            taken, self.taken = self.taken, []
            pool.free_blocks(taken)
        elif (self.half._sync_load.verification_pending or not self.hurries) and self.rng.random() < 0.5:
            self.taken = pool.get_new_blocks(pool.get_num_free_blocks())

    def step(self):
        self.world.planner.short_load_seconds = self.rng.random() < 0.95
        if len(self.flying) < self.ahead:
            step, output = self.schedule()
            self.flying.append((step, output))
            trouble = 0.6 * has_synchronous(step) if self.hurries else 0.2 * bool(self.runner.loading)
            if self.rng.random() < trouble:
                self.rng.choice([self.squeeze, self.squeeze, self.reset, self.abort])()
            elif self.taken:
                self.squeeze()
        if len(self.flying) == self.ahead or self.rng.random() < 0.3:
            self.output()

    def schedule(self):
        step = self.scheduler.schedule()
        work = step.kv_connector_metadata.work
        synchronous = [order for order in (*work.loads, *work.failed, *work.fetches) if order.synchronous]
        assert bool(synchronous) == has_synchronous(step) and len(synchronous) <= self.hurries
        self.synchronous += len(synchronous)
        self.among += bool(synchronous) and len(step.num_scheduled_tokens) > 1
        self.preempted += len(step.preempted_req_ids or ())
        awaited = self.half._sync_load._unverified
        self.early += awaited is not None and awaited.request.status is RequestStatus.PREEMPTED
        assert set(step.num_scheduled_tokens) <= set(self.live)
        return step, self.runner.run(step)

    def output(self):
        if not self.flying:
            return
        step, output = self.flying.pop(0)
        for each in self.scheduler.update_from_output(step, output).values():
            for one in each.outputs:
                self.got[one.request_id] += one.new_token_ids
                if one.finish_reason is not None:
                    assert one.finish_reason.name == "LENGTH"
                    assert self.got[one.request_id] == self.expected[one.request_id]
                    self.live.pop(one.request_id)
        for name, tokens in self.got.items():
            assert tokens == self.expected[name][: len(tokens)], f"{name} got wrong tokens"

    def abort(self):
        if self.live:
            name = self.rng.choice(list(self.live))
            self.live.pop(name)
            self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def reset(self):
        """With those that run, unless another request holds blocks: then vLLM raises."""
        scheduler = self.scheduler
        held = self.taken or self.runner.loading or (getattr(scheduler, "defer_block_free", False) and self.flying)
        held = held or any(
            each.status is RequestStatus.WAITING_FOR_REMOTE_KVS
            or (each.status is not RequestStatus.RUNNING and each.num_computed_tokens)
            for each in scheduler.requests.values()
        )
        running = not held and self.rng.random() < 0.7
        running = running and not hasattr(next(iter(scheduler.requests.values()), None), "async_tokens_to_discard")
        self.in_flight += running and self.half._sync_load.verification_pending
        self.resets += scheduler.reset_prefix_cache(reset_running_requests=running)

    def end(self):
        scheduler = self.scheduler
        for _ in range(400):
            if not (self.live or self.flying or scheduler.requests or scheduler.finished_req_ids):
                break
            self.store_answers()
            self.step()
            if self.taken:
                self.squeeze()
        assert not self.live, "it hangs"
        assert self.pool.free_count() == BLOCKS - 1 and not self.half._sync_load.verification_pending
        self.world.balanced()


@pytest.fixture
def make(root):
    from test_rollback import config

    def scheduler(asynchronous, priority, budget):
        settings = config(root, asynchronous, "recompute", False)
        settings.kv_transfer_config.kv_connector_module_path = __name__
        settings.cache_config.block_size, settings.cache_config.num_gpu_blocks = HASH_BLOCK_SIZE, BLOCKS
        settings.scheduler_config.policy = "priority" if priority else "fcfs"
        settings.scheduler_config.max_num_batched_tokens = budget
        spec = FullAttentionSpec(
            block_size=HASH_BLOCK_SIZE, num_kv_heads=1, head_size=8, dtype=settings.model_config.dtype
        )
        return (AsyncScheduler if asynchronous else Scheduler)(
            vllm_config=settings, kv_cache_config=KVCacheConfig(BLOCKS, [], [KVCacheGroupSpec(["layer"], spec)]),
            structured_output_manager=StructuredOutputManager(settings), block_size=HASH_BLOCK_SIZE,
            hash_block_size=HASH_BLOCK_SIZE,
            log_stats=True,
        )  # fmt: skip

    init_none_hash(sha256)
    return scheduler


def live(make, names, **options):
    total = dict.fromkeys(names, 0)
    for seed in range(30):
        life = Life(make, seed, **options)
        events = {life.new: 3, life.store_answers: 4, life.step: 12, life.abort: 0.3, life.reset: 0.6}
        for _ in range(250):
            life.rng.choices(list(events), list(events.values()))[0]()
        life.end()
        for name in total:
            total[name] += getattr(life, name)
    assert min(total.values()) > 0, total


@synchronous_loads
@pytest.mark.parametrize("budget", [16, 1024])
@pytest.mark.parametrize("priority", [False, True])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_sync_load_never_returns_wrong_token_or_hangs(make, asynchronous, priority, budget):
    """Whatever is preempted, aborted, reset and bad. ``budget``: tokens of a step; small: prompts go in several."""
    names = ["synchronous", "among", "bad", "preempted", "resets"] + ["early", "in_flight"] * asynchronous
    live(make, names, asynchronous=asynchronous, priority=priority, budget=budget)


@pytest.mark.parametrize("budget", [16, 1024])
@pytest.mark.parametrize("priority", [False, True])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_asynchronous_load_never_returns_wrong_token_or_hangs(make, asynchronous, priority, budget):
    options = dict(asynchronous=asynchronous, priority=priority, budget=budget)
    live(make, ["bad", "preempted", "resets"], hurries=False, **options)


@pytest.mark.parametrize("priority", [False, True])
def test_request_answered_late_does_not_block_those_loaded_meanwhile(make, priority):
    """It needs the blocks that they hold, and stands before them in the queue."""
    life = Life(make, 1, hurries=False, asynchronous=False, priority=priority, budget=1024)
    ended = []
    life.rng.random = lambda: 0.3 if ended else 0.9  # loads end when they may, and are good
    first, *others = (life.add([n] * tokens, 3, stored=True) for n, tokens in ((1, 46), (2, 41), (3, 41)))

    def step(count):
        for _ in range(count):
            life.flying.append(life.schedule())
            life.output()

    step(1)
    late, *in_time = list(life.world.client.open)
    for pending in in_time:
        life.world.answer(pending)
    step(1)
    assert {order.request_id for order in life.runner.loading} == {request.request_id for request in others}
    life.world.answer(late)
    step(1)
    assert life.pool.free_count() < len(first.block_hashes)
    ended.append(True)
    step(30)
    assert not life.live


class Sessions:
    """Streaming sessions beside requests whose loads end from ``loads_end`` on, and are good."""

    def __init__(self, make, priority):
        self.life = Life(make, 1, hurries=False, asynchronous=False, priority=priority, budget=1024)
        self.scheduler, self.loads_end = self.life.scheduler, False
        self.life.rng.random = lambda: 0.3 if self.loads_end else 0.9

    def turn(self, name, tokens, count):
        params = SamplingParams(max_tokens=count, ignore_eos=True, temperature=0.0)
        params.update_from_generation_config({}, 1)
        hasher = get_request_block_hasher(HASH_BLOCK_SIZE, sha256)
        self.scheduler.add_request(Request(name, tokens, params, None, block_hasher=hasher, resumable=True))

    def load(self, count, stored):
        """Have a request of ``count`` tokens load the first ``stored`` of them."""
        request, world = self.life.add([2] * count, 2), self.life.world
        world.store(request, stored)
        for i in range(stored // HASH_BLOCK_SIZE):
            self.life.content[world.stored[0, world.hash(request, 0, i)]] = [0] * HASH_BLOCK_SIZE
        self.steps(3)
        assert request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
        return request

    def steps(self, count):
        """The tokens that were scheduled."""
        total = 0
        for _ in range(count):
            for pending in list(self.life.world.client.open):
                self.life.world.answer(pending)
            step = self.scheduler.schedule()
            total += step.total_num_scheduled_tokens
            self.scheduler.update_from_output(step, self.life.runner.run(step))
        return total

    def end(self, *names):
        self.scheduler.finish_requests(names, RequestStatus.FINISHED_ABORTED)
        self.steps(60)
        assert not self.scheduler.requests and self.life.pool.free_count() == BLOCKS - 1


@pytest.mark.skipif(LOADED_FIRST, reason="vLLM's own order of requests stops there")
@pytest.mark.parametrize("idle", [False, True])
@pytest.mark.parametrize("priority", [False, True])
def test_loaded_request_that_lacks_blocks_lets_sessions_go_on(make, priority, idle):
    """They hold these blocks. From 0.31 on it stands before them, as it was loaded; ``idle``: behind an idle one."""
    engine = Sessions(make, priority)
    if idle:
        engine.turn("idle", [8] * 3, 1)
        engine.steps(4)
    engine.turn("session", [1] * 16, 8)
    engine.steps(12)
    request = engine.load(76, 8)
    engine.turn("session", [3] * 4, 30)
    engine.steps(40)
    engine.loads_end = True
    engine.steps(5)
    assert request.num_computed_tokens and request.status is RequestStatus.WAITING
    engine.turn("session", [4] * 2, 3)
    short = engine.life.add([9] * 3, 2)
    assert engine.steps(60) >= 7 and short.is_finished()
    engine.end("session", *["idle"] * idle)


@pytest.mark.parametrize("priority", [False, True])
def test_loaded_request_behind_a_session_that_lacks_its_blocks_gives_them_back(make, priority):
    engine = Sessions(make, priority)
    engine.turn("session", [1] * 16, 8)
    engine.steps(12)
    engine.load(70, 60)
    engine.turn("session", [3] * 50, 3)
    engine.steps(10)
    engine.loads_end = True
    short = engine.life.add([9] * 3, 2)
    assert engine.steps(60) > 50 and short.is_finished()
    engine.end("session")


@pytest.mark.parametrize("priority", [False, True])
def test_two_loaded_requests_that_drafts_leave_no_block_for_go_on_one_by_one(make, priority):
    """Up to 0.30 vLLM does not reserve blocks for drafts. Nothing but the two waits."""
    engine = Sessions(make, priority)
    engine.scheduler.num_lookahead_tokens = 4
    first = engine.load(76, 8)
    second = engine.life.add([3] * 44, 2)
    world = engine.life.world
    world.store(second, 40)
    for i in range(40 // HASH_BLOCK_SIZE):
        engine.life.content[world.stored[0, world.hash(second, 0, i)]] = [0] * HASH_BLOCK_SIZE
    engine.steps(3)
    engine.loads_end = True
    engine.steps(80)
    assert first.is_finished() and second.is_finished()
    engine.end()


@pytest.mark.parametrize("ahead", [0, 6])
def test_exports_end_for_the_blocks_of_drafts_of_more_than_a_block(make, ahead):
    """What is free suffices for the prompt and one block more. An export holds the rest."""
    engine = Sessions(make, False)
    engine.scheduler.num_lookahead_tokens = ahead
    prompt, pool = [5] * 95, engine.life.pool
    exported = engine.scheduler.kv_cache_manager.block_pool.get_new_blocks(pool.free_count() - 24 - 1)

    def end_exports(needed):
        engine.scheduler.kv_cache_manager.block_pool.free_blocks(exported)
        exported.clear()

    engine.life.half._exporter.release_for_requests = end_exports
    request = engine.life.add(prompt, 2)
    engine.steps(100)
    assert request.is_finished()
    end_exports(0)
    engine.end()


def until_hurried(life, others=()):
    """A request whose load the step waits for that has just been scheduled, beside ``others``."""
    for tokens, count in others:
        life.add(tokens, count)
    life.world.planner.short_load_seconds = True
    for _ in range(4):  # all of them run
        life.flying.append(life.schedule())
        life.output()
    request = life.add([7] * 18, 5, stored=True)
    for _ in range(4):
        life.flying.append(life.schedule())
        if life.half._sync_load.verification_pending:
            return request
        for pending in list(life.world.client.open):
            life.world.answer(pending)
        life.output()
    raise AssertionError("it was not synchronous")


@synchronous_loads
def test_reset_hides_blocks_until_verified(make):
    """One that fails because requests run, and one that takes their blocks: vLLM goes by the blocks' ids, and others
    may be given them before the verdict comes."""
    life = Life(make, 1, asynchronous=True, priority=False, budget=1024)
    life.scheduler.defer_block_free = False
    request = until_hurried(life, [([1, 2, 3], 20)])
    pool = life.scheduler.kv_cache_manager.block_pool
    (held,) = life.scheduler.kv_cache_manager.get_block_ids(request.request_id)
    assert not life.scheduler.reset_prefix_cache()
    assert [pool.blocks[block].ref_cnt for block in held] == [2, 2, 2, 2, 1]
    assert life.scheduler.reset_prefix_cache(reset_running_requests=True)
    assert [pool.blocks[block].ref_cnt for block in held] == [1, 1, 1, 1, 0]
    life.end()


@synchronous_loads
@pytest.mark.parametrize("asynchronous", [False, True])
def test_sync_load_late_verification_result_does_not_block_a_step(make, asynchronous):
    """As when the engine's processes were stopped for a while: what a step has scheduled is not taken out of it."""
    life = Life(make, 2, asynchronous=asynchronous, priority=False, budget=1024)
    request = until_hurried(life, [([1, 2, 3], 20)])
    life.half._sync_load._until = 0.0
    life.add([5] * 9, 3)  # is matched in the next step
    if asynchronous:
        life.flying.append(life.schedule())
    assert request.status is RequestStatus.RUNNING
    life.end()


@synchronous_loads
@pytest.mark.parametrize("asynchronous", [False, True])
def test_sync_load_of_several_short_hits_waits_for_its_own(make, asynchronous):
    """Nobody is matched before a verdict: one after the other, each would take the steps of all before it."""
    life = Life(make, 3, asynchronous=asynchronous, priority=False, budget=1024)
    until_hurried(life, [([1, 2, 3], 20)])
    life.output()
    life.rng.random = lambda: 0.3  # loads end in the step after the one that begins them, and are good
    crowd = [life.add([10 + i] * 9, 1, stored=True) for i in range(5)]
    steps = 0
    while any(request.request_id in life.live for request in crowd):
        steps += 1
        life.flying.append(life.schedule())
        for pending in list(life.world.client.open):
            life.world.answer(pending)
        while len(life.flying) == life.ahead:
            life.output()
    assert steps <= 5 + asynchronous, "asked, loaded, computed"
    life.end()
