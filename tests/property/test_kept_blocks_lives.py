"""What is kept of requests under vLLM's own schedulers: stored, exported and leased blocks hold what their hash says.

The real parts of the scheduler side that follow block tables (KVTierConnectorScheduler, BlockTables, Offloader,
ExportBuilder, PrefixCacheLeases) with vLLM's block pool and KV cache manager; a simulated store, workers and model. The
model knows the content of each cell: the tokens that its KV depends on. Drafts that were rejected leave wrong cells.
"""

import random
import sys
import zlib
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from cache_groups import cache_groups
from offloader_fakes import FakeReactor, FakeTier
from offloader_harness import Engine as Offload
from source_fakes import bare_identity, load_context, make_matcher
from support import Uncontained
from test_internal_error_lives import Raiser
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, SupportsHMA
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from vllm_kvtier.config import KVTierConfig
from vllm_kvtier.connector import KVTierConnector
from vllm_kvtier.containment import Containment
from vllm_kvtier.scheduler.connector_scheduler import KVTierConnectorScheduler
from vllm_kvtier.scheduler.integrity.checksum_clearing import ChecksumClearing
from vllm_kvtier.scheduler.integrity.checksum_index import ChecksumIndex, ContentKeys
from vllm_kvtier.scheduler.integrity.sync_load import SyncLoad
from vllm_kvtier.scheduler.leases.export_builder import ExportBuilder
from vllm_kvtier.scheduler.leases.exports import ExportTable, Lease, LeaseKind
from vllm_kvtier.scheduler.leases.prefix_cache_leases import PrefixCacheLeases
from vllm_kvtier.scheduler.matching.provenance import Provenance
from vllm_kvtier.scheduler.offload.block_tables import BlockTables
from vllm_kvtier.scheduler.offload.offloader import Offloader
from vllm_kvtier.store.protocol import HASH_BYTES
from vllm_kvtier.telemetry.stats import Counters
from vllm_kvtier.vllm_compat.connector_types import StepMetadata
from vllm_kvtier.vllm_compat.hooks import rollback
from vllm_kvtier.vllm_compat.hooks.admission import Admission
from vllm_kvtier.vllm_compat.hooks.block_pool import BlockPool
from vllm_kvtier.vllm_compat.hooks.scheduler_lock import SchedulerLock
from vllm_kvtier.vllm_compat.probe.features import granted
from vllm_kvtier.vllm_compat.probe.row import Feature
from vllm_kvtier.wire import messages as m

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))

pytestmark = pytest.mark.skipif(
    not granted(Feature.SYNC_LOADS), reason="its model runner is that of vLLM 0.29 and later"
)

HASH_BLOCK_SIZE, BLOCKS, WORDS = 4, 60, 5
KEYS = ContentKeys(0x51A7)
GROUPS = {
    "full": [(4, None)],
    "windows": [(4, None), (4, 9)],
    "wide": [(4, None), (4, 22)],
    "sizes": [(8, None), (4, 9)],
}


class Connector(KVConnectorBase_V1, SupportsHMA):
    half = None
    on_new_request = lambda self, request: None  # noqa: E731
    get_num_new_matched_tokens = lambda self, request, computed: self.half.match(request, computed)  # noqa: E731
    has_pending_block_frees = lambda self: self.half.frees_blocks()  # noqa: E731
    start_load_kv = wait_for_layer_load = save_kv_layer = wait_for_save = lambda self, *_, **__: None

    def update_state_after_alloc(self, request, blocks, external):
        self.half.allocated(request, blocks.get_block_ids(), external)

    def get_kv_connector_stats(self):
        self.half.end_step()

    def build_connector_meta(self, output):
        return StepMetadata(self.half.begin_step(output))

    def update_connector_output(self, output):
        pass

    def request_finished(self, request, block_ids):
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(self, request, block_ids):
        return False, self.half.finished(request, block_ids)


def next_token(salt, tokens):
    return zlib.crc32(repr((salt, *tokens)).encode()) % WORDS


class Life(Offload):
    """The store and the workers are those of tests/offloader_harness.py."""

    sessions = 0.3  # share of the requests that may go on with more input

    def __init__(self, make, groups, seed, *, share=0.5, lot=16, write="all", contain=None, **options):
        self.rng = rng = random.Random(seed)
        self.groups = groups = cache_groups(groups)
        self.scheduler, self.drafts = make(groups, **options), options.get("drafts", 0)
        self.asynchronous, self.ahead = options["asynchronous"], 2 if options["asynchronous"] else 1
        self.full = {g for g, group in enumerate(groups) if group.kind.whole_prefix}
        self.fake = self.scheduler.kv_cache_manager.block_pool
        self.pool = pool = BlockPool(self.fake)
        self.reactor, self.counters = FakeReactor(), Counters()
        self.tier = FakeTier([{0} if g % 2 else {0, 1} for g in range(len(groups))], self.full)
        self.orders, self.given, self.woken = {0: [], 1: []}, {}, 0
        self.copies = self.restarts = self.step_number = 0
        self.content = [[None] * 8 for _ in range(BLOCKS)]
        self.meaning = {}
        self.checksums = {}  # block -> (key, valid, content)
        self.states, self.flying, self.live, self.made = {}, [], {}, 0
        self.leased, self.checked, self.ended_well = [], 0, 0
        half = self.half = KVTierConnectorScheduler.__new__(KVTierConnectorScheduler)
        half._engine = SimpleNamespace(paused_scheduler=None, admission=Admission())
        half._engine.admission.install(self.scheduler)
        rollback.evict_uncomputed(self.scheduler, contain or Uncontained())
        config = KVTierConfig(bidirectional=True, store_inflight_share=share, store_write=write)
        index = ChecksumIndex([size for size, _ in groups])
        facts = {"step_tokens": 8, "followed": lambda ids: ids, "group_ids": None, "tensor_parallel": 1}
        load = load_context(
            groups, HASH_BLOCK_SIZE, config=config, keys=KEYS, counters=self.counters, reactor=self.reactor, pool=pool,
            checksum_index=index, sync_load=SyncLoad(0.0, 60.0, pool, lambda: None, None, None), info=facts,
        )  # fmt: skip
        budget = {LeaseKind.HANDOFF: 20, LeaseKind.RETAINED: 16, LeaseKind.PEER_FETCH: 12}
        exports = ExportTable(HASH_BLOCK_SIZE, budget, align=load.engine.geometry.alignment // HASH_BLOCK_SIZE)
        lock = SchedulerLock(contain or Uncontained())
        lock.install(self.scheduler)
        half._info, half._config, half._pool = load.engine.info, config, pool
        half._geometry = load.engine.geometry
        self.contain = half._contain = contain or Uncontained()
        half._passive, half._identity = False, bare_identity(namespace=object())
        half._checksum_index, half._exports = index, exports
        half._clearing = ChecksumClearing(lambda message: None)
        half._exporter = ExportBuilder(load.engine, exports, index, lambda: self.shared)
        half._stretches = SimpleNamespace(possible=False)
        half._matcher, half._sync_load = make_matcher(load), load.sync_load
        half._offloader = Offloader(load.engine, self.tier, self.told, self.wake, lambda block_hash: False)
        half._tables = BlockTables(
            groups,
            HASH_BLOCK_SIZE,
            index.remove,
            lambda t: half._provenance.is_admitted(t) and (write != "off" or half._exporter.checksums(t)),
            lot=lot,
        )
        half._provenance = Provenance(pool)
        half._access, half._endpoint = SimpleNamespace(closed=False), SimpleNamespace(changed=lambda: None)
        half._sharing = half._events = half._store = None
        half._questions = SimpleNamespace(waiting=[], run=lambda: None)
        half._step_timer = SimpleNamespace(begin_step=lambda *_, **__: None, end_step=lambda: None)
        half._gauges = SimpleNamespace(refresh=lambda: None)
        pool.around_reset(half._before_reset, half._after_reset, half._contain)
        self.offloader, self.tables, self.index = half._offloader, half._tables, index
        self.offloader.cancel_all = lambda seconds, real=self.offloader.cancel_all: real(0.0)
        index.publish(0)
        self.shared = True
        self.lender = PrefixCacheLeases(load.engine, lock, index, exports)
        self.scheduler.connector.half = half
        self.roots = [[rng.randrange(WORDS) for _ in range(80)] for _ in range(3)]

    # -- requests ----------------------------------------------------------------------------------------------------

    def new(self, tokens=None, count=None, salt=None, name=None):
        if len(self.live) >= 6 and tokens is None:
            return
        rng = self.rng
        self.made += 1
        if tokens is None:
            tokens = rng.choice(self.roots)[: rng.randint(0, 30)] if rng.random() < 0.7 else []
            tokens = tokens + [rng.randrange(WORDS) for _ in range(rng.randint(1, 12))]
            count, salt = rng.choice([1, 3, 20, 50]), rng.choice([None, None, "tenant"])
        # vLLM keeps drafts that were accepted behind the end of a turn.
        session = name is not None or (not self.drafts and rng.random() < self.sessions)
        extra = {"kv_transfer_params": {"do_remote_decode": True}} if rng.random() < 0.2 else None
        params = SamplingParams(max_tokens=count, ignore_eos=True, temperature=0.0, extra_args=extra)
        params.update_from_generation_config({}, 1)
        make = lambda name, tokens: Request(  # noqa: E731
            name, list(tokens), params, None, block_hasher=get_request_block_hasher(HASH_BLOCK_SIZE, sha256),
            cache_salt=salt, priority=rng.randrange(3), resumable=session,
        )  # fmt: skip
        fresh = len(tokens)
        if name is not None:
            before = self.scheduler.requests[name]
            tokens = before._all_token_ids[: before.num_computed_tokens] + tokens
        whole = list(tokens)
        for _ in range(count):
            whole.append(next_token(salt, whole))
        for i, full in enumerate(make("all", whole).block_hashes):
            self.meaning[bytes(full)[:HASH_BYTES]] = bytes(full), (salt, *whole[: (i + 1) * HASH_BLOCK_SIZE])
        if name is not None:
            self.live[name].whole = whole
            self.scheduler.add_request(make(name, tokens[-fresh:]))
            return
        request = make(f"r{self.made}", tokens)
        request.whole = whole
        self.live[request.request_id] = request
        self.scheduler.add_request(request)

    def refuse(self):
        if self.live:
            self.half._provenance.refuse(self.rng.choice(list(self.live.values())))

    def share(self):
        self.shared = not self.shared
        if self.shared:
            self.index.publish(0)
        else:
            self.index.conceal()

    def abort(self):
        if self.live:
            name = self.rng.choice(list(self.live))
            self.live.pop(name)
            self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def reset(self):
        deferred = getattr(self.scheduler, "defer_block_free", False) and self.flying
        self.half._exports.clear()
        self.release_leases()
        # A session that waits for more input keeps its blocks.
        deferred = deferred or any(
            each.status is not RequestStatus.RUNNING and each.num_computed_tokens
            for each in self.scheduler.requests.values()
        )
        running = not deferred and not self.offloader.pinned and self.rng.random() < 0.5
        try:
            self.scheduler.reset_prefix_cache(reset_running_requests=running)
        except RuntimeError:
            assert self.offloader.pinned

    # -- steps -------------------------------------------------------------------------------------------------------

    def step(self):
        if len(self.flying) < self.ahead:
            step = self.scheduler.schedule()
            self.flying.append((step, self.run(step)))
            self.check()
        if len(self.flying) == self.ahead or self.rng.random() < 0.3:
            self.output()

    def run(self, step):
        for name in step.finished_req_ids:
            self.states.pop(name, None)
        for new in step.scheduled_new_reqs:
            tokens = getattr(new, "prefill_token_ids", None) or new.prompt_token_ids
            self.states[new.req_id] = SimpleNamespace(
                tokens=list(tokens), blocks=[list(ids) for ids in new.block_ids], valid=new.num_computed_tokens,
                computed=new.num_computed_tokens, salt=self.scheduler.requests[new.req_id].cache_salt,
            )  # fmt: skip
        cached = step.scheduled_cached_reqs
        for i, name in enumerate(cached.req_ids):
            state = self.states[name]
            if name in cached.all_token_ids:
                state.tokens = list(cached.all_token_ids[name])
            state.computed, new = cached.num_computed_tokens[i], cached.new_block_ids[i] or [[] for _ in self.groups]
            if name in cached.resumed_req_ids:
                state.blocks, state.valid = [list(ids) for ids in new], state.computed
            else:
                for ids, more in zip(state.blocks, new, strict=True):
                    ids += more
        work = step.kv_connector_metadata.work
        self.step_number = self.half._exporter.step
        drafts = step.scheduled_spec_decode_tokens
        sampled = {name: self.compute(name, n, drafts.get(name, [])) for name, n in step.num_scheduled_tokens.items()}
        for job in work.checksums:
            for block, key, valid in zip(job.ids.tolist(), job.keys.tolist(), job.valid.tolist(), strict=True):
                self.checksums[block] = key, valid, tuple(self.content[block][:valid])
        if self.rng.random() < 0.7:
            self.half._exports.mark_checksums_ready(self.step_number)
        names = list(sampled)
        return ModelRunnerOutput(
            req_ids=names, req_id_to_index={name: i for i, name in enumerate(names)},
            sampled_token_ids=[sampled[name] for name in names], logprobs=None, prompt_logprobs_dict={},
            pooler_output=[], kv_connector_output=KVConnectorOutput(),
        )  # fmt: skip

    def compute(self, name, count, drafts):
        state = self.states[name]
        first = min(state.computed, state.valid) if self.asynchronous else state.computed
        known = state.tokens[first : first + count]
        guesses = list(drafts[: count - len(known)])
        assert len(known) + len(guesses) == count, (name, first, count, len(state.tokens), drafts)
        tokens = state.tokens[: first + count]
        for guess in guesses:
            right = next_token(state.salt, tokens)
            if guess < 0:
                guess = right if self.rng.random() < 0.6 else (right + 1) % WORDS
            tokens.append(guess)
        for g, (size, _) in enumerate(self.groups):
            for at in range(first, first + count):
                block = state.blocks[g][at // size]
                if block:
                    self.content[block][at % size] = (state.salt, *tokens[: at + 1])
        if first + count < len(state.tokens):
            state.valid = first + count
            return []
        made, at = [], len(state.tokens)
        while True:
            made.append(next_token(state.salt, state.tokens))
            state.tokens.append(made[-1])
            if at >= len(tokens) or tokens[at] != made[-1]:
                break
            at += 1
        state.valid = len(state.tokens) - 1
        return made

    def output(self):
        if not self.flying:
            return
        step, output = self.flying.pop(0)
        for each in self.scheduler.update_from_output(step, output).values():
            for one in each.outputs:
                if one.finish_reason is not None:
                    request = self.live[one.request_id]
                    assert list(request.all_token_ids) == request.whole
                    self.ended_well += 1
                    if not request.resumable:
                        del self.live[one.request_id]
                    elif self.rng.random() < 0.7 and len(request.whole) < 90:
                        more = [self.rng.randrange(WORDS) for _ in range(self.rng.randint(1, 9))]
                        self.new(more, self.rng.choice([1, 3, 12]), request.cache_salt, one.request_id)
                    else:
                        del self.live[one.request_id]
                        self.scheduler.finish_requests(one.request_id, RequestStatus.FINISHED_ABORTED)
        if self.drafts and not self.asynchronous:
            names = [name for name in output.req_ids if name in self.live]
            self.scheduler.update_draft_token_ids(DraftTokenIds(names, [self.draft(name) for name in names]))

    def draft(self, name):
        tokens, salt, made = list(self.live[name].all_token_ids), self.live[name].cache_salt, []
        for _ in range(self.rng.randint(0, self.drafts)):
            right = next_token(salt, tokens + made)
            made.append(right if self.rng.random() < 0.6 else (right + 1) % WORDS)
        return made

    # -- what others read ----------------------------------------------------------------------------------------------

    def lease(self):
        """A peer asks for a prefix; it reads at any time until it gives the lease back."""
        full, prefix = self.rng.choice(list(self.meaning.values()) or [(b"", ())])
        if not prefix:
            return
        salt, tokens = prefix[0], prefix[1:]
        hasher = get_request_block_hasher(HASH_BLOCK_SIZE, sha256)
        request = Request("ask", list(tokens), SamplingParams(max_tokens=1), None, block_hasher=hasher, cache_salt=salt)
        hashes = [bytes(h) for h in request.block_hashes]
        ask = m.LeaseRequest(0, "", 0, hashes, mapped=True)
        answers = []
        self.lender.lease(ask, "peer", 60.0, answers.append)
        if isinstance(answers[0], Lease):
            self.leased.append((answers[0], prefix))

    def read(self):
        for lease, prefix in self.leased:
            self.readable(lease.export.groups, prefix, lease.tokens)

    def readable(self, groups, prefix, tokens):
        """What a reader verifies is what the prefix says."""
        for g, (size, kind) in enumerate(self.groups):
            ids = groups[g].ids
            for i in range(kind.first_needed(tokens) // size, tokens // size):
                expected = tuple(prefix[: i * size + j + 2] for j in range(size))
                h = next(f for f, p in self.meaning.values() if p == prefix[: (i + 1) * size + 1])
                assert ids[i], "a needed block is lacking"
                assert self.checksums.get(ids[i]) == (KEYS.key(h, g, b""), size, expected), "a wrong checksum"
                assert tuple(self.content[ids[i]][:size]) == expected, "a leased block was written"
                self.checked += 1

    def release_leases(self):
        while self.leased:
            lease, _ = self.leased.pop()
            self.half._exports.release(lease.id, "peer", True)

    def check(self):
        """Whatever the index and vLLM's prefix cache say of a block is so."""
        self.read()
        ready = self.half._exports.checksums_ready_step
        for export in self.half._exports._exports.values():
            if export.ready_step <= ready and export.block_hashes:
                prefix = self.meaning[export.block_hashes[-1][:HASH_BYTES]][1]
                size = max(size for size, _ in self.groups)
                tokens = min(export.tokens, len(export.block_hashes) * HASH_BLOCK_SIZE) // size * size
                self.readable_if_checked(export, prefix[: tokens + 1], tokens)
        for h, prefix in self.meaning.values():
            for g, (size, _) in enumerate(self.groups):
                found = self.index.find(KEYS.key(h, g, b""))
                if (len(prefix) - 1) % size or found is None or not self.pool.holds(found[0], h, g):
                    continue
                tokens = len(prefix) - 1
                expected = tuple(prefix[: tokens - size + j + 2] for j in range(size))
                have = self.checksums.get(found[0])
                if have is not None and have[0] == KEYS.key(h, g, b""):
                    assert have[2] == expected, "the checksum of this block is that of other content"
                else:
                    assert found[1] > self.step_number, "no step computes this checksum"
                self.checked += 1

    def readable_if_checked(self, export, prefix, tokens):
        for g, (size, kind) in enumerate(self.groups):
            ids = export.groups[g].ids
            for i in range(kind.first_needed(tokens) // size, tokens // size):
                if ids[i]:
                    expected = tuple(prefix[: i * size + j + 2] for j in range(size))
                    assert tuple(self.content[ids[i]][:size]) == expected, "an exported block holds something else"
                    self.checked += 1

    def balance(self):
        table = self.half._exports
        exports = {*table._exports.values(), *(lease.export for lease in table._leases.values())}
        assert 0 <= self.offloader.pinned <= self.offloader._max_pinned
        pins = self.offloader.pinned + sum(len(export.pinned) for export in exports)
        pins += sum(len(ids) for ids in self.half._exports._freed)
        pins += sum(len(ids) for *_, ids in self.half._exports._unready)
        held = sum(b.ref_cnt for b in self.fake.blocks if not b.is_null)
        manager, ours = self.scheduler.kv_cache_manager, 0
        for name in self.scheduler.requests:
            ours += sum(1 for ids in manager.get_block_ids(name) for i in ids if i)
        assert held >= pins, (held, pins)
        if not self.flying:
            assert held == ours + pins, (held, ours, pins)

    def end(self):
        for _ in range(600):
            if not (self.live or self.flying or self.scheduler.requests or self.scheduler.finished_req_ids):
                break
            self.release_leases()
            self.half._exports.clear()
            self.step()
            self.reactor.run()
            self.store_answers()
            self.worker_acts(0)
        assert not self.live, "it hangs"
        if not self.tier.up:
            self.tier.live()
        self.release_leases()
        self.half._exports.clear()
        self.half._exporter.drain()
        self.settle_down()
        self.balance()
        assert self.offloader.pinned == 0 and not self.offloader.has_frees() and not len(self.tables)
        assert self.pool.free_count() == BLOCKS - 1
        assert all(item.outcome for item in self.tier.items.values()), "a reservation was forgotten"


@pytest.fixture
def make(root):
    from test_rollback import config

    def scheduler(groups, asynchronous, priority=False, budget=16, drafts=0, v2=False):
        settings = config(root, asynchronous, "recompute", bool(drafts))
        settings.kv_transfer_config.kv_connector_module_path = __name__
        settings.cache_config.block_size, settings.cache_config.num_gpu_blocks = HASH_BLOCK_SIZE, BLOCKS
        settings.scheduler_config.policy = "priority" if priority else "fcfs"
        settings.scheduler_config.max_num_batched_tokens = budget
        if drafts:
            settings.speculative_config.num_speculative_tokens = drafts
        shape = dict(num_kv_heads=1, head_size=8, dtype=settings.model_config.dtype)
        specs = []
        for g, (size, kind) in enumerate(groups):
            spec = FullAttentionSpec if kind.whole_prefix else partial(SlidingWindowSpec, sliding_window=kind.window)
            specs.append(KVCacheGroupSpec([f"layer{g}"], spec(block_size=size, **shape)))
        made = (AsyncScheduler if asynchronous else Scheduler)(
            vllm_config=settings,
            kv_cache_config=KVCacheConfig(BLOCKS, [], specs),
            structured_output_manager=StructuredOutputManager(settings), block_size=max(size for size, _ in groups),
            hash_block_size=HASH_BLOCK_SIZE, log_stats=True,
        )  # fmt: skip
        made.use_v2_model_runner = v2
        return made

    init_none_hash(sha256)
    return scheduler


def options_of(seed):
    return {
        "priority": seed % 3 == 0, "budget": (16, 64)[seed % 2], "lot": (16, 3, 1)[seed % 3], "v2": seed % 5 == 0,
        "write": ("all", "off", "all", "prompt")[seed % 4], "share": (0.5, 0.1, 1.0)[seed % 3],
    }  # fmt: skip


def live(life, more=(), events=300):
    every = {
        life.new: 3, life.step: 14, life.abort: 0.4, life.reset: 0.2, life.reactor.run: 5, life.store_answers: 5,
        life.worker_acts: 9, life.store_forgets: 0.4, life.store_restarts: 0.4, life.lease: 2,
        life.release_leases: 0.7, life.refuse: 0.1, life.share: 0.3, **dict(more),
    }  # fmt: skip
    for _ in range(events):
        life.rng.choices(list(every), list(every.values()))[0]()
        life.balance()


@pytest.mark.parametrize("drafts", [0, 3, 9])
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("groups", sorted(GROUPS))
def test_kept_blocks_hold_what_their_hash_says(make, groups, asynchronous, drafts):
    total = dict.fromkeys(["copies", "checked", "ended_well"], 0)
    for seed in range(drafts, drafts + 2):
        life = Life(make, GROUPS[groups], seed, asynchronous=asynchronous, drafts=drafts, **options_of(seed))
        live(life)
        life.end()
        for name in total:
            total[name] += getattr(life, name)
    assert min(total.values()) > 0, total


def watched(name):
    method = getattr(KVTierConnector, name)
    return lambda self, *args: self.raiser.run(lambda: method(self, *args))


class ContainedConnector(Connector):
    _worker, _marks_failures = None, False
    on_new_request = watched("on_new_request")
    get_num_new_matched_tokens = watched("get_num_new_matched_tokens")
    update_state_after_alloc = watched("update_state_after_alloc")
    get_external_cache_hit_sources = watched("get_external_cache_hit_sources")
    build_connector_meta = watched("build_connector_meta")
    request_finished_all_groups = watched("request_finished_all_groups")
    request_finished = KVTierConnector.request_finished
    take_events = watched("take_events")
    has_pending_block_frees = watched("has_pending_block_frees")
    get_kv_connector_stats = watched("get_kv_connector_stats")


class RaisingLife(Life):
    def __init__(self, *args, **options):
        contain = Containment(Counters(), lambda: float(contain.errors * 100))
        super().__init__(*args, contain=contain, **options)
        connector = self.scheduler.connector
        connector.__class__ = ContainedConnector
        connector._scheduler, connector._info, connector.containment = self.half, self.half._info, contain
        self.half._info.reports_failed_requests = self.half._info.kv_events_enabled = False
        connector.counters, connector.raiser = contain._counters, Raiser()
        self.raiser = connector.raiser

    def arm(self):
        self.raiser.count = self.rng.choice([0, 3, 8, 13, 21, 34, 55, 89, 144, 233, 377])

    def reset(self):
        self.raiser.count = -1 if self.rng.random() < 0.5 else self.raiser.count
        super().reset()


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("groups", sorted(GROUPS))
def test_kept_blocks_survive_internal_errors(make, groups, asynchronous, drafts):
    errors = 0
    for seed in range(drafts, drafts + 2):
        life = RaisingLife(make, GROUPS[groups], seed, asynchronous=asynchronous, drafts=drafts, **options_of(seed))
        live(life, {life.arm: 3})
        life.raiser.count = -1
        life.end()
        errors += life.contain.errors
    assert errors > 0


def test_error_at_the_end_of_a_request_leaves_no_checksum_that_no_step_computes(make):
    life = RaisingLife(make, GROUPS["full"], 1, asynchronous=False)
    index, exporter = life.index, life.half._exporter
    mark, life.shared, life.sessions = (
        index.mark,
        False,
        0.0,
    )  # blocks that are generated get their checksums in lots, or at the end

    def marks(entry, step=-1):
        mark(entry, step)
        if step > exporter.step:
            raise RuntimeError("at the end of a request")

    index.mark = marks
    life.new([1, 2, 3, 4, 0], 12)
    life.end()
    assert life.contain.errors == 1
    for block, (key, valid, _, _) in index._made.items():
        assert life.checksums[block][:2] == (key, valid)


def test_blocks_that_are_given_back_and_still_held_delay_no_preemption(make):
    """vLLM lacks blocks, and exports and copies of blocks that running requests hold end in each step. It waited for
    them, and no request went on."""
    life = Life(make, GROUPS["full"], 1, asynchronous=False, write="off")
    life.shared, life.sessions = False, 0.0
    for salt in ("a", "b"):
        life.new([life.rng.randrange(WORDS) for _ in range(100)], 50, salt)
    for _ in range(300):
        tables = [life.scheduler.kv_cache_manager.get_block_ids(each.request_id) for each in life.scheduler.running]
        life.half._exports.put_back([life.pool.pin(ids[:1]) for (ids,) in tables])
        life.step()
    assert life.ended_well == 2
