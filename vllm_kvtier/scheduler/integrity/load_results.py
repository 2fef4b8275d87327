"""Ends loads, peer fetches and pulls: counts them, teaches the planner, and lets their requests go on.

On vLLM's scheduler thread only.
"""

import time
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from functools import partial

from vllm_kvtier.containment import Containment
from vllm_kvtier.jobs.results import ABORTED, Result
from vllm_kvtier.scheduler.context import LoadContext
from vllm_kvtier.scheduler.matching.request_lifecycle import State
from vllm_kvtier.scheduler.matching.request_matcher import RequestMatcher
from vllm_kvtier.scheduler.matching.request_state import LoadUnderWay, RequestState
from vllm_kvtier.scheduler.planner.step_timer import StepTimer

# By the kind of a result: the names of its counters, and the label of its corrupt blocks.
_BYTES = {"load": "loaded_bytes", "fetch": "fetched_bytes", "pull": "pulled_bytes"}
_ENDED = {"load": "loads", "fetch": "fetches", "pull": "pulls"}
_CORRUPT = {"load": "host", "fetch": "peer_gpu", "pull": "engine"}
_WORSE = ("ok", "aborted", "failed")
_LOADING = State.LOADING, State.VERIFYING, State.ABANDONED


@dataclass
class EndedLoad:
    """The results of all ranks so far for one request's load, peer fetch or pull. ``outcome``: the worst; ``seconds``:
    of the slowest rank, ``exact`` or at most."""

    kind: str  # of the results
    outcome: str = "ok"
    failed: bool = False
    verified: bool = False
    seconds: float = 0.0
    fenced: float = 0.0  # of ``seconds``, for which it waited for steps before it
    exact: bool = True
    corrupt: set[Hashable] = field(default_factory=set)  # blocks; each rank reports those that it has a part of


class LoadResults:
    def __init__(
        self,
        context: LoadContext,
        matcher: RequestMatcher,
        step_timer: StepTimer,
        containment: Containment,
        codec: Callable[[str], str],
    ):
        """``codec``: the codecs of a kind of results, for the metrics."""
        self._matcher, self._sync_load, self._planner = matcher, context.sync_load, context.planner
        self._counters, self._codec, self._contain = context.engine.counters, codec, containment
        self._step_timer, self._timeout = step_timer, context.engine.config.transfer_timeout
        self._ended: dict[str, EndedLoad] = {}

    def arrived(self, results: list[Result], finished: Iterable[str]) -> None:
        """``results`` of any rank; ``finished``: requests whose loads ended on all ranks, as vLLM counts."""
        attempt = self._contain.attempt
        verified = self._sync_load.verified(results)
        # First, so that an exception below does not keep what was computed on wrong KV.
        for request_id in verified:
            self._contain.insist(
                "apply results", partial(self._sync_load.apply_results, request_id, results), unsafe=True
            )
        unread: set[str] = set()  # after an exception
        for result in results:
            name = result.request_id
            attempt("result", self._on_result, result, name in verified, repair=partial(unread.add, name))
        for request_id in set(finished) | verified:
            ended = self._ended.pop(request_id, None)
            failed = request_id in unread or (ended is not None and ended.failed)
            failed |= request_id in verified and request_id == self._sync_load.rolled_back
            attempt(
                "end of a load", self._end, request_id, ended, failed, repair=partial(self._release_all, request_id)
            )
        attempt("results", self._remove_late, results)

    def _remove_late(self, results: list[Result]) -> None:
        for result in results:
            if not self._under_way(result.request_id):  # as after an overdue result: nothing ends it any more
                self._ended.pop(result.request_id, None)

    def _end(self, request_id: str, ended: EndedLoad | None, failed: bool) -> None:
        state = self._matcher.get(request_id)
        if ended is not None:
            self._contain.attempt("counting", self._count, ended)
        elif state is not None and state.life.state in _LOADING:
            failed = True  # no rank says that it ended well; in a MultiConnector, it may be another's load that did
        elif not failed:
            return  # another connector's load (MultiConnector tells each of all)
        if state is not None and state.hit is not None:
            self._contain.attempt("counting", self._failed if failed else self._succeeded, state, ended)
        self._matcher.on_load_ended(request_id, failed)

    def _release_all(self, request_id: str) -> None:
        for step in self._matcher.release_steps(request_id, ended=True):
            self._contain.attempt("release", step)

    def _under_way(self, request_id: str) -> bool:
        state = self._matcher.get(request_id)
        return state is not None and state.life.state in _LOADING

    def _on_result(self, result: Result, verified: bool) -> None:
        kind, count = result.kind, self._counters.count
        state = self._matcher.get(result.request_id)
        ended = self._ended.setdefault(result.request_id, EndedLoad(kind))
        ended.outcome = max(ended.outcome, self._outcome(result, state), key=_WORSE.index)
        ended.verified |= verified
        ended.seconds = max(ended.seconds, result.seconds)
        ended.fenced = max(ended.fenced, getattr(result, "fenced", 0.0))
        ended.exact &= getattr(result, "timed", True)
        count(_BYTES[kind], self._codec(kind), result.bytes)
        if state is not None and state.hit is not None:
            state.hit.source.on_result(state, result)
        if not result.failed:
            return
        ended.failed = True
        if result.checksum_mismatch:
            corrupt = result.corrupt_blocks - ended.corrupt
            count("integrity_failures", _CORRUPT[kind], len(corrupt))
            ended.corrupt |= corrupt
        if state is not None and state.hit is not None:
            state.hit.source.on_load_failed(state, result)

    def _count(self, ended: EndedLoad) -> None:
        self._counters.count(_ENDED[ended.kind], ended.outcome)
        if ended.verified:
            self._counters.count("synchronous_loads", ended.outcome)
        self._counters.observe(f"{ended.kind}_seconds", ended.outcome, ended.seconds)

    def _succeeded(self, state: RequestState, ended: EndedLoad | None) -> None:
        hit, load = state.taken_hit, state.under_way
        hit.source.on_loaded(state)
        if ended is not None and load is not None and load.expected is not None:
            self._learn_duration(state, ended, load)
        if ended is None or state.plan is None or not hit.source.cost_key:
            return
        # Without the time that it waited for other requests' steps.
        seconds, expected = ended.seconds - ended.fenced, state.plan.load_seconds
        # An upper bound is of use only if more was expected.
        if load is not None and (ended.exact or seconds < expected):
            self._planner.observe_load(load.cost_key, load.nbytes, state.plan.queued_bytes, seconds)
            if expected > 0:
                self._counters.observe("load_time_ratio", hit.source.cost_key, seconds / expected)
        if state.others_running and not state.synchronous and ended.exact:
            end = state.allocated_at + ended.seconds
            if not self._step_timer.prompts_since(end):  # a request that computes waits for such a step as well
                self._planner.observe_handover(max(0.0, time.monotonic() - end))
        self._counters.count("load_decision_seconds", "expected", expected)
        self._counters.count("load_decision_seconds", "actual", seconds)
        self._count_stages(state, ended.seconds)

    def _failed(self, state: RequestState, ended: EndedLoad | None) -> None:
        """A load that was stopped at its time limit was slow; the planner is to know before the next one waits too."""
        if ended is None or ended.outcome != "failed" or ended.seconds < self._timeout:
            return
        load, plan = state.under_way, state.plan
        if load is not None and plan is not None:
            seconds = ended.seconds - ended.fenced
            self._planner.observe_timeout(load.cost_key, load.nbytes, plan.queued_bytes, seconds)

    def _learn_duration(self, state: RequestState, ended: EndedLoad, load: LoadUnderWay) -> None:
        """Of a load that was not planned. With a synchronous one the launch of the forward counts: an upper bound."""
        assert load.expected is not None
        if ended.seconds < load.expected or (ended.exact and not state.synchronous):
            self._planner.observe_load(load.cost_key, load.nbytes, 0, ended.seconds)

    def _count_stages(self, state: RequestState, seconds: float) -> None:
        """Count a hit's stages, until its request could be scheduled or, with a synchronous load, was verified."""
        end = state.allocated_at + seconds if state.synchronous else time.monotonic()
        moments = state.begun_at, state.hit_at, state.allocated_at, end
        for stage, begin, stop in zip(("lookup", "allocate", "transfer"), moments, moments[1:], strict=False):
            self._counters.observe(state.taken_hit.source.stage_metric, stage, max(0.0, stop - begin))

    def _outcome(self, result: Result, state: RequestState | None) -> str:
        """For the metrics. A load that was stopped because its request was aborted is no failure."""
        abandoned = state is not None and state.life.state is State.ABANDONED
        aborted = abandoned and result.reason == ABORTED
        return "ok" if not result.failed else "aborted" if aborted and not result.checksum_mismatch else "failed"
