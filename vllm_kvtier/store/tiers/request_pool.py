"""Blocking requests on threads, and the scheduling of many blocks, for processes of tiers that make them."""

import enum
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from vllm_kvtier.errors import KVTierError
from vllm_kvtier.store.tiers.process.main import TierProcessMain


class Kind(enum.Enum):
    ABSENT = "absent"  # no such object
    FORBIDDEN = "forbidden"  # or absent, if the bucket may not be listed
    DENIED = "denied"  # credentials are missing, wrong or expired
    FULL = "full"  # no room for another object
    THROTTLED = "throttled"  # the store limits the rate of requests
    PASSING = "passing"  # the same request may succeed the next time
    FAILED = "failed"  # anything else


class Trouble(KVTierError):
    """A failed request; its text may be logged."""

    def __init__(self, text: str, kind: Kind = Kind.FAILED):
        super().__init__(text)
        self.kind = kind


Done = Callable[[Trouble | None], None]


class RequestPool:
    """Threads that make blocking calls; results are delivered on the reactor's thread."""

    def __init__(self, host: TierProcessMain, count: int, name: str):
        self._host, self._closed = host, False
        self._threads = ThreadPoolExecutor(count, f"kvtier-{name}")

    def do(self, call: Callable[[], object], done: Callable[[object], None]) -> None:
        """``done`` gets the result of ``call`` or the Trouble that it raised. Another exception ends the tier process;
        only its class is logged, because a library's text may contain secrets."""

        def run() -> None:
            try:
                result = call()
            except Trouble as trouble:
                result = trouble
            except Exception as error:
                self._host.fail(f"unexpected error in a request: {type(error).__name__}")
                return
            self._host.reactor.call_soon(self._host.guard(lambda: deliver(result)))

        def deliver(result: object) -> None:
            if not self._closed:
                done(result)

        if not self._closed:
            self._threads.submit(run)

    def close(self) -> None:
        self._closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)


class Job:
    """``count`` blocks to move. ``start(i, done)`` starts block i. ``over(troubles)`` is called once, when no block is
    in flight; by block, None for a moved one. After a failure no block is started: a prefix with a gap is useless, and
    a failed server would time out for each block."""

    def __init__(self, count: int, start: Callable[[int, Done], None], over: Callable[[list[Trouble | None]], None]):
        self.waiting = deque(range(count))
        self.under_way = 0
        self._troubles: list[Trouble | None] = [None] * count
        self._start, self._over = start, over
        self._ended = False

    def start_next(self, ended: Callable[[], None]) -> None:
        i = self.waiting.popleft()
        self.under_way += 1

        def done(trouble: Trouble | None) -> None:
            self._troubles[i] = trouble
            self.under_way -= 1
            while trouble is not None and self.waiting:
                self._troubles[self.waiting.popleft()] = trouble
            ended()

        self._start(i, done)

    def end_if_done(self) -> bool:
        if self.waiting or self.under_way:
            return False
        if not self._ended:
            self._ended = True
            self._over(self._troubles)
        return True


class Lane:
    """Runs jobs with ``width`` blocks in flight. Takes one block of each job in turn, so that short jobs do not wait
    for long ones."""

    def __init__(self, width: int):
        self._free, self._jobs = width, deque[Job]()
        self._starting = False

    def add(self, job: Job) -> None:
        """A job without blocks is over at once, also if another job's ``over`` adds it."""
        if not job.end_if_done():
            self._jobs.append(job)
            self._start_more()

    def _start_more(self) -> None:
        if self._starting:  # a block ended at once; a call for each of a long job would exceed the recursion limit
            return
        self._starting = True
        try:
            while True:
                for job in list(self._jobs):
                    if job.end_if_done():
                        self._jobs.remove(job)
                waiting = next((job for job in self._jobs if job.waiting), None) if self._free else None
                if waiting is None:
                    return
                self._jobs.remove(waiting)
                self._jobs.append(waiting)
                self._free -= 1
                waiting.start_next(self._block_ended)
        finally:
            self._starting = False

    def _block_ended(self) -> None:
        self._free += 1
        self._start_more()


class Presence:
    """A cache of whether objects exist: ``limit`` entries, each valid for its time in seconds."""

    def __init__(
        self,
        limit: int,
        there_seconds: float,
        absent_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._limit, self._clock = limit, clock
        self._seconds = {True: there_seconds, False: absent_seconds}
        self._seen: OrderedDict[str, tuple[bool, float]] = OrderedDict()

    def get(self, key: str) -> bool | None:
        """None: unknown or outdated."""
        there, until = self._seen.get(key, (None, 0.0))
        return there if there is not None and self._clock() < until else None

    def saw(self, key: str, there: bool) -> None:
        self._seen.pop(key, None)
        self._seen[key] = there, self._clock() + self._seconds[there]
        if len(self._seen) > self._limit:
            self._seen.popitem(last=False)

    def __len__(self) -> int:
        return len(self._seen)
