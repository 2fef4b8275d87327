"""Decides whether a request loads what a hit offers or recomputes it, at the moment when vLLM could take it.

Another process made the hit; ``KVSource.fits`` has checked its numbers. On vLLM's scheduler thread only.
"""

from vllm_kvtier.scheduler.context import LoadContext
from vllm_kvtier.scheduler.matching.request_state import RequestState


class LoadOrRecompute:
    def __init__(self, context: LoadContext):
        self._config, self._counters, self._planner = context.engine.config, context.engine.counters, context.planner
        self._geometry, self._resumes = context.engine.geometry, context.engine.info.supports_partial_prefix

    def usable_tokens(self, state: RequestState, computed: int, now: float, alone: bool = True) -> int:
        """Tokens of ``state.hit`` to load beyond ``computed``; 0: recompute, or the hit is too old. ``alone``: no other
        request is in the engine, or the step itself waits for the load."""
        hit = state.taken_hit
        if not hit.source.is_current(state, hit) or hit.start > computed or self.is_too_old(state, now):
            return 0
        prompt = state.request.num_tokens
        tokens = self._geometry.usable_tokens(hit.tokens, prompt)
        if (tokens < prompt - 1 and not self._resumes) or not self._has_needed(state, tokens):
            return 0
        gain = tokens - computed
        if hit.source.cost_key:
            return gain if gain > 0 and self._faster_than_compute(state, computed, tokens, alone) else 0
        return gain if gain >= max(1, self._config.pull_threshold) else 0

    def is_complete(self, state: RequestState) -> bool:
        """Whether ``state.hit`` has all blocks that its usable tokens need. What leased it may know other lengths."""
        return self._has_needed(state, self._geometry.usable_tokens(state.taken_hit.tokens, state.request.num_tokens))

    def is_too_old(self, state: RequestState, now: float) -> bool:
        """Whether the lease of ``state.hit`` may end before its blocks are read. It may have been granted long before
        vLLM asked for the request."""
        timeout, asked = self._config.transfer_timeout, state.pending.deadline if state.pending is not None else now
        return now - min(state.hit_at, asked + timeout) > timeout

    def _faster_than_compute(self, state: RequestState, computed: int, tokens: int, alone: bool) -> bool:
        if state.plan is not None and state.planned == (computed, tokens):
            return True  # vLLM had no room for it then
        # A load among others is of use when their steps are over; what is computed is computed in such a step.
        least = 0.0 if alone else self._planner.handover_seconds()
        hit, prompt = state.taken_hit, state.request.num_tokens
        nbytes = self._geometry.load_bytes(hit, computed)
        state.plan = self._planner.decide(hit.source.cost_key, computed, tokens, nbytes, prompt, least)
        state.planned = (computed, tokens)
        load = state.plan.should_load or self._config.load_policy == "always"
        self._counters.count("load_decisions", state.plan.reason if load == state.plan.should_load else "policy_always")
        if state.plan.compute_seconds is not None:
            self._counters.count("estimated_seconds", "load", state.plan.load_seconds)
            self._counters.count("estimated_seconds", "compute", state.plan.compute_seconds)
        return load

    def _has_needed(self, state: RequestState, tokens: int) -> bool:
        """Whether the hit has all blocks that the token after ``tokens`` tokens reads. Where a prefix needs all blocks,
        ``KVSource.fits`` has seen to it."""
        hit = state.taken_hit
        groups = self._geometry.groups
        for ids, size, group in zip(hit.blocks, hit.block_sizes(groups), groups, strict=True):
            if not group.kind.whole_prefix:
                before = hit.start // size
                # The whole of each block of ours: vLLM shares it with shorter prefixes.
                first = max(0, group.num_skipped_blocks(tokens) * group.block_tokens // size - before)
                if not all(ids[first : -(-tokens // size) - before]):
                    return False
        return True
