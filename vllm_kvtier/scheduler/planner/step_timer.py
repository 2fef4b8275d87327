"""How long the engine's steps take, for the planner.

vLLM tells a connector when it schedules a step and when it reads a step's output, in the same order, the latter with
a lag where scheduling is asynchronous. A step's time is from when the one before it was through (or from its own
scheduling, if the engine was idle) until its output.
"""

import time
from collections import deque
from collections.abc import Callable
from typing import Any

from vllm_kvtier.scheduler.matching.request_state import RequestState
from vllm_kvtier.scheduler.planner.load_planner import MIN_PREFILL_TOKENS, LoadPlanner

# Decode steps show the fixed cost of a step. One in so many is enough.
OBSERVE_DECODE_EVERY = 8
# The first prefills of an engine compile kernels and fill caches.
WARM_UP_PREFILLS = 2
# After so many, one in so many steps with fewer new tokens is enough: each short prompt among others makes such a step,
# and observing it takes as long as matching a request.
KNOWN_PREFILLS, OBSERVE_PREFILL_EVERY, LONG_PREFILL_TOKENS = 64, 4, 4096
# vLLM has fewer steps that are scheduled and not read (pipeline stages, a batch queue); with more, the count is wrong.
MAX_STEPS_AHEAD = 64


class StepTimer:
    def __init__(self, planner: LoadPlanner, clock: Callable[[], float] = time.monotonic):
        self._planner, self._clock = planner, clock
        # scheduled and not read: begin, prefills as (new, before), decodes, and whether the planner gets it
        self._steps: deque[tuple[float, list[tuple[int, int]], int, bool]] = deque()
        self._last_end = self._prompts_end = 0.0
        self._decode_steps = self._prefill_steps = 0

    def begin_step(self, output: Any, tracked: Callable[[str], RequestState | None], counts: bool = True) -> None:
        """``counts``: False for a step whose time is not that of what it computes."""
        work: list[tuple[int, int]] = []
        scheduled, total, sampled = output.num_scheduled_tokens, output.total_num_scheduled_tokens, False
        if self._planner.to_compute:
            for request_id in scheduled.keys() & self._planner.to_compute.keys():
                state = tracked(request_id)
                if state is not None:
                    self._planner.computes(request_id, state.request.num_computed_tokens + scheduled[request_id])
        if total >= len(scheduled) + MIN_PREFILL_TOKENS:
            for request_id, tokens in scheduled.items():
                state = tracked(request_id) if tokens >= MIN_PREFILL_TOKENS else None
                if state is not None:
                    work.append((tokens, state.request.num_computed_tokens))
        if not counts:
            work = []
        elif total == len(scheduled) > 0:
            self._decode_steps += 1
            sampled = self._decode_steps % OBSERVE_DECODE_EVERY == 1
        elif work:
            self._prefill_steps += 1
            each = self._prefill_steps <= KNOWN_PREFILLS or total >= LONG_PREFILL_TOKENS
            sampled = self._prefill_steps > WARM_UP_PREFILLS
            sampled = sampled and (each or self._prefill_steps % OBSERVE_PREFILL_EVERY == 0)
        if len(self._steps) >= MAX_STEPS_AHEAD:
            self._steps.clear()
        self._steps.append((self._clock(), work, len(scheduled) - len(work), sampled))

    def end_step(self) -> None:
        """The output of the oldest step was read."""
        if not self._steps:
            return
        now = self._clock()
        begin, work, decodes, sampled = self._steps.popleft()
        if sampled:
            self._planner.observe_step(now - max(begin, self._last_end), work, decodes)
        self._last_end = now
        if work:
            self._prompts_end = now

    def prompts_since(self, moment: float) -> bool:
        """Whether a step that computed prompts was under way then, or later."""
        return self._prompts_end > moment or any(work for _, work, _, _ in self._steps)
