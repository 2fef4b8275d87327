"""A prefill that its router gave to a prefill engine and to this one at the same time.

The prefill engine grants stretches of the prompt as its steps compute them, and at last the whole export. vLLM is
promised the whole prompt when the first stretch is granted: by then the prefill has begun, and what this engine keeps
blocks for is its computing, not its queue. One load fills them, piece by piece: its first job comes from ``build_job``,
the others from ``more_jobs``. The last one ends it. If the prefill ends early, that is a ``FailedJob`` for what is
missing, and the request goes on from the last verified block.

At most one stretch of a request is being read at a time; what was granted meanwhile is read with the next. The export
does not wait for a stretch. A stretch's lease goes back when all ranks have read it.

When the export comes and nothing else is being read, the load's last part may be synchronous. For vLLM the load ends
then: the next step schedules the request and waits for that part, which is verified with its output.
"""

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from vllm_kvtier.jobs.results import Result
from vllm_kvtier.jobs.transfer_jobs import FailedJob, GroupPull, PeerFetchJob, PullJob
from vllm_kvtier.logs import get_logger
from vllm_kvtier.scheduler.context import LoadContext
from vllm_kvtier.scheduler.integrity.checksum_index import ChecksumEntry
from vllm_kvtier.scheduler.leases.pending_leases import FollowedLease, LeasedBlocks
from vllm_kvtier.scheduler.matching.request_lifecycle import State
from vllm_kvtier.scheduler.matching.request_state import lora_fingerprint_of
from vllm_kvtier.scheduler.sources import job_builder
from vllm_kvtier.scheduler.sources.base import (
    BlockIds,
    Candidate,
    Job,
    LookupHit,
    LookupMiss,
    Need,
    PendingLookup,
    RequestState,
)
from vllm_kvtier.scheduler.sources.peer_lease import PEER_GPU
from vllm_kvtier.scheduler.sources.prefill_handoff import PrefillHandoffSource
from vllm_kvtier.shapes.read_paths import ReadPath
from vllm_kvtier.vllm_compat.hooks.scheduler_lock import SchedulerLock
from vllm_kvtier.vllm_compat.hooks.step_pause import end_pause

logger = get_logger(__name__)

# Of all blocks: they stay free for the requests that this engine serves, while a prompt is promised ahead.
FREE_BLOCK_SHARE = 0.05
# The prefill engine is gone, or does not answer: what it granted and was not read yet is not tried.
_GONE = ("unreachable", "timeout", "peer_restarted", "malformed")


@dataclass(eq=False)
class _Following:
    """A load that follows a prefill. Tokens [state.num_computed_tokens, ``given``) are in jobs; ``used``: so many of
    the answer's grants. ``results``: of all ranks, that are awaited. ``closed``: the last job was made.
    ``paused``: it is to end as soon as nothing is being read."""

    state: RequestState
    answer: FollowedLease
    block_ids: BlockIds
    tokens: int
    given: int
    num_blocks: int
    used: int = 0
    results: int = 0
    closed: bool = False
    failed: bool = False
    aborted: bool = False
    paused: bool = False
    reading: list[LeasedBlocks] = field(default_factory=list)


class _FollowedLookup(PendingLookup):
    """Its answer counts when the engine has room for a prompt whose prefill goes on, or that prefill has ended."""

    __slots__ = ("tokens",)

    def __init__(
        self, source: "FollowedPrefillSource", answer: FollowedLease, state: RequestState, start: int, tokens: int
    ):
        super().__init__(source, answer, start, tokens)
        self.tokens, self.state = tokens, state

    def poll(self) -> LookupHit | LookupMiss | None:
        source: FollowedPrefillSource = self.source  # type: ignore[assignment]
        if self.outcome is None and not source.may_begin(self):
            return None
        return super().poll()


class FollowedPrefillSource(PrefillHandoffSource):
    """For requests whose params say ``follow``. The export's name is the router's."""

    loads_in_parts = True

    def __init__(self, context: LoadContext, scheduler_lock: SchedulerLock | None = None):
        """``scheduler_lock``: None: all of a load that grows is asynchronous."""
        super().__init__(context)
        self._scheduler_lock = scheduler_lock
        self.grown: deque[str] = deque()  # requests; the reactor appends too
        self._following: dict[str, _Following] = {}
        # Other kinds of groups are read when the prefill has ended: all blocks that a prefix needs exist only then.
        self._stretches = self._geometry.has_stretches
        self._stretches &= self._config.follow_share > 0 and self._engine.info.supports_partial_prefix
        # A prefill that dies half way must not end its request here.
        self._stretches &= self._config.kv_load_failure_policy != "fail"

    # -- lookup ------------------------------------------------------------------------------------------------------

    def candidates(self, state: RequestState) -> list[Candidate]:
        handoff = state.hints.handoff
        return [Candidate(self, handoff.address)] if handoff is not None and handoff.follow else []

    def last_state(self, state: RequestState) -> int:
        return 0  # the lookup lasts for a whole prefill, and attention's hit may be gone by then

    def lookup(self, state: RequestState, candidate: Candidate, need: Need) -> PendingLookup | None:
        if self._too_little(state, need):
            self.release_export(state)
            return None
        tokens, handoff = self._exported_tokens(state), state.hints.handoff
        hashes = self._block_hashes(state, tokens)
        digest = self._digest(state, hashes, tokens, self._geometry.hash_block_size)
        # Stretches are pinned at the prefill engine: from token 0 on only if vLLM's prefix cache shrinks.
        start = 0 if state.asked_again else need.start
        answer = self._lease_client.follow(
            handoff.address, self._config.transfer_timeout,
            partial(self._has_grown, state.request.request_id), start=start, block_hashes=hashes[-1:],
            lora_fingerprint=lora_fingerprint_of(state.request), export=handoff.export,
            digest=digest, stretches=self._stretches, **self._reply_address(),
            rehash=partial(self._rehash, state, tokens) if self._can_rehash() else None,
        )  # fmt: skip
        return _FollowedLookup(self, answer, state, start, tokens)

    def _rehash(self, state: RequestState, tokens: int, hash_block_size: int) -> dict[str, Any]:
        """Blocks of another size are read when the prefill has ended."""
        return {**super()._rehash(state, tokens, hash_block_size), "stretches": False}

    def _has_grown(self, request_id: str) -> None:
        """On the reactor's thread."""
        f, lock = self._following.get(request_id), self._scheduler_lock
        if f is not None and f.answer.complete and lock is not None and lock.known:
            lock.run_when_free(partial(self._end_in_next_step, f))
        self.grown.append(request_id)
        end_pause()

    def may_begin(self, pending: _FollowedLookup) -> bool:
        """Whether its answer is to be read now: of prompts that are promised ahead only so many hold blocks."""
        answer = pending.answer
        if not isinstance(answer.outcome, LeasedBlocks) or answer.complete or answer.ended is not None:
            return True  # no answer yet, a miss, or nothing more to come
        assert pending.state is not None
        if answer.grants[-1].tokens <= pending.state.num_computed_tokens:
            return False  # vLLM has all of it
        if self._ends_soon(pending, answer.grants[-1]):
            return False
        pool, config = self._engine.pool, self._config
        needed = self._num_blocks(pending.start, pending.tokens)
        if not self._context.has_blocks(needed + math.ceil(FREE_BLOCK_SHARE * pool.num_blocks)):
            return False
        held = sum(each.num_blocks for each in self._following.values() if not each.closed)
        return not held or held + needed <= config.follow_share * pool.num_blocks

    def _ends_soon(self, pending: _FollowedLookup, leased: LeasedBlocks) -> bool:
        """Whether the prompt is computed and nothing of it was read. The export comes when the prefill engine has the
        step's output, and can be read synchronously as a whole."""
        sync_load, alignment = self._context.sync_load, self._geometry.alignment
        mapped = leased.path is ReadPath.MAPPED and sync_load.possible and sync_load.is_mapped(leased.instance)
        return mapped and leased.tokens >= pending.tokens // alignment * alignment

    def _num_blocks(self, start: int, tokens: int) -> int:
        return sum(-(-tokens // size) - start // size for size, _ in self._geometry.groups)

    def read_answer(self, pending: PendingLookup) -> LookupHit | LookupMiss:
        answer: FollowedLease = pending.answer
        if isinstance(answer.outcome, LookupMiss):
            return answer.outcome
        if answer.ended is not None:
            self._lease_client.stop_following(answer, done=False)
            return answer.ended
        if not self._are_sound(pending, list(answer.grants), pending.start):
            self._lease_client.stop_following(answer, done=True)
            return LookupMiss("malformed", "a malformed grant")
        leased = answer.grants[-1] if answer.complete else answer.grants[0]
        return LookupHit(
            self, leased.instance, leased.lease, pending.start, leased.tokens if leased.final else pending.max_tokens,
            leased.blocks, address=leased.address, ranks=leased.ranks, path=leased.path,
            same_layout=leased.same_layout, hash_block_size=leased.hash_block_size, block_tokens=leased.block_tokens,
            nbytes=leased.nbytes, grows=not leased.final,
        )  # fmt: skip

    def answers_at_once(self, pending: PendingLookup) -> bool:
        return False  # after a prefill, or a part of it

    def early_hit(self, state: RequestState) -> LookupHit | None:
        return None

    def fits(self, state: RequestState, hit: LookupHit) -> bool:
        return True  # ``read_answer`` checked what it was made of

    def _are_sound(self, pending: PendingLookup, grants: Iterable[LeasedBlocks], end: int, promised: int = 0) -> bool:
        """Another process made them, and their numbers become indices. ``end``: of those before. ``promised``: tokens
        that vLLM was promised."""
        for leased in grants:
            if leased.start > (pending.start if leased.final else end) or (leased.final and leased.tokens < promised):
                return False
            if not leased.final and any(leased.tokens % size for size, _ in self._geometry.groups):
                return False
            if not self._fits(leased, pending.start, pending.max_tokens):
                return False
            end = max(end, leased.tokens)
        return True

    # -- load --------------------------------------------------------------------------------------------------------

    def build_job(self, state: RequestState, block_ids: BlockIds, tokens: int) -> Job | FailedJob:
        """A FailedJob if the prefill was lost while the request waited for blocks."""
        start = state.num_computed_tokens
        f = _Following(state, state.pending.answer, block_ids, tokens, start, self._num_blocks(start, tokens))
        self._context.checksum_index.remove(
            block
            for ids, (size, _) in zip(block_ids, self._geometry.groups, strict=True)
            for block in ids[start // size :]
        )
        state.entries, state.positions = [], job_builder.positions(self._geometry, block_ids, start, tokens)
        job = self._next_job(f)
        assert job is not None, "there is a grant"
        self._following[state.request.request_id] = f
        return job

    def _end_in_next_step(self, f: _Following) -> None:
        """Between two calls of vLLM's scheduler: have the next step schedule the request and read the export, if all
        before it has been read and the step may wait for the rest."""
        state, sync_load, given = f.state, self._context.sync_load, f.given
        if f.closed or f.aborted or f.failed or f.results or given >= f.tokens:
            return
        grants, sizes = f.answer.grants[f.used :], tuple(size for size, _ in self._geometry.groups)
        last, same = grants[-1], state.taken_hit.instance
        if last.path is not ReadPath.MAPPED or last.instance != same or (last.block_tokens or sizes) != sizes:
            return
        nbytes = last.nbytes * (f.tokens - given) // max(1, last.tokens - last.start)
        sound = self._are_sound(state.pending, grants, given, f.tokens)
        if not (sound and sync_load.may_end(state, PEER_GPU, nbytes, same)):
            return
        job = self._read(f, [last], len(grants), more=False)
        assert isinstance(job, PeerFetchJob)
        try:
            positions = job_builder.positions(self._geometry, f.block_ids, given, f.tokens)
            sync_load.end(state, job, positions, self.submit)
        except Exception:  # the load ends as it is
            f.given, f.failed, f.closed, f.results = given, True, False, 0
            raise
        state.hit = replace(state.taken_hit, grows=False)

    def more_jobs(self) -> Iterable[Job | FailedJob]:
        while self.grown:
            request_id = self.grown.popleft()
            f = self._following.get(request_id)
            if f is None:
                continue
            try:
                job = self._next_job(f)
            except Exception:
                logger.exception("kvtier: followed prefill: an internal error; what is missing is computed")
                self.grown.append(request_id)  # if this fails too, a later step closes the load
                job = self._close(f, "an internal error; see this engine's log")
            if job is not None:
                yield job

    def _next_job(self, f: _Following) -> Job | FailedJob | None:
        """The next job, if there is something to read and the job before it has ended, or nothing more comes."""
        answer = f.answer
        if f.closed:
            return None
        if f.aborted:
            return self._close(f, "")
        ended = answer.ended  # before ``grants``, which do not change after it
        grants = answer.grants[f.used :]
        bad = not self._are_sound(f.state.pending, grants, f.given, f.tokens)
        if f.failed or bad or (ended is not None and ended.code in _GONE):
            why = (
                "a stretch was not read" if f.failed else "a malformed grant" if bad else ended.reason if ended else ""
            )
            return self._close(f, f"the rest of the prefill: {why}")
        if grants and grants[-1].final:
            return self._read(f, [grants[-1]], len(grants), more=False)
        if f.paused and not f.results:
            return self._close(f, "the rest of the prefill: this engine is paused")
        if grants and not f.results:
            return self._read(f, grants, len(grants), more=True)
        if ended is not None and not grants:
            return self._close(f, f"the rest of the prefill: {ended.reason}")
        return None

    def _read(self, f: _Following, grants: list[LeasedBlocks], used: int, more: bool) -> Job:
        """Tokens from ``f.given`` to the end of ``grants``."""
        keys, state = self._engine.identity.content_keys_of(grants[0].hash_block_size), f.state
        parts: list[list[GroupPull]] = []
        entries: list[ChecksumEntry] = []
        tokens = f.given
        for leased in grants:
            end = f.tokens if leased.final else min(leased.tokens, f.tokens)
            if leased.start > tokens:
                raise ValueError(f"a grant from token {leased.start} on, after token {tokens}")
            if end > tokens:
                rows, new = job_builder.pull_rows(state, leased, self._geometry, keys, f.block_ids, tokens, end)
                parts.append(rows)
                entries += new
                tokens = end
        groups = [GroupPull.join(g, [rows[g] for rows in parts]) for g in range(len(self._geometry.groups))]
        state.entries += job_builder.unchanged(state, entries, self._geometry, f.block_ids, f.tokens)
        self._counters.count("followed_tokens", "while_prefilling" if more else "after_prefill", tokens - f.given)
        request_id, timeout, path = state.request.request_id, self._config.transfer_timeout, grants[0].path
        job: Job
        if path is ReadPath.MAPPED:
            job = PeerFetchJob(request_id, grants[0].instance, groups, timeout, more=more)
        else:
            staged = path is ReadPath.STAGED
            job = PullJob(request_id, grants[0].instance, groups, timeout, staged=staged, more=more)
        # Behind all that may raise: what counts as given is in a job.
        f.reading += f.answer.grants[f.used : f.used + used]
        f.given, f.used, f.closed = tokens, f.used + used, not more
        f.results += self._engine.info.world_size
        return job

    def _close(self, f: _Following, reason: str) -> Job | FailedJob:
        """The last job: what is missing failed, except of a request that has ended."""
        job: Job | FailedJob
        if f.aborted:
            groups = [GroupPull.join(g, []) for g in range(len(self._geometry.groups))]
            job = PullJob(f.state.request.request_id, f.state.taken_hit.instance, groups, 0.0)
        else:
            job = job_builder.failed_job(f.state, self._geometry, f.block_ids, f.tokens, f.given, reason)
        f.closed = True
        f.results += self._engine.info.world_size
        return job

    def cancel_load(self, state: RequestState) -> None:
        f = self._following.get(state.request.request_id)
        if f is not None and not f.closed:
            f.aborted = True
            self.grown.append(state.request.request_id)

    def end_waiting_loads(self) -> None:
        for request_id, f in self._following.items():
            if not (f.closed or f.paused):
                f.paused = True
                self.grown.append(request_id)

    def remove_load(self, state: RequestState) -> None:
        self._following.pop(state.request.request_id, None)

    def on_result(self, state: RequestState, result: Result) -> None:
        f = self._following.get(state.request.request_id)
        if f is None:
            return
        f.results -= 1
        f.failed |= result.failed
        if not f.results and not f.closed:
            for leased in f.reading:
                self._lease_client.release(leased, False)
            f.reading = []
            if not f.failed and state.taken_hit.same_layout and state.life.state is State.LOADING:
                for entry in state.entries:  # now: the request waits for the load's end
                    self._context.checksum_index.mark(entry)
                state.entries = []
        self.grown.append(state.request.request_id)

    def on_loaded(self, state: RequestState) -> None:
        if state.life.state is not State.ABANDONED:
            super().on_loaded(state)

    # -- release -----------------------------------------------------------------------------------------------------

    def cancel(self, pending: PendingLookup) -> None:
        self._lease_client.stop_following(pending.answer, done=False)

    def release(self, hit: LookupHit, consumed: bool) -> None:
        """Nothing: ``release_hit`` and ``cancel`` release all that was granted."""

    def release_hit(self, state: RequestState) -> None:
        self._following.pop(state.request.request_id, None)
        answer = state.pending.answer if state.pending is not None else None
        if answer is not None:
            self._lease_client.stop_following(answer, done=True)
        if answer is None or not answer.complete:
            self.release_export(state)

    def release_export(self, state: RequestState) -> None:
        self._following.pop(state.request.request_id, None)  # after an error it may be there still
        handoff = state.hints.handoff
        if handoff is not None and handoff.follow:
            self._lease_client.release_export(handoff.address, handoff.export)
