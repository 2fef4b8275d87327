"""Which candidates of a request's sources are asked, in which order, and which answer is taken.

Candidates are asked one after the other, in the order of the sources. A hit of a source with ``holds_hit`` is kept
while the others are asked for more. On the scheduler's thread only; ``sources.base`` says what a source does.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from vllm_kvtier.logs import get_logger
from vllm_kvtier.scheduler.context import LoadContext
from vllm_kvtier.scheduler.matching.request_lifecycle import Action, Event, State
from vllm_kvtier.scheduler.matching.request_state import RequestState
from vllm_kvtier.scheduler.sources.base import Candidate, KVSource, LookupHit, LookupMiss, Need

logger = get_logger(__name__)

# A source that answers soon takes a fraction of a millisecond. Without other requests this wait is shorter than the
# empty step that vLLM makes without an answer.
SHORT_WAIT = 3e-3  # seconds
# Without an answer a request waits for a whole step of the others. They can spare this, up to such a share of the time.
# A peer engine that launches a step meanwhile answers in 1 to 3 ms (``benchmarks/asks.py``).
BUSY_WAIT = 3e-3
BUSY_SHARE = 0.01
MAX_WAIT_BUDGET = 20e-3  # seconds of it that may be saved up
_NOT_KEPT = "unknown_export", "peer_restarted"  # misses after which the peer keeps nothing for the request
# Times that one request may have that, until it is looked up anew: for the store, and for a peer that the store names.
MAX_WAITS = 2


class SourceSelector:
    def __init__(self, context: LoadContext, sources: Sequence[KVSource]):
        """``sources``: in the order in which they are asked."""
        self.sources = sources
        self.looking_ahead = [source for source in sources if source.looks_ahead]
        self._config, self._counters = context.engine.config, context.engine.counters
        self._resumes = context.engine.info.supports_partial_prefix
        self._wait_budget, self._budget_at = MAX_WAIT_BUDGET, time.monotonic()  # waiting among others, and as of when
        self.aborted: list[str] = []  # requests whose loads the workers need not continue

    def is_excluded(self, state: RequestState) -> bool:
        """Whether no source is of use to this request."""
        return not self._resumes or state.request.skip_reading_prefix_cache

    def awaited_states(self, t: RequestState) -> int:
        """Tokens behind which a source that is still to be asked, or was asked last, has the states; 0 without one."""
        sources = self.sources
        if t.candidates is not None:
            asked = [t.candidate] if t.candidate is not None and t.life.state is not State.NEW else []
            sources = [each.source for each in (*asked, *t.candidates)]
        return max((source.last_state(t) for source in sources), default=0)

    def candidates_after_loss(self) -> deque[Candidate]:
        return deque(candidate for source in self.sources for candidate in source.candidates_after_loss())

    def candidates_after_failure(self, state: RequestState) -> deque[Candidate]:
        """What is asked after a transfer from another engine failed: the store, which names peers anew, and then what
        was not asked yet. So it goes on as after a refusal, and no failure has an engine asked again."""
        left = (candidate for candidate in state.candidates or () if not candidate.instance)
        return deque(dict.fromkeys((*self.candidates_after_loss(), *left)))

    # -- lookup ------------------------------------------------------------------------------------------------------

    def ask_again(self, state: RequestState) -> None:
        """Have the candidate that was asked last asked next, from where vLLM's prefix cache ends now."""
        assert state.candidate is not None and state.candidates is not None, "it was asked"
        self.advance(state, Event.ASK_AGAIN)
        state.candidates.appendleft(state.candidate)
        state.asked_again, state.num_waits = True, 0

    def ask_next(self, state: RequestState, computed: int, alone: bool) -> bool:
        """Ask the next candidate that is worth it; False if none is left. ``alone``: no other request is here."""
        request = state.request
        if state.candidates is None:
            candidates = [candidate for source in self.sources for candidate in source.candidates(state)]
            state.candidates, state.begun_at = deque(candidates), time.monotonic()
        lacking = request.num_tokens - 1 - computed  # at least the last token is computed here
        if request.skip_reading_prefix_cache:
            lacking = 0  # prompt log-probabilities need every token computed; vLLM asks anyway
        left = lacking if state.held is None else request.num_tokens - 1 - state.held.tokens
        need = Need(computed, lacking, left, alone)
        while state.candidates:
            candidate = state.candidates.popleft()
            state.pending = candidate.source.lookup(state, candidate, need)
            if state.pending is None:
                continue
            state.candidate, state.waits_since, state.asked_at = candidate, 0.0, time.monotonic()
            state.life.fire(Event.LOOKUP)
            # Without a lease only what was just promised is read: by now the peer may have ended it.
            early = None if state.asked_again else candidate.source.early_hit(state)
            if early is not None:  # the lookup stays under way
                self._take(state, early)
            else:
                self.wait_briefly(state, alone)
            return True
        if state.held is not None:
            state.hit, state.held = state.held, None
            state.life.fire(Event.TAKE_HELD_HIT)
            return True
        return False

    def _take(self, state: RequestState, hit: LookupHit) -> None:
        state.hit, state.hit_at = hit, time.monotonic()
        state.life.fire(Event.HIT)

    def wait_briefly(self, state: RequestState, alone: bool) -> None:
        """Wait for an answer, if one is expected soon."""
        if state.pending is None or not state.pending.source.answers_at_once(state.pending):
            return
        if alone:
            state.pending.wait(SHORT_WAIT)
            return
        now = time.monotonic()
        self._wait_budget = min(MAX_WAIT_BUDGET, self._wait_budget + BUSY_SHARE * (now - self._budget_at))
        self._budget_at = now
        if self._wait_budget >= BUSY_WAIT and state.num_waits < MAX_WAITS:
            state.num_waits += 1
            state.pending.wait(BUSY_WAIT)
            self._wait_budget -= time.monotonic() - now

    def answered(self, state: RequestState) -> bool:
        """Apply the answer to ``state.pending``, or ask again if it is old; False while there is none."""
        pending, candidate = state.pending, state.candidate
        assert pending is not None and candidate is not None
        result, source = pending.poll(), pending.source
        if result is not None and result.found and source.cost_key and not state.asked_again:
            # While vLLM has no room for requests, it does not ask for what was answered. Once: its steps may be long.
            if time.monotonic() > pending.deadline + source.max_hold_seconds:
                self.ask_again(state)
                return True
        if result is None:
            # Every lookup ends by its deadline, unless the thread died that ends it.
            if time.monotonic() < pending.deadline + 1.0:
                return False
            state.decline_lookup(self._counters, "timeout")
            self.advance(state, Event.TIMEOUT)
        elif again := source.retry_lookup(state, result):
            self.release_held(state)
            state.pending = again
            if result.found:
                state.held, state.hit_at = result, again.deadline  # leased meanwhile
            return False
        elif not result.found:
            self._add_candidates(state, result)
            logger.debug("kvtier: %s: %s", state.request.request_id, result.reason)
            self._miss(state, result.code)
            if result.code not in _NOT_KEPT:
                candidate.source.release_export(state)  # the prompt is computed here
        elif source.holds_hit:
            source.on_held(state, result)
            self.release_held(state)
            state.pending, state.held, state.hit_at = None, result, time.monotonic()
            self._add_candidates(state, result)
            state.life.fire(Event.HOLD_HIT)
        elif not source.fits(state, result):
            source.release(result, True)
            self._miss(state, "malformed")
        elif state.held is not None and not source.beats(state, result, state.held):
            source.release(result, False)
            self._miss(state, "store_has_as_much")
        else:
            self.release_held(state)
            self._take(state, result)
        if not state.waits_since:  # else the wait for a promotion took most of the time
            self._counters.observe("lookup_seconds", candidate.source.name, time.monotonic() - state.asked_at)
        elif result is None or not result.found:  # ``on_held`` counts other waits
            self._counters.observe("promotion_wait_seconds", "", time.monotonic() - state.waits_since)
        return True

    @staticmethod
    def _add_candidates(state: RequestState, result: LookupHit | LookupMiss) -> None:
        assert state.candidates is not None
        state.candidates.extendleft(reversed(result.candidates))

    def _miss(self, state: RequestState, reason: str) -> None:
        state.decline_lookup(self._counters, reason)
        state.life.fire(Event.MISS)
        state.pending = None

    def decline(self, state: RequestState, complete: bool = True) -> None:
        """``complete``: see ``LoadOrRecompute.is_complete``."""
        hit = state.taken_hit
        if hit.tokens <= state.num_computed_tokens:
            reason = "local_cache_hit"
        elif not complete:
            reason = "incomplete_hit"
        else:
            reason = "load_slower_than_compute" if hit.source.cost_key else "below_threshold"
        state.decline_lookup(self._counters, reason)
        self.advance(state, Event.DECLINE)

    # -- release -----------------------------------------------------------------------------------------------------

    def advance(self, state: RequestState, event: Event) -> None:
        """Fire ``event``, after its action: if that raises, the state is unchanged."""
        action = state.life.action(event)
        if action is Action.CANCEL_LOOKUP and state.pending is not None:
            source = state.pending.source
            source.cancel(state.pending)
            state.pending = None
            source.release_export(state)
        elif action is Action.CANCEL_TO_ASK and state.pending is not None:
            state.pending.source.cancel(state.pending)
            state.pending = state.hit = state.plan = None
        elif action is Action.RELEASE and state.hit is not None:
            state.hit.source.release_hit(state)
        elif action is Action.CANCEL_LOAD:
            if state.can_cancel_load:
                self.aborted.append(state.request.request_id)
            if state.hit is not None:
                state.hit.source.cancel_load(state)
        state.life.fire(event)

    def release_held(self, state: RequestState) -> None:
        if state.held is not None:
            state.held.source.release(state.held, False)
            state.held = None

    def cancel_prefetch(self, state: RequestState) -> None:
        for source in self.looking_ahead:
            source.cancel_prefetch(state.request.request_id)

    def release_export(self, state: RequestState) -> None:
        for source in self.sources:
            source.release_export(state)

    def release_steps(self, request_id: str, state: RequestState | None) -> list[Callable[[], object]]:
        """As ``RequestMatcher.release_steps``."""
        ahead = self.looking_ahead
        steps: list[Callable[[], object]] = [partial(source.cancel_prefetch, request_id) for source in ahead]
        if state is None:
            return steps
        held, hit, pending = state.held, state.hit, state.pending
        state.held = state.hit = state.pending = None
        if pending is not None:  # also releases its hit, if that was taken
            steps.append(partial(pending.source.cancel, pending))
        for each in (held, hit):
            if each is not None and each.lease and (pending is None or pending.outcome is not each):
                steps.append(partial(each.source.release, each, False))
        return steps + [partial(source.release_export, state) for source in self.sources]
