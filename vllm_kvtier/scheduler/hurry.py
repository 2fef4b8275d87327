"""Loads that the step which computes on them waits for, instead of the engine's loop.

An asynchronous load leaves the engine to others, and costs its request a step of theirs, or some empty ones, until
vLLM sees its end, and all of the time that launching the forward takes. Where nobody else is there, or the others
would hardly notice, vLLM is told that the tokens are loaded synchronously: it schedules the request at once, the worker
begins the load before the forward is launched, and the device runs the forward behind it. The verdict on the checksums
comes with the step's output.

Until then nobody else is matched: vLLM has the blocks in its prefix cache since they were allocated, and would share
what is not verified. So where somebody else waits to be matched no load is hurried: of several brief ones each would
take two steps, one after the other, which all take together as asynchronous loads. The blocks are pinned meanwhile, so
that those that are reported bad are this request's or nobody's, whatever becomes of it. Nothing of the request is
stored or summed for peers either. If the verdict is bad, nothing of what was computed on it is kept: the blocks leave
the prefix cache, and the request begins anew behind the last good one (``vllm_compat.undo``).

On the scheduler's thread only.
"""

import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from vllm_kvtier.logs import get_logger
from vllm_kvtier.scheduler.planner import Planner
from vllm_kvtier.scheduler.tier import HostOffer
from vllm_kvtier.scheduler.tracked import Tracked
from vllm_kvtier.vllm_compat import undo
from vllm_kvtier.vllm_compat.blocks import BlockPool
from vllm_kvtier.worker.queues import LoadResult
from vllm_kvtier.worker.work import FailedOrder, FetchOrder, LoadOrder

logger = get_logger("vllm.kvtier.hurry")

# The workers end each such load within its step, and within its time limit; their word then comes with the output.
SLACK = 10.0  # seconds
# The limit: that of a load which nobody but its request waits for may be far higher. It covers the forward before, too.
LONGEST = 3.0  # seconds
# So long no load is hurried from where one took longer than that, and nobody finds that out again.
PAUSE = 60.0  # seconds
# What others may be held up by one such load: a part of their step, which any prefill would exceed by far. Where a step
# is shorter than its launch, as in eager mode, the device has more time than that to spare.
SHARE, LEAST = 0.25, 2e-3  # of a step that only generates; seconds


class Hurry:
    def __init__(
        self,
        milliseconds: float,
        timeout: float,
        pool: BlockPool,
        scheduler: Callable[[], Any],
        connector: Any,
        planner: Planner | None = None,
    ):
        """``milliseconds``: longest load, as expected; 0: none. ``timeout``: seconds that the workers may take at most.
        ``scheduler``: vLLM's, None if not known (yet). ``connector``: what it must use, and nothing beside it."""
        self._seconds, self._timeout, self._pool = milliseconds / 1e3, timeout, pool
        self._scheduler, self._connector, self._planner = scheduler, connector, planner
        self._mapped: set[str] = set()  # engines whose memory the workers have mapped
        self._out: Tracked | None = None  # its verdict is awaited
        self._until = 0.0
        self._pinned: list[int] = []  # the blocks it is loaded into
        self._released: list[int] = []  # the same, while vLLM resets its prefix cache
        self._paused: dict[str, float] = {}  # place -> until when nothing is hurried from there

    @property
    def possible(self) -> bool:
        """Whether any load is hurried in this engine."""
        return self._seconds > 0 and self._planner is not None

    @property
    def awaits_verdict(self) -> bool:
        """Whether nobody may be matched now."""
        return self._out is not None

    def mapped(self, instance: str) -> None:
        """A copy from this engine came: beginning the next one takes no time."""
        self._mapped.add(instance)

    def suits(self, t: Tracked, computed: int, tracked: int) -> bool:
        """Whether ``t.offer``, if it is worth it, is to be loaded so. ``tracked``: requests that we know."""
        if not self.possible or t.offer is None or not t.offer.place:
            return False
        by_workers = isinstance(t.offer, HostOffer) or t.offer.mapped
        if not by_workers or t.request.num_tokens - 1 <= computed:
            return False
        # Of a session that goes on with more input, vLLM takes tokens back in ways of its own.
        if getattr(t.request, "resumable", False) or not undo.serves(self._scheduler(), self._connector):
            return False
        if self._pauses(t.offer.place):
            return False
        if tracked == 1 and undo.alone(self._scheduler()):
            return self._planner.load_seconds(t.offer.place, t.offer.nbytes) <= self._seconds
        instance = "" if isinstance(t.offer, HostOffer) else t.offer.instance
        if self.brief(t.offer.place, t.offer.nbytes, instance) is None:
            return False
        return not undo.others_wait(self._scheduler(), t.request)

    def _pauses(self, place: str) -> bool:
        return self._paused.get(place, 0.0) > time.monotonic()

    def brief(self, place: str, nbytes: int, instance: str) -> float | None:
        """Seconds that others would be held up by a load, if that is little; None: it is not. ``instance``: the engine
        it comes from, if it does.

        The forward waits for the one before it anyway, and so does an engine's load; what it adds is the copying."""
        if not self.possible or (instance and instance not in self._mapped):
            return None
        if not undo.serves(self._scheduler(), self._connector) or self._planner.loading(place) or self._pauses(place):
            return None  # what is under way there is not to be waited for
        seconds = self._planner.moving_seconds(place, nbytes)
        most = min(self._seconds, max(LEAST, SHARE * self._planner.step_seconds()))
        return seconds if seconds <= most else None

    def begin(self, t: Tracked, order: LoadOrder | FetchOrder | FailedOrder) -> None:
        """Blocks are allocated; the load is ordered for the step that is being scheduled."""
        self._free_pins()  # of the same request, if it was begun in part
        order.hurried, order.timeout = True, min(order.timeout, LONGEST)
        if t.local + t.pulled == t.request.num_tokens - 1 < t.offer.tokens:
            t.pulled += 1  # loaded with its block; vLLM could not be told so
        self._out, self._until = t, time.monotonic() + self._timeout + SLACK
        # vLLM goes by their ids when some are reported bad. The request may lose them before: it may be aborted, and
        # others, which go on, may need room; there are requests that are given blocks whatever vLLM is told.
        self._pinned = self._pool.pin(order.block_list)

    def unpin(self) -> None:
        """vLLM is to reset its prefix cache, for which no block may be held; ``pin_again`` is to follow. Nothing is
        unpinned that somebody else holds as well, as the request itself: then it is not reset."""
        if self._pool.held_once(self._pinned) == len(self._pinned):
            self._pool.free(self._pinned)
            self._released, self._pinned = self._pinned, []

    def pin_again(self) -> None:
        """It was reset, or not; nobody was given a block meanwhile. The verdict is still to come."""
        self._pinned += self._pool.pin(self._released)
        self._released = []

    def watch(self) -> None:
        """A step was scheduled, in which the request may have been preempted: what was computed on its load is not to
        be given out, since nobody will know then that it was wrong."""
        if self._out is not None:
            undo.drop_output(self._out.request)

    def overdue(self) -> LoadResult | None:
        """What to make of a verdict that never came. Nothing that we know of leads here, but the engine must not stand
        still for ever."""
        if self._out is None or time.monotonic() < self._until:
            return None
        order = self._out.load
        logger.error("kvtier: request %s: its load was never verified; it is computed", order.request_id)
        return LoadResult(order.request_id, order.all_blocks, "never verified", 0, self._timeout, 0.0)

    def judged(self, results: Iterable[Any]) -> set[str]:
        """The request on which all ranks give their verdict in these results, if one does: of one step's output."""
        name = self._out.request.request_id if self._out is not None else None
        return {name for result in results if result.request_id == name}

    def settle(self, request_id: str, results: Iterable[Any]) -> None:
        """The verdict, before the matcher hears that the load has ended."""
        t = self._out
        if t is None or t.request.request_id != request_id:
            return
        mine = [result for result in results if result.request_id == request_id]
        if bad := {block for result in mine for block in result.bad_blocks}:
            self._take_back(t, bad)
        # Only now: whatever raises before, the verdict is still to be settled.
        self._free_pins()
        self._out = None
        if any(result.failed and not result.checksum for result in mine):
            self._look_at(t, max(result.seconds for result in mine))

    def _free_pins(self) -> None:
        if self._pinned:
            self._pool.free(self._pinned)
            self._pinned = []

    def _look_at(self, t: Tracked, seconds: float) -> None:
        """It did not come, or too late: what others pay for that they are to pay once."""
        if not isinstance(t.offer, HostOffer):
            self._mapped.discard(t.offer.instance)  # whether it can be mapped is asked anew, by an engine's load
        if seconds < t.load.timeout:
            return
        self._paused[t.offer.place] = time.monotonic() + PAUSE
        logger.warning(
            "kvtier: a load that its step waited for took more than %g s; for %g s none is waited for so (from: %s)",
            t.load.timeout, PAUSE, t.offer.place,
        )  # fmt: skip

    def _take_back(self, t: Tracked, bad: set[int]) -> None:
        """What was computed behind the first of these blocks, and was cached with it."""
        (load,) = t.load.groups
        places, wrong = t.places[load.group], np.isin(load.blocks, list(bad))
        first = int((places[wrong] if wrong.any() else places).min())
        # By content, because the request may have lost its blocks meanwhile.
        self._pool.evict((bytes(h) for h in t.request.block_hashes[first:]), load.group)
        scheduler = self._scheduler()
        if scheduler is not None:
            undo.compute_again(scheduler, t.request)
        # Not to be matched anew for this: what the store has of it was just tried.
        t.preemptions = getattr(t.request, "num_preemptions", 0)
