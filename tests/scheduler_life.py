"""Loads that a step waits for, among others, under vLLM's own schedulers: random lives of an engine.

The real KVTierConnectorScheduler, Matcher and SyncLoad; a store that answers on command, some of whose blocks are
bad; a small pool, so that requests are preempted; and a model runner whose "KV" of a token is a hash of all that it
reads from the blocks before it. So whatever is computed on a block that holds anything else changes all that is
generated. Of a group with states a block holds the state behind its last token.
"""

import random
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from cache_groups import cache_groups
from matcher_harness import GROUPS, HASH_BLOCK_SIZE, World
from source_fakes import bare_identity, load_results
from support import Uncontained
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, SupportsHMA
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
)
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
from vllm_kvtier.vllm_compat.connector_types import StepMetadata, WorkerReport, results_of
from vllm_kvtier.vllm_compat.hooks import rollback
from vllm_kvtier.vllm_compat.hooks.admission import Admission
from vllm_kvtier.vllm_compat.hooks.block_pool import BlockPool
from vllm_kvtier.vllm_compat.hooks.waiting_loop import LoadedFirst, WaitingLoop
from vllm_kvtier.vllm_compat.probe.features import granted
from vllm_kvtier.vllm_compat.probe.row import Feature

sys.path.insert(0, str(Path(__file__).parent / "unit"))

synchronous_loads = pytest.mark.skipif(not granted(Feature.SYNC_LOADS), reason="this vLLM's forward waits for no load")

BLOCKS = {"full": 30, "windows": 44, "states": 44}
WORDS = 50  # of the vocabulary


class Connector(KVConnectorBase_V1, SupportsHMA):
    """A façade, as KVTierConnector; ``half`` comes later."""

    half = None
    get_num_new_matched_tokens = lambda self, request, computed: self.half.match(request, computed)  # noqa: E731

    def on_new_request(self, request):
        pass

    def update_state_after_alloc(self, request, blocks, external):
        self.half.allocated(request, blocks.get_block_ids(), external)

    def build_connector_meta(self, output):
        return StepMetadata(self.half.begin_step(output))

    def verify(self, output):
        self.half._sync_load.verify(results_of(output), self.ranks())

    def update_connector_output(self, output):
        report = output.kv_connector_worker_meta
        self.half.arrived(report.results if report else [], set(output.finished_recving or ()))

    def request_finished(self, request, block_ids):
        self.half._matcher.finished(request)
        return False, None

    def request_finished_all_groups(self, request, block_ids):
        return self.request_finished(request, block_ids)

    def get_kv_connector_stats(self):
        self.half.end_step()

    start_load_kv = wait_for_layer_load = save_kv_layer = wait_for_save = lambda self, *_, **__: None


def fold(cells, token):
    return hash((tuple(cells), token)) & 0xFFFFFFFF


def read_from(kind, at):
    """The first cell that the cell of token ``at`` is computed from, in a group of this kind."""
    if not kind.by_position:
        return max(0, at - 1)
    return 0 if kind.window is None else max(0, at - kind.window + 1)


def truth(kinds, tokens, count):
    """(the cells of this prompt by group, what is generated behind it)."""
    cells, tokens = [[] for _ in kinds], list(tokens)
    for i in range(len(tokens) + count):
        if i == len(tokens):
            tokens.append(word([each[-1] for each in cells]))
        for kind, each in zip(kinds, cells, strict=True):
            each.append(fold(each[read_from(kind, i) :], tokens[i]))
    return cells, tokens


def word(cells):
    return sum(cells) % WORDS


def has_synchronous(step):
    return getattr(step, "has_sync_kv_loads", False)  # from 0.29 on


class Runner:
    """Model runner and worker side: a step runs when it is scheduled."""

    def __init__(self, life):
        self.life, self.requests = life, {}
        self.cells = [[None] * HASH_BLOCK_SIZE for _ in range(life.blocks)]
        self.loading = []  # asynchronous loads under way

    def run(self, step):
        self._update(step)
        for name, count in step.num_scheduled_tokens.items():
            self._move_states(self.requests[name], count)
        work = step.kv_connector_metadata.work
        results, done, bad, failed = self._loads([*work.loads, *work.failed, *work.fetches, *work.pulls])
        sampled = {name: self._compute(name, count) for name, count in step.num_scheduled_tokens.items()}
        names = list(sampled)
        report = WorkerReport(results) if results else None
        if len(self.life.groups) > 1:
            kv = KVConnectorOutput(finished_recving=done or None, kv_connector_worker_meta=report)
            kv.failed_recving = failed
        else:
            kv = KVConnectorOutput(
                invalid_block_ids=bad, finished_recving=done or None, kv_connector_worker_meta=report
            )
        return ModelRunnerOutput(
            req_ids=names, req_id_to_index={name: i for i, name in enumerate(names)},
            sampled_token_ids=[sampled[name] for name in names], logprobs=None, prompt_logprobs_dict={},
            pooler_output=[], kv_connector_output=kv,
        )  # fmt: skip

    def _update(self, step):
        for name in step.finished_req_ids:
            self.requests.pop(name, None)
        for new in step.scheduled_new_reqs:
            tokens = getattr(new, "prefill_token_ids", None) or new.prompt_token_ids
            tables = [list(ids) for ids in new.block_ids]
            self.requests[new.req_id] = SimpleNamespace(tokens=list(tokens), tables=tables, place=None)
            self.requests[new.req_id].computed = new.num_computed_tokens
        cached = step.scheduled_cached_reqs
        for i, name in enumerate(cached.req_ids):
            request, resumed = self.requests[name], name in cached.resumed_req_ids
            if name in cached.all_token_ids:
                request.tokens = list(cached.all_token_ids[name])
            blocks = cached.new_block_ids[i] or [[] for _ in request.tables]
            if resumed:
                request.tables, request.place = [[] for _ in blocks], None
            for ids, more in zip(request.tables, blocks, strict=True):
                ids += more
            request.computed = cached.num_computed_tokens[i]

    def _move_states(self, request, count):
        """As ``mamba_utils.preprocess_mamba``, before a connector is called: on to the block that the step changes."""
        before, last = request.place, (request.computed + count - 1) // HASH_BLOCK_SIZE
        if before is None and request.computed:
            before = (request.computed - 1) // HASH_BLOCK_SIZE
        request.place = last
        for kind, ids in zip(self.life.kinds, request.tables, strict=True):
            if not kind.by_position and before not in (None, last):
                self.cells[ids[last]] = list(self.cells[ids[before]])

    def _compute(self, name, count):
        request, end = self.requests[name], self.requests[name].computed + count
        lasts = []
        for kind, ids in zip(self.life.kinds, request.tables, strict=True):
            for at in range(request.computed, end):
                first = read_from(kind, at)
                if kind.by_position:
                    cell = fold([self._cell(ids, i) for i in range(first, at)], request.tokens[at])
                    self._write(ids, at, cell)
                else:
                    block = ids[request.place]
                    cell = fold([self.cells[block][0]] * bool(at), request.tokens[at])
                    self.cells[block] = [cell] * HASH_BLOCK_SIZE
            lasts.append(cell)
        if end < len(request.tokens):
            return []
        assert end == len(request.tokens), f"{name} computes unknown tokens"
        request.tokens.append(word([hash(cell) for cell in lasts]))
        return [request.tokens[-1]]

    def _cell(self, ids, at):
        return self.cells[ids[at // HASH_BLOCK_SIZE]][at % HASH_BLOCK_SIZE]

    def _write(self, ids, at, cell):
        assert ids[at // HASH_BLOCK_SIZE], "vLLM gave no block"
        self.cells[ids[at // HASH_BLOCK_SIZE]][at % HASH_BLOCK_SIZE] = cell

    def _loads(self, orders):
        results, done, bad, failed = [], set(), set(), set()
        for order in orders:
            if order.synchronous:
                results.append(self._load(order))
                for _, source, target in order.state_copies:
                    self.cells[target] = list(self.cells[source])
            else:
                self.loading.append(order)
        for order in list(self.loading):
            if self.life.rng.random() < 0.4:
                self.loading.remove(order)
                results.append(self._load(order))
                done.add(order.request_id)
                bad |= results[-1].bad_blocks
                failed |= {order.request_id} if results[-1].bad_blocks else set()
        return results, done, bad, failed

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
    def __init__(self, make, seed, contain=None, hurries=True, kinds="full", **options):
        """``hurries``: whether loads are synchronous where they can be. ``kinds``: of ``matcher_harness.GROUPS``."""
        self.groups, self.blocks = cache_groups(GROUPS[kinds]), BLOCKS[kinds]
        self.kinds = [kind for _, kind in self.groups]
        self.rng, contain, self.hurries = random.Random(seed), contain or Uncontained(), hurries
        most = 100.0 if hurries else 0.0  # ms
        self.scheduler = scheduler = make(kinds=kinds, **options)
        self.ahead = 2 if options["asynchronous"] else 1
        sizes = [size for size, _ in self.groups]
        self.pool = pool = BlockPool(scheduler.kv_cache_manager.block_pool, group_tokens=sizes)
        self.world = world = World(
            GROUPS[kinds],
            make_hurry=lambda planner: SyncLoad(most, 60.0, pool, lambda: scheduler, scheduler.connector, planner),
        )
        world.load.engine.pool.free_count = pool.free_count
        world.planner.observe_load = world.planner.observe_handover = lambda *_: None
        self.half = half = KVTierConnectorScheduler.__new__(KVTierConnectorScheduler)
        half._engine = SimpleNamespace(paused_scheduler=None, waiting_loop=WaitingLoop(), admission=Admission())
        loaded = LoadedFirst(contain)
        loaded.install(scheduler)
        half._engine.admission.install(scheduler, loaded.queue)
        half._info = SimpleNamespace(unsupported=None, groups=self.groups, followed=lambda ids: ids)
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
        if granted(Feature.SYNC_LOADS):
            rollback.before_output(scheduler, contain, scheduler.connector.verify)
        ranks = random.Random(seed)
        scheduler.connector.ranks = lambda: 1 + (ranks.random() < 0.1)  # more: one of them says nothing
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

    def events(self):
        """What happens, and how often."""
        return {self.new: 3, self.store_answers: 4, self.step: 12, self.abort: 0.3, self.reset: 0.6}

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
        cells, all_tokens = truth(self.kinds, tokens, request.max_tokens)
        if stored:
            count = len(tokens) // HASH_BLOCK_SIZE * HASH_BLOCK_SIZE
            self.world.store(request, count)
            for g, kind in enumerate(self.kinds):
                for i in range(count // HASH_BLOCK_SIZE):
                    slot = self.world.stored[g, self.world.hash(request, g, i)]
                    block = cells[g][i * HASH_BLOCK_SIZE : (i + 1) * HASH_BLOCK_SIZE]
                    self.content[slot] = block if kind.by_position else [block[-1]] * HASH_BLOCK_SIZE
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
        assert self.pool.free_count() == self.blocks - 1 and not self.half._sync_load.verification_pending
        self.world.balanced()


def scheduler_maker(root):
    """Makes vLLM's schedulers, for ``Life``."""
    from test_rollback import config

    def scheduler(asynchronous, priority, budget, kinds):
        settings = config(root, asynchronous, "recompute", False)
        settings.kv_transfer_config.kv_connector_module_path = __name__
        settings.cache_config.block_size, settings.cache_config.num_gpu_blocks = HASH_BLOCK_SIZE, BLOCKS[kinds]
        settings.scheduler_config.policy = "priority" if priority else "fcfs"
        settings.scheduler_config.max_num_batched_tokens = budget
        if kinds == "states":
            settings.cache_config.mamba_cache_mode = "align"
        fields = dict(
            block_size=HASH_BLOCK_SIZE, num_kv_heads=1, head_size=8, dtype=settings.model_config.dtype
        )
        others = {
            "windows": lambda: SlidingWindowSpec(sliding_window=6, **fields),
            "states": lambda: MambaSpec(
                block_size=HASH_BLOCK_SIZE, shapes=((2, 4),), dtypes=(torch.float32,), mamba_cache_mode="align"
            ),
        }
        specs = [FullAttentionSpec(**fields)] + ([others[kinds]()] if kinds in others else [])
        caches = [KVCacheGroupSpec([f"layer {g}"], spec) for g, spec in enumerate(specs)]
        return (AsyncScheduler if asynchronous else Scheduler)(
            vllm_config=settings, kv_cache_config=KVCacheConfig(BLOCKS[kinds], [], caches),
            structured_output_manager=StructuredOutputManager(settings), block_size=HASH_BLOCK_SIZE,
            hash_block_size=HASH_BLOCK_SIZE, log_stats=True,
        )  # fmt: skip

    init_none_hash(sha256)
    return scheduler


@pytest.fixture
def make(root):
    return scheduler_maker(root)


def live(make, names, made=Life, **options):
    """Live 30 random lives. Each of ``names`` must happen in at least one."""
    total = dict.fromkeys(names, 0)
    for seed in range(30):
        life = made(make, seed, **options)
        events = life.events()
        for _ in range(250):
            life.rng.choices(list(events), list(events.values()))[0]()
        life.end()
        for name in total:
            total[name] += getattr(life, name)
    assert min(total.values()) > 0, total


