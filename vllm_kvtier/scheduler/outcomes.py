"""What became of loads, fetches and pulls: for the metrics, for the planner, and for the requests that wait for them.

On the scheduler's thread only.
"""

import time
from collections.abc import Iterable

from vllm_kvtier.scheduler.hurry import Hurry
from vllm_kvtier.scheduler.lifecycle import State
from vllm_kvtier.scheduler.matching import Matcher
from vllm_kvtier.scheduler.planner import Planner
from vllm_kvtier.scheduler.tier import HostOffer
from vllm_kvtier.scheduler.tracked import Tracked
from vllm_kvtier.telemetry.stats import Counters
from vllm_kvtier.worker.fetches import FetchResult
from vllm_kvtier.worker.pulls import PullResult
from vllm_kvtier.worker.queues import LoadResult

Result = PullResult | FetchResult | LoadResult

_PAST = {"load": "loaded", "fetch": "fetched", "pull": "pulled"}
_PLURAL = {"load": "loads", "fetch": "fetches", "pull": "pulls"}


def _kind(result: Result) -> str:
    if isinstance(result, LoadResult):
        return "load"
    return "fetch" if isinstance(result, FetchResult) else "pull"


class Outcomes:
    def __init__(self, matcher: Matcher, hurry: Hurry, planner: Planner, counters: Counters):
        self._matcher, self._hurry, self._planner, self._counters = matcher, hurry, planner, counters
        self._failed: set[str] = set()
        self._slowest: dict[str, tuple[float, bool]] = {}  # request -> seconds of the slowest rank, exact or at most

    def arrived(self, results: list[Result], finished: Iterable[str]) -> None:
        """``results`` of any rank; ``finished`` are the requests all ranks are through with, as vLLM counts."""
        judged = self._hurry.judged(results)
        for result in results:
            self._count(result, result.request_id in judged)
        for request_id in set(finished) | judged:
            self._hurry.settle(request_id, results)
            failed = request_id in self._failed
            self._failed.discard(request_id)
            slowest = self._slowest.pop(request_id, None)
            tracked = self._matcher.get(request_id)
            if tracked is not None and tracked.offer is not None and not failed:
                self._succeeded(tracked, slowest)
            self._matcher.loaded(request_id, failed)

    def _count(self, result: Result, judged: bool) -> None:
        kind, count = _kind(result), self._counters.count
        tracked = self._matcher.get(result.request_id)
        count(_PLURAL[kind], self._outcome(result, tracked))
        if judged:
            count("synchronous_loads", self._outcome(result, tracked))
        count(f"{_PAST[kind]}_bytes", amount=result.bytes)
        count(f"{kind}_seconds", amount=result.seconds)
        if result.failed:
            self._failed.add(result.request_id)
            if kind == "load" and result.corrupt:
                count("integrity_failures", amount=len(result.corrupt))
                self._matcher.discard(result.request_id, result.corrupt)
            elif result.checksum:
                count("integrity_failures", amount=len(result.bad_blocks))
                if kind == "fetch" and tracked is not None and tracked.offer is not None:
                    self._matcher.nearby.failed(tracked.offer.instance)
            if kind == "fetch" and result.unmappable and tracked is not None and tracked.offer is not None:
                self._matcher.nearby.cannot_map(tracked.offer.instance, tracked.offer.alike)
        else:
            seconds, timed = self._slowest.get(result.request_id, (0.0, True))
            exact = timed and getattr(result, "timed", True)
            self._slowest[result.request_id] = max(result.seconds, seconds), exact

    def _succeeded(self, t: Tracked, slowest: tuple[float, bool] | None) -> None:
        name = {"host": "loaded_tokens", "gpu": "fetched_tokens"}.get(t.source, "pulled_tokens")
        self._counters.count(name, "" if name == "fetched_tokens" else t.source, t.pulled)
        if isinstance(t.offer, HostOffer):
            self._counters.count("loaded_logical_bytes", amount=t.offer.logical)
        if slowest is None or t.plan is None or not t.offer.place:
            return
        seconds, timed = slowest
        # What a load took at most says something only where more was expected.
        if timed or seconds < t.plan.load_seconds:
            self._planner.observe_load(t.offer.place, t.offer.nbytes, t.plan.queued_bytes, seconds)
        self._counters.count("planned_seconds", "expected", t.plan.load_seconds)
        self._counters.count("planned_seconds", "taken", seconds)
        self._count_stages(t, seconds)

    def _count_stages(self, t: Tracked, seconds: float) -> None:
        """Where the time of a hit went, until it could be scheduled or, if it was scheduled at once, verified."""
        end = t.ordered_at + seconds if t.hurried else time.monotonic()
        moments = t.begun_at, t.offered_at, t.ordered_at, end
        name = "host_hit_seconds" if isinstance(t.offer, HostOffer) else "gpu_hit_seconds"
        for stage, begin, stop in zip(("asking", "placing", "loading"), moments, moments[1:], strict=False):
            self._counters.count(name, stage, max(0.0, stop - begin))

    def _outcome(self, result: Result, tracked: Tracked | None) -> str:
        """For the metrics: a load that was stopped because its request was aborted is no failure."""
        aborted = tracked is not None and tracked.life.state is State.ABANDONED and isinstance(result, LoadResult)
        return "ok" if not result.failed else "aborted" if aborted and not result.checksum else "failed"
