"""Matching and loading: the answers to vLLM for each request, and the end of its load.

On vLLM's scheduler thread only. ``source_selector`` decides which source is asked and which answer is taken. A request
waits for blocks that another request is loading, so that no block is loaded twice.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, cast

from vllm_kvtier.jobs.transfer_jobs import MAX_PEERS_REMEMBERED, FailedJob
from vllm_kvtier.scheduler.context import LoadContext
from vllm_kvtier.scheduler.integrity.sync_load import SyncJob
from vllm_kvtier.scheduler.matching.request_lifecycle import Event, RequestLifecycle, State
from vllm_kvtier.scheduler.matching.request_state import LoadUnderWay, RequestState
from vllm_kvtier.scheduler.matching.source_selector import SourceSelector
from vllm_kvtier.scheduler.matching.transfer_params import PrefillHandoff, hints, is_of_another_connector, promised
from vllm_kvtier.scheduler.planner.load_or_recompute import LoadOrRecompute
from vllm_kvtier.scheduler.sources import job_builder
from vllm_kvtier.scheduler.sources.base import BlockIds, Job, KVSource
from vllm_kvtier.vllm_compat import requests as vr
from vllm_kvtier.wire.messages import RankInfo

# A request whose transfers from more peers failed is computed.
MAX_FAILED_PEERS = 4
# Hits held too long while no request had blocks, after which a request is computed.
MAX_VAIN_HOLDS = 2


class RequestMatcher:
    def __init__(self, context: LoadContext, sources: Sequence[KVSource]):
        """``sources``: in the order in which they are asked."""
        self._context, self._engine, self._geometry = context, context.engine, context.engine.geometry
        self._config, self._counters = context.engine.config, context.engine.counters
        self._planner, self._sync_load, self._checksum_index = (
            context.planner,
            context.sync_load,
            context.checksum_index,
        )
        self._caches = context.engine.info.prefix_caching  # else vLLM has nothing of a load for another request
        self._whole_prefixes = all(kind.whole_prefix for _, kind in self._geometry.groups)
        self._load_or_recompute = LoadOrRecompute(context)
        self._source_selector = SourceSelector(context, sources)
        self._looking_ahead = self._source_selector.looking_ahead
        self._growing = [source for source in sources if source.loads_in_parts]
        self.grown = [source.grown for source in self._growing]
        for source in self._growing:
            source.submit = lambda job: self._jobs.append(job)
        self._tracked: dict[str, RequestState] = {}
        self._jobs: list[Job | FailedJob] = []
        self._loading_hashes: dict[bytes, str] = {}  # block hash -> request that loads it
        self._known_peers: set[str] = set()
        self._new_peers: dict[str, list[RankInfo]] = {}
        self._lease_client = context.lease_client
        self._queued_handoffs: dict[str, PrefillHandoff] = {}  # by request
        self.prefetching = False  # whether a source may have looked up queued requests
        # No other connector beside this one does. Else the prompts that it is to bring are left to it: while this one
        # waits for an answer, vLLM takes no other's; and listed first, it would bring a block of what that has whole.
        self.hands_off_alone = True

    def get(self, request_id: str) -> RequestState | None:
        return self._tracked.get(request_id)

    def __len__(self) -> int:
        return len(self._tracked)

    def states(self) -> Iterator[State]:
        return (state.life.state for state in self._tracked.values())

    def requests(self) -> Iterator[Any]:
        return (state.request for state in self._tracked.values())

    def release_all(self, request: Any) -> None:
        """The request is computed here: cancel its lookups and release its hits."""
        state = self.track(request)
        self._release_unused(state)
        if state.life.state in (State.NEW, State.LOOKUP, State.HIT):
            self._source_selector.advance(state, Event.DECLINE)

    def track(self, request: Any) -> RequestState:
        state = self._tracked.get(request.request_id)
        if state is None:
            state = RequestState(request, hints(request), RequestLifecycle(request.request_id))
            self._tracked[request.request_id] = state
        return state

    def _release_unused(self, state: RequestState, ended: bool = False) -> None:
        """The request ended, or is computed here."""
        if state.life.state is State.NEW and state.candidates is None:  # else its sources release the export
            handoff = promised(state.request)
            # vLLM submits also a request that its server refuses, aborted, and another engine may take that.
            refused = ended and not vr.scheduled_tokens(state.request)
            if not (refused and handoff is not None and handoff.router_releases):
                self._source_selector.release_export(state)
        self._source_selector.release_held(state)
        self._source_selector.cancel_prefetch(state)
        self._queued_handoffs.pop(state.request.request_id, None)

    def keep_export(self, request: Any) -> None:
        """A queued request may have a hand-off: its prefill engine keeps it until the request is scheduled or ends."""
        handoff = promised(request)
        if handoff is not None:
            self._queued_handoffs[request.request_id] = handoff
            self._lease_client.keep_exports(self._queued_handoffs, handoff.expires_in)

    def prefetch_promotion(self, request: Any) -> None:
        """Have sources promote what a queued request will look up."""
        if not self.hands_off_alone and is_of_another_connector(request):
            return
        if any([source.prefetch_promotion(request) for source in self._looking_ahead]):
            self._counters.count("promotion_prefetches")

    def prefetch_lookup(self, request: Any) -> None:
        """Have sources look up a queued request before vLLM matches it."""
        if not self.hands_off_alone and is_of_another_connector(request):
            return
        if not request.kv_transfer_params or promised(request) is None:  # else another engine does
            self._planner.will_compute(request.request_id, self._cached_about(request), request.num_tokens)
        self.prefetching = True
        for source in self._looking_ahead:
            source.prefetch_lookup(request)

    def _cached_about(self, request: Any) -> int:
        """About the tokens of a queued request that vLLM's prefix cache has for it."""
        if request.skip_reading_prefix_cache:
            return 0
        groups, alignment = self._engine.info.full_groups, self._geometry.alignment
        return self._engine.pool.cached_about(request.block_hashes, groups, alignment)

    def expire_prefetches(self) -> None:
        """Once a step, while ``prefetching``."""
        self.prefetching = any([source.expire_prefetches() for source in self._looking_ahead])

    # -- matching ------------------------------------------------------------------------------------------------

    def match(self, request: Any, computed: int) -> tuple[int | None, bool]:
        """vLLM's ``get_num_new_matched_tokens``: tokens beyond ``computed`` that a hit covers; None: ask again."""
        self._planner.remove_request(request.request_id)
        tokens, asynchronous = self._match(request, computed)
        pending = self._tracked[request.request_id].pending
        if tokens is not None or pending is None or pending.source.cost_key:  # else another engine computes it
            self._planner.will_compute(request.request_id, computed + (tokens or 0), request.num_tokens)
        return tokens, asynchronous

    def longest_local_hit(self, request: Any) -> int:
        """The most tokens of attention's KV alone behind which a source that brings this prompt's states is still made
        use of; 0 without such a source, or when it was tried."""
        state = self.track(request)
        may_load = state.life.state in (State.NEW, State.LOOKUP, State.HIT)
        end = self._source_selector.awaited_states(state) if may_load else 0
        state.takes_attention_hit = end > 0
        return max(0, end - max(1, self._config.pull_threshold))

    def _match(self, request: Any, computed: int) -> tuple[int | None, bool]:
        state = self.track(request)
        if self._sync_load.verification_pending:
            return None, False
        self._notice_preemption(state)
        state.num_computed_tokens = computed
        while True:
            self._notice_eviction(state, computed)
            match state.life.state:
                case State.NEW:
                    if not self.hands_off_alone and is_of_another_connector(request):
                        state.life.fire(Event.DECLINE)
                        return 0, False
                    if state.candidates is None:
                        for source in self._looking_ahead:
                            source.on_matched(request.request_id)
                    if self._waits_for_load(state, computed):
                        return None, False
                    if not self._source_selector.ask_next(state, computed, len(self._tracked) == 1):
                        state.life.fire(Event.DECLINE)
                        return 0, False
                case State.LOOKUP:
                    if state.waits_since:
                        self._source_selector.wait_briefly(state, len(self._tracked) == 1)
                    awaited = state.takes_attention_hit and self._source_selector.awaited_states(state)
                    if not self._source_selector.answered(state):
                        return None, False
                    if awaited and not self._source_selector.awaited_states(state):
                        return None, False  # vLLM asks again, from where it has the states itself
                case State.HIT:
                    if self._waits_for_load(state, computed):
                        return None, False
                    now = time.monotonic()
                    old = not state.taken_hit.source.cost_key and self._load_or_recompute.is_too_old(state, now)
                    if old and now - state.asked_at > self._config.transfer_timeout:  # not what came just now
                        if not self._is_held_in_vain(state):
                            self._source_selector.ask_again(state)  # the peer may have it still, and leases it anew
                            continue
                        state.decline_lookup(self._counters, "lease_held_too_long")
                        self._source_selector.advance(state, Event.DECLINE)
                        return 0, False
                    alone = len(self._tracked) == 1
                    synchronous = self._may_be_synchronous(state, computed)
                    gain = self._load_or_recompute.usable_tokens(state, computed, now, alone or synchronous)
                    state.synchronous, state.others_running = bool(gain and synchronous), not alone
                    if state.synchronous:  # of the whole prompt, vLLM computes the last token in the same step
                        return min(gain, request.num_tokens - 1 - computed), False
                    if gain and not self._context.ever_has_blocks(computed + gain):
                        state.decline_lookup(self._counters, "exceeds_kv_cache")
                        self._source_selector.advance(state, Event.DECLINE)
                        return 0, False
                    if gain:
                        return gain, True
                    self._source_selector.decline(state, self._load_or_recompute.is_complete(state))
                    return 0, False
                case _:
                    return 0, False

    def _may_be_synchronous(self, state: RequestState, computed: int) -> bool:
        if not self._sync_load.is_eligible(state, computed, len(self._tracked)):
            return False
        if self._geometry.by_position:
            return True
        # For a state vLLM counts one block too few (0.29 to 0.33), and ends if there is none.
        prompt = state.request.num_tokens
        tokens = self._geometry.usable_tokens(state.taken_hit.tokens, prompt)
        needed = self._geometry.taken_blocks(prompt) + len(self._geometry.groups)
        return self._geometry.goes_on_in_step(tokens, prompt) and self._context.engine.pool.free_count() >= needed

    def _notice_preemption(self, state: RequestState) -> None:
        """Match a request that lost its blocks like a new one: a store may have them."""
        preemptions = state.request.num_preemptions
        if state.life.state is State.LOADED or (state.life.state is State.LOCAL and preemptions > state.preemptions):
            state.life.fire(Event.PREEMPT)
            state.num_external_tokens, state.hit, state.plan = 0, None, None
            state.candidates = self._source_selector.candidates_after_loss()
            state.begun_at, state.load_wait_began, state.promoted_tokens = time.monotonic(), 0.0, 0
        state.preemptions = preemptions

    def _notice_eviction(self, state: RequestState, computed: int) -> None:
        """While a request waits for free blocks, vLLM's cache may evict its prefix: ask the store again, from there.

        A hit that begins after ``computed`` is of no use, and an earlier miss is out of date. So is a hit that is held
        for longer than ``max_hold_seconds``. Of other sources the one that was asked is asked again, once.

        vLLM skips a request without an answer, and those behind take the blocks that became free for it: the others
        wait a moment for each of these answers.
        """
        pending = state.pending
        if pending is not None and pending.start > computed and not (pending.source.cost_key or state.asked_again):
            if state.life.state in (State.LOOKUP, State.HIT):
                self._source_selector.ask_again(state)
        if state.life.state is not State.HIT and state.life.state is not State.LOCAL:
            return
        candidates = self._source_selector.candidates_after_loss()
        if not candidates or self._source_selector.is_excluded(state):
            return
        hit = state.hit
        longest = min(hit.source.max_hold_seconds, self._config.transfer_timeout) if hit is not None else 0.0
        old = hit is not None and time.monotonic() - state.hit_at > longest
        if state.life.state is State.HIT and hit and hit.source.cost_key and (old or hit.start > computed):
            state.decline_lookup(self._counters, "lease_held_too_long" if old else "local_prefix_evicted")
            self._source_selector.advance(state, Event.DECLINE)
            candidates = deque() if old and self._is_held_in_vain(state) else candidates
        elif state.life.state is not State.LOCAL or state.asked_from - computed < max(1, self._config.pull_threshold):
            return
        state.life.fire(Event.PREEMPT)
        state.hit, state.plan, state.candidates, state.num_waits = None, None, candidates, 0

    def _is_held_in_vain(self, state: RequestState) -> bool:
        """Whether a hit that was held too long is the last, and the request is computed.

        A load needs all of its blocks at once, and more for drafts: in a small cache vLLM may never have them.
        """
        state.vain_holds += self._context.no_request_has_blocks()
        return state.vain_holds >= MAX_VAIN_HOLDS

    def _waits_for_load(self, state: RequestState, computed: int) -> bool:
        """Whether another request loads the block that this one needs next, and half of that load is of use here.

        vLLM has these blocks in its prefix cache when that load ends. A short prompt does not wait for a long load that
        it shares only the beginning of. Windows and states are there at the load's end only: all of it must be shared.
        With drafts, or a prompt of whole blocks, vLLM takes all but the last of them, and no windows: those that waited
        and still lack some load together then.
        """
        if not (self._loading_hashes and self._caches) or state.request.skip_reading_prefix_cache:
            return False
        hash_block_size = self._geometry.hash_block_size
        block_hashes, first = state.request.block_hashes, computed // hash_block_size
        other = self._loading_hashes.get(bytes(block_hashes[first])) if first < len(block_hashes) else None
        loading = self._tracked.get(other) if other else None
        if loading is None or loading.life.state is not State.LOADING or other == state.request.request_id:
            return False  # an aborted load does not enter vLLM's cache
        if self._waited_in_vain(state, first) or self._reads_itself(state, loading):
            return False
        began = state.load_wait_began or loading.allocated_at
        if time.monotonic() > began + self._config.transfer_timeout:
            return False  # it hangs, or those before it failed: a time limit for all of them
        if state.waits_for != other:
            # A block's hash is of all tokens up to its end: if this one is the same, those before it are.
            load, start = loading.loading_hashes, loading.num_computed_tokens // hash_block_size
            last = first + (len(load) + 1) // 2 - 1 if self._whole_prefixes else start + len(load) - 1
            in_load = last - start
            if last >= len(block_hashes) or in_load >= len(load) or bytes(block_hashes[last]) != load[in_load]:
                return False
            state.waits_for, state.load_wait_began = loading.request.request_id, began
            state.awaited_load, state.has_waited = (start, load), False
            loading.waiting.append(state)
            self._counters.count("inflight_load_waits", loading.source_name)
        return True

    def _waited_in_vain(self, state: RequestState, first: int) -> bool:
        """Whether it waited for a load that ended well, and lacks a block of that nevertheless."""
        start, load = state.awaited_load
        if not state.has_waited or not start <= first < start + len(load):
            return False
        return load[first - start] == bytes(state.request.block_hashes[first])

    def _reads_itself(self, state: RequestState, loading: RequestState) -> bool:
        """Whether a request reads the peer's blocks that it leased, although ``loading`` loads some of them. Of a load
        that lasts as long as another engine's prefill, each does, or computes them. The samples of one request, whose
        params are the same, wait for the first of them."""
        leased = state.life.state is State.HIT and not state.taken_hit.source.cost_key
        return loading.hints != state.hints and (leased or loading.taken_hit.grows)

    # -- loading -------------------------------------------------------------------------------------------------

    def allocated(self, request: Any, block_ids: BlockIds, external: int) -> None:
        """vLLM gave the request blocks; ``external`` tokens of them are ours to fill (0: none)."""
        state = self.track(request)
        self._source_selector.cancel_prefetch(state)
        self._queued_handoffs.pop(request.request_id, None)
        if state.life.state in (State.NEW, State.LOOKUP):
            self._source_selector.release_held(state)
        if state.life.state is State.LOOKUP:  # vLLM went on without an answer (a request that reads no prefix cache)
            state.miss_reason = state.miss_reason or "scheduled_before_answer"
            self._source_selector.advance(state, Event.DECLINE)
        elif state.life.state is State.HIT and external <= 0:
            self._source_selector.decline(state)
        if state.life.state is not State.HIT:
            if state.life.state is not State.VERIFYING:  # else when it is verified
                self._account(state)
            return
        state.life.fire(Event.ALLOCATE_SYNC if state.synchronous else Event.ALLOCATE)
        state.allocated_at, hit = time.monotonic(), state.taken_hit
        tokens = state.num_computed_tokens + external
        if state.synchronous and tokens == request.num_tokens - 1 < hit.tokens:
            tokens += 1  # loaded with its block, which vLLM is not aware of
        job = self._build_job(state, block_ids, tokens)
        self._start_timing(state)
        state.num_external_tokens = tokens - state.num_computed_tokens
        self._jobs.append(job)
        state.entries = job_builder.unchanged(state, state.entries, self._geometry, block_ids, tokens)
        if state.synchronous:
            job.state_copies = job_builder.state_copies(self._geometry, block_ids, job)
            self._sync_load.begin(state, cast(SyncJob, job))  # as ``supports_sync_load`` says
            return
        hash_block_size = self._geometry.hash_block_size
        first = state.num_computed_tokens // hash_block_size
        state.loading_hashes = vr.block_hashes(request, tokens, hash_block_size)[first:]
        self._loading_hashes.update(dict.fromkeys(state.loading_hashes, request.request_id))

    def _start_timing(self, state: RequestState) -> None:
        """The load counts as under way for the planner."""
        hit = state.taken_hit
        cost_key, planned = hit.source.timed_as(hit), bool(hit.source.cost_key)
        if not cost_key:
            return
        nbytes, expected = self._geometry.load_bytes(hit, state.num_computed_tokens), None
        # Not of a load that waits for others, or that maps its source's memory before.
        if not planned and not self._planner.loading(cost_key) and self._sync_load.is_mapped(hit.instance):
            expected = self._planner.load_seconds(cost_key, nbytes)
        self._planner.started(cost_key, nbytes)
        state.under_way = LoadUnderWay(cost_key, nbytes, expected)

    def _build_job(self, state: RequestState, block_ids: BlockIds, tokens: int) -> Job | FailedJob:
        """The job for ``state.hit``; its blocks get new content."""
        hit = state.taken_hit
        job = state.job = hit.source.build_job(state, block_ids, tokens)
        state.can_cancel_load = hit.source.can_cancel_load
        for group in job.groups:
            self._checksum_index.remove(group.blocks.tolist())
        if hit.ranks is not None and hit.instance not in self._known_peers:
            if len(self._known_peers) >= MAX_PEERS_REMEMBERED:
                self._known_peers.clear()  # each of them may be one that the workers forget
            self._known_peers.add(hit.instance)
            self._new_peers[hit.instance] = hit.ranks
        return job

    def fail_load(self, request: Any, block_ids: BlockIds, external: int) -> None:
        """``allocated`` raised at any point. In place of its job the workers report a failed load of these blocks,
        which ends like any load that fails."""
        state = self._tracked[request.request_id]
        self._jobs = [job for job in self._jobs if job.request_id != request.request_id]
        if state.life.state is State.HIT:
            state.life.fire(Event.ALLOCATE_SYNC if state.synchronous else Event.ALLOCATE)
        state.allocated_at, state.num_external_tokens, state.entries = time.monotonic(), external, []
        job = state.job = job_builder.failed_job(state, self._geometry, block_ids, state.num_computed_tokens + external)
        state.can_cancel_load = False
        if state.hit is not None:
            state.hit.source.remove_load(state)
        self._jobs.append(job)
        if state.synchronous:
            self._sync_load.begin(state, job)

    def release_steps(self, request_id: str, gone: bool = False, ended: bool = False) -> list[Callable[[], object]]:
        """Our code raised while it dealt with the request, which is computed now. Returns a step for each thing to
        release; the caller runs every step, even if another one raises.

        The fields decide, not the state. A load goes on until the workers report its end. ``gone``: the request has
        ended; ``ended``: its load has.
        """
        self._queued_handoffs.pop(request_id, None)
        if gone:
            self._planner.remove_request(request_id)
        state = self._tracked.get(request_id)
        if state is None:
            return self._source_selector.release_steps(request_id, None)
        before = state.life.state
        if before in (State.LOADING, State.VERIFYING, State.ABANDONED) and not ended:
            state.life.state = State.ABANDONED if gone else before
            return []
        steps: list[Callable[[], object]] = []
        if ended or before in (State.NEW, State.LOOKUP, State.HIT):
            steps = self._source_selector.release_steps(request_id, state)
            if state.under_way is not None:
                steps.append(partial(self._planner.ended, state.under_way.cost_key, state.under_way.nbytes))
            self._loading_hashes = {h: loading for h, loading in self._loading_hashes.items() if loading != request_id}
            state.num_external_tokens, state.synchronous = 0, False
            state.plan, state.under_way, state.job = None, None, None
            state.candidates, state.loading_hashes, state.entries, state.positions = deque(), [], [], {}
            state.life.state = State.LOCAL
        if gone or before in (State.ABANDONED, State.GONE):
            state.life.state = State.GONE
            self._tracked.pop(request_id, None)
        return steps

    def clear_checksums(self) -> None:
        """The workers' tables are cleared, also of what is being loaded."""
        for state in self._tracked.values():
            state.entries = []

    def request_ids(self) -> list[str]:
        return list(self._tracked)

    def has_jobs(self) -> bool:
        """Whether ``take_jobs`` or ``take_aborted`` returns anything."""
        return bool(self._jobs or self._source_selector.aborted)

    def collect_jobs(self) -> None:
        """In a step, if one of ``grown`` is not empty: add the jobs of loads that go on."""
        for source in self._growing:
            for job in source.more_jobs():  # one by one: if it raises, those before are not lost
                self._jobs.append(job)

    def end_waiting_loads(self) -> None:
        """See ``KVSource.end_waiting_loads``. The next step has their last jobs."""
        for source in self._growing:
            source.end_waiting_loads()

    def take_jobs(self) -> tuple[list[Job | FailedJob], dict[str, list[RankInfo]]]:
        """Jobs for the workers to start in this step, and the ranks of peers as in ``StepWork.new_peers``."""
        taken, self._jobs = self._jobs, []
        new_peers, self._new_peers = self._new_peers, {}
        return taken, new_peers

    def take_aborted(self) -> list[str]:
        """Aborted requests whose loads have not ended."""
        taken, self._source_selector.aborted = self._source_selector.aborted, []
        return taken

    def put_back(self, taken: list[Job | FailedJob], new_peers: dict[str, list[RankInfo]], aborted: list[str]) -> None:
        """After an exception: these did not get to the workers."""
        self._jobs, self._new_peers = taken + self._jobs, {**new_peers, **self._new_peers}
        self._source_selector.aborted = aborted + self._source_selector.aborted

    def on_load_ended(self, request_id: str, failed: bool) -> None:
        """All ranks ended the request's load, peer fetch or pull, and its lease goes back.

        ``failed``: at least one rank failed. The request is then computed, or matched again if other sources may have
        its blocks.
        """
        state = self._tracked.get(request_id)
        if state is None:
            return
        abandoned = state.life.state is State.ABANDONED
        for block_hash in state.loading_hashes:
            if self._loading_hashes.get(block_hash) == request_id:
                del self._loading_hashes[block_hash]
        state.loading_hashes = []
        if state.under_way is not None:
            self._planner.ended(state.under_way.cost_key, state.under_way.nbytes)
            state.under_way = None
        self._source_selector.advance(state, Event.LOAD_FAILED if failed else Event.LOAD_DONE)
        if failed:
            state.num_external_tokens, state.miss_reason = 0, f"load_failed_{state.source_name}"
            self._try_other_sources(state)
            if state.synchronous:  # else vLLM gives it blocks anew
                self._account(state)
        elif state.hit is not None and state.hit.same_layout and not abandoned:
            for entry in state.entries:  # in the workers' tables
                self._checksum_index.mark(entry)
        for other in state.waiting:
            other.has_waited |= other.waits_for == request_id and not failed and not abandoned
        state.waiting = []
        if not failed and (not abandoned or vr.ended_well(state.request)):  # it may end in the step that loads it
            self._account(state)
        state.entries, state.job, state.positions = [], None, {}
        if abandoned:
            self._tracked.pop(request_id, None)

    def _account(self, state: RequestState) -> None:
        """Count, once a request, the sources of its prompt's KV."""
        if state.counted:
            return
        state.counted, count, prompt = True, self._counters.count, state.request.num_prompt_tokens
        local = min(state.num_computed_tokens, prompt)
        brought = min(state.num_external_tokens, prompt - local)
        parts = {"local_cache_hit": local, "local_compute": prompt - local - brought}
        if brought:
            count("hits", state.source_name)
            parts |= state.taken_hit.source.tokens_by_source(state, brought)
        elif local:
            count("hits", "local_cache_hit")
        else:
            count("misses", state.miss_reason or "no_source")
        for kind, tokens in parts.items():
            if tokens:
                count("prompt_tokens", kind, tokens)

    def _try_other_sources(self, state: RequestState) -> None:
        """A transfer from another engine failed: a store or other peers may have the blocks, if vLLM asks again."""
        if state.hit is None or not state.hit.source.others_may_have_it or state.life.state is not State.LOCAL:
            return
        if time.monotonic() > state.allocated_at + self._config.transfer_timeout:
            return  # it hung: others might, and each takes as long
        state.failed.add(state.hit.instance)
        if state.candidate is not None and state.candidate.instance:
            state.failed.add(state.candidate.instance)  # the store may know the peer at this address by another name
        if len(state.failed) > MAX_FAILED_PEERS:
            return
        state.life.fire(Event.PREEMPT)
        state.hit, state.plan, state.pending, state.synchronous, state.num_waits = None, None, None, False, 0
        state.candidates, state.begun_at = self._source_selector.candidates_after_failure(state), time.monotonic()

    def finished(self, request: Any) -> RequestState:
        """The request ended: release what it holds, unless the workers still read."""
        state = self.track(request)
        self._release_unused(state, ended=True)
        self._planner.remove_request(request.request_id)
        self._source_selector.advance(state, Event.FINISH)
        if state.life.state is State.GONE:
            self._tracked.pop(request.request_id, None)
        return state
