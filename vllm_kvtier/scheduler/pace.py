"""How long the engine's steps take, for the planner.

vLLM tells a connector when it schedules a step and when it reads a step's output, in the same order, the latter with
a lag where scheduling is asynchronous. A step's time is from when the one before it was through (or from its own
scheduling, if the engine was idle) until its output.
"""

import time
from collections import deque
from collections.abc import Callable
from typing import Any

from vllm_kvtier.scheduler.planner import LEAST_TOKENS, Planner
from vllm_kvtier.scheduler.tracked import Tracked

# Decode steps say what a step costs in itself; without them it would be taken for the cost of tokens, or the reverse.
# There are thousands of them, and all say the same.
DECODES_EVERY = 8
# The first prefills of an engine compile kernels and fill caches; nothing later is like them.
WARM_UP = 2
# Steps scheduled and not read yet, at most, in vLLM (pipeline stages and a batch queue); beyond, we miscounted.
MOST_AHEAD = 64


class Pace:
    def __init__(self, planner: Planner, clock: Callable[[], float] = time.monotonic):
        self._planner, self._clock = planner, clock
        # begin, prefills as (new, before), decodes, and whether the planner is to hear of it
        self._ahead: deque[tuple[float, list[tuple[int, int]], int, bool]] = deque()
        self._last_end = self._prompts_end = 0.0
        self._decode_steps = self._prefill_steps = 0

    def begin_step(self, output: Any, tracked: Callable[[str], Tracked | None], counts: bool = True) -> None:
        """``counts``: False for a step whose time is not that of what it computes."""
        work = []
        scheduled, total, telling = output.num_scheduled_tokens, output.total_num_scheduled_tokens, False
        if total >= len(scheduled) + LEAST_TOKENS:
            for request_id, tokens in scheduled.items():
                t = tracked(request_id) if tokens >= LEAST_TOKENS else None
                if t is not None:
                    before = t.request.num_computed_tokens
                    work.append((tokens, before))
                    self._planner.computes(request_id, before + tokens)
        if not counts:
            work = []
        elif total == len(scheduled) > 0:
            self._decode_steps += 1
            telling = self._decode_steps % DECODES_EVERY == 1
        elif work:
            self._prefill_steps += 1
            telling = self._prefill_steps > WARM_UP
        if len(self._ahead) >= MOST_AHEAD:
            self._ahead.clear()
        self._ahead.append((self._clock(), work, len(scheduled) - len(work), telling))

    def end_step(self) -> None:
        """The output of the oldest step was read."""
        if not self._ahead:
            return
        now = self._clock()
        begin, work, decodes, telling = self._ahead.popleft()
        if telling:
            self._planner.observe_step(now - max(begin, self._last_end), work, decodes)
        self._last_end = now
        if work:
            self._prompts_end = now

    def prompts_since(self, moment: float) -> bool:
        """Whether a step that computed prompts was under way then, or later."""
        return self._prompts_end > moment or any(work for _, work, _, _ in self._ahead)
