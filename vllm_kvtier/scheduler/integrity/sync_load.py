"""Synchronous loads: the forward pass waits for the load on the device.

An asynchronous load leaves the engine to other requests. It costs its request one of their steps, or some empty ones,
until vLLM sees its end, and the time that launching the forward takes. Where no other request is running, or the others
would hardly notice, vLLM loads the tokens synchronously: it schedules the request at once, the worker begins the load
before the forward is launched, and the device runs the forward behind it. The verification result comes with the step's
output.

vLLM puts the blocks in its prefix cache at allocation, before they are verified. Therefore no other request is matched
until the result is known. For the same reason no load is synchronous while another request waits to be matched: several
short ones would take two steps each, one after the other, and as asynchronous loads they take two steps together.

The blocks are pinned meanwhile, so that they stay as they are. Nothing of the request is stored, and no checksum of it
is made for peers. ``verify`` sees the result before vLLM reads the step's output. If it is bad, or missing, nothing
that was computed on the load is kept: the blocks leave the prefix cache, and the request begins anew behind the last
good one (``vllm_compat.hooks.rollback``).

On vLLM's scheduler thread only.
"""

import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from vllm_kvtier.jobs.results import LoadResult
from vllm_kvtier.jobs.transfer_jobs import FailedJob, LoadJob, PeerFetchJob
from vllm_kvtier.logs import get_logger
from vllm_kvtier.scheduler.matching.request_lifecycle import Event
from vllm_kvtier.scheduler.matching.request_state import RequestState
from vllm_kvtier.scheduler.planner.load_planner import LoadPlanner
from vllm_kvtier.scheduler.sources.base import LookupHit
from vllm_kvtier.vllm_compat.hooks import rollback
from vllm_kvtier.vllm_compat.hooks.block_pool import BlockPool

logger = get_logger(__name__)

SyncJob = LoadJob | PeerFetchJob | FailedJob

# The workers end each such load within its step and its time limit, and report it with the step's output.
RESULT_GRACE_SECONDS = 10.0
# Time limit of such a load, which covers the forward before it too. An asynchronous load delays only its own request
# and may have far more.
MAX_SYNC_LOAD_SECONDS = 3.0
# After a source exceeded that limit, its loads are asynchronous for so long.
BACKOFF_SECONDS = 60.0
# Other requests may be delayed by one such load for this share of a step that only generates, which any prefill would
# exceed by far; or for so many seconds: where a step is shorter than its launch, as in eager mode, the device idles.
MAX_STEP_SHARE, SHORT_LOAD_SECONDS = 0.25, 2e-3


class SyncLoad:
    def __init__(
        self,
        milliseconds: float,
        timeout: float,
        pool: BlockPool,
        scheduler: Callable[[], Any],
        connector: Any,
        planner: LoadPlanner,
    ):
        """``milliseconds``: maximum expected duration of a load; 0: none is synchronous. ``timeout``: seconds that the
        workers may take. ``scheduler``: vLLM's, None if not known (yet). ``connector``: the only one that it must have.
        """
        self._seconds, self._timeout, self._pool = milliseconds / 1e3, timeout, pool
        self._scheduler, self._connector, self._planner = scheduler, connector, planner
        self._mapped: set[str] = set()  # engines whose memory the workers have mapped
        self._unverified: RequestState | None = None  # the request whose verification is pending
        self._job: SyncJob | None = None  # its job
        self.rolled_back: str | None = None  # the request whose load failed, until the next one begins
        self._unannounced = False  # vLLM does not know that the step will have it
        self._until = 0.0
        self._good = False  # it is verified, but its end is not handled yet
        self._hashes: set[bytes] = set()  # of its blocks, and of those computed on them; made when one is asked for
        self._pinned: list[int] = []  # the blocks it is loaded into
        self._released: list[int] = []  # the same, while vLLM resets its prefix cache
        self._backoff_until: dict[str, float] = {}  # cost key -> until when its loads are asynchronous

    @property
    def possible(self) -> bool:
        """Whether any load is synchronous in this engine."""
        return self._seconds > 0

    @property
    def verification_pending(self) -> bool:
        """No request may be matched now."""
        return self._unverified is not None

    def is_unverified(self, block_hash: bytes) -> bool:
        """Whether vLLM's prefix cache may have this content from the pending load, or computed on it."""
        state = self._unverified
        if state is None or self._good:
            return False
        if len(self._hashes) < len(state.request.block_hashes):  # it may have got tokens since
            self._hashes = {bytes(each) for each in state.request.block_hashes}
        return block_hash in self._hashes

    def mapped(self, instance: str) -> None:
        """The workers have mapped this peer's memory: the next peer fetch begins at once."""
        self._mapped.add(instance)

    def is_mapped(self, instance: str) -> bool:
        return instance in self._mapped

    def is_eligible(self, state: RequestState, computed: int, tracked: int) -> bool:
        """Whether ``state.hit`` may be loaded synchronously. ``tracked``: number of requests that the matcher knows."""
        hit = state.hit
        if not self.possible or hit is None:
            return False
        cost_key = hit.source.timed_as(hit)
        if not cost_key or not hit.source.supports_sync_load(hit) or state.request.num_tokens - 1 <= computed:
            return False
        if not rollback.possible(self._scheduler(), self._connector, state.request, hit.tokens):
            return False
        if self._is_backing_off(cost_key):
            return False
        return self._is_short(state.request, cost_key, hit.bytes_from(computed), hit.instance if hit.mapped else "",
                              tracked == 1)  # fmt: skip

    def _is_short(self, request: Any, cost_key: str, nbytes: int, instance: str, alone: bool) -> bool:
        """Whether a step may wait for such a load. ``alone``: the matcher knows no other request."""
        if alone and rollback.alone(self._scheduler()):
            return self._planner.load_seconds(cost_key, nbytes) <= self._seconds
        if self.short_load_seconds(cost_key, nbytes, instance) is None:
            return False
        return not rollback.others_wait(self._scheduler(), request)

    def may_end(self, state: RequestState, cost_key: str, nbytes: int, instance: str) -> bool:
        """Whether the rest of this request's asynchronous load may be synchronous, in the next step. ``nbytes`` of it
        come from the peer ``instance``. Not in a paused engine, whose next step may be after a reset of its cache."""
        if not self.possible or self.verification_pending or instance not in self._mapped:
            return False
        scheduler, request = self._scheduler(), state.request
        if not rollback.possible(scheduler, self._connector, request, request.num_tokens - 1):
            return False
        if rollback.is_paused(scheduler) or not rollback.waits_for_load(scheduler, request):
            return False
        if self._is_backing_off(cost_key):
            return False
        return self._is_short(request, cost_key, nbytes, instance, True)

    def end(
        self,
        state: RequestState,
        job: SyncJob,
        positions: dict[int, np.ndarray],
        submit: Callable[[SyncJob], object],
    ) -> None:
        """``may_end``: the next step gets the load's last ``job``, for blocks at ``positions`` of the prompt, and vLLM
        schedules the request in it, if it has room, or later. In either case the job is verified with that step's
        output."""
        self.begin(state, job)
        self._unannounced = True
        state.positions, state.synchronous = positions, True
        state.life.fire(Event.ALLOCATE_SYNC)
        submit(job)
        rollback.end_load(self._scheduler(), state.request)

    def announce(self, output: Any) -> None:
        """vLLM does not know that this step has a synchronous load, if it is the rest of an asynchronous one."""
        if self._unannounced:
            output.has_sync_kv_loads, self._unannounced = True, False

    def _is_backing_off(self, cost_key: str) -> bool:
        return self._backoff_until.get(cost_key, 0.0) > time.monotonic()

    def short_load_seconds(self, cost_key: str, nbytes: int, instance: str) -> float | None:
        """Seconds that a load would delay other requests, if few; else None. ``instance``: the peer it is from, or "".

        The forward waits for the one before it anyway, and so does a peer fetch; it adds the time of the copy."""
        if not self.possible or (instance and instance not in self._mapped):
            return None
        if (
            not rollback.serves(self._scheduler(), self._connector)
            or self._planner.loading(cost_key)
            or self._is_backing_off(cost_key)
        ):
            return None  # the load would wait for others of its source
        seconds = self._planner.moving_seconds(cost_key, nbytes)
        most = min(self._seconds, max(SHORT_LOAD_SECONDS, MAX_STEP_SHARE * self._planner.step_seconds()))
        return seconds if seconds <= most else None

    def begin(self, state: RequestState, job: SyncJob) -> None:
        """Blocks are allocated; the step that is being scheduled has the load's job."""
        self._free_pins()  # of the same request, if this raised before
        job.synchronous, job.timeout = True, min(job.timeout, MAX_SYNC_LOAD_SECONDS)
        self._unverified, self._job, self._until = state, job, time.monotonic() + self._timeout + RESULT_GRACE_SECONDS
        self.rolled_back, self._hashes, self._good = None, set(), False
        # The request may lose them before: it may be aborted, and others would get its blocks.
        self._pinned = self._pool.pin(job.block_list)

    def unpin(self) -> None:
        """vLLM resets its prefix cache if no block is held; ``pin_again`` follows. If the request holds these blocks as
        well, they stay pinned: vLLM does not reset."""
        if self._pool.held_once(self._pinned) == len(self._pinned):
            self._pool.free(self._pinned)
            self._released, self._pinned = self._pinned, []

    def pin_again(self) -> None:
        """The reset is over, and the verification result still to come. No block was handed out meanwhile."""
        self._pinned += self._pool.pin(self._released)
        self._released = []

    def drop_unverified_output(self) -> None:
        """Drop the output in flight of the request if the step that was just scheduled preempted it. The output was
        computed on an unverified load, and a failed verification could no longer take it back."""
        if self._unverified is not None:
            rollback.drop_output(self._unverified.request)

    def overdue(self) -> LoadResult | None:
        """A failed result in place of one that never came, so that matching goes on. No known fault leads here."""
        job = self._job
        if self._unverified is None or job is None or time.monotonic() < self._until:
            return None
        logger.error("kvtier: request %s: its load was never verified; it is computed", job.request_id)
        return LoadResult(job.request_id, job.all_blocks, "never verified", 0, self._timeout, 0.0)

    def verified(self, results: Iterable[Any]) -> set[str]:
        """The request whose verification these results of a step end, if there is one."""
        name = self._unverified.request.request_id if self._unverified is not None else None
        return {name for result in results if result.request_id == name}

    def verify(self, results: Iterable[Any], ranks: int) -> None:
        """vLLM is about to read the output of the step that computed on the load, with ``results`` of all ``ranks``.
        Roll the request back if blocks are bad, or if a rank does not say that they are not."""
        state, job = self._unverified, self._job
        if state is None or job is None:
            return
        mine = [result for result in results if result.request_id == job.request_id]
        bad = {block for result in mine for block in result.bad_blocks} if len(mine) >= ranks else job.all_blocks
        self._good = not bad
        self._roll_back(state, job, bad)

    def apply_results(self, request_id: str, results: Iterable[Any]) -> None:
        """Apply the verification results of one step to the synchronous load of this request, as ``verify``. Unpin its
        blocks, and permit matching again. The matcher handles the end of the load afterwards.
        """
        state, job = self._unverified, self._job
        if state is None or job is None or state.request.request_id != request_id:
            return
        mine = [result for result in results if result.request_id == request_id]
        self.verify(mine, len(mine))
        # Last: if a line before raises, the result is still pending and ``apply_results`` runs again.
        self._free_pins()
        self._unverified = self._job = None
        if any(result.failed and not result.checksum_mismatch for result in mine):
            self._back_off(state.taken_hit, job, max(result.seconds for result in mine))

    def _free_pins(self) -> None:
        if self._pinned:
            self._pool.free(self._pinned)
            self._pinned = []

    def _back_off(self, hit: LookupHit, job: SyncJob, seconds: float) -> None:
        """A synchronous load failed without a wrong checksum. If it took its whole time limit, load asynchronously
        from this source for ``BACKOFF_SECONDS``: other requests waited for it too."""
        self._mapped.discard(hit.instance)  # an asynchronous load finds out whether it can still be mapped
        if seconds >= job.timeout:
            cost_key = hit.source.timed_as(hit)
            self._backoff_until[cost_key] = time.monotonic() + BACKOFF_SECONDS
            logger.warning(
                "kvtier: sync load: a load took more than %g s; for %g s loads are asynchronous (source: %s)",
                job.timeout, BACKOFF_SECONDS, cost_key,
            )  # fmt: skip

    def _roll_back(self, state: RequestState, job: SyncJob, bad: set[int]) -> None:
        """Remove the request's blocks from the first bad one on from the prefix cache, and have vLLM recompute them."""
        if self.rolled_back is not None or not bad:
            return
        first = self._first_bad(state, job, bad) // self._pool.hash_block_size
        # By content, because the request may have lost its blocks meanwhile.
        self._pool.evict(bytes(h) for h in state.request.block_hashes[first:])
        scheduler = self._scheduler()
        if scheduler is not None:
            rollback.preempt_and_recompute(scheduler, state.request, first * self._pool.hash_block_size)
        # This preemption must not cause a new lookup: the store's blocks were just tried.
        state.preemptions, self.rolled_back = state.request.num_preemptions, job.request_id

    def _first_bad(self, state: RequestState, job: SyncJob, bad: set[int]) -> int:
        """The first token of the first bad block; of the load, if it is not among the load's blocks, or if there are
        several groups: of states and windows a load brings those at its end, without which the rest is of no use."""
        ids, sizes = list(bad), self._pool.group_tokens
        positions = {load.group: state.positions[load.group] for load in job.groups if len(load.blocks)}
        if len(sizes) == 1:
            (load,) = job.groups
            wrong = np.isin(load.blocks, ids)
            positions = {0: positions[0][wrong] if wrong.any() else positions[0]}
        return min(int(found.min()) * sizes[group] for group, found in positions.items())
