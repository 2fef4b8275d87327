"""What became of loads, fetches and pulls: for the metrics, for the planner, and for the requests that wait for them.

On the scheduler's thread only.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from vllm_kvtier.containment import Containment
from vllm_kvtier.scheduler.hurry import Hurry
from vllm_kvtier.scheduler.lifecycle import State
from vllm_kvtier.scheduler.matching import Matcher
from vllm_kvtier.scheduler.planner import Planner
from vllm_kvtier.scheduler.tier import HostOffer
from vllm_kvtier.scheduler.tracked import Tracked
from vllm_kvtier.telemetry.stats import Counters
from vllm_kvtier.worker.fetches import FetchResult
from vllm_kvtier.worker.pulls import PullResult
from vllm_kvtier.worker.queues import ABORTED, LoadResult

Result = PullResult | FetchResult | LoadResult

_PAST = {"load": "loaded", "fetch": "fetched", "pull": "pulled"}
_PLURAL = {"load": "loads", "fetch": "fetches", "pull": "pulls"}
_WORSE = ("ok", "aborted", "failed")
_LOADING = State.LOADING, State.VERIFYING, State.ABANDONED


def _kind(result: Result) -> str:
    if isinstance(result, LoadResult):
        return "load"
    return "fetch" if isinstance(result, FetchResult) else "pull"


@dataclass
class Ended:
    """What all ranks said so far of one request's load, fetch or pull. ``outcome``: the worst; ``seconds``: of the
    slowest rank, ``exact`` or at most."""

    kind: str
    outcome: str = "ok"
    failed: bool = False
    judged: bool = False
    seconds: float = 0.0
    fenced: float = 0.0  # of ``seconds``, for which it waited for steps before it
    exact: bool = True


class Outcomes:
    def __init__(
        self,
        matcher: Matcher,
        hurry: Hurry,
        planner: Planner,
        counters: Counters,
        containment: Containment,
        codec: Callable[[str], str] = lambda kind: "raw",
        prompts_since: Callable[[float], bool] = lambda moment: False,
    ):
        """``codec``: in what form a load, fetch or pull brings KV. ``prompts_since``: as ``Pace``'s."""
        self._matcher, self._hurry, self._planner, self._counters = matcher, hurry, planner, counters
        self._codec, self._contain, self._prompts_since = codec, containment, prompts_since
        self._ended: dict[str, Ended] = {}

    def arrived(self, results: list[Result], finished: Iterable[str]) -> None:
        """``results`` of any rank; ``finished`` are the requests all ranks are through with, as vLLM counts."""
        attempt = self._contain.attempt
        judged = self._hurry.judged(results)
        # First what must not wait, and not depend on anything else: what was computed on wrong KV goes.
        for request_id in judged:
            self._contain.insist("taking back", partial(self._hurry.settle, request_id, results), unsafe=True)
        unheard = set()
        for result in results:
            name = result.request_id
            attempt("result", self._heard, result, name in judged, repair=partial(unheard.add, name))
        for request_id in set(finished) | judged:
            ended = self._ended.pop(request_id, None)
            failed = request_id in unheard or (ended is not None and ended.failed)
            attempt("end of a load", self._end, request_id, ended, failed, repair=partial(self._let_go, request_id))
        attempt("results", self._forget_late, results)

    def _forget_late(self, results: list[Result]) -> None:
        for result in results:
            if not self._under_way(result.request_id):  # as after a verdict that was given up: nobody ends it any more
                self._ended.pop(result.request_id, None)

    def _end(self, request_id: str, ended: Ended | None, failed: bool) -> None:
        """All ranks are through with it."""
        tracked = self._matcher.get(request_id)
        if ended is not None:
            self._contain.attempt("counting", self._count, ended)
        elif not failed and tracked is not None and tracked.life.state not in _LOADING:
            return  # another connector's load (MultiConnector tells each of all)
        if tracked is not None and tracked.offer is not None and not failed:
            self._contain.attempt("counting", self._succeeded, tracked, ended)
        self._matcher.loaded(request_id, failed)

    def _let_go(self, request_id: str) -> None:
        for give_back in self._matcher.let_go(request_id, ended=True):
            self._contain.attempt("giving back", give_back)

    def _under_way(self, request_id: str) -> bool:
        tracked = self._matcher.get(request_id)
        return tracked is not None and tracked.life.state in _LOADING

    def _heard(self, result: Result, judged: bool) -> None:
        """Of one rank."""
        kind, count = _kind(result), self._counters.count
        tracked = self._matcher.get(result.request_id)
        ended = self._ended.setdefault(result.request_id, Ended(kind))
        ended.outcome = max(ended.outcome, self._outcome(result, tracked), key=_WORSE.index)
        ended.judged |= judged
        ended.seconds = max(ended.seconds, result.seconds)
        ended.fenced = max(ended.fenced, getattr(result, "fenced", 0.0))
        ended.exact &= getattr(result, "timed", True)
        count(f"{_PAST[kind]}_bytes", self._codec(kind), result.bytes)
        if not result.failed:
            return
        ended.failed = True
        if kind == "load" and result.corrupt:
            count("integrity_failures", "host", len(result.corrupt))
            self._matcher.discard(result.request_id, result.corrupt)
        elif result.checksum:
            count("integrity_failures", "engine" if kind == "pull" else "gpu", len(result.bad_blocks))
            if kind == "fetch" and tracked is not None and tracked.offer is not None:
                self._matcher.nearby.failed(tracked.offer.instance)
        if kind == "fetch" and result.unmappable and tracked is not None and tracked.offer is not None:
            self._matcher.nearby.cannot_map(tracked.offer.instance, tracked.offer.alike)

    def _count(self, ended: Ended) -> None:
        """All ranks are through."""
        self._counters.count(_PLURAL[ended.kind], ended.outcome)
        if ended.judged:
            self._counters.count("synchronous_loads", ended.outcome)
        self._counters.observe(f"{ended.kind}_seconds", ended.outcome, ended.seconds)

    def _succeeded(self, t: Tracked, ended: Ended | None) -> None:
        name = {"host": "loaded_tokens", "gpu": "fetched_tokens"}.get(t.source, "pulled_tokens")
        self._counters.count(name, "" if name == "fetched_tokens" else t.source, t.pulled)
        if isinstance(t.offer, HostOffer):
            self._counters.count("loaded_logical_bytes", amount=t.offer.logical)
        elif name == "fetched_tokens" and t.offer.mapped:
            self._hurry.mapped(t.offer.instance)
        if ended is None or t.plan is None or not t.offer.place:
            return
        # What it waited for others' steps says nothing about the link.
        seconds, expected = ended.seconds - ended.fenced, t.plan.load_seconds
        # What a load took at most says something only where more was expected.
        if ended.exact or seconds < expected:
            self._planner.observe_load(t.offer.place, t.offer.nbytes, t.plan.queued_bytes, seconds)
            if expected > 0:
                self._counters.observe("planned_ratio", t.offer.place, seconds / expected)
        if t.among and not t.hurried and ended.exact:
            end = t.ordered_at + ended.seconds
            if not self._prompts_since(end):  # whoever computes waits for such a step as well
                self._planner.observe_handover(max(0.0, time.monotonic() - end))
        self._counters.count("planned_seconds", "expected", expected)
        self._counters.count("planned_seconds", "taken", seconds)
        self._count_stages(t, ended.seconds)

    def _count_stages(self, t: Tracked, seconds: float) -> None:
        """Where the time of a hit went, until it could be scheduled or, if it was scheduled at once, verified."""
        end = t.ordered_at + seconds if t.hurried else time.monotonic()
        moments = t.begun_at, t.offered_at, t.ordered_at, end
        name = "host_hit_seconds" if isinstance(t.offer, HostOffer) else "gpu_hit_seconds"
        for stage, begin, stop in zip(("asking", "placing", "loading"), moments, moments[1:], strict=False):
            self._counters.observe(name, stage, max(0.0, stop - begin))

    def _outcome(self, result: Result, tracked: Tracked | None) -> str:
        """For the metrics: a load that was stopped because its request was aborted is no failure. One that failed, and
        with it its request (``kv_load_failure_policy`` "fail"), is."""
        abandoned = tracked is not None and tracked.life.state is State.ABANDONED
        aborted = abandoned and isinstance(result, LoadResult) and result.reason == ABORTED
        return "ok" if not result.failed else "aborted" if aborted and not result.checksum else "failed"
