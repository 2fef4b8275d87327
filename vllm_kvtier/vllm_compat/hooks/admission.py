"""The blocks that vLLM's scheduler wants free before it gives a waiting request its own. Scheduler thread.

Besides those of the request, vLLM (0.25.1 to 0.33) keeps ``--watermark`` blocks free while another request runs. For an
asynchronous load it also keeps free what all prefills under way lack still. Among these it counts a request whose load
failed, and which has no blocks any more: offered a load again, the request would need all of its blocks twice. From
0.31 on it also keeps free what a step with drafts takes, even in an empty cache.

For a request that has blocks already vLLM asks no connector: one whose load ended, by whichever connector, or a session
that goes on with more input. While it gets no more blocks, no request behind it is admitted.
"""

from itertools import islice
from typing import Any

from vllm.v1.request import RequestStatus

# Up to 0.30 vLLM has no queue of requests with blocks alone. In a step it goes through about so many of those that it
# has skipped (see ``WaitingLoop``), and then through the others; that which it has no blocks for stays the first.
MOST_SKIPPED = 256
READY = (RequestStatus.WAITING, RequestStatus.PREEMPTED)
# Of vLLM's scheduler in all releases.
NEEDED = (
    "running", "waiting", "kv_cache_manager", "num_lookahead_tokens", "num_spec_tokens", "_inflight_prefills",
    "_inflight_prefill_reserved_blocks",
)  # fmt: skip


class Admission:
    def __init__(self) -> None:
        self.scheduler: Any = None
        self.queues: tuple[Any, ...] = ()  # that may have requests with blocks
        self._most: tuple[int | None, ...] = (None,)  # requests of each that are looked at

    def install(self, scheduler: Any, loaded: Any = ()) -> None:
        """``loaded``: as ``LoadedFirst.queue``. Does nothing for a scheduler of the user's own that lacks what is read
        here: which blocks it keeps free is unknown."""
        if not all(hasattr(scheduler, name) for name in NEEDED):
            return
        self.scheduler = scheduler
        if hasattr(scheduler, "kv_holding_waiting"):
            self.queues = (scheduler.kv_holding_waiting,)
        elif hasattr(scheduler, "skipped_waiting"):
            self.queues, self._most = (loaded, scheduler.skipped_waiting, scheduler.waiting), (None, MOST_SKIPPED, 1)

    def lacking_tokens(self) -> int:
        """The most tokens that a request with blocks lacks, and may have no blocks for, before vLLM schedules it."""
        lacking = 0
        for queue, most in zip(self.queues, self._most, strict=True):
            for request in islice(queue, most):
                if request.num_computed_tokens and request.status in READY:
                    lacking = max(lacking, request.num_tokens - request.num_computed_tokens)
        return lacking

    def kept_free(self) -> int:
        """Blocks that stay free when vLLM admits or resumes a request now."""
        scheduler = self.scheduler
        return scheduler.kv_cache_manager.watermark_blocks if scheduler is not None and scheduler.running else 0

    def draft_tokens(self) -> int:
        """The most tokens for drafts, and for the rows of a step with drafts, that a request with blocks wants blocks
        for beside its own tokens."""
        scheduler = self.scheduler
        return 0 if scheduler is None else scheduler.num_lookahead_tokens + scheduler.num_spec_tokens

    def draft_blocks(self) -> int:
        """Blocks that vLLM wants free beside those of an asynchronous load, for its request's drafts."""
        blocks = getattr(self.scheduler, "_spec_decode_step_blocks", 0)
        return blocks() if callable(blocks) else blocks  # a method in 0.31

    def reserved_blocks(self) -> int:
        """Blocks that vLLM wants free beside those of an asynchronous load: for its request's drafts, and for the rest
        of all prefills under way."""
        scheduler = self.scheduler
        return scheduler._inflight_prefill_reserved_blocks() + self.draft_blocks() if scheduler is not None else 0

    def is_before_loaded(self, request: Any) -> bool:
        """Whether this request, which vLLM asks for, stands before those with blocks, and may wait for these: its own
        load failed. Without an answer it is put behind them. Up to 0.30 ``LoadedFirst`` does so in the next step."""
        return request in getattr(self.scheduler, "kv_holding_waiting", ())

    def asked_for(self, request: Any) -> int:
        """As ``kept_free``, when vLLM asks the connector for this request. It has no blocks then, and none are to be
        kept free for the rest of its prefill."""
        scheduler = self.scheduler
        if scheduler is None:
            return 0
        scheduler._inflight_prefills.discard(request)
        return scheduler.kv_cache_manager.watermark_blocks if scheduler.running else 0
